"""The volume driver that calls a plugin (engine/plugins).

Rules: Docker's documentation, "Docker volume plugins"; messages as its client words them.
Raises: NotFound for a driver that does not exist, ServerError for one that fails.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence

from engine.errors import EngineError, InvalidParameter, NotFound, ServerError
from engine.plugins.client import Plugin, Refused
from engine.plugins.registry import Plugins
from engine.volumes import local, views
from engine.wire.volumes import PluginVolume, Volume, VolumeAnswer

_KIND = "VolumeDriver"


class PluginDriver:
    """A plugin as a volume driver; see `driver.Driver`."""

    def __init__(self, plugin: Plugin) -> None:
        self.name = plugin.name
        self.scope = "local"
        self.plugin = plugin

    @property
    def managed(self) -> bool:
        """True if the engine runs the plugin: it mounts volumes where the host does not see them,
        so they are used by their `tree`.
        """
        return self.plugin.managed is not None

    async def tree(self, name: str, path: str) -> int:
        """A detached copy of the mounts at a path that `mount` has returned, or below it. The
        caller closes it.
        """
        assert self.plugin.managed is not None
        try:
            return await self.plugin.managed.tree(path)
        except EngineError as error:
            raise type(error)(f"mount {name}: {error.message}") from error

    async def learn_scope(self) -> None:
        """Ask for the scope. A plugin without this call is local, as in Docker."""
        with contextlib.suppress(EngineError):
            found = (await self.plugin.call(f"{_KIND}.Capabilities", VolumeAnswer, {})).capabilities
            self.scope = "global" if found is not None and found.scope.lower() == "global" else "local"

    def check(self, name: str, options: Mapping[str, str]) -> None:
        if "\0" in name or len(name.encode()) > local.LONGEST_NAME:
            raise InvalidParameter(f"create {name[:40]!r}: invalid volume name")

    async def create(self, name: str, options: Mapping[str, str]) -> None:
        self.check(name, options)
        await self._call("create", name, "Create", Opts=dict(options))

    async def hide(self, name: str) -> None:
        await self._call("remove", name, "Remove")

    async def undo_create(self, name: str) -> None:
        await self._call("remove", name, "Remove")

    async def restore(self, name: str) -> None:
        """Nothing to do: what the plugin removed cannot come back, and the next call reports it."""

    async def discard(self, name: str) -> None:
        """Nothing to do: `hide` has removed the volume."""

    async def mount(self, name: str, options: Mapping[str, str], user: str) -> str:
        answer = await self._call("mount", name, "Mount", ID=user)
        if not answer.mountpoint or not answer.mountpoint.startswith("/"):
            raise ServerError(
                f'mount {name}: plugin "{self.name}" returned a mount point that is not an absolute path: '
                f"{answer.mountpoint!r}"
            )
        return answer.mountpoint

    async def unmount(self, name: str, user: str) -> None:
        await self._call("unmount", name, "Unmount", ID=user)

    async def path(self, name: str) -> str:
        """The volume's path; empty when the plugin does not know it."""
        return (await self._call("path", name, "Path")).mountpoint or ""

    async def get(self, name: str) -> PluginVolume:
        """The plugin's description of one volume. Gives up soon while the plugin is unreachable.

        Raises NotFound when it has none of that name.
        """
        try:
            found = (await self._call("get", name, "Get", patient=False)).volume
        except ServerError as error:
            raise NotFound(f"get {name}: no such volume: {error.message}") from error
        if found is None or found.name not in ("", name):
            raise NotFound(f"get {name}: no such volume")
        return found

    async def has(self, name: str) -> bool:
        """False if the plugin answers that it has no such volume, whose reason it may not state.
        Raises ServerError when it does not answer.
        """
        try:
            found = (await self.plugin.call(f"{_KIND}.Get", VolumeAnswer, {"Name": name})).volume
        except Refused:
            return False
        except NotFound:  # a plugin without this call
            return True
        except EngineError as error:
            raise ServerError(f"get {name}: {error.message}") from error
        return found is not None and found.name in ("", name)

    async def list(self) -> Sequence[PluginVolume]:
        """Its volumes. Gives up soon while the plugin is unreachable.

        Raises ServerError `list DRIVER: reason`.
        """
        try:
            found = (await self.plugin.call(f"{_KIND}.List", VolumeAnswer, {}, patient=False)).volumes or ()
        except EngineError as error:
            raise ServerError(f"list {self.name}: {error.message}") from error
        return [each for each in found if each.name]

    async def _call(self, verb: str, name: str, method: str, *, patient: bool = True, **more: object) -> VolumeAnswer:
        try:
            return await self.plugin.call(f"{_KIND}.{method}", VolumeAnswer, {"Name": name, **more}, patient=patient)
        except EngineError as error:
            raise ServerError(f"{verb} {name}: {error.message}") from error


class PluginDrivers:
    """The volume drivers among the plugins of this host."""

    def __init__(self, plugins: Plugins) -> None:
        self._plugins = plugins
        self._drivers: dict[str, PluginDriver] = {}

    async def get(self, name: str, *, patient: bool = True) -> PluginDriver:
        """The driver. `patient`: as in `Plugin.call`.

        Raises NotFound in Docker's words, ServerError when the plugin does not answer.
        """
        try:
            plugin = await self._plugins.get(name, _KIND, patient=patient)
        except EngineError as error:
            raise type(error)(f"error looking up volume plugin {name}: {error.message}") from error
        driver = self._drivers.get(plugin.name)
        if driver is None or driver.plugin is not plugin:
            driver = PluginDriver(plugin)
            await driver.learn_scope()
            self._drivers[plugin.name] = driver
        return driver

    def full_name(self, name: str) -> str:
        """The driver as records name it: `NAME:TAG` for a managed plugin."""
        managed = self._plugins.find_managed(name)
        return managed.name if managed is not None else name

    def active(self) -> list[str]:
        return self._plugins.active(_KIND)

    async def names(self) -> list[str]:
        """All plugins that may be volume drivers."""
        return await self._plugins.names(_KIND)

    async def listed(self) -> tuple[dict[str, Volume], list[str]]:
        """The volumes that plugins list, and an error for each plugin that does not answer."""
        names = await self.names()
        answers = await asyncio.gather(*(self._listed(name) for name in names), return_exceptions=True)
        found: dict[str, Volume] = {}
        warnings: list[str] = []
        for answer in answers:
            if isinstance(answer, NotFound):
                continue  # a plugin of another kind
            if isinstance(answer, EngineError):
                warnings.append(answer.message)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                driver, volumes = answer
                for each in volumes:
                    found.setdefault(each.name, views.of_plugin(each, driver.name, driver.scope))
        return found, warnings

    async def _listed(self, name: str) -> tuple[PluginDriver, Sequence[PluginVolume]]:
        driver = await self.get(name, patient=False)
        return driver, await driver.list()

    async def find(self, name: str) -> tuple[PluginDriver, PluginVolume] | None:
        """A volume that was created outside the engine: asks all plugins, and of those that know it
        the first by name wins.
        """
        answers = await asyncio.gather(*(self._known(each, name) for each in await self.names()))
        return next(filter(None, answers), None)

    async def _known(self, plugin: str, name: str) -> tuple[PluginDriver, PluginVolume] | None:
        with contextlib.suppress(EngineError):
            driver = await self.get(plugin, patient=False)
            return driver, await driver.get(name)
        return None
