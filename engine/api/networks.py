"""Handlers of "Networks": decode, one call into the domain, reply."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable

import msgspec

from engine.api import own_networks, parameters, swarm_mode
from engine.api.engine import Engine
from engine.api.replies import empty_reply, json_reply
from engine.api.versions import Flag
from engine.common.network_rules import FILTERS, OVERLAY, PREDEFINED_NAMES, SWARM
from engine.containers import settings
from engine.errors import InvalidParameter, NotFound
from engine.http.messages import Reply, Request
from engine.wire.networks import NetworkConnect, NetworkCreate, NetworkDisconnect, NetworksPruned


def list_all(engine: Engine, request: Request) -> Reply | Awaitable[Reply]:
    if engine.cluster.is_manager:
        return swarm_mode.networks("list_all")(engine, request)
    return own_networks.listed(engine, request, parameters.filters(request.query, FILTERS))


def inspect(engine: Engine, request: Request) -> Reply | Awaitable[Reply]:
    verbose = parameters.strict_boolean(request.query, "verbose")
    text = request.parameters["id"]
    scope = request.query.get("scope", "")
    if engine.cluster.is_manager:
        if scope != SWARM or (name := _node_local(engine, text)) is None:
            return swarm_mode.networks("inspect")(engine, request, scope, verbose)
        # docker CLIs look up the networks of a service, and send the id that they find.
        shown = msgspec.structs.replace(
            engine.networks.inspected(engine.networks.get(name)), id=name, scope=SWARM, containers={}
        )
        return json_reply(request, shown)
    network = own_networks.own(engine, text)
    if scope not in ("", network.record.scope):
        raise NotFound(f"network {text} not found in scope {scope}")
    return own_networks.inspected(engine, request, network)


def _node_local(engine: Engine, text: str) -> str | None:
    """The name of the network that each node has, if this is its name or id."""
    for each in engine.networks:
        if each.record.name in PREDEFINED_NAMES and text in (each.record.name, each.record.id):
            return each.record.name
    return None


async def create(engine: Engine, request: Request) -> Reply:
    body = await parameters.json_body(request, NetworkCreate)
    is_manager = engine.cluster.is_manager
    if body.driver == OVERLAY and not body.config_only:
        if not is_manager:
            raise swarm_mode.refusal(request, swarm_mode.NO_MANAGER)
        reply: Reply = await swarm_mode.networks("create")(engine, request, body)
        return reply
    unique = request.version.has(Flag.UNIQUE_NETWORK_NAMES) or body.check_duplicate
    if unique and is_manager:
        await swarm_mode.networks("check_unique")(engine, request, body.name)
    return json_reply(request, await engine.networks.create(body, unique))


async def connect(engine: Engine, request: Request) -> Reply:
    body = await parameters.json_body(request, NetworkConnect)
    network = _identified(engine, request.parameters["id"])
    await settings.connect(engine.containers.get(_named(body.container)), network, body.endpoint_config)
    return empty_reply(request)


async def disconnect(engine: Engine, request: Request) -> Reply:
    body = await parameters.json_body(request, NetworkDisconnect)
    network = request.parameters["id"]
    with contextlib.suppress(NotFound):  # a container that does not run can leave one that has gone
        network = engine.networks.get(network).record.id
    await settings.disconnect(engine.containers.get(_named(body.container)), network)
    return empty_reply(request)


def _identified(engine: Engine, text: str) -> str:
    """The id of a network. In a swarm it may be one that this node does not have yet: then it is
    what the client sent.
    """
    try:
        return engine.networks.get(text).record.id
    except NotFound:
        if not engine.cluster.active:
            raise
        return text


def _named(container: str) -> str:
    if not container:
        raise InvalidParameter("Container: a container's name or id is required")
    return container


async def remove(engine: Engine, request: Request) -> Reply:
    if engine.cluster.is_manager:
        reply: Reply = await swarm_mode.networks("remove")(engine, request)
        return reply
    if own_networks.own(engine, request.parameters["id"]).record.scope == SWARM:
        raise swarm_mode.refusal(request, swarm_mode.NO_MANAGER)
    return await own_networks.removed(engine, request)


async def prune(engine: Engine, request: Request) -> Reply:
    if engine.cluster.is_manager:
        reply: Reply = await swarm_mode.networks("prune")(engine, request)
        return reply
    names = await own_networks.pruned(engine, parameters.prune_selection(request.query, "until"))
    return json_reply(request, NetworksPruned(names or None))
