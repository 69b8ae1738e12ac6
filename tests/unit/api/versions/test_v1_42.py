"""API 1.42: its rows at 1.42 and at 1.41."""

from __future__ import annotations

from engine.wire.volumes import VolumeCreate
from tests.unit.api.versions.rows import check_new_parameter


def test_cluster_volumes() -> None:
    """1.24 and older are answered as 1.42, since there a client means what it sends."""
    check_new_parameter(VolumeCreate, "ClusterVolumeSpec", "1.42", "1.41")
