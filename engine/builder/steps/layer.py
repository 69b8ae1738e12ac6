"""The layer that a step makes: extracted into a directory of its own, then committed on the layers
of the step before.

Not here: the files (`copying.py`, `run.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import Callable, Hashable

from engine._fast.layer import apply
from engine.builder import copying
from engine.builder.copying import Stream
from engine.builder.parts import Parts
from engine.containers import commit as commits
from engine.containers.container import Container
from engine.errors import Conflict, InvalidParameter, ServerError, reason_with_file
from engine.images.archive import MAX_LAYERS
from engine.images.importing import EMPTY_LAYER
from engine.images.layers import Extraction, chain_ids
from engine.storage.snapshots import Ingest, Layer
from engine.system import files
from engine.system.tasks import spawn
from engine.system.threads import opened, uninterrupted

_CHUNK = 1 << 20


def above(diff_ids: tuple[str, ...], diff_id: str) -> str:
    """The chain_id of one more layer."""
    return chain_ids((*diff_ids, diff_id))[-1]


async def lay_out(
    parts: Parts,
    below: tuple[str, ...],
    opened: Callable[[], Stream],
    claim: Callable[[str], None],
    *,
    alike: Hashable = None,
) -> str:
    """The diff_id of a new layer, whose tar stream `opened` opens in a thread. `below`: the
    diff_ids under it. `alike`: equal for two streams that are probably the same.

    Nothing is kept of a layer without entries, nor after a failure.
    """
    layers, parent = parts.images.layers, chain_ids(below)[-1] if below else ""
    earlier = parts.laid_out.find(alike)
    if earlier is not None and parts.images.snapshots.layer(above(below, earlier)) is not None:
        # Probably the same layer again. Reading the stream costs far less than writing the files.
        diff_id = await layers.work(_digest, opened)
        chain_id = above(below, diff_id)
        claim(chain_id)
        if parts.images.snapshots.layer(chain_id) is not None:
            return diff_id
    ingest = await layers.ingest()
    try:
        extraction = await layers.work(lambda: copying.lay_out(ingest, opened()))
    except BaseException:
        await uninterrupted(parts.images.snapshots.abandon(ingest))
        raise
    if extraction.repeated:
        # Of archives that ADD has unpacked. No engine takes a layer with such a name.
        extraction = await layers.seal(ingest, parent, implied=extraction.implied)
    diff_id = await commit(parts, below, ingest, extraction, claim)
    if alike is not None:
        parts.laid_out.add(alike, diff_id)
    return diff_id


def _digest(opened: Callable[[], Stream]) -> str:
    digest = hashlib.sha256()
    stream = opened()
    try:
        buffer = memoryview(bytearray(_CHUNK))
        while got := stream.readinto(buffer):
            digest.update(buffer[:got])
    finally:
        stream.close()
    return f"sha256:{digest.hexdigest()}"


async def commit(
    parts: Parts, below: tuple[str, ...], ingest: Ingest, extraction: Extraction, claim: Callable[[str], None]
) -> str:
    """Commit an ingest whose files and digest are known, and consume it. Returns the diff_id.

    Raises InvalidParameter when no layer can be mounted on those below.
    """
    snapshots, diff_id = parts.images.snapshots, extraction.diff_id
    if diff_id == EMPTY_LAYER:
        await uninterrupted(snapshots.abandon(ingest))
        return diff_id
    if len(below) >= MAX_LAYERS:
        await uninterrupted(snapshots.abandon(ingest))
        raise InvalidParameter(f"max depth exceeded: an image has at most {MAX_LAYERS} layers")
    chain_id = above(below, diff_id)
    claim(chain_id)
    layer = Layer(ingest.number, diff_id, chain_ids(below)[-1] if below else "", extraction.size)
    if snapshots.layer(chain_id) is not None:
        spawn(snapshots.abandon(ingest), f"removing a second copy of layer {chain_id}")
        return diff_id
    with contextlib.suppress(Conflict):  # the same layer was made just now: the ingest was removed
        await uninterrupted(snapshots.commit_layer(ingest, chain_id, layer, extraction.implied))
    return diff_id


async def copy_changes(parts: Parts, container: Container) -> Ingest:
    """A copy of a container's changes, for `Layers.seal`. The container keeps its own."""
    layers = parts.images.layers
    spool = await opened(asyncio.to_thread(files.temporary_file, parts.images.temporary))
    try:
        await layers.work(commits.pack_changes, parts.images.snapshots.upper(container.id), spool)
        ingest = await layers.ingest()
        try:
            await layers.work(_extract, spool, ingest)
        except BaseException:
            await uninterrupted(parts.images.snapshots.abandon(ingest))
            raise
        return ingest._replace(stubs=container.stubs)
    finally:
        await uninterrupted(asyncio.to_thread(os.close, spool))


def _extract(spool: int, ingest: Ingest) -> None:
    try:
        directory = files.open_directory(ingest.path)
        try:
            apply(spool, directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise ServerError(f"copying a container's changes: {reason_with_file(error)}") from error


__all__ = ["above", "commit", "copy_changes", "lay_out"]
