"""The API as an application of `engine/http`: version prefix, route, handler.

Not here: the table (`routes.py`), error numbers (`replies.py`), version differences (`versions.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable

from engine import __version__
from engine.api import replies, routes
from engine.api.engine import Engine
from engine.api.versions import LATEST, NEWEST, VERSIONS, Version, spoken
from engine.errors import InvalidParameter, NotFound
from engine.http.messages import AnyReply, Reply, Request
from engine.http.router import Router


class Application:
    """One engine's API."""

    headers = (
        ("Server", f"engined/{__version__} (linux)"),
        ("Api-Version", NEWEST),
        ("Docker-Experimental", "false"),
        ("Ostype", "linux"),
    )

    def __init__(self, engine: Engine, table: Iterable[routes.Route] = routes.ROUTES) -> None:
        self._engine = engine
        self._router = Router(table)

    def __call__(self, request: Request) -> AnyReply | Awaitable[AnyReply]:
        """Raises NotFound for a path or method that no route of the version has, InvalidParameter for a version not
        spoken.
        """
        version, path = split_version(request.path)
        found = self._router.match(request.method, path)
        if found is not None:
            rows, parameters = found
            for route in rows:
                if route.since <= version.release < route.until:
                    request.version = version
                    request.parameters = parameters
                    request.status = route.status
                    request.cancellable = route.mode is routes.STREAM
                    return route.handler(self._engine, request)
        raise NotFound("page not found")

    def is_hijack(self, method: str, path: str) -> bool:
        """The path may be of a version not spoken: then the answer is an error, and no stream."""
        try:
            version, path = split_version(path)
        except InvalidParameter:
            return False
        found = self._router.match(method, path)
        return found is not None and any(
            route.mode is routes.HIJACK and route.since <= version.release < route.until for route in found[0]
        )

    def error_reply(self, error: BaseException) -> Reply:
        return replies.error_reply(error)


def split_version(path: str) -> tuple[Version, str]:
    """The version that the path's first segment names (the newest when it names none), and the path below it."""
    if path[:2] == "/v" and path[2:3].isdigit():
        segment, slash, rest = path[1:].partition("/")
        version = VERSIONS.get(segment[1:])
        if version is not None:
            return version, slash + rest
        if all(part.isdigit() for part in segment[1:].split(".")):
            return spoken(segment[1:]), slash + rest
    return LATEST, path
