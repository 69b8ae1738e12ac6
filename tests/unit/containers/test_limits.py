"""Limits on a host without the feature, with Docker's messages."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine.containers import limits
from engine.errors import InvalidParameter
from engine.runtime import capabilities
from engine.runtime.cgroups import Support
from engine.wire.containers import HostConfig, ThrottleDevice, Ulimit, WeightDevice

EVERYTHING = Support(cpus="0-3,6", mems="0")
NOTHING = Support(
    memory=False,
    swap=False,
    reservation=False,
    kernel_memory=False,
    swappiness=False,
    oom_kill_disable=False,
    shares=False,
    quota=False,
    cpuset=False,
    pids=False,
    weight=False,
    weight_device=False,
    throttle=False,
)
CGROUP = "or the cgroup is not mounted."
NOWHERE = [ThrottleDevice(path="/dev/x", rate=1)]


@pytest.mark.parametrize(
    ("given", "left", "warning"),
    [
        (
            {"memory": 1 << 30, "memory_swap": 2 << 30},
            {"memory": 0, "memory_swap": 0},
            f"Your kernel does not support memory limit capabilities {CGROUP} Limitation discarded.",
        ),
        (
            {"memory_swappiness": 0},
            {"memory_swappiness": None},
            f"Your kernel does not support memory swappiness capabilities {CGROUP} Memory swappiness discarded.",
        ),
        (
            {"memory_reservation": 1 << 30},
            {"memory_reservation": 0},
            f"Your kernel does not support memory soft limit capabilities {CGROUP} Limitation discarded.",
        ),
        (
            {"kernel_memory": 1 << 30},
            {"kernel_memory": 1 << 30},
            f"Your kernel does not support kernel memory limit capabilities {CGROUP} Limitation discarded.",
        ),
        (
            {"oom_kill_disable": True},
            {"oom_kill_disable": None},
            "Your kernel does not support OomKillDisable. OomKillDisable discarded.",
        ),
        (
            {"pids_limit": 5},
            {"pids_limit": None},
            f"Your kernel does not support pids limit capabilities {CGROUP} PIDs limit discarded.",
        ),
        (
            {"kernel_memory_tcp": 5},
            {"kernel_memory_tcp": msgspec.UNSET},
            f"Your kernel does not support kernel memory TCP limit capabilities {CGROUP} Limitation discarded.",
        ),
        (
            {"cpu_shares": 5},
            {"cpu_shares": 0},
            f"Your kernel does not support CPU shares {CGROUP} Shares discarded.",
        ),
        (
            {"cpu_period": 5000},
            {"cpu_period": 0},
            f"Your kernel does not support CPU cfs period {CGROUP} Period discarded.",
        ),
        (
            {"cpu_quota": 5000},
            {"cpu_quota": 0},
            f"Your kernel does not support CPU cfs quota {CGROUP} Quota discarded.",
        ),
        (
            {"cpuset_cpus": "0"},
            {"cpuset_cpus": ""},
            f"Your kernel does not support cpuset {CGROUP} Cpuset discarded.",
        ),
        (
            {"blkio_weight": 50},
            {"blkio_weight": 50},
            f"Your kernel does not support Block I/O weight {CGROUP} Weight discarded.",
        ),
        (
            {"blkio_weight_device": [WeightDevice(path="/dev/x", weight=50)]},
            {"blkio_weight_device": None},
            f"Your kernel does not support Block I/O weight_device {CGROUP} Weight-device discarded.",
        ),
        (
            {"blkio_device_read_bps": NOWHERE},
            {"blkio_device_read_bps": None},
            f"Your kernel does not support BPS Block I/O read limit {CGROUP} Block I/O BPS read limit discarded.",
        ),
        (
            {"blkio_device_write_iops": NOWHERE},
            {"blkio_device_write_iops": None},
            f"Your kernel does not support IOPS Block write limit {CGROUP} Block I/O IOPS write limit discarded.",
        ),
    ],
)
def test_what_the_kernel_lacks_is_discarded(given: dict[str, Any], left: dict[str, Any], warning: str) -> None:
    host, warnings = limits.adapted(HostConfig(**given), NOTHING)
    assert warnings == [warning]
    assert {name: getattr(host, name) for name in left} == left
    if "kernel_memory_tcp" in given:  # no kernel has it under v2, nor a runtime under v1
        return
    kept, none = limits.adapted(HostConfig(**given), EVERYTHING)
    assert [each for each in none if "OOM killer" not in each] == []
    assert {name: getattr(kept, name) for name in given} == given


def test_nothing_given_nothing_said() -> None:
    assert limits.adapted(HostConfig(), NOTHING) == (HostConfig(oom_kill_disable=None), [])
    assert limits.adapted(HostConfig(), EVERYTHING) == (HostConfig(), [])


def test_swap() -> None:
    host, warnings = limits.adapted(HostConfig(memory=1 << 30), EVERYTHING)
    assert (host.memory_swap, warnings) == (2 << 30, [])
    assert limits.adapted(HostConfig(memory=1 << 62), EVERYTHING)[0].memory_swap == (1 << 63) - 1
    without = Support(swap=False)
    host, warnings = limits.adapted(HostConfig(memory=1 << 30, memory_swap=2 << 30), without)
    assert host.memory_swap == -1
    assert warnings == [f"Your kernel does not support swap limit capabilities {CGROUP} Memory limited without swap."]
    assert limits.adapted(HostConfig(memory=1 << 30, memory_swap=-1), without)[1] == []


@pytest.mark.parametrize("text", ["0", "0-3", "0,6", "1-2,6,1"])
def test_cpus_that_are_there(text: str) -> None:
    host, warnings = limits.adapted(HostConfig(cpuset_cpus=text), EVERYTHING)
    assert (host.cpuset_cpus, warnings) == (text, [])


@pytest.mark.parametrize("text", ["4", "3-6", "7", "0-8191"])
def test_cpus_that_are_not(text: str) -> None:
    with pytest.raises(
        InvalidParameter, match=f"Requested CPUs are not available - requested {text}, available: 0-3,6"
    ):
        limits.adapted(HostConfig(cpuset_cpus=text), EVERYTHING)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"cpu_shares": 1}, "The minimum allowed cpu-shares is 2"),
        ({"cpu_shares": 262_145}, "The maximum allowed cpu-shares is 262144"),
        (
            {"cpu_period": 999},
            r"CPU cfs period can not be less than 1ms \(i.e. 1000\) or larger than 1s \(i.e. 1000000\)",
        ),
        (
            {"cpu_quota": (1 << 63) - 1},
            "CpuQuota: 9223372036854775807: this kernel allows at most 17592186044415 microsec",
        ),
        ({"cpu_quota": limits.MAX_QUOTA + 1}, "CpuQuota: 17592186044416: this kernel allows at most 17592186044415"),
        ({"pids_limit": limits.MAX_PIDS + 1}, "PidsLimit: 4194305: this kernel allows at most 4194304"),
        ({"nano_cpus": 1}, "NanoCpus: 1: it must be at least"),
        ({"nano_cpus": -1}, "NanoCpus: -1: it must be at least"),
        ({"nano_cpus": 10**9, "cpu_quota": 1000}, "Nano CPUs and CPU Quota cannot both be set"),
        ({"nano_cpus": 10**9, "cpu_period": 1000}, "Nano CPUs and CPU Period cannot both be set"),
    ],
)
def test_refused_on_any_host(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidParameter, match=words):
        limits.check(HostConfig(**given))


def test_shares_that_the_kernel_takes() -> None:
    for shares in (0, 2, 262_144):
        limits.check(HostConfig(cpu_shares=shares))


def test_no_more_cpus_than_there_are() -> None:
    assert limits.adapted(HostConfig(nano_cpus=5 * 10**9), EVERYTHING)[1] == []
    with pytest.raises(InvalidParameter, match=r"Range of CPUs is from 0.01 to 5.00"):
        limits.adapted(HostConfig(nano_cpus=5 * 10**9 + 1), EVERYTHING)


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (["x" * limits.MAX_STRING], [], "argument 'x+' has 131073 bytes of at most 131072: argument list too long"),
        ([], ["BIG=" + "x" * limits.MAX_STRING], "environment variable 'BIG' has 131077 bytes"),
        (["sh", "a\0b"], [], r"argument 'a\\x00b' must not contain a NUL character"),
        (["sh"], ["A=secret\0"], "environment variable 'A' must not contain a NUL character"),
        (["sh"], [f"V{n}=" + "x" * 100 for n in range(100_000)], "this kernel takes 2097152: argument list too long"),
    ],
)
def test_more_than_execve_takes(arguments: list[str], environment: list[str], words: str) -> None:
    with pytest.raises(InvalidParameter, match=words):
        limits.check_exec(arguments, environment, 8 << 20)


def test_as_much_as_execve_takes() -> None:
    limits.check_exec(["sh", "x" * (limits.MAX_STRING - 1)], [f"V{n}=1" for n in range(10_000)], 8 << 20)
    many = ["x" * 100_000] * 50
    limits.check_exec(many, [], -1)
    with pytest.raises(InvalidParameter, match="argument list too long"):
        limits.check_exec(many, [], 8 << 20)


@pytest.mark.parametrize("text", ["0-2147483647", "99999999999999999999", "-1", "1-", "0x1", "1 2", "٣", "," * 5000])
def test_no_list_of_cpus(text: str) -> None:
    with pytest.raises(InvalidParameter, match="CpusetCpus: Invalid value"):
        limits.check(HostConfig(cpuset_cpus=text))


def test_a_score_below_the_engines_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for own, refused in ((frozenset[str](), True), (frozenset(("CAP_SYS_RESOURCE",)), False)):
        monkeypatch.setattr(capabilities, "bounding", lambda own=own: own)
        if refused:
            with pytest.raises(InvalidParameter, match="OomScoreAdj: -1000 is below"):
                limits.adapted(HostConfig(oom_score_adj=-1000), EVERYTHING)
        else:
            limits.adapted(HostConfig(oom_score_adj=-1000), EVERYTHING)


def test_files_beyond_the_kernels_own_bound() -> None:
    for hard in (1 << 40, -1):
        with pytest.raises(InvalidParameter, match=r"fs\.nr_open"):
            limits.rlimit(Ulimit(name="nofile", soft=1, hard=hard), raisable=True)
    with pytest.raises(InvalidParameter, match="positive"):
        limits.rlimit(Ulimit(name="core", soft=-2, hard=-2), raisable=True)
