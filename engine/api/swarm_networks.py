"""Handlers of "Networks" at a manager of a swarm, where the networks of the swarm are listed, found
and changed together with those of this engine.

A network of the swarm that containers of this node use is also one of the engine's
(`engine/networks`), with the scope `swarm`. The manager knows all of them, so its answer is shown,
with the containers of this node.

Loaded as the handlers of swarm mode are (`swarm_mode.py`).
Not here: networks of an engine that is no manager (`own_networks.py`), the verbs
(`engine/manager/control`).
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from engine.api import manager, own_networks, parameters
from engine.api.engine import Engine
from engine.api.replies import empty_reply, encode, json_reply
from engine.api.versions import Flag
from engine.common.network_rules import FILTERS, SWARM
from engine.errors import Conflict, EngineError, InvalidParameter, NotFound
from engine.http.messages import Reply, Request
from engine.networks.endpoints import Network
from engine.wire.networks import EndpointResource, NetworkCreate, NetworkCreated, NetworkInspect, NetworksPruned
from engine.wire.networks import Network as Shown

_log = logging.getLogger(__name__)

ANSWER = 6.0
"""Seconds that a manager has to answer what this engine can answer without it. It answers reads
without quorum after 5.
"""

_decode_list = msgspec.json.Decoder(list[Shown]).decode
_decode = msgspec.json.Decoder(NetworkInspect).decode


def is_local(found: Network | None) -> bool:
    return found is not None and found.record.scope != SWARM


async def list_all(engine: Engine, request: Request) -> Reply:
    """Without an answer of the manager, the networks of the swarm that this node uses are shown."""
    wanted = parameters.filters(request.query, FILTERS)
    own = engine.networks.select(wanted)
    whole = not request.version.has(Flag.NETWORKS_LISTED_SHORT)
    try:
        async with asyncio.timeout(ANSWER):
            done = await engine.cluster.call("networks.list", "", {"filters": wanted})
    except (EngineError, TimeoutError) as error:
        _log.warning("networks of the swarm cannot be listed: %s", _reason(error))
        return own_networks.listed(engine, request, wanted)
    parts = [own_networks.encoded(engine, each, request, whole) for each in own if is_local(each)]
    if not whole and request.version.shape(Shown).newest:
        body = done.body[1:-1]
    elif whole:
        body = encode([_with_containers(engine, each) for each in _decode_list(done.body)], request, NetworkInspect)[
            1:-1
        ]
    else:
        body = encode(_decode_list(done.body), request, Shown)[1:-1]
    if body:
        parts.append(body)
    return Reply(request.status, b"[" + b",".join(parts) + b"]\n", headers=manager.warned(done.warning))


def _reason(error: EngineError | TimeoutError) -> str:
    return error.message if isinstance(error, EngineError) else "the manager does not answer"


def _with_containers(engine: Engine, shown: Shown) -> NetworkInspect:
    """The network as inspect shows it."""
    fields = {name: getattr(shown, name) for name in Shown.__struct_fields__}
    return NetworkInspect(**fields, containers=_containers(engine, shown.id))


def _containers(engine: Engine, network: str) -> dict[str, EndpointResource]:
    """The containers of this node that are on the network of the swarm."""
    here = engine.networks.by_id.get(network)
    return {} if here is None else engine.networks.inspected(here).containers


async def inspect(engine: Engine, request: Request, scope: str, verbose: bool) -> Reply:
    text = request.parameters["id"]
    own, problem = _own(engine, text)
    if own is not None and is_local(own) and scope in ("", "local") and _named(own, text):
        return own_networks.inspected(engine, request, own)
    if scope in ("", SWARM):
        try:
            query = {"verbose": verbose, "status": request.version.has(Flag.NETWORK_STATUS)}
            async with asyncio.timeout(None if own is None else ANSWER):
                done = await engine.cluster.call("networks.inspect", text, query)
        except NotFound:
            pass
        except (EngineError, TimeoutError):
            if own is None:
                raise
            return own_networks.inspected(engine, request, own)  # what this node knows of it
        else:
            shown = _decode(done.body)
            if is_local(own) and not scope and text not in (shown.id, shown.name):
                raise InvalidParameter(f"network {text} is ambiguous (2 matches found based on ID prefix)")
            shown = msgspec.structs.replace(shown, containers=_containers(engine, shown.id))
            return json_reply(request, shown)
    if own is not None and is_local(own) and scope in ("", "local"):
        return own_networks.inspected(engine, request, own)
    if problem is not None and scope in ("", "local"):
        raise problem
    raise NotFound(f"network {text} not found" + (f" in scope {scope}" if scope else ""))


def _own(engine: Engine, text: str) -> tuple[Network | None, EngineError | None]:
    """This engine's network of that name or id, or why there is none."""
    try:
        return own_networks.own(engine, text), None
    except EngineError as error:
        return None, error


def _named(own: Network, text: str) -> bool:
    return text in (own.record.id, own.record.name)


async def create(engine: Engine, request: Request, body: NetworkCreate) -> Reply:
    """A network of the swarm. Names are unique among these and the engine's own."""
    if any(each.record.name == body.name and is_local(each) and not each.record.predefined for each in engine.networks):
        raise Conflict(f"network with name {body.name} already exists")
    done = await engine.cluster.call("networks.create", "", None, msgspec.json.encode(body))
    return json_reply(request, msgspec.json.decode(done.body, type=NetworkCreated))


async def check_unique(engine: Engine, _: Request, name: str) -> None:
    """Raises Conflict if the swarm has a network of that name. Without an answer of the manager a
    network of this engine may be made.
    """
    try:
        async with asyncio.timeout(ANSWER):
            done = await engine.cluster.call("networks.inspect", name)
    except (EngineError, TimeoutError):
        return
    if _decode(done.body).name == name:
        raise Conflict(f"network with name {name} already exists")


async def remove(engine: Engine, request: Request) -> Reply:
    text = request.parameters["id"]
    own, _ = _own(engine, text)
    if own is not None and is_local(own) and _named(own, text):
        return await own_networks.removed(engine, request)
    try:
        if own is not None and is_local(own):
            found = _decode((await engine.cluster.call("networks.inspect", text)).body)
            if text not in (found.id, found.name):
                raise InvalidParameter(f"network {text} is ambiguous (2 matches found based on ID prefix)")
        query = {"ingress": request.version.has(Flag.INGRESS_REMOVABLE)}
        await engine.cluster.call("networks.remove", text, query)
    except NotFound:
        if own is None or not is_local(own):
            raise
        return await own_networks.removed(engine, request)
    return empty_reply(request)


async def prune(engine: Engine, request: Request) -> Reply:
    """Networks of this engine, then those of the swarm."""
    selection = parameters.prune_selection(request.query, "until")
    names = await own_networks.pruned(engine, selection)
    try:
        query = {"selection": msgspec.to_builtins(selection)}
        names += msgspec.json.decode((await engine.cluster.call("networks.prune", "", query)).body, type=list[str])
    except EngineError as error:
        _log.warning("prune: networks of the swarm: %s", error.message)
    return json_reply(request, NetworksPruned(names or None))
