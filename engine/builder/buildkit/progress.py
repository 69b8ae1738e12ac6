"""The progress of one build as BuildKit's clients show it: vertices with status lines and logs,
made from the reports of the engine's own builder.

A step begins a vertex, and the next one ends it. What is between belongs to it: output, the
progress of downloads, its place in the cache.

A client that reads slowly slows the reading of the build's reports, which the builder keeps in
files. What a client misses that comes late is bounded by BACKLOG.

Messages are bounded in bytes, because clients refuse larger ones (buildx: 16 MiB). Output is
clipped as BuildKit clips it: each stream of a step may have LIMITS.

Threads: the event loop's. Not here: the builder's reports (`builder/reports.py`), gRPC.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import os
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from engine.builder.buildkit.control_messages import (
    Position,
    Range,
    SourceInfo,
    StatusResponse,
    Time,
    Vertex,
    VertexLog,
    VertexStatus,
    VertexWarning,
)
from engine.builder.reports import (
    STDERR,
    STDOUT,
    CacheHit,
    CheckWarning,
    ImageMade,
    Notice,
    OfStage,
    Output,
    Report,
    StepBegun,
    StepEnded,
    Transfer,
)
from engine.errors import EngineError
from engine.rpc.grpc import shortened

BACKLOG = 10_000
"""Reports that are kept for clients that have not asked yet."""
BACKLOG_BYTES = 16 << 20
"""Their bytes."""
AHEAD = 1_000
"""Reports that a client may be behind before the build's output waits for it."""
AHEAD_BYTES = 4 << 20
"""Their bytes."""
TOGETHER = 200
"""Reports in one message."""
TOGETHER_BYTES = 1 << 20
"""Their bytes, without those of the last one, which has less than 128 KiB."""
PIECE = 64 << 10
"""Bytes of output in one report."""
CANCELED = "context canceled"
"""The error of a vertex whose build ends for another reason."""
PACE = 0.01
"""Seconds between two messages to one client, unless the build has ended or TOGETHER reports wait:
a client answers each message, and draws ten times a second.
"""
STALLED = 10.0
"""Seconds without a message after which a reader is not waited for at the end of a build."""


class Limits(NamedTuple):
    """Bytes of one stream of a step that are shown. BuildKit's defaults; -1: no limit."""

    size: int = 2 << 20
    """In all."""
    speed: int = 200 << 10
    """For each second that has begun."""


def limits(environment: Mapping[str, str]) -> Limits:
    """As buildkitd reads them from its environment: a text that is no number is ignored."""

    def number(name: str, default: int) -> int:
        text = environment.get(name, "")
        return int(text) if _NUMBER.fullmatch(text) else default

    default = Limits()
    return Limits(
        number("BUILDKIT_STEP_LOG_MAX_SIZE", default.size), number("BUILDKIT_STEP_LOG_MAX_SPEED", default.speed)
    )


_NUMBER = re.compile(r"-1|[0-9]{1,12}", re.ASCII)
LIMITS = limits(os.environ)


class Clip:
    """The part of one stream's output that is shown."""

    def __init__(self, limits: Limits, begun: float) -> None:
        """`begun`: when the step began, of a monotonic clock in seconds."""
        self._limits = limits
        self._begun = begun
        self._seen = 0
        """Bytes so far, clipped ones too: after a flood nothing is shown until the time for that
        many bytes has passed."""
        self._clipping = False

    def take(self, data: bytes, now: float) -> bytes:
        """What is shown of these bytes, and where it begins to be clipped, a line that says so."""
        size, speed = self._limits
        allowed, reason = size, _units(size)
        if speed >= 0:
            by_now = max(1, math.ceil(now - self._begun)) * speed
            if size < 0 or by_now <= size:
                allowed, reason = by_now, f"{_units(speed)}/s"
        room = len(data) if allowed < 0 else max(0, allowed - self._seen)
        self._seen += len(data)
        if room >= len(data):
            self._clipping = False
            return data
        note = b"" if self._clipping else f"\n[output clipped, log limit {reason} reached]\n".encode()
        self._clipping = True
        return data[:room] + note


def _units(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:g}{unit}"
        count /= 1024
    return f"{count:g}GiB"


def _now() -> Time:
    return Time(*divmod(time.time_ns(), 1_000_000_000))


class Progress:
    """The reports of one build, and their readers."""

    def __init__(self, ref: str) -> None:
        self._ref = ref
        self._count = 0
        self._backlog = _Queue()
        self._readers: set[Reports] = set()
        self._aside: set[Reports] = set()
        self.caught_up = asyncio.Event()
        """A reader has read something, or reads no more."""
        self._vertices: dict[str, Vertex] = {}
        """As last reported, for readers that come late."""
        self._begun = False
        """A client has got the first reports."""
        self.closed = False
        """The build has ended."""
        self.failed = ""
        """Digest of the last vertex that has failed."""

    def vertex(self, name: str) -> VertexProgress:
        """Begin a vertex."""
        self._count += 1
        digest = hashlib.sha256(f"{self._ref} {self._count}".encode()).hexdigest()
        return VertexProgress(self, f"sha256:{digest}", name)

    @contextlib.contextmanager
    def during(self, name: str) -> Iterator[VertexProgress]:
        """A vertex for the time of the context manager, which fails with it."""
        vertex = self.vertex(name)
        try:
            yield vertex
        except EngineError as error:
            vertex.end(error.message)
            raise
        finally:
            vertex.end()

    def report(self, report: StatusResponse) -> None:
        self._vertices.update((vertex.digest, vertex) for vertex in report.vertexes)
        if not self._readers:
            self._backlog.add(report)
            self._backlog.shrink(BACKLOG, BACKLOG_BYTES)
        for reader in self._readers | self._aside:
            reader.add(report)

    async def room(self) -> None:
        """Wait until no reader is far behind."""
        while any(reader.reports.beyond(AHEAD, AHEAD_BYTES) for reader in self._readers | self._aside):
            self.caught_up.clear()
            await self.caught_up.wait()

    def close(self) -> None:
        """The build has ended. Idempotent."""
        self.closed = True
        for reader in self._readers | self._aside:
            reader.changed.set()

    async def taken(self) -> None:
        """After `close`: wait until every reader has all reports, or until one has stalled."""
        while self._readers:
            self.caught_up.clear()
            try:
                await asyncio.wait_for(self.caught_up.wait(), STALLED)
            except TimeoutError:
                return

    def read(self) -> Reports:
        """The reports from now on; ends with the build. The first reader gets those before, too,
        the others how each vertex is.
        """
        queue = self._backlog
        self._backlog = _Queue()
        if self._begun:
            for vertex in self._vertices.values():
                queue.add(StatusResponse(vertexes=[vertex]))
        self._begun = True
        return Reports(self, queue, self._readers, pace=PACE)

    def read_aside(self) -> Reports:
        """The reports from now on for a reader that is no client. It gets many together, and
        neither takes those before from the first client nor delays the end of the build.
        """
        return Reports(self, _Queue(), self._aside, together=TOGETHER)


class Reports:
    """One reader of a progress: an iterator, which must be closed unless it has ended."""

    def __init__(
        self, progress: Progress, queue: _Queue, readers: set[Reports], *, together: int = 0, pace: float = 0
    ) -> None:
        """`together`: more reports than these are awaited, or more bytes than TOGETHER_BYTES.
        `pace`: seconds after which it reads again.
        """
        self._progress = progress
        self._readers = readers
        self._together = together
        self._pace = pace
        self._resting: asyncio.TimerHandle | None = None
        self.reports = queue
        """Those that it has not read."""
        self.changed = asyncio.Event()
        """There are more, or the build has ended."""
        readers.add(self)

    def __aiter__(self) -> Reports:
        return self

    async def __anext__(self) -> StatusResponse:
        self._progress.caught_up.set()
        while self in self._readers and (self.reports or not self._progress.closed):
            self.changed.clear()
            if self._ready():
                if self._pace and self._resting is None:
                    self._resting = asyncio.get_running_loop().call_later(self._pace, self._rested)
                return self.reports.take()
            await self.changed.wait()
        self.close()
        raise StopAsyncIteration

    def add(self, report: StatusResponse) -> None:
        self.reports.add(report)
        if self._ready():
            self.changed.set()

    def _ready(self) -> bool:
        if self._progress.closed:
            return True
        together = self._together if self._resting is None else TOGETHER
        return self.reports.beyond(together, TOGETHER_BYTES)

    def _rested(self) -> None:
        self._resting = None
        if self._ready():
            self.changed.set()

    def close(self) -> None:
        """Read no more. Idempotent."""
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None
        self._readers.discard(self)
        self._progress.caught_up.set()

    async def aclose(self) -> None:
        """As `close`, for contextlib.aclosing."""
        self.close()


class _Queue:
    """Reports in order, and about how many bytes they have."""

    def __init__(self) -> None:
        self._reports: deque[tuple[StatusResponse, int]] = deque()
        self._bytes = 0

    def __bool__(self) -> bool:
        return bool(self._reports)

    def add(self, report: StatusResponse) -> None:
        size = 256 + sum(len(log.message) for log in report.logs)
        size += sum(len(vertex.name) + len(vertex.error) for vertex in report.vertexes)
        size += sum(len(each.short) + len(each.info.data if each.info else b"") for each in report.warnings)
        self._reports.append((report, size))
        self._bytes += size

    def beyond(self, reports: int, size: int) -> bool:
        return len(self._reports) > reports or self._bytes > size

    def shrink(self, reports: int, size: int) -> None:
        """Drop the oldest reports until no more than so many are left."""
        while self.beyond(reports, size):
            self._pop()

    def _pop(self) -> StatusResponse:
        report, size = self._reports.popleft()
        self._bytes -= size
        return report

    def take(self) -> StatusResponse:
        """The next reports as one."""
        found = StatusResponse(vertexes=[], statuses=[], logs=[], warnings=[])
        count, before = 0, self._bytes
        while self._reports and count < TOGETHER and before - self._bytes < TOGETHER_BYTES:
            report = self._pop()
            count += 1
            found.vertexes += report.vertexes
            found.statuses += report.statuses
            found.logs += report.logs
            found.warnings += report.warnings
        return found


class VertexProgress:
    """One vertex that has begun."""

    def __init__(self, progress: Progress, digest: str, name: str) -> None:
        self._progress = progress
        self._vertex = Vertex(digest=digest, name=shortened(name), started=_now())
        begun = time.monotonic()
        self._clips = {stream: Clip(LIMITS, begun) for stream in (STDOUT, STDERR)}
        self._begun: dict[str, Time] = {}
        """When each status line began that has not ended."""
        self.cached = False
        self._show()

    def _show(self) -> None:
        shown = Vertex(**{name: getattr(self._vertex, name) for name in self._vertex.__struct_fields__})
        self._progress.report(StatusResponse(vertexes=[shown]))

    def end(self, error: str = "") -> None:
        """Only the first call has an effect."""
        if self._vertex.completed is None:
            for name in list(self._begun):
                self.status(name, complete=True)
            self._vertex.completed = _now()
            self._vertex.error = shortened(error)
            if error:
                self._progress.failed = self._vertex.digest
            self._vertex.cached = self.cached
            self._show()

    def log(self, text: str, stream: int = STDOUT) -> None:
        shown = self._clips[stream].take(text.encode(errors="replace"), time.monotonic())
        for piece in _pieces(shown):
            log = VertexLog(vertex=self._vertex.digest, timestamp=_now(), stream=stream, message=piece)
            self._progress.report(StatusResponse(logs=[log]))

    def status(self, name: str, current: int = 0, total: int = 0, *, complete: bool = False) -> None:
        """A line of its own below the vertex, with numbers that grow."""
        now = _now()
        started = self._begun.setdefault(name, now)
        if complete:
            del self._begun[name]
        shown = VertexStatus(
            id=name,
            vertex=self._vertex.digest,
            name=name,
            current=current,
            total=total,
            timestamp=now,
            started=started,
            completed=now if complete else None,
        )
        self._progress.report(StatusResponse(statuses=[shown]))

    def warn(self, warning: CheckWarning, source: SourceInfo | None) -> None:
        """Show a failed check of a Dockerfile, whose text is `source`."""
        first, last = warning.lines
        shown = VertexWarning(
            vertex=self._vertex.digest,
            level=1,
            short=shortened(warning.short).encode(),
            detail=[warning.detail.encode()],
            url=warning.url,
            info=source,
            ranges=[Range(Position(first), Position(last))],
        )
        self._progress.report(StatusResponse(warnings=[shown]))


def _pieces(data: bytes) -> Iterator[bytes]:
    for at in range(0, len(data), PIECE):
        yield data[at : at + PIECE]


class Steps:
    """The steps of a build as vertices. Stages that are built at one time have one each."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._lanes: dict[int, _Lane] = {}
        self._last = self._lane(_NO_STAGE)
        """The one of the last report.

        A build that fails ends with a report of the stage that failed.
        """
        self.image_id = ""
        """The image that was built, once it is known."""

    @property
    def lines(self) -> tuple[int, int] | None:
        """Those of the last step that has begun in the stage of the last report."""
        return self._last.lines

    def _lane(self, stage: int) -> _Lane:
        if stage not in self._lanes:
            self._lanes[stage] = _Lane(self._progress)
        return self._lanes[stage]

    def take(self, report: Report) -> None:
        """One report of the builder."""
        stage = _NO_STAGE
        if isinstance(report, OfStage):
            stage, report = report.stage, report.report
        self._last = self._lane(stage)
        if isinstance(report, ImageMade):
            self.image_id = report.id
        else:
            self._last.take(report)

    def end(self, error: str = "") -> None:
        """The current steps have ended. An error is shown at the last one; others are canceled."""
        for lane in self._lanes.values():
            lane.end(error if lane is self._last or not error else CANCELED)


_NO_STAGE = -1
"""Of reports before and after the stages."""


class _Lane:
    """Steps of which each begins after the end of the one before."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._current: VertexProgress | None = None
        self._name = "[internal] prepare the build"
        """Of the step whose reports come, if it gets a vertex only with the first of them."""
        self.lines: tuple[int, int] | None = None
        """Those of the last step that has begun, until it has succeeded."""

    def take(self, report: Report) -> None:
        if isinstance(report, StepBegun):
            self.end()
            self._name = report.text
            self.lines = report.lines
            if report.vertex:
                self._current = self._progress.vertex(report.vertex)
        elif isinstance(report, StepEnded):
            if not report.failed:
                self.end()
                self.lines = None
        elif isinstance(report, CacheHit):
            if self._current is not None:
                self._current.cached = True
        elif isinstance(report, Output):
            self._vertex().log(report.text, report.stream)
        elif isinstance(report, Notice):
            if not report.classic:
                self._vertex().log(report.text)
        elif isinstance(report, Transfer):
            self._take_transfer(report)

    def _take_transfer(self, report: Transfer) -> None:
        detail = report.progress_detail
        current, total = (detail.current, detail.total) if detail is not None else (0, 0)
        name = f"{report.id}: {report.status}" if report.id else report.status
        done = not total or current >= total
        self._vertex().status(name[:300], current or 0, total or 0, complete=done)

    def _vertex(self) -> VertexProgress:
        if self._current is None:
            self._current = self._progress.vertex(self._name)
        return self._current

    def end(self, error: str = "") -> None:
        if self._current is not None:
            self._current.end(error)
            self._current = None
