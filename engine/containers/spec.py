"""From a container's record to the OCI runtime's config.json: what its process is, sees and may do.

Rules: the specification's "Container create body", Docker's documented defaults (capabilities, masked paths, mounts, devices), runtime-spec
config-linux.md. Reads nothing of the container; of the host only /dev, for a container that was given devices, and the flags of what is bound.

Not here: whether the body is well formed (`create.py`), the files bound in (`bundle.py`), the network namespace (`networks/`).
Raises InvalidParameter or NotFound with the field's name for what this host can't give.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from engine.containers import security
from engine.containers.create import strings, tmpfs_options
from engine.containers.limits import rlimit
from engine.containers.store import ContainerRecord
from engine.errors import InvalidParameter, NotFound
from engine.networks.sandboxes import SETTINGS
from engine.runtime import capabilities, cgroups, seccomp
from engine.runtime.cgroups import Cgroups
from engine.runtime.oci import Runtime
from engine.runtime.users import Identity
from engine.wire import oci
from engine.wire.containers import HostConfig, MountPoint
from engine.wire.exec import ExecCreate

DEFAULT_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

MASKED_PATHS = (
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
)

READONLY_PATHS = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")

_CHARACTER, _BLOCK = "c", "b"

DEVICE_RULES = (
    oci.DeviceRule(allow=False, access="rwm"),
    oci.DeviceRule(allow=True, type=_CHARACTER, access="m"),
    oci.DeviceRule(allow=True, type=_BLOCK, access="m"),
    *(
        oci.DeviceRule(allow=True, type=_CHARACTER, major=major, minor=minor, access="rwm")
        for major, minor in ((1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 1), (5, 2), (136, None))
    ),
)
"""null, zero, full, random, urandom, tty, console, ptmx and every pty; mknod of any."""

PRIVILEGED_DEVICE_RULES = (oci.DeviceRule(allow=True, access="rwm"),)

_SYSTEM = ("nosuid", "noexec", "nodev")
_PROC = oci.Mount(destination="/proc", type="proc", source="proc", options=_SYSTEM)
_DEV = oci.Mount(
    destination="/dev", type="tmpfs", source="tmpfs", options=("nosuid", "strictatime", "mode=755", "size=65536k")
)
_PTS = oci.Mount(
    destination="/dev/pts",
    type="devpts",
    source="devpts",
    options=("nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"),
)
_MQUEUE = oci.Mount(destination="/dev/mqueue", type="mqueue", source="mqueue", options=_SYSTEM)

DEFAULT_SHM_SIZE = 64 << 20

_NETWORK_SYSCTLS = {f"net.{path.replace('/', '.')}": value for path, value in SETTINGS.items()}


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """What the record does not say: where on this host the container runs, and as whom."""

    rootfs: str
    directory: Path
    """Holds hosts, hostname, resolv.conf."""
    identity: Identity
    network: str | None
    """Path of its network namespace; empty: a fresh one without links; None: the host's."""
    runtime: Runtime
    cgroups: Cgroups
    pid_namespace: str = ""
    """Path for PidMode container:<id>; likewise `ipc_namespace`."""
    ipc_namespace: str = ""
    shm: str = ""
    """Where that container's /dev/shm is to be had."""
    sources: Mapping[str, str] = {}
    """Where the runtime finds the record's mounts, by destination, when it is not at their Source."""
    files: Path | None = None
    """The directory of the container whose network it joins, for its hosts, hostname and resolv.conf."""


def build(record: ContainerRecord, place: Place) -> oci.Spec:
    """The whole document. `oci.encode` makes the bytes of config.json."""
    config, host = record.config, record.host
    granted = capabilities.granted(host.cap_add or (), host.cap_drop or (), privileged=host.privileged)
    wanted = security.parse(host.security_opt or ())
    filter_: msgspec.Raw | None = None
    annotations: dict[str, str] = {}
    if wanted.profile is not None and not host.privileged:
        filter_ = seccomp.section(wanted.profile, granted)
    elif wanted.confined and not host.privileged:
        filter_, annotations = place.runtime.seccomp(seccomp.profile(granted))
    bounding = capabilities.bounding()
    devices = list(_devices(host))
    return oci.Spec(
        oci_version=oci.VERSION,
        process=oci.Process(
            terminal=config.tty,
            console_size=_console_size(record),
            user=oci.User(uid=place.identity.uid, gid=place.identity.gid, additional_gids=place.identity.groups),
            args=[record.path, *record.args],
            env=environment(
                (*record.link_environment, *(config.env or ())),
                config.hostname,
                tty=config.tty,
                home=place.identity.home,
            ),
            cwd=config.working_dir or "/",
            capabilities=oci.Capabilities(bounding=granted, effective=granted, permitted=granted),
            rlimits=[rlimit(each, raisable="CAP_SYS_RESOURCE" in bounding) for each in host.ulimits or ()],
            no_new_privileges=wanted.no_new_privileges,
            apparmor_profile="" if host.privileged else wanted.apparmor,
            oom_score_adj=host.oom_score_adj or None,
        ),
        root=oci.Root(path=place.rootfs, readonly=host.readonly_rootfs),
        hostname="" if host.uts_mode == "host" else config.hostname,
        mounts=mounts(record, place),
        linux=oci.Linux(
            namespaces=_namespaces(host, place),
            devices=[device for device, _ in devices],
            cgroups_path=cgroups.path(record.id, host.cgroup_parent),
            resources=_resources(host, place.cgroups, [rule for _, rule in devices]),
            rootfs_propagation=_rootfs_propagation(record.mounts),
            seccomp=filter_,
            sysctl=_sysctls(record, place),
            masked_paths=() if host.privileged else MASKED_PATHS,
            readonly_paths=() if host.privileged else READONLY_PATHS,
        ),
        annotations=annotations,
    )


# --- the process -----------------------------------------------------------------------------------------------------


def _console_size(record: ContainerRecord) -> oci.Box | None:
    """What the terminal measures from the first instruction on: the size that a resize left, else the one of the create."""
    rows, columns = record.size if any(record.size) else record.host.console_size
    return oci.Box(height=rows, width=columns) if record.config.tty and rows and columns else None


def exec_process(record: ContainerRecord, config: ExecCreate, identity: Identity) -> oci.Process:
    """A further process of the container: its own command and user, the container's environment, limits and confinement.

    Privileged means every capability that the engine has; the container's seccomp filter stays, since it is the container's.
    """
    host = record.host
    granted = capabilities.granted(
        host.cap_add or (), host.cap_drop or (), privileged=host.privileged or config.privileged
    )
    wanted = security.parse(host.security_opt or ())
    return oci.Process(
        terminal=config.tty,
        user=oci.User(uid=identity.uid, gid=identity.gid, additional_gids=identity.groups),
        args=strings(config.cmd) or [],
        env=environment(
            [*record.link_environment, *(record.config.env or ()), *(config.env or ())],
            record.config.hostname,
            tty=config.tty,
            home=identity.home,
        ),
        cwd=config.working_dir or record.config.working_dir or "/",
        capabilities=oci.Capabilities(bounding=granted, effective=granted, permitted=granted),
        rlimits=[rlimit(each, raisable="CAP_SYS_RESOURCE" in capabilities.bounding()) for each in host.ulimits or ()],
        no_new_privileges=wanted.no_new_privileges and not config.privileged,
        apparmor_profile="" if host.privileged or config.privileged else wanted.apparmor,
        oom_score_adj=host.oom_score_adj or None,
    )


def environment(given: Iterable[str], hostname: str, *, tty: bool, home: str) -> list[str]:
    """Docker's own variables, replaced by those given; a name without `=` takes a variable away."""
    variables = {"PATH": DEFAULT_PATH}
    if hostname:
        variables["HOSTNAME"] = f"HOSTNAME={hostname}"
    if tty:
        variables["TERM"] = "TERM=xterm"
    for entry in given:
        name, equals, _ = entry.partition("=")
        if equals:
            variables[name] = entry
        else:
            variables.pop(name, None)
    variables.setdefault("HOME", f"HOME={home}")
    return list(variables.values())


# --- what it sees ----------------------------------------------------------------------------------------------------


def mounts(record: ContainerRecord, place: Place) -> list[oci.Mount]:
    """The standard ones first, then the container's by depth, so that one inside another comes after it.

    A destination that the container was given replaces the standard mount there.
    """
    host = record.host
    access = "rw" if host.privileged else "ro"
    shared = "/dev/shm" if host.ipc_mode == "host" else place.shm
    if shared:
        shm = oci.Mount(destination="/dev/shm", type="bind", source=shared, options=("rbind", "rprivate"))
    else:
        size = host.shm_size or DEFAULT_SHM_SIZE
        shm = oci.Mount(
            destination="/dev/shm", type="tmpfs", source="shm", options=(*_SYSTEM, "mode=1777", f"size={size}")
        )
    standard = [
        _PROC,
        _DEV,
        _PTS,
        oci.Mount(destination="/sys", type="sysfs", source="sysfs", options=(*_SYSTEM, access)),
        oci.Mount(destination="/sys/fs/cgroup", type="cgroup", source="cgroup", options=(*_SYSTEM, "relatime", access)),
        _MQUEUE,
        *(() if host.ipc_mode == "none" else (shm,)),
    ]
    own = {
        f"/etc/{name}": _bind(
            str((place.files or place.directory) / name), f"/etc/{name}", not host.readonly_rootfs, "rprivate"
        )
        for name in ("resolv.conf", "hostname", "hosts")
    }
    if host.tmpfs is not msgspec.UNSET:
        own |= {destination: _tmpfs(destination, options) for destination, options in host.tmpfs.items()}
    own |= {
        each.destination: _bind(
            place.sources.get(each.destination, each.source), each.destination, each.rw, each.propagation
        )
        for each in record.mounts
    }
    kept = [
        mount
        for mount in standard
        if mount.destination not in own and not ("/dev" in own and mount.destination.startswith("/dev/"))
    ]
    return kept + sorted(own.values(), key=lambda mount: mount.destination.count("/"))


def _bind(source: str, destination: str, writable: bool, propagation: str) -> oci.Mount:
    # The runtime gives a bind these flags alone: what the source's own mount forbids has to be said again.
    forbidden = _forbidden(source)
    access = "rw" if writable and "ro" not in forbidden else "ro"
    options = ("rbind", propagation or "rprivate", access, *(each for each in forbidden if each != "ro"))
    return oci.Mount(destination=destination, type="bind", source=source, options=options)


_FORBIDDING = {
    os.ST_RDONLY: "ro",
    os.ST_NOSUID: "nosuid",
    os.ST_NODEV: "nodev",
    os.ST_NOEXEC: "noexec",
    os.ST_NOATIME: "noatime",
    os.ST_NODIRATIME: "nodiratime",
}


def _forbidden(source: str) -> list[str]:
    try:
        flags = os.statvfs(source).f_flag
    except OSError:
        return []
    return [option for flag, option in _FORBIDDING.items() if flags & flag]


def _tmpfs(destination: str, options: str) -> oci.Mount:
    return oci.Mount(destination=destination, type="tmpfs", source="tmpfs", options=tmpfs_options(options))


def _rootfs_propagation(points: Iterable[MountPoint]) -> str:
    """The root must pass on what a shared or slave mount below it is to receive or to give."""
    wanted = {point.propagation.removeprefix("r") for point in points}
    return "shared" if "shared" in wanted else "rslave" if "slave" in wanted else ""


def _namespaces(host: HostConfig, place: Place) -> list[oci.Namespace]:
    found = [oci.Namespace(type="mount")]
    if place.network is not None:
        found.append(oci.Namespace(type="network", path=place.network))
    if host.uts_mode != "host":
        found.append(oci.Namespace(type="uts"))
    if host.pid_mode != "host":
        found.append(oci.Namespace(type="pid", path=place.pid_namespace))
    if host.ipc_mode != "host":
        found.append(oci.Namespace(type="ipc", path=place.ipc_namespace))
    if place.cgroups.mode == "v2":  # privileged or not, as Docker: else its own cgroups would be the host's
        found.append(oci.Namespace(type="cgroup"))
    return found


def _sysctls(record: ContainerRecord, place: Place) -> dict[str, str]:
    host = record.host
    found: dict[str, str] = {}
    if place.network == "":
        found |= _NETWORK_SYSCTLS
    if record.config.domainname and host.uts_mode != "host":
        found["kernel.domainname"] = record.config.domainname
    if host.sysctls is not msgspec.UNSET:
        found |= host.sysctls
    return found


# --- what it may use -------------------------------------------------------------------------------------------------


def _resources(host: HostConfig, hierarchies: Cgroups, devices: Iterable[oci.DeviceRule]) -> oci.Resources:
    rules = PRIVILEGED_DEVICE_RULES if host.privileged else (*DEVICE_RULES, *devices)
    swap = host.memory_swap if hierarchies.swap_accounting else 0
    if host.memory and not swap and hierarchies.swap_accounting:
        swap = 2 * host.memory  # Docker's default: as much swap as memory
    memory = oci.Memory(
        limit=host.memory or None,
        reservation=host.memory_reservation or None,
        swap=swap or None,
        kernel=host.kernel_memory or None,
        swappiness=host.memory_swappiness if host.memory_swappiness >= 0 else None,
        disable_oom_killer=host.oom_kill_disable,
    )
    cpu = oci.Cpu(
        shares=host.cpu_shares or None,
        quota=host.cpu_quota if host.cpu_quota > 0 else None,  # a new cgroup has none
        period=host.cpu_period or None,
        cpus=host.cpuset_cpus,
        mems=host.cpuset_mems,
    )
    block = oci.BlockIO(
        weight=host.blkio_weight or None,
        weight_device=[
            oci.WeightDevice(major=major, minor=minor, weight=each.weight)
            for each in host.blkio_weight_device or ()
            for major, minor in (_block_device(each.path, "BlkioWeightDevice"),)
        ],
        **{
            field: [
                oci.ThrottleDevice(major=major, minor=minor, rate=each.rate)
                for each in given or ()
                for major, minor in (_block_device(each.path, name),)
            ]
            for field, name, given in (
                ("throttle_read_bps_device", "BlkioDeviceReadBps", host.blkio_device_read_bps),
                ("throttle_write_bps_device", "BlkioDeviceWriteBps", host.blkio_device_write_bps),
                ("throttle_read_iops_device", "BlkioDeviceReadIOps", host.blkio_device_read_iops),
                ("throttle_write_iops_device", "BlkioDeviceWriteIOps", host.blkio_device_write_iops),
            )
        },
    )
    return oci.Resources(
        devices=rules,
        memory=memory if memory != oci.Memory() else None,
        cpu=cpu if cpu != oci.Cpu() else None,
        pids=oci.Pids(limit=host.pids_limit) if host.pids_limit > 0 else None,  # a new cgroup has no limit
        block_io=block if block != oci.BlockIO() else None,
    )


def _devices(host: HostConfig) -> Iterator[tuple[oci.Device, oci.DeviceRule]]:
    if host.privileged:
        for path in _device_files("/dev"):
            yield from _device(path, path, "rwm")
        return
    for mapping in host.devices or ():
        source, target = mapping.path_on_host, mapping.path_in_container or mapping.path_on_host
        access = mapping.cgroup_permissions or "rwm"
        if not set(access) <= set("rwm"):
            raise InvalidParameter(f"Devices: {source}: invalid CgroupPermissions {access!r}")
        found = list(_device_files(source)) if os.path.isdir(source) else [source]
        for path in found:
            made = list(_device(path, target + path.removeprefix(source), access))
            if not made:
                raise NotFound(
                    f'error gathering device information while adding custom device "{path}": not a device node'
                )
            yield from made


_SKIPPED_DEVICES = {"/dev/pts", "/dev/shm", "/dev/fd", "/dev/mqueue", "/dev/console", "/dev/.udev", "/dev/.lxc"}
"""The container has its own of these."""


def _device_files(directory: str) -> Iterator[str]:
    try:
        with os.scandir(directory) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise NotFound(f"Devices: {directory}: {(error.strerror or '').lower()}") from error
    for entry in found:
        if entry.path in _SKIPPED_DEVICES:
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _device_files(entry.path)
        elif not entry.is_symlink() and not entry.is_file(follow_symlinks=False):
            yield entry.path


def _device(path: str, target: str, access: str) -> Iterator[tuple[oci.Device, oci.DeviceRule]]:
    try:
        found = os.stat(path)
    except OSError as error:
        reason = (error.strerror or "").lower()
        raise NotFound(f'error gathering device information while adding custom device "{path}": {reason}') from error
    if stat.S_ISCHR(found.st_mode):
        kind = _CHARACTER
    elif stat.S_ISBLK(found.st_mode):
        kind = _BLOCK
    else:
        return
    major, minor = os.major(found.st_rdev), os.minor(found.st_rdev)
    yield (
        oci.Device(
            type=kind,
            path=target,
            major=major,
            minor=minor,
            file_mode=stat.S_IMODE(found.st_mode),
            uid=found.st_uid,
            gid=found.st_gid,
        ),
        oci.DeviceRule(allow=True, type=kind, major=major, minor=minor, access=access),
    )


def _block_device(path: str, field: str) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError as error:
        raise NotFound(f"{field}: {path}: {(error.strerror or '').lower()}") from error
    if not stat.S_ISBLK(found.st_mode):
        raise InvalidParameter(f"{field}: {path} is not a block device")
    return os.major(found.st_rdev), os.minor(found.st_rdev)
