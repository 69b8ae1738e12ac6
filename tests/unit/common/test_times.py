"""Times, parsed and formatted."""

from __future__ import annotations

import contextlib
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.common import times

S = 1_000_000_000


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0001-01-01T00:00:00Z"),
        (1420559251485331387, "2015-01-06T15:47:31.485331387Z"),
        (1420559251485331300, "2015-01-06T15:47:31.4853313Z"),
        (1420559251500000000, "2015-01-06T15:47:31.5Z"),
        (1420559251000000000, "2015-01-06T15:47:31Z"),
        (1420559251000000001, "2015-01-06T15:47:31.000000001Z"),
        (1, "1970-01-01T00:00:00.000000001Z"),
    ],
)
def test_rfc3339(ns: int, text: str) -> None:
    assert times.rfc3339(ns) == text
    assert times.parse_rfc3339(text) == ns


def test_the_time_of_a_file_may_be_1970() -> None:
    assert times.rfc3339_of_file(0) == "1970-01-01T00:00:00Z"
    assert times.rfc3339_of_file(-S) == "1969-12-31T23:59:59Z"
    assert times.rfc3339_of_file(1420559251500000000) == "2015-01-06T15:47:31.5Z"


@given(st.integers(1, 4102444800 * S))
def test_rfc3339_and_back(ns: int) -> None:
    text = times.rfc3339(ns)
    assert times.parse_rfc3339(text) == ns and not text.endswith(("0Z.", ".Z"))


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("0", 0),
        ("123", 123 * S),
        ("123.456789", 123 * S + 456789000),
        ("123.000000001", 123 * S + 1),
        ("123.1234567891", 123 * S + 123456789),
        ("-5", -5 * S),
        ("1420559251.5", 1420559251 * S + S // 2),
        ("2015-01-06T15:47:31Z", 1420559251 * S),
        ("2015-01-06t15:47:31z", 1420559251 * S),
        ("2015-01-06 15:47:31Z", 1420559251 * S),
        ("2015-01-06T15:47:31.25+00:00", 1420559251 * S + S // 4),
        ("2015-01-06T17:47:31+02:00", 1420559251 * S),
        ("2015-01-06T10:17:31-05:30", 1420559251 * S),
        ("2016-12-31T23:59:60Z", 1483228800 * S),
        ("10m", 1_000_000 * S - 600 * S),
        ("1h30m", 1_000_000 * S - 5400 * S),
        ("1.5s", 1_000_000 * S - 3 * S // 2),
        ("100ms", 1_000_000 * S - S // 10),
        ("1us1ns", 1_000_000 * S - 1001),
        ("-1m", 1_000_000 * S + 60 * S),
    ],
)
def test_timestamps(text: str, ns: int) -> None:
    assert times.parse_timestamp(text, 1_000_000 * S) == ns


def test_local_times() -> None:
    before = os.environ.get("TZ")
    os.environ["TZ"] = "UTC-2"
    time.tzset()
    try:
        for text in ("2015-01-06T17:47:31", "2015-01-06T17:47:31.0"):
            assert times.parse_rfc3339(text) == 1420559251 * S
        assert times.parse_rfc3339("2015-01-06T17:47") == 1420559220 * S
        assert times.parse_rfc3339("2015-01-06") == 1420495200 * S
    finally:
        os.environ.pop("TZ") if before is None else os.environ.update(TZ=before)
        time.tzset()


@pytest.mark.parametrize(
    "text",
    ["x", "1.2.3", "10 m", "m", "1d", "+", "-", "2015-13-01", "2015-01-32T00:00:00Z", "2015-01-06T25:00:00Z",
     "2015-01-06T00:00:61Z", "2015-01-06X00:00:00Z", "٣", "2015-01-06T15:47:31Zjunk", "1e9", " 1", "0x10", "--1m"],
)  # fmt: skip
def test_no_timestamps(text: str) -> None:
    with pytest.raises(ValueError):
        times.parse_timestamp(text, 0)


@given(st.text(max_size=30))
def test_anything(text: str) -> None:
    with contextlib.suppress(ValueError, OverflowError):
        assert isinstance(times.parse_timestamp(text, 0), int)


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("2024-02-29T23:59:59Z", True),
        ("2024-02-29T23:59:59.123456789123Z", True),
        ("0001-01-01T00:00:00Z", True),
        ("9999-12-31T00:00:00-12:00", True),
        ("2023-02-29T00:00:00Z", False),
        ("2024-01-01T24:00:00Z", False),
        ("2024-01-01t00:00:00z", False),
        ("2024-01-01 00:00:00Z", False),
        ("2024-01-01T00:00:00", False),
        ("2024-01-01T00:00Z", False),
        ("2024-01-01T00:00:00,5Z", False),
        ("2024-01-01", False),
        ("yesterday", False),
        ("", False),
    ],
)
def test_times_as_json_has_them(text: str, valid: bool) -> None:
    assert times.is_rfc3339(text) is valid
