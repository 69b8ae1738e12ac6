"""The monitor in memory. `Host` outlives a daemon; `FakeMonitor` is one daemon's client of it.

`FakeMonitor` has the surface of `engine.monitor.client.Monitor` and its order of events:
- `run` answers in two steps (the order is sent, the runtime makes the process), each an await point
  named to `Host.point`. A process may end before `run` has returned. Its `Process.exit` is resolved
  then.
- An exit resolves `Process.exit` first, then `on_exit` is called from the loop. It stays in the
  journal until `forget`.
- When the monitor dies (`Host.kill_monitor`), runs in progress fail with
  `LaunchFailed(interrupted=True)` and their processes are ended; other requests fail with
  `Interrupted`. Other processes continue. A new monitor serves at once, or after
  `Host.revive_monitor` if `Host.stays_dead` is set; `run` waits for it.
- A daemon that is killed leaves the host as it is: make another `FakeMonitor` of the same host, and
  `open` it.

Not here: streams, terminals and logs. Attached clients are only counted, and only `Host.grow_log`
changes the end of a log.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import EngineError, NotFound, ServerError
from engine.logs.targets import Target
from engine.monitor.handles import Attached, Client, Exit, Interrupted, LaunchFailed, LogReading, Process
from engine.monitor.messages import Done, Follow, Order, Unfollow

DEAD = "the monitor ended before it answered"


async def _yield(name: str) -> None:
    await asyncio.sleep(0)


@dataclass
class Running:
    """A process of the fake kernel. `ignores`: signals without effect; SIGKILL always has one."""

    key: str
    pid: int
    argv: tuple[str, ...]
    tty: bool
    log: Target | None
    stdin_once: bool = False
    ignores: frozenset[int] = frozenset()
    signals: list[int] = field(default_factory=list)


class Host:
    """Kernel and monitor, which the next daemon finds after a daemon has died."""

    def __init__(self) -> None:
        self.processes: dict[str, Running] = {}
        self.journal: dict[str, Exit] = {}
        """Exits that no daemon has confirmed with `forget`."""
        self.clients: dict[str, list[int]] = {}
        """Attached clients by key, waiting or served."""
        self.held: set[int] = set()
        self.kept: int = -1
        self.size: dict[str, tuple[int, int]] = {}
        self.log_end: dict[str, tuple[int, int]] = {}
        self.readers: dict[int, str] = {}
        self.stays_dead = False
        self.alive = True
        self.refuse: dict[str, EngineError] = {}
        """By key: the exception that the next `run` of it raises."""
        self.ends_at_once: dict[str, int] = {}
        """By key: the exit status of the next process, which ends before `run` has returned."""
        self.ignores: dict[str, frozenset[int]] = {}
        """By key: signals that its processes ignore."""
        self.launched: list[tuple[str, tuple[str, ...]]] = []
        """Every launch that made a process, in order."""
        self.point: Callable[[str], Awaitable[None]] = _yield
        """Awaited at each await point, with the point's name. A test decides there what happens
        next.
        """
        self._pids = itertools.count(1 << 23)  # no process of the host has such a number
        self._numbers = itertools.count(1)
        self._client: FakeMonitor | None = None

    # --- called by tests ---

    def end(self, key: str, status: int = 0) -> None:
        """The process `key` ends by itself."""
        if self.processes.pop(key, None) is None:
            raise KeyError(key)
        self.size.pop(key, None)
        record = self.journal[key] = Exit(status, time.time_ns())
        self.clients.pop(key, None)
        if self._client is not None and self.alive:
            self._client._ended(key, record)

    def kill_monitor(self) -> None:
        """SIGKILL of the monitor.

        Clients that waited for a process are lost; those of running processes too.
        """
        self.alive = False
        self.clients.clear()
        self.held.clear()
        self.readers.clear()
        if self._client is not None:
            self._client._monitor_died()
        if not self.stays_dead:
            asyncio.get_running_loop().call_soon(self.revive_monitor)

    def revive_monitor(self) -> None:
        """A new monitor serves, and is handed every process."""
        if not self.alive:
            self.alive = True
            if self._client is not None:
                self._client._monitor_came()

    def kill_daemon(self) -> None:
        """The daemon is killed. Nothing is reported to it any more, and clients whose output it
        holds back are lost.
        """
        client, self._client = self._client, None
        if client is not None:
            client.gone = True
        for number in self.held:
            for numbers in self.clients.values():
                if number in numbers:
                    numbers.remove(number)
        self.held.clear()
        self.readers.clear()

    def detach(self, key: str, number: int, keys: bool = True) -> None:
        """An attached client leaves."""
        self.clients[key].remove(number)
        if self._client is not None:
            asyncio.get_running_loop().call_soon(self._client._on_detach, key, number, keys)

    def grow_log(self, key: str, size: int = 1) -> None:
        inode, offset = self.log_end.get(key, (1, 0))
        self.log_end[key] = inode, offset + size
        if self._client is not None:
            self._client._log_grown()


class FakeMonitor:
    """The client of one daemon: the surface of `engine.monitor.client.Monitor`."""

    def __init__(
        self,
        run: Path,
        *,
        attach_stall: int = 300,
        on_exit: Callable[[str, Exit], None],
        on_detach: Callable[[str, int, bool], None] = lambda key, client, keys: None,
        host: Host | None = None,
    ) -> None:
        self.host = host if host is not None else Host()
        self.processes: dict[str, Process] = {}
        self.exits: dict[str, Exit] = {}
        self.dropped: dict[str, int] = {}
        self.pid = 2
        self.losses = 0
        self.kept = -1
        self.closing = False
        self.gone = False
        self.forgotten: list[str] = []
        self.dropped: list[str] = []
        self._on_exit = on_exit
        self._on_detach = on_detach
        self._holding = True
        self._connected = asyncio.Event()
        self._pending: set[asyncio.Future[None]] = set()
        self._unsent: list[Callable[[], None]] = []
        self._grown = asyncio.Event()

    # --- life ---

    async def open(self, *, hold: bool = False) -> None:
        await self.host.point("open")
        self.host._client = self
        self.host.alive = True
        for running in self.host.processes.values():
            self._keep(running)
        self.exits.update(self.host.journal)
        self.kept = self.host.kept
        self._holding = hold
        self._connected.set()

    def deliver(self) -> None:
        self._holding = False
        while self.exits:
            self._on_exit(*self.exits.popitem())

    async def close(self) -> None:
        self.closing = self.gone = True
        if self.host._client is self:
            self.host._client = None
        self._fail("the daemon is leaving")

    async def shutdown(self, limit: float = 0.0) -> None:
        await self.host.point("shutdown")
        if self.host.processes:
            raise ServerError(f"{len(self.host.processes)} processes are left: {next(iter(self.host.processes))}")
        self.host.alive = False
        await self.close()

    # --- orders ---

    async def run(
        self,
        key: str,
        argv: Sequence[str],
        *,
        cwd: str,
        tty: bool = False,
        open_stdin: bool = False,
        stdin_once: bool = False,
        size: Any = None,
        log: Target | None = None,
        document: bytes = b"",
        client: Client | None = None,
        namespace: int = -1,
        owner: tuple[int, int] | None = None,
    ) -> Process:
        host = self.host
        await self._ready()
        interrupted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending.add(interrupted)
        try:
            await host.point(f"run {key}: sent")
            self._check(interrupted)
            if key in host.processes:
                raise ServerError(f"{key} runs already")
            if client is not None:
                self._attached(key, hold=False)
            host.journal.pop(key, None)
            refusal = host.refuse.pop(key, None)
            if refusal is not None:
                raise refusal
            running = Running(
                key, next(host._pids), tuple(argv), tty, log, stdin_once, host.ignores.get(key, frozenset())
            )
            host.processes[key] = running
            try:
                await host.point(f"run {key}: made")
            except asyncio.CancelledError:
                # The caller was cancelled, but the process exists; the answer arrives nevertheless.
                if not interrupted.done() and host.processes.get(key) is running and not self.gone:
                    self._launched(running)
                raise
            if interrupted.done() and not self.gone and host.processes.get(key) is running:
                # a launch that the dead monitor had not finished is ended
                del host.processes[key]
            self._check(interrupted)
            if self.gone:
                raise Interrupted("the daemon is leaving")
            process = self._launched(running)
            await host.point(f"run {key}: answered")
            return process
        finally:
            self._pending.discard(interrupted)

    def _launched(self, running: Running) -> Process:
        self.host.launched.append((running.key, running.argv))
        self.exits.pop(running.key, None)
        process = self._keep(running)
        status = self.host.ends_at_once.pop(running.key, None)
        if running.key not in self.host.processes:
            # It ended before the answer was sent; the report follows the answer.
            self.host.processes[running.key] = running
            status = self.host.journal.pop(running.key, Exit(0, 0)).status
        if status is not None:
            self.host.end(running.key, status)
        return process

    def _check(self, interrupted: asyncio.Future[None]) -> None:
        if interrupted.done():
            raise LaunchFailed(DEAD, -1, interrupted=True)

    async def attach(self, key: str, client: Client, *, hold: bool = False) -> Attached:
        await self._ask(f"attach {key}")
        number = self._attached(key, hold=hold)
        return Attached(number, *self.host.log_end.get(key, (0, 0)), key in self.host.processes)

    def _attached(self, key: str, *, hold: bool) -> int:
        number = next(self.host._numbers)
        self.host.clients.setdefault(key, []).append(number)
        if hold:
            self.host.held.add(number)
        return number

    async def release(self, key: str, client: int) -> None:
        await self._ask(f"release {key}")
        self.host.held.discard(client)

    async def resize(self, key: str, rows: int, columns: int) -> None:
        await self._ask(f"resize {key}")
        running = self.host.processes.get(key)
        if running is None:
            raise ServerError(f"{key} has no terminal or does not run")
        if running.tty:
            self.host.size[key] = (rows, columns)

    async def watch_log(self, key: str, inode: int, offset: int) -> None:
        while key in self.host.processes and self.host.log_end.get(key, (0, 0)) == (inode, offset):
            self._grown.clear()
            await self._grown.wait()

    def relay(self, listener: Any, address: bytes) -> None:
        pass

    def keep(self, descriptor: int) -> None:
        self.kept = self.host.kept = descriptor

    def read_log(self, key: str) -> LogReading:
        return LogReading(self, key)

    def drop(self, key: str) -> None:
        self._tell(lambda: self._drop(key))

    def _drop(self, key: str) -> None:
        self.dropped.append(key)
        if key not in self.host.processes:
            self.host.clients.pop(key, None)

    def forget_dropped(self, key: str) -> None:
        self.dropped.pop(key, None)

    def forget(self, key: str) -> None:
        self.exits.pop(key, None)
        self._tell(lambda: self._forget(key))

    def _forget(self, key: str) -> None:
        self.forgotten.append(key)
        self.host.journal.pop(key, None)

    async def take_reports(self) -> None:
        await self.host.point("take_reports")

    def signal(self, key: str, number: int) -> None:
        running = self.host.processes.get(key)
        if running is None or key not in self.processes:
            raise NotFound(f"No such process: {key}")
        running.signals.append(number)
        if number == signal.SIGKILL or (number and number not in running.ignores and number not in _HARMLESS):
            asyncio.get_running_loop().call_soon(self._kill, running, 128 + number)

    def _kill(self, running: Running, status: int) -> None:
        if self.host.processes.get(running.key) is running:
            self.host.end(running.key, status)

    # --- what a LogReading needs ---

    def all_logged(self, key: str) -> bool:
        return False

    def number(self) -> int:
        return next(self.host._numbers)

    async def ask(self, order: Callable[[int], Order]) -> Done:
        await self._ask("order")
        seq = self.number()
        self._obey(order(seq))
        return Done(seq)

    def tell(self, order: Callable[[int], Order]) -> None:
        made = order(self.number())
        self._tell(lambda: self._obey(made))

    def _obey(self, order: Order) -> None:
        if isinstance(order, Follow):
            self.host.readers[order.reader] = order.key
        elif isinstance(order, Unfollow):
            self.host.readers.pop(order.reader, None)

    # --- inside ---

    async def _ready(self) -> None:
        if not self._connected.is_set():
            if self.closing:
                raise Interrupted("the monitor is not connected")
            await self._connected.wait()

    async def _ask(self, name: str) -> None:
        await self._ready()
        interrupted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending.add(interrupted)
        try:
            await self.host.point(name)
            if interrupted.done():
                raise Interrupted(DEAD)
        finally:
            self._pending.discard(interrupted)

    def _tell(self, act: Callable[[], None]) -> None:
        if self._connected.is_set():
            act()
        elif not self.closing:
            self._unsent.append(act)

    def _keep(self, running: Running) -> Process:
        exit_future: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        process = Process(running.key, running.pid, "", [], running.stdin_once, running.log, exit_future)
        self.processes[running.key] = process
        return process

    def _ended(self, key: str, record: Exit) -> None:
        process = self.processes.pop(key, None)
        if process is None:  # still being made: `_launched` reports it
            return
        process.exit.set_result(record)
        self._log_grown()
        if self._holding:
            self.exits[key] = record
        else:
            asyncio.get_running_loop().call_soon(self._report, key, record)

    def _report(self, key: str, record: Exit) -> None:
        if not self.gone:
            self._on_exit(key, record)

    def _monitor_died(self) -> None:
        self._connected.clear()
        self._fail(DEAD)

    def _fail(self, reason: str) -> None:
        for each in self._pending:
            if not each.done():
                each.set_result(None)

    def _monitor_came(self) -> None:
        for key in [key for key in self.processes if key not in self.host.processes]:
            self._ended(key, self.host.journal[key])  # it ended while no monitor ran
        self._connected.set()
        unsent, self._unsent = self._unsent, []
        for act in unsent:
            act()

    def _log_grown(self) -> None:
        self._grown.set()


_HARMLESS = {signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH, signal.SIGSTOP, signal.SIGTSTP}
"""Signals that do not end a process by default (signal(7))."""
