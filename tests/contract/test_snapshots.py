"""The suite of the snapshotter protocol (engine/storage/snapshots.py), run on overlayfs and on the
fake of the unit tests.

The overlay needs root: it mounts.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from engine.errors import Conflict, NotFound, ServerError
from engine.storage import overlay
from engine.storage.overlay import OverlaySnapshots
from engine.storage.records import Records
from engine.storage.snapshots import Layer, Snapshots, Usage
from engine.system import detached_mounts, mounts
from tests.support import PATIENCE
from tests.support.fakes.snapshots import Disk, FakeSnapshots

Work = Callable[[Snapshots], Awaitable[None]]
Run = Callable[[Work], None]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


class Overlay:
    """The state that outlives a snapshotter: ROOT, and the namespace of its mounts, which the
    monitor keeps.
    """

    def __init__(self, root: Path, marks: Sequence[str] = ()) -> None:
        self.root = root
        self.marks = marks
        self.namespace = -1

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Snapshots]:
        records = Records(self.root / "state.db")
        snapshots = OverlaySnapshots(self.root, records, self.marks)
        try:
            await snapshots.resume(self.namespace)
            if self.namespace >= 0:
                os.close(self.namespace)
            self.namespace = os.dup(snapshots.mount_namespace.descriptor)
            yield snapshots
        finally:
            records.close()

    def close(self) -> None:
        os.close(self.namespace)
        assert mounts.mounts(self.root) == [], "nothing may be mounted on the host"


class Fake:
    def __init__(self, root: Path) -> None:
        self.disk = Disk(root)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Snapshots]:
        snapshots = FakeSnapshots(self.disk)
        await snapshots.resume(-1)
        yield snapshots

    def close(self) -> None:
        assert not self.disk.mounted


def _runner(opened: Callable[[], AbstractAsyncContextManager[Snapshots]]) -> Run:
    """Runs a coroutine on a new snapshotter over the same state, each time as after a crash of
    the daemon.
    """

    def runner(work: Work) -> None:
        async def main() -> None:
            async with opened() as snapshots:
                await work(snapshots)

        asyncio.run(main())

    return runner


@pytest.fixture(params=[pytest.param(Overlay, marks=needs_root), Fake], ids=["overlay", "fake"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Run]:
    kept = request.param(tmp_path)
    yield _runner(kept.opened)
    kept.close()


@pytest.fixture
def run_overlay(tmp_path: Path) -> Iterator[Run]:
    """For tests of features that the fake lacks: attributes of directories, namespaces."""
    kept = Overlay(tmp_path)
    yield _runner(kept.opened)
    kept.close()


async def add(snapshots: Snapshots, chain_id: str, parent: str = "", **contents: str) -> None:
    ingest = await snapshots.ingest()
    for name, text in contents.items():
        (ingest.path / name).write_text(text)
    await snapshots.commit_layer(ingest, chain_id, Layer(0, f"diff of {chain_id}", parent, 7))


@asynccontextmanager
async def mounted(snapshots: Snapshots, key: str = "k") -> AsyncIterator[Path]:
    """The snapshot, mounted as for a run, at a path of this process."""
    await snapshots.mount(key)
    try:
        yield Path(snapshots.mounted(key))
    finally:
        await snapshots.unmount(key)


def test_write_remount_remove(run: Run, tmp_path: Path) -> None:
    async def make(snapshots: Snapshots) -> None:
        await add(snapshots, "low", a="low", b="low")
        await add(snapshots, "high", "low", b="high")
        assert (snapshots.layer("high") or Layer(0, "")).size == 7 and snapshots.layer("none") is None
        snapshots.retain("high")
        await snapshots.prepare("k", "high")
        async with mounted(snapshots) as where:
            assert ((where / "a").read_text(), (where / "b").read_text()) == ("low", "high")
            (where / "b").unlink()
            (where / "c").write_text("mine")
        await snapshots.unmount("k")
        with pytest.raises(NotFound):
            snapshots.mounted("k")

    async def again(snapshots: Snapshots) -> None:
        snapshots.retain("high")
        async with mounted(snapshots) as where:
            assert sorted(os.listdir(where)) == ["a", "c"]
            assert await snapshots.usage("k") == Usage(4, 2)
            assert await snapshots.sizes(["k", "unknown"]) == {"k": 4}
            assert (snapshots.upper("k") / "c").read_text() == "mine"
        await snapshots.remove("k")
        await snapshots.remove("k")
        with pytest.raises(NotFound):
            await snapshots.mount("k")
        with pytest.raises(NotFound):
            snapshots.upper("k")
        assert await snapshots.release("high") == ["high", "low"]

    run(make)
    run(again)
    assert os.listdir(tmp_path / "layers") == []


def test_on_nothing(run: Run, tmp_path: Path) -> None:
    async def work(snapshots: Snapshots) -> None:
        await snapshots.prepare("k", None)
        assert snapshots.parent("k") == ""
        async with mounted(snapshots) as where:
            (where / "x").write_text("x")
        assert os.listdir(snapshots.upper("k")) == ["x"]
        await snapshots.remove("k")

    run(work)


def test_refusals_leave_nothing(run: Run, tmp_path: Path) -> None:
    async def work(snapshots: Snapshots) -> None:
        with pytest.raises(NotFound):
            await snapshots.prepare("k", "none")
        await snapshots.prepare("k", None)
        with pytest.raises(Conflict):
            await snapshots.prepare("k", None)
        await snapshots.remove("k")
        with pytest.raises(NotFound):
            await add(snapshots, "orphan", "none")
        snapshots.retain("one")
        await add(snapshots, "one")
        with pytest.raises(Conflict):
            await add(snapshots, "one")
        ingest = await snapshots.ingest()
        await snapshots.abandon(ingest)
        assert len(os.listdir(tmp_path / "layers")) == 1

    run(work)


def test_layers_live_as_long_as_somebody_uses_them(run: Run, tmp_path: Path) -> None:
    async def work(snapshots: Snapshots) -> None:
        for chain_id, parent in (("a", ""), ("ab", "a"), ("abc", "ab"), ("abd", "ab")):
            snapshots.retain(chain_id)
            await add(snapshots, chain_id, parent)
        for chain_id in ("a", "ab", "abd"):
            assert await snapshots.release(chain_id) == (["abd"] if chain_id == "abd" else [])
        await snapshots.prepare("k", "abc")
        assert await snapshots.release("abc") == [], "a container stands on it"
        assert snapshots.layer("a") is not None and snapshots.parent("k") == "abc"
        await snapshots.remove("k")
        assert snapshots.parent("k") is None
        assert snapshots.layer("abc") is None and snapshots.layer("a") is None

    run(work)
    assert os.listdir(tmp_path / "layers") == []


def test_128_layers(run: Run, tmp_path: Path) -> None:
    async def work(snapshots: Snapshots) -> None:
        below = ""
        for at in range(128):
            await add(snapshots, f"chain{at}", below, **{f"f{at}": str(at)})
            below = f"chain{at}"
        await snapshots.prepare("k", below)
        async with mounted(snapshots) as where:
            assert len(os.listdir(where)) == 128

    run(work)


@needs_root
def test_the_root_looks_like_the_topmost_layers(run: Run, tmp_path: Path) -> None:
    async def work(snapshots: Snapshots) -> None:
        ingest = await snapshots.ingest()
        os.chown(ingest.path, 5, 6)
        ingest.path.chmod(0o1711)
        await snapshots.commit_layer(ingest, "a", Layer(0, "a"))
        await snapshots.prepare("k", "a")
        status = snapshots.upper("k").stat()
        assert (status.st_mode & 0o7777, status.st_uid, status.st_gid) == (0o1711, 5, 6)

    run(work)


@needs_root
def test_directories_without_an_entry_look_like_those_below(run_overlay: Run, tmp_path: Path) -> None:
    async def work(snapshots: Snapshots) -> None:
        low = await snapshots.ingest()
        for name in ("kept", "hidden", "kept/deep"):
            (low.path / name).mkdir()
            os.chown(low.path / name, 7, 8)
            (low.path / name).chmod(0o700)
            os.setxattr(low.path / name, "trusted.look", b"x")
        os.utime(low.path / "kept", ns=(10**18, 10**18))
        await snapshots.commit_layer(low, "low", Layer(0, "low"))
        mid = await snapshots.ingest()
        os.mknod(mid.path / "hidden", 0o020000, 0)
        await snapshots.commit_layer(mid, "mid", Layer(0, "mid", "low"))
        top = await snapshots.ingest()
        for name in ("kept", "hidden", "kept/deep", "new"):
            (top.path / name).mkdir()
        await snapshots.commit_layer(
            top, "top", Layer(0, "top", "mid"), [b"", b"kept", b"kept/deep", b"hidden", b"new"]
        )
        looks = {name: (top.path / name).stat() for name in ("kept", "kept/deep", "hidden", "new")}
        assert {name: (look.st_mode & 0o777, look.st_uid) for name, look in looks.items()} == {
            "kept": (0o700, 7),
            "kept/deep": (0o700, 7),
            "hidden": (0o755, 0),
            "new": (0o755, 0),
        }
        assert looks["kept"].st_mtime_ns == 10**18 and os.getxattr(top.path / "kept", "trusted.look") == b"x"

    run_overlay(work)


def in_namespace(namespace: int, *command: str) -> list[str]:
    """The output of a program in that mount namespace."""
    entered = ["nsenter", f"--mount=/proc/self/fd/{namespace}", "--", *command]
    done = subprocess.run(entered, pass_fds=[namespace], capture_output=True, text=True, check=True)
    return done.stdout.split()


@needs_root
def test_shown_to_one(run_overlay: Run, tmp_path: Path) -> None:
    """In a namespace for one program the snapshot is mounted at a path of the host. The host does
    not see the mount.
    """
    place = tmp_path / "place"

    async def work(snapshots: Snapshots) -> None:
        for _ in range(2):
            detached_mounts.make_private(place)
        await snapshots.prepare("k", None)
        with pytest.raises(NotFound):
            await snapshots.shown("k", place).__aenter__()
        await snapshots.mount("k")
        async with snapshots.shown("k", place) as namespace:
            (Path(snapshots.mounted("k")) / "file").touch()
            assert in_namespace(namespace, "ls", str(place)) == ["file"]
            assert os.listdir(place) == ["root"], "for the current directory of runc"
        await snapshots.unmount("k")

    try:
        run_overlay(work)
    finally:
        mounts.unmount(place)


def test_a_cancelled_mount_leaves_nothing(run: Run, tmp_path: Path) -> None:
    """The mount is cancelled at each point. Afterwards the snapshot can be mounted, unmounted and
    removed as usual.
    """

    def unmounted(snapshots: Snapshots) -> bool:
        try:
            snapshots.mounted("k")
        except NotFound:
            return True
        return False

    async def work(snapshots: Snapshots) -> None:
        await snapshots.prepare("k", None)
        for turns in range(8):
            mounting = asyncio.ensure_future(snapshots.mount("k"))
            for _ in range(turns):
                await asyncio.sleep(0)
            mounting.cancel()
            await asyncio.wait([mounting])
            if mounting.cancelled():
                assert unmounted(snapshots), turns
            else:
                await snapshots.unmount("k")
        async with mounted(snapshots) as where:
            (where / "file").touch()
        await snapshots.remove("k")

    run(work)
    assert os.listdir(tmp_path / "layers") == []


@pytest.mark.parametrize("full", [False, True], ids=["cancelled", "full disk"])
def test_directories_that_could_not_be_made_leave_nothing(
    run_overlay: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    """A caller is cancelled while a thread makes its directories, or the disk is full."""
    going, go_on, make = threading.Event(), threading.Event(), overlay._make

    def slow(path: Path, model: Path | None = None) -> None:
        make(path, model)
        going.set()
        go_on.wait(10 * PATIENCE)
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    async def work(snapshots: Snapshots) -> None:
        monkeypatch.setattr(overlay, "_make", slow)
        for call in (lambda: snapshots.prepare("k", None), snapshots.ingest):
            going.clear()
            go_on.clear()
            making = asyncio.ensure_future(call())
            await asyncio.to_thread(going.wait, 10)
            if not full:
                making.cancel()
            await asyncio.sleep(0)
            go_on.set()
            with pytest.raises(
                ServerError if full else asyncio.CancelledError, match="no space left" if full else None
            ):
                await making
            assert os.listdir(tmp_path / "layers") == []

    run_overlay(work)


def test_many_users_of_one_snapshot(run: Run, tmp_path: Path) -> None:
    """Calls that read a snapshot while its container runs, and afterwards, all see the same
    root.
    """

    async def work(snapshots: Snapshots) -> None:
        await snapshots.prepare("k", None)
        async with snapshots.opened("k") as first, snapshots.opened("k") as second:
            assert first == second
            await snapshots.mount("k")
            await snapshots.unmount("k")
            assert (await snapshots.usage("k")).entries == 0
        await snapshots.unmount("k")
        assert snapshots.snapshot_data("k")["UpperDir"] == str(snapshots.upper("k"))
        assert snapshots.lower("k") == []
        await snapshots.remove("k")

    run(work)


def test_sweep(run: Run, tmp_path: Path) -> None:
    """Leftovers of a crash are removed: mounts, directories without a record, records without a
    directory, keys and layers that the caller does not name.
    """

    async def crash(snapshots: Snapshots) -> None:
        await add(snapshots, "used")
        await add(snapshots, "lost")
        await add(snapshots, "on lost", "lost")
        await add(snapshots, "unnamed")
        await add(snapshots, "stood on")
        for key, parent in (("live", "used"), ("stale", "used"), ("other", "stood on")):
            await snapshots.prepare(key, parent)
        for key in ("live", "stale"):
            await snapshots.mount(key)
        await snapshots.ingest()
        (tmp_path / "layers" / "999").mkdir()
        lost = snapshots.layer("lost")
        assert lost is not None
        (tmp_path / "layers" / str(lost.number) / "diff").rmdir()
        (tmp_path / "layers" / str(lost.number)).rmdir()

    async def restart(snapshots: Snapshots) -> None:
        assert snapshots.layer("lost") is None and snapshots.layer("on lost") is None
        await snapshots.sweep({"live", "other"}, {"used"})
        assert os.listdir(snapshots.mounted("live")) == [], "a run that goes on keeps its mount"
        for key in ("stale", "other"):
            with pytest.raises(NotFound):
                snapshots.mounted(key)
        assert snapshots.layer("used") and snapshots.layer("stood on") and not snapshots.layer("unnamed")
        with pytest.raises(NotFound):
            snapshots.upper("stale")
        assert len(os.listdir(tmp_path / "layers")) == 4
        ingest = await snapshots.ingest()
        assert ingest.number > 999, "numbers are not used again"
        await snapshots.abandon(ingest)
        await snapshots.unmount("live")

    run(crash)
    run(restart)
    run(restart_is_quiet)


async def restart_is_quiet(snapshots: Snapshots) -> None:
    await snapshots.sweep({"live", "other"}, {"used"})
    assert snapshots.layer("used") and snapshots.layer("stood on")


def test_many_at_once(run: Run, tmp_path: Path) -> None:
    async def one(snapshots: Snapshots, key: str) -> None:
        await snapshots.prepare(key, "base")
        async with mounted(snapshots, key) as where:
            (where / "own").write_text(key)
        await snapshots.remove(key)

    async def work(snapshots: Snapshots) -> None:
        snapshots.retain("base")
        await add(snapshots, "base", a="x")
        await asyncio.gather(*(one(snapshots, f"k{at}") for at in range(30)))
        assert len(os.listdir(tmp_path / "layers")) == 1

    run(work)


def test_changes_are_taken_where_they_lie(run: Run, tmp_path: Path) -> None:
    """A taken snapshot becomes a layer without a copy. The next one stands on it."""

    async def work(snapshots: Snapshots) -> None:
        snapshots.retain("base")
        snapshots.retain("more")
        await add(snapshots, "base", a="base", b="base")
        await snapshots.prepare("k", "base", transient=True)
        async with mounted(snapshots) as where:
            (where / "a").write_text("changed")
            (where / "b").unlink()
            (where / "c").write_text("new")
            inode = (where / "c").stat().st_ino
        upper = snapshots.upper("k")
        ingest = await snapshots.take("k")
        assert ingest.path == upper and sorted(os.listdir(upper)) == ["a", "b", "c"]
        assert os.listdir(upper.parent) == ["diff"]
        assert isinstance(snapshots, FakeSnapshots) or (upper / "c").stat().st_ino == inode
        for gone in (snapshots.take, snapshots.mount, snapshots.keep):
            with pytest.raises(NotFound):
                await gone("k")
        await snapshots.remove("k")
        await snapshots.commit_layer(ingest, "more", Layer(0, "more", "base", 3))
        await snapshots.prepare("k", "more", transient=True)
        async with mounted(snapshots) as where:
            assert {name: (where / name).read_text() for name in os.listdir(where)} == {"a": "changed", "c": "new"}
        await snapshots.remove("k")
        await snapshots.release("base")
        assert await snapshots.release("more") == ["more", "base"]

    run(work)
    assert os.listdir(tmp_path / "layers") == []


@needs_root
@pytest.mark.parametrize("parent", [None, "base"])
def test_a_transient_snapshot_may_lack_the_marks(tmp_path: Path, parent: str | None) -> None:
    async def work(snapshots: Snapshots) -> None:
        await add(snapshots, "base", file="text")
        for key, marked in (("marked", True), ("bare", False)):
            await snapshots.prepare(key, parent, transient=True, marked=marked)
            async with mounted(snapshots, key) as where:
                (where / "new").touch()
                below = [*(["file"] if parent else []), *([".mark"] if marked else [])]
                assert sorted(os.listdir(where)) == sorted(["new", *below])
        ingest = await snapshots.take("bare")
        assert os.listdir(ingest.path) == ["new"]
        await snapshots.abandon(ingest)
        await snapshots.remove("marked")

    kept = Overlay(tmp_path, [".mark"])
    _runner(kept.opened)(work)
    kept.close()


def test_an_ordinary_snapshot_is_taken_too(run: Run, tmp_path: Path) -> None:
    async def work(snapshots: Snapshots) -> None:
        await snapshots.prepare("k", None)
        async with mounted(snapshots) as where:
            (where / "file").touch()
        ingest = await snapshots.take("k")
        assert os.listdir(ingest.path) == ["file"]
        await snapshots.abandon(ingest)

    async def again(snapshots: Snapshots) -> None:
        with pytest.raises(NotFound):
            snapshots.upper("k")

    run(work)
    run(again)
    assert os.listdir(tmp_path / "layers") == []


def test_what_is_in_use_is_neither_taken_nor_kept(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(snapshots: Snapshots) -> None:
        await snapshots.prepare("k", None, transient=True)
        await snapshots.mount("k")
        for call in (snapshots.take, snapshots.keep):
            with pytest.raises(Conflict):
                await call("k")
        await snapshots.unmount("k")
        async with snapshots.opened("k"):
            taking = asyncio.ensure_future(snapshots.take("k"))
            for _ in range(20):
                await asyncio.sleep(0)
            assert not taking.done(), "a call accesses it"
        await snapshots.abandon(await taking)

    run(work)
    assert os.listdir(tmp_path / "layers") == []


def test_a_call_that_does_not_end(run_overlay: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlay, "PATIENCE", 0.01)

    async def work(snapshots: Snapshots) -> None:
        await snapshots.prepare("k", None, transient=True)
        async with snapshots.opened("k"):
            with pytest.raises(Conflict, match="in use by 1 archive call"):
                await snapshots.take("k")
        await snapshots.remove("k")

    run_overlay(work)


def test_a_cancelled_take_leaves_nothing(run: Run, tmp_path: Path) -> None:
    """Cancelled at each point, the snapshot is either still there or gone with its directory."""

    async def work(snapshots: Snapshots) -> None:
        for turns in range(12):
            await snapshots.prepare("k", None, transient=True)
            async with mounted(snapshots) as where:
                (where / "file").touch()
            taking = asyncio.ensure_future(snapshots.take("k"))
            for _ in range(turns):
                await asyncio.sleep(0)
            taking.cancel()
            await asyncio.wait([taking])
            if not taking.cancelled():
                await snapshots.abandon(taking.result())
            await snapshots.remove("k")
            assert os.listdir(tmp_path / "layers") == [], turns

    run(work)


def test_transient_snapshots_do_not_outlive_the_daemon(run: Run, tmp_path: Path) -> None:
    """One that was kept does, and can be mounted again as can a transient one."""

    async def work(snapshots: Snapshots) -> None:
        for key in ("lost", "mounted", "kept"):
            await snapshots.prepare(key, None, transient=True)
            for text in ("once", "twice"):
                async with mounted(snapshots, key) as where:
                    (where / "file").write_text(text)
        await snapshots.keep("kept")
        await snapshots.keep("kept")
        await snapshots.mount("mounted")

    async def again(snapshots: Snapshots) -> None:
        await snapshots.sweep({"kept"}, set())
        for key in ("lost", "mounted"):
            with pytest.raises(NotFound):
                await snapshots.mount(key)
        async with mounted(snapshots, "kept") as where:
            assert (where / "file").read_text() == "twice"
        assert len(os.listdir(tmp_path / "layers")) == 1
        await snapshots.remove("kept")

    run(work)
    run(again)
    assert os.listdir(tmp_path / "layers") == []


@needs_root
def test_a_transient_snapshot_is_volatile_until_it_is_kept(run_overlay: Run, tmp_path: Path) -> None:
    """It stands on layers here, because a snapshot on nothing is no overlay."""

    def options() -> str:
        lines = Path("/proc/thread-self/mountinfo").read_text().splitlines()
        return "".join(line for line in lines if line.split()[4] == "/roots/k")

    async def work(snapshots: Snapshots) -> None:
        snapshots.retain("base")
        await add(snapshots, "base", a="base")
        await snapshots.prepare("k", "base", transient=True)
        for kept in (False, True):
            if kept:
                await snapshots.keep("k")
            for _ in range(2):
                async with mounted(snapshots):
                    shown = await snapshots.mount_namespace.run(options)
                    assert ("volatile" in shown) is not kept
        await snapshots.remove("k")
        await snapshots.release("base")

    run_overlay(work)


@needs_root
@pytest.mark.parametrize("layers", [0, 1, 2])
def test_content_from_which_directories_are_mounted(run_overlay: Run, tmp_path: Path, layers: int) -> None:
    async def work(snapshots: Snapshots) -> None:
        chain = ""
        for name in ("one", "two")[:layers]:
            ingest = await snapshots.ingest()
            (ingest.path / "d").mkdir()
            (ingest.path / "d" / name).touch()
            await snapshots.commit_layer(ingest, name, Layer(0, name, chain))
            chain = name
        async with snapshots.content(chain) as content:
            assert os.fstatvfs(content).f_flag & os.ST_RDONLY
            below = os.open("d" if layers else ".", os.O_PATH, dir_fd=content)
            try:
                tree = await snapshots.mount_namespace.run(lambda: detached_mounts.clone(below))
                found = os.open(".", os.O_RDONLY, dir_fd=tree)
                assert sorted(os.listdir(found)) == ["one", "two"][:layers]
                os.close(found)
                os.close(tree)
            finally:
                os.close(below)

    run_overlay(work)


@needs_root
@pytest.mark.parametrize("layers", [1, 2])
def test_a_cancelled_look_at_content_leaves_no_descriptor(run_overlay: Run, layers: int) -> None:
    async def work(snapshots: Snapshots) -> None:
        for name, parent in (("one", ""), ("two", "one"))[:layers]:
            await add(snapshots, name, parent, file=name)
        os.close(await snapshots.open_content(name))
        gc.collect()  # frees leftovers of earlier tests
        before = len(os.listdir("/proc/self/fd"))
        for turns in range(12):
            opening = asyncio.ensure_future(snapshots.open_content(name))
            for _ in range(turns):
                await asyncio.sleep(0)
            opening.cancel()
            await asyncio.wait([opening])
            if not opening.cancelled():
                os.close(opening.result())
        await snapshots.mount_namespace.run(lambda: None)
        assert len(os.listdir("/proc/self/fd")) == before

    run_overlay(work)
