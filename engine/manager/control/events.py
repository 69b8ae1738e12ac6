"""Changes of the swarm as events of the API (1.33): services, nodes, networks, secrets,
configs.

Every manager shows all of them, as each of them follows the whole store. Attributes are Docker's:
the name, and what an update has changed, as `replicas.old` and `replicas.new`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from engine.manager.control.nodes import hostname
from engine.manager.records import CONFIGS, NETWORKS, NODE_DATA, NODES, SECRETS, SERVICE_STATUS, SERVICES, ServiceRecord
from engine.manager.store import Event, Store
from engine.swarm_session.clock import Clock
from engine.swarm_session.frames import Connection
from engine.swarm_session.messages import Change, Watch
from engine.swarm_session.states import NodeState

LIMIT = 10_000
"""Changes that may wait for a watcher that reads too slowly. More are dropped."""

_KINDS = {SERVICES: "service", NODES: "node", SECRETS: "secret", CONFIGS: "config", NETWORKS: "network"}


async def watch(store: Store, clock: Clock, connection: Connection, message: Watch) -> None:
    """Send each change until the watcher cancels, or its connection ends."""
    waiting: asyncio.Queue[Change] = asyncio.Queue(LIMIT)

    def changed(event: Event) -> None:
        change = change_of(store, event, clock.now())
        if change is not None and not waiting.full():
            waiting.put_nowait(change)

    unsubscribe = store.subscribe(changed)
    try:
        while True:
            change = await waiting.get()
            await connection.stream(_numbered(change, message.seq))
    finally:
        unsubscribe()


def _numbered(change: Change, seq: int) -> Change:
    return Change(
        seq=seq,
        kind=change.kind,
        action=change.action,
        id=change.id,
        attributes=change.attributes,
        time=change.time,
    )


def change_of(store: Store, event: Event, now: int) -> Change | None:
    """The event that clients see; None when nothing of theirs has changed."""
    if event.kind is NODE_DATA:
        return _node_data(store, event, now)
    if event.kind is SERVICE_STATUS:
        return _service_status(store, event, now)
    kind = _KINDS.get(event.kind)
    if kind is None:
        return None
    entry = event.new or event.old
    assert entry is not None
    action = "remove" if event.new is None else "create" if event.old is None else "update"
    attributes = dict(_names(store, kind, event))
    if action == "update":
        attributes.update(_differences(kind, event))
    return Change(kind=kind, action=action, id=event.key, attributes=attributes, time=now)


def _names(store: Store, kind: str, event: Event) -> Iterator[tuple[str, str]]:
    entry = event.new or event.old
    assert entry is not None
    if kind == "network":
        yield "name", entry.record.name
        return
    if kind != "node":
        yield "name", entry.record.spec.name
        return
    yield "name", entry.record.name or hostname(store, event.key)


def _differences(kind: str, event: Event) -> Iterator[tuple[str, str]]:
    assert event.old is not None and event.new is not None
    old, new = event.old.record, event.new.record
    if kind == "node":
        pairs = [
            ("availability", old.availability.label, new.availability.label),
            ("role", old.role.label, new.role.label),
        ]
    elif kind == "service":
        pairs = [("image", _image(old), _image(new)), ("replicas", _replicas(old), _replicas(new))]
    else:
        pairs = []
    for name, before, after in pairs:
        if before != after:
            yield f"{name}.old", before
            yield f"{name}.new", after


def _image(record: ServiceRecord) -> str:
    container = record.spec.task_template.container_spec
    return "" if container is None else container.image


def _replicas(record: ServiceRecord) -> str:
    replicated = record.spec.mode.replicated
    return "" if replicated is None else str(replicated.replicas)


def _node_data(store: Store, event: Event, now: int) -> Change | None:
    """A node became ready, went down."""
    if event.new is None:
        return None
    before = NodeState.UNKNOWN if event.old is None else event.old.record.state
    after = event.new.record.state
    node = store.record(NODES, event.key)
    if before == after or node is None:
        return None
    return Change(
        kind="node",
        action="update",
        id=event.key,
        attributes={
            "name": node.name or hostname(store, event.key),
            "state.old": before.label,
            "state.new": after.label,
        },
        time=now,
    )


def _service_status(store: Store, event: Event, now: int) -> Change | None:
    """An update began, paused, ended."""
    if event.new is None:
        return None
    before = "" if event.old is None else event.old.record.update.state
    after = event.new.record.update.state
    service = store.record(SERVICES, event.key)
    if before == after or service is None:
        return None
    return Change(
        kind="service",
        action="update",
        id=event.key,
        attributes={"name": service.spec.name, "updatestate.old": before, "updatestate.new": after},
        time=now,
    )
