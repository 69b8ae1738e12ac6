"""Agents without containers, all in one process:

    python -m tests.simulated.agents RUN COUNT

Each has a connection and a session of its own, beats, and reports what it is assigned: a task is
running, or has shut down, `DELAY` after it was put. Ten times a second a line of JSON goes to
stdout: the sessions, the tasks that run, the longest time until a beat was answered since the last
line.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import random
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import uvloop

from engine.manager import messages
from engine.manager.messages import Assignments, Beat, Bye, Done, Hello, Refused, Session, Status, Statuses
from engine.manager.states import TaskState
from engine.wire.nodes import NodeDescription
from tests.simulated.manager import SOCKET, node_name

DELAY = 0.1
"""Between an assignment and its report, as the batches of a real agent."""
BEGINNING = 500
"""Connections that may wait for their session at a time."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(messages.ANY).decode

DESCRIPTION = msgspec.convert(
    {
        "Hostname": "simulated",
        "Platform": {"OS": "linux", "Architecture": "x86_64"},
        "Resources": {"NanoCPUs": 16_000_000_000, "MemoryBytes": 64 << 30},
        "Engine": {"EngineVersion": "0"},
    },
    NodeDescription,
)


class World:
    """All agents, and one heap of their pending actions."""

    def __init__(self) -> None:
        self.sessions = 0
        self.running = 0
        self.latest = 0.0
        self.byes = 0
        self._todo: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._todo, (time.monotonic() + seconds, self._number, action))

    async def work(self) -> None:
        while True:
            now = time.monotonic()
            while self._todo and self._todo[0][0] <= now:
                heapq.heappop(self._todo)[2]()
            await asyncio.sleep(0.01)

    async def report(self) -> None:
        while True:
            line = {"sessions": self.sessions, "running": self.running, "beat": self.latest, "byes": self.byes}
            print(json.dumps(line), flush=True)
            self.latest = 0.0
            await asyncio.sleep(0.1)


class Agent(asyncio.Protocol):
    def __init__(self, world: World, node: str) -> None:
        self.world = world
        self.node = node
        self.session: Session | None = None
        self.tasks: dict[str, int] = {}
        """The state of each."""
        self._transport: asyncio.Transport
        self._bytes = bytearray()
        self._dirty: dict[str, int] = {}
        self._beaten = 0.0
        self._seq = 1
        self._open = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._transport.write(self.node.encode() + b"\n")
        self._send(Hello(seq=1, description=msgspec.structs.replace(DESCRIPTION, hostname=self.node)))

    def connection_lost(self, exc: Exception | None) -> None:
        self._open = False
        if self.session is not None:
            self.world.sessions -= 1

    def data_received(self, data: bytes) -> None:
        self._bytes += data
        while len(self._bytes) >= 4:
            size = int.from_bytes(self._bytes[:4], "big")
            if len(self._bytes) < 4 + size:
                return
            message = _decode(self._bytes[4 : 4 + size])
            del self._bytes[: 4 + size]
            self._received(message)

    def _received(self, message: messages.Message) -> None:
        world = self.world
        match message:
            case Session():
                if self.session is None:
                    world.sessions += 1
                    world.later(random.random() * message.period, self._beat)
                self.session = message
            case Assignments():
                self._assigned(message)
            case Beat():
                world.latest = max(world.latest, time.monotonic() - self._beaten)
            case Refused():
                print(json.dumps({"refused": message.message}), flush=True)
            case Bye():
                world.byes += 1
            case Done():
                pass

    def _assigned(self, message: Assignments) -> None:
        if not self._dirty:
            self.world.later(DELAY, self._report)
        for task in message.put:
            state = TaskState.RUNNING if task.desired < TaskState.SHUTDOWN else TaskState.SHUTDOWN
            if task.desired == TaskState.READY:
                state = TaskState.READY
            if self.tasks.get(task.id, -1) < state:
                self._set(task.id, state)
                self._dirty[task.id] = state
        for key in message.remove:
            self._set(key, None)

    def _set(self, key: str, state: int | None) -> None:
        self.world.running -= self.tasks.get(key) == TaskState.RUNNING
        if state is None:
            self.tasks.pop(key, None)
        else:
            self.tasks[key] = state
            self.world.running += state == TaskState.RUNNING

    def _report(self) -> None:
        if self._dirty and self._open:
            now = time.time_ns()
            statuses = tuple(
                Status(task=key, state=state, since=now, container=key, ready=state == TaskState.RUNNING)
                for key, state in self._dirty.items()
            )
            self._dirty.clear()
            self._seq += 1
            self._send(Statuses(seq=self._seq, of=statuses))

    def _beat(self) -> None:
        if self._open and self.session is not None:
            self._beaten = time.monotonic()
            self._send(Beat())
            self.world.later(self.session.period, self._beat)

    def _send(self, message: messages.Message) -> None:
        body = _encode(message)
        self._transport.write(len(body).to_bytes(4, "big") + body)


async def run(directory: Path, count: int) -> None:
    world = World()
    loop = asyncio.get_running_loop()
    reporting = asyncio.ensure_future(world.report())
    working = asyncio.ensure_future(world.work())
    for number in range(count):
        await loop.create_unix_connection(
            lambda number=number: Agent(world, node_name(number)),  # type: ignore[misc]
            str(directory / SOCKET),
        )
        while number - world.sessions > BEGINNING:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await asyncio.gather(reporting, working)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (20_000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    uvloop.run(run(Path(sys.argv[1]), int(sys.argv[2])))
