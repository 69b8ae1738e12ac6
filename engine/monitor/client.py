"""The daemon's side of the monitor: orders that are awaited, reports that are told, and the monitor's life itself.

`open` connects to the monitor that lives in RUN, or starts one. When it dies, another is started and handed every process: this side holds a
duplicate of each stdio descriptor and each pidfd for that day, and is a subreaper, so that containers fall to it and can be collected. Launches that
it was in the middle of are ended first (`orphans.py`), and only then said to have failed.
Not here: what a container is; files of its bundle; the byte path, which does not pass the daemon.

Owns:    the connection, and the descriptors of every `Process` until its exit.
Threads: the event loop's alone. Nothing here blocks, but the spawn of a monitor (a vfork).
Raises:  `ServerError` for what the monitor refuses or cannot do, `LaunchFailed` for a runtime that did, `NotFound` for a process that is gone.
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
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

import engine
from engine._fast.pump import become_subreaper
from engine.errors import NotFound, ServerError
from engine.monitor import messages, orphans
from engine.monitor.messages import LogFile, Size

START_LIMIT = 60.0
"""Seconds that a new monitor may take until it listens."""
RESTART_PAUSE = 0.2
"""Seconds between tries to restore a monitor that cannot be started."""
DYING_LIMIT = 10.0
"""Seconds from the end of the connection until the monitor's process must have ended too."""
COLLECT_PAUSE = 10.0
"""Seconds between looks for children that nobody waits for, once a monitor has died."""
EARLY_INLINE = 32 << 10
"""Bytes of early input that travel in the packet itself."""
_DEAD = "the monitor ended before it answered"
_PACKETS = 64
_REPORT = 32 << 10
_DESCRIPTOR_ROOM = socket.CMSG_SPACE(8 * 4)
_SO_SNDBUFFORCE = 32

_log = logging.getLogger(__name__)


class Exit(msgspec.Struct, frozen=True):
    """How a process ended: 0 to 255, 128 + signal when killed, 255 when nobody can know; `at` in ns since the epoch."""

    status: int
    at: int


class Attached(msgspec.Struct, frozen=True):
    """A registered client. `log_inode`, `log_offset`: the log's end at that instant (0, 0: none). `running`: else it waits for a run."""

    client: int
    log_inode: int
    log_offset: int
    running: bool


class LaunchFailed(ServerError):
    """The runtime did not make the process: its exit status (-1: it was not run) and its own words. A client that came with the order waits."""

    def __init__(self, reason: str, status: int, *, interrupted: bool = False) -> None:
        """`interrupted`: the monitor died; whether it took the client, and wrote its head, nobody knows."""
        super().__init__(reason)
        self.reason = reason
        self.status = status
        self.interrupted = interrupted


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """Whom a process's output goes to: fields as in `messages.Attach`. The descriptor stays the caller's."""

    descriptor: int
    stdin: bool
    stdout: bool
    stderr: bool
    raw: bool
    head: bytes = b""
    early: bytes = b""
    detach_keys: bytes = b"\x10\x11"


class Interrupted(ServerError):
    """The monitor died before it answered."""


class _Parcel:
    """The descriptors that go with one order; the memory files among them are closed at the end."""

    def __init__(self) -> None:
        self.descriptors: list[int] = []
        self._files: list[int] = []

    def __enter__(self) -> _Parcel:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            os.close(file)

    def file(self, content: bytes) -> None:
        file = os.memfd_create("order", os.MFD_CLOEXEC)
        self._files.append(file)
        self.descriptors.append(file)
        os.write(file, content)

    def client(self, seq: int, key: str, client: Client, *, hold: bool = False) -> messages.Attach:
        self.descriptors.append(client.descriptor)
        early = client.early
        if len(early) > EARLY_INLINE:
            self.file(early)
            early = b""
        streams = (client.stdin, client.stdout, client.stderr)
        return messages.Attach(seq, key, *streams, client.raw, client.head, early, client.detach_keys, hold)


class Process:
    """A running process. It holds what a new monitor would need: pidfd and stdio (letters as in `messages.State`)."""

    __slots__ = ("descriptors", "key", "log", "pid", "pidfd", "stdin_once", "stdio")

    def __init__(
        self, key: str, pid: int, stdio: str, descriptors: list[int], stdin_once: bool, log: LogFile | None
    ) -> None:
        self.key = key
        self.pid = pid
        self.pidfd = descriptors[0] if descriptors else -1
        self.stdio = stdio
        self.descriptors = descriptors
        self.stdin_once = stdin_once
        self.log = log

    def end_input(self) -> None:
        """Close the duplicate of stdin: it would keep the process from seeing the end."""
        index = self.stdio.find("i")
        if index >= 0:
            os.close(self.descriptors.pop(index + 1))
            self.stdio = self.stdio.replace("i", "")

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []
        self.pidfd = -1


class LogReading:
    """A reading of a process's log, which rotation waits for within bounds: `begin` it before the files are opened, `end` it in any case."""

    __slots__ = ("_inode", "_key", "_monitor", "_number")

    def __init__(self, monitor: Monitor, key: str) -> None:
        self._monitor = monitor
        self._key = key
        self._number = 0
        self._inode = 0

    async def begin(self) -> None:
        """From here on no rotation but one. A second call does nothing. Raises ServerError."""
        if self._number:
            return
        number = self._number = next(self._monitor._sequence)
        while True:
            try:
                await self._monitor._ask(lambda seq: messages.Follow(seq, self._key, number, 0))
                return
            except Interrupted:  # another monitor will be there
                if self._monitor._closing:
                    raise

    def holds(self, inode: int) -> None:
        """Its newest open file is `inode`: the next rotation may come."""
        if self._number and inode != self._inode:
            self._inode = inode
            self._monitor._tell(messages.Follow(next(self._monitor._sequence), self._key, self._number, inode))

    def end(self) -> None:
        """Rotation waits no more. Idempotent."""
        if self._number:
            self._monitor._tell(messages.Unfollow(next(self._monitor._sequence), self._key, self._number))
            self._number = 0


class Monitor:
    """The monitor of `run`.

    `on_exit(key, exit)` is called for every process that ends while this daemon is there; for one that ends during `run`, after `run`
    has returned to the task that awaits it directly. `on_detach(key, client, keys)`: a client left before its process's end.
    """

    def __init__(
        self,
        run: Path,
        *,
        attach_stall: int,
        on_exit: Callable[[str, Exit], None],
        on_detach: Callable[[str, int, bool], None] = lambda key, client, keys: None,
    ) -> None:
        self._run = run
        self._attach_stall = attach_stall
        self._on_exit = on_exit
        self._on_detach = on_detach
        self.processes: dict[str, Process] = {}
        self.exits: dict[str, Exit] = {}
        self.pid = 0
        """The monitor's own, for those who measure it."""
        self.kept = -1
        """The descriptor that outlives this daemon with the monitor (`keep`), -1 when there is none."""
        self._loop: asyncio.AbstractEventLoop
        self._files = 0
        self._socket: socket.socket | None = None
        self._outbox: deque[tuple[bytes, list[int]]] = deque()
        self._requests: dict[int, asyncio.Future[messages.Done]] = {}
        self._runs: dict[int, messages.Run] = {}
        self._sequence = itertools.count(1)
        self._connected = asyncio.Event()
        self._restored: set[str] | None = None
        self._restoring: asyncio.Task[None] | None = None
        self._reaping: set[int] = set()
        self._children: set[int] = set()
        self._collecting: asyncio.Task[None] | None = None
        self._unsent: list[messages.Order] = []
        self._relay: tuple[socket.socket, bytes] | None = None
        self._closing = False
        self._opened = False
        self._holding = False

    # --- life -----------------------------------------------------------------------------------------------------

    async def open(self, *, hold: bool = False) -> None:
        """Connect to the living monitor, or start one; then `processes` and `exits` tell what it knows. Raises ServerError.

        `hold`: what ends before `deliver` is called is put into `exits` as well.
        """
        self._holding = hold
        self._loop = asyncio.get_running_loop()
        become_subreaper()
        self._files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # up to four descriptors of each process are kept here
        deadline = time.monotonic() + START_LIMIT
        while not self._connected.is_set():
            try:
                await self._connect()
            except Interrupted:  # a dying one accepted: its socket closes after it is gone from everybody's sight
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.01)
        self._opened = True

    def deliver(self) -> None:
        """The exits that nobody has taken go to `on_exit`, and so do those that come."""
        self._holding = False
        while self.exits:
            self._on_exit(*self.exits.popitem())

    async def close(self) -> None:
        """Leave the monitor alone with its processes."""
        self._closing = True
        if self._restoring is not None:
            self._restoring.cancel()
            with suppress(asyncio.CancelledError):
                await self._restoring
        if self._collecting is not None:
            self._collecting.cancel()
        self._disconnect()
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

    async def shutdown(self) -> None:
        """End the monitor too. Raises ServerError while a process is left."""
        if self._restoring is not None:
            await asyncio.wait([self._restoring])
        self._closing = True
        try:
            with suppress(Interrupted):
                await self._ask(messages.Shutdown)
        except ServerError:
            self._closing = False
            raise
        while self._children:  # noqa: ASYNC110 (collected when it is our child; happens once)
            await asyncio.sleep(0.005)
        await self.close()

    async def _connect(self) -> None:
        path = str(self._run / "monitor" / "socket")
        deadline = time.monotonic() + START_LIMIT
        while True:
            connection = socket.socket(
                socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            )
            try:
                connection.connect(path)
                break
            except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
                connection.close()
                if time.monotonic() > deadline:
                    raise ServerError(f"no monitor answers at {path}") from None
                await self._start()
            except OSError as error:
                connection.close()
                raise ServerError(f"monitor at {path}: {error.strerror}") from error
        try:
            connection.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, 1 << 20)
        except PermissionError:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        self.pid = struct.unpack("3i", credentials)[0]
        self._socket = connection
        self._restored = set()
        self._loop.add_reader(connection.fileno(), self._receive)
        seq = next(self._sequence)
        await self._answer(seq, messages.Hello(seq, attach_stall=self._attach_stall))
        restored, self._restored = self._restored, None
        for process in list(self.processes.values()):
            if process.key not in restored:
                self._adopt(process)
        if self._relay is not None:
            self._pass_on(*self._relay)
        if self.kept >= 0:
            self._send(messages.Keep(next(self._sequence)), [self.kept])
        for order in self._unsent:
            self._send(order)
        self._unsent.clear()
        self._connected.set()

    async def _start(self) -> None:
        """Spawn a monitor and wait until it listens. One that another daemon has just started will do as well. Raises ServerError."""
        self._run.mkdir(mode=0o711, parents=True, exist_ok=True)
        if not self._opened:
            await asyncio.to_thread(orphans.end_launches, self._run)
        paths = dict.fromkeys(str(Path(package.__file__ or "").parent.parent) for package in (engine, msgspec))
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "NOTIFY_SOCKET", "LISTEN_"))
        }
        environment["PYTHONPATH"] = ":".join(paths)
        arguments = [sys.executable, "-P", "-S", "-m", "engine.monitor", "--run", str(self._run)]
        arguments += ["--attach-stall", str(self._attach_stall), "--files", str(self._files)]
        ours, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            pid = os.posix_spawn(  # noqa: ASYNC221 (a vfork, once)
                sys.executable,
                arguments,
                environment,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, theirs, 1),
                    (os.POSIX_SPAWN_DUP2, theirs, 2),
                ],
                setsid=True,
                setsigmask=[],
                setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD],
            )
        except OSError as error:
            os.close(ours)
            raise ServerError(f"cannot start the monitor: {error}") from error
        finally:
            os.close(theirs)
        child = os.pidfd_open(pid)
        self._children.add(child)
        self._loop.add_reader(child, self._monitor_ended, child)
        try:
            text = await self._read_to_end(ours)
        finally:
            os.close(ours)
        if not text.endswith("ready\n") and "another monitor" not in text:
            raise ServerError(f"the monitor did not start: {text.strip() or 'no reason given'}")

    async def _read_to_end(self, descriptor: int) -> str:
        parts: list[bytes] = []
        end = self._loop.create_future()

        def readable() -> None:
            with suppress(BlockingIOError):
                part = os.read(descriptor, 65536)
                parts.append(part)
                if not part and not end.done():
                    end.set_result(None)

        self._loop.add_reader(descriptor, readable)
        try:
            await asyncio.wait_for(end, START_LIMIT)
        except TimeoutError:
            raise ServerError(f"the monitor did not start within {START_LIMIT:.0f} s") from None
        finally:
            self._loop.remove_reader(descriptor)
        return b"".join(parts).decode(errors="replace")

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

    def _lost(self) -> None:
        """The connection has ended: the monitor is dead."""
        self._disconnect()
        self._fail_requests(_DEAD)
        if not self._closing and self._opened and self._restoring is None:
            _log.error(
                "the monitor of %s is gone; %d processes are handed to a new one", self._run, len(self.processes)
            )
            self._restoring = self._loop.create_task(self._restore())

    async def _restore(self) -> None:
        try:
            await self._clear_up()
            while True:
                try:
                    await self._connect()
                    return
                except ServerError as error:
                    _log.error("the monitor cannot be restored yet: %s", error)
                    self._disconnect()
                    await asyncio.sleep(RESTART_PAUSE)
        finally:
            self._restoring = None

    async def _clear_up(self) -> None:
        """End and collect what the dead monitor was in the middle of; then its launches have failed."""
        if await self._has_ended(self.pid):
            await asyncio.to_thread(orphans.end_launches, self._run)
            await self._collect()
            if self._collecting is None:
                self._collecting = self._loop.create_task(self._collect_again())
        self._fail_runs(_DEAD)

    async def _has_ended(self, pid: int) -> bool:
        """Whether that monitor is gone, its children with it: its socket closes a moment sooner. False when it merely left us."""
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
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
        """What has fallen to us may leave us children of its own, out of the host's process namespace. uvloop keeps SIGCHLD to itself."""
        while True:
            await asyncio.sleep(COLLECT_PAUSE)
            await self._collect()

    def _adopt(self, process: Process) -> None:
        self._send(
            messages.Adopt(
                next(self._sequence), process.key, process.pid, process.stdio, process.stdin_once, process.log
            ),
            process.descriptors,
        )
        if process.pidfd not in self._reaping:
            self._reaping.add(process.pidfd)
            self._loop.add_reader(process.pidfd, self._reap, process)

    def _reap(self, process: Process) -> None:
        """An adopted process has ended. If it fell to us as subreaper, only we learn its status: the monitor is told."""
        self._loop.remove_reader(process.pidfd)
        self._reaping.discard(process.pidfd)
        try:
            result = os.waitid(os.P_PIDFD, process.pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            return  # another is its parent, and the kernel tells the monitor
        if result is not None:
            status = result.si_status if result.si_code == os.CLD_EXITED else 128 + result.si_status
            self._tell(messages.Reaped(next(self._sequence), process.key, status))

    # --- orders ---------------------------------------------------------------------------------------------------

    async def run(
        self,
        key: str,
        argv: Sequence[str],
        *,
        cwd: str,
        tty: bool = False,
        open_stdin: bool = False,
        stdin_once: bool = False,
        size: Size | tuple[int, int] | None = None,
        log: LogFile | None = None,
        document: bytes = b"",
        client: Client | None = None,
        namespace: int = -1,
    ) -> Process:
        """Have the runtime make a process, `document` its process document, with that client from its beginning.

        `namespace`: a descriptor of the mount namespace that the runtime is started in; it stays the caller's.
        Raises LaunchFailed with the runtime's reason, ServerError when the client could not be taken. When the monitor dies meanwhile,
        LaunchFailed is raised once the runtime has been ended; what it keeps of a container is to be deleted by force.
        """
        if isinstance(size, tuple):
            size = Size(*size)
        attach: messages.Attach | None = None
        with _Parcel() as parcel:
            if document:
                parcel.file(document)
            if client is not None:
                attach = parcel.client(0, "", client)

            if namespace >= 0:
                parcel.descriptors.append(namespace)

            def order(seq: int) -> messages.Run:
                self._runs[seq] = messages.Run(
                    *(seq, key, tuple(argv), cwd, tty, open_stdin, stdin_once, size, log, bool(document), attach),
                    namespace=namespace >= 0,
                )
                return self._runs[seq]

            done = await self._ask(order, parcel.descriptors)
        process = self.processes.get(key)
        if process is None or process.pid != done.pid:  # it has ended already
            process = Process(key, done.pid, "", [], stdin_once, log)
        return process

    async def attach(self, key: str, client: Client, *, hold: bool = False) -> Attached:
        """Give a client's socket to the process `key`, or to the one that will run under it."""
        with _Parcel() as parcel:
            done = await self._ask(lambda seq: parcel.client(seq, key, client, hold=hold), parcel.descriptors)
        return Attached(done.client, done.log_inode, done.log_offset, done.pid != 0)

    async def release(self, key: str, client: int) -> None:
        """Let a held client take its output. One that has left meanwhile is no error."""
        with suppress(ServerError):
            await self._ask(lambda seq: messages.Release(seq, key, client))

    async def resize(self, key: str, rows: int, columns: int) -> None:
        """Set the terminal's size. Raises ServerError when the process has none or does not run."""
        await self._ask(lambda seq: messages.Resize(seq, key, Size(rows, columns)))

    async def watch_log(self, key: str, inode: int, offset: int) -> None:
        """Return when the log's end is not (inode, offset) any more, or the process has ended."""
        while True:
            await self._connected.wait()
            seq = next(self._sequence)
            try:
                await self._answer(seq, messages.Watch(seq, key, inode, offset))
                return
            except Interrupted:
                if self._closing:
                    raise
            except asyncio.CancelledError:
                self._tell(messages.Unwatch(next(self._sequence), seq))
                raise

    def relay(self, listener: socket.socket, address: bytes) -> None:
        """Have this monitor, and those after it, serve a listening socket as `messages.Relay` says. It stays the caller's, and open."""
        self._relay = listener, address
        if self._connected.is_set():
            self._pass_on(listener, address)

    def _pass_on(self, listener: socket.socket, address: bytes) -> None:
        self._send(messages.Relay(next(self._sequence), address), [listener.fileno()])

    def keep(self, descriptor: int) -> None:
        """Have it held for the next daemon, by this monitor and those after it. It stays the caller's."""
        self._replace_kept(fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3))
        if self._connected.is_set():
            self._send(messages.Keep(next(self._sequence)), [self.kept])

    def _replace_kept(self, descriptor: int) -> None:
        if self.kept >= 0:
            os.close(self.kept)
        self.kept = descriptor

    def read_log(self, key: str) -> LogReading:
        """For those who are about to open the log of `key`."""
        return LogReading(self, key)

    def drop(self, key: str) -> None:
        """No process will run under `key`: its waiting clients are closed."""
        self._tell(messages.Drop(next(self._sequence), key))

    def forget(self, key: str) -> None:
        """The exit of `key` is on the daemon's disk."""
        self.exits.pop(key, None)
        self._tell(messages.Forget(next(self._sequence), key))

    async def take_reports(self) -> None:
        """Read what the monitor has reported so far and let `on_exit` have it, ahead of the loop's own turn."""
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

    # --- the connection -------------------------------------------------------------------------------------------

    async def _ask(self, order: Callable[[int], messages.Order], descriptors: Sequence[int] = ()) -> messages.Done:
        if not self._connected.is_set():
            if self._closing:
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

    def _tell(self, order: messages.Order) -> None:
        """Send an order whose answer nobody awaits, now or when there is a monitor again."""
        if self._connected.is_set():
            self._send(order)
        elif not self._closing:
            self._unsent.append(order)

    def _send(self, order: messages.Order, descriptors: Sequence[int] = ()) -> None:
        data = messages.encode(order)
        if len(data) > messages.PACKET:
            raise ServerError(f"an order of {len(data)} bytes is longer than the monitor takes")
        if not self._outbox and self._give(data, descriptors):
            return
        if self._socket is not None:
            # The caller's descriptor may be closed by then.
            self._outbox.append((data, [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in descriptors]))
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
            return True  # the reader sees the end of the connection, and fails every request
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
            except OSError:
                data, ancillary, flags = b"", [], 0
            descriptors: list[int] = []
            for level, kind, content in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    count = len(content) // 4
                    descriptors.extend(struct.unpack(f"{count}i", content[: count * 4]))
            if flags & socket.MSG_CTRUNC:
                _log.error("descriptors of a process were lost: the daemon has no free ones")
            if not data:
                self._lost()
                return
            try:
                self._take(messages.decode_report(data), descriptors)
            except Exception:
                _log.exception("a report of the monitor failed")

    def _take(self, report: messages.Report, descriptors: list[int]) -> None:
        match report:
            case messages.Done():
                run = self._runs.pop(report.seq, None)
                if run is not None:
                    letters = "t" if run.tty else "ioe" if run.open_stdin else "oe"
                    self._keep(Process(run.key, report.pid, letters, descriptors, run.stdin_once, run.log))
                    self.exits.pop(run.key, None)
                future = self._requests.get(report.seq)
                if future is not None and not future.done():
                    future.set_result(report)
            case messages.Failed():
                self._refused(report)
            case messages.State() if report.running:
                self._keep(Process(report.key, report.pid, report.stdio, descriptors, report.stdin_once, report.log))
            case messages.State():
                self._take_old_exit(report)
            case messages.Kept():
                self._replace_kept(descriptors[0] if descriptors else -1)
            case messages.Exited():
                self._end(report.key, Exit(report.status, report.at))
            case messages.InputEnded():
                process = self.processes.get(report.key)
                if process is not None:
                    process.end_input()
            case messages.Detached():
                self._loop.call_soon(self._on_detach, report.key, report.client, report.keys)

    def _refused(self, report: messages.Failed) -> None:
        run = self._runs.pop(report.seq, None)
        future = self._requests.get(report.seq)
        if report.seq == 0:
            _log.error("the monitor ended the connection: %s", report.reason)
            self._closing = True
        elif future is None:
            _log.warning("the monitor refused: %s", report.reason)
        elif not future.done():
            launched = run is not None and (run.attach is None or report.attached)
            future.set_exception(LaunchFailed(report.reason, report.status) if launched else ServerError(report.reason))

    def _take_old_exit(self, report: messages.State) -> None:
        exit_record = Exit(report.status, report.at)
        if report.key in self.processes:
            self._end(report.key, exit_record)
        elif self._holding or not self._opened:
            self.exits[report.key] = exit_record

    def _keep(self, process: Process) -> None:
        old = self.processes.get(process.key)
        if old is not None:
            self._let_go(old)
        self.processes[process.key] = process
        if self._restored is not None:
            self._restored.add(process.key)

    def _let_go(self, process: Process) -> None:
        if process.pidfd in self._reaping:
            self._reap(process)
        process.close()

    def _end(self, key: str, exit_record: Exit) -> None:
        process = self.processes.pop(key, None)
        if process is not None:
            self._let_go(process)
        if self._holding or not self._opened:
            self.exits[key] = exit_record
        else:
            # Behind the wake-up of a `run` that was answered just before.
            self._loop.call_soon(self._on_exit, key, exit_record)

    def _fail_requests(self, reason: str) -> None:
        """Tell all that wait for an answer, but for launches."""
        for seq, future in list(self._requests.items()):
            if not future.done() and seq not in self._runs:
                future.set_exception(Interrupted(reason))

    def _fail_runs(self, reason: str) -> None:
        runs, self._runs = self._runs, {}
        for seq in runs:
            future = self._requests.get(seq)
            if future is not None and not future.done():
                future.set_exception(LaunchFailed(reason, -1, interrupted=True))
