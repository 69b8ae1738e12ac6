"""A container's log as a stream of chunks for a client: history and new output.

The reading itself (`_fast/logreader`) runs in threads, one call at a time, so neither a slow disk
nor a large log blocks the loop. What is in the page cache and small, such as a few last lines, is
read in the loop, because a thread would cost more than the reading. A reader does not slow the
writer: it reads the monitor's files at its own pace. Rotation waits for a reader that is not too
far behind (`LogWriter`), so nothing is lost when small files rotate faster than a reader can open
them. A reader that has all files open within one turn of the loop needs no such help.

Owns: the log's descriptors while the stream is read; they are closed when it ends, is closed or is
      cancelled.
"""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec.structs import asdict, replace

from engine._fast.logreader import LogReader
from engine.containers import log_plan
from engine.containers.container import Container
from engine.errors import ServerError

CHUNK = 512 << 10
"""Bytes per chunk at most: enough to make the hand-over from a thread cheap, small enough for
thousands of readers.
"""

AT_ONCE = 64 << 10
"""Bytes of the first chunk at most, if it is read in the loop: a fraction of a millisecond."""

LATE = 0.001
"""Seconds that reading in the loop may take. Longer ones are those of file systems that wait where
local ones do not: a network, FUSE, or a program that is asked for each open(2) (fanotify(7))."""

_PAUSE = 0.1


class Reading(Protocol):
    """Reports to the writer about a reader (`monitor.handles.LogReading`)."""

    def complete(self) -> bool: ...
    async def begin(self) -> None: ...
    def holds(self, inode: int) -> None: ...
    def end(self) -> None: ...


class Lines(msgspec.Struct, frozen=True, kw_only=True):
    """Which lines of a log, and how they are shown."""

    stdout: bool = True
    stderr: bool = True
    since_ns: int = 0
    """Nanoseconds since the epoch, included; 0 for none. So is `until_ns`."""
    until_ns: int = 0
    tail: int | None = None
    """The last entries; None for all."""
    timestamps: bool = False
    details: bytes = b""
    """Text before each line, as it is."""
    framed: bool = True
    """With 8-byte headers."""
    until_position: tuple[int, int] | None = None
    """(inode, offset) where to stop, exactly."""


async def read_container(
    container: Container, lines: Lines, *, details: bool = False, follow: bool = False
) -> AsyncGenerator[bytes, None]:
    """Chunks of its log, which is open by then; with `follow`, until the container has ended.
    `details`: its labels and variables that its log options name stand before each line.

    Raises ServerError when its log driver keeps nothing to read.
    """
    path = container.log_path
    if path is None:
        raise ServerError("configured logging driver does not support reading")

    async def grown(inode: int, offset: int) -> bool:
        """Wait for more output.

        Returns False when the container has ended; its log is then complete.
        """
        if not container.running:
            return False
        await container.parts.monitor.watch_log(container.id, inode, offset)
        return True

    record = container.record
    if details:
        lines = replace(lines, details=log_plan.details(container.parts.config, record).encode())
    chunks = read(
        path,
        lines,
        follow=grown if follow and container.running else None,
        reading=container.log_reading(),
        rotates=log_plan.rotates(record),
    )
    return await opened(chunks)


async def opened(chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The chunks of `read`, with the log already open: nothing that later happens to the container,
    even its removal, takes output away.
    """
    await anext(chunks)
    return chunks


async def read(
    path: Path,
    lines: Lines,
    *,
    follow: Callable[[int, int], Awaitable[bool]] | None = None,
    reading: Reading | None = None,
    rotates: bool = True,
) -> AsyncGenerator[bytes, None]:
    """Chunks of the log at `path`, the first of them empty, when the log is open. A log that does
    not exist (yet) is empty.

    Raises ServerError when it cannot be read.

    `follow(inode, offset)` is awaited
    at the end: True when the log may have grown beyond that position, False when it never will; it
    is then read to its end once more. Without it the log is read as it is now, whatever is written
    meanwhile. `reading`: of a log that is being written; it is ended here. `rotates`: False for a
    log that has one file only.
    """
    loop = asyncio.get_running_loop()
    reader: LogReader | None = None
    try:
        options = {**asdict(lines), "until_now": follow is None, "rotates": rotates}
        tail = options.pop("tail")
        if reading is not None and (follow is not None or not reading.complete()):
            await reading.begin()
        opened = _at_once.open(path, tail, options)
        if opened is None:
            if reading is not None:
                await reading.begin()
            opened = await loop.run_in_executor(None, _open, path, tail, options, CHUNK)
        reader, chunk = opened
        yield b""
        ended = follow is None
        waited: tuple[int, int] | None = None
        while True:
            if reading is not None:
                if follow is None:
                    reading.end()  # all requested files are held open
                else:
                    reading.holds(reader.newest())
            if chunk:
                yield chunk
            if reader.done or (reader.at_end and ended):
                return
            if reader.at_end and follow is not None:
                position = reader.position()
                ended = not await follow(*position)
                if position == waited and not ended:
                    # `follow` promised more and nothing came: a rotation is in progress, or an
                    # operator moved the file. Do not spin.
                    await asyncio.sleep(_PAUSE)
                waited = position
            chunk = await loop.run_in_executor(None, reader.read, CHUNK)
    except OSError as error:
        raise ServerError(f"the log {path} cannot be read: {error.strerror or error}") from error
    finally:
        if reading is not None:
            reading.end()
        if reader is not None:
            reader.close()  # closed at once, or by the thread that is still using it


def end(path: Path) -> tuple[int, int]:
    """(inode, offset) of the end of a log without a writer; (0, 0) when there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return 0, 0
    return status.st_ino, status.st_size


def _open(path: Path, tail: int | None, options: dict[str, Any], size: int) -> tuple[LogReader, bytes]:
    """The reader, and its first chunk of `size` bytes at most."""
    reader = LogReader(os.fsencode(path), **options)
    if tail is not None:
        reader.seek_tail(tail)
    return reader, reader.read(size)


class _AtOnce:
    """Opens logs in the loop, where they can be read without waiting."""

    TRIES, PAUSE = 3, 10.0
    """Attempts in a row that waited, and took longer than `LATE`, and the seconds without another
    one after them. A single one may have waited for the GIL."""

    def __init__(self) -> None:
        self._late = 0
        self._not_before = 0.0

    def open(self, path: Path, tail: int | None, options: dict[str, Any]) -> tuple[LogReader, bytes] | None:
        """As `_open`. None when a thread has to do it."""
        begin = time.monotonic()
        if begin < self._not_before:
            return None
        waits = _waits()
        try:
            reader, chunk = _open(path, tail, {**options, "nowait": True}, AT_ONCE)
        except OSError:  # also what is wrong with the log: the thread finds it again
            return None
        finally:
            end = time.monotonic()
            self._late = self._late + 1 if end > begin + LATE and _waits() > waits else 0
            if self._late == self.TRIES:
                self._late, self._not_before = 0, end + self.PAUSE
        reader.nowait = False
        return reader, chunk


def _waits() -> int:
    """How often this thread has waited: getrusage(2). Being preempted on a busy host is no wait."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


_at_once = _AtOnce()
