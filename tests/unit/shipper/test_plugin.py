"""Log plugins: entries against a decoder of the tests, and what counts as delivered.

The FIFOs are in the test's directory; nothing leaves the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.logs.deliveries import LogPlugin
from engine.shipper.feed import Entry
from engine.shipper.senders import plugin
from engine.shipper.senders.plugin import PAGE, Pipe, Plugin, frame, frames
from tests.support import PATIENCE
from tests.support.logs.targets.log_plugin import LogEntry, whole
from tests.unit.shipper import feeds
from tests.unit.shipper.feeds import Owner
from tests.unit.shipper.spools import until


def entries(wire: bytes) -> list[LogEntry]:
    """Whole frames and nothing else."""
    found, rest = whole("", wire)
    assert not rest
    return found


# --- entries --------------------------------------------------------------------------------------

TIMES = st.integers(-(1 << 63), (1 << 63) - 1)
PARTS = st.none() | st.tuples(st.text("0123456789abcdef", min_size=1), st.integers(1, (1 << 31) - 1), st.booleans())


@given(st.sampled_from((1, 2)), TIMES, st.binary(max_size=70_000), PARTS)
def test_an_entry(stream: int, at: int, line: bytes, part: tuple[str, int, bool] | None) -> None:
    (entry,) = entries(frame(stream, at, line, part))
    source = ("stdout", "stderr")[stream - 1]
    assert entry == LogEntry("", source, at, line, part is not None, part)


def test_the_bytes_of_an_entry() -> None:
    """As protoc's encoder writes them."""
    body = bytes.fromhex("0a067374646f757410ac021a02686920012a09080112036162631802")
    assert frame(1, 300, b"hi", ("abc", 2, True)) == len(body).to_bytes(4, "big") + body


# --- one FIFO -------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "fifo"
    os.mkfifo(made)
    return made


@pytest.fixture
def reader(path: Path) -> Iterator[int]:
    """The plugin's end."""
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    yield opened
    os.close(opened)


def test_a_fifo_that_is_not_read(path: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="does not read") as caught:
        Pipe(str(path))
    assert caught.value.errno == errno.ENXIO
    with pytest.raises(OSError, match="has not been asked"):
        Pipe(str(tmp_path / "absent"))
    (tmp_path / "file").write_text("kept")
    with pytest.raises(OSError, match="is not a FIFO"):
        Pipe(str(tmp_path / "file"))
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(OSError):
        Pipe(str(tmp_path / "link"))
    assert (tmp_path / "file").read_text() == "kept"


def test_settled_a_second_after_it_was_read(path: Path, reader: int) -> None:
    pipe = Pipe(str(path))
    pipe.push([b"a" * 10, b"b" * 10])
    now = time.monotonic()
    pipe.look(now)
    pipe.look(now + 5)
    assert pipe.settled == 0
    assert os.read(reader, 10) == b"a" * 10
    pipe.look(now + 6)
    pipe.look(now + 6.9)
    assert pipe.settled == 0
    pipe.look(now + 7.1)
    assert pipe.settled == 10
    assert os.read(reader, 100) == b"b" * 10
    pipe.look(now + 8)
    pipe.look(now + 9.1)
    assert pipe.settled == pipe.queued == 20
    pipe.close()


def test_frames_wait_until_they_fit(path: Path, reader: int) -> None:
    """So that there is no half of one if the shipper is killed."""
    pipe = Pipe(str(path))
    size = fcntl.fcntl(reader, fcntl.F_GETPIPE_SZ)
    sent = [bytes([index % 251]) * (5 * PAGE + 100) for index in range(3 * size // (5 * PAGE))]
    pipe.push(sent)
    got, now = b"", time.monotonic()
    while len(got) < pipe.queued:
        unread = struct.unpack("i", fcntl.ioctl(reader, plugin.termios.FIONREAD, b"\0" * 4))[0]
        assert (len(got) + unread) % len(sent[0]) == 0, "a frame is cut"
        got += os.read(reader, 7777)
        now += 0.01
        pipe.look(now)
    assert got == b"".join(sent) and not pipe.blocked
    pipe.close()


def test_small_frames_take_a_part_of_the_fifo_each(path: Path, reader: int) -> None:
    """A FIFO may be full with few bytes in it."""
    pipe = Pipe(str(path))
    parts = fcntl.fcntl(reader, fcntl.F_GETPIPE_SZ) // PAGE
    for index in range(parts + 50):
        pipe.push([b"%04d" % index * (PAGE // 8 + 1)])
    assert pipe.blocked
    got, now = b"", time.monotonic()
    while len(got) < pipe.queued:
        got += os.read(reader, 1 << 16)
        now += 0.1
        pipe.look(now)
    assert got == b"".join(b"%04d" % index * (PAGE // 8 + 1) for index in range(parts + 50))
    pipe.close()


def test_a_frame_that_is_larger_than_the_fifo(path: Path, reader: int) -> None:
    pipe = Pipe(str(path))
    sent = [b"a" * 100, b"b" * (3 << 20), b"c" * 100]
    pipe.push(sent)
    got, now = b"", time.monotonic()
    while len(got) < pipe.queued:
        got += os.read(reader, 1 << 20)
        now += 0.1
        pipe.look(now)
    assert got == b"".join(sent)
    pipe.close()


def test_what_an_earlier_shipper_has_left_is_read_first(path: Path, reader: int) -> None:
    earlier = Pipe(str(path))
    earlier.push([b"left"])
    earlier.close()
    pipe = Pipe(str(path))
    assert pipe.blocked
    pipe.push([b"new"])
    pipe.look(1)
    assert os.read(reader, 100) == b"left"
    pipe.look(2)
    assert os.read(reader, 100) == b"new" and not pipe.blocked
    pipe.look(3)
    pipe.look(5)
    assert pipe.settled == 3
    pipe.close()


def test_a_fifo_that_is_over(path: Path, tmp_path: Path) -> None:
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    pipe, other = Pipe(str(path)), Pipe(str(path))
    assert not pipe.over
    os.close(opened)
    assert pipe.over
    with pytest.raises(BrokenPipeError):
        pipe.push([b"x"])
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    assert not other.over
    os.mkfifo(tmp_path / "new")
    os.rename(tmp_path / "new", path)
    assert other.over
    path.unlink()
    assert other.over
    os.close(opened)
    pipe.close()
    other.close()


# --- feeds ----------------------------------------------------------------------------------------


class Reading:
    """A spool, its destination and the plugin's end of its FIFO."""

    def __init__(self, base: Path, number: int = 1, destination: Plugin | None = None) -> None:
        self.path = base / f"fifo{number}"
        self.fd = -1
        document = feeds.document(LogPlugin("far", str(self.path)), number)
        self.destination = destination or Plugin(Owner(), document)  # type: ignore[arg-type]
        self.spool = feeds.Spool(base, self.destination, document)
        self.got = b""

    def open(self) -> None:
        """The plugin reads a new FIFO."""
        made = self.path.with_suffix(".new")
        os.mkfifo(made)
        made.rename(self.path)
        self.fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)

    def end(self) -> None:
        """The plugin is killed."""
        os.close(self.fd)
        self.got = b""

    async def lines(self, count: int) -> list[bytes]:
        """Reads until so many have come."""
        async with asyncio.timeout(20 * PATIENCE):
            while True:
                with contextlib.suppress(BlockingIOError):
                    self.got += os.read(self.fd, 1 << 16)
                found = [entry.line for entry in whole("", self.got)[0]]
                if len(found) >= count:
                    return found
                await asyncio.sleep(0.005)

    async def delivered(self) -> None:
        await until(lambda: self.spool.feed.delivered)


def play(base: Path, monkeypatch: pytest.MonkeyPatch, scene: Callable[[Reading], Coroutine[None, None, None]]) -> None:
    monkeypatch.setattr(plugin, "GRACE", 0.1)

    async def whole() -> None:
        reading = Reading(base)
        try:
            await scene(reading)
        finally:
            await reading.destination.end(orderly=False)
            reading.spool.close()

    asyncio.run(whole())


def test_lines_of_a_feed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(reading: Reading) -> None:
        reading.open()
        reading.spool.write(b"one\n\nthree\r\n")
        reading.spool.write(b"err\n", 2)
        assert await reading.lines(4) == [b"one", b"", b"three\r", b"err"]
        assert [each.source for each in entries(reading.got)] == ["stdout"] * 3 + ["stderr"]
        assert reading.spool.feed.acked.lines == 0
        await reading.delivered()
        assert reading.spool.feed.acked.lines == 4

    play(tmp_path, monkeypatch, scene)


def test_a_plugin_that_is_killed_gets_all_again_that_it_may_not_have_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(reading: Reading) -> None:
        reading.open()
        reading.spool.write(b"1\n2\n")
        await reading.lines(2)
        await reading.delivered()
        reading.spool.write(b"3\n4\n")
        await reading.lines(4)
        reading.end()
        reading.spool.write(b"5\n")
        await asyncio.sleep(0.2)
        assert reading.spool.feed.acked.lines == 2
        reading.open()
        assert await reading.lines(3) == [b"3", b"4", b"5"]
        await reading.delivered()
        assert not reading.destination.error

    play(tmp_path, monkeypatch, scene)


def test_a_plugin_that_is_away_is_an_error_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(reading: Reading) -> None:
        reading.spool.write(b"1\n")
        await until(lambda: reading.destination.error)
        assert "has not been asked" in reading.destination.trouble(reading.spool.feed)
        reading.open()
        assert await reading.lines(1) == [b"1"]
        await reading.delivered()
        assert reading.destination.trouble(reading.spool.feed) == ""
        assert [bool(each) for each in reading.destination.owner.changes] == [True, False]  # type: ignore[attr-defined]

    play(tmp_path, monkeypatch, scene)


def test_a_restart_of_the_container_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(reading: Reading) -> None:
        reading.open()
        reading.spool.write(b"1\n")
        await reading.lines(1)
        await reading.delivered()
        reading.end()
        reading.open()
        reading.spool.write(b"2\n")
        assert await reading.lines(1) == [b"2"]
        assert reading.destination.owner.changes == []  # type: ignore[attr-defined]

    play(tmp_path, monkeypatch, scene)


def test_a_container_whose_lines_are_not_read_delays_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(reading: Reading) -> None:
        other = Reading(tmp_path, 2, reading.destination)
        away = Reading(tmp_path, 3, reading.destination)
        reading.open()
        other.open()
        line = b"x" * 8000 + b"\n"
        for _ in range(300):
            reading.spool.write(line)
        away.spool.write(b"away\n")
        other.spool.write(b"1\n")
        assert await other.lines(1) == [b"1"]
        await other.delivered()
        assert len(await reading.lines(300)) == 300
        await reading.delivered()
        assert not away.spool.feed.delivered
        reading.destination.remove(away.spool.feed)
        away.spool.close()
        other.spool.close()

    play(tmp_path, monkeypatch, scene)


def test_parts_of_long_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have an id, also across turns; a rollback gives them the same one."""

    async def scene(reading: Reading) -> None:
        feed = reading.spool.feed
        first = [Entry(1, 5, b"a", False), Entry(2, 6, b"whole", True), Entry(1, 7, b"b", False)]
        begun = feed.form.state
        wire = b"".join(frames(feed, first))
        rest = b"".join(frames(feed, [Entry(1, 8, b"c", True), Entry(1, 9, b"next", True)]))
        found = entries(wire + rest)
        name = found[0].part[0] if found[0].part else ""
        assert [each.part for each in found] == [(name, 1, False), None, (name, 2, False), (name, 3, True), None]
        assert len(name) == 64
        feed.form.state = begun
        assert b"".join(frames(feed, first)) == wire

    play(tmp_path, monkeypatch, scene)
