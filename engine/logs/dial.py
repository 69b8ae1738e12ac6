"""Connections to log targets: to the host and port, or to the socket, of a target's options.

Used by the shipper, and by the daemon to check at a container's start that a target can be reached.
Names are resolved at every call. Certificate files are read here.

Owns:    nothing; the caller closes what it gets.
Threads: the event loop's; names are resolved and files are read in others.
Raises:  OSError (with the reason in `strerror`), ssl.SSLError, TimeoutError.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import Callable
from typing import TypeVar

from engine.logs.deliveries import LOCAL_SYSLOG, Tls
from engine.system.tls import verifying_context

PATIENCE = 10.0
"""Seconds that a connection may take, with its TLS handshake."""
SEND_BUFFER = 256 << 10
"""SO_SNDBUF of a stream. A small one bounds how long a line waits behind those of others."""
KEEP_ALIVE = 30
"""Seconds without traffic after which TCP asks whether the peer is still there. Idle connections
through balancers end otherwise without a word."""

_IP_RECVERR = (socket.IPPROTO_IP, 11)
_IPV6_RECVERR = (socket.IPPROTO_IPV6, 25)

P = TypeVar("P", bound=asyncio.Protocol)


async def tcp(factory: Callable[[], P], host: str, port: int, tls: Tls | None = None) -> P:
    """A TCP connection, with TLS if `tls` is given. The protocol's `connection_made` has been
    called; with TLS twice, first with the transport below, whose buffer is not counted in that of
    the other."""
    loop = asyncio.get_running_loop()
    secured = await loop.run_in_executor(None, context, tls) if tls is not None else None
    async with asyncio.timeout(PATIENCE):
        connection = await _connected(await _resolved(host, port, socket.SOCK_STREAM))
        try:
            transport, protocol = await loop.create_connection(factory, sock=connection)
        except BaseException:
            connection.close()
            raise
        if tls is not None and secured is not None:
            try:
                upper = await loop.start_tls(transport, protocol, secured, server_hostname=tls.server_name or host)
            except BaseException:
                transport.abort()
                raise
            if upper is None:  # closed meanwhile
                raise ConnectionResetError(errno.ECONNRESET, "connection closed in the TLS handshake")
            protocol.connection_made(upper)
    return protocol


async def stream(factory: Callable[[], P], path: str) -> P:
    """A Unix stream socket."""
    async with asyncio.timeout(PATIENCE):
        _, protocol = await asyncio.get_running_loop().create_unix_connection(factory, path)
    return protocol


async def udp(host: str, port: int) -> socket.socket:
    """A connected UDP socket, which keeps errors that ICMP reports in its error queue
    (IP_RECVERR, ip(7))."""
    for family, kind, protocol, _, address in await _resolved(host, port, socket.SOCK_DGRAM):
        made = _datagram(family, kind, protocol, address)
        made.setsockopt(*(_IPV6_RECVERR if family == socket.AF_INET6 else _IP_RECVERR), 1)
        return made
    raise OSError(f"{host} has no address")


def datagram(path: str) -> socket.socket:
    """A connected Unix datagram socket."""
    return _datagram(socket.AF_UNIX, socket.SOCK_DGRAM, 0, path)


def local_syslog() -> socket.socket:
    """The datagram socket of the local syslog, connected. Raises OSError when there is none."""
    failure: OSError | None = None
    for path in LOCAL_SYSLOG:
        try:
            return datagram(path)
        except OSError as error:
            if failure is None or error.errno != errno.ENOENT:
                failure = error
    if failure is not None and failure.errno == errno.EPROTOTYPE:
        raise OSError(failure.errno, "the local syslog socket is a stream: name it as unix://PATH") from failure
    raise OSError(errno.ENOENT, "Unix syslog delivery error: no local syslog socket answers") from failure


def context(tls: Tls) -> ssl.SSLContext:
    """Blocking: reads files. Raises OSError, ssl.SSLError."""
    made = verifying_context(authority=tls.ca)
    if tls.cert:
        made.load_cert_chain(tls.cert, tls.key or None)
    if tls.skip_verify:
        made.check_hostname = False
        made.verify_mode = ssl.CERT_NONE
    return made


async def _resolved(host: str, port: int, kind: int) -> list[tuple[int, int, int, str, tuple[str, int]]]:
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=kind)
    except socket.gaierror as error:
        raise OSError(error.errno, f"lookup {host}: {error.strerror}") from error
    return found  # type: ignore[return-value]  # addresses of IPv6 have two more elements


async def _connected(addresses: list[tuple[int, int, int, str, tuple[str, int]]]) -> socket.socket:
    """A socket that is connected to the first of the addresses that answers."""
    failure: OSError | None = None
    for family, kind, protocol, _, address in addresses:
        made = socket.socket(family, kind | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, protocol)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
                made.setsockopt(socket.IPPROTO_TCP, option, KEEP_ALIVE)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().sock_connect(made, address)
        except OSError as error:
            made.close()
            why = os.strerror(error.errno).lower() if error.errno else str(error)
            failure = OSError(error.errno, f"dial {address[0]}:{address[1]}: {why}")
        except BaseException:
            made.close()
            raise
        else:
            return made
    raise failure or OSError("no address")


def _datagram(family: int, kind: int, protocol: int, address: object) -> socket.socket:
    made = socket.socket(family, kind | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, protocol)
    try:
        made.connect(address)  # type: ignore[arg-type]
    except BaseException:
        made.close()
        raise
    return made
