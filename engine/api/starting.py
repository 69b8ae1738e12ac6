"""The API while the daemon starts: requests that need no more than what is there are answered, the
others wait. What is there grows in the order of `routes.Phase`.

A client that leaves while its request waits has asked for nothing.

Not here: which request needs what (`routes.py`), the restoration itself (`daemon.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from engine.api.application import Application
from engine.api.engine import Engine
from engine.api.routes import Phase
from engine.errors import NotFound, Unavailable
from engine.http.messages import AnyReply, Request


class StartingApplication(Application):
    """One engine's API, until the engine serves an `Application` in its place."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        loop = asyncio.get_running_loop()
        self._reached: dict[Phase, asyncio.Future[None]] = {
            phase: loop.create_future() for phase in Phase if phase is not Phase.LISTENING
        }

    def reach(self, phase: Phase) -> None:
        """Answer the requests that wait for it."""
        self._reached[phase].set_result(None)

    def fail(self) -> None:
        """The start has failed: refuse the requests that wait."""
        for reached in self._reached.values():
            if not reached.done():
                reached.set_exception(Unavailable("the engine has not started"))
                reached.exception()  # looked at, as asyncio wants it

    def __call__(self, request: Request) -> AnyReply | Awaitable[AnyReply]:
        try:
            route, _, _ = self._find(request.method, request.path)
        except NotFound:  # or no route, but an answer
            return super().__call__(request)
        reached = self._reached.get(route.needs)
        if reached is None or (reached.done() and reached.exception() is None):
            return super().__call__(request)
        return self._later(reached, request)

    async def _later(self, reached: asyncio.Future[None], request: Request) -> AnyReply:
        request.cancellable = True
        await asyncio.wait({reached})
        reached.result()
        reply = super().__call__(request)
        return await reply if isinstance(reply, Awaitable) else reply


__all__ = ["StartingApplication"]
