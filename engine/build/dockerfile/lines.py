"""A Dockerfile's bytes to logical lines: directives, continuations, comments, heredocs.

Pure. Not here: the meaning of a line (images/instructions/records.py).
Raises: InvalidParameter that names the line.
"""

from __future__ import annotations

import msgspec

from engine.images.instructions.words import Line


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """`syntax`, `check`: the values of these directives, empty when absent."""

    escape: str = "\\"
    syntax: str = ""
    check: str = ""
    lines: tuple[Line, ...] = ()
    warnings: tuple[str, ...] = ()


def parse(raw: bytes) -> Document:
    """The lines of a Dockerfile, in order."""
    raise NotImplementedError
