"""A feed's positions: reading, rotation, lost files, skipping, acknowledgements, cursors."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.logs import cursor
from engine.logs.deliveries import Fluentd
from engine.shipper import feed as feed_module
from engine.shipper.feed import BLOCK, LONGEST, Feed, Position
from tests.unit.shipper.spools import Spool, delivery, entry, number, numbers


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    made = Spool(tmp_path / "spool")
    yield made
    made.feed.close()


@pytest.fixture
def lossy(tmp_path: Path) -> Iterator[Spool]:
    """In non-blocking mode, with a quota of 10,000 bytes."""
    made = Spool(tmp_path / "lossy", blocking=False, quota=10_000)
    yield made
    made.feed.close()


# --- reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [1, 100, 5000, 1 << 20])
def test_reads_entries_in_turns_of_about_the_room(spool: Spool, room: int) -> None:
    spool.write(300, size=80)
    turns = []
    while (entries := spool.feed.take(room)) is not None:
        turns.append(entries)
        assert sum(len(each.text) for each in entries[:-1]) < room
    assert [each for turn in turns for each in numbers(turn)] == list(range(300))
    assert spool.feed.at == Position(os.stat(spool.live).st_ino, spool.bytes, spool.bytes, 300)
    assert spool.feed.drained and spool.feed.take(room) is None


def test_an_entry_as_the_driver_sees_it(spool: Spool) -> None:
    spool.append(
        b'{"log":"a\\u0000\\t\\"\xc3\xa9\\u003c\\n","stream":"stderr","time":"2026-01-02T03:04:05.123456789Z"}\n'
        b'{"log":"part","stream":"stdout","time":"2026-01-02T03:04:05.123456791Z"}\n'
    )
    entries = spool.feed.take(1 << 16)
    assert entries == [
        (2, 1767323045123456789, b'a\0\t"\xc3\xa9<', True),
        (1, 1767323045123456791, b"part", False),
    ]


def test_a_spool_that_does_not_exist_yet(spool: Spool) -> None:
    spool.live.unlink()
    assert spool.feed.take(100) is None and spool.feed.drained
    spool.write(3)
    assert spool.drain() == [0, 1, 2]


@pytest.mark.parametrize("cut", [1, 20, 60, len(entry(2)) - 1])
def test_a_torn_last_line_waits_for_its_end(spool: Spool, cut: int) -> None:
    spool.write(2)
    line = entry(2)
    spool.append(line[:cut])
    assert spool.drain() == [0, 1]
    at = spool.feed.at
    assert spool.drain() == [] and spool.feed.at == at
    spool.append(line[cut:])
    spool.written += 1
    assert spool.drain() == [2]


@pytest.mark.parametrize("after", ["shorter", "equal", "longer"])
def test_a_torn_last_line_is_removed(spool: Spool, after: str) -> None:
    """The monitor truncates what a failed write has left, and goes on at that place. What was read
    of it must not become part of the next line."""
    spool.write(2)
    size = spool.live.stat().st_size
    torn = {"shorter": 90, "equal": len(entry(2)), "longer": 150}[after]
    spool.append(entry(77, size=300)[:torn])
    assert spool.drain() == [0, 1]
    os.truncate(spool.live, size)
    spool.write(1)
    assert spool.drain() == [2]
    spool.write(1)
    assert spool.drain() == [3]


@pytest.mark.parametrize("size", [BLOCK - 100, BLOCK - 60, BLOCK, BLOCK + 1, 3 * BLOCK, 10 * BLOCK, LONGEST - 200])
def test_entries_of_more_than_a_block(spool: Spool, size: int) -> None:
    spool.write(1)
    spool.write(2, size=size)
    spool.write(1)
    assert spool.drain() == [0, 1, 2, 3]
    assert spool.feed.at.offset == spool.bytes


@pytest.mark.parametrize("size", [10, BLOCK + 5, LONGEST - 1, LONGEST, LONGEST + 1, 2 * LONGEST + 12345])
def test_garbage_is_passed_over(spool: Spool, size: int) -> None:
    spool.write(2)
    spool.append(b"\xff" * size + b"\n")
    spool.write(2)
    assert spool.drain() == [0, 1, 2, 3]
    assert spool.feed.at == (os.stat(spool.live).st_ino, spool.bytes, spool.bytes, 4)


@pytest.mark.parametrize("size", [10, LONGEST + 5])
def test_garbage_at_the_end_can_be_acknowledged(spool: Spool, size: int) -> None:
    """Otherwise the spool would never count as delivered."""
    spool.write(1)
    spool.append(b"\0" * size + b"\n")
    turns = []
    while (entries := spool.feed.take(1 << 16)) is not None:
        turns.append(entries)
        spool.acknowledge()
    assert [len(each) for each in turns if each] == [1]
    assert spool.feed.acked.bytes == spool.bytes and spool.feed.delivered


@pytest.mark.parametrize("size", [10, BLOCK + 1, LONGEST, LONGEST + 5, 2 * LONGEST])
def test_garbage_without_an_end_in_a_rotated_file(spool: Spool, size: int) -> None:
    spool.write(2)
    spool.append(b"\xff" * size)
    assert spool.drain() == [0, 1]
    spool.rotate()
    spool.write(2)
    assert spool.drain() == [2, 3]
    assert spool.feed.at.bytes == spool.bytes and spool.feed.at.offset == len(entry(2)) * 2


def test_garbage_without_an_end_gets_one_later(spool: Spool) -> None:
    spool.append(b"\xff" * (LONGEST + 10))
    assert spool.drain() == []
    assert spool.feed.at.bytes == 0
    spool.append(b"\xff\n")
    spool.write(1)
    assert spool.drain() == [0]
    assert spool.feed.at.bytes == spool.bytes


def test_format_advances_like_take(spool: Spool) -> None:
    spool.write(1000, size=50)
    wire = b""
    messages = 0
    while (formed := spool.feed.format(4000)) is not None:
        wire += formed.wire
        messages += formed.messages
    assert messages == 1000
    assert [number(line.partition(b": ")[2]) for line in wire.splitlines()] == list(range(1000))
    assert spool.feed.at.lines == 1000 and spool.feed.at.bytes == spool.bytes


# --- rotation -------------------------------------------------------------------------------------

STEPS = 12


@pytest.mark.parametrize("step", range(STEPS))
@pytest.mark.parametrize("older", [0, 1, 3])
@pytest.mark.parametrize("read", ["nothing", "some", "all"])
def test_reading_between_the_steps_of_a_rotation(spool: Spool, step: int, older: int, read: str) -> None:
    for _ in range(older):
        spool.write(3)
        spool.rotate()
    spool.write(4)
    found: list[int] = []
    if read == "some":
        found += numbers(spool.feed.take(1) or [])
    elif read == "all":
        found += spool.drain()
    for done, _ in enumerate(spool.rotation()):
        if done == step:
            found += spool.drain()
    spool.write(2)
    found += spool.drain()
    assert found == list(range(spool.written))
    assert spool.feed.at.bytes == spool.bytes and spool.feed.at.lines == spool.written


@pytest.mark.parametrize("step", range(STEPS))
@pytest.mark.parametrize("older", [0, 2])
def test_one_entry_at_each_step_of_a_rotation(spool: Spool, step: int, older: int) -> None:
    """The process starts with an empty cursor in the middle of a rotation."""
    for _ in range(older):
        spool.write(2)
        spool.rotate()
    spool.write(2)
    found: list[int] = []
    for done, _ in enumerate(spool.rotation()):
        if done >= step:
            found += numbers(spool.feed.take(1) or [])
    spool.write(1)
    found += spool.drain()
    assert found == list(range(spool.written))


class Interleaved:
    """Advances a rotation by one step before the call number `at` of os.stat or os.open that a feed
    makes, and by another one before each of the following `more` calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, spool: Spool, at: int, more: int) -> None:
        self.steps = spool.rotation()
        self.calls, self.at, self.more = 0, at, more
        self._inside = False
        for name in ("stat", "open"):
            self._wrap(monkeypatch, name, getattr(os, name))

    def _wrap(self, monkeypatch: pytest.MonkeyPatch, name: str, real: Callable[..., Any]) -> None:
        def call(path: Any, *arguments: Any, **more: Any) -> Any:
            if "spool.log" in str(path) and not self._inside:
                self.calls += 1
                if self.at <= self.calls <= self.at + self.more:
                    self._inside = True
                    next(self.steps, None)
                    self._inside = False
            return real(path, *arguments, **more)

        monkeypatch.setattr(feed_module.os, name, call)

    def finish(self) -> None:
        for _ in self.steps:
            pass


@pytest.mark.parametrize("at", range(1, 22))
@pytest.mark.parametrize("more", [0, 1, 9])
@pytest.mark.parametrize("opened", [True, False])
def test_a_rotation_in_the_middle_of_a_read(
    spool: Spool, monkeypatch: pytest.MonkeyPatch, at: int, more: int, opened: bool
) -> None:
    """Renames between the feed's own system calls."""
    for _ in range(2):
        spool.write(2)
        spool.rotate()
    spool.write(2)
    found = numbers(spool.feed.take(1) or []) if opened else []
    with monkeypatch.context() as patched:
        rotation = Interleaved(patched, spool, at, more)
        while (entries := spool.feed.take(1)) is not None:
            found += numbers(entries)
        found += spool.drain()
    rotation.finish()
    spool.write(3)
    found += spool.drain()
    assert found == list(range(spool.written))


@pytest.mark.parametrize("at", range(1, 12))
def test_a_new_process_in_the_middle_of_a_rotation(spool: Spool, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    for _ in range(2):
        spool.write(2)
        spool.rotate()
    spool.write(2)
    found = numbers(spool.feed.take(1) or []) + numbers(spool.feed.take(1) or [])
    spool.acknowledge()
    spool.reopen()
    with monkeypatch.context() as patched:
        rotation = Interleaved(patched, spool, at, 1)
        found += spool.drain()
    rotation.finish()
    spool.write(3)
    found += spool.drain()
    assert found == list(range(spool.written))


def test_two_rotations_between_two_reads(spool: Spool) -> None:
    spool.write(2)
    found = numbers(spool.feed.take(1) or [])
    spool.write(2)
    spool.rotate()
    spool.write(2)
    spool.rotate()
    spool.write(2)
    found += spool.drain()
    assert found == list(range(8))
    assert spool.feed.at.bytes == spool.bytes


def test_lines_written_between_the_last_read_and_the_rotation(spool: Spool) -> None:
    spool.write(2)
    assert spool.drain() == [0, 1]
    spool.write(2)
    spool.rotate()
    spool.write(2)
    assert spool.drain() == [2, 3, 4, 5]


def test_an_empty_new_file_is_delivered(spool: Spool) -> None:
    """After a rotation the position is in another file, with as many bytes before it."""
    spool.write(2)
    spool.drain()
    spool.acknowledge()
    spool.rotate()
    assert spool.drain() == []
    assert spool.feed.delivered


def test_compressed_files_are_not_read(spool: Spool) -> None:
    spool.write(2)
    spool.drain()
    spool.acknowledge()
    spool.rotate()
    os.rename(f"{spool.live}.1", f"{spool.live}.1.gz")
    spool.write(2)
    assert spool.drain() == [2, 3]


# --- files that are gone, truncated or other ones -------------------------------------------------


def test_files_that_were_removed_before_they_were_read(lossy: Spool) -> None:
    lossy.write(3)
    assert lossy.drain() == [0, 1, 2]
    lossy.acknowledge()
    size = lossy.bytes
    for _ in range(3):
        lossy.write(2)
        lossy.rotate(max_file=2)
    lossy.write(1)
    lossy.feed.close()
    lossy.feed = lossy.open()
    lossy.feed.save(cursor.Cursor(1, size, size, 3))  # the inode of a removed file
    lossy.feed.close()
    lossy.feed = lossy.open()
    lossy.feed.written = lossy.bytes
    entries = lossy.feed.take(1 << 16)
    assert entries is not None
    assert entries[0].text.startswith(b"about 4 lines of this container were lost before this one")
    assert lossy.drain() == [7, 8, 9]
    assert lossy.feed.at.bytes == lossy.bytes and lossy.owner.losses == [4]
    assert lossy.feed.dropped_lines == 0, "not acknowledged yet"
    lossy.acknowledge()
    assert lossy.feed.dropped_lines == 4 and lossy.feed.delivered


def begins(spool: Spool) -> int:
    """Bytes of the spool before its live file, as the monitor counts them after a truncation."""
    return len(entry(0)) * 3


@pytest.fixture
def truncated(spool: Spool) -> Spool:
    """A file of three lines, and one of four that are read."""
    spool.write(3)
    spool.rotate()
    spool.write(4)
    spool.drain()
    return spool


@pytest.mark.parametrize("size", [0, 1, 2])
@pytest.mark.parametrize("acked", ["nothing", "the older file", "all"])
def test_truncated_by_an_operator(truncated: Spool, size: int, acked: str) -> None:
    """Everything that the file has then is new. Bytes are counted as the monitor does."""
    spool = truncated
    mark = spool.feed.mark()
    if acked == "all":
        spool.acknowledge()
    elif acked == "the older file":
        _, state = mark
        spool.feed.acknowledge(Position(os.stat(f"{spool.live}.1").st_ino, begins(spool), begins(spool), 3), state)
    os.truncate(spool.live, size * len(entry(3)))
    spool.write(1)
    assert spool.drain() == [*range(3, 3 + size), 7]
    assert spool.feed.at.bytes == begins(spool) + spool.live.stat().st_size
    spool.feed.acknowledge(*mark)  # of what was sent before, which is void
    assert spool.feed.acked.bytes in (0, begins(spool))
    spool.acknowledge()
    assert spool.feed.acked == spool.feed.at and spool.feed.delivered


@pytest.mark.parametrize("size", ["empty", "smaller", "larger"])
def test_truncated_while_no_process_reads(truncated: Spool, size: str) -> None:
    spool = truncated
    spool.acknowledge()
    spool.feed.save(spool.feed.position())
    spool.feed.close()
    os.truncate(spool.live, 0)
    count = {"empty": 0, "smaller": 2, "larger": 40}[size]
    spool.write(count, size=30)
    spool.feed = spool.open()
    assert spool.drain() == list(range(7, 7 + count))
    assert spool.feed.at.bytes == begins(spool) + spool.live.stat().st_size
    assert spool.feed.acked.bytes == begins(spool)


def test_an_unreadable_spool_is_no_failure_of_the_target(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    spool.write(2)

    def fail(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(feed_module.os, "pread", fail)
        assert spool.feed.take(1 << 16) is None
        assert spool.feed.broken and not spool.feed.drained and not spool.feed.delivered
    assert spool.drain() == [0, 1]
    assert not spool.feed.broken


def test_a_directory_that_is_gone(spool: Spool) -> None:
    spool.write(1)
    spool.drain()
    for path in spool.directory.iterdir():
        path.unlink()
    spool.directory.rmdir()
    assert spool.feed.take(1) is None


# --- positions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("acked", range(8))
def test_rollback_returns_to_each_mark(spool: Spool, acked: int) -> None:
    marks = [spool.feed.mark()]
    for index in range(7):
        spool.write(2)
        if index % 3 == 2:
            spool.rotate()
        assert spool.drain() == [2 * index, 2 * index + 1]
        marks.append(spool.feed.mark())
    spool.feed.acknowledge(*marks[acked])
    assert spool.feed.in_flight == (acked < 7)
    spool.feed.rollback()
    assert not spool.feed.in_flight
    assert spool.drain() == list(range(2 * acked, 14))


def test_rollback_to_a_given_mark(spool: Spool) -> None:
    spool.write(1)
    spool.drain()
    spool.acknowledge()
    spool.write(1)
    spool.drain()
    mark = spool.feed.mark()
    spool.write(1)
    spool.drain()
    spool.feed.rollback(mark)
    assert spool.drain() == [2]


@pytest.mark.parametrize("acked", range(8))
def test_a_new_process_goes_on_at_the_cursor(spool: Spool, acked: int) -> None:
    marks = [spool.feed.mark()]
    for index in range(7):
        spool.write(2)
        if index % 3 == 2:
            spool.rotate()
        spool.drain()
        marks.append(spool.feed.mark())
    spool.feed.acknowledge(*marks[acked])
    spool.reopen()
    assert spool.feed.acked == marks[acked][0]
    assert spool.drain() == list(range(2 * acked, 14))


def test_an_older_acknowledgement_changes_nothing(spool: Spool) -> None:
    spool.write(2)
    spool.feed.take(1)
    first = spool.feed.mark()
    spool.feed.take(1)
    spool.acknowledge()
    acked = spool.feed.acked
    spool.feed.acknowledge(*first)
    assert spool.feed.acked == acked and len(spool.owner.acks) == 1


@pytest.mark.parametrize("damage", ["short", "long", "sum", "magic", "empty"])
def test_a_damaged_cursor_begins_again(spool: Spool, damage: str) -> None:
    spool.write(2)
    spool.drain()
    spool.acknowledge()
    spool.feed.save(spool.feed.position())
    spool.feed.close()
    path = spool.directory / "cursor"
    data = path.read_bytes()
    assert len(data) == cursor.SIZE == 64
    damaged = {
        "short": data[:-1],
        "long": data,
        "sum": data[:-1] + bytes([data[-1] ^ 1]),
        "magic": b"x" + data[1:],
        "empty": b"",
    }
    path.write_bytes(damaged[damage])
    spool.feed = spool.open()
    assert spool.drain() == ([] if damage == "long" else [0, 1])


@pytest.mark.parametrize("seed", range(60))
def test_any_sequence(tmp_path: Path, seed: int) -> None:
    """What is read next is always the line of the position's number."""
    chance = random.Random(seed)
    spool = Spool(tmp_path / "any")
    try:
        marks = [spool.feed.mark()]
        for _ in range(150):
            match chance.randrange(8):
                case 0 | 1:
                    spool.write(chance.randrange(1, 6), size=chance.choice([0, 0, 0, 300, BLOCK]))
                case 2:
                    spool.rotate(max_file=1000)
                case 3 | 4:
                    at = spool.feed.at.lines
                    for each in numbers(spool.feed.take(chance.choice([1, 500, 1 << 20])) or []):
                        assert each == at
                        at += 1
                    assert spool.feed.at.lines == at
                    marks.append(spool.feed.mark())
                case 5:
                    spool.feed.acknowledge(*chance.choice(marks))
                case 6:
                    spool.feed.rollback()
                    marks = [spool.feed.mark()]
                case 7:
                    spool.reopen()
                    marks = [spool.feed.mark()]
            assert spool.feed.acked.bytes <= spool.feed.at.bytes <= spool.bytes
        at = spool.feed.at.lines
        assert spool.drain() == list(range(at, spool.written))
        assert spool.feed.at.bytes == spool.bytes
    finally:
        spool.feed.close()


# --- parts of long lines --------------------------------------------------------------------------


def test_parts_have_the_same_ids_when_they_are_sent_again(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "parts", target=Fluentd(port=1))
    part = 16 << 10
    spool.append(entry(0, size=part, newline=False))
    spool.feed.format(1)
    spool.acknowledge()
    spool.append(entry(1, size=part, newline=False) + entry(2))
    first = spool.feed.format(1 << 20)
    spool.feed.rollback()
    second = spool.feed.format(1 << 20)
    assert first is not None and second is not None and first.wire == second.wire
    assert b"partial_ordinal\xa12" in second.wire and b"partial_ordinal\xa13" in second.wire
    spool.feed.close()


def test_another_document_at_the_next_start(spool: Spool) -> None:
    spool.write(2)
    spool.drain()
    spool.feed.change(delivery(tag="other"))
    spool.feed.rollback()
    formed = spool.feed.format(1 << 16)
    assert formed is not None and formed.wire.count(b" other[0]: line") == 2


# --- lines that are lost --------------------------------------------------------------------------


def notice(feed: Feed) -> bytes:
    entries = feed.take(1 << 16)
    assert entries is not None and len(entries) == 1 and entries[0].stream == 2
    return entries[0].text


@pytest.mark.parametrize("size", [0, 200, 3000, BLOCK])
def test_what_exceeds_the_quota_is_skipped(tmp_path: Path, size: int) -> None:
    quota = 10 * max(size, 100)
    spool = Spool(tmp_path / "lag", blocking=False, quota=quota)
    spool.write(100, size=size)
    text = notice(spool.feed)
    skipped = spool.feed.at.lines
    assert text == b"%d lines of this container were lost before this one: its target is too slow" % skipped
    assert spool.drain() == list(range(skipped, 100))
    length = len(entry(99, size=size))
    assert abs((100 - skipped) * length - quota * 3 // 4) <= length
    assert spool.owner.losses == [skipped]
    assert spool.feed.at.bytes == spool.bytes
    spool.feed.close()


def test_many_blocks_are_skipped(tmp_path: Path) -> None:
    """Blocks that do not end with a line are skipped without growing."""
    spool = Spool(tmp_path / "lag", blocking=False, quota=100_000)
    spool.write(30_000, size=300)
    notice(spool.feed)
    skipped = spool.feed.at.lines
    assert spool.drain() == list(range(skipped, 30_000))
    assert 200 <= 30_000 - skipped <= 250
    assert spool.feed.dropped_bytes + 0 == spool.feed.acked.bytes
    spool.feed.close()


def test_skipping_over_rotated_files(lossy: Spool) -> None:
    for _ in range(5):
        lossy.write(50)
        lossy.rotate()
    lossy.write(50)
    notice(lossy.feed)
    skipped = lossy.feed.at.lines
    assert lossy.drain() == list(range(skipped, 300))
    assert lossy.feed.at.bytes == lossy.bytes


def test_blocking_mode_never_skips(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "lag", blocking=True, quota=1000)
    spool.write(100)
    assert spool.drain() == list(range(100))
    spool.feed.close()


def test_limit_lag_skips_while_the_target_is_away(lossy: Spool) -> None:
    lossy.write(1000)
    lossy.feed.limit_lag()
    first = lossy.feed.at.lines
    assert first > 0 and lossy.feed.acked.lines == first
    lossy.write(1000)
    lossy.feed.limit_lag()
    second = lossy.feed.at.lines
    assert notice(lossy.feed).startswith(b"%d lines" % second), "one notice for both"
    assert lossy.drain() == list(range(second, 2000))
    lossy.acknowledge()
    assert lossy.feed.dropped_lines == second and sum(lossy.owner.losses) == second


def test_what_is_skipped_twice_is_counted_once(lossy: Spool) -> None:
    """The skipped lines follow some that are on the way. When these are read again, so are the
    skipped ones."""
    lossy.write(10)
    lossy.drain()
    lossy.destination.sent(1, lossy.feed)  # on the way
    lossy.write(1000)
    notice(lossy.feed)
    assert lossy.feed.acked.lines == 0
    lossy.destination._marks.clear()
    lossy.destination._marked.clear()
    lossy.feed.rollback()
    text = notice(lossy.feed)
    skipped = lossy.feed.at.lines
    assert text.startswith(b"%d lines" % skipped)
    assert lossy.drain() == list(range(skipped, 1010))
    lossy.acknowledge()
    assert lossy.feed.dropped_lines == skipped
    lossy.reopen()
    assert lossy.feed.dropped_lines == skipped


def test_a_notice_that_was_not_acknowledged_is_sent_again(lossy: Spool) -> None:
    lossy.write(1000)
    text = notice(lossy.feed)
    assert lossy.feed.in_flight
    lossy.feed.rollback()
    assert notice(lossy.feed) == text
    lossy.acknowledge()
    lossy.feed.rollback()
    entries = lossy.feed.take(1)
    assert entries is not None and number(entries[0].text) == lossy.feed.at.lines - 1


def test_a_spool_with_an_untold_loss_is_not_delivered(lossy: Spool) -> None:
    lossy.write(1000)
    lossy.feed.limit_lag()
    lossy.feed.drained = True
    assert not lossy.feed.delivered


# --- what waits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("acked", [0, 3, 6, 9])
def test_waiting(spool: Spool, acked: int) -> None:
    for _ in range(3):
        spool.write(3)
        if spool.written < 9:
            spool.rotate()
    while spool.feed.at.lines < acked:
        spool.feed.take(1)
    spool.acknowledge()
    assert spool.feed.waiting(spool.feed.acked) == ((9 - acked) * len(entry(0)), 9 - acked)
    late = spool.feed.waiting(spool.feed.acked, deadline=0.0)
    assert late == ((9 - acked) * len(entry(0)), 0 if acked == 9 else None)


def test_close_is_idempotent_and_closes_all(spool: Spool) -> None:
    gc.collect()  # frees leftovers of earlier tests
    before = set(os.listdir("/proc/self/fd"))
    other = spool.open()
    spool.write(1)
    other.take(1)
    other.close()
    other.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_idle_keeps_no_file_open(spool: Spool) -> None:
    spool.write(1)
    spool.drain()
    gc.collect()  # frees leftovers of earlier tests
    before = len(os.listdir("/proc/self/fd"))
    spool.feed.slot = 1
    spool.feed.idle()
    assert len(os.listdir("/proc/self/fd")) == before
    spool.feed.slot = -1
    spool.feed.idle()
    assert len(os.listdir("/proc/self/fd")) == before - 1
    spool.write(1)
    assert spool.drain() == [1]
