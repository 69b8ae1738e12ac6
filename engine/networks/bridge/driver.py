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
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from ipaddress import IPv4Interface, IPv6Interface, ip_address, ip_network

import msgspec

from engine.common.network_rules import Pool, Subnet, span
from engine.errors import EngineError, Forbidden, ServerError, words
from engine.networks import endpoints, host, sandboxes
from engine.networks.bridge import trunks
from engine.networks.bridge.default import DEFAULT_MTU, DefaultNetwork
from engine.networks.bridge.trunks import Trunks
from engine.networks.driver import Gateways, SubnetContested
from engine.networks.endpoints import Network, Sandbox, with_prefix
from engine.networks.filter import Filter
from engine.networks.ipam import BRIDGE_POOLS, choose
from engine.networks.network import BRIDGE
from engine.networks.publishing import bridges_call_netfilter
from engine.networks.sandboxes import BridgeStock, Interface, ReadySandbox
from engine.system import netfilter
from engine.system.netlink import rtnl
from engine.system.netlink.codec import Request
from engine.system.netlink.rtnl import Link, RouteSocket
from engine.system.user_namespaces import IdMap
from engine.wire.containers import EndpointSettings

_log = logging.getLogger(__name__)

_LINK_LOCAL = IPv6Interface("fe80::1/64")
"""Docker's address, so that gateways look the same from every network."""

Interfaces = Iterable[IPv4Interface | IPv6Interface]


class BridgeDriver:
    """One engine's bridges."""

    routes = True

    def __init__(
        self,
        links: RouteSocket,
        table: Filter,
        alias: str,
        default: DefaultNetwork,
        pools: Sequence[Pool],
        subnet6: Callable[[Network], Subnet],
        forward: Callable[..., None],
        empty: Callable[[], ReadySandbox] | None = None,
        ids: IdMap | None = None,
    ) -> None:
        """`alias` marks bridges of user-defined networks. The default bridge gets one of the pools
        and `subnet6`, unless `default` says otherwise. `forward` is `host.forward`, if the engine
        may switch forwarding on. `empty` gives sandboxes without a link, for endpoints on trunks;
        None: there are none. `ids`: see `namespaces.new_network`.
        """
        self.trunks = Trunks(links, alias)
        self._empty = empty
        self._ids = ids
        self._links = links
        self._filter = table
        self._alias = alias
        self._default = default
        self._pools = pools
        self._subnet6 = subnet6
        self._forward = forward
        self._putting_back = threading.Lock()
        self._stock: BridgeStock | None = None

    def open_stock(self, default: Network | None) -> None:
        """From now on keep sandboxes ready, on the default bridge. Without one, each is made when
        it is needed.
        """
        self._stock = BridgeStock(self._links, (lambda: self.port(default)) if default is not None else None, self._ids)

    def close(self) -> None:
        """Release the stock. Bridges stay."""
        if self._stock is not None:
            self._stock.close()

    # --- networks ---------------------------------------------------------------------------------

    def links(self, network: Network) -> Sequence[str]:
        return [*(() if network.record.name == BRIDGE else (network.bridge,)), *self.trunks.ports(network)]

    def made(self, network: Network) -> bool:
        """True if the engine made its bridge, as far as is known."""
        return network.link is not None and network.link.alias == self._alias_of(network)

    def _alias_of(self, network: Network) -> str:
        return host.ALIAS if network.record.name == BRIDGE else self._alias

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
                self._forward(self._links, ipv6=True)
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

    def restore(self, network: Network) -> None:
        if network.record.name == BRIDGE:
            self._restore_default(network)
        else:
            gateways, mtu = network.own_addresses, network.options.mtu
            network.link, _ = open_user(self._links, network.bridge, self._alias, gateways, mtu)
        network.adopted = not self.made(network)

    def _restore_default(self, network: Network) -> None:
        default, existed = self._default, self._keep_default(network)
        configured, mtu = default.own.get(4), default.options.mtu or DEFAULT_MTU
        link, interface = open_default(self._links, network.bridge, default.wanted(4), self._pools, mtu=mtu)
        if configured is not None and configured.network != interface.network:
            _log.warning(
                "bridge %s keeps its subnet %s, not %s, as it is in use or the host's",
                network.bridge,
                interface.network,
                configured,
            )
        own: dict[int, IPv4Interface | IPv6Interface] = {4: interface}
        lent: tuple[IPv4Interface | IPv6Interface, ...] = ()
        try:
            if default.ipv6:
                own[6] = default.wanted(6) or first_host(self._subnet6(network))
            network.record = default.record(network.record, own)
            if default.ipv6:
                lent = add_addresses(self._links, link, host.ALIAS, [own[6]])
        except BaseException:
            if not existed:
                self._links.outcomes([rtnl.delete_link(link.name)])
            raise
        network.record = msgspec.structs.replace(network.record, lent=tuple(map(str, lent)))
        network.link, network.options, network.routers = link, default.options, default.gateways
        network.fill()

    def _keep_default(self, network: Network) -> bool:
        """True if there is a default bridge. One of a daemon before is deleted if it has other
        addresses than the configuration now says, and no container.
        """
        bridge = self._links.link(network.bridge)
        if bridge is None or bridge.alias != host.ALIAS or not self._differs(bridge, network):
            return bridge is not None
        if any(link.master == bridge.ifindex for link in self._links.links()):
            return True
        _log.info("bridge %s is made again, with other addresses", network.bridge)
        self._links.apply(rtnl.delete_link(network.bridge))
        return False

    def _differs(self, bridge: Link, network: Network) -> bool:
        default = self._default
        fourth = [each.interface for each in self._links.addresses(bridge.ifindex)]
        wanted = default.wanted(4)
        if wanted is not None and fourth and wanted not in fourth:
            return True
        spans = {(low, high) for low, high, index in self._links.address_spans(6) if index == bridge.ifindex}
        subnets = {span(_LINK_LOCAL.network)}
        if default.ipv6:
            given = default.wanted(6)
            subnets.add(span(given.network if given is not None else self._subnet6(network)))
        return bool(spans) and not spans <= subnets

    def unmake(self, network: Network) -> None:
        self.trunks.remove(network)
        try:
            remove(self._links, network.bridge, self._alias_of(network), network.lent)
        except OSError as error:
            _log.warning("bridge %s: %s", network.bridge, words(error))
        if netfilter.available():
            try:
                self._filter.remove_network(network.bridge)
            except netfilter.NetfilterError as error:
                _log.warning("bridge %s: removing its rules: %s", network.bridge, error)

    def slow_to_unmake(self, network: Network) -> bool:
        return not network.record.lent

    # --- endpoints --------------------------------------------------------------------------------

    def new_sandbox(self, network: Network, interface: Interface, gateways: Gateways) -> tuple[int, str]:
        assert self._stock is not None
        bridge = self.port(network)
        sandbox = self._sandbox(network, bridge, interface)
        try:
            sandbox.configure(self._with_neighbours(network, bridge, interface), gateways)
        except BaseException:
            sandbox.close()
            raise
        self._stock.later(_learned(bridge, interface))
        return sandbox.detach(), sandbox.endpoint_id

    def _sandbox(self, network: Network, bridge: Link, interface: Interface) -> ReadySandbox:
        """A namespace with a link to the bridge, by a port of its own or over a trunk."""
        assert self._stock is not None
        shared = self._shares(network, interface)
        sandbox = shared() if shared is not None else self._stock.take(bridge, interface.mtu)
        try:
            if shared is None:
                self._isolate(network, sandbox.endpoint_id)
            else:
                self._add_leaf(network, bridge, sandbox.descriptor, sandboxes.INSIDE, interface)
                sandbox.prepare()
        except BaseException:
            sandbox.close()
            raise
        return sandbox

    def plug(self, network: Network, namespace: int, name: str, interface: Interface) -> str:
        assert self._stock is not None
        bridge = self.port(network)
        endpoint_id = self._plug(network, bridge, namespace, name, self._with_neighbours(network, bridge, interface))
        self._stock.later(_learned(bridge, interface))
        return endpoint_id

    def _plug(self, network: Network, bridge: Link, namespace: int, name: str, interface: Interface) -> str:
        """As `_sandbox`, for a namespace in use."""
        if self._shares(network, interface) is None:
            endpoint_id = sandboxes.plug(self._links, namespace, bridge, name, interface)
            try:
                self._isolate(network, endpoint_id)
            except BaseException:
                sandboxes.unplug(self._links, endpoint_id)
                raise
            return endpoint_id
        self._add_leaf(network, bridge, namespace, name, interface)
        try:
            sandboxes.finish(namespace, name, interface)
        except BaseException:
            sandboxes.remove(namespace, name)
            raise
        return secrets.token_hex(32)

    def unplug(self, network: Network, namespace: int, settings: EndpointSettings) -> None:
        sandboxes.unplug(self._links, settings.endpoint_id)
        if namespace >= 0 and self.trunks.ports(network):
            sandboxes.remove_by_mac(namespace, settings.mac_address)
        self._forget(network, settings)

    def released(self, network: Network, settings: EndpointSettings) -> None:
        if self._stock is not None:
            self._stock.released(settings.endpoint_id)
            self._forget(network, settings)

    def _with_neighbours(self, network: Network, bridge: Link, interface: Interface) -> Interface:
        """The interface, which knows its gateways if the engine made the bridge."""
        versions = {each.version for each in interface.addresses}
        gateways = network.own_addresses if self.made(network) else ()
        neighbours = ((each.ip, bridge.address) for each in gateways if each.version in versions)
        return interface._replace(neighbours=tuple(neighbours))

    def _forget(self, network: Network, settings: EndpointSettings) -> None:
        """Undo `_learned`, before another endpoint has the addresses."""
        if self._stock is not None and network.link is not None:
            addresses = endpoints.interface(network, settings).addresses
            self._stock.later(rtnl.delete_neighbour(network.link.ifindex, each.ip) for each in addresses)

    def forget_ended(self, networks: Iterable[Network]) -> None:
        """Let the host forget the addresses of endpoints that have ended without a daemon."""
        bridges, present = set(), set()
        for network in networks:
            if network.link is not None:
                index = network.link.ifindex
                bridges.add(index)
                present |= {
                    (index, address.ip)
                    for _, settings in _present(network)
                    for address in endpoints.interface(network, settings).addresses
                }
        ended = [each for each in self._links.learned() if each[0] in bridges and each not in present]
        self._links.outcomes(rtnl.delete_neighbour(*each) for each in ended)

    def _isolate(self, network: Network, endpoint_id: str) -> None:
        """Without icc the bridge itself isolates its ports, unless netfilter sees the frames that
        it forwards.
        """
        if not network.options.icc and not bridges_call_netfilter():
            self._links.apply(rtnl.change_port(sandboxes.host_end(endpoint_id), isolated=True))

    def reflect(self, endpoint_id: str) -> None:
        """Let the bridge send frames back through the port that they came from. For a trunk it
        always does.
        """
        failure = self._links.outcomes([rtnl.change_port(sandboxes.host_end(endpoint_id), hairpin=True)])[0]
        if failure is not None and failure.errno != errno.ENODEV:
            raise failure

    # --- trunks -----------------------------------------------------------------------------------

    def _shares(self, network: Network, interface: Interface) -> Callable[[], ReadySandbox] | None:
        """Where a new endpoint gets its namespace if it shares a port of the bridge with others;
        None if it has one of its own.
        """
        present = [*network.sandboxes.values()]
        if len(present) <= trunks.PORTS:
            return None
        # Without icc always: it could change how its macvlan treats others.
        reserved = not network.options.icc or sum(each.changes_links for each in present) <= trunks.OWN_PORTS
        return None if interface.own_port and reserved else self._empty

    def _add_leaf(self, network: Network, bridge: Link, namespace: int, name: str, interface: Interface) -> None:
        """Make an endpoint's link over its trunk, in the namespace with this descriptor."""
        number = trunks.number_of(interface.addresses[0])
        lower = self.trunks.lower(network, number)
        if lower is None:
            with self._putting_back:
                if number in self.trunks.missing(network):
                    self.replug(network, bridge)
                lower = self.trunks.lower(network, number)
                if lower is None:
                    lower = self.trunks.make(network, bridge, number)
                    self.trunks.finish(network, number)
        self._links.apply(trunks.leaf(lower, network, namespace, name, interface))

    # --- bridges that other programs delete -------------------------------------------------------

    def port(self, network: Network) -> Link:
        """The bridge for new endpoints, made again with all its endpoints if it was deleted.

        Raises OSError, ServerError, Forbidden when that fails.
        """
        # A loop: a bridge deleted while it is made again is reported under an index that is not
        # stored yet.
        while not host.is_there(network.link):
            with self._putting_back:
                if not host.is_there(network.link):
                    if network.record.name == BRIDGE:
                        own = network.gateways[4]
                        assert isinstance(own, IPv4Interface)
                        link, _ = open_default(self._links, network.bridge, own, mtu=network.options.mtu or DEFAULT_MTU)
                        if 6 in network.gateways:
                            add_addresses(self._links, link, host.ALIAS, [network.gateways[6]])
                    else:
                        gateways, mtu = network.own_addresses, network.options.mtu
                        link, _ = open_user(self._links, network.bridge, self._alias, gateways, mtu)
                    self._filter.returned(network.bridge)
                    self.replug(network, link)
                    network.link = link  # last: other threads use it from now on
                    _log.warning(
                        "network %s: its bridge %s was missing and has been restored",
                        network.record.name,
                        network.bridge,
                    )
        assert network.link is not None
        return network.link

    def mend(self, network: Network) -> None:
        """Make the bridge and the trunks again that another program has deleted, with all their
        endpoints.
        """
        bridge = self.port(network)
        with self._putting_back:
            if self.trunks.missing(network):
                self.replug(network, bridge)

    def replug(self, network: Network, link: Link, *, restarted: bool = False) -> None:
        """Attach every endpoint of the network to this bridge, and make lost trunks again with the
        endpoints over them. `restarted`: the daemon has just started, and does not know which
        trunks there were.

        Skips those whose container has ended.
        """
        present = _present(network)
        ids = [settings.endpoint_id for _, settings in present]
        for _, settings in present:
            # A MAC that was changed inside is known already, unless this is a new bridge.
            self._links.outcomes(_learned(link, endpoints.interface(network, settings), replace=False))
        # those of a former version of the engine may still accept router advertisements
        for each in ids:
            host.ignore_router_advertisements(sandboxes.host_end(each))
        self.trunks.attach(network, link)
        changes = (rtnl.change_link(sandboxes.host_end(each), master=link.ifindex) for each in ids)
        shared = []
        for plan, failure in zip(present, self._links.outcomes(changes), strict=True):
            try:
                if failure is not None:
                    raise failure
                self._isolate(network, plan[1].endpoint_id)
                if bridges_call_netfilter():
                    self.reflect(plan[1].endpoint_id)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    shared.append(plan)
                else:
                    _log.warning("network %s: %s", network.record.name, words(error))
        self._replace_trunks(network, link, shared, restarted)

    def _replace_trunks(
        self, network: Network, bridge: Link, shared: Iterable[tuple[Sandbox, EndpointSettings]], restarted: bool
    ) -> None:
        """Make the trunks of these endpoints again that are lost, with all links over them."""
        missing = self.trunks.missing(network)
        lost: dict[int, list[tuple[Sandbox, EndpointSettings]]] = {}
        for sandbox, settings in shared:
            number = trunks.number_of(endpoints.interface(network, settings).addresses[0])
            if number in missing or (restarted and self.trunks.lower(network, number) is None):
                lost.setdefault(number, []).append((sandbox, settings))
        for number, plans in lost.items():
            where = f"network {network.record.name}, trunk {number}"
            try:
                lower = self.trunks.make(network, bridge, number)
            except OSError as error:
                _log.warning("%s: %s", where, words(error))
                continue
            for sandbox, settings in plans:
                try:
                    self._replace_leaf(network, bridge, lower, sandbox.namespace, settings)
                except (OSError, EngineError) as error:
                    _log.warning("%s, container %s: %s", where, sandbox.container_id, words(error))
            self.trunks.finish(network, number)
            _log.warning("%s was missing and has been restored", where)

    def _replace_leaf(
        self, network: Network, bridge: Link, lower: Link, namespace: int, settings: EndpointSettings
    ) -> None:
        if namespace < 0:  # its process has ended
            return
        interface = self._with_neighbours(network, bridge, endpoints.interface(network, settings))
        present = sandboxes.macs(namespace)
        if interface.mac not in present.values():
            name = interface.name or sandboxes.next_name(network.options.prefix, present)
            self._links.apply(trunks.leaf(lower, network, namespace, name, interface))
            sandboxes.finish(namespace, name, interface)
            gateways = [ip_address(text) for text in (settings.gateway, settings.ipv6_gateway) if text]
            sandboxes.route_if_none(namespace, gateways)


def _present(network: Network) -> list[tuple[Sandbox, EndpointSettings]]:
    """Its containers that run, with their endpoints."""
    each = ((sandbox, sandbox.endpoints.get(network.record.id)) for sandbox in [*network.sandboxes.values()])
    return [(sandbox, settings) for sandbox, settings in each if settings is not None]


def _learned(bridge: Link, interface: Interface, *, replace: bool = True) -> list[Request]:
    """What lets the host know an endpoint's addresses. If one fails the host asks for them."""
    return [
        rtnl.learn_neighbour(bridge.ifindex, each.ip, interface.mac, replace=replace) for each in interface.addresses
    ]


# --- links ----------------------------------------------------------------------------------------


def open_default(
    links: RouteSocket,
    name: str,
    configured: IPv4Interface | IPv6Interface | None,
    pools: Sequence[Pool] = BRIDGE_POOLS,
    *,
    mtu: int = DEFAULT_MTU,
) -> tuple[Link, IPv4Interface]:
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
        interface = own[0]
    elif isinstance(configured, IPv4Interface):
        interface = configured
    else:
        subnet = choose(pools, host.occupied(links))
        if subnet is None:
            raise ServerError(
                f"bridge {name}: all predefined address pools have been fully subnetted, or overlap a subnet of this "
                "host: set --bridge-subnet, or other pools by --default-address-pool"
            )
        interface = IPv4Interface((subnet[1], subnet.prefixlen))
    if not own:
        links.apply(rtnl.add_address(bridge.ifindex, interface))
    if bridge.alias == host.ALIAS:
        host.ignore_router_advertisements(name)
        # Ports change an MTU that was not set, or only at the creation.
        mtu = mtu if mtu != bridge.mtu else 0
    else:
        mtu = 0  # its owner's choice
    links.apply(rtnl.change_link(name, up=True, without_ipv6_address=host.has_ipv6(mtu or bridge.mtu), mtu=mtu))
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
        added = add_addresses(links, bridge, alias, interfaces)
    except BaseException:
        if made:
            links.outcomes([rtnl.delete_link(name)])
        raise
    return bridge, added


def add_addresses(
    links: RouteSocket, bridge: Link, alias: str, interfaces: Interfaces
) -> tuple[IPv4Interface | IPv6Interface, ...]:
    """Give a bridge these addresses, and bring it up. Returns those that were added to a bridge
    which the engine did not make. A failure takes them away again.
    """
    # An address that takes IPv6 packets needs a link-local one beside it.
    wanted = [*interfaces]
    if any(interface.version == 6 for interface in wanted):
        host.switch_on_ipv6(bridge.name)
        wanted.append(_LINK_LOCAL)
    changes = [rtnl.change_link(bridge.name, up=True, without_ipv6_address=host.has_ipv6(bridge.mtu))]
    changes += [rtnl.add_address(bridge.ifindex, interface) for interface in wanted]
    outcomes = links.outcomes(changes)
    added = tuple(each for each, outcome in zip(wanted, outcomes[1:], strict=True) if outcome is None)
    for outcome in outcomes:
        if outcome is not None and outcome.errno != errno.EEXIST:
            links.outcomes([rtnl.delete_address(bridge.ifindex, each) for each in added])
            raise outcome
    return () if bridge.alias == alias else added


def first_host(subnet: Subnet) -> IPv4Interface | IPv6Interface:
    """The first host's address, with the subnet's prefix."""
    return with_prefix(subnet[1], subnet.prefixlen)


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
