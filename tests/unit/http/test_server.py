# ruff: noqa: ASYNC220, ASYNC240
# Tests may block their own loop for a moment.
"""A real server on uvloop: listeners, time limits, hijacked connections, clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import grp
import json
import os
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import uvloop

from engine.errors import Conflict, ServerError
from engine.http.hijack import Hijack
from engine.http.messages import AnyReply, Reply, Request, StreamReply
from engine.http.protocol import Connection
from engine.http.server import Limits, Server
from tests.support import PATIENCE
from tests.unit.http.harness import SHORT, App, answers, serve, until

RAW = "application/vnd.docker.raw-stream"
GET = b"GET /sync HTTP/1.1\r\nHost: x\r\n\r\n"


async def connect(path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_unix_connection(path)


async def exchange(path: str, data: bytes, *, half_close: bool = False) -> bytes:
    """Send, and read until the server closes."""
    reader, writer = await connect(path)
    writer.write(data)
    if half_close:
        writer.write_eof()
    received = await reader.read(-1)
    writer.close()
    return received


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "s")


# --- listeners ------------------------------------------------------------------------------------


def test_socket_is_for_root_and_group_alone(path: str) -> None:
    async def scenario(app: App, path: str, server: Server) -> None:
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o660
        group = grp.getgrgid(0).gr_name
        await server.listen_unix(path + "2", group)
        assert stat.S_IMODE(os.stat(path + "2").st_mode) == 0o660 and os.stat(path + "2").st_gid == 0
        await server.listen_unix(path + "3", "no-such-group")
        for each in (path, path + "2", path + "3"):
            reply = await exchange(each, b"GET /sync HTTP/1.0\r\n\r\n")
            assert answers(reply)[0].status == 200

    before = os.umask(0o022)
    os.umask(before)
    serve(scenario, path)
    now = os.umask(before)
    os.umask(now)
    assert now == before
    assert not [name for name in os.listdir(os.path.dirname(path)) if name.startswith("s")]


@pytest.mark.parametrize("mask", [0, 0o022, 0o777])
def test_the_mode_of_a_socket_does_not_depend_on_the_umask(
    mask: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The umask is that of all threads, so the server leaves it alone; the socket never has a wider
    mode.
    """
    made: list[int] = []
    chmod = os.chmod

    def seen(path: str, mode: int) -> None:
        made.append(stat.S_IMODE(os.lstat(path).st_mode))
        chmod(path, mode)

    async def scenario(app: App, path: str, server: Server) -> None:
        before = os.umask(mask)
        try:
            with monkeypatch.context() as patch:
                patch.setattr(os, "umask", lambda _: pytest.fail("the umask was set"))
                patch.setattr(os, "chmod", seen)
                await server.listen_unix(path + "2")
        finally:
            os.umask(before)
        assert made == [0o660 & ~mask]
        assert stat.S_IMODE(os.stat(path + "2").st_mode) == 0o660

    serve(scenario, path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file to a group")
def test_socket_belongs_to_its_group(path: str) -> None:
    async def scenario(app: App, path: str, server: Server) -> None:
        other = next(entry for entry in grp.getgrall() if entry.gr_gid != 0)
        await server.listen_unix(path + "2", other.gr_name)
        assert os.stat(path + "2").st_gid == other.gr_gid and stat.S_IMODE(os.stat(path + "2").st_mode) == 0o660

    serve(scenario, path)


def test_stale_socket_is_replaced_and_a_live_one_is_not(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(path)

    async def scenario(app: App, path: str, server: Server) -> None:
        with pytest.raises(ServerError, match="another process listens there"):
            await server.listen_unix(path)
        file = path + "-file"
        Path(file).write_text("precious")
        with pytest.raises(ServerError, match="is not a socket"):
            await server.listen_unix(file)
        assert Path(file).read_text() == "precious"
        with pytest.raises(ServerError, match="has 1 to 107 bytes"):
            await server.listen_unix("/" + "x" * 107)
        with pytest.raises(ServerError, match="No such file"):
            await server.listen_unix(path + "-none/s")
        assert answers(await exchange(path, b"GET /sync HTTP/1.0\r\n\r\n"))[0].status == 200

    serve(scenario, path)


def test_socket_that_is_no_longer_ours_stays(path: str) -> None:
    async def scenario(app: App, path: str, server: Server) -> None:
        os.unlink(path)
        Path(path).write_text("another's")

    serve(scenario, path)
    assert Path(path).read_text() == "another's"


def test_plain_tcp_is_for_loopback_alone(path: str) -> None:
    async def scenario(app: App, path: str, server: Server) -> None:
        port = await server.listen_tcp("127.0.0.1", 0, None)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET)
        assert b'{"ok":true}' in await reader.readuntil(b"}\n")
        writer.close()
        for host in ("0.0.0.0", "10.0.0.1", "::", "example.org", ""):
            with pytest.raises(ServerError, match="only loopback"):
                await server.listen_tcp(host, 0, None)
        with pytest.raises(ServerError, match="cannot listen on 127"):
            await server.listen_tcp("127.0.0.1", port, None)

    serve(scenario, path)


def test_pages_of_other_sites_are_refused_on_tcp(path: str) -> None:
    foreign = b"Origin: http://evil.example\r\n"
    head = b"POST /echo HTTP/1.1\r\nHost: 127.0.0.1\r\n%bContent-Length: 4\r\n\r\n"

    async def scenario(app: App, path: str, server: Server) -> None:
        port = await server.listen_tcp("127.0.0.1", 0, None)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head % foreign + b"body" + GET + GET.replace(b"x", b"x\r\nUser-Agent: Mozilla/5.0"))
        writer.write(head % b"Connection: close\r\n" + b"more")
        found = [(each.status, each.body) for each in answers(await reader.read(-1))]
        assert [status for status, _ in found] == [403, 200, 403, 200]
        assert b"Origin 'http://evil.example'" in found[0][1] and b"Host 'x'" in found[2][1]
        assert found[3][1] == b"more"
        assert [request.path for request in app.requests] == ["/sync", "/echo"]
        writer.close()
        through_a_socket = await exchange(path, head % (foreign + b"Connection: close\r\n") + b"body")
        assert answers(through_a_socket)[0].status == 200, "no browser reaches it"

    serve(scenario, path)


def test_the_owner_of_a_body_is_its_process_or_host(path: str) -> None:
    async def scenario(app: App, path: str, server: Server) -> None:
        async def owner(request: Request) -> Reply:
            found = request.body.owner
            assert await request.body.read(10) == b"body"
            return Reply(200, found.encode())

        app.extra["owner"] = owner
        head = b"POST /owner HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 4\r\n\r\n"
        reply = answers(await exchange(path, head + b"body"))[0].body.decode()
        assert reply == f"unix:{os.getpid()}/{os.getuid()}"
        port = await server.listen_tcp("127.0.0.1", 0, None)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + b"body")
        assert answers(await reader.read(-1))[0].body.decode() == "127.0.0.1"
        writer.close()

    serve(scenario, path)


def test_many_clients_at_once(path: str) -> None:
    async def scenario(app: App, path: str, server: Server) -> None:
        async def client(number: int) -> None:
            reader, writer = await connect(path)
            for _ in range(3):
                writer.write(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n<%03d>" % number)
                assert answers(await reader.readuntil(b">"))[0].body == b"<%03d>" % number
            writer.close()

        await asyncio.gather(*(client(number) for number in range(300)))
        await until(lambda: not server.connections)

    serve(scenario, path)


# --- time limits ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"G", "head was not complete within 0.2 s"),
        (b"GET /sync HTTP/1.1\r\nHost: x\r\n", "head was not complete within 0.2 s"),
        (GET + b"GET /sync HTTP/1.1\r\nHost: x\r\n", "head was not complete within 0.2 s"),
        (
            b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n1234",
            "no byte of the request's body came for 0.2 s",
        ),
        (
            b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n12",
            "no byte of the request's body",
        ),
        (b"POST /hijack HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n1234", "no byte of the request's body"),
    ],
)
def test_what_trickles_is_ended(path: str, data: bytes, message: str) -> None:
    async def scenario(app: App, path: str, server: Server) -> None:
        found = answers(await exchange(path, data))
        assert [answer.status for answer in found] == [200] * data.startswith(GET) + [408]
        assert message in json.loads(found[-1].body)["message"]
        assert found[-1].headers["connection"] == "close"
        await until(lambda: not server.connections)

    serve(scenario, path, SHORT)


def test_a_body_nobody_waits_for_has_no_limit_and_idle_connections_neither(path: str) -> None:
    async def scenario(app: App, path: str, server: Server) -> None:
        idle = await connect(path)
        reader, writer = await connect(path)
        writer.write(b"POST /lazy HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nbo")

        async def lazy(request: Request) -> Reply:
            await asyncio.sleep(0.5)
            return Reply(200, await request.body.read(10))

        app.extra["lazy"] = lazy
        await asyncio.sleep(0.4)
        writer.write(b"dy")
        assert answers(await reader.readuntil(b"body"))[0].status == 200
        idle[1].write(GET)
        assert b"ok" in await idle[0].readuntil(b"}\n")
        assert not server.timed
        writer.close()
        idle[1].close()

    serve(scenario, path, SHORT)


def test_hundreds_that_expire_at_once_do_not_hold_up_others(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are ended in several turns of the loop; in this test one per turn."""
    monkeypatch.setattr("engine.http.server.TURN", -1.0)

    async def scenario(app: App, path: str, server: Server) -> None:
        half = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n1234"
        clients = [await connect(path) for _ in range(200)]
        for _, writer in clients:
            writer.write(half)
        await until(lambda: len(server.timed) == 200)
        turns = 0
        expire = server._expire

        def counted(connections: list[Connection]) -> None:
            nonlocal turns
            turns += 1
            expire(connections)

        server._expire = counted  # type: ignore[method-assign]
        for connection in server.timed:
            connection.deadline = 0.0
        for reader, writer in clients:
            (answer,) = answers(await reader.read())
            assert answer.status == 408
            writer.close()
        assert turns >= 200

    serve(scenario, path, Limits(body_seconds=30))


def test_a_drained_body_that_never_comes_ends(path: str) -> None:
    async def scenario(app: App, path: str, server: Server) -> None:
        found = answers(await exchange(path, b"POST /ignore HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n1234"))
        assert [answer.status for answer in found] == [204]

    serve(scenario, path, SHORT)


def test_a_client_that_never_reads_its_last_answer_is_dropped(path: str) -> None:
    async def scenario(app: App, path: str, server: Server) -> None:
        app.extra["big"] = lambda request: Reply(200, b"x" * 5_000_000)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
            client.sendall(b"GET /big HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            await until(lambda: bool(app.requests))
            await until(lambda: not server.connections)

    serve(scenario, path, SHORT)


# --- answers under way ----------------------------------------------------------------------------


def test_early_answer_reaches_a_client_that_still_sends(path: str) -> None:
    """Closing with unread input would reset the connection and lose the answer."""

    def client(path: str) -> bytes:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
            connection.sendall(b"POST /conflict HTTP/1.1\r\nHost: x\r\nContent-Length: 50000000\r\n\r\n")
            for _ in range(64):
                connection.sendall(b"x" * 65536)
            connection.shutdown(socket.SHUT_WR)
            received = b""
            while piece := connection.recv(65536):
                received += piece
            return received

    async def scenario(app: App, path: str, server: Server) -> None:
        found = answers(await asyncio.to_thread(client, path))
        assert [answer.status for answer in found] == [409]

    serve(scenario, path)


def test_large_answers_and_large_bodies(path: str) -> None:
    async def scenario(app: App, path: str, server: Server) -> None:
        body = os.urandom(3_000_000)
        found = answers(
            await exchange(
                path,
                b"POST /echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"
                % (len(body), body),
            )
        )
        assert found[0].body == body
        parts = b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in (body[:1], body[1:70_000], body[70_000:]))
        found = answers(
            await exchange(
                path,
                b"POST /echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
                + parts
                + b"0\r\n\r\n",
            )
        )
        assert found[0].body == body

    serve(scenario, path)


def test_stream_of_large_chunks_to_a_slow_reader(path: str) -> None:
    async def scenario(app: App, path: str, server: Server) -> None:
        body, taken = os.urandom(1_000_000), 0

        async def chunks():  # type: ignore[no-untyped-def]
            nonlocal taken
            for _ in range(20):
                taken += 1
                yield body

        app.extra["chunks"] = lambda request: StreamReply(200, chunks())
        reader, writer = await connect(path)
        writer.write(b"GET /chunks HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        await asyncio.sleep(0.05)
        assert taken < 5  # it is not all in memory
        assert answers(await reader.read(-1))[0].body == body * 20
        writer.close()

    serve(scenario, path)


def test_endless_stream_ends_when_the_client_leaves(path: str) -> None:
    async def scenario(app: App, path: str, server: Server) -> None:
        reader, writer = await connect(path)
        writer.write(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"first\r\n")
        writer.close()
        await until(lambda: app.closed_chunks == 1)
        await until(lambda: not server.connections)

    serve(scenario, path)


def test_half_closed_client_of_an_endless_stream_keeps_it_until_it_leaves(path: str) -> None:
    async def scenario(app: App, path: str, server: Server) -> None:
        for request in (b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n", GET + b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n"):
            closed = app.closed_chunks
            reader, writer = await connect(path)
            writer.write(request)
            writer.write_eof()
            await reader.readuntil(b"first\r\n")
            await until(lambda: len(server.half_open) == 1)
            await asyncio.sleep(0.15)
            assert app.closed_chunks == closed
            writer.close()
            await until(lambda closed=closed: app.closed_chunks == closed + 1)  # type: ignore[misc]
        await until(lambda: not server.connections)
        assert not server.half_open

    serve(scenario, path, SHORT)


def test_half_closed_client_over_tcp_has_left(path: str) -> None:
    async def scenario(app: App, path: str, server: Server) -> None:
        port = await server.listen_tcp("127.0.0.1", 0, None)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"first\r\n")
        writer.close()
        await until(lambda: app.closed_chunks == 1)

    serve(scenario, path)


def test_half_closed_client_gets_its_answer(path: str) -> None:
    async def scenario(app: App, path: str, server: Server) -> None:
        asyncio.get_running_loop().call_later(0.05, app.go.set)
        found = answers(await exchange(path, b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n" + GET, half_close=True))
        assert [answer.body for answer in found] == [b'"slow"\n', b'{"ok":true}\n']

    serve(scenario, path)


def test_close_waits_for_changes_and_not_for_streams(path: str) -> None:
    async def scenario(app: App, path: str, server: Server) -> None:
        slow, endless, wait, idle = [await connect(path) for _ in range(4)]
        slow[1].write(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        endless[1].write(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
        wait[1].write(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
        await endless[0].readuntil(b"first\r\n")
        await until(lambda: len(app.requests) == 3)
        asyncio.get_running_loop().call_later(0.1, app.go.set)
        await server.close(5)
        found = answers(await slow[0].read(-1))
        assert found[0].body == b'"slow"\n' and found[0].headers["connection"] == "close"
        assert (await idle[0].read(-1), await wait[0].read(-1), await endless[0].read(-1)) == (b"", b"", b"")
        assert app.cancelled == 1 and app.finished == 1 and app.closed_chunks == 1
        assert not os.path.exists(path)
        for _, writer in (slow, endless, wait, idle):
            writer.close()

    serve(scenario, path)


def test_close_gives_up_after_its_grace(path: str) -> None:
    async def scenario(app: App, path: str, server: Server) -> None:
        reader, writer = await connect(path)
        writer.write(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: len(app.requests) == 1)
        await server.close(0.1)
        assert await reader.read(-1) == b""
        writer.close()

    serve(scenario, path)


# --- hijack ---------------------------------------------------------------------------------------


class Hijacker:
    """Takes a connection, writes the head and a greeting, and lets the test have the descriptor."""

    def __init__(
        self, app: App, *, pause: bool = True, fail: Exception | None = None, answer: Reply | None = None
    ) -> None:
        self.taken: Hijack | None = None
        self.descriptor = -1
        self.body = b""
        self._pause = pause
        self._fail = fail
        self._answer = answer
        app.extra["hijack"] = self if pause else self.at_once

    async def __call__(self, request: Request) -> AnyReply:
        assert request.body.ended, "the body comes before the hijack"
        self.body = await request.body.read(1000)
        if self._answer is not None:
            return self._answer
        await asyncio.sleep(0)
        hijack = await request.hijack(RAW)
        descriptor = hijack.descriptor()
        if self._fail is not None:
            os.close(descriptor)
            raise self._fail
        await asyncio.sleep(0.01)
        return self._hand_over(hijack, descriptor)

    async def at_once(self, request: Request) -> AnyReply:
        hijack = await request.hijack(RAW)
        return self._hand_over(hijack, hijack.descriptor())

    def _hand_over(self, hijack: Hijack, descriptor: int) -> AnyReply:
        os.write(descriptor, hijack.head + b"hello")
        self.descriptor = descriptor
        self.taken = hijack
        return hijack.release()

    def socket(self) -> socket.socket:
        assert self.descriptor >= 0
        connection = socket.socket(fileno=self.descriptor)
        connection.setblocking(False)
        return connection


UPGRADE = b"Connection: Upgrade\r\nUpgrade: tcp\r\n"
FORMS = {
    "upgrade": (b"POST /hijack HTTP/1.1\r\nHost: x\r\n" + UPGRADE + b"\r\n", b""),
    "upgrade with an empty body": (
        b"POST /hijack HTTP/1.1\r\nHost: x\r\n" + UPGRADE + b"Content-Type: text/plain\r\nContent-Length: 0\r\n\r\n",
        b"",
    ),
    "upgrade with a body": (
        b"POST /hijack HTTP/1.1\r\nHost: x\r\n" + UPGRADE + b"Content-Length: 13\r\n\r\n",
        b'{"Tty":false}',
    ),
    "upgrade with a chunked body": (
        b"POST /hijack HTTP/1.1\r\nHost: x\r\n"
        + UPGRADE
        + b"Transfer-Encoding: chunked\r\n\r\n5\r\n12345\r\n0\r\n\r\n",
        b"",
    ),
    "plain": (b"POST /hijack HTTP/1.1\r\nHost: x\r\n\r\n", b""),
    "plain with a body": (b"POST /hijack HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n", b"{}"),
    "plain 1.0": (b"POST /hijack HTTP/1.0\r\n\r\n", b""),
    "expecting": (b"POST /hijack HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n", b"{}"),
}
STDIN = b"GET /sync HTTP/1.1\r\nHost: x\r\n\r\nnot a request\x00\xff"


@pytest.mark.parametrize("early", [b"", STDIN, b"x" * 400_000], ids=["later", "early", "much"])
@pytest.mark.parametrize("split", ["whole", "body apart", "bytes"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("before", [b"", GET], ids=["alone", "after another"])
@pytest.mark.parametrize("pause", [True, False], ids=["async", "sync"])
def test_hijack(path: str, form: str, split: str, early: bytes, before: bytes, pause: bool) -> None:
    head, body = FORMS[form]
    if len(early) > 1000 and split == "bytes":
        early = early[:300]

    async def scenario(app: App, path: str, server: Server) -> None:
        hijacker = Hijacker(app, pause=pause)
        reader, writer = await connect(path)
        data = before + head + body + early
        pieces = [data]
        if split == "body apart":
            pieces = [before + head, body + early]
        elif split == "bytes":
            pieces = [data[at : at + 1] for at in range(len(data))]
        for piece in pieces:
            writer.write(piece)
            if len(pieces) > 1:
                await asyncio.sleep(0)
        first = (await reader.readuntil(b"}\n")) if before else b""
        assert [answer.status for answer in answers(first)] == [200] * bool(before)
        received = await reader.readuntil(b"hello")
        if received.startswith(b"HTTP/1.1 100 Continue\r\n\r\n"):
            assert form == "expecting"
            received = received.partition(b"\r\n\r\n")[2]
        expected = b"HTTP/1.1 101 UPGRADED\r\n" if form.startswith("upgrade") else b"HTTP/1.1 200 OK\r\n"
        assert received.startswith(expected)
        assert b"\r\nServer: test\r\n" in received
        assert b"\r\nContent-Type: application/vnd.docker.raw-stream\r\n" in received
        assert (b"\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n" in received) == form.startswith("upgrade")
        assert b"Content-Length" not in received and b"Transfer-Encoding" not in received
        await until(lambda: not server.connections)
        if pause:
            assert hijacker.body in (body, b"12345")
        # The socket is whole: nothing is lost, each way, and half-close works.
        assert hijacker.taken is not None
        loop = asyncio.get_running_loop()
        stream = hijacker.socket()
        stdin = hijacker.taken.early
        while len(stdin) < len(early):
            stdin += await loop.sock_recv(stream, 65536)
        assert stdin == early
        writer.write(b"more")
        writer.write_eof()
        assert await loop.sock_recv(stream, 100) == b"more"
        assert await loop.sock_recv(stream, 100) == b""

        async def output() -> None:
            await loop.sock_sendall(stream, b"o" * 500_000)
            stream.shutdown(socket.SHUT_RDWR)
            stream.close()

        received, _ = await asyncio.gather(reader.read(-1), output())
        assert received == b"o" * 500_000
        writer.close()

    serve(scenario, path)


def test_another_process_keeps_the_stream(path: str) -> None:
    """The monitor does this: it keeps the descriptor after the daemon has closed its own, and after
    the server has ended.
    """
    program = "import os\nwhile data := os.read(0, 100): os.write(0, b'<' + data + b'>')\nos.write(0, b'end')\n"

    async def scenario(app: App, path: str, server: Server) -> None:
        children: list[subprocess.Popen[bytes]] = []

        async def hand_over(request: Request) -> AnyReply:
            hijack = await request.hijack(RAW)
            descriptor = hijack.descriptor()
            os.set_blocking(descriptor, True)
            os.write(descriptor, hijack.head)
            children.append(subprocess.Popen([sys.executable, "-c", program], stdin=descriptor))
            os.close(descriptor)
            return hijack.release()

        app.extra["hijack"] = hand_over
        reader, writer = await connect(path)
        writer.write(FORMS["upgrade"][0])
        await reader.readuntil(b"\r\n\r\n")
        await until(lambda: not server.connections)
        await server.close(1)
        for word in (b"one", b"two"):
            writer.write(word)
            assert await reader.readexactly(5) == b"<" + word + b">"
        writer.write_eof()
        assert await reader.read(-1) == b"end"
        writer.close()
        assert children[0].wait(10 * PATIENCE) == 0

    serve(scenario, path)


def test_hijack_waits_for_earlier_answers(path: str) -> None:
    async def scenario(app: App, path: str, server: Server) -> None:
        app.extra["big"] = lambda request: Reply(200, b"b" * 3_000_000)
        hijacker = Hijacker(app)
        for before in (1, 2):
            reader, writer = await connect(path)
            writer.write(b"GET /big HTTP/1.1\r\nHost: x\r\n\r\n" * before + FORMS["plain with a body"][0] + b"{}stdin")
            await asyncio.sleep(0.05)
            assert hijacker.taken is None  # nothing is read yet
            for _ in range(before):
                await reader.readuntil(b"\r\n\r\n")
                assert await reader.readexactly(3_000_000) == b"b" * 3_000_000
            assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200 OK\r\n")
            assert hijacker.taken is not None
            assert hijacker.taken.early == b"stdin"
            hijacker.socket().close()
            hijacker.taken = None
            assert await reader.read(-1) == b""
            writer.close()

    serve(scenario, path)


def test_hijack_that_fails_is_an_ordinary_answer(path: str) -> None:
    async def scenario(app: App, path: str, server: Server) -> None:
        Hijacker(app, fail=Conflict("container x is paused"))
        reader, writer = await connect(path)
        for _ in range(3):
            writer.write(FORMS["upgrade"][0])
            reply = answers(await reader.readuntil(b"}\n"))[0]
            assert reply.status == 409 and json.loads(reply.body) == {"message": "container x is paused"}
        writer.write(GET)
        assert b"ok" in await reader.readuntil(b"}\n")
        writer.write(FORMS["upgrade"][0] + b"stdin")
        found = answers(await reader.read(-1))
        assert [answer.status for answer in found] == [409] and found[0].headers["connection"] == "close"
        writer.close()
        reader, writer = await connect(path)
        writer.write(FORMS["upgrade"][0])
        writer.write_eof()
        assert answers(await reader.read(-1))[0].status == 409
        writer.close()

    serve(scenario, path)


def test_hijack_route_that_answers_ordinarily(path: str) -> None:
    """A detached exec start. The bytes after it are a pipelined request."""

    async def scenario(app: App, path: str, server: Server) -> None:
        Hijacker(app, answer=Reply(200))
        reader, writer = await connect(path)
        writer.write(FORMS["plain with a body"][0] + b"{}" + GET)
        found = answers(await reader.readuntil(b'{"ok":true}\n'))
        assert [answer.status for answer in found] == [200, 200] and found[0].body == b""
        writer.close()

    serve(scenario, path)


def test_hijack_body_over_its_limit(path: str) -> None:
    async def scenario(app: App, path: str, server: Server) -> None:
        hijacker = Hijacker(app)
        body = b"x" * 1_100_000
        data = b"POST /hijack HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        reader, writer = await connect(path)
        writer.write(data)
        found = answers(await reader.read(-1))
        assert [answer.status for answer in found] == [400] and hijacker.taken is None
        writer.close()

    serve(scenario, path)


def test_client_leaves_before_the_hijack(path: str) -> None:
    async def scenario(app: App, path: str, server: Server) -> None:
        failures: list[BaseException] = []

        async def late(request: Request) -> AnyReply:
            await app.go.wait()
            try:
                return (await request.hijack(RAW)).release()
            except ServerError as error:
                failures.append(error)
                raise

        app.extra["hijack"] = late
        _, writer = await connect(path)
        writer.write(FORMS["upgrade"][0])
        await until(lambda: len(app.requests) == 1)
        writer.transport.abort()
        await asyncio.sleep(0.05)
        app.go.set()
        with contextlib.suppress(TimeoutError):
            await until(lambda: bool(failures) or not server.connections, 2)

    serve(scenario, path)


def test_half_closed_client_may_be_hijacked(path: str) -> None:
    async def scenario(app: App, path: str, server: Server) -> None:
        hijacker = Hijacker(app)
        reader, writer = await connect(path)
        writer.write(FORMS["upgrade with a body"][0] + b'{"Tty":false}' + b"stdin")
        writer.write_eof()
        await reader.readuntil(b"hello")
        assert hijacker.taken is not None and hijacker.taken.early == b"stdin"
        stream = hijacker.socket()
        assert await asyncio.get_running_loop().sock_recv(stream, 10) == b""
        stream.close()
        assert await reader.read(-1) == b""
        writer.close()

    serve(scenario, path)


def test_threads_of_blocking_clients(path: str) -> None:
    """docker-py works like this: http.client in threads."""
    import http.client

    class Unix(http.client.HTTPConnection):
        def connect(self) -> None:
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.connect(path)

    async def scenario(app: App, path: str, server: Server) -> None:
        failures: list[BaseException] = []

        def client() -> None:
            try:
                connection = Unix("docker")
                for _ in range(50):
                    connection.request("POST", "/echo", body=b"z" * 1000)
                    assert connection.getresponse().read() == b"z" * 1000
                    connection.request("POST", "/echo", body=iter([b"a" * 10, b"b" * 10]), encode_chunked=True)
                    assert connection.getresponse().read() == b"a" * 10 + b"b" * 10
                    connection.request("GET", "/stream")
                    assert connection.getresponse().read().startswith(b"onetwo")
                connection.close()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=client) for _ in range(4)]
        for thread in threads:
            thread.start()
        await asyncio.to_thread(lambda: [thread.join() for thread in threads])
        assert not failures

    serve(scenario, path)


def test_uvloop_is_what_runs() -> None:
    async def which() -> str:
        return type(asyncio.get_running_loop()).__module__

    assert uvloop.run(which()).startswith("uvloop")
