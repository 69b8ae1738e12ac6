"""The daemon's side of the monitor: sends orders, receives reports, and keeps a monitor running.

`open` connects to the monitor that runs in RUN, or starts one. When the monitor dies, another is
started and takes over every process. For that case this side holds a duplicate of each stdio
descriptor and each pidfd. It is also a subreaper, so that orphaned containers become its children
and can be reaped. Launches that were under way are ended (`orphans.py`) and only then reported as
failed. Not here: what a container is; files of its bundle; the byte path, which does not pass the
daemon.

A monitor that is started here inherits one end of a socket pair, and RUN/monitor/lock already
locked. The orders that hand everything over are sent into the other end before the process is
made. Descriptors in the queue of a socket outlive their sender, so from then on a kill of the
daemon loses nothing. This is done first when a monitor has died (`_lost`).

Owns:    the connection, and the descriptors of every `Process` until its exit.
Threads: the event loop's only. Nothing here blocks except the spawn of a monitor (a vfork), and up
         to 5 ms for the lock of one that is just dying.
Raises:  `ServerError` when the monitor refuses or fails, `LaunchFailed` when the runtime fails,
         `NotFound` when the process is gone.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import itertools
import logging
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

import engine
from engine._fast.spawn import become_subreaper
from engine._fast.unlogged import all_logged
from engine.errors import NotFound, ServerError, reason_with_file, words
from engine.logs.targets import Target
from engine.monitor import messages, orphans, previous
from engine.monitor.handles import (
    Attached,
    Client,
    Exit,
    Interrupted,
    LaunchFailed,
    LogReading,
    OrderDescriptors,
    Process,
)
from engine.monitor.messages import Size
from engine.system.tasks import spawn

START_LIMIT = 60.0
"""Seconds that a new monitor may take until it answers."""
LOCK_TRIES, LOCK_PAUSE = 20, 0.00025
"""Tries to get the lock of a monitor whose connection has ended, and the seconds between them: the
kernel closes the one slightly before the other."""
CALL_BACK_TRIES = 200
"""Number of attempts, 10 ms apart, to connect to a monitor that was asked to recreate its
socket."""
RESTART_PAUSE = 0.2
"""Seconds between tries to restore a monitor that cannot be started."""
DYING_LIMIT = 10.0
"""Seconds from the end of the connection until the monitor's process must have ended too."""
COLLECT_PAUSE = 10.0
"""Seconds between checks for unclaimed children after a monitor has died."""
LOST_STATUS = 255
"""The exit status reported when the real one is lost."""
CODECS = (messages.CURRENT, previous.CODEC)
_DEAD = "the monitor ended before it answered"
_PACKETS = 64
_REPORT = 32 << 10
_DESCRIPTOR_ROOM = socket.CMSG_SPACE(8 * 4)
_SO_SNDBUFFORCE = 32
_SEND_BUFFER = 16 << 20
"""Room for orders that are not read yet: about 26,000 with descriptors. Unix sockets that are
connected to each other have no other bound (net.unix.max_dgram_qlen does not apply)."""

_log = logging.getLogger(__name__)


class _Starting(NamedTuple):
    """A monitor that was started here and has not answered yet.

    `words`: a pipe with what it says until it serves, or why it does not.
    """

    seq: int
    hello: asyncio.Future[messages.Done]
    words: int


class Monitor:
    """The monitor of `run`.

    `on_exit(key, exit)` is called for every process that ends while this daemon runs, after its
    `Process.exit` is resolved. For a process that ends during `run` it may be called before the
    awaiting task continues; there `Process.exit` decides. `on_detach(key, client, keys)` is called
    when a client leaves before its process ends, `on_rotated(key)` when a log has a file more that
    can be compressed, `on_dropped(key, first)` when `dropped` has changed (`first`: it had no such
    key before). `root`: ROOT of the shipper (`ship`).
    """

    def __init__(
        self,
        run: Path,
        *,
        attach_stall: int,
        on_exit: Callable[[str, Exit], None],
        on_detach: Callable[[str, int, bool], None] = lambda key, client, keys: None,
        on_rotated: Callable[[str], None] = lambda key: None,
        on_dropped: Callable[[str, bool], None] = lambda key, first: None,
        root: Path | None = None,
    ) -> None:
        self._run = run
        self._root = root
        self._attach_stall = attach_stall
        self._on_exit = on_exit
        self._on_detach = on_detach
        self._on_rotated = on_rotated
        self._on_dropped = on_dropped
        self.processes: dict[str, Process] = {}
        self.exits: dict[str, Exit] = {}
        self.dropped: dict[str, int] = {}
        """Lines of the last run of a process that could not be written to its log, by its key."""
        self.pid = 0
        """The monitor's own pid, for measurements."""
        self.losses = 0
        """Monitors that have ended. Each cut the streams of its clients. One that ended before it
        had answered had none, and does not count.
        """
        self.kept = -1
        """The descriptor that outlives this daemon with the monitor (`keep`), -1 when there is
        none.
        """
        self.held: dict[str, int] = {}
        """Descriptors by name that outlive this daemon with the monitor (`hold`)."""
        self._unlogged = -1
        """This monitor's file of what it has read and not logged yet, -1 when there is none, or
        when it is of an earlier version."""
        self._serving: dict[str, tuple[bytes, int]] = {}
        """Of those that are served (`serve`), where they lead to."""
        self._loop: asyncio.AbstractEventLoop
        self._files = 0
        self._socket: socket.socket | None = None
        self._outbox: deque[tuple[bytes, list[int]]] = deque()
        self._requests: dict[int, asyncio.Future[messages.Done]] = {}
        self._runs: dict[int, messages.Run] = {}
        self._launched: dict[int, Process] = {}
        self._sequence = itertools.count(1)
        self._codec = messages.CURRENT
        self._adopting: dict[int, Process] = {}
        self._forgotten: deque[str] = deque(maxlen=256)
        """The newest keys passed to `forget`. The bound is larger than the number ever under
        way."""
        self._connected = asyncio.Event()
        self._starting: _Starting | None = None
        self._restored: set[str] | None = None
        self._restoring: asyncio.Task[None] | None = None
        self._reaping: set[int] = set()
        self._children: set[int] = set()
        self._collecting: asyncio.Task[None] | None = None
        self._unsent: list[messages.Order] = []
        self._relay: tuple[socket.socket, bytes] | None = None
        self.closing = False
        self._opened = False
        self._holding = False

    # --- life -------------------------------------------------------------------------------------

    async def open(self, *, hold: bool = False) -> None:
        """Connect to the running monitor, or start one; then `processes` and `exits` hold its
        state. Raises ServerError.

        `hold`: exits that happen before `deliver` is called are put into `exits` as well.
        """
        self._holding = hold
        self._loop = asyncio.get_running_loop()
        become_subreaper()
        self._files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        # up to four descriptors of each process are kept here
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        deadline = time.monotonic() + START_LIMIT
        while not self._connected.is_set():
            try:
                await self._connect()
            # the monitor accepted while dying: its socket closes after its path is gone
            except Interrupted:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.01)
        self._opened = True

    def deliver(self) -> None:
        """Pass the exits that were held to `on_exit`, and call it directly from now on."""
        self._holding = False
        while self.exits:
            self._on_exit(*self.exits.popitem())

    async def close(self) -> None:
        """Disconnect, and leave the monitor running with its processes."""
        self.closing = True
        if self._restoring is not None:
            self._restoring.cancel()
            with suppress(asyncio.CancelledError):
                await self._restoring
        if self._collecting is not None:
            self._collecting.cancel()
        self._disconnect()
        self._end_start()
        self._fail_requests("the daemon is leaving")
        self._fail_runs("the daemon is leaving")
        for descriptor in [*self._reaping, *self._children]:
            self._loop.remove_reader(descriptor)
        for descriptor in self._children:
            os.close(descriptor)
        self._reaping.clear()
        self._children.clear()
        for process in self.processes.values():
            process.close()
        self.processes.clear()
        self._replace_kept(-1)
        for name in [*self.held]:
            self._replace_held(name, -1)

    async def shutdown(self, limit: float = 0.0) -> None:
        """End the monitor too. Raises ServerError when a process is left for `limit` seconds: that
        of a start which a killed daemon had begun may still be ending.
        """
        deadline = time.monotonic() + limit
        if self._restoring is not None:
            await asyncio.wait([self._restoring])
        self.closing = True
        while True:
            try:
                with suppress(Interrupted):
                    await self.ask(messages.Shutdown)
                break
            except ServerError:
                if time.monotonic() >= deadline:
                    self.closing = False
                    raise
                await asyncio.sleep(0.05)
        while self._children:  # noqa: ASYNC110 (collected when it is our child; happens once)
            await asyncio.sleep(0.005)
        await self.close()

    async def _connect(self) -> None:
        """Connect to the monitor that `_lost` has started, or to the one that listens in RUN, or
        start one. Raises ServerError, Interrupted."""
        deadline = time.monotonic() + START_LIMIT
        while self._starting is None and not self._reach():
            if time.monotonic() > deadline:
                raise ServerError(f"no monitor answers at {self._run / 'monitor' / 'socket'}")
            if not await self._call_back():
                try:
                    self._hand_over()
                except BlockingIOError:  # another daemon has just started one, or one is ending
                    await asyncio.sleep(0.01)
        connection, joins = self._socket, self._starting is not None
        self._restored = set()
        await (self._join() if joins else self._greet())
        if self._socket is not connection:
            raise Interrupted(_DEAD)  # after it had answered
        restored, self._restored = self._restored, None
        if not joins:
            self._pass_everything(restored)
        for process in list(self.processes.values()):
            if process.key not in restored:
                self._await_end(process)
        for order in self._unsent:
            self._send(order)
        self._unsent.clear()
        self._connected.set()

    def _reach(self) -> bool:
        """Connect to the monitor that listens in RUN. Returns False when none does.

        Raises ServerError.
        """
        path = str(self._run / "monitor" / "socket")
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            connection.connect(path)
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
            connection.close()
            return False
        except OSError as error:
            connection.close()
            raise ServerError(f"monitor at {path}: {error.strerror}") from error
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        self.pid = struct.unpack("3i", credentials)[0]
        self._use(connection)
        return True

    def _use(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _SEND_BUFFER)
        except PermissionError:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        self._socket = connection
        self._loop.add_reader(connection.fileno(), self._receive)

    async def _call_back(self) -> bool:
        """Ask a running monitor whose socket was removed (by a cleaner of temporary files, for
        example) to recreate it. Returns False when none runs."""
        path = self._run / "monitor" / "socket"
        if path.exists():
            return False
        called = await asyncio.to_thread(orphans.monitors, self._run)
        for pid in called:
            _log.warning(
                "the socket of the monitor of %s was removed; process %d has been asked to create it again",
                self._run,
                pid,
            )
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGHUP)
        for _ in range(CALL_BACK_TRIES if called else 0):
            if path.exists():
                return True
            await asyncio.sleep(0.01)
        return False

    async def _greet(self) -> None:
        """Say Hello in the newest protocol that the monitor speaks.

        Raises ServerError, Interrupted.
        """
        for codec in CODECS:
            self._codec = codec
            seq = self.number()
            try:
                await self._answer(seq, self._hello(seq))
            except Interrupted:
                raise
            except ServerError as error:
                refusal = error
            else:
                if codec is not messages.CURRENT:
                    _log.info(
                        "the monitor of %s is of an earlier version: it speaks protocol %d", self._run, codec.protocol
                    )
                return
        raise ServerError(
            f"the monitor of {self._run} is of another version: {refusal.message}. "
            "Stop it with that version's `engined stop`"
        )

    def _hello(self, seq: int) -> messages.Hello:
        return messages.Hello(
            seq, self._codec.protocol, self._attach_stall, held=True, rotated=True, dropped=True, unlogged=True
        )

    def _hand_over(self) -> None:
        """Start a monitor, with Hello and everything that this side holds in its connection.

        Raises BlockingIOError while some monitor has the lock, ServerError.
        """
        lock = self._lock()
        theirs: socket.socket | None = None
        try:
            ours, theirs = socket.socketpair(
                socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            )
            self._use(ours)
            self._codec = messages.CURRENT
            seq = self.number()
            self._send(self._hello(seq))
            self._pass_everything()
            self.pid, said = self._spawn(theirs.fileno(), lock)
        except OSError as error:
            self._disconnect()
            raise ServerError(f"cannot start the monitor: {reason_with_file(error)}") from error
        except ServerError:
            self._disconnect()
            raise
        finally:
            os.close(lock)
            if theirs is not None:
                theirs.close()
        self._requests[seq] = self._loop.create_future()
        self._starting = _Starting(seq, self._requests[seq], said)

    def _lock(self) -> int:
        """The lock that a monitor holds while it runs, taken for the next one: no daemon starts
        another meanwhile. Raises BlockingIOError, ServerError."""
        lock = -1
        try:
            self._run.mkdir(mode=0o711, parents=True, exist_ok=True)
            directory = self._run / "monitor"
            directory.mkdir(mode=0o700, exist_ok=True)
            lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if lock >= 0:
                os.close(lock)
            if isinstance(error, BlockingIOError):
                raise
            raise ServerError(f"cannot start the monitor: {reason_with_file(error)}") from error
        return lock

    def _pass_everything(self, restored: Set[str] = frozenset()) -> None:
        """Send all that a monitor keeps for the next daemon, but not the processes that it has
        reported itself."""
        if self.kept >= 0:
            self._send(messages.Keep(self.number()), [self.kept])
        for name in self.held:
            self._pass_held(name)
        if self._relay is not None:
            self._pass_on(*self._relay)
        for process in list(self.processes.values()):
            if process.key not in restored:
                self._adopt(process)

    def _spawn(self, connection: int, lock: int) -> tuple[int, int]:
        """Make a monitor's process, which inherits these descriptors. Returns its pid and the pipe
        with its first words. Raises OSError."""
        paths = dict.fromkeys(str(Path(package.__file__ or "").parent.parent) for package in (engine, msgspec))
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "NOTIFY_SOCKET", "LISTEN_"))
        }
        environment["PYTHONPATH"] = ":".join(paths)
        arguments = [sys.executable, "-P", "-S", "-m", "engine.monitor", "--run", str(self._run)]
        arguments += ["--attach-stall", str(self._attach_stall), "--files", str(self._files)]
        arguments += ["--connection", str(connection), "--lock", str(lock)]
        ours, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            pid = os.posix_spawn(
                sys.executable,
                arguments,
                environment,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, theirs, 1),
                    (os.POSIX_SPAWN_DUP2, theirs, 2),
                    # onto itself: only close-on-exec is cleared, in the child alone
                    (os.POSIX_SPAWN_DUP2, connection, connection),
                    (os.POSIX_SPAWN_DUP2, lock, lock),
                ],
                setsid=True,
                setsigmask=[],
                setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD],
            )
            child = os.pidfd_open(pid)
        except OSError:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        self._children.add(child)
        self._loop.add_reader(child, self._monitor_ended, child)
        return pid, ours

    async def _join(self) -> None:
        """Wait until the monitor that was started here serves. Raises ServerError, Interrupted."""
        starting = self._starting
        assert starting is not None
        try:
            await asyncio.wait_for(starting.hello, START_LIMIT)
        except TimeoutError:
            raise ServerError(f"the monitor did not start within {START_LIMIT:.0f} s") from None
        except Interrupted as error:
            if self.closing:
                raise
            words = b""
            with suppress(BlockingIOError):
                words = os.read(starting.words, 65536).strip()
            reason = words.decode(errors="replace") or "no reason given"
            raise ServerError(f"the monitor did not start: {reason}") from error
        finally:
            if self._starting is starting:
                self._end_start()

    def _end_start(self) -> None:
        """The monitor that was started here serves, or has ended."""
        if self._starting is not None:
            starting, self._starting = self._starting, None
            del self._requests[starting.seq]
            os.close(starting.words)
            if not starting.hello.cancel() and not starting.hello.cancelled():
                starting.hello.exception()  # looked at, as asyncio wants it

    def _monitor_ended(self, child: int) -> None:
        self._loop.remove_reader(child)
        self._children.discard(child)
        with suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, child, os.WEXITED | os.WNOHANG)
        os.close(child)

    def _disconnect(self) -> None:
        self._connected.clear()
        if self._socket is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
            self._socket = None
        for _, duplicates in self._outbox:
            for descriptor in duplicates:
                os.close(descriptor)
        self._outbox.clear()
        self._adopting.clear()
        self._replace_unlogged(-1)

    def _lost(self) -> None:
        """The connection has ended: the monitor is dead."""
        dead = self.pid
        answered = self._starting is None or self._starting.hello.done()
        self.losses += answered
        self._disconnect()
        self._fail_requests(_DEAD)
        if self.closing:
            return
        if answered:  # else it did not start, and `_connect` says why and tries again
            self._end_start()
            self._replace()
        if self._opened and self._restoring is None:
            _log.error("the monitor of %s has ended; a new one takes over %d processes", self._run, len(self.processes))
            self._restoring = spawn(self._restore(dead), "restore the monitor", fatal=True)

    def _replace(self) -> None:
        """Hand everything to a new monitor at once: until then a kill of this process would lose
        it. After a failure `_connect` tries again."""
        for _ in range(LOCK_TRIES):
            try:
                self._hand_over()
                return
            except BlockingIOError:
                time.sleep(LOCK_PAUSE)
            except ServerError as error:
                _log.error("the monitor cannot be replaced yet: %s", error.message)
                return

    async def _restore(self, dead: int) -> None:
        try:
            await self._clear_up(dead)
            while True:
                try:
                    await self._connect()
                    return
                except (ServerError, OSError) as error:  # OSError: no free descriptor, say
                    _log.error("the monitor cannot be restored yet: %s", words(error))
                    if self._starting is None:
                        self._disconnect()
                    await asyncio.sleep(RESTART_PAUSE)
        finally:
            self._restoring = None

    async def _clear_up(self, dead: int) -> None:
        """End and reap the launches of the dead monitor, then report them as failed."""
        if await self._has_ended(dead):
            await asyncio.to_thread(orphans.end_launches, self._run)
            await self._collect()
            if self._collecting is None:
                self._collecting = spawn(self._collect_again(), "collect what a dead monitor left")
        self._fail_runs(_DEAD)

    async def _has_ended(self, pid: int) -> bool:
        """Returns True if that monitor is gone and its children are reparented; its socket closes
        slightly earlier. False when it only closed our connection."""
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            # EINVAL of Linux 6.1: the number is in use, as the session of runtimes that it has left
            if error.errno not in (errno.ESRCH, errno.EINVAL):
                raise
            return True
        ended = asyncio.Event()
        self._loop.add_reader(pidfd, ended.set)
        try:
            await asyncio.wait_for(ended.wait(), DYING_LIMIT)
        except TimeoutError:
            return False
        finally:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
        return True

    async def _collect(self) -> None:
        await asyncio.to_thread(orphans.collect, {process.pid for process in self.processes.values()})

    async def _collect_again(self) -> None:
        """Reap the children that reparented processes leave to us in turn, those in the host's PID
        namespace. Polled, because uvloop keeps SIGCHLD to itself."""
        while True:
            await asyncio.sleep(COLLECT_PAUSE)
            await self._collect()

    def _adopt(self, process: Process) -> None:
        seq = self.number()
        order = messages.Adopt(seq, process.key, process.pid, process.stdio, process.stdin_once, process.log)
        process.adopted = False
        self._adopting[seq] = process
        self._send(order, process.descriptors)

    def _await_end(self, process: Process) -> None:
        if process.pidfd >= 0 and process.pidfd not in self._reaping:
            self._reaping.add(process.pidfd)
            self._loop.add_reader(process.pidfd, self._reap, process)

    def _reap(self, process: Process) -> None:
        """An adopted process has ended. If it was reparented to us as subreaper, only we can reap
        it, so its status is sent to the monitor."""
        self._loop.remove_reader(process.pidfd)
        self._reaping.discard(process.pidfd)
        try:
            result = os.waitid(os.P_PIDFD, process.pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            return  # another process is its parent, and the monitor gets the status from the kernel
        if result is not None:
            status = result.si_status if result.si_code == os.CLD_EXITED else 128 + result.si_status
            self.tell(lambda seq: messages.Reaped(seq, process.key, status))

    # --- orders -----------------------------------------------------------------------------------

    async def run(  # noqa: PLR0913 - what one order says, by keyword
        self,
        key: str,
        argv: Sequence[str],
        *,
        cwd: str,
        tty: bool = False,
        open_stdin: bool = False,
        stdin_once: bool = False,
        size: Size | tuple[int, int] | None = None,
        log: Target | None = None,
        document: bytes = b"",
        client: Client | None = None,
        namespace: int = -1,
        owner: tuple[int, int] | None = None,
    ) -> Process:
        """Have the runtime create a process. `document` is its OCI process document; the given
        client is attached from the start. `owner`: see `messages.Run`.

        `namespace`: a descriptor of the mount namespace in which the runtime is started; it stays
        the caller's. Raises LaunchFailed with the runtime's reason, ServerError when the client
        could not be attached. When the monitor dies meanwhile, LaunchFailed is raised after the
        runtime has been ended; the runtime's state of the container must then be deleted by force.
        """
        if isinstance(size, tuple):
            size = Size(*size)
        attach: messages.Attach | None = None
        sequence = 0
        with OrderDescriptors() as passed:
            if document:
                passed.file(document)
            if client is not None:
                attach = passed.client(0, "", client)
            if namespace >= 0:
                passed.descriptors.append(namespace)

            def order(seq: int) -> messages.Run:
                nonlocal sequence
                sequence = seq
                self._runs[seq] = messages.Run(
                    *(seq, key, tuple(argv), cwd, tty, open_stdin, stdin_once, size, log, bool(document), attach),
                    namespace=namespace >= 0,
                    owner=owner,
                )
                return self._runs[seq]

            try:
                await self.ask(order, passed.descriptors)
                return self._launched[sequence]
            finally:
                self._launched.pop(sequence, None)

    def serve(self, name: str, listener: int, address: bytes, port: int) -> None:
        """Have this monitor, and later ones, hold a listening socket as `hold` does, and pass on
        what comes to it, as `messages.Serve` says. `let_go` ends that."""
        self._replace_held(name, fcntl.fcntl(listener, fcntl.F_DUPFD_CLOEXEC, 3))
        self._serving[name] = address, port
        if self._connected.is_set() or self._starting is not None:
            self._pass_held(name)

    async def end_serving(self, names: Sequence[str]) -> None:
        """No longer hold and serve these sockets; their ports are free on return."""
        for name in names:
            self._replace_held(name, -1)
        asked = [self.ask(lambda seq, name=name: messages.Hold(seq, name)) for name in names]  # type: ignore[misc]
        # A monitor that has died serves none, and the next one is not told of them.
        await asyncio.gather(*asked, return_exceptions=True)

    def _pass_held(self, name: str) -> None:
        number, descriptor = self.number(), self.held[name]
        if name in self._serving:
            self._send(messages.Serve(number, name, *self._serving[name]), [descriptor])
        else:
            self._send(messages.Hold(number, name), [descriptor])

    async def attach(self, key: str, client: Client, *, hold: bool = False) -> Attached:
        """Give a client's socket to the process `key`, or to the one that will run under it."""
        with OrderDescriptors() as passed:
            done = await self.ask(lambda seq: passed.client(seq, key, client, hold=hold), passed.descriptors)
        return Attached(done.client, done.log_inode, done.log_offset, done.pid != 0)

    async def release(self, key: str, client: int) -> None:
        """Start to send a held client its output. Does nothing when the client has left
        meanwhile."""
        with suppress(ServerError):
            await self.ask(lambda seq: messages.Release(seq, key, client))

    async def resize(self, key: str, rows: int, columns: int) -> None:
        """Set the terminal's size. Does nothing when the process has no terminal. Raises
        ServerError when it does not run."""
        process = self.processes.get(key)
        if process is not None and "t" not in process.stdio:
            return
        await self.ask(lambda seq: messages.Resize(seq, key, Size(rows, columns)))

    async def watch_log(self, key: str, inode: int, offset: int) -> None:
        """Return when the log's end is not (inode, offset) any more, or the process has ended."""
        while not await self._log_has_grown(key, inode, offset):
            pass  # that monitor died: ask the next one

    async def _log_has_grown(self, key: str, inode: int, offset: int) -> bool:
        await self._connected.wait()
        seq = self.number()
        try:
            await self._answer(seq, messages.Watch(seq, key, inode, offset))
        except Interrupted:
            if self.closing:
                raise
            return False
        except asyncio.CancelledError:
            self.tell(lambda number: messages.Unwatch(number, seq))
            raise
        return True

    def relay(self, listener: socket.socket, address: bytes) -> None:
        """Have this monitor, and later ones, serve a listening socket as `messages.Relay` says. The
        caller keeps the descriptor, and keeps it open."""
        self._relay = listener, address
        if self._connected.is_set() or self._starting is not None:
            self._pass_on(listener, address)

    def _pass_on(self, listener: socket.socket, address: bytes) -> None:
        self._send(messages.Relay(next(self._sequence), address), [listener.fileno()])

    def keep(self, descriptor: int) -> None:
        """Have this monitor, and later ones, hold the descriptor for the next daemon. The caller
        keeps the descriptor, and keeps it open."""
        self._replace_kept(fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3))
        if self._connected.is_set() or self._starting is not None:
            self._send(messages.Keep(next(self._sequence)), [self.kept])

    def hold(self, name: str, descriptor: int) -> None:
        """Have this monitor, and later ones, hold the descriptor for the next daemon under a name.
        It replaces the one of that name. The caller keeps the descriptor.

        Monitors of earlier versions do not: a warning is logged.
        """
        self._replace_held(name, fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3))
        if self._connected.is_set() or self._starting is not None:
            self._pass_held(name)

    def let_go(self, name: str) -> None:
        """No longer hold the descriptor of that name. An unknown one is fine."""
        if name in self.held:
            self._replace_held(name, -1)
            self.tell(lambda seq: messages.Hold(seq, name))

    def _replace_held(self, name: str, descriptor: int) -> None:
        before = self.held.pop(name, -1)
        self._serving.pop(name, None)
        if before >= 0:
            os.close(before)
        if descriptor >= 0:
            self.held[name] = descriptor

    def _replace_kept(self, descriptor: int) -> None:
        if self.kept >= 0:
            os.close(self.kept)
        self.kept = descriptor

    def _replace_unlogged(self, descriptor: int) -> None:
        if self._unlogged >= 0:
            os.close(self._unlogged)
        self._unlogged = descriptor

    def ship(self) -> None:
        """Have the monitor run a shipper, which looks at all spools again."""
        self.tell(lambda seq: messages.Ship(seq, str(self._root)))

    async def compressed(self, key: str, inode: int, path: str) -> None:
        """Have the monitor replace a rotated file of the log of `key` by a compressed one. Raises
        ServerError when it has no such file any more; `path` is left then."""
        await self.ask(lambda seq: messages.Compressed(seq, key, inode, path))

    def read_log(self, key: str) -> LogReading:
        """A `LogReading` for a reader that is about to open the log of `key`."""
        return LogReading(self, key)

    def all_logged(self, key: str) -> bool:
        """True if all output of `key` until now is in its log, but for unfinished lines. Seen from
        its pipes and the monitor's memory: nothing is asked. False when it cannot be seen, for
        terminals for example, whose output is on its way for a while."""
        process = self.processes.get(key)
        if process is None or not process.adopted or self._unlogged < 0 or not self._connected.is_set():
            return False
        pipes = process.pipes
        return pipes is not None and all_logged(self._unlogged, pipes)

    def drop(self, key: str) -> None:
        """No process will run under `key`: its waiting clients are closed."""
        self.tell(lambda seq: messages.Drop(seq, key))

    def forget_dropped(self, key: str) -> None:
        """The log of that process has been removed."""
        self.dropped.pop(key, None)

    def forget(self, key: str) -> None:
        """Confirm that the exit of `key` is on the daemon's disk."""
        self.exits.pop(key, None)
        self._forgotten.append(key)
        self.tell(lambda seq: messages.Forget(seq, key))

    async def take_reports(self) -> None:
        """Process the reports that have arrived so far and call `on_exit` for them, without waiting
        for the event loop."""
        if self._socket is not None:
            self._receive()
        await asyncio.sleep(0)

    def signal(self, key: str, number: int) -> None:
        """Send a signal to the process itself. Raises NotFound when it is gone."""
        process = self.processes.get(key)
        try:
            if process is None or process.pidfd < 0:
                raise ProcessLookupError
            signal.pidfd_send_signal(process.pidfd, number)
        except ProcessLookupError:
            raise NotFound(f"No such process: {key}") from None
        except OSError as error:
            raise ServerError(f"signal {number} to process {key}: {error.strerror}") from error

    # --- the connection ---------------------------------------------------------------------------

    async def ask(self, order: Callable[[int], messages.Order], descriptors: Sequence[int] = ()) -> messages.Done:
        if not self._connected.is_set():
            if self.closing:
                raise Interrupted("the monitor is not connected")
            await self._connected.wait()
        seq = next(self._sequence)
        return await self._answer(seq, order(seq), descriptors)

    async def _answer(self, seq: int, order: messages.Order, descriptors: Sequence[int] = ()) -> messages.Done:
        future: asyncio.Future[messages.Done] = self._loop.create_future()
        self._requests[seq] = future
        try:
            self._send(order, descriptors)
            return await future
        finally:
            self._requests.pop(seq, None)

    def number(self) -> int:
        """A number that no earlier order or log reading has used."""
        return next(self._sequence)

    def tell(self, order: Callable[[int], messages.Order]) -> None:
        """Send `order(seq)` now, or once a monitor is connected again. Its answer is not
        awaited."""
        made = order(next(self._sequence))
        if self._connected.is_set():
            self._send(made)
        elif not self.closing:
            self._unsent.append(made)

    def _send(self, order: messages.Order, descriptors: Sequence[int] = ()) -> None:
        try:
            data = self._codec.encode(order)
        except ValueError as error:  # an earlier monitor does not know this order
            raise ServerError(str(error)) from error
        if len(data) > messages.PACKET:
            raise ServerError(f"an order of {len(data)} bytes exceeds the monitor's limit")
        if not self._outbox and self._give(data, descriptors):
            return
        if self._socket is not None:
            # The caller's descriptor may be closed by then.
            self._outbox.append((data, _duplicates(descriptors)))
            self._loop.add_writer(self._socket.fileno(), self._flush)

    def _give(self, data: bytes, descriptors: Sequence[int]) -> bool:
        if self._socket is None:
            return False
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(descriptors)}i", *descriptors))]
        try:
            self._socket.sendmsg([data], ancillary if descriptors else [], socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:
                return False
            if error.errno == errno.EBADF:
                raise
            return True  # the reader sees the end of the connection and fails every request
        return True

    def _flush(self) -> None:
        while self._outbox:
            data, duplicates = self._outbox[0]
            if not self._give(data, duplicates):
                return
            self._outbox.popleft()
            for descriptor in duplicates:
                os.close(descriptor)
        if self._socket is not None:
            self._loop.remove_writer(self._socket.fileno())

    def _receive(self) -> None:
        for _ in range(_PACKETS):
            if self._socket is None:
                return
            try:
                data, ancillary, flags, _ = self._socket.recvmsg(_REPORT, _DESCRIPTOR_ROOM, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except ConnectionResetError:  # it died with unread orders; its reports are still queued
                continue
            except OSError:
                data, ancillary, flags = b"", [], 0
            descriptors: list[int] = []
            for level, kind, content in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    count = len(content) // 4
                    descriptors.extend(struct.unpack(f"{count}i", content[: count * 4]))
            if flags & socket.MSG_CTRUNC:
                _log.error("descriptors of a process were lost: the daemon has no free descriptors")
            if not data:
                self._lost()
                return
            try:
                self._take(self._codec.decode_report(data), descriptors)
            except Exception:
                _log.exception("a report of the monitor failed")

    def _take(self, report: messages.Report, descriptors: list[int]) -> None:  # noqa: PLR0912 - a case for each report
        match report:
            case messages.Done():
                adopted = self._adopting.pop(report.seq, None)
                if adopted is not None:
                    adopted.adopted = True
                future = self._requests.get(report.seq)
                run = self._runs.pop(report.seq, None)
                if run is not None:
                    letters = "t" if run.tty else "ioe" if run.open_stdin else "oe"
                    process = self._keep(run.key, report.pid, letters, descriptors, run.stdin_once, run.log)
                    self.exits.pop(run.key, None)
                    self.dropped.pop(run.key, None)
                    if future is not None:
                        self._launched[report.seq] = process
                if future is not None and not future.done():
                    future.set_result(report)
            case messages.Failed():
                self._refused(report)
            case messages.Superseded():
                _log.error("another daemon has taken the monitor of %s", self._run)
                self.closing = True
            case messages.State() if report.running:
                self._keep(report.key, report.pid, report.stdio, descriptors, report.stdin_once, report.log)
            case messages.State():
                self._take_old_exit(report)
            case messages.Kept():
                self._replace_kept(descriptors[0] if descriptors else -1)
            case messages.Held():
                self._replace_held(report.name, descriptors[0] if descriptors else -1)
            case messages.Unlogged():
                self._replace_unlogged(descriptors[0] if descriptors else -1)
            case messages.Exited():
                self._end(report.key, Exit(report.status, report.at))
            case messages.InputEnded():
                if report.key in self.processes:
                    self.processes[report.key].end_input()
            case messages.Detached():
                self._loop.call_soon(self._on_detach, report.key, report.client, report.keys)
            case messages.Rotated():
                self._loop.call_soon(self._on_rotated, report.key)
            case messages.Dropped():
                first = report.key not in self.dropped
                self.dropped[report.key] = report.lines
                self._loop.call_soon(self._on_dropped, report.key, first)

    def _refused(self, report: messages.Failed) -> None:
        run = self._runs.pop(report.seq, None)
        future = self._requests.get(report.seq)
        process = self._adopting.pop(report.seq, None)
        if process is not None:
            _log.error("the monitor cannot take over process %s yet: %s", process.key, report.reason)
            self._loop.call_later(RESTART_PAUSE, self._adopt_again, process)
        elif future is None:
            _log.warning("the monitor refused: %s", report.reason)
        elif not future.done():
            launched = run is not None and (run.attach is None or report.attached)
            future.set_exception(LaunchFailed(report.reason, report.status) if launched else ServerError(report.reason))

    def _adopt_again(self, process: Process) -> None:
        """Offer it again, unless it has ended or another monitor is about to answer."""
        if self.closing or self.processes.get(process.key) is not process or process in self._adopting.values():
            return
        if self._connected.is_set():
            self._adopt(process)
        else:
            self._loop.call_later(RESTART_PAUSE, self._adopt_again, process)

    def _take_old_exit(self, report: messages.State) -> None:
        exit_record = Exit(report.status, report.at)
        if report.key in self.processes:
            self._end(report.key, exit_record)
        elif self._holding or not self._opened:
            self.exits[report.key] = exit_record
        elif report.key in self._forgotten:  # the earlier monitor died before it read the order
            self.forget(report.key)

    def _keep(
        self, key: str, pid: int, stdio: str, descriptors: list[int], stdin_once: bool, log: Target | None
    ) -> Process:
        """A process runs. A known process that a running monitor reports again keeps its object."""
        process = self.processes.get(key)
        if process is not None:
            self._let_go(process)
        if process is not None and process.pid == pid:
            process.take(stdio, descriptors)
            process.adopted = True
        else:
            if process is not None:
                process.exit.set_result(Exit(LOST_STATUS, time.time_ns()))
            process = Process(key, pid, stdio, descriptors, stdin_once, log, self._loop.create_future())
            self.processes[key] = process
        if self._restored is not None:
            self._restored.add(key)
        return process

    def _let_go(self, process: Process) -> None:
        if process.pidfd in self._reaping:
            self._reap(process)
        process.close()

    def _end(self, key: str, exit_record: Exit) -> None:
        process = self.processes.pop(key, None)
        if process is not None:
            self._let_go(process)
            process.exit.set_result(exit_record)
        if self._holding or not self._opened:
            self.exits[key] = exit_record
        else:
            # Runs after the wake-up of a `run` that was answered just before.
            self._loop.call_soon(self._on_exit, key, exit_record)

    def _fail_requests(self, reason: str) -> None:
        """Fail all waiting requests except launches."""
        for seq, future in list(self._requests.items()):
            if not future.done() and seq not in self._runs:
                future.set_exception(Interrupted(reason))

    def _fail_runs(self, reason: str) -> None:
        runs, self._runs = self._runs, {}
        for seq in runs:
            future = self._requests.get(seq)
            if future is not None and not future.done():
                future.set_exception(LaunchFailed(reason, -1, interrupted=True))


def _duplicates(descriptors: Sequence[int]) -> list[int]:
    """Duplicate all of them or none. Raises ServerError when no descriptor is free."""
    made: list[int] = []
    try:
        for descriptor in descriptors:
            made.append(fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3))
    except OSError as error:
        for descriptor in made:
            os.close(descriptor)
        raise ServerError(f"an order to the monitor: {error.strerror}") from error
    return made
