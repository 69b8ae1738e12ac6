"""Paths to rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.http.router import Router


class Row(NamedTuple):
    method: str
    path: str


TABLE = [
    Row("GET", "/_ping"),
    Row("HEAD", "/_ping"),
    Row("GET", "/containers/json"),
    Row("POST", "/containers/create"),
    Row("GET", "/containers/{id}/json"),
    Row("GET", "/containers/{id}/logs"),
    Row("GET", "/containers/{id}/attach/ws"),
    Row("POST", "/containers/{id}/start"),
    Row("DELETE", "/containers/{id}"),
    Row("GET", "/images/json"),
    Row("GET", "/images/get"),
    Row("GET", "/images/{name:path}/json"),
    Row("GET", "/images/{name:path}/history"),
    Row("GET", "/images/{name:path}/get"),
    Row("POST", "/images/{name:path}/tag"),
    Row("DELETE", "/images/{name:path}"),
    Row("GET", "/a/{x}/b/{y}"),
    Row("GET", "/a/c/b/d/e"),
]
ROUTER = Router(TABLE)


@pytest.mark.parametrize(
    ("method", "path", "row", "parameters"),
    [
        ("GET", "/_ping", "/_ping", {}),
        ("HEAD", "/_ping", "/_ping", {}),
        ("GET", "/containers/json", "/containers/json", {}),
        ("GET", "/containers/abc/json", "/containers/{id}/json", {"id": "abc"}),
        ("GET", "/containers/json/json", "/containers/{id}/json", {"id": "json"}),
        ("GET", "/containers/abc/attach/ws", "/containers/{id}/attach/ws", {"id": "abc"}),
        ("POST", "/containers/create", "/containers/create", {}),
        ("POST", "/containers/create/start", "/containers/{id}/start", {"id": "create"}),
        ("DELETE", "/containers/a b", "/containers/{id}", {"id": "a b"}),
        ("GET", "/images/json", "/images/json", {}),
        ("GET", "/images/busybox/json", "/images/{name:path}/json", {"name": "busybox"}),
        ("GET", "/images/json/json", "/images/{name:path}/json", {"name": "json"}),
        ("GET", "/images/quay.io:5000/a/b:c/json", "/images/{name:path}/json", {"name": "quay.io:5000/a/b:c"}),
        ("GET", "/images/a/json/history", "/images/{name:path}/history", {"name": "a/json"}),
        ("GET", "/images/a@sha256:0/get", "/images/{name:path}/get", {"name": "a@sha256:0"}),
        ("GET", "/images/get/get", "/images/{name:path}/get", {"name": "get"}),
        ("DELETE", "/images/json", "/images/{name:path}", {"name": "json"}),
        ("DELETE", "/images/a/b/c", "/images/{name:path}", {"name": "a/b/c"}),
        ("GET", "/a/c/b/z", "/a/{x}/b/{y}", {"x": "c", "y": "z"}),
        ("GET", "/a/c/b/d/e", "/a/c/b/d/e", {}),
    ],
)
def test_found(method: str, path: str, row: str, parameters: dict[str, str]) -> None:
    assert ROUTER.match(method, path) == ([Row(method, row)], parameters)


@pytest.mark.parametrize("path", ["/containers/json", "/containers/a/json"])
def test_requests_share_immutable_parameters(path: str) -> None:
    found = ROUTER.match("GET", path)
    assert found is not None
    shared: Any = found[1]
    with pytest.raises(TypeError):
        shared["id"] = "other"
    assert not hasattr(shared, "pop")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", ""),
        ("GET", "*"),
        ("GET", "example.org:80"),
        ("GET", "/_ping/"),
        ("GET", "//_ping"),
        ("POST", "/_ping"),
        ("PATCH", "/containers/json"),
        ("HEAD", "/containers/json"),
        ("GET", "/containers//json"),
        ("GET", "/containers/a/b/json"),
        ("GET", "/containers/a/json/"),
        ("DELETE", "/containers/"),
        ("DELETE", "/containers"),
        ("GET", "/images//json"),
        ("GET", "/images/a//json"),
        ("GET", "/images/a"),
        ("DELETE", "/images/"),
        ("DELETE", "/images/a/"),
        ("GET", "/a/x/b/"),
    ],
)
def test_not_found(method: str, path: str) -> None:
    assert ROUTER.match(method, path) is None


def test_rows_of_one_path_stay_in_order() -> None:
    for path in ("/x", "/x/{id}", "/x/{name:path}/y"):

        class Versioned(NamedTuple):
            method: str
            path: str
            since: int

        rows = [Versioned("GET", path, 1), Versioned("GET", path, 2)]
        found = Router(rows).match("GET", path.replace("{id}", "1").replace("{name:path}", "a/b"))
        assert found is not None and found[0] == rows


@pytest.mark.parametrize("path", ["x", "/{a}/{a}", "/{a:path}/{b}", "/{a:path}/{b:path}"])
def test_patterns_that_are_none(path: str) -> None:
    with pytest.raises(ValueError, match="not a pattern"):
        Router([Row("GET", path)])


@given(st.sampled_from(["GET", "POST", "DELETE", "X"]), st.text(max_size=40))
def test_any_path(method: str, path: str) -> None:
    for each in (path, "/images/" + path):
        found = ROUTER.match(method, each)
        assert found is None or (found[0] and each.startswith("/"))
