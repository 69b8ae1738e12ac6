"""Hijacked connections: their bytes become a stream that another process owns.

Attach and exec end HTTP on their connection. The daemon stops reading, gives a descriptor of the
stream to the new owner, and releases the connection. With TLS the new owner gets one end of a
socket pair, which the daemon relays (`tls.relay`): such a stream ends with the daemon, while a
stream over a plain socket continues.

Owns: with TLS, the daemon's end of the pair until `release` or `cancel`. Threads: the event loop's.
"""

from __future__ import annotations

import os
import socket
from typing import Any, Protocol

from engine.errors import ServerError
from engine.http.tls import TlsTransport


class Hijackable(Protocol):
    """The interface of a connection that a hijack uses."""

    def hijacked_transport(self) -> Any:
        """The transport.

        Raises ServerError when the client has left or the hijack was cancelled.
        """

    def hand_over(self, end: socket.socket | None) -> None:
        """Release the client's socket without shutting it down.

        With `end`, relay between the two.
        """


class HijackReply:
    """The reply of a handler whose connection was handed over. Made by `Hijack.release` only."""

    __slots__ = ()


class Hijack:
    """A connection that is handed over: the daemon neither reads from it nor writes to it."""

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
        closes it after the hand-over, whether that succeeded or not.
        """
        transport = self._connection.hijacked_transport()
        if not isinstance(transport, TlsTransport):
            return os.dup(transport.get_extra_info("socket").fileno())
        if self._end is not None:
            raise ServerError("the connection has already been hijacked")
        self._end, theirs = socket.socketpair()
        return theirs.detach()

    def release(self) -> HijackReply:
        """After the hand-over: release the connection without shutting it down."""
        end, self._end = self._end, None
        self._connection.hand_over(end)
        return HijackReply()

    def cancel(self) -> None:
        """The handler failed: the connection speaks HTTP again."""
        if self._end is not None:
            self._end.close()
            self._end = None
