"""The engine's mounts over a container's root, as trees (system/detached_mounts.py), for code that
assembles that root again.

The host path of a bind is resolved again, since the container may be stopped. If the container
runs, the result must be the same file that it has mounted: the container may write to a directory
in the path (`-v /a:/a -v /a/b:/b`) and may have put a link there. If they differ, the container's
own mount is cloned. A mount whose file was unlinked cannot be cloned. Then, as in Docker, the file
that replaced it on the host is mounted, provided that no link leads there.

Blocking. Owns: nothing but the trees until they are returned. Raises: ServerError.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from engine.containers import body, bundle, image_mounts, mount_points
from engine.containers.container import Container
from engine.containers.store import ContainerRecord
from engine.errors import EngineError, ServerError
from engine.monitor.handles import Process
from engine.system import detached_mounts, files, host_paths, namespaces
from engine.system.detached_mounts import MountNamespace
from engine.system.tasks import shield
from engine.system.threads import uninterrupted


class Source(NamedTuple):
    """A file of the host for a place in the container: a path, or a descriptor."""

    source: Path | int
    destination: str
    writable: bool
    bind: str = ""
    """The host path of a bind."""


class Mounted(NamedTuple):
    """A tree to mount, and its mount point. The receiver closes the tree."""

    tree: int
    destination: str
    writable: bool


def destinations(record: ContainerRecord) -> set[str]:
    """Where `engine_mounts` may have mounts, relative to the root."""
    mounts = [each.destination for each in record.mounts]
    images = [each.destination for each in record.image_mounts]
    return {place.strip("/") for place in (*bundle.NETWORK_FILES, *mounts, *images)}


@contextlib.asynccontextmanager
async def engine_mounts(container: Container, *, mapped: bool) -> AsyncIterator[list[Mounted]]:
    """The mounts of a start over the container's root, outermost first: volumes, binds, network
    files. `mapped`: images as for `Snapshots.mount`.

    They stay mounted while the context lasts.
    """
    record, parts = container.record, container.parts
    owner = container.directory
    if joined := body.joined(record.host.network_mode):
        with contextlib.suppress(EngineError):
            owner = container.peers.get(joined).directory
    written = await asyncio.to_thread(bundle.network_files, owner)
    sources = {target: Source(path, target, True) for target, path in written.items()}
    async with (
        image_mounts.opened(record, parts.snapshots, mapped=mapped) as images,
        parts.volumes.opened(container.id, record.mounts, mount_points.subpaths(record)) as volumes,
    ):
        for point, source in volumes:
            bind = "" if isinstance(point.name, str) else point.source
            sources[point.destination] = Source(source, point.destination, point.rw, bind)
        process = parts.monitor.processes.get(container.id)
        inside = [Source(source, each.destination, False) for each, source in images]
        # not `spawn`: awaited below, and its failure is raised
        cloning = asyncio.create_task(_cloned(sources.values(), process, inside, parts.snapshots.mount_namespace))
        try:
            yield await shield(cloning)
        finally:
            try:
                await uninterrupted(asyncio.wait([cloning]))
            finally:
                if cloning.exception() is None:
                    # Closing the last descriptor of a detached mount unmounts it, which waits for
                    # an RCU grace period.
                    await uninterrupted(asyncio.to_thread(_close, cloning.result()))


async def _cloned(
    sources: Iterable[Source], process: Process | None, inside: Sequence[Source], namespace: MountNamespace
) -> list[Mounted]:
    """As `clone`. `inside`: sources in the engine's mount namespace."""
    sources = list(sources)
    run = host_paths.run if any(each.bind for each in sources) else asyncio.to_thread
    found = await run(clone, sources, process)
    if not inside:
        return found
    try:
        found += await namespace.run(lambda: clone(inside, None))
    except BaseException:
        await asyncio.to_thread(_close, found)
        raise
    return sorted(found, key=_depth)


def _depth(each: Source | Mounted) -> int:
    return each.destination.count("/")


def _close(mounts: Iterable[Mounted]) -> None:
    for each in mounts:
        os.close(each.tree)


def clone(sources: Iterable[Source], process: Process | None) -> list[Mounted]:
    """Trees of all the sources, outermost destination first.

    `process`: the container's, when it runs.
    """
    found: list[Mounted] = []
    try:
        for each in sorted(sources, key=_depth):
            tree = _as_it_is_there(each, process) if each.bind and process is not None else _clone(each)
            if tree is not None:
                found.append(Mounted(tree, each.destination, each.writable))
    except BaseException:
        for mounted in found:
            os.close(mounted.tree)
        raise
    return found


def _clone(each: Source) -> int:
    try:
        return detached_mounts.clone(each.source, recursive=True)
    except FileNotFoundError as error:
        raise ServerError(f"mount source of {each.destination}: no such file or directory") from error


def _as_it_is_there(each: Source, process: Process) -> int | None:
    """A tree of the source if the container has the same file mounted at the destination.

    Otherwise a clone of the container's mount; None when there is no safe one.
    """
    with contextlib.ExitStack() as stack:
        try:
            root = os.open(f"/proc/{process.pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, root)
            # Checked after the root was opened: it shows that the process is still the container's.
            namespace = namespaces.of_process(process.pid, process.pidfd, "mnt")
        except (OSError, EngineError):
            return _clone(each)  # it has just ended
        stack.callback(os.close, namespace)
        try:
            there = files.open_in_root(root, each.destination, os.O_PATH)
        except OSError as error:
            raise ServerError(f"{each.destination} is no longer in the container: {error.strerror}") from error
        stack.callback(os.close, there)
        own, other = os.fstat(there), os.stat(each.source)
        if (own.st_dev, own.st_ino) == (other.st_dev, other.st_ino):
            return _clone(each)
        if own.st_nlink:
            return detached_mounts.clone_within(namespace, there)
        top = files.open_directory("/")
        stack.callback(os.close, top)
        try:
            replaced = files.open_without_links(top, each.bind.lstrip("/"), os.O_PATH)
        except OSError:
            return None
        stack.callback(os.close, replaced)
        return detached_mounts.clone(replaced)


__all__ = ["Mounted", "Source", "clone", "destinations", "engine_mounts"]
