"""`engined check`: which features the host lacks, which limits are too low for N containers, and
the command that fixes each.

Reads settings, makes links and rules in a network namespace of its own, and runs one small
container. Changes nothing on the host. Not here: what the engine does about the same things at its
start (it enables forwarding and chooses the runtime).
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from engine import config
from engine.config import Config
from engine.errors import EngineError, words
from engine.logs import drivers
from engine.manager import versions
from engine.networks import firewall
from engine.networks.bridge import trunks
from engine.networks.overlay import driver as overlay
from engine.networks.sandboxes import BRIDGE_PORTS
from engine.runtime import init as found_init
from engine.runtime import scopes
from engine.runtime.cgroups import Cgroups
from engine.runtime.oci import Runtime
from engine.system import calls, detached_mounts, links, namespaces, netfilter, seccomp

REMAPPING = (5, 19)
"""Oldest kernel with overlays of ID-mapped mounts."""

PUBLISHED = 4
"""Published ports per container that the host should have room for."""
DESCRIPTORS = 8 + PUBLISHED
"""Descriptors that daemon and monitor each hold for a running container: namespace, pidfd, stdio,
log, ports, and a margin.
"""
TASKS = 32
"""Processes and threads per container that the host should have room for."""
MOUNTS = 2
"""Mounts per container in the engine's mount namespace: its root, and a volume that is mounted."""
SPARE_DESCRIPTORS, SPARE_TASKS, SPARE_MOUNTS, SPARE_NAMESPACES = 512, 8192, 4096, 128
CONNECTIONS = 128
WATCHES = 64
LEAST_BACKLOG = 1000
"""The kernel's default."""
CONTAINER_KIB = 390
"""Memory of the kernel for an idle container on a bridge, without the tables of its memory cgroup
(docs/DENSITY.md).
"""
FILE_SYSTEMS = 8
"""File systems of its own that a container has: 7 with cgroup v2."""
SHARED_TABLES = (6, 7)
"""Oldest kernel whose memory cgroups have a block of 1 KiB for 64 file systems; before, each has 8
bytes for each of them, in one piece.
"""
NEW_ROOT = (7, 0), (1, 29, 1)
"""Oldest kernel and crun whose start does not look at every process of the host (pivot_root(2))."""


class Finding(NamedTuple):
    """One row. Where `ok` is False, `fix` says what to do."""

    subject: str
    ok: bool
    text: str
    fix: str = ""


def main(containers: int) -> int:
    """Print a row per subject.

    Returns the exit status: 1 if anything is missing or too small, else 0.
    """
    rows = list(findings(containers))
    try:
        _print(rows, containers)
    except BrokenPipeError:  # `engined check | head`
        # The interpreter flushes standard output once more at exit; that must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1 if any(not row.ok for row in rows) else 0


def configuration(file: str) -> int:
    """Print what becomes of each key of a configuration file, as `engined serve` would take it.

    Returns the exit status: 1 if the engine would not start with it, else 0.
    """
    try:
        rows = config.verdicts(file)
        for row in rows:
            print(f"{row.key}: {row.kind}{f' ({row.why})' if row.why else ''}")
        drivers.check_daemon(config.Source({}, file).load().config)
    except (ValueError, EngineError) as error:
        print(f"engined: {error}", file=sys.stderr)
        return 1
    print("configuration OK")
    return 0


def _print(rows: list[Finding], containers: int) -> None:
    width = max(len(row.subject) for row in rows)
    for row in rows:
        print(f"{'ok  ' if row.ok else 'FAIL'}  {row.subject:{width}}  {row.text}")
        if not row.ok:
            print(f"      {'':{width}}  fix: {row.fix}")
    short = sum(not row.ok for row in rows)
    print(
        f"{short} of {len(rows)} checks failed for {containers} containers"
        if short
        else f"ready for {containers} containers"
    )
    sys.stdout.flush()


def findings(containers: int) -> Iterator[Finding]:
    """Every row, for that many containers running at once."""
    yield Finding("root", os.geteuid() == 0, f"running as uid {os.geteuid()}", "run engined as root")
    yield kernel(platform.release())
    if os.geteuid() == 0:
        yield system_calls(calls.missing())
    yield file_system("overlay")
    yield from control_groups(Cgroups.detect())
    detected = _runtime()
    yield detected if isinstance(detected, Finding) else runtime(detected)
    yield init()
    yield library(
        "libseccomp",
        seccomp.available(),
        "each start compiles its seccomp filter, which takes about 12 ms",
        "apt install libseccomp2",
    )
    yield library(
        "libnftables", netfilter.available(), "containers cannot reach other hosts", "apt install libnftables1"
    )
    if os.geteuid() == 0:
        yield attempt("bridge and veth", _try_links, "modprobe -a bridge veth")
        if netfilter.available():
            yield attempt("nftables NAT", _try_nat, "modprobe -a nf_tables nft_chain_nat nft_masq nft_fib_inet")
            accepting = firewall.accepting(_configured().firewall_mark)
            yield forwarding(firewall.dropping(accepting, firewall.programs()), accepting)
        yield swarm_networks(overlay.features())
        yield remapping(platform.release(), _root())
    yield etcd(versions.found())
    yield ports(containers, shared=_configured().bridge_trunks)
    yield ephemeral_ports(containers)
    yield open_files(containers, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    yield kernel_memory(containers, Cgroups.detect().mode, platform.release(), _numa_nodes())
    yield every_namespace(containers)
    for name in ("net.ipv4.neigh.default.gc_thresh3", "net.ipv6.neigh.default.gc_thresh3"):
        yield from neighbours(name)
    for subject, name, needed in settings(containers):
        row = setting(subject, name, needed)
        if row is not None:
            yield row


def _configured() -> Config:
    """The configuration that `engined serve` would read by itself."""
    with contextlib.suppress(ValueError):
        return config.Source({}, config.default_file()).load().config
    return Config()


def _root() -> Path:
    """Its directory of images, or the one above that exists."""
    root = Path(config.DEFAULT_ROOT)
    with contextlib.suppress(ValueError):
        root = config.Source({}, config.default_file()).load().config.root
    return next(each for each in (root, *root.absolute().parents) if each.is_dir())


def remapping(release: str, directory: Path) -> Finding:
    """Looks for what `--userns-remap` needs; an engine without that option does not."""
    found = _version(release)
    why = ""
    if found < REMAPPING:
        why = f"overlays of ID-mapped mounts need Linux {'.'.join(map(str, REMAPPING))}"
    else:
        try:
            detached_mounts.try_mapping(directory)
        except (EngineError, OSError) as error:
            why = f"{directory}: {words(error)}"
    return Finding("user namespaces", True, f"--userns-remap is refused: {why}" if why else "--userns-remap works")


def _version(release: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", release)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def kernel(release: str) -> Finding:
    wanted = ".".join(map(str, calls.KERNEL))
    return Finding(
        *("kernel", _version(release) >= calls.KERNEL, f"{release} ({wanted} or newer)"),
        f"boot a kernel of {wanted} or newer",
    )


def system_calls(missing: Iterable[calls.Call]) -> Finding:
    """Those that this host lacks, for its kernel or for the seccomp filter that the engine is
    in.
    """
    needed = [call.name for call in missing]
    without = [call.use for call in calls.CALLS if call.use and call.name in needed]
    text = f"missing or denied: {', '.join(needed)}" if needed else "all"
    if without:
        text += f"; no {', '.join(without)}"
    return Finding("system calls", not needed, text, calls.FIX)


def file_system(name: str, known: Path = Path("/proc/filesystems"), modules: Path = Path("/lib/modules")) -> Finding:
    """Checks that the kernel has a file system, or a module that mount(2) loads."""
    built_in = any(line.split()[-1] == name for line in known.read_text().splitlines() if line.strip())
    loadable = any((modules / platform.release()).glob(f"kernel/fs/{name}*/{name}*.ko*"))
    text = "in the kernel" if built_in else "available as a module" if loadable else "not in this kernel"
    return Finding(f"{name} file system", built_in or loadable, text, f"modprobe {name}, or boot a kernel that has it")


def control_groups(hierarchies: Cgroups, known: Path = Path("/proc/cgroups")) -> Iterator[Finding]:
    """The hierarchies and the controllers that limits need."""
    fix = "mount cgroup2 at /sys/fs/cgroup, or boot with systemd.unified_cgroup_hierarchy=1"
    yield Finding("cgroups", hierarchies.mode != "none", hierarchies.mode, fix)
    if hierarchies.mode != "none":
        missing = ", ".join(hierarchies.missing)
        if off := [name for name in hierarchies.missing if name in _disabled(known)]:
            names = ",".join(off)
            fix = f"boot without cgroup_disable={names}, or with cgroup_enable={names} if it is off by default"
        elif hierarchies.withheld:
            fix = (
                f"move the processes in {hierarchies.unified}/cgroup.procs into a child cgroup: "
                "cgroup v2 limits no children of a cgroup that has processes itself"
            )
        elif hierarchies.mode == "v2":
            fix = "write +NAME to cgroup.subtree_control of each parent cgroup, for each missing controller"
        else:
            fix = "mount -t cgroup -o NAME cgroup /sys/fs/cgroup/NAME, for each missing controller"
        yield Finding("cgroup controllers", not missing, f"missing: {missing}" if missing else "all", fix)
        # dockerd's driver there; containers run without it, but systemd does not know of them
        wanted = hierarchies.mode == "v2" and scopes.BOOTED.is_dir() and scopes.lacks()
        driver = scopes.driver((), hierarchies.mode)
        text = driver + (f"; {wanted}" if wanted else "")
        yield Finding("cgroup driver", not wanted, text, "apt install dbus, or systemctl start dbus.socket")


def _disabled(known: Path) -> set[str]:
    """Controllers that the kernel has and does not offer, cgroups(7); `io` is `blkio` there."""
    try:
        rows = [line.split() for line in known.read_text().splitlines() if not line.startswith("#")]
    except OSError:
        return set()
    return {"io" if row[0] == "blkio" else row[0] for row in rows if len(row) == 4 and row[3] == "0"}


def _runtime() -> Runtime | Finding:
    """Run a real container with each candidate until one works."""
    with tempfile.TemporaryDirectory(prefix="engined-check-") as directory:
        try:
            return Runtime.probe("", Path(directory))
        except EngineError as error:
            return Finding("runtime", False, error.message, "apt install crun")


def runtime(found: Runtime, release: str = platform.release()) -> Finding:
    """Its version, and whether a start takes longer with each process of the host."""
    linux, crun = NEW_ROOT
    version = tuple(map(int, re.findall(r"\d+", found.version)[:3]))
    text = f"{found.path} {found.version} ({found.reason})"
    if found.implementation != "crun" or version < crun or _version(release) < linux:
        text += (
            "; a start looks at every process of the host, but not with "
            f"Linux {'.'.join(map(str, linux))} and crun {'.'.join(map(str, crun))}"
        )
    return Finding("runtime", True, text)


def init() -> Finding:
    """Looks for a program that HostConfig.Init puts before a container's own."""
    try:
        return Finding("init", True, found_init.program())
    except EngineError:
        return Finding("init", False, "`docker run --init` is refused", "apt install tini")


def etcd(output: str) -> Finding:
    """The program that managers of swarms need. A host without it can be a worker."""
    try:
        version = ".".join(map(str, versions.check(output))) if output else ""
    except EngineError as error:
        return Finding(
            "etcd", False, error.message, "install another version of etcd (Debian: apt install etcd-server)"
        )
    missing = versions.missing_packages()
    if not output:
        return Finding("etcd", True, "not installed: only managers of swarms need it (apt install etcd-server)")
    if missing:
        text = f"{version}; managers of swarms also need the Python packages {', '.join(missing)}"
        return Finding("etcd", True, f"{text} (pip install engined[swarm])")
    return Finding("etcd", True, f"{version}: this host can manage a swarm")


def library(name: str, there: bool, without: str, fix: str) -> Finding:
    return Finding(name, there, "found" if there else f"not installed: {without}", fix)


def attempt(subject: str, action: Callable[[], None], fix: str) -> Finding:
    """Tries `action` in a new network namespace, in a thread of its own."""
    failures: list[str] = []

    def body() -> None:
        try:
            with namespaces.new_network() as descriptor:
                action()
            os.close(descriptor)
        except (OSError, netfilter.NetfilterError) as error:
            failures.append(words(error))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return Finding(subject, not failures, failures[0] if failures else "works", fix)


def _try_links() -> None:
    links.create("check0", "bridge")
    links.create("check1", "veth", peer="check2")


def _try_nat() -> None:
    netfilter.run("""
        table inet check {
            map ports { type inet_proto . inet_service : ipv4_addr . inet_service; }
            set subnets { type ipv4_addr . ifname; flags interval; }
            chain out {
                type nat hook postrouting priority srcnat;
                ct status dnat ip saddr . oifname @subnets masquerade
            }
            chain in {
                type nat hook prerouting priority dstnat;
                fib daddr type local dnat ip to meta l4proto . th dport map @ports
            }
        }
        """)


def swarm_networks(features: Collection[str]) -> Finding:
    """What networks of a swarm can do on this host. A host outside of a swarm needs none of it."""
    if "overlay" not in features:
        return Finding("swarm networks", True, "none: this kernel has no VXLAN (modprobe vxlan)")
    egress = "are seen" if "egress" in features else "are hidden, as there is no nftables egress hook (Linux 5.16)"
    encrypted = "encryption works" if "esp" in features else "no encryption, as there is no ESP with AES-GCM (esp4)"
    text = f"work; client addresses at published ports {egress}; {encrypted}"
    return Finding("swarm networks", True, text)


def forwarding(found: Iterable[firewall.Chain], accept: str) -> Finding:
    """Chains of nftables that drop forwarded packets, and that the engine leaves alone."""
    chains = [chain for chain in found if chain.table != "firewalld"]
    text = "; ".join(f"chain {chain.name} of table {chain.family} {chain.table} drops" for chain in chains)
    fix = "; ".join(chain.advice(accept).partition("add: ")[2] for chain in chains)
    return Finding("forwarding", not chains, text or "no chain drops what containers send", fix)


def ports(containers: int, *, shared: bool) -> Finding:
    """The kernel's limit of ports on one bridge, which containers share or not."""
    most = trunks.PORTS + trunks.TRUNKS * trunks.LEAVES if shared else BRIDGE_PORTS
    text = f"{containers} containers on the default bridge, which has {BRIDGE_PORTS} ports"
    return Finding(
        "bridge ports",
        containers <= most,
        f"{text}: those beyond {trunks.PORTS} share some" if shared else text,
        f"spread the containers over {-(-containers // most)} networks, or use NetworkMode host or none",
    )


def ephemeral_ports(containers: int, range_: Path = Path("/proc/sys/net/ipv4/ip_local_port_range")) -> Finding:
    """Ports for publishing without a given host port; the host's own connections use them too."""
    wanted = containers * PUBLISHED + 1024
    low, high = map(int, range_.read_text().split())
    name = "net.ipv4.ip_local_port_range"
    return Finding(
        "ephemeral ports",
        high - low + 1 >= wanted,
        f"{name} = {low} {high}: {high - low + 1} (wanted {wanted})",
        f'sysctl -w {name}="{max(1024, 61000 - wanted)} 60999", and in /etc/sysctl.d; '
        "if that is not enough, publish with given host ports",
    )


def open_files(containers: int, hard: int) -> Finding:
    """RLIMIT_NOFILE of this process, as the engine would inherit it.

    Starts are refused when it is nearly reached (`system/limits.py`).
    """
    wanted = containers * DESCRIPTORS + SPARE_DESCRIPTORS
    enough = hard == resource.RLIM_INFINITY or hard >= wanted
    have = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    return Finding(
        "open files", enough, f"{have} (wanted {wanted})", f"LimitNOFILE={wanted} in the unit, or ulimit -Hn {wanted}"
    )


def kernel_memory(containers: int, mode: str, release: str, nodes: int, known: Path = Path("/proc/meminfo")) -> Finding:
    """The memory that the kernel needs for so many idle containers, where all begin on a host that
    has just booted. `nodes`: NUMA nodes.

    An estimate: each memory cgroup has a table of all file systems, and so of all containers.
    """
    systems = containers * (FILE_SYSTEMS - (mode == "v2"))
    table = systems // 64 * nodes if _version(release) >= SHARED_TABLES else systems * 8 * nodes // 1024
    wanted = containers * (CONTAINER_KIB + table) // 1024
    available = int(re.findall(r"MemAvailable:\s+(\d+)", known.read_text())[0]) // 1024
    return Finding(
        "kernel memory",
        available >= wanted,
        f"{available} MiB available (estimate for idle containers: {wanted} MiB, {CONTAINER_KIB + table} KiB each)",
        "more memory, or more hosts: with half of the containers, each needs less",
    )


def _numa_nodes(known: Path = Path("/sys/devices/system/node")) -> int:
    return max(1, len([*known.glob("node[0-9]*")]))


def every_namespace(containers: int, known: Path = Path("/proc/sys/user")) -> Finding:
    """The least of the limits of namespaces of the kinds that each container has
    (namespaces(7)).
    """
    wanted = containers + SPARE_NAMESPACES
    found = [
        (int(path.read_text()), path.name) for kind in _KINDS if (path := known / f"max_{kind}_namespaces").exists()
    ]
    least, name = min(found, default=(wanted, "none"))
    short = [name for value, name in found if value < wanted]
    fix = "; ".join(f"sysctl -w user.{name}={wanted}" for name in short)
    return Finding("namespaces", not short, f"user.{name} = {least} (wanted {wanted})", f"{fix}, and in /etc/sysctl.d")


_KINDS = ("cgroup", "ipc", "mnt", "net", "pid", "uts")


def neighbours(name: str, root: Path = Path("/proc/sys")) -> Iterator[Finding]:
    """A note: what the number of containers has no part in, but what they do has. No row if the
    kernel has no such setting.
    """
    with contextlib.suppress(OSError):
        value = root.joinpath(*name.split(".")).read_text().strip()
        text = f"{name} = {value}: counts containers that talk to each other on one network, not their gateways"
        yield Finding("IPv6 neighbours" if "ipv6" in name else "neighbours", True, text)


def settings(containers: int) -> tuple[tuple[str, str, int], ...]:
    """(subject, sysctl, least value) of each limit that the number of containers may reach."""
    # A frame to all of a network comes to the queue of one CPU once for each container.
    backlog = max(LEAST_BACKLOG, 2 * containers)
    return (
        ("process ids", "kernel.pid_max", containers * TASKS + SPARE_TASKS),
        ("threads", "kernel.threads-max", containers * TASKS + SPARE_TASKS),
        ("pseudo terminals", "kernel.pty.max", containers + 1024),
        ("open files, whole host", "fs.file-max", 4 * (containers * DESCRIPTORS + SPARE_DESCRIPTORS)),
        ("inotify instances", "fs.inotify.max_user_instances", containers + 128),
        ("inotify watches", "fs.inotify.max_user_watches", containers * WATCHES + 8192),
        ("mounts", "fs.mount-max", containers * MOUNTS + SPARE_MOUNTS),
        ("receive backlog", "net.core.netdev_max_backlog", backlog),
        ("tracked connections", "net.netfilter.nf_conntrack_max", containers * CONNECTIONS),
    )


def setting(subject: str, name: str, wanted: int, root: Path = Path("/proc/sys")) -> Finding | None:
    """Compares one sysctl with the least value. None if this kernel does not have it."""
    path = root.joinpath(*name.split("."))
    try:
        value = int(path.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return Finding(
        subject,
        value >= wanted,
        f"{name} = {value} (wanted {wanted})",
        f"sysctl -w {name}={wanted}, and in /etc/sysctl.d",
    )
