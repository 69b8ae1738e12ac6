"""What a daemon that starts answers, what waits for how long, and what a failed start says."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Coroutine
from typing import Any

import pytest

from engine.api import late
from engine.api.engine import Engine
from engine.api.routes import GET, KNOWN, LISTENING, POST, ROUTES, STREAM, Phase
from engine.api.starting import StartingApplication
from engine.errors import NotFound, Unavailable
from engine.http.messages import Reply, Request
from tests.unit.api.parts import engine, request


def tell(engine: Engine, asked: Request) -> Reply:
    return Reply(asked.status, f"{asked.version.name} {asked.parameters} {asked.cancellable}".encode())


async def tell_later(engine: Engine, asked: Request) -> Reply:
    return tell(engine, asked)


ROWS = (
    GET("/now", tell, needs=LISTENING),
    GET("/known/{id}", tell, needs=KNOWN),
    GET("/known/{id}/wait", tell, needs=KNOWN, mode=STREAM),
    POST("/all", tell_later, 201),
)


class Starting(StartingApplication):
    def __init__(self) -> None:
        super().__init__(engine())
        self._router = type(self._router)(ROWS)

    def ask(self, path: str, method: str = "GET") -> Any:
        """The reply, or the task of a request that waits."""
        made = self(request(path, method))
        return asyncio.ensure_future(made) if isinstance(made, Coroutine) else made


def test_each_request_waits_for_what_it_needs() -> None:
    async def run() -> None:
        app = Starting()
        now, known, everything = app.ask("/now"), app.ask("/v1.24/known/x"), app.ask("/all", "POST")
        assert isinstance(now, Reply) and now.body == b"1.55 {} False"
        await asyncio.sleep(0)
        assert not known.done() and not everything.done()
        app.reach(Phase.KNOWN)
        assert (await known).body == b"1.24 {'id': 'x'} False"
        assert isinstance(app.ask("/known/y"), Reply)
        assert not everything.done()
        app.reach(Phase.RESTORED)
        assert (await everything).status == 201
        assert (await app.ask("/all", "POST")).status == 201

    asyncio.run(run())


def test_a_client_may_leave_while_its_request_waits() -> None:
    """Also where the handler itself would run to its end."""

    async def run() -> None:
        app = Starting()
        plain, stream = request("/known/x"), request("/known/x/wait")
        waiting = [asyncio.ensure_future(app(each)) for each in (plain, stream)]  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert plain.cancellable and stream.cancellable
        waiting[0].cancel()
        app.reach(Phase.KNOWN)
        assert (await waiting[1]).body == b"1.55 {'id': 'x'} True"  # type: ignore[union-attr]
        assert waiting[0].cancelled()

    asyncio.run(run())


def test_a_start_that_fails() -> None:
    async def run() -> None:
        app = Starting()
        app.reach(Phase.KNOWN)
        waiting = app.ask("/all", "POST")
        await asyncio.sleep(0)
        app.fail()
        with pytest.raises(Unavailable):
            await waiting
        with pytest.raises(Unavailable):
            await app.ask("/all", "POST")
        assert isinstance(app.ask("/known/y"), Reply)

    asyncio.run(run())


def test_what_is_no_request_is_refused_at_once() -> None:
    async def run() -> None:
        app = Starting()
        with pytest.raises(NotFound):
            app.ask("/nothing")
        assert app.ask("/", "OPTIONS").status == 200

    asyncio.run(run())


def test_requests_that_change_something_wait_for_everything() -> None:
    early = {(route.method, route.path) for route in ROUTES if route.needs is not Phase.RESTORED}
    assert early == {
        *((method, "/_ping") for method in ("GET", "HEAD")),
        *(("GET", path) for path in ("/info", "/version", "/events", "/containers/json")),
        *(("GET", path) for path in ("/containers/{id}/json", "/containers/{id}/{alias}/json")),
    }


def test_late_handlers_exist() -> None:
    rows = [route for route in ROUTES if route.path.startswith("/build")]
    assert len(rows) == 3
    for route in rows:
        named = inspect.getclosurevars(route.handler).nonlocals
        assert named["resource"] == "build" and named["name"] in ("build", "prune", "cancel")


def test_a_late_handler() -> None:
    async def run() -> None:
        handler = late.handler("system", "ping")  # which answers directly
        reply = await handler(engine(), request("/_ping"))
        assert isinstance(reply, Reply) and reply.body == b"OK"

    asyncio.run(run())
