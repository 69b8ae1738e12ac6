"""Handlers of "Swarm": decode, one call into the membership or to the manager, reply."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.api import manager, parameters
from engine.api.engine import Engine
from engine.api.replies import empty_reply, encode, json_reply
from engine.api.versions import Flag
from engine.errors import InvalidParameter, Unavailable, WrongState
from engine.http.messages import Reply, Request
from engine.wire.swarm import ClusterInfo, InitRequest, JoinRequest, Swarm, SwarmSpec, UnlockKey
from engine.wire.system import SwarmInfo


async def inspect(engine: Engine, request: Request) -> Reply:
    return await manager.ask(engine, request, "swarm.inspect", Swarm)


async def init(engine: Engine, request: Request) -> Reply:
    """Replies with the id of this node as a JSON string."""
    body = await manager.body(request, InitRequest, _settings_inside)
    return json_reply(request, await engine.cluster.init(body))


async def join(engine: Engine, request: Request) -> Reply:
    await engine.cluster.join(await manager.body(request, JoinRequest, _remote_addresses))
    return empty_reply(request)


async def leave(engine: Engine, request: Request) -> Reply:
    try:
        await engine.cluster.leave(parameters.boolean(request.query, "force"))
    except WrongState as error:
        if request.version.has(Flag.NO_SWARM_IS_503):
            raise Unavailable(error.message) from error
        raise
    return empty_reply(request)


async def update(engine: Engine, request: Request) -> Reply:
    query = request.query
    wanted = {
        "version": manager.version(query, "swarm"),
        "rotate_worker_token": manager.flag(query, "rotateWorkerToken", "rotationWorkerToken"),
        "rotate_manager_token": manager.flag(query, "rotateManagerToken", "rotationManagerToken"),
        "rotate_manager_unlock_key": manager.flag(query, "rotateManagerUnlockKey"),
    }
    body = await manager.body(request, SwarmSpec, _settings)
    return await manager.ask(engine, request, "swarm.update", query=wanted, body=body)


async def unlock_key(engine: Engine, request: Request) -> Reply:
    return await manager.ask(engine, request, "swarm.unlockkey", UnlockKey)


async def unlock(engine: Engine, request: Request) -> Reply:
    """Managers of this engine are never locked."""
    await manager.body(request, UnlockKey)
    raise (
        Unavailable("swarm is not locked")
        if request.version.has(Flag.NO_SWARM_IS_503)
        else WrongState("swarm is not locked")
    )


def info(request: Request, found: dict[str, Any]) -> SwarmInfo:
    """Swarm of /info, from its fields in the newest version's document."""
    given = dict(found)
    cluster = given.pop("Cluster", None)
    shown = msgspec.convert(given, SwarmInfo)
    if cluster:
        encoded = encode(msgspec.convert(cluster, ClusterInfo), request)
        shown = msgspec.structs.replace(shown, cluster=msgspec.Raw(encoded))
    return shown


def _settings(shape: dict[str, Any]) -> None:
    """1.24's document has one ExternalCA where clients send a list."""
    config = shape.get("CAConfig")
    if isinstance(config, dict):
        alone = config.get("ExternalCA")
        if isinstance(alone, dict):
            config["ExternalCA"] = [alone] if alone else []
        manager.renamed(config, "ExternalCA", "ExternalCAs")


def _settings_inside(shape: dict[str, Any]) -> None:
    spec = shape.get("Spec")
    if isinstance(spec, dict):
        _settings(spec)


def _remote_addresses(shape: dict[str, Any]) -> None:
    """1.24's document describes RemoteAddrs as RemoteAddr."""
    for name in ("RemoteAddr", "RemoteAddrs"):
        given = shape.get(name)
        if isinstance(given, str):
            shape[name] = [given] if given else []
    manager.renamed(shape, "RemoteAddr", "RemoteAddrs")
    if not isinstance(shape.get("RemoteAddrs", []), list):
        raise InvalidParameter("RemoteAddrs: a list of addresses is expected")
