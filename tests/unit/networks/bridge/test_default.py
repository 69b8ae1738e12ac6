"""The default network from the configuration alone."""

from __future__ import annotations

from ipaddress import ip_interface
from pathlib import Path
from typing import Any

import pytest

from engine.config import Config
from engine.errors import InvalidParameter
from engine.networks.bridge.default import DefaultNetwork, configured, default_options
from engine.networks.network import NetworkRecord
from engine.wire.networks import IPAMConfig

RECORD = NetworkRecord(id="1" * 64, name="bridge", driver="bridge", created=1)
POOL = ip_interface("172.17.0.1/16")
"""The bridge's address if the operator says nothing."""


def pools(default: DefaultNetwork) -> list[IPAMConfig]:
    own: dict[int, Any] = {4: default.wanted(4) or POOL}
    if default.ipv6:
        own[6] = default.wanted(6) or ip_interface("fd00::1/64")
    record = default.record(RECORD, own)
    assert record.enable_ipv6 == default.ipv6
    return record.ipam.config


def test_nothing() -> None:
    default = configured(Config())
    assert default.wanted(4) is None and not default.absent
    assert pools(default) == [IPAMConfig(subnet="172.17.0.0/16", gateway="172.17.0.1")]
    shown = default.shown_options()
    assert shown["com.docker.network.bridge.enable_icc"] == "true"
    assert shown["com.docker.network.driver.mtu"] == "1500"
    assert shown["com.docker.network.bridge.host_binding_ipv4"] == "0.0.0.0"


def test_subnet_part_and_gateway() -> None:
    """As dockerd 28.5.2 shows them for the same keys."""
    default = configured(
        Config(bridge_subnet="192.168.150.5/24", fixed_cidr="192.168.150.128/25", gateway="192.168.150.99")
    )
    assert pools(default) == [
        IPAMConfig(
            subnet="192.168.150.0/24",
            ip_range="192.168.150.128/25",
            gateway="192.168.150.5",
            auxiliary_addresses={"DefaultGatewayIPv4": "192.168.150.99"},
        )
    ]


def test_a_part_alone_is_the_subnet() -> None:
    default = configured(Config(fixed_cidr="192.168.150.128/25"))
    assert str(default.wanted(4)) == "192.168.150.129/25"


@pytest.mark.parametrize(
    ("given", "subnet", "gateway"),
    [
        ({}, "fd00::/64", "fd00::1"),
        ({"fixed_cidr6": "fd99::/64"}, "fd99::/64", "fd99::1"),
        ({"bridge_subnet6": "fd99::5/64", "fixed_cidr6": "fd99::/80"}, "fd99::/64", "fd99::5"),
    ],
)
def test_ipv6(given: dict[str, str], subnet: str, gateway: str) -> None:
    assert len(pools(configured(Config(**given)))) == 1, "without --ipv6 they mean nothing"
    six = pools(configured(Config(ipv6=True, **given)))[1]
    assert (six.subnet, six.gateway) == (subnet, gateway)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"fixed_cidr": "192.168.150.128/25"}, "--fixed-cidr 192.168.150.128/25: must be a part of"),
        ({"gateway": "192.0.2.1"}, "--default-gateway 192.0.2.1: must be in the default network's subnet"),
    ],
)
def test_beside_the_bridge_that_is_there(given: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidParameter, match=words):
        configured(Config(**given)).record(RECORD, {4: POOL})


def test_no_masquerade_without_rules() -> None:
    assert not configured(Config(firewall="none")).options.masquerade
    assert not configured(Config(ip_masq=False)).options.masquerade


def test_engines_without_a_default_network_have_tables_of_their_own(tmp_path: Path) -> None:
    keys = {configured(Config(bridge="none", run=tmp_path / name)).key for name in "ab"}
    assert len(keys) == 2 and configured(Config(bridge="none")).absent
    assert configured(Config()).key == Config().bridge


def test_options_by_driver() -> None:
    entries = ("bridge=com.docker.network.driver.mtu=1400", "macvlan=parent=eth0", "bridge=a=b=c")
    assert default_options(entries) == {
        "bridge": {"com.docker.network.driver.mtu": "1400", "a": "b=c"},
        "macvlan": {"parent": "eth0"},
    }
