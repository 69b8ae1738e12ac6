"""Facts about the host and the engine, from which /version and /info are made.

Not here: how they are read (`system/host.py`), the structs that are sent (`wire/system.py`).
"""

from __future__ import annotations

import msgspec


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about this host that do not change while the daemon runs. They are read once
    (`system/host.py`), so that /info need not wait.
    """

    id: str = ""
    """The engine's own id, kept in its root directory."""
    name: str = ""
    os: str = "linux"
    machine: str = "x86_64"
    """The architecture as uname(2) names it."""
    arch: str = "amd64"
    """The architecture as Go names it."""
    kernel: str = ""
    operating_system: str = ""
    os_version: str = ""
    """The version of the operating system, such as `12`."""
    cgroup_driver: str = "cgroupfs"
    cgroup_version: str = "2"
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


class ProgramFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that the programs which the engine executes report about themselves."""

    init_version: str = ""
    """Of the init program; empty if the host has none."""
    features: dict[str, str] = msgspec.field(default_factory=dict)
    """By the name of a runtime: a JSON object (OCI runtime specification, features.md)."""


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """The current values that the parts of the engine contribute to /info."""

    running: int = 0
    paused: int = 0
    stopped: int = 0
    images: int = 0
    driver: str = "overlay2"
    driver_status: tuple[tuple[str, str], ...] = ()
    runtime_version: str = ""
    runtime: str = "runc"
    """The OCI runtime of containers whose create names none."""
    default_runtime: str = "runc"
    """The name of that one for clients."""
    runtimes: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    """Programs with their arguments, by name: those that a create may name."""
    volume_drivers: tuple[str, ...] = ("local",)
    network_drivers: tuple[str, ...] = ()
    log_drivers: tuple[str, ...] = ()
    log_dropped: int = 0
    """Lines that could not be written to logs of containers."""
    authorization_plugins: tuple[str, ...] = ()
    descriptors: int = 0
    """Open descriptors of this process."""
    tasks: int = 0
    """asyncio tasks of this process."""
    labels: tuple[str, ...] = ()
    bridge: str = ""
    troubles: tuple[str, ...] = ()
    """What keeps the engine from its work on this host, in sentences for the operator."""


class OwnProcess(msgspec.Struct, frozen=True, kw_only=True):
    """What the kernel knows of the daemon's process. Memory in bytes."""

    cpu_seconds: float
    descriptors: int
    most_descriptors: int
    resident: int
    virtual: int
    started: float
    """Seconds since the epoch."""
