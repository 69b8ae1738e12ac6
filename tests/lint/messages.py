"""Words of other libraries in what clients read. An error of the kernel, of Python or of a library
goes through `engine.errors.words` and the functions beside it: its own text has numbers, classes
and places in sources.

A class of the engine has words of its own, and so has ValueError, which the engine's parsers raise.
The monitor process, the shipper and the log drivers do not have `engine.errors`.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support import ROOT

ELSEWHERE = ("config", "monitor", "shipper", "logs", "_fast")
"""Packages without `engine.errors`, and those whose messages only operators read."""

OF_OPERATORS = ("__main__.py", "cdi.py")
"""Modules whose messages only operators read."""

OF_THE_KERNEL = {"NetlinkError", "BridgeFull"}
"""Classes of the engine that have only the kernel's number."""

_CLASS = re.compile(r"^(?:cdef )?class (\w+)", re.MULTILINE)


def check(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """(line, what is wrong) of a source of the engine."""
    package = path.relative_to(ROOT / "engine").parts[0]
    if path.suffix != ".py" or path.name in OF_OPERATORS or package in ELSEWHERE:
        return
    for handler in ast.walk(ast.parse(text)):
        if isinstance(handler, ast.ExceptHandler) and handler.name and (foreign := _foreign(handler.type)):
            for line in sorted(set(_shown(handler.body, handler.name))):
                yield line, f"a message with the words of {foreign}: use engine.errors.words"


def _foreign(caught: ast.expr | None) -> str:
    """An error among the caught ones that has no words of the engine; "" without one."""
    each = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    names = [ast.unparse(kind).rpartition(".")[2] for kind in each if kind is not None]
    return next((name for name in names if name not in _own()), "")


@functools.cache
def _own() -> frozenset[str]:
    """Names of errors that have words of the engine."""
    sources = [*(ROOT / "engine").rglob("*.py"), *(ROOT / "engine").rglob("*.pyx")]
    classes = {name for source in sources for name in _CLASS.findall(source.read_text())}
    return frozenset(classes - OF_THE_KERNEL) | {"ValueError"}


def _shown(body: list[ast.stmt], error: str) -> Iterator[int]:
    """The lines in which the error's own text, or the name of its class, is part of a value."""
    for statement in body:
        for node in _unlogged(statement):
            if isinstance(node, ast.FormattedValue) and _is(node.value, error):
                yield node.lineno
            elif isinstance(node, ast.Call) and len(node.args) == 1 and _is(node.args[0], error):
                if isinstance(node.func, ast.Name) and node.func.id in ("str", "repr"):
                    yield node.lineno
            elif isinstance(node, ast.Attribute) and node.attr == "__name__" and f"type({error})" in ast.unparse(node):
                yield node.lineno


def _unlogged(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below one, except comparisons and the arguments of a log line."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("_log.", "print")):
        return
    if isinstance(node, ast.Compare):
        return
    yield node
    for below in ast.iter_child_nodes(node):
        yield from _unlogged(below)


def _is(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
