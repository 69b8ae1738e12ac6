"""Waiting for a container: calls wait for its end, other containers for its start.

Both are waited for without any lock, and both may be cancelled. Runs on the event loop alone.
Not here: whether it will end or start (`container.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator


class Ends:
    """Calls that wait for one container's exit code."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[int]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    @contextlib.contextmanager
    def next(self) -> Iterator[asyncio.Future[int]]:
        """The exit code, once the container has ended."""
        end: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append(end)
        try:
            yield end
        finally:
            if end in self._waiting:
                self._waiting.remove(end)

    def answer(self, exit_code: int) -> None:
        """Resolve all of them."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.done():
                each.set_result(exit_code)


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
