"""/_ping, /version, /info, /events."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine import __version__
from engine.api import system
from engine.api.application import Application
from engine.api.engine import Engine
from engine.api.routes import ROUTES
from engine.api.system import EventFeed
from engine.config import Config
from engine.errors import InvalidParameter
from engine.http.messages import StreamReply
from engine.system import host
from tests.unit.api.parts import application, ask, engine, request, shown

APP = application()


@pytest.mark.parametrize("path", ["/_ping", "/v1.24/_ping", "/v1.18/_ping"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_ping(path: str, method: str) -> None:
    reply = ask(APP, path, method)
    assert (reply.status, reply.body, reply.content_type) == (200, b"OK", "text/plain; charset=utf-8")
    assert ("Builder-Version", "1") in reply.headers


def test_version() -> None:
    found = shown(ask(APP, "/version"))
    assert found == {
        "Version": __version__,
        "ApiVersion": "1.55",
        "MinAPIVersion": "1.18",
        "GitCommit": "",
        "GoVersion": "none (Python 3.11.7)",
        "Os": "linux",
        "Arch": "amd64",
        "KernelVersion": "6.1.0",
        "BuildTime": "2026-01-02T03:04:05Z",
        "Experimental": False,
    }


FIELDS_1_24 = """
ID Containers ContainersRunning ContainersPaused ContainersStopped Images Driver DriverStatus SystemStatus
Plugins MemoryLimit SwapLimit KernelMemory CpuCfsPeriod CpuCfsQuota CPUShares CPUSet IPv4Forwarding
BridgeNfIptables BridgeNfIp6tables Debug NFd OomKillDisable NGoroutines SystemTime LoggingDriver CgroupDriver
NEventsListener KernelVersion OperatingSystem OSType Architecture IndexServerAddress RegistryConfig NCPU
MemTotal DockerRootDir HttpProxy HttpsProxy NoProxy Name Labels ExperimentalBuild ServerVersion ClusterStore
ClusterAdvertise SecurityOptions Runtimes DefaultRuntime Swarm LiveRestoreEnabled
"""


def test_info() -> None:
    found = shown(ask(APP, "/v1.24/info"))
    assert not [name for name in FIELDS_1_24.split() if name not in found]
    assert (found["Containers"], found["ContainersRunning"], found["ContainersPaused"]) == (6, 2, 1)
    assert (found["ContainersStopped"], found["Images"], found["NCPU"], found["MemTotal"]) == (3, 7, 4, 8 << 30)
    assert (found["Driver"], found["CgroupDriver"], found["OSType"]) == ("overlay2", "cgroupfs", "linux")
    assert (found["Architecture"], found["DefaultRuntime"]) == ("x86_64", "crun")
    assert found["Runtimes"] == {"crun": {"path": "/usr/bin/crun"}}
    assert found["Swarm"]["LocalNodeState"] == "inactive"
    assert found["RegistryConfig"]["IndexConfigs"]["docker.io"]["Official"] is True
    assert found["Plugins"]["Network"] == ["bridge", "host", "macvlan", "null"]
    assert found["Plugins"]["Log"] == ["json-file", "none"] and found["Plugins"]["Volume"] == ["local"]
    assert found["MemoryLimit"] is True and found["Debug"] is False and found["NFd"] == 17
    assert found["SecurityOptions"] == ["seccomp"] and found["Labels"] == []
    assert found["DockerRootDir"] == found["EngineRootDir"] == "/var/lib/engined"


def test_info_shows_the_configuration_of_registries() -> None:
    config = Config(
        insecure_registries=("10.0.0.0/8", "registry.example:5000"), registry_mirrors=("https://mirror.example",)
    )
    parts = dataclasses.replace(engine(), config=config)
    found = shown(ask(Application(parts), "/v1.24/info"))["RegistryConfig"]
    assert found["InsecureRegistryCIDRs"] == ["127.0.0.0/8", "::1/128", "10.0.0.0/8"]
    assert found["Mirrors"] == ["https://mirror.example/"]
    assert found["IndexConfigs"] == {
        "docker.io": {"Name": "docker.io", "Mirrors": ["https://mirror.example/"], "Secure": True, "Official": True},
        "registry.example:5000": {"Name": "registry.example:5000", "Mirrors": [], "Secure": False, "Official": False},
    }


def test_info_at_older_versions() -> None:
    assert "ExecutionDriver" not in shown(ask(APP, "/v1.24/info"))
    at_1_23, at_1_22, at_1_21 = (shown(ask(APP, f"/v{name}/info")) for name in ("1.23", "1.22", "1.21"))
    assert at_1_23["ExecutionDriver"] == "crun" and "SecurityOptions" not in at_1_23 and "Swarm" not in at_1_23
    assert "OSType" in at_1_22 and "OSType" not in at_1_21 and "Architecture" not in at_1_21
    at_1_19, at_1_18 = (shown(ask(APP, f"/v{name}/info")) for name in ("1.19", "1.18"))
    assert at_1_19["MemoryLimit"] is True and at_1_19["CpuCfsQuota"] is False
    assert at_1_18["MemoryLimit"] == 1 and type(at_1_18["MemoryLimit"]) is int and type(at_1_18["Debug"]) is int
    assert "CpuCfsPeriod" not in at_1_18 and "OomKillDisable" not in at_1_18


def test_host(tmp_path: Path) -> None:
    found = host.read(tmp_path)
    assert found.memory > 1 << 20 and found.cpus >= 1 and found.kernel and found.operating_system and found.name
    assert len(found.id) == 59 and found.id.count(":") == 11
    assert host.read(tmp_path).id == found.id
    assert list(tmp_path.iterdir()) == [tmp_path / "engine-id"]


# --- events ---------------------------------------------------------------------------------------


def feed(parts: Engine, query: str = "", version: str | None = None) -> EventFeed:
    reply = system.events(parts, request("/events", query=query, version=version))
    assert isinstance(reply, StreamReply) and reply.status == 200 and reply.content_type == "application/json"
    assert isinstance(reply.chunks, EventFeed)
    return reply.chunks


def lines(data: bytes) -> list[dict[str, Any]]:
    assert data.endswith(b"\n")
    return [msgspec.json.decode(line) for line in data.splitlines()]


def test_events_live() -> None:
    async def scenario() -> None:
        parts = engine()
        parts.events.publish("container", "create", "c1")
        chunks = feed(parts)  # subscribes at once, before the head of the reply is sent
        assert parts.events.listeners == 1
        parts.events.publish("container", "start", "c1")
        parts.events.publish("container", "die", "c1", {"exitCode": "3"})
        assert [event["Action"] for event in lines(await anext(chunks))] == ["start", "die"]
        parts.events.publish("container", "destroy", "c1")
        assert [event["Action"] for event in lines(await anext(chunks))] == ["destroy"]
        await chunks.aclose()
        assert parts.events.listeners == 0
        with pytest.raises(StopAsyncIteration):
            await anext(chunks)

    asyncio.run(scenario())


def test_events_since() -> None:
    async def scenario() -> None:
        parts = engine()
        for second in (10, 20, 30):
            parts.events.publish("container", f"at{second}", "c1", at_ns=second * 10**9)
        for query, expected in (("since=20", ["at20", "at30"]), ("since=0", ["at10", "at20", "at30", "pull"])):
            chunks = feed(parts, query)
            assert [event["Action"] for event in lines(await anext(chunks))] == expected
            parts.events.publish("image", "pull", "i", at_ns=30 * 10**9)
            assert [event["Action"] for event in lines(await anext(chunks))] == ["pull"]  # live
            await chunks.aclose()
        chunks = feed(parts, "since=15&until=25.5")
        assert [event["Action"] for event in lines(await anext(chunks))] == ["at20"]
        with pytest.raises(StopAsyncIteration):
            await anext(chunks)
        await chunks.aclose()
        chunks = feed(parts, "until=25")  # without `since` all remembered events, as in Docker
        assert [event["Action"] for event in lines(await anext(chunks))] == ["at10", "at20"]
        with pytest.raises(StopAsyncIteration):
            await anext(chunks)
        await chunks.aclose()

    asyncio.run(scenario())


def test_events_until_a_time_to_come() -> None:
    async def scenario() -> None:
        parts = engine()
        chunks = feed(parts, f"until={time.time() + 1:.6f}")
        parts.events.publish("container", "start", "c1")
        assert len(lines(await anext(chunks))) == 1
        with pytest.raises(StopAsyncIteration):
            await anext(chunks)
        await chunks.aclose()
        assert parts.events.listeners == 0

    asyncio.run(scenario())


def test_events_filtered_as_docker_run_does() -> None:
    async def scenario() -> None:
        parts = engine()
        chunks = feed(parts, 'filters={"container":{"c1":true},"type":{"container":true}}')
        parts.events.publish("container", "start", "c2")
        parts.events.publish("network", "connect", "n", {"container": "c1"})
        parts.events.publish("container", "die", "c1", {"exitCode": "7"})
        (event,) = lines(await anext(chunks))
        assert event["Actor"]["Attributes"]["exitCode"] == "7" and event["status"] == "die" and event["id"] == "c1"
        await chunks.aclose()

    asyncio.run(scenario())


def test_events_at_older_versions() -> None:
    async def scenario() -> None:
        for version, there in (("1.24", True), ("1.22", True), ("1.21", False), ("1.18", False)):
            parts = engine()
            chunks = feed(parts, version=version)
            parts.events.publish("container", "start", "c1", {"image": "busybox"})
            (event,) = lines(await anext(chunks))
            assert ("Action" in event) is there and event["status"] == "start" and event["from"] == "busybox"
            await chunks.aclose()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("since=x", "invalid value for since"),
        ("until=x", "invalid value for until"),
        ("since=20&until=10", "cannot be after"),
        ('filters={"nope":["x"]}', "Invalid filter 'nope'"),
        ("filters=x", "not JSON"),
    ],
)
def test_bad_events(query: str, message: str) -> None:
    parts = engine()
    with pytest.raises(InvalidParameter, match=message):
        feed(parts, query)
    assert parts.events.listeners == 0


def test_routes_of_the_system() -> None:
    assert {(route.method, route.path) for route in ROUTES} >= {
        ("GET", "/_ping"), ("HEAD", "/_ping"), ("GET", "/info"), ("GET", "/version"), ("GET", "/events"),
    }  # fmt: skip
