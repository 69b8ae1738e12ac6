"""Files below a root that is not trusted, atomic writes, removal."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_zeros_become_holes(tmp_path: Path) -> None:
    size = 1 << 20
    with open(tmp_path / "file", "w+b") as file:
        assert not files.write_sparse(file.fileno(), memoryview(bytes(size)), 0)
        assert os.fstat(file.fileno()).st_size == 0
        assert files.write_sparse(file.fileno(), memoryview(b"\0" * 3 + b"end"), size)
        assert os.pread(file.fileno(), 2 * size, 0) == bytes(size + 3) + b"end"
        assert os.fstat(file.fileno()).st_blocks * 512 < size


def test_remove_tree(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "f").write_text("x")
    for name in ("a", "f", "a", "no/such"):
        files.remove_tree(tmp_path / name)
    assert os.listdir(tmp_path) == []


NAMES = ["a", "b", "c", "..", ".", ""]


@settings(max_examples=300)
@given(
    st.lists(st.tuples(st.sampled_from(["a", "b", "c", "a/b", "a/c", "b/a", "a/b/c"]), st.integers(0, 6)), max_size=7),
    st.lists(st.sampled_from(NAMES), max_size=6),
)
def test_where_a_path_leads_is_where_the_kernel_goes(
    tmp_path_factory: pytest.TempPathFactory, made: list[tuple[str, int]], parts: list[str]
) -> None:
    """Trees of directories, files and links of every kind; whatever openat2(2) opens is found at
    the resolved path, without a link.
    """
    top = tmp_path_factory.mktemp("resolve")
    targets = ["a", "/b", "../a/b", "/", "../../../..", "c/../a", "/a/./c"]
    for name, target in made:
        with contextlib.suppress(OSError):
            if target < 3:
                os.mkdir(top / name)
            else:
                os.symlink(targets[(target + len(name)) % len(targets)], top / name)
    path = "/".join(parts)
    root = files.open_directory(top)
    try:
        try:
            resolved = files.resolve_in_root(root, path)
        except OSError as error:
            assert error.errno == errno.ELOOP
            resolved = None
        try:
            kernel = files.open_in_root(root, path, os.O_PATH)
        except OSError:
            return
        try:
            assert resolved is not None
            assert b".." not in resolved.split(b"/") and not resolved.startswith(b"/")
            found = files.open_without_links(root, resolved, os.O_PATH | os.O_NOFOLLOW)
            try:
                assert os.fstat(found).st_ino == os.fstat(kernel).st_ino
            finally:
                os.close(found)
        finally:
            os.close(kernel)
    finally:
        os.close(root)


FS_IOC_GETFLAGS = 0x80086601
FS_TOPDIR_FL = 0x20000


def inode_flags(directory: Path) -> int:
    """ioctl_iflags(2)"""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return struct.unpack_from("i", fcntl.ioctl(descriptor, FS_IOC_GETFLAGS, bytes(8)))[0]
    finally:
        os.close(descriptor)


def test_trees_that_are_spread_are_a_hint_and_no_more(tmp_path: Path) -> None:
    for _ in range(2):
        files.spread(tmp_path)
        (tmp_path / "tree").mkdir(exist_ok=True)
    kind = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True, check=True)
    assert kind.stdout != "ext2/ext3\n" or inode_flags(tmp_path) & FS_TOPDIR_FL
    files.spread("/proc")
    with pytest.raises(FileNotFoundError):
        files.spread(tmp_path / "absent")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a/file", 0),
        ("./a/../a/file", 0),
        ("near/file", 0),
        ("a/up/a/file", 0),
        ("..", errno.EXDEV),
        ("a/../../top/a", errno.EXDEV),
        ("/a", errno.EXDEV),
        ("absolute", errno.EXDEV),
        ("far", errno.EXDEV),
        ("loop", errno.ELOOP),
        ("a/file/x", errno.ENOTDIR),
        ("no", errno.ENOENT),
        ("a\0b", errno.EINVAL),
    ],
)
def test_beneath(tmp_path: Path, path: str, expected: int) -> None:
    """Links are followed while they stay below the root."""
    top = tmp_path / "top"
    (top / "a").mkdir(parents=True)
    (top / "a" / "file").touch()
    for name, target in {
        "near": "a",
        "a/up": "..",
        "absolute": str(top / "a"),
        "far": "../top/a",
        "loop": "loop",
    }.items():
        (top / name).symlink_to(target)
    root = files.open_directory(top)
    try:
        if not expected:
            os.close(files.open_beneath(root, path, os.O_PATH))
            return
        with pytest.raises(OSError) as caught:
            files.open_beneath(root, path, os.O_PATH)
        assert caught.value.errno == expected
    finally:
        os.close(root)
