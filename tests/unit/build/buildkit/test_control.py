"""Builds that clients ask for: how their results end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine.build.buildkit import control
from engine.build.buildkit.control import Control
from engine.build.buildkit.control_messages import SolveRequest
from engine.errors import NotFound

ABSENT: Any = None


def test_results_that_are_dropped_while_a_build_ends() -> None:
    async def work() -> None:
        found = Control(control.Parts(*[ABSENT] * 5))
        job = control._Job(SolveRequest(ref="one"))
        slow = asyncio.Event()

        async def build() -> str:
            try:
                await asyncio.Event().wait()
            finally:
                await slow.wait()
            return ""

        for result_id in ("a", "b"):
            result = found._results[result_id] = control._Result(job, ABSENT)
            job.results.add(result_id)
            result.building = asyncio.create_task(build())
        await asyncio.sleep(0)
        tasks = [result.building for result in found._results.values()]
        ending = asyncio.create_task(found._end(job))
        await asyncio.sleep(0)
        found._results.clear()  # as another build's results do that come meanwhile
        slow.set()
        await ending
        assert all(task is not None and task.cancelled() for task in tasks)

    asyncio.run(work())


def test_results_are_no_longer_used_after_a_build_whose_end_is_cancelled() -> None:
    class Uses:
        released = 0

        async def release(self) -> None:
            self.released += 1

    async def work() -> None:
        found = Control(control.Parts(*[ABSENT] * 5))
        job = control._Job(SolveRequest(ref="one"))
        slow = asyncio.Event()

        async def build() -> str:
            try:
                await asyncio.Event().wait()
            finally:
                await slow.wait()
            return ""

        uses: list[Any] = [Uses(), Uses()]
        tasks = []
        for result_id, used in zip(("a", "b"), uses, strict=True):
            result = found._results[result_id] = control._Result(job, ABSENT)
            job.results.add(result_id)
            result.building, result.uses = asyncio.create_task(build()), used
            tasks.append(result.building)
        await asyncio.sleep(0)
        ending = asyncio.create_task(found._end(job))
        await asyncio.sleep(0)
        ending.cancel()
        await asyncio.sleep(0)
        slow.set()
        with pytest.raises(asyncio.CancelledError):
            await ending
        assert [used.released for used in uses] == [1, 1]
        assert all(task.cancelled() for task in tasks)

    asyncio.run(work())


def test_a_result_is_not_built_for_another_build_of_the_same_reference() -> None:
    async def work() -> None:
        found = Control(control.Parts(*[ABSENT] * 5))
        found._results["a"] = control._Result(control._Job(SolveRequest(ref="one")), ABSENT)
        found._jobs["one"] = control._Job(SolveRequest(ref="one"))
        with pytest.raises(NotFound, match="the build of result a has ended without an image"):
            await found._image_of("a")

    asyncio.run(work())
