"""Packed files of a log. Budget: 200 MB/s of log to pack, 300 MB/s of output to read from one; a
tail takes no longer than a decompression of the file where it begins.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.micro import sized
from engine._fast.logreader import LogReader
from engine._fast.packed import pack
from tests.unit.fast.jsonlogs import entry

LINES = sized(120_000, 6_000)
SIZE = sized(20 << 20, 1 << 20)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file of about 20 MiB, the default limit, and the packed one."""
    path = tmp_path_factory.mktemp("log") / "c.log"
    # Times of now would be packed into more where the host is slow.
    start = 1_700_000_000 * 10**9
    with path.with_name("c.log.1").open("wb") as file:
        for number in range(LINES):
            file.write(
                entry(
                    f"{number // 100} request served path=/{number % 100} status=200 took=0.004s\n",
                    start + number * 1000,
                )
            )
    with path.with_name("c.log.1").open("rb") as source, path.with_name("c.log.2.gz").open("wb") as target:
        pack(source.fileno(), target.fileno())
    yield path
    for each in path.parent.iterdir():
        each.unlink()


def test_pack(benchmark: Any, log: Path) -> None:
    source = os.open(log.with_name("c.log.1"), os.O_RDONLY)
    size = os.fstat(source).st_size

    def run() -> None:
        target = os.memfd_create("packed")
        pack(source, target)
        os.close(target)

    benchmark.pedantic(run, rounds=5, warmup_rounds=1)
    benchmark.extra_info["MB/s"] = round(size / benchmark.stats["min"] / 1e6)
    os.close(source)


@pytest.mark.parametrize("kind", ["plain", "packed"])
def test_read(benchmark: Any, log: Path, tmp_path: Path, kind: str) -> None:
    name = "c.log.1" if kind == "plain" else "c.log.2.gz"
    os.link(log.with_name(name), tmp_path / ("c.log.1" if kind == "plain" else "c.log.1.gz"))

    def run() -> int:
        reader = LogReader(os.fsencode(tmp_path / "c.log"))
        lines = 0
        while not reader.at_end:
            lines += reader.read(512 << 10).count(b"\n")
        reader.close()
        return lines

    assert benchmark.pedantic(run, rounds=5, warmup_rounds=1) == LINES


def test_tail(benchmark: Any, log: Path, tmp_path: Path) -> None:
    os.link(log.with_name("c.log.2.gz"), tmp_path / "c.log.1.gz")

    def run() -> int:
        reader = LogReader(os.fsencode(tmp_path / "c.log"))
        reader.seek_tail(100)
        lines = reader.read(1 << 20).count(b"\n")
        reader.close()
        return lines

    assert run() == 100
    benchmark(run)
