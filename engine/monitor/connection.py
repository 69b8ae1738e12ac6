"""The monitor's end of a daemon's connection: packets in, reports out, each with its descriptors.

Not here: what an order does (`monitor.py`); the form of a packet (`messages.py`).

Owns:    the socket, and duplicates of the descriptors of reports that wait for room in it.
Threads: the monitor's one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
import traceback
from collections import deque
from collections.abc import Callable, Sequence

from engine._fast.pump import Loop, Timer
from engine.monitor import messages
from engine.monitor.process import Process

PACKETS = 32
"""Packets read from the daemon in one turn, before other descriptors are served."""
EPOLLIN, EPOLLOUT = 1, 4
_DESCRIPTOR_ROOM = socket.CMSG_SPACE(8 * 4)


class Connection:
    """The daemon's socket. Reports that it cannot take at once are queued here, with duplicates of
    their descriptors."""

    def __init__(
        self,
        loop: Loop,
        peer: socket.socket,
        obey: Callable[[Connection, bytes, list[int]], None],
        closed: Callable[[Connection], None],
    ) -> None:
        """`obey` carries out an order, from its packet and descriptors, which it takes over."""
        self._loop = loop
        self._obey = obey
        self._on_close = closed
        self.wants_rotated = False
        """This daemon knows the report `Rotated`."""
        self.wants_dropped = False
        """This daemon knows the report `Dropped`."""
        self.closed = False
        self.codec = messages.CURRENT
        """Codec of the protocol that its Hello named."""
        self.held: set[int] = set()
        self.watches: dict[int, tuple[Process, Callable[[], None]]] = {}
        self.readers: dict[int, Process] = {}
        self._socket = peer
        self._deaf = False
        self._outbox: deque[tuple[bytes, list[int]] | Process] = deque()
        self._retry: Timer | None = None
        self._watch = loop.watch(peer.fileno(), self._ready)

    def send(self, report: messages.Report, descriptors: Sequence[int] = ()) -> None:
        if self.closed:
            return
        data = self.codec.encode(report)
        if not self._outbox and self._give(data, descriptors):
            return
        if not self.closed:
            self._outbox.append((data, [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in descriptors]))
            self._await_room()

    def send_state(self, process: Process) -> None:
        """Report a running process. Its descriptors are duplicated when there is room for the
        packet, not all at once."""
        self._outbox.append(process)

    def flush(self) -> None:
        """Send queued reports, as many as the socket takes."""
        while self._outbox and not self.closed:
            first = self._outbox[0]
            if isinstance(first, Process):
                if first.pidfd >= 0 and first.status is None:
                    state, descriptors = first.state()
                    if not self._give(self.codec.encode(state), descriptors):
                        break
                self._outbox.popleft()
            else:
                data, duplicates = first
                if not self._give(data, duplicates):
                    break
                self._outbox.popleft()
                for descriptor in duplicates:
                    os.close(descriptor)
        self._await_room()

    def _await_room(self) -> None:
        if not self.closed:
            self._watch.change(EPOLLIN | EPOLLOUT if self._outbox and self._retry is None else EPOLLIN)

    def _give(self, data: bytes, descriptors: Sequence[int]) -> bool:
        if self._deaf:
            return True
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(descriptors)}i", *descriptors))]
        try:
            self._socket.sendmsg([data], ancillary if descriptors else [], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:  # unix(7) limits descriptors in flight
                if self._retry is None:
                    self._retry = self._loop.call_later(0.01, self._again)
                return False
            if error.errno in (errno.EPIPE, errno.ECONNRESET):
                self._deaf = True  # its end is read after its last order
                return True
            traceback.print_exc()
            self._loop.call_later(0, self.close)
            return False
        return True

    def _again(self) -> None:
        self._retry = None
        self.flush()

    def _ready(self, events: int) -> None:
        if events & EPOLLOUT:
            self.flush()
        for _ in range(PACKETS):
            if not self._obey_next():
                return

    def drain(self) -> None:
        """Carry out all orders that have arrived, also those of a daemon that is dead by now."""
        while self._obey_next():
            pass

    def _obey_next(self) -> bool:
        """Returns False when no order has arrived, and when none will come any more."""
        if self.closed:
            return False
        try:
            data, descriptors = receive(self._socket, messages.PACKET)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True  # the daemon died with unread reports; its orders are still in the queue
        except OSError:
            data, descriptors = b"", []
        if not data:
            self.close()
            return False
        self._obey(self, data, descriptors)
        return True

    def close(self) -> None:
        """The daemon is gone or was superseded. Containers and clients continue; only clients that
        it held are lost."""
        if self.closed:
            return
        self.closed = True
        self._watch.cancel()
        self._socket.close()
        for entry in self._outbox:
            if not isinstance(entry, Process):
                for descriptor in entry[1]:
                    os.close(descriptor)
        self._outbox.clear()
        for process, callback in self.watches.values():
            process.stdio.unwatch_log(callback)
        self.watches.clear()
        for reader, process in self.readers.items():
            process.stdio.unfollow_log(reader)
        self.readers.clear()
        for client in self.held:
            self._loop.abandon(client)
        self._on_close(self)


def receive(connection: socket.socket, limit: int) -> tuple[bytes, list[int]]:
    """One packet or piece of stream with its descriptors, CLOEXEC."""
    data, ancillary, _, _ = connection.recvmsg(limit, _DESCRIPTOR_ROOM, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
    descriptors: list[int] = []
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            count = len(content) // 4
            descriptors.extend(struct.unpack(f"{count}i", content[: count * 4]))
    return data, descriptors
