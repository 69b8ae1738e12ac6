"""The resolver on 127.0.0.11 port 53 inside the namespaces of containers on user-defined networks.

Names that `NameTable` knows are answered at once. Other queries are forwarded: to the container's
own servers, from inside its namespace, so that routing is the container's; or to the host's
servers, from the host's namespace, because they may be on its loopback. For a container on internal
networks alone the host's servers are never asked. Nothing is cached.

The sockets have ports that the kernel chose. Stateless rules in the container's namespace, between
loopback and itself, translate port 53 to them, so 0.0.0.0:53 stays free for a server of the
container's own. No connection tracking is involved.

Waiting queries are bounded for each container and for all; SERVFAIL answers those beyond.

Owns:    two sockets and the rules of each container's namespace (which live with it), and one
         thread, which enters namespaces.
Threads: that one, and the event loop's, where nothing waits and nothing is locked.
Rules:   RFC 1035, 4.2 (UDP, TCP), RFC 7766.
Raises:  ServerError when a namespace cannot be served.
Not here: names (`common/names.py`), messages (`dns.py`), asking other servers (`forwarding.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import os
import re
import socket
from collections.abc import Callable, Sequence
from itertools import islice
from typing import cast

from engine.errors import ServerError, words
from engine.networks.dns import messages as dns
from engine.networks.dns.forwarding import Forwarder, HostServers, Server, open_socket
from engine.networks.dns.messages import Query
from engine.networks.dns.names import NameTable
from engine.system import namespaces, netfilter
from engine.system.tasks import shield
from engine.system.threads import Threads

_log = logging.getLogger(__name__)

ADDRESS = "127.0.0.11"
"""Docker's address, which a container's resolv.conf names."""

TTL = 5
"""Seconds that an answer of the engine may be cached.

Docker says 600, which lets caches send clients to containers that are long gone.
"""

WAITING, WAITING_IN_A_CROWD = 256, 16
"""Most waiting queries of one container. The second number holds while all containers together wait
for more than `CROWD`.
"""
CROWD = 4096

CONNECTIONS = 32
"""Most TCP connections of one container."""
IDLE = 10.0
"""Seconds after which a TCP connection without a query is closed."""

REST = 1.0
"""Seconds before connections are accepted again when descriptors ran out."""

BATCH = 16
"""Datagrams of one container that are answered before other containers get a turn."""

_LONGEST = 65535
_LENGTHS = {dns.A: 4, dns.AAAA: 16}
_SEND_BUFFER = 64 << 10

_TABLE = "ip engined-names"
_RULES = """
create table {table}
table {table} {{
    chain output {{
        type filter hook output priority raw; policy accept;
        oif != 1 accept
        ip daddr {address} udp dport 53 udp dport set {udp} accept
        ip saddr {address} udp sport {udp} udp sport set 53 accept
        ip daddr {address} tcp dport 53 tcp dport set {tcp} accept
        ip saddr {address} tcp sport {tcp} tcp sport set 53 accept
    }}
}}
"""
"""Interface 1 is every namespace's loopback.

Making these rules takes 0.3 ms. Deleting any, or failing, takes up to 20 ms, as the kernel waits
for an RCU grace period.
"""
_PORT_OF_RULE = re.compile(r"(udp|tcp) dport 53 \1 dport set (\d+)")


class _Client:
    """A container whose namespace is served."""

    __slots__ = ("connections", "container_id", "forward", "servers", "tcp", "udp", "waiting")

    def __init__(self, container_id: str, servers: tuple[Server, ...], forward: bool) -> None:
        self.container_id = container_id
        self.servers = servers
        """The container's own servers; empty for the host's."""
        self.forward = forward
        self.udp: socket.socket | None = None
        self.tcp: socket.socket | None = None
        self.waiting: dict[object, asyncio.Task[None]] = {}
        self.connections: set[_Connection] = set()


class Resolver:
    """All containers' resolver. Call on the event loop."""

    def __init__(self, names: NameTable, host_servers: Callable[[], Sequence[Server]] | None = None) -> None:
        self.names = names
        self._host_servers = host_servers or HostServers().read
        self._clients: dict[str, _Client] = {}
        self._thread = Threads(1, ready=True)
        self._forwarder = Forwarder()
        self._waiting = 0

    async def open_for(
        self,
        container_id: str,
        namespace: int,
        *,
        servers: Sequence[str] = (),
        forward: bool = True,
        again: bool = False,
    ) -> None:
        """Serve the network namespace of this descriptor, which may be closed afterwards. Its
        loopback must be up.

        `servers` are addresses to ask from inside in place of the host's. `forward`: the host's
        servers may be asked, which is False for a container without a route out. For a container
        that is already served both are updated. `again`: an earlier daemon may have served it.
        Raises ServerError.
        """
        client = self._clients.get(container_id)
        chosen = tuple(map(Server, servers))
        if client is not None:
            client.servers, client.forward = chosen, forward
            return
        client = self._clients[container_id] = _Client(container_id, chosen, forward)
        try:
            await shield(self._open(client, namespace, again))
        except OSError as error:
            self.close_for(container_id)
            raise ServerError(f"container {container_id}: no resolver on {ADDRESS}: {words(error)}") from error
        except BaseException:
            self.close_for(container_id)
            raise

    def _open(
        self, client: _Client, namespace: int, again: bool
    ) -> asyncio.Future[tuple[socket.socket, socket.socket]]:
        own = os.dup(namespace)
        try:
            opening = self._thread.run(_listen, own, again)
        except BaseException:
            os.close(own)
            raise
        opening.add_done_callback(functools.partial(self._opened, client, own))
        return opening

    def _opened(
        self, client: _Client, namespace: int, opening: asyncio.Future[tuple[socket.socket, socket.socket]]
    ) -> None:
        os.close(namespace)
        if opening.cancelled() or opening.exception() is not None:
            return
        udp, tcp = opening.result()
        if self._clients.get(client.container_id) is not client:
            udp.close()
            tcp.close()
            return
        client.udp, client.tcp = udp, tcp
        loop = asyncio.get_running_loop()
        loop.add_reader(udp.fileno(), self._datagrams, client, udp)
        loop.add_reader(tcp.fileno(), self._connection, client, tcp)

    def forward(self, container_id: str, allowed: bool) -> None:
        """Enable or disable forwarding this container's queries to the host's servers.

        A container that is not served is fine.
        """
        client = self._clients.get(container_id)
        if client is not None:
            client.forward = allowed

    def serves(self, container_id: str) -> bool:
        return container_id in self._clients

    def close_for(self, container_id: str) -> None:
        """Stop serving a container. One that is not served is fine."""
        client = self._clients.pop(container_id, None)
        if client is None:
            return
        loop = asyncio.get_running_loop()
        for each in (client.udp, client.tcp):
            if each is not None:
                loop.remove_reader(each.fileno())
                each.close()
        client.udp = client.tcp = None
        for task in tuple(client.waiting.values()):
            task.cancel()
        for connection in tuple(client.connections):
            connection.close()

    async def close(self) -> None:
        """Stop serving all containers."""
        tasks = [task for client in self._clients.values() for task in client.waiting.values()]
        for container_id in tuple(self._clients):
            self.close_for(container_id)
        await asyncio.gather(*tasks, return_exceptions=True)
        self._thread.close()

    # --- questions --------------------------------------------------------------------------------

    def _datagrams(self, client: _Client, udp: socket.socket) -> None:
        for _ in range(BATCH):
            try:
                message, address = udp.recvfrom(dns.LARGEST)
            except OSError:
                return  # no more datagrams, or an error caused by a client's own ICMP
            try:
                query = dns.parse(message)
            except dns.Malformed as error:
                reply = error.reply
            else:
                reply = self._known(client, query, query.size)
                if reply is None:
                    key = (address, message)
                    if key in client.waiting:
                        continue  # the same query again while it waits
                    reply = self._pass_on(
                        client, query, message, key, functools.partial(_send, client, address), stream=False
                    )
            if reply is not None:
                _send(client, address, reply)

    def _connection(self, client: _Client, tcp: socket.socket) -> None:
        try:
            accepted, _ = tcp.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._rest(client, tcp)
            return
        if len(client.connections) >= CONNECTIONS:
            accepted.close()
            return
        accepted.setblocking(False)
        connection = _Connection(self, client)
        client.connections.add(connection)
        task = asyncio.ensure_future(asyncio.get_running_loop().connect_accepted_socket(lambda: connection, accepted))
        task.add_done_callback(connection.accepted)

    def _rest(self, client: _Client, tcp: socket.socket) -> None:
        """Stop accepting for a while: without a free descriptor, waiting connections would wake the
        loop again and again.
        """
        loop = asyncio.get_running_loop()
        loop.remove_reader(tcp.fileno())

        def again() -> None:
            if client.tcp is tcp:
                loop.add_reader(tcp.fileno(), self._connection, client, tcp)

        loop.call_later(REST, again)

    def stream_query(self, connection: _Connection, client: _Client, message: bytes) -> bytes | None:
        """The reply to a query of a connection; None when it comes later or never."""
        try:
            query = dns.parse(message)
        except dns.Malformed as error:
            return error.reply
        reply = self._known(client, query, _LONGEST)
        if reply is None:
            reply = self._pass_on(client, query, message, object(), connection.reply, stream=True)
        return reply

    def _known(self, client: _Client, query: Query, limit: int) -> bytes | None:
        """The engine's own answer; None when the query must be forwarded."""
        kind = query.type
        if query.class_ not in (dns.IN, dns.ANY):
            return None
        if kind == dns.PTR or (kind == dns.ANY and query.name.endswith(b"\x04arpa")):
            address = dns.address_of(query.name)
            name = self.names.reverse(client.container_id, address) if address is not None else None
            return dns.answer(query, (dns.pointer_record(name, TTL),), limit=limit) if name is not None else None
        addresses = self.names.find(client.container_id, query.name, turn=kind != dns.AAAA)
        if addresses is None:
            return None
        # A name without a record of this type is an empty answer, not an unknown name (RFC 2308,
        # 2.2).
        length = _LENGTHS.get(kind, 0)
        # One record more than fits, so that the answer is cut off with TC set.
        wanted = (each for each in addresses if len(each) == length or kind == dns.ANY)
        records = [dns.address_record(each, TTL) for each in islice(wanted, limit // dns.SHORTEST_RECORD + 1)]
        return dns.answer(query, records, limit=limit)

    # --- forwarding
    # -----------------------------------------------------------------------------------

    def _pass_on(
        self,
        client: _Client,
        query: Query,
        message: bytes,
        key: object,
        deliver: Callable[[bytes], None],
        *,
        stream: bool,
    ) -> bytes | None:
        """Forward a query; `deliver` gets the answer.

        Returns the reply when it is known already.
        """
        if not client.forward and not client.servers:
            # A name of one label can only be a container's, and there is none. Nothing is known
            # here about other names.
            single = len(query.name) == query.name[0] + 1 if query.name else False
            return dns.answer(query, (), rcode=dns.NAME_ERROR if single else dns.SERVER_FAILURE, authoritative=single)
        servers = client.servers or tuple(self._host_servers())
        most = WAITING if self._waiting < CROWD else WAITING_IN_A_CROWD
        if not servers or len(client.waiting) >= most:
            return dns.answer(query, (), rcode=dns.SERVER_FAILURE, authoritative=False)
        task = asyncio.ensure_future(self._asked(client, query, message, servers, deliver, stream=stream))
        client.waiting[key] = task
        self._waiting += 1
        task.add_done_callback(functools.partial(self._no_longer_waits, client, key))
        return None

    def _no_longer_waits(self, client: _Client, key: object, task: asyncio.Task[None]) -> None:
        self._waiting -= 1
        client.waiting.pop(key, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("container %s: a query was lost", client.container_id, exc_info=error)

    async def _asked(
        self,
        client: _Client,
        query: Query,
        message: bytes,
        servers: Sequence[Server],
        deliver: Callable[[bytes], None],
        *,
        stream: bool,
    ) -> None:
        ask = self._forwarder.by_stream if stream else self._forwarder.by_datagram
        try:
            reply = await ask(query, message, servers, functools.partial(self._socket, client))
        except OSError as error:  # out of descriptors, for example
            _log.warning("container %s: cannot forward a query: %s", client.container_id, words(error))
            reply = None
        if reply is None:
            reply = dns.answer(query, (), rcode=dns.SERVER_FAILURE, authoritative=False)
        deliver(dns.with_id(reply, query.id))

    async def _socket(self, client: _Client, server: Server, kind: socket.SocketKind) -> socket.socket:
        """A socket in the namespace from which the server is asked; one for datagrams is connected
        to it.

        See `forwarding.open_socket`.
        """
        if not client.servers:
            return open_socket(server, kind)
        if client.udp is None:
            raise OSError("the container has ended")
        # A duplicate, as the container's descriptor may be closed, and its number reused, before
        # the thread runs.
        namespace = namespaces.of_socket(client.udp.fileno())
        try:
            making = self._thread.run(_asking_inside, namespace, server, kind)
        except BaseException:
            os.close(namespace)
            raise
        try:
            return await shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(_close_unwanted)
            raise


class _Connection(asyncio.Protocol):
    """A container's TCP connection: length-prefixed queries, answered in any order (RFC 7766,
    6.2.1).
    """

    def __init__(self, resolver: Resolver, client: _Client) -> None:
        self._resolver = resolver
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._paused = False
        self._idle: asyncio.TimerHandle | None = None

    def accepted(self, task: asyncio.Task[object]) -> None:
        """The connection attempt is over, successful or not."""
        if task.cancelled() or task.exception() is not None:
            self._client.connections.discard(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport has no base class
        transport = self._transport = cast(asyncio.Transport, transport)
        transport.set_write_buffer_limits(_SEND_BUFFER)
        if self not in self._client.connections or self._client.tcp is None:
            transport.abort()
        self._wait()

    def connection_lost(self, error: Exception | None) -> None:
        self._client.connections.discard(self)
        self._transport = None
        if self._idle is not None:
            self._idle.cancel()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._received += data
        self._wait()
        self._answer()

    def pause_writing(self) -> None:
        """The client sends queries without reading answers: read no more until it does."""
        self._paused = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._paused = False
        if self._transport is not None:
            self._transport.resume_reading()
            self._answer()

    def _answer(self) -> None:
        received, position = self._received, 0
        while not self._paused and len(received) - position >= 2:
            end = position + 2 + int.from_bytes(received[position : position + 2], "big")
            if len(received) < end:
                break
            message = bytes(received[position + 2 : end])
            position = end
            reply = self._resolver.stream_query(self, self._client, message)
            if reply is not None:
                self.reply(reply)
        del received[:position]

    def reply(self, message: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(len(message).to_bytes(2, "big") + message)

    def _wait(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        self._idle = asyncio.get_running_loop().call_later(IDLE, self.close)


def _send(client: _Client, address: tuple[str, int], reply: bytes) -> None:
    if client.udp is not None:
        with contextlib.suppress(OSError):  # its buffer is full, or it was closed
            client.udp.sendto(reply, address)


# --- in the thread --------------------------------------------------------------------------------


def _listen(namespace: int, again: bool) -> tuple[socket.socket, socket.socket]:
    """The two sockets inside, translated to port 53; without nftables they are bound to it."""
    with namespaces.inside_network(namespace):
        if not again:
            with contextlib.suppress(netfilter.NetfilterError):
                return _shown()
        if (found := _former()) is not None:
            return found
        try:
            netfilter.run(f"add table {_TABLE}\ndelete table {_TABLE}")
            return _shown()
        except netfilter.NetfilterError as error:
            _log.warning("containers cannot bind 0.0.0.0:53 themselves beside %s: %s", ADDRESS, error)
            return _bound(53, 53)


def _shown() -> tuple[socket.socket, socket.socket]:
    udp, tcp = _bound(0, 0)
    try:
        ports = {"udp": udp.getsockname()[1], "tcp": tcp.getsockname()[1]}
        netfilter.run(_RULES.format(table=_TABLE, address=ADDRESS, **ports))
    except BaseException:
        udp.close()
        tcp.close()
        raise
    return udp, tcp


def _former() -> tuple[socket.socket, socket.socket] | None:
    """Sockets on the ports of an earlier daemon, if its rules are still there and its ports are
    free.
    """
    with contextlib.suppress(netfilter.NetfilterError, KeyError, OSError):
        found = _PORT_OF_RULE.findall(netfilter.run(f"list table {_TABLE}"))
        ports = {protocol: int(port) for protocol, port in found}
        return _bound(ports["udp"], ports["tcp"])
    return None


def _bound(udp_port: int, tcp_port: int) -> tuple[socket.socket, socket.socket]:
    with contextlib.ExitStack() as undo:
        udp = undo.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK))
        tcp = undo.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
        # So that the next daemon can bind this port while connections of this daemon linger there.
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        udp.bind((ADDRESS, udp_port))
        tcp.bind((ADDRESS, tcp_port))
        tcp.listen(CONNECTIONS)
        undo.pop_all()
    return udp, tcp


def _asking_inside(namespace: int, server: Server, kind: socket.SocketKind) -> socket.socket:
    try:
        with namespaces.inside_network(namespace):
            return open_socket(server, kind)
    finally:
        os.close(namespace)


def _close_unwanted(making: asyncio.Future[socket.socket]) -> None:
    if not making.cancelled() and making.exception() is None:
        making.result().close()
