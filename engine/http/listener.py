"""One listening socket: accepts connections, and pauses before descriptors run out.

Why not the loop's own server: when accept(2) fails with EMFILE, libuv accepts and closes every
waiting connection, which resets its client. Here waiting connections stay in the kernel's backlog,
and accepting pauses while some descriptors are left, so that requests under way can open files.

Owns: the listening socket. Threads: the event loop's. Not here: what happens on a connection
(`protocol.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
from collections.abc import Callable

from engine.errors import reason
from engine.system.tasks import spawn

_log = logging.getLogger(__name__)

AT_ONCE = 64
"""Connections that are accepted before other work gets a turn."""

PAUSE = 0.25
"""Seconds until accepting is tried again."""

QUIET = 60.0
"""Seconds between two lines in the log about pauses."""

_USED_UP = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Listener:
    """See the module."""

    def __init__(self, listening: socket.socket, protocol: Callable[[], asyncio.Protocol]) -> None:
        """`listening` listens, and does not block. `protocol` makes the protocol of each
        connection.
        """
        self._socket = listening
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._name = str(listening.getsockname())
        self._retry: asyncio.TimerHandle | None = None
        self._next_line = 0.0
        self._loop.add_reader(listening.fileno(), self._accept)

    @property
    def paused(self) -> bool:
        return self._retry is not None

    def close(self) -> None:
        """Stop listening. Connections that were accepted stay."""
        if self._retry is not None:
            self._retry.cancel()
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                connection, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:  # the client disconnected while it waited
                continue
            except OSError as error:
                if error.errno not in _USED_UP:
                    _log.exception("%s: accepting a connection failed", self._name)
                self._pause(reason(error))
                return
            spawn(self._connect(connection), f"{self._name}: a new connection")
            if _few_left(connection.fileno()):
                self._pause("few descriptors are left (RLIMIT_NOFILE)")
                return

    async def _connect(self, connection: socket.socket) -> None:
        try:
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(self._protocol, connection)
        except OSError as error:
            _log.debug("%s: a client disconnected at once: %s", self._name, error)
            connection.close()

    def _pause(self, reason: str) -> None:
        """Leave connections in the backlog for a while."""
        self._loop.remove_reader(self._socket.fileno())
        self._retry = self._loop.call_later(PAUSE, self._resume)
        now = self._loop.time()
        if now >= self._next_line:
            self._next_line = now + QUIET
            _log.warning("%s: accepting connections is paused: %s", self._name, reason)

    def _resume(self) -> None:
        self._retry = None
        with contextlib.suppress(OSError):
            probe = os.dup(self._socket.fileno())
            os.close(probe)
            if not _few_left(probe):
                self._loop.add_reader(self._socket.fileno(), self._accept)
                return
        self._retry = self._loop.call_later(PAUSE, self._resume)


def _few_left(descriptor: int) -> bool:
    """Returns True if only the reserved descriptors are left. `descriptor` was just opened, so it
    was the lowest free number.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return limit != resource.RLIM_INFINITY and descriptor >= limit - max(16, min(128, limit // 8))
