"""Changes of a container's settings: its name, HostConfig, links, networks, limits and terminal.

None of them moves the container's state, and each is a change whose row is its commit point
(`Container.commit`): a failure leaves record, host and kernel as they were. The effects of a change
on a running container come first, and are undone when the row cannot be saved.

Locks: the container's, for the whole change. A change that has begun is completed even when its
caller is cancelled. Not here: the rules of the bodies (`body.py`, `create.py`, `update.py`).
Raises: NotFound once the container has been removed, and the kinds that each function names.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
from collections.abc import Awaitable

import msgspec

from engine.containers import body, bundle, create, devices, launch, lifecycle, sharing
from engine.containers import update as limits
from engine.containers.container import Container
from engine.containers.lifecycle import Verb
from engine.errors import Conflict, EngineError, Forbidden, InvalidParameter, NotFound, ServerError, reason_with_file
from engine.networks.endpoints import with_names
from engine.networks.requested import mac_address
from engine.runtime.cgroups import Support
from engine.system.threads import whole
from engine.wire import oci
from engine.wire.containers import EndpointSettings, HostConfig, UpdateBody

_log = logging.getLogger(__name__)


@whole
async def rename(container: Container, name: str) -> None:
    """Raises Conflict when the name is taken, InvalidParameter when it is its own.

    `name` obeys the pattern (`names.checked_name`).
    """
    async with container.lock:
        container.check_present()
        before = container.record
        if name == before.name:
            raise InvalidParameter("Renaming a container with the same name as its current name")
        networks = {
            key: each if each.dns_names is None else with_names(each, before.id, name, before.config.hostname)
            for key, each in before.networks.items()
        }
        with container.peers.renaming(container, name):
            await container.commit(msgspec.structs.replace(before, name=name, networks=networks))
        container.parts.attachments.renamed(container.id, name)
        container.publish("rename", oldName="/" + before.name)


@whole
async def set_host(container: Container, host: HostConfig, support: Support) -> None:
    """Replace its HostConfig, as a start of API 1.23 and older may.

    Raises NotModified when it runs, InvalidParameter.
    """
    async with container.lock:
        container.check_present()
        lifecycle.following(container.record.status.state, Verb.START, container.id)
        before, peers = container.record, container.peers
        await create.with_host(before, host, container.parts, peers.get, support, container.commit)
        peers.host_changed(container, before)


@whole
async def resize(container: Container, rows: int, columns: int) -> None:
    """Terminal size, now and for the next start. Without a terminal only the event.

    Raises ServerError when it does not run; the size is kept even then, because clients send it
    before the start.
    """
    async with container.lock:
        container.check_present()
        if container.record.size != (rows, columns):
            await container.commit(msgspec.structs.replace(container.record, size=(rows, columns)))
        lifecycle.following(container.record.status.state, Verb.RESIZE, container.id)
        if container.record.config.tty:
            await container.parts.monitor.resize(container.id, rows, columns)
        container.publish("resize", height=str(rows), width=str(columns))


# --- links ----------------------------------------------------------------------------------------


@whole
async def unlink(container: Container, alias: str) -> None:
    """Remove a link. Raises NotFound when there is none with that alias."""
    async with container.lock:
        container.check_present()
        record = container.record
        child = record.links.get(alias)
        if child is None:
            raise NotFound(f"Cannot get child {alias} of /{record.name}: no such link")
        links = {name: to for name, to in record.links.items() if name != alias}
        kept = [text for text in record.host.links or () if body.parse_link(text).alias != alias]
        host = msgspec.structs.replace(record.host, links=kept or None)
        await container.commit(msgspec.structs.replace(record, links=links, host=host))
        container.peers.unlinked(container, child)
        await _relink(container)


async def relink(container: Container) -> None:
    """A linked container has started, perhaps with another address: update the hosts file."""
    if container.running:
        async with container.lock:
            await _relink(container)


async def _relink(container: Container) -> None:
    if not container.running:
        return
    try:
        hosts, _ = sharing.links(container.record, container.peers.get)
    except EngineError:
        return  # another of them does not run: leave the hosts file as it is
    if hosts != container.record.link_hosts:
        container.replace(link_hosts=hosts)
        await container.save()
        try:
            await _write_network_files(container)
        except ServerError as error:
            _log.error("%s", error.message)


# --- networks -------------------------------------------------------------------------------------


@whole
async def connect(container: Container, network: str, asked: EndpointSettings) -> None:
    """Connect it to one more network, at once when it runs. When it does not, the settings of a
    network that it is on already are replaced, as in Docker.

    Raises NotFound, Forbidden, InvalidParameter; nothing has changed then.
    """
    attachments = container.parts.attachments
    async with container.lock:
        container.check_present()
        _check_own_network(container, network)
        record = container.record
        if container.running:
            if container.process is None or container.process.exit.done():
                raise Conflict(f"Container {container.id} is not running")
            settings = await attachments.connect(container.id, network, asked, container.process)
        else:
            network = await attachments.network_id(container.id, record.name, network, asked)
            settings = attachments.check(container.id, network, asked, _others(container, network))
        name = container.parts.networks.get(network).record.name
        before = record.networks.get(name)
        attachments.reserve({name: settings})
        networks, ports = record.networks | {name: settings}, attachments.ports_of(container.id)
        mac = mac_address(asked.mac_address, f"network {name}")
        macs = {key: each for key, each in record.macs.items() if key != name} | ({name: mac} if mac else {})
        try:
            container.replace(networks=networks, macs=macs, ports=ports)
            await _write_network_files(container)
            await container.commit(container.record)
        except EngineError:
            container.put(record)
            with contextlib.suppress(EngineError):
                await _write_network_files(container)
            attachments.unreserve({name: settings})
            if container.running:
                await attachments.disconnect(container.id, network)
            raise
        if before is not None:
            attachments.unreserve({name: before})


def _others(container: Container, network_id: str) -> list[str]:
    """The names of the networks that its settings have besides this one."""
    networks = container.parts.networks
    name = networks.get(network_id).record.name
    kept = container.record.networks.get(name)
    # a swarm's network may have the name of one of this engine
    same = kept is not None and (kept.network_id == network_id or kept.network_id not in networks.by_id)
    return [key for key in container.record.networks if key != name or not same]


@whole
async def disconnect(container: Container, network: str) -> None:
    """Disconnect it from a network, at once when it runs.

    Raises NotFound, Forbidden when it is not connected.
    """
    attachments = container.parts.attachments
    async with container.lock:
        container.check_present()
        _check_own_network(container, network)
        try:
            name = attachments.check_connected(container.id, network, container.record.networks)
        except NotFound:  # it has gone, or is a swarm's, and not on this node at present
            name = _kept_name(container, network)
            if not name or container.running:
                raise
        if container.running:
            await attachments.disconnect(container.id, network)
        attachments.unreserve({name: container.record.networks[name]})
        left = {key: each for key, each in container.record.networks.items() if key != name}
        macs = {key: mac for key, mac in container.record.macs.items() if key != name}
        container.replace(networks=left, macs=macs, ports=attachments.ports_of(container.id))
        await container.save()
        await _write_network_files(container)


def _kept_name(container: Container, network: str) -> str:
    """The name of a network, by its name or id, as the container's settings have it; "" if they do
    not.
    """
    networks = container.record.networks
    if network in networks:
        return network
    return next((name for name, each in networks.items() if each.network_id == network), "")


def _check_own_network(container: Container, network: str) -> None:
    if body.joined(container.record.host.network_mode):
        raise Forbidden(
            f"network {network}: container {container.id}: "
            "container sharing network namespace with another container or host "
            "cannot be connected to any other network"
        )


async def _write_network_files(container: Container) -> None:
    """Raises ServerError."""
    record = container.record
    if container.running:
        try:
            gateways = container.parts.networks.host_gateways()
            files = record, container.directory, record.networks, container.parts.config, gateways
            await asyncio.to_thread(bundle.write_network_files, *files)
        except OSError as error:
            raise ServerError(
                f"container {container.id}: its hosts and resolv.conf: {reason_with_file(error)}"
            ) from error


# --- limits ---------------------------------------------------------------------------------------


@whole
async def update(container: Container, change: UpdateBody, support: Support) -> list[str]:
    """Set new limits, at once when it runs, and a new restart policy; returns the warnings.

    A failure undoes everything.
    """
    async with container.lock:
        container.check_present()
        lifecycle.following(container.record.status.state, Verb.UPDATE, container.id)
        before = container.record.host
        after, warnings = limits.merged(before, change, support)
        if container.running:
            try:
                await _apply(container, before, after, support)
            except NotFound:
                pass  # it has just ended: the next start applies the new limits
            except ServerError as error:
                await _take_back(container, after, before, support)
                raise ServerError(f"Cannot update container {container.id}: {error.message}") from error
        try:
            await container.commit(msgspec.structs.replace(container.record, host=after))
        except EngineError:
            await _take_back(container, after, before, support)
            raise
        if container.running and support.weighs_by_bfq and after.blkio_weight != before.blkio_weight:
            # it has just ended: the next start applies the new weight
            with contextlib.suppress(OSError):
                weight = after.blkio_weight or support.usual_weight
                await asyncio.to_thread(container.parts.cgroups.set_weight, container.cgroup, weight)
        container.peers.lifecycle.updated(container)
        container.publish("update")
        return warnings


async def _take_back(container: Container, after: HostConfig, before: HostConfig, support: Support) -> None:
    with contextlib.suppress(EngineError):
        if container.running:
            await _apply(container, after, before, support)


async def _apply(container: Container, before: HostConfig, after: HostConfig, support: Support) -> None:
    """Give the running container the limits that differ. Raises ServerError, NotFound."""
    parts, cgroup = container.parts, container.cgroup
    in_scope = container.record.cgroup_driver == "systemd"
    changed = msgspec.structs.replace(container.record, host=after)
    lifted, resources = await asyncio.to_thread(_differences, before, after, support)
    for field, major, minor in lifted:
        limit = asyncio.to_thread(parts.cgroups.lift_device, cgroup, field, major, minor)
        await _lifted(f"limit of {major}:{minor}", limit)
    if resources is not None:
        if resources.cpu is not None and resources.cpu.quota == limits.NO_QUOTA:
            await _lifted("CPU quota", asyncio.to_thread(parts.cgroups.lift, cgroup, "cpu"))
        if resources.pids is not None and resources.pids.limit == limits.NO_LIMIT:
            await _lifted("limit of processes", asyncio.to_thread(parts.cgroups.lift, cgroup, "pids"))
        update = functools.partial(launch.runtime_of(container.record, parts).update, container.id, resources)
        try:
            await update()
        except ServerError:
            if not in_scope:
                raise
            # The runtime asks systemd, too, and does not wait for one that executes itself again.
            await launch.tell_systemd(changed, parts)
            await update()
    if in_scope and (lifted or resources is not None):
        await launch.tell_systemd(changed, parts)


def _differences(
    before: HostConfig, after: HostConfig, support: Support
) -> tuple[list[tuple[str, int, int]], oci.Resources | None]:
    """Blocks: both read the numbers of devices from the paths that clients named."""
    return list(devices.lifted(before, after)), limits.resources(before, after, support)


async def _lifted(what: str, lifting: Awaitable[None]) -> None:
    try:
        await lifting
    except OSError as error:
        # otherwise it has just ended, which the runtime reports, or the device is gone
        if error.errno not in (errno.ENOENT, errno.ENODEV):
            raise ServerError(f"removing its {what}: {error.strerror}") from error
