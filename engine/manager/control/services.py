"""Services: create, list, inspect, update, rollback, remove.

A service's record has its spec, whose revision is `Version.Index`. The leader makes its status and
its tasks of it. Names are claimed in the same transaction that writes the service, so two managers
never accept the same one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import msgspec

from engine.common import names, times
from engine.common.network_rules import PREDEFINED_NAMES
from engine.errors import Conflict, Forbidden, InvalidParameter, NotFound
from engine.manager import ports, updates
from engine.manager.control import filters, validate
from engine.manager.control.context import Context, Precondition, alone, body, check_version, encode, encode_all, find
from engine.manager.networks import INGRESS, find_network, refer
from engine.manager.records import (
    CLAIMS,
    CONFIGS,
    SECRETS,
    SERVICE_AUTH,
    SERVICE_STATUS,
    SERVICES,
    TASK_STATUS,
    TASKS,
    Claim,
    Kind,
    ServiceAuth,
    ServiceRecord,
    ServiceStatus,
    name_claim,
    new_id,
    use_claim,
)
from engine.manager.store import Change, Compare, Delete, Entry, Put, Store
from engine.swarm_session.messages import Call
from engine.swarm_session.states import TaskState
from engine.wire import services as wire
from engine.wire.services import ServiceSpec
from engine.wire.swarm import Version
from engine.wire.tasks import ContainerSpec

_MODES = {
    "replicated": "replicated",
    "global": "global",
    "replicated-job": "replicated-job",
    "global-job": "global-job",
}
_RUNTIMES = {"container": True, "plugin": False}
_TRIES = 100
_SPARE = 100


def named(store: Store, name: str) -> list[str]:
    """Ids of the services with this name: one or none."""
    claim = store.record(CLAIMS, name_claim("service", name))
    return [] if claim is None else [claim.holder]


def find_service(store: Store, text: str) -> Entry[ServiceRecord]:
    return find(store, SERVICES, "service", text, lambda name: named(store, name))


def mode_of(spec: ServiceSpec) -> str:
    """The name of the mode, as filters have it."""
    mode = spec.mode
    if mode.global_ is not None:
        return "global"
    if mode.replicated_job is not None:
        return "replicated-job"
    return "global-job" if mode.global_job is not None else "replicated"


def is_job(spec: ServiceSpec) -> bool:
    return spec.mode.replicated_job is not None or spec.mode.global_job is not None


# --- reading --------------------------------------------------------------------------------------


async def list_all(context: Context, call: Call) -> bytes:
    store = context.store
    found = filters.given(call.query, ("id", "name", "label", "mode", "runtime"))
    modes = filters.chosen(found, "mode", _MODES)
    runtimes = filters.chosen(found, "runtime", _RUNTIMES)
    id_starts, name_starts = filters.starts(found, "id"), filters.starts(found, "name")
    has_labels = filters.have_labels(found)
    status = bool(call.query.get("status"))
    if len(context.encoded) > 2 * len(store.all(SERVICES)) + _SPARE:
        context.encoded.clear()
    return await encode_all(
        _encoded(context, entry, status=status)
        if id_starts(key)
        and name_starts(entry.record.spec.name)
        and has_labels(entry.record.spec.labels)
        and (modes is None or mode_of(entry.record.spec) in modes)
        and (runtimes is None or True in runtimes)
        else None
        for key, entry in sorted(store.all(SERVICES).items())
    )


async def inspect(context: Context, call: Call) -> bytes:
    entry = find_service(context.store, call.name)
    service = view(context.store, entry)
    if call.query.get("insert_defaults"):
        service = msgspec.structs.replace(service, spec=with_defaults(service.spec))
    return encode(service)


def _encoded(context: Context, entry: Entry[ServiceRecord], *, status: bool) -> bytes:
    """The document of one service, encoded once for each state of its records."""
    store = context.store
    made = store.get(SERVICE_STATUS, entry.key)
    kept = context.encoded.get(entry.key)
    if kept is not None and kept[0] is entry and kept[1] is made:
        document = kept[2]
    else:
        document = encode(view(store, entry))
        context.encoded[entry.key] = entry, made, document
    return document[:-1] + b',"ServiceStatus":' + encode(_numbers(store, entry)) + b"}" if status else document


def view(store: Store, entry: Entry[ServiceRecord]) -> wire.Service:
    """The document of one service."""
    record = entry.record
    made = store.record(SERVICE_STATUS, entry.key) or ServiceStatus()
    return wire.Service(
        id=entry.key,
        version=Version(entry.revision),
        created_at=times.rfc3339(record.created),
        updated_at=times.rfc3339(record.updated),
        spec=record.spec,
        previous_spec=record.previous,
        endpoint=_endpoint(record, made),
        update_status=_update_status(record, made),
        job_status=_job_status(record) if is_job(record.spec) else None,
    )


def _endpoint(record: ServiceRecord, made: ServiceStatus) -> wire.Endpoint:
    """The spec with its default, the ports as chosen, and the addresses that the leader has
    given.
    """
    found = list(ports.of(record))
    if not (found or record.spec.task_template.networks):
        return wire.Endpoint()
    return wire.Endpoint(
        spec=record.spec.endpoint_spec or wire.EndpointSpec(mode="vip"),
        ports=found,
        virtual_ips=[] if made.endpoint is None else made.endpoint.virtual_ips,
    )


def _update_status(record: ServiceRecord, made: ServiceStatus) -> wire.UpdateStatus | None:
    update = made.update
    if not update.state or made.version != record.version:
        return None
    return wire.UpdateStatus(
        state=update.state,
        started_at=times.rfc3339(update.started) if update.started else "",
        completed_at=times.rfc3339(update.completed) if update.completed else "",
        message=update.message,
    )


def _job_status(record: ServiceRecord) -> wire.JobStatus:
    return wire.JobStatus(job_iteration=Version(record.iteration), last_execution=times.rfc3339(record.updated))


def _numbers(store: Store, entry: Entry[ServiceRecord]) -> wire.ServiceStatus:
    """How many tasks run, should run, and have completed. Of a job, those of its last execution."""
    record = entry.record
    mode, job = record.spec.mode, is_job(record.spec)
    running = completed = on_nodes = 0
    for key in store.tasks_of(entry.key):
        task, status = store.record(TASKS, key), store.record(TASK_STATUS, key)
        if task is None or (job and task.iteration != record.iteration):
            continue
        state = TaskState.NEW if status is None else status.state
        running += state == TaskState.RUNNING
        completed += job and state == TaskState.COMPLETE
        on_nodes += task.desired == TaskState.RUNNING or (
            task.desired == TaskState.COMPLETE and state != TaskState.COMPLETE
        )
    desired = on_nodes
    if mode.replicated is not None:
        desired = mode.replicated.replicas or 0
    elif mode.replicated_job is not None:
        desired = mode.replicated_job.max_concurrent or 0
    return wire.ServiceStatus(running_tasks=running, desired_tasks=desired, completed_tasks=completed)


def with_defaults(spec: ServiceSpec) -> ServiceSpec:
    """The spec with the values that hold where it has none."""
    replace = msgspec.structs.replace
    template = spec.task_template
    container = template.container_spec
    if container is not None:
        grace = container.stop_grace_period
        container = replace(
            container,
            stop_grace_period=validate.STOP_GRACE_PERIOD if grace is None else grace,
            dns_config=container.dns_config or validate.NO_DNS,
        )
    resources = template.resources or validate.NO_RESOURCES
    restart = template.restart_policy or validate.RESTART_POLICY
    template = replace(
        template,
        container_spec=container,
        resources=replace(
            resources,
            limits=resources.limits or validate.NO_RESOURCES.limits,
            reservations=resources.reservations or validate.NO_RESOURCES.reservations,
        ),
        restart_policy=replace(
            restart,
            delay=validate.RESTART_POLICY.delay if restart.delay is None else restart.delay,
            max_attempts=restart.max_attempts or 0,
        ),
        placement=template.placement or validate.NO_PLACEMENT,
    )
    if is_job(spec):
        return replace(spec, task_template=template)
    return replace(
        spec,
        task_template=template,
        update_config=_with_monitor(spec.update_config),
        rollback_config=_with_monitor(spec.rollback_config),
    )


def _with_monitor(config: wire.UpdateConfig | None) -> wire.UpdateConfig:
    config = config or updates.DEFAULT
    return msgspec.structs.replace(config, monitor=config.monitor or updates.DEFAULT.monitor)


# --- writing --------------------------------------------------------------------------------------


async def create(context: Context, call: Call) -> bytes:
    spec = body(call, ServiceSpec)
    async with _alone(context, spec):
        return await _create(context, call, spec)


def _alone(context: Context, spec: ServiceSpec) -> contextlib.AbstractAsyncContextManager[None]:
    """`alone` if a port must be chosen for the service."""
    endpoint = spec.endpoint_spec
    if endpoint is None or all(port.published_port for port in endpoint.ports):
        return contextlib.nullcontext()
    return alone(context)


async def _create(context: Context, call: Call, spec: ServiceSpec) -> bytes:
    store = context.store
    if not spec.name:
        spec = msgspec.structs.replace(spec, name=_free_name(store))
    spec = _resolved(store, validate.service_spec(spec), call)
    _check_name(store, spec.name)
    key, now = new_id(), context.clock.now()
    try:
        published, of_ports, compares = ports.published(store, key, spec)
    except ports.Taken as taken:
        raise Conflict(taken.message) from None
    changes: list[Change] = [
        Put(SERVICES, key, ServiceRecord(created=now, updated=now, spec=spec, ports=published)),
        Put(CLAIMS, name_claim("service", spec.name), Claim(key)),
    ]
    if header := call.query.get("registry_auth"):
        changes.append(Put(SERVICE_AUTH, key, ServiceAuth(header)))
    changes += of_ports
    compares.append(Compare(CLAIMS, name_claim("service", spec.name)))
    _refer(store, key, spec, changes, compares)
    await store.commit(changes, compares)
    return encode(wire.ServiceCreated(id=key))


async def update(context: Context, call: Call) -> bytes:
    """Replace the spec, or put the previous one back. A new version of the spec makes the status of
    the update before it void, so that an update that is paused goes on.
    """
    spec = body(call, ServiceSpec)
    async with _alone(context, spec):
        return await _update(context, call, spec)


async def _update(context: Context, call: Call, spec: ServiceSpec) -> bytes:
    store, now = context.store, context.clock.now()
    entry = find_service(store, call.name)
    record = entry.record
    rollback = call.query.get("rollback") or ""
    if rollback not in ("", "none", "previous"):
        raise validate.refuse("rollback", rollback, "previous is expected")
    spec = validate.service_spec(spec)
    check_version(call, "service", entry)
    back = rollback == "previous"
    if back:
        if record.previous is None:
            raise InvalidParameter(f"rollback: service {record.spec.name} does not have a previous spec")
        spec = record.previous
    else:
        spec = _resolved(store, spec, call)
        _check_unchanged(record.spec, spec, networks=call.query.get("network_changes", True))
    try:
        published, of_ports, compares = ports.published(store, entry.key, spec, ports.of(record))
    except ports.Taken as taken:
        raise Precondition(taken.message) from None
    auth = store.get(SERVICE_AUTH, entry.key)
    changed = msgspec.structs.replace(
        record,
        updated=now,
        spec=spec,
        previous=record.spec,
        version=record.version + 1,
        iteration=record.iteration + is_job(spec),
        rollback=back,
        ports=published,
    )
    changes: list[Change] = [Put(SERVICES, entry.key, changed), *of_ports]
    renewed = _auth(call, auth.record if auth is not None else ServiceAuth(""), back)
    if renewed != (auth.record if auth is not None else ServiceAuth("")):
        changes.append(Put(SERVICE_AUTH, entry.key, renewed))
    compares += [
        Compare(SERVICES, entry.key, entry.revision),
        Compare(SERVICE_AUTH, entry.key, auth.revision if auth is not None else 0),
    ]
    _refer(store, entry.key, spec, changes, compares)
    await store.commit(changes, compares)
    return encode(wire.ServiceUpdated())


async def remove(context: Context, call: Call) -> bytes:
    """The leader ends its tasks."""
    entry = find_service(context.store, call.name)
    await context.store.commit(
        [
            Delete(SERVICES, entry.key),
            Delete(SERVICE_STATUS, entry.key),
            Delete(SERVICE_AUTH, entry.key),
            Delete(CLAIMS, name_claim("service", entry.record.spec.name)),
            *ports.released(ports.of(entry.record)),
        ],
        [Compare(SERVICES, entry.key, entry.revision)],
    )
    return b""


def _auth(call: Call, auth: ServiceAuth, back: bool) -> ServiceAuth:
    """The credentials after an update: of the header, of the spec before, or the same."""
    of = call.query.get("registry_auth_from") or ""
    if of not in ("", "spec", "previous-spec"):
        raise validate.refuse("registryAuthFrom", of, "spec or previous-spec is expected")
    if back:
        return ServiceAuth(auth.previous, auth.header)
    header = call.query.get("registry_auth") or ""
    if header:
        return ServiceAuth(header, auth.header)
    return ServiceAuth(auth.previous if of == "previous-spec" else auth.header, auth.header)


def _free_name(store: Store) -> str:
    for attempt in range(_TRIES):
        name = names.random_name(attempt)
        if store.get(CLAIMS, name_claim("service", name)) is None:
            return name
    return new_id()


def _check_name(store: Store, name: str) -> None:
    if store.get(CLAIMS, name_claim("service", name)) is not None:
        raise Conflict(f"name conflicts with an existing object: service {name} already exists")


def _check_unchanged(old: ServiceSpec, new: ServiceSpec, *, networks: bool) -> None:
    """What an update cannot change. `networks`: it can change these."""
    if old.name != new.name:
        raise Precondition(f"renaming services is not supported: {old.name!r} cannot become {new.name!r}")
    if mode_of(old) != mode_of(new):
        raise Precondition(f"service mode change is not allowed: {mode_of(old)} cannot become {mode_of(new)}")
    if not networks and old.task_template.networks != new.task_template.networks:
        raise Precondition(f"changing network in service is not supported: service {old.name}")


# --- references -----------------------------------------------------------------------------------


def _resolved(store: Store, spec: ServiceSpec, call: Call) -> ServiceSpec:
    """With networks of the swarm by their ids, each known to be one that services may use."""
    allowed = bool(call.query.get("node_local_networks"))
    local = call.query.get("local_networks") or ()
    networks = [
        msgspec.structs.replace(network, target=_target(store, network.target, allowed, local))
        for network in spec.task_template.networks
    ]
    targets = [network.target for network in networks]
    if len(set(targets)) < len(targets):
        given = [network.target for network in spec.task_template.networks]
        raise validate.refuse("TaskTemplate.Networks", given, "duplicate network")
    return msgspec.structs.replace(spec, task_template=msgspec.structs.replace(spec.task_template, networks=networks))


def _target(store: Store, target: str, allowed: bool, local: Iterable[str]) -> str:
    """The id of a network of the swarm, or the name of one that each node has."""
    if target in PREDEFINED_NAMES and allowed:
        return target
    refusal = Forbidden(
        f"the network {target} is not eligible for docker services: "
        "only networks scoped to the swarm can be used, such as those of the overlay driver"
    )
    if target in PREDEFINED_NAMES:
        raise refusal
    try:
        entry = find_network(store, target)
    except NotFound:
        if target in local or target == INGRESS:
            raise refusal from None
        raise
    if entry.record.ingress:
        raise refusal
    return entry.key


def _refer(store: Store, service: str, spec: ServiceSpec, changes: list[Change], compares: list[Compare]) -> None:
    """Check that the secrets, configs and networks of the spec exist. The transaction fails if one
    of them is removed meanwhile; and as it writes a claim for each, so does a removal that has not
    seen it.
    """
    container = spec.task_template.container_spec or ContainerSpec()
    secrets = [(one.secret_id, one.secret_name) for one in container.secrets]
    configs = [(one.config_id, one.config_name) for one in container.configs]
    sorts: tuple[tuple[Kind[Any], str, list[tuple[str, str]]], ...] = (
        (SECRETS, "secret", secrets),
        (CONFIGS, "config", configs),
    )
    for kind, what, references in sorts:
        missing = []
        for key, name in references:
            entry = store.get(kind, key)
            if entry is None or entry.record.spec.name != name:
                missing.append(name)
                continue
            changes.append(Put(CLAIMS, use_claim(key), Claim(service)))
            compares.append(Compare(kind, key, entry.created, by_creation=True))
        if missing:
            raise InvalidParameter(f"{what}{'s' if len(missing) > 1 else ''} not found: {', '.join(missing)}")
    of_networks, compared = refer(store, service, spec)
    changes += of_networks
    compares += compared
