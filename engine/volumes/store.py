"""Sources of a container's mounts: named volumes of the local driver, and host paths of binds.

Owns: ROOT/volumes/<name>/_data. Not here: the volumes API, drivers and their options.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

from engine.errors import ServerError
from engine.wire.containers import MountPoint


class VolumeStore:
    """Volumes below one directory, made when a container first names them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    async def ensure(self, mounts: Iterable[MountPoint]) -> None:
        """Make every source that is missing, as Docker does for Binds: a directory. Raises ServerError naming the path."""
        sources = [mount.source for mount in mounts]
        if sources:
            await asyncio.to_thread(_make_directories, sources)


def _make_directories(sources: list[str]) -> None:
    for source in sources:
        path = Path(source)
        try:
            if not path.exists():
                path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ServerError(f"error while creating mount source path '{source}': {error.strerror}") from error
