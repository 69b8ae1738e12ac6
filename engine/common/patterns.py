"""Regular expressions of clients: values of list filters, as those of `name` and `id` are, and log
options.

Rules: dockerd gives each of them to Go's `regexp`, whose syntax is RE2's. RE2 needs time in
proportion to the text whatever the expression is, so a client cannot stop the event loop with one.
Threads: any.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import re2

_LITERAL = re.compile(r"[\w/-]*")
_OPTIONS = re2.Options()
_OPTIONS.log_errors = False


def match(values: Sequence[str], text: str) -> bool:
    """True if the text equals a value, or if a value occurs in it as a regular expression.

    A value that is no regular expression matches only what equals it, as in dockerd.
    """
    return text in values or _matcher(tuple(values))(text)


@functools.lru_cache(maxsize=32)  # a list asks for each of its objects
def _matcher(values: tuple[str, ...]) -> Callable[[str], bool]:
    if all(map(_LITERAL.fullmatch, values)):  # most are: half the time for thousands
        return lambda text: any(value in text for value in values)
    found = re2.Set.SearchSet(_OPTIONS)
    for value in values:
        try:
            found.Add(value)
        except re2.error:
            continue
    found.Compile()
    return lambda text: found.Match(text) is not None


@functools.lru_cache(maxsize=32)
def compiled(expression: str) -> Any:
    """The expression, compiled: `search(text)` returns a match or None.

    Raises ValueError with the reason for an expression that RE2 does not have.
    """
    try:
        return re2.compile(expression, _OPTIONS)
    except re2.error as error:
        why = error.args[0] if error.args else error
        raise ValueError(why.decode(errors="replace") if isinstance(why, bytes) else str(why)) from error
    except UnicodeEncodeError as error:
        raise ValueError("invalid UTF-8") from error
