"""Words of Dockerfile instructions: flags, quotes, heredocs, and the replacement of variables.

Pure. Not here: what an instruction does with its words (records.py).
Raises: InvalidParameter.
"""

from __future__ import annotations

import msgspec


class Heredoc(msgspec.Struct, frozen=True, kw_only=True):
    """`<<NAME` with the lines up to NAME. `expand` is False when NAME is quoted; `chomp` is that of
    `<<-`: the tabs before each line are not part of the content. `content` still has them.
    """

    name: str
    content: str = ""
    expand: bool = True
    chomp: bool = False
    descriptor: int = 0


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A logical line: continuations are joined, comments within are left out.

    `keyword` is in upper case. `text`: what follows the keyword. `rest`: `text` without the flags.
    """

    number: int
    keyword: str
    flags: tuple[tuple[str, str | None], ...] = ()
    text: str = ""
    rest: str = ""
    heredocs: tuple[Heredoc, ...] = ()
