"""The manager's process: how it ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import uvloop

from engine.manager import main
from engine.manager.process import SOCKET
from engine.system.tasks import spawn
from tests.support import PATIENCE


def test_the_process_ends_when_a_part_fails_that_it_cannot_do_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would serve on with a cache that nothing updates."""

    async def test() -> None:
        serves = asyncio.Event()
        monkeypatch.setattr(main, "collect_rarely", serves.set)
        process = asyncio.create_task(main._serve(tmp_path, tmp_path))
        async with asyncio.timeout(5 * PATIENCE):
            await serves.wait()
        assert (tmp_path / SOCKET).exists()

        async def fail() -> None:
            raise ZeroDivisionError

        spawn(fail(), "manager: watch of etcd", fatal=True)
        async with asyncio.timeout(5 * PATIENCE):
            assert await process == main.FAILED
        assert not (tmp_path / SOCKET).exists()

    uvloop.run(test())
