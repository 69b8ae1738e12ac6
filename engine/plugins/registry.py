"""All plugins of one engine by name: the managed ones first, then those that are found by a socket
or a file. Each is activated on first use (POST /Plugin.Activate) and names the kinds of driver it
implements.

Owns: the clients. Which objects use a plugin is asked of the parts that have the objects (`users`),
so that no count can be wrong.
Raises: NotFound in Docker's words for a plugin that does not exist or does not implement the kind,
ServerError for one that fails.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterable

from engine.errors import NotFound, ServerError, words
from engine.plugins.client import Managed, Plugin, connect
from engine.plugins.discovery import Discovery, Endpoint

Users = Callable[[str], Iterable[str]]
"""Names the objects that use the plugin of a name, for people: `volume data`. Must not block."""


class Plugins:
    """One engine's."""

    def __init__(self, discovery: Discovery, timeout: float) -> None:
        """`timeout`: seconds that one call may take."""
        self._discovery = discovery
        self._timeout = timeout
        self._silent: set[str] | None = None
        """See `Plugin.hurry`."""
        self._active: dict[str, tuple[Endpoint, Plugin]] = {}
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        """By name, held during activation: a plugin that is in use must not be replaced by a
        second activation.
        """
        self.find_managed: Callable[[str], Managed | None] = lambda name: None
        """The managed plugin that `NAME` or `NAME:TAG` means. Must not block."""
        self.all_managed: Callable[[], Iterable[Managed]] = tuple
        self.users: list[Users] = []
        self.needed: set[str] = set()
        """Managed plugins without which this daemon refuses every request: they cannot be disabled
        by force either.
        """

    async def get(self, name: str, kind: str, *, patient: bool = True) -> Plugin:
        """The plugin, activated. `patient`: as in `Plugin.call`.

        Raises NotFound in Docker's words when it does not exist, is disabled, or does not implement
        `kind`; ServerError when its file is invalid or it does not answer.
        """
        managed = self.find_managed(name)
        if managed is not None:
            if not managed.enabled:
                raise NotFound(f'plugin "{managed.name}" found but disabled')
            if kind.lower() not in managed.kinds:
                raise NotFound(f'plugin "{managed.name}" does not implement the requested interface: {kind}')
            name, found = managed.name, managed.endpoint
        else:
            found = await self._found(name)
        async with self._locks.setdefault(name, asyncio.Lock()):
            endpoint, plugin = self._active.get(name, (None, None))
            if plugin is None or endpoint != found:
                await self.forget(name)
                plugin = await self._activated(name, found, managed, patient)
                self._active[name] = (found, plugin)
            elif kind.lower() not in plugin.implements:
                await plugin.activate(patient=patient)  # it may be another program by now
        if kind.lower() not in plugin.implements:
            raise NotFound(f"plugin {name} does not implement the requested interface: {kind}")
        return plugin

    async def exists(self, name: str) -> bool:
        """There is a plugin of that name, whether it answers or not. Raises ServerError when its
        file is invalid.
        """
        try:
            return self.find_managed(name) is not None or bool(await self._found(name))
        except NotFound:
            return False

    async def _found(self, name: str) -> Endpoint:
        try:
            found = await asyncio.to_thread(self._discovery.find, name)
        except (OSError, ValueError) as error:
            raise ServerError(words(error)) from error
        if found is None:
            raise NotFound(f'plugin "{name[:200]}" not found')
        return found

    async def _activated(self, name: str, found: Endpoint, managed: Managed | None, patient: bool) -> Plugin:
        plugin = await connect(name, found, self._timeout)
        plugin.managed = managed
        if self._silent is not None:
            plugin.hurry(self._timeout, self._silent)
        try:
            await plugin.activate(patient=patient)
        except BaseException:
            await plugin.close()
            raise
        return plugin

    async def forget(self, name: str) -> None:
        """Close the client of a plugin that has ended. The next use activates it again."""
        active = self._active.pop(name, None)
        if active is not None:
            await active[1].close()

    def active(self, kind: str) -> list[str]:
        """Names of the plugins of this kind that have been used, and of the managed ones that are
        enabled.
        """
        used = {name for name, (_, plugin) in self._active.items() if kind.lower() in plugin.implements}
        managed = {each.name for each in self.all_managed() if each.enabled and kind.lower() in each.kinds}
        return sorted(used | managed)

    async def names(self, kind: str) -> list[str]:
        """Names of all plugins that may be of this kind: those found by a socket or a file, whether
        they answer or not, unless they have named other kinds, and the managed ones that are
        enabled.
        """
        found = self._discovery.known()
        if found is None:
            found = await asyncio.to_thread(self._discovery.names)
        others = {name for name, (_, plugin) in self._active.items() if kind.lower() not in plugin.implements}
        managed = {each.name for each in self.all_managed() if each.enabled and kind.lower() in each.kinds}
        return sorted(managed.union(found) - others)

    def hurry(self, seconds: float) -> None:
        """The engine stops: no call takes longer from now on, and a plugin that has not answered
        one is not called again.
        """
        self._timeout = min(self._timeout, seconds)
        if self._silent is None:
            self._silent = set()
        for _, plugin in self._active.values():
            plugin.hurry(self._timeout, self._silent)

    def in_use(self, name: str) -> list[str]:
        """The objects that use the plugin, as their parts name them."""
        return [user for users in self.users for user in users(name)]

    async def close(self) -> None:
        for _, plugin in self._active.values():
            await plugin.close()
        self._active.clear()
        self._discovery.close()
