"""Successors of tasks that have ended, or whose node is not usable any more.

The old task's desired state becomes `shutdown`. If the restart policy permits it, a successor in
the same place is written in the same transaction. It is prepared at once (desired state `ready`)
and started after the delay, when the old task has ended, or has had time for that, or its node is
down.

What is left to do follows from the records: live tasks that have ended, and desired states `ready`.
So another leader goes on where this one stops.

Threads: the event loop's.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from engine.manager import tasks as rules
from engine.manager.loops import Acting
from engine.manager.records import (
    NODE_DATA,
    NODES,
    SERVICE_STATUS,
    SERVICES,
    TASK_STATUS,
    TASKS,
    ServiceRecord,
    Task,
    new_id,
)
from engine.manager.scheduler import SLICE, Birth, Scheduler
from engine.manager.slots import Slots
from engine.manager.store import Change, Compare, Entry, Event, Put, Store
from engine.swarm_session.clock import SECOND, Clock
from engine.swarm_session.states import TaskState
from engine.wire.services import ServiceSpec

PAUSED = frozenset({"paused", "rollback_paused"})
"""States of an update in which no task may get the new spec."""


class Restarts:
    name = "restarts"

    def __init__(self, store: Store, clock: Clock, slots: Slots, scheduler: Scheduler) -> None:
        self._store = store
        self._clock = clock
        self._slots = slots
        self._scheduler = scheduler
        self._dead: dict[str, None] = {}
        """Live tasks that have ended."""
        self._ready: dict[str, None] = {}
        """Tasks whose start may be due."""
        self._timers: list[tuple[float, str]] = []
        """When to look at a task again."""
        self._times: dict[str, tuple[float, float]] = {}
        """By task of desired state `ready`: when it may start, and when it starts even if the task
        before it has not ended. Of the monotonic clock, as the record's times may be of a manager
        whose clock was ahead.
        """
        self._followers: dict[str, set[str]] = {}
        """By task: those that wait for its end."""

    # --- events -----------------------------------------------------------------------------------

    def changed(self, event: Event) -> None:
        kind = event.kind
        if kind is TASK_STATUS:
            if event.new is not None and event.new.record.state.ended:
                self._look_at(event.key)
                self._over(event.key)
        elif kind is TASKS:
            old: Task | None = None if event.old is None else event.old.record
            new: Task | None = None if event.new is None else event.new.record
            if old is not None and old.follows:
                self._unfollow(old.follows, event.key)
            if new is None:
                self._over(event.key)
                self._dead.pop(event.key, None)
                self._ready.pop(event.key, None)
                self._times.pop(event.key, None)
                return
            if new.desired is not TaskState.READY:
                self._times.pop(event.key, None)
            if new.desired is TaskState.READY:
                self._ready[event.key] = None
                if new.follows:
                    self._followers.setdefault(new.follows, set()).add(event.key)
            if rules.live(new):
                self._look_at(event.key)
        elif kind is NODE_DATA or kind is NODES:
            if self._store.record(NODES, event.key) is not None and not rules.is_down(self._store, event.key):
                return
            for key in self._store.tasks_on(event.key):
                self._over(key)

    def _look_at(self, key: str) -> None:
        task = self._store.record(TASKS, key)
        if task is not None and task.desired is TaskState.READY:
            return  # one that is rejected meanwhile has a successor after its delay, not at once
        if task is not None and rules.live(task) and _failed(rules.observed(self._store, key, task), task):
            self._dead[key] = None

    def _over(self, key: str) -> None:
        for follower in self._followers.get(key, ()):
            self._ready[follower] = None

    def _unfollow(self, followed: str, key: str) -> None:
        followers = self._followers.get(followed)
        if followers is not None:
            followers.discard(key)
            if not followers:
                del self._followers[followed]

    # --- the loop ---------------------------------------------------------------------------------

    def take_over(self) -> None:
        for key, entry in self._store.all(TASKS).items():
            if entry.record.desired is TaskState.READY:
                self._ready[key] = None
            self._look_at(key)

    def due(self) -> float | None:
        if self._dead or self._ready:
            return 0
        if not self._timers:
            return None
        return self._timers[0][0]

    async def step(self, acting: Acting) -> None:
        now = self._clock.monotonic()
        while self._timers and self._timers[0][0] <= now:
            self._ready[heapq.heappop(self._timers)[1]] = None
        dead, self._dead = list(self._dead), {}
        try:
            await self.succeed(acting, dead)
        except BaseException:
            self._dead |= dict.fromkeys(dead)
            raise
        ready, self._ready = list(self._ready), {}
        try:
            await self._start(acting, ready)
        except BaseException:
            self._ready |= dict.fromkeys(ready)
            raise

    async def succeed(self, acting: Acting, keys: Sequence[str], *, moved: bool = False) -> None:
        """Shut these tasks down, and write successors for those that may have one. `moved`: the
        node is the reason and not the task, so there is no delay, and it counts for nothing.
        """
        for begin in range(0, len(keys), SLICE):
            await self._succeed(acting, keys[begin : begin + SLICE], moved)

    async def _succeed(self, acting: Acting, keys: Sequence[str], moved: bool) -> None:
        births: list[Birth] = []
        ends: list[tuple[list[Change], list[Compare]]] = []
        owners: list[str] = []
        for key, entry in rules.entries(self._store, keys):
            if not rules.live(entry.record):
                continue
            state = rules.observed(self._store, key, entry.record)
            lost = state is TaskState.ORPHANED
            if moved and state.ended and not lost:
                continue
            end = replace(entry.record, desired=TaskState.SHUTDOWN, updated=self._clock.now())
            changes: list[Change] = [Put(TASKS, key, end)]
            compares = [Compare(TASKS, key, entry.revision)]
            birth = self._successor(key, entry, state, moved or lost, changes, compares)
            if birth is not None:
                births.append(birth)
                owners.append(key)
            else:
                ends.append((changes, compares))
        if births:
            written = await self._scheduler.create(acting, births)
            for key, done in zip(owners, written, strict=True):
                if not done and not moved:
                    self._look_at(key)
        if ends:
            await acting.commit_many(ends)

    def _successor(
        self,
        key: str,
        entry: Entry[Task],
        state: TaskState,
        moved: bool,
        changes: list[Change],
        compares: list[Compare],
    ) -> Birth | None:
        task = entry.record
        service = self._store.record(SERVICES, task.service)
        spec = rules.spec_of(self._store, task.service, task.version)
        now = self._clock.now()
        if service is None or spec is None or rules.is_global(service.spec) is not (not task.slot):
            return None
        if not rules.may_restart(task, spec, state, now):
            return None
        if rules.is_job(service.spec) and task.iteration != service.iteration:
            return None
        if not task.slot:
            demand = self._scheduler.demand_for(task.service, service.version, service.spec)
            if not self._scheduler.eligible(demand, task.node):
                return None
        newer = [other for other, _ in self._slots.live_at(task.service, rules.place_of(task))]
        if newer and newer[-1] != key:
            return None
        version = service.version
        if version != task.version and self._paused(task.service, service):
            version = task.version
        else:
            spec = service.spec
        pause = 0 if moved else rules.delay(spec)
        wait = not rules.over(self._store, key)
        restarts, window_from = rules.counted(task, spec, now) if version == task.version else (0, 0)
        if not moved:
            restarts, window_from = restarts + 1, window_from if restarts else now
        successor = Task(
            service=task.service,
            version=version,
            slot=task.slot,
            node="" if task.slot else task.node,
            desired=TaskState.READY if pause or wait else rules.goal(spec),
            created=now,
            updated=now,
            starts_at=now + pause,
            follows=key if wait else "",
            restarts=restarts,
            window_from=window_from,
            iteration=task.iteration,
        )
        return Birth(new_id(), successor, spec, changes, compares)

    def _paused(self, key: str, service: ServiceRecord) -> bool:
        status = self._store.record(SERVICE_STATUS, key)
        return status is not None and status.version == service.version and status.update.state in PAUSED

    async def _start(self, acting: Acting, keys: Iterable[str]) -> None:
        """Wish those to run whose time has come; set a timer for the others."""
        groups: list[tuple[list[Change], list[Compare]]] = []
        now = self._clock.monotonic()
        for key, entry in rules.entries(self._store, keys):
            task = entry.record
            if task.desired is not TaskState.READY:
                continue
            spec = rules.spec_of(self._store, task.service, task.version)
            starts, patience = self._times_of(key, task, spec)
            if now < starts:
                heapq.heappush(self._timers, (starts, key))
            elif task.follows and now < patience and not rules.over(self._store, task.follows):
                heapq.heappush(self._timers, (patience, key))
            else:
                desired = TaskState.RUNNING if spec is None else rules.goal(spec)
                started = replace(task, desired=desired, updated=self._clock.now())
                groups.append(([Put(TASKS, key, started)], [Compare(TASKS, key, entry.revision)]))
        if groups:
            await acting.commit_many(groups)

    def _times_of(self, key: str, task: Task, spec: ServiceSpec | None) -> tuple[float, float]:
        times = self._times.get(key)
        if times is None:
            now, monotonic = self._clock.now(), self._clock.monotonic()
            pause = min(max(0, task.starts_at - now), rules.delay(spec))
            stop = max(rules.STOP, rules.grace(spec) + 10 * SECOND)
            waits = min(max(0, task.created + stop - now), stop)
            times = self._times[key] = (monotonic + pause / SECOND, monotonic + waits / SECOND)
        return times


def _failed(state: TaskState, task: Task) -> bool:
    """True if the task has ended otherwise than its desired state says. A job's task completes."""
    return state.ended and not (task.desired is TaskState.COMPLETE and state is TaskState.COMPLETE)
