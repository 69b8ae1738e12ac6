"""BuildKit's API to clients (`POST /grpc`), loaded when the first client connects.

Owns: the services, once they are loaded. Threads: the event loop's; modules are loaded in a thread.
Not here: the services (`control.py`).
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engine.build.buildkit.session import Sessions
from engine.images.store import ImageStore

if TYPE_CHECKING:
    from engine.build.buildkit.control import Control
    from engine.build.buildkit.frontend import Builder


class BuildKit:
    """One engine's."""

    def __init__(self, sessions: Sessions, builder: Builder, images: ImageStore, gateway: Callable[[], str]) -> None:
        """`gateway`: the address that `host-gateway` stands for."""
        self._parts = (sessions, builder, images, gateway)
        self._control: Control | None = None
        self._loading = asyncio.Lock()

    async def load(self) -> Control:
        """The services."""
        async with self._loading:
            if self._control is None:
                module: Any = await asyncio.to_thread(importlib.import_module, "engine.build.buildkit.control")
                self._control = module.Control(module.Parts(*self._parts))
        return self._control

    async def close(self) -> None:
        """End every connection, and the builds with them."""
        if self._control is not None:
            await self._control.close()
