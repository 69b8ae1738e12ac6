"""Patterns of `.dockerignore` and of `--exclude`, as in moby/patternmatcher: in order, the last
match decides, `!` includes again, `**` matches any number of directories.

Pure. Raises: InvalidParameter for a pattern that is none.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.errors import InvalidParameter


class Patterns:
    """An ordered list of patterns, compiled once."""

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        """`patterns`: as written on the lines of a file."""
        self._patterns = list(patterns)

    @classmethod
    def parse(cls, raw: bytes) -> Patterns:
        """The patterns of a `.dockerignore` file: comments in the first column, blanks trimmed."""
        raise NotImplementedError

    def excluded(self, path: str) -> bool:
        """True if a path or a directory above it is excluded, and not included again."""
        raise InvalidParameter("not yet")


__all__ = ["Patterns"]
