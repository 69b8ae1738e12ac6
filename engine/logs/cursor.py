"""The position up to which a spool is delivered, as its file `cursor` has it.

The shipper alone writes the file, at most once a second and each time whole: 64 bytes with a sum.
The board (`_fast/board`) has newer positions, but does not outlive the host. What a position means
when its file has been truncated or removed: `_fast/spool`.

Only the standard library is imported, because the monitor loads this module.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

_FORM = struct.Struct("<8sQqqqqq")
_SUM = struct.Struct("<Q")
_MAGIC = b"engcur1\0"

SIZE = _FORM.size + _SUM.size
"""Bytes of the file."""


class Cursor(NamedTuple):
    """Everything before byte `offset` of the file with that `inode` is acknowledged.

    `bytes`, `lines`: how much that is since the spool began. `dropped_lines`, `dropped_bytes`: how
    much of it was never sent, because the spool was not blocking and fell behind.
    """

    inode: int = 0
    offset: int = 0
    bytes: int = 0
    lines: int = 0
    dropped_lines: int = 0
    dropped_bytes: int = 0

    @property
    def position(self) -> tuple[int, int, int, int]:
        """As the board and `Spool.join` take it."""
        return self.inode, self.offset, self.bytes, self.lines


def encode(cursor: Cursor) -> bytes:
    data = _FORM.pack(_MAGIC, *cursor)
    return data + _SUM.pack(zlib.crc32(data))


def decode(data: bytes) -> Cursor | None:
    """None if it is not a whole cursor, for example after a crash of the host."""
    if len(data) != SIZE or not data.startswith(_MAGIC):
        return None
    if _SUM.unpack_from(data, _FORM.size)[0] != zlib.crc32(data[: _FORM.size]):
        return None
    _, *fields = _FORM.unpack_from(data)
    cursor = Cursor(*fields)
    return cursor if min(cursor) >= 0 else None


def newest(*positions: tuple[int, int, int, int] | None) -> tuple[int, int, int, int]:
    """The one that is furthest in the spool; the spool's beginning without any."""
    return max((each for each in positions if each is not None), key=lambda each: each[2], default=(0, 0, 0, 0))
