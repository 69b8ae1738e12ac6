"""How many transfers run at the same time: one limit for all downloads of the engine, one for all
uploads. The others wait in the order in which they came.

Threads: the event loop's. Not here: the transfers (pull.py, push.py).
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """A semaphore whose size may change. `async with` it for one transfer."""

    def __init__(self, most: int) -> None:
        """`most`: 0 for no limit."""
        self._most = most
        self._running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    def limit(self, most: int) -> None:
        """Change the limit. Transfers that run go on, if they are more."""
        self._most = most
        self._admit()

    @property
    def full(self) -> bool:
        """The next transfer has to wait."""
        return bool(self._waiting) or not self._free

    @property
    def _free(self) -> bool:
        return not self._most or self._running < self._most

    async def __aenter__(self) -> None:
        if not self.full:
            self._running += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                if turn in self._waiting:
                    self._waiting.remove(turn)
            else:  # its turn came in the same moment
                self._leave()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        self._running -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._free:
            turn = self._waiting.popleft()
            if not turn.done():
                self._running += 1
                turn.set_result(None)


__all__ = ["Turns"]
