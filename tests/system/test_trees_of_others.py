"""The extracted tree of an image, compared with umoci's of the same image: every entry, its owner,
mode, attributes, times, links and content."""

from __future__ import annotations

import gzip
import os
import struct
import subprocess
import tarfile
from pathlib import Path
from typing import Any

from engine.system import mounts
from tests.support.engine.harness import TempEngine
from tests.support.images import trees
from tests.support.images.archives import Image, Node, directory, hard_link, oci_archive, symlink, tar

LONG = "/".join(["a-rather-long-name-of-a-directory" * 3] * 12)
CAPABILITY = struct.pack("<IIIII", 0x02000001, 1 << 10, 0, 0, 0).decode("latin-1")
"""cap_net_bind_service=ep, revision 2 (capabilities(7))."""


def attribute(name: str, value: str) -> tuple[str, str]:
    return f"SCHILY.xattr.{name}", value


def sparse(name: str) -> bytes:
    """A file of 64 MiB with five bytes in its middle, as GNU tar 1.0 writes it in a PAX archive."""
    table = b"1\n33554432\n5\n"
    payload = table.ljust(512, b"\0") + b"hello"
    info = tarfile.TarInfo(f"GNUSparseFile.0/{name}")
    info.size, info.mode, info.mtime = len(payload), 0o640, 1_700_000_123
    info.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": name,
        "GNU.sparse.realsize": str(64 << 20),
    }
    return info.tobuf(tarfile.PAX_FORMAT) + payload + bytes(-len(payload) % 512)


LOWEST = [
    directory("./", 0o755),
    directory("etc/", 0o2775, uid=3, gid=4, mtime=1_600_000_000.25),
    Node("etc/file", b"lowest", mode=0o640, uid=1000, gid=1001, mtime=1_500_000_000.123456789),
    Node("etc/gone", b"x"),
    directory("etc/opaque/", mtime=1_400_000_000),
    Node("etc/opaque/below", b"hidden"),
    directory("etc/opaque/deep/"),
    Node("etc/opaque/deep/below", b"hidden"),
    Node("setuid", b"s", mode=0o4755),
    Node("setgid", b"s", mode=0o2755, gid=7),
    directory("sticky/", 0o1777, mtime=1_300_000_000),
    Node("capable", b"c", mode=0o755, uid=5, pax=(attribute("security.capability", CAPABILITY),)),
    Node("noted", b"n", pax=(attribute("user.note", "a=b\nc"), attribute("user.other", "\0\xff"))),
    directory("noted.d/", pax=(attribute("user.note", "d"),)),
    Node("one", b"linked", mode=0o600, mtime=1_200_000_000),
    hard_link("two", "one"),
    hard_link("etc/three", "./two"),
    symlink("soft", "../../etc/nowhere", uid=9, gid=9, mtime=1_100_000_000),
    symlink("etc/absolute", "/etc/file"),
    Node("char", type=tarfile.CHRTYPE, mode=0o666, device=(1, 3), mtime=1_000_000_000),
    Node("block", type=tarfile.BLKTYPE, mode=0o660, gid=6, device=(7, 200)),
    Node("fifo", type=tarfile.FIFOTYPE, mode=0o622),
    Node(f"{LONG}/file", b"long"),
    Node("n" * 255, b"longest"),
    Node("späte/ümläut", b"utf-8"),
    Node("becomes-directory", b"file"),
    directory("becomes-file/"),
    Node("becomes-file/below", b"x"),
    directory("becomes-link/"),
    Node("becomes-link/below", b"x"),
    symlink("link-becomes-directory", "etc"),
    Node("old", b"o", mtime=-1_000.5),
    Node("empty"),
]
MIDDLE = [
    Node("etc/.wh.gone"),
    Node("etc/opaque/.wh..wh..opq"),
    Node("etc/opaque/new", b"new"),
    directory("becomes-directory/", 0o700),
    Node("becomes-directory/in", b"in"),
    Node("becomes-file", b"now a file", mode=0o4711),
    symlink("becomes-link", "etc"),
    directory("link-becomes-directory/"),
    Node("link-becomes-directory/in", b"in"),
    Node("setuid", b"another", mode=0o755),
    Node("added/by/itself", b"a"),
    Node(".wh.two"),
    Node("again", b"1"),
]
TOP = [
    directory("etc/", 0o755, uid=11, gid=12, mtime=1_650_000_000),
    Node("etc/gone", b"back"),
    Node("becomes-directory", b"a file again"),
    directory("becomes-file/"),
    Node("becomes-file/in", b"in"),
    Node("added/by/another", b"b"),
    Node(".wh.again"),
    Node(".wh.sticky"),
    hard_link("etc/gone-too", "etc/gone"),
]


def test_the_same_tree_as_umoci(engine: TempEngine, tmp_path: Path) -> None:
    layers = [tar(LOWEST)[:-10240].rstrip(b"\0"), tar(MIDDLE), tar(TOP)]
    layers[0] += bytes(-len(layers[0]) % 512) + sparse("sparse") + bytes(10240)
    image = Image(layers, ["trees:latest"], {})
    archive = oci_archive(image, annotation="org.opencontainers.image.ref.name")
    (tmp_path / "layout").mkdir()
    subprocess.run(["tar", "-xf", "-", "-C", str(tmp_path / "layout")], input=archive, check=True)
    done = subprocess.run(
        ["umoci", "unpack", "--image", f"{tmp_path}/layout:trees:latest", str(tmp_path / "bundle")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    theirs = trees.snapshot(tmp_path / "bundle" / "rootfs")

    answer = engine.request(
        "POST", "/v1.24/images/load", oci_archive(image, gzip.compress), {"Content-Type": "application/x-tar"}
    )
    assert b"error" not in answer.body, answer.body
    data = engine.request("GET", "/v1.24/images/trees/json").json()["GraphDriver"]["Data"]
    merged = tmp_path / "merged"
    merged.mkdir()
    mounts.mount("overlay", str(merged), "overlay", options=f"lowerdir={data['UpperDir']}:{data['LowerDir']}")
    try:
        ours = trees.snapshot(merged)
        assert (merged / "sparse").stat().st_blocks < 1000
    finally:
        mounts.unmount(str(merged))
        engine.docker("rmi", "trees")
    assert sorted(ours) == sorted(theirs)
    named = {os.path.normpath(node.name) for node in (*LOWEST, *MIDDLE, *TOP)} - {"."}
    different = {
        name: (ours[name], theirs[name]) for name in ours if _seen(ours, name, named) != _seen(theirs, name, named)
    }
    assert not different


def _seen(tree: dict[str, tuple[Any, ...]], name: str, named: set[str]) -> tuple[Any, ...]:
    """An entry, without its time if that is the time of the extraction. This is so for directories
    without an entry of their own, and for the root, which whiteouts change."""
    found = tree[name]
    return found if name in named or name == "sparse" else (*found[:3], *found[4:])
