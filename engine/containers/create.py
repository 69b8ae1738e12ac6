"""A create: from a client's body to a container's record, and that record with its volumes and its
layer on disk.

`draft` interprets the body, `commit` creates the container. The row is the commit point: a failure
before it undoes everything, after it the container exists.

Not here: the rules of the body alone (`body.py`, `limits.py`), names in use and the collection
(`containers.py`).
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import stat
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec

from engine.common.network_rules import PREDEFINED_NAMES
from engine.containers import body, bundle, endpoints, image_mounts, limits, log_plan, mount_points, security, spec
from engine.containers.body import Link
from engine.containers.defaults import Defaults
from engine.containers.parts import Parts
from engine.containers.sharing import Find, network_owner
from engine.containers.store import ContainerRecord
from engine.errors import InvalidParameter, NotFound, reason
from engine.images import platforms
from engine.images.record import ImageRecord
from engine.runtime import init
from engine.runtime.cgroups import Support
from engine.system import files, host_paths
from engine.system.threads import uninterrupted
from engine.wire.containers import Config, CreateBody, HostConfig, NetworkingConfig


class Draft(NamedTuple):
    """The result of a body: a record without its volumes, the mounts with those to be filled from
    the image, and warnings for the client.
    """

    record: ContainerRecord
    mounts: mount_points.Mounts
    warnings: list[str]


def draft(
    asked: CreateBody,
    name: str,
    platform: str,
    parts: Parts,
    find: Find,
    support: Support,
    image: ImageRecord | None = None,
    defaults: Defaults | None = None,
) -> Draft:
    """Raises InvalidParameter, NotFound (image). `name` is checked and free.

    With `image`, which need not be in the store, the body's configuration is complete: nothing of
    the image's is merged into it, and no volumes are made for its Volumes. `defaults`: instead of
    those of the operator.
    """
    config, host = body.checked(asked)
    runtime = parts.runtimes.named(host.runtime or "")
    host, warnings = limits.adapted(_placed(host, support, parts, defaults), support)
    warnings = [*asked.from_older.warnings, *warnings, *body.warnings(asked.host_config)]
    host = msgspec.structs.replace(host, log_config=log_plan.resolved(host.log_config, parts.config))
    complete = image is not None
    if image is None:
        if not config.image:
            raise InvalidParameter("No image specified")
        image = parts.images.get(config.image)
        # A 404, as from dockerd: clients then pull the image for that platform.
        platforms.check(config.image, image.config, platforms.parse(platform) if platform else None)
        if not platform and platforms.mismatch(config.image, image.config, platforms.HOST):
            own, host_platform = map(platforms.text_of, (platforms.of_image(image.config), platforms.HOST))
            warnings.append(
                f"The requested image's platform ({own}) does not match the detected host platform "
                f"({host_platform}) and no specific platform was requested"
            )
    parts.grace_period.expect()  # most containers are started at once
    if not complete:
        config = body.merged(config, image.config.config or Config())
    elif not config.image:
        config = msgspec.structs.replace(config, image=image.id)
    path, args = body.command(config)
    container_id = secrets.token_hex(32)
    shares_network = bool(body.joined(host.network_mode))
    for field, mode in (("PidMode", host.pid_mode), ("IpcMode", host.ipc_mode)):
        if peer := body.joined(mode):
            try:
                find(peer)  # it must exist now, as in Docker; a start looks again
            except NotFound as error:  # for 404 the docker CLI would pull the image
                raise InvalidParameter(f"{field}: {error.message}") from error
    if not config.hostname:
        config = msgspec.structs.replace(config, hostname=_default_hostname(host, container_id))
    if host.network_mode == "host" and host.port_bindings:
        warnings.append("Published ports are discarded when using host network mode")
    if not asked.from_older.volume_driver_unnoticed and mount_points.ignores_volume_driver(host):
        warnings.append(
            "WARNING: the container-wide volume-driver configuration is ignored for volumes specified via 'mount'. "
            "Use '--mount type=volume,volume-driver=...' instead"
        )
    networks = endpoints.Wanted({}, {})
    if not shares_network:
        networks = endpoints.wanted(
            *(parts.networks, host.network_mode, asked.networking_config),
            unchecked=asked.from_older.endpoints_unchecked,
        )
    record = ContainerRecord(
        id=container_id,
        name=name,
        created=time.time_ns(),
        image_id=image.id,
        parent=image.chain_ids[-1] if image.chain_ids else "",
        path=path,
        args=args,
        config=config,
        host=host,
        runtime=runtime.name,
        networks=networks.networks,
        macs=networks.macs,
        links=_links(parts, find, host),
    )
    mounted = msgspec.structs.replace(config, volumes=None) if complete else config
    recursive = not asked.from_older.flat_read_only
    mounts = mount_points.mount_points(
        mounted, host, _volumes_from(find, host, recursive), image=parts.images.get, recursive=recursive
    )
    record = msgspec.structs.replace(record, mount_options=mounts.options, image_mounts=mounts.images)
    return Draft(record, mounts, warnings)


def _placed(host: HostConfig, support: Support, parts: Parts, defaults: Defaults | None = None) -> HostConfig:
    """With the defaults of the operator and of this host, as inspect shows them. Raises
    InvalidParameter for a missing init program, and control groups that must not be writable.
    """
    if spec.has_init(host, parts.config):
        init.program(parts.config.init_path)
    body.check_cgroup_parent(host.cgroup_parent, parts.defaults.cgroup_driver)
    if parts.defaults.ids_of(host) is not None:
        body.check_remapped(host)
    host = (defaults or parts.defaults).applied(host, unified=support.unified)
    own = support.unified and host.cgroupns_mode == "private"
    if security.parse(host.security_opt or ()).writable_cgroups and not (own or host.privileged):
        raise InvalidParameter(
            "SecurityOpt: writable-cgroups needs cgroup v2 and a cgroup namespace of the container's own"
        )
    return msgspec.structs.replace(
        host,
        runtime=host.runtime or parts.runtimes.default_name,
    )


def _default_hostname(host: HostConfig, container_id: str) -> str:
    """That of a container whose configuration has none."""
    if body.joined(host.network_mode):
        return ""
    return os.uname().nodename if "host" in (host.network_mode, host.uts_mode) else container_id[:12]


async def with_host(
    record: ContainerRecord,
    asked: HostConfig,
    parts: Parts,
    find: Find,
    support: Support,
    commit: Callable[..., Awaitable[None]],
) -> None:
    """Another HostConfig for the record, as a start of API 1.23 and older may send.

    `commit` saves it with further changes.

    The container's volumes keep their destinations unless the new HostConfig mounts something else
    there. Raises InvalidParameter; nothing has changed then.
    """
    host = body.checked_host(msgspec.structs.replace(asked, ipc_mode=asked.ipc_mode or body.SHAREABLE))
    config = record.config
    if config.hostname == _default_hostname(record.host, record.id):
        config = msgspec.structs.replace(config, hostname="")
    body.check_together(config, host)
    runtime = parts.runtimes.named(host.runtime or "")
    if not config.hostname:
        config = msgspec.structs.replace(config, hostname=_default_hostname(host, record.id))
    host, _ = limits.adapted(_placed(host, support, parts), support)
    host = msgspec.structs.replace(host, log_config=log_plan.resolved(host.log_config, parts.config))
    await parts.deliveries.check(host.log_config)
    networks = record.networks
    if host.network_mode != record.host.network_mode:
        shares = bool(body.joined(host.network_mode))
        networks = {} if shares else endpoints.wanted(parts.networks, host.network_mode, NetworkingConfig()).networks
    mounts = mount_points.mount_points(
        record.config,
        host,
        [mount_points.inherited(record), *_volumes_from(find, host, recursive=False)],
        image=parts.images.get,
    )
    changed = msgspec.structs.replace(
        record,
        config=config,
        host=host,
        runtime=runtime.name,
        networks=networks,
        links=_links(parts, find, host),
        mount_options=mounts.options,
        image_mounts=mounts.images,
    )
    named = mount_points.named_volumes(host)
    async with image_mounts.retained(changed, parts.snapshots):
        if host.mounts:
            await host_paths.run(mount_points.check_sources, host)
        async with parts.volumes.claim(record.id, mounts.points, named, mounts.volumes) as claim:
            changed = msgspec.structs.replace(changed, mounts=claim.mounts)
            if record.parent:
                await claim.populate(mounts.populated, lambda: _content(changed, parts))
            await commit(changed, *claim.changes)
    parts.volumes.release(record.id, _volumes(record) - _volumes(changed))
    await image_mounts.release(record, parts.snapshots)


async def _content(record: ContainerRecord, parts: Parts) -> int:
    """A descriptor of its image's content, with the ids that it has in volumes."""
    mapped = parts.defaults.ids_of(record.host) is not None
    return await parts.snapshots.open_content(record.parent, mapped=mapped)


def _volumes(record: ContainerRecord) -> set[str]:
    return {each.name for each in record.mounts if isinstance(each.name, str)}


def _links(parts: Parts, find: Find, host: HostConfig) -> dict[str, str]:
    """Links apply to the default bridge; on a user-defined network they are aliases of the
    endpoint.
    """
    if not body.joined(host.network_mode) and parts.networks.name_of(host.network_mode) not in PREDEFINED_NAMES:
        return {}
    return {link.alias: _child(find, link).id for link in map(body.parse_link, host.links or ())}


async def commit(
    drafted: Draft,
    parts: Parts,
    created: Callable[[ContainerRecord], None],
    *,
    transient: bool = False,
    marked: bool = True,
) -> None:
    """Create its volumes, its layer and its row; `created` is called when the row is written. A
    `transient` one has no row, and may have a root that is not `marked` (`Snapshots.prepare`).

    A failure undoes everything.

    Once the row is being written, cancelling the caller does not undo the create.
    """
    async with image_mounts.retained(drafted.record, parts.snapshots):
        if drafted.record.host.mounts:
            await host_paths.run(mount_points.check_sources, drafted.record.host)
        cancelled = await _commit(drafted, parts, created, transient, marked)
    if cancelled is not None:
        raise cancelled


async def _commit(
    drafted: Draft, parts: Parts, created: Callable[[ContainerRecord], None], transient: bool, marked: bool
) -> asyncio.CancelledError | None:
    """Returns the cancellation of the caller that came too late to undo the create."""
    record, mounts = drafted.record, drafted.mounts
    named = mount_points.named_volumes(record.host)
    cancelled: asyncio.CancelledError | None = None
    async with parts.volumes.claim(record.id, mounts.points, named, mounts.volumes) as claim:
        record = msgspec.structs.replace(record, mounts=claim.mounts)
        if record.parent:
            await claim.populate(mounts.populated, lambda: _content(record, parts))
        await parts.snapshots.prepare(record.id, record.parent or None, transient=transient, marked=marked)
        try:
            if record.config.working_dir.strip("/"):
                await _make_working_directory(record, parts)
            await uninterrupted(parts.store.add(record, *claim.changes, transient=transient))
        except BaseException as error:
            if record.id not in parts.store:
                await uninterrupted(parts.snapshots.remove(record.id))
                raise
            assert isinstance(error, asyncio.CancelledError)
            cancelled = error
        created(record)
    return cancelled


_IN_IMAGES: set[tuple[str, str]] = set()
"""Chain id and path of working directories that images have. Content of a chain id never changes,
so only the first create mounts the root to look.
"""
_IN_IMAGES_LIMIT = 4096


async def _make_working_directory(record: ContainerRecord, parts: Parts) -> None:
    """Create the working directory now, as Docker does.

    `docker cp` finds it before the first start. Missing parts of the path are owned by root, mode
    0755.
    """
    path = body.directory(record.config.working_dir)
    if (record.parent, path) in _IN_IMAGES:
        return

    ids = parts.defaults.ids_of(record.host)

    def make(view: str) -> bool:
        """Returns True if the image had it."""
        root = files.open_directory(view)
        try:
            try:
                directory, present = files.open_in_root(root, path.strip("/"), os.O_PATH), True
            except FileNotFoundError:
                with bundle.making_files(ids):
                    directory, present = files.open_mount_point(root, path, directory=True), False
            try:
                if not stat.S_ISDIR(os.fstat(directory).st_mode):
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            finally:
                os.close(directory)
        finally:
            os.close(root)
        return present

    async with parts.snapshots.opened(record.id, mapped=ids is not None) as view:
        try:
            present = await parts.snapshots.mount_namespace.run(lambda: make(view))
        except OSError as error:
            raise InvalidParameter(f"Cannot mkdir: {path}: {reason(error)}") from error
    if present and record.parent:
        if len(_IN_IMAGES) >= _IN_IMAGES_LIMIT:
            _IN_IMAGES.clear()
        _IN_IMAGES.add((record.parent, path))


def _child(find: Find, link: Link) -> ContainerRecord:
    """The container that the link leads to: the owner of the named container's network namespace,
    as in dockerd.

    Raises 400, not 404, when it is missing: clients take a 404 of a create for a missing image and
    pull it.
    """
    try:
        child = network_owner(find(link.name), find).record
    except NotFound as error:
        raise InvalidParameter(f"Links: could not get container for {link.name}: {error.message}") from error
    if child.host.network_mode == "host":
        raise InvalidParameter(
            "conflicting options: host type networking can't be used with links. "
            "This would result in undefined behavior"
        )
    return child


def _volumes_from(find: Find, host: HostConfig, recursive: bool) -> list[mount_points.Inherited]:
    """Mounts of the containers that VolumesFrom names, read-only if the entry or the mount itself
    is. `recursive`: see `mount_points.inherited`.
    """
    inherited: list[mount_points.Inherited] = []
    for text in host.volumes_from or ():
        name, writable = mount_points.parse_volumes_from(text)
        try:
            source = find(name)
        except NotFound as error:
            raise InvalidParameter(f"VolumesFrom: {error.message}") from error
        inherited.append(mount_points.inherited(source.record, writable=writable, recursive=recursive))
    return inherited
