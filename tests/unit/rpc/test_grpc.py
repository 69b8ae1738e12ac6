"""The server's side of gRPC, and clients that do not keep to the protocol."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
import warnings
from collections.abc import Awaitable, Callable
from typing import Any

import h2.config
import h2.connection
import h2.events
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import (
    BUG,
    Conflict,
    EngineError,
    Forbidden,
    InvalidParameter,
    NotFound,
    ServerError,
    Unavailable,
)
from engine.rpc import grpc
from engine.rpc.grpc import Connection, Stream
from tests.support import PATIENCE

Act = Callable[["Client"], Awaitable[None]]


class Client:
    """An HTTP/2 client that may send anything."""

    def __init__(self, stream: socket.socket) -> None:
        stream.setblocking(False)
        self._stream = stream
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
        self.h2.initiate_connection()
        self.events: list[h2.events.Event] = []
        self.ended = False

    async def send(self, data: bytes = b"") -> None:
        await asyncio.get_running_loop().sock_sendall(self._stream, self.h2.data_to_send() + data)

    async def until(self, *kinds: type[h2.events.Event]) -> h2.events.Event:
        """Read until an event of one of these kinds."""
        while True:
            for event in self.events:
                if isinstance(event, kinds):
                    self.events.remove(event)
                    return event
            data = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self._stream, 65536), 30 * PATIENCE)
            assert data, f"the server has closed; events: {self.events}"
            self.events += self.h2.receive_data(data)
            await self.send()

    async def to_end(self) -> None:
        while await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self._stream, 65536), 30 * PATIENCE):
            pass

    def begin(self, path: str = "/echo", content_type: str = "application/grpc", **more: str) -> int:
        """`more`: headers, with underscores in their names."""
        number: int = self.h2.get_next_available_stream_id()
        headers = [(":method", "POST"), (":scheme", "http"), (":authority", "x"), (":path", path), ("te", "trailers")]
        headers += [("content-type", content_type), *((name.replace("_", "-"), more[name]) for name in more)]
        self.h2.send_headers(number, headers)
        return number

    async def status(self) -> dict[str, str]:
        """The trailers of the next call that ends, or its headers if it has no message."""
        while True:
            event = await self.until(h2.events.TrailersReceived, h2.events.ResponseReceived)
            assert isinstance(event, (h2.events.TrailersReceived, h2.events.ResponseReceived))
            if event.stream_ended is not None:
                return dict(event.headers)


async def echo(stream: Stream) -> None:
    while (message := await stream.receive()) is not None:
        await stream.send(message)


def served(act: Act, handlers: dict[str, grpc.Handler] | None = None) -> None:
    """Serve one client."""

    async def work() -> None:
        ours, theirs = socket.socketpair()
        lost = []
        connection = await grpc.join(
            ours.detach(), b"head", b"", {"/echo": echo, **(handlers or {})}, lambda: lost.append(1)
        )
        with theirs:
            theirs.setblocking(False)
            assert await asyncio.get_running_loop().sock_recv(theirs, 4) == b"head"
            await act(Client(theirs))
        await asyncio.wait_for(_closed(connection), 30 * PATIENCE)
        assert lost == [1]

    asyncio.run(work())


async def _closed(connection: Connection) -> None:
    await connection.closed()
    assert not connection.open and not connection._streams and not connection._serving


def framed(message: bytes) -> bytes:
    return struct.pack(">BI", 0, len(message)) + message


def test_an_answer_is_one_write() -> None:
    async def twice(stream: Stream) -> bytes:
        message = await stream.receive() or b""
        await stream.send(message)
        return message

    async def act(client: Client) -> None:
        number = client.begin("/twice")
        client.h2.send_data(number, framed(b"one"), end_stream=True)
        await client.send()
        client.events.clear()
        await client.until(h2.events.ResponseReceived)
        assert [type(event) for event in client.events if getattr(event, "stream_id", 0)] == [
            *(h2.events.DataReceived, h2.events.DataReceived),
            *(h2.events.TrailersReceived, h2.events.StreamEnded),
        ]

    served(act, {"/twice": twice})


@pytest.mark.parametrize("piece", [1, 3, 10_000])
def test_messages_in_any_pieces(piece: int) -> None:
    data = b"".join(framed(message) for message in (b"one", b"", b"x" * 500))

    async def act(client: Client) -> None:
        number = client.begin()
        for begin in range(0, len(data), piece):
            client.h2.send_data(number, data[begin : begin + piece])
            await client.send()
        client.h2.end_stream(number)
        await client.send()
        received = b""
        while True:
            event = await client.until(h2.events.DataReceived, h2.events.TrailersReceived)
            if isinstance(event, h2.events.TrailersReceived):
                break
            assert isinstance(event, h2.events.DataReceived)
            received += event.data
        assert received == data

    served(act)


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (NotFound("no é\n100%"), "5", "no %C3%A9%0A100%25"),
        (InvalidParameter("x"), "2", "x"),
        (Conflict("x"), "6", "x"),
        (Forbidden("x"), "2", "x"),
        (Unavailable("x"), "14", "x"),
        (ServerError("x"), "2", "x"),
        (ValueError("a bug"), "13", BUG),
    ],
)
def test_an_error_is_a_status(error: Exception, status: str, message: str, caplog: pytest.LogCaptureFixture) -> None:
    async def fails(_: Stream) -> None:
        raise error

    async def act(client: Client) -> None:
        client.begin("/fails")
        await client.send()
        trailers = await client.status()
        assert (trailers["grpc-status"], trailers["grpc-message"]) == (status, message)
        assert trailers[":status"] == "200"  # it has no other headers

    served(act, {"/fails": fails})
    assert ("a bug" in caplog.text) is isinstance(error, ValueError)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/echo.Service/Nothing", "unknown method Nothing for service echo.Service"),
        ("/other.Service/Nothing", "unknown service other.Service"),
        ("/nothing", 'malformed method name: "/nothing"'),
    ],
)
def test_calls_that_nothing_serves(path: str, message: str) -> None:
    async def act(client: Client) -> None:
        client.begin(path)
        await client.send()
        headers = await client.status()
        assert (headers["grpc-status"], headers["grpc-message"]) == ("12", message)

    served(act, {"/echo.Service/Echo": echo})


@pytest.mark.parametrize("name", ["grpc_timeout", "grpc_encoding"])
def test_headers_that_are_refused(name: str) -> None:
    async def act(client: Client) -> None:
        client.begin(**{name: "1x"})
        await client.send()
        headers = await client.status()
        assert headers["grpc-status"] == {"grpc_timeout": "2", "grpc_encoding": "12"}[name]
        assert "1x" in headers["grpc-message"]

    served(act)


@pytest.mark.parametrize("limit", ["20m", "20000u", "20000000n"])
def test_a_call_ends_at_its_deadline(limit: str) -> None:
    ended = []

    async def waits(_: Stream) -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append(1)

    async def act(client: Client) -> None:
        client.begin("/waits", grpc_timeout=limit)
        await client.send()
        headers = await client.status()
        assert (headers["grpc-status"], headers["grpc-message"]) == ("4", "context deadline exceeded")
        client.h2.send_data(client.begin(grpc_timeout="1H"), framed(b"x"), end_stream=True)
        await client.send()
        assert (await client.status())["grpc-status"] == "0" and ended

    served(act, {"/waits": waits})


def test_requests_that_are_not_grpc() -> None:
    async def act(client: Client) -> None:
        client.begin("/echo", "text/plain")
        await client.send()
        event = await client.until(h2.events.ResponseReceived)
        assert isinstance(event, h2.events.ResponseReceived)
        assert dict(event.headers)[":status"] == "415"

    served(act)


@pytest.mark.parametrize("apart", [False, True], ids=["with the headers", "after the headers"])
@pytest.mark.parametrize(
    ("sent", "status"),
    [(struct.pack(">BI", 1, 0), "8"), (struct.pack(">BI", 0, grpc.MESSAGE_LIMIT + 1), "8"), (b"\0\0\0\0\5ab", "2")],
)
def test_messages_that_are_refused(sent: bytes, status: str, apart: bool) -> None:
    seen: list[EngineError] = []

    async def reads(stream: Stream) -> None:
        try:
            await stream.receive()
        except EngineError as error:
            seen.append(error)
            raise

    async def act(client: Client) -> None:
        number = client.begin("/reads")
        if apart:
            await client.send()
        client.h2.send_data(number, sent, end_stream=True)
        await client.send()
        assert (await client.status())["grpc-status"] == status

    served(act, {"/reads": reads})
    assert [type(error) for error in seen] == [grpc.TooLong if status == "8" else InvalidParameter]


@pytest.mark.parametrize("last", [False, True])
def test_a_refused_call_leaves_no_stream_open(last: bool) -> None:
    """A client may wait for the end of the stream, and MAX_CONCURRENT_STREAMS may be open."""

    async def reads(stream: Stream) -> None:
        await stream.receive()

    async def act(client: Client) -> None:
        for _ in range(3):
            number = client.begin("/reads")
            client.h2.send_data(number, struct.pack(">BI", 1, 0), end_stream=last)
            await client.send()
            assert (await client.status())["grpc-status"] == "8"
            if not last:
                await client.until(h2.events.StreamReset)
        assert client.h2.open_outbound_streams == 0
        assert not any(isinstance(event, h2.events.StreamReset) for event in client.events)

    served(act, {"/reads": reads})


def test_a_client_that_resets_its_calls_at_once() -> None:
    """Nothing of the calls stays, and the next one is answered."""
    running = []

    async def waits(stream: Stream) -> None:
        running.append(1)
        try:
            await asyncio.sleep(1000)
        finally:
            running.pop()

    async def act(client: Client) -> None:
        for _ in range(300):
            number = client.begin("/waits")
            client.h2.reset_stream(number, 8)
        await client.send()
        number = client.begin()
        client.h2.send_data(number, framed(b"x"), end_stream=True)
        await client.send()
        assert (await client.status())["grpc-status"] == "0"
        assert not running

    served(act, {"/waits": waits})


def test_calls_that_are_over_before_they_begin(caplog: pytest.LogCaptureFixture) -> None:
    """Their headers, and what ends them, arrive together. That is no failure of the engine."""

    async def resets(client: Client) -> None:
        client.h2.reset_stream(client.begin(content_type="text/plain"), 8)
        number = client.begin()
        client.h2.send_data(number, framed(b"x"), end_stream=True)
        await client.send()
        assert (await client.status())["grpc-status"] == "0"

    async def ends(client: Client) -> None:
        client.begin()
        client.begin(content_type="text/plain")
        client.h2.close_connection()
        await client.send()
        await client.to_end()

    served(resets)
    served(ends)
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_client_that_leaves_cancels_its_calls() -> None:
    cancelled = asyncio.Event()

    async def waits(stream: Stream) -> None:
        stream.begin()
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def act(client: Client) -> None:
        client.begin("/waits")
        await client.send()
        await client.until(h2.events.ResponseReceived)

    served(act, {"/waits": waits})
    assert cancelled.is_set()


def test_a_reader_that_is_slow_stops_the_sender() -> None:
    sent = []

    async def floods(stream: Stream) -> None:
        for _ in range(100):
            await stream.send(bytes(10_000))
            sent.append(1)

    async def act(client: Client) -> None:
        client.begin("/floods")
        await client.send()
        await client.until(h2.events.DataReceived)
        await asyncio.sleep(0.05)
        assert len(sent) < 8  # 65,535 bytes

    served(act, {"/floods": floods})


def test_the_largest_message_fits_behind_any_other() -> None:
    """The window is opened in time for a message whose reader has taken little before it."""

    async def sizes(stream: Stream) -> None:
        while (message := await stream.receive()) is not None:
            await stream.send(struct.pack("<I", len(message)))

    sent = [(1 << 20) - 10, grpc.MESSAGE_LIMIT, grpc.MESSAGE_LIMIT // 5, grpc.MESSAGE_LIMIT]

    async def act(client: Client) -> None:
        number = client.begin("/sizes")
        data = b"".join(framed(bytes(size)) for size in sent)
        while data:
            room = min(client.h2.local_flow_control_window(number), client.h2.max_outbound_frame_size, len(data))
            if room:
                client.h2.send_data(number, data[:room], end_stream=room == len(data))
                data = data[room:]
                await client.send()
            else:
                await client.until(h2.events.WindowUpdated)
        assert (await client.status())["grpc-status"] == "0"
        received = [event.data for event in client.events if isinstance(event, h2.events.DataReceived)]
        assert b"".join(received) == b"".join(framed(struct.pack("<I", size)) for size in sent)

    served(act, {"/sizes": sizes})


@given(st.binary(max_size=400), st.booleans(), st.integers(0, 20))
def test_bytes_that_are_not_http2(data: bytes, preface: bool, kind: int) -> None:
    """The connection ends; nothing else happens."""

    async def work() -> None:
        failures: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        ours, theirs = socket.socketpair()
        connection = await grpc.join(ours.detach(), b"", b"", {"/echo": echo}, lambda: None)
        theirs.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5) if preface else b"")
        theirs.sendall(struct.pack(">I", len(data))[1:] + bytes((kind, 4, 0, 0, 0, 1)) + data)
        theirs.shutdown(socket.SHUT_WR)
        await asyncio.wait_for(_closed(connection), 30 * PATIENCE)
        theirs.close()
        assert not failures

    asyncio.run(work())


def test_bytes_that_came_with_the_request() -> None:
    async def work() -> None:
        ours, theirs = socket.socketpair()
        early = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        early.initiate_connection()
        early.send_headers(
            1,
            [
                *((":method", "POST"), (":scheme", "http"), (":authority", "x"), (":path", "/x")),
                ("content-type", "application/grpc"),
            ],
            True,
        )
        connection = await grpc.join(ours.detach(), b"", early.data_to_send(), {}, lambda: None)
        client = Client(theirs)
        client.h2 = early
        assert (await client.status())["grpc-status"] == "12"
        theirs.close()
        await _closed(connection)

    asyncio.run(work())


def test_settings_are_the_first_frame() -> None:
    """Even if the padding of early DATA opens the window of its stream at once."""

    async def work() -> None:
        ours, theirs = socket.socketpair()
        client = Client(theirs)
        client.h2.send_data(client.begin(), framed(b"x"), end_stream=True, pad_length=3)
        connection = await grpc.join(ours.detach(), b"", client.h2.data_to_send(), {"/echo": echo}, lambda: None)
        frame = await asyncio.get_running_loop().sock_recv(theirs, 9)
        assert frame[3] == 4
        theirs.close()
        await _closed(connection)

    asyncio.run(work())


def test_a_descriptor_is_closed_once_when_the_client_has_left() -> None:
    """A second close would end whatever has got the number since. A socket that closes its
    descriptor when it is collected says so.
    """

    async def work() -> None:
        ours, theirs = socket.socketpair()
        theirs.close()
        connection = await grpc.join(ours.detach(), b"head", b"", {"/echo": echo}, lambda: None)
        await asyncio.wait_for(_closed(connection), 30 * PATIENCE)
        await asyncio.sleep(0.01)  # the transport's last callback

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        uvloop.run(work())
        gc.collect()
    assert [str(each.message) for each in seen] == []


@given(st.text(max_size=30), st.integers(0, 2 * grpc.TEXT_BYTES))
def test_a_shortened_text(text: str, length: int) -> None:
    long = (text or "x") * (length // (len(text) or 1))
    short = grpc.shortened(long)
    assert len(short.encode(errors="replace")) <= grpc.TEXT_BYTES
    if short != long:
        before, _, after = short.partition(" … ")
        assert long.startswith(before[:100]) and long.endswith(after[-100:])
