"""The rest of a request's body, read from the client's socket by the thread that works on it, past the event loop.

A large body that goes through the loop is copied twice more, and the loop and the thread wake each other for every piece of it. So who reads in a
thread of its own borrows the socket (`messages.Body.lend`), and gives it back at the body's end or when it wants no more.

Owns: a duplicate of the socket, until `close`. The framing state (`reader`) is the thread's meanwhile, the loop's before and after.
Threads: one reads. `cut` comes from the loop at any time; `close` when nobody reads any more.
Not here: what of the connection this is (`protocol.py`).
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections import deque
from collections.abc import Iterable

from engine.errors import InvalidParameter
from engine.http.framing import BodyReader, ChunkedReader, LengthReader

_RAW = 256 * 1024
"""Bytes of a chunked body that are received at a time."""


class Remainder:
    """Bytes of a body, to be read in a thread. Raises what `messages.Body` does when the client stalls, leaves or breaks the coding's rules."""

    def __init__(self, descriptor: int, reader: BodyReader, early: Iterable[bytes], seconds: float) -> None:
        """`descriptor`: does not block; it is closed by this. `early`: what came before. `seconds`: how long to wait for a byte."""
        self.processors: threading.Semaphore | None = None
        """The reading thread has one of these, and lends it while it waits."""
        self.error: InvalidParameter | None = None
        """Why it ended before its end."""
        self._socket = socket.socket(fileno=descriptor)
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)
        self._reader = reader
        self._early = deque(chunk for chunk in early if chunk)
        self._seconds = seconds
        self._cut = False
        self._raw = bytearray(0 if isinstance(reader, LengthReader) else _RAW)
        """What was received of a chunked body: payload that was not taken from `_at` to `_stop`, then what was not looked at up to `_end`."""
        self._at = self._stop = self._end = 0

    def readinto(self, buffer: memoryview) -> int:
        """As much as there is, up to the whole buffer; 0 at the body's end."""
        if self._early:
            chunk = self._early.popleft()
            size = min(len(chunk), len(buffer))
            buffer[:size] = memoryview(chunk)[:size]
            if size < len(chunk):
                self._early.appendleft(chunk[size:])
            return size
        if self.error is not None:
            raise self.error
        piece = self._plain if isinstance(self._reader, LengthReader) else self._chunked
        filled = 0
        try:
            while filled < len(buffer) and (got := piece(buffer[filled:], wait=not filled)):
                filled += got
        except InvalidParameter as error:
            self.error = error
            if not filled:
                raise
        return filled

    def read(self, size: int) -> bytes:
        """Some bytes, `size` at most; none at the end."""
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
        """The client's socket is no longer good for anything: who waits for it is told."""
        self._cut = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def close(self) -> bytes:
        """Give the socket back; what was received and not looked at."""
        self._socket.close()
        return bytes(self._raw[self._stop : self._end])

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
        """Some bytes, as soon as there are some; 0 when there are none and it is not to wait."""
        while not self._cut:
            try:
                got = self._socket.recv_into(buffer)
            except BlockingIOError:
                if not wait:
                    return 0
                if not self._ready():
                    raise InvalidParameter(f"no byte of the request's body came for {self._seconds:g} s") from None
                continue
            except OSError as error:
                raise InvalidParameter("the client left in the middle of its request") from error
            if not got:
                break
            return got
        if self._cut:
            raise InvalidParameter("the client left in the middle of its request")
        raise InvalidParameter("the connection was shut down in the middle of a request's body")

    def _ready(self) -> bool:
        """Wait for bytes, or for the end of them."""
        if self.processors is None:
            return bool(self._poll.poll(self._seconds * 1000))
        self.processors.release()
        try:
            return bool(self._poll.poll(self._seconds * 1000))
        finally:
            self.processors.acquire()


__all__ = ["Remainder"]
