"""The way to the handlers of swarm, nodes, services, tasks, secrets and configs.

Those handlers, their structs and version rows are loaded with the first request that can succeed.
An engine outside of a swarm refuses the others here, so its memory stays as it is.

Not here: the handlers (`swarm.py`, `nodes.py` …), the membership (`engine/cluster`).
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from types import ModuleType
from typing import Any

from engine.api import versions
from engine.api.engine import Engine
from engine.api.versions import Flag
from engine.errors import EngineError, NoSwarm, Unavailable
from engine.http.messages import AnyReply, Request
from engine.wire.system import SwarmInfo

Handler = Callable[[Engine, Request], Awaitable[AnyReply]]

BEGINNINGS = (("swarm", "init"), ("swarm", "join"))
"""Requests that an engine outside of a swarm serves."""

ENDINGS = (("swarm", "leave"), ("swarm", "unlock"))
"""Requests that any member serves. Clients send `POST /swarm/leave` to clean up, whatever the
engine's state."""

NO_SWARM = "This node is not part of a swarm"
NO_MANAGER = (
    'This node is not a swarm manager. Use "docker swarm init" or "docker swarm join" '
    "to connect this node to swarm and try again."
)


def handler(resource: str, name: str) -> Handler:
    """The function `name` of the module of that resource, loaded when it is needed."""

    async def answer(engine: Engine, request: Request) -> AnyReply:
        try:
            if engine.cluster.state == "inactive" and (resource, name) not in BEGINNINGS:
                raise NoSwarm(NO_SWARM if (resource, name) in ENDINGS else NO_MANAGER)
            function: Handler = getattr(_loaded()[resource], name)
            return await function(engine, request)
        except NoSwarm as error:
            raise refusal(request, error.message) from error

    return answer


def refusal(request: Request, message: str) -> EngineError:
    """Of a request that needs a swarm, or a manager, or none."""
    return Unavailable(message) if request.version.has(Flag.NO_SWARM_IS_503) else NoSwarm(message)


async def info(engine: Engine, request: Request) -> SwarmInfo:
    """Swarm of /info."""
    if engine.cluster.state == "inactive":
        return SwarmInfo()
    found = await engine.cluster.info()
    shown: SwarmInfo = _loaded()["swarm"].info(request, found)
    return shown


def networks(name: str) -> Callable[..., Awaitable[Any]]:
    """A function of the handlers of networks at a manager."""
    function: Callable[..., Awaitable[Any]] = getattr(_loaded()["networks"], name)

    async def answer(engine: Engine, request: Request, *more: Any) -> Any:
        try:
            return await function(engine, request, *more)
        except NoSwarm as error:  # its process is starting, or has failed
            raise refusal(request, error.message) from error

    return answer


@functools.cache
def _loaded() -> Mapping[str, ModuleType]:
    """The modules of the handlers."""
    from engine.api import configs, nodes, secrets, services, swarm, swarm_networks, tasks
    from engine.api.versions import swarm as rows

    versions.know(rows.CHANGES)
    return {
        "swarm": swarm,
        "networks": swarm_networks,
        "nodes": nodes,
        "services": services,
        "tasks": tasks,
        "secrets": secrets,
        "configs": configs,
    }
