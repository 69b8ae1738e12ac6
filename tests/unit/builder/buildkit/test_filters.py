"""containerd's filter language."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.builder.buildkit import filters
from engine.errors import InvalidParameter


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a", [("a", "", "")]),
        ("a,b==c", [("a", "", ""), ("b", "==", "c")]),
        (" a == b , c != d=e", [("a", "==", "b"), ("c", "!=", "d=e")]),
        ("labels.x~=^v[0-9]", [("labels", "~=", "^v[0-9]")]),
        (r'"a b"=="c, \"d\""', [("a b", "==", 'c, "d"')]),
        (r"a~=/b, \/c/", [("a", "~=", "b, /c")]),
        ("a~=|b c|", [("a", "~=", "b c")]),
    ],
)
def test_selectors(text: str, found: list[tuple[str, str, str]]) -> None:
    assert [each[:3] for each in filters.parse(text)] == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("type===x", 'filters: parse error: [type >|=|< ==x]: unsupported operator "===": invalid argument'),
        ("==x", "filters: parse error: [ >|=|< =x]: expected field or quoted: invalid argument"),
        ("a==", "filters: parse error: [a==]: expected value or quoted: invalid argument"),
        ("a==/b/", "filters: parse error: [a== >|/|< b/]: expected value or quoted: invalid argument"),
        ("id~=a,type=b", 'filters: parse error: [id~=a,type >|=|< b]: unsupported operator "=": invalid argument'),
        ('a=="b', 'filters: parse error: [a== >|"|< b]: quoted literal not terminated: invalid argument'),
        ('a=="\udcff"', 'filters: parse error: [a=="?"]: invalid syntax: invalid argument'),
        ("a==b c", "filters: parse error: [a==b  >|c|< ]: unexpected input: c: invalid argument"),
        ("a-b==c", 'filters: parse error: [a >|-|< b==c]: expected an operator ("=="|"!="|"~="): invalid argument'),
    ],
)
def test_faults_name_the_place(text: str, message: str) -> None:
    """The texts of the first five are those of dockerd 28.5.2."""
    with pytest.raises(InvalidParameter) as raised:
        filters.parse(text)
    assert raised.value.message == message


@pytest.mark.parametrize("pattern", ["a+", "a*", "(a)", "a{2}", "a?", "[", "[a", "a\\b", "[z-a]", ".*+"])
def test_other_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(InvalidParameter, match=r"^filter: pattern "):
        filters.matcher(pattern)


ATOM = st.sampled_from(["a", "b", ".", ".*", "[ab]", "[^a]", r"\.", r"\w", "^", "$", "|", "-"])


@given(st.lists(ATOM, max_size=8).map("".join), st.text("ab.-", max_size=12))
def test_patterns_mean_what_regular_expressions_mean(pattern: str, text: str) -> None:
    try:
        matches = filters.matcher(pattern)
    except InvalidParameter:
        return  # an anchor in the middle
    assert matches(text) == (re.search(pattern.replace("$", r"\Z"), text) is not None)


@pytest.mark.parametrize("pattern", ["[", "[.", "[^", "[]", "[\\"])
def test_classes_without_an_end_take_linear_time(pattern: str) -> None:
    """Ten times the length takes ten times as long, not a hundred times."""

    def seconds(count: int) -> float:
        begin = time.thread_time()
        with pytest.raises(InvalidParameter):
            filters.matcher(pattern * count)
        return time.thread_time() - begin

    few, many = (min(seconds(count) for _ in range(5)) for count in (1000, 10_000))
    assert many < 40 * few


BYTES = st.characters(min_codepoint=0xDC80, max_codepoint=0xDCFF, categories=["Cs"])
"""Bytes that are not UTF-8, as protobuf strings have them."""


@given(st.text(max_size=40) | st.text(st.sampled_from('ab=!~,. "/|\\') | BYTES, max_size=20))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        found = filters.parse(text)
    except InvalidParameter as error:
        assert error.message.startswith("filter")
    else:
        assert found and all(each.operator in ("", "==", "!=", "~=") for each in found)
