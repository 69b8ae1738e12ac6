"""Writing to a spool, compared with a json-file log: `spool` is to take no more than 10 % longer
than `json-file`.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from bench.micro import sized
from engine._fast.board import Board
from engine._fast.logwriter import LogWriter
from engine._fast.spool import Spool

LINE = b"2026-01-02 03:04:05 INFO  request served path=/index.html status=200 bytes=5120 took=0.004s user=bob\n"
TOTAL = sized(64 << 20, 4 << 20)


@pytest.mark.parametrize("size", [1, 640], ids=["a line at a time", "64 KiB at a time"])
@pytest.mark.parametrize("kind", ["json-file", "spool"])
def test_write(benchmark: Any, request: pytest.FixtureRequest, kind: str, size: int) -> None:
    data = LINE * size
    calls = TOTAL // len(data) if size > 1 else 50_000
    directory = Path(tempfile.mkdtemp(dir="/dev/shm"))
    request.addfinalizer(lambda: shutil.rmtree(directory))
    board = Board(os.fsencode(directory / "shipper"), monitor=True)

    def fresh() -> tuple[tuple[LogWriter], dict[str, object]]:
        for path in directory.glob("spool.log*"):
            path.unlink()
        path = os.fsencode(directory / "spool.log")
        if kind == "json-file":
            return (LogWriter(path, 16 << 20, 2),), {}
        spool = Spool(path, 16 << 20, 2)
        spool.join(board, "c" * 64, (0, 0, 0, 0), 1 << 40, False)
        return (spool,), {}

    def run(writer: LogWriter) -> None:
        for _ in range(calls):
            writer.write(1, data)
        writer.close()

    benchmark.pedantic(run, setup=fresh, rounds=7)
    with (directory / "spool.log").open("rb") as file:
        assert json.loads(file.readline())["log"].encode() == LINE
    benchmark.extra_info["MB/s"] = round(calls * len(data) / benchmark.stats["min"] / 1e6)
