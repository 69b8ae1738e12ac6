"""Streams: what counts as delivered (looks at a connection that the test makes up), and connections
over a Unix socket."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from engine.logs import dial
from engine.logs.deliveries import Delivery, Syslog
from engine.shipper import destination as destinations
from engine.shipper.senders import streams
from engine.shipper.senders.streams import (
    COMMIT_AFTER,
    FINISH,
    SMALLEST_BUFFER,
    STALLED,
    TURN_OVER,
    Connection,
    StreamDestination,
    SyslogStream,
)
from tests.unit.shipper.spools import Owner, Spool, delivery, number, until

KIB = 1 << 10


class Line(Connection):
    """A connection without a socket. The test says what the peer's kernel has, and its window."""

    def __init__(self, changed: asyncio.Event) -> None:
        super().__init__(changed)
        self.wire = bytearray()
        self.lacks = 0
        self.announced = 64 * KIB
        self.unix = False
        self.failure: OSError | None = None
        self.full: asyncio.Event | None = None
        """Set by the test when a write may go on."""
        self.aborted = False

    async def write(self, data: bytes) -> None:
        self.wire += data
        if self.full is not None:
            await self.full.wait()
        await asyncio.sleep(0)
        self.check()

    def outstanding(self) -> int:
        if self.failure is not None:
            raise self.failure
        return self.lacks

    @property
    def local(self) -> bool:
        return self.unix

    def window(self) -> int:
        return self.announced

    def end_writing(self) -> None:
        self.ending = True

    def abort(self) -> None:
        self.aborted = True

    # the peer

    def fin(self) -> None:
        self.ended = True
        self.changed.set()

    def reset(self, number: int = 104) -> None:
        self.lost = True
        self.error = self.failure = ConnectionResetError(number, "Connection reset by peer")
        self.changed.set()

    @property
    def lines(self) -> list[int]:
        return [number(line.partition(b": ")[2]) for line in bytes(self.wire).splitlines()]


class Looked(SyslogStream):
    """Connects to a `Line`."""

    def __init__(self, owner: Owner, document: Delivery) -> None:
        super().__init__(owner, document)
        self.lines: list[Line] = []
        self.refuses = 0

    async def dial(self) -> Connection:
        if self.refuses:
            self.refuses -= 1
            raise ConnectionRefusedError(111, "Connection refused")
        line = Line(self._wake)
        self.lines.append(line)
        return line


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool")


@pytest.fixture
def looked(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> Looked:
    monkeypatch.setattr(streams, "LOOK", 0.001)
    monkeypatch.setattr(destinations, "FIRST_PAUSE", 0.001)
    made = Looked(spool.owner, spool.document)
    made._first_pause = 0.001
    spool.feed.destination = made
    made.feeds.add(spool.feed)
    return made


def sent(looked: StreamDestination, spool: Spool, size: int) -> None:
    """One line more that ends `size` bytes behind the others in the stream."""
    spool.write(1)
    spool.feed.take(1)
    looked._sent += size
    looked.sent(looked._sent, spool.feed)


# --- what a look settles --------------------------------------------------------------------------


@pytest.fixture
def line(looked: Looked) -> Line:
    made = Line(looked._wake)
    looked.connection = made
    looked._opened = 0.0
    return made


def test_nothing_is_settled_that_the_buffer_may_hold(looked: Looked, line: Line, spool: Spool) -> None:
    for _ in range(16):
        sent(looked, spool, 16 * KIB)
    looked.look(line, 1.0)
    assert spool.feed.acked.lines == 0
    sent(looked, spool, 16 * KIB)
    looked.look(line, 1.1)
    assert looked._sent - SMALLEST_BUFFER == 16 * KIB and spool.feed.acked.lines == 1


@pytest.mark.parametrize("window", [0, 64 * KIB, 200 * KIB, 1024 * KIB])
def test_the_buffer_is_twice_the_largest_window(looked: Looked, line: Line, spool: Spool, window: int) -> None:
    line.announced = window
    sent(looked, spool, 1)
    looked.look(line, 1.0)
    line.announced = 10 * KIB  # the process reads slowly since
    for _ in range(100):
        sent(looked, spool, 64 * KIB)
    looked.look(line, 1.1)
    lag = looked._sent - (spool.feed.acked.lines - 1) * 64 * KIB - 1
    buffer = max(2 * window, SMALLEST_BUFFER)
    assert buffer <= lag < buffer + 64 * KIB


def test_a_peer_whose_window_is_never_open(looked: Looked, line: Line, spool: Spool) -> None:
    """Its whole buffer was filled before the first look."""
    line.announced = 0
    sent(looked, spool, 128 * KIB)
    looked.look(line, 1.0)
    assert spool.feed.acked.lines == 0


def test_what_the_kernels_have_not_passed_on_is_not_settled(looked: Looked, line: Line, spool: Spool) -> None:
    for _ in range(100):
        sent(looked, spool, 64 * KIB)
    line.lacks = 100 * 64 * KIB
    looked.look(line, 1.0)
    assert spool.feed.acked.lines == 0
    line.lacks = 50 * 64 * KIB
    looked.look(line, 1.1)
    assert spool.feed.acked.lines == 50 - SMALLEST_BUFFER // (64 * KIB)


def test_what_has_arrived_long_ago_was_read(looked: Looked, line: Line, spool: Spool) -> None:
    sent(looked, spool, 100)
    line.lacks = 100
    looked.look(line, 1.0)
    line.lacks = 0
    looked.look(line, 2.0)
    looked.look(line, 2.0 + COMMIT_AFTER - 0.1)
    assert spool.feed.acked.lines == 0
    looked.look(line, 2.0 + COMMIT_AFTER)
    assert spool.feed.acked.lines == 1


def test_each_line_waits_for_itself(looked: Looked, line: Line, spool: Spool) -> None:
    for at in range(10):
        sent(looked, spool, 100)
        looked.look(line, float(at))
    for at in range(10):
        looked.look(line, at + COMMIT_AFTER)
        assert spool.feed.acked.lines == at + 1


def test_a_process_that_does_not_read(looked: Looked, line: Line, spool: Spool) -> None:
    looked.look(line, 0.0)
    sent(looked, spool, 40 * KIB)
    line.announced = 24 * KIB
    looked.look(line, 1.0)
    looked.look(line, 1.0 + 10 * COMMIT_AFTER)
    assert spool.feed.acked.lines == 0
    line.announced = 60 * KIB
    looked.look(line, 1.0 + 11 * COMMIT_AFTER)
    assert spool.feed.acked.lines == 1


def test_a_unix_socket_counts_what_the_process_has_not_read(looked: Looked, line: Line, spool: Spool) -> None:
    line.unix, line.announced = True, 0
    for _ in range(10):
        sent(looked, spool, 100)
    line.lacks = 450  # more than the bytes: the kernel counts memory
    looked.look(line, 1.0)
    assert spool.feed.acked.lines == 5
    line.lacks = 0
    looked.look(line, 1.1)
    assert spool.feed.acked.lines == 10


def test_a_reset_settles_nothing(looked: Looked, line: Line, spool: Spool) -> None:
    line.unix, line.announced = True, 0
    sent(looked, spool, 100)
    line.failure = ConnectionResetError(104, "reset")
    with pytest.raises(ConnectionResetError):
        looked.look(line, 1.0)
    assert spool.feed.acked.lines == 0


def test_a_look_says_that_the_target_is_reached(looked: Looked, line: Line, spool: Spool) -> None:
    looked.failed(ConnectionRefusedError(111, "refused"))
    sent(looked, spool, 100)
    line.lacks = 100
    looked.look(line, 1.0)
    assert spool.owner.changes == ["refused"]
    line.lacks = 0
    looked.look(line, 2.0)
    assert spool.owner.changes == ["refused", ""] and looked.attempts == 1


# --- turning over ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quota", "blocking", "turned"),
    [(1000, True, True), (100_000, True, False), (1000, False, False), (0, True, False)],
)
def test_a_nearly_full_spool_turns_the_connection_over(
    tmp_path: Path, quota: int, blocking: bool, turned: bool
) -> None:
    spool = Spool(tmp_path / "full", quota=quota, blocking=blocking)
    looked = Looked(spool.owner, spool.document)
    spool.feed.destination = looked
    line = Line(looked._wake)
    for _ in range(20):
        sent(looked, spool, 100)
    spool.feed.written = spool.feed.at.bytes
    looked.look(line, TURN_OVER / 2)
    assert not line.ending, "too young"
    looked.look(line, TURN_OVER)
    assert line.ending == turned
    spool.feed.close()


def test_turned_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent twice, and the failure of nothing is reported."""
    monkeypatch.setattr(streams, "LOOK", 0.001)
    monkeypatch.setattr(streams, "TURN_OVER", 0.0)
    spool = Spool(tmp_path / "full", quota=1000)
    looked = Looked(spool.owner, spool.document)
    spool.feed.destination = looked
    spool.write(20)

    async def scene() -> None:
        looked.add(spool.feed)
        looked.notify(spool.feed)
        await until(lambda: looked.lines and looked.lines[0].ending)
        spool.write(5)
        looked.notify(spool.feed)
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(looked.lines[0].lines) == 20, "nothing is sent after the end"
        looked.lines[0].fin()
        await until(lambda: len(looked.lines) == 2 and looked.lines[1].lines)
        assert spool.feed.acked.lines == 20
        await looked.end(orderly=False)

    asyncio.run(scene())
    assert looked.lines[0].lines == list(range(20)) and looked.lines[1].lines == list(range(20, 25))
    assert spool.owner.changes == []
    spool.feed.close()


def test_a_peer_that_does_not_end_its_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines are sent again, and the connection is not turned over once more."""
    monkeypatch.setattr(streams, "LOOK", 0.001)
    monkeypatch.setattr(streams, "TURN_OVER", 0.0)
    monkeypatch.setattr(streams, "FINISH", 0.01)
    assert FINISH > 1
    spool = Spool(tmp_path / "full", quota=1000)
    looked = Looked(spool.owner, spool.document)
    spool.feed.destination = looked
    spool.write(20)

    async def scene() -> None:
        looked.add(spool.feed)
        looked.notify(spool.feed)
        await until(lambda: len(looked.lines) == 2 and len(looked.lines[1].lines) == 20)
        for _ in range(100):
            await asyncio.sleep(0.0001)
        assert not looked.lines[1].ending and len(looked.lines) == 2
        await looked.end(orderly=False)

    asyncio.run(scene())
    assert spool.feed.acked.lines == 0 and looked.lines[0].aborted
    spool.feed.close()


# --- a connection's end ---------------------------------------------------------------------------


async def started(looked: Looked, spool: Spool) -> Line:
    looked.add(spool.feed)
    looked.notify(spool.feed)
    await until(lambda: looked.lines and len(looked.lines[-1].lines) == spool.written)
    return looked.lines[-1]


def test_fin_of_an_old_connection_settles_what_came_a_second_before(looked: Looked, spool: Spool) -> None:
    """Its process may have been killed before it has stored the rest."""
    spool.write(2)

    async def scene() -> None:
        line = await started(looked, spool)
        await until(lambda: bool(looked._seen))
        looked._seen[0] = (looked._seen[0][0] - 10, looked._seen[0][1])
        looked._opened -= 10
        spool.write(3)
        looked.notify(spool.feed)
        await until(lambda: len(line.lines) == 5)
        line.fin()
        await until(lambda: len(looked.lines) == 2 and len(looked.lines[1].lines) == 3)
        assert spool.feed.acked.lines == 2
        await looked.end(orderly=False)

    asyncio.run(scene())
    assert looked.lines[1].lines == [2, 3, 4]
    assert spool.owner.changes == []


def test_nothing_is_dialled_for_a_feed_without_lines(looked: Looked, spool: Spool) -> None:
    looked.refuses = 1

    async def scene() -> None:
        looked.add(spool.feed)
        looked.notify(spool.feed)
        await until(lambda: not spool.feed.queued)
        assert looked.refuses == 1 and not looked.error
        spool.write(1)
        looked.notify(spool.feed)
        await until(lambda: looked.lines and looked.lines[0].lines)
        await looked.end(orderly=False)

    asyncio.run(scene())


def test_a_peer_that_dies_during_a_write(looked: Looked, spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The write does not return, and the peer's kernel acknowledges nothing."""
    monkeypatch.setattr(streams, "STALLED", 0.05)
    spool.write(1)

    async def scene() -> None:
        line = await started(looked, spool)
        line.full = asyncio.Event()
        line.lacks = 10_000
        spool.write(1)
        looked.notify(spool.feed)
        await until(lambda: len(looked.lines) == 2 and looked.lines[1].lines)
        assert line.aborted and spool.owner.changes
        await looked.end(orderly=False)

    asyncio.run(scene())


@pytest.mark.parametrize("window", [0, 64 * KIB])
def test_a_peer_whose_kernel_is_silent_is_dead_unless_its_window_is_closed(
    looked: Looked, spool: Spool, line: Line, window: int
) -> None:
    sent(looked, spool, 10)
    line.lacks, line.announced = 10, window
    looked._alive = 100.0
    looked.look(line, 100.0)
    looked.look(line, 100.0 + STALLED)
    if window:
        with pytest.raises(TimeoutError, match="no acknowledgement for 60 s"):
            looked.look(line, 101.0 + STALLED)
    else:
        looked.look(line, 10_000.0)
        line.announced = 64 * KIB
        looked.look(line, 10_001.0)


def test_fin_settles_everything(looked: Looked, spool: Spool) -> None:
    spool.write(3)

    async def scene() -> None:
        line = await started(looked, spool)
        line.fin()
        await until(lambda: spool.feed.acked.lines == 3)
        spool.write(2)
        looked.notify(spool.feed)
        await until(lambda: len(looked.lines) == 2 and looked.lines[1].lines)
        await looked.end(orderly=False)

    asyncio.run(scene())
    assert looked.lines[1].lines == [3, 4] and spool.owner.changes == []


def test_fin_while_the_peer_lacks_something(looked: Looked, spool: Spool) -> None:
    spool.write(3)

    async def scene() -> None:
        line = await started(looked, spool)
        line.lacks = 10
        line.fin()
        await until(lambda: len(looked.lines) == 2 and looked.lines[1].lines)
        await looked.end(orderly=False)

    asyncio.run(scene())
    assert looked.lines[1].lines == [0, 1, 2]
    assert spool.owner.changes[0] == "connection closed by the target"


def test_reset_sends_again(looked: Looked, spool: Spool) -> None:
    spool.write(3)

    async def scene() -> None:
        line = await started(looked, spool)
        line.reset()
        await until(lambda: len(looked.lines) == 2 and looked.lines[1].lines and not looked.error)
        await looked.end(orderly=False)

    asyncio.run(scene())
    assert looked.lines[1].lines == [0, 1, 2]
    assert spool.owner.changes == ["Connection reset by peer", ""]


def test_a_reset_after_a_fin_sends_again(looked: Looked, spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends its side first, and is then killed with unread data."""
    spool.write(3)

    async def scene() -> None:
        line = await started(looked, spool)
        line.fin()
        line.failure = BrokenPipeError(32, "Broken pipe")  # in the 50 ms after the FIN
        await until(lambda: len(looked.lines) == 2 and looked.lines[1].lines)
        await looked.end(orderly=False)

    asyncio.run(scene())
    assert looked.lines[1].lines == [0, 1, 2]


def test_a_peer_that_ends_each_new_connection(looked: Looked, spool: Spool) -> None:
    """It takes nothing, so that is a failure with growing pauses."""

    async def scene() -> None:
        spool.write(1)
        looked.add(spool.feed)
        real = looked.dial

        async def dial() -> Connection:
            line = await real()
            line.ended = True
            return line

        looked.dial = dial  # type: ignore[method-assign]
        looked.notify(spool.feed)
        await until(lambda: looked.attempts >= 2)
        await looked.end(orderly=False)

    asyncio.run(scene())
    assert spool.owner.changes == ["connection closed by the target"]


def test_a_write_that_takes_too_long(looked: Looked, spool: Spool) -> None:
    """`fluentd-write-timeout`."""
    looked._patience = 0.01
    spool.write(1)

    async def scene() -> None:
        real = looked.dial

        async def dial() -> Connection:
            line = await real()
            assert isinstance(line, Line)
            line.full = asyncio.Event()
            return line

        looked.dial = dial  # type: ignore[method-assign]
        looked.add(spool.feed)
        looked.notify(spool.feed)
        await until(lambda: looked.attempts >= 2)
        await looked.end(orderly=False)

    asyncio.run(scene())
    assert spool.owner.changes == ["timed out"]


def test_the_orderly_end_settles(looked: Looked, spool: Spool) -> None:
    spool.write(3)

    async def scene() -> None:
        line = await started(looked, spool)
        ending = asyncio.ensure_future(looked.end(orderly=True))
        await until(lambda: line.ending)
        spool.write(1)
        looked.notify(spool.feed)
        line.fin()
        await ending

    asyncio.run(scene())
    assert spool.feed.acked.lines == 3 and len(looked.lines) == 1, "no line after the end, no new connection"


def test_other_feeds_wait_for_their_turn_only(looked: Looked, spool: Spool, tmp_path: Path) -> None:
    other = Spool(tmp_path / "other", tag="other")
    other.feed.destination = looked
    spool.write(20_000, size=100)
    other.write(1)

    async def scene() -> None:
        looked.add(spool.feed)
        looked.add(other.feed)
        looked.notify(spool.feed)
        looked.notify(other.feed)
        await until(lambda: looked.lines and b"other[0]" in looked.lines[0].wire)
        assert len(looked.lines[0].wire) <= 2 * streams.ROOM
        await looked.end(orderly=False)

    asyncio.run(scene())
    other.feed.close()


# --- connections ----------------------------------------------------------------------------------


def test_a_connection_over_a_unix_socket(tmp_path: Path) -> None:
    async def scene() -> None:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        changed = asyncio.Event()
        connection = await dial.stream(lambda: Connection(changed), str(tmp_path / "s"))
        peer, _ = listener.accept()
        await connection.write(b"hello")
        assert connection.window() == 0
        assert connection.outstanding() >= 5
        assert peer.recv(100) == b"hello"
        assert connection.outstanding() == 0
        peer.send(b"answer")
        await until(lambda: connection.received == b"answer")
        peer.close()
        await until(lambda: connection.ended)
        assert connection.in_order()
        connection.abort()
        await until(lambda: connection.lost)
        listener.close()

    asyncio.run(scene())


def test_a_peer_that_is_killed_with_unread_data(tmp_path: Path) -> None:
    """The kernel frees the data, so that SIOCOUTQ is 0; the error comes first."""

    async def scene() -> None:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        connection = await dial.stream(lambda: Connection(asyncio.Event()), str(tmp_path / "s"))
        peer, _ = listener.accept()
        await connection.write(b"hello")
        peer.close()
        with pytest.raises(ConnectionResetError):
            connection.outstanding()
        connection.abort()
        await until(lambda: connection.lost)
        listener.close()

    asyncio.run(scene())


def test_a_reset_that_asyncio_has_not_reported_yet(tmp_path: Path) -> None:
    """It has dropped its buffer then, and the socket has no error any more."""

    async def scene() -> None:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        connection = await dial.stream(lambda: Connection(asyncio.Event()), str(tmp_path / "s"))
        peer, _ = listener.accept()
        writing = asyncio.ensure_future(connection.write(bytes(4 << 20)))
        await asyncio.sleep(0)
        peer.close()
        transport = connection._transport
        assert transport is not None
        while not transport.is_closing():  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert not connection.lost and transport.get_write_buffer_size() == 0
        with pytest.raises(ConnectionResetError):
            connection.outstanding()
        with pytest.raises(OSError):
            await writing
        listener.close()

    asyncio.run(scene())


def test_a_write_waits_for_a_slow_peer(tmp_path: Path) -> None:
    async def scene() -> None:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        connection = await dial.stream(lambda: Connection(asyncio.Event()), str(tmp_path / "s"))
        peer, _ = listener.accept()
        peer.setblocking(False)
        size = 4 << 20
        writing = asyncio.ensure_future(connection.write(bytes(size)))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not writing.done() and connection.outstanding() >= size
        got = 0
        while got < size:
            try:
                got += len(peer.recv(1 << 20))
            except BlockingIOError:
                await asyncio.sleep(0)
        await writing
        connection.end_writing()
        await until(lambda: _ended(peer))
        peer.close()
        await until(lambda: connection.ended)
        assert connection.in_order()
        connection.abort()
        listener.close()
        await until(lambda: connection.lost)

    asyncio.run(scene())


def _ended(peer: socket.socket) -> bool:
    try:
        return peer.recv(1) == b""
    except BlockingIOError:
        return False


def test_a_write_to_a_lost_connection(tmp_path: Path) -> None:
    async def scene() -> None:
        connection = Connection(asyncio.Event())
        connection._transport = asyncio.Transport()
        connection.connection_lost(ConnectionResetError(104, "reset"))
        with pytest.raises(ConnectionResetError):
            await connection.write(b"x")
        with pytest.raises(ConnectionResetError):
            connection.outstanding()
        connection.error = None
        with pytest.raises(ConnectionResetError, match="closed by the target"):
            connection.check()

    asyncio.run(scene())


@pytest.mark.parametrize("scheme", ["tcp", "tcp+tls", "unix"])
def test_keys_of_destinations(scheme: Any) -> None:
    one = delivery(Syslog(scheme, "a", 1, facility=1, format="rfc3164")).target.destination
    same = delivery(Syslog(scheme, "a", 1, facility=2, format="unix")).target.destination
    assert one == same, "facility and format are those of a form"
    assert delivery(Syslog(scheme, "b", 1)).target.destination != one
