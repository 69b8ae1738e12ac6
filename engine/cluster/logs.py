"""The logs of this node's tasks, as a manager asks for them: lines with their time and stream.

The logs are read as `docker logs` reads them (`containers/logs.py`), with frames and times, which
are taken apart here. Lines of one task are in order; those of several tasks come side by side.

Owns:    the readers, as long as the request is served.
Threads: the event loop's; a log is read in threads.
Raises:  ConnectionError when the manager is lost.
"""

from __future__ import annotations

import asyncio
import calendar
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any
from urllib.parse import unquote_plus

import msgspec

from engine.containers import log_plan, logs
from engine.containers.container import Container
from engine.errors import EngineError
from engine.swarm_session.messages import LogLine, LogLines

STDERR = 2
ERROR = 3
"""The stream of a message about a log that cannot be read."""
MOST = 512
"""Lines in one message."""
LONGEST = 1 << 20
"""Bytes of lines in one message, and of one line: a longer one is cut."""
HEADER = 8
"""Bytes before each frame: its stream, three zeros, its size."""
SLICE = 16384 - 4
"""Bytes of an entry at most that is not a slice of a longer line (`_fast/logreader`)."""
WAITING = 4
"""Messages of all these logs together that wait to be sent."""


async def send(
    tasks: list[tuple[str, Container | None]], query: dict[str, Any], answer: Callable[[LogLines], Awaitable[None]]
) -> None:
    """Send the lines of these tasks' logs; with `follow`, until their containers have ended."""
    queue: asyncio.Queue[tuple[LogLine, ...] | None] = asyncio.Queue(WAITING)

    async def read(task: str, container: Container | None) -> None:
        try:
            async with aclosing(lines(task, container, query)) as batches:
                async for batch in batches:
                    await queue.put(batch)
        except EngineError as error:
            await queue.put((LogLine(task=task, stream=ERROR, time=time.time_ns(), data=error.message.encode()),))
        finally:
            await queue.put(None)

    readers = [asyncio.create_task(read(task, container), name=f"logs of task {task}") for task, container in tasks]
    try:
        left = len(readers)
        while left:
            batch = await queue.get()
            if batch is None:
                left -= 1
            else:
                await answer(LogLines(lines=batch))
    finally:
        for reader in readers:
            reader.cancel()
        if readers:
            await asyncio.wait(readers)


async def lines(
    task: str, container: Container | None, query: dict[str, Any]
) -> AsyncGenerator[tuple[LogLine, ...], None]:
    """The lines of one task's log, in batches. Raises EngineError when it cannot be read."""
    if container is None:
        return
    tail = query.get("tail", -1)
    wanted = logs.Lines(
        stdout=bool(query.get("stdout", True)),
        stderr=bool(query.get("stderr", True)),
        since_ns=max(0, query.get("since") or 0),
        until_ns=max(0, query.get("until") or 0),
        tail=tail if isinstance(tail, int) and tail >= 0 else None,
        timestamps=True,
    )
    chunks = await logs.read_container(container, wanted, follow=bool(query.get("follow")))
    details = _details(container) if query.get("details") else {}
    async with aclosing(chunks):
        async for batch in _batches(task, chunks, details):
            yield batch


async def _batches(
    task: str, chunks: AsyncIterator[bytes], details: dict[str, str]
) -> AsyncGenerator[tuple[LogLine, ...], None]:
    """Each frame is one entry of the log: its time, a space, and a line. A long line is in several
    entries, of which the first alone has a time.
    """
    rest = b""
    unended: dict[int, LogLine] = {}
    """By stream: a line whose last entry was a slice."""
    async for chunk in chunks:
        batch: list[LogLine] = []
        size = 0
        frames, rest = _frames(rest + chunk)
        for stream, data in frames:
            line = unended.pop(stream, None)
            if line is None:
                at, _, text = data.partition(b" ")
                line = LogLine(task=task, stream=stream, time=nanoseconds(at), data=text, details=details)
            else:
                text = data
                line = msgspec.structs.replace(line, data=line.data + text)
            size += len(text)
            sliced = len(text) > SLICE and not text.endswith(b"\n")
            whole = not sliced or len(line.data) >= LONGEST
            if whole:
                batch.append(line)
            if sliced:
                unended[stream] = msgspec.structs.replace(line, data=b"") if whole else line
            if len(batch) >= MOST or size >= LONGEST:
                yield tuple(batch)
                batch, size = [], 0
        if batch:
            yield tuple(batch)
    if last := tuple(line for line in unended.values() if line.data):
        yield last


def _frames(data: bytes) -> tuple[list[tuple[int, bytes]], bytes]:
    """The whole frames of `data`, and what is left of it."""
    found = []
    at = 0
    while len(data) - at >= HEADER:
        end = at + HEADER + int.from_bytes(data[at + 4 : at + HEADER], "big")
        if end > len(data):
            break
        found.append((data[at], data[at + HEADER : end]))
        at = end
    return found, data[at:]


def _details(container: Container) -> dict[str, str]:
    """The labels and variables that the log's options name."""
    text = log_plan.details(container.parts.config, container.record).strip()
    pairs = (each.partition("=") for each in text.split(",") if each)
    return {unquote_plus(name): unquote_plus(value) for name, _, value in pairs}


_seconds: tuple[bytes, int] = (b"", 0)
"""The last second that was parsed: most lines are of the same one as the line before."""


def nanoseconds(text: bytes) -> int:
    """Since the epoch, of `2006-01-02T15:04:05.999999999Z`. 0 for a text of another form."""
    global _seconds  # noqa: PLW0603 (a cache of one entry)
    second, _, fraction = text.rstrip(b"Z").partition(b".")
    known, value = _seconds
    if second != known:
        try:
            value = calendar.timegm(time.strptime(second.decode(), "%Y-%m-%dT%H:%M:%S"))
        except ValueError:
            return 0
        _seconds = second, value
    if not fraction:
        return value * 1_000_000_000
    return value * 1_000_000_000 + int(fraction[:9].ljust(9, b"0")) if fraction.isdigit() else 0


__all__ = ["ERROR", "lines", "nanoseconds", "send"]
