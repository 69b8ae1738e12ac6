"""What versions changed in the list of containers and in inspect."""

from __future__ import annotations

import msgspec

from tests.unit.api.versions.rows import INSPECT, SUMMARY, check_new_field, reply


def test_1_25_platform() -> None:
    check_new_field(INSPECT, "Platform", "1.25", "1.24")


def test_1_25_removing() -> None:
    state = msgspec.structs.replace(INSPECT.state, status="removing", dead=True)
    inspect = msgspec.structs.replace(INSPECT, state=state)
    summary = msgspec.structs.replace(SUMMARY, state="removing")
    for version, word in (("1.25", "removing"), ("1.24", "dead")):
        assert reply(inspect, version)["State"]["Status"] == word
        assert reply(summary, version)["State"] == word
    assert reply(SUMMARY, "1.24")["State"] == "running"
    assert "State" not in reply(summary, "1.23") and "Status" not in reply(inspect, "1.20")["State"]


def test_1_46_annotations() -> None:
    check_new_field(SUMMARY, "HostConfig.Annotations", "1.46", "1.45")


def test_1_52_health() -> None:
    check_new_field(SUMMARY, "Health", "1.52", "1.51")
