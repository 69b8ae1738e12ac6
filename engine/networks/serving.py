"""Published ports on a host where the engine writes no firewall rules (`--firewall none`): a socket
listens on each, and the monitor passes on what comes to it.

So containers see the bridge's address instead of their clients', as with Docker's proxy. The
monitor holds the sockets for the next daemon, which finds them by name; no connection is refused
meanwhile.

Owns: nothing for long; the monitor's client has the descriptors. Threads: `listen` any, the others
run on the event loop. Not here: which ports a container gets (`ports.py`, `publishing.py`). Raises:
PortTaken in Docker's words.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address
from typing import NamedTuple, Protocol

from engine.networks.ports import ANY, PROTOCOLS, PortInUse, PortTaken, Published, shown, single

_PREFIX = "port "

Addresses = tuple[IPv4Address | None, IPv6Address | None]


class Server(Protocol):
    """Holds sockets, and passes on what comes to them: the monitor."""

    @property
    def held(self) -> Mapping[str, int]:
        """By name, those of an earlier daemon as well."""
        ...

    def serve(self, name: str, listener: int, address: bytes, port: int) -> None:
        """Begin with a duplicate of the socket. It replaces the one of that name."""
        ...

    async def end_serving(self, names: Sequence[str]) -> None:
        """Close those of these names; their ports are free on return. Unknown ones are fine."""
        ...


class Listening(NamedTuple):
    """A socket that listens on a published port, and where it leads to."""

    name: str
    listener: socket.socket
    address: bytes
    port: int


class Serving:
    """One engine's."""

    def __init__(self, server: Server | None, *, active: bool) -> None:
        """`active`: the engine writes no rules. Without a server no port can be published so."""
        self.active = active
        self._server = server

    def listen(self, owner: str, addresses: Addresses, ports: Iterable[Published]) -> list[Listening]:
        """Sockets for all these ports, or none. Blocks for some microseconds a port.

        Raises PortTaken.
        """
        made: list[Listening] = []
        try:
            for each in single(ports):
                address = _leads_to(each, addresses)
                # An IPv4 port is served by IPv6, too, unless IPv6 has a container of its own there.
                both = each.host_ip == ANY[0] and addresses[1] is None
                made.append(Listening(_name(owner, each), _listener(each, both), address.packed, each.port))
        except BaseException:
            for one in made:
                one.listener.close()
            raise
        return made

    def begin(self, listening: Iterable[Listening]) -> None:
        """Serve these sockets, which are closed here."""
        for each in listening:
            assert self._server is not None
            self._server.serve(each.name, each.listener.fileno(), each.address, each.port)
            each.listener.close()

    async def end(self, owner: str) -> None:
        """Close the sockets of an owner's ports; the ports are free on return."""
        await self._end(name for name in self._names() if name.startswith(f"{_PREFIX}{owner} "))

    async def settle(
        self, restored: Iterable[tuple[str, Addresses, Sequence[Published]]]
    ) -> list[tuple[str, PortTaken]]:
        """Serve the ports of containers that ran on, and no others. Returns the failures, by
        owner.
        """
        if not self.active:
            await self._end(self._names())
            return []
        server, kept, failures = self._server, set[str](), list[tuple[str, PortTaken]]()
        for owner, addresses, ports in restored:
            for each in single(ports):
                kept.add(name := _name(owner, each))
                assert server is not None
                try:
                    if name in server.held:
                        server.serve(name, server.held[name], _leads_to(each, addresses).packed, each.port)
                    else:
                        self.begin(await asyncio.to_thread(self.listen, owner, addresses, [each]))
                except PortTaken as error:
                    failures.append((owner, error))
        await self._end(name for name in self._names() if name not in kept)
        return failures

    def _names(self) -> Iterator[str]:
        if self._server is not None:
            yield from (name for name in [*self._server.held] if name.startswith(_PREFIX))

    async def _end(self, names: Iterable[str]) -> None:
        if self._server is not None and (ended := [*names]):
            await self._server.end_serving(ended)


def _name(owner: str, port: Published) -> str:
    return f"{_PREFIX}{owner} {port.protocol} {port.host_ip} {port.host_port} {port.port}"


def _leads_to(port: Published, addresses: Addresses) -> IPv4Address | IPv6Address:
    """The container's address of the same IP version, or its only one."""
    fourth, sixth = addresses
    found = (sixth or fourth) if port.version == 6 else (fourth or sixth)
    assert found is not None, "an endpoint with published ports has an address"
    return found


def _listener(port: Published, both: bool) -> socket.socket:
    """A socket that listens on this single port; with `both` on that of IPv6, too, if it is free
    there.
    """
    if both:
        try:
            return _bound(port, socket.AF_INET6, "::", both=True)
        except OSError:
            pass  # a host without IPv6, or a program that has the port by one of them
    try:
        return _bound(port, socket.AF_INET6 if port.version == 6 else socket.AF_INET, port.host_ip)
    except OSError as error:
        where = shown(port.host_ip, port.host_port)
        words = f"listen {port.protocol}{port.version} {where}: bind: {os.strerror(error.errno or 0).lower()}"
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(words, (port.protocol, port.host_port)) from error
        raise PortTaken(words) from error


def _bound(port: Published, family: int, address: str, *, both: bool = False) -> socket.socket:
    datagrams = port.protocol == "udp"
    kind = socket.SOCK_DGRAM if datagrams else socket.SOCK_STREAM
    made = socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, PROTOCOLS[port.protocol])
    try:
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not both)
        if not datagrams:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((address, port.host_port))
        if not datagrams:
            made.listen(socket.SOMAXCONN)
    except BaseException:
        made.close()
        raise
    return made
