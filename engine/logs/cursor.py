"""The file `cursor` of a spool: up to where its target has acknowledged it. The shipper writes it,
the monitor and the daemon read it.

One write of 64 bytes. Its sum shows whether a crash of the host has torn it; then the whole spool
counts as unacknowledged. Few modules are imported, because the monitor loads this one.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

_FORMAT = struct.Struct("<8sQqqqqq")
_SUM = struct.Struct("<Q")
_MAGIC = b"engcur1\0"

SIZE = _FORMAT.size + _SUM.size


class Cursor(NamedTuple):
    """(`inode`, `offset`): the place in the spool's files. `bytes`, `lines`: what precedes it since
    the spool began, with what was dropped because the target was too slow."""

    inode: int = 0
    offset: int = 0
    bytes: int = 0
    lines: int = 0
    dropped_lines: int = 0
    dropped_bytes: int = 0


def encode(cursor: Cursor) -> bytes:
    data = _FORMAT.pack(_MAGIC, *cursor)
    return data + _SUM.pack(zlib.crc32(data))


def decode(data: bytes) -> Cursor | None:
    """None if it is no cursor."""
    if len(data) != SIZE or _SUM.unpack_from(data, _FORMAT.size)[0] != zlib.crc32(data[: _FORMAT.size]):
        return None
    magic, *values = _FORMAT.unpack_from(data)
    return Cursor(*values) if magic == _MAGIC else None
