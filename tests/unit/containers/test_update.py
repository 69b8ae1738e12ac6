"""The merge of an update, its rules, and the runtime's arguments to apply and to undo it."""

from __future__ import annotations

import pytest

from engine.containers.update import merged, resources
from engine.errors import Conflict, InvalidParameter
from engine.runtime.cgroups import Support
from engine.wire import oci
from engine.wire.containers import HostConfig, RestartPolicy, UpdateBody

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
