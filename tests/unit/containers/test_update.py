"""The merge of an update, its rules, and the runtime's arguments to apply and to undo it."""

from __future__ import annotations

import pytest

from engine.containers import devices
from engine.containers.update import merged, resources
from engine.errors import Conflict, InvalidParameter
from engine.runtime.cgroups import Support
from engine.wire import oci
from engine.wire.containers import HostConfig, RestartPolicy, ThrottleDevice, UpdateBody, WeightDevice

MB = 1 << 20
SUPPORT = Support(cpus="0-3", mems="0", kernel_memory=False)
LIMITED = HostConfig(memory=64 * MB, memory_swap=128 * MB, cpu_shares=512)


def test_zero_and_empty_leave_all_as_it_is() -> None:
    after, warnings = merged(LIMITED, UpdateBody(), SUPPORT)
    assert (after, warnings) == (LIMITED, [])
    assert resources(LIMITED, after, SUPPORT) is None


def test_memory_goes_with_its_swap_limit() -> None:
    after, _ = merged(LIMITED, UpdateBody(memory=32 * MB), SUPPORT)
    assert resources(LIMITED, after, SUPPORT) == oci.Resources(memory=oci.Memory(limit=32 * MB, swap=128 * MB))
    after, _ = merged(LIMITED, UpdateBody(memory=256 * MB, memory_swap=-1), SUPPORT)
    assert resources(LIMITED, after, SUPPORT) == oci.Resources(memory=oci.Memory(limit=256 * MB, swap=-1))
    after, _ = merged(HostConfig(), UpdateBody(memory=32 * MB), SUPPORT)
    assert after.memory_swap == 64 * MB


def test_more_memory_than_the_swap_limit_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="memoryswap"):
        merged(LIMITED, UpdateBody(memory=256 * MB), SUPPORT)
    unlimited = HostConfig(memory=64 * MB, memory_swap=-1)
    assert merged(unlimited, UpdateBody(memory=256 * MB), SUPPORT)[0].memory == 256 * MB


def test_without_swap_accounting() -> None:
    support = Support(cpus="0", mems="0", swap=False)
    after, warnings = merged(HostConfig(), UpdateBody(memory=32 * MB, memory_swap=64 * MB), support)
    assert "swap" in warnings[0]
    assert resources(HostConfig(), after, support) == oci.Resources(memory=oci.Memory(limit=32 * MB))


def test_the_way_back_has_a_number_for_what_was_never_set() -> None:
    change = UpdateBody(memory=32 * MB, cpu_quota=5000, cpu_shares=100, cpuset_cpus="1", blkio_weight=300)
    after, _ = merged(HostConfig(), change, SUPPORT)
    assert resources(after, HostConfig(), SUPPORT) == oci.Resources(
        memory=oci.Memory(limit=-1, swap=-1),
        cpu=oci.Cpu(shares=1024, quota=-1, period=100_000, cpus="0-3"),
        block_io=oci.BlockIO(weight=500),
    )


def test_what_the_runtime_cannot_set_is_kept_in_the_record() -> None:
    change = UpdateBody(kernel_memory=32 * MB, blkio_weight=300)
    for support in (Support(kernel_memory=False, weight=False), Support(kernel_memory=False, weighs_by_bfq=True)):
        after, _ = merged(HostConfig(), change, Support(cpus="0", mems="0", kernel_memory=False))
        assert (after.kernel_memory, after.blkio_weight) == (32 * MB, 300)
        assert resources(HostConfig(), after, support) is None


def test_number_of_processes() -> None:
    """0 and -1 remove the limit; null leaves it."""
    limited = HostConfig(pids_limit=9)
    for given, kept, limit in ((5, 5, 5), (0, None, -1), (-1, None, -1)):
        after, _ = merged(limited, UpdateBody(pids_limit=given), SUPPORT)
        assert after.pids_limit == kept
        assert resources(limited, after, SUPPORT) == oci.Resources(pids=oci.Pids(limit=limit))
    assert merged(limited, UpdateBody(), SUPPORT)[0].pids_limit == 9


def test_real_time_is_refused() -> None:
    for change in (UpdateBody(cpu_realtime_period=1), UpdateBody(cpu_realtime_runtime=1)):
        with pytest.raises(InvalidParameter, match="is not supported by this engine"):
            merged(HostConfig(), change, SUPPORT)


def test_nano_cpus() -> None:
    after, _ = merged(HostConfig(), UpdateBody(nano_cpus=500_000_000), SUPPORT)
    assert resources(HostConfig(), after, SUPPORT) == oci.Resources(cpu=oci.Cpu(quota=50_000, period=100_000))
    assert resources(after, HostConfig(), SUPPORT) == oci.Resources(cpu=oci.Cpu(quota=-1, period=100_000))


@pytest.mark.parametrize(
    ("host", "change", "words"),
    [
        ({"cpu_period": 5000}, {"nano_cpus": 10**8}, "Nano CPUs cannot be updated as CPU Period has already been set"),
        ({"cpu_quota": 5000}, {"nano_cpus": 10**8}, "Nano CPUs cannot be updated as CPU Quota has already been set"),
        ({"nano_cpus": 10**8}, {"cpu_period": 5000}, "CPU Period cannot be updated as NanoCPUs has already been set"),
        ({"nano_cpus": 10**8}, {"cpu_quota": 5000}, "CPU Quota cannot be updated as NanoCPUs has already been set"),
    ],
)
def test_a_quota_and_nano_cpus_exclude_each_other(host: dict[str, int], change: dict[str, int], words: str) -> None:
    with pytest.raises(Conflict, match=f"Conflicting options: {words}"):
        merged(HostConfig(**host), UpdateBody(**change), SUPPORT)


def test_an_empty_list_of_devices_removes_their_limits() -> None:
    """One that is null or absent leaves them. A device that is no longer there has no limit."""
    host = HostConfig(blkio_device_read_bps=[ThrottleDevice(path="/dev/not-here", rate=5)])
    assert merged(host, UpdateBody(), SUPPORT)[0] == host
    after, _ = merged(host, UpdateBody(blkio_device_read_bps=[]), SUPPORT)
    assert after.blkio_device_read_bps is None and resources(host, after, SUPPORT) is None
    assert list(devices.lifted(host, after)) == []


def test_limits_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_block_device", lambda path, _field: (8, int(path[-1])))
    before = HostConfig(
        blkio_device_read_bps=[ThrottleDevice(path="/dev/1", rate=5), ThrottleDevice(path="/dev/2", rate=6)],
        blkio_weight_device=[WeightDevice(path="/dev/3", weight=100)],
    )
    wanted = [ThrottleDevice(path="/dev/2", rate=7), ThrottleDevice(path="/dev/4", rate=0)]
    after, _ = merged(before, UpdateBody(blkio_device_read_bps=wanted, blkio_weight_device=[]), SUPPORT)
    assert resources(before, after, SUPPORT) == oci.Resources(
        block_io=oci.BlockIO(throttle_read_bps_device=[oci.ThrottleDevice(major=8, minor=2, rate=7)])
    )
    assert list(devices.lifted(before, after)) == [("blkio_weight_device", 8, 3), ("blkio_device_read_bps", 8, 1)]


def test_restart_policy() -> None:
    after, _ = merged(
        LIMITED, UpdateBody(restart_policy=RestartPolicy(name="on-failure", maximum_retry_count=3)), SUPPORT
    )
    assert after.restart_policy == RestartPolicy(name="on-failure", maximum_retry_count=3)
    assert resources(LIMITED, after, SUPPORT) is None
    with pytest.raises(InvalidParameter, match="restart policy"):
        merged(LIMITED, UpdateBody(restart_policy=RestartPolicy(name="often")), SUPPORT)


def test_autoremove_takes_no_restart_policy() -> None:
    """As at a create: one of them would never apply."""
    host = HostConfig(auto_remove=True)
    with pytest.raises(Conflict, match="Restart policy cannot be updated because AutoRemove is enabled"):
        merged(host, UpdateBody(restart_policy=RestartPolicy(name="always")), SUPPORT)
    after, _ = merged(host, UpdateBody(restart_policy=RestartPolicy(name="no")), SUPPORT)
    assert after.auto_remove
