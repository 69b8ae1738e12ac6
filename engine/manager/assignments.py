"""What one node's agent is sent: its tasks and what they refer to, whole at first and then changes.

Sender and agent keep the same references. Each spec, secret and config is sent with the first task
that refers to it, and so is a service's registry authorization. Both ends drop it when, after a
message, no task refers to it any more.

A task belongs to its node from the moment when the scheduler has confirmed the node
(`Task.assigned`) until its record is deleted, whatever its state: the agent keeps an ended
container for its logs. A task that was given up (`orphaned`) is taken out, so that a node that
comes back after a long time ends it.

Owns:    the copy of what the agent has.
Threads: the event loop's.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec

from engine.errors import EngineError
from engine.manager import records
from engine.manager.records import Task, spec_key
from engine.manager.store import Store
from engine.swarm_session.messages import Assigned, Assignments, Delivery
from engine.swarm_session.states import TaskState
from engine.wire.services import ServiceSpec

Unseal = Callable[[str, bytes], bytes]
"""The content of a secret or config, by its id and the sealed bytes."""

_log = logging.getLogger(__name__)


class _Sent(NamedTuple):
    """A task that the agent has."""

    spec: str
    desired: TaskState
    secrets: tuple[str, ...]
    configs: tuple[str, ...]
    assigned: int


class AssignmentSet:
    """The tasks of `node`, as its agent was sent them."""

    def __init__(self, store: Store, unseal: Unseal, node: str) -> None:
        self._store = store
        self._unseal = unseal
        self._node = node
        self._sent: dict[str, _Sent] = {}
        self._specs: Counter[str] = Counter()
        self._secrets: Counter[str] = Counter()
        self._configs: Counter[str] = Counter()
        self._services: Counter[str] = Counter()
        self._auths: dict[str, str] = {}
        """Of the services in `_services`."""
        self.awaited: dict[str, set[str]] = {}
        """Tasks whose spec the store does not have yet, by its key."""

    def whole(self) -> Assignments:
        """All tasks, for a new session."""
        return self._message(self._store.tasks_on(self._node), whole=True)

    def changes(self, tasks: Iterable[str]) -> Assignments | None:
        """What of these tasks is new to the agent; None when nothing is."""
        message = self._message(tasks, whole=False)
        return message if message.put or message.remove else None

    def _message(self, tasks: Iterable[str], *, whole: bool) -> Assignments:
        put: list[Assigned] = []
        remove: list[str] = []
        over: list[_Sent] = []
        new = _New({}, {}, [], [])
        for task in sorted(tasks):
            sent = self._sent.get(task)
            record = self._of_node(task)
            if record is None:
                if sent is not None:
                    remove.append(task)
            elif sent is None:
                assigned = self._added(task, record, new)
                if assigned is not None:
                    put.append(assigned)
            elif (
                record.desired != sent.desired
                or record.assigned != sent.assigned
                or spec_key(record.service, record.version) != sent.spec
            ):
                changed = self._added(task, record, new)
                if changed is not None:
                    put.append(changed)
                    over.append(sent)
        over += [self._sent.pop(task) for task in remove]
        for sent in over:
            self._forget(sent)
        cluster = self._store.record(records.CLUSTER)
        driver = None if cluster is None else cluster.spec.task_defaults.log_driver
        return Assignments(
            whole=whole,
            put=tuple(put),
            remove=tuple(remove),
            specs=new.specs,
            auths=new.auths,
            secrets=tuple(new.secrets),
            configs=tuple(new.configs),
            log_driver=None if driver is None or not driver.name else msgspec.to_builtins(driver),
        )

    def _of_node(self, task: str) -> Task | None:
        """The task's record, if the task is for this node's agent."""
        record = self._store.record(records.TASKS, task)
        if record is None or record.node != self._node or not record.assigned:
            return None
        status = self._store.record(records.TASK_STATUS, task)
        return None if status is not None and status.state == TaskState.ORPHANED else record

    def _added(self, task: str, record: Task, new: _New) -> Assigned | None:
        """Count the task's references, and add to `new` those that the agent has not."""
        key = spec_key(record.service, record.version)
        spec = self._spec(record, key)
        if spec is None:
            self.awaited.setdefault(key, set()).add(task)
            return None
        container = spec.task_template.container_spec
        secrets = () if container is None else tuple(each.secret_id for each in container.secrets)
        configs = () if container is None else tuple(each.config_id for each in container.configs)
        if not self._specs[key]:
            new.specs[key] = spec
        self._specs[key] += 1
        self._services[record.service] += 1
        for id in secrets:
            if not self._secrets[id]:
                new.secrets.extend(self._delivery(records.SECRETS, id))
            self._secrets[id] += 1
        for id in configs:
            if not self._configs[id]:
                new.configs.extend(self._delivery(records.CONFIGS, id))
            self._configs[id] += 1
        auth = self._store.record(records.SERVICE_AUTH, record.service)
        header = "" if auth is None else auth.header
        if self._auths.get(record.service, "") != header:
            self._auths[record.service] = new.auths[record.service] = header
        self._sent[task] = _Sent(key, record.desired, secrets, configs, record.assigned)
        return Assigned(
            id=task,
            service=record.service,
            name=task_name(spec.name, task, record),
            spec=key,
            desired=record.desired,
            slot=record.slot,
            secrets=secrets,
            configs=configs,
            generic=record.generic,
            addresses={each.network: each.address for each in record.networks},
        )

    def _spec(self, record: Task, key: str) -> ServiceSpec | None:
        kept = self._store.record(records.SPEC_VERSIONS, key)
        if kept is not None:
            return kept.spec
        service = self._store.record(records.SERVICES, record.service)
        return service.spec if service is not None and service.version == record.version else None

    def _delivery(self, kind: records.Kind[Any], id: str) -> list[Delivery]:
        """Empty when the record is gone: the agent rejects the task then, and names it."""
        record = self._store.record(kind, id)
        if record is None:
            return []
        try:
            data = self._unseal(id, record.data) if record.data else b""
        except EngineError as error:
            _log.error("%s", error.message)
            return []
        templating = record.spec.templating
        template = "" if templating is None else templating.name
        return [Delivery(id=id, name=record.spec.name, data=data, template=template)]

    def _forget(self, sent: _Sent) -> None:
        _drop(self._specs, (sent.spec,))
        _drop(self._secrets, sent.secrets)
        _drop(self._configs, sent.configs)
        service = sent.spec.partition("/")[0]
        _drop(self._services, (service,))
        if service not in self._services:
            self._auths.pop(service, None)


class _New(NamedTuple):
    """What the agent does not have yet."""

    specs: dict[str, ServiceSpec]
    auths: dict[str, str]
    secrets: list[Delivery]
    configs: list[Delivery]


def _drop(counts: Counter[str], keys: Iterable[str]) -> None:
    for key in keys:
        counts[key] -= 1
        if not counts[key]:
            del counts[key]


def task_name(service: str, task: str, record: Task) -> str:
    """The name of a task and its container: `web.1.<id>`, and `web.<node>.<id>` of a global one."""
    return f"{service}.{record.slot or record.node}.{task}"
