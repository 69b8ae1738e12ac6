"""Extracting a layer of 5,000 small files and 100 MB, beside GNU tar. Budget: 0.15 s on one core.

The layer is extracted in /tmp or below `--basetemp`; its file system takes half of the time.
"""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.micro import sized
from engine._fast import layer
from engine.system import files
from tests.support.images.archives import Node, directory, tar

SMALL, LARGE, LARGE_SIZE = sized(5000, 250), sized(11, 1), 9_000_000
ENTRIES = SMALL + SMALL // 50 + LARGE

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A descriptor of the archive; its file is read once so that the page cache has it."""
    noise = random.Random(1)
    nodes = [directory(f"d{at}") for at in range(SMALL // 50)]
    nodes += [Node(f"d{at // 50}/f{at}", noise.randbytes(noise.randrange(100, 4000))) for at in range(SMALL)]
    nodes += [Node(f"large{at}", noise.randbytes(LARGE_SIZE)) for at in range(LARGE)]
    path = tmp_path_factory.mktemp("archive") / "layer.tar"
    path.write_bytes(tar(nodes))
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def fresh(tmp_path: Path) -> Path:
    target = tmp_path / "target"
    files.remove_tree(target)
    target.mkdir()
    return target


@pytest.mark.parametrize("digest", [False, True], ids=["alone", "with sha256 in the same thread"])
def test_apply(benchmark: Any, archive: int, tmp_path: Path, digest: bool) -> None:
    size = os.fstat(archive).st_size

    def setup() -> tuple[tuple[int], dict[str, Any]]:
        return (files.open_directory(fresh(tmp_path)),), {}

    def apply(target: int) -> tuple[int, int, list[bytes], int]:
        try:
            return layer.apply(archive, target, size=size, digest=hashlib.sha256() if digest else None)
        finally:
            os.close(target)

    answer = benchmark.pedantic(apply, setup=setup, rounds=5, warmup_rounds=1)
    assert answer[1] == ENTRIES and answer[0] > LARGE * LARGE_SIZE
    for name in ("d4/f249", "large0"):
        made = (tmp_path / "target" / name).read_bytes()
        assert (
            made
            == subprocess.run(
                ["tar", "-xOf", f"/proc/{os.getpid()}/fd/{archive}", name], capture_output=True, check=True
            ).stdout
        )
    files.remove_tree(tmp_path / "target")


@pytest.mark.timed("another program")
def test_gnu_tar(benchmark: Any, archive: int, tmp_path: Path) -> None:
    def setup() -> tuple[tuple[Path], dict[str, Any]]:
        return (fresh(tmp_path),), {}

    def extract(target: Path) -> None:
        subprocess.run(["tar", "-C", target, "--same-owner", "-xpf", f"/proc/{os.getpid()}/fd/{archive}"], check=True)

    benchmark.pedantic(extract, setup=setup, rounds=3)
    assert len(os.listdir(tmp_path / "target")) == SMALL // 50 + LARGE
    files.remove_tree(tmp_path / "target")
