"""Snapshots on overlayfs: each image layer, and each container's changes, in a numbered directory.

The tree is drawn in records.py. Requires root, and a file system that overlayfs accepts as
upper directory: ext4, xfs with ftype=1 or btrfs, not another overlay.

- Numbers are never reused within the lifetime of ROOT/layers, so a partly removed directory cannot
  be mistaken for a new one.
- Mount options must fit in one page, and Linux 6.1 has no `lowerdir+`. The mounting threads run
  with ROOT/layers as working directory and name a layer `123/diff`: 128 layers need 1.1 KiB with
  three digits, 2.1 KiB with ten.
- One shared layer, ROOT/layers/init, lies between a container's own directory and its image. It
  contains the empty files that the engine adds to every container (`/.dockerenv`). The runtime
  makes mount points and /dev in the container's own upper directory.
- The mount option `volatile` turns the container's fsync(2) into a no-op, and unmounting writes
  nothing back. Only transient snapshots have it. Overlayfs leaves a mark in the work directory,
  and refuses to mount the snapshot again until the mark is removed.
  `redirect_dir=nofollow` and `metacopy=off` override the kernel's defaults, because upper and lower
  directories are also read directly (diff, usage).
- Nothing is mounted on the host. Every start copies the host's mount namespace and walks its
  mounts, every exec reads them, and services with private namespaces receive them. Snapshots are
  mounted in `mount_namespace`, and a start gets a copy of that mount as a descriptor. The mount
  stays while the container runs: archive calls use it, and unmounting the last mount of an overlay
  writes back the upper file system (ovl_sync_fs). Otherwise the container's last process would do
  that before its exit is reported.
- A snapshot has one overlay at a time: two overlays over one upper directory would not see each
  other's changes (overlayfs.rst, "Sharing and copying layers"). Starts and archive calls share it.
- Containers in user namespaces use the same layers. A clone of ROOT/layers that is an ID-mapped
  mount is attached in `mount_namespace`, and their overlays are mounted from there: files keep the
  ids on the disk that they have without user namespaces. Overlayfs makes files with the ids of the
  thread that mounted it, which must have a mapping (`user_namespaces.files_of`). Such an overlay
  keeps its mapping when the engine has another one, or none.
- Removal deletes the record in a transaction first, then the tree. `sweep` removes directories
  without a record.
- A layer's files are written back after the reply. Until syncfs(2) has returned, its record is
  `pending` with this boot's id. After a reboot a pending layer may have holes, so the layer and its
  image are dropped. A power failure within seconds of a load therefore undoes the load.

Owns: ROOT/layers, the records of kinds `layer` and `snapshot`, `mount_namespace` and its threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import os
import secrets
import threading
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import msgspec

from engine._fast import tree
from engine.errors import Conflict, NotFound, ServerError, reason, reason_with_file, words
from engine.storage.lowers import Lowers, inherit
from engine.storage.records import Change, Records
from engine.storage.snapshots import Ingest, Layer, Usage
from engine.system import detached_mounts, files, mounts, threads, user_namespaces
from engine.system.detached_mounts import MountNamespace, NewFile, Tree
from engine.system.tasks import spawn
from engine.system.threads import Threads, uninterrupted
from engine.system.user_namespaces import IdMap

DRIVER_NAME = "overlay2"
"""The name under which clients know this storage driver."""

COUNT_THREADS = 2
"""Threads that compute the sizes of snapshots. A thousand sizes may be requested at once, and must
not take the threads of starts and removals.
"""

LINGER = 1.0
"""Seconds that a snapshot stays mounted after its last user, because one client command is several
requests.
"""

_FIRST = 100_000
"""Upper bound of the random number that begins a new directory's name. ext4 chooses the place on
disk by the name (`files.spread`), so layers of a new engine are not placed among those just
removed.
"""

_ROOTS = "/roots"
"""The directory of `mount_namespace` where snapshots are mounted, by key."""

_MAPPED = "/mapped"
"""The ID-mapped clone of ROOT/layers in `mount_namespace`."""

_WITH_IDS = ".mapped"
"""Ends the name below `_ROOTS` of a snapshot that is mounted with mapped ids."""

_OPTIONS = "index=off,redirect_dir=nofollow,metacopy=off"

_VOLATILE = "work/work/incompat"
"""Overlayfs's mark of a volatile mount (overlayfs.rst, "Volatile mount"), below a snapshot's
directory."""

PATIENCE = 10.0
"""Seconds that `take` and `keep` wait for calls that access the snapshot."""

_log = logging.getLogger(__name__)


class Snapshot(msgspec.Struct, frozen=True, omit_defaults=True):
    """The record of a container's writable snapshot; its key is the container's id."""

    number: int
    parent: str = ""


class _Opened:
    """A mounted snapshot. `users`: calls that access it now. `runs`: a container runs on it.
    `mapped`: with mapped ids. `adopted`: mounted for a container by an earlier daemon, perhaps with
    another map.
    """

    __slots__ = ("adopted", "left", "mapped", "path", "read_only", "root", "runs", "timer", "users")

    def __init__(self, path: str, directory: int, *, adopted: bool = False) -> None:
        """`path`: the mount's path in the namespace, for its threads. `directory`: a descriptor of
        its directory there.
        """
        self.path = path
        self.mapped = path.endswith(_WITH_IDS)
        self.adopted = adopted
        self.root = f"/proc/self/fd/{directory}/{os.path.basename(path)}"
        """Its path for any thread, as long as it is mounted. It has no descriptor of its own: there
        may be thousands."""
        self.read_only = False if adopted else bool(os.statvfs(self.root).f_flag & os.ST_RDONLY)
        """True on a full disk: overlayfs mounts read-only if it cannot create its work directory.
        A container does not run on such a mount."""
        self.users = 0
        self.left = asyncio.Event()
        """Set when a user leaves."""
        self.runs = adopted
        self.timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Unmount it. In a thread of the namespace."""
        detached_mounts.detach(self.path)
        os.rmdir(self.path)


class OverlaySnapshots:
    """The snapshotter of the engine; it implements the `Snapshots` protocol."""

    def __init__(self, root: Path, records: Records, marks: Sequence[str] = (), ids: IdMap | None = None) -> None:
        """`marks`: names of empty files at the root of every snapshot. `ids`: of containers in user
        namespaces. Reads the records; blocking, at start.

        Raises ServerError when a record is corrupt.
        """
        self.root = Path(os.path.abspath(root))
        self._directory = self.root / "layers"
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.spread(self._directory)
        self._init = ["init"] if marks else []
        for name in marks:
            _mark(self._directory / "init", name)
        self._records = records
        self._layer_table = records.table("layer", Layer)
        self._snapshot_table = records.table("snapshot", Snapshot)
        self.boot = _boot_id()
        """The id of this boot of the host."""
        numbers = _numbers(self._directory)
        self._layers = self._whole_layers(numbers)
        self._snapshots = self._snapshot_table.load()
        self._next = 1 + max(
            [
                secrets.randbelow(_FIRST) if not numbers else 0,
                *numbers,
                *(layer.number for layer in self._layers.values()),
                *(s.number for s in self._snapshots.values()),
            ]
        )
        self._retained: Counter[str] = Counter()
        self._children: Counter[str] = Counter(layer.parent for layer in self._layers.values() if layer.parent)
        self._standing: Counter[str] = Counter(s.parent for s in self._snapshots.values() if s.parent)
        self._counting = Threads(COUNT_THREADS)
        self.mount_namespace = MountNamespace(self._directory, _ROOTS)
        self._ids = ids
        self._opened: dict[str, _Opened] = {}
        self._roots_directory = -1
        self._opening = threading.Lock()
        self._transient: dict[str, bool] = {}
        """Keys of snapshots without a record, and whether they have the `marks`."""
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        """Locks by key, held while the snapshot's overlay is mounted or unmounted."""

    def _whole_layers(self, numbers: set[int]) -> dict[str, Layer]:
        """The recorded layers that are complete: their files and their parents exist."""
        recorded = self._layer_table.load()
        whole: dict[str, Layer] = {}
        broken: set[str] = set()
        for chain_id in recorded:
            chain: list[str] = []
            at = chain_id
            while at and at not in whole and at not in broken and at not in chain:
                chain.append(at)
                at = recorded[at].parent if at in recorded else ""
            sound = not at or at in whole
            for name in reversed(chain):
                layer = recorded.get(name)
                sound = sound and layer is not None and layer.number in numbers and layer.pending in ("", self.boot)
                if sound and layer is not None:
                    whole[name] = layer
                else:
                    broken.add(name)
        for name in sorted(broken & recorded.keys()):
            _log.warning("removing layer %s (directory %d): it is incomplete", name, recorded[name].number)
        return whole

    def _path(self, number: int) -> Path:
        return self._directory / str(number)

    def _new_number(self) -> int:
        number = self._next
        self._next += 1
        return number

    # --- layers -----------------------------------------------------------------------------------

    def layer(self, chain_id: str) -> Layer | None:
        return self._layers.get(chain_id)

    def layer_path(self, chain_id: str) -> Path:
        """The directory of a committed layer's content, which must not be changed.

        Raises NotFound.
        """
        layer = self._layers.get(chain_id)
        if layer is None:
            raise NotFound(f"No such layer: {chain_id}")
        return self._path(layer.number) / "diff"

    def layer_paths(self) -> list[Path]:
        """`layer_path` of every layer."""
        return [self._path(layer.number) / "diff" for layer in self._layers.values()]

    def chain(self, chain_id: str) -> list[Layer]:
        """A layer and those below it, topmost first. Raises ServerError when one is missing."""
        found = []
        at = chain_id
        while at:
            layer = self._layers.get(at)
            if layer is None:
                raise ServerError(f"layer {at} is missing")
            found.append(layer)
            at = layer.parent
        return found

    def retain(self, chain_id: str) -> None:
        self._retained[chain_id] += 1

    async def release(self, chain_id: str) -> list[str]:
        _count_down(self._retained, chain_id)
        return await self._collect(chain_id)

    def _used(self, chain_id: str) -> bool:
        return chain_id in self._retained or chain_id in self._children or chain_id in self._standing

    async def _collect(self, chain_id: str) -> list[str]:
        """Remove the layer and those below it, as long as they have no user."""
        gone: dict[str, int] = {}
        while chain_id and not self._used(chain_id) and (layer := self._layers.pop(chain_id, None)):
            gone[chain_id] = layer.number
            if layer.parent:
                _count_down(self._children, layer.parent)
            chain_id = layer.parent
        if gone:
            await self._discard([self._layer_table.delete(name) for name in gone], list(gone.values()))
        return list(gone)

    async def ingest(self) -> Ingest:
        number = self._new_number()
        path = self._path(number) / "diff"
        try:
            await _made(_make, path)
        except BaseException:
            await self._remove_directories([number])
            raise
        return Ingest(number, path)

    async def commit_layer(self, ingest: Ingest, chain_id: str, layer: Layer, implied: Sequence[bytes] = ()) -> None:
        try:
            if layer.parent and layer.parent not in self._layers:
                raise NotFound(f"No such layer: {layer.parent}")
            if chain_id in self._layers:
                raise Conflict(f"layer {chain_id} already exists")
            record = msgspec.structs.replace(layer, number=ingest.number, pending=self.boot)
            # Counted before the next await, so that no other task collects the parent meanwhile.
            if layer.parent:
                self._children[layer.parent] += 1
            self._layers[chain_id] = record
            try:
                if implied and layer.parent:
                    below = [self._path(lower.number) / "diff" for lower in self.chain(layer.parent)]
                    await asyncio.to_thread(_inherit, ingest.path, below, implied)
                await self._records.commit(self._layer_table.put(chain_id, record))
            except BaseException:
                del self._layers[chain_id]
                if layer.parent:
                    _count_down(self._children, layer.parent)
                raise
        except BaseException:
            await self.abandon(ingest)
            raise

    async def abandon(self, ingest: Ingest) -> None:
        await self._remove_directories([ingest.number])

    async def settle(self) -> None:
        """Wait until everything written so far is on the disk, then mark the pending layers as
        complete.
        """
        pending = [chain_id for chain_id, layer in self._layers.items() if layer.pending]
        await asyncio.to_thread(files.sync_file_system, self._directory)
        changes: list[Change] = []
        for chain_id in pending:
            layer = self._layers.get(chain_id)
            if layer is not None and layer.pending:
                self._layers[chain_id] = settled = msgspec.structs.replace(layer, pending="")
                changes.append(self._layer_table.put(chain_id, settled))
        await self._records.commit(*changes)

    # --- snapshots --------------------------------------------------------------------------------

    def _snapshot(self, key: str) -> Snapshot:
        snapshot = self._snapshots.get(key)
        if snapshot is None:
            raise NotFound(f"No such snapshot: {key}")
        return snapshot

    async def prepare(self, key: str, parent: str | None, *, transient: bool = False, marked: bool = True) -> None:
        """See `Snapshots.prepare`."""
        if key in self._snapshots:
            raise Conflict(f"snapshot {key} already exists")
        if parent and parent not in self._layers:
            raise NotFound(f"No such layer: {parent}")
        snapshot = Snapshot(self._new_number(), parent or "")
        self._snapshots[key] = snapshot
        if parent:
            self._standing[parent] += 1
        model = self.layer_path(parent) if parent else None
        try:
            if transient:
                self._transient[key] = marked
            await _made(self._make_upper, snapshot.number, model)
            if not transient:
                await self._records.commit(self._snapshot_table.put(key, snapshot))
        except BaseException:
            await self.remove(key)
            raise

    def _make_upper(self, number: int, model: Path | None) -> None:
        path = self._path(number)
        _make(path / "diff", model)
        path.joinpath("work").mkdir(mode=0o700)

    def parent(self, key: str) -> str | None:
        """See `Snapshots.parent`."""
        snapshot = self._snapshots.get(key)
        return None if snapshot is None else snapshot.parent

    async def take(self, key: str) -> Ingest:
        """See `Snapshots.take`."""
        async with self._lock(key):
            await self._close_idle(key)
            snapshot = self._snapshot(key)
            path = self._path(snapshot.number)
            del self._snapshots[key]
            if snapshot.parent:
                _count_down(self._standing, snapshot.parent)
            try:
                if key in self._transient:
                    self._transient.pop(key, None)
                else:
                    await self._records.commit(self._snapshot_table.delete(key))
                await _made(files.remove_tree, path / "work")
                if snapshot.parent:
                    await self._collect(snapshot.parent)
            except BaseException:
                await uninterrupted(self._remove_directories([snapshot.number]))
                raise
        return Ingest(snapshot.number, path / "diff")

    async def keep(self, key: str) -> None:
        """See `Snapshots.keep`."""
        async with self._lock(key):
            snapshot = self._snapshot(key)
            if key not in self._transient:
                return
            await self._close_idle(key)
            await _made(self._make_durable, snapshot.number)
            await uninterrupted(self._record(key, snapshot))

    async def _record(self, key: str, snapshot: Snapshot) -> None:
        await self._records.commit(self._snapshot_table.put(key, snapshot))
        self._transient.pop(key, None)

    def _make_durable(self, number: int) -> None:
        files.sync_file_system(self._directory)
        files.remove_tree(self._path(number) / _VOLATILE)

    async def _close_idle(self, key: str) -> None:
        """Unmount a snapshot after its last user has left, for a caller that holds the lock.

        Raises Conflict when a container runs on it, or its users do not leave.
        """
        opened = self._opened.get(key)
        if opened is None:
            return
        if opened.runs:
            raise Conflict(f"snapshot {key} is mounted for a container")
        try:
            async with asyncio.timeout(PATIENCE):
                while opened.users:
                    opened.left.clear()
                    await opened.left.wait()
        except TimeoutError:
            raise Conflict(f"snapshot {key} is in use by {opened.users} archive calls") from None
        await self._close_unused(key)

    def _lock(self, key: str) -> asyncio.Lock:
        return self._locks.setdefault(key, asyncio.Lock())

    async def resume(self, namespace: int) -> set[str]:
        """At start: take over the mounts in the last daemon's namespace (-1: there is none).

        Returns the keys of the mounted snapshots; their containers are assumed to be running.
        """
        if namespace >= 0:
            await asyncio.to_thread(self.mount_namespace.adopt, namespace)
        self._opened = await self.mount_namespace.run(self._mounted)
        if self._ids is not None:
            try:
                await self.mount_namespace.run(functools.partial(_map_layers, self.mount_namespace, self._ids))
            except (ServerError, OSError) as error:
                raise ServerError(
                    f"--userns-remap needs overlays of ID-mapped mounts (Linux 5.19) on the file system of "
                    f"{self._directory}: {words(error)}"
                ) from error
        return set(self._opened)

    def _mounted(self) -> dict[str, _Opened]:
        """The snapshots that are mounted, by key. Call it in a thread of the namespace."""
        found = {}
        directory = self._roots()
        for key in os.listdir(_ROOTS):
            path = f"{_ROOTS}/{key}"
            if detached_mounts.is_mount(path):
                found[key.removesuffix(_WITH_IDS)] = _Opened(path, directory, adopted=True)
            else:
                os.rmdir(path)
        return found

    def _roots(self) -> int:
        """A descriptor of the directory of the mounts. Call it in a thread of the namespace."""
        with self._opening:
            if self._roots_directory < 0:
                self._roots_directory = os.open(_ROOTS, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        return self._roots_directory

    async def mount(self, key: str, *, mapped: bool = False) -> None:
        """See `Snapshots.mount`."""
        async with self._lock(key):
            (await self._open(key, writable=True, mapped=mapped)).runs = True

    def mounted(self, key: str) -> str:
        """See `Snapshots.mounted`."""
        return self._running(key).root

    @contextlib.asynccontextmanager
    async def shown(self, key: str, target: Path, beside: Sequence[Tree | NewFile] = ()) -> AsyncIterator[int]:
        """See `Snapshots.shown`."""
        path = self._running(key).path
        made: list[int] = []
        try:
            await uninterrupted(
                asyncio.to_thread(lambda: made.append(self.mount_namespace.namespace_with(path, target, beside)))
            )
            yield made[0]
        finally:
            # In the background: closing the last descriptor waits for an RCU grace period, for
            # which a start need not wait.
            for namespace in made:
                asyncio.get_running_loop().run_in_executor(None, os.close, namespace)

    def _running(self, key: str) -> _Opened:
        opened = self._opened.get(key)
        if opened is None or not opened.runs:
            raise NotFound(f"snapshot {key} is not mounted")
        return opened

    @contextlib.asynccontextmanager
    async def opened(self, key: str, *, writable: bool = False, mapped: bool = False) -> AsyncIterator[str]:
        """The snapshot's mount point in `mount_namespace`, to be copied from there."""
        async with self._lock(key):
            opened = await self._open(key, writable=writable, mapped=mapped)
            opened.users += 1
        try:
            yield opened.path
        finally:
            opened.users -= 1
            opened.left.set()
            if not opened.users and not opened.runs:
                opened.timer = asyncio.get_running_loop().call_later(LINGER, self._lingered, key)

    async def _open(self, key: str, *, writable: bool, mapped: bool) -> _Opened:
        """The mounted snapshot; mounts it if needed.

        The caller holds the lock, and counts itself as a user before it releases the lock.
        """
        opened = self._opened.get(key)
        if opened is not None and not opened.runs and (opened.mapped != mapped or (mapped and opened.adopted)):
            await self._close_idle(key)
            opened = None
        if opened is not None and writable and opened.read_only:  # there may be space by now
            await self._close_unused(key)
            opened = self._opened.get(key)
        if opened is None:
            opened = await self._mount(key, mapped)
        if writable and opened.read_only:
            await self._close_unused(key)
            why = await asyncio.to_thread(_why_read_only, self._directory)
            raise ServerError(f"snapshot {key}: {why}: it can only be mounted read-only")
        if opened.timer is not None:
            opened.timer.cancel()
            opened.timer = None
        return opened

    async def _mount(self, key: str, mapped: bool) -> _Opened:
        mount = self._mounting_of(key, self._ids if mapped else None)

        def open_mounted() -> None:
            path = f"{_ROOTS}/{key}{_WITH_IDS if mapped else ''}"
            os.mkdir(path)
            try:
                mount(path)
                self._opened[key] = _Opened(path, self._roots())
            except BaseException:
                with contextlib.suppress(ServerError):  # it was not mounted
                    detached_mounts.detach(path)
                os.rmdir(path)
                raise

        try:
            await uninterrupted(self.mount_namespace.run(open_mounted))
        except asyncio.CancelledError:
            self._lingered(key)
            raise
        return self._opened[key]

    def _mounting_of(self, key: str, ids: IdMap | None) -> Callable[[str], None]:
        """A function that mounts the snapshot at a path, with the ids of this map.

        Call it in a thread of `mount_namespace`.
        """
        snapshot = self._snapshot(key)
        number = snapshot.number
        marks = self._init if self._transient.get(key, True) else ()
        lower = [*marks, *(f"{layer.number}/diff" for layer in self.chain(snapshot.parent))]
        if not lower:
            return lambda target: _mount(ids, f"{number}/diff", target, flags=mounts.MS_BIND)
        options = f"lowerdir={':'.join(lower)},upperdir={number}/diff,workdir={number}/work,{_OPTIONS}"
        if key not in self._transient:
            return lambda target: _mount(ids, "overlay", target, "overlay", options=options)

        def mount(target: str) -> None:
            files.remove_tree(f"{number}/{_VOLATILE}")
            _mount(ids, "overlay", target, "overlay", options=f"{options},volatile")

        return mount

    def _lingered(self, key: str) -> None:
        spawn(self._close(key), f"snapshot {key}: unmount")

    async def _close(self, key: str) -> None:
        """Unmount a snapshot that has no user."""
        async with self._lock(key):
            await self._close_unused(key)

    async def _close_unused(self, key: str) -> None:
        """As `_close`, for a caller that holds the lock."""
        opened = self._opened.get(key)
        if opened is None or opened.users or opened.runs:
            return
        del self._opened[key]
        if opened.timer is not None:
            opened.timer.cancel()

        try:
            await uninterrupted(self.mount_namespace.unmount(opened.close))
        except (ServerError, OSError) as error:
            _log.warning("snapshot %s: %s", key, words(error))

    async def open_content(self, chain_id: str, *, mapped: bool = False) -> int:
        """See `Snapshots.open_content`."""
        lower = [layer.number for layer in self.chain(chain_id)]
        ids = self._ids if mapped else None
        if len(lower) == 1 and ids is None:
            return await threads.opened(asyncio.to_thread(files.open_directory, self._path(lower[0]) / "diff"))

        def open_merged() -> int:
            place = self.mount_namespace.place()
            try:
                _mount_layers(ids, lower, place)
                try:
                    return detached_mounts.clone(place)
                finally:
                    detached_mounts.detach(place)
            finally:
                os.rmdir(place)

        return await threads.opened(self.mount_namespace.run(open_merged))

    @contextlib.asynccontextmanager
    async def content(self, chain_id: str, *, mapped: bool = False) -> AsyncIterator[int]:
        """See `Snapshots.content`."""
        lower = [layer.number for layer in self.chain(chain_id)]
        ids = self._ids if mapped else None
        opened: list[tuple[int, str]] = []

        def open_merged() -> None:
            place = self.mount_namespace.place()
            try:
                _mount_layers(ids, lower, place)
                try:
                    opened.append((os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC), place))
                except BaseException:
                    detached_mounts.detach(place)
                    raise
            except BaseException:
                os.rmdir(place)
                raise

        def close() -> None:
            for descriptor, place in opened:
                os.close(descriptor)
                detached_mounts.detach(place)
                os.rmdir(place)

        try:
            await uninterrupted(self.mount_namespace.run(open_merged))
            yield opened[0][0]
        finally:
            await uninterrupted(self.mount_namespace.unmount(close))

    async def unmount(self, key: str) -> None:
        """See `Snapshots.unmount`."""
        opened = self._opened.get(key)
        if opened is not None:
            opened.runs = False
            await self._close(key)

    async def remove(self, key: str) -> None:
        snapshot = self._snapshots.pop(key, None)
        if snapshot is None:
            return
        if snapshot.parent:
            _count_down(self._standing, snapshot.parent)
        await self._close(key)
        changes = [] if key in self._transient else [self._snapshot_table.delete(key)]
        self._transient.pop(key, None)
        await self._discard(changes, [snapshot.number])
        if snapshot.parent:
            await self._collect(snapshot.parent)

    def upper(self, key: str) -> Path:
        return self._path(self._snapshot(key).number) / "diff"

    def lower(self, key: str) -> list[Path]:
        """The directories below `upper`, topmost first."""
        return [self._path(layer.number) / "diff" for layer in self.chain(self._snapshot(key).parent)]

    def graph_data(self, number: int, parent: str) -> dict[str, str]:
        """GraphDriver.Data of inspect: the directories, in the format of Docker's overlay2
        driver.
        """
        own = self._path(number)
        data = {"UpperDir": str(own / "diff"), "WorkDir": str(own / "work"), "MergedDir": str(own / "merged")}
        lower = [str(self._path(layer.number) / "diff") for layer in self.chain(parent)]
        if lower:
            data["LowerDir"] = ":".join(lower)
        return data

    def snapshot_data(self, key: str) -> dict[str, str]:
        """GraphDriver.Data of a container. Raises NotFound."""
        snapshot = self._snapshot(key)
        return self.graph_data(snapshot.number, snapshot.parent)

    def layer_data(self, chain_id: str) -> dict[str, str]:
        """GraphDriver.Data of an image by its topmost layer. Raises NotFound."""
        layer = self._layers.get(chain_id)
        if layer is None:
            raise NotFound(f"No such layer: {chain_id}")
        return self.graph_data(layer.number, layer.parent)

    async def usage(self, key: str) -> Usage:
        path = self.upper(key)
        return Usage(*await self._counting.run(_usage, path))

    async def sizes(self, keys: Sequence[str]) -> dict[str, int]:
        numbers = {key: snapshot.number for key in keys if (snapshot := self._snapshots.get(key)) is not None}
        found = await self._counting.run(_sizes, self._directory, [*numbers.values()])
        return {key: size for key, size in zip(numbers, found, strict=True) if size >= 0}

    # --- removal and sweep ------------------------------------------------------------------------

    async def _discard(self, changes: list[Change], numbers: list[int]) -> None:
        await self._records.commit(*changes)
        await self._remove_directories(numbers)

    async def _remove_directories(self, numbers: list[int]) -> None:
        results = await asyncio.gather(
            *(asyncio.to_thread(files.remove_tree, self._path(number)) for number in numbers), return_exceptions=True
        )
        for number, result in zip(numbers, results, strict=True):
            if isinstance(result, OSError):
                # Its record is deleted, so the next start tries again; the caller's request is
                # complete.
                _log.warning("removing %s: %s", self._path(number), result)
            elif isinstance(result, BaseException):
                raise result

    async def sweep(self, live_keys: set[str], live_chain_ids: set[str]) -> None:
        """At start: unmount snapshots whose container is not live, and remove all snapshots and
        layers that are not named, on disk and in the records.
        """
        for key in self._opened.keys() - live_keys:
            await self.unmount(key)
        changes: list[Change] = []
        for key in [key for key in self._snapshots if key not in live_keys]:
            dead = self._snapshots.pop(key)
            if dead.parent:
                _count_down(self._standing, dead.parent)
            changes.append(self._snapshot_table.delete(key))
        for chain_id in [*self._layers]:
            if chain_id not in live_chain_ids:
                await self._collect(chain_id)
        changes += [
            self._layer_table.delete(name)
            for name, _ in self._records.rows(self._layer_table.kind)
            if name not in self._layers
        ]
        await self._records.commit(*changes)
        known = {layer.number for layer in self._layers.values()} | {s.number for s in self._snapshots.values()}
        found = await asyncio.to_thread(_numbers, self._directory)
        await self._remove_directories(sorted(found - known))
        if any(layer.pending for layer in self._layers.values()):
            await self.settle()


def _map_layers(namespace: MountNamespace, ids: IdMap) -> None:
    """Attach the ID-mapped clone of ROOT/layers, and try it. Call it in a thread of the namespace.

    A clone of an earlier daemon is replaced; overlays that were mounted from it stay as they are.
    Raises ServerError on a host without such mounts.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(_MAPPED, 0o700)
    if detached_mounts.is_mount(_MAPPED):
        detached_mounts.detach(_MAPPED)
    user_namespace = ids.namespace()
    try:
        tree = detached_mounts.clone(".")
        try:
            detached_mounts.map_ids(tree, user_namespace)
            detached_mounts.attach(tree, _MAPPED)
        finally:
            os.close(tree)
    finally:
        os.close(user_namespace)
    _try_mapped(namespace, ids)


def _try_mapped(namespace: MountNamespace, ids: IdMap) -> None:
    """Mount an overlay from the clone, which is removed again. Raises ServerError."""
    trial = Path("trial")
    files.remove_tree(trial)  # of a daemon that was killed here
    place = namespace.place()
    try:
        for name in ("lower", "upper", "work"):
            (trial / name).mkdir(parents=True)
        _mount(
            *(ids, "overlay", place, "overlay"),
            options=f"lowerdir={trial}/lower,upperdir={trial}/upper,workdir={trial}/work,{_OPTIONS}",
        )
        try:
            read_only = os.statvfs(place).f_flag & os.ST_RDONLY
        finally:
            detached_mounts.detach(place)
        if read_only:
            raise ServerError(f"an overlay of ID-mapped mounts is read-only: {_why_read_only(Path())}")
    finally:
        files.remove_tree(trial)
        os.rmdir(place)


def _mount(ids: IdMap | None, source: str, target: str, type_: str = "", flags: int = 0, options: str = "") -> None:
    """mount(2) with names relative to ROOT/layers, or to its clone with these ids. Call it in a
    thread of the namespace.
    """
    if ids is None:
        mounts.mount(source, target, type_, flags, options)
        return
    os.chdir(_MAPPED)
    try:
        with user_namespaces.files_of(*ids.root):
            mounts.mount(source, target, type_, flags, options)
    finally:
        os.chdir("/layers")


def _mount_layers(ids: IdMap | None, numbers: Sequence[int], place: str) -> None:
    """Mount layers, topmost first, read-only. Call it in a thread of the namespace."""
    if not numbers:
        mounts.mount("tmpfs", place, "tmpfs", flags=mounts.MS_RDONLY)
        return
    if len(numbers) == 1:
        _mount(ids, f"{numbers[0]}/diff", place, flags=mounts.MS_BIND)
        mounts.mount("", place, flags=mounts.MS_BIND | mounts.MS_REMOUNT | mounts.MS_RDONLY)
        return
    options = f"lowerdir={':'.join(f'{number}/diff' for number in numbers)},{_OPTIONS}"
    _mount(ids, "overlay", place, "overlay", mounts.MS_RDONLY, options)


def _count_down(counter: Counter[str], name: str) -> None:
    counter[name] -= 1
    if counter[name] <= 0:
        del counter[name]


def _numbers(directory: Path) -> set[int]:
    return {int(name) for name in os.listdir(directory) if name.isdecimal()}


def _why_read_only(directory: Path) -> str:
    """Why overlayfs could not create its work directory there: a full disk, or one that the kernel
    writes to no more after an error, which statvfs(3) does not show since Linux 6.15.
    """
    try:
        os.close(os.open(directory, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except OSError as error:
        return reason(error)
    return os.strerror(errno.ENOSPC).lower()


def _mark(directory: Path, name: str) -> None:
    directory.mkdir(mode=0o755, exist_ok=True)
    if not (directory / name).exists():  # ROOT may be read-only by now
        (directory / name).touch(mode=0o755)
        (directory / name).chmod(0o755)


async def _made(make: Callable[..., None], *arguments: object) -> None:
    """Run `make`, which makes directories, in a thread, to its end. Raises ServerError."""
    try:
        await uninterrupted(asyncio.to_thread(make, *arguments))
    except OSError as error:
        raise ServerError(reason_with_file(error)) from error


def _make(path: Path, model: Path | None = None) -> None:
    """Create a content directory with the mode and owner of `model`, because a merged root has
    those of its topmost directory.
    """
    path.mkdir(mode=0o755, parents=True)
    mode, user, group = 0o755, 0, 0
    if model is not None:
        with contextlib.suppress(FileNotFoundError):
            found = model.stat()
            mode, user, group = found.st_mode & 0o7777, found.st_uid, found.st_gid
    os.chown(path, user, group)
    path.chmod(mode)


def _inherit(path: Path, below: list[Path], implied: Sequence[bytes]) -> None:
    """See `lowers.inherit`."""
    with Lowers(below) as lowers:
        own = files.open_directory(path)
        try:
            inherit(own, lowers, implied)
        finally:
            os.close(own)


def _usage(path: Path) -> tuple[int, int]:
    directory = files.open_directory(path)
    try:
        return tree.usage(directory)
    finally:
        os.close(directory)


def _sizes(directory: Path, numbers: Sequence[int]) -> list[int]:
    """As the bytes of `_usage`, for snapshots in that directory; -ENOENT for one that is being
    removed. Raises OSError.
    """
    layers = files.open_directory(directory)
    try:
        found = tree.sizes(layers, [b"%d/diff" % number for number in numbers])
    finally:
        os.close(layers)
    for number, size in zip(numbers, found, strict=True):
        if size < 0 and size != -errno.ENOENT:
            raise OSError(-size, os.strerror(-size), str(directory / str(number)))
    return found


def _boot_id() -> str:
    return files.read_file("/proc/sys/kernel/random/boot_id", 64).decode().strip()
