"""Listeners, and the deadlines of all connections. One coarse timer serves all deadlines, and runs
only while a connection has one, so an idle connection needs no timer.

Not here: what happens on a connection (`protocol.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import grp
import ipaddress
import os
import socket
import ssl
import stat
from collections.abc import Awaitable, Callable
from typing import Protocol

from engine.errors import ServerError, reason
from engine.http import origins, tls
from engine.http.answer import AnswerWriter
from engine.http.budget import PACE, Budget, Pace
from engine.http.head import KnownHeads
from engine.http.listener import Listener
from engine.http.messages import AnyReply, Reply, Request
from engine.http.protocol import Connection
from engine.system.tasks import spawn

BACKLOG = 4096

TURN = 0.001
"""Longest time in seconds for which expired connections occupy the loop at once."""

MAX_PATH = 107
"""Bytes of a Unix socket's path (unix(7): `sun_path` without its NUL)."""


class Application(Protocol):
    """Answers requests."""

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """Fields of every answer."""

    def __call__(self, request: Request) -> AnyReply | Awaitable[AnyReply]:
        """Answer, directly or when awaited. Raises exceptions that `error_reply` accepts."""

    def is_hijack(self, method: str, path: str) -> bool:
        """True if the bytes after a request like this are a stream. Must not raise."""

    def error_reply(self, error: BaseException) -> Reply:
        """The answer to an exception, also for bytes that are not a request
        (`InvalidParameter`).
        """


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the time and memory that one client may take."""

    head: int = 64 * 1024
    """Largest request head, in bytes."""
    head_seconds: float = 30.0
    """Seconds from the first byte of a head to its last."""
    body_seconds: float = 60.0
    """Seconds without a byte of a body while its reader waits."""
    linger_seconds: float = 5.0
    """Seconds for a client to close after we did."""
    bodies: int = 32 << 20
    """Total size of the bodies that are read whole at a time, in bytes."""
    turn_seconds: float = 30.0
    """Seconds that a body waits for the others, before it is refused."""
    pace: Pace = PACE
    """The least rate at which such a body must arrive while others wait."""


class Server:
    """Several listeners for one application."""

    def __init__(self, application: Application, *, limits: Limits | None = None) -> None:
        self.application = application
        self.limits = limits or Limits()
        self.heads = AnswerWriter(application.headers)
        self.budget = Budget(self.limits.bodies, self.limits.turn_seconds, self.limits.pace)
        self.connections: set[Connection] = set()
        self.known_heads = KnownHeads()
        self.timed: set[Connection] = set()
        """Connections with a deadline."""
        self.half_open: set[Connection] = set()
        """Connections whose client has sent EOF and may have disconnected."""
        self.closing = False
        self._context: ssl.SSLContext | None = None
        self._listeners: list[Listener] = []
        self._paths: list[tuple[str, tuple[int, int]]] = []
        self._relays: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._last_left: asyncio.Event | None = None
        limits = self.limits
        self._tick = min(1.0, min(limits.head_seconds, limits.body_seconds, limits.linger_seconds) / 4)

    # --- listeners --------------------------------------------------------------------------------

    async def listen_unix(self, path: str, group: str = "") -> None:
        """Listen on `path`, 0660 root:`group` if the host has that group. Replaces a socket without
        a listener.
        """
        if len(os.fsencode(path)) > MAX_PATH or "\0" in path or not path:
            raise ServerError(f"{path}: a socket's path has 1 to {MAX_PATH} bytes")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            remove_stale(path)
            # bind(2) makes the file with the mode of the socket's inode, less the umask. Setting
            # the umask instead would set that of all threads.
            os.fchmod(listener.fileno(), 0o660)
            listener.bind(path)
            os.chmod(path, 0o660)
            if group:
                _give_to_group(path, group)
            made = os.lstat(path)
            listener.listen(BACKLOG)
            self._listeners.append(Listener(listener, lambda: Connection(self)))
            self._paths.append((path, (made.st_dev, made.st_ino)))
        except OSError as error:
            listener.close()
            raise ServerError(f"cannot listen on {path}: {error.strerror or error}") from error
        except BaseException:
            listener.close()
            raise

    def listen_inherited(self, descriptor: int, context: ssl.SSLContext | None) -> str:
        """Listen on a socket that another program has opened: a Unix socket, or TCP as for
        `listen_tcp`. The server owns the descriptor then, but never removes the socket's path.
        Returns its address.
        """
        try:
            listener = socket.socket(fileno=descriptor)
            if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listener.detach()
                raise ServerError(f"descriptor {descriptor} is not a listening socket")
        except OSError as error:
            raise ServerError(f"descriptor {descriptor} is not a listening socket: {reason(error)}") from error
        listener.setblocking(False)
        name = listener.getsockname()
        if listener.family == socket.AF_UNIX:
            self._listeners.append(Listener(listener, lambda: Connection(self)))
            return str(name)
        self._listeners.append(Listener(listener, self._on_tcp(name[0], name[1], context)))
        return f"tcp://{name[0]}:{name[1]}"

    def _on_tcp(self, host: str, port: int, context: ssl.SSLContext | None) -> Callable[[], asyncio.Protocol]:
        """What makes the protocols of connections. Raises ServerError if clients would not be
        checked.
        """
        if context is None:
            if not _is_loopback(host):
                raise ServerError(f"cannot listen on {host}:{port}: without TLS only loopback addresses are allowed")
            return lambda: Connection(self, origins.check_plain)
        self.renew_tls(context)
        return self._tls_connection

    def renew_tls(self, context: ssl.SSLContext) -> None:
        """Take another certificate, or another CA, for connections that begin from now on. Raises
        ServerError for a context that does not demand a client's certificate by TLS 1.2 or later.
        """
        if context.verify_mode != ssl.CERT_REQUIRED:
            raise ServerError("TLS must require client certificates")
        if context.minimum_version < ssl.TLSVersion.TLSv1_2:
            raise ServerError("TLS before 1.2 is not allowed")
        self._context = context

    def _tls_connection(self) -> asyncio.Protocol:
        assert self._context is not None
        return tls.TlsTransport(self._context, lambda: Connection(self, origins.check), self.limits.head_seconds)

    def serve(self, application: Application) -> None:
        """Requests that begin from now on are this application's, on connections of now, too."""
        self.application = application
        for connection in self.connections:
            connection.serve(application)

    async def listen_tcp(self, host: str, port: int, context: ssl.SSLContext | None) -> int:
        """Listen with mutual TLS; without a context in plain text, on loopback addresses only.
        Requests of pages of other web sites are refused (`origins.py`). Returns the port (`port` 0:
        any).
        """
        protocol = self._on_tcp(host, port, context)
        listening: list[socket.socket] = []
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            for family, _, _, _, address in dict.fromkeys(found):
                listening.append(listener := socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listener.bind(address)
                listener.listen(BACKLOG)
        except OSError as error:
            for listener in listening:
                listener.close()
            raise ServerError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
        self._listeners += [Listener(each, protocol) for each in listening]
        bound: int = listening[0].getsockname()[1]
        return bound

    async def close(self, grace: float = 10.0) -> None:
        """Stop listening; end idle connections and endless answers now, others after at most
        `grace` seconds.
        """
        self.closing = True
        for listener in self._listeners:
            listener.close()
        for path, identity in self._paths:
            _remove_own(path, identity)
        self._listeners.clear()
        self._paths.clear()
        for connection in list(self.connections):
            connection.shut()
        if self.connections:
            self._last_left = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    await self._last_left.wait()
        for connection in list(self.connections):
            connection.abort()
        for task in list(self._relays):
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await asyncio.sleep(0)

    # --- for connections --------------------------------------------------------------------------

    def opened(self, connection: Connection) -> None:
        """A client has connected."""
        self.connections.add(connection)

    def lost(self, connection: Connection) -> None:
        """A client has disconnected, or its connection was handed over."""
        self.connections.discard(connection)
        self.timed.discard(connection)
        self.half_open.discard(connection)
        if self._last_left is not None and not self.connections:
            self._last_left.set()

    def watch(self, connection: Connection) -> None:
        """Call `connection.expired` at `connection.deadline`."""
        self.timed.add(connection)
        self._wind()

    def watch_half_open(self, connection: Connection) -> None:
        """Call `connection.check_hangup` at each tick."""
        self.half_open.add(connection)
        self._wind()

    def relay(self, client: tls.TlsTransport, end: socket.socket, eof: bool) -> None:
        """A hijacked TLS connection: carry its bytes to and from `end` from now on."""
        task = spawn(tls.relay(client, end, eof), "relaying a hijacked TLS connection")
        self._relays.add(task)
        task.add_done_callback(self._relays.discard)

    def _wind(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._tick, self._sweep)

    def _sweep(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        self._expire([connection for connection in self.timed if connection.deadline <= now])
        for connection in list(self.half_open):
            connection.check_hangup()
        if (self.timed or self.half_open) and not (self.closing and not self.connections):
            self._wind()

    def _expire(self, connections: list[Connection]) -> None:
        """End the connections whose deadline has passed, in steps of a millisecond, so that
        hundreds of them do not delay other work.
        """
        loop = asyncio.get_running_loop()
        begin = loop.time()
        while connections:
            connection = connections.pop()
            if connection in self.timed and connection.deadline <= begin:
                connection.expired()
            if loop.time() - begin > TURN:
                loop.call_soon(self._expire, connections)
                return


def remove_stale(path: str) -> None:
    """Remove a stale socket at `path`. Raises ServerError when a process listens there, or when it
    is not a socket.
    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ServerError(f"cannot listen on {path}: it exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        failure = probe.connect_ex(path)
    if failure in (0, errno.EAGAIN, errno.EINPROGRESS):
        raise ServerError(f"cannot listen on {path}: another process listens there")
    if failure not in (errno.ECONNREFUSED, errno.ENOENT, errno.EPROTOTYPE):
        raise ServerError(f"cannot listen on {path}: {os.strerror(failure)}")
    _remove_own(path, (found.st_dev, found.st_ino))


def _remove_own(path: str, identity: tuple[int, int]) -> None:
    try:
        found = os.lstat(path)
        if (found.st_dev, found.st_ino) == identity:
            os.unlink(path)
    except FileNotFoundError:
        pass


def _give_to_group(path: str, group: str) -> None:
    try:
        number = grp.getgrnam(group).gr_gid
    except KeyError:
        return
    os.chown(path, -1, number)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
