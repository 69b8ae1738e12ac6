"""Tar streams made of headers, ranges and files: read back by Python's tarfile and by GNU tar."""

from __future__ import annotations

import gc
import io
import os
import struct
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine._fast.assemble import Assembly
from engine._fast.members import Members


def whole(assembly: Assembly, step: int = 1 << 20) -> bytes:
    found = bytearray()
    buffer = bytearray(step)
    while got := assembly.readinto(buffer):
        found += buffer[:got]
    return bytes(found)


def infos(stream: bytes) -> list[tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(stream)) as archive:
        return archive.getmembers()


def test_entries() -> None:
    assembly = Assembly()
    long = b"l" * 150
    assembly.entry(b"d/", "5", 0o1777, 1, 2, 10**9)
    assembly.entry(b"d/" + long, "2", 0o777, 0, 0, 0, 0, b"../" + long)
    assembly.entry(b"hard", "1", 0o644, 0, 0, 0, 0, b"d/x")
    assembly.entry(b"null", "3", 0o666, 0, 0, 0, major=5, minor=70_000)
    assembly.entry(b"pipe", "6", 0o600, 2**32 - 2, 8**7, -1_500_000_000)
    assembly.entry(b"f", "0", 0o7777, 0, 0, 8**11 * 10**9 + 1, 3, xattrs=((b"user.k", b"v\0\n"), (b"user.l", b"=")))
    assembly.data(b"abc")
    assembly.zeros(1024)
    found = infos(whole(assembly))
    assert [(info.name, info.type, info.mode) for info in found] == [
        ("d", tarfile.DIRTYPE, 0o1777),
        ("d/" + "l" * 150, tarfile.SYMTYPE, 0o777),
        ("hard", tarfile.LNKTYPE, 0o644),
        ("null", tarfile.CHRTYPE, 0o666),
        ("pipe", tarfile.FIFOTYPE, 0o600),
        ("f", tarfile.REGTYPE, 0o7777),
    ]
    assert (found[0].uid, found[0].gid, found[0].mtime) == (1, 2, 1)
    assert found[1].linkname == "../" + "l" * 150 and found[2].linkname == "d/x"
    assert (found[3].devmajor, found[3].devminor) == (5, 70_000)
    assert (found[4].uid, found[4].gid, float(found[4].mtime)) == (2**32 - 2, 8**7, -1.5)
    assert found[5].pax_headers["SCHILY.xattr.user.k"] == "v\0\n" and found[5].size == 3
    assert found[5].pax_headers["mtime"] == f"{8**11}.000000001"


@pytest.mark.parametrize("step", [1, 5, 512, 1 << 16])
def test_content_of_each_kind(step: int, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_bytes(b"named" * 300)
    spool = os.open(tmp_path / "spool", os.O_RDWR | os.O_CREAT)
    os.pwrite(spool, b"range" * 400, 77)
    root = os.open(tmp_path, os.O_PATH)
    try:
        assembly = Assembly()
        for name, size in ((b"a", 5), (b"b", 2000), (b"c", 1500), (b"e", 0), (b"short", 2000)):
            assembly.entry(name, "0", 0o644, 0, 0, 0, size)
            if name == b"a":
                assembly.data(b"bytes")
            elif name == b"b":
                assembly.range(spool, 77, size)
            else:
                assembly.named(root, b"d/f", size)
        assembly.zeros(1024)
        with tarfile.open(fileobj=io.BytesIO(whole(assembly, step))) as archive:
            contents = {}
            for info in archive:
                file = archive.extractfile(info)
                assert file is not None
                contents[info.name] = file.read()
        assert contents == {
            "a": b"bytes",
            "b": b"range" * 400,
            "c": b"named" * 300,
            "e": b"",
            "short": b"named" * 300 + bytes(500),
        }
        assert assembly.readinto(bytearray(10)) == 0
        assembly.zeros(5)
        assert whole(assembly) == bytes(5)
    finally:
        os.close(spool)
        os.close(root)


@pytest.mark.parametrize(
    ("path", "number"),
    [("missing", "No such file"), ("link", "Too many levels"), ("l/f", "Too many levels"), ("pipe", "Invalid"),
     ("d", "Invalid"), ("../x", "cross-device"), ("/etc/passwd", "cross-device")],
)  # fmt: skip
def test_only_files_below_the_root(path: str, number: str, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_text("x")
    os.symlink("d/f", tmp_path / "link")
    os.symlink("d", tmp_path / "l")
    os.mkfifo(tmp_path / "pipe")
    root = os.open(tmp_path, os.O_PATH)
    gc.collect()  # descriptors that earlier tests have left
    before = os.listdir("/proc/self/fd")
    try:
        assembly = Assembly()
        assembly.entry(b"x", "0", 0o644, 0, 0, 0, 10)
        assembly.named(root, path.encode(), 10)
        with pytest.raises(OSError, match=number) as raised:
            whole(assembly)
        assert raised.value.filename == path
        assembly.close()
        assert os.listdir("/proc/self/fd") == before and assembly.readinto(bytearray(10)) == 0
    finally:
        os.close(root)


def test_a_range_beyond_the_file_is_an_error(tmp_path: Path) -> None:
    spool = os.open(tmp_path / "spool", os.O_RDWR | os.O_CREAT)
    try:
        assembly = Assembly()
        assembly.entry(b"x", "0", 0o644, 0, 0, 0, 10)
        assembly.range(spool, 0, 10)
        with pytest.raises(OSError, match="Input/output error"):
            whole(assembly)
    finally:
        os.close(spool)


def test_sparse_files(tmp_path: Path) -> None:
    """GNU tar extracts them, and the engine's reader has the same map."""
    pairs = [(0, 512), (1 << 20, 5), (9 << 33, 0)]
    extents = b"".join(struct.pack("<qq", *pair) for pair in pairs)
    assembly = Assembly()
    assembly.entry(b"s", "0", 0o644, 0, 0, 0, 9 << 33, extents=extents, stored=517)
    assembly.data(b"start".ljust(512, b"-") + b"abcde")
    assembly.zeros(1024)
    stream = whole(assembly)
    (member,) = Members(io.BytesIO(stream)).take(5)
    assert member[0] == "s" and member[7] == 9 << 33 and member[14:16] == (517, extents)
    subprocess.run(["tar", "-xf", "-", "-C", str(tmp_path)], input=stream, check=True)
    with (tmp_path / "s").open("rb") as file:
        assert os.fstat(file.fileno()).st_size == 9 << 33
        assert file.read(514) == b"start".ljust(512, b"-") + b"\0\0"
        file.seek(1 << 20)
        assert file.read(7) == b"abcde\0\0"


NAMES = st.text("ab/é.", min_size=1, max_size=250).filter(lambda name: name.strip("/.") and name[-1] != "/")


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(
            NAMES.map(str.encode),
            st.integers(0, 0o7777),
            st.integers(0, 2**32 - 2),
            st.integers(-(2**62), 2**63),
            st.binary(max_size=1200),
            st.dictionaries(
                st.text("abc.", min_size=1, max_size=9).map(str.encode), st.binary(max_size=120), max_size=3
            ),
        ),
        max_size=6,
    ),
    st.integers(1, 5000),
)
def test_what_is_written_is_read(
    entries: list[tuple[bytes, int, int, int, bytes, dict[bytes, bytes]]], step: int
) -> None:
    assembly = Assembly()
    for name, mode, uid, mtime, data, xattrs in entries:
        assembly.entry(name, "0", mode, uid, uid, mtime, len(data), xattrs=tuple(sorted(xattrs.items())))
        assembly.data(data)
    assembly.zeros(1024)
    stream = whole(assembly, step)
    with tarfile.open(fileobj=io.BytesIO(stream)) as archive:
        for (name, mode, uid, _, data, _), info in zip(entries, archive.getmembers(), strict=True):
            assert (info.name.encode(), info.mode, info.uid, info.size) == (name, mode, uid, len(data))
            content = archive.extractfile(info)
            assert content is not None and content.read() == data
    if any(b".." in name.split(b"/") for name, *_ in entries):
        return
    found = Members(io.BytesIO(stream)).take(100)
    assert [(member[4], member[5], member[6], member[8], member[10]) for member in found] == [
        (mode, uid, uid, mtime, tuple(sorted(xattrs.items()))) for _, mode, uid, mtime, _, xattrs in entries
    ]
