"""Rules of a create's body, and its merge with the image's configuration. Pure.

Every rule of Docker Engine API, ContainerCreate, that does not depend on the host's state is
checked here, before anything is made. Not here: limits (`limits.py`), mounts (`mount_points.py`),
security options (`security.py`), and rules that depend on other objects (names in use, networks,
sources of binds).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import msgspec

from engine.common.network_rules import check_hostname, is_word, parsed_address
from engine.common.signals import signal_number
from engine.config import cgroup_parent
from engine.containers import limits, mount_points, security
from engine.errors import InvalidParameter
from engine.networks import ports
from engine.networks.network import BRIDGE, DEFAULT_MODES
from engine.networks.requested import SYSCTLS
from engine.runtime import capabilities, scopes
from engine.wire.containers import (
    Config,
    CreateBody,
    DeviceMapping,
    DeviceRequest,
    Healthcheck,
    HostConfig,
    PortBinding,
    RestartPolicy,
    Strings,
    Ulimit,
)

EMPTY_BINDINGS = "have an empty list of port-bindings"
"""Words of a warning that replies below 1.52 leave out."""
MIN_HEALTH_DURATION = 1_000_000

HOST_GATEWAY = "host-gateway"
"""In ExtraHosts: the addresses of this host as its containers see it."""

_RESTART_NAMES = {"", "no", "always", "unless-stopped", "on-failure"}


def strings(value: Strings) -> list[str] | None:
    """A string-or-list field as a list; null and absent stay None."""
    return [value] if isinstance(value, str) else value


def checked(body: CreateBody) -> tuple[Config, HostConfig]:
    """The body's two halves, normalised. Raises InvalidParameter naming the field and the rule."""
    host = checked_host(body.host_config)
    if body.volume_driver and not host.volume_driver:
        host = msgspec.structs.replace(host, volume_driver=body.volume_driver)
    if body.hostname:
        check_hostname(body.hostname)
    if body.domainname and (len(body.domainname.encode()) > 64 or not is_word(body.domainname)):
        raise InvalidParameter(f"invalid domainname format: {body.domainname[:100]!r}: at most 64 bytes, no blanks")
    check_together(body, host)
    for entry in body.env or ():
        if not entry or entry.startswith("="):
            raise InvalidParameter(f"invalid environment variable: {entry}")
        if "\0" in entry:
            raise InvalidParameter(
                f"invalid environment variable: {entry.partition('=')[0][:100]!r}: must not contain a NUL character"
            )
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
        _check_healthcheck(body.healthcheck)
    fields = {name: getattr(body, name) for name in Config.__struct_fields__}
    fields.update(
        cmd=strings(body.cmd),
        entrypoint=strings(body.entrypoint),
        stop_signal=stop_signal,
        mac_address=msgspec.UNSET,
    )
    return Config(**fields), host


def _check_healthcheck(check: Healthcheck) -> None:
    for field in ("interval", "timeout", "start_period", "start_interval"):
        value = getattr(check, field)
        if value and value < MIN_HEALTH_DURATION:
            raise InvalidParameter(f"Healthcheck {field} must be 0 or at least 1ms (1000000 nanoseconds): {value}")
    if check.retries < 0:
        raise InvalidParameter(f"Healthcheck retries must not be negative: {check.retries}")
    if check.test and check.test[0] not in ("NONE", "CMD", "CMD-SHELL"):
        raise InvalidParameter(f"Healthcheck test must begin with NONE, CMD or CMD-SHELL: {check.test[0]}")


def checked_host(host: HostConfig) -> HostConfig:
    """The HostConfig, normalised. Raises InvalidParameter naming the field and the rule."""
    limits.check(host)
    if host.isolation not in ("", "default"):
        raise InvalidParameter(f"Isolation: {host.isolation}: this platform has only 'default'")
    if host.userns_mode not in ("", "host"):
        raise InvalidParameter(f"UsernsMode: invalid user namespace mode: {host.userns_mode}")
    if host.capabilities:
        raise InvalidParameter("Capabilities is not supported by this engine")
    _check_modes(host)
    _check_storage(host.storage_opt)
    check_cgroup_parent(host.cgroup_parent)
    capabilities.check(strings(host.cap_add) or (), strings(host.cap_drop) or ())
    security.parse(host.security_opt or ())
    ports.check((), host.port_bindings or {})
    for field, check_entry in _ENTRIES:
        for entry in getattr(host, field) or ():
            check_entry(entry)
    for name, value in (host.sysctls or {}).items():
        _check_sysctl(name, host)
        if "\0" in value:
            raise InvalidParameter(f"Sysctls: {name}: its value must not contain a NUL character")
    for name, value in (host.annotations or {}).items():
        if not name:
            raise InvalidParameter("invalid Annotations: the empty string is not permitted as an annotation key")
        if "\0" in name or "\0" in value:
            raise InvalidParameter(f"invalid Annotations: {name[:100]!r}: must not contain a NUL character")
    for path, options in (host.tmpfs or {}).items():
        mount_points.normal_path(path, f"Tmpfs {path}")
        mount_points.tmpfs_options(options)
    policy = checked_restart_policy(host.restart_policy)
    if host.auto_remove and policy.name != "no":
        raise InvalidParameter("can't create 'AutoRemove' container with restart policy")
    masked, readonly = ((), ()) if host.privileged else (security.MASKED_PATHS, security.READONLY_PATHS)
    if len(host.console_size) != 2 or min(host.console_size) < 0:
        raise InvalidParameter("ConsoleSize must be [height, width]")
    return msgspec.structs.replace(
        host,
        cap_add=strings(host.cap_add),
        cap_drop=strings(host.cap_drop),
        network_mode=BRIDGE if host.network_mode in DEFAULT_MODES else host.network_mode,
        restart_policy=policy,
        port_bindings={port: bindings or [PortBinding()] for port, bindings in (host.port_bindings or {}).items()},
        pids_limit=host.pids_limit if (host.pids_limit or 0) > 0 else None,
        memory_swappiness=None if host.memory_swappiness == -1 else host.memory_swappiness,
        oom_kill_disable=bool(host.oom_kill_disable),
        kernel_memory=host.kernel_memory or msgspec.UNSET,
        masked_paths=list(masked) if host.masked_paths is None else host.masked_paths,
        readonly_paths=list(readonly) if host.readonly_paths is None else host.readonly_paths,
        annotations=host.annotations or msgspec.UNSET,
        capabilities=msgspec.UNSET,
    )


def warnings(host: HostConfig) -> list[str]:
    """What a client should know about the HostConfig that it has sent, in Docker's words."""
    found = []
    if empty := sorted(port for port, bindings in (host.port_bindings or {}).items() if not bindings):
        found.append(
            f"Following container port(s) {EMPTY_BINDINGS}: {', '.join(empty)}. "
            "Such bindings will be discarded in a future version."
        )
    if host.privileged:
        found += [f"{field} has no effect in privileged mode." for field in _overridden(host)]
    return found


def _overridden(host: HostConfig) -> Iterator[str]:
    """Fields of a privileged container that have no effect, as in Docker. A seccomp profile,
    no-new-privileges and writable-cgroups do have theirs.
    """
    if host.cap_drop:
        yield "CapDrop"
    if host.masked_paths:
        yield "MaskedPaths"
    if host.readonly_paths:
        yield "ReadonlyPaths"
    if any(device.cgroup_permissions not in ("", "rwm") for device in host.devices or ()):
        yield "CgroupPermissions of Devices"
    if security.parse(host.security_opt or ()).apparmor not in ("", security.UNCONFINED):
        yield "The AppArmor profile of SecurityOpt"


# --- modes: shared namespaces ---------------------------------------------------------------------

PRIVATE, SHAREABLE = "private", "shareable"
"""IpcMode: an IPC namespace and a /dev/shm of its own, which other containers may join if it is
shareable.
"""


def joined(mode: str) -> str:
    """The name or id in `container:<name|id>`; empty for another mode."""
    return mode.removeprefix("container:") if mode.startswith("container:") else ""


def _check_modes(host: HostConfig) -> None:
    for field, mode, known in (
        ("NetworkMode", host.network_mode, None),
        ("PidMode", host.pid_mode, ("", "host", "private")),
        ("IpcMode", host.ipc_mode, ("", "host", PRIVATE, SHAREABLE, "none")),
        ("UTSMode", host.uts_mode, ("", "host", "private")),
        ("CgroupnsMode", host.cgroupns_mode, ("", "host", "private")),
    ):
        if mode.startswith("container:") and field not in ("UTSMode", "CgroupnsMode"):
            if not joined(mode):
                raise InvalidParameter(f"{field}: invalid container format container:<name|id>: {mode!r}")
        elif known is not None and mode not in known:
            raise InvalidParameter(f"{field}: invalid mode: {mode!r}")


def check_remapped(host: HostConfig) -> None:
    """What a container in a user namespace cannot have, in Docker's words."""
    if host.privileged:
        raise InvalidParameter(
            "privileged mode is incompatible with user namespaces.  You must run the container in the host namespace "
            "when running privileged mode"
        )
    if host.network_mode == "host":
        raise InvalidParameter("cannot share the host's network namespace when user namespaces are enabled")
    if host.pid_mode == "host":
        raise InvalidParameter("cannot share the host PID namespace when user namespaces are enabled")


def check_together(config: Config, host: HostConfig) -> None:
    """Contradictions between fields, in Docker's words (its runconfig)."""
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
    for is_given, what in conflicts:
        if is_given:
            raise InvalidParameter(f"conflicting options: {what}")


_IPC_SYSCTLS = frozenset(
    f"kernel.{name}"
    for name in ("msgmax", "msgmnb", "msgmni", "sem", "shmall", "shmmax", "shmmni", "shm_rmid_forced", "msg_next_id")
)


def _check_sysctl(name: str, host: HostConfig) -> None:
    """Only sysctls that the kernel keeps per namespace are allowed, and only where the container
    does not share that namespace (sysctl(2), namespaces(7)).
    """
    if not re.fullmatch(r"[A-Za-z0-9_-]+([./][A-Za-z0-9_-]+)+", name, re.ASCII):
        raise InvalidParameter(f"Sysctls: invalid name {name[:100]!r}")
    dotted = name.replace("/", ".")
    if dotted.startswith("net."):
        if host.network_mode == "host" or joined(host.network_mode):
            raise InvalidParameter(
                f'Sysctls: sysctl "{name}" is not allowed in a network namespace that is not its own'
            )
        if of_interface(name):
            raise InvalidParameter(
                f"Sysctls: interface specific sysctl setting {name!r} must be supplied using driver option "
                f"'com.docker.network.{SYSCTLS}'"
            )
    elif dotted in _IPC_SYSCTLS or dotted.startswith("fs.mqueue."):
        if host.ipc_mode == "host" or joined(host.ipc_mode):
            raise InvalidParameter(f'Sysctls: sysctl "{name}" is not allowed in an ipc namespace that is not its own')
    elif dotted == "kernel.domainname":
        if host.uts_mode == "host":
            raise InvalidParameter(f'Sysctls: sysctl "{name}" is not allowed in the hosts UTS namespace')
    else:
        raise InvalidParameter(f'Sysctls: sysctl "{name}" is not in a separate kernel namespace')


def of_interface(sysctl: str) -> tuple[str, str, str, str] | None:
    """The family, the kind, the interface and the setting of a sysctl of one interface, such as
    net.ipv4.conf.eth0.forwarding; None for another. In place of the dots it may have slashes
    (sysctl(8)).
    """
    separator = next((each for each in sysctl if each in "./"), ".")  # the first of them counts
    words = sysctl.split(separator, 4)
    if len(words) != 5 or words[0] != "net" or words[3] in ("all", "default"):
        return None
    return words[1], words[2], words[3], words[4]


def network_sysctls(host: HostConfig) -> dict[str, str]:
    """Those of its network namespace, by path below /proc/sys/net."""
    dotted = {name.replace("/", "."): value for name, value in (host.sysctls or {}).items()}
    prefix = "net."
    return {
        name.removeprefix(prefix).replace(".", "/"): value for name, value in dotted.items() if name.startswith(prefix)
    }


def has_ipv6(host: HostConfig, link: str = "") -> bool:
    """False if its sysctls switch IPv6 off for all links, or for this one."""
    for name, value in (host.sysctls or {}).items():
        match name.replace("/", ".").split("."):
            case ["net", "ipv6", "conf", of, "disable_ipv6"] if of in ("all", link) and value.strip() not in ("", "0"):
                return False
    return True


# --- single values --------------------------------------------------------------------------------


def check_cgroup_parent(path: str, driver: str = "cgroupfs") -> None:
    """Raises InvalidParameter for a parent that no cgroup of this driver can have."""
    try:
        cgroup_parent(path)
        if path and driver == "systemd":
            scopes.check_parent(path)
    except ValueError as error:
        raise InvalidParameter(f"CgroupParent: {error}") from error


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


def _check_device_request(request: DeviceRequest) -> None:
    if request.count and request.device_ids:
        raise InvalidParameter("DeviceRequests: cannot set both Count and DeviceIDs on device request")


def _check_group(group: str) -> None:
    if not group or ":" in group or "\0" in group:
        raise InvalidParameter(f"GroupAdd: invalid group {group!r}")


def _check_extra_host(entry: str) -> None:
    name, _, address = entry.partition(":")
    if not is_word(name) or not address:
        raise InvalidParameter(f"ExtraHosts: bad format for add-host: {entry!r}")
    if address != HOST_GATEWAY:
        bare = address[1:-1] if address.startswith("[") and address.endswith("]") else address
        parsed_address(bare, "ExtraHosts", zone=True)


def _check_ulimit(ulimit: Ulimit) -> None:
    if ulimit.hard != -1 and (ulimit.soft == -1 or ulimit.soft > ulimit.hard):
        raise InvalidParameter(
            f"Ulimits: ulimit soft limit must be less than or equal to hard limit: {ulimit.soft} > {ulimit.hard}"
        )


def _check_word(field: str, word: str) -> None:
    if not is_word(word):
        raise InvalidParameter(f"{field}: invalid entry {word[:100]!r}")


def _check_path(field: str, path: str) -> None:
    if not path.startswith("/") or "\0" in path:
        raise InvalidParameter(f"{field}: {path[:100]!r} is not an absolute path")
    mount_points.check_length(path, f"{field}: {path[:100]!r}")


class DeviceCgroupRule(NamedTuple):
    """One entry of DeviceCgroupRules. A number that is None is every number."""

    type: str
    major: int | None
    minor: int | None
    access: str


def parse_device_rule(text: str) -> DeviceCgroupRule:
    """`TYPE MAJOR:MINOR ACCESS`, such as `c 1:3 mr` and `a *:* rwm`.

    Raises InvalidParameter with the entry in it.
    """
    parts = _DEVICE_RULE.fullmatch(text)
    if parts is None:
        raise InvalidParameter(f"DeviceCgroupRules: invalid device cgroup rule format: {text[:100]!r}")
    major, minor = (None if number == "*" else int(number) for number in parts.group(2, 3))
    return DeviceCgroupRule(parts[1], major, minor, parts[4])


_DEVICE_RULE = re.compile(r"([acb]) ([0-9]{1,9}|\*):([0-9]{1,9}|\*) ([rwm]{1,3})")


class Link(msgspec.Struct, frozen=True):
    """One entry of Links."""

    name: str
    alias: str


def parse_link(text: str) -> Link:
    """`name:alias`, `name:/alias` or `name`, and `/name:/own/alias` as inspect shows it.

    Raises InvalidParameter with the entry in it.
    """
    name, colon, alias = text.partition(":")
    if name.startswith("/") or alias.startswith("/"):
        name, alias = name.removeprefix("/"), alias.rpartition("/")[2]
    alias = alias if colon else name
    if not _NAME.fullmatch(name) or not _NAME.fullmatch(alias):
        raise InvalidParameter(f"Links: bad format for links: {text!r}")
    return Link(name, alias)


_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]*")


_ENTRIES: tuple[tuple[str, Callable[[Any], object]], ...] = (
    ("binds", mount_points.parse_bind),
    ("links", parse_link),
    ("volumes_from", mount_points.parse_volumes_from),
    ("mounts", mount_points.check),
    ("devices", _check_device),
    ("device_requests", _check_device_request),
    ("device_cgroup_rules", parse_device_rule),
    ("masked_paths", partial(_check_path, "MaskedPaths")),
    ("readonly_paths", partial(_check_path, "ReadonlyPaths")),
    ("group_add", _check_group),
    ("dns", lambda server: parsed_address(server, "Dns", zone=True)),
    ("dns_search", partial(_check_word, "DnsSearch")),
    ("dns_options", partial(_check_word, "DnsOptions")),
    ("extra_hosts", _check_extra_host),
    ("ulimits", _check_ulimit),
)
"""Lists of a HostConfig, and the rule of each of their entries."""


def checked_restart_policy(policy: RestartPolicy) -> RestartPolicy:
    """Normalised; raises InvalidParameter. Shared with update."""
    if policy.name not in _RESTART_NAMES:
        raise InvalidParameter(
            f"RestartPolicy: invalid restart policy '{policy.name}': it must be one of no, always, unless-stopped "
            "and on-failure[:max-retries]"
        )
    if policy.maximum_retry_count < 0:
        raise InvalidParameter("RestartPolicy: maximum retry count cannot be negative")
    if policy.maximum_retry_count and policy.name != "on-failure":
        raise InvalidParameter(
            f"RestartPolicy: maximum retry count cannot be used with restart policy '{policy.name or 'no'}'"
        )
    return RestartPolicy(name=policy.name or "no", maximum_retry_count=policy.maximum_retry_count)


def merged(config: Config, image: Config) -> Config:
    """`config` with missing fields taken from the image's, by Docker's rules."""
    cmd, entrypoint = strings(config.cmd), strings(config.entrypoint)
    if not entrypoint:
        if not cmd:
            cmd = strings(image.cmd)
        if entrypoint is None:
            entrypoint = strings(image.entrypoint)
    working_dir = config.working_dir or image.working_dir
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
        # `--entrypoint ''` removes the image's
        entrypoint=entrypoint if entrypoint and entrypoint != [""] else None,
        healthcheck=healthcheck,
        volumes=_union(config.volumes, image.volumes) or None,
        working_dir=directory(working_dir) if working_dir else "",
        labels={**(image.labels or {}), **(config.labels or {})},
        stop_signal=config.stop_signal or image.stop_signal or msgspec.UNSET,
        on_build=None,
        shell=config.shell or image.shell or msgspec.UNSET,
    )


def directory(path: str) -> str:
    """A working directory without `.`, `..` and further slashes; "/" for the empty path."""
    return posixpath.normpath(f"/{path}").replace("//", "/") if path else "/"


def _union(first: object, second: object) -> dict[str, dict[str, object]]:
    keys: list[str] = []
    for source in (second, first):
        if isinstance(source, dict):
            keys.extend(source)
    return {key: {} for key in keys}


def command(config: Config) -> tuple[str, tuple[str, ...]]:
    """Path and arguments that the container runs.

    Raises InvalidParameter when there is no command at all.
    """
    entrypoint = strings(config.entrypoint) or []
    if entrypoint == [""]:  # means none
        entrypoint = []
    words = [*entrypoint, *(strings(config.cmd) or ())]
    if not words:
        raise InvalidParameter("No command specified")
    path, *args = words
    limits.check_exec((path, *args), config.env or ())
    return path, tuple(args)
