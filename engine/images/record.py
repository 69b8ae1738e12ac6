"""The record of an image, and what follows from one record alone. Pure.

Not here: all images together (`index.py`), changes (`store.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from engine.common import times
from engine.images import reference
from engine.wire.images import Descriptor, ImageConfig


class ImageUser(NamedTuple):
    """A container that was made from an image; `name` may be empty while it is being made."""

    id: str
    name: str
    running: bool


class ImageRecord(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The record of one image.

    `tags` and `digests` are canonical references (`docker.io/library/busybox:latest`).
    """

    id: str
    config: ImageConfig
    chain_ids: tuple[str, ...] = ()
    """One per layer, lowest first."""
    size: int = 0
    created: int = 0
    """ns since the epoch; 0 when the image does not say."""
    tags: tuple[str, ...] = ()
    digests: tuple[str, ...] = ()
    pending: str = ""
    """As in `storage.snapshots.Layer`."""
    blobs: tuple[Descriptor, ...] = ()
    """One per layer, when it was pulled or pushed: its blobs in registries."""
    oci: bool = False
    """It arrived with an OCI manifest, and is pushed with one."""
    manifest: str = ""
    """Digest of the manifest that it was pulled with; a blob of the content store."""
    parent: str = ""
    """The image that it was made from, which is kept as long as this one.

    Unknown for pulled images.
    """
    tagged: int = 0
    """ns since the epoch when it last got a tag here; 0 for never."""
    kept: bool = False
    """Deleted, but the build cache needs it. No client sees it."""

    @property
    def familiar_tags(self) -> list[str]:
        """In the familiar form, sorted."""
        return sorted(reference.read(tag).familiar for tag in self.tags)

    @property
    def familiar_digests(self) -> list[str]:
        return sorted(reference.read(digest).familiar for digest in self.digests)

    @property
    def labels(self) -> dict[str, str]:
        return self.config.config.labels if self.config.config is not None else {}

    @property
    def nameless(self) -> bool:
        return not self.tags and not self.digests

    @property
    def in_one_repository(self) -> bool:
        """At most one tag, and all digests of its repository (Docker's isSingleReference)."""
        if len(self.tags) + len(self.digests) <= 1:
            return True
        repositories = {reference.read(digest).repository for digest in self.digests}
        if len(self.tags) > 1:
            return False
        first = reference.read((*self.tags, *self.digests)[0]).repository
        return repositories == {first}


_INT64 = 1 << 63


def nanoseconds(text: str) -> int:
    """An RFC 3339 time of a configuration, since the epoch; 0 when it is none."""
    try:
        return times.parse_rfc3339(text) if text else 0
    except (ValueError, OverflowError):
        return 0  # in a record of an earlier engine version


def created(config: ImageConfig) -> int:
    """`ImageRecord.created`. A time before 1677 or after 2262 is the first or last one that a
    record can have.
    """
    return max(-_INT64, min(nanoseconds(config.created), _INT64 - 1))
