"""Named volumes of all drivers: their records, their users, and the volumes of one container from
its create to its removal.

A volume exists as long as its record. New volumes are recorded in the same transaction as their
container, and volumes that `v=1` removes are deleted in the same transaction too. After a crash
local.py makes the directories follow the records.

Owns:    records of kind `volume`, which containers use which, one lock per volume.
Threads: the event loop's. A create and a removal by a client run to their end even if the caller is
         cancelled.
Raises:  InvalidParameter, NotFound, Conflict, ServerError with Docker's messages.
Not here: the drivers (`driver.py`, `local.py`, `plugin.py`), host paths of binds (`sources.py`),
records and their form in answers (`views.py`), the mounts that a container requests
(`containers/create.py`).

Events are Docker's: create, mount, unmount, destroy, prune.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import os
import re
import secrets
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

import msgspec

from engine.common.pruning import OnlyOne, Selection
from engine.config import Config
from engine.errors import Conflict, EngineError, InvalidParameter, NotFound, ServerError, Unimplemented
from engine.events import EventLog
from engine.plugins.registry import Plugins
from engine.storage.records import Change, Records
from engine.system import host_paths
from engine.system.threads import opened, whole
from engine.system.user_namespaces import IdMap
from engine.volumes import local, sources, views
from engine.volumes.driver import Driver
from engine.volumes.local import Content, LocalDriver
from engine.volumes.plugin import PluginDriver, PluginDrivers
from engine.volumes.views import ANONYMOUS, VolumeRecord
from engine.wire.containers import MountPoint
from engine.wire.volumes import UsageData, Volume, VolumeCreate

_log = logging.getLogger(__name__)
_ANONYMOUS = re.compile(r"[0-9a-f]{64}")


class Claim:
    """The volumes of a container that is being created.

    `mounts` are complete; `changes` belong in its record's transaction.
    """

    def __init__(self, store: VolumeStore, container_id: str) -> None:
        self._store = store
        self._id = container_id
        self.mounts: tuple[MountPoint, ...] = ()
        self.changes: tuple[Change, ...] = ()
        self.made: dict[str, VolumeRecord] = {}

    @whole  # its descriptors must stay open while a thread uses them
    async def populate(self, destinations: Collection[str], image: Callable[[], Awaitable[int]]) -> None:
        """Copy the image's content at these mounts into their volumes, where they are empty.

        `image` opens the image's content, when it is needed. Raises InvalidParameter where the
        image has a file at the destination.
        """
        wanted = [
            each
            for each in self.mounts
            if each.destination in destinations and await self._store.may_be_empty(each, self)
        ]
        if not wanted:
            return
        root = await image()
        try:
            for point in wanted:
                source = await asyncio.to_thread(sources.open_in_image, root, point.destination)
                if source is not None:
                    try:
                        await self._store.populate(point, source, self._id, self.made)
                    finally:
                        os.close(source)
        finally:
            os.close(root)


class VolumeStore:
    """All volumes of one engine."""

    def __init__(
        self, config: Config, records: Records, events: EventLog, plugins: Plugins, ids: IdMap | None = None
    ) -> None:
        """`ids`: of containers in user namespaces, whose root owns new volumes and new sources of
        binds.
        """
        self._owner = (0, 0) if ids is None else ids.root
        self._records = records
        self._table = records.table("volume", VolumeRecord)
        self._events = events
        self._local = LocalDriver(config.root / "volumes", config.run / "volumes", self._owner)
        self._plugins = PluginDrivers(plugins)
        plugins.users.append(self._made_by)
        self._volumes: dict[str, VolumeRecord] = {}
        self._views: dict[str, tuple[VolumeRecord, Volume]] = {}
        """Of volumes that were asked for."""
        self._users: dict[str, dict[str, None]] = {}
        """Volume → ids of the containers that use it, running or not."""
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._pruning = OnlyOne()

    # --- start and end of the engine --------------------------------------------------------------

    async def open(self, containers: Mapping[str, Sequence[MountPoint]]) -> None:
        """Load the records; `containers` has the mounts of every container, by id."""
        self._volumes = self._table.load()
        missing = {}
        for container_id, points in containers.items():
            for point in points:
                if isinstance(point.name, str):
                    self._use(point.name, container_id)
                    if point.name not in self._volumes:
                        missing[point.name] = VolumeRecord(
                            name=point.name,
                            driver=point.driver or local.NAME,
                            created=time.time_ns(),
                            anonymous=bool(_ANONYMOUS.fullmatch(point.name)),
                        )
        if missing:  # of an engine that kept no volume records
            await self._records.commit(*(self._table.put(name, record) for name, record in missing.items()))
            self._volumes |= missing
        await self._local.open(name for name, record in self._volumes.items() if record.driver == local.NAME)

    def resume(self, container_id: str, points: Sequence[MountPoint]) -> None:
        """Register the volumes of a container that outlived the last daemon as mounted."""
        for point in points:
            record = self._volumes.get(point.name) if isinstance(point.name, str) else None
            if record is not None and record.driver == local.NAME and record.options:
                self._local.resume(record.name, _user(container_id, point))

    async def sweep(self) -> None:
        """Unmount what no running container has; after every `resume`."""
        await self._local.sweep({name for name, record in self._volumes.items() if record.options})

    async def close(self) -> None:
        await self._local.close()

    def drivers(self) -> list[str]:
        """Names of the drivers that have been used."""
        return [local.NAME, *self._plugins.active()]

    def _made_by(self, driver: str) -> list[str]:
        return [f"volume {name}" for name, record in self._volumes.items() if record.driver == driver]

    async def known_drivers(self) -> list[str]:
        """Names of the drivers that a volume may have: plugins that have not been used are not
        asked whether they are one.
        """
        return [local.NAME, *await self._plugins.names()]

    # --- the API ----------------------------------------------------------------------------------

    async def select(
        self, filters: Mapping[str, Sequence[str]], dangling: bool | None
    ) -> tuple[list[Volume], list[str]]:
        """Volumes by name, and warnings about drivers that failed.

        Values of one filter name are alternatives, except labels, which must all match.
        """
        listed, warnings = await self._plugins.listed()

        def wanted(name: str, driver: str, labels: Mapping[str, str]) -> bool:
            return views.matches(name, driver, labels, filters) and dangling in (None, name not in self._users)

        # Records are compared, and views made of those that match: views take most of the time.
        every = not filters and dangling is None
        chosen = {
            name: views.merged(record, self._mountpoint(record), listed[name]) if name in listed else self._view(record)
            for name, record in self._volumes.items()
            if every or wanted(name, record.driver, views.labels(record))
        }
        for name, volume in listed.items():
            if name not in self._volumes and wanted(name, volume.driver, volume.labels):
                chosen[name] = volume
        return [chosen[name] for name in sorted(chosen)], warnings

    async def get(self, name: str) -> Volume:
        """One volume. Raises NotFound `get NAME: no such volume`."""
        record = self._volumes.get(name)
        if record is None:
            found = await self._plugins.find(name)
            if found is None:
                raise NotFound(f"get {name}: no such volume")
            driver, volume = found
            return views.of_plugin(volume, driver.name, driver.scope)
        if record.driver == local.NAME:
            return self._view(record)
        plugin = await self._plugins.get(record.driver)
        shown = views.of_plugin(await plugin.get(name), plugin.name, plugin.scope)
        return views.merged(record, shown.mountpoint or record.path, shown)

    @whole
    async def create(self, body: VolumeCreate) -> Volume:
        """A new volume, or the existing one of that name.

        Raises Conflict when that has another driver.
        """
        if body.cluster_volume_spec is not None:
            raise Unimplemented("ClusterVolumeSpec: cluster volumes (CSI) are not supported by this version")
        name = body.name or secrets.token_hex(32)
        own_labels = body.labels if body.name else body.labels | {ANONYMOUS: ""}
        async with self._lock(name):
            record = await self._existing(name, body.driver)
            if record is None:
                record = await self._create(name, body.driver or local.NAME, body.driver_opts, own_labels)
                self._volumes[name] = record
            self._events.publish("volume", "create", name, {"driver": record.driver})
            with contextlib.suppress(EngineError):
                return await self.get(name)
            return self._view(record)  # a plugin that does not show what it has made

    async def _create(self, name: str, driver: str, options: dict[str, str], labels: dict[str, str]) -> VolumeRecord:
        """Make the volume and write its record. A local one's directory is made and named by the
        records' writer, so that the create is one turn of a thread.
        """
        make = keep = None
        if driver == local.NAME:
            self._local.check(name, options)
            record = _record(name, driver, options, labels)
            make, keep = (functools.partial(each, name) for each in (self._local.create_now, self._local.keep_now))
        else:
            record = await self._make(name, driver, options, labels)
        try:
            await self._records.commit(self._table.put(name, record), first=make, then=keep)
        except BaseException:
            await self._undo(record)
            raise
        return record

    async def _existing(self, name: str, driver: str) -> VolumeRecord | None:
        """The volume of that name, if it has that driver.

        One that only a plugin knows gets a record. One that its plugin has lost counts as none: a
        new one takes its record. Raises Conflict if a container uses it.
        """
        record = self._volumes.get(name)
        if record is not None and await self._is_lost(record):
            if name in self._users:
                raise Conflict(
                    f"found references to volume '{name}' in driver '{record.driver}' but the volume was not found in "
                    "the driver -- you may need to remove containers referencing this volume or force remove the "
                    "volume to re-create it"
                )
            record = None
        if record is None and driver != local.NAME and (found := await self._plugins.find(name)):
            plugin, volume = found
            if not driver or self._plugins.full_name(driver) == plugin.name:
                record = VolumeRecord(
                    name=name, driver=plugin.name, created=time.time_ns(), path=volume.mountpoint or ""
                )
                await self._records.commit(self._table.put(name, record))
                self._volumes[name] = record
        if (
            record is not None
            and driver not in ("", record.driver)
            and self._plugins.full_name(driver) != record.driver
        ):
            raise Conflict(f"A volume named {name} already exists. Choose a different volume name.")
        return record

    async def _is_lost(self, record: VolumeRecord) -> bool:
        """Its plugin answers that it does not have it."""
        if record.driver == local.NAME:
            return False
        with contextlib.suppress(EngineError):
            return not await (await self._plugins.get(record.driver)).has(record.name)
        return False

    @whole
    async def remove(self, name: str, *, force: bool = False) -> None:
        """Raises NotFound, Conflict while containers use it, ServerError when the driver fails.

        With `force` a missing volume is no error, and a volume that its plugin cannot remove loses
        its record all the same.
        """
        async with self._lock(name):
            record = self._volumes.get(name)
            if record is None and (found := await self._plugins.find(name)):
                record = VolumeRecord(name=name, driver=found[0].name)
            if record is None:
                if force:
                    return
                raise NotFound(f"get {name}: no such volume")
            self._check_unused(name)
            if record.driver == local.NAME:
                await self._remove_local(record)
                return
            try:
                driver = await self._driver(record.driver, f"remove {name}")
                await driver.hide(name)
            except EngineError as error:
                if not force:
                    raise
                _log.warning("volume %s: its record is removed although its driver failed: %s", name, error.message)
                await self._records.commit(self._table.delete(name))
                await self._forget(record)
                return
            await self._delete(record, driver)

    async def _remove_local(self, record: VolumeRecord) -> None:
        """As `hide` and `_delete`, in one turn of the records' writer: it hides the directory,
        deletes the record and removes the directory if the volume is empty. Content, which may be
        large, is removed in another thread.
        """
        name = record.name
        hidden = discarded = False

        def hide() -> None:
            nonlocal hidden
            self._local.hide_now(name)
            hidden = True

        def discard() -> None:
            nonlocal discarded
            discarded = self._local.discard_empty(name)

        try:
            await self._records.commit(self._table.delete(name), first=hide, then=discard)
        except BaseException:
            if hidden:
                await self._restore(record, self._local)
            raise
        await self._forget(record, None if discarded else self._local)

    async def _delete(self, record: VolumeRecord, driver: Driver) -> None:
        """Remove a hidden volume; it is restored if its record stays. The caller has its lock."""
        try:
            self._check_unused(record.name)
            await self._records.commit(self._table.delete(record.name))
        except BaseException:
            await self._restore(record, driver)
            raise
        await self._forget(record, driver)

    # --- unused volumes, and what volumes take ----------------------------------------------------

    async def prune(self, selection: Selection, *, named: bool) -> tuple[list[str], int]:
        """Remove the local volumes without driver options that no container uses: the anonymous
        ones, and with `named` the others too.

        Returns their names and their bytes. Raises Conflict while another prune runs.
        """
        with self._pruning:
            names: list[str] = []
            space = 0
            for record in [*self._volumes.values()]:
                if views.is_plain(record) and (named or views.is_anonymous(record)):
                    size = await self._pruned(record, selection)
                    if size is not None:
                        names.append(record.name)
                        space += max(size, 0)
            self._events.publish("volume", "prune", "", {"reclaimed": str(space)})
            return names, space

    @whole
    async def _pruned(self, record: VolumeRecord, selection: Selection) -> int | None:
        """Bytes of the volume, which was removed; None if it stays."""
        name = record.name
        async with self._lock(name):
            if self._volumes.get(name) is not record:  # another one has its name now
                return None
            if name in self._users or not selection.matches(record.created, views.labels(record)):
                return None
            try:
                await self._local.hide(name)
                (size,) = await self._local.sizes([local.HIDDEN + name])
                await self._delete(record, self._local)
            except EngineError as error:
                _log.warning("volume %s is not pruned: %s", name, error.message)
                return None
            return size

    async def usage(self) -> list[Volume]:
        """The local volumes without driver options, with their sizes and numbers of users."""
        records = [record for record in self._volumes.values() if views.is_plain(record)]
        sizes = await self._local.sizes([record.name for record in records])
        return [
            msgspec.structs.replace(
                self._view(record),
                usage_data=UsageData(size=size, ref_count=len(self._users.get(record.name, ()))),
            )
            for record, size in zip(records, sizes, strict=True)
        ]

    def _check_unused(self, name: str) -> None:
        if users := self._users.get(name):
            raise Conflict(f"unable to remove volume: remove {name}: volume is in use - [{', '.join(users)}]")

    # --- the volumes of a container ---------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def claim(
        self,
        container_id: str,
        points: Sequence[MountPoint],
        named: Collection[str],
        wanted: Mapping[str, VolumeCreate] = MappingProxyType({}),
    ) -> AsyncIterator[Claim]:
        """Create the missing volumes of a new container's mounts, and add the container as a user
        of all of them.

        `named`: those that the client named itself; the others are anonymous. `wanted`: driver
        options and labels for new volumes, by name. The caller commits the container's record and
        `changes` within the context; an exception there undoes everything.
        """
        claim = Claim(self, container_id)
        names = sorted({point.name for point in points if isinstance(point.name, str)})
        async with contextlib.AsyncExitStack() as locks:
            for name in names:
                await locks.enter_async_context(self._lock(name))
            added = [name for name in names if container_id not in self._users.get(name, {})]
            try:
                claim.mounts = tuple(
                    [await self._claimed(claim, container_id, point, named, wanted) for point in points]
                )
                claim.changes = tuple(self._table.put(name, record) for name, record in claim.made.items())
                yield claim
            except BaseException:
                self.release(container_id, added)
                for record in reversed(claim.made.values()):
                    await self._undo(record)
                raise
            for record in claim.made.values():
                await self._keep(record)
                self._events.publish("volume", "create", record.name, {"driver": record.driver})

    async def _claimed(
        self,
        claim: Claim,
        container_id: str,
        point: MountPoint,
        named: Collection[str],
        wanted: Mapping[str, VolumeCreate],
    ) -> MountPoint:
        if not isinstance(point.name, str):
            return point
        name, driver = point.name, point.driver if isinstance(point.driver, str) else ""
        record = claim.made.get(name) or await self._existing(name, driver)
        if record is None:
            anonymous = name not in named and bool(_ANONYMOUS.fullmatch(name))
            try:
                asked = wanted.get(name, VolumeCreate())
                record = await self._make(
                    name, driver or local.NAME, asked.driver_opts, asked.labels, anonymous=anonymous
                )
            except NotFound as error:
                # Not 404: clients take a 404 of a create for a missing image, and would pull it.
                raise InvalidParameter(error.message) from error
            claim.made[name] = record
        self._use(name, container_id)
        # as Docker shows a volume that the body names without a mode
        mode = point.mode or ("z" if name in named and record.driver == local.NAME else "")
        return msgspec.structs.replace(point, driver=record.driver, source=self._mountpoint(record), mode=mode)

    async def may_be_empty(self, point: MountPoint, claim: Claim) -> bool:
        """True if the image may have content for this mount."""
        if not isinstance(point.name, str):
            return False
        record = self._volumes.get(point.name)
        if point.name in claim.made or record is None or record.driver != local.NAME or record.options:
            return True
        return await self._local.is_empty(point.name)

    async def populate(
        self, point: MountPoint, source: int, container_id: str, made: Mapping[str, VolumeRecord]
    ) -> None:
        """See `Claim.populate`; `source` is the image's directory."""
        name = str(point.name)
        record = made.get(name) or self._volumes[name]
        staged = name in made and record.driver == local.NAME
        if staged or (record.driver == local.NAME and not record.options):
            await self._local.populate(name, source, staged=staged)
            return
        driver = await self._driver(record.driver, f"mount {name}")
        user = _user(container_id, point)
        path = await driver.mount(name, record.options, user)
        try:
            if isinstance(driver, PluginDriver):
                async with self._visible(driver, name, path) as target:
                    await host_paths.run(sources.populate_path, name, source, target)
            else:
                await self._local.populate(name, source, staged=False)
        finally:
            await driver.unmount(name, user)

    async def mount(
        self,
        container_id: str,
        points: Sequence[MountPoint],
        borrowed: contextlib.AsyncExitStack,
        subpaths: Mapping[str, str] = MappingProxyType({}),
    ) -> Mounted:
        """Mount the sources of its mounts for a start. On failure nothing stays mounted.

        `subpaths`: by destination, where only a part of the volume is mounted.

        Resources that only the runtime needs for its start are released when `borrowed` closes, the
        rest by `unmount`.
        """
        changed: list[MountPoint] = []
        paths: dict[str, str] = {}
        done: list[MountPoint] = []
        to_place: dict[str, Content] = {}
        try:
            if binds := [point for point in points if not isinstance(point.name, str)]:
                await host_paths.run(sources.ensure_sources, binds, self._owner)
            for point in points:
                if not isinstance(point.name, str):
                    changed.append(point)
                    continue
                record, driver = await self._to_mount(point.name)
                async with self._lock(record.name):
                    path = await driver.mount(record.name, record.options, _user(container_id, point))
                done.append(point)
                subpath = subpaths.get(point.destination, "")
                if isinstance(driver, PluginDriver) and driver.managed:
                    tree = await driver.tree(record.name, path)
                    # the last close of a mount waits for an RCU grace period
                    borrowed.push_async_callback(asyncio.to_thread, os.close, tree)
                    to_place[point.destination] = Content(record.name, subpath=subpath, tree=tree)
                elif record.driver == local.NAME:
                    to_place[point.destination] = Content(record.name, subpath=subpath)
                elif subpath:
                    to_place[point.destination] = Content(record.name, path, subpath)
                else:
                    paths[point.destination] = path
                changed.append(msgspec.structs.replace(point, source=path))
                self._events.publish(
                    "volume",
                    "mount",
                    record.name,
                    {
                        "container": container_id,
                        "destination": point.destination,
                        "driver": record.driver,
                        "propagation": point.propagation,
                        "read/write": str(point.rw).lower(),
                    },
                )
            if to_place:
                borrowed.callback(self._local.leave_places, container_id)
                paths |= await self._local.place(container_id, to_place)
        except BaseException:
            await self.unmount(container_id, done)
            raise
        return Mounted(tuple(changed), paths)

    async def _to_mount(self, name: str) -> tuple[VolumeRecord, Driver]:
        record = self._volumes.get(name)
        if record is None:
            raise ServerError(f"get {name}: no such volume")
        return record, await self._driver(record.driver, f"mount {name}")

    async def unmount(self, container_id: str, points: Sequence[MountPoint]) -> None:
        """Unmount its volumes, all at once: a plugin that hangs delays the end of the container by
        one time limit.

        A failure is logged: the container has ended, whatever a driver reports.
        """
        named = [(point, self._volumes.get(point.name)) for point in points if isinstance(point.name, str)]
        unmounts = [self._unmount(container_id, point, record) for point, record in named if record is not None]
        if unmounts:
            await asyncio.gather(*unmounts)

    async def _unmount(self, container_id: str, point: MountPoint, record: VolumeRecord) -> None:
        try:
            driver = await self._driver(record.driver, f"unmount {record.name}")
            async with self._lock(record.name):
                await driver.unmount(record.name, _user(container_id, point))
        except EngineError as error:
            _log.warning("container %s: %s", container_id, error.message)
        self._events.publish("volume", "unmount", record.name, {"container": container_id, "driver": record.driver})

    @contextlib.asynccontextmanager
    async def opened(
        self, container_id: str, points: Sequence[MountPoint], subpaths: Mapping[str, str] = MappingProxyType({})
    ) -> AsyncIterator[list[tuple[MountPoint, int]]]:
        """Descriptors of the sources of its mounts, whether it runs or not, including mounts on
        them. They are closed with the context. `subpaths`: as for `mount`.
        """
        user = f"{container_id}/{secrets.token_hex(8)}"
        found: list[tuple[MountPoint, int]] = []
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(_close_all, found)
            for point in points:
                if not isinstance(point.name, str):
                    found.append((point, await opened(host_paths.run(sources.open_path, point.source, self._owner))))
                    continue
                record, driver = await self._to_mount(point.name)
                async with self._lock(record.name):
                    path = await driver.mount(record.name, record.options, _user(user, point))
                    stack.push_async_callback(self._leave, record, driver, _user(user, point))
                    where = Content(record.name, subpath=subpaths.get(point.destination, ""))
                    if record.driver == local.NAME:
                        found.append((point, await self._local.open_content(where)))
                if isinstance(driver, PluginDriver):
                    path = await stack.enter_async_context(self._visible(driver, record.name, path))
                    found.append((point, await self._local.open_content(where._replace(path=path))))
            yield found

    @contextlib.asynccontextmanager
    async def _visible(self, driver: PluginDriver, name: str, path: str) -> AsyncIterator[str]:
        """A path of this host for the path where a plugin has mounted a volume."""
        if not driver.managed:
            yield path
            return
        place = secrets.token_hex(16)
        tree = await driver.tree(name, path)
        try:
            places = await self._local.place(place, {name: Content(name, tree=tree)})
            yield places[name]
        finally:
            self._local.leave_places(place)
            await asyncio.to_thread(os.close, tree)

    async def _leave(self, record: VolumeRecord, driver: Driver, user: str) -> None:
        try:
            async with self._lock(record.name):
                await driver.unmount(record.name, user)
        except EngineError as error:
            _log.warning("volume %s: %s", record.name, error.message)

    @contextlib.asynccontextmanager
    async def leave(
        self, container_id: str, points: Sequence[MountPoint], named: Collection[str], *, anonymous: bool
    ) -> AsyncIterator[tuple[Change, ...]]:
        """A container's removal: the caller deletes its record together with the changes, within
        the context.

        `anonymous`: also remove its anonymous volumes, unless another container uses them or this
        one `named` them itself.
        """
        names = sorted({point.name for point in points if isinstance(point.name, str)})
        async with contextlib.AsyncExitStack() as locks:
            for name in names:
                await locks.enter_async_context(self._lock(name))
            hidden: list[tuple[VolumeRecord, Driver]] = []
            try:
                for name in names if anonymous else ():
                    record = self._volumes.get(name)
                    alone = self._users.get(name, {}).keys() <= {container_id}
                    if record is None or not record.anonymous or name in named or not alone:
                        continue
                    try:
                        driver = await self._driver(record.driver, f"remove {name}")
                        await driver.hide(name)
                    except EngineError as error:
                        _log.warning("container %s: cannot remove its volume: %s", container_id, error.message)
                    else:
                        hidden.append((record, driver))
                yield tuple(self._table.delete(record.name) for record, _ in hidden)
            except BaseException:
                for record, driver in hidden:
                    await self._restore(record, driver)
                raise
            self.release(container_id, names)
            for record, driver in hidden:
                await self._forget(record, driver)

    # --- one volume -------------------------------------------------------------------------------

    def _lock(self, name: str) -> asyncio.Lock:
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = asyncio.Lock()
        return lock

    def _use(self, name: str, container_id: str) -> None:
        self._users.setdefault(name, {})[container_id] = None

    def release(self, container_id: str, names: Iterable[str]) -> None:
        """Remove the container as a user of these volumes."""
        for name in names:
            users = self._users.get(name, {})
            users.pop(container_id, None)
            if not users:
                self._users.pop(name, None)

    async def _driver(self, name: str, what: str) -> Driver:
        """Raises NotFound `WHAT: error looking up volume plugin NAME: …`."""
        if name == local.NAME:
            return self._local
        try:
            return await self._plugins.get(name)
        except EngineError as error:
            raise type(error)(f"{what}: {error.message}") from error

    async def _make(
        self, name: str, driver: str, options: dict[str, str], labels: dict[str, str], *, anonymous: bool = False
    ) -> VolumeRecord:
        maker = await self._driver(driver, f"create {name}")
        await maker.create(name, options)
        path = ""
        if isinstance(maker, PluginDriver):
            # many plugins report it only while it is mounted
            with contextlib.suppress(EngineError):
                path = await maker.path(name)
        return _record(name, maker.name, options, labels, anonymous=anonymous, path=path)

    async def _keep(self, record: VolumeRecord) -> None:
        self._volumes[record.name] = record
        if record.driver == local.NAME:
            await self._local.keep(record.name)

    async def _undo(self, record: VolumeRecord) -> None:
        try:
            await (await self._driver(record.driver, f"remove {record.name}")).undo_create(record.name)
        except EngineError as error:
            _log.warning("volume %s is kept by its driver: %s", record.name, error.message)

    async def _restore(self, record: VolumeRecord, driver: Driver) -> None:
        """Its record stays after all. A failure is logged: the caller has the reason for that."""
        try:
            await driver.restore(record.name)
        except EngineError as error:
            _log.error("%s", error.message)

    async def _forget(self, record: VolumeRecord, driver: Driver | None = None) -> None:
        """Its row is deleted. Without `driver` its content stays, or is gone already."""
        self._volumes.pop(record.name, None)
        self._views.pop(record.name, None)
        if driver is not None:
            await driver.discard(record.name)
        self._events.publish("volume", "destroy", record.name, {"driver": record.driver})

    def _mountpoint(self, record: VolumeRecord) -> str:
        return self._local.mountpoint(record.name) if record.driver == local.NAME else record.path

    def _view(self, record: VolumeRecord) -> Volume:
        """As its record alone shows it; kept as long as that is the volume's."""
        kept = self._views.get(record.name)
        if kept is None or kept[0] is not record:
            view = views.merged(record, self._mountpoint(record), None)
            if self._volumes.get(record.name) is record:
                self._views[record.name] = record, view
            return view
        return kept[1]


def _record(
    name: str, driver: str, options: dict[str, str], labels: dict[str, str], *, anonymous: bool = False, path: str = ""
) -> VolumeRecord:
    return VolumeRecord(
        name=name,
        driver=driver,
        options=options,
        labels=labels,
        created=time.time_ns(),
        anonymous=anonymous,
        path=path,
    )


class Mounted(msgspec.Struct, frozen=True):
    """A container's mounts as inspect shows them now, and their paths for the runtime where these
    differ from Source.
    """

    points: tuple[MountPoint, ...]
    sources: dict[str, str]


def _user(container_id: str, point: MountPoint) -> str:
    """The ID of one mount of one container.

    Derived, so that a later daemon passes the same ID to a plugin.
    """
    return hashlib.sha256(f"{container_id}:{point.destination}".encode(errors="surrogateescape")).hexdigest()


def _close_all(opened: Iterable[tuple[MountPoint, int]]) -> None:
    for _, descriptor in opened:
        os.close(descriptor)
