"""Templates in services, secrets, configs and the tags of logs: the part of Go's text/template that
they are written in. Pure.

Text with actions: `{{.Task.Slot}}`, `{{index .Service.Labels "tier"}}`, `{{secret "password"}}`,
`{{if eq .Node.Hostname "a"}}…{{else}}…{{end}}`, `{{range .Service.Labels}}…{{end}}`,
`{{with .Name}}…{{end}}`, `{{$.Name}}` (of the outermost dot), pipelines, comments and the trim
markers of Go (`{{-`, `-}}`). Values are strings, integers, booleans, mappings and lists. Variables,
nested templates and methods are refused.

Not here: which names the template of a service has (`cluster/bodies.py`), those of a secret or
config (`cluster/delivery.py`), and those of a tag (`logs/tags.py`).
Raises: InvalidParameter that quotes the action.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import NamedTuple, TypeAlias

from engine.errors import InvalidParameter

Value: TypeAlias = "str | int | bool | Mapping[str, Value] | list[str]"
Function = Callable[..., Value]

LONGEST = 1 << 20
"""Characters that an expanded template has at most."""
DEEPEST = 32
"""Levels of `if`, `with`, `range` and parentheses."""
MOST_STEPS = 100_000
"""Actions and texts that one expansion executes at most: nested ranges multiply them."""


class Table(dict[str, str]):
    """A value that is a map in Go: a missing name is empty. Other mappings are structs, whose
    missing names are errors."""


_ACTION = re.compile(r"\{\{(- )?((?:\s*/\*.*?\*/\s*)|(?:\"(?:[^\"\\]|\\.)*\"|`[^`]*`|(?!\}\}).)*?)( -)?\}\}", re.DOTALL)
_TOKEN = re.compile(
    r"""\s*(?:
        (?P<string>"(?:[^"\\\n]|\\.)*"|`[^`]*`)
      | (?P<number>-?\d+)(?![\w.])
      | (?P<field>\$?(?:\.[A-Za-z_]\w*)+|[.$])(?!\w)
      | (?P<word>[A-Za-z_]\w*)
      | (?P<mark>[|()])
    )""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r'\\(?:([abfnrtv\\"\'])|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|([0-7]{3}))')
_ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}


class _Text(NamedTuple):
    text: str


class _Print(NamedTuple):
    pipeline: _Pipeline


class _Branch(NamedTuple):
    """`word` is if, with or range."""

    pipeline: _Pipeline
    then: list[_Node]
    otherwise: list[_Node]
    word: str


_Node: TypeAlias = "_Text | _Print | _Branch"


class _Field(NamedTuple):
    names: tuple[str, ...]
    root: bool
    """Of the outermost dot."""


class _Literal(NamedTuple):
    value: Value


class _Call(NamedTuple):
    function: str
    arguments: tuple[_Operand, ...]


_Operand: TypeAlias = "_Field | _Literal | _Call | _Pipeline"


class _Pipeline(NamedTuple):
    commands: tuple[_Operand, ...]
    action: str


def expand(text: str, values: Mapping[str, Value], functions: Mapping[str, Function] | None = None) -> str:
    """The text with its actions replaced by their values. `values` are the fields of the dot,
    `functions` are there besides Go's own.

    Raises InvalidParameter for an action that is malformed or names something unknown, and what a
    function raises.
    """
    if "{{" not in text:
        return text
    template = _Parser(text).parse()
    run = _Run(values, {**_FUNCTIONS, **(functions or {})})
    run.nodes(template, values)
    return "".join(run.out)


def check(text: str, fields: Collection[str], functions: Collection[str] = ()) -> None:
    """Check a template without values, as far as that is possible: its form, the functions that it
    calls, and the fields of the outermost dot.

    Raises InvalidParameter for what no values could expand.
    """
    _check(_Parser(text).parse(), frozenset(fields), _FUNCTIONS.keys() | set(functions), outermost=True)


def _check(nodes: Sequence[_Node], fields: frozenset[str], functions: Set[str], *, outermost: bool) -> None:
    def operand(value: _Operand, action: str) -> None:
        if isinstance(value, _Pipeline):
            for command in value.commands:
                operand(command, action)
        elif isinstance(value, _Call):
            if value.function not in functions:
                raise _bad(action, f'function "{value.function}" not defined')
            for argument in value.arguments:
                operand(argument, action)
        elif isinstance(value, _Field) and value.names and (outermost or value.root) and value.names[0] not in fields:
            raise _bad(action, f"can't evaluate field {value.names[0]}")

    for node in nodes:
        if isinstance(node, _Text):
            continue
        operand(node.pipeline, node.pipeline.action)
        if isinstance(node, _Branch):
            _check(node.then, fields, functions, outermost=outermost and node.word == "if")
            _check(node.otherwise, fields, functions, outermost=outermost)


# --- parsing --------------------------------------------------------------------------------------


class _Parser:
    def __init__(self, text: str) -> None:
        self._items = list(_items(text))
        self._at = 0

    def parse(self) -> list[_Node]:
        nodes, ended = self._until(0)
        if ended:
            raise _bad(ended, "unexpected " + ended.split()[0])
        return nodes

    def _until(self, depth: int) -> tuple[list[_Node], str]:
        """Nodes up to the `else` or `end` that belongs to the caller, and that action."""
        if depth > DEEPEST:
            raise InvalidParameter(f"template: more than {DEEPEST} levels of if, with and range")
        nodes: list[_Node] = []
        while self._at < len(self._items):
            action, text = self._items[self._at]
            self._at += 1
            if not action:
                nodes.append(_Text(text))
                continue
            word = text.split(None, 1)[0] if text else ""
            if word in ("end", "else"):
                return nodes, text
            if word in ("if", "with", "range"):
                nodes.append(self._branch(text, word, depth))
            elif word in ("define", "template", "block", "break", "continue"):
                raise _bad(text, f"{word} is not supported")
            else:
                nodes.append(_Print(_pipeline(text, text)))
        if depth:
            raise InvalidParameter("template: unexpected EOF: an action has no {{end}}")
        return nodes, ""

    def _branch(self, text: str, word: str, depth: int) -> _Branch:
        pipeline = _pipeline(text.split(None, 1)[1] if " " in text else "", text)
        then, ended = self._until(depth + 1)
        otherwise: list[_Node] = []
        words = ended.split(None, 1)
        if words[0] == "else":
            if len(words) == 1:
                otherwise, ended = self._until(depth + 1)
                if ended != "end":
                    raise _bad(ended, "expected end")
            elif words[1].startswith(f"{word} ") and word != "range":
                otherwise = [self._branch(words[1], word, depth + 1)]
            else:
                raise _bad(ended, "unexpected words after else")
        return _Branch(pipeline, then, otherwise, word)


def _items(text: str) -> list[tuple[bool, str]]:
    """Actions (True) and the text between them, trimmed as Go's markers say."""
    found: list[tuple[bool, str]] = []
    at, trim = 0, False
    while (begin := text.find("{{", at)) >= 0:
        match = _ACTION.match(text, begin)
        if match is None:
            raise _bad(text[begin : begin + 60], "unclosed action")
        before = text[at:begin]
        before = before.lstrip() if trim else before
        found.append((False, before.rstrip() if match[1] else before))
        inside = match[2].strip()
        if not inside.startswith("/*"):
            found.append((True, inside))
        trim, at = bool(match[3]), match.end()
    found.append((False, text[at:].lstrip() if trim else text[at:]))
    return [item for item in found if item[0] or item[1]]


def _pipeline(text: str, action: str) -> _Pipeline:
    tokens: list[tuple[str, str]] = []
    at = 0
    text = text.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or match.lastgroup is None:
            raise _bad(action, f"unexpected {text[at:].strip()[:20]!r}")
        tokens.append((match.lastgroup, match[match.lastgroup]))
        at = match.end()
    pipeline, rest = _commands(tokens, 0, action, 0)
    if rest != len(tokens):
        raise _bad(action, f"unexpected {tokens[rest][1]!r}")
    return pipeline


def _commands(tokens: Sequence[tuple[str, str]], at: int, action: str, depth: int) -> tuple[_Pipeline, int]:
    if depth > DEEPEST:
        raise _bad(action, f"more than {DEEPEST} levels of parentheses")
    commands: list[_Operand] = []
    while True:
        operands: list[_Operand] = []
        function = ""
        while at < len(tokens) and tokens[at] not in (("mark", "|"), ("mark", ")")):
            kind, text = tokens[at]
            at += 1
            if kind == "mark":
                inner, at = _commands(tokens, at, action, depth + 1)
                if at >= len(tokens) or tokens[at] != ("mark", ")"):
                    raise _bad(action, "unclosed parenthesis")
                at += 1
                operands.append(inner)
            elif kind == "word" and text not in ("true", "false"):
                if operands or function:
                    operands.append(_Call(text, ()))
                else:
                    function = text
            else:
                operands.append(_operand(kind, text))
        if function:
            commands.append(_Call(function, tuple(operands)))
        elif len(operands) == 1:
            commands.append(operands[0])
        elif not operands:
            raise _bad(action, "missing value for command")
        else:
            raise _bad(action, "can't give argument to non-function")
        if at < len(tokens) and tokens[at] == ("mark", "|"):
            at += 1
            continue
        return _Pipeline(tuple(commands), action), at


def _operand(kind: str, text: str) -> _Operand:
    if kind == "field":
        return _Field(tuple(filter(None, text.removeprefix("$").split("."))), text[0] == "$")
    if kind == "number":
        return _Literal(int(text[:40]))
    if kind == "word":
        return _Literal(text == "true")
    if text[0] == "`":
        return _Literal(text[1:-1])
    return _Literal(_ESCAPE.sub(_unescaped, text[1:-1]))


def _unescaped(match: re.Match[str]) -> str:
    if match[1]:
        return _ESCAPES.get(match[1], match[1])
    return chr(int(match[4], 8) if match[4] else int(match[2] or match[3], 16))


# --- values ---------------------------------------------------------------------------------------


class _Run:
    def __init__(self, values: Mapping[str, Value], functions: Mapping[str, Function]) -> None:
        self.out: list[str] = []
        self._root = values
        self._functions = functions
        self._length = 0
        self._steps = 0

    def nodes(self, nodes: Sequence[_Node], dot: Value) -> None:
        for node in nodes:
            self._steps += 1
            if self._steps > MOST_STEPS:
                raise InvalidParameter(f"template: more than {MOST_STEPS} steps")
            if isinstance(node, _Text):
                self._write(node.text)
            elif isinstance(node, _Print):
                self._write(shown(self._value(node.pipeline, dot)))
            else:
                self._branch(node, dot)

    def _branch(self, node: _Branch, dot: Value) -> None:
        value = self._value(node.pipeline, dot)
        if node.word != "range":
            self.nodes(node.then if value else node.otherwise, value if value and node.word == "with" else dot)
            return
        if not isinstance(value, Mapping | list):
            raise _bad(node.pipeline.action, "range can't iterate over it")
        if not value:
            self.nodes(node.otherwise, dot)
        for each in [value[name] for name in sorted(value)] if isinstance(value, Mapping) else value:
            self._steps += 1  # an empty body counts too
            self.nodes(node.then, each)

    def _write(self, text: str) -> None:
        self._length += len(text)
        if self._length > LONGEST:
            raise InvalidParameter(f"template: the result has more than {LONGEST} characters")
        self.out.append(text)

    def _value(self, pipeline: _Pipeline, dot: Value) -> Value:
        piped: tuple[Value, ...] = ()
        for command in pipeline.commands:
            piped = (self._operand(command, dot, pipeline.action, piped),)
        return piped[0]

    def _operand(self, operand: _Operand, dot: Value, action: str, piped: tuple[Value, ...] = ()) -> Value:
        if isinstance(operand, _Call):
            function = self._functions.get(operand.function)
            if function is None:
                raise _bad(action, f'function "{operand.function}" not defined')
            arguments = [self._operand(each, dot, action) for each in operand.arguments]
            try:
                return function(*arguments, *piped)
            except TypeError as error:
                raise _bad(action, f"wrong arguments for {operand.function}") from error
        if piped:
            raise _bad(action, "can't give argument to non-function")
        if isinstance(operand, _Literal):
            return operand.value
        if isinstance(operand, _Pipeline):
            return self._value(operand, dot)
        value = self._root if operand.root else dot
        for name in operand.names:
            if isinstance(value, Table):
                value = value.get(name, "")
            elif isinstance(value, Mapping) and name in value:
                value = value[name]
            else:
                raise _bad(action, f"can't evaluate field {name}")
        return value


def shown(value: Value) -> str:
    """As Go prints it with %v."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "map[" + " ".join(f"{name}:{shown(value[name])}" for name in sorted(value)) + "]"
    if isinstance(value, list):
        return "[" + " ".join(value) + "]"
    return str(value)


def _bad(action: str, reason: str) -> InvalidParameter:
    return InvalidParameter(f"template: {{{{{action[:100]}}}}}: {reason}")


def _index(of: Value, *keys: Value) -> Value:
    for key in keys:
        if isinstance(of, list):
            if not isinstance(key, int) or not 0 <= key < len(of):
                raise InvalidParameter(f"template: index out of range: {shown(key)}")
            of = of[key]
        elif isinstance(of, Mapping):
            of = of.get(shown(key), "")
        else:
            raise InvalidParameter("template: can't index item that is not a map or a list")
    return of


def _join(separator: str, *words: str) -> str:
    """Swarmkit's: the separator comes first."""
    return shown(separator).join(map(shown, words))


def _printf(form: Value, *values: Value) -> str:
    waiting = list(values)

    def one(match: re.Match[str]) -> str:
        if match[0] == "%%":
            return "%"
        if not waiting:
            return f"%!{match[1]}(MISSING)"
        value = waiting.pop(0)
        return '"' + shown(value).replace("\\", "\\\\").replace('"', '\\"') + '"' if match[1] == "q" else shown(value)

    return re.sub(r"%([svdq%])", one, shown(form))


def _same(left: Value, *others: Value) -> bool:
    if not others:
        raise TypeError
    return any(left == other for other in others)


def _both(*values: Value) -> Value:
    return next((value for value in values if not value), values[-1])


def _either(*values: Value) -> Value:
    return next((value for value in values if value), values[-1])


_FUNCTIONS: dict[str, Function] = {
    "index": _index,
    "join": _join,
    "print": lambda *values: "".join(map(shown, values)),
    "println": lambda *values: " ".join(map(shown, values)) + "\n",
    "printf": _printf,
    "len": lambda value: len(value if isinstance(value, Mapping | list) else shown(value).encode()),
    "eq": _same,
    "ne": lambda left, right: left != right,
    "not": lambda value: not value,
    "and": _both,
    "or": _either,
}

__all__ = ["Function", "Table", "Value", "check", "expand", "shown"]
