"""Bounds in seconds that a slow host breaks, in tests:

- an assertion that a measured time is less than a number of seconds
- a wait of a few seconds for what must happen: `timeout=5`, `wait_for(…, 5)`, `join(5)`, and
  `monotonic() + 5`

A bound that only says "it did not hang" is multiplied by `tests.support.PATIENCE`. One that says
"this did not wait for that" is better an order of events, or a clock that the test sets. Bounds of
a minute and more are not meant. A comment `# seconds:` with the reason, on the statement or the
line before it, exempts one: the clock is a fake, or the other case takes far longer.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

CLOCKS = {"monotonic", "perf_counter", "time", "monotonic_ns", "perf_counter_ns", "time_ns"}
"""Functions of `time`, and of asyncio's loop."""

WAITS = {"timeout", "wait", "join", "settimeout", "result"}
"""Functions and methods whose only argument is the longest wait."""

PATIENT = {"request", "docker", "ask", "send", "connect", "until", "Hook"}
"""Functions that multiply by PATIENCE themselves, or whose `timeout` is no wait of the test."""

MINUTE = 60
SHORTEST, LONGEST = 1, 30
"""Seconds. A shorter wait is a turn of a poll, or is expected to end so; a longer one is enough on
a slow host.
"""


def check(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """(line, what is wrong) of a source of the tests."""
    tree, lines = ast.parse(text), text.splitlines()
    found = {**_assertions(tree), **_waits(tree)}
    for node, what in found.items():
        if "# seconds:" not in "\n".join(lines[max(node.lineno - 2, 0) : node.end_lineno]):
            yield node.lineno, f"{what}: {ast.unparse(node)}"


def _assertions(tree: ast.AST) -> dict[ast.expr, str]:
    found: dict[ast.expr, str] = {}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            passed = _Passed(function)
            for statement in ast.walk(function):
                # `if took > 0.9: failures.append(…)` is an assertion too
                if isinstance(statement, ast.Assert | ast.If):
                    compared = [node for node in ast.walk(statement.test) if isinstance(node, ast.Compare)]
                    negated = isinstance(statement, ast.If)
                    found |= {
                        node: "a bound in seconds without `tests.support.PATIENCE` (or a comment `# seconds: why`)"
                        for node in compared
                        if passed.bounded(node, negated=negated)
                    }
    return found


class _Passed:
    """The names of a function that are times which have passed, or collections of them."""

    def __init__(self, function: ast.AST) -> None:
        self.names: set[str] = set()
        self.starts: set[str] = set()
        before = -1
        while before != len(self.names) + len(self.starts):
            before = len(self.names) + len(self.starts)
            for node in ast.walk(function):
                if isinstance(node, ast.Assign):
                    self._assigned(node.targets, node.value)
                elif isinstance(node, ast.AnnAssign) and node.value is not None:
                    self._assigned([node.target], node.value)
                elif (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and node.func.attr in ("append", "add")
                    and isinstance(node.func.value, ast.Name)
                    and any(self.has(argument) for argument in node.args)
                ):
                    self.names.add(node.func.value.id)

    def _assigned(self, targets: list[ast.expr], value: ast.expr) -> None:
        names = {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
        if self.has(value):
            self.names |= names
        elif _is_clock(value):
            self.starts |= names

    def has(self, node: ast.AST) -> bool:
        """True if the expression has a difference of times, or a name of one."""
        for each in ast.walk(node):
            if isinstance(each, ast.Name) and each.id in self.names:
                return True
            if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Sub):
                sides = each.left, each.right
                if any(_is_clock(side) or (isinstance(side, ast.Name) and side.id in self.starts) for side in sides):
                    return True
        return False

    def bounded(self, node: ast.Compare, *, negated: bool = False) -> bool:
        """True if a time that has passed must be less than a number; `negated`: if it is more."""
        sides = [node.left, *node.comparators]
        for left, operator, right in zip(sides, node.ops, sides[1:], strict=False):
            upwards = isinstance(operator, ast.Lt | ast.LtE)
            if upwards or isinstance(operator, ast.Gt | ast.GtE):
                smaller, larger = (left, right) if upwards is not negated else (right, left)
                if self.has(smaller) and _is_short(larger):
                    return True
        return False


def _is_clock(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or node.args:
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in CLOCKS


def _is_short(node: ast.AST) -> bool:
    """True for less than a minute without PATIENCE. Constants by name count as short."""
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    names |= {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
    numbers = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and _is_number(each.value)]
    constants = any(name.isupper() for name in names)
    return not names & {"PATIENCE", "DEADLINE"} and max(numbers, default=0) < MINUTE and bool(numbers or constants)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _waits(tree: ast.AST) -> dict[ast.expr, str]:
    expected = {
        call
        for node in ast.walk(tree)
        if isinstance(node, ast.With | ast.AsyncWith)
        and any("Timeout" in (words := ast.unparse(item.context_expr)) or "Blocking" in words for item in node.items)
        for call in ast.walk(node)
    }
    found: dict[ast.expr, str] = {}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.BinOp)
            and isinstance(node.op, ast.Add)
            and _is_clock(node.left)
            and _is_few(node.right)
        ):
            found[node] = "a deadline without PATIENCE"
        if not isinstance(node, ast.Call) or node in expected:
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        limits = [keyword.value for keyword in node.keywords if keyword.arg == "timeout"]
        limits += node.args[1:2] if name == "wait_for" else []
        limits += node.args if name in WAITS and len(node.args) == 1 else []
        for limit in limits if name not in PATIENT else ():
            if _is_few(limit):
                found[node] = "a wait without PATIENCE"
    return found


def _is_few(node: ast.AST) -> bool:
    """A number of seconds that a slow host may need for what takes a moment."""
    return isinstance(node, ast.Constant) and _is_number(node.value) and SHORTEST < node.value <= LONGEST
