"""Room in etcd's database: defragmentation before it is full, and recovery when it was.

A member whose database reaches its quota raises an alarm, and the whole cluster refuses writes
until it is disarmed. Old revisions are compacted then, each member returns the free pages
(defragmentation, in which it serves nothing), and disarms its own alarm. Raft's leader goes last.

Threads: the event loop's.
"""

from __future__ import annotations

import contextlib
import logging

from engine.manager.etcd import CHANGE
from engine.manager.kv import Compacted, Etcd, EtcdError, Status
from engine.swarm_session.clock import Clock

PERIOD = 30.0
HURRY = 2.0
"""Seconds between looks while an alarm is raised."""
LEADER_WAITS = 5.0
FULL = 0.9
"""Share of the quota in use, above which an alarm would come back at once: it stays raised."""
SPARSE, HIGH = 0.5, 0.6
"""A database above `HIGH` of its quota, of which less than `SPARSE` is in use, is defragmented."""

_log = logging.getLogger(__name__)


class Space:
    """The database of this manager's member. `quota`: bytes."""

    def __init__(self, etcd: Etcd, clock: Clock, *, quota: int) -> None:
        self._etcd, self._clock, self._quota = etcd, clock, quota
        self._told = False
        """That the database is full."""

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            try:
                pause = HURRY if await self.look() else PERIOD
            except EtcdError as error:
                _log.debug("space: %s", error.message)
                pause = HURRY
            except Exception:  # a full database would stop the swarm
                _log.exception("making room in etcd failed")
                pause = PERIOD
            await self._clock.sleep(pause)

    async def look(self) -> bool:
        """Make room if needed. Returns True while an alarm is raised."""
        alarms = [alarm for alarm in await self._etcd.alarms() if alarm.kind == "nospace"]
        status = await self._etcd.status()
        if not alarms:
            self._told = False
            if status.size > HIGH * self._quota and status.size_in_use < SPARSE * status.size:
                await self._defragment(status)
            return False
        own = [alarm for alarm in alarms if alarm.member == status.member]
        known = {member.id for member in await self._etcd.members()}
        gone = [alarm for alarm in alarms if alarm.member not in known]
        if not self._told:
            self._told = True
            _log.error("the swarm's database is full (%d bytes): making room", self._quota)
        if own:
            if status.leader == status.member:
                await self._clock.sleep(LEADER_WAITS)
            with contextlib.suppress(Compacted):  # by another manager
                await self._etcd.compact(status.revision)
            await self._defragment(status)
            status = await self._etcd.status()
            if status.size_in_use > FULL * self._quota:
                _log.error("the swarm's database stays full: %d bytes are in use", status.size_in_use)
                return True
        for alarm in own + gone:
            await self._etcd.disarm(alarm)
        return True

    async def _defragment(self, status: Status) -> None:
        _log.info("defragmenting the swarm's database: %d of %d bytes are in use", status.size_in_use, status.size)
        await self._etcd.defragment(timeout=max(60.0, status.size / (10 << 20), CHANGE))
