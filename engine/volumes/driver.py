"""The interface of a volume driver: `local.LocalDriver`, `plugin.PluginDriver`.

A volume is made before its record is written, and taken away in two steps around the record's
deletion, so that a failure between them loses neither. Calls about one volume never overlap: the
store holds the volume's lock.

Raises: InvalidParameter for a name or options that the driver does not take, ServerError for what
fails, with the volume's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Driver(Protocol):
    """See the module. `user` identifies one mount of one container."""

    name: str
    scope: str

    async def create(self, name: str, options: Mapping[str, str]) -> None: ...
    async def undo_create(self, name: str) -> None:
        """Its record will not be written."""

    async def hide(self, name: str) -> None:
        """Its record is about to be deleted."""

    async def restore(self, name: str) -> None:
        """Its record stays after all."""

    async def discard(self, name: str) -> None:
        """Its record has been deleted."""

    async def mount(self, name: str, options: Mapping[str, str], user: str) -> str: ...
    async def unmount(self, name: str, user: str) -> None: ...
