"""API 1.19: each row at 1.19 and at 1.18."""

from __future__ import annotations

from typing import Any

import pytest

from engine.api.versions import VERSIONS, Flag
from engine.wire.containers import CreateBody
from tests.unit.api.versions.rows import (
    HISTORY,
    IMAGE,
    INFO,
    INSPECT,
    STATS,
    check_new_field,
    check_new_parameter,
    reply,
)

FIELDS = [
    (INSPECT, "HostConfig.CpuPeriod"),
    (INSPECT, "HostConfig.CpuQuota"),
    (INSPECT, "HostConfig.CpusetMems"),
    (INSPECT, "HostConfig.BlkioWeight"),
    (INSPECT, "HostConfig.OomKillDisable"),
    (IMAGE, "Labels"),
    (HISTORY, "Tags"),
    (HISTORY, "Size"),
    (HISTORY, "Comment"),
    (STATS, "precpu_stats.cpu_usage"),
    (INFO, "CpuCfsPeriod"),
    (INFO, "CpuCfsQuota"),
    (INFO, "OomKillDisable"),
]

PARAMETERS = [
    (CreateBody, "HostConfig.CpuPeriod"),
    (CreateBody, "HostConfig.CpuQuota"),
    (CreateBody, "HostConfig.CpusetMems"),
    (CreateBody, "HostConfig.BlkioWeight"),
    (CreateBody, "HostConfig.OomKillDisable"),
]


@pytest.mark.parametrize(("value", "path"), FIELDS, ids=[f"{type(value).__name__}.{path}" for value, path in FIELDS])
def test_new_fields(value: Any, path: str) -> None:
    check_new_field(value, path, "1.19", "1.18")


@pytest.mark.parametrize(("of", "path"), PARAMETERS, ids=[f"{of.__name__}.{path}" for of, path in PARAMETERS])
def test_new_parameters(of: type, path: str) -> None:
    check_new_parameter(of, path, "1.19", "1.18")


def test_logs_take_since() -> None:
    assert VERSIONS["1.19"].has(Flag.LOGS_SINCE) and not VERSIONS["1.18"].has(Flag.LOGS_SINCE)


def test_throttling_data_is_empty() -> None:
    assert reply(STATS, "1.18")["cpu_stats"]["throttling_data"] == {}
    assert reply(STATS, "1.19")["cpu_stats"]["throttling_data"]["periods"] == 0
    assert reply(STATS, "1.18")["cpu_stats"]["cpu_usage"] == reply(STATS, "1.19")["cpu_stats"]["cpu_usage"]


def test_integers_that_became_booleans() -> None:
    older, newer = reply(INFO, "1.18"), reply(INFO, "1.19")
    for name, number in {"Debug": 0, "IPv4Forwarding": 1, "MemoryLimit": 1, "SwapLimit": 0}.items():
        assert older[name] is not newer[name] and older[name] == newer[name] == number
        assert type(older[name]) is int and type(newer[name]) is bool
