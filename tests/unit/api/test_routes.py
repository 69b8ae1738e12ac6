"""The route table's column `body`, compared with what the handlers read: a handler whose row lacks
the mark would read what authorization plugins were not shown.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import pytest

from engine.api import routes
from engine.api.routes import CREDENTIALS, JSON, NONE, ROUTES, UPLOAD, Body, Route


def functions(handler: Any) -> Iterator[FunctionType]:
    """The handler, and all functions of the API that it mentions, and so on."""
    named = inspect.getclosurevars(handler).nonlocals
    if "resource" in named:  # loaded late: `swarm_mode.handler`
        handler = getattr(importlib.import_module(f"engine.api.{named['resource']}"), named["name"])
    waiting, seen = [handler], {handler}
    while waiting:
        function = waiting.pop()
        yield function
        code = function.__code__
        local = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
        for node in ast.walk(source(function)):
            found: Any = None
            if isinstance(node, ast.Name) and node.id not in local:
                found = function.__globals__.get(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                module = function.__globals__.get(node.value.id)
                found = getattr(module, node.attr, None) if isinstance(module, ModuleType) else None
            if isinstance(found, FunctionType) and found.__module__.startswith("engine.api.") and found not in seen:
                seen.add(found)
                waiting.append(found)


def source(function: FunctionType) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def read_by(handler: Any) -> Body:
    """What a handler reads: `request.body.read(…)` reads JSON, any other use an upload."""
    found = NONE
    for function in functions(handler):
        tree = source(function)
        whole = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "read"}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "request.body":
                found = JSON if id(node) in whole and found is not UPLOAD else UPLOAD
    return found


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_the_mark_is_what_the_handler_reads(route: Route) -> None:
    marked = JSON if route.body is CREDENTIALS else route.body
    assert marked is read_by(route.handler)


def test_only_a_login_is_a_secret() -> None:
    assert [route.path for route in ROUTES if route.body is CREDENTIALS] == ["/auth"]


def test_the_check_sees_through_helpers() -> None:
    found = {(route.method, route.path): read_by(route.handler) for route in ROUTES}
    assert found["POST", "/services/create"] is JSON, "by a helper of another module, loaded late"
    assert found["POST", "/containers/{id}/start"] is JSON, "without json_body"
    assert found["POST", "/build"] is UPLOAD and found["GET", "/info"] is NONE
    assert len({route.body for route in ROUTES}) == len(routes.Body)
