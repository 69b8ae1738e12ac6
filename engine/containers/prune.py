"""The prune of containers: removes those that do not run.

As in dockerd, anonymous volumes stay, and a container that cannot be removed is skipped. Transient
containers of a build that is in progress are not taken.

Locks: each container's, while it is removed. Threads: the event loop's; sizes are counted in
threads.
"""

from __future__ import annotations

import asyncio
import logging

from engine.common.pruning import Selection
from engine.containers import listing, removal
from engine.containers.container import Container
from engine.containers.containers import Containers
from engine.containers.lifecycle import State
from engine.errors import Conflict, EngineError, NotFound
from engine.wire.containers import ContainersPruned

_log = logging.getLogger(__name__)

AT_ONCE = 8
"""Containers that are removed at once."""


async def prune(containers: Containers, selection: Selection) -> ContainersPruned:
    """Remove the selected containers that do not run. Raises Conflict while another prune runs."""
    with containers.pruning:
        chosen = [each for each in containers if _may_go(each) and _selected(each, selection)]
        limit = asyncio.Semaphore(AT_ONCE)
        reclaimed = await asyncio.gather(*(_remove(each, limit) for each in chosen))
    deleted = [each.id for each, size in zip(chosen, reclaimed, strict=True) if size is not None]
    space = sum(size or 0 for size in reclaimed)
    containers.parts.events.publish("container", "prune", "", {"reclaimed": str(space)})
    return ContainersPruned(deleted or None, space)


def _selected(container: Container, selection: Selection) -> bool:
    return selection.matches(container.record.created, container.record.config.labels)


def _may_go(container: Container) -> bool:
    stopped = container.record.status.state in (State.CREATED, State.EXITED)
    return stopped and not container.parts.store.transient(container.id)


async def _remove(container: Container, limit: asyncio.Semaphore) -> int | None:
    """The bytes that it held, or None if it stays."""
    async with limit:
        size, _ = await listing.sizes(container)
        try:
            if not _may_go(container):
                return None
            await removal.remove(container, force=False)
        except (Conflict, NotFound):
            return None  # it was started or removed meanwhile
        except EngineError as error:
            _log.warning("container %s: prune: %s", container.id, error.message)
            return size if container.removed else None
        return size
