"""Removal from the build cache: POST /build/prune, and the budget after each build.

A record can go when its image has no name, no container and no image made from it; then the image
goes with it, so records are removed from the newest step of a chain to its base. The same holds for
deleted images, which the store keeps for the cache. With `all`, the records of images that stay for
a name are forgotten. The least recently used go first.

Rules: Docker Engine API, BuildPrune.
Owns:  nothing. Threads: the event loop's; file systems are asked in threads.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import NamedTuple

from engine.build.cache import StepRecord
from engine.build.options import PruneOptions
from engine.build.parts import Parts
from engine.errors import EngineError
from engine.images.record import ImageRecord
from engine.system.tasks import spawn
from engine.wire.build import PruneReport

PART_OF_DISK = 10
LEAST_BUDGET = 2 << 30
"""The cache may have a tenth of the disk, and this many bytes in any case."""

WALK_EVERY = 300
"""Seconds between two sums of the files in cache mounts."""

STEP, CACHE_MOUNT = "regular", "exec.cachemount"
"""BuildKit's names of the two types of records."""

_log = logging.getLogger(__name__)


class Entry(NamedTuple):
    """One record of the cache as prune sees it. Times in ns since the epoch."""

    id: str
    parent: str
    type: str
    description: str
    size: int
    """Bytes that only this record holds."""
    created: int
    used: int
    uses: int
    in_use: bool
    """A build uses it now."""
    shared: bool
    """Its image has a name, or a container or another image needs it."""


async def entries(parts: Parts) -> list[Entry]:
    """Everything in the cache, the least recently used first."""
    images = parts.images
    found = []
    async for key, step in _steps(parts):
        found.append(
            Entry(
                *(key, step.parent, STEP, step.text, _size(parts, step), step.created, step.last_used, step.uses),
                in_use=step.image_id in parts.cache.used,
                shared=not _removable(parts, step.image_id),
            )
        )
    for cache in await images.layers.work(parts.caches.all):
        what = f"mount cache {cache.id}"
        found.append(
            Entry(*(cache.name, "", CACHE_MOUNT, what, cache.size, cache.used, cache.used, 0, cache.in_use, False))
        )
    return sorted(found, key=lambda each: each.used)


async def _steps(parts: Parts) -> AsyncIterator[tuple[str, StepRecord]]:
    """Every step. There may be many thousands: other tasks run in between."""
    for number, each in enumerate(parts.cache, 1):
        if not number % 100:
            await asyncio.sleep(0)
        yield each


def _size(parts: Parts, step: StepRecord) -> int:
    """Bytes of the layer that the step's image adds to its parent's."""
    record = _record(parts, step.image_id)
    if record is None or not record.chain_ids:
        return 0
    parent = _record(parts, record.parent)
    if parent is not None and len(parent.chain_ids) == len(record.chain_ids):
        return 0
    layer = parts.images.snapshots.layer(record.chain_ids[-1])
    return layer.size if layer is not None else 0


def _record(parts: Parts, image_id: str) -> ImageRecord | None:
    """The image, or the one that the cache alone has."""
    return parts.images.index.find(image_id) or parts.images.kept.find(image_id)


def _removable(parts: Parts, image_id: str) -> bool:
    images = parts.images
    record = _record(parts, image_id)
    needed = images.index.has_children(image_id) or images.kept.has_children(image_id)
    return record is not None and record.nameless and not needed


async def prune(parts: Parts, options: PruneOptions) -> PruneReport:
    """Remove what the options say. Raises ServerError."""
    await parts.cache.write()
    deleted: dict[str, None] = {}
    reclaimed = 0
    known = await entries(parts)  # once: it reads the directories of cache mounts
    total = sum(entry.size for entry in known)
    keep = await _bytes_to_keep(parts, options, total)
    below: dict[str, list[Entry]] = {}
    """Entries that the image of another step needs, by their image."""
    waiting = deque(known)
    for number in itertools.count(1):
        if not waiting or (keep is not None and total <= keep):
            break
        if not number % 100:
            await asyncio.sleep(0)
        entry = waiting.popleft()
        step = parts.cache.get(entry.id)
        parent = ""
        if step is not None:
            if not _removable(parts, step.image_id):
                below.setdefault(step.image_id, []).append(entry)
                continue
            record = _record(parts, step.image_id)
            parent = record.parent if record is not None else ""
            entry = entry._replace(shared=False, in_use=step.image_id in parts.cache.used)
        if not _matches(entry, options) or not await _remove(parts, entry):
            continue
        deleted[entry.id] = None
        reclaimed += entry.size
        total -= entry.size
        # They were used before the others that wait.
        waiting.extendleft(reversed(below.pop(parent, [])))
    if options.all:
        named = _named(parts)
        for entry in known:
            if keep is not None and total <= keep:
                break
            step = parts.cache.get(entry.id)
            if step is not None and step.image_id in named and not entry.in_use and _matches(entry, options):
                parts.cache.drop([entry.id])
                deleted[entry.id] = None
                total -= entry.size
    parts.events.publish("builder", "prune", "", {"reclaimed": str(reclaimed)})
    return PruneReport(caches_deleted=[*deleted] or None, space_reclaimed=reclaimed)


async def _remove(parts: Parts, entry: Entry) -> bool:
    """Remove one record with its image. False if it has to stay."""
    if entry.in_use:
        return False
    if entry.type == CACHE_MOUNT:
        return await parts.caches.remove(entry.id)
    step = parts.cache.get(entry.id)
    if step is None or not await parts.images.delete_cached(step.image_id):
        return False
    parts.cache.drop([entry.id])
    return True


def _named(parts: Parts) -> set[str]:
    """Images that stay because they, or images made from them, have names."""
    found: set[str] = set()
    for record in parts.images.index:
        image_id = "" if record.nameless else record.id
        while image_id and image_id not in found:
            found.add(image_id)
            above = parts.images.index.find(image_id)
            image_id = above.parent if above is not None else ""
    return found


def _matches(entry: Entry, options: PruneOptions) -> bool:
    if options.unused_since_ns and entry.used >= options.unused_since_ns:
        return False
    shown = {
        "id": entry.id,
        "parent": entry.parent,
        "type": entry.type,
        "description": entry.description,
        "inuse": str(entry.in_use).lower(),
        "shared": str(entry.shared).lower(),
        "private": str(not entry.shared).lower(),
    }
    for name, wanted in options.filters.items():
        if name == "label":  # no record has one
            return False
        if name == "label!":
            continue
        value = shown[name]
        if not any(_equal(name, value, each) for each in wanted):
            return False
    return True


def _equal(name: str, value: str, wanted: str) -> bool:
    if name in ("inuse", "shared", "private"):
        return value == {"1": "true", "0": "false"}.get(wanted, wanted.lower())
    return value.startswith(wanted) if name in ("id", "parent") else value == wanted


async def _bytes_to_keep(parts: Parts, options: PruneOptions, total: int) -> int | None:
    """The size of the cache that is small enough; None when everything that matches goes."""
    if not (options.reserved_space or options.max_used_space or options.min_free_space):
        return None
    keep = total
    if options.max_used_space:
        keep = min(keep, options.max_used_space)
    if options.min_free_space:
        disk = await asyncio.to_thread(os.statvfs, parts.config.root)
        keep = min(keep, total - (options.min_free_space - disk.f_bavail * disk.f_frsize))
    if not options.max_used_space and not options.min_free_space:
        keep = options.reserved_space
    return max(keep, options.reserved_space)


class Budget:
    """Keeps the cache within its part of the disk, in the background."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._running: asyncio.Task[None] | None = None
        self._mounts = 0
        """Bytes of cache mounts, as of the last walk."""
        self._next_walk = 0.0

    def soon(self) -> None:
        """A build has ended: look, and remove what is too much."""
        if self._running is None or self._running.done():
            self._running = spawn(self._run(), "pruning the build cache")

    async def _run(self) -> None:
        parts = self._parts
        disk = await asyncio.to_thread(os.statvfs, parts.config.root)
        budget = max(LEAST_BUDGET, disk.f_blocks * disk.f_frsize // PART_OF_DISK)
        now = time.monotonic()
        if now >= self._next_walk:
            self._next_walk = now + WALK_EVERY
            self._mounts = sum(cache.size for cache in await parts.images.layers.work(parts.caches.all))
        total = self._mounts
        async for _, step in _steps(parts):
            total += _size(parts, step)
        if total <= budget:
            return
        try:
            report = await prune(parts, PruneOptions(max_used_space=budget))
        except EngineError as error:
            _log.warning("pruning the build cache: %s", error.message)
            return
        _log.info("build cache: removed %d bytes to keep %d", report.space_reclaimed, budget)


__all__ = ["CACHE_MOUNT", "LEAST_BUDGET", "PART_OF_DISK", "STEP", "Budget", "Entry", "entries", "prune"]
