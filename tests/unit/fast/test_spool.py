"""Spools and logs with packed files: what is not acknowledged stays, in order and readable, through
rotation, packing and kills at any time.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
import traceback
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine._fast import spool as spool_module
from engine._fast.board import Board
from engine._fast.logreader import LogReader
from engine._fast.packed import label, pack
from engine._fast.spool import PackedLog, Spool
from tests.unit.fast.jsonlogs import (  # noqa: F401 (_descriptors: a fixture)
    SECOND,
    _descriptors,
    directory,
    entry,
    everything,
    files,
    number,
    original,
    pack_file,
    pack_foreign,
    parsed,
    read,
)

Position = tuple[int, int, int, int]
START = (0, 0, 0, 0)


def line(index: int, length: int = 0) -> bytes:
    return b"%d %s\n" % (index, b"." * length)


def inode_of(file: Path) -> int:
    """Of a file, or of a packed one's original."""
    if file.suffix == ".gz":
        with file.open("rb") as opened:
            return (label(opened.fileno()) or (0,))[0]
    return file.stat().st_ino


def prepared(file: Path) -> Path:
    """A packed copy of a rotated file, as the daemon makes it before the monitor renames it."""
    fresh = file.parent / "fresh"
    with file.open("rb") as source, fresh.open("wb") as target:
        pack(source.fileno(), target.fileno())
    return fresh


def contiguous(path: Path) -> None:
    kept = files(path)
    assert [number(file) for file in kept[:-1]] == list(range(len(kept) - 1, 0, -1)), kept


class Shipper:
    """A plain model: it reads the files from its position on, and acknowledges what it has read."""

    def __init__(self, path: Path, position: Position) -> None:
        self.path = path
        self.position = position

    def rest(self, written: int) -> list[tuple[bytes, Position]]:
        """Each entry after the position, and the position after it. The rules are in the docstring
        of `Spool`. `written`: as the board has it.
        """
        inode, offset, at, lines = self.position
        kept = files(self.path)
        known = [inode_of(file) for file in kept]
        if inode in known:
            index = len(known) - 1 - known[::-1].index(inode)
            if offset > len(original(kept[index])):
                at, offset = at - offset, 0
        else:
            index = max((index + 1 for index, file in enumerate(kept) if file.suffix == ".gz"), default=0)
            offset, at = 0, written - sum(file.stat().st_size for file in kept[index:])
        found = []
        for file in kept[index:]:
            for text in original(file)[offset:].splitlines(keepends=True):
                offset, at, lines = offset + len(text), at + len(text), lines + 1
                found.append((json.loads(text)["log"].encode(), (inode_of(file), offset, at, lines)))
            offset = 0
        return found


class Machine:
    """A spool with its board and its shipper, any of which may be killed."""

    def __init__(self, place: Path, max_size: int, max_file: int, quota: int, blocking: bool) -> None:
        self.place = os.fsencode(place / "shipper")
        self.path = place / "spool.log"
        self.options = max_size, max_file
        self.quota, self.blocking = quota, blocking
        self.cursor: Position = START
        self.written: list[bytes] = []
        self.shipper = Shipper(self.path, START)
        self.open()

    def open(self) -> None:
        self.board = Board(self.place, monitor=True)
        self.spool = Spool(os.fsencode(self.path), *self.options)
        acked = max(self.cursor, self.board.left().get("c", START), key=lambda each: each[2])
        self.spool.join(self.board, "c", acked, self.quota, self.blocking)
        assert self.board.slot(self.spool.slot)[:2] == ("c", True)

    def rest(self) -> list[tuple[bytes, Position]]:
        return self.shipper.rest(self.board.slot(self.spool.slot)[2])

    def write(self, count: int, length: int) -> None:
        lines = [line(len(self.written) + index, length) for index in range(count)]
        self.written += lines
        self.spool.write(1, b"".join(lines))
        assert self.spool.full == (self.blocking and self.spool.unacked > self.quota)

    def acknowledge(self, share: int) -> None:
        """That share of a tenth of what is left."""
        rest = self.rest()
        count = len(rest) * share // 10
        if count:
            self.shipper.position = rest[count - 1][1]
        if self.shipper.position != START:
            assert self.board.ack(self.spool.slot, "c", *self.shipper.position)
        if self.spool.waits:
            full = self.spool.full
            self.spool.look()
            assert self.spool.full == (full and self.spool.unacked >= max(1, self.quota - self.quota // 4))

    def store(self) -> None:
        """The position on disk."""
        self.cursor = self.shipper.position

    def kill(self) -> None:
        """The monitor ends without a word, and so does the shipper. Each next one begins with what
        board and disk have.
        """
        self.spool = None  # type: ignore[assignment]
        self.open()
        last = self.board.last("c")
        assert last is not None
        self.shipper = Shipper(self.path, last)

    def pack(self, choice: int) -> None:
        rotated = [file for file in files(self.path)[:-1] if file.suffix != ".gz"]
        if rotated:
            file = rotated[choice % len(rotated)]
            before = original(file)
            left = {position[0] for _, position in self.rest()}
            wanted = self.board.last("c") == self.shipper.position and inode_of(file) not in left
            done = self.spool.replace(file.stat().st_ino, os.fsencode(prepared(file)))
            assert done == wanted or not self.blocking
            assert original(file.with_name(file.name + ".gz") if done else file) == before
            assert not (self.path.parent / "fresh").exists() and file.exists() != done

    def check(self) -> None:
        contiguous(self.path)
        kept = files(self.path)
        rest = self.rest()
        left = [text for text, _ in rest]
        assert left == self.written[len(self.written) - len(left) :], "in order, up to the end"
        if self.blocking:
            assert self.shipper.position[3] == len(self.written) - len(left), "none is missing"
        written = self.board.slot(self.spool.slot)[2]
        if rest:
            assert rest[-1][1][2] == written
        if self.blocking and self.board.last("c") == self.shipper.position:
            assert self.spool.unacked == written - self.shipper.position[2]
        assert self.spool.position() == (inode_of(path := kept[-1]), path.stat().st_size)
        assert len({inode_of(file) for file in kept}) == len(kept)
        lines = [item[2].encode() for item in parsed(b"".join(original(file) for file in kept))]
        assert lines == self.written[len(self.written) - len(lines) :]
        assert read(self.path) == b"".join(lines)
        assert read(self.path, tail=7) == b"".join(lines[-7:])
        sizes = [len(original(file)) for file in kept]
        max_size, max_file = self.options
        if len(kept) > max_file:
            # the oldest one must be needed
            behind = sum(sizes[1:])
            oldest = inode_of(kept[0]) in {position[0] for _, position in rest}
            stale = self.board.last("c") != self.shipper.position
            just = self.spool.waits  # it is removed at the next look
            assert oldest or stale or just
            if not self.blocking:
                assert behind <= self.quota + max_size + 300
                assert len(kept) <= max_file + 2 + self.quota / (max_size / 2)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(1, 30), st.integers(0, 120)),
        st.tuples(st.just("acknowledge"), st.integers(0, 10)),
        st.tuples(st.just("store")),
        st.tuples(st.just("kill")),
        st.tuples(st.just("pack"), st.integers(0, 50)),
    ),
    max_size=40,
)


@settings(max_examples=150)
@given(st.integers(300, 1500), st.integers(1, 4), st.integers(500, 5000), st.booleans(), STEPS)
def test_any_life_of_a_spool(max_size: int, max_file: int, quota: int, blocking: bool, steps: list[tuple]) -> None:  # type: ignore[type-arg]
    with directory() as place:
        machine = Machine(place, max_size, max_file, quota, blocking)
        for name, *arguments in steps:
            if name == "write" and machine.spool.full:
                continue
            getattr(machine, name)(*arguments)
            machine.check()
        machine.acknowledge(10)
        machine.check()
        if blocking:
            assert not machine.spool.full and machine.spool.unacked == 0
        machine.spool.close()


def life(place: Path, first: int, pipe: int, seed: int) -> None:
    """A monitor, a shipper and a daemon that packs, in one process, until it is killed. Each number
    is written to the pipe after its line.
    """
    choose = random.Random(seed)
    machine = Machine(place, 400, 2, 2000, True)
    last = machine.board.last("c")
    assert last is not None
    machine.shipper = Shipper(machine.path, last)
    index = first
    while True:
        if not machine.spool.full:
            machine.spool.write(1, line(index, choose.randrange(60)))
            os.write(pipe, b"%d\n" % index)
            index += 1
        if choose.random() < 0.2:
            machine.acknowledge(choose.randrange(11))
        if choose.random() < 0.1:
            machine.pack(choose.randrange(9))


def test_kills_within_anything(tmp_path: Path) -> None:
    """SIGKILL at any system call. What was not acknowledged is there, in order, each time."""
    path = tmp_path / "spool.log"
    expected = 0
    choose = random.Random(5)
    for turn in range(60):
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                life(tmp_path, expected, theirs, turn)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(theirs)
        time.sleep(choose.random() / 20)
        os.kill(pid, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
        with os.fdopen(ours, "rb") as file:
            told = [int(text) for text in file.read().split(b"\n")[:-1]]
        (tmp_path / "fresh").unlink(missing_ok=True)
        machine = Machine(tmp_path, 400, 2, 2000, True)
        last = machine.board.last("c")
        assert last is not None
        machine.shipper.position = last
        numbers = [int(text.split()[0]) for text, _ in machine.rest()]
        machine.spool.close()
        if told:
            expected = told[-1] + 1
        if numbers:  # a line may have been written and not told
            expected = max(expected, numbers[-1] + 1)
        assert numbers == list(range(expected - len(numbers), expected))
        assert expected - len(numbers) == last[3], "every line before them was acknowledged"
        contiguous_but_for_one_gap(path)
        assert [int(text.split()[0]) for text in read(path).splitlines()][-len(numbers) :] == numbers or not numbers
    assert expected > 100


def contiguous_but_for_one_gap(path: Path) -> None:
    numbers = [number(file) for file in files(path)[:-1]]
    assert len(numbers) == len(set(numbers)) and max(numbers, default=0) <= len(numbers) + 1, numbers


# --- single rules ---------------------------------------------------------------------------------


def spool(place: Path, *, max_size: int = 600, max_file: int = 2, acked: Position = START, **options: object) -> Spool:
    made = Spool(os.fsencode(place / "spool.log"), max_size, max_file)
    board = Board(os.fsencode(place / "shipper"), monitor=True)
    quota = options.pop("quota", 2000)
    made.join(board, "c", acked, quota, **options)  # type: ignore[arg-type]
    return made


def board_of(place: Path) -> Board:
    return Board(os.fsencode(place / "shipper"), monitor=False)


def test_a_blocking_spool_is_full_until_three_quarters(tmp_path: Path) -> None:
    made = spool(tmp_path, quota=1000)
    shipper = board_of(tmp_path)
    sizes = []
    while not made.full:
        made.write(1, line(len(sizes)))
        sizes.append(made.unacked)
    assert sizes[-2] <= 1000 < sizes[-1] and made.waits
    assert shipper.slot(0) == ("c", True, sizes[-1], len(sizes))
    assert made.look() and made.full
    shipper.ack(0, "c", 1, 1, sizes[-1] - 750, 1)
    assert made.look() and made.full
    shipper.ack(0, "c", 1, 1, sizes[-1] - 749, 1)
    made.look()
    assert not made.full
    made.write(2, b"more\n" * 100)
    assert made.full, "what is read is written nevertheless"
    made.close()
    assert shipper.slot(0)[1] is False and not made.look() and not made.waits


def test_files_stay_until_they_are_acknowledged(tmp_path: Path) -> None:
    made = spool(tmp_path, max_file=2, quota=1 << 20)
    path, shipper = tmp_path / "spool.log", board_of(tmp_path)
    for index in range(100):
        made.write(1, line(index))
    count = len(files(path))
    assert count > 10 and made.waits and not made.full
    third = sum(file.stat().st_size for file in files(path)[:3])
    shipper.ack(0, "c", 1, 1, third - 1, 1)
    assert made.look() and len(files(path)) == count - 2
    shipper.ack(0, "c", 1, 1, third, 1)
    assert made.look() and len(files(path)) == count - 3
    contiguous(path)
    shipper.ack(0, "c", 1, 1, made.unacked + third, 1)
    assert not made.look() and len(files(path)) == 2
    made.close()


def test_a_spool_that_does_not_block_forgets_what_is_far_behind(tmp_path: Path) -> None:
    made = spool(tmp_path, max_file=2, quota=2500, blocking=False)
    path = tmp_path / "spool.log"
    for index in range(500):
        made.write(1, line(index))
        assert not made.full
        sizes = [file.stat().st_size for file in files(path)]
        assert len(sizes) <= 7 and sum(sizes[1:]) <= 2500 + 600
    assert sum(sizes) > 2500
    assert board_of(tmp_path).slot(0)[2:] == (made.unacked, 500)
    made.close()


def test_more_at_once_than_all_files_hold(tmp_path: Path) -> None:
    """A json-file log does not write what it would remove within the call; a spool writes it."""
    made = spool(tmp_path, max_size=300, max_file=1, quota=100)
    made.write(1, b"".join(line(index) for index in range(100)))
    assert made.full
    made.close()
    assert read(tmp_path / "spool.log") == b"".join(line(index) for index in range(100))


@pytest.mark.parametrize("packing", [False, True])
def test_an_unknown_position(tmp_path: Path, packing: bool) -> None:
    """Everything is unacknowledged, except packed files."""
    path = tmp_path / "spool.log"
    made = spool(tmp_path, max_file=9, quota=1 << 20)
    for index in range(30):
        made.write(1, line(index))
    made.close()
    if packing:
        for file in files(path)[:2]:
            pack_file(file)
    sizes = [file.stat().st_size for file in files(path)[2 if packing else 0 :]]
    again = spool(tmp_path, max_file=9, acked=(1 << 60, 5, 7000, 9))
    assert again.unacked == sum(sizes)
    assert board_of(tmp_path).slot(again.slot)[2] == 7000 + sum(sizes)
    again.close()


def test_an_operator_truncates_a_spool(tmp_path: Path) -> None:
    """What was not delivered is lost, and is not waited for."""
    made = spool(tmp_path, max_size=100_000, quota=3000)
    path, shipper = tmp_path / "spool.log", board_of(tmp_path)
    while not made.full:
        made.write(1, line(7, 50))
    inode, size = made.position()
    shipper.ack(0, "c", inode, 1000, 1000, 1)
    assert made.look() == (made.unacked >= 2250)
    while not made.full:
        made.write(1, line(7, 50))
    os.truncate(path, 0)
    made.look()
    assert not made.full and made.unacked == 0
    shipper.ack(0, "c", inode, 0, 0, 1)
    made.write(1, line(8))
    assert made.unacked == path.stat().st_size == shipper.slot(0)[2]
    made.close()
    # the shipper was dead
    again = spool(tmp_path, acked=(inode, size, size, 1))
    assert again.unacked == path.stat().st_size == board_of(tmp_path).slot(again.slot)[2]
    again.close()


def test_a_spool_moves_to_another_board(tmp_path: Path) -> None:
    made = spool(tmp_path, acked=START, quota=500)
    made.write(1, line(1))
    inode, size = made.position()
    board_of(tmp_path).ack(0, "c", inode, 10, 10, 0)
    second = tmp_path / "second"
    made.move(Board(os.fsencode(second / "shipper"), monitor=True))
    assert board_of(second).slot(0) == ("c", True, size, 0) and made.unacked == size - 10
    made.write(1, line(2))
    assert board_of(second).slot(0)[2:] == (made.position()[1], 1)
    made.close()


def test_entries_that_could_not_be_written_are_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    made = spool(tmp_path, max_size=0)
    made.write(1, line(1))
    size = made.position()[1]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size * 2 + 3, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            made.write(1, line(2) + line(3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert board_of(tmp_path).slot(0) == ("c", True, made.position()[1], 2)
    made.close()


# --- packed files ---------------------------------------------------------------------------------


def test_rotation_moves_packed_files_and_counts_them(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    log = PackedLog(os.fsencode(path), 600, 4)
    assert log.turns == 0
    log.compress = True
    written, turns = [], 0
    for index in range(300):
        written.append(line(index))
        log.write(1, written[-1])
        if log.turns > turns and index % 3:
            turns = log.turns
            file = path.with_name("c.log.1")
            assert log.replace(file.stat().st_ino, os.fsencode(prepared(file)))
        contiguous(path)
        kept = files(path)
        assert len(kept) <= 4 and len({inode_of(each) for each in kept}) == len(kept)
    assert {file.suffix for file in files(path)} > {".gz"} and log.turns > 20
    log.close()
    data = read(path)
    assert b"".join(written).endswith(data) and data


def test_a_file_that_cannot_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "spool.log"
    made = spool(tmp_path, max_file=9, quota=1 << 20)
    for index in range(30):
        made.write(1, line(index))
    file = path.with_name("spool.log.2")
    inode, fresh = file.stat().st_ino, tmp_path / "fresh"
    assert not made.replace(inode, os.fsencode(prepared(file))) and not fresh.exists(), "not acknowledged"
    board_of(tmp_path).ack(0, "c", 1, 1, made.unacked, 30)
    assert not made.replace(1 << 60, os.fsencode(prepared(file))) and not fresh.exists(), "unknown"
    assert not made.replace(path.stat().st_ino, os.fsencode(prepared(file))), "the live one"
    other = prepared(path.with_name("spool.log.1"))
    assert not made.replace(inode, os.fsencode(other)), "another one's content"
    fresh.write_bytes(file.read_bytes())
    with pytest.raises(FileNotFoundError):
        made.replace(inode, os.fsencode(tmp_path / "missing"))
    assert not made.replace(inode, os.fsencode(fresh)), "not packed"
    assert made.replace(inode, os.fsencode(prepared(file)))
    assert not made.replace(inode, os.fsencode(prepared(path.with_name("spool.log.1")))), "packed already"
    made.close()
    assert read(path) == b"".join(line(index) for index in range(30))


def test_inode_numbers_that_are_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of the files that were just removed or packed. Later ones confuse no reader."""
    path = tmp_path / "c.log"
    log = PackedLog(os.fsencode(path), 300, 40)
    reader = LogReader(os.fsencode(path))
    repeated, got = 0, []
    for index in range(150):
        if index == 75:
            assert repeated == 0
            monkeypatch.setattr(spool_module, "GONE_TIME", 0)
        log.write(1, line(index))
        kept = files(path)
        if len(kept) > 1 and kept[-2].suffix != ".gz":
            assert log.replace(kept[-2].stat().st_ino, os.fsencode(prepared(kept[-2])))
        inodes = [inode_of(file) for file in files(path)]
        repeated += len(inodes) - len(set(inodes))
        if index % 10 == 0:
            got.append(reader.read(30))
        assert read(path) == b"".join(line(each) for each in range(index + 1))
        assert read(path, tail=9) == b"".join(line(each) for each in range(max(0, index - 8), index + 1))
    got.append(everything(reader))
    assert b"".join(got) == read(path)
    reader.close()
    log.close()
    if repeated == 0:
        pytest.skip("this file system does not use inode numbers again")


def test_a_live_file_that_has_the_number_of_a_removed_one(tmp_path: Path) -> None:
    """A monitor was killed within a rotation. The position on disk is of a file that is gone, and
    the next monitor's new file has got its number.
    """
    path = tmp_path / "spool.log"
    made = spool(tmp_path, max_file=9, quota=1 << 20)
    for index in range(30):
        made.write(1, line(index))
    made.close()
    for file in files(path):
        file.rename(path.with_name(f"spool.log.{number(file) + 1 if file != path else 1}"))
    rest = sum(file.stat().st_size for file in tmp_path.glob("spool.log*"))
    path.touch()
    again = spool(tmp_path, max_file=9, acked=(path.stat().st_ino, 500, 500, 9), quota=1 << 20)
    assert again.unacked == rest and path.stat().st_size == 0
    again.write(1, line(30))
    again.close()
    assert read(path) == b"".join(line(index) for index in range(31))


@pytest.mark.parametrize("state", ["gap", "twice", "new", "no live file"])
def test_a_kill_within_a_rotation(tmp_path: Path, state: str) -> None:
    path = tmp_path / "c.log"
    log = PackedLog(os.fsencode(path), 600, 5)
    for index in range(40):
        log.write(1, line(index))
    log.close()
    pack_file(path.with_name("c.log.4"))
    kept = path.with_name("kept")
    if state == "gap":
        path.with_name("c.log.4.gz").rename(path.with_name("c.log.5.gz"))
        path.with_name("c.log.3").rename(path.with_name("c.log.4"))
    elif state == "twice":
        os.link(path.with_name("c.log.3"), kept)
        pack_file(path.with_name("c.log.3"))
        kept.rename(path.with_name("c.log.3"))
    elif state == "new":
        path.with_name("c.log.new").write_bytes(b"half")
    else:
        path.with_name("c.log.1").rename(kept)
        for number_ in (2, 3):
            path.with_name(f"c.log.{number_}").rename(path.with_name(f"c.log.{number_ - 1}"))
        kept.rename(path.with_name("c.log.3"))  # any order
        before = path.with_name("c.log.3")
        before.rename(kept)
        path.with_name("c.log.2").rename(before)
        path.with_name("c.log.1").rename(path.with_name("c.log.2"))
        kept.rename(path.with_name("c.log.1"))
    whole = read(path)
    again = PackedLog(os.fsencode(path), 600, 5)
    assert read(path) == whole
    for index in range(40, 60):
        again.write(1, line(index))
        contiguous(path) if state != "gap" or index > 50 else None
        assert len(files(path)) <= 6
    contiguous(path)
    assert len(files(path)) == 5 and not path.with_name("c.log.new").exists()
    again.close()
    assert b"".join(line(index) for index in range(60)).endswith(read(path))


@pytest.mark.parametrize("packing", [pack_file, pack_foreign])
def test_time_goes_on_from_a_packed_file(tmp_path: Path, packing: object) -> None:
    path = tmp_path / "c.log"
    future = time.time_ns() + 2 * SECOND
    future -= future % 10 - 1
    file = tmp_path / "c.log.1"
    file.write_bytes(entry("old\n", future))
    packed = packing(file)  # type: ignore[operator]
    os.utime(packed, ns=(future, future))
    log = PackedLog(os.fsencode(path), 1000, 2)
    log.write(1, b"a\n")
    log.close()
    first, second = json.loads(original(packed)), json.loads(path.read_bytes())
    assert first["time"] < second["time"]


def test_a_chunk_of_a_dead_monitor_counts_packed_files(tmp_path: Path) -> None:
    """Entries that the log has are not written again, in whichever file they are."""
    path = tmp_path / "c.log"
    log = PackedLog(os.fsencode(path), 300, 50)
    log.write(1, line(0))
    position = log.position()
    chunk = b"".join(line(index) for index in range(1, 20))
    log.write(1, chunk)
    log.close()
    for file in files(path)[1:-2]:
        pack_file(file)
    again = PackedLog(os.fsencode(path), 300, 50)
    again.resume((b"", b""), 1, chunk + line(20), *position)
    again.close()
    assert read(path) == b"".join(line(index) for index in range(21))


def test_a_follower_of_a_spool(tmp_path: Path) -> None:
    """Rotation waits for it, and it reads packed files."""
    made = spool(tmp_path, max_size=600, max_file=2, quota=1 << 20)
    shipper = board_of(tmp_path)
    path = tmp_path / "spool.log"
    reader = LogReader(os.fsencode(path))
    made.follow(7, 0)
    got = []
    for index in range(200):
        made.write(1, line(index))
        if index % 5 == 0:
            shipper.ack(0, "c", 1, 1, made.unacked + shipper.slot(0)[2], 1)
            made.look()
            rotated = files(path)[:-1]
            if rotated and rotated[0].suffix != ".gz":
                made.replace(rotated[0].stat().st_ino, os.fsencode(prepared(rotated[0])))
            got.append(everything(reader))
            made.follow(7, reader.newest())
    made.unfollow(7)
    made.close()
    got.append(everything(reader))
    reader.close()
    assert b"".join(got) == b"".join(line(index) for index in range(200))


def test_rotation_that_fails_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "spool.log.new").mkdir()
    made = spool(tmp_path, max_size=300)
    for index in range(10):
        made.write(1, line(index))
    assert len(files(tmp_path / "spool.log")) == 1
    (tmp_path / "spool.log.new").rmdir()
    for index in range(10, 200):
        made.write(1, line(index))
    made.close()
    assert len(files(tmp_path / "spool.log")) > 5
    assert read(tmp_path / "spool.log") == b"".join(line(index) for index in range(200))
