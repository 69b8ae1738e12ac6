"""Policies of the build cache: what the configuration makes of them, as dockerd 28.5.2 reports its
own. When the collection runs: after a start, and not beyond the builder's end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine.builder import caches, collection, prune
from engine.builder.builder import Builder
from engine.builder.collection import DAY, policies
from engine.builder.parts import Parts
from engine.config import Config, parse
from engine.config.cache import CachePolicy, policy, size
from engine.config.files import FileError
from engine.storage.content import Content
from tests.support import PATIENCE
from tests.unit.builder.test_cache import Site

DISK = 270553174016
"""Of the disk on which dockerd was asked."""
MOUNTS = {"type": ("source.local", "exec.cachemount")}


class Made(Site):
    """A store whose cache has one step, which makes a layer."""

    async def __aenter__(self) -> Made:
        await super().__aenter__()
        step = await self.directory(await self.base(), "made")
        self.made, self.layer = step.image_id, step.top
        await self.cache.write()
        return self


@contextlib.asynccontextmanager
async def started(root: Path, *chosen: str) -> AsyncIterator[tuple[Builder, Made]]:
    """A builder with these policies that has just been opened."""
    absent: Any = None
    async with Made(root) as site:
        config = Config(root=root, run=root / "run", build_policies=chosen)
        builder = Builder(config, site.records, absent, site.images, absent, site.events, absent)
        builder.open()
        try:
            yield builder, site
        finally:
            await builder.close()


def of(builder: Any, tmp_path: Path) -> list[CachePolicy]:
    file = tmp_path / "daemon.json"
    file.write_text(json.dumps({"builder": builder}))
    return policies(parse({}, str(file)), DISK)


def limits(mounts: int, reserved: int, used: int = 0, free: int = 0) -> list[CachePolicy]:
    spaces: dict[str, Any] = {"reserved": reserved, "max_used": used, "min_free": free}
    return [
        CachePolicy(unused_for=2 * DAY, filters=MOUNTS, max_used=mounts),
        CachePolicy(unused_for=60 * DAY, **spaces),
        CachePolicy(**spaces),
        CachePolicy(all=True, **spaces),
    ]


@pytest.mark.parametrize(
    ("history", "entries", "age"),
    [
        ({}, 50, "48h"),
        ({"maxEntries": 5, "maxAge": "90m"}, 5, "90m"),
        ({"maxAge": 3600}, 50, "3600s"),
    ],
)
def test_the_history_of_builds(history: Any, entries: int, age: str, tmp_path: Path) -> None:
    file = tmp_path / "daemon.json"
    file.write_text(json.dumps({"builder": {"history": history}}))
    config = parse({}, str(file))
    assert (config.build_history_entries, config.build_history_age) == (entries, age)


@pytest.mark.parametrize(
    "history", [{"maxAge": "2 days"}, {"maxAge": "-1h"}, {"maxAge": True}, {"maxEntries": -1}, {"other": 1}]
)
def test_a_history_that_is_refused(history: Any, tmp_path: Path) -> None:
    file = tmp_path / "daemon.json"
    file.write_text(json.dumps({"builder": {"history": history}}))
    with pytest.raises(FileError, match="builder"):
        parse({}, str(file))


def test_defaults() -> None:
    expected = limits(3592570859, 26_000_000_000, 202_000_000_000, 51_000_000_000)
    assert policies(Config(), DISK) == expected
    assert policies(Config(), 1 << 30)[0].max_used == 512_000_000


@pytest.mark.parametrize(
    ("gc", "expected"),
    [
        ({}, limits(3592570859, 26_000_000_000, 202_000_000_000, 51_000_000_000)),
        ({"enabled": False, "defaultKeepStorage": "20GB"}, []),
        ({"defaultKeepStorage": "20GB"}, limits(2967302759, 20 << 30)),
        ({"defaultMaxUsedSpace": "1g"}, limits(512_000_000, 0, 1 << 30)),
        (
            {"defaultReservedSpace": "20GB", "defaultMaxUsedSpace": "70GB", "defaultMinFreeSpace": "10GB"},
            limits(2967302759, 20 << 30, 70 << 30, 10 << 30),
        ),
        ({"policy": []}, []),
        ({"policy": [{}]}, [CachePolicy()]),
        (
            {
                "policy": [
                    {"keepStorage": "10GB", "filter": ["unused-for=2200h"]},
                    {"maxUsedSpace": "5g", "all": True, "filter": {"type": {"exec.cachemount": True}}},
                    {"reservedSpace": "1.5k", "minFreeSpace": "7", "filter": ["until=1h", "id=a", "id=b"]},
                ]
            },
            [
                CachePolicy(unused_for=2200 * DAY // 24, reserved=10 << 30),
                CachePolicy(all=True, filters={"type": ("exec.cachemount",)}, max_used=5 << 30),
                CachePolicy(unused_for=DAY // 24, filters={"id": ("a", "b")}, reserved=1536, min_free=7),
            ],
        ),
    ],
)
def test_dockers_keys(tmp_path: Path, gc: dict[str, Any], expected: list[CachePolicy]) -> None:
    assert of({"gc": gc}, tmp_path) == expected


@pytest.mark.parametrize(
    ("builder", "words"),
    [
        ({"gc": {"defaultKeepStorage": "x"}}, "builder 'x': must be a size such as 10GB"),
        ({"gc": {"defaultMaxUsedSpace": "70%"}}, "builder '70%': must be a size"),
        ({"gc": {"defaultMinFreeSpace": 5}}, "builder gc defaultMinFreeSpace: expected a string"),
        ({"gc": {"other": 1}}, "builder gc other: is not known"),
        ({"gc": True}, "builder gc: expected an object"),
        ({"gc": {"policy": [{"other": 1}]}}, "builder gc policy other: is not known"),
        ({"gc": {"policy": [{"filter": ["foo=1"]}]}}, "builder 'all=false,foo=1': foo is not known"),
        ({"gc": {"policy": [{"filter": ["unused-for=1h", "until=2h"]}]}}, "has one duration"),
        ({"gc": {"policy": [{"filter": ["unused-for=soon"]}]}}, "not a duration: soon"),
        ({"gc": {"policy": [{"filter": ["a,b=1"]}]}}, "must not have a comma"),
        ({"gc": {"policy": [{"all": "yes"}]}}, "builder gc policy all: expected true or false"),
        ({"entitlements": {"security-insecure": True}}, "builder security.insecure: is not supported"),
        ({"entitlements": {"other": False}}, "builder entitlements other: is not known"),
        ({"entitlements": {"network-host": "no"}}, "builder entitlements network-host: expected true or false"),
        ({"other": {}}, "builder other: is not known"),
    ],
)
def test_refused_values(tmp_path: Path, builder: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        of(builder, tmp_path)


@pytest.mark.parametrize(
    ("entitlements", "expected"),
    [
        ({}, ("network.host",)),
        ({"network-host": True, "security-insecure": False}, ("network.host",)),
        ({"network-host": False}, ("none",)),
    ],
)
def test_entitlements(tmp_path: Path, entitlements: dict[str, bool], expected: tuple[str, ...]) -> None:
    file = tmp_path / "daemon.json"
    file.write_text(json.dumps({"builder": {"entitlements": entitlements}}))
    assert parse({}, str(file)).build_entitlements == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("10GB", 10 << 30), ("10 GiB", 10 << 30), ("1k", 1024), ("1.5M", 3 << 19), ("7", 7), ("7b", 7), ("1T", 1 << 40)],
)
def test_sizes(text: str, expected: int) -> None:
    assert size(text) == expected


@pytest.mark.parametrize("text", ["", "x", "-1", "1e3", "10%", "1 x", "1kk"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="must be a size"):
        size(text)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_the_cache_is_looked_at_after_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the process may have come before the collection that was due."""
    monkeypatch.setattr(collection, "QUIET", 0)

    async def work() -> None:
        async with started(tmp_path, "all=true") as (builder, _):
            assert builder._collector._running is not None
            await asyncio.wait_for(builder._collector._running, 10 * PATIENCE)
            assert await builder.usage() == []

    asyncio.run(work())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_policies_that_remove_nothing_share_one_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection, "QUIET", 0)
    looks = 0
    steps = prune.steps

    async def counted(parts: Parts) -> list[prune.Entry]:
        nonlocal looks
        looks += 1
        return await steps(parts)

    monkeypatch.setattr(prune, "steps", counted)

    async def work() -> None:
        async with started(tmp_path, *["max-used=1g"] * 3, "all=true", "all=true") as (builder, _):
            assert builder._collector._running is not None
            await asyncio.wait_for(builder._collector._running, 10 * PATIENCE)
            assert await builder.usage() == [] and looks == 2, "and another one after a removal"

    asyncio.run(work())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_cache_mounts_are_seen_at_once_and_counted_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was in use at the last look, or was not there, did not count for five minutes."""
    counted: list[str] = []

    def size(path: Path) -> int:
        counted.append((path.parent / "id").read_text())
        return files_size(path)

    files_size = caches._size
    monkeypatch.setattr(caches, "_size", size)

    async def main() -> None:
        async with Made(tmp_path) as site:
            collector = collection.Collector(site.parts)

            async def seen() -> tuple[dict[str, tuple[int, bool]], list[str]]:
                entries = await collector._entries()
                found = {
                    each.description[-2]: (each.size, each.in_use) for each in entries if each.type == prune.CACHE_MOUNT
                }
                taken = counted[:]
                counted.clear()
                return found, sorted(taken)

            assert await seen() == ({}, [])
            async with site.parts.caches.use("a", "shared", lambda _: None, 0o755) as first:
                assert await seen() == ({"a": (0, True)}, ["a"])
                (first / "file").write_bytes(bytes(1000))
            assert await seen() == ({"a": (1000, False)}, ["a"])
            assert await seen() == ({"a": (1000, False)}, [])
            async with site.parts.caches.use("b", "shared", lambda _: None, 0o755):
                pass
            assert await seen() == ({"a": (1000, False), "b": (0, False)}, ["b"])
            (first / "file").write_bytes(bytes(3000))
            async with site.parts.caches.use("a", "shared", lambda _: None, 0o755):
                assert (await seen())[0]["a"] == (1000, True)
            assert (await seen())[0]["a"] == (3000, False)
            collector._next_count = 0
            assert (await seen())[1] == ["a", "b"]

    asyncio.run(main())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_no_collection_begins_after_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection, "QUIET", 0.01)

    async def work() -> None:
        async with started(tmp_path, "all=true") as (builder, _):
            await builder.close()
            await asyncio.sleep(0.1)
            assert [entry.description for entry in await builder.usage()] == ["made"]

    asyncio.run(work())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_the_end_waits_for_a_removal_that_has_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection, "QUIET", 0)
    begun, go_on = asyncio.Event(), threading.Event()

    async def work() -> None:
        loop, delete = asyncio.get_running_loop(), Content.delete

        def slow(content: Content, digest: str) -> None:
            loop.call_soon_threadsafe(begun.set)
            go_on.wait(10 * PATIENCE)
            delete(content, digest)

        monkeypatch.setattr(Content, "delete", slow)
        async with started(tmp_path, "all=true") as (builder, site):
            await asyncio.wait_for(begun.wait(), 10 * PATIENCE)
            closing = asyncio.create_task(builder.close())
            await asyncio.sleep(0)
            go_on.set()
            await closing
            assert site.made not in site.images.index and site.snapshots.layer(site.layer) is None

    asyncio.run(work())


def test_a_policy_as_text() -> None:
    found = policy("all=true,type=a,type=b,unused-for=1h30m,max-used=1g")
    assert found == CachePolicy(True, DAY // 16, {"type": ("a", "b")}, max_used=1 << 30)
    for text in ("all", "all=1", "max-used=", "=1"):
        with pytest.raises(ValueError, match=re.escape(repr(text))):
            policy(text)
