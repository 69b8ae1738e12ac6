"""Removing a tree of 5,000 small files and 100 MB."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from bench.micro.test_layer import archive, fresh
from engine._fast import layer
from engine.system import files

__all__ = ["archive"]

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.mark.timed("its count depends on the host's file system, by a sixth")
def test_remove_tree(benchmark: Any, archive: int, tmp_path: Path) -> None:
    size = os.fstat(archive).st_size
    target = tmp_path / "target"

    def setup() -> tuple[tuple[Path], dict[str, Any]]:
        descriptor = files.open_directory(fresh(tmp_path))
        layer.apply(archive, descriptor, size=size)
        os.close(descriptor)
        return (target,), {}

    benchmark.pedantic(files.remove_tree, setup=setup, rounds=3)
    assert not target.exists()
