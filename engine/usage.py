"""Disk usage of images, containers, volumes and the build cache, and its totals.

Requests that ask for the same kind at the same time share one computation, because it may walk
large directory trees.

Rules: Docker Engine API, SystemDataUsage. Active are images with a container, containers that run
or are paused or restarting, volumes with a container, and records of the build cache that a build
uses. Other objects are reclaimable, without the bytes that they share with others.

Owns:    the running computations. Threads: the event loop's; the parts walk trees in threads.
Not here: encoding (`api/system.py`).
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from engine.builder.loading import Builds
from engine.common import times
from engine.common.turns import Turn
from engine.containers import listing, views
from engine.containers.containers import Containers
from engine.containers.lifecycle import State
from engine.containers.usage import Sizes
from engine.images.store import ImageStore
from engine.system.tasks import shield
from engine.volumes.store import VolumeStore
from engine.wire.containers import ContainerSummary
from engine.wire.images import ImageSummary
from engine.wire.system import CacheRecord
from engine.wire.volumes import Volume

T = TypeVar("T")

_ACTIVE = frozenset((State.RUNNING, State.PAUSED, State.RESTARTING))


class Kind(enum.StrEnum):
    """The kinds of objects, as the parameter `type` names them."""

    CONTAINER = "container"
    IMAGE = "image"
    VOLUME = "volume"
    BUILD_CACHE = "build-cache"


class Usage(NamedTuple, Generic[T]):
    """The objects of one kind, and their totals. Sizes in bytes."""

    items: Sequence[T]
    active: int
    size: int
    reclaimable: int


class Usages:
    """See the module."""

    def __init__(self, containers: Containers, images: ImageStore, volumes: VolumeStore, builder: Builds) -> None:
        self._containers = containers
        self._images = images
        self._volumes = volumes
        self._builder = builder
        self.sizes = Sizes()
        """Of containers."""
        self._running: dict[Kind, asyncio.Task[Any]] = {}

    async def images(self) -> Usage[ImageSummary]:
        """All images but those that only others were made from."""
        return await self._shared(Kind.IMAGE, self._of_images)

    async def containers(self) -> Usage[ContainerSummary]:
        """All containers with their sizes, newest first."""
        return await self._shared(Kind.CONTAINER, self._of_containers)

    async def volumes(self) -> Usage[Volume]:
        """The volumes whose files this engine keeps itself."""
        return await self._shared(Kind.VOLUME, self._of_volumes)

    async def build_cache(self) -> Usage[CacheRecord]:
        """The records of the build cache, the least recently used first."""
        return await self._shared(Kind.BUILD_CACHE, self._of_build_cache)

    async def _shared(self, kind: Kind, compute: Callable[[], Awaitable[Usage[T]]]) -> Usage[T]:
        """The result of the running computation, or of a new one. Cancelling a caller does not stop
        it, because others may wait for it.
        """
        running: asyncio.Task[Usage[T]] | None = self._running.get(kind)
        if running is None:
            running = self._running[kind] = asyncio.ensure_future(compute())
            running.add_done_callback(lambda done: self._done(kind, done))
        return await shield(running)

    def _done(self, kind: Kind, done: asyncio.Task[Any]) -> None:
        del self._running[kind]
        if not done.cancelled():
            done.exception()  # its callers raise it, unless all of them are gone

    async def _of_images(self) -> Usage[ImageSummary]:
        layers_size, items = self._images.usage()
        return image_usage(layers_size, items)

    async def _of_containers(self) -> Usage[ContainerSummary]:
        found = listing.select(self._containers, self._images, listing.Selection(all=True))
        sizes = await self.sizes.of(found)
        items = []
        now = time.time_ns()
        turn = Turn()
        for container, (own, whole) in zip(found, sizes, strict=True):
            await turn.over()
            if container.removed:
                continue
            status, _ = views.status_text(container.record.status, now)
            image = listing.image_shown(container.record, self._images)
            summary = views.summary(container.record, container.names, status, image)
            items.append(msgspec.structs.replace(summary, size_rw=own, size_root_fs=whole))
        return container_usage(items)

    async def _of_volumes(self) -> Usage[Volume]:
        return volume_usage(await self._volumes.usage())

    async def _of_build_cache(self) -> Usage[CacheRecord]:
        items = []
        turn = Turn()
        for entry in await self._builder.usage():
            await turn.over()
            parents = [entry.parent] if entry.parent else msgspec.UNSET
            items.append(
                CacheRecord(
                    id=entry.id,
                    parents=parents,
                    blank_parents=parents,
                    type=entry.type,
                    description=entry.description,
                    in_use=entry.in_use,
                    shared=entry.shared,
                    size=entry.size,
                    created_at=times.rfc3339(entry.created),
                    last_used_at=times.rfc3339(entry.used) if entry.used else None,
                    usage_count=entry.uses,
                )
            )
        return cache_usage(items)


def image_usage(layers_size: int, images: Sequence[ImageSummary]) -> Usage[ImageSummary]:
    """`layers_size`: the size of all layers, each counted once."""
    unused = [image for image in images if image.containers <= 0]
    reclaimable = sum(image.size - max(0, image.shared_size) for image in unused)
    return Usage(images, len(images) - len(unused), layers_size, reclaimable)


def container_usage(containers: Sequence[ContainerSummary]) -> Usage[ContainerSummary]:
    active = [container for container in containers if container.state in _ACTIVE]
    size = _sum(container.size_rw for container in containers)
    return Usage(containers, len(active), size, size - _sum(container.size_rw for container in active))


def volume_usage(volumes: Sequence[Volume]) -> Usage[Volume]:
    """Volumes whose size is unknown (-1) count without it."""
    found = [(volume.usage_data.ref_count, max(0, volume.usage_data.size)) for volume in volumes if volume.usage_data]
    return Usage(
        volumes,
        sum(users > 0 for users, _ in found),
        sum(size for _, size in found),
        sum(size for users, size in found if users <= 0),
    )


def cache_usage(records: Sequence[CacheRecord]) -> Usage[CacheRecord]:
    return Usage(
        records,
        sum(record.in_use for record in records),
        sum(record.size for record in records),
        sum(record.size for record in records if not (record.in_use or record.shared)),
    )


def _sum(sizes: Iterable[int | msgspec.UnsetType]) -> int:
    return sum(size for size in sizes if isinstance(size, int))
