"""Memory of requests that end early: it is freed at once, without the garbage collector, and
bounded in all.
"""

from __future__ import annotations

import asyncio
import gc
import json
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from engine.errors import Unavailable
from engine.http.borrowed import BorrowedBody
from engine.http.budget import Budget, Pace
from engine.http.messages import NO_BODY, Body, Reply, Request
from engine.http.protocol import Connection
from engine.http.server import Limits, Server
from engine.system.feed import Feed
from tests.unit.http.harness import App, answers, serve, until

SIZE = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "s")


def left() -> list[object]:
    """Objects of requests that are alive, reachable or not."""
    kinds = (Body, BorrowedBody, Connection, Request)
    return [each for each in gc.get_objects() if isinstance(each, kinds) and each is not NO_BODY]


def held() -> int:
    """Bytes of bodies held by objects that are alive, reachable or not."""
    size = 0
    for each in gc.get_objects():
        if isinstance(each, Body):
            size += sum(map(len, each._chunks))
        elif isinstance(each, Feed):
            size += sum(map(len, [*each._chunks, *each._taken]))
        elif isinstance(each, BorrowedBody):
            size += len(each._raw) + sum(map(len, each._early))
    return size


class Sender:
    """A body as the budget sees it."""

    def __init__(self, owner: str = "one") -> None:
        self.owner = owner
        self.received = 0
        self.failure = ""

    def too_slow(self, failure: str) -> None:
        self.failure = failure


PATIENT = Pace(seconds=60)


async def stream(request: Request) -> Reply:
    """As archives and images are received: the loop feeds a thread, which borrows the socket for a
    large body.
    """
    feeding = Feed()

    def consume() -> int:
        size = 0
        while chunk := feeding.read():
            size += len(chunk)
        return size

    working = asyncio.get_running_loop().run_in_executor(None, consume)
    try:
        await feeding.feed(request.body)
        return Reply(200, b"%d" % await working)
    finally:
        feeding.close()


async def half_a_body(path: str, target: str, end: str, chunked: bool) -> None:
    reader, writer = await asyncio.open_unix_connection(path)
    framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % SIZE
    writer.write(b"POST %s HTTP/1.1\r\nHost: x\r\n%s\r\n\r\n" % (target.encode(), framing))
    if chunked:
        writer.write(b"%x\r\n" % SIZE)
    writer.write(bytes(SIZE - 100_000))
    await writer.drain()
    if end == "half-close":
        writer.write_eof()
        await reader.read()
    if end == "reset":
        writer.transport.abort()
    writer.close()


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize("end", ["close", "half-close", "reset"])
@pytest.mark.parametrize("target", ["/echo", "/feed", "/ignore", "/slow", "/upper"])
def test_nothing_is_left_of_aborted_bodies(path: str, target: str, end: str, chunked: bool) -> None:
    if target == "/ignore" and end == "half-close":
        end = "close"

    async def scenario(app: App, path: str, server: Server) -> None:
        app.extra["feed"] = stream
        gc.collect()
        gc.disable()
        try:
            clients = [asyncio.create_task(half_a_body(path, target, end, chunked)) for _ in range(3)]
            if target == "/slow":
                await until(lambda: len(app.requests) == 3)
                app.go.set()
            await asyncio.gather(*clients)
            app.requests.clear()
            await until(lambda: not server.connections)
            del clients
            # the handler of /feed has a future and an exception of its own, a cycle of no bytes
            rest: Callable[[], object] = held if target == "/feed" else left
            await until(lambda: not rest())
            assert held() == 0
            assert server.budget.reserved == 0
        finally:
            gc.enable()

    serve(scenario, path)


def test_large_bodies_wait_for_their_turn(path: str) -> None:
    """Two fit at a time. All get a response, and no more than two are ever in memory."""
    most = 0

    async def scenario(app: App, path: str, server: Server) -> None:
        async def echo(request: Request) -> Reply:
            nonlocal most
            body = await request.body.read(SIZE)
            most = max(most, server.budget.reserved)
            return Reply(200, b"%d" % len(body), "text/plain")

        async def ask(chunked: bool) -> bytes:
            reader, writer = await asyncio.open_unix_connection(path)
            framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % SIZE
            body = b"%x\r\n%s\r\n0\r\n\r\n" % (SIZE, bytes(SIZE)) if chunked else bytes(SIZE)
            writer.write(b"POST /count HTTP/1.1\r\nHost: x\r\nConnection: close\r\n%s\r\n\r\n" % framing + body)
            found = await reader.read()
            writer.close()
            return found

        app.extra["count"] = echo
        found = await asyncio.gather(*(ask(bool(number % 2)) for number in range(20)))
        assert [answers(each)[0].body for each in found] == [b"%d" % SIZE] * 20
        assert server.budget.reserved == 0

    serve(scenario, path, Limits(bodies=2 * SIZE))
    assert most <= 2 * SIZE


def test_a_small_body_needs_no_turn(path: str) -> None:
    async def scenario(app: App, path: str, server: Server) -> None:
        room = await server.budget.reserve(SIZE, Sender())
        for framing in (b"Content-Length: 4\r\n\r\nbody", b"Transfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n"):
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(b"POST /echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + framing)
            assert answers(await reader.read())[0].body == b"body"
            writer.close()
        server.budget.release(room)

    serve(scenario, path, Limits(bodies=SIZE))


def test_a_turn_that_does_not_come_is_503(path: str) -> None:
    async def scenario(app: App, path: str, server: Server) -> None:
        room = await server.budget.reserve(SIZE, Sender())
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"POST /echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % SIZE)
        (answer,) = answers(await reader.read())
        assert answer.status == 503
        assert json.loads(answer.body) == {"message": "too many large requests at once; try again later"}
        writer.close()
        server.budget.release(room)
        assert server.budget.reserved == 0

    serve(scenario, path, Limits(bodies=SIZE, turn_seconds=0.1))


def budget(
    act: Callable[[Budget], Awaitable[None]], size: int = 10, patience: float = 5.0, pace: Pace = PATIENT
) -> None:
    async def run() -> None:
        found = Budget(size, patience, pace)
        await act(found)
        assert found.reserved == 0

    asyncio.run(run())


def test_turns_are_first_come_first_served() -> None:
    async def act(found: Budget) -> None:
        order: list[str] = []

        async def one(name: str, size: int) -> None:
            got = await found.reserve(size, Sender())
            order.append(name)
            await asyncio.sleep(0)
            found.release(got)

        tasks = [asyncio.create_task(one(*each)) for each in (("a", 6), ("b", 6), ("c", 1), ("d", 99))]
        await asyncio.gather(*tasks)
        assert order == ["a", "b", "c", "d"], "a small one does not overtake a large one, which would starve"

    budget(act)


def test_a_waiter_that_is_cancelled_lets_the_next_go() -> None:
    async def act(found: Budget) -> None:
        four = await found.reserve(4, Sender())
        first = asyncio.create_task(found.reserve(9, Sender()))
        second = asyncio.create_task(found.reserve(6, Sender()))
        await asyncio.sleep(0)
        first.cancel()
        six = await second
        third = asyncio.create_task(found.reserve(10, Sender()))
        await asyncio.sleep(0)
        found.release(six)
        found.release(four)  # its turn has come, and it is cancelled before it runs
        third.cancel()
        with pytest.raises(asyncio.CancelledError):
            await third

    budget(act)


def test_a_waiter_gives_up_in_time() -> None:
    async def act(found: Budget) -> None:
        room = await found.reserve(10, Sender())
        waiting = [asyncio.create_task(found.reserve(1, Sender())) for _ in range(3)]
        for each in waiting:
            with pytest.raises(Unavailable, match="try again later"):
                await each
        found.release(room)

    budget(act, patience=0.05)


def test_owners_take_turns() -> None:
    """The many bodies of one process do not keep another process out."""

    async def act(found: Budget) -> None:
        order: list[str] = []

        async def one(name: str) -> None:
            room = await found.reserve(10, Sender(name[0]))
            order.append(name)
            await asyncio.sleep(0)
            found.release(room)

        await asyncio.gather(*(one(name) for name in ("a1", "a2", "a3", "a4", "b1", "c1", "b2")))
        assert order == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]

    budget(act)


def test_a_slow_body_loses_its_room_when_others_wait() -> None:
    async def act(found: Budget) -> None:
        stalled, sending = Sender(), Sender()
        rooms = [await found.reserve(5, each) for each in (stalled, sending)]
        await asyncio.sleep(0.05)
        assert not stalled.failure, "none waits"
        waiter = asyncio.create_task(found.reserve(5, Sender("other")))
        while not stalled.failure:
            sending.received += 100
            await asyncio.sleep(0.001)
        assert stalled.failure == (
            "the request's body came too slowly: 0 bytes in 0.02 s while other large requests waited"
        )
        assert not sending.failure
        found.release(rooms[0])
        found.release(await waiter)
        stalled.failure = ""
        await asyncio.sleep(0.05)
        assert not sending.failure, "none waits any more"
        found.release(rooms[1])

    budget(act, pace=Pace(100, 0.02))


def test_stalled_bodies_make_room_with_408(path: str) -> None:
    """Clients that stall within a large body fill the budget; each gets a 408 once others wait."""

    async def scenario(app: App, path: str, server: Server) -> None:
        stalled = []
        for chunked in (False, True):
            reader, writer = await asyncio.open_unix_connection(path)
            framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % SIZE
            start = b"%x\r\n" % SIZE if chunked else b""
            writer.write(b"POST /large HTTP/1.1\r\nHost: x\r\n%s\r\n\r\n%s" % (framing, start + bytes(SIZE // 2)))
            stalled.append((reader, writer))
        await until(lambda: server.budget.reserved == 2 * SIZE)
        # both have stalled: one whose bytes still come would keep its room
        await until(lambda: sum(room.upload.received for room in server.budget._rooms) == SIZE)
        reader, writer = await asyncio.open_unix_connection(path)
        head = b"POST /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % SIZE
        writer.write(head + bytes(SIZE))
        (answer,) = answers(await reader.read())
        assert (answer.status, answer.body) == (200, b"%d" % SIZE)
        writer.close()
        for reader, writer in stalled:
            (answer,) = answers(await reader.read())
            assert answer.status == 408
            assert "came too slowly" in json.loads(answer.body)["message"]
            assert answer.headers["connection"] == "close"
            writer.close()

    async def large(request: Request) -> Reply:
        return Reply(200, b"%d" % len(await request.body.read(SIZE)), "text/plain")

    async def with_large(app: App, path: str, server: Server) -> None:
        app.extra["large"] = large
        await scenario(app, path, server)
        assert server.budget.reserved == 0

    serve(with_large, path, Limits(bodies=2 * SIZE, pace=Pace(1024, 0.1)))


def test_sockets_are_what_the_test_takes_them_for() -> None:
    """A body of `SIZE` exceeds the kernel's buffers, so the clients above disconnect in the middle
    of it."""
    with socket.socketpair()[0] as one:
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < SIZE - 100_000
