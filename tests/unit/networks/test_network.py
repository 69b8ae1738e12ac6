from __future__ import annotations

import asyncio
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.common.network_rules import bridge_interface, excluded, matches
from engine.config import Config
from engine.errors import Conflict, EngineError, Forbidden, InvalidParameter, NotFound, Unimplemented
from engine.events import EventLog
from engine.networks import network
from engine.networks.network import (
    NetworkRecord,
    NetworkStore,
    checked,
    configured_by,
    options,
    with_gateways,
)
from engine.networks.networks import Networks
from engine.networks.requested import link_local_addresses, wanted_addresses
from engine.plugins.discovery import Discovery
from engine.plugins.registry import Plugins
from engine.storage.records import Records
from engine.system.system_bus import SystemBus
from engine.wire.containers import EndpointSettings
from engine.wire.networks import NetworkCreate


def body(**fields: Any) -> NetworkCreate:
    return msgspec.convert({"Name": "net"} | fields, NetworkCreate)


def pool(**fields: Any) -> dict[str, Any]:
    return {"Config": [fields]}


# --- the store ------------------------------------------------------------------------------------


def test_predefined_networks_keep_their_ids(tmp_path: Path) -> None:
    async def body() -> None:
        seen = []
        for _ in range(2):
            records = Records(tmp_path / "state.db")
            store = NetworkStore(records)
            await store.open()
            seen.append(sorted((record.name, record.driver, record.id) for record in store))
            records.close()
        assert seen[0] == seen[1]
        assert [(name, driver) for name, driver, _ in seen[0]] == [
            ("bridge", "bridge"),
            ("host", "host"),
            ("none", "null"),
        ]
        assert all(len(identifier) == 64 for _, _, identifier in seen[0])

    asyncio.run(body())


def test_names_ids_and_prefixes(tmp_path: Path) -> None:
    async def run() -> None:
        records = Records(tmp_path / "state.db")
        store = NetworkStore(records)
        await store.open()
        one = checked(body())
        two = msgspec.structs.replace(one, id=one.id[:-1] + ("0" if one.id[-1] != "0" else "1"), name="two")
        await store.add(one)
        await store.add(two)
        assert store.get("net") is store.get(one.id) is one
        with pytest.raises(InvalidParameter, match=r"is ambiguous \(2 matches found based on ID prefix\)"):
            store.get(one.id[:20])
        with pytest.raises(Conflict, match="network with name two already exists"):
            store.check_duplicate("two")
        assert store.warning("net") == f"Network with name net (id : {one.id}) already exists"
        assert store.warning("nets") == ""
        await store.add(msgspec.structs.replace(one, id="f" * 64))
        with pytest.raises(InvalidParameter, match=r"network net is ambiguous \(2 matches found based on name\)"):
            store.get("net")
        await store.remove(store.get("f" * 64))
        await store.remove(two)
        assert store.get("net") is store.get(one.id[:20]) is one
        for missing in ("two", "", "f" * 64, "NET"):
            with pytest.raises(NotFound, match=f"network {missing} not found"):
                store.get(missing)
        again = NetworkStore(records)
        await again.open()
        assert again.get("net") == one
        records.close()

    asyncio.run(run())


def test_a_network_of_a_swarm_has_the_name_of_another(tmp_path: Path) -> None:
    async def run() -> None:
        records = Records(tmp_path / "state.db")
        store = NetworkStore(records)
        await store.open()
        own, other = checked(body()), checked(body())
        shared = msgspec.structs.replace(own, id="0abc", driver="overlay", scope="swarm")
        await store.add(shared)
        assert store.get("net") is shared
        await store.add(own)
        assert store.get("net") is own and store.get("0abc") is shared
        await store.add(other)
        with pytest.raises(InvalidParameter, match=r"is ambiguous \(2 matches found based on name\)"):
            store.get("net")
        records.close()

    asyncio.run(run())


@pytest.mark.parametrize("name", ["", "a b", "x" * 16, "a/b", "-x", 'a"b', "ä"])
def test_wrong_default_bridge_names(name: str, tmp_path: Path) -> None:
    records = Records(tmp_path / "state.db")
    with pytest.raises(InvalidParameter, match="bridge"):
        Networks(Config(bridge=name), records, EventLog(), Plugins(Discovery((), ()), 1.0), SystemBus())
    records.close()


@pytest.mark.parametrize(
    ("text", "interface"),
    [("172.30.0.0/16", "172.30.0.1/16"), ("172.30.0.9/24", "172.30.0.9/24"), ("10.0.0.0/30", "10.0.0.1/30")],
)
def test_configured_subnet(text: str, interface: str) -> None:
    assert str(bridge_interface(text, 4)) == interface


@pytest.mark.parametrize(
    "text", ["x", "10.0.0.0/33", "10.0.0.0/31", "10.0.0.1", "10.0.0.255/24", "::1/64", "1.2.3.4/a"]
)
def test_wrong_subnets(text: str) -> None:
    with pytest.raises(InvalidParameter, match=text):
        bridge_interface(text, 4)


# --- create bodies --------------------------------------------------------------------------------


def test_a_whole_body() -> None:
    record = with_gateways(
        checked(
            body(
                Driver="bridge",
                Internal=True,
                EnableIPv6=True,
                Labels={"a": "b"},
                Options={
                    "com.docker.network.bridge.enable_icc": "false",
                    "engine.network.driver.mtu": "1400",
                    "x": "y",
                },
                IPAM={
                    "Driver": "default",
                    "Options": {"o": "p"},
                    "Config": [
                        {
                            "Subnet": "10.1.0.0/16",
                            "IPRange": "10.1.5.0/24",
                            "AuxAddress": {"router": "10.1.0.1"},
                            "AuxiliaryAddresses": {"printer": "10.1.0.2"},
                        },
                        {"Subnet": "fd00:1::/64", "Gateway": "fd00:1::9"},
                    ],
                },
            )
        )
    )
    assert (record.driver, record.internal, record.enable_ipv6, record.labels) == ("bridge", True, True, {"a": "b"})
    four, six = record.ipam.config
    assert (four.subnet, four.ip_range, four.gateway) == ("10.1.0.0/16", "10.1.5.0/24", "10.1.0.3")
    assert (four.aux_address, four.auxiliary_addresses) == ({"router": "10.1.0.1"}, {"printer": "10.1.0.2"})
    assert excluded(four) == {"router": "10.1.0.1", "printer": "10.1.0.2"}
    assert (six.subnet, six.gateway) == ("fd00:1::/64", "fd00:1::9")
    assert record.chosen_by_user == (4, 6)
    meant = options(record)
    assert (meant.icc, meant.masquerade, meant.mtu, meant.bridge) == (False, True, 1400, "")
    assert [subnet.version for subnet, _, _ in network.pools(record)] == [4, 6]
    without = msgspec.structs.replace(record, enable_ipv6=False)
    assert [subnet.version for subnet, _, _ in network.pools(without)] == [4]


def test_ipam_is_echoed_as_it_was_given() -> None:
    """IPv4 comes first in any order; options and auxiliary addresses keep their names, and whether
    they were given."""
    config = [{"Subnet": "fd80::/64"}, {"Subnet": "172.28.0.0/16", "AuxiliaryAddresses": {"a": "172.28.1.1"}}]
    record = checked(body(EnableIPv6=True, IPAM={"Config": config}))
    assert [each.subnet for each in record.ipam.config] == ["172.28.0.0/16", "fd80::/64"]
    assert msgspec.to_builtins(record.ipam) == {
        "Driver": "default",
        "Options": None,
        "Config": [
            {"Subnet": "172.28.0.0/16", "AuxiliaryAddresses": {"a": "172.28.1.1"}},
            {"Subnet": "fd80::/64"},
        ],
    }
    assert checked(body(IPAM={"Options": {}})).ipam.options == {}
    assert checked(body(IPAM={"Options": {"a": "b"}})).ipam.options == {"a": "b"}


@pytest.mark.parametrize("name", ["test@#$", "kiwl$%^", " a ", "a b", "ä", "-x", "a:b", "x" * 255])
def test_names_that_docker_takes(name: str) -> None:
    assert checked(body(Name=name)).name == name


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"Name": ""}, InvalidParameter, "invalid network name ''"),
        ({"Name": "a/b"}, InvalidParameter, "invalid network name 'a/b'"),
        ({"Name": " "}, InvalidParameter, "invalid network name"),
        ({"Name": ".."}, InvalidParameter, "invalid network name"),
        ({"Name": "a\x1b[2J"}, InvalidParameter, "invalid network name"),
        ({"Name": "ä" * 128}, InvalidParameter, "invalid network name 'ä*': it is longer than 255 bytes"),
        (
            {"EnableIPv6": True, "Options": {"com.docker.network.driver.mtu": "1279"}},
            InvalidParameter,
            "network net: mtu 1279 is less than 1280",
        ),
        ({"Name": "a\n"}, InvalidParameter, "invalid network name"),
        ({"Name": "x" * 256}, InvalidParameter, "invalid network name"),
        ({"Name": "bridge"}, Forbidden, "operation is not permitted on predefined bridge network"),
        ({"Name": "default"}, Forbidden, "predefined default network"),
        ({"Driver": "overlay"}, Unimplemented, 'network net: driver "overlay"'),
        ({"Driver": "nothere"}, NotFound, 'network net: plugin "nothere" not found'),
        ({"Driver": "host"}, Forbidden, 'only one instance of "host" network is allowed'),
        ({"IPAM": {"Driver": "dhcp"}}, NotFound, 'IPAM plugin "dhcp" not found'),
        ({"IPAM": pool(Subnet="10.0.0.0")}, InvalidParameter, r"net: subnet: invalid CIDR address: '10.0.0.0'"),
        ({"IPAM": pool(Subnet="10.0.0.0/33")}, InvalidParameter, "invalid CIDR"),
        ({"IPAM": pool(Subnet="x/8")}, InvalidParameter, "invalid CIDR"),
        ({"IPAM": pool(Subnet="10.0.0.0/32")}, InvalidParameter, "has no room"),
        ({"IPAM": pool(Subnet="fd00::/128")}, InvalidParameter, "has no room"),
        ({"IPAM": pool(Subnet="0.0.0.0/24", Gateway="10.0.0.1")}, InvalidParameter, "only the size of one"),
        ({"IPAM": pool(Subnet="0.0.0.0/0")}, InvalidParameter, "is not one of hosts"),
        ({"IPAM": pool(Subnet="127.0.0.0/8")}, InvalidParameter, "is not one of hosts"),
        ({"IPAM": pool(Subnet="224.0.0.0/8")}, InvalidParameter, "is not one of hosts"),
        ({"IPAM": pool(Subnet="10.0.0.0/24", Gateway="10.0.1.1")}, InvalidParameter, "gateway: 10.0.1.1 is not a host"),
        ({"IPAM": pool(Subnet="10.0.0.0/24", Gateway="10.0.0.0")}, InvalidParameter, "gateway: 10.0.0.0 is not a host"),
        ({"IPAM": pool(Subnet="10.0.0.0/24", Gateway="fd00::1")}, InvalidParameter, "gateway: fd00::1 is not a host"),
        ({"IPAM": pool(Subnet="10.0.0.0/24", Gateway="x")}, InvalidParameter, "gateway: invalid IP address: 'x'"),
        ({"IPAM": pool(Subnet="10.0.0.0/24", IPRange="10.0.1.0/28")}, InvalidParameter, "IPRange 10.0.1.0/28 is not"),
        ({"IPAM": pool(Subnet="10.0.0.0/24", IPRange="10.0.0.0/16")}, InvalidParameter, "IPRange 10.0.0.0/16 is not"),
        ({"IPAM": pool(Gateway="10.0.0.1")}, InvalidParameter, "must have a corresponding subnet"),
        ({"IPAM": pool(IPRange="10.0.0.0/24")}, InvalidParameter, "must have a corresponding subnet"),
        ({"IPAM": pool(Subnet="10.0.0.0/24", AuxAddress={"a": "10.0.1.1"})}, InvalidParameter, "auxiliary address a"),
        (
            {"IPAM": pool(Subnet="10.0.0.0/24", Gateway="10.0.0.1", AuxAddress={"a": "10.0.0.1"})},
            InvalidParameter,
            "10.0.0.1 is given twice",
        ),
        ({"IPAM": {"Config": [{"Subnet": "10.0.0.0/24"}, {"Subnet": "10.1.0.0/24"}]}}, Forbidden, "multiple subnets"),
        ({"Options": {"com.docker.network.bridge.enable_icc": "perhaps"}}, InvalidParameter, "enable_icc: 'perhaps'"),
        ({"Options": {"com.docker.network.driver.mtu": "x"}}, InvalidParameter, "mtu 'x'"),
        ({"Options": {"engine.network.driver.mtu": "67"}}, InvalidParameter, "mtu '67'"),
        ({"Options": {"engine.network.bridge.name": "a/b"}}, InvalidParameter, "bridge name 'a/b'"),
        ({"Options": {"engine.network.bridge.host_binding_ipv4": "x"}}, InvalidParameter, "host_binding_ipv4"),
        ({"Options": {"com.docker.network.bridge.default_bridge": "true"}}, Forbidden, "one default bridge"),
        ({"Driver": "macvlan", "Options": {"parent": "p", "macvlan_mode": "x"}}, InvalidParameter, "macvlan mode 'x'"),
        ({"Driver": "ipvlan", "Options": {"ipvlan_mode": "l4"}}, InvalidParameter, "ipvlan mode 'l4'"),
        ({"Driver": "ipvlan", "Options": {"ipvlan_flag": "x"}}, InvalidParameter, "ipvlan flag 'x'"),
        ({"IPAM": pool(Subnet="10.1.2.3/16")}, InvalidParameter, r"invalid subnet 10.1.2.3/16: it should be 10.1.0.0"),
        ({"IPAM": pool(Subnet="fd00::1/64")}, InvalidParameter, "it should be fd00::/64"),
        ({"IPAM": pool(Subnet="10.0.0.0/24", IPRange="10.0.0.9/28")}, InvalidParameter, "IPRange: invalid subnet 10"),
        (
            {"EnableIPv4": False, "IPAM": pool(Subnet="10.0.0.0/24"), "EnableIPv6": True},
            InvalidParameter,
            "IPv4 is not",
        ),
        ({"EnableIPv4": False}, InvalidParameter, "network net: IPv4 or IPv6 must be enabled"),
        ({"Options": {"com.docker.network.enable_ipv4": "x"}}, InvalidParameter, "enable_ipv4: 'x' is not a boolean"),
        ({"Scope": "swarm"}, InvalidParameter, "scope 'swarm': this engine has local networks alone"),
        ({"Ingress": True}, InvalidParameter, "an ingress network needs a swarm"),
        ({"ConfigOnly": True, "Internal": True}, Forbidden, "Network operator fields"),
        ({"ConfigOnly": True, "Attachable": True}, Forbidden, "Network operator fields"),
        ({"ConfigOnly": True, "ConfigFrom": {"Network": "a"}}, Forbidden, "cannot depend on another configuration"),
        (
            {"Options": {"com.docker.network.bridge.gateway_mode_ipv4": "routed"}},
            InvalidParameter,
            "gateway_mode_ipv4 'routed' is not supported",
        ),
        ({"Options": {"com.docker.network.bridge.inhibit_ipv4": "x"}}, InvalidParameter, "inhibit_ipv4: 'x' is not"),
        (
            {"Options": {"com.docker.network.bridge.gateway_mode_ipv6": "isolated"}},
            InvalidParameter,
            "gateway mode 'isolated' can only be used for an internal network",
        ),
        ({"Options": {"com.docker.network.host_ipv4": "10.0.0.1"}}, InvalidParameter, "host_ipv4=10.0.0.1 is not"),
        ({"Options": {"com.docker.network.container_iface_prefix": "a0"}}, InvalidParameter, "iface_prefix 'a0'"),
    ],
)
def test_bad_bodies(fields: dict[str, Any], kind: type[EngineError], words: str) -> None:
    with pytest.raises(kind, match=words):
        checked(body(**fields))


def test_options_that_change_nothing() -> None:
    given = {
        "com.docker.network.bridge.gateway_mode_ipv4": "nat",
        "com.docker.network.bridge.inhibit_ipv4": "false",
        "com.docker.network.advertise_addr_nmsgs": "3",
        "com.docker.network.container_iface_prefix": "net",
    }
    assert options(checked(body(Options=given))).prefix == "net"


def test_gateway_modes() -> None:
    four, six = (f"com.docker.network.bridge.gateway_mode_ipv{version}" for version in (4, 6))
    for internal, chosen, unprotected, bare in (
        (False, {}, (), ()),
        (False, {four: "nat-unprotected"}, (4,), ()),
        (False, {four: "nat", six: "nat-unprotected"}, (6,), ()),
        (True, {four: "isolated", six: "isolated"}, (), (4, 6)),
        (False, {"com.docker.network.bridge.inhibit_ipv4": "true"}, (), (4,)),
    ):
        meant = options(checked(body(Internal=internal, Options=chosen)))
        assert (meant.unprotected, meant.bare) == (unprotected, bare)


def test_ip_versions() -> None:
    option = "com.docker.network.enable_ipv"
    for fields, versions in (
        ({}, (4,)),
        ({"EnableIPv6": True}, (4, 6)),
        ({"EnableIPv4": False, "EnableIPv6": True}, (6,)),
        ({"Options": {f"{option}6": "1"}}, (4, 6)),
        ({"Options": {f"{option}6": "1", f"{option}4": "false"}}, (6,)),
        ({"EnableIPv6": False, "Options": {f"{option}6": "1"}}, (4,)),
        ({"EnableIPv6": False, "IPAM": pool(Subnet="fd00::/64")}, (4,)),
    ):
        assert checked(body(**fields)).versions == versions


def test_parents() -> None:
    for driver, letters in (("macvlan", "dm"), ("ipvlan", "di")):
        record = checked(body(Driver=driver, Options={"parent": "lan0"}))
        assert (options(record).parent, options(record).dummy) == ("lan0", False)
        record = checked(body(Driver=driver, Options={"parent": "lan0"}, Internal=True))
        assert (options(record).parent, options(record).dummy) == (f"{letters}-{record.id[:12]}", True)
    meant = options(checked(body(Driver="ipvlan")))
    assert (meant.mode, meant.flag, meant.layer3) == ("l2", "bridge", False)
    meant = options(checked(body(Driver="ipvlan", Options={"ipvlan_mode": "l3s", "ipvlan_flag": "vepa"})))
    assert (meant.mode, meant.flag, meant.layer3) == ("l3s", "vepa", True)
    assert options(checked(body())).parent == ""


def test_configuration_networks() -> None:
    fields = {"Labels": {"a": "b"}, "EnableIPv6": True, "IPAM": pool(Subnet="10.0.0.0/24"), "Options": {"parent": "l"}}
    configuration = checked(body(Name="conf", ConfigOnly=True, **fields))
    assert (configuration.driver, configuration.config_only) == ("null", True)
    made = checked(configured_by(body(Driver="macvlan", ConfigFrom={"Network": "conf"}, Internal=True), configuration))
    assert (made.driver, made.config_from, made.config_only, made.internal) == ("macvlan", "conf", False, True)
    assert (made.labels, made.options, made.enable_ipv6, made.ipam) == (
        configuration.labels,
        configuration.options,
        True,
        configuration.ipam,
    )
    for field, value in (*fields.items(), ("EnableIPv4", False)):
        with pytest.raises(Forbidden, match="not supported if the network depends on a configuration network"):
            configured_by(body(**{field: value}), configuration)
    with pytest.raises(Forbidden, match="net is not a configuration network"):
        configured_by(body(), checked(body()))


@given(
    st.text(alphabet="0123456789./:abcdef", max_size=24),
    st.text(alphabet="0123456789./:abcdef", max_size=24),
    st.text(alphabet="0123456789./:abcdef", max_size=24),
)
def test_any_pool_is_right_or_refused(subnet: str, gateway: str, ip_range: str) -> None:
    try:
        record = with_gateways(
            checked(body(EnableIPv6=True, IPAM=pool(Subnet=subnet, Gateway=gateway, IPRange=ip_range)))
        )
    except InvalidParameter:
        return
    for config in record.ipam.config:
        assert network.parsed_address(config.gateway, "") in ip_network(config.subnet)
        if config.ip_range:
            assert ip_network(config.ip_range)[0] in ip_network(config.subnet)


def test_static_addresses() -> None:
    def wanted(**asked: Any) -> EndpointSettings:
        return msgspec.convert({"IPAMConfig": asked}, EndpointSettings)

    given = checked(body(IPAM=pool(Subnet="10.0.0.0/24")))
    assert {
        version: str(each) for version, each in wanted_addresses(given, wanted(IPv4Address="10.0.0.9")).items()
    } == {4: "10.0.0.9"}
    assert wanted_addresses(given, EndpointSettings()) == {}
    automatic = checked(body())
    bridge = NetworkRecord(id="b", name="bridge", driver="bridge", created=0)
    for record, asked, words in (
        (automatic, wanted(IPv4Address="10.0.0.9"), "net: user specified IP address 10.0.0.9 is supported only when"),
        (
            bridge,
            wanted(IPv4Address="10.0.0.9"),
            "bridge: user specified IP address is supported on user defined networks only",
        ),
        (given, wanted(IPv6Address="fd00::1"), "only when connecting"),
        (given, wanted(IPv4Address="x"), "IPv4Address: invalid IP address: 'x'"),
        (given, wanted(IPv4Address="fd00::1"), "invalid IPv4 address: fd00::1"),
        (given, wanted(IPv6Address="10.0.0.1"), "invalid IPv6 address"),
        (
            bridge,
            EndpointSettings(aliases=["a"]),
            "network-scoped alias is supported only for containers in user defined",
        ),
    ):
        with pytest.raises(InvalidParameter, match=words):
            wanted_addresses(record, asked)
    with pytest.raises(InvalidParameter, match="not a link-local address"):
        link_local_addresses(given.name, wanted(LinkLocalIPs=["10.0.0.1"]))


# --- filters --------------------------------------------------------------------------------------

MINE = NetworkRecord(id="abc" * 21 + "d", name="my_net", driver="bridge", created=0, labels={"a": "b", "c": ""})
HOST = NetworkRecord(id="f" * 64, name="host", driver="host", created=0)


@pytest.mark.parametrize(
    ("filters", "mine", "host"),
    [
        ({}, True, True),
        ({"name": ["y_n"]}, True, False),
        ({"name": ["^my"]}, True, False),
        ({"name": ["^net"]}, False, False),
        ({"name": ["net$"]}, True, False),
        ({"name": ["^my_net$"]}, True, False),
        ({"name": ["^my$"]}, False, False),
        ({"name": ["m.*_n"]}, True, False),
        ({"name": ["m[0-9]"]}, False, False),
        ({"name": ["nothere", "host"]}, False, True),
        ({"id": ["abc"]}, True, False),
        ({"id": ["^bc"]}, False, False),
        ({"driver": ["bridge"]}, True, False),
        ({"driver": ["bridge", "host"]}, True, True),
        ({"driver": ["bri"]}, False, False),
        ({"scope": ["local"]}, True, True),
        ({"scope": ["swarm"]}, False, False),
        ({"type": ["custom"]}, True, False),
        ({"type": ["builtin"]}, False, True),
        ({"type": ["builtin", "custom"]}, True, True),
        ({"label": ["a"]}, True, False),
        ({"label": ["a=b", "c"]}, True, False),
        ({"label": ["a=c"]}, False, False),
        ({"label": ["a", "nothere"]}, False, False),
        ({"name": ["my"], "driver": ["host"]}, False, False),
        ({"dangling": ["true"]}, True, False),
        ({"dangling": ["0"]}, False, False),
    ],
)
def test_filters(filters: dict[str, list[str]], mine: bool, host: bool) -> None:
    assert (matches(MINE, filters, False), matches(HOST, filters, True)) == (mine, host)


@pytest.mark.parametrize("filters", [{"type": ["x"]}, {"dangling": ["x"]}, {"dangling": ["1", "0"]}, {"x": ["y"]}])
def test_wrong_filters(filters: dict[str, list[str]]) -> None:
    with pytest.raises(InvalidParameter, match="nvalid filter"):
        matches(MINE, filters, False)
