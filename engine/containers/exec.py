"""Exec instances: further processes in running containers.

Owns: RUN/exec/<id>/, one directory per instance (its record, the OCI process document, pid file, the runtime's log), gone at a reboot as the
processes are. Finished instances are kept for `KEPT_SECONDS`, and no longer than their container.
Not here: bytes (the monitor), which process document (`spec.py`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import time
from pathlib import Path

import msgspec

from engine._fast import frames
from engine.containers import spec
from engine.containers.container import Container, Containers
from engine.containers.create import strings
from engine.containers.lifecycle import State
from engine.containers.streams import parse_detach_keys
from engine.errors import Conflict, EngineError, InvalidParameter, NotFound, ServerError
from engine.monitor.client import Exit, LaunchFailed, Monitor
from engine.runtime import oci, users
from engine.runtime.oci import Runtime
from engine.wire import oci as oci_wire
from engine.wire.exec import ExecCreate, ExecInspect, ProcessConfig

_log = logging.getLogger(__name__)

KEPT_SECONDS = 300
"""How long a finished instance can be inspected, as Docker's own garbage collection."""
MOST_KEPT = 10_000
"""Instances in memory at once; beyond it the oldest finished ones go first."""


class ExecRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One instance. `exit_code` is None until it has ended; times in ns since the epoch."""

    id: str
    container_id: str
    config: ExecCreate
    started: bool = False
    pid: int = 0
    exit_code: int | None = None
    finished_at: int = 0

    @property
    def running(self) -> bool:
        return self.started and self.exit_code is None


_decode = msgspec.msgpack.Decoder(ExecRecord).decode


class Execs:
    """All exec instances of the engine, by id."""

    def __init__(self, run: Path, containers: Containers, monitor: Monitor, runtime: Runtime) -> None:
        self._directory = run / "exec"
        self._containers = containers
        self._monitor = monitor
        self._runtime = runtime
        self._all: dict[str, ExecRecord] = {}

    def open(self) -> None:
        """Take over the instances that an earlier daemon left, and what became of them. Blocks on files; called at start."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        for directory in self._directory.iterdir():
            try:
                record = _decode((directory / "record").read_bytes())
            except (OSError, msgspec.MsgspecError):
                shutil.rmtree(directory, ignore_errors=True)
                continue
            self._all[record.id] = record
            if record.id in self._monitor.exits:
                self.exited(record.id, self._monitor.exits[record.id])
            elif record.running and record.id not in self._monitor.processes:
                self.exited(record.id, Exit(status=255, at=time.time_ns()))

    def __contains__(self, key: str) -> bool:
        return key in self._all

    def get(self, exec_id: str) -> ExecRecord:
        """By whole id. Raises NotFound in Docker's words."""
        record = self._all.get(exec_id)
        if record is None:
            raise NotFound(f"No such exec instance: {exec_id}")
        return record

    def of(self, container_id: str) -> list[str]:
        """Ids of the instances that run in the container."""
        return [record.id for record in self._all.values() if record.container_id == container_id and record.running]

    async def create(self, container: Container, config: ExecCreate) -> str:
        """A new instance, not started. Raises Conflict when the container is paused or does not run, InvalidParameter without a command."""
        _check_state(container)
        command = strings(config.cmd)
        if not command or not command[0]:
            raise InvalidParameter("No exec command specified")
        parse_detach_keys(config.detach_keys or None)
        self._reap()
        record = ExecRecord(
            id=secrets.token_hex(32), container_id=container.id, config=msgspec.structs.replace(config, cmd=command)
        )
        self._all[record.id] = record
        container.publish(f"exec_create: {' '.join(command)}")
        return record.id

    async def start(
        self, exec_id: str, *, detach: bool, descriptor: int = -1, head: bytes = b"", early: bytes = b""
    ) -> None:
        """Run it; with `descriptor` (the caller's) its output goes to that client, beginning with `head`.

        A failure after the client has been attached is told on its stream, as Docker does; before that it is raised.
        """
        record = self.get(exec_id)
        container = self._containers.get(record.container_id)
        if record.exit_code is not None or record.started:
            raise Conflict(f"Error: Exec command {exec_id} has already run")
        _check_state(container)
        self._all[exec_id] = record = msgspec.structs.replace(record, started=True)
        config = record.config
        container.publish(f"exec_start: {' '.join(strings(config.cmd) or ())}")
        attached = descriptor >= 0 and not detach
        try:
            if attached:
                await self._monitor.attach(
                    exec_id,
                    descriptor,
                    stdin=config.attach_stdin,
                    stdout=config.attach_stdout,
                    stderr=config.attach_stderr,
                    raw=config.tty,
                    head=head,
                    early=early,
                    detach_keys=parse_detach_keys(config.detach_keys or None),
                )
        except BaseException:
            self._all[exec_id] = msgspec.structs.replace(record, started=False)
            raise
        try:
            await self._launch(record, container, attached)
        except EngineError as error:
            failure = oci.Failure(error, oci.COMMAND_NOT_INVOKED)
            if isinstance(error, LaunchFailed):
                failure = oci.start_failure(error.reason, (strings(config.cmd) or [""])[0])
            self._finish(exec_id, failure.exit_code, time.time_ns())
            if not attached:
                raise failure.error from error
            text = (failure.error.message + "\r\n").encode()
            await asyncio.to_thread(_say, descriptor, text if config.tty else frames.mux(1, text))
            self._monitor.drop(exec_id)

    async def _launch(self, record: ExecRecord, container: Container, attached: bool) -> None:
        directory = self._directory / record.id
        config = record.config
        await asyncio.to_thread(self._write, record, container)
        process = await self._monitor.run(
            record.id,
            self._runtime.exec_argv(
                container.id,
                process=directory / "process.json",
                pid_file=directory / "pid",
                log=directory / "log",
                tty=config.tty,
            ),
            cwd=str(directory),
            pid_file=str(directory / "pid"),
            log_path=str(directory / "log"),
            tty=config.tty,
            open_stdin=config.attach_stdin and attached,
            stdin_once=True,
            size=None,
            log=None,
        )
        current = self._all.get(record.id)
        if current is not None and current.exit_code is None:
            self._all[record.id] = msgspec.structs.replace(current, pid=process.pid)

    def _write(self, record: ExecRecord, container: Container) -> None:
        directory = self._directory / record.id
        directory.mkdir(mode=0o700)
        (directory / "record").write_bytes(msgspec.msgpack.encode(record))
        user = record.config.user or container.record.config.user
        identity = users.lookup(container.directory / "rootfs", user, container.record.host.group_add or ())
        process = spec.exec_process(container.record, record.config, identity)
        (directory / "process.json").write_bytes(oci_wire.encode(process))

    async def resize(self, exec_id: str, rows: int, columns: int) -> None:
        """Raises ServerError when it has no terminal or does not run."""
        record = self.get(exec_id)
        if not record.running:
            raise ServerError(f"exec {exec_id} is not running")
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

    def _finish(self, exec_id: str, status: int, at: int) -> None:
        record = self._all.get(exec_id)
        if record is None:
            return
        self._all[exec_id] = msgspec.structs.replace(record, exit_code=status, finished_at=at, pid=0)
        asyncio.get_running_loop().run_in_executor(None, shutil.rmtree, self._directory / exec_id, True)
        container = self._containers.find(record.container_id)
        if container is not None:
            container.publish("exec_die", exitCode=str(status), execID=exec_id)

    def _reap(self) -> None:
        """Let go of what finished long ago, or whose container is gone."""
        horizon = time.time_ns() - KEPT_SECONDS * 1_000_000_000
        crowded = len(self._all) >= MOST_KEPT
        for exec_id, record in [*self._all.items()]:
            finished = record.exit_code is not None
            if (finished and (record.finished_at < horizon or crowded)) or (
                not record.running and self._containers.find(record.container_id) is None
            ):
                del self._all[exec_id]
                crowded = len(self._all) >= MOST_KEPT


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
