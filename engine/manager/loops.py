"""The loops of the leader: what each of them provides, and the task that runs them.

Every manager passes each change of the store to each loop, so that the indexes of the loops are up
to date when leadership moves. Only the leader calls `take_over`, `due` and `step`.

Threads: the event loop's. A step works in slices: it gives way (`asyncio.sleep(0)`) at least every
5 ms, so that heartbeats and requests are served in between.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from engine.errors import EngineError
from engine.manager.store import Change, Compare, Event, Fenced, Store
from engine.swarm_session.clock import Clock
from engine.system.reconcile import either

PAUSE = 0.25
"""Seconds after a step that failed."""

_log = logging.getLogger(__name__)


class Acting:
    """What a loop may do while this manager leads: read the store, and write under the fence."""

    def __init__(self, store: Store, clock: Clock, fence: Compare) -> None:
        self.store = store
        self.clock = clock
        self._fence = fence

    async def commit(self, changes: Sequence[Change], compares: Sequence[Compare] = ()) -> int:
        """Write all of `changes` in one transaction, in which nothing else has changed `compares`
        and this manager still leads. Returns the revision; the cache has it then.

        Raises `Stale` when a comparison fails, `Fenced` when this manager does not lead any more,
        ServerError without quorum.
        """
        return await self.store.commit(changes, [self._fence, *compares])

    async def commit_many(self, groups: Sequence[tuple[Sequence[Change], Sequence[Compare]]]) -> list[bool]:
        """Write many independent groups of changes, several in one transaction and several of these
        at once. Returns for each group whether it was written (a comparison may have failed).

        Raises `Fenced` when this manager does not lead any more, ServerError without quorum.
        """
        return await self.store.commit_many(groups, [self._fence])


class Loop(Protocol):
    """One loop. Constructed with the store, the clock and whatever else it reads."""

    name: str

    def changed(self, event: Event) -> None:
        """One record has changed; the store's cache has it already. Called on every manager, with
        every record at first (`Store.load`). Must be quick.
        """

    def take_over(self) -> None:
        """This manager leads now. What another leader left half done must be taken up: everything
        may be dirty.
        """

    def due(self) -> float | None:
        """When `step` should run, in `Clock.monotonic` seconds: 0 for now, None for not at all."""

    async def step(self, acting: Acting) -> None:
        """Do all that is due. What a failed write leaves undone must be dirty again."""


class Loops:
    """Runs the loops while this manager leads."""

    def __init__(self, loops: Sequence[Loop], store: Store, clock: Clock) -> None:
        self._loops = loops
        self._clock = clock
        self._store = store
        self._wake = asyncio.Event()
        store.subscribe(self.changed)

    def changed(self, event: Event) -> None:
        for loop in self._loops:
            try:
                loop.changed(event)
            except Exception:  # the indexes of the other loops must not miss it
                _log.exception("%s failed at %s", loop.name, event.kind.path(event.key))
        self._wake.set()

    async def lead(self, fence: Compare) -> None:
        """Run the loops until cancelled, or until the fence has fallen.

        Raises `Fenced` then.
        """
        acting = Acting(self._store, self._clock, fence)
        await self._settle()
        for loop in self._loops:
            loop.take_over()
        while True:
            self._wake.clear()
            for loop in self._loops:
                due = loop.due()
                if due is not None and due <= self._clock.monotonic():
                    await self._step(loop, acting)
            times = [due for loop in self._loops if (due := loop.due()) is not None]
            if not times:
                await self._wake.wait()
                continue
            pause = min(times) - self._clock.monotonic()
            if pause > 0 and not self._wake.is_set():
                await either(self._wake, pause, self._clock.sleep)
            else:
                await asyncio.sleep(0)

    async def _step(self, loop: Loop, acting: Acting) -> None:
        try:
            await loop.step(acting)
        except Fenced:
            raise
        except EngineError as error:
            _log.warning("%s: %s", loop.name, error.message)
        except Exception:
            _log.exception("%s failed", loop.name)
        else:
            return
        await self._clock.sleep(PAUSE)
        await self._settle()

    async def _settle(self) -> None:
        """Wait until the cache has every earlier write. A write that was given up or cancelled may
        have been carried out nevertheless: a loop that does not see it writes its tasks again.
        """
        while reason := await self._store.current():
            _log.info("the leader's loops wait: %s", reason)
            await self._clock.sleep(PAUSE)
