"""Finds the route of a method and path. Built once from a table. A match allocates only the path
parameters.

A pattern is literal segments and `{name}` (one segment, not empty) or, once, `{name:path}` (one or
more segments, for image names). A literal segment has precedence over a parameter, and a
one-segment parameter over a greedy one. A trailing slash makes a different path.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

from engine.http.messages import NO_PARAMETERS


class Row(Protocol):
    """The interface of a route that the router uses."""

    @property
    def method(self) -> str: ...
    @property
    def path(self) -> str: ...


R = TypeVar("R", bound=Row)


class _Node(Generic[R]):
    __slots__ = ("greedy", "literals", "parameter", "routes")

    def __init__(self) -> None:
        self.literals: dict[str, _Node[R]] = {}
        self.parameter: _Node[R] | None = None
        # literal segments after it, longest first
        self.greedy: list[tuple[tuple[str, ...], R]] = []
        self.routes: list[R] = []


class Router(Generic[R]):
    """`match` returns the rows for a method and path, in the table's order: several when versions
    differ.
    """

    def __init__(self, routes: Iterable[R]) -> None:
        self._methods: dict[str, _Node[R]] = {}
        self._static: dict[tuple[str, str], list[R]] = {}
        self._names: dict[int, tuple[str, ...]] = {}
        for route in routes:
            self._add(route)

    def _add(self, route: R) -> None:
        segments = route.path.split("/")[1:]
        names = tuple(
            segment[1:-1].removesuffix(":path") for segment in segments if segment[:1] == "{" and segment[-1:] == "}"
        )
        if not route.path.startswith("/") or len(set(names)) != len(names):
            raise ValueError(f"not a pattern: {route.path}")
        self._names[id(route)] = names
        if not names:
            self._static.setdefault((route.method, route.path), []).append(route)
            return
        node = self._methods.setdefault(route.method, _Node())
        for at, segment in enumerate(segments):
            if segment.endswith(":path}"):
                rest = tuple(segments[at + 1 :])
                if any("{" in part for part in rest):
                    raise ValueError(f"not a pattern: {route.path}")
                node.greedy.append((rest, route))
                node.greedy.sort(key=lambda entry: -len(entry[0]))
                return
            if segment.startswith("{"):
                if node.parameter is None:
                    node.parameter = _Node()
                node = node.parameter
            else:
                node = node.literals.setdefault(segment, _Node())
        node.routes.append(route)

    def match(self, method: str, path: str) -> tuple[Sequence[R], Mapping[str, str]] | None:
        """The rows and the path parameters (of the first row; those of one path have the same
        names), or None. The parameters are immutable, so that requests can share them.
        """
        static = self._static.get((method, path))
        if static is not None:
            return static, NO_PARAMETERS
        root = self._methods.get(method)
        if root is None or path[:1] != "/":
            return None
        values: list[str] = []
        routes = _walk(root, path.split("/"), 1, values)
        if routes is None:
            return None
        return routes, MappingProxyType(dict(zip(self._names[id(routes[0])], values, strict=True)))


def _walk(node: _Node[R], segments: list[str], at: int, values: list[str]) -> list[R] | None:
    if at == len(segments):
        return node.routes or None
    segment = segments[at]
    literal = node.literals.get(segment)
    if literal is not None:
        found = _walk(literal, segments, at + 1, values)
        if found is not None:
            return found
    if node.parameter is not None and segment:
        values.append(segment)
        found = _walk(node.parameter, segments, at + 1, values)
        if found is not None:
            return found
        values.pop()
    if node.greedy:
        for rest, _ in node.greedy:
            end = len(segments) - len(rest)
            if end > at and tuple(segments[end:]) == rest and all(segments[at:end]):
                values.append("/".join(segments[at:end]))
                return [route for other, route in node.greedy if other == rest]
    return None
