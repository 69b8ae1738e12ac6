"""The manager's program with one more socket, on which simulated agents connect without TLS:

    python -m tests.simulated.manager ROOT RUN

An agent's connection to RUN/agents.sock begins with a line, its node's id. The line `nodes N` makes
the records of N nodes instead, and the reply is a line. All else is the real program.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import sys
from pathlib import Path

import uvloop

from engine.manager.identity import Identity
from engine.manager.main import collect_rarely
from engine.manager.process import Manager
from engine.manager.records import NODES, NodeRecord
from engine.manager.store import Put
from engine.swarm_session.frames import Connection
from engine.swarm_session.messages import Message
from engine.swarm_session.states import Role
from engine.system import memory
from engine.system.tasks import spawn

SOCKET = "agents.sock"


def node_name(number: int) -> str:
    return f"node{number:021}"


class Simulated(Manager):
    async def listen(self) -> None:
        await super().listen()
        self._agents = await asyncio.start_unix_server(self._came, self._run / SOCKET, backlog=4096)

    def _came(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        spawn(self._speak(reader, writer), "simulated agent")

    async def _speak(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = (await reader.readline()).decode().strip()
        if line.startswith("nodes "):
            await self._make_nodes(int(line.split()[1]))
            writer.write(b"done\n")
            await writer.drain()
            writer.close()
            return
        identity = Identity(line, Role.WORKER, (await self._parts.identity()).certificate)
        dispatcher = self._parts.dispatcher

        async def serve(connection: Connection, message: Message) -> None:
            await dispatcher.serve(connection, message, identity)

        connection = Connection(reader, writer, serve, dialled=False)
        with contextlib.suppress(ConnectionError):
            await connection.run()
        dispatcher.disconnected(connection)

    async def _make_nodes(self, count: int) -> None:
        store = self._parts._store
        now = self._parts._clock.now()
        record = NodeRecord(created=now, updated=now)
        await store.commit_many([([Put(NODES, node_name(number), record)], []) for number in range(count)])


async def serve(root: Path, run: Path) -> int:
    manager = Simulated(root, run)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, manager.end)
    await manager.listen()
    collect_rarely()
    try:
        return await manager.until_ended()
    finally:
        await manager.close()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (20_000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    memory.configure()
    sys.exit(uvloop.run(serve(Path(sys.argv[1]), Path(sys.argv[2]))))
