"""Datagrams to published ports that no rule of the host leads to containers: the monitor passes
them on, and their answers back.

Each client has a socket of its own towards the container, until nothing was heard from either side
for `IDLE`. An answer leaves from the address that the client has sent to (IP_PKTINFO).

Rules: ip(7), ipv6(7). Not here: connections (`_fast/relay.pyx`).
Owns: the listening socket, and the clients' sockets. Threads: the loop's. Raises: OSError when a
descriptor cannot be watched.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterable
from typing import Any

from engine._fast.pump import Loop
from engine._fast.relay import Room

IDLE = 90.0
"""Seconds, as of Docker's proxy."""
_TURN = 32
"""Datagrams of one socket in a turn, before other descriptors are served."""
_LONGEST = 65535
_IP_PKTINFO = 8
"""linux/in.h"""
_LINK_LOCAL6 = b"\xfe\x80"

Ancillary = tuple[tuple[int, int, bytes], ...]


class Datagrams:
    """The relay of one listening socket."""

    def __init__(self, loop: Loop, descriptor: int, address: bytes, room: Room, port: int) -> None:
        """Takes the descriptor over. `address`: packed."""
        self._loop = loop
        self._listener = socket.socket(fileno=descriptor)
        self._family = socket.AF_INET if len(address) == 4 else socket.AF_INET6
        self._target = socket.inet_ntop(self._family, address), port
        self._room = room
        self._clients: dict[tuple[Any, Ancillary], _Client] = {}
        self._sweeping = False
        self._listener.setblocking(False)
        if self._listener.family == socket.AF_INET:
            self._listener.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)
        else:
            self._listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
        self._watch = loop.watch(descriptor, self._readable)

    def close(self) -> None:
        """Pass on no more, in either direction."""
        self._watch.cancel()
        self._listener.close()
        for client in self._clients.values():
            self._end(client)
        self._clients.clear()

    def answer(self, data: bytes, client: _Client) -> None:
        """Send a client what the container has sent."""
        with contextlib.suppress(OSError):
            self._listener.sendmsg([data], client.ancillary, 0, client.address)

    def _readable(self, events: int) -> None:
        for _ in range(_TURN):
            try:
                data, ancillary, _, address = self._listener.recvmsg(_LONGEST, 64)
            except BlockingIOError:
                return
            except OSError:  # an ICMP message about an earlier answer
                continue
            client = self._client(address, _from_same_address(ancillary))
            if client is not None:
                client.send(data)

    def _client(self, address: Any, ancillary: Ancillary) -> _Client | None:
        """None if there is no room for another one."""
        client = self._clients.get((address, ancillary))
        if client is None and self._room.count < self._room.most:
            try:
                client = _Client(self._loop, self, address, ancillary, self._family, self._target)
            except OSError:
                return None
            self._clients[address, ancillary] = client
            self._room.count += 1
            if not self._sweeping:
                self._sweeping = True
                self._loop.call_later(IDLE / 3, self._sweep)
        return client

    def _sweep(self) -> None:
        before = time.monotonic() - IDLE
        for key, client in [*self._clients.items()]:
            if client.heard < before:
                del self._clients[key]
                self._end(client)
        self._sweeping = bool(self._clients)
        if self._sweeping:
            self._loop.call_later(IDLE / 3, self._sweep)

    def _end(self, client: _Client) -> None:
        client.close()
        self._room.count -= 1


class _Client:
    """The socket of one client towards the container."""

    def __init__(
        self,
        loop: Loop,
        relay: Datagrams,
        address: Any,
        ancillary: Ancillary,
        family: int,
        target: tuple[str, int],
    ) -> None:
        self.address = address
        self.ancillary = ancillary
        self.heard = time.monotonic()
        self._relay = relay
        self._socket = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            self._socket.connect(target)
            self._watch = loop.watch(self._socket.fileno(), self._readable)
        except OSError:
            self._socket.close()
            raise

    def send(self, data: bytes) -> None:
        self.heard = time.monotonic()
        with contextlib.suppress(OSError):  # lost, as datagrams may be
            self._socket.send(data)

    def _readable(self, events: int) -> None:
        for _ in range(_TURN):
            try:
                data = self._socket.recv(_LONGEST)
            except BlockingIOError:
                return
            except OSError:  # the port is closed in the container
                continue
            self.heard = time.monotonic()
            self._relay.answer(data, self)

    def close(self) -> None:
        self._watch.cancel()
        self._socket.close()


def is_stream(descriptor: int) -> bool:
    """True for a socket of connections, False for one of datagrams."""
    with socket.socket(fileno=os.dup(descriptor)) as borrowed:
        return borrowed.type == socket.SOCK_STREAM


def _from_same_address(ancillary: Iterable[tuple[int, int, bytes]]) -> Ancillary:
    """What makes an answer leave from the address that a datagram was sent to."""
    for level, kind, data in ancillary:
        if (level, kind) == (socket.IPPROTO_IP, _IP_PKTINFO):
            return ((level, kind, struct.pack("=i4s4s", 0, data[4:8], bytes(4))),)
        if (level, kind) == (socket.IPPROTO_IPV6, socket.IPV6_PKTINFO) and data[0] != 0xFF:
            link = data[16:20] if data[:2] == _LINK_LOCAL6 else bytes(4)
            return ((level, kind, data[:16] + link),)
    return ()
