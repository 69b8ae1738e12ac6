"""Prune: deletes the images that nothing uses.

Rules: Docker Engine API, ImagePrune. An image that a container was made from keeps all its names.
Threads: the event loop's.
Not here: how one image is deleted (`store.py`), filters of all prunes (`common/pruning.py`).
"""

from __future__ import annotations

from engine.common.pruning import Selection
from engine.events import EventLog
from engine.images.record import ImageRecord
from engine.images.store import ImageStore
from engine.system.threads import uninterrupted
from engine.wire.images import Deletion, ImagesPruned


async def prune(store: ImageStore, events: EventLog, selection: Selection, dangling: bool) -> ImagesPruned:
    """Delete the selected images that no container and no other image was made from. With
    `dangling` only those without a tag.

    Raises Conflict while another prune of images runs.
    """

    def wanted(record: ImageRecord) -> bool:
        if record.tags and dangling:
            return False
        # The time of an image that does not say it is unknown: it may be a recent one.
        if selection.until_ns and not record.created:
            return False
        return selection.matches(record.created, record.labels)

    with store.pruning:
        deleted: list[Deletion] = []
        reclaimed = 0
        waiting = [record.id for record in store if wanted(record)]
        while waiting:
            again = []
            for image_id in waiting:
                record = store.index.find(image_id)
                if record is None:
                    continue
                sizes = _sizes(store, record)
                done = await uninterrupted(store.delete_if(image_id, wanted))
                if not done:
                    again.append(image_id)
                deleted += done
                reclaimed += sum(sizes.get(deletion.deleted, 0) for deletion in done)
            # An image goes only after the images that were made from it.
            waiting = again if len(again) < len(waiting) else []
    events.publish("image", "prune", "", {"reclaimed": str(reclaimed)})
    return ImagesPruned(images_deleted=deleted or None, space_reclaimed=reclaimed)


def _sizes(store: ImageStore, record: ImageRecord) -> dict[str, int]:
    """The size of each layer of an image, by chain_id. Those of its parents are among them."""
    found = ((chain_id, store.snapshots.layer(chain_id)) for chain_id in record.chain_ids)
    return {chain_id: layer.size for chain_id, layer in found if layer is not None}


__all__ = ["prune"]
