"""Bytes of a layer in a file: complete (`Span`) or still being received (`Incoming`), and a reader
of either for a worker thread.

Owns: nothing; descriptors are the caller's. Not here: writing the file (archive.py, pull.py),
extraction (layers.py).
Threads: workers use `Incoming.arrived`, `wait` and `SpanReader`; the loop uses the rest.
"""

from __future__ import annotations

import asyncio
import os
import threading
from array import array
from collections.abc import Callable
from typing import NamedTuple

from engine.errors import InvalidParameter, ServerError, reason
from engine.storage.compression import MAGIC, compression_of

_CHUNK = 256 * 1024


class Span(NamedTuple):
    """A range of bytes in a file: a layer or a whole archive, as received."""

    descriptor: int
    offset: int
    size: int

    def read(self, limit: int) -> bytes:
        """All of it as bytes.

        Raises InvalidParameter when it is larger than `limit` or the file is shorter.
        """
        if self.size > limit:
            raise InvalidParameter(f"a document has {self.size} bytes, more than {limit}")
        try:
            data = os.pread(self.descriptor, self.size, self.offset)
        except OSError as error:
            raise ServerError(f"reading an archive: {reason(error)}") from error
        if len(data) != self.size:
            raise InvalidParameter("truncated archive")
        return data


class Incoming:
    """The bytes of a layer whose file is still being received. Readers wait for them.

    `end` is the receiving task. The bytes are verified once it has ended without an error. The
    descriptor belongs to the receiver.
    """

    offset = 0

    def __init__(self, descriptor: int, size: int, received: Callable[[], int], end: asyncio.Task[None]) -> None:
        """`received` returns the number of bytes that are in the file."""
        self.processors: threading.Semaphore | None = None
        """Held by the reading thread while it works; released while it waits."""
        self.descriptor = descriptor
        self.size = size
        self.end = end
        self._received = received
        self._stopped = False
        self._changed = threading.Condition()
        self._unwanted = asyncio.Event()

    def arrived(self) -> None:
        """More bytes are in the file. From any thread."""
        with self._changed:
            self._changed.notify_all()

    def stop(self) -> None:
        """Wake every waiter with an error: no more bytes will come, or the layer is not wanted.
        Loop only.
        """
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._unwanted.set()

    def wait(self, at: int, least: int = 1) -> int:
        """The number of available bytes from `at` on, once there are `least` or the file is
        complete. Blocking. Raises ServerError when it was stopped.
        """
        wanted = min(at + least, self.size)
        if self.processors is None or self._received() >= wanted:
            return self._wait(wanted) - at
        self.processors.release()
        try:
            return self._wait(wanted) - at
        finally:
            self.processors.acquire()

    def _wait(self, wanted: int) -> int:
        with self._changed:
            while (there := self._received()) < wanted and not self._stopped:
                self._changed.wait()
            if self._stopped:
                raise ServerError("the layer was not received completely")
            return there

    async def whole(self) -> None:
        """Wait until all of it is there and verified. Raises ServerError."""
        unwanted = asyncio.create_task(self._unwanted.wait())
        try:
            await asyncio.wait([self.end, unwanted], return_when=asyncio.FIRST_COMPLETED)
        finally:
            unwanted.cancel()
        if not self.end.done() or self.end.cancelled():
            raise ServerError("the layer was not received completely")
        self.end.result()


def compression(span: Span | Incoming) -> str:
    """See `compression_of`. Blocking when it is `Incoming`."""
    if isinstance(span, Incoming):
        span.wait(0, MAGIC)
    return compression_of(os.pread(span.descriptor, min(span.size, MAGIC), span.offset))


class SpanReader:
    """The bytes of a span in order, unchanged; counts them."""

    def __init__(self, span: Span | Incoming, work: array[int] | None = None, counts: bool = True) -> None:
        """`work`: see `new_progress`; without `counts` only its cancel flag is read."""
        self._span = span
        self._at = span.offset
        self._work = work if work is not None else new_progress()
        self._counts = counts

    def _room(self, size: int) -> int:
        """The number of bytes that can be read now; 0 at the end. Waits for some."""
        if self._work[1]:
            raise ServerError("cancelled")
        left = self._span.offset + self._span.size - self._at
        if left and isinstance(self._span, Incoming):
            left = self._span.wait(self._at)
        return min(left, size)

    def read(self, size: int = -1) -> bytes:
        data = os.pread(self._span.descriptor, self._room(size if size >= 0 else _CHUNK), self._at)
        self._count(len(data))
        return data

    def readinto(self, buffer: memoryview) -> int:
        got = os.preadv(self._span.descriptor, [buffer[: self._room(len(buffer))]], self._at)
        self._count(got)
        return got

    def _count(self, got: int) -> None:
        self._at += got
        if self._counts:
            self._work[0] += got


def new_progress() -> array[int]:
    """Shared between worker and loop: [0] bytes processed, [1] non-zero = cancel."""
    return array("q", [0, 0])


__all__ = ["Incoming", "Span", "SpanReader", "compression", "new_progress"]
