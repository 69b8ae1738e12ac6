"""Pull: find the manifest of a name, download each layer once, and extract layers while others
still arrive.

A pull has two parts. `resolve` finds the manifest, so that a missing image is an error before the
stream begins. `bring` makes the complete image or fails without a trace: its layers are claimed by
the pull alone until the image is recorded. A client that leaves cancels the downloads that no other
pull uses.

Owns: the table of downloads. Not here: requests (registry/), extraction (layers.py), records
(store.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from engine.errors import EngineError, InvalidParameter, NotFound, ServerError, reason
from engine.images import archive, platforms
from engine.images.archive import MAX_DOCUMENT, MAX_LAYERS
from engine.images.layers import Allowance, chain_ids
from engine.images.progress import Reports, retrying_text
from engine.images.reference import Reference
from engine.images.spans import Incoming, Span
from engine.images.store import ImageStore
from engine.images.turns import Turns
from engine.system import files
from engine.system.threads import cancelled, uninterrupted
from engine.wire.images import (
    Descriptor,
    DistributionDescriptor,
    DistributionInspect,
    ImageConfig,
    Manifest,
    Platform,
    Progress,
)

if TYPE_CHECKING:
    from engine.images.registry import Fetched, Repository

MAX_BLOB = 1 << 43
"""Largest accepted size of a layer: 8 TiB."""

_POLL = 0.1
"""Seconds between two reports of progress."""

_CONFIG_TYPES = (
    "",
    "application/octet-stream",  # written by Docker 1.10
    "application/vnd.docker.container.image.v1+json",
    "application/vnd.oci.image.config.v1+json",
)
_CLASSES = {
    **dict.fromkeys(_CONFIG_TYPES[2:], "image"),
    "application/vnd.docker.plugin.v0+json": "plugin",
    "application/vnd.docker.plugin.v1+json": "plugin",
}
"""What a manifest is of, by the media type of its config."""
_INDEX_TYPES = (
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.index.v1+json",
)
_OCI_TYPE = "application/vnd.oci.image.manifest.v1+json"
_SCHEMA_1 = (
    "application/vnd.docker.distribution.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v1+prettyjws",
)


class Resolved(NamedTuple):
    """A name, and its manifest for this host."""

    name: Reference
    digest: str
    """Digest of the document that the name refers to: the index when there is one."""
    manifest: Manifest
    raw: bytes
    """The manifest's bytes."""
    oci: bool


class Downloads:
    """Blobs that are being downloaded, each once for all pulls."""

    def __init__(self, directory: Path, most: int) -> None:
        """`most`: downloads that run at the same time."""
        self._directory = directory
        self._running: dict[tuple[str, int], _Download] = {}
        self.turns = Turns(most)

    @contextlib.asynccontextmanager
    async def use(self, repository: Repository, blob: Descriptor) -> AsyncIterator[_Download]:
        """The download of a blob, started if needed. Its file lives until the last user leaves."""
        key = (blob.digest, blob.size)
        download = self._running.get(key)
        if download is None:
            download = self._running[key] = _Download(blob)
            download.task = asyncio.create_task(self._run(download, repository))
        download.users += 1
        try:
            yield download
        finally:
            download.users -= 1
            if not download.users:
                self._forget(download)
                try:
                    await cancelled(download.task)
                finally:
                    # An unnamed file: closing it frees hundreds of megabytes, which takes a while.
                    if download.file >= 0:
                        await uninterrupted(asyncio.to_thread(os.close, download.file))

    def _forget(self, download: _Download) -> None:
        key = (download.blob.digest, download.blob.size)
        if self._running.get(key) is download:
            del self._running[key]

    async def _run(self, download: _Download, repository: Repository) -> None:
        try:
            async with self.turns:
                blob = download.blob
                await uninterrupted(asyncio.to_thread(download.open, self._directory))
                download.begun.set()
                await repository.fetch(blob.digest, blob.size, download.file, download.report, download.retry)
        except BaseException as error:
            # A later pull starts over, with its own credentials.
            self._forget(download)
            if isinstance(error, OSError):
                raise ServerError(f"receiving a blob into {self._directory}: {reason(error)}") from error
            raise


class _Download:
    def __init__(self, blob: Descriptor) -> None:
        self.blob = blob
        self.users = 0
        self.file = -1
        self.begun = asyncio.Event()
        """It has its file."""
        self.received = 0
        self.retries = 0
        self.retry_after = 0.0
        """Seconds before the last of them."""
        self.restarted = False
        """The download began again: bytes that were read before may differ now."""
        self.task: asyncio.Task[None]
        self._followers: set[Incoming] = set()

    def open(self, directory: Path) -> None:
        """Blocking."""
        self.file = files.temporary_file(directory)

    def report(self, received: int) -> None:
        """From any thread."""
        self.restarted = self.restarted or received < self.received
        self.received = received
        for follower in [*self._followers]:
            follower.arrived()

    def retry(self, seconds: float) -> None:
        self.retries += 1
        self.retry_after = seconds

    @property
    def whole(self) -> bool:
        """True when the file is complete and verified."""
        return self.task.done() and not self.failed

    @property
    def failed(self) -> bool:
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)

    @contextlib.contextmanager
    def followed(self) -> Iterator[Incoming]:
        """The blob while it is received; the download must have begun."""
        follower = Incoming(self.file, self.blob.size, lambda: self.received, self.task)
        self._followers.add(follower)
        self.task.add_done_callback(lambda _: follower.stop() if self.failed else None)
        try:
            yield follower
        finally:
            self._followers.discard(follower)


# --- from a name to a manifest --------------------------------------------------------------------


def parsed(fetched: Fetched) -> tuple[Manifest, str]:
    """A manifest or index, and its media type. Raises InvalidParameter for other documents."""
    kind = fetched.media_type
    if kind in _SCHEMA_1:
        raise InvalidParameter(_schema_1_text())
    try:
        manifest = archive.decode(fetched.raw, Manifest, fetched.digest)
    except InvalidParameter as error:
        raise InvalidParameter(f"invalid manifest: {own_words(error)}") from error
    if manifest.schema_version == 1:
        raise InvalidParameter(_schema_1_text())
    if manifest.schema_version != 2:
        raise InvalidParameter(f"invalid manifest {fetched.digest}: schemaVersion {manifest.schema_version}")
    if manifest.manifests and (manifest.layers or manifest.config):
        # Two clients would see two images in it (CVE-2021-41190)
        raise InvalidParameter(f"invalid manifest {fetched.digest}: both an image and an index")
    known = (*_INDEX_TYPES, _OCI_TYPE, "application/vnd.docker.distribution.manifest.v2+json")
    if manifest.media_type and kind in known and manifest.media_type != kind:
        raise InvalidParameter(
            f"invalid manifest {fetched.digest}: mediaType {manifest.media_type} differs from Content-Type {kind}"
        )
    return manifest, manifest.media_type or kind


def _schema_1_text() -> str:
    return (
        "manifest schema 1 is not supported: ask the author of the image to publish it in the OCI format or "
        "Docker Image manifest v2, schema 2"
    )


def own_words(error: EngineError) -> str:
    return error.message.removeprefix("invalid archive: ")


def _checked(manifest: Manifest, digest: str, config_types: Collection[str]) -> Manifest:
    """A validated manifest of an image, or of a plugin. Raises InvalidParameter."""
    config = manifest.config
    if config is None:
        raise InvalidParameter(f"invalid manifest {digest}: no config")
    if config.media_type not in config_types:
        kind = _CLASSES.get(config.media_type, "unknown")
        raise InvalidParameter(f'Encountered remote "{config.media_type[:200]}"({kind}) when fetching')
    if config.size > MAX_DOCUMENT:
        raise InvalidParameter(f"invalid manifest {digest}: config has {config.size} bytes, more than {MAX_DOCUMENT}")
    if len(manifest.layers) > MAX_LAYERS:
        raise InvalidParameter(f"max depth exceeded: {digest} has more than {MAX_LAYERS} layers")
    for blob in (config, *manifest.layers):
        if not archive.is_digest(blob.digest):
            raise InvalidParameter(f"invalid manifest {digest}: invalid digest {blob.digest!r}"[:300])
    for layer in manifest.layers:
        if not archive.LAYER_TYPES.fullmatch(layer.media_type):
            raise InvalidParameter(f"invalid manifest {digest}: unsupported layer type {layer.media_type!r}"[:300])
        if not 0 < layer.size <= MAX_BLOB:
            raise InvalidParameter(
                f"invalid manifest {digest}: layer size {layer.size} is not between 1 and {MAX_BLOB}"
            )
    return manifest


async def resolve(
    repository: Repository,
    name: Reference,
    platform: Platform | None = None,
    config_types: Collection[str] = _CONFIG_TYPES,
) -> Resolved:
    """Follow a tag or digest to the manifest for a platform, by default this host's.
    `config_types`: the media types that its config may have, by default those of images.

    Raises NotFound, InvalidParameter, ServerError.
    """
    fetched = await repository.manifest(name.digest or name.tag)
    manifest, kind = parsed(fetched)
    digest = fetched.digest
    depth = 0
    while manifest.manifests or kind in _INDEX_TYPES:
        if depth > archive.INDEX_DEPTH:
            raise InvalidParameter(f"invalid manifest {digest}: too many levels of nested indexes")
        depth += 1
        fetched = await repository.manifest(chosen(manifest, name, platform or platforms.HOST).digest)
        manifest, kind = parsed(fetched)
    return Resolved(name, digest, _checked(manifest, fetched.digest, config_types), fetched.raw, kind == _OCI_TYPE)


def chosen(index: Manifest, name: Reference, platform: Platform) -> Descriptor:
    """The entry of an index for a platform. Raises NotFound, InvalidParameter."""
    offered = [(each.platform, each) for each in index.manifests if archive.ATTESTATION not in each.annotations]
    found = platforms.best(platform, offered)
    if found is None:
        wanted = platforms.text_of(platform)
        raise NotFound(f"no matching manifest for {wanted} in the manifest list entries of {name.familiar}")
    if not archive.is_digest(found.digest):
        raise InvalidParameter(f"invalid manifest: invalid digest {found.digest!r}"[:300])
    return found


async def described(repository: Repository, name: Reference) -> DistributionInspect:
    """The manifest or index of a name in its registry, and the platforms of its images.

    Raises Failure, InvalidParameter, ServerError.
    """
    fetched = await repository.stored(name.digest or name.tag)
    manifest, kind = parsed(fetched)
    found = [each.platform for each in manifest.manifests if each.platform is not None]
    config = manifest.config
    if config is not None and archive.is_digest(config.digest) and config.size <= MAX_DOCUMENT:
        document = archive.decode(await repository.blob(config.digest, MAX_DOCUMENT), Platform, config.digest)
        if document.os or document.architecture:
            found.append(document)
    descriptor = DistributionDescriptor(media_type=kind, digest=fetched.digest, size=len(fetched.raw))
    return DistributionInspect(descriptor=descriptor, platforms=found)


async def configuration(repository: Repository, name: Reference, platform: Platform | None) -> ImageConfig:
    """The configuration of an image. Raises as `resolve` does."""
    config = (await resolve(repository, name, platform)).manifest.config
    assert config is not None  # as `resolve` has checked
    return archive.decode(await repository.blob(config.digest, MAX_DOCUMENT), ImageConfig, config.digest)


# --- bringing it ----------------------------------------------------------------------------------


async def bring(
    store: ImageStore,
    downloads: Downloads,
    repository: Repository,
    resolved: Resolved,
    pulled: Callable[[Reference, bool], None],
) -> AsyncGenerator[Progress, None]:
    """Make the image of a resolved name, and yield the progress that Docker's clients draw.

    `pulled(name, new)` is called in the same turn of the loop in which the name begins to mean the
    image; later, another client may have removed it. `new` is False when nothing changed.

    Raises EngineError; nothing is left behind then.
    """
    name, manifest = resolved.name, resolved.manifest
    assert manifest.config is not None
    yield Progress(status=f"Pulling from {name.path}", id=name.tag or name.digest)
    raw = await repository.blob(manifest.config.digest, MAX_DOCUMENT)
    config = _configuration(raw, manifest)
    async with store.claimed() as claim:
        work = Bringing(store, downloads, repository, manifest.layers, config.rootfs.diff_ids)
        async with contextlib.aclosing(work.run(claim)) as steps:
            async for progress in steps:
                yield progress
        changed = await store.adopt(
            raw,
            config,
            tags=(name._replace(digest=""),) if name.tag and not name.digest else (),
            digest=name._replace(tag="", digest=resolved.digest),
            blobs=[msgspec.structs.replace(blob, annotations={}, platform=None) for blob in manifest.layers],
            oci=resolved.oci,
            manifest=resolved.raw,
        )
        pulled(name, changed)
    yield Progress(status=f"Digest: {resolved.digest}")


def _configuration(raw: bytes, manifest: Manifest) -> ImageConfig:
    assert manifest.config is not None
    try:
        config = archive.image_config(raw, manifest.config.digest)
    except InvalidParameter as error:
        raise InvalidParameter(f"invalid image: {own_words(error)}") from error
    if len(config.rootfs.diff_ids) != len(manifest.layers):
        raise InvalidParameter(
            f"invalid image: {len(manifest.layers)} layers in its manifest, "
            f"{len(config.rootfs.diff_ids)} in its configuration"
        )
    return config


class Bringing:
    """The layers of one pull."""

    def __init__(
        self,
        store: ImageStore,
        downloads: Downloads,
        repository: Repository,
        blobs: Sequence[Descriptor],
        diff_ids: Sequence[str],
        allowance: Allowance | None = None,
    ) -> None:
        """`diff_ids`: those that the layers in `blobs` must have. `allowance`: their bytes."""
        self._store = store
        self._downloads = downloads
        self._repository = repository
        self._blobs = blobs
        self._diff_ids = diff_ids
        self._allowance = allowance
        self._reports = Reports()
        self._complete: set[str] = set()
        """Blobs whose download was reported to its end: clients draw the extraction after it."""

    async def run(self, claim: Callable[[str], None]) -> AsyncGenerator[Progress, None]:
        """Raises the first error after all work has ended."""
        chains = chain_ids(self._diff_ids)
        for chain_id in chains:
            claim(chain_id)

        def begin(group: asyncio.TaskGroup) -> None:
            below: asyncio.Task[bool] | None = None
            parent = ""
            for blob, diff_id, chain_id in zip(self._blobs, self._diff_ids, chains, strict=True):
                below = group.create_task(self._layer(blob, diff_id, chain_id, parent, below))
                parent = chain_id

        async with contextlib.aclosing(self._reports.run(begin)) as steps:
            async for progress in steps:
                yield progress

    def _say(self, blob: Descriptor, status: str, current: int = 0, total: int = 0) -> None:
        self._reports.say(blob.digest, status, current, total)

    async def _layer(
        self, blob: Descriptor, diff_id: str, chain_id: str, parent: str, below: asyncio.Task[bool] | None
    ) -> bool:
        """Make one layer. Returns True when it did not exist before."""
        if self._store.snapshots.layer(chain_id) is not None:
            self._say(blob, "Already exists")
            return False
        self._say(blob, "Pulling fs layer")
        while True:
            async with self._downloads.use(self._repository, blob) as download:
                ours = download.users == 1
                making = asyncio.create_task(self._made(blob, diff_id, chain_id, parent, below, download))
                try:
                    await self._received(blob, download, making)
                    made = await making
                except EngineError:
                    if ours or not download.failed:
                        raise
                    # Another pull's registry or credentials failed. Ours may work.
                    continue
                finally:
                    await cancelled(making)
            if made:
                self._say(blob, "Extracting", blob.size, blob.size)
            self._say(blob, "Pull complete")
            return made

    async def _made(
        self,
        blob: Descriptor,
        diff_id: str,
        chain_id: str,
        parent: str,
        below: asyncio.Task[bool] | None,
        download: _Download,
    ) -> bool:
        """Extract the layer, during the download if a place is free.

        Returns True when it was extracted here.
        """
        reported = -1

        def report(current: int) -> None:
            nonlocal reported
            if reported != current < blob.size and blob.digest in self._complete:
                reported = current
                self._say(blob, "Extracting", current, blob.size)

        layers = self._store.layers
        await download.begun.wait()
        with layers.following() as free:
            if free and not download.whole:
                with download.followed() as incoming:
                    try:
                        return await layers.ensure(chain_id, diff_id, parent, incoming, below, report, self._allowance)
                    except InvalidParameter:
                        if not download.restarted:
                            raise
        await asyncio.wait([download.task])
        download.task.result()
        span = Span(download.file, 0, blob.size)
        return await layers.ensure(chain_id, diff_id, parent, span, below, report, self._allowance)

    async def _received(self, blob: Descriptor, download: _Download, making: asyncio.Task[bool]) -> None:
        """Report the download until the blob is there or `making` has failed. Raises the download's
        error.
        """
        reported = retries = 0
        waiting = False
        while not download.task.done() and not (making.done() and making.exception()):
            await asyncio.wait([download.task], timeout=_POLL)
            if not download.begun.is_set() and not waiting:
                waiting = True
                self._say(blob, "Waiting")
            if download.retries != retries:
                retries = download.retries
                self._say(blob, retrying_text(download.retry_after))
            if download.received != reported:
                reported = download.received
                self._say(blob, "Downloading", reported, blob.size)
        if download.failed:
            download.task.result()
        if download.whole:
            self._say(blob, "Verifying Checksum")
            self._say(blob, "Download complete")
            self._complete.add(blob.digest)


__all__ = ["Bringing", "Downloads", "Resolved", "bring", "described", "own_words", "resolve"]
