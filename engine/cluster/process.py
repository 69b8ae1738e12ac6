"""The life of the manager's process, which runs while this node is a manager.

It is started in a session of its own and outlives the daemon. A later daemon finds it by its locked
pid file and connects again. When it dies it is started again, with growing pauses; when it ends
because its node was removed from the managers, `on_removed` is called instead.

Not here: what the process does (`engine/manager`), when there has to be one (`membership.py`).

Owns:    the process's pidfd, the daemon's connection to it, and the task that watches both.
Threads: the event loop's.
Raises:  ServerError when it cannot be started or does not answer; the manager's own kinds.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib.util
import logging
import os
import select
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

import engine
from engine.cluster import client
from engine.errors import EngineError, ServerError, Unavailable, reason
from engine.swarm_session.frames import Connection
from engine.swarm_session.messages import Begin, Stop
from engine.system.reconcile import Backoff
from engine.system.tasks import spawn
from engine.system.threads import cancelled

PROGRAM = "engine.manager"
PID_FILE = "manager.pid"
"""In RUN/swarm: locked while a manager's process runs, and holds its pid."""
REMOVED = 3
"""Exit status of a process whose node was removed from the managers."""
START_LIMIT = 20.0
"""Seconds from the start until the socket accepts."""
SHORTEST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds between two starts, doubled by each until one has served for `LONGEST_PAUSE`."""
STOP_LIMIT = 20.0
"""Seconds that `Stop` may take: it may wait for quorum to remove a member."""
TERM_LIMIT = 10.0
"""Seconds from SIGTERM to SIGKILL."""
NEEDED = ("cryptography",)

_log = logging.getLogger(__name__)


class Removed(ServerError):
    """This node was removed from the managers."""


class Process:
    """The manager's process of one engine. `root` and `run` are ROOT/swarm and RUN/swarm."""

    def __init__(
        self,
        root: Path,
        run: Path,
        *,
        log_level: str = "info",
        on_removed: Callable[[], None] = lambda: None,
        program: str = PROGRAM,
    ) -> None:
        """`on_removed` is called when a process that served has ended with `REMOVED`."""
        self._root, self._run = root, run
        self._log_level = log_level
        self._on_removed = on_removed
        self._program = program
        self._pidfd = -1
        self._child = 0
        """Its pid when it is a child of this daemon; 0 for one that an earlier daemon started."""
        self._connection: Connection | None = None
        self._serving = asyncio.Event()
        self._status: int | None = None
        """Its exit status, negative for a signal; None while it runs, and when it was no child."""
        self._begun: Begin | None = None
        self._watching: asyncio.Task[None] | None = None
        self.trouble = ""
        """Why it does not serve now; "" when it does."""

    @property
    def watched(self) -> bool:
        """True from a `begin` that succeeded until `stop`, or until the node was removed."""
        return self._watching is not None and not self._watching.done()

    # --- for requests -----------------------------------------------------------------------------

    @property
    def serves(self) -> bool:
        return self._serving.is_set()

    async def connection(self, seconds: float) -> Connection:
        """The connection for requests. Waits for a process that is just being started.

        Raises Unavailable when there is none after so many seconds.
        """
        try:
            async with asyncio.timeout(seconds):
                await self._serving.wait()
        except TimeoutError:
            raise Unavailable(self.trouble or "its manager is still starting") from None
        if self._connection is None:  # it has ended since then
            raise Unavailable(self.trouble or "its manager is still starting")
        return self._connection

    # --- start and end ----------------------------------------------------------------------------

    async def begin(self, begin: Begin) -> None:
        """Have a process that serves what `begin` says, and keep one running from then on.

        One that already runs is used. Raises the manager's refusal, or ServerError; nothing is
        kept running then, but the process may still run: `stop` ends it.
        """
        await self._unwatch()
        await self._serve(begin)
        self._begun = begin
        self._watch_again()

    def _watch_again(self) -> None:
        if self._begun is not None:
            self._watching = spawn(self._watch(self._begun), "swarm: the manager's process")

    async def _serve(self, begin: Begin) -> None:
        self._serving.clear()
        connection = await self._connect()
        reading = spawn(connection.run(), "swarm: the connection to the own manager")
        try:
            await connection.ask(begin)
        except BaseException as error:
            reading.cancel()
            connection.writer.close()
            if isinstance(error, OSError):
                raise await self._lost() from error
            raise
        self._connection = connection
        self.trouble = ""
        self._serving.set()

    async def _connect(self) -> Connection:
        """Connect to the process that runs, or to a new one."""
        if not self._alive() and not await self._adopt():
            self._spawn()
        async with contextlib.AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(asyncio.timeout(START_LIMIT))
                while True:
                    try:
                        return await client.dial_own(self._run)
                    except (ConnectionError, FileNotFoundError):
                        if not self._alive() and not await self._adopt():
                            raise await self._lost() from None
                    await asyncio.sleep(0.02)
            except TimeoutError:
                raise ServerError(f"the manager's process did not answer within {START_LIMIT:.0f} s") from None

    async def _watch(self, begin: Begin) -> None:
        """Keep a process serving. Ends when it was removed from the managers."""
        again = msgspec.structs.replace(begin, how="restore", body=b"", peers=())
        loop = asyncio.get_running_loop()
        backoff = Backoff(SHORTEST_PAUSE, LONGEST_PAUSE)
        while True:
            served = loop.time()
            if self._connection is not None:
                await self._connection.closed.wait()
                self._serving.clear()
                self._connection = None
                lost = await self._lost()
                self.trouble = lost.message
                if isinstance(lost, Removed):
                    self._on_removed()
                    return
                _log.error("swarm: %s; connecting again", lost.message)
            if loop.time() - served > LONGEST_PAUSE:
                backoff.reset()
            await asyncio.sleep(backoff.failed())
            try:
                await self._serve(again)
            except Removed:
                self._on_removed()
                return
            except (EngineError, OSError) as error:  # OSError: no descriptors, or no space
                self.trouble = error.message if isinstance(error, EngineError) else reason(error)
                _log.error("swarm: the manager does not serve yet: %s", self.trouble)

    async def stop(self, *, leave: bool = False, force: bool = False) -> None:
        """End the process, if one runs. With `leave` it removes its member from the swarm before.

        Raises the manager's refusal of a leave without `force`; it goes on serving then. With
        `force` a failed removal is raised when the process has ended.
        """
        await self._unwatch()
        failure: EngineError | None = None
        if self._alive() or await self._adopt():
            try:
                await self._ask_to_stop(leave, force)
            except EngineError as error:
                if leave and not force:
                    self._watch_again()
                    raise
                failure = error
            await self._end(at_once=failure is not None)
        self._begun = None
        self._disconnect()
        self._forget()
        if failure is not None:
            if leave:
                raise failure
            _log.warning("swarm: the manager's process was ended, as it did not stop: %s", failure.message)

    async def detach(self) -> None:
        """Leave the process running, for the next daemon."""
        await self._unwatch()
        self._disconnect()
        self._forget()

    def clear(self) -> None:
        """Remove what an ended process has left in RUN."""
        shutil.rmtree(self._run, ignore_errors=True)

    async def _ask_to_stop(self, leave: bool, force: bool) -> None:
        try:
            if self._connection is not None and not self._connection.closed.is_set():
                await self._connection.ask(Stop(leave=leave, force=force), timeout=STOP_LIMIT)
                return
            async with client.opened(await client.dial_own(self._run)) as connection:
                await connection.ask(Stop(leave=leave, force=force), timeout=STOP_LIMIT)
        except TimeoutError as error:
            raise ServerError(f"the manager's process did not answer within {STOP_LIMIT:.0f} s") from error
        except OSError as error:
            if leave or not await self._exited(1.0):
                raise ServerError(f"the manager's process does not answer: {reason(error)}") from error

    async def _end(self, *, at_once: bool) -> None:
        """Wait for the end of the process; help it along if it does not come, or `at_once`."""
        if not at_once and await self._exited(TERM_LIMIT):
            await self._ending()
            return
        for number, seconds in ((signal.SIGTERM, TERM_LIMIT), (signal.SIGKILL, TERM_LIMIT)):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)
            if await self._exited(seconds):
                await self._ending()
                return
        raise ServerError("the manager's process does not end")

    async def _unwatch(self) -> None:
        watching, self._watching = self._watching, None
        if watching is not None and watching is not asyncio.current_task():
            await cancelled(watching)

    def _disconnect(self) -> None:
        self._serving.clear()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.writer.close()

    # --- the process itself -----------------------------------------------------------------------

    def _spawn(self) -> None:
        """Raises ServerError if a program or package that it needs is missing."""
        check_programs()
        for directory in (self._root, self._run):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            directory.chmod(0o700)
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "NOTIFY_SOCKET", "LISTEN_"))
        }
        environment["PYTHONPATH"] = str(Path(engine.__file__ or "").parent.parent)
        arguments = [sys.executable, "-P", "-m", self._program, "--root", str(self._root), "--run", str(self._run)]
        try:
            pid = os.posix_spawn(
                sys.executable,
                [*arguments, "--log-level", self._log_level],
                environment,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, 2, 1),
                ],
                setsid=True,
                setsigmask=[],
                setsigdef=[
                    signal.SIGINT,
                    signal.SIGTERM,
                    signal.SIGHUP,
                    signal.SIGPIPE,
                    signal.SIGCHLD,
                    signal.SIGUSR1,
                ],
            )
            self._forget()
            self._pidfd = os.pidfd_open(pid)
            self._child = pid
        except OSError as error:
            raise ServerError(f"the manager's process cannot be started: {reason(error)}") from error

    async def _adopt(self) -> bool:
        """Find the process that an earlier daemon has started. Returns False if none runs."""
        for pid in await asyncio.to_thread(self._candidates):
            with contextlib.suppress(OSError):
                descriptor = os.pidfd_open(pid)
                if pid == _holder(self._run / PID_FILE) or _manages(pid, self._program, self._root):
                    self._forget()
                    self._pidfd = descriptor
                    return True
                os.close(descriptor)
        return False

    def _candidates(self) -> list[int]:
        holder = _holder(self._run / PID_FILE)
        return ([holder] if holder else []) + _processes(self._program, self._root)

    def _alive(self) -> bool:
        return self._pidfd >= 0 and not _readable(self._pidfd)

    async def _exited(self, seconds: float) -> bool:
        """Returns True when the process has ended within so many seconds."""
        if self._pidfd < 0:
            return True
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(self._pidfd, ended.set)
        try:
            async with asyncio.timeout(seconds):
                await ended.wait()
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(self._pidfd)
        return True

    async def _lost(self) -> ServerError:
        """The error for a process whose connection has ended."""
        ending = await self._ending()
        return (Removed if self._status == REMOVED else ServerError)(f"the manager's process {ending}")

    async def _ending(self) -> str:
        """How it has ended, in words. Reaps it."""
        await self._exited(1.0)
        self._reap()
        if self._status is None:
            return "has ended" if not self._alive() else "has closed the connection"
        if self._status < 0:
            return f"was ended by signal {-self._status}"
        return f"has ended with status {self._status}; the engine's log has its reasons"

    def _reap(self) -> None:
        """Note the exit status of a child that has ended."""
        if self._child and self._status is None and not self._alive():
            with contextlib.suppress(ChildProcessError):  # collected with orphans of a dead monitor
                found = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
                if found is not None:
                    self._status = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def _forget(self) -> None:
        descriptor, self._pidfd = self._pidfd, -1
        self._child = 0
        self._status = None
        if descriptor >= 0:
            os.close(descriptor)


def check_programs() -> None:
    """Raises ServerError that names what managers need and this host lacks."""
    missing = [f"the Python package {name}" for name in NEEDED if importlib.util.find_spec(name) is None]
    if shutil.which("etcd") is None:
        missing.insert(0, "the program etcd (Debian's package etcd-server)")
    if missing:
        raise ServerError(
            f"swarm managers need {', '.join(missing)}; "
            "install the packages of the extra with: pip install engined[swarm]"
        )


def _holder(path: Path) -> int:
    """The pid of the process that has this pid file locked; 0 for none."""
    try:
        with open(path, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(file.read() or b"0")
    except (OSError, ValueError):
        pass
    return 0


def _processes(program: str, root: Path) -> list[int]:
    """Pids of managers of this directory: one that has just been started holds no lock yet. Reads
    all of /proc: call it in a thread.
    """
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and _manages(int(name), program, root)]


def _manages(pid: int, program: str, root: Path) -> bool:
    mark = b"\0" + b"\0".join(os.fsencode(word) for word in (program, "--root", root)) + b"\0"
    try:
        return mark in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _readable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))
