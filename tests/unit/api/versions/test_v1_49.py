"""API 1.49: its rows at 1.49 and at 1.48."""

from __future__ import annotations

import pytest

from tests.unit.api.versions.rows import INFO, check_new_field, reply


def test_the_firewall() -> None:
    check_new_field(INFO, "FirewallBackend", "1.49", "1.48")


@pytest.mark.parametrize("program", ["ContainerdCommit", "RuncCommit", "InitCommit"])
def test_the_expected_versions_go(program: str) -> None:
    newer, older = reply(INFO, "1.49")[program], reply(INFO, "1.48")[program]
    assert older == newer | {"Expected": newer["ID"]}
    assert "Expected" not in newer
