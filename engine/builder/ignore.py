"""Patterns of paths: those of COPY's sources (Go's filepath.Match), and the ordered lists of
`.dockerignore` and `--exclude` (moby/patternmatcher), where the last match decides, `!` includes
again, and `**` matches any number of directories.

Pure. A hostile pattern takes time in proportion to its length and the path's, not more: patterns
with many wildcards are not given to `re`, which would try every combination.
Raises: InvalidParameter for a malformed pattern.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from engine.errors import InvalidParameter

_FEW = 2
"""Wildcards of variable length that `re` may have to combine."""
_KEPT = 4096
"""Directories whose matches are kept."""
_BOM = b"\xef\xbb\xbf"


class _Token(NamedTuple):
    """One element of a pattern. `kind`: `c` a character, `?`, `[` a class, `*`, `/` for `**` before
    other elements, `.` for `**` at the end.
    """

    kind: str
    text: str = ""
    """The character; of a class, its regular expression."""


def _class(pattern: str, at: int) -> tuple[str, int]:
    """The class that begins at `at`, after its `[`, as a regular expression; and the end of it."""
    parts: list[str] = []
    negated = pattern[at : at + 1] == "^"
    at += negated

    def bound(at: int) -> tuple[str, int]:
        if pattern[at : at + 1] in ("", "-", "]"):
            raise _malformed(pattern)
        if pattern[at] == "\\":
            at += 1
            if at == len(pattern):
                raise _malformed(pattern)
        return pattern[at], at + 1

    while not (parts and pattern[at : at + 1] == "]"):
        low, at = bound(at)
        high = low
        if pattern[at : at + 1] == "-":
            high, at = bound(at + 1)
        # An empty range matches nothing.
        parts.append(f"{re.escape(low)}-{re.escape(high)}" if low <= high else "")
    inner = "".join(parts)
    if not inner:
        return ("(?s:.)" if negated else "(?!)"), at + 1
    return f"[{'^' if negated else ''}{inner}]", at + 1


def _malformed(pattern: str) -> InvalidParameter:
    return InvalidParameter(f"syntax error in pattern: {pattern}")


def _tokens(pattern: str, *, deep: bool) -> list[_Token]:
    """The elements of a pattern; `deep`: `**` has its meaning."""
    tokens: list[_Token] = []
    at = 0
    while at < len(pattern):
        character = pattern[at]
        at += 1
        if character == "*":
            if deep and pattern[at : at + 1] == "*":
                at += 1
                if pattern[at : at + 1] == "/":
                    at += 1
                tokens.append(_Token("." if at == len(pattern) else "/"))
            elif not tokens or tokens[-1].kind != "*":
                tokens.append(_Token("*"))
        elif character == "?":
            tokens.append(_Token("?"))
        elif character == "[":
            expression, at = _class(pattern, at)
            tokens.append(_Token("[", expression))
        else:
            if character == "\\":
                if at == len(pattern):
                    raise _malformed(pattern)
                character = pattern[at]
                at += 1
            tokens.append(_Token("c", character))
    return tokens


_EXPRESSIONS = {"?": "[^/]", "*": "[^/]*", "/": "(?:.*/)?", ".": ".*"}


def _by_expression(tokens: list[_Token]) -> Callable[[str], bool]:
    parts = (re.escape(token.text) if token.kind == "c" else token.text or _EXPRESSIONS[token.kind] for token in tokens)
    matched = re.compile("".join(parts), re.DOTALL).fullmatch
    return lambda path: matched(path) is not None


def _by_states(tokens: list[_Token]) -> Callable[[str], bool]:
    """All ways to match at once: `states` has a bit for each number of elements matched."""
    classes = {token.text: re.compile(token.text, re.DOTALL) for token in tokens if token.kind == "["}
    star = sum(1 << at for at, token in enumerate(tokens) if token.kind in "*.")
    deep = sum(1 << at for at, token in enumerate(tokens) if token.kind == "/")
    within = star & ~sum(1 << at for at, token in enumerate(tokens) if token.kind == ".")
    empty = star | deep
    end = 1 << len(tokens)
    steps: dict[str, int] = {}

    def skipped(states: int) -> int:
        while more := (states & empty) << 1 & ~states:
            states |= more
        return states

    def step(character: str) -> int:
        """Bits of the elements that consume the character and are done with it."""
        bits = 0
        for at, token in enumerate(tokens):
            if (
                (token.kind == "c" and token.text == character)
                or (token.kind == "?" and character != "/")
                or (token.kind == "[" and classes[token.text].match(character))
            ):
                bits |= 1 << at
        return bits

    # The inside of `**/` is a state of its own: only a slash leaves it.
    def matched(path: str) -> bool:
        states, inside = skipped(1), 0
        for character in path:
            if character not in steps:
                steps[character] = step(character)
            inside |= states & deep
            after = ((states & ~deep) & steps[character]) << 1
            after |= (states & star) & (~within if character == "/" else -1)
            if character == "/":
                after |= inside << 1
            states = skipped(after)
            if not states and not inside:
                return False
        return bool(states & end)

    return matched


def _matcher(tokens: list[_Token]) -> Callable[[str], bool]:
    if all(token.kind == "c" for token in tokens):
        exact = "".join(token.text for token in tokens)
        return lambda path: path == exact
    few = sum(token.kind in "*/." for token in tokens) <= _FEW
    return _by_expression(tokens) if few else _by_states(tokens)


def glob(pattern: str, *, deep: bool = False) -> Callable[[str], bool]:
    """A test of names by a pattern. `*` and `?` do not match `/`, `**` does if `deep`."""
    return _matcher(_tokens(pattern, deep=deep))


def has_wildcards(pattern: str) -> bool:
    """True if a source of COPY is a pattern rather than a name."""
    return re.search(r"(?:^|[^\\])(?:\\.)*[*?\[]", pattern, re.DOTALL) is not None


class _Pattern(NamedTuple):
    again: bool
    """Begins with `!`."""
    matches: Callable[[str], bool]


def _pattern(text: str) -> _Pattern:
    again = text.startswith("!")
    text = text[again:].strip()
    if again and not text:
        raise InvalidParameter("Illegal exclusion pattern: !")
    text = posixpath.normpath(text).lstrip("/") if text != "/" else text
    if text.startswith("**") and not re.search(r"[*?\[\\]", text[2:]):
        # As patternmatcher: `**x` is any path that ends so, and `**/x` is `x` too.
        suffix = text[2:]
        name = suffix[1:] if suffix.startswith("/") else None
        return _Pattern(again, lambda path: path.endswith(suffix) or path == name)
    return _Pattern(again, glob(text, deep=True))


class Patterns:
    """An ordered list of patterns, compiled once. One thread at a time."""

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        """`patterns`: as on the lines of a file. Raises InvalidParameter."""
        self._patterns = [_pattern(text) for text in map(str.strip, patterns) if text]
        self.again = any(pattern.again for pattern in self._patterns)
        """True if some pattern includes again, so that an excluded directory may have included
        files.
        """
        self._directories: dict[str, int] = {}

    @classmethod
    def parse(cls, raw: bytes) -> Patterns:
        """The patterns of a `.dockerignore` file: comments in the first column, blanks trimmed."""
        text = raw.removeprefix(_BOM).decode("utf-8", "surrogateescape")
        return cls(line for line in text.split("\n") if not line.startswith("#"))

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def excluded(self, path: str) -> bool:
        """True if a path or a directory above it is excluded, and not included again. The root
        never is.
        """
        if not self._patterns or not path:
            return False
        above = path.rpartition("/")[0]
        bits = self._bits(path) | (self._above(above) if above else 0)
        excluded = False
        for at, pattern in enumerate(self._patterns):
            if bits >> at & 1:
                excluded = not pattern.again
        return excluded

    def _bits(self, path: str) -> int:
        return sum(1 << at for at, pattern in enumerate(self._patterns) if pattern.matches(path))

    def _above(self, directory: str) -> int:
        """Bits of the patterns that match a directory or one above it."""
        names = directory.split("/")
        known = len(names)
        while known and "/".join(names[:known]) not in self._directories:
            known -= 1
        bits = self._directories["/".join(names[:known])] if known else 0
        for end in range(known + 1, len(names) + 1):
            if len(self._directories) >= _KEPT:
                self._directories.clear()
            path = "/".join(names[:end])
            bits |= self._bits(path)
            self._directories[path] = bits
        return bits


__all__ = ["Patterns", "glob", "has_wildcards"]
