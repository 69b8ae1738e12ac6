"""Containers on the wire, as the newest API version documents them (Docker Engine API,
"Container").

Structs name the fields and their defaults and have no behaviour. Where clients may send a string or
a list, the type allows both; the engine stores and sends the list (`containers/body.py`). Rows of
`api/versions/` describe how older versions differ.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from engine.wire.system import LogDelivery

Strings = list[str] | str | None
"""Go's strslice: a string means a list of that one string; null means not given."""

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""For the documents of images, whose numbers are checked by type alone."""

Empty = dict[str, object]
"""The value `{}` in Go's set types, such as ExposedPorts. Clients may put any content in it."""


class Healthcheck(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    """How to test that the container works; durations in nanoseconds, 0 inherits."""

    test: list[str] | None = None
    interval: Int64 = 0
    timeout: Int64 = 0
    start_period: Int64 = 0
    start_interval: Int64 = 0
    retries: Int64 = 0


class Config(msgspec.Struct, rename="pascal", kw_only=True, frozen=True, gc=False):
    """The settings of a container that do not depend on the host. An image contains defaults."""

    hostname: str = ""
    domainname: str = ""
    user: str = ""
    attach_stdin: bool = False
    attach_stdout: bool = False
    attach_stderr: bool = False
    exposed_ports: dict[str, Empty] | msgspec.UnsetType = msgspec.UNSET
    tty: bool = False
    open_stdin: bool = False
    stdin_once: bool = False
    env: list[str] | None = None
    cmd: Strings = None
    healthcheck: Healthcheck | msgspec.UnsetType = msgspec.UNSET
    args_escaped: bool | msgspec.UnsetType = msgspec.UNSET
    image: str = ""
    volumes: dict[str, Empty] | None = None
    working_dir: str = ""
    entrypoint: Strings = None
    network_disabled: bool | msgspec.UnsetType = msgspec.UNSET
    mac_address: str | msgspec.UnsetType = msgspec.UNSET
    on_build: list[str] | None = None
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    stop_signal: str | int | msgspec.UnsetType = msgspec.UNSET
    stop_timeout: Int64 | msgspec.UnsetType = msgspec.UNSET
    shell: list[str] | msgspec.UnsetType = msgspec.UNSET


class LogConfig(msgspec.Struct, rename="pascal", kw_only=True, frozen=True, gc=False):
    """Log driver and its options; an empty type in a request is the daemon's default."""

    type: str = ""
    config: dict[str, str] = msgspec.field(default_factory=dict)


class RestartPolicy(msgspec.Struct, rename="pascal", kw_only=True, frozen=True, gc=False):
    """The restart policy. `no` and an empty name mean: never."""

    name: str = ""
    maximum_retry_count: int = 0


class PortBinding(msgspec.Struct, rename="pascal", kw_only=True, frozen=True, gc=False):
    """One published address. An empty HostPort means an ephemeral port."""

    host_ip: str = msgspec.field(default="", name="HostIp")
    host_port: str = ""


class WeightDevice(msgspec.Struct, rename="pascal", kw_only=True, frozen=True, gc=False):
    path: str = ""
    weight: int = 0


class ThrottleDevice(msgspec.Struct, rename="pascal", kw_only=True, frozen=True, gc=False):
    """`rate` in bytes or operations per second."""

    path: str = ""
    rate: int = 0


class DeviceMapping(msgspec.Struct, rename="pascal", kw_only=True, frozen=True, gc=False):
    path_on_host: str = ""
    path_in_container: str = ""
    cgroup_permissions: str = ""


class DeviceRequest(msgspec.Struct, rename="pascal", kw_only=True, frozen=True, gc=False):
    """Devices that a driver chooses. A count of -1 means all. `capabilities` is an OR of ANDs."""

    driver: str = ""
    count: int = 0
    device_ids: list[str] | None = msgspec.field(default=None, name="DeviceIDs")
    capabilities: list[list[str]] | None = None
    options: dict[str, str] | None = None


class Ulimit(msgspec.Struct, rename="pascal", kw_only=True, frozen=True, gc=False):
    name: str = ""
    hard: int = 0
    soft: int = 0


class BindOptions(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    propagation: str = ""
    non_recursive: bool = False
    create_mountpoint: bool = False
    read_only_non_recursive: bool = False
    read_only_force_recursive: bool = False


class VolumeDriver(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    name: str = ""
    options: dict[str, str] | None = None


class VolumeOptions(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    no_copy: bool = False
    labels: dict[str, str] | None = None
    subpath: str = ""
    driver_config: VolumeDriver | None = None


class TmpfsOptions(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    size_bytes: int = 0
    mode: int = 0
    options: list[list[str]] | None = None


class ImageOptions(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    subpath: str = ""


class Mount(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    """One entry of HostConfig.Mounts, of API 1.25 and newer."""

    type: str = ""
    source: str = ""
    target: str = ""
    read_only: bool = False
    consistency: str = ""
    bind_options: BindOptions | None = None
    volume_options: VolumeOptions | None = None
    tmpfs_options: TmpfsOptions | None = None
    image_options: ImageOptions | None = None


class HostConfig(msgspec.Struct, rename="pascal", kw_only=True, frozen=True, gc=False):
    """How this host runs the container. Sizes in bytes, CPU times in microseconds."""

    binds: list[str] | None = None
    container_id_file: str = msgspec.field(default="", name="ContainerIDFile")
    log_config: LogConfig = LogConfig()
    network_mode: str = ""
    port_bindings: dict[str, list[PortBinding] | None] | None = msgspec.field(default_factory=dict)
    restart_policy: RestartPolicy = RestartPolicy()
    volume_driver: str = ""
    volumes_from: list[str] | None = None
    cap_add: Strings = None
    cap_drop: Strings = None
    dns: list[str] = msgspec.field(default_factory=list)
    dns_options: list[str] = msgspec.field(default_factory=list)
    dns_search: list[str] = msgspec.field(default_factory=list)
    extra_hosts: list[str] | None = None
    group_add: list[str] | None = None
    ipc_mode: str = ""
    cgroup: str = ""
    links: list[str] | None = None
    oom_score_adj: int = 0
    pid_mode: str = ""
    privileged: bool = False
    publish_all_ports: bool = False
    readonly_rootfs: bool = False
    security_opt: list[str] | None = None
    storage_opt: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    tmpfs: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    uts_mode: str = msgspec.field(default="", name="UTSMode")
    userns_mode: str = ""
    shm_size: int = 0
    sysctls: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    runtime: str | msgspec.UnsetType = msgspec.UNSET
    console_size: list[int] = msgspec.field(default_factory=lambda: [0, 0])
    isolation: str = ""
    cpu_shares: int = 0
    memory: int = 0
    cgroup_parent: str = ""
    blkio_weight: int = 0
    blkio_weight_device: list[WeightDevice] | None = None
    blkio_device_read_bps: list[ThrottleDevice] | None = None
    blkio_device_write_bps: list[ThrottleDevice] | None = None
    blkio_device_read_iops: list[ThrottleDevice] | None = msgspec.field(default=None, name="BlkioDeviceReadIOps")
    blkio_device_write_iops: list[ThrottleDevice] | None = msgspec.field(default=None, name="BlkioDeviceWriteIOps")
    cpu_period: int = 0
    cpu_quota: int = 0
    cpuset_cpus: str = ""
    cpuset_mems: str = ""
    devices: list[DeviceMapping] | None = msgspec.field(default_factory=list)
    disk_quota: int = 0
    kernel_memory: int | msgspec.UnsetType = msgspec.UNSET
    memory_reservation: int = 0
    memory_swap: int = 0
    memory_swappiness: int | None = None
    oom_kill_disable: bool | None = False
    pids_limit: int | None = None
    ulimits: list[Ulimit] | None = None
    nano_cpus: int = 0
    mounts: list[Mount] | msgspec.UnsetType | None = msgspec.UNSET
    init: bool | msgspec.UnsetType | None = msgspec.UNSET
    auto_remove: bool = False
    cgroupns_mode: str = ""
    device_cgroup_rules: list[str] | None = None
    device_requests: list[DeviceRequest] | None = None
    masked_paths: list[str] | None = None
    readonly_paths: list[str] | None = None
    annotations: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    cpu_realtime_period: int = 0
    cpu_realtime_runtime: int = 0
    # Requests alone have these: a create refuses them, or discards them with a warning.
    kernel_memory_tcp: int | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="KernelMemoryTCP")
    capabilities: list[str] | msgspec.UnsetType = msgspec.UNSET
    cpu_count: int = 0
    cpu_percent: int = 0
    io_maximum_iops: int = msgspec.field(default=0, name="IOMaximumIOps")
    io_maximum_bandwidth: int = msgspec.field(default=0, name="IOMaximumBandwidth")
    lxc_conf: list[object] | dict[str, object] | None = msgspec.field(default_factory=list)


class EndpointIPAMConfig(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    ipv4_address: str = msgspec.field(default="", name="IPv4Address")
    ipv6_address: str = msgspec.field(default="", name="IPv6Address")
    link_local_ips: list[str] = msgspec.field(default_factory=list, name="LinkLocalIPs")


class EndpointSettings(msgspec.Struct, rename="pascal", kw_only=True, frozen=True, gc=False):
    """A container's endpoint in one network: the requested settings and, while it runs, the actual
    addresses.
    """

    ipam_config: EndpointIPAMConfig | None = msgspec.field(default=None, name="IPAMConfig")
    links: list[str] | None = None
    aliases: list[str] | None = None
    """As asked for. Records of earlier versions of this engine also have the short container id."""
    driver_opts: dict[str, str] | None = None
    gw_priority: int = 0
    """The endpoint of the highest priority has the default routes."""
    network_id: str = msgspec.field(default="", name="NetworkID")
    endpoint_id: str = msgspec.field(default="", name="EndpointID")
    gateway: str = ""
    ip_address: str = msgspec.field(default="", name="IPAddress")
    ip_prefix_len: int = msgspec.field(default=0, name="IPPrefixLen")
    ipv6_gateway: str = msgspec.field(default="", name="IPv6Gateway")
    global_ipv6_address: str = msgspec.field(default="", name="GlobalIPv6Address")
    global_ipv6_prefix_len: int = msgspec.field(default=0, name="GlobalIPv6PrefixLen")
    mac_address: str = ""
    """In a request the wanted address, otherwise the actual one while the container runs."""
    dns_names: list[str] | None = msgspec.field(default=None, name="DNSNames")
    """Its names on a user-defined network. The first is used for reverse lookups."""


class NetworkingConfig(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    endpoints_config: dict[str, EndpointSettings | None] = msgspec.field(default_factory=dict)


FROM_OLDER = "(older)"
"""The key of `FromOlder`. Clients cannot set it (`api/parameters.py`)."""


class FromOlder(msgspec.Struct, kw_only=True, frozen=True):
    """Notes of the rows of `api/versions/` that made a create body out of an older request."""

    warnings: list[str] = msgspec.field(default_factory=list)
    endpoints_unchecked: bool = False
    """Endpoints are checked when the container starts, not at its creation."""
    flat_read_only: bool = False
    """Read-only binds and volumes leave the mounts below them as they are."""
    volume_driver_unnoticed: bool = False
    """No warning of a VolumeDriver that does not apply to Mounts."""


class CreateBody(Config, rename="pascal", kw_only=True, frozen=True):
    """POST /containers/create."""

    host_config: HostConfig = msgspec.field(default_factory=HostConfig)
    volume_driver: str = ""
    """Sent by clients below 1.21. The field in HostConfig has precedence."""
    networking_config: NetworkingConfig = msgspec.field(default_factory=NetworkingConfig)
    from_older: FromOlder = msgspec.field(default_factory=FromOlder, name=FROM_OLDER)


class Created(msgspec.Struct, rename="pascal", frozen=True):
    id: str
    warnings: list[str]


class UpdateBody(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """POST /containers/{id}/update; zero, empty and null leave a limit as it is. An empty list of
    devices removes their limits.
    """

    blkio_weight: int = 0
    cpu_shares: int = 0
    cpu_period: int = 0
    cpu_quota: int = 0
    cpuset_cpus: str = ""
    cpuset_mems: str = ""
    memory: int = 0
    memory_swap: int = 0
    memory_reservation: int = 0
    kernel_memory: int = 0
    nano_cpus: int = 0
    pids_limit: int | None = None
    cpu_realtime_period: int = 0
    cpu_realtime_runtime: int = 0
    blkio_weight_device: list[WeightDevice] | None = None
    blkio_device_read_bps: list[ThrottleDevice] | None = None
    blkio_device_write_bps: list[ThrottleDevice] | None = None
    blkio_device_read_iops: list[ThrottleDevice] | None = msgspec.field(default=None, name="BlkioDeviceReadIOps")
    blkio_device_write_iops: list[ThrottleDevice] | None = msgspec.field(default=None, name="BlkioDeviceWriteIOps")
    restart_policy: RestartPolicy = RestartPolicy()


class Updated(msgspec.Struct, rename="pascal", frozen=True):
    warnings: list[str]


class WaitError(msgspec.Struct, rename="pascal", frozen=True):
    """Why a removal that a client waited for has failed."""

    message: str


class Waited(msgspec.Struct, rename="pascal", frozen=True):
    """The reply of POST /containers/{id}/wait."""

    status_code: int
    error: WaitError | msgspec.UnsetType = msgspec.UNSET


class ContainersPruned(msgspec.Struct, rename="pascal", frozen=True):
    """The reply of POST /containers/prune; null when nothing was removed."""

    containers_deleted: list[str] | None
    space_reclaimed: int


class PathStat(msgspec.Struct, rename="camel", kw_only=True, frozen=True):
    """The stat header of the archive calls (ContainerArchiveInfo), which describes a path in a
    container.
    """

    name: str
    size: int
    mode: int
    """Go's os.FileMode: permission bits, and Go's own bits for the file type."""
    mtime: str
    link_target: str


class PathChange(msgspec.Struct, rename="pascal", frozen=True, gc=False):
    """One path that a container has changed. Kind: 0 modified, 1 added, 2 deleted."""

    path: str
    kind: int


class CopyConfig(msgspec.Struct, rename="pascal", frozen=True):
    """Body of the copy endpoint."""

    resource: str = ""


class MountPoint(msgspec.Struct, rename="pascal", kw_only=True, frozen=True, gc=False):
    """A mount as inspect and list show it. Records have those of volumes and binds."""

    type: str = ""
    """`volume`, `bind`, `tmpfs` or `image`; empty in records of earlier versions of this engine."""
    name: str | msgspec.UnsetType = msgspec.UNSET
    source: str = ""
    destination: str = ""
    driver: str | msgspec.UnsetType = msgspec.UNSET
    mode: str = ""
    rw: bool = msgspec.field(default=True, name="RW")
    propagation: str = ""


class Port(msgspec.Struct, rename="pascal", kw_only=True, frozen=True, gc=False, omit_defaults=True):
    ip: str = msgspec.field(default="", name="IP")
    private_port: int
    public_port: int = 0
    type: str


class SummaryHostConfig(msgspec.Struct, rename="pascal", frozen=True, gc=False):
    network_mode: str
    annotations: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class HealthSummary(msgspec.Struct, rename="pascal", frozen=True, gc=False):
    """`none` without a health check."""

    status: str
    failing_streak: int


class SummaryNetworks(msgspec.Struct, rename="pascal", frozen=True, gc=False):
    networks: dict[str, EndpointSettings]


class ContainerSummary(msgspec.Struct, rename="pascal", kw_only=True, frozen=True, gc=False):
    """One element of GET /containers/json."""

    id: str
    names: list[str]
    image: str
    image_id: str | msgspec.UnsetType = msgspec.field(name="ImageID")
    command: str
    created: int
    ports: list[Port]
    size_rw: int | msgspec.UnsetType = msgspec.UNSET
    size_root_fs: int | msgspec.UnsetType = msgspec.UNSET
    labels: dict[str, str]
    state: str | msgspec.UnsetType
    health: HealthSummary | msgspec.UnsetType = msgspec.UNSET
    host_config: SummaryHostConfig | msgspec.UnsetType
    network_settings: SummaryNetworks | msgspec.UnsetType
    mounts: list[MountPoint] | msgspec.UnsetType
    status: str
    """The last field: `views.with_status` replaces it in the encoded object."""


class HealthLogEntry(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """One probe; times RFC 3339 with nanoseconds."""

    start: str
    end: str
    exit_code: int
    output: str


class HealthState(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """`State.Health` of inspect. `log` has the last results, oldest first."""

    status: str
    failing_streak: int
    log: list[HealthLogEntry]


class ContainerState(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """`State` of inspect; times RFC 3339 with nanoseconds."""

    status: str | msgspec.UnsetType
    running: bool
    paused: bool
    restarting: bool
    oom_killed: bool = msgspec.field(name="OOMKilled")
    dead: bool
    pid: int
    exit_code: int
    error: str
    started_at: str
    finished_at: str
    health: HealthState | msgspec.UnsetType = msgspec.UNSET


class NetworkSettings(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """`NetworkSettings` of inspect."""

    sandbox_id: str = msgspec.field(default="", name="SandboxID")
    sandbox_key: str = ""
    ports: dict[str, list[PortBinding] | None] = msgspec.field(default_factory=dict)
    networks: dict[str, EndpointSettings] | msgspec.UnsetType = msgspec.field(default_factory=dict)


class GraphDriver(msgspec.Struct, rename="pascal", frozen=True):
    name: str
    data: dict[str, str] | None


class ContainerInspect(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """GET /containers/{id}/json."""

    id: str
    created: str
    path: str
    args: list[str]
    state: ContainerState
    image: str
    resolv_conf_path: str
    hostname_path: str
    hosts_path: str
    log_path: str
    name: str
    restart_count: int
    driver: str
    platform: str = "linux"
    mount_label: str = ""
    process_label: str = ""
    app_armor_profile: str = ""
    exec_ids: list[str] | None = msgspec.field(default=None, name="ExecIDs")
    host_config: HostConfig
    graph_driver: GraphDriver
    size_rw: int | msgspec.UnsetType = msgspec.UNSET
    size_root_fs: int | msgspec.UnsetType = msgspec.UNSET
    mounts: list[MountPoint]
    config: Config
    network_settings: NetworkSettings
    log_delivery: LogDelivery | msgspec.UnsetType = msgspec.UNSET
    log_dropped: int | msgspec.UnsetType = msgspec.UNSET
    """Lines of its last run that could not be written to its log; this engine's own."""
