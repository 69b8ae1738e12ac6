"""Handlers of "Configs": decode, one call to the manager, reply."""

from __future__ import annotations

from engine.api import manager, parameters
from engine.api.engine import Engine
from engine.http.messages import Reply, Request
from engine.wire.secrets import Config, ConfigSpec, ObjectCreated

FILTERS = ("id", "name", "names", "label")


async def list_all(engine: Engine, request: Request) -> Reply:
    query = {"filters": parameters.filters(request.query, FILTERS)}
    return await manager.ask(engine, request, "configs.list", Config, query=query, many=True)


async def inspect(engine: Engine, request: Request) -> Reply:
    return await manager.ask(engine, request, "configs.inspect", Config)


async def create(engine: Engine, request: Request) -> Reply:
    body = await manager.body(request, ConfigSpec, manager.standard_base64)
    return await manager.ask(engine, request, "configs.create", ObjectCreated, body=body)


async def update(engine: Engine, request: Request) -> Reply:
    query = {"version": manager.version(request.query, "config")}
    body = await manager.body(request, ConfigSpec, manager.standard_base64)
    return await manager.ask(engine, request, "configs.update", query=query, body=body)


async def remove(engine: Engine, request: Request) -> Reply:
    return await manager.ask(engine, request, "configs.remove")
