"""Builds that clients ask for: how their results end."""

from __future__ import annotations

import asyncio
from typing import Any

from engine.build.buildkit import control
from engine.build.buildkit.control import Control
from engine.build.buildkit.control_messages import SolveRequest

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
