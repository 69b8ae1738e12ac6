"""Published ports of services: which of the mode ingress are free, and their claims.

A port of mode ingress is answered by every node, so one service has it. Its claim,
`port/<protocol>/<port>`, is written with the service. A port of mode host is taken on the nodes of
the service's tasks alone, and several services may ask for it; none may that another service has in
the mode ingress. Each service with such a port writes `use/<protocol>/<port>`, so that a service
which wants it in the mode ingress has seen all of them. That key stays when no service has the port
any more. No service has a port of the swarm itself: a node that starts could serve the published
port before its manager listens on it, and the swarm could not be repaired any more.

Pure, over the store's cache. Raises: `Taken`, which names the port and the service that has it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from msgspec.structs import replace

from engine.manager.member import PEER_PORT_DISTANCE
from engine.manager.records import (
    CLAIMS,
    CLUSTER,
    MANAGERS,
    SERVICES,
    Claim,
    ServiceRecord,
    port_claim,
    use_claim,
)
from engine.manager.store import Change, Compare, Delete, Put, Store
from engine.wire.services import ServiceSpec
from engine.wire.tasks import PortConfig

FIRST, LAST = 30_000, 32_767
"""Ports that are chosen for services that name none."""
INGRESS, HOST = "ingress", "host"


class Taken(Exception):
    """Another service has the port, or none is free. `message`: in Docker's words."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


def of(record: ServiceRecord) -> Iterable[PortConfig]:
    """The ports of a service, also of one that an earlier version wrote."""
    endpoint = record.spec.endpoint_spec
    return record.ports or (endpoint.ports if endpoint is not None else ())


class _InHostMode:
    """The ports of mode host that other services than `service` have. They are looked for when they
    are asked for, and once.
    """

    def __init__(self, store: Store, service: str) -> None:
        self._store = store
        self._service = service

    @functools.cached_property
    def holders(self) -> dict[tuple[str, int], str]:
        """By protocol and port: one of the services."""
        return {
            _key(port): key
            for key, entry in self._store.all(SERVICES).items()
            if key != self._service
            for port in of(entry.record)
            if port.publish_mode == HOST
        }


def published(
    store: Store, service: str, spec: ServiceSpec, before: Iterable[PortConfig] = ()
) -> tuple[tuple[PortConfig, ...], list[Change], list[Compare]]:
    """The ports of the spec with those of mode ingress chosen, and what is written and compared
    with the service. `before`: its ports until now. A port that the spec leaves open stays the one
    that was chosen before.
    """
    endpoint = spec.endpoint_spec
    wanted = endpoint.ports if endpoint is not None else []
    before = tuple(before)
    had = {_key(port): port for port in before if port.publish_mode == INGRESS}
    hosts = _InHostMode(store, service)
    changes: list[Change] = []
    compares: list[Compare] = []
    reserved = _of_swarm(store) if wanted else frozenset()
    for port in wanted:
        if port.published_port:
            if _key(port) in reserved:
                raise Taken(f"port '{port.published_port}' is already in use by the swarm itself")
            _check(store, service, port, hosts, changes, compares)
    own = {_key(port) for port in wanted if port.published_port}
    own |= {_key(port) for port in before if port.publish_mode == HOST}  # its tasks have them yet
    own |= reserved
    kept = dict(had)
    found: list[PortConfig] = []
    for port in wanted:
        if port.publish_mode == INGRESS and not port.published_port:
            number = _choose(store, port, kept, own, hosts, compares)
            found.append(replace(port, published_port=number))
            own.add(_key(found[-1]))
            if _key(found[-1]) not in had:
                changes.append(Put(CLAIMS, port_claim(*_key(found[-1])), Claim(service)))
        else:
            found.append(port)
    ports = tuple(found)
    stays = {_key(port) for port in ports if port.publish_mode == INGRESS}
    changes += [Delete(CLAIMS, port_claim(*key)) for key in had if key not in stays]
    return ports, changes, compares


def released(before: Iterable[PortConfig]) -> list[Change]:
    """What is written when a service with these ports is removed."""
    return [Delete(CLAIMS, port_claim(*_key(port))) for port in before if port.publish_mode == INGRESS]


def _of_swarm(store: Store) -> frozenset[tuple[str, int]]:
    """Where managers and their etcd listen, and where VXLAN packets arrive."""
    cluster = store.record(CLUSTER, "")
    found = set() if cluster is None else {("udp", cluster.data_path_port)}
    for entry in store.all(MANAGERS).values():
        port = int(entry.record.address.rpartition(":")[2])
        found |= {("tcp", port), ("tcp", port + PEER_PORT_DISTANCE)}
    return frozenset(found)


def _key(port: PortConfig) -> tuple[str, int]:
    return port.protocol or "tcp", port.published_port


def _check(
    store: Store, service: str, port: PortConfig, hosts: _InHostMode, changes: list[Change], compares: list[Compare]
) -> None:
    """Claim a port that the spec names."""
    protocol, number = _key(port)
    claim = store.get(CLAIMS, port_claim(protocol, number))
    if claim is not None and claim.record.holder != service:
        raise Taken(_in_use(store, number, claim.record.holder, "an ingress port"))
    revision = 0 if claim is None else claim.revision
    compares.append(Compare(CLAIMS, port_claim(protocol, number), revision))
    use = store.get(CLAIMS, use_claim(f"{protocol}/{number}"))
    if port.publish_mode == HOST:
        changes.append(Put(CLAIMS, use_claim(f"{protocol}/{number}"), Claim(service)))
        return
    if use is not None and (holder := hosts.holders.get((protocol, number))) is not None:
        raise Taken(_in_use(store, number, holder, "a host-published port"))
    compares.append(Compare(CLAIMS, use_claim(f"{protocol}/{number}"), 0 if use is None else use.revision))
    if claim is None:
        changes.append(Put(CLAIMS, port_claim(protocol, number), Claim(service)))


def _in_use(store: Store, number: int, holder: str, how: str) -> str:
    other = store.record(SERVICES, holder)
    name = other.spec.name if other is not None else holder
    return f"port '{number}' is already in use by service '{name}' ({holder}) as {how}"


def _choose(
    store: Store,
    port: PortConfig,
    kept: dict[tuple[str, int], PortConfig],
    own: set[tuple[str, int]],
    hosts: _InHostMode,
    compares: list[Compare],
) -> int:
    """The port that was chosen for it before, else a free one."""
    for key, old in kept.items():
        same = (old.name, old.target_port, old.protocol) == (port.name, port.target_port, port.protocol)
        if same and FIRST <= old.published_port <= LAST and key not in own:
            del kept[key]
            return old.published_port
    protocol = port.protocol or "tcp"
    for number in range(FIRST, LAST + 1):
        if (protocol, number) in own or (protocol, number) in kept:
            continue
        claim = port_claim(protocol, number)
        use = store.get(CLAIMS, use_claim(f"{protocol}/{number}"))
        if store.get(CLAIMS, claim) is None and (use is None or (protocol, number) not in hosts.holders):
            compares.append(Compare(CLAIMS, claim))
            compares.append(Compare(CLAIMS, use_claim(f"{protocol}/{number}"), 0 if use is None else use.revision))
            return number
    raise Taken(f"no {protocol} port from {FIRST} to {LAST} is free for a published port of target {port.target_port}")
