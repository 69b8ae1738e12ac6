"""Targets behind datagrams: syslog and GELF over UDP, the local syslog, and the journal.

UDP promises nothing, so a line counts as delivered `GRACE` seconds after it was sent, unless ICMP
has reported that nothing listens there, or that the host cannot be reached. Then the rest waits.
sendmmsg(2) drops such a report when it has sent other messages; the error queue keeps it.

A Unix datagram socket is reliable: its send fails while the receiver's queue is full. SIOCOUTQ
counts the memory of the messages that the receiver has not read. Those of a dead receiver are
freed too, so nothing is settled before an empty message has shown that it lives. Receivers ignore
empty messages.

Owns:    the socket.
Threads: the event loop's.
"""

from __future__ import annotations

import array
import asyncio
import errno
import fcntl
import os
import secrets
import socket
import struct
import termios
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from isal import isal_zlib

from engine._fast import datagrams
from engine._fast.wireform import Form
from engine.logs import dial
from engine.logs.deliveries import JOURNAL, Delivery, Gelf, Journald, Syslog
from engine.shipper import forms
from engine.shipper.destination import TURN, Destination, Owner
from engine.shipper.feed import Feed, Formed

GRACE = 0.2
"""Seconds in which a report of ICMP about a UDP datagram can come."""
SMALLEST = 512
"""Bytes of memory that a queued message takes at least, with the kernel's structures: 768 on
x86_64."""
RESOLVE_AGAIN = 60.0
"""Seconds after which the name of a UDP target is resolved again."""
LOOK = 0.05
"""Seconds between looks at what has been received, while something is on the way."""
FINISH = 2.0
"""Seconds that a receiver may take to read the last messages."""
GELF_CHUNK = 1420
"""Bytes of a datagram, which fits into a usual MTU; of a chunk with its header of 12."""
GELF_CHUNKS = 128
"""GELF allows no more chunks of a message."""


class DatagramDestination(Destination):
    """Common part of the senders of datagrams."""

    def __init__(self, owner: Owner, document: Delivery) -> None:
        super().__init__(owner, document)
        self._socket: socket.socket | None = None
        self._sent = 0
        """Messages."""
        self._sending = False
        """Some of a turn's messages are sent, without a mark yet."""
        self._opened = 0.0
        self._recent: deque[tuple[float, int]] = deque()
        """Of UDP: when which number had been sent."""

    @abstractmethod
    async def dial(self) -> socket.socket:
        """A connected, non-blocking socket. Raises one of `FAILURES`."""

    def packed(self, feed: Feed, formed: Formed) -> tuple[bytes, Sequence[int]]:
        """The datagrams of some messages of a feed: their bytes, and the end of each."""
        return formed.wire, formed.ends

    async def too_large(self, feed: Feed, message: bytes) -> None:
        """A message that is too large for one datagram. Without a way around it is lost."""
        self.drop(feed, 1, f"a message of {len(message)} bytes is too large for a datagram")

    async def open(self) -> None:
        self._sent = 0
        self._sending = False
        self._recent.clear()
        self._opened = time.monotonic()
        self._socket = await self.dial()

    async def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def pass_on(self) -> None:
        assert self._socket is not None
        local = self._socket.family == socket.AF_UNIX
        look = self._look_at_queue if local else self._look_at_errors
        while True:
            feed = self.next_feed()
            if feed is None:
                if self._marks:
                    look()
                await self.wait(LOOK if self._marks else None)
                if not local and not self._marks and time.monotonic() - self._opened > RESOLVE_AGAIN:
                    await self.close()
                    await self.open()
                continue
            formed = feed.format(TURN)
            if formed is None:
                feed.idle()
                continue
            self.notify(feed)
            if formed.messages:
                wire, ends = self.packed(feed, formed)
                self._sending = True
                await self._send(feed, wire, ends)
                self._sending = False
                self._sent += len(ends)
            self.sent(self._sent, feed)
            look()
            await asyncio.sleep(0)

    async def finish(self) -> None:
        for _ in range(round(FINISH / LOOK)):
            if not (self._marks or self._sending) or self._socket is None:
                break
            await asyncio.sleep(LOOK)

    def _look_at_queue(self) -> None:
        """Settle what the receiver of a Unix socket has read. Raises OSError if it is dead."""
        assert self._socket is not None
        answer = fcntl.ioctl(self._socket.fileno(), termios.TIOCOUTQ, b"\0\0\0\0")
        received = self._sent - -(-struct.unpack("i", answer)[0] // SMALLEST)
        if self._marks and self._marks[0].at <= received:
            with suppress(BlockingIOError):  # a full queue, but of a living one
                self._socket.send(b"")
            self.settle(received)

    def _look_at_errors(self) -> None:
        """Settle what was sent over UDP a while ago. Raises OSError if there was an error since."""
        assert self._socket is not None
        with suppress(BlockingIOError):
            _, more, _, _ = self._socket.recvmsg(0, 512, socket.MSG_ERRQUEUE)
            # struct sock_extended_err of linux/errqueue.h
            reported = struct.unpack_from("I", more[0][2])[0] if more else errno.ECONNREFUSED
            if reported != errno.EMSGSIZE:  # fragmented from now on
                raise OSError(reported, os.strerror(reported))
        now = time.monotonic()
        if not self._recent or self._recent[-1][1] < self._sent:
            self._recent.append((now, self._sent))
        while self._recent and self._recent[0][0] <= now - GRACE:
            self.settle(self._recent.popleft()[1])
        if not self._recent:
            self.settle(self._sent)

    async def _send(self, feed: Feed, wire: bytes, ends: Sequence[int]) -> None:
        assert self._socket is not None
        descriptor = self._socket.fileno()
        first, refused = 0, -1
        while first < len(ends):
            try:
                sent = datagrams.send(descriptor, wire, ends, first)
            except OSError as error:
                if error.errno != errno.EMSGSIZE:
                    raise
                if refused == first:
                    await self.too_large(feed, wire[ends[first - 1] if first else 0 : ends[first]])
                    first += 1
                else:  # the error may be about an earlier one
                    refused = first
                continue
            if sent == 0:
                await self.writable()
            first += sent

    async def writable(self) -> None:
        """Wait until the socket may take more. The queue of a local socket may have ten places
        only, so this runs often.
        """
        assert self._socket is not None
        loop, descriptor = asyncio.get_running_loop(), self._socket.fileno()
        ready: asyncio.Future[None] = loop.create_future()
        loop.add_writer(descriptor, _done, ready)
        # ENOBUFS of a network interface is not reported by epoll.
        timer = loop.call_later(1, _done, ready)
        try:
            await ready
        finally:
            timer.cancel()
            loop.remove_writer(descriptor)


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class SyslogDatagrams(DatagramDestination):
    """Syslog over UDP (RFC 5426), or to a local socket."""

    def form(self, document: Delivery) -> Form:
        assert isinstance(document.target, Syslog)
        return forms.syslog(document, document.target, datagrams=True)

    async def dial(self) -> socket.socket:
        target = self.target
        assert isinstance(target, Syslog)
        if target.scheme == "udp":
            return await dial.udp(target.host, target.port)
        return dial.datagram(target.path) if target.path else dial.local_syslog()


class GelfDatagrams(DatagramDestination):
    """GELF over UDP: each message compressed, and cut into chunks if it is large."""

    def form(self, document: Delivery) -> Form:
        assert isinstance(document.target, Gelf)
        return forms.gelf(document, document.target)

    async def dial(self) -> socket.socket:
        target = self.target
        assert isinstance(target, Gelf)
        return await dial.udp(target.host, target.port)

    def packed(self, feed: Feed, formed: Formed) -> tuple[bytes, Sequence[int]]:
        target = feed.document.target  # compression may differ between feeds
        assert isinstance(target, Gelf)
        if target.compression == "none" and not _large(formed):
            return formed.wire, formed.ends
        # isal has levels 0 to 3, of which 1 is its default; their speeds differ little.
        level = 1 if target.level < 0 else min(target.level, 3)
        window = 31 if target.compression == "gzip" else 15
        parts: list[bytes] = []
        ends = array.array("I")
        begin = size = 0
        for end in formed.ends:
            message = formed.wire[begin:end]
            begin = end
            if target.compression != "none":
                message = isal_zlib.compress(message, level, window)
            pieces = chunks(message)
            if not pieces:
                self.drop(feed, 1, f"a message of {len(message)} bytes is too large for GELF")
            for part in pieces:
                parts.append(part)
                size += len(part)
                ends.append(size)
        return b"".join(parts), ends


def chunks(message: bytes) -> list[bytes]:
    """A message as GELF's datagrams: itself, or chunks with 1e 0f, an id, a number and a count.
    Nothing for a message that needs more than `GELF_CHUNKS`."""
    if len(message) <= GELF_CHUNK:
        return [message]
    size = GELF_CHUNK - 12
    count = -(-len(message) // size)
    if count > GELF_CHUNKS:
        return []
    head = b"\x1e\x0f" + secrets.token_bytes(8)
    return [
        b"%b%c%c%b" % (head, number, count, message[number * size : (number + 1) * size]) for number in range(count)
    ]


def _large(formed: Formed) -> bool:
    begin = 0
    for end in formed.ends:
        if end - begin > GELF_CHUNK:
            return True
        begin = end
    return False


class Journal(DatagramDestination):
    """The journal of systemd, by its native protocol:
    https://systemd.io/JOURNAL_NATIVE_PROTOCOL/. A message that exceeds a datagram is passed as a
    sealed memory file.
    """

    def form(self, document: Delivery) -> Form:
        assert isinstance(document.target, Journald)
        return forms.journald(document)

    async def dial(self) -> socket.socket:
        return dial.datagram(JOURNAL)

    async def too_large(self, feed: Feed, message: bytes) -> None:
        assert self._socket is not None
        file = os.memfd_create("journal", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            left = memoryview(message)
            while left:
                left = left[os.write(file, left) :]
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
            while True:
                with suppress(BlockingIOError):
                    socket.send_fds(self._socket, [b""], [file])
                    return
                await self.writable()
        finally:
            os.close(file)
