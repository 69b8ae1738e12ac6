"""Logs of build steps: order, late readers, the file beyond the memory, and text of processes."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.builder import output
from engine.builder.output import Log, Terminal
from engine.builder.reports import CacheHit, ImageMade, Notice, Output, Report, StepBegun, Transfer
from engine.errors import ServerError
from engine.wire.images import ProgressDetail


async def read(log: Log) -> str:
    return "".join(await _texts(log))


def test_a_reader_gets_what_is_written_before_and_after_it_begins(tmp_path: Path) -> None:
    async def run() -> None:
        log = Log(tmp_path)
        log.say("early ")
        reading = asyncio.create_task(read(log))
        await asyncio.sleep(0)
        log.say("late ")
        await asyncio.sleep(0)
        log.say("last")
        log.close()
        assert await reading == await read(log) == "early late last"

    asyncio.run(run())


def test_another_log_stands_where_it_was_followed(tmp_path: Path) -> None:
    async def run() -> None:
        outer, inner = Log(tmp_path), Log(tmp_path)
        outer.say("<")
        outer.follow(inner)
        outer.say(">")
        outer.close()
        reading = asyncio.create_task(read(outer))
        await asyncio.sleep(0)
        assert not reading.done(), "the inner log is still open"
        inner.say("inner")
        inner.close()
        assert await reading == "<inner>"

    asyncio.run(run())


def test_output_beyond_the_memory_is_kept_in_a_file_without_a_name(tmp_path: Path) -> None:
    async def run() -> None:
        log = Log(tmp_path)
        pieces = [f"{number:08d}" * 2000 for number in range(200)]
        reading = asyncio.create_task(read(log))
        for piece in pieces:
            log.say(piece)
            await asyncio.sleep(0)
        log.close()
        assert sum(map(len, pieces)) > 2 * output.MEMORY
        assert await reading == await read(log) == "".join(pieces)
        assert os.listdir(tmp_path) == []

    asyncio.run(run())


def test_reports_of_every_type_come_back_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "MEMORY", 0)
    reports: list[Report] = [
        StepBegun(1, 2, "RUN x", "[1/1] RUN x"),
        CacheHit(),
        Output(2, "err\n"),
        Notice("words\n", True),
        Transfer(status="Downloading", id="a", progress="[>]", progress_detail=ProgressDetail(1, 2)),
        ImageMade("sha256:1"),
    ]

    async def run() -> None:
        log = Log(tmp_path)
        for report in reports:
            log.write(report)
        log.close()
        assert [report async for report in log.read()] == reports

    asyncio.run(run())


def test_an_object_that_the_disk_had_no_space_for_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        log = Log(tmp_path)
        log.say("x" * output.MEMORY)
        log.say("kept ")
        write, full = os.pwrite, iter((False, True))

        def half(file: int, data: memoryview, offset: int) -> int:
            if next(full):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(file, data[: len(data) // 2], offset)

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", half)
            with pytest.raises(ServerError, match="no space left on device"):
                log.say("lost" * 100)
        log.say("after")
        log.close()
        assert (await read(log))[output.MEMORY :] == "kept after"

    asyncio.run(run())


@given(st.lists(st.tuples(st.sampled_from((1, 2)), st.binary(max_size=9)), max_size=20))
def test_text_is_the_same_however_the_bytes_arrive(pieces: list[tuple[int, bytes]]) -> None:
    async def run() -> None:
        log = Log(Path("/nonexistent"))
        terminal = Terminal(log)
        for stream, data in pieces:
            terminal.write(stream, data)
        terminal.end()
        log.close()
        found = [report async for report in log.read() if isinstance(report, Output)]
        for number in (1, 2):
            text = "".join(each.text for each in found if each.stream == number)
            assert text == b"".join(data for stream, data in pieces if stream == number).decode(errors="replace")

    asyncio.run(run())


def test_another_log_after_a_lot_of_output_has_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "MEMORY", 100)

    async def run() -> None:
        log, other = output.Log(tmp_path), output.Log(tmp_path)
        live = asyncio.create_task(_texts(log))
        for number in range(10):
            log.say(str(number))
            await asyncio.sleep(0)
        other.say("other")
        other.close()
        log.follow(other)
        log.say("a")
        await asyncio.sleep(0)
        log.say("b")
        log.close()
        assert await _texts(log) == await live == [*map(str, range(10)), "other", "a", "b"]

    asyncio.run(run())


async def _texts(log: output.Log) -> list[str]:
    return [report.text async for report in log.read() if isinstance(report, Notice | Output)]
