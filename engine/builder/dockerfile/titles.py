"""Names of steps as BuildKit's progress has them: the instruction with the values of its variables.
Pure.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping

from engine.errors import InvalidParameter
from engine.images.instructions import words
from engine.images.instructions.records import Add, Copy, Instruction, Run, Workdir

_HIDDEN = "****"
"""In place of a secret."""


def title(instruction: Instruction, variables: Mapping[str, str], escape: str) -> str:
    """The name of a step. `variables`: those before it."""
    text = instruction.text
    try:
        if isinstance(instruction, Run):
            hidden = {mount.env: _HIDDEN for mount in instruction.mounts if mount.env}
            text = words.shown(_summarized(instruction), {**variables, **hidden}, escape)
        else:
            text = words.expanded(text, variables, escape)
    except InvalidParameter:  # a shell may know the words
        pass
    keyword, space, rest = text.partition(" ")
    return f"{keyword.upper()}{space}{rest}"


SHOWN = Run | Copy | Add | Workdir
"""Instructions that BuildKit's progress counts."""


def has_line(instruction: Instruction) -> bool:
    """True if an instruction has a line there: `WORKDIR /` counts, but has none."""
    root = isinstance(instruction, Workdir) and posixpath.normpath(instruction.path) in ("/", "//")
    return isinstance(instruction, SHOWN) and not root


def _summarized(run: Run) -> str:
    """The first line, and of a command that is one here-document also the first line of that."""
    if not run.heredocs or not isinstance(run.command, str) or words.heredoc_head(run.command) is None:
        return run.text
    first, _, more = run.heredocs[0].content.strip().partition("\n")
    return f"{run.text} ({first.rstrip()}{'...' if more else ''})"


__all__ = ["SHOWN", "has_line", "title"]
