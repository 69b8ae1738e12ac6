"""The log reader. Budget: 400 MB/s of output in lines of about 100 bytes; tail and since take no
noticeable time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.micro import sized
from engine._fast.logreader import LogReader
from tests.unit.fast.jsonlogs import entry

LINE = b"2026-01-02 03:04:05 INFO  request served path=/index.html status=200 bytes=5120 took=0.004s user=bob\n"
LINES = sized(1 << 30, 8 << 20) // len(LINE)
START = 1_700_000_000 * 10**9


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """1 GB of output.

    Its times are fixed: a search by time takes as many steps as they have it take.
    """
    path = tmp_path_factory.mktemp("log") / "c.log"
    one = entry(LINE.decode(), START + 1)
    assert one.count(b"000000001") == 1
    form = one.replace(b"%", b"%%").replace(b"000000001", b"%09d")
    with path.open("wb") as file:
        for number in range(1, LINES + 1):
            file.write(form % (number * 10 + 1))  # no last zero, which would be cut
    yield path
    path.unlink()


@pytest.mark.parametrize(
    "options", [{}, {"framed": True}, {"framed": True, "timestamps": True}, {"stdout": False}], ids=str
)
def test_read(benchmark: Any, log: Path, options: dict[str, bool]) -> None:
    size = LINES * (len(LINE) + 8 * ("framed" in options) + 31 * ("timestamps" in options)) * ("stdout" not in options)

    def run() -> int:
        reader = LogReader(os.fsencode(log), **options)
        got = 0
        while not reader.at_end:
            got += len(reader.read(512 << 10))
        reader.close()
        return got

    assert benchmark.pedantic(run, rounds=3, warmup_rounds=1) == size
    benchmark.extra_info["MB/s"] = round(LINES * len(LINE) / benchmark.stats["min"] / 1e6)


def test_tail(benchmark: Any, log: Path) -> None:
    """The last 100 lines of 1 GB."""

    def run() -> bytes:
        reader = LogReader(os.fsencode(log))
        reader.seek_tail(100)
        data = reader.read(1 << 20)
        reader.close()
        return data

    assert run() == LINE * 100
    benchmark(run)


def test_since(benchmark: Any, log: Path) -> None:
    """The last entry of 1 GB, by its time."""

    def run() -> bytes:
        reader = LogReader(os.fsencode(log), since_ns=START + LINES * 10 + 1)
        data = reader.read(1 << 20)
        reader.close()
        return data

    assert run() == LINE
    benchmark(run)
