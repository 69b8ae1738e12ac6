"""GET /services/{id}/logs and /tasks/{id}/logs: the lines of all tasks as one stream.

The stream has frames like a container's log; it is raw when the tasks have a terminal. With
`details`, each line begins with its node, service and task, by which the docker CLI names it.

Not here: who collects the lines (`engine/manager/logs.py`), and who reads them
(`engine/cluster/logs.py`).
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from typing import Any, Protocol
from urllib.parse import quote_plus

import msgspec

from engine.api import parameters
from engine.api.engine import Engine
from engine.api.replies import stream_type
from engine.common import times
from engine.errors import EngineError, InvalidParameter
from engine.http.messages import Request, StreamReply
from engine.wire.services import Service
from engine.wire.tasks import Task, TaskSpec

STDOUT, STDERR, FAILURE = 1, 2, 3
"""Streams of frames. Clients show the last as an error of the engine."""

_HEADER = struct.Struct(">BxxxL")

_CONTEXT = "com.docker.swarm"


class Line(Protocol):
    """One line (`engine.swarm_session.messages.LogLine`)."""

    @property
    def task(self) -> str: ...
    @property
    def node(self) -> str: ...
    @property
    def service(self) -> str: ...
    @property
    def stream(self) -> int: ...
    @property
    def time(self) -> int: ...
    @property
    def data(self) -> bytes: ...
    @property
    def details(self) -> dict[str, str]: ...


async def reply(engine: Engine, request: Request, of: str) -> StreamReply:
    """`of`: "service" or "task". Errors that have a status come before the stream begins."""
    query = request.query
    asked = {
        "stdout": parameters.boolean(query, "stdout"),
        "stderr": parameters.boolean(query, "stderr"),
        "follow": parameters.boolean(query, "follow"),
        "details": parameters.boolean(query, "details"),
        "timestamps": parameters.boolean(query, "timestamps"),
        "since": parameters.timestamp(query, "since"),
        "tail": _tail(query.get("tail", "all")),
    }
    if not (asked["stdout"] or asked["stderr"]):
        raise InvalidParameter("Bad parameters: you must choose at least one stream")
    name = request.parameters["id"]
    done = await engine.cluster.call(f"{of}s.inspect", name)
    template: TaskSpec
    if of == "service":
        service = msgspec.json.decode(done.body, type=Service)
        name, template = service.id, service.spec.task_template
    else:
        task = msgspec.json.decode(done.body, type=Task)
        name, template = task.id, task.spec
    framed = template.container_spec is None or not template.container_spec.tty
    lines = engine.cluster.follow(of, name, asked)
    return StreamReply(request.status, LogFeed(lines, asked, framed=framed), stream_type(request, framed=framed))


def _tail(text: str) -> int:
    """A number of lines; anything else means all, which is -1."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else -1


class LogFeed:
    """Lines as chunks of a body. An object, not a generator: see `StreamReply`."""

    def __init__(self, lines: AsyncIterator[tuple[Line, ...]], wanted: dict[str, Any], *, framed: bool) -> None:
        self._lines = lines
        self._details = bool(wanted["details"])
        self._timestamps = bool(wanted["timestamps"])
        self._streams = {STDOUT: wanted["stdout"], STDERR: wanted["stderr"], FAILURE: True}
        self._framed = framed
        self._ended = False

    def __aiter__(self) -> LogFeed:
        return self

    async def __anext__(self) -> bytes:
        if self._ended:
            raise StopAsyncIteration
        try:
            lines = await anext(self._lines)
        except EngineError as error:
            self._ended = True
            return self._written(FAILURE, b"Error grabbing logs: " + error.message.encode() + b"\n")
        return b"".join([self._shown(line) for line in lines if self._streams.get(line.stream)])

    def _shown(self, line: Line) -> bytes:
        if line.stream == FAILURE:
            return self._written(FAILURE, b"Error grabbing logs: " + line.data.rstrip(b"\n") + b"\n")
        text = line.data
        if self._details:
            text = _attributes(line) + b" " + text
        if self._timestamps:
            text = _fixed(line.time) + b" " + text
        return self._written(line.stream, text)

    def _written(self, stream: int, text: bytes) -> bytes:
        return _HEADER.pack(stream, len(text)) + text if self._framed else text

    async def aclose(self) -> None:
        close = getattr(self._lines, "aclose", None)
        if close is not None:
            await close()


def _fixed(ns: int) -> bytes:
    """RFC 3339 with nine digits, as in the logs of containers."""
    seconds, fraction = divmod(ns, 1_000_000_000)
    return b"%b.%09dZ" % (times.rfc3339_of_file(seconds * 1_000_000_000)[:-1].encode(), fraction)


def _attributes(line: Line) -> bytes:
    """`name=value,…`, sorted and percent-encoded as Docker does."""
    context = {
        f"{_CONTEXT}.node.id": line.node,
        f"{_CONTEXT}.service.id": line.service,
        f"{_CONTEXT}.task.id": line.task,
    }
    shown = line.details | context
    return ",".join(f"{quote_plus(name)}={quote_plus(shown[name])}" for name in sorted(shown)).encode()
