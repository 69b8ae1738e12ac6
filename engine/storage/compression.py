"""Compressed streams: detects the format by the first bytes, and reads the content.

Not here: the origin and meaning of the bytes. Threads: an `Inflated` belongs to one thread at a
time; zlib, zstd, xz and bzip2 release the GIL while they work. Raises: InvalidParameter for a
damaged or truncated stream.
"""

from __future__ import annotations

import bz2
import lzma
from typing import Any, NamedTuple, Protocol

import zstandard
from isal import igzip_lib

from engine.errors import InvalidParameter, words

XZ_MEMORY = 80 << 20
"""Memory in bytes that decompressing an xz stream may take. `xz -9` needs 65 MiB."""
ZSTD_WINDOW = 128 << 20
"""Largest window of a zstd frame in bytes, as in the zstd program."""

_CHUNK = 256 * 1024

_DAMAGE: Any = (
    OSError,
    EOFError,
    ValueError,
    lzma.LZMAError,
    igzip_lib.error,
    zstandard.ZstdError,
)


class Compression(NamedTuple):
    """A compression format: its name, and the magic bytes at the beginning."""

    name: str
    magic: bytes


COMPRESSIONS = (
    Compression("gzip", b"\x1f\x8b"),
    Compression("bzip2", b"BZh"),
    Compression("xz", b"\xfd7zXZ\x00"),
    Compression("zstd", b"\x28\xb5\x2f\xfd"),
)


MAGIC = 8
"""Bytes at the beginning of a stream that decide its compression."""


def compression_of(head: bytes) -> str:
    """`gzip`, `bzip2`, `xz` or `zstd`, by the first `MAGIC` bytes of a stream. Empty if it is none
    of these.
    """
    for known in COMPRESSIONS:
        if head.startswith(known.magic):
            return known.name
    # Skippable frames may come first (zstd specification, 3.1.2)
    return "zstd" if len(head) >= 4 and head[1:4] == b"\x2a\x4d\x18" and head[0] & 0xF0 == 0x50 else ""


class _Unpacker(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...


class Readable(Protocol):
    """A stream of bytes."""

    def read(self, size: int = -1, /) -> bytes:
        """Some bytes, at most `size`; none at the end."""


class Source(Readable, Protocol):
    """One that can fill a buffer, as `_fast.tar` asks for."""

    def readinto(self, buffer: memoryview, /) -> int: ...


class Peekable(Source, Protocol):
    """One whose beginning can be looked at."""

    def head(self, size: int, /) -> bytes: ...


class Inflated:
    """The content of a compressed stream, as a source for `_fast.tar`. The stream may consist of
    several members or frames.

    Produces at most one buffer at a time, whatever the compression ratio. Raises InvalidParameter
    for a damaged or truncated stream. One thread at a time.
    """

    def __init__(self, packed: Readable, kind: str) -> None:
        self._kind = kind
        self._input = packed
        self._unpacker: _Unpacker | None = None
        self._rest = b""
        self._member = False
        """One has been found."""
        self._frames: Any = None
        if kind == "zstd":
            source: Any = self._input
            self._frames = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW).stream_reader(
                source, read_size=_CHUNK, read_across_frames=True
            )

    def _new_unpacker(self) -> _Unpacker:
        if self._kind == "gzip":
            unpacker: _Unpacker = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
            return unpacker
        if self._kind == "bzip2":
            return bz2.BZ2Decompressor()
        return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY)

    def readinto(self, buffer: memoryview) -> int:
        try:
            if self._frames is not None:
                return int(self._frames.readinto(buffer))
            data = self._next(len(buffer))
        except _DAMAGE as error:
            if isinstance(error, OSError) and error.errno:
                raise
            raise InvalidParameter(f"damaged {self._kind} stream: {words(error)}") from error
        buffer[: len(data)] = data
        return len(data)

    def read(self, size: int = _CHUNK) -> bytes:
        """Some bytes, none at the end. Raises as `readinto`."""
        buffer = bytearray(size)
        got = self.readinto(memoryview(buffer))
        return bytes(memoryview(buffer)[:got])

    def _next(self, room: int) -> bytes:
        while True:
            if self._unpacker is None:
                # Padding of zeros may follow the last member (gzip(1), xz(1)).
                more = self._rest or self._input.read(_CHUNK)
                while more and not (more := more.lstrip(b"\0")):
                    more = self._input.read(_CHUNK)
                if len(more) == 1:
                    more += self._input.read(_CHUNK)
                if self._member and self._kind == "gzip" and not more.startswith(b"\x1f\x8b"):
                    # Garbage behind the last member is passed over: gzip(1).
                    while more:
                        more = self._input.read(_CHUNK)
                if not more:
                    return b""
                self._member = True
                self._rest = more
                self._unpacker = self._new_unpacker()
            unpacker = self._unpacker
            chunk = b""
            if unpacker.needs_input:
                chunk, self._rest = self._rest or self._input.read(_CHUNK), b""
                if not chunk:
                    raise EOFError("the stream ends before its end mark")
            data = unpacker.decompress(chunk, room)
            if unpacker.eof:
                self._rest = unpacker.unused_data
                self._unpacker = None
            if data:
                return data


def content(stream: Peekable) -> Source:
    """The stream, or its content if it is compressed."""
    kind = compression_of(stream.head(MAGIC))
    return Inflated(stream, kind) if kind else stream


__all__ = ["COMPRESSIONS", "MAGIC", "Compression", "Inflated", "Readable", "Source", "compression_of", "content"]
