"""Handlers of "Tasks": decode, one call to the manager, reply."""

from __future__ import annotations

from engine.api import manager, parameters, service_logs
from engine.api.engine import Engine
from engine.http.messages import Reply, Request, StreamReply
from engine.wire.tasks import Task

FILTERS = ("id", "name", "service", "node", "label", "desired-state", "_up-to-date", "runtime")


async def list_all(engine: Engine, request: Request) -> Reply:
    query = {"filters": parameters.filters(request.query, FILTERS)}
    return await manager.ask(engine, request, "tasks.list", Task, query=query, many=True)


async def inspect(engine: Engine, request: Request) -> Reply:
    return await manager.ask(engine, request, "tasks.inspect", Task)


async def read_logs(engine: Engine, request: Request) -> StreamReply:
    return await service_logs.reply(engine, request, "task")
