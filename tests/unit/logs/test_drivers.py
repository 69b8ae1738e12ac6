"""The log drivers that a create accepts, those that a start accepts, and the effect of their
options."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine.errors import InvalidParameter, ServerError
from engine.logs import drivers
from engine.logs.targets import JsonFile, Target
from engine.monitor import messages
from engine.wire.containers import Config, LogConfig

PATH = Path("/root/containers/1/1-json.log")


def test_json_file_is_the_default() -> None:
    for kind in ("", "json-file"):
        drivers.validate(LogConfig(type=kind))
        assert drivers.target(LogConfig(type=kind), PATH) == JsonFile(str(PATH), 0, 1, b"")
    log = LogConfig(
        type="json-file", config={"max-size": "10m", "max-file": "3", "mode": "non-blocking", "max-buffer-size": "4m"}
    )
    drivers.validate(log)
    assert drivers.target(log, PATH) == JsonFile(str(PATH), 10_000_000, 3, b"")


def test_a_target_survives_its_message() -> None:
    target = drivers.target(LogConfig(config={"max-size": "1k"}), PATH)
    assert target == JsonFile(str(PATH), 1000, 1)
    assert msgspec.msgpack.decode(messages.encode(target), type=Target) == target


def test_files_without_a_size_never_rotate() -> None:
    assert drivers.target(LogConfig(config={"max-file": "5"}), PATH) == JsonFile(str(PATH), 0, 5, b"")


def test_entries_carry_the_attributes_that_the_options_name() -> None:
    config = Config(labels={"b": "<é>", "a": "&"}, env=["PATH=/bin", "X=y"])
    told = drivers.target(LogConfig(config={"labels": "a,b", "env": "X"}), PATH, config)
    assert told is not None
    assert told.attrs == b'{"X":"y","a":"\\u0026","b":"\\u003c\xc3\xa9\\u003e"}'
    assert drivers.target(LogConfig(), PATH, config) == JsonFile(str(PATH), 0, 1, b"")
    with pytest.raises(InvalidParameter, match="per log entry, more than 32768"):
        drivers.target(LogConfig(config={"labels": "a"}), PATH, Config(labels={"a": "x" * 40_000}))


def test_none_keeps_nothing() -> None:
    log = LogConfig(type="none", config={"anything": "goes"})
    drivers.validate(log)
    assert drivers.target(log, None) is None


@pytest.mark.parametrize(
    "kind", ["syslog", "journald", "gelf", "fluentd", "awslogs", "splunk", "etwlogs", "gcplogs", "local"]
)
def test_a_driver_that_is_not_there_is_refused_at_create(kind: str) -> None:
    """A container of an earlier version with such a driver fails to start, and the error contains
    the driver's name."""
    log = LogConfig(type=kind, config={"syslog-address": "tcp://1.2.3.4:5"})
    with pytest.raises(InvalidParameter, match=f"logger: no log driver named '{kind}' is registered"):
        drivers.validate(log)
    with pytest.raises(ServerError, match=f"failed to initialize logging driver: .*'{kind}'"):
        drivers.target(log, None)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("papyrus", {}, "no log driver named 'papyrus' is registered"),
        ("JSON-FILE", {}, "no log driver named"),
        ("json-file", {"x": "y"}, "unknown log opt 'x'"),
        ("", {"max-size": "x"}, "invalid size: 'x'"),
        ("", {"mode": "maybe"}, "logging mode not supported: maybe"),
        ("", {"max-buffer-size": "1m"}, "only supported with"),
        ("", {"mode": "non-blocking", "max-buffer-size": "much"}, "invalid max-buffer-size"),
    ],
)
def test_what_a_create_refuses(kind: str, options: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidParameter, match=words):
        drivers.validate(LogConfig(type=kind, config=options))


def test_details() -> None:
    config = Config(labels={"b": "x y", "a": "1=2"}, env=["PATH=/bin:/sbin", "Z=é"])
    assert drivers.details(LogConfig(), config) == " "
    assert (
        drivers.details(LogConfig(config={"labels": "a,b", "env": "PATH,Z"}), config)
        == "PATH=%2Fbin%3A%2Fsbin,Z=%C3%A9,a=1%3D2,b=x+y "
    )
    assert drivers.details(LogConfig(config={"env": "A"}), Config()) == " "
