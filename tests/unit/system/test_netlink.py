"""The encoder against pyroute2's decoder, and the reader against messages built by hand and cut at random."""

from __future__ import annotations

import struct
from ipaddress import IPv4Address, IPv4Interface
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.system import netlink
from engine.system.netlink import NetlinkError, Request

pyroute2 = pytest.importorskip("pyroute2")

from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg  # noqa: E402
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg  # noqa: E402
from pyroute2.netlink.rtnl.rtmsg import rtmsg  # noqa: E402


def decoded(request: Request, kind: Any) -> Any:
    message = kind(netlink._message(request, 7, 4))
    message.decode()
    assert message["header"]["sequence_number"] == 7
    assert message["header"]["type"] == request.type
    assert message["header"]["flags"] == request.flags | 5
    assert message["header"]["length"] % 4 in (0, 1, 2, 3)
    return message


def test_veth() -> None:
    message = decoded(netlink.create_veth("veth123", "eth0", 9, mtu=1400), ifinfmsg)
    assert message.get_attr("IFLA_IFNAME") == "veth123"
    assert message.get_attr("IFLA_MTU") == 1400
    info = message.get_attr("IFLA_LINKINFO")
    assert info.get_attr("IFLA_INFO_KIND") == "veth"
    peer = info.get_attr("IFLA_INFO_DATA").get_attr("VETH_INFO_PEER")
    assert peer.get_attr("IFLA_IFNAME") == "eth0"
    assert peer.get_attr("IFLA_NET_NS_FD") == 9


def test_links() -> None:
    message = decoded(netlink.create_bridge("br", mac="02:42:01:02:03:04"), ifinfmsg)
    assert message.get_attr("IFLA_ADDRESS") == "02:42:01:02:03:04"
    assert message.get_attr("IFLA_LINKINFO").get_attr("IFLA_INFO_KIND") == "bridge"
    message = decoded(netlink.change_link("br", up=True, master=3, alias="words", without_ipv6_address=True), ifinfmsg)
    assert (message["flags"], message["change"]) == (1, 1)
    assert message.get_attr("IFLA_MASTER") == 3
    assert message.get_attr("IFLA_IFALIAS") == "words"
    message = decoded(netlink.change_link("br", up=False), ifinfmsg)
    assert (message["flags"], message["change"]) == (0, 1)
    assert decoded(netlink.delete_link("br"), ifinfmsg).get_attr("IFLA_IFNAME") == "br"


def test_parents_of_macvlans() -> None:
    message = decoded(netlink.create_vlan("eth0.10", parent=3, number=10), ifinfmsg)
    assert (message.get_attr("IFLA_IFNAME"), message.get_attr("IFLA_LINK")) == ("eth0.10", 3)
    info = message.get_attr("IFLA_LINKINFO")
    assert info.get_attr("IFLA_INFO_KIND") == "vlan"
    assert info.get_attr("IFLA_INFO_DATA").get_attr("IFLA_VLAN_ID") == 10
    message = decoded(netlink.create_dummy("dm-0"), ifinfmsg)
    assert message.get_attr("IFLA_LINKINFO").get_attr("IFLA_INFO_KIND") == "dummy"


def test_addresses_and_routes() -> None:
    message = decoded(netlink.add_address(5, IPv4Interface("10.1.2.3/20")), ifaddrmsg)
    assert (message["index"], message["prefixlen"], message["family"]) == (5, 20, 2)
    assert message.get_attr("IFA_LOCAL") == message.get_attr("IFA_ADDRESS") == "10.1.2.3"
    assert message.get_attr("IFA_BROADCAST") == "10.1.15.255"
    message = decoded(netlink.add_default_route(IPv4Address("10.1.0.1"), 5), rtmsg)
    assert message.get_attr("RTA_GATEWAY") == "10.1.0.1"
    assert message.get_attr("RTA_OIF") == 5
    assert (message["dst_len"], message["table"], message["type"]) == (0, 254, 1)


def test_link_is_read_as_pyroute2_writes_it() -> None:
    message = ifinfmsg()
    message["index"], message["flags"] = 12, 1
    message["attrs"] = [
        ("IFLA_IFNAME", "br0"),
        ("IFLA_ADDRESS", "02:00:00:00:00:01"),
        ("IFLA_MASTER", 4),
        ("IFLA_IFALIAS", "alias"),
        ("IFLA_LINKINFO", {"attrs": [("IFLA_INFO_KIND", "bridge")]}),
    ]
    message.encode()
    ((_, _, _, body),) = netlink.read_messages(bytes(message.data))
    assert netlink._link(body) == netlink.Link(12, "br0", "bridge", 4, True, "alias", "02:00:00:00:00:01")


def test_errors() -> None:
    assert netlink.refusal(struct.pack("=i", 0) + bytes(16), 0x100, "x") is None
    failure = netlink.refusal(struct.pack("=i", -17) + bytes(16), 0x100, "link a")
    assert isinstance(failure, NetlinkError)
    assert failure.errno == 17
    assert str(failure) == "[Errno 17] link a: File exists"
    words = netlink.attribute(1, b"what is wrong\0")
    failure = netlink.refusal(struct.pack("=i", -22) + bytes(16) + words, 0x300, "link a")
    assert str(failure) == "[Errno 22] link a: Invalid argument (what is wrong)"
    request = struct.pack("=IHHII", 20, 16, 5, 1, 0) + b"body"
    failure = netlink.refusal(struct.pack("=i", -22) + request + words, 0x200, "link a")
    assert str(failure).endswith("(what is wrong)")


def test_cut_messages_are_refused() -> None:
    with pytest.raises(NetlinkError, match="cut off"):
        list(netlink.read_messages(struct.pack("=IHHII", 50, 2, 0, 1, 0) + bytes(10)))
    with pytest.raises(NetlinkError, match="cut off"):
        list(netlink.read_messages(struct.pack("=IHHII", 3, 2, 0, 1, 0)))


@given(st.binary(max_size=300))
def test_attributes_of_anything(data: bytes) -> None:
    for value in netlink.read_attributes(data, 0).values():
        assert value in data or not value
