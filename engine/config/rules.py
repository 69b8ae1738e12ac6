"""What the values of options must be. A rule's message begins with the value; who calls it puts the
option's name before that, as its source calls it.

No message quotes a value that may be a secret.
"""

from __future__ import annotations

import ipaddress
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from engine.common import proxies, seccomp_profiles
from engine.common.network_rules import (
    LINK_NAME,
    Pool,
    boolean,
    bridge_interface,
    is_word,
    mtu,
    own_options,
    parsed_mark,
)
from engine.common.times import parse_duration
from engine.config import cache
from engine.config.declaration import (
    FIREWALL_MARK,
    FIREWALLS,
    INHERITED,
    LOG_FORMATS,
    LOG_LEVELS,
    LOG_STARTS,
    MAX_RUN_PATH,
    MAX_SOCKET_PATH,
    Config,
)
from engine.errors import InvalidParameter, reason


class Broken(NamedTuple):
    """A rule that a value breaks."""

    field: str
    text: str


def broken(config: Config, *, alone: bool = False) -> Broken | None:
    """The first option whose value is invalid, alone or beside others. `alone`: only such as are
    invalid whatever the others are.
    """
    for field, rule in _RULES.items():
        try:
            rule(getattr(config, field))
        except ValueError as error:
            return Broken(field, str(error))
    return None if alone else _tls(config) or _default_network(config)


def runtime(entry: str) -> tuple[str, list[str]]:
    """Name, and program with its arguments, of `NAME=PATH [ARGUMENTS]`, quoted as for a shell.
    Raises ValueError.
    """
    name, equals, command = entry.partition("=")
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"{entry!r}: {error}") from error
    valid = equals and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name)
    if not (valid and words and words[0] and (words[0].startswith("/") or "/" not in words[0])):
        raise ValueError(f"{entry!r}: must be NAME=PATH [ARGUMENTS], with an absolute path or a program's name")
    return name, words


def ulimit(entry: str) -> tuple[str, int, int]:
    """Name, soft and hard limit of `NAME=SOFT[:HARD]`; -1 is unlimited. Raises ValueError."""
    match = re.fullmatch(r"([a-z]+)=(-?[0-9]{1,19})(?::(-?[0-9]{1,19}))?", entry)
    if match is None or match[1] not in ULIMITS:
        raise ValueError(f"{entry!r}: must be NAME=SOFT[:HARD], with a name of {', '.join(ULIMITS)}")
    soft, hard = int(match[2]), int(match[3] or match[2])
    if not -1 <= soft < 1 << 63 or not -1 <= hard < 1 << 63:
        raise ValueError(f"{entry!r}: limits must be -1 (unlimited), 0 or positive numbers of 63 bits")
    if hard != -1 and (soft == -1 or soft > hard):
        raise ValueError(f"{entry!r}: the soft limit must not be above the hard limit")
    return match[1], soft, hard


ULIMITS = (
    *("as", "core", "cpu", "data", "fsize", "locks", "memlock", "msgqueue"),
    *("nice", "nofile", "nproc", "rss", "rtprio", "rttime", "sigpending", "stack"),
)
"""Names of resource limits, getrlimit(2)."""


def size_in_bytes(text: str) -> int:
    """Bytes of a size such as 64m, as dockerd reads it: units are powers of 1024. Raises
    ValueError.
    """
    match = re.fullmatch(r"([0-9]{1,19}(?:\.[0-9]{1,19})?) ?([kmgtp]?)(?:i?b)?", text.lower())
    size = int(float(match[1]) * 1024 ** " kmgtp".index(match[2] or " ")) if match is not None else 0
    if not 0 < size < 1 << 63:
        raise ValueError(f"{text!r}: must be a size such as 64m, above 0")
    return size


def seccomp_document(file: str) -> seccomp_profiles.Document:
    """The profile in a file. Raises ValueError."""
    try:
        return seccomp_profiles.parse(Path(file).read_bytes())
    except OSError as error:
        raise ValueError(f"{file}: {reason(error)}") from error
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def cgroup_parent(path: str) -> None:
    """Raises ValueError for a path that no cgroup can have."""
    if ".." in path.split("/"):
        raise ValueError(f"{path[:100]!r}: must not contain ..")
    if "\0" in path or "\n" in path:
        raise ValueError(f"{path[:100]!r}: must not contain a NUL character or a line break")
    if len(path.encode()) > _CGROUP_PARENT_MAX:
        raise ValueError(f"{path[:100]!r} has {len(path.encode())} bytes of at most {_CGROUP_PARENT_MAX}")


_CGROUP_PARENT_MAX = 3900
"""Bytes: PATH_MAX without a hierarchy's mount point and the container's id."""


def _remapped(value: str) -> None:
    user, colon, group = value.partition(":")
    if value and (not user or (colon and not group) or ":" in group):
        raise ValueError(f"{value!r}: must be default, USER, USER:GROUP, UID or UID:GID")


def _seccomp(profile: str) -> None:
    if profile not in (seccomp_profiles.BUILTIN, seccomp_profiles.UNCONFINED):
        seccomp_document(profile)


def _advertised(address: str) -> None:
    """An interface need not exist yet."""
    try:
        valid = not ipaddress.ip_address(address).is_unspecified
    except ValueError:
        valid = not address or LINK_NAME.fullmatch(address) is not None
    if not valid:
        raise ValueError(f"{address!r}: must be an IP address or a network interface")


def _ulimits(entries: Iterable[str]) -> None:
    names: set[str] = set()
    for name, _, _ in map(ulimit, entries):
        if name in names:
            raise ValueError(f"{name}: is given twice")
        names.add(name)


def _run(run: Path) -> None:
    if len(os.fsencode(run)) > MAX_RUN_PATH:
        raise ValueError(f"{run}: must have at most {MAX_RUN_PATH} bytes, or the paths of sockets in it are too long")


def _sockets(paths: Iterable[str]) -> None:
    found: set[str] = set()
    for path in paths:
        if path in found:
            raise ValueError(f"{path}: is given twice")
        if not path.startswith(("/", INHERITED)) or len(os.fsencode(path)) > MAX_SOCKET_PATH:
            raise ValueError(f"{path!r}: must be an absolute path of at most {MAX_SOCKET_PATH} bytes, or fd://")
        found.add(path)


def _bridge(name: str) -> None:
    if not 0 < len(name.encode()) <= 15:
        raise ValueError(f"{name!r}: must have 1 to 15 bytes, as every interface name")


def _absolute(path: str) -> None:
    if path and not os.path.isabs(path):
        raise ValueError(f"{path}: must be an absolute path")


def _runtimes(entries: Iterable[str]) -> None:
    names: set[str] = set()
    for name, _ in map(runtime, entries):
        if name in names:
            raise ValueError(f"{name}: is given twice")
        names.add(name)


def _pool(entry: str) -> None:
    try:
        Pool.parse(entry)
    except ValueError as error:
        raise ValueError(f"{entry}: {error}") from error


def _tcp(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ValueError(f"{address}: must be HOST:PORT, with a port of 0 to 65535")


def _metrics(address: str) -> None:
    if address:
        _tcp(address)
        if not _is_loopback(address.rpartition(":")[0]):
            raise ValueError(f"{address}: must be on a loopback address, nobody is asked who they are")


def _mirror(url: str) -> None:
    if "@" in url.partition("://")[2].partition("/")[0]:
        raise ValueError(f"{proxies.hidden(url)!r}: must not have user and password")
    if not re.fullmatch(r"https?://[^/?#\s]+(/[^?#\s]*)?", url, re.IGNORECASE):
        raise ValueError(f"{url!r}: must be an http or https URL")


def _proxy(url: str) -> None:
    try:
        if url:
            proxies.parse(url)
    except ValueError as error:
        raise ValueError(f"{proxies.hidden(url)!r}: {error}") from error


def _registry(rule: str) -> None:
    try:
        ipaddress.ip_network(rule, strict=False)  # an address is a network of one
    except ValueError:
        if re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^\s:/\[\]]+)(:[0-9]{1,5})?", rule) is None:
            raise ValueError(f"{rule!r}: must be HOST, HOST:PORT or a network such as 10.0.0.0/8") from None


def _address(text: str) -> None:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        raise ValueError(f"{text!r}: must be an IP address") from None
    if "%" in text:
        raise ValueError(f"{text!r}: must be an IP address without a zone")


def _if_given(rule: Callable[[str], None]) -> Callable[[str], None]:
    return lambda text: rule(text) if text else None


def _address_of(version: int) -> Callable[[str], None]:
    def check(text: str) -> None:
        _address(text)
        if ipaddress.ip_address(text).version != version:
            raise ValueError(f"{text!r}: must be an IPv{version} address")

    return _if_given(check)


def _host_gateways(addresses: Iterable[str]) -> None:
    versions = set[int]()
    for text in addresses:
        _address(text)
        version = ipaddress.ip_address(text).version
        if version in versions:
            raise ValueError(f"{text}: only one IPv{version} address can be given")
        versions.add(version)


def _search_domain(domain: str) -> None:
    if domain != "." and not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_-]*[A-Za-z0-9])?(\.[A-Za-z0-9_-]+)*\.?", domain):
        raise ValueError(f"{domain!r}: must be a domain name, or . for none")


def _word(option: str) -> None:
    if not is_word(option):
        raise ValueError(f"{option!r}: must be one word")


def _bridge_subnet(version: int) -> Callable[[str], None]:
    def check(text: str) -> None:
        try:
            bridge_interface(text, version)
        except InvalidParameter as error:
            raise ValueError(error.message) from error

    return _if_given(check)


def _part(version: int) -> Callable[[str], None]:
    def check(text: str) -> None:
        try:
            found = ipaddress.ip_network(text, strict=False)
        except ValueError:
            raise ValueError(f"{text!r}: must be an IPv{version} subnet such as {_EXAMPLES[version]}") from None
        if "/" not in text or found.version != version or found.prefixlen > found.max_prefixlen - 2:
            raise ValueError(f"{text!r}: must be an IPv{version} subnet with room for containers")

    return _if_given(check)


_EXAMPLES = {4: "172.17.128.0/17", 6: "fd00:1::/64"}


def _mtu(size: int) -> None:
    if size and not 68 <= size <= 65535:
        raise ValueError(f"{size}: must be from 68 to 65535")


def _accept_mark(text: str) -> None:
    try:
        parsed_mark(text)
    except ValueError:
        raise ValueError(f"{text!r}: must be MARK or MARK/MASK, numbers of 32 bits, the mark within its mask") from None


def _network_option(entry: str) -> None:
    driver, _, option = entry.partition("=")
    key, equals, value = option.partition("=")
    if not (driver and key and equals):
        raise ValueError(f"{entry!r}: must be DRIVER=KEY=VALUE")
    if driver != "bridge":
        return  # checked by the driver, when a network is created
    given = own_options({key: value})
    try:
        mtu(given, entry)
        for name in ("bridge.enable_icc", "bridge.enable_ip_masquerade", "bridge.inhibit_ipv4", "enable_ipv6"):
            boolean(given.get(name), False, entry)
    except InvalidParameter as error:
        raise ValueError(error.message) from error


def _default_network(config: Config) -> Broken | None:
    """Subnets, parts of them and gateways fit together."""
    if not config.icc and config.firewall == "none":
        return Broken("icc", "false: needs rules, and there are none with --firewall none (iptables: false)")
    if config.ipv6 and 0 < config.mtu < 1280:
        return Broken("mtu", f"{config.mtu}: is less than 1280, the least that IPv6 works with")
    if ":" in config.host_ip and not config.ipv6:
        return Broken("host_ip", f"{config.host_ip}: must be an IPv4 address, as the default network has no IPv6")
    versions = {4: (config.bridge_subnet, "fixed_cidr", "gateway")}
    versions |= {6: (config.bridge_subnet6, "fixed_cidr6", "gateway6")} if config.ipv6 else {}
    for text, part, gateway in versions.values():
        if not text:
            continue
        subnet = ipaddress.ip_interface(text).network
        if given := getattr(config, part):
            found = ipaddress.ip_network(given, strict=False)
            if found.prefixlen < subnet.prefixlen or found.network_address not in subnet:
                return Broken(part, f"{given}: must be a part of the subnet {subnet}")
        if (given := getattr(config, gateway)) and ipaddress.ip_address(given) not in subnet:
            return Broken(gateway, f"{given}: must be an address of the subnet {subnet}")
    return None


def _mark(mark: int) -> None:
    if not 0 < mark < 1 << 32 or mark.bit_count() != 1:
        raise ValueError(f"{mark:#x}: must be one bit of 32, such as {FIREWALL_MARK:#x}")


_FEATURES = {
    "cdi=false": "devices by CDI are always offered; cdi-spec-dirs may name an empty directory",
    "containerd-snapshotter=true": "the engine has a store of its own, which keeps images as overlay2 does",
}
"""Values that would mean something else here, and why."""


def _feature(entry: str) -> None:
    """As in dockerd, unknown features mean nothing."""
    name, _, value = entry.partition("=")
    if not name or value not in ("true", "false"):
        raise ValueError(f"{entry!r}: must be NAME=true or NAME=false")
    if entry in _FEATURES:
        raise ValueError(f"{entry}: is not supported: {_FEATURES[entry]}")


def _size(text: str) -> None:
    if text:
        cache.size(text)


def _age(text: str) -> None:
    try:
        age = parse_duration(text)
    except ValueError:
        age = -1
    if age < 0:
        raise ValueError(f"{text!r}: must be a duration such as 48h")


def _entitlement(name: str) -> None:
    if name in ("security.insecure", "device"):
        raise ValueError(f"{name}: is not supported, steps of builds cannot leave their sandbox")
    if name not in ("network.host", "none"):
        raise ValueError(f"{name!r}: must be network.host or none")


def _log_options(entries: Iterable[str]) -> None:
    """Names and values are checked by the driver (`logs/drivers`)."""
    found: dict[str, str] = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not (name and equals):
            raise ValueError(f"{name!r}: must be KEY=VALUE")
        if found.setdefault(name, value) != value:
            raise ValueError(f"{name}: has another value already")


def _labels(labels: Iterable[str]) -> None:
    found: dict[str, str] = {}
    for label in labels:
        key, equals, value = label.partition("=")
        if not (key and equals) or any(each.isspace() for each in key):
            raise ValueError(f"{label!r}: must be KEY=VALUE")
        if found.setdefault(key, value) != value:
            raise ValueError(f"{label!r}: {key} has another value already")


def _resources(entries: Iterable[str]) -> None:
    """A kind has a number, or names."""
    kinds: dict[str, bool] = {}
    names: set[str] = set()
    for entry in entries:
        kind, _, value = entry.partition("=")
        if not re.fullmatch(r"[^\s=,]+", kind) or not re.fullmatch(r"[^\s=,]+", value):
            raise ValueError(f"{entry!r}: must be KIND=NUMBER or KIND=NAME")
        number = value.isascii() and value.isdigit()
        if number and int(value[:20]) >= 1 << 63:
            raise ValueError(f"{entry!r}: the number is too large")
        if entry in names or (kind in kinds and (number or kinds[kind])):
            raise ValueError(f"{entry!r}: {kind} is given twice, or has numbers and names")
        kinds[kind] = number
        names.add(entry)


def _cgroup_driver(entry: str) -> None:
    if entry not in ("native.cgroupdriver=cgroupfs", "native.cgroupdriver=systemd"):
        raise ValueError(f"{entry!r}: must be native.cgroupdriver=cgroupfs or native.cgroupdriver=systemd")


def _each(rule: Callable[[Any], object]) -> Callable[[Iterable[Any]], None]:
    def check(values: Iterable[Any]) -> None:
        for value in values:
            rule(value)

    return check


def _one_of(choices: Collection[str]) -> Callable[[str], None]:
    def check(value: str) -> None:
        if value not in choices:
            raise ValueError(f"{value!r}: must be one of {', '.join(filter(None, choices))}")

    return check


def _at_least(least: int, unit: str = "") -> Callable[[int], None]:
    def check(value: int) -> None:
        if value < least:
            raise ValueError(f"{value}: must be at least {least}{unit}")

    return check


_RULES: dict[str, Callable[[Any], object]] = {
    "sockets": _sockets,
    "run": _run,
    "bridge": _bridge,
    "init_path": _absolute,
    "cdi_specs": _each(_absolute),
    "pidfile": _absolute,
    "dns": _each(_address),
    "dns_opts": _each(_word),
    "dns_search": _each(_search_domain),
    "host_gateways": _host_gateways,
    "bridge_subnet": _bridge_subnet(4),
    "bridge_subnet6": _bridge_subnet(6),
    "fixed_cidr": _part(4),
    "fixed_cidr6": _part(6),
    "gateway": _address_of(4),
    "gateway6": _address_of(6),
    "mtu": _mtu,
    "host_ip": _if_given(_address),
    "bridge_accept_mark": _accept_mark,
    "network_opts": _each(_network_option),
    "resolv_conf": _absolute,
    "address_pools": _each(_pool),
    "runtimes": _runtimes,
    "tcp": _each(_tcp),
    "metrics": _metrics,
    "registry_mirrors": _each(_mirror),
    "features": _each(_feature),
    "build_reserved": _size,
    "build_max_used": _size,
    "build_min_free": _size,
    "build_policies": _each(cache.policy),
    "build_history_entries": _at_least(0),
    "build_history_age": _age,
    "build_entitlements": _each(_entitlement),
    "http_proxy": _proxy,
    "https_proxy": _proxy,
    "insecure_registries": _each(_registry),
    "log_level": _one_of(LOG_LEVELS),
    "log_format": _one_of(LOG_FORMATS),
    "log_start": _one_of(LOG_STARTS),
    "firewall": _one_of(FIREWALLS),
    "firewall_mark": _mark,
    "log_opts": _log_options,
    "labels": _labels,
    "generic_resources": _resources,
    "exec_opts": _each(_cgroup_driver),
    "cgroupns_mode": _one_of(("", "host", "private")),
    "ipc_mode": _one_of(("private", "shareable")),
    "swarm_advertise": _advertised,
    "cgroup_parent": cgroup_parent,
    "shm_size": size_in_bytes,
    "ulimits": _ulimits,
    "seccomp_profile": _seccomp,
    "userns_remap": _remapped,
    "attach_stall": _at_least(1, " second"),
    "registry_timeout": _at_least(1, " second"),
    "plugin_timeout": _at_least(1, " second"),
    "shutdown_timeout": _at_least(0),
    "max_downloads": _at_least(0),
    "max_uploads": _at_least(0),
    "download_attempts": _at_least(1),
}


def _tls(config: Config) -> Broken | None:
    """TCP has mutual TLS, or is on loopback."""
    files = {"tls_ca": config.tls_ca, "tls_cert": config.tls_cert, "tls_key": config.tls_key}
    if not config.tcp:
        return None
    if config.insecure and not any(files.values()):
        for address in config.tcp:
            if not _is_loopback(address.rpartition(":")[0]):
                return Broken("tcp", f"{address}: without TLS only loopback addresses are allowed")
        return None
    for field, path in files.items():
        if not path:
            return Broken(field, ": TCP needs it, with the other two (or --insecure, on loopback)")
        if not os.access(path, os.R_OK):
            return Broken(field, f"{path}: not readable")
    return None


def _is_loopback(host: str) -> bool:
    """True if the server would accept plain TCP on `host`. Checked here too, so that the daemon
    refuses before it makes anything on the host.
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
