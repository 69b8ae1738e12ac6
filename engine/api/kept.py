"""Encoded replies, kept until their object changes, because clients poll and get the same bytes
again.

An object has a `generation`, which is increased with every change that its replies show, and so
have all containers together. Entries are kept by shape, so that versions with the same shape of an
object share them.

Owns: the bytes. Threads: the event loop's. Not here: the generations (each object's own package
increases them).
"""

from __future__ import annotations

from typing import NamedTuple

from engine.api.versions import Shape


class Entry(NamedTuple):
    """One encoded object, or the whole list."""

    generation: int
    body: bytes
    until: int = 0
    """Time in nanoseconds since the epoch until which its Status texts are right. Replies without
    such a text have 0, and are not asked for it.
    """


class KeptReplies:
    """The entries of all objects of one engine."""

    def __init__(self) -> None:
        self._by_shape: dict[Shape, dict[str, Entry]] = {}
        self.lists: dict[tuple[Shape, bool], Entry] = {}
        """The lists of all containers (True) and of the running ones, without other conditions."""

    def of(self, shape: Shape) -> dict[str, Entry]:
        """Entries of this shape by the object's id.

        The caller compares the generations, and adds or replaces entries.
        """
        found = self._by_shape.get(shape)
        if found is None:
            found = self._by_shape[shape] = {}
        return found

    def forget(self, object_id: str) -> None:
        """Drop the entries of an object that was removed."""
        for entries in self._by_shape.values():
            entries.pop(object_id, None)
