"""Networks: each row at its version and at the one before."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api import parameters
from engine.api.versions import VERSIONS, Flag
from engine.errors import InvalidParameter
from engine.wire.networks import NetworkCreate
from tests.unit.api.versions.rows import NETWORK, NETWORK_INSPECT, check_new_field, reply


def create(version: str, **body: Any) -> NetworkCreate:
    """The body that the domain gets from a client of this version."""
    encoded = msgspec.json.encode({"Name": "n"} | body)
    return parameters.decode_json(encoded, NetworkCreate, VERSIONS[version].upgrade(NetworkCreate))


@pytest.mark.parametrize("value", [NETWORK, NETWORK_INSPECT], ids=["list", "inspect"])
@pytest.mark.parametrize("path", ["Created", "EnableIPv4", "Attachable", "Ingress", "ConfigFrom", "ConfigOnly"])
def test_fields_of_networks(value: Any, path: str) -> None:
    check_new_field(value, path, "1.25", "1.24")


@pytest.mark.parametrize("path", ["Peers", "Services"])
def test_fields_of_networks_of_a_swarm(path: str) -> None:
    check_new_field(NETWORK_INSPECT, path, "1.25", "1.24")


def test_flags_of_networks_of_a_swarm() -> None:
    for flag, name, before in (
        (Flag.INGRESS_REMOVABLE, "1.29", "1.28"),
        (Flag.NETWORKS_CHANGE, "1.29", "1.28"),
        (Flag.NETWORK_STATUS, "1.52", "1.51"),
    ):
        assert VERSIONS[name].has(flag) and not VERSIONS[before].has(flag)


def test_status() -> None:
    check_new_field(NETWORK_INSPECT, "Status", "1.52", "1.51")
    assert "Status" not in reply(NETWORK, "1.55")


def test_ipv4_off() -> None:
    for version, found in (("1.48", False), ("1.47", msgspec.UNSET), ("1.25", msgspec.UNSET), ("1.24", False)):
        assert create(version, EnableIPv4=False).enable_ipv4 is found


def test_host_bits() -> None:
    config = {"Subnet": "10.1.2.3/16", "IPRange": "10.1.5.9/24", "Gateway": "10.1.0.1"}
    for version, subnet, ip_range in (("1.25", "10.1.2.3/16", "10.1.5.9/24"), ("1.24", "10.1.0.0/16", "10.1.5.0/24")):
        (pool,) = create(version, IPAM={"Config": [config]}).ipam.config
        assert (pool.subnet, pool.ip_range, pool.gateway) == (subnet, ip_range, "10.1.0.1")
    (pool,) = create("1.24", IPAM={"Config": [{"Subnet": "x/8", "IPRange": "10.0.0.1"}]}).ipam.config
    assert (pool.subnet, pool.ip_range) == ("x/8", "10.0.0.1")
    assert create("1.24", IPAM={"Config": []}).ipam.config == []


_VALUE = st.none() | st.integers() | st.text(st.sampled_from("0123456789./:ab"), max_size=20)


@given(
    st.lists(_VALUE | st.dictionaries(st.sampled_from(["Subnet", "IPRange", "Gateway"]), _VALUE), max_size=2) | _VALUE
)
def test_any_pools_are_read_or_refused(pools: Any) -> None:
    try:
        made = create("1.24", IPAM={"Config": pools})
    except InvalidParameter:
        return
    assert isinstance(made, NetworkCreate)
