"""The caches that a client's build imports (`--cache-from`): from a registry (`type=registry`),
from an image with an inline cache in one, or from the client's own directory (`type=local`).

Only the configuration is read here. A cache that cannot be read is shown as such, and the build
goes on without it.

Threads: the event loop's.
Raises:  nothing but InvalidParameter for options that are malformed.
Not here: the use of its steps (`builder/imported.py`), exports.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from engine.builder import cacheconfig
from engine.builder.buildkit.control_messages import CacheEntry
from engine.builder.buildkit.progress import Progress
from engine.builder.buildkit.services import Session
from engine.builder.cacheconfig import CACHE_CONFIG, UNCOMPRESSED, Steps
from engine.builder.imported import Blobs, ImportedCache, ImportedLayer, Imports
from engine.errors import EngineError, InvalidParameter, ServerError, Unimplemented, decoding_reason
from engine.images import archive, platforms, reference
from engine.images.archive import INDEX_DEPTH, MAX_DOCUMENT, is_digest
from engine.images.credentials import NOBODY, Credentials
from engine.images.pull import MAX_BLOB
from engine.images.remote import Remote
from engine.wire.images import Descriptor, ImageConfig, Manifest, Platform

MOST = 20
"""Caches of one build."""
_HUB_HOST = "registry-1.docker.io"


class _Import(msgspec.Struct, rename="pascal"):
    """An entry of the frontend's option `cache-imports`."""

    type: str = ""
    attrs: dict[str, str] = {}


class _Source(NamedTuple):
    """Reads documents and fetches blobs."""

    name: str
    begin: str
    """The tag or digest of the cache's manifest."""
    manifest: Callable[[str], Any]
    blob: Callable[[str, int], Any]
    blobs: Blobs


def entries(attributes: Mapping[str, str]) -> list[CacheEntry]:
    """The caches that the frontend's option `cache-imports` names, or the older `cache-from`.
    Raises InvalidParameter.
    """
    text = attributes.get("cache-imports", "")
    try:
        listed = msgspec.json.decode(text.encode(errors="surrogateescape"), type=list[_Import] | None) if text else None
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise InvalidParameter(f"invalid value for cache-imports: {decoding_reason(error)}") from None
    if text:
        return unique(CacheEntry(each.type, each.attrs) for each in listed or ())
    return unique(CacheEntry("registry", {"ref": ref}) for ref in attributes.get("cache-from", "").split(",") if ref)


def unique(given: Iterable[CacheEntry]) -> list[CacheEntry]:
    """Each cache once. Raises InvalidParameter for more than MOST."""
    found: list[CacheEntry] = []
    for entry in given:
        if entry in found:
            continue
        if len(found) == MOST:  # not at the end: each entry is compared with all of them
            raise InvalidParameter(f"a build imports at most {MOST} caches")
        found.append(entry)
    return found


async def opened(
    wanted: Sequence[CacheEntry],
    session: Callable[[], Any],
    remote: Remote,
    platform: Platform | None,
    progress: Progress,
) -> Imports | None:
    """Read the configurations of caches, side by side. None without one. `session`: finds the
    client's.
    """
    found = await asyncio.gather(*(_shown(entry, session, remote, platform, progress) for entry in wanted))
    caches = [cache for cache in found if cache is not None]
    return Imports(caches) if caches else None


async def _shown(
    entry: CacheEntry, session: Callable[[], Any], remote: Remote, platform: Platform | None, progress: Progress
) -> ImportedCache | None:
    """One cache, with its line in the progress. None if it cannot be read."""
    attributes = entry.attributes
    name = attributes.get("ref") or attributes.get("src") or attributes.get("scope") or entry.type
    vertex = progress.vertex(f"importing cache manifest from {name[:300]}")
    try:
        client: Session | None = await session() if entry.type in ("registry", "local") else None
        if entry.type == "registry":
            source = await _registry(attributes.get("ref", ""), client, remote)
        elif entry.type == "local" and client is not None:
            source = _local(attributes, client)
        else:
            raise Unimplemented(f"unknown cache importer: {entry.type[:100]}")
        cache = await _read(source, platform or platforms.HOST)
    except EngineError as error:
        vertex.end(error.message)
        return None
    else:
        vertex.status(f"found {len(cache)} steps", complete=True)
        return cache
    finally:
        vertex.end()


async def _registry(ref: str, session: Session | None, remote: Remote) -> _Source:
    name = reference.parse(ref)
    if not name.digest:
        name = name.tagged()
    credentials: Credentials = NOBODY
    if session is not None:
        with contextlib.suppress(EngineError):  # without credentials the cache may be readable too
            credentials = await session.auth(_HUB_HOST if name.domain == reference.DEFAULT_DOMAIN else name.domain)
    repository = await remote.repository(name, credentials)

    async def manifest(which: str) -> bytes:
        raw: bytes = (await repository.manifest(which)).raw
        return raw

    return _Source(ref, name.digest or name.tag, manifest, repository.blob, repository)


def _local(attributes: Mapping[str, str], session: Session) -> _Source:
    directory, digest = attributes.get("src", ""), attributes.get("digest", "")
    if not directory or not is_digest(digest):
        raise InvalidParameter("a local cache needs src and digest")
    store = f"local:{directory}"
    blob = functools.partial(session.small_blob, store)
    return _Source(directory, digest, lambda which: blob(which, MAX_DOCUMENT), blob, _Directory(session, store))


class _Directory:
    """A cache in a directory of the client."""

    def __init__(self, session: Session, store: str) -> None:
        self._session = session
        self._store = store

    async def fetch(
        self, digest: str, size: int, target: int, report: Callable[[int], None], _retrying: Any = None, /
    ) -> None:
        """As `Blobs.fetch`."""
        hashed, received = hashlib.sha256(), 0
        async with contextlib.aclosing(self._session.blob(self._store, digest)) as chunks:
            async for chunk in chunks:
                if received + len(chunk) > size:
                    raise ServerError(f"{digest}: more than {size} bytes")
                await asyncio.to_thread(_append, target, chunk, hashed)
                received += len(chunk)
                report(received)
        if f"sha256:{hashed.hexdigest()}" != digest:
            raise ServerError(f"content of {digest} does not match its digest")


def _append(target: int, chunk: bytes, hashed: Any) -> None:
    hashed.update(chunk)
    view = memoryview(chunk)
    while view:
        view = view[os.write(target, view) :]


async def _read(source: _Source, platform: Platform) -> ImportedCache:
    """Follow a manifest to the configuration of a cache, or to an image with an inline one."""
    name = source.begin
    for _ in range(INDEX_DEPTH + 1):
        manifest = archive.decode(await source.manifest(name), Manifest, name)
        config = manifest.config
        blobs = {descriptor.digest: descriptor for descriptor in (*manifest.layers, *manifest.manifests)}
        if config is None:
            config = next(
                (descriptor for descriptor in manifest.manifests if descriptor.media_type == CACHE_CONFIG), None
            )
        if config is None:
            choice = [
                (descriptor.platform, descriptor)
                for descriptor in manifest.manifests
                if archive.ATTESTATION not in descriptor.annotations
            ]
            chosen = platforms.best(platform, choice)
            if chosen is None:
                raise InvalidParameter(f"{source.name}: neither a cache nor an image for {platforms.text_of(platform)}")
            name = _digest(chosen)
            continue
        if config.media_type == CACHE_CONFIG:
            raw = await source.blob(_digest(config), cacheconfig.LARGEST)
            steps = await asyncio.to_thread(cacheconfig.read, raw)
            return _cache(source, steps, blobs, {})
        image = archive.decode(await source.blob(_digest(config), MAX_DOCUMENT), ImageConfig, config.digest)
        layers = [descriptor.digest for descriptor in manifest.layers]
        diff_ids = image.rootfs.diff_ids
        steps = await asyncio.to_thread(cacheconfig.read_inline, image.cache, diff_ids, layers)
        return _cache(source, steps, blobs, dict(zip(layers, diff_ids, strict=True)))
    raise InvalidParameter(f"{source.name}: too many levels of nested indexes")


def _digest(blob: Descriptor) -> str:
    if not is_digest(blob.digest):
        raise InvalidParameter(f"invalid manifest: invalid digest {blob.digest[:100]!r}")
    return blob.digest


def _cache(
    source: _Source, steps: Steps, blobs: Mapping[str, Descriptor], diff_ids: Mapping[str, str]
) -> ImportedCache:
    """`diff_ids`: by blob, for those without an annotation."""
    layers: list[ImportedLayer | None] = []
    for layer in steps.layers:
        blob = blobs.get(layer.blob)
        diff_id = diff_ids.get(layer.blob) or (blob.annotations.get(UNCOMPRESSED, "") if blob is not None else "")
        usable = blob is not None and is_digest(blob.digest) and is_digest(diff_id) and 0 < blob.size <= MAX_BLOB
        if blob is None or not usable or not archive.LAYER_TYPES.fullmatch(blob.media_type):
            layers.append(None)
            continue
        layers.append(ImportedLayer(msgspec.structs.replace(blob, annotations={}, platform=None), diff_id))
    return ImportedCache(source.name, source.blobs, steps, layers)


__all__ = ["MOST", "entries", "opened", "unique"]
