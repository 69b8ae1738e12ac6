"""The systemd cgroup driver: each container is a transient scope of systemd, in a slice.

The OCI runtime asks systemd for the scope (`--systemd-cgroup`, runc(8), crun(1)), and systemd makes
and removes its cgroup. Its path follows from the names alone (systemd.slice(5)), so that the engine
reads counters, kills and freezes as with the driver `cgroupfs`. systemd writes the properties of
its units to their cgroups again whenever it reloads, and a property that it was not told of as no
limit. So each limit is a property, too: crun 1.8 and runc 1.1 tell systemd only some of them.

Owns nothing. Not here: cgroups without systemd (`cgroups.py`).
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from engine.errors import ServerError
from engine.wire import oci

Driver = Literal["cgroupfs", "systemd"]

OPTION = "native.cgroupdriver="
"""The key of dockerd's `exec-opts` that chooses the driver."""
BOOTED = Path("/run/systemd/system")
"""It exists where systemd is process 1, sd_booted(3)."""
BUS = Path("/run/dbus/system_bus_socket")
"""By which the runtimes ask systemd (package dbus)."""
SLICE = "system.slice"
"""Parent of containers without CgroupParent, as in Docker."""

_ANNOTATIONS = {
    # crun makes a cgroup `container` in the scope otherwise, and runc does not.
    "run.oci.systemd.subgroup": "",
    # A scope that has failed does not stay in systemd's list of units.
    "org.systemd.property.CollectMode": "'inactive-or-failed'",
}
_INFINITY = (1 << 64) - 1
"""systemd's number for no limit."""
_SET_SECONDS = 25
"""D-Bus' own limit of a call."""


def driver(options: Iterable[str], mode: str) -> Driver:
    """The driver that `exec-opts` name; without one, systemd where it is process 1 and the host has
    cgroup v2 alone (`mode`: `Cgroups.mode`), else cgroupfs: as in dockerd.

    Raises ServerError if systemd is named and this host lacks what the driver needs.
    """
    chosen = [each.removeprefix(OPTION) for each in options if each.startswith(OPTION)]
    missing = lacks()
    if "systemd" in chosen[-1:] and missing:
        raise ServerError(f"--exec-opt {OPTION}systemd: {missing}")
    if chosen:
        return "systemd" if chosen[-1] == "systemd" else "cgroupfs"
    return "systemd" if mode == "v2" and not missing else "cgroupfs"


def lacks() -> str:
    """What this host lacks for the driver systemd; empty if it has everything."""
    if not BOOTED.is_dir():
        return f"systemd is not process 1 of this host ({BOOTED} is missing)"
    return "" if BUS.exists() else f"the system's D-Bus does not run ({BUS} is missing): apt install dbus"


def check_parent(parent: str) -> None:
    """Raises ValueError for a CgroupParent that is not the name of a slice, with Docker's words."""
    if _NAME.fullmatch(parent) is None or len(parent) > _LONGEST:
        raise ValueError(
            f'{parent[:100]!r}: cgroup-parent for systemd cgroup should be a valid slice named as "xxx.slice"'
        )


_NAME = re.compile(r"-\.slice|[\w:.\\]+(?:-[\w:.\\]+)*\.slice", re.ASCII)
_LONGEST = 255
"""Characters of a unit's name, systemd.unit(5)."""


def directory(parent: str) -> str:
    """The cgroup of a slice: `/a.slice/a-b.slice` for `a-b.slice`, and the root for `-.slice`."""
    words = parent.removesuffix(".slice").split("-") if parent != "-.slice" else []
    return "".join(f"/{'-'.join(words[:count])}.slice" for count in range(1, len(words) + 1))


def scope(container_id: str) -> str:
    """The name of a container's unit. It is Docker's, by which monitoring knows containers."""
    return f"{_PREFIX}-{container_id}.scope"


def container_id(unit: str) -> str:
    """The id that a unit's name has; the name itself if it has none."""
    match = _SCOPE.fullmatch(unit)
    return match[1] if match else unit


def oci_path(container_id: str, parent: str) -> str:
    """`linux.cgroupsPath` of a container in a slice, as the runtimes want it: slice, prefix,
    name.
    """
    return f"{parent}:{_PREFIX}:{container_id}"


_PREFIX = "docker"
_SCOPE = re.compile(rf"{_PREFIX}-([0-9a-f]{{64}})\.scope")


def unit_annotations(resources: oci.Resources) -> dict[str, str]:
    """For the configuration of a container in a scope: its limits as far as they are numbers. The
    others are set by `change`, when it runs.
    """
    limits = {f"org.systemd.property.{name}": f"uint64 {number}" for name, number in _numbers(resources).items()}
    return _ANNOTATIONS | limits


def change(container_id: str, resources: oci.Resources) -> None:
    """Tell systemd all limits of a container that runs, also those that it has no more. Blocks on
    systemd. Raises OSError; ENOENT if the scope is gone.
    """
    argv = ("systemctl", "set-property", "--runtime", scope(container_id), *_assignments(resources))
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_SET_SECONDS, check=False, env=environment)
    except subprocess.TimeoutExpired as error:
        raise OSError(errno.ETIMEDOUT, f"systemd has not answered for {_SET_SECONDS} s") from error
    if done.returncode:
        gone = any(words in done.stderr for words in ("not loaded", "not found"))
        said = done.stderr.strip() or f"systemctl ended with {done.returncode}"
        raise OSError(errno.ENOENT if gone else errno.EIO, said)


def _numbers(resources: oci.Resources) -> dict[str, int]:
    """Properties by name, systemd.resource-control(5). Without a property TasksMax systemd sets one
    of its own.
    """
    memory, cpu, pids = resources.memory or oci.Memory(), resources.cpu or oci.Cpu(), resources.pids
    found = {"TasksMax": pids.limit if pids is not None and pids.limit > 0 else _INFINITY}
    if memory.limit is not None and memory.limit > 0:
        found["MemoryMax"] = memory.limit
        if memory.swap is not None and memory.swap >= memory.limit:
            found["MemorySwapMax"] = memory.swap - memory.limit
    if memory.reservation:
        found["MemoryLow"] = memory.reservation
    if cpu.shares:
        found["CPUWeight"] = 1 + (max(2, min(cpu.shares, 262_144)) - 2) * 9_999 // 262_142
    if cpu.quota is not None and cpu.quota > 0:
        period = cpu.period or 100_000
        # systemd keeps whole percents, and would round down
        found["CPUQuotaPerSecUSec"] = -(-cpu.quota * 100 // period) * 10_000
        found["CPUQuotaPeriodUSec"] = period
    return found


def _assignments(resources: oci.Resources) -> Iterator[str]:
    """The same for systemctl(1), and the limits that are lists. An empty value is no limit."""
    numbers = _numbers(resources)
    for name in ("MemoryMax", "MemorySwapMax", "TasksMax"):
        number = numbers.get(name, _INFINITY)
        yield f"{name}={'infinity' if number == _INFINITY else number}"
    yield f"MemoryLow={numbers.get('MemoryLow', 0)}"
    yield f"CPUWeight={numbers.get('CPUWeight', '')}"
    quota, period = numbers.get("CPUQuotaPerSecUSec"), numbers.get("CPUQuotaPeriodUSec")
    yield "CPUQuota=" if quota is None else f"CPUQuota={quota // 10_000}%"
    yield "CPUQuotaPeriodSec=" if period is None else f"CPUQuotaPeriodSec={period}us"
    cpu, block = resources.cpu or oci.Cpu(), resources.block_io or oci.BlockIO()
    yield f"AllowedCPUs={cpu.cpus}"
    yield f"AllowedMemoryNodes={cpu.mems}"
    # BlkioWeight is 10 to 1000, IOWeight 1 to 10000
    yield f"IOWeight={'' if not block.weight else 1 + (block.weight - 10) * 9_999 // 990}"
    for name, devices in (
        ("IOReadBandwidthMax", block.throttle_read_bps_device),
        ("IOWriteBandwidthMax", block.throttle_write_bps_device),
        ("IOReadIOPSMax", block.throttle_read_iops_device),
        ("IOWriteIOPSMax", block.throttle_write_iops_device),
    ):
        yield f"{name}="
        yield from (f"{name}=/dev/block/{each.major}:{each.minor} {each.rate}" for each in devices)
