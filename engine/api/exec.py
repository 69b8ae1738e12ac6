"""Handlers of "Exec": decode, one call into the domain, reply."""

from __future__ import annotations

import os

from engine.api import parameters
from engine.api.engine import Engine
from engine.api.replies import empty_reply, hijack_type, json_reply
from engine.api.versions import Flag
from engine.containers.exec import console_size
from engine.http.hijack import HijackReply
from engine.http.messages import Reply, Request
from engine.wire.exec import ExecCreate, ExecCreated, ExecStart

LIMIT = 1 << 20
"""Bytes of an exec body."""


async def create(engine: Engine, request: Request) -> Reply:
    container = engine.containers.get(request.parameters["id"])
    config = await parameters.json_body(request, ExecCreate, LIMIT)
    return json_reply(request, ExecCreated(await engine.execs.create(container, config, request.parameters["id"])))


async def start(engine: Engine, request: Request) -> Reply | HijackReply:
    exec_id = request.parameters["id"]
    body = await parameters.json_body(request, ExecStart, LIMIT)
    config = engine.execs.get(exec_id).config
    attached = config.attach_stdin or config.attach_stdout or config.attach_stderr
    size = console_size(body.console_size) if body.tty else None
    if body.detach or not (attached or request.version.has(Flag.EXEC_ALWAYS_HIJACKS)):
        await engine.execs.start(exec_id, detach=True, size=size)
        return empty_reply(request)
    hijack = await request.hijack(hijack_type(request, framed=not body.tty))
    descriptor = hijack.descriptor()
    try:
        # The output is framed by the Tty of this body, not of the create's: clients decode the
        # stream by the value that they send here.
        await engine.execs.start(
            exec_id, detach=False, descriptor=descriptor, head=hijack.head, early=hijack.early, raw=body.tty, size=size
        )
    finally:
        os.close(descriptor)
    return hijack.release()


async def resize(engine: Engine, request: Request) -> Reply:
    exec_id = request.parameters["id"]
    rows, columns = (parameters.integer(request.query, name, minimum=0, maximum=65535) for name in ("h", "w"))
    await engine.execs.resize(exec_id, rows, columns)
    return empty_reply(request, "text/plain")


async def inspect(engine: Engine, request: Request) -> Reply:
    return json_reply(request, await engine.execs.inspect(request.parameters["id"]))
