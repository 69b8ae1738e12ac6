"""Builds every part, restores state at start, stops in reverse. The one module that may import all.

SIGTERM and SIGINT end the daemon alone: containers and monitor live on. SIGUSR1 (`engined stop`) stops them too and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import logging
import os
import shutil
import signal
import socket
import ssl
import sys
from pathlib import Path

import msgspec
import uvloop

from engine import __version__
from engine.api import application
from engine.api.engine import Engine
from engine.config import Config
from engine.containers.container import ROOT, Container, Containers, Parts
from engine.containers.exec import Execs
from engine.containers.health import HealthChecks
from engine.containers.lifecycle import State
from engine.containers.stats import Statistics
from engine.containers.store import ContainerStore
from engine.errors import EngineError, NotFound
from engine.events import EventLog
from engine.http.server import Server
from engine.images.remote import Remote
from engine.images.store import ImageStore, ImageUser
from engine.monitor.client import Exit, Monitor
from engine.networks.filter import RELAYED
from engine.networks.networks import Networks
from engine.runtime import cgroups
from engine.runtime.cgroups import Cgroups
from engine.runtime.migration import Migration
from engine.runtime.oci import Runtime
from engine.storage.content import Content
from engine.storage.overlay import OverlaySnapshots
from engine.storage.records import Records
from engine.system import host, mounts
from engine.system.files import remove_tree, write_atomically
from engine.system.threads import put_first
from engine.volumes.store import VolumeStore
from engine.wire.system import Counts, Host

MARK = ".dockerenv"
"""At the root of every container: by it programs tell that they are in one (systemd-detect-virt, Testcontainers)."""

_log = logging.getLogger(__name__)


def run(config: Config, *, stop_after: float | None = None) -> int:
    """Serve until told to end; the program's exit status.

    `stop_after`: do not serve, but stop what an earlier daemon left running, with so many seconds for the containers.
    """
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    put_first()
    try:
        uvloop.run(_serve(config, stop_after))
        return 0
    except EngineError as error:
        print(f"engined: {error.message}", file=sys.stderr)
    except OSError as error:
        print(f"engined: {error}", file=sys.stderr)
    return 1


async def _serve(config: Config, stop_after: float | None) -> None:
    async with contextlib.AsyncExitStack() as stack:
        daemon = Daemon(config)
        await daemon.open(stack)
        if stop_after is not None:
            await daemon.stop_everything(stop_after)
            return
        for path in daemon.listening:
            print(f"listening on {path}", flush=True)
        _notify_ready()
        await daemon.until_told()


def _notify_ready() -> None:
    """sd_notify(3): the one datagram that systemd waits for with Type=notify."""
    address = os.environ.pop("NOTIFY_SOCKET", "")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifier, contextlib.suppress(OSError):
            notifier.sendto(b"READY=1", "\0" + address[1:] if address.startswith("@") else address)


class Daemon:
    """One engine: its parts, in the order in which they stand on each other."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.listening: list[str] = []
        self._told = asyncio.Event()
        self._stop_everything = False
        self._took_over = False
        self.health: HealthChecks | None = None

    async def open(self, stack: contextlib.AsyncExitStack) -> None:
        """Build and restore everything; `stack` takes it down again in reverse."""
        config = self.config
        _make_directories(config)
        stack.callback(self._leave_run, _claim(config.run))
        stack.enter_context(_claim_bridge(config.bridge))
        _keep_config(config)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._told.set)
        loop.add_signal_handler(signal.SIGUSR1, self._told_to_stop_everything)

        self.cgroups = await asyncio.to_thread(Cgroups.detect)
        runtime = await asyncio.to_thread(Runtime.probe, config.runtime, config.run)
        records = Records(config.root / "state.db")
        stack.callback(records.close)
        content = Content(config.root)
        snapshots = OverlaySnapshots(config.root, records, [MARK])
        events = EventLog()
        networks = Networks(config, records, events)
        await networks.open()
        stack.push_async_callback(self._close_networks, networks)
        self.monitor = monitor = Monitor(
            config.run, attach_stall=config.attach_stall, on_exit=self._exited, on_detach=self._detached
        )
        images = ImageStore(records, content, snapshots, events, users=self._users_of)
        await images.open()
        stack.push_async_callback(images.close)
        remote = Remote(config, images, events)
        stack.push_async_callback(remote.close)
        statistics = Statistics(self.cgroups)
        stack.push_async_callback(statistics.close)
        volumes = VolumeStore(config, records, events)
        stack.push_async_callback(volumes.close)
        migration = Migration(await asyncio.to_thread(mounts.mounts))
        stack.push_async_callback(migration.settled)
        self.containers = Containers(
            Parts(
                config=config,
                store=ContainerStore(records),
                images=images,
                snapshots=snapshots,
                networks=networks,
                volumes=volumes,
                monitor=monitor,
                runtime=runtime,
                cgroups=self.cgroups,
                migration=migration,
                events=events,
                statistics=statistics,
                running_changed=self._running_changed,
                gone=self._gone,
            )
        )
        await monitor.open(hold=True)
        self._took_over = bool(monitor.processes or monitor.exits)
        stack.push_async_callback(self._close_monitor, monitor)
        if networks.relay is not None:
            monitor.relay(networks.relay, RELAYED.packed)
        await self.containers.open()
        await networks.settle()
        self.execs = Execs(config.run, self.containers, monitor, runtime, migration)
        self.execs.open()
        self.health = HealthChecks(self.execs)
        self.health.resume(self.containers)
        stack.push_async_callback(self.health.close)
        await self._end_strays(runtime)
        monitor.deliver()
        await snapshots.sweep({container.id for container in self.containers}, images.chain_ids())
        await asyncio.to_thread(_sweep_directories, config.root / "containers", {each.id for each in self.containers})
        stack.push_async_callback(self.containers.settled)

        def counts() -> Counts:
            states = self.containers.counts()
            return Counts(
                running=states[State.RUNNING] + states[State.RESTARTING],
                paused=states[State.PAUSED],
                stopped=states[State.CREATED] + states[State.EXITED] + states[State.DEAD],
                images=len(images),
                driver_status=(("Backing directory", str(config.root)),),
                runtime=runtime.name,
                runtimes={runtime.name: runtime.path},
                bridge=config.bridge,
                volume_drivers=tuple(volumes.drivers()),
            )

        engine = Engine(
            config=config,
            events=events,
            host=await asyncio.to_thread(_read_host, config.root, self.cgroups),
            counts=counts,
            containers=self.containers,
            execs=self.execs,
            images=images,
            networks=networks,
            remote=remote,
            volumes=volumes,
            monitor=monitor,
        )
        server = Server(application.Application(engine))
        stack.push_async_callback(engine.websockets.close)
        stack.push_async_callback(server.close)
        for path in config.sockets:
            await server.listen_unix(path, config.group)
            self.listening.append(path)
        for address in config.tcp:
            name, _, port = address.rpartition(":")
            bound = await server.listen_tcp(name.strip("[]"), int(port), _tls(config))
            self.listening.append(f"tcp://{name}:{bound}")
        for container in self.containers:
            container.start_at_boot()
        # What start-up made lives as long as the daemon: full collections need not walk it again.
        gc.collect()
        gc.freeze()

    def _leave_run(self, claim: int) -> None:
        """Give up the claim; after `engined stop` nothing of ours is left in RUN."""
        if self._leaves_nothing:
            root = self.config.run / ROOT
            mounts.unmount(root)
            with contextlib.suppress(FileNotFoundError):  # not come so far
                root.rmdir()
        if self._stop_everything:
            for name in ("config.json", "stop-timeout", "exec", "monitor", "runtime", "volumes", "engined.pid"):
                path = self.config.run / name
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
        os.close(claim)

    @property
    def _leaves_nothing(self) -> bool:
        """Monitor and bridge go too: after `engined stop`, or when a start-up failed that had nothing to take over."""
        return self._stop_everything or not (self.listening or self._took_over)

    def _users_of(self, image_id: str) -> list[ImageUser]:
        return self.containers.using_image(image_id)

    def _exited(self, key: str, exit_record: Exit) -> None:
        """The monitor's report, to the container or exec it is about."""
        container = self.containers.find(key)
        if container is not None:
            container.exited(exit_record)
        elif key in self.execs:
            self.execs.exited(key, exit_record)
        else:
            self.monitor.forget(key)

    def _running_changed(self, container: Container, runs: bool) -> None:
        if self.health is not None:  # else they are being restored, and `resume` will look at them all
            self.health.changed(container, runs)

    def _gone(self, container_id: str) -> None:
        self.execs.forget_container(container_id)

    def _detached(self, key: str, client: int, by_keys: bool) -> None:
        """A client left: Docker tells of those who typed the detach keys."""
        if not by_keys:
            return
        container = self.containers.find(key)
        if container is not None:
            container.publish("detach")
        else:
            self.execs.detached(key)

    async def _end_strays(self, runtime: Runtime) -> None:
        """Processes that neither a container nor an exec answers for: what a crash between a start and its record would leave."""
        for key in [*self.monitor.processes, *self.monitor.exits]:
            if key not in self.containers and key not in self.execs:
                _log.warning("process %s belongs to no container: ending it", key)
                with contextlib.suppress(NotFound):
                    self.monitor.signal(key, signal.SIGKILL)
                await runtime.delete(key)
                self.monitor.forget(key)

    def _told_to_stop_everything(self) -> None:
        self._stop_everything = True
        self._told.set()

    async def until_told(self) -> None:
        """Until SIGTERM, SIGINT or `engined stop`; the latter's containers have ended when it returns."""
        await self._told.wait()
        if self._stop_everything:
            try:
                seconds = float((self.config.run / "stop-timeout").read_text())
            except (OSError, ValueError):
                seconds = 10.0
            await self.stop_everything(seconds)

    async def stop_everything(self, seconds: float) -> None:
        """Stop every container, and have the parts remove what they made on the host when they close."""
        self._stop_everything = True
        await self.containers.stop_all(seconds)

    async def _close_monitor(self, monitor: Monitor) -> None:
        if self._leaves_nothing:
            await monitor.shutdown()
            await asyncio.to_thread(self.cgroups.discard, cgroups.PARENT)
        else:
            await monitor.close()

    async def _close_networks(self, networks: Networks) -> None:
        await networks.close(remove=self._leaves_nothing)


def _read_host(root: Path, hierarchies: Cgroups) -> Host:
    """What /info tells of this host; the limits are those that a create does not warn of."""
    offered = hierarchies.support()
    return msgspec.structs.replace(
        host.read(root),
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


def _make_directories(config: Config) -> None:
    """ROOT holds environments and files of containers: nobody but root looks into it. The sockets of RUN have modes of their own."""
    for directory in (config.root, config.root / "containers", config.root / "volumes"):
        directory.mkdir(mode=0o710, parents=True, exist_ok=True)
        directory.chmod(0o710)
    config.run.mkdir(mode=0o711, parents=True, exist_ok=True)


def _sweep_directories(containers: Path, live: set[str]) -> None:
    """Remove the directories of containers that a crash kept from being recorded, or from being removed whole."""
    for directory in containers.iterdir():
        if directory.name not in live:
            _log.info("removing %s: no container has it", directory)
            remove_tree(directory)


def _claim(run: Path) -> int:
    """The lock that makes this daemon the only one of `run`; its pid is in the file for `engined stop`."""
    descriptor = os.open(run / "engined.pid", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise OSError(f"another engine already runs on {run}") from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor


def _claim_bridge(name: str) -> socket.socket:
    """The claim to be the only engine on a bridge: an abstract Unix socket, which lives in the bridge's own network namespace (unix(7))."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0engined/bridge/{name}")
    except OSError as error:
        claim.close()
        raise OSError(f"another engine already runs on the bridge {name}: choose another with --bridge") from error
    return claim


def _keep_config(config: Config) -> None:
    """For `engined stop` when no daemon lives to be asked."""
    write_atomically(config.run / "config.json", msgspec.json.encode(config, enc_hook=str))


def _tls(config: Config) -> ssl.SSLContext | None:
    """The context that asks every client for a certificate of `tls_ca`; None for plain TCP, which `Server` allows on loopback alone."""
    if not config.tls_cert:
        return None
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=config.tls_ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(config.tls_cert, config.tls_key)
    except ssl.SSLError as error:
        raise OSError(f"{config.tls_ca}, {config.tls_cert}, {config.tls_key}: {error.reason or error}") from error
    context.verify_mode = ssl.CERT_REQUIRED
    return context


__all__ = ["Daemon", "__version__", "run"]
