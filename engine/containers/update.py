"""A change of a container's limits and restart policy: the merge, its rules, and the resources for
the runtime. Pure.

Zero and empty leave a limit as it is (Docker Engine API, ContainerUpdate). The merged whole obeys
the rules of a create. The runtime writes memory and swap limits in the order that the kernel wants.
Not here: applying it, and undoing a change that failed half-way (`settings.py`).
"""

from __future__ import annotations

import msgspec

from engine.containers import limits
from engine.containers.body import checked_restart_policy
from engine.errors import Conflict, InvalidParameter
from engine.runtime.cgroups import Support
from engine.wire import oci
from engine.wire.containers import HostConfig, UpdateBody

_LIMITS = tuple(name for name in UpdateBody.__struct_fields__ if name != "restart_policy")

NO_QUOTA = -1

_UNSET = {"memory": -1, "memory_swap": -1, "memory_reservation": -1, "cpu_shares": 1024, "cpu_period": 100_000}
_UNSET |= {"cpu_quota": NO_QUOTA}
"""The values of a fresh cgroup, for limits that were never set."""


def merged(host: HostConfig, change: UpdateBody, support: Support) -> tuple[HostConfig, list[str]]:
    """Returns the merged HostConfig and warnings.

    Raises InvalidParameter as create does, Conflict for a restart policy with AutoRemove.
    """
    given: dict[str, object] = {name: value for name in _LIMITS if (value := getattr(change, name))}
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


def resources(before: HostConfig, after: HostConfig, support: Support) -> oci.Resources | None:
    """The changed limits of a running container; None when nothing changed."""

    def value(name: str) -> int:
        return int(getattr(after, name) or _UNSET.get(name, 0))

    changed = {name for name in _LIMITS if getattr(before, name) != getattr(after, name)}
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
    if changed & {"cpu_shares", "cpu_period", "cpu_quota", "cpuset_cpus", "cpuset_mems"}:
        both = bool(changed & {"cpu_period", "cpu_quota"})
        cpu = oci.Cpu(
            shares=one("cpu_shares"),
            period=value("cpu_period") if both else None,
            quota=value("cpu_quota") if both else None,
            cpus=(after.cpuset_cpus or support.cpus) if "cpuset_cpus" in changed else "",
            mems=(after.cpuset_mems or support.mems) if "cpuset_mems" in changed else "",
        )
    if "blkio_weight" in changed:
        block = oci.BlockIO(weight=after.blkio_weight or support.usual_weight)
    if memory is None and cpu is None and block is None:
        return None
    return oci.Resources(memory=memory, cpu=cpu, block_io=block)
