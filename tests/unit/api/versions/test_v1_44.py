"""API 1.44: its row about runtimes at 1.44 and at 1.43."""

from __future__ import annotations

from tests.unit.api.versions.rows import INFO, check_new_field


def test_the_status_of_runtimes() -> None:
    check_new_field(INFO, "Runtimes.crun.status", "1.44", "1.43")
