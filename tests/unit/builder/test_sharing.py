"""Equal steps of builds at one time run once, fail together, and end with their last build."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine.builder.output import Log
from engine.builder.reports import Notice
from engine.builder.sharing import SharedSteps
from engine.builder.state import State
from engine.errors import ServerError


class Work:
    """A step that waits to be let go on."""

    def __init__(self) -> None:
        self.runs = 0
        self.cancelled = False
        self.go_on = asyncio.Event()
        self.failure: Exception | None = None

    async def __call__(self, log: Log) -> State:
        self.runs += 1
        log.say("working ")
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if self.failure is not None:
            raise self.failure
        log.say("done")
        return State(key="k", image_id=f"sha256:{self.runs}")


async def text(log: Log) -> str:
    log.close()
    return "".join([report.text async for report in log.read() if isinstance(report, Notice)])


def test_two_builds_share_one_run_and_both_show_its_output(tmp_path: Path) -> None:
    async def run() -> None:
        shared, work, logs = SharedSteps(tmp_path), Work(), [Log(tmp_path), Log(tmp_path)]
        first = asyncio.create_task(shared.once("k", logs[0], work))
        await asyncio.sleep(0)
        second = asyncio.create_task(shared.once("k", logs[1], work))
        await asyncio.sleep(0)
        work.go_on.set()
        assert await first == await second
        assert work.runs == 1
        assert [await text(log) for log in logs] == ["working done"] * 2
        await shared.once("k", Log(tmp_path), work)
        assert work.runs == 2, "a run that has ended is not shared"

    asyncio.run(run())


def test_the_first_build_may_leave(tmp_path: Path) -> None:
    async def run() -> None:
        shared, work = SharedSteps(tmp_path), Work()
        first = asyncio.create_task(shared.once("k", Log(tmp_path), work))
        await asyncio.sleep(0)
        second = asyncio.create_task(shared.once("k", Log(tmp_path), work))
        await asyncio.sleep(0)
        first.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not first.done(), "the run reads what belongs to the first build"
        work.go_on.set()
        assert (await second).image_id == "sha256:1"
        assert not work.cancelled
        with pytest.raises(asyncio.CancelledError):
            await first

    asyncio.run(run())


def test_all_builds_may_leave_in_any_order(tmp_path: Path) -> None:
    async def run() -> None:
        shared, work = SharedSteps(tmp_path), Work()
        builds = [asyncio.create_task(shared.once("k", Log(tmp_path), work)) for _ in range(3)]
        for each in (builds[1], builds[0], builds[2]):
            await asyncio.sleep(0)
            each.cancel()
        found = await asyncio.gather(*builds, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in found)
        assert work.cancelled

    asyncio.run(run())


def test_the_last_build_that_leaves_cancels_the_run_and_waits_for_its_end(tmp_path: Path) -> None:
    async def run() -> None:
        shared, work = SharedSteps(tmp_path), Work()
        waiting = asyncio.create_task(shared.once("k", Log(tmp_path), work))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert work.cancelled
        work.go_on.set()
        await shared.once("k", Log(tmp_path), work)
        assert work.runs == 2

    asyncio.run(run())


def test_a_failure_is_that_of_every_build(tmp_path: Path) -> None:
    async def run() -> None:
        shared, work = SharedSteps(tmp_path), Work()
        work.failure = ServerError("no")
        work.go_on.set()
        found = await asyncio.gather(*(shared.once("k", Log(tmp_path), work) for _ in range(3)), return_exceptions=True)
        assert [str(each) for each in found] == ["no"] * 3
        assert work.runs == 1

    asyncio.run(run())
