"""Nodes: list, inspect, update (role, availability, labels), remove.

The record of a node has what the operator wants of it, and its revision is `Version.Index`; what
the node reports is another record. A change of the role is a wish: `roles.py` carries it out.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from engine.common import times
from engine.errors import EngineError
from engine.manager import roots
from engine.manager.ca import tls_info
from engine.manager.certificates import digest
from engine.manager.control import filters, validate
from engine.manager.control.context import Context, Precondition, body, check_version, encode, encode_all, find
from engine.manager.records import (
    CLAIMS,
    CLUSTER,
    LEADER,
    MANAGERS,
    NODE_DATA,
    NODES,
    TURNS,
    NodeData,
    NodeRecord,
    barred_claim,
)
from engine.manager.store import Change, Compare, Delete, Entry, Put, Store
from engine.swarm_session.messages import Call
from engine.swarm_session.states import Availability, NodeState, Role
from engine.wire import nodes as wire
from engine.wire.nodes import NodeSpec
from engine.wire.swarm import Version

_ROLES = {role.label: role for role in Role}
_AVAILABILITIES = {one.label: one for one in Availability}
_MEMBERSHIPS = {"accepted": True, "pending": False}
"""Every node is accepted: joining needs a token."""


def hostname(store: Store, node: str) -> str:
    data = store.record(NODE_DATA, node)
    return "" if data is None or data.description is None else data.description.hostname


def named(store: Store, name: str) -> Iterable[str]:
    """Ids of the nodes with this host name."""
    return [
        key
        for key, entry in store.all(NODE_DATA).items()
        if entry.record.description is not None
        and entry.record.description.hostname == name
        and store.get(NODES, key) is not None
    ]


def find_node(store: Store, text: str) -> Entry[NodeRecord]:
    return find(store, NODES, "node", text, lambda name: named(store, name))


# --- reading --------------------------------------------------------------------------------------


async def list_all(context: Context, call: Call) -> bytes:
    store = context.store
    found = filters.given(call.query, ("id", "name", "label", "node.label", "role", "membership"))
    roles = filters.chosen(found, "role", _ROLES)
    memberships = filters.chosen(found, "membership", _MEMBERSHIPS)
    id_starts, name_starts = filters.starts(found, "id"), filters.starts(found, "name")
    has_engine_labels = filters.have_labels(found)
    has_labels = filters.have_labels(found, "node.label")

    def document(entry: Entry[NodeRecord]) -> wire.Node | None:
        record, data = entry.record, store.record(NODE_DATA, entry.key)
        description = (data.description if data is not None else None) or wire.NodeDescription()
        shown = (
            id_starts(entry.key)
            and name_starts(description.hostname)
            and has_engine_labels(description.engine.labels)
            and has_labels(record.labels)
            and (roles is None or record.role in roles)
            and (memberships is None or True in memberships)
        )
        return view(context, entry) if shown else None

    return await encode_all(document(entry) for _, entry in sorted(store.all(NODES).items()))


async def inspect(context: Context, call: Call) -> bytes:
    return encode(view(context, find_node(context.store, call.name)))


def view(context: Context, entry: Entry[NodeRecord]) -> wire.Node:
    """The document of one node."""
    store, record = context.store, entry.record
    data = store.record(NODE_DATA, entry.key) or NodeData()
    return wire.Node(
        id=entry.key,
        version=Version(entry.revision),
        created_at=times.rfc3339(record.created),
        updated_at=times.rfc3339(record.updated),
        spec=NodeSpec(
            name=record.name,
            labels=record.labels,
            role=record.role.label,
            availability=record.availability.label,
        ),
        description=_description(store, data),
        status=wire.NodeStatus(state=data.state.label, message=data.message, addr=data.address),
        manager_status=_manager_status(context, entry.key, record, data),
    )


def _description(store: Store, data: NodeData) -> wire.NodeDescription:
    """With the issuer of the node's certificate, which clients compare with the swarm's to show how
    a rotation of the CA proceeds.
    """
    description, cluster = data.description or wire.NodeDescription(), store.record(CLUSTER)
    if cluster is None or not data.certificate:
        return description
    for root in roots.members(cluster):
        if digest(root) == data.certificate:
            issuer = msgspec.structs.replace(tls_info(root), trust_root=cluster.root)
            return msgspec.structs.replace(description, tls_info=issuer)
    return description


def _manager_status(context: Context, node: str, record: NodeRecord, data: NodeData) -> wire.ManagerStatus | None:
    """Of a node whose manager serves, or served and is missed. Records of presence and leadership
    expire, which a manager whose etcd does not answer cannot see.
    """
    presence, leader = context.store.record(MANAGERS, node), context.store.record(LEADER)
    if presence is not None:
        if context.old:
            return wire.ManagerStatus(reachability="unknown", addr=presence.address)
        leads = leader is not None and leader.node == node
        return wire.ManagerStatus(leader=leads, reachability="reachable", addr=presence.address)
    if record.role == data.role == Role.MANAGER:
        return wire.ManagerStatus(reachability="unreachable", addr=data.manager_address)
    return None


def managers(store: Store) -> dict[str, Entry[NodeRecord]]:
    """The nodes that are, or should become, managers."""
    return {key: entry for key, entry in store.all(NODES).items() if entry.record.role == Role.MANAGER}


# --- writing --------------------------------------------------------------------------------------


async def update(context: Context, call: Call) -> bytes:
    store = context.store
    entry = find_node(store, call.name)
    spec = body(call, NodeSpec)
    role = _word("Role", spec.role, _ROLES)
    availability = _word("Availability", spec.availability, _AVAILABILITIES)
    validate.labels("Labels", spec.labels)
    check_version(call, "node", entry)
    compares = [Compare(NODES, entry.key, entry.revision)]
    if entry.record.role == Role.MANAGER and role == Role.WORKER:
        compares += await _check_demotion(context, entry.key)
    changed = msgspec.structs.replace(
        entry.record,
        updated=context.clock.now(),
        name=spec.name,
        labels=spec.labels,
        role=role,
        availability=availability,
    )
    await store.commit([Put(NODES, entry.key, changed)], compares)
    return b""


def _word(field: str, given: str, words: dict[str, validate.T]) -> validate.T:
    if given.lower() not in words:
        raise validate.refuse(field, given, f"one of {', '.join(words)} is required")
    return words[given.lower()]


async def _check_demotion(context: Context, node: str) -> list[Compare]:
    """Returns the comparisons with which two demotions at a time cannot both succeed."""
    present = managers(context.store)
    if len(present) == 1:
        raise Precondition("attempting to demote the last manager of the swarm")
    reason = await context.guard(node)
    if reason:
        raise Precondition(f"can't demote node {node}: this would result in a loss of quorum: {reason}")
    return [Compare(NODES, key, entry.revision) for key, entry in present.items() if key != node]


async def remove(context: Context, call: Call) -> bytes:
    """The node's id is barred until every certificate that was made for it has expired. One that
    was just demoted may still have its etcd member, which goes first: the node ends when it finds
    itself barred, and must not count for the quorum then.
    """
    store, now = context.store, context.clock.now()
    entry = find_node(store, call.name)
    data = store.get(NODE_DATA, entry.key)
    consensus = f"node {entry.key} is a cluster manager and is a member of the consensus group"
    if entry.record.role == Role.MANAGER:
        raise Precondition(f"{consensus}. It must be demoted to worker before removal")
    if not call.query.get("force") and data is not None and data.record.state == NodeState.READY:
        raise Precondition(f"node {entry.key} is not down and can't be removed")
    if store.get(MANAGERS, entry.key) is not None or (data is not None and data.record.role == Role.MANAGER):
        try:
            await context.expel(entry.key)
        except EngineError as error:
            raise Precondition(f"{consensus}, which it cannot leave yet: {error.message}") from error
    changes: list[Change] = [
        Delete(NODES, entry.key),
        Delete(NODE_DATA, entry.key),
        Delete(TURNS, entry.key),
        context.authority.bar(entry.key),
    ]
    changes += [
        Delete(CLAIMS, key)
        for key, claim in store.all(CLAIMS).items()
        if key.startswith(barred_claim("")) and claim.record.holder.isdigit() and int(claim.record.holder) < now
    ]
    compares = [Compare(NODES, entry.key, entry.revision)]
    if data is not None and not call.query.get("force"):
        compares.append(Compare(NODE_DATA, entry.key, data.revision))
    await store.commit(changes, compares)
    return b""
