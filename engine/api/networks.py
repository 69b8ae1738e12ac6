"""Handlers of "Networks": decode, one call into the domain, reply."""

from __future__ import annotations

import msgspec

from engine.api import parameters, swarm_mode
from engine.api.engine import Engine
from engine.api.kept import Entry
from engine.api.replies import empty_reply, encoded_reply, json_reply
from engine.api.versions import Flag
from engine.containers import settings
from engine.errors import InvalidParameter, NotFound, Unimplemented
from engine.http.messages import Reply, Request
from engine.network_rules import FILTERS
from engine.networks.endpoints import Network
from engine.wire.networks import Network as Shown
from engine.wire.networks import NetworkConnect, NetworkCreate, NetworkDisconnect, NetworkInspect, NetworksPruned

NODE_LOCAL = ("bridge", "host", "none")
"""Networks that each node of a swarm has. Services use them by their names."""


def list_all(engine: Engine, request: Request) -> Reply:
    found = engine.networks.select(parameters.filters(request.query, FILTERS))
    whole = not request.version.has(Flag.NETWORKS_LISTED_SHORT)
    return encoded_reply(request, b"[" + b",".join([_encoded(engine, each, request, whole) for each in found]) + b"]\n")


def inspect(engine: Engine, request: Request) -> Reply:
    parameters.strict_boolean(request.query, "verbose")  # details of swarm networks
    network = engine.networks.get(request.parameters["id"])
    scope = request.query.get("scope", "")
    if scope == "swarm" and engine.cluster.is_manager and network.record.name in NODE_LOCAL:
        # docker CLIs look up the networks of a service, and send the id that they find.
        shown = msgspec.structs.replace(
            engine.networks.inspected(network), id=network.record.name, scope="swarm", containers={}
        )
        return json_reply(request, shown)
    if scope not in ("", network.record.scope):
        raise NotFound(f"network {request.parameters['id']} not found in scope {scope}")
    return encoded_reply(request, _encoded(engine, network, request) + b"\n")


def _encoded(engine: Engine, network: Network, request: Request, whole: bool = True) -> bytes:
    """The encoded network, kept until the network changes. `whole`: as inspect shows it."""
    shape = request.version.shape(NetworkInspect if whole else Shown)
    entries = engine.kept.of(shape)
    kept = entries.get(network.record.id)
    if kept is None or kept.generation != network.generation:
        body = shape.encode(engine.networks.inspected(network) if whole else engine.networks.shown(network))
        kept = entries[network.record.id] = Entry(network.generation, body)
    return kept.body


async def create(engine: Engine, request: Request) -> Reply:
    body = await parameters.json_body(request, NetworkCreate)
    if body.driver == "overlay":
        if not engine.cluster.is_manager:
            raise swarm_mode.refusal(request, swarm_mode.NO_MANAGER)
        raise Unimplemented("Driver: networks of the driver overlay are not supported by this version")
    unique = request.version.has(Flag.UNIQUE_NETWORK_NAMES) or body.check_duplicate
    return json_reply(request, await engine.networks.create(body, unique))


async def connect(engine: Engine, request: Request) -> Reply:
    body = await parameters.json_body(request, NetworkConnect)
    network = engine.networks.get(request.parameters["id"]).record.id
    await settings.connect(engine.containers.get(_named(body.container)), network, body.endpoint_config)
    return empty_reply(request)


async def disconnect(engine: Engine, request: Request) -> Reply:
    body = await parameters.json_body(request, NetworkDisconnect)
    network = engine.networks.get(request.parameters["id"]).record.id
    await settings.disconnect(engine.containers.get(_named(body.container)), network)
    return empty_reply(request)


def _named(container: str) -> str:
    if not container:
        raise InvalidParameter("Container: a container's name or id is required")
    return container


async def remove(engine: Engine, request: Request) -> Reply:
    network = engine.networks.get(request.parameters["id"])
    await engine.networks.remove(request.parameters["id"])
    engine.kept.forget(network.record.id)
    return empty_reply(request)


async def prune(engine: Engine, request: Request) -> Reply:
    gone = await engine.networks.prune(parameters.prune_selection(request.query, "until"))
    for network in gone:
        engine.kept.forget(network.record.id)
    return json_reply(request, NetworksPruned([network.record.name for network in gone] or None))
