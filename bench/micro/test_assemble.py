"""The tar stream of 5,000 small files of one file, as COPY makes it."""

from __future__ import annotations

import os
from typing import Any

from bench.micro import sized
from bench.micro.test_layer import archive
from engine._fast.assemble import Assembly

__all__ = ["archive"]

FILES, SIZE = sized(5000, 500), 2000


def test_stream(benchmark: Any, archive: int) -> None:
    assert os.fstat(archive).st_size > FILES * SIZE
    buffer = bytearray(512 * 1024)

    def stream() -> int:
        assembly = Assembly()
        for at in range(FILES):
            assembly.entry(b"directory/file%d" % at, "0", 0o644, 0, 0, 1_700_000_000 * 10**9, SIZE)
            assembly.range(archive, at * SIZE, SIZE)
        total = 0
        while got := assembly.readinto(buffer):
            total += got
        return total

    assert stream() == FILES * (512 + 2048)
    benchmark(stream)
