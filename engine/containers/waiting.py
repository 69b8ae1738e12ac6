"""Waiting for a container: calls wait for its end or its removal, other containers for its start.

All wait without any lock, and may be cancelled. Runs on the event loop alone.
Not here: whether it will end or start (`container.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple


class Condition(StrEnum):
    """Until when a call waits (Docker Engine API, ContainerWait)."""

    NOT_RUNNING = "not-running"
    NEXT_EXIT = "next-exit"
    REMOVED = "removed"


class Ended(NamedTuple):
    """The outcome of a wait. `error`: why the container could not be removed; empty otherwise."""

    exit_code: int
    error: str = ""


class Ends:
    """Calls that wait for one container's end, or for its removal."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[Ended], None] = {}

    def __len__(self) -> int:
        return sum(not end.done() for end in self._waiting)

    def next(self) -> asyncio.Future[Ended]:
        """The next end. A caller that no longer waits cancels it."""
        end: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._waiting[end] = None
        end.add_done_callback(self._left)
        return end

    def _left(self, end: asyncio.Future[Ended]) -> None:
        self._waiting.pop(end, None)

    def answer(self, ended: Ended) -> None:
        """Resolve all of them."""
        waiting, self._waiting = self._waiting, {}
        for each in waiting:
            if not each.done():
                each.set_result(ended)


class Starts:
    """One container's starts that are in progress or certain to come: by users, by restarts, at
    boot. Containers that depend on it wait for them.
    """

    __slots__ = ("_awaited", "_count", "_over")

    def __init__(self) -> None:
        self._count = 0
        self._over: asyncio.Event | None = None
        """Set when there are none left, for containers that wait."""
        self._awaited: Starts | None = None
        """The container whose start its own start waits for."""

    def __len__(self) -> int:
        return self._count

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """A start begins, or is certain to come."""
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            if not self._count and self._over is not None:
                self._over.set()
                self._over = None

    async def wait_for(self, other: Starts, seconds: float) -> None:
        """Wait for the other container's starts, at most so long.

        Of containers that depend on each other, one does not wait.
        """
        if not other._count or other._waits_for(self):
            return
        if other._over is None:
            other._over = asyncio.Event()
        self._awaited = other
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(other._over.wait(), seconds)
        finally:
            self._awaited = None

    def _waits_for(self, other: Starts) -> bool:
        """Returns True if its start waits for that of `other`, directly or through others."""
        each: Starts | None = self
        while each is not None:
            if each is other:
                return True
            each = each._awaited
        return False
