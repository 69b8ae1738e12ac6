"""The client of log targets over HTTP, with servers that misbehave."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from engine.logs import web
from engine.logs.web import Answer, Client

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


async def request_of(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Head and body of a request."""
    head = await reader.readuntil(b"\r\n\r\n")
    size = 0
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-length:"):
            size = int(line.split(b":")[1])
    return head, await reader.readexactly(size)


def answered(serve: Serve, use: Callable[[Client, str], Awaitable[Any]], **options: Any) -> Any:
    """What `use` returns with a client, and the URL of such a server."""

    async def whole() -> Any:
        async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await serve(reader, writer)
            except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
                pass  # also when the loop ends, or asyncio would log it
            finally:
                writer.close()

        server = await asyncio.start_server(served, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = Client(**options)
        try:
            return await use(client, f"http://127.0.0.1:{port}/path")
        finally:
            await client.close()
            server.close()

    return asyncio.run(whole())


def once(answer: bytes) -> Serve:
    """Answers a request on each connection, and closes it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(answer)
        await writer.drain()

    return serve


async def get(client: Client, url: str) -> Answer:
    return await client.request("GET", url, patience=5)


def test_an_answer() -> None:
    answer = b"HTTP/1.1 403 Not today\r\nX-Name: value\r\nContent-Length: 3\r\n\r\nno\n"
    found = answered(once(answer), get)
    assert (found.status, found.reason, found.headers["x-name"], found.body) == (403, "Not today", "value", b"no\n")
    assert found.line == "403 Not today"


@pytest.mark.parametrize("size", [0, 1, 70_000, (1 << 20) + 1, 3 << 20])
def test_bodies(size: int) -> None:
    received: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head, body = await request_of(reader)
        received.extend((head, body))
        writer.write(OK)
        await writer.drain()

    async def use(client: Client, url: str) -> Answer:
        return await client.request("POST", url, {"X-Own": "1"}, b"x" * size)

    assert answered(serve, use).body == b"ok"
    head, body = received
    assert body == b"x" * size
    lines = head.lower().split(b"\r\n")
    assert lines[0] == b"post /path http/1.1" and b"x-own: 1" in lines and b"accept-encoding: identity" in lines
    assert not any(line.startswith((b"content-type", b"transfer-encoding")) for line in lines)


def test_redirects_are_not_followed() -> None:
    answer = b"HTTP/1.1 307 There\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"
    assert answered(once(answer), get).status == 307


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"", "connection closed by the target"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort", "ayload"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3000000\r\n\r\n" + b"x" * 3_000_000, "the answer has more than 1048576"),
        (b"no HTTP at all\r\n\r\n", ""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: ten\r\n\r\n", ""),
    ],
)
def test_answers_that_are_none(answer: bytes, text: str) -> None:
    with pytest.raises(OSError) as failed:
        answered(once(answer), get)
    assert failed.value.strerror and text in failed.value.strerror


def test_a_server_that_does_not_answer() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(-1)  # until the client leaves

    async def use(client: Client, url: str) -> Answer:
        return await client.request("POST", url, None, b"x", patience=0.05)

    with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
        answered(serve, use)


def test_a_server_that_answers_byte_by_byte() -> None:
    """The whole answer has to come in time."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.01)

    async def use(client: Client, url: str) -> Answer:
        return await client.request("GET", url, patience=0.1)

    with pytest.raises(TimeoutError):
        answered(serve, use)


def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

        async def use(client: Client, _: str) -> Answer:
            return await client.request("GET", f"http://127.0.0.1:{port}/")

        with pytest.raises(OSError) as failed:
            answered(once(OK), use)
    assert failed.value.strerror == f"dial 127.0.0.1:{port}: Connection refused"


def test_a_name_without_an_address() -> None:
    async def use(client: Client, _: str) -> Answer:
        return await client.request("GET", "http://nothing.invalid:1/")

    with pytest.raises(OSError) as failed:
        answered(once(OK), use)
    assert str(failed.value.strerror).startswith("lookup nothing.invalid: ")


def test_tls_with_a_plain_server() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad\r\n\r\n")
        await writer.drain()

    async def use(client: Client, url: str) -> Answer:
        return await client.request("GET", url.replace("http:", "https:"), patience=5)

    with pytest.raises(ssl.SSLError):
        answered(serve, use)


def test_a_connection_that_was_closed_meanwhile() -> None:
    """The request is sent again on a new one; a new one that is closed is a failure."""
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await request_of(reader)
        writer.write(OK)
        await writer.drain()
        if connections < 3:
            await request_of(reader)  # and closes without an answer
        else:
            await request_of(reader)
            writer.write(OK)
            await writer.drain()

    async def use(client: Client, url: str) -> list[bytes]:
        return [(await client.request("POST", url, None, b"x")).body for _ in range(4)]

    assert answered(serve, use) == [b"ok"] * 4
    assert connections == 3


@pytest.mark.parametrize("sticky", [False, True])
def test_cookies(sticky: bool) -> None:
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await request_of(reader))[0])
        writer.write(b"HTTP/1.1 200 OK\r\nSet-Cookie: server=7\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()

    async def use(client: Client, url: str) -> None:
        await get(client, url)
        await get(client, url)

    answered(serve, use, sticky=sticky)
    assert [b"server=7" in head for head in heads] == [False, sticky]


def test_connections_are_limited() -> None:
    under_way = most = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await request_of(reader)
        await asyncio.sleep(0)
        writer.write(OK)
        await writer.drain()
        under_way -= 1

    async def use(client: Client, url: str) -> None:
        await asyncio.gather(*(get(client, url) for _ in range(20)))

    answered(serve, use, limit=2)
    assert most <= 2


def test_a_url_that_is_none() -> None:
    async def use(client: Client, _: str) -> Answer:
        return await client.request("GET", "http://")

    with pytest.raises(OSError):
        answered(once(OK), use)


def test_the_longest_answer() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % web.ANSWER_MAX + b"x" * web.ANSWER_MAX
    assert len(answered(once(answer), get).body) == web.ANSWER_MAX
