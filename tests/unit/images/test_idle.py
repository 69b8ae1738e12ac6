"""Memory is released after a pause in the work on images, and not before."""

from __future__ import annotations

import asyncio
import gzip
import os
import threading
from pathlib import Path

import pytest

from engine.images.idle import Idle
from tests.support.images.archives import Image, docker_archive
from tests.unit.images.test_registry import HIGH, LOW, Good, run, stage


def test_a_pause_begins_when_the_last_work_ends(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        idle = Idle(0.02)
        released = []

        def fails() -> None:
            raise OSError("release")

        idle.when_idle(lambda: released.append(1))
        idle.when_idle(fails)
        idle.when_idle(lambda: released.append(2))
        with idle.work():
            with idle.work():
                pass
            await asyncio.sleep(0.06)
            assert released == []
        with idle.work():
            await asyncio.sleep(0.06)
            assert released == []
        await asyncio.sleep(0.06)
        assert released == [1, 2] and "releasing memory" in caplog.text
        with idle.work():
            pass
        idle.close()
        await asyncio.sleep(0.06)
        assert released == [1, 2]

    asyncio.run(work())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_threads_and_connections_end_after_a_pause(tmp_path: Path) -> None:
    """The threads and connections of pulls and loads; the next ones start new ones."""
    good = Good()

    def threads() -> set[str]:
        return {thread.name.partition("_")[0] for thread in threading.enumerate()} & {"digest", "layer", "pack"}

    async def work() -> None:
        async with stage(tmp_path, good) as (server, puller):
            store = puller.stage.images
            store.idle._pause = 0.05
            for at in range(2):
                await puller.pull(f"{server.host}/a/b")
                await puller.stage.load(gzip.compress(docker_archive(Image([LOW, HIGH], [f"loaded:{at}"]))))
                store.idle._pause = 0.05
                await asyncio.sleep(0.5)
                assert threads() == set() and puller.client._session is None
                await store.delete(f"{server.host}/a/b:t")

    run(work)
