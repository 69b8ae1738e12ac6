"""The managed plugins of an engine: their records, and every verb on them.

Owns:    the records of kind `plugin`, the claims on layers that follow from them, and the writable
         snapshot of each plugin, whose key is its id.
Threads: the event loop's. A plugin's lock covers each verb on it. The lock of the store covers the
         decision about a name until the record with it is visible.
Raises:  NotFound and InvalidParameter as Docker does; WrongState for what the state of a plugin or
         its users forbid.
Not here: registries (pull.py, push.py), archives (making.py), processes (process.py), which other
objects use a plugin (`Plugins.users`).

The row is the commit point, as for containers. An install makes layers, which the pull alone
claims, then the snapshot, then the row. An upgrade puts a snapshot on the new layers in the old
one's place before it writes the row. After a crash `open` compares snapshots with records, and the
sweep at start removes layers and snapshots that no record names.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from engine.errors import EngineError, InvalidParameter, NotFound, WrongState, words
from engine.events import EventLog
from engine.images import reference
from engine.images.credentials import Credentials
from engine.images.layers import chain_ids
from engine.images.reference import Reference
from engine.images.remote import Remote
from engine.images.store import ImageStore
from engine.managed_plugins import making, privileges, pull, push, settings
from engine.managed_plugins.pull import Fetching, Found
from engine.managed_plugins.record import PluginRecord
from engine.plugins.discovery import Endpoint
from engine.plugins.registry import Plugins
from engine.storage.records import Records
from engine.system.threads import whole
from engine.wire.images import Descriptor, Progress
from engine.wire.plugins import PluginConfig, PluginInspect, PluginPrivilege

FILTERS = ("capability", "enable", "enabled")

_replace = msgspec.structs.replace
_log = logging.getLogger(__name__)


class Processes(Protocol):
    """The processes of plugins (process.py)."""

    async def start(self, record: PluginRecord, timeout: float) -> None: ...
    def give_up(self, plugin_id: str) -> None: ...
    async def stop(self, record: PluginRecord) -> None: ...
    async def open(self, records: Iterable[PluginRecord]) -> None: ...
    async def discard(self, plugin_id: str) -> None: ...
    def endpoint(self, record: PluginRecord) -> Endpoint: ...
    async def tree(self, record: PluginRecord, path: str) -> int: ...


class ManagedPlugin:
    """One plugin, as its users see it (`client.Managed`)."""

    def __init__(self, record: PluginRecord, processes: Processes) -> None:
        self.record = record
        """Replaced whole."""
        self.lock = asyncio.Lock()
        self.leaving = False
        """It is being disabled: nothing may begin to use it."""
        self.starting = False
        """It is being enabled, which takes as long as its client allows."""
        self.gone = False
        """Its record was deleted."""
        self._processes = processes

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def enabled(self) -> bool:
        return self.record.enabled and not self.leaving

    @property
    def endpoint(self) -> Endpoint:
        return self._processes.endpoint(self.record)

    @property
    def kinds(self) -> frozenset[str]:
        return self.record.kinds

    async def tree(self, path: str) -> int:
        return await self._processes.tree(self.record, path)


class Installing:
    """An install or upgrade whose plugin was found in a registry; `run` does the work."""

    def __init__(
        self,
        images: ImageStore,
        name: str,
        fetching: Fetching,
        keep: Callable[[PluginConfig], Awaitable[None]],
    ) -> None:
        self.name = name
        """That of the plugin here, with its tag."""
        self.privileges: Sequence[PluginPrivilege] = privileges.required(fetching.config)
        self._images = images
        self._fetching = fetching
        self._keep = keep

    async def run(self) -> AsyncGenerator[Progress, None]:
        """Raises EngineError; nothing is left behind then."""
        async with self._images.claimed() as claim:
            async with contextlib.aclosing(self._fetching.run(claim)) as steps:
                async for progress in steps:
                    yield progress
            await self._images.snapshots.settle()
            await self._keep(self._fetching.config)
        yield Progress(status=f"Status: Downloaded newer image for {self.name}")


class ManagedPlugins:
    """All of one engine."""

    def __init__(
        self,
        records: Records,
        images: ImageStore,
        remote: Remote,
        events: EventLog,
        plugins: Plugins,
        processes: Processes,
    ) -> None:
        self._records = records
        self._table = records.table("plugin", PluginRecord)
        self._images = images
        self._snapshots = images.snapshots
        self._remote = remote
        self._events = events
        self._plugins = plugins
        self._processes = processes
        self._all: dict[str, ManagedPlugin] = {}
        self._by_name: dict[str, ManagedPlugin] = {}
        self._changing = asyncio.Lock()

    async def open(self) -> None:
        """Load the records, repair what a crash has left, and run the enabled ones."""
        for record in self._table.load().values():
            self._show(record)
            try:
                await self._repair(record)
            except EngineError as error:
                # It can be upgraded or removed. Those that use it see that it does not run.
                _log.error("plugin %s cannot run: %s", record.name, error.message)
        self._plugins.find_managed = self.named
        self._plugins.all_managed = self._all.values
        await self._processes.open([plugin.record for plugin in self])

    async def _repair(self, record: PluginRecord) -> None:
        """Make the snapshot of a plugin again, whose upgrade has failed or was interrupted."""
        if self._snapshots.parent(record.id) != record.chain_id:
            _log.warning("plugin %s: an upgrade has not succeeded, its root is made again", record.name)
            await self._snapshots.remove(record.id)
            await self._snapshots.prepare(record.id, record.chain_id or None)

    # --- reading ----------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[ManagedPlugin]:
        return iter(self._all.values())

    def __contains__(self, plugin_id: str) -> bool:
        return plugin_id in self._all

    def ids(self) -> set[str]:
        return set(self._all)

    def chain_ids(self) -> set[str]:
        """Every layer that a plugin needs."""
        return {chain_id for plugin in self for chain_id in chain_ids(plugin.record.config.rootfs.diff_ids)}

    def named(self, name: str) -> ManagedPlugin | None:
        """The plugin that `NAME` or `NAME:TAG` means, in short or in full."""
        plugin = self._by_name.get(name)
        if plugin is None and self._all:
            with contextlib.suppress(InvalidParameter):
                found = reference.parse(name)
                plugin = None if found.digest else self._by_name.get(found.tagged().familiar)
        return plugin

    def get(self, name: str) -> ManagedPlugin:
        """The plugin with this name, id or unique beginning of an id. Raises NotFound, and
        InvalidParameter for an ambiguous one.
        """
        found = self._all.get(name) or self.named(name)
        if found is not None:
            return found
        matching = [plugin for plugin in self if name and plugin.id.startswith(name)]
        if len(matching) > 1:
            raise InvalidParameter(f'multiple plugins found for "{name[:200]}"')
        if not matching:
            raise NotFound(f'plugin "{name[:300]}" not found')
        return matching[0]

    def inspect(self, name: str) -> PluginInspect:
        return _shown(self.get(name).record)

    def select(self, filters: Mapping[str, Sequence[str]], enabled: bool | None) -> list[PluginInspect]:
        """Those of the filter `capability`, by name; with `enabled` only those that are, or are
        not."""
        wanted = {kind.lower() for kind in filters.get("capability", ())}
        return [
            _shown(plugin.record)
            for plugin in sorted(self, key=lambda plugin: plugin.name)
            if enabled in (None, plugin.enabled) and (not wanted or wanted & plugin.kinds)
        ]

    # --- install ----------------------------------------------------------------------------------

    async def privileges(self, remote: str, credentials: Credentials) -> list[PluginPrivilege]:
        """Those that the plugin of this name in its registry asks for."""
        return privileges.required((await self._found(_remote_name(remote), credentials)).config)

    async def _found(self, name: Reference, credentials: Credentials) -> Found:
        repository = await self._remote.repository(name, credentials)
        with self._images.idle.work():
            return await pull.find(repository, name)

    async def pull(
        self, remote: str, name: str, credentials: Credentials, accepted: Sequence[PluginPrivilege] | None
    ) -> Installing:
        """Find a plugin in its registry, to install it as `name`, by default the name there.
        `accepted`: the privileges that its user has accepted; None where clients are not asked.

        Raises InvalidParameter for a malformed name and for other privileges than it asks for,
        WrongState when the name is taken, NotFound for a plugin that is not there.
        """
        far = _remote_name(remote)
        near = _local_name(name) if name else reference.parse(remote)._replace(digest="").tagged()
        self._check_free(near.familiar)
        found = await self._found(far, credentials)
        if accepted is not None:
            privileges.check(near.familiar, privileges.required(found.config), accepted)

        async def keep(config: PluginConfig) -> None:
            blobs = found.resolved.manifest.layers
            record = await self._install(near.familiar, far.canonical, config, found.document, blobs)
            self._publish(record, "pull")

        return Installing(self._images, near.familiar, Fetching(self._images, self._remote.downloads, found), keep)

    async def create(self, name: str, body: AsyncIterator[bytes]) -> None:
        """Make a plugin of an archive of its config and root. Raises InvalidParameter for a bad
        archive, WrongState when the name is taken.
        """
        near = _local_name(name)
        self._check_free(near.familiar)
        with self._images.idle.work():
            async with self._images.claimed() as claim:
                made = await making.make(self._images, body, claim)
                await self._snapshots.settle()
                record = await self._install(near.familiar, near.canonical, made.config, made.document)
        self._publish(record, "create")

    def _check_free(self, name: str) -> None:
        if name in self._by_name:
            raise WrongState(f"plugin {name} already exists")

    @whole
    async def _install(
        self, name: str, origin: str, config: PluginConfig, document: bytes, blobs: Sequence[Descriptor] = ()
    ) -> PluginRecord:
        """Make the snapshot and the record of a plugin whose layers exist and are claimed."""
        async with self._changing:
            self._check_free(name)
            record = PluginRecord(
                id=secrets.token_hex(32),
                name=name,
                reference=origin,
                config=config,
                settings=settings.initial(config),
                chain_id=_top(config),
                document=document,
                blobs=_bare(blobs),
            )
            await self._snapshots.prepare(record.id, record.chain_id or None)
            try:
                await self._records.commit(self._table.put(record.id, record))
            except BaseException:
                await self._snapshots.remove(record.id)
                raise
            self._show(record)
        return record

    def _show(self, record: PluginRecord) -> None:
        """A committed record of a new plugin, to readers. It keeps its layers."""
        plugin = ManagedPlugin(record, self._processes)
        self._all[record.id] = self._by_name[record.name] = plugin
        if record.chain_id:
            self._snapshots.retain(record.chain_id)

    def _publish(self, record: PluginRecord, action: str) -> None:
        self._events.publish("plugin", action, record.id, {"name": record.name})

    # --- upgrade ----------------------------------------------------------------------------------

    async def upgrade(
        self, name: str, remote: str, credentials: Credentials, accepted: Sequence[PluginPrivilege]
    ) -> Installing:
        """Find the plugin that is to replace another one, which keeps its id, name and settings.
        Raises as `pull`, and WrongState when it is enabled.
        """
        plugin = self.get(name)
        _check_idle(plugin)
        _check_disabled(plugin, "upgrading")
        far = _remote_name(remote)
        found = await self._found(far, credentials)
        privileges.check(plugin.name, privileges.required(found.config), accepted)

        @whole
        async def keep(config: PluginConfig) -> None:
            async with self._held(plugin):
                _check_disabled(plugin, "upgrading")
                old = plugin.record
                record = _replace(
                    old,
                    reference=far.canonical,
                    config=config,
                    settings=settings.carried(old.config, old.settings, config),
                    chain_id=_top(config),
                    document=found.document,
                    blobs=_bare(found.resolved.manifest.layers),
                )
                await self._exchange(plugin, record)
            self._publish(record, "pull")

        return Installing(self._images, plugin.name, Fetching(self._images, self._remote.downloads, found), keep)

    async def _exchange(self, plugin: ManagedPlugin, record: PluginRecord) -> None:
        """Replace the root and the record of a plugin that does not run."""
        old = plugin.record
        try:
            await self._snapshots.remove(old.id)
            await self._snapshots.prepare(record.id, record.chain_id or None)
            await self._records.commit(self._table.put(record.id, record))
        except BaseException:
            await self._repair(old)
            raise
        plugin.record = record
        if record.chain_id:
            self._snapshots.retain(record.chain_id)
        await self._release(old)

    async def _release(self, record: PluginRecord, *, root: bool = False) -> None:
        """Give back the layers of a record that is no more, and with `root` its snapshot. This
        follows the commit, so a failure is not the caller's: the next start repeats it.
        """
        try:
            if root:
                await self._snapshots.remove(record.id)
                await self._processes.discard(record.id)
            if record.chain_id:
                await self._snapshots.release(record.chain_id)
        except (EngineError, OSError) as error:
            _log.warning("removing files of plugin %s: %s", record.name, words(error))

    # --- enable, disable, set, remove -------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _held(self, plugin: ManagedPlugin) -> AsyncIterator[None]:
        """The plugin's lock. Raises NotFound when it was removed meanwhile, and WrongState, without
        a wait, while it is being enabled.
        """
        _check_idle(plugin)
        async with plugin.lock:
            if plugin.gone:
                raise NotFound(f'plugin "{plugin.name}" not found')
            yield

    async def _save(self, plugin: ManagedPlugin, record: PluginRecord) -> None:
        await self._records.commit(self._table.put(record.id, record))
        plugin.record = record

    @whole
    async def enable(self, name: str, timeout: float) -> None:
        """Run it. `timeout`: seconds that it may take to listen on its socket.

        Raises WrongState when it is enabled already, ServerError when it does not run.
        """
        plugin = self.get(name)
        async with self._held(plugin):
            if plugin.record.enabled:
                raise WrongState(f"plugin {plugin.name} is already enabled")
            record = _replace(plugin.record, enabled=True)
            await self._repair(record)
            plugin.starting = True
            try:
                await self._processes.start(record, timeout)
            finally:
                plugin.starting = False
            try:
                await self._save(plugin, record)
            except BaseException:
                await self._processes.stop(record)
                raise
        self._publish(record, "enable")

    @whole
    async def disable(self, name: str, force: bool) -> None:
        """End it, or the start that another client waits for. Raises WrongState when it is
        disabled, and when something uses it, unless `force`; always when it authorizes requests.
        """
        plugin = self.get(name)
        given_up = await self._give_up_start(plugin)
        async with self._held(plugin):
            if given_up and not plugin.record.enabled:
                return
            if not plugin.record.enabled:
                raise WrongState(f"plugin {plugin.name} is already disabled")
            self._check_unused(plugin, force)
            await self._disable(plugin)

    async def _give_up_start(self, plugin: ManagedPlugin) -> bool:
        """Returns False if it is not being enabled."""
        if not plugin.starting:
            return False
        self._processes.give_up(plugin.id)
        async with plugin.lock:
            return True

    def _check_unused(self, plugin: ManagedPlugin, force: bool) -> None:
        if force and plugin.name not in self._plugins.needed:
            return
        users = self._plugins.in_use(plugin.name)
        if users:
            more = f" and {len(users) - 3} more" if len(users) > 3 else ""
            raise WrongState(f"plugin {plugin.name} is in use by {', '.join(users[:3])}{more}")

    async def _disable(self, plugin: ManagedPlugin) -> None:
        plugin.leaving = True
        try:
            await self._save(plugin, _replace(plugin.record, enabled=False))
        finally:
            plugin.leaving = False
        await self._plugins.forget(plugin.name)
        await self._processes.stop(plugin.record)
        self._publish(plugin.record, "disable")

    @whole
    async def set(self, name: str, changes: Sequence[str]) -> None:
        """Change its settings, all or none. Raises InvalidParameter for one that may not be set,
        WrongState when it is enabled.
        """
        plugin = self.get(name)
        async with self._held(plugin):
            if plugin.record.enabled:
                raise WrongState(
                    f"cannot set on an active plugin, disable plugin before setting: plugin {plugin.name} is enabled"
                )
            record = plugin.record
            await self._save(
                plugin, _replace(record, settings=settings.changed(record.config, record.settings, changes))
            )

    @whole
    async def remove(self, name: str, force: bool) -> PluginInspect:
        """Remove it; returns what it was. With `force` it is disabled first, also when something
        uses it. Raises WrongState.
        """
        plugin = self.get(name)
        if force:
            await self._give_up_start(plugin)
        async with self._held(plugin):
            self._check_unused(plugin, force)
            if plugin.record.enabled and not force:
                raise WrongState(f"plugin {plugin.name} is active: it is enabled")
            if plugin.record.enabled:
                await self._disable(plugin)
            record = plugin.record
            async with self._changing:
                await self._records.commit(self._table.delete(record.id))
                plugin.gone = True
                del self._all[record.id], self._by_name[record.name]
            self._publish(record, "remove")
            await self._release(record, root=True)
        return _shown(record)

    # --- push -------------------------------------------------------------------------------------

    async def push(self, name: str, credentials: Credentials) -> AsyncGenerator[Progress, None]:
        """A push to the registry that its name means."""
        record = self.get(name).record
        far = reference.parse(record.name)
        pushing = await self._remote.pushing(far, credentials)

        async def run() -> AsyncGenerator[Progress, None]:
            with self._images.idle.work():
                async with contextlib.aclosing(push.run(pushing, self._images, far, record)) as steps:
                    async for progress in steps:
                        yield progress
            self._publish(record, "push")

        return run()


def _shown(record: PluginRecord) -> PluginInspect:
    return PluginInspect(
        id=record.id,
        name=record.name,
        enabled=record.enabled,
        settings=record.settings,
        plugin_reference=record.reference,
        config=record.config,
    )


def _check_idle(plugin: ManagedPlugin) -> None:
    if plugin.starting:
        raise WrongState(f"plugin {plugin.name} is being enabled")


def _check_disabled(plugin: ManagedPlugin, verb: str) -> None:
    if plugin.record.enabled:
        raise WrongState(f"plugin must be disabled before {verb}: plugin {plugin.name} is enabled")


def _remote_name(text: str) -> Reference:
    """A plugin in a registry. A digest makes the tag meaningless."""
    return reference.parse(text).tagged()


def _local_name(text: str) -> Reference:
    name = reference.parse(text)
    if name.digest:
        raise InvalidParameter(f"cannot use digest in plugin tag: {text[:300]}")
    return name.tagged()


def _top(config: PluginConfig) -> str:
    """The chain_id of the topmost layer."""
    return (*chain_ids(config.rootfs.diff_ids),)[-1] if config.rootfs.diff_ids else ""


def _bare(blobs: Iterable[Descriptor]) -> tuple[Descriptor, ...]:
    return tuple(_replace(blob, annotations={}, platform=None) for blob in blobs)
