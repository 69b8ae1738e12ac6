"""Rolling updates: the tasks of a service whose template differs from the service's are replaced,
`Parallelism` places at a time.

A place is *begun* by writing a task of the new spec (`Task.by_update`). With the order stop-first
the old task is shut down in the same transaction, and the new one starts when it has ended. With
start-first the old one is shut down when the new one runs. A begun place is *past* when its new
task runs, or has ended; `Delay` later the next place may begin. When all are past, and the last one
has been running for `Monitor`, the update is complete.

New tasks that end by themselves before they have run for `Monitor` are failures. When these are
more than `MaxFailureRatio` of the places, `FailureAction` is carried out: the update is paused
until the next spec, or the previous spec is put back, or it goes on. Places that do not run are
updated first, so that an update does not take more places down than it must.

Which places are begun and past follows from the records of the tasks, and the state of the update
is in the service's status. So another leader goes on where this one stops. How long a task has run
before it ended is in its status, by the clock of its node. The times at which tasks were first seen
running are in the memory of each manager; one that starts takes them from the statuses.

Threads: the event loop's.
"""

from __future__ import annotations

import asyncio
import sys
from typing import NamedTuple

from msgspec.structs import replace

from engine.errors import EngineError
from engine.manager import networks, ports
from engine.manager import tasks as rules
from engine.manager.global_services import is_open
from engine.manager.loops import Acting
from engine.manager.placement import Demand
from engine.manager.records import (
    NODE_DATA,
    NODES,
    SERVICE_STATUS,
    SERVICES,
    SPEC_VERSIONS,
    TASK_STATUS,
    TASKS,
    ServiceRecord,
    ServiceStatus,
    SpecVersion,
    Task,
    TaskStatus,
    UpdateRecord,
    new_id,
    spec_key,
)
from engine.manager.restarts import PAUSED
from engine.manager.scheduler import Birth, Scheduler
from engine.manager.slots import Slots
from engine.manager.store import Change, Compare, Entry, Event, Fenced, Put, Stale, Store
from engine.manager.tasks import Difference, Place
from engine.swarm_session.clock import SECOND, Clock
from engine.swarm_session.states import TaskState
from engine.wire.services import UpdateConfig

SLICE = 100
"""Places that are looked at before others get the event loop."""
TICK = 0.05
"""Seconds in which events of tasks are collected."""
DEFAULT = UpdateConfig(parallelism=1, failure_action="pause", monitor=5 * SECOND, order="stop-first")
"""Of a service without a configuration; its monitor also of one that names none (swarmkit,
api/defaults).
"""
GOING_ON = frozenset({"updating", "rollback_started"})
START_FIRST = "start-first"
BY_ITSELF = frozenset({TaskState.COMPLETE, TaskState.FAILED, TaskState.REJECTED})

_Item = tuple[str, Entry[Task]]


class _At(NamedTuple):
    """One place. Tasks are *new* if they may stay under the service's spec, *old* otherwise."""

    place: Place
    new: list[_Item]
    """Live ones."""
    old: list[_Item]
    """Live ones."""
    ended: bool
    """No task is live; the last one, of an old spec, has ended for good."""
    begun: _Item | None
    """The newest task that this update has written here."""


class _Update(NamedTuple):
    """The update of a service, as one look finds it."""

    key: str
    entry: Entry[ServiceRecord]
    status_entry: Entry[ServiceStatus] | None

    @property
    def service(self) -> ServiceRecord:
        return self.entry.record

    @property
    def config(self) -> UpdateConfig:
        return _config(self.service)

    @property
    def status(self) -> ServiceStatus:
        return ServiceStatus() if self.status_entry is None else self.status_entry.record

    @property
    def record(self) -> UpdateRecord:
        return self.status.update if self.status.version == self.service.version else UpdateRecord()

    @property
    def unchanged(self) -> Compare:
        """The condition that the status has not been changed since."""
        return Compare(SERVICE_STATUS, self.key, 0 if self.status_entry is None else self.status_entry.revision)


class Updates:
    name = "updates"

    def __init__(self, store: Store, clock: Clock, slots: Slots, scheduler: Scheduler) -> None:
        self._store = store
        self._clock = clock
        self._slots = slots
        self._scheduler = scheduler
        self._dirty: dict[str, None] = {}
        self._touched: dict[str, None] = {}
        """Services that are being updated, and of which a task has changed."""
        self._touched_until = 0.0
        self._active: set[str] = set()
        """Services of which tasks matter."""
        self._timers: dict[str, float] = {}
        """When to look at a service again."""
        self._past: dict[str, float] = {}
        """When a task that an update wrote was first seen running or ended."""
        self._failed: dict[tuple[str, int], dict[str, None]] = {}
        """Failures by service and version, in their order."""
        self._differences: dict[tuple[str, int, int], Difference] = {}
        self._versions: dict[str, set[int]] = {}
        """By service: the versions of specs that there are."""

    # --- events -----------------------------------------------------------------------------------

    def changed(self, event: Event) -> None:
        kind = event.kind
        if kind is SERVICES:
            self._forget(event.key)
            if event.new is not None:
                self._dirty[event.key] = None
        elif kind is NODES or kind is NODE_DATA:
            if is_open(self._store, event.key):
                self._look_again(event.key)
        elif kind is SPEC_VERSIONS:
            name, _, version = event.key.partition("/")
            if event.new is not None:
                self._versions.setdefault(name, set()).add(int(version))
            elif name in self._versions:
                self._versions[name].discard(int(version))
                if not self._versions[name]:
                    del self._versions[name]
        elif kind is TASK_STATUS:
            task = self._store.record(TASKS, event.key)
            if task is None:
                return
            if task.by_update and event.new is not None:
                self._observe(event.key, task, event.new.record)
            self._touch(task.service)
        elif kind is TASKS:
            known: Task = (event.new or event.old).record  # type: ignore[union-attr]
            if event.new is None:
                self._past.pop(event.key, None)
            self._touch(known.service)

    def _look_again(self, node: str) -> None:
        """Tasks of global services may be replaced on this node again."""
        for key in self._store.tasks_on(node):
            task = self._store.record(TASKS, key)
            if task is None or task.slot:
                continue
            service = self._store.record(SERVICES, task.service)
            if service is not None and service.version != task.version:
                self._dirty[task.service] = None

    def _observe(self, key: str, task: Task, status: TaskStatus) -> None:
        """A task that an update wrote has reached a state."""
        if status.state < TaskState.RUNNING:
            return
        if key not in self._past:
            self._past[key] = self._store.moment(status.ran or status.since)
        service = self._store.record(SERVICES, task.service)
        if status.state not in BY_ITSELF or service is None or service.version != task.version:
            return
        if not status.ran or status.since - status.ran <= _monitor(_config(service)):
            self._failed.setdefault((task.service, task.version), {})[key] = None

    def _touch(self, service: str) -> None:
        if service in self._active:
            if not self._touched:
                self._touched_until = self._clock.monotonic() + TICK
            self._touched[service] = None

    def _forget(self, service: str) -> None:
        """The service has another spec, or is gone: what was found out about the update is old."""
        record = self._store.record(SERVICES, service)
        version = 0 if record is None else record.version
        for known in [known for known in self._failed if known[0] == service and known[1] != version]:
            del self._failed[known]
        for pair in [pair for pair in self._differences if pair[0] == service and pair[2] != version]:
            del self._differences[pair]
        if record is None:
            self._active.discard(service)
            self._timers.pop(service, None)
            self._dirty.pop(service, None)
            self._touched.pop(service, None)

    # --- the loop ---------------------------------------------------------------------------------

    def take_over(self) -> None:
        self._dirty |= dict.fromkeys(self._store.all(SERVICES))

    def due(self) -> float | None:
        if self._dirty:
            return 0
        times = [*self._timers.values()]
        if self._touched:
            times.append(self._touched_until)
        return min(times, default=None)

    async def step(self, acting: Acting) -> None:
        now = self._clock.monotonic()
        if self._touched and self._touched_until <= now:
            self._dirty |= self._touched
            self._touched = {}
        for key in [key for key, time in self._timers.items() if time <= now]:
            del self._timers[key]
            self._dirty[key] = None
        dirty, self._dirty = self._dirty, {}
        while dirty:
            key = next(iter(dirty))
            try:
                await self._look(acting, key)
            except Fenced:
                raise
            except Stale:
                self._dirty[key] = None  # the service has got another spec meanwhile
            except BaseException:
                self._dirty |= dirty
                raise
            dirty.pop(key, None)

    async def _look(self, acting: Acting, key: str) -> None:
        """Do the next thing of one service's update."""
        entry = self._store.get(SERVICES, key)
        if entry is None or rules.is_job(entry.record.spec):
            self._active.discard(key)
            return
        update = _Update(key, entry, self._store.get(SERVICE_STATUS, key))
        service, config = update.service, update.config
        going_on = update.record.state in GOING_ON
        if not going_on and self._versions.get(key, set()) <= {service.version}:
            self._active.discard(key)
            return
        places: list[_At] = []
        for number, place in enumerate(list(self._slots.of(key)), 1):
            if (at := self._at(key, service, place)) is not None:
                places.append(at)
            if number % SLICE == 0:
                await asyncio.sleep(0)
        if (
            self._store.get(SERVICES, key) is not entry
            or self._store.get(SERVICE_STATUS, key) is not update.status_entry
        ):
            self._dirty[key] = None  # changed meanwhile
            return
        demand = self._scheduler.demand_for(key, service.version, service.spec)
        to_begin = [at for at in places if ((at.old and not at.new) or at.ended) and self._may_begin(at.place, demand)]
        work = to_begin or any((at.old and at.new) or len(at.new) > 1 for at in places)
        if not work and not going_on:
            self._active.discard(key)
            return
        self._active.add(key)
        await self._shut_down_surplus(acting, places, config)
        if update.record.state in PAUSED or not (going_on or to_begin):
            return
        if not going_on:
            state = "rollback_started" if service.rollback else "updating"
            words = "rollback in progress" if service.rollback else "update in progress"
            await self._note(acting, update, UpdateRecord(state, self._clock.now(), 0, words))
            update = update._replace(status_entry=self._store.get(SERVICE_STATUS, key))
        failed = self._failed.get((key, service.version), {})
        total = len(to_begin) + len({at.place for at in places if at.begun is not None})
        if failed and config.failure_action != "continue" and len(failed) / max(1, total) > config.max_failure_ratio:
            await self._pause_or_roll_back(acting, update, next(reversed(failed)))
        elif to_begin:
            await self._begin_some(acting, update, places, to_begin)
        else:
            await self._complete(acting, update, places)

    def _at(self, key: str, service: ServiceRecord, place: Place) -> _At | None:
        """What there is at one place; None for nothing that matters."""
        new: list[_Item] = []
        old: list[_Item] = []
        begun: _Item | None = None
        tasks = self._slots.at(key, place)
        for item in tasks:
            task = item[1].record
            if task.by_update and task.version == service.version:
                begun = item
            if rules.live(task):
                (old if self._outdated(key, service, task) else new).append(item)
        ended = False
        if not new and not old and tasks:
            name, last = tasks[-1]
            ended = rules.done(self._store, name, last.record) and self._outdated(key, service, last.record)
        if not new and not old and not ended and begun is None:
            return None
        return _At(place, new, old, ended, begun)

    def _may_begin(self, place: Place, demand: Demand) -> bool:
        """False for a node that gets no new tasks now: what it has stays until it does. What the
        new spec has no place for is ended by `global_services.py`.
        """
        return isinstance(place, int) or (is_open(self._store, place) and self._scheduler.eligible(demand, place))

    def _outdated(self, key: str, service: ServiceRecord, task: Task) -> bool:
        if task.version == service.version:
            return False
        pair = (key, task.version, service.version)
        found = self._differences.get(pair)
        if found is None:
            spec = rules.spec_of(self._store, key, task.version)
            found = Difference.TASKS if spec is None else rules.difference(spec, service.spec)
            self._differences[pair] = found
        return rules.outdated(self._store, service, task, found)

    async def _shut_down_surplus(self, acting: Acting, places: list[_At], config: UpdateConfig) -> None:
        """Shut down old tasks beside new ones, and all but one of several new ones."""
        groups: list[tuple[list[Change], list[Compare]]] = []
        for at in places:
            if not at.new or len(at.new) + len(at.old) == 1:
                continue
            running = [item for item in at.new if self._is_running(item)]
            kept = (running or at.new)[-1]
            surplus = [item for item in at.new if item is not kept]
            if running or config.order != START_FIRST:
                surplus += at.old
            for name, entry in surplus:
                groups.append(([_shutdown(name, entry, self._clock.now())], [Compare(TASKS, name, entry.revision)]))
        if groups:
            await acting.commit_many(groups)

    def _is_running(self, item: _Item) -> bool:
        return rules.observed(self._store, item[0], item[1].record) is TaskState.RUNNING

    def _begun(self, places: list[_At]) -> tuple[int, list[float]]:
        """Of the tasks that the update has written: how many have not run yet, and when the others
        were first seen running or ended.
        """
        starting = 0
        past: list[float] = []
        for name, entry in (at.begun for at in places if at.begun is not None):
            if name not in self._past and not rules.live(entry.record):
                self._past[name] = self._clock.monotonic()  # replaced before it ran
            if name in self._past:
                past.append(self._past[name])
            else:
                starting += 1
        return starting, past

    async def _begin_some(self, acting: Acting, update: _Update, places: list[_At], to_begin: list[_At]) -> None:
        """Begin as many places as may be at a time."""
        now, delay = self._clock.monotonic(), update.config.delay / SECOND
        starting, past = self._begun(places)
        delayed = [time + delay for time in past if time + delay > now]
        chosen = self._choose(update.config.parallelism or sys.maxsize, starting + len(delayed), to_begin)
        if chosen:
            await self._begin(acting, update, chosen)
        elif delayed:
            self._timers[update.key] = min(delayed)

    async def _complete(self, acting: Acting, update: _Update, places: list[_At]) -> None:
        """Complete the update, once its last task has been watched."""
        starting, past = self._begun(places)
        if starting:
            return
        if update.config.failure_action != "continue" and past:
            ends = max(past) + _monitor(update.config) / SECOND
            if ends > self._clock.monotonic():
                self._timers[update.key] = ends
                return
        state, words = (
            ("rollback_completed", "rollback completed")
            if update.service.rollback
            else ("completed", "update completed")
        )
        await self._note(acting, update, UpdateRecord(state, update.record.started, self._clock.now(), words))
        self._active.discard(update.key)

    def _choose(self, parallelism: int, busy: int, to_begin: list[_At]) -> list[_At]:
        """The places to begin now. Those that do not run come first; those that do only as long as
        not more than `parallelism` are down. `busy`: how many have begun and count still.
        """
        down = [at for at in to_begin if not any(self._is_running(item) for item in at.old)]
        up = [at for at in to_begin if any(self._is_running(item) for item in at.old)]
        chosen = down[: max(0, parallelism - busy)]
        unavailable = sum(1 for at in down if not at.ended) + sum(1 for at in chosen if at.ended)
        room = parallelism - busy - unavailable
        return chosen + up[: max(0, room)]

    async def _begin(self, acting: Acting, update: _Update, chosen: list[_At]) -> None:
        key, service, now = update.key, update.service, self._clock.now()
        births: list[Birth] = []
        for at in chosen:
            node = "" if isinstance(at.place, int) else at.place
            stays = update.config.order == START_FIRST and any(self._is_running(item) for item in at.old)
            before = next(
                (name for name, _ in reversed(self._slots.at(key, at.place)) if not rules.over(self._store, name)), ""
            )
            follows = "" if stays else before
            changes: list[Change] = []
            compares: list[Compare] = []
            for name, entry in at.old:
                compares.append(Compare(TASKS, name, entry.revision))
                if not stays:
                    changes.append(_shutdown(name, entry, now))
            task = Task(
                service=key,
                version=service.version,
                slot=0 if node else int(at.place),
                node=node,
                desired=TaskState.READY if follows else TaskState.RUNNING,
                created=now,
                updated=now,
                follows=follows,
                by_update=True,
            )
            births.append(Birth(new_id(), task, service.spec, changes, compares))
        if births:
            await self._scheduler.create(acting, births)
            self._touch(key)

    async def _pause_or_roll_back(self, acting: Acting, update: _Update, task: str) -> None:
        """Too many tasks have failed, at last `task`: pause, or put the previous spec back."""
        key, service, started = update.key, update.service, update.record.started
        reason = f"due to failure or early termination of task {task}"
        if update.config.failure_action != "rollback" or service.rollback or service.previous is None:
            state, words = ("rollback_paused", "rollback") if service.rollback else ("paused", "update")
            await self._note(acting, update, UpdateRecord(state, started, 0, f"{words} paused {reason}"))
            return
        try:
            published, of_ports, compares = ports.published(self._store, key, service.previous, ports.of(service))
            of_networks, compared = networks.refer(self._store, key, service.previous)
        except (ports.Taken, EngineError) as error:
            why = f"update paused {reason}; it cannot be rolled back: {error.message}"
            await self._note(acting, update, UpdateRecord("paused", started, 0, why))
            return
        now = self._clock.now()
        version = service.version + 1
        back = replace(
            service,
            spec=service.previous,
            previous=None,
            version=version,
            rollback=True,
            updated=now,
            ports=published,
        )
        begun = UpdateRecord("rollback_started", now, 0, f"update rolled back {reason}")
        await acting.commit(
            [
                Put(SERVICES, key, back),
                Put(SPEC_VERSIONS, spec_key(key, version), SpecVersion(service.previous)),
                Put(SERVICE_STATUS, key, replace(update.status, update=begun, version=version)),
                *of_ports,
                *of_networks,
            ],
            [Compare(SERVICES, key, update.entry.revision), update.unchanged, *compares, *compared],
        )

    async def _note(self, acting: Acting, update: _Update, record: UpdateRecord) -> None:
        noted = replace(update.status, update=record, version=update.service.version)
        await acting.commit([Put(SERVICE_STATUS, update.key, noted)], [update.unchanged])


def _config(service: ServiceRecord) -> UpdateConfig:
    config = service.spec.rollback_config if service.rollback else service.spec.update_config
    return config or DEFAULT


def _monitor(config: UpdateConfig) -> int:
    return config.monitor or DEFAULT.monitor


def _shutdown(key: str, entry: Entry[Task], now: int) -> Change:
    return Put(TASKS, key, replace(entry.record, desired=TaskState.SHUTDOWN, updated=now))
