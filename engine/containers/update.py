"""A change of a container's limits and restart policy: the merge, its rules, and the resources for
the runtime. Pure.

Zero, empty and null leave a limit as it is (Docker Engine API, ContainerUpdate); an empty list of
devices removes their limits. The merged whole obeys the rules of a create. The runtime writes
memory and swap limits in the order that the kernel wants.
Not here: applying it, and undoing a change that failed half-way (`settings.py`).
"""

from __future__ import annotations

import msgspec

from engine.containers import devices, limits
from engine.containers.body import checked_restart_policy
from engine.errors import Conflict, InvalidParameter
from engine.runtime.cgroups import Support
from engine.wire import oci
from engine.wire.containers import HostConfig, UpdateBody

_LISTS = devices.LIMITS
"""Each list replaces the one before."""
_OTHERS = ("restart_policy", "pids_limit", *_LISTS)
_LIMITS = tuple(name for name in UpdateBody.__struct_fields__ if name not in _OTHERS)

NO_QUOTA = NO_LIMIT = -1

_UNSET = {"memory": -1, "memory_swap": -1, "memory_reservation": -1, "cpu_shares": 1024, "cpu_period": 100_000}
_UNSET |= {"cpu_quota": NO_QUOTA, "pids_limit": NO_LIMIT}
"""The values of a fresh cgroup, for limits that were never set."""


def merged(host: HostConfig, change: UpdateBody, support: Support) -> tuple[HostConfig, list[str]]:
    """Returns the merged HostConfig and warnings.

    Raises InvalidParameter as create does, Conflict for a restart policy with AutoRemove and for
    NanoCpus beside a quota.
    """
    given: dict[str, object] = {name: value for name in _LIMITS if (value := getattr(change, name))}
    _check_cpus(host, change)
    if change.pids_limit is not None:
        given["pids_limit"] = change.pids_limit if change.pids_limit > 0 else None
    given |= {name: each or None for name in _LISTS if (each := getattr(change, name)) is not None}
    if 0 < host.memory_swap < change.memory and not change.memory_swap:
        raise InvalidParameter(
            "Memory: Memory limit should be smaller than already set memoryswap limit, "
            "update the memoryswap at the same time"
        )
    if change.restart_policy.name:
        policy = given["restart_policy"] = checked_restart_policy(change.restart_policy)
        if host.auto_remove and policy.name != "no":
            raise Conflict("Restart policy cannot be updated because AutoRemove is enabled for the container")
    host = msgspec.structs.replace(host, **given)
    limits.check(host)
    return limits.adapted(host, support)


def _check_cpus(host: HostConfig, change: UpdateBody) -> None:
    """NanoCpus are a period and a quota, so the one stands against the others that are set."""
    for new, field, old, other in (
        (change.nano_cpus, "Nano CPUs", host.cpu_period, "CPU Period"),
        (change.nano_cpus, "Nano CPUs", host.cpu_quota, "CPU Quota"),
        (change.cpu_period, "CPU Period", host.nano_cpus, "NanoCPUs"),
        (change.cpu_quota, "CPU Quota", host.nano_cpus, "NanoCPUs"),
    ):
        if new > 0 and old > 0:
            raise Conflict(f"Conflicting options: {field} cannot be updated as {other} has already been set")


def resources(before: HostConfig, after: HostConfig, support: Support) -> oci.Resources | None:
    """The changed limits of a running container; None when nothing changed. Limits of block devices
    that are gone are not in it (`devices.lifted`).
    """

    def value(name: str) -> int:
        return int(getattr(after, name) or _UNSET.get(name, 0))

    changed = {name for name in (*_LIMITS, "pids_limit", *_LISTS) if getattr(before, name) != getattr(after, name)}
    # Kept in the record; the runtime cannot set it.
    if not support.kernel_memory:
        changed.discard("kernel_memory")
    if not support.weight or support.weighs_by_bfq:
        changed.discard("blkio_weight")

    def one(name: str) -> int | None:
        return value(name) if name in changed else None

    memory, cpu, block = None, None, None
    if changed & {"memory", "memory_swap", "memory_reservation", "kernel_memory"}:
        both = bool(changed & {"memory", "memory_swap"})
        memory = oci.Memory(
            limit=value("memory") if both else None,
            swap=value("memory_swap") if both and support.swap else None,
            reservation=one("memory_reservation"),
            kernel=one("kernel_memory"),
        )
    if changed & {"cpu_shares", "nano_cpus", "cpu_period", "cpu_quota", "cpuset_cpus", "cpuset_mems"}:
        both = bool(changed & {"nano_cpus", "cpu_period", "cpu_quota"})
        period, quota = limits.cpu_time(after)
        cpu = oci.Cpu(
            shares=one("cpu_shares"),
            period=(period or _UNSET["cpu_period"]) if both else None,
            quota=(quota or NO_QUOTA) if both else None,
            cpus=(after.cpuset_cpus or support.cpus) if "cpuset_cpus" in changed else "",
            mems=(after.cpuset_mems or support.mems) if "cpuset_mems" in changed else "",
        )
    if changed & {"blkio_weight", *_LISTS}:
        weight = after.blkio_weight or support.usual_weight if "blkio_weight" in changed else None
        block = devices.block_limits(after, weight=weight, only=changed)
    pids = oci.Pids(limit=value("pids_limit")) if "pids_limit" in changed else None
    if memory is None and cpu is None and pids is None and block in (None, oci.BlockIO()):
        return None
    return oci.Resources(memory=memory, cpu=cpu, pids=pids, block_io=block)
