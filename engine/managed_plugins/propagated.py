"""The mounts below a plugin's PropagatedMount, kept for containers.

Docker keeps them in the host's mount namespace. Here a shared mount of ROOT/plugins/ID/propagated
is in the engine's own mount namespace, which the monitor keeps over restarts of the daemon
(`Snapshots.mount_namespace`). The plugin has a peer of it, so its mounts appear in the engine's
namespace, the host sees none of them, and they outlive the plugin's process. The next process of
the plugin finds them again.

Rules: the kernel document sharedsubtree.rst, "Bind semantics".
Threads: those of the mount namespace. Raises: ServerError.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from engine.errors import ServerError, reason
from engine.system import detached_mounts, files, mounts
from engine.system.detached_mounts import MountNamespace
from engine.system.threads import opened, uninterrupted

_PLACES = "/propagated"
"""The directory of the mount namespace with the mounts, by plugin id."""


async def keep(namespace: MountNamespace, plugin_id: str, directory: Path) -> None:
    """Make the shared mount of `directory`, a directory of the host, unless it is there."""
    place = f"{_PLACES}/{plugin_id}"

    def attach(tree: int) -> None:
        os.makedirs(place, exist_ok=True)
        if detached_mounts.is_mount(place):
            return
        detached_mounts.attach(tree, place)
        try:
            mounts.mount("", place, flags=mounts.MS_SHARED)
        except BaseException:
            detached_mounts.detach(place)
            raise

    def clone() -> int:
        directory.mkdir(mode=0o755, exist_ok=True)
        return detached_mounts.clone(directory)

    tree = await opened(asyncio.to_thread(clone))
    try:
        await uninterrupted(namespace.run(lambda: attach(tree)))
    finally:
        await uninterrupted(asyncio.to_thread(os.close, tree))


async def is_kept(namespace: MountNamespace, plugin_id: str) -> bool:
    return await namespace.run(lambda: detached_mounts.is_mount(f"{_PLACES}/{plugin_id}"))


async def peer(namespace: MountNamespace, plugin_id: str) -> int:
    """A detached peer of the mount with all mounts below it, for the plugin's next process. The
    caller closes it.
    """
    place = f"{_PLACES}/{plugin_id}"
    return await opened(namespace.run(lambda: detached_mounts.clone(place, recursive=True, peer=True)))


def tree(plugin_id: str, path: str) -> int:
    """A detached private copy of the mounts at a path below the mount. No link leads out of it.
    The caller closes it.

    Call it in a thread of the namespace, one of its own (`MountNamespace.run_apart`): the file
    system at the path may be served by the plugin. Raises OSError for a path that does not exist.
    """
    root = files.open_directory(f"{_PLACES}/{plugin_id}")
    try:
        found = files.open_in_root(root, path, os.O_PATH)
    finally:
        os.close(root)
    try:
        return detached_mounts.clone(found, recursive=True)
    finally:
        # At once: the plugin cannot unmount it while it is open.
        os.close(found)


async def drop(namespace: MountNamespace, plugin_id: str) -> None:
    """Remove the mount and all below it. Copies in containers stay. Does nothing if there is
    none.
    """
    place = f"{_PLACES}/{plugin_id}"

    def detach() -> None:
        if detached_mounts.is_mount(place):
            detached_mounts.detach(place)
        try:
            os.rmdir(place)
        except FileNotFoundError:
            return
        except OSError as error:
            raise ServerError(f"{place}: {reason(error)}") from error

    await uninterrupted(namespace.unmount(detach))


async def kept(namespace: MountNamespace) -> set[str]:
    """The ids of the plugins that have such a mount."""

    def names() -> set[str]:
        try:
            return set(os.listdir(_PLACES))
        except FileNotFoundError:
            return set()

    return await namespace.run(names)
