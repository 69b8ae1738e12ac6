"""POST /session: the connection becomes HTTP/2, on which the daemon is the client."""

from __future__ import annotations

import pytest

from tests.support import PATIENCE
from tests.support.builds import sessions
from tests.support.engine import client
from tests.support.engine.harness import TempEngine, until

HEADERS = {"Connection": "Upgrade", "Upgrade": "h2c", "X-Docker-Expose-Session-Uuid": "one"}


def test_a_session_lasts_as_long_as_its_connection(engine: TempEngine) -> None:
    for target in ("/session", "/v1.24/session"):
        with sessions.session(engine.socket, {}, "same") as (_, peer):
            answer = engine.request("POST", target, headers=HEADERS | {"X-Docker-Expose-Session-Uuid": "same"})
            assert (answer.status, answer.message) == (400, "session same is in use already")
            assert not peer.ended.is_set()

        def opens() -> bool:
            try:
                with sessions.session(engine.socket, {}, "same"):
                    return True
            except AssertionError:
                return False

        until("the id is free again", opens)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Connection": "Upgrade", "Upgrade": "tcp"},
        {"Connection": "Upgrade", "Upgrade": "h2c"},
        HEADERS | {"X-Docker-Expose-Session-Uuid": ""},
        HEADERS | {"Upgrade": "websocket"},
    ],
)
def test_requests_that_open_none(engine: TempEngine, headers: dict[str, str]) -> None:
    answer = engine.request("POST", "/session", headers=headers)
    assert answer.status == 400, answer
    assert "needs the header Upgrade: h2c" in answer.message or "Session-Uuid" in answer.message


def test_what_is_not_http2_ends_the_session_alone(engine: TempEngine) -> None:
    with client.connect(engine.socket) as stream:
        stream.sendall(sessions.head("garbage", {}) + b"\0\0\4\0\0\0\0\0\1data")
        received = client.read_to_end(stream, b"")
        assert received.startswith(b"HTTP/1.1 101 ") and b"PRI * HTTP/2.0" in received
    assert engine.request("GET", "/_ping").status == 200


@pytest.mark.own
def test_the_end_of_the_daemon_ends_sessions() -> None:
    with TempEngine() as engine, sessions.session(engine.socket, {}) as (_, peer):
        engine.terminate()
        assert peer.ended.wait(10 * PATIENCE)
        engine.start()
