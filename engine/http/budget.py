"""Bounds the memory of all request bodies that are read whole.

A body of up to `FREE` bytes costs nothing. A larger one waits, unread, until its size fits into the
budget. The kernel's socket buffers push back on its client meanwhile.

Owns: the reservations. Threads: the event loop's.
"""

from __future__ import annotations

import asyncio
from collections import deque

from engine.errors import Unavailable

FREE = 64 * 1024
"""Bytes of a body that need no reservation."""


class Budget:
    """Bytes, reserved first come, first served."""

    def __init__(self, size: int, patience: float) -> None:
        """`patience`: seconds that a body waits for its turn."""
        self._free = self._size = size
        self._patience = patience
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def reserve(self, size: int) -> int:
        """Wait until so many bytes are free, and take them. Returns how many to `release`.

        Raises Unavailable when that takes too long. A body larger than the whole budget takes all
        of it.
        """
        size = min(size, self._size)
        if not self._waiting and size <= self._free:
            self._free -= size
            return size
        turn = asyncio.get_running_loop().create_future()
        entry = (size, turn)
        self._waiting.append(entry)
        try:
            async with asyncio.timeout(self._patience):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self.release(size)  # its turn came together with the cancellation
            elif entry in self._waiting:
                self._waiting.remove(entry)
                self._admit()
            if isinstance(error, TimeoutError):
                raise Unavailable("too many large requests at once; try again later") from None
            raise
        return size

    def release(self, size: int) -> None:
        """Give back what `reserve` returned."""
        self._free += size
        self._admit()

    @property
    def reserved(self) -> int:
        """Bytes in use."""
        return self._size - self._free

    def _admit(self) -> None:
        while self._waiting:
            size, turn = self._waiting[0]
            if turn.cancelled():
                self._waiting.popleft()
            elif size <= self._free:
                self._waiting.popleft()
                self._free -= size
                turn.set_result(None)
            else:
                return
