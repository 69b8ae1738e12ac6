"""Export of a build's cache (`--cache-to`): its steps with their layers, to a registry or into a
directory of the client. An inline cache is a part of the image (`builder/build.py`).

`mode=min` has the steps of the image's own stages, `mode=max` those of every stage that was built.
Layers that the target has are not sent again. The last document that arrives is the manifest, so a
failure leaves no cache that names a missing layer.

Threads: the event loop's; layers are packed in threads.
Raises:  InvalidParameter and Unimplemented for bad options, EngineError of an export, unless its
         client says `ignore-error=true`.
Not here: the configuration's form (`builder/cacheconfig.py`), packing (`images/push.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from engine.builder import cacheconfig
from engine.builder.buildkit.control_messages import CacheEntry
from engine.builder.buildkit.progress import Progress, VertexProgress
from engine.builder.buildkit.services import Session
from engine.builder.cacheconfig import CACHE_CONFIG, UNCOMPRESSED
from engine.builder.state import Made
from engine.errors import EngineError, InvalidParameter, ServerError, Unimplemented
from engine.images import reference
from engine.images.credentials import NOBODY
from engine.images.push import OCI_MANIFEST, Pushing
from engine.images.record import ImageRecord
from engine.images.remote import Remote
from engine.wire.images import Descriptor

INLINE, LOCAL, REGISTRY = "inline", "local", "registry"
MOST = 20
"""Caches of one build."""
_HUB_HOST = "registry-1.docker.io"
_PLACES = {LOCAL: "client directory", REGISTRY: "registry"}


def check(exports: Sequence[CacheEntry]) -> None:
    """Raises InvalidParameter and Unimplemented for what cannot be exported."""
    if len(exports) > MOST:
        raise InvalidParameter(f"a build exports at most {MOST} caches")
    for place, entry in enumerate(exports):
        if entry in exports[:place]:
            raise InvalidParameter(f"duplicate cache exports [{entry.type[:100]}]")
        if entry.type not in (INLINE, *_PLACES):
            raise Unimplemented(f"unknown cache exporter: {entry.type[:100]!r}")
        name = {LOCAL: "dest", REGISTRY: "ref"}.get(entry.type, "")
        if name and not entry.attributes.get(name):
            raise InvalidParameter(f"cache export {entry.type}: {name} is missing")
        if (mode := entry.attributes.get("mode", "min")) not in ("min", "max"):
            raise InvalidParameter(f"cache export {entry.type}: mode {mode[:100]!r} must be min or max")
        if (packed := entry.attributes.get("compression", "gzip")) != "gzip":
            raise Unimplemented(f"cache export {entry.type}: compression {packed[:100]!r} is not supported")
        if entry.attributes.get("image-manifest", "true") == "false":
            raise Unimplemented(f"cache export {entry.type}: image-manifest=false is not supported")


class Exports:
    """The exports of one build that are no part of its image."""

    def __init__(
        self, exports: Sequence[CacheEntry], session: Callable[[], Any], remote: Remote, progress: Progress
    ) -> None:
        """`session`: finds the client's."""
        self._exports = [entry for entry in exports if entry.type in _PLACES]
        self._session = session
        self._remote = remote
        self._progress = progress
        self.response: dict[str, str] = {}
        """What the client needs of them."""

    def __bool__(self) -> bool:
        return bool(self._exports)

    async def run(self, made: Sequence[Made]) -> None:
        """Export the steps of a build that has succeeded. Its layers are claimed meanwhile."""
        for entry in self._exports:
            vertex = self._progress.vertex(f"exporting cache to {_PLACES[entry.type]}")
            try:
                await self._export(entry, made, vertex)
            except EngineError as error:
                vertex.end(error.message)
                if entry.attributes.get("ignore-error") not in ("true", "1"):
                    raise ServerError(f"error exporting cache: {error.message}") from error
            finally:
                vertex.end()

    async def _export(self, entry: CacheEntry, made: Sequence[Made], vertex: VertexProgress) -> None:
        session = await self._session()
        name = reference.parse("cache").tagged()
        target: Any
        if entry.type == REGISTRY:
            name = reference.parse(entry.attributes["ref"])
            if name.digest:
                raise InvalidParameter("a cache cannot be exported to a digest")
            name = name.tagged()
            credentials = NOBODY
            with contextlib.suppress(EngineError):
                credentials = await session.auth(_HUB_HOST if name.domain == reference.DEFAULT_DOMAIN else name.domain)
            target = await self._remote.repository(name, credentials, "pull,push")
        else:
            target = _Directory(session, f"local:{entry.attributes['dest']}")
        pushing = self._remote.pushing_to(target)
        everything = entry.attributes.get("mode") == "max"
        chosen = [step for step in made if (everything or step.in_image) and step.state.chain_ids]
        vertex.status("preparing build cache for export", complete=True)
        blobs = await _layers(pushing, chosen, vertex)
        raw = await asyncio.to_thread(_configuration, chosen, blobs)
        config = await pushing.document(raw, CACHE_CONFIG)
        vertex.status(f"writing config {config.digest}", complete=True)
        document = _manifest(config, blobs)
        digest = await pushing.put(name, document, oci=True)
        vertex.status(f"writing cache image manifest {digest}", complete=True)
        described = {"mediaType": OCI_MANIFEST, "digest": digest, "size": len(document)}
        self.response["cache.manifest"] = msgspec.json.encode(described).decode()


async def _layers(pushing: Pushing, made: Sequence[Made], vertex: VertexProgress) -> dict[str, Descriptor]:
    """Have every layer at the target. Returns their blobs by diff_id."""
    records = [
        ImageRecord(id=each.state.image_id, config=each.state.document, chain_ids=each.state.chain_ids, oci=True)
        for each in made
    ]
    sources = {source.diff_id: source for record in records for source in pushing.sources(record)}
    async with contextlib.aclosing(pushing.layers([*sources.values()], oci=True)) as steps:
        async for _ in steps:
            pass
    blobs = dict(zip(sources, pushing.blobs([*sources], oci=True), strict=True))
    for blob in blobs.values():
        vertex.status(f"writing layer {blob.digest}", complete=True)
    return blobs


def _configuration(made: Sequence[Made], blobs: dict[str, Descriptor]) -> bytes:
    digests = {diff_id: blob.digest for diff_id, blob in blobs.items()}
    states = [each.state for each in made]
    return cacheconfig.write(
        ((state.key, state.document.rootfs.diff_ids, state.document.created) for state in states), digests
    )


def _manifest(config: Descriptor, blobs: dict[str, Descriptor]) -> bytes:
    layers = {
        blob.digest: {
            "mediaType": blob.media_type,
            "digest": blob.digest,
            "size": blob.size,
            "annotations": {UNCOMPRESSED: diff_id},
        }
        for diff_id, blob in blobs.items()
    }
    about = {"mediaType": config.media_type, "digest": config.digest, "size": config.size}
    manifest = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": about,
        "layers": [layers[digest] for digest in sorted(layers)],
    }
    return msgspec.json.encode(manifest)


class _Directory:
    """A directory of the client, as `Pushing` sees the repository of a registry."""

    domain = path = ""

    def __init__(self, session: Session, store: str) -> None:
        self._session = session
        self._store = store

    async def has_blob(self, digest: str, _retrying: Any = None) -> bool:
        return await self._session.has_blob(self._store, digest)

    async def mount(self, _digest: str, _source: str) -> bool:
        return False

    async def upload(self, source: Callable[[], Any], _retrying: Any = None) -> Any:
        sent = source()
        async with contextlib.aclosing(sent.chunks()) as chunks:
            await self._session.write_blob(self._store, chunks, lambda: sent.digest)
        return sent

    async def put_manifest(self, _name: str, raw: bytes, _media_type: str) -> None:
        async def chunks() -> Any:
            yield raw

        digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
        if not await self.has_blob(digest):
            await self._session.write_blob(self._store, chunks(), lambda: digest)


__all__ = ["INLINE", "MOST", "Exports", "check"]
