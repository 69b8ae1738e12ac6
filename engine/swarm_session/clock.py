"""Time, passed to everything of the manager that waits or compares times, so that tests need not
wait.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

SECOND = 1_000_000_000
"""Nanoseconds. Records and the API's durations are in nanoseconds."""


class Clock(Protocol):
    def now(self) -> int:
        """Nanoseconds since the epoch, for records."""

    def monotonic(self) -> float:
        """Seconds that never go back, for timers."""

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    def now(self) -> int:
        return time.time_ns()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
