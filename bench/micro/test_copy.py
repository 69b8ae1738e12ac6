"""Copying a tree of 5,000 small files and 100 MB, beside GNU cp. Volumes are filled like this at
their first use.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench.micro.test_layer import LARGE, LARGE_SIZE, SMALL, archive, fresh
from engine._fast import copy, layer
from engine.system import files

__all__ = ["archive"]

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def tree(archive: int, tmp_path: Path) -> Path:
    source = tmp_path / "source"
    source.mkdir()
    descriptor = files.open_directory(source)
    layer.apply(archive, descriptor, size=os.fstat(archive).st_size)
    os.close(descriptor)
    return source


def test_copy_tree(benchmark: Any, tree: Path, tmp_path: Path) -> None:
    source = files.open_directory(tree)

    def setup() -> tuple[tuple[int], dict[str, Any]]:
        return (files.open_directory(fresh(tmp_path)),), {}

    def run(target: int) -> None:
        try:
            copy.copy_tree(source, target)
        finally:
            os.close(target)

    run(*setup()[0])
    copied = [path for path in (tmp_path / "target").rglob("*") if path.is_file()]
    assert len(copied) == SMALL + LARGE
    assert sum(path.stat().st_size for path in copied) > LARGE * LARGE_SIZE
    benchmark.pedantic(run, setup=setup, rounds=2)
    os.close(source)


@pytest.mark.timed("another program")
def test_gnu_cp(benchmark: Any, tree: Path, tmp_path: Path) -> None:
    """The time of a program that does the same and nothing else."""

    def run() -> None:
        subprocess.run(["cp", "-a", f"{tree}/.", fresh(tmp_path)], check=True)

    benchmark.pedantic(run, rounds=2)
