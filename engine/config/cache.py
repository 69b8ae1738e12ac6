"""What the build cache may keep: sizes, and policies of its garbage collection as text.

Rules: dockerd's `builder.gc`. Sizes are those of docker/go-units, RAMInBytes.
Not here: the collection, and the default policies (`builder/collection.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from engine.common.times import parse_duration

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgtp]?)(?:i?b)?", re.IGNORECASE)
_SPACES = {"reserved": "reserved", "max-used": "max_used", "min-free": "min_free"}
FILTERS = ("id", "parent", "type", "description", "inuse", "shared", "private")
"""What else a policy may choose records by."""


class CachePolicy(NamedTuple):
    """One policy. Sizes in bytes, 0 for none; without any, all that it chooses is removed."""

    all: bool = False
    """Records that images need, too."""
    unused_for: int = 0
    """Only records that were not used for so many nanoseconds."""
    filters: Mapping[str, tuple[str, ...]] = {}
    reserved: int = 0
    max_used: int = 0
    min_free: int = 0


def size(text: str) -> int:
    """Bytes of `10GB`, `512m` or `1024`. Raises ValueError."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r}: must be a size such as 10GB")
    return int(float(found[1]) * 1024 ** " kmgtp".index(found[2].lower() or " "))


def policy(text: str) -> CachePolicy:
    """A policy of `KEY=VALUE,…`. Raises ValueError, whose text begins with the value."""
    found = CachePolicy()
    filters: dict[str, tuple[str, ...]] = {}
    for entry in filter(None, text.split(",")):
        key, equals, value = entry.partition("=")
        try:
            if not equals or not value:
                raise ValueError("must be KEY=VALUE")
            if key in _SPACES:
                space: dict[str, Any] = {_SPACES[key]: size(value)}
                found = found._replace(**space)
            elif key == "all":
                found = found._replace(all=_boolean(value))
            elif key in ("unused-for", "until"):
                if found.unused_for:
                    raise ValueError("has one duration")
                found = found._replace(unused_for=parse_duration(value))
            elif key in FILTERS:
                filters[key] = (*filters.get(key, ()), value)
            else:
                raise ValueError(f"{key} is not known")
        except ValueError as error:
            raise ValueError(f"{text!r}: {error}") from error
    return found._replace(filters=filters)


def _boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"{text!r} is neither true nor false")
    return text == "true"


__all__ = ["FILTERS", "CachePolicy", "policy", "size"]
