"""The files of a node's identity in ROOT/swarm, TLS contexts made of them, and connections to other
managers.

TLS 1.3 alone, without session tickets, so that each connection is verified as it begins. A client
trusts the swarm's roots and checks one name: `swarm-manager`, which only certificates of managers
have; addresses of managers may change. A server asks for a certificate and takes connections
without one, as a joining node has none.

Owns:    ca.crt, node.crt, node.key (0600): replaced in an order that a crash at any point leaves
         one whole pair of certificate and key.
Threads: the event loop's.
Raises:  OSError (ssl.SSLError is one) for files that are missing or do not fit together;
         ConnectionError, OSError, TimeoutError when there is no connection.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from pathlib import Path

from engine.errors import Unimplemented, words
from engine.manager.certificates import MANAGER_NAME, host_of
from engine.swarm_session.frames import ALPN, Connection, Serve
from engine.swarm_session.messages import Message
from engine.system.files import sync_directory, write_atomically
from engine.system.tasks import spawn

ROOTS, CERTIFICATE, KEY = "ca.crt", "node.crt", "node.key"
_NEW_CERTIFICATE, _NEW_KEY = "node.crt.new", "node.key.install"
DIAL = 5.0
"""Seconds for connecting and the handshake."""
PORT = 2377

_log = logging.getLogger(__name__)


class Credentials:
    """The identity of this node on disk. Contexts are made again when the files have changed, by
    this process or another one.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.roots_file = directory / ROOTS
        self.certificate_file = directory / CERTIFICATE
        self.key_file = directory / KEY
        self._server: ssl.SSLContext | None = None
        self._client: ssl.SSLContext | None = None
        self._stamp: object = None

    # --- files ------------------------------------------------------------------------------------

    def roots(self) -> str:
        """PEM of the trusted roots; "" when there are none."""
        return _text(self.roots_file)

    def certificate(self) -> str:
        """PEM of the own certificate, and of the cross-signed root behind it; "" without one."""
        return _text(self.certificate_file)

    def install(self, *, roots: str = "", certificate: str = "", key: str = "") -> None:
        """Replace the roots, or certificate and key, or all, durably."""
        if roots and roots != self.roots():
            write_atomically(self.roots_file, roots.encode(), 0o644, durable=True)
        if certificate:
            write_atomically(self.directory / _NEW_KEY, key.encode(), 0o600, durable=True)
            write_atomically(self.directory / _NEW_CERTIFICATE, certificate.encode(), 0o644, durable=True)
            self.mend()

    def mend(self) -> None:
        """Finish an `install` that a crash cut.

        The new pair counts once its certificate is there.
        """
        new_key, new_certificate = self.directory / _NEW_KEY, self.directory / _NEW_CERTIFICATE
        if new_certificate.exists():
            if new_key.exists():
                new_key.rename(self.key_file)
            new_certificate.rename(self.certificate_file)
            sync_directory(self.directory)
        else:
            new_key.unlink(missing_ok=True)

    # --- contexts ---------------------------------------------------------------------------------

    def server(self) -> ssl.SSLContext:
        self._refresh()
        assert self._server is not None
        return self._server

    def client(self) -> ssl.SSLContext:
        """With the own certificate."""
        self._refresh()
        assert self._client is not None
        return self._client

    def stamp(self) -> object:
        """Differs from an earlier one when a file was replaced."""
        return tuple(_stamp(file) for file in (self.roots_file, self.certificate_file, self.key_file))

    def _refresh(self) -> None:
        stamp = self.stamp()
        if stamp == self._stamp:
            return
        try:
            server, client = self._load(ssl.PROTOCOL_TLS_SERVER), self._load(ssl.PROTOCOL_TLS_CLIENT)
        except OSError as error:
            if self._server is None:
                raise
            _log.warning("the certificate in %s is not used yet: %s", self.directory, words(error))
            return  # between the two renames of a replacement
        server.verify_mode = ssl.CERT_OPTIONAL
        server.num_tickets = 0
        self._server, self._client, self._stamp = server, client, stamp

    def _load(self, protocol: ssl._SSLMethod) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.set_alpn_protocols([ALPN])
        context.load_verify_locations(self.roots_file)
        context.load_cert_chain(self.certificate_file, self.key_file)
        return context


async def dial(
    address: str, context: ssl.SSLContext, serve: Serve | None = None, *, timeout: float = DIAL
) -> Connection:
    """A connection to the manager at `address` (host:port), which is read until it ends.

    Raises ConnectionError, OSError, TimeoutError; ssl.SSLCertVerificationError for a peer that is
    no manager of this swarm.
    """
    host, port = split(address)
    async with asyncio.timeout(timeout):
        reader, writer = await asyncio.open_connection(
            host, port, ssl=context, server_hostname=MANAGER_NAME, ssl_shutdown_timeout=2.0
        )
    connection = Connection(reader, writer, serve or _refuse, dialled=True)
    spawn(connection.run(), f"manager: connection to {address}")
    session = writer.get_extra_info("ssl_object")
    if session.selected_alpn_protocol() != ALPN:
        connection.abort("it speaks another protocol")
        raise ConnectionError(f"{address} does not speak {ALPN}")
    return connection


async def _refuse(connection: Connection, message: Message) -> None:
    raise Unimplemented(f"{type(message).__name__} is not served here")


def split(address: str) -> tuple[str, int]:
    """Host and port of `host:port`, `[v6]:port` or one without a port. Raises ConnectionError."""
    host = host_of(address)
    rest = address[len(host) + 2 :] if address.startswith("[") else address[len(host) :]
    port = rest.removeprefix(":")
    if not host or not (port == "" or (port.isascii() and port.isdigit() and 0 < int(port) < 65536)):
        raise ConnectionError(f"{address}: not an address of the form host:port")
    return host, int(port) if port else PORT


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii", errors="replace")
    except FileNotFoundError:
        return ""


def _stamp(path: Path) -> object:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
