"""Every request of the engine compared, byte for byte, with the same request by pyroute2."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface
from typing import Any

import pytest
from pyroute2.netlink.nfnetlink.nfctsocket import nfct_msg
from pyroute2.netlink.nfnetlink.nftsocket import nft_set_elem_list_msg
from pyroute2.netlink.rtnl.fibmsg import fibmsg
from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg
from pyroute2.netlink.rtnl.ndmsg import ndmsg
from pyroute2.netlink.rtnl.rtmsg import rtmsg

from engine.system.netlink import codec, conntrack, nft, rtnl
from engine.system.netlink.codec import ACK, CREATE, EXCL, REPLACE, REQUEST, Request
from engine.system.netlink.nft import Element

NEWLINK, DELLINK, NEWADDR, DELADDR, NEWROUTE = 16, 17, 20, 21, 24
NEW = CREATE | EXCL
NESTED = 0x8000
VETH_INFO_PEER, LINK_SIZE = 1, 16

Attributes = list[tuple[str, Any]]


def nested(*attributes: tuple[str, Any]) -> dict[str, Attributes]:
    return {"attrs": [*attributes]}


def theirs(cls: Any, kind: int, flags: int, fields: dict[str, Any], *attributes: tuple[str, Any]) -> bytes:
    message = cls()
    for name, value in fields.items():
        message[name] = value
    message["attrs"] = [*attributes]
    message["header"].update(type=kind, flags=REQUEST | ACK | flags, sequence_number=7, pid=0)
    message.encode()
    return bytes(message.data)


def ours(request: Request) -> bytes:
    return codec.message(request, 7, ACK)


def without_flags(message: bytes, fixed: int) -> bytes:
    """The message without NLA_F_NESTED, which pyroute2 sets on few of the attributes that hold
    others.

    `fixed` is the size of what stands before the attributes, after the header.
    """
    start = codec.HEADER.size + fixed
    return message[:start] + _attributes(message[start:])


def _attributes(data: bytes) -> bytes:
    out, position = b"", 0
    while position < len(data):
        size, kind = struct.unpack_from("=HH", data, position)
        value = data[position + 4 : position + size]
        if kind & NESTED:
            kind &= ~NESTED
            before = LINK_SIZE if len(value) > LINK_SIZE and value[:LINK_SIZE] == bytes(LINK_SIZE) else 0
            value = value[:before] + _attributes(value[before:])
        out += struct.pack("=HH", size, kind) + value + bytes(-size & 3)
        position += size + 3 & ~3
    return out


INFO = "IFLA_LINKINFO"
KIND = "IFLA_INFO_KIND"
DATA = "IFLA_INFO_DATA"
MAC = "02:42:01:02:03:04"


def link(kind: int, flags: int, *attributes: tuple[str, Any], up: tuple[int, int] = (0, 0), index: int = 0) -> bytes:
    fields = {"family": 0, "index": index, "flags": up[0], "change": up[1]}
    return theirs(ifinfmsg, kind, flags, fields, *attributes)


LINKS: dict[str, tuple[Callable[[], Request], Callable[[], bytes]]] = {
    "bridge": (
        lambda: rtnl.create_bridge("br-0", mac=MAC, mtu=1400),
        lambda: link(
            NEWLINK,
            NEW,
            ("IFLA_IFNAME", "br-0"),
            ("IFLA_ADDRESS", MAC),
            ("IFLA_MTU", 1400),
            (INFO, nested((KIND, "bridge"))),
        ),
    ),
    "veth": (
        lambda: rtnl.create_veth("veth123", "eth0", 9, mtu=1400),
        lambda: link(
            NEWLINK,
            NEW,
            ("IFLA_IFNAME", "veth123"),
            ("IFLA_MTU", 1400),
            (
                INFO,
                nested(
                    (KIND, "veth"),
                    (
                        DATA,
                        nested(
                            (
                                "VETH_INFO_PEER",
                                nested(("IFLA_IFNAME", "eth0"), ("IFLA_NET_NS_FD", 9), ("IFLA_MTU", 1400)),
                            )
                        ),
                    ),
                ),
            ),
        ),
    ),
    "veth with MACs": (
        lambda: rtnl.create_veth("veth123", "eth0", 9, mac=MAC, peer_mac="02:42:01:02:03:05"),
        lambda: link(
            NEWLINK,
            NEW,
            ("IFLA_IFNAME", "veth123"),
            ("IFLA_ADDRESS", MAC),
            (
                INFO,
                nested(
                    (KIND, "veth"),
                    (
                        DATA,
                        nested(
                            (
                                "VETH_INFO_PEER",
                                nested(
                                    ("IFLA_IFNAME", "eth0"),
                                    ("IFLA_NET_NS_FD", 9),
                                    ("IFLA_ADDRESS", "02:42:01:02:03:05"),
                                ),
                            )
                        ),
                    ),
                ),
            ),
        ),
    ),
    "vxlan": (
        lambda: rtnl.create_vxlan(
            "vxlan0", namespace=9, number=4097, port=4789, local=IPv4Address("10.1.2.3"), mac=MAC, mtu=1450
        ),
        lambda: link(
            NEWLINK,
            NEW,
            ("IFLA_IFNAME", "vxlan0"),
            ("IFLA_ADDRESS", MAC),
            ("IFLA_MTU", 1450),
            ("IFLA_NET_NS_FD", 9),
            (
                INFO,
                nested(
                    (KIND, "vxlan"),
                    (
                        DATA,
                        nested(
                            ("IFLA_VXLAN_ID", 4097),
                            ("IFLA_VXLAN_LOCAL", "10.1.2.3"),
                            ("IFLA_VXLAN_LEARNING", 0),
                            ("IFLA_VXLAN_PORT", 4789),
                            ("IFLA_VXLAN_UDP_CSUM", 0),
                        ),
                    ),
                ),
            ),
        ),
    ),
    "macvlan": (
        lambda: rtnl.create_macvlan("eth1", parent=3, namespace=9, mode="vepa", mac=MAC, mtu=1400),
        lambda: link(
            NEWLINK,
            NEW,
            ("IFLA_IFNAME", "eth1"),
            ("IFLA_ADDRESS", MAC),
            ("IFLA_LINK", 3),
            ("IFLA_NET_NS_FD", 9),
            ("IFLA_MTU", 1400),
            (INFO, nested((KIND, "macvlan"), (DATA, nested(("IFLA_MACVLAN_MODE", "vepa"))))),
        ),
    ),
    "ipvlan": (
        lambda: rtnl.create_ipvlan("eth1", parent=3, namespace=9, mode="l3s", flag="bridge", mtu=1400),
        lambda: link(
            NEWLINK,
            NEW,
            ("IFLA_IFNAME", "eth1"),
            ("IFLA_LINK", 3),
            ("IFLA_NET_NS_FD", 9),
            ("IFLA_MTU", 1400),
            (INFO, nested((KIND, "ipvlan"), (DATA, nested(("IFLA_IPVLAN_MODE", 2))))),
        ),
    ),
    "name": (
        lambda: rtnl.rename_link(7, "front"),
        lambda: link(NEWLINK, 0, ("IFLA_IFNAME", "front"), index=7),
    ),
    "move": (
        lambda: rtnl.move_link(7, 9, "eth1"),
        lambda: link(NEWLINK, 0, ("IFLA_IFNAME", "eth1"), ("IFLA_NET_NS_FD", 9), index=7),
    ),
    "change": (
        lambda: rtnl.change_link(
            "veth1", up=True, master=70000, mac=MAC, mtu=1400, alias="words", without_ipv6_address=True
        ),
        lambda: link(
            NEWLINK,
            0,
            ("IFLA_IFNAME", "veth1"),
            ("IFLA_ADDRESS", MAC),
            ("IFLA_MTU", 1400),
            ("IFLA_IFALIAS", "words"),
            ("IFLA_MASTER", 70000),
            ("IFLA_AF_SPEC", nested(("AF_INET6", nested(("IFLA_INET6_ADDR_GEN_MODE", 1))))),
            up=(1, 1),
        ),
    ),
    "down": (
        lambda: rtnl.change_link("veth1", up=False),
        lambda: link(NEWLINK, 0, ("IFLA_IFNAME", "veth1"), up=(0, 1)),
    ),
    "port": (
        lambda: rtnl.change_port("veth1", hairpin=True, isolated=False),
        lambda: link(
            NEWLINK,
            0,
            ("IFLA_IFNAME", "veth1"),
            (
                INFO,
                nested(
                    ("IFLA_INFO_SLAVE_KIND", "bridge"),
                    ("IFLA_INFO_SLAVE_DATA", nested(("IFLA_BRPORT_MODE", 1), ("IFLA_BRPORT_ISOLATED", 0))),
                ),
            ),
        ),
    ),
    "group": (
        lambda: rtnl.set_group("veth1", 77),
        lambda: link(NEWLINK, 0, ("IFLA_IFNAME", "veth1"), ("IFLA_GROUP", 77)),
    ),
    "removal of a group": (
        lambda: rtnl.delete_group(77),
        lambda: link(DELLINK, 0, ("IFLA_GROUP", 77)),
    ),
    "removal": (
        lambda: rtnl.delete_link("veth1"),
        lambda: link(DELLINK, 0, ("IFLA_IFNAME", "veth1")),
    ),
}


@pytest.mark.parametrize("name", LINKS)
def test_links(name: str) -> None:
    mine, pyroute2s = LINKS[name]
    assert without_flags(ours(mine()), 16) == without_flags(pyroute2s(), 16)


ADDRESSES: dict[str, tuple[Callable[[], Request], Callable[[], bytes]]] = {
    "IPv4": (
        lambda: rtnl.add_address(5, IPv4Interface("10.1.2.3/20")),
        lambda: theirs(
            ifaddrmsg,
            NEWADDR,
            NEW,
            {"family": socket.AF_INET, "prefixlen": 20, "index": 5},
            ("IFA_LOCAL", "10.1.2.3"),
            ("IFA_ADDRESS", "10.1.2.3"),
            ("IFA_BROADCAST", "10.1.15.255"),
        ),
    ),
    "IPv4 without a broadcast address": (
        lambda: rtnl.add_address(5, IPv4Interface("10.1.2.3/31")),
        lambda: theirs(
            ifaddrmsg,
            NEWADDR,
            NEW,
            {"family": socket.AF_INET, "prefixlen": 31, "index": 5},
            ("IFA_LOCAL", "10.1.2.3"),
            ("IFA_ADDRESS", "10.1.2.3"),
        ),
    ),
    "IPv4 without a route": (
        lambda: rtnl.add_address(5, IPv4Interface("10.1.2.3/20"), route=False),
        lambda: theirs(
            ifaddrmsg,
            NEWADDR,
            NEW,
            {"family": socket.AF_INET, "prefixlen": 20, "index": 5},
            ("IFA_LOCAL", "10.1.2.3"),
            ("IFA_ADDRESS", "10.1.2.3"),
            ("IFA_BROADCAST", "10.1.15.255"),
            ("IFA_FLAGS", 0x200),
        ),
    ),
    "IPv6": (
        lambda: rtnl.add_address(5, IPv6Interface("fd00::2/64")),
        lambda: theirs(
            ifaddrmsg,
            NEWADDR,
            NEW,
            {"family": socket.AF_INET6, "prefixlen": 64, "index": 5, "flags": 2},
            ("IFA_ADDRESS", "fd00::2"),
        ),
    ),
    "removal": (
        lambda: rtnl.delete_address(5, IPv4Interface("10.1.2.3/20")),
        lambda: theirs(
            ifaddrmsg,
            DELADDR,
            0,
            {"family": socket.AF_INET, "prefixlen": 20, "index": 5},
            ("IFA_LOCAL", "10.1.2.3"),
            ("IFA_ADDRESS", "10.1.2.3"),
        ),
    ),
    "removal of IPv6": (
        lambda: rtnl.delete_address(5, IPv6Interface("fd00::2/64")),
        lambda: theirs(
            ifaddrmsg,
            DELADDR,
            0,
            {"family": socket.AF_INET6, "prefixlen": 64, "index": 5},
            ("IFA_LOCAL", "fd00::2"),
            ("IFA_ADDRESS", "fd00::2"),
        ),
    ),
}


def test_flags_of_ipvlan() -> None:
    """pyroute2 does not know them (linux/if_link.h: IFLA_IPVLAN_FLAGS is 2)."""
    vepa = rtnl.create_ipvlan("eth1", parent=3, namespace=9, mode="l2", flag="vepa")
    information = codec.read_attributes(codec.read_attributes(vepa.body, LINK_SIZE)[18])
    assert codec.read_attributes(information[2]) == {1: bytes(2), 2: struct.pack("=H", 2)}


@pytest.mark.parametrize("name", ADDRESSES)
def test_addresses(name: str) -> None:
    mine, pyroute2s = ADDRESSES[name]
    assert ours(mine()) == pyroute2s()


@pytest.mark.parametrize(
    ("gateway", "family"), [(IPv4Address("10.1.0.1"), socket.AF_INET), (IPv6Address("fd00::1"), socket.AF_INET6)]
)
@pytest.mark.parametrize(("index", "replace"), [(5, False), (0, True)])
def test_routes(gateway: IPv4Address | IPv6Address, family: int, index: int, replace: bool) -> None:
    fields = {"family": family, "table": 254, "proto": 3, "scope": 0, "type": 1}
    attributes: Attributes = [("RTA_GATEWAY", str(gateway))]
    if index:
        attributes.append(("RTA_OIF", index))
    wanted = theirs(rtmsg, NEWROUTE, CREATE | (REPLACE if replace else EXCL), fields, *attributes)
    assert ours(rtnl.add_default_route(gateway, index, replace=replace)) == wanted


@pytest.mark.parametrize(("version", "family", "scope"), [(4, socket.AF_INET, 253), (6, socket.AF_INET6, 0)])
def test_route_by_a_link(version: int, family: int, scope: int) -> None:
    fields = {"family": family, "dst_len": 0, "table": 254, "proto": 3, "scope": scope, "type": 1}
    wanted = theirs(rtmsg, NEWROUTE, CREATE | EXCL, fields, ("RTA_OIF", 7))
    assert ours(rtnl.add_link_route(version, 7)) == wanted


ROUTE = IPv4Network("10.1.0.0/20")
NODE = IPv4Address("192.168.7.2")
PERMANENT, SELF, BRIDGE = 0x80, 2, 7


def route(kind: int, flags: int, fields: dict[str, int], *attributes: tuple[str, Any]) -> bytes:
    whole = {"family": socket.AF_INET, "dst_len": 20, "table": 254} | fields
    return theirs(rtmsg, kind, flags, whole, ("RTA_DST", "10.1.0.0"), *attributes)


def neighbour(kind: int, flags: int, fields: dict[str, int], *attributes: tuple[str, Any]) -> bytes:
    return theirs(ndmsg, kind, flags, {"family": socket.AF_INET, "ifindex": 5} | fields, *attributes)


ROUTES: dict[str, tuple[Callable[[], Request], Callable[[], bytes]]] = {
    "route to neighbours": (
        lambda: rtnl.add_route(ROUTE, 5),
        lambda: route(NEWROUTE, CREATE | REPLACE, {"proto": 3, "scope": 253, "type": 1, "flags": 0}, ("RTA_OIF", 5)),
    ),
    "route by a node": (
        lambda: rtnl.add_route(ROUTE, 5, NODE),
        lambda: route(
            NEWROUTE,
            CREATE | REPLACE,
            {"proto": 3, "scope": 0, "type": 1, "flags": 4},
            ("RTA_GATEWAY", "192.168.7.2"),
            ("RTA_OIF", 5),
        ),
    ),
    "route of a table": (
        lambda: rtnl.add_route(ROUTE, 5, table=1000),
        lambda: route(
            NEWROUTE,
            CREATE | REPLACE,
            {"proto": 3, "scope": 253, "type": 1, "table": 1000 & 255},
            ("RTA_OIF", 5),
            ("RTA_TABLE", 1000),
        ),
    ),
    "unreachable": (
        lambda: rtnl.add_unreachable_route(ROUTE),
        lambda: route(NEWROUTE, CREATE | REPLACE, {"proto": 3, "scope": 0, "type": 7}),
    ),
    "removal of a route": (
        lambda: rtnl.delete_route(ROUTE, 5),
        lambda: route(25, 0, {"proto": 0, "scope": 255, "type": 0}, ("RTA_OIF", 5)),
    ),
    "neighbour": (
        lambda: rtnl.add_neighbour(5, NODE, MAC),
        lambda: neighbour(28, CREATE | REPLACE, {"state": PERMANENT}, ("NDA_DST", str(NODE)), ("NDA_LLADDR", MAC)),
    ),
    "removal of a neighbour": (
        lambda: rtnl.delete_neighbour(5, NODE),
        lambda: neighbour(29, 0, {}, ("NDA_DST", str(NODE))),
    ),
    "neighbour known in advance": (
        lambda: rtnl.learn_neighbour(5, IPv6Address("fd00::2"), MAC),
        lambda: neighbour(
            28,
            CREATE | REPLACE,
            {"family": socket.AF_INET6, "state": 4, "flags": 0x10},
            ("NDA_DST", "fd00::2"),
            ("NDA_LLADDR", MAC),
            ("NDA_PROTOCOL", 0xE9),
        ),
    ),
    "forwarding": (
        lambda: rtnl.add_forwarding(5, MAC, NODE),
        lambda: neighbour(
            28,
            CREATE | REPLACE,
            {"family": BRIDGE, "state": PERMANENT, "flags": SELF},
            ("NDA_DST", str(NODE)),
            ("NDA_LLADDR", MAC),
        ),
    ),
    "removal of forwarding": (
        lambda: rtnl.delete_forwarding(5, MAC, NODE),
        lambda: neighbour(29, 0, {"family": BRIDGE, "flags": SELF}, ("NDA_DST", str(NODE)), ("NDA_LLADDR", MAC)),
    ),
}


@pytest.mark.parametrize("name", ROUTES)
def test_routes_and_neighbours(name: str) -> None:
    mine, pyroute2s = ROUTES[name]
    assert ours(mine()) == pyroute2s()


RULES: dict[str, tuple[dict[str, Any], dict[str, int], Attributes]] = {
    "source": ({"source": IPv4Address("10.255.0.5")}, {"src_len": 32}, [("FRA_SRC", "10.255.0.5")]),
    "mark": ({"marked": 7}, {}, [("FRA_FWMARK", 7)]),
    "any mark": ({"marked": None}, {"flags": 2}, [("FRA_FWMARK", 0)]),
    "link": ({"by": "vxlan0"}, {}, [("FRA_OIFNAME", "vxlan0")]),
}


@pytest.mark.parametrize("name", RULES)
def test_rules_of_routing(name: str) -> None:
    arguments, fields, selector = RULES[name]
    before = [each for each in selector if each[0] == "FRA_SRC"]
    between = [each for each in selector if each[0] == "FRA_FWMARK"]
    behind = [("FRA_FWMASK", 0xFFFFFFFF)] if between else [each for each in selector if each[0] == "FRA_OIFNAME"]
    wanted = theirs(
        fibmsg,
        32,
        NEW,
        {"family": socket.AF_INET, "table": 100, "action": 1} | fields,
        *before,
        ("FRA_PRIORITY", 90),
        *between,
        ("FRA_TABLE", 100),
        *behind,
    )
    assert ours(rtnl.add_rule(table=100, priority=90, **arguments)) == wanted


def test_link_is_read_as_pyroute2_writes_it() -> None:
    message = link(
        NEWLINK,
        0,
        ("IFLA_IFNAME", "br0"),
        ("IFLA_ADDRESS", MAC),
        ("IFLA_MTU", 1400),
        ("IFLA_MASTER", 70000),
        ("IFLA_IFALIAS", "alias"),
        (INFO, nested((KIND, "bridge"))),
        up=(1, 1),
    )
    ((_, _, _, body),) = codec.read_messages(message)
    assert rtnl._link(body) == rtnl.Link(0, "br0", "bridge", 70000, True, "alias", MAC, 1400)


def elements(kind: int, flags: int, name: str, listed: list[Element]) -> bytes:
    parts = []
    for each in listed:
        values = [("KEY", each.key), ("KEY_END", each.end), ("DATA", each.data)]
        parts.append(
            nested(*((f"NFTA_SET_ELEM_{part}", nested(("NFTA_DATA_VALUE", value))) for part, value in values if value))
        )
    message = theirs(
        nft_set_elem_list_msg,
        10 << 8 | kind,
        flags,
        {"nfgen_family": 1, "version": 0, "res_id": 0},
        ("NFTA_SET_ELEM_LIST_TABLE", "engined-br0"),
        ("NFTA_SET_ELEM_LIST_SET", name),
        ("NFTA_SET_ELEM_LIST_ELEMENTS", parts),
    )
    # pyroute2 counts the elements in their type, where nf_tables.h and libnftables say
    # NFTA_LIST_ELEM (1) for each.
    at = message.index(codec.read_attributes(message, 20)[3]) if listed else 0
    out = bytearray(message)
    while at < len(out):
        size, _ = struct.unpack_from("=HH", out, at)
        struct.pack_into("=H", out, at + 2, 1)
        at += size + 3 & ~3
    return bytes(out)


def test_elements() -> None:
    """Keys alone, maps, intervals, sizes that need padding; a set to a message."""
    ports = [Element(bytes((6, 0, 0, 0, 0, port, 0, 0)), b"", b"\x0a\0\0\2\0\x50\0\0") for port in (80, 81)]
    spans = [Element(b"\x0a\0\0\0" + b"br0".ljust(16, b"\0"), b"\x0a\0\0\xff" + b"br0".ljust(16, b"\0"))]
    numbers = [Element(b"\0\x50")]
    batch = nft.transaction(
        "engined-br0",
        [("any4", each) for each in ports],
        [("hairpin4", spans[0]), ("relayed_anywhere", numbers[0])],
        "x",
    )
    begin, *changes, end = batch
    assert [without_flags(codec.message(each, 7, 0), 4) for each in changes] == [
        without_flags(elements(14, 0, "any4", ports), 4),
        without_flags(elements(12, CREATE, "hairpin4", spans), 4),
        without_flags(elements(12, CREATE, "relayed_anywhere", numbers), 4),
    ]
    # nfnetlink(7) has no struct for them in pyroute2: nfgenmsg with the subsystem (nftables, 10) in
    # network byte order.
    assert codec.message(begin, 7, 0) == struct.pack("=IHHIIBBH", 20, 0x10, REQUEST, 7, 0, 0, 0, socket.htons(10))
    assert codec.message(end, 7, 0) == struct.pack("=IHHIIBBH", 20, 0x11, REQUEST, 7, 0, 0, 0, socket.htons(10))


def test_nothing_is_no_transaction() -> None:
    assert nft.transaction("t", (), (), "x") == []


@pytest.mark.parametrize(("version", "family"), [(4, socket.AF_INET), (6, socket.AF_INET6)])
@pytest.mark.parametrize("ports", [[53], [53, 54]])
def test_list_of_connections(version: int, family: int, ports: list[int]) -> None:
    protocol: Attributes = [("CTA_PROTO_NUM", 17)]
    flags = 1 << 3
    if len(ports) == 1:
        protocol.append(("CTA_PROTO_DST_PORT", 53))
        flags |= 1 << 5
    wanted = theirs(
        nfct_msg,
        1 << 8 | 1,
        0,
        {"nfgen_family": family, "version": 0, "res_id": 0},
        ("CTA_TUPLE_ORIG", nested(("CTA_TUPLE_PROTO", nested(*protocol)))),
        ("CTA_FILTER", nested(("CTA_FILTER_ORIG_FLAGS", flags), ("CTA_FILTER_REPLY_FLAGS", 0))),
    )
    assert without_flags(ours(conntrack.udp_list(version, ports)), 4) == without_flags(wanted, 4)


def test_removal_of_a_connection() -> None:
    """The request has the entry's own tuple, id and zone, unchanged."""
    tuple_ = nested(
        ("CTA_TUPLE_IP", nested(("CTA_IP_V4_SRC", "10.0.0.1"), ("CTA_IP_V4_DST", "10.0.0.2"))),
        ("CTA_TUPLE_PROTO", nested(("CTA_PROTO_NUM", 17), ("CTA_PROTO_SRC_PORT", 1), ("CTA_PROTO_DST_PORT", 53))),
    )
    wanted = theirs(
        nfct_msg,
        1 << 8 | 2,
        0,
        {"nfgen_family": socket.AF_INET, "version": 0, "res_id": 0},
        ("CTA_TUPLE_ORIG", tuple_),
        ("CTA_ID", 4711),
        ("CTA_ZONE", 3),
    )
    ((_, _, _, body),) = codec.read_messages(wanted)
    entry = codec.read_attributes(body, 4)
    assert without_flags(ours(conntrack.removal(4, entry)), 4) == without_flags(wanted, 4)
