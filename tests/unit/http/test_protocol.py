"""A connection fed whole, byte by byte, in every split of two, and with something after it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ServerError
from engine.http.head import HTTP2, HTTP2_HEAD, KNOWN_HEAD, KNOWN_HEADS
from engine.http.messages import BODY_WAITING, AnyReply, Reply, Request, StreamReply
from engine.http.protocol import DRAIN_LIMIT, INPUT_WAITING, Connection
from engine.http.server import Limits, Server
from tests.unit.http.harness import App, FakeTransport, answers, bytewise, feed, settle

TAIL = b"GET /sync HTTP/1.1\r\nHost: x\r\n\r\n"


def get(path: str = "/sync", *fields: str, method: str = "GET", http: str = "1.1", body: bytes = b"") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/{http}", "Host: x", *fields, "", ""]).encode("latin-1") + body


def chunked(*chunks: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + end


GOOD = [
    (get(), 200, b'{"ok":true}\n'),
    (get("/sync?a=b&c"), 200, b'{"ok":true}\n'),
    (get("/async"), 200, b'{"later":true}\n'),
    (get("/%73ync"), 200, b'{"ok":true}\n'),
    (get("http://docker/sync?x=1"), 200, b'{"ok":true}\n'),
    (get("HTTP://docker/sync"), 200, b'{"ok":true}\n'),
    (get("/nothing"), 404, b'{"message":"page not found"}\n'),
    (get("http://docker"), 404, b'{"message":"page not found"}\n'),
    (get("*", method="OPTIONS"), 404, b'{"message":"page not found"}\n'),
    (get("/conflict"), 409, b'{"message":"the name is taken"}\n'),
    (get("/late/conflict"), 409, b'{"message":"the name is taken"}\n'),
    (get("/unchanged"), 304, b""),
    (get("/empty", method="POST"), 201, b""),
    (get("/ignore", "Content-Length: 4", method="POST", body=b"body"), 204, b""),
    (get("/ignore", "Transfer-Encoding: chunked", method="POST", body=chunked(b"body")), 204, b""),
    (get("/echo", "Content-Length: 4", method="POST", body=b"body"), 200, b"body"),
    (get("/echo", "content-length:   4  ", method="PUT", body=b"body"), 200, b"body"),
    (get("/echo", "Content-Length: 0", method="POST"), 200, b""),
    (get("/echo", method="POST"), 200, b""),
    (get("/echo", "Transfer-Encoding: chunked", method="POST", body=chunked(b"ab", b"cde")), 200, b"abcde"),
    (get("/echo", "Transfer-Encoding: Chunked", method="POST", body=chunked()), 200, b""),
    (get("/echo", "Transfer-Encoding: chunked", method="POST", body=b"3;x=y\r\nabc\r\n0\r\nA: b\r\n\r\n"), 200, b"abc"),
    (
        get("/echo", "Transfer-Encoding: chunked", method="POST", body=b"00a\r\n0123456789\r\n000\r\n\r\n"),
        200,
        b"0123456789",
    ),
    (
        get("/small", "Content-Length: 11", method="POST", body=b"01234567890"),
        413,
        b'{"message":"request body is larger than 10 bytes"}\n',
    ),
    (get("/stream"), 200, b"onetwo" + b"three" * 1000),
    (get("/sync", "Connection: Upgrade", "Upgrade: tcp"), 200, b'{"ok":true}\n'),
    (get("/sync", "X: " + "y" * 60_000), 200, b'{"ok":true}\n'),
    (b"\r\n\r\n" + get(), 200, b'{"ok":true}\n'),
]


@pytest.mark.parametrize("split", ["whole", "bytes"])
@pytest.mark.parametrize(("data", "status", "body"), GOOD, ids=[str(at) for at in range(len(GOOD))])
def test_good_requests_alone_and_with_a_tail(data: bytes, status: int, body: bytes, split: str) -> None:
    for tail in (b"", TAIL, TAIL + TAIL):
        pieces = [data + tail] if split == "whole" else bytewise(data + tail)
        if split == "bytes" and len(data) > 5000:
            pieces = [data[:10], *[data[at : at + 999] for at in range(10, len(data), 999)], tail]
        transport, _ = feed(pieces)
        found = answers(bytes(transport.out))
        assert [answer.status for answer in found] == [status] + [200] * (len(tail) // len(TAIL))
        assert found[0].body == body and all(answer.complete for answer in found)
        assert all(answer.headers["server"] == "test" and "date" in answer.headers for answer in found)
        assert all("connection" not in answer.headers for answer in found)
        assert not transport.closed


def test_every_split_in_two() -> None:
    data = get("/echo", "Transfer-Encoding: chunked", method="POST", body=chunked(b"ab", b"c")) + TAIL
    for at in range(1, len(data)):
        transport, _ = feed([data[:at], data[at:]])
        assert [answer.body for answer in answers(bytes(transport.out))] == [b"abc", b'{"ok":true}\n']


BAD = [
    (b"GET /sync HTTP/1.1\r\n\r\n", "0 Host header fields"),
    (get("/sync", "Host: y"), "2 Host header fields"),
    (b"GARBAGE\r\n\r\n", "malformed request"),
    (b"GARBAGE", "malformed request"),
    (b"GET /\r\n\r\n", "HTTP version 0.9"),
    (b"GET / HTTP/0.9\r\n\r\n", "HTTP version 0.9"),
    (b"GET / HTTP/2.0\r\n\r\n", "HTTP version 2.0"),
    (b"GET / HTTP/9.9\r\n\r\n", "malformed request"),
    (b"PRI / HTTP/2.0\r\n\r\n", "malformed request"),
    (b"PRI * HTTP/1.1\r\n\r\n", "malformed request"),
    (b"PRI * HTTP/2.0\r\nHost: x\r\n\r\n", "malformed request"),
    (b"\x16\x03\x01\x02\x00\x01\x00", "malformed request"),
    (b"get / HTTP/1.1\r\n\r\n", "malformed request"),
    (b"GET /a b HTTP/1.1\r\n\r\n", "malformed request"),
    (b"GET /\x00 HTTP/1.1\r\n\r\n", "malformed request"),
    (b"GET /\xc3\xa4 HTTP/1.1\r\n\r\n", "malformed request"),
    (b"GET host:80 HTTP/1.1\r\n\r\n", "malformed request"),
    (b"GET / HTTP/1.1\nHost: x\n\n", "malformed request"),
    (b"GET / HTTP/1.1\r\nHost : x\r\n\r\n", "malformed request"),
    (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", "malformed request"),
    (b"GET / HTTP/1.1\r\nA: b\r\n folded\r\n\r\n", "malformed request"),
    (b"GET / HTTP/1.1\r\nA: b\x00c\r\n\r\n", "malformed request"),
    (b"GET / HTTP/1.1\r\nA: b\n\nGET / HTTP/1.1\r\n\r\n", "malformed request"),
    (get("/sync", "Content-Length: 1", "Content-Length: 1", body=b"x"), "malformed request"),
    (get("/sync", "Content-Length: 1", "Content-Length: 2", body=b"xx"), "malformed request"),
    (get("/sync", "Content-Length: 1", "Transfer-Encoding: chunked", body=b"x"), "malformed request"),
    (get("/sync", "Transfer-Encoding: chunked", "Content-Length: 1", body=b"x"), "malformed request"),
    (get("/sync", "Transfer-Encoding: chunked", "Transfer-Encoding: chunked", body=b"x"), "malformed request"),
    (get("/sync", "Content-Length: -1"), "malformed request"),
    (get("/sync", "Content-Length: +1"), "malformed request"),
    (get("/sync", "Content-Length: 0x1"), "malformed request"),
    (get("/sync", "Content-Length: 1, 1"), "malformed request"),
    (get("/sync", "Content-Length: 9999999999999999999"), "Content-Length '9999999999999999999': at most 18 digits"),
    (get("/sync", "Content-Length: 99999999999999999999999"), "malformed request"),
    (get("/sync", "Content-Length:"), "malformed request"),
    (get("/sync", "Transfer-Encoding: gzip"), "malformed request"),
    (get("/sync", "Transfer-Encoding: gzip, chunked"), "transfer coding"),
    (get("/sync", "Transfer-Encoding: chunked", http="1.0"), "transfer coding"),
    (get("/%zz"), "bad percent-encoding in the path: %zz"),
    (get("/%4"), "bad percent-encoding in the path: %4"),
    (get("/%"), "bad percent-encoding"),
    (get("/%00"), "the path contains a NUL"),
    (get("/%ff"), "the path is not UTF-8"),
    (get("/sync?a=%g1"), "bad percent-encoding in the query: %g1"),
    (get("/sync?a%=1"), "bad percent-encoding in the query"),
    (get("/sync?a=%00"), "the query contains a NUL"),
    (get("/sync", "X: " + "y" * 66_000), "head is larger than 65536 bytes"),
    (b"GET /" + b"x" * 70_000, "head is larger than 65536 bytes"),
    (get("/echo", "Transfer-Encoding: chunked", body=b"xyz\r\n"), "not a chunk size"),
    (get("/echo", "Transfer-Encoding: chunked", body=b"-1\r\n"), "not a chunk size"),
    (get("/echo", "Transfer-Encoding: chunked", body=b"+1\r\n"), "not a chunk size"),
    (get("/echo", "Transfer-Encoding: chunked", body=b" 1\r\n"), "not a chunk size"),
    (get("/echo", "Transfer-Encoding: chunked", body=b"\r\n"), "not a chunk size"),
    (get("/echo", "Transfer-Encoding: chunked", body=b"ffffffffffffffff\r\n"), "not a chunk size"),
    (get("/echo", "Transfer-Encoding: chunked", body=b"1\nx\r\n"), "does not end in CR LF"),
    (get("/echo", "Transfer-Encoding: chunked", body=b"1\r\nxy\r\n"), "longer than its size"),
    (get("/echo", "Transfer-Encoding: chunked", body=b"1;" + b"x" * 5000), "a line of more than 4096"),
    (get("/echo", "Transfer-Encoding: chunked", body=b"0\r\n" + b"A: b\r\n" * 12_000), "trailers of more than"),
]


@pytest.mark.parametrize("split", ["whole", "bytes"])
@pytest.mark.parametrize(("data", "message"), BAD, ids=[str(at) for at in range(len(BAD))])
def test_bad_requests_get_one_json_answer_and_the_end(data: bytes, message: str, split: str) -> None:
    for before, tail in ((b"", b""), (b"", TAIL), (TAIL, TAIL)):
        everything = before + data + tail
        pieces = [everything] if split == "whole" else bytewise(everything)
        if split == "bytes" and len(data) > 5000:
            pieces = [everything[at : at + 1000] for at in range(0, len(everything), 1000)]
        transport, _ = feed(pieces, eof=message == "malformed request" and not tail)
        found = answers(bytes(transport.out))
        assert [answer.status for answer in found] == [200] * bool(before) + [400]
        last = found[-1]
        assert message in json.loads(last.body)["message"], last.body
        assert last.headers["content-type"] == "application/json" and last.body.endswith(b"}\n")
        assert last.headers["connection"] == "close"
        assert transport.closed or transport.eof


def test_http_2_is_a_method_that_an_application_may_have() -> None:
    for pieces in ([HTTP2_HEAD + b"SM\r\n\r\n"], bytewise(HTTP2_HEAD + b"SM\r\n\r\n")):
        transport, app = feed(pieces)
        assert [(request.method, request.path) for request in app.requests] == [(HTTP2, "/")]
        assert [answer.status for answer in answers(bytes(transport.out))] == [404]
        assert transport.closed or transport.eof


@pytest.mark.parametrize("before", [TAIL, get("/echo", "Content-Length: 4", method="POST", body=b"body")])
def test_http_2_begins_only_with_a_connection(before: bytes) -> None:
    """RFC 9113, 3.4. Otherwise a program that passes chosen requests of HTTP/1 on, over connections
    that it keeps, could be led to open a connection to BuildKit.
    """
    data = before + HTTP2_HEAD + b"SM\r\n\r\n"
    # two pieces: the first request may be known by its bytes
    for pieces in ([data], bytewise(data), [before, data[len(before) :]], [before, before, data[len(before) :]]):
        transport, app = feed(pieces)
        assert HTTP2 not in [request.method for request in app.requests]
        found = answers(bytes(transport.out))
        assert [answer.status for answer in found] == [200] * (len(found) - 1) + [400]
        assert "HTTP/2 after another request" in json.loads(found[-1].body)["message"]
        assert transport.closed or transport.eof


def test_connect_is_a_path_nobody_has() -> None:
    transport, _ = feed([b"CONNECT host:80 HTTP/1.1\r\nHost: host\r\n\r\n" + TAIL])
    assert [answer.status for answer in answers(bytes(transport.out))] == [404, 200]


def test_head_has_the_headers_of_get_and_no_body() -> None:
    for path in ("/sync", "/async", "/stream", "/conflict", "/nothing"):
        wanted, _ = feed([get(path)])
        transport, app = feed([get(path, method="HEAD") + TAIL])
        found = answers(bytes(transport.out), ["HEAD", "GET"])
        expected = answers(bytes(wanted.out))[0]
        assert found[0].status == expected.status
        assert {k: v for k, v in found[0].headers.items() if k != "date"} == {
            k: v for k, v in expected.headers.items() if k != "date"
        }
        assert found[0].body == b"" and found[1].status == 200
        assert app.closed_chunks == (path == "/stream")


def test_head_with_a_bad_query_has_no_body() -> None:
    transport, _ = feed([get("/sync?%", method="HEAD")])
    assert answers(bytes(transport.out))[0].status == 400


def test_one_write_per_answer() -> None:
    for path, writes in (("/sync", 1), ("/async", 1), ("/conflict", 1), ("/unchanged", 1)):
        transport, _ = feed([get(path)])
        assert transport.writes == writes


def test_close_when_asked() -> None:
    for field in ("Connection: close", "connection: Close", "Connection: foo, close"):
        transport, _ = feed([get("/sync", field) + TAIL])
        found = answers(bytes(transport.out))
        assert len(found) == 1 and found[0].headers["connection"] == "close"
        assert transport.closed or transport.eof


def test_http_1_0() -> None:
    transport, _ = feed([get(http="1.0") + TAIL])
    found = answers(bytes(transport.out))
    assert len(found) == 1 and found[0].headers["connection"] == "close"
    transport, _ = feed([get("/sync", "Connection: Keep-Alive", http="1.0") + get(http="1.0")])
    found = answers(bytes(transport.out))
    assert [answer.headers["connection"] for answer in found] == ["keep-alive", "close"]
    transport, _ = feed([get("/stream", http="1.0")])
    found = answers(bytes(transport.out))
    assert found[0].body == b"onetwo" + b"three" * 1000
    assert found[0].headers["connection"] == "close" and "transfer-encoding" not in found[0].headers
    assert transport.closed
    transport, _ = feed([get("/echo", "Content-Length: 2", method="POST", http="1.0", body=b"hi")])
    assert answers(bytes(transport.out))[0].body == b"hi"


def test_expect_continue_is_sent_when_the_handler_first_reads() -> None:
    head = get("/echo", "Content-Length: 4", "Expect: 100-continue", method="POST")
    transport, _ = feed([head, b"body", TAIL])
    assert [answer.status for answer in answers(bytes(transport.out))] == [100, 200, 200]
    transport, _ = feed(
        [head.replace(b"/echo", b"/upper"), b"body", TAIL]
    )  # an answer that is made of the body while it comes
    found = answers(bytes(transport.out))
    assert [answer.status for answer in found] == [100, 200, 200] and found[1].body == b"BODY"
    transport, _ = feed([head + b"bo", b"dy", TAIL])  # the client did not wait
    assert [answer.status for answer in answers(bytes(transport.out))] == [200, 200]
    transport, _ = feed([get("/ignore", "Content-Length: 4", "Expect: 100-continue", method="POST")])
    found = answers(bytes(transport.out))
    assert [answer.status for answer in found] == [204] and found[0].headers["connection"] == "close"
    transport, _ = feed([get("/sync", "Expect: 100-continue")])
    assert [answer.status for answer in answers(bytes(transport.out))] == [200]
    transport, _ = feed([get("/echo", "Content-Length: 1", "Expect: 100-continue", method="POST", http="1.0"), b"x"])
    assert [answer.status for answer in answers(bytes(transport.out))] == [200]


@pytest.mark.parametrize("expect", ["", "Expect: 100-continue"])
def test_a_body_announced_beyond_the_limit_is_refused_before_any_of_it_came(expect: str) -> None:
    fields = [field for field in (f"Content-Length: {1 << 40}", expect) if field]
    transport, _ = feed([get("/small", *fields, method="POST")])
    found = answers(bytes(transport.out))
    assert [answer.status for answer in found] == [413], "and no 100 before it"
    assert found[0].body == b'{"message":"request body is larger than 10 bytes"}\n'
    assert found[0].headers["connection"] == "close"


def test_a_body_that_nobody_reads_is_dropped_up_to_a_bound() -> None:
    body = b"x" * DRAIN_LIMIT
    transport, _ = feed([get("/ignore", f"Content-Length: {len(body)}", method="POST"), body[:9], body[9:] + TAIL])
    assert [answer.status for answer in answers(bytes(transport.out))] == [204, 200]
    transport, _ = feed([get("/ignore", f"Content-Length: {len(body) + 1}", method="POST"), body, b"x" + TAIL])
    found = answers(bytes(transport.out))
    assert [answer.status for answer in found] == [204] and found[0].headers["connection"] == "close"
    parts = chunked(b"y" * 1000, end=b"") * 300
    transport, _ = feed([get("/ignore", "Transfer-Encoding: chunked", method="POST"), parts, TAIL])
    assert [answer.status for answer in answers(bytes(transport.out))] == [204]
    assert transport.eof or transport.closed
    transport, _ = feed([get("/ignore", "Transfer-Encoding: chunked", method="POST"), b"zz\r\n" + TAIL])
    assert [answer.status for answer in answers(bytes(transport.out))] == [204]
    assert transport.eof or transport.closed


def test_pipelining_answers_in_order() -> None:
    paths = ["/async", "/sync", "/stream", "/late/conflict", "/sync", "/nothing", "/async"] * 20
    data = b"".join(get(path) for path in paths)
    wanted = {"/async": 200, "/sync": 200, "/stream": 200, "/late/conflict": 409, "/nothing": 404}
    for pieces in ([data], [data[at : at + 777] for at in range(0, len(data), 777)]):
        transport, app = feed(pieces)
        assert [answer.status for answer in answers(bytes(transport.out))] == [wanted[path] for path in paths]
        assert [request.path for request in app.requests] == paths


def test_many_pipelined_requests_do_not_recurse() -> None:
    transport, _ = feed([get() * 5000])
    assert len(answers(bytes(transport.out))) == 5000
    transport, _ = feed([get("/async") + get() * 5000])
    assert len(answers(bytes(transport.out))) == 5001


@pytest.mark.parametrize(("data", "status", "body"), GOOD, ids=[str(at) for at in range(len(GOOD))])
def test_the_same_bytes_again_get_the_same_answer(data: bytes, status: int, body: bytes) -> None:
    transport, app = feed([data] * 4)
    found = answers(bytes(transport.out))
    assert [(answer.status, answer.body) for answer in found] == [(status, body)] * 4
    assert len({(request.method, request.path, tuple(request.headers)) for request in app.requests}) == 1


def test_known_heads_are_bounded_and_hold_no_long_ones() -> None:
    async def scenario() -> None:
        server = Server(App())
        connection = Connection(server)
        connection.connection_made(FakeTransport())  # type: ignore[arg-type]
        known = server.known_heads
        for number in range(KNOWN_HEADS + 10):
            connection.data_received(get(f"/sync?{number}"))
        assert len(known) == 10
        for data in (get("/sync", "X: " + "y" * KNOWN_HEAD), get("/sync", "Upgrade: tcp"), get("/sync", http="1.0")):
            connection.data_received(data)
        assert len(known) == 10

    asyncio.run(scenario())


def test_input_beyond_the_bound_pauses_reading() -> None:
    async def scenario() -> None:
        app = App()
        server = Server(app)
        connection, transport = Connection(server), FakeTransport()
        connection.connection_made(transport)  # type: ignore[arg-type]
        count = INPUT_WAITING // len(TAIL) + 10
        connection.data_received(get("/slow"))
        connection.data_received(TAIL * count)
        assert transport.paused and not transport.out
        app.go.set()
        await settle()
        assert not transport.paused
        assert len(answers(bytes(transport.out))) == count + 1
        connection.connection_lost(None)

    asyncio.run(scenario())


def test_body_beyond_the_bound_pauses_reading() -> None:
    async def scenario() -> None:
        app = App()
        seen: list[int] = []

        async def lazy(request: Request) -> Reply:
            await app.go.wait()
            async for chunk in request.body:
                seen.append(len(chunk))
                await asyncio.sleep(0)
            return Reply()

        app.extra["lazy"] = lazy
        connection, transport = Connection(Server(app)), FakeTransport()
        connection.connection_made(transport)  # type: ignore[arg-type]
        connection.data_received(get("/lazy", "Content-Length: 1000000", method="POST"))
        sent = 0
        while not transport.paused:
            connection.data_received(b"x" * 10_000)
            sent += 10_000
        assert BODY_WAITING < sent <= BODY_WAITING + 20_000
        app.go.set()
        await settle(200)
        assert not transport.paused and sum(seen) == sent
        while sent < 1_000_000:
            assert not transport.paused
            connection.data_received(b"x" * 10_000)
            sent += 10_000
            await settle()
        await settle(200)
        assert answers(bytes(transport.out))[0].status == 200 and sum(seen) == 1_000_000
        connection.connection_lost(None)

    asyncio.run(scenario())


def test_a_client_that_takes_nothing_stops_the_next_request() -> None:
    async def scenario() -> None:
        app = App()
        connection, transport = Connection(Server(app)), FakeTransport()
        connection.connection_made(transport)  # type: ignore[arg-type]
        connection.pause_writing()
        connection.data_received(TAIL * 3)
        assert not app.requests
        connection.resume_writing()
        assert len(answers(bytes(transport.out))) == 3
        connection.connection_lost(None)

    asyncio.run(scenario())


def test_slow_reader_of_a_stream_is_waited_for() -> None:
    async def scenario() -> None:
        app = App()
        connection, transport = Connection(Server(app)), FakeTransport()
        connection.connection_made(transport)  # type: ignore[arg-type]
        connection.data_received(get("/stream"))
        connection.pause_writing()
        await settle()
        held = bytes(transport.out)
        assert answers(held)[0].body == b"one" and not answers(held)[0].complete
        connection.resume_writing()
        await settle()
        assert answers(bytes(transport.out))[0].complete
        connection.connection_lost(None)

    asyncio.run(scenario())


def test_head_of_a_stream_is_flushed_before_its_first_chunk() -> None:
    async def scenario() -> None:
        app = App()
        connection, transport = Connection(Server(app)), FakeTransport()
        connection.connection_made(transport)  # type: ignore[arg-type]
        connection.data_received(get("/endless"))
        await settle(1)
        assert bytes(transport.out).endswith(b"Transfer-Encoding: chunked\r\n\r\n")
        connection.connection_lost(None)
        await settle()
        assert app.closed_chunks == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("size", [10, 5000, 600_000])
def test_what_a_stream_has_at_once_is_written_at_once(size: int) -> None:
    """A short answer takes one system call, and wakes its client once. Large chunks are not kept
    back: only the transport knows when the client reads too slowly.
    """

    async def chunks() -> AsyncGenerator[bytes, None]:
        yield b"one"
        yield b"x" * size
        seen.append(transport.writes)
        yield b"two"

    async def scenario() -> None:
        app = App()
        app.extra["now"] = lambda request: StreamReply(200, chunks())
        connection = Connection(Server(app))
        connection.connection_made(transport)  # type: ignore[arg-type]
        connection.data_received(get("/now"))
        await settle()
        connection.connection_lost(None)

    seen: list[int] = []
    transport = FakeTransport()
    asyncio.run(scenario())
    (found,) = answers(bytes(transport.out))
    assert found.complete and found.body == b"one" + b"x" * size + b"two"
    assert (seen[0], transport.writes) == ((0, 1) if size < 8000 else (1, 2))


def test_what_came_before_a_stream_broke_is_written() -> None:
    async def chunks() -> AsyncGenerator[bytes, None]:
        yield b"one"
        raise ServerError("the source broke")

    async def scenario() -> None:
        app = App()
        app.extra["now"] = lambda request: StreamReply(200, chunks())
        connection = Connection(Server(app))
        connection.connection_made(transport)  # type: ignore[arg-type]
        connection.data_received(get("/now"))
        await settle()
        connection.connection_lost(None)

    transport = FakeTransport()
    asyncio.run(scenario())
    assert transport.closed and transport.out.endswith(b"\r\n\r\n3\r\none\r\n")


def test_a_stream_that_breaks_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.CRITICAL):
        transport, app = feed([get("/broken") + TAIL])
    found = answers(bytes(transport.out))
    assert len(found) == 1 and not found[0].complete
    assert transport.closed and app.closed_chunks == 1


class Chunks:
    """A source that counts how often it is closed."""

    def __init__(self) -> None:
        self.closed = 0

    def __aiter__(self) -> Chunks:
        return self

    async def __anext__(self) -> bytes:
        return b"chunk"

    async def aclose(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("later", [False, True])
def test_an_answer_that_cannot_be_written_ends_the_connection(
    later: bool, grows: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """For example a header with a line break, which would be another header. The client gets an
    error and does not wait forever.
    """

    async def scenario() -> None:
        app = App()
        chunks = Chunks()
        bad = (("A", "b\r\nC: d"),)
        reply = StreamReply(200, chunks, headers=bad) if grows else Reply(200, b"{}", headers=bad)

        async def waits(request: Request) -> AnyReply:
            await asyncio.sleep(0)
            return reply

        app.extra["bad"] = waits if later else lambda request: reply
        connection, transport = Connection(Server(app)), FakeTransport()
        connection.connection_made(transport)  # type: ignore[arg-type]
        connection.data_received(get("/bad"))
        await settle()
        assert transport.closed and not transport.out
        assert chunks.closed == grows
        connection.connection_lost(None)

    asyncio.run(scenario())
    assert "GET /bad: the answer could not be written" in caplog.text


def test_a_bug_is_500_without_traceback(caplog: pytest.LogCaptureFixture) -> None:
    transport, _ = feed([get("/bug") + TAIL])
    found = answers(bytes(transport.out))
    assert [answer.status for answer in found] == [500, 200]
    assert json.loads(found[0].body) == {"message": "internal error; the engine's log has the details"}
    assert "Traceback" in caplog.text


def test_client_leaves() -> None:
    """A handler that only serves the client is cancelled; one that changes something runs to its
    end.
    """

    async def scenario() -> None:
        for path, cancelled, finished in (("/wait", 1, 0), ("/slow", 0, 1)):
            app = App()
            connection, transport = Connection(Server(app)), FakeTransport()
            connection.connection_made(transport)  # type: ignore[arg-type]
            connection.data_received(get(path))
            await settle()
            connection.connection_lost(None)
            await settle()
            app.go.set()
            await settle()
            assert (app.cancelled, app.finished) == (cancelled, finished)
            assert not transport.out

    asyncio.run(scenario())


def test_body_that_ends_early_is_an_error_for_its_reader() -> None:
    for fields, part in (("Content-Length: 9", b"1234"), ("Transfer-Encoding: chunked", b"4\r\n1234\r\n")):
        transport, app = feed([get("/echo", fields, method="POST") + part], eof=True)
        found = answers(bytes(transport.out))
        assert found[0].status == 400 and b"middle of a request's body" in found[0].body
        assert not app.bodies and transport.closed


def test_eof_in_a_head() -> None:
    transport, app = feed([get()[:-1]], eof=True)
    assert answers(bytes(transport.out))[0].status == 400 and transport.closed and not app.requests
    transport, _ = feed([], eof=True)
    assert transport.closed and not transport.out
    transport, _ = feed([TAIL], eof=True)
    assert transport.closed and len(answers(bytes(transport.out))) == 1


def test_half_close_still_gets_its_answers() -> None:
    async def scenario() -> None:
        app = App()
        connection, transport = Connection(Server(app)), FakeTransport()
        connection.connection_made(transport)  # type: ignore[arg-type]
        connection.data_received(get("/slow") + TAIL + TAIL)
        assert connection.eof_received()
        app.go.set()
        await settle()
        found = answers(bytes(transport.out))
        assert [answer.status for answer in found] == [200, 200, 200] and transport.closed
        connection.connection_lost(None)

        app = App()
        connection, transport = Connection(Server(app)), FakeTransport()
        connection.connection_made(transport)  # type: ignore[arg-type]
        connection.data_received(get("/slow") + TAIL[:-3])
        assert connection.eof_received()
        app.go.set()
        await settle()
        assert [answer.status for answer in answers(bytes(transport.out))] == [200, 400] and transport.closed
        connection.connection_lost(None)

    asyncio.run(scenario())


def test_request_as_the_application_sees_it() -> None:
    data = get("/echo?a=1&b=%20x+y&a=2&flag&empty=", "X-Thing:  some value ", "X-thing: other", method="PUT")
    _, app = feed([data])
    request = app.requests[0]
    assert (request.method, request.path, request.keep) == ("PUT", "/echo", True)
    assert dict(request.query) == {"a": "1", "b": " x y", "flag": "", "empty": ""}
    assert request.query.get_all("a") == ("1", "2") and request.query.get("none", "d") == "d"
    assert request.headers.get("x-thing") == "some value" and request.headers.get("X-THING") == "some value"
    assert request.headers.get_all("x-Thing") == ["some value", "other"]
    assert "x-thing" in request.headers and "y" not in request.headers and request.headers.get("y", "z") == "z"


# --- fuzz -----------------------------------------------------------------------------------------

FUZZ = settings(max_examples=300)
SMALL = Limits(head=400)


def sane(transport: FakeTransport, data: bytes) -> None:
    """Assert that, for any input, each answer is complete, errors are JSON, and the connection is
    closed after a refusal.
    """
    found = answers(bytes(transport.out), methods(data))
    for answer in found:
        assert answer.complete or transport.closed
        if answer.status >= 400:
            if answer.body:
                assert set(json.loads(answer.body)) == {"message"}
            assert answer.status in (400, 404, 409, 413, 500)
    closing = [answer.headers.get("connection") == "close" for answer in found]
    assert not any(closing[:-1])


def methods(data: bytes) -> list[str]:
    return ["GET"] * (data.count(b"\n") + 1)


@FUZZ
@given(st.lists(st.binary(max_size=60), max_size=8))
def test_random_bytes(pieces: list[bytes]) -> None:
    transport, _ = feed(pieces, limits=SMALL, eof=True)
    sane(transport, b"".join(pieces))


SEEDS = [data for data, *_ in GOOD + BAD if len(data) < 300 and not data.startswith(b"HEAD")]


@FUZZ
@given(st.data())
def test_mutated_requests(data: st.DataObject) -> None:
    stream = bytearray(b"".join(data.draw(st.lists(st.sampled_from(SEEDS), min_size=1, max_size=3))))
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(stream) - 1))
        change = data.draw(st.sampled_from(("flip", "cut", "insert", "copy")))
        if change == "flip":
            stream[at] = data.draw(st.integers(0, 255))
        elif change == "cut" and len(stream) > 10:
            del stream[at : at + data.draw(st.integers(1, 9))]
        elif change == "insert":
            stream[at:at] = data.draw(
                st.sampled_from((b"\r\n", b"\n", b"\0", b"%", b":", b" ", b"chunked", b"0\r\n\r\n"))
            )
        else:
            stream[at:at] = stream[at : at + 20]
        if not stream:
            return
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    pieces = [bytes(stream[a:b]) for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    if b"HEAD " in stream:
        return
    logging.disable(logging.CRITICAL)
    try:
        transport, _ = feed([piece for piece in pieces if piece], eof=True)
    finally:
        logging.disable(logging.NOTSET)
    sane(transport, bytes(stream))


@FUZZ
@given(st.lists(st.sampled_from([data for data, *_ in GOOD if len(data) < 300]), min_size=1, max_size=4), st.data())
def test_splits_change_nothing(requests: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(requests)
    cuts = sorted(data.draw(st.lists(st.integers(1, len(stream) - 1), max_size=8)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True) if a < b]
    whole = answers(bytes(feed([stream])[0].out))
    split = answers(bytes(feed(pieces)[0].out))
    assert [(answer.status, answer.body) for answer in whole] == [(answer.status, answer.body) for answer in split]
