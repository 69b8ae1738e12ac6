"""The parts of the engine that builds use."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from engine.build.buildkit.session import Sessions
from engine.build.cache import Cache
from engine.build.caches import Caches
from engine.build.kept import KeptContexts
from engine.build.sharing import SharedSteps
from engine.config import Config
from engine.containers.containers import Containers
from engine.events import EventLog
from engine.images.remote import Remote
from engine.images.store import ImageStore

PARALLEL = 8
"""RUN steps of all builds that run at one time; the others wait."""


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
    running: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(PARALLEL))


__all__ = ["PARALLEL", "Parts"]
