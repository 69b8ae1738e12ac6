"""A minimal HTTP client over a Unix socket, so that the engine's time is measured and not the
client's.

Sockets block in the kernel (SO_RCVTIMEO, SO_SNDTIMEO; Python's timeouts would cost a poll(2) per
call). Requests are prepared bytes; of answers only the framing is parsed. One request at a time on
a connection. Request and answer cost this side about 5 us, so tens of thousands a second are the
engine's own limit.
"""

from __future__ import annotations

import json
import math
import os
import socket
import struct
import time
from typing import Any

TIMEOUT = 120
"""Seconds without an answer after which a request fails."""

version = "1.24"
"""API version of requests whose target begins with no version of its own (`bench.run --api`)."""

_BUFFER = 1 << 20
_LACKS = {400: (b"is too new",), 404: (b"page not found", b"Not Found"), 500: (b"invalid log driver",)}
"""Words of engines, by status, about what they lack."""


class Lacks(Exception):
    """The engine lacks the endpoint: `page not found`, 501 and the like. Not a wrong answer."""


def connect(path: str, timeout: float = TIMEOUT) -> socket.socket:
    """A connected, blocking socket. Calls that wait longer than `timeout` seconds raise
    BlockingIOError.
    """
    stream = socket.socket(socket.AF_UNIX)
    try:
        interval = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6))
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)
        stream.connect(path)
    except BaseException:
        stream.close()
        raise
    return stream


class Connection:
    """One keep-alive connection."""

    def __init__(self, path: str, timeout: float = TIMEOUT) -> None:
        self._socket = connect(path, timeout)
        self._received = b""
        self._known_head = b"-"
        self._known = (0, 0)

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def answer(self) -> tuple[int, bytes]:
        """Status and body of the next answer; a chunked body keeps its framing."""
        received = self._received or self._more(b"")
        if received.startswith(self._known_head):  # same head as the last answer: nothing to parse
            status, end = self._known
            while len(received) < end:
                received += self._more(received)
            self._received = received[end:]
            return status, received[len(self._known_head) : end]
        while (end := received.find(b"\r\n\r\n")) < 0:
            received += self._more(received)
        head = received[:end].lower()
        status = int(head[9:12])
        end += 4
        at = head.find(b"content-length:")
        if at >= 0:
            size = int(head[at + 15 : at + 35].split(b"\r\n", 1)[0])
            while len(received) < end + size:
                received += self._more(received)
            self._known_head = received[:end]
            self._known = status, end + size
            self._received = received[end + size :]
            return status, received[end : end + size]
        if status in (204, 304):
            self._received = received[end:]
            return status, b""
        if b"transfer-encoding: chunked" not in head:
            raise ValueError(f"an answer without framing: {head!r}")
        pieces = [received]
        size = len(received)
        while not received.endswith(b"\r\n0\r\n\r\n"):
            pieces.append(self._more(received))
            size += len(pieces[-1])
            received = pieces[-1] if len(pieces[-1]) >= 7 else b"".join(pieces)[-7:]
        received = b"".join(pieces)
        self._received = b""
        return status, received[end : size - 5]

    def _more(self, received: bytes) -> bytes:
        try:
            data = self._socket.recv(_BUFFER)
        except BlockingIOError:
            raise TimeoutError(f"no answer, or none to its end: {received[:300]!r}") from None
        if not data:
            raise ConnectionError(f"closed in the middle of an answer: {received[:300]!r}")
        return data

    def ask(self, method: str, target: str, body: Any = None) -> tuple[int, bytes]:
        """One request, one answer."""
        self._socket.sendall(request(method, target, body))
        return self.answer()

    def json(self, method: str, target: str, body: Any = None) -> Any:
        """The JSON value of a successful answer. Raises Lacks, or ValueError naming the answer."""
        status, data = self.ask(method, target, body)
        if status >= 300:
            raise refusal(f"{method} {target}", status, data)
        return json.loads(joined(data)) if data.strip() else None

    def expect(self, status: int, method: str, target: str, body: Any = None) -> bytes:
        """The body of an answer with exactly this status.

        Raises Lacks or ValueError for any other.
        """
        answered, data = self.ask(method, target, body)
        if answered != status:
            raise refusal(f"{method} {target}", answered, data)
        return data

    def head(self, target: str) -> bytes:
        """The head of the answer to HEAD, which has no body whatever its head announces.

        Raises Lacks or ValueError unless it is a success.
        """
        self.send(request("HEAD", target))
        received = self._received
        while (end := received.find(b"\r\n\r\n")) < 0:
            received += self._more(received)
        self._received = received[end + 4 :]
        if (status := int(received[9:12])) >= 300:
            raise refusal(f"HEAD {target}", status, b"")
        return received[:end]

    def upload(self, method: str, target: str, path: str) -> bytes:
        """Send a file as the body; returns the answer's body.

        Raises Lacks or ValueError unless it succeeds.
        """
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            self._socket.sendall(_head(method, target, "application/x-tar", size))
            self._socket.sendfile(file)
        status, data = self.answer()
        if status >= 300 or b"errorDetail" in data:
            raise refusal(f"{method} {target}", status, data)
        return data


def refusal(what: str, status: int, body: bytes) -> Exception:
    """The exception for an error answer: Lacks where the engine has no such endpoint, version of
    the API, or log driver.
    """
    text = f"{what}: {status} {body[:500].decode(errors='replace').strip()}"
    if status in (405, 501) or any(words in body for words in _LACKS.get(status, ())):
        return Lacks(text)
    return ValueError(text)


def request(method: str, target: str, body: Any = None, headers: str = "") -> bytes:
    """The request's bytes; a `body` that is not bytes is JSON. `headers` end in CRLF each."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    kind = "application/x-tar" if isinstance(body, bytes) else "application/json"
    return _head(method, target, kind, len(data), headers) + data


def _head(method: str, target: str, kind: str, size: int, headers: str = "") -> bytes:
    if method == "POST" and target.startswith("/images/"):
        headers += "X-Registry-Auth: e30=\r\n"  # dockerd requires it for a push
    prefix = "" if target.startswith("/v1.") else f"/v{version}"
    return (
        f"{method} {prefix}{target} HTTP/1.1\r\nHost: x\r\n"
        f"Content-Type: {kind}\r\nContent-Length: {size}\r\n{headers}\r\n"
    ).encode()


def joined(data: bytes) -> bytes:
    """A body without its chunk framing."""
    pieces = []
    at = 0
    while at < len(data):
        end = data.find(b"\r\n", at, at + 20)
        try:
            size = int(data[at:end], 16)
        except ValueError:
            return data
        if end < 0 or data[end + 2 + size : end + 4 + size] != b"\r\n":
            return data
        pieces.append(data[end + 2 : end + 2 + size])
        at = end + 4 + size
    return b"".join(pieces)


class Download:
    """An answer read to the end of its connection. Counts bytes and does not keep them."""

    def __init__(self, path: str, method: str, target: str) -> None:
        self.size = 0
        """Bytes of the body, including chunk framing."""
        self._socket = connect(path)
        self._socket.sendall(request(method, target, headers="Connection: close\r\n"))
        self._early = b""

    def head(self) -> None:
        """Read the head. Raises Lacks or ValueError unless it is a success."""
        head, _, self._early = _read_head(self._socket).partition(b"\r\n\r\n")
        if int(head[9:12]) >= 300:
            with self._socket:
                while data := self._socket.recv(_BUFFER):
                    self._early += data
            raise refusal("download", int(head[9:12]), self._early)

    def count(self, mark: bytes, seconds: float = TIMEOUT) -> tuple[int, bool]:
        """Read the rest, for at most `seconds`. Returns how often the byte `mark` occurred (one
        byte cannot be cut by framing), and whether the end was reached.
        """
        assert len(mark) == 1
        until = time.monotonic() + seconds
        self.head()
        buffer = bytearray(_BUFFER)
        view = memoryview(buffer)
        found = self._early.count(mark)
        self.size = len(self._early)
        with self._socket:
            while size := self._socket.recv_into(view):
                found += buffer.count(mark, 0, size)
                self.size += size
                if time.monotonic() > until:
                    return found, False
        return found, True

    def read(self) -> bytes:
        """Read and return the rest, without chunk framing."""
        self.head()
        pieces = [self._early]
        with self._socket:
            while data := self._socket.recv(_BUFFER):
                pieces.append(data)
        self.size = sum(map(len, pieces))
        return joined(b"".join(pieces))

    def skip(self) -> int:
        """Read and discard the rest. Returns the number of bytes."""
        self.head()
        view = memoryview(bytearray(_BUFFER))
        self.size = len(self._early)
        with self._socket:
            while size := self._socket.recv_into(view):
                self.size += size
        return self.size


def _read_head(stream: socket.socket) -> bytes:
    received = b""
    while b"\r\n\r\n" not in received:
        data = stream.recv(65536)
        if not data:
            raise ConnectionError(f"closed before an answer: {received!r}")
        received += data
    return received


def attach(path: str, container: str, query: str = "stream=1&stdin=1&stdout=1&stderr=1") -> tuple[socket.socket, bytes]:
    """A hijacked connection to the container, and the bytes of its stream that came with the
    answer's head.
    """
    return hijack(path, f"/containers/{container}/attach?{query}")


def hijack(path: str, target: str, body: bytes = b"") -> tuple[socket.socket, bytes]:
    """A connection upgraded by POST of a JSON `body`, and the bytes of its stream that came with
    the answer's head.
    """
    stream = connect(path)
    stream.sendall(
        _head("POST", target, "application/json", len(body), "Connection: Upgrade\r\nUpgrade: tcp\r\n") + body
    )
    received = _read_head(stream)
    head, _, early = received.partition(b"\r\n\r\n")
    if not head.startswith((b"HTTP/1.1 101", b"HTTP/1.1 200")):
        stream.close()
        raise refusal(f"POST {target}", int(head[9:12]), early)
    return stream, early


def drain(stream: socket.socket, early: bytes, limit: float = math.inf) -> int:
    """Read frames until there are `limit` payload bytes, or the server closes. Returns the payload
    bytes of stdout.

    Raises ValueError for anything that is not whole frames.
    """
    buffer = bytearray(_BUFFER)
    view = memoryview(buffer)
    kept = len(early)  # unused bytes at the start of the buffer
    buffer[:kept] = early
    missing = 0  # bytes of the current frame's payload still to be read
    total = 0
    while True:
        at = min(missing, kept)
        missing -= at
        while missing == 0 and kept - at >= 8:
            number, size = struct.unpack_from(">BxxxI", buffer, at)
            if number != 1:
                raise ValueError(f"a frame of stream {number}: {bytes(view[at : at + 100])!r}")
            total += size
            here = min(size, kept - at - 8)
            at += 8 + here
            missing = size - here
        rest = kept - at
        if total >= limit and not missing and not rest:
            return total
        buffer[:rest] = buffer[at:kept]
        count = stream.recv_into(view[rest:])
        if not count:
            if rest or missing:
                raise ValueError("the stream ended inside a frame")
            return total
        kept = rest + count


def drain_raw(stream: socket.socket, early: bytes, mark: bytes, limit: float = math.inf) -> int:
    """Read until the byte `mark` occurred `limit` times, or the server closes. Returns how often it
    occurred.
    """
    buffer = bytearray(_BUFFER)
    view = memoryview(buffer)
    found = early.count(mark)
    while found < limit and (size := stream.recv_into(view)):
        found += buffer.count(mark, 0, size)
    return found
