"""The progress of one build as BuildKit's clients show it: vertices with status lines and logs,
made from the output of the engine's own builder.

A step's line (`Step 2/3 : RUN x`) begins a vertex `[2/3] RUN x`, and the next one ends it. What is
between belongs to it: output, the progress of downloads, ` ---> Using cache`.

A client that reads slowly slows the reading of the build's output, which the builder keeps in
files. What a client misses that comes late is bounded by BACKLOG.

Threads: the event loop's. Not here: the builder's output (`build/output.py`), gRPC.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections import deque
from collections.abc import AsyncGenerator

from engine.build.buildkit.control_messages import StatusResponse, Time, Vertex, VertexLog, VertexStatus
from engine.wire.build import BuildMessage

BACKLOG = 10_000
"""Reports that are kept for clients that have not asked yet."""
AHEAD = 1_000
"""Reports that a client may be behind before the build's output waits for it."""
TOGETHER = 200
"""Reports in one message."""

STDOUT, STDERR = 1, 2
_RED, _PLAIN = "\x1b[91m", "\x1b[0m"
_STEP = re.compile(r"Step (\d+)/(\d+) : (.*?)\n?\Z", re.DOTALL)
_QUIET = re.compile(
    r" ---> (Running in )?[0-9a-f]{12}\n\Z| ---> \n\Z|Removing intermediate container [0-9a-f]{12}\n\Z"
    r"|Successfully (built|tagged) [^\n]*\n\Z"
)
"""Lines of the classic output that have no place among vertices."""


def _now() -> Time:
    return Time(*divmod(time.time_ns(), 1_000_000_000))


class Progress:
    """The reports of one build, and their readers."""

    def __init__(self, ref: str) -> None:
        self._ref = ref
        self._count = 0
        self._backlog: deque[StatusResponse] = deque(maxlen=BACKLOG)
        self._readers: set[_Reader] = set()
        self._read = asyncio.Event()
        """A reader has caught up."""
        self._closed = False

    def vertex(self, name: str) -> VertexProgress:
        """Begin a vertex."""
        self._count += 1
        digest = hashlib.sha256(f"{self._ref} {self._count}".encode()).hexdigest()
        return VertexProgress(self, f"sha256:{digest}", name)

    def report(self, report: StatusResponse) -> None:
        if not self._readers:
            self._backlog.append(report)
        for reader in self._readers:
            reader.add(report)

    async def room(self) -> None:
        """Wait until no reader is far behind."""
        while any(len(reader.reports) > AHEAD for reader in self._readers):
            self._read.clear()
            await self._read.wait()

    def close(self) -> None:
        """The build has ended. Idempotent."""
        self._closed = True
        for reader in self._readers:
            reader.changed.set()

    async def read(self) -> AsyncGenerator[StatusResponse, None]:
        """The reports from now on, and for the first reader those before; ends with the build."""
        reader = _Reader(self._backlog)
        self._backlog.clear()
        self._readers.add(reader)
        try:
            while reader.reports or not self._closed:
                reader.changed.clear()
                if reader.reports:
                    yield reader.take()
                    self._read.set()
                elif not self._closed:
                    await reader.changed.wait()
        finally:
            self._readers.discard(reader)
            self._read.set()


class _Reader:
    def __init__(self, reports: deque[StatusResponse]) -> None:
        self.reports = deque(reports)
        self.changed = asyncio.Event()

    def add(self, report: StatusResponse) -> None:
        self.reports.append(report)
        self.changed.set()

    def take(self) -> StatusResponse:
        """The next reports as one."""
        found = StatusResponse(vertexes=[], statuses=[], logs=[], warnings=[])
        for _ in range(min(len(self.reports), TOGETHER)):
            report = self.reports.popleft()
            found.vertexes += report.vertexes
            found.statuses += report.statuses
            found.logs += report.logs
            found.warnings += report.warnings
        return found


class VertexProgress:
    """One vertex that has begun."""

    def __init__(self, progress: Progress, digest: str, name: str) -> None:
        self._progress = progress
        self._vertex = Vertex(digest=digest, name=name, started=_now())
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
            self._vertex.error = error
            self._vertex.cached = self.cached
            self._show()

    def log(self, text: str, stream: int = STDOUT) -> None:
        message = text.encode(errors="replace")
        log = VertexLog(vertex=self._vertex.digest, timestamp=_now(), stream=stream, message=message)
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


class Steps:
    """The steps of a build as vertices."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._current: VertexProgress | None = None
        self._number = self._total = 0
        self.image_id = ""
        """The image that was built, once it is known."""

    def take(self, message: BuildMessage) -> None:
        """One object of the builder's output."""
        if message.aux is not None:
            self.image_id = message.aux.id
        elif message.stream:
            self._take_text(message.stream)
        elif message.status:
            self._take_status(message)

    def _take_text(self, text: str) -> None:
        step = _STEP.match(text)
        # what a RUN prints may look like a step, but hardly like the next one
        if step and int(step[1]) == self._number + 1 and (not self._number or int(step[2]) == self._total):
            self.end()
            self._number, self._total = int(step[1]), int(step[2])
            self._current = self._progress.vertex(f"[{step[1]}/{step[2]}] {step[3]}")
        elif text == " ---> Using cache\n":
            self._vertex().cached = True
        elif _QUIET.match(text) is None:
            stderr = text.startswith(_RED) and text.endswith(_PLAIN)
            text = text.removeprefix(_RED).removesuffix(_PLAIN) if stderr else text
            self._vertex().log(text, STDERR if stderr else STDOUT)

    def _take_status(self, message: BuildMessage) -> None:
        detail = message.progress_detail
        current, total = (detail.current, detail.total) if detail is not None else (0, 0)
        name = f"{message.id}: {message.status}" if message.id else message.status
        done = not total or current >= total
        self._vertex().status(name[:300], current or 0, total or 0, complete=done)

    def _vertex(self) -> VertexProgress:
        if self._current is None:
            self._current = self._progress.vertex("[internal] prepare the build")
        return self._current

    def end(self, error: str = "") -> None:
        """The current step has ended. With an error it is shown at that step."""
        if self._current is not None:
            self._current.end(error)
            self._current = None
