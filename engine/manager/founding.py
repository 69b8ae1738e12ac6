"""How a manager comes to its etcd member: a new swarm, the state on disk, one member out of many
(`docker swarm init --force-new-cluster`), or another member of a swarm.

Each way may be cut at any moment by a kill, and is repeated by the daemon's next `Begin`. A new
swarm exists from the transaction that writes its cluster record; until then nothing of it is kept.

Owns:    nothing. Files are those of `Credentials` and `Member`, and ROOT/raft.json.
Threads: the event loop's; files are written in threads.
Raises:  InvalidParameter for bad settings, ServerError when etcd does not serve.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from engine.errors import InvalidParameter, NotFound, ServerError, decoding_reason
from engine.manager import ca, joining, keys, networks, renewal, roots
from engine.manager.ca import Authority
from engine.manager.control import validate
from engine.manager.kv import FIRST, LAST, Etcd, Guard, InDoubt, PutKey
from engine.manager.member import Member
from engine.manager.records import CLUSTER, MANAGERS, NODE_DATA, NODES, NodeData, NodeRecord, encode
from engine.manager.store import Change, Compare, Delete, Put, Store
from engine.manager.tls import Credentials
from engine.swarm_session.clock import Clock
from engine.swarm_session.messages import Begin
from engine.swarm_session.states import NodeState, Role
from engine.system.files import write_atomically
from engine.wire.swarm import InitRequest, RaftConfig, SwarmSpec

RAFT = "raft.json"
"""In ROOT: the settings that etcd is started with, before the store can be read."""
SUBNET_SIZE = 24
"""Prefix length of a network's subnet, unless the request says otherwise."""
ANSWER = 20.0
"""Seconds that a new member may take for its first answer."""

replace = msgspec.structs.replace


def settings(begin: Begin) -> tuple[InitRequest, SwarmSpec]:
    """The body of an init request, and its spec with defaults. Raises InvalidParameter."""
    try:
        request = msgspec.json.decode(begin.body or b"{}", type=InitRequest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidParameter(f"init: {decoding_reason(error)}") from error
    validate.init_request(request)
    return request, validate.swarm_spec(request.spec)


def raft_of(root: Path, begin: Begin) -> RaftConfig:
    """The settings for the member's start: those of the request, or those that it last had."""
    if begin.how == "init":
        return settings(begin)[1].raft
    try:
        return msgspec.json.decode((root / RAFT).read_bytes(), type=RaftConfig)
    except (OSError, msgspec.DecodeError):
        return validate.swarm_spec(SwarmSpec()).raft


def keep_raft(root: Path, raft: RaftConfig) -> None:
    write_atomically(root / RAFT, msgspec.json.encode(raft), 0o600)


async def found(credentials: Credentials, member: Member, begin: Begin, clock: Clock) -> Etcd:
    """A new swarm with this node as its only one. Takes up one that an earlier attempt has founded,
    and removes what an unfinished attempt has left.
    """
    request, spec = settings(begin)
    if member.exists:
        etcd = await member.start()
        if (await etcd.range(CLUSTER.path(""), timeout=ANSWER)).items:
            return etcd
        await member.stop()
        await asyncio.to_thread(member.wipe)
    made = await ca.found(
        spec,
        clock,
        node=begin.node,
        address=begin.advertise,
        address_pool=tuple(request.default_addr_pool),
        subnet_size=request.subnet_size or SUBNET_SIZE,
        data_path_port=request.data_path_port or 4789,
    )
    await asyncio.to_thread(credentials.install, roots=made.cluster.root, certificate=made.certificate, key=made.key)
    etcd = await member.start()
    try:
        availability = validate.availability(request.availability)
        now = clock.now()
        node = NodeRecord(created=now, updated=now, role=Role.MANAGER, availability=availability)
        changes = [*made.changes, Put(NODES, begin.node, node), *networks.founding(made.cluster, now, begin.subnets)]
        outcome = await etcd.commit(
            [Guard(CLUSTER.path(""), 0)],
            [PutKey(put.kind.path(put.key), encode(put.record)) for put in changes if isinstance(put, Put)],
            timeout=ANSWER,
        )
        if not outcome.done:
            raise ServerError("etcd's data directory belongs to another swarm already")
    except BaseException:
        await member.stop()
        await asyncio.to_thread(member.wipe)
        raise
    return etcd


async def restore(credentials: Credentials, member: Member, begin: Begin, clock: Clock) -> Etcd:
    """The member with its data on disk."""
    if not member.exists:
        raise ServerError("etcd's data directory is gone: leave the swarm by force, and join again")
    await asyncio.to_thread(renewal.rescue, credentials, clock, node=begin.node, address=begin.advertise)
    return await member.start()


async def force(credentials: Credentials, member: Member, begin: Begin, clock: Clock) -> Etcd:
    """The member alone, with all data. `take_all` changes the records afterwards."""
    if not member.exists:
        raise ServerError("etcd's data directory is gone: there is nothing to make a new swarm of")
    return await member.start(force=True)


async def join(credentials: Credentials, member: Member, begin: Begin, clock: Clock) -> Etcd:
    """Become another member of the swarm of `begin.peers`, with the certificate in ROOT."""
    root = credentials.directory
    while True:
        if member.exists:  # it was added before, and perhaps not promoted
            etcd = await member.start()
        else:
            added = await joining.join_members(root, begin.peers, member.peer_url)
            etcd = await member.start(initial_cluster=added.initial_cluster)
        status = await etcd.status()
        try:
            if status.learner:
                await joining.promoted(root, begin.peers, status.member)
        except NotFound:
            await member.stop()
            await asyncio.to_thread(member.wipe)
            continue
        await _votes(etcd, clock)
        return etcd


async def _votes(etcd: Etcd, clock: Clock) -> None:
    """Wait until the member itself knows that it votes: it refuses reads as long as it does not."""
    ends = clock.monotonic() + ANSWER
    while True:
        try:
            await etcd.range(FIRST, LAST, limit=1)
            return
        except InDoubt:
            if clock.monotonic() > ends:
                raise
        await clock.sleep(0.05)


METHODS: dict[str, Callable[[Credentials, Member, Begin, Clock], Awaitable[Etcd]]] = {
    "init": found,
    "restore": restore,
    "force": force,
    "join": join,
}
"""By `Begin.how`."""


async def take_all(store: Store, authority: Authority, credentials: Credentials, begin: Begin, clock: Clock) -> None:
    """After `force`: this node is the only manager. The others become workers that are down, until
    they join again; the epoch rises, so that agents that have seen it refuse the old managers. The
    own certificate is issued again, with the address of the request. Its issuer is trusted again if
    an earlier version has forgotten it: other nodes may have certificates of the same root.
    """
    now = clock.now()
    cluster = store.get(CLUSTER)
    if cluster is None:
        raise ServerError("etcd's data has no swarm")
    record = roots.adopted(cluster.record, credentials.certificate())
    changes: list[Change] = [Put(CLUSTER, "", replace(record, epoch=record.epoch + 1, updated=now))]
    changes += [Delete(MANAGERS, node) for node in store.all(MANAGERS) if node != begin.node]
    for node, entry in store.all(NODES).items():
        role = Role.MANAGER if node == begin.node else Role.WORKER
        if entry.record.role is not role:
            changes.append(Put(NODES, node, replace(entry.record, role=role, updated=now)))
            data = store.record(NODE_DATA, node) or NodeData()
            down = replace(data, state=NodeState.DOWN, owner="", session="", since=now, message="the swarm was renewed")
            changes.append(Put(NODE_DATA, node, down))
    await store.commit(changes, [Compare(CLUSTER, "", cluster.revision)])
    key = keys.new_key()
    certificate = await authority.sign(keys.request(key), begin.node, Role.MANAGER, begin.advertise)
    await asyncio.to_thread(credentials.install, roots=authority.trusted(), certificate=certificate, key=key)
