"""Notices of groups that run out of memory, on directories that stand for those of the kernel
(v2) and on the kernel's own (v1).
"""

from __future__ import annotations

import asyncio
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
