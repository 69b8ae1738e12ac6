"""One container and its lifecycle: start, exit, restart by the policy, stop, kill, pause. The
record with its lock, and the ways to change it.

`Container.record` is a frozen struct that is replaced whole, and only by a holder of `lock` (`put`
asserts it). A reader takes no lock: all that clients read is made of one record. A verb holds the
lock from its decision until the record shows the outcome. Waiting for a process to end is done
without it, so that a kill can overtake a stop; only a removal keeps it, and takes the exit itself.

There are two kinds of change. `commit` is for a change that exists only once its row is written.
`save` is for one that has happened already, such as an exit; it is repeated until it succeeds.

A verb that has begun is completed even when its caller is cancelled (`threads.whole`), so a client
that leaves does not leave half a change. Only waiting can be cancelled: for a peer's start, for a
process to end.

A process and its end come from the monitor: `Process.exit` is resolved, `_finish` takes the lock,
records the exit, resolves waiting calls, and releases the run's resources before the next verb
takes the lock. No holder of one container's lock waits for another container.

Not here: changes of its settings (`settings.py`), its removal (`removal.py`), what the daemon finds
of it at boot (`boot.py`), what a start makes and an end releases (`launch.py`), the table of
containers (`containers.py`), list and inspect (`views.py`), reading from a container (`logs.py`,
`stats.py`, `top.py`, `mounted.py`, `archive.py`, `streams.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from engine import metrics
from engine.common.signals import signal_number
from engine.containers import body, launch, lifecycle, log_plan, removal, restart
from engine.containers.extra_mounts import ExtraMount
from engine.containers.lifecycle import State, Verb
from engine.containers.parts import Parts
from engine.containers.store import ContainerRecord, Status
from engine.containers.waiting import Condition, Ended, Ends, Starts
from engine.errors import (
    Conflict,
    EngineError,
    Forbidden,
    InvalidParameter,
    NotAttachable,
    NotFound,
    NotModified,
    ServerError,
    WrongState,
    words,
)
from engine.monitor.handles import Exit, LaunchFailed, LogReading, Process
from engine.networks.endpoints import configured
from engine.runtime import oci
from engine.storage.records import Change
from engine.system.observers import Observers
from engine.system.tasks import spawn
from engine.system.threads import whole

_log = logging.getLogger(__name__)

DEFAULT_STOP_TIMEOUT = 10
"""Default seconds that a stop and a restart wait before SIGKILL."""

RUNNING = (State.RUNNING, State.PAUSED)
_SIGKILL = 9
_KILL_GRACE = 10.0
"""Seconds to wait for the end of a process after SIGKILL."""
_THAW_AFTER = 1.0
"""Seconds after SIGKILL until a process that is still there is thawed."""
_PEERS_WAIT = 10.0
"""Seconds that a start waits for a container on which it depends and which is about to start."""
_RECORDED = 1.0
"""Seconds to wait for the record of an end that has happened. A verb may hold the lock."""
_SAVE_PAUSE = 1.0
"""Seconds until saving a record is tried again."""

_START_FAILURES = (EngineError, OSError, RuntimeError)
"""Errors of a start. Python raises RuntimeError when a thread cannot be started."""


@dataclass(frozen=True)
class Lifecycle:
    """Observers of containers.

    Each observer is called on the event loop, after the record has changed.
    """

    runs: Observers[[Container]] = field(default_factory=lambda: Observers("container runs"))
    """Its processes begin to run: start, unpause."""
    started: Observers[[Container]] = field(default_factory=lambda: Observers("container started"))
    """It has started, and the event `start` has been published; called after `runs`."""
    rests: Observers[[Container]] = field(default_factory=lambda: Observers("container rests"))
    """Its processes stop running: exit, pause."""
    updated: Observers[[Container]] = field(default_factory=lambda: Observers("container updated"))
    """Its limits have changed."""
    ended: Observers[[Container]] = field(default_factory=lambda: Observers("container ended"))
    """Its run has ended; called after `rests`.

    After a start that failed past `runs`, only `rests` is called.
    """
    health: Observers[[Container]] = field(default_factory=lambda: Observers("container health"))
    """Its health has another status by its own test."""
    gone: Observers[[Container]] = field(default_factory=lambda: Observers("container gone"))
    """It has been removed."""


class Peers(Protocol):
    """The interface through which one container uses the others."""

    lifecycle: Lifecycle

    generation: int
    """Increased with every change of any container that replies show."""

    ending: set[Container]
    """Containers whose process has ended, while their record does not show it yet."""

    @property
    def leaving(self) -> bool:
        """The engine is stopping its containers: restart policies no longer apply."""

    def get(self, text: str) -> Container:
        """By id, name or unique prefix. Raises NotFound."""

    def names_by_link(self, child: str) -> Iterable[str]:
        """`/parent/alias` for every link to the child."""

    async def relink(self, child: str) -> None:
        """That container has started: update its address in the containers linked to it."""

    def renaming(self, container: Container, name: str) -> AbstractContextManager[None]:
        """Reserve the new name while its row is written; then release the old one.

        The caller holds the container's lock. Raises Conflict.
        """

    def host_changed(self, container: Container, before: ContainerRecord) -> None:
        """It has another HostConfig; links and networks may differ from the record `before`."""

    def unlinked(self, container: Container, child: str) -> None:
        """Its link to the container of that id was removed."""

    def removed(self, container: Container) -> None:
        """Its row is gone."""


class Container:
    """One container. `record` may be read at any time; verbs are coroutines."""

    __slots__ = (
        "_ends",
        "_out_of_memory",
        "_removals",
        "_starts",
        "_unsaved",
        "extra_mounts",
        "generation",
        "lock",
        "parts",
        "peers",
        "planned",
        "process",
        "record",
        "removed",
        "restarting",
        "start_cut",
        "stubs",
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
        self.restarting = 0
        """Restarts by clients that wait for its end: its AutoRemove does not apply to that."""
        self.start_cut = False
        """An earlier daemon ended during its only start."""
        self.extra_mounts: tuple[ExtraMount, ...] = ()
        """Mounts of the next start besides those of the record."""
        self.stubs: tuple[str, ...] = ()
        """Mount points that were made in its root: see `Ingest.stubs`."""
        self.process: Process | None = None
        """The process of its run; None as soon as the record shows the exit."""
        self._out_of_memory = False
        """The event `oom` of this run has been published."""
        self._ends = Ends()
        self._removals = Ends()
        self._starts = Starts()
        self.planned = restart.Planned(self._restart_due)
        """In state RESTARTING: the next start."""
        self._unsaved: asyncio.Task[None] | None = None
        """The task that saves the record again after a failure."""

    # --- what it shows ----------------------------------------------------------------------------

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def running(self) -> bool:
        return self.record.status.state in RUNNING

    @property
    def starts(self) -> bool:
        """A start is in progress, or is planned by its restart policy."""
        return len(self._starts) > 0 or self.record.status.state == State.RESTARTING

    @property
    def ending(self) -> bool:
        """Its process has ended, and the record does not show that yet."""
        return self in self.peers.ending or (self.process is not None and self.process.exit.done())

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
        """The newest file of its log; None if the log cannot be read."""
        return log_plan.path(self.parts.config, self.record)

    @property
    def log_delivered(self) -> bool:
        """Its lines go to a remote target."""
        return log_plan.delivered(self.record)

    @property
    def log_dropped(self) -> int:
        """Lines of its last run that could not be written to its log."""
        return self.parts.monitor.dropped.get(self.id, 0)

    def log_reading(self) -> LogReading | None:
        """For a reader of the log. None when the log is not rotated meanwhile."""
        return self.parts.monitor.read_log(self.id) if self.running else None

    @property
    def cgroup(self) -> str:
        """Its control group, from the root of each hierarchy."""
        return launch.cgroup_of(self.record)

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
            {**record.config.labels, **attributes, "image": record.config.image, "name": record.name},
            at,
        )

    def out_of_memory(self) -> None:
        """The kernel reports that its memory limit was reached."""
        if self.running:
            self._out_of_memory = True
            self.publish("oom")

    def wait(self, condition: Condition = Condition.NOT_RUNNING) -> asyncio.Future[Ended]:
        """The end that the condition names. A caller that no longer waits cancels it.

        `not-running` is met at once when it does not run. A container that waits for its restart
        counts as running, and each exit of its process as an end, as in Docker.
        """
        if condition is Condition.REMOVED:
            return self._removals.next()
        end = self._ends.next()
        if condition is Condition.NOT_RUNNING and not self._may_end:
            end.set_result(Ended(self.record.status.exit_code))
        return end

    @property
    def _may_end(self) -> bool:
        return self.running or self.record.status.state == State.RESTARTING or len(self._starts) > 0

    async def end_recorded(self) -> None:
        """Wait until the record shows an end that has happened. The monitor reports an exit before
        it ends the streams of attached clients, and a client may ask as soon as its stream ends.
        """
        if self.ending:
            end = self._ends.next()
            try:
                await asyncio.wait({end}, timeout=_RECORDED)
            finally:
                end.cancel()

    def _answer_waiting(self) -> None:
        self._ends.answer(Ended(self.record.status.exit_code))

    # --- the record -------------------------------------------------------------------------------

    def put(self, record: ContainerRecord) -> ContainerRecord:
        """Replace the record. The caller holds the lock, and makes the change durable."""
        assert self.lock.locked(), "a record is changed by the holder of its container's lock"
        self.record = record
        self.touch()
        return record

    def replace(self, **changes: object) -> ContainerRecord:
        """Set fields of the record, likewise."""
        return self.put(msgspec.structs.replace(self.record, **changes))

    def move(self, **changes: object) -> ContainerRecord:
        """Set fields of the record's status, likewise."""
        return self.replace(status=msgspec.structs.replace(self.record.status, **changes))

    def touch(self) -> None:
        """Invalidate cached replies after a visible change."""
        self.generation += 1
        self.peers.generation += 1

    async def save(self) -> bool:
        """Save a change that has happened already.

        Returns False on failure; saving is then repeated until it succeeds.
        """
        assert self.lock.locked()
        try:
            await self.parts.store.save(self.record)
        except EngineError as error:
            _log.error("container %s: its record cannot be saved; trying again: %s", self.id, error.message)
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

    def gone(self) -> None:
        """It has been removed: nothing is started or waited for any more."""
        self.planned.cancel()
        self.peers.ending.discard(self)
        self._answer_waiting()

    def answer_removal(self, why: str = "") -> None:
        """It has been removed with its files, or could not be: calls that wait for it return."""
        self._removals.answer(Ended(self.record.status.exit_code, why))

    async def commit(self, record: ContainerRecord, *more: Change) -> None:
        """A change whose row is its commit point, with `more` in one transaction.

        On failure the record is as before.
        """
        before = self.record
        self.put(record)
        try:
            await self.parts.store.save(record, *more)
        except BaseException:
            self.put(before)
            raise

    # --- start ------------------------------------------------------------------------------------

    async def start(self, *, by_user: bool = True) -> None:
        """Run it.

        Raises NotModified when it runs; a failure undoes everything and sets `State.Error` to the
        reason.
        """
        await self.end_recorded()
        self.check_present()
        lifecycle.following(self.record.status.state, Verb.START, self.id)
        began = time.monotonic()
        with self.starting():
            for peer in self._builds_on():
                await self._starts.wait_for(peer._starts, _PEERS_WAIT)
            await self._start(by_user)
        metrics.CONTAINER_ACTIONS.since("start", began)

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """A start is in progress or certain to come: containers that depend on this one wait for
        it, and so do `wait` calls.
        """
        try:
            with self._starts.one():
                yield
        finally:
            if self.process is None:
                self.peers.ending.discard(self)  # the start failed after its process had ended
            if not self._may_end:
                self._answer_waiting()

    def _builds_on(self) -> Iterator[Container]:
        """Containers on which it depends: at boot, or when `docker-compose restart` restarts a
        whole project, they are about to start.
        """
        host = self.record.host
        names = [body.joined(mode) for mode in (host.network_mode, host.pid_mode, host.ipc_mode)]
        for name in (*filter(None, names), *self.record.links.values()):
            with contextlib.suppress(NotFound, InvalidParameter):
                yield self.peers.get(name)

    @whole
    async def _start(self, by_user: bool) -> None:
        async with self.lock:
            self.check_present()
            state = lifecycle.following(self.record.status.state, Verb.START, self.id)
            if self.record.status.started_at and self.parts.store.transient(self.id):
                raise Conflict(f"Container {self.id} was made for one run of an image build, which has ended")
            if not by_user and (self.record.status.state != State.RESTARTING or self.peers.leaving):
                raise NotModified(f"Container {self.id} was stopped before its restart")
            self.planned.cancel()
            if by_user:
                self.planned.reset()
                self.replace(restart_count=0)
            before = self.record
            try:
                process = await self._launch(state)
            except _START_FAILURES as error:
                raise await self._start_failed(before, error, by_user) from error
            self.follow(process)
            self.publish("start", self.record.status.started_at)
            self.peers.lifecycle.started(self)
        await self.peers.relink(self.id)

    async def _launch(self, state: State) -> Process:
        """The process of the new run.

        Its row is the commit point: when it cannot be saved, the process is killed.
        """
        before = self.record
        begun = time.time_ns()  # no line of the log is older: clients read it from StartedAt on
        # Not for a second start, even if this one fails: their sources are open for this one alone.
        extra, self.extra_mounts = self.extra_mounts, ()
        async with launch.launch(before, self.parts, self.peers.get, extra) as launched:
            process = launched.process
            self.stubs += launched.stubs
            status = Status(state=state, pid=process.pid, started_at=begun)
            self.put(msgspec.structs.replace(launched.record, status=status, stopped_by_user=False))
            self.process = process
            self._out_of_memory = False
            self.peers.lifecycle.runs(self)
            try:
                await self.parts.store.save(self.record)
            except BaseException:
                self.process = None
                self.put(before)
                self.peers.lifecycle.rests(self)
                raise
        return process

    async def _start_failed(self, before: ContainerRecord, error: Exception, by_user: bool) -> EngineError:
        """Record a failed start; returns the error for the client."""
        self.put(before)
        if not by_user and isinstance(error, LaunchFailed) and error.interrupted:
            # The monitor died, which is not the container's fault: its restart policy applies.
            self.planned.plan(ran=0)
            await self.save()
            return error
        failure, exit_code = self._failure(error)
        state = lifecycle.following(before.status.state, Verb.FAIL, self.id)
        self.move(state=state, error=failure.message, exit_code=exit_code)
        await self.save()
        # As in Docker: a client that attached before the start gets the end, and `docker run --rm`
        # waits for this event.
        self.parts.monitor.drop(self.id)
        self.publish("die", exitCode=str(exit_code))
        await removal.after_failed_start(self)
        return failure

    def _failure(self, error: Exception) -> oci.Failure:
        """The client's error for a failed start, and the exit code to keep.

        A start has no 403, except for a network of a swarm that refuses the container.
        """
        if isinstance(error, LaunchFailed):
            limits = [each.soft for each in self.record.host.ulimits or () if each.name == "nofile"]
            return oci.start_failure(error.reason, self.record.path, files=limits[0] if limits else -1)
        if not isinstance(error, EngineError):
            error = ServerError(f"Cannot start container {self.id}: {words(error)}")
        if isinstance(error, Forbidden) and not isinstance(error, NotAttachable):
            error = ServerError(error.message)
        return oci.Failure(error, oci.failure_code(error.message))

    # --- exit -------------------------------------------------------------------------------------

    def exited(self) -> None:
        """The monitor reports that a process has ended.

        The run's own process is followed by its future; others do not concern the record.
        """
        if self.process is None and not self._starts:  # no run, and none is being made
            self.parts.monitor.forget(self.id)
        else:
            self.peers.ending.add(self)

    def follow(self, process: Process) -> None:
        """Record the exit of this process, which is its run's, when it comes."""
        process.exit.add_done_callback(functools.partial(self._process_ended, process))
        launch.end_with(process, self.record, self.parts)

    def _process_ended(self, process: Process, exit_future: asyncio.Future[Exit]) -> None:
        spawn(self._finish(process, exit_future.result()), f"container {self.id}: record its exit", fatal=True)

    async def _finish(self, process: Process, exit_record: Exit) -> None:
        """The run has ended: record it, and release its resources."""
        oom_killed = await launch.oom_killed(self.record, self.parts)
        async with self.lock:
            if self.process is process:  # otherwise its removal was faster
                await self._end_run(exit_record, oom_killed)

    async def _end_run(self, exit_record: Exit, oom_killed: bool) -> None:
        self.record_exit(exit_record, oom_killed)
        await self.release_run()

    def record_exit(self, exit_record: Exit, oom_killed: bool) -> None:
        """The state that follows, its events, and a restart if the policy wants one. `release_run`
        makes it durable. The caller holds the lock.
        """
        record, status = self.record, self.record.status
        by_user = record.stopped_by_user or bool(status.killed_by and exit_record.status == 128 + status.killed_by)
        again = not self.peers.leaving and restart.wanted(
            record.host.restart_policy, exit_record.status, record.restart_count, by_user
        )
        verb = Verb.EXIT_TO_RESTART if again else Verb.EXIT
        if oom_killed and not self._out_of_memory:
            self.publish("oom")
        # systemd removes a cgroup at once, perhaps before its count could be read.
        oom_killed = oom_killed or (record.cgroup_driver == "systemd" and self._out_of_memory)
        self.process = None
        self.peers.ending.discard(self)
        self.replace(
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
            self.planned.plan(ran=(exit_record.at - status.started_at) / 1e9)
        self.peers.lifecycle.rests(self)
        ran = max(0, exit_record.at - status.started_at) // 1_000_000_000
        self.publish("die", exit_record.at, exitCode=str(exit_record.status), execDuration=str(ran))
        self.peers.lifecycle.ended(self)
        self._answer_waiting()

    async def release_run(self, *, abandoned: bool = False) -> None:
        """Release the run's resources, and make the exit durable before the monitor forgets it. The
        caller holds the lock.

        `abandoned`: its end was not seen, so its processes may still run: the runtime kills them.
        """
        networks = {name: configured(settings) for name, settings in self.record.networks.items()}
        record = self.replace(networks=networks, ports=())
        saved, _ = await asyncio.gather(self.save(), launch.release(record, self.parts, abandoned=abandoned))
        if saved:
            self.parts.monitor.forget(self.id)

    def _restart_due(self) -> None:
        spawn(self.start_by_policy(), f"container {self.id}: restart")

    async def start_by_policy(self) -> None:
        """The restart that was planned. A failure is logged."""
        try:
            await self.start(by_user=False)
        except (NotModified, NotFound):
            pass  # a user was faster
        except EngineError as error:
            _log.warning("container %s: restart: %s", self.id, error.message)

    # --- stop, kill, restart ----------------------------------------------------------------------

    async def stop(self, timeout: float | None = None, number: int | None = None) -> None:
        """Send its stop signal, or that of `number`, and SIGKILL after `timeout` seconds (negative:
        never).

        Raises NotModified when it does not run.

        The lock is not held while it ends: another stop, a kill or a removal may have a shorter
        timeout.
        """
        process = await self._begin_stop(number)
        if process is not None:
            await self._ended(process, self._stop_timeout if timeout is None else timeout)
        self.publish("stop")

    @whole
    async def _begin_stop(self, number: int | None) -> Process | None:
        async with self.lock:
            self.check_present()
            state = lifecycle.following(self.record.status.state, Verb.STOP, self.id)
            await self._mark_stopped()
            if self.process is None:
                await self._stay_down(state)
            else:
                await self._send(self.process, number or self._stop_signal, fatal=True)
            return self.process

    async def stop_with_engine(self, timeout: float) -> None:
        """End it and its pending work; the next daemon applies its restart policy.

        `timeout` is a limit: a container with a shorter StopTimeout of its own is killed sooner.
        """
        async with self.lock:
            self.planned.cancel()
            process = self.process
            if process is not None:
                await self._send(process, self._stop_signal, fatal=True)
        if process is not None:
            own = self.record.config.stop_timeout
            await self._ended(process, min(timeout, own) if isinstance(own, int) and own >= 0 else timeout)
            self.publish("stop")
        await self.settled()

    async def settled(self) -> None:
        """Wait for the end of running verbs, and of the clean-up after an exit."""
        async with self.lock:
            pass

    async def _mark_stopped(self) -> None:
        """Record that the user stopped it, also for a later daemon."""
        if not self.record.stopped_by_user:
            self.replace(stopped_by_user=True)
            if self.record.host.restart_policy.name not in ("", "no"):
                await self.save()

    async def _stay_down(self, state: State) -> None:
        """Move it from waiting for a restart to exited."""
        self.planned.cancel()
        self.move(state=state)
        self._answer_waiting()
        await self.save()

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
        if self.process is not process:
            return
        end = self._ends.next()
        try:
            done, _ = await asyncio.wait({end}, timeout=None if timeout < 0 else timeout)
            if not done:
                async with self.lock:
                    if self.process is process:
                        await self._send(process, _SIGKILL)
                await self._killed(end)
        finally:
            end.cancel()

    async def _killed(self, end: asyncio.Future[Any]) -> None:
        """Wait for `end`, which follows from SIGKILL. Raises ServerError.

        Under v1 a frozen process does not end. It may be frozen although the record says that it
        runs: a daemon was killed during a pause.
        """
        done, _ = await asyncio.wait({end}, timeout=_THAW_AFTER)
        if not done:
            with contextlib.suppress(EngineError):
                await self._runtime.resume(self.id)
            done, _ = await asyncio.wait({end}, timeout=_KILL_GRACE)
        if not done:
            raise ServerError(f"Cannot stop container {self.id}: it did not exit {_KILL_GRACE:.0f} s after SIGKILL")

    async def kill_and_record(self) -> None:
        """End its process, if it runs, and record the exit. For a removal, which holds the lock
        meanwhile: `_finish` waits for it, and finds this done.
        """
        process = self.process
        if process is None:
            return
        self.replace(stopped_by_user=True)
        await self._send(process, _SIGKILL)
        await self._killed(process.exit)
        await self._end_run(process.exit.result(), await launch.oom_killed(self.record, self.parts))

    async def _send(self, process: Process, number: int, *, fatal: bool = False) -> None:
        """Send the signal. `fatal`: it is to end the process, so a paused one is thawed.

        For a process that has just ended nothing is sent, and there is no event.
        """
        try:
            self.parts.monitor.signal(self.id, number)
        except NotFound:
            return
        self.publish("kill", signal=str(number))
        if self.record.status.state == State.PAUSED and (fatal or number in (_SIGKILL, self._stop_signal)):
            # A frozen process does not handle signals.
            with contextlib.suppress(NotFound):
                await self._runtime.resume(self.id)
            self.move(state=lifecycle.following(State.PAUSED, Verb.THAW, self.id))
            self.peers.lifecycle.runs(self)
            self.publish("unpause")
            await self.save()

    async def kill(self, number: int, *, must_run: bool = True) -> None:
        """Send the signal; SIGKILL returns when the container has ended.

        Raises ServerError when the container does not run and `must_run`.
        """
        process = await self._begin_kill(number, must_run)
        if process is not None and number == _SIGKILL:
            await self._ended(process, _THAW_AFTER)

    @whole
    async def _begin_kill(self, number: int, must_run: bool) -> Process | None:
        async with self.lock:
            self.check_present()
            if not must_run and self.record.status.state in (State.CREATED, State.EXITED):
                return None
            state = lifecycle.following(self.record.status.state, Verb.KILL, self.id)
            if self.process is None:
                await self._mark_stopped()
                await self._stay_down(state)
                return None
            self.move(killed_by=number)
            if number in (_SIGKILL, self._stop_signal):
                await self._mark_stopped()
            await self._send(self.process, number)
            return self.process

    async def restart(self, timeout: float | None = None, number: int | None = None) -> None:
        """Stop it if it runs, as `stop` does, then start it."""
        self.check_present()
        with self.starting():
            if self.running:
                self.restarting += 1
                try:
                    with contextlib.suppress(NotModified):
                        await self.stop(timeout, number)
                except BaseException:
                    self.restarting -= 1
                    removal.automatically(self)  # it may have ended, and is not started again
                    raise
                self.restarting -= 1
            with contextlib.suppress(NotModified):  # another caller was faster
                await self.start()
        self.publish("restart")

    @whole
    async def pause(self) -> None:
        """Freeze all of its processes."""
        async with self.lock:
            self.check_present()
            state = lifecycle.following(self.record.status.state, Verb.PAUSE, self.id)
            await self._freeze(True)
            try:
                await self.commit(self._with_state(state))
            except EngineError:
                await self._freeze(False)
                raise
            self.peers.lifecycle.rests(self)
            self.publish("pause")

    @whole
    async def unpause(self) -> None:
        async with self.lock:
            self.check_present()
            state = lifecycle.following(self.record.status.state, Verb.UNPAUSE, self.id)
            await self._freeze(False)
            self.move(state=state)
            self.peers.lifecycle.runs(self)
            await self.save()
            self.publish("unpause")

    def _with_state(self, state: State) -> ContainerRecord:
        return msgspec.structs.replace(self.record, status=msgspec.structs.replace(self.record.status, state=state))

    @property
    def _runtime(self) -> oci.Runtime:
        return launch.runtime_of(self.record, self.parts)

    async def _freeze(self, freeze: bool) -> None:
        """Raises WrongState when its process has ended, though the record does not show that
        yet.
        """
        try:
            await (self._runtime.pause if freeze else self._runtime.resume)(self.id)
        except NotFound as error:
            raise WrongState(f"Container {self.id} is not running") from error
        if self.process is None or self.process.exit.done():
            raise WrongState(f"Container {self.id} is not running")
