"""Filters of lists: which keys each list knows, and which values they take. Pure.

Values of one key are alternatives, keys are all required; of labels every given one must hold.
Rules: Docker Engine API, the lists of nodes, services, tasks, secrets and configs; 1.24 to 1.41.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from engine.common import labels
from engine.errors import InvalidParameter

Filters = dict[str, list[str]]


def given(query: Mapping[str, Any], allowed: Iterable[str]) -> Filters:
    """The filters of a request, without keys that have no value.

    Raises InvalidParameter for a key that is not `allowed`.
    """
    found: Filters = query.get("filters") or {}
    known = frozenset(allowed)
    for key in found:
        if key not in known:
            raise InvalidParameter(f"Invalid filter '{key}'")
    return {key: values for key, values in found.items() if values}


def chosen(filters: Filters, key: str, words: Mapping[str, Any]) -> frozenset[Any] | None:
    """The meanings of the words of one key; None without the key. Empty words are skipped, as
    clients send them for "any".

    Raises InvalidParameter for a word that the key does not know.
    """
    values = [value for value in filters.get(key, ()) if value]
    if not values:
        return None
    for value in values:
        if value.lower() not in words:
            raise InvalidParameter(
                f"Invalid {key} filter: '{value[:100]}': one of {', '.join(sorted(words))} is expected"
            )
    return frozenset(words[value.lower()] for value in values)


def starts(filters: Filters, key: str) -> Callable[[str], bool]:
    """Whether a text starts with one of the key's values; any text without the key."""
    prefixes = tuple(filters.get(key, ()))
    if not prefixes:
        return lambda text: True
    return lambda text: text.startswith(prefixes)


def have_labels(filters: Filters, key: str = "label") -> Callable[[Mapping[str, str] | None], bool]:
    """Whether labels have every one of the key's values (`name` or `name=value`)."""
    wanted = filters.get(key, ())
    if not wanted:
        return lambda found: True
    return lambda found: labels.have_all(found or {}, wanted)
