"""Framed connections: requests, reports and streams between two ends of a socket pair, and peers
that break every rule.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import msgspec
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import BUG, Conflict, InvalidParameter, NotFound, ServerError, Unavailable
from engine.swarm_session import frames, messages
from engine.swarm_session.frames import Connection
from engine.swarm_session.messages import (
    Assignments,
    Beat,
    Bye,
    Call,
    Cancel,
    Credit,
    Done,
    Ended,
    Follow,
    LogLine,
    LogLines,
    Session,
    Statuses,
)

encode = msgspec.msgpack.encode


async def ignore(_connection: Connection, _message: Any) -> None:
    pass


async def streams(sock: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    sock.setblocking(False)
    return await asyncio.open_unix_connection(sock=sock)


class Pair:
    """Two connections, joined, with their tasks."""

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[None]] = []

    async def make(self, here: Any = ignore, there: Any = ignore, **more: Any) -> tuple[Connection, Connection]:
        left, right = socket.socketpair()
        dialler = Connection(*await streams(left), here, dialled=True)
        listener = Connection(*await streams(right), there, dialled=False, **more)
        self.tasks += [asyncio.create_task(dialler.run()), asyncio.create_task(listener.run())]
        return dialler, listener

    async def raw(self, serve: Any = ignore, **more: Any) -> tuple[socket.socket, Connection]:
        """A bare socket, and the connection at its other end."""
        left, right = socket.socketpair()
        left.setblocking(False)
        listener = Connection(*await streams(right), serve, dialled=False, **more)
        self.tasks.append(asyncio.create_task(listener.run()))
        return left, listener


@contextlib.asynccontextmanager
async def pairs() -> AsyncIterator[Pair]:
    made = Pair()
    yield made
    for task in made.tasks:
        task.cancel()
    await asyncio.gather(*made.tasks, return_exceptions=True)


def run(test: Callable[[Pair], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), pairs() as made:
            await test(made)

    with asyncio.Runner(loop_factory=_factory) as runner:
        runner.run(main())


_factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop


@pytest.fixture(autouse=True, params=[uvloop.new_event_loop, asyncio.new_event_loop], scope="module")
def _on_both_loops(request: pytest.FixtureRequest) -> None:
    global _factory  # noqa: PLW0603
    _factory = request.param


def frame(value: Any) -> bytes:
    body = value if isinstance(value, bytes) else encode(value)
    return len(body).to_bytes(4, "big") + body


async def read_frame(sock: socket.socket) -> Any:
    async def exactly(size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = await asyncio.get_running_loop().sock_recv(sock, size - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    size = int.from_bytes(await exactly(4), "big")
    return msgspec.msgpack.decode(await exactly(size), type=messages.ANY)


async def until(condition: Callable[[], Any]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def test_a_socket_that_has_gone_already() -> None:
    """What is asked of it while it ends raises nothing. uvloop says "negative file descriptor"."""

    async def test(made: Pair) -> None:
        left, right = socket.socketpair()
        left.close()
        reader, writer = await streams(right)

        def gone(name: str, default: Any = None) -> Any:
            raise ValueError("negative file descriptor")

        writer.get_extra_info = gone  # type: ignore[method-assign]
        connection = Connection(reader, writer, ignore, dialled=False, peer="10.0.0.9")
        connection.watch_closely()
        assert (connection.peer, connection.local, connection.certificate) == ("10.0.0.9", "", None)
        assert connection.silence == 0.0
        connection.abort("test")
        await connection.run()

    run(test)


# --- requests -------------------------------------------------------------------------------------


def test_a_request_is_answered_under_its_number() -> None:
    async def there(connection: Connection, message: Any) -> None:
        await connection.send(Done(seq=message.seq, body=message.body.upper()))

    async def test(made: Pair) -> None:
        dialler, listener = await made.make(there, there)
        assert (await dialler.ask(Call(verb="x", body=b"a"))).body == b"A"
        assert (await listener.ask(Call(verb="x", body=b"b"))).body == b"B"
        answers = await asyncio.gather(*(dialler.ask(Call(verb="x", body=b"%d" % n)) for n in range(500)))
        assert [answer.body for answer in answers] == [b"%d" % n for n in range(500)]
        assert not dialler._asked
        assert not listener._serving

    run(test)


@pytest.mark.parametrize(
    ("raised", "kind", "words"),
    [
        (NotFound("no such thing"), NotFound, "no such thing"),
        (Conflict("taken"), Conflict, "taken"),
        (ZeroDivisionError("bug"), ServerError, BUG),
        (ConnectionResetError("etcd went"), Unavailable, "etcd went"),
    ],
)
def test_what_the_server_raises_is_raised_at_the_asker(
    raised: Exception, kind: type[Exception], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def there(_connection: Connection, _message: Any) -> None:
        raise raised

    async def test(made: Pair) -> None:
        dialler, _ = await made.make(there=there)
        with pytest.raises(kind, match=words):
            await dialler.ask(Call(verb="x"))

    run(test)


@pytest.mark.parametrize("kind", ["EngineError", "reason", "os", "Nonsense", "", "__class__"])
def test_an_unknown_kind_of_refusal_is_a_server_error(kind: str) -> None:
    error = frames.refusal(messages.Refused(kind=kind, message="text"))
    assert type(error) in (ServerError, frames.EngineError)
    assert error.message == "text"


def test_the_loss_of_the_connection_ends_every_question_and_the_work_for_the_peer() -> None:
    cancelled = asyncio.Event()

    async def there(_connection: Connection, _message: Any) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def test(made: Pair) -> None:
        dialler, listener = await made.make(there=there)
        asking = [asyncio.create_task(dialler.ask(Call(verb="x"))) for _ in range(3)]
        await until(lambda: len(listener._serving) == 3)
        dialler.writer.transport.abort()
        for each in asking:
            with pytest.raises(ConnectionError):
                await each
        await cancelled.wait()
        await listener.closed.wait()
        with pytest.raises(ConnectionError):
            await listener.ask(Call(verb="x"))
        listener.write(Beat())
        await listener.close()
        await dialler.close()

    run(test)


def test_a_question_that_is_given_up_leaves_nothing_and_its_answer_is_dropped() -> None:
    go = asyncio.Event()

    async def there(connection: Connection, message: Any) -> None:
        await go.wait()
        await connection.send(Done(seq=message.seq))

    async def test(made: Pair) -> None:
        dialler, listener = await made.make(there=there)
        with pytest.raises(TimeoutError):
            await dialler.ask(Call(verb="x"), timeout=0.01)
        assert not dialler._asked
        go.set()
        await until(lambda: not listener._serving)
        assert (await dialler.ask(Call(verb="y"))).seq == 2

    run(test)


def test_more_requests_than_allowed_are_refused_and_the_others_served() -> None:
    go = asyncio.Event()

    async def there(connection: Connection, message: Any) -> None:
        await go.wait()
        await connection.send(Done(seq=message.seq))

    async def test(made: Pair) -> None:
        dialler, listener = await made.make(there=there, most_requests=3)
        asking = [asyncio.create_task(dialler.ask(Call(verb="x"))) for _ in range(5)]
        await until(lambda: sum(each.done() for each in asking) == 2)
        go.set()
        answers = await asyncio.gather(*asking, return_exceptions=True)
        assert [type(each) for each in answers] == [Done] * 3 + [Unavailable] * 2
        assert isinstance(await dialler.ask(Call(verb="x")), Done)
        assert not listener._serving

    run(test)


# --- reports --------------------------------------------------------------------------------------


def test_reports_are_served_in_order_and_a_failure_ends_none_of_them(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []

    async def there(_connection: Connection, message: Any) -> None:
        await asyncio.sleep(0)
        seen.append(message.reason)
        if message.reason == "2":
            raise NotFound("no such thing")
        if message.reason == "4":
            raise ZeroDivisionError

    async def test(made: Pair) -> None:
        dialler, _ = await made.make(there=there)
        for number in range(7):
            await dialler.send(Bye(reason=str(number)))
        await until(lambda: len(seen) == 7)
        assert seen == list("0123456")

    run(test)


def test_a_report_may_wait_for_an_answer_of_its_sender() -> None:
    got: list[bytes] = []

    async def here(connection: Connection, message: Any) -> None:
        await connection.send(Done(seq=message.seq, body=b"yes"))

    async def there(connection: Connection, message: Any) -> None:
        got.append((await connection.ask(Call(verb="x"))).body)

    async def test(made: Pair) -> None:
        dialler, _ = await made.make(here, there)
        for _ in range(50):
            dialler.write(Assignments())
        await until(lambda: len(got) == 50)

    run(test)


def test_beats_are_served_at_once_between_slow_reports() -> None:
    beats = 0

    def beat() -> None:
        nonlocal beats
        beats += 1

    async def there(_connection: Connection, _message: Any) -> None:
        await asyncio.sleep(60)

    async def test(made: Pair) -> None:
        dialler, listener = await made.make(there=there)
        listener.on_beat = beat
        dialler.write(Bye(reason=""))
        for _ in range(10):
            dialler.write(Beat())
        await until(lambda: beats == 10)

    run(test)


# --- streams --------------------------------------------------------------------------------------


def test_a_stream_ends_and_can_be_refused() -> None:
    async def there(connection: Connection, message: Any) -> None:
        for number in range(200):
            await connection.stream(
                LogLines(seq=message.seq, lines=(LogLine(task=str(number), stream=1, time=0, data=b""),))
            )
        if message.name == "bad":
            raise NotFound("no such service")
        await connection.send(Ended(seq=message.seq))

    async def test(made: Pair) -> None:
        dialler, listener = await made.make(there=there)
        lines = [answer.lines[0].task async for answer in dialler.ask_for_many(Follow(of="service", name="web"))]
        assert lines == [str(number) for number in range(200)]
        lines = []
        with pytest.raises(NotFound, match="no such service"):
            async for answer in dialler.ask_for_many(Follow(of="service", name="bad")):
                lines.append(answer.lines[0].task)
        assert len(lines) == 200
        assert not dialler._streams
        await until(lambda: not listener._serving)

    run(test)


def test_a_reader_that_pauses_stops_the_stream_and_one_that_leaves_ends_it() -> None:
    sent = 0
    ended = False

    async def there(connection: Connection, message: Any) -> None:
        nonlocal sent, ended
        try:
            while True:
                await connection.stream(LogLines(seq=message.seq, lines=()))
                sent += 1
        finally:
            ended = True

    async def test(made: Pair) -> None:
        dialler, listener = await made.make(there=there)
        async with contextlib.aclosing(dialler.ask_for_many(Follow(of="service", name="web"))) as answers:  # type: ignore[type-var]
            await anext(answers)
            await asyncio.sleep(0.05)
            assert sent == frames.WINDOW
            for _ in range(1000):
                await anext(answers)
            await asyncio.sleep(0.02)
            assert sent <= 1001 + frames.WINDOW
            assert not ended
        await until(lambda: ended)
        await until(lambda: not listener._serving)

    run(test)


def test_the_loss_of_the_connection_ends_a_stream() -> None:
    async def there(connection: Connection, message: Any) -> None:
        await connection.stream(LogLines(seq=message.seq, lines=()))
        await connection.close()

    async def test(made: Pair) -> None:
        dialler, _ = await made.make(there=there)
        with pytest.raises(ConnectionError):
            async for _ in dialler.ask_for_many(Follow(of="service", name="web")):
                pass

    run(test)


# --- peers that break the rules -------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    [
        (frames.LONGEST + 1).to_bytes(4, "big"),
        b"\xff\xff\xff\xff",
        frame(b"\xc1"),
        frame(b""),
        frame(b"\x81"),
        frame([1, 2]),
        frame({"seq": 1}),
        frame(b"\x91" * 5000),
        frame({"!": 7}),
        frame({"!": "call", "seq": "one"}),
    ],
    ids=lambda sent: repr(sent[:12]),
)
def test_nonsense_ends_the_connection(sent: bytes) -> None:
    async def test(made: Pair) -> None:
        sock, listener = await made.raw()
        sock.send(sent)
        await listener.closed.wait()
        sock.close()

    run(test)


def test_an_unknown_or_wrong_message_is_refused_and_the_connection_goes_on() -> None:
    async def there(connection: Connection, message: Any) -> None:
        await connection.send(Done(seq=message.seq))

    async def test(made: Pair) -> None:
        sock, _ = await made.raw(there)
        sock.send(frame({"!": "of-a-later-version", "seq": 5, "x": {}}))
        refused = await read_frame(sock)
        assert (refused.seq, refused.kind) == (5, "InvalidParameter")
        assert "of-a-later-version" in refused.message
        sock.send(frame({"!": "call", "seq": 6, "verb": 7}))
        assert (await read_frame(sock)).seq == 6
        sock.send(frame({"!": "news", "x": 1}))
        sock.send(frame({"!": "call", "seq": 7, "verb": "v", "later": [1]}))
        assert await read_frame(sock) == Done(seq=7)
        sock.close()

    run(test)


def test_a_peer_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def there(_connection: Connection, message: Any) -> None:
        if isinstance(message, Bye):
            raise NotFound("no such thing")
        await _connection.send(Done(seq=message.seq))

    async def test(made: Pair) -> None:
        sock, _ = await made.raw(there)
        for _ in range(50):
            sock.send(frame({"!": "a\nline " * 1000}))
            sock.send(frame({"!": "bye", "reason": "x"}))
            await asyncio.sleep(0)
        sock.send(frame({"!": "call", "seq": 7, "verb": "v"}))
        assert await read_frame(sock) == Done(seq=7)
        sock.close()

    run(test)
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert 0 < len(lines) <= frames.MOST_LINES
    assert all("\n" not in line and len(line) < 2 * frames.LONGEST_LINE for line in lines)


def test_an_answer_that_is_not_understood_fails_its_question_alone() -> None:
    async def test(made: Pair) -> None:
        sock, listener = await made.raw()
        asking = asyncio.create_task(listener.ask(Call(verb="x")))
        assert (await read_frame(sock)).seq == -1
        sock.send(frame({"!": "done", "seq": -1, "body": 3}))
        with pytest.raises(ServerError, match="not understood"):
            await asking
        assert not listener.closed.is_set()
        sock.close()

    run(test)


def test_answers_that_nobody_waits_for_and_requests_under_foreign_numbers_are_dropped() -> None:
    served = []

    async def there(_connection: Connection, message: Any) -> None:
        served.append(message)

    async def test(made: Pair) -> None:
        sock, listener = await made.raw(there)
        asking = asyncio.create_task(listener.ask(Call(verb="x")))
        await read_frame(sock)
        for each in (
            Done(seq=-9),
            Call(seq=-9, verb="x"),
            Call(seq=-1, verb="x"),
            Cancel(of=9),
            Credit(of=-1, answers=-5),
        ):
            sock.send(frame(each))
        sock.send(frame(Done(seq=-1, body=b"mine")))
        assert (await asking).body == b"mine"
        assert not served
        sock.close()

    run(test)


def test_a_number_that_is_used_twice_at_once_ends_the_connection() -> None:
    async def there(_connection: Connection, _message: Any) -> None:
        await asyncio.sleep(60)

    async def test(made: Pair) -> None:
        sock, listener = await made.raw(there)
        sock.send(frame(Call(seq=1, verb="x")) * 2)
        await listener.closed.wait()
        sock.close()

    run(test)


def test_a_peer_that_sends_half_a_message_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "STALL", 0.05)

    async def test(made: Pair) -> None:
        for size in (100, 3 << 20):
            sock, listener = await made.raw()
            sock.send(size.to_bytes(4, "big") + b"x")
            await listener.closed.wait()
            sock.close()
        sock, listener = await made.raw()
        await asyncio.sleep(0.15)
        assert not listener.closed.is_set(), "one that sends nothing is the caller's to judge"
        sock.close()

    run(test)


def test_a_peer_that_does_not_read_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "STALL", 0.05)
    monkeypatch.setattr(frames, "LONGEST", 4 << 20)

    async def test(made: Pair) -> None:
        sock, listener = await made.raw()
        with pytest.raises(ConnectionError):
            while True:
                await listener.send(Done(body=bytes(500_000)))
        await listener.closed.wait()
        sock.close()
        sock, listener = await made.raw()
        for _ in range(100):
            listener.write(Done(body=bytes(500_000)))
        assert listener.closed.is_set()
        sock.close()
        sock, listener = await made.raw()
        with pytest.raises(ServerError, match="too long"):
            listener.write(Done(body=bytes(5 << 20)))
        sock.close()

    run(test)


def test_a_flood_of_beats_does_not_hold_the_loop() -> None:
    beats = 0

    def beat() -> None:
        nonlocal beats
        beats += 1

    async def test(made: Pair) -> None:
        sock, listener = await made.raw()
        listener.on_beat = beat
        flood = asyncio.create_task(asyncio.get_running_loop().sock_sendall(sock, frame(Beat()) * 10_000))
        most = before = 0
        while beats < 10_000:
            await asyncio.sleep(0)
            most, before = max(most, beats - before), beats
        assert most <= 2 * frames._SLICE
        await flood
        sock.close()

    run(test)


def test_a_flood_of_reports_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MOST_REPORTS", 100)

    async def there(_connection: Connection, _message: Any) -> None:
        await asyncio.sleep(60)

    async def test(made: Pair) -> None:
        sock, listener = await made.raw(there)
        sock.send(frame(Statuses(of=())) * 102)
        await listener.closed.wait()
        sock.close()

    run(test)


def test_a_long_message_arrives_whole_and_byte_by_byte() -> None:
    seen: list[Any] = []

    async def there(_connection: Connection, message: Any) -> None:
        seen.append(message)

    async def test(made: Pair) -> None:
        sock, _ = await made.raw(there)
        loop = asyncio.get_running_loop()
        sent = Session(id="s", node="n", period=5.0, managers=(), role="worker", epoch=1, root="x" * 200)
        for byte in frame(sent):
            await loop.sock_sendall(sock, bytes([byte]))
        await until(lambda: seen == [sent])
        long = Bye(reason="y" * (5 << 20))
        await loop.sock_sendall(sock, frame(long) + frame(sent))
        await until(lambda: seen == [sent, long, sent])
        sock.close()

    run(test)


def test_close_sends_what_was_written_and_can_be_repeated() -> None:
    seen: list[Any] = []

    async def there(_connection: Connection, message: Any) -> None:
        seen.append(message)

    async def test(made: Pair) -> None:
        dialler, listener = await made.make(there=there)
        for number in range(100):
            dialler.write(Bye(reason=str(number)))
        await dialler.close()
        await dialler.close()
        await listener.closed.wait()
        assert len(seen) <= 100
        dialler.abort("again")

    run(test)


def test_nothing_is_logged_as_an_error_when_connections_end(caplog: pytest.LogCaptureFixture) -> None:
    async def there(connection: Connection, message: Any) -> None:
        if isinstance(message, Bye):
            await connection.ask(Call(verb="x"))
        await asyncio.sleep(60)

    async def test(made: Pair) -> None:
        for how in range(4):
            dialler, listener = await made.make(there, there)
            asking = [asyncio.create_task(side.ask(Call(verb="x"))) for side in (dialler, listener)]
            dialler.write(Bye(reason=""))
            await asyncio.sleep(0.01)
            if how == 0:
                await dialler.close()
            elif how == 1:
                listener.abort("test")
            elif how == 2:
                made.tasks[-1].cancel()
            else:
                dialler.writer.write(b"\xff\xff\xff\xff")
            await dialler.closed.wait()
            await listener.closed.wait()
            for each in asking:
                with pytest.raises(ConnectionError):
                    await each

    run(test)
    assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


@settings(max_examples=30, deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=60), st.binary(max_size=60).map(frame)), max_size=6))
def test_any_bytes_end_the_connection_or_are_waited_for(parts: list[bytes]) -> None:
    async def test(made: Pair) -> None:
        sock, listener = await made.raw()
        with contextlib.suppress(OSError):
            for part in parts:
                sock.send(part)
        sock.close()
        await listener.closed.wait()
        await made.tasks[0]

    run(test)


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=4) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
_TAGS = st.sampled_from(
    ["call", "done", "refused", "cancel", "credit", "beat", "bye", "session", "status", "logs?", "x"]
)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.dictionaries(st.sampled_from(["seq", "of", "kind", "body", "answers", "reason"]), _ANYTHING), max_size=5
    ),
    _TAGS,
)
def test_any_fields_of_any_message_are_taken_or_refused(documents: list[dict[str, Any]], tag: str) -> None:
    async def test(made: Pair) -> None:
        sock, listener = await made.raw()
        with contextlib.suppress(OSError):
            for document in documents:
                sock.send(frame({"!": tag, **document}))
        sock.close()
        await listener.closed.wait()
        await made.tasks[0]

    run(test)


def test_an_address_of_ipv4_over_ipv6_is_plain() -> None:
    assert frames._plain("::ffff:10.77.0.3") == "10.77.0.3"
    assert frames._plain("fe80::1") == "fe80::1"


def test_the_kinds_of_error_that_a_peer_may_name() -> None:
    assert isinstance(frames.refusal(messages.Refused(kind="InvalidParameter", message="x")), InvalidParameter)


def test_the_silence_of_a_host() -> None:
    async def main() -> None:
        came: asyncio.Queue[Connection] = asyncio.Queue()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = Connection(reader, writer, ignore, dialled=False)
            came.put_nowait(connection)
            await connection.run()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            dialler = Connection(*await asyncio.open_connection("127.0.0.1", port), ignore, dialled=True)
            running = asyncio.create_task(dialler.run())
            listener = await came.get()
            listener.watch_closely()
            await asyncio.sleep(0.3)
            silence = listener.silence
            assert 0.1 < silence < 5
            dialler.write(Beat())
            while listener.silence >= silence:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await dialler.close()
            await listener.closed.wait()
            assert listener.silence == 0
            await running
        async with pairs() as pair:
            here, _ = await pair.make()
            here.watch_closely()
            assert here.silence == 0

    asyncio.run(main())
