"""Join tokens: their form, their root, and every text that is none."""

from __future__ import annotations

import hashlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidParameter
from engine.manager import tokens

ROOT = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"


def test_the_form_is_dockers() -> None:
    made = tokens.token(ROOT, tokens.new_secret())
    assert re.fullmatch(r"SWMTKN-1-[0-9a-z]{50}-[0-9a-z]{25}", made)
    digest, secret = made.split("-")[2:]
    assert int(digest, 36) == int(hashlib.sha256(ROOT.encode()).hexdigest(), 16)
    assert tokens.parse(made) == (hashlib.sha256(ROOT.encode()).digest(), secret)


@given(st.text(), st.text(alphabet="0123456789abcdefghijklmnopqrstuvwxyz", min_size=25, max_size=25))
def test_parse_undoes_token(root: str, secret: str) -> None:
    found = tokens.parse(tokens.token(root, secret))
    assert found.secret == secret
    assert tokens.pins(found, root)
    assert not tokens.pins(found, root + "x")


GOOD = tokens.token(ROOT, "0" * 25)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "SWMTKN-1",
        GOOD + "0",
        GOOD[:-1],
        GOOD + "\n",
        " " + GOOD,
        GOOD.upper(),
        GOOD.replace("SWMTKN-1", "SWMTKN-2"),
        GOOD.replace("SWMTKN-1", "SWMTKN-1-1"),
        "SWMTKN-1-" + "z" * 50 + "-" + "0" * 25,
        GOOD[:-1] + "é",
        GOOD[:-1] + "\N{ARABIC-INDIC DIGIT ONE}",
    ],
)
def test_what_is_no_token(text: str) -> None:
    with pytest.raises(InvalidParameter, match="join token is necessary"):
        tokens.parse(text)


@given(st.text() | st.from_regex(r"SWMTKN-1-[0-9a-z]{40,60}-[0-9a-z]{20,30}"))
def test_any_text_is_a_token_or_refused(text: str) -> None:
    try:
        found = tokens.parse(text)
    except InvalidParameter as refused:
        assert "join token is necessary" in refused.message
        assert len(text) < 40 or text not in refused.message
    else:
        assert len(found.digest) == 32 and len(found.secret) == 25


def test_empty_tokens_are_never_equal() -> None:
    assert not tokens.same("", "")
    assert not tokens.same(GOOD, "")
    assert not tokens.same(GOOD, GOOD[:-1] + "1")
    assert tokens.same(GOOD, str(GOOD))
    assert not tokens.same("é", GOOD)
