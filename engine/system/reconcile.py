"""Work that is repeated until it succeeds: growing pauses, waits that end early, and a worker that
drives each key to the state that is wanted.

`Reconciler` is level-triggered. A mark says that something about a key has changed, not what: the
step compares what is wanted with what is there. Marks that come while a step runs become one more
step. Each key has a driver of its own, which is there only while the key has work. So a key that
cannot succeed does not delay others, and an idle key costs nothing.

Owns:    the drivers.
Threads: the event loop's.
Raises:  nothing: what a step raises is passed to `failed`, and the step is repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from typing import Generic, TypeVar

from engine.system.tasks import spawn

K = TypeVar("K", bound=Hashable)

Sleep = Callable[[float], Coroutine[None, None, None]]
"""The sleep of another clock than the loop's."""


def pause(failures: int, first: float, longest: float) -> float:
    """Seconds until the next attempt after so many failures in sequence, of which the first counts
    1: `first`, doubled by each failure, at most `longest`.
    """
    return min(longest, first * 2.0 ** min(failures - 1, 32))


def jittered(seconds: float) -> float:
    """Between half of it and all: peers that failed together do not try again together."""
    return seconds * random.uniform(0.5, 1.0)


class Backoff:
    """The pauses of one sequence of attempts."""

    __slots__ = ("_first", "_jitter", "_longest", "failures")

    def __init__(self, first: float, longest: float, *, jitter: bool = False) -> None:
        self._first, self._longest, self._jitter = first, longest, jitter
        self.failures = 0
        """In sequence."""

    def failed(self) -> float:
        """Seconds until the next attempt."""
        self.failures += 1
        seconds = pause(self.failures, self._first, self._longest)
        return jittered(seconds) if self._jitter else seconds

    def reset(self) -> None:
        """An attempt has succeeded."""
        self.failures = 0


async def first_of(work: Awaitable[object], *others: Awaitable[object]) -> bool:
    """Wait until one of these is done, and cancel the rest. Returns True if `work` is done. What it
    raised is left to the caller.
    """
    waits = [asyncio.ensure_future(each) for each in (work, *others)]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        return waits[0].done()
    finally:
        for wait in waits:
            wait.cancel()


async def either(event: asyncio.Event, seconds: float | None, sleep: Sleep | None = None) -> bool:
    """Wait until the event is set, at most so many seconds. Returns True if it is set."""
    if sleep is not None and seconds is not None:
        await first_of(event.wait(), sleep(seconds))
    else:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()
    return event.is_set()


class _Driver:
    """The work for one key."""

    __slots__ = ("early", "failing", "marked", "task")

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.marked = False
        """Something has changed since the last step began."""
        self.failing = False
        """The last step failed: only an urgent mark ends the pause."""
        self.early = asyncio.Event()
        """The pause ends."""


class Reconciler(Generic[K]):
    """Repeats `step(key)` for each key that was marked, until it is done."""

    def __init__(
        self,
        step: Callable[[K], Awaitable[float | None]],
        failed: Callable[[K, Exception, float], None],
        *,
        what: Callable[[K], str],
        backoff: Callable[[], Backoff],
        sleep: Sleep | None = None,
    ) -> None:
        """`step` returns None when the key needs no more work until it is marked again, or the
        seconds until the next step, unless it is marked before. `failed(key, error, seconds)` is
        called when it has raised; the next step follows after so many seconds. `what` describes the
        key in the log.
        """
        self._step, self._failed = step, failed
        self._what, self._backoff = what, backoff
        self._sleep = sleep
        self._drivers: dict[K, _Driver] = {}
        self.closed = False

    def __len__(self) -> int:
        """Keys that have work."""
        return len(self._drivers)

    def mark(self, key: K, *, urgent: bool = False) -> None:
        """Something about the key has changed: a step begins after this call. An urgent mark also
        ends the pause after a failure.
        """
        driver = self._drivers.get(key)
        if driver is not None:
            driver.marked = True
            if urgent or not driver.failing:
                driver.early.set()
        elif not self.closed:
            driver = self._drivers[key] = _Driver()
            driver.task = spawn(self._drive(key, driver), self._what(key))

    def marked(self, key: K) -> bool:
        """True if another step follows at once."""
        return key in self._drivers and self._drivers[key].marked

    async def _drive(self, key: K, driver: _Driver) -> None:
        backoff = self._backoff()
        try:
            while True:
                driver.marked = driver.failing = False
                try:
                    seconds = await self._step(key)
                except Exception as error:
                    driver.failing = True
                    seconds = backoff.failed()
                    self._failed(key, error, seconds)
                else:
                    backoff.reset()
                    if driver.marked:
                        continue
                    if seconds is None:
                        return
                driver.early.clear()
                await either(driver.early, seconds, self._sleep)
        finally:
            self._drivers.pop(key, None)

    def open(self) -> None:
        """Heed marks again after `close`."""
        self.closed = False

    async def close(self) -> None:
        """Cancel all steps. Marks are ignored from now on."""
        self.closed = True
        tasks = [driver.task for driver in self._drivers.values() if driver.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._drivers.clear()  # of those that were cancelled before their first step


__all__ = ["Backoff", "Reconciler", "either", "first_of", "jittered", "pause"]
