from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidParameter, ServerError
from engine.networks.ipam import DEFAULT_POOLS, AddressPool, free_subnet, mac_address


def pool(subnet: str = "10.0.0.0/29") -> AddressPool:
    network = IPv4Network(subnet)
    return AddressPool("net", network, (network[1],))


def test_default_pools_are_dockers() -> None:
    assert [str(each) for each in DEFAULT_POOLS[:2]] == ["172.17.0.0/16", "172.18.0.0/16"]
    assert str(DEFAULT_POOLS[14]) == "172.31.0.0/16"
    assert [str(each) for each in DEFAULT_POOLS[15:17]] == ["192.168.0.0/20", "192.168.16.0/20"]
    assert len(DEFAULT_POOLS) == 31


def test_free_subnet_avoids_routes_but_not_the_default_one() -> None:
    taken = [IPv4Network("0.0.0.0/0"), IPv4Network("172.17.3.0/24"), IPv4Network("172.18.0.0/15")]
    assert str(free_subnet(taken)) == "172.20.0.0/16"
    with pytest.raises(ServerError, match="bridge-subnet"):
        free_subnet([IPv4Network("172.16.0.0/12"), IPv4Network("192.168.0.0/16")])


def test_mac_carries_the_address() -> None:
    assert mac_address(IPv4Address("172.17.0.2")) == "02:42:ac:11:00:02"


def test_addresses_go_round() -> None:
    addresses = pool()
    first = addresses.take()
    assert str(first) == "10.0.0.2"
    addresses.give(first)
    assert [str(addresses.take()) for _ in range(4)] == ["10.0.0.3", "10.0.0.4", "10.0.0.5", "10.0.0.6"]
    assert addresses.take() == first
    with pytest.raises(ServerError, match=r"no available IPv4 addresses.*net.*10\.0\.0\.0/29"):
        addresses.take()
    addresses.give(first)
    addresses.give(first)
    assert len(addresses) == 4


def test_claims() -> None:
    addresses = pool()
    addresses.claim(IPv4Address("10.0.0.2"))
    assert str(addresses.take()) == "10.0.0.3"
    for wrong, words in (
        ("10.0.0.2", "in use"),
        ("10.0.0.1", "in use"),
        ("10.0.0.0", "not in"),
        ("10.0.0.7", "not in"),
        ("10.1.0.2", "not in"),
    ):
        with pytest.raises(InvalidParameter, match=words):
            addresses.claim(IPv4Address(wrong))


@given(st.lists(st.one_of(st.just(-1), st.integers(0, 20)), max_size=80))
def test_no_address_is_given_twice(steps: list[int]) -> None:
    """-1 takes, a number gives back the one at that place."""
    addresses = pool("10.0.0.0/28")
    held: list[IPv4Address] = []
    for step in steps:
        if step >= 0:
            if step < len(held):
                addresses.give(held.pop(step))
        elif len(held) < 13:
            address = addresses.take()
            assert address not in held
            assert address not in (IPv4Address("10.0.0.0"), IPv4Address("10.0.0.1"), IPv4Address("10.0.0.15"))
            held.append(address)
        else:
            with pytest.raises(ServerError):
                addresses.take()
        assert len(addresses) == len(held)
