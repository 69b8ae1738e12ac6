"""Builds as buildx makes them on its docker driver: a session, then Control and LLBBridge on
another connection. Written after a trace of buildx 0.29 and 0.13; it shares no code with the
engine.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from tests.support.builds import sessions
from tests.support.builds.sessions import Calling, Directories, Failure, Handler, Peer, every, fields, mapping
from tests.support.builds.sessions import field as part

CONTROL = "/moby.buildkit.v1.Control/"
BRIDGE = "/moby.buildkit.v1.frontend.LLBBridge/"


@dataclass
class Shown:
    """One vertex as the client sees it at the end."""

    name: str = ""
    cached: bool = False
    error: str = ""
    done: bool = False
    times: tuple[int, int] = (0, 0)
    """When it began and ended, in nanoseconds; 0 if it has not."""
    log: bytes = b""
    errors: bytes = b""
    """What was written to standard error."""
    statuses: dict[str, bool] = field(default_factory=dict)
    """Status lines, and whether they are complete."""
    warnings: list[dict[int, Any]] = field(default_factory=list)
    """The fields of each VertexWarning."""


def shown(reports: list[bytes]) -> list[Shown]:
    """The vertices that a Status call reports."""
    found: dict[bytes, Shown] = {}
    for report in reports:
        for kind, data in every(report):
            values = fields(data)
            if kind == 1:
                vertex = found.setdefault(values[1], Shown())
                vertex.name = values[3].decode()
                vertex.cached, vertex.error = bool(values.get(4)), values.get(7, b"").decode()
                assert 5 in values
                vertex.done = 6 in values
                vertex.times = (_time(values[5]), _time(values.get(6, b"")))
            elif kind == 2:
                found[values[2]].statuses[values[1].decode()] = 8 in values
            elif kind == 4:
                found[values[1]].warnings.append(values)
            elif kind == 3:
                vertex = found[values[1]]
                if values[3] == 2:
                    vertex.errors += values[4]
                else:
                    vertex.log += values[4]
    return list(found.values())


def _time(data: bytes) -> int:
    values = fields(data)
    return values.get(1, 0) * 1_000_000_000 + values.get(2, 0)


@dataclass
class Built:
    """A build that has ended."""

    response: dict[str, str]
    vertices: list[Shown]
    failure: Failure | None
    documents: dict[str, bytes]
    """The answer to a call, instead of an image."""

    def vertex(self, name: str) -> Shown:
        (found,) = [vertex for vertex in self.vertices if vertex.name == name]
        return found

    @property
    def image_id(self) -> str:
        assert self.failure is None, self.failure
        return self.response["containerimage.config.digest"]


class Build:
    """One build under way. `names`: of the image. `options`: of the frontend. `attributes`: of the
    exporter.
    """

    def __init__(
        self,
        socket: str,
        directories: Directories,
        *,
        names: str = "",
        options: Mapping[str, str] | None = None,
        services: Mapping[str, Handler] | None = None,
        frontend: str = "dockerfile.v0",
        exporter: str = "moby",
        exporters: Sequence[str] | None = None,
        attributes: Mapping[str, str] | None = None,
        direct: bool = False,
        inputs: Mapping[str, bytes] | None = None,
        finish: bool = True,
        more: bytes = b"",
    ) -> None:
        """`direct`: the frontend is named in Control/Solve, as older clients do. `inputs`:
        definitions of other builds. `exporters`: instead of one. Without `finish` the build begins
        with `evaluate` or `finish`. `more`: further fields of Control/Solve.
        """
        self._open = ExitStack()
        handlers = sessions.of_files(directories) | dict(services or {})
        self.session, self.peer = self._open.enter_context(sessions.session(socket, handlers))
        self.caller = self._open.enter_context(sessions.Caller(socket))
        self.ref = secrets.token_hex(12)
        asked = dict(options or {})
        exported = ({"name": names} if names else {}) | dict(attributes or {})
        request = part(1, self.ref) + part(5, self.session) + more
        if direct:
            request += part(3, exporter) + mapping(4, exported) + part(6, frontend) + mapping(7, asked)
        else:
            for kind in (exporter,) if exporters is None else exporters:
                request += part(13, part(1, kind) + mapping(2, exported if kind == "moby" else {}))
        self.solving = self.caller.call(f"{CONTROL}Solve")
        self.solving.send(request, last=True)
        self.status = self.caller.call(f"{CONTROL}Status")
        self.status.send(part(1, self.ref), last=True)
        self.refused: Failure | None = None
        self._about = {"buildkit-controlapi-buildid": self.ref}
        self._documents: dict[str, bytes] = {}
        self.definition = b""
        """Stands for the result when another build takes it as input."""
        if not direct:
            self._begin(frontend, asked, inputs or {})
            if finish:
                self.finish()

    def _begin(self, frontend: str, asked: Mapping[str, str], inputs: Mapping[str, bytes]) -> None:
        pong = self.caller.ask(f"{BRIDGE}Ping", b"", self._about)
        assert fields(pong)[3] and b"exporter.multiple" in pong
        request = part(2, frontend) + mapping(3, asked) + part(5, 1) + part(6, 1)
        for name, definition in inputs.items():
            request += part(13, part(1, name) + part(2, definition))
        try:
            answer = self.caller.ask(f"{BRIDGE}Solve", request, self._about)
        except Failure as error:
            self.refused = error
            self._returned = part(2, part(1, error.status) + part(2, error.message))
        else:
            self._returned = part(1, fields(answer)[3])
            result = fields(answer)[3]
            entries = [fields(entry) for number, entry in every(result) if number == 10]
            self._documents = {entry[1].decode(): entry[2] for entry in entries}
            if not entries:
                ref = fields(fields(result)[3])
                self._result, self.definition = ref[1].decode(), ref[2]

    def evaluate(self) -> None:
        """Build the result now. Raises Failure."""
        self.caller.ask(f"{BRIDGE}Evaluate", part(1, self._result), self._about)

    def finish(self) -> None:
        """Return the result, so that the build goes on to its end."""
        self.caller.ask(f"{BRIDGE}Return", self._returned, self._about)

    def result(self) -> Built:
        """Wait for the end."""
        with self._open:
            failure, response = None, b""
            try:
                (response,) = self.solving.all()
            except Failure as error:
                failure = error
            entries = [fields(entry) for _, entry in every(response)]
            found = {entry[1].decode(): entry[2].decode() for entry in entries}
            reports: list[bytes] = []
            try:
                while (report := self.status.receive()) is not None:
                    reports.append(report)
            except Failure as error:
                failure = failure or error
            return Built(found, shown(reports), failure, self._documents)


def web_file(url: str, **attributes: str) -> bytes:
    """The definition that stands for a file of a web server. A keyword `x` is the attribute
    `http.x`.
    """
    named = mapping(2, {f"http.{name}": value for name, value in attributes.items()})
    source = part(3, part(1, url) + named)
    digest = f"sha256:{hashlib.sha256(source).hexdigest()}"
    described = part(1, digest) + part(2, mapping(2, {"llb.customname": f"load {url}"}))
    return part(1, source) + part(1, part(1, part(1, digest))) + part(2, described)


def dockerfile(text: str, /, **files: bytes | sessions.Node) -> Directories:
    """A context with a Dockerfile and other files."""
    return {"dockerfile": {"Dockerfile": text.encode()}, "context": {"Dockerfile": text.encode(), **files}}


__all__ = ["BRIDGE", "CONTROL", "Build", "Built", "Calling", "Peer", "Shown", "dockerfile", "shown", "web_file"]
