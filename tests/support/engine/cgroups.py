"""The limits of a running container as the kernel reports them, in the API's units, for cgroup v1
and v2.

Reads the files of a process's cgroup and imports nothing of the engine. A test has one expectation
for both versions; only limits that one version lacks depend on `V2`.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
V2 = (ROOT / "cgroup.controllers").exists()
"""True if the host has cgroup v2 only."""

NONE = -1
"""A limit that is not set, as the API writes it."""

_NO_BYTES = sys.maxsize // os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PAGE_SIZE")
"""v1's value for a limit that is not set."""

WRITES = """
cd /sys/fs/cgroup && grep -q cgroup /proc/self/mounts || exit 1
for each in $(find . -follow -type d 2>/dev/null); do mkdir $each/made 2>&1 && echo "made $each/made"; done
for each in $(find . -follow -type f 2>/dev/null); do (echo -1 >$each) 2>&1 && echo "wrote $each"; done
echo tried
"""
"""A script for a container's root that tries to make a cgroup everywhere, and to write to every
file. It prints what succeeded and all refusals.
"""


def succeeded(output: str) -> list[str]:
    """The lines of WRITES but refusals because of a read-only mount, of which there must be some.
    The last line is `tried`.
    """
    lines = output.splitlines()
    left = [line for line in lines if "Read-only file system" not in line]
    assert len(left) + 20 < len(lines), output
    return left


class Group:
    """The cgroup of a process."""

    def __init__(self, pid: int) -> None:
        self._paths = {}
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in controllers.split(","):
                self._paths[controller] = path

    def path(self, controller: str) -> str:
        """The cgroup's path in the hierarchy of the controller."""
        return self._paths["" if V2 else controller]

    def directory(self, controller: str) -> Path:
        """Where the kernel shows it."""
        return (ROOT if V2 else ROOT / controller) / self.path(controller).lstrip("/")

    def file(self, controller: str, v1: str, v2: str = "") -> str:
        """The text of a file. `v2`: its name under v2, if it differs."""
        return (self.directory(controller) / (v2 or v1 if V2 else v1)).read_text().strip()

    @property
    def memory(self) -> int:
        return _bytes(self.file("memory", "memory.limit_in_bytes", "memory.max"))

    @property
    def swap(self) -> int:
        """The limit of memory plus swap, as in MemorySwap. v2's own limit is for swap only."""
        found = _bytes(self.file("memory", "memory.memsw.limit_in_bytes", "memory.swap.max"))
        return found + self.memory if V2 and found != NONE else found

    @property
    def reservation(self) -> int:
        """The soft limit. v2 has none; the runtimes protect so much memory from reclaim instead."""
        return _bytes(self.file("memory", "memory.soft_limit_in_bytes", "memory.low"))

    @property
    def quota(self) -> int:
        """The CPU quota in microseconds."""
        return _number(self.file("cpu", "cpu.cfs_quota_us", "cpu.max").split()[0])

    @property
    def period(self) -> int:
        return int(self.file("cpu", "cpu.cfs_period_us", "cpu.max").split()[-1])

    @property
    def cpus(self) -> str:
        return self.file("cpuset", "cpuset.cpus")

    @property
    def mems(self) -> str:
        return self.file("cpuset", "cpuset.mems")

    @property
    def pids(self) -> int:
        return _number(self.file("pids", "pids.max"))

    def has_shares(self, shares: int) -> bool:
        """True if the CPU shares are set. v2 has a weight instead, which runtimes compute from the
        shares in one of two ways: in proportion, or so that 1024 shares are v2's default of 100.
        """
        if not V2:
            return self.file("cpu", "cpu.shares") == str(shares)
        power = math.log2(shares)
        weights = (1 + (shares - 2) * 9999 // 262142, math.ceil(10 ** ((power * power + 125 * power) / 612 - 7 / 34)))
        return int(self.file("cpu", "", "cpu.weight")) in weights

    def throttle(self, kind: str, device: str) -> int:
        """The rate of `read_bps`, `write_bps`, `read_iops` or `write_iops` for the device
        `major:minor`; NONE if there is none.
        """
        rates = {}
        if V2:
            key = kind[0] + kind.partition("_")[2]  # rbps, wiops, ...
            for line in self.file("io", "", "io.max").splitlines():
                number, *words = line.split()
                rates[number] = dict(word.split("=") for word in words)[key]
        else:
            rates = dict(line.split() for line in self.file("blkio", f"blkio.throttle.{kind}_device").splitlines())
        return _number(rates.get(device, "max"))


def directories(name: str) -> list[Path]:
    """The cgroup `/name`, in every hierarchy that has it."""
    return [path for path in (ROOT / name, *ROOT.glob(f"*/{name}")) if path.is_dir()]


def _bytes(text: str) -> int:
    found = _number(text)
    return NONE if found >= _NO_BYTES else found


def _number(text: str) -> int:
    return NONE if text == "max" else int(text)
