"""Builds all parts, restores state at start, and closes in reverse order. The only module that may
import all others.

SIGTERM and SIGINT end only the daemon: containers and the monitor keep running. SIGUSR1 (`engined
stop`) stops them as well and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import gc
import logging
import os
import shutil
import signal
import socket
import ssl
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import uvloop

from engine import __version__
from engine.api import application, authorization
from engine.api.engine import Engine
from engine.api.metrics import MetricsApplication
from engine.api.routes import Phase
from engine.api.starting import StartingApplication
from engine.builder.buildkit.front import BuildKit
from engine.builder.buildkit.session import Sessions
from engine.builder.loading import Builds
from engine.cluster.cluster import Cluster
from engine.cluster.parts import Parts as ClusterParts
from engine.common import proxies
from engine.common.facts import Counts, Host
from engine.common.turns import Turn
from engine.config import INHERITED, Config, Source, encode, reloads
from engine.containers import boot, defaults, log_plan
from engine.containers.container import Container
from engine.containers.containers import Containers
from engine.containers.delivery import Deliveries
from engine.containers.exec import Execs
from engine.containers.health import HealthChecks
from engine.containers.launch import BUNDLES, END_LIMIT, ROOT
from engine.containers.lifecycle import State
from engine.containers.oom import OomNotices
from engine.containers.packing import Packing
from engine.containers.parts import Parts
from engine.containers.spec import EMPTY
from engine.containers.stats import Statistics
from engine.containers.store import ContainerStore
from engine.errors import EngineError, NotFound, ServerError, words
from engine.events import EventLog
from engine.http.server import Server
from engine.http.tls import mutual_context
from engine.images.record import ImageUser
from engine.images.remote import Remote
from engine.images.store import ImageStore
from engine.logs import drivers
from engine.managed_plugins.process import NETNS, SOCKETS, Processes
from engine.managed_plugins.store import ManagedPlugins
from engine.monitor.client import Monitor
from engine.monitor.handles import Exit
from engine.networks.attachments import Attachments
from engine.networks.bridge.default import NO_BRIDGE
from engine.networks.filter import RELAYED
from engine.networks.networks import Networks
from engine.plugins.authz import Chain
from engine.plugins.discovery import Discovery
from engine.plugins.registry import Plugins
from engine.runtime import apparmor
from engine.runtime.cdi import Registry
from engine.runtime.cgroups import Cgroups
from engine.runtime.programs import Programs
from engine.runtime.runtimes import Runtimes
from engine.runtime.scope_limits import ScopeLimits
from engine.storage.content import Content
from engine.storage.overlay import OverlaySnapshots
from engine.storage.records import Records
from engine.system import (
    calls,
    detached_mounts,
    host,
    host_paths,
    log_format,
    log_lines,
    memory,
    mounts,
    service_manager,
    tasks,
    threads,
)
from engine.system.files import remove_tree, write_atomically
from engine.system.grace_period import GracePeriod
from engine.system.limits import open_descriptors
from engine.system.service_manager import Notifier
from engine.system.system_bus import SystemBus
from engine.system.tasks import spawn
from engine.system.threads import raise_priority
from engine.usage import Usages
from engine.volumes.store import VolumeStore

MARK = ".dockerenv"
"""A file in every container's root, by which programs detect that they run in a container
(systemd-detect-virt, Testcontainers).
"""

HANGING_CALL = 5.0
"""Seconds after which a call on a path of the host does not keep the daemon from ending."""

STOPPING_CALL = 10.0
"""Seconds that a plugin may take for one call while the engine stops: `engined stop` waits a minute
longer than containers may take."""

_log = logging.getLogger(__name__)


def run(
    config: Config,
    source: Source | None = None,
    meaningless: Mapping[str, str] | None = None,
    *,
    stop_after: float | None = None,
) -> int:
    """Serve until a signal ends it. Returns the program's exit status.

    `source` is what a reload reads, `meaningless` are keys of its file that change nothing. With
    `stop_after` it does not serve. It stops the containers and the monitor of an earlier daemon,
    and gives containers so many seconds to exit.
    """
    log_lines.choose(config.log_format)
    log_format.configure(config.log_level)
    for key, why in (meaningless or {}).items():
        _log.warning("the configuration key %s has no meaning here: %s", key, why)
    for name in proxies.export(config.http_proxy, config.https_proxy, config.no_proxy):
        _log.warning("the configuration overrides the variable %s", name)
    raise_priority()
    memory.configure()
    try:
        uvloop.run(_serve(config, source, stop_after))
        return 0
    except EngineError as error:
        log_lines.say(error.message, "fatal", "engined: ")
    except OSError as error:
        place = f"{error.filename}: " if isinstance(error.filename, str | os.PathLike) else ""
        log_lines.say(f"{place}{error.strerror or error}", "fatal", "engined: ")
    finally:
        threads.finish()
    return 1


async def _serve(config: Config, source: Source | None, stop_after: float | None) -> None:
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(threads.installed())
        daemon = Daemon(config, source, only_stops=stop_after is not None)
        await daemon.open(stack)
        if stop_after is not None:
            await daemon.stop_everything(stop_after)
            return
        daemon.cluster.start()
        memory.keep_reserve()
        for path in daemon.listening:
            if log_lines.is_json():
                _log.info("listening on %s", path)
            else:
                print(f"listening on {path}", flush=True)
        daemon.notifier.ready()
        await daemon.until_asked_to_end()
        daemon.notifier.stopping()


class Daemon:
    """One engine and its parts."""

    def __init__(self, config: Config, source: Source | None = None, *, only_stops: bool = False) -> None:
        """`source`: for reloads. `only_stops`: it will not serve (`run`)."""
        self.config = config
        self._source = source
        self.notifier = Notifier.of_environment()
        self._inherited = service_manager.inherited()
        self._only_stops = only_stops
        self.listening: list[str] = []
        self._ending = asyncio.Event()
        self._stop_everything = False
        self._failure = ""
        self._took_over = False
        """Containers of an earlier daemon run, or may run."""
        self._serves = False
        """The start has succeeded: what was made on the host stays when the daemon ends."""
        self._restored = False
        self._opened_records = False
        self.defaults = defaults.DOCKERS
        self.sessions = Sessions()
        self._reloading = asyncio.Lock()
        self._started = asyncio.Event()
        self._chain: Chain | None = None
        """The plugins that authorize requests."""
        self._retired: list[Chain] = []
        """Former ones, which may still be asked about the replies of requests under way."""

    async def open(self, stack: contextlib.AsyncExitStack) -> None:
        """Build all parts, listen, and restore running containers. `stack` closes the parts in
        reverse order, but listeners first.

        Requests are answered as soon as what they need is there (`api/starting.py`).
        """
        # First, because an invalid file must leave nothing on the host.
        self.cgroups = await asyncio.to_thread(Cgroups.detect)
        if not self._only_stops:
            self.defaults = await asyncio.to_thread(defaults.of, self.config, self.cgroups.mode)
        self._claim(stack)
        self._watch_signals(stack)
        calls.check()
        await asyncio.to_thread(detached_mounts.check_root)
        gc.disable()
        await self._open_stores(stack)
        await self._open_containers(stack)
        await threads.start_all()
        async with contextlib.AsyncExitStack() as serving:
            starting = self._build_api(serving)
            # Managed plugins, which may be asked whether a request is allowed, run after
            # `_restore`.
            authorized = bool(self.config.authorization_plugins)
            if not authorized:
                await self._listen(serving)
            try:
                await self._restore(stack, starting)
                if authorized:
                    self._chain = await self._authorization(self.config)
                    self.server.serve(self._application())
                    await self._listen(serving)
            except BaseException:
                starting.fail()
                raise
            stack.push_async_callback(serving.pop_all().aclose)
        self._serves = True
        # In one turn: one that a client stops now would look as if it had to be started.
        for container in self.containers:
            boot.start(container)
        self.engine.restoring = False
        starting.reach(Phase.RESTORED)
        self.server.serve(self._application())
        await self.attachments.serve_restored()
        self._started.set()
        # Garbage collections need not visit what was made so far.
        gc.freeze()
        gc.enable()

    def _claim(self, stack: contextlib.AsyncExitStack) -> None:
        """Make ROOT and RUN, and take the locks of RUN and of the bridge."""
        config = self.config
        before = _Before.of(config.root)
        _make_directories(config)
        if self.defaults.ids is not None:
            _check_passable(config.run)
        claim = _claim(config.run)
        self._took_over = (config.run / "monitor").exists()  # until the monitor says what it has
        stack.callback(self._leave_run, claim)
        stack.callback(self._undo_start, before)
        (config.run / EMPTY).mkdir(mode=0o555, exist_ok=True)
        if config.pidfile:
            stack.enter_context(_pidfile(config, write=not self._only_stops))
        if config.bridge != NO_BRIDGE:
            stack.enter_context(_claim_bridge(config.bridge))
        _keep_config(config)

    def _watch_signals(self, stack: contextlib.AsyncExitStack) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ending.set)
        loop.add_signal_handler(signal.SIGUSR1, self._asked_to_stop_everything)
        loop.add_signal_handler(signal.SIGHUP, self._asked_to_reload)
        stack.callback(self.notifier.close)
        tasks.when_fatal(self._fail)
        stack.callback(tasks.when_fatal, None)

    async def _open_stores(self, stack: contextlib.AsyncExitStack) -> None:
        """Open the parts that containers depend on: records, images, networks, volumes."""
        config = self.config
        hold = await asyncio.to_thread(self.cgroups.hold)
        stack.push_async_callback(asyncio.to_thread, hold.release)
        self.runtimes = await asyncio.to_thread(Runtimes.find, config.runtime, config.runtimes, config.run)
        self.devices = Registry(config.cdi_specs)
        self.records = _records_beside(config) if self._only_stops else Records.in_root(config.root)
        self._opened_records = True
        stack.callback(self.records.close)
        self.snapshots = OverlaySnapshots(config.root, self.records, [MARK], self.defaults.ids)
        self.events = EventLog()
        discovery = Discovery((*config.plugin_sockets, config.run / "plugins"), config.plugin_specs)
        self.plugins = Plugins(discovery, config.plugin_timeout)
        stack.push_async_callback(self.plugins.close)
        self.system_bus = SystemBus()
        stack.push_async_callback(self.system_bus.close)
        self.monitor = Monitor(
            config.run,
            attach_stall=config.attach_stall,
            on_exit=self._exited,
            on_detach=self._detached,
            on_rotated=self._rotated,
            on_dropped=self._dropped,
            root=config.root,
        )
        shared = self.records, self.events, self.plugins
        self.networks = Networks(config, *shared, self.system_bus, self.defaults.ids, self.monitor)
        await self.networks.open()
        stack.push_async_callback(self._close_networks)
        self.attachments = Attachments(self.networks)
        await self.attachments.open()
        stack.push_async_callback(self.attachments.close)
        content = Content(config.root)
        self.images = ImageStore(
            self.records,
            content,
            self.snapshots,
            self.events,
            users=self._users_of,
            counts=self._containers_by_image,
        )
        await self.images.open()
        stack.push_async_callback(self.images.close)
        self.remote = Remote(config, self.images, self.events)
        stack.push_async_callback(self.remote.close)
        self.statistics = Statistics(self.cgroups)
        stack.push_async_callback(self.statistics.close)
        self.volumes = VolumeStore(config, self.records, self.events, self.plugins, self.defaults.ids)
        stack.push_async_callback(self.volumes.close)
        self.grace_period = GracePeriod(await asyncio.to_thread(mounts.mounts))
        stack.push_async_callback(self.grace_period.settled)

    async def _open_containers(self, stack: contextlib.AsyncExitStack) -> None:
        """Load the containers from their records."""
        config = self.config
        remapped = self.defaults.ids is not None
        self.facts = await asyncio.to_thread(
            _read_host, config, self.cgroups, self.defaults.cgroup_driver, remapped=remapped
        )
        self.deliveries = Deliveries(config, self.events, self.facts.name, self.monitor.ship, self.plugins)
        stack.push_async_callback(self._close_deliveries)
        self.containers = Containers(
            Parts(
                config=config,
                store=ContainerStore(self.records),
                images=self.images,
                snapshots=self.snapshots,
                networks=self.networks,
                attachments=self.attachments,
                volumes=self.volumes,
                monitor=self.monitor,
                runtimes=self.runtimes,
                cgroups=self.cgroups,
                scope_limits=ScopeLimits(self.system_bus),
                grace_period=self.grace_period,
                events=self.events,
                deliveries=self.deliveries,
                devices=self.devices,
                defaults=self.defaults,
            )
        )
        self.processes = Processes(self.containers.parts, self.plugins)
        kept = self.records, self.images, self.remote, self.events
        self.managed = ManagedPlugins(*kept, self.plugins, self.processes)
        self.packing = Packing(self.containers.find)
        stack.push_async_callback(self.packing.close)
        self.execs = Execs(config.run, self.containers, self.monitor, self.runtimes, self.grace_period)
        self.health = HealthChecks(self.execs)
        self._subscribe()
        self.oom = OomNotices(self.cgroups, self.containers.lifecycle)
        stack.callback(self.oom.close)
        self.cluster = Cluster(
            ClusterParts(
                config=self.config,
                records=self.records,
                containers=self.containers,
                images=self.images,
                remote=self.remote,
                networks=self.networks,
                attachments=self.attachments,
                volumes=self.volumes,
                events=self.events,
                host=self.facts,
                counts=self._counts,
            )
        )
        await self.containers.load()

    async def _open_monitor(self, stack: contextlib.AsyncExitStack) -> None:
        """Connect to the monitor, which has kept processes and exits since the last daemon."""
        await self.monitor.open(hold=True)
        self._took_over = bool(self.monitor.processes or self.monitor.exits)
        stack.push_async_callback(self._close_monitor)
        stack.push_async_callback(self._close_plugins)
        if self.networks.drivers.relay is not None:
            self.monitor.relay(self.networks.drivers.relay, RELAYED.packed)

    def _subscribe(self) -> None:
        """Subscribe the observers of the containers' lifecycle. They are called in this order."""
        lifecycle = self.containers.lifecycle
        lifecycle.runs.subscribe(lambda container: self._running_changed(container, True))
        lifecycle.rests.subscribe(lambda container: self._running_changed(container, False))
        lifecycle.ended.subscribe(lambda container: self.statistics.ended(container.id))
        lifecycle.ended.subscribe(lambda container: self.packing.rotated(container.id))
        lifecycle.gone.subscribe(lambda container: self.execs.forget_container(container.id))
        lifecycle.gone.subscribe(lambda container: self.monitor.forget_dropped(container.id))
        lifecycle.gone.subscribe(lambda container: memory.trim_soon())
        self.images.idle.when_idle(memory.trim_soon)

    async def _restore(self, stack: contextlib.AsyncExitStack, starting: StartingApplication) -> None:
        """Correct the records by the processes that run, and remove leftovers of a crash."""
        await self._open_monitor(stack)
        await self.cluster.restore()
        await self.containers.take_over()
        # before the containers, whose volumes they have
        await self.managed.open()
        await self.containers.open()
        self.images.changed.subscribe(self.containers.images_changed)
        self.execs.open()
        self.containers.lifecycle.ended.subscribe(lambda container: self.execs.run_ended(container.id))
        self._restored = True
        await self.health.resume(self.containers)
        stack.push_async_callback(self.health.close)
        starting.reach(Phase.KNOWN)
        turn = Turn()
        for container in [*self.containers]:
            self.oom.begin(container)
            self.packing.rotated(container.id)
            await turn.over()
        await self.networks.settle()
        await self.attachments.settle()
        await self._end_strays()
        self.monitor.deliver()
        live = {container.id for container in self.containers}
        await boot.end_strays(self.containers.parts, live)
        await self.snapshots.sweep(live | self.managed.ids(), self.images.chain_ids() | self.managed.chain_ids())
        await asyncio.to_thread(_sweep_directories, self.config.root / "containers", live)
        await self.deliveries.open()
        await self.deliveries.sweep(live, self._runs)
        await self.builder.open()
        stack.push_async_callback(self.builder.close)
        stack.push_async_callback(self.containers.settled)

    def _build_api(self, stack: contextlib.AsyncExitStack) -> StartingApplication:
        """What answers requests, and the server of it."""
        config = self.config
        parts = config, self.records, self.containers, self.images, self.remote, self.events, self.sessions
        self.builder = Builds(*parts)
        buildkit = BuildKit(
            *(config, self.records, self.sessions, self.builder, self.images),
            gateway=lambda: self.networks.host_gateway,
        )
        stack.push_async_callback(self._close_cluster)
        self.engine = engine = Engine(
            builder=self.builder,
            buildkit=buildkit,
            cluster=self.cluster,
            config=config,
            events=self.events,
            host=self.facts,
            counts=self._counts,
            containers=self.containers,
            deliveries=self.deliveries,
            devices=self.devices.devices,
            execs=self.execs,
            images=self.images,
            networks=self.networks,
            plugins=self.managed,
            programs=Programs(self.runtimes.programs, config.init_path).read,
            remote=self.remote,
            sessions=self.sessions,
            statistics=self.statistics,
            usage=Usages(self.containers, self.images, self.volumes, self.builder),
            volumes=self.volumes,
            restoring=True,
        )
        self.containers.lifecycle.gone.subscribe(lambda container: engine.kept.forget(container.id))
        self.containers.lifecycle.gone.subscribe(lambda container: engine.usage.sizes.forget(container.id))
        stack.push_async_callback(self._close_chains)
        starting = StartingApplication(engine)
        self.server = server = Server(starting)
        stack.push_async_callback(engine.websockets.close)
        stack.push_async_callback(self.sessions.close)
        stack.push_async_callback(buildkit.close)
        stack.push_async_callback(server.close)
        stack.callback(self.processes.give_up_starts)
        return starting

    async def _listen(self, stack: contextlib.AsyncExitStack) -> None:
        config, server = self.config, self.server
        if config.metrics:
            measured = Server(MetricsApplication(self.engine, host.own_process))
            stack.push_async_callback(measured.close)
            name, _, port = config.metrics.rpartition(":")
            bound = await measured.listen_tcp(name.strip("[]"), int(port), None)
            _log.info("metrics: http://%s:%d/metrics", name, bound)
        context = _tls(config)
        for path in config.sockets:
            if path.startswith(INHERITED):
                self.listening += [
                    server.listen_inherited(each, context)
                    for each in service_manager.chosen(self._inherited, path.removeprefix(INHERITED))
                ]
                continue
            await server.listen_unix(path, config.group)
            self.listening.append(path)
        for address in config.tcp:
            name, _, port = address.rpartition(":")
            bound = await server.listen_tcp(name.strip("[]"), int(port), context)
            self.listening.append(f"tcp://{name}:{bound}")

    def _application(self) -> application.Application:
        """The API. Requests are authorized if the operator has named plugins for that."""
        if self._chain is None:
            return application.Application(self.engine)
        return authorization.AuthorizedApplication(self.engine, self._chain)

    async def _authorization(self, config: Config) -> Chain | None:
        """Raises EngineError if one of the plugins cannot be used."""
        names = config.authorization_plugins
        return await Chain.open(names, self.plugins) if names else None

    async def _close_chains(self) -> None:
        for chain in (self._chain, *self._retired):
            if chain is not None:
                await chain.close()

    def _asked_to_reload(self) -> None:
        spawn(self._reload(), "reloading the configuration")

    async def _reload(self) -> None:
        """Read the configuration again. If it is invalid, or something in it cannot be used,
        nothing changes.
        """
        await self._started.wait()
        async with self._reloading:
            self.notifier.reloading()
            try:
                said = [f"{name}: the new value is in force after a restart" for name in await self._take_over()]
                for text in said:
                    _log.warning("%s", text)
                _log.info("the configuration is reloaded")
            except (ValueError, EngineError, OSError) as error:
                said = [f"{reloads.FAILED}{words(error)}"]
                _log.error("%s", said[0])
            # for `engined reload`
            text = "".join(f"engined: {each}\n" for each in said)
            await asyncio.to_thread(write_atomically, self.config.run / reloads.OUTCOME, text.encode())
            self.notifier.ready()

    async def _take_over(self) -> list[str]:
        """Take over what may change. Returns the names of options that wait for a restart."""
        if self._source is None:
            raise ServerError("this daemon has no configuration to read")
        # the file may be on a file system that does not answer
        old, loaded = self.config, await host_paths.run(self._source.load)
        drivers.check_daemon(loaded.config)
        new = reloads.merged(old, loaded.config)
        # What may fail comes first.
        runtimes = None
        if (new.runtime, new.runtimes) != (old.runtime, old.runtimes):
            runtimes = await asyncio.to_thread(Runtimes.find, new.runtime, new.runtimes, new.run)
        context = await asyncio.to_thread(_tls, new)
        chain = self._chain
        if new.authorization_plugins != old.authorization_plugins:
            chain = await self._authorization(new)
        try:
            await asyncio.to_thread(_keep_config, new)
        except BaseException:
            if chain is not None and chain is not self._chain:
                chain.retire(self.plugins, self._chain)
                await chain.close()
            raise
        self.config = self.engine.config = new
        logging.getLogger().setLevel(new.log_level.upper())
        if runtimes is not None:
            self.runtimes.become(runtimes)
        self.remote.configure(new)
        if context is not None:
            self.server.renew_tls(context)
        if chain is not self._chain:
            if self._chain is not None:
                self._chain.retire(self.plugins, chain)
                self._retired.append(self._chain)
            self._chain = chain
            self.server.serve(self._application())
        for key, why in loaded.meaningless.items():
            _log.warning("the configuration key %s has no meaning here: %s", key, why)
        self.events.publish("daemon", "reload", self.facts.id, {"name": self.facts.name} | reloads.attributes(new))
        return [*dict.fromkeys(loaded.names[field] for field in reloads.waiting(old, loaded.config))]

    def _counts(self) -> Counts:
        """The values of /info that may change between two requests."""
        states = self.containers.counts()
        return Counts(
            running=states[State.RUNNING] + states[State.RESTARTING],
            paused=states[State.PAUSED],
            stopped=states[State.CREATED] + states[State.EXITED] + states[State.REMOVING],
            images=len(self.images),
            driver_status=(("Backing directory", str(self.config.root)),),
            default_runtime=self.runtimes.default_name,
            runtime=self.runtimes.default.name,
            runtime_version=self.runtimes.default.version,
            runtimes=self.runtimes.programs(),
            bridge=self.config.bridge,
            labels=self.config.labels,
            volume_drivers=tuple(self.volumes.drivers()),
            network_drivers=tuple(self.networks.driver_names()),
            authorization_plugins=tuple(dict.fromkeys(self.config.authorization_plugins)),
            log_drivers=(*drivers.names(journal=log_plan.has_journal()), *self.plugins.active("LogDriver")),
            log_dropped=sum(self.monitor.dropped.values()),
            descriptors=open_descriptors(),
            tasks=len(asyncio.all_tasks()),
            troubles=tuple(self.networks.drivers.firewall.troubles),
        )

    def _undo_start(self, before: _Before) -> None:
        """A start that has failed leaves no files in a ROOT that had none."""
        if not (self._serves or self._took_over or self._only_stops):
            # Without the records' lock, another engine may use ROOT by now.
            before.restore(self.config.root, whole=self._opened_records)

    def _leave_run(self, claim: int) -> None:
        """Release the lock of RUN. If nothing of the engine is to stay, remove its files in RUN,
        and RUN itself if it is empty then.
        """
        if self._leaves_nothing:
            root = self.config.run / ROOT
            mounts.unmount(root)
            for place in (detached_mounts.place_beside(root), root):
                with contextlib.suppress(FileNotFoundError):  # the start failed before it was made
                    place.rmdir()
            for name in (
                "config.json",
                EMPTY,
                reloads.OUTCOME,
                "stop-timeout",
                "exec",
                "monitor",
                "records",
                "runtime",
                "shipper",
                "shm",
                log_plan.FIFOS,
                "volumes",
                BUNDLES,
                "engined.pid",
            ):
                path = self.config.run / name
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
            mounts.unmount(self.config.run / NETNS)
            for place in (self.config.run / SOCKETS, self.config.run / NETNS, self.config.run):
                # not empty: sockets or plugins of other programs
                with contextlib.suppress(OSError):
                    place.rmdir()
        os.close(claim)

    @property
    def _leaves_nothing(self) -> bool:
        """True if monitor and bridge are removed as well: after `engined stop`, and when a start
        fails that found no containers running.
        """
        return self._stop_everything or not (self._serves or self._took_over)

    def _users_of(self, image_id: str) -> list[ImageUser]:
        return self.containers.using_image(image_id)

    def _containers_by_image(self) -> dict[str, int]:
        return self.containers.by_image()

    def _exited(self, key: str, exit_record: Exit) -> None:
        """Pass the monitor's report to its container, exec or plugin."""
        container = self.containers.find(key)
        if container is not None:
            container.exited()
        elif key in self.execs:
            self.execs.exited(key, exit_record)
        elif not self.processes.exited(key, exit_record):
            self.monitor.forget(key)

    def _runs(self, container_id: str) -> bool:
        container = self.containers.find(container_id)
        return container is not None and container.running

    def _running_changed(self, container: Container, runs: bool) -> None:
        if self._restored:  # before that, `resume` handles all exits
            self.health.changed(container, runs)

    def _rotated(self, key: str) -> None:
        self.packing.rotated(key)

    def _dropped(self, key: str, first: bool) -> None:
        """Lines could not be written to its log. Each run has one warning of it."""
        container = self.containers.find(key)
        if container is not None:
            container.touch()
        if first:
            _log.warning("%s: lines of its output cannot be written to its log, and are lost", key)

    def _detached(self, key: str, client: int, by_keys: bool) -> None:
        """A client has left. Docker publishes an event only for the detach keys."""
        container = self.containers.find(key)
        if container is None:
            self.execs.detached(key, by_keys)
        elif by_keys:
            container.publish("detach")

    async def _end_strays(self) -> None:
        """End processes that belong to no container, exec or plugin. A crash between a start and
        the write of its record leaves such processes.
        """
        for key in [*self.monitor.processes, *self.monitor.exits]:
            if key not in self.containers and key not in self.execs and key not in self.processes:
                _log.warning("ending process %s: it belongs to no container", key)
                with contextlib.suppress(NotFound):
                    self.monitor.signal(key, signal.SIGKILL)
                await self.runtimes.default.delete(key)
                self.monitor.forget(key)

    def _asked_to_stop_everything(self) -> None:
        self._stop_everything = True
        self._ending.set()

    def _fail(self, message: str) -> None:
        """End the daemon, because a background task that it cannot do without has failed."""
        self._failure = self._failure or message
        self._ending.set()

    async def until_asked_to_end(self) -> None:
        """Wait for SIGTERM, SIGINT or `engined stop`. After the latter all containers have exited.

        Raises ServerError when a fatal background task has failed. Containers keep running then.
        """
        await self._ending.wait()
        if self._failure:
            _end_whatever_hangs(HANGING_CALL, 1)
            raise ServerError(f"stopping the daemon after a failure: {self._failure}")
        if self._stop_everything:
            try:
                seconds = float((self.config.run / "stop-timeout").read_text())
            except (OSError, ValueError):
                seconds = float(self.config.shutdown_timeout)
            _end_whatever_hangs(seconds + HANGING_CALL)
            await self.stop_everything(seconds)
        else:
            _end_whatever_hangs(HANGING_CALL)

    async def stop_everything(self, seconds: float) -> None:
        """Stop every container. Parts remove what they made on the host when they close."""
        self._stop_everything = True
        self.plugins.hurry(STOPPING_CALL)
        # First, so that the agent reports no failure of a task whose container ends.
        await self.cluster.close(stop=True)
        await self.containers.stop_all(seconds)
        await self.deliveries.settled()

    async def _close_cluster(self) -> None:
        # A start that fails has not started the manager's process: it is an earlier daemon's.
        await self.cluster.close(stop=self._stop_everything)

    async def _close_plugins(self) -> None:
        if self._leaves_nothing:
            await self.processes.stop_all()
        await self.processes.close()

    async def _close_deliveries(self) -> None:
        await self.deliveries.close(stop=self._stop_everything)

    async def _close_monitor(self) -> None:
        if self._leaves_nothing:
            # Strays of the start (`_end_strays`), whose ends the monitor may not have seen yet.
            if left := {process.exit for process in self.monitor.processes.values()}:
                await asyncio.wait(left, timeout=END_LIMIT)
            await self.monitor.shutdown(END_LIMIT)
        else:
            await self.monitor.close()

    async def _close_networks(self) -> None:
        await self.networks.close(remove=self._leaves_nothing)


def _end_whatever_hangs(seconds: float, status: int = 0) -> None:
    """End the process with this status in so many seconds if calls on paths of the host still hang
    then. What waits for them can neither go on nor be undone; the next start mends it, as after a
    kill.
    """

    def look() -> None:
        if calls := host_paths.hanging(HANGING_CALL):
            _log.warning("ending at once: %d calls on paths of the host do not return", calls)
            os._exit(status)
        loop.call_later(1, look)

    loop = asyncio.get_running_loop()
    loop.call_later(seconds, look)


def _read_host(config: Config, hierarchies: Cgroups, driver: str, *, remapped: bool) -> Host:
    """The facts about this host for /info. The limits are those that a create accepts without a
    warning.
    """
    offered = hierarchies.support()
    facts = host.read(config.root)
    private = config.cgroupns_mode or ("private" if hierarchies.mode == "v2" else "host")
    return msgspec.structs.replace(
        facts,
        # If AppArmor is on, this loads the default profile, so that no container start has to.
        security_options=(
            *(("name=apparmor",) if apparmor.default() else ()),
            *(f"name=seccomp,profile={config.seccomp_profile}" for _ in facts.security_options),
            *(("name=userns",) if remapped else ()),
            *(("name=cgroupns",) if private == "private" else ()),
            *(("name=no-new-privileges",) if config.no_new_privileges else ()),
        ),
        cgroup_driver=driver,
        cgroup_version="2" if hierarchies.mode == "v2" else "1",
        memory_limit=offered.memory,
        swap_limit=offered.swap,
        kernel_memory=offered.kernel_memory,
        oom_kill_disable=offered.oom_kill_disable,
        cpu_cfs_period=offered.quota,
        cpu_cfs_quota=offered.quota,
        cpu_shares=offered.shares,
        cpu_set=offered.cpuset,
        pids_limit=offered.pids,
    )


def _records_beside(config: Config) -> Records:
    """ROOT's records, to stop what runs. Where ROOT has become read-only, as a disk with errors
    does, they are a copy in RUN: changes are lost, and the next daemon sees what has ended.
    """
    try:
        return Records.in_root(config.root)
    except ServerError as error:
        cause = error.__cause__
        if not (isinstance(cause, OSError) and cause.errno == errno.EROFS):
            raise
    _log.warning("%s is read-only: what is stopped is not recorded", config.root)
    place = config.run / "records"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(0o700)
    for path in config.root.glob("state.db*"):
        shutil.copy(path, place)
    return Records(place / "state.db")


def _make_directories(config: Config) -> None:
    """Make ROOT and RUN. ROOT has files and environments of containers, so only root may read it.
    Sockets in RUN have their own modes.
    """
    if not (config.root / "state.db").exists() and (found := _of_dockerd(config.root)):
        raise ServerError(
            f"{config.root}: has data of dockerd ({found}), which this engine cannot use: choose another directory "
            "with --root (data-root)"
        )
    try:
        for directory in (config.root, config.root / "containers", config.root / "volumes"):
            directory.mkdir(mode=0o710, parents=True, exist_ok=True)
            if directory.stat().st_mode & 0o7777 != 0o710:  # ROOT may be read-only by now
                directory.chmod(0o710)
        config.run.mkdir(mode=0o711, parents=True, exist_ok=True)
    except FileExistsError as error:
        raise ServerError(f"{error.filename}: is not a directory") from error


def _check_passable(run: Path) -> None:
    """Raises ServerError if the root of a user namespace cannot reach RUN, where the runtime finds
    the root of a container.
    """
    for directory in run.absolute().parents:
        if not directory.stat().st_mode & stat.S_IXOTH:
            raise ServerError(f"--userns-remap: {directory}, above {run}, must permit others to pass: chmod o+x")


class _Before(NamedTuple):
    """ROOT as it was before a start."""

    there: bool
    used: bool

    @classmethod
    def of(cls, root: Path) -> _Before:
        there = root.is_dir()
        return cls(there, there and any(root.iterdir()))

    def restore(self, root: Path, *, whole: bool) -> None:
        """Remove what the start has put into ROOT; if not `whole`, only empty directories."""
        if self.used:
            return
        for entry in [*root.iterdir()]:
            with contextlib.suppress(OSError):  # not empty
                if not whole:
                    entry.rmdir()
                elif entry.is_dir():
                    remove_tree(entry)
                else:
                    entry.unlink()
        if not self.there:
            with contextlib.suppress(OSError):
                root.rmdir()


def _of_dockerd(root: Path) -> str:
    """A directory that dockerd makes and this engine does not; empty if there is none."""
    return next(
        (name for name in ("network", "image", "overlay2", "buildkit", "containerd") if (root / name).is_dir()), ""
    )


def _sweep_directories(containers: Path, live: set[str]) -> None:
    """Remove directories of containers without a record, which a crash during create has left."""
    for directory in containers.iterdir():
        if directory.name not in live:
            _log.info("removing %s: it belongs to no container", directory)
            remove_tree(directory)


def _claim(run: Path) -> int:
    """Take the lock that allows one daemon per `run`. The file has its pid, for `engined stop`."""
    descriptor = os.open(run / "engined.pid", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise OSError(f"another engine is already running in {run}") from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor


@contextlib.contextmanager
def _pidfile(config: Config, *, write: bool) -> Iterator[None]:
    """Have the daemon's pid in the operator's file, until the daemon ends. Raises OSError if a
    process has this pid that the file names already, as dockerd does.
    """
    path = Path(config.pidfile)
    if path.resolve() == config.run / "engined.pid":  # the claim, which has the pid
        yield
        return
    if write:
        with contextlib.suppress(FileNotFoundError, ValueError):
            pid = int(path.read_bytes())
            if pid > 0 and pid != os.getpid() and os.path.exists(f"/proc/{pid}"):
                raise OSError(f"{path}: process {pid}, which it names, is still running")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(os.getpid()))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _claim_bridge(name: str) -> socket.socket:
    """Take the lock that allows one engine per bridge: an abstract Unix socket, which is per
    network namespace, unix(7).
    """
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0engined/bridge/{name}")
    except OSError as error:
        claim.close()
        raise OSError(f"another engine already uses the bridge {name}; choose another one with --bridge") from error
    return claim


def _tls(config: Config) -> ssl.SSLContext | None:
    """None without certificates: plain TCP, which `Server` allows only on loopback addresses."""
    return mutual_context(config.tls_ca, config.tls_cert, config.tls_key) if config.tls_cert else None


def _keep_config(config: Config) -> None:
    """Write the configuration for an `engined stop` without a daemon."""
    write_atomically(config.run / "config.json", encode(config))


__all__ = ["Daemon", "__version__", "run"]
