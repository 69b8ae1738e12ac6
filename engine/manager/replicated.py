"""Keeps as many places of each replicated service occupied as it has replicas.

A place (slot) is occupied while it has a live task, or when its last task has ended for good by the
restart policy. With too few the lowest free slots get new tasks. With too many, first those go that
do not run, then those on the nodes with most tasks of the service, the highest slots first. Scaling
touches no other task; a task is replaced by `restarts.py` and `updates.py` alone.

Threads: the event loop's.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Iterator

from msgspec.structs import replace

from engine.manager import tasks as rules
from engine.manager.loops import Acting
from engine.manager.records import SERVICES, TASKS, ServiceRecord, Task, new_id
from engine.manager.scheduler import BATCH, SLICE, STEP, Birth, Scheduler
from engine.manager.slots import Slots
from engine.manager.store import Change, Compare, Entry, Event, Put, Store
from engine.manager.tasks import Place
from engine.swarm_session.clock import Clock
from engine.swarm_session.states import TaskState


class Replicated:
    name = "replicated"

    def __init__(self, store: Store, clock: Clock, slots: Slots, scheduler: Scheduler) -> None:
        self._store = store
        self._clock = clock
        self._slots = slots
        self._scheduler = scheduler
        self._dirty: dict[str, None] = {}

    def changed(self, event: Event) -> None:
        if event.kind is SERVICES:
            if event.new is not None:
                self._dirty[event.key] = None
            else:
                self._dirty.pop(event.key, None)
        elif event.kind is TASKS:
            task: Task = (event.new or event.old).record  # type: ignore[union-attr]
            if (event.new is None or not rules.live(task)) and self._store.get(SERVICES, task.service) is not None:
                self._dirty[task.service] = None

    def take_over(self) -> None:
        self._dirty |= dict.fromkeys(self._store.all(SERVICES))

    def due(self) -> float | None:
        return 0 if self._dirty else None

    async def step(self, acting: Acting) -> None:
        dirty, self._dirty = list(self._dirty), {}
        births: list[Birth] = []
        ends = self._clock.monotonic() + STEP
        try:
            for number, key in enumerate(dirty):
                if self._clock.monotonic() > ends:
                    self._dirty |= dict.fromkeys(dirty[number:])
                    break
                entry = self._store.get(SERVICES, key)
                if entry is None or not _is_replicated(entry.record):
                    continue
                occupied = await self._occupied(key)
                missing = rules.replicas(entry.record.spec) - len(occupied)
                if missing < 0:
                    await self._remove(acting, key, occupied, -missing)
                for birth in self._births(key, entry.record, occupied, missing):
                    births.append(birth)
                    if len(births) >= BATCH:
                        await self._create(acting, births)
                        births = []
                        if self._store.get(SERVICES, key) is not entry or self._clock.monotonic() > ends:
                            self._dirty[key] = None
                            break
            await self._create(acting, births)
        except BaseException:
            self._dirty |= dict.fromkeys(dirty)
            raise

    async def _create(self, acting: Acting, births: list[Birth]) -> None:
        if births and not all(await self._scheduler.create(acting, births)):
            self._dirty |= dict.fromkeys(birth.task.service for birth in births)

    async def _occupied(self, service: str) -> dict[Place, list[tuple[str, Entry[Task]]]]:
        """The live tasks by place; none for one whose last task has ended for good."""
        found: dict[Place, list[tuple[str, Entry[Task]]]] = {}
        for number, place in enumerate(list(self._slots.of(service))):
            tasks = self._slots.at(service, place)
            live = [item for item in tasks if rules.live(item[1].record)]
            if live or (tasks and rules.done(self._store, tasks[-1][0], tasks[-1][1].record)):
                found[place] = live
            if number % SLICE == SLICE - 1:
                await asyncio.sleep(0)
        return found

    def _births(
        self, key: str, service: ServiceRecord, occupied: dict[Place, list[tuple[str, Entry[Task]]]], missing: int
    ) -> Iterator[Birth]:
        free = (slot for slot in itertools.count(1) if slot not in occupied)
        for slot in itertools.islice(free, max(0, missing)):
            now = self._clock.now()
            before = self._unfinished(key, slot)
            task = Task(
                service=key,
                version=service.version,
                slot=slot,
                desired=TaskState.READY if before else TaskState.RUNNING,
                created=now,
                updated=now,
                follows=before,
            )
            yield Birth(new_id(), task, service.spec)

    def _unfinished(self, service: str, slot: int) -> str:
        """The task that still has to end before the slot is used again; "" for none."""
        for key, _ in reversed(self._slots.at(service, slot)):
            if not rules.over(self._store, key):
                return key
        return ""

    async def _remove(
        self, acting: Acting, service: str, occupied: dict[Place, list[tuple[str, Entry[Task]]]], surplus: int
    ) -> None:
        """Remove every task of the slots that go, also those that have ended."""
        groups: list[tuple[list[Change], list[Compare]]] = []
        for place in self._least_wanted(occupied, surplus):
            for key, entry in self._slots.at(service, place):
                if entry.record.desired is not TaskState.REMOVE:
                    removed = replace(entry.record, desired=TaskState.REMOVE, updated=self._clock.now())
                    groups.append(([Put(TASKS, key, removed)], [Compare(TASKS, key, entry.revision)]))
        for begin in range(0, len(groups), BATCH):
            await acting.commit_many(groups[begin : begin + BATCH])

    def _least_wanted(self, occupied: dict[Place, list[tuple[str, Entry[Task]]]], surplus: int) -> list[Place]:
        running: dict[str, list[int]] = {}
        idle: list[int] = []
        for place, live in occupied.items():
            nodes = [
                entry.record.node
                for key, entry in live
                if rules.observed(self._store, key, entry.record) is TaskState.RUNNING
            ]
            if nodes:
                running.setdefault(nodes[-1], []).append(int(place))
            else:
                idle.append(int(place))
        chosen: list[Place] = [*sorted(idle, reverse=True)[:surplus]]
        heap = []
        for node, places in running.items():
            places.sort()
            heap.append((-len(places), -places[-1], node))
        heapq.heapify(heap)
        while len(chosen) < surplus:
            _, _, node = heap[0]
            places = running[node]
            chosen.append(places.pop())
            if places:
                heapq.heapreplace(heap, (-len(places), -places[-1], node))
            else:
                heapq.heappop(heap)
        return chosen


def _is_replicated(service: ServiceRecord) -> bool:
    return not rules.is_job(service.spec) and not rules.is_global(service.spec)
