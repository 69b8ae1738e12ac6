"""Readers that find the end of a request's body: with a length, and chunked. Pure.

Not here: when to read (`protocol.py`), answers (`answer.py`). Rules: RFC 9112, chapters 6 and 7.
"""

from __future__ import annotations

from typing import Protocol

from engine.errors import InvalidParameter

LINE_LIMIT = 4096
"""Bytes of one line that begins a chunk."""

TRAILER_LIMIT = 64 * 1024
"""Bytes of all trailer fields, which are read and dropped."""

_HEX = frozenset(b"0123456789abcdefABCDEF")


class Sink(Protocol):
    """Receives the payload; `messages.Body` is one."""

    def feed(self, chunk: bytes) -> None: ...


class LengthReader:
    """A body with Content-Length."""

    __slots__ = ("done", "left")

    def __init__(self, length: int) -> None:
        self.left: int | None = length
        """Number of bytes still to come; None when unknown."""
        self.done = length == 0

    def read(self, data: bytes, start: int, sink: Sink | None) -> int:
        """Take the body's bytes from `start` on. Returns the position after them. Without a sink
        they are dropped.
        """
        assert self.left is not None
        stop = min(len(data), start + self.left)
        if sink is not None:
            sink.feed(data if stop - start == len(data) else data[start:stop])
        self.passed(stop - start)
        return stop

    def passed(self, size: int) -> None:
        """Another reader has read that many bytes of the body."""
        assert self.left is not None
        self.left -= size
        self.done = self.left == 0


class ChunkedReader:
    """A body with Transfer-Encoding: chunked.

    Extensions and trailers are dropped. Strict: CRLF, hex digits, no blanks.
    """

    __slots__ = ("_chunk", "_expected", "_line", "_trailers", "done", "left")

    def __init__(self) -> None:
        self.left: int | None = None
        self.done = False
        self._chunk = 0
        self._line = b""
        self._expected = self._size_line
        self._trailers = 0

    def read(self, data: bytes, start: int, sink: Sink | None) -> int:
        """As `LengthReader.read`. Raises InvalidParameter when it is not chunked coding."""
        size = len(data)
        while start < size and not self.done:
            at, start = self.payload(data, start, size)
            if at < start and sink is not None:
                sink.feed(data[at:start])
        return start

    def payload(self, data: bytes | bytearray, start: int, size: int) -> tuple[int, int]:
        """Parse `data[start:size]` up to the end of the next piece of payload. Returns its begin
        and end, which are equal when there is none.
        """
        while start < size and not self.done:
            if self._chunk:
                stop = min(size, start + self._chunk)
                self._chunk -= stop - start
                return start, stop
            newline = data.find(b"\n", start, size)
            stop = newline + 1 if newline >= 0 else size
            self._line += data[start : min(stop, start + LINE_LIMIT + 1)]
            start = stop
            if len(self._line) > LINE_LIMIT:
                raise InvalidParameter(f"malformed chunked body: a line of more than {LINE_LIMIT} bytes")
            if newline >= 0:
                line, self._line = self._line, b""
                if not line.endswith(b"\r\n"):
                    raise InvalidParameter("malformed chunked body: a line does not end in CR LF")
                self._expected(line[:-2])
        return start, start

    def _size_line(self, line: bytes) -> None:
        digits = line.partition(b";")[0]
        if not digits or len(digits) > 15 or not _HEX.issuperset(digits):
            raise InvalidParameter(f"malformed chunked body: {digits[:20].decode('latin-1')!r} is not a chunk size")
        self._chunk = int(digits, 16)
        self._expected = self._end_of_chunk if self._chunk else self._trailer

    def _end_of_chunk(self, line: bytes) -> None:
        if line:
            raise InvalidParameter("malformed chunked body: a chunk is longer than its size says")
        self._expected = self._size_line

    def _trailer(self, line: bytes) -> None:
        self._trailers += len(line) + 2
        if self._trailers > TRAILER_LIMIT:
            raise InvalidParameter(f"malformed chunked body: trailers of more than {TRAILER_LIMIT} bytes")
        self.done = not line


BodyReader = LengthReader | ChunkedReader
