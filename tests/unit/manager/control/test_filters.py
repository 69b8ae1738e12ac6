"""Filters of lists."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from engine.errors import InvalidParameter
from engine.manager.control import filters


def test_given() -> None:
    assert filters.given({}, ("id",)) == {}
    assert filters.given({"filters": None}, ("id",)) == {}
    assert filters.given({"filters": {"id": ["a"], "name": []}}, ("id", "name")) == {"id": ["a"]}
    with pytest.raises(InvalidParameter, match="Invalid filter 'name'"):
        filters.given({"filters": {"name": []}}, ("id",))


def test_chosen() -> None:
    words = {"yes": 1, "no": 0}
    assert filters.chosen({}, "key", words) is None
    assert filters.chosen({"key": [""]}, "key", words) is None
    assert filters.chosen({"key": ["YES", "no"]}, "key", words) == {0, 1}
    with pytest.raises(InvalidParameter, match="Invalid key filter: 'maybe'"):
        filters.chosen({"key": ["yes", "maybe"]}, "key", words)


@given(
    some.dictionaries(some.text(max_size=3), some.lists(some.text(max_size=3), max_size=3), max_size=3),
    some.text(max_size=3),
)
def test_starts(found: dict[str, list[str]], text: str) -> None:
    prefixes = found.get("id", [])
    expected = not prefixes or any(text.startswith(prefix) for prefix in prefixes)
    assert filters.starts(found, "id")(text) == expected


def test_labels() -> None:
    matches = filters.have_labels({"label": ["a", "b=1"]})
    assert matches({"a": "", "b": "1"}) and not matches({"a": ""}) and not matches(None)
    assert filters.have_labels({})(None)
