"""COPY and ADD: what is selected, where it goes, and the layer that it makes."""

from __future__ import annotations

import asyncio
import bz2
import fnmatch
import gzip
import io
import lzma
import os
import shutil
import stat
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine._fast.members import Members
from engine.builder import copying
from engine.builder.context import Context
from engine.builder.copying import Destination, Selection, Stream, destination, join, lay_out, select
from engine.builder.trees import DirectoryTree, Entry, MemoryTree, Tree
from engine.errors import EngineError, InvalidParameter, NotFound
from engine.images.layers import Layers
from engine.storage.snapshots import Ingest
from tests.support.engine.descriptors import none_left_open
from tests.support.images.archives import EPOCH, Node, directory, hard_link, symlink, tar
from tests.support.images.trees import snapshot
from tests.unit.builder.contexts import NOW, laid_out, stream_of, with_context

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

NODES = [
    Node("Dockerfile", b"FROM x"),
    Node("a.txt", b"a"),
    Node("b.txt", b"b", mode=0o755, uid=5),
    Node("c.md", b"c"),
    directory("src", mode=0o750),
    Node("src/one.py", b"1"),
    Node("src/two.pyc", b"2"),
    directory("src/sub"),
    Node("src/sub/three.py", b"3"),
    Node("src/sub/three.txt", b"3"),
    symlink("src/link", "sub/three.py"),
    symlink("src/dangling", "/nowhere"),
    directory("empty"),
    directory("pkg"),
    Node("pkg/x/package.json", b"x"),
    Node("pkg/x/index.js", b"x"),
    Node("pkg/y/package.json", b"y"),
    Node("pkg/y/deep/package.json", b"z"),
    symlink("to_src", "src"),
    symlink("to_a", "/a.txt"),
    Node("we[i]rd*", b"w"),
]


def chosen(selection: Selection) -> list[str]:
    """Paths below the destination; a single file with `=`."""
    return [("=" if piece.single else "") + path for piece in selection.pieces for path, _ in piece.entries]


def selecting(tmp_path: Path, sources: Sequence[str], nodes: Sequence[Node] = NODES, **how: Any) -> list[str]:
    how = {"destination_is_directory": True, **how}
    return with_context(tar(nodes), tmp_path, lambda tree: chosen(select(tree, sources, **how)))


SRC = ["dangling", "link", "one.py", "sub", "sub/three.py", "sub/three.txt", "two.pyc"]


@pytest.mark.parametrize(
    ("sources", "how", "expected"),
    [
        (["a.txt"], {}, ["=a.txt"]),
        (["./a.txt", "/b.txt", ".//c.md"], {}, ["=a.txt", "=b.txt", "=c.md"]),
        (["src"], {}, SRC),
        (["src/"], {}, SRC),
        (["src/../src/."], {}, SRC),
        (["to_src"], {}, SRC),
        (["to_src/sub"], {}, ["three.py", "three.txt"]),
        (["to_a"], {}, ["=to_a"]),
        (["src/link"], {}, ["=link"]),
        (["empty"], {}, []),
        (["*.txt"], {}, ["=a.txt", "=b.txt"]),
        (["?.txt", "c*"], {}, ["=a.txt", "=b.txt", "=c.md"]),
        (["[ac].*"], {}, ["=a.txt", "=c.md"]),
        (["[^a].txt"], {}, ["=b.txt"]),
        (["src/*.py"], {}, ["=one.py"]),
        (["to_src/*.py"], {}, ["=one.py"]),
        (["s*/sub"], {}, ["three.py", "three.txt"]),
        (["*/sub/*.py"], {}, ["=three.py"]),
        (["pkg/*/package.json"], {}, ["=package.json", "=package.json"]),
        (["pkg/*"], {}, ["index.js", "package.json", "deep", "deep/package.json", "package.json"]),
        (["pkg/**/package.json"], {}, ["=package.json", "=package.json"]),
        (["./pkg//x*/"], {}, ["index.js", "package.json"]),
        (["we[[]i]rd*"], {}, ["=we[i]rd*"]),
        (["we\\[i\\]rd\\**"], {}, ["=we[i]rd*"]),
        (["src"], {"exclude": ["*.py"]}, ["dangling", "link", "sub", "sub/three.py", "sub/three.txt", "two.pyc"]),
        (["src"], {"exclude": ["**/*.py", "dangling"]}, ["link", "sub", "sub/three.txt", "two.pyc"]),
        (["src"], {"exclude": ["*", "!sub/*.txt"]}, ["sub", "sub/three.txt"]),
        (["src", "a.txt"], {"exclude": ["sub", "a*"]}, ["dangling", "link", "one.py", "two.pyc"]),
        (["*.txt"], {"exclude": ["b*"]}, ["=a.txt"]),
        (["a.txt"], {"exclude": ["*"]}, []),
        (["pkg/*"], {"exclude": ["deep", "*.js"]}, ["package.json", "package.json"]),
        (["pkg/*"], {"exclude": ["*"], "destination_is_directory": False}, []),
        (["pkg/*"], {"destination_is_directory": False}, ["index.js", "package.json", "deep", "deep/package.json",
                                                          "package.json"]),
        (["../a.txt", "/../b.txt"], {"rooted": True}, ["=a.txt", "=b.txt"]),
        (["nope/../../src/one.py"], {"rooted": True}, ["=one.py"]),
        (["../s*/*.py"], {"rooted": True}, ["=one.py"]),
        (["../.."], {"rooted": True, "exclude": ["*", "!empty"]}, ["empty"]),
        # --parents
        (["../src/one.py"], {"parents": True, "rooted": True}, ["src", "src/one.py"]),
        (["../src/./../../sub/three.py"], {"parents": True, "rooted": True}, ["sub", "sub/three.py"]),
        (["src/one.py"], {"parents": True}, ["src", "src/one.py"]),
        (["./src/sub/three.py"], {"parents": True}, ["src", "src/sub", "src/sub/three.py"]),
        (["src/./sub/three.py"], {"parents": True}, ["sub", "sub/three.py"]),
        (["to_src/./sub"], {"parents": True}, ["sub", "sub/three.py", "sub/three.txt"]),
        (["src/sub"], {"parents": True}, ["src", "src/sub", "src/sub/three.py", "src/sub/three.txt"]),
        (["pkg/*/package.json"], {"parents": True}, ["pkg", "pkg/x", "pkg/x/package.json", "pkg/y",
                                                     "pkg/y/package.json"]),
        (["pkg/./**/package.json"], {"parents": True}, ["x", "x/package.json", "y", "y/deep", "y/deep/package.json",
                                                        "y/package.json"]),
        (["src/*"], {"parents": True, "exclude": ["**/*.txt", "src/two*"]}, ["src", "src/dangling", "src/link",
                                                                  "src/one.py", "src/sub", "src/sub/three.py"]),
        (["src/link"], {"parents": True}, ["src", "src/link"]),
        (["src/sub/."], {"parents": True}, ["src", "src/sub", "src/sub/three.py", "src/sub/three.txt"]),
        (["pkg/*/./package.json"], {"parents": True}, ["package.json", "package.json"]),
        (["pkg/?/./**/deep"], {"parents": True}, ["deep", "deep/package.json"]),
        (["pkg/*/./index.js"], {"parents": True}, ["index.js"]),
        (["*.go", "s*/./*.go"], {"parents": True}, []),
        (["[x", "em*/./nope", "*/./nope"], {"parents": True}, []),
        (["a.txt", "src/./one.py"], {"parents": True, "destination_is_directory": False}, ["a.txt", "one.py"]),
    ],
)  # fmt: skip
def test_select(sources: list[str], how: dict[str, Any], expected: list[str], tmp_path: Path) -> None:
    assert selecting(tmp_path, sources, **how) == expected


@pytest.mark.parametrize(
    ("sources", "how", "kind", "words"),
    [
        (["nope"], {}, NotFound, r"excluded by \.dockerignore: stat nope: no such file or directory"),
        (["./no/pe"], {}, NotFound, "stat no/pe: no such file or directory"),
        (["src/dangling"], {}, NotFound, "src/dangling: no such file or directory"),
        (["src/dang*"], {}, NotFound, "src/dangling: no such file or directory"),
        (["a.txt/x"], {}, NotFound, "a.txt/x: no such file or directory"),
        (["*.go"], {}, InvalidParameter, "^No source files were specified"),
        (["nope/*.go"], {}, InvalidParameter, "No source files were specified"),
        (["a.txt/*"], {}, InvalidParameter, "No source files were specified"),
        ([], {}, InvalidParameter, "No source files were specified"),
        (["../a.txt"], {}, InvalidParameter, r"^Forbidden path outside the build context: \.\./a\.txt \(\)"),
        (["src/../../x*"], {}, InvalidParameter, "Forbidden path outside the build context: src/../../x"),
        (["[x"], {}, InvalidParameter, "No source files were specified"),
        (["a.txt", "b.txt"], {"destination_is_directory": False}, InvalidParameter,
         "When using COPY with more than one source file, the destination must be a directory and end with a /"),
        (["*.txt"], {"destination_is_directory": False, "instruction": "ADD"}, InvalidParameter,
         "When using ADD with more than one source file"),
        (["nope"], {"parents": True}, NotFound, "stat nope: no such file"),
        (["nope/./x"], {"parents": True}, NotFound, "no such file"),
        (["../x"], {"parents": True}, InvalidParameter, "Forbidden path"),
        (["src/./../../x"], {"parents": True}, InvalidParameter, "Forbidden path"),
        (["*/./nope", "nope"], {"parents": True}, NotFound, "stat nope: no such file"),
        (["a.txt/./x"], {"parents": True}, InvalidParameter, "a.txt: not a directory"),
    ],
)  # fmt: skip
def test_select_fails(
    sources: list[str], how: dict[str, Any], kind: type[EngineError], words: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=words):
        selecting(tmp_path, sources, **how)


def test_wildcards_may_match_nothing(tmp_path: Path) -> None:
    assert selecting(tmp_path, ["*.go"], may_be_empty=True) == []
    assert selecting(tmp_path, ["src/*.go", "*.md"], may_be_empty=True) == ["=c.md"]
    for source, kind in (("nope/*.go", NotFound), ("a.txt/*", NotFound), ("nope", NotFound)):
        with pytest.raises(kind, match=f"{source[:4]}.*no such file or directory"):
            selecting(tmp_path, [source], may_be_empty=True)
    for how in ({}, {"parents": True}):
        with pytest.raises(InvalidParameter, match=r"syntax error in pattern: .*\[x"):
            selecting(tmp_path, ["c.md", "src/[x"], may_be_empty=True, **how)


def digest_of(tmp_path: Path, nodes: Sequence[Node], sources: Sequence[str] = ("src",), **how: Any) -> str:
    def work(tree: Tree) -> str:
        found = select(tree, sources, destination_is_directory=True, **how)
        return f"{found.kind}:{found.digest}"

    return with_context(tar(nodes), tmp_path, work)


def test_digest(tmp_path: Path) -> None:
    """Names, modes, types, links, attributes and contents count; times, owners and the order of the
    archive do not.
    """
    base = [directory("src"), Node("src/a", b"a"), Node("src/b", b"b"), symlink("src/l", "a")]
    same = [
        [base[0], base[3], base[2], base[1]],
        [directory("src", mode=0o700, mtime=5), *base[1:]],
        [base[0], Node("src/a", b"a", mtime=7, uid=1, gid=2), *base[2:]],
        [base[0], Node("src/a", b"changed later"), *base[1:]],
        [*base, Node("other", b"x")],
    ]
    different = [
        base[:3],
        [*base, Node("src/c")],
        [base[0], Node("src/a", b"A"), *base[2:]],
        [base[0], Node("src/a", b"a", mode=0o755), *base[2:]],
        [base[0], Node("src/A", b"a"), *base[2:]],
        [*base[:3], symlink("src/l", "b")],
        [*base[:3], Node("src/l", b"a")],
        [base[0], Node("src/a", b"a", pax=(("SCHILY.xattr.user.k", "v"),)), *base[2:]],
        [*base, directory("src/d")],
    ]
    first = digest_of(tmp_path, base)
    assert first.startswith("dir:") and len(first) == 68
    assert {digest_of(tmp_path, nodes) for nodes in same} == {first}
    assert len({first, *(digest_of(tmp_path, nodes) for nodes in different)}) == len(different) + 1
    assert digest_of(tmp_path, base, ["src/a"]).startswith("file:")
    assert digest_of(tmp_path, base, ["src/a"]) != digest_of(tmp_path, base, ["src/b"])
    assert digest_of(tmp_path, base, ["src/a", "src"]).startswith("multi:")
    packed = [*base, Node("src.tar", tar(base))]
    assert digest_of(tmp_path, packed, ["src.tar"]) != digest_of(tmp_path, packed, ["src.tar"], unpack=True)


@pytest.fixture
def image(tmp_path: Path) -> Iterator[int]:
    top = tmp_path / "image"
    (top / "usr" / "lib").mkdir(parents=True)
    (top / "etc").mkdir()
    (top / "etc" / "passwd").write_text("root")
    (top / "app").mkdir()
    os.symlink("usr/lib", top / "lib")
    os.symlink("/etc/passwd", top / "app" / "link")
    os.symlink("../../../../etc", top / "app" / "up")
    os.symlink("/not/yet", top / "app" / "dangling")
    os.symlink("loop", top / "loop")
    descriptor = os.open(top, os.O_PATH | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize(
    ("path", "source_is_directory", "expected"),
    [
        ("/app", False, Destination("app", True, ())),
        ("/app/", False, Destination("app", True, ())),
        ("/app/x", False, Destination("app/x", False, ())),
        ("/app/x/", False, Destination("app/x", True, ("app/x",))),
        ("/app/x", True, Destination("app/x", True, ("app/x",))),
        ("/new/a/b", False, Destination("new/a/b", False, ("new", "new/a"))),
        ("/new/a/b/", False, Destination("new/a/b", True, ("new", "new/a", "new/a/b"))),
        ("/new/a/.", False, Destination("new/a", True, ("new", "new/a"))),
        ("/", False, Destination("", True, ())),
        ("//app//../etc/./x", False, Destination("etc/x", False, ())),
        ("/../..", False, Destination("", True, ())),
        ("/lib/x", False, Destination("usr/lib/x", False, ())),
        ("/lib", False, Destination("usr/lib", True, ())),
        ("/app/link", False, Destination("etc/passwd", False, ())),
        ("/app/up/x", False, Destination("etc/x", False, ())),
        ("/app/dangling", False, Destination("not/yet", False, ("not",))),
        ("/app/dangling/", False, Destination("not/yet", True, ("not", "not/yet"))),
        ("/etc/passwd", False, Destination("etc/passwd", False, ())),
    ],
)
def test_destination(image: int, path: str, source_is_directory: bool, expected: Destination) -> None:
    assert destination(image, path, directory=source_is_directory) == expected


def test_destination_in_an_empty_root() -> None:
    assert destination(-1, "/a/b") == Destination("a/b", False, ("a",))
    assert destination(-1, "/a/../b/") == Destination("b", True, ("b",))
    assert destination(-1, "/") == Destination("", True, ())


@pytest.mark.parametrize(
    ("path", "source_is_directory", "words"),
    [
        ("/etc/passwd/", False, "cannot copy to non-directory: /etc/passwd"),
        ("/etc/passwd", True, "cannot copy to non-directory: /etc/passwd"),
        ("/etc/passwd/x", False, "mkdir /etc/passwd: not a directory"),
        ("/loop/x", False, "too many levels of symbolic links"),
        ("/a/.wh.b", False, "reserved for layers"),
        ("/.wh..wh..opq", False, "reserved for layers"),
        ("/a\0b", False, "path contains a NUL"),
    ],
)
def test_destination_fails(image: int, path: str, source_is_directory: bool, words: str) -> None:
    with pytest.raises(InvalidParameter, match=words):
        destination(image, path, directory=source_is_directory)


Listing = dict[str, tuple[Any, ...]]


def copied(
    tmp_path: Path,
    nodes: Sequence[Node],
    sources: Sequence[str],
    path: str,
    root: int = -1,
    *,
    selected: dict[str, Any] | None = None,
    **how: Any,
) -> Listing:
    """The tree of the layer that a COPY makes."""

    def work(tree: Context) -> Listing:
        selection = select(tree, sources, destination_is_directory=path.endswith("/"), **(selected or {}))
        diff, extraction = laid_out(tmp_path / "layer", selection, path, root, **how)
        files = [entry for entry in snapshot(diff).values() if stat.S_ISREG(int(entry[0], 8))]
        assert extraction.size >= sum({entry[5]: entry[4][0] for entry in files}.values())
        found = snapshot(diff)
        shutil.rmtree(tmp_path / "layer")
        return found

    return with_context(tar(nodes), tmp_path, work)


def test_a_layer(tmp_path: Path) -> None:
    """Owner 0:0, modes and times kept, parents 0755."""
    found = copied(tmp_path, NODES, ["src"], "/opt/app/")
    assert sorted(found) == sorted([".", "opt", "opt/app", *(f"opt/app/{path}" for path in SRC)])
    assert found["opt"][:4] == found["opt/app"][:4] == ("0o40755", 0, 0, NOW)
    assert found["opt/app/one.py"][:3] == ("0o100644", 0, 0) and found["opt/app/one.py"][4][0] == 1
    assert found["opt/app/link"][4] == "sub/three.py" and found["opt/app/sub"][3] == EPOCH * 10**9


@pytest.mark.parametrize(
    ("sources", "path", "expected"),
    [
        (["a.txt"], "/x", ["x"]),
        (["a.txt"], "/x/", ["x", "x/a.txt"]),
        (["to_a"], "/x/", ["x", "x/to_a"]),
        (["to_a"], "/x", ["x"]),
        (["a.txt", "src/sub"], "/x/", ["x", "x/a.txt", "x/three.py", "x/three.txt"]),
        (["a.txt"], "/", ["a.txt"]),
        (["empty"], "/x", ["x"]),
        (["src/sub"], "/x", ["x", "x/three.py", "x/three.txt"]),
    ],
)
def test_places(sources: list[str], path: str, expected: list[str], tmp_path: Path) -> None:
    found = copied(tmp_path, NODES, sources, path)
    assert sorted(found) == sorted([".", *expected])
    if sources[0] == "to_a":
        assert found[expected[-1]][4] == copied(tmp_path, NODES, ["a.txt"], "/x")["x"][4]


def test_places_in_an_image(image: int, tmp_path: Path) -> None:
    assert sorted(copied(tmp_path, NODES, ["a.txt"], "/lib", image)) == [".", "usr", "usr/lib", "usr/lib/a.txt"]
    assert sorted(copied(tmp_path, NODES, ["a.txt"], "/app/link", image)) == [".", "etc", "etc/passwd"]
    assert sorted(copied(tmp_path, NODES, ["a.txt"], "/app/up/x", image)) == [".", "etc", "etc/x"]


@pytest.mark.parametrize(
    ("nodes", "path", "words"),
    [
        ([Node("lib/x")], "/", "cannot copy to non-directory: /lib"),
        ([Node("etc/passwd/x")], "/", "cannot copy to non-directory: /etc/passwd"),
        ([Node("usr/lib")], "/", "cannot replace to directory /usr/lib with file"),
        ([symlink("lib", "x")], "/usr/", "cannot replace to directory /usr/lib with file"),
        ([Node("new/lib/x"), Node("app/new/up/x"), Node("etc/passwd"), symlink("app/link", "x")], "/", ""),
        ([Node("lib/x")], "/usr/", ""),
    ],
)
def test_kinds_that_are_kept(image: int, nodes: list[Node], path: str, words: str, tmp_path: Path) -> None:
    everything = copied(tmp_path, nodes, ["."], path, image)
    if words:
        with pytest.raises(InvalidParameter, match=f"^{words}$"):
            copied(tmp_path, nodes, ["."], path, image, keeps_kinds=True)
    else:
        assert copied(tmp_path, nodes, ["."], path, image, keeps_kinds=True).keys() == everything.keys()


def test_owner_mode_and_epoch(tmp_path: Path) -> None:
    nodes = [Node("a", mode=0o4755, uid=9, mtime=5), directory("d"), Node("d/b", b"b"), symlink("d/l", "b")]
    found = copied(tmp_path, nodes, ["."], "/n/", owner=(1000, 1001), chmod="640", epoch=EPOCH - 10)
    assert {entry[1:3] for path, entry in found.items() if path != "."} == {(1000, 1001)}
    assert [found[path][0] for path in ("n", "n/a", "n/d", "n/d/b", "n/d/l")] == [
        "0o40640",
        "0o100640",
        "0o40640",
        "0o100640",
        "0o120777",
    ]
    late = (EPOCH - 10) * 10**9
    assert [found[path][3] for path in ("n", "n/a", "n/d", "n/d/b")] == [late, 5 * 10**9, late, late]
    single = copied(tmp_path, nodes, ["a"], "/n/m/", chmod="640")
    assert [single[path][0] for path in ("n", "n/m", "n/m/a")] == ["0o40640", "0o40640", "0o100640"]
    symbolic = copied(tmp_path, nodes, ["a"], "/n/b", chmod="u=r")
    assert [symbolic[path][0] for path in ("n", "n/b")] == ["0o40755", "0o100455"]
    assert copied(tmp_path, nodes, ["a"], "/a")["a"][:2] == ("0o104755", 0)


def test_the_time_of_a_directory_goes_with_its_content(image: int, tmp_path: Path) -> None:
    nodes = [directory("d", mtime=5), directory("d/s", mtime=6), Node("d/s/f", mtime=7)]
    os.chmod(f"/proc/self/fd/{image}/app", 0o711)
    for times in (True, False):
        new = copied(tmp_path, nodes, ["d"], "/n/m/", image, keeps_times=times)
        assert [new[path][3] for path in ("n", "n/m", "n/m/s")] == [NOW, 5 * 10**9 if times else NOW, 6 * 10**9]
        last = copied(tmp_path, nodes, ["d", "d/s/f"], "/n/m/", image, keeps_times=times)
        assert last["n/m"][3] == NOW, "the file changes the directory"
        old = copied(tmp_path, nodes, ["d"], "/app", image, keeps_times=times)
        assert (old["app"][0] == "0o40711" and old["app"][3] == 5 * 10**9) is times
        assert copied(tmp_path, nodes, ["d/s/f"], "/app/", image, keeps_times=times)["app"][3] != 5 * 10**9


def test_the_owner_of_members_of_archives(tmp_path: Path) -> None:
    nodes = [Node("a.tar", tar([directory("d"), Node("d/x", uid=3, gid=4)])), Node("f")]
    for members, owner in ((True, (7, 8)), (False, (3, 4))):
        how = {"owner": (7, 8), "owns_members": members, "selected": {"unpack": True}}
        for sources in (["a.tar"], ["a.tar", "f"]):
            found = copied(tmp_path, nodes, sources, "/x/", **how)
            assert found["x/d/x"][1:3] == owner
            assert found["x"][1:3] == ((7, 8) if members else (0, 0))
        assert copied(tmp_path, nodes, ["f", "a.tar"], "/x/", **how)["x"][1:3] == (7, 8)


MERGED = [Node("a.tar", tar([Node("x")])), Node("b.tar", tar([Node("y")])), Node("c", b"cc"), Node("e", b"e"),
          directory("d"), Node("d/z")]  # fmt: skip


@pytest.mark.parametrize(
    ("sources", "path", "expected"),
    [
        (["c", "e"], "/new", {"new": 1}),
        (["e", "c"], "/new", {"new": 2}),
        (["[ce]"], "/file", {"file": 1}),
        (["c", "e"], "/app", {"app": 0, "app/c": 2, "app/e": 1}),
        (["d", "c"], "/new", {"new": 0, "new/z": 0, "new/c": 2}),
        (["c", "d"], "/app", {"app": 0, "app/z": 0, "app/c": 2}),
        (["*.tar"], "/new", {"new": 0, "new/x": 0, "new/y": 0}),
        (["a.tar", "c"], "/new", {"new": 0, "new/x": 0, "new/c": 2}),
        (["c", "d"], "/new", "cannot copy to non-directory: /new"),
        (["c", "a.tar"], "/file", "cannot copy to non-directory: /file"),
    ],
)
def test_sources_that_are_merged(
    tmp_path: Path, image: int, sources: list[str], path: str, expected: dict[str, int] | str
) -> None:
    """Sizes of the files of the layer; 0 for directories and the empty files."""
    how = {"unpack": True, "merges": True}
    with pytest.raises(InvalidParameter, match="the destination must be a directory"):
        copied(tmp_path, MERGED, sources, path, image, selected={**how, "merges": False})
    if isinstance(expected, str):
        with pytest.raises(InvalidParameter, match=expected):
            copied(tmp_path, MERGED, sources, path, image, selected=how)
        return
    found = copied(tmp_path, MERGED, sources, path, image, selected=how)
    shown = {name: entry[4][0] if stat.S_ISREG(int(entry[0], 8)) else 0 for name, entry in found.items()}
    assert {**shown, "app": 0} == {".": 0, "app": 0, **expected}


@pytest.mark.parametrize(
    ("sources", "chmod", "mode"),
    [
        (["a.tar", "c"], "700", 0o755),
        (["c", "a.tar"], "700", 0o700),
        (["d"], "2750", 0o750),
        (["d"], "0001777", 0o755),
        (["d"], "go=", 0o755),
        (["c", "d"], "600", 0o600),
    ],
)
def test_the_mode_of_new_directories(tmp_path: Path, sources: list[str], chmod: str, mode: int) -> None:
    """An octal mode is theirs as mkdir(2) applies it, unless an archive is unpacked first."""
    found = copied(tmp_path, MERGED, sources, "/n/m/", chmod=chmod, selected={"unpack": True})
    assert found["n"][0] == found["n/m"][0] == oct(stat.S_IFDIR | mode)


@pytest.mark.parametrize(
    ("chmod", "mode", "directory", "expected"),
    [
        ("755", 0o600, False, 0o755),
        ("0", 0o600, False, 0),
        ("4711", 0o600, False, 0o4711),
        ("07777", 0o600, True, 0o7777),
        ("u=rwX,go=rX", 0o600, True, 0o755),
        ("u=rwX,go=rX", 0o600, False, 0o644),
        ("u=rwX,go=rX", 0o700, False, 0o755),
        ("+x", 0o640, False, 0o751),
        ("a-w", 0o666, False, 0o444),
        ("go=", 0o777, False, 0o700),
        ("g=u", 0o740, False, 0o770),
        ("o=g-w", 0o770, False, 0o775),
        ("u+s,+t", 0o755, False, 0o5755),
        ("ug+s", 0o755, False, 0o6755),
        ("u=r", 0o4755, False, 0o455),
        ("g=x", 0o2755, True, 0o2715),
    ],
)
def test_chmod(chmod: str, mode: int, directory: bool, expected: int) -> None:
    assert copying._mode_change(chmod)(mode, directory) == expected


@pytest.mark.parametrize("chmod", ["x", "888", "10000", "-1", "u", "u=q", "=,", "u+", "0755 ", "rwx", "u~x"])
def test_no_mode(chmod: str) -> None:
    if chmod in ("u+",):
        copying.check_mode(chmod)  # changes nothing, as in chmod(1)
        return
    with pytest.raises(InvalidParameter, match="invalid chmod parameter: '"):
        copying.check_mode(chmod)


def test_hard_links_stay_links(tmp_path: Path) -> None:
    found = copied(tmp_path, [Node("d/a", b"1" * 99), hard_link("d/b", "d/a"), hard_link("c", "d/a")], ["."], "/x/")
    assert found["x/d/b"][5] == found["x/d/a"][5] == "x/c"


@pytest.mark.parametrize("sources", [["a", "b", "l"], ["?"], ["a", "[bl]"]])
def test_each_source_is_a_file_of_its_own(sources: list[str], tmp_path: Path) -> None:
    """Also a link to another source: a change of one copy is none of the other."""
    nodes = [Node("a", b"1"), hard_link("b", "a"), symlink("l", "a")]
    found = copied(tmp_path, nodes, sources, "/x/")
    assert [(found[f"x/{name}"][4][0], found[f"x/{name}"][5]) for name in "abl"] == [(1, "x/a"), (1, "x/b"), (1, "x/l")]


def test_a_hard_link_does_not_lead_to_a_member_of_an_archive(tmp_path: Path) -> None:
    nodes = [Node("b", b"own"), hard_link("c", "b"), Node("a.tar", tar([Node("b", b"of the archive")]))]
    found = copied(tmp_path, nodes, ["b", "a.tar", "c"], "/x/", selected={"unpack": True})
    assert (found["x/b"][4][0], found["x/c"][4][0]) == (len(b"of the archive"), len(b"own"))


def test_devices_and_fifos(tmp_path: Path) -> None:
    nodes = [
        Node("d/null", type=tarfile.CHRTYPE, device=(1, 3), mode=0o640),
        hard_link("d/same", "d/null"),
        Node("d/disk", type=tarfile.BLKTYPE, device=(7, 300), mode=0o600),
        Node("d/pipe", type=tarfile.FIFOTYPE, mode=0o604),
    ]
    found = copied(tmp_path, nodes, ["d"], "/x/", chmod="0644", owner=(5, 6))
    assert {name: (entry[0], entry[4]) for name, entry in found.items() if name.startswith("x/")} == {
        "x/null": ("0o20644", (1, 3)),
        "x/same": ("0o20644", (1, 3)),
        "x/disk": ("0o60644", (7, 300)),
        "x/pipe": ("0o10644", None),
    }
    assert all(found[name][1:3] == (5, 6) for name in ("x/null", "x/disk", "x/pipe"))


def test_later_sources_replace_earlier_ones(tmp_path: Path) -> None:
    nodes = [Node("a/x", b"old"), Node("a/y"), Node("b/x", b"newer"), directory("b", mode=0o711)]
    found = copied(tmp_path, nodes, ["a", "b"], "/d/")
    assert found["d/x"][4][0] == 5 and "d/y" in found


def test_thousands_of_directories_are_replaced(tmp_path: Path) -> None:
    """In time that grows with their number, not with its square."""
    count = 20_000
    nodes = [Node(f"one/{number}/below/x") for number in range(count)]
    nodes += [Node(f"two/{number}", b"2") for number in range(count)]

    def work(found: Context) -> list[tuple[str, str]]:
        selection = select(found, ["one", "two"], destination_is_directory=True)
        return [(path, entry.kind) for _, path, entry in copying._merged(selection.pieces)]

    assert with_context(tar(nodes), tmp_path, work) == [(str(number), "0") for number in sorted(map(str, range(count)))]


def test_sparse_files_stay_sparse(tmp_path: Path) -> None:
    file = tmp_path / "sparse"
    with file.open("wb") as out:
        out.seek(5 << 20)
        out.write(b"end")
        out.truncate(40 << 20)
    archive = tmp_path / "s.tar"
    subprocess.run(["tar", "-S", "-C", tmp_path, "-cf", archive, "sparse"], check=True)
    before = snapshot(tmp_path)["sparse"]

    def work(tree: Context) -> None:
        selection = select(tree, ["sparse"], destination_is_directory=False)
        diff, _ = laid_out(tmp_path / "layer", selection, "/s")
        assert snapshot(diff)["s"][4] == before[4]
        assert (diff / "s").stat().st_blocks * 512 < 1 << 20

    with_context(archive.read_bytes(), tmp_path, work)


def test_from_a_directory(tmp_path: Path) -> None:
    """COPY --from: links, devices, attributes and file names of a stage, with root as owner."""
    top = tmp_path / "stage"
    (top / "d" / "deep").mkdir(parents=True)
    (top / "d" / "a").write_bytes(os.urandom(700_000))
    os.chmod(top / "d" / "a", 0o4711)
    os.chown(top / "d", 5, 6)
    os.link(top / "d" / "a", top / "d" / "deep" / "same")
    os.symlink("/d/a", top / "d" / "link")
    os.mknod(top / "d" / "null", 0o20666, os.makedev(1, 3))
    os.mkfifo(top / "d" / "pipe")
    os.setxattr(top / "d" / "deep", "user.k", b"v\0w")
    (top / "d" / ("n" * 200 + "é")).write_text("long name")
    (top / "d" / "big").write_bytes(b"")
    os.utime(top / "d" / "a", ns=(0, -1_500_000_000))
    os.utime(top / "d" / "big", ns=(0, 1_234_567_890_123_456_789))
    os.chmod(top / "d" / "null", 0o666)
    root = os.open(top, os.O_PATH | os.O_DIRECTORY)
    try:
        tree = DirectoryTree(root)
        selection = select(tree, ["/d"], destination_is_directory=True)
        diff, _ = laid_out(tmp_path / "layer", selection, "/d")
        expected = {path: (entry[0], 0, 0, *entry[3:]) for path, entry in snapshot(top / "d").items() if path != "."}
        found = {path: entry for path, entry in snapshot(diff / "d").items() if path != "."}
        assert found == expected
        kept = select(tree, ["/d"], owners=True, destination_is_directory=True)
        diff, _ = laid_out(tmp_path / "kept", kept, "/d", owner=None)
        assert {path: entry for path, entry in snapshot(diff / "d").items() if path != "."} == {
            path: entry for path, entry in snapshot(top / "d").items() if path != "."
        }
        os.chown(top / "d" / "pipe", 1, 2)
        again = select(tree, ["/d"], owners=True, destination_is_directory=True)
        assert again.digest != kept.digest != selection.digest
        assert select(tree, ["/d"], destination_is_directory=True).digest == selection.digest
        diff, _ = laid_out(tmp_path / "chown", again, "/d", owner=(3, 4))
        assert {entry[1:3] for path, entry in snapshot(diff / "d").items()} == {(3, 4)}
        with pytest.raises(NotFound, match=r"^stat nope: no such file or directory"):
            select(tree, ["nope"], destination_is_directory=True)
        os.mkdir(top / "e")
        (top / "e" / ".wh.x").write_text("")
        hidden = select(tree, ["e"], destination_is_directory=True)
        with pytest.raises(InvalidParameter, match="reserved for layers"):
            stream_of(hidden, destination(-1, "/e/"))
        (top / "d" / "a").write_bytes(b"shrunk")
        again = stream_of(selection, destination(-1, "/x/"))
        with tarfile.open(fileobj=io.BytesIO(again)) as archive:
            content = archive.extractfile("x/a")
            assert content is not None and content.read() == b"shrunk" + bytes(700_000 - 6)
    finally:
        os.close(root)


def test_here_documents_and_files(tmp_path: Path) -> None:
    def work(tree: Context) -> Listing:
        selection = join(
            [
                select(tree, ["a.txt"], destination_is_directory=True),
                select(MemoryTree({"doc": b"text\n"}), ["doc"], destination_is_directory=True),
            ],
            destination_is_directory=True,
        )
        assert selection.kind == "multi"
        return snapshot(laid_out(tmp_path / "layer", selection, "/x/")[0])

    found = with_context(tar(NODES), tmp_path, work)
    assert found["x/doc"][:2] == ("0o100644", 0) and found["x/doc"][4][0] == 5 and "x/a.txt" in found
    single = select(MemoryTree({"doc": b""}), ["doc"], destination_is_directory=False)
    assert join([single], destination_is_directory=False) is single
    with pytest.raises(InvalidParameter, match="more than one source file"):
        join([single, single], destination_is_directory=False)


INSIDE = [
    directory("./"),
    directory("bin", mode=0o711, uid=3, gid=4),
    Node("bin/tool", b"#!" * 400, mode=0o4755, uid=1, gid=2),
    symlink("bin/sh", "/bin/tool"),
    hard_link("bin/same", "bin/tool"),
    Node("null", type=tarfile.CHRTYPE, device=(1, 3), mode=0o666),
    Node("no/parent/entry", b"x" * 1000),
]


@pytest.mark.parametrize(
    "pack", [bytes, gzip.compress, bz2.compress, lzma.compress, zstandard.ZstdCompressor().compress]
)
@pytest.mark.parametrize("name", ["a.tar", "strange.txt"])
def test_archives_are_unpacked(pack: Callable[[bytes], bytes], name: str, tmp_path: Path) -> None:
    """By their content, whatever they are called, with their own owners."""
    nodes = [Node(name, pack(tar(INSIDE))), Node("plain", b"p")]
    found = copied(tmp_path, nodes, [name, "plain"], "/x/", selected={"unpack": True})
    assert sorted(found) == sorted(
        [".", "x", "x/bin", "x/bin/tool", "x/bin/sh", "x/bin/same", "x/null", "x/no", "x/no/parent",
         "x/no/parent/entry", "x/plain"]
    )  # fmt: skip
    assert found["x/bin"][:3] == ("0o40711", 3, 4) and found["x/bin/tool"][:3] == ("0o104755", 1, 2)
    assert found["x/bin/sh"][4] == "/bin/tool" and found["x/bin/same"][5] == found["x/bin/tool"][5]
    assert found["x/null"][4] == (1, 3) and found["x/no/parent/entry"][4][0] == 1000
    owned = copied(tmp_path, nodes, [name, "plain"], "/x/", selected={"unpack": True}, owner=(7, 8), epoch=1)
    assert owned["x/bin/tool"][:3] == found["x/bin/tool"][:3] and owned["x/plain"][1:3] == (7, 8)
    assert owned["x/bin/tool"][3] == 10**9
    assert sorted(copied(tmp_path, nodes, [name], "/x/")) == [".", "x", f"x/{name}"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"text",
        b"x" * 2000,
        bytes(2000),
        gzip.compress(b"text", mtime=0),
        gzip.compress(lzma.compress(tar(INSIDE)), mtime=0),
        b"\x1f\x8b broken",
        gzip.compress(tar(INSIDE), mtime=0)[:20],
        tar(INSIDE)[:300],
        tar([]),
    ],
)
def test_no_archives_are_copied(content: bytes, tmp_path: Path) -> None:
    found = copied(tmp_path, [Node("a.tar", content)], ["a.tar"], "/x/", selected={"unpack": True})
    assert sorted(found) == [".", "x", "x/a.tar"] and found["x/a.tar"][4][0] == len(content)


@pytest.mark.parametrize(
    ("archive", "words"),
    [
        (tar([Node("../x")]), "leads out of the archive"),
        (tar([Node("a"), Node("b/../../x")]), "leads out of the archive"),
        (tar([Node(".wh.x")]), "reserved for layers"),
        (tar([Node("d/.wh..wh..opq")]), "reserved for layers"),
        (tar([Node("dev", type=tarfile.CHRTYPE)]), "the device 0/0 is reserved"),
        (tar([Node("dev", type=tarfile.CHRTYPE, device=(4096, 0))]), "there is no device 4096/0"),
        (tar([Node("dev", type=tarfile.BLKTYPE, device=(1, 1 << 20))]), "there is no device 1/1048576"),
        (tar([Node("a"), hard_link("b", "../etc/passwd")]), "leads out of the archive"),
        (tar([hard_link("b", "missing")]), "the target of the hard link is not in the layer"),
        (tar([Node("a", b"x" * 5000), Node("b")])[:3000], "unexpected EOF: truncated"),
        (tar([Node("a")])[:1024] + b"garbage" * 100, "damaged archive"),
        (gzip.compress(tar([Node("a", os.urandom(800_000)), Node("b")]))[:-5000], "damaged gzip"),
        (tar([Node(".", b"x")]), "its root is not a directory"),
        (tar([Node("a"), Node("a/b")]), "no directory"),
        (tar([Node("n" * 256)]), "more than 255 bytes"),
    ],
)
def test_broken_archives_fail(archive: bytes, words: str, tmp_path: Path) -> None:
    outside = snapshot(tmp_path)
    with pytest.raises(InvalidParameter, match=words):
        copied(tmp_path, [Node("a.tar", archive)], ["a.tar"], "/x/", selected={"unpack": True})
    shutil.rmtree(tmp_path / "layer")
    assert set(snapshot(tmp_path)) == set(outside)


def test_an_archive_follows_the_image_where_it_has_no_directory(image: int, tmp_path: Path) -> None:
    """`lib/x` without an entry for `lib` goes through the image's link, as with Docker."""
    archive = tar([Node("lib/x", b"1"), Node("lib/y/z"), hard_link("app/h", "lib/x"), Node("app/up/f")])
    found = copied(tmp_path, [Node("a.tar", archive)], ["a.tar"], "/", image, selected={"unpack": True})
    assert sorted(found) == [
        ".", "app", "app/h", "etc", "etc/f", "usr", "usr/lib", "usr/lib/x", "usr/lib/y", "usr/lib/y/z",
    ]  # fmt: skip
    with_entry = tar([directory("lib"), Node("lib/x", b"1")])
    found = copied(tmp_path, [Node("a.tar", with_entry)], ["a.tar"], "/", image, selected={"unpack": True})
    assert sorted(found) == [".", "lib", "lib/x"]


def test_links_of_an_archive_stay_in_the_layer(tmp_path: Path) -> None:
    archive = tar([symlink("up", "../../../.."), Node("up/etc/x")])
    outside = sorted(snapshot(tmp_path))
    found = copied(tmp_path, [Node("a.tar", archive)], ["a.tar"], "/x/", selected={"unpack": True})
    assert sorted(found) == [".", "etc", "etc/x", "x", "x/up"] and sorted(snapshot(tmp_path)) == outside
    archive = tar([symlink("out", str(tmp_path)), Node("out/file")])
    with pytest.raises(InvalidParameter, match="a parent of the entry is no directory"):
        copied(tmp_path, [Node("a.tar", archive)], ["a.tar"], "/x/", selected={"unpack": True})
    shutil.rmtree(tmp_path / "layer")
    assert sorted(snapshot(tmp_path)) == outside


@pytest.mark.parametrize("step", [1, 7, 512, 5000, 1 << 20])
def test_any_split_of_the_stream(step: int, tmp_path: Path) -> None:
    nodes = [*NODES, Node("in.tar", gzip.compress(tar(INSIDE)))]

    def work(tree: Context) -> None:
        selection = select(tree, [".", "in.tar"], unpack=True, destination_is_directory=True)
        place = destination(-1, "/x/")
        whole = stream_of(selection, place, step=1 << 22)
        assert stream_of(selection, place, step=step) == whole
        assert len(whole) % 512 == 0 and whole.endswith(bytes(1024))

    with_context(tar(nodes), tmp_path, work)


class Endless(MemoryTree):
    """A file whose content is more than any disk has, and comes slowly."""

    def __init__(self) -> None:
        super().__init__({"file": b""})
        self.begun = threading.Event()

    def find(self, path: str) -> Entry | None:
        return Entry("file", size=1 << 50) if path else super().find(path)

    def reader(self, entry: Entry) -> Any:
        return self

    def digest(self, entry: Entry) -> bytes:
        return b""

    def readinto(self, buffer: memoryview) -> int:
        self.begun.set()
        return min(len(buffer), 4096)

    def close(self) -> None:
        pass


def test_a_cancelled_copy_ends(tmp_path: Path) -> None:
    """Not when its file has ended: a client that leaves ends the build at once."""
    tree = Endless()
    selection = select(tree, ["file"], destination_is_directory=True)
    tmp_path.joinpath("diff").mkdir()

    def work() -> None:
        lay_out(Ingest(1, tmp_path / "diff"), Stream(selection, destination(-1, "/"), -1, now=NOW))

    async def run() -> None:
        snapshots: Any = None
        copying = asyncio.ensure_future(Layers(snapshots).work(work))
        await asyncio.to_thread(tree.begun.wait)
        copying.cancel()
        await asyncio.wait([copying])
        assert copying.cancelled()

    with none_left_open():
        asyncio.run(run())


def test_closing_early(tmp_path: Path) -> None:
    nodes = [Node("in.tar", gzip.compress(tar([Node("big", b"x" * 3_000_000)])))]

    def work(tree: Context) -> None:
        stream = Stream(
            select(tree, ["in.tar"], unpack=True, destination_is_directory=True), destination(-1, "/x/"), -1, now=NOW
        )
        buffer = memoryview(bytearray(10_000))
        assert stream.readinto(buffer) == 10_000
        stream.close()
        assert stream.readinto(buffer) == 0
        stream.close()

    with_context(tar(nodes), tmp_path, work)


def test_thousands_of_files(tmp_path: Path) -> None:
    nodes = [Node(f"d{number % 7}/f{number}", b"%d" % number) for number in range(3000)]
    found = copied(tmp_path, nodes, ["."], "/x/")
    assert len(found) == 3000 + 7 + 2


# --- against a model ------------------------------------------------------------------------------

NAMES = st.sampled_from(["a", "b", "ab", "a/a", "a/b", "b/a", "a/a/b", "c/ab"])
TARGETS = st.sampled_from(["a", "b", "../b", "/a", "/a/b", "a/.."])
ENTRIES = st.one_of(
    st.builds(Node, NAMES, st.binary(max_size=9), mode=st.sampled_from([0o644, 0o755])),
    st.builds(directory, NAMES, st.sampled_from([0o755, 0o700])),
    st.builds(symlink, NAMES, TARGETS),
)
SOURCES = st.sampled_from(["a", "b", ".", "a/a", "*", "a*", "*/b", "a/?", "c/../a", "./b/", "[ab]", "nope"])


def model(top: Path, sources: Sequence[str], target: Path, *, slash: bool) -> None:
    """COPY as Docker's builder does it with the files on the disk: `top` is the context, `target`
    the destination, which does not exist.
    """

    def real(path: str) -> Path:
        done: list[str] = []
        waiting = path.split("/")
        links = 0
        while waiting:
            name = waiting.pop(0)
            if name in ("", "."):
                continue
            if name == "..":
                if not (top / "/".join(done)).is_dir():
                    raise FileNotFoundError(path)
                done = done[:-1]
                continue
            at = top / "/".join([*done, name])
            if at.is_symlink():
                links += 1
                if links > 255:
                    raise RecursionError(path)
                link = os.readlink(at)
                done = [] if link.startswith("/") else done
                waiting = link.split("/") + waiting
                continue
            done.append(name)
            if not os.path.lexists(at):
                raise FileNotFoundError(path)
        return top / "/".join(done)

    infos: list[tuple[str, Path]] = []
    for written in sources:
        path = os.path.normpath("/" + written)[1:]
        if any(character in path for character in "*?["):
            parts = path.split("/")
            literal = next(at for at, part in enumerate(parts) if any(character in part for character in "*?["))
            try:  # BuildKit follows links before the first wildcard
                base = real("/".join(parts[:literal]))
            except FileNotFoundError:
                continue
            found = [os.path.relpath(os.path.join(above, name), base) for above, dirs, names in os.walk(base)
                     for name in dirs + names]  # fmt: skip
            for each in sorted(found, key=lambda name: name.split("/")):
                names, wanted = each.split("/"), parts[literal:]
                if len(names) == len(wanted) and all(map(fnmatch.fnmatchcase, names, wanted)):
                    match = os.path.relpath(base / each, top)
                    infos.append((match, real(match)))
        else:
            infos.append((path, real(path)))
    if not infos:
        raise LookupError("no sources")
    if len(infos) > 1 and not slash and not (len(sources) == 1 and all(info[1].is_dir() for info in infos)):
        raise ValueError("several")
    if slash:
        target.mkdir()
    for path, source in infos:
        if source.is_dir():
            target.mkdir(exist_ok=True)
            for name in sorted(os.listdir(source)):
                put(source / name, target / name)
        else:
            put(source, target / os.path.basename(path) if slash else target)


def put(source: Path, target: Path) -> None:
    """A file, link or directory. It replaces what is there, unless both are directories."""
    kept = source.is_dir() and not source.is_symlink()
    if os.path.lexists(target):
        if target.is_symlink() or not target.is_dir():
            target.unlink()
        elif not kept:
            shutil.rmtree(target)
    if not kept:
        shutil.copy2(source, target, follow_symlinks=False)
        return
    target.mkdir(exist_ok=True)
    for name in sorted(os.listdir(source)):
        put(source / name, target / name)
    shutil.copystat(source, target)


def described(top: Path) -> Listing:
    """As `snapshot`, without times and links between files."""
    return {path: (*entry[:3], entry[4]) for path, entry in snapshot(top).items() if path != "."}


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(nodes=st.lists(ENTRIES, max_size=7), sources=st.lists(SOURCES, min_size=1, max_size=2), slash=st.booleans())
def test_copy_as_a_model(nodes: list[Node], sources: list[str], slash: bool, tmp_path: Path) -> None:
    """Any small context: the same files are copied, or both refuse."""
    shutil.rmtree(tmp_path)
    context_directory, expected = tmp_path / "context", tmp_path / "expected"
    context_directory.mkdir(parents=True)
    expected.mkdir()

    def work(tree: Context) -> None:
        for path, entry in tree.walk(""):
            at = context_directory / path
            if entry.kind == "5":
                at.mkdir()
            elif entry.kind == "2":
                os.symlink(entry.target, at)
            else:
                at.write_bytes(tree.read(path, 99))
        for path, entry in tree.walk(""):
            if entry.kind != "2":
                os.chmod(context_directory / path, entry.mode)
        refused: Exception | None = None
        try:
            model(context_directory, sources, expected / "x", slash=slash)
        except (OSError, LookupError, ValueError, RecursionError, shutil.Error) as error:
            refused = error
        try:
            selection = select(tree, sources, destination_is_directory=slash)
            diff, _ = laid_out(tmp_path / "layer", selection, "/x/" if slash else "/x")
        except EngineError as error:
            assert refused is not None, error.message
            return
        assert refused is None, refused
        assert described(diff) == described(expected)

    try:
        with_context(tar(nodes), tmp_path, work, links_out=True)
    except InvalidParameter:
        return


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.builds(
            Node,
            st.text("ab/é.", min_size=1, max_size=300).filter(
                lambda name: name.strip("/.") and ".." not in name and name[-1] != "/"
            ),
            st.binary(max_size=600),
            mode=st.integers(0, 0o7777),
            uid=st.integers(0, 2**32 - 2),
            mtime=st.integers(-(2**33), 2**34),
        ),
        max_size=5,
    )
)
def test_headers_can_be_read(nodes: list[Node]) -> None:
    """What the stream says of an entry is what Python's tarfile reads there."""
    assembly = copying.Assembly()
    for node in nodes:
        assembly.entry(
            node.name.encode(), "0", node.mode, node.uid, 2**32 - 2, int(node.mtime) * 10**9 + 5, len(node.data)
        )
        assembly.data(node.data)
    assembly.zeros(1024)
    out = bytearray(1 << 16)
    size = assembly.readinto(out)
    assert assembly.readinto(bytearray(10)) == 0
    with tarfile.open(fileobj=io.BytesIO(bytes(out[:size]))) as archive:
        for node, info in zip(nodes, archive.getmembers(), strict=True):
            content = archive.extractfile(info)
            assert content is not None and content.read() == node.data
            assert (info.name, info.mode, info.uid, info.gid) == (node.name, node.mode, node.uid, 2**32 - 2)
    members = Members(io.BytesIO(bytes(out[:size])))
    read = members.take(100)
    assert [member[8] for member in read] == [int(node.mtime) * 10**9 + 5 for node in nodes]
