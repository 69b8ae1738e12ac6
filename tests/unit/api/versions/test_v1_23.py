"""API 1.23: each row at 1.23 and at 1.22."""

from __future__ import annotations

from typing import Any

import pytest

from engine.wire.networks import NetworkCreate
from tests.unit.api.versions.rows import NETWORK, check_new_field, check_new_parameter

FIELDS = [
    (NETWORK, "Internal"),
    (NETWORK, "EnableIPv6"),
    (NETWORK, "Labels"),
]

PARAMETERS = [
    (NetworkCreate, "EnableIPv6"),
    (NetworkCreate, "Labels"),
]


@pytest.mark.parametrize(("value", "path"), FIELDS, ids=[f"{type(value).__name__}.{path}" for value, path in FIELDS])
def test_new_fields(value: Any, path: str) -> None:
    check_new_field(value, path, "1.23", "1.22")


@pytest.mark.parametrize(("of", "path"), PARAMETERS, ids=[f"{of.__name__}.{path}" for of, path in PARAMETERS])
def test_new_parameters(of: type, path: str) -> None:
    check_new_parameter(of, path, "1.23", "1.22")
