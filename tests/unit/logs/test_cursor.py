"""The file with the position up to which a spool is delivered."""

from __future__ import annotations

import struct
import zlib

from hypothesis import given
from hypothesis import strategies as st

from engine.logs import cursor
from engine.logs.cursor import Cursor

number = st.integers(0, (1 << 63) - 1)


def test_the_form() -> None:
    """Never to be changed: a daemon of another version reads it."""
    data = cursor.encode(Cursor(1, 2, 3, 4, 5, 6))
    assert len(data) == cursor.SIZE == 64
    assert data[:56] == struct.pack("<8sQqqqqq", b"engcur1\0", 1, 2, 3, 4, 5, 6)
    assert data[56:] == struct.pack("<Q", zlib.crc32(data[:56]))


@given(st.builds(Cursor, st.integers(0, (1 << 64) - 1), number, number, number, number, number))
def test_what_is_written_is_read(wanted: Cursor) -> None:
    assert cursor.decode(cursor.encode(wanted)) == wanted


@given(st.integers(0, 63), st.integers(1, 255))
def test_a_damaged_file_is_no_cursor(at: int, change: int) -> None:
    data = bytearray(cursor.encode(Cursor(1, 2, 3, 4, 5, 6)))
    assert cursor.decode(bytes(data[:at])) is None
    data[at] ^= change
    assert cursor.decode(bytes(data)) is None


@given(st.binary(max_size=80))
def test_any_bytes(data: bytes) -> None:
    assert cursor.decode(data) is None


def test_negative_numbers_are_no_position() -> None:
    assert cursor.decode(cursor.encode(Cursor(1, -2, 3, 4))) is None


def test_the_newest() -> None:
    assert cursor.newest() == cursor.newest(None) == (0, 0, 0, 0)
    assert cursor.newest(None, (1, 2, 3, 4), (5, 6, 2, 9)) == (1, 2, 3, 4)
