"""The end of a CA rotation, a loop of the leader: when each node has a certificate of the new root,
and each manager's etcd trusts it, all other roots are dropped. So they are after the way back to
the old root, when each node has a certificate of that one again. The rules are in `roots.py`.

The tokens change with the root that they name. A node that is down holds the rotation up, as it
could not come back later: the log names it, and the operator removes it or waits.

Threads: the event loop's.
"""

from __future__ import annotations

import logging

import msgspec

from engine.manager import records, roots, tokens
from engine.manager.certificates import digest
from engine.manager.loops import Acting
from engine.manager.records import CAKey, Cluster
from engine.manager.store import Compare, Delete, Event, Put, Store
from engine.swarm_session.clock import Clock
from engine.swarm_session.states import Role

PERIOD = 1.0
"""Seconds between two looks at the nodes while they renew."""
TOLD = 600.0
"""Seconds between two lines about nodes that hold a rotation up."""

_TRUST = "trust/"

_log = logging.getLogger(__name__)


def trust_claim(node: str) -> str:
    """The key of the claim that holds the digest of the roots which a manager's etcd trusts."""
    return f"{_TRUST}{node}"


class RotationLoop:
    name = "rotation"

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._due: float | None = None
        self._told = -TOLD

    def changed(self, event: Event) -> None:
        if event.kind is records.CLUSTER:
            self._due = 0.0 if event.new is not None and roots.changing(event.new.record) else None

    def take_over(self) -> None:
        cluster = self._store.record(records.CLUSTER)
        self._due = 0.0 if cluster is not None and roots.changing(cluster) else None
        self._told = self._clock.monotonic() - TOLD + 60

    def due(self) -> float | None:
        return self._due

    async def step(self, acting: Acting) -> None:
        entry, key = self._store.get(records.CLUSTER), self._store.get(records.CA_KEY)
        if entry is None or not roots.changing(entry.record):
            self._due = None
            return
        self._due = self._clock.monotonic() + PERIOD
        cluster = entry.record
        if waits := self.waits_for(cluster):
            if self._clock.monotonic() - self._told >= TOLD:
                self._told = self._clock.monotonic()
                more = f" and {len(waits) - 5} more" if len(waits) > 5 else ""
                _log.warning("the rotation of the CA waits for nodes %s%s", ", ".join(waits[:5]), more)
            return
        done = msgspec.structs.replace(roots.finished(cluster), updated=self._clock.now())
        ca_key = key.record if key is not None else CAKey("")
        if cluster.rotation:
            ca_key = CAKey(ca_key.next)
            done = msgspec.structs.replace(
                done,
                worker_token=tokens.token(done.root, tokens.new_secret()),
                manager_token=tokens.token(done.root, tokens.new_secret()),
            )
        await acting.commit(
            [
                Put(records.CLUSTER, "", done),
                Put(records.CA_KEY, "", ca_key),
                *(Delete(records.CLAIMS, each) for each in self._store.all(records.CLAIMS) if each.startswith(_TRUST)),
            ],
            [
                Compare(records.CLUSTER, "", entry.revision),
                Compare(records.CA_KEY, "", key.revision if key is not None else 0),
            ],
        )
        self._due = None
        _log.info("the rotation of the CA is complete%s", ": the join tokens have changed" if cluster.rotation else "")

    def waits_for(self, cluster: Cluster) -> list[str]:
        """The nodes that may have a certificate of another root than the new one, and the managers
        whose etcd does not trust that one yet.
        """
        trusted = digest(roots.trusted(cluster))
        found = []
        for node, entry in self._store.all(records.NODES).items():
            data = self._store.record(records.NODE_DATA, node)
            if not roots.settled(cluster, data):
                found.append(node)
            elif cluster.rotation and entry.record.role is Role.MANAGER:
                claim = self._store.record(records.CLAIMS, trust_claim(node))
                if claim is None or claim.holder != trusted:
                    found.append(node)
        return found
