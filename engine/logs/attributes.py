"""Attributes of log entries: the container's labels and variables that the options `labels`,
`labels-regex`, `env` and `env-regex` choose.

Rules are dockerd's: names are separated by commas and match exactly; an expression (Go's syntax)
may match anywhere in a name. Of equal names, the one of the later option in the order above is
used. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from engine.common import patterns
from engine.errors import InvalidParameter

OPTIONS = frozenset(("labels", "labels-regex", "env", "env-regex"))

SIZE_MAX = 32 << 10
"""Bytes of the attributes of one entry, as JSON."""

_ESCAPED = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def chosen(options: Mapping[str, str], labels: Mapping[str, str], environment: Sequence[str]) -> dict[str, str]:
    """The attributes by name. `environment`: `NAME=value`. The expressions are valid."""
    if not OPTIONS & options.keys():
        return {}
    variables = dict(pair.split("=", 1) for pair in environment if "=" in pair)
    found: dict[str, str] = {}
    for values, names, expression in ((labels, "labels", "labels-regex"), (variables, "env", "env-regex")):
        if text := options.get(names, ""):
            found.update((name, values[name]) for name in text.split(",") if name in values)
        if text := options.get(expression, ""):
            compiled = patterns.compiled(text)
            found.update((name, value) for name, value in values.items() if compiled.search(name))
    return found


def encoded(attributes: Mapping[str, str]) -> bytes:
    """A JSON object sorted by name, as Go writes it, or nothing without attributes. Raises
    InvalidParameter when it is too large."""
    if not attributes:
        return b""
    text = json.dumps(attributes, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    data = text.translate(_ESCAPED).encode()
    if len(data) > SIZE_MAX:
        raise InvalidParameter(f"log opts labels and env: {len(data)} bytes per log entry, more than {SIZE_MAX}")
    return data
