"""The builder of one engine, loaded when something needs it: a build, or what earlier ones have
left. Its modules are a third of all that a daemon loads, and most hosts only run containers.

Owns: the builder, once it is loaded. Threads: the event loop's; modules are loaded in a thread.
Not here: builds (`builder.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engine.builder.buildkit.session import Sessions
from engine.config import Config
from engine.containers.containers import Containers
from engine.events import EventLog
from engine.images.remote import Remote
from engine.images.store import ImageStore
from engine.storage.records import Records

if TYPE_CHECKING:
    from engine.builder.builder import Builder
    from engine.builder.prune import Entry

STEPS = "step"
"""The kind of the records of the build cache."""


class Builds:
    """See the module."""

    def __init__(
        self,
        config: Config,
        records: Records,
        containers: Containers,
        images: ImageStore,
        registries: Remote,
        events: EventLog,
        sessions: Sessions,
    ) -> None:
        self._parts = config, records, containers, images, registries, events, sessions
        self._builder: Builder | None = None
        self._loading = asyncio.Lock()

    async def open(self) -> None:
        """Load the builder if earlier builds have left anything: it knows which images are kept for
        the build cache, and removes what is too much. The image store is open.
        """
        if await asyncio.to_thread(self._left):
            await self.load()

    def _left(self) -> bool:
        config, records, _, images, *_ = self._parts
        with contextlib.suppress(FileNotFoundError), os.scandir(config.root / "build") as entries:
            if any(entries):
                return True
        return bool(images.kept.ids()) or bool(records.rows(STEPS))

    async def load(self) -> Builder:
        """The builder."""
        async with self._loading:
            if self._builder is None:
                module: Any = await asyncio.to_thread(importlib.import_module, "engine.builder.builder")
                builder: Builder = module.Builder(*self._parts)
                builder.open()
                self._builder = builder
        return self._builder

    async def usage(self) -> Sequence[Entry]:
        """As `Builder.usage`: nothing while nothing was built."""
        return [] if self._builder is None else await self._builder.usage()

    async def close(self) -> None:
        """As `Builder.close`."""
        if self._builder is not None:
            await self._builder.close()


__all__ = ["Builds"]
