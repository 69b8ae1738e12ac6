"""Makes a plugin of an archive (`docker plugin create`): `config.json`, and the files of its root
below `rootfs/`.

The archive is extracted as a layer is, below one directory that it cannot lead out of. The root
becomes a layer where it lies. Owns: the directory, until the layer is committed.
Raises: InvalidParameter for a bad archive or config, ServerError when the disk does not take it;
nothing is left behind then.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from engine._fast import layer as _layer
from engine._fast import tar as _tar
from engine.errors import Conflict, InvalidParameter, ServerError, reason, reason_with_file
from engine.images import archive
from engine.images.spans import Span
from engine.images.store import ImageStore
from engine.managed_plugins import config as configs
from engine.storage.snapshots import Ingest, Layer
from engine.system import files
from engine.system.threads import uninterrupted
from engine.wire.plugins import PluginConfig

LARGEST = 8 << 30
"""Bytes of an archive, as it is sent."""

_CONFIG = "config.json"
_ROOT = "rootfs"


class Made(NamedTuple):
    """A config, and the bytes of its document."""

    config: PluginConfig
    document: bytes


async def make(images: ImageStore, body: AsyncIterator[bytes], claim: Callable[[str], None]) -> Made:
    """The plugin in the archive `body`, compressed or not. Its layer is claimed by `claim`."""
    async with archive.received(_limited(body), images.temporary, images.layers) as span:
        ingest = await images.layers.ingest()
        try:
            raw = await images.layers.work(_extract, span, ingest)
            config = configs.parse(raw)
        except BaseException:
            await uninterrupted(images.snapshots.abandon(ingest))
            raise
    extraction = await images.layers.seal(ingest, "")
    diff_id = extraction.diff_id
    claim(diff_id)
    layer = Layer(ingest.number, diff_id, "", extraction.size)
    with contextlib.suppress(Conflict):  # the same layer is here: the ingest was removed
        await uninterrupted(images.snapshots.commit_layer(ingest, diff_id, layer))
    config = configs.with_rootfs(config, [diff_id])
    return Made(config, configs.encoded(config))


async def _limited(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    size = 0
    async for chunk in body:
        size += len(chunk)
        if size > LARGEST:
            raise InvalidParameter(f"the archive of a plugin has more than {LARGEST} bytes")
        yield chunk


def _extract(span: Span, ingest: Ingest) -> bytes:
    """Extract the archive, and make its root the content of the ingest. Returns the config.
    Blocking."""
    try:
        directory = files.open_directory(ingest.path)
        try:
            _layer.apply(span.descriptor, directory, offset=span.offset, size=span.size)
            raw = _config(directory)
            _check_root(directory)
        finally:
            os.close(directory)
        root = ingest.path.with_name(_ROOT)
        os.rename(ingest.path / _ROOT, root)
        files.remove_tree(ingest.path)
        os.rename(root, ingest.path)
        return raw
    except _tar.ArchiveError as error:
        raise InvalidParameter(f"invalid archive of a plugin: {error}") from error
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            raise InvalidParameter(f"invalid archive of a plugin: {reason_with_file(error)}") from error
        raise ServerError(f"extracting the archive of a plugin: {reason_with_file(error)}") from error


def _config(directory: int) -> bytes:
    try:
        # Not opened for reading before it is known to be a file: opening a device has effects.
        found = files.open_without_links(directory, _CONFIG, os.O_PATH | os.O_NOFOLLOW)
        try:
            if not stat.S_ISREG(os.fstat(found).st_mode):
                raise InvalidParameter(f"invalid archive of a plugin: {_CONFIG} is not a regular file")
        finally:
            os.close(found)
        return files.read_in_root(directory, _CONFIG, configs.LONGEST)
    except FileNotFoundError as error:
        raise InvalidParameter(f"invalid archive of a plugin: {_CONFIG} not found") from error
    except OSError as error:
        raise InvalidParameter(f"invalid archive of a plugin: {_CONFIG}: {reason(error)}") from error


def _check_root(directory: int) -> None:
    try:
        os.close(files.open_without_links(directory, _ROOT, os.O_PATH | os.O_DIRECTORY))
    except OSError as error:
        words = "not found" if error.errno == errno.ENOENT else "is not a directory"
        raise InvalidParameter(f"invalid archive of a plugin: {_ROOT} {words}") from error


__all__ = ["Made", "make"]
