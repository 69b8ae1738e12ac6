"""A shipper without an engine, for a test."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.logs.shipping import Shipping


@pytest.fixture
def base() -> Iterator[Path]:
    """A directory with a short path, for sockets."""
    with tempfile.TemporaryDirectory(prefix="ship-", ignore_cleanup_errors=True) as made:
        yield Path(made)


@pytest.fixture
def shipping(base: Path) -> Iterator[Shipping]:
    made = Shipping(base)
    try:
        yield made
    finally:
        made.close()
        if made.log.exists():
            print(made.log.read_text())  # pytest shows it when the test fails
