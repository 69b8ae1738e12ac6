"""Trees copied by `_fast/copy`, compared completely with their source, and copied while a hostile
program changes them."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine._fast.copy import copy_tree
from tests.support.images.trees import snapshot


def copied(source: Path, target: Path) -> tuple[int, int]:
    descriptors = [os.open(path, os.O_RDONLY | os.O_DIRECTORY) for path in (source, target)]
    try:
        return copy_tree(*descriptors)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


@pytest.fixture
def places(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir(mode=0o700)
    yield source, target
    shutil.rmtree(tmp_path)


def populate(source: Path) -> None:
    """One entry of each kind."""
    (source / "dir" / "deep").mkdir(parents=True)
    (source / "dir" / "deep" / "file").write_bytes(os.urandom(300_000))
    (source / "empty").write_bytes(b"")
    (source / os.fsdecode(b"not\xffutf8")).write_bytes(b"x")
    (source / "setuid").write_bytes(b"program")
    os.chown(source / "setuid", 12, 34)
    os.chmod(source / "setuid", 0o6755)
    os.setxattr(source / "setuid", "security.capability", bytes.fromhex("0100000200200000000000000000000000000000"))
    os.setxattr(source / "empty", "user.note", b"\0\1" * 500)
    os.setxattr(source / "dir", "trusted.mine", b"1")
    os.symlink("/etc/passwd", source / "link")
    os.lchown(source / "link", 5, 6)
    os.symlink("dir", source / "dirlink")
    os.link(source / "empty", source / "dir" / "same")
    os.link(source / "link", source / "dir" / "samelink")
    os.mkfifo(source / "fifo", 0o610)
    os.chmod(source / "fifo", 0o622)
    os.mknod(source / "device", 0o640 | 0o060000, os.makedev(7, 200))
    os.chown(source / "dir", 7, 8)
    os.chmod(source / "dir", 0o1750)
    for path in sorted(source.rglob("*"), reverse=True):
        os.utime(path, ns=(1_600_000_000_123_456_789, 1_500_000_000_987_654_321), follow_symlinks=False)
    os.utime(source, ns=(1, 2_000_000_001))


def test_everything_is_kept(places: tuple[Path, Path]) -> None:
    source, target = places
    populate(source)
    expected = snapshot(source)
    size, entries = copied(source, target)
    assert snapshot(target) == expected
    assert entries == len(expected) - 1
    assert size == 300_000 + 1 + len(b"program")


def test_sockets_and_whiteouts_are_left_out(places: tuple[Path, Path]) -> None:
    source, target = places
    os.mknod(source / "whiteout", 0o020000, 0)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(source / "socket"))
    (source / "dir").mkdir()
    os.setxattr(source / "dir", "trusted.overlay.opaque", b"y")
    copied(source, target)
    assert os.listdir(target) == ["dir"] and os.listxattr(target / "dir") == []


def test_holes_stay_holes(places: tuple[Path, Path]) -> None:
    source, target = places
    with open(source / "sparse", "wb") as file:
        file.truncate(10 << 30)
        for at in (0, 5 << 30, (10 << 30) - 3):
            file.seek(at)
            file.write(b"end")
    copied(source, target)
    status = (target / "sparse").stat()
    assert status.st_size == 10 << 30 and status.st_blocks * 512 < 1 << 20
    with open(target / "sparse", "rb") as file:
        for at in (0, 5 << 30, (10 << 30) - 3):
            file.seek(at)
            assert file.read(3) == b"end"


def test_to_another_file_system(places: tuple[Path, Path]) -> None:
    source, target = places
    populate(source)
    os.removexattr(source / "empty", "user.note")
    expected = snapshot(source)
    subprocess.run(["mount", "-t", "tmpfs", "copytest", target], check=True)
    try:
        copied(source, target)
        assert snapshot(target) == expected
    finally:
        subprocess.run(["umount", target], check=True)


def test_deep_and_wide(places: tuple[Path, Path]) -> None:
    source, target = places
    deepest = source
    for _ in range(150):
        deepest = deepest / "d"
    deepest.mkdir(parents=True)
    (deepest / "bottom").write_text("x")
    for number in range(1500):
        (source / f"f{number:04}").write_text(str(number))
        os.link(source / f"f{number:04}", source / f"g{number:04}")
    gc.collect()  # frees leftovers of earlier tests
    before = len(os.listdir("/proc/self/fd"))
    copied(source, target)
    assert snapshot(target) == snapshot(source)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_path_that_is_too_long(places: tuple[Path, Path]) -> None:
    source, target = places
    here = os.open(source, os.O_RDONLY)
    for _ in range(20):
        os.mkdir("n" * 255, dir_fd=here)
        below = os.open("n" * 255, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    with pytest.raises(OSError) as raised:
        copied(source, target)
    assert raised.value.errno == errno.ENAMETOOLONG
    for place in (source, target):
        subprocess.run(["rm", "-rf", place / ("n" * 255)], check=True)


def test_what_is_there_is_not_replaced(places: tuple[Path, Path]) -> None:
    source, target = places
    (source / "name").write_text("new")
    (target / "name").symlink_to("/etc/passwd")
    with pytest.raises(FileExistsError) as raised:
        copied(source, target)
    assert raised.value.filename == "name"


def test_a_target_that_moves_under_the_copy(places: tuple[Path, Path], tmp_path: Path) -> None:
    """Directories are swapped for links to a place outside; nothing may appear there."""
    source, target = places
    outside = tmp_path / "outside"
    outside.mkdir()
    for number in range(40):
        (source / f"d{number}").mkdir()
        for name in range(10):
            (source / f"d{number}" / f"f{name}").write_text("x")
            os.link(source / f"d{number}" / f"f{name}", source / f"d{number}" / f"l{name}")
    done = threading.Event()

    def swap() -> None:
        while not done.is_set():
            for number in range(40):
                place = target / f"d{number}"
                try:
                    os.rename(place, target / f"away{number}")
                    os.symlink(outside, place)
                    os.unlink(place)
                    os.rename(target / f"away{number}", place)
                except OSError:
                    continue

    swapping = threading.Thread(target=swap)
    swapping.start()
    try:
        for _ in range(12):
            with contextlib.suppress(OSError):
                copied(source, target)
            assert os.listdir(outside) == []
            for entry in os.listdir(target):
                subprocess.run(["rm", "-rf", target / entry], check=False)
    finally:
        done.set()
        swapping.join()
    assert os.listdir(outside) == []
