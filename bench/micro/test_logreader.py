"""The log reader. Budget: 400 MB/s of output in lines of about 100 bytes; tail and since take no
noticeable time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from bench.micro import sized
from engine._fast.logreader import LogReader
from engine._fast.logwriter import LogWriter

LINE = b"2026-01-02 03:04:05 INFO  request served path=/index.html status=200 bytes=5120 took=0.004s user=bob\n"
READ = LINE * 640  # about 64 KiB, as a pipe gives
OUTPUT = sized(1 << 30, 8 << 20)
TOTAL = sized(128 << 20, 4 << 20)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """1 GB of output, or `OUTPUT`."""
    path = tmp_path_factory.mktemp("log") / "c.log"
    writer = LogWriter(os.fsencode(path))
    for _ in range(OUTPUT // len(READ)):
        writer.write(1, READ)
    writer.close()
    yield path
    path.unlink()


@pytest.mark.parametrize(
    "options", [{}, {"framed": True}, {"framed": True, "timestamps": True}, {"stdout": False}], ids=str
)
def test_read(benchmark: Any, log: Path, options: dict[str, bool]) -> None:
    lines = OUTPUT // len(READ) * 640
    size = lines * (len(LINE) + 8 * ("framed" in options) + 31 * ("timestamps" in options)) * ("stdout" not in options)

    def run() -> int:
        reader = LogReader(os.fsencode(log), **options)
        got = 0
        while not reader.at_end:
            got += len(reader.read(512 << 10))
        reader.close()
        return got

    assert benchmark.pedantic(run, rounds=3, warmup_rounds=1) == size
    benchmark.extra_info["MB/s"] = round(lines * len(LINE) / benchmark.stats["min"] / 1e6)


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
    reader = LogReader(os.fsencode(log), timestamps=True)
    reader.seek_tail(1)
    stamp = reader.read(100)[:30].decode()
    reader.close()
    second, fraction = stamp[:-1].split(".")
    at = int(datetime.fromisoformat(second).replace(tzinfo=UTC).timestamp()) * 10**9 + int(fraction)

    def run() -> bytes:
        reader = LogReader(os.fsencode(log), since_ns=at)
        data = reader.read(1 << 20)
        reader.close()
        return data

    assert run() == LINE
    benchmark(run)
