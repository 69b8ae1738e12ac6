"""Handlers of "Networks": decode, one call into the domain, reply."""

from __future__ import annotations

from collections.abc import Awaitable

import msgspec

from engine import network_rules
from engine.api import parameters, swarm_mode
from engine.api.engine import Engine
from engine.api.kept import Entry
from engine.api.replies import empty_reply, encoded_reply, json_reply
from engine.api.versions import Flag
from engine.containers import settings
from engine.errors import InvalidParameter, NotFound
from engine.http.messages import Reply, Request
from engine.network_rules import FILTERS
from engine.networks.endpoints import Network
from engine.pruning import Selection
from engine.wire.networks import Network as Shown
from engine.wire.networks import NetworkConnect, NetworkCreate, NetworkDisconnect, NetworkInspect, NetworksPruned

NODE_LOCAL = ("bridge", "host", "none")
"""Networks that each node of a swarm has. Services use them by their names."""


SWARM, OVERLAY = "swarm", "overlay"
"""The scope of networks of a swarm, and their driver."""


def list_all(engine: Engine, request: Request) -> Reply | Awaitable[Reply]:
    if engine.cluster.is_manager:
        return swarm_mode.networks("list_all")(engine, request)
    return listed(engine, request, parameters.filters(request.query, FILTERS))


def listed(engine: Engine, request: Request, filters: dict[str, list[str]]) -> Reply:
    """The networks of this engine, and those of a swarm that its manager has sent to this node."""
    whole = not request.version.has(Flag.NETWORKS_LISTED_SHORT)
    found = engine.networks.select(filters)
    found += [each for each in _absent(engine) if network_rules.matches(each.record, filters, False)]
    return encoded_reply(request, b"[" + b",".join([encoded(engine, each, request, whole) for each in found]) + b"]\n")


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
    network = own(engine, text)
    if scope not in ("", network.record.scope):
        raise NotFound(f"network {text} not found in scope {scope}")
    return inspected(engine, request, network)


def _absent(engine: Engine) -> list[Network]:
    """The networks of a swarm that this node knows, and no container of it uses."""
    known = (record for record in engine.cluster.networks() if record.id not in engine.networks.by_id)
    return [engine.networks.absent(record) for record in known]


def own(engine: Engine, text: str) -> Network:
    """The network of that name, id or unique prefix of an id, as far as this node knows. Raises as
    `Networks.get`.
    """
    try:
        return engine.networks.get(text)
    except NotFound:
        absent = _absent(engine)
        for each in absent:
            if text in (each.record.id, each.record.name):
                return each
        found = [each for each in absent if text and each.record.id.startswith(text)]
        if len(found) != 1:
            raise
        return found[0]


def _node_local(engine: Engine, text: str) -> str | None:
    """The name of the network that each node has, if this is its name or id."""
    for each in engine.networks:
        if each.record.name in NODE_LOCAL and text in (each.record.name, each.record.id):
            return each.record.name
    return None


def inspected(engine: Engine, request: Request, network: Network) -> Reply:
    return encoded_reply(request, encoded(engine, network, request) + b"\n")


def encoded(engine: Engine, network: Network, request: Request, whole: bool = True) -> bytes:
    """The encoded network, kept until the network changes. `whole`: as inspect shows it."""
    shape = request.version.shape(NetworkInspect if whole else Shown)
    if network.record.scope == SWARM:  # comes and goes, and counts its changes from 0 then
        body: bytes = shape.encode(engine.networks.inspected(network) if whole else engine.networks.shown(network))
        return body
    entries = engine.kept.of(shape)
    kept = entries.get(network.record.id)
    if kept is None or kept.generation != network.generation:
        body = shape.encode(engine.networks.inspected(network) if whole else engine.networks.shown(network))
        kept = entries[network.record.id] = Entry(network.generation, body)
    return kept.body


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
        await swarm_mode.networks("check_unique")(engine, body.name)
    return json_reply(request, await engine.networks.create(body, unique))


async def connect(engine: Engine, request: Request) -> Reply:
    body = await parameters.json_body(request, NetworkConnect)
    network = _identified(engine, request.parameters["id"])
    await settings.connect(engine.containers.get(_named(body.container)), network, body.endpoint_config)
    return empty_reply(request)


async def disconnect(engine: Engine, request: Request) -> Reply:
    body = await parameters.json_body(request, NetworkDisconnect)
    network = _identified(engine, request.parameters["id"])
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
    return await removed(engine, request)


async def removed(engine: Engine, request: Request) -> Reply:
    """Remove a network of this engine."""
    network = own(engine, request.parameters["id"])
    if network.record.scope == SWARM:
        raise swarm_mode.refusal(request, swarm_mode.NO_MANAGER)
    await engine.networks.remove(request.parameters["id"])
    engine.kept.forget(network.record.id)
    return empty_reply(request)


async def prune(engine: Engine, request: Request) -> Reply:
    if engine.cluster.is_manager:
        reply: Reply = await swarm_mode.networks("prune")(engine, request)
        return reply
    names = await pruned(engine, parameters.prune_selection(request.query, "until"))
    return json_reply(request, NetworksPruned(names or None))


async def pruned(engine: Engine, selection: Selection) -> list[str]:
    """Prune the networks of this engine."""
    gone = await engine.networks.prune(selection)
    for network in gone:
        engine.kept.forget(network.record.id)
    return [network.record.name for network in gone]
