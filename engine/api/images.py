"""Handlers of "Images": decode, one call into the domain, reply."""

from __future__ import annotations

import time

from engine import metrics
from engine.api import parameters
from engine.api.engine import Engine
from engine.api.replies import empty_reply, json_lines, json_reply, started, stream_reply, upload_reply
from engine.api.versions.change import Flag
from engine.containers.commit import CommitOptions
from engine.containers.commit import commit as commit_container
from engine.errors import InvalidParameter, NotFound, Unauthorized, Unimplemented
from engine.http.messages import Reply, Request, StreamReply
from engine.images import platforms, reference, views
from engine.images.credentials import Credentials
from engine.images.prune import prune as prune_images
from engine.images.remote import MAX_SEARCH_LIMIT, SEARCH_FILTERS, SEARCH_LIMIT, Search
from engine.images.save import save
from engine.wire.containers import Config
from engine.wire.images import Committed, Deletion, HistoryItem, ImageSummary, LoggedIn, Platform, SearchResult


def list_all(engine: Engine, request: Request) -> Reply:
    query = request.query
    filters = parameters.filters(query, views.FILTERS)
    parameters.filter_boolean(filters, "dangling")
    # Digests are listed whether requested or not: docker CLIs detect dangling images by them.
    # Manifests are not, as with Docker's image store of this kind: an image has one platform.
    parameters.boolean(query, "digests")
    has = request.version.has
    if (
        has(Flag.IMAGE_IDENTITY)
        and parameters.boolean(query, "identity")
        and not parameters.boolean(query, "manifests")
    ):
        raise InvalidParameter("conflicting options: identity needs manifests")
    shared = parameters.boolean(query, "shared-size") and has(Flag.SHARED_SIZE)
    found = views.summaries(
        engine.images.index,
        intermediate=parameters.boolean(query, "all"),
        name="" if has(Flag.IMAGES_WITHOUT_FILTER) else query.get("filter", ""),
        filters=filters,
        until_ns=parameters.filter_time(filters, "until"),
        shared=engine.images.sizes.shared if shared else None,
        containers=engine.images.containers() if has(Flag.IMAGE_CONTAINERS) else None,
    )
    return json_reply(request, found, ImageSummary)


async def prune(engine: Engine, request: Request) -> Reply:
    selection = parameters.prune_selection(request.query, "dangling", "until")
    dangling = parameters.filter_boolean(dict(selection.others), "dangling")
    return json_reply(request, await prune_images(engine.images, engine.events, selection, dangling is not False))


async def create(engine: Engine, request: Request) -> StreamReply:
    query = request.query
    image, source = query.get("fromImage", ""), query.get("fromSrc", "")
    tag = query.get("tag", "")
    platform = None
    if query.get("platform", "") and request.version.has(Flag.PULL_PLATFORM):
        platform = platforms.parse(query.get("platform", ""))
    if image:
        try:
            pulling = await engine.remote.pull(image, tag, parameters.credentials(request), platform)
        except Unauthorized as error:
            if request.version.has(Flag.REFUSED_CREDENTIALS):
                raise
            raise NotFound(error.message) from error
        return stream_reply(request, json_lines(pulling.run(), request))
    if not source:
        raise InvalidParameter("missing parameter: fromImage or fromSrc")
    changes, message = query.get_all("changes"), query.get("message", "")
    steps = engine.remote.bring(source, request.body, query.get("repo", ""), tag, changes, message, platform)
    # What cannot be fetched becomes the reply's status.
    return await upload_reply(request, steps if source == "-" else await started(steps))


def _platform(request: Request, flag: Flag, name: str = "platform") -> Platform | None:
    """A platform as JSON, in a version that takes it. Raises InvalidParameter, also for several:
    an image has one.
    """
    if not request.version.has(flag):
        return None
    given = [platforms.from_json(text) for text in request.query.get_all(name) if text]
    if len(given) > 1:
        raise InvalidParameter(
            f"{name}: multiple platforms are not supported: an image of this engine has one platform"
        )
    return given[0] if given else None


async def commit(engine: Engine, request: Request) -> Reply:
    query = request.query
    container = engine.containers.get(parameters.required(query, "container"))
    repository = query.get("repo", "")
    options = CommitOptions(
        tag=reference.with_tag(repository, query.get("tag", "")) if repository else None,
        author=query.get("author", ""),
        comment=query.get("comment", ""),
        pause=parameters.boolean(query, "pause", default=True),
        changes=query.get_all("changes"),
        config=await parameters.json_body(request, Config, optional=True),
    )
    began = time.monotonic()
    image_id = await commit_container(container, engine.images, options)
    metrics.CONTAINER_ACTIONS.since("commit", began)
    return json_reply(request, Committed(id=image_id))


def inspect(engine: Engine, request: Request) -> Reply:
    has = request.version.has
    platform = _platform(request, Flag.INSPECT_PLATFORM)
    if platform is not None and has(Flag.INSPECT_MANIFESTS) and parameters.boolean(request.query, "manifests"):
        raise InvalidParameter("conflicting options: manifests and platform options cannot both be set")
    # docker-compose 1 speaks the newest version, and recreates no container without
    # ContainerConfig.
    maker = not has(Flag.IMAGE_WITHOUT_MAKER) or request.headers.get("user-agent", "").startswith("docker-compose/1.")
    images = engine.images
    found = views.inspect(images.index, images.snapshots, request.parameters["name"], platform, maker=maker)
    return json_reply(request, found)


def history(engine: Engine, request: Request) -> Reply:
    platform = _platform(request, Flag.IMAGE_PLATFORM)
    began = time.monotonic()
    found = views.history(engine.images.index, engine.images.snapshots, request.parameters["name"], platform)
    metrics.IMAGE_ACTIONS.since("history", began)
    return json_reply(request, found, HistoryItem)


async def push(engine: Engine, request: Request) -> StreamReply:
    platform = _platform(request, Flag.PUSH_PLATFORM)
    name, tag = request.parameters["name"], request.query.get("tag", "")
    sending = await engine.remote.push(name, tag, parameters.credentials(request), platform)
    return stream_reply(request, json_lines(sending.run(), request))


async def inspect_remote(engine: Engine, request: Request) -> Reply:
    return json_reply(
        request, await engine.remote.described(request.parameters["name"], parameters.credentials(request))
    )


def attestations(engine: Engine, request: Request) -> Reply:
    """An image store that keeps no manifests of several platforms keeps none about an image."""
    engine.images.get(request.parameters["name"])
    raise Unimplemented("attestations are not supported: this engine keeps one manifest for an image")


async def log_in(engine: Engine, request: Request) -> Reply:
    credentials = (await parameters.json_body(request, Credentials, typed=False)).opened()
    token = await engine.remote.log_in(credentials)
    return json_reply(request, LoggedIn(status="Login Succeeded", identity_token=token))


async def search(engine: Engine, request: Request) -> Reply:
    query = request.query
    limit = parameters.integer(query, "limit", SEARCH_LIMIT, minimum=0, maximum=MAX_SEARCH_LIMIT) or SEARCH_LIMIT
    filters = parameters.filters(query, SEARCH_FILTERS)
    wanted = Search(
        query.get("term", ""),
        limit,
        parameters.filter_integer(filters, "stars"),
        parameters.filter_boolean(filters, "is-automated"),
        parameters.filter_boolean(filters, "is-official"),
    )
    found = await engine.remote.search(wanted, parameters.credentials(request))
    return json_reply(request, found, SearchResult)


async def tag(engine: Engine, request: Request) -> Reply:
    query = request.query
    # A name always moves from the image that had it before, as in Docker since 1.10.
    parameters.boolean(query, "force")
    await engine.images.tag(request.parameters["name"], parameters.required(query, "repo"), query.get("tag", ""))
    return empty_reply(request)


async def delete(engine: Engine, request: Request) -> Reply:
    query = request.query
    force, prune = parameters.boolean(query, "force"), not parameters.boolean(query, "noprune")
    platform = _platform(request, Flag.DELETE_PLATFORMS, "platforms")
    began = time.monotonic()
    done = await engine.images.delete(request.parameters["name"], force, prune, platform)
    metrics.IMAGE_ACTIONS.since("delete", began)
    return json_reply(request, done, Deletion)


async def save_one(engine: Engine, request: Request) -> StreamReply:
    platform = _platform(request, Flag.IMAGE_PLATFORM)
    archive = await save(engine.images, engine.events, [request.parameters["name"]], platform)
    return stream_reply(request, archive, "application/x-tar")


async def save_many(engine: Engine, request: Request) -> StreamReply:
    platform = _platform(request, Flag.IMAGE_PLATFORM)
    archive = await save(engine.images, engine.events, request.query.get_all("names"), platform)
    return stream_reply(request, archive, "application/x-tar")


async def load(engine: Engine, request: Request) -> StreamReply:
    quiet = parameters.boolean(request.query, "quiet")
    platform = _platform(request, Flag.IMAGE_PLATFORM)
    return await upload_reply(request, engine.images.load(request.body, quiet, platform))
