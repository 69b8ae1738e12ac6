"""Agents without containers, all in one process:

    python -m tests.simulated.agents RUN COUNT [TURNS]

Each has a connection and a session of its own, beats, and reports what it is assigned: a task is
running, or has shut down, `DELAY` after it was put. TURNS times a second a task of a network is
withdrawn from traffic, or comes back.

Ten times a second a line of JSON goes to stdout: the sessions, the tasks that run, the longest time
until a beat was answered since the last line; and of changes of readiness in the last `WINDOW`
seconds, how many views of nodes showed them, and after what time half of these did, 99 of 100, and
all.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import uvloop

from engine.swarm_session import messages
from engine.swarm_session.messages import Assignments, Beat, Bye, Done, Hello, Refused, Session, Status, Statuses, Views
from engine.swarm_session.states import TaskState
from engine.wire.nodes import NodeDescription
from tests.simulated.manager import SOCKET, node_name

DELAY = 0.1
"""Between an assignment and its report, as the batches of a real agent."""
WINDOW = 10
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
        self.told: dict[str, tuple[float, bool]] = {}
        """When the readiness of a task was reported last, and what it was."""
        self.delays: dict[int, Counter[int]] = {}
        """By second: after how many milliseconds views showed reports."""
        self.on_networks: list[tuple[Agent, str]] = []
        """Tasks that may be withdrawn."""
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
            print(json.dumps(line | {"views": self._views()}), flush=True)
            self.latest = 0.0
            await asyncio.sleep(0.1)

    def _views(self) -> list[float]:
        now = int(time.monotonic())
        delays: Counter[int] = Counter()
        for second in list(self.delays):
            if now - second > WINDOW:
                del self.delays[second]
            else:
                delays += self.delays[second]
        total, seen, found = delays.total(), 0, []
        for delay in sorted(delays):
            seen += delays[delay]
            while len(found) < 3 and seen >= (0.5, 0.99, 1)[len(found)] * total:
                found.append(delay / 1000)
        return [total, *found] if total else []

    async def withdraw(self, turns: int) -> None:
        while turns:
            await asyncio.sleep(1 / turns)
            if self.on_networks:
                agent, task = random.choice(self.on_networks)
                agent.turn(task)


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
        number = int(self.node.removeprefix("node"))
        hello = Hello(
            seq=1,
            description=msgspec.structs.replace(DESCRIPTION, hostname=self.node),
            features=("overlay",),
            data_address=f"192.0.{number // 250}.{number % 250 + 1}",
        )
        self._send(hello)

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
            case Views():
                self._see(message)
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
            if task.addresses and task.id not in self.tasks:
                self.world.on_networks.append((self, task.id))
            if self.tasks.get(task.id, -1) < state:
                self._set(task.id, state)
                self._dirty[task.id] = state
        for key in message.remove:
            self._set(key, None)

    def _see(self, message: Views) -> None:
        now = time.monotonic()
        told = self.world.told
        delays = self.world.delays.setdefault(int(now), Counter())
        for view in message.of:
            if view.definition is not None:
                continue  # it is not news
            for endpoint in view.endpoints:
                since, ready = told.get(endpoint.id, (0.0, False))
                if since and endpoint.ready is ready:
                    delays[round((now - since) * 1000)] += 1

    def turn(self, task: str) -> None:
        """Withdraw a task that runs from traffic, or let it come back."""
        if self.tasks.get(task) == TaskState.RUNNING and self._open:
            _, ready = self.world.told.get(task, (0.0, False))
            self._tell(
                Status(task=task, state=TaskState.RUNNING, since=time.time_ns(), container=task, ready=not ready)
            )

    def _tell(self, *statuses: Status) -> None:
        now = time.monotonic()
        for each in statuses:
            if self.world.told.get(each.task, (0.0, False))[1] != each.ready:
                self.world.told[each.task] = now, each.ready
        self._seq += 1
        self._send(Statuses(seq=self._seq, of=statuses))

    def _set(self, key: str, state: int | None) -> None:
        self.world.running -= self.tasks.get(key) == TaskState.RUNNING
        if state is None:
            self.tasks.pop(key, None)
            self.world.told.pop(key, None)
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
            self._tell(*statuses)

    def _beat(self) -> None:
        if self._open and self.session is not None:
            self._beaten = time.monotonic()
            self._send(Beat())
            self.world.later(self.session.period, self._beat)

    def _send(self, message: messages.Message) -> None:
        body = _encode(message)
        self._transport.write(len(body).to_bytes(4, "big") + body)


async def run(directory: Path, count: int, turns: int) -> None:
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
    await asyncio.gather(reporting, working, world.withdraw(turns))


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (20_000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    uvloop.run(run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0))
