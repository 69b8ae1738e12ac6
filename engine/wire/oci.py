"""The OCI runtime specification's `config.json`, as far as the engine writes it (runtime-spec
v1.0.2, config.md and config-linux.md).

Structs name the fields in the specification's order; fields with their default value are left out
of the JSON. `Seccomp` is a `msgspec.Raw`: the profile is encoded once per set of capabilities
(`runtime/seccomp.py`), not once per container.

Not here: the values for a container (`containers/spec.py`), the image specification.
"""

from __future__ import annotations

import msgspec

VERSION = "1.0.2"
"""Fields of 1.1 (`domainname`, idmapped mounts) are not used: runc 1.1 does not read them."""


class Object(msgspec.Struct, omit_defaults=True, frozen=True, rename="camel"):
    """Base of all objects. JSON names are camelCase unless a field says otherwise."""


class Root(Object, kw_only=True, frozen=True):
    path: str
    readonly: bool = False


class User(Object, kw_only=True, frozen=True):
    uid: int = -1
    gid: int = -1
    additional_gids: tuple[int, ...] = ()


class Box(Object, kw_only=True, frozen=True):
    """A terminal's size in characters."""

    height: int = 0
    width: int = 0


class Rlimit(Object, kw_only=True, frozen=True):
    type: str
    hard: int = -1
    soft: int = -1


class Capabilities(Object, kw_only=True, frozen=True):
    """Names with the prefix CAP_. Inheritable and ambient stay empty: with them a non-root process
    would keep capabilities over execve(2).
    """

    bounding: tuple[str, ...] = ()
    effective: tuple[str, ...] = ()
    inheritable: tuple[str, ...] = ()
    permitted: tuple[str, ...] = ()
    ambient: tuple[str, ...] = ()


class Process(Object, kw_only=True, frozen=True):
    terminal: bool = False
    console_size: Box | None = None
    user: User
    args: list[str]
    env: list[str]
    cwd: str
    capabilities: Capabilities
    rlimits: list[Rlimit] = []
    no_new_privileges: bool = False
    apparmor_profile: str = ""
    oom_score_adj: int | None = None


class Mount(Object, kw_only=True, frozen=True):
    destination: str
    type: str = ""
    source: str = ""
    options: tuple[str, ...] = ()


class Namespace(Object, kw_only=True, frozen=True):
    """Without `path` the runtime makes a new one."""

    type: str
    path: str = ""


class IdMapping(Object, kw_only=True, frozen=True):
    """`size` ids of the container from `container_id` on are the host's from `host_id` on."""

    container_id: int = msgspec.field(name="containerID")
    host_id: int = msgspec.field(name="hostID")
    size: int


class Device(Object, kw_only=True, frozen=True):
    type: str
    path: str
    major: int = -1
    minor: int = -1
    file_mode: int | None = None
    uid: int | None = None
    gid: int | None = None


class DeviceRule(Object, kw_only=True, frozen=True):
    """A rule of the devices cgroup. `allow` has no default, so it is always written: the runtimes
    take a missing one as false.
    """

    allow: bool
    type: str = ""
    major: int | None = None
    minor: int | None = None
    access: str = ""


class Memory(Object, kw_only=True, frozen=True):
    """Bytes; -1 is no limit."""

    limit: int | None = None
    reservation: int | None = None
    swap: int | None = None
    kernel: int | None = None
    swappiness: int | None = None
    disable_oom_killer: bool = msgspec.field(default=False, name="disableOOMKiller")


class Cpu(Object, kw_only=True, frozen=True):
    """`quota` and `period` in microseconds."""

    shares: int | None = None
    quota: int | None = None
    period: int | None = None
    cpus: str = ""
    mems: str = ""


class Pids(Object, kw_only=True, frozen=True):
    limit: int


class WeightDevice(Object, kw_only=True, frozen=True):
    major: int
    minor: int
    weight: int


class ThrottleDevice(Object, kw_only=True, frozen=True):
    major: int
    minor: int
    rate: int


class BlockIO(Object, kw_only=True, frozen=True):
    weight: int | None = None
    weight_device: list[WeightDevice] = []
    throttle_read_bps_device: list[ThrottleDevice] = []
    throttle_write_bps_device: list[ThrottleDevice] = []
    throttle_read_iops_device: list[ThrottleDevice] = msgspec.field(default_factory=list, name="throttleReadIOPSDevice")
    throttle_write_iops_device: list[ThrottleDevice] = msgspec.field(
        default_factory=list, name="throttleWriteIOPSDevice"
    )


class Resources(Object, kw_only=True, frozen=True):
    devices: tuple[DeviceRule, ...] = ()
    memory: Memory | None = None
    cpu: Cpu | None = None
    pids: Pids | None = None
    block_io: BlockIO | None = msgspec.field(default=None, name="blockIO")


class Linux(Object, kw_only=True, frozen=True):
    uid_mappings: tuple[IdMapping, ...] = ()
    gid_mappings: tuple[IdMapping, ...] = ()
    namespaces: list[Namespace]
    devices: list[Device] = []
    cgroups_path: str
    resources: Resources
    rootfs_propagation: str = ""
    seccomp: msgspec.Raw | None = None
    sysctl: dict[str, str] = {}
    masked_paths: tuple[str, ...] = ()
    readonly_paths: tuple[str, ...] = ()


class Hook(Object, kw_only=True, frozen=True):
    """A program that the runtime runs on the host at one point of the container's life."""

    path: str
    args: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    timeout: int | None = None


class Hooks(Object, kw_only=True, frozen=True):
    prestart: tuple[Hook, ...] = ()
    create_runtime: tuple[Hook, ...] = ()
    create_container: tuple[Hook, ...] = ()
    start_container: tuple[Hook, ...] = ()
    poststart: tuple[Hook, ...] = ()
    poststop: tuple[Hook, ...] = ()


class Spec(Object, kw_only=True, frozen=True):
    oci_version: str = msgspec.field(name="ociVersion")
    process: Process
    root: Root
    hostname: str = ""
    mounts: list[Mount]
    hooks: Hooks | None = None
    linux: Linux
    annotations: dict[str, str] = {}


encode = msgspec.json.Encoder().encode
