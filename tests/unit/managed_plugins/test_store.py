"""Managed plugins over a registry, a snapshotter and processes that the test drives: every verb,
its refusals, and a failure or a crash at each of its steps.

Needs root, because layers are extracted.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import shutil
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import EngineError, InvalidParameter, NotFound, ServerError, WrongState
from engine.events import EventLog
from engine.images import push
from engine.images.credentials import NOBODY
from engine.images.layers import chain_ids
from engine.images.pull import Downloads
from engine.images.push import Pushing
from engine.images.reference import Reference
from engine.images.store import ImageStore
from engine.images.turns import Turns
from engine.managed_plugins import pull as pulls
from engine.managed_plugins.record import PluginRecord
from engine.managed_plugins.store import ManagedPlugins
from engine.plugins.discovery import Discovery, Endpoint
from engine.plugins.registry import Plugins
from engine.storage.content import Content
from engine.storage.records import Records
from engine.wire.plugins import PluginPrivilege
from tests.support.fakes.snapshots import Disk, FakeSnapshots
from tests.support.images.archives import Node, digest, directory, docker_archive, hard_link, symlink, tar
from tests.unit.images.test_store import pieces
from tests.unit.images.test_transfers import IMAGE, LOW, FakeRepository

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

ROOT = tar([directory("bin"), Node("bin/plugin", b"one", mode=0o755)])
NEWER = tar([Node("bin/plugin", b"two", mode=0o755)])
CONFIG: dict[str, Any] = {
    "description": "a plugin",
    "interface": {"types": ["docker.volumedriver/1.0", "docker.networkdriver/1.0"], "socket": "p.sock"},
    "entrypoint": ["/bin/plugin"],
    "network": {"type": "host"},
    "env": [{"name": "DEBUG", "settable": ["value"], "value": "0"}],
    "mounts": [{"name": "m", "source": "/m", "destination": "/m", "type": "bind", "settable": ["source"]}],
}
ACCEPTED = [PluginPrivilege(name="mount", value=["/m"]), PluginPrivilege(name="network", value=["host"])]
NAME = "h.example/a/b:latest"


class Repository(FakeRepository):
    """With a plugin in it."""

    def __init__(self) -> None:
        super().__init__()
        self.put(CONFIG, [LOW, ROOT])

    def put(
        self,
        config: dict[str, Any],
        layers: Iterable[bytes],
        kind: str = pulls.CONFIG_TYPE,
        diff_ids: list[str] | None = None,
    ) -> None:
        layers = [*layers]
        names = [digest(layer) for layer in layers] if diff_ids is None else diff_ids
        raw = json.dumps({**config, "rootfs": {"type": "layers", "diff_ids": names}} if names else config).encode()
        packed = [gzip.compress(layer, mtime=0) for layer in layers]
        self.layers = [digest(data) for data in packed]
        self.blobs |= {digest(data): data for data in (raw, *packed)}
        self.document = {
            "schemaVersion": 2,
            "mediaType": push.DOCKER_MANIFEST,
            "config": {"mediaType": kind, "digest": digest(raw), "size": len(raw)},
            "layers": [{"mediaType": push.DOCKER_GZIP, "digest": digest(data), "size": len(data)} for data in packed],
        }

    async def manifest(self, name: str) -> Any:
        found = await super().manifest(name)
        return found._replace(media_type=self.document["mediaType"])


class FakeRemote:
    """`Remote` with that repository alone."""

    def __init__(self, images: ImageStore, repository: Repository) -> None:
        self.images = images
        self.found = repository
        self.downloads = Downloads(images.temporary, 6)
        self.packing = push.packing_threads()

    async def repository(self, name: Reference, credentials: Any) -> Repository:
        return self.found

    async def pushing(self, name: Reference, credentials: Any) -> Pushing:
        return Pushing(self.images, self.found, self.packing, Turns(5))  # type: ignore[arg-type]


class FakeProcesses:
    """Those that run, over restarts of the daemon."""

    def __init__(self) -> None:
        self.running: set[str] = set()
        self.failure: EngineError | None = None
        self.opened: list[tuple[str, bool]] = []
        self.discarded: list[str] = []
        self.given_up: asyncio.Event | None = None
        """A start, which has `begun`, does not end before that."""
        self.begun = asyncio.Event()

    async def start(self, record: PluginRecord, timeout: float) -> None:
        await asyncio.sleep(0)
        if self.given_up is not None:
            self.begun.set()
            await self.given_up.wait()
            raise ServerError("it is being disabled")
        if self.failure is not None:
            raise self.failure
        self.running.add(record.id)

    def give_up(self, plugin_id: str) -> None:
        assert self.given_up is not None
        self.given_up.set()

    async def stop(self, record: PluginRecord) -> None:
        await asyncio.sleep(0)
        self.running.discard(record.id)

    async def open(self, records: Iterable[PluginRecord]) -> None:
        self.opened = [(record.name, record.enabled) for record in records]

    async def discard(self, plugin_id: str) -> None:
        assert plugin_id not in self.running
        self.discarded.append(plugin_id)

    def endpoint(self, record: PluginRecord) -> Endpoint:
        return Endpoint(socket=f"/run/{record.id}")

    async def tree(self, record: PluginRecord, path: str) -> int:
        raise ServerError(f"{record.name} has no {path}")


class Stage:
    """A store of plugins over fakes. A new one over the same directory and disk is a restart."""

    def __init__(self, root: Path, disk: Disk, repository: Repository, processes: FakeProcesses) -> None:
        self.root = root
        self.disk = disk
        self.repository = repository
        self.processes = processes
        self.leaves_files = False

    async def __aenter__(self) -> Stage:
        self.records = Records(self.root / "state.db")
        self.snapshots = FakeSnapshots(self.disk)
        self.events = EventLog()
        self.images = ImageStore(
            self.records, Content(self.root), self.snapshots, self.events, users=lambda image_id: [], counts=dict
        )
        await self.images.open()
        self.registry = Plugins(Discovery((), ()), 1.0)
        self.remote = FakeRemote(self.images, self.repository)
        self.plugins = ManagedPlugins(
            self.records,
            self.images,
            self.remote,  # type: ignore[arg-type]
            self.events,
            self.registry,
            self.processes,
        )
        await self.plugins.open()
        await self.snapshots.sweep(self.plugins.ids(), self.images.chain_ids() | self.plugins.chain_ids())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.images.close()
        self.remote.packing.close()
        self.records.close()

    async def pull(self, remote: str = NAME, name: str = "", accepted: Any = ACCEPTED) -> str:
        installing = await self.plugins.pull(remote, name, NOBODY, accepted)
        async for _ in installing.run():
            pass
        return self.plugins.get(installing.name).id

    async def upgrade(self, accepted: Any = ACCEPTED) -> None:
        installing = await self.plugins.upgrade(NAME, NAME, NOBODY, accepted)
        async for _ in installing.run():
            pass

    async def create(self, name: str, body: bytes) -> None:
        await self.plugins.create(name, pieces(body))

    def actions(self) -> list[tuple[str, str]]:
        return [
            (each.action, each.actor.attributes["name"]) for each in self.events.history(0) if each.type == "plugin"
        ]

    def consistent(self) -> None:
        """Records, snapshots and layers are those of the plugins and images, and nothing more."""
        kept = {record.id: record for record in self.records.table("plugin", PluginRecord).load().values()}
        assert {plugin.id: plugin.record for plugin in self.plugins} == kept
        snapshots = {key: value for (kind, key), value in self.disk.records.items() if kind == "snapshot"}
        assert {key: snapshot.parent for key, snapshot in snapshots.items()} == {  # type: ignore[union-attr]
            record.id: record.chain_id for record in kept.values()
        }
        layers = {key for kind, key in self.disk.records if kind == "layer"}
        images = {chain_id for image in self.images for chain_id in image.chain_ids}
        assert layers == self.plugins.chain_ids() | images and self.images.chain_ids() == images
        assert len(self.disk.directories()) == len(layers) + len(snapshots)
        assert os.listdir(self.root / "tmp") == [] and self.repository.at_work == 0

    def content(self, name: str = NAME) -> bytes:
        """Of the file in the topmost layer."""
        return (self.snapshots.layer_path(self.plugins.get(name).record.chain_id) / "bin/plugin").read_bytes()  # type: ignore[attr-defined]


Work = Callable[[Stage], Awaitable[None]]


def run(root: Path, *works: Work, repository: Repository | None = None) -> FakeProcesses:
    """Each with a daemon of its own over the same disk."""
    processes = FakeProcesses()
    disk = Disk(root)
    given = repository or Repository()

    async def main() -> None:
        for work in works:
            async with asyncio.timeout(60), Stage(root, disk, given, processes) as stage:
                await work(stage)
                if not stage.leaves_files:
                    stage.consistent()

    asyncio.run(main())
    return processes


@contextlib.asynccontextmanager
async def refused(kind: type[EngineError], words: str) -> AsyncIterator[None]:
    with pytest.raises(EngineError) as raised:
        yield
    assert type(raised.value) is kind and words in raised.value.message, raised.value.message


def test_a_life(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        plugins, processes = stage.plugins, stage.processes
        plugin_id = await stage.pull()
        plugin = plugins.get(NAME)
        assert not plugin.enabled and plugin.record.reference == NAME and stage.content() == b"one"
        assert plugin.kinds == {"volumedriver", "networkdriver"}
        assert plugin.record.settings.env == ["DEBUG=0"]
        for name in ("h.example/a/b", plugin_id, plugin_id[:9]):
            assert plugins.get(name) is plugin
        await plugins.set(NAME, ["DEBUG=1", "m=/other"])
        async with refused(InvalidParameter, 'setting "NO" not found'):
            await plugins.set(NAME, ["DEBUG=2", "NO=1"])
        assert plugin.record.settings.env == ["DEBUG=1"] and plugin.record.settings.mounts[0].source == "/other"
        await plugins.enable(NAME, 1)
        assert plugin.enabled and processes.running == {plugin_id}
        async with refused(WrongState, "already enabled"):
            await plugins.enable(NAME, 1)
        async with refused(WrongState, "cannot set on an active plugin"):
            await plugins.set(NAME, ["DEBUG=2"])
        async with refused(WrongState, "is active"):
            await plugins.remove(NAME, force=False)
        async with refused(WrongState, "must be disabled before upgrading"):
            await stage.upgrade()
        await plugins.disable(NAME, force=False)
        assert not plugin.enabled and processes.running == set()
        async with refused(WrongState, "already disabled"):
            await plugins.disable(NAME, force=True)
        gone = await plugins.remove(plugin_id[:5], force=False)
        assert gone.id == plugin_id and [*plugins] == [] and processes.discarded == [plugin_id]
        async with refused(NotFound, f'plugin "{NAME}" not found'):
            await plugins.enable(NAME, 1)
        assert [action for action, _ in stage.actions()] == ["pull", "enable", "disable", "remove"]
        assert {name for _, name in stage.actions()} == {NAME}

    run(tmp_path, work)


def test_names(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        first = await stage.pull("vendor/x", "short")
        second = await stage.pull(f"vendor/x:v1@sha256:{'0' * 64}")
        third = await stage.pull("docker.io/vendor/y:1.2", "")
        names = {plugin.name for plugin in stage.plugins}
        assert names == {"short:latest", "vendor/x:v1", "vendor/y:1.2"}
        assert stage.plugins.get("short").record.reference == "docker.io/vendor/x:latest"
        assert stage.plugins.get("vendor/x:v1").record.reference == f"docker.io/vendor/x@sha256:{'0' * 64}"
        find = stage.registry.find_managed
        for name, found in (
            ("short", first),
            ("short:latest", first),
            ("docker.io/library/short", first),
            ("vendor/x:v1", second),
            ("vendor/x", ""),
            ("docker.io/vendor/y:1.2", third),
            (first, ""),
            (first[:4], ""),
            ("UPPER", ""),
            ("", ""),
        ):
            managed = find(name)
            assert (managed.id if managed else "") == found, name
        for name in ("", "x" * 65, "UPPER", "vendor/x", f"short@sha256:{'0' * 64}"):
            async with refused(NotFound, "not found"):
                stage.plugins.get(name)
        assert [each.name for each in stage.plugins.select({}, None)] == sorted(names)
        assert stage.plugins.select({"capability": ["authz"]}, None) == stage.plugins.select({}, True) == []
        assert len(stage.plugins.select({"capability": ["NetworkDriver", "x"]}, False)) == 3
        for name in ("short", "docker.io/library/short:latest"):
            async with refused(WrongState, "plugin short:latest already exists"):
                await stage.pull("vendor/z", name)
            async with refused(WrongState, "plugin short:latest already exists"):
                await stage.create(name, b"")
        async with refused(InvalidParameter, "cannot use digest in plugin tag"):
            await stage.pull("vendor/z", f"z@sha256:{'0' * 64}")
        async with refused(InvalidParameter, "invalid reference format"):
            await stage.pull("vendor//z")

    run(tmp_path, work)


def test_an_ambiguous_beginning(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        ids = [await stage.pull("vendor/x", f"p{number}") for number in range(17)]
        common = next(one[:1] for one in ids if sum(other[0] == one[0] for other in ids) > 1)
        async with refused(InvalidParameter, f'multiple plugins found for "{common}"'):
            stage.plugins.get(common)

    run(tmp_path, work)


def test_two_at_once_of_one_name(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        results = await asyncio.gather(stage.pull(), stage.pull(), return_exceptions=True)
        assert [type(each) for each in results].count(WrongState) == 1
        assert len([*stage.plugins]) == 1 and len(stage.actions()) == 1

    run(tmp_path, work)


def test_users_keep_it(tmp_path: Path) -> None:
    users: list[str] = []

    async def work(stage: Stage) -> None:
        stage.registry.users.append(lambda name: users if name == NAME else [])
        await stage.pull()
        await stage.plugins.enable(NAME, 1)
        users.extend(["volume a", "network b"])
        async with refused(WrongState, f"plugin {NAME} is in use by volume a, network b"):
            await stage.plugins.disable(NAME, force=False)
        users.extend(["volume c", "volume d"])
        async with refused(WrongState, "is in use by volume a, network b, volume c and 1 more"):
            await stage.plugins.remove(NAME, force=False)
        assert stage.plugins.get(NAME).enabled and len(stage.processes.running) == 1
        await stage.plugins.disable(NAME, force=True)
        async with refused(WrongState, "is in use"):
            await stage.plugins.remove(NAME, force=False)
        await stage.plugins.enable(NAME, 1)
        await stage.plugins.remove(NAME, force=True)
        assert [*stage.plugins] == [] and stage.processes.running == set()
        assert [action for action, _ in stage.actions()][-3:] == ["enable", "disable", "remove"]

    run(tmp_path, work)


def test_a_plugin_that_does_not_start(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        await stage.pull()
        stage.processes.failure = ServerError("it exited")
        async with refused(ServerError, "it exited"):
            await stage.plugins.enable(NAME, 1)
        assert not stage.plugins.get(NAME).enabled and stage.actions() == [("pull", NAME)]

    run(tmp_path, work)


@pytest.mark.parametrize("verb", ["disable", "disable --force", "remove --force"])
def test_others_do_not_wait_for_an_enable(tmp_path: Path, verb: str) -> None:
    async def work(stage: Stage) -> None:
        plugins = stage.plugins
        await stage.pull()
        stage.processes.given_up = asyncio.Event()
        enabling = asyncio.ensure_future(plugins.enable(NAME, 3600))
        await stage.processes.begun.wait()
        for refusal in (
            plugins.set(NAME, ["DEBUG=1"]),
            plugins.remove(NAME, force=False),
            plugins.enable(NAME, 1),
            plugins.upgrade(NAME, NAME, NOBODY, ()),
        ):
            async with refused(WrongState, f"plugin {NAME} is being enabled"):
                await refusal
        if verb == "remove --force":
            await plugins.remove(NAME, force=True)
            assert [*plugins] == []
        else:
            await plugins.disable(NAME, force="--force" in verb)
            assert not plugins.get(NAME).enabled
        async with refused(ServerError, "it is being disabled"):
            await enabling
        assert stage.processes.running == set()

    run(tmp_path, work)


def test_an_enable_that_cannot_be_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(stage: Stage) -> None:
        await stage.pull()

        async def full(*changes: Any) -> None:
            raise ServerError("no space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(stage.records, "commit", full)
            for verb in (
                lambda: stage.plugins.enable(NAME, 1),
                lambda: stage.plugins.set(NAME, ["DEBUG=1"]),
                lambda: stage.plugins.remove(NAME, force=True),
            ):
                async with refused(ServerError, "no space left"):
                    await verb()
        assert stage.processes.running == set() and not stage.plugins.get(NAME).enabled
        await stage.plugins.enable(NAME, 1)
        with monkeypatch.context() as patch:
            patch.setattr(stage.records, "commit", full)
            async with refused(ServerError, "no space left"):
                await stage.plugins.disable(NAME, force=False)
        assert len(stage.processes.running) == 1 and stage.plugins.get(NAME).enabled

    run(tmp_path, work)


def test_a_restart(tmp_path: Path) -> None:
    async def first(stage: Stage) -> None:
        await stage.pull(name="one")
        await stage.pull(name="two")
        await stage.plugins.enable("two", 1)

    async def second(stage: Stage) -> None:
        assert sorted(stage.processes.opened) == [("one:latest", False), ("two:latest", True)]
        assert stage.plugins.get("two").enabled and stage.registry.find_managed("one") is stage.plugins.get("one")
        assert {managed.name for managed in stage.registry.all_managed()} == {"one:latest", "two:latest"}
        await stage.plugins.remove("two", force=True)

    run(tmp_path, first, second)


# --- upgrade --------------------------------------------------------------------------------------


def test_an_upgrade(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        before = await stage.pull()
        await stage.plugins.set(NAME, ["DEBUG=1", "m=/mine"])
        stage.repository.put({**CONFIG, "description": "newer"}, [NEWER])
        await stage.upgrade()
        plugin = stage.plugins.get(NAME)
        assert plugin.id == before and plugin.record.config.description == "newer" and stage.content() == b"two"
        assert plugin.record.settings.env == ["DEBUG=1"] and plugin.record.settings.mounts[0].source == "/mine"
        assert len(plugin.record.blobs) == 1 and plugin.record.chain_id == digest(NEWER)

    run(tmp_path, work)


def test_an_upgrade_that_asks_for_more(tmp_path: Path) -> None:
    """Of the whole list, also of its first element (CVE-2026-33997)."""

    async def work(stage: Stage) -> None:
        await stage.pull()
        before = stage.plugins.get(NAME).record
        for more in ({"pidHost": True}, {"network": {"type": "other"}}, {"linux": {"capabilities": ["CAP_SYS_ADMIN"]}}):
            stage.repository.put({**CONFIG, **more}, [NEWER])
            async with refused(InvalidParameter, f"incorrect privileges for plugin {NAME}"):
                await stage.upgrade()
        assert stage.plugins.get(NAME).record == before and stage.repository.fetched == stage.repository.fetched[:2]

    run(tmp_path, work)


def test_a_plugin_that_goes_or_is_enabled_during_its_upgrade(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        await stage.pull()
        stage.repository.put(CONFIG, [NEWER])
        installing = await stage.plugins.upgrade(NAME, NAME, NOBODY, ACCEPTED)
        await stage.plugins.enable(NAME, 1)
        async with refused(WrongState, "must be disabled"):
            async for _ in installing.run():
                pass
        assert stage.content() == b"one"
        await stage.plugins.disable(NAME, force=False)
        installing = await stage.plugins.upgrade(NAME, NAME, NOBODY, ACCEPTED)
        await stage.plugins.remove(NAME, force=False)
        async with refused(NotFound, "not found"):
            async for _ in installing.run():
                pass

    run(tmp_path, work)


# --- failures and crashes at every step -----------------------------------------------------------


def points(root: Path, prepare: Work, verb: Work) -> int:
    """The number of steps of the snapshotter in a verb."""
    seen = 0

    async def work(stage: Stage) -> None:
        nonlocal seen
        await prepare(stage)

        async def step(point: str) -> None:
            nonlocal seen
            seen += 1

        stage.snapshots.step = step
        await verb(stage)

    run(root, work)
    return seen


async def nothing(stage: Stage) -> None:
    pass


async def install(stage: Stage) -> None:
    await stage.pull()


async def prepare_upgrade(stage: Stage) -> None:
    stage.repository.put(CONFIG, [LOW, ROOT])
    await stage.pull()
    stage.repository.put(CONFIG, [LOW, NEWER])


async def upgrade(stage: Stage) -> None:
    await stage.upgrade()


async def remove(stage: Stage) -> None:
    await stage.plugins.remove(NAME, force=False)


async def make(stage: Stage) -> None:
    await stage.create("made", archive())


VERBS = [(nothing, install), (prepare_upgrade, upgrade), (nothing, make), (install, remove)]


@pytest.mark.parametrize(("prepare", "verb"), VERBS)
def test_a_failure_at_every_step(tmp_path: Path, prepare: Work, verb: Work) -> None:
    count = points(tmp_path / "count", prepare, verb)
    assert count > 2
    for at in range(count):

        async def work(stage: Stage, at: int = at) -> None:
            await prepare(stage)
            before = [plugin.record for plugin in stage.plugins]
            left = at
            failed: list[str] = []

            async def step(point: str) -> None:
                nonlocal left
                left -= 1
                if left == -1:
                    failed.append(point)
                    raise ServerError("the disk is full")

            stage.snapshots.step = step
            try:
                await verb(stage)
            except ServerError as error:
                assert "the disk is full" in error.message
                assert [plugin.record for plugin in stage.plugins] == before
            # a removal that fails is repeated at the next start
            stage.leaves_files = failed[0].startswith(("collect ", "remove "))

        run(tmp_path / str(at), work, nothing)


@pytest.mark.parametrize(("prepare", "verb"), VERBS)
def test_a_crash_at_every_step(tmp_path: Path, prepare: Work, verb: Work) -> None:
    """The next daemon has the plugin as it was before or after, complete, and nothing else. A crash
    is a copy of the disk as it was at that moment.
    """
    crashes: list[Disk] = []

    async def work(stage: Stage) -> None:
        await prepare(stage)

        async def step(point: str) -> None:
            root = tmp_path / f"crash {len(crashes)}"
            shutil.copytree(stage.root, root)
            disk = Disk(root)
            disk.records = dict(stage.disk.records)
            disk.last = stage.disk.last
            crashes.append(disk)

        stage.snapshots.step = step
        await verb(stage)

    async def check(disk: Disk) -> None:
        shutil.rmtree(disk.root / "tmp")  # the daemon empties it
        async with Stage(disk.root, disk, Repository(), FakeProcesses()) as stage:
            stage.consistent()
            for plugin in stage.plugins:
                assert stage.content(plugin.name) in (b"one", b"two")

    run(tmp_path / "first", work)
    assert len(crashes) > 2
    for disk in crashes:
        asyncio.run(check(disk))


@pytest.mark.parametrize("stop", range(1, 12))
def test_a_client_that_leaves(tmp_path: Path, stop: int) -> None:
    """After each step of a pull and of an upgrade: the stream is closed, or its reader
    cancelled.
    """

    async def leave(steps: Any, *, cancel: bool) -> None:
        async def read() -> None:
            seen = 0
            async with contextlib.aclosing(steps):
                async for _ in steps:
                    seen += 1
                    if seen == stop:
                        if not cancel:
                            return
                        task.cancel()
                        await asyncio.sleep(0)

        task = asyncio.create_task(read())
        await asyncio.wait([task])

    async def work(stage: Stage) -> None:
        for cancel in (False, True):
            installing = await stage.plugins.pull(NAME, f"p{cancel}".lower(), NOBODY, ACCEPTED)
            await leave(installing.run(), cancel=cancel)
            stage.consistent()
        stage.repository.put(CONFIG, [LOW, ROOT])
        await stage.pull()
        for cancel, layer in ((False, NEWER), (True, ROOT)):
            stage.repository.put(CONFIG, [LOW, layer])
            installing = await stage.plugins.upgrade(NAME, NAME, NOBODY, ACCEPTED)
            await leave(installing.run(), cancel=cancel)
            stage.consistent()
            assert stage.content() in (b"one", b"two")

    run(tmp_path, work)


# --- what a registry may hold ---------------------------------------------------------------------


def test_privileges_that_were_not_accepted(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        wanted = await stage.plugins.privileges(NAME, NOBODY)
        assert [each.name for each in wanted] == ["network", "mount"]
        for accepted in ([], wanted[:1], wanted[1:], [*wanted, PluginPrivilege(name="device", value=["/dev/x"])]):
            async with refused(InvalidParameter, "incorrect privileges"):
                await stage.pull(accepted=accepted)
        assert stage.repository.fetched == []
        await stage.pull(accepted=wanted)
        await stage.pull(name="unasked", accepted=None)

    run(tmp_path, work)


@pytest.mark.parametrize("kind", [pulls.FIRST_CONFIG_TYPE, "application/octet-stream", "", pulls.CONFIG_TYPE])
def test_configs_without_diff_ids(tmp_path: Path, kind: str) -> None:
    async def work(stage: Stage) -> None:
        stage.repository.put(CONFIG, [LOW, ROOT], kind, diff_ids=[])
        await stage.pull(accepted=None)
        record = stage.plugins.get(NAME).record
        assert record.config.rootfs.diff_ids == [digest(LOW), digest(ROOT)]
        assert record.chain_id == chain_ids([digest(LOW), digest(ROOT)])[-1] and stage.content() == b"one"
        mount = record.config.mounts[0]
        assert mount.options == (["rbind", "rshared"] if kind == pulls.FIRST_CONFIG_TYPE else None)

    run(tmp_path, work)


def test_configs_with_digests_in_place_of_diff_ids(tmp_path: Path) -> None:
    """As Docker writes them when it makes a plugin."""

    async def work(stage: Stage) -> None:
        stage.repository.put(CONFIG, [LOW, ROOT])
        low, root = stage.repository.layers
        assert (low, root) != (digest(LOW), digest(ROOT))
        for number, named in enumerate(([low, root], [low, digest(ROOT)], [digest(LOW), root])):
            stage.repository.put(CONFIG, [LOW, ROOT], diff_ids=named)
            await stage.pull(name=f"made{number}")
            assert stage.plugins.get(f"made{number}").record.config.rootfs.diff_ids == [digest(LOW), digest(ROOT)]

    run(tmp_path, work)


def test_a_plugin_without_layers(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        stage.repository.put(CONFIG, [])
        await stage.pull()
        assert stage.plugins.get(NAME).record.chain_id == ""
        stage.repository.put(CONFIG, [ROOT])
        await stage.upgrade()
        stage.repository.put(CONFIG, [])
        await stage.upgrade()
        assert stage.processes.discarded == [], "an upgrade keeps the plugin's files"
        plugin = await stage.plugins.remove(NAME, force=False)
        assert stage.processes.discarded == [plugin.id]

    run(tmp_path, work)


def lie(stage: Stage, change: Callable[[dict[str, Any]], None]) -> None:
    change(stage.repository.document)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            lambda r: r.document["config"].update(mediaType="application/vnd.docker.container.image.v1+json"),
            'Encountered remote "application/vnd.docker.container.image.v1+json"(image) when fetching',
        ),
        (lambda r: r.document["config"].update(mediaType="x/y"), 'Encountered remote "x/y"(unknown) when fetching'),
        (lambda r: r.document["config"].update(size=1 << 21), "it has 2097152 bytes, more than"),
        (lambda r: r.document["layers"][0].update(size=1 << 40), "bytes of layers, more than"),
        (lambda r: r.document["layers"].pop(), "1 layers in its manifest, 2 in its config"),
        (lambda r: r.put(CONFIG, [LOW, ROOT], diff_ids=[digest(ROOT), digest(LOW)]), "diff_id"),
        (lambda r: r.put(CONFIG, [LOW, ROOT], diff_ids=[digest(LOW)]), "2 layers in its manifest, 1 in its config"),
        (lambda r: r.put(CONFIG, [tar([Node("../out", b"")])]), "layer"),
        (lambda r: r.put({"os": "linux"}, [], "application/octet-stream"), "is not a plugin"),
        (lambda r: r.put({**CONFIG, "interface": {"socket": "../s"}}, []), "is not the name of a file"),
    ],
)
def test_lies(tmp_path: Path, damage: Callable[[Repository], None], words: str) -> None:
    repository = Repository()
    damage(repository)

    async def work(stage: Stage) -> None:
        async with refused(InvalidParameter, words):
            await stage.pull()

    run(tmp_path, work, repository=repository)


def test_a_layer_that_is_not_what_its_digest_says(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        name = stage.repository.layers[1]
        stage.repository.blobs[name] = gzip.compress(NEWER, mtime=0)[: len(stage.repository.blobs[name])]
        with pytest.raises(EngineError, match=r"verification failed|damaged|diff_id|layer"):
            await stage.pull()

    run(tmp_path, work)


def test_a_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulls, "LARGEST", 1 << 20)

    async def work(stage: Stage) -> None:
        bombs = [tar([Node(f"zeros{number}", bytes(700_000))]) for number in range(2)]
        stage.repository.put(CONFIG, bombs)
        async with refused(InvalidParameter, "the layers have more than 1048576 bytes"):
            await stage.pull()
        stage.repository.put(CONFIG, bombs[:1])
        await stage.pull()

    run(tmp_path, work)


def test_layers_are_shared_with_images(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        async for _ in stage.images.load(pieces(docker_archive(IMAGE))):
            pass
        await stage.pull()
        assert len(stage.repository.fetched) == 1, "the lower layer is here"
        await stage.images.delete("h.example/a/b:t", force=True)
        stage.consistent()
        assert stage.content() == b"one"

    run(tmp_path, work)


# --- push -----------------------------------------------------------------------------------------


def test_a_push_sends_the_exact_config(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        await stage.pull()
        config, layers = stage.repository.document["config"], stage.repository.layers
        async for _ in await stage.plugins.push(NAME, NOBODY):
            pass
        sent = json.loads(stage.repository.manifests["latest"])
        assert sent["config"] == config and [layer["digest"] for layer in sent["layers"]] == layers
        # to a registry that has nothing
        raw = stage.repository.blobs[config["digest"]]
        stage.repository.blobs.clear()
        async for _ in await stage.plugins.push(NAME, NOBODY):
            pass
        sent = json.loads(stage.repository.manifests["latest"])
        assert stage.repository.blobs[config["digest"]] == raw and sent["config"] == config
        blobs = [gzip.decompress(stage.repository.blobs[layer["digest"]]) for layer in sent["layers"]]
        assert blobs == [LOW, ROOT]
        assert stage.actions() == [("pull", NAME), ("push", NAME), ("push", NAME)]

    run(tmp_path, work)


def test_a_plugin_removed_during_its_push_or_a_push_that_fails(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        await stage.pull()
        stage.repository.blobs.clear()
        gate = stage.repository.gates["upload"] = asyncio.Event()
        steps = await stage.plugins.push(NAME, NOBODY)

        async def read() -> None:
            async for _ in steps:
                pass

        pushing = asyncio.create_task(read())
        while not stage.repository.at_work:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await stage.plugins.remove(NAME, force=False)
        gate.set()
        await pushing
        assert "latest" in stage.repository.manifests

    run(tmp_path, work)


# --- create ---------------------------------------------------------------------------------------


def archive(config: Any = CONFIG, *more: Node, root: bool = True) -> bytes:
    raw = config if isinstance(config, bytes) else json.dumps(config).encode()
    nodes = [Node("config.json", raw)]
    if root:
        nodes += [directory("rootfs"), directory("rootfs/bin"), Node("rootfs/bin/plugin", b"one", mode=0o755)]
    return tar([*nodes, *more])


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_create(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    async def work(stage: Stage) -> None:
        more = (hard_link("rootfs/bin/again", "rootfs/bin/plugin"), symlink("rootfs/etc", "/bin"), Node("other", b"x"))
        await stage.create("made", pack(archive(CONFIG, *more)))
        record = stage.plugins.get("made:latest").record
        assert record.reference == "docker.io/library/made:latest" and record.settings.env == ["DEBUG=0"]
        assert len(record.config.rootfs.diff_ids) == 1 and record.chain_id == record.config.rootfs.diff_ids[0]
        root = stage.snapshots.layer_path(record.chain_id)
        assert sorted(os.listdir(root)) == ["bin", "etc"] and stage.content("made") == b"one"
        assert (root / "bin/again").stat().st_ino == (root / "bin/plugin").stat().st_ino
        await stage.create("twice", archive(CONFIG, *more))
        assert stage.plugins.get("twice").record.chain_id == record.chain_id, "the same layer"
        async for _ in await stage.plugins.push("made", NOBODY):
            pass
        sent = json.loads(stage.repository.manifests["latest"])
        layer = gzip.decompress(stage.repository.blobs[sent["layers"][0]["digest"]])
        assert digest(layer) == record.chain_id
        assert json.loads(stage.repository.blobs[sent["config"]["digest"]])["rootfs"]["diff_ids"] == [record.chain_id]
        assert stage.actions() == [
            (action, f"{name}:latest") for action, name in (("create", "made"), ("create", "twice"), ("push", "made"))
        ]

    run(tmp_path, work)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "config.json not found"),
        (b"no archive", "archive"),
        (archive()[:700], "archive"),
        (archive(root=False), "rootfs not found"),
        (tar([directory("rootfs")]), "config.json not found"),
        (archive(b"{"), "invalid plugin config"),
        (archive({"interface": {"socket": "a/b"}}), "is not the name of a file"),
        (tar([Node("config.json", b"{}"), Node("rootfs", b"file")]), "rootfs is not a directory"),
        (tar([Node("config.json", b"{}"), symlink("rootfs", "/")]), "rootfs is not a directory"),
        (tar([symlink("config.json", "/etc/passwd"), directory("rootfs")]), "config.json is not a regular file"),
        (
            tar([Node("config.json", type=tarfile.CHRTYPE, device=(1, 5)), directory("rootfs")]),
            "config.json is not a regular file",
        ),
        (tar([Node("config.json", b" " * (2 << 20)), directory("rootfs")]), "config.json: larger than"),
        (archive(CONFIG, Node("../../out", b"x")), "archive"),
        (archive(CONFIG, Node("rootfs/" + 300 * "n", b"x")), "name too long"),
        (archive(CONFIG, symlink("rootfs/l", "/tmp"), hard_link("rootfs/x", "/etc/passwd")), "archive"),
    ],
)
def test_bad_archives(tmp_path: Path, body: bytes, words: str) -> None:
    async def work(stage: Stage) -> None:
        async with refused(InvalidParameter, words):
            await stage.create("bad", body)
        assert [*stage.plugins] == []

    run(tmp_path, work)


def test_an_archive_that_leads_out(tmp_path: Path) -> None:
    """Links and names stay within the plugin."""

    async def work(stage: Stage) -> None:
        await stage.create("odd", archive(CONFIG, symlink("rootfs/up", "../../../.."), Node("rootfs/up2/../in", b"x")))
        root = stage.snapshots.layer_path(stage.plugins.get("odd").record.chain_id)
        assert (root / "in").read_bytes() == b"x"

    run(tmp_path, work)
