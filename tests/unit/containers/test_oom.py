"""Which memory is watched: that of running containers with a limit, and of no others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.containers import oom
from engine.errors import ServerError
from tests.support.fakes.world import World, run, world

__all__ = ["world"]


class Events:
    """`MemoryEvents`."""

    def __init__(self) -> None:
        self.watched: set[Path] = set()

    def watch(self, directory: Path, observer: Callable[[], None], *, missed: bool = False) -> None:
        self.watched.add(directory)
        if missed:
            observer()  # a process was killed before it was watched

    def unwatch(self, directory: Path) -> None:
        self.watched.discard(directory)


def test_from_the_start_to_the_end_of_a_run(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    events = Events()
    monkeypatch.setattr(oom, "MemoryEvents", lambda: events)

    async def story() -> None:
        engine = await world.boot()
        cgroups: Any = SimpleNamespace(directory=lambda controller, path: Path(path))
        oom.OomNotices(cgroups, engine.containers.lifecycle)
        container = engine.containers.get(await engine.create(memory=64 << 20, memory_swap=-1))

        async def fill(name: str) -> None:
            world.disk_full = world.disk_full or name == "monitor run answered"

        world.decide = fill
        with pytest.raises(ServerError, match="disk is full"):
            await container.start()
        assert not events.watched, "its row could not be saved: it does not run"
        world.disk_full, world.decide = False, None
        await container.start()
        assert events.watched == {Path(container.cgroup)}
        assert [event.action for event in engine.parts.events.history(0)][-2:] == ["start", "oom"]
        await container.pause()
        assert events.watched, "a pause is no end"
        await container.kill(9)
        assert not events.watched

    run(story())
