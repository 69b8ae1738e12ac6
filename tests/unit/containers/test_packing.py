"""Which rotated files are compressed, and how a compressed one takes its place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.containers import packing
from engine.logs import cursor
from engine.logs.cursor import Cursor

LINE = b'{"log":"x\\n","stream":"stdout","time":"2026-01-01T00:00:00.000000001Z"}\n'


@pytest.fixture
def newest(tmp_path: Path) -> Path:
    """A log with four files, of which the oldest is compressed."""
    for name in ("spool.log", "spool.log.1", "spool.log.2"):
        (tmp_path / name).write_bytes(LINE * 3)
    (tmp_path / "spool.log.3.gz").write_bytes(b"")
    (tmp_path / "spool.log.1.other").write_bytes(b"")
    return tmp_path / "spool.log"


def names(found: list[packing.Rotated]) -> list[str]:
    return [each.path.name for each in found]


def acknowledge(newest: Path, name: str, offset: int) -> None:
    inode = (newest.parent / name).stat().st_ino
    (newest.parent / "cursor").write_bytes(cursor.encode(Cursor(inode, offset, 1, 1)))


def test_rotated_files_newest_first(newest: Path) -> None:
    assert names(packing.packable(newest)) == ["spool.log.1", "spool.log.2"]


@pytest.mark.parametrize(
    ("name", "offset", "expected"),
    [
        ("spool.log", 0, ["spool.log.1", "spool.log.2"]),
        ("spool.log.1", 3 * len(LINE), ["spool.log.1", "spool.log.2"]),
        ("spool.log.1", 3 * len(LINE) - 1, ["spool.log.2"]),
        ("spool.log.2", 1, []),
    ],
)
def test_of_a_spool_only_what_is_delivered(newest: Path, name: str, offset: int, expected: list[str]) -> None:
    acknowledge(newest, name, offset)
    assert names(packing.packable(newest, spool=True)) == expected


@pytest.mark.parametrize("content", [None, b"", b"\0" * cursor.SIZE])
def test_nothing_of_a_spool_without_a_position(newest: Path, content: bytes | None) -> None:
    if content is not None:
        (newest.parent / "cursor").write_bytes(content)
    assert packing.packable(newest, spool=True) == []


def test_nothing_when_the_position_is_in_an_unknown_file(newest: Path) -> None:
    (newest.parent / "cursor").write_bytes(cursor.encode(Cursor(1, 0, 1, 1)))
    assert packing.packable(newest, spool=True) == []


def test_a_compressed_file_takes_the_place_of_its_original_wherever_that_is(newest: Path) -> None:
    file = packing.packable(newest)[0]
    temporary = packing._compress(file)
    assert temporary is not None
    os.rename(newest.parent / "spool.log.2", newest.parent / "spool.log.4")
    os.rename(newest.parent / "spool.log.1", newest.parent / "spool.log.2")
    packing._replace(newest, file.inode, temporary)
    assert not (newest.parent / "spool.log.2").exists()
    assert (newest.parent / "spool.log.2.gz").exists()
    assert not list(newest.parent.glob("*.packing"))


def test_a_file_that_has_gone_or_changed_keeps_nothing(newest: Path) -> None:
    file = packing.packable(newest)[0]
    temporary = packing._compress(file)
    assert temporary is not None
    os.utime(file.path, ns=(1, 1))
    packing._replace(newest, file.inode, temporary)
    assert file.path.exists()
    assert not temporary.exists()
    file.path.unlink()
    assert packing._compress(file) is None


def test_what_an_earlier_daemon_has_left_is_removed(newest: Path) -> None:
    (newest.parent / ".spool.log.1.77.packing").write_bytes(b"")
    packing.remove_temporary(newest)
    assert not list(newest.parent.glob(".*.packing"))
    assert len(list(newest.parent.iterdir())) == 5
