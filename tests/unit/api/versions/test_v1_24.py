"""API 1.24: each row at 1.24 and at 1.23."""

from __future__ import annotations

from typing import Any

import pytest

from engine.wire.containers import CreateBody, UpdateBody
from tests.unit.api.versions.rows import INFO, INSPECT, STATS, SUMMARY, check_new_field, check_new_parameter, reply

FIELDS = [
    (INFO, "Swarm"),
    (INSPECT, "Config.Healthcheck"),
    (INSPECT, "HostConfig.CpuPercent"),
    (INSPECT, "HostConfig.IOMaximumBandwidth"),
    (INSPECT, "HostConfig.IOMaximumIOps"),
    (INSPECT, "HostConfig.PidsLimit"),
    (INSPECT, "HostConfig.UsernsMode"),
    (INSPECT, "HostConfig.Sysctls"),
    (INSPECT, "HostConfig.StorageOpt"),
    (INSPECT, "State.Health"),
    (STATS, "pids_stats"),
    (SUMMARY, "State"),
    (SUMMARY, "Mounts"),
]

PARAMETERS = [
    (CreateBody, "Healthcheck"),
    (CreateBody, "HostConfig.CpuPercent"),
    (CreateBody, "HostConfig.IOMaximumBandwidth"),
    (CreateBody, "HostConfig.IOMaximumIOps"),
    (CreateBody, "HostConfig.PidsLimit"),
    (CreateBody, "HostConfig.UsernsMode"),
    (CreateBody, "HostConfig.Sysctls"),
    (CreateBody, "HostConfig.StorageOpt"),
    (UpdateBody, "RestartPolicy"),
]


@pytest.mark.parametrize(("value", "path"), FIELDS, ids=[f"{type(value).__name__}.{path}" for value, path in FIELDS])
def test_new_fields(value: Any, path: str) -> None:
    check_new_field(value, path, "1.24", "1.23")


@pytest.mark.parametrize(("of", "path"), PARAMETERS, ids=[f"{of.__name__}.{path}" for of, path in PARAMETERS])
def test_new_parameters(of: type, path: str) -> None:
    check_new_parameter(of, path, "1.24", "1.23")


def test_security_options() -> None:
    assert "SecurityOptions" in reply(INFO, "1.24") and "SecurityOptions" not in reply(INFO, "1.23")


def test_execution_driver_goes() -> None:
    assert reply(INFO, "1.23")["ExecutionDriver"] == "crun"
    assert "ExecutionDriver" not in reply(INFO, "1.24")
