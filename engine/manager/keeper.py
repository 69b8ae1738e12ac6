"""Moves tasks away from nodes that they may not be on: a node that is down, drained or removed, or
that does not fulfil the constraints of a task any more.

Tasks of a removed node become `orphaned`, as no node will report on them. Tasks of global services
whose constraints a node fails are ended by `global_services.py`.

Threads: the event loop's.
"""

from __future__ import annotations

import asyncio

from engine.manager import constraints
from engine.manager import tasks as rules
from engine.manager.loops import Acting
from engine.manager.placement import demand_of
from engine.manager.records import NODE_DATA, NODES, TASK_STATUS, TASKS, NodeData, NodeRecord, Task, TaskStatus
from engine.manager.restarts import Restarts
from engine.manager.store import Change, Compare, Event, Put, Store
from engine.swarm_session.clock import Clock
from engine.swarm_session.states import TaskState

SLICE = 50
"""Nodes that are looked at before others get the event loop."""


class Keeper:
    name = "keeper"

    def __init__(self, store: Store, clock: Clock, restarts: Restarts) -> None:
        self._store = store
        self._clock = clock
        self._restarts = restarts
        self._dirty: dict[str, None] = {}

    def changed(self, event: Event) -> None:
        if event.kind is NODES:
            self._dirty[event.key] = None
        elif event.kind is NODE_DATA:
            if event.old is None or event.new is None or _differs(event.old.record, event.new.record):
                self._dirty[event.key] = None
        elif event.kind is TASKS and event.new is not None:
            task: Task = event.new.record
            # a task that was placed while its node went
            if task.node and rules.live(task) and not rules.usable(self._store, task.node):
                self._dirty[task.node] = None

    def take_over(self) -> None:
        self._dirty |= dict.fromkeys(self._store.all(NODES))
        self._dirty |= dict.fromkeys(entry.record.node for entry in self._store.all(TASKS).values())
        self._dirty.pop("", None)

    def due(self) -> float | None:
        return 0 if self._dirty else None

    async def step(self, acting: Acting) -> None:
        dirty, self._dirty = list(self._dirty), {}
        try:
            moved: list[str] = []
            orphans: list[str] = []
            for number, node in enumerate(dirty):
                if number % SLICE == SLICE - 1:
                    await asyncio.sleep(0)
                record = self._store.record(NODES, node)
                if record is None:
                    orphans += self._store.tasks_on(node)
                if record is None or not rules.usable(self._store, node):
                    moved += self._store.tasks_on(node)
                else:
                    moved += self._unfit(node, record)
            if moved:
                await self._restarts.succeed(acting, moved, moved=True)
            if orphans:
                await self._orphan(acting, orphans)
        except BaseException:
            self._dirty |= dict.fromkeys(dirty)
            raise

    def _unfit(self, node: str, record: NodeRecord) -> list[str]:
        """The tasks on the node whose constraints it fails."""
        data = self._store.record(NODE_DATA, node)
        verdicts: dict[tuple[str, int], bool] = {}
        unfit = []
        for key in self._store.tasks_on(node):
            task = self._store.record(TASKS, key)
            if task is None or not task.slot or not rules.live(task):
                continue
            group = (task.service, task.version)
            if group not in verdicts:
                spec = rules.spec_of(self._store, *group)
                filters = demand_of(spec).filters if spec is not None else None
                verdicts[group] = filters is None or constraints.matches(filters.constraints, node, record, data)
            if not verdicts[group]:
                unfit.append(key)
        return unfit

    async def _orphan(self, acting: Acting, keys: list[str]) -> None:
        groups: list[tuple[list[Change], list[Compare]]] = []
        for key, entry in rules.entries(self._store, keys):
            status = self._store.get(TASK_STATUS, key)
            if not entry.record.assigned or (status is not None and status.record.state.ended):
                continue
            orphaned = TaskStatus(
                state=TaskState.ORPHANED,
                since=self._clock.now(),
                message="orphaned",
                error="its node was removed from the swarm",
                container=status.record.container if status is not None else "",
            )
            revision = 0 if status is None else status.revision
            groups.append(([Put(TASK_STATUS, key, orphaned)], [Compare(TASK_STATUS, key, revision)]))
        if groups:
            await acting.commit_many(groups)


def _differs(old: NodeData, new: NodeData) -> bool:
    return old.state is not new.state or old.description != new.description or old.address != new.address
