"""Filters of `docker buildx history`, in the forms that buildx sends."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.builder.buildkit import history_filters
from engine.builder.buildkit.control_messages import RpcStatus, Time
from engine.builder.buildkit.history_messages import BuildHistoryRecord
from engine.errors import InvalidParameter

NOW = 1_800_000_000 * history_filters.SECOND


def record(**given: Any) -> BuildHistoryRecord:
    """A build that took 90 s and ended an hour ago."""
    begun = 1_800_000_000 - 3690
    times: dict[str, Any] = {"created": Time(begun), "completed": Time(begun + 90)}
    return BuildHistoryRecord(**{"ref": "abc123", **times, **given})


GIT = record(attributes={"vcs:source": "https://github.com/docker/buildx.git", "context": "other"})
FAILED = record(error=RpcStatus(2, "process x did not complete"))
CANCELLED = record(error=RpcStatus(1, "context canceled"))
RUNNING = record(completed=None)


@pytest.mark.parametrize(
    ("filters", "found", "expected"),
    [
        ([], record(), True),
        (["ref~=bc1"], record(), True),
        (["ref~=bd"], record(), False),
        (["ref==abc123"], record(), True),
        (["ref!=abc123"], record(), False),
        (["ref"], record(), True),
        (["repository~=github.com/docker"], GIT, True),
        ([r"repository~=github\.com"], GIT, True),
        (["repository~=github.com"], record(), False),
        (["repository"], record(), False),
        (["repository==x"], record(attributes={"context": "x"}), True),
        (["status==completed"], record(), True),
        (["status==error"], FAILED, True),
        (['status=="error"'], FAILED, True),
        (["status==error"], CANCELLED, False),
        (["status==canceled"], CANCELLED, True),
        (["status==running"], RUNNING, True),
        (["status!=running"], RUNNING, False),
        (["other==x"], record(), False),
        (["startedAt>2h"], record(), True),
        (["startedAt<2h"], record(), False),
        (["completedAt<=30m"], record(), True),
        (["startedAt>=2027-01-15T06:58:30Z"], record(), True),
        (["startedAt<2027-01-15T06:58:30Z"], record(), False),
        (["duration>1m"], record(), True),
        (["duration<=1m29s"], record(), False),
        (["duration>1s"], RUNNING, False),
        (["duration>1m,status==completed"], record(), True),
        (["duration>1m,status==error"], record(), False),
        (["status==error", "status==completed"], record(), True),
    ],
)
def test_what_a_filter_chooses(filters: list[str], found: BuildHistoryRecord, expected: bool) -> None:
    assert history_filters.parse(filters, NOW)(found) is expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("duration>x", "invalid duration 'x'"),
        ("startedAt>yesterday", "invalid time 'yesterday'"),
        ("status==", "invalid history filter 'status=='"),
        ("ref~=(a+)+b", "regular expressions are not supported"),
        ("=x", "invalid history filter"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidParameter, match=re.escape(message)):
        history_filters.parse([text], NOW)


_PART = st.sampled_from(
    ["ref", "status", "startedAt", "duration", "==", "~=", "!=", ">=", "<", ",", '"', "\n", "\\", "1h", "9" * 30, "0"]
)


@pytest.mark.parametrize("filters", [["ref!=x"] * 1000, [",".join(["ref!=x"] * 1000)], [""] * 5000])
def test_filters_that_are_too_long(filters: list[str]) -> None:
    with pytest.raises(InvalidParameter, match="the history filters have more than 4096 characters"):
        history_filters.parse(filters, NOW)


@given(st.lists(st.one_of(_PART, st.text(max_size=5)), max_size=8))
def test_any_text_is_a_condition_or_refused(parts: list[str]) -> None:
    try:
        condition = history_filters.parse(["".join(parts)], NOW)
    except InvalidParameter as error:
        assert error.message
    else:
        assert condition(GIT) in (True, False)
