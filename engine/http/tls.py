"""TLS over an asyncio transport, with half-close; and the relay that takes a hijacked TLS
connection to a plain socket.

Why not the loop's own TLS: it ends a connection as soon as the client has sent `close_notify`. A
docker CLI sends that at the end of stdin and then waits for the rest of the output
(`tls.Conn.CloseWrite`), which would be lost.

A hijacked stream is relayed here, in the daemon: unlike a stream over a Unix socket, it ends with
the daemon.

Not here: HTTP. `mutual_context` makes the context that asks clients for certificates.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterable
from typing import Any

from engine.errors import ServerError, reason
from engine.http import peers
from engine.system.tls import verifying_context

PLAIN = b"HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n"
"""For a client that does not speak TLS: Go's words, as Docker's."""
READ_SIZE = 256 * 1024


def mutual_context(authority: str, certificate: str, key: str) -> ssl.SSLContext:
    """A server's context that demands a client certificate signed by `authority` (paths of PEM
    files).

    TLS 1.2 and later, without renegotiation. Raises ServerError when the files are not valid.
    """
    try:
        context = verifying_context(authority=authority, server=True)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.verify_mode = ssl.CERT_REQUIRED
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.load_cert_chain(certificate, key)
    except OSError as error:  # ssl.SSLError is one
        raise ServerError(f"TLS with {authority}, {certificate}, {key}: {reason(error)}") from error
    return context


class TlsTransport(asyncio.Protocol):
    """A protocol for the socket's transport, and a transport for the protocol that it makes after
    the handshake.
    """

    def __init__(
        self, context: ssl.SSLContext, protocol: Callable[[], asyncio.Protocol], handshake_seconds: float
    ) -> None:
        self._factory = protocol
        self._protocol: asyncio.Protocol | None = None
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._raw: Any = None
        self._paused = False
        self._reading = False
        self._eof = False
        self._shut = False
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(handshake_seconds, self.abort)

    # --- the socket's side ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._raw = transport

    def data_received(self, data: bytes) -> None:
        self._incoming.write(data)
        if self._protocol is None:
            self._handshake()
        self._read()

    def eof_received(self) -> bool:
        self._incoming.write_eof()
        if self._protocol is None:
            return False
        self._read()
        return not self._raw.is_closing()

    def connection_lost(self, error: Exception | None) -> None:
        self._cancel_timer()
        if self._protocol is not None:
            self._protocol.connection_lost(error)

    def pause_writing(self) -> None:
        if self._protocol is not None:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        if self._protocol is not None:
            self._protocol.resume_writing()

    def _handshake(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return
        except (ssl.SSLError, ssl.CertificateError) as error:
            if getattr(error, "reason", "") == "HTTP_REQUEST":
                self._raw.write(PLAIN)
            else:
                self._flush()  # the alert
            self._raw.close()
            return
        self._flush()
        self._cancel_timer()
        self._protocol = self._factory()
        self._protocol.connection_made(self)  # type: ignore[arg-type]  # as much of a transport as Connection asks for

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _read(self) -> None:
        """Pass decrypted bytes to the protocol, unless it has paused reading."""
        if self._reading:
            return
        self._reading = True
        try:
            while self._protocol is not None and not self._paused and not self._eof and not self._raw.is_closing():
                try:
                    data = self._tls.read(READ_SIZE)
                except ssl.SSLWantReadError:
                    break
                except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                    data = b""
                except ssl.SSLError:
                    self._flush()
                    self._raw.abort()
                    return
                if data:
                    self._protocol.data_received(data)
                else:
                    self._eof = True
                    if not self._protocol.eof_received():
                        self.close()
        finally:
            self._reading = False
        self._flush()

    def _flush(self) -> None:
        if self._outgoing.pending and not self._raw.is_closing():
            self._raw.write(self._outgoing.read())

    # --- the protocol's side ----------------------------------------------------------------------

    def set_protocol(self, protocol: asyncio.Protocol) -> None:
        self._protocol = protocol

    def write(self, data: bytes) -> None:
        if self._shut or self._raw.is_closing():
            return
        view = memoryview(data)
        try:
            while view:
                view = view[self._tls.write(view) :]
        except ssl.SSLError:
            self._raw.abort()
            return
        self._flush()

    def writelines(self, pieces: Iterable[bytes]) -> None:
        for piece in pieces:
            self.write(piece)

    def write_eof(self) -> None:
        """Send `close_notify` and shut down the writing side; reading continues."""
        self._notify()
        if not self._raw.is_closing():
            self._raw.write_eof()

    def can_write_eof(self) -> bool:
        return True

    def _notify(self) -> None:
        if self._shut or self._protocol is None:
            return
        self._shut = True
        # it waits for the client's close_notify, which `_read` will see
        with contextlib.suppress(ssl.SSLError):
            self._tls.unwrap()
        self._flush()

    def pause_reading(self) -> None:
        self._paused = True
        if not self._eof and not self._raw.is_closing():
            self._raw.pause_reading()

    def resume_reading(self) -> None:
        self._paused = False
        if not self._eof and not self._raw.is_closing():
            self._raw.resume_reading()
        self._loop.call_soon(self._read)

    def close(self) -> None:
        """Close when all written bytes are sent."""
        self._notify()
        self._raw.close()

    def abort(self) -> None:
        self._raw.abort()

    def is_closing(self) -> bool:
        return bool(self._raw.is_closing())

    def get_write_buffer_size(self) -> int:
        return int(self._raw.get_write_buffer_size())

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._raw.set_write_buffer_limits(high, low)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "ssl_object":
            return self._tls
        return self._raw.get_extra_info(name, default)


class Relay(asyncio.Protocol):
    """One side of a relay: received bytes go to `other`, no faster than it accepts them. EOF is
    passed on in each direction separately.
    """

    def __init__(self, transport: Any = None) -> None:
        self.transport = transport
        self.other: Relay | None = None
        self._eof = False
        self._lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None and not self.other.transport.is_closing() and not self.other._eof:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and not self.other.transport.is_closing() and not self.other._eof:
            self.other.transport.resume_reading()

    def eof_received(self) -> bool:
        self._eof = True
        other = self.other
        if other is None:
            return False
        if other._eof or peers.hung_up(self.transport):
            other.transport.close()
            return False
        if not other.transport.is_closing():
            other.transport.write_eof()
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        if self.other is not None and not self.other._lost:
            self.other.transport.close()


async def relay(client: TlsTransport, end: socket.socket, eof: bool) -> None:
    """Join a client, whose reading is paused, with `end`, which the relay then owns.

    Returns when they are joined. `eof`: the client has sent EOF already.
    """
    near, far = Relay(client), Relay()
    near.other, far.other = far, near
    loop = asyncio.get_running_loop()
    try:
        end.setblocking(False)
        # uvloop's create_unix_connection closes the descriptor twice if the peer leaves meanwhile.
        await loop.connect_accepted_socket(lambda: far, end)
    except OSError:
        end.close()
        client.abort()
        return
    client.set_protocol(near)
    if client.is_closing():
        far.transport.close()
    elif eof:
        near.eof_received()
    else:
        client.resume_reading()
