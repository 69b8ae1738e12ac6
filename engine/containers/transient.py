"""The end of a transient container, which an image build made for one run: its changes become a
layer, or it becomes an ordinary container.

Not here: its creation (`create.py`), its row that is not written (`store.py`), its output
(`output.py`), the layer (images/layers.py).
Locks: the container's.
"""

from __future__ import annotations

from engine.containers import removal
from engine.containers.container import Container
from engine.errors import Conflict
from engine.storage.snapshots import Ingest
from engine.system.threads import uninterrupted, whole


async def take(container: Container) -> Ingest:
    """See `Containers.take`."""
    async with container.lock:
        _check(container)
        if container.record.stopped_by_user:
            # Its program may have ended as if it were complete.
            raise Conflict(f"Container {container.id} was stopped by a client")
        ingest = await container.parts.snapshots.take(container.id)
    try:
        await removal.remove(container, force=True)
    except BaseException:
        await uninterrupted(container.parts.snapshots.abandon(ingest))
        raise
    return ingest._replace(stubs=container.stubs)


@whole
async def keep(container: Container) -> None:
    """See `Containers.keep`."""
    async with container.lock:
        _check(container)
        await container.parts.snapshots.keep(container.id)
        await container.parts.store.keep(container.record)


def _check(container: Container) -> None:
    container.check_present()
    if container.process is not None:
        raise Conflict(f"Container {container.id} is running")


__all__ = ["keep", "take"]
