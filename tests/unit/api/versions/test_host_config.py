"""HostConfig from API 1.25 on: each row at its version and just before it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine.api import parameters
from engine.api.versions import VERSIONS
from engine.wire.containers import CreateBody, UpdateBody
from tests.unit.api.versions.rows import CREATED, INSPECT, at, check_new_field, check_new_parameter, reply

FIELDS = ["Runtime", "CgroupnsMode", "MaskedPaths", "ReadonlyPaths", "CpuRealtimePeriod", "CpuRealtimeRuntime"]
GIVEN = ["AutoRemove", "NanoCpus", "DeviceCgroupRules", "DeviceRequests"]

PARAMETERS = [
    (CreateBody, "HostConfig.KernelMemoryTCP", "1.40", "1.39"),
    (UpdateBody, "PidsLimit", "1.40", "1.39"),
    (CreateBody, "HostConfig.ConsoleSize", "1.42", "1.41"),
    (CreateBody, "HostConfig.Annotations", "1.43", "1.42"),
    (UpdateBody, "BlkioWeightDevice", "1.55", "1.54"),
    (UpdateBody, "BlkioDeviceReadBps", "1.55", "1.54"),
    (UpdateBody, "BlkioDeviceWriteBps", "1.55", "1.54"),
    (UpdateBody, "BlkioDeviceReadIOps", "1.55", "1.54"),
    (UpdateBody, "BlkioDeviceWriteIOps", "1.55", "1.54"),
]


@pytest.mark.parametrize(
    ("of", "path", "since", "before"), PARAMETERS, ids=[f"{of.__name__}.{path}" for of, path, _, _ in PARAMETERS]
)
def test_new_parameters(of: type, path: str, since: str, before: str) -> None:
    check_new_parameter(of, path, since, before)


@pytest.mark.parametrize("field", FIELDS)
def test_new_fields(field: str) -> None:
    check_new_field(INSPECT, f"HostConfig.{field}", "1.25", "1.24")


@pytest.mark.parametrize("field", GIVEN)
def test_fields_that_were_obeyed_are_shown_below_their_version(field: str) -> None:
    assert reply(INSPECT, "1.24")["HostConfig"][field] == reply(INSPECT, "1.55")["HostConfig"][field]
    assert field not in reply(without_limits(), "1.24")["HostConfig"]
    assert field in reply(without_limits(), "1.25")["HostConfig"]


def without_limits() -> Any:
    host = msgspec.structs.replace(INSPECT.host_config, **msgspec.structs.asdict(CreateBody().host_config))
    return msgspec.structs.replace(INSPECT, host_config=msgspec.structs.replace(host, ipc_mode="shareable"))


@pytest.mark.parametrize(
    ("field", "newer", "older"),
    [
        ("PidsLimit", None, 0),
        ("MemorySwappiness", None, -1),
        ("OomKillDisable", False, False),
        ("IpcMode", "shareable", ""),
    ],
)
def test_limits_that_are_not_set(field: str, newer: object, older: object) -> None:
    assert reply(without_limits(), "1.25")["HostConfig"][field] == newer
    assert reply(without_limits(), "1.24")["HostConfig"][field] == older
    on_v2 = msgspec.structs.replace(
        INSPECT, host_config=msgspec.structs.replace(INSPECT.host_config, oom_kill_disable=None)
    )
    assert reply(on_v2, "1.25")["HostConfig"]["OomKillDisable"] is None
    assert reply(on_v2, "1.24")["HostConfig"]["OomKillDisable"] is False


def test_kernel_memory_goes_at_1_42() -> None:
    for version, shown in (("1.20", "absent"), ("1.24", 0), ("1.41", 0), ("1.42", "absent"), ("1.55", "absent")):
        assert at(reply(without_limits(), version), "HostConfig.KernelMemory") == shown


@pytest.mark.parametrize(
    ("body", "version", "mode"),
    [
        ("{}", "1.39", "shareable"),
        ("{}", "1.24", "shareable"),
        ('{"HostConfig":null}', "1.39", "shareable"),
        ('{"hostconfig":{"ipcmode":""}}', "1.39", "shareable"),
        ('{"HostConfig":{"IpcMode":"host"}}', "1.39", "host"),
        ("{}", "1.40", ""),
        ('{"HostConfig":{"IpcMode":""}}', "1.55", ""),
    ],
)
def test_the_default_ipc_mode(body: str, version: str, mode: str) -> None:
    found = parameters.decode_json(body.encode(), CreateBody, VERSIONS[version].upgrade(CreateBody))
    assert found.host_config.ipc_mode == mode


def test_the_warning_of_empty_bindings() -> None:
    assert reply(CREATED, "1.52")["Warnings"] == CREATED.warnings
    assert reply(CREATED, "1.51")["Warnings"] == ["another"]
