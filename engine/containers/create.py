"""From the body of a create to a container's record: the rules of the body, the merge with the image's configuration. Pure.

Each rule of the specification's tables "Container create body" and "Limits" that does not depend on the host's state is checked here, before
anything is made. Not here: what depends on other objects (names in use, networks, sources of binds).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

import msgspec

from engine.containers.signals import signal_number
from engine.errors import InvalidParameter
from engine.wire.containers import (
    Config,
    CreateBody,
    HostConfig,
    LogConfig,
    MountPoint,
    RestartPolicy,
    Strings,
)

DEFAULT_SHM_SIZE = 64 << 20
MIN_MEMORY = 4 << 20
MIN_HEALTH_DURATION = 1_000_000

_HOST_LABEL = re.compile(r"[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?")
_VOLUME_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]+")
_PORT = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?(?:/(tcp|udp|sctp))?", re.IGNORECASE)
_MODES = {"ro", "rw", "z", "Z", "nocopy", "shared", "rshared", "slave", "rslave", "private", "rprivate"}
_PROPAGATIONS = {"shared", "rshared", "slave", "rslave", "private", "rprivate"}
_RESTART_NAMES = {"", "no", "always", "unless-stopped", "on-failure"}


def strings(value: Strings) -> list[str] | None:
    """A string-or-list field as the list that is kept; null and absent stay None."""
    return [value] if isinstance(value, str) else value


def checked(body: CreateBody) -> tuple[Config, HostConfig]:
    """The body's two halves, normalised. Raises InvalidParameter naming the field and the rule."""
    host = _checked_host(body.host_config)
    if body.hostname:
        _check_hostname(body.hostname)
    for entry in body.env or ():
        if not entry or entry.startswith("="):
            raise InvalidParameter(f"invalid environment variable: {entry}")
        if "\0" in entry:
            raise InvalidParameter("invalid environment variable: it holds a NUL character")
    for port in body.exposed_ports or ():
        _check_port(port, "ExposedPorts")
    if body.working_dir and not body.working_dir.startswith("/"):
        raise InvalidParameter(
            f"The working directory '{body.working_dir}' is invalid. It needs to be an absolute path"
        )
    for word in (*(strings(body.cmd) or ()), *(strings(body.entrypoint) or ()), body.working_dir, body.user):
        if "\0" in word:
            raise InvalidParameter("Cmd, Entrypoint, WorkingDir and User must not hold a NUL character")
    for path in body.volumes or ():
        if not path.startswith("/") or path == "/":
            raise InvalidParameter(f"invalid volume path '{path}': it must be absolute and not '/'")
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
    if host.memory < 0 or 0 < host.memory < MIN_MEMORY:
        raise InvalidParameter(f"Memory: the minimum memory limit allowed is 4MB, got {host.memory}")
    if host.memory_swap > 0:
        if not host.memory:
            raise InvalidParameter("MemorySwap: you should always set the Memory limit when using MemorySwap")
        if host.memory_swap < host.memory:
            raise InvalidParameter("MemorySwap: minimum memoryswap limit should be larger than memory limit")
    if host.memory_swap < -1:
        raise InvalidParameter(f"MemorySwap must be -1, 0 or a number of bytes: {host.memory_swap}")
    if host.memory_reservation < 0 or host.kernel_memory < 0:
        raise InvalidParameter("MemoryReservation and KernelMemory must not be negative")
    if host.memory and host.memory_reservation > host.memory:
        raise InvalidParameter("MemoryReservation: it should be smaller than the memory limit")
    if not -1 <= host.memory_swappiness <= 100:
        raise InvalidParameter(f"MemorySwappiness: {host.memory_swappiness}, valid memory swappiness range is 0-100")
    if host.blkio_weight and not 10 <= host.blkio_weight <= 1000:
        raise InvalidParameter(f"BlkioWeight: {host.blkio_weight}, range of blkio weight is from 10 to 1000")
    for device in host.blkio_weight_device or ():
        if not 10 <= device.weight <= 1000:
            raise InvalidParameter(f"BlkioWeightDevice: {device.path}: range of blkio weight is from 10 to 1000")
    if host.cpu_shares < 0:
        raise InvalidParameter(f"CpuShares must not be negative: {host.cpu_shares}")
    if host.cpu_period and not 1000 <= host.cpu_period <= 1_000_000:
        raise InvalidParameter(f"CpuPeriod: {host.cpu_period}, CPU cfs period can not be less than 1ms or more than 1s")
    if host.cpu_quota > 0 and host.cpu_quota < 1000:
        raise InvalidParameter(f"CpuQuota: {host.cpu_quota}, CPU cfs quota can not be less than 1ms")
    if host.pids_limit < -1:
        raise InvalidParameter(f"PidsLimit must be -1 (unlimited), 0 or positive: {host.pids_limit}")
    if host.shm_size < 0:
        raise InvalidParameter(f"ShmSize: {host.shm_size}, SHM size must be greater than 0")
    if not -1000 <= host.oom_score_adj <= 1000:
        raise InvalidParameter(f"OomScoreAdj: {host.oom_score_adj}, range for oom score adj is [-1000, 1000]")
    if host.isolation not in ("", "default"):
        raise InvalidParameter(f"Isolation: {host.isolation}: this platform has only 'default'")
    for field in ("cpu_count", "cpu_percent", "io_maximum_iops", "io_maximum_bandwidth"):
        if getattr(host, field):
            raise InvalidParameter(f"{field}: only the Windows daemon has it")
    if host.userns_mode not in ("", "host"):
        raise InvalidParameter(f"UsernsMode: invalid user namespace mode: {host.userns_mode}")
    for port, bindings in (host.port_bindings or {}).items():
        _check_port(port, "PortBindings")
        for binding in bindings or ():
            if binding.host_port and not _valid_port_range(binding.host_port):
                raise InvalidParameter(f"PortBindings: Invalid port specification: {binding.host_port!r}")
            if binding.host_ip:
                check_address(binding.host_ip, "PortBindings HostIp")
    for extra in host.extra_hosts or ():
        name, _, address = extra.partition(":")
        if not name or not address:
            raise InvalidParameter(f"ExtraHosts: bad format for add-host: {extra!r}")
        check_address(address, "ExtraHosts")
    for server in host.dns:
        check_address(server, "Dns")
    for ulimit in host.ulimits or ():
        if ulimit.hard != -1 and (ulimit.soft == -1 or ulimit.soft > ulimit.hard):
            raise InvalidParameter(
                f"Ulimits: ulimit soft limit must be less than or equal to hard limit: {ulimit.soft} > {ulimit.hard}"
            )
    policy = _restart_policy(host.restart_policy)
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


def _restart_policy(policy: RestartPolicy) -> RestartPolicy:
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


def _check_port(text: str, field: str) -> None:
    match = _PORT.fullmatch(text)
    if match is None or not 1 <= int(match[1]) <= 65535 or (match[2] and not int(match[1]) <= int(match[2]) <= 65535):
        raise InvalidParameter(f"{field}: Invalid port specification: {text!r}: it must be <port>/<tcp|udp|sctp>")


def _valid_port_range(text: str) -> bool:
    match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", text)
    if match is None:
        return False
    return int(match[1]) <= 65535 and (match[2] is None or int(match[1]) <= int(match[2]) <= 65535)


class Bind(msgspec.Struct, frozen=True):
    """One entry of Binds. `source` is a host path, or a volume's name when `named`."""

    source: str
    destination: str
    named: bool
    read_only: bool
    mode: str
    propagation: str


def parse_bind(text: str) -> Bind:
    """`host-src:container-dest[:options]` or `volume-name:container-dest[:options]`. Raises InvalidParameter with the entry in it."""
    source, _, rest = text.partition(":")
    destination, _, mode = rest.partition(":")
    if not source or not destination or "\0" in text:
        raise InvalidParameter(f"Invalid bind mount spec {text!r}: it must be host-src:container-dest[:options]")
    named = not source.startswith("/")
    if named and not _VOLUME_NAME.fullmatch(source):
        raise InvalidParameter(
            f"Invalid bind mount spec {text!r}: {source!r} is neither an absolute path nor a valid volume name"
        )
    destination = normal_path(destination, text)
    options = mode.split(",") if mode else []
    propagations = [option for option in options if option in _PROPAGATIONS]
    if (
        any(option not in _MODES for option in options)
        or len(options) != len(set(options))
        or {"ro", "rw"} <= set(options)
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


def mount_points(host: HostConfig, volume_directory: str) -> tuple[MountPoint, ...]:
    """What inspect shows in Mounts for the container's binds. Raises InvalidParameter when two share a destination."""
    mounts: dict[str, MountPoint] = {}
    for text in host.binds or ():
        bind = parse_bind(text)
        if bind.destination in mounts:
            raise InvalidParameter(f"Duplicate mount point: {bind.destination}")
        if bind.named:
            mounts[bind.destination] = MountPoint(
                name=bind.source,
                source=f"{volume_directory}/{bind.source}/_data",
                destination=bind.destination,
                driver="local",
                mode=bind.mode,
                rw=not bind.read_only,
                propagation=bind.propagation,
            )
        else:
            mounts[bind.destination] = MountPoint(
                source=bind.source,
                destination=bind.destination,
                mode=bind.mode,
                rw=not bind.read_only,
                propagation=bind.propagation,
            )
    return tuple(mounts.values())


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
        entrypoint=entrypoint or None,
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
