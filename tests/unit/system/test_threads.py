"""Threads that may wait for clients, and work that continues after its caller was cancelled."""

from __future__ import annotations

import _thread
import asyncio
import functools
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from engine.errors import ServerError
from engine.networks.drivers import Workers
from engine.system import threads
from engine.system.detached_mounts import MountNamespace
from engine.system.threads import Threads
from engine.volumes.local import LocalDriver
from tests.support import PATIENCE
from tests.support.forks import fork


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


@pytest.mark.parametrize("cancellations", [1, 2, 3])
def test_abandoned_work_leaves_no_failure_behind(cancellations: int) -> None:
    """A client that dies cancels its build by several of its calls."""

    async def main() -> None:
        loop, reported = asyncio.get_running_loop(), []
        loop.set_exception_handler(lambda _, context: reported.append(context["message"]))
        pool, begun = Threads(1), threading.Event()

        def work() -> None:
            begun.set()
            while True:
                threads.checkpoint()

        caller = asyncio.ensure_future(threads.abandonable(pool.run, work))
        await asyncio.to_thread(begun.wait)
        for _ in range(cancellations):
            caller.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await caller
        del caller
        gc.collect()
        await asyncio.sleep(0)
        assert reported == []

    asyncio.run(main())


def test_results_failures_and_cancellations() -> None:
    async def main() -> None:
        pool = Threads(1)
        assert await pool.run(divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await pool.run(divmod, 7, 0)
        go, ran = threading.Event(), []
        busy, queued = pool.run(go.wait), pool.run(ran.append, 1)
        queued.cancel()
        go.set()
        assert await busy
        await pool.run(ran.append, 2)
        assert ran == [2], "what was cancelled before it began does not run"

    asyncio.run(main())


def test_a_failure_is_no_reference_cycle() -> None:
    """What the frames of a traceback hold is free when the failure was handled."""

    class Held:
        pass

    def fail(held: Held) -> None:
        raise OSError("no")

    async def main() -> None:
        pool, held = Threads(1), Held()
        gone = weakref.ref(held)
        with pytest.raises(OSError, match="no"):
            await pool.run(fail, held)
        await pool.run(int)  # the thread is past it, too
        del held
        assert gone() is None

    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()


def test_stalled_work_holds_up_no_other() -> None:
    async def main() -> None:
        release = threading.Event()
        stalled = [threads.in_own_thread(release.wait) for _ in range(20)]
        policy = await asyncio.wait_for(threads.in_own_thread(lambda: os.sched_getscheduler(0)), 10 * PATIENCE)
        assert policy == os.SCHED_BATCH
        release.set()
        assert all(await asyncio.gather(*stalled))

    asyncio.run(main())


def test_a_pool_survives_a_refused_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)

    async def main() -> None:
        pool = Threads(1, batch=True)
        assert [await pool.run(lambda: 1), await pool.run(lambda: 2)] == [1, 2]

    asyncio.run(main())


def test_a_pool_that_was_closed() -> None:
    async def main() -> None:
        pool = Threads(1)
        go = threading.Event()
        begun = [pool.run(go.wait), pool.run(divmod, 7, 2)]
        pool.close()
        with pytest.raises(ServerError, match="the engine is stopping"):
            pool.run(lambda: 1)
        go.set()
        assert await asyncio.gather(*begun) == [True, (3, 1)]

    asyncio.run(main())


def test_a_thread_that_the_host_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error of the engine. The refused work does not run later, when its descriptors may
    be closed.
    """
    ran = []

    async def main() -> None:
        pool = Threads(2)
        busy = threading.Event()
        first = pool.run(busy.wait)
        with monkeypatch.context() as refusing:
            refusing.setattr(_thread, "start_new_thread", no_thread)
            with pytest.raises(ServerError, match="the host allows no more threads"):
                pool.run(ran.append, 1)
            with pytest.raises(ServerError, match="the host allows no more threads"):
                await pool.start()
            with pytest.raises(ServerError, match="the host allows no more threads"):
                Threads(9).run(ran.append, 2)
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

    asyncio.run(main())


def no_thread(*_: object) -> int:
    raise RuntimeError("can't start new thread")


def dying_thread(*_: object) -> int:
    """As where memory is short: the thread ends before its first line, and nothing says so."""
    return 0


def test_a_thread_that_ends_before_its_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its call is refused after a while. Others have threads."""
    monkeypatch.setattr(threads, "BEGIN", 0.1 * PATIENCE)

    async def main() -> None:
        for most in (1, 2):
            pool = Threads(most)
            with monkeypatch.context() as dying:
                dying.setattr(_thread, "start_new_thread", dying_thread)
                lost = [pool.run(divmod, 7, 2) for _ in range(most)]
            queued = pool.run(divmod, 9, 2)
            for each in lost:
                with pytest.raises(ServerError, match="the host allows no more threads"):
                    await each
            assert await queued == (4, 1)
            assert await pool.run(divmod, 8, 2) == (4, 0)
        with monkeypatch.context() as dying:
            dying.setattr(_thread, "start_new_thread", dying_thread)
            with pytest.raises(ServerError, match="the host allows no more threads"):
                await pool.start()
            with pytest.raises(ServerError, match="the host allows no more threads"):
                await Threads(2).start()

    asyncio.run(main())


def test_a_thread_that_begins_too_late_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[Callable[[], object]] = []

    def start(function: Callable[..., object], arguments: tuple[object, ...]) -> int:
        late.append(functools.partial(function, *arguments))
        return 0

    async def main() -> None:
        pool, ran = Threads(1), []
        with monkeypatch.context() as slow:
            slow.setattr(threads, "BEGIN", 0.0)
            slow.setattr(_thread, "start_new_thread", start)
            with pytest.raises(ServerError):
                await pool.run(ran.append, 1)
        late[0]()
        assert ran == []
        await pool.run(ran.append, 2)
        assert ran == [2]

    asyncio.run(main())


@pytest.mark.parametrize("thread", [no_thread, dying_thread])
def test_helpers_and_new_threads_that_do_not_begin(monkeypatch: pytest.MonkeyPatch, thread: Callable[..., int]) -> None:
    monkeypatch.setattr(threads, "BEGIN", 0.01)
    ran: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(_thread, "start_new_thread", thread)
        assert not threads.Helper(lambda: ran.append(1)).joined()
        with pytest.raises(ServerError, match="the host allows no more threads"):
            threads.in_new_thread(lambda: ran.append(2))
    assert ran == []


def test_helpers_and_new_threads() -> None:
    assert threads.in_new_thread(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        threads.in_new_thread(lambda: 1 // 0)
    go = threading.Event()
    helper = threads.Helper(go.wait)
    assert helper.begins()
    go.set()
    assert helper.joined() and helper.result()


def test_threads_end_and_begin_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "IDLE", 0.01)

    async def main() -> None:
        pool = Threads(8)
        for _ in range(3):
            go = threading.Event()
            calls = [pool.run(go.wait) for _ in range(8)]
            assert pool._threads == 8
            go.set()
            await asyncio.gather(*calls)
            async with asyncio.timeout(30 * PATIENCE):
                while pool._threads:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

    asyncio.run(main())


def test_threads_that_are_ready_stay_and_no_call_starts_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "IDLE", 0.01)

    async def main() -> None:
        pool = Threads(3, ready=True)
        await pool.start()
        monkeypatch.setattr(_thread, "start_new_thread", no_thread)
        for _ in range(3):
            await asyncio.sleep(0.02)
            go = threading.Barrier(3)
            await asyncio.gather(*(pool.run(go.wait) for _ in range(3)))
        pool.close()

    asyncio.run(main())


def test_memory_that_is_short_when_a_call_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its caller gets the result later."""

    async def main() -> None:
        pool, loop = Threads(1), asyncio.get_running_loop()
        call, left = loop.call_soon_threadsafe, [MemoryError(), MemoryError()]

        def call_later(*arguments: Any) -> object:
            if left:
                raise left.pop()
            return call(*arguments)

        monkeypatch.setattr(loop, "call_soon_threadsafe", call_later)
        assert await pool.run(divmod, 7, 2) == (3, 1)
        assert not left

        def fail() -> None:
            raise MemoryError

        with pytest.raises(MemoryError):
            await pool.run(fail)
        assert await pool.run(divmod, 7, 2) == (3, 1)

    asyncio.run(main())


def test_the_pool_of_to_thread() -> None:
    async def main() -> list[bool]:
        with threads.installed():
            await threads.start_all()
            assert await asyncio.to_thread(divmod, 7, 2) == (3, 1)
            with pytest.raises(ZeroDivisionError):
                await asyncio.get_running_loop().run_in_executor(None, divmod, 7, 0)
            begun, ended = threading.Event(), []

            def work() -> None:
                begun.set()
                time.sleep(0.05)
                ended.append(True)

            task = asyncio.create_task(asyncio.to_thread(work))
            await asyncio.to_thread(begun.wait)
            task.cancel()
        return ended

    ended = uvloop.run(main())
    threads.finish()
    assert ended == [True], "what has begun ends"


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


def test_a_fork_has_threads_of_its_own() -> None:
    async def use() -> int:
        return await threads.in_own_thread(os.getpid)

    assert asyncio.run(use()) == os.getpid()
    child = fork()
    if not child:
        try:
            os._exit(asyncio.run(asyncio.wait_for(use(), 10 * PATIENCE)) != os.getpid())
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
