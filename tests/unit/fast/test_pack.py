"""Directory trees written as tar streams, read back by GNU tar and by Python.

Needs root, for owners, devices and trusted attributes.
"""

from __future__ import annotations

import gc
import io
import os
import stat
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from engine._fast import layer, pack
from engine._fast.changes import changes
from engine._fast.tree import remove_tree
from tests.support.images.archives import Node, directory, hard_link, tar
from tests.support.images.trees import snapshot

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def packed(path: Path, name: bytes = b"", *, piece: int = 100_001, top: bool = False, **more: Any) -> bytes:
    descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW)
    try:
        packer = pack.Packer(descriptor, name, top=top, **more)
    finally:
        os.close(descriptor)
    out = []
    while data := packer.read(piece):
        assert len(data) <= piece
        out.append(data)
    packer.close()
    assert packer.read(10) == b""
    return b"".join(out)


def laid_out(data: bytes, target: Path) -> Path:
    target.mkdir(exist_ok=True)
    descriptor = os.open(target, os.O_RDONLY)
    try:
        layer.apply(io.BytesIO(data), descriptor)
    finally:
        os.close(descriptor)
    return target


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    top = tmp_path / "tree"
    (top / "d" / ("n" * 200) / ("m" * 200)).mkdir(parents=True)
    (top / "d" / ("n" * 200) / "file").write_bytes(b"q" * 1000)
    (top / "plain").write_bytes(os.urandom(300_000))
    (top / "d").chmod(0o3771)
    os.link(top / "plain", top / "d" / "hard")
    os.symlink("no/where", top / "soft")
    os.symlink("t" * 500, top / "long")
    os.mkfifo(top / "pipe")
    os.mknod(top / "null", 0o640 | stat.S_IFCHR, os.makedev(259, 70_000))
    os.setxattr(top / "plain", "user.name", b"\xff\0value\n")
    os.setxattr(top / "d", "user.name", b"of a directory")
    os.setxattr(top / "d", "trusted.overlay.origin", b"not ours to tell")
    os.chown(top / "soft", 3_000_000, 5_000_000, follow_symlinks=False)
    (top / os.fsdecode(b"\xff\xfe")).write_bytes(b"no UTF-8")
    (top / "old").write_bytes(b"")
    os.utime(top / "old", ns=(0, -1_250_000_000))
    os.utime(top / "pipe", ns=(10**18 + 1, 10**18 + 1))
    return top


def test_what_gnu_tar_and_our_own_reader_make_of_it(tree: Path, tmp_path: Path) -> None:
    data = packed(tree, fine=True)
    ours = laid_out(data, tmp_path / "ours")
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    subprocess.run(
        ["tar", "-C", theirs, "--xattrs", "--xattrs-include=*", "--same-owner", "-xpf", "-"],
        input=data,
        check=True,
        capture_output=True,
    )
    os.removexattr(tree / "d", "trusted.overlay.origin")
    expected = snapshot(tree)
    for found in (snapshot(ours), snapshot(theirs)):
        expected.pop(".", None)
        found.pop(".")
        assert found == expected


def test_pieces_of_any_size(tree: Path) -> None:
    whole = packed(tree)
    assert len(whole) % 512 == 0 and whole.endswith(bytes(1024))
    assert all(packed(tree, piece=size) == whole for size in (1 << 20, 512, 4097, 511))


@pytest.mark.parametrize(
    ("name", "names"),
    [(b"x", ["x/", "x/a"]), (b".", ["./", "./a"]), (b"/", ["/", "/a"]), (b"", ["/", "a"])],
)
def test_what_the_top_is_called(tmp_path: Path, name: bytes, names: list[str]) -> None:
    (tmp_path / "top").mkdir()
    (tmp_path / "top" / "a").write_bytes(b"")
    data = packed(tmp_path / "top", name, top=True)
    assert [data[at : at + 100].rstrip(b"\0").decode() for at in (0, 512)] == names


def test_one_file_and_one_link(tree: Path) -> None:
    for path, kind in (("plain", "isfile"), ("soft", "issym"), ("pipe", "isfifo"), ("null", "ischr")):
        with tarfile.open(fileobj=io.BytesIO(packed(tree / path, b"called"))) as opened:
            (member,) = opened.getmembers()
            assert member.name == "called" and getattr(member, kind)()


@pytest.mark.parametrize("pieces", [[], [(0, 5000)], [(1 << 20, 3)], [(0, 1), (1 << 20, 8192), (3 << 30, 100)]])
@pytest.mark.parametrize("tail", [0, 1 << 30])
def test_holes(tmp_path: Path, pieces: list[tuple[int, int]], tail: int) -> None:
    top = tmp_path / "tree"
    top.mkdir()
    with open(top / "hole", "wb") as file:
        for offset, size in pieces:
            file.seek(offset)
            file.write(os.urandom(size))
        file.truncate(file.tell() + tail)
    data = packed(top)
    assert len(data) < 100_000
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    subprocess.run(["tar", "-C", theirs, "-xSpf", "-"], input=data, check=True)
    with tarfile.open(fileobj=io.BytesIO(data)) as opened:
        assert opened.getmember("hole").size == os.stat(top / "hole").st_size
    for made in (theirs, laid_out(data, tmp_path / "ours")):
        assert os.stat(made / "hole").st_size == os.stat(top / "hole").st_size
        assert os.stat(made / "hole").st_blocks < 100
        with open(made / "hole", "rb") as one, open(top / "hole", "rb") as other:
            for offset, size in pieces:
                one.seek(max(0, offset - 10))
                other.seek(max(0, offset - 10))
                assert one.read(size + 20) == other.read(size + 20)


def test_paths_longer_than_the_kernel_takes_at_once(tmp_path: Path) -> None:
    """9,000 bytes deep, more levels than stay open, with entries that are read again on the way
    up."""
    names, above = [], os.open(tmp_path, os.O_RDONLY)
    for level in range(90):
        name = f"{level:02}" + "x" * 98
        names.append(name)
        os.mkdir(name, dir_fd=above)
        below = os.open(name, os.O_RDONLY, dir_fd=above)
        os.close(above)
        above = below
        with open(os.open("z", os.O_WRONLY | os.O_CREAT, dir_fd=above), "w") as file:
            file.write(str(level))
        os.link("z", "zz", src_dir_fd=above, dst_dir_fd=above)
    os.close(above)
    with tarfile.open(fileobj=io.BytesIO(packed(tmp_path, b"top"))) as archive:
        found = archive.getmembers()
        for level in range(90):
            way = "/".join(("top", *names[: level + 1]))
            content = archive.extractfile(f"{way}/z")
            assert content is not None and content.read() == str(level).encode()
            assert archive.getmember(f"{way}/zz").linkname == f"{way}/z"
    assert len(found) == 3 * 90 and max(len(each.name) for each in found) == 3 + 90 * 101 + 3
    listed = subprocess.run(["tar", "-tf", "-"], input=packed(tmp_path, b"top"), capture_output=True, check=True)
    assert listed.stdout.count(b"\n") == 3 * 90
    ways = ["/" + "/".join(names[: level + 1]) for level in range(90)]
    added = [(way + name, 1) for way in ways for name in ("", "/z", "/zz")]
    assert sorted(changes_of(tmp_path)) == sorted((os.fsencode(path), kind) for path, kind in added)
    below = tmp_path.parent / f"{tmp_path.name}-below"
    (below / names[0]).mkdir(parents=True)
    (below / names[0] / "z").touch()
    found = dict(changes_of(tmp_path, below))
    assert [path for path, kind in found.items() if kind == 0] == [ways[0].encode(), f"{ways[0]}/z".encode()]
    assert len(found) == len(added)


def test_deeper_than_descriptors_stay_open(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    at, names = top, []
    for depth in range(300):
        (at / "z").write_bytes(b"behind")
        (at / "a").write_bytes(b"before")
        names += ["m/" * depth + "a", "m/" * depth + "z"]
        at = at / "m"
        at.mkdir()
    descriptor = os.open(top, os.O_RDONLY)
    try:
        packer = pack.Packer(descriptor, b"")
        gc.collect()  # frees leftovers of earlier tests
        before = len(os.listdir("/proc/self/fd"))
        found, open_most = b"", 0
        while data := packer.read(5000):
            found += data
            open_most = max(open_most, len(os.listdir("/proc/self/fd")) - before)
    finally:
        os.close(descriptor)
    assert open_most <= 66  # and the top, and a file
    with tarfile.open(fileobj=io.BytesIO(found)) as opened:
        assert sorted(name for name in opened.getnames() if not name.endswith("m") and name) == sorted(names)


def test_paths_that_are_too_long(tmp_path: Path) -> None:
    at = os.open(tmp_path, os.O_RDONLY)
    for _ in range(1100):
        os.mkdir("n" * 250, dir_fd=at)
        below = os.open("n" * 250, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    with pytest.raises(OSError, match="name too long"):
        packed(tmp_path)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        # all paths together, before a single one
        with pytest.raises(OSError, match="list too long"):
            changes(descriptor, [])
        remove_tree(descriptor, b"n" * 250)
    finally:
        os.close(descriptor)


def changes_of(upper: Path, *lower: Path) -> list[tuple[bytes, int]]:
    descriptors = [os.open(path, os.O_RDONLY) for path in (upper, *lower)]
    try:
        return changes(descriptors[0], descriptors[1:])
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def test_what_vanishes_and_shrinks(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 10_000)
    (tmp_path / "b").write_bytes(b"y" * 10_000)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    packer = pack.Packer(descriptor, b"", top=False)
    os.close(descriptor)
    data = packer.read(600)
    (tmp_path / "b").unlink()
    os.truncate(tmp_path / "a", 100)
    while more := packer.read(600):
        data += more
    with tarfile.open(fileobj=io.BytesIO(data)) as opened:
        (member,) = opened.getmembers()
        file = opened.extractfile(member)
        assert file is not None and file.read() == (b"x" * 100).ljust(10_000, b"\0")


# --- layers ---------------------------------------------------------------------------------------


def test_a_layer_comes_back_as_it_was(tmp_path: Path) -> None:
    nodes = [
        Node(".wh.gone"),
        directory("d", mode=0o750),
        Node("d/.wh.one"),
        directory("e"),
        Node("e/.wh..wh..opq"),
        Node("e/new", b"n"),
        Node("f", b"data"),
        hard_link("g", "f"),
    ]
    upper = laid_out(tar(nodes), tmp_path / "upper")
    again = laid_out(packed(upper, layer=True, fine=True), tmp_path / "again")
    assert snapshot(upper, times=False) == snapshot(again, times=False)
    assert os.getxattr(again / "e", "trusted.overlay.opaque") == b"y"


def test_mount_points_of_the_runtime_are_nobodys(tmp_path: Path) -> None:
    upper = laid_out(
        tar(
            [directory("dev"), directory("proc"), directory("sys"), directory("etc"), Node("etc/hosts"), Node("etc/x")]
        ),
        tmp_path / "upper",
    )
    with tarfile.open(fileobj=io.BytesIO(packed(upper, layer=True))) as opened:
        assert opened.getnames() == ["etc", "etc/x"]
    (upper / "proc" / "mine").write_bytes(b"")
    (upper / "etc" / "hosts").write_bytes(b"content")
    with tarfile.open(fileobj=io.BytesIO(packed(upper, layer=True))) as opened:
        assert opened.getnames() == ["etc", "etc/hosts", "etc/x", "proc", "proc/mine"]


def test_ids_of_a_user_namespace(tmp_path: Path) -> None:
    """Translated by ranges; one outside of all ranges becomes 65534, as the kernel shows it."""
    ids = (((100_000, 0, 1000), (500_000, 1000, 1)), ((200_000, 0, 10),))
    owners = {
        "first": ((100_000, 200_000), (0, 0)),
        "last": ((100_999, 200_009), (999, 9)),
        "second": ((500_000, 200_001), (1000, 1)),
        "below": ((99_999, 199_999), (65534, 65534)),
        "above": ((101_000, 200_010), (65534, 65534)),
        "high": ((2**32 - 2, 2**32 - 2), (65534, 65534)),
    }
    for name, (owner, _) in owners.items():
        (tmp_path / name).touch()
        os.chown(tmp_path / name, *owner)
    with tarfile.open(fileobj=io.BytesIO(packed(tmp_path, ids=ids))) as archive:
        found = {member.name: (member.uid, member.gid) for member in archive}
    assert found == {name: shown for name, (_, shown) in owners.items()}
    with pytest.raises(TypeError):
        packed(tmp_path, ids=((1, 2), ()))
