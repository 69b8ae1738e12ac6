"""Limits: what a host without a feature makes of them, in Docker's words."""

from __future__ import annotations

from typing import Any

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
            {"memory_swappiness": -1},
            f"Your kernel does not support memory swappiness capabilities {CGROUP} Memory swappiness discarded.",
        ),
        (
            {"memory_reservation": 1 << 30},
            {"memory_reservation": 0},
            f"Your kernel does not support memory soft limit capabilities {CGROUP} Limitation discarded.",
        ),
        (
            {"kernel_memory": 1 << 30},
            {"kernel_memory": 0},
            f"Your kernel does not support kernel memory limit capabilities {CGROUP} Limitation discarded.",
        ),
        (
            {"oom_kill_disable": True},
            {"oom_kill_disable": False},
            "Your kernel does not support OomKillDisable. OomKillDisable discarded.",
        ),
        (
            {"pids_limit": 5},
            {"pids_limit": 0},
            f"Your kernel does not support pids limit capabilities {CGROUP} PIDs limit discarded.",
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
            {"blkio_weight": 0},
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
    kept, none = limits.adapted(HostConfig(**given), EVERYTHING)
    assert [each for each in none if "OOM killer" not in each] == []
    assert {name: getattr(kept, name) for name in given} == given


def test_nothing_given_nothing_said() -> None:
    assert limits.adapted(HostConfig(), NOTHING) == (HostConfig(), [])


def test_swap() -> None:
    host, warnings = limits.adapted(HostConfig(memory=1 << 30), EVERYTHING)
    assert (host.memory_swap, warnings) == (2 << 30, [])
    without = Support(swap=False)
    host, warnings = limits.adapted(HostConfig(memory=1 << 30, memory_swap=2 << 30), without)
    assert host.memory_swap == -1
    assert warnings == [f"Your kernel does not support swap limit capabilities {CGROUP} Memory limited without swap."]
    assert limits.adapted(HostConfig(memory=1 << 30, memory_swap=-1), without)[1] == []


@pytest.mark.parametrize("text", ["0", "0-3", "0,6", "1-2,6,1"])
def test_cpus_that_are_there(text: str) -> None:
    limits.adapted(HostConfig(cpuset_cpus=text), EVERYTHING)


@pytest.mark.parametrize("text", ["4", "3-6", "7", "0-8191"])
def test_cpus_that_are_not(text: str) -> None:
    with pytest.raises(
        InvalidParameter, match=f"Requested CPUs are not available - requested {text}, available: 0-3,6"
    ):
        limits.adapted(HostConfig(cpuset_cpus=text), EVERYTHING)


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
