"""The words that users read: messages of errors, warnings in answers, and lines of the log.

`python -m tests.lint.words` prints all of them, one a line, with file and line: to be read as a
whole. `check` is a part of `python -m tests.lint`. A message names the object as the user did, and
the rule with the allowed values; where Docker has words for it, it has those. What a program can
see of that:

- An error of the kernel is put into words by `errors.reason`, `reason_with_file` or `words`. As it
  is, it reads `[Errno 2] No such file or directory: '/a/b'`.
- No names of Python's: classes of exceptions, `repr` of an exception.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.support import ROOT

LEVELS = ("info", "warning", "error", "critical", "exception")
"""Methods of a logger whose lines an operator reads. `debug` is for developers."""

OF_THE_KERNEL = {
    "OSError", "IOError", "ConnectionError", "ConnectionResetError", "ConnectionRefusedError", "BlockingIOError",
    "BrokenPipeError", "FileNotFoundError", "FileExistsError", "PermissionError", "NotADirectoryError",
    "IsADirectoryError", "ProcessLookupError", "ChildProcessError", "TimeoutError", "InterruptedError",
    "Exception", "BaseException",
}  # fmt: skip
"""Classes in an `except` that may be, or are, an OSError."""


UNKNOWN = {"error", "failure", "outcome", "cause"}
"""Names of exceptions that were not caught here, such as results of `gather`."""


class Message(NamedTuple):
    """One message: where, which kind (an error's class, `log.warning`, `warning`, `print` to
    stderr), and its text with `{expressions}`.
    """

    line: int
    kind: str
    text: str


@cache
def kinds() -> frozenset[str]:
    """Names of EngineError and of all classes below it."""
    bases: dict[str, set[str]] = {}
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases.setdefault(node.name, set()).update(ast.unparse(base).rpartition(".")[2] for base in node.bases)
    found = {"EngineError"}
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return frozenset(found)


def sources() -> Iterator[Path]:
    yield from sorted((ROOT / "engine").rglob("*.py"))


def messages(text: str) -> Iterator[Message]:
    """All in a source, in its order."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and (kind := _kind(node)) and node.args:
            yield Message(node.lineno, kind, _shown(node.args))


def _kind(call: ast.Call) -> str:
    name = ast.unparse(call.func)
    if name == "oci.Failure":  # no message
        return ""
    last = name.rpartition(".")[2]
    if last in kinds():
        return last
    if last in LEVELS and "log" in name:
        return f"log.{last}"
    if last == "append" and "warnings" in name:
        return "warning"
    return "print" if name == "print" and any(each.arg == "file" for each in call.keywords) else ""


def _shown(arguments: list[ast.expr]) -> str:
    first, *more = arguments
    shown = _text(first)
    return " ".join([shown, *(f"<{ast.unparse(each)}>" for each in more)])


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(p.value) if isinstance(p, ast.Constant) else _placeholder(p) for p in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return f"{{{ast.unparse(node)}}}"


def _placeholder(node: ast.expr) -> str:
    return ast.unparse(node.value).join("{}") if isinstance(node, ast.FormattedValue) else ast.unparse(node)


# --- what a program can see -----------------------------------------------------------------------


def check(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """(line, what is wrong) of a source of the engine."""
    yield from _Checked(ast.parse(text, str(path))).found


class _Checked(ast.NodeVisitor):
    """The names of exceptions that are caught where a message is made."""

    def __init__(self, tree: ast.AST) -> None:
        self.found: list[tuple[int, str]] = []
        self._caught: dict[str, bool] = {}
        """Whether an exception's name may be an OSError's."""
        self.visit(tree)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        before = dict(self._caught)
        if node.name:
            names = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            classes = {ast.unparse(name).rpartition(".")[2] for name in names if name is not None}
            self._caught[node.name] = bool(classes & OF_THE_KERNEL)
        self.generic_visit(node)
        self._caught = before

    def visit_Call(self, node: ast.Call) -> None:
        if kind := _kind(node):
            parts = [part for argument in node.args for part in _parts(argument)]
            for part in parts:
                self._part(part, kind)
            if any(isinstance(each, ast.Constant) and "Errno" in str(each.value) for each in ast.walk(node)):
                self.found.append((node.lineno, f"{kind}: Errno is a word of Python's"))
        self.generic_visit(node)

    def _part(self, part: ast.expr, kind: str) -> None:
        shown, conversion = (part.value, part.conversion) if isinstance(part, ast.FormattedValue) else (part, -1)
        inner = shown
        if isinstance(shown, ast.Call) and ast.unparse(shown.func) in ("str", "repr") and shown.args:
            inner = shown.args[0]
        caught = isinstance(inner, ast.Name) and inner.id in self._caught
        if caught and (conversion == ord("r") or (inner is not shown and ast.unparse(shown.func) == "repr")):
            self.found.append((part.lineno, f"{kind}: repr() of an exception is Python's: use words()"))
        elif isinstance(inner, ast.Name) and self._caught.get(inner.id, inner.id in UNKNOWN):
            self.found.append(
                (part.lineno, f"{kind}: {inner.id} may have an errno: use reason(), reason_with_file() or words()")
            )
        elif any(f"type({name}).__name__" in ast.unparse(shown) for name in self._caught):
            self.found.append((part.lineno, f"{kind}: the name of an exception's class is Python's"))


def _parts(node: ast.expr) -> Iterator[ast.expr]:
    """What is put into a message."""
    if isinstance(node, ast.JoinedStr):
        yield from (part for part in node.values if isinstance(part, ast.FormattedValue))
    elif isinstance(node, ast.BinOp):
        yield from _parts(node.left)
        yield from _parts(node.right)
    else:
        yield node


def main() -> int:
    for path in sources():
        for found in sorted(messages(path.read_text())):
            print(f"{path.relative_to(ROOT)}:{found.line}: {found.kind}: {found.text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
