"""This host's cgroup hierarchies (v1, v2 or hybrid), and the engine's own operations on them.

The OCI runtime makes the cgroups of containers, itself or by systemd (`scopes.py`). Here: the
limits that the kernel supports, OOM kills, the processes of a cgroup, and removal, also after a
crash.
Rules: cgroups(7); kernel documents cgroup-v1/memory.txt and cgroup-v2.rst.

Owns nothing on disk. Not here: counters (`_fast/cgroup`), limits (`containers/spec.py`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import posixpath
import re
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from engine.runtime import scopes

PARENT = "/engined"
"""Parent cgroup of containers without CgroupParent, in every hierarchy."""

Mode = Literal["v1", "v2", "hybrid", "none"]


MOST_CPUS = 8192
"""Largest CONFIG_NR_CPUS of any kernel. The limit of memory nodes is lower."""

_KMEM_LIMIT_GONE = (5, 16)
"""From this kernel on, writing memory.kmem.limit_in_bytes has no effect."""


_KILL_ROUNDS, _KILL_PAUSE = 20, 0.002
"""Looks at a cgroup whose processes are killed, and seconds between them."""


class Support(msgspec.Struct, frozen=True, kw_only=True):
    """The limits that this host's kernel enforces, and its processors and memory nodes."""

    unified: bool = False
    """cgroup v2 alone, where each container has a cgroup namespace of its own by default."""
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
    weighs_by_bfq: bool = False
    """The engine sets the weight, not the runtime (`Cgroups.weighs_by_bfq`)."""
    usual_weight: int = 500
    """The default BlkioWeight of a cgroup."""
    weight_device: bool = True
    throttle: bool = True
    cpus: str = ""
    """Formats a list as the kernel does: `0-3,5`."""
    mems: str = ""


def numbers(text: str, most: int = MOST_CPUS) -> frozenset[int]:
    """The members of a list such as `0-3,5`.

    Raises ValueError for another form, and for numbers of `most` or more.
    """
    found: set[int] = set()
    words = text.strip().split(",") if text.strip() else []
    if len(words) > _MOST_RANGES:
        raise ValueError(f"more than {_MOST_RANGES} entries")
    for word in words:
        match = _RANGE.fullmatch(word)
        if match is None:
            raise ValueError(f"{word[:32]!r} is neither a number nor a range")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"{word!r} ends before it begins")
        if last >= most:
            raise ValueError(f"{word!r} is not within 0-{most - 1}")
        found.update(range(first, last + 1))
    return frozenset(found)


_MOST_RANGES = 1024
_RANGE = re.compile(r"(\d{1,10})(?:-(\d{1,10}))?", re.ASCII)


_REORDERED = {"net_prio,net_cls": ("net_cls,net_prio",), "cpuacct,cpu": ("cpu,cpuacct",)}
"""The usual names of directories, where they are not the kernel's names of the hierarchies."""

_LIFTED = {
    "cpu": (("cpu.cfs_quota_us", "-1"), ("cpu.max", "max")),
    "pids": (("pids.max", "max"), ("pids.max", "max")),
}
"""The file of a limit and its text for none, under v1 and under v2."""

_DEVICE_LIMITS = {
    "blkio_weight_device": ("blkio.weight_device", "io.bfq.weight", "default"),
    "blkio_device_read_bps": ("blkio.throttle.read_bps_device", "io.max", "rbps=max"),
    "blkio_device_write_bps": ("blkio.throttle.write_bps_device", "io.max", "wbps=max"),
    "blkio_device_read_iops": ("blkio.throttle.read_iops_device", "io.max", "riops=max"),
    "blkio_device_write_iops": ("blkio.throttle.write_iops_device", "io.max", "wiops=max"),
}
"""The file of a limit under v1 and under v2, and the text that removes it under v2."""


class Cgroups(msgspec.Struct, frozen=True):
    """The hierarchies of this host.

    `controllers` maps each mounted v1 controller to its mount; `unified` is the v2 mount or empty.
    """

    mode: Mode
    controllers: Mapping[str, str]
    unified: str = ""
    unified_controllers: tuple[str, ...] = ()
    block_files: frozenset[str] = frozenset()
    """Names of the files of a non-root cgroup in the v1 blkio hierarchy. The root cgroup lacks some
    of them, such as the weight of the BFQ scheduler.
    """
    unified_files: frozenset[str] = frozenset()
    """Names of the files of a cgroup directly below the v2 mount, on hosts with v2 only.

    Some kernels lack some of them. If the mount does not show the host's root cgroup, controllers
    are delegated only while no process is in the topmost cgroup.
    """

    @classmethod
    def detect(cls, mountinfo: Path = Path("/proc/self/mountinfo")) -> Cgroups:
        """Read the mounts. `hybrid` means v1 controllers beside a v2 mount, with or without
        controllers on v2.

        Under v2 a cgroup is created and removed for this, because the root has no limit files.
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
        block = _files_below(controllers["blkio"]) if "blkio" in controllers else frozenset()
        return cls(
            mode=mode,
            controllers=controllers,
            unified=unified,
            unified_controllers=kept,
            block_files=block,
            unified_files=files,
        )

    @property
    def split(self) -> bool:
        """True if v1 is mounted and v2 still has controllers: crun refuses such a host."""
        return self.mode == "hybrid" and bool(self.unified_controllers)

    @property
    def missing(self) -> tuple[str, ...]:
        """Controllers that container limits need and this host lacks. In v2, devices and freezer
        are not controllers but always present.
        """
        if self.mode in ("v1", "hybrid"):
            wanted = ("memory", "cpu", "cpuacct", "cpuset", "blkio", "pids", "devices", "freezer")
            return tuple(name for name in wanted if name not in self.controllers)
        return tuple(name for name, file in _UNIFIED.items() if file not in self.unified_files)

    @property
    def withheld(self) -> bool:
        """True if v2 controllers are not delegated because processes are in the topmost cgroup,
        which v2 allows in the host's root alone.

        This happens when the engine runs in a container with a cgroup namespace of its own.
        """
        return self.mode == "v2" and any(name in self.unified_controllers for name in self.missing)

    def directory(self, controller: str, cgroup: str) -> Path | None:
        """The cgroup's directory in the hierarchy that has `controller`; None where no hierarchy
        has it.
        """
        if controller in self.controllers:
            return Path(self.controllers[controller] + cgroup)
        if controller in self.unified_controllers:
            return Path(self.unified + cgroup)
        return None

    @property
    def swap_accounting(self) -> bool:
        """True if swap can be limited; kernels may lack it (CONFIG_MEMCG_SWAP, swapaccount=0)."""
        if "memory" in self.controllers:
            return Path(self.controllers["memory"], "memory.memsw.limit_in_bytes").exists()
        return "memory.swap.max" in self.unified_files

    def support(self) -> Support:
        """The supported limits. Each limit's file is checked, because some kernels lack some."""

        def offers(controller: str, file: str = "", *unified: str) -> bool:
            if controller in self.controllers:
                return not file or Path(self.controllers[controller], file).exists()
            return any(name in self.unified_files for name in unified)

        return Support(
            unified=self.mode == "v2",
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
            weight=bool({"blkio.weight", _BFQ_WEIGHT} & self.block_files)
            or offers("", "", "io.weight", "io.bfq.weight"),
            weighs_by_bfq=self.weighs_by_bfq,
            usual_weight=self._usual_weight,
            # crun and runc write only this file under v2; crun 1.8 writes no BFQ file under v1
            weight_device="blkio.weight_device" in self.block_files or offers("", "", "io.bfq.weight"),
            throttle=offers("blkio", "blkio.throttle.read_bps_device", "io.max"),
            cpus=self._given("cpus", "/sys/devices/system/cpu/online"),
            mems=self._given("mems", "/sys/devices/system/node/online"),
        )

    def _given(self, what: str, online: str) -> str:
        """The list of processors or memory nodes that containers may use."""
        root = self.controllers.get("cpuset", "")
        for path in (f"{root}/cpuset.effective_{what}", f"{self.unified}/cpuset.{what}.effective", online):
            try:
                return Path(path).read_text().strip()
            except OSError:
                continue
        return "0"

    @property
    def _usual_weight(self) -> int:
        """The default BlkioWeight of a cgroup."""
        if self.weighs_by_bfq or "io.bfq.weight" in self.unified_files:
            return 100
        return 20 if self.mode == "v2" else 500

    @property
    def weighs_by_bfq(self) -> bool:
        """True if the block I/O weight is that of BFQ under cgroup v1. crun 1.8 cannot set it, so
        the engine does (`set_weight`).
        """
        return _BFQ_WEIGHT in self.block_files and "blkio.weight" not in self.block_files

    def set_weight(self, cgroup: str, weight: int) -> None:
        """Set the block I/O weight of a cgroup where `weighs_by_bfq`. Raises OSError."""
        Path(f"{self.controllers['blkio']}{cgroup}/{_BFQ_WEIGHT}").write_text(str(weight))

    def lift(self, cgroup: str, controller: Literal["cpu", "pids"]) -> None:
        """Remove the CPU quota or the limit of processes, which not every runtime can. Raises
        OSError.
        """
        directory = self.directory(controller, cgroup)
        if directory is not None:
            v1, v2 = _LIFTED[controller]
            file, text = v1 if controller in self.controllers else v2
            (directory / file).write_text(text)

    def lift_device(self, cgroup: str, limit: str, major: int, minor: int) -> None:
        """Remove a limit of a block device, `limit` as HostConfig names it. A rate of 0 means that
        under v1; under v2 the runtimes have no number for it. Raises OSError.
        """
        file_v1, file_v2, none_v2 = _DEVICE_LIMITS[limit]
        v1 = "blkio" in self.controllers
        directory = self.directory("blkio" if v1 else "io", cgroup)
        if directory is not None:
            (directory / (file_v1 if v1 else file_v2)).write_text(f"{major}:{minor} {0 if v1 else none_v2}")

    def oom_killed(self, cgroup: str) -> bool:
        """True if the kernel killed a process of this cgroup for its memory limit.

        False once the cgroup is gone.
        """
        directory = self.directory("memory", cgroup)
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

    def names(self, membership: Path = Path("/proc/self/cgroup")) -> list[str]:
        """The names that the v1 hierarchies can have below /sys/fs/cgroup of a container.

        crun takes them from /proc/self/cgroup, others from the mounts. The kernel's list is read at
        each call: a hierarchy may have been mounted since `detect`.
        """
        found = {posixpath.basename(mount) for mount in self.controllers.values()}
        for line in membership.read_text().splitlines():
            controllers = line.split(":", 2)[1]
            name = controllers.rpartition("name=")[2]
            found |= {name, *_REORDERED.get(name, ())}
        return sorted(found - {""})

    def remove(self, cgroup: str) -> None:
        """Remove a cgroup and those below it in every hierarchy, as far as they still exist. Raises
        OSError EBUSY while a process is in one.

        Empty parents that `claim` has marked are removed too.
        """
        for root in self.roots():
            _remove(root + cgroup)
        if not cgroup.startswith(f"{PARENT}/"):
            for root in self.roots():
                _remove_claimed(root, cgroup)

    def missing_above(self, cgroup: str) -> list[str]:
        """Directories above the cgroup that do not exist, in every hierarchy. Blocks on files."""
        above = [cgroup[:end] for end, letter in enumerate(cgroup) if letter == "/" and end]
        return [root + each for root in self.roots() for each in above if not os.path.isdir(root + each)]

    def claim(self, directories: Iterable[str]) -> None:
        """Mark directories that the runtime has created for the engine, so that `remove` deletes
        them. Blocks on files.
        """
        for each in directories:
            # the directory was not created, or has no extended attributes
            with contextlib.suppress(OSError):
                os.setxattr(each, _MARK, b"1")

    def exists(self, cgroup: str) -> bool:
        """Returns True if any hierarchy has this cgroup."""
        return any(os.path.isdir(root + cgroup) for root in self.roots())

    def hold(self) -> ParentHold:
        """Create `PARENT`, and keep it from removal by other engines until `release`. Blocks on
        files, and for a moment on an engine that ends.
        """
        return ParentHold(self.roots())

    def processes(self, cgroup: str) -> list[int]:
        """Pids in the cgroup and in those below it, ascending; empty when the cgroup is gone.

        Blocks on files.
        """
        for controller in ("pids", "memory", "cpu", "cpuacct", "devices", "freezer", "name=systemd"):
            directory = self.directory(controller, cgroup)
            if directory is not None and directory.is_dir():
                return sorted(set(_processes(str(directory))))
        return sorted(set(_processes(self.unified + cgroup))) if self.unified else []

    def kill(self, cgroup: str) -> None:
        """Kill all processes in the cgroup and in those below it, as far as they do not fork
        faster. Blocks on files.
        """
        if self.mode == "v2":
            try:
                Path(f"{self.unified}{cgroup}/cgroup.kill").write_text("1")
                return
            except OSError as error:
                if error.errno == errno.ENODEV:  # it was removed after the file was opened
                    return
                if error.errno != errno.ENOENT:  # it is gone, or the kernel is older than 5.14
                    raise
        for _ in range(_KILL_ROUNDS):
            found = self.processes(cgroup)
            if not found:
                return
            with contextlib.ExitStack() as opened:
                descriptors = {pid: each for pid in found if (each := _opened(pid, opened)) >= 0}
                # read again: a pid of the first list may have been another process's when it was
                # opened
                for pid in self.processes(cgroup):
                    if pid in descriptors:
                        with contextlib.suppress(ProcessLookupError):
                            signal.pidfd_send_signal(descriptors[pid], signal.SIGKILL)
            time.sleep(_KILL_PAUSE)

    def children(self, parent: str = PARENT) -> frozenset[str]:
        """Ids of the containers that have a cgroup directly below `parent` in any hierarchy: they
        are running or have left it behind. Cgroups of others are given by their names.
        """
        names: set[str] = set()
        for root in self.roots():
            try:
                with os.scandir(root + parent) as entries:
                    found = (entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
                    names.update(map(scopes.container_id, found))
            except FileNotFoundError:
                continue
        return frozenset(names)


_ATTEMPTS = 100
"""At a parent that other engines remove."""


class ParentHold:
    """Keeps `PARENT`, which the engines of a host share, while one of them may start a container.

    Otherwise an engine that ends could remove it while the runtime of another one makes a cgroup in
    it. Each engine has a shared lock (flock(2)) on the directory, and the last one removes it.
    """

    def __init__(self, roots: tuple[str, ...]) -> None:
        self._directories = [root + PARENT for root in roots]
        self._fd = -1
        # A hierarchy may be read-only or gone: the first container of this engine reports that.
        with contextlib.suppress(OSError):
            for _ in range(_ATTEMPTS):
                if roots and self._fd < 0:
                    self._try()

    def _try(self) -> None:
        try:
            for each in self._directories:
                os.makedirs(each, exist_ok=True)
            fd = os.open(self._directories[0], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, FileExistsError):
            return  # removed by an engine that ends, perhaps while makedirs looked
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            if all(map(os.path.isdir, self._directories)) and os.path.samestat(
                os.fstat(fd), os.stat(self._directories[0])
            ):
                self._fd, fd = fd, -1
        except FileNotFoundError:
            pass
        finally:
            if fd >= 0:
                os.close(fd)

    def release(self) -> None:
        """Remove the parent if it is empty and no other engine holds it. Idempotent. Blocks on
        files.
        """
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The one with the lock goes last: until then a new engine waits, and does not count on
            # the others that are about to go.
            for each in reversed(self._directories):
                with contextlib.suppress(OSError):  # containers are in it, or it is removed already
                    os.rmdir(each)
        except BlockingIOError:
            pass  # another engine's
        finally:
            os.close(fd)

    def __enter__(self) -> ParentHold:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


_BFQ_WEIGHT = "blkio.bfq.weight"

_UNIFIED = {"memory": "memory.max", "io": "io.max", "cpu": "cpu.max", "cpuset": "cpuset.cpus", "pids": "pids.max"}
"""v2's controllers that limits need, each with one of its files.

The first ones cannot be delegated while processes are in the cgroup, which is how that is noticed.
"""


def _given_down(unified: str, controllers: tuple[str, ...]) -> frozenset[str]:
    """Names of the files in a cgroup directly below the v2 mount, after delegating all possible
    controllers. Empty if the mount is not writable.
    """
    for name in _UNIFIED:  # one by one, because the kernel refuses a write as a whole
        try:
            if name in controllers:
                Path(unified, "cgroup.subtree_control").write_text(f"+{name}")
        except OSError as error:
            # processes are in the cgroup; delegating the others would make its children threaded
            if error.errno == errno.EBUSY:
                break
    return _files_below(unified)


def _files_below(hierarchy: str) -> frozenset[str]:
    """Names of the files in a cgroup directly below the root of a hierarchy. Empty if none can be
    created.
    """
    trial = f"{hierarchy}{PARENT}-{os.getpid()}"
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


def path(container_id: str, cgroup_parent: str = "", driver: str = "cgroupfs") -> str:
    """The cgroup of a container, absolute from the root of each hierarchy."""
    name = scopes.scope(container_id) if driver == "systemd" else container_id
    return f"{parent(cgroup_parent, driver)}/{name}"


def parent(cgroup_parent: str, driver: str = "cgroupfs") -> str:
    """The cgroup path of a CgroupParent: absolute, and the driver's own when it is empty."""
    if driver == "systemd":
        return scopes.directory(cgroup_parent or scopes.SLICE)
    return "/" + cgroup_parent.strip("/") if cgroup_parent.strip("/") else PARENT


def oci_path(container_id: str, cgroup_parent: str, driver: str) -> str:
    """`linux.cgroupsPath` of a container."""
    if driver == "systemd":
        return scopes.oci_path(container_id, cgroup_parent or scopes.SLICE)
    return path(container_id, cgroup_parent)


def of_oci_path(container_id: str, oci_path: str) -> str:
    """The cgroup of a container whose configuration has this `linux.cgroupsPath`."""
    if oci_path.count(":") == 2 and not oci_path.startswith("/"):
        return path(container_id, oci_path.partition(":")[0], "systemd")
    return oci_path or path(container_id)


_MARK = "trusted.engined"


def _remove_claimed(root: str, cgroup: str) -> None:
    while cgroup := cgroup.rpartition("/")[0]:
        try:
            os.getxattr(root + cgroup, _MARK)
            os.rmdir(root + cgroup)
        except OSError:  # not marked by the engine, in use, or already removed
            return


def _opened(pid: int, opened: contextlib.ExitStack) -> int:
    """A pidfd, closed by `opened`; -1 when the process is gone."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return -1
    opened.callback(os.close, descriptor)
    return descriptor


def _processes(directory: str) -> Iterator[int]:
    for place, _, files in os.walk(directory):
        if "cgroup.procs" in files:
            try:
                with open(os.path.join(place, "cgroup.procs")) as file:
                    yield from (int(line) for line in file if line.strip() not in ("", "0"))
            except OSError:
                # removed meanwhile, or a threaded v2 cgroup (EOPNOTSUPP), whose processes are
                # listed in its parent
                continue


def _remove(directory: str) -> None:
    try:
        # The kernel's files in it do not block rmdir(2). Only directories were listed.
        os.rmdir(directory)
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
