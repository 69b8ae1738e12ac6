"""Handlers of "Plugins": decode, one call into the domain, reply."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from engine.api import parameters
from engine.api.engine import Engine
from engine.api.replies import empty_reply, json_lines, json_reply, stream_reply
from engine.api.versions.change import Flag
from engine.errors import Conflict, InvalidParameter, ServerError, WrongState
from engine.http.messages import Reply, Request, StreamReply
from engine.managed_plugins.store import FILTERS
from engine.wire.plugins import PluginInspect, PluginPrivilege

START_TIMEOUT = 30
"""Seconds that a plugin may take to listen, unless the client says otherwise."""
LONGEST_START = 3600

NAME_HEADER = "Docker-Plugin-Name"
"""The name of the plugin here, which the docker CLI enables when the pull has ended."""


@contextlib.contextmanager
def _refusals(request: Request) -> Iterator[None]:
    """Report what the state of a plugin does not permit, as the request's version does."""
    try:
        yield
    except WrongState as error:
        if not request.version.has(Flag.STATE_CONFLICTS):
            raise
        raise Conflict(error.message) from error


def list_all(engine: Engine, request: Request) -> Reply:
    filters = parameters.filters(request.query, FILTERS)
    # "enabled" is what clients send, "enable" what the documentation says
    words = {"enabled": [*filters.get("enable", ()), *filters.get("enabled", ())]}
    enabled = parameters.filter_boolean(words, "enabled")
    return json_reply(request, engine.plugins.select(filters, enabled), PluginInspect)


def inspect(engine: Engine, request: Request) -> Reply:
    return json_reply(request, engine.plugins.inspect(request.parameters["name"]))


async def privileges(engine: Engine, request: Request) -> Reply:
    remote = parameters.required(request.query, "remote")
    found = await engine.plugins.privileges(remote, parameters.credentials(request))
    return json_reply(request, found, PluginPrivilege)


async def pull(engine: Engine, request: Request) -> StreamReply:
    query = request.query
    remote = parameters.required(query, "remote")
    credentials = parameters.credentials(request)
    accepted = await parameters.json_body(request, list[PluginPrivilege])
    with _refusals(request):
        installing = await engine.plugins.pull(remote, query.get("name", ""), credentials, accepted)
    lines = json_lines(installing.run(), request)
    return stream_reply(request, lines, headers=((NAME_HEADER, installing.name),))


async def install(engine: Engine, request: Request) -> Reply:
    """POST /plugins/pull of 1.24: the answer has the privileges that the plugin has now."""
    credentials = parameters.credentials(request)
    try:
        name = parameters.required(request.query, "name")
        installing = await engine.plugins.pull(name, "", credentials, None)
        async for _ in installing.run():
            pass
    except InvalidParameter as error:
        raise ServerError(error.message) from error
    return json_reply(request, installing.privileges, PluginPrivilege)


async def upgrade(engine: Engine, request: Request) -> StreamReply:
    remote = parameters.required(request.query, "remote")
    credentials = parameters.credentials(request)
    accepted = await parameters.json_body(request, list[PluginPrivilege])
    with _refusals(request):
        installing = await engine.plugins.upgrade(request.parameters["name"], remote, credentials, accepted)
    lines = json_lines(installing.run(), request)
    return stream_reply(request, lines, headers=((NAME_HEADER, installing.name),))


async def create(engine: Engine, request: Request) -> Reply:
    name = parameters.required(request.query, "name")
    with _refusals(request):
        await engine.plugins.create(name, request.body)
    return empty_reply(request)


async def enable(engine: Engine, request: Request) -> Reply:
    timeout = parameters.integer(request.query, "timeout", 0, minimum=0, maximum=LONGEST_START) or START_TIMEOUT
    with _refusals(request):
        await engine.plugins.enable(request.parameters["name"], timeout)
    return empty_reply(request, "text/plain; charset=utf-8")


async def disable(engine: Engine, request: Request) -> Reply:
    force = parameters.boolean(request.query, "force") and request.version.has(Flag.PLUGIN_DISABLE_FORCE)
    with _refusals(request):
        await engine.plugins.disable(request.parameters["name"], force)
    return empty_reply(request, "text/plain; charset=utf-8")


async def set_values(engine: Engine, request: Request) -> Reply:
    changes = await parameters.json_body(request, list[str])
    with _refusals(request):
        await engine.plugins.set(request.parameters["name"], changes)
    return empty_reply(request)


async def push(engine: Engine, request: Request) -> StreamReply:
    credentials = parameters.credentials(request)
    sending = await engine.plugins.push(request.parameters["name"], credentials)
    return stream_reply(request, json_lines(sending, request))


async def remove(engine: Engine, request: Request) -> Reply:
    with _refusals(request):
        gone = await engine.plugins.remove(request.parameters["name"], parameters.boolean(request.query, "force"))
    return json_reply(request, gone)


async def remove_silently(engine: Engine, request: Request) -> Reply:
    """DELETE of 1.24: an empty answer."""
    await engine.plugins.remove(request.parameters["name"], parameters.boolean(request.query, "force"))
    return empty_reply(request, "text/plain; charset=utf-8")
