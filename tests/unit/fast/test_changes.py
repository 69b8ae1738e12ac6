"""The changes of an upper directory, compared with a plain Python implementation of overlayfs's
rules.

Needs root, for whiteouts and trusted attributes.
"""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine._fast import layer
from tests.support.images.archives import Node, directory, symlink, tar
from tests.unit.fast.test_pack import changes_of, laid_out

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

LOW = [
    directory("d", mode=0o750),
    Node("d/one", b"1"),
    Node("d/two", b"2"),
    directory("e"),
    Node("e/deep/file", b"f"),
    Node("gone", b"g"),
    directory("etc"),
]


def shown(layers: Sequence[Path], path: str) -> Path | None:
    """The content that layers (topmost first) show at a path, by a plain implementation of
    overlayfs's rules."""
    parts = path.split("/")
    visible = list(layers)
    for depth in range(1, len(parts) + 1):
        at = "/".join(parts[:depth])
        found: list[Path] = []
        for each in visible:
            here = each / at
            if not os.path.lexists(here):
                continue
            status = os.lstat(here)
            if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
                break
            if not stat.S_ISDIR(status.st_mode):
                if not found:
                    found.append(each)
                break
            found.append(each)
            if "trusted.overlay.opaque" in os.listxattr(here):
                break
        visible = found
        if not visible or (depth < len(parts) and not stat.S_ISDIR(os.lstat(visible[0] / at).st_mode)):
            return None
    return visible[0] / path


def everything(layers: Sequence[Path]) -> dict[str, Path]:
    names = {
        os.path.relpath(os.path.join(top, name), each)
        for each in layers
        for top, below, files in os.walk(each)
        for name in (*below, *files)
    }
    return {name: where for name in names if (where := shown(layers, name)) is not None}


def expected(upper: Path, lower: Sequence[Path]) -> dict[str, int]:
    before, after = everything(lower), everything([upper, *lower])
    found: dict[str, int] = {}
    for name, where in after.items():
        if name not in before:
            found[name] = 1
        elif where.is_relative_to(upper):
            one, other = os.lstat(where), os.lstat(before[name])
            same = stat.S_ISDIR(one.st_mode) and (one.st_mode, one.st_uid, one.st_gid, one.st_mtime_ns) == (
                *(other.st_mode, other.st_uid, other.st_gid, other.st_mtime_ns),
            )
            if not same or "trusted.overlay.opaque" in os.listxattr(where, follow_symlinks=False):
                found[name] = 0
    for name in before:
        if name not in after and (os.path.dirname(name) in after or "/" not in name):
            parent = os.path.dirname(name)
            if not parent or stat.S_ISDIR(os.lstat(after[parent]).st_mode):
                found[name] = 2
    for name, kind in list(found.items()):
        parent = os.path.dirname(name)
        if kind and parent and parent in before:
            found.setdefault(parent, 0)
    return found


NAMES = [
    "a",
    "b",
    "c",
    "a/b",
    "a/c",
    "a/b/c",
    "b/a",
    "b/a/c",
    ".wh.a",
    "a/.wh.b",
    "b/.wh.a",
    "a/.wh..wh..opq",
    "b/.wh..wh..opq",
    "a/b/.wh..wh..opq",
]


@st.composite
def nodes(draw: st.DrawFn) -> Node:
    name = draw(st.sampled_from(NAMES))
    if ".wh." in name:
        return Node(name)
    kind = draw(st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE]))
    data = b"x" if kind == tarfile.REGTYPE else b""
    return Node(name, data, kind, draw(st.sampled_from([0o755, 0o700])), "a" if kind == tarfile.SYMTYPE else "")


@settings(max_examples=200)
@given(st.lists(st.lists(nodes(), max_size=7), min_size=1, max_size=4))
def test_changes_are_those_of_the_plain_comparison(
    tmp_path_factory: pytest.TempPathFactory, layers: list[list[Node]]
) -> None:
    base = tmp_path_factory.mktemp("changes")
    made: list[Path] = []
    for at, entries in enumerate(layers):
        target = base / str(at)
        target.mkdir()
        descriptor = os.open(target, os.O_RDONLY)
        try:
            layer.apply(io.BytesIO(tar(entries)), descriptor)
        except (ValueError, OSError):
            return  # a parent that is no directory, or a link to itself: no layer
        finally:
            os.close(descriptor)
        for top, _, _ in os.walk(target, topdown=False):
            os.utime(top, ns=(0, 0))  # created as the parent of an entry
        made.append(target)
    found = changes_of(made[0], *made[1:])
    assert [path for path, _ in found] == list(dict.fromkeys(path for path, _ in found))
    assert {path.decode()[1:]: kind for path, kind in found} == expected(made[0], made[1:])
    positions = {path: at for at, (path, _) in enumerate(found)}
    for path, at in positions.items():
        assert positions.get(os.path.dirname(path), -1) < at


def test_changes_of_what_was_removed_and_made_again(tmp_path: Path) -> None:
    low = laid_out(tar(LOW), tmp_path / "low")
    upper = laid_out(
        tar([directory("e"), Node("e/.wh..wh..opq"), Node("e/new", b"n"), symlink("d", "e")]), tmp_path / "up"
    )
    assert changes_of(upper, low) == [(b"/d", 0), (b"/e", 0), (b"/e/deep", 2), (b"/e/new", 1)]
    assert changes_of(low) == [(b"/" + os.fsencode(name), 1) for name in sorted(everything([low]))]
