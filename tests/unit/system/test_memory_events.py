"""Notices of groups that run out of memory, on directories that stand for those of the kernel."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from pathlib import Path

from engine.system.memory_events import MemoryEvents


def _told(directory: Path, kills: int) -> None:
    # The kernel modifies the file in place.
    with open(directory / "memory.events", "r+") as file:
        file.write(f"low 0\nhigh 0\nmax 7\noom 3\noom_kill {kills}\n")


def test_v2_tells_of_kills_alone(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for group in (one, two):
        group.mkdir()
        (group / "memory.events").write_text("low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\n")
    seen: list[str] = []

    async def story() -> None:
        events = MemoryEvents()
        events.watch(one, lambda: seen.append("one"))
        events.watch(one, lambda: seen.append("twice"))
        events.watch(two, lambda: seen.append("two"))
        _told(one, 0)  # it met its limit, and nothing was killed
        await asyncio.sleep(0.05)
        assert not seen
        _told(one, 1)
        await asyncio.sleep(0.05)
        assert seen == ["one"]
        events.unwatch(one)
        _told(one, 2)
        _told(two, 2)
        await asyncio.sleep(0.05)
        assert seen == ["one", "two"]
        (two / "memory.events").unlink()  # the group is removed
        await asyncio.sleep(0.05)
        events.unwatch(two)
        events.close()
        events.close()

    asyncio.run(story())


def test_v2_tells_of_an_earlier_kill_if_asked(tmp_path: Path) -> None:
    """A process can be killed between the start of a run and the first look at its group."""
    seen: list[str] = []
    for name in ("new", "known"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "memory.events").write_text("low 0\nhigh 0\nmax 7\noom 3\noom_kill 1\n")

    async def story() -> None:
        events = MemoryEvents()
        events.watch(tmp_path / "new", lambda: seen.append("new"), missed=True)
        events.watch(tmp_path / "known", lambda: seen.append("known"))
        assert seen == ["new"]
        _told(tmp_path / "new", 1)
        await asyncio.sleep(0.05)
        assert seen == ["new"], "once for each kill"
        _told(tmp_path / "new", 2)
        await asyncio.sleep(0.05)
        assert seen == ["new", "new"]
        events.close()

    asyncio.run(story())


def test_v1_tells_of_an_earlier_kill_if_asked(tmp_path: Path) -> None:
    seen: list[str] = []
    for name, kills in (("new", 2), ("quiet", 0), ("known", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")

    async def story() -> None:
        events = MemoryEvents()
        for name in ("new", "quiet", "known"):
            events.watch(tmp_path / name, partial(seen.append, name), missed=name != "known")
        assert seen == ["new"]
        eventfd, _ = (tmp_path / "quiet" / "cgroup.event_control").read_text().split()
        os.eventfd_write(int(eventfd), 1)
        await asyncio.sleep(0.05)
        assert seen == ["new", "quiet"]
        events.close()

    asyncio.run(story())
