"""The text form of an entry."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine._fast.jsonentry import time_text
from tests.unit.fast.jsonlogs import SECOND, _descriptors  # noqa: F401 (_descriptors: a fixture)


@given(st.integers(0, 7258118399 * SECOND))
def test_time_text(at: int) -> None:
    second, fraction = divmod(at, SECOND)
    assert time_text(at) == f"{datetime.fromtimestamp(second, UTC):%Y-%m-%dT%H:%M:%S}.{fraction:09}Z"


def test_time_text_refuses_other_ages() -> None:
    for at in (-1, 7258118400 * SECOND):
        with pytest.raises(ValueError):
            time_text(at)
