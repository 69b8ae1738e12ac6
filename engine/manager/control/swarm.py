"""The swarm itself: inspect, update with rotation of tokens and of the CA, and its part of
/info.
"""

from __future__ import annotations

import msgspec

from engine.common import times
from engine.errors import Unavailable, Unimplemented
from engine.manager import networks, roots, tokens
from engine.manager.ca import tls_info
from engine.manager.control import nodes, validate
from engine.manager.control.context import Context, body, check_version, encode
from engine.manager.records import CLUSTER, MANAGERS, NODES, Cluster
from engine.manager.store import Compare, Entry, Put
from engine.swarm_session.messages import Call
from engine.wire.swarm import ClusterInfo, JoinTokens, Peer, Swarm, SwarmInfo, SwarmSpec, TLSInfo, UnlockKey, Version


def _entry(context: Context) -> Entry[Cluster]:
    entry = context.store.get(CLUSTER)
    if entry is None:
        raise Unavailable("the record of the swarm is not loaded yet")
    return entry


def cluster_info(context: Context, entry: Entry[Cluster]) -> ClusterInfo:
    """The document of the swarm without its tokens."""
    cluster = entry.record
    config = msgspec.structs.replace(cluster.spec.ca_config, signing_ca_cert="")  # as in swarmkit
    pools, size = networks.pools(cluster)
    return ClusterInfo(
        id=cluster.id,
        version=Version(entry.revision),
        created_at=times.rfc3339(cluster.created),
        updated_at=times.rfc3339(cluster.updated),
        spec=msgspec.structs.replace(cluster.spec, ca_config=config),
        tls_info=_tls_info(cluster),
        root_rotation_in_progress=roots.changing(cluster),
        default_addr_pool=list(map(str, pools)),
        subnet_size=size,
        data_path_port=cluster.data_path_port,
    )


def _tls_info(cluster: Cluster) -> TLSInfo:
    """The root that nodes trust, and the one that issues their next certificates."""
    return msgspec.structs.replace(tls_info(roots.signing(cluster)), trust_root=cluster.root)


async def inspect(context: Context, call: Call) -> bytes:
    entry = _entry(context)
    info = cluster_info(context, entry)
    join = JoinTokens(worker=entry.record.worker_token, manager=entry.record.manager_token)
    return encode(Swarm(**msgspec.structs.asdict(info), join_tokens=join))


async def update(context: Context, call: Call) -> bytes:
    """Replace the settings, where zero means unchanged, and make new tokens on request. New tokens
    do not touch nodes that have joined.
    """
    entry = _entry(context)
    spec = validate.swarm_spec(body(call, SwarmSpec), entry.record.spec)
    if call.query.get("rotate_manager_unlock_key"):
        raise Unimplemented("rotateManagerUnlockKey: locked managers are not supported by this version")
    check_version(call, "swarm", entry)
    old = entry.record
    new = msgspec.structs.replace(
        old,
        spec=spec,
        updated=context.clock.now(),
        worker_token=_token(old, old.worker_token, bool(call.query.get("rotate_worker_token"))),
        manager_token=_token(old, old.manager_token, bool(call.query.get("rotate_manager_token"))),
    )
    new, changes, compares = await context.authority.reconfigure(old, new)
    await context.store.commit([Put(CLUSTER, "", new), *changes], [Compare(CLUSTER, "", entry.revision), *compares])
    return b""


def _token(cluster: Cluster, old: str, rotate: bool) -> str:
    return tokens.token(cluster.root, tokens.new_secret()) if rotate else old


async def unlock_key(context: Context, call: Call) -> bytes:
    """Managers are never locked."""
    return encode(UnlockKey())


async def info(context: Context, call: Call) -> bytes:
    """The part of /info that this manager knows, out of the cache alone: it waits for nothing."""
    store, entry = context.store, context.store.get(CLUSTER)
    peers = [Peer(node, presence.record.address) for node, presence in sorted(store.all(MANAGERS).items())]
    return encode(
        SwarmInfo(
            error=store.broken,
            remote_managers=peers,
            nodes=len(store.all(NODES)),
            managers=len(nodes.managers(store)),
            cluster=None if entry is None else cluster_info(context, entry),
        )
    )
