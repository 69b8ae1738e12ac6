"""Handlers of managed plugins, which this engine does not have: the list is empty, and requests
that would make one are refused by name.
"""

from __future__ import annotations

from engine.api import parameters
from engine.api.engine import Engine
from engine.api.replies import json_reply
from engine.errors import NotFound, Unimplemented
from engine.http.messages import Reply, Request


def list_all(engine: Engine, request: Request) -> Reply:
    """GET /plugins."""
    parameters.filters(request.query, ("capability", "enabled"))
    return json_reply(request, [])


def not_found(engine: Engine, request: Request) -> Reply:
    """Requests about one plugin."""
    raise NotFound(f'plugin "{request.parameters["name"]}" not found')


def unimplemented(engine: Engine, request: Request) -> Reply:
    """Requests that would install a plugin."""
    raise Unimplemented("managed plugins are not supported by this engine")
