"""From the body of a create to a container's record: the rules of the body, the merge with the image's configuration. Pure, but for the names
that volumes without one are given.

Each rule of the specification's tables "Container create body" and "Limits" that does not depend on the host's state is checked here, before
anything is made. Not here: what depends on other objects (names in use, networks, sources of binds).
"""

from __future__ import annotations

import ipaddress
import re
import secrets
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from engine.containers import limits, security
from engine.containers.signals import signal_number
from engine.errors import InvalidParameter
from engine.networks import ports
from engine.runtime import capabilities
from engine.wire.containers import (
    Config,
    CreateBody,
    DeviceMapping,
    HostConfig,
    LogConfig,
    MountPoint,
    RestartPolicy,
    Strings,
)

DEFAULT_SHM_SIZE = 64 << 20
MIN_HEALTH_DURATION = 1_000_000

_HOST_LABEL = re.compile(r"[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?")
_MODES = {"ro", "rw", "z", "Z", "nocopy", "shared", "rshared", "slave", "rslave", "private", "rprivate"}
_PROPAGATIONS = {"shared", "rshared", "slave", "rslave", "private", "rprivate"}
_WORD = re.compile(r"[^\s\0]+")
"""What goes into hosts and resolv.conf: one word, no line of its own."""
_MAC = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}")
_RESTART_NAMES = {"", "no", "always", "unless-stopped", "on-failure"}


def strings(value: Strings) -> list[str] | None:
    """A string-or-list field as the list that is kept; null and absent stay None."""
    return [value] if isinstance(value, str) else value


def checked(body: CreateBody) -> tuple[Config, HostConfig]:
    """The body's two halves, normalised. Raises InvalidParameter naming the field and the rule."""
    host = _checked_host(body.host_config)
    if body.hostname:
        _check_hostname(body.hostname)
    if body.domainname and (len(body.domainname) > 64 or not _WORD.fullmatch(body.domainname)):
        raise InvalidParameter(
            f"invalid domainname format: {body.domainname[:100]!r}: at most 64 characters, no blanks"
        )
    if isinstance(body.mac_address, str) and body.mac_address:
        _check_mac(body.mac_address)
    _check_together(body, host)
    for entry in body.env or ():
        if not entry or entry.startswith("="):
            raise InvalidParameter(f"invalid environment variable: {entry}")
        if "\0" in entry:
            raise InvalidParameter("invalid environment variable: it holds a NUL character")
    ports.check(body.exposed_ports or (), {})
    if body.working_dir and not body.working_dir.startswith("/"):
        raise InvalidParameter(
            f"The working directory '{body.working_dir}' is invalid. It needs to be an absolute path"
        )
    for word in (*(strings(body.cmd) or ()), *(strings(body.entrypoint) or ()), body.working_dir, body.user):
        if "\0" in word:
            raise InvalidParameter("Cmd, Entrypoint, WorkingDir and User must not hold a NUL character")
    for path in body.volumes or ():
        if not path.startswith("/") or "\0" in path or not path.strip("/"):
            raise InvalidParameter(f"invalid volume path {path!r}: it must be absolute and not '/'")
    if isinstance(body.stop_signal, int):
        stop_signal: str | msgspec.UnsetType = str(body.stop_signal)
    else:
        stop_signal = body.stop_signal or msgspec.UNSET
    if stop_signal is not msgspec.UNSET:
        signal_number(stop_signal)
    if body.healthcheck is not msgspec.UNSET:
        for field in ("interval", "timeout", "start_period"):
            value = getattr(body.healthcheck, field)
            if value and value < MIN_HEALTH_DURATION:
                raise InvalidParameter(f"Healthcheck {field} must be 0 or at least 1ms (1000000 nanoseconds): {value}")
        if body.healthcheck.retries < 0:
            raise InvalidParameter(f"Healthcheck retries must not be negative: {body.healthcheck.retries}")
        test = body.healthcheck.test
        if test and test[0] not in ("NONE", "CMD", "CMD-SHELL"):
            raise InvalidParameter(f"Healthcheck test must begin with NONE, CMD or CMD-SHELL: {test[0]}")
    fields = {name: getattr(body, name) for name in Config.__struct_fields__}
    fields.update(cmd=strings(body.cmd), entrypoint=strings(body.entrypoint), stop_signal=stop_signal)
    return Config(**fields), host


def _checked_host(host: HostConfig) -> HostConfig:
    for bind in host.binds or ():
        parse_bind(bind)
    limits.check(host)
    if host.shm_size < 0:
        raise InvalidParameter(f"ShmSize: {host.shm_size}, SHM size must be greater than 0")
    if host.isolation not in ("", "default"):
        raise InvalidParameter(f"Isolation: {host.isolation}: this platform has only 'default'")
    for field, given in (
        ("CpuCount", host.cpu_count),
        ("CpuPercent", host.cpu_percent),
        ("IOMaximumIOps", host.io_maximum_iops),
        ("IOMaximumBandwidth", host.io_maximum_bandwidth),
        ("DiskQuota", host.disk_quota),
    ):
        if given:
            raise InvalidParameter(f"{field}: only the Windows daemon has it")
    _check_modes(host)
    _check_storage(host.storage_opt)
    if ".." in host.cgroup_parent.split("/") or "\0" in host.cgroup_parent:
        raise InvalidParameter(f"CgroupParent: {host.cgroup_parent!r}: it must not lead out of where it begins")
    for text in host.links or ():
        parse_link(text)
    for text in host.volumes_from or ():
        parse_volumes_from(text)
    for path, options in (host.tmpfs or {}).items():
        normal_path(path, f"Tmpfs {path}")
        tmpfs_options(options)
    for name in host.sysctls or {}:
        _check_sysctl(name, host)
    for device in host.devices or ():
        _check_device(device)
    capabilities.check(strings(host.cap_add) or (), strings(host.cap_drop) or ())
    security.parse(host.security_opt or ())
    for group in host.group_add or ():
        if not group or ":" in group or "\0" in group:
            raise InvalidParameter(f"GroupAdd: invalid group {group!r}")
    for field, words in (("DnsSearch", host.dns_search), ("DnsOptions", host.dns_options)):
        for word in words:
            if not _WORD.fullmatch(word):
                raise InvalidParameter(f"{field}: invalid entry {word[:100]!r}")
    if host.userns_mode not in ("", "host"):
        raise InvalidParameter(f"UsernsMode: invalid user namespace mode: {host.userns_mode}")
    ports.check((), host.port_bindings or {})
    for extra in host.extra_hosts or ():
        name, _, address = extra.partition(":")
        if not _WORD.fullmatch(name) or not address:
            raise InvalidParameter(f"ExtraHosts: bad format for add-host: {extra!r}")
        check_address(address, "ExtraHosts")
    for server in host.dns:
        check_address(server, "Dns")
    for ulimit in host.ulimits or ():
        if ulimit.hard != -1 and (ulimit.soft == -1 or ulimit.soft > ulimit.hard):
            raise InvalidParameter(
                f"Ulimits: ulimit soft limit must be less than or equal to hard limit: {ulimit.soft} > {ulimit.hard}"
            )
    policy = checked_restart_policy(host.restart_policy)
    log = LogConfig(type=host.log_config.type or "json-file", config=host.log_config.config)
    if len(host.console_size) != 2 or min(host.console_size) < 0:
        raise InvalidParameter("ConsoleSize must be [height, width]")
    return msgspec.structs.replace(
        host,
        cap_add=strings(host.cap_add),
        cap_drop=strings(host.cap_drop),
        network_mode=host.network_mode or "default",
        restart_policy=policy,
        log_config=log,
        shm_size=host.shm_size or DEFAULT_SHM_SIZE,
        port_bindings=host.port_bindings or {},
    )


# --- modes: whose namespaces -----------------------------------------------------------------------------------------


def joined(mode: str) -> str:
    """The name or id in `container:<name|id>`; empty for another mode."""
    return mode.removeprefix("container:") if mode.startswith("container:") else ""


def _check_modes(host: HostConfig) -> None:
    for field, mode, known in (
        ("NetworkMode", host.network_mode, None),
        ("PidMode", host.pid_mode, ("", "host", "private")),
        ("IpcMode", host.ipc_mode, ("", "host", "private", "shareable", "none")),
        ("UTSMode", host.uts_mode, ("", "host", "private")),
    ):
        if mode.startswith("container:") and field != "UTSMode":
            if not joined(mode):
                raise InvalidParameter(f"{field}: invalid container format container:<name|id>: {mode!r}")
        elif known is not None and mode not in known:
            raise InvalidParameter(f"{field}: invalid mode: {mode!r}")


def _check_together(config: Config, host: HostConfig) -> None:
    """What contradicts what, in Docker's words (its runconfig)."""
    on_host = host.network_mode == "host"
    conflicts: list[tuple[object, str]] = [
        (host.uts_mode == "host" and config.hostname, "hostname and the UTS mode"),
        (
            on_host and host.links,
            "host type networking can't be used with links. This would result in undefined behavior",
        ),
    ]
    if joined(host.network_mode):
        conflicts += [
            (config.hostname, "hostname and the network mode"),
            (host.links, "container type network can't be used with links. This would result in undefined behavior"),
            (host.dns, "dns and the network mode"),
            (host.extra_hosts, "custom host-to-IP mapping and the network mode"),
            (host.port_bindings or host.publish_all_ports, "port publishing and the container type network mode"),
            (config.exposed_ports, "port exposing and the container type network mode"),
        ]
    if on_host or joined(host.network_mode):
        conflicts.append((config.mac_address, "mac-address and the network mode"))
    for given, what in conflicts:
        if given:
            raise InvalidParameter(f"conflicting options: {what}")


_IPC_SYSCTLS = frozenset(
    f"kernel.{name}"
    for name in ("msgmax", "msgmnb", "msgmni", "sem", "shmall", "shmmax", "shmmni", "shm_rmid_forced", "msg_next_id")
)


def _check_sysctl(name: str, host: HostConfig) -> None:
    """Only those that the kernel keeps for each namespace, and only where the container has that namespace to itself (sysctl(2), namespaces(7))."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+([./][A-Za-z0-9_-]+)+", name, re.ASCII):
        raise InvalidParameter(f"Sysctls: invalid name {name[:100]!r}")
    dotted = name.replace("/", ".")
    if dotted.startswith("net."):
        if host.network_mode == "host" or joined(host.network_mode):
            raise InvalidParameter(
                f'Sysctls: sysctl "{name}" is not allowed in a network namespace that is not its own'
            )
    elif dotted in _IPC_SYSCTLS or dotted.startswith("fs.mqueue."):
        if host.ipc_mode == "host" or joined(host.ipc_mode):
            raise InvalidParameter(f'Sysctls: sysctl "{name}" is not allowed in an ipc namespace that is not its own')
    elif dotted == "kernel.domainname":
        if host.uts_mode == "host":
            raise InvalidParameter(f'Sysctls: sysctl "{name}" is not allowed in the hosts UTS namespace')
    else:
        raise InvalidParameter(f'Sysctls: sysctl "{name}" is not in a separate kernel namespace')


# --- single values ---------------------------------------------------------------------------------------------------


def _check_mac(text: str) -> None:
    mac = text.lower().replace("-", ":")
    if not _MAC.fullmatch(mac) or int(mac[:2], 16) & 1:
        raise InvalidParameter(
            f"invalid MacAddress {text[:100]!r}: not a unicast MAC address such as 02:42:ac:11:00:02"
        )


def _check_storage(options: dict[str, str] | msgspec.UnsetType) -> None:
    for name in options or {}:
        if name == "size":
            raise InvalidParameter(
                "StorageOpt: size: --storage-opt is supported only for overlay over xfs with 'pquota' mount option, "
                "and this engine sets no project quotas"
            )
        raise InvalidParameter(f"StorageOpt: unknown option {name!r}")


def _check_device(device: DeviceMapping) -> None:
    if not device.path_on_host.startswith("/") or "\0" in device.path_on_host:
        raise InvalidParameter(f"Devices: PathOnHost {device.path_on_host!r} is not an absolute path")
    target = device.path_in_container
    if target and (not target.startswith("/") or ".." in target.split("/") or "\0" in target):
        raise InvalidParameter(f"Devices: PathInContainer {target!r} is not a plain absolute path")
    access = device.cgroup_permissions
    if not set(access) <= set("rwm") or len(set(access)) != len(access):
        raise InvalidParameter(
            f"Devices: {device.path_on_host}: invalid CgroupPermissions {access!r}: letters of 'rwm'"
        )


class Link(msgspec.Struct, frozen=True):
    """One entry of Links."""

    name: str
    alias: str


def parse_link(text: str) -> Link:
    """`name:alias` or `name`, and `/name:/own/alias` as inspect shows it. Raises InvalidParameter with the entry in it."""
    name, colon, alias = text.partition(":")
    if name.startswith("/"):
        name, alias = name[1:], alias.rpartition("/")[2]
    alias = alias if colon else name
    if not _NAME.fullmatch(name) or not _NAME.fullmatch(alias):
        raise InvalidParameter(f"Links: bad format for links: {text!r}")
    return Link(name, alias)


_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]*")


def parse_volumes_from(text: str) -> tuple[str, bool]:
    """`container[:ro|rw]` as the container and whether it may write. Raises InvalidParameter with the entry in it."""
    name, _, mode = text.partition(":")
    if not name:
        raise InvalidParameter(f"VolumesFrom: malformed volumes-from specification: {text!r}")
    options = mode.split(",") if mode else []
    if not set(options) <= {"ro", "rw", "z", "Z"} or len(set(options)) != len(options) or {"ro", "rw"} <= set(options):
        raise InvalidParameter(f"VolumesFrom: invalid mode for volumes-from: {text!r}")
    return name, "ro" not in options


_TMPFS_DEFAULTS = ("noexec", "nosuid", "nodev")
_TMPFS_OPPOSITES = {
    first: {second}
    for pair in (
        ("exec", "noexec"),
        ("suid", "nosuid"),
        ("dev", "nodev"),
        ("rw", "ro"),
        ("sync", "async"),
        ("mand", "nomand"),
        ("atime", "noatime"),
        ("diratime", "nodiratime"),
        ("relatime", "norelatime"),
        ("strictatime", "nostrictatime"),
    )
    for first, second in (pair, pair[::-1])
}
_TMPFS_VALUES = {
    "size": re.compile(r"\d{1,19}[kKmMgGtTpPeE%]?"),
    "nr_blocks": re.compile(r"\d{1,19}[kKmMgGtTpPeE]?"),
    "nr_inodes": re.compile(r"\d{1,19}[kKmMgGtTpPeE]?"),
    "mode": re.compile(r"[0-7]{1,4}"),
    "uid": re.compile(r"\d{1,10}"),
    "gid": re.compile(r"\d{1,10}"),
    "mpol": re.compile(r"[a-z]+([=:][a-z0-9:-]+)*"),
}


def tmpfs_options(text: str) -> tuple[str, ...]:
    """The mount options of a Tmpfs entry: Docker's own, each replaced by its opposite when that is given. Raises InvalidParameter."""
    chosen = dict.fromkeys(_TMPFS_DEFAULTS)
    values: dict[str, str] = {}
    for option in text.split(",") if text else ():
        name, equals, value = option.partition("=")
        if equals and name in _TMPFS_VALUES and _TMPFS_VALUES[name].fullmatch(value):
            values[name] = option
        elif not equals and option in _TMPFS_OPPOSITES:
            for other in _TMPFS_OPPOSITES[option]:
                chosen.pop(other, None)
            chosen[option] = None
        elif option != "defaults":
            raise InvalidParameter(f'Tmpfs: Invalid tmpfs option "{option[:100]}"')
    return (*chosen, *values.values())


def checked_restart_policy(policy: RestartPolicy) -> RestartPolicy:
    """Normalised; raises InvalidParameter. Shared with update."""
    if policy.name not in _RESTART_NAMES:
        raise InvalidParameter(f"RestartPolicy: invalid restart policy '{policy.name}'")
    if policy.maximum_retry_count < 0:
        raise InvalidParameter("RestartPolicy: maximum retry count cannot be negative")
    if policy.maximum_retry_count and policy.name != "on-failure":
        raise InvalidParameter(
            f"RestartPolicy: maximum retry count cannot be used with restart policy '{policy.name or 'no'}'"
        )
    return RestartPolicy(name=policy.name or "no", maximum_retry_count=policy.maximum_retry_count)


def check_address(text: str, field: str) -> None:
    """Raises InvalidParameter unless `text` is an IPv4 or IPv6 address."""
    try:
        ipaddress.ip_address(text.strip("[]"))
    except ValueError as error:
        raise InvalidParameter(f"{field}: invalid IP address: {text!r}") from error


def _check_hostname(hostname: str) -> None:
    # RFC 1123: labels of letters, digits and inner hyphens, 63 each; the kernel keeps 64 bytes in all (uname(2)).
    if len(hostname) > 64 or not all(_HOST_LABEL.fullmatch(label) for label in hostname.split(".")):
        raise InvalidParameter(f"invalid hostname format: {hostname}: Hostname must be a valid RFC 1123 host name")


class Bind(msgspec.Struct, frozen=True):
    """One entry of Binds. `source` is a host path, or a volume's name when `named`: empty for one of the container's own."""

    source: str
    destination: str
    named: bool
    read_only: bool
    mode: str
    propagation: str


def parse_bind(text: str) -> Bind:
    """`host-src:container-dest[:options]`, `volume-name:container-dest[:options]` or a `container-dest` alone.

    Raises InvalidParameter with the entry in it.
    """
    source, colon, rest = text.partition(":")
    destination, _, mode = rest.partition(":")
    if not colon and text.startswith("/"):
        return Bind("", normal_path(text, text), named=True, read_only=False, mode="", propagation="")
    if not source or not destination or "\0" in text:
        raise InvalidParameter(f"Invalid bind mount spec {text!r}: it must be host-src:container-dest[:options]")
    named = not source.startswith("/")
    destination = normal_path(destination, text)
    options = mode.split(",") if mode else []
    propagations = [option for option in options if option in _PROPAGATIONS]
    if (
        any(option not in _MODES for option in options)
        or len(options) != len(set(options))
        or {"ro", "rw"} <= set(options)
        or {"z", "Z"} <= set(options)
        or len(propagations) > 1
        or (named and propagations)
        or (not named and "nocopy" in options)
    ):
        raise InvalidParameter(f"Invalid bind mount spec {text!r}: invalid mode: {mode}")
    propagation = propagations[0] if propagations else "" if named else "rprivate"
    return Bind(source, destination, named, "ro" in options, mode, propagation)


def normal_path(path: str, of: str) -> str:
    """`path` without doubled or trailing slashes, `.` and `..`; raises InvalidParameter when it is relative or the root itself."""
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in ("", "."):
            parts.append(part)
    if not path.startswith("/"):
        raise InvalidParameter(f"Invalid bind mount spec {of!r}: mount path must be absolute: {path}")
    if not parts:
        raise InvalidParameter(f"Invalid bind mount spec {of!r}: destination can't be '/'")
    return "/" + "/".join(parts)


class Mounts(NamedTuple):
    """The mounts that a container asks for; the sources of volumes are for the volume store to fill in."""

    points: tuple[MountPoint, ...]
    populated: frozenset[str]
    """Destinations of the volumes that take over what the image has there."""


def mount_points(config: Config, host: HostConfig, inherited: Iterable[MountPoint] = ()) -> Mounts:
    """Binds first, then what VolumesFrom brings, then a volume of its own for each of Volumes: each where nothing has the place yet.

    A Tmpfs has its place before all but a bind. Raises InvalidParameter when two binds, or a bind and a Tmpfs, share a destination.
    """
    temporary = {normal_path(path, path) for path in host.tmpfs or {}}
    found = {each.destination: each for each in inherited if each.destination not in temporary}
    taken = set(temporary)
    populated: set[str] = set()
    for text in host.binds or ():
        bind = parse_bind(text)
        if bind.destination in taken:
            raise InvalidParameter(f"Duplicate mount point: {bind.destination}")
        taken.add(bind.destination)
        if bind.named and "nocopy" not in bind.mode.split(","):
            populated.add(bind.destination)
        found[bind.destination] = MountPoint(
            name=(bind.source or secrets.token_hex(32)) if bind.named else msgspec.UNSET,
            source="" if bind.named else bind.source,
            destination=bind.destination,
            driver=host.volume_driver if bind.named else msgspec.UNSET,
            mode=bind.mode,
            rw=not bind.read_only,
            propagation=bind.propagation,
        )
    for path in config.volumes or ():
        destination = normal_path(path if path.startswith("/") else f"/{path}", path)
        if destination not in found and destination not in taken:
            populated.add(destination)
            found[destination] = MountPoint(
                name=secrets.token_hex(32), destination=destination, driver=host.volume_driver
            )
    return Mounts(tuple(found.values()), frozenset(populated))


def named_volumes(host: HostConfig) -> set[str]:
    """Volumes that the container's binds name: its removal never takes them along."""
    return {bind.source for bind in map(parse_bind, host.binds or ()) if bind.named and bind.source}


def merged(config: Config, image: Config) -> Config:
    """`config` with what it leaves out taken from the image's, by Docker's rules."""
    cmd, entrypoint = strings(config.cmd), strings(config.entrypoint)
    if not entrypoint:
        if not cmd:
            cmd = strings(image.cmd)
        if entrypoint is None:
            entrypoint = strings(image.entrypoint)
    own = {entry.partition("=")[0] for entry in config.env or ()}
    env = [*(entry for entry in image.env or () if entry.partition("=")[0] not in own), *(config.env or ())]
    healthcheck = config.healthcheck
    if image.healthcheck is not msgspec.UNSET:
        if healthcheck is msgspec.UNSET:
            healthcheck = image.healthcheck
        else:
            inherited = {
                field: getattr(healthcheck, field) or getattr(image.healthcheck, field)
                for field in healthcheck.__struct_fields__
            }
            healthcheck = type(healthcheck)(**inherited)
    return msgspec.structs.replace(
        config,
        user=config.user or image.user,
        exposed_ports=_union(config.exposed_ports, image.exposed_ports) or msgspec.UNSET,
        env=env,
        cmd=cmd,
        entrypoint=entrypoint
        if entrypoint and entrypoint != [""]
        else None,  # `--entrypoint ''` takes the image's away
        healthcheck=healthcheck,
        volumes=_union(config.volumes, image.volumes) or None,
        working_dir=config.working_dir or image.working_dir,
        labels={**(image.labels or {}), **(config.labels or {})},
        stop_signal=config.stop_signal or image.stop_signal or msgspec.UNSET,
        on_build=None,
        shell=config.shell or image.shell or msgspec.UNSET,
    )


def _union(first: object, second: object) -> dict[str, dict[str, object]]:
    keys: list[str] = []
    for source in (second, first):
        if isinstance(source, dict):
            keys.extend(source)
    return {key: {} for key in keys}


def command(config: Config) -> tuple[str, tuple[str, ...]]:
    """Path and arguments that the container runs. Raises InvalidParameter when there is no command at all."""
    words: Iterable[str] = (*(strings(config.entrypoint) or ()), *(strings(config.cmd) or ()))
    path, *args = [*words] or [""]
    if not path:
        raise InvalidParameter("No command specified")
    return path, tuple(args)
