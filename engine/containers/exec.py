"""Exec instances: further processes in running containers, of clients and of health checks (probes).

Owns: RUN/exec/<id>, the record of each running instance, gone at a reboot as the processes are.
Finished instances are kept for `KEPT_SECONDS`, probes not at all.
Not here: bytes (the monitor), which process document (`spec.py`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from engine._fast import frames
from engine.containers import spec
from engine.containers.container import Container, Containers
from engine.containers.create import strings
from engine.containers.lifecycle import State
from engine.containers.streams import parse_detach_keys
from engine.errors import Conflict, EngineError, InvalidParameter, NotFound, ServerError
from engine.monitor.client import Client, Exit, LaunchFailed, Monitor
from engine.runtime import oci, users
from engine.runtime.migration import Migration
from engine.runtime.oci import Runtime
from engine.wire import oci as oci_wire
from engine.wire.exec import ExecCreate, ExecInspect, ProcessConfig

_log = logging.getLogger(__name__)

KEPT_SECONDS = 300
"""How long a finished instance can be inspected, as Docker's own garbage collection."""
FINISHED_KEPT = 1_500
"""Finished instances in memory at once, about a megabyte; beyond it the oldest go. Clients ask for the exit code when the stream has ended."""
MOST_KEPT = 10_000
"""Instances in memory at once; beyond it the oldest finished ones go first, then the oldest that were never started."""
PROBES_STARTING = 8
"""Probes that are being started at once: the runtime's own start is the dear part, and many timers may fall together."""
KILL_GRACE = 5.0
"""Seconds that a killed probe is waited for."""


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
    """Rows and columns that its terminal begins with."""
    probe: bool = False
    """Of a health check: its end is nobody's to inspect."""

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
        self, run: Path, containers: Containers, monitor: Monitor, runtime: Runtime, migration: Migration
    ) -> None:
        self._directory = run / "exec"
        self._containers = containers
        self._monitor = monitor
        self._runtime = runtime
        self._migration = migration
        self._all: dict[str, ExecRecord] = {}
        self._live: dict[str, dict[str, None]] = {}
        """By container: instances that run or have not been started."""
        self._finished: deque[str] = deque()
        self._ends: dict[str, asyncio.Future[int]] = {}
        self._starting = asyncio.Semaphore(PROBES_STARTING)

    def open(self) -> None:
        """Take over the instances that an earlier daemon left, and what became of them. Blocks on files; called at start."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        for path in self._directory.iterdir():
            try:
                record = _decode(path.read_bytes())
            except msgspec.MsgspecError:
                path.unlink()  # torn: its daemon died while it wrote it
                continue
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
                self._kill(record.id)  # whoever waited for it is gone

    def __contains__(self, key: str) -> bool:
        return key in self._all

    def get(self, exec_id: str) -> ExecRecord:
        """By whole id. Raises NotFound in Docker's words, also when its container is gone."""
        record = self._all.get(exec_id)
        if record is None or record.container_id not in self._containers:
            raise NotFound(f"No such exec instance: {exec_id}")
        return record

    def of(self, container_id: str) -> list[str]:
        """Ids of the container's instances that run or are yet to be started, as inspect shows them."""
        return [*self._live.get(container_id, ())]

    def __len__(self) -> int:
        return len(self._all)

    async def create(self, container: Container, config: ExecCreate) -> str:
        """A new instance, not started. Raises Conflict when the container is paused or does not run, InvalidParameter without a command."""
        _check_state(container)
        command = strings(config.cmd)
        if not command or not command[0]:
            raise InvalidParameter("No exec command specified")
        parse_detach_keys(config.detach_keys or None)
        return self._add(container, config, command).id

    def _add(self, container: Container, config: ExecCreate, command: list[str], *, probe: bool = False) -> ExecRecord:
        self._reap()
        self._migration.expect()
        record = ExecRecord(
            id=secrets.token_hex(32),
            container_id=container.id,
            config=msgspec.structs.replace(config, cmd=command),
            probe=probe,
        )
        self._keep(record)
        container.publish(f"exec_create: {_event_words(command)}", execID=record.id)
        return record

    def _keep(self, record: ExecRecord) -> None:
        self._all[record.id] = record
        if record.exit_code is None:
            self._live.setdefault(record.container_id, {})[record.id] = None

    async def probe(self, container: Container, command: Sequence[str], timeout: float, most: int) -> Outcome:
        """Run `command` to its end, or kill it after `timeout` seconds; the first `most` bytes of its output.

        Raises what `create` and `start` raise; nothing of it is left in any case.
        """
        _check_state(container)
        config = ExecCreate(attach_stdout=True, attach_stderr=True)
        record = self._add(container, config, [*command], probe=True)
        ended = self._ends[record.id] = asyncio.get_running_loop().create_future()
        ours, theirs = socket.socketpair()
        capture = _Capture(ours, most)
        try:
            # Not cancelled half-way: a process that comes of it is then seen and ended by `_launch`.
            start = asyncio.ensure_future(self._start_probe(record.id, theirs))
            start.add_done_callback(lambda task: task.cancelled() or task.exception())
            started_at = await asyncio.shield(start)
            done, _ = await asyncio.wait({ended}, timeout=timeout)
            if not done:
                self._kill(record.id)
                await asyncio.wait({ended}, timeout=KILL_GRACE)
                return Outcome(timed_out=True, started_at=started_at)
            await asyncio.wait({capture.end}, timeout=1)  # all is written when the exit is told; it may not be read yet
            return Outcome(exit_code=ended.result(), output=bytes(capture.data), started_at=started_at)
        finally:
            del self._ends[record.id]
            capture.close()
            if record.id in self._all:
                if self._all[record.id].started:
                    self._kill(record.id)
                else:
                    self._discard(record)

    async def _start_probe(self, exec_id: str, theirs: socket.socket) -> int:
        with theirs:
            async with self._starting:
                started_at = time.time_ns()
                await self.start(exec_id, detach=False, descriptor=theirs.fileno(), raw=True)
                return started_at

    def _kill(self, exec_id: str) -> None:
        """End the process and what it started: runtimes give each exec a session of its own, whose first group is the exec's."""
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
    ) -> None:
        """Run it; with `descriptor` (the caller's) its output goes to that client, beginning with `head`; `raw`: without frames.

        A failure after the client has been attached is told on its stream, as Docker does; before that, and for a probe, it is raised.
        """
        record = self.get(exec_id)
        container = self._containers.get(record.container_id)
        if record.exit_code is not None or record.started:
            raise Conflict(f"Error: Exec command {exec_id} has already run")
        _check_state(container)
        self._all[exec_id] = record = msgspec.structs.replace(record, started=True)
        self._migration.expect()
        config = record.config
        container.publish(f"exec_start: {_event_words(strings(config.cmd) or [''])}", execID=exec_id)
        client = None
        if descriptor >= 0 and not detach:
            client = Client(
                descriptor=descriptor,
                stdin=config.attach_stdin,
                stdout=config.attach_stdout,
                stderr=config.attach_stderr,
                raw=config.tty or raw,
                head=head,
                early=early,
                detach_keys=parse_detach_keys(config.detach_keys or None),
            )
        try:
            refusal: EngineError | None
            try:
                # First its record: were the daemon to die now, the next one knows whose client waits at the monitor.
                document = await asyncio.to_thread(self._prepare, record, container)
            except EngineError as error:
                refusal = error
                if client is not None:
                    await self._monitor.attach(exec_id, client)
            else:
                refusal = await self._launch(record, container, document, client)
        except Exception:
            self._all[exec_id] = msgspec.structs.replace(record, started=False)
            await asyncio.to_thread(self._remove, exec_id)
            raise
        if refusal is not None:
            failure = oci.Failure(refusal, oci.COMMAND_NOT_INVOKED)
            if isinstance(refusal, LaunchFailed):
                failure = oci.start_failure(refusal.reason, (strings(config.cmd) or [""])[0])
            self._finish(exec_id, failure.exit_code, time.time_ns())
            if record.probe:
                self._monitor.drop(exec_id)
            if record.probe or client is None:
                raise failure.error from refusal
            # Of a client that went to a monitor which died nobody knows whether it has the answer's head.
            if not (isinstance(refusal, LaunchFailed) and refusal.interrupted):
                text = (failure.error.message + "\r\n").encode()
                await asyncio.to_thread(_say, descriptor, text if config.tty else frames.mux(1, text))
            self._monitor.drop(exec_id)

    async def _launch(
        self, record: ExecRecord, container: Container, document: bytes, client: Client | None
    ) -> LaunchFailed | None:
        config = record.config
        try:
            with self._migration.going_on():
                process = await self._monitor.run(
                    record.id,
                    self._runtime.exec_argv(container.id, tty=config.tty),
                    cwd=str(self._directory),
                    tty=config.tty,
                    open_stdin=config.attach_stdin and client is not None,
                    stdin_once=True,
                    size=record.size if config.tty and all(record.size) else None,
                    log=None,
                    document=document,
                    client=client,
                )
        except LaunchFailed as failure:
            return failure
        if record.probe and record.id not in self._ends:
            self._kill(record.id)
        current = self._all.get(record.id)
        if current is not None and current.exit_code is None:
            self._all[record.id] = current = msgspec.structs.replace(current, pid=process.pid)
            if current.size != record.size:  # told while it was being made
                with suppress(ServerError):  # it has ended
                    await self._monitor.resize(record.id, *current.size)
        return None

    def _prepare(self, record: ExecRecord, container: Container) -> bytes:
        """Keep the record, and give the OCI process document."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        file = os.open(f"{self._directory}/{record.id}", flags, 0o600)
        try:
            os.write(file, msgspec.msgpack.encode(record))
        finally:
            os.close(file)
        user = record.config.user or container.record.config.user
        try:
            root = container.snapshots.mounted(container.id)
        except NotFound as error:  # it has just ended
            raise Conflict(f"Container {container.id} is not running") from error
        identity = users.lookup(root, user, container.record.host.group_add or ())
        process = spec.exec_process(container.record, record.config, identity)
        if record.config.tty and all(record.size):
            rows, columns = record.size
            process = msgspec.structs.replace(process, console_size=oci_wire.Box(height=rows, width=columns))
        return oci_wire.encode(process)

    def _remove(self, exec_id: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(f"{self._directory}/{exec_id}")

    async def resize(self, exec_id: str, rows: int, columns: int) -> None:
        """Now, or for its start when that is still to come. Raises ServerError when it has no terminal or has ended."""
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
        """As it is now: what the monitor has reported counts, read or not, since a client asks as soon as its stream has ended."""
        await self._monitor.take_reports()
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
            detach_keys=config.detach_keys or "",
            pid=record.pid,
        )

    def exited(self, exec_id: str, exit_record: Exit) -> None:
        """The monitor's report."""
        self._finish(exec_id, exit_record.status, exit_record.at)
        self._monitor.forget(exec_id)

    def detached(self, exec_id: str) -> None:
        """The monitor's report: its client left by the detach keys."""
        record = self._all.get(exec_id)
        container = self._containers.find(record.container_id) if record is not None else None
        if container is not None:
            container.publish("exec_detach", execID=exec_id)

    def _finish(self, exec_id: str, status: int, at: int) -> None:
        record = self._all.get(exec_id)
        if record is None or record.exit_code is not None:
            return
        self._all[exec_id] = msgspec.structs.replace(record, exit_code=status, finished_at=at, pid=0)
        self._live_no_more(record)
        asyncio.get_running_loop().run_in_executor(None, self._remove, exec_id)
        if record.probe:
            del self._all[exec_id]
            waiter = self._ends.get(exec_id)
            if waiter is not None and not waiter.done():
                waiter.set_result(status)
        else:
            self._finished.append(exec_id)
        container = self._containers.find(record.container_id)
        if container is not None:
            container.publish("exec_die", exitCode=str(status), execID=exec_id)

    def _live_no_more(self, record: ExecRecord) -> None:
        others = self._live.get(record.container_id)
        if others is not None:
            others.pop(record.id, None)
            if not others:
                del self._live[record.container_id]

    def _discard(self, record: ExecRecord) -> None:
        self._all.pop(record.id, None)
        self._live_no_more(record)

    def _reap(self) -> None:
        """Let go of what finished long ago or before `FINISHED_KEPT` others, and beyond `MOST_KEPT` of what was never started."""
        horizon = time.time_ns() - KEPT_SECONDS * 1_000_000_000
        while self._finished:
            oldest = self._all[self._finished[0]]
            crowded = len(self._finished) > FINISHED_KEPT or len(self._all) >= MOST_KEPT
            if oldest.finished_at >= horizon and not crowded:
                break
            del self._all[self._finished.popleft()]
        if len(self._all) >= MOST_KEPT:
            idle = [record for record in self._all.values() if not record.started]
            for record in idle[: MOST_KEPT // 10]:
                self._discard(record)

    def forget_container(self, container_id: str) -> None:
        """The container is gone: instances that were never started go with it."""
        for exec_id in self.of(container_id):
            if not self._all[exec_id].started:
                self._discard(self._all[exec_id])


class _Capture:
    """The first bytes of what comes from a socket; the rest is read and thrown away, so that the writer never waits."""

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


def _event_words(command: Sequence[str]) -> str:
    # Docker joins the program and its arguments with a blank, also when there are none.
    return f"{command[0]} {' '.join(command[1:])}"


def _check_state(container: Container) -> None:
    state = container.record.status.state
    if state == State.PAUSED:
        raise Conflict(f"Container {container.id} is paused, unpause the container before exec")
    if state != State.RUNNING:
        raise Conflict(f"Container {container.id} is not running")


def _say(descriptor: int, text: bytes) -> None:
    # A few hundred bytes into a fresh socket; a client that is gone has no use for them.
    try:
        os.write(descriptor, text)
    except OSError as error:
        _log.debug("telling a client of a failed exec: %s", error)
