"""Handlers of "3.1 Containers": decode, one call into the domain, reply."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Awaitable

import msgspec

from engine.api import parameters
from engine.api.engine import Engine
from engine.api.replies import empty_reply, encode, encoded_reply, json_reply
from engine.api.versions import Flag
from engine.containers import listing, views
from engine.containers.container import Container
from engine.containers.signals import signal_number
from engine.containers.streams import Wanted, parse_detach_keys, send
from engine.containers.streams import attach as attach_client
from engine.errors import Conflict, InvalidParameter, NotFound
from engine.http.messages import HijackReply, Reply, Request, StreamReply
from engine.http.websocket import Upgrade
from engine.wire.containers import ContainerSummary, CreateBody, UpdateBody, Updated, Waited
from engine.wire.stats import Stats

RAW_STREAM = "application/vnd.engine.raw-stream"
CREATE_LIMIT = 4 << 20
"""Bytes of a create body; Docker has no limit, and no honest body comes near."""
UPDATE_LIMIT = 1 << 20


def list_all(engine: Engine, request: Request) -> Reply | Awaitable[Reply]:
    query = request.query
    selection = listing.Selection(
        all=parameters.boolean(query, "all"),
        limit=parameters.integer(query, "limit", 0),
        since=query.get("since", ""),
        before=query.get("before", ""),
        filters=parameters.filters(query, listing.FILTERS),
    )
    found = listing.select(engine.containers, engine.images, selection)
    if parameters.boolean(query, "size"):
        return _list_with_sizes(found, request)
    if len(found) > _AT_ONCE:
        return _long_list(found, request)
    return encoded_reply(request, _array(_summaries(found, request, time.time_ns())))


_AT_ONCE = 50
"""Summaries that are encoded before others get a turn: about a millisecond's work when none of them is kept."""


async def _long_list(found: list[Container], request: Request) -> Reply:
    now = time.time_ns()
    shown: list[bytes] = []
    turn = time.monotonic()
    for begin in range(0, len(found), _AT_ONCE):
        shown += _summaries(found[begin : begin + _AT_ONCE], request, now)
        if time.monotonic() - turn > 0.001:
            await asyncio.sleep(0)
            turn = time.monotonic()
    return encoded_reply(request, _array(shown))


def _array(shown: list[bytes]) -> bytes:
    if not shown:
        return b"[]\n"
    shown[0] = b"[" + shown[0]
    shown[-1] += b"]\n"
    return b",".join(shown)  # megabytes are copied once


def _summaries(containers: list[Container], request: Request, now: int) -> list[bytes]:
    """The encoded summaries. Each is kept until its record is replaced; the words of its Status change more often, and are put in."""
    key = ("summary", request.version)
    shown = []
    for container in containers:
        kept = container.encoded.get(key)
        if kept is None or kept[1] <= now:
            text, until = views.status_text(container.record.status, now)
            whole = views.with_status(kept[0], text) if kept else _whole_summary(container, text, request)
            kept = container.encoded[key] = whole, until
        shown.append(kept[0])
    return shown


def _whole_summary(container: Container, text: str, request: Request) -> bytes:
    return encode(views.summary(container.record, container.names, text), request)


async def _list_with_sizes(found: list[Container], request: Request) -> Reply:
    sizes = await asyncio.gather(*(container.sizes() for container in found))
    now = time.time_ns()
    shown = [
        msgspec.structs.replace(
            views.summary(container.record, container.names, views.status_text(container.record.status, now)[0]),
            size_rw=own,
            size_root_fs=whole,
        )
        for container, (own, whole) in zip(found, sizes, strict=True)
        if not container.removed
    ]
    return json_reply(request, shown, ContainerSummary)


async def create(engine: Engine, request: Request) -> Reply:
    body = await parameters.json_body(request, CreateBody, CREATE_LIMIT)
    return json_reply(request, await engine.containers.create(body, request.query.get("name", "")))


def inspect(engine: Engine, request: Request) -> Reply | Awaitable[Reply]:
    container = engine.containers.get(request.parameters["id"])
    if parameters.boolean(request.query, "size") and request.version.has(Flag.INSPECT_SIZE):
        return _inspect_with_size(engine, container, request)
    key = ("inspect", request.version)
    exec_ids = engine.execs.of(container.id)
    kept = None if exec_ids else container.encoded.get(key)
    if exec_ids:
        shown = views.inspect(container.record, container.directory, container.graph, exec_ids)
        kept = (encode(shown, request) + b"\n", 0)
    elif kept is None:
        shown = views.inspect(container.record, container.directory, container.graph)
        kept = container.encoded[key] = (encode(shown, request) + b"\n", 0)
    return encoded_reply(request, kept[0])


def _detach_keys(request: Request) -> bytes:
    given = request.query.get("detachKeys", None) if request.version.has(Flag.DETACH_KEYS) else None
    return parse_detach_keys(given)


def _attach_query(request: Request) -> Wanted:
    query = request.query
    return Wanted(
        logs=parameters.boolean(query, "logs"),
        stream=parameters.boolean(query, "stream"),
        stdin=parameters.boolean(query, "stdin"),
        stdout=parameters.boolean(query, "stdout"),
        stderr=parameters.boolean(query, "stderr"),
        detach_keys=_detach_keys(request),
    )


async def _inspect_with_size(engine: Engine, container: Container, request: Request) -> Reply:
    own, whole = await container.sizes()
    shown = views.inspect(container.record, container.directory, container.graph, engine.execs.of(container.id))
    return json_reply(request, msgspec.structs.replace(shown, size_rw=own, size_root_fs=whole))


async def attach(engine: Engine, request: Request) -> HijackReply:
    container = engine.containers.get(request.parameters["id"])
    wanted = _attach_query(request)
    hijack = request.hijack(RAW_STREAM)
    descriptor = hijack.descriptor()
    try:
        await attach_client(container, engine.monitor, descriptor, wanted, head=hijack.head, early=hijack.early)
    finally:
        os.close(descriptor)
    return hijack.release()


def attach_websocket(engine: Engine, request: Request) -> HijackReply:
    container = engine.containers.get(request.parameters["id"])
    wanted = _attach_query(request)
    container.check_attach()
    upgrade = Upgrade(request)
    hijack = request.hijack(RAW_STREAM)

    async def join(stream: socket.socket) -> None:
        descriptor = stream.fileno()
        await attach_client(container, engine.monitor, descriptor, wanted, head=b"", early=b"", framed=False)

    descriptor = hijack.descriptor()
    engine.websockets.start(upgrade, descriptor, hijack.head, hijack.early, join, takes=wanted.stream and wanted.stdin)
    return hijack.release()


async def read_logs(engine: Engine, request: Request) -> StreamReply | HijackReply:
    query = request.query
    container = engine.containers.get(request.parameters["id"])
    stdout, stderr = parameters.boolean(query, "stdout"), parameters.boolean(query, "stderr")
    if not (stdout or stderr):
        raise InvalidParameter("Bad parameters: you must choose at least one stream")
    tail = query.get("tail", "all")
    # Docker: anything but a number means all; so does a number that no log reaches.
    lines = int(tail) if tail.isascii() and tail.isdigit() and len(tail) < 16 else None
    chunks = await container.read_logs(
        stdout=stdout,
        stderr=stderr,
        since_ns=parameters.timestamp(query, "since") if request.version.has(Flag.LOGS_SINCE) else 0,
        until_ns=parameters.timestamp(query, "until"),
        timestamps=parameters.boolean(query, "timestamps"),
        details=parameters.boolean(query, "details"),
        tail=lines,
        follow=parameters.boolean(query, "follow"),
    )
    if not request.upgrade:
        return StreamReply(200, chunks, RAW_STREAM)
    async with contextlib.aclosing(chunks):
        hijack = request.hijack(RAW_STREAM)
        descriptor = hijack.descriptor()
        try:
            await send(descriptor, hijack.head, chunks)
        finally:
            os.close(descriptor)
    return hijack.release()


async def stats(engine: Engine, request: Request) -> Reply | StreamReply:
    container = engine.containers.get(request.parameters["id"])
    downs, named = request.version.downs(Stats), request.version.has(Flag.STATS_NAMED)
    if parameters.boolean(request.query, "stream", True):
        return StreamReply(200, container.statistics(downs, named=named))
    return encoded_reply(request, await container.statistics_once(downs, named=named))


async def top(engine: Engine, request: Request) -> Reply:
    container = engine.containers.get(request.parameters["id"])
    return json_reply(request, await container.top(request.query.get("ps_args", "")))


async def resize(engine: Engine, request: Request) -> Reply:
    container = engine.containers.get(request.parameters["id"])
    rows, columns = (parameters.integer(request.query, name, minimum=0, maximum=65535) for name in ("h", "w"))
    await container.resize(rows, columns)
    return empty_reply(request, "text/plain")


async def start(engine: Engine, request: Request) -> Reply:
    _detach_keys(request)
    await engine.containers.get(request.parameters["id"]).start()
    return empty_reply(request)


async def stop(engine: Engine, request: Request) -> Reply:
    await engine.containers.get(request.parameters["id"]).stop(_timeout(request))
    return empty_reply(request)


async def restart(engine: Engine, request: Request) -> Reply:
    await engine.containers.get(request.parameters["id"]).restart(_timeout(request))
    return empty_reply(request)


def _timeout(request: Request) -> int | None:
    return parameters.integer(request.query, "t") if request.query.get("t", "") else None


async def kill(engine: Engine, request: Request) -> Reply:
    container = engine.containers.get(request.parameters["id"])
    await container.kill(signal_number(request.query.get("signal", "") or "SIGKILL"))
    return empty_reply(request)


async def update(engine: Engine, request: Request) -> Reply:
    container = engine.containers.get(request.parameters["id"])
    body = await parameters.json_body(request, UpdateBody, UPDATE_LIMIT)
    return json_reply(request, Updated(await engine.containers.update(container, body)))


async def rename(engine: Engine, request: Request) -> Reply:
    container = engine.containers.get(request.parameters["id"])
    await engine.containers.rename(container, request.query.get("name", ""))
    return empty_reply(request)


async def pause(engine: Engine, request: Request) -> Reply:
    await engine.containers.get(request.parameters["id"]).pause()
    return empty_reply(request)


async def unpause(engine: Engine, request: Request) -> Reply:
    await engine.containers.get(request.parameters["id"]).unpause()
    return empty_reply(request)


async def wait(engine: Engine, request: Request) -> Reply:
    code = await engine.containers.get(request.parameters["id"]).wait()
    return json_reply(request, Waited(code))


async def remove(engine: Engine, request: Request) -> Reply:
    query = request.query
    force = parameters.boolean(query, "force")
    volumes = parameters.boolean(query, "v")
    if parameters.boolean(query, "link"):
        raise Conflict(f"Conflict, cannot remove the default link name of the container: {request.parameters['id']}")
    await engine.containers.remove(engine.containers.get(request.parameters["id"]), force=force, volumes=volumes)
    return empty_reply(request)


async def remove_link(engine: Engine, request: Request) -> Reply:
    parent, alias = request.parameters["id"], request.parameters["alias"]
    if not parameters.boolean(request.query, "link"):
        raise NotFound(f"No such container: {parent}/{alias}")
    await engine.containers.unlink(engine.containers.get(parent), alias)
    return empty_reply(request)
