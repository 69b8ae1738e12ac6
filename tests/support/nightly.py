"""Parameters of tests that only `make nightly` runs."""

from typing import Any

import pytest


def nightly(*values: Any) -> list[Any]:
    """Values for `parametrize`, or for the parameters of a fixture, that repeat what the others
    show.
    """
    return [pytest.param(value, marks=pytest.mark.nightly) for value in values]
