"""What follows from the records of tasks: which are wanted, which may be restarted, which are out
of date, and how their successors look. Pure, over the store's cache.

A task is *live* while the leader wants it to run (or, for a job, to complete). A *place* is what a
service has one live task of: a slot, or a node for global services. A place is *done* when it has
no live task and its newest one has ended for good.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from msgspec.structs import replace

from engine.errors import InvalidParameter
from engine.manager.constraints import matches, parse_all
from engine.manager.records import (
    NODE_DATA,
    NODES,
    SPEC_VERSIONS,
    TASK_STATUS,
    TASKS,
    NodeData,
    ServiceRecord,
    Task,
    spec_key,
)
from engine.manager.store import Entry, Store
from engine.swarm_session.clock import SECOND
from engine.swarm_session.states import Availability, NodeState, TaskState
from engine.wire.services import ServiceSpec
from engine.wire.tasks import RestartPolicy

DELAY = 5 * SECOND
"""Between the end of a task and the start of its successor, unless the policy has another one."""
STOP = 60 * SECOND
"""How long a successor waits for the end of the task before it."""

ANY, ON_FAILURE, NONE = "any", "on-failure", "none"

Place = int | str
"""A slot, or a node."""


def observed(store: Store, key: str, task: Task) -> TaskState:
    """The state that the task has reached."""
    status = store.record(TASK_STATUS, key)
    if status is not None:
        return status.state
    return TaskState.ASSIGNED if task.assigned else TaskState.PENDING


def live(task: Task) -> bool:
    """True while the task is wanted. `COMPLETE` is the wish for tasks of jobs."""
    return task.desired <= TaskState.COMPLETE


def place_of(task: Task) -> Place:
    return task.slot or task.node


def is_job(spec: ServiceSpec) -> bool:
    return spec.mode.replicated_job is not None or spec.mode.global_job is not None


def is_global(spec: ServiceSpec) -> bool:
    return spec.mode.global_ is not None or spec.mode.global_job is not None


def replicas(spec: ServiceSpec) -> int:
    mode = spec.mode.replicated
    return 1 if mode is None or mode.replicas is None else mode.replicas


def goal(spec: ServiceSpec) -> TaskState:
    """The desired state of a task that should run."""
    return TaskState.COMPLETE if is_job(spec) else TaskState.RUNNING


def spec_of(store: Store, service: str, version: int) -> ServiceSpec | None:
    """One spec of a service, also of one that is removed."""
    kept = store.record(SPEC_VERSIONS, spec_key(service, version))
    return None if kept is None else kept.spec


def age(item: tuple[str, Entry[Task]]) -> tuple[int, int, str]:
    """Orders tasks from the oldest to the newest."""
    return item[1].created, item[1].record.created, item[0]


def entries(store: Store, keys: Iterable[str]) -> list[tuple[str, Entry[Task]]]:
    """The tasks of `keys` that exist."""
    found = []
    for key in keys:
        entry = store.get(TASKS, key)
        if entry is not None:
            found.append((key, entry))
    return found


# --- restarts -------------------------------------------------------------------------------------


def policy(spec: ServiceSpec | None) -> RestartPolicy:
    return (spec.task_template.restart_policy if spec is not None else None) or RestartPolicy()


def condition(spec: ServiceSpec | None) -> str:
    """When tasks of this spec are restarted. Jobs are never restarted after success."""
    asked = policy(spec).condition
    if spec is not None and is_job(spec):
        return NONE if asked == NONE else ON_FAILURE
    return asked or ANY


def delay(spec: ServiceSpec | None) -> int:
    asked = policy(spec).delay
    return DELAY if asked is None else asked


def counted(task: Task, spec: ServiceSpec | None, at: int) -> tuple[int, int]:
    """Restarts of the task's place in the window around `at`, and the window's begin."""
    window = policy(spec).window or 0
    if window and at - task.window_from > window:
        return 0, at
    return task.restarts, task.window_from


def may_restart(task: Task, spec: ServiceSpec | None, state: TaskState, at: int) -> bool:
    """True if the policy permits a successor of a task in `state` at the time `at`."""
    when = condition(spec)
    if when == NONE or (when == ON_FAILURE and state is TaskState.COMPLETE):
        return False
    attempts = policy(spec).max_attempts or 0
    return not attempts or counted(task, spec, at)[0] < attempts


def done(store: Store, key: str, task: Task) -> bool:
    """True if a task that is not live any more was the last one of its place, by its restart
    policy.
    """
    if task.desired is not TaskState.SHUTDOWN:
        return False
    state = observed(store, key, task)
    return not may_restart(task, spec_of(store, task.service, task.version), state, task.updated)


def grace(spec: ServiceSpec | None) -> int:
    """Between the signal that stops a task, and its kill."""
    container = spec.task_template.container_spec if spec is not None else None
    asked = container.stop_grace_period if container is not None else None
    return 10 * SECOND if asked is None else asked


# --- updates --------------------------------------------------------------------------------------


class Difference(enum.Enum):
    NONE = 0
    PLACEMENT = 1
    """Only the placement differs: a task may stay on a node that still passes the constraints."""
    TASKS = 2
    """Tasks must be replaced."""


def difference(old: ServiceSpec, new: ServiceSpec) -> Difference:
    """What a change of the spec means for tasks. Labels of the service, the number of replicas, the
    update's rules and ports in the mode ingress are no matter of a task, but for whether there are
    any: its tasks are on the network ingress then.
    """
    if old is new:
        return Difference.NONE
    if old.networks != new.networks or host_ports(old) != host_ports(new) or publishes(old) != publishes(new):
        return Difference.TASKS
    if old.task_template == new.task_template:
        return Difference.NONE
    if replace(old.task_template, placement=None) == replace(new.task_template, placement=None):
        return Difference.PLACEMENT
    return Difference.TASKS


def outdated(store: Store, service: ServiceRecord, task: Task, known: Difference | None = None) -> bool:
    """True if an update to the service's spec replaces the task. `known`: `difference` of the
    specs, if the caller has it.
    """
    if task.version == service.version:
        return False
    if known is None:
        spec = spec_of(store, task.service, task.version)
        known = Difference.TASKS if spec is None else difference(spec, service.spec)
    if known is not Difference.PLACEMENT:
        return known is Difference.TASKS
    return not task.assigned or not _passes(store, service.spec, task.node)


def _passes(store: Store, spec: ServiceSpec, node: str) -> bool:
    """True if the node passes the spec's constraints."""
    record = store.record(NODES, node)
    placement = spec.task_template.placement
    if record is None:
        return False
    try:
        wanted = parse_all(placement.constraints if placement is not None else ())
    except InvalidParameter:
        return False
    return matches(wanted, node, record, store.record(NODE_DATA, node))


def host_ports(spec: ServiceSpec) -> frozenset[tuple[str, int, int]]:
    """Protocol, published and target port of each port of mode host."""
    endpoint = spec.endpoint_spec
    if endpoint is None or not endpoint.ports:
        return frozenset()
    return frozenset(
        (port.protocol or "tcp", port.published_port, port.target_port)
        for port in endpoint.ports
        if port.publish_mode == "host"
    )


def publishes(spec: ServiceSpec) -> bool:
    """True if the spec has a port of mode ingress, so that its tasks are on the network ingress."""
    endpoint = spec.endpoint_spec
    return endpoint is not None and any(port.publish_mode != "host" for port in endpoint.ports)


# --- nodes ----------------------------------------------------------------------------------------


def usable(store: Store, node: str) -> bool:
    """True if tasks that are on the node may stay: it exists, is not down and not drained."""
    record = store.record(NODES, node)
    return record is not None and record.availability is not Availability.DRAIN and not is_down(store, node)


def is_down(store: Store, node: str) -> bool:
    """True if nothing runs on the node for certain, or no one can tell."""
    data = store.record(NODE_DATA, node)
    return data is not None and data.state is NodeState.DOWN


def open_for_tasks(record_availability: Availability, data: NodeData | None) -> bool:
    """True if new tasks may come to the node."""
    return record_availability is Availability.ACTIVE and data is not None and data.state is NodeState.READY


def over(store: Store, key: str) -> bool:
    """True if the task has ended, is gone, or its node is down or gone, so that a successor need
    not wait for it.
    """
    task = store.record(TASKS, key)
    if task is None or observed(store, key, task).ended:
        return True
    if not task.assigned:
        return not live(task)
    return store.record(NODES, task.node) is None or is_down(store, task.node)
