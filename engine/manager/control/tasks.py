"""Tasks: list and inspect. The leader alone writes them."""

from __future__ import annotations

from collections.abc import Iterator

from engine.common import times
from engine.common.network_rules import OVERLAY
from engine.errors import NotFound, ServerError
from engine.manager import networks
from engine.manager import tasks as rules
from engine.manager.control import filters
from engine.manager.control.context import Context, encode, encode_all, find
from engine.manager.control.nodes import find_node
from engine.manager.control.services import find_service, is_job
from engine.manager.records import (
    NETWORKS,
    SERVICES,
    SPEC_VERSIONS,
    TASK_STATUS,
    TASKS,
    NetworkRecord,
    Task,
    TaskStatus,
    spec_key,
)
from engine.manager.store import Entry, Store
from engine.swarm_session.messages import Call
from engine.swarm_session.states import TASK_STATES, TaskState
from engine.wire import tasks as wire
from engine.wire.services import ServiceSpec
from engine.wire.swarm import Driver, Version

_RUNTIMES = {"container": True, "plugin": False, "attachment": False}


def task_name(store: Store, key: str, task: Task) -> str:
    """web.1.<id>, or web.<node>.<id> for a global service; "" when the service is gone."""
    spec = _spec(store, task)
    return f"{spec.name}.{task.slot or task.node}.{key}" if spec is not None and spec.name else ""


def _spec(store: Store, task: Task) -> ServiceSpec | None:
    """The spec that the task was made of."""
    version = store.record(SPEC_VERSIONS, spec_key(task.service, task.version))
    if version is not None:
        return version.spec
    service = store.record(SERVICES, task.service)
    return None if service is None else service.spec


def find_task(store: Store, text: str) -> Entry[Task]:
    """By id, by name (web.1.<id>), by the name or id of a service that has one task, or by the
    prefix of an id.
    """
    return find(store, TASKS, "task", text, lambda name: _named(store, name))


def _named(store: Store, name: str) -> list[str]:
    service, dot, rest = name.rpartition(".")
    task = store.record(TASKS, rest) if dot and service else None
    if task is not None and task_name(store, rest, task) == name:
        return [rest]
    try:
        of = find_service(store, name)
    except (NotFound, ServerError):
        return []
    if name not in (of.key, of.record.spec.name):
        return []
    return [key for key in sorted(store.tasks_of(of.key)) if _is_listed(store, key)]


def _is_listed(store: Store, key: str) -> bool:
    task = store.record(TASKS, key)
    return task is not None and _shown(store, task)


def _shown(store: Store, task: Task) -> bool:
    """False for a task that is being removed, alone or with its service."""
    return task.desired != TaskState.REMOVE and store.get(SERVICES, task.service) is not None


# --- reading --------------------------------------------------------------------------------------


async def inspect(context: Context, call: Call) -> bytes:
    return encode(view(context.store, find_task(context.store, call.name)))


async def list_all(context: Context, call: Call) -> bytes:
    store = context.store
    asked = filters.given(
        call.query, ("id", "name", "service", "node", "label", "desired-state", "runtime", "_up-to-date")
    )
    states = filters.chosen(asked, "desired-state", TASK_STATES)
    runtimes = filters.chosen(asked, "runtime", _RUNTIMES)
    services = {find_service(store, text).key for text in asked.get("service", ())}
    nodes = {find_node(store, text).key for text in asked.get("node", ())}
    id_starts, name_starts = filters.starts(asked, "id"), filters.starts(asked, "name")
    has_labels = filters.have_labels(asked)
    by_service = "name" in asked or "label" in asked or "_up-to-date" in asked

    def document(key: str) -> wire.Task | None:
        entry = store.get(TASKS, key)
        if entry is None or not _shown(store, entry.record):
            return None
        task = entry.record
        if (
            not id_starts(key)
            or (services and task.service not in services)
            or (nodes and task.node not in nodes)
            or (states is not None and task.desired not in states)
            or (runtimes is not None and True not in runtimes)
        ):
            return None
        if by_service:
            service = store.record(SERVICES, task.service)
            spec = service.spec if service is not None else _spec(store, task)
            if spec is None or not name_starts(task_name(store, key, task)) or not has_labels(spec.labels):
                return None
            if "_up-to-date" in asked and not _is_up_to_date(store, task):
                return None
        return view(store, entry)

    return await encode_all(map(document, _candidates(store, services, nodes)))


def _candidates(store: Store, services: set[str], nodes: set[str]) -> list[str]:
    if services:
        return sorted(key for service in services for key in store.tasks_of(service))
    if nodes:
        return sorted(key for node in nodes for key in store.tasks_on(node))
    return sorted(store.all(TASKS))


def _is_up_to_date(store: Store, task: Task) -> bool:
    """Whether the task is made of the template that the service has now. Clients ask for it to show
    how an update proceeds.
    """
    service = store.record(SERVICES, task.service)
    if service is None:
        return False
    if is_job(service.spec):
        return task.iteration == service.iteration
    return not rules.outdated(store, service, task)


def view(store: Store, entry: Entry[Task]) -> wire.Task:
    """The document of one task."""
    task, status = entry.record, store.get(TASK_STATUS, entry.key)
    spec = _spec(store, task) or ServiceSpec()
    generic = list(task.generic)
    return wire.Task(
        id=entry.key,
        version=Version(max(entry.revision, status.revision if status is not None else 0)),
        created_at=times.rfc3339(task.created),
        updated_at=times.rfc3339(max(task.updated, task.created, status.record.since if status else 0)),
        name=f"{spec.name}.{task.slot or task.node}.{entry.key}" if spec.name else "",
        spec=spec.task_template,
        service_id=task.service,
        slot=_slot(task, spec),
        node_id=task.node,
        status=_status(task, None if status is None else status.record),
        desired_state=task.desired.label,
        networks_attachments=list(_attachments(store, task)),
        generic_resources=generic,
        assigned_generic_resources=generic,
        job_iteration=Version(task.iteration) if is_job(spec) else None,
    )


def _attachments(store: Store, task: Task) -> Iterator[wire.NetworkAttachment]:
    """The networks of the swarm that the task is on, with its addresses. One that was removed is
    left out.
    """
    for attached in task.networks:
        entry = store.get(NETWORKS, attached.network)
        if entry is not None:
            size = networks.prefix_of(entry.record, attached.address)
            yield wire.NetworkAttachment(_attached(entry), [f"{attached.address}/{size}"])


_kept: dict[str, tuple[Entry[NetworkRecord], wire.AttachedNetwork]] = {}
"""By id, as many tasks are on the same network."""
_MOST_KEPT = 256


def _attached(entry: Entry[NetworkRecord]) -> wire.AttachedNetwork:
    """The document of a network within that of a task."""
    kept = _kept.get(entry.key)
    if kept is None or kept[0] is not entry:
        if len(_kept) >= _MOST_KEPT:
            _kept.clear()
        kept = _kept[entry.key] = entry, _attached_network(entry)
    return kept[1]


def _attached_network(entry: Entry[NetworkRecord]) -> wire.AttachedNetwork:
    record = entry.record
    ipam = wire.IPAMOptions(
        driver=Driver(name="default", options=record.ipam_options),
        configs=[
            wire.IPAMConfig(subnet=subnet.subnet, range=subnet.range, gateway=subnet.gateway)
            for subnet in record.subnets
        ],
    )
    return wire.AttachedNetwork(
        id=entry.key,
        version=Version(entry.revision),
        created_at=times.rfc3339(record.created),
        updated_at=times.rfc3339(record.updated),
        spec=wire.NetworkSpec(
            name=record.name,
            labels=record.labels,
            driver_configuration=Driver(name=OVERLAY, options=record.options),
            internal=record.internal,
            attachable=record.attachable,
            ingress=record.ingress,
            scope="swarm",
        ),
        driver_state=Driver(name=OVERLAY, options=dict(networks.options(record))),
        ipam_options=ipam,
    )


def _slot(task: Task, spec: ServiceSpec) -> int:
    """Clients count the slots of a replicated job from 0."""
    return task.slot - 1 if spec.mode.replicated_job is not None and task.slot else task.slot


def _status(task: Task, status: TaskStatus | None) -> wire.TaskStatus:
    if status is None or status.state <= TaskState.ASSIGNED:
        return _before_its_node(task, status)
    seen = status.container or status.pid or status.exit_code
    return wire.TaskStatus(
        timestamp=times.rfc3339(status.since),
        state=status.state.label,
        message=status.message,
        err=status.error,
        container_status=(
            wire.ContainerStatus(container_id=status.container, pid=status.pid, exit_code=status.exit_code)
            if seen
            else None
        ),
        port_status=wire.TaskPorts(list(status.ports)),
    )


def _before_its_node(task: Task, status: TaskStatus | None) -> wire.TaskStatus:
    """The state of a task that no agent has reported yet."""
    if task.assigned and task.node:
        return wire.TaskStatus(
            timestamp=times.rfc3339(task.assigned),
            state=TaskState.ASSIGNED.label,
            message="scheduler assigned task to node",
        )
    if status is not None:
        return wire.TaskStatus(
            timestamp=times.rfc3339(status.since),
            state=status.state.label,
            message=status.message or "pending task scheduling",
            err=status.error or task.waits,
        )
    return wire.TaskStatus(
        timestamp=times.rfc3339(task.created),
        state=TaskState.PENDING.label,
        message="pending task scheduling",
        err=task.waits,
    )
