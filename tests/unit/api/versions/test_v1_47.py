"""API 1.47: its row at 1.47, at 1.46, and where no version had it yet."""

from __future__ import annotations

import pytest

from tests.unit.api.versions.rows import ABSENT, INFO, at, reply


@pytest.mark.parametrize("kind", ["CIDRs", "Hostnames"])
def test_nondistributable_artifacts(kind: str) -> None:
    path = f"RegistryConfig.AllowNondistributableArtifacts{kind}"
    shown = [at(reply(INFO, version), path) for version in ("1.47", "1.46", "1.25", "1.24")]
    assert shown == [ABSENT, None, None, ABSENT]
