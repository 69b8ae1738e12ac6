"""The rest of a request's body, read from the client's socket by a worker thread, past the event
loop.

A large body that goes through the loop is copied twice more, and loop and thread wake each other
for every piece. So a thread that consumes a body borrows the socket (`messages.Body.borrow`). The
thread gives it back at the body's end, or earlier when it needs no more.

Owns:    a duplicate of the socket, until `close`. During the loan the framing state (`reader`)
         belongs to the thread, before and after to the loop.
Threads: one thread reads. `cut` comes from the loop at any time, `give_back` when the thread no
longer reads.
Not here: what the connection does meanwhile (`protocol.py`).
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable

from engine.errors import InvalidParameter, RequestTimeout
from engine.http.framing import BodyReader, ChunkedReader, LengthReader

_RAW = 256 * 1024
"""Bytes of a chunked body that are received at a time."""

_LEFT = "the client left in the middle of its request"


class BorrowedBody:
    """Bytes of a body, for a thread to read. Raises as `messages.Body` does when the client stalls,
    disconnects or breaks the rules of the coding.
    """

    def __init__(
        self,
        descriptor: int,
        reader: BodyReader,
        early: Iterable[bytes],
        seconds: float,
        returned: Callable[[BorrowedBody], None],
    ) -> None:
        """`descriptor` is non-blocking, and closed by this object. `early`: bytes that came before.
        `seconds`: how long to wait for a byte. `returned` is called by `give_back`, and calls
        `close`.
        """
        self.processors: threading.Semaphore | None = None
        """The reading thread holds one of these, and releases it while it waits."""
        self.failure = ""
        """The reason why the body is incomplete; empty when there is none."""
        self.late = False
        """True if the failure is that bytes did not arrive in time."""
        self._returned: Callable[[BorrowedBody], None] | None = returned
        self._socket = socket.socket(fileno=descriptor)
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)
        self._reader = reader
        self._early = deque(chunk for chunk in early if chunk)
        self._seconds = seconds
        self._cut = False
        self._raw = bytearray(0 if isinstance(reader, LengthReader) else _RAW)
        """Received bytes of a chunked body: `_at` to `_stop` is payload that was not taken yet; the
        bytes up to `_end` were not parsed yet.
        """
        self._at = self._stop = self._end = 0

    def readinto(self, buffer: memoryview) -> int:
        """Read the available bytes, up to the whole buffer. Returns 0 at the body's end."""
        if self._early:
            chunk = self._early.popleft()
            size = min(len(chunk), len(buffer))
            buffer[:size] = memoryview(chunk)[:size]
            if size < len(chunk):
                self._early.appendleft(chunk[size:])
            return size
        if self.failure:
            raise RequestTimeout(self.failure) if self.late else InvalidParameter(self.failure)
        piece = self._plain if isinstance(self._reader, LengthReader) else self._chunked
        filled = 0
        try:
            while filled < len(buffer) and (got := piece(buffer[filled:], wait=not filled)):
                filled += got
        except InvalidParameter as error:
            self.failure, self.late = error.message, isinstance(error, RequestTimeout)
            if not filled:
                raise
        return filled

    def read(self, size: int) -> bytes:
        """Some bytes, at most `size`. None at the end."""
        if self._early:
            chunk = self._early.popleft()
            if size < len(chunk):
                self._early.appendleft(chunk[size:])
            return chunk[:size]
        buffer = bytearray(size)
        with memoryview(buffer) as view:
            got = self.readinto(view)
        return bytes(buffer[:got]) if got < size else bytes(buffer)

    def cut(self) -> None:
        """Called by the loop when the connection is lost.

        A thread that waits for bytes gets InvalidParameter.
        """
        self._cut = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def give_back(self) -> None:
        """Called by the loop when the thread has ended, at the body's end or before. The connection
        continues to read. Idempotent.
        """
        returned, self._returned = self._returned, None
        if returned is not None:
            returned(self)

    def close(self) -> bytes:
        """Called by the connection: close the socket. Returns received bytes that do not belong to
        the body.
        """
        self._socket.close()
        unread = bytes(self._raw[self._stop : self._end])
        self._early.clear()
        self._raw = bytearray()
        return unread

    def _plain(self, buffer: memoryview, *, wait: bool) -> int:
        assert isinstance(self._reader, LengthReader)
        size = self._receive(buffer[: self._reader.left], wait=wait) if not self._reader.done else 0
        self._reader.passed(size)
        return size

    def _chunked(self, buffer: memoryview, *, wait: bool) -> int:
        assert isinstance(self._reader, ChunkedReader)
        while self._at == self._stop:
            if self._reader.done:
                return 0
            if self._stop == self._end:
                self._at = self._stop = self._end = 0
                self._end = self._receive(memoryview(self._raw), wait=wait)
                if not self._end:
                    return 0
            self._at, self._stop = self._reader.payload(self._raw, self._stop, self._end)
        size = min(self._stop - self._at, len(buffer))
        buffer[:size] = memoryview(self._raw)[self._at : self._at + size]
        self._at += size
        return size

    def _receive(self, buffer: memoryview, *, wait: bool) -> int:
        """Wait for some bytes.

        Returns 0 when there are none and `wait` is False.
        """
        while not self._cut:
            try:
                got = self._socket.recv_into(buffer)
            except BlockingIOError:
                if not wait:
                    return 0
                if not self._ready():
                    raise RequestTimeout(f"no byte of the request's body came for {self._seconds:g} s") from None
                continue
            except OSError as error:
                raise InvalidParameter(_LEFT) from error
            if not got:
                break
            return got
        if self._cut:
            raise InvalidParameter(_LEFT)
        raise InvalidParameter("the connection was shut down in the middle of a request's body")

    def _ready(self) -> bool:
        """Wait for bytes or their end. Returns False when neither came in time."""
        if self.processors is None:
            return bool(self._poll.poll(self._seconds * 1000))
        self.processors.release()
        try:
            return bool(self._poll.poll(self._seconds * 1000))
        finally:
            self.processors.acquire()
