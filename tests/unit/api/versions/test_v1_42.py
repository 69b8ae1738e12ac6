"""API 1.42: its rows at 1.42 and at 1.41."""

from __future__ import annotations

import msgspec

from engine.wire.volumes import VolumeCreate
from tests.unit.api.versions.rows import CACHE_RECORD, DISK_USAGE, check_new_parameter, reply


def test_cluster_volumes() -> None:
    """1.24 and older are answered as 1.42, since there a client means what it sends."""
    check_new_parameter(VolumeCreate, "ClusterVolumeSpec", "1.42", "1.41")


def test_the_size_of_the_build_cache_goes() -> None:
    assert "BuilderSize" not in reply(DISK_USAGE, "1.42")
    assert reply(DISK_USAGE, "1.41")["BuilderSize"] == 4
    unasked = msgspec.structs.replace(DISK_USAGE, build_cache_usage=msgspec.UNSET)
    assert "BuilderSize" not in reply(unasked, "1.41")


def test_records_of_the_build_cache_have_one_parent_below() -> None:
    newer, older = reply(CACHE_RECORD, "1.42"), reply(CACHE_RECORD, "1.41")
    assert newer["Parents"] == newer[" Parents"] == ["1"] and "Parent" not in newer
    assert older["Parent"] == "1" and not {"Parents", " Parents"} & older.keys()
    first = msgspec.structs.replace(CACHE_RECORD, parents=msgspec.UNSET, blank_parents=msgspec.UNSET)
    assert not {"Parent", "Parents", " Parents"} & (reply(first, "1.42").keys() | reply(first, "1.41").keys())
