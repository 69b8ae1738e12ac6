"""API 1.25: its rows at 1.25 and at 1.24."""

from __future__ import annotations

import pytest

from tests.unit.api.versions.rows import VOLUME, check_new_field


@pytest.mark.parametrize("path", ["CreatedAt", "Options"])
def test_new_fields_of_volumes(path: str) -> None:
    check_new_field(VOLUME, path, "1.25", "1.24")
