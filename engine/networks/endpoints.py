"""The current networks and sandboxes, and the settings of an endpoint: addresses, gateways, the
target of published ports.

A sandbox is the network namespace of a container that runs, with an endpoint on each of its
networks. Everything here is derived from records and pools and is never stored.

Pure, but for a namespace that is opened when it is needed, in any thread: no events. All else runs
on the event loop alone, so the pools need no lock. Not here: links (`driver.py`), the tables of
networks and sandboxes (`networks.py`, `attachments.py`). Raises: the errors of `network.py` and
`ipam.py`; addresses are given back first.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import IPv4Address, IPv4Interface, IPv6Address, IPv6Interface, ip_address, ip_interface, ip_network
from typing import Protocol

import msgspec

from engine.common import network_rules
from engine.common.network_rules import Address
from engine.errors import Forbidden, words
from engine.networks import requested, sandboxes
from engine.networks.filter import BridgeRules
from engine.networks.ipam import AddressPool, mac_address
from engine.networks.network import IPVLAN, NetworkRecord, Options, Overlay, pools
from engine.networks.ports import Published
from engine.networks.publishing import Request, Target
from engine.networks.sandboxes import Interface
from engine.system import namespaces
from engine.system.netlink.rtnl import Link
from engine.wire.containers import EndpointSettings

_log = logging.getLogger(__name__)

Assigned = Mapping[int, Address]
"""Addresses of an endpoint by IP version, chosen outside of the engine's own pools."""

_opening = threading.Lock()
"""Held while the namespace of a restored container is opened, also in threads that repair links, so
that none is opened twice.
"""
_NOT_ASSIGNED: Assigned = {}
_NO_PORTS = Request()


class Process(Protocol):
    """A container's process, held by its pidfd."""

    pid: int
    pidfd: int


class Sandbox:
    """The network namespace of a container that runs, with its endpoints."""

    __slots__ = (
        *("_namespace", "changes_links", "container_id", "endpoints", "hostname", "lock", "name"),
        *("ipv6", "opening", "process", "request", "servers", "target"),
    )

    def __init__(
        self,
        container_id: str,
        name: str,
        hostname: str = "",
        servers: Sequence[str] = (),
        request: Request = _NO_PORTS,
        *,
        ipv6: bool = True,
        changes_links: bool = False,
    ) -> None:
        self.container_id = container_id
        self.name = name
        self.hostname = hostname
        self.servers = servers
        """The container's own name servers, for names that are not a container's; empty for the
        host's.
        """
        self.request = request
        """The ports that the container publishes."""
        self.ipv6 = ipv6
        """False if the container's sysctls switch IPv6 off."""
        self.changes_links = changes_links
        """The container may put bridges or machines behind its link (CAP_NET_ADMIN), so that frames
        for other MACs than its own have to reach it.
        """
        self._namespace = -1
        self.process: Process | None = None
        """Of a container that an earlier daemon has put on a network with links: it has the
        namespace."""
        self.endpoints: dict[str, EndpointSettings] = {}
        """By network id, in the order of joining."""
        self.target: Target | None = None
        """The endpoint that they lead to at present."""
        self.opening: asyncio.Future[tuple[Published, ...]] | None = None
        """During a start: the ports, once they are open."""
        self.lock = asyncio.Lock()
        """Held while endpoints are added or removed."""

    @property
    def namespace(self) -> int:
        """Descriptor, owned by the sandbox; -1 when there are no links in it (NetworkMode host and
        none). That of a restored container is opened when it is needed; -1 when its process has
        ended: its exit will undo all this.
        """
        if self._namespace >= 0 or self.process is None:
            return self._namespace
        with _opening:
            process = self.process
            if self._namespace < 0 and process is not None and process.pidfd >= 0:
                try:
                    self._namespace = namespaces.of_process(process.pid, process.pidfd, "net")
                except OSError as error:
                    _log.info("container %s: opening its network namespace: %s", self.container_id, words(error))
            return self._namespace

    @namespace.setter
    def namespace(self, descriptor: int) -> None:
        self._namespace = descriptor

    def close(self) -> None:
        """Release the namespace."""
        with _opening:
            descriptor, self._namespace, self.process = self._namespace, -1, None
        sandboxes.close(descriptor)


_NAMED = 10
"""Endpoints that an error names."""


class Network:
    """A network as it is now."""

    __slots__ = (
        *("adopted", "gateways", "generation", "link", "more", "options", "overlay", "pools", "record", "routers"),
        *("routes", "sandboxes"),
    )

    def __init__(self, record: NetworkRecord, options: Options, *, routes: bool) -> None:
        self.record = record
        self.options = options
        self.routes = routes
        """The host is its router, so published ports lead to its endpoints."""
        self.link: Link | None = None
        """Its bridge, if its driver makes one."""
        self.overlay: Overlay | None = None
        """Given if it spans the nodes of a swarm (`overlay.py`)."""
        self.adopted = False
        """The bridge was there before the network and belongs to the host's owner."""
        self.pools: dict[int, AddressPool] = {}
        """By IP version. Empty for networks without links (host, none)."""
        self.gateways: dict[int, IPv4Interface | IPv6Interface] = {}
        """By IP version, with the subnet's prefix."""
        self.routers: Mapping[int, Address] = {}
        """Gateways of the endpoints that are not addresses of the bridge, by IP version."""
        self.more: list[tuple[AddressPool, IPv4Interface | IPv6Interface]] = []
        """Further subnets of an overlay, with their gateways."""
        self.sandboxes: dict[str, Sandbox] = {}
        """By container id; endpoints that are being made count."""
        self.generation = 0
        """Grows with every visible change."""

    @property
    def bridge(self) -> str:
        """Name of its link."""
        return self.options.bridge or f"br-{self.record.id[:12]}"

    @property
    def linked(self) -> bool:
        """True if its endpoints have links."""
        return bool(self.pools) or self.record.remote

    @property
    def closed(self) -> bool:
        """True if it has no route out."""
        return self.record.internal or self.options.dummy

    @property
    def rules(self) -> BridgeRules:
        return BridgeRules(
            bridge=self.bridge,
            subnets=tuple(pool.subnet for pool in self.pools.values()),
            internal=self.record.internal,
            icc=self.options.icc,
            masquerade=self.options.masquerade,
            unprotected=self.options.unprotected,
            adopted=self.adopted,
        )

    @property
    def own_addresses(self) -> list[IPv4Interface | IPv6Interface]:
        """The addresses of its bridge."""
        return [each for version, each in self.gateways.items() if version not in self.options.bare]

    @property
    def lent(self) -> list[IPv4Interface | IPv6Interface]:
        """The engine's addresses on a bridge that it did not make, to be removed later."""
        return [ip_interface(text) for text in self.record.lent]

    def check_empty(self) -> None:
        """Raises Forbidden while containers are on it."""
        if self.sandboxes:
            there = list(self.sandboxes.values())
            names = [f'name:"{each.name}" id:"{each.container_id[:12]}"' for each in there[:_NAMED]]
            more = ["..."] if len(there) > _NAMED else []
            raise Forbidden(
                f"error while removing network: network {self.record.name} has active endpoints "
                f"({', '.join(names + more)})"
            )

    def fill(self) -> None:
        """Derive pools and gateways from the record."""
        self.pools.clear()
        self.gateways.clear()
        self.more.clear()
        for subnet, gateway, config in pools(self.record):
            excluded = [gateway, *(ip_address(text) for text in network_rules.excluded(config).values())]
            given_from = ip_network(config.ip_range) if config.ip_range else None
            pool = AddressPool(self.record.name, subnet, excluded, given_from)
            interface = with_prefix(gateway, subnet.prefixlen)
            if subnet.version in self.pools:
                self.more.append((pool, interface))
            else:
                self.pools[subnet.version], self.gateways[subnet.version] = pool, interface

    @property
    def subnets(self) -> list[tuple[AddressPool, IPv4Interface | IPv6Interface]]:
        """All pools with their gateways."""
        return [*((pool, self.gateways[version]) for version, pool in self.pools.items()), *self.more]

    def place(self, address: Address) -> tuple[AddressPool, IPv4Interface | IPv6Interface]:
        """Pool and gateway of the subnet that the address is in; of the first one of its IP version
        if it is in none.
        """
        found = next((each for each in self.more if address in each[0].subnet), None)
        return found or (self.pools[address.version], self.gateways[address.version])


# --- addresses ------------------------------------------------------------------------------------


def check_usable(network: Network) -> None:
    """Raises Forbidden for a network that only has configuration for others."""
    if network.record.config_only:
        raise Forbidden(f"network {network.record.name}: containers cannot be on a configuration network")


def allocate(
    network: Network,
    wanted: EndpointSettings,
    mac: str = "",
    assigned: Assigned = _NOT_ASSIGNED,
    *,
    ipv6: bool = True,
) -> EndpointSettings:
    """Take an endpoint's addresses from the pools; returns its settings, the endpoint id still
    missing. Without `ipv6`, or if its own sysctls switch that off, it has no IPv6 address.

    `assigned` are addresses that the network's own allocator has chosen, such as that of a cluster.
    They may lie outside the pools; one inside is claimed there, so that it is not given to another
    endpoint.
    """
    record = network.record
    check_usable(network)
    static = {**requested.wanted_addresses(record, wanted), **assigned}
    requested.link_local_addresses(record.name, wanted)
    ipv6 = requested.has_ipv6(requested.driver_options(record.name, wanted.driver_opts)) and ipv6
    mac = requested.mac_address(mac, f"network {record.name}")
    taken: dict[int, Address] = {}
    try:
        for version, pool in network.pools.items():
            if version == 6 and not ipv6 and not record.remote:
                continue
            if version not in static:
                taken[version] = pool.take()
                continue
            own, _ = network.place(static[version])
            if version not in assigned or static[version] in own.subnet:
                own.claim(static[version])
            taken[version] = static[version]
    except BaseException:
        for address in taken.values():
            network.place(address)[0].give(address)
        raise
    settings = intent(wanted, record)
    if not network.pools:
        return msgspec.structs.replace(settings, mac_address=mac) if record.remote else settings
    network.generation += 1
    ingress = network.overlay is not None and network.overlay.ingress
    places = {version: network.place(address) for version, address in taken.items()}
    # a plugin names gateways itself when the endpoint joins
    gateways = {} if network.closed or network.options.layer3 or ingress or record.remote else places
    if not mac and not record.remote:
        mac = mac_address(taken.get(4) or taken.get(6) or IPv4Address(secrets.randbits(32)))
    return msgspec.structs.replace(
        settings,
        gateway=str(network.routers.get(4, gateways[4][1].ip)) if 4 in gateways else "",
        ip_address=str(taken.get(4, "")),
        ip_prefix_len=places[4][0].subnet.prefixlen if 4 in taken else 0,
        ipv6_gateway=str(network.routers.get(6, gateways[6][1].ip)) if 6 in gateways else "",
        global_ipv6_address=str(taken.get(6, "")),
        global_ipv6_prefix_len=places[6][0].subnet.prefixlen if 6 in taken else 0,
        mac_address="" if record.driver == IPVLAN else mac,
    )


def release(network: Network, settings: EndpointSettings) -> None:
    """Give an endpoint's addresses back to the pools."""
    network.generation += 1
    for address in addresses(settings):
        if address.version in network.pools:
            network.place(address)[0].give(address)


def addresses(settings: EndpointSettings) -> list[Address]:
    """The endpoint's addresses, without link-local ones."""
    return [ip_address(text) for text in (settings.ip_address, settings.global_ipv6_address) if text]


def interface(network: Network, settings: EndpointSettings) -> Interface:
    """MAC, addresses and MTU of the endpoint's link inside the sandbox."""
    inner: list[IPv4Interface | IPv6Interface] = []
    if settings.ip_address:
        inner.append(with_prefix(ip_address(settings.ip_address), settings.ip_prefix_len))
    if settings.global_ipv6_address:
        inner.append(with_prefix(ip_address(settings.global_ipv6_address), settings.global_ipv6_prefix_len))
    asked = requested.driver_options(network.record.name, settings.driver_opts)
    for address in requested.link_local_addresses(network.record.name, settings):
        if address.version == 4 or requested.has_ipv6(asked):
            inner.append(with_prefix(address, 16 if address.version == 4 else 64))
    return Interface(settings.mac_address, tuple(inner), network.options.mtu, *asked)


def with_prefix(address: Address, prefix: int) -> IPv4Interface | IPv6Interface:
    """The address as an interface of a subnet with that prefix length."""
    return IPv4Interface((address, prefix)) if isinstance(address, IPv4Address) else IPv6Interface((address, prefix))


# --- settings -------------------------------------------------------------------------------------


def intent(wanted: EndpointSettings, record: NetworkRecord) -> EndpointSettings:
    """The configured part of an endpoint on this network."""
    return msgspec.structs.replace(asked(wanted), network_id=record.id)


def asked(wanted: EndpointSettings) -> EndpointSettings:
    """The fields that a client may set, except the MAC address."""
    return EndpointSettings(
        ipam_config=wanted.ipam_config,
        links=wanted.links,
        aliases=wanted.aliases,
        driver_opts=wanted.driver_opts,
        gw_priority=wanted.gw_priority,
    )


def configured(settings: EndpointSettings) -> EndpointSettings:
    """The settings that remain of an endpoint when its container has ended: the configuration and
    the names, without addresses.
    """
    return msgspec.structs.replace(asked(settings), network_id=settings.network_id, dns_names=settings.dns_names)


def with_names(settings: EndpointSettings, container_id: str, name: str, hostname: str) -> EndpointSettings:
    """The settings with the names of this container's endpoint on a user-defined network, the
    container's own name first.
    """
    names = dict.fromkeys((name, *(settings.aliases or ()), container_id[:12], hostname))
    return msgspec.structs.replace(settings, dns_names=[each for each in names if each])


# --- among several endpoints ----------------------------------------------------------------------


def ranked(endpoints: Iterable[EndpointSettings], networks: Mapping[str, Network]) -> list[EndpointSettings]:
    """Docker's order for default routes: the highest GwPriority first, then endpoints with gateways
    of both IP versions, then by network name.

    `networks` is by id.
    """

    def rank(settings: EndpointSettings) -> tuple[int, bool, str]:
        network = networks.get(settings.network_id)
        name = network.record.name if network is not None else ""
        return -settings.gw_priority, not (settings.gateway and settings.ipv6_gateway), name

    return sorted(endpoints, key=rank)


def default_gateways(endpoints: Iterable[EndpointSettings], networks: Mapping[str, Network]) -> list[Address]:
    """The gateways of a sandbox's default routes, at most one for each IP version."""
    order = ranked(endpoints, networks)
    chosen = (
        next((each.gateway for each in order if each.gateway), ""),
        next((each.ipv6_gateway for each in order if each.ipv6_gateway), ""),
    )
    return [ip_address(text) for text in chosen if text]


def outlet(endpoints: Iterable[EndpointSettings], networks: Mapping[str, Network]) -> EndpointSettings | None:
    """The endpoint of the default route (Docker's gateway endpoint), if there is one."""
    order = ranked(endpoints, networks)
    chosen = next((each for each in order if each.gateway), None)
    return chosen or next((each for each in order if each.ipv6_gateway), None)


def target(endpoints: Iterable[EndpointSettings], networks: Mapping[str, Network]) -> Target | None:
    """The endpoint that published ports lead to: the one of the default route, if the host is the
    router there.
    """
    chosen = outlet(endpoints, networks)
    network = networks.get(chosen.network_id) if chosen is not None else None
    if chosen is None or network is None or not network.routes:
        return None
    fourth = IPv4Address(chosen.ip_address) if chosen.ip_address else None
    sixth = IPv6Address(chosen.global_ipv6_address) if chosen.global_ipv6_address else None
    overlay = network.record.id if network.overlay is not None else ""
    return Target(chosen.endpoint_id, (fourth, sixth), network.options.host_binding, overlay)
