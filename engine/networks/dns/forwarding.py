"""Queries of the resolver that other DNS servers answer: which server is asked when, and which
answer counts.

Each query has a socket on a random port, connected to the server, and a random id; only the answer
to its own question is accepted (RFC 5452). After `PATIENCE` a second server is asked too. Silent
servers are asked last for `GRUDGE`. Nothing is cached.

Owns:    the sockets of queries under way, and the memory of silent servers.
Threads: the event loop's.
Rules:   RFC 1035, 4.2; resolv.conf(5). Not here: the namespace that a socket is opened in and how
many queries wait (`resolver.py`), messages (`dns.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from engine.networks.dns import messages as dns
from engine.networks.dns.messages import Query
from engine.system.tasks import shield

PATIENCE = 1.5
"""Seconds until a second server is asked, or the only one again."""
TIME_LIMIT = 4.5
"""Seconds until a query fails. libc gives up, or asks again, after 5."""
GRUDGE = 10.0
"""Seconds for which a server that did not answer in time is asked last."""

_LONGEST = 65535
_RELOAD = 5.0


class Server(NamedTuple):
    """A server to ask. `address` may carry an interface, `fe80::1%eth0`."""

    address: str
    port: int = 53


Opener = Callable[[Server, socket.SocketKind], Awaitable[socket.socket]]
"""Opens a socket as `open_socket` does, in the namespace from which the server is asked."""


class Forwarder:
    """See the module. One for all containers."""

    def __init__(self) -> None:
        self._silent: dict[Server, float] = {}
        """Servers that did not answer in time → until when they are asked last."""

    async def by_datagram(
        self, query: Query, message: bytes, servers: Sequence[Server], opener: Opener
    ) -> bytes | None:
        """Ask over UDP: the first server, after `PATIENCE` or a refusal the next, until one has
        answered.

        Returns the answer with an id of its own, a refusal when no server gave better, or None.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + TIME_LIMIT
        number = int.from_bytes(os.urandom(2), "big")
        question = dns.with_id(message, number)
        asked: dict[Server, socket.socket] = {}
        failed: set[Server] = set()
        refusal: bytes | None = None
        news: asyncio.Future[tuple[Server, bytes | None]] = loop.create_future()

        def readable(server: Server, asking: socket.socket) -> None:
            if news.done():
                return  # one at a time: this one is still there on the next pass
            try:
                reply = asking.recv(_LONGEST)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:  # ICMP: port unreachable
                reply = None
            if reply is None or dns.answers(reply, number, query):
                news.set_result((server, reply))

        try:
            for server in itertools.cycle(self._in_order(servers)):
                if server not in failed:
                    try:
                        if (asking := asked.get(server)) is None:
                            asking = asked[server] = await opener(server, socket.SOCK_DGRAM)
                            loop.add_reader(asking.fileno(), readable, server, asking)
                        asking.send(question)
                    except OSError:  # no route to it
                        failed.add(server)
                if failed.issuperset(servers):
                    return refusal
                # This server's turn lasts until it has answered or failed; failures of other
                # servers do not end it.
                turn_ends = min(end, loop.time() + PATIENCE)
                while server not in failed:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout_at(turn_ends):
                            await shield(news)
                    if not news.done():
                        self._was_silent(server)
                        if loop.time() >= end:
                            return refusal
                        break
                    source, reply = news.result()
                    news = loop.create_future()
                    if reply is not None and dns.rcode(reply) in (dns.NO_ERROR, dns.NAME_ERROR):
                        self._silent.pop(source, None)
                        return reply
                    failed.add(source)
                    refusal = reply or refusal
        finally:
            for each in asked.values():
                loop.remove_reader(each.fileno())
                each.close()
        return None

    async def by_stream(self, query: Query, message: bytes, servers: Sequence[Server], opener: Opener) -> bytes | None:
        """Ask over TCP, one server after another. Returns as `by_datagram`."""
        loop = asyncio.get_running_loop()
        end = loop.time() + TIME_LIMIT
        number = int.from_bytes(os.urandom(2), "big")
        frame = len(message).to_bytes(2, "big") + dns.with_id(message, number)
        refusal: bytes | None = None
        for left, server in zip(range(len(servers), 0, -1), self._in_order(servers), strict=True):
            try:
                async with asyncio.timeout((end - loop.time()) / left):
                    reply = await _over_tcp(server, frame, opener)
            except TimeoutError:  # an OSError, so it comes first
                self._was_silent(server)
                continue
            except (OSError, EOFError):
                continue
            if dns.answers(reply, number, query):
                if dns.rcode(reply) in (dns.NO_ERROR, dns.NAME_ERROR):
                    return reply
                refusal = reply
        return refusal

    def _in_order(self, servers: Sequence[Server]) -> list[Server]:
        """The servers in their configured order, recently silent ones last."""
        if not self._silent:
            return list(servers)
        now = time.monotonic()
        self._silent = {server: until for server, until in self._silent.items() if until > now}
        return sorted(servers, key=self._silent.__contains__)

    def _was_silent(self, server: Server) -> None:
        self._silent[server] = time.monotonic() + GRUDGE


async def _over_tcp(server: Server, frame: bytes, opener: Opener) -> bytes:
    loop = asyncio.get_running_loop()
    asking = await opener(server, socket.SOCK_STREAM)
    try:
        await loop.sock_connect(asking, _socket_address(server, asking.type))
        await loop.sock_sendall(asking, frame)
        received = bytearray()
        while len(received) < 2 or len(received) < 2 + int.from_bytes(received[:2], "big"):
            chunk = await loop.sock_recv(asking, _LONGEST)
            if not chunk:
                raise EOFError
            received += chunk
        return bytes(received[2 : 2 + int.from_bytes(received[:2], "big")])
    finally:
        asking.close()


def open_socket(server: Server, kind: socket.SocketKind) -> socket.socket:
    """A socket to ask a server with, in this thread's namespace; one for datagrams is connected.

    Raises OSError.
    """
    family = socket.AF_INET6 if ":" in server.address else socket.AF_INET
    asking = socket.socket(family, kind | socket.SOCK_NONBLOCK)
    try:
        if kind == socket.SOCK_DGRAM:
            asking.connect(_socket_address(server, kind))
    except BaseException:
        asking.close()
        raise
    return asking


def _socket_address(server: Server, kind: int) -> tuple[object, ...]:
    return socket.getaddrinfo(server.address, server.port, type=kind, flags=socket.AI_NUMERICHOST)[0][4]


class HostServers:
    """The host's servers, from its resolv.conf, which is checked again every few seconds."""

    def __init__(self, path: Path = Path("/etc/resolv.conf")) -> None:
        self._path = path
        self._servers: tuple[Server, ...] = ()
        self._looked = -_RELOAD
        self._stamp = (0, 0)

    def read(self) -> tuple[Server, ...]:
        """Returns the servers. Costs a stat(2) every few seconds, and a read when the file has
        changed.
        """
        now = time.monotonic()
        if now - self._looked >= _RELOAD:
            self._looked = now
            with contextlib.suppress(OSError):
                status = self._path.stat()
                if self._stamp != (stamp := (status.st_mtime_ns, status.st_ino)):
                    self._servers = tuple(_nameservers(self._path.read_text(errors="replace")))
                    self._stamp = stamp
        return self._servers


def _nameservers(text: str) -> Iterator[Server]:
    """The first three servers that are addresses (resolv.conf(5))."""
    found = 0
    for line in text.splitlines():
        keyword, *words = line.split(maxsplit=2) or [""]
        if keyword != "nameserver" or not words or found == 3:
            continue
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(words[0])
            found += 1
            yield Server(words[0])
