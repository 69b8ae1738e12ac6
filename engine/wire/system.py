"""The engine and its host on the wire, as the newest API version documents them (SystemVersion,
SystemInfo).
"""

from __future__ import annotations

import msgspec


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
    """This engine's own view of its swarm."""

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
