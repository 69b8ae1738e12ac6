"""Image archives whose layers are extracted while they arrive. The resulting images are tested in
test_store.py."""

from __future__ import annotations

import _thread
import asyncio
import hashlib
import json
import os
import random
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine._fast import layer as _layer
from engine.errors import InvalidParameter, ServerError
from engine.images import layers, receiving, tarsplit
from engine.images.layers import Extracted, Hashing
from engine.images.spans import Span
from engine.storage.snapshots import Ingest
from engine.system import files
from tests.support.images.archives import Image, Node, directory, docker_archive, tar
from tests.unit.images.test_store import LOW, ONE, OTHER, TWO, Stage, pieces

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

SHARED = tar([directory("d"), Node("d/one", os.urandom(700_000)), Node("d/two", b"2" * 10)])


def count_drafts(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows with every layer that is extracted while an archive arrives."""
    made: list[None] = []
    ingest = layers.Layers.ingest

    async def counted(self: layers.Layers) -> Ingest:
        made.append(None)
        return await ingest(self)

    monkeypatch.setattr(layers.Layers, "ingest", counted)
    return made


def test_one_layer_below_several_parents(tmp_path: Path) -> None:
    """The layer's bytes are sent once. The second layer is made from the first one's files."""
    images = [Image([LOW, SHARED], ["a:latest"]), Image([OTHER, SHARED], ["b:latest"]), Image([SHARED], ["c:latest"])]

    async def work() -> None:
        async with Stage(tmp_path) as stage:
            await stage.load(docker_archive(*images))
            for name in "abc":
                diff = stage.snapshots.layer_path(stage.images.get(name).chain_ids[-1])
                assert (diff / "d" / "two").read_bytes() == b"2" * 10
                with tarsplit.stream(diff) as source:
                    buffer = bytearray(len(SHARED) + 1)
                    assert tarsplit.read(source, memoryview(buffer)) == len(SHARED) and buffer[:-1] == SHARED
            assert len(stage.on_disk()[0]) == 5 and stage.on_disk()[2] == []

    asyncio.run(work())


def test_what_is_here_is_not_laid_out_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_drafts(monkeypatch)

    async def work() -> None:
        async with Stage(tmp_path) as stage:
            await stage.load(docker_archive(ONE))
            assert len(made) == 1
            await stage.load(docker_archive(Image([LOW, SHARED], ["more:latest"])))
            assert len(made) == 2 and len(stage.on_disk()[0]) == 2
            same_size = bytearray(LOW)
            same_size[same_size.index(b"low")] = ord("L")
            await stage.load(docker_archive(Image([bytes(same_size)], ["other:latest"])))
            assert len(made) == 2 and len(stage.on_disk()[0]) == 3

    asyncio.run(work())


def test_more_members_than_are_laid_out_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "MAX_EARLY", 1)
    made = count_drafts(monkeypatch)
    decoys = [Node(f"decoy{at}", tar([Node(f"{at}", b"x" * at)])) for at in range(20)]

    async def work() -> None:
        async with Stage(tmp_path) as stage:
            await stage.load(tar(decoys)[:-10240] + docker_archive(TWO))
            assert stage.images.get("two:a") and len(made) == 1
            assert len(stage.on_disk()[0]) == 2 and stage.on_disk()[2] == []

    asyncio.run(work())


def test_a_layer_where_a_document_should_be(tmp_path: Path) -> None:
    manifest = json.dumps([{"Config": "layer.tar", "RepoTags": ["x:latest"], "Layers": []}]).encode()

    async def work() -> None:
        async with Stage(tmp_path) as stage:
            with pytest.raises(InvalidParameter, match="not a JSON document"):
                await stage.load(tar([Node("layer.tar", LOW), Node("manifest.json", manifest)]))
            assert stage.on_disk() == ([], [], [])

    asyncio.run(work())


def test_all_that_comes_is_taken_before_it_is_refused(tmp_path: Path) -> None:
    """The whole body is read first, because a client reads no response while it sends."""
    left = [docker_archive(ONE)[:300], b"\xff" * 1000, *[bytes(100_000)] * 50]

    async def body() -> AsyncIterator[bytes]:
        while left:
            yield left.pop(0)

    async def work() -> None:
        async with Stage(tmp_path) as stage:
            with pytest.raises(InvalidParameter, match="invalid archive"):
                async for _ in stage.images.load(body()):
                    pass
            assert not left and stage.on_disk() == ([], [], [])

    asyncio.run(work())


@pytest.mark.parametrize("cut", [700, 30_000, 400_000])
def test_who_leaves_in_the_middle_of_a_layer(tmp_path: Path, cut: int) -> None:
    data = docker_archive(Image([SHARED], ["a:latest"]))

    async def work() -> None:
        stalled = asyncio.Event()

        async def body() -> AsyncIterator[bytes]:
            async for piece in pieces(data[:cut]):
                yield piece
            stalled.set()
            await asyncio.Event().wait()

        async def load() -> None:
            async for _ in stage.images.load(body()):
                pass

        async with Stage(tmp_path) as stage:
            task = asyncio.create_task(load())
            await stalled.wait()
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled() and stage.on_disk() == ([], [], [])
            await stage.load(data)
            assert stage.images.get("a")

    asyncio.run(work())


def test_work_that_nobody_wants_any_more_ends(tmp_path: Path) -> None:
    file = files.temporary_file(tmp_path)
    (tmp_path / "diff").mkdir()
    directory = files.open_directory(tmp_path / "diff")
    try:
        os.write(file, SHARED)
        unwanted = array("q", [0, 1])
        with pytest.raises(OSError, match="cancelled"):
            _layer.apply(file, directory, size=len(SHARED), progress=unwanted)
        with pytest.raises(ServerError):
            layers.digest_of(Span(file, 0, len(SHARED)), unwanted)
        with pytest.raises(ValueError, match="two 64-bit integers"):
            _layer.apply(file, directory, size=len(SHARED), progress=array("q", [0]))
        assert os.listdir(tmp_path / "diff") == []
    finally:
        os.close(directory)
        os.close(file)


@pytest.mark.parametrize("refused", [False, True])
def test_hashing_beside(refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a thread for it, and on a host that allows no more threads."""

    start, started = _thread.start_new_thread, []

    def start_or_not(*arguments: Any) -> int:
        if refused:
            raise RuntimeError("can't start new thread")
        started.append(start(*arguments))
        return started[0]

    monkeypatch.setattr(_thread, "start_new_thread", start_or_not)
    data = random.Random(1).randbytes(20 << 20)
    digest = Hashing()
    for at in range(0, len(data), 100_001):
        digest.update(data[at : at + 100_001])
    assert len(started) == (not refused)
    assert digest.finish() == f"sha256:{hashlib.sha256(data).hexdigest()}"
    assert Hashing().finish() == f"sha256:{hashlib.sha256().hexdigest()}"


def test_a_layer_that_was_not_received() -> None:
    with pytest.raises(ServerError, match="not received"):
        Extracted(5).extraction()
