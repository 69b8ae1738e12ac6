"""Handlers of archives: stat, archive, extraction, copy, export, changes."""

from __future__ import annotations

import asyncio
import base64

import msgspec

from engine.api import parameters
from engine.api.engine import Engine
from engine.api.replies import empty_reply, encoded_reply, json_reply
from engine.containers import archive
from engine.errors import NotFound
from engine.http.messages import Reply, Request, StreamReply
from engine.wire.containers import CopyConfig, PathChange, PathStat

_TAR = "application/x-tar"


def _headers(found: PathStat) -> tuple[tuple[str, str], ...]:
    """The stat header, under its neutral name and under Docker's, which clients read."""
    value = base64.b64encode(msgspec.json.encode(found)).decode()
    return (("X-Engine-Container-Path-Stat", value), ("X-Docker-Container-Path-Stat", value))


async def _reply(
    request: Request, stream: archive.Archive, content_type: str, headers: tuple[tuple[str, str], ...] = ()
) -> Reply | StreamReply:
    if stream.whole is None:
        return StreamReply(request.status, stream, content_type, headers)
    await stream.aclose()
    return Reply(request.status, stream.whole, content_type, headers)


async def inspect(engine: Engine, request: Request) -> Reply:
    name = request.parameters["id"]
    found = await archive.inspect(engine.containers.get(name), request.query.get("path", ""), name)
    return Reply(request.status, headers=_headers(found))


async def get(engine: Engine, request: Request) -> Reply | StreamReply:
    name = request.parameters["id"]
    found, stream = await archive.get(engine.containers.get(name), request.query.get("path", ""), name)
    return await _reply(request, stream, _TAR, _headers(found))


async def put(engine: Engine, request: Request) -> Reply:
    name, query = request.parameters["id"], request.query
    try:
        await archive.put(
            *(engine.containers.get(name), query.get("path", ""), name, request.body),
            keep_kinds=parameters.boolean(query, "noOverwriteDirNonDir"),
            own=parameters.boolean(query, "copyUIDGID"),
        )
    except NotFound:
        await archive.skip(request.body)
        raise
    return empty_reply(request)


async def copy(engine: Engine, request: Request) -> Reply | StreamReply:
    name = request.parameters["id"]
    container = engine.containers.get(name)
    wanted = await parameters.json_body(request, CopyConfig)
    return await _reply(request, await archive.copy(container, wanted.resource, name), _TAR)


async def export(engine: Engine, request: Request) -> Reply | StreamReply:
    stream = await archive.export(engine.containers.get(request.parameters["id"]))
    return await _reply(request, stream, "application/octet-stream")


async def changes(engine: Engine, request: Request) -> Reply:
    found = await archive.changes(engine.containers.get(request.parameters["id"]))
    if len(found) <= _AT_ONCE:
        return json_reply(request, found, PathChange)
    return encoded_reply(request, await asyncio.to_thread(_encoded, found))


_AT_ONCE = 1000
"""Changes that are encoded at a time, which takes less than a millisecond. In between, other
requests are served.
"""


def _encoded(found: list[PathChange]) -> bytes:
    """The changes as JSON. Runs in a thread, in pieces, so that the event loop gets the GIL in
    between.
    """
    encode = msgspec.json.encode
    pieces = [encode(found[begin : begin + _AT_ONCE])[1:-1] for begin in range(0, len(found), _AT_ONCE)]
    return b"[" + b",".join(pieces) + b"]\n"
