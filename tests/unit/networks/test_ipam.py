from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import Forbidden, InvalidParameter, ServerError
from engine.network_rules import Address, free_subnet, span
from engine.networks.ipam import (
    DEFAULT_POOLS,
    NETWORK_POOLS,
    NETWORK_PREFIX,
    AddressPool,
    mac_address,
    unique_local_subnet,
)


def pool(subnet: str = "10.0.0.0/29") -> AddressPool:
    network = IPv4Network(subnet)
    return AddressPool("net", network, (network[1],))


def test_default_pools_are_dockers() -> None:
    assert [str(each) for each in DEFAULT_POOLS[:2]] == ["172.17.0.0/16", "172.18.0.0/16"]
    assert str(DEFAULT_POOLS[14]) == "172.31.0.0/16"
    assert [str(each) for each in DEFAULT_POOLS[15:17]] == ["192.168.0.0/20", "192.168.16.0/20"]
    assert len(DEFAULT_POOLS) == 31


def test_free_subnet_avoids_routes_but_not_the_default_one() -> None:
    taken = [*map(span, (IPv4Network("0.0.0.0/0"), IPv4Network("172.17.3.0/24"), IPv4Network("172.18.0.0/15")))]
    assert str(free_subnet(taken, DEFAULT_POOLS)) == "172.20.0.0/16"
    assert free_subnet(map(span, (IPv4Network("172.16.0.0/12"), IPv4Network("192.168.0.0/16"))), DEFAULT_POOLS) is None


@given(
    st.lists(
        st.builds(
            lambda number, prefix: IPv4Network((number & -1 << 32 - prefix & 0xFFFFFFFF, prefix)),
            st.one_of(
                st.integers(int(IPv4Address("172.18.0.0")), int(IPv4Address("172.19.255.255"))),
                st.integers(0, 2**32 - 1),
            ),
            st.integers(12, 30),
        ),
        max_size=60,
    )
)
def test_free_subnet_is_the_first_that_is_free(taken: list[IPv4Network]) -> None:
    pools = (IPv4Network("172.18.0.0/16"), IPv4Network("172.19.0.0/18"))
    every = [subnet for pool in pools for subnet in pool.subnets(new_prefix=24)]
    free = [subnet for subnet in every if not any(subnet.overlaps(network) for network in taken)]
    assert free_subnet(map(span, taken), pools, 24) == (free[0] if free else None)


def test_users_networks_are_small() -> None:
    found: list[IPv4Network] = []
    for _ in range(500):
        subnet = free_subnet(map(span, found), NETWORK_POOLS, NETWORK_PREFIX)
        assert subnet is not None
        found.append(subnet)
    assert (str(found[0]), str(found[499])) == ("172.18.0.0/24", "172.19.243.0/24")


def test_unique_local_subnets() -> None:
    one, two = unique_local_subnet("engine", "one"), unique_local_subnet("engine", "two")
    assert one.is_private
    assert one.prefixlen == 64
    assert one != two
    assert one.network_address.packed[:6] == two.network_address.packed[:6]
    assert unique_local_subnet("other", "one") != one


def test_mac_carries_the_address() -> None:
    assert mac_address(IPv4Address("172.17.0.2")) == "02:42:ac:11:00:02"


def test_mac_of_an_ipv6_address() -> None:
    assert mac_address(IPv6Address("fd00::1:2:3")) == "02:42:00:02:00:03"


def test_counts() -> None:
    """The network's address, the broadcast address and the gateway are not free."""
    addresses = pool()
    assert addresses.counts() == (3, 5)
    addresses.claim(IPv4Address("10.0.0.2"))
    assert addresses.counts() == (4, 4)
    subnet = IPv4Network("10.0.0.0/24")
    addresses = AddressPool(
        "net", subnet, (subnet[1], subnet[18], IPv4Address("10.9.9.9")), IPv4Network("10.0.0.16/29")
    )
    addresses.take()
    addresses.claim(subnet[200])
    assert addresses.counts() == (6, 6)
    sixth = IPv6Network("fd00::/64")
    assert AddressPool("net", sixth, (sixth[1],)).counts() == (2, 2**64 - 2)


@given(st.sets(st.integers(0, 15), max_size=9), st.sets(st.integers(0, 15), max_size=4), st.integers(0, 3))
def test_counts_agree_with_what_is_given(used: set[int], excluded: set[int], part: int) -> None:
    subnet = IPv4Network("10.0.0.0/28")
    given_from = None if part == 3 else IPv4Network(f"10.0.0.{part * 4}/30")
    addresses = AddressPool("net", subnet, [subnet[number] for number in excluded], given_from)
    for number in used - excluded - {0, 15}:
        addresses.claim(subnet[number])
    in_use, free = addresses.counts()
    assert in_use == len(used | excluded | {0, 15})
    taken = 0
    while True:
        try:
            addresses.take()
        except ServerError:
            break
        taken += 1
    assert taken == free


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
    for wrong in ("10.0.0.2", "10.0.0.1"):
        with pytest.raises(Forbidden, match="already in use"):
            addresses.claim(IPv4Address(wrong))
    for wrong in ("10.0.0.0", "10.0.0.7", "10.1.0.2"):
        with pytest.raises(InvalidParameter, match="out of range"):
            addresses.claim(IPv4Address(wrong))
    with pytest.raises(InvalidParameter, match="out of range"):
        addresses.claim(IPv6Address("::2"))


def test_a_range_is_given_and_the_rest_can_be_asked_for() -> None:
    subnet = IPv4Network("10.0.0.0/24")
    addresses = AddressPool("net", subnet, (subnet[1], subnet[18]), IPv4Network("10.0.0.16/29"))
    assert [str(addresses.take()) for _ in range(7)] == [f"10.0.0.{last}" for last in (16, 17, 19, 20, 21, 22, 23)]
    with pytest.raises(ServerError, match="no available IPv4"):
        addresses.take()
    addresses.claim(IPv4Address("10.0.0.200"))


def test_reserved_addresses_come_last() -> None:
    addresses = pool()
    for _ in range(2):
        addresses.reserve(IPv4Address("10.0.0.3"))
    assert [str(addresses.take()) for _ in range(4)] == ["10.0.0.2", "10.0.0.4", "10.0.0.5", "10.0.0.6"]
    assert str(addresses.take()) == "10.0.0.3"
    addresses.give(IPv4Address("10.0.0.3"))
    addresses.unreserve(IPv4Address("10.0.0.3"))
    addresses.give(IPv4Address("10.0.0.4"))
    assert str(addresses.take()) == "10.0.0.4", "it is still reserved"
    addresses.unreserve(IPv4Address("10.0.0.3"))
    addresses.unreserve(IPv4Address("10.0.0.3"))
    assert str(addresses.take()) == "10.0.0.3"


def test_ipv6() -> None:
    subnet = IPv6Network("fd00::/64")
    addresses = AddressPool("net", subnet, (subnet[1],))
    assert str(addresses.take()) == "fd00::2"
    addresses.claim(IPv6Address("fd00::ffff:ffff:ffff:ffff"))
    with pytest.raises(InvalidParameter, match="out of range"):
        addresses.claim(IPv6Address("fd00::"))
    with pytest.raises(InvalidParameter, match="out of range"):
        addresses.claim(IPv4Address("0.0.0.5"))
    small = AddressPool("net", IPv6Network("fd00::/126"), (subnet[1],))
    assert [str(small.take()), str(small.take())] == ["fd00::2", "fd00::3"]
    with pytest.raises(ServerError, match="no available IPv6"):
        small.take()


@given(st.lists(st.one_of(st.just(-1), st.integers(0, 20)), max_size=80))
def test_no_address_is_given_twice(steps: list[int]) -> None:
    """-1 allocates an address, another number releases the address at that index."""
    addresses = pool("10.0.0.0/28")
    held: list[Address] = []
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
