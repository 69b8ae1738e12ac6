"""Removal from the build cache: POST /build/prune, and what garbage collection does.

A record can go when its image has no name, no container and no image made from it; then the image
goes with it, so records are removed from the newest step of a chain to its base. The same holds for
deleted images, which the store keeps for the cache. With `all`, the records of images that stay are
forgotten: they have a name or a container, or an image was made from them by something else than a
step. The least recently used go first.

Rules: Docker Engine API, BuildPrune.
Not here: when garbage is collected (`collection.py`).
Owns:  nothing. Threads: the event loop's; file systems are asked in threads.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence, Set
from typing import NamedTuple, TypeVar

from engine.builder.cache import StepRecord
from engine.builder.options import PruneOptions
from engine.builder.parts import Parts
from engine.images.record import ImageRecord
from engine.system.threads import uninterrupted
from engine.wire.build import PruneReport

T = TypeVar("T")

STEP, CACHE_MOUNT, CONTEXT = "regular", "exec.cachemount", "source.local"
"""BuildKit's names of the types of records."""


MUTABLE = frozenset((CACHE_MOUNT, CONTEXT))
"""The types whose files change after they were made."""
TURN = 4
"""Entries that are compared with filters before other tasks run: patterns may take 0.25 ms for
each.
"""


class Entry(NamedTuple):
    """One record of the cache as prune sees it. Times in ns since the epoch."""

    id: str
    parent: str
    type: str
    description: str
    size: int
    """Bytes of the layer that it has made. If several records have that layer, it counts for the
    one that was used last.
    """
    created: int
    used: int
    uses: int
    in_use: bool
    """A build uses it now."""
    shared: bool
    """An image needs it that no prune of the cache removes, so its bytes stay without it."""


async def entries(parts: Parts) -> list[Entry]:
    """Everything in the cache, the least recently used first."""
    return await _entries(parts, await _lasting(parts))


async def _entries(parts: Parts, lasting: Set[str]) -> list[Entry]:
    found = [*await _steps(parts, lasting), *await mounts(parts), *contexts(parts)]
    return sorted(found, key=lambda each: each.used)


async def mounts(parts: Parts, sizes: Mapping[str, int] | None = None) -> list[Entry]:
    """The directories of cache mounts. Their files are counted, but those of the ones in `sizes`,
    by id.
    """
    return [
        Entry(
            *(cache.name, "", CACHE_MOUNT, f'cached mount with id "/{cache.id}"', cache.size),
            *(cache.created, cache.used, cache.uses),
            in_use=cache.in_use,
            shared=False,
        )
        for cache in await parts.images.layers.work(parts.caches.all, sizes or {})
    ]


def contexts(parts: Parts) -> list[Entry]:
    """The kept contexts of clients."""
    return [
        Entry(
            *(kept.key, "", CONTEXT, kept.what, kept.size, kept.used, kept.used, 0),
            in_use=kept.in_use,
            shared=False,
        )
        for kept in parts.contexts.all()
    ]


async def steps(parts: Parts) -> list[Entry]:
    """Every step once, whatever keys it has."""
    return await _steps(parts, await _lasting(parts))


async def _steps(parts: Parts, lasting: Set[str]) -> list[Entry]:
    images = parts.images
    kept: set[str] = set()
    async for image_id in _in_turns([*lasting]):
        if (record := images.index.find(image_id)) is not None:
            kept.update(record.chain_ids)
    counted: set[str] = set()
    found = []
    async for key, step in _in_turns(sorted(parts.cache, key=lambda each: each[1].last_used, reverse=True)):
        if step.same_as:
            continue
        layer = _layer(parts, step)
        size = 0
        if layer not in counted and (made := images.snapshots.layer(layer)) is not None:
            size = made.size
            counted.add(layer)
        found.append(
            Entry(
                *(key, step.parent, STEP, step.text, size, step.created, step.last_used, step.uses),
                in_use=step.image_id in parts.cache.used,
                shared=step.image_id in lasting or layer in kept,
            )
        )
    return found


def _layer(parts: Parts, step: StepRecord) -> str:
    """chain_id of the layer that the step's image adds to its parent's; "" if it adds none."""
    record = _record(parts, step.image_id)
    if record is None or not record.chain_ids:
        return ""
    parent = _record(parts, record.parent)
    if parent is not None and len(parent.chain_ids) == len(record.chain_ids):
        return ""
    return record.chain_ids[-1]


def _sum(entries: Iterable[Entry]) -> int:
    """The bytes that only the cache needs."""
    return sum(entry.size for entry in entries if not entry.shared)


def _record(parts: Parts, image_id: str) -> ImageRecord | None:
    """The image, or the one that the cache alone has."""
    return parts.images.index.find(image_id) or parts.images.kept.find(image_id)


def _removable(parts: Parts, image_id: str) -> bool:
    images = parts.images
    record = _record(parts, image_id)
    needed = images.index.has_children(image_id) or images.kept.has_children(image_id)
    return record is not None and record.nameless and not needed


class Pruned(NamedTuple):
    """What a prune has removed, and the bytes that it has freed."""

    entries: list[Entry]
    reclaimed: int

    @property
    def report(self) -> PruneReport:
        """As the API has it."""
        return PruneReport(caches_deleted=[entry.id for entry in self.entries] or None, space_reclaimed=self.reclaimed)


async def _in_turns(items: Sequence[T], turn: int = 100) -> AsyncGenerator[T, None]:
    """These items. There may be many thousands: other tasks run after every `turn` of them."""
    for number, item in enumerate(items, 1):
        yield item
        if not number % turn:
            await asyncio.sleep(0)


async def _lasting(parts: Parts) -> set[str]:
    """Ids of the images that no prune of the cache removes: those with a name or a container, those
    that no step made, and all that these were made from.
    """
    images = parts.images
    used = images.containers()
    found: set[str] = set()
    async for each in _in_turns([*images.index]):
        lasts = not each.nameless or each.id in used or not parts.cache.steps_of(each.id)
        record = each if lasts else None
        while record is not None and record.id not in found:
            found.add(record.id)
            record = images.index.find(record.parent)
    return found


async def prune(parts: Parts, options: PruneOptions) -> Pruned:
    """Remove what the options say. Raises ServerError."""
    await parts.cache.write()
    deleted: list[Entry] = []
    reclaimed = 0
    lasting = await _lasting(parts)
    known = await _entries(parts, lasting)  # once: it reads the directories of cache mounts
    total = _sum(known)
    keep = await _bytes_to_keep(parts, options, total)
    below: dict[str, list[Entry]] = {}
    """Entries that the image of another step needs, by their image."""
    waiting = deque(known)
    for number in itertools.count(1):
        if not waiting or (keep is not None and total - reclaimed <= keep):
            break
        if not number % TURN:
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
            entry = entry._replace(in_use=step.image_id in parts.cache.used)
        # Not cancelled half-way: a removal changes the store, its files and the cache.
        if not _matches(entry, options) or not await uninterrupted(_remove(parts, entry)):
            continue
        deleted.append(entry)
        reclaimed += _sum([entry])
        # They were used before the others that wait.
        waiting.extendleft(reversed(below.pop(parent, [])))
    if options.all:
        async for entry in _in_turns(known, TURN):
            if keep is not None and total - reclaimed <= keep:
                break
            step = parts.cache.get(entry.id)
            if step is None or step.image_id not in lasting or step.image_id in parts.cache.used:
                continue
            if _matches(entry, options):
                parts.cache.drop([*parts.cache.steps_of(step.image_id)])
                deleted.append(entry)
    parts.events.publish("builder", "prune", "", {"reclaimed": str(reclaimed)})
    return Pruned(deleted, reclaimed)


async def _remove(parts: Parts, entry: Entry) -> bool:
    """Remove one record with its image. False if it has to stay."""
    if entry.in_use:
        return False
    if entry.type == CACHE_MOUNT:
        return await parts.caches.remove(entry.id)
    if entry.type == CONTEXT:
        return await parts.contexts.remove(entry.id)
    step = parts.cache.get(entry.id)
    if step is None or not await parts.images.delete_cached(step.image_id):
        return False
    parts.cache.drop([*parts.cache.steps_of(step.image_id)])
    return True


def _matches(entry: Entry, options: PruneOptions) -> bool:
    if entry.shared and not options.all:
        return False
    if options.unused_since_ns and entry.used >= options.unused_since_ns:
        return False
    if options.condition is not None and not options.condition(entry):
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


async def is_due(parts: Parts, options: PruneOptions, known: Sequence[Entry]) -> bool:
    """True if a prune would look for something to remove among these entries."""
    total = _sum(known)
    keep = await _bytes_to_keep(parts, options, total)
    return (keep is None or total > keep) and any(_matches(entry, options) and not entry.in_use for entry in known)


__all__ = [
    "CACHE_MOUNT",
    "CONTEXT",
    "STEP",
    "Entry",
    "Pruned",
    "contexts",
    "entries",
    "is_due",
    "mounts",
    "prune",
    "steps",
]
