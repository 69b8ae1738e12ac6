"""The listener of agents, joining nodes and other managers: TLS on port 2377.

A certificate is optional at the handshake. A peer without one, a stranger, may send `FetchRoot`,
`Join` and `Renew` (an expired certificate) and nothing else. Each message of a peer with one is
checked against the records: a removed node is refused at once, although its certificate is valid.

Strangers cannot use up memory or descriptors. There are at most `STRANGERS` of them at a time, each
for at most `VISIT`, with short messages and few requests; when one more comes, the oldest one of
the address that has most of them is cut off. A connection that still shakes hands counts as a
stranger.

Owns:    the socket, its connections, and the tasks that read them.
Threads: the event loop's.
Raises:  OSError when the address cannot be listened on. Trouble with one peer is logged at most
         once per address and `QUIET`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import ssl
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable

from engine.errors import EngineError, Forbidden, Unavailable, words
from engine.manager.ca import Authority
from engine.manager.identity import Identity
from engine.manager.tls import Credentials, split
from engine.swarm_session import frames, messages
from engine.swarm_session.frames import Connection
from engine.swarm_session.messages import Message
from engine.swarm_session.states import Role
from engine.system.tasks import spawn

HANDSHAKE = 10.0
"""Seconds for TLS."""
VISIT = 45.0
"""Seconds that a stranger may stay: a join waits up to 20 s for quorum, and for an external CA."""
SILENCE = 60.0
"""Seconds without a message after which a known peer that has no session is cut off."""
STRANGERS = 256
STRANGER_REQUESTS = 4
CONNECTIONS = 8
"""Of one node. One more ends the oldest."""
BACKLOG = 4096
QUIET = 60.0

Serve = Callable[[Connection, Message, Identity | None], Awaitable[None]]

OPEN = (messages.FetchRoot, messages.Join, messages.Renew)
"""Served without a certificate."""
OF_MANAGERS = (messages.AddMember, messages.PromoteMember, messages.RemoveMember, messages.ReadLogs)
OF_NODES = (messages.Hello, messages.Statuses, messages.Attach, messages.Detach, messages.LeaveSwarm)
"""All others are for the Unix socket of the own daemon."""

_log = logging.getLogger(__name__)


class _Visit:
    """A connection from its acceptance on."""

    __slots__ = ("address", "connection", "host", "identity", "spoke", "task")

    def __init__(self, host: str) -> None:
        self.host, self.address = host, _place(host)
        self.connection: Connection | None = None
        self.identity: Identity | None = None
        self.task: asyncio.Task[None] | None = None
        self.spoke = 0.0

    def cut(self, why: str) -> None:
        if self.connection is not None:
            self.connection.abort(why)
        if self.task is not None:
            self.task.cancel()


class Listener:
    """`serve` is called for each message that its sender may send; `on_closed` when a connection
    has ended.
    """

    def __init__(
        self,
        credentials: Credentials,
        authority: Authority,
        serve: Serve,
        on_closed: Callable[[Connection], None],
        *,
        strangers: int = STRANGERS,
    ) -> None:
        self._credentials = credentials
        self._authority = authority
        self._serve = serve
        self._on_closed = on_closed
        self._most = strangers
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._strangers: dict[_Visit, None] = {}
        self._of_address: Counter[str] = Counter()
        self._of_node: defaultdict[str, dict[_Visit, None]] = defaultdict(dict)
        self._told: dict[str, float] = {}

    async def listen(self, address: str) -> None:
        """Accept connections at host:port. Raises OSError."""
        self._credentials.server()  # files that are unfit are an error now
        host, port = split(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listening.setblocking(False)
            listening.bind((host, port))
            listening.listen(BACKLOG)
        except BaseException:
            listening.close()
            raise
        self._socket = listening
        self._accepting = spawn(self._accept(listening), f"manager: listener on {address}", fatal=True)

    @property
    def port(self) -> int:
        assert self._socket is not None
        return int(self._socket.getsockname()[1])

    async def close(self) -> None:
        """End the listener and its connections."""
        if self._accepting is not None:
            self._accepting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._accepting
        if self._socket is not None:
            self._socket.close()
        visits = [*self._strangers, *(visit for of_node in self._of_node.values() for visit in of_node)]
        tasks = [visit.task for visit in visits if visit.task is not None]
        # side by side: a peer that is gone takes seconds
        connections = [visit.connection for visit in visits if visit.connection is not None]
        await asyncio.gather(*(connection.close() for connection in connections), return_exceptions=True)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- accepting --------------------------------------------------------------------------------

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, peer = await loop.sock_accept(listening)
            except OSError as error:  # no descriptors, or a peer that was faster
                self._tell("", f"a connection cannot be accepted: {words(error)}")
                await asyncio.sleep(0.05)
                continue
            visit = _Visit(peer[0])
            self._welcome(visit)
            visit.task = spawn(self._visit(visit, accepted), f"manager: connection of {peer[0]}")

    def _welcome(self, visit: _Visit) -> None:
        """Count a stranger, and make room for it."""
        if len(self._strangers) >= self._most:
            greedy, count = self._of_address.most_common(1)[0]
            oldest = next(each for each in self._strangers if each.address == greedy)
            self._tell(greedy, f"{count} connections without a certificate: the oldest is cut off")
            self._leave(oldest)
            oldest.cut("too many connections without a certificate")
        self._strangers[visit] = None
        self._of_address[visit.address] += 1

    def _leave(self, visit: _Visit) -> None:
        """Count it as a stranger no more."""
        if visit in self._strangers:
            del self._strangers[visit]
            self._of_address[visit.address] -= 1
            if not self._of_address[visit.address]:
                del self._of_address[visit.address]

    async def _visit(self, visit: _Visit, accepted: socket.socket) -> None:
        """One connection, from the handshake to its end."""
        try:
            connection = await self._shake_hands(visit, accepted)
            if connection is None:
                return
            visit.connection = connection
            try:
                await self._converse(visit, connection)
            finally:
                connection.abort("the listener has ended its task")
                self._on_closed(connection)
        finally:
            self._leave(visit)
            if visit.identity is not None:
                of_node = self._of_node[visit.identity.node]
                of_node.pop(visit, None)
                if not of_node:
                    del self._of_node[visit.identity.node]

    async def _shake_hands(self, visit: _Visit, accepted: socket.socket) -> Connection | None:
        """The connection, identified; None when there is none."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        try:
            async with asyncio.timeout(HANDSHAKE):
                transport, _ = await loop.connect_accepted_socket(
                    lambda: protocol,
                    accepted,
                    ssl=self._credentials.server(),
                    ssl_handshake_timeout=HANDSHAKE,
                    ssl_shutdown_timeout=2.0,
                )
        except (OSError, TimeoutError) as error:
            accepted.close()
            self._tell(visit.address, f"no TLS session: {_reason(error)}")
            return None
        except BaseException:
            accepted.close()
            raise
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        session = writer.get_extra_info("ssl_object")
        if session.selected_alpn_protocol() != frames.ALPN:
            transport.abort()
            self._tell(visit.address, f"the peer does not speak {frames.ALPN}")
            return None
        der = session.getpeercert(binary_form=True)
        if der is not None:
            try:
                visit.identity = await self._authority.known(der)
            except Unavailable as error:
                transport.abort()
                self._tell(visit.address, f"whether the certificate is one of this swarm: {error.message}")
                return None
            except EngineError as error:
                self._tell(visit.address, error.message)
        known = visit.identity is not None
        return Connection(
            reader,
            writer,
            lambda connection, message: self._check(visit, connection, message),
            dialled=False,
            longest=frames.LONGEST if known else frames.UNIDENTIFIED_LONGEST,
            most_requests=frames.MOST_REQUESTS if known else STRANGER_REQUESTS,
            peer=visit.host,
        )

    async def _converse(self, visit: _Visit, connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        visit.spoke = loop.time()
        if visit.identity is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(VISIT):
                    await connection.run()
            return
        self._leave(visit)
        of_node = self._of_node[visit.identity.node]
        of_node[visit] = None
        if len(of_node) > CONNECTIONS:
            oldest = next(iter(of_node))
            del of_node[oldest]
            oldest.cut(f"node {visit.identity.node} has more than {CONNECTIONS} connections")
        watching = loop.call_later(SILENCE, self._heard, visit)
        try:
            await connection.run()
        finally:
            watching.cancel()

    def _heard(self, visit: _Visit) -> None:
        """Cut off a peer that has a certificate, and nothing to say. Sessions have their beats."""
        connection, loop = visit.connection, asyncio.get_running_loop()
        if connection is None or connection.closed.is_set():
            return
        if connection.on_beat is None and loop.time() - visit.spoke > SILENCE:
            connection.abort(f"nothing was said for {SILENCE:.0f} s")
        else:
            loop.call_later(SILENCE, self._heard, visit)

    # --- verbs ------------------------------------------------------------------------------------

    async def _check(self, visit: _Visit, connection: Connection, message: Message) -> None:
        """Serve a message if its sender may send it. Raises Forbidden."""
        visit.spoke = asyncio.get_running_loop().time()
        identity = visit.identity
        if identity is None:
            if not isinstance(message, OPEN):
                raise Forbidden(f"{type(message).__name__} needs a certificate of this swarm")
        else:
            try:
                await self._permit(identity, message)
            except Forbidden:
                if isinstance(message, messages.Hello) and self._authority.barred(identity.node):
                    connection.write(messages.Bye(reason="this node was removed from the swarm", barred=True))
                raise
        await self._serve(connection, message, identity)

    async def _permit(self, identity: Identity, message: Message) -> None:
        if isinstance(message, messages.FetchRoot):
            return
        if isinstance(message, messages.Join):
            raise Forbidden(f"node {identity.node} is part of this swarm already")
        if isinstance(message, OF_MANAGERS):
            if identity.role is not Role.MANAGER:
                raise Forbidden(f"{type(message).__name__} needs the certificate of a manager")
            wanted = None if isinstance(message, messages.RemoveMember) else Role.MANAGER
            await self._authority.admit(identity, wanted)
            return
        if not isinstance(message, (*OF_NODES, messages.Renew)):
            raise Forbidden(f"{type(message).__name__} is not served here")
        await self._authority.admit(identity)

    # --- the log ----------------------------------------------------------------------------------

    def _tell(self, address: str, text: str) -> None:
        """Log trouble with a peer, once in a while."""
        now = asyncio.get_running_loop().time()
        if len(self._told) > 1000:
            self._told = {place: when for place, when in self._told.items() if now - when < QUIET}
        if len(self._told) <= 1000 and now - self._told.get(address, -QUIET) >= QUIET:
            self._told[address] = now
            _log.warning("%s: %s", address or "listener", text)


def _place(host: str) -> str:
    """What counts as one address: an IPv4 address, or the /64 of an IPv6 address."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False).network_address)
    return str(address)


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"it took longer than {HANDSHAKE:.0f} s"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the peer's certificate is refused: {error.verify_message}"
    return words(error)
