"""Finds nodes for tasks.

Tasks of a service that are made together are placed before they are written (`place`), so that most
tasks are one write. What finds no node waits here: it is tried again when a node becomes usable or
something on a node ends, and `Task.waits` says why.

A task of a global service is made for its node; only whether it fits there is checked.

With its node a task gets its addresses on the swarm's networks, in the same write.

Owns:    `Placement`, which each manager keeps up to date from the store's events.
Threads: the event loop's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from engine.manager import tasks as rules
from engine.manager.addresses import Addresses
from engine.manager.loops import Acting
from engine.manager.placement import NOTHING, Demand, Filters, Need, Placed, Placement, demand_of
from engine.manager.records import (
    NETWORKS,
    NODE_DATA,
    NODES,
    SPEC_VERSIONS,
    TASK_STATUS,
    TASKS,
    Attached,
    SpecVersion,
    Task,
    spec_key,
)
from engine.manager.store import Change, Compare, Entry, Event, Put, Store
from engine.swarm_session.clock import SECOND, Clock
from engine.swarm_session.states import TaskState
from engine.wire.services import ServiceSpec

SLICE = 500
"""Tasks that are placed before others get the event loop."""
BATCH = 2000
"""New tasks that are placed and written together."""
STEP = 2.0
"""Seconds of one step, after which the other loops have their turn."""
RETRY = 0.1
"""Seconds between a change that may help waiting tasks and their next trial, so that many changes
cause one.
"""
REASON = 5
"""Seconds between two reasons of one waiting task."""


class Birth(NamedTuple):
    """A task to write, and what is written with it or not at all."""

    key: str
    task: Task
    spec: ServiceSpec
    changes: Sequence[Change] = ()
    compares: Sequence[Compare] = ()


class Scheduler:
    name = "scheduler"

    def __init__(self, store: Store, clock: Clock, addresses: Addresses) -> None:
        self._store = store
        self._clock = clock
        self._addresses = addresses
        self.placement = Placement()
        self._demands: dict[str, Demand] = {}
        """By key of the spec version."""
        self._unknown: dict[str, set[str]] = {}
        """Tasks whose spec version has not been read yet."""
        self._fresh: dict[str, None] = {}
        """Tasks to place, in the order in which they came."""
        self._waiting: dict[str, None] = {}
        """Tasks that no node fitted, or that a network has no address for."""
        self._exhausted: set[str] = set()
        """Networks whose addresses tasks wait for."""
        self._retry_at: float | None = None

    # --- events -----------------------------------------------------------------------------------

    def changed(self, event: Event) -> None:
        kind = event.kind
        if kind is TASK_STATUS:
            was_over = event.old is not None and event.old.record.state.ended
            if event.new is not None and event.new.record.state.ended and not was_over:
                self._ended(event.key, event.new.record.state)
        elif kind is TASKS:
            self._task(event.key, None if event.new is None else event.new.record)
        elif kind is NODES or kind is NODE_DATA:
            record, data = self._store.record(NODES, event.key), self._store.record(NODE_DATA, event.key)
            if self.placement.node(event.key, record, data):
                self._retry()
        elif kind is NETWORKS:
            self._demands.clear()
            self._retry()
        elif kind is SPEC_VERSIONS:
            self._demands.pop(event.key, None)
            for key in self._unknown.pop(event.key, ()):
                self._task(key, self._store.record(TASKS, key))

    def _task(self, key: str, task: Task | None) -> None:
        if task is None or rules.observed(self._store, key, task).ended or (not task.assigned and not rules.live(task)):
            self._fresh.pop(key, None)
            self._waiting.pop(key, None)
            if self.placement.untrack(key):
                self._retry()
            return
        if not task.assigned:
            if self.placement.untrack(key):
                self._retry()
            if key not in self._waiting:
                self._fresh[key] = None
            return
        self._fresh.pop(key, None)
        self._waiting.pop(key, None)
        demand = self.demand(task)
        if demand is None:
            self._unknown.setdefault(spec_key(task.service, task.version), set()).add(key)
            return
        self.placement.track(key, task.service, task.node, demand, rules.live(task), task.generic)

    def _ended(self, key: str, state: TaskState) -> None:
        task = self._store.record(TASKS, key)
        if self.placement.untrack(key):
            self._retry()
        if task is not None and rules.live(task) and state in {TaskState.FAILED, TaskState.REJECTED}:
            self.placement.failed(task.service, task.node, self._clock.monotonic())

    def _retry(self) -> None:
        if self._waiting and self._retry_at is None:
            self._retry_at = self._clock.monotonic() + RETRY

    def demand(self, task: Task) -> Demand | None:
        """What the task asks of a node; None while its spec is not known."""
        key = spec_key(task.service, task.version)
        demand = self._demands.get(key)
        if demand is None:
            spec = rules.spec_of(self._store, task.service, task.version)
            if spec is None:
                return None
            demand = self._demands[key] = demand_of(spec, self._addresses.features_of(spec))
        return demand

    def demand_for(self, service: str, version: int, spec: ServiceSpec) -> Demand:
        """What tasks of this version of a service ask of a node."""
        key = spec_key(service, version)
        demand = self._demands.get(key)
        if demand is None:
            demand = demand_of(spec, self._addresses.features_of(spec))
            if self._store.get(SPEC_VERSIONS, key) is not None:
                self._demands[key] = demand
        return demand

    def eligible(self, demand: Demand, node: str) -> bool:
        """True if a global service has a task on the node: it is usable, passes the constraints,
        and its kernel has what the networks need.
        """
        return rules.usable(self._store, node) and self.placement.suits(node, demand)

    # --- placing ----------------------------------------------------------------------------------

    async def place(self, service: str, spec: ServiceSpec, drafts: Mapping[str, Task]) -> dict[str, Task]:
        """Fill in node and resources, or the reason why they wait, of new tasks of one spec.

        The caller writes them at once, and calls `forget` for those that could not be written.
        """
        placed: dict[str, Task] = {}
        try:
            await self._place(service, spec, drafts, placed)
        except BaseException:
            self.forget(list(placed))
            raise
        return placed

    async def _place(
        self, service: str, spec: ServiceSpec, drafts: Mapping[str, Task], placed: dict[str, Task]
    ) -> None:
        now = self._clock.now()
        keys = list(drafts)
        demand = self.demand_for(service, drafts[keys[0]].version, spec)
        networks = self._addresses.networks_of(spec)
        if rules.is_global(spec):
            for key in keys:
                self._place_there(key, drafts[key], demand, networks, now, placed)
                if len(placed) % SLICE == 0:
                    await asyncio.sleep(0)
            return
        for begin in range(0, len(keys), SLICE):
            some = keys[begin : begin + SLICE]
            exhausted = self._addresses.exhausted(networks)
            places = () if exhausted else self.placement.place(service, demand, some, self._clock.monotonic())
            done = 0
            for key, place in zip(some, places, strict=False):
                addresses = self._addresses.give(key, networks) if networks else ()
                if addresses is None:
                    exhausted = self._addresses.exhausted(networks)
                    break
                self._waiting.pop(key, None)
                placed[key] = _assigned(drafts[key], place, addresses, now)
                done += 1
            if done < len(some):
                for key in some[done : len(places)]:
                    self.placement.untrack(key)
                reason = self._exhaust(exhausted) if exhausted else self.placement.explain(service, demand)
                placed |= {key: self._waits(drafts[key], reason) for key in keys[begin + done :]}
                self._waiting |= dict.fromkeys(keys[begin + done :])
                break
            await asyncio.sleep(0)

    def _place_there(
        self, key: str, task: Task, demand: Demand, networks: Sequence[str], now: int, placed: dict[str, Task]
    ) -> None:
        exhausted = self._addresses.exhausted(networks)
        there = None if exhausted else self.placement.place_on(task.node, task.service, demand, key)
        given = self._addresses.give(key, networks) if there is not None and networks else ()
        if there is not None and given is not None:
            self._waiting.pop(key, None)
            placed[key] = _assigned(task, there, given, now)
            return
        if there is not None:
            self.placement.untrack(key)
            exhausted = self._addresses.exhausted(networks)
        self._waiting[key] = None
        reason = self._exhaust(exhausted) if exhausted else self.placement.explain(task.service, demand, task.node)
        placed[key] = self._waits(task, reason)

    def _exhaust(self, network: str) -> str:
        """The reason of tasks that wait for an address of the network."""
        self._exhausted.add(network)
        return self._addresses.reason(network)

    async def create(self, acting: Acting, births: Sequence[Birth]) -> list[bool]:
        """Write new tasks, placed if a node fits them. Returns for each whether it was written."""
        written: list[bool] = []
        for begin in range(0, len(births), BATCH):
            written += await self._create(acting, births[begin : begin + BATCH])
        return written

    async def _create(self, acting: Acting, births: Sequence[Birth]) -> list[bool]:
        specs: dict[tuple[str, int], ServiceSpec] = {}
        drafts: dict[tuple[str, int], dict[str, Task]] = {}
        for birth in births:
            group = (birth.task.service, birth.task.version)
            specs[group] = birth.spec
            drafts.setdefault(group, {})[birth.key] = birth.task
        missing = [
            ([Put(SPEC_VERSIONS, spec_key(*group), SpecVersion(spec))], [Compare(SPEC_VERSIONS, spec_key(*group))])
            for group, spec in specs.items()
            if self._store.get(SPEC_VERSIONS, spec_key(*group)) is None
        ]
        try:
            if missing:
                await acting.commit_many(missing)
            placed: dict[str, Task] = {}
            for group, spec in specs.items():
                placed |= await self.place(group[0], spec, drafts[group])
            # the new task is first: as no other write has its key, an answer that is missing is
            # found by it
            written = await acting.commit_many(
                [([Put(TASKS, birth.key, placed[birth.key]), *birth.changes], birth.compares) for birth in births]
            )
        except BaseException:
            self.forget([birth.key for birth in births])
            raise
        self.forget([birth.key for birth, done in zip(births, written, strict=True) if not done])
        return written

    def forget(self, keys: list[str]) -> None:
        """These tasks were not written as `place` returned them."""
        for key in keys:
            self._addresses.forget(key)
            self._task(key, self._store.record(TASKS, key))

    # --- the loop ---------------------------------------------------------------------------------

    def take_over(self) -> None:
        self._fresh |= self._waiting
        self._waiting.clear()

    def due(self) -> float | None:
        return 0 if self._fresh else self._retry_due()

    def _retry_due(self) -> float | None:
        """When waiting tasks are tried again."""
        times = [time for network in self._exhausted if (time := self._addresses.free_at(network)) is not None]
        if self._retry_at is not None:
            times.append(self._retry_at)
        return min(times, default=None)

    async def step(self, acting: Acting) -> None:
        due = self._retry_due()
        if due is not None and due <= self._clock.monotonic():
            self._retry_at = None
            self._exhausted.clear()
            self._fresh |= self._waiting
            self._waiting.clear()
        groups: dict[tuple[str, int], dict[str, Entry[Task]]] = {}
        for key in list(self._fresh):
            entry = self._store.get(TASKS, key)
            if entry is None:
                del self._fresh[key]
                continue
            task = entry.record
            groups.setdefault((task.service, task.version), {})[key] = entry
        full: set[tuple[Filters, Need]] = set()
        """What no node has room for in this step."""
        ends = self._clock.monotonic() + STEP
        changed: list[tuple[Entry[Task], Task]] = []
        for (service, version), group in groups.items():
            entries = list(group.items())
            for begin in range(0, len(entries), BATCH):
                if self._clock.monotonic() > ends:
                    break  # the rest stays fresh, and other loops have their turn
                try:
                    changed += await self._place_group(service, version, dict(entries[begin : begin + BATCH]), full)
                except BaseException:
                    self._give_back(changed)
                    raise
                if len(changed) >= BATCH:
                    await self._write(acting, changed)
                    changed = []
        await self._write(acting, changed)

    async def _write(self, acting: Acting, changed: list[tuple[Entry[Task], Task]]) -> None:
        try:
            written = await acting.commit_many(
                [([Put(TASKS, old.key, task)], [Compare(TASKS, old.key, old.revision)]) for old, task in changed]
            )
        except BaseException:
            self._give_back(changed)
            raise
        self.forget([old.key for (old, _), done in zip(changed, written, strict=True) if not done])

    def _give_back(self, changed: list[tuple[Entry[Task], Task]]) -> None:
        """These were placed, and not written."""
        self._fresh |= dict.fromkeys(old.key for old, _ in changed)
        self.forget([old.key for old, _ in changed])

    async def _place_group(
        self, service: str, version: int, entries: dict[str, Entry[Task]], full: set[tuple[Filters, Need]]
    ) -> list[tuple[Entry[Task], Task]]:
        """Place waiting tasks of one spec. Returns those that have changed."""
        for key in entries:
            self._fresh.pop(key, None)
            self._waiting[key] = None
        spec = rules.spec_of(self._store, service, version)
        if spec is None:
            return []
        demand = self.demand_for(service, version, spec)
        tasks = {key: entry.record for key, entry in entries.items()}
        hopeless = (demand.filters, demand.need)
        if hopeless in full and demand.need != NOTHING and not rules.is_global(spec):
            reason = self.placement.explain(service, demand)
            placed = {key: self._waits(task, reason) for key, task in tasks.items()}
        else:
            placed = await self.place(service, spec, tasks)
        changed = []
        by_node = not demand.max_replicas and not self._addresses.exhausted(self._addresses.networks_of(spec))
        for key, task in placed.items():
            if not task.assigned and by_node:
                full.add(hopeless)
            if task is not tasks[key]:
                changed.append((entries[key], task))
        return changed

    def _waits(self, task: Task, reason: str) -> Task:
        """The task with the reason why it waits. A reason that changes often is written now and
        then only.
        """
        now = self._clock.now()
        if task.waits == reason:
            return task
        if task.waits and 0 <= now - task.updated < REASON * SECOND:
            if self._retry_at is None:
                self._retry_at = self._clock.monotonic() + REASON
            return task
        return replace(task, waits=reason, updated=now)


def _assigned(task: Task, there: Placed, networks: tuple[Attached, ...], now: int) -> Task:
    return replace(task, node=there.node, generic=there.generic, networks=networks, assigned=now, updated=now, waits="")
