"""Where this host keeps its cgroups (v1, v2 or hybrid), and what the engine itself reads and removes there.

The OCI runtime makes and removes the cgroups of containers. Here is what is left: did the kernel kill for memory, sweep what a crash left.
Rules: cgroups(7); kernel documents cgroup-v1/memory.txt and cgroup-v2.rst.

Owns nothing on disk. Not here: counters (`_fast/cgroup`), limits (`containers/spec.py`).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

PARENT = "/engined"
"""Cgroup under which containers without CgroupParent live, in every hierarchy."""

Mode = Literal["v1", "v2", "hybrid", "none"]


class Cgroups(msgspec.Struct, frozen=True):
    """The hierarchies of this host. `controllers` maps each mounted v1 controller to its mount; `unified` is the v2 mount or empty."""

    mode: Mode
    controllers: Mapping[str, str]
    unified: str = ""
    unified_controllers: tuple[str, ...] = ()

    @classmethod
    def detect(cls, mountinfo: Path = Path("/proc/self/mountinfo")) -> Cgroups:
        """Read the mounts. `hybrid` means v1 controllers beside a v2 mount, whether or not v2 kept controllers."""
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
        return cls(mode=mode, controllers=controllers, unified=unified, unified_controllers=kept)

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
        return tuple(name for name in ("memory", "cpu", "cpuset", "io", "pids") if name not in self.unified_controllers)

    def directory(self, controller: str, cgroup: str) -> Path | None:
        """The cgroup's directory in the hierarchy that has `controller`; None where no hierarchy has it."""
        if controller in self.controllers:
            return Path(self.controllers[controller] + cgroup)
        if controller in self.unified_controllers:
            return Path(self.unified + cgroup)
        return None

    @property
    def swap_accounting(self) -> bool:
        """Whether swap can be limited; v1 kernels may be without (CONFIG_MEMCG_SWAP, swapaccount=0)."""
        if "memory" in self.controllers:
            return Path(self.controllers["memory"], "memory.memsw.limit_in_bytes").exists()
        return "memory" in self.unified_controllers

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


def path(container_id: str, cgroup_parent: str = "") -> str:
    """The cgroup of a container, absolute from the root of each hierarchy, as `linux.cgroupsPath` wants it."""
    parent = "/" + cgroup_parent.strip("/") if cgroup_parent.strip("/") else PARENT
    return f"{parent}/{container_id}"


def _remove(directory: str) -> None:
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
