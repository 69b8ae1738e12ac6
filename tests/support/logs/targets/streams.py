"""An own receiver of streams (TCP, TLS, Unix), which may be slow, stop reading, or end connections.

Everything that it has read is in `connections`, in the order of their beginning. What it has not
read it has not stored, like a server that is killed then.

Owns:    its listener, connections and threads.
Threads: one for each connection and one that accepts. Attributes of others are only read.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Self

from tests.support import PATIENCE
from tests.support.logs.targets.certificates import Pair

_AT_ONCE = struct.pack("ii", 1, 0)
"""SO_LINGER with which a close sends a reset."""


class Stream:
    """One connection and what was read from it."""

    def __init__(self, peer: socket.socket) -> None:
        self.peer = peer
        self.data = bytearray()
        """What was read and not taken away by `took`."""
        self.size = 0
        """Bytes read so far."""
        self.ended = False
        """The peer has sent everything and ended in order."""

    def lines(self, end: bytes = b"\n") -> Iterator[bytes]:
        """Whole messages that end in `end`."""
        return iter(bytes(self.data).split(end)[:-1])

    def frames(self) -> Iterator[bytes]:
        """Whole messages behind their length (RFC 6587 3.4.1)."""
        data, at = bytes(self.data), 0
        while (space := data.find(b" ", at)) > 0:
            size = int(data[at:space])
            if space + 1 + size > len(data):
                return
            yield data[space + 1 : space + 1 + size]
            at = space + 1 + size


class StreamReceiver:
    """See the module."""

    def __init__(
        self, *, pair: Pair | None = None, path: str = "", port: int = 0, pace: float = 0, buffer: int = 0
    ) -> None:
        """`pair`: the receiver speaks TLS. `path`: of a Unix socket. `port`: 0 for a free one.
        `pace`: bytes per second that are read at most; 0: all. `buffer`: SO_RCVBUF.
        """
        self._context: ssl.SSLContext | None = None
        if pair is not None:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._context.load_cert_chain(pair.cert, pair.key)
        self.path = path
        self.port = port
        self.pace = pace
        self.connections: list[Stream] = []
        self.cut_after = 0
        """Bytes of a connection after which it is ended; 0: never."""
        self.cut: Callable[[Stream], None] = reset
        self._buffer = buffer
        self._paused = False
        self._bell = os.pipe()
        """Readable while the threads shall end. They poll it, since a close does not end a
        recv(2) of another thread."""
        self._listener: socket.socket | None = None
        self._threads: list[threading.Thread] = []
        self.start()

    # --- its life ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Listen, at the same port as before."""
        if self.path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(self.path)
        else:
            listener = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if self._buffer:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._buffer)
            listener.bind(("127.0.0.1", self.port))
            self.port = listener.getsockname()[1]
        listener.listen(64)
        self._listener = listener
        self._spawn(self._accept, listener)

    def away(self) -> None:
        """As if the process were killed: no listener, and connections end. Unread data makes the
        kernel send a reset."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        os.write(self._bell[1], b"!")
        for thread in self._threads:
            thread.join(20 * PATIENCE)
            assert not thread.is_alive(), "a thread of the receiver does not end"
        self._threads.clear()
        os.read(self._bell[0], 1)

    def pause(self) -> None:
        """Read nothing more. Connections stay open, and new ones are accepted."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def close(self) -> None:
        self.away()
        for end in self._bell:
            os.close(end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- what has arrived -------------------------------------------------------------------------

    def lines(self, end: bytes = b"\n") -> list[bytes]:
        """Whole messages of all connections."""
        return [line for stream in list(self.connections) for line in stream.lines(end)]

    def frames(self) -> list[bytes]:
        return [frame for stream in list(self.connections) for frame in stream.frames()]

    @property
    def size(self) -> int:
        """Bytes read so far."""
        return sum(stream.size for stream in list(self.connections))

    # --- threads ----------------------------------------------------------------------------------

    def _spawn(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            stream = Stream(peer)
            self.connections.append(stream)
            self._spawn(self._serve, stream)

    def _serve(self, stream: Stream) -> None:
        with contextlib.suppress(OSError, ValueError):  # ended by the peer, or by `cut`
            if self._context is not None:
                stream.peer.settimeout(10 * PATIENCE)
                stream.peer = self._context.wrap_socket(stream.peer, server_side=True)
            self.greet(stream)
            while self._read(stream):
                if self.cut_after and stream.size >= self.cut_after:
                    self.cut(stream)
        stream.peer.close()

    def _read(self, stream: Stream) -> bool:
        """Returns False at the end of the stream, and when the receiver goes away."""
        while not self._readable(stream.peer):
            if self._called():
                return False
        part = stream.peer.recv(min(64 << 10, max(1, int(self.pace / 20))) if self.pace else 64 << 10)
        if not part:
            stream.ended = True
            return False
        stream.data += part
        stream.size += len(part)
        self.took(stream)
        if self.pace:
            time.sleep(len(part) / self.pace)
        return not self._called()

    def _readable(self, peer: socket.socket) -> bool:
        """Waits a little."""
        if isinstance(peer, ssl.SSLSocket) and peer.pending() and not self._paused:
            return True
        poll = select.poll()
        poll.register(self._bell[0], select.POLLIN)
        if not self._paused:
            poll.register(peer, select.POLLIN)
        ready = dict(poll.poll(20 if self._paused else None))
        return not self._paused and peer.fileno() in ready and self._bell[0] not in ready

    def _called(self) -> bool:
        return bool(select.select([self._bell[0]], [], [], 0)[0])

    # --- for protocols ----------------------------------------------------------------------------

    def greet(self, stream: Stream) -> None:
        """A connection has begun."""

    def took(self, stream: Stream) -> None:
        """There is more in `stream.data`."""


class DatagramReceiver:
    """A Unix datagram socket, and a thread that reads it."""

    def __init__(self, path: str, *, pace: float = 0) -> None:
        """`pace`: messages per second at most; 0: all."""
        self.path = path
        self.pace = pace
        self.messages: list[bytes] = []
        self._paused = False
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._ends = threading.Event()
        self.start()

    def start(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)
        self._socket.settimeout(0.02)
        self._ends.clear()
        self._thread = threading.Thread(target=self._receive, args=(self._socket,), daemon=True)
        self._thread.start()

    def away(self) -> None:
        """As if the process were killed."""
        if self._socket is not None and self._thread is not None:
            self._ends.set()
            self._thread.join(20 * PATIENCE)
            assert not self._thread.is_alive()
            self._socket.close()
            self._socket = None

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def lines(self) -> list[bytes]:
        """Messages that are not empty."""
        return [each for each in list(self.messages) if each]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.away()

    def _receive(self, receiver: socket.socket) -> None:
        while not self._ends.is_set():
            if self._paused:
                time.sleep(0.005)
                continue
            with contextlib.suppress(TimeoutError):
                self.messages.append(receiver.recv(1 << 17))
                if self.pace:
                    time.sleep(1 / self.pace)


def reset(stream: Stream) -> None:
    """End with a reset, whatever has been read."""
    with contextlib.suppress(OSError):
        stream.peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
    stream.peer.close()


def finish(stream: Stream) -> None:
    """End in order: send a FIN, and read what the peer has sent until its own."""
    with contextlib.suppress(OSError):
        stream.peer.shutdown(socket.SHUT_WR)
