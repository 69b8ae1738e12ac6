"""The common part of the senders over HTTP: several requests at a time, each a task of its own.

A failure of one request ends the connection, after the others have had a moment to end: what they
deliver need not be sent again.

Owns:    the tasks.
Threads: the event loop's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from engine.logs.deliveries import Delivery
from engine.shipper.destination import Destination, Mark, Owner
from engine.shipper.feed import Feed

GRACE = 5.0
"""Seconds that requests on the way may take when another has failed, or at the end."""


class RequestDestination(Destination):
    """A sender over HTTP."""

    def __init__(self, owner: Owner, document: Delivery) -> None:
        super().__init__(owner, document)
        self._tasks: set[asyncio.Task[None]] = set()
        self._beside: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    @property
    def requests(self) -> int:
        """Requests on the way."""
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, None], *, beside: bool = False) -> None:
        """Run a request. Its failure is raised by `check`. `beside`: it is none of `requests`, and
        lasts as long as the connection."""
        task = asyncio.get_running_loop().create_task(work)
        (self._beside if beside else self._tasks).add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._beside.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and self._failure is None:
            self._failure = error
        self.interrupt()

    async def check(self) -> None:
        """Raise the failure of a request."""
        if self._failure is not None:
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=GRACE)
            raise self._failure

    def on_the_way(self, feed: Feed) -> Mark:
        """What was read of the feed so far is on the way. `settled` takes the mark when the target
        has it."""
        self.sent(0, feed)
        return self._marks.pop()

    async def abandon_requests(self) -> None:
        """Cancel what is on the way."""
        tasks = [*self._tasks, *self._beside]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._failure = None

    async def finish(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=GRACE)
