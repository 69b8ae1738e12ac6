"""Answers to bytes: heads, complete replies and chunks. Pure.

Not here: when to write (`protocol.py`), which answer (the application). Rules: RFC 9112, chapters 6
and 7.
"""

from __future__ import annotations

import email.utils
import time
from collections.abc import Callable
from http import HTTPStatus

from engine.http.messages import Reply, StreamReply

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"

JOIN_LIMIT = 256 * 1024
"""Bytes up to which a head and its body, or a chunk and its frame, are joined to be written in one
piece.
"""

_JSON = "application/json"
_BODILESS = (204, 304)
_CONTROLS = frozenset("\r\n\0")


def chunk_pieces(chunk: bytes) -> tuple[bytes, ...]:
    """One chunk of a chunked answer: in one piece unless it is large."""
    if len(chunk) <= JOIN_LIMIT:
        return (b"%x\r\n%b\r\n" % (len(chunk), chunk),)
    return b"%x\r\n" % len(chunk), chunk, b"\r\n"


class AnswerWriter:
    """Makes the bytes of answers, and keeps the parts that stay the same. One for a server."""

    def __init__(self, constant: tuple[tuple[str, str], ...], clock: Callable[[], float] = time.time) -> None:
        """`constant`: fields of every answer. `clock`: seconds since the epoch."""
        self._clock = clock
        self._constant = field_lines(constant)
        self._starts: dict[tuple[int, str], bytes] = {}
        self._date_until = 0.0
        self._date = b""

    def start(self, status: int, content_type: str) -> bytes:
        """Status line and fields up to those that frame the body."""
        now = self._clock()
        if now >= self._date_until:
            self._date_until = int(now) + 1.0
            self._date = b"Date: " + email.utils.formatdate(int(now), usegmt=True).encode() + b"\r\n"
            self._starts.clear()
        start = self._starts.get((status, content_type))
        if start is None:
            start = b"HTTP/1.1 %d %b\r\n%b" % (status, _reason(status), self._constant)
            if content_type:
                start += field_lines((("Content-Type", content_type),))
            start += self._date
            if len(self._starts) < 256:
                self._starts[status, content_type] = start
        return start

    def reply(self, reply: Reply, *, keep: bool, http10: bool, only_head: bool) -> tuple[bytes, bytes]:
        """Head and body of a complete answer.

        `only_head`: no body, because the request is a HEAD.
        """
        body = reply.body
        head = self.start(reply.status, reply.content_type if body or reply.content_type != _JSON else "")
        if reply.headers:
            head += field_lines(reply.headers)
        if not keep or http10:
            head += _connection_line(keep, http10)
        if reply.status in _BODILESS:
            return head + b"\r\n", b""
        head += b"Content-Length: %d\r\n\r\n" % len(body)
        return head, b"" if only_head else body

    def stream(self, reply: StreamReply, *, keep: bool, http10: bool) -> bytes:
        """The head of a streamed answer: chunked, or with HTTP/1.0 until the connection ends."""
        head = self.start(reply.status, reply.content_type) + field_lines(reply.headers)
        head += _connection_line(keep, http10)
        return head + (b"\r\n" if http10 else b"Transfer-Encoding: chunked\r\n\r\n")

    def hijacked(self, content_type: str, upgrade: bool, protocol: str = "tcp") -> bytes:
        """101 when the client asked to upgrade, to `protocol`; else 200 with neither length nor
        coding: the stream lasts as long as the connection. No Content-Type when it is empty.
        """
        if upgrade:
            typed = (("Content-Type", content_type),) if content_type else ()
            asked = (*typed, ("Connection", "Upgrade"), ("Upgrade", protocol))
            return b"HTTP/1.1 101 UPGRADED\r\n" + self._constant + field_lines(asked) + b"\r\n"
        return self.start(200, content_type) + b"\r\n"


def field_lines(fields: tuple[tuple[str, str], ...]) -> bytes:
    """Header fields as lines. Raises ValueError when a name or value has control characters, with
    which a client could add fields.
    """
    for name, value in fields:
        if not _CONTROLS.isdisjoint(value) or not _CONTROLS.isdisjoint(name):
            raise ValueError(f"control characters in header {name!r}")
    return "".join([f"{name}: {value}\r\n" for name, value in fields]).encode("latin-1", "replace")


def _connection_line(keep: bool, http10: bool) -> bytes:
    if not keep:
        return b"Connection: close\r\n"
    return b"Connection: keep-alive\r\n" if http10 else b""


def _reason(status: int) -> bytes:
    try:
        return HTTPStatus(status).phrase.encode()
    except ValueError:
        return b"Unknown"
