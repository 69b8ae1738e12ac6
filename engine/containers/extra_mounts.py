"""Mounts of one run besides those of its record, as image builds need them for `RUN --mount`.

A source is a descriptor that the caller has opened (openat2), so a path that changes meanwhile does
not matter. The content of a file is in memory and on a tmpfs that ends with the run: never on a
disk, in a record, in inspect or in a log. All of them exist only in the runtime's own mount
namespace, so a crash leaves nothing.

Not here: the mounts of a record (mount_points.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec

from engine.containers import spec
from engine.containers.mount_points import normal_path
from engine.containers.start import Placed
from engine.errors import ServerError
from engine.system import detached_mounts
from engine.system.detached_mounts import MountNamespace, NewFile, Tree, place_beside
from engine.system.threads import uninterrupted
from engine.system.user_namespaces import IdMap
from engine.wire import oci


class Bind(msgspec.Struct, frozen=True, kw_only=True):
    """A directory, a file or a socket of the host or of the engine's mount namespace."""

    destination: str
    """Absolute."""
    source: int
    """Its descriptor (O_PATH will do), open until the start has returned. It stays the caller's."""
    writable: bool = False
    mapped: bool = False
    """It shows the ids that a container in a user namespace has on the host (`Snapshots.content`).
    Otherwise its ids are those inside of the container.
    """


class Tmpfs(msgspec.Struct, frozen=True, kw_only=True):
    """An empty file system in memory."""

    destination: str
    size: int = 0
    """Bytes; 0: the kernel's default."""


class File(msgspec.Struct, frozen=True, kw_only=True):
    """A file on a tmpfs, such as a secret."""

    destination: str
    content: bytes
    mode: int = 0o400
    uid: int = 0
    gid: int = 0

    def __repr__(self) -> str:
        """Without the content, which may be a secret."""
        return f"File({self.destination!r}, {len(self.content)} bytes)"


class Variable(msgspec.Struct, frozen=True, kw_only=True):
    """A variable of the process alone, such as a secret."""

    name: str
    value: str

    def __repr__(self) -> str:
        """Without the value, which may be a secret."""
        return f"Variable({self.name!r})"


class Sandbox(msgspec.Struct, frozen=True, kw_only=True):
    """No mount, but the lack of some: the run has what BuildKit's have of the engine's own files.

    There is no /etc/hostname and no variable HOSTNAME. /etc/hosts has the hostname as a name of
    this host; it and /etc/resolv.conf cannot be written.
    """


ExtraMount = Bind | Tmpfs | File | Variable | Sandbox


@contextlib.asynccontextmanager
async def placed(
    wanted: Sequence[ExtraMount], namespace: MountNamespace, root: Path, ids: IdMap | None = None
) -> AsyncIterator[Placed]:
    """Prepare the mounts for a start, whose runtime has its root at `root`. The context lasts until
    the runtime has returned. `ids`: of the container, if it is in a user namespace.

    Raises InvalidParameter, ServerError.
    """
    if not wanted:
        yield Placed(root=root)
        return
    trees: list[int] = []
    try:
        yield await _place(wanted, namespace, root, trees, ids)
    finally:
        # In the background: closing the last descriptor of a mount waits for an RCU grace period.
        for tree in trees:
            asyncio.get_running_loop().run_in_executor(None, os.close, tree)


async def _place(
    extra: Sequence[ExtraMount], namespace: MountNamespace, root: Path, trees: list[int], ids: IdMap | None
) -> Placed:
    beside: list[Tree | NewFile] = []
    mounts: dict[str, oci.Mount] = {}
    here: dict[str, str] = {}
    directories: set[str] = set()
    environment: list[str] = []
    for mount in extra:
        if isinstance(mount, Sandbox):
            continue
        if isinstance(mount, Variable):
            environment.append(f"{mount.name}={mount.value}")
            continue
        destination = normal_path(mount.destination, mount.destination)
        here[destination] = ""
        if isinstance(mount, Tmpfs):
            size = (f"size={mount.size}",) if mount.size else ()
            mounts[destination] = oci.Mount(
                destination=destination, type="tmpfs", source="tmpfs", options=("nosuid", "mode=1777", *size)
            )
            directories.add(destination)
            continue
        source = str(place_beside(root, len(beside)))
        if isinstance(mount, File):
            owner = (mount.uid, mount.gid) if ids is None else ids.outside(mount.uid, mount.gid)
            beside.append(NewFile(mount.content, mount.mode, *owner))
            # A script of the build is executed, a secret is not.
            options = ("bind", "rprivate", "ro", "nosuid", "nodev", *(() if mount.mode & 0o111 else ("noexec",)))
            mounts[destination] = oci.Mount(destination=destination, type="bind", source=source, options=options)
            continue
        await uninterrupted(_clone(mount.source, namespace, trees))
        if ids is not None and not mount.mapped:
            await asyncio.to_thread(_map_ids, trees[-1], ids)
        beside.append(Tree(trees[-1]))
        here[destination] = f"/proc/self/fd/{trees[-1]}"
        mounts[destination] = spec.bind(
            source, destination, mount.writable, "rprivate", options=spec.ALONE, here=here[destination]
        )
        if stat.S_ISDIR(os.fstat(mount.source).st_mode):
            directories.add(destination)
    return Placed(
        root=place_beside(root) if beside else root,
        beside=beside,
        mounts=mounts,
        here=here,
        directories=frozenset(directories),
        environment=tuple(environment),
        sandbox=any(isinstance(mount, Sandbox) for mount in extra),
    )


def _map_ids(tree: int, ids: IdMap) -> None:
    namespace = ids.namespace()
    try:
        detached_mounts.map_ids(tree, namespace)
    finally:
        os.close(namespace)


async def _clone(source: int, namespace: MountNamespace, trees: list[int]) -> None:
    """Add a detached copy of the mount at a descriptor, which belongs to the host's mount namespace
    or to the engine's.
    """

    def clone() -> None:
        trees.append(detached_mounts.clone(source))

    try:
        await asyncio.to_thread(clone)
    except ServerError as error:
        if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EINVAL:
            raise
        await namespace.run(clone)


__all__ = ["Bind", "ExtraMount", "File", "Sandbox", "Tmpfs", "Variable", "placed"]
