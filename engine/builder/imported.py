"""Caches that a client's build names: steps that another engine has made, with their layers in a
registry or at the client.

A cache is believed only by the build that names it: its steps are looked up beside the engine's own
table, and a step that the build has used becomes one of its own. Its layers are fetched and
verified then. What cannot be fetched is a step to run, never a failure.

Threads: the event loop's.
Raises:  EngineError of a layer that cannot be fetched.
Not here: the configuration's form (`cacheconfig.py`), how it is found
         (`buildkit/cache_imports.py`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from engine.builder.cacheconfig import Steps
from engine.builder.output import Log
from engine.builder.parts import Parts
from engine.builder.reports import Transfer
from engine.common import times
from engine.errors import InvalidParameter
from engine.images.pull import Bringing
from engine.wire.images import Descriptor

_log = logging.getLogger(__name__)


class Blobs(Protocol):
    """Where the layers of a cache are: a repository of a registry, or a client's directory."""

    async def fetch(
        self, digest: str, size: int, target: int, report: Callable[[int], None], retrying: Any = ..., /
    ) -> None:
        """Receive a blob of `size` bytes into an empty file, and verify it. Raises ServerError."""


class ImportedLayer(NamedTuple):
    """The blob of a layer, and its diff_id."""

    blob: Descriptor
    diff_id: str


class Hit(NamedTuple):
    """A step's result in a cache: its layers, lowest first."""

    cache: ImportedCache
    layers: list[ImportedLayer]
    created: str
    """RFC 3339; empty if the cache does not say."""


class ImportedCache:
    """One cache. `layers`: those of `steps.layers` in their order; None where one is unusable."""

    def __init__(self, name: str, blobs: Blobs, steps: Steps, layers: Sequence[ImportedLayer | None]) -> None:
        self.name = name
        self.blobs = blobs
        self._steps = steps
        self._layers = layers

    def __len__(self) -> int:
        """Steps."""
        return len(self._steps.by_key)

    def find(self, key: str, below: Sequence[str]) -> Hit | None:
        """The result of a step on the layers `below`, by diff_id."""
        step = self._steps.by_key.get(key)
        if step is None:
            return None
        try:
            found = [self._layers[place] for place in self._steps.chain(step)]
        except InvalidParameter as error:
            _log.info("cache %s: %s", self.name, error.message)
            return None
        layers = [layer for layer in found if layer is not None]
        if len(layers) != len(found) or len(layers) - len(below) not in (0, 1):
            return None
        if any(layer.diff_id != diff_id for layer, diff_id in zip(layers, below, strict=False)):
            return None
        created = step.created if times.is_rfc3339(step.created) else ""
        return Hit(self, layers, created)


class Imports:
    """The caches of one build, in the order in which they are asked."""

    def __init__(self, caches: Sequence[ImportedCache]) -> None:
        self._caches = caches

    @property
    def names(self) -> list[str]:
        """The caches, as the client has named them. Builds that name others share no runs."""
        return [cache.name for cache in self._caches]

    def find(self, key: str, below: Sequence[str]) -> Hit | None:
        """The first result of a step on the layers `below`, by diff_id."""
        return next((hit for cache in self._caches if (hit := cache.find(key, below)) is not None), None)


async def bring(hit: Hit, parts: Parts, claim: Callable[[str], None], log: Log) -> None:
    """Have the layers of a result in the store, claimed."""
    blobs: Any = hit.cache.blobs
    work = Bringing(
        *(parts.images, parts.remote.downloads, blobs),
        [layer.blob for layer in hit.layers],
        [layer.diff_id for layer in hit.layers],
    )
    async with contextlib.aclosing(work.run(claim)) as steps:
        async for progress in steps:
            if progress.status != "Already exists":
                log.write(Transfer(status=progress.status, id=progress.id, progress_detail=progress.progress_detail))


__all__ = ["Blobs", "Hit", "ImportedCache", "ImportedLayer", "Imports", "bring"]
