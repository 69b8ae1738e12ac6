"""Limits, devices, namespaces and runtimes as the docker CLIs of four ages ask for them: what the
container gets, what `docker inspect` shows, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.clients.conftest import Docker
from tests.support.engine import cgroups
from tests.support.engine.cgroups import NONE, Group

QUIET = ("--network", "none")


def host_config(docker: Docker, name: str) -> dict[str, Any]:
    found = json.loads(docker("inspect", "--format", "{{json .HostConfig}}", name).out)
    assert isinstance(found, dict)
    return found


def group(docker: Docker, name: str) -> Group:
    return Group(docker.engine.inspect(name)["State"]["Pid"])


def test_many_limits_at_once(docker: Docker) -> None:
    docker(
        *("run", "-d", "--name", "limited", *QUIET, "--cpus", "0.5", "--pids-limit", "50", "--memory", "64m"),
        *("--memory-swap", "128m", "--memory-reservation", "32m", "--cpuset-cpus", "0", "--ulimit", "nofile=100:200"),
        *("--oom-score-adj", "100", "--shm-size", "1m", "busybox", "sleep", "600"),
    )
    found = group(docker, "limited")
    assert (found.quota, found.period, found.pids, found.memory) == (50_000, 100_000, 50, 64 << 20)
    assert (found.swap, found.reservation, found.cpus) == (128 << 20, 32 << 20, "0")
    assert docker.lines("exec", "limited", "sh", "-c", "ulimit -n; ulimit -Hn") == ["100", "200"]
    shown = host_config(docker, "limited")
    assert (shown["NanoCpus"], shown["PidsLimit"], shown["ShmSize"]) == (500_000_000, 50, 1 << 20)
    docker("update", "--cpus", "0.7", "limited")
    docker("update", "--pids-limit", "-1", "limited")
    docker("update", "--memory", "96m", "--memory-swap", "-1", "limited")
    assert (group(docker, "limited").quota, group(docker, "limited").pids) == (70_000, NONE)
    assert group(docker, "limited").memory == 96 << 20
    assert host_config(docker, "limited")["PidsLimit"] is None


def test_no_limits_is_what_a_plain_create_says(docker: Docker) -> None:
    """CLIs send all fields with their zero values, and there is no warning."""
    created = docker("create", "--name", "plain", *QUIET, "busybox", "true")
    assert created.err == ""
    shown = host_config(docker, "plain")
    assert (shown["PidsLimit"], shown["NanoCpus"], shown["MemorySwappiness"]) == (None, 0, None)
    assert (shown["IpcMode"], shown["OomKillDisable"]) == ("private", None if cgroups.V2 else False)
    default = docker("info", "--format", "{{.DefaultRuntime}}").line
    assert (shown["Runtime"], shown["NetworkMode"]) == (default, "none")


def test_namespaces(docker: Docker) -> None:
    docker("run", "-d", "--name", "donor", *QUIET, "--ipc", "shareable", "busybox", "sleep", "600")
    docker("run", "--rm", *QUIET, "--ipc", "container:donor", "busybox", "touch", "/dev/shm/there")
    assert docker.lines("exec", "donor", "ls", "/dev/shm") == ["there"]
    docker("run", "-d", "--name", "private", *QUIET, "busybox", "sleep", "600")
    refused = docker("run", "--rm", *QUIET, "--ipc", "container:private", "busybox", "true", status=125)
    assert "non-shareable IPC (hint: use IpcMode:shareable for the donor container)" in refused.err
    own = docker.lines("run", "--rm", *QUIET, "--cgroupns", "private", "busybox", "cat", "/proc/self/cgroup")
    assert own and all(line.endswith(":/") for line in own)
    open_paths = docker(
        *("run", "--rm", *QUIET, "--security-opt", "systempaths=unconfined", "busybox"),
        *("grep", "-c", " /proc/", "/proc/mounts"),
        status=1,
    )
    assert open_paths.out == "0\n"


def test_devices(docker: Docker) -> None:
    seen = docker.lines("run", "--rm", *QUIET, "--device", "/dev/null:/dev/other:rw", "busybox", "ls", "/dev/other")
    assert seen == ["/dev/other"]
    docker("create", "--name", "ruled", *QUIET, "--device-cgroup-rule", "c 1:3 mr", "busybox")
    assert host_config(docker, "ruled")["DeviceCgroupRules"] == ["c 1:3 mr"]
    refused = docker("run", "--rm", *QUIET, "--gpus", "all", "busybox", "true", status=125)
    assert 'could not select device driver "" with capabilities: [[gpu]]' in refused.err
    if docker.minor >= 44:  # older ones take a device's name for a path
        refused = docker("run", "--rm", *QUIET, "--device", "acme.com/thing=x", "busybox", "true", status=125)
        assert "CDI device injection failed: unresolvable CDI devices acme.com/thing=x" in refused.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--runtime", "nope"), "unknown or invalid runtime name: nope"),
        (("--cap-add", "nope"), 'invalid CapAdd: unknown capability: "CAP_NOPE"'),
        (("--cpus", "4000"), "Range of CPUs is from 0.01 to"),
        (("--platform", "linux/s390x", "--pull", "never"), "does not match the specified platform (linux/s390x)"),
        (("--storage-opt", "size=1g"), "supported only for overlay over xfs"),
        (("--security-opt", "nope=1"), "invalid --security-opt 2"),
    ],
)
def test_what_is_refused(docker: Docker, options: tuple[str, ...], words: str) -> None:
    refused = docker("run", "--rm", *QUIET, *options, "busybox", "true", status=125)
    assert words in refused.err
