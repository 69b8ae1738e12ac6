from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.common.network_rules import Address, Pool, span
from engine.errors import Forbidden, InvalidParameter, ServerError
from engine.networks.ipam import (
    BRIDGE_POOLS,
    NETWORK_POOLS,
    AddressPool,
    Occupied,
    choose,
    mac_address,
    unique_local_subnet,
)


def pool(subnet: str = "10.0.0.0/29") -> AddressPool:
    network = IPv4Network(subnet)
    return AddressPool("net", network, (network[1],))


NOTHING = Occupied([], [])


def subnets(pools: Sequence[Pool], occupied: Occupied = NOTHING) -> Iterator[str]:
    """The subnets that one network after another gets."""
    found: list[tuple[int, int]] = []
    while subnet := choose(pools, occupied, found):
        found.append(span(subnet))
        yield str(subnet)


def test_default_pools() -> None:
    found = [*subnets(BRIDGE_POOLS)]
    assert (found[:2], found[14:17], len(found)) == (
        ["172.17.0.0/16", "172.18.0.0/16"],
        ["172.31.0.0/16", "192.168.0.0/20", "192.168.16.0/20"],
        31,
    ), "Docker's"
    found = [*itertools.islice(subnets(NETWORK_POOLS), 500)]
    assert (found[0], found[499]) == ("172.18.0.0/24", "172.19.243.0/24")


NETWORKS = st.builds(
    lambda number, prefix: IPv4Network((number & -1 << 32 - prefix & 0xFFFFFFFF, prefix)),
    st.one_of(
        st.integers(int(IPv4Address("172.18.0.0")), int(IPv4Address("172.19.255.255"))), st.integers(0, 2**32 - 1)
    ),
    st.integers(1, 30),
)


@given(
    st.lists(NETWORKS.filter(lambda each: each.prefixlen >= 12), max_size=40),
    st.lists(NETWORKS, max_size=20),
    st.lists(NETWORKS.filter(lambda each: each.prefixlen >= 12), max_size=5),
    st.sampled_from([0, 20, 26]),
)
def test_the_first_subnet_that_is_free(
    here: list[IPv4Network], beyond: list[IPv4Network], others: list[IPv4Network], size: int
) -> None:
    pools = [Pool(IPv4Network(base), bits) for base, bits in (("172.18.0.0/17", 24), ("172.19.0.0/18", 19))]
    occupied = Occupied([*map(span, here)], sorted(map(span, beyond)))

    def free(subnet: IPv4Network) -> bool:
        counts = (each for each in beyond if each.prefixlen >= subnet.prefixlen)
        return not any(subnet.overlaps(each) for each in (*here, *others, *counts))

    every = [subnet for base, bits in pools for subnet in base.subnets(new_prefix=size or bits)]
    first = next(filter(free, every), None)
    assert choose(pools, occupied, [*map(span, others)], size) == first


@given(NETWORKS, st.lists(NETWORKS, max_size=20))
def test_hidden_subnets(subnet: IPv4Network, beyond: list[IPv4Network]) -> None:
    hidden = any(each.subnet_of(subnet) for each in beyond)
    assert Occupied([], sorted(map(span, beyond))).hides(subnet) == hidden


def test_a_vpn_stands_in_the_way_of_no_network() -> None:
    routes = "0.0.0.0/1", "128.0.0.0/1", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"
    occupied = Occupied([], sorted(span(IPv4Network(each)) for each in routes))
    assert str(choose(BRIDGE_POOLS, occupied)) == "172.17.0.0/16"
    on_link = Occupied(occupied.beyond, [])
    assert choose(BRIDGE_POOLS, on_link) is None


def test_pools_of_ipv6() -> None:
    pools = [Pool.parse("base=fd00:1::/63,size=64"), Pool.parse("base=fd00:2::/64,size=80")]
    occupied = Occupied([span(IPv6Network("fd00:1::/120"))], [span(IPv6Network("fd00::/16"))])
    assert [*itertools.islice(subnets(pools, occupied), 3)] == ["fd00:1:0:1::/64", "fd00:2::/80", "fd00:2:0:0:1::/80"]
    assert choose(pools, NOTHING, size=62) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("10.0.0.0/8", "must be base=CIDR,size=BITS"),
        ("base=10.0.0.0/8", "must be base=CIDR,size=BITS"),
        ("base=10.0.0.0/8,size=24,size=25", "must be base=CIDR,size=BITS"),
        ("base=10.0.0.0/8,sise=24", "must be base=CIDR,size=BITS"),
        ("base=224.0.0.0/4,size=24", "base has addresses that containers cannot have"),
        ("base=127.0.0.0/8,size=24", "base has addresses that containers cannot have"),
        ("base=fe80::/10,size=64", "base has addresses that containers cannot have"),
        ("base=ten,size=24", "base is not a subnet: 'ten' does not appear"),
        ("base=10.0.0.1/8,size=24", "base is not a subnet: 10.0.0.1/8 has host bits set"),
        ("base=10.0.0.0/16,size=15", "size must be a prefix length from 16, that of its base, to 30"),
        ("base=10.0.0.0/16,size=31", "from 16, that of its base, to 30"),
        ("base=10.0.0.0/16,size=\N{SUPERSCRIPT TWO}", "must be base=CIDR,size=BITS"),
        (f"base=10.0.0.0/16,size={'9' * 5000}", "must be base=CIDR,size=BITS"),
        ("base=fd00::/48,size=127", "from 48, that of its base, to 126"),
    ],
)
def test_pools_that_are_none(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        Pool.parse(text)


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
