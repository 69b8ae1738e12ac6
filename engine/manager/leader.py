"""Which manager leads, and which managers are there.

The manager whose own etcd member is raft's leader takes the key `/leader`: raft elects within a
second or two, and no election of our own is slower than that. The key's ModRevision fences every
write of the leader, so one that was stopped for a while writes nothing after another has taken the
key. A lease ends the leadership of a process that hangs while its etcd goes on; another manager
takes the key then.

Each manager also keeps its presence, `/m/<node>`, under the same lease.

Owns:    the lease, the presence, and `/leader` while this manager has it; the task that leads.
Threads: the event loop's.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Awaitable, Callable

from engine.errors import EngineError
from engine.manager.kv import Etcd, EtcdError, LeaseGone
from engine.manager.records import LEADER, MANAGERS, Leader, ManagerPresence
from engine.manager.store import Compare, Event, Fenced, Put, Stale, Store
from engine.swarm_session.clock import Clock
from engine.system.reconcile import either
from engine.system.tasks import spawn

LEASE = 5
"""Seconds after which a manager that hangs is absent, and leads no more."""
RENEWAL = LEASE / 3
POLL = 0.25
"""Seconds between looks at raft's leader, which is no event of the store."""
TURN = 0.25
"""Seconds that each manager waits longer than the one before it when the key is gone."""
RETRY = 0.3

_log = logging.getLogger(__name__)


class Leadership:
    """`address`: host:port at which others reach this manager."""

    def __init__(self, store: Store, etcd: Etcd, clock: Clock, *, node: str, address: str) -> None:
        self._store, self._etcd, self._clock = store, etcd, clock
        self._node, self._address = node, address
        self._lease = 0
        self._member = 0
        self._renewed = 0.0
        self._revision = 0
        """Of `/leader`, when this process wrote it last."""
        self._gone_since: float | None = None
        self._leading: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()

    @property
    def leads(self) -> bool:
        """This manager leads, as far as it knows: its writes may be fenced off nevertheless."""
        return self._leading is not None

    async def run(self, lead: Callable[[Compare], Awaitable[None]]) -> None:
        """Be present, and call `lead(fence)` whenever this manager leads, until cancelled. `lead`
        is cancelled when another one does. At the end, presence and leadership are given up at
        once.
        """
        unsubscribe = self._store.subscribe(self._changed)
        present = spawn(self._keep_presence(), "manager: presence", fatal=True)
        try:
            while True:
                self._wake.clear()
                try:
                    await self._decide(lead)
                except EngineError as error:
                    _log.debug("leadership: %s", error.message)
                await either(self._wake, POLL, self._clock.sleep)
        finally:
            unsubscribe()
            present.cancel()
            await self._resign()

    def _changed(self, event: Event) -> None:
        if event.kind is LEADER or event.kind is MANAGERS:
            self._wake.set()

    # --- presence ---------------------------------------------------------------------------------

    async def _keep_presence(self) -> None:
        while True:
            try:
                if not self._lease:
                    await self._appear()
                else:
                    await self._etcd.keep_alive(self._lease)
                    self._renewed = self._clock.monotonic()
                    if self._absent():
                        await self._appear_again()
                pause = RENEWAL
            except LeaseGone:
                _log.warning("the lease of this manager has run out: it was stopped, or without quorum")
                self._lease = 0
                pause = 0.0
            except EngineError as error:
                _log.debug("presence: %s", error.message)
                pause = RETRY
            await self._clock.sleep(pause)

    async def _appear(self) -> None:
        began = self._clock.monotonic()
        self._member = (await self._etcd.status()).member
        lease = await self._etcd.grant(LEASE)
        self._lease, self._renewed = lease, began
        await self._appear_again()
        self._wake.set()

    def _absent(self) -> bool:
        """The record of the presence is not this process's: removed, or written by one before."""
        entry = self._store.get(MANAGERS, self._node)
        return entry is None or entry.lease != self._lease

    async def _appear_again(self) -> None:
        presence = ManagerPresence(address=self._address, member=self._member)
        await self._store.commit([Put(MANAGERS, self._node, presence, self._lease)])

    def _fresh(self) -> bool:
        """The lease cannot have run out yet."""
        return bool(self._lease) and self._clock.monotonic() - self._renewed < LEASE

    # --- leading ----------------------------------------------------------------------------------

    async def _decide(self, lead: Callable[[Compare], Awaitable[None]]) -> None:
        entry = self._store.get(LEADER)
        if entry is not None and entry.revision == self._revision:
            self._gone_since = None
            if not self._fresh():
                await self._cease("without quorum, or stopped, for as long as its lease lives")
            elif self._leading is None:
                self._begin(lead)
            return
        if self._leading is not None:
            await self._cease(f"manager {entry.record.node} leads now" if entry else "its lease has run out")
        if not self._fresh() or self._absent():
            return
        status = await self._etcd.status()
        own_leads = status.leader == status.member != 0
        if entry is None:
            now = self._clock.monotonic()
            if self._gone_since is None:
                self._gone_since = now
            if now - self._gone_since < (0 if own_leads else self._rank() * TURN):
                return
        else:
            self._gone_since = None
            earlier = entry.record.node == self._node  # a process of this node that has ended
            if not earlier and not (own_leads and status.term > entry.record.term):
                return
        await self._take(0 if entry is None else entry.revision, status.term)

    def _rank(self) -> int:
        """The order in which managers take a key that is gone, from 1. Any fixed order does; this
        one differs from swarm to swarm.
        """
        order = sorted(self._store.all(MANAGERS), key=lambda node: hashlib.sha256(node.encode()).digest())
        return 1 + order.index(self._node) if self._node in order else 1 + len(order)

    async def _take(self, revision: int, term: int) -> None:
        fence = Compare(LEADER, "", revision)
        try:
            self._revision = await self._store.commit([Put(LEADER, "", Leader(self._node, term), self._lease)], [fence])
        except Stale:
            return
        self._wake.set()

    def _begin(self, lead: Callable[[Compare], Awaitable[None]]) -> None:
        _log.info("this manager leads the swarm")
        fence = Compare(LEADER, "", self._revision)
        self._leading = spawn(self._lead(lead, fence), "manager: leader")

    async def _lead(self, lead: Callable[[Compare], Awaitable[None]], fence: Compare) -> None:
        try:
            while True:
                try:
                    await lead(fence)
                    _log.error("the leader's loops have ended")
                except Fenced:
                    return
                except Exception:
                    _log.exception("the leader's loops failed")
                await self._clock.sleep(1.0)
        finally:
            if self._leading is asyncio.current_task():
                self._leading = None

    async def _cease(self, why: str) -> None:
        task, self._leading = self._leading, None
        if task is not None:
            _log.info("this manager does not lead any more: %s", why)
            task.cancel()
            await asyncio.wait([task])

    async def _resign(self) -> None:
        await self._cease("it ends")
        lease, self._lease = self._lease, 0
        if lease:
            with contextlib.suppress(EtcdError):
                await self._etcd.revoke(lease)
