"""Netlink sockets: one exchange of requests and answers for all families, and notices filtered by
the kernel.

Rules: netlink(7). Blocking: a send waits for the kernel's lock of that family, which is held for
many milliseconds while namespaces are removed. So requests are made in threads. A socket stays in
the network namespace of the thread that made it.

Owns: one descriptor per object. Threads: any; the lock of a NetlinkSocket is held for one exchange
and no other lock is taken under it. Raises: NetlinkError with the kernel's errno and words.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Self

from engine.system.netlink.codec import (
    ACK,
    DONE,
    DUMP,
    DUMP_INTERRUPTED,
    ERROR,
    NetlinkError,
    Request,
    message,
    read_messages,
    refusal,
)

_SOL_NETLINK, _CAP_ACK, _EXT_ACK, _GET_STRICT_CHK = 270, 10, 11, 12
_SO_ATTACH_FILTER = 26
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_SEQUENCES = 0xFFFFFFFF

DUMPS = 64
"""How often a list is read while the kernel reports that it changed during the read."""


class Answer:
    """The kernel's answer to one request."""

    __slots__ = ("bodies", "error", "interrupted")

    def __init__(self) -> None:
        self.error: NetlinkError | None = None
        self.bodies: list[bytes] = []
        self.interrupted = False
        """The list changed while it was read, so entries may be missing (NLM_F_DUMP_INTR)."""


class NetlinkSocket:
    """A socket of one netlink family."""

    def __init__(self, family: int, *, buffer: int, receive: int = 64 << 10) -> None:
        """`buffer`: largest size of one send and of its acknowledgements. `receive`: bytes that are
        read at a time.
        """
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, family)
        self._lock = threading.Lock()
        self._sequence = 0
        self._receive = receive
        try:
            self._socket.setsockopt(_SOL_NETLINK, _EXT_ACK, 1)
            self._socket.setsockopt(_SOL_NETLINK, _CAP_ACK, 1)
            if family == socket.NETLINK_ROUTE:
                # with strict checking the kernel honours the filters of a dump
                self._socket.setsockopt(_SOL_NETLINK, _GET_STRICT_CHK, 1)
            for option in (_SO_SNDBUFFORCE, _SO_RCVBUFFORCE):
                self._socket.setsockopt(socket.SOL_SOCKET, option, buffer)
            self._socket.bind((0, 0))
        except BaseException:
            self._socket.close()
            raise
        self.port: int = self._socket.getsockname()[0]
        """The kernel's name for this socket.

        Notices about changes name the socket that made them.
        """

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def exchange(self, requests: Sequence[Request], flags: int = ACK, *, single: bool = False) -> list[Answer]:
        """Send all requests at once, in order, with `flags` added; returns the answer to each.

        Waits for requests that ask for an acknowledgement and for dumps. Others, such as the begin
        and end of an nftables batch, are answered only on failure. That ends the exchange, because
        the kernel has then dropped the batch and answers nothing else. With `single` the first
        answer completes a request, which saves the acknowledgement of a look-up.
        """
        awaited = [each.flags | flags for each in requests]
        awaited = [single or bool(each & ACK) or each & DUMP == DUMP for each in awaited]
        answers = [Answer() for _ in requests]
        waiting = awaited.count(True)
        with self._lock:
            first = self._sequence + 1
            self._sequence = (self._sequence + len(requests)) & _SEQUENCES
            self._socket.send(
                b"".join([message(each, at & _SEQUENCES, flags) for at, each in enumerate(requests, first)])
            )
            while waiting > 0:
                for kind, marks, sequence, body in read_messages(self._socket.recv(self._receive)):
                    at = (sequence - first) & _SEQUENCES
                    if at >= len(answers):
                        continue  # a late answer to an earlier exchange that failed
                    answer = answers[at]
                    if marks & DUMP_INTERRUPTED:
                        answer.interrupted = True
                    if kind not in (ERROR, DONE):
                        answer.bodies.append(body)
                        waiting -= single
                        continue
                    answer.error = refusal(body, marks if kind == ERROR else 0, requests[at].what)
                    if awaited[at]:
                        waiting -= 1
                    elif answer.error is not None:
                        waiting = 0
        return answers

    def dump(self, request: Request) -> list[bytes]:
        """Every entry of a list. It is read again if it changed during the read.

        Raises NetlinkError: EINTR after `DUMPS` attempts.
        """
        for _ in range(DUMPS):
            (answer,) = self.exchange((request,), DUMP)
            if answer.error is not None:
                raise answer.error
            if not answer.interrupted:
                return answer.bodies
        raise NetlinkError(errno.EINTR, f"{request.what}: the list changed during each of {DUMPS} reads")


class Listener:
    """A socket for notices of one family, for an event loop to watch.

    A filter in the kernel drops unwanted notices, so they wake no thread.
    """

    def __init__(self, family: int, program: Sequence[tuple[int, int, int, int]], *groups: int) -> None:
        """`program` is classic BPF (linux/filter.h), run on each message; 0 drops it."""
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        self._socket = socket.socket(socket.AF_NETLINK, kind, family)
        try:
            instructions = b"".join(struct.pack("=HBBI", *each) for each in program)
            kept = ctypes.create_string_buffer(instructions, len(instructions))
            self._socket.setsockopt(
                socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", len(program), ctypes.addressof(kept))
            )
            self._socket.bind((0, sum(1 << group - 1 for group in groups)))
        except BaseException:
            self._socket.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def _arrived(self) -> tuple[list[bytes], bool]:
        """The waiting messages, and True if the kernel dropped some for lack of space."""
        messages: list[bytes] = []
        lost = False
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    messages.append(self._socket.recv(4096))
                except OSError as error:
                    if error.errno != errno.ENOBUFS:
                        raise
                    lost = True
        return messages, lost


def as_loaded(number: int) -> int:
    """A 16-bit field of a message as classic BPF loads it.

    Netlink has the host's byte order, while BPF loads in network byte order.
    """
    return int.from_bytes(struct.pack("=H", number), "big")
