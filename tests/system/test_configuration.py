"""dockerd's configuration keys in force: a real engine with a daemon.json that sets all keys of the
table, the refusal of each key's invalid value, and, in the night, dockerd itself with the same
file.

A key is one row of ROWS. Not here: how values are parsed (`unit/config`).
"""

from __future__ import annotations

import functools
import grp
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bench.engines import Dockerd, HostDockerd
from tests.support import ROOT
from tests.support.engine import client
from tests.support.engine.cgroups import V2
from tests.support.engine.harness import TempEngine, busybox_archive

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

API = "/v1.51"
"""The newest version of dockerd 28.5.2."""
BASE = "@BASE@"
"""In values: the directory of the engine, which has FILES."""

PARENT = f"/configuration-{os.getpid()}"
"""cgroup-parent."""

INIT = shutil.which("docker-init") or shutil.which("tini-static") or "/usr/bin/docker-init"

FILES: dict[str, str] = {
    "runtime": """#!/bin/sh
echo "$@" >>@BASE@/runtime-arguments
[ "$1" = --one ] && shift
exec runc "$@"
""",
    "cdi/example.json": """{
        "cdiVersion": "0.6.0",
        "kind": "example.com/device",
        "devices": [{"name": "one", "containerEdits": {"env": ["CDI=given"]}}]
    }""",
    "profile.json": """{
        "defaultAction": "SCMP_ACT_ALLOW",
        "syscalls": [{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 40}]
    }""",
}
"""Files that values name, below BASE, and their content."""


PROFILE_WARNING = "WARNING: daemon is not using the default seccomp profile"


class Seen:
    """An engine as its API shows it: `info`, and what one container has whose create says nothing
    but its image and command.
    """

    def __init__(self, socket: str, base: Path, log: Callable[[], str]) -> None:
        self.socket = socket
        self.base = base
        self.log = log
        """The daemon's standard error."""

    def ask(self, method: str, path: str, body: Any = None, status: tuple[int, ...] = (200, 201, 204)) -> Any:
        """The answer's JSON; None for an empty one."""
        answer = client.request(self.socket, method, API + path, body)
        assert answer.status in status, answer
        return answer.json() if answer.body else None

    def docker(self, *arguments: str, **variables: str) -> str:
        """The output of the docker command, both streams; its status is not checked."""
        done = subprocess.run(
            ["docker", "-H", f"unix://{self.socket}", *arguments],
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        return done.stdout.decode(errors="replace").strip()

    @functools.cached_property
    def info(self) -> Any:
        return self.ask("GET", "/info")

    @functools.cached_property
    def container(self) -> str:
        """The id of the container, which runs."""
        created = self.ask("POST", "/containers/create?name=plain", {"Image": "busybox", "Cmd": ["sleep", "1000"]})
        self.ask("POST", f"/containers/{created['Id']}/start")
        return str(created["Id"])

    @functools.cached_property
    def inspect(self) -> Any:
        return self.ask("GET", f"/containers/{self.container}/json")

    @functools.cached_property
    def network(self) -> Any:
        """The default network."""
        return self.ask("GET", "/networks/bridge")

    def option(self, name: str, network: str = "bridge") -> str:
        """A driver option of a network."""
        return str(self.ask("GET", f"/networks/{network}")["Options"][f"com.docker.network.{name}"])

    def endpoint(self, name: str) -> str:
        """A field of the container's endpoint."""
        return str(self.inspect["NetworkSettings"]["Networks"]["bridge"][name])

    def resolv_conf(self, keyword: str) -> list[str]:
        """The words after a keyword in the container's resolv.conf."""
        lines = map(str.split, self.inside("cat /etc/resolv.conf").splitlines())
        return [word for line in lines if line[:1] == [keyword] for word in line[1:]]

    def published(self) -> set[str]:
        """The host's addresses of a port whose create names none."""
        made = self.docker("run", "-d", "-p", "80", "busybox", "sleep", "1000")
        return {line.rpartition(":")[0] for line in self.docker("port", made, "80/tcp").splitlines()}

    def inside(self, script: str) -> str:
        """The output of a shell script in the container."""
        return self.docker("exec", self.container, "sh", "-c", script)

    def runs_with(self, runtime: str) -> str:
        """`run` if a container runs with that runtime."""
        return self.docker("run", "--rm", "--runtime", runtime, "busybox", "echo", "run")

    def text(self, name: str) -> str:
        """The text of a file below the engine's directory."""
        return (self.base / name).read_text()

    def lines(self) -> list[str]:
        """The daemon's log, of which there is some."""
        found = self.log().splitlines()
        assert found
        return found

    def of_process(self, name: str) -> list[str]:
        """The lines of a file in /proc of the container's process."""
        return Path(f"/proc/{self.inspect['State']['Pid']}/{name}").read_text().splitlines()

    def shares(self, namespace: str) -> bool:
        """True if the container has the host's namespace of that kind."""
        ours, its = (os.readlink(f"/proc/{pid}/ns/{namespace}") for pid in ("self", self.inspect["State"]["Pid"]))
        return ours == its

    def at(self, path: str) -> Any:
        """The value at a path such as `info.Labels` or `inspect.HostConfig.ShmSize`, as `shown`."""
        name, *names = path.split(".")
        found = getattr(self, name)
        for name in names:
            found = found.get(name)
        return self.shown(found)

    def shown(self, value: Any) -> Any:
        """A value with BASE for the engine's directory. Lists, whose order dockerd does not keep,
        are sorted.
        """
        if isinstance(value, list | set):
            value = sorted(value, key=lambda item: json.dumps(item, sort_keys=True))
        return json.loads(json.dumps(value).replace(str(self.base), BASE))


class Row(NamedTuple):
    """One key of daemon.json."""

    key: str
    valid: Any
    """A value in force, other than the default."""
    effect: Callable[[Seen], Any]
    """What shows that it is in force …"""
    expected: Any
    """… and its value then, or how it is found."""
    invalid: Any = None
    """A value that is refused; None if every value of the type is valid."""
    refusal: str = ""
    """How the reason begins."""
    compared: tuple[str, ...] = ()
    """Paths (`Seen.at`) that are equal with dockerd."""


ROWS = (
    Row(
        "debug",
        True,
        lambda seen: seen.info["Debug"],
        True,
        invalid=1,
        refusal="expected true or false",
        compared=("info.Debug",),
    ),
    Row(
        "experimental",
        True,
        lambda seen: seen.info["ExperimentalBuild"],
        True,
        invalid="yes",
        refusal="expected boolean, got string",
        compared=("info.ExperimentalBuild",),
    ),
    Row(
        "labels",
        ["zone=a"],
        lambda seen: seen.info["Labels"],
        ["zone=a"],
        invalid=["zone"],
        refusal="'zone': must be KEY=VALUE",
        compared=("info.Labels",),
    ),
    Row(
        "insecure-registries",
        ["registry.example:5000"],
        lambda seen: seen.info["RegistryConfig"]["IndexConfigs"]["registry.example:5000"]["Secure"],
        False,
        invalid=["a b"],
        refusal="'a b': must be HOST",
        compared=("info.RegistryConfig.InsecureRegistryCIDRs",),
    ),
    Row(
        "node-generic-resources",
        ["SSD=3"],
        lambda seen: seen.info["GenericResources"],
        [{"DiscreteResourceSpec": {"Kind": "SSD", "Value": 3}}],
        invalid=["SSD"],
        refusal="'SSD': must be KIND=NUMBER or KIND=NAME",
        compared=("info.GenericResources",),
    ),
    Row(
        "log-opts",
        {"max-size": "1m"},
        lambda seen: seen.inspect["HostConfig"]["LogConfig"],
        {"Type": "json-file", "Config": {"max-size": "1m"}},
        invalid={"max-size": 1},
        refusal="max-size: expected a string",
        compared=("inspect.HostConfig.LogConfig",),
    ),
    Row(
        "runtimes",
        {
            "one": {"path": f"{BASE}/runtime", "runtimeArgs": ["--one"]},
            "two": {
                "runtimeType": "io.containerd.runc.v2",
                "options": {"BinaryName": f"{BASE}/runtime", "NoPivotRoot": True},
            },
        },
        lambda seen: [
            (seen.runs_with("one"), "--one --root" in seen.text("runtime-arguments")),
            (seen.runs_with("two"), "--no-pivot" in seen.text("runtime-arguments")),
        ],
        [("run", True), ("run", True)],
        invalid={"one": {"runtimeType": "io.containerd.kata.v2"}},
        refusal="one: runtimeType io.containerd.kata.v2: only OCI runtimes can be run",
        compared=("info.Runtimes.one.path", "info.Runtimes.one.runtimeArgs"),
    ),
    Row(
        "init",
        True,
        lambda seen: seen.of_process("cmdline")[0].split("\0")[0],
        "/sbin/docker-init",
        invalid=1,
        refusal="expected boolean, got integer",
        compared=("inspect.HostConfig.Init", "inspect.Path"),
    ),
    Row(
        "init-path",
        INIT,
        lambda seen: seen.info["InitBinary"],
        INIT,
        invalid="tini",
        refusal="tini: must be an absolute path",
        compared=("info.InitBinary",),
    ),
    Row(
        "cdi-spec-dirs",
        [f"{BASE}/cdi"],
        lambda seen: seen.docker(
            "run", "--rm", "--device", "example.com/device=one", "busybox", "sh", "-c", "echo $CDI"
        ),
        "given",
        invalid=["cdi"],
        refusal="cdi: must be an absolute path",
        compared=("info.CDISpecDirs",),
    ),
    Row(
        "exec-opts",
        ["native.cgroupdriver=cgroupfs"],
        lambda seen: seen.info["CgroupDriver"],
        "cgroupfs",
        invalid=["native.cgroupdriver=other"],
        refusal="'native.cgroupdriver=other': must be native.cgroupdriver=cgroupfs or native.cgroupdriver=systemd",
        compared=("info.CgroupDriver", "info.CgroupVersion"),
    ),
    Row(
        "log-driver",
        "json-file",
        lambda seen: seen.info["LoggingDriver"],
        "json-file",
        invalid=1,
        refusal="expected string, got integer",
        compared=("info.LoggingDriver",),
    ),
    Row(
        "group",
        "nogroup",
        lambda seen: (os.stat(seen.socket).st_gid, oct(os.stat(seen.socket).st_mode)),
        (grp.getgrnam("nogroup").gr_gid, "0o140660"),
        invalid=1,
        refusal="expected string, got integer",
    ),
    Row(
        "pidfile",
        f"{BASE}/daemon/pid",
        lambda seen: f"{BASE}/daemon.json" in seen.shown(Path(f"/proc/{seen.text('daemon/pid')}/cmdline").read_text()),
        True,
        invalid="pid",
        refusal="pid: must be an absolute path",
    ),
    Row(
        "log-format",
        "json",
        lambda seen: [key for key in ("level", "msg", "time") if all(key in json.loads(line) for line in seen.lines())],
        ["level", "msg", "time"],
        invalid="xml",
        refusal="'xml': must be one of text, json",
    ),
    Row(
        "shutdown-timeout",
        7,
        lambda seen: json.loads(seen.text("run/config.json"))["shutdown_timeout"],
        7,
        invalid=-1,
        refusal="-1: must be at least 0",
    ),
    Row(
        "swarm-default-advertise-addr",
        "missing0",
        lambda seen: "missing0" in seen.ask("POST", "/swarm/init", {"ListenAddr": "127.0.0.1:2377"}, (400,))["message"],
        True,
        invalid="0.0.0.0",
        refusal="'0.0.0.0': must be an IP address or a network interface",
    ),
    Row(
        "cgroup-parent",
        PARENT,
        lambda seen: {line.split(":")[2].rpartition(PARENT)[2] for line in seen.of_process("cgroup")},
        lambda seen: {f"/{seen.container}"},
        invalid="../../other",
        refusal="'../../other': must not contain ..",
        compared=("inspect.HostConfig.CgroupParent",),
    ),
    Row(
        "default-cgroupns-mode",
        "host" if V2 else "private",
        lambda seen: seen.shares("cgroup"),
        V2,
        invalid="mine",
        refusal="'mine': must be one of host, private",
        compared=("inspect.HostConfig.CgroupnsMode", "info.SecurityOptions"),
    ),
    Row(
        "default-ipc-mode",
        "shareable",
        lambda seen: seen.docker("run", "--rm", f"--ipc=container:{seen.container}", "busybox", "echo", "joined"),
        "joined",
        invalid="host",
        refusal="'host': must be one of private, shareable",
        compared=("inspect.HostConfig.IpcMode",),
    ),
    Row(
        "default-shm-size",
        "32m",
        lambda seen: seen.inside("df -k /dev/shm | tail -1").split()[1],
        "32768",
        invalid="much",
        refusal="'much': must be a size such as 64m",
        compared=("inspect.HostConfig.ShmSize",),
    ),
    Row(
        "default-ulimits",
        {"nofile": {"Name": "nofile", "Soft": 1000, "Hard": 2000}, "core": {"Name": "core", "Soft": 0, "Hard": 0}},
        lambda seen: seen.inside("ulimit -Sn; ulimit -Hn; ulimit -c").split(),
        ["1000", "2000", "0"],
        invalid={"nofile": {"Name": "nofile", "Soft": 3, "Hard": 2}},
        refusal="'nofile=3:2': the soft limit must not be above the hard limit",
        compared=("inspect.HostConfig.Ulimits",),
    ),
    Row(
        "no-new-privileges",
        True,
        lambda seen: seen.inside("grep NoNewPrivs /proc/1/status /proc/self/status | cut -f2").split(),
        ["1", "1"],
        invalid="yes",
        refusal="expected boolean, got string",
        compared=("inspect.HostConfig.SecurityOpt",),
    ),
    Row(
        "seccomp-profile",
        f"{BASE}/profile.json",
        lambda seen: (seen.inside("mkdir /made"), PROFILE_WARNING in seen.info["Warnings"]),
        ("mkdir: can't create directory '/made': Too many levels of symbolic links", True),
        invalid="/nowhere/profile.json",
        refusal="/nowhere/profile.json: no such file or directory",
        compared=("info.SecurityOptions",),
    ),
    Row(
        "bip",
        "192.168.211.5/24",
        lambda seen: seen.network["IPAM"]["Config"][0]["Gateway"],
        "192.168.211.5",
        invalid="192.168.211.5/31",
        refusal="192.168.211.5/31: has no room",
        compared=("network.IPAM.Config",),
    ),
    Row(
        "fixed-cidr",
        "192.168.211.128/25",
        lambda seen: ip_address(seen.endpoint("IPAddress")) in ip_network("192.168.211.128/25"),
        True,
        invalid="192.168.211",
        refusal="'192.168.211': must be an IPv4 subnet",
    ),
    Row(
        "default-gateway",
        "192.168.211.99",
        lambda seen: seen.inside("ip route | grep default").split()[2],
        "192.168.211.99",
        invalid="fd99::1",
        refusal="'fd99::1': must be an IPv4 address",
    ),
    Row(
        "ipv6",
        True,
        lambda seen: seen.network["EnableIPv6"],
        True,
        invalid="yes",
        refusal="expected boolean, got string",
        compared=("network.EnableIPv6",),
    ),
    Row(
        "bip6",
        "fd99:211::5/64",
        lambda seen: seen.network["IPAM"]["Config"][1]["Gateway"],
        "fd99:211::5",
        invalid="192.168.211.5/24",
        refusal="192.168.211.5/24: is not an IPv6 subnet",
    ),
    Row(
        "fixed-cidr-v6",
        "fd99:211:0:0:a::/80",
        lambda seen: ip_address(seen.endpoint("GlobalIPv6Address")) in ip_network("fd99:211:0:0:a::/80"),
        True,
        invalid="fd99:211::/127",
        refusal="'fd99:211::/127': must be an IPv6 subnet with room",
    ),
    Row(
        "default-gateway-v6",
        "fd99:211::9",
        lambda seen: seen.inside("ip -6 route | grep default").split()[2],
        "fd99:211::9",
        invalid="192.168.211.9",
        refusal="'192.168.211.9': must be an IPv6 address",
    ),
    Row(
        "mtu",
        1400,
        lambda seen: (seen.inside("cat /sys/class/net/eth0/mtu"), seen.option("driver.mtu")),
        ("1400", "1400"),
        invalid=60,
        refusal="60: must be from 68 to 65535",
    ),
    Row("icc", False, lambda seen: seen.option("bridge.enable_icc"), "false", 1, "expected boolean, got integer"),
    Row(
        "ip-masq",
        False,
        lambda seen: seen.option("bridge.enable_ip_masquerade"),
        "false",
        1,
        "expected boolean, got integer",
    ),
    Row("ip", "127.0.0.1", Seen.published, {"127.0.0.1"}, "localhost", "'localhost': must be an IP address"),
    Row(
        "default-network-opts",
        {"bridge": {"com.docker.network.driver.mtu": "1300"}},
        lambda seen: (len(seen.docker("network", "create", "of-options")), seen.option("driver.mtu", "of-options")),
        (64, "1300"),
        invalid={"bridge": {"com.docker.network.driver.mtu": "small"}},
        refusal="bridge=com.docker.network.driver.mtu=small: mtu 'small' is not a number",
    ),
    Row(
        "dns",
        ["192.0.2.1"],
        lambda seen: seen.resolv_conf("nameserver"),
        ["192.0.2.1"],
        invalid=["one"],
        refusal="'one': must be an IP address",
    ),
    Row(
        "dns-opts",
        ["ndots:3"],
        lambda seen: seen.resolv_conf("options"),
        ["ndots:3"],
        invalid=["n dots"],
        refusal="'n dots': must be one word",
    ),
    Row(
        "dns-search",
        ["a.example"],
        lambda seen: seen.resolv_conf("search"),
        ["a.example"],
        invalid=["a b"],
        refusal="'a b': must be a domain name",
    ),
    Row(
        "host-gateway-ips",
        ["192.0.2.5", "fd98::5"],
        lambda seen: seen.docker(
            *("run", "--rm", "--add-host", "x:host-gateway", "busybox", "grep", "\tx$", "/etc/hosts")
        ).split(),
        ["192.0.2.5", "x", "fd98::5", "x"],
        invalid=["192.0.2.5", "192.0.2.6"],
        refusal="192.0.2.6: only one IPv4 address",
    ),
)


def daemon_json(base: Path) -> Path:
    """Write FILES and a daemon.json with the valid value of every row."""
    for name, text in FILES.items():
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text(text.replace(BASE, str(base)))
        (base / name).chmod(0o755)
    file = base / "daemon.json"
    file.write_text(json.dumps({row.key: row.valid for row in ROWS}).replace(BASE, str(base)))
    return file


@pytest.fixture(scope="module")
def seen() -> Iterator[Seen]:
    """An engine with all keys of the table. It leaves nothing behind."""
    engine = TempEngine()
    engine.arguments = ("--config", str(daemon_json(engine.base)))
    with engine:
        engine.load_busybox()
        yield Seen(engine.socket, engine.base, engine.log)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.key)
def test_a_key_is_in_force(seen: Seen, row: Row) -> None:
    expected = row.expected(seen) if callable(row.expected) else row.expected
    assert seen.shown(row.effect(seen)) == seen.shown(expected)


def test_a_build_has_the_defaults(seen: Seen, tmp_path: Path) -> None:
    """POST /build, as in dockerd. BuildKit's builds have the parent of the cgroups alone."""
    script = "grep NoNewPrivs /proc/self/status; ulimit -n; df -k /dev/shm | tail -1; mkdir /made"
    (tmp_path / "Dockerfile").write_text(f"FROM busybox\nRUN {script}; true\n")
    said = seen.docker("build", "--no-cache", str(tmp_path), DOCKER_BUILDKIT="0")
    for words in ("NoNewPrivs:\t1", "\n1000\n", " 32768 ", "Too many levels of symbolic links"):
        assert words in said, said


def test_an_invalid_value_is_refused_by_key(tmp_path: Path) -> None:
    """By `engined check`, which names every one, and by `engined serve`, which names the first."""
    rows = [row for row in ROWS if row.refusal]
    file = tmp_path / "daemon.json"
    file.write_text(json.dumps({row.key: row.invalid for row in rows}))
    check, serve = (
        subprocess.run(
            [sys.executable, "-m", "engine", *command, "--config", str(file)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        for command in (["check"], ["serve", "--run", str(tmp_path / "run"), "--root", str(tmp_path / "root")])
    )
    said = dict(line.split(": ", 1) for line in check.stdout.splitlines())
    wrong = [
        (row.key, row.refusal, text)
        for row in rows
        if not (text := said[row.key]).startswith(f"refused ({row.refusal}")
    ]
    assert not wrong
    assert check.returncode == serve.returncode == 1
    assert serve.stderr.startswith(f"engined: --config {file}: ") and serve.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == ["daemon.json"]


@pytest.mark.nightly
def test_dockerd_shows_the_same(seen: Seen) -> None:
    peer = _Peer()
    try:
        peer.start()
        dockers = Seen(peer.socket, peer.base, (peer.base / "log").read_text)
        loaded = ["docker", "-H", f"unix://{peer.socket}", "load"]
        subprocess.run(loaded, input=busybox_archive(), stdout=subprocess.DEVNULL, check=True)
        paths = [path for row in ROWS for path in row.compared]
        assert {path: seen.at(path) for path in paths} == {path: dockers.at(path) for path in paths}
    finally:
        peer.close()


class _Peer(Dockerd):
    """dockerd with the daemon.json of the table."""

    def command(self) -> list[str]:
        base = self.base
        return [
            *(self.program, "--host", f"unix://{self.socket}", "--config-file", f"{base}/daemon.json"),
            *("--data-root", f"{base}/root", "--exec-root", f"{base}/run", "--storage-driver", "overlay2"),
        ]

    def start(self) -> None:
        daemon_json(self.base)
        super(HostDockerd, self).start()
