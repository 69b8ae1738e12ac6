"""Facts about this host, read once at start, in a thread because /proc and /sys can be slow.

Not here: anything that changes while the daemon runs (except `IPv4Forwarding`, which is reported as
it was at start), and the limits of its cgroups (`runtime/cgroups.py`).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import platform
import resource
import secrets
import time
from pathlib import Path

import engine
from engine.common.facts import Host, OwnProcess
from engine.common.times import rfc3339
from engine.system.limits import open_descriptors

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
    return Host(
        id=_engine_id(root),
        name=system.nodename,
        os=system.sysname.lower(),
        machine=system.machine,
        arch=_GO_ARCHITECTURES.get(system.machine, system.machine),
        kernel=system.release,
        operating_system=_os_release().get("PRETTY_NAME", "Linux"),
        os_version=_os_release().get("VERSION_ID", ""),
        memory=_memory(),
        cpus=len(os.sched_getaffinity(0)),
        security_options=("name=seccomp,profile=builtin",) if os.path.exists("/proc/sys/kernel/seccomp") else (),
        ipv4_forwarding=_switch("/proc/sys/net/ipv4/ip_forward"),
        bridge_nf_iptables=_switch("/proc/sys/net/bridge/bridge-nf-call-iptables"),
        bridge_nf_ip6tables=_switch("/proc/sys/net/bridge/bridge-nf-call-ip6tables"),
        git_commit=os.environ.get("ENGINED_GIT_COMMIT", ""),
        build_time=rfc3339(os.stat(engine.__file__).st_mtime_ns // 1_000_000_000 * 1_000_000_000),
        python=platform.python_version(),
    )


def _engine_id(root: Path) -> str:
    """The engine's id: twelve groups of four letters, as in Docker. It is stored in ROOT."""
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


def _os_release() -> dict[str, str]:
    """os-release(5). Values are read without the shell's quoting rules."""
    for place in ("/etc/os-release", "/usr/lib/os-release"):
        if text := _text(place):
            pairs = (line.partition("=") for line in text.splitlines() if "=" in line and not line.startswith("#"))
            return {key.strip(): value.strip().strip("\"'") for key, _, value in pairs}
    return {}


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


def own_process() -> OwnProcess:
    """Read /proc/self/stat, proc_pid_stat(5). Blocking."""
    with open("/proc/self/stat", "rb") as file:
        # from field 3 on: the name may have spaces
        values = file.read().rpartition(b") ")[2].split()
    ticks = os.sysconf("SC_CLK_TCK")
    user, system, start, virtual, pages = (int(values[field - 3]) for field in (14, 15, 22, 23, 24))
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    return OwnProcess(
        cpu_seconds=(user + system) / ticks,
        descriptors=open_descriptors(),
        most_descriptors=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        resident=pages * resource.getpagesize(),
        virtual=virtual,
        started=time.time() - since_boot + start / ticks,
    )
