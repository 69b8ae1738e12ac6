"""Extraction of a loaded archive's layers, and the claims on layers that loads, pulls and other
operations hold until their images are recorded.

Not here: the archive (archive.py), extraction (layers.py), records (store.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence

from engine.images.archive import ArchivedImage
from engine.images.idle import Idle
from engine.images.layers import Extracted, Layers, chain_ids
from engine.images.progress import Reports
from engine.images.spans import Span
from engine.storage.snapshots import Snapshots
from engine.wire.images import Progress

_REPORT_EVERY = 1 << 19
"""Bytes of a layer between two progress objects at least."""


class Load:
    """The layers of one archive while they are made, claimed until `release`."""

    def __init__(self, layers: Layers, found: Sequence[ArchivedImage], claims: Claims) -> None:
        self._layers = layers
        self._found = found
        self._claims = claims
        self._reports = Reports()

    async def run(self) -> AsyncGenerator[Progress, None]:
        """Make every layer. Raises the first error after all work has ended."""
        async with contextlib.aclosing(self._reports.run(self._begin)) as steps:
            async for progress in steps:
                yield progress

    def _begin(self, group: asyncio.TaskGroup) -> None:
        tasks: dict[str, asyncio.Task[None]] = {}
        for image in self._found:
            below: asyncio.Task[None] | None = None
            parent = ""
            diff_ids = image.config.rootfs.diff_ids
            for diff_id, chain_id, span in zip(diff_ids, chain_ids(diff_ids), image.layers, strict=True):
                if chain_id not in tasks:
                    self._claims.claim(chain_id)
                    tasks[chain_id] = group.create_task(self._layer(chain_id, diff_id, parent, span, below))
                below, parent = tasks[chain_id], chain_id

    async def _layer(
        self, chain_id: str, diff_id: str, parent: str, span: Span | Extracted, below: asyncio.Task[None] | None
    ) -> None:
        report = self._reporter(diff_id, span.size)
        if await self._layers.ensure(chain_id, diff_id, parent, span, below, report):
            report(span.size)

    def _reporter(self, diff_id: str, total: int) -> Callable[[int], None]:
        last = -_REPORT_EVERY

        def report(current: int) -> None:
            nonlocal last
            current = min(current, total)
            if current - last >= _REPORT_EVERY or (current == total and last != total):
                last = current
                self._reports.say(diff_id, "Loading layer", current, total)

        return report

    async def release(self) -> None:
        await self._claims.release()


class Claims:
    """The layers that one operation needs until its images are recorded. Until `release` the engine
    does not count as idle (`idle.py`).
    """

    def __init__(self, snapshots: Snapshots, loading: dict[str, int], idle: Idle) -> None:
        self._snapshots = snapshots
        self._loading = loading
        self._claimed: list[str] = []
        self._busy = contextlib.ExitStack()
        self._busy.enter_context(idle.work())

    def claim(self, chain_id: str) -> None:
        self._snapshots.retain(chain_id)
        self._claimed.append(chain_id)
        self._loading[chain_id] = self._loading.get(chain_id, 0) + 1

    async def release(self) -> None:
        """Release the layers. Those that no image uses are removed, topmost first."""
        self._busy.close()
        while self._claimed:
            chain_id = self._claimed.pop()
            self._loading[chain_id] -= 1
            if not self._loading[chain_id]:
                del self._loading[chain_id]
            await self._snapshots.release(chain_id)


__all__ = ["Claims", "Load"]
