"""One container: verbs that take its lock, consult the lifecycle table, call the adapters, undo on
failure and publish events.

`Container.record` is a frozen struct that is replaced whole, and only by a holder of `lock` (`_set`
asserts it). A reader takes no lock: all that clients read is made of one record. A verb holds the
lock from its decision until the record shows the outcome. Waiting for a process to end is done
without it, so that a kill can overtake a stop; only a removal keeps it, and takes the exit itself.

A verb that has begun is completed even when its caller is cancelled (`_whole`), so a client that
leaves does not leave half a change. Only waiting can be cancelled: for a peer's start, for a
process to end.

A process and its end come from the monitor: `Process.exit` is resolved, `_finish` takes the lock,
records the exit, resolves waiting calls, and releases the run's resources before the next verb
takes the lock. No holder of one container's lock waits for another container.

Not here: the table of containers (`containers.py`), the rules of a body (`body.py`), the steps of a
start (`launch.py`), list and inspect (`views.py`), reading from a container (`logs.py`, `stats.py`,
`top.py`, `mounted.py`, `archive.py`, `streams.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import msgspec

from engine.containers import body, bundle, create, launch, lifecycle, mount_points, restart, sharing, update
from engine.containers.lifecycle import State, Verb
from engine.containers.parts import Parts, Peers
from engine.containers.signals import signal_number
from engine.containers.store import ContainerRecord, Health, Status
from engine.errors import Conflict, EngineError, Forbidden, InvalidParameter, NotFound, NotModified, ServerError
from engine.monitor.handles import Exit, LaunchFailed, LogReading, Process
from engine.networks.endpoints import configured
from engine.runtime import cgroups, oci
from engine.runtime.cgroups import Support
from engine.storage.records import Change
from engine.system.files import remove_tree
from engine.system.tasks import spawn
from engine.system.threads import uninterrupted
from engine.wire import oci as oci_wire
from engine.wire.containers import EndpointSettings, HostConfig, UpdateBody

_log = logging.getLogger(__name__)

DEFAULT_STOP_TIMEOUT = 10
"""Default seconds that a stop and a restart wait before SIGKILL."""

_RUNNING = (State.RUNNING, State.PAUSED)
_SIGKILL = 9
_KILL_GRACE = 10.0
"""Seconds to wait for the end of a process after SIGKILL."""
_PEERS_WAIT = 10.0
"""Seconds that a start waits for a container on which it depends and which is about to start."""
_SAVE_PAUSE = 1.0
"""Seconds until saving a record is tried again."""

_START_FAILURES = (EngineError, OSError, RuntimeError)
"""Errors of a start. Python raises RuntimeError when a thread cannot be started."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _whole(verb: Callable[_P, Coroutine[Any, Any, _T]]) -> Callable[_P, Coroutine[Any, Any, _T]]:
    """Complete the verb even when its caller is cancelled."""

    @functools.wraps(verb)
    async def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return await uninterrupted(verb(*args, **kwargs))

    return run


class Container:
    """One container. `record` may be read at any time; verbs are coroutines."""

    __slots__ = (
        "_awaited",
        "_out_of_memory",
        "_process",
        "_restart",
        "_restart_delay",
        "_started",
        "_starts",
        "_unsaved",
        "_waiters",
        "generation",
        "lock",
        "parts",
        "peers",
        "record",
        "removed",
    )

    def __init__(self, parts: Parts, record: ContainerRecord, peers: Peers) -> None:
        self.parts = parts
        self.peers = peers
        self.record = record
        self.lock = asyncio.Lock()
        self.generation = 0
        """Grows with every visible change (`touch`): a reply may be cached while it stays the same.
        """
        self.removed = False
        self._process: Process | None = None
        """The process of its run; None as soon as the record shows the exit."""
        self._out_of_memory = False
        """The event `oom` of this run has been published."""
        self._waiters: list[asyncio.Future[int]] = []
        self._restart: asyncio.TimerHandle | None = None
        """In state RESTARTING: the time of the next start."""
        self._restart_delay = 0.0
        self._starts = 0
        """Starts in progress or certain to come: by users, by restarts, at boot."""
        self._started: asyncio.Event | None = None
        """Set when there are none left, for peers that wait."""
        self._awaited: Container | None = None
        """The peer whose start its own start waits for."""
        self._unsaved: asyncio.Task[None] | None = None
        """The task that saves the record again after a failure."""

    # --- state
    # ----------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def running(self) -> bool:
        return self.record.status.state in _RUNNING

    @property
    def directory(self) -> Path:
        """Log, hosts, hostname, resolv.conf and bundle."""
        return launch.directory_of(self.parts.config, self.record.id)

    @property
    def graph(self) -> dict[str, str]:
        """Paths of its overlay, as inspect shows them."""
        return self.parts.snapshots.snapshot_data(self.id)

    @property
    def log_path(self) -> Path | None:
        """The json-file log, when the container has one."""
        return launch.log_path(self.parts.config, self.record)

    def log_reading(self) -> LogReading | None:
        """For a reader of the log. None when the log is not rotated meanwhile."""
        return self.parts.monitor.read_log(self.id) if self.running else None

    @property
    def cgroup(self) -> str:
        """Its control group, from the root of each hierarchy."""
        return cgroups.path(self.id, self.record.host.cgroup_parent)

    @property
    def names(self) -> list[str]:
        """Its own name, then its names in links of other containers:

        `/name`, `/parent/alias`.
        """
        return ["/" + self.record.name, *self.peers.names_by_link(self.id)]

    @property
    def links(self) -> list[str] | None:
        """Its links as inspect shows them, `/child:/name/alias`; None without any."""
        shown = []
        for alias, child in self.record.links.items():
            with contextlib.suppress(NotFound):  # removed
                shown.append(f"/{self.peers.get(child).record.name}:/{self.record.name}/{alias}")
        return sorted(shown) or None

    async def sizes(self) -> tuple[int, int]:
        """Bytes that its own layer holds, and those of its whole root.

        The files are counted in a thread.
        """
        snapshots = self.parts.snapshots
        try:
            own = (await snapshots.usage(self.id)).size
        except (NotFound, FileNotFoundError):
            return 0, 0  # it is being removed
        return own, own + sum(layer.size for layer in snapshots.chain(self.record.parent))

    def check_attach(self) -> None:
        """Raises the lifecycle table's Conflict when no client can attach to it now."""
        lifecycle.following(self.record.status.state, Verb.ATTACH, self.id)

    def check_present(self) -> None:
        """Raises NotFound once it has been removed.

        A verb that waited for the lock checks this again.
        """
        if self.removed:
            raise NotFound(f"No such container: {self.id}")

    def publish(self, action: str, at: int | None = None, **attributes: str) -> None:
        """An event of this container, with Docker's attributes."""
        record = self.record
        self.parts.events.publish(
            "container",
            action,
            record.id,
            {"image": record.config.image, "name": record.name, **record.config.labels, **attributes},
            at,
            image_from=record.config.image,
        )

    def out_of_memory(self) -> None:
        """The kernel reports that its memory limit was reached."""
        if self.running:
            self._out_of_memory = True
            self.publish("oom")

    async def wait(self) -> int:
        """The exit code: at once when it does not run, otherwise at its exit.

        A container that waits for its restart counts as running, as in Docker.
        """
        if not self._may_end:
            return self.record.status.exit_code
        with self._waiter() as waiter:
            return await waiter

    @contextlib.contextmanager
    def _waiter(self) -> Iterator[asyncio.Future[int]]:
        waiter: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            yield waiter
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    @property
    def _may_end(self) -> bool:
        return self.running or self.record.status.state == State.RESTARTING or self._starts > 0

    def _answer_waiters(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(self.record.status.exit_code)

    # --- the record -------------------------------------------------------------------------------

    def _set(self, record: ContainerRecord) -> ContainerRecord:
        assert self.lock.locked(), "a record is changed by the holder of its container's lock"
        self.record = record
        self.touch()
        return record

    def _replace(self, **changes: object) -> ContainerRecord:
        return self._set(msgspec.structs.replace(self.record, **changes))

    def _move(self, **changes: object) -> ContainerRecord:
        return self._replace(status=msgspec.structs.replace(self.record.status, **changes))

    def touch(self) -> None:
        """Invalidate cached replies after a visible change."""
        self.generation += 1

    async def _save(self) -> bool:
        """Save a change that has happened already.

        Returns False on failure; saving is then repeated until it succeeds.
        """
        assert self.lock.locked()
        try:
            await self.parts.store.save(self.record)
        except EngineError as error:
            _log.error("container %s: its record cannot be saved yet: %s", self.id, error.message)
            if self._unsaved is None:
                self._unsaved = spawn(self._save_later(), f"container {self.id}: save its record")
            return False
        return True

    async def _save_later(self) -> None:
        try:
            while True:
                await asyncio.sleep(_SAVE_PAUSE)
                async with self.lock:
                    if self.removed:
                        return
                    with contextlib.suppress(EngineError):
                        await self.parts.store.save(self.record)
                        if not self.running:
                            self.parts.monitor.forget(self.id)
                        return
        finally:
            self._unsaved = None

    def set_health(self, health: Health) -> None:
        """Set the result of its health check.

        The caller holds the lock; `save_health` makes it durable.
        """
        self._move(health=health)

    async def save_health(self) -> None:
        """Make durable what `set_health` has set. The caller holds the lock."""
        await self._save()

    @_whole
    async def rename(self, name: str) -> None:
        """Raises Conflict when the name is taken, InvalidParameter when it is its own."""
        async with self.lock:
            self.check_present()
            before = self.record
            if name == before.name:
                raise InvalidParameter("Renaming a container with the same name as its current name")
            with self.peers.renaming(self, name):
                await self._commit(msgspec.structs.replace(before, name=name))
            self.parts.attachments.renamed(self.id, name)
            self.publish("rename", oldName="/" + before.name)

    @_whole
    async def set_host(self, host: HostConfig, support: Support) -> None:
        """Replace its HostConfig, as a start of API 1.23 and older may.

        Raises NotModified when it runs, InvalidParameter.
        """
        async with self.lock:
            self.check_present()
            lifecycle.following(self.record.status.state, Verb.START, self.id)
            before = self.record
            await create.with_host(before, host, self.parts, self.peers.get, support, self._commit)
            self.peers.host_changed(self, before)

    @_whole
    async def unlink(self, alias: str) -> None:
        """Remove a link. Raises NotFound when there is none with that alias."""
        async with self.lock:
            self.check_present()
            record = self.record
            child = record.links.get(alias)
            if child is None:
                raise NotFound(f"Cannot get child {alias} of /{record.name}: no such link")
            links = {name: to for name, to in record.links.items() if name != alias}
            kept = [text for text in record.host.links or () if body.parse_link(text).alias != alias]
            host = msgspec.structs.replace(record.host, links=kept or None)
            await self._commit(msgspec.structs.replace(record, links=links, host=host))
            self.peers.unlinked(self, child)
            await self._relink()

    async def _commit(self, record: ContainerRecord, *more: Change) -> None:
        """A change whose row is its commit point, with `more` in one transaction.

        On failure the record is as before.
        """
        before = self.record
        self._set(record)
        try:
            await self.parts.store.save(record, *more)
        except EngineError:
            self._set(before)
            raise

    # --- start ------------------------------------------------------------------------------------

    async def start(self, *, by_user: bool = True) -> None:
        """Run it.

        Raises NotModified when it runs; a failure undoes everything and sets `State.Error` to the
        reason.
        """
        self.check_present()
        lifecycle.following(self.record.status.state, Verb.START, self.id)
        with self._starting():
            await self._peers_started()
            await self._start(by_user)

    @_whole
    async def _start(self, by_user: bool) -> None:
        async with self.lock:
            self.check_present()
            state = lifecycle.following(self.record.status.state, Verb.START, self.id)
            if not by_user and (self.record.status.state != State.RESTARTING or self.peers.leaving):
                raise NotModified(f"Container {self.id} was stopped before its restart")
            self._cancel_restart()
            if by_user:
                self._restart_delay = 0.0
                self._replace(restart_count=0)
            before = self.record
            try:
                process = await self._launch(state)
            except _START_FAILURES as error:
                raise await self._start_failed(before, error, by_user) from error
            process.exit.add_done_callback(functools.partial(self._process_ended, process))
            self.publish("start", self.record.status.started_at)
        await self.peers.relink(self.id)

    @contextlib.contextmanager
    def _starting(self) -> Iterator[None]:
        """Counts a start in progress or certain to come: containers that depend on this one wait
        for it, and so do `wait` calls.
        """
        self._starts += 1
        try:
            yield
        finally:
            self._starts -= 1
            if not self._starts:
                if self._started is not None:
                    self._started.set()
                    self._started = None
                if not self._may_end:
                    self._answer_waiters()

    async def _launch(self, state: State) -> Process:
        """The process of the new run.

        Its row is the commit point: when it cannot be saved, the process is killed.
        """
        async with launch.launch(self.record, self.parts, self.peers) as launched:
            process = launched.process
            status = Status(state=state, pid=process.pid, started_at=time.time_ns())
            self._set(msgspec.structs.replace(launched.record, status=status, stopped_by_user=False))
            self._process = process
            self._out_of_memory = False
            self.parts.lifecycle.runs(self)
            try:
                await self.parts.store.save(self.record)
            except BaseException:
                self._process = None
                self.parts.lifecycle.rests(self)
                raise
        return process

    async def _start_failed(self, before: ContainerRecord, error: Exception, by_user: bool) -> EngineError:
        """Record a failed start; returns the error for the client."""
        self._set(before)
        if not by_user and isinstance(error, LaunchFailed) and error.interrupted:
            # The monitor died, which is not the container's fault: its restart policy applies.
            self._plan_restart(restart.delay(self._restart_delay, 0))
            await self._save()
            return error
        failure, exit_code = self._failure(error)
        state = lifecycle.following(before.status.state, Verb.FAIL, self.id)
        self._move(state=state, error=failure.message, exit_code=exit_code)
        await self._save()
        # As in Docker: a client that attached before the start gets the end, and `docker run --rm`
        # waits for this event.
        self.parts.monitor.drop(self.id)
        self.publish("die", exitCode=str(exit_code))
        return failure

    def _failure(self, error: Exception) -> oci.Failure:
        """The client's error for a failed start, and the exit code to keep.

        A start has no 403.
        """
        if isinstance(error, LaunchFailed):
            return oci.start_failure(error.reason, self.record.path)
        if not isinstance(error, EngineError):
            error = ServerError(f"Cannot start container {self.id}: {error}")
        if isinstance(error, Forbidden):
            error = ServerError(error.message)
        return oci.Failure(error, oci.failure_code(error.message))

    async def _peers_started(self) -> None:
        """Wait some seconds for the starts of containers on which it depends: at boot, or when
        `docker-compose restart` restarts a whole project.

        The lock is not held. Of containers that depend on each other, one does not wait.
        """
        host = self.record.host
        names = [body.joined(mode) for mode in (host.network_mode, host.pid_mode, host.ipc_mode)]
        for name in (*filter(None, names), *self.record.links.values()):
            with contextlib.suppress(NotFound, InvalidParameter, TimeoutError):
                peer = self.peers.get(name)
                if not peer._starts or peer._waits_for(self):
                    continue
                if peer._started is None:
                    peer._started = asyncio.Event()
                self._awaited = peer
                try:
                    await asyncio.wait_for(peer._started.wait(), _PEERS_WAIT)
                finally:
                    self._awaited = None

    def _waits_for(self, other: Container) -> bool:
        """Returns True if its start waits for that of `other`, directly or through others."""
        container: Container | None = self
        while container is not None:
            if container is other:
                return True
            container = container._awaited
        return False

    async def relink(self) -> None:
        """A linked container has started, perhaps with another address: update the hosts file."""
        if self.running:
            async with self.lock:
                await self._relink()

    async def _relink(self) -> None:
        if not self.running:
            return
        try:
            hosts, _ = sharing.links(self.record, self.peers.get)
        except EngineError:
            return  # another of them does not run: leave the hosts file as it is
        if hosts != self.record.link_hosts:
            self._replace(link_hosts=hosts)
            await self._save()
            try:
                await self._write_network_files()
            except ServerError as error:
                _log.error("%s", error.message)

    # --- networks ---------------------------------------------------------------------------------

    @_whole
    async def connect(self, network: str, wanted: EndpointSettings) -> None:
        """Connect it to one more network, at once when it runs.

        Raises NotFound, Forbidden, InvalidParameter; nothing has changed then.
        """
        attachments = self.parts.attachments
        async with self.lock:
            self.check_present()
            self._check_own_network(network)
            if self.running:
                if self._process is None or self._process.exit.done():
                    raise Conflict(f"Container {self.id} is not running")
                settings = await attachments.connect(self.id, network, wanted, self._process)
            else:
                settings = attachments.check(self.id, network, wanted, self.record.networks)
            name = self.parts.networks.get(network).record.name
            attachments.reserve({name: settings})
            try:
                await self._commit_networks(self.record.networks | {name: settings})
            except EngineError:
                attachments.unreserve({name: settings})
                if self.running:
                    await attachments.disconnect(self.id, network)
                raise

    @_whole
    async def disconnect(self, network: str) -> None:
        """Disconnect it from a network, at once when it runs.

        Raises NotFound, Forbidden when it is not connected.
        """
        attachments = self.parts.attachments
        async with self.lock:
            self.check_present()
            self._check_own_network(network)
            name = attachments.check_connected(self.id, network, self.record.networks)
            if self.running:
                await attachments.disconnect(self.id, network)
            attachments.unreserve({name: self.record.networks[name]})
            left = {key: each for key, each in self.record.networks.items() if key != name}
            self._replace(networks=left, ports=attachments.ports_of(self.id))
            await self._save()
            await self._write_network_files()

    def _check_own_network(self, network: str) -> None:
        if body.joined(self.record.host.network_mode):
            raise Forbidden(
                f"network {network}: container {self.id}: "
                "container sharing network namespace with another container or host "
                "cannot be connected to any other network"
            )

    async def _commit_networks(self, networks: dict[str, EndpointSettings]) -> None:
        before = self.record
        self._replace(networks=networks, ports=self.parts.attachments.ports_of(self.id))
        try:
            await self._write_network_files()
            await self.parts.store.save(self.record)
        except EngineError:
            self._set(before)
            with contextlib.suppress(EngineError):
                await self._write_network_files()
            raise

    async def _write_network_files(self) -> None:
        """Raises ServerError."""
        record = self.record
        if self.running:
            try:
                await asyncio.to_thread(bundle.write_network_files, record, self.directory, record.networks)
            except (OSError, RuntimeError) as error:
                raise ServerError(f"container {self.id}: its hosts and resolv.conf: {error}") from error

    # --- exit -------------------------------------------------------------------------------------

    def exited(self) -> None:
        """The monitor reports that a process has ended.

        The run's own process is followed by its future; others do not concern the record.
        """
        if self._process is None and not self._starts:
            self.parts.monitor.forget(self.id)

    def _process_ended(self, process: Process, exit_future: asyncio.Future[Exit]) -> None:
        spawn(self._finish(process, exit_future.result()), f"container {self.id}: record its exit", fatal=True)

    async def _finish(self, process: Process, exit_record: Exit) -> None:
        """The run has ended: record it, and release its resources."""
        oom_killed = await self._oom_killed()
        async with self.lock:
            if self._process is process:  # otherwise its removal was faster
                await self._end_run(exit_record, oom_killed)

    async def _end_run(self, exit_record: Exit, oom_killed: bool) -> None:
        self._record_exit(exit_record, oom_killed)
        await self._tear_down()

    async def _oom_killed(self) -> bool:
        """Returns True if the kernel is known to have killed a process of the run for its memory
        limit.
        """
        host = self.record.host
        if not host.memory:
            return False
        try:
            return await asyncio.to_thread(self.parts.cgroups.oom_killed, self.id, host.cgroup_parent)
        except (OSError, RuntimeError) as error:
            _log.error("container %s: whether it ran out of memory is unknown: %s", self.id, error)
            return False

    def _record_exit(self, exit_record: Exit, oom_killed: bool) -> None:
        record, status = self.record, self.record.status
        by_user = record.stopped_by_user or bool(status.killed_by and exit_record.status == 128 + status.killed_by)
        again = not self.peers.leaving and restart.wanted(
            record.host.restart_policy, exit_record.status, record.restart_count, by_user
        )
        verb = Verb.EXIT_TO_RESTART if again else Verb.EXIT
        if oom_killed and not self._out_of_memory:
            self.publish("oom")
        self._process = None
        self._replace(
            restart_count=record.restart_count + again,
            stopped_by_user=by_user,
            status=msgspec.structs.replace(
                status,
                state=lifecycle.following(status.state, verb, self.id),
                pid=0,
                exit_code=exit_record.status,
                finished_at=exit_record.at,
                oom_killed=oom_killed,
                error="",
                killed_by=0,
            ),
        )
        if again:
            self._plan_restart(restart.delay(self._restart_delay, (exit_record.at - status.started_at) / 1e9))
        self.parts.lifecycle.rests(self)
        self.publish("die", exit_record.at, exitCode=str(exit_record.status))
        self.parts.lifecycle.ended(self)
        self._answer_waiters()

    async def _tear_down(self, *, abandoned: bool = False) -> None:
        """Release the run's resources, and make the exit durable before the monitor forgets it.

        `abandoned`: its end was not seen, so its processes may still run: the runtime kills them.
        """
        parts = self.parts
        networks = {name: configured(settings) for name, settings in self.record.networks.items()}
        record = self._replace(networks=networks, ports=())
        saved, *outcomes = await asyncio.gather(
            self._save(),
            self._end_what_is_left() if abandoned else parts.runtime.discard(self.id, self.cgroup, parts.cgroups),
            parts.snapshots.unmount(self.id),
            self._give_back(record),
            return_exceptions=True,
        )
        for outcome in (saved, *outcomes):
            if isinstance(outcome, BaseException):
                _log.error("container %s: cleaning up after its exit: %s", self.id, outcome, exc_info=outcome)
        if saved is True:
            parts.monitor.forget(self.id)

    async def _give_back(self, record: ContainerRecord) -> None:
        try:
            await self.parts.attachments.leave(self.id)
        finally:
            await self.parts.volumes.unmount(self.id, record.mounts)

    async def _end_what_is_left(self) -> None:
        await self.parts.runtime.delete(self.id)
        await launch.remove_cgroup(self.parts, self.cgroup)

    # --- restarts by the policy -------------------------------------------------------------------

    def _plan_restart(self, delay: float) -> None:
        """Start it again after that many seconds.

        A user's start, stop, kill or removal cancels this.
        """
        self._cancel_restart()
        self._restart_delay = delay
        self._restart = asyncio.get_running_loop().call_later(delay, self._restart_due)

    def _restart_due(self) -> None:
        self._restart = None
        spawn(self._start_again(), f"container {self.id}: restart")

    async def _start_again(self) -> None:
        try:
            await self.start(by_user=False)
        except (NotModified, NotFound):
            pass  # a user was faster
        except EngineError as error:
            _log.warning("container %s: restart: %s", self.id, error.message)

    def _cancel_restart(self) -> None:
        if self._restart is not None:
            self._restart.cancel()
            self._restart = None

    # --- stop, kill, restart ----------------------------------------------------------------------

    async def stop(self, timeout: float | None = None) -> None:
        """Send its stop signal, and SIGKILL after `timeout` seconds (negative: never).

        Raises NotModified when it does not run.

        The lock is not held while it ends: another stop, a kill or a removal may have a shorter
        timeout.
        """
        process = await self._begin_stop()
        if process is not None:
            await self._ended(process, self._stop_timeout if timeout is None else timeout)
        self.publish("stop")

    @_whole
    async def _begin_stop(self) -> Process | None:
        async with self.lock:
            self.check_present()
            state = lifecycle.following(self.record.status.state, Verb.STOP, self.id)
            await self._mark_stopped()
            if self._process is None:
                await self._stay_down(state)
            else:
                await self._send(self._process, self._stop_signal)
            return self._process

    async def stop_with_engine(self, timeout: float) -> None:
        """End it and its pending work; the next daemon applies its restart policy."""
        async with self.lock:
            self._cancel_restart()
            process = self._process
            if process is not None:
                await self._send(process, self._stop_signal)
        if process is not None:
            await self._ended(process, timeout)
            self.publish("stop")
        await self.settled()

    async def settled(self) -> None:
        """Wait for the end of running verbs, and of the clean-up after an exit."""
        async with self.lock:
            pass

    async def _mark_stopped(self) -> None:
        """Record that the user stopped it, also for a later daemon."""
        if not self.record.stopped_by_user:
            self._replace(stopped_by_user=True)
            if self.record.host.restart_policy.name not in ("", "no"):
                await self._save()

    async def _stay_down(self, state: State) -> None:
        """Move it from waiting for a restart to exited."""
        self._cancel_restart()
        self._move(state=state)
        self._answer_waiters()
        await self._save()

    @property
    def _stop_timeout(self) -> int:
        chosen = self.record.config.stop_timeout
        return DEFAULT_STOP_TIMEOUT if chosen is msgspec.UNSET or chosen is None else chosen

    @property
    def _stop_signal(self) -> int:
        chosen = self.record.config.stop_signal
        return signal_number(str(chosen)) if chosen is not msgspec.UNSET else 15

    async def _ended(self, process: Process, timeout: float) -> None:
        """Wait until the record shows that the process has ended; SIGKILL after `timeout` seconds
        (negative: never). Raises ServerError.
        """
        if self._process is not process:
            return
        with self._waiter() as end:
            done, _ = await asyncio.wait({end}, timeout=None if timeout < 0 else timeout)
            if not done:
                async with self.lock:
                    if self._process is process:
                        await self._send(process, _SIGKILL)
                done, _ = await asyncio.wait({end}, timeout=_KILL_GRACE)
            if not done:
                raise ServerError(f"Cannot stop container {self.id}: it did not exit {_KILL_GRACE:.0f} s after SIGKILL")

    async def _send(self, process: Process, number: int) -> None:
        """Send the signal.

        For a process that has just ended nothing is sent, and there is no event.
        """
        try:
            self.parts.monitor.signal(self.id, number)
        except NotFound:
            return
        self.publish("kill", signal=str(number))
        if self.record.status.state == State.PAUSED and number in (_SIGKILL, self._stop_signal):
            # A frozen process does not handle signals.
            with contextlib.suppress(NotFound):
                await self.parts.runtime.resume(self.id)
            self._move(state=lifecycle.following(State.PAUSED, Verb.THAW, self.id))
            self.parts.lifecycle.runs(self)
            self.publish("unpause")

    async def kill(self, number: int, *, must_run: bool = True) -> None:
        """Send the signal; SIGKILL returns when the container has ended.

        Raises ServerError when the container does not run and `must_run`.
        """
        process = await self._begin_kill(number, must_run)
        if process is not None and number == _SIGKILL:
            await self._ended(process, _KILL_GRACE)

    @_whole
    async def _begin_kill(self, number: int, must_run: bool) -> Process | None:
        async with self.lock:
            self.check_present()
            if not must_run and self.record.status.state in (State.CREATED, State.EXITED):
                return None
            state = lifecycle.following(self.record.status.state, Verb.KILL, self.id)
            if self._process is None:
                await self._mark_stopped()
                await self._stay_down(state)
                return None
            self._move(killed_by=number)
            if number in (_SIGKILL, self._stop_signal):
                await self._mark_stopped()
            await self._send(self._process, number)
            return self._process

    async def restart(self, timeout: float | None = None) -> None:
        """Stop it if it runs, then start it."""
        self.check_present()
        with self._starting():
            if self.running:
                with contextlib.suppress(NotModified):
                    await self.stop(timeout)
            with contextlib.suppress(NotModified):  # another caller was faster
                await self.start()
        self.publish("restart")

    @_whole
    async def pause(self) -> None:
        """Freeze all of its processes."""
        async with self.lock:
            self.check_present()
            state = lifecycle.following(self.record.status.state, Verb.PAUSE, self.id)
            await self._freeze(True)
            try:
                await self._commit(self._with_state(state))
            except EngineError:
                await self._freeze(False)
                raise
            self.parts.lifecycle.rests(self)
            self.publish("pause")

    @_whole
    async def unpause(self) -> None:
        async with self.lock:
            self.check_present()
            state = lifecycle.following(self.record.status.state, Verb.UNPAUSE, self.id)
            await self._freeze(False)
            self._move(state=state)
            self.parts.lifecycle.runs(self)
            await self._save()
            self.publish("unpause")

    def _with_state(self, state: State) -> ContainerRecord:
        return msgspec.structs.replace(self.record, status=msgspec.structs.replace(self.record.status, state=state))

    async def _freeze(self, freeze: bool) -> None:
        """Raises ServerError when its process has ended, though the record does not show that
        yet.
        """
        try:
            await (self.parts.runtime.pause if freeze else self.parts.runtime.resume)(self.id)
        except NotFound as error:
            raise ServerError(f"Container {self.id} is not running") from error
        if self._process is None or self._process.exit.done():
            raise ServerError(f"Container {self.id} is not running")

    @_whole
    async def update(self, change: UpdateBody, support: Support) -> list[str]:
        """Set new limits, at once when it runs, and a new restart policy; returns the warnings.

        A failure undoes everything.
        """
        async with self.lock:
            self.check_present()
            lifecycle.following(self.record.status.state, Verb.UPDATE, self.id)
            before = self.record.host
            after, warnings = update.merged(before, change, support)
            changed = update.resources(before, after, support) if self.running else None
            if changed is not None:
                try:
                    await self._apply(changed)
                except NotFound:
                    pass  # it has just ended: the next start applies the new limits
                except ServerError as error:
                    await self._take_back_limits(after, before, support)
                    raise ServerError(f"Cannot update container {self.id}: {error.message}") from error
            try:
                await self._commit(msgspec.structs.replace(self.record, host=after))
            except EngineError:
                await self._take_back_limits(after, before, support)
                raise
            if self.running and support.weighs_by_bfq and after.blkio_weight != before.blkio_weight:
                # it has just ended: the next start applies the new weight
                with contextlib.suppress(OSError):
                    weight = after.blkio_weight or support.usual_weight
                    await asyncio.to_thread(self.parts.cgroups.set_weight, self.cgroup, weight)
            self.parts.lifecycle.updated(self)
            self.publish("update")
            return warnings

    async def _take_back_limits(self, after: HostConfig, before: HostConfig, support: Support) -> None:
        back = update.resources(after, before, support)
        with contextlib.suppress(EngineError):
            if self.running and back is not None:
                await self._apply(back)

    async def _apply(self, resources: oci_wire.Resources) -> None:
        cpu = resources.cpu
        if cpu is not None and cpu.quota == update.NO_QUOTA:
            try:
                await asyncio.to_thread(self.parts.cgroups.lift_quota, self.cgroup)
            except OSError as error:
                # otherwise it has just ended: the runtime reports that
                if error.errno not in (errno.ENOENT, errno.ENODEV):
                    raise ServerError(f"its CPU quota cannot be taken away: {error.strerror}") from error
        await self.parts.runtime.update(self.id, resources)

    @_whole
    async def resize(self, rows: int, columns: int) -> None:
        """Terminal size, now and for the next start. Without a terminal only the event.

        Raises ServerError when it does not run; the size is kept even then, because clients send it
        before the start.
        """
        async with self.lock:
            self.check_present()
            if self.record.size != (rows, columns):
                await self._commit(msgspec.structs.replace(self.record, size=(rows, columns)))
            lifecycle.following(self.record.status.state, Verb.RESIZE, self.id)
            if self.record.config.tty:
                await self.parts.monitor.resize(self.id, rows, columns)
            self.publish("resize", height=str(rows), width=str(columns))

    # --- remove -----------------------------------------------------------------------------------

    async def remove(self, *, force: bool, volumes: bool = False) -> None:
        """Delete it with its files, and with `volumes` its anonymous volumes that no other
        container uses.
        """
        deleted: list[str] = []
        try:
            await self._remove(force, volumes, deleted)
        finally:
            # Nothing is awaited between this and the reply, so the reply is written first. A docker
            # CLI that removes its container itself (`run --rm` below 1.25) aborts its request at
            # this event.
            if deleted:
                self.publish("destroy")

    @_whole
    async def _remove(self, force: bool, volumes: bool, deleted: list[str]) -> None:
        """`deleted` gets the id once the row is deleted, even if later steps fail."""
        async with self.lock:
            self.check_present()
            verb = Verb.REMOVE_BY_FORCE if force else Verb.REMOVE
            state = lifecycle.following(self.record.status.state, verb, self.id)
            if self._process is not None:
                await self._kill_and_record(self._process)
            before = self.record
            self._move(state=state)
            try:
                await self._delete(volumes)
            except EngineError:
                if not self.removed:
                    self._set(before)
                raise
            deleted.append(self.id)
            self._cancel_restart()
            self._answer_waiters()
            self.parts.monitor.drop(self.id)
            outcomes = await asyncio.gather(
                self.parts.snapshots.remove(self.id),
                asyncio.to_thread(remove_tree, self.directory),
                return_exceptions=True,
            )
            for error in outcomes:
                if isinstance(error, BaseException):  # the next daemon sweeps the rest
                    raise ServerError(
                        f"container {self.id} is removed, but some of its files are left: {error}"
                    ) from error

    async def _kill_and_record(self, process: Process) -> None:
        """End the process and record its exit.

        The lock is held, so `_finish` waits and finds this done.
        """
        self._replace(stopped_by_user=True)
        await self._send(process, _SIGKILL)
        await asyncio.wait({process.exit}, timeout=_KILL_GRACE)
        if not process.exit.done():
            raise ServerError(f"Cannot stop container {self.id}: it did not exit {_KILL_GRACE:.0f} s after SIGKILL")
        await self._end_run(process.exit.result(), await self._oom_killed())

    async def _delete(self, volumes: bool) -> None:
        record = self.record
        named = mount_points.named_volumes(record.host)
        async with self.parts.volumes.leave(self.id, record.mounts, named, anonymous=volumes) as changes:
            await self.parts.store.delete(self.id, *changes)
            self.removed = True
            self.peers.removed(self)

    # --- boot -------------------------------------------------------------------------------------

    async def restore(self, on_host: bool) -> None:
        """Correct the record by the monitor's report: running, ended meanwhile, or gone after a
        reboot.

        `on_host`: its root is mounted or its control group exists. If nothing runs, a crash
        interrupted a start or a clean-up.
        """
        async with self.lock:
            parts, status = self.parts, self.record.status
            process = parts.monitor.processes.get(self.id)
            ended = parts.monitor.exits.pop(self.id, None)
            abandoned = False
            if ended is not None and ended.at == status.finished_at:
                # The row has the exit; the run's resources may not have been released.
                ended, on_host = None, True
            if process is not None or ended is not None:
                self._process = process
                state = lifecycle.following(status.state, Verb.FOUND, self.id)
                pid = process.pid if process is not None else 0
                if status.state in _RUNNING:
                    self._move(pid=pid)
                else:
                    self._move(state=state, pid=pid, started_at=time.time_ns(), error="")
                    await self._save()
                parts.volumes.resume(self.id, self.record.mounts)
                if process is not None:
                    await self._restore_networks(process)
                    process.exit.add_done_callback(functools.partial(self._process_ended, process))
                    return
                assert ended is not None
                self._record_exit(ended, await self._oom_killed())
            elif status.state in _RUNNING:
                _log.warning("container %s was running when the host or the monitor went away", self.id)
                self._record_exit(Exit(status=255, at=time.time_ns()), False)
                abandoned = True
            elif on_host or any(endpoint.ip_address for endpoint in self.record.networks.values()):
                abandoned = True
            else:
                return
        spawn(self._clean_up(abandoned), f"container {self.id}: clean up after its last run")

    async def _restore_networks(self, process: Process) -> None:
        record = self.record
        await self.parts.attachments.restore(
            *(self.id, record.name, record.networks, process),
            *(record.host.dns, launch.wanted_ports(record), record.ports),
        )

    async def _clean_up(self, abandoned: bool) -> None:
        async with self.lock:
            if self._process is None and not self.removed:
                await self._tear_down(abandoned=abandoned)

    def start_at_boot(self) -> None:
        """Apply its restart policy when the engine starts and it does not run.

        A planned restart is due.
        """
        record = self.record
        state = record.status.state
        wanted = state == State.RESTARTING or (
            state == State.EXITED
            and restart.wanted_at_boot(
                *(record.host.restart_policy, record.status.exit_code, record.restart_count, record.stopped_by_user)
            )
        )
        if wanted:
            starting = contextlib.ExitStack()
            # now: containers that depend on it are started at the same time
            starting.enter_context(self._starting())
            spawn(self._boot(starting), f"container {self.id}: start at boot")

    async def _boot(self, starting: contextlib.ExitStack) -> None:
        with starting:
            async with self.lock:
                if self.record.status.state not in (State.RESTARTING, State.EXITED):
                    return
                self._cancel_restart()
                self._move(state=lifecycle.following(self.record.status.state, Verb.BOOT, self.id))
            await self._start_again()
