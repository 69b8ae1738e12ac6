"""Handlers of "Volumes": decode, one call into the domain, reply."""

from __future__ import annotations

from engine.api import parameters
from engine.api.engine import Engine
from engine.api.replies import empty_reply, json_reply
from engine.http.messages import Reply, Request
from engine.volumes.store import FILTERS
from engine.wire.volumes import VolumeCreate, VolumeList


async def list_all(engine: Engine, request: Request) -> Reply:
    filters = parameters.filters(request.query, FILTERS)
    dangling = parameters.filter_boolean(filters, "dangling")
    return json_reply(request, VolumeList(*await engine.volumes.select(filters, dangling)))


async def create(engine: Engine, request: Request) -> Reply:
    body = await parameters.json_body(request, VolumeCreate, optional=True)
    return json_reply(request, await engine.volumes.create(body))


async def inspect(engine: Engine, request: Request) -> Reply:
    return json_reply(request, await engine.volumes.get(request.parameters["name"]))


async def remove(engine: Engine, request: Request) -> Reply:
    await engine.volumes.remove(request.parameters["name"])
    return empty_reply(request)
