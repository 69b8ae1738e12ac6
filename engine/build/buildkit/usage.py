"""The build cache in BuildKit's terms: `docker buildx du` and `docker buildx prune`.

A filter is a line of CSV whose conditions all hold; one filter of several is enough. A condition is
`KEY`, `KEY==VALUE`, `KEY!=VALUE` or `KEY~=VALUE` (contains). The keys that are true or false
(`inuse`, `shared`, `private`, `mutable`, `immutable`) stand alone, or are compared with `true` and
`false`.

Source: BuildKit's client/diskusage and cache/manager. There `~=` takes a regular expression; here
it takes text, because a client's expression could keep the event loop busy for minutes.
Pure. Not here: what a prune removes (`build/prune.py`).
Raises: InvalidParameter that names the filter.
"""

from __future__ import annotations

import csv
import re
import time
from collections.abc import Callable, Sequence

from engine import booleans
from engine.build.buildkit.control_messages import PruneRequest, Time, UsageRecord
from engine.build.options import PruneOptions, check_filters
from engine.build.prune import CONTEXT, Entry
from engine.errors import InvalidParameter, words

RECORDS, DESCRIPTION = 10_000, 500
"""Entries of the cache in one message, and bytes of each description."""

Condition = Callable[[Entry], bool]

_CONDITION = re.compile(r"([a-z-]+)(?:(==|!=|~=)(.*))?", re.DOTALL)
_FLAGS: dict[str, Condition] = {
    "inuse": lambda entry: entry.in_use,
    "shared": lambda entry: entry.shared,
    "private": lambda entry: not entry.shared,
    "mutable": lambda entry: entry.type == CONTEXT,
    "immutable": lambda entry: entry.type != CONTEXT,
}
_TEXTS: dict[str, Callable[[Entry], str]] = {
    "id": lambda entry: entry.id,
    "parent": lambda entry: entry.parent,
    "parents": lambda entry: entry.parent,
    "type": lambda entry: entry.type,
    "description": lambda entry: entry.description,
}


def condition(filters: Sequence[str]) -> Condition:
    """The condition that the filters of a request state."""
    characters = sum(len(text) + 1 for text in filters)
    check_filters(characters)  # before they are read
    alternatives = [[_one(field) for field in _fields(text)] for text in filters if text]
    check_filters(characters, sum(map(len, alternatives)))
    if not alternatives:
        return lambda _: True
    return lambda entry: any(all(one(entry) for one in conditions) for conditions in alternatives)


def _fields(text: str) -> list[str]:
    try:
        return [field for row in csv.reader([text]) for field in row if field]
    except csv.Error as error:
        raise InvalidParameter(f"invalid filter {text[:200]!r}: {words(error)}") from None


def _one(text: str) -> Condition:
    found = _CONDITION.fullmatch(text)
    if found is None or found[1] not in (*_FLAGS, *_TEXTS):
        raise InvalidParameter(f"invalid filter {text[:200]!r}")
    key, comparison, value = found[1], found[2], found[3] or ""
    if key in _FLAGS:
        flag, wanted = _FLAGS[key], True
        if comparison:
            if comparison == "~=" or value not in booleans.WORDS:
                raise InvalidParameter(f"invalid filter {text[:200]!r}: {key} is true or false")
            wanted = booleans.WORDS[value] == (comparison == "==")
        return lambda entry: flag(entry) == wanted
    shown = _TEXTS[key]
    if comparison == "==":
        return lambda entry: shown(entry) == value
    if comparison == "!=":
        return lambda entry: shown(entry) != value
    return lambda entry: value in shown(entry) if comparison else bool(shown(entry))


def prune_options(request: PruneRequest) -> PruneOptions:
    """The options of a prune."""
    age = request.keep_duration
    return PruneOptions(
        all=request.all,
        condition=condition(request.filters),
        unused_since_ns=time.time_ns() - age if age > 0 else 0,
        reserved_space=max(0, request.reserved_space),
        max_used_space=max(0, request.max_used_space),
        min_free_space=max(0, request.min_free_space),
    )


def records(entries: Sequence[Entry]) -> list[UsageRecord]:
    """The cache in one message, which must not be larger than what clients accept. The least
    recently used entries beyond RECORDS are one record.
    """
    found = [record(entry) for entry in entries[-RECORDS:]]
    if rest := entries[: max(0, len(entries) - RECORDS)]:
        size = sum(entry.size for entry in rest)
        words = f"{len(rest)} entries that were used before the others"
        found.insert(0, UsageRecord(id="others", size=size, description=words))
    return found


def record(entry: Entry) -> UsageRecord:
    """One entry of the cache."""
    return UsageRecord(
        id=entry.id,
        mutable=entry.type == CONTEXT,
        in_use=entry.in_use,
        size=entry.size,
        created=Time(*divmod(entry.created, 1_000_000_000)),
        used=Time(*divmod(entry.used, 1_000_000_000)),
        uses=entry.uses,
        description=entry.description.encode()[:DESCRIPTION].decode(errors="ignore"),
        kind=entry.type,
        shared=entry.shared,
    )


__all__ = ["DESCRIPTION", "RECORDS", "condition", "prune_options", "record", "records"]
