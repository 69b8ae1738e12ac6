"""Drivers that are plugins: names, options that are not checked, and what a plugin learns."""

from __future__ import annotations

import msgspec
import pytest

from engine.errors import InvalidParameter
from engine.logs import deliveries, drivers
from engine.logs.deliveries import LogPlugin
from engine.logs.facts import Facts
from engine.logs.targets import Spool
from engine.wire.containers import LogConfig

FACTS = Facts(
    id="c" * 64,
    name="web",
    image_id="sha256:1",
    image_name="busybox:1",
    path="sh",
    args=("-c", "true"),
    created=1_700_000_000_123_000_000,
    labels={"l": "m"},
    environment=("A=b",),
    spool="/spool",
    fifo="/run/logging/c",
)


def log(kind: str, **options: str) -> LogConfig:
    return LogConfig(type=kind, config={name.replace("_", "-"): value for name, value in options.items()})


@pytest.mark.parametrize(
    "kind", ["loki", "vendor/plugin:1.0", "host:5000/a/b:latest", "a@sha256:0", "JSON-FILE", "None"]
)
def test_names(kind: str) -> None:
    drivers.validate(log(kind, anything="goes", tag="{{", labels_regex="("))
    assert drivers.by_plugin(log(kind)) and drivers.remote(log(kind)) and drivers.readable(log(kind))


@pytest.mark.parametrize("kind", ["none", "json-file", "", "syslog", "gcplogs", "a b", "../x", "a\n", "x" * 501])
def test_names_that_are_no_plugins(kind: str) -> None:
    assert not drivers.by_plugin(log(kind))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "x"}, "logging mode not supported: x"),
        ({"max_buffer_size": "1m"}, "only supported with 'mode=non-blocking'"),
        ({"mode": "non-blocking", "max_buffer_size": "0"}, "must be a positive number"),
        ({"cache_disabled": "perhaps"}, "invalid value for option cache-disabled: perhaps"),
        ({"cache_max_size": "x"}, "cache-max-size"),
    ],
)
def test_options_that_the_engine_handles(options: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        drivers.validate(log("far", **options))
    assert words in caught.value.message


def test_a_plan() -> None:
    given = log("far", mode="non-blocking", max_buffer_size="2m", labels="l", env="A", tag="{{.Nix}}")
    target, delivery = drivers.plan(given, FACTS)
    assert isinstance(target, Spool) and (target.directory, target.quota, target.blocking) == ("/spool", 2 << 20, False)
    assert delivery is not None and (delivery.tag, delivery.attributes, delivery.keep) == ("", {}, True)
    assert deliveries.decode(deliveries.encode(delivery)) == delivery
    found = delivery.target
    assert isinstance(found, LogPlugin)
    assert (found.name, found.fifo, found.destination) == ("far", "/run/logging/c", ("far", "plugin"))
    assert msgspec.json.decode(msgspec.json.encode(found.info)) == {
        "Config": given.config,
        "ContainerID": "c" * 64,
        "ContainerName": "/web",
        "ContainerEntrypoint": "sh",
        "ContainerArgs": ["-c", "true"],
        "ContainerImageID": "sha256:1",
        "ContainerImageName": "busybox:1",
        "ContainerCreated": "2023-11-14T22:13:20.123Z",
        "ContainerEnv": ["A=b"],
        "ContainerLabels": {"l": "m"},
        "LogPath": "",
        "DaemonName": "docker",
    }
    assert drivers.details(given, FACTS) == " "


def test_without_a_cache() -> None:
    given = log("far", cache_disabled="true")
    assert not drivers.readable(given)
    _, delivery = drivers.plan(given, FACTS)
    assert delivery is not None and not delivery.keep
