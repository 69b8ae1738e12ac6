"""A run on the host: from a record to a running process, and what is left of it released.

`launch` is a container's; `run` makes a process in any root, without a record.

Every resource that a start acquires is pushed at once on one of two exit stacks. `borrowed` holds
resources that only the runtime needs while it creates the process, `undo` those that the container
keeps while it runs. A failure closes both.

`release` gives back at the end of a run what its start acquired. Not here: the state of a
container, its lock and its events (`container.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.config import Config
from engine.containers import bundle, devices, extra_mounts, image_mounts, log_plan, mount_points, sharing, spec
from engine.containers.body import check_cgroup_parent, check_remapped, has_ipv6, network_sysctls
from engine.containers.extra_mounts import ExtraMount
from engine.containers.parts import Parts
from engine.containers.start import Program, Start
from engine.containers.store import ContainerRecord
from engine.errors import EngineError, NotFound, words
from engine.logs.targets import Target
from engine.monitor.handles import LaunchFailed, Process
from engine.networks.attachments import Joined
from engine.networks.endpoints import Sandbox
from engine.networks.publishing import Request
from engine.runtime import capabilities, cgroups, scope_limits, scopes
from engine.runtime.oci import Runtime
from engine.system import host_paths, limits, user_namespaces
from engine.system.files import remove_tree
from engine.system.tasks import spawn
from engine.wire import oci
from engine.wire.containers import EndpointSettings, HostConfig

_log = logging.getLogger(__name__)

ROOT = "root"
"""Below RUN: where the runtime finds the root of the process that it makes. Each runtime has a
mount namespace of its own, with that one root."""


BUNDLES = "bundles"
"""Below RUN: config.json of starts whose process gets a secret, until the runtime has returned."""

END_LIMIT = 10.0
"""Seconds to wait for the end of a process after the runtime was asked to kill it."""


async def run(program: Program, parts: Parts, namespace: int, undo: contextlib.AsyncExitStack) -> Process:
    """Have the runtime create the process, in the mount namespace of the given descriptor, with its
    root at RUN/root.

    The removal of the process and of the runtime's state is pushed on `undo` before anything is
    created. While systemd or D-Bus is being restarted, a process in a scope is tried again. Raises
    LaunchFailed with the runtime's reason, ServerError.
    """
    undo.push_async_callback(_take_back, program, parts)
    loop = asyncio.get_running_loop()
    end = loop.time() + scope_limits.LIMIT
    while True:
        try:
            return await _try(program, parts, namespace)
        except LaunchFailed as error:
            if not program.scope or not scopes.was_away(error.reason) or loop.time() >= end:
                raise
            _log.info("container %s: %s; trying again", program.key, error.reason)
            await asyncio.sleep(scope_limits.AGAIN)
            try:
                await _take_back(program, parts)
            except EngineError as failure:  # the runtime asks systemd for this, too
                raise error from failure


async def _try(program: Program, parts: Parts, namespace: int) -> Process:
    runtime = program.runtime or parts.runtimes.default
    rows, columns = program.size
    made: list[str] = []
    if not program.scope and not program.cgroup.startswith(f"{cgroups.PARENT}/"):
        made = await asyncio.to_thread(parts.cgroups.missing_above, program.cgroup)
    try:
        with parts.grace_period.going_on():
            return await parts.monitor.run(
                program.key,
                runtime.run_argv(program.key, bundle=program.bundle, tty=program.tty, scope=program.scope),
                cwd=str(program.bundle),
                tty=program.tty,
                open_stdin=program.open_stdin,
                stdin_once=program.stdin_once,
                size=(rows, columns) if rows and columns else None,
                log=program.log,
                namespace=namespace,
                owner=program.owner,
            )
    finally:
        if made:
            await asyncio.to_thread(parts.cgroups.claim, made)


async def _take_back(program: Program, parts: Parts) -> None:
    """Kill the process, and remove its state from the runtime and the monitor, and its control
    group.
    """
    runtime = program.runtime or parts.runtimes.default
    try:
        await runtime.delete(program.key)
        process = parts.monitor.processes.get(program.key)
        if process is not None:
            await asyncio.wait({process.exit}, timeout=END_LIMIT)
    finally:
        parts.monitor.forget(program.key)
        await remove_cgroup(parts, program.cgroup)


async def remove_cgroup(parts: Parts, cgroup: str) -> None:
    """Remove the control group where the runtime has left it: crun does so when a limit cannot be
    set, and then has no state for `delete`. systemd removes that of a scope.

    A process of the runtime that was killed with its monitor may still be exiting in it.
    """
    if scopes.is_scope(cgroup) and parts.cgroups.mode == "v2":
        if not await _scope_ends(parts, cgroup, kill=True):
            _log.warning("systemd has not removed the control group %s", cgroup)
        return
    for pause in (*_BUSY_PAUSES, None):
        try:
            await asyncio.to_thread(parts.cgroups.remove, cgroup)
        except OSError as error:
            if pause is None or error.errno != errno.EBUSY:
                _log.warning("cannot remove the control group %s: %s", cgroup, words(error))
                return
            await asyncio.sleep(pause)
        else:
            return


_BUSY_PAUSES = (0.01, 0.04, 0.15, 0.5)
"""Seconds between attempts to remove a control group that has a process."""


@dataclass(frozen=True)
class Launched:
    """The result of a launch: the process, and the record with the networks, ports, mounts and
    links of this run.
    """

    process: Process
    record: ContainerRecord
    stubs: tuple[str, ...]
    """Mount points that were made in its root: see `Ingest.stubs`."""


@contextlib.asynccontextmanager
async def launch(
    record: ContainerRecord, parts: Parts, find: sharing.Find, extra: Sequence[ExtraMount] = ()
) -> AsyncIterator[Launched]:
    """Run the container, with `extra` mounts besides those of the record. `find`: other containers.

    An exception within the context undoes everything; after the context the container owns it.

    Raises ServerError when descriptors run short, LaunchFailed with the runtime's reason, another
    EngineError, OSError.
    """
    limits.ensure_descriptors(limits.PER_START)
    parts.runtimes.check_configured(record.runtime)
    parts.grace_period.expect()
    async with contextlib.AsyncExitStack() as undo:
        async with contextlib.AsyncExitStack() as borrowed:
            record = await _with_defaults(record, parts)
            shm = parts.config.run / "shm" / record.id
            joined = await sharing.join(record, find, parts.monitor.processes, shm, borrowed)
            record = _with_peers(record, joined, find)
            record, start = await _prepare(record, parts, joined, extra, borrowed, undo)
            # It looks at the sources of binds.
            run_in_thread = host_paths.run if _binds(record) else asyncio.to_thread
            user, stubs = await run_in_thread(
                lambda: bundle.write(record, start, parts.networks.host_gateways(), parts.devices)
            )
            shown = parts.snapshots.shown(record.id, parts.config.run / ROOT, start.placed.beside)
            namespace = await borrowed.enter_async_context(shown)
            log = log_plan.plan(parts.config, record)
            if log.delivery is not None:
                undo.callback(parts.deliveries.ended, record.id)
                await parts.deliveries.prepare(log.delivery)
            ports = await parts.attachments.opened(record.id)
            record = msgspec.structs.replace(record, networks=start.networks, ports=ports)
            program = _program(record, start, log.target, user)
            # Saved before there is a process, so that a daemon that starts after a crash finds its
            # networks and ports.
            # Not `spawn`: it is awaited below, and its failure is that of the start.
            saving = asyncio.create_task(parts.store.save(record))
            try:
                process = await run(program, parts, namespace, undo)
                parts.attachments.runs(record.id)
            finally:
                await saving
            await _limit_further(record, parts, program)
        yield Launched(process, record, tuple(stubs))
        undo.pop_all()


async def _prepare(
    record: ContainerRecord,
    parts: Parts,
    joined: sharing.Joined,
    extra: Sequence[ExtraMount],
    borrowed: contextlib.AsyncExitStack,
    undo: contextlib.AsyncExitStack,
) -> tuple[ContainerRecord, Start]:
    """Mount its root, join its networks, then mount its volumes: the order of Docker's events, as
    at the end. The record gets the mounts of this run.
    """
    await parts.snapshots.mount(record.id, mapped=record.ids is not None)
    undo.push_async_callback(parts.snapshots.unmount, record.id)
    network, networks = await _join_network(record, parts, joined, undo)
    user = _user_namespace(record, network, joined, borrowed)
    if record.host.mounts:
        await host_paths.run(mount_points.check_sources, record.host)
    volumes = await parts.volumes.mount(record.id, record.mounts, borrowed, mount_points.subpaths(record))
    undo.push_async_callback(parts.volumes.unmount, record.id, record.mounts)
    record = msgspec.structs.replace(record, mounts=volumes.points)
    images = await image_mounts.binds(record, parts.snapshots, borrowed)
    namespace, root = parts.snapshots.mount_namespace, parts.config.run / ROOT
    placed = await borrowed.enter_async_context(extra_mounts.placed([*images, *extra], namespace, root, record.ids))
    bundle_directory = directory = directory_of(parts.config, record.id)
    if placed.environment:
        # Variables that no record has may be secrets, so they are not written below ROOT.
        bundle_directory = parts.config.run / BUNDLES / record.id
        borrowed.push_async_callback(asyncio.to_thread, remove_tree, bundle_directory)
    return record, Start(
        directory=directory,
        bundle=bundle_directory,
        rootfs=parts.snapshots.mounted(record.id),
        placed=placed,
        network=network,
        networks=networks,
        user=user,
        joined=joined,
        sources=volumes.sources,
        runtime=runtime_of(record, parts),
        cgroups=parts.cgroups,
        config=parts.config,
        defaults=parts.defaults,
    )


def _program(record: ContainerRecord, start: Start, log: Target | None, user: oci.User) -> Program:
    return Program(
        key=record.id,
        bundle=start.bundle,
        cgroup=cgroup_of(record),
        scope=record.cgroup_driver == "systemd",
        runtime=start.runtime,
        tty=record.config.tty,
        open_stdin=record.config.open_stdin,
        stdin_once=record.config.stdin_once,
        size=record.size if any(record.size) else record.host.console_size,
        log=log,
        owner=stdio_owner(record, user),
    )


async def _limit_further(record: ContainerRecord, parts: Parts, program: Program) -> None:
    """Set limits that the runtime does not set, or does not tell systemd. The process may have
    ended.
    """
    if record.host.blkio_weight and parts.cgroups.weighs_by_bfq:
        with contextlib.suppress(OSError):
            await asyncio.to_thread(parts.cgroups.set_weight, program.cgroup, record.host.blkio_weight)
    if program.scope and _has_lists(record.host):
        try:
            await tell_systemd(record, parts)
        except NotFound:
            pass
        except EngineError as error:
            _log.warning("container %s: a reload of systemd resets its limits: %s", record.id, words(error))


def directory_of(config: Config, container_id: str) -> Path:
    """Log, hosts, hostname, resolv.conf and bundle of a container."""
    return config.root / "containers" / container_id


def cgroup_of(record: ContainerRecord) -> str:
    """A container's control group, from the root of each hierarchy."""
    return cgroups.path(record.id, record.parent_cgroup, record.cgroup_driver)


async def tell_systemd(record: ContainerRecord, parts: Parts) -> None:
    """Make the limits of a container in a scope properties of the scope. Raises ServerError;
    NotFound if it has ended.
    """

    def read() -> oci.Resources:
        """Reads the numbers of devices from paths that clients named."""
        return spec.resources(devices.present(record.host), parts.cgroups)

    resources = await host_paths.run(read)
    await parts.scope_limits.change(record.id, resources)


def _has_lists(host: HostConfig) -> bool:
    """True if it has limits that the runtime does not tell systemd: see
    `scope_limits.unit_annotations`.
    """
    return any(
        (
            *(host.cpuset_cpus, host.cpuset_mems),
            *(host.blkio_device_read_bps, host.blkio_device_write_bps),
            *(host.blkio_device_read_iops, host.blkio_device_write_iops),
        )
    )


def runtime_of(record: ContainerRecord, parts: Parts) -> Runtime:
    """The runtime that makes and ends its processes."""
    return parts.runtimes.of(record.runtime)


def sandbox_of(record: ContainerRecord, parts: Parts) -> Sandbox:
    """A new sandbox for the run: what its networks must know of the container."""
    config, host = record.config, record.host
    exposed = tuple(config.exposed_ports) if isinstance(config.exposed_ports, dict) else ()
    return Sandbox(
        *(record.id, record.name, config.hostname, bundle.dns_servers(host, parts.config)),
        Request(exposed, host.port_bindings or {}, host.publish_all_ports),
        ipv6=has_ipv6(host),
        changes_links="CAP_NET_ADMIN"
        in capabilities.granted(host.cap_add or (), host.cap_drop or (), privileged=host.privileged),
    )


def stdio_owner(record: ContainerRecord, user: oci.User) -> tuple[int, int] | None:
    """uid and gid on the host of a process's stdio, which its user may open again (/dev/stdout).
    None without a user namespace, where the runtime sees to that.
    """
    return None if record.ids is None else record.ids.outside(user.uid, user.gid)


def _binds(record: ContainerRecord) -> bool:
    """It mounts paths of the host."""
    return any(not isinstance(point.name, str) for point in record.mounts)


def _with_peers(record: ContainerRecord, joined: sharing.Joined, find: sharing.Find) -> ContainerRecord:
    """The record with the data of links and of a shared network: the current names and addresses of
    the other containers.
    """
    if record.links:
        hosts, environment = sharing.links(record, find)
        record = msgspec.structs.replace(record, link_hosts=hosts, link_environment=environment)
    if joined.peer is not None:
        of = joined.peer.record.config
        config = msgspec.structs.replace(record.config, hostname=of.hostname, domainname=of.domainname)
        record = msgspec.structs.replace(record, config=config)
    return record


async def _with_defaults(record: ContainerRecord, parts: Parts) -> ContainerRecord:
    """The record with the operator's parent and driver of its cgroup and its ids, as of now; its
    directory is made to suit. Raises InvalidParameter if its own parent does not suit the driver,
    or its HostConfig a user namespace.
    """
    directory = directory_of(parts.config, record.id)
    if record.host.auto_remove:
        # If daemon and monitor end now, the next daemon removes it (`boot.restore`).
        await asyncio.to_thread(bundle.mark_begun, directory)
    parent, driver, ids = parts.defaults.cgroup_parent, parts.defaults.cgroup_driver, parts.defaults.ids_of(record.host)
    check_cgroup_parent(record.host.cgroup_parent, driver)
    if ids is not None:
        check_remapped(record.host)  # the option may be newer than the container
    elif record.ids is not None:
        await asyncio.to_thread(bundle.give_to_root, directory)
    if (record.cgroup_parent, record.cgroup_driver, record.ids) == (parent, driver, ids):
        return record
    return msgspec.structs.replace(record, cgroup_parent=parent, cgroup_driver=driver, ids=ids)


def _user_namespace(
    record: ContainerRecord, network: str | None, joined: sharing.Joined, borrowed: contextlib.AsyncExitStack
) -> str:
    """The path of its user namespace for the runtime: the one that it joins with another container,
    otherwise the owner of its network namespace, in which its root has capabilities. Empty: a fresh
    one, or none.
    """
    if joined.user >= 0:
        return sharing.path(joined.user)
    if record.ids is None or not network:
        return ""
    namespace = os.open(network, os.O_RDONLY | os.O_CLOEXEC)
    try:
        owner = user_namespaces.owner(namespace)
    finally:
        os.close(namespace)
    borrowed.callback(os.close, owner)
    return sharing.path(owner)


async def _join_network(
    record: ContainerRecord, parts: Parts, joined: sharing.Joined, undo: contextlib.AsyncExitStack
) -> Joined:
    """The network namespace's path (empty: a fresh one; None: the host's), and the endpoints to
    show.
    """
    if joined.network:
        return Joined(joined.network, {})
    # Not checked at create: clients take a 404 there for a missing image, and would pull it.
    host = record.host
    disabled = record.config.network_disabled is True and host.network_mode != "host"
    primary = "none" if disabled else parts.networks.name_of(host.network_mode)
    endpoints = record.networks if record.networks and not disabled else {primary: EndpointSettings()}
    connected = await parts.attachments.join(
        *(sandbox_of(record, parts), endpoints, primary, record.requested_macs(primary)),
        user=joined.user,
        sysctls=network_sysctls(host) if record.ids is None else {},
    )
    undo.push_async_callback(parts.attachments.leave, record.id)
    return connected


# --- the end of a run -----------------------------------------------------------------------------


def end_with(process: Process, record: ContainerRecord, parts: Parts) -> None:
    """Kill the other processes of the run when this one, its first, has ended. The kernel does so
    in a pid namespace of its own; where a container shares another one, containerd does it too.
    They may hold the output open, and the monitor reports the exit only when that is read.
    """
    if record.host.pid_mode in ("", "private") or process.pidfd < 0:
        return
    loop = asyncio.get_running_loop()
    try:
        watched = os.dup(process.pidfd)  # a loop has one callback for a descriptor
    except OSError as error:
        _log.warning("container %s: its end cannot be watched: %s", record.id, words(error))
        return

    def forget(_: object) -> None:
        nonlocal watched
        if watched >= 0:
            loop.remove_reader(watched)
            os.close(watched)
            watched = -1

    def ended() -> None:
        forget(None)
        killing = asyncio.to_thread(parts.cgroups.kill, cgroup_of(record))
        spawn(killing, f"container {record.id}: end its other processes")

    loop.add_reader(watched, ended)
    process.exit.add_done_callback(forget)


async def oom_killed(record: ContainerRecord, parts: Parts) -> bool:
    """Returns True if the kernel is known to have killed a process of the run for its memory
    limit. To be asked before `release`.
    """
    host = record.host
    if not host.memory:
        return False
    try:
        return await asyncio.to_thread(parts.cgroups.oom_killed, cgroup_of(record))
    except (OSError, EngineError) as error:
        _log.error("container %s: cannot find out whether it ran out of memory: %s", record.id, words(error))
        return False


async def release(record: ContainerRecord, parts: Parts, *, abandoned: bool = False) -> None:
    """Release what the run has: runtime state and control group, mount, networks, volumes. Each is
    released even if another fails; failures are logged.

    `abandoned`: its end was not seen, so its processes may still run: the runtime kills them.
    """
    outcomes = await asyncio.gather(
        _end_what_is_left(record, parts) if abandoned else _discard(record, parts),
        parts.snapshots.unmount(record.id),
        _give_back(record, parts),
        return_exceptions=True,
    )
    parts.deliveries.ended(record.id)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            _log.error("container %s: cleaning up after its exit: %s", record.id, words(outcome), exc_info=outcome)


async def _discard(record: ContainerRecord, parts: Parts) -> None:
    # Hooks of devices at the end of a run are the runtime's affair.
    cgroup = cgroup_of(record)
    if record.host.device_requests or (record.cgroup_driver == "systemd" and not await _scope_ends(parts, cgroup)):
        await _end_what_is_left(record, parts)
        return
    await runtime_of(record, parts).discard(record.id, cgroup, parts.cgroups)


async def _scope_ends(parts: Parts, cgroup: str, *, kill: bool = False) -> bool:
    """Wait until systemd has removed the control group of a scope. Returns False if it does not,
    or if processes are left, unless it is to `kill` them; the runtime then has systemd stop the
    scope.

    Nothing else may remove it. systemd is notified of the last process's end, and then reads
    cgroup.events. If that file is gone by then, the scope counts as active for ever (systemd 252),
    and the container's next start is refused, since its unit exists.
    """
    if parts.cgroups.mode != "v2":
        return False  # systemd removes the directories of some controllers only
    for pause in _SCOPE_PAUSES:
        if not await asyncio.to_thread(parts.cgroups.exists, cgroup):
            return True
        if kill:
            await asyncio.to_thread(parts.cgroups.kill, cgroup)
        elif await asyncio.to_thread(parts.cgroups.processes, cgroup):
            return False
        await asyncio.sleep(pause)
    return False


_SCOPE_PAUSES = (0.001, 0.002, 0.004, 0.008, 0.016, 0.03, 0.06, 0.12, 0.25, 0.5, 1, 1)
"""Seconds between looks for the control group of a scope. systemd takes a millisecond unless it is
busy, for example with a reload.
"""


async def _end_what_is_left(record: ContainerRecord, parts: Parts) -> None:
    await runtime_of(record, parts).delete(record.id)
    await remove_cgroup(parts, cgroup_of(record))


async def _give_back(record: ContainerRecord, parts: Parts) -> None:
    try:
        await parts.attachments.leave(record.id)
    finally:
        await parts.volumes.unmount(record.id, record.mounts)
