"""HTTP over a Unix socket with as little of a client as will do: what is timed is the engine.

Requests are bytes made beforehand; answers are cut at their framing and not looked into. A request and its answer cost this
side about 10 us, so that a few thousand a second are the engine's own number, and tens of thousands nearly so.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any


class Connection:
    """One keep-alive connection."""

    def __init__(self, path: str, timeout: float = 60) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(timeout)
        self._socket.connect(path)
        self._received = b""
        self._known_head = b"-"
        self._known = (0, 0)

    def close(self) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def answer(self) -> tuple[int, bytes]:
        """Status and body (chunks still in their framing) of the next answer."""
        received = self._received or self._more(b"")
        if received.startswith(self._known_head):  # the same head as the last one's: nothing to parse
            status, end = self._known
            if len(received) >= end:
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
        while (stop := received.find(b"\r\n0\r\n\r\n", end - 2)) < 0:
            received += self._more(received)
        self._received = received[stop + 7 :]
        return status, received[end : stop + 2]

    def _more(self, received: bytes) -> bytes:
        data = self._socket.recv(1 << 18)
        if not data:
            raise ConnectionError(f"closed in the middle of an answer: {received[:300]!r}")
        return data

    def ask(self, method: str, target: str, body: Any = None) -> tuple[int, bytes]:
        """One request, one answer."""
        self.send(request(method, target, body))
        return self.answer()

    def json(self, method: str, target: str, body: Any = None) -> Any:
        """The value that a successful answer holds; ValueError naming the answer for any other."""
        status, data = self.ask(method, target, body)
        if status >= 300:
            raise ValueError(f"{method} {target}: {status} {data.decode(errors='replace')}")
        return json.loads(_joined(data)) if data.strip() else None


def request(method: str, target: str, body: Any = None) -> bytes:
    """The request's bytes; a `body` that is not bytes is JSON."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    kind = "application/x-tar" if isinstance(body, bytes) else "application/json"
    return (
        f"{method} /v1.24{target} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n".encode()
        + data
    )


def _joined(data: bytes) -> bytes:
    """A body out of its chunks, when it is in chunks."""
    if not data[:1].isalnum() or data[:1] in b"tfn":
        return data
    size, _, rest = data.partition(b"\r\n")
    try:
        count = int(size, 16)
    except ValueError:
        return data
    return rest[:count] + (_joined(rest[count + 2 :]) if rest[count + 2 :] else b"")


def attach(path: str, container: str, query: str = "stream=1&stdin=1&stdout=1&stderr=1") -> tuple[socket.socket, bytes]:
    """A hijacked connection to the container, and the bytes of its stream that came with the answer's head."""
    return hijack(path, f"/containers/{container}/attach?{query}")


def hijack(path: str, target: str, body: bytes = b"") -> tuple[socket.socket, bytes]:
    """A connection upgraded by POST of a JSON `body`, and the bytes of its stream that came with the answer's head."""
    stream = socket.socket(socket.AF_UNIX)
    stream.settimeout(60)
    stream.connect(path)
    stream.sendall(
        f"POST /v1.24{target} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n".encode()
        + body
    )
    received = b""
    while b"\r\n\r\n" not in received:
        data = stream.recv(65536)
        if not data:
            raise ConnectionError(f"no upgrade: {received!r}")
        received += data
    head, _, early = received.partition(b"\r\n\r\n")
    if not head.startswith((b"HTTP/1.1 101", b"HTTP/1.1 200")):
        raise ConnectionError(f"no upgrade: {received!r}")
    return stream, early


def drain(stream: socket.socket, early: bytes) -> int:
    """Read frames until the server closes; the payload bytes of stdout. ValueError for anything that is not whole frames."""
    buffer = bytearray(1 << 20)
    view = memoryview(buffer)
    kept = len(early)  # bytes at the buffer's start that are not used yet
    buffer[:kept] = early
    missing = 0  # payload of the frame at hand that is still to come
    total = 0
    with stream:
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
            buffer[:rest] = buffer[at:kept]
            count = stream.recv_into(view[rest:])
            if not count:
                if rest or missing:
                    raise ValueError("the stream ended inside a frame")
                return total
            kept = rest + count
