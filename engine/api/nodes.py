"""Handlers of "Nodes": decode, one call to the manager, reply."""

from __future__ import annotations

from engine.api import manager, parameters
from engine.api.engine import Engine
from engine.http.messages import Reply, Request
from engine.wire.nodes import Node, NodeSpec

FILTERS = ("id", "name", "membership", "role", "label", "node.label")


async def list_all(engine: Engine, request: Request) -> Reply:
    query = {"filters": parameters.filters(request.query, FILTERS)}
    return await manager.ask(engine, request, "nodes.list", Node, query=query, many=True)


async def inspect(engine: Engine, request: Request) -> Reply:
    return await manager.ask(engine, request, "nodes.inspect", Node)


async def update(engine: Engine, request: Request) -> Reply:
    query = {"version": manager.version(request.query, "node")}
    return await manager.ask(engine, request, "nodes.update", query=query, body=await manager.body(request, NodeSpec))


async def remove(engine: Engine, request: Request) -> Reply:
    query = {"force": parameters.boolean(request.query, "force")}
    return await manager.ask(engine, request, "nodes.remove", query=query)
