"""The configuration of a build cache that travels with its layers: BuildKit's cacheconfig.v0, as a
blob of its own or inline in an image. Pure.

A record names a step by its key and the layer on which its result ends; layers name the one below.
The keys here are this engine's (`keys.py`), so that another engined finds the steps, and BuildKit
finds none, as this engine finds none of BuildKit's.

Source: BuildKit's cache/remotecache/v1 (CacheConfig), and its inline importer.
Raises: InvalidParameter for a configuration that is damaged or too large.
Not here: where the bytes come from (`buildkit/cache_imports.py`), the steps (`imported.py`).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from engine.errors import InvalidParameter
from engine.images import archive
from engine.images.archive import MAX_LAYERS, is_digest

CACHE_CONFIG = "application/vnd.buildkit.cacheconfig.v0"
"""Its media type."""
UNCOMPRESSED = "containerd.io/uncompressed"
"""Annotation of a layer's blob: its diff_id."""
LARGEST = 1 << 20
"""Bytes, as in BuildKit."""


class CacheLayer(msgspec.Struct, frozen=True, omit_defaults=True):
    """One layer. `parent`: the place of the one below in the list of all layers; -1 for none."""

    blob: str = ""
    parent: int = 0


class _Result(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    layer: int = 0
    created_at: str = ""


class _Record(msgspec.Struct, frozen=True, omit_defaults=True):
    digest: str = ""
    layers: tuple[_Result, ...] = ()


class _Config(msgspec.Struct, frozen=True, omit_defaults=True):
    layers: tuple[CacheLayer, ...] = ()
    records: tuple[_Record, ...] = ()


class Step(NamedTuple):
    """A step's result: the place of its topmost layer, and when it was made (RFC 3339)."""

    key: str
    layer: int
    created: str


class Steps(NamedTuple):
    """What a configuration says."""

    layers: tuple[CacheLayer, ...]
    by_key: dict[str, Step]

    def chain(self, step: Step) -> list[int]:
        """The places of a result's layers, lowest first. Raises InvalidParameter when they have no
        end.
        """
        found: list[int] = []
        place = step.layer
        while place >= 0:
            if place >= len(self.layers) or len(found) >= MAX_LAYERS:
                raise InvalidParameter("invalid cache configuration: a step's layers have no end")
            found.append(place)
            place = self.layers[place].parent
        return found[::-1]


def read(raw: bytes) -> Steps:
    """A configuration that is a blob."""
    return _steps(_decoded(raw))


def read_inline(text: object, diff_ids: Sequence[str], blobs: Sequence[str]) -> Steps:
    """The steps of an image, whose layers are those of the cache. `text`: the image's field
    `moby.buildkit.cache.v0`, base64; empty for none.
    """
    if not isinstance(text, str):
        raise InvalidParameter("invalid cache configuration: it is not a text")
    if len(diff_ids) != len(blobs):
        raise InvalidParameter(f"invalid image: {len(diff_ids)} layers, but {len(blobs)} in its manifest")
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidParameter("invalid cache configuration: it is not base64") from None
    records = _decoded(b'{"records":' + (raw or b"[]") + b"}").records
    layers = tuple(CacheLayer(blob, place - 1) for place, blob in enumerate(blobs))
    return _steps(_Config(layers, records))


def write(results: Iterable[tuple[str, Sequence[str], str]], blobs: Mapping[str, str]) -> bytes:
    """A configuration that is a blob. `results`: key of each step, diff_ids of its layers, and when
    it was made. `blobs`: digests by diff_id.
    """
    places: dict[tuple[str, ...], int] = {}
    layers: list[CacheLayer] = []
    records = []
    for key, diff_ids, created in sorted(results):
        place = -1
        for depth, diff_id in enumerate(diff_ids, 1):
            chain = tuple(diff_ids[:depth])
            if chain not in places:
                places[chain] = len(layers)
                layers.append(CacheLayer(blobs[diff_id], place))
            place = places[chain]
        records.append(_record(Step(key, place, created)))
    unique = {record.digest: record for record in records}
    return msgspec.json.encode(_Config(tuple(layers), tuple(unique.values())))


def write_inline(steps: Iterable[Step]) -> str:
    """The field of an image whose layers are those of the cache."""
    records = [_record(step) for step in sorted(steps)]
    return base64.b64encode(msgspec.json.encode(records)).decode()


def _record(step: Step) -> _Record:
    return _Record(f"sha256:{step.key}", (_Result(step.layer, step.created),))


def _decoded(raw: bytes) -> _Config:
    if len(raw) > LARGEST:
        raise InvalidParameter(f"invalid cache configuration: larger than {LARGEST} bytes")
    try:
        return archive.decode(raw, _Config, "cache configuration")
    except InvalidParameter as error:
        raise InvalidParameter(error.message.replace("invalid archive: ", "invalid ")) from error


def _steps(config: _Config) -> Steps:
    found = {}
    for record in config.records:
        if not is_digest(record.digest):
            raise InvalidParameter(f"invalid cache configuration: invalid digest {record.digest[:100]!r}")
        key = record.digest.removeprefix("sha256:")
        for result in record.layers:
            found[key] = Step(key, result.layer, result.created_at)
    return Steps(config.layers, found)


__all__ = [
    "CACHE_CONFIG",
    "LARGEST",
    "UNCOMPRESSED",
    "CacheLayer",
    "Step",
    "Steps",
    "read",
    "read_inline",
    "write",
    "write_inline",
]
