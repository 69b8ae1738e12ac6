"""Targets behind datagrams: syslog and GELF over UDP, the local syslog, and the journal.

UDP promises nothing, so a line counts as delivered when it is sent. Only the report that nobody
listens (ICMP, ECONNREFUSED) is known; the rest waits then. A Unix datagram socket is reliable: its
send fails while the receiver's queue is full, and SIOCOUTQ is 0 when the receiver has read all of
them.

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
from collections.abc import Sequence

from isal import isal_zlib

from engine._fast import datagrams
from engine._fast.wireform import Form
from engine.logs import dial
from engine.logs.deliveries import JOURNAL, Delivery, Gelf, Journald, Syslog
from engine.shipper import forms
from engine.shipper.destination import TURN, Destination, Owner
from engine.shipper.feed import Formed

RESOLVE_AGAIN = 60.0
"""Seconds after which the name of a UDP target is resolved again."""
LOOK = 0.05
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
        self._opened = 0.0

    @abstractmethod
    async def dial(self) -> socket.socket:
        """A connected, non-blocking socket. Raises one of `FAILURES`."""

    def packed(self, formed: Formed) -> tuple[bytes, Sequence[int]]:
        """The datagrams of some messages: their bytes, and the end of each."""
        return formed.wire, formed.ends

    def refused(self, message: bytes) -> None:
        """A message that is too large for one datagram. Raises OSError if it must wait."""

    async def open(self) -> None:
        self._sent = 0
        self._opened = time.monotonic()
        self._socket = await self.dial()

    async def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def pass_on(self) -> None:
        assert self._socket is not None
        local = self._socket.family == socket.AF_UNIX
        while True:
            feed = self.next_feed()
            if feed is None:
                if self._marks:
                    self._look()
                await self.wait(LOOK if self._marks else None)
                if not local and time.monotonic() - self._opened > RESOLVE_AGAIN:
                    await self.close()
                    await self.open()
                continue
            formed = feed.format(TURN)
            if formed is None:
                feed.idle()
                continue
            self.notify(feed)
            if formed.messages:
                await self._send(*self.packed(formed))
                self._sent += 1
            self.sent(self._sent, feed)
            if local:
                self._look()
            else:
                self.settle(self._sent)
            await asyncio.sleep(0)

    def _look(self) -> None:
        """Settle what the receiver has read."""
        assert self._socket is not None
        answer = fcntl.ioctl(self._socket.fileno(), termios.TIOCOUTQ, b"\0\0\0\0")
        if struct.unpack("i", answer)[0] == 0:
            self.settle(self._sent)

    async def _send(self, wire: bytes, ends: Sequence[int]) -> None:
        assert self._socket is not None
        descriptor = self._socket.fileno()
        first = 0
        while first < len(ends):
            try:
                sent = datagrams.send(descriptor, wire, ends, first)
            except OSError as error:
                if error.errno != errno.EMSGSIZE:
                    raise
                self.refused(wire[ends[first - 1] if first else 0 : ends[first]])
                sent = 1
            if sent == 0:
                await self._writable(descriptor)
            first += sent

    async def _writable(self, descriptor: int) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_writer(descriptor, ready.set)
        try:
            # ENOBUFS of a network interface is not reported by epoll.
            async with asyncio.timeout(1):
                await ready.wait()
        except TimeoutError:
            pass
        finally:
            loop.remove_writer(descriptor)


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

    def packed(self, formed: Formed) -> tuple[bytes, Sequence[int]]:
        target = self.target
        assert isinstance(target, Gelf)
        if target.compression == "none" and not _large(formed):
            return formed.wire, formed.ends
        # isal has levels 0 to 3, of which 1 is its default; their speeds differ little.
        level = 1 if target.level < 0 else min(target.level, 3)
        window = 31 if target.compression == "gzip" else 15
        parts: list[bytes] = []
        ends = array.array("Q")
        begin = size = 0
        for end in formed.ends:
            message = formed.wire[begin:end]
            begin = end
            if target.compression != "none":
                message = isal_zlib.compress(message, level, window)
            for part in chunks(message):
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

    def refused(self, message: bytes) -> None:
        assert self._socket is not None
        file = os.memfd_create("journal", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.write(file, message)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
            socket.send_fds(self._socket, [b""], [file])
        finally:
            os.close(file)
