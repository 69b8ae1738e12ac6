"""Handlers of swarm, nodes, services and tasks. This engine is never part of a swarm, so they
answer 406 in Docker's words.

Clients send `POST /swarm/leave` to clean up, whatever the engine's state.
"""

from __future__ import annotations

from engine.api.engine import Engine
from engine.errors import NotAcceptable
from engine.http.messages import Reply, Request


def not_in_a_swarm(engine: Engine, request: Request) -> Reply:
    raise NotAcceptable("This node is not part of a swarm")


def not_a_manager(engine: Engine, request: Request) -> Reply:
    raise NotAcceptable(
        'This node is not a swarm manager. Use "docker swarm init" or "docker swarm join" '
        "to connect this node to swarm and try again."
    )
