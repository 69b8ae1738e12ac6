"""Update of limits and restart policy: checked in the cgroup files, in inspect, after a restart,
and after a refusal."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support.engine import cgroups
from tests.support.engine.cgroups import NONE, Group
from tests.support.engine.harness import TempEngine, until

MB = 1 << 20


def group(engine: TempEngine, identifier: str) -> Group:
    """The container's own cgroup."""
    return Group(engine.inspect(identifier)["State"]["Pid"])


def update(engine: TempEngine, identifier: str, status: int = 200, **body: Any) -> Any:
    answer = engine.request("POST", f"/v1.24/containers/{identifier}/update", body)
    assert answer.status == status, answer
    return answer.json()


def test_a_quota_is_taken_away_and_a_period_stands_alone(engine: TempEngine) -> None:
    """A period without a quota works too, in update and in create. systemd writes its default
    period where there is no quota, so there it is seen with the next quota only.
    """
    systemd = engine.request("GET", "/v1.24/info").json()["CgroupDriver"] == "systemd"
    identifier = engine.started("sleep", "600", host={"CpuQuota": -1})
    for change, quota, period in (
        ({"CpuPeriod": 50_000}, NONE, 50_000),
        ({"CpuQuota": 20_000}, 20_000, 50_000),
        ({"CpuQuota": -1}, NONE, 50_000),
        ({"Memory": 64 * MB}, NONE, 50_000),
        ({"CpuQuota": 30_000, "CpuPeriod": 60_000}, 30_000, 60_000),
        ({"CpuQuota": -1, "CpuPeriod": 100_000}, NONE, 100_000),
    ):
        assert update(engine, identifier, **change) == {"Warnings": []}
        found = group(engine, identifier)
        assert (found.quota, found.period) == (quota, 100_000 if systemd and quota == NONE else period)
    engine.post(f"/containers/{identifier}/restart?t=0")
    assert group(engine, identifier).quota == NONE


def test_memory_up_and_down_while_it_runs(engine: TempEngine) -> None:
    """The kernel requires at all times that the swap limit is not below the memory limit, also
    while both change.
    """
    identifier = engine.started("sleep", "600", host={"Memory": 32 * MB, "MemorySwap": 64 * MB})
    for memory, swap in ((256, 512), (16, 16), (64, 512), (32, 48), (128, -1), (16, 32)):
        assert update(engine, identifier, Memory=memory * MB, MemorySwap=swap * MB if swap > 0 else -1) == {
            "Warnings": []
        }
        found = group(engine, identifier)
        assert (found.memory, found.swap) == (memory * MB, swap * MB if swap > 0 else NONE)
        host = engine.inspect(identifier)["HostConfig"]
        assert (host["Memory"], host["MemorySwap"]) == (memory * MB, swap * MB if swap > 0 else -1)
    update(engine, identifier, Memory=20 * MB)
    found = group(engine, identifier)
    assert (found.memory, found.swap) == (20 * MB, 32 * MB)


def test_weight_and_kernel_memory_stay_in_the_record(engine: TempEngine) -> None:
    """They stay even if the kernel lacks such a limit. The engine itself sets the weight of BFQ
    under cgroup v1.
    """
    identifier = engine.started("sleep", "600", host={"BlkioWeight": 200})
    update(engine, identifier, BlkioWeight=300, KernelMemory=64 * MB)
    host = engine.inspect(identifier)["HostConfig"]
    assert (host["BlkioWeight"], host["KernelMemory"]) == (300, 64 * MB)
    if not cgroups.V2 and list((cgroups.ROOT / "blkio").glob("*/blkio.bfq.weight")):
        assert group(engine, identifier).file("blkio", "blkio.bfq.weight") == "300"


def test_every_limit(engine: TempEngine) -> None:
    identifier = engine.started("sleep", "600")
    update(
        engine,
        identifier,
        CpuShares=512,
        CpuPeriod=50_000,
        CpuQuota=25_000,
        CpusetCpus="0",
        CpusetMems="0",
        Memory=64 * MB,
        MemoryReservation=32 * MB,
    )
    found = group(engine, identifier)
    assert (found.memory, found.swap, found.reservation) == (64 * MB, 128 * MB, 32 * MB)
    assert (found.cpus, found.mems, found.quota, found.period) == ("0", "0", 25_000, 50_000)
    assert found.has_shares(512)
    host = engine.inspect(identifier)["HostConfig"]
    assert (host["CpuShares"], host["CpuPeriod"], host["CpuQuota"]) == (512, 50_000, 25_000)
    assert (host["CpusetCpus"], host["CpusetMems"]) == ("0", "0")
    assert (host["Memory"], host["MemorySwap"], host["MemoryReservation"]) == (64 * MB, 128 * MB, 32 * MB)
    engine.post(f"/containers/{identifier}/restart?t=0")
    assert group(engine, identifier).memory == 64 * MB
    assert group(engine, identifier).cpus == "0"


def test_what_is_not_given_stays(engine: TempEngine) -> None:
    identifier = engine.started("sleep", "600", host={"Memory": 64 * MB, "CpuShares": 256})
    update(engine, identifier, CpuQuota=50_000)
    assert group(engine, identifier).memory == 64 * MB
    assert group(engine, identifier).has_shares(256)
    assert engine.inspect(identifier)["HostConfig"]["CpuShares"] == 256


def test_it_really_limits(engine: TempEngine) -> None:
    identifier = engine.started("sh", "-c", "read x; x=a; while :; do x=$x$x; done", OpenStdin=True)
    update(engine, identifier, Memory=16 * MB, MemorySwap=16 * MB)
    engine.docker("attach", "--no-stdin=false", identifier, input="go\n", status=None)
    assert engine.wait(identifier) == 137
    assert engine.inspect(identifier)["State"]["OOMKilled"] is True


def test_of_what_does_not_run(engine: TempEngine) -> None:
    identifier = engine.create("sleep", "600")
    update(engine, identifier, Memory=48 * MB)
    engine.post(f"/containers/{identifier}/start")
    assert group(engine, identifier).memory == 48 * MB
    engine.post(f"/containers/{identifier}/pause")
    update(engine, identifier, Memory=24 * MB)
    assert group(engine, identifier).memory == 24 * MB


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"Memory": MB}, "Memory"),
        ({"Memory": -5}, "Memory"),
        ({"Memory": 100 * MB}, "memoryswap"),
        ({"MemorySwap": 16 * MB}, "MemorySwap"),
        ({"MemoryReservation": 60 * MB}, "MemoryReservation"),
        ({"BlkioWeight": 5}, "BlkioWeight"),
        ({"CpuPeriod": 5}, "CpuPeriod"),
        ({"CpuQuota": 5}, "CpuQuota"),
        ({"CpuQuota": 2**63 - 1}, "CpuQuota"),
        ({"CpusetCpus": "0-2147483647"}, "Cpuset"),
        ({"CpusetCpus": "4095"}, "CPUs"),
        ({"CpusetMems": "x"}, "Cpuset"),
        ({"RestartPolicy": {"Name": "sometimes"}}, "restart policy"),
        ({"RestartPolicy": {"Name": "always", "MaximumRetryCount": 3}}, "retry count"),
        ({"Memory": "much"}, "Memory"),
    ],
)
def test_refused_and_nothing_changed(engine: TempEngine, body: dict[str, Any], words: str) -> None:
    identifier = engine.started("sleep", "600", host={"Memory": 32 * MB, "MemorySwap": 64 * MB})
    before = engine.inspect(identifier)
    answer = engine.request("POST", f"/v1.24/containers/{identifier}/update", {"CpuShares": 300, **body})
    assert answer.status == 400, answer
    assert words in answer.message
    assert engine.inspect(identifier) == before
    assert group(engine, identifier).memory == 32 * MB


@pytest.mark.skipif(cgroups.V2, reason="v2 reclaims, and kills if it must, instead of refusing")
def test_a_kernel_that_refuses_leaves_all_as_it_was(engine: TempEngine) -> None:
    """The memory in use exceeds the new limit, and there is no swap."""
    identifier = engine.started(
        "sh",
        "-c",
        "dd if=/dev/zero of=/dev/shm/ballast bs=1M count=48; echo ready; sleep 600",
        host={"Memory": 128 * MB, "MemorySwap": 128 * MB},
    )
    until("it is full", lambda: b"ready" in engine.logs(identifier))
    before = engine.inspect(identifier)["HostConfig"]
    answer = engine.request(
        "POST",
        f"/v1.24/containers/{identifier}/update",
        {"CpuShares": 300, "CpuQuota": 50_000, "Memory": 16 * MB, "MemorySwap": 16 * MB},
    )
    assert answer.status == 500, answer
    assert identifier in answer.message
    assert engine.inspect(identifier)["HostConfig"] == before
    assert group(engine, identifier).memory == 128 * MB
    found = group(engine, identifier)
    assert (found.swap, found.quota) == (128 * MB, NONE)
    assert found.has_shares(1024)


def test_restart_policy(engine: TempEngine) -> None:
    identifier = engine.started("sh", "-c", "sleep 0.3; exit 1", host={"RestartPolicy": {"Name": "always"}})
    until("it restarts", lambda: engine.inspect(identifier)["RestartCount"] >= 1)
    update(engine, identifier, RestartPolicy={"Name": "no"})
    until("it stays down", lambda: engine.inspect(identifier)["State"]["Status"] == "exited")
    count = engine.inspect(identifier)["RestartCount"]
    time.sleep(0.5)
    assert engine.inspect(identifier)["RestartCount"] == count
    assert engine.inspect(identifier)["HostConfig"]["RestartPolicy"]["Name"] == "no"


def test_versions(engine: TempEngine) -> None:
    identifier = engine.started("sleep", "600")
    body = {"CpuShares": 100, "RestartPolicy": {"Name": "always"}}
    assert engine.request("POST", f"/v1.21/containers/{identifier}/update", body).status == 404
    assert engine.request("POST", f"/v1.22/containers/{identifier}/update", body).status == 200
    host = engine.inspect(identifier)["HostConfig"]
    assert (host["CpuShares"], host["RestartPolicy"]["Name"]) == (100, "no")
    assert engine.request("POST", "/v1.24/containers/nobody/update", body).status == 404


@pytest.mark.own
def test_it_lasts(own_engine: TempEngine) -> None:
    identifier = own_engine.started("sleep", "600")
    update(own_engine, identifier, Memory=40 * MB, RestartPolicy={"Name": "unless-stopped"})
    own_engine.restart()
    assert own_engine.inspect(identifier)["HostConfig"]["Memory"] == 40 * MB
    own_engine.reboot()
    until("its policy starts it", lambda: own_engine.inspect(identifier)["State"]["Status"] == "running")
    assert group(own_engine, identifier).memory == 40 * MB


def test_docker_update(engine: TempEngine) -> None:
    identifier = engine.started("sleep", "600", name="updated")
    assert engine.docker("update", "--memory", "32m", "--memory-swap", "64m", "--cpu-shares", "77", "updated").line == (
        "updated"
    )
    assert group(engine, identifier).memory == 32 * MB
    engine.docker("update", "--restart", "on-failure:4", "updated")
    assert engine.inspect(identifier)["HostConfig"]["RestartPolicy"] == {
        "Name": "on-failure",
        "MaximumRetryCount": 4,
    }
