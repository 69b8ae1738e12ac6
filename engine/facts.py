"""What this engine knows of its host and of itself: the material of /version and /info.

Not here: how it is read (`system/host.py`), what clients see (`wire/system.py`). None of it is sent
as it is.
"""

from __future__ import annotations

import msgspec


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about this host that do not change while the daemon runs. Read once (`system/host.py`):
    /info never waits.
    """

    id: str = ""
    """The engine's own id, kept in its root directory."""
    name: str = ""
    os: str = "linux"
    machine: str = "x86_64"
    """As uname(2) says."""
    arch: str = "amd64"
    """As Go names it."""
    kernel: str = ""
    operating_system: str = ""
    memory: int = 0
    """Bytes."""
    cpus: int = 0
    security_options: tuple[str, ...] = ()
    memory_limit: bool = False
    swap_limit: bool = False
    kernel_memory: bool = False
    oom_kill_disable: bool = False
    cpu_cfs_period: bool = False
    cpu_cfs_quota: bool = False
    cpu_shares: bool = False
    cpu_set: bool = False
    pids_limit: bool = False
    ipv4_forwarding: bool = False
    bridge_nf_iptables: bool = False
    bridge_nf_ip6tables: bool = False
    git_commit: str = ""
    build_time: str = ""
    """RFC 3339."""
    python: str = ""


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """What the parts of the engine contribute to /info, as it is now."""

    running: int = 0
    paused: int = 0
    stopped: int = 0
    images: int = 0
    driver: str = "overlay2"
    driver_status: tuple[tuple[str, str], ...] = ()
    runtime: str = "runc"
    """Name of the OCI runtime in use."""
    runtimes: dict[str, str] = msgspec.field(default_factory=dict)
    """Path by name."""
    volume_drivers: tuple[str, ...] = ("local",)
    network_drivers: tuple[str, ...] = ()
    log_drivers: tuple[str, ...] = ()
    descriptors: int = 0
    """Open in this process."""
    tasks: int = 0
    """asyncio tasks of this process."""
    labels: tuple[str, ...] = ()
    bridge: str = ""
