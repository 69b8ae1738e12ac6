"""HTTP with one plugin: answers in every framing and in every split, kept connections that are
closed, limits."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import NotFound, ServerError
from engine.plugins import client
from engine.plugins.client import Plugin, connect
from engine.plugins.connection import KEPT, Broken, Connections, TooLong, Unreachable
from engine.plugins.discovery import Endpoint
from engine.wire.plugins import PluginAnswer

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
LIMIT = 1000


class Server:
    """Answers each request of a connection with the next of `answers`; None closes it. The last one
    is repeated."""

    def __init__(self, *answers: bytes | None) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().partition(b"content-length:")[2].split()[0])
                self.requests.append(head + await reader.readexactly(size))
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                if answer is None:
                    return
                writer.write(answer)
                await writer.drain()
                if b"Content-Length" not in answer and b"chunked" not in answer:
                    return


@contextlib.asynccontextmanager
async def listening(server: Server, path: str) -> AsyncIterator[None]:
    listener = await asyncio.start_unix_server(server.serve, path)
    try:
        yield
    finally:
        listener.close()


def run(server: Server, path: Path, scenario: Callable[[Connections], Awaitable[None]]) -> None:
    async def main() -> None:
        async with listening(server, str(path)):
            connections = Connections(Endpoint(socket=str(path)), None, LIMIT)
            try:
                await scenario(connections)
            finally:
                connections.close()

    uvloop.run(main())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        (PLAIN, True),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1\r\n}\r\n0\r\n\r\n", True),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN, True),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}", False),
        (b"HTTP/1.0 200 OK\r\n\r\n{}", False),
        (b"HTTP/1.1 200 OK\r\n\r\n{}", False),
        (PLAIN + PLAIN, False),
    ],
)
def test_answers(path: Path, answer: bytes, kept: bool) -> None:
    server = Server(answer)

    async def scenario(connections: Connections) -> None:
        for _ in range(2):
            assert await connections.post("/A.B", "X: y\r\n", (b"{", b"}")) == (200, b"{}")

    run(server, path, scenario)
    assert server.connections == (1 if kept else 2)
    head = b"POST /A.B HTTP/1.1\r\nHost: plugin\r\nUser-Agent: engined\r\nX: y\r\nContent-Length: 2\r\n\r\n"
    assert server.requests == [head + b"{}"] * 2


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 60), max_size=8), st.booleans())
def test_an_answer_in_pieces(tmp_path_factory: pytest.TempPathFactory, cuts: list[int], chunked: bool) -> None:
    answer = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
        if chunked
        else b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabcde"
    )
    places = [0, *sorted(min(cut, len(answer)) for cut in cuts), len(answer)]

    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for begin, end in itertools.pairwise(places):
                writer.write(answer[begin:end])
                await writer.drain()
                await asyncio.sleep(0)
        writer.close()
        ended.set()

    server = Server(None)
    server.serve = serve  # type: ignore[method-assign]

    async def scenario(connections: Connections) -> None:
        assert await connections.post("/x", "", ()) == (200, b"abcde")
        await ended.wait()

    run(server, tmp_path_factory.mktemp("s") / "s", scenario)


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (None, Broken, "without an answer"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab", Broken, "is not HTTP|in the middle"),
        (b"nonsense\r\n\r\n", Broken, "is not HTTP"),
        (b"HTTP/1.1 101 Switching\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n", Broken, "is not HTTP|in the middle"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1001\r\n\r\n" + bytes(1001), TooLong, ""),
        (b"HTTP/1.1 200 OK\r\nX: " + bytes([65]) * 3000, TooLong, ""),
    ],
)
def test_broken_answers(path: Path, answer: bytes | None, kind: type[Exception], words: str) -> None:
    class Once(Server):
        async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer or b"")
            writer.close()

    async def scenario(connections: Connections) -> None:
        with pytest.raises(kind) as caught:
            await connections.post("/x", "", ())
        assert re.search(words, str(caught.value))

    run(Once(), path, scenario)


@pytest.mark.parametrize("repeat", [True, False])
def test_a_kept_connection_that_the_plugin_closes_with_the_next_request(path: Path, repeat: bool) -> None:
    server = Server(PLAIN, None, PLAIN)

    async def scenario(connections: Connections) -> None:
        await connections.post("/x", "", (b"1",))
        if repeat:
            assert (await connections.post("/x", "", (b"2",), repeat=True))[0] == 200
        else:
            with pytest.raises(Broken, match="without an answer"):
                await connections.post("/x", "", (b"2",))

    run(server, path, scenario)
    assert [request[-1:] for request in server.requests] == [b"1", b"2", b"2"][: 2 + repeat]


def test_half_an_answer_is_not_asked_for_again(path: Path) -> None:
    server = Server(PLAIN, b"HTTP/1.1 200 OK\r\n")

    async def scenario(connections: Connections) -> None:
        await connections.post("/x", "", ())
        with pytest.raises(Broken, match="in the middle"):
            await connections.post("/x", "", (), repeat=True)

    run(server, path, scenario)
    assert len(server.requests) == 2


def test_calls_at_once_have_connections_of_their_own(path: Path) -> None:
    server = Server(PLAIN)

    async def scenario(connections: Connections) -> None:
        await asyncio.gather(*(connections.post("/x", "", ()) for _ in range(3 * KEPT)))
        assert server.connections == 3 * KEPT
        assert len(connections._idle) == KEPT
        await asyncio.gather(*(connections.post("/x", "", ()) for _ in range(KEPT)))
        assert server.connections == 3 * KEPT

    run(server, path, scenario)


def test_a_cancelled_call_does_not_leave_its_answer_to_the_next(path: Path) -> None:
    go = asyncio.Event()

    class Slow(Server):
        async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            number = self.connections = self.connections + 1
            await reader.readuntil(b"\r\n\r\n")
            if number == 1:
                go.set()
                await reader.read()  # until it is closed
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n%d" % number)
            writer.close()

    async def scenario(connections: Connections) -> None:
        first = asyncio.ensure_future(connections.post("/x", "", ()))
        await go.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert await connections.post("/x", "", ()) == (200, b"2")

    run(Slow(), path, scenario)


def test_nothing_listens(path: Path) -> None:
    async def scenario() -> None:
        for endpoint, place in (
            (Endpoint(socket=str(path)), f"{path}: no such file or directory"),
            (Endpoint(url="http://127.0.0.1:1/base"), "127.0.0.1:1: "),
        ):
            with pytest.raises(Unreachable, match=place):
                await Connections(endpoint, None, LIMIT).post("/x", "", ())

    uvloop.run(scenario())


# --- calls ----------------------------------------------------------------------------------------


def call(path: Path, server: Server, scenario: Callable[[Plugin], Awaitable[None]], seconds: float = 5) -> None:
    async def main() -> None:
        async with listening(server, str(path)):
            plugin = await connect("far", Endpoint(socket=str(path)), seconds)
            try:
                await scenario(plugin)
            finally:
                await plugin.close()

    uvloop.run(main())


def answer(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


@pytest.mark.parametrize(
    ("sent", "kind", "words"),
    [
        (answer(200, b'{"Err":"full"}'), ServerError, "full"),
        (answer(500, b'{"Err":"broken"}'), ServerError, "A.B: broken"),
        (answer(503, b"not JSON"), ServerError, "A.B: not JSON"),
        (answer(503, b""), ServerError, "A.B: status 503"),
        (answer(404, b""), NotFound, 'A.B: plugin "far" does not implement this call'),
        (answer(302, b""), ServerError, "A.B: status 302"),
        (answer(200, b"x"), ServerError, 'A.B: plugin "far" sent an invalid reply: JSON is malformed'),
        (
            answer(200, b'{"a":' + b"[" * 100_000),
            ServerError,
            'A.B: plugin "far" sent an invalid reply: it is nested too deeply',
        ),
        (None, ServerError, 'A.B: plugin "far": the plugin closed the connection without an answer'),
        (answer(200, bytes(client.LONGEST_ANSWER + 1)), ServerError, 'A.B: plugin "far" sent more than 8388608 bytes'),
    ],
)
def test_failures_of_calls(path: Path, sent: bytes | None, kind: type[ServerError], words: str) -> None:
    async def scenario(plugin: Plugin) -> None:
        with pytest.raises(kind) as caught:
            await plugin.call("A.B", PluginAnswer, {"a": 1})
        assert caught.value.message.startswith(words)

    call(path, Server(sent), scenario)


def test_a_call_without_an_answer_in_time(path: Path) -> None:
    class Silent(Server):
        async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()

    async def scenario(plugin: Plugin) -> None:
        with pytest.raises(ServerError, match=r'A\.B: plugin "far" did not answer within 0\.05 seconds$'):
            await plugin.call("A.B", PluginAnswer)

    call(path, Silent(), scenario, 0.05)


def test_a_plugin_that_comes_later(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(PLAIN)

    async def scenario() -> None:
        plugin = await connect("far", Endpoint(socket=str(path)), 30)
        monkeypatch.setattr(client, "RETRY_DELAYS", (0.01,) * 500)
        waiting = asyncio.ensure_future(plugin.call("A.B", PluginAnswer))
        await asyncio.sleep(0.03)
        assert not waiting.done()
        async with listening(server, str(path)):
            assert (await waiting).err is None
        await plugin.close()
        monkeypatch.setattr(client, "RETRY_DELAYS", ())
        with pytest.raises(ServerError, match=r"cannot connect to .*: (connection refused|no such file)"):
            await plugin.call("A.B", PluginAnswer)

    uvloop.run(scenario())


def test_a_hostile_plugins_socket_is_no_link(path: Path) -> None:
    link = path.with_name("link")
    link.symlink_to(path)

    async def scenario(_: Connections) -> None:
        found = Connections(Endpoint(socket=str(path), hostile=True), None, LIMIT)
        assert (await found.post("/x", "", ()))[0] == 200
        found.close()
        followed = Connections(Endpoint(socket=str(link)), None, LIMIT)
        assert (await followed.post("/x", "", ()))[0] == 200, "a plugin beside the engine may have one"
        followed.close()
        for other in (link, path.parent, path.with_name("absent")):
            refused = Connections(Endpoint(socket=str(other), hostile=True), None, LIMIT)
            with pytest.raises(Unreachable):
                await refused.post("/x", "", ())

    run(Server(PLAIN), path, scenario)
