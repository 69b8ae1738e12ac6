"""Networks and attachments as the daemon opens them, under one name: for tests that look at
both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine.config import Config
from engine.events import EventLog
from engine.networks.attachments import Attachments
from engine.networks.endpoints import Network
from engine.networks.networks import Networks
from engine.plugins.discovery import Discovery
from engine.plugins.registry import Plugins
from engine.storage.records import Records
from engine.system.system_bus import SystemBus


class Both(Attachments):
    """`Attachments`, with every method of its `Networks`."""

    def __init__(self, config: Config, records: Records, plugins: Plugins | None = None) -> None:
        """`plugins`: by default there are none."""
        plugins = plugins or Plugins(Discovery((), ()), 1.0)
        self.networks = Networks(config, records, EventLog(), plugins, SystemBus())
        super().__init__(self.networks)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.networks, name)

    def __iter__(self) -> Iterator[Network]:
        return iter(self.networks)

    async def open(self) -> None:
        await self.networks.open()
        await super().open()

    async def settle(self) -> None:
        await self.networks.settle()
        await super().settle()

    async def close(self, remove: bool = False) -> None:
        await super().close()
        await self.networks.close(remove)
