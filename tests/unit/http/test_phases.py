"""The table of phases: clients cause every change of phase in it and no other, and a body is only
read in phases that allow it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from engine.errors import Conflict
from engine.http.hijack import HijackReply
from engine.http.messages import Reply, Request
from engine.http.phases import (
    ARRIVING,
    FOLLOWS,
    GONE,
    HANDLING,
    HEAD,
    HIJACKED,
    LINGER,
    Phase,
)
from engine.http.protocol import DRAIN_LIMIT, HIJACK_BODY_LIMIT, Connection
from engine.http.server import Server
from tests.unit.http.harness import App, FakeTransport, feed, settle

Arrows = set[tuple[Phase, Phase]]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Arrows]:
    """Every change of phase that connections make."""
    arrows: Arrows = set()
    enter = Connection._enter

    def recorded(connection: Connection, phase: Phase) -> None:
        before = connection.phase
        enter(connection, phase)
        arrows.add((before, phase))
        assert connection.incoming in phase.incoming or phase is LINGER or phase is GONE

    monkeypatch.setattr(Connection, "_enter", recorded)
    yield arrows


def head(path: str, *fields: str, http: str = "1.1") -> bytes:
    return "\r\n".join([f"POST {path} HTTP/{http}", "Host: x", *fields, "", ""]).encode()


async def hijack(request: Request) -> HijackReply:
    return (await request.hijack("x")).release()


async def hijack_and_fail(request: Request) -> Reply:
    await request.hijack("x")
    raise Conflict("no stream after all")


LENGTH = "Content-Length: 4"

CLIENTS: dict[str, list[bytes]] = {
    "a client that asks nothing": [],
    "one request": [head("/sync")],
    "nonsense": [b"nonsense\r\n\r\n"],
    "it leaves while the handler works": [head("/slow")],
    "the last request": [head("/sync", "Connection: close")],
    "an unread body that comes": [head("/ignore", LENGTH), b"body"],
    "an unread body that does not come": [head("/ignore", LENGTH)],
    "an unread body without end": [
        head("/ignore", "Transfer-Encoding: chunked"),
        b"fffff\r\n" + bytes(DRAIN_LIMIT + 1),
    ],
    "a stream": [head("/stream")],
    "a stream that the client leaves": [head("/endless")],
    "a stream for HTTP/1.0": [head("/stream", http="1.0")],
    "a stream that ends before the body": [head("/stream", LENGTH)],
    "a hijack": [head("/hijack")],
    "a hijack with a body": [head("/hijack", LENGTH), b"body"],
    "a hijack with too large a body": [head("/hijack", "Content-Length: 999999"), bytes(HIJACK_BODY_LIMIT + 1)],
    "a client that leaves before the hijack": [head("/hijack", LENGTH)],
    "a hijack that fails": [head("/hijack/fails")],
}


def test_every_arrow_is_taken(taken: Arrows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(App, "do_hijack", staticmethod(hijack), raising=False)
    monkeypatch.setattr(App, "do_hijack_fails", staticmethod(hijack_and_fail), raising=False)
    for pieces in CLIENTS.values():
        feed(pieces)
    expected = {(before, after) for before, follows in FOLLOWS.items() for after in follows}
    assert expected - taken == set()


def test_other_arrows_are_bugs() -> None:
    async def scenario() -> None:
        connection = Connection(Server(App()))
        transport = FakeTransport()
        connection.connection_made(transport)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="a connection in HEAD cannot enter HIJACKED"):
            connection._enter(HIJACKED)
        assert connection.phase is HEAD
        connection.data_received(head("/slow"))
        await settle()
        assert connection.phase is HANDLING
        connection.connection_lost(None)
        with pytest.raises(RuntimeError, match="a connection in GONE cannot enter HEAD"):
            connection._enter(HEAD)

    asyncio.run(scenario())


def test_the_table_is_whole() -> None:
    assert all(after in FOLLOWS for follows in FOLLOWS.values() for after in follows)
    assert all(GONE in follows for phase, follows in FOLLOWS.items() if phase is not GONE)
    reached = {HEAD}
    while more := {after for phase in reached for after in FOLLOWS[phase]} - reached:
        reached |= more
    assert reached == FOLLOWS.keys()
    assert all(phase.active for phase in FOLLOWS if ARRIVING in phase.incoming)
