"""/_ping, /version, /info."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest

from engine import __version__
from engine.api.application import Application
from engine.api.routes import ROUTES
from engine.common.facts import Host, ProgramFacts
from engine.config import Config
from engine.system import host
from tests.unit.api.parts import HOST, application, ask, engine, shown

APP = application()


@pytest.mark.parametrize("path", ["/_ping", "/v1.24/_ping", "/v1.18/_ping"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_ping(path: str, method: str) -> None:
    reply = ask(APP, path, method)
    body = b"OK" if method == "GET" else b""
    assert (reply.status, reply.body, reply.content_type) == (200, body, "text/plain; charset=utf-8")
    assert dict(reply.headers) == {
        "Cache-Control": "no-cache, no-store, must-revalidate",
        "Pragma": "no-cache",
        "Builder-Version": "1",
        "Swarm": "inactive",
    }


def test_version() -> None:
    found = shown(ask(APP, "/version"))
    assert found == {
        "Version": f"29.7.2+engined.{__version__}",
        "ApiVersion": "1.55",
        "MinAPIVersion": "1.18",
        "GitCommit": "",
        "GoVersion": "none (Python 3.11.7)",
        "Os": "linux",
        "Arch": "amd64",
        "KernelVersion": "6.1.0",
        "BuildTime": "2026-01-02T03:04:05Z",
        "Experimental": False,
        "Platform": {"Name": "engined"},
        "Components": [
            {
                "Name": "Engine",
                "Version": __version__,
                "Details": {
                    "ApiVersion": "1.55",
                    "Arch": "amd64",
                    "BuildTime": "2026-01-02T03:04:05Z",
                    "Experimental": "false",
                    "GitCommit": "",
                    "GoVersion": "none (Python 3.11.7)",
                    "KernelVersion": "6.1.0",
                    "MinAPIVersion": "1.18",
                    "Os": "linux",
                },
            },
            {"Name": "crun", "Version": "1.8.1", "Details": {}},
            {"Name": "docker-init", "Version": "0.19.0", "Details": {}},
        ],
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
    assert (found["Architecture"], found["DefaultRuntime"]) == ("x86_64", "runc")
    assert found["Runtimes"] == {"crun": {"path": "/usr/bin/crun"}}
    assert found["Swarm"]["LocalNodeState"] == "inactive"
    assert found["RegistryConfig"]["IndexConfigs"]["docker.io"]["Official"] is True
    assert found["Plugins"]["Network"] == ["bridge", "host", "macvlan", "null"]
    assert found["Plugins"]["Log"] == ["json-file", "none"] and found["Plugins"]["Volume"] == ["local"]
    assert found["MemoryLimit"] is True and found["Debug"] is False and found["NFd"] == 17
    assert found["SecurityOptions"] == ["apparmor", "seccomp"] and found["Labels"] == []
    assert found["DockerRootDir"] == found["EngineRootDir"] == "/var/lib/engined"


NEW_FIELDS = """
SecurityOptions InitBinary ContainerdCommit RuncCommit InitCommit Warnings CgroupVersion OSVersion GenericResources
CDISpecDirs PidsLimit
"""


def test_info_shows_the_pools_of_the_operator() -> None:
    assert "DefaultAddressPools" not in shown(ask(APP, "/info"))
    configured = Config(address_pools=("base=10.9.0.0/16,size=24", "base=fd00::/48,size=64"))
    found = shown(ask(application(config=configured), "/info"))
    assert found["DefaultAddressPools"] == [{"Base": "10.9.0.0/16", "Size": 24}, {"Base": "fd00::/48", "Size": 64}]


def test_info_of_newer_versions() -> None:
    found = shown(ask(APP, "/info"))
    assert not [name for name in NEW_FIELDS.split() if name not in found]
    assert not {"ClusterStore", "ClusterAdvertise", "SystemStatus", "KernelMemory", "KernelMemoryTCP"} & found.keys()
    assert not {"Containerd", "NRI", "ProductLicense", "ExecutionDriver", "BridgeNfIptables"} & found.keys()
    assert found["SecurityOptions"] == ["name=apparmor", "name=seccomp,profile=builtin"]
    assert found["RuncCommit"] == {"ID": "1.8.1"} and found["ContainerdCommit"] == {"ID": "N/A"}
    assert found["InitCommit"] == {"ID": "0.19.0"} and found["InitBinary"] == "docker-init"
    features = {"org.opencontainers.runtime-spec.features": '{"ociVersionMin":"1.0.0"}'}
    assert found["Runtimes"] == {"crun": {"path": "/usr/bin/crun", "status": features}}
    assert found["FirewallBackend"] == {"Driver": "nftables"}
    assert (found["CgroupVersion"], found["OSVersion"]) == ("2", "12")
    assert found["Swarm"]["RemoteManagers"] is None and found["GenericResources"] is None


@pytest.mark.parametrize(
    ("field", "without", "with_it"), [("KernelMemory", "1.42", "1.41"), ("BridgeNfIptables", "1.50", "1.49")]
)
def test_fields_of_info_that_went(field: str, without: str, with_it: str) -> None:
    assert field not in shown(ask(APP, f"/v{without}/info"))
    assert shown(ask(APP, f"/v{with_it}/info"))[field] is False


def test_devices() -> None:
    names = ["example.com/lamp=1", "example.com/lamp=all"]
    parts = dataclasses.replace(engine(), devices=lambda: names)
    found = shown(ask(Application(parts), "/info"))
    assert found["CDISpecDirs"] == ["/etc/cdi", "/var/run/cdi"]
    assert found["DiscoveredDevices"] == [{"Source": "cdi", "ID": name} for name in names]
    assert "DiscoveredDevices" not in shown(ask(APP, "/info"))


def test_without_programs() -> None:
    app = Application(dataclasses.replace(engine(), programs=ProgramFacts))
    found = shown(ask(app, "/info"))
    assert found["InitCommit"] == {"ID": "N/A"} and found["Runtimes"] == {"crun": {"path": "/usr/bin/crun"}}
    assert [each["Name"] for each in shown(ask(app, "/version"))["Components"]] == ["Engine", "crun"]


def test_warnings() -> None:
    """In Docker's words, and none about what the host has."""
    limits = ("memory_limit", "swap_limit", "cpu_cfs_quota", "cpu_cfs_period", "cpu_shares", "cpu_set", "pids_limit")
    whole = msgspec.structs.replace(HOST, ipv4_forwarding=True, **dict.fromkeys(limits, True))

    def warnings(found: Host, config: Config) -> list[str]:
        parts = dataclasses.replace(engine(), host=found, config=config)
        return list(shown(ask(Application(parts), "/info"))["Warnings"])

    assert warnings(whole, Config()) == []
    v1 = msgspec.structs.replace(whole, cgroup_version="1", swap_limit=False, ipv4_forwarding=False)
    assert warnings(v1, Config()) == [
        "WARNING: No swap limit support",
        "WARNING: No oom kill disable support",
        "WARNING: IPv4 forwarding is disabled",
    ]
    open_tcp = Config(tcp=("127.0.0.1:2375",), insecure=True)
    assert warnings(whole, open_tcp) == ["WARNING: API is accessible on http://127.0.0.1:2375 without encryption"]
    sealed = Config(tcp=("0.0.0.0:2376",), tls_ca="a", tls_cert="b", tls_key="c")
    assert warnings(whole, sealed) == []


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://proxy.example:3128", "http://proxy.example:3128"),
        ("http://me:secret@proxy.example:3128/x@y", "http://xxxxx:xxxxx@proxy.example:3128/x@y"),
        ("http://me@proxy.example", "http://xxxxx:xxxxx@proxy.example"),
        ("http://me:se@cret@proxy.example", "http://xxxxx:xxxxx@proxy.example"),
        ("me:secret@proxy.example:3128", "xxxxx:xxxxx@proxy.example:3128"),
        ("", ""),
    ],
)
def test_the_password_of_a_proxy_is_not_shown(monkeypatch: pytest.MonkeyPatch, url: str, expected: str) -> None:
    monkeypatch.setenv("HTTP_PROXY", url)
    monkeypatch.setenv("HTTPS_PROXY", url)
    found = shown(ask(APP, "/info"))
    assert found["HttpProxy"] == found["HttpsProxy"] == expected


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
    assert at_1_23["ExecutionDriver"] == "runc" and "SecurityOptions" not in at_1_23 and "Swarm" not in at_1_23
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


def test_routes_of_the_system() -> None:
    assert {(route.method, route.path) for route in ROUTES} >= {
        ("GET", "/_ping"), ("HEAD", "/_ping"), ("GET", "/info"), ("GET", "/version"), ("GET", "/events"),
    }  # fmt: skip
