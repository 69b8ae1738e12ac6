"""From a plugin's record to the OCI runtime's config.json.

Rules: Docker's documentation, "Plugin Config Version 1 of Plugin V2"; runtime-spec config-linux.md.
What Docker leaves open is as for containers: the default capabilities and the seccomp profile, with
what the config's capabilities add to both.

- The profile of AppArmor for containers denies mount(2). A plugin with CAP_SYS_ADMIN, which has to
  mount, runs without one, as every plugin of Docker.
- Network type `host` is the host's network; `none`, `bridge` and an empty type are a network
  namespace without links, as in Docker, although its documentation promises a bridge.
- A network driver in the host's network sees the network namespaces of containers where the engine
  keeps them (RUN/netns), because SandboxKey of NetworkDriver.Join is a path there.

Blocks on files of the host (/dev, bind sources), so it is called in threads.
Raises InvalidParameter or NotFound with the plugin's field for what this host cannot do.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from engine.containers import devices, mount_points, security
from engine.containers import spec as containers
from engine.containers.body import directory
from engine.containers.limits import check_exec
from engine.errors import InvalidParameter, NotFound
from engine.managed_plugins.config import PROTOCOLS
from engine.managed_plugins.record import PluginRecord
from engine.runtime import apparmor, capabilities, cgroups, seccomp
from engine.runtime.cgroups import Cgroups
from engine.runtime.oci import Runtime
from engine.runtime.users import Identity
from engine.wire import oci
from engine.wire.containers import DeviceMapping, HostConfig
from engine.wire.plugins import PluginMount

SOCKETS = "/run/docker/plugins"
"""Where a plugin makes its socket."""
LOGGING = "/run/docker/logging"
"""Where a log driver finds the FIFOs that it reads."""

_PROPAGATIONS = ("shared", "rshared", "slave", "rslave", "private", "rprivate")
_BIND_OPTIONS = frozenset(
    (
        *("bind", "rbind", "ro", "rw", "suid", "nosuid", "dev", "nodev", "exec", "noexec"),
        *("atime", "noatime", "diratime", "nodiratime", "relatime", "norelatime", "strictatime", "nostrictatime"),
        *_PROPAGATIONS,
    )
)
_NETWORK_FILES = ("/etc/hosts", "/etc/resolv.conf")


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that the record does not hold."""

    rootfs: str
    """The root's path for the runtime."""
    sockets: Path
    """The host's directory for SOCKETS."""
    logging: Path
    """The host's directory for LOGGING."""
    netns: Path
    identity: Identity
    runtime: Runtime
    cgroups: Cgroups
    propagated: str = ""
    """The source of the PropagatedMount for the runtime."""


def socket_name(record: PluginRecord) -> str:
    """The name of its socket. Raises InvalidParameter for one that is not a file's name."""
    name = record.config.interface.socket
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise InvalidParameter(f"Interface.Socket: {name!r} is not the name of a file")
    return name


def build(record: PluginRecord, place: Place) -> oci.Spec:
    """The whole document. `oci.encode` makes the bytes of config.json."""
    config, settings = record.config, record.settings
    if config.interface.protocol_scheme not in PROTOCOLS:
        raise InvalidParameter(f"Interface.ProtocolScheme: {config.interface.protocol_scheme!r} is not supported")
    granted = capabilities.granted(_capabilities(record))
    filter_, annotations = place.runtime.seccomp(seccomp.profile(granted))
    arguments = [*config.entrypoint, *settings.args]
    if not arguments:
        raise InvalidParameter("Entrypoint: it is empty")
    variables = containers.environment(settings.env, "", tty=False, home=place.identity.home)
    check_exec(arguments, variables, 0)
    named = HostConfig(devices=[DeviceMapping(path_on_host=path) for path in _device_paths(record)])
    nodes = list(devices.nodes(named))
    rules = devices.DEFAULT_RULES if not config.linux.allow_all_devices else devices.PRIVILEGED_RULES
    seen = mounts(record, place)
    return oci.Spec(
        oci_version=oci.VERSION,
        process=oci.Process(
            user=oci.User(uid=place.identity.uid, gid=place.identity.gid, additional_gids=place.identity.groups),
            args=arguments,
            env=variables,
            cwd=directory(config.work_dir),
            capabilities=oci.Capabilities(bounding=granted, effective=granted, permitted=granted),
            apparmor_profile="" if "CAP_SYS_ADMIN" in granted else apparmor.default(),
        ),
        root=oci.Root(path=place.rootfs),
        mounts=seen,
        linux=oci.Linux(
            namespaces=_namespaces(record, place.cgroups),
            devices=[node for node, _ in nodes],
            cgroups_path=cgroups.path(record.id),
            resources=oci.Resources(devices=(*rules, *(rule for _, rule in nodes))),
            rootfs_propagation=containers.rootfs_propagation(
                option for mount in seen if mount.type == "bind" for option in mount.options
            ),
            seccomp=filter_,
            masked_paths=security.MASKED_PATHS,
            readonly_paths=containers.readonly_paths(security.READONLY_PATHS, place.cgroups, seen),
        ),
        annotations=annotations,
    )


def _capabilities(record: PluginRecord) -> list[str]:
    wanted = record.config.linux.capabilities or []
    try:
        capabilities.check(wanted, ())
    except InvalidParameter as error:
        raise InvalidParameter(error.message.replace("CapAdd", "Linux.Capabilities", 1)) from error
    return wanted


def _device_paths(record: PluginRecord) -> list[str]:
    for each in record.settings.devices:
        if not each.path:
            raise InvalidParameter(f"Linux.Devices: device {each.name!r} has no path: set {each.name}.path")
    return [each.path for each in record.settings.devices if each.path]


def _namespaces(record: PluginRecord, hierarchies: Cgroups) -> list[oci.Namespace]:
    config = record.config
    found = ["mount", "uts"]
    if not _host_network(record):
        found.append("network")
    if not config.pid_host:
        found.append("pid")
    if not config.ipc_host:
        found.append("ipc")
    if hierarchies.mode == "v2":
        found.append("cgroup")
    return [oci.Namespace(type=each) for each in found]


def _host_network(record: PluginRecord) -> bool:
    kind = record.config.network.type
    if kind not in ("", "none", "null", "bridge", "host"):
        raise InvalidParameter(f"Network.Type: {kind[:100]!r} is not supported: it must be host, bridge or none")
    return kind == "host"


def mounts(record: PluginRecord, place: Place) -> list[oci.Mount]:
    """The standard ones first, then the plugin's by depth."""
    config = record.config
    shm = containers.bind(containers.SHM, containers.SHM, True, "") if config.ipc_host else containers.own_shm()
    own: dict[str, oci.Mount] = {}

    def add(mount: oci.Mount) -> None:
        if mount.destination in own:
            raise InvalidParameter(f"Mounts: two of them are at {mount.destination}")
        own[mount.destination] = mount

    def bind(source: Path | str, destination: str, *options: str) -> None:
        add(containers.bind_with(str(source), destination, options))

    # Private: what the plugin mounts there is not the host's.
    bind(place.sockets, SOCKETS, "rbind", "rprivate")
    if "logdriver" in record.kinds:
        bind(place.logging, LOGGING, "rbind", "rprivate")
    if _host_network(record):
        for path in _NETWORK_FILES:
            if os.path.exists(path):
                bind(path, path, "rbind", "ro", "rprivate")
        if "networkdriver" in record.kinds:
            bind(place.netns, str(place.netns), "rbind", "rslave")
    if config.propagated_mount:
        add(propagated_mount(record, place.propagated))
    for each in record.settings.mounts:
        add(_own_mount(each))
    return containers.merged(containers.standard("ro", "ro", shm), own)


def propagated_mount(record: PluginRecord, source: str) -> oci.Mount:
    """The mount at PropagatedMount. It stays a peer of its source."""
    path = _destination("PropagatedMount", record.config.propagated_mount)
    return oci.Mount(destination=path, type="bind", source=source, options=("rbind", "rw", "rshared"))


def _destination(field: str, path: str, source: str = "") -> str:
    try:
        destination = mount_points.normal_path(path, path)
        mount_points.check_destination(destination, source)
    except InvalidParameter as error:
        raise InvalidParameter(f"{field}: {error.message}") from error
    return destination


def _own_mount(mount: PluginMount) -> oci.Mount:
    field = f"Mounts: {mount.name or mount.destination}"
    source, options = mount.source or "", mount.options or []
    if not mount.destination:
        raise InvalidParameter(f"{field}: it has no destination")
    destination = _destination(field, mount.destination, source)
    if mount.type == "tmpfs":
        try:
            mount_points.tmpfs_options(",".join(options))
        except InvalidParameter as error:
            raise InvalidParameter(f"{field}: {error.message}") from error
        return oci.Mount(destination=destination, type="tmpfs", source="tmpfs", options=tuple(options))
    if mount.type not in ("bind", "none", ""):
        raise InvalidParameter(f"{field}: type {mount.type!r} is not supported: it must be bind or tmpfs")
    if unknown := [each for each in options if each not in _BIND_OPTIONS]:
        raise InvalidParameter(f"{field}: invalid option {unknown[0][:100]!r}")
    if not source.startswith("/") or "\0" in source:
        raise InvalidParameter(f"{field}: its source {source[:100]!r} is not an absolute path")
    if not os.path.exists(source):
        raise NotFound(f"{field}: its source {source} does not exist")
    if not any(each in _PROPAGATIONS for each in options):
        options = [*options, "rprivate"]
    return containers.bind_with(source, destination, options)
