"""The index of a build context of 5,000 small files, with the sha256 of each."""

from __future__ import annotations

import os
from typing import Any

from bench.micro.test_layer import ENTRIES, archive
from engine._fast.members import Members
from engine.builder.context import Index

__all__ = ["archive"]


class Spool:
    """The archive's file, whose large contents are left out."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._at = 0

    def readinto(self, buffer: memoryview) -> int:
        got = os.preadv(self._descriptor, [buffer], self._at)
        self._at += got
        return got

    def skip(self, size: int) -> None:
        self._at += size


def test_index(benchmark: Any, archive: int) -> None:
    def walk() -> int:
        index = Index(links_out=False)
        members = Members(Spool(archive))
        while batch := members.take(256, 1 << 20):
            for member in batch:
                index.add(member)
        return len(index.entries) - 1

    assert walk() == ENTRIES
    benchmark(walk)
