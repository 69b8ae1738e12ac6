"""Which caches a build may import and export: each once, and not too many."""

from __future__ import annotations

import msgspec
import pytest

from engine.builder.buildkit import cache_exports, cache_imports
from engine.builder.buildkit.control_messages import CacheEntry
from engine.errors import InvalidParameter

MANY = 200_000
"""As many as a message has room for. They are not compared with one another, which would take
hours.
"""


def listed(*refs: str) -> str:
    return msgspec.json.encode([{"Type": "registry", "Attrs": {"ref": ref}} for ref in refs]).decode()


def registry(*refs: str) -> list[CacheEntry]:
    return [CacheEntry("registry", {"ref": ref}) for ref in refs]


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({}, []),
        ({"cache-from": "a,,b,a"}, registry("a", "b")),
        ({"cache-imports": listed("a", "b", "a"), "cache-from": "c"}, registry("a", "b")),
        ({"cache-imports": "null"}, []),
        ({"cache-imports": listed(*map(str, range(cache_imports.MOST)))}, registry(*map(str, range(20)))),
    ],
)
def test_what_options_name(attributes: dict[str, str], expected: list[CacheEntry]) -> None:
    assert cache_imports.entries(attributes) == expected


@pytest.mark.parametrize("text", ["{", "1", '[{"Type": 1}]', "[" * 100_000])
def test_options_that_are_malformed(text: str) -> None:
    with pytest.raises(InvalidParameter, match="invalid value for cache-imports"):
        cache_imports.entries({"cache-imports": text})


def test_too_many() -> None:
    many = registry(*map(str, range(MANY)))
    assert cache_imports.unique(registry("a") * MANY) == registry("a")
    with pytest.raises(InvalidParameter, match="a build imports at most 20 caches"):
        cache_imports.unique(many)
    with pytest.raises(InvalidParameter, match="a build imports at most 20 caches"):
        cache_imports.entries({"cache-imports": listed(*map(str, range(MANY)))})
    with pytest.raises(InvalidParameter, match="a build exports at most 20 caches"):
        cache_exports.check(many)
    with pytest.raises(InvalidParameter, match=r"duplicate cache exports \[registry\]"):
        cache_exports.check(registry("a", "a"))
