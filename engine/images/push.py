"""Images to registries: layers that are there are skipped, those that a neighbour has are mounted, the rest is packed while it is sent.

A layer's archive is made again from its files (`layers.stream`) and checked against its diff_id on the way; it is packed with gzip in threads and
nothing of it is kept. A manifest that was pulled goes out as it came, as long as the registry has the blobs it names.
Owns: the threads that pack. Not here: requests (registry.py), records (store.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from isal import isal_zlib

from engine.errors import NotFound, ServerError
from engine.images import layers, reference
from engine.images.reference import Reference
from engine.images.store import ImageRecord, ImageStore, bar
from engine.system.threads import batch_threads, uninterrupted
from engine.wire.images import Descriptor, Progress, ProgressDetail, PushResult

if TYPE_CHECKING:
    from engine.images.registry import Repository

PARALLEL = 5
"""Uploads of one push at a time."""
LEVEL = 2
"""Of igzip: two percent larger than its best, half as long."""

DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
DOCKER_CONFIG = "application/vnd.docker.container.image.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
DOCKER_GZIP = "application/vnd.docker.image.rootfs.diff.tar.gzip"
OCI_GZIP = "application/vnd.oci.image.layer.v1.tar+gzip"

_CHUNK = 1 << 20
_REPORT_EVERY = 1 << 19


class Source(NamedTuple):
    """A layer to be sent."""

    diff_id: str
    chain_id: str
    size: int
    known: tuple[Descriptor, ...]
    """What registries are known to have it as."""
    neighbours: tuple[str, ...]
    """Paths of repositories of the same registry that may have it."""


def chosen(store: ImageStore, name: Reference) -> list[tuple[Reference, ImageRecord]]:
    """The images that a push of `name` is about: of its tag, or of every tag of the repository. Raises NotFound."""
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

    def __init__(self, store: ImageStore, repository: Repository, packing: ThreadPoolExecutor) -> None:
        self._store = store
        self._repository = repository
        self._packing = packing
        self._reports: asyncio.Queue[Progress | None] = asyncio.Queue()
        self._slots = asyncio.Semaphore(PARALLEL)
        self._there: dict[tuple[str, bool], Descriptor] = {}
        """Layers, by diff_id and kind of manifest, that this push has seen in the registry."""

    async def run(self, images: Sequence[tuple[Reference, ImageRecord]]) -> AsyncGenerator[Progress, None]:
        """Send every image, and what Docker's clients draw meanwhile. Raises EngineError of the first that fails."""
        yield Progress(status=f"The push refers to repository [{images[0][0].repository}]")
        for name, record in images:
            async with self._store.claimed() as claim:
                for chain_id in record.chain_ids:
                    claim(chain_id)  # nobody deletes it while it is read
                config = await self._configuration(name, record)
                async with contextlib.aclosing(self._layers(record)) as steps:
                    async for progress in steps:
                        yield progress
                digest, size = await self._manifest(name, record, config)
            yield Progress(status=f"{name.tag}: digest: {digest} size: {size}")
            yield Progress(progress_detail=ProgressDetail(), aux=PushResult(tag=name.tag, digest=digest, size=size))

    async def _layers(self, record: ImageRecord) -> AsyncGenerator[Progress, None]:
        sources = {source.diff_id: source for source in self._sources(record)}
        for source in reversed(sources.values()):
            self._say(source, "Preparing")
        tasks = [asyncio.create_task(self._layer(source, oci=record.oci)) for source in sources.values()]
        ending = asyncio.create_task(self._end(tasks))
        try:
            while (progress := await self._reports.get()) is not None:
                yield progress
            await ending
        finally:
            for task in (*tasks, ending):
                task.cancel()
            await uninterrupted(asyncio.wait([*tasks, ending]))

    async def _end(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        try:
            if tasks:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
                for task in done:
                    task.result()
        finally:
            self._reports.put_nowait(None)

    def _sources(self, record: ImageRecord) -> list[Source]:
        """The layers of an image, with what other images of the engine tell about them."""
        known: dict[str, dict[str, Descriptor]] = {diff_id: {} for diff_id in record.config.rootfs.diff_ids}
        neighbours: dict[str, dict[str, None]] = {diff_id: {} for diff_id in known}
        for other in (record, *(other for other in self._store if other.id != record.id)):
            if not other.blobs:
                continue
            names = [reference.read(name) for name in other.digests]
            paths = [name.path for name in names if name.domain == self._repository.domain]
            for diff_id, blob in zip(other.config.rootfs.diff_ids, other.blobs, strict=False):
                if diff_id in known and (record.oci or blob.media_type in (DOCKER_GZIP, OCI_GZIP)):
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
        self._reports.put_nowait(
            Progress(
                status=status,
                progress_detail=ProgressDetail(current, total),
                progress=bar(min(current, total), total) if total else "",
                id=source.diff_id[7:19],
            )
        )

    # --- one layer --------------------------------------------------------------------------------------------------

    async def _layer(self, source: Source, *, oci: bool) -> None:
        if (source.diff_id, oci) in self._there:
            self._say(source, "Layer already exists")
            return
        if self._slots.locked():
            self._say(source, "Waiting")
        async with self._slots:
            self._there[source.diff_id, oci] = await self._have(source, oci=oci)

    async def _have(self, source: Source, *, oci: bool) -> Descriptor:
        for blob in source.known:
            if await self._repository.has_blob(blob.digest):
                self._say(source, "Layer already exists")
                return _of_kind(blob, oci=oci)
        for blob in source.known:
            for path in source.neighbours:
                if await self._repository.mount(blob.digest, path):
                    self._say(source, f"Mounted from {path}")
                    return _of_kind(blob, oci=oci)
        sent = await self._repository.upload(
            lambda: _Packed(self._store, source, self._packing, self._reporter(source))
        )
        self._say(source, "Pushed")
        return Descriptor(media_type=OCI_GZIP if oci else DOCKER_GZIP, digest=sent.digest, size=sent.size)

    def _reporter(self, source: Source) -> Callable[[int], None]:
        told = -_REPORT_EVERY

        def report(current: int) -> None:
            nonlocal told
            if current - told >= _REPORT_EVERY:
                told = current
                self._say(source, "Pushing", current, max(source.size, 1))

        return report

    # --- the manifest -----------------------------------------------------------------------------------------------

    async def _configuration(self, name: Reference, record: ImageRecord) -> bytes:
        try:
            return await asyncio.to_thread(self._store.configuration, record)
        except NotFound:  # deleted since the push was asked for
            raise _unknown(name) from None

    async def _manifest(self, name: Reference, record: ImageRecord, raw_config: bytes) -> tuple[str, int]:
        """Digest and size of what the tag leads to now."""
        if not await self._repository.has_blob(record.id):
            await self._repository.upload(lambda: _Document(raw_config))
        blobs = [self._there[diff_id, record.oci] for diff_id in record.config.rootfs.diff_ids]
        media_type = OCI_MANIFEST if record.oci else DOCKER_MANIFEST
        raw = await asyncio.to_thread(self._as_it_came, record, blobs)
        if raw is None:
            raw = _manifest(record, len(raw_config), blobs)
        digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
        await self._repository.put_manifest(name.tag, raw, media_type)
        await self._store.pushed(record.id, name._replace(tag="", digest=digest), blobs)
        return digest, len(raw)

    def _as_it_came(self, record: ImageRecord, blobs: Sequence[Descriptor]) -> bytes | None:
        """The manifest that the image was pulled with, when it names just these blobs. Blocking."""
        if not record.manifest:
            return None
        try:
            raw, manifest = self._store.manifest(record)
        except NotFound:  # with the image, meanwhile
            return None
        same = [(blob.digest, blob.size) for blob in manifest.layers] == [(blob.digest, blob.size) for blob in blobs]
        return raw if same else None


def _of_kind(blob: Descriptor, *, oci: bool) -> Descriptor:
    """A blob as manifests of the other kind call it: the bytes are the same."""
    other = {DOCKER_GZIP: OCI_GZIP} if oci else {OCI_GZIP: DOCKER_GZIP}
    return Descriptor(media_type=other.get(blob.media_type, blob.media_type), digest=blob.digest, size=blob.size)


def _manifest(record: ImageRecord, config_size: int, blobs: Sequence[Descriptor]) -> bytes:
    """As Docker writes it, to the space: one image has one digest, whoever pushes it."""

    def described(media_type: str, size: int, digest: str) -> dict[str, Any]:
        if record.oci:
            return {"mediaType": media_type, "digest": digest, "size": size}
        return {"mediaType": media_type, "size": size, "digest": digest}

    document = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST if record.oci else DOCKER_MANIFEST,
        "config": described(OCI_CONFIG if record.oci else DOCKER_CONFIG, config_size, record.id),
        "layers": [described(blob.media_type, blob.size, blob.digest) for blob in blobs],
    }
    return json.dumps(document, indent=3).encode()


class _Document:
    """A few bytes on their way to a registry."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        self.size = len(data)

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        yield self._data


class _Packed:
    """A layer's archive on its way to a registry; `digest` and `size` are of what was sent, when all of it was."""

    def __init__(
        self, store: ImageStore, source: Source, threads: ThreadPoolExecutor, report: Callable[[int], None]
    ) -> None:
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
        """Raises ServerError when the layer's files are not what they were."""
        loop = asyncio.get_running_loop()
        packer = isal_zlib.compressobj(LEVEL, isal_zlib.DEFLATED, 31)
        done = 0
        with contextlib.ExitStack() as stack:
            # Files are opened and closed in threads, and the stack is left when no thread reads any more.
            stream = await uninterrupted(
                loop.run_in_executor(self._threads, stack.enter_context, layers.stream(self._diff))
            )
            buffers = [memoryview(bytearray(_CHUNK)) for _ in range(2)]
            reading = loop.run_in_executor(self._threads, layers.read, stream, buffers[0])
            try:
                while got := await uninterrupted(reading):
                    piece = buffers[0][:got]
                    buffers.reverse()
                    reading = loop.run_in_executor(self._threads, layers.read, stream, buffers[0])
                    hashing = loop.run_in_executor(self._threads, self._plain.update, piece)
                    packing = loop.run_in_executor(self._threads, self._pack, packer, piece)
                    await uninterrupted(asyncio.gather(hashing, packing))
                    done += got
                    self._report(done)
                    if data := packing.result():
                        yield data
                if f"sha256:{self._plain.hexdigest()}" != self._source.diff_id:
                    raise ServerError(f"layer {self._source.diff_id} has other content than it was made of")
                yield await uninterrupted(loop.run_in_executor(self._threads, self._finish, packer))
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


def packing_threads() -> ThreadPoolExecutor:
    return batch_threads(2 + min(8, os.cpu_count() or 1), "pack")


__all__ = ["Pushing", "chosen", "packing_threads"]
