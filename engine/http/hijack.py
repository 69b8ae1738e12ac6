"""The way out of HTTP: a connection whose bytes become a stream that another process owns.

Attach and exec end HTTP on their connection. The daemon stops reading, gives a descriptor of the
stream to the new owner, and lets go of the connection. With TLS the new owner gets one end of a
socket pair, which the daemon relays (`tls.relay`): such a stream ends when the daemon ends, a
stream over a plain socket does not.

Owns: with TLS, the daemon's end of the pair until `release` or `cancel`. Threads: the event loop's.
"""

from __future__ import annotations

import os
import socket
from typing import Any, Protocol

from engine.errors import ServerError
from engine.http.tls import TlsTransport


class Hijackable(Protocol):
    """What a hijack needs of its connection."""

    def hijacked_transport(self) -> Any:
        """The transport.

        Raises ServerError when the client has left or the hijack was cancelled.
        """

    def hand_over(self, end: socket.socket | None) -> None:
        """Let go of the client's socket without shutting it down; with `end`, relay between the
        two.
        """


class HijackReply:
    """The connection is no longer ours. Made only by `Hijack.release`."""

    __slots__ = ()


class Hijack:
    """A connection on its way out of HTTP. The daemon reads nothing more from it and writes nothing
    more to it.
    """

    __slots__ = ("_connection", "_end", "early", "head")

    def __init__(self, connection: Hijackable, head: bytes, early: bytes) -> None:
        self._connection = connection
        self._end: socket.socket | None = None
        self.head = head
        """Status line and header fields that the new owner sends first."""
        self.early = early
        """Bytes of the stream that came with the request."""

    def descriptor(self) -> int:
        """A descriptor of the stream for the new owner.

        It is a duplicate of the client's own socket, or with TLS one end of a pair. The caller
        closes it once it is handed over, or the hand-over failed.
        """
        transport = self._connection.hijacked_transport()
        if not isinstance(transport, TlsTransport):
            return os.dup(transport.get_extra_info("socket").fileno())
        if self._end is not None:
            raise ServerError("the connection has already been hijacked")
        self._end, theirs = socket.socketpair()
        return theirs.detach()

    def release(self) -> HijackReply:
        """After the hand-over: let go of the connection without shutting it down."""
        end, self._end = self._end, None
        self._connection.hand_over(end)
        return HijackReply()

    def cancel(self) -> None:
        """The handler failed after all."""
        if self._end is not None:
            self._end.close()
            self._end = None
