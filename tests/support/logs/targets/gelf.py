"""GELF receivers: messages as an independent decoder sees them.

UDP: datagrams may be chunks (1e 0f, 8 bytes of id, number, count), in any order, and the whole
message may be compressed with gzip or zlib. TCP: messages end in a zero byte, see `streams.py`.
"""

from __future__ import annotations

import gzip
import json
import socket
import threading
import zlib
from typing import Any, Self

from tests.support import PATIENCE
from tests.support.logs.targets.streams import StreamReceiver

SO_RCVBUFFORCE = 33
"""Beyond net.core.rmem_max, socket(7)."""


def decoded(message: bytes) -> dict[str, Any]:
    """A GELF message, compressed or not. Raises ValueError."""
    if message[:2] == b"\x1f\x8b":
        message = gzip.decompress(message)
    elif message[:1] == b"\x78":
        message = zlib.decompress(message)
    found = json.loads(message)
    if not isinstance(found, dict):
        raise ValueError("no object")
    return found


class Chunks:
    """Puts messages together."""

    def __init__(self) -> None:
        self.open: dict[bytes, dict[int, bytes]] = {}

    def take(self, datagram: bytes) -> bytes | None:
        """The message that this datagram completes."""
        if datagram[:2] != b"\x1e\x0f":
            return datagram
        identity, number, count = datagram[2:10], datagram[10], datagram[11]
        assert number < count <= 128, (number, count)
        parts = self.open.setdefault(identity, {})
        parts[number] = datagram[12:]
        if len(parts) < count:
            return None
        del self.open[identity]
        return b"".join(parts[each] for each in range(count))


class GelfUdp:
    """Receives datagrams in a thread."""

    def __init__(self, port: int = 0) -> None:
        self.datagrams: list[bytes] = []
        self.port = port
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self.start()

    def start(self) -> None:
        """Bind, to the same port as before."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 64 << 20)
        self._socket.bind(("127.0.0.1", self.port))
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._receive, args=(self._socket,), daemon=True)
        self._thread.start()

    def away(self) -> None:
        """Nobody is bound to the port."""
        if self._socket is not None and self._thread is not None:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
                last.sendto(b"", ("127.0.0.1", self.port))
            self._thread.join(20 * PATIENCE)
            assert not self._thread.is_alive()
            self._socket.close()
            self._socket = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.away()

    def messages(self) -> list[dict[str, Any]]:
        """Complete messages, in the order of their last datagram."""
        chunks = Chunks()
        whole = [chunks.take(each) for each in list(self.datagrams)]
        return [decoded(each) for each in whole if each is not None]

    def _receive(self, receiver: socket.socket) -> None:
        while datagram := receiver.recv(1 << 17):
            self.datagrams.append(datagram)


class GelfTcp(StreamReceiver):
    """Receives messages that end in a zero byte."""

    def messages(self) -> list[dict[str, Any]]:
        return [decoded(each) for each in self.lines(b"\0")]
