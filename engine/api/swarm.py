"""Handlers of swarm, nodes, services, tasks, secrets and configs. This engine is never part of a
swarm, so they refuse in Docker's words: with 406 at API 1.24, with 503 from 1.25 on.

Clients send `POST /swarm/leave` to clean up, whatever the engine's state.
"""

from __future__ import annotations

from engine.api.engine import Engine
from engine.api.versions import Flag
from engine.errors import NotAcceptable, Unavailable, Unimplemented
from engine.http.messages import Reply, Request


def not_in_a_swarm(engine: Engine, request: Request) -> Reply:
    raise _refusal(request, "This node is not part of a swarm")


def not_a_manager(engine: Engine, request: Request) -> Reply:
    raise _refusal(
        request,
        'This node is not a swarm manager. Use "docker swarm init" or "docker swarm join" '
        "to connect this node to swarm and try again.",
    )


def unimplemented(engine: Engine, request: Request) -> Reply:
    """Requests that would make the engine part of a swarm."""
    raise Unimplemented("swarm mode is not supported by this engine")


def _refusal(request: Request, message: str) -> NotAcceptable | Unavailable:
    return Unavailable(message) if request.version.has(Flag.NO_SWARM_IS_503) else NotAcceptable(message)
