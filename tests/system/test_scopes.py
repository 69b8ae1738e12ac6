"""The systemd cgroup driver on a host whose process 1 is systemd: units, limits that outlast a
reload of systemd, and what happens when the driver changes or the daemon dies."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.runtime import scopes
from engine.runtime.cgroups import Cgroups
from tests.support.engine.harness import TempEngine, until

pytestmark = pytest.mark.skipif(not scopes.BOOTED.is_dir(), reason="systemd is not process 1")

HIERARCHIES = Cgroups.detect()
SYSTEMD = ("--exec-opt", "native.cgroupdriver=systemd")
CGROUPFS = ("--exec-opt", "native.cgroupdriver=cgroupfs")


@pytest.fixture(scope="module", params=["crun", "runc"])
def systemd(request: pytest.FixtureRequest) -> Iterator[TempEngine]:
    with TempEngine(*SYSTEMD, "--runtime", request.param) as engine:
        engine.load_busybox()
        yield engine


def show(container: str, *names: str) -> dict[str, str]:
    """Properties of a container's unit."""
    argv = ["systemctl", "show", scopes.scope(container), "--property", ",".join(names)]
    text = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    return dict(line.split("=", 1) for line in text.splitlines())


def cgroup(engine: TempEngine, container: str) -> str:
    """That of a container's first process."""
    pid = engine.inspect(container)["State"]["Pid"]
    return Path(f"/proc/{pid}/cgroup").read_text().splitlines()[-1].split(":", 2)[2]


def limit(engine: TempEngine, container: str, controller: str, file: str) -> str:
    """The content of a file of its cgroup, by the name that v2 has."""
    v1 = {"memory.max": "memory.limit_in_bytes"}
    directory = HIERARCHIES.directory(controller, cgroup(engine, container))
    assert directory is not None
    return (directory / (v1.get(file, file) if HIERARCHIES.controllers else file)).read_text().strip()


def update(engine: TempEngine, container: str, **limits: Any) -> None:
    answer = engine.request("POST", f"/v1.44/containers/{container}/update", limits)
    assert answer.status == 200, answer


def gone(container: str) -> bool:
    return show(container, "LoadState", "ActiveState") == {"LoadState": "not-found", "ActiveState": "inactive"}


def reload_systemd() -> None:
    subprocess.run(["systemctl", "daemon-reload"], check=True)


def test_info_names_the_driver(systemd: TempEngine) -> None:
    assert systemd.request("GET", "/v1.44/info").json()["CgroupDriver"] == "systemd"


def test_the_default_is_systemd_with_cgroup_v2_alone() -> None:
    with TempEngine() as engine:
        wanted = "systemd" if HIERARCHIES.mode == "v2" else "cgroupfs"
        assert engine.request("GET", "/v1.44/info").json()["CgroupDriver"] == wanted


def test_a_container_is_a_scope_while_it_runs(systemd: TempEngine) -> None:
    container = systemd.started("sleep", "600")
    assert show(container, "ActiveState", "Slice", "Delegate") == {
        "ActiveState": "active",
        "Slice": "system.slice",
        "Delegate": "yes",
    }
    assert cgroup(systemd, container) == f"/system.slice/docker-{container}.scope"
    systemd.docker("exec", container, "true")
    systemd.docker("pause", container)
    systemd.docker("unpause", container)
    assert "sleep 600" in systemd.docker("top", container).out
    memory = systemd.request("GET", f"/v1.44/containers/{container}/stats?stream=false").json()["memory_stats"]
    assert memory["usage"] > 0
    systemd.docker("kill", container)
    until("the scope is gone", lambda: gone(container))
    systemd.docker("start", container)
    assert show(container, "ActiveState") == {"ActiveState": "active"}
    systemd.docker("rm", "-f", container)
    until("the scope is gone", lambda: gone(container))


def test_limits_outlast_a_reload_of_systemd(systemd: TempEngine) -> None:
    host = {"Memory": 64 << 20, "PidsLimit": 50, "NanoCpus": 500_000_000, "CpuShares": 512}
    container = systemd.started("sleep", "600", host=host)

    def limits() -> tuple[str, str]:
        return limit(systemd, container, "memory", "memory.max"), limit(systemd, container, "pids", "pids.max")

    assert limits() == (str(64 << 20), "50")
    reload_systemd()
    assert limits() == (str(64 << 20), "50")
    update(systemd, container, Memory=96 << 20, MemorySwap=96 << 20, PidsLimit=70)
    assert limits() == (str(96 << 20), "70")
    reload_systemd()
    assert limits() == (str(96 << 20), "70")


def test_a_container_without_limits_gets_none(systemd: TempEngine) -> None:
    container = systemd.started("sleep", "600")
    for _ in range(2):
        assert limit(systemd, container, "memory", "memory.max") in ("max", "9223372036854771712")
        assert limit(systemd, container, "pids", "pids.max") == "max"
        reload_systemd()


LAST = max(os.sched_getaffinity(0))
"""Number of a processor."""
DISK = f"/dev/{next((name for name in ('vda', 'ubda') if os.path.exists(f'/dev/{name}')), 'sda')}"
"""Of the virtual machine: in QEMU, or in User-Mode Linux."""
LIMITS = {
    **{"Memory": 64 << 20, "MemorySwap": 80 << 20, "MemoryReservation": 32 << 20, "PidsLimit": 50},
    **{"CpuPeriod": 50_000, "CpuQuota": 12_345, "CpuShares": 512, "CpusetCpus": str(LAST), "CpusetMems": "0"},
    "BlkioWeight": 300,
}
DEVICES = {
    "BlkioDeviceReadBps": [{"Path": DISK, "Rate": 1 << 20}],
    "BlkioDeviceWriteIOps": [{"Path": DISK, "Rate": 77}],
}
PROPERTIES = {
    **{"MemoryMax": str(64 << 20), "MemorySwapMax": str(16 << 20), "MemoryLow": str(32 << 20), "TasksMax": "50"},
    **{"CPUQuotaPerSecUSec": "250ms", "CPUQuotaPeriodUSec": "50ms", "CPUWeight": "20", "AllowedCPUs": str(LAST)},
    **{"AllowedMemoryNodes": "0", "IOWeight": "2930", "IOReadIOPSMax": "", "IOWriteBandwidthMax": ""},
}
RATES = {"IOReadBandwidthMax": 1 << 20, "IOWriteIOPSMax": 77}


def check_properties(container: str) -> None:
    found = show(container, *PROPERTIES, *RATES)
    rates = {name: int(found.pop(name).split()[-1]) for name in RATES}
    assert {name: found.get(name, "") for name in PROPERTIES} == PROPERTIES
    assert rates == RATES


def test_all_limits_are_properties_after_a_start(systemd: TempEngine) -> None:
    check_properties(systemd.started("sleep", "600", host=LIMITS | DEVICES))


def test_all_limits_are_properties_after_an_update(systemd: TempEngine) -> None:
    container = systemd.started("sleep", "600", host=DEVICES)
    update(systemd, container, **LIMITS)
    check_properties(container)
    subprocess.run(["systemctl", "daemon-reexec"], check=True)
    check_properties(container)


def test_updates_while_systemd_is_executed_again(systemd: TempEngine) -> None:
    container = systemd.started("sleep", "600")
    for number in range(40, 44):
        with subprocess.Popen(["systemctl", "daemon-reexec"]) as command:
            while command.poll() is None:
                update(systemd, container, PidsLimit=number)
        assert command.returncode == 0
        assert show(container, "TasksMax") == {"TasksMax": str(number)}


def test_starts_while_systemd_is_executed_again(systemd: TempEngine) -> None:
    container = systemd.started("sleep", "600", host={"PidsLimit": 50})
    for _ in range(4):
        with subprocess.Popen(["systemctl", "daemon-reexec"]) as command:
            while command.poll() is None:
                answer = systemd.request("POST", f"/v1.44/containers/{container}/restart?t=0")
                assert answer.status == 204, answer
        assert command.returncode == 0
        assert show(container, "ActiveState", "TasksMax") == {"ActiveState": "active", "TasksMax": "50"}
    systemd.docker("rm", "-f", container)
    until("the scope is gone", lambda: gone(container))


def test_starts_after_the_bus_was_restarted(systemd: TempEngine) -> None:
    container = systemd.started("sleep", "600")
    for _ in range(3):
        subprocess.run(["systemctl", "kill", "--signal", "KILL", "dbus.service"], check=True)
        answer = systemd.request("POST", f"/v1.44/containers/{container}/restart?t=0")
        assert answer.status == 204, answer
        assert show(container, "ActiveState") == {"ActiveState": "active"}


def test_updates_after_the_bus_was_restarted(systemd: TempEngine) -> None:
    container = systemd.started("sleep", "600")
    for number in (50, 51):
        update(systemd, container, PidsLimit=number)
        subprocess.run(["systemctl", "kill", "--signal", "KILL", "dbus.service"], check=True)
        update(systemd, container, PidsLimit=number + 10)
        assert show(container, "TasksMax") == {"TasksMax": str(number + 10)}


@pytest.mark.skipif(HIERARCHIES.mode != "v2", reason="v1 has other files")
def test_all_limits_outlast_a_reload_of_systemd(systemd: TempEngine) -> None:
    container = systemd.started("sleep", "600", host=LIMITS | DEVICES)
    files = "memory.max memory.swap.max memory.low pids.max cpu.max cpu.weight cpuset.cpus cpuset.mems io.max"

    def limits() -> dict[str, str]:
        return {file: limit(systemd, container, file.partition(".")[0], file) for file in files.split()}

    before = limits()
    quota, period = before.pop("cpu.max").split()
    assert int(quota) in (12_345, 12_500) and period == "50000", "systemd knows whole percents"
    assert before.pop("cpu.weight") in ("20", "59"), "by the conversion of the runtime"
    assert (before["memory.max"], before["memory.swap.max"]) == (str(64 << 20), str(16 << 20))
    assert (before["memory.low"], before["pids.max"], before["cpuset.cpus"]) == (str(32 << 20), "50", str(LAST))
    assert "rbps=1048576" in before["io.max"] and "wiops=77" in before["io.max"]
    reload_systemd()
    after = limits()
    assert after.pop("cpu.max") == "12500 50000"
    assert after.pop("cpu.weight") == "20"
    assert after == before


def test_limits_that_are_lifted_do_not_come_back(systemd: TempEngine) -> None:
    container = systemd.started("sleep", "600", host={"PidsLimit": 50, "CpuQuota": 50_000})
    update(systemd, container, PidsLimit=-1, CpuQuota=-1)
    for _ in range(2):
        assert limit(systemd, container, "pids", "pids.max") == "max"
        if HIERARCHIES.mode == "v2":
            assert limit(systemd, container, "cpu", "cpu.max").split()[0] == "max"
        reload_systemd()


def test_an_out_of_memory_kill_is_reported(systemd: TempEngine) -> None:
    container = systemd.started("sh", "-c", "tail /dev/zero", host={"Memory": 16 << 20, "MemorySwap": 16 << 20})
    assert systemd.wait(container) != 0
    assert systemd.inspect(container)["State"]["OOMKilled"] is True
    until("the scope is gone", lambda: gone(container))


def test_a_process_that_is_killed_for_memory_leaves_the_others(systemd: TempEngine) -> None:
    command = "tail /dev/zero; echo $? >&2; sleep 600"
    container = systemd.started("sh", "-c", command, host={"Memory": 16 << 20, "MemorySwap": 16 << 20})
    until("it goes on", lambda: b"137" in systemd.logs(container))
    assert systemd.inspect(container)["State"]["Running"] is True


def test_a_restart_while_systemd_is_busy(systemd: TempEngine) -> None:
    """systemd notices late that the scope's processes have ended. The scope is gone nevertheless
    before the next start asks for it.
    """
    container = systemd.started("sleep", "600")
    busy = subprocess.Popen(["sh", "-c", "while :; do systemctl daemon-reload; done"])
    try:
        for _ in range(3):
            systemd.docker("restart", "-t", "0", container)
        systemd.docker("rm", "-f", container)
        until("the scope is gone", lambda: gone(container))
    finally:
        busy.kill()
        busy.wait()


def test_parents_are_slices(systemd: TempEngine) -> None:
    container = systemd.started("sleep", "600", host={"CgroupParent": "engined-test.slice"})
    assert cgroup(systemd, container) == f"/engined.slice/engined-test.slice/docker-{container}.scope"
    systemd.docker("rm", "-f", container)
    body = {"Image": "busybox", "HostConfig": {"CgroupParent": "/engined/test"}}
    answer = systemd.request("POST", "/v1.44/containers/create", body)
    assert answer.status == 400
    assert answer.json()["message"] == (
        "CgroupParent: '/engined/test': cgroup-parent for systemd cgroup should be a valid slice named as \"xxx.slice\""
    )


def test_a_build_runs_in_scopes(systemd: TempEngine, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM busybox\nRUN sleep 600\n")
    build = subprocess.Popen(
        ["docker", "build", "--cgroup-parent", "enginedbuild.slice", str(tmp_path)],
        env={**systemd.environment, "DOCKER_BUILDKIT": "0"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def scopes_of_build() -> frozenset[str]:
        return HIERARCHIES.children("/enginedbuild.slice")

    try:
        until("RUN is in the slice", scopes_of_build)
    finally:
        build.kill()
        build.wait()
    until("its scope is gone", lambda: not scopes_of_build())


def test_containers_outlast_daemons_and_a_change_of_the_driver() -> None:
    engine = TempEngine(*SYSTEMD)
    with engine:
        engine.load_busybox()
        in_scope = engine.started("sleep", "600")
        engine.kill9()
        engine.arguments = CGROUPFS
        engine.start()
        in_group = engine.started("sleep", "600")
        assert cgroup(engine, in_scope).endswith(f"/docker-{in_scope}.scope")
        assert cgroup(engine, in_group) == f"/engined/{in_group}"
        update(engine, in_scope, PidsLimit=33)
        assert show(in_scope, "TasksMax") == {"TasksMax": "33"}
        engine.kill9()
        engine.arguments = SYSTEMD
        engine.start()
        engine.docker("restart", "-t", "0", in_scope, in_group)
        for container in (in_scope, in_group):
            assert cgroup(engine, container) == f"/system.slice/docker-{container}.scope"
        engine.kill9()
        engine.kill_monitor()
        engine.start()
        engine.docker("rm", "-f", in_scope, in_group)
        for container in (in_scope, in_group):
            until("the scope is gone", lambda container=container: gone(container))
