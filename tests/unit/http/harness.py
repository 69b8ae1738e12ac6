"""A small application, a transport that only records, and a reader of answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, NamedTuple

import uvloop

from engine.api import replies
from engine.errors import Conflict, NotFound, NotModified
from engine.http.messages import AnyReply, Reply, Request, StreamReply
from engine.http.protocol import Connection
from engine.http.server import Limits, Server
from tests.support import PATIENCE

SHORT = Limits(head_seconds=0.2, body_seconds=0.2, linger_seconds=0.2)


class App:
    """An application with routes by path. Handlers store their observations in its attributes."""

    headers = (("Server", "test"),)

    def __init__(self) -> None:
        self.closed_chunks = 0
        self.cancelled = 0
        self.finished = 0
        self.go = asyncio.Event()
        self.bodies: list[bytes] = []
        self.requests: list[Request] = []
        self.extra: dict[str, Callable[[Request], AnyReply | Awaitable[AnyReply]]] = {}

    def __call__(self, request: Request) -> AnyReply | Awaitable[AnyReply]:
        self.requests.append(request)
        name = request.path.strip("/").replace("/", "_")
        found = self.extra.get(name) or getattr(self, "do_" + name, None)
        if found is None:
            raise NotFound("page not found")
        return found(request)  # type: ignore[no-any-return]

    def is_hijack(self, method: str, path: str) -> bool:
        return path.startswith("/hijack")

    def error_reply(self, error: BaseException) -> Reply:
        return replies.error_reply(error)

    def do_sync(self, request: Request) -> Reply:
        return Reply(200, b'{"ok":true}\n')

    async def do_async(self, request: Request) -> Reply:
        await asyncio.sleep(0)
        return Reply(200, b'{"later":true}\n')

    async def do_slow(self, request: Request) -> Reply:
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        self.finished += 1
        return Reply(200, b'"slow"\n')

    def do_wait(self, request: Request) -> Awaitable[Reply]:
        request.cancellable = True
        return self.do_slow(request)

    async def do_echo(self, request: Request) -> Reply:
        body = await request.body.read(10_000_000)
        self.bodies.append(body)
        return Reply(200, body, "application/octet-stream")

    async def do_small(self, request: Request) -> Reply:
        return Reply(200, await request.body.read(10))

    def do_ignore(self, request: Request) -> Reply:
        return Reply(204)

    def do_empty(self, request: Request) -> Reply:
        return Reply(201)

    def do_unchanged(self, request: Request) -> Reply:
        raise NotModified("container x is already started")

    def do_conflict(self, request: Request) -> Reply:
        raise Conflict("the name is taken")

    async def do_late_conflict(self, request: Request) -> Reply:
        raise Conflict("the name is taken")

    def do_bug(self, request: Request) -> Reply:
        raise KeyError("oops")

    def do_stream(self, request: Request) -> StreamReply:
        return StreamReply(200, Chunks(self, [b"one", b"", b"two", b"three" * 1000]), "text/plain")

    def do_upper(self, request: Request) -> StreamReply:
        """The body in upper case, sent while it is received."""

        async def chunks() -> AsyncGenerator[bytes, None]:
            async for chunk in request.body:
                yield chunk.upper()

        return StreamReply(200, chunks(), "text/plain")

    def do_broken(self, request: Request) -> StreamReply:
        return StreamReply(200, Chunks(self, [b"one"], fail=True))

    def do_endless(self, request: Request) -> StreamReply:
        request.cancellable = True
        return StreamReply(200, Chunks(self, [b"first"], endless=True))


class Chunks:
    """Counts how often it was closed."""

    def __init__(self, app: App, chunks: Iterable[bytes], *, endless: bool = False, fail: bool = False) -> None:
        self.app = app
        self.chunks = list(chunks)
        self.endless = endless
        self.fail = fail

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        await asyncio.sleep(0)
        if self.chunks:
            return self.chunks.pop(0)
        if self.endless:
            await self.app.go.wait()
        if self.fail:
            raise RuntimeError("the source broke")
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self.app.closed_chunks += 1


class FakeTransport:
    """A transport that accepts everything at once."""

    def __init__(self) -> None:
        self.out = bytearray()
        self.writes = 0
        self.closed = False
        self.eof = False
        self.paused = False

    def write(self, data: bytes) -> None:
        assert not self.eof, "written after EOF"
        self.writes += 1
        self.out += data

    def writelines(self, pieces: Iterable[bytes]) -> None:
        self.write(b"".join(pieces))

    def write_eof(self) -> None:
        self.eof = True

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        assert not self.paused
        self.paused = True

    def resume_reading(self) -> None:
        assert self.paused
        self.paused = False

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes
    complete: bool


def answers(data: bytes, methods: Iterable[str] = ()) -> list[Answer]:
    """Read all answers in `data`; `methods` of their requests, GET by default."""
    found = []
    asked = iter(methods)
    while data:
        head, separator, data = data.partition(b"\r\n\r\n")
        assert separator, head
        first, *lines = head.decode("latin-1").split("\r\n")
        http, status, _ = first.split(" ", 2)
        assert http == "HTTP/1.1"
        headers: dict[str, str] = {}
        for line in lines:
            name, _, value = line.partition(": ")
            assert name.lower() not in headers, f"{name} twice"
            headers[name.lower()] = value
        if status == "100":
            found.append(Answer(100, headers, b"", True))
            continue
        method = next(asked, "GET")
        if method == "HEAD" or status in ("204", "304"):
            body, complete = b"", True
        elif headers.get("transfer-encoding") == "chunked":
            body, data, complete = _chunked(data)
        elif "content-length" in headers:
            size = int(headers["content-length"])
            body, data = data[:size], data[size:]
            complete = len(body) == size
        else:
            body, data, complete = data, b"", True
        found.append(Answer(int(status), headers, body, complete))
    return found


def _chunked(data: bytes) -> tuple[bytes, bytes, bool]:
    body = b""
    while True:
        line, separator, rest = data.partition(b"\r\n")
        if not separator:
            return body, b"", False
        size = int(line, 16)
        chunk, data = rest[:size], rest[size + 2 :]
        assert rest[size : size + 2] == b"\r\n"
        if size == 0:
            return body, data, True
        body += chunk


async def settle(rounds: int = 20) -> None:
    """Let tasks that need no I/O run."""
    for _ in range(rounds):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 (nothing announces these conditions)
            await asyncio.sleep(0.002)


def feed(pieces: Iterable[bytes], *, eof: bool = False, limits: Limits | None = None) -> tuple[FakeTransport, App]:
    """Give pieces to a fresh connection, letting its tasks run in between."""

    pieces = list(pieces)

    async def scenario() -> tuple[FakeTransport, App]:
        app = App()
        server = Server(app, limits=limits)
        connection, transport = Connection(server), FakeTransport()
        connection.connection_made(transport)  # type: ignore[arg-type]
        for piece in pieces:
            if transport.closed:
                break
            connection.data_received(piece)
            assert connection.incoming in connection.phase.incoming
            await settle(4)
            assert connection.incoming in connection.phase.incoming
        await settle(20 + 3 * len(app.requests) + 6 * b"".join(pieces).count(b"HTTP"))
        if eof and not transport.closed:
            if not connection.eof_received():
                transport.close()
            await settle()
        connection.connection_lost(None)
        await server.close(0)
        return transport, app

    return asyncio.run(scenario())


def bytewise(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


def serve(scenario: Callable[[App, str, Server], Awaitable[None]], path: str, limits: Limits | None = None) -> None:
    """Run a scenario against a real server on a Unix socket; everything must be gone afterwards."""

    async def run() -> None:
        app = App()
        server = Server(app, limits=limits)
        await server.listen_unix(path)
        try:
            async with asyncio.timeout(120):
                await scenario(app, path, server)
        finally:
            app.go.set()
            await server.close(1)
            left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in left:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait_for(task, 2 * PATIENCE)
        assert not server.connections
        assert not server.timed

    uvloop.run(run())
