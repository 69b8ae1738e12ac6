"""All images in memory: by id, by name, and which were made from which.

Owns:    the maps, which always agree with each other. They change in one call each, so a reader of
         the loop never sees half a change.
Threads: the event loop's.
Raises:  NotFound for a name that no image has.
Not here: what is on disk, and when a change becomes visible (`store.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from engine.errors import InvalidParameter, NotFound
from engine.images import reference
from engine.images.record import ImageRecord
from engine.images.reference import Reference

Changes = dict[str, ImageRecord]
"""Records by id, as they will be."""


class Index:
    """See the module."""

    def __init__(self) -> None:
        self._images: dict[str, ImageRecord] = {}
        self._by_name: dict[str, str] = {}
        """Canonical tag or digest reference → id."""
        self._children: dict[str, set[str]] = {}
        """Image → the images made from it, if any."""
        self.generation = 0
        """Grows with every change."""

    def __len__(self) -> int:
        return len(self._images)

    def __iter__(self) -> Iterator[ImageRecord]:
        return iter(self._images.values())

    def __contains__(self, image_id: object) -> bool:
        return image_id in self._images

    def ids(self) -> set[str]:
        return set(self._images)

    def find(self, image_id: str) -> ImageRecord | None:
        """By id alone."""
        return self._images.get(image_id)

    def owner(self, name: Reference) -> ImageRecord | None:
        """The image with this tag or digest."""
        return self._images.get(self._by_name.get(name.canonical, ""))

    def get(self, name: str) -> ImageRecord:
        """By reference (latest when it has no tag), id, or a prefix of an id that only one image
        has. `name@ID` is the image with that id, as in Docker.

        Raises NotFound as Docker does, with the complete name (`busybox:latest`) or with the fault
        of its form.
        """
        record = self._images.get(name) or self._images.get(f"sha256:{name}")
        if record is not None:
            return record
        missing = name
        try:
            parsed = reference.parse(name)
            tagged = parsed.tagged()
        except InvalidParameter as error:
            missing = f"{name}: {error.message}"
        else:
            image_id = self._by_name.get(tagged.canonical, tagged.digest)
            if image_id in self._images:
                return self._images[image_id]
            missing = (parsed if parsed.digest else tagged).familiar
        prefix = name.removeprefix("sha256:")
        if prefix and set(prefix) <= set("0123456789abcdef"):
            matches = [image_id for image_id in self._images if image_id.startswith(prefix, 7)]
            if len(matches) > 1:
                raise NotFound(f"No such image: {name}: {len(matches)} images have an id with this prefix")
            if matches:
                return self._images[matches[0]]
            if len(prefix) == 64:
                missing = name
        raise NotFound(f"No such image: {missing}")

    # --- changes ----------------------------------------------------------------------------------

    def put(self, record: ImageRecord) -> None:
        """Add an image, or replace its record."""
        self.drop(record.id)
        self._images[record.id] = record
        if record.parent:
            self._children.setdefault(record.parent, set()).add(record.id)
        for name in (*record.tags, *record.digests):
            self._by_name[name] = record.id

    def drop(self, image_id: str) -> None:
        """Remove an image. One that is not there is fine."""
        self.generation += 1
        old = self._images.pop(image_id, None)
        if old is None:
            return
        for name in (*old.tags, *old.digests):
            if self._by_name.get(name) == image_id:
                del self._by_name[name]
        if old.parent:
            self._children[old.parent].discard(image_id)
            if not self._children[old.parent]:
                del self._children[old.parent]

    def renamed(self, changed: Mapping[str, ImageRecord], names: Mapping[str, Sequence[Reference]]) -> Changes:
        """`changed`, with names added and taken from their former owners.

        The later of two claims on one name wins.
        """
        changed = dict(changed)
        for image_id, wanted in names.items():
            for name in wanted:
                canonical = name.canonical
                owners = {
                    self._by_name.get(canonical),
                    *(i for i, record in changed.items() if canonical in record.tags),
                }
                for owner in owners - {None, image_id}:
                    former = changed.get(owner or "") or self._images[owner or ""]
                    tags = tuple(tag for tag in former.tags if tag != canonical)
                    changed[former.id] = msgspec.structs.replace(former, tags=tags)
                record = changed[image_id]
                if canonical not in record.tags:
                    changed[image_id] = msgspec.structs.replace(
                        record, tags=(*record.tags, canonical), tagged=time.time_ns()
                    )
        return changed

    def without_digest(self, name: Reference, new_owner: str) -> Changes:
        """The record of another image that has this digest reference, without it."""
        former = self.owner(name)
        if former is None or former.id == new_owner:
            return {}
        rest = tuple(digest for digest in former.digests if digest != name.canonical)
        return {former.id: msgspec.structs.replace(former, digests=rest)}

    # --- families ---------------------------------------------------------------------------------

    def has_children(self, image_id: str) -> bool:
        return image_id in self._children

    def descendants(self, image_id: str) -> set[str]:
        """The image and those that were made from it, directly or not."""
        found, waiting = set[str](), [image_id]
        while waiting:
            each = waiting.pop()
            if each not in found:
                found.add(each)
                waiting += self._children.get(each, ())
        return found

    def orphans(self, record: ImageRecord, used: Callable[[str], object]) -> Iterator[ImageRecord]:
        """Nameless ancestors that are unused once this image is gone, the nearest first.

        `used(id)` is true when a container was made from it.
        """
        while (parent := self._images.get(record.parent)) is not None:
            if not parent.nameless or used(parent.id) or len(self._children[parent.id]) > 1:
                return
            yield parent
            record = parent
