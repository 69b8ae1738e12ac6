"""Labels as filters ask for them, and what a prune selects."""

from __future__ import annotations

import json
import time
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api import parameters
from engine.common import labels
from engine.common.pruning import OnlyOne, Selection
from engine.errors import Conflict, InvalidParameter
from engine.http.messages import Query

GIVEN = {"a": "1", "b": "", "c=d": "x"}


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [("a", True), ("a=1", True), ("a=2", False), ("a=", False), ("b", True), ("b=", True), ("z", False), ("", False)],
)
def test_a_label(wanted: str, expected: bool) -> None:
    assert labels.has(GIVEN, wanted) is expected


@given(st.dictionaries(st.text("ab", min_size=1), st.text("ab=")), st.lists(st.text("ab=", max_size=4)))
def test_all_labels_are_each_of_them(found: dict[str, str], wanted: list[str]) -> None:
    assert labels.have_all(found, wanted) == all(labels.has(found, text) for text in wanted)


def query(**filters: Any) -> Query:
    return Query(b"filters=" + quote(json.dumps(filters)).encode())


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({}, True),
        ({"label": ["a"]}, True),
        ({"label": ["a", "b="]}, True),
        ({"label": ["a", "z"]}, False),
        ({"label!": ["a"]}, False),
        ({"label!": ["z"]}, True),
        ({"label!": ["a", "z"]}, True),
        ({"label": ["a"], "label!": ["b"]}, False),
        ({"until": ["1h"]}, True),
        ({"until": ["1s"], "label": ["z"]}, False),
        ({"until": ["2h30m"]}, False),
    ],
)
def test_what_a_prune_selects(filters: dict[str, Any], expected: bool) -> None:
    two_hours_ago = time.time_ns() - 7200 * 10**9
    assert parameters.prune_selection(query(**filters), "until").matches(two_hours_ago, GIVEN) is expected


def test_other_filters_are_kept() -> None:
    assert parameters.prune_selection(query(dangling=["0"]), "dangling") == Selection(others={"dangling": ["0"]})


@pytest.mark.parametrize(
    ("filters", "words"),
    [
        ({"dangling": ["0"]}, "dangling"),
        ({"until": ["1h", "2h"]}, "more than one"),
        ({"until": ["soon"]}, "soon"),
        ({"name": ["x"]}, "name"),
    ],
)
def test_what_is_refused(filters: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidParameter, match=words):
        parameters.prune_selection(query(**filters), "until")


def test_only_one_at_a_time() -> None:
    only_one = OnlyOne()
    with only_one, pytest.raises(Conflict, match="already running"), only_one:
        pass
    with only_one:
        pass
    with pytest.raises(KeyError), only_one:
        raise KeyError
    with only_one:
        pass
