"""Words of Dockerfile instructions: flags, quotes, heredocs, and the replacement of variables.

The rules are those of BuildKit's parser and of its shell words; a value keeps its quotes until
`expanded`. Pure. Not here: what an instruction does with its words (records.py), continuations
(builder/dockerfile/lines.py).
Raises: InvalidParameter in the words of Docker.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence

import msgspec

from engine.errors import InvalidParameter

SPACE = "\t\n\v\f\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
"""White space as Go's `unicode.IsSpace` has it; Python's `str.isspace` has more."""

_ASCII_SPACE = "\t\n\v\f\r "

MAX_VALUE = 128 * 1024
"""Characters: programs cannot be given longer values (execve(2), MAX_ARG_STRLEN)."""

MAX_ADDED = 4 << 20
"""Characters that variables may add to the content of a heredoc, which goes into a file."""

_MAX_DEPTH = 100
_PLAIN = re.compile(r"[^$\\]+")
"""Text of a heredoc before a variable or an escape."""
"""Variables within the words of variables, as in `${A:-${B:-c}}`."""

_MAX_PATTERN = 4096

_KEYWORD_END = re.compile(r"[\t\v\f\r ]+")
_NAME = re.compile(r"[^\W\d]\w*|\d+|[@*#?$!-]")
_HEREDOC = re.compile(r"(\d*)<<(-?)([ \t]*)([^<]*)", re.DOTALL)
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")

NUL = "a NUL character is not allowed here"

HEREDOC_KEYWORDS = ("RUN", "COPY", "ADD")

Variables = Mapping[str, str]

Expand = Callable[[str], str]
"""Replaces the variables of one word."""


class Unnumbered(InvalidParameter):
    """A fault that BuildKit reports without the number of the line: its parser finds it before the
    instruction is read, or its frontend after that.
    """


class Heredoc(msgspec.Struct, frozen=True, kw_only=True):
    """`<<NAME` with the lines up to NAME. `expand` is False when NAME is quoted; `chomp` is that of
    `<<-`: the tabs before each line are not part of the content. `content` still has them.
    """

    name: str
    content: str = ""
    expand: bool = True
    chomp: bool = False
    descriptor: int = 0
    doubtful: bool = False
    """Could be a shift in an arithmetic expansion, such as `$((1 << 3))`: without a last line it is
    not a heredoc."""

    def value(self) -> str:
        """The content as a program reads it."""
        return re.sub(r"(?m)^\t+", "", self.content) if self.chomp else self.content


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A logical line: continuations are joined, comments within are left out.

    `keyword` is in upper case. `original`: the whole line, as `Step N : …` shows it. `text`: what
    follows the keyword. `rest`: `text` without the flags.
    """

    number: int
    keyword: str
    original: str = ""
    flags: tuple[tuple[str, str | None], ...] = ()
    text: str = ""
    rest: str = ""
    heredocs: tuple[Heredoc, ...] = ()
    whole_arrays: bool = False
    """As in `array`."""


class Source:
    """Physical lines with their line ends, and the position in them."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = lines
        self.at = 0
        self._last: tuple[dict[str, int], dict[str, int]] | None = None

    def next(self) -> str | None:
        """The next line; None at the end."""
        if self.at == len(self.lines):
            return None
        self.at += 1
        return self.lines[self.at - 1]

    def body(self, head: Heredoc) -> Heredoc | None:
        """The heredoc with its content; None when no line ends it. Then nothing is consumed."""
        if self._last is None:
            ends = [line.rstrip("\r\n") for line in self.lines]
            self._last = (
                {line: at for at, line in enumerate(ends)},
                {line.lstrip("\t"): at for at, line in enumerate(ends)},
            )
        if self._last[head.chomp].get(head.name, -1) < self.at:
            return None
        begin = self.at
        for at in range(begin, len(self.lines)):
            line = self.lines[at].rstrip("\r\n")
            if (line.lstrip("\t") if head.chomp else line) == head.name:
                self.at = at + 1
                return msgspec.structs.replace(head, content="".join(self.lines[begin:at]))
        return None


def line(original: str, number: int) -> Line:
    """The parts of a logical line, without heredocs."""
    original = original.strip(SPACE)
    keyword, text = [*_KEYWORD_END.split(original, maxsplit=1), ""][:2]
    flags, rest = _flags(text)
    return Line(
        number=number,
        keyword=keyword.upper(),
        original=original,
        flags=tuple(flags),
        text=text.strip(SPACE),
        rest=rest.strip(SPACE),
    )


def with_heredocs(found: Line, source: Source) -> Line:
    """The line with its heredocs, whose content is taken from `source`."""
    bodies: list[Heredoc] = []
    for head in _heads(found):
        body = source.body(head)
        if body is not None:
            bodies.append(body)
        elif not head.doubtful:
            raise Unnumbered("unterminated heredoc")
    return msgspec.structs.replace(found, heredocs=tuple(bodies)) if bodies else found


def _flags(text: str) -> tuple[list[tuple[str, str | None]], str]:
    """The words with `--` in front, without their quotes, and the text after them. A word `--` ends
    the flags.
    """
    flags: list[tuple[str, str | None]] = []
    at = 0
    while True:
        while at < len(text) and text[at] in _ASCII_SPACE:
            at += 1
        if not text.startswith("--", at):
            return flags, text[at:]
        word: list[str] = []
        quote = ""
        while at < len(text) and (quote or text[at] not in _ASCII_SPACE):
            char = text[at]
            at += 1
            if char == quote:
                quote = ""
            elif not quote and char in "'\"":
                quote = char
            elif char == "\\":
                word.append(text[at : at + 1])
                at += 1
            else:
                word.append(char)
        flag = "".join(word)
        if flag == "--":
            return flags, text[at:]
        name, equals, value = flag[2:].partition("=")
        flags.append((name, value if equals else None))


# --- words ----------------------------------------------------------------------------------------


def words(text: str, escape: str = "\\") -> list[str]:
    """The words as they are written, with their quotes and escapes. An escape character at the end
    of the text is dropped.
    """
    found: list[str] = []
    begin = -1
    quote = ""
    at = 0
    while at < len(text):
        char = text[at]
        if begin < 0 and char not in SPACE:
            begin = at
        if char == escape and quote != "'":
            at += 1
            if at == len(text):
                text = text[:-1]
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in SPACE and begin >= 0:
            found.append(text[begin:at])
            begin = -1
        at += 1
    return [*found, text[begin:]] if 0 <= begin < len(text) else found


def readable(text: str) -> str:
    """The text as a JSON document can hold it: bytes that are not UTF-8 become U+FFFD, as in Go."""
    return text if text.isascii() else _LONE_SURROGATE.sub("\ufffd", text)


def plain_words(text: str) -> list[str]:
    """The words between ASCII white space, whatever their quotes."""
    return [word for word in _KEYWORD_END.split(text.strip(SPACE)) if word]


def array(text: str, *, whole: bool = False) -> list[str] | None:
    """The JSON array of strings at the beginning of the text; what follows it is ignored. None when
    there is no array: a command line for the shell, or words. `whole`: nothing may follow it.
    """
    text = text.lstrip(SPACE)
    if not text.startswith("["):
        return None
    try:
        values, end = _JSON.raw_decode(text)
    except (ValueError, RecursionError):
        return None
    if whole and text[end:].strip(SPACE):
        return None
    if not all(isinstance(value, str) for value in values):
        raise Unnumbered("when using JSON array syntax, arrays must be comprised of strings only")
    if any("\0" in value for value in values):
        raise InvalidParameter(NUL)
    return [readable(value) for value in values] if "\\u" in text else list(values)


def _refused(constant: str) -> None:
    raise ValueError(constant)


_JSON = json.JSONDecoder(parse_constant=_refused, parse_float=str.encode, parse_int=str.encode)
"""Numbers are not needed; as bytes they are no strings."""


# --- heredocs -------------------------------------------------------------------------------------


def heredoc_head(word: str) -> Heredoc | None:
    """The heredoc that begins with this word, without its content. None for other words."""
    match = _HEREDOC.fullmatch(word)
    if match is None or not match[4]:
        return None
    name, quoted = _unquoted(match[4])
    if name is None or not name:
        return None
    return Heredoc(
        name=name,
        expand=not quoted,
        chomp=bool(match[2]),
        descriptor=int(match[1][:9] or 0),
        doubtful=bool(match[3]) or not re.match(r"[^\W\d]", name) or name.endswith(")"),
    )


def _heads(found: Line) -> list[Heredoc]:
    if "<<" not in found.rest:
        return []
    inner = line(found.rest, found.number) if found.keyword == "ONBUILD" else found
    if inner.keyword not in HEREDOC_KEYWORDS or _is_array(inner.rest):
        return []
    return [head for word in _shell_words(inner.rest) if (head := heredoc_head(word)) is not None]


def _is_array(text: str) -> bool:
    """Whether the whole text is taken as JSON."""
    try:
        return array(text, whole=True) is not None
    except InvalidParameter:
        return True


def _shell_words(text: str) -> list[str]:
    """The words as a shell has them, with quotes and escapes; the space after `<<` belongs to a
    word. No words if a quote is not closed.
    """
    complete: list[str] = []
    begin, at, quote = -1, 0, ""
    while at < len(text):
        char = text[at]
        if begin < 0 and char not in SPACE:
            begin = at
        if char == "\\" and quote != "'":
            at += 1
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif text.startswith("<<", at):
            at += 3 if text.startswith("-", at + 2) else 2
            while at < len(text) and text[at] in " \t":
                at += 1
            continue
        elif char in SPACE and begin >= 0:
            complete.append(text[begin:at])
            begin = -1
        at += 1
    if begin >= 0:
        complete.append(text[begin:])
    return [] if quote else complete


def _unquoted(text: str) -> tuple[str | None, bool]:
    """A word without quotes and escapes, variables untouched, and whether it has quotes. None
    instead of the word if a quote is not closed, or white space is not quoted.
    """
    out: list[str] = []
    at, quote, quoted = 0, "", False
    while at < len(text):
        char = text[at]
        at += 1
        if char == quote:
            quote = ""
        elif not quote and char in "'\"":
            quote, quoted = char, True
        elif char == "\\" and (not quote or (quote == '"' and text[at : at + 1] in ('"', "$", "\\"))):
            out.append(text[at : at + 1])
            at += 1
        elif not quote and char in SPACE:
            return None, quoted
        else:
            out.append(char)
    return (None if quote else "".join(out)), quoted


# --- variables (Dockerfile reference, "Environment replacement") ----------------------------------


def expanded(text: str, variables: Variables, escape: str = "\\") -> str:
    """The value of a word: quotes and escapes removed, variables replaced by their values."""
    return _Expansion(text, variables, escape, quotes=True).value()


def expanded_content(text: str, variables: Variables) -> str:
    """The content of a heredoc: variables are replaced, a backslash escapes, quotes stay."""
    return _Expansion(text, variables, "\\", quotes=False).value()


def shown(text: str, variables: Variables, escape: str = "\\") -> str:
    """As `expanded`, but quotes stay, and so do variables that are unset: for people, of a command
    that a shell reads.
    """
    return _Expansion(text, variables, escape, quotes=True, shown=True).value()


def check(text: str, escape: str = "\\") -> None:
    """Raises InvalidParameter if the word cannot be expanded, whatever the variables are."""
    _Expansion(text, None, escape, quotes=True).value()


def check_content(text: str) -> None:
    """As `check`, for the content of a heredoc."""
    _Expansion(text, None, "\\", quotes=False).value()


class _Expansion:
    """One replacement; `_at` is the position in the text. Without variables, all are unset, and
    those that must be set are not missed. `shown`: as in the function of that name.
    """

    def __init__(
        self, text: str, variables: Variables | None, escape: str, *, quotes: bool, shown: bool = False
    ) -> None:
        self._text = text
        self._variables = variables
        self._escape = escape
        self._quotes = "'\"" if quotes else ""
        self._limit = MAX_VALUE if quotes else len(text) + MAX_ADDED
        self._shown = shown
        self._at = 0
        self._depth = 0

    def value(self) -> str:
        try:
            return self._until("", raw=False)
        except InvalidParameter as error:
            raise InvalidParameter(f"failed to process {json.dumps(self._text[:200])}: {error.message}") from None

    def _until(self, end: str, *, raw: bool) -> str:
        """The value up to the next unquoted `end`, which is consumed; with an empty one, to the end
        of the text. `raw`: escapes stay, as a pattern needs them.
        """
        text, escape = self._text, self._escape
        out: list[str] = []
        size = 0
        while self._at < len(text):
            char = text[self._at]
            if char == end:
                self._at += 1
                return "".join(out)
            if not end and not self._quotes and (plain := _PLAIN.match(text, self._at)):
                out.append(plain[0])
                size += len(plain[0])
                self._at = plain.end()
                continue
            self._at += 1
            if char == "$":
                piece = self._variable()
            elif char in self._quotes:
                piece = self._single() if char == "'" else self._double(raw=raw)
                piece = f"{char}{piece}{char}" if self._shown else piece
            elif char == escape:
                piece = text[self._at : self._at + 1]
                piece = char + piece if raw else piece
                self._at += 1
            else:
                piece = char
            size += len(piece)
            out.append(piece)
            if size > self._limit:  # `ENV A=$A$A`, a few dozen times, would exhaust memory
                raise InvalidParameter(f"a value is longer than {self._limit} characters")
        if end:
            raise InvalidParameter(
                "syntax error: missing '/' in ${}" if end == "/" else f"syntax error: missing '{end}'"
            )
        return "".join(out)

    def _single(self) -> str:
        begin = self._at
        self._at = self._text.find("'", begin) + 1
        if not self._at:
            self._at = len(self._text)
            raise InvalidParameter("unexpected end of statement while looking for matching single-quote")
        return self._text[begin : self._at - 1]

    def _double(self, *, raw: bool) -> str:
        text, escape = self._text, self._escape
        out: list[str] = []
        size = 0
        while self._at < len(text):
            char = text[self._at]
            self._at += 1
            if char == '"':
                return "".join(out)
            if char == "$":
                char = self._variable()
            elif char == escape:
                # Within double quotes an escape is literal unless one of these follows.
                following = text[self._at : self._at + 1]
                if following in ('"', "$", escape):
                    char = char + following if raw else following
                    self._at += 1
                elif raw:
                    char = escape + escape
            size += len(char)
            out.append(char)
            if size > MAX_VALUE:
                raise InvalidParameter(f"a value is longer than {MAX_VALUE} characters")
        raise InvalidParameter("unexpected end of statement while looking for matching double-quote")

    def _variable(self) -> str:
        """The value of the expression after a `$`."""
        text = self._text
        if text[self._at : self._at + 1] != "{":
            name = _NAME.match(text, self._at)
            if name is None:
                return "$"
            self._at = name.end()
            value = self._get(name[0])
            return f"${name[0]}" if value is None and self._shown else value or ""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise InvalidParameter("variables are nested too deeply")
        name = _NAME.match(text, self._at + 1)
        if name is None:
            missing = self._at + 1 >= len(text)
            raise InvalidParameter("syntax error: missing '}'" if missing else "syntax error: bad substitution")
        self._at = name.end()
        value = self._substitution(name[0])
        self._depth -= 1
        return value

    def _get(self, name: str) -> str | None:
        return None if self._variables is None else self._variables.get(name)

    def _substitution(self, name: str) -> str:
        """The value of `${name…}`; the position is after the name."""
        text = self._text
        operator = text[self._at : self._at + 1]
        if operator == ":":
            operator = text[self._at : self._at + 2]
        self._at += len(operator)
        if operator in ("", ":"):
            raise InvalidParameter("syntax error: missing '}'")
        if operator not in _OPERATORS:
            raise InvalidParameter(f"unsupported modifier ({operator}) in substitution")
        word = replacement = ""
        if operator == "/":
            every = text.startswith("/", self._at)
            self._at += every
            word = self._until("/", raw=True)
            replacement = self._until("}", raw=True)
        elif operator != "}":
            word = self._until("}", raw=operator in ("#", "%"))
        value = self._get(name)
        if value is None and self._shown:
            rest = {"}": "", "/": f"/{word}/{replacement}"}.get(operator, operator + word)
            return f"${{{name}{rest}}}"
        if operator == "/":
            return _replace(value or "", _pattern(word), replacement, every=every)
        if operator in ("#", "%"):
            longest = word[:1] == operator
            trim = _without_prefix if operator == "#" else _without_suffix
            return trim(value or "", _pattern(word[1:] if longest else word), longest=longest)
        present = value is not None and (operator[0] != ":" or value != "")
        if operator[-1] == "-":
            return (value or "") if present else word
        if operator[-1] == "+":
            return word if present else ""
        if operator[-1] == "?" and not present and self._variables is not None:
            state = "unset" if value is None else "empty"
            raise InvalidParameter(f"{name}: {word or f'is not allowed to be {state}'}"[:300])
        return value or ""


_OPERATORS = ("}", "/", "#", "%", "-", "+", "?", ":-", ":+", ":?")


# --- patterns: `*` any characters, `?` one; no brackets -------------------------------------------

_ANY, _STAR = object(), object()


def _pattern(text: str) -> list[object]:
    """The tokens of a pattern: characters, `_ANY`, `_STAR`. A backslash escapes `*`, `?` and
    itself, and hides the `}` and `/` that would end the pattern.
    """
    tokens: list[object] = []
    at = 0
    while at < len(text):
        char = text[at]
        at += 1
        if char == "*":
            if not tokens or tokens[-1] is not _STAR:
                tokens.append(_STAR)
        elif char == "?":
            tokens.append(_ANY)
        elif char == "\\":
            following = text[at : at + 1]
            if not following or following not in "*?\\}/":
                raise InvalidParameter(
                    f"invalid pattern ({text[:100]}) in substitution: invalid escape '\\{following}'"
                )
            tokens.append(following)
            at += 1
        else:
            tokens.append(char)
    if len(tokens) > _MAX_PATTERN:
        raise InvalidParameter(f"a pattern is longer than {_MAX_PATTERN} characters")
    return tokens


class _Matcher:
    """A pattern as a set of states, one bit each, so that time is linear in the value's length."""

    def __init__(self, tokens: Sequence[object]) -> None:
        self._stars = self._any = 0
        self._characters: dict[object, int] = {}
        for at, token in enumerate(tokens):
            if token is _STAR:
                self._stars |= 1 << at
            elif token is _ANY:
                self._any |= 1 << at
            else:
                self._characters[token] = self._characters.get(token, 0) | 1 << at
        self.accepted = 1 << len(tokens)
        self.begin = self._closed(1)

    def _closed(self, states: int) -> int:
        return states | (states & self._stars) << 1  # two stars never follow each other

    def step(self, states: int, char: str) -> int:
        return self._closed((states & (self._any | self._characters.get(char, 0))) << 1 | states & self._stars)

    def end(self, value: str, begin: int, *, longest: bool) -> int:
        """Where a match that begins at `begin` ends; -1 without a match."""
        states, found = self.begin, -1
        at = begin
        while True:
            if states & self.accepted:
                found = at
                if not longest:
                    return found
            if not states or at == len(value):
                return found
            states = self.step(states, value[at])
            at += 1


def _without_prefix(value: str, tokens: Sequence[object], *, longest: bool) -> str:
    end = _Matcher(tokens).end(value, 0, longest=longest)
    return value if end < 0 else value[end:]


def _without_suffix(value: str, tokens: Sequence[object], *, longest: bool) -> str:
    return _without_prefix(value[::-1], tokens[::-1], longest=longest)[::-1]


def _replace(value: str, tokens: Sequence[object], replacement: str, *, every: bool) -> str:
    """The leftmost longest match replaced, or every one of them."""
    backwards = _Matcher(tokens[::-1])
    states, begins = backwards.begin, [False] * (len(value) + 1)
    begins[-1] = bool(states & backwards.accepted)
    for at in range(len(value) - 1, -1, -1):
        states = backwards.step(states, value[at]) | backwards.begin
        begins[at] = bool(states & backwards.accepted)
    forwards = _Matcher(tokens)
    out: list[str] = []
    size = at = copied = 0
    last = -1
    """Where the last match ended: an empty one is not taken there."""
    while at <= len(value):
        if not begins[at]:
            at += 1
            continue
        end = forwards.end(value, at, longest=True)
        if end == at == last:
            at += 1
            continue
        out += (value[copied:at], replacement)
        size += at - copied + len(replacement)
        if size > MAX_VALUE:
            raise InvalidParameter(f"a value is longer than {MAX_VALUE} characters")
        copied = last = end
        at = max(end, at + (end == at))
        if not every:
            break
    return "".join((*out, value[copied:]))


__all__ = [
    "HEREDOC_KEYWORDS",
    "NUL",
    "SPACE",
    "Expand",
    "Heredoc",
    "Line",
    "Source",
    "Variables",
    "array",
    "check",
    "check_content",
    "expanded",
    "expanded_content",
    "heredoc_head",
    "line",
    "plain_words",
    "readable",
    "shown",
    "with_heredocs",
    "words",
]
