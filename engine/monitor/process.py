"""The monitor: one process for all containers, which outlives the daemon.

It spawns the OCI runtime, keeps every process's stdio and exit, and serves attached clients; `_fast/pump` moves the bytes, this module decides.
It knows keys, argument lists and descriptors; what a container is, is the daemon's. Nothing here blocks but the vfork of a runtime and the
writes to logs and journal.

Owns:    RUN/monitor/: `socket` (one daemon at a time), `lock` (held while the monitor lives), `journal` (exits that no daemon has confirmed
         yet), `log` (its own words), `c<n>` (console sockets of terminals being made), `p<pid>.<n>` (pids as the runtime writes them).
Children: only pids that are known are collected, each by its pidfd. An orphan that fell to the monitor as subreaper is collected when no
         launch can turn out to mean it: a pid file must never name a pid that has been given back to the kernel.
Imports are few on purpose: this process's memory is part of every container's price.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import socket
import struct
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from engine._fast.jsonlog import LogWriter
from engine._fast.pump import Loop, Relay, Stdio, Timer, Watch, become_subreaper, exit_of, read_only, spawn
from engine.monitor import messages
from engine.monitor.journal import Journal
from engine.monitor.messages import LogFile

DRAIN_GRACE = 2.0
"""Seconds that output of an ended process is awaited while children of it hold its pipes."""
STATUS_GRACE = 5.0
"""Seconds that the exit status of a process that is not our child is looked for."""
HELLO_GRACE = 5.0
"""Seconds that a Hello waits for the launches of the daemon before."""
LOST_STATUS = 255
PACKETS = 32
"""Packets of the daemon taken at a time, before the others have their turn."""
PASSED_SHARE = 8
"""What part of the descriptors is the number of connections that are passed on at a time; each has two."""
REASON_LIMIT = 8 << 10
EPOLLIN, EPOLLOUT = 1, 4
TIOCSWINSZ = 0x5414

_DESCRIPTOR_ROOM = socket.CMSG_SPACE(8 * 4)
_DROPPED_VARIABLES = ("NOTIFY_SOCKET", "LISTEN_", "WATCHDOG_", "INVOCATION_ID", "JOURNAL_STREAM", "PYTHON")


class Process:
    """A container's init or an exec: waited for (clients alone), being launched, running, or ended and being drained."""

    __slots__ = (
        "at",
        "drained_",
        "key",
        "launch",
        "log",
        "monitor",
        "pid",
        "pidfd",
        "status",
        "stdin_once",
        "stdio",
        "tries_end",
        "watch",
    )

    def __init__(self, monitor: Monitor, key: str) -> None:
        self.monitor = monitor
        self.key = key
        self.stdio = Stdio(monitor.loop, self)
        self.launch: Launch | None = None
        self.pid = 0
        self.pidfd = -1
        self.watch: Watch | None = None
        self.stdin_once = False
        self.log: LogFile | None = None
        self.status: int | None = None
        self.at = 0
        self.drained_ = False
        self.tries_end = 0.0

    @property
    def idle(self) -> bool:
        """Neither runs nor is made: it exists for clients that wait."""
        return self.launch is None and self.pidfd < 0

    def start(self, pid: int, pidfd: int) -> None:
        self.pid, self.pidfd = pid, pidfd
        self.monitor.by_pid[pid] = self
        self.watch = self.monitor.loop.watch(pidfd, self._readable)

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
        """The process has ended: take its status and what is left of its output."""
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
        """Find the exit status: by waiting for a child, by asking the kernel for what another reaper was told, or from `Reaped`."""
        if self.status is not None or self.pidfd < 0:
            return
        status: int | None
        try:
            result = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)
            status = None if result is None else _status_of(result)
        except ChildProcessError:
            wait_status = exit_of(self.pidfd)
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

    # --- told by Stdio ---

    def detached(self, number: int, keys: bool) -> None:
        self.monitor.report(messages.Detached(self.key, number, keys))
        self.monitor.tidy(self)

    def input_ended(self) -> None:
        self.monitor.report(messages.InputEnded(self.key))

    def drained(self) -> None:
        self.drained_ = True
        self._conclude()


def exit_code(wait_status: int) -> int:
    """0 to 255, or 128 + signal, of a wait status as wait(2) gives it."""
    return 128 + os.WTERMSIG(wait_status) if os.WIFSIGNALED(wait_status) else os.WEXITSTATUS(wait_status)


def _status_of(result: os.waitid_result) -> int:
    return result.si_status if result.si_code == os.CLD_EXITED else 128 + result.si_status


class Program:
    """The runtime as it is executed: its file in a read-only mount, made once and not by every one of its processes.

    A process that enters a container can be written through by what runs there (/proc/PID/exe, CVE-2019-5736). So crun, executed from where
    its file can be written to, first makes itself such a mount and executes itself again; which is a quarter of the time of its `exec`.
    """

    def __init__(self) -> None:
        self._descriptor = -1

    def descriptor(self, path: str) -> int:
        """Of the file that is at `path` now: an upgrade replaces it. -1 where there can be no such mount, and for a name without a path."""
        if self._descriptor >= 0:
            with suppress(OSError):
                if os.path.samestat(os.stat(path), os.fstat(self._descriptor)):
                    return self._descriptor
            os.close(self._descriptor)
            self._descriptor = -1
        if "/" in path:
            with suppress(OSError):  # a kernel without mount_setattr(2); or spawn will say what is wrong with the path
                self._descriptor = read_only(os.fsencode(path))
        return self._descriptor


class Launch:
    """One run of the OCI runtime, from its spawn to the process that it left behind, or to the reason why not."""

    def __init__(self, monitor: Monitor, process: Process, order: messages.Run, connection: Connection) -> None:
        self.monitor = monitor
        self.process = process
        self.order = order
        self.connection = connection
        self.sequence = monitor.next_launch()
        self.watches: list[tuple[int, int, Callable[[], None]]] = []
        self._ours: dict[str, int] = {}
        self._console: socket.socket | None = None
        self._console_path = ""
        # Of this monitor alone: a runtime that a dead one spawned may write its pid yet.
        self._pid_path = f"{monitor.directory}/p{os.getpid()}.{self.sequence}"
        self._words = -1
        self._log: LogWriter | None = None
        self.pid = 0
        self._pidfd = -1
        self._watch: Watch | None = None

    def begin(self, document: int, namespace: int) -> None:
        """Spawn; `document` and `namespace` (-1: none) stay the caller's. Raises OSError; nothing is left then."""
        order = self.order
        theirs: list[int] = []
        try:
            if order.log is not None:
                self._log = open_log(order.log)
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            theirs.append(null)
            stdin = stdout = stderr = null
            if not order.tty:
                if order.open_stdin:
                    stdin, self._ours["i"] = os.pipe2(os.O_CLOEXEC)
                    theirs.append(stdin)
                self._ours["o"], stdout = os.pipe2(os.O_CLOEXEC)
                theirs.append(stdout)
                self._ours["e"], stderr = os.pipe2(os.O_CLOEXEC)
                theirs.append(stderr)
            self._words = os.memfd_create("log", os.MFD_CLOEXEC)
            inherited = [self._words]
            paths = {"@pid@": self._pid_path, "@log@": f"/proc/self/fd/{self._words}"}
            if document >= 0:
                inherited.append(document)
                paths["@process@"] = f"/proc/self/fd/{document}"
            if order.tty:
                paths["@console@"] = self._listen()
            self.pid = spawn(
                [os.fsencode(paths.get(argument, argument)) for argument in order.argv],
                self.monitor.environment,
                os.fsencode(order.cwd),
                stdin,
                stdout,
                stderr,
                self.monitor.child_files,
                self.monitor.program.descriptor(order.argv[0]),
                inherited,
                namespace,
            )
            self._pidfd = os.pidfd_open(self.pid)
            self._watch = self.monitor.loop.watch(self._pidfd, self._runtime_readable)
        except BaseException:
            self._close()
            raise
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        self.monitor.launches[self.sequence] = self

    def _listen(self) -> str:
        self._console_path = f"{self.monitor.directory}/c{self.sequence}"
        _unlink(self._console_path)
        self._console = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._console.bind(self._console_path)
        self._console.listen(1)
        return self._console_path

    def _runtime_readable(self, events: int) -> None:
        self.runtime_exited()

    def runtime_exited(self) -> None:
        """The runtime is done: become a running process, or fail with its words."""
        if self._watch is None:
            return
        result = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        if result is None:
            return
        self._watch.cancel()
        self._watch = None
        status = _status_of(result)
        try:
            if status != 0:
                self._failed(self._reason() or f"{self.order.argv[0]} ended with status {status} and no reason", status)
            else:
                self._succeeded()
        except (OSError, ValueError) as error:
            traceback.print_exc()
            self._failed(f"{self.order.argv[0]} succeeded, but its process could not be taken over: {error}", -1)
        finally:
            self.monitor.launches.pop(self.sequence, None)
            self.monitor.launch_ended()

    def _succeeded(self) -> None:
        order, process = self.order, self.process
        terminal = -1
        if order.tty:
            terminal = self._ours["t"] = self._accept()
            if order.size is not None:
                set_size(terminal, order.size)
        with open(self._pid_path, "rb", buffering=0) as file:
            pid = int(file.read(32))
        # An init that has ended already is still our zombie: only its pidfd collects it, so its pid is not another's yet.
        pidfd = os.pidfd_open(pid)
        ours, self._ours = self._ours, {}
        log, self._log = self._log, None
        process.launch = None
        process.log, process.stdin_once = order.log, order.stdin_once
        process.start(pid, pidfd)
        descriptors = [pidfd, *(ours[letter] for letter in "tioe" if letter in ours)]
        if not self.connection.closed:
            self.connection.send(messages.Done(order.seq, pid=pid), descriptors)
        else:
            letters = "".join(letter for letter in "tioe" if letter in ours)
            state = messages.State(
                key=process.key, pid=pid, running=True, stdio=letters, stdin_once=order.stdin_once, log=order.log
            )
            self.monitor.report(state, descriptors)
        process.stdio.start(
            ours.get("i", -1), ours.get("o", -1), ours.get("e", -1), ours.get("t", -1), order.stdin_once, log
        )
        for inode, offset, callback in self.watches:
            process.stdio.watch_log(inode, offset, callback)
        self._close()

    def _accept(self) -> int:
        """The pty master that the runtime has sent: it waits in the socket's queue."""
        assert self._console is not None
        connection, _ = self._console.accept()
        with connection:
            _, descriptors = receive(connection, 4096)
        if len(descriptors) != 1:
            for descriptor in descriptors:
                os.close(descriptor)
            raise ValueError("the runtime sent no terminal")
        return descriptors[0]

    def _reason(self) -> str:
        """What the runtime wrote to its log, or else to the stderr that it was given."""
        size = os.fstat(self._words).st_size
        text = os.pread(self._words, REASON_LIMIT, max(0, size - REASON_LIMIT)).strip()
        if not text and "e" in self._ours:
            os.set_blocking(self._ours["e"], False)
            with suppress(BlockingIOError):
                text = os.read(self._ours["e"], REASON_LIMIT).strip()
        return text.decode(errors="replace")

    def _failed(self, reason: str, status: int) -> None:
        self._close()
        self.process.launch = None
        self.connection.send(messages.Failed(self.order.seq, reason, status, self.order.attach is not None))
        for _, _, callback in self.watches:
            callback()
        self.monitor.tidy(self.process)

    def _close(self) -> None:
        for descriptor in self._ours.values():
            os.close(descriptor)
        self._ours.clear()
        if self._console is not None:
            self._console.close()
            self._console = None
            _unlink(self._console_path)
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        if self._words >= 0:
            os.close(self._words)
            self._words = -1
            _unlink(self._pid_path)


class Connection:
    """The daemon's socket. Reports that it does not take at once wait here, with duplicates of their descriptors."""

    def __init__(self, monitor: Monitor, peer: socket.socket) -> None:
        self.monitor = monitor
        self.closed = False
        self.held: set[int] = set()
        self.watches: dict[int, tuple[Process, Callable[[], None]]] = {}
        self.readers: dict[int, Process] = {}
        self._socket = peer
        self._outbox: deque[tuple[bytes, list[int]] | Process] = deque()
        self._retry: Timer | None = None
        self._watch = monitor.loop.watch(peer.fileno(), self._ready)

    def send(self, report: messages.Report, descriptors: Sequence[int] = ()) -> None:
        if self.closed:
            return
        data = messages.encode(report)
        if not self._outbox and self._give(data, descriptors):
            return
        if not self.closed:
            self._outbox.append((data, [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in descriptors]))
            self._await_room()

    def send_state(self, process: Process) -> None:
        """Tell of a running process. Its descriptors are taken when there is room for the packet, not all at once."""
        self._outbox.append(process)

    def flush(self) -> None:
        """Send what waits, as much as the socket takes."""
        while self._outbox and not self.closed:
            first = self._outbox[0]
            if isinstance(first, Process):
                if first.pidfd >= 0 and first.status is None:
                    state, descriptors = first.state()
                    if not self._give(messages.encode(state), descriptors):
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
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(descriptors)}i", *descriptors))]
        try:
            self._socket.sendmsg([data], ancillary if descriptors else [], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError as error:
            if (
                error.errno == errno.ETOOMANYREFS
            ):  # descriptors in flight have a limit: unix(7). The daemon must read first
                if self._retry is None:
                    self._retry = self.monitor.loop.call_later(0.01, self._again)
                return False
            if error.errno not in (errno.EPIPE, errno.ECONNRESET):
                traceback.print_exc()
            self.monitor.loop.call_later(0, self.close)
            return False
        return True

    def _again(self) -> None:
        self._retry = None
        self.flush()

    def _ready(self, events: int) -> None:
        if events & EPOLLOUT:
            self.flush()
        for _ in range(PACKETS):
            if self.closed:
                return
            try:
                data, descriptors = receive(self._socket, messages.PACKET)
            except BlockingIOError:
                return
            except OSError:
                data, descriptors = b"", []
            if not data:
                self.close()
                return
            self.monitor.obey(self, data, descriptors)

    def close(self) -> None:
        """The daemon is gone, or another one came. Containers and clients go on; only clients that it held are lost."""
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
            self.monitor.loop.abandon(client)
        self.monitor.disconnected(self)


class Monitor:
    """Everything that lives in this process. `serve` returns after a Shutdown."""

    def __init__(self, run: str, attach_stall: int, child_files: int) -> None:
        self.directory = f"{run}/monitor"
        os.makedirs(self.directory, mode=0o700, exist_ok=True)
        self._lock = _lock(f"{self.directory}/lock")
        self.loop = Loop(attach_stall)
        self.journal = Journal(f"{self.directory}/journal")
        self.processes: dict[str, Process] = {}
        self.by_pid: dict[int, Process] = {}
        self.launches: dict[int, Launch] = {}
        self.environment = [
            name + b"=" + value
            for name, value in os.environb.items()
            if not name.decode(errors="replace").startswith(_DROPPED_VARIABLES)
        ]
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self.child_files = child_files or (soft if soft != resource.RLIM_INFINITY else 0)
        self._launch_count = 0
        self._stray = (0, 0)
        self.program = Program()
        self._connections: list[Connection] = []
        self._current: Connection | None = None
        self._greetings: list[tuple[int, Callable[[], None]]] = []
        self._passing: Relay | None = None
        self._kept = -1
        become_subreaper()
        self._listen()
        self._await_children()

    def _listen(self) -> None:
        path = f"{self.directory}/socket"
        _unlink(path)
        for name in os.listdir(self.directory):  # console sockets and pids that a killed monitor left
            if name[0] in "cp" and name[1:].replace(".", "").isdigit():
                _unlink(f"{self.directory}/{name}")
        self._listener = socket.socket(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        )
        mask = os.umask(0o177)
        try:
            self._listener.bind(path)
        finally:
            os.umask(mask)
        self._listener.listen(16)
        self.loop.watch(self._listener.fileno(), self._accept)

    def _await_children(self) -> None:
        """Be woken by SIGCHLD. Known children are seen by their pidfds; this is for orphans, and for who becomes a child after its end."""
        self._child_pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.siginterrupt(signal.SIGCHLD, False)
        signal.set_wakeup_fd(self._child_pipe[1], warn_on_full_buffer=False)
        self.loop.watch(self._child_pipe[0], self._child_changed)

    def serve(self) -> None:
        self.loop.run()
        for name in ("socket", "lock") if self.journal.exits else ("socket", "journal", "lock"):
            _unlink(f"{self.directory}/{name}")

    def _accept(self, events: int) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except BlockingIOError:
                return
            peer.setblocking(False)
            self._connections.append(Connection(self, peer))

    def disconnected(self, connection: Connection) -> None:
        self._connections.remove(connection)
        if self._current is connection:
            self._current = None

    def report(self, report: messages.Report, descriptors: Sequence[int] = ()) -> None:
        """Tell the daemon, when there is one: everything that counts is told again to the next Hello."""
        if self._current is not None:
            self._current.send(report, descriptors)

    # --- orders ---------------------------------------------------------------------------------------------------

    def obey(self, connection: Connection, data: bytes, descriptors: list[int]) -> None:
        """Carry out one packet. Descriptors that no order took are closed."""
        try:
            order = messages.decode_order(data)
        except msgspec.MsgspecError as error:
            print(f"monitor: not an order: {error}", file=sys.stderr, flush=True)
            connection.send(messages.Failed(0, f"not an order: {error}"))
            order = None
        try:
            if order is not None:
                self._orders[type(order)](self, connection, order, descriptors)
        except Exception as error:
            if not isinstance(error, OSError):
                traceback.print_exc()
            assert order is not None
            connection.send(messages.Failed(order.seq, str(error)))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
            sys.stderr.flush()

    def _hello(self, connection: Connection, order: messages.Hello, descriptors: list[int]) -> None:
        if order.protocol != messages.PROTOCOL:
            connection.send(messages.Failed(order.seq, f"the monitor speaks protocol {messages.PROTOCOL}"))
            return
        if self._current is not None and self._current is not connection:
            self._current.send(messages.Failed(0, "another daemon has come"))
            self._current.close()
        self._current = connection
        if order.attach_stall >= 0:
            self.loop.stall = order.attach_stall
        for key, (status, at) in self.journal.exits.items():
            connection.send(messages.State(key=key, pid=0, running=False, status=status, at=at))
        for process in self.processes.values():
            if process.pidfd >= 0:
                connection.send_state(process)
        if self._kept >= 0:
            connection.send(messages.Kept(), [self._kept])
        connection.flush()
        answered = False

        def answer() -> None:
            nonlocal answered
            if not answered:
                answered = True
                connection.send(messages.Done(order.seq))

        if self.launches:
            self._greetings.append((self._launch_count, answer))
            self.loop.call_later(HELLO_GRACE, answer)
        else:
            answer()

    def _run(self, connection: Connection, order: messages.Run, descriptors: list[int]) -> None:
        process = self._process(order.key)
        if not process.idle:
            connection.send(messages.Failed(order.seq, f"{order.key} runs already"))
            return
        document = descriptors.pop(0) if order.document and descriptors else -1
        namespace = descriptors.pop() if order.namespace and descriptors else -1
        attached = False
        try:
            if order.namespace and namespace < 0:
                raise OSError(errno.EMFILE, "the mount namespace did not arrive: the monitor has no free descriptor")
            if order.attach is not None:
                self._take_client(connection, process, order.attach, descriptors)
                attached = True
            self.journal.remove(order.key)
            launch = Launch(self, process, order, connection)
            launch.begin(document, namespace)
        except OSError as error:
            connection.send(messages.Failed(order.seq, str(error), -1, attached))
            self.tidy(process)
        else:
            process.launch = launch
        finally:
            for descriptor in (document, namespace):
                if descriptor >= 0:
                    os.close(descriptor)

    def _attach(self, connection: Connection, order: messages.Attach, descriptors: list[int]) -> None:
        process = self._process(order.key)
        inode, offset = process.stdio.position()
        client = self._take_client(connection, process, order, descriptors)
        connection.send(messages.Done(order.seq, pid=process.pid, client=client, log_inode=inode, log_offset=offset))
        self.tidy(process)

    def _take_client(
        self, connection: Connection, process: Process, order: messages.Attach, descriptors: list[int]
    ) -> int:
        """Its number."""
        if not descriptors:
            raise OSError(errno.EMFILE, "the client's socket did not arrive: the monitor has no free descriptor")
        early = order.early
        if len(descriptors) == 2:
            os.lseek(descriptors[1], 0, os.SEEK_SET)
            with open(descriptors.pop(), "rb") as file:
                early = file.read()
        client = process.stdio.attach(
            descriptors.pop(0),
            order.stdin,
            order.stdout,
            order.stderr,
            order.raw,
            order.head,
            early,
            order.detach_keys,
            order.hold,
        )
        if order.hold:
            connection.held.add(client)
        return client

    def _release(self, connection: Connection, order: messages.Release, descriptors: list[int]) -> None:
        connection.held.discard(order.client)
        if self.loop.release(order.client):
            connection.send(messages.Done(order.seq))
        else:
            connection.send(messages.Failed(order.seq, f"no such held client of {order.key}: {order.client}"))

    def _resize(self, connection: Connection, order: messages.Resize, descriptors: list[int]) -> None:
        process = self.processes.get(order.key)
        letters, open_descriptors = process.stdio.descriptors() if process is not None else ("", [])
        if letters != "t":
            connection.send(messages.Failed(order.seq, f"{order.key} has no terminal or does not run"))
        else:
            set_size(open_descriptors[0], order.size)
            connection.send(messages.Done(order.seq))

    def _watch(self, connection: Connection, order: messages.Watch, descriptors: list[int]) -> None:
        process = self.processes.get(order.key)

        def grown() -> None:
            connection.watches.pop(order.seq, None)
            connection.send(messages.Done(order.seq))

        if process is None:
            grown()
            return
        connection.watches[order.seq] = (process, grown)
        if process.launch is not None:
            process.launch.watches.append((order.inode, order.offset, grown))
        else:
            process.stdio.watch_log(order.inode, order.offset, grown)

    def _unwatch(self, connection: Connection, order: messages.Unwatch, descriptors: list[int]) -> None:
        watched = connection.watches.pop(order.watch, None)
        if watched is not None:
            process, callback = watched
            process.stdio.unwatch_log(callback)
        connection.send(messages.Done(order.seq))

    def _follow(self, connection: Connection, order: messages.Follow, descriptors: list[int]) -> None:
        process = self.processes.get(order.key)
        if process is not None:
            process.stdio.follow_log(order.reader, order.inode)
            connection.readers[order.reader] = process
        connection.send(messages.Done(order.seq))

    def _unfollow(self, connection: Connection, order: messages.Unfollow, descriptors: list[int]) -> None:
        process = connection.readers.pop(order.reader, None)
        if process is not None:
            process.stdio.unfollow_log(order.reader)
        connection.send(messages.Done(order.seq))

    def _drop(self, connection: Connection, order: messages.Drop, descriptors: list[int]) -> None:
        process = self.processes.get(order.key)
        if process is not None and process.idle:
            process.stdio.dismiss()
            self.tidy(process)

    def _forget(self, connection: Connection, order: messages.Forget, descriptors: list[int]) -> None:
        self.journal.remove(order.key)

    def _adopt(self, connection: Connection, order: messages.Adopt, descriptors: list[int]) -> None:
        known = self.processes.get(order.key)
        if known is not None and not known.idle:
            connection.send(messages.Failed(order.seq, f"{order.key} is watched already"))
            return
        pidfd, *rest = descriptors
        stdio = dict(zip(order.stdio, rest, strict=True))
        log = open_log(order.log) if order.log is not None else None
        self.journal.remove(order.key)
        process = self._process(order.key)
        descriptors.clear()
        process.log, process.stdin_once = order.log, order.stdin_once
        process.start(order.pid, pidfd)
        process.stdio.start(
            stdio.get("i", -1), stdio.get("o", -1), stdio.get("e", -1), stdio.get("t", -1), order.stdin_once, log
        )
        connection.send(messages.Done(order.seq))

    def _keep(self, connection: Connection, order: messages.Keep, descriptors: list[int]) -> None:
        if not descriptors:
            raise OSError(errno.EMFILE, "what is to be kept did not arrive: the monitor has no free descriptor")
        if self._kept >= 0:
            os.close(self._kept)
        self._kept = descriptors.pop()
        connection.send(messages.Done(order.seq))

    def _reaped(self, connection: Connection, order: messages.Reaped, descriptors: list[int]) -> None:
        process = self.processes.get(order.key)
        if process is not None and process.pidfd >= 0:
            if process.watch is not None:
                process.exited()
            process.ended(order.status)
        connection.send(messages.Done(order.seq))

    def _relay(self, connection: Connection, order: messages.Relay, descriptors: list[int]) -> None:
        if not descriptors:
            raise OSError(errno.EMFILE, "the listening socket did not arrive: the monitor has no free descriptor")
        if self._passing is not None:
            self._passing.close()
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // PASSED_SHARE
        self._passing = self.loop.relay(descriptors.pop(0), order.address, most)
        connection.send(messages.Done(order.seq))

    def _shutdown(self, connection: Connection, order: messages.Shutdown, descriptors: list[int]) -> None:
        busy = [process.key for process in self.processes.values() if not process.idle]
        if busy:
            connection.send(messages.Failed(order.seq, f"{len(busy)} processes are left: {busy[0]}"))
            return
        for process in self.processes.values():
            process.stdio.dismiss()
        connection.send(messages.Done(order.seq))
        self.loop.stop()

    _orders: dict[type, Callable[..., None]] = {  # noqa: RUF012 (a table, never written to)
        messages.Hello: _hello,
        messages.Run: _run,
        messages.Attach: _attach,
        messages.Release: _release,
        messages.Resize: _resize,
        messages.Watch: _watch,
        messages.Unwatch: _unwatch,
        messages.Follow: _follow,
        messages.Unfollow: _unfollow,
        messages.Drop: _drop,
        messages.Forget: _forget,
        messages.Adopt: _adopt,
        messages.Keep: _keep,
        messages.Reaped: _reaped,
        messages.Relay: _relay,
        messages.Shutdown: _shutdown,
    }

    # --- processes ------------------------------------------------------------------------------------------------

    def _process(self, key: str) -> Process:
        process = self.processes.get(key)
        if process is None:
            process = self.processes[key] = Process(self, key)
        return process

    def tidy(self, process: Process) -> None:
        """Forget a process that neither runs nor is waited for."""
        if process.idle and process.stdio.attached == 0 and self.processes.get(process.key) is process:
            del self.processes[process.key]

    def concluded(self, process: Process, status: int) -> None:
        """The process has ended and its output is drained."""
        if self.processes.get(process.key) is process:
            del self.processes[process.key]
        self.journal.add(process.key, status, process.at)
        self.report(messages.Exited(process.key, status, process.at))
        process.stdio.dismiss()  # whoever came between the end of its output and the finding of its status
        process.stdio.owner = None

    # --- launches and children ------------------------------------------------------------------------------------

    def next_launch(self) -> int:
        self._launch_count += 1
        return self._launch_count

    def launch_ended(self) -> None:
        """A launch has turned out one way or the other: what waited for it can go on."""
        oldest = next(iter(self.launches), self._launch_count + 1)
        for greeting in [each for each in self._greetings if each[0] < oldest]:
            self._greetings.remove(greeting)
            greeting[1]()
        if self._stray[0]:
            self._reap()

    def _child_changed(self, events: int) -> None:
        with suppress(BlockingIOError):
            os.read(self._child_pipe[0], 4096)
        self._reap()

    def _reap(self) -> None:
        """Collect orphans. A child that nobody knows may be one that a pending launch is about to name: it waits for those."""
        while True:
            try:
                result = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if result is None:
                return
            pid = result.si_pid
            launch = next((each for each in self.launches.values() if each.pid == pid), None)
            if pid in self.by_pid:
                self.by_pid[pid].exited()
                if pid in self.by_pid:
                    return
            elif launch is not None:
                launch.runtime_exited()
                if launch.sequence in self.launches:
                    return
            else:
                if self._stray[0] != pid:
                    self._stray = (pid, self._launch_count)
                if next(iter(self.launches), self._launch_count + 1) <= self._stray[1]:
                    return
                os.waitid(os.P_PID, pid, os.WEXITED)
                self._stray = (0, 0)


def receive(connection: socket.socket, limit: int) -> tuple[bytes, list[int]]:
    """One packet or piece of stream with its descriptors, CLOEXEC."""
    data, ancillary, _, _ = connection.recvmsg(limit, _DESCRIPTOR_ROOM, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
    descriptors: list[int] = []
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            count = len(content) // 4
            descriptors.extend(struct.unpack(f"{count}i", content[: count * 4]))
    return data, descriptors


def open_log(log: LogFile) -> LogWriter:
    return LogWriter(os.fsencode(log.path), log.max_size, log.max_file, attrs=log.attrs)


def set_size(terminal: int, size: messages.Size) -> None:
    fcntl.ioctl(terminal, TIOCSWINSZ, struct.pack("HHHH", size.rows, size.columns, 0, 0))


def _unlink(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


def _lock(path: str) -> int:
    """The lock that a monitor holds while it lives. One that is just being killed is waited for. Raises BlockingIOError."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    end = time.monotonic() + 2
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > end:
                os.close(file)
                raise
            time.sleep(0.01)


def _daemonise(directory: str) -> None:
    """Own session, no terminal; stderr and stdout to the monitor's log. The word `ready` is the last on the old stdout."""
    with suppress(PermissionError):  # a group leader already: started by hand, or by a parent that made the session
        os.setsid()
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    log = os.open(f"{directory}/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    if os.fstat(log).st_size > 1 << 20:
        os.ftruncate(log, 0)
    os.write(1, b"ready\n")
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(null)
    os.close(log)
    os.chdir("/")


def main(arguments: list[str]) -> int:
    """Arguments: `--run DIR` and, optional, `--attach-stall SECONDS` and `--files N`, the soft limit of open files that runtimes get."""
    options = dict(zip(arguments[::2], arguments[1::2], strict=False))
    run = options.pop("--run", "")
    stall = options.pop("--attach-stall", "300")
    files = options.pop("--files", "0")
    if not run or options or len(arguments) % 2:
        print("usage: python -m engine.monitor --run DIR [--attach-stall SECONDS] [--files N]", file=sys.stderr)
        return 2
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    try:
        monitor = Monitor(os.path.abspath(run), int(stall), int(files))
    except BlockingIOError:
        print(f"another monitor serves {run}", file=sys.stderr)
        return 3
    except OSError as error:
        print(f"{run}: {error}", file=sys.stderr)
        return 1
    _daemonise(monitor.directory)
    monitor.serve()
    return 0
