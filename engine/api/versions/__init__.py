"""API versions: which ones are served, and every difference between them.

The domain and `wire/` know only the newest version. The rows in `v1_*.py` describe how older ones
differ: one file per version in which something changed, newest first. A version's shapes are
composed on first use and kept. There is one `Shape` per struct and set of rows, shared by all
versions in which the struct looks the same.

Not here: handlers. Nothing else compares version numbers: handlers ask `Version.has` for a flag,
routes have windows. To add a version: its file, its name in `_NEWEST_FIRST`, and `NEWEST`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from engine.api.versions import (
    v1_19,
    v1_20,
    v1_21,
    v1_22,
    v1_23,
    v1_24,
    v1_25,
    v1_26,
    v1_28,
    v1_29,
    v1_30,
    v1_32,
    v1_34,
    v1_38,
    v1_40,
    v1_41,
    v1_42,
    v1_43,
    v1_44,
    v1_45,
    v1_46,
    v1_47,
    v1_48,
    v1_49,
    v1_50,
    v1_51,
    v1_52,
    v1_54,
    v1_55,
)
from engine.api.versions.change import Change, Flag, Source, Upgrade, ignoring, release, without
from engine.api.versions.shapes import Shape, structs_in
from engine.errors import InvalidParameter

MINIMUM = "1.18"
NEWEST = "1.55"
RELEASE = "29.7.2"
"""Docker's last release that has it as its newest."""

_NEWEST_FIRST = (
    v1_55,
    v1_54,
    v1_52,
    v1_51,
    v1_50,
    v1_49,
    v1_48,
    v1_47,
    v1_46,
    v1_45,
    v1_44,
    v1_43,
    v1_42,
    v1_41,
    v1_40,
    v1_38,
    v1_34,
    v1_32,
    v1_30,
    v1_29,
    v1_28,
    v1_26,
    v1_25,
    v1_24,
    v1_23,
    v1_22,
    v1_21,
    v1_20,
    v1_19,
)

CHANGES: tuple[Change, ...] = tuple(change for module in _NEWEST_FIRST for change in module.CHANGES)
"""Newest first."""


class Table:
    """The rows of all versions, indexed by the struct or flag that they change, and the shapes
    composed so far.
    """

    __slots__ = ("_downgrades", "_flags", "_shapes", "_upgrades")

    def __init__(self, changes: Iterable[Change]) -> None:
        self._downgrades: dict[type, list[Change]] = {}
        self._upgrades: dict[type, list[Change]] = {}
        self._flags: dict[Flag, Change] = {}
        self._shapes: dict[tuple[type, tuple[Change, ...]], Shape] = {}
        self.add(changes)

    def add(self, changes: Iterable[Change]) -> None:
        """Add rows of structs that no shape was composed of yet.

        Flags must be known from the start.
        """
        for change in sorted(changes, key=lambda change: change.since, reverse=True):
            if change.flag is not None:
                self._flags[change.flag] = change
            if change.of is not None and change.downgrade is not None:
                self._downgrades.setdefault(change.of, []).append(change)
            if change.of is not None and change.upgrade is not None:
                self._upgrades.setdefault(change.of, []).append(change)

    def lacking(self, at: tuple[int, int]) -> frozenset[Flag]:
        """Flags of changes that version `at` does not have."""
        return frozenset(flag for flag, change in self._flags.items() if change.differs(at))

    def shape(self, of: type, at: tuple[int, int]) -> Shape:
        """The shape of a struct at version `at`. If several newer rows describe one field, the
        oldest of them applies, because it is nearest to `at`.
        """
        rows = {
            kind: [change for change in self._downgrades.get(kind, ()) if change.differs(at)]
            for kind in (of, *structs_in(of))
        }
        key = (of, tuple(change for changes in rows.values() for change in changes))
        shape = self._shapes.get(key)
        if shape is None:
            fields: dict[type, dict[str, Source]] = {}
            for kind, changes in rows.items():
                fields[kind] = {}
                for change in changes:
                    fields[kind] |= change.downgrade or {}
            own = fields.pop(of)
            shape = self._shapes[key] = Shape(of, own, fields)
        return shape

    def upgrade(self, of: type, at: tuple[int, int]) -> Upgrade | None:
        """All upgrades that a request of `at` needs as one function, oldest first. None when it
        needs none.
        """
        steps = [change.upgrade for change in self._upgrades.get(of, ()) if change.differs(at) and change.upgrade]
        if not steps:
            return None
        steps.reverse()

        def upgrade(request: dict[str, Any]) -> None:
            for step in steps:
                step(request)

        return upgrade


class Version:
    """One API version."""

    __slots__ = ("_lacks", "_shapes", "_table", "_upgrades", "name", "release")

    def __init__(self, name: str, table: Table) -> None:
        self.name = name
        self.release = release(name)
        self._table = table
        self._lacks = table.lacking(self.release)
        self._shapes: dict[type, Shape] = {}
        self._upgrades: dict[type, Upgrade | None] = {}

    def has(self, flag: Flag) -> bool:
        return flag not in self._lacks

    def shape(self, of: type) -> Shape:
        """The shape of a struct in this version. Versions with the same shape return the same
        object.
        """
        shape = self._shapes.get(of)
        if shape is None:
            shape = self._shapes[of] = self._table.shape(of, self.release)
        return shape

    def upgrade(self, of: type) -> Upgrade | None:
        """The function that turns a request body of this version into one of the newest version.
        None if they do not differ.
        """
        try:
            return self._upgrades[of]
        except KeyError:
            self._upgrades[of] = upgrade = self._table.upgrade(of, self.release)
            return upgrade

    def __repr__(self) -> str:
        return f"Version({self.name})"


_TABLE = Table(CHANGES)
_major, _minor = release(NEWEST)
VERSIONS = {f"{_major}.{n}": Version(f"{_major}.{n}", _TABLE) for n in range(release(MINIMUM)[1], _minor + 1)}
LATEST = VERSIONS[NEWEST]


def know(changes: Iterable[Change]) -> None:
    """Add rows of structs that an engine outside of a swarm does not load. Once for each."""
    _TABLE.add(changes)


_SERVED = f"this engine serves {MINIMUM} to {NEWEST}"


def spoken(text: str) -> Version:
    """The version that a path prefix names. Raises InvalidParameter, in Docker's words, when it is
    not served.
    """
    version = VERSIONS.get(text)
    if version is not None:
        return version
    try:
        asked = release(text)
    except ValueError:
        raise InvalidParameter(f"invalid API version: {text}") from None
    if asked < release(MINIMUM):
        raise InvalidParameter(
            f"client version {text} is too old. Minimum supported API version is {MINIMUM}, "
            f"please upgrade your client to a newer version ({_SERVED})"
        )
    if asked > release(NEWEST):
        raise InvalidParameter(
            f"client version {text} is too new. Maximum supported API version is {NEWEST}: "
            f"client is newer than server (client API version: {text}, server API version: {NEWEST}), {_SERVED}"
        )
    return VERSIONS[f"{asked[0]}.{asked[1]}"]


__all__ = [
    "CHANGES",
    "LATEST",
    "MINIMUM",
    "NEWEST",
    "VERSIONS",
    "Change",
    "Flag",
    "Shape",
    "Table",
    "Upgrade",
    "Version",
    "ignoring",
    "know",
    "release",
    "spoken",
    "without",
]
