"""What a client reads when the server at its URL fails: the URL, without its secrets, and a cause
in plain words, as in `docker import URL`.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NoReturn

import aiohttp
import aiohttp.resolver
import pytest
import uvloop

from engine.config import Config
from engine.errors import EngineError, Forbidden, InvalidParameter, NotFound, ServerError, Unauthorized
from engine.images.registry import Registries
from tests.support.logs.receivers import certificate
from tests.unit.images.test_registry import Ask, Close, Server

OK = b"HTTP/1.1 200 OK\r\n"
TO = "HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: "
NOT_HTTP = "the answer is not valid HTTP"
CUT = "the answer is cut short: "
ELSEWHERE = "it redirects to an invalid address"
OF_PYTHON = re.compile(r"[A-Z][a-z]+Error|\[Errno|\bb'|message=|_ssl|Errno|secret")
"""Classes, numbers and bytes of Python, and what must not be shown."""


def read(address: str, stall: float = 30) -> EngineError | bytes:
    """The body at an address, or the error in its place."""

    async def work() -> EngineError | bytes:
        registries = Registries(Config(registry_timeout=30, registry_certificates=Path("/nowhere")))
        registries.stall = stall
        try:
            async with registries.body(address) as body:
                return b"".join([chunk async for chunk in body])
        except EngineError as error:
            return error
        finally:
            await registries.rest()

    return uvloop.run(work())


def served(script: Callable[[Ask], Awaitable[None]], stall: float = 30) -> EngineError | bytes:
    async def work() -> EngineError | bytes:
        async with Server(script) as server:
            address = f"http://me:secret@{server.host}/x.tar?signature=secret#secret"
            found = await asyncio.to_thread(read, address, stall)
            if isinstance(found, EngineError):
                assert found.message.startswith(f'Get "http://{server.host}/x.tar": '), found.message
            return found

    return asyncio.run(work())


def said(found: EngineError | bytes) -> str:
    assert isinstance(found, EngineError)
    assert not OF_PYTHON.search(found.message), found.message
    return found.message.rpartition('": ')[2]


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (b"220 smtp.example ESMTP\r\n", NOT_HTTP),
        (OK + b"X: " + b"x" * 1_000_000 + b"\r\n\r\n", NOT_HTTP),
        (OK + b"no header\r\n\r\n", NOT_HTTP),
        (OK + b"Content-Length: x\r\n\r\n", NOT_HTTP),
        (OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc", NOT_HTTP),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nabc", CUT + "unexpected EOF"),
        (OK + b"Content-Length: 100\r\n\r\nabc", CUT + "unexpected EOF"),
        (b"", "the server closed the connection without an answer"),
        (OK[:10], "the server closed the connection without an answer"),
        (TO + "ftp://a/b\r\n\r\n", ELSEWHERE),
        (TO + "http://[::bad/\r\n\r\n", ELSEWHERE),
        (TO + "http://a:99999/\r\n\r\n", ELSEWHERE),
        (TO + "http:///x\r\n\r\n", ELSEWHERE),
        (TO + f"http://{'a' * 64}.example/\r\n\r\n", ELSEWHERE),
        (TO + "http://127.0.0.1:1/y?z\r\n\r\n", "dial tcp 127.0.0.1:1: connect: connection refused"),
    ],
)
def test_broken_answers(sent: bytes | str, text: str) -> None:
    async def script(ask: Ask) -> None:
        await ask.send(sent.encode() if isinstance(sent, str) else sent)
        raise Close

    found = served(script)
    assert said(found) == text and type(found).__mro__[1] is ServerError


def test_a_reset_and_a_stall() -> None:
    async def reset(ask: Ask) -> None:
        ask.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raise Close

    async def stalled(ask: Ask) -> None:
        await ask.send(OK + b"Content-Length: 100\r\n\r\nabc")
        await asyncio.Event().wait()

    async def again(ask: Ask) -> None:
        await ask.answer(302, Location="/again")

    assert said(served(reset)) == "connection reset by peer"
    assert said(served(stalled, stall=0.2)) == "no answer within 0.2 s"
    assert said(served(again)) == "more than 8 redirections"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, InvalidParameter),
        (401, Unauthorized),
        (403, Forbidden),
        (404, NotFound),
        (410, ServerError),
        (500, ServerError),
        (503, ServerError),
    ],
)
def test_refusals_are_passed_on(status: int, kind: type[EngineError]) -> None:
    found = served(lambda ask: ask.answer(status))
    assert said(found) == f"{status} X" and type(found) is kind


def test_nothing_listens() -> None:
    for host in ("127.0.0.1", "localhost", "[::1]"):
        assert said(read(f"http://{host}:1/x")) == f"dial tcp {host.strip('[]')}:1: connect: connection refused"


@pytest.mark.parametrize(
    ("number", "kind", "text"),
    [
        (socket.EAI_NONAME, NotFound, "no such host"),
        (socket.EAI_AGAIN, ServerError, "temporary failure in name resolution"),
    ],
)
def test_names_without_an_address(
    number: int, kind: type[EngineError], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def resolve(*_: object, **__: object) -> NoReturn:
        raise socket.gaierror(number, "Temporary failure in name resolution")

    monkeypatch.setattr(aiohttp.resolver.DefaultResolver, "resolve", resolve)
    found = read("http://☃.example/x")
    assert said(found) == f"dial tcp: lookup xn--n3h.example: {text}" and isinstance(found, kind)


@pytest.mark.parametrize(
    "address", [f"http://{'a' * 64}.com/x", "http://a..b/x", "http://1.2.3.4.5/x", "http://[::1/x", "http://a:99999/"]
)
def test_hosts_that_cannot_exist(address: str) -> None:
    found = read(address)
    assert type(found) is InvalidParameter and found.message == (
        f"invalid URL: its host is not a valid name or address: {address}"
    )


def test_tls(tmp_path: Path) -> None:
    def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad\r\n\r\n")
        writer.close()  # a server waits for its connections, since Python 3.12

    async def work() -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate(tmp_path)[1])
        async with Server(lambda ask: ask.answer(200)) as plain:
            found = await asyncio.to_thread(read, f"https://{plain.host}/x")
            assert said(found) == f"dial tcp {plain.host}: connect: the connection was closed"
        server = await asyncio.start_server(refuse, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            found = await asyncio.to_thread(read, f"https://127.0.0.1:{port}/x")
            assert said(found) == "http: server gave HTTP response to HTTPS client"
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
        async with server:
            port = server.sockets[0].getsockname()[1]
            found = await asyncio.to_thread(read, f"https://127.0.0.1:{port}/x")
            assert said(found) == "tls: failed to verify certificate: x509: unable to get local issuer certificate"

    asyncio.run(work())
