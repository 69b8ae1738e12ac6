"""Plain containers on attachable networks: their records, which are the agents' to make and remove.

An agent asks for an attachment (`Attach`). Its record is written under the session of its node and
with the network's existence compared; the leader then gives it an address, or says why there is
none. The record goes with `Detach`, with the next `Hello` that does not name it, and with its node
(`liveness.py`).

An agent that asks for an attachment that its container has already gets another one with the same
address. So a `Detach` of the first one that arrives late, after its agent has given up waiting for
an answer, does not remove what the container uses.

Owns:    `ATTACHMENTS` of nodes whose session is here.
Threads: the event loop's.
Raises:  NotFound, Forbidden, InvalidParameter, ServerError; Unavailable without an address in
         time.
Not here: addresses (`allocator.py`), what other nodes are sent (`views.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection

from msgspec.structs import replace

from engine.errors import EngineError, Forbidden, InvalidParameter, NotFound, Unavailable
from engine.manager import records
from engine.manager.networks import find_network
from engine.manager.records import AttachmentRecord, Claim, NetworkRecord, new_id, use_claim
from engine.manager.store import Change, Compare, Delete, Entry, Event, Put, Stale, Store
from engine.swarm_session.clock import Clock
from engine.swarm_session.frames import refusal
from engine.swarm_session.messages import Attach, Refused
from engine.system.reconcile import either

ANSWER = 15.0
"""Seconds in which the leader gives an address."""
LOOK = 1.0
"""Seconds after which the record is looked at without an event."""
ATTEMPTS = 5
LONGEST_TEXT = 256
MOST_ALIASES = 256

_log = logging.getLogger(__name__)


class Attachments:
    """`changed` must be called with each event of `ATTACHMENTS`."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._waiting: dict[str, asyncio.Event] = {}

    def changed(self, event: Event) -> None:
        waiting = self._waiting.get(event.key)
        if waiting is not None:
            waiting.set()

    async def add(self, node: str, session: str, attach: Attach) -> tuple[str, str, str]:
        """Make the attachment of a container. It replaces the one that the container has on the
        network, and keeps its address unless another one is wanted. Returns its id, the network's
        and the address.
        """
        _check(attach)
        await self._store.current()
        entry = find_network(self._store, attach.network)
        network, record = entry.key, entry.record
        if not record.attachable:
            raise Forbidden(f"network {record.name} not manually attachable")
        made = AttachmentRecord(
            network=network,
            node=node,
            container=attach.container,
            created=self._clock.now(),
            name=attach.name,
            aliases=attach.aliases,
            wanted=attach.address,
        )
        key = await self._write(made, session)
        try:
            address = await self._address(key, record)
        except BaseException as error:
            if isinstance(error, EngineError):
                with contextlib.suppress(EngineError):
                    await self.remove(node, key)
            raise  # after a lost connection the next `Hello` removes the record
        return key, network, address

    async def _write(self, made: AttachmentRecord, session: str) -> str:
        """Write the record in place of the container's earlier one. Returns its key."""
        for _ in range(ATTEMPTS):
            node = self._store.get(records.NODE_DATA, made.node)
            if node is None or node.record.session != session:
                raise Unavailable("this session has been replaced by another one")
            network = self._store.get(records.NETWORKS, made.network)
            if network is None:
                raise NotFound(f"network {made.network} not found")
            changes: list[Change] = []
            compares = [
                Compare(records.NODE_DATA, made.node, node.revision),
                Compare(records.NETWORKS, made.network, network.created, by_creation=True),
            ]
            address = ""
            for key, entry in self._of(made.node):
                old = entry.record
                if (old.container, old.network) == (made.container, made.network):
                    changes.append(Delete(records.ATTACHMENTS, key))
                    compares.append(Compare(records.ATTACHMENTS, key, entry.revision))
                    if made.wanted in {"", old.address}:
                        address = old.address
            key = new_id()
            changes.append(Put(records.ATTACHMENTS, key, replace(made, address=address)))
            changes.append(Put(records.CLAIMS, use_claim(made.network), Claim(made.node)))
            try:
                await self._store.commit(changes, compares)
            except Stale:
                continue
            return key
        raise Unavailable(f"the record of node {made.node} changed at each attempt")

    async def _address(self, key: str, network: NetworkRecord) -> str:
        """The address that the leader gives. Raises the kind that it refuses with."""
        waiting = self._waiting.setdefault(key, asyncio.Event())
        ends = self._clock.monotonic() + ANSWER
        try:
            while True:
                waiting.clear()
                record = self._store.record(records.ATTACHMENTS, key)
                if record is None:
                    raise Unavailable(f"network {network.name}: the attachment was removed")
                if record.address:
                    return record.address
                if record.error:
                    raise refusal(Refused(kind=record.kind, message=record.error))
                left = ends - self._clock.monotonic()
                if left <= 0:
                    raise Unavailable(
                        f"attaching to network {network.name} failed: no address was given within {ANSWER:.0f} s"
                    )
                await either(waiting, min(left, LOOK), self._clock.sleep)
        finally:
            if self._waiting.get(key) is waiting:
                del self._waiting[key]

    async def remove(self, node: str, key: str) -> None:
        """Remove an attachment of this node, if there is such a one."""
        for _ in range(ATTEMPTS):
            entry = self._store.get(records.ATTACHMENTS, key)
            if entry is None or entry.record.node != node:
                return
            try:
                await self._store.commit(
                    [Delete(records.ATTACHMENTS, key)], [Compare(records.ATTACHMENTS, key, entry.revision)]
                )
            except Stale:
                continue
            return
        raise Unavailable(f"the attachment {key} changed at each attempt")

    async def keep(self, node: str, attachments: Collection[str]) -> tuple[str, ...]:
        """Remove those of this node that its containers do not use any more. Returns those that
        they use and that are not there: the node was away for long, or a backup was restored.
        """
        present = dict(self._of(node))
        for key in present:
            if key not in attachments:
                _log.info("attachment %s of node %s is not used any more", key, node)
                await self.remove(node, key)
        return tuple(each for each in attachments if each not in present)

    def _of(self, node: str) -> list[tuple[str, Entry[AttachmentRecord]]]:
        return [
            (key, entry) for key, entry in self._store.all(records.ATTACHMENTS).items() if entry.record.node == node
        ]


def _check(attach: Attach) -> None:
    """Raises InvalidParameter for a record that etcd would refuse."""
    for name, value in (
        ("network", attach.network),
        ("container", attach.container),
        ("name", attach.name),
        ("address", attach.address),
        *(("aliases", alias) for alias in attach.aliases),
    ):
        if len(value) > LONGEST_TEXT:
            raise InvalidParameter(f"{name} has {len(value)} characters, at most {LONGEST_TEXT} are allowed")
    if not attach.network or not attach.container:
        raise InvalidParameter("an attachment needs a network and a container")
    if len(attach.aliases) > MOST_ALIASES:
        raise InvalidParameter(f"{len(attach.aliases)} aliases, at most {MOST_ALIASES} are allowed")
