"""Commit: an image of a container's changes and configuration.

The changes are spooled into an unnamed file while the container is paused. It continues while the
layer is made from that file. Not here: the archive of the changes (_fast/pack.pyx), the image
(images/importing.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

import msgspec

from engine import __version__
from engine._fast import pack
from engine.common import times
from engine.containers import body
from engine.containers.container import Container
from engine.containers.lifecycle import State
from engine.errors import Conflict, EngineError, NotFound, ServerError, reason_with_file
from engine.images import importing
from engine.images.archive import ARCHITECTURE
from engine.images.instructions import changes
from engine.images.reference import Reference
from engine.images.spans import Span
from engine.images.store import ImageStore
from engine.system import files
from engine.system.threads import uninterrupted
from engine.wire.containers import Config
from engine.wire.images import History, ImageConfig

_CHUNK = 1 << 20


class CommitOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The client's parameters. Values of `config` override the container's own."""

    tag: Reference | None = None
    author: str = ""
    comment: str = ""
    pause: bool = True
    changes: Sequence[str] = ()
    config: Config = Config()


async def commit(container: Container, images: ImageStore, options: CommitOptions) -> str:
    """The id of the new image.

    Raises Conflict for a container that is being removed, ServerError when its files cannot be
    read.
    """
    record = container.record
    asked = options.config
    if not asked.env:  # so that ENV replaces a variable in its place
        asked = msgspec.structs.replace(asked, env=record.config.env)
    changed = changes.apply(asked, options.changes, record.config.env or ())
    config = msgspec.structs.replace(body.merged(changed, record.config), on_build=changed.on_build)
    snapshots = images.snapshots
    async with contextlib.AsyncExitStack() as stack:
        spool = files.temporary_file(images.temporary)
        stack.push_async_callback(asyncio.to_thread, os.close, spool)
        claim = await stack.enter_async_context(images.claimed())
        if record.parent:
            claim(record.parent)
        async with _still(container, options.pause):
            try:
                upper = snapshots.upper(container.id)
            except NotFound as error:
                raise Conflict(f"container {container.id} is being removed") from error
            written = await uninterrupted(asyncio.to_thread(pack_changes, upper, spool))
        below = [layer.diff_id for layer in reversed(snapshots.chain(record.parent))]
        base = ImageConfig()
        with contextlib.suppress(NotFound):  # removed by force since
            base = images.get(record.image_id).config
        created = times.rfc3339(time.time_ns())
        step = History(
            created=created,
            created_by=" ".join((record.path, *record.args)),
            author=options.author,
            comment=options.comment,
            empty_layer=written.diff_id == importing.EMPTY_LAYER,
        )
        document = msgspec.structs.replace(
            base,
            created=created,
            author=options.author,
            comment=options.comment,
            architecture=base.architecture or ARCHITECTURE,
            os=base.os or "linux",
            config=config,
            container=container.id,
            container_config=record.config,
            docker_version=__version__,
            history=(*base.history, step),
        )
        span = Span(spool, 0, written.size)
        image_id = await importing.add(images, below, span, written.diff_id, document, options.tag, record.image_id)
    images.publish_created(image_id)
    container.publish(
        "commit", comment=options.comment, imageID=image_id, imageRef=options.tag.familiar if options.tag else ""
    )
    return image_id


class Packed(NamedTuple):
    """The archive of a layer: digest and size."""

    diff_id: str
    size: int


def pack_changes(upper: os.PathLike[str], spool: int) -> Packed:
    """Write the layer of a container's changes to `spool`. Blocking. Raises ServerError."""
    hashed, size = hashlib.sha256(), 0
    try:
        directory = files.open_directory(os.fspath(upper))
        try:
            packer = pack.Packer(directory, b"", top=False, fine=True, layer=True)
        finally:
            os.close(directory)
        while piece := packer.read(_CHUNK):
            hashed.update(piece)
            size += len(piece)
            view = memoryview(piece)
            while view:
                view = view[os.write(spool, view) :]
    except OSError as error:
        raise ServerError(f"packing the changes in {upper}: {reason_with_file(error)}") from error
    return Packed(f"sha256:{hashed.hexdigest()}", size)


@contextlib.asynccontextmanager
async def _still(container: Container, pause: bool) -> AsyncIterator[None]:
    """Pause the container meanwhile, if it runs and the client asked for that."""
    paused = False
    if pause and container.record.status.state is State.RUNNING:
        # it has ended or was paused just now: nothing writes
        with contextlib.suppress(EngineError):
            await container.pause()
            paused = True
    try:
        yield
    finally:
        if paused:
            with contextlib.suppress(EngineError):
                await uninterrupted(container.unpause())


__all__ = ["CommitOptions", "Packed", "commit", "pack_changes"]
