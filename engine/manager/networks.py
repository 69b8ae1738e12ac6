"""The networks of a swarm: what a new one is made of, which subnet and VNI it gets, and the network
`ingress`, which every swarm begins with.

Subnets are chosen out of the cache. The transaction compares `POOLS_CLAIM`, which every creation
and removal writes, so two managers never give the same one. The claim's holder is the VNI that was
given last: a VNI is not given again before all others, as nodes may still have the device of a
network that was removed.

Threads: the event loop's.
Raises:  InvalidParameter, Forbidden that name the field and its value.
Not here: the verbs (`control/networks.py`), addresses (`addresses.py`).
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable, Iterator, Mapping
from ipaddress import IPv4Address, IPv4Network, ip_network

import msgspec

from engine.common import network_rules
from engine.common.network_rules import OVERLAY, PREDEFINED_NAMES
from engine.errors import Forbidden, InvalidParameter, NotFound, ServerError, Unimplemented
from engine.manager.control import validate
from engine.manager.control.context import Precondition, find
from engine.manager.loops import Acting
from engine.manager.records import (
    ATTACHMENTS,
    CLAIMS,
    CLUSTER,
    NETWORKS,
    NODE_DATA,
    POOLS_CLAIM,
    SERVICES,
    Claim,
    Cluster,
    NetworkRecord,
    Subnet,
    name_claim,
    new_id,
    use_claim,
)
from engine.manager.store import Change, Compare, Entry, Event, Fenced, Put, Stale, Store
from engine.swarm_session.clock import Clock
from engine.wire.networks import IPAMConfig, NetworkCreate
from engine.wire.services import ServiceSpec

INGRESS = "ingress"
INGRESS_SUBNET = IPv4Network("10.255.0.0/16")
INGRESS_VNI = 4096
LAST_VNI = (1 << 24) - 1
DEFAULT_POOL = IPv4Network("10.0.0.0/8")
DEFAULT_SIZE = 20
"""Prefix length of subnets of the default pool: a /24 is too small for larger services."""
_SIZE_OF_CLIENTS = 24
"""What clients send when their user has set nothing."""

_VNI = "com.docker.network.driver.overlay.vxlanid_list"
_ENCRYPTED = "encrypted"
_LARGEST, _SMALLEST = 8, 29
"""Prefix lengths of a subnet."""


def pools(cluster: Cluster) -> tuple[list[IPv4Network], int]:
    """What new networks take their subnets from, and the prefix length of these."""
    if cluster.address_pool:
        return [IPv4Network(text, strict=False) for text in cluster.address_pool], cluster.subnet_size
    size = cluster.subnet_size
    return [DEFAULT_POOL], DEFAULT_SIZE if size == _SIZE_OF_CLIENTS else size


# --- reading --------------------------------------------------------------------------------------


def find_network(store: Store, text: str) -> Entry[NetworkRecord]:
    return find(store, NETWORKS, "network", text, lambda name: named(store, name))


def named(store: Store, name: str) -> list[str]:
    """Ids of the networks with this name: one or none."""
    claim = store.record(CLAIMS, name_claim("network", name))
    return [] if claim is None else [claim.holder]


def ingress(store: Store) -> Entry[NetworkRecord] | None:
    """The network that published ports are balanced on; None if an operator has removed it."""
    for entry in store.all(NETWORKS).values():
        if entry.record.ingress:
            return entry
    return None


def prefix_of(record: NetworkRecord, address: str) -> int:
    """The prefix length of the subnet that the address is of."""
    if len(record.subnets) > 1:
        for subnet in record.subnets:
            if IPv4Address(address) in IPv4Network(subnet.subnet):
                return int(subnet.subnet.partition("/")[2])
    return int(record.subnets[0].subnet.partition("/")[2])


def needs_ingress(spec: ServiceSpec) -> bool:
    """True if the service has a published port of mode ingress."""
    endpoint = spec.endpoint_spec
    return endpoint is not None and any(port.publish_mode == "ingress" for port in endpoint.ports)


def refer(store: Store, service: str, spec: ServiceSpec) -> tuple[list[Change], list[Compare]]:
    """What is written and compared with a service that has this spec, so that no network that it
    needs is removed meanwhile, and a removal that has not seen it fails.

    Raises NotFound, Precondition if a network of the spec is gone already.
    """
    changes: list[Change] = []
    compares: list[Compare] = []
    for key in _needed(store, spec):
        entry = store.get(NETWORKS, key)
        if entry is None:  # of a spec that a rollback puts back
            raise NotFound(f"network {key} not found")
        changes.append(Put(CLAIMS, use_claim(key), Claim(service)))
        compares.append(Compare(NETWORKS, key, entry.created, by_creation=True))
    return changes, compares


def _needed(store: Store, spec: ServiceSpec) -> Iterator[str]:
    for network in spec.task_template.networks:
        if network.target not in PREDEFINED_NAMES:
            yield network.target
    if needs_ingress(spec):
        of_ports = ingress(store)
        if of_ports is None:
            raise Precondition("service needs ingress network, but no ingress network is present")
        yield of_ports.key


def used_by(store: Store, key: str) -> Iterator[str]:
    """The services and containers that use a network, as messages name them."""
    entry = store.get(NETWORKS, key)
    of_ports = entry is not None and entry.record.ingress
    for service in store.all(SERVICES).values():
        spec = service.record.spec
        if any(one.target == key for one in spec.task_template.networks) or (of_ports and needs_ingress(spec)):
            yield f"service {spec.name}"
    for attachment in store.all(ATTACHMENTS).values():
        if attachment.record.network == key:
            yield f"container {attachment.record.name or attachment.record.container}"


# --- a new network --------------------------------------------------------------------------------


def new(store: Store, body: NetworkCreate, now: int) -> tuple[NetworkRecord, list[Change], list[Compare]]:
    """The record of the body, and what is written and compared with it."""
    record = _checked(body, now)
    if record.encrypted and not any("esp" in node.record.features for node in store.all(NODE_DATA).values()):
        raise InvalidParameter(
            f"network {record.name}: option {_ENCRYPTED}: no node of the swarm has ESP (CONFIG_INET_ESP) in its kernel"
        )
    claim = store.get(CLAIMS, POOLS_CLAIM)
    vni, last = _vni(store, body, claim.record.holder if claim is not None else "")
    record = msgspec.structs.replace(record, subnets=_subnets(store, record), vni=vni)
    return (
        record,
        [Put(CLAIMS, POOLS_CLAIM, Claim(last))],
        [Compare(CLAIMS, POOLS_CLAIM, 0 if claim is None else claim.revision)],
    )


def _checked(body: NetworkCreate, now: int) -> NetworkRecord:
    """The record without a VNI, with the subnets that were given."""
    name = validate.object_name("network", network_rules.checked_name(body.name))
    where = f"network {name}"
    _check_kind(body, where)
    options = network_rules.own_options(body.options)
    network_rules.mtu(options, where)
    for field, flag in (("EnableIPv6", body.enable_ipv6), ("EnableIPv4", body.enable_ipv4)):
        option = f"enable_ip{field[-2:].lower()}"
        required = field == "EnableIPv4"
        value = (
            flag
            if isinstance(flag, bool)
            else network_rules.boolean(options.get(option), required, f"{where}: {option}")
        )
        if value != required:
            raise InvalidParameter(
                f"{where}: {field}: {str(value).lower()}: networks of the driver overlay have IPv4 alone"
            )
    asked = body.options.get(_ENCRYPTED)
    encrypted = asked is not None and network_rules.boolean(asked, True, f"{where}: option {_ENCRYPTED}")
    return NetworkRecord(
        created=now,
        updated=now,
        name=name,
        subnets=tuple(_given(name, body.ipam.config)),
        vni=0,
        labels=body.labels,
        options=body.options,
        ipam_options=body.ipam.options or {},
        internal=body.internal,
        attachable=body.attachable,
        ingress=body.ingress,
        encrypted=encrypted,
        secret=secrets.token_bytes(32) if encrypted else b"",
    )


def _check_kind(body: NetworkCreate, where: str) -> None:
    """What a network of the swarm cannot be."""
    if body.driver != OVERLAY:
        raise InvalidParameter(f"{where}: Driver: {body.driver[:100]!r}: networks of a swarm have the driver overlay")
    if body.scope not in ("", "swarm", "global"):
        raise InvalidParameter(
            f"{where}: Scope: {body.scope[:100]!r}: networks of the driver overlay have the scope swarm"
        )
    if body.config_only or body.config_from.network:
        raise Unimplemented(
            f"{where}: ConfigFrom: networks of the driver overlay with the configuration of another network are not "
            "supported by this version"
        )
    if body.ipam.driver not in ("", "default"):
        raise InvalidParameter(f"{where}: IPAM.Driver: {body.ipam.driver[:100]!r}: plugin not found")
    if body.ingress:
        for field, given in (("Attachable", body.attachable), ("Internal", body.internal)):
            if given:
                raise InvalidParameter(f"{where}: {field}: ingress network cannot be {field.lower()}")
    if "" in body.labels:
        raise InvalidParameter(f"{where}: Labels: a label needs a key")


def _given(name: str, configs: Iterable[IPAMConfig]) -> Iterator[Subnet]:
    """The pools of a body. Empty ones are left out: the swarm chooses a subnet if none is given."""
    earlier: list[IPv4Network] = []
    for config in configs:
        pool = network_rules.checked_pool(name, config)
        if not pool.subnet:
            continue
        subnet = ip_network(pool.subnet)
        where = f"network {name}: subnet {subnet}"
        if not isinstance(subnet, IPv4Network):
            raise InvalidParameter(f"{where}: networks of the driver overlay have IPv4 alone")
        if not _LARGEST <= subnet.prefixlen <= _SMALLEST:
            raise InvalidParameter(f"{where}: a prefix length from {_LARGEST} to {_SMALLEST} is expected")
        if any(subnet.overlaps(other) for other in earlier):
            raise InvalidParameter(f"{where}: it overlaps another subnet of the network")
        earlier.append(subnet)
        yield Subnet(pool.subnet, "") if network_rules.is_size(subnet) else _with_gateway(name, pool)


def _with_gateway(name: str, pool: IPAMConfig) -> Subnet:
    made = network_rules.with_gateway(name, pool)
    return Subnet(made.subnet, made.gateway, made.ip_range, network_rules.excluded(made))


def _subnets(store: Store, record: NetworkRecord) -> tuple[Subnet, ...]:
    """Those that were given, if no other network has them; else a free one of the pools, also for
    one of which only the size is given.
    """
    others = [
        (ip_network(subnet.subnet), other.record.name)
        for other in store.all(NETWORKS).values()
        for subnet in other.record.subnets
    ]
    for subnet in record.subnets:
        for other, name in others:
            if other.overlaps(ip_network(subnet.subnet)):
                raise Forbidden(
                    f"network {record.name}: subnet {subnet.subnet}: Pool overlaps with other one on this address "
                    f"space: {other} of network {name}"
                )
    given = [IPv4Network(subnet.subnet) for subnet in record.subnets]
    if given and not any(map(network_rules.is_size, given)):
        return record.subnets
    cluster = store.record(CLUSTER)
    if cluster is None:
        raise ServerError("the record of the swarm is not loaded yet")
    taken = [network_rules.span(other) for other, _ in others]
    taken += [network_rules.span(subnet) for subnet in (*_of_nodes(store), *given)]
    if not given:
        return (_free(record.name, cluster, taken),)
    subnets = []
    for subnet, asked in zip(record.subnets, given, strict=True):
        chosen = _free(record.name, cluster, taken, asked.prefixlen) if network_rules.is_size(asked) else subnet
        taken.append(network_rules.span(IPv4Network(chosen.subnet)))
        subnets.append(chosen)
    return tuple(subnets)


def _free(name: str, cluster: Cluster, taken: list[tuple[int, int]], prefix: int = 0) -> Subnet:
    """`prefix`: 0 for the size that the swarm's pools have."""
    of, size = pools(cluster)
    size = prefix or size
    if not cluster.address_pool:
        taken.append(network_rules.span(INGRESS_SUBNET))
    found = network_rules.free_subnet(taken, of, size)
    if found is None:
        raise Forbidden(
            f"network {name}: could not find an available, non-overlapping IPv4 address pool: no /{size} of "
            f"{', '.join(map(str, of))} is free"
        )
    return _with_gateway(name, IPAMConfig(subnet=str(found)))


def _of_nodes(store: Store) -> Iterator[IPv4Network]:
    """The local subnets of all nodes."""
    for node in store.all(NODE_DATA).values():
        yield from _subnets_of(node.record.subnets)


def _subnets_of(texts: Iterable[str]) -> Iterator[IPv4Network]:
    for text in texts:
        with contextlib.suppress(ValueError):
            yield IPv4Network(text, strict=False)


def _vni(store: Store, body: NetworkCreate, last: str) -> tuple[int, str]:
    """The VNI that the body names, else the one after that which was chosen last; and the one that
    is chosen last now.
    """
    taken = {network.record.vni for network in store.all(NETWORKS).values()}
    given = body.options.get(_VNI)
    if given:
        if not (given.isascii() and given.isdigit() and len(given) < 9 and 0 < int(given) <= LAST_VNI):
            raise InvalidParameter(
                f"network {body.name}: option {_VNI}: {given[:100]!r}: one number from 1 to {LAST_VNI} is expected"
            )
        if int(given) in taken:
            raise Forbidden(f"network {body.name}: option {_VNI}: {given}: another network of the swarm has it")
        return int(given), last
    number = int(last) if last.isascii() and last.isdigit() else INGRESS_VNI
    while True:
        number = number + 1 if INGRESS_VNI <= number < LAST_VNI else INGRESS_VNI + 1
        if number not in taken:
            return number, str(number)


# --- the network ingress --------------------------------------------------------------------------


def founding(cluster: Cluster, now: int, local: Iterable[str] = ()) -> list[Change]:
    """The network `ingress`, and the claims that come with it. `local`: subnets of nodes, which it
    keeps away from.
    """
    taken = [network_rules.span(subnet) for subnet in _subnets_of(local)]
    if cluster.address_pool:
        subnet = _free(INGRESS, cluster, taken)
    else:
        # 10.255.0.0/16, else the next one below it
        last_first = [*DEFAULT_POOL.subnets(new_prefix=INGRESS_SUBNET.prefixlen)][::-1]
        chosen = network_rules.free_subnet(taken, last_first) or INGRESS_SUBNET
        subnet = Subnet(str(chosen), str(chosen[1]))
    key = new_id()
    record = NetworkRecord(created=now, updated=now, name=INGRESS, subnets=(subnet,), vni=INGRESS_VNI, ingress=True)
    return [
        Put(NETWORKS, key, record),
        Put(CLAIMS, name_claim("network", INGRESS), Claim(key)),
        Put(CLAIMS, POOLS_CLAIM, Claim(str(INGRESS_VNI))),
    ]


class IngressLoop:
    """Gives a swarm of an earlier version its network `ingress`. One whose operator has removed it
    has the claim of the pools, and gets none.
    """

    name = "ingress"

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._due = False

    def changed(self, event: Event) -> None:
        pass

    def take_over(self) -> None:
        self._due = True

    def due(self) -> float | None:
        return 0 if self._due else None

    async def step(self, acting: Acting) -> None:
        cluster = self._store.record(CLUSTER)
        if cluster is not None and self._store.get(CLAIMS, POOLS_CLAIM) is None:
            changes = founding(cluster, self._clock.now(), map(str, _of_nodes(self._store)))
            try:
                await acting.commit(changes, [Compare(CLAIMS, POOLS_CLAIM)])
            except Fenced:
                raise
            except Stale:  # another manager has just created a network
                return
        self._due = False


# --- documents ------------------------------------------------------------------------------------


def options(record: NetworkRecord) -> Mapping[str, str]:
    """The driver's options with what the swarm has chosen."""
    return record.options | {_VNI: str(record.vni)}
