"""Reception of an image archive: layers are extracted while it arrives, everything else is kept in
a file for `archive.Archive`.

Only the manifest names the members that are layers, and most programs write it last. So a member
that looks like a layer is extracted at once, and the file has a hole in its place. If no image uses
the layer, it is removed. A member of the same size as an existing layer is probably that layer, so
it is kept in the file and not extracted.

Owns: extracted layers until an image takes them over, and the file. Not here: the archive's
documents (archive.py), extraction (layers.py).
Raises: InvalidParameter for a bad archive, after the rest of the body was read: a client that is
        still sending would not read the reply.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import NamedTuple

from engine._fast.tar import ArchiveError, Reader
from engine.errors import EngineError, InvalidParameter, ServerError, reason
from engine.images import layers, tarsplit
from engine.images.layers import Extracted, extract, extract_and_hash
from engine.images.spans import Span
from engine.storage.compression import MAGIC, Inflated, Source, compression_of, content
from engine.system import files
from engine.system.feed import Feed, process
from engine.system.threads import opened, uninterrupted

MAX_EARLY = 1000
"""Members that are extracted while they arrive. Later ones are kept in the file."""

_BLOCK = 512
_USTAR = slice(257, 262)


class Received(NamedTuple):
    """A received archive."""

    span: Span
    early: dict[int, Extracted]
    """By the offset of the member's content, which is a hole in the file."""


@contextlib.asynccontextmanager
async def received(
    body: AsyncIterator[bytes], directory: Path, making: layers.Layers, present: Iterable[Path]
) -> AsyncIterator[Received]:
    """Receive the archive in `body`, compressed or not, and keep it for the time of the context.
    `present`: directories of the existing layers.

    Raises InvalidParameter, and ServerError when the disk is full.
    """
    feed = Feed(making.processors)  # one body too many is refused before anything is done
    try:
        spool = await opened(asyncio.to_thread(files.temporary_file, directory))
    except OSError as error:
        raise ServerError(f"receiving an archive into {directory}: {reason(error)}") from error
    receiving = _Receiving(spool, making, present)
    try:
        try:
            size = await process(feed, body, receiving.run)
        except OSError as error:
            raise ServerError(f"receiving an archive into {directory}: {reason(error)}") from error
        yield Received(Span(spool, 0, size), receiving.early)
    finally:
        await uninterrupted(making.forget(receiving.early.values()))
        # An unlinked file: closing it frees its blocks, which may take a while.
        await uninterrupted(asyncio.to_thread(os.close, spool))


class _Tee:
    """Passes the stream to the reader of members, and writes it to the file, except for the layers
    that are extracted early.
    """

    def __init__(self, source: Source, spool: int) -> None:
        self._source = source
        self._spool = spool
        self.at = 0
        """Bytes of the stream that were read."""
        self.kept_from = 0
        """Bytes before this offset are not written to the file."""

    def read(self, size: int) -> bytes:
        data = self._source.read(size)
        self.at += len(data)
        return data

    def readinto(self, buffer: memoryview) -> int:
        at = self.at
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        skipped = max(self.kept_from - at, 0)
        if skipped < len(data):
            files.write_sparse(self._spool, memoryview(data)[skipped:], at + skipped)
        return len(data)


class _Member:
    """The content of a reader's current member, readable once; optionally hashed as received."""

    def __init__(self, reader: Reader, tee: _Tee, size: int, digest: layers.Hashing | None = None) -> None:
        self._reader = reader
        self._tee = tee
        self._left = size
        self._early = memoryview(reader.take_buffered())
        self._digest = digest

    def read(self, size: int = 1 << 18) -> bytes:
        size = min(size, self._left)
        if self._early:
            data, self._early = bytes(self._early[:size]), self._early[size:]
        else:
            data = self._tee.read(size) if size else b""
            self._reader.passed(len(data))
        self._left -= len(data)
        if self._digest is not None:
            self._digest.update(data)
        return data

    def readinto(self, buffer: memoryview) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class _Receiving:
    """The work of the thread."""

    def __init__(self, spool: int, making: layers.Layers, present: Iterable[Path]) -> None:
        self._spool = spool
        self._making = making
        self._loop = asyncio.get_running_loop()
        self._present = present
        self._sizes: set[int] | None = None
        self.early: dict[int, Extracted] = {}

    def run(self, feed: Feed) -> int:
        """Receive the whole archive. Returns the size of the file."""
        with self._making.processors:
            try:
                source = content(feed)
                size = self._walk(_Tee(source, self._spool))
                while source.read(1 << 18):
                    pass
                os.ftruncate(self._spool, size)
                return size
            except (ArchiveError, InvalidParameter) as error:
                feed.skip()
                if isinstance(error, ArchiveError):
                    raise InvalidParameter(f"invalid archive: {error}") from error
                raise

    def _walk(self, tee: _Tee) -> int:
        reader = Reader(tee)
        while (member := reader.following()) is not None:
            kind, offset, size = member
            if kind == "0" and size > 0 and (packed := self._layer(reader.peek(_BLOCK), size)) is not None:
                tee.kept_from = offset + size
                self._extract_early(reader, tee, offset, size, packed)
        return tee.at

    def _layer(self, head: bytes, size: int) -> str | None:
        """The compression of a member that is extracted at once; None for any other member."""
        if len(self.early) == MAX_EARLY:
            return None
        packed = compression_of(head[:MAGIC])
        if packed:
            return packed
        return "" if head[_USTAR] == b"ustar" and size not in self._known() else None

    def _known(self) -> set[int]:
        if self._sizes is None:
            self._sizes = set()
            for diff in self._present:
                with contextlib.suppress(ServerError):  # deleted meanwhile
                    self._sizes.add(tarsplit.stream_size(diff))
        return self._sizes

    def _extract_early(self, reader: Reader, tee: _Tee, offset: int, size: int, packed: str) -> None:
        early = self.early[offset] = Extracted(size)
        early.ingest = asyncio.run_coroutine_threadsafe(self._making.ingest(), self._loop).result()
        early.content = early.ingest.path
        try:
            if packed:
                early.result = extract_and_hash(early.ingest, Inflated(_Member(reader, tee, size), packed))
                return
            digest = layers.Hashing()
            try:
                extracted = extract(early.ingest, _Member(reader, tee, size, digest))
            finally:
                diff_id = digest.finish()
            early.result = extracted._replace(diff_id=diff_id)
        except EngineError as error:
            early.result = error


__all__ = ["Received", "received"]
