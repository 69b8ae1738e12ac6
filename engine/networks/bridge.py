"""The bridge driver: a Linux bridge per network, a veth pair per endpoint, rules for the traffic.

A bridge that the engine made carries its alias (ifalias) and may be removed by it. One that was
there before keeps its own address, temporarily gets the gateways' addresses, and is not removed. A
bridge that another program deletes is made again with its endpoints: by `repair.py` when the kernel
reports it, or at the latest before the next endpoint is attached (`port`).

Owns: the stock of ready sandboxes. Threads: any but the event loop's. Locks: `_putting_back`, held
while one bridge is made again; under it the locks of the netlink socket and of `Filter` are taken.
Raises: ServerError and Forbidden that name the bridge, OSError.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from ipaddress import AddressValueError, IPv4Interface, IPv6Interface, NetmaskValueError, ip_network

import msgspec

from engine.errors import Forbidden, InvalidParameter, ServerError
from engine.network_rules import Subnet, free_subnet, span
from engine.networks import host, sandboxes
from engine.networks.driver import Gateways, SubnetContested
from engine.networks.endpoints import Network
from engine.networks.filter import Filter
from engine.networks.ipam import DEFAULT_POOLS, AddressPool
from engine.networks.network import BRIDGE
from engine.networks.publishing import bridges_call_netfilter
from engine.networks.sandboxes import BridgeStock, Interface
from engine.system import netfilter
from engine.system.netlink import rtnl
from engine.system.netlink.rtnl import Link, RouteSocket
from engine.wire.containers import EndpointSettings

_log = logging.getLogger(__name__)

_LINK_LOCAL = IPv6Interface("fe80::1/64")
"""Docker's address, so that gateways look the same from every network."""

Interfaces = Iterable[IPv4Interface | IPv6Interface]


class BridgeDriver:
    """One engine's bridges."""

    routes = True

    def __init__(self, links: RouteSocket, table: Filter, alias: str, configured: IPv4Interface | None) -> None:
        """`alias` marks bridges of user-defined networks, `configured` is the default bridge's
        subnet, if given.
        """
        self._links = links
        self._filter = table
        self._alias = alias
        self._configured = configured
        self._putting_back = threading.Lock()
        self._stock: BridgeStock | None = None

    def open_stock(self, default: Network) -> None:
        """From now on keep sandboxes ready, on the default bridge."""
        self._stock = BridgeStock(self._links, lambda: self.port(default))

    def close(self) -> None:
        """Release the stock. Bridges stay."""
        if self._stock is not None:
            self._stock.close()

    # --- networks ---------------------------------------------------------------------------------

    def links(self, found: Network) -> Sequence[str]:
        return () if found.record.name == BRIDGE else (found.bridge,)

    def made(self, found: Network) -> bool:
        """True if the engine made its bridge, as far as is known."""
        return found.link is not None and found.link.alias == self._alias_of(found)

    def _alias_of(self, found: Network) -> str:
        return host.ALIAS if found.record.name == BRIDGE else self._alias

    def make(self, made: Network) -> None:
        record = made.record
        own = self._links.link(made.bridge)
        for subnet in (ip_network(config.subnet) for config in record.ipam.config if 4 in record.imposed):
            # A subnet within a wider route is fine. The subnet of another link would cut the host
            # off from it.
            if subnet.version == 4 and self._on_other_link(subnet, lambda index: own is None or index != own.ifindex):
                raise Forbidden(
                    f"network {record.name}: subnet {subnet}: Pool overlaps with other one on this address space: "
                    "a link of this host has an address in it"
                )
        made.link, lent = open_user(self._links, made.bridge, self._alias, made.own_addresses, made.options.mtu)
        made.adopted = not self.made(made)
        made.record = msgspec.structs.replace(record, lent=tuple(map(str, lent)))
        try:
            if 6 in made.pools:
                host.forward(self._links, ipv6=True)
            if netfilter.available():
                self._filter.add_network(made.rules)
        except netfilter.NetfilterError as error:
            remove(self._links, made.bridge, self._alias, lent)
            raise ServerError(f"network {record.name}: installing its rules: {error}") from error
        except BaseException:
            remove(self._links, made.bridge, self._alias, lent)
            raise
        if 4 in made.pools and 4 not in record.imposed and self._contested(made):
            self.unmake(made)
            raise SubnetContested

    def _contested(self, made: Network) -> bool:
        """Another engine of this host has the same subnet, on an older link."""
        link = made.link
        assert link is not None
        return self._on_other_link(made.pools[4].subnet, lambda index: index < link.ifindex)

    def _on_other_link(self, subnet: Subnet, which: Callable[[int], bool]) -> bool:
        low, high = span(subnet)
        return any(first <= high and low <= last and which(index) for first, last, index in self._links.address_spans())

    def restore(self, found: Network) -> None:
        if found.record.name == BRIDGE:
            found.link, interface = open_default(self._links, found.bridge, self._configured)
            found.gateways[4] = interface
            found.pools[4] = AddressPool(BRIDGE, interface.network, (interface.ip,))
        else:
            gateways, mtu = found.own_addresses, found.options.mtu
            found.link, _ = open_user(self._links, found.bridge, self._alias, gateways, mtu)
        found.adopted = not self.made(found)

    def unmake(self, found: Network) -> None:
        try:
            remove(self._links, found.bridge, self._alias_of(found), found.lent)
        except OSError as error:
            _log.warning("bridge %s: %s", found.bridge, error)
        if netfilter.available():
            try:
                self._filter.remove_network(found.bridge)
            except netfilter.NetfilterError as error:
                _log.warning("bridge %s: removing its rules: %s", found.bridge, error)

    def slow_to_unmake(self, found: Network) -> bool:
        return not found.record.lent

    # --- endpoints --------------------------------------------------------------------------------

    def new_sandbox(self, found: Network, interface: Interface, gateways: Gateways) -> tuple[int, str]:
        assert self._stock is not None
        sandbox = self._stock.take(self.port(found), interface.mtu)
        try:
            sandbox.configure(interface, gateways)
            self._isolate(found, sandbox.endpoint_id)
        except BaseException:
            sandbox.close()
            raise
        return sandbox.detach(), sandbox.endpoint_id

    def plug(self, found: Network, namespace: int, name: str, interface: Interface) -> str:
        endpoint_id = sandboxes.plug(self._links, namespace, self.port(found), name, interface)
        try:
            self._isolate(found, endpoint_id)
        except BaseException:
            sandboxes.unplug(self._links, endpoint_id)
            raise
        return endpoint_id

    def unplug(self, found: Network, namespace: int, settings: EndpointSettings) -> None:
        sandboxes.unplug(self._links, settings.endpoint_id)

    def released(self, endpoint_id: str) -> None:
        if self._stock is not None:
            self._stock.released(endpoint_id)

    def _isolate(self, found: Network, endpoint_id: str) -> None:
        """Without icc the bridge itself isolates its ports, unless netfilter sees the frames that
        it forwards.
        """
        if not found.options.icc and not bridges_call_netfilter():
            self._links.apply(rtnl.change_port(sandboxes.host_end(endpoint_id), isolated=True))

    def reflect(self, endpoint_id: str) -> None:
        """Let the bridge send frames back through the port that they came from."""
        self._links.apply(rtnl.change_port(sandboxes.host_end(endpoint_id), hairpin=True))

    # --- bridges that other programs delete -------------------------------------------------------

    def port(self, found: Network) -> Link:
        """The bridge for new endpoints, made again with all its endpoints if it was deleted.

        Raises OSError, ServerError, Forbidden when that fails.
        """
        # A loop: a bridge deleted while it is made again is reported under an index that is not
        # stored yet.
        while not host.is_there(found.link):
            with self._putting_back:
                if not host.is_there(found.link):
                    if found.record.name == BRIDGE:
                        own = found.gateways[4]
                        assert isinstance(own, IPv4Interface)
                        link, _ = open_default(self._links, found.bridge, own)
                    else:
                        gateways, mtu = found.own_addresses, found.options.mtu
                        link, _ = open_user(self._links, found.bridge, self._alias, gateways, mtu)
                    self._filter.returned(found.bridge)
                    self.replug(found, link)
                    found.link = link  # last: other threads use it from now on
                    _log.warning(
                        "network %s: its bridge %s was missing and has been restored", found.record.name, found.bridge
                    )
        assert found.link is not None
        return found.link

    def replug(self, found: Network, link: Link) -> None:
        """Attach every endpoint of the network to this bridge.

        Skips those whose container has ended.
        """
        endpoints = [sandbox.endpoints.get(found.record.id) for sandbox in [*found.sandboxes.values()]]
        ids = [settings.endpoint_id for settings in endpoints if settings is not None]
        # those of a former version of the engine may still accept router advertisements
        for each in ids:
            host.ignore_router_advertisements(sandboxes.host_end(each))
        changes = (rtnl.change_link(sandboxes.host_end(each), master=link.ifindex) for each in ids)
        for endpoint_id, failure in zip(ids, self._links.outcomes(changes), strict=True):
            try:
                if failure is not None:
                    raise failure
                self._isolate(found, endpoint_id)
                if bridges_call_netfilter():
                    self.reflect(endpoint_id)
            except OSError as error:
                if error.errno != errno.ENODEV:
                    _log.warning("network %s: %s", found.record.name, error)


# --- links ----------------------------------------------------------------------------------------


def open_default(links: RouteSocket, name: str, configured: IPv4Interface | None) -> tuple[Link, IPv4Interface]:
    """The default bridge and its address: created, or adopted with the address that it has."""
    bridge = links.link(name)
    if bridge is None:
        bridge = _made(links, name, host.ALIAS, 0)
    elif host.unfinished(bridge, host.ALIAS):
        bridge = _marked(links, name, host.ALIAS)
    elif bridge.kind != "bridge":
        raise ServerError(
            f"bridge {name}: a link with that name exists and is not a bridge ({bridge.kind or 'physical'})"
        )
    own = [address.interface for address in links.addresses(bridge.ifindex)]
    if own:
        if configured is not None and configured.network != own[0].network:
            _log.warning(
                "bridge %s keeps its subnet %s, not %s: remove the bridge to change it",
                name,
                own[0].network,
                configured,
            )
        interface = own[0]
    elif configured is not None:
        interface = configured
    else:
        subnet = free_subnet(host.taken(links), DEFAULT_POOLS)
        if subnet is None:
            raise ServerError(
                "no address pool is free: every default pool overlaps a route of this host; give --bridge-subnet"
            )
        interface = IPv4Interface((subnet[1], subnet.prefixlen))
    if not own:
        links.apply(rtnl.add_address(bridge.ifindex, interface))
    if bridge.alias == host.ALIAS:
        host.ignore_router_advertisements(name)
    links.apply(rtnl.change_link(name, up=True, without_ipv6_address=host.has_ipv6(bridge.mtu)))
    return bridge, interface


def open_user(
    links: RouteSocket, name: str, alias: str, interfaces: Interfaces, mtu: int = 0
) -> tuple[Link, tuple[IPv4Interface | IPv6Interface, ...]]:
    """The bridge of a user-defined network with its gateways' addresses: created, or an existing
    one.

    Returns the addresses that were added to a bridge which the engine did not make. A failure
    undoes everything.
    """
    bridge = links.link(name)
    made = bridge is None
    if bridge is None:
        bridge = _made(links, name, alias, mtu)
    elif host.unfinished(bridge, alias):
        bridge = _marked(links, name, alias)
    elif bridge.kind != "bridge":
        raise Forbidden(
            f"bridge {name}: a link with that name exists and is not a bridge ({bridge.kind or 'physical'})"
        )
    added: tuple[IPv4Interface | IPv6Interface, ...] = ()
    try:
        if bridge.alias == alias:
            host.ignore_router_advertisements(name)
        # An address that takes IPv6 packets needs a link-local one beside it.
        wanted = [*interfaces]
        if any(interface.version == 6 for interface in wanted):
            host.switch_on_ipv6(name)
            wanted.append(_LINK_LOCAL)
        changes = [rtnl.change_link(name, up=True, without_ipv6_address=host.has_ipv6(bridge.mtu))]
        changes += [rtnl.add_address(bridge.ifindex, interface) for interface in wanted]
        outcomes = links.outcomes(changes)
        added = tuple(each for each, outcome in zip(wanted, outcomes[1:], strict=True) if outcome is None)
        for outcome in outcomes:
            if outcome is not None and outcome.errno != errno.EEXIST:
                raise outcome
    except BaseException:
        links.outcomes(
            [rtnl.delete_link(name)] if made else [rtnl.delete_address(bridge.ifindex, each) for each in added]
        )
        raise
    return bridge, () if bridge.alias == alias else added


def _made(links: RouteSocket, name: str, alias: str, mtu: int) -> Link:
    links.apply(rtnl.create_bridge(name, mac=host.bridge_address(name, alias), mtu=mtu))
    return _marked(links, name, alias)


def _marked(links: RouteSocket, name: str, alias: str) -> Link:
    try:
        links.apply(rtnl.change_link(name, alias=alias))
        bridge = links.link(name)
    except BaseException:  # without the alias no sweep would find it
        links.outcomes([rtnl.delete_link(name)])
        raise
    if bridge is None:
        raise ServerError(f"bridge {name}: another program has deleted it")
    return bridge


def remove(links: RouteSocket, name: str, alias: str, lent: Interfaces = ()) -> None:
    """Delete the bridge if the engine made it, otherwise remove the engine's addresses from it.

    A missing one is fine.
    """
    bridge = links.link(name)
    if bridge is None:
        return
    own = bridge.alias == alias
    changes = [rtnl.delete_link(name)] if own else [rtnl.delete_address(bridge.ifindex, each) for each in lent]
    for outcome in links.outcomes(changes):
        if outcome is not None and outcome.errno not in (errno.ENODEV, errno.EADDRNOTAVAIL):
            raise outcome


def configured_subnet(text: str) -> IPv4Interface | None:
    """`172.30.0.0/16` (gateway is its first host) or `172.30.0.5/16` (gateway is that address)."""
    if not text:
        return None
    try:
        interface = IPv4Interface(text)
    except (AddressValueError, NetmaskValueError, ValueError) as error:
        raise InvalidParameter(f"bridge subnet {text!r} is not an IPv4 subnet: {error}") from error
    network = interface.network
    if network.prefixlen > 30:
        raise InvalidParameter(f"bridge subnet {text!r} has no room for containers")
    if interface.ip == network.broadcast_address:
        raise InvalidParameter(f"bridge subnet {text!r}: the gateway can't be the broadcast address")
    return IPv4Interface((network[1], network.prefixlen)) if interface.ip == network.network_address else interface
