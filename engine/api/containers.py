"""Handlers of containers: decode, one call into the domain, reply."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Awaitable, Iterator
from typing import Any

import msgspec

from engine.api import parameters
from engine.api.engine import Engine
from engine.api.kept import Entry
from engine.api.replies import (
    RAW_STREAM,
    empty_reply,
    encoded_reply,
    hijack_type,
    json_reply,
    stream_reply,
    stream_type,
)
from engine.api.replies import encode as encode_reply
from engine.api.versions import Flag
from engine.common.signals import signal_number
from engine.common.turns import Turn
from engine.containers import listing, logs, removal, settings, views
from engine.containers import stats as statistics
from engine.containers import top as processes
from engine.containers.container import Container
from engine.containers.prune import prune as prune_containers
from engine.containers.streams import Wanted, parse_detach_keys, send
from engine.containers.streams import attach as attach_client
from engine.containers.waiting import Condition, Ended
from engine.errors import Conflict, InvalidParameter, NotFound, Unimplemented, WrongState
from engine.http.hijack import HijackReply
from engine.http.messages import Reply, Request, StreamReply
from engine.images.store import ImageStore
from engine.wire.containers import (
    ContainerInspect,
    ContainerSummary,
    CreateBody,
    HostConfig,
    UpdateBody,
    Updated,
    Waited,
    WaitError,
)
from engine.wire.stats import Stats

CREATE_LIMIT = 4 << 20
"""Bytes of a create body. Docker has no limit; real bodies are far smaller."""
UPDATE_LIMIT = 1 << 20


def list_all(engine: Engine, request: Request) -> Reply | Awaitable[Reply]:
    return _list_after_ends(engine, request) if engine.containers.ending else _list(engine, request)


async def _list_after_ends(engine: Engine, request: Request) -> Reply:
    await asyncio.gather(*(container.end_recorded() for container in engine.containers.ending))
    reply = _list(engine, request)
    return reply if isinstance(reply, Reply) else await reply


def _list(engine: Engine, request: Request) -> Reply | Awaitable[Reply]:
    now = time.time_ns()
    # The generation is read first: a change while a long list is made makes that list outdated.
    generation = engine.containers.generation
    kept = engine.kept.lists.find(request.target, generation, now)
    if kept is not None:
        return encoded_reply(request, kept)
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
        return _list_with_sizes(engine, found, request)
    if len(found) > _AT_ONCE:
        return _long_list(engine, found, request, now, selection, generation)
    return _listed(engine, request, [_summaries(engine, found, request, now)], selection, generation)


_AT_ONCE = 50
"""Summaries that are encoded at a time: about a millisecond's work when none of them is kept. In
between, other requests are served.
"""


async def _long_list(
    engine: Engine, found: list[Container], request: Request, now: int, selection: listing.Selection, generation: int
) -> Reply:
    parts = []
    turn = Turn()
    for begin in range(0, len(found), _AT_ONCE):
        parts.append(_summaries(engine, found[begin : begin + _AT_ONCE], request, now))
        await turn.over()
    return _listed(engine, request, parts, selection, generation)


def _listed(
    engine: Engine, request: Request, parts: list[_Summaries], selection: listing.Selection, generation: int
) -> Reply:
    """The whole list, kept if it depends on the containers alone."""
    body = _array([summary for summaries, _ in parts for summary in summaries])
    if selection.by_containers:
        engine.kept.lists.keep(request.target, generation, body, min(until for _, until in parts))
    return encoded_reply(request, body)


def _array(shown: list[bytes]) -> bytes:
    if not shown:
        return b"[]\n"
    shown[0] = b"[" + shown[0]
    shown[-1] += b"]\n"
    return b",".join(shown)  # megabytes are copied once


def _summaries(engine: Engine, containers: list[Container], request: Request, now: int) -> _Summaries:
    """The encoded summaries, and the time until which they are right. Each is kept until its
    container changes; only its Status, which depends on the time, is inserted each time.
    """
    entries = engine.kept.of(request.version.shape(ContainerSummary))
    shown = []
    earliest = views.FOREVER
    for container in containers:
        key = container.record.id
        generation, body, until = entries.get(key, _NOTHING)
        if generation != container.generation:
            text, until = views.status_text(container.record.status, now)
            body = _whole_summary(container, text, engine.images, request)
            entries[key] = Entry(container.generation, body, until)
        elif until <= now:
            text, until = views.status_text(container.record.status, now)
            body = views.with_status(body, text)
            entries[key] = Entry(generation, body, until)
        if until < earliest:  # noqa: PLR1730 (min() takes four times as long)
            earliest = until
        shown.append(body)
    return shown, earliest


_NOTHING = Entry(-1, b"")
_Summaries = tuple[list[bytes], int]


def _whole_summary(container: Container, text: str, images: ImageStore, request: Request) -> bytes:
    image = listing.image_shown(container.record, images)
    return encode_reply(views.summary(container.record, container.names, text, image), request)


async def _list_with_sizes(engine: Engine, found: list[Container], request: Request) -> Reply:
    sizes = dict(zip(found, await engine.usage.sizes.of(found), strict=True))
    now = time.time_ns()
    shown: list[bytes] = []
    turn = Turn()
    for begin in range(0, len(found), _AT_ONCE):
        present = [container for container in found[begin : begin + _AT_ONCE] if not container.removed]
        summaries, _ = _summaries(engine, present, request, now)
        for container, summary in zip(present, summaries, strict=True):
            shown.append(views.with_sizes(summary, *sizes[container]))
        await turn.over()
    return encoded_reply(request, _array(shown))


async def create(engine: Engine, request: Request) -> Reply:
    exact = request.authorization is not None
    prepare = exact_host_config_beside if exact else host_config_beside
    body = await parameters.json_body(request, CreateBody, CREATE_LIMIT, prepare=prepare)
    platform = request.query.get("platform", "") if request.version.has(Flag.CREATE_PLATFORM) else ""
    return json_reply(request, await engine.containers.create(body, request.query.get("name", ""), platform))


_HOST_FIELDS = {field.encode_name.casefold() for field in msgspec.structs.fields(HostConfig)}
_BESIDE = ("Memory", "MemorySwap", "CpuShares", "CpusetCpus")


def host_config_beside(body: Any) -> None:
    """Move fields of HostConfig that are at the top level of the body into HostConfig, as dockerd
    reads them.

    Without a HostConfig all such fields are moved. Otherwise only those of `_BESIDE` are, unless
    HostConfig has the field too. Cpuset is the older name of CpusetCpus.
    """
    if not isinstance(body, dict):
        return
    named = {name.casefold(): name for name in body}
    host = body.get(named.get("hostconfig", ""))
    if host is None:
        inner = {name: value for name, value in body.items() if name.casefold() in _HOST_FIELDS}
    elif isinstance(host, dict):
        inner = host
        own = {name.casefold(): name for name in inner}
        for field in _BESIDE:
            value = body.get(named.get(field.casefold(), ""))
            if value and not inner.get(own.get(field.casefold(), "")):
                inner[field] = value
    else:
        return
    cpuset = body.get(named.get("cpuset", ""))
    if cpuset and not any(value for name, value in inner.items() if name.casefold() == "cpusetcpus"):
        inner["CpusetCpus"] = cpuset
    body.pop(named.get("hostconfig", ""), None)
    body["HostConfig"] = inner


_check_name = parameters.exact_names(
    [field.encode_name for of in (CreateBody, HostConfig) for field in msgspec.structs.fields(of)] + ["Cpuset"]
)


def exact_host_config_beside(body: Any) -> None:
    """The same, of a body whose field names must be spelled as documented. It would spell them
    so.
    """
    if isinstance(body, dict):
        for name in body:
            _check_name(name, "")
    host_config_beside(body)


def inspect(engine: Engine, request: Request) -> Reply | Awaitable[Reply]:
    return _inspect(engine, request, request.parameters["id"])


def inspect_link(engine: Engine, request: Request) -> Reply | Awaitable[Reply]:
    """Inspect the container that a link's name (`/parent/alias`) stands for."""
    name = f"{request.parameters['id']}/{request.parameters['alias']}"
    return _inspect(engine, request, name)


def _inspect(engine: Engine, request: Request, name: str) -> Reply | Awaitable[Reply]:
    container = engine.containers.get(name)
    if container.ending:
        return _inspect_after_end(engine, container, request)
    return _inspect_now(engine, container, request)


async def _inspect_after_end(engine: Engine, container: Container, request: Request) -> Reply:
    await container.end_recorded()
    container.check_present()
    reply = _inspect_now(engine, container, request)
    return reply if isinstance(reply, Reply) else await reply


def _inspect_now(engine: Engine, container: Container, request: Request) -> Reply | Awaitable[Reply]:
    if parameters.boolean(request.query, "size") and request.version.has(Flag.INSPECT_SIZE):
        return _inspect_with_size(engine, container, request)
    if container.log_delivered:
        return _inspect_with_delivery(engine, container, request)
    exec_ids = engine.execs.of(container.id)
    if exec_ids:
        return json_reply(request, _shown(container, request, exec_ids))
    entries = engine.kept.of(request.version.shape(ContainerInspect))
    kept = entries.get(container.id)
    if kept is None or kept.generation != container.generation:
        body = encode_reply(_shown(container, request), request) + b"\n"
        kept = entries[container.id] = Entry(container.generation, body)
    return encoded_reply(request, kept.body)


def _shown(container: Container, request: Request, exec_ids: list[str] | None = None) -> ContainerInspect:
    """The inspect reply. Versions of one shape of it also agree on Config.MacAddress, so that they
    can share an encoded one.
    """
    shown = views.inspect(
        *(container.record, container.directory, container.graph, exec_ids, container.links),
        mac=not request.version.has(Flag.NO_REQUESTED_MAC),
    )
    dropped = container.log_dropped
    return msgspec.structs.replace(shown, log_dropped=dropped) if dropped else shown


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
    own, whole = await listing.sizes(container)
    shown = await _with_delivery(engine, container, _shown(container, request, engine.execs.of(container.id)))
    return json_reply(request, msgspec.structs.replace(shown, size_rw=own, size_root_fs=whole))


async def _inspect_with_delivery(engine: Engine, container: Container, request: Request) -> Reply:
    shown = _shown(container, request, engine.execs.of(container.id))
    return json_reply(request, await _with_delivery(engine, container, shown))


async def _with_delivery(engine: Engine, container: Container, shown: ContainerInspect) -> ContainerInspect:
    """With the state of its lines, if they go to a remote target."""
    if not container.log_delivered:
        return shown
    state = await engine.deliveries.state(container.id)
    return msgspec.structs.replace(shown, log_delivery=state or msgspec.UNSET)


async def attach(engine: Engine, request: Request) -> HijackReply:
    container = engine.containers.get(request.parameters["id"])
    wanted = _attach_query(request)
    hijack = await request.hijack(hijack_type(request, framed=not container.record.config.tty))
    descriptor = hijack.descriptor()
    try:
        await attach_client(container, descriptor, wanted, head=hijack.head, early=hijack.early)
    finally:
        os.close(descriptor)
    return hijack.release()


async def attach_websocket(engine: Engine, request: Request) -> HijackReply:
    container = engine.containers.get(request.parameters["id"])
    wanted = _attach_query(request)
    if not request.version.has(Flag.WEBSOCKET_STREAMS):
        wanted = msgspec.structs.replace(wanted, stdin=True, stdout=True, stderr=True)
    container.check_attach()
    upgrade = await engine.websockets.upgrade(request)
    hijack = await request.hijack(RAW_STREAM)

    async def join(stream: socket.socket) -> None:
        descriptor = stream.fileno()
        await attach_client(container, descriptor, wanted, head=b"", early=b"", framed=False)

    descriptor = hijack.descriptor()
    engine.websockets.start(
        *(upgrade, descriptor, hijack.head, hijack.early, join),
        takes=wanted.stream and wanted.stdin,
        binary=request.version.has(Flag.WEBSOCKET_BINARY),
    )
    return hijack.release()


async def read_logs(engine: Engine, request: Request) -> StreamReply | HijackReply:
    query = request.query
    container = engine.containers.get(request.parameters["id"])
    stdout, stderr = parameters.boolean(query, "stdout"), parameters.boolean(query, "stderr")
    if not (stdout or stderr):
        raise InvalidParameter("Bad parameters: you must choose at least one stream")
    tail = query.get("tail", "all")
    framed = not container.record.config.tty
    lines = logs.Lines(
        stdout=stdout,
        stderr=stderr,
        since_ns=parameters.timestamp(query, "since") if request.version.has(Flag.LOGS_SINCE) else 0,
        until_ns=parameters.timestamp(query, "until"),
        # As in Docker, anything but a number means all lines. So does a number of 16 digits or
        # more.
        tail=int(tail) if tail.isascii() and tail.isdigit() and len(tail) < 16 else None,
        timestamps=parameters.boolean(query, "timestamps"),
        framed=framed,
    )
    details, follow = parameters.boolean(query, "details"), parameters.boolean(query, "follow")
    chunks = await logs.read_container(container, lines, details=details, follow=follow)
    if not request.upgrade:
        return StreamReply(200, chunks, stream_type(request, framed=framed))
    async with contextlib.aclosing(chunks):
        hijack = await request.hijack(stream_type(request, framed=framed))
        descriptor = hijack.descriptor()
        try:
            await send(descriptor, hijack.head, chunks)
        finally:
            os.close(descriptor)
    return hijack.release()


async def stats(engine: Engine, request: Request) -> Reply | StreamReply:
    container = engine.containers.get(request.parameters["id"])
    encode, named = request.version.shape(Stats).encode, request.version.has(Flag.STATS_NAMED)
    if parameters.boolean(request.query, "stream", True):
        return StreamReply(200, statistics.of_container(container, engine.statistics, encode, named=named))
    alone = parameters.boolean(request.query, "one-shot") and request.version.has(Flag.STATS_ONE_SHOT)
    return encoded_reply(
        request, await statistics.once_of_container(container, engine.statistics, encode, named=named, alone=alone)
    )


async def top(engine: Engine, request: Request) -> Reply:
    container = engine.containers.get(request.parameters["id"])
    return json_reply(request, await processes.top(container, request.query.get("ps_args", "")))


async def resize(engine: Engine, request: Request) -> Reply:
    container = engine.containers.get(request.parameters["id"])
    rows, columns = (parameters.integer(request.query, name, minimum=0, maximum=65535) for name in ("h", "w"))
    with _refusals(request):
        await settings.resize(container, rows, columns)
    return empty_reply(request, "text/plain")


async def start(engine: Engine, request: Request) -> Reply:
    _detach_keys(request)
    if request.query.get("checkpoint", ""):
        if engine.config.experimental:
            raise Unimplemented("checkpoint: this engine has no checkpoints")
        raise InvalidParameter("checkpoint is only supported in experimental mode")
    container = engine.containers.get(request.parameters["id"])
    body = (await request.body.read(CREATE_LIMIT)).strip()
    if body not in (b"", b"{}", b"null"):
        if request.version.has(Flag.START_TAKES_NO_HOST_CONFIG):
            raise InvalidParameter("starting container with HostConfig was deprecated since v1.10 and removed in v1.12")
        parameters.check_json(request)
        # As in the body of a create, it may be a field or the fields themselves.
        exact = request.authorization is not None
        prepare = exact_host_config_beside if exact else host_config_beside
        host = parameters.decode_json(body, CreateBody, prepare=prepare, exact=exact).host_config
        await settings.set_host(container, host, engine.containers.support)
    with _refusals(request):
        await container.start()
    return empty_reply(request)


@contextlib.contextmanager
def _refusals(request: Request, prefix: str = "") -> Iterator[None]:
    """Report a verb that the container's state does not permit as the request's version does."""
    try:
        yield
    except WrongState as error:
        if not request.version.has(Flag.STATE_CONFLICTS):
            raise
        words = error.message
        raise Conflict(prefix + words[:1].lower() + words[1:] if prefix else words) from error


def checkpoints(engine: Engine, request: Request) -> Reply:
    disabled = "" if engine.config.experimental else "This experimental feature is disabled by default. "
    raise Unimplemented(f"{disabled}This engine has no checkpoints.")


async def stop(engine: Engine, request: Request) -> Reply:
    await engine.containers.get(request.parameters["id"]).stop(_timeout(request), _stop_signal(request))
    return empty_reply(request)


async def restart(engine: Engine, request: Request) -> Reply:
    await engine.containers.get(request.parameters["id"]).restart(_timeout(request), _stop_signal(request))
    return empty_reply(request)


def _timeout(request: Request) -> int | None:
    return parameters.integer(request.query, "t") if request.query.get("t", "") else None


def _stop_signal(request: Request) -> int | None:
    text = request.query.get("signal", "") if request.version.has(Flag.STOP_SIGNAL) else ""
    return signal_number(text) if text else None


async def kill(engine: Engine, request: Request) -> Reply:
    container = engine.containers.get(request.parameters["id"])
    number = signal_number(request.query.get("signal", "") or "SIGKILL")
    with _refusals(request, f"cannot kill container: {request.parameters['id']}: "):
        await container.kill(number, must_run=request.version.has(Flag.KILL_NEEDS_A_PROCESS))
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
    with _refusals(request):
        await engine.containers.get(request.parameters["id"]).pause()
    return empty_reply(request)


async def unpause(engine: Engine, request: Request) -> Reply:
    with _refusals(request):
        await engine.containers.get(request.parameters["id"]).unpause()
    return empty_reply(request)


async def wait(engine: Engine, request: Request) -> Reply | StreamReply:
    container = engine.containers.get(request.parameters["id"])
    waited = _Waited(container.wait(_condition(request)), request)
    if request.version.has(Flag.WAIT_HEAD):
        # Docker CLIs start the container once they have seen the head.
        return stream_reply(request, waited)
    async with contextlib.aclosing(waited):
        return encoded_reply(request, await anext(waited))


def _condition(request: Request) -> Condition:
    text = request.query.get("condition", "") if request.version.has(Flag.WAIT_CONDITION) else ""
    try:
        return Condition(text) if text else Condition.NOT_RUNNING
    except ValueError:
        raise InvalidParameter(f'invalid condition: "{text}"') from None


class _Waited:
    """The body of a wait's reply: one chunk, at the end. An object, not a generator: see
    `StreamReply`.
    """

    def __init__(self, end: asyncio.Future[Ended], request: Request) -> None:
        self._end = end
        self._request = request
        self._sent = False

    def __aiter__(self) -> _Waited:
        return self

    async def __anext__(self) -> bytes:
        if self._sent:
            raise StopAsyncIteration
        code, why = await self._end
        self._sent = True
        if why and not self._request.version.has(Flag.WAIT_ERROR):
            return b""  # as in Docker: these clients take an empty body for an error
        return encode_reply(Waited(code, WaitError(why) if why else msgspec.UNSET), self._request) + b"\n"

    async def aclose(self) -> None:
        self._end.cancel()


async def prune(engine: Engine, request: Request) -> Reply:
    selection = parameters.prune_selection(request.query, "until")
    return json_reply(request, await prune_containers(engine.containers, selection))


async def remove(engine: Engine, request: Request) -> Reply:
    query = request.query
    force = parameters.boolean(query, "force")
    volumes = parameters.boolean(query, "v")
    container = engine.containers.get(request.parameters["id"])
    if parameters.boolean(query, "link"):
        raise Conflict(f"Conflict, cannot remove the default link name of the container: {request.parameters['id']}")
    await removal.remove(container, force=force, volumes=volumes, called=request.parameters["id"])
    return empty_reply(request)


def remove_unnamed(engine: Engine, request: Request) -> Reply:
    raise InvalidParameter("No container name or ID supplied")


async def remove_link(engine: Engine, request: Request) -> Reply:
    parent, alias = request.parameters["id"], request.parameters["alias"]
    if not parameters.boolean(request.query, "link"):
        raise NotFound(f"No such container: {parent}/{alias}")
    await settings.unlink(engine.containers.get(parent), alias)
    return empty_reply(request)
