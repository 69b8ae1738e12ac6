"""The API as an application of `engine/http`: version prefix, route, handler.

Not here: the table (`routes.py`), error numbers (`replies.py`), version differences (`versions/`).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Iterable, Mapping

from engine import __version__
from engine.api import replies, routes
from engine.api.engine import Engine
from engine.api.versions import LATEST, NEWEST, VERSIONS, Flag, Version, spoken
from engine.errors import InvalidParameter, NotFound
from engine.http.messages import NO_PARAMETERS, AnyReply, Reply, Request
from engine.http.router import Router

REMEMBERED = 1024
"""Paths whose route is remembered; then all are forgotten."""


class Application:
    """One engine's API."""

    def __init__(self, engine: Engine, table: Iterable[routes.Route] = routes.ROUTES) -> None:
        self.headers = (
            ("Server", f"engined/{__version__} (linux)"),
            ("Api-Version", NEWEST),
            ("Docker-Experimental", str(engine.config.experimental).lower()),
            ("Ostype", "linux"),
        )
        self._engine = engine
        self._router = Router(table)
        self._found: dict[tuple[str, str], tuple[routes.Route, Version, Mapping[str, str]]] = {}
        """Route, version and path parameters by method and path."""

    def __call__(self, request: Request) -> AnyReply | Awaitable[AnyReply]:
        """Answer a request. Raises NotFound for a path or method without a route in that version,
        InvalidParameter for a version that is not served, and for a route of a later version.
        """
        key = (request.method, request.path)
        found = self._found.get(key)
        if found is None:
            if request.method == "OPTIONS":
                return Reply(200)
            if b"//" in request.target.partition(b"?")[0]:
                return _moved(request)
            found = self._find(*key)
            if len(self._found) >= REMEMBERED:
                self._found.clear()
            if "//" not in request.path:
                self._found[key] = found
        route, request.version, request.parameters = found
        request.status = route.status
        request.cancellable = route.mode is routes.STREAM
        return route.handler(self._engine, request)

    def _find(self, method: str, path: str) -> tuple[routes.Route, Version, Mapping[str, str]]:
        version, below = split_version(path)
        rows, parameters = self._router.match(method, _collapsed(below)) or ((), NO_PARAMETERS)
        for route in rows:
            if route.since <= version.release < route.until:
                return route, version, parameters
        later = [route.since for route in rows if route.since > version.release]
        if later and version.has(Flag.LATER_ROUTES_NAMED):
            major, minor = min(later)
            raise InvalidParameter(f"{method} {below[:300]} requires minimum API version {major}.{minor}")
        raise NotFound("page not found")

    def is_hijack(self, method: str, path: str) -> bool:
        """True if the route takes over the connection. False if the path's version is not served:
        the answer is then an error, not a stream.
        """
        try:
            return self._find(method, path)[0].mode is routes.HIJACK
        except (InvalidParameter, NotFound):
            return False

    def error_reply(self, error: BaseException) -> Reply:
        return replies.error_reply(error)


def _moved(request: Request) -> Reply:
    """The answer to a path with double slashes: 301 to the path with single ones, as Go's router
    does.
    """
    path, question, query = request.target.partition(b"?")
    target = _SLASHES.sub(b"/", path) + question + query
    return Reply(301, headers=(("Location", target.decode("latin-1")),))


def _collapsed(path: str) -> str:
    """The path with single slashes. `/containers/%2Fname/json` means the container `name`."""
    return _DECODED_SLASHES.sub("/", path) if "//" in path else path


_SLASHES = re.compile(rb"//+")
_DECODED_SLASHES = re.compile("//+")


def split_version(path: str) -> tuple[Version, str]:
    """The version that the path's first segment names (the newest when it names none), and the path
    below it.
    """
    if path[:2] == "/v" and path[2:3].isdigit():
        segment, slash, rest = path[1:].partition("/")
        version = VERSIONS.get(segment[1:])
        if version is not None:
            return version, slash + rest
        if all(part.isdigit() for part in segment[1:].split(".")):
            return spoken(segment[1:]), slash + rest
    return LATEST, path
