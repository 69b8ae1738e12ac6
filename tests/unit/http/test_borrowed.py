"""The rest of a body, read by a thread from the socket itself: on its own, and on connections of a
real server.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidParameter
from engine.http.borrowed import BorrowedBody
from engine.http.framing import BodyReader, ChunkedReader, LengthReader
from engine.http.messages import Reply, Request
from engine.http.protocol import DRAIN_LIMIT
from engine.http.server import Limits, Server
from tests.support import PATIENCE
from tests.unit.http.harness import SHORT, App, answers, serve

TAIL = b"GET /sync HTTP/1.1\r\nHost: x\r\n\r\n"


def chunked(*chunks: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"


def made(reader: BodyReader, early: bytes = b"", seconds: float = 5.0) -> tuple[socket.socket, BorrowedBody]:
    client, server = socket.socketpair()
    server.setblocking(False)
    return client, BorrowedBody(server.detach(), reader, [b"", early], seconds, lambda borrowed: None)


def all_of(borrowed: BorrowedBody, room: int) -> bytes:
    found = bytearray()
    buffer = memoryview(bytearray(room))
    while got := borrowed.readinto(buffer):
        found += buffer[:got]
    return bytes(found)


@given(
    st.lists(st.binary(min_size=1, max_size=300), max_size=8),
    st.lists(st.integers(1, 400), max_size=12),
    st.integers(1, 500),
    st.booleans(),
    st.binary(max_size=50),
)
def test_whatever_the_pieces(chunks: list[bytes], cuts: list[int], room: int, length: bool, early: bytes) -> None:
    payload = b"".join(chunks)
    client, borrowed = made(LengthReader(len(payload)) if length else ChunkedReader(), early)
    data = (payload if length else chunked(*chunks)) + TAIL

    def send() -> None:
        at = 0
        for cut in cuts:
            client.sendall(data[at : at + cut])
            at += cut
        client.sendall(data[at:])

    sending = threading.Thread(target=send)
    sending.start()
    try:
        assert all_of(borrowed, room) == early + payload
        sending.join()
        beyond = borrowed.close()
        client.settimeout(0)
        # Bytes received beyond the end are returned, and none is lost.
        assert TAIL.startswith(beyond) and (beyond == b"" or not length)
    finally:
        client.close()


@pytest.mark.parametrize("reader", [LengthReader(100), ChunkedReader()], ids=["length", "chunked"])
def test_the_ways_it_can_break_off(reader: BodyReader) -> None:
    client, borrowed = made(reader)
    client.sendall(b"5\r\nabcde\r\n")
    client.shutdown(socket.SHUT_WR)
    found = bytearray(64)
    assert borrowed.readinto(memoryview(found)) in (5, 10)  # what came is not lost
    for _ in range(2):
        with pytest.raises(InvalidParameter, match="shut down in the middle of a request's body"):
            borrowed.readinto(memoryview(found))
    assert borrowed.failure
    borrowed.close()
    client.close()


def test_a_client_that_stalls() -> None:
    client, borrowed = made(LengthReader(10), seconds=0.05)
    client.sendall(b"abc")
    assert borrowed.read(100) == b"abc"
    with pytest.raises(InvalidParameter, match=r"no byte of the request's body came for 0\.05 s"):
        borrowed.read(100)
    borrowed.close()
    client.close()


def test_bad_chunks() -> None:
    client, borrowed = made(ChunkedReader())
    client.sendall(b"3\r\nabc\r\nxyz\r\n")
    assert borrowed.read(100) == b"abc"
    with pytest.raises(InvalidParameter, match="'xyz' is not a chunk size"):
        borrowed.read(100)
    borrowed.close()
    client.close()


def test_who_waits_is_told_that_the_client_left() -> None:
    client, borrowed = made(LengthReader(10))
    told: list[str] = []

    def read() -> None:
        try:
            borrowed.read(100)
        except InvalidParameter as error:
            told.append(str(error))

    thread = threading.Thread(target=read)
    thread.start()
    borrowed.cut()
    thread.join(10 * PATIENCE)
    assert told == ["the client left in the middle of its request"]
    borrowed.close()
    client.close()


def test_a_processor_is_lent_while_it_waits() -> None:
    client, borrowed = made(LengthReader(3))
    borrowed.processors = processors = threading.Semaphore(0)
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(borrowed.read(3)))
    thread.start()
    assert processors.acquire(timeout=10 * PATIENCE)  # the thread's own
    client.sendall(b"abc")
    processors.release()
    thread.join(10 * PATIENCE)
    assert found == [b"abc"] and not processors.acquire(blocking=False)
    borrowed.close()
    client.close()


# --- on a connection ------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> str:
    return os.fspath(tmp_path / "s")


async def taken(request: Request, most: int = 1 << 30) -> Reply:
    """Read the body in a thread as soon as some of it is here, up to `most` bytes."""
    body = request.body
    first = await anext(body)
    borrowed = body.borrow()
    if borrowed is None:
        return Reply(200, first + b"".join([chunk async for chunk in body]))

    def read() -> bytes:
        found = first
        while len(found) < most and (more := borrowed.read(min(1000, most - len(found)))):
            found += more
        return found

    try:
        return Reply(200, await asyncio.to_thread(read), "application/octet-stream")
    finally:
        borrowed.give_back()


async def ask(path: str, *pieces: bytes, eof: bool = False) -> bytes:
    reader, writer = await asyncio.open_unix_connection(path)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0.01)
    if eof:
        writer.write_eof()
    found = await reader.read()
    writer.close()
    return found


LAST = b"GET /sync HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize("coding", ["length", "chunked"])
def test_what_comes_after_the_body_is_the_next_request(path: str, coding: str) -> None:
    data = os.urandom(300_000)
    if coding == "length":
        head, body = b"PUT /take HTTP/1.1\r\nHost: x\r\nContent-Length: 300000\r\n\r\n", data
    else:
        head, body = (
            b"PUT /take HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n",
            chunked(data[:1000], data[1000:]),
        )

    async def scenario(app: App, path: str, server: Server) -> None:
        app.extra["take"] = taken
        whole = head + body + TAIL
        for pieces in ([whole * 3 + LAST], [whole[:500], whole[500:], whole + LAST], [head, body, TAIL + LAST]):
            found = answers(await ask(path, *pieces))
            bodies = [answer.body for answer in found]
            puts = b"".join(pieces).count(head)
            gets = b"".join(pieces).count(b"GET /sync")
            assert [len(each) for each in bodies].count(len(data)) == puts and len(bodies) == puts + gets
            assert all(each == data for each in bodies if len(each) == len(data))

    serve(scenario, path)


@pytest.mark.parametrize("coding", ["length", "chunked"])
@pytest.mark.parametrize("size", [100_000, DRAIN_LIMIT * 4])
def test_a_reader_that_wants_no_more(path: str, coding: str, size: int) -> None:
    """The connection is kept when little is left, and closed when it is much, as without a
    thread."""
    data = bytes(size)

    async def some(request: Request) -> Reply:
        return await taken(request, 2000)

    async def scenario(app: App, path: str, server: Server) -> None:
        app.extra["some"] = some
        if coding == "length":
            request = b"PUT /some HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size + data
        else:
            request = b"PUT /some HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(data)
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(request[:1500])
        await asyncio.sleep(0.05)
        writer.write(request[1500:] + LAST)
        found = answers(await reader.read())
        assert found[0].status == 200 and found[0].body[:1400] == bytes(1400)
        assert len(found) == (2 if size < DRAIN_LIMIT else 1)
        writer.close()

    serve(scenario, path)


def test_clients_that_stop_in_the_middle(path: str) -> None:
    head = b"PUT /take HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"

    async def scenario(app: App, path: str, server: Server) -> None:
        app.extra["take"] = taken
        [answer] = answers(await ask(path, head + b"some", eof=True))
        assert answer.status == 400 and b"shut down in the middle" in answer.body
        assert answer.headers["connection"] == "close"
        bad = b"PUT /take HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"
        [answer] = answers(await ask(path, bad, b"nonsense\r\n" + LAST))
        assert answer.status == 400 and b"is not a chunk size" in answer.body

    async def stalling(app: App, path: str, server: Server) -> None:
        app.extra["take"] = taken
        [answer] = answers(await ask(path, head + b"some"))
        assert answer.status == 408 and b"no byte of the request's body came" in answer.body

    serve(scenario, path)
    serve(stalling, path, SHORT)


def test_a_server_that_closes_does_not_wait_for_the_client(path: str) -> None:
    ended: list[str] = []

    async def take(request: Request) -> Reply:
        try:
            return await taken(request)
        except InvalidParameter as error:
            ended.append(str(error))
            raise

    async def scenario(app: App, path: str, server: Server) -> None:
        app.extra["take"] = take
        _, writer = await asyncio.open_unix_connection(path)
        writer.write(b"PUT /take HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nsome")
        async with asyncio.timeout(10 * PATIENCE):
            while not app.requests:  # noqa: ASYNC110 (nothing announces it)
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        for connection in list(server.connections):
            connection._transport.abort()
        async with asyncio.timeout(10 * PATIENCE):
            while not ended:  # noqa: ASYNC110 (nothing announces it)
                await asyncio.sleep(0.01)
        assert ended == ["the client left in the middle of its request"]
        writer.close()

    serve(scenario, path, Limits())


def test_expect_is_answered_before_it_is_lent(path: str) -> None:
    async def take(request: Request) -> Reply:
        borrowed = request.body.borrow()
        assert borrowed is not None
        try:
            return Reply(200, await asyncio.to_thread(borrowed.read, 100))
        finally:
            borrowed.give_back()

    async def scenario(app: App, path: str, server: Server) -> None:
        app.extra["take"] = take
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(
            b"PUT /take HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 4\r\nConnection: close\r\n\r\n"
        )
        assert (await reader.readline()).startswith(b"HTTP/1.1 100")
        writer.write(b"body")
        found = await reader.read()
        assert found.endswith(b"\r\n\r\nbody")
        writer.close()

    serve(scenario, path)
