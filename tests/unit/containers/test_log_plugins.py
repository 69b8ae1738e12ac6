"""FIFOs of log plugins on disk, and which plugin is asked to read them."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from engine.containers import log_plugins
from engine.containers.log_plugins import Fifos, LogPlugins
from engine.errors import InvalidParameter, NotFound, ServerError
from engine.logs.deliveries import LogPlugin
from engine.plugins.discovery import Discovery
from engine.plugins.registry import Plugins
from engine.wire.containers import LogConfig
from engine.wire.plugins import PluginAnswer
from tests.support import PATIENCE

ID = "a" * 64


# --- on disk --------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "plugins" / "p1").mkdir(parents=True)
    return tmp_path


def test_a_fifo(run: Path) -> None:
    fifos = Fifos(run)
    path = run / "logging" / ID
    with pytest.raises(FileNotFoundError):
        fifos.writer(ID)
    both = fifos.make(ID, "")
    status = path.stat()
    assert stat.S_ISFIFO(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    os.close(fifos.writer(ID))
    os.close(both)
    with pytest.raises(OSError) as caught:
        fifos.writer(ID)
    assert caught.value.errno == errno.ENXIO
    os.close(fifos.make(ID, ""))
    assert path.stat().st_ino != status.st_ino
    fifos.remove(ID, "")
    fifos.remove(ID, "")
    assert os.listdir(path.parent) == []


def test_a_managed_plugin_sees_the_same_fifo(run: Path) -> None:
    fifos = Fifos(run)
    for _ in range(2):
        os.close(fifos.make(ID, "p1"))
        seen = run / "plugins" / "p1.logging" / ID
        assert seen.stat().st_ino == (run / "logging" / ID).stat().st_ino
    fifos.remove(ID, "p1")
    assert not seen.exists() and os.listdir(run / "logging") == []
    fifos.remove(ID, "gone")


@pytest.mark.parametrize("by", ["directory", "file"])
def test_a_managed_plugin_leads_nowhere_else(run: Path, by: str) -> None:
    """It may replace what it sees by links."""
    fifos, other = Fifos(run), run / "other"
    other.mkdir()
    (other / ID).write_text("kept")
    seen = run / "plugins" / "p1.logging"
    if by == "directory":
        seen.symlink_to(other)
        with pytest.raises(OSError):
            fifos.make(ID, "p1")
        assert os.listdir(run / "logging") == []
        fifos.remove(ID, "p1")
    else:
        seen.mkdir()
        (seen / ID).symlink_to(other / ID)
        os.close(fifos.make(ID, "p1"))
        assert stat.S_ISFIFO((seen / ID).lstat().st_mode)
        (seen / ID).unlink()
        (seen / ID).symlink_to(other / ID)
        fifos.remove(ID, "p1")
        assert not (seen / ID).is_symlink()
    assert (other / ID).read_text() == "kept"


def test_what_is_left_is_removed(run: Path) -> None:
    fifos = Fifos(run)
    fifos.sweep(())
    for name in ("a", "b", "b.new"):
        os.close(fifos.make(name, ""))
    fifos.sweep({"a"})
    assert os.listdir(run / "logging") == ["a"]


# --- plugins --------------------------------------------------------------------------------------


class Asked:
    """A plugin without a process. `managed`: the id of its object."""

    def __init__(self, name: str, managed: str = "") -> None:
        self.name = name
        self.managed = type("Managed", (), {"id": managed})() if managed else None
        self.calls: list[tuple[str, Mapping[str, Any]]] = []
        self.failing: Exception | None = None
        self.reader = -1
        self.run = Path()

    async def call(self, method: str, answer: type, body: Mapping[str, Any] | None = None) -> PluginAnswer:
        self.calls.append((method.rpartition(".")[2], body or {}))
        if method.endswith("StartLogging"):
            if self.failing is not None:
                raise self.failing
            assert body is not None
            path = self.run / "logging" / Path(body["File"]).name
            self.reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        return PluginAnswer()

    def end(self) -> None:
        os.close(self.reader)

    @property
    def asked(self) -> list[str]:
        return [method for method, _ in self.calls if method != "Capabilities"]


class World:
    """Log plugins of one engine; `left`: bytes that are not delivered."""

    def __init__(self, run: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(log_plugins, "LOOK", 0.01)
        monkeypatch.setattr(log_plugins, "FIRST_PAUSE", 0.01)
        self.left = 0
        self.asked = asked
        asked.run = run
        self.registry = Plugins(Discovery((), ()), 5)
        monkeypatch.setattr(self.registry, "get", self._get)
        self.plugins = LogPlugins(run, self.registry, lambda _: self.left)
        self.target = LogPlugin(asked.name.removesuffix(":latest"), str(run / "logging" / ID))

    async def _get(self, name: str, kind: str) -> Asked:
        if name not in (self.asked.name, f"{self.asked.name}".removesuffix(":latest")) or kind != "LogDriver":
            raise NotFound(f'plugin "{name}" not found')
        return self.asked

    async def start(self, *, strict: bool = True) -> None:
        await self.plugins.start(ID, "web", self.target, strict=strict)


async def until(condition: Any) -> None:
    async with asyncio.timeout(20 * PATIENCE):
        while not condition():  # noqa: ASYNC110 (nothing would set an event)
            await asyncio.sleep(0.002)


def test_the_life_of_a_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(run, Asked("far"), monkeypatch)

    async def scene() -> None:
        await world.start()
        assert [method for method, _ in world.asked.calls] == ["Capabilities", "StartLogging"]
        assert world.asked.calls[1][1]["File"] == world.target.fifo
        assert world.registry.in_use("far") == ["container web"] and world.registry.in_use("other") == []
        world.left = 10
        world.plugins.ended(ID)
        await asyncio.sleep(0.1)
        assert world.asked.asked == ["StartLogging"], "lines wait"
        world.left = 0
        await until(lambda: world.asked.asked == ["StartLogging", "StopLogging"])
        await until(lambda: os.listdir(run / "logging") == [])
        assert world.registry.in_use("far") == []
        world.asked.end()

    asyncio.run(scene())


def test_a_managed_plugin(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(run, Asked("vendor/far:latest", "p1"), monkeypatch)

    async def scene() -> None:
        await world.start()
        assert world.asked.calls[1][1]["File"] == f"/run/docker/logging/{ID}"
        assert (run / "plugins/p1.logging" / ID).samefile(run / "logging" / ID)
        assert world.registry.in_use("vendor/far:latest") == world.registry.in_use("vendor/far") == ["container web"]
        await world.plugins.close(stop=True)
        assert world.asked.asked == ["StartLogging", "StopLogging"]
        assert not (run / "plugins/p1.logging" / ID).exists()
        world.asked.end()

    asyncio.run(scene())


def test_a_plugin_that_ends_is_asked_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(run, Asked("far"), monkeypatch)

    async def scene() -> None:
        await world.start()
        last = os.open(world.target.fifo, os.O_PATH)  # its inode is not used again
        await asyncio.sleep(0.05)
        world.asked.failing = ServerError("away")
        world.asked.end()
        await until(lambda: world.asked.asked.count("StartLogging") > 3)
        assert world.plugins.away == {"far"}
        world.asked.failing = None
        await until(lambda: not world.plugins.away)
        assert (await asyncio.to_thread(os.path.sameopenfile, last, world.asked.reader)) is False
        os.close(last)
        # the daemon asks it to stop before each start, because it may know the file
        assert world.asked.asked[:3] == ["StartLogging", "StopLogging", "StartLogging"]
        await world.plugins.close(stop=False)
        assert os.listdir(run / "logging") == [ID]
        world.asked.end()

    asyncio.run(scene())


def test_a_start_that_fails(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(run, Asked("far"), monkeypatch)

    async def scene() -> None:
        world.asked.failing = ServerError("no room")
        with pytest.raises(ServerError, match="failed to initialize logging driver: error creating logger: no room"):
            await world.start()
        assert os.listdir(run / "logging") == [] and world.registry.in_use("far") == []
        world.plugins.ended(ID)
        # the configuration may want the container to run all the same
        await world.start(strict=False)
        assert world.registry.in_use("far") == ["container web"]
        world.asked.failing = None
        await until(lambda: world.asked.reader >= 0)
        await world.plugins.close(stop=True)
        world.asked.end()

    asyncio.run(scene())


def test_another_daemon_goes_on(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a FIFO that is read nothing is asked; one that is not is replaced."""
    world = World(run, Asked("far"), monkeypatch)

    async def scene() -> None:
        await world.start()
        await world.plugins.close(stop=False)
        await world.plugins.resume([(ID, "web", world.target)], lambda _: True)
        await asyncio.sleep(0.1)
        assert world.asked.asked == ["StartLogging"]
        await world.plugins.close(stop=False)
        world.asked.end()
        await world.plugins.resume([(ID, "web", world.target)], lambda _: True)
        await until(lambda: world.asked.asked == ["StartLogging", "StopLogging", "StartLogging"])
        await world.plugins.close(stop=False)
        await world.plugins.resume([(ID, "web", world.target)], lambda _: False)
        await until(lambda: world.asked.asked[3:] == ["StopLogging"])
        await until(lambda: os.listdir(run / "logging") == [])
        world.asked.end()

    asyncio.run(scene())


def test_a_managed_plugin_that_another_daemon_does_not_have_yet(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked to stop with the path that it knows."""
    world = World(run, Asked("vendor/far:latest", "p1"), monkeypatch)

    async def scene() -> None:
        await world.start()
        await world.plugins.close(stop=False)
        name, world.asked.name = world.asked.name, "away"
        await world.plugins.resume([(ID, "web", world.target)], lambda _: True)
        await asyncio.sleep(0.05)
        world.asked.name = name
        world.asked.end()
        await until(lambda: world.asked.asked == ["StartLogging", "StopLogging", "StartLogging"])
        assert {body["File"] for _, body in world.asked.calls if body} == {f"/run/docker/logging/{ID}"}
        await world.plugins.close(stop=True)
        world.asked.end()

    asyncio.run(scene())


def test_a_plugin_that_does_not_read_the_rest(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(run, Asked("far"), monkeypatch)
    monkeypatch.setattr(log_plugins, "STALLED", 0.2)

    async def scene() -> None:
        world.left = 10
        await world.start()
        world.plugins.ended(ID)
        await until(lambda: world.asked.asked == ["StartLogging", "StopLogging"])
        world.asked.end()

    asyncio.run(scene())


def test_a_plugin_that_does_not_open_the_fifo(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(run, Asked("far"), monkeypatch)
    monkeypatch.setattr(log_plugins, "OPEN_LIMIT", 0.05)

    async def scene() -> None:
        await world.start()
        world.asked.end()
        await until(lambda: world.plugins.away == {"far"})
        await world.plugins.close(stop=True)

    asyncio.run(scene())


def test_names(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(run, Asked("far"), monkeypatch)

    async def scene() -> None:
        for kind in ("json-file", "none", "", "far"):
            await world.plugins.check(LogConfig(type=kind))
        with pytest.raises(InvalidParameter, match=r'looking up logging plugin nix: plugin "nix" not found'):
            await world.plugins.check(LogConfig(type="nix"))
        await world.plugins.check_default(LogConfig(type="syslog"))
        with pytest.raises(InvalidParameter, match="Failed to set log opts: logger: no log driver named 'nix' is"):
            await world.plugins.check_default(LogConfig(type="nix"))

    asyncio.run(scene())
