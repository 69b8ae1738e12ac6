"""Objects that the monitor's client returns and accepts: processes, their exits, attached clients,
open readings of a log.

Not here: the orders themselves and the connection that carries them (`client.py`).

Owns:    a `Process` owns duplicates of its process's descriptors until the process ends.
Threads: the event loop's thread only.
Raises:  `ServerError` and its kinds below.
"""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Callable
from typing import Protocol

import msgspec

from engine.errors import ServerError
from engine.logs.targets import Target
from engine.monitor import messages

EARLY_INLINE = 32 << 10
"""Bytes of early input that travel in the packet itself; more goes into a memory file."""


class Exit(msgspec.Struct, frozen=True):
    """How a process ended. `status`: 0 to 255, 128 + signal when killed, 255 when the status is
    lost.

    `at`: nanoseconds since the epoch.
    """

    status: int
    at: int


class Attached(msgspec.Struct, frozen=True):
    """A registered client.

    `log_inode`, `log_offset`: where the log ended at that instant (0, 0: no log). `running`: False
    when the client waits for a run.
    """

    client: int
    log_inode: int
    log_offset: int
    running: bool


class LaunchFailed(ServerError):
    """The runtime did not create the process.

    `status`: the runtime's exit status, -1 when it was not run. `reason`: the runtime's message. A
    client that was sent with the order stays attached and waits. `interrupted`: the monitor died
    during the launch, so the state of that client is unknown: whether the monitor received it, and
    whether its head was written.
    """

    def __init__(self, reason: str, status: int, *, interrupted: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.status = status
        self.interrupted = interrupted


class Interrupted(ServerError):
    """The monitor died before it answered."""


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """The receiver of a process's output: fields as in `messages.Attach`.

    The descriptor stays the caller's.
    """

    descriptor: int
    stdin: bool
    stdout: bool
    stderr: bool
    raw: bool
    head: bytes = b""
    early: bytes = b""
    detach_keys: bytes = b"\x10\x11"


class OrderDescriptors:
    """The descriptors that accompany one order.

    As a context manager it closes the memory files among them.
    """

    def __init__(self) -> None:
        self.descriptors: list[int] = []
        self._files: list[int] = []

    def __enter__(self) -> OrderDescriptors:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            os.close(file)

    def file(self, content: bytes) -> None:
        """Add a memory file with that content.

        Raises ServerError when there is no room or no free descriptor.
        """
        try:
            file = os.memfd_create("order", os.MFD_CLOEXEC)
            self._files.append(file)
            self.descriptors.append(file)
            view = memoryview(content)
            while view:
                view = view[os.write(file, view) :]
        except OSError as error:
            raise ServerError(f"an order to the monitor: {error.strerror}") from error

    def client(self, seq: int, key: str, client: Client, *, hold: bool = False) -> messages.Attach:
        """Add the client's socket, and its early input when that is long; returns the order for it.

        Raises ServerError.
        """
        self.descriptors.append(client.descriptor)
        early = client.early
        if len(early) > EARLY_INLINE:
            self.file(early)
            early = b""
        streams = (client.stdin, client.stdout, client.stderr)
        return messages.Attach(seq, key, *streams, client.raw, client.head, early, client.detach_keys, hold)


class Process:
    """A process that the monitor watches, with duplicates of the descriptors that a new monitor
    would need.

    `exit` is resolved when the process has ended and its output is drained, and not before. It is
    resolved before `on_exit` is called. It outlives the death of a monitor, but not
    `Monitor.close`: after that it stays pending. A process that ended before `Monitor.run` returned
    is returned with `exit` resolved. Never cancel the future: await it through `tasks.shield` or
    `asyncio.wait`.
    """

    __slots__ = ("adopted", "descriptors", "exit", "key", "log", "pid", "pidfd", "stdin_once", "stdio")

    def __init__(
        self,
        key: str,
        pid: int,
        stdio: str,
        descriptors: list[int],
        stdin_once: bool,
        log: Target | None,
        exit: asyncio.Future[Exit],
    ) -> None:
        """`descriptors`: the pidfd, then the stdio descriptors in the order of the letters of
        `stdio` (`messages.State`).
        """
        self.key = key
        self.pid = pid
        self.stdin_once = stdin_once
        self.log = log
        self.exit = exit
        self.adopted = True
        """False while a new monitor has not confirmed yet that it has taken the process over."""
        self.take(stdio, descriptors)

    def take(self, stdio: str, descriptors: list[int]) -> None:
        """Take ownership of these descriptors; earlier ones have been closed."""
        self.pidfd = descriptors[0] if descriptors else -1
        self.stdio = stdio
        self.descriptors = descriptors

    @property
    def pipes(self) -> list[int] | None:
        """Duplicates of its stdout and stderr that are pipes, as far as they are open. None if it
        has a terminal, or if a descriptor did not arrive."""
        if "t" in self.stdio or len(self.descriptors) != 1 + len(self.stdio):
            return None
        return [fd for letter, fd in zip(self.stdio, self.descriptors[1:], strict=True) if letter != "i"]

    @property
    def ended(self) -> bool:
        """The process is dead, whether or not its exit has been reported."""
        if self.pidfd < 0:
            return True
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def end_input(self) -> None:
        """Close the duplicate of stdin, which would keep the process from seeing end of file."""
        index = self.stdio.find("i")
        if index >= 0:
            os.close(self.descriptors.pop(index + 1))
            self.stdio = self.stdio.replace("i", "")

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []
        self.pidfd = -1


class Orders(Protocol):
    """The part of the monitor's client that a `LogReading` needs."""

    @property
    def closing(self) -> bool:
        """True when no other monitor will follow this one."""

    def number(self) -> int:
        """A number that no earlier order or reading has used."""

    def all_logged(self, key: str) -> bool:
        """See `Monitor.all_logged`."""

    async def ask(self, order: Callable[[int], messages.Order]) -> messages.Done:
        """Send `order(seq)` and return its answer. Raises Interrupted, ServerError."""

    def tell(self, order: Callable[[int], messages.Order]) -> None:
        """Send `order(seq)` now, or once a monitor is connected again. Its answer is not
        awaited."""


class LogReading:
    """A reader of a process's log. Call `begin` before opening the files, unless `complete` was
    True, and always call `end`. Rotation waits for a reader that has begun, within bounds."""

    __slots__ = ("_inode", "_key", "_number", "_orders")

    def __init__(self, orders: Orders, key: str) -> None:
        self._orders = orders
        self._key = key
        self._number = 0
        self._inode = 0

    def complete(self) -> bool:
        """True if the log has all output until now, but for unfinished lines. The monitor is not
        asked."""
        return self._orders.all_logged(self._key)

    async def begin(self) -> None:
        """Register: from here on the log is rotated at most once until `holds` is called. What was
        written before is in the log then. A second call does nothing. Raises ServerError."""
        if self._number:
            return
        number = self._number = self._orders.number()
        while True:
            try:
                await self._orders.ask(lambda seq: messages.Follow(seq, self._key, number, 0))
                return
            except Interrupted:
                if self._orders.closing:
                    raise

    def holds(self, inode: int) -> None:
        """The newest open file is `inode`: one more rotation is allowed."""
        if self._number and inode != self._inode:
            self._inode = inode
            number = self._number
            self._orders.tell(lambda seq: messages.Follow(seq, self._key, number, inode))

    def end(self) -> None:
        """Deregister: rotation no longer waits for this reader. Idempotent."""
        if self._number:
            number, self._number = self._number, 0
            self._orders.tell(lambda seq: messages.Unfollow(seq, self._key, number))
