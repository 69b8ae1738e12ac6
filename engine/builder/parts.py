"""The parts of the engine that builds use."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass, field

from engine.builder.buildkit.session import Sessions
from engine.builder.cache import Cache
from engine.builder.caches import Caches
from engine.builder.kept import KeptContexts
from engine.builder.sharing import SharedSteps
from engine.config import Config
from engine.containers.containers import Containers
from engine.events import EventLog
from engine.images.remote import Remote
from engine.images.store import ImageStore

PARALLEL = 8
"""RUN steps of all builds that run at one time; the others wait."""

REMEMBERED = 4096
"""Layers in `LaidOut`."""


class LaidOut:
    """Layers that files gave lately: where they probably are, not what they hold."""

    def __init__(self) -> None:
        self._diff_ids: dict[Hashable, str] = {}

    def find(self, files: Hashable) -> str | None:
        """The diff_id of the layer of these files, if there was one."""
        return self._diff_ids.get(files)

    def add(self, files: Hashable, diff_id: str) -> None:
        """Remember that the files gave the layer, in place of the oldest ones."""
        self._diff_ids.pop(files, None)
        self._diff_ids[files] = diff_id
        if len(self._diff_ids) > REMEMBERED:
            del self._diff_ids[next(iter(self._diff_ids))]


@dataclass(frozen=True)
class Parts:
    """The parts of the engine that builds use."""

    config: Config
    containers: Containers
    images: ImageStore
    remote: Remote
    events: EventLog
    cache: Cache
    caches: Caches
    contexts: KeptContexts
    shared: SharedSteps
    sessions: Sessions
    laid_out: LaidOut = field(default_factory=LaidOut)
    running: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(PARALLEL))


__all__ = ["PARALLEL", "REMEMBERED", "LaidOut", "Parts"]
