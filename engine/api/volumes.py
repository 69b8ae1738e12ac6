"""Handlers of "Volumes": decode, one call into the domain, reply."""

from __future__ import annotations

from engine.api import parameters
from engine.api.engine import Engine
from engine.api.replies import empty_reply, json_reply
from engine.api.versions import Flag
from engine.errors import Unavailable, Unimplemented
from engine.http.messages import Reply, Request
from engine.volumes.views import FILTERS
from engine.wire.volumes import VolumeCreate, VolumeList, VolumesPruned


async def list_all(engine: Engine, request: Request) -> Reply:
    filters = parameters.filters(request.query, FILTERS)
    dangling = parameters.filter_boolean(filters, "dangling")
    return json_reply(request, VolumeList(*await engine.volumes.select(filters, dangling)))


async def create(engine: Engine, request: Request) -> Reply:
    body = await parameters.json_body(request, VolumeCreate, optional=True)
    return json_reply(request, await engine.volumes.create(body))


async def inspect(engine: Engine, request: Request) -> Reply:
    return json_reply(request, await engine.volumes.get(request.parameters["name"]))


def update(engine: Engine, request: Request) -> Reply:
    if engine.cluster.is_manager:
        raise Unimplemented("cluster volumes (CSI) are not supported by this version")
    raise Unavailable("volume update only valid for cluster volumes, but swarm is unavailable")


async def remove(engine: Engine, request: Request) -> Reply:
    force = parameters.boolean(request.query, "force")
    await engine.volumes.remove(request.parameters["name"], force=force)
    return empty_reply(request)


async def prune(engine: Engine, request: Request) -> Reply:
    selection = parameters.prune_selection(request.query, "all")
    named = not request.version.has(Flag.PRUNE_ANONYMOUS)
    if not named:
        named = bool(parameters.filter_boolean({**selection.others}, "all"))
    return json_reply(request, VolumesPruned(*await engine.volumes.prune(selection, named=named)))
