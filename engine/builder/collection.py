"""Garbage collection of the build cache: policies, and the background task after builds and at
start.

Each policy in turn removes what it chooses until the cache is as small as it says. Without policies
in the configuration they are dockerd's: kept contexts and files of cache mounts that were not used
for two days, then what was not used for 60 days, then what no image needs, then everything, the
last three within the same limits.

Owns:    the task. Threads: the event loop's; file systems are asked in threads.
Not here: the choice of records, and their removal (`prune.py`), which leaves alone what a running
         build uses.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Sequence

from engine.builder import prune
from engine.builder.options import PruneOptions
from engine.builder.parts import Parts
from engine.config import Config
from engine.config.cache import CachePolicy, policy, size
from engine.errors import EngineError
from engine.system.tasks import spawn
from engine.system.threads import cancelled

RESERVED, MAX_USED, MIN_FREE = 10, 80, 20
"""Default limits in percent of the disk."""
MOUNTS_SHARE = math.e * math.pi * (1 + math.sqrt(5)) / 2 / 100
"""The part of the reserved space that files of cache mounts may take: dockerd's."""
LEAST_MOUNTS = 512_000_000
DAY = 86_400_000_000_000

QUIET = 0.2
"""Seconds before a collection: after a build's end its client has more questions."""
DISK_EVERY = 60
"""Seconds between two looks at the disk's size: clients ask for the policies in each build."""
COUNT_EVERY = 300
"""Seconds after which the files of a cache mount that is known are counted again."""

_log = logging.getLogger(__name__)


def policies(config: Config, disk: int) -> list[CachePolicy]:
    """The policies in force, in order; none if the collection is off. `disk`: its size."""
    if not config.build_gc:
        return []
    if config.build_policies:
        return [policy(text) for text in config.build_policies]
    reserved, used, free = (
        size(text or "0") for text in (config.build_reserved, config.build_max_used, config.build_min_free)
    )
    if not (reserved or used or free):
        reserved, used, free = (_part(disk, percent) for percent in (RESERVED, MAX_USED, MIN_FREE))
    limits = CachePolicy(reserved=reserved, max_used=used, min_free=free)
    mounts = max(LEAST_MOUNTS, int(reserved * MOUNTS_SHARE))
    return [
        CachePolicy(unused_for=2 * DAY, filters={"type": (prune.CONTEXT, prune.CACHE_MOUNT)}, max_used=mounts),
        limits._replace(unused_for=60 * DAY),
        limits,
        limits._replace(all=True),
    ]


def _part(disk: int, percent: int) -> int:
    """As dockerd rounds it: as many GB as it has GiB, upwards."""
    return ((disk * percent // 100 >> 30) + 1) * 1_000_000_000


def options_of(chosen: CachePolicy) -> PruneOptions:
    """The prune that a policy does now."""
    return PruneOptions(
        all=chosen.all,
        filters=chosen.filters,
        unused_since_ns=time.time_ns() - chosen.unused_for if chosen.unused_for else 0,
        reserved_space=chosen.reserved,
        max_used_space=chosen.max_used,
        min_free_space=chosen.min_free,
    )


class Collector:
    """One engine's."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._running: asyncio.Task[None] | None = None
        self._again = False
        """A build has ended since the running collection began."""
        self._sizes: dict[str, int] = {}
        """Bytes of cache mounts, as they were last counted."""
        self._next_count = 0.0
        self._disk = 0
        """Its size."""
        self._next_look = 0.0

    async def policies(self) -> list[CachePolicy]:
        """Those in force."""
        if (now := time.monotonic()) >= self._next_look:
            disk = await asyncio.to_thread(os.statvfs, self._parts.config.root)
            self._disk, self._next_look = disk.f_blocks * disk.f_frsize, now + DISK_EVERY
        return policies(self._parts.config, self._disk)

    def soon(self) -> None:
        """A build has ended, or the engine starts: look, and remove what is too much."""
        self._again = True
        if self._parts.config.build_gc and (self._running is None or self._running.done()):
            self._running = spawn(self._run(), "collecting garbage of the build cache")

    async def close(self) -> None:
        """End a collection, after a removal that has begun. The next start looks again."""
        if self._running is not None:
            await cancelled(self._running)

    async def _run(self) -> None:
        while self._again:
            await asyncio.sleep(QUIET)
            self._again = False
            try:
                await self._apply(await self.policies())
            except EngineError as error:
                _log.warning("collecting garbage of the build cache: %s", error.message)

    async def _apply(self, chosen: Sequence[CachePolicy]) -> None:
        """Looks first: most builds leave nothing to do, and a prune reads more."""
        known: list[prune.Entry] | None = None
        for each in chosen:
            options = options_of(each)
            known = await self._entries() if known is None else known
            if await prune.is_due(self._parts, options, known):
                pruned = await prune.prune(self._parts, options)
                known, self._next_count = None, 0
                if pruned.entries:
                    _log.info("build cache: removed %d records, %d bytes", len(pruned.entries), pruned.reclaimed)

    async def _entries(self) -> list[prune.Entry]:
        """What is in the cache, with known sizes of cache mounts if they were counted lately."""
        now = time.monotonic()
        if now >= self._next_count:
            self._sizes, self._next_count = {}, now + COUNT_EVERY
        mounts = await prune.mounts(self._parts, self._sizes)
        # those in use may be growing
        self._sizes = {each.id: each.size for each in mounts if not each.in_use}
        return [*mounts, *prune.contexts(self._parts), *await prune.steps(self._parts)]


__all__ = ["Collector", "options_of", "policies"]
