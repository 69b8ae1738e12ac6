"""The name that was meant by a misspelt one: at most two characters are missing, superfluous or
other ones, as BuildKit and Docker suggest names. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

_FARTHEST = 2
"""Edits (Levenshtein distance) beyond which a name is another one."""
_LONGEST = 100
"""Characters: the time grows with their square."""
_MOST = 500
"""Options that are looked at."""


def nearest(name: str, options: Iterable[str]) -> str:
    """The first of the options with the fewest edits; empty if all are too far, or if `name` is
    one of them.
    """
    found, least = "", _FARTHEST + 1
    if len(name) > _LONGEST:
        return ""
    for option in itertools.islice(options, _MOST):
        if abs(len(option) - len(name)) < least:
            edits = _distance(name, option, least)
            if not edits:
                return ""
            if edits < least:
                found, least = option, edits
    return found


def _distance(one: str, other: str, enough: int) -> int:
    """The edits between two texts; `enough` if they are not fewer."""
    row = list(range(len(other) + 1))
    for at, character in enumerate(one, 1):
        above, row = row, [at]
        for column, each in enumerate(other, 1):
            row.append(min(above[column] + 1, row[-1] + 1, above[column - 1] + (character != each)))
        if min(row) >= enough:
            return enough
    return row[-1]


def hint(name: str, options: Iterable[str], sign: str = "") -> str:
    """` (did you mean X?)`, with `sign` before the name; empty if there is no such name."""
    meant = nearest(name, options)
    return f" (did you mean {sign}{meant}?)" if meant else ""


__all__ = ["hint", "nearest"]
