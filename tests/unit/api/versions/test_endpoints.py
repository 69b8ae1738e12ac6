"""The endpoints of a container: each row at its version and at the one before."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api import parameters
from engine.api.versions import VERSIONS, Flag
from engine.errors import InvalidParameter
from engine.wire.containers import ContainerInspect, CreateBody, EndpointSettings, NetworkSettings
from engine.wire.networks import NetworkConnect
from tests.unit.api.versions.rows import ENDPOINT, INSPECT, check_new_field, reply

MAC, OTHER = "02:42:00:00:00:01", "02:42:00:00:00:02"
SYSCTLS = "com.docker.network.endpoint.sysctls"


def create(version: str, body: dict[str, Any]) -> CreateBody:
    """The body that the domain gets from a client of this version."""
    return parameters.decode_json(msgspec.json.encode(body), CreateBody, VERSIONS[version].upgrade(CreateBody))


def asking(mode: str = "", /, **fields: Any) -> dict[str, Any]:
    """A body with this NetworkMode. Fields that are in lower case are endpoints."""
    endpoints = {key: fields.pop(key) for key in [*fields] if key.islower()}
    networking = {"NetworkingConfig": {"EndpointsConfig": endpoints}} if endpoints else {}
    return {"HostConfig": {"NetworkMode": mode, "Sysctls": fields.pop("Sysctls", None)}} | networking | fields


def endpoints(made: CreateBody) -> dict[str, EndpointSettings | None]:
    return made.networking_config.endpoints_config


def macs(made: CreateBody) -> dict[str, str]:
    return {name: each.mac_address for name, each in endpoints(made).items() if each is not None}


# --- replies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["DriverOpts", "GwPriority", "DNSNames"])
def test_fields_of_an_endpoint(path: str) -> None:
    check_new_field(ENDPOINT, path, "1.25", "1.24")
    for version, shown in (("1.25", True), ("1.24", False)):
        assert (path in reply(INSPECT, version)["NetworkSettings"]["Networks"]["mine"]) is shown


def test_aliases() -> None:
    for version, aliases in (("1.45", ["a"]), ("1.44", ["a", "c" * 12, "web"]), ("1.21", ["a", "c" * 12, "web"])):
        networks = reply(INSPECT, version)["NetworkSettings"]["Networks"]
        assert (networks["mine"]["Aliases"], networks["bridge"]["Aliases"]) == (aliases, None)


OF_BRIDGE = {
    "EndpointID": "e" * 64,
    "Gateway": "172.17.0.1",
    "GlobalIPv6Address": "",
    "GlobalIPv6PrefixLen": 0,
    "IPAddress": "172.17.0.2",
    "IPPrefixLen": 16,
    "IPv6Gateway": "",
    "MacAddress": "02:42:ac:11:00:02",
}
ALWAYS_EMPTY = {
    "Bridge": "",
    "HairpinMode": False,
    "LinkLocalIPv6Address": "",
    "LinkLocalIPv6PrefixLen": 0,
    "SecondaryIPAddresses": None,
    "SecondaryIPv6Addresses": None,
}


def test_the_default_bridge() -> None:
    newest = {"SandboxID", "SandboxKey", "Ports", "Networks"}
    assert set(reply(INSPECT, "1.52")["NetworkSettings"]) == newest
    for version, more in (("1.51", OF_BRIDGE), ("1.25", OF_BRIDGE), ("1.24", OF_BRIDGE | ALWAYS_EMPTY)):
        settings = reply(INSPECT, version)["NetworkSettings"]
        assert settings.keys() == newest | more.keys()
        assert {key: settings[key] for key in more} == more
    elsewhere = msgspec.structs.replace(INSPECT, network_settings=NetworkSettings(networks={"mine": ENDPOINT}))
    assert reply(elsewhere, "1.51")["NetworkSettings"]["IPAddress"] == ""


def test_the_requested_mac() -> None:
    assert VERSIONS["1.52"].has(Flag.NO_REQUESTED_MAC) and not VERSIONS["1.51"].has(Flag.NO_REQUESTED_MAC)
    # Encoded replies are kept by shape, so versions of one shape must agree on it.
    shapes = {each.shape(ContainerInspect): each.has(Flag.NO_REQUESTED_MAC) for each in VERSIONS.values()}
    assert all(each.has(Flag.NO_REQUESTED_MAC) == shapes[each.shape(ContainerInspect)] for each in VERSIONS.values())


# --- requests -------------------------------------------------------------------------------------


def test_several_endpoints() -> None:
    assert set(endpoints(create("1.44", asking(a={}, b={})))) == {"a", "b"}
    assert set(endpoints(create("1.43", asking(a={})))) == {"a"}
    for version in ("1.43", "1.24"):
        with pytest.raises(InvalidParameter, match="cannot be connected to network endpoints: a, b"):
            create(version, asking(a={}, b={}))


def test_what_networks_do_not_allow() -> None:
    assert not create("1.25", {}).from_older.endpoints_unchecked
    assert create("1.24", {}).from_older.endpoints_unchecked


def test_the_mac_of_an_endpoint() -> None:
    for version, mac in (("1.55", MAC), ("1.44", MAC), ("1.43", ""), ("1.25", ""), ("1.24", MAC)):
        assert macs(create(version, asking("a", a={"MacAddress": MAC}))) == {"a": mac}


@pytest.mark.parametrize("mode", ["", "default", "bridge", "mine"])
def test_the_mac_of_the_container(mode: str) -> None:
    name = "mine" if mode == "mine" else "bridge"
    assert endpoints(create("1.52", asking(mode, MacAddress=MAC))) == {}
    for version in ("1.51", "1.44", "1.43", "1.21"):
        made = create(version, asking(mode, MacAddress=MAC))
        assert macs(made) == {name: MAC}
        assert bool(made.from_older.warnings) is (version in ("1.51", "1.44"))
    assert endpoints(create("1.51", asking(mode))) == {}


def test_the_mac_of_the_container_beside_endpoints() -> None:
    assert macs(create("1.51", asking("a", MacAddress=MAC, a={"MacAddress": MAC}, b={}))) == {"a": MAC, "b": ""}
    assert macs(create("1.51", asking(MacAddress=MAC, default=None))) == {"default": MAC}
    assert macs(create("1.51", asking("a", MacAddress=MAC, a={"MacAddress": ""}))) == {"a": MAC}
    assert macs(create("1.43", asking("a", MacAddress=MAC, another={"MacAddress": OTHER}))) == {"another": MAC}
    with pytest.raises(InvalidParameter, match="must match the endpoint-specific MAC address"):
        create("1.51", asking("a", MacAddress=MAC, a={"MacAddress": OTHER}))
    with pytest.raises(InvalidParameter, match="must match the identity of a network"):
        create("1.51", asking("a", MacAddress=MAC, b={}))


@pytest.mark.parametrize("mode", ["host", "container:x"])
def test_the_mac_of_the_container_on_other_networks(mode: str) -> None:
    assert endpoints(create("1.51", asking(mode, MacAddress=MAC))) == {}
    assert create("1.51", asking(mode, MacAddress=MAC)).from_older.warnings
    for version in ("1.43", "1.24"):
        with pytest.raises(InvalidParameter, match="conflicting options: mac-address and the network mode"):
            create(version, asking(mode, MacAddress=MAC))


def test_the_mac_of_a_connect() -> None:
    body = msgspec.json.encode({"EndpointConfig": {"MacAddress": MAC, "Aliases": ["a"]}})
    for version, mac in (("1.54", MAC), ("1.53", ""), ("1.25", ""), ("1.24", MAC)):
        found = parameters.decode_json(body, NetworkConnect, VERSIONS[version].upgrade(NetworkConnect))
        assert (found.endpoint_config.mac_address, found.endpoint_config.aliases) == (mac, ["a"])


def test_gateway_priority() -> None:
    for version, priority in (("1.48", -5), ("1.47", 0), ("1.25", 0), ("1.24", -5)):
        found = endpoints(create(version, asking("a", a={"GwPriority": -5})))["a"]
        assert found is not None and found.gw_priority == priority


def test_sysctls_of_an_interface() -> None:
    given = {"net.ipv6.conf.eth0.x": "2", "net/ipv4/conf/eth0/y": "1", "net.ipv4.conf.all.z": "3"}
    made = create("1.48", asking(Sysctls=given))
    assert made.host_config.sysctls == given and endpoints(made) == {}
    made = create("1.47", asking(Sysctls=given))
    moved = "net.ipv6.conf.IFNAME.x=2,net.ipv4.conf.IFNAME.y=1"
    assert made.host_config.sysctls == {"net.ipv4.conf.all.z": "3"}
    assert endpoints(made) == {"bridge": EndpointSettings(driver_opts={SYSCTLS: moved})}
    (warning,) = made.from_older.warnings
    assert warning == (
        f'Migrated sysctl "net.ipv6.conf.eth0.x,net/ipv4/conf/eth0/y" to DriverOpts{{"{SYSCTLS}":"{moved}"}}.'
    )
    body = asking("a", Sysctls={"net.ipv4.conf.eth0.x": "2"}, a={"DriverOpts": {SYSCTLS: "w"}})
    found = endpoints(create("1.47", body))["a"]
    assert found is not None and found.driver_opts == {SYSCTLS: "w,net.ipv4.conf.IFNAME.x=2"}


def test_sysctls_of_an_interface_that_cannot_move() -> None:
    given = {"net.ipv4.conf.eth1.x": "2"}
    with pytest.raises(InvalidParameter, match="unable to determine network endpoint for sysctl net"):
        create("1.47", asking(Sysctls=given))
    with pytest.raises(InvalidParameter, match="unable to find a network for sysctl net"):
        create("1.47", asking("a", Sysctls={"net.ipv4.conf.eth0.x": "2"}, b={}))
    assert create("1.47", asking("host", Sysctls=given)).host_config.sysctls == given


_WORDS = st.sampled_from(["", "a", "bridge", "host", "eth0", "net.ipv4.conf.eth0.x", "net/a/b/c/d", MAC])
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | _WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_WORDS, inner, max_size=2),
    max_leaves=4,
)
_ENDPOINT = _JSON | st.fixed_dictionaries({}, optional={"MacAddress": _JSON, "DriverOpts": _JSON, "GwPriority": _JSON})
_BODIES = st.fixed_dictionaries(
    {},
    optional={
        "MacAddress": _JSON,
        "HostConfig": _JSON | st.fixed_dictionaries({}, optional={"NetworkMode": _JSON, "Sysctls": _JSON}),
        "NetworkingConfig": _JSON
        | st.fixed_dictionaries({"EndpointsConfig": _JSON | st.dictionaries(_WORDS, _ENDPOINT, max_size=2)}),
    },
)


@given(st.sampled_from(["1.21", "1.24", "1.43", "1.47", "1.51", "1.55"]), _BODIES)
def test_any_body_is_read_or_refused(version: str, body: dict[str, Any]) -> None:
    try:
        made = create(version, body)
    except InvalidParameter:
        return
    assert isinstance(made, CreateBody)
