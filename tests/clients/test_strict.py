"""Every list and inspect answer, at every version, parses in Go clients
(tests/support/engine/strict.py).

One engine has containers, networks, volumes and images with as many kinds of values as answers can
have: states, addresses, ports, health, mounts, times.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import pytest

from tests.support.engine import client, strict
from tests.support.engine.harness import TempEngine, free_ports, until
from tests.support.images.archives import Image, busybox_layer, digest, docker_archive

VERSIONS = [f"1.{minor}" for minor in range(18, 56)]
CONFIG = {
    "Cmd": ["top"],
    "Entrypoint": ["busybox"],
    "Env": ["PATH=/bin", "A=b=c", "EMPTY="],
    "ExposedPorts": {"80/tcp": {}, "53/udp": {}, "9/sctp": {}},
    "Volumes": {"/data": {}},
    "Labels": {"a.b": "c"},
    "StopSignal": "SIGINT",
    "Shell": ["/bin/sh", "-c"],
    "OnBuild": ["RUN true"],
    "Healthcheck": {"Test": ["CMD", "true"], "Interval": 10**9, "StartPeriod": 10**9},
    "User": "0:0",
}


@dataclass(frozen=True)
class World:
    """An engine, and paths of its answers with their shapes."""

    engine: TempEngine
    answers: dict[str, strict.Shape]
    since: dict[str, int]
    """The minor version that has a path; others have all."""


def _post(engine: TempEngine, path: str, body: Any = None) -> Any:
    answer = engine.request("POST", "/v1.55" + path, body)
    assert answer.status in (200, 201, 204), (path, answer)
    return answer.json() if answer.body else None


def _images(engine: TempEngine) -> list[str]:
    """Loads images with every setting, without a name, and of the year 1."""
    full = Image([busybox_layer()], ("host:5000/full:1.0", "full:latest"), CONFIG)
    bare = Image([busybox_layer()], (), {"Cmd": ["sh"], "Labels": {"bare": "1"}}, created="0001-01-01T00:00:00Z")
    engine.load_busybox()
    for image in (full, bare):
        sent = engine.request("POST", "/images/load", docker_archive(image), {"Content-Type": "application/x-tar"})
        assert sent.status == 200 and b"error" not in sent.body, sent
    _post(engine, "/images/busybox/tag?repo=again&tag=1")
    return ["busybox", "full", digest(bare.configuration())]


def _networks(engine: TempEngine) -> list[str]:
    _post(
        engine,
        "/networks/create",
        {
            "Name": "wide",
            "EnableIPv6": True,
            "Labels": {"a": "b"},
            "Attachable": True,
            "Options": {"com.docker.network.driver.mtu": "1400"},
            "IPAM": {
                "Config": [
                    {
                        "Subnet": "10.211.3.0/24",
                        "IPRange": "10.211.3.128/25",
                        "Gateway": "10.211.3.1",
                        "AuxiliaryAddresses": {"printer": "10.211.3.200"},
                    },
                    {"Subnet": "fd21:3::/64", "Gateway": "fd21:3::1"},
                ]
            },
        },
    )
    _post(engine, "/networks/create", {"Name": "inner", "Internal": True})
    return ["wide", "inner", "bridge", "host", "none"]


def _containers(engine: TempEngine) -> list[str]:
    first, second = free_ports(2)
    web = {
        **CONFIG,
        "Image": "full",
        "Hostname": "web",
        "Domainname": "example.org",
        "StopTimeout": 3,
        "HostConfig": {
            "NetworkMode": "wide",
            "PortBindings": {
                "80/tcp": [
                    {"HostIp": "127.0.0.1", "HostPort": str(first)},
                    {"HostIp": "::1", "HostPort": str(second)},
                ],
                "53/udp": [{"HostIp": "", "HostPort": ""}],
            },
            "PublishAllPorts": True,
            "Binds": ["named:/named:ro"],
            "Tmpfs": {"/tmp": "size=1m"},
            "Mounts": [
                {"Type": "volume", "Source": "labelled", "Target": "/labelled"},
                {"Type": "bind", "Source": str(engine.base), "Target": "/host", "ReadOnly": True},
                {"Type": "tmpfs", "Target": "/scratch", "TmpfsOptions": {"SizeBytes": 1 << 20, "Mode": 0o700}},
            ],
            "Dns": ["10.211.3.9", "fd21:3::9"],
            "DnsSearch": ["example.org"],
            "ExtraHosts": ["other:10.211.3.8"],
            "RestartPolicy": {"Name": "on-failure", "MaximumRetryCount": 2},
            "LogConfig": {"Type": "json-file", "Config": {"max-size": "1m"}},
            "Ulimits": [{"Name": "nofile", "Soft": 100, "Hard": 200}],
            "Memory": 64 << 20,
            "NanoCpus": 500_000_000,
            "PidsLimit": 100,
            "CapAdd": ["NET_ADMIN"],
            "SecurityOpt": ["no-new-privileges"],
            "Devices": [{"PathOnHost": "/dev/null", "PathInContainer": "/dev/nix", "CgroupPermissions": "rwm"}],
            "Sysctls": {"net.core.somaxconn": "64"},
        },
        "NetworkingConfig": {
            "EndpointsConfig": {
                "wide": {
                    "IPAMConfig": {"IPv4Address": "10.211.3.20", "IPv6Address": "fd21:3::20"},
                    "Aliases": ["www", "shop"],
                }
            }
        },
    }
    plain = {"Image": "busybox", "Cmd": ["top"], "Tty": True, "OpenStdin": True}
    bodies = {
        "web": web,
        "plain": plain,
        "paused": plain,
        "done": {"Image": "busybox", "Cmd": ["sh", "-c", "exit 3"]},
        "failed": {"Image": "busybox", "Cmd": ["/no/such/program"]},
        "hosted": {**plain, "HostConfig": {"NetworkMode": "host"}},
        "joined": {**plain, "HostConfig": {"NetworkMode": "container:plain", "PidMode": "host"}},
        "waiting": {**plain, "HostConfig": {"NetworkMode": "inner", "Privileged": True, "AutoRemove": True}},
    }
    for name, body in bodies.items():
        _post(engine, f"/containers/create?name={name}", body)
        if name != "waiting":
            started = engine.request("POST", f"/v1.55/containers/{name}/start")
            assert started.status == (404 if name == "failed" else 204), (name, started)
    _post(engine, "/networks/inner/connect", {"Container": "web", "EndpointConfig": {"Aliases": ["within"]}})
    _post(engine, "/containers/done/wait")
    _post(engine, "/containers/paused/pause")
    until("a health check has run", lambda: engine.inspect("web")["State"]["Health"]["Log"])
    return list(bodies)


def _execs(engine: TempEngine) -> list[str]:
    """Ids of an exec that has ended and of one that was never started."""
    body = {"Cmd": ["sh", "-c", "exit 5"], "AttachStdout": True, "DetachKeys": "ctrl-p,ctrl-q"}
    ended, created = (_post(engine, "/containers/plain/exec", body)["Id"] for _ in range(2))
    _post(engine, f"/exec/{ended}/start", {"Detach": True})
    until("the exec has ended", lambda: not engine.request("GET", f"/exec/{ended}/json").json()["Running"])
    return [ended, created]


def _answers(engine: TempEngine) -> dict[str, strict.Shape]:
    found: dict[str, strict.Shape] = {
        "/version": strict.VERSION,
        "/info": strict.INFO,
        "/system/df": strict.DISK_USAGE,
        "/system/df?verbose=1": strict.DISK_USAGE,
        "/plugins": strict.PLUGINS,
        "/containers/json?all=1&size=1": strict.listed(strict.SUMMARY),
        "/images/json?all=1&digests=1&shared-size=1&manifests=1": strict.listed(strict.IMAGE_SUMMARY),
        "/networks": strict.listed(strict.NETWORK),
        "/volumes": strict.VOLUMES,
        "/containers/web/top": strict.TOP,
        "/containers/web/changes": strict.CHANGES,
        "/containers/no-such/json": strict.FAILURE,
        "/no/such/route": strict.FAILURE,
    }
    for name in _images(engine):
        found[f"/images/{name}/json?manifests=1"] = strict.IMAGE
        found[f"/images/{name}/history"] = strict.HISTORY
    _post(engine, "/volumes/create", {"Name": "labelled", "Labels": {"a": "b"}, "DriverOpts": {}})
    for name in _networks(engine):
        found[f"/networks/{name}?verbose=1"] = strict.NETWORK
    for name in _containers(engine):
        found[f"/containers/{name}/json?size=1"] = strict.INSPECT
    for name in ("labelled", "named"):
        found[f"/volumes/{name}"] = strict.VOLUME
    for identifier in _execs(engine):
        found[f"/exec/{identifier}/json"] = strict.EXEC
    return found


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with TempEngine() as engine:
        yield World(engine, _answers(engine), {"/system/df": 25, "/system/df?verbose=1": 25, "/plugins": 25})
        engine.remove_all()


@pytest.mark.parametrize("version", VERSIONS)
def test_lists_and_inspects(world: World, version: str) -> None:
    minor = int(version.partition(".")[2])
    found: dict[str, list[str]] = {}
    for path, shape in world.answers.items():
        if minor < world.since.get(path, 0):
            continue
        answer = world.engine.request("GET", f"/v{version}{path}")
        assert answer.headers["content-type"] == "application/json", path
        if answer.status != (404 if shape is strict.FAILURE else 200):
            found[path] = [answer.message]
            continue
        if minor <= 18 and path == "/info":
            continue  # its booleans are numbers
        if wrong := strict.faults(answer.json(), shape):
            found[path] = wrong
    assert not found


@pytest.mark.parametrize("version", VERSIONS)
def test_events(world: World, version: str) -> None:
    answer = world.engine.request("GET", f"/v{version}/events?since=0&until={time.time():.6f}")
    events = [json.loads(line) for line in answer.body.splitlines()]
    assert events
    assert strict.faults(events, strict.listed(strict.EVENT)) == []


@pytest.mark.parametrize("version", ["1.24", "1.40", "1.55"])
@pytest.mark.parametrize("name", ["web", "hosted", "done"])
def test_statistics(world: World, name: str, version: str) -> None:
    stream = client.json_stream(world.engine.socket, f"/v{version}/containers/{name}/stats?stream=1")
    assert strict.faults(next(stream), strict.STATS) == []
    stream.close()  # type: ignore[attr-defined]


def test_prunes(own_engine: TempEngine) -> None:
    """Each prune's report parses, when there is something to remove and when there is nothing."""
    _post(own_engine, "/volumes/create", {"Name": "kept"})
    own_engine.create("true", host={"Binds": ["/anonymous"]})
    _post(own_engine, "/networks/create", {"Name": "unused"})
    everything = quote(json.dumps({"all": ["true"]}))
    undangling = quote(json.dumps({"dangling": ["false"]}))
    for number in range(2):
        for path, removed in {
            "/containers/prune": "ContainersDeleted",
            "/networks/prune": "NetworksDeleted",
            f"/volumes/prune?filters={everything}": "VolumesDeleted",
            f"/images/prune?filters={undangling}": "ImagesDeleted",
            "/build/prune": "",
        }.items():
            report = _post(own_engine, path)
            assert strict.faults(report, strict.PRUNED) == []
            if removed:
                assert bool(report[removed]) == (number == 0), report
