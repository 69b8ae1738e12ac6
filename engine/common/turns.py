"""Loops over many objects that let other tasks run."""

from __future__ import annotations

import asyncio
import time

TURN = 0.001
"""Seconds for which such a loop runs before other tasks do."""


class Turn:
    """The time for which a loop has run without letting other tasks run."""

    __slots__ = ("_began",)

    def __init__(self) -> None:
        self._began = time.monotonic()

    async def over(self) -> None:
        """Let other tasks run, if it was long enough."""
        if time.monotonic() - self._began > TURN:
            await asyncio.sleep(0)
            self._began = time.monotonic()


__all__ = ["Turn"]
