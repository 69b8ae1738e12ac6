"""Handlers of "Secrets": decode, one call to the manager, reply."""

from __future__ import annotations

from engine.api import manager, parameters
from engine.api.engine import Engine
from engine.http.messages import Reply, Request
from engine.wire.secrets import ObjectCreated, Secret, SecretSpec

FILTERS = ("id", "name", "names", "label")


async def list_all(engine: Engine, request: Request) -> Reply:
    query = {"filters": parameters.filters(request.query, FILTERS)}
    return await manager.ask(engine, request, "secrets.list", Secret, query=query, many=True)


async def inspect(engine: Engine, request: Request) -> Reply:
    return await manager.ask(engine, request, "secrets.inspect", Secret)


async def create(engine: Engine, request: Request) -> Reply:
    body = await manager.body(request, SecretSpec, manager.standard_base64)
    return await manager.ask(engine, request, "secrets.create", ObjectCreated, body=body)


async def update(engine: Engine, request: Request) -> Reply:
    query = {"version": manager.version(request.query, "secret")}
    body = await manager.body(request, SecretSpec, manager.standard_base64)
    return await manager.ask(engine, request, "secrets.update", query=query, body=body)


async def remove(engine: Engine, request: Request) -> Reply:
    return await manager.ask(engine, request, "secrets.remove")
