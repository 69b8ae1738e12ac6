"""Loop of the leader: the members of etcd follow the roles that are wished.

A manager whose record says worker, or whose record is gone, is removed from etcd when the others
keep a quorum without it; until then it is tried again and again. Its process ends then, and its
node asks for a worker's certificate. A learner whose node has not been heard of for a minute is
removed, as etcd has one learner at a time. Promotion is the node's own doing (`joining.py`).

The loop also drops the claims that bar removed nodes, when their certificates have expired, and the
records of nodes that joined and were never seen: the joining engine was killed before it kept its
certificate.

A removal waits for other changes of members and for etcd, so it runs beside the loops: scheduling
does not wait for it. It needs no fence, as it has the lock of the members.

Owns:    the task that removes members.
Threads: the event loop's.
"""

from __future__ import annotations

import asyncio
import logging

from engine.errors import EngineError
from engine.manager import records
from engine.manager.ca import Authority
from engine.manager.kv import Member
from engine.manager.loops import Acting
from engine.manager.members import Members
from engine.manager.store import Change, Compare, Delete, Event, Fenced, Stale, Store
from engine.swarm_session.clock import SECOND, Clock
from engine.swarm_session.states import Role
from engine.system.tasks import spawn

PERIOD = 5.0
"""Seconds between looks at etcd's members, which no event reports."""
AGAIN = 1.0
"""Seconds after a removal that failed."""
BATCH = 500
UNSEEN = 3600 * SECOND
"""A node that has not connected for this long since it joined is removed."""
_BARS = records.barred_claim("")

_log = logging.getLogger(__name__)


class RoleLoop:
    name = "roles"

    def __init__(self, store: Store, clock: Clock, members: Members, authority: Authority) -> None:
        self._store = store
        self._clock = clock
        self._members = members
        self._authority = authority
        self._due = 0.0
        self.removing: asyncio.Task[None] | None = None
        """The last removal."""
        self._told: dict[str, str] = {}
        self._bars: set[str] = set()
        self._unseen: set[str] = set()

    def changed(self, event: Event) -> None:
        if event.kind is records.NODES:
            old, new = event.old, event.new
            if new is None or (old is not None and old.record.role is not new.record.role):
                self._due = 0.0
            if new is None or _seen(self._store.record(records.NODE_DATA, event.key)):
                self._unseen.discard(event.key)
            else:
                self._unseen.add(event.key)
        elif event.kind is records.NODE_DATA and event.new is not None and _seen(event.new.record):
            self._unseen.discard(event.key)
        elif event.kind is records.MANAGERS and (event.old is None or event.new is None):
            self._due = 0.0
        elif event.kind is records.CLAIMS and event.key.startswith(_BARS):
            (self._bars.discard if event.new is None else self._bars.add)(event.key)

    def take_over(self) -> None:
        self._due = 0.0
        self._told.clear()

    def due(self) -> float | None:
        return self._due

    async def step(self, acting: Acting) -> None:
        self._due = self._clock.monotonic() + AGAIN
        members = await self._members.all()
        unwanted = [member for member in members if self._unwanted(member)]
        if unwanted and (self.removing is None or self.removing.done()):
            self.removing = spawn(self._remove(unwanted), "manager: removal of members")
        await self._drop_bars(acting)
        await self._drop_unseen(acting)
        self._due = self._clock.monotonic() + (AGAIN if unwanted else PERIOD)

    def _unwanted(self, member: Member) -> bool:
        if member.learner and self._members.stuck(member):
            return True
        owner = self._members.owner(member)
        record = self._store.record(records.NODES, owner) if owner else None
        return bool(owner) and (record is None or record.role is Role.WORKER)

    async def _remove(self, unwanted: list[Member]) -> None:
        """Remove those without which the others keep a quorum."""
        for member in unwanted:
            if self._unwanted(member):
                await self._settle(member)

    async def _settle(self, member: Member) -> None:
        owner = self._members.owner(member)
        try:
            if owner:
                await self._members.remove(owner)
            else:
                await self._members.remove_unnamed(member.id)
        except EngineError as error:
            if self._told.get(owner) != error.message:
                self._told[owner] = error.message
                _log.warning("manager %s is not removed yet: %s", owner or f"{member.id:x}", error.message)
            return
        self._told.pop(owner, None)
        kind = "learner" if member.learner else "manager"
        _log.info("%s %s was removed from the members of etcd", kind, owner or f"{member.id:x}")

    async def _drop_bars(self, acting: Acting) -> None:
        now = self._clock.now()
        entries = [self._store.get(records.CLAIMS, key) for key in self._bars]
        ended = [entry for entry in entries if entry is not None and int(entry.record.holder or 0) < now]
        for begin in range(0, len(ended), BATCH):
            batch = ended[begin : begin + BATCH]
            changes: list[Change] = [Delete(records.CLAIMS, entry.key) for entry in batch]
            await acting.commit(changes, [Compare(records.CLAIMS, entry.key, entry.revision) for entry in batch])

    async def _drop_unseen(self, acting: Acting) -> None:
        now = self._clock.now()
        for node in list(self._unseen):
            entry = self._store.get(records.NODES, node)
            if entry is None or now - entry.record.created < UNSEEN:
                continue
            if self._store.record(records.MANAGERS, node) is not None:
                continue
            data = self._store.get(records.NODE_DATA, node)
            try:
                await acting.commit(
                    [Delete(records.NODES, node), Delete(records.NODE_DATA, node), self._authority.bar(node)],
                    [
                        Compare(records.NODES, node, entry.revision),
                        Compare(records.NODE_DATA, node, 0 if data is None else data.revision),
                    ],
                )
            except Fenced:
                raise
            except Stale:  # it has just connected
                continue
            _log.warning("node %s joined an hour ago and has never connected: it was removed", node)


def _seen(data: records.NodeData | None) -> bool:
    """True if the node has connected. `liveness.py` writes that a node is down also of one that has
    not.
    """
    return data is not None and data.description is not None
