"""BuildKit's API to clients (`POST /grpc`), loaded when the first client connects.

Owns: the services, once they are loaded. Threads: the event loop's; modules are loaded in a thread.
Not here: the services (`control.py`).
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engine.builder.buildkit.session import Sessions
from engine.builder.loading import Builds
from engine.common.times import parse_duration
from engine.config import Config
from engine.images.store import ImageStore
from engine.storage.records import Records

if TYPE_CHECKING:
    from engine.builder.buildkit.control import Control


class BuildKit:
    """One engine's."""

    def __init__(
        self,
        config: Config,
        records: Records,
        sessions: Sessions,
        builds: Builds,
        images: ImageStore,
        gateway: Callable[[], str],
    ) -> None:
        """`gateway`: the address that `host-gateway` stands for."""
        self._config = config
        self._records = records
        self._sessions = sessions
        self._builds = builds
        self._parts = (images, gateway)
        self._control: Control | None = None
        self._loading = asyncio.Lock()

    async def load(self) -> Control:
        """The services."""
        async with self._loading:
            if self._control is None:
                module, history = await asyncio.to_thread(self._loaded)
                await history.open()
                builder = await self._builds.load()
                self._control = module.Control(module.Parts(self._sessions, builder, *self._parts, history))
        return self._control

    def _loaded(self) -> tuple[Any, Any]:
        """The module of the services, and the build history. Blocking."""
        module: Any = importlib.import_module("engine.builder.buildkit.control")
        config = self._config
        limits = module.Limits(config.build_history_entries, parse_duration(config.build_history_age))
        return module, module.History(config.root, self._records, limits)

    async def close(self) -> None:
        """End every connection, and the builds with them."""
        if self._control is not None:
            await self._control.close()
