"""The shipper process (`engine/shipper`), as the monitor keeps it running: started with the first
spool, started again when it ends while there is something to do.

It outlives the monitor. So it may be the child of an earlier one, and is then found by the pid in
its lock file, which it holds locked while it runs.

Owns:    the pidfd of the shipper, and the board, a page of memory that both processes share.
Threads: the monitor's one.
Raises:  nothing: a shipper that cannot be started is tried again later. Lines wait in the spools.
"""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from engine._fast.board import Board
from engine._fast.pump import Loop, Timer, Watch
from engine._fast.spawn import spawn
from engine.logs import cursor
from engine.logs.targets import Spool
from engine.monitor.process import Process, status_of
from engine.system.log_lines import say

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0
"""Seconds before a shipper that has ended is started again."""
STEADY = 30.0
"""Seconds after which a shipper counts as running well."""
SETTLE_GRACE = 60.0
"""Seconds in which the processes that a dead monitor left join the board again."""
END_LIMIT = 10.0
"""Seconds to wait for its end after SIGTERM."""
LOG_SIZE = 1 << 20
UNKNOWN = -1
"""Exit status of another monitor's child."""


class Shipper:
    """One that ends while a spool is open is started again."""

    def __init__(self, loop: Loop, environment: Sequence[bytes], run: str, processes: Mapping[str, Process]) -> None:
        """`processes`: all of this monitor, by key."""
        self._loop = loop
        self._environment = environment
        self._run = run
        self._directory = f"{run}/shipper"
        self._processes = processes
        self._board: Board | None = None
        self._root = ""
        self.pid = 0
        """0: none runs that is known."""
        self._pidfd = -1
        self._watch: Watch | None = None
        self._timer: Timer | None = None
        self._started = 0.0
        self._pause = FIRST_PAUSE
        self._ended: Callable[[], None] | None = None

    def ensure(self, root: str) -> None:
        """Have one run that serves `root`/logs."""
        self._root = root
        if self.pid == 0 and self._timer is None:
            self._find_or_start()

    @property
    def board(self) -> Board:
        """Made when it is needed first."""
        if self._board is None:
            self._board = Board(os.fsencode(self._directory), monitor=True)
            self._loop.call_later(SETTLE_GRACE, self._board.settle)
        return self._board

    def _check_board(self) -> None:
        """Make the board again if it was removed from RUN. Raises OSError."""
        if self._board is not None and self._board.replaced:
            self._board = None
            for process in self._processes.values():
                process.stdio.move_log(self.board)

    def acknowledged(self, container: str, path: str) -> tuple[int, int, int, int]:
        """The newest known position of a spool. `path`: its cursor."""
        try:
            with open(path, "rb") as file:
                saved = cursor.decode(file.read(cursor.SIZE))
        except FileNotFoundError:
            saved = None
        return cursor.newest(saved.position if saved is not None else None, self.board.last(container))

    def _find_or_start(self) -> None:
        self._timer = None
        try:
            self._check_board()
            pid = self._running()
            if pid == 0:
                pid = self._start()
            self._pidfd = os.pidfd_open(pid)
            self._watch = self._loop.watch(self._pidfd, self._readable)
        except (OSError, ValueError):
            traceback.print_exc()
            self._close()
            self._start_later()
        else:
            self.pid, self._started = pid, time.monotonic()

    def _running(self) -> int:
        """The pid of a shipper that runs already; 0 without one. Raises OSError, ValueError."""
        try:
            lock = os.open(f"{self._directory}/lock", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return 0
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(os.pread(lock, 32, 0))
        finally:
            os.close(lock)
        return 0

    def _start(self) -> int:
        arguments = [sys.executable, "-P", "-S", "-m", "engine.shipper", "--root", self._root, "--run", self._run]
        environment = [*self._environment, b"PYTHONPATH=" + os.fsencode(":".join(filter(None, sys.path)))]
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        log = -1
        try:
            log = os.open(f"{self._directory}/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            if os.fstat(log).st_size > LOG_SIZE:
                os.ftruncate(log, 0)
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            return spawn([os.fsencode(argument) for argument in arguments], environment, b"/", null, log, log, most)
        finally:
            os.close(null)
            if log >= 0:
                os.close(log)

    def _readable(self, events: int) -> None:
        try:
            result = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            status = UNKNOWN
        else:
            if result is None:
                return
            status = status_of(result)
        self._close()
        if self._ended is not None:
            self._ended()
        # 0: it has nothing left to do, or was asked to end.
        elif status != 0 or any(
            isinstance(process.log, Spool) and not process.idle for process in self._processes.values()
        ):
            if time.monotonic() - self._started > STEADY or status == 0:
                self._pause = FIRST_PAUSE
            if status > 0:
                say(f"the shipper has ended with status {status}", prefix="monitor: ")
            self._start_later()

    def _start_later(self) -> None:
        self._timer = self._loop.call_later(self._pause, self._find_or_start)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def reap(self, pid: int) -> bool:
        """Returns True if that ended child is the shipper, which is reaped here."""
        if pid != self.pid or pid == 0:
            return False
        self._readable(0)
        return True

    def end(self, then: Callable[[], None]) -> None:
        """End the shipper, then call. It settles and saves what it can first."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.pid == 0:
            with suppress(OSError, ValueError):
                self.pid = self._running()  # an earlier monitor's, which this one has not needed
                if self.pid:
                    self._pidfd = os.pidfd_open(self.pid)
                    self._watch = self._loop.watch(self._pidfd, self._readable)
        if self.pid == 0:
            then()
            return
        self._ended = then
        self._signal(signal.SIGTERM)
        self._loop.call_later(END_LIMIT, lambda: self._signal(signal.SIGKILL))

    def _signal(self, number: int) -> None:
        with suppress(OSError):
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, number)

    def _close(self) -> None:
        self.pid = 0
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
