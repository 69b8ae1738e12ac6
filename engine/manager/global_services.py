"""Keeps one task of each global service on each node that is usable, passes its constraints, and
has what its networks need of the kernel.

A new task comes to active, ready nodes only. A task stays on a node that is paused, or of which
nothing is known; it ends on one that is drained or down, or that does not pass any more. A task
that has ended for good by its restart policy is not replaced.

Threads: the event loop's.
"""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from engine.manager import tasks as rules
from engine.manager.loops import Acting
from engine.manager.placement import Demand
from engine.manager.records import (
    NODE_DATA,
    NODES,
    SERVICES,
    TASKS,
    NodeData,
    NodeRecord,
    ServiceRecord,
    Task,
    new_id,
)
from engine.manager.scheduler import SLICE, Birth, Scheduler
from engine.manager.slots import Slots
from engine.manager.store import Change, Compare, Entry, Event, Put, Store
from engine.swarm_session.clock import Clock
from engine.swarm_session.states import TaskState


class Dirty:
    """Pairs of a service and a node to look at. Of services of one sort: `is_ours`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._services: dict[str, None] = {}
        """To look at on all nodes."""
        self._nodes: dict[str, None] = {}
        """To look at for all services."""
        self._pairs: dict[tuple[str, str], None] = {}
        self.ours: dict[str, None] = {}

    def changed(self, event: Event, ours: bool) -> None:
        """`ours`: for the record of a service, whether this one is of the sort."""
        kind = event.kind
        if kind is SERVICES:
            if ours:
                self.ours[event.key] = None
                self._services[event.key] = None
            elif event.key in self.ours:
                del self.ours[event.key]
                self._services.pop(event.key, None)
                self._pairs = {pair: None for pair in self._pairs if pair[0] != event.key}
        elif kind is NODES:
            if event.old is None or event.new is None or _wishes(event.old.record) != _wishes(event.new.record):
                self._nodes[event.key] = None
        elif kind is NODE_DATA:
            if event.old is None or event.new is None or _facts(event.old.record) != _facts(event.new.record):
                self._nodes[event.key] = None
        elif kind is TASKS:
            task: Task = (event.new or event.old).record  # type: ignore[union-attr]
            if task.service in self.ours and (event.new is None or not rules.live(task)):
                self._pairs[task.service, task.node] = None

    def all(self) -> None:
        self._services |= self.ours

    def __bool__(self) -> bool:
        return bool(self._services or self._nodes or self._pairs)

    def take(self) -> dict[str, list[str]]:
        """The nodes to look at, by service."""
        found: dict[str, dict[str, None]] = {}
        for service in self._services:
            found[service] = dict.fromkeys(self._store.all(NODES))
        for node in self._nodes:
            for service in self.ours:
                found.setdefault(service, {})[node] = None
        for service, node in self._pairs:
            if service in self.ours:
                found.setdefault(service, {})[node] = None
        self._services, self._nodes, self._pairs = {}, {}, {}
        return {service: list(nodes) for service, nodes in found.items()}

    def put_back(self, taken: dict[str, list[str]]) -> None:
        self._pairs |= {(service, node): None for service, nodes in taken.items() for node in nodes}


def _wishes(record: NodeRecord) -> object:
    return record.availability, record.labels, record.role


def _facts(data: NodeData) -> object:
    return data.state, data.description, data.address, data.features


class Global:
    name = "global"

    def __init__(self, store: Store, clock: Clock, slots: Slots, scheduler: Scheduler) -> None:
        self._store = store
        self._clock = clock
        self._slots = slots
        self._scheduler = scheduler
        self._dirty = Dirty(store)

    def changed(self, event: Event) -> None:
        ours = event.kind is SERVICES and event.new is not None and _is_global(event.new.record)
        self._dirty.changed(event, ours)

    def take_over(self) -> None:
        self._dirty.all()

    def due(self) -> float | None:
        return 0 if self._dirty else None

    async def step(self, acting: Acting) -> None:
        taken = self._dirty.take()
        try:
            births: list[Birth] = []
            ends: list[tuple[list[Change], list[Compare]]] = []
            for key, nodes in taken.items():
                service = self._store.record(SERVICES, key)
                if service is None:
                    continue
                demand = self._scheduler.demand_for(key, service.version, service.spec)
                for number, node in enumerate(nodes):
                    self._look(key, service, demand, node, births, ends)
                    if number % SLICE == SLICE - 1:
                        await asyncio.sleep(0)
            if ends:
                await acting.commit_many(ends)
            if births:
                written = await self._scheduler.create(acting, births)
                lost = [birth for birth, done in zip(births, written, strict=True) if not done]
                self._dirty.put_back({birth.task.service: [birth.task.node] for birth in lost})
        except BaseException:
            self._dirty.put_back(taken)
            raise

    def _look(
        self,
        key: str,
        service: ServiceRecord,
        demand: Demand,
        node: str,
        births: list[Birth],
        ends: list[tuple[list[Change], list[Compare]]],
    ) -> None:
        tasks = self._slots.at(key, node)
        live = [item for item in tasks if rules.live(item[1].record)]
        wanted = self._scheduler.eligible(demand, node)
        if live and not wanted:
            ends += [_end(item, entry, self._clock.now()) for item, entry in live]
        elif wanted and not live and is_open(self._store, node):
            if tasks and rules.done(self._store, tasks[-1][0], tasks[-1][1].record):
                return
            births.append(birth(self._store, self._clock, key, service, node, tasks))


def birth(
    store: Store, clock: Clock, key: str, service: ServiceRecord, node: str, tasks: list[tuple[str, Entry[Task]]]
) -> Birth:
    """A task for one node. `tasks`: those that it has had of the service."""
    now = clock.now()
    before = next((other for other, _ in reversed(tasks) if not rules.over(store, other)), "")
    task = Task(
        service=key,
        version=service.version,
        node=node,
        desired=TaskState.READY if before else rules.goal(service.spec),
        created=now,
        updated=now,
        follows=before,
        iteration=service.iteration,
    )
    return Birth(new_id(), task, service.spec)


def is_open(store: Store, node: str) -> bool:
    """True if new tasks may come to the node."""
    record = store.record(NODES, node)
    return record is not None and rules.open_for_tasks(record.availability, store.record(NODE_DATA, node))


def _end(key: str, entry: Entry[Task], now: int) -> tuple[list[Change], list[Compare]]:
    ended = replace(entry.record, desired=TaskState.SHUTDOWN, updated=now)
    return [Put(TASKS, key, ended)], [Compare(TASKS, key, entry.revision)]


def _is_global(service: ServiceRecord) -> bool:
    return rules.is_global(service.spec) and not rules.is_job(service.spec)
