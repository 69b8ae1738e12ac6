"""Packed files of a log: any program can read them, and their labels are right."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine._fast.packed import HEADER, label, pack
from engine._fast.spool import PackedLog
from tests.unit.fast.jsonlogs import (  # noqa: F401 (_descriptors: a fixture)
    _descriptors,
    directory,
    entry,
    pack_file,
    pack_foreign,
    read,
)

DATA = entry("a\n", 7) + b"no entry\n" + entry("b" * 300_000, 9) + entry("end", 11) + b"rest"


def label_of(path: Path) -> tuple[int, int, int, int, int, int] | None:
    with path.open("rb") as file:
        return label(file.fileno())


def rotated(place: Path, data: bytes = DATA, number: int = 1) -> Path:
    path = place / f"c.log.{number}"
    path.write_bytes(data)
    return path


def test_gzip_with_a_label(tmp_path: Path) -> None:
    path = rotated(tmp_path)
    os.utime(path, ns=(5, 1_700_000_000_123_456_789))
    inode, modified = path.stat().st_ino, path.stat().st_mtime_ns
    packed = pack_file(path)
    assert gzip.decompress(packed.read_bytes()) == DATA
    assert label_of(packed) == (inode, len(DATA), 4, 3, 7, 11)
    assert packed.stat().st_mtime_ns == modified


def test_an_empty_file(tmp_path: Path) -> None:
    packed = pack_file(rotated(tmp_path, b""))
    assert gzip.decompress(packed.read_bytes()) == b""
    assert (label_of(packed) or ())[1:] == (0, 0, 0, 0, 0)


def test_a_line_too_long_for_an_entry(tmp_path: Path) -> None:
    data = entry("a\n", 7) + b"x" * (9 << 20) + b"\n" + entry("b\n", 9)
    packed = pack_file(rotated(tmp_path, data))
    assert (label_of(packed) or ())[1:] == (len(data), 3, 2, 7, 9)


@settings(max_examples=60)
@given(st.lists(st.sampled_from([b"x", b"{}", b"\n", entry("a\n", 5), entry("b", 6), b"y" * 70_000]), max_size=30))
def test_the_label_counts_what_is_there(parts: list[bytes]) -> None:
    data = b"".join(parts)
    with directory() as place:
        packed = pack_file(rotated(place, data))
        entries = [line for line in data.split(b"\n")[:-1] if line + b"\n" in (entry("a\n", 5), entry("b", 6))]
        times = [5 if b"a" in line.split(b'"')[3] else 6 for line in entries] or [0]
        counts = data.count(b"\n"), len(entries)
        assert (label_of(packed) or ())[1:] == (len(data), *counts, times[0], max(times[0], times[-1]))
        assert gzip.decompress(packed.read_bytes()) == data


def test_other_gzip_files_have_no_label(tmp_path: Path) -> None:
    assert label_of(pack_foreign(rotated(tmp_path))) is None
    named = tmp_path / "named.gz"
    with gzip.GzipFile(named, "wb") as file:
        file.write(DATA)
    assert label_of(named) is None


@settings(max_examples=200)
@given(st.integers(0, HEADER), st.binary(max_size=60), st.booleans())
def test_any_header(at: int, noise: bytes, cut: bool) -> None:
    """A damaged label is none, or one that cannot be told from a good one."""
    with directory() as place:
        packed = pack_file(rotated(place))
        data = packed.read_bytes()
        packed.write_bytes(data[:at] + noise + (b"" if cut else data[at + len(noise) :]))
        found = label_of(packed)
        if found is not None:
            _, size, lines, entries, first, last = found
            assert size >= lines >= entries >= 0 and last >= first
        read(place / "c.log", tail=3, timestamps=True)
        read(place / "c.log", since_ns=8)


def test_a_file_that_shrinks_meanwhile_is_packed_as_far_as_it_goes(tmp_path: Path) -> None:
    path = rotated(tmp_path, entry("x" * 1000 + "\n", 3) * 1000)
    target = tmp_path / "copy"

    def cut() -> None:
        os.truncate(path, 300_000)

    with path.open("rb") as source, target.open("w+b") as into:
        pack(source.fileno(), into.fileno(), cut)
    found = label_of(target)
    assert found is not None and found[1] == 300_000 == len(gzip.decompress(target.read_bytes()))


def test_a_checkpoint_ends_the_work(tmp_path: Path) -> None:
    def stop() -> None:
        raise InterruptedError

    with (
        rotated(tmp_path).open("rb") as source,
        (tmp_path / "copy").open("w+b") as into,
        pytest.raises(InterruptedError),
    ):
        pack(source.fileno(), into.fileno(), stop)
    assert label_of(tmp_path / "copy") is None


def test_a_full_disk(tmp_path: Path) -> None:
    with (
        rotated(tmp_path).open("rb") as source,
        open("/dev/full", "r+b", buffering=0) as into,
        pytest.raises(OSError, match="No space left"),
    ):
        pack(source.fileno(), into.fileno())


def test_the_size_of_a_file_without_a_label(tmp_path: Path) -> None:
    """Its trailer has it, which a log uses that counts how much it keeps."""
    pack_foreign(rotated(tmp_path, DATA))
    log = PackedLog(os.fsencode(tmp_path / "c.log"), len(DATA), 2)
    log.close()
    assert read(tmp_path / "c.log").startswith(b"a\n")
