"""The files of an image as their client gets them."""

from __future__ import annotations

import gc
import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.builder.buildkit import exporting
from engine.builder.buildkit.exporting import archived, listed
from engine.builder.trees import DirectoryTree
from engine.errors import ServerError


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[DirectoryTree]:
    descriptor = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    yield DirectoryTree(descriptor)
    os.close(descriptor)


def test_names_of_one_file(tree: DirectoryTree, tmp_path: Path) -> None:
    """A symbolic link with several names leads where it leads, by each of them."""
    (tmp_path / "a").write_bytes(b"x")
    os.link(tmp_path / "a", tmp_path / "b")
    os.symlink("a", tmp_path / "l")
    os.link(tmp_path / "l", tmp_path / "m", follow_symlinks=False)
    files = listed(tree)
    assert [(stat.path, stat.target) for _, stat in files] == [("a", ""), ("b", "a"), ("l", "a"), ("m", "a")]
    with tarfile.open(fileobj=io.BytesIO(b"".join(archived(tree, files)))) as archive:
        kinds = [(member.name, member.type, member.linkname) for member in archive]
    assert kinds == [
        ("a", tarfile.REGTYPE, ""),
        ("b", tarfile.LNKTYPE, "a"),
        ("l", tarfile.SYMTYPE, "a"),
        ("m", tarfile.SYMTYPE, "a"),
    ]


def test_small_files_share_a_piece(tree: DirectoryTree, tmp_path: Path) -> None:
    contents = {f"{number:03}": bytes([number]) * number for number in range(200)}
    contents["large"] = os.urandom((2 << 20) + 5)
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    pieces = list(archived(tree, listed(tree)))
    assert len(pieces) < 5 and max(map(len, pieces)) <= 2 * exporting._PIECE
    with tarfile.open(fileobj=io.BytesIO(b"".join(pieces))) as archive:
        for member in archive:
            content = archive.extractfile(member)
            assert content is not None and content.read() == contents.pop(member.name)
    assert contents == {}


def test_a_file_that_became_shorter(tree: DirectoryTree, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(10))
    files = listed(tree)
    os.truncate(tmp_path / "a", 5)
    gc.collect()  # frees leftovers of earlier tests
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ServerError, match="a: shorter than it was"):
        list(archived(tree, files))
    assert len(os.listdir("/proc/self/fd")) == before
