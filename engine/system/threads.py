"""Who gets the processor: the event loop's thread before those of the usual nice value, threads for long work behind it (sched(7)).

And waiting for what a thread does, which nobody can take back.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

_NICE = -10


def put_first() -> None:
    """Give the calling thread a nice value of -10: it gets the processor soon, even where containers use all there is. What it starts has 0.

    Without CAP_SYS_NICE it stays as it is.
    """
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)  # 0: the calling thread alone


def batch_threads(count: int, name: str) -> ThreadPoolExecutor:
    """At most `count` threads called `name`, of the policy SCHED_BATCH: they push nobody aside when they wake."""
    return ThreadPoolExecutor(count, name, _become_batch)


def _become_batch() -> None:
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # 0: the calling thread alone


def in_own_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """What `work` returns, in a thread as of `batch_threads` that is nobody else's: for what waits for a client as long as that likes."""
    pool = batch_threads(1, name)
    try:
        return asyncio.get_running_loop().run_in_executor(pool, work)
    finally:
        pool.shutdown(wait=False)


async def uninterrupted(work: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
    """The result of `work`, which is brought to its end even when the caller is cancelled; the cancellation comes after it."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # the cancellation hides it: nobody else will ask
        raise cancelled
    return task.result()
