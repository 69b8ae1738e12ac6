"""One run of the OCI runtime, from its spawn to the process that it leaves running, or to the
reason why it failed.

Not here: argument lists and bundles, which the daemon makes (`runtime/`); the process afterwards
(`process.py`).

Owns:    all descriptors of a launch until they are handed to the process; RUN/monitor/`c<n>`
         (console sockets) and `p<pid>.<n>` (pid files written by the runtime).
Threads: the monitor's only one. Nothing blocks except the vfork.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import traceback
from collections.abc import Callable
from contextlib import suppress

from engine._fast import spool as spools
from engine._fast.logwriter import LogWriter
from engine._fast.pump import Watch
from engine._fast.sink import Sink
from engine._fast.spawn import read_only, spawn
from engine._fast.spool import PackedLog
from engine.logs.targets import JsonFile, Spool, Target
from engine.monitor import messages
from engine.monitor.connection import Connection, receive
from engine.monitor.process import Process, status_of
from engine.monitor.shipper import Shipper

REASON_LIMIT = 8 << 10
TIOCSWINSZ = 0x5414


class Program:
    """The runtime's executable in a read-only mount, made once instead of by each runtime process.

    A process inside a container could overwrite the binary of a runtime that enters it
    (/proc/PID/exe, CVE-2019-5736). crun protects itself: when its file is writable it makes such a
    mount and executes itself again, which takes a quarter of the time of its `exec`. Executing it
    from the read-only mount avoids that.
    """

    def __init__(self) -> None:
        self._descriptor = -1

    def descriptor(self, path: str) -> int:
        """A descriptor of the file at `path` now, since an upgrade replaces it. -1 where such a
        mount is not possible, and for a name without a path."""
        if self._descriptor >= 0:
            with suppress(OSError):
                if os.path.samestat(os.stat(path), os.fstat(self._descriptor)):
                    return self._descriptor
            os.close(self._descriptor)
            self._descriptor = -1
        if "/" in path:
            # a kernel without mount_setattr(2); for a wrong path, spawn reports the error
            with suppress(OSError):
                self._descriptor = read_only(os.fsencode(path))
        return self._descriptor


def _null(owner: tuple[int, int] | None) -> int:
    """A descriptor in place of a stream that is not connected: /dev/null. For a process in a user
    namespace an empty file that cannot be written to, because crun gives the streams to the
    process's user, and its /dev/null is the host's.
    """
    if owner is None:
        return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    null = os.memfd_create("null", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(null, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return null


class Launches:
    """The runs of the runtime that have not ended, and what all of them need."""

    def __init__(
        self,
        directory: str,
        environment: list[bytes],
        child_files: int,
        shipper: Shipper,
        ended: Callable[[], None],
    ) -> None:
        """`child_files`: soft limit of the runtimes' open files.

        `ended`: called after each launch.
        """
        self.directory = directory
        self.environment = environment
        self.child_files = child_files
        self.shipper = shipper
        self.ended = ended
        self.program = Program()
        self.running: dict[int, Launch] = {}
        """By sequence number, oldest first."""
        self.count = 0
        """The number of the newest launch."""

    @property
    def oldest(self) -> int:
        """Every launch before this number has ended."""
        return next(iter(self.running), self.count + 1)


class Launch:
    """One run of the OCI runtime, from its spawn to the process that it leaves running, or to the
    reason why it failed."""

    def __init__(self, launches: Launches, process: Process, order: messages.Run, connection: Connection) -> None:
        self.launches = launches
        self.process = process
        self.order = order
        self.connection = connection
        launches.count += 1
        self.sequence = launches.count
        self._ours: dict[str, int] = {}
        self._console: socket.socket | None = None
        self._console_path = ""
        # The name contains this monitor's pid: a runtime spawned by a dead monitor may still write
        # its pid file.
        self._pid_path = f"{launches.directory}/p{os.getpid()}.{self.sequence}"
        self._words = -1
        self._sink: Sink | None = None
        self.pid = 0
        self._pidfd = -1
        self._watch: Watch | None = None

    def begin(self, document: int, namespace: int) -> None:
        """Spawn; the caller keeps `document` and `namespace` (-1: none). Raises OSError; then
        nothing is left behind."""
        order = self.order
        theirs: list[int] = []
        try:
            if order.log is not None:
                self._sink = open_sink(order.log, self.launches.shipper)
            null = _null(order.owner)
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
            if order.owner is not None:
                for descriptor in theirs:
                    os.fchown(descriptor, *order.owner)
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
                self.launches.environment,
                os.fsencode(order.cwd),
                stdin,
                stdout,
                stderr,
                self.launches.child_files,
                self.launches.program.descriptor(order.argv[0]),
                inherited,
                namespace,
            )
            self._pidfd = os.pidfd_open(self.pid)
            self._watch = self.process.monitor.loop.watch(self._pidfd, self._runtime_readable)
        except BaseException:
            self._close()
            raise
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        self.process.log_watches = []
        self.launches.running[self.sequence] = self

    def _listen(self) -> str:
        self._console_path = f"{self.launches.directory}/c{self.sequence}"
        unlink(self._console_path)
        self._console = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._console.bind(self._console_path)
        self._console.listen(1)
        return self._console_path

    def _runtime_readable(self, events: int) -> None:
        self.runtime_exited()

    def runtime_exited(self) -> None:
        """The runtime has exited: become a running process, or fail with its message."""
        if self._watch is None:
            return
        result = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        if result is None:
            return
        self._watch.cancel()
        self._watch = None
        status = status_of(result)
        try:
            if status != 0:
                self._failed(self._reason() or f"{self.order.argv[0]} ended with status {status} and no reason", status)
            else:
                self._succeeded()
        except (OSError, ValueError) as error:
            traceback.print_exc()
            self._failed(f"{self.order.argv[0]} succeeded, but its process could not be taken over: {error}", -1)
        finally:
            self.launches.running.pop(self.sequence, None)
            self.launches.ended()

    def _succeeded(self) -> None:
        """Take the process over completely, or raise OSError or ValueError and take nothing."""
        order, process = self.order, self.process
        if order.tty:
            self._ours["t"] = self._accept()
            if order.size is not None:
                set_size(self._ours["t"], order.size)
        with open(self._pid_path, "rb", buffering=0) as file:
            pid = int(file.read(32))
        # An init that has already ended is still our zombie. Only its pidfd reaps it, so its pid
        # cannot have been reused.
        pidfd = os.pidfd_open(pid)
        try:
            process.start(pid, pidfd, self._ours, order.log, order.stdin_once, self._sink)
        except BaseException:
            os.close(pidfd)
            raise
        ours, self._ours, self._sink = self._ours, {}, None
        watches, process.log_watches = process.log_watches or (), None
        letters = "".join(letter for letter in "tioe" if letter in ours)
        descriptors = [pidfd, *(ours[letter] for letter in letters)]
        if not self.connection.closed:
            self.connection.send(messages.Done(order.seq, pid=pid), descriptors)
        else:
            state = messages.State(
                key=process.key, pid=pid, running=True, stdio=letters, stdin_once=order.stdin_once, log=order.log
            )
            process.monitor.report(state, descriptors)
        # after the answer: input that clients have typed may end the process's stdin at once
        process.stdio.begin()
        for inode, offset, callback in watches:
            process.stdio.watch_log(inode, offset, callback)
        self._close()

    def _accept(self) -> int:
        """The pty master that the runtime has sent, from the queue of the console socket."""
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
        """The content of the runtime's log, or of its stderr when the log is empty."""
        size = os.fstat(self._words).st_size
        text = os.pread(self._words, REASON_LIMIT, max(0, size - REASON_LIMIT)).strip()
        if not text and "e" in self._ours:
            os.set_blocking(self._ours["e"], False)
            with suppress(BlockingIOError):
                text = os.read(self._ours["e"], REASON_LIMIT).strip()
        return text.decode(errors="replace")

    def _failed(self, reason: str, status: int) -> None:
        self._close()
        watches, self.process.log_watches = self.process.log_watches or (), None
        self.connection.send(messages.Failed(self.order.seq, reason, status, self.order.attach is not None))
        for _, _, callback in watches:
            callback()
        self.process.monitor.tidy(self.process)

    def _close(self) -> None:
        for descriptor in self._ours.values():
            os.close(descriptor)
        self._ours.clear()
        if self._console is not None:
            self._console.close()
            self._console = None
            unlink(self._console_path)
        if self._sink is not None:
            self._sink.close()
            self._sink = None
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        if self._words >= 0:
            os.close(self._words)
            self._words = -1
            unlink(self._pid_path)


def open_sink(target: Target, shipper: Shipper) -> Sink:
    """The sink for a target. Raises OSError."""
    match target:
        case JsonFile(path, max_size, max_file, attrs, compress=False, exact=exact):
            return LogWriter(os.fsencode(path), max_size, max_file, attrs=attrs, exact=exact)
        case JsonFile(path, max_size, max_file, attrs, exact=exact):
            log = PackedLog(os.fsencode(path), max_size, max_file, attrs=attrs, exact=exact)
            log.compress = True
            return log
        case Spool():
            return _open_spool(target, shipper)


def _open_spool(target: Spool, shipper: Shipper) -> Sink:
    """A spool that goes on at the newest position that the shipper has acknowledged: the one on
    disk, or a newer one on the board, of this monitor or of one that has died."""
    root, _, container = target.directory.rpartition("/")
    spool = spools.Spool(os.fsencode(f"{target.directory}/spool.log"), target.max_size, target.max_file)
    try:
        spool.compress = target.compress
        acked = shipper.acknowledged(container, f"{target.directory}/cursor")
        spool.join(shipper.board, container, acked, target.quota, target.blocking)
        shipper.ensure(os.path.dirname(root))
    except BaseException:
        spool.close()
        raise
    return spool


def set_size(terminal: int, size: messages.Size) -> None:
    fcntl.ioctl(terminal, TIOCSWINSZ, struct.pack("HHHH", size.rows, size.columns, 0, 0))


def unlink(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)
