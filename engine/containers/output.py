"""The output of one run, read by the engine itself: lossless, and as slowly as it is consumed.

The monitor writes frames into a socket pair, as for an attached client, and stops reading the
process's pipes while the socket is full. Not here: clients that attach (streams.py), logs
(logs.py).

Owns: one end of the socket pair, until `close`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

from engine._fast.frames import Demultiplexer
from engine.containers.container import Container
from engine.containers.streams import Wanted, attach
from engine.errors import ServerError

STDOUT, STDERR = 1, 2
_CHUNK = 64 * 1024
_BUFFER = 256 * 1024


class Output:
    """An asynchronous iterator of (stream number, bytes), which ends with the run."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self._socket: socket.socket | None = None

    async def open(self) -> None:
        """Attach to the next run, or to the one in progress."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        ours.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        try:
            wanted = Wanted(stream=True, stdout=True, stderr=True, detach_keys=b"")
            await attach(self._container, theirs.fileno(), wanted, head=b"", early=b"", framed=True)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.close()
        self._socket = ours

    def __aiter__(self) -> AsyncIterator[tuple[int, bytes]]:
        return self._read()

    async def _read(self) -> AsyncIterator[tuple[int, bytes]]:
        loop = asyncio.get_running_loop()
        frames = Demultiplexer()
        while self._socket is not None:
            try:
                data = await loop.sock_recv(self._socket, _CHUNK)
            except ConnectionError:
                data = b""
            if not data:
                break
            try:
                for piece in frames.feed(data):
                    yield piece
            except ValueError as error:
                raise ServerError(f"the output of container {self._container.id}: {error}") from error

    def close(self) -> None:
        """Idempotent. The process is not read for this reader any more."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


async def output(container: Container) -> Output:
    """Attach to a container that is about to be started. Close the result in any case.

    Raises ServerError.
    """
    found = Output(container)
    await found.open()
    return found


__all__ = ["STDERR", "STDOUT", "Output", "output"]
