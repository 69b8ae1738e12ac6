"""No write of a manager is carried out after the manager has given it up.

etcd may carry out a request long after its answer was given up: a member that was stopped while it
led raft has it in a queue. The request's comparisons may hold again by then. A service that was
created by the second attempt, and removed since, would come back with the first one.

So every transaction of a manager also compares the revision of a key of its own, `/w/<node>`. When
an answer is missing, the manager writes that key before its next transaction: a new turn begins.
Earlier attempts have been carried out before the turn's revision, which the watch shows, or never
are. A process that starts begins a turn too, because of the writes of the process before.

The key is written by comparison with its own revision, so the write of a turn needs no such help:
revisions never return.

Threads: the event loop's.
"""

from __future__ import annotations

import asyncio
import contextlib

from engine.manager.kv import Etcd, Guard, InDoubt, NoSpace, PutKey
from engine.manager.records import TURNS, Turn, encode
from engine.swarm_session.clock import Clock

RETRY = 0.1
"""Seconds between attempts."""
ANSWER = 1.0
"""Seconds of one attempt to read the key."""


class Turns:
    """Those of one manager."""

    def __init__(self, etcd: Etcd, clock: Clock, node: str) -> None:
        self._etcd = etcd
        self._clock = clock
        self._key = TURNS.path(node)
        self._revision = 0
        """Of the key, as etcd counts."""
        self._changing = asyncio.Lock()
        self.over = True
        """A write is in doubt, or none was made yet: a new turn must begin before the next one."""

    @property
    def guard(self) -> Guard:
        """That of all transactions of this turn."""
        return Guard(self._key, self._revision)

    async def begin(self) -> int:
        """Begin a turn, if the last one is over. Returns its revision, as etcd counts. Tries until
        etcd answers.

        Raises EtcdError when it refuses to write. With a full database the last turn, also that of
        the process before, goes on: what makes room must still be removed.
        """
        async with self._changing:
            while self.over:
                try:
                    await self._begin()
                except InDoubt:
                    pass
                except NoSpace:
                    break
                if self.over:
                    await self._clock.sleep(RETRY)
            return self._revision

    async def _begin(self) -> None:
        self._revision = before = await self._read()
        # Writes that are in doubt from here on need another turn.
        self.over = False
        try:
            with contextlib.suppress(InDoubt):
                await self._etcd.commit([Guard(self._key, before)], [PutKey(self._key, encode(Turn()))])
            after = await self._read()
        except BaseException:
            self.over = True
            raise
        self._revision = after
        if after == before:
            self.over = True

    async def _read(self) -> int:
        found = (await self._etcd.range(self._key, timeout=ANSWER)).items
        return found[0].revision if found else 0
