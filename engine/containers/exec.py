"""Exec instances: further processes in running containers, of clients and of health checks
(probes).

An instance belongs to one run of its container. Instances that were never started are forgotten
when that run ends. Finished ones are kept for another `LINGER` seconds, because clients whose
stream ended with the container then ask for the exit code. Otherwise a finished instance is kept
for `KEPT_SECONDS`. Probes are not kept at all.

Owns: RUN/exec/<id>, the record of each running instance. A reboot removes it, as it ends the
processes. Not here: bytes (the monitor), the process document (`spec.py`).
Threads: the event loop's, except where a method says that it blocks.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from engine._fast import frames
from engine.containers import spec
from engine.containers.body import strings
from engine.containers.container import Container
from engine.containers.containers import Containers
from engine.containers.launch import stdio_owner
from engine.containers.lifecycle import State
from engine.containers.streams import parse_detach_keys
from engine.errors import Conflict, EngineError, InvalidParameter, NotFound, ServerError, words
from engine.monitor.client import Monitor
from engine.monitor.handles import Client, Exit, LaunchFailed
from engine.runtime import oci, users
from engine.runtime.runtimes import Runtimes
from engine.system.grace_period import GracePeriod
from engine.system.tasks import shield, spawn
from engine.wire import oci as oci_wire
from engine.wire.exec import ExecCreate, ExecInspect, ProcessConfig

_log = logging.getLogger(__name__)

KEPT_SECONDS = 300
"""How long a finished instance can be inspected: the interval of Docker's own garbage collection.
"""
FINISHED_KEPT = 1_500
"""Finished instances in memory at once, about a megabyte; beyond it the oldest go.

Clients ask for the exit code when the stream has ended.
"""
LINGER = 5.0
"""Seconds that finished instances outlive the run of their container."""
MOST_KEPT = 10_000
"""Instances in memory at once; beyond it the oldest finished ones go first, then the oldest that
were never started.
"""
PROBES_STARTING = 8
"""Probes that are being started at once.

The runtime's start is the expensive part, and many timers may coincide.
"""
KILL_GRACE = 5.0
"""Seconds to wait for a killed probe."""
CUT_GRACE = 10.0
"""Seconds that an inspect waits for the end of an instance whose client lost its stream."""


class ExecRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One instance. `exit_code` is None until it has ended; times in ns since the epoch."""

    id: str
    container_id: str
    config: ExecCreate
    started: bool = False
    pid: int = 0
    exit_code: int | None = None
    finished_at: int = 0
    size: tuple[int, int] = (0, 0)
    """Initial rows and columns of its terminal."""
    probe: bool = False
    """It belongs to a health check, and is not kept after its end."""
    attached: bool = False
    """It was started with a client."""

    @property
    def running(self) -> bool:
        return self.started and self.exit_code is None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a probe ended; times in ns since the epoch."""

    exit_code: int = 0
    output: bytes = b""
    timed_out: bool = False
    started_at: int = msgspec.field(default_factory=time.time_ns)
    ended_at: int = msgspec.field(default_factory=time.time_ns)


_decode = msgspec.msgpack.Decoder(ExecRecord).decode


class Execs:
    """All exec instances of the engine, by id."""

    def __init__(
        self, run: Path, containers: Containers, monitor: Monitor, runtimes: Runtimes, grace_period: GracePeriod
    ) -> None:
        self._directory = run / "exec"
        self._containers = containers
        self._monitor = monitor
        self._runtimes = runtimes
        self._grace_period = grace_period
        self._all: dict[str, ExecRecord] = {}
        self._live: dict[str, dict[str, None]] = {}
        """By container: instances that run or have not been started."""
        self._finished: dict[str, None] = {}
        """Finished instances, in the order of their ends."""
        self._of_container: dict[str, dict[str, None]] = {}
        """By container: its finished instances."""
        self._ends: dict[str, asyncio.Future[int]] = {}
        """The ends for which probes and inspects wait, until they come."""
        self._attached: dict[str, int] = {}
        """Running instances with a client: the monitor that carries its stream, as the number of
        those that had ended before (`Monitor.losses`).
        """
        self._starting = asyncio.Semaphore(PROBES_STARTING)
        self._probes: set[asyncio.Task[int]] = set()
        """Starts of probes that are under way; the probe itself may be cancelled meanwhile."""

    def open(self) -> None:
        """Take over the instances of an earlier daemon. Blocks on files; called at start."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        for path in [*self._directory.iterdir()]:
            try:
                record = _decode(path.read_bytes())
            except msgspec.MsgspecError:
                path.unlink()  # the daemon died while it wrote it
            else:
                self._resume(record)

    def _resume(self, record: ExecRecord) -> None:
        process = self._monitor.processes.get(record.id)
        if process is not None:
            record = msgspec.structs.replace(record, pid=process.pid)
        self._keep(record)
        ended = self._monitor.exits.pop(record.id, None)
        if ended is not None:
            self.exited(record.id, ended)
        elif record.running and process is None:
            self._monitor.drop(record.id)
            self.exited(record.id, Exit(status=255, at=time.time_ns()))
        elif record.probe:
            self._kill(record.id)  # the health check that waited for it is gone
        elif record.attached and record.running:
            self._attached[record.id] = self._monitor.losses

    def __contains__(self, key: str) -> bool:
        return key in self._all

    def get(self, exec_id: str) -> ExecRecord:
        """By full id. Raises NotFound in Docker's words, also when its container is gone."""
        record = self._all.get(exec_id)
        if record is None or record.container_id not in self._containers:
            raise NotFound(f"No such exec instance: {exec_id}")
        return record

    def of(self, container_id: str) -> list[str]:
        """Ids of the container's instances that run or have not been started, as in inspect."""
        return [*self._live.get(container_id, ())]

    def __len__(self) -> int:
        return len(self._all)

    async def create(self, container: Container, config: ExecCreate, named: str = "") -> str:
        """A new instance, not started. `named`: how the client named the container, for the error.

        Raises Conflict when the container is paused or does not run, InvalidParameter without a
        command, when a word of it holds a NUL character (the runtime would end the word there), and
        for a user that the container does not have.
        """
        _check_state(container, named)
        command = strings(config.cmd)
        if not command or not command[0]:
            raise InvalidParameter("No exec command specified")
        if any("\0" in word for word in (*command, *(config.env or ()), config.user, config.working_dir)):
            raise InvalidParameter("Cmd, Env, User and WorkingDir must not hold a NUL character")
        parse_detach_keys(config.detach_keys or None)
        console_size(config.console_size)
        if config.user:
            try:
                await asyncio.to_thread(_identity, container, config.user)
            except InvalidParameter:
                _check_state(container, named)  # its root may just have been unmounted
                raise
            _check_state(container, named)
        return self._add(container, config, command).id

    def _add(self, container: Container, config: ExecCreate, command: list[str], *, probe: bool = False) -> ExecRecord:
        self._reap()
        self._grace_period.expect()
        record = ExecRecord(
            id=secrets.token_hex(32),
            container_id=container.id,
            config=msgspec.structs.replace(config, cmd=command, console_size=None),
            size=(console_size(config.console_size) if config.tty else None) or (0, 0),
            probe=probe,
        )
        self._keep(record)
        container.publish(f"exec_create: {_event_words(command)}", execID=record.id)
        return record

    def _keep(self, record: ExecRecord) -> None:
        self._all[record.id] = record
        if record.exit_code is None:
            self._live.setdefault(record.container_id, {})[record.id] = None
        else:
            self._finished[record.id] = None
            self._of_container.setdefault(record.container_id, {})[record.id] = None

    async def probe(self, container: Container, command: Sequence[str], timeout: float, most: int) -> Outcome:
        """Run `command` to its end, or kill it after `timeout` seconds; the first `most` bytes of
        its output.

        Raises what `create` and `start` raise; nothing of it is left in any case.
        """
        _check_state(container)
        config = ExecCreate(attach_stdout=True, attach_stderr=True)
        ours, theirs = socket.socketpair()  # first: it fails when descriptors run short
        record = self._add(container, config, [*command], probe=True)
        ended = self._ends[record.id] = asyncio.get_running_loop().create_future()
        capture = _Capture(ours, most)
        try:
            # Not cancelled half-way, so that `_launch` sees and ends a process that was started.
            # Not `spawn`: its failure is raised here, and is that of a probe which is over
            # otherwise.
            start = asyncio.ensure_future(self._start_probe(record.id, theirs))
            self._probes.add(start)
            start.add_done_callback(self._probe_started)
            started_at = await shield(start)
            timed_out = not (await asyncio.wait({ended}, timeout=timeout))[0]
            if timed_out:
                self._kill(record.id)
                await asyncio.wait({ended}, timeout=KILL_GRACE)
            # All output is written when the exit is reported, but may not be read yet.
            await asyncio.wait({capture.end}, timeout=1)
            output = bytes(capture.data)
            if timed_out:
                return Outcome(timed_out=True, output=output, started_at=started_at)
            return Outcome(exit_code=ended.result(), output=output, started_at=started_at)
        finally:
            del self._ends[record.id]
            capture.close()
            if record.id in self._all:
                if self._all[record.id].started:
                    self._kill(record.id)
                else:
                    self._discard(record)

    def _probe_started(self, start: asyncio.Task[int]) -> None:
        self._probes.discard(start)
        if not start.cancelled():
            start.exception()  # seen

    async def _start_probe(self, exec_id: str, theirs: socket.socket) -> int:
        with theirs:
            async with self._starting:
                started_at = time.time_ns()
                await self.start(exec_id, detach=False, descriptor=theirs.fileno(), raw=True)
                return started_at

    def _kill(self, exec_id: str) -> None:
        """Kill the process and its children: runtimes give each exec a session of its own, whose
        first process group is the exec's.
        """
        process = self._monitor.processes.get(exec_id)
        if process is None:
            return
        container = self._containers.find(self._all[exec_id].container_id)
        with suppress(ProcessLookupError):
            group, session = os.getpgid(process.pid), os.getsid(process.pid)
            others = [0, self._monitor.pid, container.record.status.pid if container is not None else 0]
            if group == session and all(session != os.getsid(pid) for pid in others):
                os.killpg(group, signal.SIGKILL)
        with suppress(NotFound):
            self._monitor.signal(exec_id, signal.SIGKILL)

    async def start(
        self,
        exec_id: str,
        *,
        detach: bool,
        descriptor: int = -1,
        head: bytes = b"",
        early: bytes = b"",
        raw: bool = False,
        size: tuple[int, int] | None = None,
    ) -> None:
        """Run it. With `descriptor` (the caller's) its output goes to that client, after `head`;
        `raw`: without frames. `size` replaces the initial rows and columns of its terminal.

        A failure after the client has been attached is written to its stream, as Docker does.
        Before that, and for a probe, it is raised.
        """
        record = self.get(exec_id)
        container = self._containers.get(record.container_id)
        if record.exit_code is not None or record.started:
            raise Conflict(f"Error: Exec command {exec_id} has already run")
        _check_state(container)
        attached = descriptor >= 0 and not detach and not record.probe
        record = msgspec.structs.replace(record, started=True, size=size or record.size, attached=attached)
        self._all[exec_id] = record
        self._grace_period.expect()
        config = record.config
        container.publish(f"exec_start: {_event_words(strings(config.cmd) or [''])}", execID=exec_id)
        client = None
        if descriptor >= 0 and not detach:
            client = Client(
                descriptor=descriptor,
                stdin=config.attach_stdin,
                stdout=config.attach_stdout,
                stderr=config.attach_stderr,
                raw=raw,
                head=head,
                early=early,
                detach_keys=parse_detach_keys(config.detach_keys or None),
            )
        try:
            refusal: EngineError | None
            try:
                # The record first: if the daemon dies now, the next one knows which client waits at
                # the monitor.
                prepared = await asyncio.to_thread(self._prepare, record, container)
            except EngineError as error:
                refusal = error
                if client is not None:
                    await self._monitor.attach(exec_id, client)
            else:
                refusal = await self._launch(record, container, prepared, client)
        except Exception:
            self._attached.pop(exec_id, None)
            self._all[exec_id] = msgspec.structs.replace(record, started=False)
            await asyncio.to_thread(self._remove, exec_id)
            raise
        if refusal is not None:
            failure = oci.Failure(refusal, oci.COMMAND_NOT_INVOKED)
            if isinstance(refusal, LaunchFailed) and self._has_ended(container):
                # The runtime reports it in obscure words such as "fork: cannot allocate memory".
                failure = oci.Failure(_not_running(container), oci.COMMAND_NOT_INVOKED)
            elif isinstance(refusal, LaunchFailed):
                failure = oci.start_failure(refusal.reason, (strings(config.cmd) or [""])[0], "exec")
            self._finish(exec_id, failure.exit_code, time.time_ns())
            if record.probe:
                self._monitor.drop(exec_id)
            if record.probe or client is None:
                raise failure.error from refusal
            # When the monitor died it is unknown whether the client has received the head of the
            # reply.
            if not (isinstance(refusal, LaunchFailed) and refusal.interrupted):
                text = (failure.error.message + "\r\n").encode()
                await asyncio.to_thread(_say, descriptor, text if raw else frames.mux(1, text))
            self._monitor.drop(exec_id)

    def _has_ended(self, container: Container) -> bool:
        """The container's first process has ended, reported or not."""
        process = self._monitor.processes.get(container.id)
        return container.record.status.state not in _RUNNING or process is None or process.ended

    async def _launch(
        self, record: ExecRecord, container: Container, prepared: oci_wire.Process, client: Client | None
    ) -> LaunchFailed | None:
        config = record.config
        if record.attached:
            self._attached[record.id] = self._monitor.losses
        try:
            with self._grace_period.going_on():
                process = await self._monitor.run(
                    record.id,
                    self._runtimes.of(container.record.runtime).exec_argv(container.id, tty=config.tty),
                    cwd=str(self._directory),
                    tty=config.tty,
                    open_stdin=config.attach_stdin and client is not None,
                    stdin_once=True,
                    size=record.size if config.tty and all(record.size) else None,
                    log=None,
                    document=oci_wire.encode(prepared),
                    client=client,
                    owner=stdio_owner(container.record, prepared.user),
                )
        except LaunchFailed as failure:
            return failure
        if record.probe and record.id not in self._ends:
            self._kill(record.id)
        current = self._all.get(record.id)
        if current is not None and current.exit_code is None:
            self._all[record.id] = current = msgspec.structs.replace(current, pid=process.pid)
            if current.size != record.size:  # reported while it was being prepared
                with suppress(ServerError):  # it has ended
                    await self._monitor.resize(record.id, *current.size)
        return None

    def _prepare(self, record: ExecRecord, container: Container) -> oci_wire.Process:
        """Write the record's file and return the OCI process document. Blocks."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            file = os.open(f"{self._directory}/{record.id}", flags, 0o600)
            try:
                os.write(file, msgspec.msgpack.encode(record))
            finally:
                os.close(file)
        except OSError as error:
            raise ServerError(f"exec {record.id}: {words(error)}") from error
        identity = _identity(container, record.config.user or container.record.config.user)
        process = spec.exec_process(container.record, record.config, identity, self._containers.parts.defaults)
        if record.config.tty and all(record.size):
            rows, columns = record.size
            process = msgspec.structs.replace(process, console_size=oci_wire.Box(height=rows, width=columns))
        return process

    def _remove(self, exec_id: str) -> None:
        """Blocks."""
        with suppress(FileNotFoundError):
            os.unlink(f"{self._directory}/{exec_id}")

    async def resize(self, exec_id: str, rows: int, columns: int) -> None:
        """Resize now, or at its start if it has not started yet.

        Raises ServerError when it has no terminal or has ended.
        """
        record = self.get(exec_id)
        if not record.config.tty:
            raise ServerError(f"exec {exec_id} has no terminal")
        if record.exit_code is not None:
            raise ServerError(f"exec {exec_id} is not running")
        self._all[exec_id] = record = msgspec.structs.replace(record, size=(rows, columns))
        if not record.pid:
            return  # it is being started, or will be
        await self._monitor.resize(exec_id, rows, columns)

    async def inspect(self, exec_id: str) -> ExecInspect:
        """The instance as it is now.

        Takes the monitor's pending reports first: a client asks as soon as its stream has ended. If
        the stream ended because its monitor did, the client would take a running instance for one
        that has succeeded: so the first inspect waits for the end, `CUT_GRACE` at most, and then
        raises ServerError.
        """
        await self._monitor.take_reports()
        if self._attached.get(exec_id, self._monitor.losses) != self._monitor.losses:
            ended = self._ends.setdefault(exec_id, asyncio.get_running_loop().create_future())
            await asyncio.wait({ended}, timeout=CUT_GRACE)
            if not ended.done():
                self._attached.pop(exec_id, None)
                raise ServerError(f"exec {exec_id} runs, but the connection to its output has been lost")
        record = self.get(exec_id)
        config = record.config
        command = strings(config.cmd) or [""]
        return ExecInspect(
            id=record.id,
            running=record.running,
            exit_code=record.exit_code,
            process_config=ProcessConfig(
                tty=config.tty,
                entrypoint=command[0],
                arguments=command[1:],
                privileged=config.privileged,
                user=config.user,
            ),
            open_stdin=config.attach_stdin,
            open_stderr=config.attach_stderr,
            open_stdout=config.attach_stdout,
            can_remove=record.exit_code is not None,
            container_id=record.container_id,
            detach_keys=_shown_keys(config.detach_keys),
            pid=record.pid,
        )

    def exited(self, exec_id: str, exit_record: Exit) -> None:
        """The monitor's report."""
        self._finish(exec_id, exit_record.status, exit_record.at, reported=True)

    def detached(self, exec_id: str, by_keys: bool) -> None:
        """The monitor's report: the client has left. Docker publishes an event only for the detach
        keys.
        """
        self._attached.pop(exec_id, None)
        if not by_keys:
            return
        record = self._all.get(exec_id)
        container = self._containers.find(record.container_id) if record is not None else None
        if container is not None:
            container.publish("exec_detach", execID=exec_id)

    def _finish(self, exec_id: str, status: int, at: int, *, reported: bool = False) -> None:
        record = self._all.get(exec_id)
        if record is None or record.exit_code is not None:
            if reported:
                self._monitor.forget(exec_id)
            return
        self._not_live(record)
        finished = msgspec.structs.replace(record, exit_code=status, finished_at=at, pid=0)
        spawn(self._settle(finished, reported), f"keeping the exit code of exec {exec_id}")
        if record.probe:
            del self._all[exec_id]
            waiter = self._ends.get(exec_id)
        else:
            self._keep(finished)
            self._attached.pop(exec_id, None)
            waiter = self._ends.pop(exec_id, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(status)
        container = self._containers.find(record.container_id)
        if container is not None:
            container.publish("exec_die", exitCode=str(status), execID=exec_id)

    async def _settle(self, record: ExecRecord, reported: bool) -> None:
        """Remove the file, then let the monitor forget the exit.

        A daemon that finds the file finds the exit as well.
        """
        try:
            await asyncio.to_thread(self._remove, record.id)
        finally:
            if reported:
                self._monitor.forget(record.id)

    def _not_live(self, record: ExecRecord) -> None:
        others = self._live.get(record.container_id)
        if others is not None:
            others.pop(record.id, None)
            if not others:
                del self._live[record.container_id]

    def _discard(self, record: ExecRecord) -> None:
        self._all.pop(record.id, None)
        self._not_live(record)
        self._finished.pop(record.id, None)
        ended = self._of_container.get(record.container_id)
        if ended is not None:
            ended.pop(record.id, None)
            if not ended:
                del self._of_container[record.container_id]

    def _reap(self) -> None:
        """Forget instances that finished long ago or before `FINISHED_KEPT` others, and idle
        ones beyond `MOST_KEPT`.
        """
        horizon = time.time_ns() - KEPT_SECONDS * 1_000_000_000
        while self._finished:
            oldest = self._all[next(iter(self._finished))]
            crowded = len(self._finished) > FINISHED_KEPT or len(self._all) >= MOST_KEPT
            if oldest.finished_at >= horizon and not crowded:
                break
            self._discard(oldest)
        if len(self._all) >= MOST_KEPT:
            idle = [record for record in self._all.values() if not record.started]
            for record in idle[: MOST_KEPT // 10]:
                self._discard(record)

    def run_ended(self, container_id: str) -> None:
        """The container has exited: its instances cannot be started any more, and are forgotten."""
        for exec_id in self.of(container_id):
            if not self._all[exec_id].started:
                self._discard(self._all[exec_id])
        ended = [*self._of_container.get(container_id, ()), *self._live.get(container_id, ())]
        if ended:
            asyncio.get_running_loop().call_later(LINGER, self._forget, ended)

    def forget_container(self, container_id: str) -> None:
        """The container has been removed, and with it its instances."""
        self._forget([*self._of_container.get(container_id, ()), *self._live.get(container_id, ())])

    def _forget(self, exec_ids: Sequence[str]) -> None:
        """Forget those instances that do not run."""
        for each in exec_ids:
            record = self._all.get(each)
            if record is not None and not record.running:
                self._discard(record)


class _Capture:
    """The first `most` bytes from a socket.

    The rest is read and dropped, so that the writer never waits.
    """

    def __init__(self, source: socket.socket, most: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._source = source
        self._most = most
        self.data = bytearray()
        self.end: asyncio.Future[None] = self._loop.create_future()
        source.setblocking(False)
        self._loop.add_reader(source.fileno(), self._readable)

    def _readable(self) -> None:
        try:
            chunk = self._source.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        self.data += chunk[: self._most - len(self.data)]
        if not chunk:
            self._loop.remove_reader(self._source.fileno())
            if not self.end.done():
                self.end.set_result(None)

    def close(self) -> None:
        self._loop.remove_reader(self._source.fileno())
        self._source.close()
        self.end.cancel()


def console_size(given: Sequence[int] | None) -> tuple[int, int] | None:
    """The rows and columns; None when they are not given, or 0. Raises InvalidParameter."""
    if not given:
        return None
    if len(given) != 2 or not all(0 <= each <= 65535 for each in given):
        raise InvalidParameter(f"invalid ConsoleSize {[*given]}: it must be the rows and columns, 0 to 65535 each")
    rows, columns = given
    return (rows, columns) if rows and columns else None


def _shown_keys(text: str | None) -> str:
    return base64.b64encode(parse_detach_keys(text)).decode() if text else ""


def _event_words(command: Sequence[str]) -> str:
    # Docker joins the program and its arguments with a blank, also when there are none.
    return f"{command[0]} {' '.join(command[1:])}"


_RUNNING = (State.RUNNING, State.PAUSED)


def _identity(container: Container, user: str) -> users.Identity:
    """Blocks. Raises InvalidParameter for an unknown user, Conflict once the container has
    ended.
    """
    try:
        root = container.parts.snapshots.mounted(container.id)
    except NotFound as error:
        raise _not_running(container) from error
    return users.lookup(root, user, container.record.host.group_add or ())


def _check_state(container: Container, named: str = "") -> None:
    state = container.record.status.state
    if state == State.PAUSED:
        raise Conflict(f"Container {named or container.id} is paused, unpause the container before exec")
    if state != State.RUNNING:
        raise _not_running(container)


def _not_running(container: Container) -> Conflict:
    return Conflict(f"Container {container.id} is not running")


def _say(descriptor: int, text: bytes) -> None:
    # A few hundred bytes into a fresh socket. The client may be gone.
    try:
        os.write(descriptor, text)
    except OSError as error:
        _log.debug("writing the failure of an exec to its client: %s", error)
