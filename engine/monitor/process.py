"""One process as the monitor sees it: a container's init or an exec, from its clients' first attach
to its journalled exit.

Not here: how it is made (`launch.py`), its streams (`_fast/pump.pyx`), which processes there are
(`monitor.py`).

Owns:    the pidfd; the stdio descriptors are its `Stdio`'s.
Threads: the monitor's one.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from engine._fast.pump import Loop, Stdio, Watch
from engine._fast.sink import Sink
from engine._fast.spawn import exit_of
from engine.logs.targets import Target
from engine.monitor import messages

DRAIN_GRACE = 2.0
"""Seconds to wait for remaining output of an ended process while its children hold its pipes
open."""
STATUS_GRACE = 5.0
"""Seconds to look for the exit status of a process that is not our child."""
LOST_STATUS = 255


class Processes(Protocol):
    """The table of all processes, to which each reports: `monitor.Monitor`."""

    loop: Loop
    by_pid: dict[int, Process]

    def report(self, report: messages.Report, descriptors: list[int] = ...) -> None: ...
    def tidy(self, process: Process) -> None: ...
    def rotated(self, key: str) -> None: ...
    def dropped(self, process: Process) -> None: ...
    def concluded(self, process: Process, status: int) -> None: ...


class Process:
    """A container's init or an exec. Waiting (it only has clients), being launched, running, or
    ended and being drained."""

    __slots__ = (
        "at",
        "drained_",
        "dropped_lines",
        "key",
        "log",
        "log_watches",
        "monitor",
        "pid",
        "pidfd",
        "status",
        "stdin_once",
        "stdio",
        "tries_end",
        "watch",
    )

    def __init__(self, monitor: Processes, key: str) -> None:
        self.monitor = monitor
        self.key = key
        self.stdio = Stdio(monitor.loop, self)
        self.log_watches: list[tuple[int, int, Callable[[], None]]] | None = None
        """While it is being launched: inode, offset and callback of each `Stdio.watch_log` to come.
        """
        self.pid = 0
        self.pidfd = -1
        self.watch: Watch | None = None
        self.stdin_once = False
        self.log: Target | None = None
        self.status: int | None = None
        self.at = 0
        self.drained_ = False
        self.dropped_lines = 0
        """Entries of its log that could not be written."""
        self.tries_end = 0.0

    @property
    def idle(self) -> bool:
        """Returns True if it neither runs nor is being created: only waiting clients keep it."""
        return self.log_watches is None and self.pidfd < 0

    def start(
        self, pid: int, pidfd: int, stdio: Mapping[str, int], log: Target | None, stdin_once: bool, sink: Sink | None
    ) -> None:
        """It runs, with these stdio descriptors by their letters (`messages.State`). Then call
        `stdio.begin()`.

        Takes ownership of all descriptors and the sink. When it raises OSError it owns none of
        them.
        """
        stdin, stdout, stderr, terminal = (stdio.get(letter, -1) for letter in "ioet")
        self.watch = self.monitor.loop.watch(pidfd, self._readable)
        try:
            self.stdio.start(stdin, stdout, stderr, terminal, stdin_once, sink, self.key.encode())
        except BaseException:
            self.watch.cancel()
            self.watch = None
            raise
        self.log, self.stdin_once = log, stdin_once
        self.pid, self.pidfd = pid, pidfd
        self.monitor.by_pid[pid] = self

    def state(self) -> tuple[messages.State, list[int]]:
        letters, descriptors = self.stdio.descriptors()
        state = messages.State(
            key=self.key, pid=self.pid, running=True, stdio=letters, stdin_once=self.stdin_once, log=self.log
        )
        return state, [self.pidfd, *descriptors]

    # --- exit ---

    def _readable(self, events: int) -> None:
        self.exited()

    def exited(self) -> None:
        """The process has ended: get its exit status and drain its remaining output."""
        if self.watch is None:
            self.collect()  # it was not our child when it ended
            return
        self.at = time.time_ns()
        self.watch.cancel()
        self.watch = None
        self.tries_end = time.monotonic() + STATUS_GRACE
        self.collect()
        self.stdio.finish(DRAIN_GRACE)

    def collect(self) -> None:
        """Find the exit status: reap the child, ask the kernel for the status that another parent
        has reaped or is to reap, or wait for `Reaped`."""
        if self.status is not None or self.pidfd < 0:
            return
        status: int | None
        try:
            result = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)
            status = None if result is None else status_of(result)
        except ChildProcessError:
            wait_status = exit_of(self.pidfd)
            if wait_status is None:
                wait_status = exit_of_zombie(self.pid, self.pidfd)
            status = None if wait_status is None else exit_code(wait_status)
        if status is None and time.monotonic() < self.tries_end:
            self.monitor.loop.call_later(0.02, self.collect)
        else:
            self.ended(LOST_STATUS if status is None else status)

    def ended(self, status: int) -> None:
        if self.status is None:
            self.status = status
            if self.monitor.by_pid.get(self.pid) is self:
                del self.monitor.by_pid[self.pid]
            self._conclude()

    def _conclude(self) -> None:
        if self.status is not None and self.drained_ and self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
            self.monitor.concluded(self, self.status)

    # --- called by Stdio ---

    def detached(self, number: int, keys: bool) -> None:
        self.monitor.report(messages.Detached(self.key, number, keys))
        self.monitor.tidy(self)

    def rotated(self) -> None:
        self.monitor.rotated(self.key)

    def dropped(self, lines: int) -> None:
        self.dropped_lines += lines
        self.monitor.dropped(self)

    def input_ended(self) -> None:
        self.monitor.report(messages.InputEnded(self.key))

    def drained(self) -> None:
        self.drained_ = True
        self._conclude()


def exit_of_zombie(pid: int, pidfd: int) -> int | None:
    """Wait status of a process that has ended, and whose parent, another one, has not reaped it
    yet: proc_pid_stat(5). PID 1 may take seconds for that. None if it is not known.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            fields = file.read(4096).rpartition(b") ")[2].split()
        # fails without the right to see the status, which is 0 then
        os.readlink(f"/proc/{pid}/ns/user")
        # fails if it was reaped, and the number may be another's
        signal.pidfd_send_signal(pidfd, 0)
    except OSError:
        return None
    return int(fields[49]) if fields[0] == b"Z" else None


def exit_code(wait_status: int) -> int:
    """0 to 255, or 128 + signal, from a wait status of wait(2)."""
    return 128 + os.WTERMSIG(wait_status) if os.WIFSIGNALED(wait_status) else os.WEXITSTATUS(wait_status)


def status_of(result: os.waitid_result) -> int:
    return result.si_status if result.si_code == os.CLD_EXITED else 128 + result.si_status
