"""Where this host keeps its cgroups (v1, v2 or hybrid), and what the engine itself reads and removes there.

The OCI runtime makes and removes the cgroups of containers. Here is what is left: what the kernel can limit, whether it killed for memory,
and sweeping what a crash left.
Rules: cgroups(7); kernel documents cgroup-v1/memory.txt and cgroup-v2.rst.

Owns nothing on disk. Not here: counters (`_fast/cgroup`), limits (`containers/spec.py`).
"""

from __future__ import annotations

import errno
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

PARENT = "/engined"
"""Cgroup under which containers without CgroupParent live, in every hierarchy."""

Mode = Literal["v1", "v2", "hybrid", "none"]


MOST_CPUS = 8192
"""CONFIG_NR_CPUS goes no higher; memory nodes have a lower bound."""

_KMEM_LIMIT_GONE = (5, 16)
"""From this kernel on memory.kmem.limit_in_bytes is a file that takes a number and limits nothing."""


class Support(msgspec.Struct, frozen=True, kw_only=True):
    """Which limits the kernel of this host enforces, and the processors and memory nodes that it has to give."""

    memory: bool = True
    swap: bool = True
    reservation: bool = True
    kernel_memory: bool = True
    swappiness: bool = True
    oom_kill_disable: bool = True
    shares: bool = True
    quota: bool = True
    cpuset: bool = True
    pids: bool = True
    weight: bool = True
    usual_weight: int = 500
    """The BlkioWeight of a cgroup where none was set."""
    weight_device: bool = True
    throttle: bool = True
    cpus: str = ""
    """As the kernel writes lists: `0-3,5`."""
    mems: str = ""


def numbers(text: str, most: int = MOST_CPUS) -> frozenset[int]:
    """The members of a list such as `0-3,5`. ValueError for another form, and for a number of `most` or beyond: the work is bounded by that."""
    found: set[int] = set()
    words = text.strip().split(",") if text.strip() else []
    if len(words) > _MOST_RANGES:
        raise ValueError(f"more than {_MOST_RANGES} entries")
    for word in words:
        match = _RANGE.fullmatch(word)
        if match is None:
            raise ValueError(f"{word[:32]!r} is neither a number nor a range")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last >= most:
            raise ValueError(f"{word!r} is not within 0-{most - 1}")
        found.update(range(first, last + 1))
    return frozenset(found)


_MOST_RANGES = 1024
_RANGE = re.compile(r"(\d{1,10})(?:-(\d{1,10}))?", re.ASCII)


class Cgroups(msgspec.Struct, frozen=True):
    """The hierarchies of this host. `controllers` maps each mounted v1 controller to its mount; `unified` is the v2 mount or empty."""

    mode: Mode
    controllers: Mapping[str, str]
    unified: str = ""
    unified_controllers: tuple[str, ...] = ()
    unified_files: frozenset[str] = frozenset()
    """What a cgroup right below the v2 mount has, where v2 is alone. Kernels are built without some files, and a mount that is not the
    host's root hands no controller down while a process is in it."""

    @classmethod
    def detect(cls, mountinfo: Path = Path("/proc/self/mountinfo")) -> Cgroups:
        """Read the mounts. `hybrid` means v1 controllers beside a v2 mount, whether or not v2 kept controllers.

        Under v2 a cgroup is made and removed again, since the files of limits are in no root.
        """
        controllers: dict[str, str] = {}
        unified = ""
        for line in mountinfo.read_text().splitlines():
            head, _, tail = line.partition(" - ")
            mount = head.split()[4]
            kind, _, options = tail.partition(" ")
            if kind == "cgroup2":
                unified = unified or mount
            elif kind == "cgroup":
                for option in options.rsplit(" ", 1)[-1].split(","):
                    if option.startswith("name=") or ("=" not in option and option not in ("rw", "ro", "xattr")):
                        controllers.setdefault(option, mount)
        kept: tuple[str, ...] = ()
        if unified:
            try:
                kept = tuple(Path(unified, "cgroup.controllers").read_text().split())
            except OSError:
                kept = ()
        real = any(not name.startswith("name=") for name in controllers)
        mode: Mode = "hybrid" if real and unified else "v1" if real else "v2" if unified else "none"
        files = _given_down(unified, kept) if mode == "v2" else frozenset()
        return cls(mode=mode, controllers=controllers, unified=unified, unified_controllers=kept, unified_files=files)

    @property
    def split(self) -> bool:
        """v1 is mounted and v2 still has controllers: crun refuses such a host."""
        return self.mode == "hybrid" and bool(self.unified_controllers)

    @property
    def missing(self) -> tuple[str, ...]:
        """Controllers that containers' limits need and this host does not offer. v2 has devices and freezer built in."""
        if self.mode in ("v1", "hybrid"):
            wanted = ("memory", "cpu", "cpuacct", "cpuset", "blkio", "pids", "devices", "freezer")
            return tuple(name for name in wanted if name not in self.controllers)
        return tuple(name for name, file in _UNIFIED.items() if file not in self.unified_files)

    @property
    def withheld(self) -> bool:
        """v2 has controllers here that cgroups below do not get, since processes are in the topmost one, which v2 allows the host's root alone.

        So it is where the engine runs in a container with a cgroup namespace of its own.
        """
        return self.mode == "v2" and any(name in self.unified_controllers for name in self.missing)

    def directory(self, controller: str, cgroup: str) -> Path | None:
        """The cgroup's directory in the hierarchy that has `controller`; None where no hierarchy has it."""
        if controller in self.controllers:
            return Path(self.controllers[controller] + cgroup)
        if controller in self.unified_controllers:
            return Path(self.unified + cgroup)
        return None

    @property
    def swap_accounting(self) -> bool:
        """Whether swap can be limited; kernels may be without (CONFIG_MEMCG_SWAP, swapaccount=0)."""
        if "memory" in self.controllers:
            return Path(self.controllers["memory"], "memory.memsw.limit_in_bytes").exists()
        return "memory.swap.max" in self.unified_files

    def support(self) -> Support:
        """What the hierarchies offer: the file of each limit looked for, since kernels are built without some."""

        def offers(controller: str, file: str = "", *unified: str) -> bool:
            if controller in self.controllers:
                return not file or Path(self.controllers[controller], file).exists()
            return any(name in self.unified_files for name in unified)

        return Support(
            memory=offers("memory", "", "memory.max"),
            swap=self.swap_accounting,
            reservation=offers("memory", "memory.soft_limit_in_bytes", "memory.low"),
            kernel_memory=offers("memory", "memory.kmem.limit_in_bytes")
            and _kernel(platform.release()) < _KMEM_LIMIT_GONE,
            swappiness=offers("memory", "memory.swappiness"),
            oom_kill_disable=offers("memory", "memory.oom_control"),
            shares=offers("cpu", "cpu.shares", "cpu.weight"),
            quota=offers("cpu", "cpu.cfs_quota_us", "cpu.max"),
            cpuset=offers("cpuset", "", "cpuset.cpus"),
            pids=offers("pids", "", "pids.max"),
            weight=offers("blkio", "blkio.weight", "io.weight", "io.bfq.weight"),
            usual_weight=100 if "io.bfq.weight" in self.unified_files else 20 if self.mode == "v2" else 500,
            weight_device=offers(
                "blkio", "blkio.weight_device", "io.bfq.weight"
            ),  # crun and runc know no other under v2
            throttle=offers("blkio", "blkio.throttle.read_bps_device", "io.max"),
            cpus=self._given("cpus", "/sys/devices/system/cpu/online"),
            mems=self._given("mems", "/sys/devices/system/node/online"),
        )

    def _given(self, what: str, online: str) -> str:
        """The list of processors or memory nodes that containers may be given."""
        root = self.controllers.get("cpuset", "")
        for path in (f"{root}/cpuset.effective_{what}", f"{self.unified}/cpuset.{what}.effective", online):
            try:
                return Path(path).read_text().strip()
            except OSError:
                continue
        return "0"

    def lift_quota(self, cgroup: str) -> None:
        """Take the CPU quota away, which not every runtime can. Raises OSError."""
        directory = self.directory("cpu", cgroup)
        if directory is not None:
            file, text = ("cpu.cfs_quota_us", "-1") if "cpu" in self.controllers else ("cpu.max", "max")
            (directory / file).write_text(text)

    def oom_killed(self, container_id: str, cgroup_parent: str = "") -> bool:
        """Whether the kernel killed a process of this container for its memory limit. False once the cgroup is gone."""
        directory = self.directory("memory", path(container_id, cgroup_parent))
        if directory is None:
            return False
        name = "memory.oom_control" if "memory" in self.controllers else "memory.events"
        try:
            text = (directory / name).read_text()
        except OSError:
            return False
        return any(line.startswith("oom_kill ") and line.split()[1] != "0" for line in text.splitlines())

    def roots(self) -> tuple[str, ...]:
        """Every hierarchy's mount, once."""
        mounts = {*self.controllers.values(), self.unified} - {""}
        return tuple(sorted(mounts))

    def remove(self, cgroup: str) -> None:
        """Remove what is left of a cgroup and those below it in every hierarchy. Raises OSError EBUSY while a process is in one."""
        for root in self.roots():
            _remove(root + cgroup)

    def discard(self, cgroup: str) -> None:
        """Remove a cgroup where nothing is in it or below it; elsewhere leave it. For a parent that other engines may share."""
        for root in self.roots():
            try:
                os.rmdir(root + cgroup)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.EBUSY, errno.ENOTEMPTY):
                    raise

    def children(self, parent: str = PARENT) -> frozenset[str]:
        """Names of the cgroups right below `parent` in any hierarchy: the ids of containers, living or left over."""
        names: set[str] = set()
        for root in self.roots():
            try:
                with os.scandir(root + parent) as entries:
                    names.update(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
            except FileNotFoundError:
                continue
        return frozenset(names)


_UNIFIED = {"memory": "memory.max", "io": "io.max", "cpu": "cpu.max", "cpuset": "cpuset.cpus", "pids": "pids.max"}
"""v2's controllers that limits need, and a file of a cgroup that has each. Those that tell whether processes are in the way come first."""


def _given_down(unified: str, controllers: tuple[str, ...]) -> frozenset[str]:
    """Names of the files in a cgroup right below the v2 mount, once that hands down what it can. Empty where it may not be written."""
    for name in _UNIFIED:  # one by one: the kernel takes all of a write or nothing
        try:
            if name in controllers:
                Path(unified, "cgroup.subtree_control").write_text(f"+{name}")
        except OSError as error:
            if error.errno == errno.EBUSY:  # processes are there: the rest would make every cgroup below a threaded one
                break
    trial = f"{unified}{PARENT}-{os.getpid()}"
    try:
        os.mkdir(trial)
    except OSError:
        return frozenset()
    try:
        return frozenset(os.listdir(trial))
    finally:
        os.rmdir(trial)


def _kernel(release: str) -> tuple[int, int]:
    """`6.1.0-13-amd64` as (6, 1)."""
    match = re.match(r"(\d+)\.(\d+)", release)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def path(container_id: str, cgroup_parent: str = "") -> str:
    """The cgroup of a container, absolute from the root of each hierarchy, as `linux.cgroupsPath` wants it."""
    return f"{parent(cgroup_parent)}/{container_id}"


def parent(cgroup_parent: str) -> str:
    """The cgroup that a CgroupParent means: absolute, and the engine's own when it is empty."""
    return "/" + cgroup_parent.strip("/") if cgroup_parent.strip("/") else PARENT


def _remove(directory: str) -> None:
    try:
        os.rmdir(directory)  # its files are the kernel's and in nobody's way: only what is below it is looked for
        return
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
            raise
    try:
        with os.scandir(directory) as entries:
            below = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return
    for each in below:
        _remove(each)
    try:
        os.rmdir(directory)
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
