"""What network plugins are sent, and their answers checked."""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import EngineError, ServerError
from engine.networks import network
from engine.networks.network import NetworkRecord
from engine.networks.publishing import Request
from engine.networks.remote import driver as remote
from engine.networks.remote.driver import Route
from engine.wire.containers import EndpointSettings, PortBinding
from engine.wire.network_plugins import EndpointJoined, FilledInterface
from engine.wire.networks import IPAM, IPAMConfig, NetworkCreate

WHERE = "network far, container c"


def answer(kind: Any, **fields: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(fields), type=kind)


# --- ports ----------------------------------------------------------------------------------------


def test_ports() -> None:
    bindings = {
        "80/tcp": [PortBinding(host_ip="127.0.0.1", host_port="8080"), PortBinding()],
        "53/udp": [PortBinding(host_port="5300-5310")],
    }
    options = remote.port_options(Request(("80/tcp", "9000-9001/tcp"), bindings, publish_all=True))
    assert options["com.docker.network.endpoint.exposedports"] == [
        {"Proto": 6, "Port": 80},
        {"Proto": 6, "Port": 9000},
        {"Proto": 6, "Port": 9001},
        {"Proto": 17, "Port": 53},
    ]
    assert options["com.docker.network.portmap"] == [
        {"Proto": proto, "IP": "", "Port": port, "HostIP": ip, "HostPort": first, "HostPortEnd": last}
        for proto, port, ip, first, last in (
            (6, 80, "127.0.0.1", 8080, 8080),
            (6, 80, "", 0, 0),
            (17, 53, "", 5300, 5310),
            (6, 9000, "", 0, 0),
            (6, 9001, "", 0, 0),
        )
    ]


# --- CreateEndpoint -------------------------------------------------------------------------------


def test_a_plugin_fills_what_is_empty() -> None:
    asked = EndpointSettings(ip_address="10.0.0.2", ip_prefix_len=24)
    assert remote.filled(WHERE, asked, None) is asked
    assert remote.filled(WHERE, asked, answer(FilledInterface)) == asked
    found = remote.filled(
        WHERE, asked, answer(FilledInterface, MacAddress="02-00-00-00-00-0A", AddressIPv6="FD00::7/64", Address=None)
    )
    assert (found.mac_address, found.global_ipv6_address, found.global_ipv6_prefix_len, found.ip_address) == (
        *("02:00:00:00:00:0a", "fd00::7", 64),
        "10.0.0.2",
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"Address": "10.0.0.3/24"}, "driver modified interface address: it is 10.0.0.2"),
        ({"Address": "10.0.0.2/24"}, "driver modified interface address"),
        ({"MacAddress": "02:00:00:00:00:02"}, "driver modified interface MAC address: it is 02:00:00:00:00:01"),
        ({"AddressIPv6": "fd00::1"}, "'fd00::1' is invalid: it has no prefix length"),
        ({"AddressIPv6": "10.0.0.3/24"}, "it is not of IPv6"),
        ({"AddressIPv6": "x/64"}, "'x/64' is invalid"),
    ],
)
def test_wrong_fillings(fields: dict[str, str], words: str) -> None:
    asked = EndpointSettings(ip_address="10.0.0.2", ip_prefix_len=24, mac_address="02:00:00:00:00:01")
    with pytest.raises(ServerError) as raised:
        remote.filled(WHERE, asked, answer(FilledInterface, **fields))
    assert raised.value.message.startswith(f"{WHERE}: ") and words in raised.value.message


def test_a_multicast_mac_is_refused() -> None:
    with pytest.raises(ServerError, match="MacAddress"):
        remote.filled(WHERE, EndpointSettings(), answer(FilledInterface, MacAddress="01:00:00:00:00:01"))


# --- Join -----------------------------------------------------------------------------------------


def test_an_answer_to_a_join() -> None:
    found = remote.joined(
        WHERE,
        answer(
            EndpointJoined,
            InterfaceName={"SrcName": "veth7", "DstPrefix": "net"},
            Gateway="10.0.0.1",
            GatewayIPv6="fd00::1",
            StaticRoutes=[
                {"Destination": "10.1.0.7/16", "RouteType": 0, "NextHop": "10.0.0.9"},
                {"Destination": "fd01::/64", "RouteType": 1, "NextHop": "fd00::9"},
            ],
        ),
    )
    assert (found.source, found.name, found.prefix) == ("veth7", "", "net")
    assert found.gateways == (ip_address("10.0.0.1"), ip_address("fd00::1"))
    assert found.routes == (
        Route(ip_network("10.1.0.0/16"), ip_address("10.0.0.9")),
        Route(ip_network("fd01::/64"), None),
    )


def test_an_empty_answer_to_a_join() -> None:
    for fields in ({}, {"InterfaceName": None, "Gateway": None, "StaticRoutes": None}, {"InterfaceName": {}}):
        assert remote.joined(WHERE, answer(EndpointJoined, **fields)) == ("", "", "eth", (None, None), ())
    named = remote.joined(WHERE, answer(EndpointJoined, InterfaceName={"SrcName": "v", "DstName": "front"}))
    assert (named.source, named.name) == ("v", "front")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"InterfaceName": {"SrcName": "a" * 16}}, "is not one for an interface"),
        ({"InterfaceName": {"SrcName": "lo"}}, "'lo' is not one for an interface"),
        ({"InterfaceName": {"SrcName": "a", "DstPrefix": "b" * 13}}, "is not one for names of interfaces"),
        ({"Gateway": "fd00::1"}, "gateway 'fd00::1' is invalid: it is not of IPv4"),
        ({"GatewayIPv6": "x"}, "IPv6 gateway 'x' is invalid"),
        ({"StaticRoutes": [{"Destination": "x"}]}, "route to 'x': it is not a subnet"),
        ({"StaticRoutes": [{"Destination": "10.0.0.0/8", "RouteType": 2}]}, "unknown type 2"),
        ({"StaticRoutes": [{"Destination": "10.0.0.0/8", "NextHop": "fd00::1"}]}, "it is not of IPv4"),
    ],
)
def test_wrong_answers_to_a_join(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ServerError) as raised:
        remote.joined(WHERE, answer(EndpointJoined, **fields))
    assert raised.value.message.startswith(f"{WHERE}: ") and words in raised.value.message


TEXT = st.one_of(
    st.none(), st.text(max_size=20), st.sampled_from(("10.0.0.1", "10.0.0.0/8", "fd00::/8", "fd00::1", "eth", "veth0"))
)


@given(
    st.fixed_dictionaries({"SrcName": TEXT, "DstPrefix": TEXT, "DstName": TEXT}),
    TEXT,
    TEXT,
    st.lists(
        st.fixed_dictionaries({"Destination": TEXT, "RouteType": st.integers(-1, 2), "NextHop": TEXT}), max_size=3
    ),
)
def test_any_answer_is_valid_or_refused(name: Any, gateway: Any, sixth: Any, routes: Any) -> None:
    said = answer(EndpointJoined, InterfaceName=name, Gateway=gateway, GatewayIPv6=sixth, StaticRoutes=routes)
    try:
        found = remote.joined(WHERE, said)
    except ServerError as error:
        assert error.message.startswith(WHERE)
        return
    for text in filter(None, (found.source, found.name)):
        assert len(text) <= 15 and text.isascii() and "/" not in text
    assert all(route.via is None or route.via.version == route.to.version for route in found.routes)


# --- the record of a network ----------------------------------------------------------------------


def body(**fields: Any) -> NetworkCreate:
    return msgspec.convert({"Name": "n"} | fields, NetworkCreate)


def test_the_record_has_the_names_of_plugins() -> None:
    asked = body(
        Driver="far", IPAM={"Driver": "desk"}, Options={"com.docker.network.bridge.name": "a b", "parent": "x"}
    )
    assert network.plugins(asked) == ("far", "desk")
    record = network.checked(asked, "far:latest", "desk:latest")
    assert (record.driver, record.remote, record.ipam.driver) == ("far:latest", True, "desk:latest")
    assert network.options(record) == network.Options()
    for own in ("", "bridge", "macvlan", "ipvlan", "host", "null", "overlay"):
        assert network.plugins(body(Driver=own, IPAM={"Driver": "null"})) == ("", "")
    assert network.plugins(body(Driver="far", ConfigOnly=True)) == ("", "")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"Driver": "bridge", "IPAM": {"Driver": "null"}}, "need an IPAM driver that has subnets"),
        ({"Driver": "far", "IPAM": {"Driver": "null", "Config": [{"Subnet": "10.0.0.0/24"}]}}, "has no subnets"),
        (
            {"Driver": "far", "IPAM": {"Config": [{"Subnet": "10.0.0.0/24"}, {"Subnet": "10.0.1.0/24"}]}},
            "doesn't support multiple subnets",
        ),
    ],
)
def test_refused_bodies(fields: dict[str, Any], words: str) -> None:
    asked = body(**fields)
    with pytest.raises(EngineError) as raised:
        network.checked(asked, *network.plugins(asked))
    assert words in raised.value.message


def test_pools_as_a_plugin_gets_them() -> None:
    config = [
        IPAMConfig(subnet="10.0.0.0/24", gateway="10.0.0.1", auxiliary_addresses={"router": "10.0.0.9"}),
        IPAMConfig(subnet="fd00::/64", gateway="fd00::1"),
    ]
    record = NetworkRecord(id="i", name="n", driver="far", created=0, enable_ipv6=True, ipam=IPAM(config=config))
    assert remote._pools(record, 4, "space") == [
        {
            "AddressSpace": "space",
            "Pool": "10.0.0.0/24",
            "Gateway": "10.0.0.1/24",
            "AuxAddresses": {"router": "10.0.0.9/24"},
        }
    ]
    assert remote._pools(record, 6, "space") == [
        {"AddressSpace": "space", "Pool": "fd00::/64", "Gateway": "fd00::1/64"}
    ]
    nothing = msgspec.structs.replace(record, ipam=IPAM(driver="null"))
    assert remote._pools(nothing, 4, "s") == [{"AddressSpace": "null", "Pool": "0.0.0.0/0"}]
