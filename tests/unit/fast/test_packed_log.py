"""A log of which some files are packed: rotation keeps the same lines, and every read has the same
result, whatever is packed and whenever."""

from __future__ import annotations

import gc
import gzip
import os
import random
import struct
import threading
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from isal import igzip_lib

from engine._fast.logreader import LogReader
from engine._fast.logwriter import LogWriter
from engine._fast.packed import label
from engine._fast.spool import PackedLog
from tests.unit.fast.jsonlogs import (  # noqa: F401 (_descriptors: a fixture)
    SECOND,
    _descriptors,
    directory,
    entry,
    everything,
    files,
    original,
    pack_file,
    pack_foreign,
    packed_copy,
    parsed,
    read,
)


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: None)


def label_of(path: Path) -> tuple[int, int, int, int, int, int] | None:
    with path.open("rb") as file:
        return label(file.fileno())


def rotated(place: Path, data: bytes, number: int = 1) -> Path:
    path = place / f"c.log.{number}"
    path.write_bytes(data)
    return path


def names(path: Path) -> list[str]:
    return sorted(file.name for file in path.parent.iterdir())


def pack_by(writer: PackedLog, file: Path) -> None:
    assert writer.replace(file.stat().st_ino, os.fsencode(packed_copy(file)))


def entries_of(path: Path) -> list[tuple[int, bytes, int]]:
    """(stream, text, time) of all entries on disk, without the reader's help. A packed file does
    not count if its original is there too."""
    found = []
    there = [file for file in files(path) if file.suffix != ".gz" or not file.with_suffix("").exists()]
    for item in parsed(b"".join(original(file) for file in there)):
        whole, fraction = item[3][:-1].split(".")
        at = int(datetime.fromisoformat(whole + "+00:00").timestamp()) * SECOND + int(fraction)
        found.append((item[0], item[2].encode(), at))
    return found


def joined(entries: list[tuple[int, bytes, int]]) -> bytes:
    return b"".join(data for _, data, _ in entries)


def forge(path: Path, inode: int) -> None:
    """Name another file as the original of a packed one."""
    data = path.read_bytes()
    path.write_bytes(data[:16] + struct.pack("<Q", inode) + data[24:])


# --- rotation -------------------------------------------------------------------------------------


@settings(max_examples=80)
@given(
    st.integers(150, 1500), st.integers(2, 6), st.lists(st.tuples(st.integers(0, 300), st.integers(0, 40)), max_size=60)
)
def test_rotation_counts_packed_files_too(max_size: int, max_file: int, steps: list[tuple[int, int]]) -> None:
    """The same lines are kept as without packing. Numbers have no gap, and no number is used
    twice."""
    with directory() as place, directory() as other:
        path = place / "c.log"
        writer = PackedLog(os.fsencode(path), max_size, max_file)
        plain = LogWriter(os.fsencode(other / "c.log"), max_size, max_file)
        for index, (length, chosen) in enumerate(steps):
            line = b"%d %s\n" % (index, b"." * length)
            writer.write(1, line)
            plain.write(1, line)
            candidates = [file for file in files(path)[:-1] if file.suffix != ".gz"]
            if candidates and chosen < 10:
                file = candidates[chosen % len(candidates)]
                assert writer.replace(file.stat().st_ino, os.fsencode(packed_copy(file)))
            elif chosen == 10:
                writer.close()
                writer = PackedLog(os.fsencode(path), max_size, max_file)
            numbered = sorted(file.name.removesuffix(".gz") for file in files(path))
            assert numbered == ["c.log", *(f"c.log.{number}" for number in range(1, len(numbered)))]
            kept = [line.split(b'"')[3] for file in files(path) for line in original(file).splitlines()]
            assert kept == [
                line.split(b'"')[3] for file in files(other / "c.log") for line in original(file).splitlines()
            ]
        writer.close()
        plain.close()
        assert {file.name for file in place.iterdir()} == {file.name for file in files(path)}


def test_a_copy_of_another_file_replaces_nothing(tmp_path: Path) -> None:
    """The inode number was used again, for a file of the same size."""
    path = tmp_path / "c.log"
    one = rotated(tmp_path, entry("1\n", 1))
    path.touch()
    writer = PackedLog(os.fsencode(path), 1000, 3)
    copy = packed_copy(one)
    one.write_bytes(entry("2\n", 2))
    os.utime(one, ns=(0, copy.stat().st_mtime_ns + 1))
    assert not writer.replace(one.stat().st_ino, os.fsencode(copy)) and not copy.exists()
    pack_by(writer, one)
    writer.close()
    assert read(path) == b"2\n"


# --- reading --------------------------------------------------------------------------------------


class Opened:
    """Counts the packed files that a reader begins to decompress."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        make = igzip_lib.IgzipDecompressor

        def counted(**options: Any) -> Any:
            self.count += 1
            return make(**options)

        monkeypatch.setattr(igzip_lib, "IgzipDecompressor", counted)

    def by(self, *arguments: Any, **options: Any) -> tuple[bytes, int]:
        self.count = 0
        return read(*arguments, **options), self.count


def filled(place: Path, count: int = 300, max_size: int = 3000) -> tuple[Path, list[tuple[int, bytes, int]]]:
    """A rotated log of both streams, and its entries."""
    chance = random.Random(count)
    path = place / "c.log"
    writer = LogWriter(os.fsencode(path), max_size, 100)
    for index in range(count):
        writer.write(chance.choice((1, 2)), b"%d %s\n" % (index, b'"' * chance.choice((0, 0, 5, 200))))
    writer.close()
    return path, entries_of(path)


@pytest.mark.parametrize("packing", [pack_file, pack_foreign])
@pytest.mark.parametrize("chosen", [-1, 0b1011011])
def test_every_read_is_the_same(tmp_path: Path, packing: Any, chosen: int) -> None:
    path, entries = filled(tmp_path)
    for bit, file in enumerate(files(path)[:-1]):
        if chosen >> bit & 1:
            packing(file)
    assert read(path) == read(path, chunk=1) == joined(entries)
    for tail in range(len(entries) + 3):
        last = entries[max(0, len(entries) - tail) :]
        assert read(path, tail=tail) == joined(last)
        assert read(path, tail=tail, stdout=False) == joined([item for item in last if item[0] == 2])
    for index in range(0, len(entries), 5):
        at = entries[index][2]
        assert read(path, since_ns=at) == joined(entries[index:])
        assert read(path, since_ns=at + 1) == joined(entries[index + 1 :])
        assert read(path, until_ns=at) == joined(entries[: index + 1])
        assert read(path, since_ns=at, tail=20) == joined(entries[max(index, len(entries) - 20) :])
        later = entries[min(index + 11, len(entries) - 1)][2]
        assert read(path, since_ns=at, until_ns=later) == joined(entries[index : index + 12])
    assert read(path, until_now=True, tail=150) == joined(entries[-150:])
    assert read(path, since_ns=1 << 62) == b""


def test_only_files_that_matter_are_decompressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, entries = filled(tmp_path)
    per_file = [len(parsed(file.read_bytes())) for file in files(path)]
    for file in files(path)[:-1]:
        pack_file(file)
    opened = Opened(monkeypatch)
    assert opened.by(path, tail=per_file[-1]) == (joined(entries[-per_file[-1] :]), 0)
    for count in (1, 2, 5):
        lines = sum(per_file[-1 - count :])
        assert opened.by(path, tail=lines) == (joined(entries[-lines:]), count)
        assert opened.by(path, since_ns=entries[-lines][2]) == (joined(entries[-lines:]), count)
    assert opened.by(path, since_ns=entries[-1][2]) == (joined(entries[-1:]), 0)
    first = sum(per_file[:2])
    assert opened.by(path, until_ns=entries[first - 1][2])[0] == joined(entries[:first])
    assert opened.count == 3, "the next file's first entry is the one that ends it"


def test_the_tail_begins_in_the_first_of_many_blocks(tmp_path: Path) -> None:
    """A file of several blocks, with lines that are no entries."""
    path = tmp_path / "c.log"
    lines = [f"{index} {'x' * (index % 300)}\n" for index in range(20_000)]
    data = b"".join(entry(line, index + 1) + b"garbage\n" * (index % 7 == 0) for index, line in enumerate(lines))
    pack_file(rotated(tmp_path, data + b"torn"))
    path.write_bytes(entry("last\n", 30_000))
    lines.append("last\n")
    for tail in (0, 1, 2, 100, 9_999, 19_999, 20_000, 20_001, 20_002):
        assert read(path, tail=tail).decode() == "".join(lines[max(0, len(lines) - tail) :])


def test_a_large_packed_file_is_not_searched_in_one_go(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    pack_file(rotated(tmp_path, entry("x" * 99 + "\n", 5) * 250_000 + entry("found\n", 6, 2)))
    reader = LogReader(os.fsencode(path), stdout=False)
    assert (reader.read(1 << 20), reader.at_end) == (b"", False)
    assert everything(reader) == b"found\n"
    reader.close()
    reader = LogReader(os.fsencode(path))
    reader.seek_tail(1)
    assert (reader.read(1 << 20), reader.at_end) == (b"", False)
    assert everything(reader) == b"found\n"
    reader.close()


@settings(max_examples=60)
@given(st.integers(0, 60), st.integers(0, (1 << 40) - 1), st.integers(1, 5000), st.booleans())
def test_until_a_position(count: int, chosen: int, chunk: int, tail: bool) -> None:
    with directory() as place:
        path = place / "c.log"
        writer = PackedLog(os.fsencode(path), 500, 50)
        for index in range(count):
            writer.write(1, b"%d\n" % index)
        position = writer.position()
        for index in range(30):
            writer.write(1, b"later %d\n" % index)
        for bit, file in enumerate(files(path)[:-1]):
            if chosen >> bit & 1:
                pack_by(writer, file)
        writer.close()
        lines = [b"%d\n" % index for index in range(count)]
        reader = LogReader(os.fsencode(path), until_position=position)
        if tail:
            reader.seek_tail(5)
        assert everything(reader, chunk) == b"".join(lines[-5:] if tail else lines)
        assert reader.done
        reader.close()


@settings(max_examples=60)
@given(
    st.integers(150, 900),
    st.lists(st.tuples(st.integers(0, 12), st.sampled_from(["", "look", "pack", "new"])), max_size=40),
    st.integers(1, 3000),
)
def test_following_while_files_are_packed(max_size: int, steps: list[tuple[int, str]], chunk: int) -> None:
    """A reader that holds a file goes on in it; one that comes later reads the packed one."""
    with directory() as place:
        path = place / "c.log"
        writer = PackedLog(os.fsencode(path), max_size, 500)
        readers = [(LogReader(os.fsencode(path)), bytearray())]
        written = bytearray()
        for count, then in steps:
            for _ in range(count):
                line = b"%d\n" % len(written)
                written += line
                writer.write(1, line)
            if then == "look":
                reader, got = readers[len(written) % len(readers)]
                got += reader.read(chunk)
            elif then == "new":
                readers.append((LogReader(os.fsencode(path)), bytearray()))
            elif then == "pack":
                for file in [file for file in files(path)[:-1] if file.suffix != ".gz"][-3:]:
                    pack_by(writer, file)
        writer.close()
        for reader, got in readers:
            assert bytes(got) + everything(reader, chunk) == written
            assert reader.position() == (path.stat().st_ino, path.stat().st_size)
            reader.close()


def test_a_held_file_has_the_inode_number_of_the_live_one(tmp_path: Path) -> None:
    """Rotation has removed a packed file that a slow reader still reads, and the kernel gives its
    original's number to the live file."""
    path = tmp_path / "c.log"
    packed = pack_file(rotated(tmp_path, entry("1\n", 1) + entry("2\n", 2)))
    path.touch()
    forge(packed, path.stat().st_ino)
    path.rename(tmp_path / "live")
    reader = LogReader(os.fsencode(path))
    assert reader.read(1) == b"1\n"
    packed.unlink()
    (tmp_path / "live").rename(path)
    path.write_bytes(entry("3\n", 3))
    assert everything(reader) == b"2\n3\n"
    with path.open("ab") as file:
        file.write(entry("4\n", 4))
    assert everything(reader) == b"4\n"
    reader.close()


def test_files_of_one_inode_number(tmp_path: Path) -> None:
    """A writer prevents them, but an operator may bring a file back. The newest one is meant."""
    path = tmp_path / "c.log"
    path.write_bytes(entry("4\n", 4) + entry("5\n", 5))
    rotated(tmp_path, entry("3\n", 3))
    for number in (2, 3):
        forge(pack_file(rotated(tmp_path, entry(f"{4 - number}\n", 4 - number), number)), path.stat().st_ino)
    assert read(path) == read(path, until_now=True) == b"1\n2\n3\n4\n5\n"
    position = path.stat().st_ino, len(entry("4\n", 4))
    assert read(path, until_position=position) == b"1\n2\n3\n4\n"
    assert read(path, until_position=position, tail=3) == b"2\n3\n4\n"
    reader = LogReader(os.fsencode(path))
    assert everything(reader) == b"1\n2\n3\n4\n5\n"
    path.rename(tmp_path / "c.log.0")
    path.write_bytes(entry("6\n", 6))
    for number in (3, 2, 1, 0):
        for suffix in ("", ".gz"):
            if (tmp_path / f"c.log.{number}{suffix}").exists():
                (tmp_path / f"c.log.{number}{suffix}").rename(tmp_path / f"c.log.{number + 1}{suffix}")
    assert everything(reader) == b"6\n"
    reader.close()


def test_the_original_wins_while_both_exist(tmp_path: Path) -> None:
    """Between the two steps of a replacement, and after a crash there."""
    path = tmp_path / "c.log"
    path.write_bytes(entry("3\n", 3))
    one = rotated(tmp_path, entry("2\n", 2))
    packed_copy(one).rename(tmp_path / "c.log.1.gz")
    two = rotated(tmp_path, entry("1\n", 1), 2)
    two.with_name("c.log.2.gz").write_bytes(b"\0" * 100)  # whose content did not reach the disk
    assert read(path) == b"1\n2\n3\n"
    assert read(path, tail=2) == b"2\n3\n"


@pytest.mark.parametrize("where", ["middle", "end", "cut", "no gzip", "empty", "header", "more"])
def test_a_damaged_file_is_read_as_far_as_it_goes(tmp_path: Path, where: str) -> None:
    chance = random.Random(1)
    path = tmp_path / "c.log"
    path.write_bytes(entry("live\n", 1 << 40))
    lines = [f"{index} {chance.randbytes(40).hex()}\n" for index in range(20_000)]
    packed = pack_file(rotated(tmp_path, b"".join(entry(line, at + 5) for at, line in enumerate(lines))))
    rotated(tmp_path, entry("oldest\n", 1), 2)
    data = bytearray(packed.read_bytes())
    size = len(data)
    if where == "middle":
        data[size // 2 : size // 2 + 200] = bytes(200)
    elif where == "end":
        data[-6] ^= 1
    elif where == "cut":
        del data[size // 2 :]
    elif where == "no gzip":
        data = bytearray(b"nonsense\n" * 1000)
    elif where == "empty":
        data.clear()
    elif where == "header":
        data[8] ^= 0xFF
    elif where == "more":
        data += bytes(1000) + gzip.compress(entry("another member\n", 30_000)) + b"rubbish"
    packed.write_bytes(data)
    got = read(path).decode().splitlines(keepends=True)
    assert (got[0], got[-1]) == ("oldest\n", "live\n")
    if where in ("no gzip", "empty"):
        assert len(got) == 2
    elif where in ("middle", "cut"):
        assert 5_000 < len(got) < 20_002 and got[1:5000] == lines[:4999]
    elif where == "more":
        assert got[1:-1] == [*lines, "another member\n"]
    else:
        assert got[1:-1] == lines
    for tail in (0, 1, 2, 19_000, 30_000):
        assert read(path, tail=tail).endswith(b"live\n" if tail else b"")
    assert read(path, since_ns=1 << 40) == b"live\n"
    assert read(path, until_now=True) == "".join(got).encode()


def test_a_log_without_a_live_file(tmp_path: Path) -> None:
    """An operator has removed it."""
    path = tmp_path / "c.log"
    pack_file(rotated(tmp_path, entry("1\n", 1) + entry("2\n", 2)))
    assert read(path) == read(path, until_now=True) == b"1\n2\n"
    reader = LogReader(os.fsencode(path))
    reader.seek_tail(1)
    assert everything(reader) == b"2\n"
    path.write_bytes(entry("3\n", 3))
    assert everything(reader) == b"3\n"
    reader.close()


def test_only_a_regular_file_is_a_packed_one(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    path.write_bytes(entry("1\n", 1))
    os.mkfifo(tmp_path / "c.log.1.gz")
    with pytest.raises(OSError, match="regular file"):
        LogReader(os.fsencode(path))


def test_a_reader_is_closed_while_it_decompresses(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    pack_file(rotated(tmp_path, entry("x" * 99 + "\n", 5) * 300_000))
    reader = LogReader(os.fsencode(path), stdout=False)
    thread = threading.Thread(target=reader.read, args=(100,))
    thread.start()
    reader.close()
    thread.join()
    assert (reader.read(100), reader.done) == (b"", True)


def test_closing_releases_all_files(tmp_path: Path) -> None:
    path, _ = filled(tmp_path)
    for file in files(path)[:-1:2]:
        pack_file(file)
    gc.collect()  # frees leftovers of earlier tests
    before = len(os.listdir("/proc/self/fd"))
    for until_now in (True, False):
        reader = LogReader(os.fsencode(path), until_now=until_now)
        reader.read(10)
        assert len(os.listdir("/proc/self/fd")) - before == len(files(path))
        reader.close()
        assert len(os.listdir("/proc/self/fd")) == before


def test_memory_is_bounded(tmp_path: Path) -> None:
    """An archive of 1,000 times its size is read in constant memory."""
    path = tmp_path / "c.log"
    pack_file(rotated(tmp_path, entry("x" * 16_000 + "\n", 5) * 6_000))

    def peak() -> int:
        return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])

    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    assert len(read(path, tail=3_000)) == 3_000 * 16_001
    assert peak() - before < 150_000, "twice the result, and no more"


def test_reading_from_another_thread_while_files_are_packed(tmp_path: Path) -> None:
    """Every read is the log of one moment, without a gap, a repeat or a wrong order."""
    path = tmp_path / "c.log"
    writer = PackedLog(os.fsencode(path), 2000, 5)
    stop, failures, reads = threading.Event(), [], [0]

    def look() -> None:
        chance = random.Random(7)
        while not stop.is_set():
            tail, now = chance.choice((None, 10, 60)), chance.random() < 0.5
            got = [int(line) for line in read(path, tail=tail, until_now=now).split()]
            reads[0] += 1
            # a reader that follows, and of which the writer does not know, may lose what is removed
            if got != (list(range(got[0], got[0] + len(got))) if now and got else sorted(set(got))):
                failures.append(got)

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    number, chance = 0, random.Random(3)
    while reads[0] < 600 and number < 400_000 and not failures:
        count = chance.randrange(1, 40)
        writer.write(1, b"".join(b"%d\n" % index for index in range(number, number + count)))
        number += count
        for file in [file for file in files(path)[:-1] if file.suffix != ".gz"]:
            if chance.random() < 0.5:
                pack_by(writer, file)
    stop.set()
    for thread in threads:
        thread.join()
    writer.close()
    assert not failures and reads[0] > 50


# --- everything at random -------------------------------------------------------------------------

steps_of_a_log = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.lists(st.tuples(st.sampled_from((1, 2)), st.integers(0, 250)), max_size=9)),
        st.tuples(st.just("pack"), st.integers(0, 9)),
        st.tuples(st.just("replace"), st.integers(0, 9)),
        st.tuples(st.just("crash"), st.integers(0, 9)),
        st.tuples(st.just("reopen"), st.none()),
        st.tuples(
            st.just("open"),
            st.fixed_dictionaries(
                {},
                optional={
                    "tail": st.integers(0, 60),
                    "since": st.integers(0, 60),
                    "until": st.integers(0, 60),
                    "until_now": st.booleans(),
                    "stdout": st.booleans(),
                    "timestamps": st.just(True),
                },
            ),
        ),
        st.tuples(st.just("read"), st.tuples(st.integers(0, 9), st.integers(1, 2000))),
    ),
    max_size=60,
)


class Pair:
    """The same output in a log with packed files and in one without. Times differ, so options name
    entries by their number."""

    def __init__(self, place: Path, max_size: int, max_file: int) -> None:
        self.paths = [place / "packed" / "c.log", place / "plain" / "c.log"]
        for path in self.paths:
            path.parent.mkdir()
        self.limits = max_size, max_file
        self.copies: list[tuple[int, Path]] = []
        self.readers: list[tuple[list[LogReader], list[bytearray]]] = []
        self.count = 0
        self.reopen(close=False)

    def reopen(self, *, close: bool = True) -> None:
        if close:
            self.close_writers()
        self.packed = PackedLog(os.fsencode(self.paths[0]), *self.limits)
        self.writers = [self.packed, LogWriter(os.fsencode(self.paths[1]), *self.limits)]

    def close_writers(self) -> None:
        for writer in self.writers:
            writer.close()

    def write(self, lines: list[tuple[int, int]]) -> None:
        for stream, length in lines:
            for writer in self.writers:
                writer.write(stream, b"%d %s\n" % (self.count, b"." * length))
            self.count += 1

    def plain(self) -> list[Path]:
        return [file for file in files(self.paths[0])[:-1] if file.suffix != ".gz"]

    def pack(self, chosen: int) -> None:
        if found := self.plain():
            file = found[chosen % len(found)]
            self.copies.append((file.stat().st_ino, packed_copy(file)))

    def replace(self, chosen: int) -> None:
        """Perhaps after the file has been rotated, packed or removed, and its inode number used
        again."""
        if self.copies:
            inode, copy = self.copies.pop(chosen % len(self.copies))
            if not copy.exists():  # two copies of one file have the same name
                return
            made = copy.stat().st_mtime_ns
            there = [file for file in self.plain() if file.stat().st_mtime_ns == made and file.stat().st_ino == inode]
            assert self.packed.replace(inode, os.fsencode(copy)) == bool(there)
            assert not copy.exists()

    def crash(self, chosen: int) -> None:
        """The monitor is killed in the middle of a replacement."""
        if found := self.plain():
            file = found[chosen % len(found)]
            packed_copy(file).rename(file.with_name(file.name + ".gz"))
            self.check()
            self.reopen()

    def open(self, options: dict[str, Any]) -> None:
        known = dict(options)
        tail = known.pop("tail", None)
        since, until = known.pop("since", None), known.pop("until", None)
        made = []
        for path in self.paths:
            entries = entries_of(path)
            if since is not None and since < len(entries):
                known["since_ns"] = entries[since][2]
            if until is not None and until < len(entries):
                known["until_ns"] = entries[until][2]
            reader = LogReader(os.fsencode(path), **known)
            if tail is not None:
                reader.seek_tail(tail)
            made.append(reader)
        self.readers.append((made, [bytearray(), bytearray()]))

    def read(self, chosen: int, chunk: int) -> None:
        if self.readers:
            readers, got = self.readers[chosen % len(self.readers)]
            for index, reader in enumerate(readers):
                got[index] += reader.read(chunk)

    def check(self) -> None:
        """What is on disk."""
        found = [[item[:2] for item in entries_of(path)] for path in self.paths]
        assert found[0] == found[1]
        assert read(self.paths[0]) == read(self.paths[1])

    def end(self) -> None:
        self.close_writers()
        self.check()
        for readers, got in self.readers:
            for index, reader in enumerate(readers):
                got[index] += everything(reader)
                reader.close()
            texts = [[line.rpartition(b"Z ")[2] for line in each.splitlines()] for each in got]
            assert texts[0] == texts[1]
        for _, copy in self.copies:
            copy.unlink(missing_ok=True)


@settings(max_examples=200)
@given(st.integers(200, 2500), st.integers(2, 7), steps_of_a_log)
def test_as_a_log_without_packed_files(max_size: int, max_file: int, steps: list[tuple[str, Any]]) -> None:
    with directory() as place:
        pair = Pair(place, max_size, max_file)
        for what, how in steps:
            match what:
                case "reopen":
                    pair.reopen()
                case "read":
                    pair.read(*how)
                case _:
                    getattr(pair, what)(how)
        pair.end()
        assert not any(".new" in name for name in names(pair.paths[0]))
