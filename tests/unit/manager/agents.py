"""A swarm's records for tests, and agents that are driven by hand: real connections over socket
pairs to a dispatcher.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from engine.manager import records
from engine.manager.ca import Authority
from engine.manager.dispatcher import Dispatcher
from engine.manager.identity import Identity
from engine.manager.records import (
    Claim,
    Cluster,
    Leader,
    ManagerPresence,
    NodeRecord,
    ServiceRecord,
    SpecVersion,
    Task,
    TaskStatus,
    spec_key,
)
from engine.manager.store import Change, Put, Store
from engine.swarm_session import messages
from engine.swarm_session.clock import SECOND
from engine.swarm_session.frames import Connection
from engine.swarm_session.messages import Assigned, Assignments, Beat, Bye, Done, Hello, ReadLogs, Status
from engine.swarm_session.states import Role, TaskState
from engine.wire.nodes import NodeDescription
from engine.wire.services import ServiceSpec
from engine.wire.swarm import DispatcherConfig, SwarmSpec
from engine.wire.tasks import ContainerSpec, TaskSpec
from tests.support.fakes.clock import FakeClock

PERIOD = 5.0


def cluster(period: float = PERIOD, epoch: int = 0, **spec: Any) -> Cluster:
    return Cluster(
        id="swarm",
        created=0,
        updated=0,
        spec=SwarmSpec(name="default", dispatcher=DispatcherConfig(heartbeat_period=int(period * SECOND)), **spec),
        root="ROOT\n",
        worker_token="",
        manager_token="",
        epoch=epoch,
    )


def node_record(role: Role = Role.WORKER, **more: Any) -> NodeRecord:
    return NodeRecord(created=0, updated=0, role=role, **more)


def service(name: str = "web", version: int = 1, **container: Any) -> ServiceRecord:
    return ServiceRecord(created=0, updated=0, spec=spec(name, **container), version=version)


def spec(name: str = "web", **container: Any) -> ServiceSpec:
    return ServiceSpec(name=name, task_template=TaskSpec(container_spec=ContainerSpec(image="busybox", **container)))


def task(node: str = "n1", service: str = "s1", version: int = 1, slot: int = 1, **more: Any) -> Task:
    more.setdefault("assigned", 1)
    return Task(service=service, version=version, slot=slot, node=node, **more)


async def found(store: Store, *nodes: str, managers: tuple[str, ...] = ("m1",), period: float = PERIOD) -> None:
    """A swarm of these nodes, with a service of one spec."""
    changes: list[Change] = [
        Put(records.CLUSTER, "", cluster(period)),
        Put(records.LEADER, "", Leader(managers[0], 1)),
        Put(records.SERVICES, "s1", service()),
        Put(records.CLAIMS, records.name_claim("service", "web"), Claim("s1")),
        Put(records.SPEC_VERSIONS, spec_key("s1", 1), SpecVersion(spec())),
    ]
    changes += [Put(records.NODES, node, node_record()) for node in nodes]
    changes += [Put(records.NODES, node, node_record(Role.MANAGER)) for node in managers]
    changes += [
        Put(records.MANAGERS, node, ManagerPresence(address=f"10.77.0.{number}:2377", member=number))
        for number, node in enumerate(managers, 1)
    ]
    await store.commit(changes)


def state_of(store: Store, task: str) -> TaskState | None:
    status = store.record(records.TASK_STATUS, task)
    return None if status is None else status.state


def node_state(store: Store, node: str) -> str:
    data = store.record(records.NODE_DATA, node)
    return "" if data is None else data.state.label


class Network:
    """A network as an agent was sent it."""

    def __init__(self, definition: messages.NetworkView) -> None:
        self.definition = definition
        self.endpoints: dict[str, messages.EndpointView] = {}
        self.services: dict[str, messages.ServiceView] = {}
        self.nodes: dict[str, str] = {}

    @property
    def ready(self) -> set[str]:
        return {id for id, endpoint in self.endpoints.items() if endpoint.ready}


class Agent:
    """One agent. `tasks` and what it holds besides follow the assignments it was sent."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.tasks: dict[str, Assigned] = {}
        self.specs: dict[str, ServiceSpec] = {}
        self.secrets: dict[str, bytes] = {}
        self.configs: dict[str, bytes] = {}
        self.auths: dict[str, str] = {}
        self.networks: dict[str, Network] = {}
        self.got: list[Any] = []
        """All messages but views, in their order."""
        self.views: list[messages.Views] = []
        self.beats = 0
        self.session: messages.Session | None = None
        self.sessions: list[messages.Session] = []
        self.bye: Bye | None = None
        self.connection: Connection
        self.logs: Callable[[Connection, ReadLogs], Awaitable[None]] | None = None

    async def connect(self, dispatcher: Dispatcher, role: Role = Role.WORKER, peer: str = "10.0.0.1") -> Agent:
        left, right = socket.socketpair()
        identity = Identity(self.node, role, "", "swarm")

        async def serve(connection: Connection, message: Any) -> None:
            await dispatcher.serve(connection, message, identity)

        left.setblocking(False)
        right.setblocking(False)
        self.connection = Connection(*await asyncio.open_unix_connection(sock=left), self._served, dialled=True)
        self.connection.on_beat = self._beaten
        there = _From(*await asyncio.open_unix_connection(sock=right), serve, dialled=False)
        there.address = peer
        self.there = there

        async def converse() -> None:
            await there.run()
            dispatcher.disconnected(there)

        self.running = [asyncio.create_task(self.connection.run()), asyncio.create_task(converse())]
        return self

    async def hello(self, dispatcher: Dispatcher, *statuses: Status, **more: Any) -> Agent:
        """Connect and begin a session."""
        await self.connect(dispatcher)
        await self.register(*statuses, **more)
        return self

    async def register(self, *statuses: Status, **more: Any) -> messages.Session:
        description = NodeDescription(hostname=self.node)
        self.session = await self.connection.ask(Hello(description=description, statuses=statuses, **more))
        assert self.session is not None
        return self.session

    def _beaten(self) -> None:
        self.beats += 1

    async def _served(self, connection: Connection, message: Any) -> None:
        if isinstance(message, messages.Views):
            self.see(message)
            return
        self.got.append(message)
        match message:
            case Assignments():
                self.apply(message)
                for assigned in message.put:
                    assert assigned.addresses.keys() <= self.networks.keys(), "views come first"
            case Bye():
                self.bye = message
            case messages.Session():
                self.session = message
                self.sessions.append(message)
            case ReadLogs() if self.logs is not None:
                await self.logs(connection, message)

    def see(self, message: messages.Views) -> None:
        self.views.append(message)
        if message.whole:
            self.networks.clear()
        for view in message.of:
            if view.gone:
                del self.networks[view.network]
                continue
            if view.definition is not None:
                self.networks[view.network] = Network(view.definition)
            network = self.networks[view.network]
            network.endpoints |= {each.id: each for each in view.endpoints}
            network.services |= {each.id: each for each in view.services}
            network.nodes |= view.nodes
            for known, gone in (
                (network.endpoints, view.endpoints_gone),
                (network.services, view.services_gone),
                (network.nodes, view.nodes_gone),
            ):
                for key in gone:
                    known.pop(key, None)

    def apply(self, message: Assignments) -> None:
        if message.whole:
            self.tasks.clear()
            self.specs.clear()
            self.secrets.clear()
            self.configs.clear()
            self.auths.clear()
        for key in message.specs:
            assert key not in self.specs, "a spec is sent once"
        self.specs |= message.specs
        for each in message.secrets:
            assert each.id not in self.secrets, "a secret is sent once"
            self.secrets[each.id] = each.data
        self.configs |= {each.id: each.data for each in message.configs}
        self.auths |= message.auths
        for assigned in message.put:
            self.tasks[assigned.id] = assigned
        for id in message.remove:
            del self.tasks[id]
        self.specs = {key: self.specs[key] for key in {each.spec for each in self.tasks.values()}}
        self.secrets = {
            key: self.secrets[key] for each in self.tasks.values() for key in each.secrets if key in self.secrets
        }
        self.configs = {
            key: self.configs[key] for each in self.tasks.values() for key in each.configs if key in self.configs
        }

    async def report(self, *statuses: Status) -> None:
        assert isinstance(await self.connection.ask(messages.Statuses(of=statuses)), Done)

    def beat(self) -> None:
        self.connection.write(Beat())

    async def close(self) -> None:
        await self.connection.close()
        await asyncio.gather(*self.running, return_exceptions=True)


class _From(Connection):
    """A connection that seems to come from an address."""

    address = ""
    quiet = 0.0
    """Seconds since its host acknowledged a packet."""

    @property
    def peer(self) -> str:
        return self.address

    @property
    def silence(self) -> float:
        return self.quiet


def status(task: str, state: TaskState, **more: Any) -> Status:
    return Status(task=task, state=state, since=1, **more)


def status_record(state: TaskState) -> TaskStatus:
    return TaskStatus(state=state, since=0)


def dispatcher_of(store: Store, clock: FakeClock, node: str = "m1") -> Dispatcher:
    return Dispatcher(store, clock, node, Authority(store, clock), address="10.77.0.9:2377")
