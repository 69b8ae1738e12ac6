"""Subnets and addresses, IPv4 and IPv6: chooses a network's subnet and an endpoint's address.

Pure; addresses in use are derived from endpoints, never stored. Pools are used on the event loop
alone. Not here: links and routes (`bridge.py`), the rules of a create body (`network.py`). Raises:
ServerError when nothing is free, InvalidParameter for an address outside the subnet, Forbidden for
one in use, each in Docker's words.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Collection, Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import NamedTuple

from engine.common.network_rules import Address, Pool, Subnet, free_subnet, hosts, span
from engine.errors import Forbidden, InvalidParameter, ServerError

_172 = [IPv4Network(f"172.{second}.0.0/16") for second in range(17, 32)]
_192 = IPv4Network("192.168.0.0/16")
BRIDGE_POOLS = (*(Pool(base, 16) for base in _172), Pool(_192, 20))
"""Docker's local pools, in its order. The default bridge gets a subnet of these."""
NETWORK_POOLS = (*(Pool(base, 24) for base in _172[1:]), Pool(_192, 24))
"""User-defined networks get smaller ones, so that thousands fit. Docker's pools suffice for
thirty.
"""


class Occupied(NamedTuple):
    """Spans of numbers of one IP version that are in use on this host."""

    here: list[tuple[int, int]]
    """Subnets of its links, up or down, and its name servers."""
    beyond: list[tuple[int, int]]
    """Sorted: those behind routers and tunnels. A subnet that is a part of one hides nothing else
    of it, as the more specific route wins. So the wide routes of a VPN stand in no network's way.
    """

    def spans(self, bits: int) -> list[tuple[int, int]]:
        """Those that a subnet with 2**`bits` numbers must not overlap."""
        return [*self.here, *((first, last) for first, last in self.beyond if last - first < 1 << bits)]

    def hides(self, subnet: Subnet) -> bool:
        """True if a part of this subnet is behind a router or a tunnel."""
        low, high = span(subnet)
        for first, last in itertools.islice(self.beyond, bisect.bisect_left(self.beyond, (low, low)), None):
            if last <= high:
                return True
            if first > low:  # those that begin with the subnet can be wider
                break
        return False


def choose(
    pools: Iterable[Pool], occupied: Occupied, avoided: Collection[tuple[int, int]] = (), size: int = 0
) -> Subnet | None:
    """The first free subnet of these pools, which are of one IP version; None when there is none.

    `avoided`: spans of other networks. `size`: a prefix length instead of the pools'.
    """
    for prefix, group in itertools.groupby(pools, lambda pool: size or pool.size):
        bases = [pool.base for pool in group if pool.base.prefixlen <= prefix]
        if bases:
            taken = [*avoided, *occupied.spans(bases[0].max_prefixlen - prefix)]
            if found := free_subnet(taken, bases, prefix):
                return found
    return None


UNIQUE_LOCAL_PREFIX = 64


def unique_local_subnet(engine_id: str, network_id: str, prefix: int = UNIQUE_LOCAL_PREFIX) -> IPv6Network:
    """A unique local /64 (RFC 4193): 40 bits from the engine's id, the subnet's 16 from the
    network's; or its first subnet with a longer prefix.
    """
    bits = hashlib.sha256(engine_id.encode()).digest()[:5] + hashlib.sha256(network_id.encode()).digest()[:2]
    return IPv6Network((b"\xfd" + bits + bytes(8), prefix))


def mac_address(address: Address) -> str:
    """Docker's scheme: 02:42 and the address, so a reused address keeps its MAC in ARP tables. Of
    an IPv6 address it has the last bytes.
    """
    return (b"\x02\x42" + address.packed[-4:]).hex(":")


class AddressPool:
    """Hands out the host addresses of a subnet.

    A freed address is used again only after all others, so that late packets for its former owner
    reach no other container.
    """

    def __init__(
        self, name: str, subnet: Subnet, excluded: Iterable[Address] = (), given_from: Subnet | None = None
    ) -> None:
        """`name` is the network's, for errors.

        `excluded` are addresses that are never given, such as the gateway's. Addresses come from
        `given_from`, a part of the subnet.
        """
        self.name = name
        self.subnet = subnet
        self._first, self._last = hosts(subnet)
        self._low, self._high = self._first, self._last
        if given_from is not None:
            self._low = max(self._low, int(given_from.network_address))
            self._high = min(self._high, int(given_from.broadcast_address))
        self._excluded = frozenset(int(address) for address in excluded)
        self._used: set[int] = set()
        self._reserved: dict[int, int] = {}
        self._next = self._low

    def __len__(self) -> int:
        """The number of addresses in use."""
        return len(self._used)

    def counts(self) -> tuple[int, int]:
        """The numbers of addresses of the subnet that are in use or reserved, and of those that
        `take` may return.
        """
        unfit = self.subnet.num_addresses - (self._last - self._first + 1)
        taken = self._used | {number for number in self._excluded if self._first <= number <= self._last}
        within = sum(self._low <= number <= self._high for number in taken)
        return unfit + len(taken), max(0, self._high - self._low + 1 - within)

    def take(self) -> Address:
        """The next free address.

        A reserved one is used only when no other is left. Raises ServerError when all are in use.
        """
        number = self._free(self._reserved) or self._free(())
        if number is None:
            raise ServerError(
                f"no available IPv{self.subnet.version} addresses on this network's address pools: "
                f"{self.name} ({self.subnet}, {len(self._used)} in use)"
            )
        self._used.add(number)
        self._next = number + 1
        return self._address(number)

    def _free(self, reserved: Iterable[int]) -> int | None:
        number = self._next
        # At least one of so many consecutive numbers is free, unless all are in use.
        blocked = len(self._used) + len(self._excluded) + len(self._reserved)
        for _ in range(min(self._high - self._low, blocked) + 1):
            if not self._low <= number <= self._high:
                number = self._low
            if number not in self._used and number not in self._excluded and number not in reserved:
                return number
            number += 1
        return None

    def check(self, address: Address) -> None:
        """Raises InvalidParameter for an address outside of the subnet."""
        if address.version != self.subnet.version or not self._first <= int(address) <= self._last:
            raise InvalidParameter(
                f"Requested address is out of range: {address} is not a host address in the subnet {self.subnet} "
                f"of network {self.name}"
            )

    def claim(self, address: Address) -> None:
        """Take this address. Raises as `check`, and Forbidden when it is excluded or in use."""
        self.check(address)
        number = int(address)
        if number in self._excluded or number in self._used:
            raise Forbidden(f"Address already in use: {address} on network {self.name}")
        self._used.add(number)

    def give(self, address: Address) -> None:
        """Give an address back. One that is not in use is fine."""
        self._used.discard(int(address))

    def reserve(self, address: Address) -> None:
        """Keep an address for a stopped container. Others get it only by explicit request, or when
        no other is free.

        Reservations are counted.
        """
        self._reserved[int(address)] = self._reserved.get(int(address), 0) + 1

    def unreserve(self, address: Address) -> None:
        """Undo one `reserve`."""
        number = int(address)
        if self._reserved.get(number, 0) > 1:
            self._reserved[number] -= 1
        else:
            self._reserved.pop(number, None)

    def _address(self, number: int) -> Address:
        return IPv4Address(number) if self.subnet.version == 4 else IPv6Address(number)
