"""A Dockerfile's bytes to logical lines: directives, continuations, comments, heredocs.

Pure. Not here: the meaning of a line (images/instructions/records.py).
Raises: InvalidParameter that names the line.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec

from engine.builder.errors import AtLine
from engine.errors import InvalidParameter
from engine.images.instructions import words
from engine.images.instructions.words import Line

_LONGEST = 65535
"""Bytes of a physical line, as in every version of Docker; 1.12 drops the rest of the file."""

_COMMENTS = 100
"""Comments that are kept of those before one line."""

_DIRECTIVE = re.compile(rf"#[{words.SPACE}]*([a-zA-Z][a-zA-Z0-9]*)[\t\n\f\r ]*=[\t\n\f\r ]*(.+?)[\t\n\f\r ]*")

_FRONTEND = re.compile(r"([\w.:/-]+/)?docker/dockerfile(-upstream)?(:[\w.-]+)?(@sha256:[0-9a-f]{64})?")
"""Images of the frontend that this parser is, in any registry."""


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """`syntax`, `check`: the values of these directives, empty when absent."""

    escape: str = "\\"
    syntax: str = ""
    check: str = ""
    lines: tuple[Line, ...] = ()
    ends: Mapping[int, int] = MappingProxyType({})
    """The number of each logical line's last physical line, by that of its first."""
    comments: Mapping[int, tuple[str, ...]] = MappingProxyType({})
    """The comments before a logical line, by its number. An empty comment ends those before it."""
    gaps: tuple[int, ...] = ()
    """The numbers of the lines that end a continuation with an empty line within."""
    warnings: tuple[str, ...] = ()


def parse(raw: bytes) -> Document:
    """The lines of a Dockerfile, in order."""
    text = os.fsdecode(raw.removeprefix(b"\xef\xbb\xbf"))
    source = words.Source(_physical(text))
    directives, above = _directives(source.lines)
    escape = directives.get("escape", "\\")
    continued = re.compile(rf"(?:^|(?<=[^{re.escape(escape)}])){re.escape(escape)}[ \t]*\Z")
    lines: list[Line] = []
    ends: dict[int, int] = {}
    comments: dict[int, tuple[str, ...]] = {}
    gaps: list[int] = []
    before: deque[str] = deque(maxlen=_COMMENTS)
    warnings: list[str] = []
    while (physical := source.next()) is not None:
        number = source.at
        begin = physical.strip("\r\n").lstrip(words.SPACE)
        if begin.startswith("#") and number > above:
            comment = physical[1:].strip(words.SPACE)
            before.append(comment)
            if not comment:
                before.clear()
        if not begin or begin.startswith("#"):
            continue
        joined, empty = _joined(begin, source, continued)
        if not joined.strip(words.SPACE):
            continue
        if empty:
            gaps.append(source.at)
            warnings.append(f"[WARNING]: Empty continuation line found in:\n    {joined}")
        try:
            lines.append(words.with_heredocs(words.line(joined, number), source))
            ends[number] = source.at
            if before:
                comments[number] = tuple(before)
                before.clear()
        except InvalidParameter as error:
            raise at_line(error, number, joined, len(source.lines)) from error
    if warnings:
        warnings.append("[WARNING]: Empty continuation lines will become errors in a future release.")
    if not lines:
        reason = "file with no instructions"
        raise AtLine(f"No image was generated. Is your Dockerfile empty? ({reason})", 1, reason)
    return Document(
        escape=escape,
        syntax=directives.get("syntax", ""),
        check=directives.get("check", ""),
        lines=tuple(lines),
        ends=ends,
        comments=comments,
        gaps=tuple(gaps),
        warnings=tuple(warnings),
    )


def at_line(error: InvalidParameter, number: int, text: str, last: int = 0) -> AtLine:
    """The error with the line's number, and the instruction unless the message has it. `last`: the
    number of the last line that it is about, if that is not the same.
    """
    keyword = words.line(text, number).keyword[:50]
    named = re.search(rf"\b{re.escape(keyword)}\b", error.message)
    words_of_it = f"dockerfile parse error on line {number}: {'' if named else f'{keyword}: '}{error.message}"
    return AtLine(words_of_it, number, error.message, last)


def _fault(reason: str, number: int) -> AtLine:
    """A fault that ends the reading before the instructions. BuildKit shows the line before it."""
    return AtLine(f"dockerfile parse error on line {number}: {reason}", max(1, number - 1), reason)


def serves(frontend: str) -> bool:
    """Whether this parser is the frontend of that image."""
    return _FRONTEND.fullmatch(frontend) is not None


def check_frontend(syntax: str) -> None:
    """Raises InvalidParameter unless this parser serves the frontend that `syntax` names."""
    image = syntax.partition(" ")[0]
    if image and not serves(image):
        raise InvalidParameter(f"syntax {image}: this frontend is not supported, only docker/dockerfile"[:300])


def _physical(text: str) -> list[str]:
    """The lines with their ends. Only a line feed ends a line."""
    lines = [f"{line}\n" for line in text.split("\n")]
    lines[-1] = lines[-1][:-1]
    if not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, 1):
        if len(line) > _LONGEST // 4 and len(os.fsencode(line.rstrip("\r\n"))) > _LONGEST:
            raise _fault(f"dockerfile line greater than maximum allowed size of {_LONGEST}", number)
    return lines


def _directives(lines: Sequence[str]) -> tuple[dict[str, str], int]:
    """The parser directives in the first lines, and the number of the last of these."""
    found: dict[str, str] = {}
    last = 0
    for number, line in enumerate(lines, 1):
        if number == 1 and line.startswith("#!"):
            continue
        match = _DIRECTIVE.fullmatch(line.rstrip("\r\n").lstrip(words.SPACE))
        name = match[1].lower() if match else ""
        if match is None or name not in ("escape", "syntax", "check"):
            break
        if name in found:
            raise _fault(f"only one {name} parser directive can be used", number)
        if name == "escape" and match[2] not in ("\\", "`"):
            raise InvalidParameter(f"invalid escape token '{match[2]}' does not match ` or \\"[:300])
        found[name] = match[2]
        last = number
    return found, last


def _joined(begin: str, source: words.Source, continued: re.Pattern[str]) -> tuple[str, bool]:
    """The logical line that begins so, and whether it has an empty line within. Comments and empty
    lines within are left out.
    """
    parts = [begin]
    empty = False
    while match := continued.search(parts[-1]):
        parts[-1] = parts[-1][: match.start()]
        while (physical := source.next()) is not None:
            line = physical.rstrip("\r\n")
            bare = line.lstrip(words.SPACE)
            if bare and not bare.startswith("#"):
                parts.append(line)
                break
            empty = empty or not bare
        else:
            break
    return "".join(parts), empty


__all__ = ["Document", "at_line", "check_frontend", "parse", "serves"]
