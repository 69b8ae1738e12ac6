"""API 1.20: each row at 1.20 and at 1.19."""

from __future__ import annotations

from typing import Any

import pytest

from engine.api.versions import VERSIONS, Flag
from engine.wire.containers import CreateBody
from tests.unit.api.versions.rows import INSPECT, check_new_field, check_new_parameter, reply

FIELDS = [
    (INSPECT, "HostConfig.GroupAdd"),
    (INSPECT, "HostConfig.MemorySwappiness"),
]

PARAMETERS = [
    (CreateBody, "HostConfig.GroupAdd"),
    (CreateBody, "HostConfig.MemorySwappiness"),
]


@pytest.mark.parametrize(("value", "path"), FIELDS, ids=[f"{type(value).__name__}.{path}" for value, path in FIELDS])
def test_new_fields(value: Any, path: str) -> None:
    check_new_field(value, path, "1.20", "1.19")


@pytest.mark.parametrize(("of", "path"), PARAMETERS, ids=[f"{of.__name__}.{path}" for of, path in PARAMETERS])
def test_new_parameters(of: type, path: str) -> None:
    check_new_parameter(of, path, "1.20", "1.19")


def test_volumes_before_there_were_mounts() -> None:
    found = reply(INSPECT, "1.19")
    assert found["Volumes"] == {"/data": "/volumes/v", "/srv": "/srv"}
    assert found["VolumesRW"] == {"/data": True, "/srv": False}
    assert not reply(INSPECT, "1.20").keys() & {"Volumes", "VolumesRW"}


def test_kill() -> None:
    assert VERSIONS["1.20"].has(Flag.KILL_NEEDS_A_PROCESS) and not VERSIONS["1.19"].has(Flag.KILL_NEEDS_A_PROCESS)


def test_limits_in_config() -> None:
    config = reply(INSPECT, "1.19")["Config"]
    assert (config["Memory"], config["MemorySwap"]) == (64 << 20, 128 << 20)
    assert (config["CpuShares"], config["Cpuset"]) == (512, "0-1")
    assert not reply(INSPECT, "1.20")["Config"].keys() & {"Memory", "MemorySwap", "CpuShares", "Cpuset"}
