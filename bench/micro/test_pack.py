"""A tree of 5,000 small files and 100 MB as a tar stream, beside GNU tar."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from bench.micro.test_layer import ENTRIES, archive
from engine._fast import layer, pack
from engine.system import files

__all__ = ["archive"]

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

PIECE = 1 << 20


@pytest.fixture
def tree(archive: int, tmp_path: Path) -> Path:
    target = tmp_path / "tree"
    target.mkdir()
    descriptor = files.open_directory(target)
    layer.apply(archive, descriptor, size=os.fstat(archive).st_size)
    os.close(descriptor)
    return target


def packed(directory: int) -> list[bytes]:
    packer = pack.Packer(directory, b"", top=False)
    pieces = []
    while piece := packer.read(PIECE):
        pieces.append(piece)
    return pieces


@pytest.mark.timed("its count depends on the host's file system: twice as many on another machine")
def test_pack(benchmark: Any, tree: Path) -> None:
    directory = files.open_directory(tree)
    with tarfile.open(fileobj=io.BytesIO(b"".join(packed(directory)))) as stream:
        assert len(stream.getmembers()) == ENTRIES

    def run() -> None:
        packer = pack.Packer(directory, b"", top=False)
        while packer.read(PIECE):
            pass

    benchmark(run)
    os.close(directory)


@pytest.mark.timed("another program")
def test_gnu_tar(benchmark: Any, tree: Path) -> None:
    """The time of a program that does the same and nothing else."""

    def run() -> None:
        with subprocess.Popen(["tar", "-cf", "-", "-C", tree, "."], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            buffer = bytearray(PIECE)
            while process.stdout.readinto(buffer):  # type: ignore[attr-defined]
                pass
        assert process.returncode == 0

    benchmark(run)
