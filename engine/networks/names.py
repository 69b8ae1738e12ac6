"""Names of containers and addresses on each network: the table that the resolver answers from.

A container sees the names of the networks that it has an endpoint on, and no others. Of equal names
it sees those of the network that it joined first. A name may carry its network: `web.mynet`. Links
are names that only the container with the link sees. Rules: Docker's for user-defined networks. The
default bridge has no names, so it has no endpoints here.

Derived from the endpoints of running containers, never stored. Pure, used on the event loop alone.
A change costs O(own names), a query one lookup per network. Names are held as `dns.py` describes.
Not here: sockets and messages (`resolver.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address
from typing import NamedTuple

from engine.networks import dns


class Names(NamedTuple):
    """Names on a network that lead to these addresses, of something that need not be a container
    here.
    """

    names: tuple[str, ...]
    addresses: tuple[IPv4Address, ...]
    rotated: bool = False
    """Each answer begins with another address."""


class _Network:
    __slots__ = ("addresses", "endpoints", "name", "names", "suffix")

    def __init__(self, name: str) -> None:
        self.name = name
        self.suffix = dns.encoded(name) or b""
        self.names: dict[bytes, list[_Endpoint]] = {}
        self.addresses: dict[bytes, _Endpoint] = {}
        self.endpoints = 0


class _Endpoint:
    __slots__ = ("addresses", "container_id", "links", "names", "network", "network_id")

    network_id: str
    network: _Network
    container_id: str
    names: tuple[bytes, ...]
    addresses: tuple[bytes, ...]
    links: dict[bytes, bytes]


class NameTable:
    """Endpoints by network and container."""

    def __init__(self) -> None:
        self._networks: dict[str, _Network] = {}
        self._endpoints: dict[str, _Endpoint] = {}
        self._containers: dict[str, list[_Endpoint]] = {}
        self._turn = 0

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
        zone = self._networks.get(network_id)
        if zone is None:
            zone = self._networks[network_id] = _Network(network)
        endpoint = _Endpoint()
        endpoint.network_id, endpoint.network, endpoint.container_id = network_id, zone, container_id
        endpoint.names = tuple(dict.fromkeys(name for name in map(dns.encoded, names) if name is not None))
        endpoint.addresses = tuple(address.packed for address in addresses)
        endpoint.links = {}
        for alias, target in (links or {}).items():
            name, to = dns.encoded(alias), dns.encoded(target)
            if name is not None and to is not None:
                endpoint.links[name] = to
        for name in endpoint.names:
            zone.names.setdefault(name, []).append(endpoint)
        for address in endpoint.addresses:
            zone.addresses[address] = endpoint
        zone.endpoints += 1
        self._endpoints[endpoint_id] = endpoint
        own = self._containers.setdefault(container_id, [])
        own.insert(len(own) if place is None else place, endpoint)

    def _place(self, endpoint_id: str) -> int | None:
        endpoint = self._endpoints.get(endpoint_id)
        return None if endpoint is None else self._containers[endpoint.container_id].index(endpoint)

    def remove(self, endpoint_id: str) -> None:
        """Forget an endpoint. An unknown one is fine."""
        endpoint = self._endpoints.pop(endpoint_id, None)
        if endpoint is None:
            return
        zone = endpoint.network
        for name in endpoint.names:
            called = zone.names[name]
            called.remove(endpoint)
            if not called:
                del zone.names[name]
        for address in endpoint.addresses:
            if zone.addresses.get(address) is endpoint:
                del zone.addresses[address]
        zone.endpoints -= 1
        if not zone.endpoints:
            del self._networks[endpoint.network_id]
        own = self._containers[endpoint.container_id]
        own.remove(endpoint)
        if not own:
            del self._containers[endpoint.container_id]

    def find(self, container_id: str, name: bytes) -> Sequence[bytes] | None:
        """Packed IPv4 and IPv6 addresses of a name as this container sees it; None when it sees no
        such name.

        Several endpoints of that name are rotated.
        """
        own = self._containers.get(container_id)
        if own is None:
            return None
        for endpoint in own:
            called = endpoint.network.names.get(endpoint.links.get(name, name))
            if called is not None:
                return self._addresses(called)
        for endpoint in own:
            suffix = endpoint.network.suffix
            if suffix and len(name) > len(suffix) and name.endswith(suffix):
                short = name[: -len(suffix)]
                called = endpoint.network.names.get(endpoint.links.get(short, short))
                if called is not None:
                    return self._addresses(called)
        return None

    def _addresses(self, called: list[_Endpoint]) -> Sequence[bytes]:
        if len(called) == 1:
            return called[0].addresses
        self._turn += 1
        first = self._turn % len(called)
        return [address for each in called[first:] + called[:first] for address in each.addresses]

    def reverse(self, container_id: str, address: bytes) -> bytes | None:
        """`container.network` of the endpoint that has this address on a network of this container;
        None when there is none.
        """
        for endpoint in self._containers.get(container_id, ()):
            owner = endpoint.network.addresses.get(address)
            if owner is not None and owner.names:
                name = owner.names[0] + endpoint.network.suffix
                return name if len(name) <= dns.LONGEST_NAME else owner.names[0]
        return None
