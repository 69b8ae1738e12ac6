"""From a container's record to the OCI runtime's config.json: process, mounts, namespaces, limits
and devices.

Rules: Docker Engine API, ContainerCreate; Docker's documented defaults (capabilities, masked paths,
       mounts); runtime-spec config-linux.md.
Reads nothing of the container. Of the host it reads /dev for a container with devices, and the
flags of bind sources.

Not here: whether the body is well formed (`body.py`), devices (`devices.py`), the files bound in
(`bundle.py`), the network namespace (`networks/`). Raises InvalidParameter or NotFound with the
field's name for features that this host lacks.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from engine.config import Config
from engine.containers import devices, mount_points, security
from engine.containers.body import directory, strings
from engine.containers.defaults import DOCKERS, Defaults
from engine.containers.limits import check_exec, cpu_time, default_memory_swap, rlimit
from engine.containers.start import Start
from engine.containers.store import ContainerRecord, MountOptions
from engine.errors import InvalidParameter
from engine.networks.sandboxes import SETTINGS
from engine.runtime import capabilities, cdi, cgroups, features, init, scope_limits, seccomp
from engine.runtime.cgroups import Cgroups
from engine.runtime.oci import Runtime
from engine.runtime.users import Identity
from engine.system.user_namespaces import Range
from engine.wire import oci
from engine.wire.containers import HostConfig
from engine.wire.exec import ExecCreate

DEFAULT_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

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

SHM = "/dev/shm"
EMPTY = "empty"
"""An empty directory in RUN, which no container can write to."""

_PING_GROUPS = "net.ipv4.ping_group_range"
_NETWORK_SYSCTLS = {f"net.{path.replace('/', '.')}": value for path, value in SETTINGS.items()}


def build(record: ContainerRecord, start: Start, identity: Identity, edits: cdi.Edits = cdi.NONE) -> oci.Spec:
    """The whole document. `oci.encode` makes the bytes of config.json. `edits`: changes for the
    devices that it has by name.
    """
    config, host = record.config, record.host
    granted = capabilities.granted(host.cap_add or (), host.cap_drop or (), privileged=host.privileged)
    confinement = security.parse(host.security_opt or ())
    filter_: msgspec.Raw | None = None
    annotations: dict[str, str] = {}
    if confinement.profile is not None:
        filter_ = seccomp.section(confinement.profile, granted)
    elif (filters := _filters(confinement, host, start.defaults)) is not None:
        filter_, annotations = start.runtime.seccomp(filters.profile(granted))
    bounding = capabilities.bounding()
    user = oci.User(
        uid=identity.uid,
        gid=identity.gid,
        additional_gids=tuple(dict.fromkeys((*identity.groups, *edits.additional_gids))),
    )
    if record.ids is not None:
        uids, gids = (mount_points.temporary_ids(host, kind) for kind in ("uid", "gid"))
        record.ids.check((user.uid, *uids), (user.gid, *user.additional_gids, *gids))
    named = list(devices.requested(edits, user))
    replaced = {node.path for node, _ in named}
    nodes = [pair for pair in devices.nodes(host) if pair[0].path not in replaced] + named
    limits = resources(host, start.cgroups, [*(rule for _, rule in nodes if rule), *devices.rules(host)])
    of_cgroup = scope_limits.unit_annotations(limits) if record.cgroup_driver == "systemd" else {}
    variables = environment(
        (*record.link_environment, *(config.env or ()), *start.placed.environment, *edits.env),
        "" if start.placed.sandbox else config.hostname,
        tty=config.tty,
        home=identity.home,
    )
    arguments = [record.path, *record.args]
    if has_init(host, start.config):
        arguments = [INIT, "--", *arguments]
    check_exec(arguments, variables, _stack(host))
    seen = mounts(record, start, edits, confinement.writable_cgroups)
    masked = () if host.privileged else _paths(host.masked_paths, security.MASKED_PATHS)
    covers = _covers(masked, seen, record, start)
    seen += covers.values()
    return oci.Spec(
        oci_version=oci.VERSION,
        process=oci.Process(
            terminal=config.tty,
            console_size=_console_size(record),
            user=user,
            args=arguments,
            env=variables,
            cwd=directory(config.working_dir),
            capabilities=oci.Capabilities(bounding=granted, effective=granted, permitted=granted),
            rlimits=[rlimit(limit, raisable="CAP_SYS_RESOURCE" in bounding) for limit in host.ulimits or ()],
            no_new_privileges=_no_new_privileges(confinement, start.defaults),
            apparmor_profile="" if host.privileged else confinement.apparmor_profile,
            oom_score_adj=host.oom_score_adj or None,
        ),
        root=oci.Root(path=str(start.placed.root), readonly=host.readonly_rootfs or _has_read_only_root(host)),
        hostname="" if host.uts_mode == "host" else config.hostname,
        mounts=seen,
        hooks=_hooks(edits),
        linux=oci.Linux(
            uid_mappings=_mappings(record.ids.uids) if record.ids is not None else (),
            gid_mappings=_mappings(record.ids.gids) if record.ids is not None else (),
            namespaces=_namespaces(record, start),
            devices=[device for device, _ in nodes],
            cgroups_path=cgroups.oci_path(record.id, record.parent_cgroup, record.cgroup_driver),
            resources=limits,
            rootfs_propagation=rootfs_propagation(
                [*(point.propagation for point in record.mounts), *_shared_tmpfs(host, start.runtime)]
            ),
            seccomp=filter_,
            sysctl=_sysctls(record, start),
            masked_paths=tuple(path for path in masked if path not in covers),
            readonly_paths=_readonly_paths(host, start.cgroups, seen),
        ),
        annotations={**(host.annotations or {}), **annotations, **of_cgroup},
    )


# --- the process ----------------------------------------------------------------------------------


INIT = "/sbin/docker-init"


def has_init(host: HostConfig, config: Config) -> bool:
    """True if an init program is its first process. As in Docker, not in a pid namespace of others,
    where it would not be the first.
    """
    wanted = host.init if isinstance(host.init, bool) else config.init
    return wanted and host.pid_mode in ("", "private")


def _filters(wanted: security.Security, host: HostConfig, defaults: Defaults) -> seccomp.Filters | None:
    """Those of its seccomp profile, where that is not the client's own; None for none."""
    if wanted.confined is None:
        return None if host.privileged else defaults.filters
    return seccomp.builtin() if wanted.confined else None


def _no_new_privileges(wanted: security.Security, defaults: Defaults) -> bool:
    return defaults.no_new_privileges if wanted.no_new_privileges is None else wanted.no_new_privileges


def _console_size(record: ContainerRecord) -> oci.Box | None:
    """The terminal's initial size: that of the last resize, otherwise that of the create."""
    rows, columns = record.size if any(record.size) else record.host.console_size
    return oci.Box(height=rows, width=columns) if record.config.tty and rows and columns else None


def exec_process(
    record: ContainerRecord, config: ExecCreate, identity: Identity, defaults: Defaults = DOCKERS
) -> oci.Process:
    """A further process of the container: its own command and user, the container's environment,
    limits and confinement.

    Privileged means every capability that the engine has, and nothing else, as in Docker. The
    AppArmor profile and no-new-privileges of the container stay.
    """
    host = record.host
    granted = capabilities.granted(
        host.cap_add or (), host.cap_drop or (), privileged=host.privileged or config.privileged
    )
    confinement = security.parse(host.security_opt or ())
    if record.ids is not None:
        record.ids.check((identity.uid,), (identity.gid, *identity.groups))
    arguments = strings(config.cmd) or []
    variables = environment(
        [*record.link_environment, *(record.config.env or ()), *(config.env or ())],
        record.config.hostname,
        tty=config.tty,
        home=identity.home,
    )
    check_exec(arguments, variables, _stack(host))
    return oci.Process(
        terminal=config.tty,
        user=oci.User(uid=identity.uid, gid=identity.gid, additional_gids=identity.groups),
        args=arguments,
        env=variables,
        cwd=directory(config.working_dir or record.config.working_dir),
        capabilities=oci.Capabilities(bounding=granted, effective=granted, permitted=granted),
        rlimits=[rlimit(each, raisable="CAP_SYS_RESOURCE" in capabilities.bounding()) for each in host.ulimits or ()],
        no_new_privileges=_no_new_privileges(confinement, defaults),
        apparmor_profile="" if host.privileged else confinement.apparmor_profile,
        oom_score_adj=host.oom_score_adj or None,
    )


def _stack(host: HostConfig) -> int:
    """The soft limit of the stack that the container was given; 0 if it has none."""
    return next((each.soft for each in host.ulimits or () if each.name == "stack"), 0)


def environment(given: Iterable[str], hostname: str, *, tty: bool, home: str) -> list[str]:
    """Docker's own variables, overridden by the given ones.

    A name without `=` removes a variable.
    """
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
    if variables.get("HOME", "HOME=") == "HOME=":  # an empty one as well, as runc
        variables["HOME"] = f"HOME={home}"
    return list(variables.values())


# --- mounts ---------------------------------------------------------------------------------------


def mounts(record: ContainerRecord, start: Start, edits: cdi.Edits, writable_cgroups: bool | None) -> list[oci.Mount]:
    """The standard ones first, then the container's by depth, so that one inside another comes
    after it.

    A mount of the container replaces the standard mount at the same destination.
    """
    host = record.host
    access = "rw" if host.privileged else "ro"
    of_cgroups = access if writable_cgroups is None else "rw" if writable_cgroups else "ro"
    shared = "/dev/shm" if host.ipc_mode == "host" else start.joined.shm
    shm = bind(shared, SHM, True, "") if shared else own_shm(host.shm_size)
    system = standard(access, of_cgroups, None if host.ipc_mode == "none" else shm)
    if record.ids is not None and host.ipc_mode == "host":
        # Only the owner of the IPC namespace may mount its queues: the host's mount is shown.
        system.remove(_MQUEUE)
        if os.path.ismount(_MQUEUE.destination):
            system.append(bind(_MQUEUE.destination, _MQUEUE.destination, True, ""))
    writable = not host.readonly_rootfs and not start.placed.sandbox
    own = {
        f"/etc/{name}": bind(str((start.joined.files or start.directory) / name), f"/etc/{name}", writable, "rprivate")
        for name in ("resolv.conf", *(() if start.placed.sandbox else ("hostname",)), "hosts")
    }
    temporary, options = mount_points.temporary(host), mount_points.options_of(record)
    own |= {destination: _tmpfs(destination, words) for destination, words in temporary.items()}
    if has_init(host, start.config):
        own[INIT] = bind(init.program(start.config.init_path), INIT, False, "rprivate")
    for point in record.mounts:  # of a record that an earlier version made
        mount_points.check_destination(point.destination, "" if isinstance(point.name, str) else point.source)
    for destination in temporary:
        mount_points.check_destination(destination)
    own |= {
        point.destination: bind(
            *(start.sources.get(point.destination, point.source), point.destination, point.rw, point.propagation),
            options=options.get(point.destination, _DEFAULT),
            runtime=start.runtime,
        )
        for point in record.mounts
    }
    for destination in start.placed.mounts:
        mount_points.check_destination(destination)
    own |= start.placed.mounts
    for device_mount in edits.mounts:
        mount_points.check_destination(device_mount.container_path)
        own[posixpath.normpath(device_mount.container_path)] = _requested(device_mount)
    return merged(system, own)


def standard(access: str, of_cgroups: str, shm: oci.Mount | None) -> list[oci.Mount]:
    """The mounts that every container has. `access`, `of_cgroups`: `ro` or `rw`, of /sys and of the
    control groups. `shm`: None for none.
    """
    return [
        _PROC,
        _DEV,
        _PTS,
        oci.Mount(destination="/sys", type="sysfs", source="sysfs", options=(*_SYSTEM, access)),
        oci.Mount(destination=_CGROUP, type="cgroup", source="cgroup", options=(*_SYSTEM, "relatime", of_cgroups)),
        _MQUEUE,
        *((shm,) if shm is not None else ()),
    ]


def own_shm(size: int = 0) -> oci.Mount:
    """A /dev/shm that is shared with nothing. `size` 0: Docker's default."""
    options = (*_SYSTEM, "mode=1777", f"size={size or DOCKERS.shm_size}")
    return oci.Mount(destination=SHM, type="tmpfs", source="shm", options=options)


def merged(found: Iterable[oci.Mount], own: Mapping[str, oci.Mount]) -> list[oci.Mount]:
    """The standard mounts that no own mount (by destination) replaces, then the own ones by
    depth.
    """
    kept = [
        mount
        for mount in found
        if mount.destination not in own and not ("/dev" in own and mount.destination.startswith("/dev/"))
    ]
    return kept + sorted(own.values(), key=lambda mount: mount.destination.count("/"))


def _requested(mount: cdi.Mount) -> oci.Mount:
    """A mount of a CDI specification: a bind, unless it says otherwise."""
    destination = posixpath.normpath(mount.container_path)
    if mount.type not in ("", "bind", "none"):
        options = tuple(each for each in mount.options if each not in _BINDS)
        return oci.Mount(destination=destination, type=mount.type, source=mount.host_path, options=options)
    return bind_with(mount.host_path, destination, mount.options)


_BINDS = ("bind", "rbind")


def bind_with(source: str, destination: str, options: Sequence[str]) -> oci.Mount:
    """A bind with mount options as given: a recursive one, unless they have `bind`."""
    kind = "bind" if "bind" in options else "rbind"
    own = [each for each in options if each not in _BINDS]
    forbidden = [each for each in _forbidden(source) if each not in own]
    return oci.Mount(destination=destination, type="bind", source=source, options=(kind, *own, *forbidden))


def _hooks(edits: cdi.Edits) -> oci.Hooks | None:
    if not edits.hooks:
        return None
    by_name: dict[str, list[oci.Hook]] = {}
    for each in edits.hooks:
        hook = oci.Hook(path=each.path, args=each.args, env=each.env, timeout=each.timeout)
        by_name.setdefault(each.hook_name, []).append(hook)
    return oci.Hooks(
        prestart=tuple(by_name.get("prestart", ())),
        create_runtime=tuple(by_name.get("createRuntime", ())),
        create_container=tuple(by_name.get("createContainer", ())),
        start_container=tuple(by_name.get("startContainer", ())),
        poststart=tuple(by_name.get("poststart", ())),
        poststop=tuple(by_name.get("poststop", ())),
    )


def _paths(given: list[str] | None, default: tuple[str, ...]) -> tuple[str, ...]:
    """None is in records of earlier versions of this engine."""
    return default if given is None else tuple(given)


def _covers(
    masked: Iterable[str], seen: Sequence[oci.Mount], record: ContainerRecord, start: Start
) -> dict[str, oci.Mount]:
    """Mounts of the empty directory over those of Docker's masked paths that are directories, by
    destination, where the runtime would mount a tmpfs over each of them.

    With each file system the kernel needs more memory for each memory cgroup of the host. The
    runtime masks what other mounts of the container touch, and all in a user namespace.
    """
    empty = str(start.config.run / EMPTY)
    if record.ids is not None or not features.masks_by_tmpfs(start.runtime) or not os.path.isdir(empty):
        return {}
    own = [f"{each.destination}/" for each in seen if each.type not in ("proc", "sysfs")]
    kinds = {each.destination: each.type for each in seen}
    return {
        path: bind(empty, path, False, "rprivate", options=ALONE)
        for path in security.MASKED_PATHS
        if path in masked
        and kinds.get(path[: path.index("/", 1)]) in ("proc", "sysfs")
        and not any(f"{path}/".startswith(each) or each.startswith(f"{path}/") for each in own)
        and os.path.isdir(path)
    }


def _readonly_paths(host: HostConfig, hierarchies: Cgroups, seen: Sequence[oci.Mount]) -> tuple[str, ...]:
    paths = () if host.privileged else _paths(host.readonly_paths, security.READONLY_PATHS)
    return readonly_paths((path for path in paths if not _is_root(path)), hierarchies, seen)


def _has_read_only_root(host: HostConfig) -> bool:
    """True if "/" is a read-only path. crun leaves the root writable then, runc does not."""
    return not host.privileged and any(map(_is_root, host.readonly_paths or ()))


def _is_root(path: str) -> bool:
    return not posixpath.normpath(path).strip("/")


def readonly_paths(paths: Iterable[str], hierarchies: Cgroups, mounts: Sequence[oci.Mount]) -> tuple[str, ...]:
    """These paths and, under v1, the tmpfs with the hierarchies' mount points, which runtimes leave
    writable. Each is followed by the read-only mounts below it.

    Runtimes bind a read-only path to itself, with copies of the mounts below it. crun sets the
    read-only flag of all mounts only at the end, and not that of the copies, so a copy needs a path
    of its own. Paths in /proc and /sys come last, because an image can have a link to them at any
    other path.
    """
    wanted = list(paths)
    read_only = [each.destination for each in mounts if "ro" in each.options]
    own = {each.destination for each in mounts}
    if hierarchies.mode != "v2" and any(each.type == "cgroup" and "ro" in each.options for each in mounts):
        wanted.append(_CGROUP)
        read_only += [path for name in hierarchies.names() if (path := f"{_CGROUP}/{name}") not in own]
    wanted.sort(key=_depth)
    read_only.sort(key=_depth)
    found = [path for path in wanted if not _is_system(path)]
    if found:
        found += [path for path in read_only if not _is_system(path)]
    for path in filter(_is_system, wanted):
        below = f"{posixpath.normpath(path)}/"
        found += [path, *(each for each in read_only if each.startswith(below))]
    return tuple(found)


def _depth(path: str) -> int:
    return posixpath.normpath(path).count("/")


def _is_system(path: str) -> bool:
    """True if it is in /proc or /sys, where images have no links."""
    return f"{posixpath.normpath(path)}/".startswith(("/proc/", "/sys/"))


_CGROUP = "/sys/fs/cgroup"


_DEFAULT = MountOptions()
ALONE = MountOptions(shallow=True)


def bind(
    source: str,
    destination: str,
    writable: bool,
    propagation: str,
    *,
    options: MountOptions = _DEFAULT,
    here: str = "",
    runtime: Runtime | None = None,
) -> oci.Mount:
    """A bind. `here`: the source's path for this process, if it is not `source`. `runtime`: for
    options that not every runtime has.
    """
    # A bind has only the flags given here, so the flags of the source's own mount are repeated.
    forbidden = _forbidden(here or source)
    access = ["rw" if writable and "ro" not in forbidden else "ro"]
    # crun opens the destination of `rro` as a directory. Nothing is mounted below a file.
    if not writable and options.read_only and not options.shallow and not _is_file(here or source):
        if runtime is not None and features.recursive_read_only(runtime):
            access.append("rro")
        elif options.read_only == "forced":
            raise InvalidParameter(f"{destination}: the runtime cannot make the mounts below it read-only")
    propagation = propagation or "rprivate"
    words = (
        "bind" if options.shallow else "rbind",
        # For crun a recursive propagation makes the bind recursive too.
        propagation.removeprefix("r") if options.shallow else propagation,
        *access,
        *(each for each in forbidden if each != "ro"),
    )
    return oci.Mount(destination=destination, type="bind", source=source, options=words)


_FORBIDDING = {
    os.ST_RDONLY: "ro",
    os.ST_NOSUID: "nosuid",
    os.ST_NODEV: "nodev",
    os.ST_NOEXEC: "noexec",
    os.ST_NOATIME: "noatime",
    os.ST_NODIRATIME: "nodiratime",
}


def _is_file(source: str) -> bool:
    """True if it exists and is no directory."""
    return os.path.exists(source) and not os.path.isdir(source)


def _forbidden(source: str) -> list[str]:
    try:
        flags = os.statvfs(source).f_flag
    except OSError:
        return []
    return [option for flag, option in _FORBIDDING.items() if flags & flag]


def _tmpfs(destination: str, options: str) -> oci.Mount:
    return oci.Mount(destination=destination, type="tmpfs", source="tmpfs", options=mount_points.tmpfs_options(options))


def rootfs_propagation(of_mounts: Iterable[str]) -> str:
    """The root must propagate mounts to or from the shared and slave mounts below it."""
    wanted = {propagation.removeprefix("r") for propagation in of_mounts}
    return "shared" if "shared" in wanted else "rslave" if "slave" in wanted else ""


def _shared_tmpfs(host: HostConfig, runtime: Runtime) -> list[str]:
    """The propagation of tmpfs mounts that need a root like it: crun gives all mounts that of the
    root in the end, unless it is shared. `slave` has no effect on a tmpfs, which has no peer.
    """
    if runtime.implementation != "crun":
        return []
    wanted = [word for options in mount_points.temporary(host).values() for word in mount_points.tmpfs_options(options)]
    return [word for word in wanted if word in ("shared", "rshared")]


def _mappings(ranges: Iterable[Range]) -> tuple[oci.IdMapping, ...]:
    return tuple(oci.IdMapping(container_id=each.inside, host_id=each.outside, size=each.count) for each in ranges)


def _namespaces(record: ContainerRecord, start: Start) -> list[oci.Namespace]:
    host = record.host
    created = [oci.Namespace(type="mount")]
    if record.ids is not None:
        created.append(oci.Namespace(type="user", path=start.user))
    if start.network is not None:
        created.append(oci.Namespace(type="network", path=start.network))
    if host.uts_mode != "host":
        created.append(oci.Namespace(type="uts"))
    if host.pid_mode != "host":
        created.append(oci.Namespace(type="pid", path=start.joined.pid))
    if host.ipc_mode != "host":
        created.append(oci.Namespace(type="ipc", path=start.joined.ipc))
    # For privileged containers too, as in Docker. Without it their own cgroups would be the host's.
    if (host.cgroupns_mode or ("private" if start.cgroups.mode == "v2" else "host")) == "private":
        created.append(oci.Namespace(type="cgroup"))
    return created


def _sysctls(record: ContainerRecord, start: Start) -> dict[str, str]:
    host = record.host
    found: dict[str, str] = {}
    if start.network == "":
        found |= _NETWORK_SYSCTLS
        if record.ids is not None:  # its root may only name groups that it has
            del found[_PING_GROUPS]
    if record.config.domainname and host.uts_mode != "host":
        found["kernel.domainname"] = record.config.domainname
    # Those of a namespace that the engine has made are set, but for a root of a user namespace: it
    # has other numbers, which these may name.
    set_before = record.ids is None and bool(start.network)
    for name, value in (host.sysctls or {}).items():
        if not (set_before and name.startswith(("net.", "net/"))):
            found[name] = value
    return found


# --- resources ------------------------------------------------------------------------------------


def resources(host: HostConfig, hierarchies: Cgroups, own: Iterable[oci.DeviceRule] = ()) -> oci.Resources:
    """The limits of a container. `own`: rules for its devices. Reads the numbers of devices from
    the paths that clients named.
    """
    rules = devices.PRIVILEGED_RULES if host.privileged else (*devices.DEFAULT_RULES, *own)
    swap = host.memory_swap if hierarchies.swap_accounting else 0
    if host.memory and not swap and hierarchies.swap_accounting:
        swap = default_memory_swap(host.memory)
    memory = oci.Memory(
        limit=host.memory or None,
        reservation=host.memory_reservation or None,
        swap=swap or None,
        kernel=host.kernel_memory if host.kernel_memory and hierarchies.support().kernel_memory else None,
        swappiness=host.memory_swappiness,
        disable_oom_killer=bool(host.oom_kill_disable),
    )
    period, quota = cpu_time(host)
    cpu = oci.Cpu(
        shares=host.cpu_shares or None,
        quota=quota,
        period=period,
        cpus=host.cpuset_cpus,
        mems=host.cpuset_mems,
    )
    block = devices.block_limits(host, weight=_weight(host, hierarchies))
    return oci.Resources(
        devices=rules,
        memory=memory if memory != oci.Memory() else None,
        cpu=cpu if cpu != oci.Cpu() else None,
        # a new cgroup has no limit
        pids=oci.Pids(limit=host.pids_limit) if host.pids_limit else None,
        block_io=block if block != oci.BlockIO() else None,
    )


def _weight(host: HostConfig, hierarchies: Cgroups) -> int | None:
    """BlkioWeight where the runtime can set it.

    Otherwise the engine sets it, or the kernel has no such weight.
    """
    if not host.blkio_weight or hierarchies.weighs_by_bfq or not hierarchies.support().weight:
        return None
    return host.blkio_weight
