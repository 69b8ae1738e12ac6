"""Volumes as answers show them, and which of them filters and prunes take."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.common import times
from engine.volumes import views
from engine.volumes.views import ANONYMOUS, VolumeRecord
from engine.wire.volumes import PluginVolume

NOON = 1_700_000_000


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (VolumeRecord(name="v"), {"Options": None, "Labels": {}}),
        (VolumeRecord(name="v", options={"o": "x"}), {"Options": {"o": "x"}}),
        (VolumeRecord(name="v", created=NOON * 10**9 + 123), {"CreatedAt": "2023-11-14T22:13:20Z"}),
        (VolumeRecord(name="v", anonymous=True, labels={"a": "b"}), {"Labels": {"a": "b", ANONYMOUS: ""}}),
        (VolumeRecord(name="v", driver="d", path="/p"), {"Driver": "d", "Mountpoint": "/m"}),
    ],
)
def test_a_record_is_shown(record: VolumeRecord, expected: dict[str, Any]) -> None:
    shown = msgspec.to_builtins(views.merged(record, "/m", None))
    assert {name: shown[name] for name in expected} == expected
    assert ("CreatedAt" in shown) == bool(record.created)
    assert "UsageData" not in shown


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("2023-11-14T22:13:20Z", "2023-11-14T22:13:20Z"),
        ("2023-11-14T23:13:20+01:00", "2023-11-14T22:13:20Z"),
        ("0001-01-01T00:00:00Z", None),
        ("yesterday", None),
        ("", None),
        (None, None),
    ],
)
def test_a_plugin_says_when(given: str | None, shown: str | None) -> None:
    volume = views.of_plugin(PluginVolume(name="v", created_at=given), "d", "local")
    assert (None if volume.created_at is msgspec.UNSET else volume.created_at) == shown
    own = views.merged(VolumeRecord(name="v", driver="d", created=NOON * 10**9), "", volume)
    assert own.created_at == shown or (shown is None and own.created_at == times.rfc3339(NOON * 10**9))


@given(st.text(max_size=40))
def test_any_time_of_a_plugin_is_one_that_go_reads_or_left_out(text: str) -> None:
    """Go programs fail on a time that is not RFC 3339."""
    created = views.of_plugin(PluginVolume(name="v", created_at=text), "d", "local").created_at
    assert created is msgspec.UNSET or times.rfc3339(times.parse_rfc3339(created)) == created


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({}, True),
        ({"name": ["est"]}, True),
        ({"name": ["x", "te"]}, True),
        ({"name": ["x"]}, False),
        ({"driver": ["loc"]}, True),
        ({"driver": ["d"]}, False),
        ({"label": ["a"]}, True),
        ({"label": ["a=1"], "name": ["x"]}, False),
        ({"label": ["a=1", "b"]}, False),
    ],
)
def test_filters(filters: dict[str, list[str]], expected: bool) -> None:
    assert views.matches("test", "local", {"a": "1"}, filters) is expected


def test_anonymous_and_plain() -> None:
    assert views.is_anonymous(VolumeRecord(name="v", anonymous=True))
    assert views.is_anonymous(VolumeRecord(name="v", labels={ANONYMOUS: ""}))
    assert not views.is_anonymous(VolumeRecord(name="v", labels={"a": ""}))
    assert views.is_plain(VolumeRecord(name="v"))
    assert not views.is_plain(VolumeRecord(name="v", driver="d"))
    assert not views.is_plain(VolumeRecord(name="v", options={"o": "size=1m"}))
