"""The history of builds: a record of each build that clients made over BuildKit's API, with the log
of its progress.

    ROOT/state.db              kind `build`: a record per build, by its reference
    ROOT/build/history/<name>  zstd frames, one per blob: the log, the failure, the image's
                               configuration, its provenance

A build that runs is in memory only. Its record is written when it has ended, after its client has
the answer. A crash therefore leaves whole records, and files without a record, which `History`
removes. Files are not synced: a power failure may lose those of the last builds, which their size
and the checksums of zstd detect. The log has the form of BuildKit's blob
`application/vnd.buildkit.status.v0`: each StatusResponse after its length in four bytes,
little-endian.

A record goes when there are more than `Limits.entries` newer ones and it is older than
`Limits.age`, as in BuildKit. Beyond MOST records or STORED bytes the oldest go, whatever their age.
Pinned records stay until their client removes them.

Owns:    the records of kind `build`, that directory, a task per build that runs.
Threads: the event loop's. Files are written and read in threads, one at a time for each build.
Raises:  NotFound without such a record, ServerError when the disk fails.
Not here: the calls of clients (`history_calls.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
import struct
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import zstandard

from engine.builder.buildkit import provenance
from engine.builder.buildkit.control_messages import Exporter, RpcStatus, SolveRequest, StatusResponse, Time
from engine.builder.buildkit.history_messages import (
    COMPLETE,
    DELETED,
    STARTED,
    Blob,
    BuildHistoryEvent,
    BuildHistoryRecord,
    BuildResultInfo,
    NumberedBlob,
)
from engine.builder.buildkit.progress import Progress, Reports
from engine.builder.git import without_password
from engine.errors import EngineError, NotFound, ServerError, reason_with_file, words
from engine.images.record import ImageRecord
from engine.rpc import protobuf
from engine.rpc.grpc import shortened
from engine.storage.records import Change, Records
from engine.system.tasks import spawn
from engine.system.threads import uninterrupted

_log = logging.getLogger(__name__)

LOGS = "application/vnd.buildkit.status.v0"
FAILURE = "application/vnd.googeapis.google.rpc.status+proto"  # BuildKit's own spelling
CONFIGURATION = "application/vnd.docker.container.image.v1+json"

MOST = 1000
"""Records, whatever their age."""
STORED = 256 << 20
"""Bytes of their files together."""
LOG_BYTES = 32 << 20
"""Bytes of one log. Beyond them only the beginning and the end of each vertex are recorded."""
ATTRIBUTES = 32 << 10
"""Bytes of the frontend's attributes in one record, and of all exporters with theirs."""
REFERENCE = 256
"""Bytes of a reference. A build with a longer one, or one that is not UTF-8, leaves no record."""
PIECE = 1 << 20
"""Bytes of a blob that are read at a time."""
QUIET = 0.2
"""Seconds from a build's end until its record is written. A caller that asks for it has it written
at once. The client has more questions meanwhile, and the thread that writes would delay the
answers.
"""
SETTLED = 60.0
BEHIND = 1000
"""Events that a listener may be behind before it is ended."""

_LENGTH = struct.Struct("<I")
_TOGETHER = 128 << 10
"""Bytes of a log that are compressed at a time: most logs are smaller."""
_COMPRESSION = zstandard.ZstdCompressionParameters.from_level(1, window_log=17, write_checksum=True)


class Limits(NamedTuple):
    """What is kept: a record goes only if it is beyond both."""

    entries: int = 50
    age: int = 48 * 3600 * 1_000_000_000
    """Nanoseconds since the end of a build."""


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A blob in the file of a record: a zstd frame of `stored` bytes at `offset`."""

    digest: str
    """Of the plain bytes, as is `size`."""
    size: int
    offset: int
    stored: int


class Row(msgspec.Struct, frozen=True):
    """The record of a build that has ended."""

    record: BuildHistoryRecord
    stored: int
    """Bytes of its file."""
    parts: tuple[Part, ...]

    @property
    def completed(self) -> int:
        """Nanoseconds since the epoch."""
        assert self.record.completed is not None
        return _nanoseconds(self.record.completed)


class Outcome:
    """How a build ends. Its fields are set before the end of `History.recorded`."""

    def __init__(self) -> None:
        self.response: Mapping[str, str] = {}
        self.result: Callable[[], bytes] | None = None
        """Reads the image's configuration. Blocking; raises EngineError."""
        self.bases: Mapping[str, ImageRecord] = {}
        """The images that the Dockerfile names."""
        self.failure: tuple[int, str, bytes] | None = None
        """gRPC status, message and google.rpc.Status with details."""


class _File:
    """The file of one record while it is written. Blocking. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # A client may use a reference again while the record of the build before is being written.
        self._new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        self._descriptor = -1
        self._compressor = zstandard.ZstdCompressor(compression_params=_COMPRESSION)
        self._frame = self._compressor.compressobj()
        self._digest = hashlib.sha256()
        self._size = self._offset = self._begin = 0
        self._pending = bytearray()
        self.parts: list[Part] = []
        self.named = False
        """The file is complete and has its name."""
        self.warnings = 0
        self.vertices: dict[str, tuple[bool, bool]] = {}
        """Whether each vertex came from the cache, and whether it has ended, by digest."""

    def report(self, report: StatusResponse) -> None:
        """Append a message to the log."""
        self.warnings += len(report.warnings)
        for vertex in report.vertexes:
            cached, ended = self.vertices.get(vertex.digest, (False, False))
            self.vertices[vertex.digest] = (cached or vertex.cached, ended or vertex.completed is not None)
        if self._size + len(self._pending) > LOG_BYTES:
            report = StatusResponse(vertexes=report.vertexes)
        message = protobuf.encode(report)
        if message:
            self._pending += _LENGTH.pack(len(message)) + message
        if len(self._pending) >= _TOGETHER:
            self._compress()

    def _compress(self) -> None:
        self._digest.update(self._pending)
        self._size += len(self._pending)
        self._write(self._frame.compress(bytes(self._pending)))
        self._pending.clear()

    def _write(self, data: bytes) -> None:
        if self._descriptor < 0:
            self._new.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = os.open(self._new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        view = memoryview(data)
        while view:
            written = os.write(self._descriptor, view)
            self._offset += written
            view = view[written:]

    def blob(self, media_type: str, data: bytes = b"") -> Blob:
        """End a blob: the log, or `data`."""
        self._pending += data
        self._compress()
        self._write(self._frame.flush())
        digest = f"sha256:{self._digest.hexdigest()}"
        self.parts.append(Part(digest, self._size, self._begin, self._offset - self._begin))
        found = Blob(media_type=media_type, digest=digest, size=self._size)
        self._frame = self._compressor.compressobj()
        self._digest, self._size, self._begin = hashlib.sha256(), 0, self._offset
        return found

    def finish(self) -> int:
        """Give the file its name. Returns its size."""
        os.replace(self._new, self._path)
        os.close(self._descriptor)
        self._descriptor = -1
        self.named = True
        return self._offset

    @property
    def open(self) -> bool:
        """It is on the disk and has no name yet."""
        return self._descriptor >= 0

    def close(self) -> None:
        """Remove what has no name yet."""
        os.close(self._descriptor)
        self._descriptor = -1
        self._new.unlink(missing_ok=True)


class _Recording(NamedTuple):
    """Of one build."""

    record: BuildHistoryRecord
    asked: asyncio.Event
    """A caller waits for the record, so it is written as soon as the build has ended."""


class History:
    """One engine's."""

    def __init__(self, root: Path, records: Records, limits: Limits | None = None) -> None:
        """Reads the records, and removes files that a crash has left. Blocking."""
        self._directory = root / "build" / "history"
        self._records = records
        self._table = records.table("build", Row)
        self._limits = limits or Limits()
        self._rows: dict[str, Row] = {}
        self._active: dict[str, BuildHistoryRecord] = {}
        self._tasks: dict[asyncio.Task[None], _Recording] = {}
        """Of all builds, until they are recorded."""
        self._listeners: set[Listener] = set()
        self._changing = asyncio.Lock()
        self._next_settling = 0.0
        known = self._table.load()
        for ref, row in known.items():
            with contextlib.suppress(FileNotFoundError):
                if self._path(ref).stat().st_size == row.stored:
                    self._rows[ref] = row
        self._lost = known.keys() - self._rows.keys()
        kept = {self._path(ref).name for ref in self._rows}
        for name in os.listdir(self._directory) if self._directory.exists() else ():
            if name not in kept:
                (self._directory / name).unlink()

    async def open(self) -> None:
        """Remove records whose files are lost, and those beyond the limits."""
        await self._remove(self._lost)
        await self.settle()

    async def close(self) -> None:
        """Wait until the builds that have ended are recorded."""
        while self._tasks:
            await _written(self._tasks)

    def _path(self, ref: str) -> Path:
        return self._directory / hashlib.sha256(ref.encode(errors="surrogateescape")).hexdigest()[:32]

    # --- builds -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def recorded(
        self, request: SolveRequest, progress: Progress, failed: Callable[[BaseException], tuple[int, str, bytes]]
    ) -> Generator[Outcome, None, None]:
        """Record the build of the context. The record is complete when `progress` is closed, too.
        `failed`: gRPC status, message, and a google.rpc.Status with details, of a failure.
        """
        outcome = Outcome()
        ref = request.ref
        if request.internal or _text(ref) != ref or len(ref.encode()) > REFERENCE:
            yield outcome
            return
        record = _begun(request)
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        reports = progress.read_aside()
        recording = _Recording(record, asyncio.Event())
        task = spawn(self._record(recording, reports, ended, outcome), f"recording build {ref}")
        task.add_done_callback(lambda _: reports.close())  # it may be cancelled before it begins
        self._tasks[task] = recording
        task.add_done_callback(self._tasks.pop)
        self._active[ref] = record
        self._publish(STARTED, record)
        try:
            yield outcome
        except BaseException as error:
            outcome.failure = failed(error)
            raise
        finally:
            record.completed = Time(*divmod(time.time_ns(), 1_000_000_000))
            ended.set_result(None)

    async def _record(
        self,
        recording: _Recording,
        reports: Reports,
        ended: asyncio.Future[None],
        outcome: Outcome,
    ) -> None:
        record, ref = recording.record, recording.record.ref
        file = _File(self._path(ref))
        try:
            last: StatusResponse | None = None
            async for report in reports:
                if last is not None:
                    await asyncio.to_thread(file.report, last)
                last = report  # one turn of a thread is enough for most builds
            await ended
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(recording.asked.wait(), QUIET)
            async with self._changing:
                try:
                    row = await uninterrupted(asyncio.to_thread(_completed, record, file, last, outcome))
                    await self._records.commit(self._table.put(ref, row))
                except BaseException:
                    if file.named:  # the file of an earlier build of this reference is gone, too
                        if self._rows.pop(ref, None) is not None:
                            self._publish(DELETED, BuildHistoryRecord(ref=ref))
                        await uninterrupted(asyncio.to_thread(self._unlink, [ref]))
                    raise
                self._rows[ref] = row
                self._publish(COMPLETE, row.record)
            if time.monotonic() >= self._next_settling:
                await self.settle()
        except (OSError, EngineError) as error:
            _log.warning("build %s is not recorded: %s", ref, words(error))
        finally:
            if file.open:
                await uninterrupted(asyncio.to_thread(file.close))
            if self._active.get(ref) is record:
                del self._active[ref]

    # --- what is kept -----------------------------------------------------------------------------

    async def recent(self) -> None:
        """Wait until the builds that have ended are recorded."""
        await _written({task: each for task, each in self._tasks.items() if each.record.completed is not None})

    def active(self) -> list[BuildHistoryRecord]:
        """The builds that run."""
        return [record for record in self._active.values() if record.completed is None]

    def ended(self) -> list[BuildHistoryRecord]:
        """The builds that have ended."""
        return [row.record for row in self._rows.values()]

    def find(self, ref: str) -> BuildHistoryRecord | None:
        """A build that has ended."""
        row = self._rows.get(ref)
        return row.record if row is not None else None

    async def settle(self) -> None:
        """Remove what is beyond the limits. It is done when records are listed, too, and at most
        once in SETTLED seconds when a build ends.
        """
        self._next_settling = time.monotonic() + SETTLED
        await self._remove(_beyond(self._rows, self._limits, time.time_ns()))

    async def pin(self, ref: str, pinned: bool) -> None:
        """Keep a record, or leave it to the limits. Raises NotFound."""
        async with self._changing:
            record = msgspec.structs.replace(self._row(ref).record, pinned=pinned)
            record.generation += 1
            row = msgspec.structs.replace(self._row(ref), record=record)
            await self._records.commit(self._table.put(ref, row))
            self._rows[ref] = row
            self._publish(COMPLETE, record)

    async def delete(self, ref: str) -> None:
        """Remove a record with its file. Raises NotFound."""
        self._row(ref)
        await self._remove({ref})

    def _row(self, ref: str) -> Row:
        row = self._rows.get(ref)
        if row is None:
            raise NotFound(f"no build record for ref {ref[:200]}")
        return row

    async def _remove(self, refs: set[str]) -> None:
        if not refs:
            return
        async with self._changing:
            changes: list[Change] = [self._table.delete(ref) for ref in refs]
            await self._records.commit(*changes)
            removed = [ref for ref in refs if self._rows.pop(ref, None) is not None]
            for ref in removed:
                self._publish(DELETED, BuildHistoryRecord(ref=ref))
            await uninterrupted(asyncio.to_thread(self._unlink, removed))

    def _unlink(self, refs: list[str]) -> None:
        for ref in refs:
            self._path(ref).unlink(missing_ok=True)

    # --- blobs ------------------------------------------------------------------------------------

    def blob(self, digest: str) -> tuple[str, Part]:
        """The reference and the part of a record that has this blob. Raises NotFound."""
        for ref, row in self._rows.items():
            for part in row.parts:
                if part.digest == digest:
                    return ref, part
        raise NotFound(f"content digest {digest[:200]}: not found")

    def completed(self, ref: str) -> int:
        """When a build has ended, in nanoseconds since the epoch. Raises NotFound."""
        return self._row(ref).completed

    async def read(self, ref: str, part: Part, offset: int = 0, size: int = 0) -> AsyncGenerator[bytes, None]:
        """The plain bytes of a blob, from `offset` on; `size` 0: up to the end.

        Raises ServerError when the file is damaged or cannot be read.
        """
        pieces = _pieces(self._path(ref), part, offset, size or part.size)
        try:
            while piece := await uninterrupted(asyncio.to_thread(next, pieces, b"")):
                yield piece
        except (OSError, zstandard.ZstdError) as error:
            what = reason_with_file(error) if isinstance(error, OSError) else "its file is damaged"
            raise ServerError(f"record of build {ref}: {what}") from error
        finally:
            await uninterrupted(asyncio.to_thread(pieces.close))

    async def log(self, ref: str) -> AsyncGenerator[bytes, None]:
        """The messages of a build's log, encoded. Raises NotFound and ServerError."""
        part = self._row(ref).parts[0]
        pending = bytearray()
        async with contextlib.aclosing(self.read(ref, part)) as pieces:
            async for piece in pieces:
                pending += piece
                place = 0
                while len(pending) - place >= _LENGTH.size:
                    end = place + _LENGTH.size + _LENGTH.unpack_from(pending, place)[0]
                    if end > len(pending):
                        break
                    yield bytes(pending[place + _LENGTH.size : end])
                    place = end
                del pending[:place]

    # --- listeners --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def listen(self) -> Generator[Listener, None, None]:
        """Events from now on."""
        listener = Listener()
        self._listeners.add(listener)
        try:
            yield listener
        finally:
            self._listeners.discard(listener)

    def _publish(self, kind: int, record: BuildHistoryRecord) -> None:
        for listener in self._listeners:
            listener.add(BuildHistoryEvent(type=kind, record=msgspec.structs.replace(record)))


class Listener:
    """The events of one client that have not been sent yet."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[BuildHistoryEvent] = asyncio.Queue()

    def add(self, event: BuildHistoryEvent) -> None:
        """Offer an event. Beyond BEHIND none is kept, and `next` fails."""
        if self._queue.qsize() <= BEHIND:
            self._queue.put_nowait(event)

    async def next(self) -> BuildHistoryEvent:
        """Wait for an event. Raises ServerError when some were lost."""
        if self._queue.qsize() > BEHIND:
            raise ServerError(f"this listener is more than {BEHIND} events behind")
        return await self._queue.get()


def _begun(request: SolveRequest) -> BuildHistoryRecord:
    exporters = list(request.exporters)
    if not exporters and request.exporter:
        exporters = [Exporter(type=request.exporter, attributes=request.exporter_attributes)]
    recorded = []
    left = ATTRIBUTES
    for each in exporters:
        exporter = Exporter(_text(each.type), _bounded(each.attributes, left))
        left -= _EXPORTER + len(exporter.type) + _length(exporter.attributes)
        if left < 0:
            break
        recorded.append(exporter)
    return BuildHistoryRecord(
        ref=request.ref,
        frontend=_text(request.frontend[:REFERENCE]),
        attributes=_bounded(request.attributes),
        exporters=recorded,
        created=Time(*divmod(time.time_ns(), 1_000_000_000)),
    )


_EXPORTER = 16
"""Bytes for which an exporter counts that has neither type nor attributes."""


def _length(attributes: Mapping[str, str]) -> int:
    return sum(len(name) + len(value) for name, value in attributes.items())


def _bounded(attributes: Mapping[str, str], left: int = ATTRIBUTES) -> dict[str, str]:
    """The attributes that fit into a record, in which `left` bytes are left, without passwords in
    URLs. The first ones count.
    """
    found: dict[str, str] = {}
    for name, value in attributes.items():
        left -= len(name) + len(value)
        if left < 0:
            break
        is_url = name.partition(":")[0] in ("context", "input")
        found[_text(name)] = _text(without_password(value) if is_url else value)
    return found


def _text(text: str) -> str:
    """A text from outside, in characters that the database takes."""
    return text.encode(errors="replace").decode()


def _completed(record: BuildHistoryRecord, file: _File, last: StatusResponse | None, outcome: Outcome) -> Row:
    """Write the rest of a record's file. `last`: the end of the log. Blocking. Raises OSError."""
    if last is not None:
        file.report(last)
    record.logs = file.blob(LOGS)
    record.response = _bounded(outcome.response)
    record.total_steps, record.warnings = len(file.vertices), file.warnings
    record.cached_steps = sum(cached for cached, _ in file.vertices.values())
    record.completed_steps = sum(ended for _, ended in file.vertices.values())
    if outcome.failure is not None:
        code, message, details = outcome.failure
        record.error = RpcStatus(code, shortened(_text(message)))
        record.external_error = file.blob(FAILURE, details)
    elif outcome.result is not None:
        with contextlib.suppress(EngineError):  # the image is gone already
            configuration = outcome.result()
            blob = file.blob(CONFIGURATION, configuration)
            made = file.blob(provenance.MEDIA_TYPE, provenance.predicate(_inputs(record, outcome)))
            made.annotations = {"in-toto.io/predicate-type": provenance.PREDICATE}
            record.result = BuildResultInfo(result=blob, attestations=[made], results=[NumberedBlob(0, blob)])
    return Row(record, file.finish(), tuple(file.parts))


def _inputs(record: BuildHistoryRecord, outcome: Outcome) -> provenance.Inputs:
    assert record.created is not None and record.completed is not None
    return provenance.Inputs(
        ref=record.ref,
        attributes=record.attributes,
        bases=outcome.bases,
        begun=_nanoseconds(record.created),
        ended=_nanoseconds(record.completed),
    )


async def _written(recordings: Mapping[asyncio.Task[None], _Recording]) -> None:
    """Wait for these records, which are written now."""
    for recording in recordings.values():
        recording.asked.set()
    if recordings:
        await asyncio.wait([*recordings])


def _nanoseconds(moment: Time) -> int:
    return moment.seconds * 1_000_000_000 + moment.nanoseconds


def _beyond(rows: Mapping[str, Row], limits: Limits, now: int) -> set[str]:
    """The references of records that are too many. Pinned ones count only for MOST and STORED."""
    pinned = [row for row in rows.values() if row.record.pinned]
    loose = [(ref, row) for ref, row in rows.items() if not row.record.pinned]
    count, stored = len(pinned), sum(row.stored for row in pinned)
    found = set()
    for number, (ref, row) in enumerate(sorted(loose, key=lambda item: item[1].completed, reverse=True)):
        stored += row.stored
        old = number >= limits.entries and row.completed < now - limits.age
        if old or count + number >= MOST or stored > STORED:
            found.add(ref)
    return found


def _pieces(path: Path, part: Part, offset: int, size: int) -> Generator[bytes, None, None]:
    """Blocking. Raises OSError and ZstdError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.lseek(descriptor, part.offset, os.SEEK_SET)
        end = min(part.size, offset + size)
        place = 0
        with open(descriptor, "rb", closefd=False) as file:
            reader = zstandard.ZstdDecompressor().stream_reader(file, closefd=False)
            while place < end:
                piece = reader.read(min(PIECE, end - place))
                if not piece:
                    raise zstandard.ZstdError("the frame is too short")
                begin, place = place, place + len(piece)
                if place > offset:
                    yield piece[max(0, offset - begin) :]
    finally:
        os.close(descriptor)


__all__ = ["History", "Limits", "Listener", "Outcome", "Part", "Row"]
