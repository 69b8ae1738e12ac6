"""A body on its way to the thread that works on it: the first of it through the loop, the rest of a large one from the client's socket itself.

Owns: the bytes in between, bounded; what it borrows of the body, until `close`. Not here: what they are.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator
from typing import Protocol, runtime_checkable

from engine.errors import EngineError, ServerError
from engine.images.layers import MAGIC

_WAITING = 2 << 20
"""Bytes of a body that wait for the thread."""
_WORTH = 512 * 1024
"""Bytes of a body that the thread waits for, since each time it wakes it and the loop wait for one another's GIL. Its buffer holds as much."""
_CHUNK = 256 * 1024
_PATIENCE = 0.01
"""Seconds that it waits for so many, before it takes what there is."""


class Rest(Protocol):
    """What a body lends."""

    processors: threading.Semaphore | None
    """The reading thread has one of these, and lends it while it waits."""

    def readinto(self, buffer: memoryview, /) -> int:
        """As much as there is, up to the whole buffer; 0 at the end. In the thread. Raises what the body ended with."""

    def read(self, size: int, /) -> bytes:
        """Some bytes, none at the end."""

    def cut(self) -> None:
        """Whoever reads is told that the client has left. On the loop."""


@runtime_checkable
class Lender(Protocol):
    """A body that a thread can read without the loop."""

    def lend(self) -> Rest | None:
        """All that is still to come; None when that is nothing, or not to be had so."""

    def take_back(self) -> None:
        """The thread has ended."""


class Feed:
    """Bytes that the loop feeds, and that a thread reads and waits for."""

    def __init__(self, processors: threading.Semaphore | None = None) -> None:
        """`processors`: the reading thread has one of these, and lends it while it waits."""
        self._processors = processors
        self._loop = asyncio.get_running_loop()
        self._room = asyncio.Event()
        self._begun = asyncio.Event()
        self._changed = threading.Condition()
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._starved = False
        """The thread waits for whatever comes."""
        self._ended = False
        self._error: BaseException | None = None
        self._taken: deque[bytes] = deque()
        """The thread's own."""
        self._lender: Lender | None = None
        self._rest: Rest | None = None
        """What comes after all that was fed."""

    async def feed(self, body: AsyncIterator[bytes]) -> None:
        """All of the body, or what comes of it before the thread can read it itself; what it ends with is what the thread gets."""
        error: BaseException | None = None
        fed = 0
        try:
            async for chunk in body:
                with self._changed:
                    before, self._size = self._size, self._size + len(chunk)
                    self._chunks.append(chunk)
                    full = self._size > _WAITING
                    if self._size >= _WORTH:
                        self._begun.set()
                    if self._starved or before < _WORTH <= self._size:
                        self._starved = False
                        self._changed.notify()
                fed += len(chunk)
                if fed >= _WORTH and isinstance(body, Lender) and (rest := body.lend()) is not None:
                    rest.processors = self._processors
                    self._lender, self._rest = body, rest
                    break
                if full:
                    await self._room.wait()
                    self._room.clear()
        except EngineError as failure:
            error = failure
        except asyncio.CancelledError:
            error = ServerError("the engine stops")
            raise
        finally:
            with self._changed:
                self._ended, self._error = True, error
                self._changed.notify()
            self._begun.set()

    async def begun(self) -> bool:
        """Wait until there is something for a thread to do. Whether that is all of the body already."""
        await self._begun.wait()
        return self._ended and self._rest is None

    def cut(self) -> None:
        """Whoever waits for the client need not. On the loop."""
        if self._rest is not None:
            self._rest.cut()

    def close(self) -> None:
        """Give back what was borrowed. On the loop, when `feed` and the thread have ended."""
        if self._lender is not None:
            self._lender.take_back()
            self._lender = None

    def _wait(self) -> None:
        with self._changed:
            if self._size < _WORTH and not self._ended:
                self._changed.wait(_PATIENCE)
            while not self._chunks and not self._ended:
                self._starved = True
                self._changed.wait()

    def _take(self) -> bool:
        """Have some chunks in `_taken`; False at the end. In the thread. Raises what the body ended with."""
        while not self._taken:
            if self._processors is None or self._size >= _WORTH or self._ended:
                self._wait()
            else:
                self._processors.release()
                try:
                    self._wait()
                finally:
                    self._processors.acquire()
            with self._changed:
                self._taken, self._chunks = self._chunks, self._taken
                before, self._size = self._size, 0
                if not self._taken:
                    if self._error is not None:
                        raise self._error
                    return False
            if before > _WAITING:
                self._loop.call_soon_threadsafe(self._room.set)
        return True

    def read(self, size: int = _CHUNK) -> bytes:
        """Some bytes, none at the end. In the thread. Raises what the body ended with."""
        while self._take():
            chunk = self._taken.popleft()
            if size < len(chunk):
                self._taken.appendleft(chunk[size:])
                return chunk[:size]
            if chunk:
                return chunk
        return self._rest.read(size) if self._rest is not None else b""

    def readinto(self, buffer: memoryview) -> int:
        """As much as there is, up to the whole buffer."""
        filled = 0
        while filled < len(buffer) and (self._taken if filled else self._take()):
            chunk = self._taken.popleft()
            room = len(buffer) - filled
            if len(chunk) > room:
                self._taken.appendleft(chunk[room:])
                chunk = chunk[:room]
            buffer[filled : filled + len(chunk)] = chunk
            filled += len(chunk)
        return filled if filled or self._rest is None else self._rest.readinto(memoryview(buffer))

    def head(self) -> bytes:
        """The first `MAGIC` bytes, which are read again."""
        head = b""
        while len(head) < MAGIC and (more := self.read()):
            head += more
        self._taken.appendleft(head)
        return head[:MAGIC]


__all__ = ["Feed"]
