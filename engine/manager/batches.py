"""Work that is collected from many callers and done together.

The first item is worked on after a moment, so that one status of an idle swarm is stored at once.
While items keep coming, they are worked on every 100 ms, or as soon as there are 1,000, or one that
is urgent.

Threads: the event loop's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from engine.swarm_session.clock import Clock
from engine.system.reconcile import either
from engine.system.tasks import spawn

T = TypeVar("T")
R = TypeVar("R")

FIRST = 0.005
"""Seconds from the first item of a quiet time to its batch."""
PAUSE = 0.1
"""Seconds from one batch to the next."""
FULL = 1000
"""Items that are not waited with."""


class Batches(Generic[T, R]):
    """`work(items)` returns a result for each item, or raises for all of them."""

    def __init__(self, clock: Clock, work: Callable[[list[T]], Awaitable[Sequence[R]]], what: str) -> None:
        self._clock = clock
        self._work = work
        self._what = what
        self._waiting: list[tuple[Sequence[T], asyncio.Future[Sequence[R]]]] = []
        self._count = 0
        self._full = asyncio.Event()
        """There is no reason to wait."""
        self._urgent = False
        self._worker: asyncio.Task[None] | None = None
        self._last = -PAUSE

    async def add(self, items: Sequence[T], *, urgent: bool = False) -> Sequence[R]:
        """The results of these items, when their batch is done. Raises what `work` raised."""
        if not items:
            return ()
        future: asyncio.Future[Sequence[R]] = asyncio.get_running_loop().create_future()
        self._waiting.append((items, future))
        self._count += len(items)
        self._urgent = self._urgent or urgent
        if self._count >= FULL or urgent:
            self._full.set()
        if self._worker is None:
            self._worker = spawn(self._run(), self._what)
        return await future

    async def _run(self) -> None:
        try:
            while self._waiting:
                pause = max(FIRST, self._last + PAUSE - self._clock.monotonic())
                if not self._full.is_set():
                    await either(self._full, pause, self._clock.sleep)
                if self._urgent and self._count < FULL:
                    await self._clock.sleep(FIRST)  # others may come with it
                self._full.clear()
                self._urgent = False
                self._last = self._clock.monotonic()
                batch, self._waiting, self._count = self._waiting, [], 0
                await self._done(batch)
        finally:
            self._worker = None

    async def _done(self, batch: list[tuple[Sequence[T], asyncio.Future[Sequence[R]]]]) -> None:
        try:
            results = await self._work([item for items, _ in batch for item in items])
        except BaseException as error:
            for _, future in batch:
                if not future.done():
                    if isinstance(error, Exception):
                        future.set_exception(error)
                    else:
                        future.cancel()
            if not isinstance(error, Exception):
                raise
            return
        start = 0
        for items, future in batch:
            if not future.done():
                future.set_result(results[start : start + len(items)])
            start += len(items)

    async def close(self) -> None:
        """Stop. Callers that wait are cancelled."""
        for _, future in self._waiting:
            future.cancel()
        self._waiting.clear()
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait([self._worker])
