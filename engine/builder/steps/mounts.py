"""The mounts of `RUN --mount`: read and checked with the step, opened for its container.

- cache: a directory that builds keep (`caches.py`).
- bind: files of the context, of another stage or of an image, as they are. A writable one is a copy
  that is thrown away.
- tmpfs; secret: a file in memory, from the client's session; ssh: a socket to the client's agent.

The context is not on the disk. The first bind of a build lays it out in a directory of its own, for
the time of the build.

Raises: InvalidParameter that names the mount, NotFound for a source or a required secret.
Rules:  Dockerfile reference, RUN --mount.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from engine._fast import copy
from engine.builder import copying, rules
from engine.builder.output import Log
from engine.builder.stage import StageBuild
from engine.builder.trees import DirectoryTree, Tree, source_path
from engine.containers.extra_mounts import Bind, ExtraMount, File, Tmpfs, Variable
from engine.errors import InvalidParameter, NotFound, ServerError, reason, reason_with_file
from engine.images.instructions import words
from engine.images.instructions.mounts import RunMount
from engine.system import files
from engine.system.threads import opened

SSH_SOCKET = "/run/buildkit/ssh_agent.{}"
SECRET_FILE = "/run/secrets/{}"
SCRIPT_MODE = 0o755


class Wanted(NamedTuple):
    """The mounts of one step. `key`: what of them decides the step's result. `caches`: for each
    mount the id of its cache, "" if it is none. `locked`: those that one step at a time uses.
    """

    mounts: tuple[RunMount, ...]
    key: tuple[object, ...]
    caches: tuple[str, ...]
    locked: tuple[str, ...]


@dataclass
class Ready:
    """Opened mounts, and variables that only the process gets."""

    mounts: list[ExtraMount] = field(default_factory=list)

    def add_script(self, path: str, content: bytes) -> None:
        """A program that the Dockerfile contains."""
        self.mounts.append(File(destination=path, content=content, mode=SCRIPT_MODE))


async def read(stage: StageBuild, mounts: Sequence[RunMount], log: Log) -> Wanted:
    """Find what the step's key has to contain of its mounts, which `rules.check` has checked."""
    key: list[object] = []
    caches: list[str] = []
    mounts = [_in_namespace(stage, _with_path(stage, mount)) for mount in mounts]
    for mount in mounts:
        what: list[object] = [mount.type, mount.id, mount.source, mount.target, mount.from_, mount.read_only, mount.env]
        what += [mount.mode, mount.uid, mount.gid, mount.size]
        if mount.type == "bind" or (mount.type == "cache" and mount.from_):
            what.append(await _content_key(stage, mount, log))
        key.append(what)
        caches.append(_cache_id(stage, mount, what[-1]) if mount.type == "cache" else "")
    locked = (cache for cache, mount in zip(caches, mounts, strict=True) if cache and mount.sharing == "locked")
    return Wanted(tuple(mounts), tuple(key), tuple(caches), tuple(locked))


def _with_path(stage: StageBuild, mount: RunMount) -> RunMount:
    """The mount with its source as a path in its tree."""
    if mount.type not in ("bind", "cache"):
        return mount
    rooted = stage.site.options.dialect.rooted_sources
    return msgspec.structs.replace(mount, source=source_path(mount.source, rooted=rooted))


def _in_namespace(stage: StageBuild, mount: RunMount) -> RunMount:
    """The mount; a cache with the namespace of the build in its id."""
    namespace = stage.site.options.cache_namespace
    if mount.type != "cache" or not namespace:
        return mount
    return msgspec.structs.replace(mount, id=f"{namespace}/{mount.id or _target(stage, mount)}")


def _target(stage: StageBuild, mount: RunMount) -> str:
    return rules.mount_target(mount, stage.state.config.working_dir)


def _cache_id(stage: StageBuild, mount: RunMount, content: object) -> str:
    """The owner, the mode and the first content (a key, with `from`) are a part of the id, so that
    a step gets no cache that it cannot use.
    """
    words = [mount.id or _target(stage, mount)]
    if (mount.uid or 0, mount.gid or 0, _cache_mode(mount)) != (0, 0, 0o755):
        words.append(f"uid={mount.uid or 0},gid={mount.gid or 0},mode={_cache_mode(mount):o}")
    if mount.from_:
        words.append(f"from={content},source={mount.source}")
    return " ".join(words)


def _cache_mode(mount: RunMount) -> int:
    return 0o755 if mount.mode is None else mount.mode


async def _content_key(stage: StageBuild, mount: RunMount, log: Log) -> str:
    """Of the files that the mount shows. A whole root has the key of its layers, for nothing; and
    so has a cache, of which it is the identity.
    """
    if not mount.from_:
        return await _digest(stage, stage.site.context, mount.source)
    async with stage.other_root(mount.from_, log, mount=True) as root:
        if mount.type == "cache" or not mount.source:
            return root.key
        return await _digest(stage, DirectoryTree(root.descriptor), mount.source, owners=True)


async def _digest(stage: StageBuild, tree: Tree, source: str, *, owners: bool = False) -> str:
    selection = await stage.site.parts.images.layers.work(
        lambda: copying.select(tree, [source], patterns=False, owners=owners, destination_is_directory=True)
    )
    return selection.digest


async def open_all(stage: StageBuild, wanted: Wanted, log: Log, borrowed: contextlib.AsyncExitStack) -> Ready:
    """Open the mounts; they stay open until `borrowed` is closed."""
    ready = Ready()
    sockets = 0
    for mount, cache in zip(wanted.mounts, wanted.caches, strict=True):
        target = _target(stage, mount)
        if mount.type == "tmpfs":
            ready.mounts.append(Tmpfs(destination=target, size=mount.size))
        elif mount.type == "cache":
            ready.mounts.append(await _cache(stage, mount, cache, target, log, borrowed))
        elif mount.type == "bind":
            ready.mounts.append(await _bind(stage, mount, target, log, borrowed))
        elif mount.type == "secret":
            await _secret(stage, mount, target, ready)
        elif mount.type == "ssh":
            await _ssh(stage, mount, target, sockets, ready, borrowed)
            sockets += 1
        else:
            raise InvalidParameter(f"RUN --mount: unsupported mount type {mount.type!r}")
    return ready


async def _source(
    stage: StageBuild, mount: RunMount, log: Log, borrowed: contextlib.AsyncExitStack, *, mapped: bool = False
) -> int:
    """A descriptor of the mount's source in the context or in another root. `mapped`: of another
    root, as for `Snapshots.mount`.
    """
    if mount.from_:
        other = stage.other_root(mount.from_, log, mount=True, mapped=mapped)
        root = (await borrowed.enter_async_context(other)).descriptor
    else:
        root = await stage.site.context_directory()

    def look_up() -> int:
        try:
            return files.open_in_root(root, mount.source or ".", os.O_PATH)
        except OSError as error:
            raise NotFound(f"RUN --mount=type={mount.type}: {mount.source}: {reason(error)}") from error

    found = await opened(asyncio.to_thread(look_up))
    borrowed.callback(os.close, found)
    return found


async def _bind(
    stage: StageBuild, mount: RunMount, target: str, log: Log, borrowed: contextlib.AsyncExitStack
) -> ExtraMount:
    mapped = mount.read_only and bool(mount.from_) and stage.site.parts.containers.parts.defaults.ids is not None
    source = await _source(stage, mount, log, borrowed, mapped=mapped)
    if mount.read_only:
        return Bind(destination=target, source=source, mapped=mapped)
    directory = await stage.site.scratch_directory(borrowed)
    try:
        copied = await opened(stage.site.parts.images.layers.work(_copied, source, directory))
    except OSError as error:
        raise ServerError(f"RUN --mount=type=bind: {mount.source}: {reason_with_file(error)}") from error
    borrowed.callback(os.close, copied)
    return Bind(destination=target, source=copied, writable=True)


async def _cache(
    stage: StageBuild, mount: RunMount, cache: str, target: str, log: Log, borrowed: contextlib.AsyncExitStack
) -> ExtraMount:
    source = -1
    if mount.from_:
        source = await _source(stage, mount, log, borrowed)
    first = None if source < 0 else await asyncio.to_thread(os.fstat, source)
    uid = mount.uid if mount.uid is not None else first.st_uid if first is not None else 0
    gid = mount.gid if mount.gid is not None else first.st_gid if first is not None else 0
    mode = stat.S_IMODE(first.st_mode) if first is not None and mount.mode is None else _cache_mode(mount)

    def fill(directory: int) -> None:
        if source >= 0:
            _copy(source, directory)
        os.fchown(directory, uid, gid)

    caches = stage.site.parts.caches
    path = await borrowed.enter_async_context(caches.use(cache, mount.sharing or "shared", fill, mode))
    directory = await opened(asyncio.to_thread(files.open_directory, path))
    borrowed.callback(os.close, directory)
    return Bind(destination=target, source=directory, writable=not mount.read_only)


def _copied(source: int, directory: int) -> int:
    """A descriptor of a copy, in an empty directory, of a directory or a file. Blocking."""
    found = os.fstat(source)
    if stat.S_ISDIR(found.st_mode):
        _copy(source, directory)
        return os.dup(directory)
    if not stat.S_ISREG(found.st_mode):
        raise InvalidParameter("RUN --mount=type=bind: only a file or a directory can be writable")
    whole = os.open(f"/proc/self/fd/{source}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        target = os.open("file", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory)
        try:
            os.fchown(target, found.st_uid, found.st_gid)
            os.fchmod(target, stat.S_IMODE(found.st_mode))
            with open(whole, "rb", closefd=False) as reader, open(target, "wb", closefd=False) as writer:
                shutil.copyfileobj(reader, writer, 1 << 20)
            os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))
        except BaseException:
            os.close(target)
            raise
        return target
    finally:
        os.close(whole)


def _copy(source: int, target: int) -> None:
    """The files below one directory into another. Blocking."""
    directory = os.open(f"/proc/self/fd/{source}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        copy.copy_tree(directory, target)
    finally:
        os.close(directory)


async def _secret(stage: StageBuild, mount: RunMount, target: str, ready: Ready) -> None:
    content = await stage.site.secret(mount.id)
    if content is None:
        if mount.required:
            raise NotFound(f"secret {mount.id}: not found")
        return
    if mount.env:
        if b"\0" in content:
            raise InvalidParameter(f"RUN --mount=type=secret: secret {mount.id}: a variable cannot have a null byte")
        # The runtime reads JSON, which has no other bytes.
        value = words.readable(content.decode(errors="surrogateescape"))
        ready.mounts.append(Variable(name=mount.env, value=value))
    if mount.target or not mount.env:
        path = target if mount.target else SECRET_FILE.format(mount.id)
        mode = 0o400 if mount.mode is None else mount.mode
        ready.mounts.append(File(destination=path, content=content, mode=mode, uid=mount.uid or 0, gid=mount.gid or 0))


async def _ssh(
    stage: StageBuild,
    mount: RunMount,
    target: str,
    number: int,
    ready: Ready,
    borrowed: contextlib.AsyncExitStack,
) -> None:
    socket = await stage.site.ssh_socket(mount, borrowed)
    if socket < 0:
        if mount.required:
            raise NotFound(f"unset ssh forward key {mount.id or 'default'}")
        return
    path = target if mount.target else SSH_SOCKET.format(number)
    ready.mounts.append(Bind(destination=path, source=socket, writable=True))
    if not any(isinstance(each, Variable) and each.name == "SSH_AUTH_SOCK" for each in ready.mounts):
        ready.mounts.append(Variable(name="SSH_AUTH_SOCK", value=path))


__all__ = ["Ready", "Wanted", "open_all", "read"]
