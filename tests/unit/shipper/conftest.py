"""Descriptors of the feeds that a test has opened."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.shipper import spools


@pytest.fixture(autouse=True)
def _feeds() -> Iterator[None]:
    yield
    for feed in spools.OPEN:
        feed.close()
    spools.OPEN.clear()
