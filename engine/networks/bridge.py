"""Bridges on the host: made, adopted, given their gateways' addresses, found again after a crash, removed.

Rules: what Docker documents for its bridge driver. A bridge that the engine made carries its alias and may be removed by it; one that was there
keeps its own address and stays. Everything blocks on the kernel and is called in threads.

Not here: who is on a bridge (`networks.py`), rules for its traffic (`filter.py`). Raises: ServerError, Forbidden that name the bridge; OSError.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import secrets
from collections.abc import Collection, Iterable
from ipaddress import AddressValueError, IPv4Interface, IPv6Interface, NetmaskValueError
from pathlib import Path

from engine.errors import Forbidden, InvalidParameter, ServerError
from engine.networks.ipam import free_subnet
from engine.system import netlink
from engine.system.netlink import Link, Netlink

logger = logging.getLogger(__name__)

ALIAS = "engined"
"""ifalias of a default bridge that the engine made and may remove; that of users' bridges has the engine's own id behind it."""

MADE = ("bridge", "dummy", "vlan")
"""Kinds of links that carry the alias: bridges, and the parents of macvlan networks."""

_FORWARD = Path("/proc/sys/net/ipv4/ip_forward")
_IPV6 = Path("/proc/sys/net/ipv6")
_LINK_LOCAL = IPv6Interface("fe80::1/64")
"""Docker's, so that a gateway looks the same from every network."""

Interfaces = Iterable[IPv4Interface | IPv6Interface]


def open_default(links: Netlink, name: str, configured: IPv4Interface | None) -> tuple[Link, IPv4Interface]:
    """The default bridge and its address: made, or adopted with the address that it has."""
    bridge = links.link(name)
    if bridge is None:
        bridge = _made(links, name, ALIAS, 0)
    elif bridge.kind != "bridge":
        raise ServerError(f"bridge {name}: a link of that name exists and is no bridge ({bridge.kind or 'physical'})")
    own = [address.interface for address in links.addresses(bridge.ifindex)]
    if own:
        if configured is not None and configured.network != own[0].network:
            logger.warning(
                "bridge %s keeps its subnet %s, not %s: remove the bridge to change it",
                name,
                own[0].network,
                configured,
            )
        interface = own[0]
    elif configured is not None:
        interface = configured
    else:
        subnet = free_subnet(taken(links))
        if subnet is None:
            raise ServerError(
                "no address pool is free: every default pool overlaps a route of this host; give --bridge-subnet"
            )
        interface = IPv4Interface((subnet[1], subnet.prefixlen))
    if not own:
        links.apply(netlink.add_address(bridge.ifindex, interface))
    links.apply(netlink.change_link(name, up=True, without_ipv6_address=_IPV6.exists()))
    return bridge, interface


def taken(links: Netlink) -> list[tuple[int, int]]:
    """Spans of IPv4 numbers that mean something to this host: its routes, and the subnets of its links, up or down."""
    return [*links.route_spans(), *((first, last) for first, last, _ in links.address_spans())]


def open_user(
    links: Netlink, name: str, alias: str, interfaces: Interfaces, mtu: int = 0
) -> tuple[Link, tuple[IPv4Interface | IPv6Interface, ...]]:
    """A user's bridge with the addresses of its gateways: made, or the one that is there with those lent to it that it lacks; which.

    A failure takes back what was made and lent.
    """
    bridge = links.link(name)
    made = bridge is None
    if bridge is None:
        bridge = _made(links, name, alias, mtu)
    elif bridge.kind != "bridge":
        raise Forbidden(f"bridge {name}: a link of that name exists and is no bridge ({bridge.kind or 'physical'})")
    added: tuple[IPv4Interface | IPv6Interface, ...] = ()
    try:
        # An address that takes IPv6 packets needs a link-local one beside it.
        wanted = [*interfaces]
        if any(interface.version == 6 for interface in wanted):
            (_IPV6 / "conf" / name / "disable_ipv6").write_text("0")
            wanted.append(_LINK_LOCAL)
        changes = [netlink.change_link(name, up=True, without_ipv6_address=_IPV6.exists())]
        changes += [netlink.add_address(bridge.ifindex, interface) for interface in wanted]
        outcomes = links.outcomes(changes)
        added = tuple(each for each, outcome in zip(wanted, outcomes[1:], strict=True) if outcome is None)
        for outcome in outcomes:
            if outcome is not None and outcome.errno != errno.EEXIST:
                raise outcome
    except BaseException:
        links.outcomes(
            [netlink.delete_link(name)] if made else [netlink.delete_address(bridge.ifindex, each) for each in added]
        )
        raise
    return bridge, () if bridge.alias == alias else added


def _made(links: Netlink, name: str, alias: str, mtu: int) -> Link:
    # A MAC of its own, the same at every start, so that ARP entries of containers outlive the daemon.
    mac = "02:42:" + hashlib.sha256(name.encode()).digest()[:4].hex(":")
    links.apply(netlink.create_bridge(name, mac=mac, mtu=mtu), netlink.change_link(name, alias=alias))
    bridge = links.link(name)
    if bridge is None:
        raise ServerError(f"bridge {name}: it is gone again")
    return bridge


def remove(links: Netlink, name: str, alias: str, lent: Interfaces = ()) -> None:
    """Take the bridge down, when the engine made it; else take back the addresses that it lent. One that is not there is fine."""
    bridge = links.link(name)
    if bridge is None:
        return
    own = bridge.alias == alias
    changes = [netlink.delete_link(name)] if own else [netlink.delete_address(bridge.ifindex, each) for each in lent]
    for outcome in links.outcomes(changes):
        if outcome is not None and outcome.errno not in (errno.ENODEV, errno.EADDRNOTAVAIL):
            raise outcome


def sweep(links: Netlink, alias: str, names: Collection[str] = ()) -> None:
    """Remove the links with this engine's alias, but for those of `names`: what a crash between two steps left, or all at the end."""
    orphans = [
        link.name for link in links.links() if link.alias == alias and link.name not in names and link.kind in MADE
    ]
    if not orphans:
        return
    # Deleted one by one each takes the kernel tens of milliseconds.
    group = secrets.randbelow(1 << 30) + 1
    links.outcomes([netlink.set_group(name, group) for name in orphans])
    links.apply(netlink.delete_group(group))


def forward(*, ipv6: bool = False) -> None:
    """Have this host pass packets on. For IPv6 its own links go on taking router advertisements, which forwarding would end (ip-sysctl)."""
    if _FORWARD.read_text().strip() == "0":
        _FORWARD.write_text("1")
        logger.info("net.ipv4.ip_forward switched on for this host")
    if not ipv6:
        return
    switch = _IPV6 / "conf" / "all" / "forwarding"
    if switch.read_text().strip() == "0":
        for each in (_IPV6 / "conf").iterdir():
            accept = each / "accept_ra"
            if each.name != "all" and accept.read_text().strip() == "1":
                accept.write_text("2")
        switch.write_text("1")
        logger.info("net.ipv6.conf.all.forwarding switched on for this host")


def configured_subnet(text: str) -> IPv4Interface | None:
    """`172.30.0.0/16` (gateway is its first host) or `172.30.0.5/16` (gateway is that address)."""
    if not text:
        return None
    try:
        interface = IPv4Interface(text)
    except (AddressValueError, NetmaskValueError, ValueError) as error:
        raise InvalidParameter(f"bridge subnet {text!r} is no IPv4 subnet: {error}") from error
    network = interface.network
    if network.prefixlen > 30:
        raise InvalidParameter(f"bridge subnet {text!r} has no room for containers")
    if interface.ip == network.broadcast_address:
        raise InvalidParameter(f"bridge subnet {text!r}: the gateway can't be the broadcast address")
    return IPv4Interface((network[1], network.prefixlen)) if interface.ip == network.network_address else interface
