"""The monitor: one process for all containers, which outlives the daemon.

It spawns the OCI runtime, keeps every process's stdio and exit status, and serves attached clients.
`_fast/pump` moves the bytes; this module decides. It knows keys, argument lists and descriptors;
only the daemon knows containers. Nothing here blocks except the vfork of a runtime and the writes
to logs and journal.

Owns:    RUN/monitor/: `socket` (one daemon at a time), `lock` (held while the monitor runs),
         `journal` (exits that no daemon has confirmed yet), `u<n>` (output that is read and not
         logged yet), `log` (its own messages), `c<n>` (console sockets of terminals being created),
         `p<pid>.<n>` (pid files written by the runtime).
Children: only known pids are reaped, each by its pidfd. An orphan reparented to the monitor as
          subreaper is reaped once no pending launch can refer to it: a pid file must never name a
          pid that the kernel may have reused. Imports are kept few, because this process's memory
          is part of every container's cost.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress

from engine._fast.pump import Loop
from engine._fast.relay import Relay, Room
from engine._fast.sink import Sink
from engine._fast.spawn import become_subreaper
from engine._fast.unlogged import Left, Unlogged, forget, left_in
from engine.monitor import messages, orphans, previous
from engine.monitor.connection import Connection
from engine.monitor.datagrams import Datagrams, is_stream
from engine.monitor.journal import Journal
from engine.monitor.launch import Launch, Launches, open_sink, set_size, unlink
from engine.monitor.process import Process
from engine.monitor.shipper import Shipper
from engine.system.log_lines import say

HELLO_GRACE = 5.0
"""Seconds that a Hello waits for the launches of the previous daemon."""
ORPHANS_PAUSE = 0.1
"""Seconds from the end of a child to the look for orphans. The kernel walks all children for it: 95
us with 3,000 of them. So there is one look for all children that end meanwhile.
"""
DROPPED_PAUSE = 1.0
"""Seconds from a failed write of a log to the report of it, which then has the number of all lines
that were lost meanwhile."""
LEFT_GRACE = 60.0
"""Seconds within which the processes of a dead monitor are handed to this one."""
LOOK_PAUSE = 60.0
"""Seconds between checks that RUN still exists."""
PASSED_SHARE = 8
"""Fraction of the descriptor limit that relayed connections may number; each uses two
descriptors."""
CODECS = (messages.CURRENT, previous.CODEC)
_DROPPED_VARIABLES = ("NOTIFY_SOCKET", "LISTEN_", "WATCHDOG_", "INVOCATION_ID", "JOURNAL_STREAM", "PYTHON")


class Monitor:
    """Everything that lives in this process. `serve` returns after a Shutdown."""

    def __init__(
        self, run: str, attach_stall: int, child_files: int, codecs: Sequence[messages.Codec] = CODECS, lock: int = -1
    ) -> None:
        """`lock`: a descriptor of the lock file, locked already; -1: none."""
        self.directory = f"{run}/monitor"
        os.makedirs(self.directory, mode=0o700, exist_ok=True)
        self._lock = lock if lock >= 0 else _lock(f"{self.directory}/lock")
        orphans.end_launches(run)
        self.loop = Loop(attach_stall)
        self.journal = Journal(f"{self.directory}/journal")
        self.processes: dict[str, Process] = {}
        self.by_pid: dict[int, Process] = {}
        environment = [
            name + b"=" + value
            for name, value in os.environb.items()
            if not name.decode(errors="replace").startswith(_DROPPED_VARIABLES)
        ]
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._codecs = codecs
        self._stray = (0, 0)
        self._reaping = False
        """A look for orphans is to come."""
        self._lossy: set[Process] = set()
        """Processes of whose logs more lines were lost than the daemon knows."""
        self.shipper = Shipper(self.loop, environment, run, self.processes)
        child_files = child_files or (soft if soft != resource.RLIM_INFINITY else 0)
        self.launches = Launches(self.directory, environment, child_files, self.shipper, self._launch_ended)
        self._connections: list[Connection] = []
        self._current: Connection | None = None
        self._greetings: list[tuple[int, Callable[[], None]]] = []
        self._passing: Relay | None = None
        self._serving: dict[str, Relay | Datagrams] = {}
        """By names of descriptors in `_held`."""
        self._room = Room(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // PASSED_SHARE)
        self._kept = -1
        self._held: dict[str, int] = {}
        self._left: dict[str, Left] = {}
        self._slots: dict[str, list[tuple[str, int]]] = {}
        """Files of dead monitors, and the slots, that a key has in them."""
        self._old_files: list[str] = []
        self._keep_unlogged()
        become_subreaper()
        self._listen()
        self._await_children()
        self.loop.call_later(LOOK_PAUSE, self._look_around)

    def _listen(self) -> None:
        path = f"{self.directory}/socket"
        unlink(path)
        # console sockets and pid files left by a killed monitor
        for name in os.listdir(self.directory):
            if name[0] in "cp" and name[1:].replace(".", "").isdigit():
                unlink(f"{self.directory}/{name}")
        self._listener = socket.socket(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        )
        mask = os.umask(0o177)
        try:
            self._listener.bind(path)
        finally:
            os.umask(mask)
        self._listener.listen(16)
        self._listening = self.loop.watch(self._listener.fileno(), self._accept)

    def _listen_again(self) -> None:
        """SIGHUP: a daemon found this monitor but not its socket, so the socket was removed from
        RUN."""
        if os.path.exists(f"{self.directory}/socket"):
            return
        say("its socket was removed; it is made again", prefix="monitor: ")
        try:
            os.makedirs(self.directory, mode=0o700, exist_ok=True)
            if not os.path.exists(f"{self.directory}/lock"):
                fresh = _lock(f"{self.directory}/lock")
                os.close(self._lock)
                self._lock = fresh
            before, watch = self._listener, self._listening
            self._listen()
        except OSError:
            traceback.print_exc()
        else:
            watch.cancel()
            before.close()

    def _look_around(self) -> None:
        """End when the monitor has no purpose left: no daemon, no process, and no RUN directory in
        which a daemon could find it."""
        busy = (
            self._connections or self.launches.running or any(not process.idle for process in self.processes.values())
        )
        if not busy and not os.path.exists(self.directory):
            self.loop.stop()
        else:
            self.loop.call_later(LOOK_PAUSE, self._look_around)

    def _keep_unlogged(self) -> None:
        """Find what dead monitors had read and not logged, newest last, and begin a file of our
        own.

        The old files stay until their processes have been taken over, in case this monitor dies
        before that.
        """
        numbers = sorted(int(name[1:]) for name in os.listdir(self.directory) if name[0] == "u" and name[1:].isdigit())
        for number in numbers:
            path = f"{self.directory}/u{number}"
            self._old_files.append(path)
            try:
                unlogged = left_in(os.fsencode(path))
            except OSError:
                traceback.print_exc()
                continue
            self._left.update(unlogged)
            for key, left in unlogged.items():
                self._slots.setdefault(key, []).append((path, left.slot))
        if numbers:
            self.loop.call_later(LEFT_GRACE, self._drop_left)
        try:
            self._unlogged = f"{self.directory}/u{numbers[-1] + 1 if numbers else 1}"
            self.loop.unlogged = Unlogged(os.fsencode(self._unlogged))
        # RUN is full: a kill of this monitor may lose log lines, but nothing else
        except OSError as error:
            say(f"output that is not logged yet is not protected: {_reason(error)}", prefix="monitor: ")
            unlink(self._unlogged)

    def _drop_left(self) -> None:
        self._left.clear()
        self._slots.clear()
        for path in self._old_files:
            unlink(path)
        self._old_files.clear()

    def _own(self, key: str) -> None:
        """The process is this monitor's. If this one dies after the process has ended, the next one
        must not take the process's earlier state from an older file."""
        for path, slot in self._slots.pop(key, ()):
            try:
                forget(os.fsencode(path), slot)
            except OSError:
                traceback.print_exc()

    def _resume(self, key: str, sink: Sink) -> None:
        """Log what a dead monitor had read of that process."""
        left = self._left.pop(key, None)
        if left is not None:
            try:
                sink.resume(left.lines, left.stream, left.chunk, left.inode, left.offset)
            except (OSError, ValueError):  # the log itself reports what it dropped
                traceback.print_exc()

    def _await_children(self) -> None:
        """Wake on SIGCHLD. Known children are watched by pidfd; this catches orphans, including
        ones reparented to us after they exited."""
        self._child_pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGHUP, lambda number, frame: None)
        signal.siginterrupt(signal.SIGCHLD, False)
        signal.siginterrupt(signal.SIGHUP, False)
        signal.set_wakeup_fd(self._child_pipe[1], warn_on_full_buffer=False)
        self.loop.watch(self._child_pipe[0], self._child_changed)

    def serve(self) -> None:
        self.loop.run()
        for name in (
            *([] if self.journal.exits else ["journal"]),
            *("socket", "lock", os.path.basename(self._unlogged)),
        ):
            unlink(f"{self.directory}/{name}")

    def inherit(self, descriptor: int) -> None:
        """Serve the daemon that started this monitor, which may be dead by now.

        Its earlier orders are carried out before those of another daemon.
        """
        peer = socket.socket(fileno=descriptor)
        peer.setblocking(False)
        connection = Connection(self.loop, peer, self.obey, self._disconnected)
        self._connections.append(connection)
        connection.drain()

    def _accept(self, events: int) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except BlockingIOError:
                return
            peer.setblocking(False)
            self._connections.append(Connection(self.loop, peer, self.obey, self._disconnected))

    def _disconnected(self, connection: Connection) -> None:
        self._connections.remove(connection)
        if self._current is connection:
            self._current = None

    def report(self, report: messages.Report, descriptors: Sequence[int] = ()) -> None:
        """Report to the daemon if one is connected. All lasting state is reported again after the
        next Hello."""
        if self._current is not None:
            self._current.send(report, descriptors)

    # --- orders -----------------------------------------------------------------------------------

    def obey(self, connection: Connection, data: bytes, descriptors: list[int]) -> None:
        """Carry out one packet. Descriptors that no order took are closed."""
        try:
            try:
                order = connection.codec.decode_order(data)
            except messages.NOT_A_MESSAGE as error:
                say(f"not an order: {error}", "error", "monitor: ")
                connection.send(messages.Failed(messages.number(data), f"not an order: {error}"))
                return
            self._orders[type(order)](self, connection, order, descriptors)
        except Exception as error:
            if not isinstance(error, OSError):
                traceback.print_exc()
            connection.send(messages.Failed(messages.number(data), _reason(error)))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
            sys.stderr.flush()

    def _hello(self, connection: Connection, order: messages.Hello, descriptors: list[int]) -> None:
        codec = next((each for each in self._codecs if each.protocol == order.protocol), None)
        if codec is None:
            spoken = " and ".join(str(each.protocol) for each in self._codecs)
            connection.send(messages.Failed(order.seq, f"the monitor speaks protocol {spoken}, not {order.protocol}"))
            return
        connection.codec = codec
        if self._current is not None and self._current is not connection:
            self._current.drain()  # which may close it
        if self._current is not None and self._current is not connection:
            self._current.send(messages.Superseded())
            self._current.close()
        self._current = connection
        connection.wants_rotated = order.rotated
        connection.wants_dropped = order.dropped
        if order.attach_stall >= 0:
            self.loop.stall = order.attach_stall
        for key, (status, at) in self.journal.exits.items():
            connection.send(messages.State(key=key, pid=0, running=False, status=status, at=at))
        for process in self.processes.values():
            if process.pidfd >= 0:
                connection.send_state(process)
                if process.dropped_lines and order.dropped:
                    connection.send(messages.Dropped(process.key, process.dropped_lines))
        if self._kept >= 0:
            connection.send(messages.Kept(), [self._kept])
        if order.held:
            for name, descriptor in self._held.items():
                connection.send(messages.Held(name), [descriptor])
        if order.unlogged:
            self._send_unlogged(connection)
        connection.flush()
        answered = False

        def answer() -> None:
            nonlocal answered
            if not answered:
                answered = True
                connection.send(messages.Done(order.seq))

        if self.launches.running:
            self._greetings.append((self.launches.count, answer))
            self.loop.call_later(HELLO_GRACE, answer)
        else:
            answer()

    def _send_unlogged(self, connection: Connection) -> None:
        if self.loop.unlogged is None:
            return
        try:
            file = os.open(self._unlogged, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # the daemon asks each time then
            traceback.print_exc()
            return
        try:
            connection.send(messages.Unlogged(), [file])
        finally:
            os.close(file)

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
            self._left.pop(order.key, None)
            self._own(order.key)
            Launch(self.launches, process, order, connection).begin(document, namespace)
        except OSError as error:
            connection.send(messages.Failed(order.seq, _reason(error), -1, attached))
            self.tidy(process)
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
        """The number of the client."""
        if not descriptors:
            raise OSError(errno.EMFILE, "the client's socket did not arrive: the monitor has no free descriptor")
        early = order.early
        if len(descriptors) == 2:
            os.lseek(descriptors[1], 0, os.SEEK_SET)
            with open(descriptors.pop(), "rb") as file:
                early = file.read()
        client = process.stdio.attach(
            descriptors[0],
            order.stdin,
            order.stdout,
            order.stderr,
            order.raw,
            order.head,
            early,
            order.detach_keys,
            order.hold,
        )
        descriptors.pop(0)
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
            connection.send(messages.Failed(order.seq, f"{order.key} has no terminal, or does not run"))
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
        if process.log_watches is not None:
            process.log_watches.append((order.inode, order.offset, grown))
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
        """Take a process over. Raises OSError on failure, such as a log that cannot be opened; the
        daemon sends the order again later."""
        known = self.processes.get(order.key)
        if known is not None and not known.idle and known.pid != order.pid:
            connection.send(messages.Failed(order.seq, f"{order.key} is watched already"))
            return
        # Watched already, or it ended under the dead monitor. That exit has been reported at Hello:
        # a launch removes the exit of an earlier process of its key.
        if (known is not None and not known.idle) or order.key in self.journal.exits:
            connection.send(messages.Done(order.seq))
            return
        if len(descriptors) != 1 + len(order.stdio):
            raise OSError(errno.EMFILE, "its descriptors did not arrive: the monitor has no free descriptors")
        process = self._process(order.key)
        sink = open_sink(order.log, self.shipper) if order.log is not None else None
        try:
            if sink is not None:
                self._resume(order.key, sink)
            stdio = dict(zip(order.stdio, descriptors[1:], strict=True))
            process.start(order.pid, descriptors[0], stdio, order.log, order.stdin_once, sink)
        except BaseException:
            if sink is not None:
                sink.close()
            self.tidy(process)
            raise
        self._own(order.key)
        descriptors.clear()
        process.stdio.begin()
        connection.send(messages.Done(order.seq))

    def _keep(self, connection: Connection, order: messages.Keep, descriptors: list[int]) -> None:
        if not descriptors:
            raise OSError(errno.EMFILE, "the descriptor to keep did not arrive: the monitor has no free descriptor")
        if self._kept >= 0:
            os.close(self._kept)
        self._kept = descriptors.pop()
        connection.send(messages.Done(order.seq))

    def _hold(self, connection: Connection, order: messages.Hold, descriptors: list[int]) -> None:
        self._replace_held(order.name, descriptors)
        connection.send(messages.Done(order.seq))

    def _replace_held(self, name: str, descriptors: list[int]) -> None:
        """Takes the descriptor over. Without one, hold none under the name."""
        serving = self._serving.pop(name, None)
        if serving is not None:
            serving.close()
        before = self._held.pop(name, -1)
        if before >= 0:
            os.close(before)
        if descriptors:
            self._held[name] = descriptors.pop()

    def _serve(self, connection: Connection, order: messages.Serve, descriptors: list[int]) -> None:
        if not descriptors:
            raise OSError(errno.EMFILE, "the listening socket did not arrive: the monitor has no free descriptor")
        self._replace_held(order.name, descriptors)
        listener = fcntl.fcntl(self._held[order.name], fcntl.F_DUPFD_CLOEXEC, 3)
        kind = Relay if is_stream(listener) else Datagrams
        self._serving[order.name] = kind(self.loop, listener, order.address, self._room, order.port)
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
        self._passing = Relay(self.loop, descriptors.pop(0), order.address, self._room)
        connection.send(messages.Done(order.seq))

    def _ship(self, connection: Connection, order: messages.Ship, descriptors: list[int]) -> None:
        self.shipper.board.rescan()
        self.shipper.ensure(order.root)
        connection.send(messages.Done(order.seq))

    def _compressed(self, connection: Connection, order: messages.Compressed, descriptors: list[int]) -> None:
        process = self.processes.get(order.key)
        if process is not None and process.stdio.replace_log(order.inode, os.fsencode(order.path)):
            connection.send(messages.Done(order.seq))
        else:
            connection.send(messages.Failed(order.seq, f"the log of {order.key} has no file {order.inode}"))

    def _shutdown(self, connection: Connection, order: messages.Shutdown, descriptors: list[int]) -> None:
        busy = [process.key for process in self.processes.values() if not process.idle]
        if busy:
            connection.send(messages.Failed(order.seq, f"{len(busy)} processes are left: {busy[0]}"))
            return
        for process in self.processes.values():
            process.stdio.dismiss()

        def stop() -> None:
            connection.send(messages.Done(order.seq))
            self.loop.stop()

        self.shipper.end(stop)

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
        messages.Hold: _hold,
        messages.Reaped: _reaped,
        messages.Relay: _relay,
        messages.Serve: _serve,
        messages.Ship: _ship,
        messages.Compressed: _compressed,
        messages.Shutdown: _shutdown,
    }

    # --- processes --------------------------------------------------------------------------------

    def _process(self, key: str) -> Process:
        process = self.processes.get(key)
        if process is None:
            process = self.processes[key] = Process(self, key)
        return process

    def tidy(self, process: Process) -> None:
        """Forget a process that neither runs nor has waiting clients."""
        if process.idle and process.stdio.attached == 0 and self.processes.get(process.key) is process:
            del self.processes[process.key]

    def concluded(self, process: Process, status: int) -> None:
        """The process has ended and its output is drained."""
        if self.processes.get(process.key) is process:
            del self.processes[process.key]
        if process in self._lossy:
            self._report_dropped()
        self.journal.add(process.key, status, process.at)
        self.report(messages.Exited(process.key, status, process.at))
        # not before the report: a client may ask for the exit code as soon as its stream ends
        process.stdio.dismiss()
        process.stdio.owner = None

    # --- reports of logs --------------------------------------------------------------------------

    def rotated(self, key: str) -> None:
        """A log has a file more that can be compressed. An earlier daemon does not know the
        report."""
        if self._current is not None and self._current.wants_rotated:
            self.report(messages.Rotated(key))

    def dropped(self, process: Process) -> None:
        """Lines of its output could not be written to its log."""
        if not self._lossy:
            self.loop.call_later(DROPPED_PAUSE, self._report_dropped)
        self._lossy.add(process)

    def _report_dropped(self) -> None:
        """An earlier daemon does not know the report."""
        if self._current is not None and self._current.wants_dropped:
            for process in self._lossy:
                self.report(messages.Dropped(process.key, process.dropped_lines))
        self._lossy.clear()

    # --- launches and children --------------------------------------------------------------------

    def _launch_ended(self) -> None:
        """Continue the work that waited for a launch."""
        for greeting in [greeting for greeting in self._greetings if greeting[0] < self.launches.oldest]:
            self._greetings.remove(greeting)
            greeting[1]()
        if self._stray[0]:
            self._reap()

    def _child_changed(self, events: int) -> None:
        with suppress(BlockingIOError):
            signals = os.read(self._child_pipe[0], 4096)
            if signal.SIGHUP in signals:
                self._listen_again()
            if signal.SIGCHLD in signals and not self._reaping:
                self._reaping = True
                self.loop.call_later(ORPHANS_PAUSE, self._look_for_orphans)

    def _look_for_orphans(self) -> None:
        self._reaping = False
        self._reap()

    def _reap(self) -> None:
        """Reap orphans. An unknown child may belong to a pending launch that has not named its pid
        yet, so reaping waits for those launches."""
        while True:
            try:
                result = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if result is None:
                return
            pid = result.si_pid
            launch = next((each for each in self.launches.running.values() if each.pid == pid), None)
            if self.shipper.reap(pid):
                continue
            if pid in self.by_pid:
                self.by_pid[pid].exited()
                if pid in self.by_pid:
                    return
            elif launch is not None:
                launch.runtime_exited()
                if launch.sequence in self.launches.running:
                    return
            else:
                if self._stray[0] != pid:
                    self._stray = (pid, self.launches.count)
                if self.launches.oldest <= self._stray[1]:
                    return
                os.waitid(os.P_PID, pid, os.WEXITED)
                self._stray = (0, 0)


def _lock(path: str) -> int:
    """Take the lock that a monitor holds while it runs. Waits for a monitor that is just being
    killed. Raises BlockingIOError."""
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
    """Start a session without a terminal; redirect stdout and stderr to the monitor's log. `ready`
    is the last word on the old stdout."""
    # already a group leader: started by hand, or by a parent that made the session
    with suppress(PermissionError):
        os.setsid()
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    log = os.open(f"{directory}/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    if os.fstat(log).st_size > 1 << 20:
        os.ftruncate(log, 0)
    with suppress(BrokenPipeError):  # the daemon that started this monitor is dead
        os.write(1, b"ready\n")
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(null)
    os.close(log)
    os.chdir("/")


def _reason(error: Exception) -> str:
    """What a user reads of it."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


def main(arguments: list[str]) -> int:
    """Arguments: `--run DIR` and, optional, `--attach-stall SECONDS`, `--files N` (the soft limit
    of open files for runtimes), `--connection FD` and `--lock FD` (inherited: the daemon's
    connection, and the locked lock file), and `--protocol N` (speak only that protocol, as a
    monitor of another version would)."""
    options = dict(zip(arguments[::2], arguments[1::2], strict=False))
    run = options.pop("--run", "")
    stall = options.pop("--attach-stall", "300")
    files = options.pop("--files", "0")
    connection = int(options.pop("--connection", "-1"))
    lock = int(options.pop("--lock", "-1"))
    protocol = options.pop("--protocol", "")
    codecs = [each for each in CODECS if protocol in ("", str(each.protocol))]
    if not run or options or not codecs or len(arguments) % 2:
        usage = "usage: python -m engine.monitor --run DIR [--attach-stall SECONDS] [--files N]"
        print(f"{usage} [--connection FD] [--lock FD] [--protocol N]", file=sys.stderr)
        return 2
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    for descriptor in (connection, lock):
        if descriptor >= 0:
            os.set_inheritable(descriptor, False)
    try:
        monitor = Monitor(os.path.abspath(run), int(stall), int(files), codecs, lock)
    except BlockingIOError:
        print(f"another monitor serves {run}", file=sys.stderr)
        return 3
    except OSError as error:
        print(f"{run}: {_reason(error)}", file=sys.stderr)
        return 1
    _daemonise(monitor.directory)
    if connection >= 0:
        monitor.inherit(connection)
    monitor.serve()
    return 0
