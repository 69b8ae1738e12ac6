"""Compressed streams and layers while they are received, apart from their later use."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import os
import re
import threading
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.errors import ServerError
from engine.images import layers, push, save, tarsplit
from engine.images.spans import Incoming, Span
from engine.storage.snapshots import Ingest
from engine.system import files
from engine.system.threads import Threads
from tests.support import PATIENCE

SIZE = 256 << 20


@pytest.fixture
def descriptors(tmp_path: Path) -> Iterator[tuple[int, int]]:
    found = files.temporary_file(tmp_path), files.temporary_file(tmp_path)
    yield found
    for descriptor in found:
        os.close(descriptor)


def bomb(into: int) -> Span:
    packed = gzip.compress(bytes(16 << 20)) * (SIZE >> 24) + gzip.compress(b"end")
    os.write(into, packed)
    return Span(into, 0, len(packed))


def peak() -> int:
    """Peak resident memory of this process since `clear_refs` (proc(5)), mapped files included."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024


def test_zeros_become_holes(descriptors: tuple[int, int]) -> None:
    packed, plain = descriptors
    assert layers.inflate(bomb(packed), "gzip", plain, threading.Event()) == SIZE + 3
    assert os.fstat(plain).st_size == SIZE + 3 and os.fstat(plain).st_blocks * 512 < 1 << 20
    assert os.pread(plain, 10, SIZE - 5) == b"\0\0\0\0\0end"


def test_who_has_left_inflates_no_further(descriptors: tuple[int, int]) -> None:
    packed, plain = descriptors
    stop = threading.Event()
    stop.set()
    assert layers.inflate(bomb(packed), "gzip", plain, stop) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
class Slow:
    """A layer's stream that is read as slowly as the test requires, and must not be closed
    meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.told: list[str] = []

        @contextlib.contextmanager
        def stream(diff: Path) -> Iterator[Slow]:
            try:
                yield self
            finally:
                self.told.append("closed")

        def read(source: Slow, buffer: memoryview) -> int:
            self.begun.set()
            assert self.go.wait(30 * PATIENCE)
            self.told.append("read")
            return len(buffer)

        monkeypatch.setattr(tarsplit, "stream", stream)
        monkeypatch.setattr(tarsplit, "read", read)
        monkeypatch.setattr(tarsplit, "stream_size", lambda diff: 1 << 30)


@pytest.mark.parametrize("verb", ["save", "push"])
def test_a_layer_is_closed_when_nobody_reads_it_any_more(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client disconnects in the middle. The thread still reads from the descriptors for a while,
    so their numbers must not be reused by then."""
    slow = Slow(monkeypatch)
    store: Any = SimpleNamespace(snapshots=SimpleNamespace(layer_path=lambda chain_id: Path("/nowhere")))

    async def take(chunks: AsyncGenerator[bytes, None]) -> None:
        async with contextlib.aclosing(chunks):
            async for _ in chunks:
                pass

    async def work() -> None:
        threads = Threads(2)
        if verb == "save":
            chunks = save._Archive(store).layer("sha256:" + "0" * 64, "")
        else:
            source = push.Source("", "", 0, (), ())
            chunks = push._Packed(store, source, threads, lambda done: None).chunks()
        taking = asyncio.ensure_future(take(chunks))
        assert await asyncio.to_thread(slow.begun.wait, 30)
        taking.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert slow.told == [] and not taking.done()
        slow.go.set()
        with pytest.raises(asyncio.CancelledError):
            await taking
        assert slow.told == ["read", "closed"]

    asyncio.run(work())


def test_a_digest_takes_no_memory(descriptors: tuple[int, int]) -> None:
    plain = descriptors[0]
    os.ftruncate(plain, SIZE)
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    hashed = hashlib.sha256()
    for _ in range(SIZE >> 20):
        hashed.update(bytes(1 << 20))
    assert layers.digest_of(Span(plain, 0, SIZE)) == f"sha256:{hashed.hexdigest()}"
    assert peak() - before < 32 << 20


def test_bytes_are_waited_for(descriptors: tuple[int, int]) -> None:
    async def work() -> None:
        descriptor = descriptors[0]
        there = 0
        end: asyncio.Task[None] = asyncio.create_task(asyncio.sleep(0))
        incoming = Incoming(descriptor, 10, lambda: there, end)
        waiting = asyncio.create_task(asyncio.to_thread(incoming.wait, 0, 4))
        for there in (1, 3, 7):  # noqa: B007 (the lambda reads it)
            assert not waiting.done()
            incoming.arrived()
            await asyncio.sleep(0.01)
        assert await waiting == 7
        assert incoming.wait(6) == 1  # seconds: none, but bytes
        there = 10
        assert incoming.wait(9, 8) == 1  # at most all of it can come
        await incoming.whole()

    asyncio.run(work())


def test_who_waits_is_told_that_nothing_comes(descriptors: tuple[int, int]) -> None:
    async def work() -> None:
        end = asyncio.create_task(asyncio.Event().wait())
        incoming = Incoming(descriptors[0], 10, lambda: 5, end)  # type: ignore[arg-type]
        waiting = asyncio.create_task(asyncio.to_thread(incoming.wait, 5))
        whole = asyncio.create_task(incoming.whole())
        await asyncio.sleep(0.01)
        incoming.stop()
        for task in (waiting, whole):
            with pytest.raises(ServerError, match="not received"):
                await task
        end.cancel()

    asyncio.run(work())


def test_a_seal_on_a_missing_layer_abandons_its_ingest(tmp_path: Path) -> None:
    abandoned: list[Ingest] = []

    async def abandon(ingest: Ingest) -> None:
        abandoned.append(ingest)

    snapshots: Any = SimpleNamespace(layer=lambda _: None, abandon=abandon)
    ingest = Ingest(1, tmp_path)
    with pytest.raises(ServerError, match="layer gone is missing"):
        asyncio.run(layers.Layers(snapshots).seal(ingest, "gone"))
    assert abandoned == [ingest]
