"""Names of containers and addresses on each network: the table that the resolver answers from.

A container sees the names of the networks that it has an endpoint on, and no others. Of equal names
it sees those of the network that it joined first. A name may carry its network: `web.mynet`. Links
are names that only the container with the link sees. Rules: Docker's for user-defined networks. The
default bridge has no names, so it has no endpoints here.

On a network of a swarm there are also names of services and of containers on other nodes (`Names`),
as the swarm's managers say. They are gone with the network, not with a container.

Derived from the endpoints of running containers, never stored. Pure, used on the event loop alone.
A change costs O(own names), a query one lookup per network. Names are held as `dns.py` describes.
Not here: sockets and messages (`resolver.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address
from typing import NamedTuple, TypeVar

from engine.networks.dns import messages as dns

T = TypeVar("T")


class Names(NamedTuple):
    """Names on a network that lead to these addresses, of something that need not be a container
    here.
    """

    names: tuple[str, ...]
    addresses: tuple[IPv4Address, ...]
    rotated: bool = False
    """Each answer begins with another address. Such addresses are not looked up in reverse."""


class _Called(list["_Endpoint"]):
    """What has one name on one network."""

    __slots__ = ("turn",)

    def __init__(self) -> None:
        super().__init__()
        self.turn = 0


class _Network:
    __slots__ = ("addresses", "elsewhere", "endpoints", "name", "names", "others", "suffix")

    def __init__(self, name: str) -> None:
        self.name = name
        self.suffix = dns.encoded(name) or b""
        self.names: dict[bytes, _Called] = {}
        self.addresses: dict[bytes, _Endpoint] = {}
        self.endpoints = 0
        self.others: dict[str, _Endpoint] = {}
        """`Names` by key."""
        self.elsewhere: dict[bytes, _Endpoint] = {}
        """Those of `others` by address."""


class _Endpoint:
    __slots__ = ("addresses", "container_id", "links", "names", "network", "network_id", "rotated")

    network_id: str
    network: _Network
    container_id: str
    names: tuple[bytes, ...]
    addresses: tuple[bytes, ...]
    links: dict[bytes, bytes]
    rotated: bool


class NameTable:
    """Endpoints by network and container."""

    def __init__(self) -> None:
        self._networks: dict[str, _Network] = {}
        self._endpoints: dict[str, _Endpoint] = {}
        self._containers: dict[str, list[_Endpoint]] = {}

    def __len__(self) -> int:
        return len(self._endpoints)

    def add(
        self,
        endpoint_id: str,
        *,
        network_id: str,
        network: str,
        container_id: str,
        names: Iterable[str],
        addresses: Iterable[IPv4Address | IPv6Address],
        links: Mapping[str, str] | None = None,
    ) -> None:
        """Add or replace the endpoint of a running container; a replaced one keeps its place.

        The first name is used for reverse lookups. Names that DNS cannot encode are skipped.
        `links` maps an alias to a name on the same network.
        """
        place = self._place(endpoint_id)
        self.remove(endpoint_id)
        endpoint = self._new(network_id, network, names, addresses)
        zone = endpoint.network
        endpoint.container_id = container_id
        endpoint.links = {}
        for alias, target in (links or {}).items():
            name, to = dns.encoded(alias), dns.encoded(target)
            if name is not None and to is not None:
                endpoint.links[name] = to
        _call(endpoint)
        for address in endpoint.addresses:
            zone.addresses[address] = endpoint
        zone.endpoints += 1
        self._endpoints[endpoint_id] = endpoint
        own = self._containers.setdefault(container_id, [])
        own.insert(len(own) if place is None else place, endpoint)

    def put(self, network_id: str, network: str, key: str, names: Names) -> None:
        """Add or replace names that do not depend on a container of this host."""
        self.take(network_id, key)
        endpoint = self._new(network_id, network, names.names, names.addresses)
        zone = endpoint.network
        endpoint.container_id, endpoint.links, endpoint.rotated = "", {}, names.rotated
        _call(endpoint)
        zone.others[key] = endpoint
        if not names.rotated:
            for address in endpoint.addresses:
                zone.elsewhere[address] = endpoint

    def take(self, network_id: str, key: str) -> None:
        """Forget what was `put`. An unknown key is fine."""
        zone = self._networks.get(network_id)
        endpoint = zone.others.pop(key, None) if zone is not None else None
        if zone is None or endpoint is None:
            return
        _uncall(endpoint)
        for address in endpoint.addresses:
            if zone.elsewhere.get(address) is endpoint:
                del zone.elsewhere[address]
        self._tidy(endpoint)

    def take_all(self, network_id: str) -> None:
        """Forget all that was `put` for a network."""
        zone = self._networks.get(network_id)
        for key in [*zone.others] if zone is not None else ():
            self.take(network_id, key)

    def _new(
        self,
        network_id: str,
        network: str,
        names: Iterable[str],
        addresses: Iterable[IPv4Address | IPv6Address],
    ) -> _Endpoint:
        zone = self._networks.get(network_id)
        if zone is None:
            zone = self._networks[network_id] = _Network(network)
        endpoint = _Endpoint()
        endpoint.network_id, endpoint.network, endpoint.rotated = network_id, zone, False
        endpoint.names = tuple(dict.fromkeys(name for name in map(dns.encoded, names) if name is not None))
        endpoint.addresses = tuple(address.packed for address in addresses)
        return endpoint

    def _tidy(self, endpoint: _Endpoint) -> None:
        if not endpoint.network.endpoints and not endpoint.network.others:
            del self._networks[endpoint.network_id]

    def _place(self, endpoint_id: str) -> int | None:
        endpoint = self._endpoints.get(endpoint_id)
        return None if endpoint is None else self._containers[endpoint.container_id].index(endpoint)

    def remove(self, endpoint_id: str) -> None:
        """Forget an endpoint. An unknown one is fine."""
        endpoint = self._endpoints.pop(endpoint_id, None)
        if endpoint is None:
            return
        zone = endpoint.network
        _uncall(endpoint)
        for address in endpoint.addresses:
            if zone.addresses.get(address) is endpoint:
                del zone.addresses[address]
        zone.endpoints -= 1
        self._tidy(endpoint)
        own = self._containers[endpoint.container_id]
        own.remove(endpoint)
        if not own:
            del self._containers[endpoint.container_id]

    def find(self, container_id: str, name: bytes, *, turn: bool = True) -> Sequence[bytes] | None:
        """Packed IPv4 and IPv6 addresses of a name as this container sees it; None when it sees no
        such name.

        Several endpoints of that name are rotated. Without `turn` the answer is the last one again:
        clients ask for both kinds of address at once.
        """
        own = self._containers.get(container_id)
        if own is None:
            return None
        for endpoint in own:
            called = endpoint.network.names.get(endpoint.links.get(name, name))
            if called is not None:
                return _addresses(called, turn)
        for endpoint in own:
            suffix = endpoint.network.suffix
            if suffix and len(name) > len(suffix) and name.endswith(suffix):
                short = name[: -len(suffix)]
                called = endpoint.network.names.get(endpoint.links.get(short, short))
                if called is not None:
                    return _addresses(called, turn)
        return None

    def reverse(self, container_id: str, address: bytes) -> bytes | None:
        """`container.network` of the endpoint that has this address on a network of this container;
        None when there is none.
        """
        for endpoint in self._containers.get(container_id, ()):
            zone = endpoint.network
            owner = zone.addresses.get(address) or zone.elsewhere.get(address)
            if owner is not None and owner.names:
                name = owner.names[0] + endpoint.network.suffix
                return name if len(name) <= dns.LONGEST_NAME else owner.names[0]
        return None


def _call(endpoint: _Endpoint) -> None:
    names = endpoint.network.names
    for name in endpoint.names:
        called = names.get(name)
        if called is None:
            called = names[name] = _Called()
        called.append(endpoint)


def _uncall(endpoint: _Endpoint) -> None:
    names = endpoint.network.names
    for name in endpoint.names:
        called = names[name]
        called.remove(endpoint)
        if not called:
            del names[name]


def _addresses(called: _Called, turn: bool) -> Sequence[bytes]:
    only = called[0]
    if len(called) == 1 and not only.rotated:
        return only.addresses
    called.turn += turn
    if len(called) == 1:
        return _rotated(only.addresses, called.turn)
    # A container of this host on a swarm's network is there twice.
    return [
        *dict.fromkeys(
            address
            for each in _rotated(called, called.turn)
            for address in (_rotated(each.addresses, called.turn) if each.rotated else each.addresses)
        )
    ]


def _rotated(things: Sequence[T], turn: int) -> Sequence[T]:
    if not things:
        return things
    first = turn % len(things)
    return [*things[first:], *things[:first]]
