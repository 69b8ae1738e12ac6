"""Networks of the swarm: create, list, inspect, remove, prune.

A network's record is complete at its creation and never changes. Its name is claimed as those of
services are. A network that a service or a container uses cannot be removed: whatever refers to one
writes its `use_claim`, which the removal compares.

Not here: how subnets are chosen (`manager/networks.py`), networks of one engine
(`engine/networks`).
"""

from __future__ import annotations

from ipaddress import IPv4Network
from typing import Any, cast

import msgspec

from engine.common import network_rules, times
from engine.common.network_rules import OVERLAY
from engine.common.pruning import Selection
from engine.errors import Conflict, EngineError, Forbidden, NotFound
from engine.manager import networks, ports
from engine.manager import tasks as rules
from engine.manager.addresses import number_of
from engine.manager.control import tasks
from engine.manager.control.context import Context, Precondition, alone, body, encode, in_slices
from engine.manager.networks import find_network
from engine.manager.records import (
    ATTACHMENTS,
    CLAIMS,
    NETWORKS,
    NODE_DATA,
    NODES,
    POOLS_CLAIM,
    SERVICE_STATUS,
    SERVICES,
    TASKS,
    Claim,
    NetworkRecord,
    ServiceRecord,
    Task,
    name_claim,
    new_id,
    use_claim,
)
from engine.manager.store import Compare, Delete, Entry, Put, Stale, Store
from engine.swarm_session.messages import Call
from engine.wire import networks as wire
from engine.wire.networks import NetworkCreate

_SCOPE = "swarm"


# --- reading --------------------------------------------------------------------------------------


class _Listed(msgspec.Struct, frozen=True):
    """A network as the filters of lists see it."""

    id: str
    name: str
    labels: dict[str, str]
    driver: str = OVERLAY
    scope: str = _SCOPE
    predefined: bool = False


async def list_all(context: Context, call: Call) -> bytes:
    store = context.store
    found: dict[str, list[str]] = call.query.get("filters") or {}
    in_use = await _in_use(store) if "dangling" in found else set()
    shown = []
    for key, entry in sorted(store.all(NETWORKS).items(), key=lambda item: (item[1].record.created, item[0])):
        record = entry.record
        used = record.ingress or key in in_use
        if network_rules.matches(_Listed(key, record.name, record.labels), found, used):
            shown.append(wire.Network(**_fields(key, record)))
    return encode(shown)


async def _in_use(store: Store) -> set[str]:
    """The networks that services and containers name, by their ids."""
    found: set[str] = set()
    async for service in in_slices([*store.all(SERVICES).values()]):
        found.update(one.target for one in service.record.spec.task_template.networks)
    async for attachment in in_slices([*store.all(ATTACHMENTS).values()]):
        found.add(attachment.record.network)
    return found


async def inspect(context: Context, call: Call) -> bytes:
    """`verbose` shows the services, `status` the numbers of addresses."""
    store = context.store
    entry = find_network(store, call.name)
    verbose, status = bool(call.query.get("verbose")), bool(call.query.get("status"))
    found = await _tasks(store, entry) if verbose or status else []
    return encode(
        wire.NetworkInspect(
            **_fields(entry.key, entry.record),
            containers={},
            peers=_peers(context, entry),
            services=await _services(store, entry, found) if verbose else msgspec.UNSET,
            status=await _status(store, entry, found) if status else msgspec.UNSET,
        )
    )


def _fields(key: str, record: NetworkRecord) -> dict[str, Any]:
    config = [
        wire.IPAMConfig(
            subnet=subnet.subnet,
            ip_range=subnet.range,
            gateway=subnet.gateway,
            auxiliary_addresses=subnet.reserved,
        )
        for subnet in record.subnets
    ]
    return {
        "name": record.name,
        "id": key,
        "created": times.rfc3339(record.created),
        "scope": _SCOPE,
        "driver": OVERLAY,
        "enable_ipv4": True,
        "enable_ipv6": False,
        "ipam": wire.IPAM(options=record.ipam_options or None, config=config),
        "internal": record.internal,
        "attachable": record.attachable,
        "ingress": record.ingress,
        "config_from": wire.ConfigReference(),
        "config_only": False,
        "options": dict(networks.options(record)),
        "labels": record.labels,
    }


_OnNetwork = tuple[int, str, Task, str]
"""Slot and id of a task, which order them; the task, and its address."""


async def _tasks(store: Store, network: Entry[NetworkRecord]) -> list[_OnNetwork]:
    """The tasks that are on the network and have not ended."""
    found = []
    services = [key for key, entry in store.all(SERVICES).items() if _uses(entry.record, network)]
    async for key in in_slices(key for service in services for key in [*store.tasks_of(service)]):
        task = store.record(TASKS, key)
        if task is not None and task.node and not rules.observed(store, key, task).ended:
            found += [(task.slot, key, task, on.address) for on in task.networks if on.network == network.key]
    return found


def _uses(service: ServiceRecord, network: Entry[NetworkRecord]) -> bool:
    if network.record.ingress:
        return networks.needs_ingress(service.spec)
    # the previous spec: of tasks that an update has not replaced yet
    specs = (service.spec,) if service.previous is None else (service.spec, service.previous)
    return any(one.target == network.key for spec in specs for one in spec.task_template.networks)


def _peers(context: Context, network: Entry[NetworkRecord]) -> list[wire.NetworkPeer]:
    """The nodes with endpoints on the network; all nodes for the network ingress."""
    store = context.store
    nodes = store.all(NODES) if network.record.ingress else context.peers(network.key)
    return [
        wire.NetworkPeer(name=node[:12], ip=address)
        for node in sorted(nodes)
        if (address := _data_address(store, node))
    ]


def _data_address(store: Store, node: str) -> str:
    data = store.record(NODE_DATA, node)
    return "" if data is None else data.data_address or data.address


async def _services(
    store: Store, network: Entry[NetworkRecord], found: list[_OnNetwork]
) -> dict[str, wire.NetworkService]:
    """What `verbose` shows of the services that are on the network."""
    by_service: dict[str, list[bytes]] = {}
    async for _, key, task, address in in_slices(sorted(found)):
        shown_task = wire.NetworkTask(
            name=tasks.task_name(store, key, task),
            endpoint_id=key,
            endpoint_ip=address,
            info={"Host IP": _data_address(store, task.node)},
        )
        by_service.setdefault(task.service, []).append(encode(shown_task))
    shown = {}
    async for key, entry in in_slices([*store.all(SERVICES).items()]):
        if not _uses(entry.record, network):
            continue
        made = store.record(SERVICE_STATUS, key)
        addresses = made.endpoint.virtual_ips if made is not None and made.endpoint is not None else ()
        shown[entry.record.spec.name] = wire.NetworkService(
            vip=next((one.addr.partition("/")[0] for one in addresses if one.network_id == network.key), ""),
            ports=[
                f"Target: {port.target_port}, Publish: {port.published_port}"
                for port in ports.of(entry.record)
                if port.publish_mode == ports.INGRESS
            ],
            tasks=cast(list[wire.NetworkTask], msgspec.Raw(b"[%b]" % b",".join(by_service.get(key, ())))),
        )
    return shown


async def _status(store: Store, network: Entry[NetworkRecord], found: list[_OnNetwork]) -> wire.NetworkStatus:
    """The numbers of addresses of each subnet: in use or reserved, and those that the swarm may
    give.
    """
    taken = {number_of(address) async for _, _, _, address in in_slices(found)}
    async for service in in_slices([*store.all(SERVICE_STATUS).values()]):
        for one in service.record.endpoint.virtual_ips if service.record.endpoint is not None else ():
            if one.network_id == network.key:
                taken.add(number_of(one.addr.partition("/")[0]))
    async for attachment in in_slices([*store.all(ATTACHMENTS).values()]):
        if attachment.record.network == network.key and attachment.record.address:
            taken.add(number_of(attachment.record.address))
    shown = {}
    for subnet in network.record.subnets:
        whole = IPv4Network(subnet.subnet)
        low, high = network_rules.span(whole)
        used = {number async for number in in_slices(taken) if low < number < high}
        used |= {number_of(text) for text in (subnet.gateway, *subnet.reserved.values())}
        first, last = network_rules.span(IPv4Network(subnet.range) if subnet.range else whole)
        first, last = max(first, low + 1), min(last, high - 1)
        within = [number async for number in in_slices(used) if first <= number <= last]
        free = last - first + 1 - len(within)
        shown[subnet.subnet] = wire.SubnetStatus(ips_in_use=2 + len(used), dynamic_ips_available=max(0, free))
    return wire.NetworkStatus(ipam=wire.IPAMStatus(subnets=shown))


# --- writing --------------------------------------------------------------------------------------


async def create(context: Context, call: Call) -> bytes:
    wanted = body(call, NetworkCreate)
    async with alone(context):
        return await _create(context, wanted)


async def _create(context: Context, wanted: NetworkCreate) -> bytes:
    store = context.store
    claim = name_claim("network", wanted.name)
    if store.get(CLAIMS, claim) is not None:
        raise Conflict(f"network with name {wanted.name} already exists")
    record, changes, compares = networks.new(store, wanted, context.clock.now())
    other = networks.ingress(store) if record.ingress else None
    if other is not None:
        raise Conflict(f"network {record.name}: ingress network ({other.key}) is already present")
    key = new_id()
    await store.commit(
        [Put(NETWORKS, key, record), Put(CLAIMS, claim, Claim(key)), *changes], [Compare(CLAIMS, claim), *compares]
    )
    return encode(wire.NetworkCreated(key, ""))


async def remove(context: Context, call: Call) -> bytes:
    """Its tasks that still end keep their addresses until then."""
    entry = find_network(context.store, call.name)
    if entry.record.ingress and not call.query.get("ingress"):
        raise Forbidden(f"{entry.record.name} is a pre-defined network and cannot be removed")
    async with alone(context):
        await _remove(context, entry)
    return b""


async def _remove(context: Context, entry: Entry[NetworkRecord]) -> None:
    """Raises Precondition while something uses the network, Stale."""
    store = context.store
    use, pools = store.get(CLAIMS, use_claim(entry.key)), store.get(CLAIMS, POOLS_CLAIM)
    name = entry.record.name
    user = next(networks.used_by(store, entry.key), "") or await _running(context, entry.key)
    if user and entry.record.ingress:
        raise Precondition(f"ingress network {name} cannot be removed because {user} depends on it")
    if user:
        raise Precondition(f"network {name} is in use by {user}")
    last = str(networks.INGRESS_VNI) if pools is None else pools.record.holder
    await store.commit(
        [
            Delete(NETWORKS, entry.key),
            Delete(CLAIMS, name_claim("network", name)),
            Delete(CLAIMS, use_claim(entry.key)),
            Put(CLAIMS, POOLS_CLAIM, Claim(last, write=new_id())),
        ],
        [
            Compare(NETWORKS, entry.key, entry.created, by_creation=True),
            Compare(CLAIMS, use_claim(entry.key), 0 if use is None else use.revision),
            Compare(CLAIMS, POOLS_CLAIM, 0 if pools is None else pools.revision),
        ],
    )


async def _running(context: Context, network: str) -> str:
    """A task on the network that is to run on, as an update of its service has not replaced it yet;
    "" if there is none.
    """
    store = context.store
    nodes = [*context.peers(network)]
    async for key in in_slices(key for node in nodes for key in [*store.tasks_on(node)]):
        task = store.record(TASKS, key)
        if (
            task is not None
            and rules.live(task)
            and store.get(SERVICES, task.service) is not None  # else it is about to be stopped
            and any(one.network == network for one in task.networks)
            and not rules.observed(store, key, task).ended
        ):
            return f"task {tasks.task_name(store, key, task) or key}"
    return ""


async def prune(context: Context, call: Call) -> bytes:
    """Remove the networks that nothing uses, as far as the query's selection matches them. Answers
    with their names.
    """
    store = context.store
    gone: list[str] = []
    selection = msgspec.convert(call.query.get("selection") or {}, Selection)
    for _, entry in sorted(store.all(NETWORKS).items()):
        record = entry.record
        if record.ingress or not selection.matches(record.created, record.labels):
            continue
        try:
            await _remove(context, entry)
        except Stale:
            await store.current()
            continue  # it is used now, or another request removes it
        except (Precondition, NotFound):
            continue
        except EngineError:
            if not gone:
                raise
            break
        gone.append(record.name)
    return encode(gone)
