"""Streams rebuilt from the files that were extracted from them: the same bytes for every form of
archive."""

from __future__ import annotations

import gc
import io
import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine._fast import layer, tarsplit
from engine._fast.tar import ArchiveError
from tests.support.images.archives import Node, directory, hard_link, symlink, tar

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="layers are laid out as root")


class Kept:
    """Tar-split data in memory."""

    def __init__(self, root: int) -> None:
        self.data = b""
        self.size = -1
        self.inlined = 0
        self._root = root

    def write(self, data: bytes) -> None:
        self.data += data

    def inline_files(self) -> None:
        so_far = made_again(self, self._root)
        self.data = struct.pack("<QQI", len(so_far), 0, 0) + so_far
        self.inlined += 1

    def finish(self, size: int) -> None:
        self.size = size


class Drip:
    """A source that returns few bytes at a time."""

    def __init__(self, data: bytes, size: int) -> None:
        self._data = io.BytesIO(data)
        self._size = size

    def readinto(self, buffer: memoryview) -> int:
        return self._data.readinto(memoryview(buffer)[: self._size])


@pytest.fixture
def root(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "diff").mkdir()
    descriptor = os.open(tmp_path / "diff", os.O_RDONLY | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)


def laid_out(data: bytes, root: int, drip: int = 0) -> Kept:
    kept = Kept(root)
    layer.apply(Drip(data, drip or 1 << 20), root, tar_split=kept)
    return kept


def made_again(kept: Kept, root: int, piece: int = 1 << 20) -> bytes:
    stream = tarsplit.Stream(Drip(kept.data, piece), root)
    found = []
    buffer = bytearray(piece)
    while size := stream.readinto(buffer):
        found.append(bytes(buffer[:size]))
    return b"".join(found)


def test_close_lets_go_of_the_file_it_is_in(root: int) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    kept = laid_out(tar([Node("large", bytes(range(256)) * 4096)]), root)
    gc.collect()  # frees leftovers of earlier tests
    before = open_files()
    stream = tarsplit.Stream(Drip(kept.data, 1 << 20), root)
    stream.readinto(bytearray(4096))
    assert open_files() == before + 1
    for _ in range(2):
        stream.close()
        assert open_files() == before


ARCHIVE = tar(
    [
        directory("a/"),
        Node("a/empty"),
        Node("a/small", b"x" * 700),
        Node("a/large", os.urandom(1 << 20)),
        Node("a/" + "long" * 60, b"name"),
        Node("a/.wh.gone", b"with content"),
        Node("a/.wh..wh..opq"),
        symlink("way", "a"),
        Node("way/through", b"a link"),
        hard_link("again", "a/small"),
        Node("implied/parent/file", b"y" * 512),
        Node("secret", b"z" * 100, mode=0),
    ]
)


@pytest.mark.parametrize("drip", [1 << 20, 512, 777])
@pytest.mark.parametrize("tail", [b"", bytes(10240), b"something behind the end"])
def test_the_same_bytes(root: int, drip: int, tail: bytes) -> None:
    kept = laid_out(ARCHIVE + tail, root, drip)
    assert not kept.inlined
    assert made_again(kept, root) == ARCHIVE + tail
    assert kept.size == len(ARCHIVE + tail)
    assert len(kept.data) < 64 * 1024  # the files' content is not in it


def test_byte_by_byte(root: int) -> None:
    small = tar([Node("one", b"1" * 600), Node("two", b"2" * 5)])
    assert made_again(laid_out(small, root, 1), root, 1) == small


@pytest.mark.parametrize("drip", [1 << 20, 100, 1])
@pytest.mark.parametrize("size", [600, 601, 900, 1023])
def test_an_archive_that_ends_with_its_last_file(root: int, size: int, drip: int) -> None:
    """Within the padding of the file, or before it, as `umoci insert` writes layers."""
    data = tar([Node("one", b"1" * 600), Node("two", b"2" * 88)])[: 2048 + size - 512]
    kept = laid_out(data, root, drip)
    assert made_again(kept, root) == data and kept.size == len(data)


def test_from_a_descriptor(root: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"before" + ARCHIVE + b"after")
    with open(tmp_path / "file", "rb") as file:
        kept = Kept(root)
        layer.apply(file.fileno(), root, offset=6, size=len(ARCHIVE), tar_split=kept)
    assert made_again(kept, root) == ARCHIVE


@pytest.mark.parametrize(
    "options",
    [["--format=gnu", "-S"], *(["--format=pax", "-S", f"--sparse-version={v}"] for v in ("0.0", "0.1", "1.0"))],
)
def test_sparse_files(root: int, tmp_path: Path, options: list[str]) -> None:
    source = tmp_path / "source"
    source.mkdir()
    with open(source / "sparse", "wb") as file:
        for at in (0, 1 << 20, 3 << 20):
            file.seek(at)
            file.write(os.urandom(5000))
        file.truncate(8 << 20)
    (source / "plain").write_bytes(b"plain" * 1000)
    data = subprocess.run(["tar", *options, "-cf", "-", "-C", source, "."], check=True, capture_output=True).stdout
    assert made_again(laid_out(data, root), root) == data


@pytest.mark.parametrize(
    "second",
    [Node("f", b"2" * 10), directory("f/"), symlink("f", "x"), symlink("d", "x"), hard_link("f", "g")],
    ids=["file", "directory", "link", "parent", "hardlink"],
)
@pytest.mark.parametrize("drip", [1 << 20, 100])
def test_a_file_that_is_replaced_is_in_the_tar_split_data(root: int, second: Node, drip: int) -> None:
    first = [Node("f", b"1" * 10), Node("g", b"g"), directory("d/"), Node("d/inner", b"i" * 2000)]
    data = tar([*first, second, Node("after", b"a" * 3000), Node("after", b"again")])
    kept = laid_out(data, root, drip)
    assert kept.inlined == 1
    assert made_again(kept, root) == data


def test_a_whiteout_that_a_file_replaces_loses_nothing(root: int) -> None:
    data = tar([Node(".wh.f"), Node("f", b"content")])
    kept = laid_out(data, root)
    assert not kept.inlined
    assert made_again(kept, root) == data


def test_changed_files_and_damaged_tar_split_data_are_reported(root: int, tmp_path: Path) -> None:
    kept = laid_out(ARCHIVE, root)
    os.truncate(tmp_path / "diff" / "a" / "small", 3)
    with pytest.raises(ArchiveError, match="shorter"):
        made_again(kept, root)
    os.unlink(tmp_path / "diff" / "a" / "small")
    with pytest.raises(FileNotFoundError):
        made_again(kept, root)
    os.mkfifo(tmp_path / "diff" / "a" / "small")
    with pytest.raises((OSError, ArchiveError)):
        made_again(kept, root)
    kept.data = kept.data[:-1]
    with pytest.raises((OSError, ArchiveError)):
        made_again(kept, root)


@settings(max_examples=200)
@given(data=st.binary(max_size=200))
def test_any_bytes_as_tar_split_data(root: int, data: bytes) -> None:
    kept = Kept(root)
    kept.data = data
    stream = tarsplit.Stream(Drip(data, 4096), root)
    try:
        while stream.readinto(bytearray(4096)):
            pass
    except (OSError, ArchiveError):
        pass


def test_a_write_that_fails_ends_the_extraction(root: int) -> None:
    class Full(Kept):
        def write(self, data: bytes) -> None:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        layer.apply(Drip(ARCHIVE, 4096), root, tar_split=Full(root))
