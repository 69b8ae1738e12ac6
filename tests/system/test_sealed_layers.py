"""Layers made of an overlay's changes where they lie: after any changes the merged tree is the one
that the container saw, and a copy of the layer by its tar stream, as save and load make it, shows
the same.

Not here: what sealing removes (tests/unit/images/test_sealing.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.images import tarsplit
from engine.images.layers import Layers, extract_and_hash
from engine.storage.overlay import OverlaySnapshots
from engine.storage.records import Records
from engine.storage.snapshots import Layer
from tests.support.images.trees import snapshot

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

NAMES = ("a", "b", "c", "n" * 200, "\udcff\n")
PATHS = ["/".join(names) for names in [(a,) for a in NAMES] + [(a, b) for a in NAMES for b in NAMES[:3]]]
PATHS += [f"a/{b}/{c}" for b in NAMES[:3] for c in NAMES[:2]]

Change = Callable[[Path, Path, int], None]


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def write(path: Path, _: Path, number: int) -> None:
    path.write_bytes(bytes([number]) * number * 40)


def sparse(path: Path, _: Path, number: int) -> None:
    with open(path, "r+b" if path.exists() else "wb") as file:
        file.seek(number << 16)
        file.write(b"x" * number)
        file.truncate((number + 3) << 16)


def replaced_by_directory(path: Path, _: Path, number: int) -> None:
    """An opaque one, if there was one below."""
    remove(path)
    path.mkdir()
    if number % 2:
        (path / "b").write_bytes(b"new")


def attribute(path: Path, _: Path, number: int) -> None:
    name = ("user.one", "trusted.two", "security.capability")[number % 3]
    value = b"\1\0\0\2" + bytes(16) if name == "security.capability" else bytes([number, 10, 0])
    if path.is_symlink() or number > 200:
        name, value = "trusted.two", b""
    os.setxattr(path, name, value, follow_symlinks=False)


def listening(path: Path, _: Path, number: int) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        directory = os.open(path.parent, os.O_PATH)
        try:
            one.bind(f"/proc/self/fd/{directory}/{path.name}")
        finally:
            os.close(directory)


CHANGES: dict[str, Change] = {
    "write": write,
    "append": lambda path, _, number: os.truncate(path, path.stat().st_size + number),
    "sparse": sparse,
    "directory": lambda path, _, number: path.mkdir(mode=0o700 | number),
    "remove": lambda path, *_: remove(path),
    "directory instead": replaced_by_directory,
    "rename": lambda path, other, _: os.rename(path, other),
    "link": lambda path, other, _: os.link(path, other, follow_symlinks=False),
    "symbolic link": lambda path, other, number: os.symlink(f"{other.name}{'/x' * number}", path),
    "mode": lambda path, _, number: None if path.is_symlink() else path.chmod(0o6000 >> number % 4 | number),
    "owner": lambda path, _, number: os.lchown(path, number * 100_000, number),
    "times": lambda path, _, number: os.utime(
        path, ns=(number * 10**9, (number - 100) * 10**9 + number), follow_symlinks=False
    ),
    "attribute": attribute,
    "device": lambda path, _, number: os.mknod(path, 0o4640 | stat.S_IFCHR, os.makedev(1, number + 1)),
    "block device": lambda path, _, number: os.mknod(path, 0o600 | stat.S_IFBLK, os.makedev(number, 5)),
    "fifo": lambda path, *_: os.mkfifo(path),
}

changes = st.lists(
    st.tuples(st.sampled_from(sorted(CHANGES)), st.sampled_from(PATHS), st.sampled_from(PATHS), st.integers(1, 255)),
    max_size=40,
)


def change(root: Path, wanted: list[tuple[str, str, str, int]]) -> None:
    for verb, path, other, number in wanted:
        with contextlib.suppress(OSError, ValueError):
            CHANGES[verb](root / path, root / other, number)


def merged(root: Path) -> dict[str, Any]:
    found = snapshot(root)
    del found["."]
    return found


async def compare(
    root: Path, below: list[list[tuple[str, str, str, int]]], above: list[tuple[str, str, str, int]]
) -> None:
    records = Records(root / "state.db")
    snapshots = OverlaySnapshots(root, records)
    layers = Layers(snapshots)
    try:
        await snapshots.resume(-1)
        parent = ""
        for number, wanted in enumerate(below):
            ingest = await snapshots.ingest()
            change(ingest.path, wanted)
            await snapshots.commit_layer(ingest, f"below {number}", Layer(0, "", parent))
            parent = f"below {number}"
        await snapshots.prepare("run", parent, transient=True)
        await snapshots.mount("run")
        change(Path(snapshots.mounted("run")), above)
        expected = merged(Path(snapshots.mounted("run")))
        await snapshots.unmount("run")
        snapshots.retain(parent)
        ingest = await snapshots.take("run")
        sealed = await layers.seal(ingest, parent)
        await snapshots.commit_layer(ingest, "sealed", Layer(0, sealed.diff_id, parent, sealed.size))
        copy = await snapshots.ingest()
        with tarsplit.stream(snapshots.layer_path("sealed")) as stream:
            extraction = extract_and_hash(copy, Source(stream))
        assert extraction.diff_id == sealed.diff_id
        assert extraction.size == sealed.size
        await snapshots.commit_layer(copy, "copy", Layer(0, "", parent), extraction.implied)
        for name in ("sealed", "copy"):
            await snapshots.prepare(name, name, transient=True)
            await snapshots.mount(name)
            assert merged(Path(snapshots.mounted(name))) == expected, name
            await snapshots.unmount(name)
    finally:
        for key in ("run", "sealed", "copy"):
            with contextlib.suppress(Exception):
                await snapshots.unmount(key)
        records.close()


class Source:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def readinto(self, buffer: memoryview) -> int:
        return tarsplit.read(self._stream, buffer)


@settings(max_examples=60)
@given(st.lists(changes, min_size=1, max_size=2), changes)
def test_any_changes(below: list[list[tuple[str, str, str, int]]], above: list[tuple[str, str, str, int]]) -> None:
    with tempfile.TemporaryDirectory() as root:
        asyncio.run(compare(Path(root), below, above))
