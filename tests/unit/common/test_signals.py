"""Signals in every form that clients write."""

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.common.signals import signal_number
from engine.errors import InvalidParameter


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("SIGKILL", 9),
        ("KILL", 9),
        ("kill", 9),
        ("sigterm", 15),
        ("9", 9),
        ("09", 9),
        ("64", 64),
        ("SIGRTMIN", 34),
        ("SIGRTMIN+3", 37),
        ("rtmax-1", 63),
        ("USR1", 10),
        ("WINCH", 28),
    ],
)
def test_names_and_numbers(text: str, number: int) -> None:
    assert signal_number(text) == number


@pytest.mark.parametrize(
    "text",
    [
        "",
        "SIG42",
        "sig9",
        "0",
        "65",
        "-1",
        "SIG",
        "FOO",
        "SIGRTMIN+40",
        "_IGN",
        "_DFL",
        "9.5",
        "²",
        "9" * 400,
        "RTMIN+",
    ],
)
def test_what_is_no_signal_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidParameter, match="Invalid signal"):
        signal_number(text)


@given(st.text(max_size=12))
def test_any_text_gives_a_signal_or_a_refusal(text: str) -> None:
    try:
        assert 1 <= signal_number(text) <= signal.SIGRTMAX
    except InvalidParameter as error:
        assert text in error.message
