"""Reassembling a layer's tar stream from its tar-split data and its files, as push and save do for
every byte that they send.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from bench.micro.test_layer import archive
from engine._fast import layer, tarsplit
from engine.system import files
from tests.unit.fast.test_tarsplit import Drip, Kept

__all__ = ["archive"]

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def test_stream(benchmark: Any, archive: int, tmp_path: Path) -> None:
    size = os.fstat(archive).st_size
    (tmp_path / "diff").mkdir()
    root = files.open_directory(tmp_path / "diff")
    kept = Kept(-1)
    layer.apply(archive, root, size=size, tar_split=kept)
    buffer = memoryview(bytearray(1 << 20))

    def make(digest: Any = None) -> int:
        stream = tarsplit.Stream(Drip(kept.data, 1 << 20), root)
        total = 0
        while count := stream.readinto(buffer):
            total += count
            if digest is not None:
                digest.update(buffer[:count])
        return total

    made, wanted = hashlib.sha256(), hashlib.sha256()
    assert make(made) == size
    os.lseek(archive, 0, os.SEEK_SET)
    with os.fdopen(os.dup(archive), "rb") as file:
        while data := file.read(1 << 20):
            wanted.update(data)
    assert made.digest() == wanted.digest()
    benchmark(make)
    benchmark.extra_info["MB/s"] = round(size / benchmark.stats["min"] / 1e6)
    os.close(root)
