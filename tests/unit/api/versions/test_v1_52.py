"""API 1.52: its rows at 1.52 and at 1.51."""

from __future__ import annotations

import msgspec
import pytest

from engine.wire.events import Actor
from tests.unit.api.versions.rows import DISK_USAGE, MESSAGE, check_new_field, reply

USAGES = ("ImageUsage", "ContainerUsage", "VolumeUsage", "BuildCacheUsage")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("container", {"status": "start", "id": "c1", "from": "busybox"}),
        ("image", {"status": "start", "id": "c1"}),
        ("network", {}),
    ],
)
def test_the_older_fields_of_events_go(kind: str, expected: dict[str, str]) -> None:
    event = msgspec.structs.replace(MESSAGE, type=kind)
    newer, older = reply(event, "1.52"), reply(event, "1.51")
    assert older == newer | expected
    assert not {"status", "id", "from"} & newer.keys()


def test_a_container_without_an_image() -> None:
    event = msgspec.structs.replace(MESSAGE, actor=Actor("c1", {}))
    assert reply(event, "1.51")["from"] == ""


@pytest.mark.parametrize("field", USAGES)
def test_totals_of_disk_usage(field: str) -> None:
    check_new_field(DISK_USAGE, field, "1.52", "1.51")
