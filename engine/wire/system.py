"""The engine and its host on the wire, as the newest API version documents them (SystemVersion,
SystemInfo).
"""

from __future__ import annotations

import msgspec


class Platform(msgspec.Struct, rename="pascal", frozen=True):
    """The name of the product."""

    name: str


class Component(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """The engine, or a program that it runs. Clients read the API's version from the details of
    the first one.
    """

    name: str
    version: str
    details: dict[str, str]


class VersionInfo(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """GET /version."""

    platform: Platform
    components: list[Component]
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
    """`status`: documents about it, as text, by the names of their specifications."""

    path: str
    runtime_args: list[str] | msgspec.UnsetType = msgspec.field(name="runtimeArgs", default=msgspec.UNSET)
    status: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class Commit(msgspec.Struct, rename="pascal", frozen=True):
    """The version of a program."""

    id: str = msgspec.field(name="ID")


class DefaultAddressPool(msgspec.Struct, rename="pascal", frozen=True):
    base: str
    size: int


class FirewallBackend(msgspec.Struct, rename="pascal", frozen=True):
    driver: str


class DiscoveredDevice(msgspec.Struct, rename="pascal", frozen=True):
    """A device that a container can request by name."""

    source: str
    id: str = msgspec.field(name="ID")


class SwarmInfo(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """This engine's own view of its swarm. `local_node_state`: inactive, pending, active, error."""

    node_id: str = msgspec.field(default="", name="NodeID")
    node_addr: str = ""
    local_node_state: str = "inactive"
    control_available: bool = False
    error: str = ""
    remote_managers: list[dict[str, str]] | None = None
    """NodeID and Addr (host:port) of each."""
    nodes: int = 0
    managers: int = 0
    cluster: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    """The swarm without its tokens, encoded (`wire.swarm.ClusterInfo`); on managers."""
    warnings: list[str] | msgspec.UnsetType = msgspec.UNSET


class LogDelivery(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """How far a container's lines are with their remote target; this engine's own.

    `state`: "delivered", "waiting", or "retrying" with `error` while the target is away. `waiting`:
    lines without an acknowledgement, also those on the way; None while the shipper does not run, or
    where they are too many to be counted for an answer. Then there are only `waiting_bytes`.
    `dropped`: lines that were lost to the quota of non-blocking mode, or that the target refused
    for good.
    """

    driver: str
    address: str
    state: str
    error: str = ""
    delivered: int
    waiting: int | None = None
    waiting_bytes: int
    dropped: int


class LogTarget(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """A remote log target of containers. `state`: "reached" or "retrying"."""

    driver: str
    address: str
    state: str
    error: str = ""
    containers: int


class LogDeliveries(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """All deliveries of the engine; this engine's own. `waiting`: as in `LogDelivery`."""

    containers: int
    delivered: int
    waiting: int | None
    waiting_bytes: int
    dropped: int
    targets: list[LogTarget]


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
    plugins: InfoPlugins
    memory_limit: bool
    swap_limit: bool
    kernel_memory: bool | msgspec.UnsetType
    cpu_cfs_period: bool
    cpu_cfs_quota: bool
    cpu_shares: bool = msgspec.field(name="CPUShares")
    cpu_set: bool = msgspec.field(name="CPUSet")
    pids_limit: bool
    ipv4_forwarding: bool = msgspec.field(name="IPv4Forwarding")
    bridge_nf_iptables: bool | msgspec.UnsetType
    bridge_nf_ip6tables: bool | msgspec.UnsetType = msgspec.field(name="BridgeNfIp6tables")
    debug: bool
    nfd: int = msgspec.field(name="NFd")
    oom_kill_disable: bool
    n_goroutines: int = msgspec.field(name="NGoroutines")
    system_time: str
    logging_driver: str
    cgroup_driver: str
    cgroup_version: str
    n_events_listener: int = msgspec.field(name="NEventsListener")
    kernel_version: str
    operating_system: str
    os_version: str = msgspec.field(name="OSVersion")
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
    security_options: list[str]
    runtimes: dict[str, Runtime]
    default_runtime: str
    swarm: SwarmInfo
    live_restore_enabled: bool
    init_binary: str
    containerd_commit: Commit
    runc_commit: Commit
    init_commit: Commit
    generic_resources: list[dict[str, object]] | None = None
    firewall_backend: FirewallBackend
    default_address_pools: list[DefaultAddressPool] | msgspec.UnsetType = msgspec.UNSET
    """Those of the operator."""
    cdi_spec_dirs: list[str] = msgspec.field(name="CDISpecDirs")
    discovered_devices: list[DiscoveredDevice] | msgspec.UnsetType = msgspec.UNSET
    warnings: list[str]
    isolation: str = ""
    log_deliveries: LogDeliveries | msgspec.UnsetType = msgspec.UNSET
    log_dropped: int | msgspec.UnsetType = msgspec.UNSET
    """The sum of `ContainerInspect.log_dropped`."""
    restoring: bool | msgspec.UnsetType = msgspec.UNSET
    """True while a daemon that has just started restores containers."""


# --- /system/df -----------------------------------------------------------------------------------


class CacheRecord(msgspec.Struct, rename="pascal", kw_only=True, frozen=True, gc=False):
    """One record of the build cache. Docker's clients read its parents under a name that begins
    with a blank; the documented name is sent too.
    """

    id: str = msgspec.field(name="ID")
    parents: list[str] | msgspec.UnsetType = msgspec.UNSET
    blank_parents: list[str] | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name=" Parents")
    type: str
    description: str
    in_use: bool
    shared: bool
    size: int
    created_at: str
    last_used_at: str | None = None
    usage_count: int


class KindUsage(msgspec.Struct, rename="pascal", kw_only=True, frozen=True, omit_defaults=True):
    """The totals of one kind of object. Sizes in bytes; `items` are encoded."""

    active_count: int = 0
    total_count: int = 0
    reclaimable: int = 0
    total_size: int = 0
    items: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class DiskUsage(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """GET /system/df: the totals, and the older form with encoded lists. Kinds that were not
    requested are absent.
    """

    layers_size: int | msgspec.UnsetType = msgspec.UNSET
    images: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    containers: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    volumes: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    build_cache: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    image_usage: KindUsage | msgspec.UnsetType = msgspec.UNSET
    container_usage: KindUsage | msgspec.UnsetType = msgspec.UNSET
    volume_usage: KindUsage | msgspec.UnsetType = msgspec.UNSET
    build_cache_usage: KindUsage | msgspec.UnsetType = msgspec.UNSET
