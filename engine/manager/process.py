"""The manager's process from its socket on: one daemon, the agent of this node, and the parts that
manage once `Begin` has come.

Several connections may be open: the daemon's requests, its agent's session, and those of a daemon
before that has not ended yet. Each request is passed to the part that serves it; what a part raises
is the refusal.

Owns:    RUN/manager.sock and its connections; the parts (`running.py`).
Threads: the event loop's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

import msgspec

from engine.errors import Unavailable, WrongState
from engine.manager.running import Running
from engine.swarm_session import messages
from engine.swarm_session.frames import Connection
from engine.swarm_session.messages import Done, Message
from engine.system.tasks import spawn

SOCKET = "manager.sock"
"""In RUN."""

_log = logging.getLogger(__name__)


class Manager:
    """The manager of one node."""

    def __init__(self, root: Path, run: Path) -> None:
        self._root, self._run = root, run
        self._server: asyncio.AbstractServer | None = None
        self._connections: set[Connection] = set()
        self._running: Running | None = None
        self._beginning = asyncio.Lock()
        self._ended = asyncio.Event()
        self._status = 0

    async def listen(self) -> None:
        """Accept the daemon's connections. Raises OSError."""
        path = self._run / SOCKET
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._connected, path)
        path.chmod(0o600)

    def end(self, status: int = 0) -> None:
        """Let `until_ended` return `status`, the exit status of the process."""
        if not self._ended.is_set():
            self._status = status
            self._ended.set()

    async def until_ended(self) -> int:
        await self._ended.wait()
        return self._status

    async def close(self) -> None:
        """Close connections and parts. etcd's data stays."""
        (self._run / SOCKET).unlink(missing_ok=True)
        if self._server is not None:
            self._server.close()
        if self._running is not None:
            await self._running.close()
        for connection in list(self._connections):
            await connection.close()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer, self._serve, dialled=False)
        spawn(self._converse(connection), "manager: a connection of the daemon")

    async def _converse(self, connection: Connection) -> None:
        self._connections.add(connection)
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)
            if self._running is not None:
                self._running.dispatcher.disconnected(connection)

    async def _serve(self, connection: Connection, message: Message) -> None:
        match message:
            case messages.Begin():
                await self._begin(message)
                await connection.send(Done(seq=message.seq))
            case messages.Stop():
                await self._stop(message)
                await connection.send(Done(seq=message.seq))
                self.end()
            case messages.Backup():
                await connection.send(Done(seq=message.seq, body=await self._parts.backup(message.path)))
            case messages.Call():
                answer = await self._parts.control.call(message)
                await connection.send(msgspec.structs.replace(answer, seq=message.seq))
            case messages.Follow():
                await self._parts.logs.follow(connection, message)
            case messages.Watch():
                await self._parts.control.watch(connection, message)
            case messages.FetchRoot() | messages.Join() | messages.Renew():
                await self._parts.joining.serve(connection, message, await self._parts.identity())
            case _:
                await self._parts.dispatcher.serve(connection, message, await self._parts.identity())

    @property
    def _parts(self) -> Running:
        """Raises Unavailable before `Begin` is done."""
        if self._running is None:
            raise Unavailable("This node is not a swarm manager: its manager is still starting")
        return self._running

    async def _begin(self, message: messages.Begin) -> None:
        """Become a manager, unless it is one. Requests that come meanwhile are refused."""
        async with self._beginning:
            if self._running is not None:
                if self._running.node != message.node or message.how == "force":
                    raise WrongState(f"this process manages the node {self._running.node} already: stop it first")
                return
            self._running = await Running.begin(self._root, self._run, message, self.end)

    async def _stop(self, message: messages.Stop) -> None:
        async with self._beginning:
            running, self._running = self._running, None
            if running is not None:
                try:
                    if message.leave:
                        await running.leave(message.force)
                except BaseException:
                    self._running = running
                    raise
                with contextlib.suppress(OSError):
                    await running.close()
