"""Suggestions for misspelt names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.images.instructions.nearest import hint, nearest


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("PAHT", ["PATH", "HOME"], "PATH"),
        ("COPPY", ["ADD", "COPY"], "COPY"),
        ("BADCMD", ["ADD", "CMD"], ""),
        ("a", ["b", "c"], "b"),
        ("ab", ["abcd", "abc"], "abc"),
        ("same", ["sane", "same"], ""),
        ("", ["a"], "a"),
        ("x", [], ""),
        ("x" * 101, ["x" * 100], ""),
        ("x" * 100, ["x" * 99], "x" * 99),
        ("ab", [*("cdef",) * 500, "ac"], ""),
    ],
)
def test_nearest(name: str, options: list[str], expected: str) -> None:
    assert nearest(name, options) == expected


def test_hint() -> None:
    assert hint("PAHT", ["PATH"], "$") == " (did you mean $PATH?)"
    assert hint("PAHT", ["HOME"]) == ""


names = st.text("ab", max_size=6)


@given(names, names)
def test_two_edits_at_most(one: str, other: str) -> None:
    edits = {one}
    for _ in range(2):
        edits |= {
            each[:at] + new + each[at + cut :]
            for each in edits
            for at in range(len(each) + 1)
            for new in ("", "a", "b")
            for cut in (0, 1)
        }
    assert bool(nearest(one, [other])) == (other in edits and bool(other) and one != other)
