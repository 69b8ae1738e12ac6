"""The room that images take on the disk: how much of it several images share, and all layers
together.

Pure. Layers that several images have are stored once. As in Docker, a nameless image that others
were made from does not count as one that shares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from engine.images.index import Index


class Sizes:
    """Sizes of the images of an index, kept until the index changes."""

    def __init__(self, index: Index, size_of: Callable[[str], int]) -> None:
        """`size_of`: the bytes of a layer, by its chain_id."""
        self._index = index
        self._size_of = size_of
        self._generation = -1
        self._total = 0
        self._shared: dict[str, int] = {}

    @property
    def total(self) -> int:
        """Bytes of all layers."""
        self._refresh()
        return self._total

    @property
    def shared(self) -> dict[str, int]:
        """Bytes of an image's layers that other images have as well, by the image's id."""
        self._refresh()
        return self._shared

    def _refresh(self) -> None:
        if self._generation == self._index.generation:
            return
        self._generation = self._index.generation
        sizes: dict[str, int] = {}
        users: Counter[str] = Counter()
        for record in self._index:
            for chain_id in record.chain_ids:
                if chain_id not in sizes:
                    sizes[chain_id] = self._size_of(chain_id)
            if not (record.nameless and self._index.has_children(record.id)):
                users.update(record.chain_ids)
        self._total = sum(sizes.values())
        self._shared = {
            record.id: sum(sizes[chain_id] for chain_id in record.chain_ids if users[chain_id] > 1)
            for record in self._index
        }


__all__ = ["Sizes"]
