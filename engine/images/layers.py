"""Layers on their way into the snapshotter: inflated, verified and laid out in threads, each at most once however many want it.

Owns: the threads that extract, and the layers in the making. Not here: where the bytes come from (archive.py), which layers make an image
and when they go again (store.py).
"""

from __future__ import annotations

import asyncio
import bz2
import contextlib
import hashlib
import lzma
import os
import struct
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import zstandard
from isal import igzip_lib

from engine._fast import layer as _layer
from engine._fast import recipe as _recipe
from engine._fast import tar as _tar
from engine.errors import EngineError, InvalidParameter, ServerError
from engine.storage.snapshots import Draft, Layer, Snapshots
from engine.system import files
from engine.system.threads import batch_threads, uninterrupted

T = TypeVar("T")

XZ_MEMORY = 80 << 20
"""Bytes that an xz stream may ask for: `xz -9` needs 65 MiB."""
ZSTD_WINDOW = 128 << 20
"""Bytes that a zstd frame may look back: the limit of the zstd program too."""

FOLLOWING = 6
"""Layers that are laid out while they are received; more wait until they are whole."""

RECIPE = "recipe"
"""The file beside a layer's `diff` that makes its stream again."""

_SIZE = struct.Struct("<Q")
_LITERAL = struct.Struct("<QQI")
"""The head of a record whose bytes follow it."""
_CHUNK = 256 * 1024
_HASH_CHUNK = 1 << 20
_HASH_WAITING = 4 << 20
"""Bytes that may wait for the thread that hashes them."""
_POLL = 0.1
"""Seconds between two reports of progress."""


_DAMAGE: Any = (
    OSError,
    EOFError,
    ValueError,
    lzma.LZMAError,
    igzip_lib.error,
    zstandard.ZstdError,
)


class Span(NamedTuple):
    """Bytes of a file: a layer, or a whole archive, as it was received."""

    descriptor: int
    offset: int
    size: int

    def read(self, limit: int) -> bytes:
        """All of it. Raises InvalidParameter when it is larger than `limit` bytes or the file ends before it."""
        if self.size > limit:
            raise InvalidParameter(f"a document of {self.size} bytes is larger than the {limit} that are allowed")
        data = os.pread(self.descriptor, self.size, self.offset)
        if len(data) != self.size:
            raise InvalidParameter("truncated archive")
        return data


class Incoming:
    """The bytes of a layer whose file is still being received: who reads waits for them.

    `end` is the task that receives; until it has ended well nothing that was read is to be believed. The descriptor is the receiver's.
    """

    offset = 0

    def __init__(self, descriptor: int, size: int, received: Callable[[], int], end: asyncio.Task[None]) -> None:
        """`received`: how many of its bytes are in the file."""
        self.processors: threading.Semaphore | None = None
        """The reading thread has one of these, and lends it while it waits."""
        self.descriptor = descriptor
        self.size = size
        self.end = end
        self._received = received
        self._stopped = False
        self._changed = threading.Condition()
        self._unwanted = asyncio.Event()

    def arrived(self) -> None:
        """There are more. From any thread."""
        with self._changed:
            self._changed.notify_all()

    def stop(self) -> None:
        """Nobody waits any longer: no more bytes will come, or nobody wants them. On the loop."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._unwanted.set()

    def wait(self, at: int, least: int = 1) -> int:
        """How many bytes there are from `at` on, as soon as it is `least` or all. Blocking. Raises ServerError when it was stopped."""
        wanted = min(at + least, self.size)
        if self.processors is None or self._received() >= wanted:
            return self._wait(wanted) - at
        self.processors.release()
        try:
            return self._wait(wanted) - at
        finally:
            self.processors.acquire()

    def _wait(self, wanted: int) -> int:
        with self._changed:
            while (there := self._received()) < wanted and not self._stopped:
                self._changed.wait()
            if self._stopped:
                raise ServerError("a layer was not received")
            return there

    async def whole(self) -> None:
        """Wait until all of it is there and verified. Raises ServerError."""
        unwanted = asyncio.create_task(self._unwanted.wait())
        try:
            await asyncio.wait([self.end, unwanted], return_when=asyncio.FIRST_COMPLETED)
        finally:
            unwanted.cancel()
        if not self.end.done() or self.end.cancelled():
            raise ServerError("a layer was not received")
        self.end.result()


class Compression(NamedTuple):
    """How a stream was packed: its name, and the first bytes that tell."""

    name: str
    magic: bytes


COMPRESSIONS = (
    Compression("gzip", b"\x1f\x8b"),
    Compression("bzip2", b"BZh"),
    Compression("xz", b"\xfd7zXZ\x00"),
    Compression("zstd", b"\x28\xb5\x2f\xfd"),
)


MAGIC = 8
"""Bytes at the beginning of a stream that tell how it is packed."""


def compression(span: Span | Incoming) -> str:
    """See `compression_of`. Blocking when it is `Incoming`."""
    if isinstance(span, Incoming):
        span.wait(0, MAGIC)
    return compression_of(os.pread(span.descriptor, min(span.size, MAGIC), span.offset))


def compression_of(head: bytes) -> str:
    """`gzip`, `bzip2`, `xz`, `zstd`, or `` for none, by the first `MAGIC` bytes of a stream."""
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


class _Bytes:
    """The bytes of a span in order, as they are; counts them."""

    def __init__(self, span: Span | Incoming, work: array[int] | None = None, counts: bool = True) -> None:
        """`work`: see `_work`; who does not count only stops."""
        self._span = span
        self._at = span.offset
        self._work = work if work is not None else _work()
        self._counts = counts

    def _room(self, size: int) -> int:
        """How many bytes can be read now; 0 at the end. Waits for some."""
        if self._work[1]:
            raise ServerError("told to stop")
        left = self._span.offset + self._span.size - self._at
        if left and isinstance(self._span, Incoming):
            left = self._span.wait(self._at)
        return min(left, size)

    def read(self, size: int = -1) -> bytes:
        data = os.pread(self._span.descriptor, self._room(size if size >= 0 else _CHUNK), self._at)
        self._count(len(data))
        return data

    def readinto(self, buffer: memoryview) -> int:
        got = os.preadv(self._span.descriptor, [buffer[: self._room(len(buffer))]], self._at)
        self._count(got)
        return got

    def _count(self, got: int) -> None:
        self._at += got
        if self._counts:
            self._work[0] += got


def _work() -> array[int]:
    """What a thread at work and the loop tell one another: the bytes that are done, and, not 0, that nobody wants it any more."""
    return array("q", [0, 0])


class Readable(Protocol):
    """A stream of bytes."""

    def read(self, size: int = -1, /) -> bytes:
        """Some bytes, at most `size`; none at the end."""


class Inflated:
    """The content of a compressed stream, as a source for `_fast.tar`: one or more members or frames behind each other.

    Takes no more than a buffer at a time whatever the ratio. Raises InvalidParameter for a damaged or truncated stream. One thread at a time.
    """

    def __init__(self, packed: Readable, kind: str) -> None:
        self._kind = kind
        self._input = packed
        self._unpacker: _Unpacker | None = None
        self._rest = b""
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
            raise InvalidParameter(f"damaged {self._kind} stream: {error}") from error
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
                more = (self._rest or self._input.read(_CHUNK)).lstrip(b"\0")
                if not more:
                    more = self._input.read(_CHUNK).lstrip(b"\0")
                if not more:
                    return b""
                self._rest = more
                self._unpacker = self._new_unpacker()
            unpacker = self._unpacker
            given = b""
            if unpacker.needs_input:
                given, self._rest = self._rest or self._input.read(_CHUNK), b""
                if not given:
                    raise EOFError("the stream ends before its end mark")
            data = unpacker.decompress(given, room)
            if unpacker.eof:
                self._rest = unpacker.unused_data
                self._unpacker = None
            if data:
                return data


class Extracted(NamedTuple):
    """A layer laid out: its diff_id, bytes of its files, and what `Snapshots.commit_layer` wants to know."""

    diff_id: str
    size: int
    implied: list[bytes]


class Laid:
    """A layer in an archive that was laid out while the archive came, and of whose bytes nothing else was kept."""

    def __init__(self, size: int) -> None:
        self.size = size
        """Bytes of the member."""
        self.draft: Draft | None = None
        """Where it lies, until a layer was made of that."""
        self.content = Path()
        """The directory, which stays the layer's."""
        self.result: Extracted | EngineError = ServerError("a layer was not received")

    def extracted(self) -> Extracted:
        """Raises what is wrong with it."""
        if isinstance(self.result, EngineError):
            raise self.result
        return self.result

    def read(self, limit: int) -> bytes:
        """As `Span.read`: there is nothing that could be."""
        raise InvalidParameter(f"a layer of {self.size} bytes is no document")


class Hashing:
    """A sha256 that a thread of `pool` works on while another brings the bytes, and lends a hand when that one falls behind, or has not begun."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._digest = hashlib.sha256()
        self._pieces: deque[bytes] = deque()
        self._size = 0
        self._ended = False
        self._changed = threading.Condition()
        self._at_work = threading.Lock()
        pool.submit(self._run)

    def update(self, data: bytes) -> None:
        with self._changed:
            before, self._size = self._size, self._size + len(data)
            self._pieces.append(data)
            if before < _HASH_CHUNK <= self._size:
                self._changed.notify()
        if before > _HASH_WAITING:
            self._work()

    def _run(self) -> None:
        while not self._ended:
            with self._changed:
                while self._size < _HASH_CHUNK and not self._ended:
                    self._changed.wait()
            self._work()

    def _work(self) -> None:
        with self._at_work:
            while True:
                with self._changed:
                    pieces, self._pieces = self._pieces, deque()
                    self._size = 0
                if not pieces:
                    return
                for piece in pieces:
                    self._digest.update(piece)

    def finish(self) -> str:
        """The digest of all; to be called whatever happened."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._work()
        return f"sha256:{self._digest.hexdigest()}"


def digest_of(span: Span, work: array[int] | None = None) -> str:
    """The diff_id of a layer: digest of its uncompressed stream. Blocking; ServerError when `work` tells it to stop."""
    kind = compression(span)
    given = _Bytes(span, work, counts=False)
    source = Inflated(given, kind) if kind else given
    hashed = hashlib.sha256()
    # Read, not mapped: the pages of a mapped file would count as the daemon's memory.
    buffer = memoryview(bytearray(_HASH_CHUNK))
    while size := source.readinto(buffer):
        hashed.update(buffer[:size])
    return f"sha256:{hashed.hexdigest()}"


def inflate(span: Span, kind: str, target: int, stop: threading.Event) -> int:
    """Write the content of a compressed span to the descriptor of an empty file; its size. Blocking; ends early when it is told to `stop`.

    Zeros become holes: what a few megabytes can be inflated to without end takes no space.
    """
    source = Inflated(_Bytes(span), kind)
    buffer = memoryview(bytearray(_CHUNK))
    zeros = bytes(_CHUNK)
    size = 0
    while not stop.is_set() and (got := source.readinto(buffer)):
        piece = buffer[:got]
        if piece.tobytes() != zeros[:got]:
            while piece:
                piece = piece[os.pwrite(target, piece, size + got - len(piece)) :]
        size += got
    os.ftruncate(target, size)
    return size


class _Recipe:
    """What makes the layer's stream again from its files (`_fast/recipe.pyx`), written beside them: push and save need the very bytes that the
    diff_id stands for, and keeping those would take the space twice.

    The file: the stream's size as 8 bytes little-endian, and the recipe packed with zstd.
    """

    def __init__(self, path: Path, directory: int) -> None:
        """`directory`: the layer's root, for as long as the recipe is written."""
        self._path = path
        self._directory = directory
        self._begin()

    def _begin(self) -> None:
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._packer = zstandard.ZstdCompressor(level=1).compressobj()
        os.write(self._file, bytes(_SIZE.size))

    def write(self, data: bytes) -> None:
        self._put(self._packer.compress(data))

    def _put(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]

    def spell_out(self) -> None:
        """Hold the stream so far itself: an entry is about to take away a file that an earlier one brought, and that is named here."""
        self._put(self._packer.flush())
        with open(self._file, "rb", buffering=0) as so_far:
            os.unlink(self._path)
            self._begin()
            so_far.seek(_SIZE.size)
            packed: Any = so_far
            source = _recipe.Stream(zstandard.ZstdDecompressor().stream_reader(packed), self._directory)
            buffer = bytearray(_CHUNK)
            while got := source.readinto(buffer):
                self.write(_LITERAL.pack(got, 0, 0) + buffer[:got])

    def finish(self, size: int) -> None:
        self._put(self._packer.flush())
        os.pwrite(self._file, _SIZE.pack(size), 0)

    def close(self) -> None:
        os.close(self._file)


def stream_size(diff: Path) -> int:
    """Bytes of a committed layer's tar stream. Raises ServerError."""
    try:
        with open(diff.parent / RECIPE, "rb", buffering=0) as file:
            return int(_SIZE.unpack(file.read(_SIZE.size))[0])
    except (OSError, struct.error) as error:
        raise ServerError(f"layer in {diff.parent}: {error}") from error


@contextlib.contextmanager
def stream(diff: Path) -> Iterator[_recipe.Stream]:
    """The tar stream of a committed layer, `diff` being its directory; to be left when no thread reads it any more.

    Blocking. Raises ServerError, as does reading it through `read`.
    """
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(diff.parent / RECIPE, "rb", buffering=0))
            file.seek(_SIZE.size)
            directory = files.open_directory(diff)
            stack.callback(os.close, directory)
        except OSError as error:
            raise ServerError(f"layer in {diff.parent}: {error.strerror}") from error
        packed: Any = file
        stream = _recipe.Stream(zstandard.ZstdDecompressor().stream_reader(packed), directory)
        stack.callback(stream.close)
        yield stream


def read(source: _recipe.Stream, buffer: memoryview) -> int:
    """Fill `buffer` from a layer's stream; less than its size only at the end. Raises ServerError."""
    try:
        return source.readinto(buffer)
    except (OSError, _tar.ArchiveError, zstandard.ZstdError) as error:
        raise ServerError(f"making a layer's archive again: {error}") from error


Source = Span | Incoming | Laid
"""Where the bytes of a layer are."""


class Stream(Protocol):
    """An uncompressed stream, as `_fast.tar` reads it."""

    def readinto(self, buffer: memoryview, /) -> int: ...


class Layers:
    """The layers in the making."""

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots
        self._making: dict[str, asyncio.Task[None]] = {}
        threads = min(8, os.cpu_count() or 1)
        self._hashing = batch_threads(threads, "digest")
        self._extracting = batch_threads(threads + FOLLOWING, "layer")
        self._followers = 0
        # Of the threads that extract, most wait for a registry: as many run as there are processors, so that the loop gets one soon.
        self.processors = threading.Semaphore(threads)

    async def work(self, function: Callable[..., T], *arguments: Any) -> T:
        """The result of long blocking work on images, in a thread that nothing else needs. Not interrupted: see `uninterrupted`."""
        return await uninterrupted(asyncio.get_running_loop().run_in_executor(self._hashing, function, *arguments))

    def hashing(self) -> Hashing:
        return Hashing(self._hashing)

    async def draft(self) -> Draft:
        return await self._snapshots.draft()

    async def forget(self, laid: Iterable[Laid]) -> None:
        """Remove what no layer was made of."""
        for one in laid:
            draft, one.draft = one.draft, None
            if draft is not None:
                await self._snapshots.abandon(draft)

    async def digest_of(self, span: Span | Laid) -> str:
        """See the function; in a thread."""
        if isinstance(span, Laid):
            return span.extracted().diff_id
        return await self.work(digest_of, span)

    @property
    def may_follow(self) -> bool:
        """Whether a layer can be laid out while it is received: a thread is free for it."""
        return self._followers < FOLLOWING

    async def ensure(
        self,
        chain_id: str,
        diff_id: str,
        parent: str,
        span: Source,
        below: asyncio.Task[bool] | None = None,
        report: Callable[[int], None] = lambda _: None,
    ) -> bool:
        """Have the layer, extracted from `span` unless it is there or somebody else brings it. True when it was extracted for this caller.

        The caller retains `chain_id` and `parent` meanwhile; `below` is its own task that ensures the parent. `report` is told how many bytes of
        the span are done. Raises InvalidParameter for a layer that is damaged, leads out of its directory, or is not `diff_id`.
        """
        while self._snapshots.layer(chain_id) is None:
            task = self._making.get(chain_id)
            if task is None:
                work = _work()
                task = asyncio.create_task(self._make(chain_id, diff_id, parent, span, below, report, work))
                self._making[chain_id] = task
                task.add_done_callback(lambda _: self._making.pop(chain_id, None))
                try:
                    await asyncio.shield(task)
                finally:
                    # Its threads read the caller's descriptor: who is cancelled tells them, and waits for them.
                    work[1] = 1
                    await uninterrupted(task)
                return True
            await asyncio.wait([task])  # if it fails, its caller's bytes were bad; ours may be good
            await asyncio.sleep(0)
        return False

    async def _make(
        self,
        chain_id: str,
        diff_id: str,
        parent: str,
        span: Source,
        below: asyncio.Task[bool] | None,
        report: Callable[[int], None],
        work: array[int],
    ) -> None:
        draft = None
        if isinstance(span, Laid):
            span.extracted()
            draft, span.draft = span.draft, None
        laid = draft is not None
        draft = draft or await self._snapshots.draft()
        try:
            if isinstance(span, Incoming):
                extracted = await self._follow(draft, span, report, work)
            elif isinstance(span, Laid) and laid:
                extracted = span.extracted()
            else:
                extracted = await self._extract(draft, span, report, work)
            if extracted.diff_id != diff_id:
                raise InvalidParameter(
                    f"layer has diff_id {extracted.diff_id}, its image's configuration says {diff_id}"
                )
            if below is not None:
                await asyncio.wait([below])
            if parent and self._snapshots.layer(parent) is None:
                raise ServerError(f"layer {parent} is missing")
        except BaseException:
            await self._snapshots.abandon(draft)
            raise
        layer = Layer(draft.number, diff_id, parent, extracted.size)
        await self._snapshots.commit_layer(draft, chain_id, layer, extracted.implied)

    async def _follow(self, draft: Draft, span: Incoming, report: Callable[[int], None], work: array[int]) -> Extracted:
        """Lay out a layer while it is received."""
        self._followers += 1
        try:
            extraction = asyncio.get_running_loop().run_in_executor(self._extracting, self._lay_out, draft, span, work)
            await _reported(work, report, extraction)
        finally:
            self._followers -= 1
        extraction.exception()  # what is wrong with the download says more
        await span.whole()
        return extraction.result()

    async def _extract(
        self, draft: Draft, span: Span | Laid, report: Callable[[int], None], work: array[int]
    ) -> Extracted:
        loop = asyncio.get_running_loop()
        extraction = loop.run_in_executor(self._extracting, self._lay_out, draft, span, work)
        if isinstance(span, Laid) or compression(span):
            await _reported(work, report, extraction)
            return extraction.result()
        # Nobody else changes the bytes, so they can be hashed beside the extraction rather than in it.
        digest = loop.run_in_executor(self._hashing, digest_of, span, work)
        await _reported(work, report, extraction, digest)
        return extraction.result()._replace(diff_id=digest.result())

    def _lay_out(self, draft: Draft, span: Source, work: array[int]) -> Extracted:
        """Blocking. The diff_id is empty for what is hashed beside."""
        with self.processors:
            if isinstance(span, Laid):
                # Once more, below another parent: from where it lies already.
                with stream(span.content) as again:
                    return lay_out(draft, again)
            if isinstance(span, Incoming):
                span.processors = self.processors
            kind = compression(span)
            if isinstance(span, Incoming) or kind:
                packed = _Bytes(span, work)
                return lay_out(draft, Inflated(packed, kind) if kind else packed)
            return laid_out(draft, span.descriptor, offset=span.offset, size=span.size, progress=work)


async def _reported(work: array[int], report: Callable[[int], None], *futures: asyncio.Future[Any]) -> None:
    """Wait for the threads, and tell now and then how far they are."""
    pending: set[asyncio.Future[Any]] = set(futures)
    while pending:
        _, pending = await asyncio.wait(pending, timeout=_POLL)
        report(work[0])


def lay_out(draft: Draft, source: Stream) -> Extracted:
    """Extract the uncompressed stream of a layer, and hash it. Blocking. Raises InvalidParameter for a damaged one."""
    digest = hashlib.sha256()
    extracted = laid_out(draft, source, digest=digest)
    return extracted._replace(diff_id=f"sha256:{digest.hexdigest()}")


def laid_out(draft: Draft, source: int | Stream, **how: Any) -> Extracted:
    """Without its diff_id. OSError and ArchiveError become a kind here."""
    directory = files.open_directory(draft.path)
    recipe = _Recipe(draft.path.parent / RECIPE, directory)
    try:
        size, _, implied, _ = _layer.apply(source, directory, recipe=recipe, **how)
        return Extracted("", size, implied)
    except _tar.ArchiveError as error:
        raise InvalidParameter(f"layer: {error}") from error
    except OSError as error:
        raise ServerError(f"extracting a layer: {error.filename}: {error.strerror}") from error
    finally:
        recipe.close()
        os.close(directory)


__all__ = [
    "COMPRESSIONS",
    "Compression",
    "Extracted",
    "Incoming",
    "Inflated",
    "Laid",
    "Layers",
    "Source",
    "Span",
    "compression",
    "digest_of",
    "inflate",
    "laid_out",
    "lay_out",
    "read",
    "stream",
    "stream_size",
]
