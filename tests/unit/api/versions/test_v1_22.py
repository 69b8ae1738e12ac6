"""API 1.22: each row at 1.22 and at 1.21."""

from __future__ import annotations

from typing import Any

import pytest

from engine.api.versions import VERSIONS, Flag
from engine.wire.containers import CreateBody
from engine.wire.networks import NetworkConnect, NetworkCreate, NetworkDisconnect
from tests.unit.api.versions.rows import INFO, INSPECT, MESSAGE, SUMMARY, check_new_field, check_new_parameter

FIELDS = [
    (INSPECT, "HostConfig.Tmpfs"),
    (INSPECT, "HostConfig.BlkioWeightDevice"),
    (INSPECT, "HostConfig.BlkioDeviceReadBps"),
    (INSPECT, "HostConfig.BlkioDeviceWriteBps"),
    (INSPECT, "HostConfig.BlkioDeviceReadIOps"),
    (INSPECT, "HostConfig.BlkioDeviceWriteIOps"),
    (INSPECT, "HostConfig.OomScoreAdj"),
    (INSPECT, "HostConfig.ShmSize"),
    (SUMMARY, "HostConfig.NetworkMode"),
    (SUMMARY, "NetworkSettings"),
    (MESSAGE, "Type"),
    (MESSAGE, "Action"),
    (MESSAGE, "Actor"),
    (INFO, "Architecture"),
    (INFO, "OSType"),
]

PARAMETERS = [
    (CreateBody, "HostConfig.Tmpfs"),
    (CreateBody, "HostConfig.BlkioWeightDevice"),
    (CreateBody, "HostConfig.BlkioDeviceReadBps"),
    (CreateBody, "HostConfig.BlkioDeviceWriteBps"),
    (CreateBody, "HostConfig.BlkioDeviceReadIOps"),
    (CreateBody, "HostConfig.BlkioDeviceWriteIOps"),
    (CreateBody, "HostConfig.OomScoreAdj"),
    (CreateBody, "HostConfig.ShmSize"),
    (CreateBody, "NetworkingConfig"),
    (NetworkCreate, "Internal"),
    (NetworkConnect, "EndpointConfig"),
    (NetworkDisconnect, "Force"),
]


@pytest.mark.parametrize(("value", "path"), FIELDS, ids=[f"{type(value).__name__}.{path}" for value, path in FIELDS])
def test_new_fields(value: Any, path: str) -> None:
    check_new_field(value, path, "1.22", "1.21")


@pytest.mark.parametrize(("of", "path"), PARAMETERS, ids=[f"{of.__name__}.{path}" for of, path in PARAMETERS])
def test_new_parameters(of: type, path: str) -> None:
    check_new_parameter(of, path, "1.22", "1.21")


def test_detach_keys() -> None:
    assert VERSIONS["1.22"].has(Flag.DETACH_KEYS) and not VERSIONS["1.21"].has(Flag.DETACH_KEYS)
