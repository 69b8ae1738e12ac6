"""API 1.21: each row at 1.21 and at 1.20."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine.api.versions import VERSIONS, Flag
from engine.wire.containers import Config, CreateBody
from engine.wire.stats import NetworkStats
from tests.unit.api.versions.rows import INSPECT, STATS, SUMMARY, check_new_field, check_new_parameter, reply

FIELDS = [
    (INSPECT, "Config.StopSignal"),
    (INSPECT, "HostConfig.MemoryReservation"),
    (INSPECT, "HostConfig.KernelMemory"),
    (INSPECT, "HostConfig.DnsOptions"),
    (INSPECT, "HostConfig.VolumeDriver"),
    (INSPECT, "State.Status"),
    (STATS, "networks"),
    (SUMMARY, "ImageID"),
]

PARAMETERS = [
    (CreateBody, "StopSignal"),
    (CreateBody, "HostConfig.MemoryReservation"),
    (CreateBody, "HostConfig.KernelMemory"),
    (CreateBody, "HostConfig.DnsOptions"),
    (CreateBody, "HostConfig.VolumeDriver"),
]


@pytest.mark.parametrize(("value", "path"), FIELDS, ids=[f"{type(value).__name__}.{path}" for value, path in FIELDS])
def test_new_fields(value: Any, path: str) -> None:
    check_new_field(value, path, "1.21", "1.20")


@pytest.mark.parametrize(("of", "path"), PARAMETERS, ids=[f"{of.__name__}.{path}" for of, path in PARAMETERS])
def test_new_parameters(of: type, path: str) -> None:
    check_new_parameter(of, path, "1.21", "1.20")


def test_flags() -> None:
    for flag in (Flag.STATS_NAMED, Flag.INSPECT_SIZE):
        assert VERSIONS["1.21"].has(flag) and not VERSIONS["1.20"].has(flag)


def test_one_network_is_the_sum_of_all() -> None:
    assert "network" not in reply(STATS, "1.21")
    sums = dict(zip(NetworkStats.__struct_fields__, range(11, 19), strict=True))
    assert reply(STATS, "1.20")["network"] == sums
    without = msgspec.structs.replace(STATS, networks=msgspec.UNSET)
    assert set(reply(without, "1.20")["network"].values()) == {0}


def test_config_has_what_moved_and_shows_what_was_not_given() -> None:
    """Below 1.21 these fields are in Config, whether or not they were given."""
    config = reply(INSPECT, "1.20")["Config"]
    assert config["VolumeDriver"] == "local" and config["ExposedPorts"] == {"80/tcp": {}}
    assert config["MacAddress"] == "" and config["NetworkDisabled"] is False
    plain = msgspec.structs.replace(INSPECT, config=Config())
    assert reply(plain, "1.20")["Config"]["ExposedPorts"] == {}
    given = msgspec.structs.replace(INSPECT, config=Config(network_disabled=True, mac_address="02:42:00:00:00:01"))
    config = reply(given, "1.20")["Config"]
    assert config["MacAddress"] == "02:42:00:00:00:01" and config["NetworkDisabled"] is True
    newer = reply(plain, "1.21")["Config"]
    assert not newer.keys() & {"VolumeDriver", "MacAddress", "NetworkDisabled", "ExposedPorts"}


def test_inspect_shows_the_default_bridge_alone() -> None:
    assert set(reply(INSPECT, "1.21")["NetworkSettings"]["Networks"]) == {"bridge", "mine"}
    settings = reply(INSPECT, "1.20")["NetworkSettings"]
    assert "Networks" not in settings and settings["IPAddress"] == "172.17.0.2"
