"""Trunks: more endpoints on a network than its bridge has ports.

Linux gives a bridge 1,023 ports (BR_MAX_PORTS). Endpoints beyond the first 832 of a network share
one: a trunk is a veth pair whose one end is a port of the bridge. The other one, also on the host
and without an address, is the lower device of up to 1,000 macvlans, each made in the namespace of
its container. The rest of the ports is for the stock of ready sandboxes (64), for containers that
need a port of their own (64), and for trunks (63).

- Which trunk an endpoint is on follows from its address, so that nothing need be counted or kept.
- The bridge sends a trunk's frames back by the port that they came from (hairpin): to another
  macvlan of the trunk go those that the host has seen and changed.
- The host is not on the lower device: it has the bridge's MAC, so that no port leads to it, and
  what comes by it is neither answered nor forwarded.
- Without icc the macvlans of a trunk do not reach one another, and the trunk's port is isolated;
  where netfilter sees the frames of bridges, all of them go to the bridge instead (VEPA).
- A macvlan dies with its namespace, or with its trunk. `BridgeDriver.replug` makes lost ones again.

Owns: trunks, until their network is removed. They carry the engine's alias. Threads: any but the
event loop's. Locks: none, `BridgeDriver` calls `make` and `attach` under its own.
Raises: OSError, BridgeFull.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from ipaddress import IPv4Interface, IPv6Interface

from engine.networks import host, sandboxes
from engine.networks.endpoints import Network
from engine.networks.network import Options
from engine.networks.publishing import bridges_call_netfilter
from engine.networks.sandboxes import Interface
from engine.system import namespaces, sysctls
from engine.system.netlink import rtnl
from engine.system.netlink.codec import Request
from engine.system.netlink.rtnl import Link, RouteSocket

PORTS = 832
"""Endpoints of a network with a port of their own."""
OWN_PORTS = 64
"""Containers that may change their links, up to which such a one always has a port of its own."""
LEAVES = 1000
"""Addresses in a row whose endpoints share a trunk. The kernel drops copies of a broadcast beyond
net.core.netdev_max_backlog, which is 1,000 unless it was set.
"""
TRUNKS = 63
LOWER = "tl"
"""Names of lower devices begin with it."""

_SETTINGS = {"ipv4/conf/{}/forwarding": "0", "ipv4/conf/{}/arp_ignore": "8", "ipv4/conf/{}/rp_filter": "1"}
if host.HAS_IPV6:
    _SETTINGS["ipv6/conf/{}/disable_ipv6"] = "1"
"""Of lower devices, below /proc/sys/net."""


class Trunks:
    """Those of all bridges of one engine."""

    def __init__(self, links: RouteSocket, alias: str) -> None:
        self._links = links
        self._alias = alias
        self._lower: dict[str, dict[int, Link]] = {}
        """Lower devices by network id and number."""

    def adopt(self, networks: Iterable[Network], present: Iterable[Link]) -> None:
        """Take over the trunks of a daemon before, among the links of this host. Those that it has
        not finished are deleted; `BridgeDriver.replug` makes what endpoints need again.
        """
        found = {
            link.name: link for link in present if link.kind == "veth" and link.name.startswith((host.TRUNK, LOWER))
        }
        for network in networks if found else ():
            for number in range(TRUNKS):
                port, lower = names(network, number)
                if port in found and lower in found:
                    if found[port].alias == self._alias:
                        self._lower.setdefault(network.record.id, {})[number] = found[lower]
                    else:
                        self._links.outcomes([rtnl.delete_link(port)])

    def ports(self, network: Network) -> list[str]:
        """Names of their ends in the bridge."""
        return [names(network, number)[0] for number in self._numbers(network)]

    def lost(self, network: Network, indexes: Collection[int] | None) -> bool:
        """True if one of these links was of a trunk of the network. None: any link."""
        lowers = [*self._lower.get(network.record.id, {}).values()]
        return any(indexes is None or lower.ifindex in indexes for lower in lowers)

    def lower(self, network: Network, number: int) -> Link | None:
        """The lower device of a trunk; None if there is none now."""
        link = self._lower.get(network.record.id, {}).get(number)
        return link if host.is_there(link) else None

    def missing(self, network: Network) -> list[int]:
        """Numbers of those that another program has deleted."""
        return [number for number in self._numbers(network) if self.lower(network, number) is None]

    def make(self, network: Network, bridge: Link, number: int) -> Link:
        """Make a trunk; returns its lower device. A failure leaves nothing behind. `finish` is to
        follow.
        """
        (port, lower), mtu = names(network, number), network.options.mtu
        home = namespaces.network()
        try:
            self._links.apply(rtnl.create_veth(port, lower, home, mtu=mtu, peer_mac=bridge.address))
        finally:
            os.close(home)
        try:
            host.ignore_router_advertisements(port)
            sysctls.write({path.format(lower): value for path, value in _SETTINGS.items()})
            self._links.apply(rtnl.change_link(lower, up=True, without_ipv6_address=host.has_ipv6(mtu)))
            self._attach(network, bridge, port)
            link = self._links.link(lower)
            assert link is not None
        except BaseException:
            self._links.outcomes([rtnl.delete_link(port)])
            raise
        self._lower.setdefault(network.record.id, {})[number] = link
        return link

    def finish(self, network: Network, number: int) -> None:
        """The trunk has all endpoints that were on it before. One that is not finished when the
        daemon is killed is made again.
        """
        self._links.apply(rtnl.change_link(names(network, number)[0], alias=self._alias))

    def attach(self, network: Network, bridge: Link) -> None:
        """Put all trunks that there are into the bridge, which may be a new one."""
        for number in self._numbers(network):
            if self.lower(network, number) is not None:
                self._attach(network, bridge, names(network, number)[0])

    def _attach(self, network: Network, bridge: Link, port: str) -> None:
        plain = host.has_ipv6(network.options.mtu)
        enslave = rtnl.change_link(port, master=bridge.ifindex, up=True, without_ipv6_address=plain)
        sandboxes.occupy(self._links, bridge, enslave)
        isolated = not network.options.icc and not bridges_call_netfilter()
        self._links.apply(rtnl.change_port(port, hairpin=True, isolated=isolated))

    def remove(self, network: Network) -> None:
        """Delete all of a network. Missing ones are fine."""
        self._links.outcomes([rtnl.delete_link(name) for name in self.ports(network)])
        self._lower.pop(network.record.id, None)

    def _numbers(self, network: Network) -> list[int]:
        """A copy: other threads make trunks."""
        return [*self._lower.get(network.record.id, {})]


def names(network: Network, number: int) -> tuple[str, str]:
    """Of the port and of the lower device of a trunk, within the 15 characters that the kernel
    takes. Only names that begin with `veth` wake nobody when they are removed (`rtnl.Removals`).
    """
    name = f"{network.record.id[:10]}{number:02x}"
    return f"{host.TRUNK}{name}", f"{LOWER}{name}"


def number_of(address: IPv4Interface | IPv6Interface) -> int:
    """The trunk of an endpoint with this address."""
    return (int(address.ip) - int(address.network.network_address)) // LEAVES % TRUNKS


def mode(options: Options) -> str:
    """Of a network's macvlans."""
    if options.icc:
        return "bridge"
    return "vepa" if bridges_call_netfilter() else "private"


def leaf(lower: Link, network: Network, namespace: int, name: str, interface: Interface) -> Request:
    """What makes the link of an endpoint over a trunk, in the namespace with this descriptor."""
    return rtnl.create_macvlan(
        *(name,),
        parent=lower.ifindex,
        namespace=namespace,
        mode=mode(network.options),
        mac=interface.mac,
        mtu=interface.mtu,
    )
