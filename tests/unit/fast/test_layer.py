"""Extracted layers: every known escape from the directory is blocked, whiteouts become overlayfs's,
and the tree equals GNU tar's.

Needs root, for owners, devices and trusted attributes.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import io
import os
import resource
import shutil
import stat
import subprocess
import tarfile
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine._fast import layer, tree
from engine._fast.tar import ArchiveError
from tests.support.engine.harness import until
from tests.support.images.archives import Node, directory, hard_link, symlink, tar
from tests.support.images.trees import snapshot
from tests.unit.fast.test_tar import END, extended, header, record

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

Result = tuple[int, int, list[bytes], int]


class Playground:
    """A directory to extract into, between things that must not change."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.root = base / "outer" / "root"
        self.root.mkdir(parents=True)
        (base / "secret").write_text("secret")
        (base / "outer" / "secret").write_text("secret")
        (base / "victim").mkdir()
        (base / "victim" / "file").write_text("untouched")
        self._before = self._outside()

    def _outside(self) -> object:
        texts = [(self.base / name).read_text() for name in ("secret", "outer/secret")]
        return (
            snapshot(self.base / "victim"),
            texts,
            sorted(os.listdir(self.base)),
            sorted(os.listdir(self.base / "outer")),
        )

    def apply(self, data: bytes | Sequence[Node]) -> Result:
        """Extract, and check in any case that nothing changed outside."""
        descriptor = os.open(self.root, os.O_RDONLY)
        try:
            source = io.BytesIO(data if isinstance(data, bytes) else tar(data))
            return layer.apply(source, descriptor)
        finally:
            os.close(descriptor)
            assert self._outside() == self._before

    def names(self) -> set[str]:
        return set(snapshot(self.root)) - {"."}


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Playground]:
    yield Playground(tmp_path)


def outside(play: Playground, name: str) -> str:
    return str(play.base / name)


# --- ways out -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "../evil",
        "a/../../evil",
        "/../evil",
        "./../evil",
        "..",
        "a/b/../../../evil",
        "../../victim/file",
        "../outer/evil",
    ],
)
@pytest.mark.parametrize("kind", ["file", "directory", "symlink", "hard link", "device", "whiteout", "opaque"])
def test_names_that_lead_above_the_root_are_refused(play: Playground, name: str, kind: str) -> None:
    parent, _, base = name.rpartition("/")
    nodes = {
        "file": Node(name, b"x"),
        "directory": directory(name),
        "symlink": symlink(name, "x"),
        "hard link": hard_link(name, "a"),
        "device": Node(name, type=tarfile.CHRTYPE, device=(1, 3)),
        "whiteout": Node(f"{parent}/.wh.{base}" if parent else f"../.wh.{base}"),
        "opaque": Node(f"{name}/.wh..wh..opq"),
    }
    if kind == "whiteout" and name in ("..", "/../evil"):
        return  # `/.wh...` and the like are tested below
    with pytest.raises(ArchiveError, match=r"leads out of the layer|no name"):
        play.apply([Node("a", b"x"), nodes[kind]])


@pytest.mark.parametrize("name", ["/etc/evil", "//etc/evil", "/./etc//evil", "etc/./x/../evil"])
def test_absolute_names_stay_inside(play: Playground, name: str) -> None:
    play.apply([Node(name, b"x")])
    assert (play.root / "etc/evil").read_bytes() == b"x"


@pytest.mark.parametrize("base", ["..", ".", ""])
def test_whiteout_of_no_name(play: Playground, base: str) -> None:
    """`.wh...` would remove the parent of the extracted tree."""
    for prefix in ("", "a/", "a/b/"):
        with pytest.raises(ArchiveError, match="no name"):
            play.apply([Node(f"{prefix}.wh.{base}")])


@pytest.mark.parametrize(
    "target", ["/", "..", "../..", "../../victim", "/proc/self/cwd", "/proc/self/root", "absolute"]
)
@pytest.mark.parametrize("below", ["file", "directory", "symlink", "device", "whiteout", "opaque", "hard link"])
def test_a_symlink_as_parent_leads_nowhere_else(play: Playground, target: str, below: str) -> None:
    """CVE-2014-6407 and later attacks: first a link, then an entry through it.

    The entry is created in the layer's own root, or is an error.
    """
    if target == "absolute":
        target = outside(play, "victim")
    nodes = {
        "file": Node("link/file", b"evil"),
        "directory": directory("link/deep/dir"),
        "symlink": symlink("link/s", "x"),
        "device": Node("link/null", type=tarfile.CHRTYPE, device=(1, 3)),
        "whiteout": Node("link/.wh.file"),
        "opaque": Node("link/.wh..wh..opq"),
        "hard link": hard_link("link/h", "a"),
    }
    with contextlib.suppress(ArchiveError, OSError):
        play.apply([Node("a", b"x"), symlink("link", target), nodes[below]])


def test_chains_of_symlinks(play: Playground) -> None:
    play.apply(
        [
            directory("a"),
            symlink("a/up", ".."),
            symlink("a/b", "up/.."),
            symlink("c", "a/b/../../.."),
            Node("c/evil", b"x"),
        ]
    )
    assert (play.root / "evil").exists(), "`..` above the root is the root"
    with pytest.raises(OSError, match="x/y"):
        play.apply([symlink("x", "z"), symlink("z", "x"), Node("x/y", b"")])


@pytest.mark.parametrize("target", ["../secret", "../../secret", "/../secret", "a/../../secret", "..", "/", ".", ""])
def test_hard_links_out_of_the_root_are_refused(play: Playground, target: str) -> None:
    with pytest.raises(ArchiveError, match="leads out"):
        play.apply([directory("a"), Node("a/x"), hard_link("h", target)])


@pytest.mark.parametrize("whiteout", ["a/.wh.a", "a/.wh..wh..opq", "a/d/.wh.x", "top/a/.wh.a"])
def test_a_whiteout_below_a_link_to_nothing_has_no_effect(play: Playground, whiteout: str) -> None:
    link = "top/a" if whiteout.startswith("top/") else "a"
    for target in ("b", "/nowhere/b", "../../secret", "file"):
        play.apply([directory("top"), Node("file"), symlink(link, target), Node(whiteout), Node("after", b"x")])
        assert sorted(entry.name for entry in play.root.iterdir()) == sorted(
            {"top", "file", link.partition("/")[0], "after"}
        )
        shutil.rmtree(play.root)
        play.root.mkdir()
    play.apply([directory("b"), symlink("a", "b"), Node("a/.wh.a")])
    assert stat.S_ISCHR((play.root / "b/a").lstat().st_mode)


@pytest.mark.parametrize("name", ["/", ".", "./"])
def test_a_hard_link_in_the_place_of_the_root_has_no_effect(play: Playground, name: str) -> None:
    play.apply([Node("a", b"x"), hard_link(name, "a"), Node("b", b"y")])
    assert sorted(entry.name for entry in play.root.iterdir()) == ["a", "b"]


def test_hard_links_through_symlinks_and_to_nothing(play: Playground) -> None:
    """CVE-2014-9357, CVE-2024-0406: a hard link to a file behind a symbolic link that points
    outside."""
    for target in ("link/secret", "link/victim/file", "absolute/secret"):
        with pytest.raises(ArchiveError, match="not in the layer"):
            play.apply([symlink("link", "../.."), symlink("absolute", str(play.base)), hard_link("h", target)])
    play.apply([symlink("s", str(play.base / "secret")), hard_link("hs", "s"), Node("hs", b"new")])
    assert (play.root / "hs").read_bytes() == b"new", "the link itself was linked, and replaced"
    with pytest.raises(ArchiveError, match="directory"):
        play.apply([directory("d"), hard_link("hd", "d")])


def test_writing_over_a_symlink_replaces_it(play: Playground) -> None:
    victim = str(play.base / "victim" / "file")
    play.apply(
        [
            symlink("s", victim),
            Node("s", b"evil"),
            symlink("t", str(play.base / "victim")),
            directory("t"),
            Node("t/file", b"evil"),
        ]
    )
    assert (play.root / "s").is_file() and not (play.root / "s").is_symlink()
    assert (play.root / "t").is_dir() and not (play.root / "t").is_symlink()


def test_a_hard_link_is_not_a_way_to_write_through(play: Playground) -> None:
    """umoci, GNU tar: a regular entry over a link must make a new file, not fill the old one."""
    play.apply([Node("a", b"first"), hard_link("b", "a"), Node("b", b"second")])
    assert (play.root / "a").read_bytes() == b"first"


def test_attributes_and_times_do_not_follow(play: Playground) -> None:
    secret = play.base / "secret"
    play.apply([symlink("s", str(secret), mtime=5, uid=7, pax=(("SCHILY.xattr.trusted.x", "y"),))])
    status = os.lstat(play.root / "s")
    assert (status.st_uid, status.st_mtime) == (7, 5)
    assert os.getxattr(play.root / "s", "trusted.x", follow_symlinks=False) == b"y"


def test_overlay_attributes_of_strangers_are_not_set(play: Playground) -> None:
    result = play.apply(
        [
            directory(
                "d",
                pax=(("SCHILY.xattr.trusted.overlay.redirect", "/etc"), ("SCHILY.xattr.trusted.overlay.opaque", "y")),
            )
        ]
    )
    assert os.listxattr(play.root / "d") == [] and result[3] == 2


def test_the_root_must_be_a_directory(play: Playground) -> None:
    for node in (symlink("./", "/etc"), Node("/", b"x")):
        with pytest.raises(ArchiveError, match="no directory"):
            play.apply([node])


def test_names_too_long(play: Playground) -> None:
    with pytest.raises(OSError, match="File name too long"):
        play.apply([Node("x" * 256)])
    with pytest.raises((OSError, ArchiveError)):
        play.apply([Node("/".join(["y" * 200] * 21))])


def test_a_thousand_levels(play: Playground) -> None:
    deep = "/".join("d" * 1 for _ in range(1000))
    play.apply([Node(f"{deep}/f", b"x")])
    tree.remove_tree(os.open(play.base / "outer", os.O_RDONLY), b"root")
    assert not play.root.exists()


# --- the extracted tree ---------------------------------------------------------------------------


def is_whiteout(path: Path) -> bool:
    status = os.lstat(path)
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def test_whiteouts(play: Playground) -> None:
    play.apply(
        [
            directory("d"),
            Node("d/.wh.gone"),
            directory("o"),
            Node("o/.wh..wh..opq"),
            Node("o/kept", b"x"),
            Node("implied/.wh.gone"),
            directory(".wh..wh.plnk"),
            Node(".wh..wh.plnk/1.2", b"x"),
            Node(".wh..wh.aufs"),
        ]
    )
    assert play.names() == {"d", "d/gone", "o", "o/kept", "implied", "implied/gone"}
    assert is_whiteout(play.root / "d/gone") and is_whiteout(play.root / "implied/gone")
    assert os.getxattr(play.root / "o", "trusted.overlay.opaque") == b"y"


def test_whiteout_and_entry_of_one_name(play: Playground) -> None:
    """A whiteout applies only to lower layers (OCI): entries of the same layer stay, in either
    order."""
    play.apply(
        [
            Node("a", b"x"),
            Node(".wh.a"),
            Node(".wh.b"),
            Node("b", b"y"),
            directory("c"),
            Node("c/in", b""),
            Node(".wh.c"),
            Node(".wh.d"),
            directory("d"),
            Node(".wh.e"),
            Node("e/in", b""),
        ]
    )
    assert (play.root / "a").read_bytes() == b"x" and (play.root / "b").read_bytes() == b"y"
    for name in ("c", "d", "e"):
        assert os.getxattr(play.root / name, "trusted.overlay.opaque") == b"y"
    assert (play.root / "c/in").exists() and (play.root / "e/in").exists()


def test_a_file_becomes_a_directory_and_back(play: Playground) -> None:
    play.apply(
        [
            Node("x", b"1"),
            directory("x"),
            Node("x/y", b"2"),
            Node("x", b"3"),
            directory("x"),
            symlink("x", "z"),
            directory("x"),
            Node("x/w"),
        ]
    )
    assert play.names() == {"x", "x/w"}


def test_a_parent_that_is_a_file(play: Playground) -> None:
    with pytest.raises(ArchiveError, match="parent"):
        play.apply([Node("x", b""), Node("x/y", b"")])


def test_implied_directories(play: Playground) -> None:
    result = play.apply([Node("a/b/c", b""), directory("a", 0o700), Node("d/e", b"")])
    assert set(result[2]) == {b"", b"a/b", b"d"}
    assert play.apply([directory("./")])[2] == []


@pytest.mark.parametrize(
    ("entries", "repeated"),
    [
        ([Node("a", b"1"), Node("b"), Node("a", b"2"), Node("b")], b"a"),
        ([directory("d"), Node("d/x"), directory("d")], b"d"),
        ([directory("d/"), directory("d")], b"d"),
        ([Node("a"), Node("./a")], b"a"),
        ([Node("x/../a"), Node("a")], b"a"),
        ([Node("d//a"), Node("d/./a")], b"d/a"),
        ([directory("./"), directory(".")], b"/"),
        ([Node("a"), symlink("a", "b")], b"a"),
        ([Node("a"), hard_link("b", "a"), hard_link("b", "a")], b"b"),
        ([Node(".wh.a"), Node(".wh.a")], b".wh.a"),
        ([Node(".wh..wh..opq"), Node(".wh..wh..opq")], b".wh..wh..opq"),
        ([Node("a"), directory("a"), Node("a/b")], b"a"),
        ([Node("long/" * 400 + "x"), Node("long/" * 400 + "x")], b"long/" * 400 + b"x"),
        # what is there already, under another name
        ([Node("a/b"), directory("a")], b""),
        ([Node(".wh.a"), Node("a")], b""),
        ([directory("a"), Node(".wh.a")], b""),
        ([directory("b"), symlink("a", "b"), Node("a/x", b"1"), Node("b/x", b"2")], b""),
        ([Node("a"), Node("/a")], b""),  # as in dockerd
        ([directory("./"), directory("/")], b""),
        ([Node("a"), Node("aa"), Node("a" * 8), Node("a" * 9), Node("a" * 16)], b""),
    ],
)
def test_names_that_occur_twice(play: Playground, entries: list[Node], repeated: bytes) -> None:
    assert play.apply(entries)[4] == repeated


def test_names_of_many_entries(play: Playground) -> None:
    """More than the table has room for at first."""
    names = [f"d{number % 7}/{number:05}" for number in range(9_000)]
    for last, repeated in (("other", b""), (names[0], names[0].encode()), (names[-1], names[-1].encode())):
        assert play.apply([Node(name, type=tarfile.SYMTYPE, link="x") for name in (*names, last)])[4] == repeated


def test_modes_owners_devices(play: Playground) -> None:
    old = os.umask(0o077)
    try:
        play.apply(
            [
                directory("./", 0o711, uid=3),
                directory("group", 0o2775, gid=50),
                Node("group/own", b"", mode=0o644),
                directory("group/below", 0o755),
                Node("setuid", b"x", mode=0o4755, uid=1000, gid=1000),
                Node("all", b"", mode=0o777),
                Node("fifo", type=tarfile.FIFOTYPE, mode=0o622),
                Node("null", type=tarfile.CHRTYPE, mode=0o666, device=(1, 3)),
                Node("disk", type=tarfile.BLKTYPE, mode=0o660, gid=6, device=(259, 70000)),
                Node("big", b"", uid=3_000_000_000, gid=4_000_000_000),
                Node(
                    "cap",
                    b"",
                    mode=0o755,
                    uid=5,
                    pax=(("SCHILY.xattr.security.capability", CAPABILITY.decode("latin-1")),),
                ),
            ]
        )
    finally:
        os.umask(old)
    looks = snapshot(play.root)
    assert looks["."][:3] == ("0o40711", 3, 0)
    assert looks["group/own"][:3] == ("0o100644", 0, 0)
    assert looks["group/below"][:3] == ("0o40755", 0, 0)
    assert looks["setuid"][:3] == ("0o104755", 1000, 1000)
    assert looks["all"][0] == "0o100777"
    assert looks["fifo"][0] == "0o10622"
    assert looks["null"][4] == (1, 3) and looks["disk"][4] == (259, 70000)
    assert looks["big"][1:3] == (3_000_000_000, 4_000_000_000)
    assert looks["cap"][6] == {"security.capability": CAPABILITY}


CAPABILITY = bytes.fromhex("0100000200040000000000000000000000000000")


def test_times(play: Playground) -> None:
    play.apply(
        [
            directory("d", mtime=100),
            Node("d/f", b"x", mtime=1.25),
            Node("d/old", mtime=-1.5),
            symlink("d/s", "f", mtime=7),
            directory("d/e", mtime=9),
        ]
    )
    times = {name: look[3] for name, look in snapshot(play.root).items()}
    assert (times["d"], times["d/e"], times["d/s"]) == (100 * 10**9, 9 * 10**9, 7 * 10**9)
    assert (times["d/f"], times["d/old"]) == (1_250_000_000, -1_500_000_000)


def test_answer_digest_and_progress(play: Playground) -> None:
    data = tar([Node("a", b"x" * 1000), Node("b", b"y" * 50), hard_link("c", "a")])
    hashed = hashlib.sha256()
    counted = array("q", [0, 0])
    file = os.memfd_create("layer")
    target = os.open(play.root, os.O_RDONLY)
    try:
        os.write(file, b"head" + data + b"tail")
        answer = layer.apply(file, target, offset=4, size=len(data), digest=hashed, progress=counted)
    finally:
        os.close(file)
        os.close(target)
    assert answer == (1050, 3, [b""], 0, b"")
    assert hashed.hexdigest() == hashlib.sha256(data).hexdigest() and counted[0] == len(data)


def test_a_full_disk_and_a_lost_source(play: Playground) -> None:
    class Broken(io.BytesIO):
        def readinto(self, buffer: object) -> int:
            raise OSError(5, "lost")

    target = os.open(play.root, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="lost"):
            layer.apply(Broken(), target)
    finally:
        os.close(target)


@pytest.mark.parametrize(
    "options",
    [
        ["--format=gnu"],
        ["--format=oldgnu"],
        ["--format=pax"],
        ["--format=ustar"],
        ["--format=v7"],
        ["--format=gnu", "-S"],
        ["--format=oldgnu", "-S"],
        ["--format=pax", "-S", "--sparse-version=0.0"],
        ["--format=pax", "-S", "--sparse-version=0.1"],
        ["--format=pax", "-S", "--sparse-version=1.0"],
        ["--format=pax", "--xattrs", "--xattrs-include=*"],
    ],
    ids=" ".join,
)
def test_the_same_tree_as_gnu_tar(tmp_path: Path, options: list[str]) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "sub").mkdir(mode=0o1777)
    (source / "sub").chmod(0o1777)
    (source / "plain").write_bytes(os.urandom(70_000))
    (source / "setuid").write_bytes(b"x")
    os.chown(source / "setuid", 12, 34)
    (source / "setuid").chmod(0o6755)
    os.link(source / "plain", source / "sub" / "hard")
    os.symlink("../plain", source / "sub" / "soft")
    if "--format=v7" not in options:
        os.mkfifo(source / "sub" / "fifo")
        os.mknod(source / "sub" / "null", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    os.setxattr(source / "plain", "user.colour", b"r\0d=")
    os.setxattr(source / "setuid", "security.capability", CAPABILITY)
    if "--format=v7" not in options and "--format=ustar" not in options:
        long = source / "sub" / ("long" * 50)
        long.write_bytes(b"long")
        os.symlink("t" * 150, source / "longlink")
    for name, pieces in {"sparse": 3, "many": 60, "hole": 0}.items():
        with open(source / name, "wb") as file:
            for piece in range(pieces):
                file.seek(piece * 200_000 + 4096)
                file.write(os.urandom(4096))
            file.truncate(pieces * 200_000 + 777_777)
    os.utime(source / "plain", ns=(10**18, 10**18))
    os.utime(source / "sub", ns=(10**17, 10**17))

    archive = tmp_path / "archive.tar"
    subprocess.run(["tar", *options, "-C", source, "-cf", archive, "."], check=True)
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    ours.mkdir()
    extra = ["--xattrs", "--xattrs-include=*"] if "--xattrs" in options else []
    subprocess.run(["tar", "-C", theirs, *extra, "--same-owner", "-xpf", archive], check=True)
    file, target = os.open(archive, os.O_RDONLY), os.open(ours, os.O_RDONLY)
    try:
        layer.apply(file, target)
    finally:
        os.close(file)
        os.close(target)
    assert snapshot(ours) == snapshot(theirs)
    if "-S" in options:
        assert (ours / "many").stat().st_blocks * 512 < 1_000_000


def test_sparse_bombs_cost_nothing(play: Playground) -> None:
    data = extended(record(b"GNU.sparse.map", b"8000000000000,1") + record(b"GNU.sparse.size", b"8000000000001"))
    try:
        play.apply(data + bytes(header(size=b"%011o" % 1)) + bytes(512) + END)
    except OSError:
        return  # larger than the file system takes
    assert (play.root / "victim").stat().st_blocks < 100


# --- fuzz -----------------------------------------------------------------------------------------

NAMES = [
    "a",
    "b",
    "a/b",
    "a/b/c",
    "../x",
    "a/../../x",
    "/a",
    "l",
    "l/x",
    "l/l/y",
    ".wh.a",
    "a/.wh.b",
    "a/.wh..wh..opq",
    ".wh...",
    ".",
    "./",
    "l/.wh.x",
]
TARGETS = ["a", "..", "../..", "/", "/tmp", "l", "a/b", "../../victim/file", ""]


@st.composite
def nodes(draw: st.DrawFn) -> Node:
    kind = draw(st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE]))
    data = draw(st.binary(max_size=20)) if kind == tarfile.REGTYPE else b""
    return Node(draw(st.sampled_from(NAMES)), data, kind, link=draw(st.sampled_from(TARGETS)))


@settings(max_examples=150)
@given(st.lists(nodes(), max_size=8), st.lists(st.tuples(st.integers(0, 8000), st.integers(0, 255)), max_size=3))
def test_no_archive_writes_outside(
    tmp_path_factory: pytest.TempPathFactory, entries: list[Node], changes: list[tuple[int, int]]
) -> None:
    play = Playground(tmp_path_factory.mktemp("fuzz"))
    data = bytearray(tar(entries))
    for at, value in changes:
        data[at % len(data)] = value
    for block in range(0, len(data) - 511, 512):
        if data[block + 257 : block + 262] == b"ustar":
            data[block + 148 : block + 156] = b" " * 8
            data[block + 148 : block + 156] = b"%06o\0 " % sum(data[block : block + 512])
    with contextlib.suppress(ArchiveError, OSError):
        play.apply(bytes(data))


# --- into a container -----------------------------------------------------------------------------


def put(
    play: Playground,
    data: bytes | Sequence[Node],
    at: bytes = b"",
    *,
    keep_kinds: bool = False,
    owner: tuple[int, int] | None = None,
    ids: Any = None,
) -> None:
    """As `Playground.apply`, for `unpack`."""
    descriptor = os.open(play.root, os.O_RDONLY)
    source = io.BytesIO(data if isinstance(data, bytes) else tar(data))
    try:
        layer.unpack(source, descriptor, at, keep_kinds=keep_kinds, owner=owner, ids=ids)
    finally:
        os.close(descriptor)
        assert play._outside() == play._before


def test_unpack_goes_where_it_is_told_and_keeps_what_is_there(play: Playground) -> None:
    (play.root / "in" / "sub").mkdir(parents=True)
    (play.root / "in").chmod(0o700)
    (play.root / "in" / "sub" / "kept").write_text("kept")
    os.symlink("/in", play.root / "link")
    nodes = [
        directory("./", mode=0o755),
        directory("sub", mode=0o750, uid=3),
        Node("sub/.wh.kept", b"a name"),
        Node("sub/new", b"n"),
        hard_link("sub/same", "sub/new"),
        Node("a/b", b"made"),
    ]
    put(play, nodes, b"link")
    assert stat.S_IMODE((play.root / "in").stat().st_mode) == 0o700, "the directory itself stays as it is"
    found = play.root / "in" / "sub"
    assert (stat.S_IMODE(found.stat().st_mode), found.stat().st_uid) == (0o750, 3)
    assert sorted(os.listdir(found)) == [".wh.kept", "kept", "new", "same"]
    assert (found / "same").samefile(found / "new") and (play.root / "in/a/b").read_text() == "made"


def test_unpack_for_one_owner(play: Playground) -> None:
    (play.root / "in").mkdir()
    nodes = [directory("d", uid=3), Node("d/file", b"x"), symlink("d/link", "file"), hard_link("same", "d/file")]
    put(play, nodes, b"in", owner=(1000, 2000))
    for name in ("d", "d/file", "d/link", "same"):
        found = os.lstat(play.root / "in" / name)
        assert (found.st_uid, found.st_gid) == (1000, 2000), name
    assert os.lstat(play.root / "in").st_uid == 0
    put(play, [Node("high", b"x")], owner=(2**32 - 2, 2**31))
    assert os.lstat(play.root / "high").st_uid == 2**32 - 2


def test_unpack_for_a_user_namespace(play: Playground) -> None:
    """Each owner becomes its id on the host; one that has none ends the extraction."""
    ids = (((0, 100_000, 1000), (1000, 500_000, 1)), ((0, 200_000, 10),))
    nodes = [directory("d", uid=3, gid=9), Node("d/file", b"x"), symlink("d/link", "file"), Node("last", uid=1000)]
    put(play, nodes, ids=ids)
    wanted = {"d": (100_003, 200_009), "d/file": (100_000, 200_000), "d/link": (100_000, 200_000)}
    for name, owner in (wanted | {"last": (500_000, 200_000)}).items():
        found = os.lstat(play.root / name)
        assert (found.st_uid, found.st_gid) == owner, name
    put(play, [Node("of the user", b"x", uid=7)], owner=(5, 6), ids=ids)
    assert os.lstat(play.root / "of the user").st_uid == 100_005
    for uid, gid in ((1001, 0), (0, 10), (2**32 - 2, 0)):
        with pytest.raises(ArchiveError, match="its owner has no id on the host: foreign"):
            put(play, [Node("foreign", b"x", uid=uid, gid=gid)], ids=ids)
        assert not (play.root / "foreign").exists()


def test_unpack_replaces_links_and_follows_those_in_the_way(play: Playground) -> None:
    os.symlink(play.base / "victim" / "file", play.root / "file")
    os.symlink("/inner", play.root / "way")
    (play.root / "inner").mkdir()
    put(
        play, [Node("file", b"mine"), Node("way/x", b"x"), directory("way2"), symlink("way2", "/inner"), Node("way2/y")]
    )
    assert (play.root / "file").read_text() == "mine" and not (play.root / "file").is_symlink()
    assert sorted(os.listdir(play.root / "inner")) == ["x", "y"]


@pytest.mark.parametrize("name", ["../x", "a/../../x", "..", "/../x"])
def test_unpack_refuses_names_above_its_directory(play: Playground, name: str) -> None:
    (play.root / "in").mkdir()
    for nodes in ([Node(name, b"x")], [Node("a"), hard_link("b", name)], [hard_link("b", "../../victim/file")]):
        with pytest.raises(ArchiveError, match="leads out of the directory"):
            put(play, nodes, b"in")
    assert os.listdir(play.root) == ["in"]


def test_unpack_keeps_kinds(play: Playground) -> None:
    (play.root / "d").mkdir()
    (play.root / "f").write_text("f")
    for nodes in ([Node("d", b"x")], [symlink("d", "f")], [hard_link("d", "f")], [directory("f")]):
        with pytest.raises(ArchiveError, match="cannot overwrite"):
            put(play, nodes, keep_kinds=True)
    put(play, [directory("d"), Node("f", b"new")], keep_kinds=True)
    assert (play.root / "d").is_dir() and (play.root / "f").read_text() == "new"
    put(play, [Node("d", b"x"), directory("f")])
    assert (play.root / "d").is_file() and (play.root / "f").is_dir()


def test_unpack_refuses_paths_that_get_too_long(play: Playground) -> None:
    at = "/".join(["n" * 200] * 20)
    os.makedirs(play.root / at[:1000])
    with pytest.raises(OSError, match="name too long"):
        put(play, [Node("m" * 200, b"x")], at.encode())


BEFORE = [directory("before"), *(Node(f"before/{at}", b"%d" % at) for at in range(100))]
"""So many files that the worker threads write the small ones after them."""


def without_times_of_directories(play: Playground) -> dict[str, tuple[object, ...]]:
    found = snapshot(play.root)
    return {
        name: (*each[:3], None, *each[4:]) if (play.root / name).is_dir() else each
        for name, each in found.items()
        if not name.startswith("before")
    }


def test_a_crew_makes_the_same_tree(play: Playground) -> None:
    nodes = [
        node
        for at in range(12)
        for node in (
            directory(f"d{at}", mode=0o2775 if at % 3 == 0 else 0o755, gid=at, mtime=1000 + at),
            *(
                Node(
                    f"d{at}/{each}",
                    os.urandom(each * 331),
                    mode=(0o644, 0o755, 0o666, 0o4755, 0o400)[each % 5],
                    uid=each % 2,
                    mtime=5000.25 + each,
                )
                for each in range(40)
            ),
        )
    ]
    put(play, nodes)
    for node in nodes:
        found = (play.root / node.name).stat()
        assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid, found.st_mtime) == (
            node.mode,
            node.uid,
            node.gid,
            node.mtime,
        )
        assert (play.root / node.name).is_dir() or (play.root / node.name).read_bytes() == node.data


def test_a_crew_keeps_the_order_of_the_archive(play: Playground) -> None:
    (play.root / "was").mkdir()
    os.symlink("was", play.root / "link")
    (play.root / "old").write_text("old")
    nodes = [
        *BEFORE,
        *(Node("often", b"%d" % at) for at in range(200)),
        hard_link("same", "often"),
        Node("turned", b"a file"),
        directory("turned"),
        Node("turned/in", b"in"),
        Node("link", b"a file now"),
        Node("was/untouched", b"x"),
        Node("old", b"new"),
        directory("gone"),
        *(Node(f"gone/{at}", b"x") for at in range(50)),
        Node("gone", b"a file"),
        Node("large", b"small"),
        Node("large", b"l" * 300_000),
        Node("again", b"l" * 300_000),
        Node("again", b"small"),
    ]
    put(play, nodes)
    texts = {name: (play.root / name).read_bytes() for name in ("often", "turned/in", "link", "old", "gone", "again")}
    assert texts == {
        "often": b"199",
        "turned/in": b"in",
        "link": b"a file now",
        "old": b"new",
        "gone": b"a file",
        "again": b"small",
    }
    assert (play.root / "same").samefile(play.root / "often") and (play.root / "large").stat().st_size == 300_000
    assert os.listdir(play.root / "was") == ["untouched"] and not (play.root / "link").is_symlink()


def test_a_crew_knows_what_is_in_a_directory_that_the_archive_made(play: Playground) -> None:
    (play.root / "was").mkdir()
    nodes = [
        *BEFORE,
        directory("links"),
        Node("links/first", b"x"),
        symlink("links/turned", "../was"),
        Node("links/turned", b"a file now"),
        Node("links/turned", b"again"),
        symlink("way", "links"),
        directory("through"),
        symlink("shortcut", "through"),
        symlink("shortcut/turned", "../was"),
        Node("through/turned", b"a file now"),
        directory("implied"),
        Node("implied/below/in", b"x"),
        Node("implied/below", b"a file now"),
        directory("hard"),
        hard_link("hard/way", "way"),
        Node("hard/way", b"a file now"),
        directory("outer"),
        directory("outer/inner"),
        Node("outer/inner/in", b"x"),
        Node("outer/inner", b"a file now"),
    ]
    put(play, nodes)
    for name in ("through/turned", "implied/below", "hard/way", "outer/inner"):
        assert not (play.root / name).is_symlink() and (play.root / name).read_bytes() == b"a file now"
    assert (play.root / "links/turned").read_bytes() == b"again" and not (play.root / "links/turned").is_symlink()
    assert (play.root / "way").is_symlink() and os.listdir(play.root / "was") == []


def test_a_crew_says_what_went_wrong(play: Playground) -> None:
    with pytest.raises(ArchiveError, match="a parent of the entry is no directory: file/below"):
        put(play, [*BEFORE, Node("file", b"x"), Node("file/below", b"x")])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large: 'too-large'"):
            put(play, [*BEFORE, Node("too-large", b"x" * 30_000), *(Node(f"{at}", b"x" * 5000) for at in range(2000))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(OSError, match="name too long"):
        put(play, [*BEFORE, Node("n" * 256, b"x")])
    with pytest.raises(ArchiveError, match="truncated"):
        put(play, tar([*BEFORE, Node("cut", b"x" * 50_000)])[:-60_000])


def test_a_crew_leaves_no_thread_and_no_descriptor(play: Playground) -> None:
    nodes = [*BEFORE, *(Node(f"d{at % 50}/{at}", b"x") for at in range(500))]
    threads = len(os.listdir("/proc/self/task"))
    put(play, nodes)
    gc.collect()  # frees leftovers of earlier tests
    before = os.listdir("/proc/self/fd")
    put(play, nodes)
    with pytest.raises(ArchiveError):
        put(play, [*nodes, Node("../x")])
    assert os.listdir("/proc/self/fd") == before
    # a thread that has been joined is listed a moment longer
    until("the crew's threads are gone", lambda: len(os.listdir("/proc/self/task")) <= threads)


@settings(max_examples=100)
@given(st.lists(nodes(), max_size=30), st.booleans())
def test_a_crew_does_as_one_thread_would(
    tmp_path_factory: pytest.TempPathFactory, entries: list[Node], keep_kinds: bool
) -> None:
    outcomes = []
    for before in ([], BEFORE):
        play = Playground(tmp_path_factory.mktemp("crew"))
        failure = ""
        try:
            put(play, [*before, *entries], keep_kinds=keep_kinds)
        except (ArchiveError, OSError) as error:
            failure = str(error)
        outcomes.append((failure, without_times_of_directories(play)))
    assert outcomes[0] == outcomes[1]


@settings(max_examples=150)
@given(
    st.lists(nodes(), max_size=8),
    st.lists(st.tuples(st.integers(0, 8000), st.integers(0, 255)), max_size=3),
    st.sampled_from([b"", b"in", b"way", b"in/.."]),
    st.booleans(),
)
def test_no_archive_that_is_put_writes_outside(
    tmp_path_factory: pytest.TempPathFactory,
    entries: list[Node],
    changes: list[tuple[int, int]],
    at: bytes,
    keep_kinds: bool,
) -> None:
    play = Playground(tmp_path_factory.mktemp("fuzz"))
    (play.root / "in").mkdir()
    os.symlink("../../outer", play.root / "way")
    os.symlink(play.base / "victim", play.root / "a")
    data = bytearray(tar(entries))
    for where, value in changes:
        data[where % len(data)] = value
    for block in range(0, len(data) - 511, 512):
        if data[block + 257 : block + 262] == b"ustar":
            data[block + 148 : block + 156] = b" " * 8
            data[block + 148 : block + 156] = b"%06o\0 " % sum(data[block : block + 512])
    with contextlib.suppress(ArchiveError, OSError):
        put(play, bytes(data), at, keep_kinds=keep_kinds)
