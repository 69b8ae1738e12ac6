"""The memory that the monitor and the shipper share: nothing is overlooked, no position is another
container's, and no kill misleads the other side."""

from __future__ import annotations

import mmap
import os
import random
import select
import signal
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine._fast.board import Board
from tests.unit.fast.jsonlogs import _descriptors, directory  # noqa: F401 (_descriptors: a fixture)

NOTHING = (0, 0, 0, 0)
SLOTS_AT, SLOT, ACKS_AT, ACKED = 12288, 384, 256, 48


def both(path: Path) -> tuple[Board, Board]:
    place = os.fsencode(path / "shipper")
    return Board(place, monitor=True), Board(place, monitor=False)


def rung(board: Board) -> bool:
    return bool(select.select([board.bell], [], [], 0)[0])


def test_a_spool_from_its_opening_to_its_end(tmp_path: Path) -> None:
    monitor, shipper = both(tmp_path)
    assert (monitor.generation, shipper.generation) == (1, 1)
    assert (tmp_path / "shipper").stat().st_mode & 0o777 == 0o700
    number = monitor.open("one", (7, 10, 100, 3), 150)
    assert shipper.changed() == [number]
    assert shipper.slot(number) == ("one", True, 150, 0)
    assert (monitor.acked(number), monitor.unacked(number)) == (100, 50)
    monitor.wrote(number, 25, 2)
    monitor.wrote(number, 5, 1)
    assert shipper.changed() == [number] and shipper.changed() == []
    assert shipper.slot(number) == ("one", True, 180, 3)
    assert shipper.ack(number, "one", 8, 20, 170, 6)
    assert (monitor.acked(number), monitor.unacked(number)) == (170, 10)
    assert monitor.last("one") == (8, 20, 170, 6)
    assert shipper.ack(number, "one", 8, 0, 150, 5) and monitor.unacked(number) == 30, "it may go back"
    assert shipper.ack(number, "one", 8, 20, 170, 6) and monitor.unacked(number) == 10
    monitor.close(number)
    monitor.close(number)
    assert shipper.changed() == [number]
    assert shipper.slot(number) == ("one", False, 180, 3)
    assert shipper.ack(number, "one", 8, 30, 180, 6)
    assert monitor.last("one") == (8, 30, 180, 6)
    assert monitor.last("two") is None


def test_positions_outlive_the_monitor(tmp_path: Path) -> None:
    monitor, shipper = both(tmp_path)
    one, two, three = (monitor.open(name, (1, 2, 3, 4), 5) for name in ("one", "two", "three"))
    shipper.ack(one, "one", 5, 6, 7, 8)
    shipper.ack(two, "two", 5, 6, 70, 8)
    monitor.close(two)
    shipper.scans()
    again = Board(os.fsencode(tmp_path / "shipper"), monitor=True)
    assert again.left() == {"one": (5, 6, 7, 8), "two": (5, 6, 70, 8), "three": (1, 2, 3, 4)}
    assert shipper.generation == again.generation == 2
    assert [shipper.slot(number)[:2] for number in (one, two, three)] == [
        ("one", False),
        ("two", False),
        ("three", False),
    ]
    assert shipper.ack(one, "one", 6, 7, 8, 9), "until it is opened again"
    assert again.left()["one"] == (6, 7, 8, 9)
    number = again.open("one", again.left()["one"], 90)
    assert number != one and shipper.slot(one)[0] == "", "the earlier slot counts until the other one is complete"
    with pytest.raises(ValueError, match="has an open slot"):
        again.open("one", NOTHING, 0)
    assert again.last("one") == (6, 7, 8, 9) and "one" not in again.left()
    assert again.last("two") == (5, 6, 70, 8)
    assert shipper.slot(number) == ("one", True, 90, 0)
    third = Board(os.fsencode(tmp_path / "shipper"), monitor=True)
    assert third.left() == {"one": (6, 7, 8, 9), "two": (5, 6, 70, 8), "three": (1, 2, 3, 4)}


def test_slots_are_used_again_and_an_old_position_is_not_taken(tmp_path: Path) -> None:
    """The longest closed one first, so that the shipper sees the end of the others for a while."""
    monitor, shipper = both(tmp_path)
    numbers = [monitor.open(f"c{index}", NOTHING, 0) for index in range(1024)]
    assert numbers == list(range(1024))
    for number in (5, 2, 9):
        shipper.ack(number, f"c{number}", 1, 1, 1000, 1)
        monitor.close(number)
    assert [monitor.open(name, NOTHING, 0) for name in ("x", "y")] == [5, 2]
    assert monitor.acked(5) == 0 and monitor.last("c5") is None and monitor.last("c9") == (1, 1, 1000, 1)
    assert not shipper.ack(5, "c5", 1, 1, 2000, 1)
    assert shipper.ack(5, "x", 1, 1, 20, 1) and monitor.acked(5) == 20
    # a store that was prepared before the slot was opened again
    path = tmp_path / "shipper" / "board"
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        at = SLOTS_AT + 5 * SLOT + ACKS_AT
        kept = memory[at : at + 2 * ACKED]
        monitor.close(5)
        assert [monitor.open(f"z{index}", NOTHING, 7) for index in range(3)] == [9, 5, 1024]
        memory[at : at + 2 * ACKED] = kept
    assert monitor.last("z1") == NOTHING and monitor.unacked(5) == 7


def test_positions_of_an_earlier_monitor_are_kept_until_they_are_settled(tmp_path: Path) -> None:
    monitor, _ = both(tmp_path)
    for index in range(1200):
        monitor.open(f"c{index}", (1, 2, index, 4), index)
    again = Board(os.fsencode(tmp_path / "shipper"), monitor=True)
    assert [again.open(f"d{index}", NOTHING, 0) for index in range(3)] == [1200, 1201, 1202]
    again.close(1201)
    assert [again.open(f"e{index}", NOTHING, 0) for index in range(2)] == [1201, 1203]
    assert again.left() == {f"c{index}": (1, 2, index, 4) for index in range(1200)}
    again.settle()
    assert again.left() == {} and again.last("c0") == (1, 2, 0, 4)
    assert again.open("f", NOTHING, 0) == 0 and again.last("c0") is None and again.last("c1") == (1, 2, 1, 4)


def test_a_monitor_that_is_killed_within_an_opening(tmp_path: Path) -> None:
    """The position of the earlier opening counts."""
    monitor, shipper = both(tmp_path)
    place, path = os.fsencode(tmp_path / "shipper"), tmp_path / "shipper" / "board"
    monitor.open("one", (1, 2, 3, 4), 5)
    shipper.ack(0, "one", 6, 7, 8, 9)
    again = Board(place, monitor=True)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        before = memory[SLOTS_AT : SLOTS_AT + SLOT]
        assert again.open("one", (60, 70, 80, 90), 5) == 1
        memory[SLOTS_AT : SLOTS_AT + SLOT] = before  # not emptied yet
        assert Board(place, monitor=True).left() == {"one": (60, 70, 80, 90)}
        memory[SLOTS_AT : SLOTS_AT + SLOT] = before
        memory[SLOTS_AT + SLOT] |= 1  # not complete
        last = Board(place, monitor=True)
    assert last.left() == {"one": (6, 7, 8, 9)}
    assert last.open("two", NOTHING, 0) == 1 and last.open("one", (6, 7, 8, 9), 8) == 2


@settings(max_examples=60)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=6), st.integers(0, ACKED - 1), st.integers(0, 1))
def test_a_shipper_that_is_killed_within_a_store(steps: list[int], cut: int, extra: int) -> None:
    """The position before it stays known."""
    with directory() as place:
        monitor, shipper = both(place)
        number = monitor.open("one", (1, 0, 10, 0), 10)
        position = (1, 0, 10, 0)
        path = place / "shipper" / "board"
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            at = SLOTS_AT + number * SLOT + ACKS_AT
            for step in steps:
                before, old = position, memory[at : at + 2 * ACKED]
                position = (before[0] + 1, before[1] + step, before[2] + step, before[3] + 1)
                assert shipper.ack(number, "one", *position)
                assert monitor.last("one") == position
                new = memory[at : at + 2 * ACKED]
                half = next(half for half in range(2) if old[half * ACKED :][:ACKED] != new[half * ACKED :][:ACKED])
                words = cut // 8 * 8
                torn = new[half * ACKED :][:words] + old[half * ACKED + words :][: ACKED - words]
                memory[at + half * ACKED : at + half * ACKED + ACKED] = torn
                assert monitor.last("one") == before
                again = Board(os.fsencode(place / "shipper"), monitor=False)
                if extra:
                    again.ack(number, "one", *position)
                    assert monitor.last("one") == position
                else:
                    memory[at : at + 2 * ACKED] = new


def test_the_bell_rings_only_for_a_sleeping_shipper(tmp_path: Path) -> None:
    monitor, shipper = both(tmp_path)
    shipper.wake()
    shipper.scans()
    number = monitor.open("one", NOTHING, 0)
    monitor.wrote(number, 1, 1)
    assert not rung(shipper)
    assert not shipper.sleep(), "there is a change"
    shipper.changed()
    assert shipper.sleep()
    monitor.wrote(number, 1, 1)
    monitor.wrote(number, 1, 1)
    assert rung(shipper)
    assert os.read(shipper.bell, 10) == b"\1"
    shipper.wake()
    assert shipper.changed() == [number]
    monitor.rescan()
    assert not rung(shipper) and not shipper.sleep()
    before = shipper.scans()
    assert shipper.sleep()
    monitor.rescan()
    assert rung(shipper) and shipper.scans() == before + 1
    shipper.wake()
    assert not rung(shipper)
    assert shipper.sleep()
    Board(os.fsencode(tmp_path / "shipper"), monitor=True)
    assert rung(shipper), "another monitor has come"
    shipper.wake()
    assert not shipper.sleep()


def test_a_bell_that_is_full_does_not_stop_the_monitor(tmp_path: Path) -> None:
    monitor, shipper = both(tmp_path)
    number = monitor.open("one", NOTHING, 0)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(shipper.bell, bytes(4096))
    shipper.scans()
    shipper.changed()
    assert shipper.sleep()
    monitor.wrote(number, 1, 1)
    assert rung(shipper)
    shipper.wake()
    assert not rung(shipper)


def test_no_board(tmp_path: Path) -> None:
    place = os.fsencode(tmp_path / "shipper")
    with pytest.raises(FileNotFoundError):
        Board(place, monitor=False)
    monitor = Board(place, monitor=True)
    for number in (-1, 0, 1 << 20):
        for call in (lambda: monitor.slot(number), lambda: monitor.ack(number, "x", *NOTHING)):  # noqa: B023
            with pytest.raises(IndexError):
                call()
    for name in ("", "x" * 72, "a\0b"):
        with pytest.raises(ValueError):
            monitor.open(name, NOTHING, 0)
    assert monitor.open("x" * 71, NOTHING, 0) == 0
    assert Board(place, monitor=False).slot(0) == ("x" * 71, True, 0, 0)


@pytest.mark.parametrize("content", [b"", b"x", b"other board".ljust(1 << 12)], ids=["empty", "short", "long"])
def test_a_board_of_another_layout_is_replaced(tmp_path: Path, content: bytes) -> None:
    monitor, shipper = both(tmp_path)
    path = tmp_path / "shipper" / "board"
    if content:
        with path.open("r+b") as file:
            file.write(content)
    else:
        os.truncate(path, 0)
    with pytest.raises(FileNotFoundError):
        Board(os.fsencode(path.parent), monitor=False)
    again = Board(os.fsencode(path.parent), monitor=True)
    assert again.left() == {} and again.generation == 1
    assert (monitor.replaced, shipper.replaced, again.replaced) == (bool(content), bool(content), False)


def test_room_is_allocated_in_steps(tmp_path: Path) -> None:
    monitor, shipper = both(tmp_path)
    path = tmp_path / "shipper" / "board"
    begun = path.stat().st_blocks
    for index in range(1000):
        monitor.open(f"c{index}", NOTHING, index)
    assert path.stat().st_blocks - begun <= (1024 * SLOT + 8192) // 512
    assert path.stat().st_size > 65536 * SLOT
    assert shipper.slot(999) == ("c999", True, 999, 0)
    assert shipper.changed() == list(range(1000))


def test_a_shipper_in_another_process_overlooks_nothing(tmp_path: Path) -> None:
    """It sleeps whenever it may. At the end it has seen every byte, without a time limit on its
    sleep."""
    place = os.fsencode(tmp_path / "shipper")
    monitor = Board(place, monitor=True)
    numbers = [monitor.open(f"c{index}", NOTHING, 0) for index in range(70)]
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            shipper = Board(place, monitor=False)
            seen = dict.fromkeys(numbers, 0)
            shipper.scans()
            end = time.monotonic() + 50
            while sum(seen.values()) < 70 * 2000 and time.monotonic() < end:
                for number in shipper.changed():
                    name, _, written, _ = shipper.slot(number)
                    seen[number] = written
                    shipper.ack(number, name, 1, written, written, written)
                if sum(seen.values()) < 70 * 2000 and shipper.sleep():
                    assert select.select([shipper.bell], [], [], 20)[0], seen
                    shipper.wake()
            status = 0 if sum(seen.values()) == 70 * 2000 else 2
        finally:
            os._exit(status)
    choose = random.Random(1)
    left = [number for number in numbers for _ in range(2000)]
    choose.shuffle(left)
    for count, number in enumerate(left):
        monitor.wrote(number, 1, 1)
        assert 0 <= monitor.unacked(number) <= 2000
        if count % 1000 == 0:
            time.sleep(0.001)
    assert os.waitpid(pid, 0)[1] == 0
    assert all(monitor.last(f"c{index}") == (1, 2000, 2000, 2000) for index in range(70))


def test_kills_of_the_shipper_leave_whole_positions(tmp_path: Path) -> None:
    place = os.fsencode(tmp_path / "shipper")
    monitor = Board(place, monitor=True)
    number = monitor.open("one", NOTHING, 1 << 40)
    newest = 0
    for _ in range(20):
        pid = os.fork()
        if pid == 0:
            try:
                shipper = Board(place, monitor=False)
                at = newest
                while True:
                    at += 1
                    shipper.ack(number, "one", at, at, at, at)
            finally:
                os._exit(1)
        try:
            end = time.monotonic() + 0.02
            while time.monotonic() < end:
                position = monitor.last("one")
                assert position is not None and len(set(position)) == 1 and position[0] >= newest
        finally:
            os.kill(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)[1]
        assert os.WTERMSIG(status) == signal.SIGKILL
        position = monitor.last("one")
        assert position is not None and len(set(position)) == 1 and position[0] >= newest
        newest = position[0]
    assert newest > 1000
