"""The output of one run, read by the engine itself: lossless, and as slowly as it is consumed.

The monitor writes frames into a socket pair, as for an attached client, and stops reading the
process's pipes while the socket is full. As any client, a reader that takes nothing for
`attach_stall` seconds is disconnected. When the monitor dies, the reader attaches to the next one;
only what the dead one had read and not passed on is lost, as for the log.

Not here: clients that attach (streams.py), logs (logs.py).
Owns: one end of the socket pair, until `close`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

from engine._fast.frames import Demultiplexer
from engine.containers.container import Container
from engine.errors import ServerError
from engine.monitor.handles import Client, Interrupted

STDOUT, STDERR = 1, 2
_CHUNK = 256 * 1024
_BUFFER = 256 * 1024


class Output:
    """An asynchronous iterator of (stream number, bytes), which ends with the run."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self._socket: socket.socket | None = None

    async def open(self) -> bool:
        """Attach to the next run, or to the one in progress. Returns True if there is one."""
        while True:
            try:
                return await self._open()
            except Interrupted:  # that monitor died: ask the next one
                if self._container.parts.monitor.closing:
                    raise

    async def _open(self) -> bool:
        container = self._container
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            ours.setblocking(False)
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
            client = Client(
                descriptor=theirs.fileno(), stdin=False, stdout=True, stderr=True, raw=False, detach_keys=b""
            )
            attached = await container.parts.monitor.attach(container.id, client)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.close()
        self._socket = ours
        return attached.running

    async def __aiter__(self) -> AsyncIterator[tuple[int, bytes]]:
        frames = Demultiplexer()
        while self._socket is not None:
            data = await self._receive()
            if not data:
                if not await self._again():
                    return
                frames = Demultiplexer()
            try:
                for piece in frames.feed(data):
                    yield piece
            except ValueError as error:
                raise ServerError(f"the output of container {self._container.id}: {error}") from error

    async def _receive(self) -> bytes:
        assert self._socket is not None
        try:
            return await asyncio.get_running_loop().sock_recv(self._socket, _CHUNK)
        except ConnectionError:
            return b""

    async def _again(self) -> bool:
        """The stream has ended. If the process still runs, the monitor has died: attach to the next
        one, and return True.
        """
        process = self._container.process
        if process is None or process.exit.done() or process.ended:
            return False
        return await self.open()

    def close(self) -> None:
        """Leave. The process's output is not held back for this reader any more. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


async def output(container: Container) -> Output:
    """Attach to a container that is about to be started. Close the result in any case.

    Raises ServerError.
    """
    container.check_attach()
    found = Output(container)
    await found.open()
    container.publish("attach")
    return found


__all__ = ["STDERR", "STDOUT", "Output", "output"]
