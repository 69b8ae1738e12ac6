"""Sessions: the services of a client, called over HTTP/2."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.builder.buildkit import services
from engine.builder.buildkit.filesync import InMemory
from engine.builder.buildkit.messages import GetSecretRequest, GetSecretResponse
from engine.builder.buildkit.services import Session
from engine.builder.buildkit.session import Sessions
from engine.errors import EngineError, InvalidParameter, NotFound, ServerError, Unavailable, Unimplemented
from engine.images.credentials import NOBODY, Credentials
from engine.rpc import grpc
from engine.rpc.protobuf import encode
from tests.support import PATIENCE
from tests.support.builds import sessions
from tests.support.builds.sessions import Call, Failed, Handler, Peer


@asynccontextmanager
async def opened(
    handlers: Mapping[str, Handler], *, frame: int = 0, store: Sessions | None = None, name: str = "one"
) -> AsyncIterator[tuple[Session, Peer]]:
    """A session whose client serves `handlers`."""
    store = store or Sessions()
    ours, theirs = socket.socketpair()
    peer = Peer(theirs, handlers, frame=frame)
    await store.load()
    await store.open(store.offered(name, "", handlers), ours.detach(), b"", b"")
    try:
        yield await store.find(name), peer
    finally:
        await store.close()
        await asyncio.to_thread(peer.close)
        assert store.count == 0


# --- secrets ----------------------------------------------------------------------------------


def test_secrets() -> None:
    known = {"short": b"s3cret", "": b"no name", "empty": b"", "large": os.urandom(500 << 10), "long": bytes(501 << 10)}

    async def work() -> None:
        for frame in (0, 7):
            some = known if not frame else {"short": b"s3cret"}
            async with opened(sessions.of_secrets(some), frame=frame) as (session, _):
                for name, content in some.items():
                    if name != "long":
                        assert await session.secret(name) == content
                with pytest.raises(NotFound, match=r"^secret other: not found$"):
                    await session.secret("other")
                if "long" in some:
                    with pytest.raises(InvalidParameter, match="secret long: longer than 512000 bytes"):
                        await session.secret("long")
                assert await session.secret("short") == b"s3cret"

    asyncio.run(work())


def test_many_calls_at_once() -> None:
    known = {str(number): bytes([number]) * 100_000 for number in range(40)}

    async def work() -> None:
        async with opened(sessions.of_secrets(known)) as (session, _):
            found = await asyncio.gather(*(session.secret(name) for name in known))
            assert found == list(known.values())

    asyncio.run(work())


@pytest.mark.parametrize(
    ("status", "kind"),
    [(5, NotFound), (12, Unimplemented), (14, Unavailable), (3, InvalidParameter), (2, ServerError), (99, ServerError)],
)
def test_a_status_is_a_kind_of_error(status: int, kind: type[EngineError]) -> None:
    def fails(_: Call) -> bytes:
        raise Failed(status, "it is 100%25 broken: %C3%A9")

    async def work() -> None:
        async with opened({sessions.GET_SECRET: fails}) as (session, _):
            with pytest.raises(kind, match="not found" if kind is NotFound else "it is 100% broken: é"):
                await session.secret("x")

    asyncio.run(work())


def test_a_service_that_the_client_does_not_offer() -> None:
    async def work() -> None:
        async with opened({}) as (session, _):
            with pytest.raises(Unimplemented, match="offers no secrets"):
                await session.secret("x")
            with pytest.raises(Unimplemented, match="offers no files"):
                await session.sync("context", InMemory(1, "context"))
            assert await session.auth("docker.io") == NOBODY

    asyncio.run(work())


def test_the_client_leaves_during_a_call() -> None:
    asked = threading.Event()

    def never(call: Call) -> None:
        asked.set()
        call.receive()
        call.receive()
        call.receive()

    async def work() -> None:
        store = Sessions()
        async with opened({sessions.GET_SECRET: never}, store=store) as (session, peer):
            waiting = asyncio.create_task(session.secret("x"))
            await asyncio.to_thread(asked.wait)
            await asyncio.to_thread(peer.close)
            with pytest.raises(Unavailable, match="closed its connection"):
                await waiting
            with pytest.raises(Unavailable, match="closed its connection"):
                await session.secret("x")
            assert store.count == 0 and not session.open

    asyncio.run(work())


def test_a_cancelled_call_is_reset() -> None:
    asked = threading.Event()
    over = threading.Event()

    def never(call: Call) -> None:
        call.receive()
        asked.set()
        while call.receive() is not None:
            pass
        over.set()

    async def work() -> None:
        async with opened({sessions.GET_SECRET: never}) as (session, peer):
            stream = session._connection.call(sessions.GET_SECRET)  # type: ignore[union-attr]
            await stream.send(encode(GetSecretRequest(id="x")))
            await asyncio.to_thread(asked.wait)
            stream.cancel()
            await asyncio.to_thread(over.wait)
            assert peer.cancelled == [sessions.GET_SECRET]
            with pytest.raises(Unavailable):
                await stream.send(b"")

    asyncio.run(work())


def test_a_slow_reader_stops_its_own_stream_alone() -> None:
    """A stream that is not read holds at most its window; other calls are answered."""
    sent = []

    def floods(call: Call) -> None:
        for _ in range(12):
            call.send(bytes(1 << 20))
            sent.append(1)

    handlers = {"/flood": floods, **sessions.of_secrets({"x": b"y"})}

    async def work() -> None:
        async with opened(handlers) as (session, _):
            assert session._connection is not None
            stream = session._connection.call("/flood")
            for _ in range(20):
                assert await session.secret("x") == b"y"
            assert len(sent) <= grpc.Terms().window >> 20
            received = 0
            while (message := await stream.receive()) is not None:
                received += len(message)
            assert received == 12 << 20

    asyncio.run(work())


@pytest.mark.parametrize("sent", [struct.pack(">BI", 1, 1) + b"x", struct.pack(">BI", 0, grpc.MESSAGE_LIMIT + 1)])
def test_messages_that_are_refused(sent: bytes) -> None:
    def answers(call: Call) -> None:
        call._peer.send(call._number, sent)

    async def work() -> None:
        async with opened({sessions.GET_SECRET: answers}) as (session, _):
            with pytest.raises(InvalidParameter, match=r"gRPC message is (compressed|too long)"):
                await session.secret("x")

    asyncio.run(work())


@given(st.binary(max_size=300), st.booleans())
def test_bytes_that_are_not_http2_end_the_connection(data: bytes, preface: bool) -> None:
    """Whatever the client sends, calls end with an error, and nothing else fails."""

    async def work() -> None:
        failures: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        store = Sessions()
        ours, theirs = socket.socketpair()
        await store.load()
        await store.open(store.offered("s", "", [sessions.GET_SECRET]), ours.detach(), b"", b"")
        session = await store.find("s")
        call = asyncio.create_task(session.secret("x"))
        theirs.sendall((b"\0\0\0\4\0\0\0\0\0" if preface else b"") + data)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(EngineError):
            await call
        await session.closed()
        theirs.close()
        assert store.count == 0 and not failures

    asyncio.run(work())


# --- the registry of sessions -----------------------------------------------------------------


def test_a_build_waits_for_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        store = Sessions()
        waiting = [asyncio.create_task(store.find("one")) for _ in range(2)]
        await asyncio.sleep(0)
        async with opened({}, store=store) as (session, _):
            assert await asyncio.gather(*waiting) == [session, session]
        monkeypatch.setattr("engine.builder.buildkit.session.APPEAR_SECONDS", 0.01)
        with pytest.raises(NotFound, match="no active session one"):
            await store.find("one")
        assert not store._waiting

    asyncio.run(work())


def test_ids() -> None:
    async def work() -> None:
        store = Sessions()
        for wrong in ("", "a b", "x" * 257, "a\nb"):
            with pytest.raises(InvalidParameter, match="Session-Uuid"):
                store.offered(wrong, "", ())
        async with opened({}, store=store):
            with pytest.raises(InvalidParameter, match="session one is in use already"):
                store.offered("one", "", ())
            async with opened({}, name="two"):
                pass
        store.offered("one", "", ())

    asyncio.run(work())


# --- credentials ------------------------------------------------------------------------------


def test_credentials() -> None:
    known = {"r.example": ("me", "pass"), "t.example": ("", "token")}

    async def work() -> None:
        async with opened(sessions.of_credentials(known)) as (session, _):
            assert await session.auth("r.example") == Credentials(username="me", password="pass")
            assert await session.auth("t.example") == Credentials(identitytoken="token")
            assert await session.auth("other") == NOBODY

    asyncio.run(work())


# --- SSH agents -------------------------------------------------------------------------------


def _echo_agent(path: Path) -> socket.socket:
    """An agent that answers each of its clients with what it sent, in upper case."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve(stream: socket.socket) -> None:
        with stream:
            while data := stream.recv(65536):
                stream.sendall(data.upper())

    def accept() -> None:
        while True:
            try:
                stream, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(stream,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return listener


def _exchange(path: str, data: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as stream:
        stream.settimeout(30 * PATIENCE)
        descriptor = os.open(os.path.dirname(path), os.O_PATH)
        try:
            stream.connect(f"/proc/self/fd/{descriptor}/{os.path.basename(path)}")
        finally:
            os.close(descriptor)

        def send() -> None:
            stream.sendall(data)
            stream.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        received = b""
        while chunk := stream.recv(65536):
            received += chunk
        sender.join()
        return received


def test_an_agent_is_forwarded(tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 120)
    directory.mkdir()
    listener = _echo_agent(tmp_path / "agent")

    async def work() -> None:
        async with opened(sessions.of_agent(str(tmp_path / "agent"))) as (session, _):
            async with session.ssh("", str(directory), uid=7, gid=8, mode=0o640) as path:
                found = os.stat(path)
                assert (found.st_uid, found.st_gid, found.st_mode & 0o7777) == (7, 8, 0o640)
                assert os.stat(os.path.dirname(path)).st_mode & 0o7777 == 0o700
                large = os.urandom(1 << 20)
                exchanges = [asyncio.to_thread(_exchange, path, data) for data in (b"abc", b"", large)]
                assert await asyncio.gather(*exchanges) == [b"ABC", b"", large.upper()]
            assert list(directory.iterdir()) == []
            with pytest.raises(NotFound, match="SSH agent other: unset ssh forward key"):
                async with session.ssh("other", str(directory)):
                    raise AssertionError
            with pytest.raises(ServerError, match="SSH agent default: no such file or directory"):
                async with session.ssh("default", str(directory / "missing")):
                    raise AssertionError
            assert list(directory.iterdir()) == []

    asyncio.run(work())
    listener.close()


def test_a_cancellation_while_the_agent_s_socket_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, listen = threading.Event(), threading.Event(), services._listen
    made: list[socket.socket] = []

    def slowly(directory: str, uid: int, gid: int, mode: int) -> tuple[str, socket.socket]:
        begun.set()
        go_on.wait()
        found = listen(directory, uid, gid, mode)
        made.append(found[1])
        return found

    monkeypatch.setattr(services, "_listen", slowly)

    async def work() -> None:
        async with opened(sessions.of_agent(str(tmp_path / "agent"))) as (session, _):

            async def use() -> None:
                async with session.ssh("default", str(tmp_path)):
                    raise AssertionError("it was cancelled")

            using = asyncio.create_task(use())
            await asyncio.to_thread(begun.wait)
            using.cancel()
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await using
            assert made[0].fileno() == -1 and os.listdir(tmp_path) == []

    asyncio.run(work())


def test_a_program_that_holds_the_agent_is_cut_off(tmp_path: Path) -> None:
    listener = _echo_agent(tmp_path / "agent")

    async def work() -> None:
        async with opened(sessions.of_agent(str(tmp_path / "agent"))) as (session, _):
            async with session.ssh("default", str(tmp_path)) as path:
                reader, writer = await asyncio.open_unix_connection(path)
                writer.write(b"x")
                assert await reader.read(1) == b"X"
            assert await reader.read() == b""
            writer.close()

    asyncio.run(work())
    listener.close()


def test_the_answer_of_a_call_with_garbage() -> None:
    def answers(_: Call) -> bytes:
        return b"\x0a\xff"

    async def work() -> None:
        async with opened({"/x": answers, "/empty": lambda _: None}) as (session, _):
            connection: Any = session._connection
            with pytest.raises(InvalidParameter, match="malformed protobuf message GetSecretResponse"):
                await connection.ask("/x", GetSecretRequest(), GetSecretResponse)
            with pytest.raises(ServerError, match="the answer of /empty is empty"):
                await connection.ask("/empty", GetSecretRequest(), GetSecretResponse)

    asyncio.run(work())


def test_a_daemon_without_sessions_does_not_load_http2() -> None:
    program = (
        "import sys, engine.daemon; print([name for name in sys.modules if name.split('.')[0] in ('h2', 'hpack')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
