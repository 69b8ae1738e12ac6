"""The tar reader: each format and its limits, any split of the stream, and mutated archives."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine._fast.tar import ArchiveError, Reader
from tests.support.images.archives import Node, directory, hard_link, symlink, tar


class Dribble:
    """A source that returns `step` bytes at a time."""

    def __init__(self, data: bytes, step: int) -> None:
        self._file = io.BytesIO(data)
        self._step = step

    def readinto(self, buffer: memoryview) -> int:
        return self._file.readinto(buffer[: self._step])


def index(data: bytes, step: int = 1 << 20) -> list[tuple[bytes, str, int, int, bytes]]:
    return Reader(Dribble(data, step)).index(10_000)


LONG = "d/" * 90 + "a-name-that-no-ustar-header-can-hold-" + "x" * 150
NODES = [
    directory("d/"),
    Node("d/a", b"alpha"),
    Node("d/empty"),
    symlink("d/s", "a"),
    hard_link("d/h", "d/a"),
    Node("d/big", bytes(range(256)) * 300),
]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("step", [1, 7, 511, 512, 513, 1 << 20])
def test_entries_in_each_format_and_split(form: int, step: int) -> None:
    data = tar(NODES, form)
    found = index(data, step)
    assert [(name, kind, size, link) for name, kind, _, size, link in found] == [
        (b"d/", "5", 0, b""),
        (b"d/a", "0", 5, b""),
        (b"d/empty", "0", 0, b""),
        (b"d/s", "2", 0, b"a"),
        (b"d/h", "1", 0, b"d/a"),
        (b"d/big", "0", 76800, b""),
    ]
    assert data[found[1][2] : found[1][2] + 5] == b"alpha"
    assert data[found[5][2] :][:76800] == bytes(range(256)) * 300


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_and_links(form: int) -> None:
    found = index(tar([Node(LONG, b"x"), symlink("s", LONG), hard_link("h", LONG), Node("ä/ö", b"")], form))
    assert [(entry[0], entry[4]) for entry in found] == [
        (LONG.encode(), b""),
        (b"s", LONG.encode()),
        (b"h", LONG.encode()),
        ("ä/ö".encode(), b""),
    ]


def test_ustar_prefix() -> None:
    name = "p" * 90 + "/" + "n" * 90
    assert index(tar([Node(name, b"")], tarfile.USTAR_FORMAT))[0][0] == name.encode()


def test_range_of_a_file_and_digest() -> None:
    data = tar(NODES)
    hashed = hashlib.sha256()
    descriptor = os.memfd_create("archive")
    try:
        os.write(descriptor, b"before" + data + b"behind")
        reader = Reader(descriptor, offset=6, size=len(data), digest=hashed)
        assert reader.skim() == len(NODES)
        assert hashed.hexdigest() == hashlib.sha256(data).hexdigest()
        assert os.lseek(descriptor, 0, os.SEEK_CUR) == len(data) + 12, (
            "the descriptor's own position is not ours to move"
        )
    finally:
        os.close(descriptor)


def test_a_pipe() -> None:
    reading, writing = os.pipe()
    try:
        os.write(writing, tar([Node("a", b"alpha")]))
        os.close(writing)
        assert Reader(reading).index(10)[0][:2] == (b"a", "0")
    finally:
        os.close(reading)


def header(**fields: bytes | int) -> bytearray:
    """A block with the given fields overwritten, and a correct checksum."""
    block = bytearray(tar([Node("victim", b"")], tarfile.USTAR_FORMAT)[:512])
    places = {
        "name": (0, 100),
        "mode": (100, 8),
        "uid": (108, 8),
        "size": (124, 12),
        "mtime": (136, 12),
        "type": (156, 1),
        "magic": (257, 8),
    }
    for field, value in fields.items():
        at, room = places[field]
        assert isinstance(value, bytes)
        block[at : at + room] = value.ljust(room, b"\0")
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return block


def extended(records: bytes, size: int | None = None, kind: bytes = b"x") -> bytes:
    body = records.ljust(-(-len(records) // 512) * 512, b"\0")
    return bytes(header(type=kind, size=b"%011o" % (len(records) if size is None else size))) + body


def record(key: bytes, value: bytes) -> bytes:
    body = b" " + key + b"=" + value + b"\n"
    length = len(body) + 1
    while len(b"%d" % length) + len(body) != length:
        length += 1
    return b"%d" % length + body


END = bytes(1024)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (bytes(header(size=b"\xff" * 12)) + END, "negative or absurd size"),
        (bytes(header(size=b"\x80" + b"\x7f" * 11)) + END, "bad size|absurd size"),
        (bytes(header(size=b"\x80\0\0\0\x7f" + b"\xff" * 7)) + END, "absurd size"),
        (bytes(header(size=b"zzz")) + END, "bad size"),
        (bytes(header(size=b"77777777777")) + END, "truncated"),
        (bytes(header(mode=b"9")) + END, "bad mode"),
        (bytes(header(uid=b"\xff" * 8)) + END, "bad owner"),
        (bytes(header(uid=b"\x80\0\0\0\xff\xff\xff\xff")) + END, "bad owner"),
        (bytes(header(type=b"Z")) + END, "unsupported type"),
        (bytes(header(type=b"S")) + END, "not GNU"),
        (bytes(header(name=b"")) + END, "without a name"),
        (bytes(512) + bytes(header()) + END, "after an end mark"),
        (bytes(header())[:300], "truncated"),
        (bytes(header(size=b"%011o" % 1000)) + bytes(999), "truncated"),
        (b"\1" * 512, "checksum"),
        (extended(b"", 2 << 20), "1 MiB"),
        (extended(record(b"path", b"x" * 5000)) + bytes(header()) + END, "4095"),
        (extended(record(b"path", b"a\0b")) + bytes(header()) + END, "NUL"),
        (extended(record(b"size", b"-1")) + bytes(header()) + END, "negative or absurd"),
        (extended(record(b"size", b"99999999999999999999")) + bytes(header()) + END, "negative or absurd"),
        (extended(record(b"size", b"1e3")) + bytes(header()) + END, "negative or absurd"),
        (extended(record(b"uid", b"4294967295")) + bytes(header()) + END, "bad owner"),
        (extended(record(b"mtime", b"1.x")) + bytes(header()) + END, "bad time"),
        (extended(b"5 a=b") + bytes(header()) + END, "bad record"),
        (extended(b"99 a=b\n") + bytes(header()) + END, "bad record"),
        (extended(b"-7 a=b\n") + bytes(header()) + END, "bad record"),
        (extended(b"4 =\n") + bytes(header()) + END, "bad record"),
        (extended(record(b"a", b"b")) + END, "without its entry"),
        (extended(record(b"a", b"b")) * 2 + bytes(header()) + END, "two extended headers"),
        (extended(b"x" * 5000, kind=b"L") + bytes(header()) + END, "4095"),
        (
            extended(record(b"GNU.sparse.major", b"1") + record(b"GNU.sparse.realsize", b"9")) + bytes(header()) + END,
            "sparse",
        ),
        (extended(record(b"GNU.sparse.major", b"2")) + bytes(header()) + END, "unknown version"),
        (
            extended(record(b"GNU.sparse.map", b"0,5,3") + record(b"GNU.sparse.size", b"9")) + bytes(header()) + END,
            "bad map",
        ),
        (
            extended(record(b"GNU.sparse.map", b"5,5,0,5") + record(b"GNU.sparse.size", b"99")) + bytes(header()) + END,
            "bad map",
        ),
        (extended(record(b"GNU.sparse.numbytes", b"5")) + bytes(header()) + END, "bad map"),
        (extended(record(b"SCHILY.xattr.", b"v")) + bytes(header()) + END, "without a name"),
    ],
)
def test_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ArchiveError, match=reason):
        index(data)
    with pytest.raises(ArchiveError):
        index(data, 1)


def test_every_truncation_is_an_error_or_a_clean_end() -> None:
    data = tar(NODES[:4], tarfile.PAX_FORMAT)
    whole = len(index(data))
    marks = len(data.rstrip(b"\0")) // 512 * 512 + 1536
    for size in range(0, len(data), 64):
        try:
            found = index(data[:size])
        except ArchiveError:
            continue
        padding = not any(data[size : size + -size % 512])
        assert len(found) <= whole and (size % 512 == 0 or size > marks or padding)


@pytest.mark.parametrize("step", [1, 512, 1 << 20])
def test_an_archive_that_ends_with_its_last_entrys_content(step: int) -> None:
    """The output of Go's tar.Writer without Close, which programs forget to call."""
    head = bytes(header(size=b"%011o" % 700))
    data = head + b"x" * 700 + bytes(324) + head + b"y" * 700
    assert [(size, offset) for _, _, offset, size, _ in index(data, step)] == [(700, 512), (700, 2048)]
    for short in (1, 700, 701):
        with pytest.raises(ArchiveError, match="truncated"):
            index(data[:-short], step)


def test_old_headers_and_global_headers() -> None:
    old = header(magic=b"\0" * 8, name=b"dir/", type=b"\0")
    found = index(bytes(old) + extended(record(b"path", b"ignored"), kind=b"g") + bytes(header()) + END)
    assert [(name, kind) for name, kind, *_ in found] == [(b"dir/", "5"), (b"victim", "0")]


def test_signed_checksum() -> None:
    block = header(name=b"caf\xe9")
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(byte if byte < 128 else byte - 256 for byte in block)
    assert index(bytes(block) + END)[0][0] == b"caf\xe9"


def test_too_many_entries() -> None:
    with pytest.raises(ArchiveError, match="more than 3 entries"):
        Reader(Dribble(tar(NODES), 1 << 20)).index(3)


def test_the_error_of_a_source_or_digest_comes_through() -> None:
    class Broken:
        def readinto(self, buffer: memoryview) -> int:
            raise LookupError("no more")

    class Full:
        def update(self, data: object) -> None:
            raise LookupError("full")

    with pytest.raises(LookupError, match="no more"):
        Reader(Broken()).index(1)
    with pytest.raises(LookupError, match="full"):
        Reader(Dribble(tar(NODES), 100), digest=Full()).skim()
    with pytest.raises(OSError, match="reading the archive"):
        Reader(os.open("/", os.O_RDONLY)).index(1)


SEEDS = [tar(NODES, form) for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)] + [
    tar([Node(LONG, b"x", pax=(("SCHILY.xattr.user.a", "b"),), mtime=1.5), symlink("s", LONG)]),
    extended(record(b"GNU.sparse.map", b"0,5,100,5") + record(b"GNU.sparse.size", b"200"))
    + bytes(header(size=b"%011o" % 10))
    + bytes(512)
    + END,
]


@settings(max_examples=300)
@given(
    st.sampled_from(SEEDS),
    st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=8),
    st.sampled_from((37, 511, 512, 513, 2000)),
)
def test_mutations_end_in_entries_or_an_error(seed: bytes, changes: list[tuple[int, int]], step: int) -> None:
    data = bytearray(seed)
    for at, value in changes:
        data[at % len(data)] = value
    for block in range(0, len(data) - 511, 512):  # past the checksum is where the parsing begins
        if data[block + 257 : block + 262] == b"ustar":
            data[block + 148 : block + 156] = b" " * 8
            data[block + 148 : block + 156] = b"%06o\0 " % sum(data[block : block + 512])
    with contextlib.suppress(ArchiveError):
        assert len(index(bytes(data), step)) <= len(data) // 512


@pytest.mark.parametrize("surplus", [1, 1 << 20, -(1 << 21)])
def test_a_source_that_claims_more_than_fits_is_refused(surplus: int) -> None:
    class Liar:
        def readinto(self, buffer: memoryview) -> int:
            return len(buffer) + surplus

    with pytest.raises(ValueError, match="readinto returned"):
        Reader(Liar()).skim()
