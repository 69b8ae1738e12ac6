"""The verdict on numbered lines, which tests of log delivery rely on."""

from __future__ import annotations

import pytest

from tests.support.logs import numbered
from tests.support.logs.numbered import Verdict


@pytest.mark.parametrize(
    ("numbers", "verdict"),
    [
        ([0, 1, 2, 3], Verdict(4)),
        ([], Verdict(4, missing=4, first_missing=0)),
        ([0, 1, 3], Verdict(4, missing=1, first_missing=2)),
        ([0, 1, 2, 1, 2, 3], Verdict(4, duplicates=2, restarts=1)),
        ([0, 1, 2, 3, 0, 1, 2, 3], Verdict(4, duplicates=4, restarts=1)),
        ([0, 2, 1, 3], Verdict(4, out_of_order=1, restarts=1)),
        ([0, 0, 1, 2, 3], Verdict(4, duplicates=1, restarts=1)),
        ([0, 1, 2, 3, 4], Verdict(4, unknown=1)),
        ([3, 0, 1, 2], Verdict(4, out_of_order=3, restarts=1)),
    ],
)
def test_verdict(numbers: list[int], verdict: Verdict) -> None:
    assert numbered.verdict(numbers, 4) == verdict
    assert verdict.right == (not (verdict.missing or verdict.out_of_order or verdict.unknown))


@pytest.mark.parametrize("size", [0, 5, 92, 100_000])
def test_lines(size: int) -> None:
    data = numbered.lines("a-1", 7, 3, size)
    lines = data.splitlines(keepends=True)
    assert len(lines) == 3 and all(len(each) >= size + 1 for each in lines)
    assert numbered.by_writer(lines) == {"a-1": [7, 8, 9]}
    assert numbered.by_writer([b"<30>Nov 24 18:12:42 host tag[77]: " + each for each in lines]) == {"a-1": [7, 8, 9]}


def test_complete() -> None:
    texts = [b"a:0\n", b"b:0\n", b"a:1\n", b"a:0\n"]
    assert numbered.complete(texts, {"a": 2, "b": 1}) and not numbered.complete(texts, {"a": 3})
    assert numbered.assert_right(texts, {"a": 2, "b": 1})["a"].duplicates == 1
    with pytest.raises(AssertionError, match="missing=1"):
        numbered.assert_right(texts, {"a": 3})
