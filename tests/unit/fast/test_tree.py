"""Trees removed and measured by descriptor."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from engine._fast import tree


def test_remove_tree_follows_nothing(tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "file").write_text("untouched")
    (tmp_path / "root" / "a" / ".removed-1").mkdir(parents=True)
    os.symlink(tmp_path / "victim", tmp_path / "root" / "a" / "link")
    os.symlink(tmp_path / "victim", tmp_path / "root" / "link")
    parent = os.open(tmp_path, os.O_RDONLY)
    try:
        tree.remove_tree(parent, b"root")
        tree.remove_tree(parent, b"root")
    finally:
        os.close(parent)
    assert not (tmp_path / "root").exists() and (tmp_path / "victim" / "file").read_text() == "untouched"


def test_remove_tree_of_any_depth(tmp_path: Path) -> None:
    """Deeper than PATH_MAX and the descriptor limit, with names that the removal uses itself."""
    (tmp_path / "top").mkdir()
    for serial in range(1, 4):
        (tmp_path / "top" / f".removed-{serial}").write_text("in the way")
    at = os.open(tmp_path / "top", os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=at)
        os.close(os.open("f", os.O_CREAT | os.O_WRONLY, dir_fd=at))
        below = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    parent = os.open(tmp_path, os.O_RDONLY)
    try:
        tree.remove_tree(parent, b"top")
    finally:
        os.close(parent)
    assert os.listdir(tmp_path) == []


def test_usage(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_bytes(b"x" * 100)
    os.link(tmp_path / "d" / "f", tmp_path / "g")
    os.symlink("/", tmp_path / "s")
    directory_fd = os.open(tmp_path, os.O_RDONLY)
    try:
        # as Docker: the file once, and the link's target
        assert tree.usage(directory_fd) == (101, 4)
    finally:
        os.close(directory_fd)


def test_sizes(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "f").write_bytes(b"x" * 100)
    (tmp_path / "b" / "d").mkdir(parents=True)
    os.link(tmp_path / "a" / "f", tmp_path / "b" / "d" / "g")
    (tmp_path / "b" / "d" / "h").write_bytes(b"y" * 7)
    (tmp_path / "file").write_bytes(b"")
    os.symlink("a", tmp_path / "link")
    top = os.open(tmp_path, os.O_RDONLY)
    try:
        assert tree.sizes(top, [b"a", b"b/d", b"none", b"file", b"link", b"../x"]) == [
            *(50, 57),
            *(-errno.ENOENT, -errno.ENOTDIR, -errno.ELOOP, -errno.EXDEV),
        ]
        assert tree.sizes(top, []) == []
        with pytest.raises(TypeError):
            tree.sizes(top, ["a"])
    finally:
        os.close(top)


def test_usage_of_wide_and_deep_directories_and_other_kinds_of_files(tmp_path: Path) -> None:
    for number in range(2000):  # more names than the kernel gives at once
        (tmp_path / f"{'n' * 60}{number}").write_bytes(b"x")
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
    below = tmp_path
    for _ in range(300):
        below = below / "d"
        below.mkdir()
        (below / "f").write_bytes(b"y")
    top = os.open(tmp_path, os.O_RDONLY)
    try:
        # from the 256th level on directories are not opened: each opened one has `d` and `f`
        assert tree.usage(top) == (2000 + 256, 2000 + 2 + 1 + 2 * 256)
    finally:
        os.close(top)
