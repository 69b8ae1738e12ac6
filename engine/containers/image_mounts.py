"""Images mounted into a container: the layers that it keeps, and the mounts of a start.

The layers exist while the container does, also when the image has been removed. A start mounts them
read-only in the engine's mount namespace, and the runtime gets a copy of that mount, so nothing of
it is left when the run has ended.

Not here: which images (`mount_points.py`), how their copies reach the runtime (`extra_mounts.py`).
Raises: NotFound and InvalidParameter for a subpath, ServerError.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import AsyncIterator

from engine.containers.extra_mounts import Bind
from engine.containers.store import ContainerRecord, ImageMount
from engine.errors import NotFound, ServerError
from engine.storage.snapshots import Snapshots
from engine.system import threads
from engine.system.threads import uninterrupted
from engine.volumes import sources


def retain(record: ContainerRecord, snapshots: Snapshots) -> None:
    """Keep the layers of its image mounts until `release`."""
    for each in record.image_mounts:
        if each.chain_id:
            snapshots.retain(each.chain_id)


async def release(record: ContainerRecord, snapshots: Snapshots) -> None:
    for each in record.image_mounts:
        if each.chain_id:
            await snapshots.release(each.chain_id)


@contextlib.asynccontextmanager
async def retained(record: ContainerRecord, snapshots: Snapshots) -> AsyncIterator[None]:
    """Keep the layers; a failure within the context releases them.

    Raises NotFound when an image has just been removed.
    """
    retain(record, snapshots)
    try:
        for each in record.image_mounts:
            try:
                snapshots.chain(each.chain_id)
            except ServerError as error:
                raise NotFound(f"No such image: {each.name}") from error
        yield
    except BaseException:
        await uninterrupted(release(record, snapshots))
        raise


@contextlib.asynccontextmanager
async def opened(
    record: ContainerRecord, snapshots: Snapshots, *, mapped: bool
) -> AsyncIterator[list[tuple[ImageMount, int]]]:
    """Descriptors (O_PATH) of what its image mounts show, within the context. `mapped`: as for
    `Snapshots.mount`.
    """
    found: list[tuple[ImageMount, int]] = []
    async with contextlib.AsyncExitStack() as stack:
        for each in record.image_mounts:
            content = await stack.enter_async_context(snapshots.content(each.chain_id, mapped=mapped))
            if each.subpath:
                below = functools.partial(sources.open_below, content, each.name, each.subpath)
                content = await threads.opened(snapshots.mount_namespace.run(below))
                stack.callback(os.close, content)
            found.append((each, content))
        yield found


async def binds(record: ContainerRecord, snapshots: Snapshots, borrowed: contextlib.AsyncExitStack) -> list[Bind]:
    """The mounts for a start; their sources are closed with `borrowed`."""
    if not record.image_mounts:
        return []
    mapped = record.ids is not None
    found = await borrowed.enter_async_context(opened(record, snapshots, mapped=mapped))
    return [Bind(destination=mount.destination, source=source, mapped=mapped) for mount, source in found]


__all__ = ["binds", "opened", "release", "retain", "retained"]
