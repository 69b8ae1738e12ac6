"""Addresses of one IPv4 pool: which subnet, which address next. Pure; what is in use is derived from containers, never stored.

Not here: links and routes (`bridge.py`). Raises: ServerError when nothing is free, InvalidParameter for an address that can't be had.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network

from engine.errors import InvalidParameter, ServerError

DEFAULT_POOLS = (
    *(IPv4Network(f"172.{second}.0.0/16") for second in range(17, 32)),
    *IPv4Network("192.168.0.0/16").subnets(new_prefix=20),
)
"""Docker's local pools, in its order."""


def free_subnet(taken: Iterable[IPv4Network], pools: Iterable[IPv4Network] = DEFAULT_POOLS) -> IPv4Network:
    """The first pool that overlaps nothing of `taken` (the host's routes and addresses; a default route counts as nothing)."""
    occupied = [network for network in taken if network.prefixlen]
    for pool in pools:
        if not any(pool.overlaps(network) for network in occupied):
            return pool
    raise ServerError("no address pool is free: every default pool overlaps a route of this host; give --bridge-subnet")


def mac_address(address: IPv4Address) -> str:
    """Docker's: 02:42 and the address, so that a reused address keeps its MAC in everybody's ARP tables."""
    return (b"\x02\x42" + address.packed).hex(":")


class AddressPool:
    """Hands out the hosts of a subnet. A freed address comes again only after all others: late packets of the old owner find nobody."""

    def __init__(self, name: str, subnet: IPv4Network, reserved: Iterable[IPv4Address] = ()) -> None:
        """`name` is the network's, for errors; `reserved` are addresses that are never given, such as the gateway's."""
        self.name = name
        self.subnet = subnet
        base, last = int(subnet.network_address), int(subnet.broadcast_address)
        edge = 1 if subnet.prefixlen < 31 else 0
        self._first, self._last = base + edge, last - edge
        self._reserved = frozenset(int(address) for address in reserved)
        self._used: set[int] = set()
        self._next = self._first

    def __len__(self) -> int:
        """How many are in use."""
        return len(self._used)

    def take(self) -> IPv4Address:
        """The next free address. Raises ServerError in Docker's words when there is none."""
        size = self._last - self._first + 1
        if len(self._used) < size:
            number = self._next
            for _ in range(size):
                if number > self._last:
                    number = self._first
                if number not in self._used and number not in self._reserved:
                    self._used.add(number)
                    self._next = number + 1
                    return IPv4Address(number)
                number += 1
        raise ServerError(
            f"no available IPv4 addresses on this network's address pools: {self.name} ({self.subnet}, {len(self._used)} in use)"
        )

    def claim(self, address: IPv4Address) -> None:
        """Take this very address. Raises InvalidParameter when it is outside, reserved or in use."""
        number = int(address)
        if not self._first <= number <= self._last:
            raise InvalidParameter(f"address {address} is not in the subnet {self.subnet} of network {self.name}")
        if number in self._reserved or number in self._used:
            raise InvalidParameter(f"address {address} is already in use on network {self.name}")
        self._used.add(number)

    def give(self, address: IPv4Address) -> None:
        """Back to the pool; one that is not in use is fine."""
        self._used.discard(int(address))
