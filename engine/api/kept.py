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

LISTS = 8 << 20
"""Bytes of all kept lists together, with their targets."""
_ENTRY = 256
"""Bytes that an entry costs besides."""


class Entry(NamedTuple):
    """One encoded object."""

    generation: int
    body: bytes
    until: int = 0
    """Time in nanoseconds since the epoch until which its Status text is right. A reply without
    such a text has 0, and is not asked for it.
    """


class KeptReplies:
    """The entries of all objects of one engine."""

    def __init__(self) -> None:
        self._by_shape: dict[Shape, dict[str, Entry]] = {}
        self.lists = KeptLists()

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


class KeptLists:
    """Lists of containers by request target (path and query), all of one generation of all
    containers.
    """

    def __init__(self) -> None:
        self._generation = -1
        self._lists: dict[bytes, tuple[bytes, int]] = {}
        self._size = 0

    def find(self, target: bytes, generation: int, now: int) -> bytes | None:
        """The list, if no container has changed since and all its Status texts are right at `now`
        (ns). Lists of earlier generations are dropped.
        """
        if generation != self._generation:
            self._lists.clear()
            self._generation, self._size = generation, 0
        body, until = self._lists.get(target, _NONE)
        return body if until > now else None

    def keep(self, target: bytes, generation: int, body: bytes, until: int) -> None:
        """Keep the list, as it was at the generation for which `find` was called, if there is
        room.
        """
        if generation != self._generation:
            return
        if target in self._lists:
            self._size -= len(self._lists.pop(target)[0]) + len(target) + _ENTRY
        size = self._size + len(body) + len(target) + _ENTRY
        if size <= LISTS:
            self._lists[target], self._size = (body, until), size


_NONE = b"", 0
