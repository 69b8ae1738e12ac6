"""Walking the headers of an archive of 5,000 small files and 100 MB."""

from __future__ import annotations

import os
from typing import Any

import pytest

from bench.micro.test_layer import ENTRIES, archive
from engine._fast.tar import Reader

__all__ = ["archive"]


@pytest.mark.parametrize("what", ["headers", "index"])
def test_walk(benchmark: Any, archive: int, what: str) -> None:
    size = os.fstat(archive).st_size

    def walk() -> int:
        reader = Reader(archive, size=size)
        return reader.skim() if what == "headers" else len(reader.index(100_000))

    assert walk() == ENTRIES
    benchmark(walk)
