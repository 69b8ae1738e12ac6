"""Brings layers into the snapshotter: inflated, verified and extracted in threads, each only once
for all callers.

Owns: the threads that extract, and the layers being made. Not here: the origin of the bytes
(archive.py), the layers of an image and their removal (store.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from engine._fast import layer as _layer
from engine._fast import tar as _tar
from engine.errors import Conflict, EngineError, InvalidParameter, ServerError, reason
from engine.images import sealing, tarsplit
from engine.images.spans import Incoming, Span, SpanReader, compression, new_progress
from engine.storage.compression import Inflated
from engine.storage.snapshots import Ingest, Layer, Snapshots
from engine.system import files
from engine.system.tasks import shield
from engine.system.threads import Helper, Threads, abandonable, become_batch, in_own_thread, uninterrupted

T = TypeVar("T")

FOLLOWING = 6
"""Layers that are extracted while they are received; others wait until they are complete."""

_CHUNK = 256 * 1024
_HASH_CHUNK = 1 << 20
_HASH_WAITING = 4 << 20
"""Bytes that may be queued for the thread that hashes them."""
_POLL = 0.1
"""Seconds between two reports of progress."""


def chain_ids(diff_ids: Sequence[str]) -> tuple[str, ...]:
    """The id of each layer with those below it (OCI image specification, "Layer ChainID")."""
    found: list[str] = []
    for diff_id in diff_ids:
        both = f"{found[-1]} {diff_id}".encode() if found else b""
        found.append(f"sha256:{hashlib.sha256(both).hexdigest()}" if found else diff_id)
    return tuple(found)


class Extraction(NamedTuple):
    """The result of an extraction: diff_id, bytes of regular files, the implied directories that
    `Snapshots.commit_layer` needs, and the first name that occurs twice.
    """

    diff_id: str
    size: int
    implied: list[bytes]
    repeated: str = ""


class Extracted:
    """A layer of an archive that was extracted while the archive was received.

    Its bytes are not kept.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        """Bytes of the member."""
        self.ingest: Ingest | None = None
        """The directory of its files, until a layer is made of it."""
        self.content = Path()
        """The directory, which stays the layer's."""
        self.result: Extraction | EngineError = ServerError("the layer was not received completely")

    def extraction(self) -> Extraction:
        """The result. Raises the error of a layer that could not be extracted."""
        if isinstance(self.result, EngineError):
            raise self.result
        return self.result

    def read(self, limit: int) -> bytes:
        """As `Span.read`, but always raises InvalidParameter: the bytes are not kept."""
        raise InvalidParameter(f"a layer of {self.size} bytes is not a JSON document")


class Hashing:
    """A sha256 that is computed in a thread of its own while another thread receives the bytes.

    Both threads may wait for a client, so neither belongs to a pool. The hashing thread starts with
    the first megabyte. The receiving thread hashes too when more than `_HASH_WAITING` bytes are
    queued, or when no thread can be started.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._pieces: deque[bytes] = deque()
        self._size = 0
        self._begun = False
        self._ended = False
        self._changed = threading.Condition()
        self._at_work = threading.Lock()

    def update(self, data: bytes) -> None:
        with self._changed:
            before, self._size = self._size, self._size + len(data)
            self._pieces.append(data)
            if before < _HASH_CHUNK <= self._size:
                self._changed.notify()
        if not self._begun and self._size >= _HASH_CHUNK:
            self._begun = True
            Helper(self._run)
        if before > _HASH_WAITING:
            self._work()

    def _run(self) -> None:
        become_batch()
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
        """The digest of everything. Call it in any case: it ends the thread."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._work()
        return f"sha256:{self._digest.hexdigest()}"


def digest_of(span: Span, work: array[int] | None = None) -> str:
    """The diff_id of a layer, which is the digest of its uncompressed stream. Blocking. Raises
    ServerError when `work` asks for cancellation.
    """
    kind = compression(span)
    given = SpanReader(span, work, counts=False)
    source = Inflated(given, kind) if kind else given
    hashed = hashlib.sha256()
    # Read, not mapped: the pages of a mapped file would count as the daemon's memory.
    buffer = memoryview(bytearray(_HASH_CHUNK))
    while size := source.readinto(buffer):
        hashed.update(buffer[:size])
    return f"sha256:{hashed.hexdigest()}"


def inflate(span: Span, kind: str, target: int, stop: threading.Event) -> int:
    """Write the content of a compressed span to the descriptor of an empty file; returns its size.
    Blocking. Ends early when `stop` is set.
    """
    source = Inflated(SpanReader(span), kind)
    buffer = memoryview(bytearray(_CHUNK))
    size = 0
    while not stop.is_set() and (got := source.readinto(buffer)):
        files.write_sparse(target, buffer[:got], size)
        size += got
    os.ftruncate(target, size)
    return size


Source = Span | Incoming | Extracted
"""The location of a layer's bytes."""


class Stream(Protocol):
    """An uncompressed stream, as `_fast.tar` reads it."""

    def readinto(self, buffer: memoryview, /) -> int: ...


class Allowance:
    """The bytes that the layers of one operation may have together when they are inflated."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._left = size
        self._lock = threading.Lock()

    def take(self, size: int) -> None:
        """From any thread. Raises InvalidParameter when nothing is left."""
        with self._lock:
            self._left -= size
        if self._left < 0:
            raise InvalidParameter(f"the layers have more than {self.size} bytes")


class _Measured:
    """A stream whose bytes are taken from an allowance."""

    def __init__(self, stream: Stream, allowance: Allowance) -> None:
        self._stream = stream
        self._allowance = allowance

    def readinto(self, buffer: memoryview) -> int:
        got = self._stream.readinto(buffer)
        self._allowance.take(got)
        return got


class _Making(NamedTuple):
    """A layer being made.

    `waits`: its bytes come from a registry, which may take arbitrarily long.
    """

    task: asyncio.Task[bool]
    waits: bool


class Layers:
    """The layers being made."""

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots
        self._making: dict[str, _Making] = {}
        threads = min(8, os.cpu_count() or 1)
        self._hashing = Threads(threads, batch=True)
        self._extracting = Threads(threads, batch=True)
        self._followers = 0
        # Most extracting threads wait for a registry. At most one per processor runs, so that the
        # event loop gets a processor soon.
        self.processors = threading.Semaphore(threads)

    async def work(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run long blocking work on images in a thread of the shared pool. Cancellation ends it at
        a checkpoint: see `abandonable`.
        """
        return await abandonable(self._hashing.run, function, *arguments)

    async def ingest(self) -> Ingest:
        return await self._snapshots.ingest()

    async def forget(self, early: Iterable[Extracted]) -> None:
        """Remove extracted layers that no image took over."""
        for one in early:
            ingest, one.ingest = one.ingest, None
            if ingest is not None:
                await self._snapshots.abandon(ingest)

    async def digest_of(self, span: Span | Extracted) -> str:
        """`digest_of` in a thread. Raises ServerError, InvalidParameter."""
        if isinstance(span, Extracted):
            return span.extraction().diff_id
        try:
            return await self.work(digest_of, span)
        except OSError as error:
            raise ServerError(f"reading a layer: {reason(error)}") from error

    async def seal(
        self, ingest: Ingest, parent: str, *, drop: Sequence[str] = (), implied: Sequence[bytes] = ()
    ) -> Extraction:
        """Make the content of a layer of an overlay's changes where they lie (`Snapshots.take`):
        remove what does not belong to it, and write its tar-split data beside it.

        `parent`: the chain_id below, "" for none. `drop`: absolute paths, such as those of declared
        volumes, whose changes are removed; links in them are not followed. `implied`: directories
        of an extraction that get the attributes of the layers below. The diff_id is that of an
        empty archive when there are no changes. The ingest stays the caller's to commit or
        abandon; a failure or cancellation abandons it. Raises ServerError, and InvalidParameter for
        a file whose name means a deletion in a layer.
        """
        below: list[Path] = []
        try:
            while parent:
                layer = self._snapshots.layer(parent)
                if layer is None:
                    raise ServerError(f"layer {parent} is missing")
                below.append(self._snapshots.layer_path(parent))
                parent = layer.parent
            return await self._seal(ingest, below, drop, implied)
        except BaseException:
            await uninterrupted(self._snapshots.abandon(ingest))
            raise

    async def _seal(
        self, ingest: Ingest, below: Sequence[Path], drop: Sequence[str], implied: Sequence[bytes]
    ) -> Extraction:
        stop = threading.Event()
        work = self._extracting.run(sealing.seal, ingest, below, drop, stop, implied)
        try:
            sealed = await shield(work)
        finally:
            stop.set()
            try:
                await uninterrupted(asyncio.wait([work]))
            finally:  # the caller may be cancelled again meanwhile
                work.exception()  # seen
        return Extraction(sealed.diff_id, sealed.size, [])

    @contextlib.contextmanager
    def following(self) -> Iterator[bool]:
        """Reserves a place among the layers that are extracted while they are received.

        False when all `FOLLOWING` are taken.
        """
        if self._followers >= FOLLOWING:
            yield False
            return
        self._followers += 1
        try:
            yield True
        finally:
            self._followers -= 1

    async def ensure(
        self,
        chain_id: str,
        diff_id: str,
        parent: str,
        span: Source,
        below: asyncio.Task[Any] | None = None,
        report: Callable[[int], None] = lambda _: None,
        allowance: Allowance | None = None,
    ) -> bool:
        """Make the layer from `span`, unless it exists or another caller makes it. Returns True
        when it was extracted for this caller.

        A caller that has the whole layer does not wait for one that still receives it. The caller
        retains `chain_id` and `parent` meanwhile; `below` is its own task that ensures the parent.
        `report` is called with the number of bytes processed. `allowance`: what a compressed layer
        is taken from.

        Raises InvalidParameter for a layer that is damaged, leads out of its directory, or has
        another digest than `diff_id`.
        """
        while self._snapshots.layer(chain_id) is None:
            other = self._making.get(chain_id)
            if other is None or (other.waits and not isinstance(span, Incoming)):
                return await self._ensure_ours(chain_id, diff_id, parent, span, below, report, allowance)
            # the failure may be due to that caller's bytes; ours may be good
            await asyncio.wait([other.task])
            await asyncio.sleep(0)
        return False

    async def _ensure_ours(
        self,
        chain_id: str,
        diff_id: str,
        parent: str,
        span: Source,
        below: asyncio.Task[Any] | None,
        report: Callable[[int], None],
        allowance: Allowance | None,
    ) -> bool:
        work = new_progress()
        task = asyncio.create_task(self._make(chain_id, diff_id, parent, span, below, report, work, allowance))
        ours = self._making[chain_id] = _Making(task, waits=isinstance(span, Incoming))
        try:
            return await shield(task)
        finally:
            # Its threads read the caller's descriptor, so a cancelled caller stops them and waits
            # for them.
            work[1] = 1
            if isinstance(span, Incoming):
                span.stop()
            try:
                await uninterrupted(asyncio.wait([task]))
            finally:
                if not task.cancelled():
                    task.exception()  # seen
                if self._making.get(chain_id) is ours:
                    del self._making[chain_id]

    async def _make(
        self,
        chain_id: str,
        diff_id: str,
        parent: str,
        span: Source,
        below: asyncio.Task[Any] | None,
        report: Callable[[int], None],
        work: array[int],
        allowance: Allowance | None,
    ) -> bool:
        """Extract and commit the layer. False when another caller was faster."""
        ingest = None
        if isinstance(span, Extracted):
            span.extraction()
            ingest, span.ingest = span.ingest, None
        extracted_early = ingest is not None
        ingest = ingest or await self._snapshots.ingest()
        try:
            if isinstance(span, Incoming):
                extracted = await self._follow(ingest, span, report, work, allowance)
            elif isinstance(span, Extracted) and extracted_early:
                extracted = span.extraction()
            else:
                extracted = await self._extract(ingest, span, report, work, allowance)
            if extracted.repeated:
                # dockerd takes no such layer either, whose image could not be pushed to it then.
                raise InvalidParameter(f"layer: duplicates of file paths not supported: {extracted.repeated}")
            if extracted.diff_id != diff_id:
                raise InvalidParameter(
                    f"layer has diff_id {extracted.diff_id}, but its image's configuration has {diff_id}"
                )
            if below is not None:
                await asyncio.wait([below])
            if parent and self._snapshots.layer(parent) is None:
                raise ServerError(f"layer {parent} is missing")
        except BaseException:
            await self._snapshots.abandon(ingest)
            raise
        layer = Layer(ingest.number, diff_id, parent, extracted.size)
        try:
            await self._snapshots.commit_layer(ingest, chain_id, layer, extracted.implied)
        except Conflict:
            return False
        return True

    async def _follow(
        self,
        ingest: Ingest,
        span: Incoming,
        report: Callable[[int], None],
        work: array[int],
        allowance: Allowance | None,
    ) -> Extraction:
        """Extract a layer while it is received: in a thread of its own, which waits for the
        registry.
        """
        extraction = in_own_thread(lambda: self._extract_source(ingest, span, work, allowance))
        await _reported(work, report, extraction)
        extraction.exception()  # a failed download explains it better
        await span.whole()
        return extraction.result()

    async def _extract(
        self,
        ingest: Ingest,
        span: Span | Extracted,
        report: Callable[[int], None],
        work: array[int],
        allowance: Allowance | None,
    ) -> Extraction:
        extraction = self._extracting.run(self._extract_source, ingest, span, work, allowance)
        if isinstance(span, Extracted) or compression(span):
            await _reported(work, report, extraction)
            return extraction.result()
        # The file does not change, so a second thread can hash it during the extraction.
        try:
            digest = self._hashing.run(digest_of, span, work)
        except EngineError:  # no thread for it
            await uninterrupted(asyncio.wait([extraction]))
            extraction.exception()  # retrieved for asyncio
            raise
        await _reported(work, report, extraction, digest)
        return extraction.result()._replace(diff_id=digest.result())

    def _extract_source(
        self, ingest: Ingest, span: Source, work: array[int], allowance: Allowance | None
    ) -> Extraction:
        """Blocking. The diff_id is empty when another thread computes it."""
        with self.processors:
            if isinstance(span, Extracted):
                # The same layer on another parent: made from the first extraction's files.
                with tarsplit.stream(span.content) as again:
                    return extract_and_hash(ingest, again)
            if isinstance(span, Incoming):
                span.processors = self.processors
            kind = compression(span)
            if isinstance(span, Incoming) or kind:
                packed = SpanReader(span, work)
                stream: Stream = Inflated(packed, kind) if kind else packed
                return extract_and_hash(ingest, stream if allowance is None else _Measured(stream, allowance))
            return extract(ingest, span.descriptor, offset=span.offset, size=span.size, progress=work)


async def _reported(work: array[int], report: Callable[[int], None], *futures: asyncio.Future[Any]) -> None:
    """Wait for the threads, and report their progress every `_POLL` seconds."""
    pending: set[asyncio.Future[Any]] = set(futures)
    while pending:
        _, pending = await asyncio.wait(pending, timeout=_POLL)
        report(work[0])


def extract_and_hash(ingest: Ingest, source: Stream) -> Extraction:
    """Extract the uncompressed stream of a layer, and hash it. Blocking. Raises InvalidParameter
    for a damaged one.
    """
    digest = hashlib.sha256()
    extracted = extract(ingest, source, digest=digest)
    return extracted._replace(diff_id=f"sha256:{digest.hexdigest()}")


def extract(ingest: Ingest, source: int | Stream, **how: Any) -> Extraction:
    """Extract without computing the diff_id. Blocking. Raises InvalidParameter for a damaged
    stream, ServerError.
    """
    try:
        with contextlib.ExitStack() as stack:
            directory = files.open_directory(ingest.path)
            stack.callback(os.close, directory)
            tar_split = tarsplit.Writer(ingest.path.parent / tarsplit.FILE, directory)
            stack.callback(tar_split.close)
            size, _, implied, _, repeated = _layer.apply(source, directory, tar_split=tar_split, **how)
            return Extraction("", size, implied, os.fsdecode(repeated))
    except _tar.ArchiveError as error:
        raise InvalidParameter(f"layer: {error}") from error
    except OSError as error:
        where = f"{os.fsdecode(error.filename)}: " if error.filename else ""
        disk = f" ({ingest.path})" if error.errno == errno.ENOSPC else ""
        raise ServerError(f"extracting a layer: {where}{reason(error)}{disk}") from error


__all__ = [
    "Allowance",
    "Extracted",
    "Extraction",
    "Hashing",
    "Layers",
    "Source",
    "chain_ids",
    "digest_of",
    "extract",
    "extract_and_hash",
    "inflate",
]
