"""The filter language of containerd, in which clients choose entries of the build cache.

A filter is a list of conditions with commas between them, which all hold: `FIELD`, `FIELD==VALUE`,
`FIELD!=VALUE` or `FIELD~=PATTERN`. A field is a name or names with dots between them; a value is
without white space and commas, or in double quotes. Patterns may also stand between `/` or `|`.

Patterns are regular expressions of single characters, classes, `.`, `.*`, `^`, `$` and `|`. Others
are refused: some of them would keep the event loop busy for minutes.

Pure. Not here: the fields of an entry (`usage.py`).
Source:  containerd's `pkg/filters`.
Raises:  InvalidParameter that names the filter and the place in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from engine.errors import InvalidParameter, words
from engine.images.instructions.effects import quoted

_SPACE = re.compile(r"\s*")
_FIELD = re.compile(r"[A-Za-z0-9_]+")
_OPERATOR = re.compile(r"[=!~]+")
_VALUE = re.compile(r"[^\s,]+")
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"', re.DOTALL)
_PATTERN = re.compile(r"/(?:[^/\\\n]|\\.)*/|\|(?:[^|\\\n]|\\.)*\|", re.DOTALL)
_ESCAPE = r"\\[^\w]|\\[dDsSwW]"
_ATOMS = re.compile(rf"\.\*|{_ESCAPE}|\[\^?(?:{_ESCAPE}|[^\[\]\\])+\]|[^\\\[\].*+?(){{}}|^$]|\.")


class Selector(NamedTuple):
    """One condition. `operator`: empty for a field that must be present."""

    field: str
    operator: str = ""
    value: str = ""


def parse(text: str) -> list[Selector]:
    """The conditions of a filter. Only the first name of a field is kept: no field has more.
    Patterns are not compiled yet (`matcher`).
    """
    return _Parser(text).selectors()


class _Parser:
    """Reads one filter."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def selectors(self) -> list[Selector]:
        found = [self._selector()]
        while self._peek():
            if self._peek() != ",":
                raise self._fault(f"unexpected input: {self._peek()}")
            self._at += 1
            found.append(self._selector())
        return found

    def _selector(self) -> Selector:
        field = self._field()
        while self._peek() == ".":
            self._at += 1
            self._field()
        if self._peek() in ("", ","):
            return Selector(field)
        begin = self._at
        operator = self._taken(_OPERATOR)
        if operator is None:
            raise self._fault('expected an operator ("=="|"!="|"~=")')
        if operator not in ("==", "!=", "~="):
            raise self._fault(f"unsupported operator {quoted(operator)}", begin)
        return Selector(field, operator, self._value(operator))

    def _field(self) -> str:
        if self._peek() == '"':
            return self._string()
        found = self._taken(_FIELD)
        if found is None:
            raise self._fault("expected field or quoted")
        return found

    def _value(self, operator: str) -> str:
        first = self._peek()
        if first == '"':
            return self._string()
        if first and first in "/|":
            found = self._taken(_PATTERN) if operator == "~=" else None
            if found is None:
                raise self._fault("expected value or quoted")
            return re.sub(rf"\\(?={re.escape(first)})", "", found[1:-1])
        value = self._taken(_VALUE) if first not in ("=", "!", "~") else None
        if value is None:
            raise self._fault("expected value or quoted")
        return value

    def _string(self) -> str:
        found = self._taken(_QUOTED)
        if found is None:
            raise self._fault("quoted literal not terminated")
        try:
            return msgspec.json.decode(found, type=str)
        except (msgspec.DecodeError, UnicodeEncodeError):  # the latter for bytes that are not UTF-8
            raise self._fault("invalid syntax") from None

    def _peek(self) -> str:
        """The next character that is no white space; empty at the end."""
        space = _SPACE.match(self._text, self._at)
        self._at = space.end() if space is not None else self._at
        return self._text[self._at : self._at + 1]

    def _taken(self, kind: re.Pattern[str]) -> str | None:
        found = kind.match(self._text, self._at)
        if found is None:
            return None
        self._at = found.end()
        return found[0]

    def _fault(self, reason: str, at: int | None = None) -> InvalidParameter:
        text, at = self._text, self._at if at is None else at
        shown = f"{text[:at]} >|{text[at]}|< {text[at + 1 :]}" if at < len(text) else text
        return InvalidParameter(f"filters: parse error: [{shown[:300]}]: {reason[:100]}: invalid argument")


def matcher(pattern: str) -> Callable[[str], bool]:
    """Whether a text has a place that matches. Raises InvalidParameter for a pattern beyond those
    of the module.

    The time is at most the length of the pattern times that of the text, as each part between two
    `.*` has a fixed length and is looked for once. The GIL is kept meanwhile, so callers limit both
    lengths.
    """
    alternatives = [_parts(each, pattern) for each in _alternatives(pattern)]
    return lambda text: any(_found(parts, text) for parts in alternatives)


def _alternatives(pattern: str) -> list[str]:
    """The pattern between its `|` that stand outside of classes and escapes."""
    found, begin = [], 0
    # A class without an end goes to the end of the pattern: otherwise each `[` would be tried up to
    # there. `_parts` refuses it.
    for part in re.finditer(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\Z)|\|", pattern, re.DOTALL):
        if part[0] == "|":
            found.append(pattern[begin : part.start()])
            begin = part.end()
    return [*found, pattern[begin:]]


class _Parts(NamedTuple):
    """`middle`: what is looked for in turn. The first stands at the begin of the text, or the last
    at its end, if the pattern says so.
    """

    middle: list[re.Pattern[str]]
    length: int
    """Of the last part."""
    begins: bool
    ends: bool


def _parts(text: str, whole: str) -> _Parts:
    begins, ends = text.startswith("^"), bool(re.search(r"(?<!\\)(?:\\\\)*\$\Z", text))
    text = text[begins : len(text) - ends]
    atoms: list[list[str]] = [[]]
    at = 0
    while at < len(text):
        atom = _ATOMS.match(text, at)
        if atom is None:
            raise InvalidParameter(
                f"filter: pattern {quoted(whole[:200])}: only ., .*, ^, $, | and classes are supported"
            )
        at = atom.end()
        if atom[0] == ".*":
            atoms.append([])
        else:
            atoms[-1].append(atom[0])
    try:
        middle = [re.compile("".join(part), re.DOTALL) for part in atoms]
    except re.error as error:
        raise InvalidParameter(f"filter: pattern {quoted(whole[:200])}: {words(error)}") from None
    return _Parts(middle, len(atoms[-1]), begins, ends)


def _found(parts: _Parts, text: str) -> bool:
    at = 0
    last = len(parts.middle) - 1
    for number, part in enumerate(parts.middle):
        if number == last and parts.ends:
            begin = len(text) - parts.length
            fits = begin >= at and (number > 0 or not parts.begins or begin == 0)
            return fits and part.fullmatch(text, begin) is not None
        found = part.match(text, at) if not number and parts.begins else part.search(text, at)
        if found is None:
            return False
        at = found.end()
    return True


__all__ = ["Selector", "matcher", "parse"]
