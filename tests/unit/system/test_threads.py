"""Threads that may wait for clients, and work that continues after its caller was cancelled."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.errors import ServerError
from engine.networks.drivers import Workers
from engine.system import threads
from engine.system.detached_mounts import MountNamespace
from engine.volumes.local import LocalDriver
from tests.support import PATIENCE


def test_uninterrupted_returns_the_result_or_the_failure() -> None:
    async def work(value: int) -> int:
        await asyncio.sleep(0)
        if value < 0:
            raise ValueError("negative")
        return value

    async def main() -> None:
        assert await threads.uninterrupted(work(3)) == 3
        with pytest.raises(ValueError, match="negative"):
            await threads.uninterrupted(work(-1))
        assert await threads.uninterrupted(asyncio.ensure_future(work(4))) == 4

    asyncio.run(main())


@pytest.mark.parametrize("fails", [False, True])
def test_uninterrupted_ends_the_work_before_it_is_cancelled(fails: bool) -> None:
    async def main() -> None:
        go = asyncio.Event()
        done = []

        async def work() -> None:
            await go.wait()
            done.append(True)
            if fails:
                raise OSError("hidden by the cancellation")

        caller = asyncio.ensure_future(threads.uninterrupted(work()))
        for _ in range(3):  # a caller may be cancelled again and again
            await asyncio.sleep(0)
            caller.cancel()
        await asyncio.sleep(0)
        assert not caller.done()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert done == [True]

    asyncio.run(main())


def test_stalled_work_holds_up_no_other() -> None:
    async def main() -> None:
        release = threading.Event()
        stalled = [threads.in_own_thread(release.wait, "stalled") for _ in range(20)]
        policy, name = await asyncio.wait_for(
            threads.in_own_thread(lambda: (os.sched_getscheduler(0), threading.current_thread().name), "mine"),
            10 * PATIENCE,
        )
        assert policy == os.SCHED_BATCH and name.startswith("mine")
        release.set()
        assert all(await asyncio.gather(*stalled))

    asyncio.run(main())


def test_a_pool_survives_a_refused_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)

    async def main() -> None:
        pool = threads.LongWork(1, "pool")
        assert [await pool.run(lambda: 1), await pool.run(lambda: 2)] == [1, 2]
        pool.release()

    asyncio.run(main())


def test_a_pool_that_was_shut_down() -> None:
    async def main() -> None:
        pool = ThreadPoolExecutor(1)
        pool.shutdown()
        with pytest.raises(ServerError, match="the engine is stopping"):
            threads.submit(pool, lambda: 1)

    asyncio.run(main())


def test_a_thread_that_the_host_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error of the engine. The refused work does not run later, when its descriptors may
    be closed.
    """
    ran = []

    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def main() -> None:
        pool = threads.LongWork(2, "pool")
        busy = threading.Event()
        first = pool.run(busy.wait)
        with monkeypatch.context() as refusing:
            refusing.setattr(threading.Thread, "start", no_thread)
            with pytest.raises(ServerError, match="the host allows no more threads"):
                pool.run(ran.append, 1)
            with pytest.raises(ServerError, match="the host allows no more threads"):
                threads.in_own_thread(lambda: ran.append(2), "own")
            with pytest.raises(ServerError, match="the host allows no more threads"):
                await MountNamespace(tmp_path, "/own").run(lambda: ran.append(4))
            with pytest.raises(ServerError, match="the host allows no more threads"):
                await Workers().run(ran.append, 5)
            with pytest.raises(ServerError, match="the host allows no more threads"):
                await LocalDriver(tmp_path, tmp_path).open([])
        busy.set()
        assert await first
        await pool.run(ran.append, 3)
        assert ran == [3]
        pool.release()

    asyncio.run(main())


def test_threads_end_and_begin_again() -> None:
    async def main() -> None:
        pool = threads.LongWork(1, "ending")
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                await pool.run(lambda: 1 // 0)
            assert await pool.run(int, "7") == 7
            pool.release()
            async with asyncio.timeout(10 * PATIENCE):
                while any(thread.name.startswith("ending") for thread in threading.enumerate()):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

    asyncio.run(main())


def test_a_task_is_cancelled_and_waited_for() -> None:
    async def main() -> None:
        steps = []

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.01)
                steps.append("cleaned")
                raise ValueError("dropped")

        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        ending = asyncio.create_task(threads.cancelled(task))
        await asyncio.sleep(0)
        ending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ending
        assert steps == ["cleaned"] and task.done()

    asyncio.run(main())
