"""rtnetlink: links, addresses, routes.

A request is bytes. A batch of requests is sent at once, and each is acknowledged.

Written by hand because it is on the path of every start: pyroute2 takes 135 us to encode one veth
request, this module 3 us, both under the GIL, and importing pyroute2 costs 11 MB of the 60 that the
whole engine may have at rest. Tests compare every request here with pyroute2's bytes. Links that no
start waits for are made with pyroute2 (`system/links.py`).

Rules: rtnetlink(7), linux/if_link.h, linux/rtnetlink.h. Blocking: see `transport.py`, also for
threads, ownership and what is raised.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from engine.system.netlink.codec import (
    CREATE,
    EXCL,
    HEADER,
    REPLACE,
    NetlinkError,
    Request,
    attribute,
    nest,
    read_attributes,
    read_number,
    read_text,
    text,
    u32,
)
from engine.system.netlink.transport import Listener, NetlinkSocket, as_loaded

_NEWLINK, _DELLINK, _GETLINK = 16, 17, 18
_NEWADDR, _DELADDR, _GETADDR = 20, 21, 22
_NEWROUTE, _DELROUTE, _GETROUTE = 24, 25, 26
_NEWNEIGH, _DELNEIGH, _GETNEIGH = 28, 29, 30
_NEWRULE = 32

_IFLA_ADDRESS, _IFLA_IFNAME, _IFLA_MTU, _IFLA_LINK, _IFLA_MASTER = 1, 3, 4, 5, 10
_IFLA_LINKINFO, _IFLA_NET_NS_FD = 18, 28
_IFLA_IFALIAS, _IFLA_AF_SPEC, _IFLA_GROUP, _IFLA_EXT_MASK = 20, 26, 27, 29
_IFLA_INFO_KIND, _IFLA_INFO_DATA, _VETH_INFO_PEER = 1, 2, 1
_IFLA_INFO_SLAVE_KIND, _IFLA_INFO_SLAVE_DATA, _IFLA_BRPORT_MODE, _IFLA_BRPORT_ISOLATED = 4, 5, 4, 33
_IFLA_INET6_ADDR_GEN_MODE, _ADDR_GEN_NONE = 8, 1
_IFLA_VXLAN_ID, _IFLA_VXLAN_LOCAL, _IFLA_VXLAN_LEARNING, _IFLA_VXLAN_PORT, _IFLA_VXLAN_UDP_CSUM = 1, 4, 7, 15, 18
_IFLA_MACVLAN_MODE = 1
_MACVLAN_MODES = {"private": 1, "vepa": 2, "bridge": 4, "passthru": 8}
_IFLA_IPVLAN_MODE, _IFLA_IPVLAN_FLAGS = 1, 2
_IPVLAN_MODES = ("l2", "l3", "l3s")
_IPVLAN_FLAGS = ("bridge", "private", "vepa")
_IFA_ADDRESS, _IFA_LOCAL, _IFA_BROADCAST = 1, 2, 4
_IFA_FLAGS = 8
_IFA_F_NODAD, _IFA_F_NOPREFIXROUTE = 0x02, 0x200
_RTA_DST, _RTA_OIF, _RTA_GATEWAY, _RTA_MULTIPATH, _RTA_TABLE, _RTA_VIA, _RTA_NH_ID = 1, 4, 5, 9, 15, 18, 30
_GATEWAYS = {_RTA_GATEWAY, _RTA_MULTIPATH, _RTA_VIA, _RTA_NH_ID}
_RTNH_F_ONLINK = 4
_FRA_SRC, _FRA_PRIORITY, _FRA_FWMARK, _FRA_TABLE, _FRA_FWMASK, _FRA_OIFNAME = 2, 6, 10, 15, 16, 17
_FR_ACT_TO_TBL, _FIB_RULE_INVERT, _ALL_BITS = 1, 2, 0xFFFFFFFF
_NDA_DST, _NDA_LLADDR, _NDA_PROTOCOL = 1, 2, 12
_RTPROT_ENGINE = 0xE9
"""The engine's number among those that tell who has made an entry. The kernel has no meaning for it
(rtnetlink(7))."""
_NUD_STALE, _NUD_PERMANENT = 0x04, 0x80
_NTF_SELF, _NTF_EXT_LEARNED = 0x02, 0x10
_SKIP_STATISTICS = 8

_IFF_UP, _IFF_POINTOPOINT = 1, 0x10
_AF_BRIDGE = 7
_RT_TABLE_MAIN, _RTPROT_KERNEL, _RTPROT_BOOT, _RT_SCOPE_UNIVERSE, _RTN_UNICAST = 254, 2, 3, 0, 1
_RT_SCOPE_LINK = 253
_RTN_UNREACHABLE = 7

_FAMILIES = {4: (socket.AF_INET, 32), 6: (socket.AF_INET6, 128)}
"""Address family and bits of an address, by IP version."""

_BUFFER = 256 << 10
_BATCH = 64
"""Requests in one send. The socket's buffer must have room for all acknowledgements, because they
are read after the send.
"""
_GROUP_LINK, _GROUP_NEIGHBOUR, _GROUP_ADDRESS, _GROUP_ROUTE = 1, 3, 5, 7

_LINK = struct.Struct("=BxHiII")
_ADDRESS = struct.Struct("=BBBBI")
_ROUTE = struct.Struct("=BBBBBBBBI")
_NEIGHBOUR = struct.Struct("=BxxxiHBB")
_RULE = struct.Struct("=BBBBBxxBI")

Interface = ipaddress.IPv4Interface | ipaddress.IPv6Interface
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class Link(NamedTuple):
    """A network interface as the kernel describes it.

    `kind` is empty for hardware, `master` is an ifindex or 0.
    """

    ifindex: int
    name: str
    kind: str
    master: int
    up: bool
    alias: str
    address: str
    mtu: int


class Address(NamedTuple):
    """An IPv4 address of the link with that index."""

    ifindex: int
    interface: ipaddress.IPv4Interface


class Route(NamedTuple):
    """An IPv4 route of the main table: `via` is None if its destination is a neighbour, `ifindex` 0
    if it leads nowhere.
    """

    to: ipaddress.IPv4Network
    via: ipaddress.IPv4Address | None
    ifindex: int


class Neighbour(NamedTuple):
    """A permanent entry of a link: the MAC of an IPv4 address, or (of a VXLAN) the node behind a
    MAC.
    """

    ifindex: int
    address: ipaddress.IPv4Address
    mac: str


class RouteSocket(NetlinkSocket):
    """A socket for links, addresses and routes of the network namespace of the thread that makes
    it.
    """

    def __init__(self) -> None:
        super().__init__(socket.NETLINK_ROUTE, buffer=_BUFFER)

    def apply(self, *requests: Request) -> None:
        """Make all changes, in order.

        Raises the first error. The kernel carries out the requests after it nevertheless.
        """
        failure = next((error for error in self.outcomes(requests) if error is not None), None)
        if failure is not None:
            raise failure

    def outcomes(self, requests: Iterable[Request]) -> list[NetlinkError | None]:
        """As `apply`, but returns each request's error, None for success."""
        waiting = [*requests]
        found: list[NetlinkError | None] = []
        for start in range(0, len(waiting), _BATCH):
            found += [answer.error for answer in self.exchange(waiting[start : start + _BATCH])]
        return found

    def links(self) -> list[Link]:
        """Every link of the namespace."""
        body = _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0) + u32(_IFLA_EXT_MASK, _SKIP_STATISTICS)
        return [_link(each) for each in self.dump(Request(_GETLINK, 0, body, "list of links"))]

    def link(self, name: str) -> Link | None:
        """The link of this name, or None. The cost does not depend on the number of links."""
        body = _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0) + text(_IFLA_IFNAME, name)
        body += u32(_IFLA_EXT_MASK, _SKIP_STATISTICS)
        (answer,) = self.exchange((Request(_GETLINK, 0, body, f"link {name}"),), 0, single=True)
        if answer.error is None:
            return _link(answer.bodies[0])
        if answer.error.errno == errno.ENODEV:
            return None
        raise answer.error

    def addresses(self, index: int = 0) -> list[Address]:
        """IPv4 addresses of the namespace, or of one link."""
        body = _ADDRESS.pack(socket.AF_INET, 0, 0, 0, index)
        found = []
        for answer in self.dump(Request(_GETADDR, 0, body, "list of addresses")):
            _, prefix, _, _, owner = _ADDRESS.unpack_from(answer)
            local = read_attributes(answer, _ADDRESS.size).get(_IFA_LOCAL)
            if local is not None and (not index or owner == index):
                found.append(Address(owner, ipaddress.IPv4Interface((local, prefix))))
        return found

    def owner(self, address: IPAddress) -> int:
        """The index of the link that has this address; 0 when none has it."""
        family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
        for answer in self.dump(Request(_GETADDR, 0, _ADDRESS.pack(family, 0, 0, 0, 0), "list of addresses")):
            found = read_attributes(answer, _ADDRESS.size)
            if address.packed in (found.get(_IFA_LOCAL), found.get(_IFA_ADDRESS)):
                return int(_ADDRESS.unpack_from(answer)[4])
        return 0

    def address_spans(self, version: int = 4) -> list[tuple[int, int, int]]:
        """First and last number of the subnet of every address, and its link's index.

        Plain numbers, because hosts may have thousands of addresses.
        """
        family, bits = _FAMILIES[version]
        local = _IFA_LOCAL if version == 4 else _IFA_ADDRESS  # IPv6 has both at tunnels alone
        found = []
        for answer in self.dump(Request(_GETADDR, 0, _ADDRESS.pack(family, 0, 0, 0, 0), "list of addresses")):
            _, prefix, _, _, owner = _ADDRESS.unpack_from(answer)
            first, last = _span(read_number(answer, _ADDRESS.size, local), prefix, bits)
            found.append((first, last, owner))
        return found

    def route_spans(self, version: int = 4) -> list[tuple[int, int, bool]]:
        """First and last number of the destinations that lead to other hosts, in every table; and
        whether they are beyond a gateway or a tunnel. Without default routes.
        """
        family, bits = _FAMILIES[version]
        body = _ROUTE.pack(family, 0, 0, 0, 0, 0, 0, _RTN_UNICAST, 0)
        tunnels: dict[int, bool] = {}
        found = []
        for answer in self.dump(Request(_GETROUTE, 0, body, "list of routes")):
            _, prefix, _, _, _, protocol, _, kind, _ = _ROUTE.unpack_from(answer)
            if kind != _RTN_UNICAST or not prefix:
                continue
            beyond = False
            if protocol != _RTPROT_KERNEL:  # not that of an address
                attributes = read_attributes(answer, _ROUTE.size)
                beyond = not _GATEWAYS.isdisjoint(attributes)
                if not beyond and _RTA_OIF in attributes:
                    index = int.from_bytes(attributes[_RTA_OIF], sys.byteorder)
                    if index not in tunnels:
                        tunnels[index] = self._is_tunnel(index)
                    beyond = tunnels[index]
            found.append((*_span(read_number(answer, _ROUTE.size, _RTA_DST), prefix, bits), beyond))
        return found

    def _is_tunnel(self, index: int) -> bool:
        """True if the link leads to one other host, as those of VPNs do."""
        body = _LINK.pack(socket.AF_UNSPEC, 0, index, 0, 0) + u32(_IFLA_EXT_MASK, _SKIP_STATISTICS)
        (answer,) = self.exchange((Request(_GETLINK, 0, body, f"link {index}"),), 0, single=True)
        return answer.error is None and bool(_LINK.unpack_from(answer.bodies[0])[3] & _IFF_POINTOPOINT)

    def routes(self) -> list[Route]:
        """The IPv4 routes of the main table."""
        body = _ROUTE.pack(socket.AF_INET, 0, 0, 0, _RT_TABLE_MAIN, 0, 0, 0, 0)
        found = []
        for answer in self.dump(Request(_GETROUTE, 0, body, "list of routes")):
            _, prefix, _, _, table, *_ = _ROUTE.unpack_from(answer)
            if table == _RT_TABLE_MAIN:
                parts = read_attributes(answer, _ROUTE.size)
                via, oif = parts.get(_RTA_GATEWAY), parts.get(_RTA_OIF)
                found.append(
                    Route(
                        ipaddress.IPv4Network((parts.get(_RTA_DST, bytes(4)), prefix)),
                        ipaddress.IPv4Address(via) if via is not None else None,
                        struct.unpack("=I", oif)[0] if oif is not None else 0,
                    )
                )
        return found

    def neighbours(self, *, forwarding: bool = False) -> list[Neighbour]:
        """The permanent neighbours with an IPv4 address; with `forwarding` the entries of VXLANs
        instead.
        """
        family = _AF_BRIDGE if forwarding else socket.AF_INET
        found = []
        for index, state, parts in self._neighbours(family):
            address = parts.get(_NDA_DST, b"")
            if state & _NUD_PERMANENT and len(address) == 4:
                mac = parts.get(_NDA_LLADDR, b"")
                found.append(Neighbour(index, ipaddress.IPv4Address(address), mac.hex(":")))
        return found

    def learned(self) -> list[tuple[int, IPAddress]]:
        """The entries that `learn_neighbour` has made: index of the link, and address."""
        return [
            (index, ipaddress.ip_address(parts[_NDA_DST]))
            for family, _ in _FAMILIES.values()
            for index, _, parts in self._neighbours(family)
            if parts.get(_NDA_PROTOCOL) == bytes([_RTPROT_ENGINE])
        ]

    def _neighbours(self, family: int) -> Iterator[tuple[int, int, dict[int, bytes]]]:
        """Index of the link, state and attributes of each."""
        for answer in self.dump(Request(_GETNEIGH, 0, _NEIGHBOUR.pack(family, 0, 0, 0, 0), "list of neighbours")):
            _, index, state, _, _ = _NEIGHBOUR.unpack_from(answer)
            yield index, state, read_attributes(answer, _NEIGHBOUR.size)


# --- requests -------------------------------------------------------------------------------------


def create_bridge(name: str, *, mac: str, mtu: int = 0) -> Request:
    """Create a bridge with a fixed MAC address, so that it does not change with the ports."""
    body = _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0) + text(_IFLA_IFNAME, name) + _mac(mac)
    if mtu:
        body += u32(_IFLA_MTU, mtu)
    body += nest(_IFLA_LINKINFO, text(_IFLA_INFO_KIND, "bridge"))
    return Request(_NEWLINK, CREATE | EXCL, body, f"bridge {name}")


def create_veth(
    name: str, peer: str, peer_namespace: int, *, mtu: int = 0, mac: str = "", peer_mac: str = ""
) -> Request:
    """Create a veth pair: `name` in this namespace, `peer` directly in the namespace with this
    descriptor. Without MACs the kernel chooses them.
    """
    size = u32(_IFLA_MTU, mtu) if mtu else b""
    inside = _LINK.pack(0, 0, 0, 0, 0) + text(_IFLA_IFNAME, peer) + u32(_IFLA_NET_NS_FD, peer_namespace) + size
    inside += _mac(peer_mac) if peer_mac else b""
    information = text(_IFLA_INFO_KIND, "veth") + nest(_IFLA_INFO_DATA, nest(_VETH_INFO_PEER, inside))
    body = _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0) + text(_IFLA_IFNAME, name) + size
    body += _mac(mac) if mac else b""
    return Request(_NEWLINK, CREATE | EXCL, body + nest(_IFLA_LINKINFO, information), f"veth {name}")


def create_macvlan(name: str, *, parent: int, namespace: int, mode: str, mac: str, mtu: int = 0) -> Request:
    """Create a macvlan link over the link with index `parent`, directly in the namespace with this
    descriptor. `mode`: bridge, private, vepa, passthru.
    """
    data = nest(_IFLA_INFO_DATA, u32(_IFLA_MACVLAN_MODE, _MACVLAN_MODES[mode]))
    body = _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0) + text(_IFLA_IFNAME, name) + _mac(mac)
    body += u32(_IFLA_LINK, parent) + u32(_IFLA_NET_NS_FD, namespace)
    if mtu:
        body += u32(_IFLA_MTU, mtu)
    body += nest(_IFLA_LINKINFO, text(_IFLA_INFO_KIND, "macvlan") + data)
    return Request(_NEWLINK, CREATE | EXCL, body, f"macvlan {name}")


def create_ipvlan(name: str, *, parent: int, namespace: int, mode: str, flag: str, mtu: int = 0) -> Request:
    """Create an ipvlan link over the link with index `parent`, directly in the namespace with this
    descriptor. It has its parent's MAC. `mode`: l2, l3, l3s; `flag`: bridge, private, vepa.
    """
    data = attribute(_IFLA_IPVLAN_MODE, struct.pack("=H", _IPVLAN_MODES.index(mode)))
    if flag != _IPVLAN_FLAGS[0]:
        data += attribute(_IFLA_IPVLAN_FLAGS, struct.pack("=H", _IPVLAN_FLAGS.index(flag)))
    body = _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0) + text(_IFLA_IFNAME, name)
    body += u32(_IFLA_LINK, parent) + u32(_IFLA_NET_NS_FD, namespace)
    if mtu:
        body += u32(_IFLA_MTU, mtu)
    body += nest(_IFLA_LINKINFO, text(_IFLA_INFO_KIND, "ipvlan") + nest(_IFLA_INFO_DATA, data))
    return Request(_NEWLINK, CREATE | EXCL, body, f"ipvlan {name}")


def create_vxlan(
    name: str, *, namespace: int, number: int, port: int, local: ipaddress.IPv4Address, mac: str, mtu: int
) -> Request:
    """Create a VXLAN link in the namespace with this descriptor. Its UDP packets leave and arrive
    in this namespace, from the address `local`. It learns no addresses, and its UDP packets carry
    no checksum, as the inner packets have their own.
    """
    data = u32(_IFLA_VXLAN_ID, number) + attribute(_IFLA_VXLAN_LOCAL, local.packed)
    data += attribute(_IFLA_VXLAN_LEARNING, b"\0") + attribute(_IFLA_VXLAN_PORT, port.to_bytes(2, "big"))
    data += attribute(_IFLA_VXLAN_UDP_CSUM, b"\0")
    body = _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0) + text(_IFLA_IFNAME, name) + _mac(mac) + u32(_IFLA_MTU, mtu)
    body += u32(_IFLA_NET_NS_FD, namespace)
    body += nest(_IFLA_LINKINFO, text(_IFLA_INFO_KIND, "vxlan") + nest(_IFLA_INFO_DATA, data))
    return Request(_NEWLINK, CREATE | EXCL, body, f"vxlan {number}")


def change_link(
    name: str,
    *,
    up: bool | None = None,
    master: int | None = None,
    mac: str = "",
    mtu: int = 0,
    alias: str = "",
    without_ipv6_address: bool = False,
) -> Request:
    """Change the link of this name.

    `alias` is free text. `without_ipv6_address`: the link gets no automatic link-local address.
    """
    flags, mask = (_IFF_UP if up else 0, _IFF_UP) if up is not None else (0, 0)
    body = _LINK.pack(socket.AF_UNSPEC, 0, 0, flags, mask) + text(_IFLA_IFNAME, name)
    if mac:
        body += _mac(mac)
    if mtu:
        body += u32(_IFLA_MTU, mtu)
    if alias:
        body += text(_IFLA_IFALIAS, alias)
    if master is not None:
        body += u32(_IFLA_MASTER, master)
    if without_ipv6_address:
        mode = attribute(_IFLA_INET6_ADDR_GEN_MODE, bytes((_ADDR_GEN_NONE,)))
        body += nest(_IFLA_AF_SPEC, nest(socket.AF_INET6, mode))
    return Request(_NEWLINK, 0, body, f"link {name}")


def rename_link(index: int, name: str) -> Request:
    """Give the link of this index another name."""
    body = _LINK.pack(socket.AF_UNSPEC, 0, index, 0, 0) + text(_IFLA_IFNAME, name)
    return Request(_NEWLINK, 0, body, f"link {name}")


def move_link(index: int, namespace: int, name: str) -> Request:
    """Move the link of this index into the namespace with this descriptor, as `name`. It is down
    then, and has no addresses.
    """
    body = _LINK.pack(socket.AF_UNSPEC, 0, index, 0, 0) + text(_IFLA_IFNAME, name)
    return Request(_NEWLINK, 0, body + u32(_IFLA_NET_NS_FD, namespace), f"move of link {name}")


def change_port(name: str, *, hairpin: bool | None = None, isolated: bool | None = None) -> Request:
    """Change a port of a bridge. With `hairpin`, frames may be sent back to the port that they came
    from. `isolated` ports cannot reach each other.
    """
    data = b""
    if hairpin is not None:
        data += attribute(_IFLA_BRPORT_MODE, bytes((hairpin,)))
    if isolated is not None:
        data += attribute(_IFLA_BRPORT_ISOLATED, bytes((isolated,)))
    kind = text(_IFLA_INFO_SLAVE_KIND, "bridge") + nest(_IFLA_INFO_SLAVE_DATA, data)
    body = _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0) + text(_IFLA_IFNAME, name) + nest(_IFLA_LINKINFO, kind)
    return Request(_NEWLINK, 0, body, f"bridge port {name}")


def set_group(name: str, group: int) -> Request:
    body = _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0) + text(_IFLA_IFNAME, name) + u32(_IFLA_GROUP, group)
    return Request(_NEWLINK, 0, body, f"group of link {name}")


def delete_group(group: int) -> Request:
    """Delete all links of the group at once. The kernel then waits for one RCU grace period instead
    of one per link.
    """
    body = _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0) + u32(_IFLA_GROUP, group)
    return Request(_DELLINK, 0, body, f"removal of links of group {group}")


def delete_link(name: str) -> Request:
    body = _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0) + text(_IFLA_IFNAME, name)
    return Request(_DELLINK, 0, body, f"removal of link {name}")


def add_address(index: int, interface: Interface, *, route: bool = True) -> Request:
    """Add an address: IPv4 with the subnet's broadcast address, IPv6 without duplicate address
    detection. An existing one is an error (EEXIST). `route`: the kernel adds a route to the subnet
    by this link.
    """
    address, network = interface.ip.packed, interface.network
    if interface.version == 6:
        body = _ADDRESS.pack(socket.AF_INET6, network.prefixlen, _IFA_F_NODAD, 0, index)
        body += attribute(_IFA_ADDRESS, address)
    else:
        body = _ADDRESS.pack(socket.AF_INET, network.prefixlen, 0, 0, index)
        body += attribute(_IFA_LOCAL, address) + attribute(_IFA_ADDRESS, address)
        if network.prefixlen < 31:
            body += attribute(_IFA_BROADCAST, network.broadcast_address.packed)
    if not route:
        body += u32(_IFA_FLAGS, _IFA_F_NOPREFIXROUTE | (_IFA_F_NODAD if interface.version == 6 else 0))
    return Request(_NEWADDR, CREATE | EXCL, body, f"address {interface}")


def delete_address(index: int, interface: Interface) -> Request:
    """Delete an address. A missing one is an error (EADDRNOTAVAIL)."""
    family = socket.AF_INET6 if interface.version == 6 else socket.AF_INET
    body = _ADDRESS.pack(family, interface.network.prefixlen, 0, 0, index)
    body += attribute(_IFA_LOCAL, interface.ip.packed) + attribute(_IFA_ADDRESS, interface.ip.packed)
    return Request(_DELADDR, 0, body, f"removal of address {interface}")


def add_route(
    to: ipaddress.IPv4Network | ipaddress.IPv6Network,
    index: int,
    via: IPAddress | None = None,
    *,
    table: int = _RT_TABLE_MAIN,
) -> Request:
    """Add or replace a route by the link of that index: to neighbours, or `via` one of them, which
    need not be in a subnet of the link.
    """
    family = socket.AF_INET6 if to.version == 6 else socket.AF_INET
    scope, flags = (_RT_SCOPE_LINK, 0) if via is None else (_RT_SCOPE_UNIVERSE, _RTNH_F_ONLINK)
    body = _ROUTE.pack(family, to.prefixlen, 0, 0, table & 255, _RTPROT_BOOT, scope, _RTN_UNICAST, flags)
    body += attribute(_RTA_DST, to.network_address.packed)
    if via is not None:
        body += attribute(_RTA_GATEWAY, via.packed)
    body += u32(_RTA_OIF, index) + (u32(_RTA_TABLE, table) if table > 255 else b"")
    return Request(_NEWROUTE, CREATE | REPLACE, body, f"route to {to}")


def add_unreachable_route(to: ipaddress.IPv4Network) -> Request:
    """Add or replace an IPv4 route that answers "host unreachable"."""
    kind = _RTN_UNREACHABLE
    body = _ROUTE.pack(socket.AF_INET, to.prefixlen, 0, 0, _RT_TABLE_MAIN, _RTPROT_BOOT, _RT_SCOPE_UNIVERSE, kind, 0)
    return Request(_NEWROUTE, CREATE | REPLACE, body + attribute(_RTA_DST, to.network_address.packed), f"route to {to}")


def delete_route(to: ipaddress.IPv4Network, index: int = 0, *, table: int = _RT_TABLE_MAIN) -> Request:
    """Delete the route to exactly these addresses; with `index` only one by that link.

    A missing one is an error (ESRCH).
    """
    nowhere = 255
    body = _ROUTE.pack(socket.AF_INET, to.prefixlen, 0, 0, table & 255, 0, nowhere, 0, 0)
    body += attribute(_RTA_DST, to.network_address.packed)
    body += (u32(_RTA_OIF, index) if index else b"") + (u32(_RTA_TABLE, table) if table > 255 else b"")
    return Request(_DELROUTE, 0, body, f"removal of the route to {to}")


def add_rule(
    *,
    table: int,
    priority: int,
    source: ipaddress.IPv4Address | None = None,
    marked: int | None = 0,
    by: str = "",
) -> Request:
    """Have IPv4 packets looked up in a table: those from the address `source`, with the mark
    `marked` (None for any mark but 0), or that are to leave by the link `by`. An existing rule is
    an error (EEXIST).
    """
    flags = _FIB_RULE_INVERT if marked is None else 0
    body = _RULE.pack(socket.AF_INET, 0, 32 if source is not None else 0, 0, table & 255, _FR_ACT_TO_TBL, flags)
    if source is not None:
        body += attribute(_FRA_SRC, source.packed)
    body += u32(_FRA_PRIORITY, priority)
    if marked != 0:
        body += u32(_FRA_FWMARK, marked or 0)
    body += u32(_FRA_TABLE, table)
    if marked != 0:
        body += u32(_FRA_FWMASK, _ALL_BITS)
    if by:
        body += text(_FRA_OIFNAME, by)
    return Request(_NEWRULE, CREATE | EXCL, body, f"rule of table {table}")


def add_neighbour(index: int, address: ipaddress.IPv4Address, mac: str) -> Request:
    """Add or replace a permanent neighbour of a link."""
    body = _NEIGHBOUR.pack(socket.AF_INET, index, _NUD_PERMANENT, 0, 0)
    body += attribute(_NDA_DST, address.packed) + attribute(_NDA_LLADDR, _bytes(mac))
    return Request(_NEWNEIGH, CREATE | REPLACE, body, f"neighbour {address}")


def learn_neighbour(index: int, address: IPAddress, mac: str, *, replace: bool = True) -> Request:
    """Add or replace a neighbour of a link that is known in advance (NTF_EXT_LEARNED). Without
    `replace` one that the link has is an error (EEXIST).

    The kernel asks for it like for any other when it is used, and believes the answer, but does not
    count it: gc_thresh3 bounds the other entries of all namespaces of the host together (arp(7)).
    It stays until it is deleted.
    """
    body = _NEIGHBOUR.pack(_FAMILIES[address.version][0], index, _NUD_STALE, _NTF_EXT_LEARNED, 0)
    body += attribute(_NDA_DST, address.packed) + attribute(_NDA_LLADDR, _bytes(mac))
    body += attribute(_NDA_PROTOCOL, bytes([_RTPROT_ENGINE]))
    return Request(_NEWNEIGH, CREATE | (REPLACE if replace else EXCL), body, f"neighbour {address}")


def delete_neighbour(index: int, address: IPAddress) -> Request:
    """Delete a neighbour of a link. A missing one is an error (ENOENT)."""
    body = _NEIGHBOUR.pack(_FAMILIES[address.version][0], index, 0, 0, 0) + attribute(_NDA_DST, address.packed)
    return Request(_DELNEIGH, 0, body, f"removal of neighbour {address}")


def add_forwarding(index: int, mac: str, node: ipaddress.IPv4Address) -> Request:
    """Have a VXLAN send frames for this MAC to that node. Replaces an entry of the MAC."""
    body = _NEIGHBOUR.pack(_AF_BRIDGE, index, _NUD_PERMANENT, _NTF_SELF, 0)
    body += attribute(_NDA_DST, node.packed) + attribute(_NDA_LLADDR, _bytes(mac))
    return Request(_NEWNEIGH, CREATE | REPLACE, body, f"forwarding to {node}")


def delete_forwarding(index: int, mac: str, node: ipaddress.IPv4Address) -> Request:
    """Undo `add_forwarding`. A missing entry is an error (ENOENT)."""
    body = _NEIGHBOUR.pack(_AF_BRIDGE, index, 0, _NTF_SELF, 0)
    body += attribute(_NDA_DST, node.packed) + attribute(_NDA_LLADDR, _bytes(mac))
    return Request(_DELNEIGH, 0, body, f"removal of forwarding to {node}")


def add_link_route(version: int, index: int) -> Request:
    """Add a default route of this IP version by the link of that index, which needs no gateway."""
    family = socket.AF_INET6 if version == 6 else socket.AF_INET
    scope = _RT_SCOPE_UNIVERSE if version == 6 else _RT_SCOPE_LINK
    body = _ROUTE.pack(*(family, 0, 0, 0, _RT_TABLE_MAIN, _RTPROT_BOOT, scope, _RTN_UNICAST, 0))
    return Request(_NEWROUTE, CREATE | EXCL, body + u32(_RTA_OIF, index), "default route by a link")


def add_default_route(gateway: IPAddress, index: int = 0, *, replace: bool = False) -> Request:
    """Add a default route by the link of that index, or (0) by the link whose subnet contains the
    gateway.

    `replace`: replaces an existing one.
    """
    family = socket.AF_INET6 if gateway.version == 6 else socket.AF_INET
    body = _ROUTE.pack(*(family, 0, 0, 0, _RT_TABLE_MAIN, _RTPROT_BOOT, _RT_SCOPE_UNIVERSE, _RTN_UNICAST, 0))
    body += attribute(_RTA_GATEWAY, gateway.packed)
    if index:
        body += u32(_RTA_OIF, index)
    flags = CREATE | (REPLACE if replace else EXCL)
    return Request(_NEWROUTE, flags, body, f"default route by {gateway}")


class Removals(Listener):
    """Notices about removed links of this network namespace.

    A filter in the kernel drops notices about links whose name begins with `veth`, so that starting
    and stopping containers wakes no thread.
    """

    def __init__(self) -> None:
        # The header, the link's fixed part, then its first attribute, which is its name.
        family, kind, name = HEADER.size, HEADER.size + _LINK.size + 2, HEADER.size + _LINK.size + 4
        program = (
            (0x28, 0, 0, 4),
            (0x15, 0, 7, as_loaded(_DELLINK)),
            (0x30, 0, 0, family),
            (0x15, 0, 5, socket.AF_UNSPEC),
            (0x28, 0, 0, kind),
            (0x15, 0, 2, as_loaded(_IFLA_IFNAME)),
            (0x20, 0, 0, name),
            (0x15, 1, 0, int.from_bytes(b"veth", "big")),
            (0x06, 0, 0, 0xFFFF),
            (0x06, 0, 0, 0),
        )
        super().__init__(socket.NETLINK_ROUTE, program, _GROUP_LINK)

    def take(self) -> set[int] | None:
        """Indexes of the links that were removed since the last call. None if notices were lost."""
        notices, lost = self._arrived()
        return None if lost else {_LINK.unpack_from(each, HEADER.size)[2] for each in notices}


class Disturbances(Listener):
    """Notices that another program has removed or switched off a link, or removed a route, address
    or neighbour, in the network namespace of the thread that makes this.

    As with `Removals`, links whose name begins with `veth` wake no thread. Neither do changes of
    routes, addresses and neighbours by the kernel itself and by the socket `own`.
    """

    def __init__(self, own: RouteSocket) -> None:
        kind, name = HEADER.size + _LINK.size + 2, HEADER.size + _LINK.size + 4
        flags = HEADER.size + 8 + (3 if sys.byteorder == "big" else 0)
        program = (
            (0x28, 0, 0, 4),
            (0x15, 7, 0, as_loaded(_DELLINK)),
            (0x15, 4, 0, as_loaded(_NEWLINK)),
            (0x15, 9, 0, as_loaded(_DELROUTE)),
            # the removal of a neighbour is a change first, and then the kernel's
            (0x15, 8, 0, as_loaded(_NEWNEIGH)),
            (0x15, 7, 0, as_loaded(_DELADDR)),
            (0x15, 6, 10, as_loaded(_DELNEIGH)),
            (0x30, 0, 0, flags),
            (0x45, 8, 0, _IFF_UP),
            (0x28, 0, 0, kind),
            (0x15, 0, 6, as_loaded(_IFLA_IFNAME)),
            (0x20, 0, 0, name),
            (0x15, 4, 3, int.from_bytes(b"veth", "big")),
            # the port of the socket that made the change
            (0x20, 0, 0, 12),
            (0x15, 2, 0, 0),
            (0x15, 1, 0, int.from_bytes(struct.pack("=I", own.port), "big")),
            (0x06, 0, 0, 0xFFFF),
            (0x06, 0, 0, 0),
        )
        groups = _GROUP_LINK, _GROUP_NEIGHBOUR, _GROUP_ADDRESS, _GROUP_ROUTE
        super().__init__(socket.NETLINK_ROUTE, program, *groups)

    def take(self) -> bool:
        """Take the waiting notices. Returns True if there was one, or if some were lost."""
        notices, lost = self._arrived()
        return bool(notices) or lost


# --- answers --------------------------------------------------------------------------------------


def _link(body: bytes) -> Link:
    _, _, index, flags, _ = _LINK.unpack_from(body)
    attributes = read_attributes(body, _LINK.size)
    kind = read_attributes(attributes.get(_IFLA_LINKINFO, b"")).get(_IFLA_INFO_KIND, b"")
    master = attributes.get(_IFLA_MASTER)
    return Link(
        index,
        read_text(attributes.get(_IFLA_IFNAME, b"")),
        read_text(kind),
        struct.unpack("=I", master)[0] if master is not None else 0,
        bool(flags & _IFF_UP),
        read_text(attributes.get(_IFLA_IFALIAS, b"")),
        attributes.get(_IFLA_ADDRESS, b"").hex(":"),
        struct.unpack("=I", attributes.get(_IFLA_MTU, bytes(4)))[0],
    )


def _span(address: int, prefix: int, bits: int) -> tuple[int, int]:
    rest = (1 << bits - prefix) - 1
    return address & ~rest, address | rest


def _mac(address: str) -> bytes:
    return attribute(_IFLA_ADDRESS, _bytes(address))


def _bytes(mac: str) -> bytes:
    return bytes.fromhex(mac.replace(":", ""))
