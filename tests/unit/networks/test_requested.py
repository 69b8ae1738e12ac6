from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.common.network_rules import checked_pool
from engine.errors import InvalidParameter
from engine.networks.requested import (
    DATAGRAMS_OPTION,
    DriverOptions,
    driver_options,
    link_local_addresses,
    mac_address,
    static_addresses,
)
from engine.wire.containers import EndpointIPAMConfig, EndpointSettings
from engine.wire.networks import IPAMConfig

IFNAME, SYSCTLS = "com.docker.network.endpoint.ifname", "com.docker.network.endpoint.sysctls"


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (None, DriverOptions()),
        ({}, DriverOptions()),
        ({IFNAME: "", SYSCTLS: "", "x": "y"}, DriverOptions()),
        ({IFNAME: "front"}, DriverOptions("front")),
        ({DATAGRAMS_OPTION: "1"}, DriverOptions(datagrams=True)),
        ({"engine.network.endpoint.ifname": "a-b.c_15bytes.."}, DriverOptions("a-b.c_15bytes..")),
        (
            {SYSCTLS: "net.ipv4.conf.IFNAME.log_martians=1, net.ipv6.neigh.IFNAME.mcast_solicit=2"},
            DriverOptions("", (("ipv4/conf/IFNAME/log_martians", "1"), ("ipv6/neigh/IFNAME/mcast_solicit", "2"))),
        ),
        ({SYSCTLS: "net.ipv4.conf.ifname.x=1"}, DriverOptions("", (("ipv4/conf/IFNAME/x", "1"),))),
        ({SYSCTLS: "net.mpls.conf.IFNAME.input=1"}, DriverOptions("", (("mpls/conf/IFNAME/input", "1"),))),
    ],
)
def test_driver_options(options: dict[str, str] | None, found: DriverOptions) -> None:
    assert driver_options("n", options) == found


@pytest.mark.parametrize("name", ["a/b", "a b", "a:b", ".", "..", "lo", "all", "default", "x" * 16, "eth%d", "ä"])
def test_bad_interface_names(name: str) -> None:
    with pytest.raises(InvalidParameter, match=re.escape("network n: endpoint.ifname: ")):
        driver_options("n", {IFNAME: name})


@pytest.mark.parametrize(
    "text",
    [
        "x",
        ",",
        "net.ipv4.conf.IFNAME.x",
        "net.ipv4.conf.IFNAME.x=",
        "net.ipv4.conf.eth0.x=1",
        "net.ipv4.conf.IFNAME.a.b=1",
        "net.ipv4.conf.IFNAME...=1",
        "net.ipv4.conf.IFNAME./etc=1",
        "net.ipv4.route.IFNAME.x=1",
        "net.mpls.neigh.IFNAME.x=1",
        "net.core.conf.IFNAME.x=1",
        "kernel.ipv4.conf.IFNAME.x=1",
        "net.ipv4.conf.IFNAME.x=1\n2",
        "net.ipv4.conf.IFNAME.x=1,",
    ],
)
def test_bad_sysctls(text: str) -> None:
    with pytest.raises(InvalidParameter, match=re.escape("network n: endpoint.sysctls: ")):
        driver_options("n", {SYSCTLS: text})


@given(st.text(st.sampled_from("net.ipv46mplsconfghIFNAMEa=,/ \n\0")), st.text())
def test_any_option_is_safe_or_refused(sysctls: str, name: str) -> None:
    try:
        found = driver_options("n", {SYSCTLS: sysctls, IFNAME: name})
    except InvalidParameter:
        return
    assert len(found.name.encode()) < 16 and not set(found.name) & set("/ \n\0:") and found.name not in (".", "..")
    for path, value in found.sysctls:
        assert re.fullmatch(r"(ipv[46]/(conf|neigh)|mpls/conf)/IFNAME/\w+", path) and value.isprintable()


@given(st.lists(st.tuples(st.sampled_from(["ipv4/conf", "ipv6/neigh"]), st.from_regex(r"[a-z_]{1,9}", fullmatch=True))))
def test_sysctls_come_in_order(asked: list[tuple[str, str]]) -> None:
    text = ",".join(f"net.{family.replace('/', '.')}.IFNAME.{name}=1" for family, name in asked)
    assert [path for path, _ in driver_options("n", {SYSCTLS: text}).sysctls] == [
        f"{family}/IFNAME/{name}" for family, name in asked
    ]


def test_mac_addresses() -> None:
    assert mac_address("", "x") == "" and mac_address("02-42-AC-11-00-99", "x") == "02:42:ac:11:00:99"
    for wrong in ("01:00:00:00:00:01", "02:42", "zz:42:ac:11:00:99", "02:42:ac:11:00:99:00", "0242ac110099"):
        with pytest.raises(InvalidParameter, match="x: invalid MacAddress"):
            mac_address(wrong, "x")


@pytest.mark.parametrize("text", ["fd00::5%x", "fd00::5%\n6.6.6.6 a", "fe80::5%1"])
def test_addresses_of_endpoints_have_no_zone(text: str) -> None:
    """ipaddress accepts any text as a zone. The address is written to hosts."""
    config = EndpointIPAMConfig(ipv6_address=text, link_local_ips=[text])
    settings = EndpointSettings(ipam_config=config)
    with pytest.raises(InvalidParameter, match="network n: IPv6Address: invalid IP address"):
        static_addresses("n", settings)
    with pytest.raises(InvalidParameter, match="network n: LinkLocalIPs: invalid IP address"):
        link_local_addresses("n", settings)


@pytest.mark.parametrize(
    "pool",
    [
        IPAMConfig(subnet="fd00::%x/64"),
        IPAMConfig(subnet="fd00::/64", gateway="fd00::1%x"),
        IPAMConfig(subnet="fd00::/64", ip_range="fd00::%x/80"),
        IPAMConfig(subnet="fd00::/64", auxiliary_addresses={"a": "fd00::2%\n"}),
    ],
)
def test_pools_have_no_zone(pool: IPAMConfig) -> None:
    with pytest.raises(InvalidParameter, match=r"invalid (IP|CIDR) address"):
        checked_pool("n", pool)
