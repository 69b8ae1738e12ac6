"""Jobs: services whose tasks run to their end.

A replicated job has at most `MaxConcurrent` tasks at a time until `TotalCompletions` slots are
complete. A global job has one task on each node that a global service would have one on. A task
that fails is restarted in its place by its policy (`restarts.py`); a place whose attempts are used
up stays failed. Each new iteration begins from nothing, and removes the tasks of the one before.

Threads: the event loop's.
"""

from __future__ import annotations

import itertools

from msgspec.structs import replace

from engine.manager import tasks as rules
from engine.manager.global_services import Dirty, birth, is_open
from engine.manager.loops import Acting
from engine.manager.records import (
    SERVICE_STATUS,
    SERVICES,
    TASK_STATUS,
    TASKS,
    ServiceRecord,
    ServiceStatus,
    Task,
    new_id,
)
from engine.manager.scheduler import Birth, Scheduler
from engine.manager.slots import Slots
from engine.manager.store import Change, Compare, Entry, Event, Put, Store
from engine.swarm_session.clock import Clock
from engine.swarm_session.states import TaskState
from engine.wire.services import ServiceSpec


def concurrent(spec: ServiceSpec) -> int:
    """Tasks of a replicated job at a time."""
    job = spec.mode.replicated_job
    return 1 if job is None or job.max_concurrent is None else job.max_concurrent


def completions(spec: ServiceSpec) -> int:
    """Slots of a replicated job."""
    job = spec.mode.replicated_job
    return concurrent(spec) if job is None or job.total_completions is None else job.total_completions


class Jobs:
    name = "jobs"

    def __init__(self, store: Store, clock: Clock, slots: Slots, scheduler: Scheduler) -> None:
        self._store = store
        self._clock = clock
        self._slots = slots
        self._scheduler = scheduler
        self._replicated: dict[str, None] = {}
        self._global = Dirty(store)

    def changed(self, event: Event) -> None:
        kind = event.kind
        service: ServiceRecord | None = event.new.record if kind is SERVICES and event.new is not None else None
        self._global.changed(event, service is not None and service.spec.mode.global_job is not None)
        if kind is SERVICES and service is None:
            self._replicated.pop(event.key, None)
        elif service is not None and service.spec.mode.replicated_job is not None:
            self._replicated[event.key] = None
        elif kind is TASK_STATUS:
            if event.new is not None and event.new.record.state is TaskState.COMPLETE:
                task = self._store.record(TASKS, event.key)
                if task is not None and task.desired is TaskState.COMPLETE:
                    self._replicated[task.service] = None
        elif kind is TASKS:
            known: Task = (event.new or event.old).record  # type: ignore[union-attr]
            if known.slot and (event.new is None or not rules.live(known)) and self._is_job(known.service):
                self._replicated[known.service] = None

    def _is_job(self, key: str) -> bool:
        service = self._store.record(SERVICES, key)
        return service is not None and service.spec.mode.replicated_job is not None

    def take_over(self) -> None:
        self._replicated |= dict.fromkeys(self._store.all(SERVICES))
        self._global.all()

    def due(self) -> float | None:
        return 0 if self._replicated or self._global else None

    async def step(self, acting: Acting) -> None:
        replicated, self._replicated = list(self._replicated), {}
        on_nodes = self._global.take()
        try:
            births: list[Birth] = []
            removals: list[tuple[list[Change], list[Compare]]] = []
            for key in replicated:
                service = self._store.record(SERVICES, key)
                if service is not None and service.spec.mode.replicated_job is not None:
                    await self._begin(acting, key, service)
                    removals += self._removals(key, service)
                    births += self._in_slots(key, service)
            for key, nodes in on_nodes.items():
                service = self._store.record(SERVICES, key)
                if service is not None and service.spec.mode.global_job is not None:
                    await self._begin(acting, key, service)
                    removals += self._removals(key, service)
                    births += self._on_nodes(key, service, nodes)
            if removals:
                await acting.commit_many(removals)
            if births and not all(await self._scheduler.create(acting, births)):
                self._replicated |= dict.fromkeys(replicated)
                self._global.put_back(on_nodes)
        except BaseException:
            self._replicated |= dict.fromkeys(replicated)
            self._global.put_back(on_nodes)
            raise

    async def _begin(self, acting: Acting, key: str, service: ServiceRecord) -> None:
        """Note the time of a new iteration."""
        entry = self._store.get(SERVICE_STATUS, key)
        status = ServiceStatus() if entry is None else entry.record
        if status.iteration == service.iteration and status.last_execution:
            return
        begun = replace(status, iteration=service.iteration, last_execution=self._clock.now())
        revision = 0 if entry is None else entry.revision
        await acting.commit([Put(SERVICE_STATUS, key, begun)], [Compare(SERVICE_STATUS, key, revision)])

    def _removals(self, key: str, service: ServiceRecord) -> list[tuple[list[Change], list[Compare]]]:
        """The tasks of earlier iterations."""
        groups: list[tuple[list[Change], list[Compare]]] = []
        for name, entry in rules.entries(self._store, self._store.tasks_of(key)):
            task = entry.record
            if task.iteration != service.iteration and task.desired is not TaskState.REMOVE:
                removed = replace(task, desired=TaskState.REMOVE, updated=self._clock.now())
                groups.append(([Put(TASKS, name, removed)], [Compare(TASKS, name, entry.revision)]))
        return groups

    def _current(self, key: str, service: ServiceRecord, place: rules.Place) -> list[tuple[str, Entry[Task]]]:
        """The tasks of this iteration at one place."""
        return [item for item in self._slots.at(key, place) if item[1].record.iteration == service.iteration]

    def _in_slots(self, key: str, service: ServiceRecord) -> list[Birth]:
        used: set[rules.Place] = set()
        busy = 0
        for place in self._slots.of(key):
            tasks = self._current(key, service, place)
            if any(self._complete(name, entry.record) for name, entry in tasks):
                used.add(place)
            elif any(rules.live(entry.record) for _, entry in tasks):
                used.add(place)
                busy += 1
            elif tasks and rules.done(self._store, tasks[-1][0], tasks[-1][1].record):
                used.add(place)
        slots = [slot for slot in range(1, completions(service.spec) + 1) if slot not in used]
        room = (concurrent(service.spec) or len(slots)) - busy
        now = self._clock.now()
        births = []
        for slot in itertools.islice(slots, max(0, room)):
            before = next((name for name, _ in self._slots.at(key, slot) if not rules.over(self._store, name)), "")
            task = Task(
                service=key,
                version=service.version,
                slot=slot,
                desired=TaskState.READY if before else TaskState.COMPLETE,
                created=now,
                updated=now,
                follows=before,
                iteration=service.iteration,
            )
            births.append(Birth(new_id(), task, service.spec))
        return births

    def _on_nodes(self, key: str, service: ServiceRecord, nodes: list[str]) -> list[Birth]:
        births = []
        demand = self._scheduler.demand_for(key, service.version, service.spec)
        for node in nodes:
            if not is_open(self._store, node) or not self._scheduler.placement.suits(node, demand):
                continue
            tasks = self._current(key, service, node)
            if any(rules.live(entry.record) for _, entry in tasks):
                continue
            if tasks and rules.done(self._store, tasks[-1][0], tasks[-1][1].record):
                continue
            births.append(birth(self._store, self._clock, key, service, node, self._slots.at(key, node)))
        return births

    def _complete(self, name: str, task: Task) -> bool:
        return rules.observed(self._store, name, task) is TaskState.COMPLETE
