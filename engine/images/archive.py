"""Archives of images: the three layouts that any version of `docker save` and OCI tools write, read
from a spooled tar file.

- Docker archive: `manifest.json` names configuration, layers and tags (Docker image specification
  1.2, "Combined Image JSON + Filesystem").
- OCI image layout: `index.json`, `blobs/<algorithm>/<hex>`; names are annotations of the index.
- legacy: `repositories` and one directory per layer with `VERSION`, `json`, `layer.tar` (Docker
  Engine API, "Image tarball format").

An archive is untrusted. Every document is bounded, names are used only to look up members of the
archive, and links between members are resolved inside it.

Not here: extraction (layers.py), the records of images (store.py).
Raises: InvalidParameter that names the fault of the archive.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import posixpath
import re
import threading
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from engine._fast.tar import ArchiveError, Reader
from engine.common import times
from engine.errors import InvalidParameter, ServerError, decoding_reason, reason
from engine.images import layers, platforms, reference
from engine.images.layers import Extracted
from engine.images.reference import Reference
from engine.images.spans import Span, compression
from engine.system import files
from engine.system.feed import one_body
from engine.system.tasks import shield
from engine.system.threads import uninterrupted
from engine.wire.images import ArchiveItem, Descriptor, History, ImageConfig, LegacyLayer, Manifest, Platform

T = TypeVar("T")

MAX_MEMBERS = 100_000
"""Members of an archive: an image has at most `MAX_LAYERS` layers of three or four members each."""
MAX_DOCUMENT = 4 << 20
"""Bytes of a manifest, an index or a configuration, as registries limit them too."""
MAX_LAYERS = 128
"""Layers of an image: as many as overlay.py can mount on every kernel."""
MAX_IMAGES = 1000

_SPOOL_CHUNK = 1 << 20
_LINKS = 8
"""Links from member to member that are followed."""

ARCHITECTURE = platforms.HOST.architecture
"""This host's architecture, in Go's words."""
LAYER_TYPES = re.compile(
    r"application/vnd\.(docker\.image\.rootfs\.(foreign\.)?diff\.tar|oci\.image\.layer\.(nondistributable\.)?v1\.tar)"
    r"([.+](gzip|zstd))?"
)
"""Media types of layers that can be extracted: not encrypted ones, and none of nydus, for
example.
"""
INDEX_DEPTH = 2
"""Levels of indexes below the first one."""

NAME_ANNOTATION = "io.containerd.image.name"
REF_NAME_ANNOTATION = "org.opencontainers.image.ref.name"
ATTESTATION = "vnd.docker.reference.type"
"""The annotation of a manifest about another one."""


class ArchivedImage(NamedTuple):
    """An image in an archive."""

    raw: bytes
    """The configuration's bytes, whose digest is the image's id."""
    config: ImageConfig
    layers: tuple[Span | Extracted, ...]
    names: tuple[Reference, ...]
    parent: str = ""
    """Id of the parent image in the same archive."""

    @property
    def id(self) -> str:
        return f"sha256:{hashlib.sha256(self.raw).hexdigest()}"


# --- receiving ------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def received(body: AsyncIterator[bytes], directory: Path, threads: layers.Layers) -> AsyncIterator[Span]:
    """The body, inflated if it is compressed, as an unnamed file, which the end of the context
    closes.

    One buffer is written while the next is received. Raises ServerError when it cannot be written,
    for example on a full disk, Unavailable if too many bodies are being received.
    """
    async with contextlib.AsyncExitStack() as stack:
        try:
            spool = await stack.enter_async_context(_temporary(directory))
            with one_body():
                span = Span(spool, 0, await _spool(body, spool))
            kind = compression(span)
            if kind:
                plain = await stack.enter_async_context(_temporary(directory))
                stop = threading.Event()
                inflating = asyncio.ensure_future(threads.work(layers.inflate, span, kind, plain, stop))
                try:
                    size = await shield(inflating)
                finally:
                    stop.set()  # when cancelled: the thread still uses our descriptors
                    await uninterrupted(asyncio.wait([inflating]))
                await uninterrupted(asyncio.to_thread(os.ftruncate, spool, 0))
                span = Span(plain, 0, size)
        except OSError as error:
            raise ServerError(f"receiving an archive into {directory}: {reason(error)}") from error
        yield span


@contextlib.asynccontextmanager
async def _temporary(directory: Path) -> AsyncIterator[int]:
    descriptor = files.temporary_file(directory)
    try:
        yield descriptor
    finally:
        # An unnamed file: closing it frees hundreds of megabytes, which takes a while.
        await uninterrupted(asyncio.to_thread(os.close, descriptor))


async def _spool(body: AsyncIterator[bytes], descriptor: int) -> int:
    size = 0
    writing: asyncio.Future[int] | None = None
    waiting: list[bytes] = []
    length = 0
    try:
        async for chunk in body:
            waiting.append(chunk)
            length += len(chunk)
            if length >= _SPOOL_CHUNK:
                if writing is not None:
                    await uninterrupted(writing)
                writing = asyncio.ensure_future(asyncio.to_thread(_write, descriptor, waiting))
                size += length
                waiting, length = [], 0
    finally:
        if writing is not None:
            await uninterrupted(writing)
    await uninterrupted(asyncio.to_thread(_write, descriptor, waiting))
    return size + length


def _write(descriptor: int, chunks: list[bytes]) -> int:
    # one by one: joining them takes the GIL for as long as copying all of them
    for chunk in chunks:
        data = memoryview(chunk)
        while data:
            data = data[os.write(descriptor, data) :]
    return 0


# --- members --------------------------------------------------------------------------------------


class Archive:
    """The members of a tar file by name. If a name occurs twice, the last member counts."""

    def __init__(self, span: Span, early: Mapping[int, Extracted] | None = None) -> None:
        """Read the whole index. Blocking. Raises InvalidParameter for a file that is not a tar
        archive, or a truncated one.

        `early`: layers that were extracted while the archive was received, by the offset of their
        content. The file has holes in their place.
        """
        self._span = span
        self._laid = early or {}
        self._members: dict[str, tuple[str, int, int, str]] = {}
        try:
            entries = Reader(span.descriptor, offset=span.offset, size=span.size).index(MAX_MEMBERS)
        except ArchiveError as error:
            raise InvalidParameter(f"invalid archive: {error}") from error
        except OSError as error:
            raise ServerError(f"reading an archive: {reason(error)}") from error
        for name, type_, offset, size, link in entries:
            self._members[_clean(name.decode(errors="replace"))] = (type_, offset, size, link.decode(errors="replace"))

    def __contains__(self, name: str) -> bool:
        return _clean(name) in self._members

    def names(self) -> list[str]:
        return list(self._members)

    def span(self, name: str) -> Span | Extracted:
        """The position of a regular member's content; links are followed within the archive.

        Raises InvalidParameter.
        """
        at = _clean(name)
        for _ in range(_LINKS):
            member = self._members.get(at)
            if member is None:
                raise InvalidParameter(f"invalid archive: {name} is missing")
            type_, offset, size, link = member
            if type_ == "0" and size >= 0:
                early = self._laid.get(self._span.offset + offset)
                return early or Span(self._span.descriptor, self._span.offset + offset, size)
            if type_ == "1":
                at = _clean(link)
            elif type_ == "2" and not link.startswith("/"):
                at = _clean(posixpath.join(posixpath.dirname(at), link))
            else:
                break
        raise InvalidParameter(f"invalid archive: {name} is not a regular file")

    def document(self, name: str, of: type[T]) -> T:
        """A JSON member. Raises InvalidParameter that names it."""
        return decode(self.span(name).read(MAX_DOCUMENT), of, name)


def _clean(name: str) -> str:
    """The name as a path from the archive's root. `..` cannot leave it."""
    return posixpath.normpath(f"/{name}").lstrip("/")


def decode(data: bytes, of: type[T], name: str) -> T:
    """JSON as Go reads it: nulls are absent. Raises InvalidParameter that names the document."""
    try:
        return msgspec.convert(_without_nulls(msgspec.json.decode(data)), of)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidParameter(f"invalid archive: {name}: {decoding_reason(error)}") from error


_SETS = ("ExposedPorts", "Volumes")
"""Go's map[string]struct{}: a null in one is an element all the same."""


def _without_nulls(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        if key in _SETS:
            return {name: {} if item is None else item for name, item in value.items()}
        return {name: _without_nulls(item, name) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value if item is not None]
    return value


def is_digest(text: str) -> bool:
    """True if it is a sha256 digest, the only supported kind."""
    return text.startswith("sha256:") and len(text) == 71 and set(text[7:]) <= set("0123456789abcdef")


def image_config(raw: bytes, name: str) -> ImageConfig:
    """The configuration of an image that this host can run. Raises InvalidParameter."""
    config = decode(raw, ImageConfig, name)
    if config.rootfs.type != "layers":
        raise InvalidParameter(f"invalid archive: {name}: rootfs has type {config.rootfs.type!r}, expected 'layers'")
    if len(config.rootfs.diff_ids) > MAX_LAYERS:
        raise InvalidParameter(f"max depth exceeded: {name} has more than {MAX_LAYERS} layers")
    for diff_id in config.rootfs.diff_ids:
        if not is_digest(diff_id):
            raise InvalidParameter(f"invalid archive: {name}: invalid diff_id {diff_id!r}")
    if sum(not step.empty_layer for step in config.history or ()) > len(config.rootfs.diff_ids):
        raise InvalidParameter(f"invalid archive: {name}: too many non-empty layers in History section")
    steps = ((f"history[{number}].created", step.created) for number, step in enumerate(config.history))
    for field, time in (("created", config.created), *steps):
        if time and not times.is_rfc3339(time):
            raise InvalidParameter(f"invalid archive: {name}: {field}: {time[:100]!r} is not an RFC 3339 time")
    if config.os not in ("", "linux"):
        raise InvalidParameter(f'image operating system "{config.os}" cannot be used on this platform')
    return config


# --- the layouts ----------------------------------------------------------------------------------


async def images(archive: Archive, digests: layers.Layers, platform: Platform | None = None) -> list[ArchivedImage]:
    """Every image of the archive, for this host or for `platform`. Raises InvalidParameter before
    anything is stored, and NotFound for an image that is for another than the wanted platform.
    """
    if "manifest.json" in archive and not (platform is not None and "index.json" in archive):
        found = await uninterrupted(asyncio.to_thread(_docker, archive))
    elif "index.json" in archive:
        found = await uninterrupted(asyncio.to_thread(_oci, archive, platform))
    elif "repositories" in archive or any(name.endswith("/layer.tar") for name in archive.names()):
        found = await _legacy(archive, digests)
    else:
        raise InvalidParameter("invalid archive: no manifest.json, index.json or repositories")
    if not found:
        raise InvalidParameter("invalid archive: no image in it")
    for image in found:
        platforms.check(image.names[0].familiar if image.names else image.id, image.config, platform)
    return found


def _image(raw: bytes, name: str, spans: tuple[Span | Extracted, ...], names: tuple[Reference, ...]) -> ArchivedImage:
    config = image_config(raw, name)
    if len(spans) != len(config.rootfs.diff_ids):
        raise InvalidParameter(
            f"invalid manifest, layers length mismatch: expected {len(spans)}, got {len(config.rootfs.diff_ids)}"
        )
    return ArchivedImage(raw, config, spans, names)


def _docker(archive: Archive) -> list[ArchivedImage]:
    items = archive.document("manifest.json", tuple[ArchiveItem, ...])
    _count(len(items))
    found = []
    for item in items:
        names = tuple(_named(text) for text in item.repo_tags)
        spans = tuple(archive.span(name) for name in item.layers)
        image = _image(archive.span(item.config).read(MAX_DOCUMENT), item.config, spans, names)
        found.append(image._replace(parent=item.parent))
    by_id = {image.id: image for image in found}
    return [image._replace(parent=_parent(image, by_id)) for image in found]


def _parent(image: ArchivedImage, by_id: Mapping[str, ArchivedImage]) -> str:
    """The parent of an image, if the archive contains it.

    Raises InvalidParameter if the image was not made from it.
    """
    parent = by_id.get(image.parent)
    if parent is None:
        return ""
    steps: tuple[object, ...]
    before: tuple[object, ...]
    steps, before = image.config.history, parent.config.history
    # an image's history has one more step than its parent's; without a history, compare the layers
    if not steps:
        steps, before = image.config.rootfs.diff_ids, before or parent.config.rootfs.diff_ids
    if not steps or steps[:-1] != before:
        raise InvalidParameter(f"image {image.parent} is not a valid parent for {image.id}")
    return image.parent


def _count(images: int) -> None:
    if images > MAX_IMAGES:
        raise InvalidParameter(f"invalid archive: more than {MAX_IMAGES} images")


def _named(text: str) -> Reference:
    if not reference.parse(text).tag:
        raise InvalidParameter(f"invalid archive: invalid tag {text!r}"[:300])
    return _tag(text)


def _tag(text: str) -> Reference:
    found = reference.parse(text).tagged()
    if found.digest:
        raise InvalidParameter(f"invalid archive: invalid tag {text!r}")
    return found


def _oci(archive: Archive, platform: Platform | None) -> list[ArchivedImage]:
    found: dict[str, ArchivedImage] = {}
    wanted = platform or platforms.HOST
    for descriptor in _manifests(archive, archive.document("index.json", Manifest), wanted, depth=0):
        manifest = decode(_blob(archive, descriptor), Manifest, descriptor.digest)
        if manifest.config is None:
            raise InvalidParameter(f"invalid archive: manifest {descriptor.digest} has no config")
        for layer in manifest.layers:
            if layer.media_type and not LAYER_TYPES.fullmatch(layer.media_type):
                raise InvalidParameter(f"invalid archive: unsupported layer type {layer.media_type!r}"[:300])
        spans = tuple(archive.span(_blob_name(layer.digest)) for layer in manifest.layers)
        names = _annotated(descriptor)
        image = _image(_blob(archive, manifest.config), manifest.config.digest, spans, names)
        known = found.get(image.id)
        found[image.id] = image if known is None else known._replace(names=tuple(dict.fromkeys(known.names + names)))
        _count(len(found))
    return list(found.values())


def _manifests(archive: Archive, index: Manifest, wanted: Platform, depth: int) -> list[Descriptor]:
    """The image manifests that an index names, directly or through other indexes. Of an inner index
    it is the one for the wanted platform. Attestations are skipped.
    """
    found: list[Descriptor] = []
    offered = [(each.platform, each) for each in index.manifests if not _attests(each)]
    if depth:
        chosen = platforms.best(wanted, offered)
        offered = [] if chosen is None else [(chosen.platform, chosen)]
    for _, descriptor in offered:
        if not descriptor.media_type.endswith(("image.index.v1+json", "manifest.list.v2+json")):
            found.append(descriptor)
            continue
        if depth >= INDEX_DEPTH:
            raise InvalidParameter("invalid archive: too many levels of nested indexes")
        inner = _manifests(archive, decode(_blob(archive, descriptor), Manifest, descriptor.digest), wanted, depth + 1)
        if not inner:
            raise InvalidParameter(f"no matching manifest for {platforms.text_of(wanted)} in the archive")
        found += [
            msgspec.structs.replace(below, annotations={**below.annotations, **descriptor.annotations})
            for below in inner
        ]
        _count(len(found))
    return found


def _attests(descriptor: Descriptor) -> bool:
    """True for a manifest that is no image: BuildKit adds attestations about its images so."""
    return ATTESTATION in descriptor.annotations or (
        descriptor.platform is not None and descriptor.platform.os == "unknown"
    )


def _annotated(descriptor: Descriptor) -> tuple[Reference, ...]:
    name = descriptor.annotations.get(NAME_ANNOTATION, "")
    if not name:
        name = descriptor.annotations.get(REF_NAME_ANNOTATION, "")
        if ":" not in name and "/" not in name:
            return ()  # a tag alone: the archive does not name its repository
    return (_tag(name.partition("@")[0]),)


def _blob_name(digest: str) -> str:
    algorithm, colon, value = digest.partition(":")
    if not colon or not algorithm.isalnum() or not value.isalnum():
        raise InvalidParameter(f"invalid archive: invalid digest {digest!r}")
    return f"blobs/{algorithm}/{value}"


def _blob(archive: Archive, descriptor: Descriptor) -> bytes:
    data = archive.span(_blob_name(descriptor.digest)).read(MAX_DOCUMENT)
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != descriptor.digest:
        raise InvalidParameter(f"invalid archive: content of {descriptor.digest} does not match its digest")
    return data


async def _legacy(archive: Archive, digests: layers.Layers) -> list[ArchivedImage]:
    """The images of the legacy layout. Each layer's directory names its parent. An image's
    configuration is made from the `json` of its topmost layer, as Docker does.
    """
    tops: dict[str, list[Reference]] = {}
    if "repositories" in archive:
        for repository, tags in archive.document("repositories", dict[str, dict[str, str]]).items():
            for tag, layer_id in tags.items():
                tops.setdefault(layer_id, []).append(reference.with_tag(repository, tag))
    else:
        ids = [name[: -len("/layer.tar")] for name in archive.names() if name.endswith("/layer.tar")]
        parents = {_legacy_layer(archive, layer_id).parent for layer_id in ids}
        tops = {layer_id: [] for layer_id in ids if layer_id not in parents}
    _count(len(tops))
    archived = []
    diff_ids: dict[str, str] = {}
    for top, names in tops.items():
        line: list[tuple[str, LegacyLayer]] = []
        at = top
        while at:
            if len(line) >= MAX_LAYERS:
                raise InvalidParameter(f"max depth exceeded: {top} has more than {MAX_LAYERS} layers")
            layer = await uninterrupted(asyncio.to_thread(_legacy_layer, archive, at))
            line.append((at, layer))
            at = layer.parent
        line.reverse()
        spans = [archive.span(f"{layer_id}/layer.tar") for layer_id, _ in line]
        missing = [
            (layer_id, span) for (layer_id, _), span in zip(line, spans, strict=True) if layer_id not in diff_ids
        ]
        results = await asyncio.gather(*(digests.digest_of(span) for _, span in missing), return_exceptions=True)
        for (layer_id, _), digest in zip(missing, results, strict=True):
            if isinstance(digest, BaseException):
                raise digest
            diff_ids[layer_id] = digest
        raw = _config_of_legacy(archive.span(f"{top}/json").read(MAX_DOCUMENT), line, diff_ids, top)
        archived.append(_image(raw, f"{top}/json", tuple(spans), tuple(names)))
    return archived


def _legacy_layer(archive: Archive, layer_id: str) -> LegacyLayer:
    if not layer_id or "/" in layer_id or layer_id in (".", ".."):
        raise InvalidParameter(f"invalid archive: invalid layer id {layer_id!r}")
    return archive.document(f"{layer_id}/json", LegacyLayer)


def _config_of_legacy(raw: bytes, line: list[tuple[str, LegacyLayer]], diff_ids: dict[str, str], top: str) -> bytes:
    document = decode(raw, dict[str, Any], f"{top}/json")
    for name in ("id", "parent", "Size", "parent_id", "layer_id", "throwaway"):
        document.pop(name, None)
    document["rootfs"] = {"type": "layers", "diff_ids": [diff_ids[layer_id] for layer_id, _ in line]}
    document["history"] = [
        History(
            created=layer.created,
            author=layer.author,
            comment=layer.comment,
            created_by=" ".join(_words(layer.container_config.cmd)) if layer.container_config else "",
        )
        for _, layer in line
    ]
    return msgspec.json.encode(document, order="deterministic")


def _words(command: list[str] | str | None) -> list[str]:
    return [command] if isinstance(command, str) else command or []


__all__ = ["Archive", "ArchivedImage", "images", "received"]
