"""Observed states of tasks, on their way from the agents to the store.

Statuses of all sessions are written together (`batches.py`), and those that lead traffic to a task
or away from it are not waited with. Of several statuses of one task the last one counts. Each is
written under these comparisons: the session that reported it is still the node's, the task exists,
and its status is the one that was read. A state only goes forward, and the state of an ended task
is final.

Not here: statuses that the leader sets (`orphaned`, see `liveness.py`).

Threads: the event loop's.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from engine.errors import InvalidParameter, ServerError
from engine.manager import records
from engine.manager.batches import Batches
from engine.manager.records import TaskStatus
from engine.manager.store import Change, Compare, Put, Store
from engine.swarm_session.clock import Clock
from engine.swarm_session.messages import Status
from engine.swarm_session.states import TaskState

ATTEMPTS = 10
"""Tries of a status whose comparisons fail."""
TOGETHER = 32
"""Statuses of one session that are written as a whole, and one by one when that fails."""
SLICE = 200
"""Statuses that are prepared before others are served."""

LONGEST_TEXT = 4096
LONGEST_ID = 128
MOST_PORTS = 1024
"""What is kept of a status: one that etcd refuses would fail the others of its transaction."""

_NOT_REPORTED = (TaskState.NEW, TaskState.PENDING, TaskState.REMOVE, TaskState.ORPHANED)
_REPORTED = {int(state): state for state in TaskState if state not in _NOT_REPORTED}
"""States that an agent may report."""


class Report(NamedTuple):
    node: str
    session: str
    status: Status


class Statuses:
    """Stores reports."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._batches = Batches(clock, self._write, "manager: statuses")

    async def report(self, node: str, session: str, statuses: Sequence[Status]) -> bool:
        """Store what this session of the node reports. Tasks that the node does not have are
        skipped. Returns False when the session is not the node's any more.

        Raises InvalidParameter for a state that no agent can report, ServerError without quorum.
        """
        for status in statuses:
            if status.state not in _REPORTED:
                raise InvalidParameter(f"task {status.task[:64]}: {status.state} is no state that a node reports")
        urgent = any(self._is_urgent(status) for status in statuses)
        reports = [Report(node, session, status) for status in statuses]
        return all(await self._batches.add(reports, urgent=urgent))

    def _is_urgent(self, status: Status) -> bool:
        """It changes where traffic is led to."""
        task = self._store.record(records.TASKS, status.task)
        if task is None or not task.networks:
            return False
        old = self._store.record(records.TASK_STATUS, status.task)
        return (old is not None and old.ready) != (status.ready and status.state == TaskState.RUNNING)

    async def close(self) -> None:
        await self._batches.close()

    async def _write(self, reports: list[Report]) -> list[bool]:
        """For each report, whether its session still was the node's."""
        last: dict[tuple[str, str], Report] = {}
        for report in reports:
            before = last.get((report.session, report.status.task))
            if before is None or not (_ended(before.status) or before.status.state > report.status.state):
                last[report.session, report.status.task] = report
        lost: set[str] = set()
        left = list(last.values())
        for attempt in range(ATTEMPTS):
            left = await self._attempt(left, lost, 1 if attempt else TOGETHER)
            if not left:
                return [report.session not in lost for report in reports]
            if attempt:
                await self._store.current()
        raise ServerError(f"{len(left)} statuses were not stored: their records changed at each attempt")

    async def _attempt(self, reports: list[Report], lost: set[str], together: int) -> list[Report]:
        """Write these, up to `together` of one session under the same comparisons. Returns those
        whose comparisons failed, and adds sessions that are over to `lost`.
        """
        of_session: defaultdict[str, list[Report]] = defaultdict(list)
        for report in reports:
            of_session[report.session].append(report)
        groups: list[tuple[Sequence[Change], Sequence[Compare]]] = []
        written: list[list[Report]] = []
        prepared = 0
        for session, of_one in of_session.items():
            node = self._store.get(records.NODE_DATA, of_one[0].node)
            if node is None or node.record.session != session:
                lost.add(session)
                continue
            for start in range(0, len(of_one), together):
                part: list[Report] = []
                changes: list[Change] = []
                compares = [Compare(records.NODE_DATA, node.key, node.revision)]
                for report in of_one[start : start + together]:
                    if self._prepare(report, changes, compares):
                        part.append(report)
                if part:
                    groups.append((changes, compares))
                    written.append(part)
                prepared += len(part)
                if prepared > SLICE:
                    await asyncio.sleep(0)
                    prepared = 0
        if not groups:
            return []
        done = await self._store.commit_many(groups)
        return [report for part, stored in zip(written, done, strict=True) if not stored for report in part]

    def _prepare(self, report: Report, changes: list[Change], compares: list[Compare]) -> bool:
        """Add what stores a status. Returns False when there is nothing to store."""
        key = report.status.task
        task = self._store.get(records.TASKS, key)
        if task is None or task.record.node != report.node:
            return False
        old = self._store.get(records.TASK_STATUS, key)
        new = _record(report.status, None if old is None else old.record)
        if old is not None and not follows(old.record, new):
            return False
        changes.append(Put(records.TASK_STATUS, key, new))
        if old is None:
            compares.append(Compare(records.TASK_STATUS, key))
            compares.append(Compare(records.TASKS, key, task.created, by_creation=True))
        else:  # a task is deleted together with its status
            compares.append(Compare(records.TASK_STATUS, key, old.revision))
        return True


def follows(old: TaskStatus, new: TaskStatus) -> bool:
    """Returns True if `new` may take the place of `old`, and differs from it."""
    return not old.state.ended and new.state >= old.state and new != old


def _ended(status: Status) -> bool:
    return status.state > TaskState.RUNNING


def _record(status: Status, old: TaskStatus | None) -> TaskStatus:
    ran = status.ran
    if not ran and old is not None:  # an agent of an earlier version does not report it
        ran = old.ran or (old.since if old.state is TaskState.RUNNING else 0)
    return TaskStatus(
        state=_REPORTED[status.state],
        since=status.since,
        message=status.message[:LONGEST_TEXT],
        error=status.error[:LONGEST_TEXT],
        container=status.container[:LONGEST_ID],
        pid=status.pid,
        exit_code=status.exit_code,
        ports=status.ports[:MOST_PORTS],
        ready=status.ready and status.state == TaskState.RUNNING,
        ran=ran,
    )
