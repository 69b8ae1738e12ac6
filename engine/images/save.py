"""Saves images as one archive in three layouts: an OCI image layout that is also a Docker archive,
with links for the legacy layout.

- `oci-layout`, `index.json`, `blobs/sha256/…`: OCI image layout 1.0, as skopeo, podman and Docker
  since 25 read it.
- `manifest.json`, `repositories`: for `docker load` of any age, and for docker-archive of skopeo
  and podman.
- ID/VERSION, ID/json, ID/layer.tar for each layer (Docker Engine API, "Image tarball format");
  layer.tar is a link to the blob.

Layers are written as the tar streams of their diff_ids, regenerated from their files a megabyte at
a time. Each occurs once.

Not here: loading (archive.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import tarfile
from collections.abc import AsyncGenerator, Sequence
from typing import Any, NamedTuple

import msgspec

from engine.common import times
from engine.errors import InvalidParameter, NotFound, ServerError
from engine.events import EventLog
from engine.images import platforms, reference, tarsplit
from engine.images.archive import NAME_ANNOTATION, REF_NAME_ANNOTATION
from engine.images.record import ImageRecord
from engine.images.reference import Reference
from engine.images.store import ImageStore
from engine.system.threads import uninterrupted
from engine.wire.images import Platform

_CHUNK = 1 << 20


class Saved(NamedTuple):
    """An image to save, with its names in the archive."""

    record: ImageRecord
    names: tuple[Reference, ...]


def _chosen(store: ImageStore, names: Sequence[str]) -> list[Saved]:
    """The images to save: an id without a name, `name:tag` with that name, a repository with all
    its tags. Raises NotFound.
    """
    if not names:
        raise InvalidParameter("missing parameter: names")
    found: dict[str, Saved] = {}
    for name in names:
        for record, tags in _meant(store, name):
            before = found.get(record.id, Saved(record, ()))
            found[record.id] = Saved(record, tuple(dict.fromkeys((*before.names, *tags))))
    return list(found.values())


def _meant(store: ImageStore, name: str) -> list[tuple[ImageRecord, list[Reference]]]:
    try:
        wanted = reference.parse(name)
    except InvalidParameter:
        return [(store.get(name), [])]
    if not (wanted.tag or wanted.digest):
        found = []
        for record in store:
            tags = [tag for tag in map(reference.read, record.tags) if tag.repository == wanted.repository]
            if tags:
                found.append((record, sorted(tags)))
        if found:
            return found
    record = store.get(name)
    return [(record, [wanted] if wanted.canonical in record.tags else [])]


async def save(store: ImageStore, events: EventLog, names: Sequence[str], platform: Platform | None = None) -> Saving:
    """The archive of the named images. Raises NotFound at once, also for an image of another than
    the wanted platform, and ServerError later when a layer's files have changed.
    """
    images = _chosen(store, names)
    for image in images:
        shown = image.names[0].familiar if image.names else image.record.id
        platforms.check(shown, image.record.config, platform)
    try:
        configurations = [await asyncio.to_thread(store.configuration, image.record) for image in images]
        for image in images:
            store.get(image.record.id)
    except NotFound:  # deleted meanwhile
        raise NotFound(f"No such image: {', '.join(names)}"[:300]) from None
    return Saving(
        store, events, images, configurations
    )  # Saving claims the layers; nothing was awaited since the look-up


class Saving:
    """An archive being sent, in chunks. Its layers are kept until `aclose`."""

    def __init__(
        self, store: ImageStore, events: EventLog, images: Sequence[Saved], configurations: Sequence[bytes]
    ) -> None:
        self._claims = store.claims()
        for image in images:
            for chain_id in image.record.chain_ids:
                self._claims.claim(chain_id)
        self._chunks = _stream(store, events, images, configurations)

    def __aiter__(self) -> Saving:
        return self

    async def __anext__(self) -> bytes:
        return await anext(self._chunks)

    async def aclose(self) -> None:
        try:
            await self._chunks.aclose()
        finally:
            await uninterrupted(self._claims.release())


async def _stream(
    store: ImageStore, events: EventLog, images: Sequence[Saved], configurations: Sequence[bytes]
) -> AsyncGenerator[bytes, None]:
    out = _Archive(store)
    yield out.head("blobs/", b"") + out.head("blobs/sha256/", b"")
    for image, raw in zip(images, configurations, strict=True):
        for diff_id, chain_id in zip(image.record.config.rootfs.diff_ids, image.record.chain_ids, strict=True):
            async with contextlib.aclosing(out.layer(diff_id, chain_id)) as chunks:
                async for chunk in chunks:
                    yield chunk
        yield await asyncio.to_thread(out.documents, image, raw)
    yield out.end(images)
    for image in images:
        for name in [tag.familiar for tag in image.names] or [image.record.id]:
            events.publish("image", "save", image.record.id, {**image.record.labels, "name": name})


class _Archive:
    """One archive being written: the members it has so far."""

    def __init__(self, store: ImageStore) -> None:
        self._store = store
        self._there: set[str] = set()
        self._sizes: dict[str, int] = {}
        self._manifests: dict[str, dict[str, Any]] = {}
        self._tops: dict[str, str] = {}

    def head(self, name: str, data: bytes, *, size: int = -1, link: str = "") -> bytes:
        """A member, complete unless `size` announces that its content follows."""
        info = tarfile.TarInfo(name.rstrip("/"))
        info.mode, info.mtime = 0o644, 0
        info.size = len(data) if size < 0 else size
        if name.endswith("/"):
            info.type, info.mode = tarfile.DIRTYPE, 0o755
        elif link:
            info.type, info.linkname, info.mode = tarfile.SYMTYPE, link, 0o777
        self._there.add(name)
        # GNU's form has sizes beyond 8 GiB without an extra header.
        return info.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % tarfile.BLOCKSIZE)

    async def layer(self, diff_id: str, chain_id: str) -> AsyncGenerator[bytes, None]:
        """Write a layer's blob, unless it is in the archive already."""
        name = f"blobs/sha256/{diff_id[7:]}"
        if name in self._there:
            return
        diff = self._store.snapshots.layer_path(chain_id)
        self._sizes[diff_id] = size = await asyncio.to_thread(tarsplit.stream_size, diff)
        yield self.head(name, b"", size=size)
        with contextlib.ExitStack() as stack:
            source = await uninterrupted(asyncio.to_thread(stack.enter_context, tarsplit.stream(diff)))
            left = size

            def piece() -> bytes:
                nonlocal left
                data = bytearray(min(left, _CHUNK))
                got = tarsplit.read(source, memoryview(data))
                left -= got
                return bytes(data) if got == len(data) else bytes(data[:got])

            done = 0
            reading = asyncio.ensure_future(asyncio.to_thread(piece))
            try:
                while data := await uninterrupted(reading):
                    done += len(data)
                    reading = asyncio.ensure_future(asyncio.to_thread(piece))
                    yield data
            finally:
                await uninterrupted(asyncio.wait([reading]))
        if done != size:
            raise ServerError(f"files of layer {diff_id} have changed since it was extracted")
        yield bytes(-size % tarfile.BLOCKSIZE)

    def documents(self, image: Saved, raw: bytes) -> bytes:
        """Configuration, manifest and legacy directories of an image. Blocking."""
        record = image.record
        diff_ids = record.config.rootfs.diff_ids
        manifest = _json(
            {
                "schemaVersion": 2,
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                "config": _described("config.v1+json", record.id, len(raw)),
                "layers": [_described("layer.v1.tar", diff_id, self._sizes[diff_id]) for diff_id in diff_ids],
            }
        )
        digest = f"sha256:{hashlib.sha256(manifest).hexdigest()}"
        self._manifests[record.id] = _described("manifest.v1+json", digest, len(manifest))
        out = io.BytesIO()
        for name, data in ((record.id, raw), (digest, manifest)):
            if f"blobs/sha256/{name[7:]}" not in self._there:
                out.write(self.head(f"blobs/sha256/{name[7:]}", data))
        self._legacy(record, raw, out)
        return out.getvalue()

    def _legacy(self, record: ImageRecord, raw: bytes, out: io.BytesIO) -> None:
        parent = ""
        last = len(record.chain_ids) - 1
        for at, (diff_id, chain_id) in enumerate(zip(record.config.rootfs.diff_ids, record.chain_ids, strict=True)):
            # The topmost layer carries the configuration, so its directory is the image's own.
            document: dict[str, Any] = {"created": times.rfc3339(record.created), "os": "linux"}
            if at == last:
                document = msgspec.json.decode(raw)
                for name in ("rootfs", "history"):
                    document.pop(name, None)
            layer_id = hashlib.sha256(f"{parent} {chain_id} {record.id if at == last else ''}".encode()).hexdigest()
            document["id"] = layer_id
            if parent:
                document["parent"] = parent
            if f"{layer_id}/" not in self._there:
                out.write(self.head(f"{layer_id}/", b""))
                out.write(self.head(f"{layer_id}/VERSION", b"1.0"))
                out.write(self.head(f"{layer_id}/json", _json(document)))
                out.write(self.head(f"{layer_id}/layer.tar", b"", link=f"../blobs/sha256/{diff_id[7:]}"))
            parent = layer_id
        self._tops[record.id] = parent

    def end(self, images: Sequence[Saved]) -> bytes:
        """The index documents, and the end mark."""
        entries, items = [], []
        repositories: dict[str, dict[str, str]] = {}
        for image in images:
            described = self._manifests[image.record.id]
            for name in image.names:
                annotations = {NAME_ANNOTATION: name.canonical, REF_NAME_ANNOTATION: name.tag}
                entries.append({**described, "annotations": annotations})
                if image.record.chain_ids:
                    repositories.setdefault(name.familiar_repository, {})[name.tag] = self._tops[image.record.id]
            if not image.names:
                entries.append(described)
            item = {
                "Config": f"blobs/sha256/{image.record.id[7:]}",
                "RepoTags": [name.familiar for name in image.names] or None,
                "Layers": [f"blobs/sha256/{diff_id[7:]}" for diff_id in image.record.config.rootfs.diff_ids],
            }
            if any(other.record.id == image.record.parent for other in images):
                item["Parent"] = image.record.parent
            items.append(item)
        index = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": entries}
        return b"".join(
            (
                self.head("index.json", _json(index)),
                self.head("manifest.json", _json(items)),
                self.head("oci-layout", b'{"imageLayoutVersion":"1.0.0"}'),
                self.head("repositories", _json(repositories)) if repositories else b"",
                bytes(2 * tarfile.BLOCKSIZE),
            )
        )


def _described(kind: str, digest: str, size: int) -> dict[str, Any]:
    return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": digest, "size": size}


def _json(document: Any) -> bytes:
    return msgspec.json.encode(document)


__all__ = ["save"]
