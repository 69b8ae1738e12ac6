"""Threads for long work: they take what the processor has left in every slice, and do not push the loop's thread aside when they wake (sched(7))."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor


def batch_threads(count: int, name: str) -> ThreadPoolExecutor:
    """At most `count` threads called `name`, of the policy SCHED_BATCH."""
    return ThreadPoolExecutor(count, name, _become_batch)


def _become_batch() -> None:
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # 0: the calling thread alone
