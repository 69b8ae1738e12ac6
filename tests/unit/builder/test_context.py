"""Contexts that clients send: what is kept of an archive, and what is refused."""

from __future__ import annotations

import asyncio
import bz2
import gzip
import hashlib
import lzma
import os
import subprocess
import tarfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.builder import context
from engine.builder.context import Context, Index, of_directory, receive
from engine.builder.trees import Entry
from engine.errors import InvalidParameter, NotFound, ServerError
from engine.system import files
from tests.support.engine.descriptors import none_left_open
from tests.support.images.archives import Node, directory, hard_link, symlink, tar
from tests.unit.builder.contexts import Making, body, received, with_context

FIFO = tarfile.FIFOTYPE


def paths(found: Context) -> list[str]:
    return [path for path, _ in found.walk("")]


def of(nodes: list[Node], tmp_path: Path, work: Callable[[Context], Any] = paths, **how: Any) -> Any:
    return with_context(tar(nodes), tmp_path, work, **how)


PLAIN = [
    Node("Dockerfile", b"FROM scratch\n"),
    directory("src", mode=0o750, uid=1000, gid=1001),
    Node("src/a", b"alpha", mode=0o4755, uid=7, gid=8, mtime=1_600_000_000),
    Node("src/b", b"b" * 300_000),
    Node("src/empty"),
    symlink("src/link", "a"),
    Node("pipe", type=FIFO),
    Node("deep/er/file", b"x", pax=(("SCHILY.xattr.user.k", "v"),)),
]


@pytest.mark.parametrize("step", [1000, 65536, 1 << 20])
@pytest.mark.parametrize(
    "pack",
    [
        bytes,
        gzip.compress,
        bz2.compress,
        lzma.compress,
        zstandard.ZstdCompressor().compress,
        lambda data: gzip.compress(data[:1000]) + gzip.compress(data[1000:]),
    ],
    ids=["identity", "gzip", "bzip2", "xz", "zstd", "members"],
)
def test_everything_of_a_context(pack: Callable[[bytes], bytes], step: int, tmp_path: Path) -> None:
    def work(found: Context) -> None:
        assert paths(found) == [
            "Dockerfile",
            "deep",
            "deep/er",
            "deep/er/file",
            "pipe",
            "src",
            "src/a",
            "src/b",
            "src/empty",
            "src/link",
        ]
        assert found.find("src") == Entry("src", "5", 0o750, 1000, 1001, 0, 1_700_000_000 * 10**9)
        a = found.find("src/a")
        assert a is not None and a.inode
        assert (a.mode, a.uid, a.gid, a.size, a.mtime) == (0o4755, 7, 8, 5, 1_600_000_000 * 10**9)
        assert found.digest(a) == hashlib.sha256(b"alpha").digest()
        assert found.read("src/a", 10) == found.read("src/link", 10) == b"alpha"
        assert found.read("src/b", 1 << 20) == b"b" * 300_000
        assert found.read("src/empty", 0) == b""
        empty = found.find("src/empty")
        assert empty is not None and found.digest(empty) == hashlib.sha256(b"").digest()
        link = found.find("src/link")
        assert link is not None and (link.kind, link.target, link.size) == ("2", "a", 0)
        assert found.resolve("src/link") == a
        fifo = found.find("pipe")
        assert fifo is not None and fifo.kind == "6"
        deep = found.find("deep/er/file")
        assert deep is not None and deep.xattrs == ((b"user.k", b"v"),)
        assert found.find("deep/er") == Entry("deep/er", "5", 0o755)
        assert found.children("src") == ["a", "b", "empty", "link"] and found.children("src/a") == []
        assert found.find("nothing") is None and found.resolve("src/a/x") is None
        assert len(found) == 10

    with_context(pack(tar(PLAIN)), tmp_path, work, step=step)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (
            [Node("./a"), Node("b/./c"), Node("b//d"), Node("b/x/../e"), directory("./")],
            ["a", "b", "b/c", "b/d", "b/e"],
        ),
        ([Node("/a"), Node("//b/c")], ["a", "b", "b/c"]),
        ([Node("a", b"1"), Node("a", b"22")], ["a"]),
        ([Node("a"), directory("a"), Node("a/b")], ["a", "a/b"]),
        ([directory("a"), Node("a/b"), Node("a/c/d"), Node("a")], ["a"]),
        ([directory("a"), Node("a/b"), directory("a")], ["a", "a/b"]),
        ([directory("d"), symlink("l", "d"), Node("l/x"), Node("l/y")], ["d", "d/x", "d/y", "l"]),
        (
            [directory("d"), symlink("l", "/d/e"), directory("d/e"), Node("l/f/x")],
            ["d", "d/e", "d/e/f", "d/e/f/x", "l"],
        ),
        ([Node("a.b"), Node("a/b"), Node("a-b")], ["a", "a/b", "a-b", "a.b"]),
        ([], []),
    ],
)
def test_names(nodes: list[Node], expected: list[str], tmp_path: Path) -> None:
    """The last member of a name counts; a parent without a member is a directory."""
    assert sorted(of(nodes, tmp_path)) == sorted(expected)


def test_the_last_member_of_a_name_counts(tmp_path: Path) -> None:
    nodes = [Node("a", b"1"), Node("a", b"22", mode=0o600), directory("d", mode=0o700), directory("d", mode=0o711)]

    def work(found: Context) -> None:
        assert found.read("a", 9) == b"22"
        modes = [entry.mode for _, entry in found.walk("")]
        assert modes == [0o600, 0o711]

    of(nodes, tmp_path, work)


def test_hard_links(tmp_path: Path) -> None:
    nodes = [
        Node("d/a", b"alpha", mode=0o640),
        hard_link("b", "./d/a"),
        hard_link("c", "b"),
        symlink("l", "d"),
        hard_link("through", "l/a"),
        symlink("s", "nowhere"),
        hard_link("t", "s"),
        Node("d/a", b"changed"),
    ]

    def work(found: Context) -> None:
        entries = dict(found.walk(""))
        first = entries["b"]
        assert (first.kind, first.mode, first.size) == ("0", 0o640, 5)
        assert entries["c"].inode == entries["through"].inode == first.inode != entries["d/a"].inode
        assert [found.read(name, 9) for name in ("b", "c", "through", "d/a")] == [b"alpha"] * 3 + [b"changed"]
        assert (entries["t"].kind, entries["t"].target) == ("2", "nowhere")

    of(nodes, tmp_path, work)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("to_file", "d/file"),
        ("to_dir/file", "d/file"),
        ("absolute", "d/file"),
        ("up", "d/file"),
        ("chain", "d/file"),
        ("d/back/d/file", "d/file"),
        ("to_dir", "d"),
        ("rooted", ""),
        ("rooted/d", "d"),
        ("d/../d/./file", "d/file"),
        ("../../d", "d"),
        ("dangling", None),
        ("to_file/x", None),
        ("to_file/..", None),
        ("dangling/../d", None),
        ("", ""),
    ],
)
def test_links_are_followed_inside(path: str, expected: str | None, tmp_path: Path) -> None:
    nodes = [
        Node("d/file", b"x"),
        symlink("to_file", "d/file"),
        symlink("to_dir", "d"),
        symlink("absolute", "/d/file"),
        symlink("up", "../../../d/file"),
        symlink("chain", "to_dir/again"),
        symlink("d/again", "file"),
        symlink("d/back", ".."),
        symlink("rooted", "/"),
        symlink("dangling", "none/x"),
    ]

    def work(found: Context) -> None:
        entry = found.resolve(path)
        assert (entry.path if entry else None) == expected

    of(nodes, tmp_path, work, links_out=True)


def test_a_loop_of_links_is_an_error(tmp_path: Path) -> None:
    def work(found: Context) -> None:
        for path in ("a", "a/x", "self/y"):
            with pytest.raises(InvalidParameter, match="too many levels of symbolic links"):
                found.resolve(path)

    of([symlink("a", "b"), symlink("b", "a"), symlink("self", "self")], tmp_path, work)


LONG = "x" * 256


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([Node("../a")], r"\.\./a: the entry leads out of the archive"),
        ([Node("a/../../b")], "the entry leads out of the archive"),
        ([directory("..")], "the entry leads out of the archive"),
        ([hard_link("a", "../../etc/passwd")], "it leads out of the context"),
        ([hard_link("a", "/etc/passwd")], "no such file in the context"),
        ([hard_link("a", "a")], "no such file in the context"),
        ([directory("d"), hard_link("a", "d")], "no such file in the context"),
        ([symlink("a", "../b")], 'invalid symlink "a" -> "../b"'),
        ([symlink("d/a", "../../b")], "it leads out of the context"),
        ([symlink("a", "b/../../c")], "it leads out of the context"),
        ([Node(".wh.a")], r"\.wh\.a: names that begin with \.wh\. are reserved"),
        ([Node("d/.wh..wh..opq")], "are reserved"),
        ([Node(".wh.d/x")], "are reserved"),
        ([Node("gone", type=tarfile.CHRTYPE, device=(0, 0))], "gone: the device 0/0 is reserved for layers"),
        ([Node("far", type=tarfile.CHRTYPE, device=(1 << 12, 0))], "far: there is no device 4096/0"),
        ([Node("sda", type=tarfile.BLKTYPE, device=(8, 1 << 20))], "sda: there is no device 8/1048576"),
        ([Node(LONG)], "a name of more than 255 bytes"),
        ([Node("d/" + LONG + "/x")], "a name of more than 255 bytes"),
        ([Node("d/" * 2100 + "x")], "more than 4095 bytes"),
        ([symlink("a", "d/" * 2100 + "x")], "more than 4095 bytes"),
        ([Node("a"), Node("a/b")], "a: not a directory, but another entry is below it"),
        ([symlink("l", "nowhere"), Node("l/b")], "l: not a directory"),
        ([symlink("l", "l"), Node("l/b")], "too many levels"),
        ([Node(".", b"x")], "its root is not a directory"),
    ],
)
def test_hostile_members_are_refused(nodes: list[Node], words: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match=words):
        of([Node("first", b"1"), *nodes], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_links_out_are_allowed_for_other_clients(tmp_path: Path) -> None:
    def work(found: Context) -> None:
        assert found.resolve("a") is None and found.resolve("root") == found.find("")

    of([symlink("a", "../../etc/passwd"), symlink("root", "../..")], tmp_path, work, links_out=True)


def test_no_archive(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="build context: damaged archive"):
        with_context(b"FROM scratch\n" * 100, tmp_path, paths)
    with pytest.raises(InvalidParameter, match="build context: truncated archive"):
        with_context(b"FROM scratch\n", tmp_path, paths)
    with pytest.raises(InvalidParameter, match="truncated"):
        with_context(tar([Node("a", b"x" * 100_000)])[:50_000], tmp_path, paths)
    with pytest.raises(InvalidParameter, match="damaged gzip stream"):
        with_context(gzip.compress(tar(PLAIN))[:-300], tmp_path, paths)
    assert with_context(b"", tmp_path, paths) == []


def test_an_error_comes_after_the_whole_body(tmp_path: Path) -> None:
    """A client that is still sending would not read the reply."""
    sent = []

    async def sending() -> AsyncIterator[bytes]:
        async for chunk in body(tar([Node("../x"), Node("big", os.urandom(5 << 20))])):
            sent.append(len(chunk))
            yield chunk

    async def run() -> None:
        making: Any = Making()
        with pytest.raises(InvalidParameter, match="leads out"):
            await receive(sending(), tmp_path, making)

    asyncio.run(run())
    assert sum(sent) > 5 << 20


def test_a_client_that_leaves(tmp_path: Path) -> None:
    started = asyncio.Event()

    async def stalls() -> AsyncIterator[bytes]:
        yield tar([Node("a", b"x" * 3_000_000)])[:2_000_000]
        started.set()
        await asyncio.sleep(3600)

    async def fails() -> AsyncIterator[bytes]:
        yield tar([Node("a", b"x" * 3_000_000)])[:2_000_000]
        raise InvalidParameter("the client left")

    async def run() -> None:
        making: Any = Making()
        task = asyncio.ensure_future(receive(stalls(), tmp_path, making))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(InvalidParameter, match="the client left"):
            await receive(fails(), tmp_path, making)

    with none_left_open():
        asyncio.run(run())


@pytest.mark.parametrize(("name", "value"), [("MAX_MEMBERS", 5), ("MAX_INDEX", 2000)])
def test_members_are_bounded(name: str, value: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, name, value)
    for nodes in (
        [Node(f"f{number}") for number in range(20)],
        [Node("d/" * 20 + "x")],  # directories without an entry of their own
        [Node("same") for _ in range(20)],
    ):
        with pytest.raises(InvalidParameter, match=r"more than 5 entries|take more than 0 MiB"):
            of(nodes, tmp_path)


def test_names_through_links_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "MAX_MEMBERS", 50)
    nodes = [Node("d/" * 10 + "x"), symlink("l", "d"), *(Node("l/" + "d/" * 9 + "x") for _ in range(10))]
    with pytest.raises(InvalidParameter, match="too many entries are named through links"):
        of(nodes, tmp_path)


def test_names_do_not_grow_through_links(tmp_path: Path) -> None:
    """Short names that stand for ever longer ones: 250,000 of them would take all memory."""
    part = "d" * 255
    nodes = [directory(part), symlink("l0", part)]
    for number in range(100):
        nodes += [directory(f"l{number}/{part}"), symlink(f"l{number + 1}", f"l{number}/{part}")]
    with pytest.raises(InvalidParameter, match="a name of more than 4095 bytes"):
        of(nodes, tmp_path)


def test_the_length_of_names_through_links_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "MAX_INDEX", 100_000)
    deep = "/".join(["d" * 200] * 10)
    nodes = [directory(deep), symlink("l", deep), *(Node(f"l/{number}") for number in range(100))]
    with pytest.raises(InvalidParameter, match="names and attributes take more than"):
        of(nodes, tmp_path)


def test_large_files(tmp_path: Path) -> None:
    """They are hashed when their digest is asked for, in chunks of 4 MiB."""
    data = os.urandom(9 << 20) + bytes(3 << 20) + b"end"
    nodes = [Node("before", b"1"), Node("large", data), hard_link("same", "large"), Node("after", b"2")]

    def work(found: Context) -> bytes:
        assert paths(found) == ["after", "before", "large", "same"]
        entry = found.find("large")
        assert entry is not None and found.read("same", 1 << 30) == data and found.read("after", 9) == b"2"
        chunks = [hashlib.sha256(data[at : at + (4 << 20)]).digest() for at in range(0, len(data), 4 << 20)]
        assert found.digest(entry) == hashlib.sha256(b"chunks %d " % len(data) + b"".join(chunks)).digest()
        return found.digest(entry)

    digest = of(nodes, tmp_path, work)
    assert of(nodes, tmp_path, work, step=1 << 22) == digest
    (tmp_path / "large").write_bytes(data)
    root = os.open(tmp_path, os.O_PATH)
    try:
        tree = of_directory(root, "none")
        entry = tree.find("large")
        assert entry is not None and tree.digest(entry) == digest
    finally:
        os.close(root)
    (tmp_path / "large").unlink()
    archive = tar([Node("large", data)])
    for size in (600_000, 1_500_000, 9 << 20, 512 + len(data) - 1):
        with pytest.raises(InvalidParameter, match="truncated archive"):
            with_context(archive[:size], tmp_path, paths)
    assert with_context(archive[: 512 + len(data)], tmp_path, paths) == ["large"]


def test_a_bomb_of_zeros_takes_no_space(tmp_path: Path) -> None:
    """200 MB in 200 kB; on the disk it is one hole."""
    size = 200_000_000
    info = tarfile.TarInfo("zeros")
    info.size = size
    packed = gzip.compress(info.tobuf()) + gzip.compress(bytes(1 << 20)) * (size // (1 << 20) + 2)

    def work(found: Context) -> None:
        entry = found.find("zeros")
        assert entry is not None and entry.size == size
        assert os.fstat(found._files[0]).st_blocks * 512 < 2 << 20

    with_context(packed, tmp_path, work)


def test_bytes_after_the_end_are_ignored(tmp_path: Path) -> None:
    def work(found: Context) -> None:
        assert paths(found) == ["a", "b"] and found.read("b", 1 << 21) == bytes(1 << 20)

    archive = tar([Node("a", b"1"), Node("b", bytes(1 << 20))])
    with_context(archive + os.urandom(20 << 20), tmp_path, work)
    with_context(archive[: 3 * 512 + (1 << 20) + 1024] + b"rest" * 1000, tmp_path, work)
    with_context(gzip.compress(archive) + gzip.compress(bytes(50 << 20)), tmp_path, work)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "room", lambda descriptor: 1_000_000)
    with pytest.raises(ServerError, match="not enough space for it on the disk of /"):
        of([Node("a", b"x" * 1_500_000)], tmp_path)
    with pytest.raises(ServerError, match="no such file or directory"):
        of([Node("a")], tmp_path / "missing")


def test_what_can_be_read(tmp_path: Path) -> None:
    """The instruction file may be a link, and nothing but a regular file of a bounded size."""
    nodes = [*PLAIN, symlink("D2", "Dockerfile"), symlink("gone", "x")]

    def work(found: Context) -> None:
        assert found.read("D2", 100) == b"FROM scratch\n"
        for path, kind, words in (
            ("pipe", InvalidParameter, "pipe: not a regular file"),
            ("src", InvalidParameter, "src: not a regular file"),
            ("src/b", InvalidParameter, "300000 bytes, and at most 1000 are allowed"),
            ("gone", NotFound, "gone: no such file or directory"),
        ):
            with pytest.raises(kind, match=words):
                found.read(path, 1000)

    of(nodes, tmp_path, work)


def sparse(tmp_path: Path, data: dict[int, bytes], size: int, version: str) -> bytes:
    """An archive by GNU tar of one sparse file."""
    file = tmp_path / "sparse"
    with file.open("wb") as out:
        for at, piece in data.items():
            out.seek(at)
            out.write(piece)
        out.truncate(size)
    target = tmp_path / "sparse.tar"
    how = ["--format=pax", f"--sparse-version={version}"] if version else ["--format=gnu"]
    command = ["tar", "-S", *how, "-C", str(tmp_path), "-cf", str(target), "sparse"]
    subprocess.run(command, check=True)
    file.unlink()
    archive = target.read_bytes()
    target.unlink()
    return archive


@pytest.mark.parametrize("version", ["", "0.0", "0.1", "1.0"])
@pytest.mark.parametrize(
    "pieces", [{}, {0: b"start"}, {1 << 20: b"middle" * 1000}, {4096: b"a" * 5000, 3 << 20: b"end" * 7}]
)
def test_sparse_files(pieces: dict[int, bytes], version: str, tmp_path: Path) -> None:
    size = (3 << 20) + 21
    content = bytearray(size)
    for at, piece in pieces.items():
        content[at : at + len(piece)] = piece
    archive = sparse(tmp_path, pieces, size, version)
    assert len(archive) < 1 << 20

    def work(found: Context) -> None:
        entry = found.find("sparse")
        assert entry is not None and entry.size == size
        assert found.read("sparse", size) == content
        assert len(found.digest(entry)) == 32

    with_context(archive, tmp_path, work)


def test_ignored_instruction_files(tmp_path: Path) -> None:
    """The client leaves out everything but these two, which it needs the daemon to read."""
    nodes = [Node("Dockerfile"), Node("build/Dockerfile"), Node("other"), Node(".dockerignore", b"*\n!build\n")]

    def dropped(found: Context, dockerfile: str) -> list[str]:
        found.drop_ignored(dockerfile)
        return paths(found)

    assert of(nodes, tmp_path, lambda found: dropped(found, "Dockerfile")) == ["build", "build/Dockerfile", "other"]
    assert of(nodes, tmp_path, lambda found: dropped(found, "./build/Dockerfile")) == [
        "Dockerfile",
        "build",
        "build/Dockerfile",
        "other",
    ]
    assert of(nodes[:1], tmp_path, lambda found: dropped(found, "none")) == ["Dockerfile"]


def test_a_directory_as_context(tmp_path: Path) -> None:
    (tmp_path / "build").mkdir()
    for name in ("Dockerfile", "a.o", "b.c", "build/x", "build/keep"):
        (tmp_path / name).write_text(name)
    (tmp_path / ".dockerignore").write_text("*.o\nbuild/*\n!build/keep\n.dockerignore\n")
    (tmp_path / "other.dockerignore").write_text("*.c\nbuild\nother*\n")
    root = os.open(tmp_path, os.O_RDONLY)
    try:
        assert [path for path, _ in of_directory(root, "Dockerfile").walk("")] == [
            "Dockerfile",
            "b.c",
            "build",
            "build/keep",
            "other.dockerignore",
        ]
        tree = of_directory(root, "other")
        assert [path for path, _ in tree.walk("")] == [".dockerignore", "Dockerfile", "a.o"]
        assert tree.find("b.c") is None and tree.find("build/keep") is None and tree.resolve("a.o") is not None
        assert tree.children("") == [".dockerignore", "Dockerfile", "a.o"]
    finally:
        os.close(root)


NAMES = st.sampled_from(["a", "b", "a/b", "a/b/c", "b/a", "./a", "a/../b", "c/d", "/b/c"])
TARGETS = st.sampled_from(["a", "b", "a/b", "../b", "/a", ".", "c/d"])
NODES = st.one_of(
    st.builds(Node, NAMES, st.binary(max_size=9)),
    st.builds(directory, NAMES),
    st.builds(symlink, NAMES, TARGETS),
    st.builds(hard_link, NAMES, TARGETS),
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(nodes=st.lists(NODES, max_size=8))
def test_the_index_is_a_tree(nodes: list[Node], tmp_path: Path) -> None:
    """Whatever the members are: every entry is in a directory, and is where it says; each archive
    gives the same again when it is packed in the index's order.
    """

    def contents(found: Context) -> dict[str, tuple[Any, ...]]:
        seen: dict[str, tuple[Any, ...]] = {}
        for path, entry in found.walk(""):
            assert entry.path == path and found.find(path) is entry
            parent = path.rpartition("/")[0]
            assert not parent or seen[parent][0] == "5"
            assert path.rpartition("/")[2] in found.children(parent)
            data = found.read(path, 9) if entry.kind == "0" else b""
            assert entry.kind != "0" or found.digest(entry) == hashlib.sha256(data).digest()
            seen[path] = entry.kind, entry.mode, entry.target, data
        assert len(seen) == len(found)
        return seen

    try:
        first = of(nodes, tmp_path, contents, links_out=True)
    except InvalidParameter:
        return
    kinds = {"0": tarfile.REGTYPE, "2": tarfile.SYMTYPE, "5": tarfile.DIRTYPE}
    again = [Node(path, data, kinds[kind], mode, link=target) for path, (kind, mode, target, data) in first.items()]
    assert of(again, tmp_path, contents, links_out=True) == first


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_archives(data: st.DataObject, tmp_path: Path) -> None:
    """A changed archive is received or refused, and nothing stays behind."""
    archive = bytearray(tar(PLAIN[:3] + PLAIN[4:]))
    for _ in range(data.draw(st.integers(1, 6))):
        archive[data.draw(st.integers(0, len(archive) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(archive)))

    def work(found: Context) -> None:
        for path, entry in found.walk(""):
            assert found.find(path) == entry
            if entry.kind == "0" and entry.size < 1 << 20:
                found.read(path, 1 << 20)

    try:
        with_context(bytes(archive[:cut]), tmp_path, work)
    except InvalidParameter as error:
        assert error.message
    assert list(tmp_path.iterdir()) == []


def test_two_at_once(tmp_path: Path) -> None:
    async def run() -> None:
        archives = [tar([Node(f"f{number}", os.urandom(2_000_000))]) for number in range(4)]
        found = await asyncio.gather(*(received(archive, tmp_path) for archive in archives))
        assert [paths(each) for each in found] == [[f"f{number}"] for number in range(4)]
        for each in found:
            await each.close()
            await each.close()

    asyncio.run(run())


@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from(("a", "b", ".wh.c")), min_size=1, max_size=3).map("/".join),
            st.sampled_from(("0", "5", "2", "6")),
            st.integers(0, 2),
            st.sampled_from(((), ((b"user.x", b"1"),))),
        ),
        max_size=12,
    )
)
def test_what_is_put_is_what_is_added(
    members: list[tuple[str, str, int, tuple[tuple[bytes, bytes], ...]]],
) -> None:
    """`Index.put` has `add`'s effect or none."""
    both = Index(links_out=True), Index(links_out=True)
    for path, kind, content, xattrs in members:
        size = content if kind == "0" else 0
        digest = b"%d" % size
        parent = path.rpartition("/")[0]
        entry = Entry(path, kind, 0o640, 1, 2, size, 3, "", xattrs, 0, 0, 10 + size if size else 0)
        whiteout = ".wh." in path
        member: Any = (
            *(path, parent, whiteout, kind, 0o640, 1, 2, size, 3, "t" if kind == "2" else ""),
            *(xattrs, 0, 0, 10 + size, size, None, digest),
        )
        outcomes = []
        for index, puts in zip(both, (True, False), strict=True):
            try:
                if not puts or not index.put(entry, digest):
                    index.add(member)
                outcomes.append("")
            except InvalidParameter as error:
                outcomes.append(error.message)
        assert outcomes[0] == outcomes[1]
        assert both[0].entries == both[1].entries and both[0].children == both[1].children
        assert both[0].digests == both[1].digests and both[0]._members == both[1]._members


def test_a_context_without_content_is_closed_at_once(tmp_path: Path) -> None:
    descriptor = files.temporary_file(tmp_path)
    os.ftruncate(descriptor, 1)
    closing = Context(descriptor, 1, Index(links_out=True)).close()
    with pytest.raises(StopIteration):
        closing.send(None)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
