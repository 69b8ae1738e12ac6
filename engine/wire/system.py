"""The engine and its host on the wire: /version and /info of API 1.24, and what the other parts contribute to them."""

from __future__ import annotations

import msgspec


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about this host that do not change while the daemon runs; read once (`system/host.py`), so that /info never
    waits.
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
    """What the other parts of the engine tell /info at this moment."""

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
    labels: tuple[str, ...] = ()
    bridge: str = ""


class VersionInfo(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """GET /version."""

    version: str
    api_version: str
    min_api_version: str = msgspec.field(name="MinAPIVersion")
    git_commit: str
    go_version: str
    os: str
    arch: str
    kernel_version: str
    build_time: str
    experimental: bool = False


class InfoPlugins(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """Drivers by kind."""

    volume: list[str]
    network: list[str]
    authorization: list[str] | None = None
    log: list[str] = msgspec.field(default_factory=list)


class IndexInfo(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    name: str
    mirrors: list[str]
    secure: bool
    official: bool


class RegistryConfig(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    insecure_registry_cidrs: list[str] = msgspec.field(name="InsecureRegistryCIDRs")
    index_configs: dict[str, IndexInfo]
    mirrors: list[str]


class Runtime(msgspec.Struct, frozen=True):
    path: str


class SwarmInfo(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """This engine's part in a swarm, seen from itself."""

    node_id: str = msgspec.field(default="", name="NodeID")
    node_addr: str = ""
    local_node_state: str = "inactive"
    control_available: bool = False
    error: str = ""
    remote_managers: list[dict[str, str]] | None = None
    nodes: int = 0
    managers: int = 0


class Info(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """GET /info."""

    id: str = msgspec.field(name="ID")
    containers: int
    containers_running: int
    containers_paused: int
    containers_stopped: int
    images: int
    driver: str
    driver_status: list[list[str]]
    system_status: list[list[str]] | None = None
    plugins: InfoPlugins
    memory_limit: bool
    swap_limit: bool
    kernel_memory: bool
    cpu_cfs_period: bool
    cpu_cfs_quota: bool
    cpu_shares: bool = msgspec.field(name="CPUShares")
    cpu_set: bool = msgspec.field(name="CPUSet")
    pids_limit: bool
    ipv4_forwarding: bool = msgspec.field(name="IPv4Forwarding")
    bridge_nf_iptables: bool
    bridge_nf_ip6tables: bool = msgspec.field(name="BridgeNfIp6tables")
    debug: bool
    nfd: int = msgspec.field(name="NFd")
    oom_kill_disable: bool
    n_goroutines: int = msgspec.field(name="NGoroutines")
    system_time: str
    logging_driver: str
    cgroup_driver: str
    n_events_listener: int = msgspec.field(name="NEventsListener")
    kernel_version: str
    operating_system: str
    os_type: str = msgspec.field(name="OSType")
    architecture: str
    index_server_address: str
    registry_config: RegistryConfig
    ncpu: int = msgspec.field(name="NCPU")
    mem_total: int
    docker_root_dir: str
    engine_root_dir: str
    http_proxy: str
    https_proxy: str
    no_proxy: str
    name: str
    labels: list[str]
    experimental_build: bool
    server_version: str
    cluster_store: str
    cluster_advertise: str
    security_options: list[str]
    runtimes: dict[str, Runtime]
    default_runtime: str
    swarm: SwarmInfo
    live_restore_enabled: bool
    isolation: str = ""
