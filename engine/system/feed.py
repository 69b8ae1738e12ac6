"""Passes a request body to the thread that processes it. The event loop passes on the beginning;
the thread reads the rest of a large body from the client's socket itself.

Owns: the bytes that the thread has not read yet, a bounded number; and the rest of the body, which
is borrowed until `close`. Not here: the format of the bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Protocol, TypeVar, runtime_checkable

from engine.errors import EngineError, ServerError, Unavailable
from engine.system.tasks import shield
from engine.system.threads import in_own_thread, uninterrupted

T = TypeVar("T")

BODIES = 256
"""Bodies that are received at a time: each has up to 3 MiB, and most have a thread."""
_WAITING = 2 << 20
"""Bytes of a body that may wait for the thread."""
_WORTH = 512 * 1024
"""The thread waits until this many bytes are available, because with each wake-up it competes with
the loop for the GIL. Its buffer has the same size.
"""
_CHUNK = 256 * 1024
SKIPPED = 1 << 30
SKIP_SECONDS = 10.0
"""Most bytes of a body that are read and dropped before a refusal, and the time for it. A docker
CLI that is cut off while it sends adds an error of its own to the answer.
"""
_PATIENCE = 0.01
"""Seconds that the thread waits for so many bytes before it takes fewer."""


class Rest(Protocol):
    """The part of a body that is lent to a thread."""

    processors: threading.Semaphore | None
    """The reading thread holds this semaphore while it works, and releases it while it waits."""

    def readinto(self, buffer: memoryview, /) -> int:
        """Read up to the whole buffer; 0 at the end.

        In the thread. Raises the error that ended the body.
        """

    def read(self, size: int, /) -> bytes:
        """Some bytes, none at the end."""

    def cut(self) -> None:
        """End a read that waits for the client. Called on the loop."""

    def give_back(self) -> None:
        """Return the body, once the thread no longer reads. Called on the loop."""


@runtime_checkable
class Lender(Protocol):
    """A body that a thread can read without the loop."""

    def borrow(self) -> Rest | None:
        """Lend the unread part of the body.

        None if everything was read, or if only the loop can read the body.
        """


class Feed:
    """Bytes that the loop feeds to a waiting thread."""

    def __init__(self, processors: threading.Semaphore | None = None) -> None:
        """`processors`: the reading thread holds this semaphore while it works.

        Raises Unavailable if too many bodies are being received.
        """
        _enter(self)
        self._processors = processors
        self._loop = asyncio.get_running_loop()
        self._room = asyncio.Event()
        self._begun = asyncio.Event()
        self._changed = threading.Condition()
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._starved = False
        """True if the thread waits for data."""
        self._ended = False
        self._error: EngineError | None = None
        self._taken: deque[bytes] = deque()
        """Chunks that the thread has taken; no other thread uses this."""
        self._rest: Rest | None = None
        """The rest of the body, which follows everything fed."""

    async def feed(self, body: AsyncIterator[bytes]) -> None:
        """Feed the body, until its end or until the thread can read the rest itself.

        If receiving the body fails, the error is raised in the thread too.
        """
        error: EngineError | None = None
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
                if fed >= _WORTH and isinstance(body, Lender) and (rest := body.borrow()) is not None:
                    rest.processors = self._processors
                    self._rest = rest
                    break
                if full:
                    await self._room.wait()
                    self._room.clear()
        except EngineError as failure:
            # without the traceback, which would keep this object alive
            error = type(failure)(failure.message)
        except asyncio.CancelledError:
            error = ServerError("the engine is stopping")
            raise
        finally:
            with self._changed:
                self._ended, self._error = True, error
                self._changed.notify()
            self._begun.set()

    async def begun(self) -> bool:
        """Wait until a thread can start to read. Returns True if the whole body has arrived."""
        await self._begun.wait()
        return self._ended and self._rest is None

    def cut(self) -> None:
        """End every wait for the client. Called on the loop."""
        if self._rest is not None:
            self._rest.cut()

    def close(self) -> None:
        """Return the borrowed part and drop unread bytes. Called on the loop, after `feed` and the
        thread have ended.
        """
        _open.discard(self)
        if self._rest is not None:
            self._rest.give_back()
            self._rest = None
        self._chunks.clear()
        self._taken.clear()

    def _wait(self) -> None:
        with self._changed:
            if self._size < _WORTH and not self._ended:
                self._changed.wait(_PATIENCE)
            while not self._chunks and not self._ended:
                self._starved = True
                self._changed.wait()

    def _take(self) -> bool:
        """Put some chunks into `_taken`; False at the end.

        In the thread. Raises the error that ended the body.
        """
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
                        raise type(self._error)(self._error.message)
                    return False
            if before > _WAITING:
                self._loop.call_soon_threadsafe(self._room.set)
        return True

    def read(self, size: int = _CHUNK) -> bytes:
        """Some bytes, none at the end. In the thread. Raises the error that ended the body."""
        while self._take():
            chunk = self._taken.popleft()
            if size < len(chunk):
                self._taken.appendleft(chunk[size:])
                return chunk[:size]
            if chunk:
                return chunk
        return self._rest.read(size) if self._rest is not None else b""

    def readinto(self, buffer: memoryview) -> int:
        """Read up to the whole buffer."""
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

    def skip(self) -> None:
        """See `skip`. In the thread, which may wait for the client once more at the end."""
        end, left = time.monotonic() + SKIP_SECONDS, SKIPPED
        while left > 0 and time.monotonic() < end and (data := self.read()):
            left -= len(data)

    def head(self, size: int) -> bytes:
        """The first `size` bytes, or fewer if the body is shorter. They are not consumed."""
        head = b""
        while len(head) < size and (more := self.read()):
            head += more
        self._taken.appendleft(head)
        return head[:size]


async def process(feed: Feed, body: AsyncIterator[bytes], work: Callable[[Feed], T]) -> T:
    """The result of `work`, which reads the body from the feed in a thread of its own. The feed is
    closed.

    When the caller is cancelled, as its client has left, the thread gets no more data. The thread
    has ended when this returns or raises. Raises what `work` raises, and as `Feed` and
    `in_own_thread`.
    """
    feeding = asyncio.ensure_future(feed.feed(body))
    futures: list[asyncio.Future[Any]] = [feeding]
    try:
        working = in_own_thread(lambda: work(feed))
        futures.append(working)
        return await shield(working)
    finally:
        feeding.cancel()
        if not futures[-1].done():
            feed.cut()
        await uninterrupted(asyncio.wait(futures))
        for future in futures:
            if not future.cancelled():
                future.exception()  # not awaited after a cancellation; retrieved for asyncio
        feed.close()


_open: weakref.WeakSet[object] = weakref.WeakSet()
"""The bodies that are being received."""


class _Body:
    """One that needs no thread."""


def _enter(body: object) -> None:
    if len(_open) >= BODIES:
        raise Unavailable(f"{BODIES} bodies of requests are being received, and this one would be one too many")
    _open.add(body)


async def skip(body: AsyncIterator[bytes]) -> None:
    """Drop the rest of a body, within `SKIPPED` bytes and `SKIP_SECONDS`."""
    left = SKIPPED
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SKIP_SECONDS):
            async for chunk in body:
                left -= len(chunk)
                if left < 0:
                    return


@contextlib.contextmanager
def one_body() -> Iterator[None]:
    """The time in which the loop itself receives a body. Raises Unavailable if too many are being
    received.
    """
    body = _Body()
    _enter(body)
    try:
        yield
    finally:
        _open.discard(body)


__all__ = ["Feed", "one_body", "process", "skip"]
