"""The json-file log: each read compared with the written entries."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import random
import re
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine._fast.jsonentry import time_text
from engine._fast.logreader import LogReader
from engine._fast.logwriter import LogWriter
from tests.support import PATIENCE
from tests.unit.fast.jsonlogs import (  # noqa: F401 (_descriptors: a fixture)
    SECOND,
    SLICE,
    _descriptors,
    directory,
    entry,
    everything,
    files,
    pack_file,
    parsed,
    read,
)


def test_no_log_yet(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    reader = LogReader(os.fsencode(path), since_ns=1)
    reader.seek_tail(3)
    assert (everything(reader), reader.position(), reader.done) == (b"", (0, 0), False)
    writer = LogWriter(os.fsencode(path))
    writer.write(1, b"now\n")
    assert everything(reader) == b"now\n"
    assert reader.position() == writer.position()
    writer.close()
    reader.close()
    assert (reader.read(10), reader.done, reader.at_end) == (b"", True, True)


def test_other_forms_of_the_same(tmp_path: Path) -> None:
    """Entries as Docker and others write them: short fractions, other order, spaces, unknown keys,
    escapes that this engine does not use.

    An entry without `log` shows nothing.
    """
    path = tmp_path / "c.log"
    path.write_bytes(
        b'{"time":"2024-02-29T01:02:03Z","stream":"stderr","log":"a\\n"}\n'
        b' { "log" : "b\\n" , "stream" : "stdout" , "time" : "2024-02-29T03:02:03.5+02:00" , "x" : {"y":[1,"}"]} } \r\n'
        b'{"log":"\\ud83d\\ude00\\u00e9\\/\\b\\f\\t\\"\\\\\\ud83d\\n","stream":"stdout",'
        b'"attrs":{"k":"v"},"time":"2024-02-29T01:02:04.000000001Z"}\n'
        b'\0\0\0{"stream":"stdout","time":"2024-02-29T01:02:05.12Z"}\n'
        b'{"log":"c","stream":"stdout","time":"2024-02-29T01:02:06.123456789123Z"}\n'
    )
    assert read(path, timestamps=True).decode() == (
        "2024-02-29T01:02:03.000000000Z a\n"
        "2024-02-29T01:02:03.500000000Z b\n"
        '2024-02-29T01:02:04.000000001Z 😀é/\b\f\t"\\\ufffd\n'
        "2024-02-29T01:02:06.123456789Z c"
    )
    assert read(path, stdout=False) == b"a\n"


GARBAGE = [
    b"",
    b"{}",
    b"nonsense",
    b"\0\0\0",
    b"\xff" * 300,
    b'{"log":"x","stream":"stdin","time":"2024-02-29T01:02:03Z"}',
    b'{"log":"x","stream":"stdout","time":"yesterday"}',
    b'{"log":"x","stream":"stdout"}',
    b'{"log":"x","stream":"stdout","time":"2024-02-29T01:02:03Z"',
    b'{"log":"x","stream":"stdout","time":"2024-02-29T01:02:03Z"}}',
    b'{"log":"x\\u12g4","stream":"stdout","time":"2024-02-29T01:02:03.123456789Z"}',
    b'{"log":"x\\","stream":"stdout","time":"2024-02-29T01:02:03.123456789Z"}',
    b'{"log":"x" "stream":"stdout","time":"2024-02-29T01:02:03.123456789Z"}',
    b'{"log":"x\\q","stream":"stdout","time":"2024-02-29T01:02:03.123456789Z"}',
    b'["log","stream","time"]',
    b'{"log":"x","stream":"stdout","time":"2024-13-29T01:02:03.123456789Z","attrs":[[[[{]}',
]


def test_garbage_is_skipped_and_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    lines = [b"line %d\n" % index for index in range(40)]
    with path.open("wb") as file:
        for index, line in enumerate(lines):
            file.write(GARBAGE[index % len(GARBAGE)] + b"\n" + entry(line.decode(), (index + 1) * SECOND))
        file.write(b"garbage at the end\n")
    assert read(path) == b"".join(lines)
    for count in range(45):
        assert read(path, tail=count) == b"".join(lines[max(0, 40 - count) :])


@settings(max_examples=300)
@given(st.binary(max_size=300), st.integers(0, 400))
def test_any_bytes_can_be_read_without_harm(noise: bytes, at: int) -> None:
    good = entry("first\n", SECOND) + entry("last\n", 2 * SECOND)
    with directory() as place:
        path = place / "c.log"
        path.write_bytes(good[:at] + noise + good[at:] + b"\n" + entry("end\n", 3 * SECOND))
        assert read(path, timestamps=True, details=b" ", framed=True).endswith(b"end\n")
        assert read(path, tail=1) == b"end\n"
        assert read(path, since_ns=3 * SECOND, chunk=1) == b"end\n"


def test_a_line_too_long_for_an_entry_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    long = "x" * (3 << 20)
    path.write_bytes(
        entry("a\n", 1)
        + b'{"log":"'
        + b"y" * (9 << 20)
        + b'"}\n'
        + entry(long, 2)
        + entry("b\n", 3)
        + b"z" * (5 << 20)
        + b"\n"
    )
    assert read(path) == b"a\n" + long.encode() + b"b\n"
    assert read(path, tail=1) == b"b\n"
    assert read(path, tail=2) == long.encode() + b"b\n"
    assert read(path, tail=3) == read(path, tail=9) == read(path)
    assert read(path, since_ns=3) == b"b\n"


def filled(
    place: Path, count: int = 300, max_size: int = 3000, max_file: int = 100, seed: int = 1
) -> tuple[Path, list[tuple[int, bytes, int]]]:
    """A rotated log of both streams, and its entries (stream, bytes, ns)."""
    chance = random.Random(seed)
    path = place / "c.log"
    writer = LogWriter(os.fsencode(path), max_size, max_file)
    for index in range(count):
        writer.write(chance.choice((1, 2)), b"%d %s\n" % (index, b'"' * chance.choice((0, 0, 5, 200))))
    writer.close()
    entries = []
    for item in parsed(b"".join(file.read_bytes() for file in files(path))):
        whole, fraction = item[3][:-1].split(".")
        at = int(datetime.fromisoformat(whole + "+00:00").timestamp()) * SECOND + int(fraction)
        entries.append((item[0], item[2].encode(), at))
    return path, entries


def joined(entries: list[tuple[int, bytes, int]]) -> bytes:
    return b"".join(data for _, data, _ in entries)


def test_tail_is_the_last_entries_for_every_number(tmp_path: Path) -> None:
    path, entries = filled(tmp_path)
    assert len(files(path)) > 5
    for count in range(len(entries) + 3):
        last = entries[max(0, len(entries) - count) :]
        assert read(path, tail=count) == joined(last)
        assert read(path, tail=count, stdout=False) == joined([item for item in last if item[0] == 2])
    with pytest.raises(ValueError):
        read(path, tail=-1)


def test_tail_of_entries_larger_than_a_block(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    writer = LogWriter(os.fsencode(path))
    lines = [b"\x01" * (SLICE - 1) + b"\n" for _ in range(20)]
    writer.write(1, b"".join(lines))
    writer.close()
    for count in range(22):
        assert len(read(path, tail=count)) == SLICE * min(count, 20)


def test_since_and_until_include_their_instant(tmp_path: Path) -> None:
    path, entries = filled(tmp_path)
    for index in range(0, len(entries), 7):
        at = entries[index][2]
        assert read(path, since_ns=at) == joined(entries[index:])
        assert read(path, since_ns=at + 1) == joined(entries[index + 1 :])
        assert read(path, until_ns=at) == joined(entries[: index + 1])
        assert read(path, until_ns=at - 1) == joined(entries[:index])
        assert read(path, since_ns=at, tail=20) == joined(entries[max(index, len(entries) - 20) :])
        later = entries[min(index + 11, len(entries) - 1)][2]
        assert read(path, since_ns=at, until_ns=later) == joined(entries[index : index + 12])
    assert read(path, since_ns=1) == joined(entries)
    assert read(path, since_ns=1 << 62) == b""


def test_until_is_done(tmp_path: Path) -> None:
    path, entries = filled(tmp_path)
    reader = LogReader(os.fsencode(path), until_ns=entries[5][2])
    assert everything(reader) == joined(entries[:6])
    assert reader.done
    reader.close()


def test_since_finds_its_place_in_a_large_file(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    with path.open("wb") as file:
        for index in range(40_000):
            file.write(entry(f"{index}\n", (index + 1) * SECOND) + (b"garbage\n" if index % 3 else b""))
    for index in (0, 1, 19_999, 20_000, 39_990, 39_999):
        reader = LogReader(os.fsencode(path), since_ns=(index + 1) * SECOND)
        assert (index + 1) * 70 - reader.position()[1] < 600_000
        assert reader.position()[1] > index * 70 - 600_000
        assert everything(reader, 1 << 20) == b"".join(b"%d\n" % number for number in range(index, 40_000))
        reader.close()


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("now", [2, 2000])
def test_since_and_until_where_the_clock_was_set_back(tmp_path: Path, now: int, pack: bool) -> None:
    """By a host whose clock began in 1970 for a while (2), and one whose clock was ahead."""
    path = tmp_path / "c.log"
    spans = ((1000, 20_000), (now, 20_000), (1000 + 20_000, 20_000))
    for number, (begin, count) in zip((2, 1, 0), spans, strict=True):
        file = path if number == 0 else tmp_path / f"c.log.{number}"
        file.write_bytes(b"".join(entry(f"{begin + index}\n", (begin + index) * SECOND) for index in range(count)))
        if number:
            file.chmod(0o1640)
            if pack:
                pack_file(file)
    stamps = [begin + index for begin, count in spans for index in range(count)]
    for bound in (15_000, 20_500, 30_000):
        assert read(path, since_ns=bound * SECOND) == b"".join(b"%d\n" % each for each in stamps if each >= bound)
        assert read(path, until_ns=bound * SECOND) == b"".join(b"%d\n" % each for each in stamps if each <= bound)


def test_following_until_a_time_ends_where_the_clock_was_set_back(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    path.write_bytes(entry("ahead\n", time.time_ns() + 1000 * SECOND))
    until = time.time_ns() + SECOND // 4
    reader = LogReader(os.fsencode(path), until_ns=until)
    assert not reader.read(100)
    assert reader.done
    reader.close()
    path.chmod(0o1640)
    reader = LogReader(os.fsencode(path), until_ns=until)
    with path.open("ab") as file:
        file.write(entry("a\n", until - SECOND // 4))
    assert everything(reader) == b"a\n"
    while not reader.done:  # as often as the log grows
        assert not reader.read(100)
        assert reader.done or time.time_ns() <= until + SECOND * PATIENCE
    reader.close()


@settings(max_examples=40)
@given(st.integers(1, 5000), st.booleans(), st.booleans(), st.sampled_from([b"", b" ", b"tier=a "]))
def test_chunks_of_any_size_and_every_dress(chunk: int, framed: bool, timestamps: bool, details: bytes) -> None:
    with directory() as place:
        path, entries = filled(place, count=60)
        wanted = []
        for stream, data, at in entries:
            line = (time_text(at).encode() + b" " if timestamps else b"") + details + data
            wanted.append(struct.pack(">BxxxL", stream, len(line)) + line if framed else line)
        reader = LogReader(os.fsencode(path), framed=framed, timestamps=timestamps, details=details)
        got = []
        while data := reader.read(chunk):
            assert len(data) <= max(chunk, 700)
            got.append(data)
        reader.close()
        assert b"".join(got) == b"".join(wanted)


def test_a_long_line_has_one_time_stamp(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    writer = LogWriter(os.fsencode(path))
    long = ("é" * SLICE * 2).encode()
    writer.write(1, b"a" + long)
    writer.write(2, b"between\n")
    writer.write(1, b"end\nno newline")
    writer.end()
    writer.write(1, b"next\n")
    writer.close()
    lines = read(path, timestamps=True, stderr=False, details=b"d ")
    stamp = rb"\d{4}-[^ ]{25} d "
    assert re.fullmatch(stamp + b"a" + long + b"end\n" + stamp + b"no newline" + stamp + b"next\n", lines)
    assert read(path, stderr=False) == b"a" + long + b"end\nno newlinenext\n"


def test_until_position_is_exact_at_every_entry(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    writer = LogWriter(os.fsencode(path), 700, 50)
    positions = [writer.position()]
    for index in range(60):
        writer.write(1, b"%d\n" % index)
        positions.append(writer.position())
    writer.write(1, b"open line")
    for count, position in enumerate(positions):
        wanted = b"".join(b"%d\n" % index for index in range(count))
        reader = LogReader(os.fsencode(path), until_position=position)
        assert everything(reader, 7) == wanted
        assert reader.done
        reader.close()
        assert read(path, until_position=position, tail=2) == b"".join(
            b"%d\n" % index for index in range(max(0, count - 2), count)
        )
    writer.close()


def test_until_position_in_a_file_that_is_gone_is_nothing(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    writer = LogWriter(os.fsencode(path), 200, 2)
    writer.write(1, b"first\n")
    gone = writer.position()
    holder = os.open(path, os.O_RDONLY)  # so that its inode number is not reused
    for index in range(50):
        writer.write(1, b"%d\n" % index)
    reader = LogReader(os.fsencode(path), until_position=gone)
    assert (reader.read(100), reader.done) == (b"", True)
    os.close(holder)
    writer.close()


# --- following ------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.integers(150, 1500), st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=40), st.integers(1, 3000)
)
def test_following_over_rotation_loses_and_repeats_nothing(
    max_size: int, steps: list[tuple[int, bool]], chunk: int
) -> None:
    with directory() as place:
        path = place / "c.log"
        writer = LogWriter(os.fsencode(path), max_size, 500)
        reader = LogReader(os.fsencode(path))
        got, written = [], []
        for count, look in steps:
            for _ in range(count):
                written.append(b"%d\n" % len(written))
                writer.write(1, written[-1])
            if look:
                got.append(everything(reader, chunk))
                assert b"".join(got) == b"".join(written)
                assert reader.position() == writer.position()
        writer.close()
        got.append(everything(reader, chunk))
        reader.close()
        assert b"".join(got) == b"".join(written)


def test_a_follower_that_is_too_slow_skips_what_is_gone_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    writer = LogWriter(os.fsencode(path), 500, 3)
    writer.write(1, b"0\n")
    reader = LogReader(os.fsencode(path))
    assert reader.read(100) == b"0\n"
    for index in range(1, 100):
        writer.write(1, b"%d\n" % index)
    rest = [int(line) for line in everything(reader).split()]
    first = int(read(path).split()[0])
    mine = [number for number in rest if number < first]
    assert mine == list(range(1, len(mine) + 1))  # the file it held
    assert rest[len(mine) :] == list(range(first, 100))
    reader.close()
    writer.close()


@pytest.mark.parametrize("max_file", [1, 3])
def test_a_follower_that_reads_on_holds_what_rotation_takes_away(tmp_path: Path, max_file: int) -> None:
    path = tmp_path / "c.log"
    writer = LogWriter(os.fsencode(path), 500, max_file)
    writer.write(1, b"0\n")
    reader = LogReader(os.fsencode(path))
    got, inodes = [reader.read(100)], {path.stat().st_ino}
    for index in range(1, 400):
        writer.write(1, b"%d\n" % index)
        inodes.add(path.stat().st_ino)
        if index % 3 == 0:
            got.append(reader.read(4))
    assert len(inodes) > 10 and int(read(path).split()[0]) > 300, "most of it is gone from the disk"
    assert b"".join(got) != b"".join(b"%d\n" % index for index in range(400)), "and was not read before it went"
    got.append(everything(reader))
    assert b"".join(got) == b"".join(b"%d\n" % index for index in range(400))
    reader.close()
    writer.close()


def test_a_follower_that_falls_far_behind_holds_no_more_than_its_share(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    writer = LogWriter(os.fsencode(path), 500, 1)
    writer.write(1, b"0\n")
    reader = LogReader(os.fsencode(path))
    gc.collect()  # frees leftovers of earlier tests
    before = len(os.listdir("/proc/self/fd"))
    got = []
    for index in range(1, 2000):
        writer.write(1, b"%d\n" % index)
        if index % 10 == 0:
            got.append(reader.read(1))
    assert 10 < len(os.listdir("/proc/self/fd")) - before <= 64
    numbers = [int(line) for line in b"".join([*got, everything(reader)]).split()]
    assert numbers == sorted(set(numbers)) and numbers[-1] == 1999
    reader.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1
    writer.close()


@settings(max_examples=60)
@given(
    st.integers(150, 600),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 60), st.sampled_from(["", "told", "read"])), max_size=60),
)
def test_rotation_waits_for_a_follower(max_size: int, max_file: int, steps: list[tuple[int, str]]) -> None:
    """Lines for many files are written between two reads, and the reader reports its held files
    late. Nothing is lost, and few files are kept.
    """
    with directory() as place:
        path = place / "c.log"
        writer = LogWriter(os.fsencode(path), max_size, max_file)
        writer.follow(7, 0)
        reader = LogReader(os.fsencode(path))
        got, written = [], []
        for count, look in steps:
            written += [b"%d\n" % index for index in range(len(written), len(written) + count)]
            writer.write(1, b"".join(written[len(written) - count :]))
            if look:
                got.append(everything(reader, 100))
            if look == "told":
                writer.follow(7, reader.newest())
        writer.close()
        got.append(everything(reader))
        reader.close()
        assert b"".join(got) == b"".join(written)


def test_rotation_goes_on_when_followers_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    writer = LogWriter(os.fsencode(path), 500, 3)
    writer.follow(1, 0)
    writer.follow(2, 0)
    writer.unfollow(3)
    inode = path.stat().st_ino
    writer.write(1, b"line\n" * 1000)
    assert path.stat().st_ino == inode
    writer.follow(1, inode)
    writer.write(1, b"line\n" * 1000)
    assert path.stat().st_ino == inode, "the other is not there yet"
    writer.unfollow(2)
    writer.write(1, b"line\n" * 1000)
    assert path.stat().st_ino != inode
    writer.unfollow(1)
    writer.write(1, b"line\n" * 1000)
    assert path.stat().st_size <= 500
    assert len(list(tmp_path.iterdir())) == 3
    writer.close()


def test_a_follower_that_never_comes_costs_a_bounded_log_and_nobody_else_a_line(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    lenience = 32 << 20
    writer = LogWriter(os.fsencode(path), 10_000, 4)
    reader = LogReader(os.fsencode(path))
    writer.follow(1, 0)
    writer.follow(2, reader.newest())
    block = [b"%07d %s\n" % (index, b"x" * 8000) for index in range(100)]
    got, largest = [], 0
    for turn in range(90):  # 72 MB of entries
        writer.write(1, b"".join(block))
        largest = max(largest, sum(file.stat().st_size for file in tmp_path.iterdir()))
        while chunk := reader.read(1 << 20):
            got.append(chunk)
        writer.follow(2, reader.newest())
        if turn == 50:
            assert writer.outrun == 1
            writer.follow(1, 0)  # it reports again, and is outrun once more
    assert writer.outrun == 1
    assert b"".join(got) == b"".join(block) * 90
    assert lenience < largest < 2 * lenience + 4 * 10_000 + (1 << 20)
    writer.unfollow(1)
    writer.unfollow(2)
    for _ in range(5):
        writer.write(1, b"".join(block))
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 4 * 10_000
    reader.close()
    writer.close()


def test_until_now_is_what_there_was(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    writer = LogWriter(os.fsencode(path), 300, 10)
    assert everything(LogReader(os.fsencode(tmp_path / "none"), until_now=True)) == b""
    for index in range(10):
        writer.write(1, b"%d\n" % index)
    reader = LogReader(os.fsencode(path), until_now=True)
    assert reader.read(3) == b"0\n"
    for index in range(10, 40):
        writer.write(1, b"%d\n" % index)
    assert everything(reader) == b"".join(b"%d\n" % index for index in range(1, 10))
    assert reader.done
    reader.close()
    with path.open("ab") as file:  # an entry that is being written
        file.write(b'{"log":"to')
    reader = LogReader(os.fsencode(path), until_now=True)
    with path.open("ab") as file:
        file.write(b'rn\\n","stream":"stdout","time":"2026-01-02T03:04:05.123456789Z"}\n')
    reader.seek_tail(1)
    assert everything(reader) == b"39\n"
    reader.close()
    writer.close()


def test_following_a_writer_in_another_thread(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    writer = LogWriter(os.fsencode(path), 20_000, 1000)
    total = 20_000
    ended = threading.Event()

    def write() -> None:
        for at in range(0, total, 20):
            writer.write(1, b"".join(b"%d\n" % index for index in range(at, at + 20)))
        writer.close()
        ended.set()

    thread = threading.Thread(target=write)
    reader = LogReader(os.fsencode(path))
    thread.start()
    got = []
    while not ended.is_set():
        got.append(reader.read(4096))
    thread.join()
    got.append(everything(reader))
    reader.close()
    assert b"".join(got) == b"".join(b"%d\n" % index for index in range(total))


def test_a_torn_line_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    lines = entry("one\n", 1) + entry("two é\n", 2)
    reader = None
    got = b""
    with path.open("wb", buffering=0) as file:
        for index in range(len(lines)):
            file.write(lines[index : index + 1])
            reader = reader or LogReader(os.fsencode(path))
            got += everything(reader)
            whole = lines[: index + 1].count(b"\n")
            assert got == b"one\ntwo \xc3\xa9\n"[: (0, 4, 11)[whole]]
    assert reader is not None
    reader.close()


def test_a_read_does_not_look_through_a_large_log_in_one_go(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    writer = LogWriter(os.fsencode(path))
    for _ in range(45):
        writer.write(1, (b"x" * 99 + b"\n") * 10_000)
    writer.write(2, b"found\n")
    writer.close()
    reader = LogReader(os.fsencode(path), stdout=False)
    assert (reader.read(1 << 20), reader.at_end) == (b"", False)
    assert everything(reader) == b"found\n"
    reader.close()


@pytest.fixture
def disk() -> Iterator[Path]:
    """A directory in a file system that has reads without waiting, preadv2(2). tmpfs has none, and
    is what Debian 13 mounts at /tmp.
    """
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        yield Path(directory)


def test_what_is_cached_and_small_is_read_without_waiting(disk: Path) -> None:
    """The same answers, as long as the names on the way are known: the first reader, which may
    wait, has looked them up."""
    path, entries = filled(disk, 60, 4000, 4)
    middle = entries[30][2]
    options: tuple[dict[str, Any], ...] = ({}, {"stdout": False}, {"since_ns": middle}, {"until_now": True})
    for option in options:
        for tail in (None, 0, 7, 100):
            answers = []
            for nowait in (False, True):
                reader = LogReader(os.fsencode(path), nowait=nowait, **option)
                if tail is not None:
                    reader.seek_tail(tail)
                answers.append(reader.read(1 << 16))
                assert reader.at_end
                reader.close()
            assert answers[0] == answers[1], (option, tail)


def test_a_disk_is_not_waited_for(tmp_path: Path) -> None:
    path, entries = filled(tmp_path, 50, 0)
    with path.open("r+b") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapping:
            resident = (ctypes.c_ubyte * (len(mapping) // mmap.PAGESIZE + 1))()
            place = ctypes.byref(ctypes.c_char.from_buffer(mapping))
            assert ctypes.CDLL(None).mincore(place, ctypes.c_size_t(len(mapping)), resident) == 0
            del place
    if not any(resident):  # else the page cache is the disk, or does not give the pages back
        with pytest.raises(OSError, match=path.name):  # which one, is for the file system to say
            LogReader(os.fsencode(path), nowait=True, rotates=False, until_now=True)
    reader = LogReader(os.fsencode(path), rotates=False)
    assert everything(reader) == joined(entries)
    reader.close()


@pytest.mark.parametrize("much", ["bytes", "files", "packed", "names"])
def test_what_is_much_is_refused_and_read_by_others(tmp_path: Path, much: str) -> None:
    path, _ = filled(tmp_path, 9000 if much == "bytes" else 100, 0 if much == "bytes" else 1500, 100)
    if much == "packed":
        for file in files(path)[:-2]:
            file.unlink()
        pack_file(tmp_path / "c.log.1")
    if much != "names":
        everything(LogReader(os.fsencode(path)))  # looks up all names
    with pytest.raises(BlockingIOError) as refusal:
        reader = LogReader(os.fsencode(path), nowait=True)
        reader.seek_tail(8000)
    assert os.fspath(path) in os.fsdecode(refusal.value.filename)
    reader = LogReader(os.fsencode(path))
    reader.seek_tail(8000)
    assert everything(reader)
    reader.close()


def test_it_may_wait_later(disk: Path) -> None:
    """A first chunk without waiting, and the rest as usual."""
    path, entries = filled(disk, 5000, 0)
    reader = LogReader(os.fsencode(path), nowait=True, rotates=False)
    first = reader.read(1000)
    reader.nowait = False
    assert first
    assert first + everything(reader) == joined(entries)
    reader.close()


def test_a_log_that_does_not_rotate_is_one_file(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    (tmp_path / "c.log.1").write_bytes(entry("of another program\n", 1))
    path.write_bytes(entry("ours\n", 2))
    reader = LogReader(os.fsencode(path), rotates=False)
    assert everything(reader) == b"ours\n"
    reader.close()
