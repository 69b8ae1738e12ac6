"""Connections to managers: the own one's Unix socket, and mutual TLS to any manager.

A client trusts the roots of its swarm alone. It checks no host name but `swarm-manager`, a name
that only certificates of managers have: addresses of managers may change.

Owns:    nothing; `open_connection` returns a connection whose reading task ends with it.
Threads: the event loop's.
Raises:  ConnectionError, OSError, TimeoutError when there is no connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

from engine.errors import Unimplemented
from engine.swarm_session.frames import ALPN, Connection, Serve
from engine.swarm_session.messages import Message
from engine.system.tasks import spawn

SOCKET = "manager.sock"
"""In RUN/swarm."""
DIAL_LIMIT = 5.0
"""Seconds that connecting and the handshake may take."""
MANAGER_NAME = "swarm-manager"
PORT = 2377


async def refuse(connection: Connection, message: Message) -> None:
    """Serves nothing: for connections on which this side alone asks."""
    raise Unimplemented(f"{type(message).__name__} is not served here")


def context(roots: str, certificate: Path | None = None, key: Path | None = None) -> ssl.SSLContext:
    """A client's TLS. `roots`: PEM; "" verifies nothing, which is for fetching the roots that are
    compared with a token afterwards. With a certificate the connection is mutual.

    Raises OSError (ssl.SSLError is one) for files that are not valid.
    """
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.set_alpn_protocols([ALPN])
    if roots:
        made.load_verify_locations(cadata=roots)
    else:
        made.check_hostname = False
        made.verify_mode = ssl.CERT_NONE
    if certificate is not None and key is not None:
        made.load_cert_chain(certificate, key)
    return made


def split(address: str, default: int = PORT) -> tuple[str, int]:
    """Host and port of `host:port`, `host`, `[v6]:port` or `v6`. Raises ValueError."""
    text = address.removeprefix("tcp://")
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError(address)
        port = rest[1:]
    elif text.count(":") > 1:
        host, port = text, ""
    else:
        host, _, port = text.partition(":")
    if not host:
        raise ValueError(address)
    if not port:
        return host, default
    if not (port.isascii() and port.isdigit() and 0 < int(port) <= 65535):
        raise ValueError(address)
    return host, int(port)


def joined(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def dial(address: str, tls: ssl.SSLContext, serve: Serve = refuse) -> Connection:
    """Connect to the manager at host:port. The caller runs the connection."""
    host, port = split(address)
    async with asyncio.timeout(DIAL_LIMIT):
        reader, writer = await asyncio.open_connection(host, port, ssl=tls, server_hostname=MANAGER_NAME)
    return Connection(reader, writer, serve, dialled=True)


async def dial_own(run: Path, serve: Serve = refuse) -> Connection:
    """Connect to the manager's process of this node. The caller runs the connection."""
    async with asyncio.timeout(DIAL_LIMIT):
        reader, writer = await asyncio.open_unix_connection(str(run / SOCKET))
    return Connection(reader, writer, serve, dialled=True)


@contextlib.asynccontextmanager
async def opened(connection: Connection) -> AsyncIterator[Connection]:
    """Run a connection for as long as the block."""
    reading = spawn(connection.run(), "swarm: a connection to a manager")
    try:
        yield connection
    finally:
        reading.cancel()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1):
                await connection.close()
