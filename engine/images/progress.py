"""Progress of a load, pull or push: runs the work on its layers, and yields its reports as one
stream in the form that Docker's clients draw.

Owns: the tasks of one operation, from `Reports.run` until its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from engine.system.threads import cancelled, uninterrupted
from engine.wire.images import Progress, ProgressDetail


class Reports:
    """The progress of one operation."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Progress | None] = asyncio.Queue()

    def say(self, layer: str, status: str, current: int = 0, total: int = 0) -> None:
        """Report on a layer, by its digest or diff_id.

        With a `total` clients draw a progress bar.
        """
        current = min(current, total)
        detail = ProgressDetail(current, total)
        drawn = bar(current, total) if total else ""
        self._queue.put_nowait(Progress(status=status, progress_detail=detail, progress=drawn, id=layer[7:19]))

    async def run(self, begin: Callable[[asyncio.TaskGroup], None]) -> AsyncGenerator[Progress, None]:
        """Yield reports while the tasks that `begin` creates in a group are running.

        The first failure cancels the others and is raised. In any case no task is running when this
        ends.
        """
        # In a task of its own, because a group cancels the task that entered it, which must not be
        # the consumer's.
        working = asyncio.create_task(self._work(begin))
        try:
            while (progress := await self._queue.get()) is not None:
                yield progress
            await uninterrupted(working)
        finally:
            await cancelled(working)

    async def _work(self, begin: Callable[[asyncio.TaskGroup], None]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                begin(group)
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            self._queue.put_nowait(None)


def bar(current: int, total: int) -> str:
    """The line that a client draws, as Docker's jsonmessage makes it for a wide terminal."""
    done = min(50, current * 50 // total) if total else 50
    return f"[{'=' * done}>{' ' * (50 - done)}] {_human(current):>8}/{_human(total)}"


def amount(current: int, total: int) -> str:
    """As `bar`; the number of bytes alone if the total is not known (0)."""
    return bar(current, total) if total else f"{_human(current):>8}"


def retrying_text(seconds: float) -> str:
    """The status of a layer whose transfer failed and will be retried, in Docker's words."""
    whole = max(1, round(seconds))
    return f"Retrying in {whole} second{'s' if whole != 1 else ''}"


def _human(size: int) -> str:
    """Decimal units with four significant digits (docker/go-units, HumanSize)."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if value < 1000 or unit == "PB":
            return f"{value:.4g}{unit}"
        value /= 1000
    raise AssertionError(size)


__all__ = ["Reports", "amount", "bar", "retrying_text"]
