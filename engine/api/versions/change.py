"""One difference between two API versions: the vocabulary in which the files `v1_*.py` are written.

Pure. Not here: how the rows of several versions are composed (`__init__.py`), how an older reply is
built (`shapes.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any

Source = Callable[[Any], Any] | None
"""The origin of a field in an older reply: a function of the whole newest struct, or None if the
older reply does not have the field.
"""

Downgrade = Mapping[str, Source]
"""Fields of the older reply by path. A dot descends into an object, or into each element of a list
or map of objects.
"""

Upgrade = Callable[[dict[str, Any]], None]
"""Changes the JSON object of an older request in place. Field names are spelled as the struct
spells them.
"""


class Flag(enum.Enum):
    """Behaviour that depends on the version. Handlers ask `request.version.has(flag)`.

    The value is the change in the changelog's words.
    """

    LOGS_SINCE = "logs take since"
    INSPECT_SIZE = "inspect takes size"
    DETACH_KEYS = "start and attach take detachKeys"
    STATS_NAMED = "stats show name and id"
    KILL_NEEDS_A_PROCESS = "kill of a stopped container is an error"
    START_TAKES_NO_HOST_CONFIG = "start takes no HostConfig"
    NUMBERED_STEPS = "build numbers its steps as N/M"
    UNUSED_ARGUMENTS_WARN = "build warns of unused build arguments"
    BUILD_AUX = "build streams the image's id in aux"


class Change:
    """One difference, present from release `since` on.

    `downgrade` describes the older shape of the reply `of`. `upgrade` turns an older request `of`
    into the newer one. A change with only a `flag` is a change of behaviour.
    """

    __slots__ = ("downgrade", "flag", "of", "since", "upgrade", "words")

    def __init__(
        self,
        since: str,
        words: str,
        *,
        flag: Flag | None = None,
        of: type | None = None,
        downgrade: Downgrade | None = None,
        upgrade: Upgrade | None = None,
    ) -> None:
        if (of is None) != (downgrade is None and upgrade is None):
            raise ValueError(f"change {words!r}: `of` goes with `downgrade` or `upgrade`")
        self.since = release(since)
        self.words = words
        self.flag = flag
        self.of = of
        self.downgrade = downgrade
        self.upgrade = upgrade

    def __repr__(self) -> str:
        return f"Change({self.since[0]}.{self.since[1]}, {self.words!r})"


def release(text: str) -> tuple[int, int]:
    """`1.24` as the pair (1, 24). Raises ValueError for other texts."""
    major, dot, minor = text.partition(".")
    if not (dot and major.isdecimal() and minor.isdecimal() and major.isascii() and minor.isascii() and len(text) < 12):
        raise ValueError(f"not a version: {text!r}")
    return int(major), int(minor)


def without(*fields: str) -> Downgrade:
    """A downgrade for fields that older replies lack."""
    return dict.fromkeys(fields)


def ignoring(*fields: str) -> Upgrade:
    """An upgrade for fields that have no meaning in older requests.

    A dot descends into an object.
    """
    paths = [field.split(".") for field in fields]

    def drop(request: dict[str, Any]) -> None:
        for *parents, name in paths:
            place: Any = request
            for parent in parents:
                place = place.get(parent) if isinstance(place, dict) else None
            if isinstance(place, dict):
                place.pop(name, None)

    return drop
