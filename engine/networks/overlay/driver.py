"""The overlay driver: a network that spans the nodes of a swarm, routed, in a network namespace per
network and node.

```
 container ── eth0 10.0.1.5/24, default and subnet via 10.0.1.1 ──┐
                     namespace: a veth per endpoint, a route each, vxlan0, host0 ── ov-… on the host
 remote 10.0.1.6/32 via the node's own address, onlink, dev vxlan0; per node a neighbour and an
 entry of the VXLAN
```

Nothing is learned and nothing is broadcast: MACs follow from addresses (`ipam.mac_address`), so the
container, the namespace and the VXLAN know every neighbour beforehand. Frames do not cross; packets
do. The VXLAN is made in the namespace of the network, but its UDP packets are the host's. Packets
that leave the network are given an address of the link to the host, so that subnets of networks
never collide with those of the host, and the host masquerades them like those of a bridge
(`filter.py`). An internal network has no link to the host.

A `Space` is the namespace with what is in it. It exists while this process or the monitor, which
keeps the descriptor for the next daemon, holds it (`overlays.py`). With both gone the kernel
removes namespace, VXLAN and links, and nothing is left that the next one would stumble on.

Owns: the spaces. Threads: any but the event loop's; `released` the event loop's. Locks:
`Space.lock` for every change of one; under it the locks of netlink sockets and of `Filter` are
taken. Not here: balancing (`balance.py`), published ports of services (`ingress.py`).
Raises: ServerError that names the network; OSError.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from typing import NamedTuple

from engine.errors import EngineError, ServerError, words
from engine.networks import endpoints, host, sandboxes
from engine.networks.driver import Gateways
from engine.networks.endpoints import Network, Sandbox
from engine.networks.filter import BridgeRules, Filter
from engine.networks.ipam import mac_address
from engine.networks.network import Overlay
from engine.networks.overlay import ingress
from engine.networks.overlay.encryption import Encryption
from engine.networks.overlay.ingress import SINK, UPLINK, VXLAN
from engine.networks.sandboxes import Interface, ReadySandbox
from engine.system import namespaces, netfilter, sysctls
from engine.system.netlink import rtnl, xfrm
from engine.system.netlink.codec import NetlinkError, Request
from engine.system.netlink.nft import NftSocket
from engine.system.netlink.rtnl import Link, RouteSocket
from engine.system.user_namespaces import IdMap
from engine.wire.containers import EndpointSettings

_log = logging.getLogger(__name__)

OVERHEAD = 50
"""Bytes that a VXLAN adds to a packet: Ethernet, IPv4, UDP and its own header."""
ENCRYPTION = 37
"""Bytes that ESP with AES-GCM adds at most, in transport mode."""

_SETTINGS = {
    "ipv4/ip_forward": "1",
    "ipv4/conf/all/rp_filter": "0",
    "ipv4/conf/default/rp_filter": "0",
    "ipv4/conf/all/send_redirects": "0",
    "ipv4/conf/default/send_redirects": "0",
    "ipv4/conf/all/accept_redirects": "0",
    "ipv4/conf/default/accept_redirects": "0",
} | ({"ipv6/conf/all/disable_ipv6": "1"} if host.HAS_IPV6 else {})

_LINK_LOCAL = IPv4Network("169.254.0.0/16")
READY = 2
"""Sandboxes that are kept ready on a network at rest."""
_TABLE = "uplink"
_RULES = f"""
add table inet {_TABLE}
flush table inet {_TABLE}
table inet {_TABLE} {{
    chain postrouting {{
        type nat hook postrouting priority srcnat; policy accept;
        meta nfproto ipv4 oifname "{UPLINK}" masquerade
    }}
}}
"""
_EGRESS = f"""
table netdev probe {{
    chain out {{
        type filter hook egress device "{VXLAN}" priority 0; policy accept;
    }}
}}
"""
_DEFAULT = IPv4Network("0.0.0.0/0")
PATIENCE = 5.0
"""Seconds for which a VXLAN that a namespace on its way out still has is waited for."""


class _Local(NamedTuple):
    """An endpoint on this host."""

    endpoint_id: str
    mac: str


class Space:
    """A network's namespace on this host."""

    def __init__(self, descriptor: int, inside: RouteSocket, disturbances: rtnl.Disturbances) -> None:
        self.descriptor = descriptor
        """Owned by the space."""
        self.inside = inside
        self.disturbances = disturbances
        self.lock = threading.RLock()
        self.vxlan = 0
        """Index of the VXLAN's link; 0: there is none yet."""
        self.uplink = 0
        """Index of the link's end on the host; 0: there is none."""
        self.peers: dict[IPv4Address, IPv4Address] = {}
        """Remote endpoints → the data address of their node."""
        self.nodes: dict[IPv4Address, int] = {}
        """Data addresses with the number of endpoints there."""
        self.known: frozenset[IPv4Address] = frozenset()
        """Data addresses that the VXLAN leads to without an endpoint there, too."""
        self.local: dict[IPv4Address, _Local] = {}
        """Endpoints on this host."""
        self.pair = _LINK_LOCAL
        """The addresses of the link to the host: the host's and its own."""
        self.layout: tuple[bytes, ...] = ()
        """Of the rules for packets to the host, inside."""
        self.rules: BridgeRules | None = None
        """On the host."""
        self.unclaimed: set[IPv4Address] = set()
        """Peers of an earlier daemon that this one has not been told of yet."""
        self.incomplete = False
        """A change of peers or nodes has failed: the kernel may lack any part of it."""
        self.stock: _Stock | None = None
        """Made when the first container starts on the network."""
        self.closed = False

    def close(self) -> None:
        """The namespace goes unless the monitor has its descriptor, too."""
        if not self.closed:
            self.closed = True
            if self.stock is not None:
                self.stock.close()
            self.disturbances.close()
            self.inside.close()
            os.close(self.descriptor)


class _Pair:
    """A veth pair between a network's namespace and that of a sandbox, as `ReadySandbox` has it."""

    __slots__ = ("bridge", "descriptor", "endpoint_id", "index", "inside")

    def __init__(self, descriptor: int, inside: RouteSocket, endpoint_id: str) -> None:
        self.descriptor = descriptor
        self.inside = inside
        self.endpoint_id = endpoint_id
        self.bridge = self.index = 0
        """Indexes of the outer and of the inner end."""

    def make(self, network: Network, space: Space, name: str, mac: str = "") -> None:
        """Both ends are up on return. A failure leaves nothing behind."""
        end = sandboxes.host_end(self.endpoint_id)
        space.inside.apply(
            rtnl.create_veth(end, name, self.descriptor, mtu=network.options.mtu, mac=_outer_mac(network), peer_mac=mac)
        )
        try:
            space.inside.apply(rtnl.change_link(end, up=True))
            self.inside.apply(rtnl.change_link("lo", up=True), rtnl.change_link(name, up=True))
            self.bridge, self.index = _there(space.inside, end).ifindex, _there(self.inside, name).ifindex
        except BaseException:
            space.inside.outcomes([rtnl.delete_link(end)])
            raise


class _Stock(sandboxes.Stock):
    """Ready sandboxes on one network."""

    def __init__(self, links: RouteSocket, network: Network, space: Space, ids: IdMap | None) -> None:
        self._network = network
        self._space = space
        self._ids = ids
        super().__init__(links, READY)

    def fresh(self) -> ReadySandbox:
        ready = sandboxes.bare(0, self._ids)
        try:
            pair = _Pair(ready.descriptor, ready.inside, ready.endpoint_id)
            pair.make(self._network, self._space, sandboxes.INSIDE)
            ready.bridge, ready.index = pair.bridge, pair.index
        except BaseException:
            ready.close()
            raise
        return ready


class OverlayDriver:
    """One engine's overlay networks."""

    routes = True

    def __init__(
        self, links: RouteSocket, table: Filter, alias: str, encryption: Encryption, ids: IdMap | None = None
    ) -> None:
        """`alias` marks links on the host. `ids`: see `namespaces.new_network`."""
        self._ids = ids
        self._encryption = encryption
        self._links = links
        self._filter = table
        self._alias = alias
        self._spaces: dict[str, Space] = {}
        self._led: dict[str, set[IPv4Network]] = {}
        """What the host leads into each network, by its id."""
        self.settled = False
        """All peers of the networks have been set: of one that is adopted later, routes that an
        earlier daemon has made are of no worth.
        """
        self._endpoints: dict[str, tuple[Space, IPv4Address]] = {}
        self._lingering: deque[tuple[Space, str, IPv4Address]] = deque()
        self.lingers: Callable[[], None] = lambda: None
        """Called when `clear` will have work in `LINGER` seconds."""

    def close(self) -> None:
        """Close the descriptors. The namespaces stay for running containers."""
        while self._spaces:
            self._spaces.popitem()[1].close()
        self._encryption.close()

    def space(self, network: Network) -> Space:
        """Raises ServerError unless the network has been made on this host."""
        space = self._spaces.get(network.record.id)
        if space is None:
            raise ServerError(f"network {network.record.name}: it is not on this node any more")
        return space

    def mtu(self, meant: Overlay, kept: int = -1) -> int:
        """The MTU of an overlay whose creator chose none: what its underlay leaves. If this host
        does not have the address, perhaps not yet, that of the VXLAN in the namespace `kept`.

        Raises ServerError if there is none, either.
        """
        index = self._links.owner(meant.local)
        under = next((link for link in self._links.links() if link.ifindex == index), None)
        if under is None and kept >= 0:
            with _inside(kept) as inside:
                vxlan = inside.link(VXLAN)
            if vxlan is not None:
                return vxlan.mtu
        if under is None:
            raise ServerError(f"no link of this host has the data path address {meant.local}")
        return under.mtu - OVERHEAD - (ENCRYPTION if meant.encrypted else 0)

    def namespace(self, network: Network) -> int:
        """The descriptor of the network's namespace, which stays the driver's.

        Raises ServerError as `space` does.
        """
        return self.space(network).descriptor

    # --- networks ---------------------------------------------------------------------------------

    def links(self, network: Network) -> Sequence[str]:
        return (network.bridge,)

    def make(self, made: Network) -> None:
        self.adopt(made)

    def restore(self, network: Network) -> None:
        self.adopt(network)

    def adopt(self, network: Network, descriptor: int = -1) -> Space:
        """Make the network's namespace, or use that of an earlier daemon, and complete it.

        The descriptor stays the caller's. A namespace of the network that this driver has already
        is completed.
        """
        space = self._spaces.get(network.record.id)
        if space is not None:
            with space.lock:
                if self._complete(network, space):
                    self._complete_routes(network, space)
            return space
        space = _opened(descriptor) if descriptor >= 0 else _new()
        try:
            self._complete(network, space)
            if not self.settled:
                _read_peers(space)
        except BaseException:
            if descriptor < 0:
                self._remove(network, space)
            else:
                space.close()
            raise
        self._spaces[network.record.id] = space
        return space

    def unmake(self, network: Network) -> None:
        self._led.pop(network.record.id, None)
        space = self._spaces.pop(network.record.id, None)
        if space is not None:
            self._remove(network, space)

    def discard(self, descriptor: int) -> None:
        """Remove the VXLAN from a namespace that an earlier daemon has left: nothing leaves by it
        any more, and its number is free at once.
        """
        with _inside(descriptor) as inside:
            _apply_removals(inside, [rtnl.delete_link(VXLAN)])

    def settle_encryption(self, awaited: Iterable[Network]) -> None:
        """All networks have been adopted but these: no others that an earlier daemon has left are
        encrypted.
        """
        self._encryption.settle({_overlay(network).vni for network in awaited})

    def _remove(self, network: Network, space: Space) -> None:
        with space.lock:
            if netfilter.available():
                try:
                    self._filter.remove_network(network.bridge)
                except netfilter.NetfilterError as error:
                    _log.warning("network %s: removing its rules: %s", network.record.name, error)
            # At once, as the monitor may keep the namespace a moment longer: its number is free
            # again.
            failures = [*space.inside.outcomes([rtnl.delete_link(VXLAN)])]
            failures += self._links.outcomes([rtnl.delete_link(network.bridge)])
            for failure in failures:
                if failure is not None and failure.errno != errno.ENODEV:
                    _log.warning("network %s: %s", network.record.name, words(failure))
            self.decrypt(network)  # when nothing leaves by the VXLAN any more
            space.close()

    def decrypt(self, network: Network) -> None:
        """The network's number is free. Failures are logged."""
        if _overlay(network).encrypted:
            try:
                self._encryption.remove(_overlay(network).vni)
            except (EngineError, OSError) as error:
                _log.warning("network %s: removing its encryption: %s", network.record.name, words(error))

    def slow_to_unmake(self, network: Network) -> bool:
        return True

    # --- the parts of a namespace -----------------------------------------------------------------

    def _complete(self, network: Network, space: Space) -> bool:
        """Make the links, addresses and rules that are missing. Returns True if any was."""
        inside = space.inside
        lo = _there(inside, "lo")
        subnets = _subnets(network)
        failures = inside.outcomes(rtnl.add_address(lo.ifindex, IPv4Interface((gateway, 32))) for _, gateway in subnets)
        for failure in failures:
            if failure is not None and failure.errno != errno.EEXIST:
                raise failure
        changed = not all(failures)
        inside.apply(rtnl.change_link("lo", up=True), *(rtnl.add_unreachable_route(subnet) for subnet, _ in subnets))
        self._encrypt(network, space, again=True)
        changed |= self._complete_vxlan(network, space, _overlay(network))
        if not network.closed:
            changed |= self._complete_uplink(network, space)
        return changed

    def _complete_vxlan(self, network: Network, space: Space, overlay: Overlay) -> bool:
        mac = mac_address(overlay.local)
        link = space.inside.link(VXLAN)
        if link is not None and link.address == mac and link.up and link.mtu == network.options.mtu:
            space.vxlan = link.ifindex
            return False
        if link is not None:
            space.inside.apply(rtnl.delete_link(VXLAN))
        number, port, mtu = overlay.vni, overlay.port, network.options.mtu
        request = rtnl.create_vxlan(
            VXLAN, namespace=space.descriptor, number=number, port=port, local=overlay.local, mac=mac, mtu=mtu
        )
        deadline = time.monotonic() + PATIENCE
        while (failure := self._links.outcomes([request])[0]) is not None:
            if failure.errno == errno.EOPNOTSUPP:
                raise ServerError(f"network {network.record.name}: this kernel has no vxlan links") from failure
            if failure.errno != errno.EEXIST or time.monotonic() > deadline:
                reason = failure.strerror
                if failure.errno == errno.EEXIST:
                    reason = "another program has it, or a process that holds the namespace of a removed network"
                raise ServerError(
                    f"network {network.record.name}: VXLAN {number} at UDP port {port}: {reason}"
                ) from failure
            time.sleep(0.05)
        space.inside.apply(rtnl.change_link(VXLAN, up=True))
        space.vxlan = _there(space.inside, VXLAN).ifindex
        return True

    def _complete_uplink(self, network: Network, space: Space) -> bool:
        """The link to the host, its routes and the rules on both sides."""
        outer, inner = self._links.link(network.bridge), space.inside.link(UPLINK)
        own = self._links.addresses(outer.ifindex) if outer is not None else []
        made = outer is None or not outer.up or inner is None or not inner.up or len(own) != 1
        if made:
            self._links.outcomes([rtnl.delete_link(network.bridge)])
            space.inside.outcomes([rtnl.delete_link(UPLINK)])
            outer = self._new_uplink(network, space)
            space.inside.apply(rtnl.change_link(UPLINK, up=True))
            inner = _there(space.inside, UPLINK)
        else:
            space.pair = own[0].interface.network
        assert outer is not None
        assert inner is not None
        failure = space.inside.outcomes([rtnl.add_address(inner.ifindex, IPv4Interface((space.pair[1], 31)))])[0]
        if failure is not None and failure.errno != errno.EEXIST:
            raise failure
        readdressed = failure is None
        space.uplink = outer.ifindex
        space.inside.apply(rtnl.add_route(_DEFAULT, inner.ifindex, space.pair[0]))
        led = self._led.get(network.record.id, ())
        self._links.apply(*(rtnl.add_route(each, outer.ifindex, space.pair[1]) for each in led))
        ruled = self._complete_rules(network, space, made)
        return made or readdressed or ruled

    def _complete_rules(self, network: Network, space: Space, made: bool) -> bool:
        """`made`: the link to the host has just been made. Returns True if the rules for packets to
        the host were missing.
        """
        if not netfilter.available():
            return False
        missing = not space.layout
        try:
            with namespaces.inside_network(space.descriptor), NftSocket() as kernel:
                missing |= kernel.layout(_TABLE) != space.layout
                if missing:
                    netfilter.run(_RULES)
                    space.layout = kernel.layout(_TABLE)
            entrance = _overlay(network).ingress
            rules = BridgeRules(bridge=network.bridge, subnets=(space.pair,), icc=False, entrance=entrance)
            if space.rules != rules:
                self._filter.remove_network(network.bridge)
                self._filter.add_network(rules)
                space.rules = rules
            elif made:
                self._filter.returned(network.bridge)
        except netfilter.NetfilterError as error:
            raise ServerError(f"network {network.record.name}: installing its rules: {error}") from error
        return missing

    def _new_uplink(self, network: Network, space: Space) -> Link:
        name = network.bridge
        self._links.apply(rtnl.create_veth(name, UPLINK, space.descriptor))
        try:
            host.ignore_router_advertisements(name)
            self._links.apply(
                rtnl.change_link(name, alias=self._alias),
                rtnl.change_link(name, up=True, without_ipv6_address=host.has_ipv6(0)),
            )
            link = _there(self._links, name)
            space.pair = _free_pair(self._links, _overlay(network).vni)
            self._links.apply(rtnl.add_address(link.ifindex, IPv4Interface((space.pair[0], 31))))
        except BaseException:
            self._links.outcomes([rtnl.delete_link(name)])
            raise
        return link

    def mend(self, network: Network) -> tuple[bool, list[Sandbox]]:
        """Put back what other programs removed. Returns True if anything was missing, and the
        result of `replug`.
        """
        space = self.space(network)
        with space.lock:
            completed = self._complete(network, space)
            plugged = self.replug(network)
            return self._complete_routes(network, space) or completed or bool(plugged), plugged

    def settle(self, network: Network) -> list[Sandbox]:
        """Remove what an earlier daemon has left: all peers have been set. Returns the result of
        `replug`.
        """
        space = self.space(network)
        with space.lock:
            plugged = self.replug(network)
            _apply_removals(space.inside, [each for address in space.unclaimed for each in _forget(space, address)])
            space.unclaimed.clear()
            wanted = {*space.nodes, *space.known}
            strange = (
                {each.address for each in space.inside.neighbours() if each.ifindex == space.vxlan} - wanted - {SINK}
            )
            _apply_removals(space.inside, [each for node in strange for each in _from_node(space.vxlan, node)])
            self._complete_routes(network, space)
        return plugged

    def _complete_routes(self, network: Network, space: Space) -> bool:
        """Routes and neighbours of all endpoints, and no others.

        Returns True if any was missing.
        """
        if space.incomplete:
            self._encrypt(network, space)
        local = [*space.local.items()]  # a container may end at any moment (`released`)
        indexes = {link.name: link.ifindex for link in space.inside.links()}
        routes = {(each.to, each.via, each.ifindex) for each in space.inside.routes()}
        neighbours = {(each.ifindex, each.address) for each in space.inside.neighbours()}
        led = neighbours & {(each.ifindex, each.address) for each in space.inside.neighbours(forwarding=True)}
        missing: list[Request] = []
        for address, node in space.peers.items():
            to = _host(address)
            if address not in space.local and (to, node, space.vxlan) not in routes:
                missing.append(rtnl.add_route(to, space.vxlan, node))
        for node in {*space.nodes, *space.known}:
            if (space.vxlan, node) not in led:
                missing += _to_node(space.vxlan, node)
        of_ends: list[Request] = []
        for address, endpoint in local:
            index = indexes.get(sandboxes.host_end(endpoint.endpoint_id))
            if index is None:
                continue
            if (_host(address), None, index) not in routes:
                of_ends.append(rtnl.add_route(_host(address), index))
            if (index, address) not in neighbours:
                of_ends.append(rtnl.add_neighbour(index, address, endpoint.mac))
        strange = [
            rtnl.delete_route(to, index)
            for to, via, index in routes
            if index == space.vxlan and via is not None and to.prefixlen == 32 and to.network_address not in space.peers
        ]
        _apply_removals(space.inside, strange)
        space.inside.apply(*missing)
        for failure in space.inside.outcomes(of_ends):
            if failure is not None and failure.errno != errno.ENODEV:
                raise failure
        space.incomplete = False
        return bool(missing or of_ends or strange)

    def replug(self, network: Network) -> list[Sandbox]:
        """Attach the containers again whose link is gone: they ran on while daemon and monitor, and
        so the namespace, were gone. Returns those: they have no default route.
        """
        space, plugged = self.space(network), []
        with space.lock:
            there = {link.name for link in space.inside.links()}
            for sandbox in [*network.sandboxes.values()]:
                settings = sandbox.endpoints.get(network.record.id)
                if settings is None or not settings.ip_address:
                    continue
                address = IPv4Address(settings.ip_address)
                if sandboxes.host_end(settings.endpoint_id) in there:
                    self._joined(space, address, settings.mac_address, settings.endpoint_id)
                elif sandbox.namespace >= 0 and self._plug_again(network, sandbox, settings):
                    plugged.append(sandbox)
                # it has ended meanwhile
                if network.sandboxes.get(sandbox.container_id) is not sandbox:
                    self._left(settings.endpoint_id)
        return plugged

    def _joined(self, space: Space, address: IPv4Address, mac: str, endpoint_id: str) -> None:
        space.local[address] = _Local(endpoint_id, mac)
        self._endpoints[endpoint_id] = space, address

    def _plug_again(self, network: Network, sandbox: Sandbox, settings: EndpointSettings) -> bool:
        try:
            interface = endpoints.interface(network, settings)
            name = interface.name or sandboxes.next_name(network.options.prefix, sandboxes.macs(sandbox.namespace))
            self._plug(network, sandbox.namespace, name, interface, settings.endpoint_id)
            _log.warning("network %s: container %s has been attached again", network.record.name, sandbox.container_id)
        except (EngineError, netfilter.NetfilterError, OSError) as error:
            _log.warning("network %s, container %s: %s", network.record.name, sandbox.container_id, words(error))
            return False
        return True

    # --- remote endpoints -------------------------------------------------------------------------

    def set_peers(
        self, network: Network, put: Mapping[IPv4Address, IPv4Address], gone: Collection[IPv4Address]
    ) -> None:
        """Lead these addresses to these nodes, and no others of `gone` any more.

        After a failure the next change, or a repair, does what is missing.
        """
        space, local = self.space(network), _overlay(network).local
        with space.lock:
            again, space.incomplete = space.incomplete, True
            requests: list[Request] = []
            removals: list[Request] = []
            for address in gone:
                if address not in put:
                    removals += _forget(space, address)
            for address, node in put.items():
                space.unclaimed.discard(address)
                if node == local:
                    removals += _forget(space, address)
                    continue
                before = space.peers.get(address)
                if before == node:
                    continue
                if before is not None:
                    removals += _leave_node(space, before)
                space.peers[address] = node
                space.nodes[node] = space.nodes.get(node, 0) + 1
                if space.nodes[node] == 1 and node not in space.known:
                    requests += _to_node(space.vxlan, node)
                if address not in space.local:
                    requests.append(rtnl.add_route(_host(address), space.vxlan, node))
            if requests:
                self._encrypt(network, space)
            _apply_removals(space.inside, removals)
            try:
                space.inside.apply(*requests)
            except OSError as error:
                _log.warning("network %s: %s", network.record.name, words(error))
                again = True
            if again:
                self._complete_routes(network, space)
            if not requests:
                self._encrypt(network, space)
            space.incomplete = False

    def _encrypt(self, network: Network, space: Space, *, again: bool = False) -> None:
        """Packets to and from the nodes of an encrypted network. Before they are routed there."""
        if _overlay(network).encrypted:
            self._encryption.set(_overlay(network), {*space.nodes, *space.known}, again=again)

    def set_nodes(self, network: Network, nodes: Collection[IPv4Address]) -> None:
        """The VXLAN leads to these data addresses, besides those of nodes with endpoints. A failure
        is as in `set_peers`.
        """
        space, local = self.space(network), _overlay(network).local
        with space.lock:
            again, space.incomplete = space.incomplete, True
            wanted = frozenset(nodes) - {local}
            added, left = wanted - space.known, space.known - wanted
            space.known = wanted
            self._encrypt(network, space)
            _apply_removals(
                space.inside,
                [each for node in left if node not in space.nodes for each in _from_node(space.vxlan, node)],
            )
            space.inside.apply(
                *(each for node in added if node not in space.nodes for each in _to_node(space.vxlan, node))
            )
            if again:
                self._complete_routes(network, space)
            space.incomplete = False

    # --- the host's routes to endpoints -----------------------------------------------------------

    def lead(self, network: Network, to: IPv4Address | IPv4Network) -> None:
        """The host leads packets for this endpoint, or for all of the network, into the namespace.
        Idempotent. Into a network that is yet to be adopted, it does when that is done.

        Raises ServerError for an internal network.
        """
        led = self._led.setdefault(network.record.id, set())
        destination = to if isinstance(to, IPv4Network) else _host(to)
        space = self._spaces.get(network.record.id)
        if space is None:
            led.add(destination)
            return
        with space.lock:
            link = self._links.link(network.bridge)
            if link is None:
                raise ServerError(f"network {network.record.name}: it has no link to the host")
            led.add(destination)
            self._links.apply(rtnl.add_route(destination, link.ifindex, space.pair[1]))

    def unlead(self, network: Network, to: IPv4Address | IPv4Network) -> None:
        """Undo `lead`. Idempotent."""
        led = self._led.get(network.record.id, set())
        destination = to if isinstance(to, IPv4Network) else _host(to)
        space = self._spaces.get(network.record.id)
        if space is None:
            led.discard(destination)
            return
        with space.lock:
            link = self._links.link(network.bridge)
            if destination in led and link is not None:
                _apply_removals(self._links, [rtnl.delete_route(destination, link.ifindex)])
            led.discard(destination)

    # --- endpoints --------------------------------------------------------------------------------

    def new_sandbox(self, network: Network, interface: Interface, gateways: Gateways) -> tuple[int, str]:
        space = self.space(network)
        with space.lock:
            if space.stock is None:
                space.stock = _Stock(self._links, network, space, self._ids)
        ready = space.stock.ready() or space.stock.fresh()
        try:
            name = ready.named(interface)
            ready.inside.apply(rtnl.change_link(name, mac=interface.mac, mtu=interface.mtu))
            self._configure(network, space, ready, name, interface, gateways)
        except BaseException:
            ready.close()
            raise
        return ready.detach(), ready.endpoint_id

    def plug(self, network: Network, namespace: int, name: str, interface: Interface) -> str:
        return self._plug(network, namespace, name, interface)

    def _plug(self, network: Network, namespace: int, name: str, interface: Interface, endpoint_id: str = "") -> str:
        space = self.space(network)
        with _inside(namespace) as inside:
            pair = _Pair(namespace, inside, endpoint_id or secrets.token_hex(32))
            pair.make(network, space, name, interface.mac)
            try:
                self._configure(network, space, pair, name, interface, ())
            except BaseException:
                space.inside.outcomes([rtnl.delete_link(sandboxes.host_end(pair.endpoint_id))])
                raise
        return pair.endpoint_id

    def _configure(
        self,
        network: Network,
        space: Space,
        pair: _Pair | ReadySandbox,
        name: str,
        interface: Interface,
        gateways: Gateways,
    ) -> None:
        """Addresses, routes and neighbours on both sides of a pair that is up."""
        address = next(each.ip for each in interface.addresses if isinstance(each, IPv4Interface))
        subnets = _subnets(network)
        gateway = next((gateway for subnet, gateway in subnets if address in subnet), subnets[0][1])
        sandboxes.settle(pair.descriptor, name, interface)
        pair.inside.apply(
            *(rtnl.add_address(pair.index, each, route=each.ip != address) for each in interface.addresses),
            rtnl.add_neighbour(pair.index, gateway, _outer_mac(network)),
            rtnl.add_route(_host(gateway), pair.index),
            *(rtnl.add_route(subnet, pair.index, gateway) for subnet, _ in subnets),
            *(rtnl.add_default_route(each, pair.index) for each in gateways),
        )
        if _overlay(network).ingress:
            inner = _there(pair.inside, name)
            ingress.answer_by(pair.descriptor, pair.inside, inner, address, gateway, datagrams=interface.datagrams)
        with space.lock:
            space.inside.apply(
                rtnl.add_neighbour(pair.bridge, address, interface.mac), rtnl.add_route(_host(address), pair.bridge)
            )
            self._joined(space, address, interface.mac, pair.endpoint_id)

    def unplug(self, network: Network, namespace: int, settings: EndpointSettings) -> None:
        space = self._spaces.get(network.record.id)
        if space is not None:
            with space.lock:
                _apply_removals(space.inside, [rtnl.delete_link(sandboxes.host_end(settings.endpoint_id))])
                address = self._left(settings.endpoint_id)
                if address is not None:
                    _lead_to_peer(space, address)

    def released(self, network: Network, settings: EndpointSettings) -> None:
        """The kernel removes the veth with the container's namespace, unless a process holds that:
        then `clear` does.
        """
        known = self._endpoints.get(settings.endpoint_id)
        if known is not None:
            self._lingering.append((known[0], sandboxes.host_end(settings.endpoint_id), known[1]))
            self._left(settings.endpoint_id)
            self.lingers()

    def clear(self, count: int) -> None:
        """Delete what remains of the `count` endpoints that were released first. Another node may
        have the address of one by now.
        """
        for space, end, address in [self._lingering.popleft() for _ in range(min(count, len(self._lingering)))]:
            with space.lock:
                if not space.closed:
                    _apply_removals(space.inside, [rtnl.delete_link(end)])
                    _lead_to_peer(space, address)

    def _left(self, endpoint_id: str) -> IPv4Address | None:
        """Forget an endpoint; returns its address.

        For any thread, also without the space's lock.
        """
        known = self._endpoints.pop(endpoint_id, None)
        if known is None:
            return None
        space, address = known
        local = space.local.get(address)
        if local is not None and local.endpoint_id == endpoint_id:
            space.local.pop(address, None)
        return address


def _new() -> Space:
    with namespaces.new_network() as descriptor:
        sysctls.write(_SETTINGS)
        return _space(descriptor)


def _opened(descriptor: int) -> Space:
    own = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    try:
        with namespaces.inside_network(own):
            return _space(own)
    except BaseException:
        os.close(own)
        raise


def _space(descriptor: int) -> Space:
    """For the namespace of this thread, whose descriptor it takes."""
    inside = RouteSocket()
    try:
        return Space(descriptor, inside, rtnl.Disturbances(inside))
    except BaseException:
        inside.close()
        raise


@contextlib.contextmanager
def _inside(namespace: int) -> Iterator[RouteSocket]:
    with namespaces.inside_network(namespace):
        inside = RouteSocket()
    with inside:
        yield inside


def _overlay(network: Network) -> Overlay:
    assert network.overlay is not None
    return network.overlay


def _outer_mac(network: Network) -> str:
    """Of the ends in the network's namespace: a container's neighbour is known beforehand."""
    return mac_address(gateway(network))


def _subnets(network: Network) -> list[tuple[IPv4Network, IPv4Address]]:
    """With their gateways."""
    return [
        (pool.subnet, interface.ip)
        for pool, interface in network.subnets
        if isinstance(pool.subnet, IPv4Network) and isinstance(interface.ip, IPv4Address)
    ]


def gateway(network: Network) -> IPv4Address:
    """The network's own address in its namespace, the first one if it has several."""
    return _subnets(network)[0][1]


def _host(address: IPv4Address) -> IPv4Network:
    return IPv4Network((address, 32))


def _there(kernel: RouteSocket, name: str) -> Link:
    link = kernel.link(name)
    if link is None:
        raise NetlinkError(errno.ENODEV, f"{name} is not in its namespace")
    return link


def _read_peers(space: Space) -> None:
    """The endpoints that the namespace has routes to, until `settle` of unknown worth."""
    for to, node, index in space.inside.routes():
        if index == space.vxlan and node is not None and to.prefixlen == 32:
            address = to.network_address
            space.peers[address] = node
            space.nodes[node] = space.nodes.get(node, 0) + 1
            space.unclaimed.add(address)


def _to_node(vxlan: int, node: IPv4Address) -> tuple[Request, Request]:
    mac = mac_address(node)
    return rtnl.add_neighbour(vxlan, node, mac), rtnl.add_forwarding(vxlan, mac, node)


def _forget(space: Space, address: IPv4Address) -> list[Request]:
    node = space.peers.pop(address, None)
    if node is None:
        return []
    # A route to an endpoint of this host stays: it is by another link.
    return [rtnl.delete_route(_host(address), space.vxlan), *_leave_node(space, node)]


def _leave_node(space: Space, node: IPv4Address) -> list[Request]:
    """One endpoint less at this node."""
    space.nodes[node] -= 1
    if space.nodes[node]:
        return []
    del space.nodes[node]
    return [] if node in space.known else _from_node(space.vxlan, node)


def _from_node(vxlan: int, node: IPv4Address) -> list[Request]:
    return [rtnl.delete_neighbour(vxlan, node), rtnl.delete_forwarding(vxlan, mac_address(node), node)]


def _lead_to_peer(space: Space, address: IPv4Address) -> None:
    """This host has the address no more: it is that of an endpoint on another node, if of any."""
    node = space.peers.get(address)
    if node is not None and address not in space.local:
        space.inside.apply(rtnl.add_route(_host(address), space.vxlan, node))


def _apply_removals(kernel: RouteSocket, requests: list[Request]) -> None:
    for failure in kernel.outcomes(requests):
        if failure is not None and failure.errno not in (errno.ENODEV, errno.ESRCH, errno.ENOENT):
            raise failure


def _free_pair(links: RouteSocket, number: int) -> IPv4Network:
    """Two link-local addresses that no link of this host has, the same ones for a network as long
    as they are free.

    169.254.169.0/24 is kept free, as clouds serve their hosts there, and so are the reserved first
    and last /24 (RFC 3927).
    """
    taken = {(first, last) for first, last, _ in links.address_spans() if last - first < 256}
    base, pairs = int(_LINK_LOCAL.network_address), _LINK_LOCAL.num_addresses // 2
    for turn in range(pairs):
        first = base + (number + turn) % pairs * 2
        if first >> 8 & 255 in (0, 169, 255) or any(low <= first + 1 and first <= high for low, high in taken):
            continue
        return IPv4Network((first, 31))
    raise ServerError("no link-local address is free on this host for the network's link to it")


def features() -> tuple[str, ...]:
    """What of a swarm's networks this kernel can do: `overlay` (VXLAN), `egress` (chains for
    packets that leave a link: published ports see the client's address), `esp` (encrypted
    networks).

    Tried in a new namespace, in which the thread is meanwhile. Nothing is left.
    """
    possible = []
    local = IPv4Address("127.0.0.1")
    try:
        with namespaces.new_network() as namespace, RouteSocket() as kernel:
            mac = mac_address(local)
            kernel.apply(
                rtnl.create_vxlan(VXLAN, namespace=namespace, number=1, port=4789, local=local, mac=mac, mtu=1450)
            )
            possible.append("overlay")
            with contextlib.suppress(netfilter.NetfilterError):
                netfilter.run(_EGRESS)
                possible.append("egress")
    except OSError as error:
        _log.info("no overlay networks on this host: %s", words(error))
    else:
        os.close(namespace)
    return (*possible, "esp") if possible and xfrm.available() else tuple(possible)
