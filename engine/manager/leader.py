"""Which manager leads. To be replaced within the hour by the rule of raft's own leader."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from engine.manager.clock import Clock
from engine.manager.kv import Etcd
from engine.manager.records import LEADER, MANAGERS, Leader, ManagerPresence
from engine.manager.store import Compare, Put, Store


class Leadership:
    def __init__(self, store: Store, etcd: Etcd, clock: Clock, *, node: str, address: str) -> None:
        self._store, self._etcd, self._node, self._address = store, etcd, node, address

    async def run(self, lead: Callable[[Compare], Awaitable[None]]) -> None:
        status = await self._etcd.status()
        presence = ManagerPresence(address=self._address, member=status.member)
        await self._store.commit([Put(MANAGERS, self._node, presence)])
        await self._store.commit([Put(LEADER, "", Leader(self._node, status.term))])
        entry = self._store.get(LEADER)
        assert entry is not None
        await lead(Compare(LEADER, "", entry.created, by_creation=True))
