"""Scheduling of threads (sched(7)), and waiting for work that cannot be cancelled.

The event loop's thread has a higher priority than others, and threads for long work have a lower
one.

A rule for every pool: work that waits for a client or a registry never runs in a bounded pool that
other requests use. A client that stalls would hold a thread of the pool, and a few such clients
would stop everything. Such work runs in `in_own_thread`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from engine.errors import ServerError

T = TypeVar("T")
P = ParamSpec("P")

_NICE = -10


def raise_priority() -> None:
    """Give the calling thread a nice value of -10, so that it runs soon when containers use every
    CPU.

    Processes and threads that it starts have 0. Without CAP_SYS_NICE nothing changes.
    """
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)  # 0: the calling thread alone


class LongWork:
    """A shared pool of at most `count` threads for long work, with the policy SCHED_BATCH: they
    preempt no other thread when they wake.

    For bytes and files that are complete; see the rule above. Threads start when they are needed.
    `release` ends them, with the memory that they keep.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._pool: ThreadPoolExecutor | None = None

    def run(self, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """The result of `function`. Raises ServerError if no thread can be started."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._count, self._name, become_batch)
        return submit(self._pool, function, *arguments)

    def release(self) -> None:
        """End the threads when their work is done. The next `run` starts new ones."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False)


def submit(pool: ThreadPoolExecutor, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
    """The result of `function`, which runs in a thread of the pool.

    Raises ServerError if no thread can be started or the pool was shut down; `function` does not
    run then. The loop's `run_in_executor` raises RuntimeError and may run it later.
    """
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    try:
        pool.submit(perform, future, function, arguments)
    except RuntimeError as error:
        # It stays in the queue, where a busy thread may run it later unless it is cancelled.
        if future.cancel():
            stopping = "shutdown" in str(error)  # concurrent.futures has no type for it
            raise ServerError("the engine is stopping" if stopping else "the host allows no more threads") from error
    return asyncio.wrap_future(future)


def perform(future: concurrent.futures.Future[Any], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Call `function` in this thread, for the one who waits for `future`."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function(*arguments))
    except BaseException as error:
        future.set_exception(error)
    finally:
        # A traceback holds this frame. Without these references there is no cycle.
        del future, function, arguments


def become_batch() -> None:
    """Give the calling thread the policy SCHED_BATCH.

    A failure is ignored: an exception in a pool's initializer would break the pool for good.
    """
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # 0: the calling thread alone


def in_own_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run `work` in a dedicated batch thread. For work that may wait for a client indefinitely.

    Raises ServerError if no thread can be started.
    """
    pool = ThreadPoolExecutor(1, name, become_batch)
    try:
        return submit(pool, work)
    finally:
        pool.shutdown(wait=False)


async def uninterrupted(work: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
    """The result of `work`, which runs to its end even when the caller is cancelled.

    The cancellation is raised after the end, in place of the result or of a failure of `work`.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    try:
        if cancelled is not None:
            if not task.cancelled():
                task.exception()  # mark it as retrieved
            raise cancelled
        return task.result()
    finally:
        del cancelled, task  # a traceback holds this frame: without these it is no reference cycle


class Abandoned(Exception):
    """The result of the work is no longer wanted."""


_abandoned = threading.local()
"""`check`: in a thread with `abandonable` work, the event that ends it."""


def checkpoint() -> None:
    """Called again and again in long work. Raises Abandoned when its result is no longer wanted."""
    event: threading.Event | None = getattr(_abandoned, "check", None)
    if event is not None and event.is_set():
        raise Abandoned


async def abandonable(run: Callable[..., asyncio.Future[T]], function: Callable[..., T], *arguments: Any) -> T:
    """The result of `function(*arguments)`, which `run` calls in a thread (`LongWork.run`). As
    `uninterrupted`, but when the caller is cancelled, the work ends at its next `checkpoint`.
    """
    event = threading.Event()

    def work() -> T:
        _abandoned.check = event
        try:
            checkpoint()
            return function(*arguments)
        finally:
            del _abandoned.check

    working = run(work)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        event.set()
        await uninterrupted(asyncio.wait([working]))
        if not working.cancelled():
            working.exception()  # mark it as retrieved
        raise


async def opened(work: Coroutine[Any, Any, int] | asyncio.Future[int]) -> int:
    """The descriptor that `work` opens. As `uninterrupted`; when the caller is cancelled, it is
    closed.
    """
    found: list[int] = []

    async def keep() -> None:
        found.append(await work)

    try:
        await uninterrupted(keep())
    except BaseException:
        for descriptor in found:
            # In a thread: closing the last descriptor of a mount waits for an RCU grace period.
            await uninterrupted(asyncio.to_thread(os.close, descriptor))
        raise
    return found[0]


def whole(verb: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """A decorator: complete the coroutine even when its caller is cancelled (`uninterrupted`)."""

    @functools.wraps(verb)
    async def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return await uninterrupted(verb(*args, **kwargs))

    return run


async def cancelled(task: asyncio.Future[Any]) -> None:
    """Cancel `task` and wait for its end, even if the caller is cancelled meanwhile. An error of
    the task is ignored.
    """
    task.cancel()
    try:
        await uninterrupted(asyncio.wait([task]))
    finally:
        if not task.cancelled():
            task.exception()  # seen
