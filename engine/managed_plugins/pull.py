"""A plugin in a registry: found by name, and its layers brought here.

The registry is not trusted: the config has the digest that the manifest names, each blob has its
own, and each layer the diff_id that the config names. The config is read before any layer, so that
its privileges can be compared with those that the user has accepted.

Not here: transfers and extraction (images/), what is made of the layers (store.py).
Raises: NotFound, Unauthorized and ServerError of the registry, InvalidParameter for something that
is no plugin.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, NamedTuple

from engine.errors import InvalidParameter
from engine.images import pull
from engine.images.layers import Allowance
from engine.images.pull import Bringing, Downloads, Resolved
from engine.images.reference import Reference
from engine.images.spans import Span
from engine.images.store import ImageStore
from engine.managed_plugins import config as configs
from engine.wire.images import Descriptor, Progress
from engine.wire.plugins import PluginConfig

if TYPE_CHECKING:
    from engine.images.registry import Repository

CONFIG_TYPE = "application/vnd.docker.plugin.v1+json"
FIRST_CONFIG_TYPE = "application/vnd.docker.plugin.v0+json"
"""Of Docker 1.12."""
CONFIG_TYPES = (CONFIG_TYPE, FIRST_CONFIG_TYPE, "application/octet-stream", "")
"""The last ones are those of old clients and registries, for any config."""

LARGEST = 8 << 30
"""Bytes of all layers of a plugin, as they are sent, and inflated."""


class Found(NamedTuple):
    """A plugin in a registry."""

    repository: Repository
    resolved: Resolved
    document: bytes
    config: PluginConfig

    @property
    def reference(self) -> Reference:
        return self.resolved.name


async def find(repository: Repository, name: Reference) -> Found:
    """Read the manifest and the config of a plugin."""
    resolved = await pull.resolve(repository, name, config_types=CONFIG_TYPES)
    blob = resolved.manifest.config
    assert blob is not None
    if blob.size > configs.LONGEST:
        raise InvalidParameter(f"invalid plugin config: it has {blob.size} bytes, more than {configs.LONGEST}")
    total = sum(layer.size for layer in resolved.manifest.layers)
    if total > LARGEST:
        raise InvalidParameter(f"plugin {name.familiar} has {total} bytes of layers, more than {LARGEST}")
    document = await repository.blob(blob.digest, configs.LONGEST)
    config = configs.parse(document, first=blob.media_type == FIRST_CONFIG_TYPE)
    if blob.media_type not in (CONFIG_TYPE, FIRST_CONFIG_TYPE) and not configs.is_plugin(config):
        raise InvalidParameter(f"content of {name.familiar} is not a plugin")
    layers, listed = len(resolved.manifest.layers), len(config.rootfs.diff_ids)
    if listed not in (layers, 0):
        raise InvalidParameter(f"invalid plugin: {layers} layers in its manifest, {listed} in its config")
    return Found(repository, resolved, document, config)


class Fetching:
    """The layers of a plugin on their way here."""

    def __init__(self, images: ImageStore, downloads: Downloads, found: Found) -> None:
        self._images = images
        self._downloads = downloads
        self._found = found
        self.config = found.config
        """With the diff_ids of all layers once `run` has ended."""

    async def run(self, claim: Callable[[str], None]) -> AsyncGenerator[Progress, None]:
        """Make the layers, which are claimed by `claim`, and yield the progress that Docker's
        clients draw."""
        name, resolved = self._found.reference, self._found.resolved
        blobs = resolved.manifest.layers
        yield Progress(status=f"Pulling from {name.familiar_repository}", id=name.tag or name.digest)
        yield Progress(status=f"Digest: {resolved.digest}")
        async with contextlib.AsyncExitStack() as stack:
            # Docker writes the digest of the compressed layer where its diff_id belongs.
            named = self.config.rootfs.diff_ids or [blob.digest for blob in blobs]
            if any(diff_id == blob.digest for diff_id, blob in zip(named, blobs, strict=True)):
                diff_ids = [
                    await self._diff_id(stack, blob) if diff_id == blob.digest else diff_id
                    for diff_id, blob in zip(named, blobs, strict=True)
                ]
                self.config = configs.with_rootfs(self.config, diff_ids)
            parts = self._images, self._downloads, self._found.repository
            bringing = Bringing(*parts, blobs, self.config.rootfs.diff_ids, Allowance(LARGEST))
            async with contextlib.aclosing(bringing.run(claim)) as steps:
                async for progress in steps:
                    yield progress

    async def _diff_id(self, stack: contextlib.AsyncExitStack, blob: Descriptor) -> str:
        """That of a layer whose config does not name it: the manifest alone vouches for it then.
        The download is kept in use by `stack`."""
        download = await stack.enter_async_context(self._downloads.use(self._found.repository, blob))
        await asyncio.wait([download.task])
        download.task.result()
        return await self._images.layers.digest_of(Span(download.file, 0, blob.size))
