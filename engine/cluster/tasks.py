"""The tasks that this node was assigned, with their specs, on disk: they survive the daemon, and
run on while no manager can be reached.

One record for each task and one for each spec that tasks refer to. A change of the set is one
transaction, made before anything of it is carried out. The content of secrets and configs is never
part of it (`delivery.py`).

Owns:    the records of kinds `task` and `task-spec`.
Threads: the event loop's.
Raises:  ServerError when records cannot be written.
Not here: what becomes of a task (`executor.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from engine.errors import ServerError
from engine.storage.records import Change, Records
from engine.swarm_session.messages import Assigned, Assignments, Status
from engine.swarm_session.states import TaskState
from engine.wire.services import ServiceSpec
from engine.wire.swarm import Driver
from engine.wire.tasks import PortConfig


class Observed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What has become of a task: its status for the managers."""

    state: TaskState = TaskState.ASSIGNED
    since: int = 0
    ran: int = 0
    """When it was first seen running; 0 for never."""
    message: str = ""
    error: str = ""
    container: str = ""
    """Its id, from its create on."""
    pid: int = 0
    exit_code: int = 0
    ports: tuple[PortConfig, ...] = ()
    withdrawn: bool = False
    """It runs, and is about to be stopped: no traffic is led to it any more."""

    def status(self, task: str) -> Status:
        return Status(
            task=task,
            state=int(self.state),
            since=self.since,
            ran=self.ran,
            message=self.message,
            error=self.error,
            container=self.container,
            pid=self.pid,
            exit_code=self.exit_code,
            ports=self.ports,
            ready=self.state == TaskState.RUNNING and not self.withdrawn,
        )


class TaskRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    assigned: Assigned
    observed: Observed = Observed()
    log_driver: Driver | None = None
    """The swarm's default when the task came, for a spec that names none. A later default is for
    later tasks.
    """


class SpecRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A service's spec as tasks of one version have it."""

    spec: ServiceSpec
    auth: str = ""
    """X-Registry-Auth for its image. A secret."""

    def __repr__(self) -> str:
        return f"SpecRecord({self.spec.name})"


class Applied(msgspec.Struct, frozen=True):
    """What a message has changed: ids of tasks that are new or wanted otherwise, and of those that
    are gone.
    """

    put: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()


class TaskSet:
    """The assigned tasks of this node, and their specs."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._tasks = records.table("task", TaskRecord)
        self._spec_table = records.table("task-spec", SpecRecord)
        self._all: dict[str, TaskRecord] = {}
        self._specs: dict[str, SpecRecord] = {}
        self._users: Counter[str] = Counter()
        """Tasks by the spec that they refer to."""
        self._behind = False
        """A change could not be written: the next whole set writes every record."""

    def load(self) -> None:
        """At start. Raises ServerError when a record cannot be decoded."""
        self._specs = self._spec_table.load()
        self._all = self._tasks.load()
        self._users = Counter(record.assigned.spec for record in self._all.values())

    def __iter__(self) -> Iterator[TaskRecord]:
        return iter(self._all.values())

    def __len__(self) -> int:
        return len(self._all)

    def get(self, task: str) -> TaskRecord | None:
        return self._all.get(task)

    def spec(self, task: Assigned) -> SpecRecord | None:
        """None when this node was never sent it."""
        return self._specs.get(task.spec)

    def specs(self) -> Iterator[SpecRecord]:
        """All that are kept."""
        return iter(self._specs.values())

    async def apply(self, message: Assignments) -> Applied:
        """Take the set, or the changes of it. Those that are gone stay in the set until `forget`.

        The set has the changes at once. When they cannot be written it raises, and none of them may
        be carried out: the next whole set brings them again, and counts as a change of every task.
        """
        log_driver = msgspec.convert(message.log_driver, Driver) if message.log_driver is not None else None
        # An authorization comes once for a service, not with each version of its spec.
        auths = {} if message.whole else {_service(key): record.auth for key, record in self._specs.items()}
        auths |= message.auths
        specs = {key: SpecRecord(spec=spec, auth=auths.get(_service(key), "")) for key, spec in message.specs.items()}
        for key, record in self._specs.items():  # a new authorization for a spec that is here
            auth = message.auths.get(_service(key))
            if auth is not None and auth != record.auth and key not in specs:
                specs[key] = msgspec.structs.replace(record, auth=auth)
        put = {task.id: task for task in message.put}
        for task in put.values():
            if task.spec not in specs and task.spec not in self._specs:
                raise ServerError(f"task {task.id} refers to the spec {task.spec}, which was not sent")
        gone = {task for task in message.remove if task in self._all and task not in put}
        if message.whole:
            gone |= self._all.keys() - put.keys()
        rows = []
        for key, record in specs.items():
            if self._specs.get(key) != record:
                self._specs[key] = record
                rows.append(self._spec_table.put(key, record))
        changed = []
        for task in put.values():
            known = self._all.get(task.id)
            if message.whole or known is None or known.assigned != task:
                changed.append(task.id)
            if known is None or known.assigned != task:
                rows.append(self._put(known or TaskRecord(assigned=task, log_driver=log_driver), assigned=task))
        if message.whole and self._behind:
            rows = [
                *(self._spec_table.put(key, record) for key, record in self._specs.items()),
                *(self._tasks.put(key, record) for key, record in self._all.items()),
            ]
            await self._commit(*rows)
            self._behind = False
        else:
            await self._commit(*rows)
        return Applied(put=tuple(changed), gone=tuple(gone))

    def _put(self, record: TaskRecord, **changes: Any) -> Change:
        """The record with these changes."""
        record = msgspec.structs.replace(record, **changes)
        id = record.assigned.id
        before = self._all.get(id)
        if before is not None:
            self._users[before.assigned.spec] -= 1
        self._users[record.assigned.spec] += 1
        self._all[id] = record
        return self._tasks.put(id, record)

    async def observe(self, observed: Iterable[tuple[str, Observed]]) -> None:
        """Save what has become of tasks. The set has it at once, even when writing fails."""
        await self._commit(
            *(self._put(found, observed=seen) for task, seen in observed if (found := self._all.get(task)) is not None)
        )

    async def forget(self, task: str) -> None:
        """The task, and the specs that no task refers to any more. Raises ServerError; the set has
        it still then.
        """
        record = self._all.pop(task, None)
        if record is None:
            return
        self._users[record.assigned.spec] -= 1
        unused = [key for key, users in self._users.items() if not users]
        specs = {key: self._specs.pop(key) for key in unused if key in self._specs}
        for key in unused:
            del self._users[key]
        try:
            await self._commit(self._tasks.delete(task), *(self._spec_table.delete(key) for key in specs))
        except BaseException:
            if task not in self._all:  # otherwise it was assigned again meanwhile
                self._put(record)
            self._specs = specs | self._specs
            raise

    async def clear(self) -> None:
        """Everything: this node leaves."""
        rows = [
            *(self._tasks.delete(task) for task in self._all),
            *(self._spec_table.delete(key) for key in self._specs),
        ]
        self._all, self._specs = {}, {}
        self._users.clear()
        await self._commit(*rows)

    async def _commit(self, *changes: Change) -> None:
        if not changes:
            return
        try:
            await self._records.commit(*changes)
        except ServerError:
            self._behind = True
            raise


def _service(spec: str) -> str:
    return spec.partition("/")[0]


__all__ = ["Applied", "Observed", "SpecRecord", "TaskRecord", "TaskSet"]
