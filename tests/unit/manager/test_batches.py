"""Work that is collected: when it is done, and what happens to callers."""

from __future__ import annotations

import asyncio

import pytest

from engine.errors import ServerError
from engine.manager.batches import FIRST, FULL, PAUSE, Batches
from tests.support.fakes.clock import FakeClock


class Work:
    def __init__(self, clock: FakeClock) -> None:
        self.done: list[list[int]] = []
        self.fails: Exception | None = None
        self.held: asyncio.Event | None = None
        self.batches: Batches[int, int] = Batches(clock, self, "test")

    async def __call__(self, items: list[int]) -> list[int]:
        self.done.append(items)
        if self.held is not None:
            await self.held.wait()
        if self.fails is not None:
            raise self.fails
        return [2 * item for item in items]


async def test_the_first_item_waits_for_a_moment_and_the_next_ones_longer(clock: FakeClock) -> None:
    work = Work(clock)
    await clock.advance(1)
    first = asyncio.ensure_future(work.batches.add([1]))
    await clock.advance(FIRST)
    assert list(first.result()) == [2]
    others = [asyncio.ensure_future(work.batches.add([n, -n])) for n in (2, 3)]
    await clock.advance(PAUSE - 2 * FIRST)
    assert work.done == [[1]]
    await clock.advance(2 * FIRST)
    assert work.done == [[1], [2, -2, 3, -3]]
    assert [list(each.result()) for each in others] == [[4, -4], [6, -6]]
    await clock.advance(1)
    assert work.batches._worker is None


async def test_an_urgent_item_takes_the_others_with_it(clock: FakeClock) -> None:
    work = Work(clock)
    await clock.advance(1)
    first = asyncio.ensure_future(work.batches.add([1]))
    await clock.advance(FIRST)
    assert first.done()
    patient = asyncio.ensure_future(work.batches.add([2]))
    await clock.advance(FIRST)
    assert not patient.done()
    urgent = asyncio.ensure_future(work.batches.add([3], urgent=True))
    await clock.advance(FIRST)
    assert patient.done()
    assert urgent.done()
    assert work.done == [[1], [2, 3]]
    again = asyncio.ensure_future(work.batches.add([4], urgent=True))
    await clock.advance(FIRST)
    assert again.done()
    last = asyncio.ensure_future(work.batches.add([5]))  # the hurry is over
    await clock.advance(PAUSE - 2 * FIRST)
    assert not last.done()
    await clock.advance(2 * FIRST)
    assert last.done()


async def test_a_full_batch_does_not_wait(clock: FakeClock) -> None:
    work = Work(clock)
    adding = [asyncio.ensure_future(work.batches.add([n])) for n in range(FULL)]
    await clock.settle()
    assert len(work.done) == 1
    assert all(each.done() for each in adding)


async def test_items_that_come_during_the_work_are_done_after_it(clock: FakeClock) -> None:
    work = Work(clock)
    work.held = asyncio.Event()
    first = asyncio.ensure_future(work.batches.add([1]))
    await clock.advance(FIRST)
    second = asyncio.ensure_future(work.batches.add([2]))
    await clock.advance(5)
    assert work.done == [[1]]
    work.held.set()
    await clock.advance(1)
    assert work.done == [[1], [2]]
    assert first.done()
    assert second.done()


async def test_a_failure_reaches_all_callers_of_its_batch_and_no_other(clock: FakeClock) -> None:
    work = Work(clock)
    work.fails = ServerError("no quorum")
    failing = [asyncio.ensure_future(work.batches.add([n])) for n in range(3)]
    await clock.advance(1)
    for each in failing:
        with pytest.raises(ServerError, match="no quorum"):
            await each
    work.fails = None
    later = asyncio.ensure_future(work.batches.add([7]))
    await clock.advance(1)
    assert list(later.result()) == [14]


async def test_a_caller_that_is_cancelled_changes_nothing_for_the_others(clock: FakeClock) -> None:
    work = Work(clock)
    adding = [asyncio.ensure_future(work.batches.add([n])) for n in (1, 2)]
    await clock.settle()
    adding[0].cancel()
    await clock.advance(1)
    assert work.done == [[1, 2]], "a change that was asked for is made"
    assert list(adding[1].result()) == [4]
    assert await work.batches.add([]) == ()


@pytest.mark.parametrize("busy", [False, True])
async def test_close_cancels_those_who_wait(clock: FakeClock, busy: bool) -> None:
    work = Work(clock)
    work.held = asyncio.Event()
    adding = asyncio.ensure_future(work.batches.add([1]))
    await clock.advance(1 if busy else 0)
    await work.batches.close()
    with pytest.raises(asyncio.CancelledError):
        await adding
    await work.batches.close()
