"""Booleans as texts.

Rules: `strconv.ParseBool` of Go, which dockerd and the docker CLI use; dockerd's filters of lists,
which know fewer words. Threads: any.
"""

from __future__ import annotations

from collections.abc import Mapping

WORDS: Mapping[str, bool] = dict.fromkeys(("1", "t", "T", "true", "TRUE", "True"), True) | dict.fromkeys(
    ("0", "f", "F", "false", "FALSE", "False"), False
)
"""Those of ParseBool."""

FILTER_WORDS: Mapping[str, bool] = {word: WORDS[word] for word in ("1", "true", "True", "0", "false", "False")}
"""Those of filters."""
