"""Memory is returned to the kernel once, after a pause in the engine's work."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path

import pytest

from engine.errors import ServerError
from engine.system import memory
from tests.support import PATIENCE


def test_many_calls_trim_once_when_it_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[int] = []
    monkeypatch.setattr(memory, "QUIET", 0.05)
    monkeypatch.setattr(memory, "INTERVAL", 1000.0)
    monkeypatch.setattr(memory, "_earliest", 0.0)
    monkeypatch.setattr(memory, "malloc_trim", lambda: bool(trims.append(threading.get_ident())))

    async def trimmed(count: int) -> None:
        async with asyncio.timeout(10 * PATIENCE):
            while len(trims) < count:  # noqa: ASYNC110 (a thread appends to it)
                await asyncio.sleep(0.01)

    async def main() -> None:
        for _ in range(5):
            memory.trim_soon()
        assert trims == []
        await trimmed(1)
        assert trims[0] != threading.get_ident(), "not on the loop"
        memory.trim_soon()
        await asyncio.sleep(0.2)
        assert len(trims) == 1, "not again within INTERVAL"
        memory._earliest = 0.0
        memory.trim_soon()
        await trimmed(2)

    asyncio.run(main())


def test_without_threads_nothing_is_trimmed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: object) -> None:
        raise ServerError("the host allows no more threads")

    async def main() -> None:
        monkeypatch.setattr(memory, "in_own_thread", refuse)
        memory._trim()

    asyncio.run(main())
    assert "returning memory to the host: the host allows no more threads" in caplog.text


def test_what_was_freed_goes_back_to_the_kernel() -> None:
    def resident() -> int:
        found = re.search(r"^Rss:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
        assert found
        return int(found[1]) >> 10

    # Blocks below the threshold of mmap(2), written to so that they are resident.
    blocks = [bytes([at % 255 + 1]) * 100_000 for at in range(1000)]
    high = resident()
    blocks.clear()
    memory.malloc_trim()
    assert resident() <= high - 80, "of 95 MiB"
