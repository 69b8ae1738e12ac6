"""Facts about this host, read once at start and off the loop, since /proc and /sys can be slow to answer.

Not here: anything that changes while the daemon runs (`IPv4Forwarding` apart, which is told as it was at start), and
cgroups of containers.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import platform
import secrets
from pathlib import Path

import engine
from engine.wire.system import Host
from engine.wire.times import rfc3339

_GO_ARCHITECTURES = {
    "x86_64": "amd64",
    "aarch64": "arm64",
    "armv7l": "arm",
    "armv6l": "arm",
    "i386": "386",
    "i686": "386",
    "ppc64le": "ppc64le",
    "s390x": "s390x",
    "riscv64": "riscv64",
    "loongarch64": "loong64",
}


def read(root: Path) -> Host:
    """Blocking. `root` keeps the engine's id, which is made at the first start."""
    system = os.uname()
    cgroups = _Cgroups()
    return Host(
        id=_engine_id(root),
        name=system.nodename,
        os=system.sysname.lower(),
        machine=system.machine,
        arch=_GO_ARCHITECTURES.get(system.machine, system.machine),
        kernel=system.release,
        operating_system=_operating_system(),
        memory=_memory(),
        cpus=len(os.sched_getaffinity(0)),
        security_options=("seccomp",) if os.path.exists("/proc/sys/kernel/seccomp") else (),
        memory_limit=cgroups.has("memory", "memory.limit_in_bytes"),
        swap_limit=cgroups.has("memory", "memory.memsw.limit_in_bytes", swap=True),
        kernel_memory=cgroups.has_v1("memory", "memory.kmem.limit_in_bytes"),
        oom_kill_disable=cgroups.has_v1("memory", "memory.oom_control"),
        cpu_cfs_period=cgroups.has("cpu", "cpu.cfs_period_us"),
        cpu_cfs_quota=cgroups.has("cpu", "cpu.cfs_quota_us"),
        cpu_shares=cgroups.has("cpu", "cpu.shares"),
        cpu_set=cgroups.has("cpuset", "cpuset.cpus"),
        pids_limit=cgroups.has("pids", ""),
        ipv4_forwarding=_switch("/proc/sys/net/ipv4/ip_forward"),
        bridge_nf_iptables=_switch("/proc/sys/net/bridge/bridge-nf-call-iptables"),
        bridge_nf_ip6tables=_switch("/proc/sys/net/bridge/bridge-nf-call-ip6tables"),
        git_commit=os.environ.get("ENGINED_GIT_COMMIT", ""),
        build_time=rfc3339(os.stat(engine.__file__).st_mtime_ns // 1_000_000_000 * 1_000_000_000),
        python=platform.python_version(),
    )


class _Cgroups:
    """Where the controllers are: a v1 directory of their own, or the root of v2."""

    def __init__(self) -> None:
        self._v1: dict[str, str] = {}
        self._v2: set[str] = set()
        for line in _text("/proc/self/mounts").splitlines():
            _, place, kind, options, *_ = line.split(" ")
            if kind == "cgroup":
                self._v1.update(dict.fromkeys(options.split(","), place))
            elif kind == "cgroup2":
                self._v2.update(_text(f"{place}/cgroup.controllers").split())

    def has_v1(self, controller: str, file: str) -> bool:
        place = self._v1.get(controller)
        return place is not None and os.path.exists(os.path.join(place, file))

    def has(self, controller: str, file: str, *, swap: bool = False) -> bool:
        """The limit exists: as `file` of v1, or with the controller of v2 (where swap accounting needs swap in the
        kernel).
        """
        if self.has_v1(controller, file):
            return True
        return controller in self._v2 and (not swap or os.path.exists("/proc/swaps"))


def _engine_id(root: Path) -> str:
    """Twelve groups of four letters, as Docker's.

    Kept, so that two engines with different roots can be told apart for good.
    """
    place = root / "engine-id"
    known = _text(str(place)).strip()
    if known:
        return known
    letters = base64.b32encode(hashlib.sha256(secrets.token_bytes(32)).digest()[:30]).decode()
    made = ":".join(letters[at : at + 4] for at in range(0, 48, 4))
    temporary = place.with_suffix(f".{os.getpid()}")
    temporary.write_text(made + "\n")
    temporary.replace(place)
    return made


def _operating_system() -> str:
    for place in ("/etc/os-release", "/usr/lib/os-release"):
        for line in _text(place).splitlines():
            key, _, value = line.partition("=")
            if key == "PRETTY_NAME":
                return value.strip().strip("\"'")
    return "Linux"


def _memory() -> int:
    """MemTotal in bytes; /proc counts in KiB."""
    for line in _text("/proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _switch(path: str) -> bool:
    return _text(path).strip() not in ("", "0")


def _text(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(errors="replace")
    return ""
