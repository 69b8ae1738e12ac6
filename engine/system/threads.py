"""Threads for long work: they take what the processor has left in every slice, and do not push the loop's thread aside when they wake (sched(7))."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def batch_threads(count: int, name: str) -> ThreadPoolExecutor:
    """At most `count` threads called `name`, of the policy SCHED_BATCH."""
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
