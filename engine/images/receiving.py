"""An archive of images while it comes: its layers are laid out at once, what else it holds is kept in a file for `archive.Archive` to read.

Which members are layers only the manifest says, which most programs write last. So what looks like a layer is taken for one: the file has a
hole in its place. The layer is then there before its image is known, and goes again if none wants it. A layer as long as one that is here
already is probably that one: it is kept in the file, and not laid out in vain.

Owns: what was laid out, until a layer was made of it; the file. Not here: what an archive says (archive.py), extraction (layers.py).
Raises: InvalidParameter for what is no archive, when all of it has come: a client that is still sending would not read the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from engine._fast.tar import ArchiveError, Reader
from engine.errors import EngineError, InvalidParameter, ServerError
from engine.images import layers
from engine.images.feed import Feed
from engine.images.layers import MAGIC, Inflated, Laid, Span, compression_of, laid_out
from engine.system import files
from engine.system.threads import in_own_thread, uninterrupted

MAX_LAID = 1000
"""Members that are laid out at once; what comes after them is kept in the file."""

_BLOCK = 512
_USTAR = slice(257, 262)
_ZEROS = bytes(1 << 20)


class Received(NamedTuple):
    """An archive that has come."""

    span: Span
    laid: dict[int, Laid]
    """By the offset of the member's content, which is a hole in the file."""


@contextlib.asynccontextmanager
async def received(
    body: AsyncIterator[bytes], directory: Path, making: layers.Layers, present: Iterable[Path]
) -> AsyncIterator[Received]:
    """The archive in `body`, compressed or not, for as long as the context lasts. `present`: directories of the layers that are here.

    Raises InvalidParameter, and ServerError when the disk does not take it.
    """
    feed = Feed(making.processors)
    receiving = _Receiving(feed, making, present)
    try:
        receiving.spool = await uninterrupted(asyncio.to_thread(files.temporary_file, directory))
    except OSError as error:
        raise ServerError(f"receiving an archive into {directory}: {error.strerror}") from error
    try:
        feeding = asyncio.ensure_future(feed.feed(body))
        walking = in_own_thread(receiving.run, "archive")
        try:
            size = await asyncio.shield(walking)
        except OSError as error:
            raise ServerError(f"receiving an archive into {directory}: {error.strerror}") from error
        finally:
            feeding.cancel()
            if not walking.done():  # for who has left: the thread then gets no more
                feed.cut()
            both: list[asyncio.Future[Any]] = [feeding, walking]
            await uninterrupted(asyncio.wait(both))
            for each in both:
                if not each.cancelled():
                    each.exception()  # who has left does not hear of it, and asyncio need not say so
            feed.close()
        yield Received(Span(receiving.spool, 0, size), receiving.laid)
    finally:
        await uninterrupted(making.forget(receiving.laid.values()))
        # It has no name: what it takes is freed by this, which may take a while.
        await uninterrupted(asyncio.to_thread(os.close, receiving.spool))


class _Source(Protocol):
    def read(self, size: int, /) -> bytes: ...


class _Tee:
    """The stream on its way to the reader of members; what is no layer's goes into the file."""

    def __init__(self, source: _Source, spool: int) -> None:
        self._source = source
        self._spool = spool
        self.at = 0
        """Bytes of the stream that were read."""
        self.kept_from = 0
        """What comes before this offset is not for the file."""

    def read(self, size: int) -> bytes:
        data = self._source.read(size)
        self.at += len(data)
        return data

    def readinto(self, buffer: memoryview) -> int:
        at = self.at
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        skipped = max(self.kept_from - at, 0)
        # Zeros become holes: what a few megabytes can be inflated to without end takes no space.
        if skipped < len(data) and data != _ZEROS[: len(data)]:
            kept = memoryview(data)[skipped:]
            while kept:
                kept = kept[os.pwrite(self._spool, kept, at + len(data) - len(kept)) :]
        return len(data)


class _Member:
    """The content of the member that a reader stands at, once through; hashed as it is, if that is asked for."""

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

    def __init__(self, feed: Feed, making: layers.Layers, present: Iterable[Path]) -> None:
        self._feed = feed
        self._making = making
        self._loop = asyncio.get_running_loop()
        self._present = present
        self._sizes: set[int] | None = None
        self.spool = -1
        self.laid: dict[int, Laid] = {}

    def run(self) -> int:
        """The size of the file, when all has come."""
        with self._making.processors:
            try:
                kind = compression_of(self._feed.head())
                source: _Source = Inflated(self._feed, kind) if kind else self._feed
                size = self._walk(_Tee(source, self.spool))
                while source.read(1 << 18):
                    pass
                os.ftruncate(self.spool, size)
                return size
            except (ArchiveError, InvalidParameter) as error:
                while self._feed.read():
                    pass
                if isinstance(error, ArchiveError):
                    raise InvalidParameter(f"invalid archive: {error}") from error
                raise

    def _walk(self, tee: _Tee) -> int:
        reader = Reader(tee)
        while (member := reader.following()) is not None:
            kind, offset, size = member
            if kind == "0" and size > 0 and (packed := self._layer(reader.peek(_BLOCK), size)) is not None:
                tee.kept_from = offset + size
                self._lay_out(reader, tee, offset, size, packed)
        return tee.at

    def _layer(self, head: bytes, size: int) -> str | None:
        """How a member is packed, if it is to be laid out at once."""
        if len(self.laid) == MAX_LAID:
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
                    self._sizes.add(layers.stream_size(diff))
        return self._sizes

    def _lay_out(self, reader: Reader, tee: _Tee, offset: int, size: int, packed: str) -> None:
        laid = self.laid[offset] = Laid(size)
        laid.draft = asyncio.run_coroutine_threadsafe(self._making.draft(), self._loop).result()
        laid.content = laid.draft.path
        try:
            if packed:
                laid.result = layers.lay_out(laid.draft, Inflated(_Member(reader, tee, size), packed))
                return
            digest = self._making.hashing()
            try:
                extracted = laid_out(laid.draft, _Member(reader, tee, size, digest))
            finally:
                diff_id = digest.finish()
            laid.result = extracted._replace(diff_id=diff_id)
        except EngineError as error:
            laid.result = error


__all__ = ["Received", "received"]
