"""A host and an engine's containers in memory. Every await of an adapter is a named point, at which
a test decides what happens next.

`World` outlives the engine: rows of state.db, processes, mounts, networks, frozen processes.
`Engine` is one daemon on it, with the real `Containers`, `Container` and `ContainerStore`;
`World.boot` makes one, `World.crash` kills it. Time is virtual (`run`): it jumps to the next timer
when nothing is ready. A test in which nothing is ready and no timer is set fails.

There are no threads: `asyncio.to_thread` and `host_paths.run` await a point and then call the
function.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import msgspec
import pytest

from engine.config import Config as EngineConfig
from engine.containers import boot, bundle
from engine.containers.containers import Containers
from engine.containers.lifecycle import State
from engine.containers.parts import Parts
from engine.containers.store import ContainerRecord, ContainerStore
from engine.errors import Conflict, EngineError, NotFound, ServerError
from engine.events import EventLog
from engine.monitor.handles import Exit, Process
from engine.networks.attachments import Joined
from engine.networks.endpoints import Sandbox
from engine.runtime.cgroups import Support
from engine.runtime.runtimes import Runtimes
from engine.runtime.scope_limits import ScopeLimits
from engine.storage.records import Change, Table
from engine.storage.snapshots import Ingest, Usage
from engine.system import host_paths
from engine.system.system_bus import SystemBus
from engine.wire import oci
from engine.wire.containers import (
    Config,
    CreateBody,
    EndpointSettings,
    HostConfig,
    LogConfig,
    MountPoint,
    RestartPolicy,
)
from engine.wire.images import ImageConfig
from tests.support.fakes.monitor import FakeMonitor, Host

T = TypeVar("T")


class Deadlock(AssertionError):
    """Nothing is ready and no timer is set."""


class Killed(BaseException):
    """Raised at the points of a killed daemon, so that its tasks end without further effect."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with virtual time, which jumps to the next timer when nothing is ready."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 1000.0
        selector: Any = self._selector  # type: ignore[attr-defined]
        select = selector.select

        def jump(timeout: float | None = None) -> Any:
            if timeout is None:
                raise Deadlock("every task waits for another")
            self._now += max(timeout, 0)
            return select(0)

        selector.select = jump

    def time(self) -> float:
        return self._now


def run(story: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(story)


class Records:
    """state.db. Changes take effect in the order in which they are passed in, even if the caller is
    cancelled.
    """

    def __init__(self, world: World) -> None:
        self.world = world

    def table(self, kind: str, record_type: Any) -> Any:
        return Table(self, kind, record_type)  # type: ignore[arg-type]

    def rows(self, kind: str) -> list[tuple[str, bytes]]:
        return sorted((key, value) for (of, key), value in self.world.rows.items() if of == kind)

    async def commit(self, *changes: Change) -> None:
        self.world.check_alive()
        if not changes:
            return
        if self.world.disk_full:
            await self.world.point("commit: refused")
            raise ServerError("database or disk is full")
        for kind, key, value in changes:
            if value is None:
                self.world.rows.pop((kind, key), None)
            else:
                self.world.rows[kind, key] = value
        await self.world.point("commit: done")


class Snapshots:
    """Roots of containers, by key."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def prepare(self, key: str, parent: str | None, *, transient: bool = False, marked: bool = True) -> None:
        await self.world.point("prepare")
        self.world.layers.add(key)

    async def take(self, key: str) -> Ingest:
        await self.world.point("take root")
        if key not in self.world.layers:
            raise NotFound(f"No such snapshot: {key}")
        assert key not in self.world.mounted
        self.world.layers.discard(key)
        self.world.ingests.add(key)
        self.world.taken.add(key)
        return Ingest(1, self.world.base / key)

    async def abandon(self, ingest: Ingest) -> None:
        await self.world.point("abandon")
        self.world.ingests.discard(ingest.path.name)

    async def keep(self, key: str) -> None:
        await self.world.point("keep root")
        if key not in self.world.layers:
            raise NotFound(f"No such snapshot: {key}")
        assert key not in self.world.mounted

    async def remove(self, key: str) -> None:
        await self.world.point("remove root")
        if key not in self.world.layers and key not in self.world.taken:
            raise NotFound(f"No such snapshot: {key}")
        self.world.layers.discard(key)
        self.world.mounted.discard(key)

    async def usage(self, key: str) -> Usage:
        await self.world.point("count files")
        if key not in self.world.layers:
            raise NotFound(f"No such snapshot: {key}")
        return Usage(1000, 1)

    def chain(self, parent: str | None) -> list[Any]:
        return []

    async def mount(self, key: str, *, mapped: bool = False) -> None:
        if key not in self.world.layers:
            raise NotFound(f"No such snapshot: {key}")
        await self.world.point("mount root")
        self.world.mounted.add(key)

    def mounted(self, key: str) -> str:
        assert key in self.world.mounted
        return "/merged"

    @contextlib.asynccontextmanager
    async def shown(self, key: str, target: Path, beside: Sequence[Any] = ()) -> AsyncIterator[int]:
        await self.world.point("show root")
        yield 3

    async def unmount(self, key: str) -> None:
        await self.world.point("unmount root")
        self.world.mounted.discard(key)

    async def resume(self, kept: int) -> set[str]:
        return set(self.world.mounted)

    @property
    def mount_namespace(self) -> Any:
        return SimpleNamespace(descriptor=3)


class Networks:
    """Networks and attachments, with the networks of each container. A new daemon knows none until
    `restore`.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.by_id: dict[str, Any] = {}
        self.members: dict[str, dict[str, EndpointSettings]] = {}
        self.opening: set[str] = set()

    def name_of(self, mode: str) -> str:
        return "bridge" if mode in ("", "default") else mode

    def is_shared(self, network_id: str, name: str) -> bool:
        return False

    def get(self, text: str) -> Any:
        return SimpleNamespace(record=SimpleNamespace(name=text))

    def host_gateways(self) -> list[str]:
        return ["172.17.0.1"]

    async def join(self, sandbox: Sandbox, networks: dict[str, EndpointSettings], *_: object, **__: object) -> Joined:
        assert sandbox.container_id not in self.members, "it has joined already"
        await self.world.point("join networks")
        endpoints = {key: msgspec.structs.replace(each, ip_address="172.17.0.2") for key, each in networks.items()}
        self.members[sandbox.container_id] = endpoints
        return Joined("", dict(endpoints))

    async def opened(self, container_id: str) -> tuple[()]:
        await self.world.point("open ports")
        return ()

    def runs(self, container_id: str) -> None:
        assert container_id in self.members

    async def leave(self, container_id: str) -> None:
        await self.world.point("leave networks")
        self.members.pop(container_id, None)

    async def connect(
        self, container_id: str, name: str, wanted: EndpointSettings, process: Process
    ) -> EndpointSettings:
        if container_id not in self.members:
            raise NotFound(f"container {container_id} has no networks")
        if name in self.members[container_id]:
            raise Conflict("already connected")
        await self.world.point("connect")
        given = msgspec.structs.replace(wanted, ip_address="172.18.0.2")
        self.members[container_id][name] = given
        return given

    async def disconnect(self, container_id: str, name: str) -> None:
        await self.world.point("disconnect")
        if self.members.get(container_id, {}).pop(name, None) is None:
            raise NotFound("not connected")

    async def network_id(self, container_id: str, name: str, text: str, wanted: EndpointSettings) -> str:
        await self.world.point("find network")
        return text

    def check(self, container_id: str, name: str, wanted: EndpointSettings, among: Any) -> EndpointSettings:
        if name in among:
            raise Conflict("already connected")
        return wanted

    def check_connected(self, container_id: str, name: str, among: Any) -> str:
        if name not in among:
            raise NotFound("not connected")
        return name

    def restore(self, sandbox: Sandbox, networks: dict[str, EndpointSettings], *_: object) -> None:
        self.members[sandbox.container_id] = dict(networks)

    def ports_of(self, container_id: str) -> tuple[()]:
        return ()

    def check_endpoint(self, text: str, wanted: EndpointSettings) -> None: ...
    def renamed(self, container_id: str, name: str) -> None: ...
    def reserve(self, networks: Any) -> None: ...
    def unreserve(self, networks: Any) -> None: ...


class Volumes:
    """One mount per running container, without drivers."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.resumed: set[str] = set()

    async def open(self, containers: Any) -> None: ...
    async def sweep(self) -> None:
        self.world.volumes &= self.resumed

    def resume(self, container_id: str, points: Sequence[MountPoint]) -> None:
        self.resumed.add(container_id)

    @contextlib.asynccontextmanager
    async def claim(self, container_id: str, points: Any, named: Any, wanted: Any = ()) -> AsyncIterator[Any]:
        await self.world.point("claim volumes")
        try:
            yield SimpleNamespace(mounts=tuple(points), changes=())
        except BaseException:
            await self.world.point("give volumes back")
            raise

    async def mount(self, container_id: str, points: Any, borrowed: Any, subpaths: Any = ()) -> Any:
        await self.world.point("mount volumes")
        self.world.volumes.add(container_id)
        return SimpleNamespace(points=tuple(points), sources={})

    async def unmount(self, container_id: str, points: Any) -> None:
        await self.world.point("unmount volumes")
        self.world.volumes.discard(container_id)

    def release(self, container_id: str, names: set[str]) -> None: ...

    @contextlib.asynccontextmanager
    async def leave(self, container_id: str, points: Any, named: Any, *, anonymous: bool) -> AsyncIterator[Any]:
        await self.world.point("leave volumes")
        yield ()


class Runtime:
    """crun. It kills, freezes and limits containers; the fake monitor makes them."""

    name = "crun"

    def __init__(self, world: World) -> None:
        self.world = world

    def run_argv(self, key: str, **_: object) -> list[str]:
        return ["crun", "run", key]

    def _check(self, key: str) -> None:
        if key not in self.world.host.processes:
            raise NotFound(f"no such container: {key}")

    async def delete(self, key: str) -> None:
        await self.world.point("runtime delete")
        if key in self.world.host.processes:
            self.world.host.end(key, 137)
        self.world.frozen.discard(key)

    async def discard(self, key: str, cgroup: str, hierarchies: Any) -> None:
        await self.world.point("runtime discard")
        self.world.frozen.discard(key)

    async def pause(self, key: str) -> None:
        self._check(key)
        await self.world.point("runtime pause")
        self._check(key)
        self.world.frozen.add(key)

    async def resume(self, key: str) -> None:
        self._check(key)
        await self.world.point("runtime resume")
        self.world.frozen.discard(key)
        self._check(key)

    async def update(self, key: str, resources: Any) -> None:
        self._check(key)
        await self.world.point("runtime update")


class Cgroups:
    def __init__(self, world: World) -> None:
        self.world = world

    def support(self) -> Support:
        return Support()

    def oom_killed(self, cgroup: str) -> bool:
        return False

    def children(self, parent: str = "") -> frozenset[str]:
        return frozenset({*self.world.host.processes, *self.world.frozen})

    def remove(self, cgroup: str) -> None: ...
    def lift(self, cgroup: str, controller: str) -> None: ...


class Images:
    def get(self, name: str) -> Any:
        if name != "busybox":
            raise NotFound(f"No such image: {name}")
        return SimpleNamespace(id="sha256:" + "0" * 64, chain_ids=(), config=ImageConfig(config=Config(cmd=["sh"])))


class GracePeriod:
    def expect(self) -> None: ...

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        yield


class Deliveries:
    """No container of these tests has a remote log target."""

    async def check(self, log: LogConfig) -> None:
        pass

    def ended(self, container_id: str) -> None:
        pass

    async def removed(self, container_id: str) -> None:
        pass


class World:
    """The state that outlives a daemon, and `point`, the hook of every await point, which tests
    replace.
    """

    def __init__(self, base: Path) -> None:
        self.base = base
        self.config = EngineConfig(root=base / "root", run=base / "run")
        (self.config.root / "containers").mkdir(parents=True, exist_ok=True)
        self.rows: dict[tuple[str, str], bytes] = {}
        self.layers: set[str] = set()
        self.ingests: set[str] = set()
        self.taken: set[str] = set()
        """Keys of roots that became ingests."""
        self.mounted: set[str] = set()
        self.volumes: set[str] = set()
        self.frozen: set[str] = set()
        self.host = Host()
        self.host.point = self.at_monitor
        self.disk_full = False
        self.life: Life | None = None
        self.decide: Callable[[str], Awaitable[None]] | None = None

    def fresh(self) -> World:
        """Another world. From now on calls of `asyncio.to_thread` use its points."""
        made = World(self.base)
        _current[:] = [made]
        return made

    async def point(self, name: str) -> None:
        await asyncio.sleep(0)
        if self.decide is not None:
            await self.decide(name)

    async def at_monitor(self, name: str) -> None:
        await self.point("monitor " + name.partition(" ")[0] + name.rpartition(":")[2])

    async def boot(self) -> Engine:
        engine = Engine(self)
        await engine.open()
        return engine

    def crash(self) -> None:
        """SIGKILL of the daemon. Its tasks end at their next point, and nothing that they do
        reaches the host.
        """
        self.host.kill_daemon()
        if self.life is not None:
            self.life.dead = True
            self.life.monitor._connected.clear()

    def record(self, container_id: str) -> ContainerRecord | None:
        row = self.rows.get(("container", container_id))
        return None if row is None else msgspec.msgpack.decode(row, type=ContainerRecord)


class Life:
    """The world as seen by one daemon, until the daemon is killed."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.dead = False
        self.monitor: FakeMonitor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)

    async def point(self, name: str) -> None:
        self.check_alive()
        await self._world.point(name)
        self.check_alive()

    def check_alive(self) -> None:
        if self.dead:
            raise Killed


class Engine:
    """One daemon: real containers on fakes."""

    def __init__(self, of: World) -> None:
        self.world = of
        self.life = of.life = Life(of)
        world: Any = self.life
        self.monitor = FakeMonitor(of.config.run, on_exit=self._exited, host=of.host)
        self.life.monitor = self.monitor
        self.networks = Networks(world)
        self.events = EventLog()
        records: Any = Records(world)
        parts: dict[str, Any] = {
            "config": world.config,
            "store": ContainerStore(records),
            "images": Images(),
            "snapshots": Snapshots(world),
            "networks": self.networks,
            "attachments": self.networks,
            "volumes": Volumes(world),
            "monitor": self.monitor,
            "runtimes": Runtimes(Runtime(world)),
            "cgroups": Cgroups(world),
            "scope_limits": ScopeLimits(SystemBus()),
            "grace_period": GracePeriod(),
            "events": self.events,
            "deliveries": Deliveries(),
        }
        self.parts = Parts(**parts)
        self.containers = Containers(self.parts)

    def _exited(self, key: str, exit_record: Exit) -> None:
        container = self.containers.find(key)
        if container is not None:
            container.exited()
        else:
            self.monitor.forget(key)

    async def open(self) -> None:
        await self.monitor.open(hold=True)
        await self.containers.take_over()
        await self.containers.load()
        await self.containers.open()
        self.monitor.deliver()
        for container in self.containers:
            boot.start(container)

    async def create(self, name: str = "web", policy: str = "no", retries: int = 0, **host: Any) -> str:
        """The new container's id; `host` are fields of its HostConfig."""
        restart = RestartPolicy(name=policy, maximum_retry_count=retries)
        body = CreateBody(image="busybox", host_config=HostConfig(restart_policy=restart, **host))
        return (await self.containers.create(body, name)).id

    def shown(self) -> dict[str, tuple[object, ...]]:
        """The visible state that must be the same after a restart of the daemon."""
        return {each.id: view(each.record) for each in self.containers}


def view(record: ContainerRecord) -> tuple[object, ...]:
    status = record.status
    restarting = status.state == State.RESTARTING
    return (
        *(record.name, status.state, status.exit_code, sorted(record.networks), record.size, record.host.memory),
        # A planned restart is due at once after a crash.
        *((restarting,) if restarting else (status.finished_at, record.restart_count)),
    )


def check(engine: Engine) -> None:
    """Assert that the API, the rows and the fake kernel agree."""
    world, containers = engine.world, {each.id: each for each in engine.containers}
    rows = {key for kind, key in world.rows if kind == "container"}
    assert rows == containers.keys(), "rows and containers"
    assert world.layers == containers.keys(), "layers and containers"
    running = {key for key, each in containers.items() if each.running}
    for key, each in containers.items():
        assert not each.removed and not each.lock.locked()
        row = world.record(key)
        assert row is not None and view(row) == view(each.record), f"row {view(row)}, shown {view(each.record)}"
        assert (each.process is not None) == each.running, "a process and a state that runs"
        assert not each._starts and not each._ends and not each.restarting and each._starts._awaited is None
        assert bool(each.planned) == (each.record.status.state == State.RESTARTING), "planned restarts"
        assert engine.containers.get(each.record.name) is each, "names"
    assert world.host.processes.keys() == running, f"processes, {running=}"
    assert world.mounted == running, "roots that are mounted"
    assert world.volumes == running, "volumes that are mounted"
    assert engine.networks.members.keys() == running, "endpoints"
    paused = {key for key, each in containers.items() if each.record.status.state == State.PAUSED}
    assert world.frozen == paused, "frozen"
    assert not world.host.journal, "exits that the monitor still keeps"
    for key in running:
        process = world.host.processes[key]
        assert containers[key].record.status.pid == process.pid
        assert containers[key].record.networks.keys() == engine.networks.members[key].keys()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(tmp_path)

    _current[:] = [made]

    async def inline(function: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        await _current[0].point("thread")
        return function(*arguments, **more)

    monkeypatch.setattr(asyncio, "to_thread", inline)
    monkeypatch.setattr(host_paths, "run", inline)
    monkeypatch.setattr(bundle, "write", lambda *_: bundle.Written(oci.User(), []))
    monkeypatch.setattr(bundle, "write_network_files", lambda *_, **__: None)
    for name in ("engine.system.detached_mounts.make_private", "engine.containers.sharing.sweep"):
        monkeypatch.setattr(name, lambda *_: None)
    return made


_current: list[World] = []


def no_descriptor() -> OSError:
    return OSError(errno.EMFILE, os.strerror(errno.EMFILE))


__all__ = ["Deadlock", "Engine", "EngineError", "World", "check", "no_descriptor", "run", "view", "world"]
