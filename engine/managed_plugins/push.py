"""Sends a plugin to a registry: the exact bytes of its config, and its layers.

Not here: transfers (images/push.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from engine.images import push
from engine.images.layers import chain_ids
from engine.images.push import Pushing, Source
from engine.images.reference import Reference
from engine.images.store import ImageStore
from engine.managed_plugins.pull import CONFIG_TYPE
from engine.managed_plugins.record import PluginRecord
from engine.wire.images import Progress, ProgressDetail, PushResult


async def run(
    pushing: Pushing, images: ImageStore, name: Reference, record: PluginRecord
) -> AsyncGenerator[Progress, None]:
    """Push under `name`, and yield the progress that Docker's clients draw. Raises EngineError."""
    yield Progress(status=f"The push refers to repository [{name.repository}]")
    async with images.claimed() as claim:
        for chain_id in chain_ids(record.config.rootfs.diff_ids):
            claim(chain_id)  # it must not be deleted while it is read
        async with contextlib.aclosing(pushing.layers(_sources(images, record), oci=False)) as steps:
            async for progress in steps:
                yield progress
        config = await pushing.document(record.document, CONFIG_TYPE)
        blobs = pushing.blobs(record.config.rootfs.diff_ids, oci=False)
        raw = push.manifest(config, blobs, oci=False)
        digest = await pushing.put(name, raw, oci=False)
    yield Progress(status=f"{name.tag}: digest: {digest} size: {len(raw)}")
    yield Progress(progress_detail=ProgressDetail(), aux=PushResult(tag=name.tag, digest=digest, size=len(raw)))


def _sources(images: ImageStore, record: PluginRecord) -> list[Source]:
    diff_ids = record.config.rootfs.diff_ids
    found = []
    for index, (diff_id, chain_id) in enumerate(zip(diff_ids, chain_ids(diff_ids), strict=True)):
        layer = images.snapshots.layer(chain_id)
        known = [blob for blob in record.blobs[index : index + 1] if blob.media_type in push.GZIP]
        found.append(Source(diff_id, chain_id, layer.size if layer else 0, tuple(known), ()))
    return found
