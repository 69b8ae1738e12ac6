"""Networks as this engine knows them: its own, and those of a swarm that were sent to this node.

Not here: the handlers (`networks.py`), and those of a manager, which knows all networks of the
swarm (`swarm_networks.py`).
"""

from __future__ import annotations

from engine.api.engine import Engine
from engine.api.kept import Entry
from engine.api.replies import empty_reply, encoded_reply
from engine.api.versions import Flag
from engine.common import network_rules
from engine.common.network_rules import SWARM
from engine.common.pruning import Selection
from engine.errors import NotFound
from engine.http.messages import Reply, Request
from engine.networks.endpoints import Network
from engine.wire.networks import Network as Shown
from engine.wire.networks import NetworkInspect


def listed(engine: Engine, request: Request, filters: dict[str, list[str]]) -> Reply:
    """The networks of this engine, and those of a swarm that its manager has sent to this node."""
    whole = not request.version.has(Flag.NETWORKS_LISTED_SHORT)
    found = engine.networks.select(filters)
    found += [each for each in _absent(engine) if network_rules.matches(each.record, filters, False)]
    return encoded_reply(request, b"[" + b",".join([encoded(engine, each, request, whole) for each in found]) + b"]\n")


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


def _absent(engine: Engine) -> list[Network]:
    """The networks of a swarm that this node knows, and no container of it uses."""
    known = (record for record in engine.cluster.networks() if record.id not in engine.networks.by_id)
    return [engine.networks.absent(record) for record in known]


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


async def removed(engine: Engine, request: Request) -> Reply:
    """Remove a network of this engine."""
    network = engine.networks.get(request.parameters["id"])
    await engine.networks.remove(request.parameters["id"])
    engine.kept.forget(network.record.id)
    return empty_reply(request)


async def pruned(engine: Engine, selection: Selection) -> list[str]:
    """Prune the networks of this engine."""
    gone = await engine.networks.prune(selection)
    for network in gone:
        engine.kept.forget(network.record.id)
    return [network.record.name for network in gone]
