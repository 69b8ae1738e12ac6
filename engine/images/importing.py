"""Images made here: from a tar archive of a root file system (import), or from an image and a
container's changes (commit).

Both add one layer: its archive is in an unnamed file, its digest becomes the diff_id, and it is
extracted like any other. Not here: reading a container's changes (containers/commit.py over
_fast/pack.pyx), the `changes` parameter (instructions/changes.py).
Raises: InvalidParameter for a damaged archive, ServerError when the disk does not take it; nothing
is left behind then.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator, Sequence

import msgspec

from engine import __version__
from engine.common import times
from engine.events import EventLog
from engine.images import archive, platforms
from engine.images.instructions import changes as instructions
from engine.images.layers import chain_ids
from engine.images.reference import Reference
from engine.images.spans import Span
from engine.images.store import ImageStore
from engine.wire.containers import Config
from engine.wire.images import History, ImageConfig, Platform, RootFS

EMPTY_LAYER = "sha256:5f70bf18a086007016e948b04aed3b82103a36bea41755b6cddfaf10ace3c6ef"
"""Digest of a tar archive without entries, for which no layer is made."""


async def add(
    store: ImageStore,
    below: Sequence[str],
    span: Span,
    diff_id: str,
    config: ImageConfig,
    tag: Reference | None,
    parent: str = "",
) -> str:
    """Make an image of the layers `below`, lowest first by diff_id, and one more; returns its id.

    `parent`: the image that it is based on.
    """
    empty = diff_id == EMPTY_LAYER
    diff_ids = (*below, *(() if empty else (diff_id,)))
    config = msgspec.structs.replace(config, rootfs=RootFS(diff_ids=diff_ids))
    raw = encoded(config)
    chains = chain_ids(diff_ids)
    async with store.claimed() as claim:
        for chain_id in chains:
            claim(chain_id)
        if not empty:
            await store.layers.ensure(chains[-1], diff_id, chains[-2] if len(chains) > 1 else "", span)
        await store.adopt(raw, config, tags=() if tag is None else (tag,), parent=parent)
    return f"sha256:{hashlib.sha256(raw).hexdigest()}"


def encoded(config: ImageConfig) -> bytes:
    """The document. It has `rootfs` even if the image has no layers."""
    raw = msgspec.json.encode(config)
    if config.rootfs != RootFS():
        return raw
    # It was left out, as a default.
    return b'%s%s"rootfs":%s}' % (raw[:-1], b"," if len(raw) > 2 else b"", msgspec.json.encode(config.rootfs))


def check(changes: Sequence[str]) -> None:
    """Raises InvalidParameter for instructions that `bring` would reject."""
    instructions.apply(Config(), changes)


async def bring(
    store: ImageStore,
    events: EventLog,
    body: AsyncIterator[bytes],
    source: str,
    tag: Reference | None,
    changes: Sequence[str],
    message: str,
    platform: Platform | None = None,
) -> str:
    """Import the archive of a root file system, compressed or not; returns the id.

    `source` describes its origin. `platform`: that of the image, by default this host's.
    """
    made_for = platform or platforms.HOST
    config = instructions.apply(Config(), changes)
    created = times.rfc3339(time.time_ns())
    comment = message or f"Imported from {source}"
    async with archive.received(body, store.temporary, store.layers) as span:
        document = ImageConfig(
            created=created,
            architecture=made_for.architecture,
            variant=made_for.variant if platform is not None else "",
            os=made_for.os,
            config=config,
            history=(History(created=created, comment=comment),),
            docker_version=__version__,
            comment=comment,
        )
        image_id = await add(store, (), span, await store.layers.digest_of(span), document, tag)
    events.publish("image", "import", image_id, {"name": tag.familiar if tag else image_id})
    return image_id


__all__ = ["EMPTY_LAYER", "add", "bring", "check", "encoded"]
