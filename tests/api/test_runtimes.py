"""Runtimes by name with a real engine: each run, exec, pause, update and end of a container is that
of its own runtime."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from engine.containers.store import ContainerRecord
from engine.storage.records import Records
from tests.support.engine.cgroups import Group
from tests.support.engine.harness import TempEngine

pytestmark = pytest.mark.own

NEWEST = "1.55"


@pytest.fixture(scope="module")
def choosy() -> Iterator[TempEngine]:
    """An engine with a runtime that writes down how it is executed, and one that does not exist."""
    engine = TempEngine()
    wrapper = engine.base / "wrapper"
    wrapper.write_text(f'#!/bin/sh\necho "$*" >>{engine.base}/executed\nexec runc "$@"\n')
    wrapper.chmod(0o755)
    engine.arguments = ("--init", "--add-runtime", f"slow={wrapper}", "--add-runtime", "gone=/not/there")
    with engine:
        engine.load_busybox()
        yield engine


@pytest.fixture
def engine(choosy: TempEngine) -> Iterator[TempEngine]:
    yield choosy
    choosy.remove_all()


def create(engine: TempEngine, runtime: str, status: int = 201, version: str = NEWEST) -> Any:
    host = {"NetworkMode": "none", "Runtime": runtime}
    body = {"Image": "busybox", "Cmd": ["sleep", "600"], "HostConfig": host}
    answer = engine.request("POST", f"/v{version}/containers/create", body)
    assert answer.status == status, answer
    return answer.json()


def shown(engine: TempEngine, identifier: str) -> str:
    return str(engine.request("GET", f"/v{NEWEST}/containers/{identifier}/json").json()["HostConfig"]["Runtime"])


def test_the_whole_life_of_a_container_with_another_runtime(engine: TempEngine) -> None:
    identifier = create(engine, "slow")["Id"]
    assert shown(engine, identifier) == "slow"
    for _ in range(2):
        engine.post(f"/containers/{identifier}/start")
        assert engine.docker("exec", identifier, "echo", "there").line == "there"
        engine.post(f"/containers/{identifier}/pause")
        engine.post(f"/containers/{identifier}/unpause")
        answer = engine.request("POST", f"/v{NEWEST}/containers/{identifier}/update", {"PidsLimit": 60})
        assert answer.status == 200 and Group(engine.inspect(identifier)["State"]["Pid"]).pids == 60
        answer = engine.request("POST", f"/v{NEWEST}/containers/{identifier}/update", {"PidsLimit": -1})
        assert answer.status == 200
        engine.post(f"/containers/{identifier}/kill")
        assert engine.wait(identifier) == 137
    executed = (engine.base / "executed").read_text()
    for verb in ("--version", "run", "exec", "pause", "resume", "update"):
        assert f" {verb} " in f" {executed} ".replace("\n", " ")


@pytest.mark.parametrize("name", ["crun", "runc", "io.containerd.runc.v2", ""])
def test_runtimes_that_are_not_configured(engine: TempEngine, name: str) -> None:
    identifier = create(engine, name)["Id"]
    engine.post(f"/containers/{identifier}/start")
    assert shown(engine, identifier) == (name or "runc")
    assert engine.docker("exec", identifier, "true").status == 0


def test_an_unknown_and_a_missing_runtime(engine: TempEngine) -> None:
    refused = create(engine, "kata", 400)
    assert "unknown or invalid runtime name: kata" in refused["message"]
    identifier = create(engine, "gone")["Id"]
    answer = engine.request("POST", f"/v{NEWEST}/containers/{identifier}/start")
    assert answer.status == 500 and "/not/there" in answer.message, answer
    assert engine.inspect(identifier)["State"]["Running"] is False


def test_an_init_by_default(engine: TempEngine) -> None:
    for given, first in (({}, "/sbin/docker-init"), ({"Init": None}, "/sbin/docker-init"), ({"Init": False}, "cat")):
        body = {"Image": "busybox", "Cmd": ["cat", "/proc/1/cmdline"], "HostConfig": {"NetworkMode": "none"} | given}
        identifier = engine.request("POST", f"/v{NEWEST}/containers/create", body).json()["Id"]
        engine.post(f"/containers/{identifier}/start")
        assert engine.wait(identifier) == 0
        assert engine.logs(identifier).decode().split("\0")[0] == first


def test_they_are_in_info(engine: TempEngine) -> None:
    info = engine.request("GET", f"/v{NEWEST}/info").json()
    runtimes = info["Runtimes"]
    assert {"slow", "gone", "io.containerd.runc.v2"} < runtimes.keys() and runtimes["gone"]["path"] == "/not/there"
    assert info["DefaultRuntime"] == "runc" in runtimes


def test_a_daemon_that_starts_again_knows_whose_container_it_is(engine: TempEngine) -> None:
    identifier = create(engine, "slow")["Id"]
    engine.post(f"/containers/{identifier}/start")
    engine.restart()
    assert engine.docker("exec", identifier, "echo", "there").line == "there"
    engine.post(f"/containers/{identifier}/pause")
    engine.post(f"/containers/{identifier}/unpause")
    engine.post(f"/containers/{identifier}/stop?t=0")


def test_running_containers_of_an_earlier_version(engine: TempEngine) -> None:
    """Their records have one name: the one that the client sent, or that of the engine's choice."""
    known = {create(engine, name)["Id"]: name for name in ("", "slow", "crun")}
    for identifier in known:
        engine.post(f"/containers/{identifier}/start")
    chosen = engine.request("GET", f"/v{NEWEST}/version").json()["Components"][1]["Name"]
    engine.terminate()
    records = Records(engine.root / "state.db")
    table = records.table("container", ContainerRecord)
    for identifier, record in table.load().items():
        host = msgspec.structs.replace(record.host, runtime=known[identifier] or chosen)
        change = table.put(identifier, msgspec.structs.replace(record, host=host, runtime=""))
        asyncio.run(records.commit(change))
    records.close()
    engine.start()
    assert [shown(engine, identifier) for identifier in known] == ["runc", "slow", "runc"]
    for identifier in known:
        assert engine.docker("exec", identifier, "echo", "there").line == "there"
