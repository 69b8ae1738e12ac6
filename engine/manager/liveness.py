"""Loop of the leader: nodes that no manager watches, and the tasks of nodes that are gone for long.

The manager that has a node's session judges the node (`dispatcher.py`). When that manager is lost
(its presence record, which has a lease, is gone), the node is `unknown` until it has registered
with another one, and `down` after six periods without. All nodes have these six periods from when
a manager becomes the leader: the time before was without a judge.

A node that never registered is down in the same way. The tasks of a node that has been down for a
day are given up (`orphaned`); those of a removed node are the keeper's (`keeper.py`).

All nodes are looked at every second, which takes 5 ms for 10,000 of them.

Threads: the event loop's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from msgspec.structs import replace

from engine.manager import records
from engine.manager.dispatcher import RETURN, SUSPECT, period_of
from engine.manager.loops import Acting
from engine.manager.records import NodeData, TaskStatus
from engine.manager.store import Change, Compare, Event, Put, Store
from engine.swarm_session.clock import SECOND, Clock
from engine.swarm_session.states import NodeState, TaskState

TICK = 1.0
"""Seconds between two looks at all nodes."""
LOST = SUSPECT
"""Seconds that a manager may be absent before its nodes are unknown: its lease may only be late."""
ORPHANED = 24 * 3600 * SECOND
"""Nanoseconds that a node may be down before its tasks are given up."""
SLICE = 1000
"""Nodes that are looked at before others are served."""

_log = logging.getLogger(__name__)

_Group = tuple[Sequence[Change], Sequence[Compare]]


class Liveness:
    name = "liveness"

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._due = 0.0
        self._unwatched: dict[str, float] = {}
        """Nodes without a manager, since when (monotonic)."""
        self._given_up: dict[str, int] = {}
        """Nodes whose tasks have been given up, and since when they are down."""

    def changed(self, event: Event) -> None:
        pass  # all nodes are looked at

    def take_over(self) -> None:
        self._due = 0.0
        self._unwatched.clear()
        self._given_up.clear()

    def due(self) -> float | None:
        return self._due

    async def step(self, acting: Acting) -> None:
        self._due = self._clock.monotonic() + TICK
        groups: list[_Group] = []
        for count, node in enumerate(list(self._store.all(records.NODES)), 1):
            if not count % SLICE:
                await asyncio.sleep(0)
            group = self._judge(node)
            if group is not None:
                groups.append(group)
            else:
                groups += self._orphans(node)
        for node in [node for node in self._unwatched if self._store.get(records.NODES, node) is None]:
            del self._unwatched[node]
        if groups:
            await acting.commit_many(groups)

    def _judge(self, node: str) -> _Group | None:
        """The change of a node's state that is due."""
        known, entry = self._store.get(records.NODES, node), self._store.get(records.NODE_DATA, node)
        if known is None:
            return None  # removed since the step began
        data = NodeData() if entry is None else entry.record
        if data.state == NodeState.DOWN or (data.owner and self._store.get(records.MANAGERS, data.owner) is not None):
            self._unwatched.pop(node, None)
            return None
        passed = self._clock.monotonic() - self._unwatched.setdefault(node, self._clock.monotonic())
        if passed >= RETURN * period_of(self._store.record(records.CLUSTER)):
            registered = entry is not None
            message = "no manager has heard of the node" if registered else "the node has never registered"
            _log.warning("node %s is down: %s", node, message)
            new = replace(data, state=NodeState.DOWN, message=message, owner="", session="")
        elif passed >= LOST and entry is not None and (data.owner or data.state != NodeState.UNKNOWN):
            # the session stays: its manager may only have been late, and ends it by itself
            new = replace(data, state=NodeState.UNKNOWN, message="the node's manager is lost", owner="")
        else:
            return None
        new = replace(new, since=self._clock.now())
        compares = (
            Compare(records.NODES, node, known.created, by_creation=True),
            Compare(records.NODE_DATA, node, 0 if entry is None else entry.revision),
        )
        return (Put(records.NODE_DATA, node, new),), compares

    def _orphans(self, node: str) -> list[_Group]:
        """The tasks of a node that has been down for too long."""
        data = self._store.record(records.NODE_DATA, node)
        if data is None or data.state != NodeState.DOWN:
            self._given_up.pop(node, None)
            return []
        if self._clock.now() - data.since < ORPHANED or self._given_up.get(node) == data.since:
            return []
        groups: list[_Group] = []
        for key in self._store.tasks_on(node):
            task = self._store.record(records.TASKS, key)
            entry = self._store.get(records.TASK_STATUS, key)
            if task is None or not task.assigned or (entry is not None and entry.record.state.ended):
                continue
            old = TaskStatus(state=TaskState.ORPHANED, since=0) if entry is None else entry.record
            orphaned = replace(
                old,
                state=TaskState.ORPHANED,
                since=self._clock.now(),
                message="orphaned",
                error="its node has been down for a day",
                ready=False,
            )
            compares = Compare(records.TASK_STATUS, key, 0 if entry is None else entry.revision)
            groups.append(((Put(records.TASK_STATUS, key, orphaned),), (compares,)))
        if not groups:
            self._given_up[node] = data.since
        return groups
