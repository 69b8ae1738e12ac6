"""Encoded replies that are kept until their object changes: clients that poll ask for the same
bytes again.

An object has a `generation`, which grows with everything that its replies show. Entries are kept by
shape, so that versions which show an object alike share them.

Owns: the bytes. Threads: the event loop's. Not here: what changes an object (its own package counts
that).
"""

from __future__ import annotations

from typing import NamedTuple

from engine.api.versions import Shape


class Entry(NamedTuple):
    """One encoded object."""

    generation: int
    body: bytes
    until: int = 0
    """Nanoseconds since the epoch at which its words go out of date; 0 when they do not."""


class KeptReplies:
    """The entries of all objects of one engine."""

    def __init__(self) -> None:
        self._by_shape: dict[Shape, dict[str, Entry]] = {}

    def of(self, shape: Shape) -> dict[str, Entry]:
        """Entries of this shape by the object's id.

        The caller compares generations, and fills it.
        """
        found = self._by_shape.get(shape)
        if found is None:
            found = self._by_shape[shape] = {}
        return found

    def forget(self, object_id: str) -> None:
        """The object is gone."""
        for entries in self._by_shape.values():
            entries.pop(object_id, None)
