"""Request heads: bytes to a method, a target, header fields and the framing of the body.

This module finds the end of a head, and passes exactly the bytes of one head to httptools. The
bytes after it stay with the connection. Whether they are another request or a hijacked stream is
known only when the request is answered.

Pure: bytes in, heads out. Not here: when to read (`protocol.py`), bodies (`framing.py`). Rules: RFC
9112, 2 to 6.
"""

from __future__ import annotations

import re
from typing import Any

import httptools

from engine.errors import InvalidParameter, words
from engine.http.framing import BodyReader, ChunkedReader, LengthReader
from engine.http.messages import Headers, Query, percent_decode

KNOWN_HEAD = 1024
"""Largest size of a head that is remembered, in bytes. Clients that poll send the same bytes again.
"""

KNOWN_HEADS = 1024
"""Number of heads that are remembered. When it is reached, all are forgotten; those in use are soon
remembered again.
"""

HTTP2 = "PRI"
"""Method of the head that begins HTTP/2 on a new connection ("prior knowledge", RFC 9113, 3.4)."""

HTTP2_HEAD = b"PRI * HTTP/2.0\r\n\r\n"
"""That head. Four more bytes and HTTP/2's frames follow."""

_ABSOLUTE = re.compile(rb"(?i:https?)://[^/?#]*")
_NO_QUERY = Query()
_LOOKED_AT = frozenset(
    (
        b"content-length",
        b"transfer-encoding",
        b"connection",
        b"expect",
        b"upgrade",
        b"host",
        b"authorization",
        b"proxy-authorization",
        b"cookie",
        b"x-registry-auth",
        b"x-registry-config",
    )
)


class Head:
    """One complete head."""

    __slots__ = (
        "expects",
        "headers",
        "http10",
        "keep",
        "method",
        "path",
        "query",
        "reader",
        "repeatable",
        "target",
        "upgrade",
    )

    method: str
    target: bytes
    path: str
    query: Query
    headers: Headers
    http10: bool
    keep: bool
    """The client keeps the connection open for another request."""
    expects: bool
    """The client waits for `100 Continue` before it sends the body."""
    upgrade: bool
    """The head has the field Upgrade."""
    reader: BodyReader | None
    """Reads the body; None when there is none."""
    repeatable: bool
    """The head is the whole request, needs no special treatment, and has no credentials: it may be
    remembered.
    """


class KnownHeads(dict[bytes, Head]):
    """Heads of requests without a body, by their bytes. One for a server.

    A dict, because its `get` runs for every request.
    """

    def keep(self, data: bytes, head: Head) -> None:
        """Remember a repeatable head that is all of `data`."""
        if len(data) <= KNOWN_HEAD:
            if len(self) >= KNOWN_HEADS:
                self.clear()
            self[data] = head


class HeadReader:
    """Reads one head after another. It cannot be used after InvalidParameter."""

    __slots__ = ("_complete", "_fields", "_limit", "_parser", "_tail", "_url", "first", "size")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parser: Any = httptools.HttpRequestParser(self)
        self._tail = b""
        self._url = b""
        self._fields: list[tuple[bytes, bytes]] = []
        self._complete = False
        self.size = 0
        """Received bytes of the current head; 0 between heads."""
        self.first = True
        """No other request was on this connection: it may begin HTTP/2."""

    def close(self) -> None:
        """Break the reference cycle with the parser."""
        self._parser = None

    # --- httptools --------------------------------------------------------------------------------

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields.append((name, value))

    def on_headers_complete(self) -> None:
        self._complete = True

    # ----------------------------------------------------------------------------------------------

    def read(self, data: bytes, start: int) -> tuple[int, Head | None]:
        """Read from `start` on. Returns the position after the bytes read, and the head when it is
        complete.
        """
        if not self.size:
            # RFC 9112, 2.2: empty lines before a request
            while start < len(data) and data[start] in b"\r\n":
                start += 1
            if start == len(data):
                return start, None
        end = _end_of_head(self._tail, data, start)
        whole = end >= 0
        if not whole:
            end = len(data)
        piece = data if end - start == len(data) else data[start:end]
        self.size += len(piece)
        if self.size > self._limit:
            raise InvalidParameter(f"the request's head is larger than {self._limit} bytes")
        reusable = True
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            reusable = False
        except httptools.HttpParserError as error:
            raise InvalidParameter(f"malformed request: {words(error)}") from None
        if not whole:
            self._tail = (self._tail + piece)[-2:]
            return end, None
        if not self._complete:
            if self._parser.get_method() == b"PRI" and self._parser.get_http_version() == "2.0" and self._url == b"*":
                if not self.first:
                    raise InvalidParameter("malformed request: HTTP/2 after another request of the connection")
                return end, _http2()
            raise InvalidParameter("malformed request: the head is incomplete")
        head = self._head()
        if head.reader is not None or not reusable:
            # The parser has parsed a head and now expects a body, which it will not get.
            self._parser = httptools.HttpRequestParser(self)
            head.repeatable = False
        return end, head

    def _head(self) -> Head:
        head = Head()
        head.method, http = self._parser.get_method().decode("ascii"), self._parser.get_http_version()
        if http not in ("1.1", "1.0"):
            raise InvalidParameter(f"malformed request: HTTP version {http} is not supported")
        url, fields = self._url, self._fields
        self._url, self._fields, self._complete, self.size, self._tail = b"", [], False, 0, b""
        head.http10 = http10 = http == "1.0"
        head.keep = not http10
        head.expects = head.upgrade = False
        head.repeatable = not http10
        reader: BodyReader | None = None
        hosts = 0
        for name, value in fields:
            key = name.lower()
            if key not in _LOOKED_AT:
                continue
            text = value.strip().lower()
            if key == b"host":
                hosts += 1
            elif key == b"connection":
                options = [option.strip() for option in text.split(b",")]
                if b"close" in options:
                    head.keep = head.repeatable = False
                elif http10 and b"keep-alive" in options:
                    head.keep = True
            elif key == b"expect":
                head.expects = text == b"100-continue" and not http10
                head.repeatable = False
            elif key == b"upgrade":
                head.upgrade = True
                head.repeatable = False
            elif key == b"transfer-encoding":
                _check_once(reader)
                if http10:
                    raise InvalidParameter("malformed request: HTTP/1.0 has no transfer codings")
                if text != b"chunked":
                    raise InvalidParameter(f"transfer coding {text.decode('latin-1')!r} is not supported, only chunked")
                reader = ChunkedReader()
            elif key == b"content-length":
                _check_once(reader)
                if not text.isdigit() or len(text) > 18:
                    given = text.decode("latin-1")
                    raise InvalidParameter(f"malformed request: Content-Length {given!r}: at most 18 digits")
                reader = LengthReader(int(text))
            else:
                head.repeatable = False  # credentials
        if hosts != 1 and not http10:
            raise InvalidParameter(f"malformed request: {hosts} Host header fields; HTTP/1.1 requires exactly one")
        head.reader = reader if reader is not None and not reader.done else None
        head.target = target = _target(url)
        path, _, query = target.partition(b"?")
        head.path = percent_decode(path, "the path")
        head.query = Query(query) if query else _NO_QUERY
        head.headers = Headers(fields)
        return head


def _http2() -> Head:
    """The head that begins HTTP/2. A route can have only a path, so its target is shown as `/`."""
    head = Head()
    head.method, head.target, head.path, head.query, head.headers = HTTP2, b"/", "/", _NO_QUERY, Headers([])
    head.http10 = head.keep = head.expects = head.upgrade = head.repeatable = False
    head.reader = None
    return head


def _check_once(reader: BodyReader | None) -> None:
    if reader is not None:
        raise InvalidParameter("malformed request: the length of the body is given twice")


def _end_of_head(tail: bytes, data: bytes, start: int) -> int:
    """Position after the empty line that ends a head, or -1. `tail`: up to two bytes that came
    before `data[start]`.
    """
    if tail:
        found = (tail + data[start : start + 2]).find(b"\n\r\n")
        if found >= 0:
            return start + found + 3 - len(tail)
    found = data.find(b"\n\r\n", start)
    return found + 3 if found >= 0 else -1


def _target(url: bytes) -> bytes:
    """Path and query of a request target (RFC 9112, 3.2) in origin-form or absolute-form.

    For other forms, returns a path that no route has.
    """
    if not url.startswith(b"/"):
        absolute = _ABSOLUTE.match(url)
        if absolute is not None:
            url = url[absolute.end() :]
            if not url.startswith(b"/"):
                url = b"/" + url
    return url.partition(b"#")[0]
