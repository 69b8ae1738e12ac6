"""Limits of a HostConfig: the rules, and what this host's kernel supports.

`check` applies the rules that hold everywhere. `adapted` knows the host: a limit that the kernel
lacks is discarded with a warning where Docker warns, and refused elsewhere. Create and update share
both. Pure, except for this process's own resource limits.

Rules: Docker Engine API, ContainerCreate and ContainerUpdate. The warnings are Docker's to the
       letter, because scripts match them.
Not here: which files of a cgroup they end up in (the runtime), the OCI document (`spec.py`).
"""

from __future__ import annotations

import resource
from collections.abc import Collection
from math import inf
from pathlib import Path

import msgspec

from engine.config import ULIMITS
from engine.errors import InvalidParameter
from engine.runtime import capabilities
from engine.runtime.cgroups import Support, numbers
from engine.wire import oci
from engine.wire.containers import HostConfig, Ulimit

MIN_MEMORY = 6 << 20
MIN_SHARES, MAX_SHARES = 2, 1 << 18
"""The kernel clamps cpu.shares to these."""
MAX_QUOTA = (1 << 44) - 1
"""Microseconds. Linux 5.8 and later refuse more (`max_bw_runtime_us` in kernel/sched/core.c)."""
MAX_PIDS = 4 << 20
"""PID_MAX_LIMIT; `pids.max` takes no larger number."""
NANO_PERIOD = 100_000
"""Microseconds of the CFS period in which NanoCpus are given, as in Docker."""


def cpu_time(host: HostConfig) -> tuple[int | None, int | None]:
    """Period and quota in microseconds. None without one, as in a new cgroup."""
    if host.nano_cpus:
        return NANO_PERIOD, host.nano_cpus * NANO_PERIOD // 10**9
    return host.cpu_period or None, host.cpu_quota if host.cpu_quota > 0 else None


_UNSUPPORTED = "Your kernel does not support {} or the cgroup is not mounted. {}"


def default_memory_swap(memory: int) -> int:
    """Docker's default: as much swap as memory. Clients and runtimes read the sum as an int64."""
    return min(2 * memory, (1 << 63) - 1)


_PERIOD = "CpuPeriod: {}: CPU cfs period can not be less than 1ms (i.e. 1000) or larger than 1s (i.e. 1000000)"
_BOUNDS = (
    ("memory", MIN_MEMORY, inf, "Memory: Minimum memory limit allowed is 6MB, got {}"),
    ("memory_swap", -1, inf, "MemorySwap must be -1, 0 or a number of bytes: {}"),
    ("memory_reservation", MIN_MEMORY, inf, "MemoryReservation: Minimum memory reservation allowed is 6MB, got {}"),
    ("kernel_memory", MIN_MEMORY, inf, "KernelMemory: Minimum kernel memory limit allowed is 6MB, got {}"),
    ("memory_swappiness", -1, 100, "MemorySwappiness: Invalid value: {}, valid memory swappiness range is 0-100"),
    ("blkio_weight", 10, 1000, "BlkioWeight: {}, range of blkio weight is from 10 to 1000"),
    ("cpu_shares", 0, inf, "CpuShares must not be negative: {}"),
    ("cpu_shares", MIN_SHARES, inf, f"CpuShares: {{}}: The minimum allowed cpu-shares is {MIN_SHARES}"),
    ("cpu_shares", 0, MAX_SHARES, f"CpuShares: {{}}: The maximum allowed cpu-shares is {MAX_SHARES}"),
    ("cpu_period", 1000, 1_000_000, _PERIOD),
    ("cpu_quota", -inf, MAX_QUOTA, f"CpuQuota: {{}}: this kernel allows at most {MAX_QUOTA} microseconds"),
    ("cpu_quota", -1, inf, "CpuQuota: {}, it must be -1 (no quota), 0 or a number of microseconds"),
    ("nano_cpus", 10_000_000, inf, "NanoCpus: {}: it must be at least 10000000 (0.01 CPUs)"),
    # Under v2 the kernel has no such limit; under v1 a cgroup has no such time unless all groups
    # above it are given some.
    ("cpu_realtime_period", 0, 0, "CpuRealtimePeriod is not supported by this engine"),
    ("cpu_realtime_runtime", 0, 0, "CpuRealtimeRuntime is not supported by this engine"),
    ("pids_limit", -inf, MAX_PIDS, f"PidsLimit: {{}}: this kernel allows at most {MAX_PIDS}; -1 is unlimited"),
    ("oom_score_adj", -1000, 1000, "OomScoreAdj: Invalid value {}, range for oom score adj is [-1000, 1000]"),
    ("shm_size", 0, inf, "ShmSize: {}, SHM size must be greater than 0"),
    ("cpu_count", 0, 0, "CpuCount: only supported on Windows"),
    ("cpu_percent", 0, 0, "CpuPercent: only supported on Windows"),
    ("io_maximum_iops", 0, 0, "IOMaximumIOps: only supported on Windows"),
    ("io_maximum_bandwidth", 0, 0, "IOMaximumBandwidth: only supported on Windows"),
    ("disk_quota", 0, 0, "DiskQuota: only supported on Windows"),
)
"""Fields, the least and the largest number of each, and the words of a refusal. 0, null and absent
set nothing, and are allowed.
"""


def check(host: HostConfig) -> None:
    """The rules that hold on any host.

    Raises InvalidParameter that names the field and the rule.
    """
    for field, least, most, words in _BOUNDS:
        number = getattr(host, field)
        if number and not least <= number <= most:
            raise InvalidParameter(words.format(number))
    if host.memory_swap > 0:
        if not host.memory:
            raise InvalidParameter("MemorySwap: You should always set the Memory limit when using Memoryswap limit")
        if host.memory_swap < host.memory:
            raise InvalidParameter("MemorySwap: Minimum memoryswap limit should be larger than memory limit")
    if host.memory and host.memory_reservation > host.memory:
        raise InvalidParameter(
            "MemoryReservation: Minimum memory limit can not be less than memory reservation limit: "
            "it should be smaller"
        )
    for weighted in host.blkio_weight_device or ():
        _check_device(weighted.path, "BlkioWeightDevice")
        if not 10 <= weighted.weight <= 1000:
            raise InvalidParameter(f"BlkioWeightDevice: {weighted.path}: range of blkio weight is from 10 to 1000")
    for field, throttled in (
        ("BlkioDeviceReadBps", host.blkio_device_read_bps),
        ("BlkioDeviceWriteBps", host.blkio_device_write_bps),
        ("BlkioDeviceReadIOps", host.blkio_device_read_iops),
        ("BlkioDeviceWriteIOps", host.blkio_device_write_iops),
    ):
        for device in throttled or ():
            _check_device(device.path, field)
            if device.rate < 0:
                raise InvalidParameter(f"{field}: {device.path}: the rate must not be negative: {device.rate}")
    if 0 < host.cpu_quota < 1000:
        raise InvalidParameter(f"CpuQuota: {host.cpu_quota}: CPU cfs quota can not be less than 1ms (i.e. 1000)")
    for name, limit in (("CPU Period", host.cpu_period), ("CPU Quota", host.cpu_quota)):
        if host.nano_cpus and limit:
            raise InvalidParameter(f"Conflicting options: Nano CPUs and {name} cannot both be set")
    _members(host.cpuset_cpus, "cpus")
    _members(host.cpuset_mems, "mems")


def _check_device(path: str, field: str) -> None:
    if not path.startswith("/") or "\0" in path:
        raise InvalidParameter(f"{field}: {path!r} is not an absolute path of a device")


def _members(text: str, field: str) -> frozenset[int]:
    """The numbers of a cpuset; the field is `cpus` or `mems`."""
    try:
        return numbers(text)
    except ValueError as error:
        raise InvalidParameter(
            f"Cpuset{field.title()}: Invalid value {text[:64]} for cpuset {field}: {error}"
        ) from error


def adapted(host: HostConfig, support: Support) -> tuple[HostConfig, list[str]]:
    """Drops the limits that this kernel lacks. Returns the rest, and warnings for the client.

    Raises InvalidParameter for processors, memory nodes, ulimits and OOM scores that this host does
    not have.
    """
    changes: dict[str, object] = {}
    warnings: list[str] = []

    def discard(field: str, limit: object, supported: bool, what: str, consequence: str, unset: object) -> None:
        if limit and not supported:
            warnings.append(_UNSUPPORTED.format(what, consequence))
            changes[field] = unset

    if host.memory and not support.memory:
        warnings.append(_UNSUPPORTED.format("memory limit capabilities", "Limitation discarded."))
        changes |= {"memory": 0, "memory_swap": 0}
    elif host.memory and not support.swap and host.memory_swap != -1:
        warnings.append(_UNSUPPORTED.format("swap limit capabilities", "Memory limited without swap."))
        changes["memory_swap"] = -1
    elif host.memory and not host.memory_swap:
        changes["memory_swap"] = default_memory_swap(host.memory)
    discard(
        *("memory_swappiness", host.memory_swappiness is not None, support.swappiness),
        *("memory swappiness capabilities", "Memory swappiness discarded.", None),
    )
    discard(
        *("memory_reservation", host.memory_reservation, support.reservation, "memory soft limit capabilities"),
        *("Limitation discarded.", 0),
    )
    # inspect shows it all the same, as in Docker
    if host.kernel_memory and not support.kernel_memory:
        warnings.append(_UNSUPPORTED.format("kernel memory limit capabilities", "Limitation discarded."))
    if host.kernel_memory_tcp:
        warnings.append(_UNSUPPORTED.format("kernel memory TCP limit capabilities", "Limitation discarded."))
        changes["kernel_memory_tcp"] = msgspec.UNSET
    if not support.oom_kill_disable:
        if host.oom_kill_disable:
            warnings.append("Your kernel does not support OomKillDisable. OomKillDisable discarded.")
        changes["oom_kill_disable"] = None
    elif host.oom_kill_disable and not host.memory:
        warnings.append(
            "OOM killer is disabled for the container, but no memory limit is set, "
            "this can result in the system running out of resources."
        )
    discard("pids_limit", host.pids_limit, support.pids, "pids limit capabilities", "PIDs limit discarded.", None)
    discard("cpu_shares", host.cpu_shares, support.shares, "CPU shares", "Shares discarded.", 0)
    discard("nano_cpus", host.nano_cpus, support.quota, "CPU cfs quota", "Quota discarded.", 0)
    discard("cpu_period", host.cpu_period, support.quota, "CPU cfs period", "Period discarded.", 0)
    discard("cpu_quota", host.cpu_quota, support.quota, "CPU cfs quota", "Quota discarded.", 0)
    if (host.cpuset_cpus or host.cpuset_mems) and not support.cpuset:
        warnings.append(_UNSUPPORTED.format("cpuset", "Cpuset discarded."))
        changes |= {"cpuset_cpus": "", "cpuset_mems": ""}
    else:
        if host.nano_cpus > len(numbers(support.cpus)) * 10**9:
            raise InvalidParameter(
                f"NanoCpus: Range of CPUs is from 0.01 to {len(numbers(support.cpus))}.00, "
                f"as there are only {len(numbers(support.cpus))} CPUs available"
            )
        _check_available(host.cpuset_cpus, support.cpus, "cpus", "CPUs")
        _check_available(host.cpuset_mems, support.mems, "mems", "memory nodes")
    if host.blkio_weight and not support.weight:  # inspect shows it all the same, as in Docker
        warnings.append(_UNSUPPORTED.format("Block I/O weight", "Weight discarded."))
    discard(
        *("blkio_weight_device", host.blkio_weight_device, support.weight_device, "Block I/O weight_device"),
        *("Weight-device discarded.", None),
    )
    for field, limit, what, consequence in (
        ("read_bps", host.blkio_device_read_bps, "BPS Block I/O read limit", "Block I/O BPS read limit discarded."),
        ("write_bps", host.blkio_device_write_bps, "BPS Block I/O write limit", "Block I/O BPS write limit discarded."),
        ("read_iops", host.blkio_device_read_iops, "IOPS Block read limit", "Block I/O IOPS read limit discarded."),
        ("write_iops", host.blkio_device_write_iops, "IOPS Block write limit", "Block I/O IOPS write limit discarded."),
    ):
        discard(f"blkio_device_{field}", limit, support.throttle, what, consequence, None)
    _check_own_limits(host)
    return msgspec.structs.replace(host, **changes), warnings


def _check_available(text: str, available: str, field: str, what: str) -> None:
    if text and not _members(text, field) <= numbers(available):
        raise InvalidParameter(f"Requested {what} are not available - requested {text}, available: {available}")


# --- limits of execve(2) --------------------------------------------------------------------------

MAX_STRING = 128 << 10
"""MAX_ARG_STRLEN: bytes of one argument or variable, with the NUL at its end."""
_POINTER = 8


def check_exec(arguments: Collection[str], environment: Collection[str], stack: int = 0) -> None:
    """Raises InvalidParameter for arguments beyond the limits of execve(2), which a runtime would
    report only after minutes, and for those with a NUL character, where a runtime would cut them.

    `stack`: the soft limit of the stack in bytes, of which strings and pointers may take a quarter;
    0 for the engine's own.
    """
    stack = stack or resource.getrlimit(resource.RLIMIT_STACK)[0]
    most = _MOST_STRINGS if stack == resource.RLIM_INFINITY or stack < 0 else min(_MOST_STRINGS, stack // 4)
    most = max(most, MAX_STRING)
    total = _POINTER * (len(arguments) + len(environment))
    for what, words in (("argument", arguments), ("environment variable", environment)):
        for word in words:
            size = len(word.encode(errors="surrogateescape")) + 1
            if size > MAX_STRING or "\0" in word:
                name = word[:40] if what == "argument" else word.partition("=")[0][:40]
                if "\0" in word:
                    raise InvalidParameter(f"{what} {name!r} must not contain a NUL character")
                raise InvalidParameter(
                    f"{what} {name!r} has {size} bytes of at most {MAX_STRING}: argument list too long"
                )
            total += size
    if total > most:
        raise InvalidParameter(
            f"command and environment have {total} bytes, and this kernel takes {most}: argument list too long"
        )


_MOST_STRINGS = 6 << 20
"""Three quarters of _STK_LIM (fs/exec.c), whatever the stack's limit."""


# --- what depends on the engine's own limits ------------------------------------------------------

RLIMITS = {name: f"RLIMIT_{name.upper()}" for name in ULIMITS}
_UNNAMED_RLIMITS = {"RLIMIT_LOCKS": 10}
"""Python's resource(3) module has no name for it."""

_OWN_SCORE = Path("/proc/self/oom_score_adj")
_MOST_FILES = Path("/proc/sys/fs/nr_open")


def _check_own_limits(host: HostConfig) -> None:
    raisable = "CAP_SYS_RESOURCE" in capabilities.bounding()
    for ulimit in host.ulimits or ():
        rlimit(ulimit, raisable=raisable)
    if host.oom_score_adj < 0 and not raisable and host.oom_score_adj < (own := int(_OWN_SCORE.read_text())):
        raise InvalidParameter(
            f"OomScoreAdj: {host.oom_score_adj} is below this engine's own of {own}, and the engine lacks "
            "CAP_SYS_RESOURCE to lower it"
        )


def rlimit(ulimit: Ulimit, *, raisable: bool) -> oci.Rlimit:
    """One ulimit; -1 is unlimited. Raises InvalidParameter for an unknown name, or above what the
    engine itself may set.

    `raisable`: the engine has CAP_SYS_RESOURCE and so no bound of its own.
    """
    kind = RLIMITS.get(ulimit.name)
    if kind is None:
        raise InvalidParameter(f"Ulimits: invalid ulimit type: {ulimit.name}")
    if min(ulimit.hard, ulimit.soft) < -1:
        raise InvalidParameter(f"Ulimits: {ulimit.name}: limits must be -1 (unlimited), 0 or positive")
    wanted = "unlimited" if ulimit.hard == -1 else ulimit.hard
    own = resource.getrlimit(getattr(resource, kind, _UNNAMED_RLIMITS.get(kind, 0)))[1]
    if not raisable and own != resource.RLIM_INFINITY and (ulimit.hard == -1 or ulimit.hard > own):
        raise InvalidParameter(
            f"Ulimits: {ulimit.name}: the hard limit {wanted} is above this engine's own of {own}, "
            "and the engine lacks CAP_SYS_RESOURCE to raise it"
        )
    if ulimit.name == "nofile" and (ulimit.hard == -1 or ulimit.hard > own):
        most = int(_MOST_FILES.read_text())
        if ulimit.hard == -1 or ulimit.hard > most:
            raise InvalidParameter(
                f"Ulimits: nofile: the hard limit {wanted} is above this kernel's fs.nr_open of {most}"
            )
    return oci.Rlimit(type=kind, hard=_unsigned(ulimit.hard), soft=_unsigned(ulimit.soft))


def _unsigned(limit: int) -> int:
    return 2**64 - 1 if limit < 0 else limit
