"""A snapshotter without overlayfs, root or SQLite: `engine.storage.snapshots.Snapshots` over plain
directories.

`Disk` survives the process: records, directories and, as with the real one, the mounts, which are
in a namespace that the monitor keeps. A new `FakeSnapshots` over the same `Disk` is a restart of
the daemon; with `Disk.reboot()` before, it is a restart of the host.

A test drives it through two hooks:
- `snapshots.step`, an async function that every coroutine awaits before and after its effect, with
  the name of the point: `mount k`, `mount k: done`. It may wait for anything. If it raises, the
  call fails at that point and undoes itself, as the real one does. Cancellation works the same way.
- `disk.records`, `disk.mounted` and `disk.directories()`: the state to compare with the API
  afterwards.

A mounted snapshot is a copy of its layers. Changes are moved to the upper directory when that is
requested or the snapshot is unmounted. The suite in tests/contract/test_snapshots.py runs on this
fake too. Not provided: mount namespaces (`shown` yields a descriptor of the root), xattrs and
ownership.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import stat
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from engine.errors import Conflict, NotFound, ServerError
from engine.storage.snapshots import Ingest, Layer, Usage
from engine.system.detached_mounts import MountNamespace, NewFile, Tree


class Snapshot(msgspec.Struct, frozen=True):
    number: int
    parent: str = ""


class Disk:
    """The state that outlives a daemon. `records`: rows by (kind, key), as in state.db."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.layers = root / "layers"
        self.layers.mkdir(parents=True, exist_ok=True)
        self.records: dict[tuple[str, str], Layer | Snapshot] = {}
        self.mounted: dict[str, Path] = {}
        """By key: the directory that stands for the mount."""
        self.boot = "boot 1"
        self.last = 0

    def directories(self) -> set[int]:
        return {int(name) for name in os.listdir(self.layers) if name.isdecimal()}

    def reboot(self) -> None:
        for path in self.mounted.values():
            shutil.rmtree(path)
        self.mounted.clear()
        self.boot = f"boot {int(self.boot.split()[1]) + 1}"


async def _no_step(point: str) -> None:
    await asyncio.sleep(0)


class FakeSnapshots:
    """The fake. It uses the state of `disk` as `OverlaySnapshots` uses that of ROOT."""

    def __init__(self, disk: Disk, step: Callable[[str], Awaitable[None]] = _no_step) -> None:
        self.disk = disk
        self.step = step
        self.boot = disk.boot
        self.mount_namespace = MountNamespace(disk.layers, "/roots")
        """Never entered, because that needs root."""
        self._layers: dict[str, Layer] = {}
        numbers = disk.directories()
        disk.last = max(disk.last, *numbers, 0)
        for name in sorted((key for kind, key in disk.records if kind == "layer"), key=self._depth):
            layer = self._recorded(name)
            whole = layer.number in numbers and layer.pending in ("", self.boot)
            if whole and (not layer.parent or layer.parent in self._layers):
                self._layers[name] = layer
        self._snapshots = {key: value for (_, key), value in disk.records.items() if isinstance(value, Snapshot)}
        self._retained: Counter[str] = Counter()
        self._opened: Counter[str] = Counter()
        self._runs: set[str] = set()
        self._transient: set[str] = set()
        self._locks: dict[str, asyncio.Lock] = {}

    def _recorded(self, chain_id: str) -> Layer:
        found = self.disk.records[("layer", chain_id)]
        assert isinstance(found, Layer)
        return found

    def _depth(self, chain_id: str) -> int:
        depth = 0
        while chain_id and ("layer", chain_id) in self.disk.records:
            chain_id = self._recorded(chain_id).parent
            depth += 1
        return depth

    def _path(self, number: int) -> Path:
        return self.disk.layers / str(number)

    def _new_number(self) -> int:
        self.disk.last += 1
        return self.disk.last

    # --- layers -----------------------------------------------------------------------------------

    def layer(self, chain_id: str) -> Layer | None:
        return self._layers.get(chain_id)

    def _committed(self, chain_id: str) -> Layer:
        layer = self._layers.get(chain_id)
        if layer is None:
            raise NotFound(f"No such layer: {chain_id}")
        return layer

    def layer_path(self, chain_id: str) -> Path:
        return self._path(self._committed(chain_id).number) / "diff"

    def layer_paths(self) -> list[Path]:
        return [self.layer_path(chain_id) for chain_id in self._layers]

    def layer_data(self, chain_id: str) -> dict[str, str]:
        return {"UpperDir": str(self.layer_path(chain_id))}

    def chain(self, chain_id: str) -> list[Layer]:
        found = []
        while chain_id:
            if chain_id not in self._layers:
                raise ServerError(f"layer {chain_id} is missing")
            found.append(self._layers[chain_id])
            chain_id = found[-1].parent
        return found

    def retain(self, chain_id: str) -> None:
        self._retained[chain_id] += 1

    async def release(self, chain_id: str) -> list[str]:
        self._retained -= Counter([chain_id])
        return await self._collect(chain_id)

    async def _collect(self, chain_id: str) -> list[str]:
        gone = []
        while chain_id in self._layers and not self._used(chain_id):
            gone.append(chain_id)
            chain_id = self._layers.pop(chain_id).parent
        for name in gone:
            await self.step(f"collect {name}")
            shutil.rmtree(self._path(self._recorded(name).number), ignore_errors=True)
            del self.disk.records[("layer", name)]
        return gone

    def _used(self, chain_id: str) -> bool:
        above = [layer.parent for layer in self._layers.values()] + [each.parent for each in self._snapshots.values()]
        return chain_id in self._retained or chain_id in above

    async def ingest(self) -> Ingest:
        number = self._new_number()
        await self.step("ingest")
        (self._path(number) / "diff").mkdir(parents=True)
        return Ingest(number, self._path(number) / "diff")

    async def commit_layer(self, ingest: Ingest, chain_id: str, layer: Layer, implied: Sequence[bytes] = ()) -> None:
        try:
            await self.step(f"commit {chain_id}")
            if layer.parent:
                self._committed(layer.parent)
            if chain_id in self._layers:
                raise Conflict(f"layer {chain_id} already exists")
        except BaseException:
            await self.abandon(ingest)
            raise
        record = msgspec.structs.replace(layer, number=ingest.number, pending=self.boot)
        self._layers[chain_id] = self.disk.records["layer", chain_id] = record

    async def abandon(self, ingest: Ingest) -> None:
        shutil.rmtree(self._path(ingest.number))

    async def settle(self) -> None:
        await self.step("settle")
        for chain_id, layer in self._layers.items():
            self._layers[chain_id] = msgspec.structs.replace(layer, pending="")
            self.disk.records["layer", chain_id] = self._layers[chain_id]

    # --- snapshots --------------------------------------------------------------------------------

    def _snapshot(self, key: str) -> Snapshot:
        if key not in self._snapshots:
            raise NotFound(f"No such snapshot: {key}")
        return self._snapshots[key]

    def _lock(self, key: str) -> asyncio.Lock:
        return self._locks.setdefault(key, asyncio.Lock())

    def parent(self, key: str) -> str | None:
        snapshot = self._snapshots.get(key)
        return None if snapshot is None else snapshot.parent

    async def prepare(self, key: str, parent: str | None, *, transient: bool = False, marked: bool = True) -> None:
        if key in self._snapshots:
            raise Conflict(f"snapshot {key} already exists")
        model = self.layer_path(parent) if parent else None
        snapshot = self._snapshots[key] = Snapshot(self._new_number(), parent or "")
        try:
            await self.step(f"prepare {key}")
            diff = self._path(snapshot.number) / "diff"
            diff.mkdir(parents=True)
            if model is not None:
                shutil.copystat(model, diff)
                os.chown(diff, model.stat().st_uid, model.stat().st_gid)
            if transient:
                self._transient.add(key)
            else:
                self.disk.records["snapshot", key] = snapshot
            await self.step(f"prepare {key}: done")
        except BaseException:
            await asyncio.shield(self._remove(key))
            raise

    async def take(self, key: str) -> Ingest:
        async with self._lock(key):
            await self._idle(key)
            snapshot = self._snapshot(key)
            path = self.upper(key)
            if key in self.disk.mounted:
                shutil.rmtree(self.disk.mounted.pop(key))
            del self._snapshots[key]
            self._transient.discard(key)
            try:
                await self.step(f"take {key}")
                self.disk.records.pop(("snapshot", key), None)
            except BaseException:
                shutil.rmtree(path.parent)
                raise
        if snapshot.parent:
            await self._collect(snapshot.parent)
        return Ingest(snapshot.number, path)

    async def keep(self, key: str) -> None:
        async with self._lock(key):
            snapshot = self._snapshot(key)
            if key in self._transient:
                await self._idle(key)
                self._close(key)
                await self.step(f"keep {key}")
                self.disk.records["snapshot", key] = snapshot
                self._transient.discard(key)

    async def _idle(self, key: str) -> None:
        if key in self._runs:
            raise Conflict(f"snapshot {key} is mounted for a container")
        while self._opened[key]:  # noqa: ASYNC110 (a fake)
            await asyncio.sleep(0)

    async def resume(self, namespace: int) -> set[str]:
        self._runs = set(self.disk.mounted)
        return set(self._runs)

    async def mount(self, key: str, *, mapped: bool = False) -> None:
        async with self._lock(key):
            try:
                await self.step(f"mount {key}")
                self._mount(key)
                await self.step(f"mount {key}: done")
            except BaseException:
                self._close(key)
                raise
            self._runs.add(key)

    def _mount(self, key: str) -> None:
        if key not in self.disk.mounted:
            self._snapshot(key)
            path = self.disk.root / f"mount of {key}"
            path.mkdir()
            for below in (*reversed(self.lower(key)), self._own(key)):
                _lay_over(path, below)
            shutil.copystat(self._own(key), path)
            self.disk.mounted[key] = path

    def mounted(self, key: str) -> str:
        if key not in self._runs:
            raise NotFound(f"snapshot {key} is not mounted")
        return str(self.disk.mounted[key])

    @contextlib.asynccontextmanager
    async def shown(self, key: str, target: Path, beside: Sequence[Tree | NewFile] = ()) -> AsyncIterator[int]:
        root = os.open(self.mounted(key), os.O_RDONLY | os.O_CLOEXEC)
        try:
            await self.step(f"show {key}")
            yield root
        finally:
            os.close(root)

    @contextlib.asynccontextmanager
    async def opened(self, key: str, *, writable: bool = False, mapped: bool = False) -> AsyncIterator[str]:
        async with self._lock(key):
            await self.step(f"open {key}")
            self._mount(key)
            self._opened[key] += 1
        try:
            yield str(self.disk.mounted[key])
        finally:
            self._opened -= Counter([key])
            self._close(key)

    async def open_content(self, chain_id: str, *, mapped: bool = False) -> int:
        layers = [self._path(layer.number) / "diff" for layer in self.chain(chain_id)]
        await self.step("open content")
        path = self.disk.root / "content"
        path.mkdir()
        try:
            for layer in reversed(layers):
                _lay_over(path, layer)
            return os.open(path, os.O_PATH | os.O_CLOEXEC)
        finally:
            shutil.rmtree(path)

    @contextlib.asynccontextmanager
    async def content(self, chain_id: str, *, mapped: bool = False) -> AsyncIterator[int]:
        opened = await self.open_content(chain_id)
        try:
            yield opened
        finally:
            os.close(opened)

    async def unmount(self, key: str) -> None:
        self._runs.discard(key)
        async with self._lock(key):
            await self.step(f"unmount {key}")
            self._close(key)

    def _close(self, key: str) -> None:
        if key in self.disk.mounted and key not in self._runs and not self._opened[key]:
            if key in self._snapshots:  # otherwise it was transient, and an earlier daemon's
                self._write_back(key)
            shutil.rmtree(self.disk.mounted.pop(key))

    def _write_back(self, key: str) -> None:
        """Move the changes on the mount to the upper directory."""
        if key not in self.disk.mounted:
            return
        below = self.disk.root / f"below {key}"
        below.mkdir()
        for path in reversed(self.lower(key)):
            _lay_over(below, path)
        upper = self._own(key)
        for name in os.listdir(upper):
            _delete(upper / name)
        _difference(below, self.disk.mounted[key], upper)
        shutil.rmtree(below)

    async def remove(self, key: str) -> None:
        if key in self._snapshots:
            await self._remove(key)

    async def _remove(self, key: str) -> None:
        snapshot = self._snapshots.pop(key)
        async with self._lock(key):
            await self.step(f"remove {key}")
            if (path := self.disk.mounted.pop(key, None)) is not None:
                shutil.rmtree(path)
            self._runs.discard(key)
            self._transient.discard(key)
            self.disk.records.pop(("snapshot", key), None)
            await self.step(f"remove {key}: recorded")
            shutil.rmtree(self._path(snapshot.number), ignore_errors=True)
        if snapshot.parent:
            await self._collect(snapshot.parent)

    def _own(self, key: str) -> Path:
        return self._path(self._snapshot(key).number) / "diff"

    def upper(self, key: str) -> Path:
        path = self._own(key)
        self._write_back(key)
        return path

    def lower(self, key: str) -> list[Path]:
        return [self._path(layer.number) / "diff" for layer in self.chain(self._snapshot(key).parent)]

    def snapshot_data(self, key: str) -> dict[str, str]:
        return {"UpperDir": str(self._own(key))}

    async def usage(self, key: str) -> Usage:
        upper = self.upper(key)
        await self.step(f"usage {key}")
        entries = [path.lstat() for path in upper.rglob("*")]
        return Usage(sum(each.st_size for each in entries if stat.S_ISREG(each.st_mode)), len(entries))

    async def sizes(self, keys: Sequence[str]) -> dict[str, int]:
        return {key: (await self.usage(key)).size for key in keys if key in self._snapshots}

    async def sweep(self, live_keys: set[str], live_chain_ids: set[str]) -> None:
        for key in [*self.disk.mounted]:
            if key not in live_keys:
                await self.unmount(key)
        for key in [key for key in self._snapshots if key not in live_keys]:
            await self._remove(key)
        for chain_id in [*self._layers]:
            if chain_id not in live_chain_ids:
                await self._collect(chain_id)
        for kind, name in [*self.disk.records]:
            if kind == "layer" and name not in self._layers:
                del self.disk.records[kind, name]
        known = {each.number for each in (*self._layers.values(), *self._snapshots.values())}
        for number in self.disk.directories() - known:
            shutil.rmtree(self._path(number))
        await self.settle()


# --- directories ----------------------------------------------------------------------------------


def _whiteout(path: Path) -> bool:
    status = path.lstat()
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _lay_over(target: Path, layer: Path) -> None:
    """Copy a layer over the layers below it."""
    for entry in sorted(layer.iterdir()):
        place = target / entry.name
        if _whiteout(entry):
            _delete(place)
        elif entry.is_dir() and not entry.is_symlink():
            if not (place.is_dir() and not place.is_symlink()):
                _delete(place)
                place.mkdir()
            _lay_over(place, entry)
        else:
            _delete(place)
            shutil.copy2(entry, place, follow_symlinks=False)


def _difference(below: Path, now: Path, upper: Path) -> None:
    """Fill `upper` with the changes that turn `below` into `now`."""
    old, new = set(os.listdir(below)), set(os.listdir(now))
    for name in old - new:
        os.mknod(upper / name, stat.S_IFCHR, 0)
    for name in new:
        entry, before = now / name, below / name
        if entry.is_dir() and not entry.is_symlink():
            if not before.is_dir():
                shutil.copytree(entry, upper / name, symlinks=True)
                continue
            (upper / name).mkdir()
            _difference(before, entry, upper / name)
            if not os.listdir(upper / name):
                (upper / name).rmdir()
        elif name not in old or _looks(entry) != _looks(before):
            shutil.copy2(entry, upper / name, follow_symlinks=False)


def _looks(path: Path) -> tuple[object, ...]:
    status = path.lstat()
    content: object = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
    return status.st_mode, content
