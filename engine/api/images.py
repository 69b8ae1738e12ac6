"""Handlers of "Images": decode, one call into the domain, reply."""

from __future__ import annotations

from engine.api import parameters
from engine.api.engine import Engine
from engine.api.replies import empty_reply, json_lines, json_reply, stream_reply
from engine.errors import InvalidParameter
from engine.http.messages import Reply, Request, StreamReply
from engine.images.credentials import registry_auth
from engine.images.store import FILTERS
from engine.wire.images import Deletion, HistoryItem, ImageSummary


def list_all(engine: Engine, request: Request) -> Reply:
    query = request.query
    parameters.boolean(query, "all")  # checked, but there are no intermediate images that it would add
    filters = parameters.filters(query, FILTERS)
    parameters.filter_boolean(filters, "dangling")
    found = engine.images.summaries(
        digests=parameters.boolean(query, "digests"), name=query.get("filter", ""), filters=filters
    )
    return json_reply(request, found, ImageSummary)


async def create(engine: Engine, request: Request) -> StreamReply:
    query = request.query
    image = query.get("fromImage", "")
    if not image:
        raise InvalidParameter("missing parameter: fromImage or fromSrc")
    credentials = registry_auth(request.headers.get("x-registry-auth"))
    pulling = await engine.remote.pull(image, query.get("tag", ""), credentials)
    return stream_reply(request, json_lines(pulling.run(), request))


def inspect(engine: Engine, request: Request) -> Reply:
    return json_reply(request, engine.images.inspect(request.parameters["name"]))


def history(engine: Engine, request: Request) -> Reply:
    return json_reply(request, engine.images.history(request.parameters["name"]), HistoryItem)


async def tag(engine: Engine, request: Request) -> Reply:
    query = request.query
    parameters.boolean(query, "force")  # a name is always taken from its former image, as Docker does since 1.10
    await engine.images.tag(request.parameters["name"], parameters.required(query, "repo"), query.get("tag", ""))
    return empty_reply(request)


async def delete(engine: Engine, request: Request) -> Reply:
    query = request.query
    parameters.boolean(query, "noprune")  # there are no untagged parents that could be kept
    done = await engine.images.delete(request.parameters["name"], force=parameters.boolean(query, "force"))
    return json_reply(request, done, Deletion)


def load(engine: Engine, request: Request) -> StreamReply:
    quiet = parameters.boolean(request.query, "quiet")
    return stream_reply(request, json_lines(engine.images.load(request.body, quiet), request))
