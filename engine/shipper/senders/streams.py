"""Targets behind a stream without acknowledgements of their own: syslog and GELF over TCP, TLS and
Unix sockets.

The kernels acknowledge instead. SIOCOUTQ is 0 when the peer's kernel has everything (tcp(7)), or,
for a Unix socket, when the peer's process has read everything. TCP's acknowledgement says nothing
of the peer's process, which may end with unread data. Linux then answers with a reset. So the
settled position stays behind by what the peer's buffer may hold, as long as data flows:

- Data counts as read when the peer's kernel has acknowledged a whole buffer beyond it, or has had
  it for `COMMIT_AFTER` seconds, the connection still stands, and the window shows that the peer's
  process reads.
- After an orderly end of the connection (FIN without a reset) everything acknowledged was read. A
  process that is killed ends its connections in order too, if it has just read everything. So what
  came within the last second before an end that the peer begins is sent again. A peer that ends
  each connection sooner than that gets nothing twice.
- After a reset or a time-out the rest is sent again, on a new connection.

A buffer is larger than the windows that its kernel announces while data is in it: a process that
never reads is sent 128 KiB by Linux, though no announced window exceeds 93 KiB, and at 1 GB/s a
sixth more than the largest window was found. The kernel enlarges the buffer with the rate of the
process, at most twofold between two looks. So it counts as twice the largest window seen.

A container whose spool is nearly full would have to wait for `COMMIT_AFTER`. Then the connection is
turned over: ended in order, which makes the peer's process read everything and end its side too,
and opened again.

A receiver that is killed later than that after it has read data, and before it has stored them,
loses them: neither protocol can say so.

Owns:    the connection.
Threads: the event loop's.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import socket
import ssl
import struct
import termios
import time
from abc import abstractmethod
from collections import deque

from engine._fast.wireform import Form
from engine.logs import dial
from engine.logs.deliveries import Delivery, Gelf, Syslog
from engine.shipper import forms
from engine.shipper.destination import TURN, Destination, Owner
from engine.shipper.feed import Feed, Formed

COMMIT_AFTER = 30.0
LOOK = 0.25
"""Seconds between looks at what has arrived, while something is on the way."""
ROOM = 128 << 10
"""Bytes that are gathered for one write."""
LOOK_SIZE = 512 << 10
"""Bytes that are sent between two looks at most."""
STORED_AFTER = 1.0
"""Seconds after which a peer has stored what it has read."""
STALLED = 60.0
"""Seconds without an acknowledgement by the peer's kernel, though its window has room, after which
the connection is dead. A peer that reads slowly, or not at all, keeps its window closed."""
FINISH = 2.0
"""Seconds that a peer may take to close after us."""
TURN_OVER = 0.25
"""Seconds that a connection lasts at least before it is turned over."""
SMALLEST_BUFFER = 256 << 10
"""Bytes of a peer's buffer at least; Linux begins with half of it."""

_TCP_INFO_WINDOW = 228
"""Offset of `tcpi_snd_wnd` in struct tcp_info of linux/tcp.h; since Linux 5.4."""


class Connection(asyncio.Protocol):
    """One connection. `lost` is set when it is closed; `error` says why, None at an orderly end."""

    def __init__(self, changed: asyncio.Event) -> None:
        """`changed`: set at everything that the sender may wait for."""
        self.changed = changed
        self.lost = False
        self.ended = False
        """The peer sends nothing more."""
        self.ending = False
        """This side sends nothing more."""
        self.error: BaseException | None = None
        self.received = bytearray()
        self._transport: asyncio.Transport | None = None
        self._lower: asyncio.Transport | None = None
        """With TLS, the transport of its records."""
        self._socket: socket.socket | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._lower = self._transport
        self._transport = transport
        transport.set_write_buffer_limits(ROOM)
        self._socket = transport.get_extra_info("socket")

    def data_received(self, data: bytes) -> None:
        self.received += data
        self.changed.set()

    def eof_received(self) -> bool:
        self.ended = True
        self.changed.set()
        # Keep it open for writing, so that a reset shows. TLS closes in any case.
        return self._lower is None

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self.error = exc
        self.changed.set()
        self._writable.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    async def write(self, data: bytes) -> None:
        """Returns when there is room for more. Raises OSError when the connection is lost."""
        assert self._transport is not None
        if not self.lost:
            self._transport.write(data)
            if self._writable.is_set():
                # the loop's other tasks, while the peer takes everything at once
                await asyncio.sleep(0)
            else:
                await self._writable.wait()
        self.check()

    def check(self) -> None:
        """Raises OSError if the connection is lost."""
        if self.lost:
            if isinstance(self.error, OSError | ssl.SSLError):
                raise self.error
            raise _closed()

    def outstanding(self) -> int:
        """Bytes that the peer does not have yet, at least. Raises OSError after a reset."""
        self.check()
        assert self._transport is not None and self._socket is not None
        size = 0
        for each in (self._transport, self._lower):
            if each is not None:
                # asyncio has taken the socket's error and dropped the buffer, and reports it soon
                if each.is_closing():
                    raise _closed()
                size += each.get_write_buffer_size()
        answer = fcntl.ioctl(self._socket.fileno(), termios.TIOCOUTQ, b"\0\0\0\0")
        # A Unix socket forgets what a dead peer has not read. It has the error before.
        if error := self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(error, os.strerror(error))
        return size + int(struct.unpack("i", answer)[0])

    @property
    def local(self) -> bool:
        """A Unix socket, where `outstanding` counts what the peer's process has not read."""
        return self._socket is not None and self._socket.family == socket.AF_UNIX

    def window(self) -> int:
        """Bytes that the peer's kernel takes without its process."""
        assert self._socket is not None
        if self.local or self.lost:
            return 0
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        if len(info) < _TCP_INFO_WINDOW + 4:
            return 1 << 20
        return int(struct.unpack_from("I", info, _TCP_INFO_WINDOW)[0])

    def end_writing(self) -> None:
        """Tell the peer that nothing more comes, after what is buffered here."""
        self.ending = True
        if self._transport is not None and not self.lost:
            if self._transport.can_write_eof():
                self._transport.write_eof()
            else:  # TLS: sends its closing alert, and waits for the peer's
                self._transport.close()

    def in_order(self) -> bool:
        """The peer has ended the connection after it has read everything. With TLS that is known
        only after `end_writing`. Raises OSError after a reset."""
        if self._lower is not None:
            return self.ending and self.lost and self.error is None
        return self.ended and self.outstanding() == 0

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def _closed() -> ConnectionResetError:
    return ConnectionResetError(errno.ECONNRESET, "connection closed by the target")


class StreamDestination(Destination):
    """Common part of the senders over streams."""

    def __init__(self, owner: Owner, document: Delivery) -> None:
        super().__init__(owner, document)
        self.connection: Connection | None = None
        self._sent = 0
        self._arrived = 0
        self._window = 0
        """The largest one of the peer."""
        self._seen: deque[tuple[float, int]] = deque()
        """When which number of bytes had arrived."""
        self._looked = (0.0, 0)
        """When the connection was looked at, and how much had been sent."""
        self._opened = 0.0
        self._alive = 0.0
        """When the peer's kernel has last acknowledged something, or had nothing to acknowledge."""
        self._turning = 0.0
        """When this connection was ended for a new one; 0: it was not."""
        self._turns = True
        """The peer ends its side too."""
        self._patience: float | None = None
        """Seconds that the peer may take to accept a write."""

    @abstractmethod
    async def dial(self) -> Connection:
        """Connect. Raises one of `FAILURES`."""

    def wrap(self, feed: Feed, formed: Formed) -> bytes:
        """The bytes to send for messages of one feed."""
        return formed.wire

    def new_connection(self) -> Connection:
        return Connection(self._wake)

    async def open(self) -> None:
        self._sent = self._arrived = self._window = 0
        self._alive = time.monotonic()
        self._seen.clear()
        self._looked = (0.0, 0)
        self._turning = 0.0
        self.connection = await self.dial()
        self._window = self.connection.window()
        self._opened = time.monotonic()

    async def close(self) -> None:
        if self.connection is not None:
            self.connection.abort()
            self.connection = None

    async def pass_on(self) -> None:
        while True:
            assert self.connection is not None
            await self._pass_on(self.connection)
            if not self._turning or self.ending:
                break
            await self.abandon()
            await self.open()

    async def _pass_on(self, connection: Connection) -> None:
        """Returns when the connection has ended in order, or is turned over."""
        while True:
            if connection.lost or connection.ended:
                await self._ended(connection)
                return
            parts: list[bytes] = []
            room = ROOM
            while room > 0 and not connection.ending and self.may_send() and (feed := self.next_feed()) is not None:
                formed = feed.format(min(room, TURN))
                if formed is None:
                    feed.idle()
                    continue
                self.notify(feed)  # at the end of the queue: there may be more
                if formed.messages:
                    data = self.wrap(feed, formed)
                    parts.append(data)
                    room -= len(data)
                    self._sent += len(data)
                self.sent_part(feed, formed)
            if parts:
                await self._write(connection, b"".join(parts))
                self._window = max(self._window, connection.window())
            now = time.monotonic()
            looked, size = self._looked
            due = now - looked >= LOOK or self._sent - size >= LOOK_SIZE or not parts
            if connection.received or (self.pending() and due):
                self._looked = now, self._sent
                self.look(connection, now)
            if self._turning and now - self._turning > FINISH:
                self._turns = False
                return
            # Nothing is awaited between the look at the connection and the wait, which would miss
            # its end otherwise.
            if parts or connection.lost or connection.ended:
                continue
            if self.may_send() and not connection.ending:
                await self.wait(LOOK if self.pending() else None)
            else:
                await self.wait_for_change(LOOK)

    async def _write(self, connection: Connection, data: bytes) -> None:
        """Returns when there is room for more. A dead peer is noticed meanwhile (`look`)."""
        writing = asyncio.ensure_future(connection.write(data))
        try:
            async with asyncio.timeout(self._patience):
                while not (await asyncio.wait((writing,), timeout=STALLED / 6))[0]:
                    self.look(connection, time.monotonic())
                await writing
        finally:
            writing.cancel()

    def pending(self) -> bool:
        """Something is on the way."""
        return bool(self._marks)

    def may_send(self) -> bool:
        """False: the target must answer first."""
        return True

    def sent_part(self, feed: Feed, formed: Formed) -> None:
        """What was read of the feed is in the stream up to `_sent`."""
        self.sent(self._sent, feed)

    def look(self, connection: Connection, now: float) -> None:
        """Settle what the target has by the rules of this module."""
        connection.received.clear()  # neither protocol has answers
        if connection.ending:  # its end says what has arrived
            return
        before = self._arrived
        self._arrived = max(self._arrived, self._sent - connection.outstanding())
        window = connection.window()
        if self._arrived > before or self._arrived == self._sent or window == 0:
            self._alive = now
        elif now - self._alive > STALLED:
            raise TimeoutError(f"no acknowledgement for {STALLED:g} s")
        self._window = max(self._window, window)
        buffer = 0 if connection.local else max(2 * self._window, SMALLEST_BUFFER)
        settled = self._arrived - buffer
        if not self._seen or self._seen[-1][1] < self._arrived:
            self._seen.append((now, self._arrived))
        reads = window >= self._window // 2
        while reads and self._seen and self._seen[0][0] <= now - COMMIT_AFTER:
            settled = max(settled, self._seen.popleft()[1])
        if self._arrived > 0:
            self.reached()
        if settled > 0:
            self.settle(settled)
        if self._turns and not self._turning and now - self._opened >= TURN_OVER and self._is_waited_for():
            self._turning = now
            connection.end_writing()

    def _is_waited_for(self) -> bool:
        """A container may soon have to wait until something is settled."""
        return any(
            feed.document.blocking and 0 < feed.document.quota // 2 < feed.at.bytes - feed.acked.bytes
            for feed in self._marked
        )

    async def _ended(self, connection: Connection) -> None:
        """The connection has ended. Settle what the peer had; raises the failure unless it has
        ended in order."""
        if connection.received:
            self.look(connection, time.monotonic())
        if not connection.lost:
            # An end with unread data is followed by a reset, which may be on its way.
            await asyncio.sleep(0.05)
        if connection.in_order():
            now = time.monotonic()
            if connection.ending or now - self._opened < 2 * STORED_AFTER:
                self.settle(self._sent)
            else:
                stored = [arrived for at, arrived in self._seen if at <= now - STORED_AFTER]
                self.settle(stored[-1] if stored else 0)
            # a peer that ends a new connection at once does not serve
            if self._sent:
                return
        connection.check()
        raise _closed()

    async def finish(self) -> None:
        connection = self.connection
        if connection is None or not self.pending():
            return
        connection.end_writing()
        for _ in range(round(FINISH / 0.02)):
            if not self.pending() or self.connection is not connection:
                break
            await asyncio.sleep(0.02)


class SyslogStream(StreamDestination):
    """Syslog over TCP, TLS (RFC 5425) and Unix stream sockets."""

    def form(self, document: Delivery) -> Form:
        assert isinstance(document.target, Syslog)
        return forms.syslog(document, document.target, datagrams=False)

    async def dial(self) -> Connection:
        target = self.target
        assert isinstance(target, Syslog)
        if target.scheme == "unix":
            return await dial.stream(self.new_connection, target.path)
        return await dial.tcp(self.new_connection, target.host, target.port, target.tls)


class GelfStream(StreamDestination):
    """GELF over TCP: messages end in a zero byte, and are not compressed."""

    def __init__(self, owner: Owner, document: Delivery) -> None:
        super().__init__(owner, document)
        assert isinstance(document.target, Gelf)
        self._first_pause = max(0.1, min(document.target.reconnect_delay, 30))

    def form(self, document: Delivery) -> Form:
        assert isinstance(document.target, Gelf)
        return forms.gelf(document, document.target)

    async def dial(self) -> Connection:
        target = self.target
        assert isinstance(target, Gelf)
        return await dial.tcp(self.new_connection, target.host, target.port)
