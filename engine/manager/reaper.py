"""Deletes what nothing needs any more: tasks beyond the history, removed tasks that have ended,
spec versions without tasks, and what is left of removed services.

A removed task's record goes when its node has reported its end, not before, so that what it holds
is not given to another one. A place keeps its newest task, as the restart policy is read from it.

Threads: the event loop's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from engine.manager import tasks as rules
from engine.manager.loops import Acting
from engine.manager.records import (
    CLUSTER,
    NODES,
    SERVICE_AUTH,
    SERVICE_STATUS,
    SERVICES,
    SPEC_VERSIONS,
    TASK_STATUS,
    TASKS,
    Cluster,
    Kind,
    Task,
    spec_key,
)
from engine.manager.scheduler import BATCH, SLICE
from engine.manager.slots import Slots
from engine.manager.store import Change, Compare, Delete, Entry, Event, Put, Store
from engine.manager.tasks import Place
from engine.swarm_session.clock import Clock
from engine.swarm_session.states import TaskState

TICK = 0.25
"""Seconds in which changes are collected."""
HISTORY = 5
"""Tasks kept per place when the cluster's spec says nothing."""


class Reaper:
    name = "reaper"

    def __init__(self, store: Store, clock: Clock, slots: Slots) -> None:
        self._store = store
        self._clock = clock
        self._slots = slots
        self._places: dict[tuple[str, Place], None] = {}
        """Where tasks have come or gone."""
        self._services: dict[str, None] = {}
        """That were removed or changed."""
        self._strays: dict[str, None] = {}
        """Statuses without a task."""
        self._versions: dict[str, set[int]] = {}
        """By service: the spec versions that exist."""
        self._uses: dict[str, int] = {}
        """By spec version: tasks that refer to it."""
        self._due: float | None = None
        self._noted: dict[Kind[Any], Callable[[Event], bool]] = {
            TASKS: self._task_changed,
            TASK_STATUS: self._status_changed,
            SERVICES: self._service_changed,
            SPEC_VERSIONS: self._versions_changed,
            SERVICE_STATUS: self._of_service_changed,
            SERVICE_AUTH: self._of_service_changed,
            CLUSTER: self._cluster_changed,
            NODES: self._node_changed,
        }

    # --- events -----------------------------------------------------------------------------------

    def changed(self, event: Event) -> None:
        noted = self._noted.get(event.kind)
        if noted is not None and noted(event) and self._due is None:
            self._due = self._clock.monotonic() + TICK

    # Each returns whether there may be something to delete.

    def _task_changed(self, event: Event) -> bool:
        old: Task | None = None if event.old is None else event.old.record
        new: Task | None = None if event.new is None else event.new.record
        if old is None or new is None or old.version != new.version:
            if new is not None:
                self._use(new, 1)
            if old is not None:
                self._use(old, -1)
                self._services[old.service] = None
        if new is not None and self._store.get(SERVICES, new.service) is None:
            self._services[new.service] = None  # made while its service was removed
        task = new or old
        assert task is not None
        where = (task.service, rules.place_of(task))
        if where[1] in self._slots.of(task.service):
            self._places[where] = None
        else:
            self._places.pop(where, None)
        return True

    def _status_changed(self, event: Event) -> bool:
        if event.new is None:
            self._strays.pop(event.key, None)
            return False
        if not event.new.record.state.ended:
            return False
        task = self._store.record(TASKS, event.key)
        if task is None:
            self._strays[event.key] = None
        else:
            self._places[task.service, rules.place_of(task)] = None
        return True

    def _service_changed(self, event: Event) -> bool:
        self._services[event.key] = None
        return True

    def _versions_changed(self, event: Event) -> bool:
        service, _, version = event.key.partition("/")
        if event.new is not None:
            self._versions.setdefault(service, set()).add(int(version))
        elif service in self._versions:
            self._versions[service].discard(int(version))
            if not self._versions[service]:
                del self._versions[service]
        if service in self._versions or self._store.get(SERVICES, service) is not None:
            self._services[service] = None
        else:
            self._services.pop(service, None)
        return True

    def _of_service_changed(self, event: Event) -> bool:
        return self._store.record(SERVICES, event.key) is None and self._service_changed(event)

    def _cluster_changed(self, event: Event) -> bool:
        if event.old is None or _limit(event.old) == _limit(event.new):
            return False
        self._all_places()
        return True

    def _node_changed(self, event: Event) -> bool:
        if event.new is not None:
            return False
        for key in self._store.tasks_on(event.key):
            task = self._store.record(TASKS, key)
            if task is not None:
                self._places[task.service, rules.place_of(task)] = None
        return True

    def _use(self, task: Task, count: int) -> None:
        key = spec_key(task.service, task.version)
        uses = self._uses.get(key, 0) + count
        if uses:
            self._uses[key] = uses
        else:
            self._uses.pop(key, None)

    def _all_places(self) -> None:
        for entry in self._store.all(TASKS).values():
            self._places[entry.record.service, rules.place_of(entry.record)] = None

    def take_over(self) -> None:
        self._all_places()
        self._services |= dict.fromkeys(self._store.all(SERVICES))
        self._services |= dict.fromkeys(self._store.all(SERVICE_STATUS))
        self._services |= dict.fromkeys(self._store.all(SERVICE_AUTH))
        self._services |= dict.fromkeys(self._versions)
        known = self._store.all(TASKS)
        self._strays |= {key: None for key in self._store.all(TASK_STATUS) if key not in known}
        self._due = self._clock.monotonic()

    def due(self) -> float | None:
        return self._due

    # --- the loop ---------------------------------------------------------------------------------

    async def step(self, acting: Acting) -> None:
        self._due = None
        places, self._places = self._places, {}
        services, self._services = self._services, {}
        strays, self._strays = self._strays, {}
        try:
            groups: list[tuple[list[Change], list[Compare]]] = []
            for service in services:
                groups += await self._of_service(service)
            limit = self._limit()
            for number, (service, place) in enumerate(places):
                groups += self._at_place(service, place, limit)
                if number % SLICE == SLICE - 1:
                    await asyncio.sleep(0)
            for key in strays:
                if self._store.get(TASK_STATUS, key) is not None and self._store.get(TASKS, key) is None:
                    groups.append(([Delete(TASK_STATUS, key)], [Compare(TASKS, key)]))
            for begin in range(0, len(groups), BATCH):
                await acting.commit_many(groups[begin : begin + BATCH])
        except BaseException:
            self._places |= places
            self._services |= services
            self._strays |= strays
            self._due = self._clock.monotonic() + TICK
            raise

    def _limit(self) -> int:
        cluster = self._store.get(CLUSTER)
        return HISTORY if cluster is None else _limit(cluster)

    async def _of_service(self, key: str) -> list[tuple[list[Change], list[Compare]]]:
        """Specs that no task needs, and all of a removed service. Its tasks are ended."""
        service = self._store.record(SERVICES, key)
        groups: list[tuple[list[Change], list[Compare]]] = []
        if service is None:
            if self._store.get(SERVICE_STATUS, key) is not None:
                groups.append(([Delete(SERVICE_STATUS, key)], [Compare(SERVICES, key)]))
            if self._store.get(SERVICE_AUTH, key) is not None:
                groups.append(([Delete(SERVICE_AUTH, key)], [Compare(SERVICES, key)]))
            for number, (task, entry) in enumerate(rules.entries(self._store, self._store.tasks_of(key))):
                if number % SLICE == SLICE - 1:
                    await asyncio.sleep(0)
                if entry.record.desired is not TaskState.REMOVE:
                    groups.append(self._remove(task, entry))
        if not self._store.tasks_of(key) or service is not None:
            current = 0 if service is None else service.version
            for version in sorted(self._versions.get(key, ())):
                name = spec_key(key, version)
                if version != current and not self._uses.get(name):
                    groups.append(([Delete(SPEC_VERSIONS, name)], []))
        return groups

    def _remove(self, key: str, entry: Entry[Task]) -> tuple[list[Change], list[Compare]]:
        removed = replace(entry.record, desired=TaskState.REMOVE, updated=self._clock.now())
        return [Put(TASKS, key, removed)], [Compare(TASKS, key, entry.revision)]

    def _at_place(self, service: str, place: Place, limit: int) -> list[tuple[list[Change], list[Compare]]]:
        tasks = self._slots.at(service, place)
        groups: list[tuple[list[Change], list[Compare]]] = []
        kept: list[tuple[str, Entry[Task]]] = []
        for key, entry in tasks:
            if self._is_over(key, entry.record):
                groups.append(_deletion(key, entry))
            else:
                kept.append((key, entry))
        surplus = len(kept) - max(limit, 1)
        if limit >= 0 and surplus > 0:
            for key, entry in kept[:-1]:
                if not surplus:
                    break
                task = entry.record
                if not rules.live(task) and rules.observed(self._store, key, task).ended:
                    groups.append(_deletion(key, entry))
                    surplus -= 1
        return groups

    def _is_over(self, key: str, task: Task) -> bool:
        """True if nothing needs this task: it has ended, and is removed or its node is gone; or it
        was never given to a node.
        """
        if not task.assigned:
            return not rules.live(task)
        if not rules.observed(self._store, key, task).ended:
            return False
        if task.desired is TaskState.REMOVE:
            return True
        return not task.slot and self._store.record(NODES, task.node) is None


def _deletion(key: str, entry: Entry[Task]) -> tuple[list[Change], list[Compare]]:
    return [Delete(TASKS, key), Delete(TASK_STATUS, key)], [Compare(TASKS, key, entry.revision)]


def _limit(cluster: Entry[Cluster] | None) -> int:
    asked = cluster.record.spec.orchestration.task_history_retention_limit if cluster is not None else None
    return HISTORY if asked is None else asked
