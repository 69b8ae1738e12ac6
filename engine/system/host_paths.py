"""Threads for calls on paths that a client names: the source of a bind, a volume of another host, a
file in a container.

Such a call can wait for ever: the server of an NFS or FUSE file system that is mounted there may
not answer. It holds a thread, which no other work may need. Therefore these threads are of their
own, start when they are needed, and are bounded: once so many calls hang, the next one is refused.

Threads: `HostPaths.run` is called by the event loop. The interpreter's end waits for none of its
         own.
"""

from __future__ import annotations

import _thread
import asyncio
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from engine.errors import ServerError
from engine.system.threads import perform

T = TypeVar("T")

COUNT = 64
"""Calls at a time."""
IDLE = 10.0
"""Seconds after which a thread without work ends."""


class HostPaths:
    """At most `count` calls at a time, each in a thread of its own."""

    def __init__(self, count: int = COUNT) -> None:
        self._count = count
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._begun: dict[Future[Any], float] = {}
        """Calls that have not ended, with the monotonic time of their begin. Each has a thread, so
        that none waits for another."""
        self._threads = 0
        _pools.add(self)

    def run(self, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """The result of `function`. Raises ServerError if no thread is free."""
        with self._lock:
            if len(self._begun) >= self._count:
                raise ServerError(
                    f"{self._count} calls wait for file systems of this host, and no more can be begun: "
                    "one that is mounted here does not answer"
                )
            if len(self._begun) >= self._threads:
                # Not threading.Thread: its start waits for the thread, for ever where memory is
                # short.
                try:
                    _thread.start_new_thread(self._serve, ())
                except RuntimeError as error:
                    raise ServerError("the host allows no more threads") from error
                self._threads += 1
            future: Future[T] = Future()
            self._begun[future] = time.monotonic()
        future.add_done_callback(self._ended)
        self._work.put((future, function, arguments))
        return asyncio.wrap_future(future)

    def _ended(self, future: Future[Any]) -> None:
        with self._lock:
            del self._begun[future]

    def _serve(self) -> None:
        while True:
            try:
                work = self._work.get(timeout=IDLE)
            except queue.Empty:
                with self._lock:
                    if self._threads > len(self._begun):
                        self._threads -= 1
                        return
            else:
                perform(*work)
                del work


_pools: weakref.WeakSet[HostPaths] = weakref.WeakSet()
_host_paths = HostPaths()
run = _host_paths.run


def hanging(seconds: float) -> int:
    """The number of calls, by any `HostPaths`, that began so long ago and have not ended."""
    before = time.monotonic() - seconds
    return sum(begun < before for pool in _pools for begun in tuple(pool._begun.values()))
