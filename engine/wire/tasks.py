"""Tasks and their templates on the wire, as the newest API version documents them (Docker Engine
API, "Task").

Structs name the fields and their defaults and have no behaviour.
"""

from __future__ import annotations

import msgspec

from engine.wire.containers import Healthcheck, Mount, Ulimit
from engine.wire.fields import shown
from engine.wire.networks import ConfigReference as NetworkConfigReference
from engine.wire.nodes import GenericResource, Platform, Resources
from engine.wire.swarm import Driver, Version

# --- what a container gets ------------------------------------------------------------------------


class CredentialSpec(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    """Of Windows."""

    config: str = ""
    file: str = ""
    registry: str = ""


class SELinuxContext(msgspec.Struct, rename="pascal", kw_only=True, frozen=True, gc=False):
    disable: bool = False
    user: str = ""
    role: str = ""
    type: str = ""
    level: str = ""


class SeccompOptions(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    mode: str = ""
    """default, unconfined, custom."""
    profile: bytes = b""
    """JSON, for the mode custom; base64 on the wire."""


class AppArmorOptions(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    mode: str = ""
    """default, disabled."""


class Privileges(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    credential_spec: CredentialSpec | None = None
    selinux_context: SELinuxContext | None = msgspec.field(default=None, name="SELinuxContext")
    seccomp: SeccompOptions | None = None
    app_armor: AppArmorOptions | None = None
    no_new_privileges: bool = False


class DNSConfig(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    nameservers: list[str] = msgspec.field(default_factory=list)
    search: list[str] = msgspec.field(default_factory=list)
    options: list[str] = msgspec.field(default_factory=list)


class FileTarget(msgspec.Struct, rename="pascal", kw_only=True, frozen=True, gc=False):
    """The file of a secret or config. A relative name is below /run/secrets, or /."""

    name: str = ""
    uid: str = msgspec.field(default="", name="UID")
    gid: str = msgspec.field(default="", name="GID")
    mode: int = 0
    """Go's os.FileMode, of which the permission bits count."""


class SecretReference(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    file: FileTarget | None = None
    secret_id: str = msgspec.field(default_factory=lambda: "", name="SecretID")
    secret_name: str = shown("")


class RuntimeTarget(msgspec.Struct, frozen=True, gc=False):
    """The config is not mounted: another field uses it, such as CredentialSpec."""


class ConfigReference(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    file: FileTarget | None = None
    runtime: RuntimeTarget | None = None
    config_id: str = msgspec.field(default_factory=lambda: "", name="ConfigID")
    config_name: str = shown("")


class ContainerSpec(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    """The container of a task."""

    image: str = ""
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    command: list[str] = msgspec.field(default_factory=list)
    """Replaces the image's entrypoint."""
    args: list[str] = msgspec.field(default_factory=list)
    hostname: str = ""
    env: list[str] = msgspec.field(default_factory=list)
    dir: str = ""
    user: str = ""
    groups: list[str] = msgspec.field(default_factory=list)
    privileges: Privileges | None = None
    init: bool | None = None
    stop_signal: str = ""
    tty: bool = msgspec.field(default=False, name="TTY")
    open_stdin: bool = False
    read_only: bool = False
    mounts: list[Mount] = msgspec.field(default_factory=list)
    stop_grace_period: int | None = None
    healthcheck: Healthcheck | None = None
    hosts: list[str] = msgspec.field(default_factory=list)
    """Lines of /etc/hosts: an address, then its names."""
    dns_config: DNSConfig | None = msgspec.field(default=None, name="DNSConfig")
    secrets: list[SecretReference] = msgspec.field(default_factory=list)
    configs: list[ConfigReference] = msgspec.field(default_factory=list)
    isolation: str = ""
    sysctls: dict[str, str] = msgspec.field(default_factory=dict)
    capability_add: list[str] = msgspec.field(default_factory=list)
    capability_drop: list[str] = msgspec.field(default_factory=list)
    ulimits: list[Ulimit] = msgspec.field(default_factory=list)
    oom_score_adj: int = 0


# --- templates ------------------------------------------------------------------------------------


class PluginPrivilege(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    name: str = ""
    description: str = ""
    value: list[str] = msgspec.field(default_factory=list)


class PluginSpec(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    name: str = ""
    remote: str = ""
    disabled: bool = False
    plugin_privilege: list[PluginPrivilege] = msgspec.field(default_factory=list)
    env: list[str] = msgspec.field(default_factory=list)


class NetworkAttachmentSpec(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    """A task that stands for a plain container on an attachable network."""

    container_id: str = msgspec.field(default="", name="ContainerID")


class Limits(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    nano_cpus: int = msgspec.field(default=0, name="NanoCPUs")
    """`NanoCPU` is the name in the documentation of API 1.24."""
    memory_bytes: int = 0
    pids: int = 0


class ResourceRequirements(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    limits: Limits | None = None
    reservations: Resources | None = None
    swap_bytes: int | None = None
    """Swap beside the memory limit; -1 for no limit."""
    memory_swappiness: int | None = None


class RestartPolicy(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    condition: str = ""
    """none, on-failure, any."""
    delay: int | None = None
    max_attempts: int | None = None
    window: int | None = None


class SpreadOver(msgspec.Struct, rename="pascal", frozen=True, gc=False):
    spread_descriptor: str = ""
    """node.labels.X or engine.labels.X."""


class PlacementPreference(msgspec.Struct, rename="pascal", frozen=True, gc=False):
    spread: SpreadOver | None = None


class Placement(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    constraints: list[str] = msgspec.field(default_factory=list)
    preferences: list[PlacementPreference] = msgspec.field(default_factory=list)
    max_replicas: int = 0
    """Per node; 0 for no limit."""
    platforms: list[Platform] = msgspec.field(default_factory=list)


class NetworkAttachmentConfig(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    target: str = ""
    aliases: list[str] = msgspec.field(default_factory=list)
    driver_opts: dict[str, str] = msgspec.field(default_factory=dict)


class TaskSpec(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    """The template of a service's tasks."""

    container_spec: ContainerSpec | None = None
    plugin_spec: PluginSpec | None = None
    network_attachment_spec: NetworkAttachmentSpec | None = None
    resources: ResourceRequirements | None = None
    restart_policy: RestartPolicy | None = None
    placement: Placement | None = None
    networks: list[NetworkAttachmentConfig] = msgspec.field(default_factory=list)
    log_driver: Driver | None = None
    force_update: int = shown(0)
    runtime: str = ""


# --- objects --------------------------------------------------------------------------------------


class PortConfig(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    """A published port: of a service, or of a task on its node's addresses."""

    name: str = ""
    protocol: str = ""
    """tcp, udp, sctp."""
    target_port: int = 0
    published_port: int = 0
    publish_mode: str = ""
    """ingress, host."""


PortStatus = PortConfig
"""One port of a task of mode host, with the port that was chosen."""


class ContainerStatus(msgspec.Struct, rename="pascal", kw_only=True, frozen=True, gc=False):
    container_id: str = msgspec.field(default="", name="ContainerID")
    pid: int = msgspec.field(default=0, name="PID")
    exit_code: int = 0


class TaskPorts(msgspec.Struct, rename="pascal", omit_defaults=True, frozen=True, gc=False):
    """The field PortStatus of a task's status."""

    ports: list[PortStatus] = msgspec.field(default_factory=list)


class TaskStatus(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    timestamp: str = ""
    state: str = ""
    message: str = ""
    err: str = ""
    container_status: ContainerStatus | None = None
    """None until the container exists."""
    port_status: TaskPorts = msgspec.field(default_factory=TaskPorts)


class IPAMConfig(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    subnet: str = ""
    range: str = ""
    gateway: str = ""


class IPAMOptions(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    driver: Driver = msgspec.field(default_factory=Driver)
    configs: list[IPAMConfig] = msgspec.field(default_factory=list)


class NetworkSpec(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    name: str = ""
    labels: dict[str, str] = shown({})
    driver_configuration: Driver | None = None
    ipv6_enabled: bool = msgspec.field(default=False, name="IPv6Enabled")
    internal: bool = False
    attachable: bool = False
    ingress: bool = False
    ipam_options: IPAMOptions | None = msgspec.field(default=None, name="IPAMOptions")
    config_from: NetworkConfigReference | None = None
    scope: str = ""


class AttachedNetwork(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    id: str = msgspec.field(name="ID")
    version: Version = msgspec.field(default_factory=Version)
    created_at: str = ""
    updated_at: str = ""
    spec: NetworkSpec = msgspec.field(default_factory=NetworkSpec)
    driver_state: Driver = msgspec.field(default_factory=Driver)
    ipam_options: IPAMOptions | None = msgspec.field(default=None, name="IPAMOptions")


class NetworkAttachment(msgspec.Struct, rename="pascal", omit_defaults=True, frozen=True, gc=False):
    network: AttachedNetwork
    addresses: list[str] = msgspec.field(default_factory=list)


class Task(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    """One element of GET /tasks."""

    id: str = msgspec.field(name="ID")
    version: Version = msgspec.field(default_factory=Version)
    created_at: str
    updated_at: str
    name: str = ""
    labels: dict[str, str] = shown({})
    spec: TaskSpec
    service_id: str = msgspec.field(default="", name="ServiceID")
    slot: int = 0
    node_id: str = msgspec.field(default="", name="NodeID")
    status: TaskStatus
    desired_state: str = ""
    networks_attachments: list[NetworkAttachment] = msgspec.field(default_factory=list)
    generic_resources: list[GenericResource] = msgspec.field(default_factory=list)
    """As Docker's clients name them. The documentation says AssignedGenericResources."""
    assigned_generic_resources: list[GenericResource] = msgspec.field(default_factory=list)
    job_iteration: Version | None = None
