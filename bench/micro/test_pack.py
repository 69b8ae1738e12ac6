"""A tree of 5,000 small files and 100 MB as a tar stream, beside GNU tar; and the changes that an upper directory of 20,000 paths makes."""

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


def test_gnu_tar(benchmark: Any, tree: Path) -> None:
    """What a program that does nothing else needs for the same."""

    def run() -> None:
        with subprocess.Popen(["tar", "-cf", "-", "-C", tree, "."], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            buffer = bytearray(PIECE)
            while process.stdout.readinto(buffer):  # type: ignore[attr-defined]
                pass
        assert process.returncode == 0

    benchmark(run)


def test_changes(benchmark: Any, tmp_path: Path) -> None:
    """Half of the paths are in the layer below already."""
    count = 20_000
    lower, upper = tmp_path / "lower", tmp_path / "upper"
    for directory, first in ((lower, 0), (upper, count // 2)):
        for at in range(first, first + count):
            if at % 100 == 0:
                (directory / f"d{at // 100}").mkdir(parents=True)
            (directory / f"d{at // 100}/f{at}").touch()
    here, below = files.open_directory(upper), files.open_directory(lower)
    found = dict(pack.changes(here, [below]))
    assert len(found) == count + count // 100
    assert found[b"/d150/f15000"] == 0 and found[b"/d250/f25000"] == 1
    benchmark(pack.changes, here, [below])
    os.close(here)
    os.close(below)
