"""Upper directories made layers where they lie: what is removed, and that the tar-split data gives
the exact stream again.

Needs root, for whiteouts, owners and trusted attributes.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import socket
import stat
import tarfile
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine._fast import layer, pack
from engine.errors import InvalidParameter, ServerError
from engine.images import sealing, tarsplit
from engine.images.importing import EMPTY_LAYER
from engine.images.layers import Layers
from engine.images.sealing import Sealed
from engine.storage.snapshots import Ingest
from tests.support import PATIENCE
from tests.support.fakes.snapshots import Disk, FakeSnapshots
from tests.support.images.trees import snapshot

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


class Overlay:
    """An upper directory and one layer below it."""

    def __init__(self, base: Path) -> None:
        self.upper = base / "1" / "diff"
        self.lower = base / "2" / "diff"
        for path in (self.upper, self.lower):
            path.mkdir(parents=True)

    def below(self, *paths: str) -> None:
        """Directories of the lower layer, with a mode and an old time."""
        for path in paths:
            (self.lower / path).mkdir(mode=0o750)
            os.chown(self.lower / path, 3, 4)
        for path in ("", *paths):
            os.utime(self.lower / path, ns=(10**18, 10**18))

    def copied_up(self, *paths: str) -> None:
        """Those directories in the upper directory, as overlayfs copies them."""
        for path in paths:
            (self.upper / path).mkdir()
            os.chown(self.upper / path, 3, 4)
            (self.upper / path).chmod(0o750)
            os.setxattr(self.upper / path, "trusted.overlay.origin", b"a handle")

    def seal(self, *, stubs: Sequence[str] = (), drop: Sequence[str] = ()) -> Sealed:
        sealed = sealing.seal(Ingest(1, self.upper, tuple(stubs)), [self.lower], drop, threading.Event())
        assert f"sha256:{hashlib.sha256(regenerated(self.upper)).hexdigest()}" == sealed.diff_id
        return sealed

    def left(self) -> set[str]:
        return {str(path.relative_to(self.upper)) for path in self.upper.rglob("*")}


def regenerated(diff: Path) -> bytes:
    found = b""
    buffer = bytearray(50_000)
    with tarsplit.stream(diff) as stream:
        while got := tarsplit.read(stream, memoryview(buffer)):
            found += buffer[:got]
    assert len(found) == tarsplit.stream_size(diff)
    return found


def entries(root: Path) -> dict[str, tuple[object, ...]]:
    """All entries below the root; those of whiteouts without their times."""
    found = snapshot(root)
    del found["."]
    return {name: each if each[4] != (0, 0) else (each[0], each[4]) for name, each in found.items()}


@pytest.fixture
def overlay(tmp_path: Path) -> Overlay:
    return Overlay(tmp_path)


def test_nothing_is_the_empty_layer(overlay: Overlay) -> None:
    """The root looks like the one below, as that of a copy of the layer."""
    overlay.lower.chmod(0o711)
    overlay.below("etc")
    assert overlay.seal() == Sealed(EMPTY_LAYER, 0)
    status = overlay.upper.stat()
    assert (status.st_mode & 0o777, status.st_mtime_ns) == (0o711, 10**18)


def test_the_stream_is_that_of_a_commit(overlay: Overlay, tmp_path: Path) -> None:
    top = overlay.upper
    (top / "d" / ("n" * 200)).mkdir(parents=True)
    (top / "d" / "file").write_bytes(os.urandom(300_000))
    os.link(top / "d" / "file", top / "hard")
    os.symlink("t" * 300, top / "soft")
    os.mkfifo(top / "pipe")
    os.mknod(top / "gone", stat.S_IFCHR, 0)
    os.setxattr(top / "d", "trusted.overlay.opaque", b"y")
    os.setxattr(top / "d" / "file", "user.name", b"value")
    with open(top / "holes", "wb") as file:
        file.truncate(10_000_000)
        file.seek(5_000_000)
        file.write(b"x")
    directory = os.open(top, os.O_PATH)
    packer = pack.Packer(directory, b"", top=False, fine=True, layer=True)
    os.close(directory)
    expected = b"".join(iter(lambda: packer.read(1 << 20), b""))
    sealed = overlay.seal()
    assert sealed.diff_id == f"sha256:{hashlib.sha256(expected).hexdigest()}"
    assert sealed.size == 300_000 + 10_000_000 + 300, "each file once, and the target of the link"
    assert regenerated(top) == expected
    with tarfile.open(fileobj=io.BytesIO(expected)) as archive:
        names = set(archive.getnames())
    assert {"d", "d/.wh..wh..opq", ".wh.gone", "d/file", "hard", "pipe", "soft", "holes"} <= names
    copy = tmp_path / "copy"
    copy.mkdir()
    directory = os.open(copy, os.O_RDONLY)
    layer.apply(io.BytesIO(expected), directory)
    os.close(directory)
    assert entries(copy) == entries(top)


def test_mount_points_go_with_directories_that_were_copied_up_for_them(overlay: Overlay) -> None:
    overlay.below("etc", "a", "a/b")
    overlay.copied_up("etc", "a", "a/b")
    (overlay.upper / "etc/hosts").touch()
    (overlay.upper / "a/b/c/d").mkdir(parents=True)
    sealed = overlay.seal(stubs=["etc/hosts", "a/b/c", "a/b/c/d"])
    assert sealed.diff_id == EMPTY_LAYER and overlay.left() == set()


def test_mount_points_that_were_used_stay(overlay: Overlay) -> None:
    overlay.below("etc", "var")
    overlay.copied_up("etc", "var")
    (overlay.upper / "etc/hosts").write_text("used")
    (overlay.upper / "cache/pip").mkdir(parents=True)
    (overlay.upper / "cache/other").touch()
    (overlay.upper / "var/mount").mkdir()
    (overlay.upper / "var").chmod(0o700)
    overlay.seal(stubs=["etc/hosts", "cache", "cache/pip", "var/mount", "never/made", "etc/hosts/below"])
    assert overlay.left() == {"etc", "etc/hosts", "cache", "cache/other", "var"}
    assert (overlay.upper / "var").stat().st_mtime_ns == 10**18, "its mode was changed, its entries were not"


def test_a_directory_that_is_not_as_below_stays(overlay: Overlay) -> None:
    overlay.below("opaque", "attributes", "owner")
    overlay.copied_up("opaque", "attributes", "owner", "new")
    os.setxattr(overlay.upper / "opaque", "trusted.overlay.opaque", b"y")
    os.setxattr(overlay.upper / "attributes", "user.name", b"value")
    os.chown(overlay.upper / "owner", 5, 5)
    stubs = []
    for path in ("opaque", "attributes", "owner", "new"):
        (overlay.upper / path / "stub").touch()
        stubs.append(f"{path}/stub")
    overlay.seal(stubs=stubs)
    assert overlay.left() == {"opaque", "attributes", "owner", "new"}


def test_changes_below_volumes_are_dropped(overlay: Overlay) -> None:
    """What is in the image stays in it; a new directory stays, empty; other changes are kept."""
    overlay.below("data", "data/old", "var", "var/lib", "home")
    overlay.copied_up("data", "data/old", "var", "var/lib")
    for path in ("data/old/x", "data/y", "var/lib/z", "kept"):
        (overlay.upper / path).write_text("x")
    (overlay.upper / "new/deep").mkdir(parents=True, mode=0o777)
    (overlay.upper / "new/deep/file").touch()
    os.chown(overlay.upper / "new/deep", 7, 7)
    os.mknod(overlay.upper / "home", stat.S_IFCHR, 0)
    sealed = overlay.seal(drop=["/data", "/var/lib/", "/new/deep", "/home", "/none", "/kept/below", "/"])
    assert overlay.left() == {"kept", "new", "new/deep"} and sealed.size == 1
    deep = (overlay.upper / "new/deep").stat()
    assert (deep.st_mode & 0o7777, deep.st_uid, deep.st_gid) == (0o755, 0, 0)


@pytest.mark.parametrize("link", ["/outside", "../../../outside", "here"])
def test_a_volume_behind_a_link_is_left_alone(overlay: Overlay, tmp_path: Path, link: str) -> None:
    outside = tmp_path / "outside"
    for path in (outside / "victim", overlay.upper / "here" / "victim"):
        path.mkdir(parents=True)
        (path / "file").touch()
    os.symlink(str(outside) if link == "/outside" else link, overlay.upper / "link")
    overlay.seal(drop=["/link/victim"], stubs=["link/victim/file"])
    assert (outside / "victim/file").exists() and (overlay.upper / "here/victim/file").exists()
    overlay2 = overlay.upper / "link"
    assert overlay2.is_symlink()


def test_a_volume_that_became_a_link_is_dropped_itself(overlay: Overlay, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/file").touch()
    os.symlink(tmp_path / "outside", overlay.upper / "data")
    assert overlay.seal(drop=["/data"]).diff_id == EMPTY_LAYER
    assert (tmp_path / "outside/file").exists()


def test_volumes_that_cannot_be_there(overlay: Overlay) -> None:
    """An image may declare any text as a volume."""
    (overlay.upper / "x").mkdir()
    (overlay.upper / "x/file").touch()
    overlay.seal(drop=["", "/", "/" + "n" * 300, "/a/" * 3000, "/nul\0", "/x/file/y", "../../x"])
    assert overlay.left() == {"x"}


def test_long_paths(overlay: Overlay) -> None:
    """A file whose path the kernel does not take at once is in the tar-split data itself."""
    directory = os.open(overlay.upper, os.O_RDONLY)
    for _ in range(25):
        os.mkdir("n" * 200, dir_fd=directory)
        below = os.open("n" * 200, os.O_RDONLY, dir_fd=directory)
        os.close(directory)
        directory = below
    file = os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=directory)
    os.write(file, b"content" * 30_000)
    os.close(file)
    os.close(directory)
    data = regenerated_after(overlay)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        last = archive.getmembers()[-1]
        content = archive.extractfile(last)
        assert content is not None and content.read() == b"content" * 30_000 and len(last.name) > 5000


def regenerated_after(overlay: Overlay) -> bytes:
    overlay.seal()
    return regenerated(overlay.upper)


def test_sockets_are_removed(overlay: Overlay, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's stream has none. The directory's time stays that of its entry."""
    (overlay.upper / "d").mkdir()
    monkeypatch.chdir(overlay.upper / "d")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("agent")
    (overlay.upper / "d" / "file").touch()
    os.utime(overlay.upper / "d", ns=(10**18, 10**18))
    overlay.seal()
    assert overlay.left() == {"d", "d/file"} and (overlay.upper / "d").stat().st_mtime_ns == 10**18


def test_a_seal_is_cancelled(overlay: Overlay) -> None:
    (overlay.upper / "file").write_bytes(bytes(1_000_000))
    stop = threading.Event()
    stop.set()
    with pytest.raises(ServerError, match="was cancelled"):
        sealing.seal(Ingest(1, overlay.upper), [overlay.lower], (), stop)


def test_a_cancelled_or_failed_seal_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancellation stops the thread, and waits for it."""
    entered = threading.Event()

    def wait(
        ingest: Ingest, below: Sequence[Path], drop: Sequence[str], stop: threading.Event, _: Sequence[bytes]
    ) -> Sealed:
        entered.set()
        assert stop.wait(10 * PATIENCE) and ingest.path.exists()
        raise ServerError("cancelled")

    async def story() -> None:
        snapshots = FakeSnapshots(Disk(tmp_path))
        layers = Layers(snapshots)
        with pytest.raises(ServerError, match="layer none is missing"):
            await layers.seal(await snapshots.ingest(), "none")
        assert os.listdir(tmp_path / "layers") == []
        ingest = await snapshots.ingest()
        (ingest.path / "file").touch()
        assert (await layers.seal(ingest, "")).size == 0
        await snapshots.abandon(ingest)
        monkeypatch.setattr(sealing, "seal", wait)
        task = asyncio.create_task(layers.seal(await snapshots.ingest(), ""))
        await asyncio.to_thread(entered.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert os.listdir(tmp_path / "layers") == []

    asyncio.run(story())


def test_names_that_mean_deletions_are_refused(overlay: Overlay) -> None:
    (overlay.upper / "d" / ".wh.file").mkdir(parents=True)
    with pytest.raises(InvalidParameter, match=r"^/d/\.wh\.file: a name that begins with \.wh\. stands for"):
        overlay.seal()


def test_a_failure_names_the_directory(overlay: Overlay, monkeypatch: pytest.MonkeyPatch) -> None:
    (overlay.upper.parent / tarsplit.FILE).mkdir()
    with pytest.raises(ServerError, match=r"making a layer of the changes in .*/1/diff"):
        overlay.seal()


NAMES = st.binary(min_size=1, max_size=120).filter(
    lambda name: b"/" not in name and b"\0" not in name and name not in (b".", b"..") and not name.startswith(b".wh.")
)
KINDS = st.sampled_from(["directory", "file", "link", "hard", "whiteout", "opaque", "holes"])
TREES = st.lists(st.tuples(KINDS, NAMES, st.integers(0, 2**32), st.binary(max_size=3000)), max_size=25)


@given(TREES)
@settings(max_examples=60, deadline=None)
def test_any_tree_is_regenerated(tree: list[tuple[str, bytes, int, bytes]]) -> None:
    """Each entry is made in one of the directories so far, chosen by its number."""
    with tempfile.TemporaryDirectory() as base:
        overlay = Overlay(Path(base))
        directories = [os.fsencode(overlay.upper)]
        regular: list[bytes] = []
        for kind, name, number, data in tree:
            path = directories[number % len(directories)] + b"/" + name
            if os.path.lexists(path) or len(path) > 4000:
                continue
            if kind in ("directory", "opaque"):
                os.mkdir(path)
                os.chmod(path, number & 0o7777)
                directories.append(path)
                if kind == "opaque":
                    os.setxattr(path, "trusted.overlay.opaque", b"y")
            elif kind == "link":
                os.symlink(data[:500].replace(b"\0", b"") or b"x", path)
            elif kind == "whiteout":
                os.mknod(path, stat.S_IFCHR, 0)
            elif kind == "hard" and regular:
                os.link(regular[number % len(regular)], path)
            else:
                with open(path, "wb") as file:
                    file.write(data)
                    if kind == "holes":
                        file.seek(number % 100_000 + 8192, os.SEEK_CUR)
                        file.write(data)
                        file.truncate(file.tell() + number % 10_000)
                os.chown(path, number % 3_000_000, number % 7)
                os.utime(path, ns=(0, number * 1_000_003 - 2**40))
                regular.append(path)
        overlay.seal()
        before = entries(overlay.upper)
        copy = Path(base) / "copy"
        copy.mkdir()
        directory = os.open(copy, os.O_RDONLY)
        layer.apply(io.BytesIO(regenerated(overlay.upper)), directory)
        os.close(directory)
        assert entries(copy) == before
