"""A log as lines: entries, slices of long lines, times."""

from __future__ import annotations

import asyncio
import calendar
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine._fast.frames import mux
from engine.cluster import logs
from engine.cluster.logs import LONGEST, SLICE, nanoseconds
from engine.errors import ServerError
from engine.swarm_session.messages import LogLine, LogLines

AT = b"2026-11-23T17:16:25.000000005Z"
NS = calendar.timegm((2026, 11, 23, 17, 16, 25)) * 1_000_000_000 + 5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (AT, NS),
        (b"2026-11-23T17:16:25.5Z", NS - 5 + 500_000_000),
        (b"2026-11-23T17:16:25Z", NS - 5),
        (b"1970-01-01T00:00:00.000000001Z", 1),
        (b"", 0),
        (b"x", 0),
        (b"2026-13-23T17:16:25.0Z", 0),
        (b"2026-11-23T17:16:25.xZ", 0),
    ],
)
def test_times(text: bytes, expected: int) -> None:
    assert nanoseconds(text) == expected
    assert nanoseconds(text) == expected, "the second time"


async def _lines(*chunks: bytes) -> list[LogLine]:
    async def given() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    return [line async for batch in logs._batches("t", given(), {}) for line in batch]


async def test_entries() -> None:
    whole = mux(1, AT + b" one\n") + mux(2, AT + b" two words\n") + mux(1, AT + b" \n") + mux(1, AT + b" end")
    expected = [(1, b"one\n"), (2, b"two words\n"), (1, b"\n"), (1, b"end")]
    for chunks in ([whole], [bytes([each]) for each in whole], [whole[:7], whole[7:]]):
        lines = await _lines(*chunks)
        assert [(line.stream, line.data) for line in lines] == expected
        assert {line.time for line in lines} == {NS} and {line.task for line in lines} == {"t"}


async def test_a_long_line_in_slices() -> None:
    piece = b"x" * (SLICE + 4)
    frames = (
        mux(1, AT + b" " + piece) + mux(2, AT + b" err\n") + mux(1, piece) + mux(1, b"end\n") + mux(1, AT + b" a\n")
    )
    lines = await _lines(frames)
    assert [(line.stream, line.data) for line in lines] == [(2, b"err\n"), (1, piece * 2 + b"end\n"), (1, b"a\n")]
    unended = await _lines(mux(1, AT + b" " + piece))
    assert [line.data for line in unended] == [piece]


async def test_a_line_without_end_is_cut() -> None:
    piece = b"x" * (SLICE + 4)
    count = LONGEST // len(piece) + 10
    lines = await _lines(mux(1, AT + b" " + piece), *(mux(1, piece) for _ in range(count - 1)), mux(1, b"\n"))
    assert len(lines) == 2 and sum(len(line.data) for line in lines) == count * len(piece) + 1
    assert {line.time for line in lines} == {NS}


@given(st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=40).filter(lambda data: b"\n" not in data))))
def test_any_lines(entries: list[tuple[int, bytes]]) -> None:
    whole = b"".join(mux(stream, AT + b" " + data + b"\n") for stream, data in entries)
    half = len(whole) // 2
    found = asyncio.run(_lines(whole[:half], whole[half:]))
    assert [(line.stream, line.data[:-1]) for line in found] == entries


async def test_a_log_that_cannot_be_read_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    async def lines(task: str, container: Any, query: Any) -> AsyncIterator[tuple[LogLine, ...]]:
        yield (LogLine(task=task, stream=1, time=1, data=b"x\n"),)
        if task == "bad":
            raise ServerError("configured logging driver does not support reading")

    monkeypatch.setattr(logs, "lines", lines)
    sent: list[LogLine] = []

    async def answer(message: LogLines) -> None:
        sent.extend(message.lines)

    await logs.send([("good", None), ("bad", None)], {}, answer)
    assert sorted((line.task, line.stream) for line in sent) == [("bad", 1), ("bad", 3), ("good", 1)]
    (error,) = [line for line in sent if line.stream == 3]
    assert b"does not support reading" in error.data
    await logs.send([], {}, answer)


async def test_a_reader_that_leaves_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    async def lines(task: str, container: Any, query: Any) -> AsyncIterator[tuple[LogLine, ...]]:
        try:
            while True:
                yield (LogLine(task=task, stream=1, time=1, data=b"x\n"),)
        finally:
            closed.append(task)

    monkeypatch.setattr(logs, "lines", lines)
    count = 0

    async def answer(message: LogLines) -> None:
        nonlocal count
        count += 1
        if count == 20:
            raise ConnectionError

    with pytest.raises(ConnectionError):
        await logs.send([("a", None), ("b", None)], {}, answer)
    assert sorted(closed) == ["a", "b"]
