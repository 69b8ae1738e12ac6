"""The log writer. Budget: 300 MB/s of output in lines of about 100 bytes.

Writing is timed twice: to a file on the disk, and to one in memory (tmpfs), which is truncated at
16 MiB.
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
from engine._fast.logwriter import LogWriter

LINE = b"2026-01-02 03:04:05 INFO  request served path=/index.html status=200 bytes=5120 took=0.004s user=bob\n"
READ = LINE * 640  # about 64 KiB, as a pipe gives
TOTAL = sized(128 << 20, 4 << 20)


@pytest.mark.parametrize("kind", ["ascii", "escapes", "cyrillic"])
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_write(benchmark: Any, request: pytest.FixtureRequest, tmp_path: Path, place: str, kind: str) -> None:
    line = {
        "ascii": LINE,
        "escapes": b'{"level":"info","msg":"<b>hi</b>","n":1}\n',
        "cyrillic": "Журнал событий: всё хорошо\n".encode(),
    }[kind]
    data = line * (65536 // len(line))
    directory = Path(tempfile.mkdtemp(dir="/dev/shm")) if place == "memory" else tmp_path
    request.addfinalizer(lambda: shutil.rmtree(directory))
    path = directory / "c.log"
    writer = LogWriter(os.fsencode(path))
    writer.write(1, data)
    assert [json.loads(text)["log"].encode() for text in path.read_bytes().splitlines()] == [line] * (
        65536 // len(line)
    )
    writer.close()

    def fresh() -> tuple[tuple[LogWriter], dict[str, object]]:
        path.unlink(missing_ok=True)
        return (LogWriter(os.fsencode(path), 16 << 20 if place == "memory" else 0, 1),), {}

    def run(writer: LogWriter) -> None:
        for _ in range(TOTAL // len(data)):
            writer.write(1, data)
        writer.close()

    benchmark.pedantic(run, setup=fresh, rounds=5)
    benchmark.extra_info["MB/s"] = round(TOTAL / benchmark.stats["min"] / 1e6)
