"""Builds that clients ask for: how their results end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine.builder.buildkit import control
from engine.builder.buildkit.control import Control
from engine.builder.buildkit.control_messages import SolveRequest
from engine.errors import NotFound

ABSENT: Any = None


class Uses:
    """Stands in for what a result uses of the cache."""

    released = 0

    async def release(self) -> None:
        self.released += 1


class Ending:
    """A build with two results that are being made, and its end, which waits for `slow`."""

    def __init__(self) -> None:
        self.control = Control(control.Parts(*[ABSENT] * 5))
        self.job = control._Job(SolveRequest(ref="one"))
        self.slow = asyncio.Event()
        self.tasks: list[asyncio.Task[str]] = []
        self.uses: list[Any] = []

    async def begin(self) -> asyncio.Task[None]:
        for result_id in ("a", "b"):
            result = self.control._results[result_id] = control._Result(self.job, ABSENT)
            self.job.results.add(result_id)
            result.building, result.uses = asyncio.create_task(self._build()), Uses()
            self.tasks.append(result.building)
            self.uses.append(result.uses)
        await asyncio.sleep(0)
        ending = asyncio.create_task(self.control._end(self.job))
        await asyncio.sleep(0)
        return ending

    async def _build(self) -> str:
        try:
            await asyncio.Event().wait()
        finally:
            await self.slow.wait()
        return ""

    def check(self) -> None:
        """Nothing is left of the build."""
        assert all(task.cancelled() for task in self.tasks)
        assert [used.released for used in self.uses] == [1, 1]


def test_results_that_are_dropped_while_a_build_ends() -> None:
    async def work() -> None:
        build = Ending()
        ending = await build.begin()
        build.control._results.clear()  # as another build's results do that come meanwhile
        build.slow.set()
        await ending
        build.check()

    asyncio.run(work())


def test_results_are_no_longer_used_after_a_build_whose_end_is_cancelled() -> None:
    async def work() -> None:
        build = Ending()
        ending = await build.begin()
        ending.cancel()
        await asyncio.sleep(0)
        build.slow.set()
        with pytest.raises(asyncio.CancelledError):
            await ending
        build.check()

    asyncio.run(work())


def test_a_result_is_not_built_for_another_build_of_the_same_reference() -> None:
    async def work() -> None:
        found = Control(control.Parts(*[ABSENT] * 5))
        found._results["a"] = control._Result(control._Job(SolveRequest(ref="one")), ABSENT)
        found._jobs["one"] = control._Job(SolveRequest(ref="one"))
        with pytest.raises(NotFound, match="the build of result a has ended without an image"):
            await found._image_of("a")

    asyncio.run(work())
