"""Pushes images to registries. Layers that the registry has are skipped, those of another
repository are mounted, and the rest is packed while it is sent.

A layer's archive is regenerated from its files (`tarsplit.stream`) and checked against its diff_id;
it is packed with gzip in threads and not kept. A pulled manifest is sent unchanged, provided that
the registry has the blobs it names. Owns: the threads that pack. Not here: requests (registry/),
records (store.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from isal import isal_zlib

from engine.errors import NotFound, ServerError
from engine.images import reference, tarsplit
from engine.images.progress import Reports, retrying_text
from engine.images.record import ImageRecord
from engine.images.reference import Reference
from engine.images.store import ImageStore
from engine.images.turns import Turns
from engine.system.threads import Threads, uninterrupted
from engine.wire.images import Descriptor, Progress, ProgressDetail, PushResult

if TYPE_CHECKING:
    from engine.images.registry import Repository

LEVEL = 2
"""Level of igzip: two percent larger than its best level, in half the time."""

DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
DOCKER_CONFIG = "application/vnd.docker.container.image.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
DOCKER_GZIP = "application/vnd.docker.image.rootfs.diff.tar.gzip"
OCI_GZIP = "application/vnd.oci.image.layer.v1.tar+gzip"
GZIP = (DOCKER_GZIP, OCI_GZIP)

_CHUNK = 1 << 20
_REPORT_EVERY = 1 << 19


class Source(NamedTuple):
    """A layer to be sent."""

    diff_id: str
    chain_id: str
    size: int
    known: tuple[Descriptor, ...]
    """The blobs as which registries store this layer."""
    neighbours: tuple[str, ...]
    """Paths of repositories of the same registry that may have it."""


def chosen(store: ImageStore, name: Reference) -> list[tuple[Reference, ImageRecord]]:
    """The images to push for `name`: that of its tag, or those of all tags of the repository.

    Raises NotFound.
    """
    found = []
    for record in store:
        for tag in record.tags:
            candidate = reference.read(tag)
            if candidate.repository == name.repository and name.tag in ("", candidate.tag):
                found.append((candidate, record))
    if not found:
        raise _unknown(name)
    return sorted(found, key=lambda pair: pair[0].tag)


def _unknown(name: Reference) -> NotFound:
    return NotFound(f"An image does not exist locally with the tag: {name.familiar}")


class Pushing:
    """One push."""

    def __init__(self, store: ImageStore, repository: Repository, packing: Threads, turns: Turns) -> None:
        """`turns`: of the uploads of all pushes."""
        self._store = store
        self._repository = repository
        self._packing = packing
        self._reports = Reports()
        self._turns = turns
        self._there: dict[tuple[str, bool], Descriptor] = {}
        """Layers that this push has found in the registry, by diff_id and kind of manifest."""

    async def run(self, images: Sequence[tuple[Reference, ImageRecord]]) -> AsyncGenerator[Progress, None]:
        """Send every image, and yield the progress that Docker's clients draw. Raises the first
        EngineError.
        """
        yield Progress(status=f"The push refers to repository [{images[0][0].repository}]")
        for name, record in images:
            async with self._store.claimed() as claim:
                for chain_id in record.chain_ids:
                    claim(chain_id)  # it must not be deleted while it is read
                config = await self._configuration(name, record)
                async with contextlib.aclosing(self.layers(self.sources(record), oci=record.oci)) as steps:
                    async for progress in steps:
                        yield progress
                digest, size = await self._manifest(name, record, config)
            yield Progress(status=f"{name.tag}: digest: {digest} size: {size}")
            yield Progress(progress_detail=ProgressDetail(), aux=PushResult(tag=name.tag, digest=digest, size=size))

    async def layers(self, chain: Sequence[Source], *, oci: bool) -> AsyncGenerator[Progress, None]:
        """Send the layers that the registry does not have, for a manifest of that kind, which names
        them as `blobs` says then. The caller has claimed them.
        """
        sources = {source.diff_id: source for source in chain}
        for source in reversed(sources.values()):
            self._say(source, "Preparing")

        def begin(group: asyncio.TaskGroup) -> None:
            for source in sources.values():
                group.create_task(self._layer(source, oci=oci))

        async with contextlib.aclosing(self._reports.run(begin)) as steps:
            async for progress in steps:
                yield progress

    def sources(self, record: ImageRecord) -> list[Source]:
        """The layers of an image, with blobs and repositories as recorded for other images."""
        known: dict[str, dict[str, Descriptor]] = {diff_id: {} for diff_id in record.config.rootfs.diff_ids}
        neighbours: dict[str, dict[str, None]] = {diff_id: {} for diff_id in known}
        for other in (record, *(other for other in self._store if other.id != record.id)):
            if not other.blobs:
                continue
            names = [reference.read(name) for name in other.digests]
            paths = [name.path for name in names if name.domain == self._repository.domain]
            for diff_id, blob in zip(other.config.rootfs.diff_ids, other.blobs, strict=False):
                if diff_id in known and (record.oci or blob.media_type in GZIP):
                    known[diff_id].setdefault(blob.digest, blob)
                    neighbours[diff_id].update(dict.fromkeys(paths))
        sources = []
        for diff_id, chain_id in zip(record.config.rootfs.diff_ids, record.chain_ids, strict=True):
            layer = self._store.snapshots.layer(chain_id)
            paths = [path for path in neighbours[diff_id] if path != self._repository.path]
            sources.append(
                Source(diff_id, chain_id, layer.size if layer else 0, tuple(known[diff_id].values()), tuple(paths))
            )
        return sources

    def _say(self, source: Source, status: str, current: int = 0, total: int = 0) -> None:
        self._reports.say(source.diff_id, status, current, total)

    # --- one layer --------------------------------------------------------------------------------

    async def _layer(self, source: Source, *, oci: bool) -> None:
        if (source.diff_id, oci) in self._there:
            self._say(source, "Layer already exists")
            return
        if self._turns.full:
            self._say(source, "Waiting")
        async with self._turns:
            self._there[source.diff_id, oci] = await self._have(source, oci=oci)

    async def _have(self, source: Source, *, oci: bool) -> Descriptor:
        def retrying(seconds: float) -> None:
            self._say(source, retrying_text(seconds))

        for blob in source.known:
            if await self._repository.has_blob(blob.digest, retrying):
                self._say(source, "Layer already exists")
                return _of_kind(blob, oci=oci)
        for blob in source.known:
            for path in source.neighbours:
                if await self._repository.mount(blob.digest, path):
                    self._say(source, f"Mounted from {path}")
                    return _of_kind(blob, oci=oci)
        sent = await self._repository.upload(
            lambda: _Packed(self._store, source, self._packing, self._reporter(source)), retrying
        )
        self._say(source, "Pushed")
        return Descriptor(media_type=OCI_GZIP if oci else DOCKER_GZIP, digest=sent.digest, size=sent.size)

    def _reporter(self, source: Source) -> Callable[[int], None]:
        reported = -_REPORT_EVERY

        def report(current: int) -> None:
            nonlocal reported
            if current - reported >= _REPORT_EVERY:
                reported = current
                self._say(source, "Pushing", current, max(source.size, 1))

        return report

    # --- the manifest -----------------------------------------------------------------------------

    async def _configuration(self, name: Reference, record: ImageRecord) -> bytes:
        try:
            return await asyncio.to_thread(self._store.configuration, record)
        except NotFound:  # deleted since the push began
            raise _unknown(name) from None

    async def _manifest(self, name: Reference, record: ImageRecord, raw_config: bytes) -> tuple[str, int]:
        """Put the manifest. Returns its digest and size."""
        blobs = self.blobs(record.config.rootfs.diff_ids, oci=record.oci)
        kind = OCI_CONFIG if record.oci else DOCKER_CONFIG
        config = await self.document(raw_config, kind)
        raw = await asyncio.to_thread(self._as_it_came, record, blobs)
        if raw is None:
            raw = manifest(config, blobs, oci=record.oci)
        digest = await self.put(name, raw, oci=record.oci)
        await self._store.pushed(record.id, name._replace(tag="", digest=digest), blobs)
        return digest, len(raw)

    def blobs(self, diff_ids: Sequence[str], *, oci: bool) -> list[Descriptor]:
        """The layers as `layers` has found or sent them."""
        return [self._there[diff_id, oci] for diff_id in diff_ids]

    async def document(self, raw: bytes, media_type: str) -> Descriptor:
        """Send a config unless the registry has it."""
        sent = _Document(raw)
        if not await self._repository.has_blob(sent.digest):
            await self._repository.upload(lambda: sent)
        return Descriptor(media_type=media_type, digest=sent.digest, size=sent.size)

    async def put(self, name: Reference, raw: bytes, *, oci: bool) -> str:
        """Put a manifest under a tag. Returns its digest."""
        await self._repository.put_manifest(name.tag, raw, OCI_MANIFEST if oci else DOCKER_MANIFEST)
        return f"sha256:{hashlib.sha256(raw).hexdigest()}"

    def _as_it_came(self, record: ImageRecord, blobs: Sequence[Descriptor]) -> bytes | None:
        """The manifest that the image was pulled with, if it names exactly these blobs; otherwise
        None. Blocking.
        """
        if not record.manifest:
            return None
        try:
            raw, manifest = self._store.manifest(record)
        except NotFound:  # deleted meanwhile, together with the image
            return None
        same = [(blob.digest, blob.size) for blob in manifest.layers] == [(blob.digest, blob.size) for blob in blobs]
        return raw if same else None


def _of_kind(blob: Descriptor, *, oci: bool) -> Descriptor:
    """The descriptor of the same blob for an OCI manifest or a Docker manifest."""
    other = {DOCKER_GZIP: OCI_GZIP} if oci else {OCI_GZIP: DOCKER_GZIP}
    return Descriptor(media_type=other.get(blob.media_type, blob.media_type), digest=blob.digest, size=blob.size)


def manifest(config: Descriptor, blobs: Sequence[Descriptor], *, oci: bool) -> bytes:
    """A manifest, formatted exactly as Docker does, so that an image has the same digest
    whichever engine pushes it.
    """

    def described(blob: Descriptor) -> dict[str, Any]:
        if oci:
            return {"mediaType": blob.media_type, "digest": blob.digest, "size": blob.size}
        return {"mediaType": blob.media_type, "size": blob.size, "digest": blob.digest}

    document = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST if oci else DOCKER_MANIFEST,
        "config": described(config),
        "layers": [described(blob) for blob in blobs],
    }
    return json.dumps(document, indent=3).encode()


class _Document:
    """A small blob to upload."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        self.size = len(data)

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        yield self._data


class _Packed:
    """A layer's archive to upload. `digest` and `size` are valid once all of it has been sent."""

    def __init__(self, store: ImageStore, source: Source, threads: Threads, report: Callable[[int], None]) -> None:
        self._diff = store.snapshots.layer_path(source.chain_id)
        self._source = source
        self._threads = threads
        self._report = report
        self._packed = hashlib.sha256()
        self._plain = hashlib.sha256()
        self.size = 0

    @property
    def digest(self) -> str:
        return f"sha256:{self._packed.hexdigest()}"

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The packed layer in pieces. Raises ServerError when the layer's files have changed."""
        packer = isal_zlib.compressobj(LEVEL, isal_zlib.DEFLATED, 31)
        done = 0
        with contextlib.ExitStack() as stack:
            # Files are opened and closed in threads, and the stack closes after the last read.
            stream = await uninterrupted(self._threads.run(stack.enter_context, tarsplit.stream(self._diff)))
            buffers = [memoryview(bytearray(_CHUNK)) for _ in range(2)]
            reading = self._threads.run(tarsplit.read, stream, buffers[0])
            try:
                while got := await uninterrupted(reading):
                    piece = buffers[0][:got]
                    buffers.reverse()
                    reading = self._threads.run(tarsplit.read, stream, buffers[0])
                    hashing = self._threads.run(self._plain.update, piece)
                    packing = self._threads.run(self._pack, packer, piece)
                    await uninterrupted(asyncio.gather(hashing, packing))
                    done += got
                    self._report(done)
                    if data := packing.result():
                        yield data
                if f"sha256:{self._plain.hexdigest()}" != self._source.diff_id:
                    raise ServerError(f"files of layer {self._source.diff_id} have changed since it was extracted")
                yield await uninterrupted(self._threads.run(self._finish, packer))
            finally:
                await uninterrupted(asyncio.wait([reading]))

    def _pack(self, packer: Any, piece: memoryview) -> bytes:
        return self._sent(packer.compress(piece))

    def _finish(self, packer: Any) -> bytes:
        return self._sent(packer.flush())

    def _sent(self, data: bytes) -> bytes:
        self._packed.update(data)
        self.size += len(data)
        return data


def packing_threads() -> Threads:
    return Threads(2 + min(8, os.cpu_count() or 1), batch=True)


__all__ = ["Pushing", "Source", "chosen", "manifest", "packing_threads"]
