"""Handlers whose modules are loaded by their first request. Not here: those of a swarm, which
refuse requests before that (`swarm_mode.py`).
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable

from engine.api.engine import Engine
from engine.http.messages import AnyReply, Request

Handler = Callable[[Engine, Request], Awaitable[AnyReply]]


def handler(resource: str, name: str) -> Handler:
    """The function `name` of the module of that resource."""

    async def answer(engine: Engine, request: Request) -> AnyReply:
        module = await asyncio.to_thread(importlib.import_module, f"engine.api.{resource}")
        reply: AnyReply | Awaitable[AnyReply] = getattr(module, name)(engine, request)
        return await reply if isinstance(reply, Awaitable) else reply

    return answer


__all__ = ["handler"]
