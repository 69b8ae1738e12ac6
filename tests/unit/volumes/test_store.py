"""Volumes and their records when a call is cancelled; tests/api/test_volumes.py has the rest."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from engine.common.pruning import Selection
from engine.config import Config
from engine.errors import Conflict, NotFound, ServerError, Unimplemented
from engine.events import EventLog
from engine.plugins.discovery import Discovery
from engine.plugins.registry import Plugins
from engine.storage.records import Change, Records
from engine.volumes.store import VolumeStore
from engine.wire.containers import MountPoint
from engine.wire.volumes import VolumeCreate


def volume_store(root: Path, records: Records, events: EventLog) -> VolumeStore:
    plugins = Plugins(Discovery([root / "run" / "plugins"], []), 60)
    return VolumeStore(Config(root=root, run=root / "run"), records, events, plugins)


CALLS: dict[str, Callable[[VolumeStore], Awaitable[object]]] = {
    "create": lambda volumes: volumes.create(VolumeCreate(name="new")),
    "remove": lambda volumes: volumes.remove("old"),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_cancelled_call_leaves_rows_files_and_the_list_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The row is written although the caller is cancelled, so the call is completed."""
    tmp_path.joinpath("volumes").mkdir()

    async def main() -> None:
        records = Records(tmp_path / "state.db")
        volumes = volume_store(tmp_path, records, EventLog())
        await volumes.open({})
        await volumes.create(VolumeCreate(name="old"))
        real, written, go_on = records.commit, asyncio.Event(), asyncio.Event()

        async def slow(*changes: Change, **more: Any) -> None:
            await real(*changes, **more)
            written.set()
            await go_on.wait()

        monkeypatch.setattr(records, "commit", slow)
        calling = asyncio.ensure_future(CALLS[call](volumes))
        await written.wait()
        calling.cancel()
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.wait([calling])
        assert calling.cancelled()
        shown = {each.name for each in (await volumes.select({}, None))[0]}
        assert shown == {key for key, _ in records.rows("volume")} == {*os.listdir(tmp_path / "volumes")}
        await volumes.close()
        records.close()

    asyncio.run(main())


@pytest.mark.parametrize("call", CALLS)
def test_a_row_that_cannot_be_written_leaves_the_files_and_the_list_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    tmp_path.joinpath("volumes").mkdir()

    async def main() -> None:
        records, events = Records(tmp_path / "state.db"), EventLog()
        volumes = volume_store(tmp_path, records, events)
        await volumes.open({})
        fill((await volumes.create(VolumeCreate(name="old"))).mountpoint, 5)
        during: list[list[str]] = []

        def fail(_: object) -> None:
            during.append(os.listdir(tmp_path / "volumes"))
            raise sqlite3.OperationalError("disk I/O error")

        with monkeypatch.context() as patch:
            patch.setattr(records, "_write_rows", fail)
            with pytest.raises(ServerError, match="disk I/O error"):
                await CALLS[call](volumes)
        # after a crash at this moment the row decides: local.py
        assert sorted(during[0]) == {"create": [".volume-new", "old"], "remove": [".volume-old"]}[call]
        assert os.listdir(tmp_path / "volumes") == ["old"]
        assert (tmp_path / "volumes/old/_data/file").read_bytes() == b"x" * 5
        assert await names(volumes) == {"old"} == {key for key, _ in records.rows("volume")}
        await CALLS[call](volumes)
        assert await names(volumes) == {*os.listdir(tmp_path / "volumes")}
        await volumes.close()
        records.close()

    asyncio.run(main())


def test_a_directory_that_cannot_be_hidden_keeps_its_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(volumes: VolumeStore, _: EventLog) -> None:
        def rename(*_: object, **__: object) -> None:
            raise OSError(30, "Read-only file system")

        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", rename)
            with pytest.raises(ServerError, match=r"^remove free: Read-only file system$"):
                await volumes.remove("free")
        assert "free" in await names(volumes) and "free" in os.listdir(tmp_path / "volumes")
        await volumes.remove("free")
        assert "free" not in await names(volumes)

    with_volumes(tmp_path, work)


def test_a_removed_volumes_content_is_gone_with_the_answer(tmp_path: Path) -> None:
    async def work(volumes: VolumeStore, _: EventLog) -> None:
        fill((await volumes.get("free")).mountpoint, 5)
        await volumes.remove("free")
        left = os.listdir(tmp_path / "volumes")
        assert "free" not in left and ".volume-free" not in left

    with_volumes(tmp_path, work)


def with_volumes(directory: Path, work: Callable[[VolumeStore, EventLog], Awaitable[None]]) -> None:
    """Run `work` with the volumes `used` (by container `c`), `free`, `typed` and an unnamed one."""
    directory.joinpath("volumes").mkdir()

    async def main() -> None:
        records, events = Records(directory / "state.db"), EventLog()
        volumes = volume_store(directory, records, events)
        await volumes.open({"c": [MountPoint(name="used", destination="/v")]})
        await volumes.create(VolumeCreate(name="free", labels={"keep": "1"}))
        await volumes.create(VolumeCreate(name="typed", driver_opts={"type": "tmpfs", "device": "t"}))
        await volumes.create(VolumeCreate())
        await work(volumes, events)
        await volumes.close()
        records.close()

    asyncio.run(main())


async def names(volumes: VolumeStore) -> set[str]:
    return {each.name if len(each.name) < 64 else "unnamed" for each in (await volumes.select({}, None))[0]}


def fill(mountpoint: str, size: int) -> None:
    Path(mountpoint, "file").write_bytes(b"x" * size)


@pytest.mark.parametrize(
    ("selection", "named", "left"),
    [
        (Selection(), False, {"used", "free", "typed"}),
        (Selection(), True, {"used", "typed"}),
        (Selection(labels=("keep",)), True, {"used", "typed", "unnamed"}),
        (Selection(not_labels=("keep",)), True, {"used", "typed", "free"}),
        (Selection(labels=("keep=2",)), True, {"used", "typed", "free", "unnamed"}),
    ],
)
def test_prune(tmp_path: Path, selection: Selection, named: bool, left: set[str]) -> None:
    async def work(volumes: VolumeStore, events: EventLog) -> None:
        before = await names(volumes)
        for each in (await volumes.select({}, None))[0]:
            fill(each.mountpoint, 5)
        removed, space = await volumes.prune(selection, named=named)
        assert await names(volumes) == left
        assert (len(removed), space) == (len(before - left), 5 * len(before - left))
        published = [each for each in events.history(0) if each.type == "volume"]
        assert published[-1].action == "prune"
        assert (published[-1].actor.id, published[-1].actor.attributes) == ("", {"reclaimed": str(space)})
        assert [each.actor.id for each in published if each.action == "destroy"] == removed
        assert {*os.listdir(tmp_path / "volumes")} == {each.name for each in (await volumes.select({}, None))[0]}

    with_volumes(tmp_path, work)


def test_one_prune_at_a_time(tmp_path: Path) -> None:
    async def work(volumes: VolumeStore, events: EventLog) -> None:
        outcomes = await asyncio.gather(
            *(volumes.prune(Selection(), named=True) for _ in range(2)), return_exceptions=True
        )
        assert [type(outcome) for outcome in outcomes] == [tuple, Conflict]

    with_volumes(tmp_path, work)


def test_a_volume_that_cannot_be_pruned_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(volumes: VolumeStore, events: EventLog) -> None:
        real = os.rename

        def rename(old: str, new: str, **more: int) -> None:
            if old == "free":
                raise PermissionError(1, "Operation not permitted")
            real(old, new, **more)

        monkeypatch.setattr(os, "rename", rename)
        removed, _ = await volumes.prune(Selection(), named=True)
        assert len(removed) == 1 and await names(volumes) == {"used", "typed", "free"}

    with_volumes(tmp_path, work)


def test_usage(tmp_path: Path) -> None:
    async def work(volumes: VolumeStore, events: EventLog) -> None:
        fill((await volumes.get("free")).mountpoint, 1000)
        found = {each.name: each.usage_data for each in await volumes.usage() if len(each.name) < 64}
        assert {name: (data.size, data.ref_count) for name, data in found.items() if data} == {
            "used": (0, 1),
            "free": (1000, 0),
        }

    with_volumes(tmp_path, work)


def test_force(tmp_path: Path) -> None:
    async def work(volumes: VolumeStore, events: EventLog) -> None:
        await volumes.remove("none", force=True)
        with pytest.raises(NotFound):
            await volumes.remove("none")
        with pytest.raises(Conflict, match="volume is in use - \\[c\\]"):
            await volumes.remove("used", force=True)
        assert "used" in await names(volumes)

    with_volumes(tmp_path, work)


def test_cluster_volumes_are_refused(tmp_path: Path) -> None:
    async def work(volumes: VolumeStore, events: EventLog) -> None:
        for spec in ({}, {"Group": "g"}):
            with pytest.raises(Unimplemented, match=r"ClusterVolumeSpec.*not supported"):
                await volumes.create(VolumeCreate(name="cluster", cluster_volume_spec=spec))

    with_volumes(tmp_path, work)
