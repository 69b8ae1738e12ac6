"""One container, and all of them: verbs that consult the lifecycle table, call the adapters, undo on failure and publish events.

A verb holds the container's lock while it decides and acts; a reader never does: `Container.record` is a frozen struct that is replaced
whole, and everything that clients read is made from it. Running truth is the monitor's: `exited` is its word that a process has ended.

Not here: what a body may say (`create.py`), how a record is shown (`views.py`), bytes of streams (`streams.py`, the monitor).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine.config import Config as EngineConfig
from engine.containers import bundle, create, joins, lifecycle, limits, logs, mounted, restart, top, update
from engine.containers.create import Link
from engine.containers.lifecycle import State, Verb
from engine.containers.names import Names, checked_name
from engine.containers.signals import signal_number
from engine.containers.stats import Down, Statistics
from engine.containers.store import ContainerRecord, ContainerStore, Health, Status
from engine.errors import Conflict, EngineError, Forbidden, InvalidParameter, NotFound, NotModified, ServerError
from engine.events import EventLog
from engine.images.store import ImageStore, ImageUser
from engine.logs import drivers
from engine.monitor.client import Exit, LaunchFailed, LogReading, Monitor
from engine.monitor.messages import LogFile
from engine.networks.network import HOST, NONE, PREDEFINED_NAMES
from engine.networks.networks import Joined, Networks, asked_for
from engine.networks.publishing import Request
from engine.runtime import cgroups, oci
from engine.runtime.cgroups import Cgroups, Support
from engine.runtime.migration import Migration
from engine.runtime.oci import Runtime
from engine.storage.overlay import OverlaySnapshots
from engine.system import trees
from engine.system.files import remove_tree
from engine.system.threads import uninterrupted
from engine.volumes.store import VolumeStore
from engine.wire import oci as oci_wire
from engine.wire.containers import (
    Config,
    CreateBody,
    Created,
    EndpointSettings,
    HostConfig,
    MountPoint,
    NetworkingConfig,
    UpdateBody,
)
from engine.wire.stats import ProcessList

_log = logging.getLogger(__name__)

DEFAULT_STOP_TIMEOUT = 10
"""Seconds (clients.md, choice 7)."""

STATISTICS_PAUSE = 1.0
"""Seconds between the empty statistics of a container that does not run."""

ROOT = "root"
"""Below RUN: where the runtime finds the root of the container that it makes. Each has a mount namespace of its own, and no other root in it."""
_RUNNING = (State.RUNNING, State.PAUSED)
_KILL_GRACE = 10.0
_PEERS_WAIT = 10.0


@dataclass(frozen=True)
class Parts:
    """What containers stand on."""

    config: EngineConfig
    store: ContainerStore
    images: ImageStore
    snapshots: OverlaySnapshots
    networks: Networks
    volumes: VolumeStore
    monitor: Monitor
    runtime: Runtime
    cgroups: Cgroups
    migration: Migration
    events: EventLog
    statistics: Statistics
    running_changed: Callable[[Container, bool], None] = lambda container, runs: None
    """Told when a container's processes begin to run (start, unpause), and when they no longer do (exit, pause)."""
    gone: Callable[[str], None] = lambda container_id: None
    """Told when a container has been removed."""


class Container:
    """One container. `record` may be read at any time; verbs are coroutines."""

    __slots__ = (
        "_early_exit",
        "_killed_by",
        "_launching",
        "_leaving",
        "_parts",
        "_peers",
        "_restart",
        "_restart_delay",
        "_returning",
        "_teardown",
        "_waiters",
        "encoded",
        "lock",
        "record",
        "removed",
    )

    def __init__(self, parts: Parts, record: ContainerRecord, peers: Containers) -> None:
        self._parts = parts
        self._peers = peers
        self.record = record
        self.lock = asyncio.Lock()
        self.removed = False
        self.encoded: dict[tuple[str, object], tuple[bytes, int]] = {}
        """Replies made from `record` and until when (ns) they hold, dropped when it is replaced; the API's to fill."""
        self._waiters: list[asyncio.Future[int]] = []
        self._teardown: asyncio.Task[None] | None = None
        self._launching = False
        self._early_exit: Exit | None = None
        self._leaving = False
        """The engine stops: no restart here, though the next daemon may think otherwise."""
        self._killed_by = 0
        """The last signal that a user's kill sent to this run."""
        self._restart: asyncio.Task[None] | None = None
        self._restart_delay = 0.0
        self._returning: asyncio.Event | None = None
        """Set at the end of a restart that a user asked for and that is under way."""

    # --- what is known ------------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def running(self) -> bool:
        return self.record.status.state in _RUNNING

    @property
    def directory(self) -> Path:
        """Log, hosts, hostname, resolv.conf and bundle."""
        return self._parts.config.root / "containers" / self.record.id

    @property
    def snapshots(self) -> OverlaySnapshots:
        """Where its root is kept, under its id."""
        return self._parts.snapshots

    @contextlib.asynccontextmanager
    async def mounted(self) -> AsyncIterator[list[mounted.Mounted]]:
        """What a start mounts over its root, outermost first: volumes, binds, network files. They are there for as long as the context lasts."""
        record = self.record
        owner = self.directory
        if joined := create.joined(record.host.network_mode):
            with contextlib.suppress(EngineError):
                owner = self._peers.get(joined).directory
        written = await asyncio.to_thread(bundle.network_files, owner)
        sources = {target: mounted.Source(path, target, True) for target, path in written.items()}
        async with self._parts.volumes.opened(self.id, record.mounts) as opened:
            for point, source in opened:
                bind = "" if isinstance(point.name, str) else point.source
                sources[point.destination] = mounted.Source(source, point.destination, point.rw, bind)
            process = self._parts.monitor.processes.get(self.id)
            cloning = asyncio.ensure_future(asyncio.to_thread(mounted.clone, sources.values(), process))
            try:
                yield await asyncio.shield(cloning)
            finally:
                try:
                    await uninterrupted(asyncio.wait([cloning]))
                finally:
                    if cloning.exception() is None:
                        # The last descriptor of a detached mount unmounts it, which waits for the kernel's readers.
                        await uninterrupted(asyncio.to_thread(_close_trees, cloning.result()))

    @property
    def graph(self) -> dict[str, str]:
        """Paths of its overlay, as inspect shows them."""
        return self._parts.snapshots.snapshot_data(self.id)

    @property
    def log_path(self) -> Path | None:
        """The json-file log, when the container has one."""
        return self.directory / f"{self.id}-json.log" if self.record.host.log_config.type == "json-file" else None

    async def read_logs(
        self,
        *,
        stdout: bool,
        stderr: bool,
        since_ns: int = 0,
        until_ns: int = 0,
        timestamps: bool = False,
        details: bool = False,
        tail: int | None = None,
        follow: bool = False,
    ) -> AsyncGenerator[bytes, None]:
        """Chunks of its log, which is open by then; `follow` goes on until it has ended. Raises ServerError when its driver keeps nothing to read."""
        if self.log_path is None:
            raise ServerError("configured logging driver does not support reading")
        chunks = logs.read(
            self.log_path,
            stdout=stdout,
            stderr=stderr,
            since_ns=since_ns,
            until_ns=until_ns,
            timestamps=timestamps,
            details=drivers.details(self.record.host.log_config, self.record.config) if details else "",
            tail=tail,
            framed=not self.record.config.tty,
            follow=self._log_grown if follow and self.running else None,
            reading=self.log_reading(),
        )
        return await logs.opened(chunks)

    def log_reading(self) -> LogReading | None:
        """For a reader of the log: None where nothing is rotated meanwhile."""
        return self._parts.monitor.read_log(self.id) if self.running else None

    @property
    def cgroup(self) -> str:
        """Its control group, from the root of each hierarchy."""
        return cgroups.path(self.id, self.record.host.cgroup_parent)

    @property
    def names(self) -> list[str]:
        """Its own name, then those that links of other containers give it: `/name`, `/parent/alias`."""
        return ["/" + self.record.name, *self._peers.names_by_link(self.id)]

    async def sizes(self) -> tuple[int, int]:
        """Bytes that its own layer holds, and those of its whole root. The files are counted in a thread."""
        snapshots = self._parts.snapshots
        try:
            own = (await snapshots.usage(self.id)).size
        except (NotFound, FileNotFoundError):
            return 0, 0  # it is being removed
        return own, own + sum(layer.size for layer in snapshots.line(self.record.parent))

    async def statistics(self, downs: Sequence[Down], *, named: bool) -> AsyncGenerator[bytes, None]:
        """Encoded statistics, one a second, for a client whose version asks for `downs`: empty ones while it does not run, until it is removed.

        `named`: they begin with its name and id, which `docker stats` shows.
        """
        while not self.removed:
            async with contextlib.aclosing(
                self._parts.statistics.stream(self.id, **self._watched(), downs=downs)
            ) as samples:
                async for sample in samples:
                    yield self._named(sample) if named else sample
            await asyncio.sleep(STATISTICS_PAUSE)

    async def statistics_once(self, downs: Sequence[Down], *, named: bool) -> bytes:
        """One reading, encoded."""
        sample = await self._parts.statistics.once(self.id, **self._watched(), downs=downs)
        return self._named(sample) if named else sample

    def _named(self, sample: bytes) -> bytes:
        return b'{"name":"/%s","id":"%s",' % (self.record.name.encode(), self.id.encode()) + sample[1:]

    def _watched(self) -> dict[str, Any]:
        own_network = self.record.host.network_mode != "host"
        return {"pid": self.record.status.pid, "cgroup": self.cgroup, "network": own_network}

    async def top(self, ps_args: str) -> ProcessList:
        """Its processes as ps(1) on the host shows them. Raises ServerError when it does not run, InvalidParameter for bad `ps_args`."""
        if not self.running:
            raise ServerError(f"Container {self.id} is not running")
        found = await top.top(self._parts.cgroups, self.cgroup, ps_args or top.DEFAULT)
        self.publish("top")
        return found

    async def _log_grown(self, inode: int, offset: int) -> bool:
        """Wait for more than is read; False when the container has ended, after which the log holds all there will be."""
        if not self.running:
            return False
        await self._parts.monitor.watch_log(self.id, inode, offset)
        return True

    def _replace(self, **changes: object) -> ContainerRecord:
        self.record = msgspec.structs.replace(self.record, **changes)
        self.encoded.clear()
        return self.record

    def _move(self, **changes: object) -> ContainerRecord:
        return self._replace(status=msgspec.structs.replace(self.record.status, **changes))

    def set_health(self, health: Health) -> None:
        """What its health check found; `save` makes it durable."""
        self._move(health=health)

    async def save(self) -> None:
        """Make the record as it is now durable, unless the container is gone."""
        if not self.removed:
            await self._parts.store.save(self.record)

    def publish(self, action: str, at: int | None = None, **attributes: str) -> None:
        """An event of this container, with Docker's attributes."""
        record = self.record
        self._parts.events.publish(
            "container",
            action,
            record.id,
            {"image": record.config.image, "name": record.name, **record.config.labels, **attributes},
            at,
            image_from=record.config.image,
        )

    # --- start ----------------------------------------------------------------------------------------------------

    async def start(self, *, by_user: bool = True) -> None:
        """Run it. Raises NotModified when it runs; on failure everything taken is given back and `State.Error` keeps the reason."""
        async with self.lock:
            self._check_present()
            before = self.record.status.state
            lifecycle.following(before, Verb.START, self.id)
            if not by_user and (before != State.RESTARTING or self._leaving):
                raise NotModified(f"Container {self.id} was stopped before its restart")
            self._cancel_restart()
            if by_user:
                self._restart_delay = 0.0
                self._replace(restart_count=0)
            await self._settled()
            try:
                await self._launch()
            except (EngineError, OSError) as error:
                failure, exit_code = self._failure(error)
                state = State.EXITED if before == State.RESTARTING else before
                await self._parts.store.save(self._move(state=state, error=failure.message, exit_code=exit_code))
                self._answer_waiters(exit_code)
                # As Docker: who attached before the start sees the end, and `docker run --rm` waits for this event.
                self._parts.monitor.drop(self.id)
                self.publish("die", exitCode=str(exit_code))
                raise failure from error
            self.publish("start", self.record.status.started_at)
            await self._peers.relink(self.id)
            early, self._early_exit = self._early_exit, None
            self._launching = False
            if early is not None:
                self.exited(early)

    def _failure(self, error: EngineError | OSError) -> oci.Failure:
        """What a failed start tells the client, and the exit code that stays. A start has no 403."""
        if isinstance(error, LaunchFailed):
            return oci.start_failure(error.reason, self.record.path)
        if isinstance(error, OSError):
            error = ServerError(f"Cannot start container {self.id}: {error}")
        if isinstance(error, Forbidden):
            error = ServerError(error.message)
        return oci.Failure(error, oci.failure_code(error.message))

    async def _launch(self) -> None:
        parts, record = self._parts, self.record
        await self._peers_started()
        parts.migration.expect()
        async with contextlib.AsyncExitStack() as borrowed, contextlib.AsyncExitStack() as undo:
            shm = parts.config.run / "shm" / self.id
            joined = await joins.join(record, self._peers.get, parts.monitor.processes, shm, borrowed)
            record = self._taken_from_peers(joined)
            directory, root = self.directory, parts.config.run / ROOT
            await parts.snapshots.mount(record.id)
            undo.push_async_callback(parts.snapshots.unmount, record.id)
            # Then the volumes: the order of Docker's events, as at the end.
            network_path, networks = await self._join_network(undo, joined)
            mounted = await parts.volumes.mount(record.id, record.mounts, borrowed)
            undo.push_async_callback(parts.volumes.unmount, record.id, record.mounts)
            record = self._replace(mounts=mounted.points)
            roots = parts.snapshots.mounted(record.id), root
            await asyncio.to_thread(
                lambda: bundle.write(
                    *(record, directory, *roots, network_path, networks, mounted.sources),
                    *(parts.runtime, parts.cgroups, joined),
                )
            )
            namespace = await borrowed.enter_async_context(parts.snapshots.shown(record.id, root))
            log = drivers.log_file(record.host.log_config, self.log_path, record.config)
            rows, columns = record.size if any(record.size) else tuple(record.host.console_size)
            self._launching = True
            undo.callback(self._launch_failed)
            undo.callback(self._replace, networks=record.networks, ports=record.ports)
            ports = await parts.networks.opened(record.id)
            saved = asyncio.ensure_future(parts.store.save(self._replace(networks=networks, ports=ports)))
            undo.push_async_callback(self._remove_cgroup)
            undo.push_async_callback(parts.runtime.delete, record.id)
            try:
                with parts.migration.going_on():
                    process = await parts.monitor.run(
                        record.id,
                        parts.runtime.run_argv(record.id, bundle=directory, tty=record.config.tty),
                        cwd=str(directory),
                        tty=record.config.tty,
                        open_stdin=record.config.open_stdin,
                        stdin_once=record.config.stdin_once,
                        size=(rows, columns) if rows and columns else None,
                        log=LogFile(*log) if log is not None else None,
                        namespace=namespace,
                    )
            finally:
                await saved
            undo.pop_all()
        self._killed_by = 0
        self._replace(
            status=Status(state=State.RUNNING, pid=process.pid, started_at=time.time_ns(), exit_code=0),
            stopped_by_user=False,
        )
        parts.running_changed(self, True)
        if record.config.tty and self.record.size != record.size:  # told while it was being made
            with contextlib.suppress(ServerError):  # it has ended
                await parts.monitor.resize(record.id, *self.record.size)
        await parts.store.save(self.record)

    def _taken_from_peers(self, joined: joins.Joined) -> ContainerRecord:
        """The record with what links and a shared network bring: names and addresses of others as they are now."""
        changes: dict[str, object] = {}
        if self.record.links:
            changes["link_hosts"], changes["link_environment"] = joins.links(self.record, self._peers.get)
        if joined.peer is not None:
            of = joined.peer.record.config
            changes["config"] = msgspec.structs.replace(
                self.record.config, hostname=of.hostname, domainname=of.domainname
            )
        return self._replace(**changes) if changes else self.record

    async def _peers_started(self) -> None:
        """One that builds on others waits while they restart, for some seconds: two may wait for each other.

        At boot all start at once, and `docker-compose restart` restarts all of a project at once.
        """
        host = self.record.host
        booting = self.record.status.state == State.RESTARTING
        names = [create.joined(mode) for mode in (host.network_mode, host.pid_mode, host.ipc_mode)]
        for name in (*filter(None, names), *self.record.links.values()):
            with contextlib.suppress(EngineError, TimeoutError):
                peer = self._peers.get(name)
                if peer is self:
                    continue
                async with asyncio.timeout(_PEERS_WAIT):
                    if peer._returning is not None:
                        await peer._returning.wait()
                    elif booting and peer.record.status.state == State.RESTARTING:
                        async with peer.lock:
                            pass

    async def relink(self) -> None:
        """A container that this one is linked to has started, perhaps with another address: its hosts file follows."""
        if self.running:
            with contextlib.suppress(EngineError, OSError):
                hosts, _ = joins.links(self.record, self._peers.get)
                record = self._replace(link_hosts=hosts)
                await asyncio.to_thread(bundle.write_network_files, record, self.directory, record.networks)

    async def _end_what_is_left(self) -> None:
        await self._parts.runtime.delete(self.id)
        await self._remove_cgroup()

    async def _remove_cgroup(self) -> None:
        # crun leaves it behind when a limit can't be set, and has then no state left to delete it by.
        try:
            await asyncio.to_thread(self._parts.cgroups.remove, self.cgroup)
        except OSError as error:
            _log.warning("container %s: its cgroup stays: %s", self.id, error)

    def _launch_failed(self) -> None:
        self._launching = False
        self._early_exit = None

    async def _join_network(self, undo: contextlib.AsyncExitStack, joined: joins.Joined) -> Joined:
        """The network namespace's path (empty: a fresh one; None: the host's), and the endpoints to show."""
        if joined.network:
            return Joined(joined.network, {})
        # That they exist is not asked at create: a 404 there means to clients that the image is missing, and they would pull it.
        host, mac = self.record.host, self.record.config.mac_address
        disabled = self.record.config.network_disabled is True and host.network_mode != "host"
        primary = "none" if disabled else self._parts.networks.name_of(host.network_mode)
        wanted = self.record.networks if self.record.networks and not disabled else {primary: EndpointSettings()}
        connected = await self._parts.networks.join(
            self.id,
            self.record.name,
            wanted,
            primary,
            mac if isinstance(mac, str) else "",
            host.dns,
            self._wanted_ports,
        )
        undo.push_async_callback(self._parts.networks.leave, self.id)
        return connected

    @property
    def _wanted_ports(self) -> Request:
        config, host = self.record.config, self.record.host
        exposed = tuple(config.exposed_ports) if isinstance(config.exposed_ports, dict) else ()
        return Request(exposed, host.port_bindings or {}, host.publish_all_ports)

    # --- networks ---------------------------------------------------------------------------------------------------

    async def connect(self, network: str, wanted: EndpointSettings) -> None:
        """Onto one more network, at once when it runs. Raises NotFound, Forbidden, InvalidParameter; nothing has changed then."""
        networks = self._parts.networks
        async with self.lock:
            self._check_present()
            await self._settled()
            self._check_own_network(network)
            if self.running:
                process = self._parts.monitor.processes.get(self.id)
                if process is None:
                    raise Conflict(f"Container {self.id} is not running")
                settings = await networks.connect(self.id, network, wanted, process)
                # It may have ended meanwhile, and its teardown asks for the lock of the endpoints that was held here.
                if not self.running:
                    settings = asked_for(settings)
            else:
                settings = networks.check(self.id, network, wanted, self.record.networks)
            name = networks.get(network).record.name
            networks.spare({name: settings})
            await self._save_networks(self.record.networks | {name: settings})

    async def disconnect(self, network: str) -> None:
        """From a network, at once when it runs. Raises NotFound, Forbidden when it is not on it."""
        networks = self._parts.networks
        async with self.lock:
            self._check_present()
            await self._settled()
            self._check_own_network(network)
            name = networks.check_connected(self.id, network, self.record.networks)
            if self.running:
                await networks.disconnect(self.id, network)
            networks.spare({name: self.record.networks[name]}, no_more=True)
            await self._save_networks({key: each for key, each in self.record.networks.items() if key != name})

    def _check_own_network(self, network: str) -> None:
        if create.joined(self.record.host.network_mode):
            raise Forbidden(
                f"network {network}: container {self.id}: container sharing network namespace with another container or host "
                "cannot be connected to any other network"
            )

    async def _save_networks(self, networks: dict[str, EndpointSettings]) -> None:
        record = self._replace(networks=networks, ports=self._parts.networks.ports_of(self.id))
        if self.running:
            await asyncio.to_thread(bundle.write_network_files, record, self.directory, networks)
        await self.save()

    # --- exit -------------------------------------------------------------------------------------------------------

    def exited(self, exit_record: Exit) -> None:
        """The monitor's word: the process has ended and its output is drained. Waiters are answered, the rest happens behind."""
        if self._launching:
            self._early_exit = exit_record
            return
        if not self.running:
            self._parts.monitor.forget(self.id)
            return
        if self.record.host.memory:
            self._teardown = asyncio.ensure_future(self._exit_after_oom_check(exit_record))
        else:
            self._record_exit(exit_record, False)
            self._teardown = asyncio.ensure_future(self._tear_down())

    async def _exit_after_oom_check(self, exit_record: Exit) -> None:
        host = self.record.host
        killed = await asyncio.to_thread(self._parts.cgroups.oom_killed, self.id, host.cgroup_parent)
        if killed:
            self.publish("oom")
        self._record_exit(exit_record, killed)
        await self._tear_down()

    def _record_exit(self, exit_record: Exit, oom_killed: bool) -> None:
        record = self.record
        ended_by_user = record.stopped_by_user or (self._killed_by and exit_record.status == 128 + self._killed_by)
        again = not self._leaving and restart.wanted(
            record.host.restart_policy, exit_record.status, record.restart_count, bool(ended_by_user)
        )
        ran = (exit_record.at - record.status.started_at) / 1e9
        self._replace(
            restart_count=record.restart_count + again,
            stopped_by_user=bool(ended_by_user),
            status=msgspec.structs.replace(
                record.status,
                state=State.RESTARTING if again else lifecycle.following(record.status.state, Verb.EXIT, self.id),
                pid=0,
                exit_code=exit_record.status,
                finished_at=exit_record.at,
                oom_killed=oom_killed,
                error="",
            ),
        )
        if again:
            self._restart_delay = restart.delay(self._restart_delay, ran)
            self._restart = asyncio.ensure_future(self._start_again(self._restart_delay))
        self._parts.running_changed(self, False)
        self.publish("die", exit_record.at, exitCode=str(exit_record.status))
        self._parts.statistics.ended(self.id)
        self._answer_waiters(exit_record.status)

    def _answer_waiters(self, exit_code: int) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(exit_code)

    async def _start_again(self, delay: float) -> None:
        """What a restart policy asks for, after its delay. A user's start, stop or remove cancels it."""
        await asyncio.sleep(delay)
        self._restart = None
        try:
            await self.start(by_user=False)
        except NotModified:
            pass
        except EngineError as error:
            _log.warning("container %s: restart: %s", self.id, error)

    def _cancel_restart(self) -> None:
        if self._restart is not None:
            self._restart.cancel()
            self._restart = None

    async def _give_back(self, record: ContainerRecord) -> None:
        try:
            await self._parts.networks.leave(self.id)
        finally:
            await self._parts.volumes.unmount(self.id, record.mounts)

    async def _tear_down(self, *, abandoned: bool = False) -> None:
        """Give back what the run took, and make the exit durable before the monitor forgets it.

        `abandoned`: nobody saw it end, so its processes may live: the runtime kills them.
        """
        parts = self._parts
        networks = {name: asked_for(settings) for name, settings in self.record.networks.items()}
        record = self._replace(networks=networks, ports=())
        outcomes = await asyncio.gather(
            parts.store.save(record),
            self._end_what_is_left() if abandoned else parts.runtime.discard(self.id, self.cgroup, parts.cgroups),
            parts.snapshots.unmount(self.id),
            self._give_back(record),
            return_exceptions=True,
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                _log.error("container %s: cleaning up after its exit: %s", self.id, outcome, exc_info=outcome)
        if not isinstance(outcomes[0], BaseException):
            parts.monitor.forget(self.id)

    async def _settled(self) -> None:
        """Until the teardown of the last run is over."""
        if self._teardown is not None:
            await asyncio.shield(self._teardown)
            self._teardown = None

    def check_attach(self) -> None:
        """Raises the lifecycle table's Conflict when nobody can attach to it now."""
        lifecycle.following(self.record.status.state, Verb.ATTACH, self.id)

    async def wait(self) -> int:
        """The exit code, at once when it does not run, else when it has ended; one that waits for its restart counts as running, as in Docker."""
        if not self.running and not self._launching and self.record.status.state != State.RESTARTING:
            return self.record.status.exit_code
        waiter: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            return await waiter
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    # --- stop, kill, restart ----------------------------------------------------------------------------------------

    async def stop(self, timeout: float | None = None) -> None:
        """Its stop signal, and SIGKILL after `timeout` seconds (negative: never). Raises NotModified when it does not run.

        The lock is not held while it ends: another stop, a kill or a removal may have less patience.
        """
        async with self.lock:
            self._check_present()
            lifecycle.following(self.record.status.state, Verb.STOP, self.id)
            running = self.running
            if running:
                await self._mark_stopped()
            else:
                await self._stay_down()
        if running:
            await self._end(self._stop_signal, DEFAULT_STOP_TIMEOUT if timeout is None else timeout)
        self.publish("stop")

    async def stop_with_engine(self, timeout: float) -> None:
        """End it, with all that it was about to do; what its restart policy means is for the next daemon to see."""
        self._leaving = True
        async with self.lock:
            self._cancel_restart()
        if self.running:
            await self._end(self._stop_signal, timeout)
            self.publish("stop")
        await self._settled()

    async def _mark_stopped(self) -> None:
        """The user wants it down: also for a daemon that only comes when it is."""
        record = self._replace(stopped_by_user=True)
        if record.host.restart_policy.name not in ("", "no"):
            await self._parts.store.save(record)

    async def _stay_down(self) -> None:
        """From waiting for a restart to exited."""
        self._cancel_restart()
        self._replace(stopped_by_user=True)
        record = self._move(state=State.EXITED)
        self._answer_waiters(record.status.exit_code)
        await self._parts.store.save(record)

    @property
    def _stop_signal(self) -> int:
        chosen = self.record.config.stop_signal
        return signal_number(str(chosen)) if chosen is not msgspec.UNSET else 15

    async def _end(self, number: int, timeout: float) -> None:
        exit_code = asyncio.ensure_future(self.wait())
        try:
            await self._send(number)
            done, _ = await asyncio.wait({exit_code}, timeout=None if timeout < 0 else timeout)
            if not done:
                await self._send(9)
                done, _ = await asyncio.wait({exit_code}, timeout=_KILL_GRACE)
                if not done:
                    raise ServerError(
                        f"Cannot stop container {self.id}: it did not exit {_KILL_GRACE:.0f} s after SIGKILL"
                    )
        finally:
            exit_code.cancel()

    async def _send(self, number: int) -> None:
        self.publish("kill", signal=str(number))
        with contextlib.suppress(NotFound):  # it ended by itself: the exit is on its way
            self._parts.monitor.signal(self.id, number)
        if self.record.status.state == State.PAUSED and number in (9, self._stop_signal):
            # A frozen process takes no signal.
            with contextlib.suppress(NotFound):
                await self._parts.runtime.resume(self.id)
            if self.record.status.state == State.PAUSED:
                self._move(state=State.RUNNING)
                self._parts.running_changed(self, True)
                self.publish("unpause")

    async def kill(self, number: int) -> None:
        """Send the signal; SIGKILL returns when the container has ended. Raises ServerError when it does not run."""
        self._check_present()
        lifecycle.following(self.record.status.state, Verb.KILL, self.id)
        if not self.running:
            await self._stay_down()
            return
        self._killed_by = number
        if number in (9, self._stop_signal):
            await self._mark_stopped()
        if number == 9:
            await self._end(9, _KILL_GRACE)
        else:
            await self._send(number)

    async def restart(self, timeout: float | None = None) -> None:
        """Stop when it runs, then start."""
        self._check_present()
        self._returning = returned = asyncio.Event()
        try:
            if self.running:
                with contextlib.suppress(NotModified):
                    await self.stop(timeout)
            with contextlib.suppress(NotModified):  # another was faster
                await self.start()
        finally:
            returned.set()
            if self._returning is returned:
                self._returning = None
        self.publish("restart")

    async def pause(self) -> None:
        """Freeze every process of it."""
        async with self.lock:
            self._check_present()
            state = lifecycle.following(self.record.status.state, Verb.PAUSE, self.id)
            try:
                await self._parts.runtime.pause(self.id)
            except NotFound as error:
                raise ServerError(f"Container {self.id} is not running") from error
            if self.running:  # it may have ended by itself meanwhile
                record = self._move(state=state)
                self._parts.running_changed(self, False)
                await self._parts.store.save(record)
            self.publish("pause")

    async def unpause(self) -> None:
        async with self.lock:
            self._check_present()
            state = lifecycle.following(self.record.status.state, Verb.UNPAUSE, self.id)
            try:
                await self._parts.runtime.resume(self.id)
            except NotFound as error:
                raise ServerError(f"Container {self.id} is not running") from error
            if self.running:
                record = self._move(state=state)
                self._parts.running_changed(self, True)
                await self._parts.store.save(record)
            self.publish("unpause")

    async def update(self, change: UpdateBody, support: Support) -> list[str]:
        """New limits, at once when it runs, and a new restart policy; the warnings. On failure everything is as before."""
        async with self.lock:
            self._check_present()
            lifecycle.following(self.record.status.state, Verb.UPDATE, self.id)
            before = self.record.host
            after, warnings = update.merged(before, change, support)
            changed = update.resources(before, after, support) if self.running else None
            if changed is not None:
                try:
                    await self._apply(changed)
                except NotFound:
                    pass  # it has just ended: the next start takes the new limits
                except ServerError as error:
                    back = update.resources(after, before, support)
                    with contextlib.suppress(EngineError):
                        if back is not None:
                            await self._apply(back)
                    raise ServerError(f"Cannot update container {self.id}: {error.message}") from error
            await self._parts.store.save(self._replace(host=after))
            self.publish("update")
            return warnings

    async def _apply(self, resources: oci_wire.Resources) -> None:
        cpu = resources.cpu
        if cpu is not None and cpu.quota == update.NO_QUOTA:
            try:
                await asyncio.to_thread(self._parts.cgroups.lift_quota, self.cgroup)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENODEV):  # else it has just ended: the runtime says so
                    raise ServerError(f"its CPU quota cannot be taken away: {error.strerror}") from error
        await self._parts.runtime.update(self.id, resources)

    async def resize(self, rows: int, columns: int) -> None:
        """Terminal size, now when it runs and for the next start."""
        self._check_present()
        lifecycle.following(self.record.status.state, Verb.RESIZE, self.id)
        await self._parts.store.save(self._replace(size=(rows, columns)))
        if self.running:
            await self._parts.monitor.resize(self.id, rows, columns)
            self.publish("resize", height=str(rows), width=str(columns))

    # --- remove -------------------------------------------------------------------------------------------------------

    async def remove(self, force: bool, volumes: bool, forget: Callable[[Container], None]) -> None:
        """Delete it with its files, and with `volumes` those that were made for it and nobody else has.

        `forget` takes it out of the collection at the moment the record is gone.
        """
        verb = Verb.REMOVE_BY_FORCE if force else Verb.REMOVE
        async with self.lock:
            self._check_present()
            lifecycle.following(self.record.status.state, verb, self.id)
            self._replace(stopped_by_user=True)
            self._cancel_restart()
            if self.running:
                await self._end(9, _KILL_GRACE)
            await self._settled()
            record = self.record
            leaving = self._parts.volumes.leave(
                self.id, record.mounts, create.named_volumes(record.host), anonymous=volumes
            )
            async with leaving as changes:
                await self._parts.store.delete(self.id, *changes)
                self.removed = True
                forget(self)
            self._answer_waiters(self.record.status.exit_code)
            self._parts.monitor.drop(self.id)
            await asyncio.gather(self._parts.snapshots.remove(self.id), asyncio.to_thread(remove_tree, self.directory))
            self.publish("destroy")

    def _check_present(self) -> None:
        if self.removed:
            raise NotFound(f"No such container: {self.id}")

    # --- boot -----------------------------------------------------------------------------------------------------------

    async def restore(self, on_host: bool) -> None:
        """Correct the record by what the monitor says: running, ended meanwhile, or gone with a reboot.

        `on_host`: its root is mounted or its control group there. Where nothing runs, a start or a teardown was cut short by a crash.
        """
        parts, status = self._parts, self.record.status
        process = parts.monitor.processes.get(self.id)
        ended = parts.monitor.exits.pop(self.id, None)
        if process is not None or ended is not None:
            pid = process.pid if process is not None else 0
            if status.state not in _RUNNING:
                self._move(state=State.RUNNING, pid=pid, started_at=time.time_ns(), error="")
            elif process is not None:
                self._move(pid=pid)
            parts.volumes.resume(self.id, self.record.mounts)
            if process is not None:
                record = self.record
                await parts.networks.restore(
                    self.id, record.name, record.networks, process, record.host.dns, self._wanted_ports, record.ports
                )
            if ended is not None:
                self.exited(ended)
        elif status.state in _RUNNING:
            _log.warning("container %s was running when the host or the monitor went away", self.id)
            self._record_exit(Exit(status=255, at=time.time_ns()), False)
            self._teardown = asyncio.ensure_future(self._tear_down(abandoned=True))
        else:
            if on_host or any(endpoint.ip_address for endpoint in self.record.networks.values()):
                self._teardown = asyncio.ensure_future(self._tear_down(abandoned=True))
            if status.state == State.RESTARTING:
                self._move(state=State.EXITED)

    def start_at_boot(self) -> None:
        """What its restart policy asks for when the engine starts and it does not run."""
        record = self.record
        if record.status.state == State.EXITED and restart.wanted_at_boot(
            record.host.restart_policy, record.status.exit_code, record.restart_count, record.stopped_by_user
        ):
            self._move(state=State.RESTARTING)
            self._restart = asyncio.ensure_future(self._start_again(0))


def _close_trees(trees: Iterable[mounted.Mounted]) -> None:
    for each in trees:
        os.close(each.tree)


class Containers:
    """All containers of the engine, by id, name and prefix."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._names = Names()
        self._all: dict[str, Container] = {}
        self._creating: dict[str, str] = {}
        self._linked: dict[str, set[str]] = {}
        """Id of a container to those that are linked to it."""
        self._support = parts.cgroups.support()

    async def open(self) -> None:
        """Load the records and correct them by the monitor's truth."""
        await asyncio.to_thread(joins.sweep, self._parts.config.run / "shm")
        records = self._parts.store.load()
        await self._parts.volumes.open({record.id: record.mounts for record in records.values()})
        for record in sorted(records.values(), key=lambda each: each.created):
            self._names.add(record.id, record.name)
            self._add(Container(self._parts, record, self))
        await asyncio.to_thread(trees.make_private, self._parts.config.run / ROOT)
        left = await self._parts.snapshots.resume(self._parts.monitor.kept)
        self._parts.monitor.keep(self._parts.snapshots.aside.namespace)
        left |= await asyncio.to_thread(self._left_on_host)
        await asyncio.gather(*(each.restore(each.id in left) for each in self._all.values()))
        await self._parts.volumes.sweep()

    def _left_on_host(self) -> set[str]:
        """Ids of containers that have a control group: those that run, and what a crash left."""
        found: set[str] = set()
        parents = {cgroups.parent(each.record.host.cgroup_parent) for each in self._all.values()}
        return found.union(*(self._parts.cgroups.children(parent) for parent in parents))

    def _add(self, container: Container) -> None:
        self._all[container.id] = container
        for child in container.record.links.values():
            self._linked.setdefault(child, set()).add(container.id)
        self._parts.networks.spare(container.record.networks)
        self._links_changed(container.record.links.values())

    def _links_changed(self, children: Iterable[str]) -> None:
        """What is shown of the children holds the names that links give them."""
        for child in children:
            if (container := self._all.get(child)) is not None:
                container.encoded.clear()

    def names_by_link(self, child: str) -> list[str]:
        """`/parent/alias` for every link to the child."""
        if not self._linked.get(child):
            return []
        parents = [self._all[each].record for each in self._linked[child] if each in self._all]
        return sorted(
            f"/{parent.name}/{alias}" for parent in parents for alias, to in parent.links.items() if to == child
        )

    async def unlink(self, parent: Container, alias: str) -> None:
        """Take away a link. Raises NotFound when there is none of that alias."""
        async with parent.lock:
            parent._check_present()
            child = parent.record.links.get(alias)
            if child is None:
                raise NotFound(f"Cannot get child {alias} of /{parent.record.name}: no such link")
            links = {name: to for name, to in parent.record.links.items() if name != alias}
            kept = [text for text in parent.record.host.links or () if create.parse_link(text).alias != alias]
            host = msgspec.structs.replace(parent.record.host, links=kept or None)
            await self._parts.store.save(parent._replace(links=links, host=host))
            if child not in links.values():
                self._linked.get(child, set()).discard(parent.id)
            self._links_changed([child])
            await parent.relink()

    async def relink(self, child: str) -> None:
        """That container has started: those linked to it shall know its address."""
        for parent in tuple(self._linked.get(child, ())):
            if (container := self._all.get(parent)) is not None:
                await container.relink()

    def __contains__(self, key: object) -> bool:
        return key in self._all

    def __iter__(self) -> Iterator[Container]:
        return iter(self._all.values())

    def __len__(self) -> int:
        return len(self._all)

    def get(self, text: str) -> Container:
        """By id, name or unique prefix. Raises NotFound `No such container: X`."""
        found = self._all.get(self._names.resolve(text))
        if found is None:  # it is being created
            raise NotFound(f"No such container: {text}")
        return found

    def find(self, container_id: str) -> Container | None:
        """By whole id; None when it is gone."""
        return self._all.get(container_id)

    async def create(self, body: CreateBody, name: str) -> Created:
        """A new container. Raises InvalidParameter, NotFound (image), Conflict (name); nothing is kept then."""
        parts = self._parts
        config, host = create.checked(body)
        host, warnings = limits.adapted(host, self._support)
        if isinstance(host.runtime, str) and host.runtime not in ("", "runc", parts.runtime.name):
            raise InvalidParameter(f"Unknown runtime specified {host.runtime}")
        chosen = checked_name(name) if name else ""
        drivers.validate(host.log_config)
        if not config.image:
            raise InvalidParameter("No image specified")
        image = parts.images.get(config.image)
        parts.migration.expect()  # most are started at once
        config = create.merged(config, image.config.config or Config())
        path, args = create.command(config)
        container_id = secrets.token_hex(32)
        shares_network = bool(create.joined(host.network_mode))
        on_users_network = parts.networks.name_of(host.network_mode) not in PREDEFINED_NAMES and not shares_network
        if not config.hostname and not shares_network:
            on_host = "host" in (host.network_mode, host.uts_mode)
            config = msgspec.structs.replace(config, hostname=os.uname().nodename if on_host else container_id[:12])
        if host.network_mode == "host" and host.port_bindings:
            warnings.append("Published ports are discarded when using host network mode")
        networks = {} if shares_network else self._networks_of(host.network_mode, body.networking_config)
        mounts_wanted = create.mount_points(config, host, self._volumes_from(host))
        record = ContainerRecord(
            id=container_id,
            name=chosen or self._names.random(),
            created=time.time_ns(),
            image_id=image.id,
            parent=image.chain_ids[-1] if image.chain_ids else "",
            path=path,
            args=args,
            config=config,
            host=host,
            networks=networks,
            links={} if on_users_network else self._links_of(host),
        )
        self._names.reserve(record.id, record.name)
        self._creating[record.id] = image.id
        try:
            async with parts.volumes.claim(record.id, mounts_wanted.points, create.named_volumes(host)) as claim:
                record = msgspec.structs.replace(record, mounts=claim.mounts)
                if record.parent:
                    await claim.populate(mounts_wanted.populated, lambda: parts.snapshots.open_content(record.parent))
                await parts.snapshots.prepare(record.id, record.parent or None)
                try:
                    await parts.store.save(record, *claim.changes)
                except BaseException:
                    await parts.snapshots.remove(record.id)
                    raise
        except BaseException:
            self._names.discard(record.id, record.name)
            raise
        finally:
            del self._creating[record.id]
        container = Container(parts, record, self)
        self._names.add(record.id, record.name)
        self._add(container)
        container.publish("create", record.created)
        return Created(record.id, warnings)

    def _networks_of(self, mode: str, asked: NetworkingConfig) -> dict[str, EndpointSettings]:
        """What is asked of networks, by name; without NetworkingConfig the one that NetworkMode names. Raises InvalidParameter."""
        name_of = self._parts.networks.name_of
        endpoints = {name_of(key): settings or EndpointSettings() for key, settings in asked.endpoints_config.items()}
        if len(asked.endpoints_config) > 1:
            raise InvalidParameter(
                f"Container cannot be connected to network endpoints: {', '.join(asked.endpoints_config)}"
            )
        primary = name_of(mode)
        if primary in (HOST, NONE) and endpoints.keys() - {primary}:
            raise InvalidParameter(
                f"Container cannot be connected to network endpoints: {', '.join(endpoints)}: its NetworkMode is {primary}"
            )
        for settings in endpoints.values():
            for link in settings.links or ():
                create.parse_link(link)
        return {
            name: EndpointSettings(ipam_config=each.ipam_config, links=each.links, aliases=each.aliases)
            for name, each in (endpoints or {primary: EndpointSettings()}).items()
        }

    def _links_of(self, host: HostConfig) -> dict[str, str]:
        return {link.alias: self._child(link).id for link in map(create.parse_link, host.links or ())}

    def _child(self, link: Link) -> Container:
        """What the link names. 400, not 404, when it is missing: clients take 404 of a create for a missing image and pull."""
        try:
            child = self.get(link.name)
        except NotFound as error:
            raise InvalidParameter(f"Links: could not get container for {link.name}: {error.message}") from error
        if child.record.host.network_mode == "host":
            raise InvalidParameter(
                "conflicting options: host type networking can't be used with links. This would result in undefined behavior"
            )
        return child

    def _volumes_from(self, host: HostConfig) -> list[MountPoint]:
        """Mounts of the containers that VolumesFrom names, read-only where it or their own says so."""
        inherited: list[MountPoint] = []
        for text in host.volumes_from or ():
            name, writable = create.parse_volumes_from(text)
            try:
                source = self.get(name)
            except NotFound as error:
                raise InvalidParameter(f"VolumesFrom: {error.message}") from error
            inherited += [msgspec.structs.replace(each, rw=each.rw and writable) for each in source.record.mounts]
        return inherited

    async def update(self, container: Container, change: UpdateBody) -> list[str]:
        """As `Container.update`, on this host."""
        return await container.update(change, self._support)

    async def rename(self, container: Container, name: str) -> None:
        """Raises Conflict when the name is taken, InvalidParameter when it breaks the pattern."""
        if not name:
            raise InvalidParameter("Neither old nor new names may be empty")
        new = checked_name(name)
        async with container.lock:
            container._check_present()
            old = container.record.name
            if new == old:
                raise InvalidParameter("Renaming a container with the same name as its current name")
            self._names.reserve(container.id, new)
            try:
                await self._parts.store.save(container._replace(name=new))
            except BaseException:
                container._replace(name=old)
                self._names.release(new)
                raise
            self._names.release(old)
            self._parts.networks.renamed(container.id, new)
            self._links_changed(container.record.links.values())
            container.publish("rename", oldName="/" + old)

    async def remove(self, container: Container, *, force: bool, volumes: bool = False) -> None:
        """As `Container.remove`."""
        await container.remove(force, volumes, self._forget)

    def _forget(self, container: Container) -> None:
        self._all.pop(container.id, None)
        for child in container.record.links.values():
            self._linked.get(child, set()).discard(container.id)
        self._linked.pop(container.id, None)
        self._links_changed(container.record.links.values())
        self._parts.networks.spare(container.record.networks, no_more=True)
        self._names.discard(container.id, container.record.name)
        self._parts.gone(container.id)

    def using_image(self, image_id: str) -> list[ImageUser]:
        """Who stands on the image: containers, and creates under way."""
        users = [
            ImageUser(container.id, container.record.name, container.running)
            for container in self._all.values()
            if container.record.image_id == image_id
        ]
        users += [
            ImageUser(container_id, "", False) for container_id, used in self._creating.items() if used == image_id
        ]
        return users

    def counts(self) -> dict[State, int]:
        """How many are in each state."""
        counts = dict.fromkeys(State, 0)
        for container in self._all.values():
            counts[container.record.status.state] += 1
        return counts

    async def stop_all(self, timeout: float) -> None:
        """For `engined stop`: every container, at once."""

        async def stop(container: Container) -> None:
            try:
                await container.stop_with_engine(timeout)
            except EngineError as error:
                _log.error("container %s: %s", container.id, error.message)

        await asyncio.gather(*(stop(container) for container in self._all.values()))

    async def settled(self) -> None:
        """Until every teardown that is under way has ended."""
        await asyncio.gather(*(container._settled() for container in self._all.values()), return_exceptions=True)
