"""What versions changed in statistics."""

from __future__ import annotations

import pytest

from engine.api.versions import VERSIONS, Flag
from tests.unit.api.versions.rows import STATS, check_new_field


@pytest.mark.parametrize(
    "path",
    [
        *("preread", "os_type", "num_procs", "storage_stats"),
        *("cpu_stats.online_cpus", "precpu_stats.online_cpus"),
    ],
)
def test_1_25_fields(path: str) -> None:
    check_new_field(STATS, path, "1.25", "1.24")


def test_1_41_one_shot() -> None:
    found = [VERSIONS[name].has(Flag.STATS_ONE_SHOT) for name in ("1.24", "1.25", "1.40", "1.41")]
    assert found == [True, False, False, True]
