"""Directories and files in memory, as COPY reads them."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.builder.ignore import Patterns
from engine.builder.trees import DirectoryTree, Entry, MemoryTree, Tree, clean
from engine.errors import InvalidParameter, NotFound, ServerError

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def root(tmp_path: Path) -> Iterator[int]:
    """A small root file system."""
    top = tmp_path / "root"
    (top / "etc" / "conf.d").mkdir(parents=True)
    (top / "etc" / "passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    (top / "etc" / "conf.d" / "a").write_bytes(b"alpha")
    (top / "empty").mkdir(mode=0o700)
    os.symlink("/etc/passwd", top / "link")
    os.symlink("../../../../../../etc", top / "out")
    os.symlink("loop", top / "loop")
    os.symlink("etc", top / "to_etc")
    os.link(top / "etc" / "passwd", top / "same")
    os.chmod(top / "etc" / "passwd", 0o640)
    os.chown(top / "etc" / "passwd", 3, 4)
    os.utime(top / "etc" / "passwd", ns=(0, 1_600_000_000_123_456_789))
    os.setxattr(top / "etc" / "passwd", "user.k", b"v")
    os.mknod(top / "null", 0o20666, os.makedev(1, 3))
    os.mkfifo(top / "pipe")
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(top / "socket"))
    (tmp_path / "outside").write_text("outside")
    os.symlink("../outside", top / "secret")
    descriptor = os.open(top, os.O_PATH | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)


def test_entries(root: int) -> None:
    tree = DirectoryTree(root)
    entries = dict(tree.walk(""))
    assert sorted(entries) == sorted(
        ["empty", "etc", "etc/conf.d", "etc/conf.d/a", "etc/passwd", "link", "loop", "null", "out", "pipe", "same",
         "secret", "to_etc"]
    )  # fmt: skip
    assert all(path == entry.path and tree.find(path) == entry for path, entry in entries.items())
    passwd = entries["etc/passwd"]
    assert (passwd.kind, passwd.mode, passwd.uid, passwd.gid, passwd.size) == ("0", 0o640, 3, 4, 26)
    assert passwd.mtime == 1_600_000_000_123_456_789 and passwd.xattrs == ((b"user.k", b"v"),)
    assert passwd.inode == entries["same"].inode != 0 == entries["etc/conf.d/a"].inode
    assert (entries["null"].kind, entries["null"].major, entries["null"].minor) == ("3", 1, 3)
    assert entries["pipe"].kind == "6" and entries["empty"].mode == 0o700
    assert (entries["link"].kind, entries["link"].target) == ("2", "/etc/passwd")
    assert tree.children("etc") == ["conf.d", "passwd"]
    assert [path for path, _ in tree.walk("etc")] == ["conf.d", "conf.d/a", "passwd"]
    assert tree.find("") is not None and tree.find("nothing") is None and tree.find("to_etc/passwd") is None


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("link", "etc/passwd"),
        ("to_etc/conf.d/../passwd", "etc/passwd"),
        ("out", "etc"),
        ("out/passwd", "etc/passwd"),
        ("secret", None),
        ("/etc/./passwd", "etc/passwd"),
        ("../../etc", "etc"),
        ("etc/passwd/x", None),
        ("x" * 300, None),
        ("pipe", "pipe"),
    ],
)
def test_links_stay_inside(root: int, path: str, expected: str | None) -> None:
    entry = DirectoryTree(root).resolve(path)
    assert (entry.path if entry else None) == expected


def test_content(root: int) -> None:
    tree = DirectoryTree(root)
    assert tree.read("link", 100).startswith(b"root:") and tree.read("etc/conf.d/a", 5) == b"alpha"
    for path, kind, words in (
        ("pipe", InvalidParameter, "not a regular file"),
        ("null", InvalidParameter, "not a regular file"),
        ("secret", NotFound, "stat secret: no such file or directory"),
        ("etc/passwd", InvalidParameter, "26 bytes, and at most 10 are allowed"),
        ("loop", InvalidParameter, "too many levels"),
    ):
        with pytest.raises(kind, match=words):
            tree.read(path, 10)
    entry = tree.find("etc/conf.d/a")
    assert entry is not None and tree.digest(entry) == hashlib.sha256(b"alpha").digest()
    for path in ("null", "pipe", "link", "gone"):
        with pytest.raises(ServerError):
            tree.reader(Entry(path))
    with pytest.raises(ServerError, match="gone"):
        list(tree.walk("gone"))


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["etc"], ["empty", "link", "loop", "null", "out", "pipe", "same", "secret", "to_etc"]),
        (["*", "!etc/conf.d/a"], ["etc", "etc/conf.d", "etc/conf.d/a"]),
        (["*", "!etc"], ["etc", "etc/conf.d", "etc/conf.d/a", "etc/passwd"]),
        (["*", "!etc", "etc/c*"], ["etc", "etc/passwd"]),
        (["*", "!none"], []),
        (["**/a", "[l-z]*", "!link"], ["empty", "etc", "etc/conf.d", "etc/passwd", "link"]),
    ],
)
def test_ignored(root: int, patterns: list[str], expected: list[str]) -> None:
    tree = DirectoryTree(root, ignore=Patterns(patterns))
    found = [path for path, _ in tree.walk("")]
    assert found == expected
    assert tree.children("") == [path for path in expected if "/" not in path]
    for path, _ in DirectoryTree(root).walk(""):
        assert (tree.find(path) is not None) == (path in expected)


def test_memory() -> None:
    tree = MemoryTree({"b": b"two", "a": b"one"}, mode=0o600, mtime=5)
    assert list(tree.walk("")) == [("a", Entry("a", mode=0o600, size=3, mtime=5)), ("b", tree.find("b"))]
    assert tree.children("") == ["a", "b"] and tree.children("a") == []
    assert tree.read("/./a", 3) == b"one" and tree.resolve("c") is None
    entry = tree.find("b")
    assert entry is not None and tree.digest(entry) == hashlib.sha256(b"two").digest()
    root = tree.resolve("")
    assert root is not None and root.kind == "5"


def test_protocol(root: int) -> None:
    trees: list[Tree] = [DirectoryTree(root), MemoryTree({})]
    assert all(tree.find("") for tree in trees)


@given(st.lists(st.sampled_from(["a", "b", ".", "..", ""]), max_size=8).map("/".join))
def test_clean(path: str) -> None:
    found = clean(path)
    deep = 0
    leads_out = False
    for name in path.split("/"):
        deep += {"..": -1, ".": 0, "": 0}.get(name, 1)
        leads_out = leads_out or deep < 0
    assert (found is None) == leads_out
    if found is not None:
        assert "/" + found == os.path.normpath("/" + path).replace("//", "/") and clean(found) == found
