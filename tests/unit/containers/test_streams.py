"""Detach keys as clients write them (specification, "DetachKeys format")."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.containers.streams import DEFAULT_DETACH_KEYS, parse_detach_keys
from engine.errors import InvalidParameter


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        (None, b"\x10\x11"),
        ("", b""),
        ("a", b"a"),
        ("a,b,C", b"abC"),
        ("ctrl-p,ctrl-q", b"\x10\x11"),
        ("ctrl-a", b"\x01"),
        ("ctrl-z", b"\x1a"),
        ("ctrl-@", b"\x00"),
        ("ctrl-[", b"\x1b"),
        ("ctrl-^", b"\x1e"),
        ("ctrl-_", b"\x1f"),
        ("ctrl-]", b"\x1d"),
        ("ctrl-\\", b"\x1c"),
        ("ctrl-,", b","),
        ("ctrl-,,a", b",a"),
        ("a,ctrl-p,b", b"a\x10b"),
    ],
)
def test_sequences(text: str | None, keys: bytes) -> None:
    assert parse_detach_keys(text) == keys


@pytest.mark.parametrize(
    "text", ["ab", "ctrl-", "ctrl-1", "ctrl-pq", "a,", "ctrl-p,", "control-p", "a,,b", "é", "ctrl-é", "ctrl-p;q"]
)
def test_what_breaks_the_format_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidParameter) as raised:
        parse_detach_keys(text)
    assert text in raised.value.message


@given(st.text("actrl-pq,@^[_", max_size=20))
def test_any_text_gives_keys_or_a_refusal(text: str) -> None:
    try:
        keys = parse_detach_keys(text)
    except InvalidParameter:
        return
    assert len(keys) <= len(text) and (keys or not text)


def test_the_default_is_what_the_documentation_says() -> None:
    assert parse_detach_keys("ctrl-p,ctrl-q") == DEFAULT_DETACH_KEYS
