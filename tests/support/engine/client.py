"""The Engine API over a Unix socket with the standard library, for the demo and the outside-in
tests.

Not a client library: it has no versions, no retries and no knowledge of requests. The docker CLI
and docker-py are tested as well.
"""

from __future__ import annotations

import http.client
import json
import socket
import struct
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.support import PATIENCE


@dataclass(frozen=True)
class Answer:
    """One HTTP answer, read to its end. Header names are lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def message(self) -> str:
        """The `message` of an error body. Raises AssertionError if the body has another shape."""
        value = json.loads(self.body)
        assert list(value) == ["message"], value
        return str(value["message"])


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = connect(self._path, self.timeout or 0)


def connect(path: str, timeout: float = 30) -> socket.socket:
    """A connected stream socket; every later operation on it fails after `timeout` seconds,
    times PATIENCE.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout * PATIENCE)
    connection.connect(path)
    return connection


def request(
    path: str, method: str, target: str, body: Any = None, headers: Mapping[str, str] | None = None, timeout: float = 60
) -> Answer:
    """One request on a connection of its own.

    A `body` that is not bytes or None is encoded as JSON. Without `headers`, bytes have the type of
    JSON too.
    """
    connection = _UnixConnection(path, timeout)
    try:
        response = _send(connection, method, target, body, headers)
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())
    finally:
        connection.close()


def _send(
    connection: _UnixConnection, method: str, target: str, body: Any, headers: Mapping[str, str] | None
) -> http.client.HTTPResponse:
    sent = dict(headers or {})
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body).encode()
        sent.setdefault("Content-Type", "application/json")
    elif body and headers is None:
        sent["Content-Type"] = "application/json"
    connection.request(method, target, body, sent)
    return connection.getresponse()


def json_stream(path: str, target: str, timeout: float = 60) -> Iterator[Any]:
    """The JSON objects of an endless answer (events), one per line, as they arrive.

    The request is answered when this returns.
    """
    connection = _UnixConnection(path, timeout)
    response = _send(connection, "GET", target, None, None)
    assert response.status == 200, (response.status, response.read())

    def lines() -> Iterator[Any]:
        with connection.sock, response:
            while line := response.readline():
                yield json.loads(line)

    return lines()


def stream(path: str, target: str, timeout: float = 60) -> Generator[bytes, None, None]:
    """The body of an endless answer (followed logs), in pieces as they arrive."""
    connection = _UnixConnection(path, timeout)
    response = _send(connection, "GET", target, None, None)
    assert response.status == 200, (response.status, response.read())
    with connection.sock, response:
        while chunk := response.read1(1 << 16):
            yield chunk


def hijack(
    path: str, target: str, timeout: float = 60, *, head: bytes = b"", method: str = "POST"
) -> tuple[socket.socket, bytes]:
    """Send `method` on `target` with an upgrade. Returns the socket, and the bytes of the stream
    that came with the answer's head.

    `head` is sent in the same segment as the request, as clients with stdin ready do.
    """
    connection = connect(path, timeout)
    connection.sendall(
        f"{method} {target} HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\nContent-Length: 0\r\n"
        "Connection: Upgrade\r\nUpgrade: tcp\r\n\r\n".encode()
        + head
    )
    answer = b""
    while b"\r\n\r\n" not in answer:
        received = connection.recv(65536)
        if not received:
            break
        answer += received
    first, _, rest = answer.partition(b"\r\n\r\n")
    if not first.startswith(b"HTTP/1.1 101 UPGRADED\r\n"):
        connection.close()
        raise AssertionError(f"no upgrade: {answer!r}")
    return connection, rest


def read_to_end(connection: socket.socket, received: bytes = b"") -> bytes:
    """Everything until the server closes. Closes the connection."""
    chunks = [received]
    with connection:
        while chunk := connection.recv(1 << 20):
            chunks.append(chunk)
    return b"".join(chunks)


def frames(data: bytes) -> list[tuple[int, bytes]]:
    """The (stream, payload) pairs of a multiplexed stream. Raises an exception for anything
    that is not whole frames.
    """
    found = []
    at = 0
    while at < len(data):
        stream, size = struct.unpack_from(">BxxxI", data, at)
        assert stream in (0, 1, 2), data[at : at + 8]
        at += 8 + size
        assert at <= len(data), "torn frame"
        found.append((stream, data[at - size : at]))
    return found


def payload(data: bytes, stream: int = 1) -> bytes:
    """The payload of one stream."""
    return b"".join(part for number, part in frames(data) if number == stream)
