"""Members of archives with clean names and digests: each format, any split, damaged ones."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine._fast.members import Members
from engine._fast.tar import ArchiveError
from tests.support.images.archives import Node, directory, hard_link, symlink, tar


class Dribble:
    """A source that returns `step` bytes at a time."""

    def __init__(self, data: bytes, step: int) -> None:
        self._file = io.BytesIO(data)
        self._step = step

    def readinto(self, buffer: memoryview) -> int:
        return self._file.readinto(buffer[: self._step])


NODES = [
    directory("./d/", mode=0o2755, uid=4_000_000, gid=5),
    Node("/d//a", b"alpha", mode=0o4755, mtime=-5),
    Node("d/../empty"),
    symlink("d/s", "../\udcff"),
    hard_link("h", "./d/a"),
    Node("d/big", bytes(range(256)) * 3000, pax=(("SCHILY.xattr.user.b", "2"), ("SCHILY.xattr.user.a", "1=\n"))),
    Node("dev", type=tarfile.CHRTYPE, device=(5, 300)),
    Node("d/.wh.x/y", b"x", mtime=1.25),
]
BIG = hashlib.sha256(bytes(range(256)) * 3000).digest()


@pytest.mark.parametrize("step", [1, 511, 4096, 1 << 20])
@pytest.mark.parametrize("count", [1, 3, 100])
def test_members(step: int, count: int) -> None:
    members = Members(Dribble(tar(NODES), step))
    found = []
    while batch := members.take(count):
        assert len(batch) <= count
        found += batch
    assert members.take(1) == [] and members.following() is None
    assert [(path, parent, whiteout, kind, mode) for path, parent, whiteout, kind, mode, *_ in found] == [
        ("d", "", False, "5", 0o2755),
        ("d/a", "d", False, "0", 0o4755),
        ("empty", "", False, "0", 0o644),
        ("d/s", "d", False, "2", 0o777),
        ("h", "", False, "1", 0o644),
        ("d/big", "d", False, "0", 0o644),
        ("dev", "", False, "3", 0o644),
        ("d/.wh.x/y", "d/.wh.x", True, "0", 0o644),
    ]
    assert found[0][5:7] == (4_000_000, 5)
    assert [member[7] for member in found] == [0, 5, 0, 0, 0, 768_000, 0, 1]
    assert [member[8] for member in found] == [1_700_000_000 * 10**9, -5 * 10**9, *[1_700_000_000 * 10**9] * 5,
                                               1_250_000_000]  # fmt: skip
    assert (found[3][9], found[4][9]) == ("../\udcff", "./d/a")
    assert found[5][10] == ((b"user.a", b"1=\n"), (b"user.b", b"2")) and found[6][11:13] == (5, 300)
    assert [member[16] for member in found] == [
        None,
        hashlib.sha256(b"alpha").digest(),
        hashlib.sha256().digest(),
        None,
        None,
        BIG,
        None,
        hashlib.sha256(b"x").digest(),
    ]
    archive = tar(NODES)
    assert archive[found[1][13] :][:5] == b"alpha" and found[1][14] == 5


@pytest.mark.parametrize("step", [1, 511, 1 << 20])
def test_large_contents_are_left_out(step: int) -> None:
    data = tar(NODES)

    class Skipping(Dribble):
        skipped = 0

        def skip(self, size: int) -> None:
            self._file.seek(size, 1)
            self.skipped += size

    source = Skipping(data, step)
    expected = [
        (*member[:16], None if member[0] == "d/big" else member[16]) for member in Members(Dribble(data, 99)).take(99)
    ]
    assert Members(source).take(99, 100_000) == expected
    assert 0 < source.skipped <= 768_000


@pytest.mark.parametrize("step", [1, 7, 512, 100_000])
def test_content(step: int) -> None:
    members = Members(io.BytesIO(tar(NODES)))
    contents = {}
    while (member := members.following()) is not None:
        assert member[16] is None
        content = bytearray()
        buffer = bytearray(step if len(contents) < 5 else 50_000)
        while got := members.content(buffer):
            content += buffer[:got]
        assert members.content(buffer) == 0
        contents[member[0]] = bytes(content)
    assert contents["d/a"] == b"alpha" and contents["d/big"] == bytes(range(256)) * 3000
    assert contents["h"] == contents["d"] == b""


def test_content_may_be_skipped() -> None:
    members = Members(io.BytesIO(tar(NODES)))
    paths = []
    while (member := members.following()) is not None:
        paths.append(member[0])
        if member[0] == "d/big":
            assert members.content(bytearray(1000)) == 1000
    assert len(paths) == len(NODES)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("..", "leads out of the archive"),
        ("a/../../b", "leads out of the archive"),
        ("/..", "leads out of the archive"),
        ("x" * 256, "a name of more than 255 bytes"),
        ("a/" + "é" * 128 + "/b", "a name of more than 255 bytes"),
        ("a/" * 2048, "more than 4095 bytes"),
    ],
)
def test_names_that_no_tree_has(name: str, words: str) -> None:
    with pytest.raises(ArchiveError, match=words):
        Members(io.BytesIO(tar([Node(name)]))).take(1)
    Members(io.BytesIO(tar([Node("x" * 255), Node("a/" * 2047)]))).take(2)


def test_a_source_that_fails() -> None:
    class Broken:
        def readinto(self, buffer: memoryview) -> int:
            raise ConnectionResetError("gone")

    with pytest.raises(ConnectionResetError):
        Members(Broken()).take(1)
    with pytest.raises(ArchiveError, match="truncated"):
        Members(io.BytesIO(tar([Node("a", b"x" * 9000)])[:5000])).take(1)
    members = Members(io.BytesIO(tar([Node("a", b"x" * 9000)])[:5000]))
    members.following()
    with pytest.raises(ArchiveError, match="truncated"):
        while members.content(bytearray(1000)):
            pass


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged(data: st.DataObject) -> None:
    """Whatever the bytes are: an error, or clean names; and the same for every split."""
    archive = bytearray(tar(NODES[:5] + NODES[6:]))
    for _ in range(data.draw(st.integers(1, 5))):
        archive[data.draw(st.integers(0, len(archive) - 1))] = data.draw(st.integers(0, 255))
    results = []
    for step in (data.draw(st.integers(1, 700)), 1 << 20):
        found = []
        with contextlib.suppress(ArchiveError):
            members = Members(Dribble(bytes(archive), step))
            while batch := members.take(1):
                found += batch
        results.append(found)
    assert results[0] == results[1]
    for path, parent, whiteout, *_ in results[0]:
        parts = path.split("/") if path else []
        assert not {"", ".", ".."} & set(parts) and all(len(os.fsencode(part)) <= 255 for part in parts)
        assert parent == "/".join(parts[:-1]) and whiteout == any(part.startswith(".wh.") for part in parts)
