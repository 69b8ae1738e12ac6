"""The worker of `reconcile`, by a clock that the test sets: every key, and one after the other."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Coroutine

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.system.reconcile import Backoff, Reconciler, either, first_of
from tests.support.fakes.clock import FakeClock


def in_a_loop(test: Callable[[], Coroutine[None, None, None]]) -> Callable[[], None]:
    @functools.wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


class Steps:
    """A reconciler whose steps the test decides."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.began: list[tuple[str, float]] = []
        self.failures: dict[str, int] = {}
        """How often the step of a key still fails."""
        self.again: dict[str, list[float]] = {}
        """The seconds that the next steps return."""
        self.held: dict[str, asyncio.Event] = {}
        """Steps that last until the event."""
        self.reported: list[tuple[str, str, float]] = []
        self.work: Reconciler[str] = Reconciler(
            self.step, self.failed, what=str, backoff=lambda: Backoff(1.0, 8.0), sleep=self.clock.sleep
        )

    async def step(self, key: str) -> float | None:
        self.began.append((key, self.clock.monotonic()))
        if (held := self.held.get(key)) is not None:
            await held.wait()
        if self.failures.get(key, 0):
            self.failures[key] -= 1
            raise OSError(f"{key} is busy")
        return self.again[key].pop(0) if self.again.get(key) else None

    def failed(self, key: str, error: Exception, seconds: float) -> None:
        self.reported.append((key, str(error), seconds))

    def times(self, key: str) -> list[float]:
        return [time for each, time in self.began if each == key]


@in_a_loop
async def test_a_key_that_needs_nothing_more_costs_nothing() -> None:
    here = Steps()
    here.work.mark("a")
    await here.clock.settle()
    assert here.began == [("a", 0.0)] and len(here.work) == 0
    here.work.mark("a")
    await here.clock.settle()
    assert here.times("a") == [0.0, 0.0]


@in_a_loop
async def test_pauses_double_and_begin_again_after_a_success() -> None:
    here = Steps()
    here.failures["a"] = 6
    here.again["a"] = [0.5]
    here.work.mark("a")
    await here.clock.advance(31)
    assert [seconds for _, _, seconds in here.reported] == [1, 2, 4, 8, 8, 8]
    assert here.times("a") == [0, 1, 3, 7, 15, 23, 31]
    here.failures["a"] = 1
    await here.clock.advance(1.5)
    assert here.reported[-1] == ("a", "a is busy", 1.0)
    assert here.times("a")[-2:] == [31.5, 32.5] and len(here.work) == 0


@in_a_loop
async def test_one_that_cannot_succeed_does_not_delay_others() -> None:
    here = Steps()
    here.failures["bad"] = 1000
    here.held["slow"] = asyncio.Event()
    for key in ("bad", "slow", "good"):
        here.work.mark(key)
    await here.clock.settle()
    assert here.times("good") == [0.0] and len(here.work) == 2
    here.work.mark("good")
    await here.clock.advance(0.5)
    assert here.times("good") == [0.0, 0.0]
    await here.work.close()


@in_a_loop
async def test_marks_within_a_step_become_one_more_step() -> None:
    here = Steps()
    here.held["a"] = asyncio.Event()
    here.work.mark("a")
    await here.clock.settle()
    assert not here.work.marked("a")
    for _ in range(5):
        here.work.mark("a")
    assert here.work.marked("a")
    here.held.pop("a").set()
    await here.clock.settle()
    assert len(here.began) == 2 and len(here.work) == 0


@in_a_loop
async def test_an_urgent_mark_ends_the_pause_after_a_failure() -> None:
    here = Steps()
    here.failures["a"] = 2
    here.work.mark("a")
    await here.clock.advance(0.1)
    here.work.mark("a")
    await here.clock.advance(0.1)
    assert here.times("a") == [0.0]
    here.work.mark("a", urgent=True)
    await here.clock.settle()
    assert here.times("a") == pytest.approx([0.0, 0.2])
    await here.clock.advance(2)
    assert here.times("a") == pytest.approx([0.0, 0.2, 2.2])


@in_a_loop
async def test_an_urgent_mark_of_before_the_failure_does_not() -> None:
    """Otherwise a step that marks its own key and fails would repeat without a pause."""
    here = Steps()
    here.failures["a"] = 1
    held = here.held["a"] = asyncio.Event()
    here.work.mark("a")
    await here.clock.settle()
    here.work.mark("a", urgent=True)
    del here.held["a"]
    held.set()
    await here.clock.advance(0.9)
    assert len(here.began) == 1
    await here.clock.advance(0.1)
    assert len(here.began) == 2


@in_a_loop
async def test_any_mark_ends_the_pause_that_a_step_asked_for() -> None:
    here = Steps()
    here.again["a"] = [5.0, 5.0]
    here.work.mark("a")
    await here.clock.advance(1)
    here.work.mark("a")
    await here.clock.advance(5)
    assert here.times("a") == [0, 1, 6]


@in_a_loop
async def test_closing_cancels_all_and_ignores_marks() -> None:
    here = Steps()
    here.held["within"] = asyncio.Event()
    here.failures["pausing"] = 1
    for key in ("within", "pausing"):
        here.work.mark(key)
    await here.clock.settle()
    here.work.mark("not begun")
    await here.work.close()
    here.work.mark("a")
    await here.clock.advance(10)
    assert len(here.work) == 0 and {key for key, _ in here.began} == {"within", "pausing"}
    here.work.open()
    here.work.mark("not begun")
    await here.clock.settle()
    assert here.times("not begun") == [10.0]


@given(seed=st.integers(0, 2**32), failing=st.dictionaries(st.sampled_from("abc"), st.integers(0, 5)))
def test_every_mark_is_followed_by_a_step_that_succeeds(seed: int, failing: dict[str, int]) -> None:
    """Whatever the order of marks, failures and time, no two steps of a key overlap, each change is
    seen by a step that begins after it, and in the end nothing is left to do.
    """
    chance = random.Random(seed)
    wanted = dict.fromkeys("abc", 0)
    done = dict.fromkeys("abc", 0)
    within: set[str] = set()
    clock = FakeClock()

    async def step(key: str) -> float | None:
        assert key not in within
        within.add(key)
        try:
            seen = wanted[key]
            await clock.sleep(chance.choice((0, 0.1, 3)))
            if failing.get(key, 0):
                failing[key] -= 1
                raise OSError
            done[key] = seen
            return chance.choice((None, 0.0, 0.3))
        finally:
            within.remove(key)

    async def scene() -> None:
        work: Reconciler[str] = Reconciler(
            step, lambda *_: None, what=str, backoff=lambda: Backoff(0.5, 4.0), sleep=clock.sleep
        )
        for _ in range(30):
            key = chance.choice("abc")
            wanted[key] += 1
            work.mark(key, urgent=chance.random() < 0.3)
            await clock.advance(chance.choice((0, 0.05, 1)))
        await clock.advance(200)
        assert done == wanted and len(work) == 0

    asyncio.run(scene())


@given(first=st.floats(0.001, 10), times=st.integers(1, 2000), factor=st.floats(1, 1000), jitter=st.booleans())
def test_pauses_stay_within_their_bounds(first: float, times: int, factor: float, jitter: bool) -> None:
    backoff = Backoff(first, first * factor, jitter=jitter)
    pauses = [backoff.failed() for _ in range(times)]
    assert backoff.failures == times
    for number, seconds in enumerate(pauses):
        full = min(first * factor, first * 2.0 ** min(number, 1000))
        assert full / (2 if jitter else 1) <= seconds <= full
    backoff.reset()
    assert backoff.failed() <= first


@in_a_loop
async def test_either_ends_by_the_event_or_by_the_time() -> None:
    clock, event = FakeClock(), asyncio.Event()
    waiting = asyncio.ensure_future(either(event, 5, clock.sleep))
    await clock.advance(4.9)
    assert not waiting.done()
    await clock.advance(0.1)
    assert await waiting is False
    waiting = asyncio.ensure_future(either(event, 5, clock.sleep))
    await clock.advance(1)
    event.set()
    assert await waiting is True
    assert await either(event, None) is True and await either(event, 0) is True
    assert await either(asyncio.Event(), 0) is False


@in_a_loop
async def test_the_first_cancels_the_others() -> None:
    never = asyncio.get_running_loop().create_future()
    assert not await first_of(never, asyncio.sleep(0))
    assert never.cancelled()
    never = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(first_of(asyncio.Event().wait(), never))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert never.cancelled()
