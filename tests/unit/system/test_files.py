"""Files below a root that is not trusted, atomic writes, removal."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from engine.system import files


@pytest.fixture
def root(tmp_path: Path) -> Path:
    top = tmp_path / "root"
    (top / "etc").mkdir(parents=True)
    (top / "etc" / "passwd").write_text("inside")
    (tmp_path / "passwd").write_text("outside")
    for name, target in {
        "absolute": "/etc/passwd",
        "relative": "../../../../etc/passwd",
        "out": str(tmp_path),
        "loop": "loop",
        "magic": "/proc/self/root",
    }.items():
        os.symlink(target, top / name)
    os.mkfifo(top / "fifo")
    return top


@pytest.mark.parametrize(
    "path", ["etc/passwd", "/etc/passwd", "../../etc/passwd", "absolute", "relative", "etc/../etc//passwd"]
)
def test_every_way_ends_inside(root: Path, path: str) -> None:
    assert files.read_in_root(root, path, 100) == b"inside"


@pytest.mark.parametrize(
    ("path", "number"),
    [
        ("out/passwd", errno.ENOENT),
        ("loop", errno.ELOOP),
        ("magic/etc/passwd", errno.ENOENT),
        ("none", errno.ENOENT),
        ("etc", errno.EINVAL),
        ("fifo", errno.EINVAL),
        ("etc/passwd/x", errno.ENOTDIR),
        ("a\0b", errno.EINVAL),
    ],
)
def test_refused(root: Path, path: str, number: int) -> None:
    with pytest.raises(OSError) as caught:
        files.read_in_root(root, path, 100)
    assert caught.value.errno == number


def test_limits(root: Path) -> None:
    assert files.read_in_root(root, "etc/passwd", 6) == b"inside"
    with pytest.raises(OSError) as caught:
        files.read_in_root(root, "etc/passwd", 5)
    assert caught.value.errno == errno.EFBIG
    assert files.read_file("/proc/self/status", 1 << 20).startswith(b"Name:")


def test_creating_below_a_root(root: Path) -> None:
    directory = files.open_directory(root)
    descriptor = files.open_in_root(directory, "/../new", os.O_WRONLY | os.O_CREAT, 0o600)
    os.close(descriptor)
    os.close(directory)
    assert (root / "new").exists() and not (root.parent / "new").exists()


@pytest.mark.parametrize("durable", [False, True])
def test_write_atomically(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "file"
    files.write_atomically(path, b"one", 0o640, durable=durable)
    files.write_atomically(path, b"two" * 100_000, 0o600, durable=durable)
    assert path.read_bytes() == b"two" * 100_000 and path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(IsADirectoryError):
        (tmp_path / "dir").mkdir()
        files.write_atomically(tmp_path / "dir", b"x")
    assert sorted(os.listdir(tmp_path)) == ["dir", "file"]


def test_temporary_files_have_no_name(tmp_path: Path) -> None:
    descriptor = files.temporary_file(tmp_path)
    os.write(descriptor, b"x")
    assert os.pread(descriptor, 1, 0) == b"x" and os.listdir(tmp_path) == []
    os.close(descriptor)


def test_remove_tree(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "f").write_text("x")
    for name in ("a", "f", "a", "no/such"):
        files.remove_tree(tmp_path / name)
    assert os.listdir(tmp_path) == []
