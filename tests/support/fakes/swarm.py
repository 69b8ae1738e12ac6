"""A swarm without managers' connections and without containers: the leader's loops over a store,
and agents that report what a real one would.

`Swarm` is what a test speaks to. Its time is a `FakeClock`: `await swarm.run(seconds)`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from ipaddress import IPv4Network
from typing import Any

import msgspec
from msgspec.structs import replace

from engine.manager import orchestration
from engine.manager import tasks as rules
from engine.manager.addresses import Addresses
from engine.manager.loops import Loops
from engine.manager.records import (
    LEADER,
    NETWORKS,
    NODE_DATA,
    NODES,
    SERVICE_STATUS,
    SERVICES,
    TASK_STATUS,
    TASKS,
    Leader,
    NetworkRecord,
    NodeData,
    NodeRecord,
    ServiceRecord,
    Subnet,
    Task,
    TaskStatus,
    new_id,
)
from engine.manager.scheduler import Scheduler
from engine.manager.store import Compare, Delete, Event, Fenced, Put, Store
from engine.swarm_session.clock import SECOND
from engine.swarm_session.states import Availability, NodeState, Role, TaskState
from engine.wire.nodes import NodeDescription
from engine.wire.services import ServiceSpec
from tests.support.fakes.clock import FakeClock

GIB = 1 << 30

Fate = Callable[[str, Task], tuple[TaskState, float] | None]
"""How a task ends by itself once it runs: the state and after how many seconds; None: not at
all.
"""


class Agents:
    """Every node's agent. A node in `dead` reports nothing."""

    def __init__(self, store: Store, clock: FakeClock, *, latency: float = 0.05, stop: float = 0.2) -> None:
        self.latency = latency
        self.stop = stop
        self.fate: Fate = lambda key, task: None
        self.dead: set[str] = set()
        self.running: dict[str, str] = {}
        """What containers would be running: node by task."""
        self._store = store
        self._clock = clock
        self._work: set[asyncio.Task[None]] = set()
        store.subscribe(self._changed)

    def _changed(self, event: Event) -> None:
        if event.kind is TASKS:
            if event.new is None:
                self.running.pop(event.key, None)
            elif event.new.record.assigned:
                self._later(event.key, self.latency)

    def _later(self, key: str, seconds: float) -> None:
        self._clock.call_at(self._clock.monotonic() + seconds, lambda: self._begin(key))

    def _begin(self, key: str) -> None:
        work = asyncio.ensure_future(self._look(key))
        self._work.add(work)
        work.add_done_callback(self._work.discard)

    async def _look(self, key: str) -> None:
        """Do the next thing that a task's record asks for."""
        task = self._store.record(TASKS, key)
        if task is None or task.node in self.dead:
            return
        state = rules.observed(self._store, key, task)
        if state.ended:
            return
        if task.desired >= TaskState.SHUTDOWN:
            if key in self.running:
                self._clock.call_at(self._clock.monotonic() + self.stop, lambda: self._end(key, TaskState.SHUTDOWN))
            else:
                await self.report(key, TaskState.SHUTDOWN)
        elif task.desired is TaskState.READY:
            if state < TaskState.READY:
                fate = self.fate(key, task)
                if fate is not None and fate[0] is TaskState.REJECTED:
                    await self.report(key, TaskState.REJECTED)
                else:
                    await self.report(key, TaskState.READY)
        elif state < TaskState.RUNNING:
            fate = self.fate(key, task)
            if fate is not None and fate[0] is TaskState.REJECTED:
                await self.report(key, TaskState.REJECTED)
                return
            self.running[key] = task.node
            await self.report(key, TaskState.RUNNING)
            if fate is not None:
                self._clock.call_at(self._clock.monotonic() + fate[1], lambda: self._end(key, fate[0]))

    def _end(self, key: str, state: TaskState) -> None:
        if self.running.get(key) is None or self.running[key] in self.dead:
            return
        del self.running[key]
        work = asyncio.ensure_future(self.report(key, state))
        self._work.add(work)
        work.add_done_callback(self._work.discard)

    async def report(self, key: str, state: TaskState, **more: Any) -> None:
        """Write a status as the dispatcher would: never back."""
        while True:
            entry = self._store.get(TASK_STATUS, key)
            task = self._store.get(TASKS, key)
            if task is None or (entry is not None and entry.record.state >= state):
                return
            if state is not TaskState.RUNNING:
                self.running.pop(key, None)
            now = self._clock.now()
            ran = entry.record.ran if entry is not None else 0
            ran = ran or (now if state is TaskState.RUNNING else 0)
            status = TaskStatus(state=state, since=now, ran=ran, **more)
            compare = Compare(TASK_STATUS, key, 0 if entry is None else entry.revision)
            with contextlib.suppress(Exception):
                await self._store.commit([Put(TASK_STATUS, key, status)], [compare])
                return
            await self._clock.sleep(1.0)

    def back(self, node: str) -> None:
        """A node's agent is connected again, with the containers that it had."""
        self.dead.discard(node)
        for key in self._store.tasks_on(node):
            self._later(key, self.latency)


class Swarm:
    """`store` is what agents and the API write to. Each of `peers` is the store of another manager,
    which may lead as well.
    """

    def __init__(self, store: Store, clock: FakeClock, peers: Sequence[Store] = ()) -> None:
        self.store = store
        self.clock = clock
        self.agents = Agents(store, clock)
        self._terms = 0
        self._leading: list[asyncio.Task[None]] = []
        made = [orchestration.loops(each, clock) for each in (store, *peers)]
        self._managers = [Loops(loops, each, clock) for loops, each in zip(made, (store, *peers), strict=True)]
        self.addresses = next(loop for loop in made[0] if isinstance(loop, Addresses))
        self.placement = next(loop.placement for loop in made[0] if isinstance(loop, Scheduler))

    # --- leadership -------------------------------------------------------------------------------

    async def lead(self, manager: int = 0, *, depose: bool = True) -> None:
        """A new term begins, at a manager that has seen all events. `depose`: the leader before
        ends at once, else it goes on until its writes are fenced off.
        """
        if depose:
            await self.depose()
        self._terms += 1
        await self.store.commit([Delete(LEADER, "")])
        await self.store.commit([Put(LEADER, "", Leader(f"manager{self._terms}", self._terms))])
        entry = self.store.get(LEADER)
        assert entry is not None
        fence = Compare(LEADER, "", entry.created, by_creation=True)
        self._leading.append(asyncio.ensure_future(self._managers[manager].lead(fence)))

    async def start(self, store: Store) -> None:
        """The process of another manager starts, with this store, and leads."""
        loops = Loops(orchestration.loops(store, self.clock), store, self.clock)
        await store.load()
        self._managers.append(loops)
        await self.lead(len(self._managers) - 1)

    async def depose(self) -> None:
        """The leader is gone; nothing finishes what it was at."""
        for leading in self._leading:
            leading.cancel()
        if self._leading:
            await asyncio.wait(self._leading)
        self._leading = []

    async def run(self, seconds: float) -> None:
        await self.clock.advance(seconds)
        for leading in self._leading:
            if leading.done():
                with contextlib.suppress(Fenced):
                    leading.result()

    async def do(self, action: Coroutine[Any, Any, Any]) -> Any:
        """Carry out an action that may have to wait for etcd, and let the time pass meanwhile."""
        work = asyncio.ensure_future(action)
        await self.clock.settle()
        while not work.done():
            await self.clock.advance(0.05)
        return work.result()

    # --- nodes ------------------------------------------------------------------------------------

    async def node(
        self,
        node: str,
        *,
        cpus: float = 4,
        memory: int = 8 * GIB,
        labels: dict[str, str] | None = None,
        role: Role = Role.WORKER,
        availability: Availability = Availability.ACTIVE,
        state: NodeState = NodeState.READY,
        features: tuple[str, ...] = ("overlay",),
        **description: Any,
    ) -> None:
        record = NodeRecord(
            created=self.clock.now(),
            updated=self.clock.now(),
            labels=labels or {},
            role=role,
            availability=availability,
        )
        document = {
            "Hostname": node,
            "Platform": {"OS": "linux", "Architecture": "x86_64"},
            "Resources": {"NanoCPUs": int(cpus * 1e9), "MemoryBytes": memory},
            **description,
        }
        data = NodeData(
            description=msgspec.convert(document, NodeDescription),
            state=state,
            since=self.clock.now(),
            features=features,
        )
        await self.store.commit([Put(NODES, node, record), Put(NODE_DATA, node, data)])

    async def nodes(self, count: int, **fields: Any) -> list[str]:
        names = [f"node{number:02}" for number in range(1, count + 1)]
        for name in names:
            await self.node(name, **fields)
        return names

    async def wish(self, node: str, **fields: Any) -> None:
        """Change what the operator wants of a node."""
        record = self.store.record(NODES, node)
        assert record is not None
        await self.store.commit([Put(NODES, node, replace(record, **fields))])

    async def observe(self, node: str, state: NodeState) -> None:
        """A manager finds a node in this state; its agent is silent unless it is ready."""
        data = self.store.record(NODE_DATA, node)
        assert data is not None
        if state is NodeState.READY:
            self.agents.back(node)
        else:
            self.agents.dead.add(node)
        await self.store.commit([Put(NODE_DATA, node, replace(data, state=state, since=self.clock.now()))])

    async def remove_node(self, node: str) -> None:
        self.agents.dead.add(node)
        for key in [key for key, on in self.agents.running.items() if on == node]:
            del self.agents.running[key]
        await self.store.commit([Delete(NODES, node), Delete(NODE_DATA, node)])

    # --- networks ---------------------------------------------------------------------------------

    async def network(self, name: str = "net", subnet: str = "10.0.1.0/24", **fields: Any) -> str:
        """A network of the swarm; its gateway is the first address."""
        gateway = str(next(IPv4Network(subnet).hosts()))
        now, vni = self.clock.now(), 4096 + len(self.store.all(NETWORKS))
        record = NetworkRecord(
            created=now, updated=now, name=name, subnets=(Subnet(subnet, gateway),), vni=vni, **fields
        )
        key = new_id()
        await self.store.commit([Put(NETWORKS, key, record)])
        return key

    def virtual_ips(self, service: str) -> dict[str, str]:
        """By network."""
        status = self.store.record(SERVICE_STATUS, service)
        if status is None or status.endpoint is None:
            return {}
        return {each.network_id: each.addr for each in status.endpoint.virtual_ips}

    # --- services ---------------------------------------------------------------------------------

    async def create(self, name: str = "web", **fields: Any) -> str:
        """A service. `fields` are those of `spec`."""
        record = ServiceRecord(created=self.clock.now(), updated=self.clock.now(), spec=spec(name, **fields))
        key = new_id()
        await self.store.commit([Put(SERVICES, key, record)])
        return key

    async def update(self, key: str, *, rollback: bool = False, **fields: Any) -> None:
        """Replace the spec, as the API does it."""
        entry = self.store.get(SERVICES, key)
        assert entry is not None
        old = entry.record
        new = replace(
            old,
            updated=self.clock.now(),
            spec=spec(old.spec.name, **fields),
            previous=old.spec,
            version=old.version + 1,
            rollback=rollback,
        )
        await self.store.commit([Put(SERVICES, key, new)], [Compare(SERVICES, key, entry.revision)])

    def update_state(self, key: str) -> str:
        """The state of the update to the current spec; "" when there is none."""
        status = self.store.record(SERVICE_STATUS, key)
        service = self.store.record(SERVICES, key)
        assert service is not None
        return "" if status is None or status.version != service.version else status.update.state

    async def remove(self, key: str) -> None:
        await self.store.commit([Delete(SERVICES, key)])

    # --- what is there ----------------------------------------------------------------------------

    def tasks(self, service: str) -> dict[str, Task]:
        """The live tasks."""
        return {key: task for key, task in self.all_tasks(service).items() if rules.live(task)}

    def all_tasks(self, service: str) -> dict[str, Task]:
        """Those that have ended, too, by age."""
        found = rules.entries(self.store, self.store.tasks_of(service))
        return {key: entry.record for key, entry in sorted(found, key=rules.age)}

    def state(self, key: str) -> TaskState:
        task = self.store.record(TASKS, key)
        assert task is not None
        return rules.observed(self.store, key, task)

    def running(self, service: str) -> dict[str, Task]:
        return {key: task for key, task in self.tasks(service).items() if self.state(key) is TaskState.RUNNING}

    def slots(self, service: str) -> list[int]:
        """The slot of each live task."""
        return sorted(task.slot for task in self.tasks(service).values())

    def spread(self, service: str) -> dict[str, int]:
        """Live tasks by node."""
        counts: dict[str, int] = {}
        for task in self.tasks(service).values():
            counts[task.node] = counts.get(task.node, 0) + 1
        return counts


@contextlib.asynccontextmanager
async def leading(store: Store, clock: FakeClock, nodes: int = 3) -> AsyncIterator[Swarm]:
    """A swarm of so many nodes, with a leader until the end of the block."""
    swarm = Swarm(store, clock)
    await swarm.nodes(nodes)
    await swarm.lead()
    try:
        yield swarm
    finally:
        await swarm.depose()


def spec(
    name: str = "web",
    *,
    replicas: int | None = None,
    mode: dict[str, Any] | None = None,
    image: str = "busybox:1",
    restart: dict[str, Any] | None = None,
    constraints: list[str] | None = None,
    placement: dict[str, Any] | None = None,
    reservations: dict[str, Any] | None = None,
    update: dict[str, Any] | None = None,
    rollback_config: dict[str, Any] | None = None,
    ports: list[dict[str, Any]] | None = None,
    container: dict[str, Any] | None = None,
    networks: Sequence[str] = (),
    endpoint_mode: str = "",
    force: int = 0,
) -> ServiceSpec:
    """A service's spec, from parts of the API's document."""
    template: dict[str, Any] = {"ContainerSpec": {"Image": image, **(container or {})}, "ForceUpdate": force}
    if restart is not None:
        template["RestartPolicy"] = restart
    if constraints is not None or placement is not None:
        template["Placement"] = {**(placement or {}), "Constraints": constraints or []}
    if reservations is not None:
        template["Resources"] = {"Reservations": reservations}
    document: dict[str, Any] = {
        "Name": name,
        "TaskTemplate": template,
        "Mode": mode or {"Replicated": {"Replicas": 1 if replicas is None else replicas}},
    }
    if update is not None:
        document["UpdateConfig"] = update
    if rollback_config is not None:
        document["RollbackConfig"] = rollback_config
    if networks:
        template["Networks"] = [{"Target": network} for network in networks]
    if ports is not None or endpoint_mode:
        document["EndpointSpec"] = {"Ports": ports or [], "Mode": endpoint_mode}
    return msgspec.convert(document, ServiceSpec)


def seconds(number: float) -> int:
    """As the API's durations."""
    return int(number * SECOND)
