"""A clock that stands until a test moves it."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable

START = 1_700_000_000
"""Seconds since the epoch at which the clock begins."""


class FakeClock:
    """`await clock.advance(seconds)` wakes each sleeper at its time, and lets everything run that
    is ready before the next one, as if the program took no time at all.
    """

    def __init__(self, start: float = START) -> None:
        self._start = start
        self._passed = 0.0
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def now(self) -> int:
        return int(self._start * 1_000_000_000) + round(self._passed * 1_000_000_000)

    def monotonic(self) -> float:
        return self._passed

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.call_at(self._passed + seconds, lambda: None if future.done() else future.set_result(None))
        await future

    def call_at(self, time: float, callback: Callable[[], None]) -> None:
        """Call `callback` when the clock passes `time` (of `monotonic`)."""
        heapq.heappush(self._timers, (time, next(self._numbers), callback))

    async def advance(self, seconds: float) -> None:
        ends = self._passed + seconds
        await self.settle()
        while self._timers and self._timers[0][0] <= ends:
            time, _, callback = heapq.heappop(self._timers)
            self._passed = max(self._passed, time)
            callback()
            await self.settle()
        self._passed = ends
        await self.settle()

    def set(self, seconds: float) -> None:
        """Move the clock without waking sleepers; for code that only reads the time."""
        self._passed += seconds

    async def settle(self) -> None:
        """Let all tasks run until they wait for something."""
        loop = asyncio.get_running_loop()
        for _ in range(10_000):
            await asyncio.sleep(0)
            if not loop._ready:  # type: ignore[attr-defined]
                return
        raise AssertionError("the tasks do not come to rest")
