"""Packed files of a log: any program can read them, and a reader sees the same as before they were
packed.
"""

from __future__ import annotations

import gzip
import os
import random
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine._fast.logreader import LogReader
from engine._fast.logwriter import LogWriter
from engine._fast.packed import HEADER, label, pack
from tests.unit.fast.jsonlogs import (  # noqa: F401 (_descriptors: a fixture)
    SECOND,
    _descriptors,
    directory,
    entry,
    everything,
    files,
    pack_file,
    pack_foreign,
    read,
)

Packing = Callable[[Path], Path]


def label_of(path: Path) -> tuple[int, int, int, int, int, int] | None:
    with path.open("rb") as file:
        return label(file.fileno())


def filled(place: Path, count: int = 200, max_size: int = 3000) -> tuple[Path, list[tuple[bytes, int]]]:
    """A rotated log of both streams, and the entries with their times."""
    chance = random.Random(count)
    path = place / "c.log"
    writer = LogWriter(os.fsencode(path), max_size, 100)
    lines = [b"%d %s\n" % (index, b'"' * chance.choice((0, 0, 5, 200))) for index in range(count)]
    for line in lines:
        writer.write(chance.choice((1, 2)), line)
    writer.close()
    stamped = read(path, timestamps=True).splitlines(keepends=True)
    times = [int(line[20:29]) + SECOND * seconds(line[:19]) for line in stamped]
    return path, list(zip(lines, times, strict=True))


def seconds(text: bytes) -> int:
    from datetime import UTC, datetime

    return int(datetime.fromisoformat(text.decode()).replace(tzinfo=UTC).timestamp())


def pack_some(path: Path, packing: Packing, chosen: int) -> int:
    """Pack the rotated files whose bit is set in `chosen`."""
    rotated = files(path)[:-1]
    for bit, file in enumerate(rotated):
        if chosen >> bit & 1:
            packing(file)
    return len(rotated)


def test_the_form(tmp_path: Path) -> None:
    """gzip, with what a reader needs to know of the original."""
    data = entry("a\n", 7) + b"no entry\n" + entry("b" * 300_000, 9) + entry("end", 11) + b"rest"
    path = tmp_path / "c.log.1"
    path.write_bytes(data)
    inode = path.stat().st_ino
    packed = pack_file(path)
    assert gzip.decompress(packed.read_bytes()) == data
    assert label_of(packed) == (inode, len(data), 4, 3, 7, 11)
    path.write_bytes(b"")
    assert gzip.decompress(pack_file(path).read_bytes()) == b""
    assert (label_of(packed) or ())[1:] == (0, 0, 0, 0, 0)
    path.write_bytes(data)
    assert label_of(pack_foreign(path)) is None


def test_a_line_longer_than_an_entry(tmp_path: Path) -> None:
    path = tmp_path / "c.log.1"
    data = entry("a\n", 7) + b"x" * (9 << 20) + b"\n" + entry("b\n", 9)
    path.write_bytes(data)
    packed = pack_file(path)
    assert (label_of(packed) or ())[1:] == (len(data), 3, 2, 7, 9)
    assert read(tmp_path / "c.log") == b"a\nb\n"
    assert read(tmp_path / "c.log", tail=1) == b"b\n"


@pytest.mark.parametrize("packing", [pack_file, pack_foreign])
def test_every_read_is_the_same(tmp_path: Path, packing: Packing) -> None:
    path, entries = filled(tmp_path)
    count = pack_some(path, packing, 0b0110111)
    assert count > 7
    lines = [line for line, _ in entries]
    assert read(path) == b"".join(lines)
    assert read(path, chunk=1) == b"".join(lines)
    for tail in range(len(entries) + 3):
        assert read(path, tail=tail) == b"".join(lines[max(0, len(lines) - tail) :])
    for index in range(0, len(entries), 5):
        at = entries[index][1]
        assert read(path, since_ns=at) == b"".join(lines[index:])
        assert read(path, since_ns=at + 1) == b"".join(lines[index + 1 :])
        assert read(path, until_ns=at) == b"".join(lines[: index + 1])
        assert read(path, since_ns=at, tail=20) == b"".join(lines[max(index, len(lines) - 20) :])
        assert read(path, since_ns=at, until_ns=at) == lines[index]
    assert read(path, until_now=True, tail=150) == b"".join(lines[-150:])


@settings(max_examples=50)
@given(st.integers(0, 60), st.integers(0, (1 << 40) - 1), st.integers(1, 5000), st.booleans())
def test_until_a_position(count: int, chosen: int, chunk: int, tail: bool) -> None:
    with directory() as place:
        path = place / "c.log"
        writer = LogWriter(os.fsencode(path), 500, 50)
        for index in range(count):
            writer.write(1, b"%d\n" % index)
        position = writer.position()
        for index in range(30):
            writer.write(1, b"later %d\n" % index)
        writer.close()
        pack_some(path, pack_file, chosen)
        lines = [b"%d\n" % index for index in range(count)]
        wanted = b"".join(lines[-5:] if tail else lines)
        assert read(path, tail=5 if tail else None, chunk=chunk, until_position=position) == wanted


@settings(max_examples=60)
@given(st.integers(150, 900), st.lists(st.tuples(st.integers(0, 12), st.sampled_from("lpn")), max_size=40))
def test_following_while_files_are_packed(max_size: int, steps: list[tuple[int, str]]) -> None:
    """A reader that holds a file continues in it; one that comes later reads the packed one."""
    with directory() as place:
        path = place / "c.log"
        writer = LogWriter(os.fsencode(path), max_size, 500)
        reader = LogReader(os.fsencode(path))
        got, written = [], []
        for count, then in steps:
            for _ in range(count):
                written.append(b"%d\n" % len(written))
                writer.write(1, written[-1])
            if then == "l":
                got.append(everything(reader, 100))
                assert b"".join(got) == b"".join(written)
            elif then == "p":
                pack_some(path, pack_file, len(written) * 7919)
                # The plain writer does not know of packed files: the names stay as they are.
                break
            else:
                got.append(reader.read(20))
        writer.close()
        got.append(everything(reader, 100))
        assert b"".join(got) == b"".join(written)
        reader.close()
        assert read(path) == b"".join(written)


def test_a_damaged_file_ends_where_its_damage_begins(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    lines = [b"%d %d\n" % (index, random.Random(index).randrange(1 << 60)) for index in range(3000)]
    (tmp_path / "c.log.1").write_bytes(b"".join(entry(line.decode(), at + 1) for at, line in enumerate(lines)))
    path.write_bytes(entry("live\n", SECOND))
    packed = pack_file(tmp_path / "c.log.1")
    data = packed.read_bytes()
    seen = set()
    for cut in (0, 9, 20, HEADER - 1, HEADER, HEADER + 1, len(data) // 2, len(data) - 1):
        for damage in (data[:cut], data[:cut] + bytes([data[cut] ^ 0x55]) + data[cut + 1 :]):
            packed.write_bytes(damage)
            got = read(path)
            assert got.endswith(b"live\n")
            assert b"".join(lines).startswith(got[:1000].removesuffix(b"live\n"))
            assert read(path, tail=1) == b"live\n"
            read(path, tail=2000)
            assert read(path, since_ns=SECOND) == b"live\n"
            seen.add(len(got))
    assert len(seen) > 3
    packed.write_bytes(b"")
    assert read(path) == b"live\n"
    packed.unlink()
    packed.mkdir()
    with pytest.raises(OSError, match="not a regular file"):
        read(path)


def test_a_file_that_is_there_twice_is_read_once(tmp_path: Path) -> None:
    """The packed one has its name before the original is removed."""
    path, entries = filled(tmp_path, 60)
    kept = (tmp_path / "c.log.1").read_bytes()
    inode = (tmp_path / "c.log.1").stat().st_ino
    os.link(tmp_path / "c.log.1", tmp_path / "kept")
    pack_file(tmp_path / "c.log.1")
    (tmp_path / "kept").rename(tmp_path / "c.log.1")
    assert (tmp_path / "c.log.1").stat().st_ino == inode and (tmp_path / "c.log.1").read_bytes() == kept
    assert read(path) == b"".join(line for line, _ in entries)


def test_packing_fails(tmp_path: Path) -> None:
    source = tmp_path / "c.log.1"
    source.write_bytes(entry("x\n", 1) * 1000)
    with source.open("rb") as file, Path("/dev/full").open("wb") as full, pytest.raises(OSError, match="No space"):
        pack(file.fileno(), full.fileno())
    with source.open("rb") as file, pytest.raises(OSError, match="Bad file descriptor"):
        pack(file.fileno(), 9999)


def test_memory_of_a_reader_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    line = "x" * 200 + "\n"
    with (tmp_path / "c.log.1").open("wb") as file:
        for at in range(400):
            file.write(entry(line, at + 1) * 1000)
    pack_file(tmp_path / "c.log.1")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reader = LogReader(os.fsencode(path))
    size = 0
    while data := reader.read(1 << 16):
        size += len(data)
    reader.close()
    assert size == len(line) * 400_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000
