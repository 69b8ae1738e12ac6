"""Where a container's output goes, and where its log is below ROOT."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine.config import Config as EngineConfig
from engine.containers import log_plan
from engine.containers.store import ContainerRecord
from engine.errors import InvalidParameter, ServerError
from engine.logs.targets import JsonFile, Spool
from engine.wire.containers import Config, HostConfig, LogConfig

ENGINE = EngineConfig(root=Path("/root"))
ID = "f" * 64
FILE = Path(f"/root/containers/{ID}/{ID}-json.log")


def record(kind: str = "json-file", **options: str) -> ContainerRecord:
    log = LogConfig(type=kind, config={name.replace("_", "-"): value for name, value in options.items()})
    return ContainerRecord(
        id=ID,
        name="web",
        created=1,
        image_id="sha256:" + "a" * 64,
        parent="",
        path="sh",
        args=("-c", "x"),
        config=Config(image="busybox", labels={"a": "b"}, env=["X=y"]),
        host=HostConfig(log_config=log),
    )


def test_files() -> None:
    for kind in ("", "json-file", "local"):
        assert log_plan.path(ENGINE, record(kind)) == FILE
        found = log_plan.plan(ENGINE, record(kind))
        assert isinstance(found.target, JsonFile) and found.target.path == str(FILE) and found.delivery is None
    assert log_plan.path(ENGINE, record("none")) is None
    assert log_plan.plan(ENGINE, record("none")).target is None


def test_remote_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    found = log_plan.plan(ENGINE, record("awslogs", awslogs_group="g", tag="{{.Name}}"))
    assert isinstance(found.target, Spool) and found.target.directory == f"/root/logs/{ID}"
    assert found.delivery is not None and found.delivery.command == "sh -c x" and found.delivery.pid
    assert found.delivery.tag == "web" and found.delivery.host and found.delivery.image_name == "busybox"
    assert msgspec.to_builtins(found.delivery.target)["region"] == "eu-west-1"
    assert log_plan.path(ENGINE, record("syslog")) == Path(f"/root/logs/{ID}/spool.log")
    assert log_plan.path(ENGINE, record("syslog", cache_disabled="true")) is None


def test_details() -> None:
    assert log_plan.details(ENGINE, record("gelf", labels="a", env="X", tag="{{.ID}}")) == "X=y,a=b,tag=ffffffffffff "
    assert log_plan.details(ENGINE, record()) == " "


def test_a_driver_that_this_version_lacks() -> None:
    with pytest.raises(ServerError, match="failed to initialize logging driver: logger: no log driver named 'gcp"):
        log_plan.plan(ENGINE, record("gcplogs"))
    assert log_plan.path(ENGINE, record("gcplogs")) is None


def test_a_journal_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_plan, "has_journal", lambda: False)
    with pytest.raises(ServerError, match="journald is not enabled on this host"):
        log_plan.plan(ENGINE, record("journald"))
    monkeypatch.setattr(log_plan, "has_journal", lambda: True)
    assert log_plan.plan(ENGINE, record("journald")).delivery is not None


def test_a_create() -> None:
    engine = EngineConfig(log_driver="syslog", log_opts=("tag=t",))
    assert log_plan.resolved(LogConfig(), engine) == LogConfig(type="syslog", config={"tag": "t"})
    assert log_plan.resolved(LogConfig(type="local"), engine) == LogConfig(type="local")
    with pytest.raises(InvalidParameter, match="unknown log opt 'x' for syslog log driver"):
        log_plan.resolved(LogConfig(config={"x": "y"}), engine)
    with pytest.raises(InvalidParameter, match="gelf-address is a required parameter"):
        log_plan.resolved(LogConfig(type="gelf"), engine)
