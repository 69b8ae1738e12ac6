"""The build cache in BuildKit's terms: `docker buildx du` and `docker buildx prune`.

A filter has conditions that all hold (`filters.py`); one filter of several is enough. The fields
`inuse`, `shared`, `private`, `mutable` and `immutable` are present where they are true. They may
also be compared with `true` and `false`, as clients can only send comparisons: BuildKit finds them
equal to nothing. A field that no entry has is absent.

Source: BuildKit's client/diskusage and cache/manager.
Pure. Not here: what a prune removes (`builder/prune.py`).
Raises: InvalidParameter that names the filters.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence

from engine.builder.buildkit import filters as language
from engine.builder.buildkit.control_messages import PruneRequest, Time, UsageRecord
from engine.builder.options import PruneOptions, check_filters
from engine.builder.prune import MUTABLE, Entry
from engine.common import booleans
from engine.errors import InvalidParameter

RECORDS, DESCRIPTION = 10_000, 500
"""Entries of the cache in one message, and bytes of each description."""
PATTERNS, MATCHED = 256, 500
"""Characters of all patterns of a request, and of a text that patterns are compared with. They
bound the time that one entry takes (`filters.matcher`).
"""

Condition = Callable[[Entry], bool]

_FLAGS: dict[str, Condition] = {
    "inuse": lambda entry: entry.in_use,
    "shared": lambda entry: entry.shared,
    "private": lambda entry: not entry.shared,
    "mutable": lambda entry: entry.type in MUTABLE,
    "immutable": lambda entry: entry.type not in MUTABLE,
}
_TEXTS: dict[str, Callable[[Entry], str]] = {
    "id": lambda entry: entry.id,
    "parent": lambda entry: entry.parent,
    "parents": lambda entry: entry.parent,
    "type": lambda entry: entry.type,
    "description": lambda entry: entry.description,
}


def condition(filters: Sequence[str], asks: str = "diskusage") -> Condition:
    """The condition that the filters of a request state. `asks`: what the request is for."""
    characters = sum(len(text) + 1 for text in filters)
    check_filters(characters)  # before they are read
    try:
        alternatives = [language.parse(text) for text in filters if text]
        check_filters(characters, sum(map(len, alternatives)))
        _check_patterns(alternatives)  # before they are compiled
        found = [[_one(each) for each in selectors] for selectors in alternatives]
    except InvalidParameter as error:
        shown = " ".join(filters)[:300]
        raise InvalidParameter(f"failed to parse {asks} filters [{shown}]: {error.message}") from error
    if not found:
        return lambda _: True
    return lambda entry: any(all(one(entry) for one in conditions) for conditions in found)


def _check_patterns(alternatives: Iterable[Iterable[language.Selector]]) -> None:
    selectors = itertools.chain.from_iterable(alternatives)
    if sum(len(each.value) for each in selectors if each.operator == "~=") > PATTERNS:
        raise InvalidParameter(f"the patterns have more than {PATTERNS} characters")


def _absent(_: Entry) -> str:
    return ""


def _one(selector: language.Selector) -> Condition:
    field, operator, value = selector
    flag, text = _FLAGS.get(field), _TEXTS.get(field, _absent)
    if flag is not None and not operator:
        return flag
    if flag is not None and operator != "~=" and value in booleans.WORDS:
        wanted = booleans.WORDS[value] == (operator == "==")
        return lambda entry: flag(entry) == wanted
    if operator == "==":
        return lambda entry: bool(shown := text(entry)) and shown == value
    if operator == "!=":
        return lambda entry: text(entry) != value
    matches = language.matcher(value) if operator else bool
    return lambda entry: matches(text(entry)[:MATCHED])


def prune_options(request: PruneRequest) -> PruneOptions:
    """The options of a prune."""
    age = request.keep_duration
    return PruneOptions(
        all=request.all,
        condition=condition(request.filters, "prune"),
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
        mutable=entry.type in MUTABLE,
        in_use=entry.in_use,
        size=entry.size,
        created=Time(*divmod(entry.created, 1_000_000_000)),
        used=Time(*divmod(entry.used, 1_000_000_000)),
        uses=entry.uses,
        description=entry.description.encode()[:DESCRIPTION].decode(errors="ignore"),
        kind=entry.type,
        shared=entry.shared,
        parents=[entry.parent] if entry.parent else [],
    )


__all__ = ["DESCRIPTION", "RECORDS", "condition", "prune_options", "record", "records"]
