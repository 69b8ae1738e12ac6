"""The labels and variables that entries carry."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidParameter
from engine.logs.attributes import SIZE_MAX, chosen, encoded

LABELS = {"tier": "front", "HOME": "label", "com.example.a": "1", "com.example.b": "2", "": "nameless"}
ENVIRONMENT = ["HOME=/root", "EMPTY=", "MALFORMED", "A=b=c", "A_B=1", "=x", "TWICE=1", "TWICE=2"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {}),
        ({"tag": "x", "max-size": "1m"}, {}),
        ({"labels": "tier,nothing"}, {"tier": "front"}),
        ({"labels": "tier, HOME"}, {"tier": "front"}),
        ({"labels": "", "env": ""}, {}),
        ({"labels": "tier,"}, {"tier": "front", "": "nameless"}),
        (
            {"labels": "tier,HOME", "env": "HOME,EMPTY,MALFORMED,A,TWICE"},
            {"tier": "front", "HOME": "/root", "EMPTY": "", "A": "b=c", "TWICE": "2"},
        ),
        ({"labels-regex": "^com"}, {"com.example.a": "1", "com.example.b": "2"}),
        ({"labels-regex": "example.[b-z]"}, {"com.example.b": "2"}),
        ({"labels-regex": "(?i)TIER"}, {"tier": "front"}),
        ({"labels-regex": ""}, {}),
        ({"env-regex": "^A"}, {"A": "b=c", "A_B": "1"}),
        ({"env-regex": "M"}, {"HOME": "/root", "EMPTY": ""}),
        ({"labels-regex": "HO", "env-regex": "HO"}, {"HOME": "/root"}),
        ({"env": "HOME", "labels-regex": "HO"}, {"HOME": "/root"}),
        ({"labels": "HOME", "env-regex": "nothing"}, {"HOME": "label"}),
    ],
)
def test_chosen(options: dict[str, str], expected: dict[str, str]) -> None:
    assert chosen(options, LABELS, ENVIRONMENT) == expected


def test_encoded_as_go_writes_it() -> None:
    assert encoded({}) == b""
    assert encoded({"b": "<é>", "a": "&"}) == b'{"a":"\\u0026","b":"\\u003c\xc3\xa9\\u003e"}'
    assert encoded({"a": "\u2028\n\x00"}) == b'{"a":"\\u2028\\n\\u0000"}'


def test_they_are_limited() -> None:
    room = SIZE_MAX - len('{"a":""}')
    assert len(encoded({"a": "x" * room})) == SIZE_MAX
    with pytest.raises(InvalidParameter, match="per log entry, more than 32768"):
        encoded({"a": "x" * (room + 1)})


@given(st.dictionaries(st.text(), st.text()))
def test_any_attributes_are_valid_json(attributes: dict[str, str]) -> None:
    try:
        text = encoded(attributes)
    except UnicodeEncodeError:  # a lone surrogate: no client can send one
        return
    assert not attributes or json.loads(text) == attributes
