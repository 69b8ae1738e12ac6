"""Files into and out of a container: stat, archive, extraction, copy, export, and what it has
changed (Docker Engine API, ContainerArchive).

A call sees the container's root on mounts of its own (system/detached_mounts.py): a copy of the
mount of its overlay, with the engine's mounts over it: volumes, binds, hosts, hostname,
resolv.conf. So running and stopped containers are the same, and what was mounted inside the
container, /proc, /sys, /dev and Tmpfs are not there (rule 3). Every path is resolved by openat2(2)
within that root, and each name that a call reads is opened by descriptor. The mounts are nodev and
noexec, and read-only for a call that only reads.
A stat of a path that these mounts cannot change looks in the overlay itself (`stat_apart`).

As in Docker, a symbolic link in the last component of a path is not followed: the archive contains
the link, and its stat names the target (`docker cp` asks again with -L). Links in earlier
components are followed. So is the last one when the path ends in `/` or `/.`, and always when an
archive is extracted there.

An archive that is put into a container may inflate without bounds: its extraction ends with an
error before it takes the last twentieth of a file system's space (at most 512 MiB) or inodes (at
most 4,096) (`_fast/layer.pyx`). Files written before that stay, as with tar.

Owns: the mounts and descriptors of a call, until its stream is closed. Not here: bytes of archives
      (`_fast/pack.pyx`, `_fast/layer.pyx`).
Raises: NotFound, InvalidParameter, Forbidden with Docker's messages, ServerError with the kernel's
        reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import itertools
import os
import posixpath
import stat
import time
from collections.abc import AsyncIterator, Iterable
from typing import NamedTuple

from engine import metrics
from engine._fast import layer as _layer
from engine._fast import pack
from engine._fast.changes import changes as _overlay_changes
from engine._fast.tar import ArchiveError
from engine.common import times
from engine.containers.bundle import making_files
from engine.containers.container import Container
from engine.containers.mount_points import temporary
from engine.containers.mounted import Mounted, destinations, engine_mounts
from engine.errors import EngineError, Forbidden, InvalidParameter, NotFound, ServerError, reason_with_file
from engine.runtime import users
from engine.storage.compression import content
from engine.system import detached_mounts, files, mounts
from engine.system.feed import Feed, skip
from engine.system.tasks import shield
from engine.system.threads import uninterrupted
from engine.system.user_namespaces import IdMap, IdRanges
from engine.wire.containers import PathChange, PathStat

_FIRST = 128 * 1024
"""Bytes of an archive that are made before the reply begins, so that an early error still gets a
status code.
"""
_CHUNK = 1 << 20
_CHANGED = (errno.EEXIST, errno.EISDIR, errno.ENOENT, errno.ENOTDIR, errno.ENOTEMPTY, errno.EAGAIN)
"""Errors of an extraction that only occur when another process changes the same names."""
_SYSTEM = ("/proc", "/sys", "/dev")

_GO_MODES = (
    (stat.S_IFDIR, 1 << 31),
    (stat.S_IFLNK, 1 << 27),
    (stat.S_IFBLK, 1 << 26),
    (stat.S_IFCHR, 1 << 26 | 1 << 21),
    (stat.S_IFIFO, 1 << 25),
    (stat.S_IFSOCK, 1 << 24),
)
_GO_BITS = ((stat.S_ISUID, 1 << 23), (stat.S_ISGID, 1 << 22), (stat.S_ISVTX, 1 << 20))


def go_mode(mode: int) -> int:
    """st_mode as Go's os.FileMode."""
    found = mode & 0o777
    for kind, bits in _GO_MODES:
        if stat.S_IFMT(mode) == kind:
            found |= bits
    for bit, bits in _GO_BITS:
        if mode & bit:
            found |= bits
    return found


class Asked(NamedTuple):
    """A path as a client gave it, seen from the container's root (rules 1 and 2)."""

    given: str
    parent: str
    """The path without its last name, relative to the root."""
    base: str
    """The last name; empty for the root."""
    directory: bool
    """It ends in `/` or `/.`: it must be a directory, and a link is followed."""
    contents: bool
    """It ends in `/.`: the content of the directory, without its name."""

    @property
    def path(self) -> str:
        return posixpath.join(self.parent, self.base)

    @property
    def name(self) -> str:
        """The name that the stat and the archive's entries use."""
        return "." if self.contents else self.base or "/"


def parse(path: str) -> Asked:
    """Raises InvalidParameter for an empty path."""
    if not path:
        raise InvalidParameter("bad parameter: path cannot be empty")
    clean = posixpath.normpath("/" + path).lstrip("/")
    parent, _, base = clean.rpartition("/")
    contents = path.rstrip("/").rpartition("/")[2] == "."
    return Asked(path, parent, base, contents or path.endswith("/") or not base, contents)


# --- a container's root ---------------------------------------------------------------------------


class Root:
    """The root of a container for one call.

    Use it in a thread of `snapshots.mount_namespace`; `descriptor` may be used in any thread.
    """

    def __init__(
        self,
        view: str,
        mounted: list[Mounted],
        pins: list[str],
        namespace: detached_mounts.MountNamespace,
        ids: IdMap | None,
    ) -> None:
        """`mounted`: what to mount over it, outermost first; `pins`: places where the container
        has mounts that are not shown. `ids`: of its files.
        """
        self.ids = ids
        self._place = namespace.place()
        self.descriptor = -1
        try:
            self.descriptor = detached_mounts.clone(view)
            detached_mounts.attach(self.descriptor, self._place)
            for each in mounted:
                self._mount(each)
            for pin in pins:
                self._pin(pin)
        except BaseException:
            self.close()
            raise

    def _mount(self, mount: Mounted) -> None:
        target = self._mount_point(mount, stat.S_ISDIR(os.fstat(mount.tree).st_mode))
        try:
            detached_mounts.guard(mount.tree, read_only=not mount.writable, recursive=True)
            detached_mounts.attach(mount.tree, target)
        finally:
            os.close(target)

    def _mount_point(self, mount: Mounted, directory: bool) -> int:
        """The mount point, created if it is missing, as a start would."""
        try:
            with making_files(self.ids):
                return files.open_mount_point(self.descriptor, mount.destination, directory=directory)
        except OSError as error:
            reason = (error.strerror or "").lower()
            raise ServerError(f"mount point {mount.destination} in the container: {reason}") from error

    def _pin(self, path: str) -> None:
        """Bind a directory to itself: files below the container's own mount become visible, and the
        directory cannot be removed.
        """
        with contextlib.suppress(OSError, ServerError):
            target = files.open_in_root(self.descriptor, path, os.O_PATH)
            try:
                tree = detached_mounts.clone(target)
                try:
                    detached_mounts.attach(tree, target)
                finally:
                    os.close(tree)
            finally:
                os.close(target)

    def guard(self, *, read_only: bool, recursive: bool) -> None:
        detached_mounts.guard(self.descriptor, read_only=read_only, recursive=recursive)

    def close(self) -> None:
        """Close the mounts. Call it in a thread of the namespace."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            with contextlib.suppress(ServerError):  # it was not attached yet
                detached_mounts.detach(self._place)
        os.rmdir(self._place)

    def open(self, asked: Asked, name: str) -> int:
        """An O_PATH descriptor of the path.

        Raises NotFound, or InvalidParameter for a file whose path ends in a slash.
        """
        try:
            if asked.directory:
                return files.open_in_root(self.descriptor, asked.path, os.O_PATH | os.O_DIRECTORY)
            parent = files.open_in_root(self.descriptor, asked.parent, os.O_PATH | os.O_DIRECTORY)
            try:
                # It may be a mount point: openat2(2) enters mounts, with O_NOFOLLOW or without.
                return os.open(asked.base, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
            finally:
                os.close(parent)
        except OSError as error:
            if asked.directory and error.errno == errno.ENOTDIR and self._exists(asked):
                raise InvalidParameter(f"{asked.given}: not a directory") from error
            raise _missing(error, asked.given, name) from error

    def _exists(self, asked: Asked) -> bool:
        with contextlib.suppress(OSError):
            os.close(files.open_in_root(self.descriptor, asked.path, os.O_PATH))
            return True
        return False

    def stat(self, asked: Asked, found: int, name: str) -> PathStat:
        """The stat of `found`, its descriptor. Raises InvalidParameter for a loop of links."""
        status = os.fstat(found)
        target = ""
        if stat.S_ISLNK(status.st_mode):
            try:
                target = "/" + files.resolve_in_root(self.descriptor, asked.path).decode(errors="replace")
            # Without a target a client would use the link's own directory.
            except OSError as error:
                raise _missing(error, asked.given, name) from error
        return _path_stat(asked, status, target)

    def check_writable(self, directory: str, name: str) -> None:
        """Raises unless an archive may be extracted into that directory."""
        asked = parse(directory)
        try:
            target = files.open_in_root(self.descriptor, asked.path, os.O_PATH | os.O_DIRECTORY)
        except OSError as error:
            if error.errno == errno.ENOTDIR and self._exists(asked):
                raise InvalidParameter(f"extraction point is not a directory: {directory[:300]}") from error
            raise _missing(error, directory, name) from error
        try:
            if os.fstatvfs(target).f_flag & os.ST_RDONLY:
                if mounts.mount_id(target) == mounts.mount_id(self.descriptor):
                    raise Forbidden("container rootfs is marked read-only")
                raise Forbidden("mounted volume is marked read-only")
        finally:
            os.close(target)


def _path_stat(asked: Asked, status: os.stat_result, target: str = "") -> PathStat:
    return PathStat(
        name=asked.name,
        size=status.st_size,
        mode=go_mode(status.st_mode),
        mtime=times.rfc3339_of_file(status.st_mtime_ns),
        link_target=target,
    )


def _missing(error: OSError, path: str, container: str) -> EngineError:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return NotFound(f"Could not find the file {path} in container {container}")
    if error.errno in (errno.ELOOP, errno.ENAMETOOLONG, errno.EXDEV):
        return InvalidParameter(f"{path}: {(error.strerror or '').lower()}")
    return ServerError(f"{path} in container {container}: {(error.strerror or '').lower()}")


@contextlib.asynccontextmanager
async def _root(container: Container, *, writable: bool = False, volumes: bool = True) -> AsyncIterator[Root]:
    snapshots = container.parts.snapshots
    namespace = snapshots.mount_namespace
    async with contextlib.AsyncExitStack() as stack:
        record = container.record
        pins = [*_SYSTEM, *temporary(record.host)] if writable and container.running else []
        made: list[Root] = []
        ids = _ids(container)

        def assemble() -> None:
            made.append(Root(view, mounted, pins, namespace, ids))
            made[0].guard(read_only=not writable or record.host.readonly_rootfs, recursive=not writable)

        try:
            async with _while_it_exists(container):
                mapped = ids is not None
                mounted = await stack.enter_async_context(engine_mounts(container, mapped=mapped)) if volumes else []
                view = await stack.enter_async_context(snapshots.opened(container.id, writable=writable, mapped=mapped))
                await uninterrupted(namespace.run(assemble))
            yield made[0]
        finally:
            for root in made:
                await uninterrupted(namespace.run(root.close))


@contextlib.asynccontextmanager
async def _while_it_exists(container: Container) -> AsyncIterator[None]:
    """Errors are NotFound when the container has been removed meanwhile: a part of it went
    first.
    """
    try:
        yield
    except EngineError as error:
        if container.removed:
            raise NotFound(f"No such container: {container.id}") from error
        raise


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


# --- out of a container ---------------------------------------------------------------------------


class Archive:
    """A tar stream for a client: an iterator that prepares the next chunk while one is sent.

    `aclose` releases everything. While the client is slow, it holds no thread.
    """

    def __init__(
        self,
        container: Container,
        packer: pack.Packer,
        first: bytes,
        borrowed: contextlib.AsyncExitStack,
        what: str,
    ) -> None:
        self._namespace = container.parts.snapshots.mount_namespace
        self._packer = packer
        self._borrowed = borrowed
        self._what = what
        self.whole = first if len(first) < _FIRST else None
        """The whole archive, when it is that small."""
        self._next: asyncio.Future[bytes] | None = None
        self._first: bytes | None = first

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        first, self._first = self._first, None
        if first is not None:
            if self.whole is None:
                self._next = self._read()
            return first
        if self._next is None:
            raise StopAsyncIteration
        try:
            chunk = await shield(self._next)
        except OSError as error:
            raise ServerError(f"{self._what}: {error.filename}: {error.strerror}") from error
        if len(chunk) == _CHUNK:
            self._next = self._read()
        else:
            self._next = None
        if not chunk:
            raise StopAsyncIteration
        return chunk

    def _read(self) -> asyncio.Future[bytes]:
        """Begin the next chunk. Not `spawn`: `__anext__` raises its failure, `aclose` drops it."""
        return asyncio.ensure_future(self._namespace.visit(lambda: self._packer.read(_CHUNK)))

    async def aclose(self) -> None:
        waiting, self._next = self._next, None
        if waiting is not None:
            await uninterrupted(asyncio.wait([waiting]))
            if not waiting.cancelled():
                waiting.exception()  # the client has left
        self._packer.close()
        await self._borrowed.aclose()


def stat_apart(view: str, asked: Asked, mounted: Iterable[str], name: str) -> PathStat | None:
    """The stat of a path in the container's overlay, at `view`, if the engine's mounts over it
    change nothing there. So it takes no mounts, each of which costs an RCU grace period.

    None if that is not certain: a link is on the way to the path or to one of the mount points
    (`mounted`, relative to the root), the path is or is below such a point, or points are missing
    or nested. Raises NotFound.
    """
    places = sorted(f"{each}/" for each in mounted)
    if any(f"{asked.path}/".startswith(each) for each in places):
        return None
    if any(inner.startswith(outer) for outer, inner in itertools.pairwise(places)):
        return None
    root = files.open_directory(view)
    try:
        for each in places:
            os.close(files.open_without_links(root, each.rstrip("/"), os.O_PATH))
        try:
            kind = os.O_DIRECTORY if asked.directory else 0
            descriptor = files.open_without_links(root, asked.path, os.O_PATH | os.O_NOFOLLOW | kind)
        except FileNotFoundError as error:
            raise _missing(error, asked.given, name) from error
        try:
            status = os.fstat(descriptor)
        finally:
            os.close(descriptor)
    except OSError:
        return None
    finally:
        os.close(root)
    return None if stat.S_ISLNK(status.st_mode) else _path_stat(asked, status)


async def inspect(container: Container, path: str, name: str) -> PathStat:
    """The stat of a path; `name` is what the client calls the container."""
    asked = parse(path)
    snapshots = container.parts.snapshots
    mapped = _ids(container) is not None
    async with _while_it_exists(container), snapshots.opened(container.id, mapped=mapped) as view:
        apart = functools.partial(stat_apart, view, asked, destinations(container.record), name)
        found = await uninterrupted(snapshots.mount_namespace.run(apart))
    if found is not None:
        return found

    def look() -> PathStat:
        found = root.open(asked, name)
        try:
            return root.stat(asked, found, name)
        finally:
            os.close(found)

    async with _root(container) as root:
        return await snapshots.mount_namespace.visit(look)


async def get(container: Container, path: str, name: str) -> tuple[PathStat, Archive]:
    """The stat and the archive of a path. The caller closes the archive."""
    asked = parse(path)
    async with contextlib.AsyncExitStack() as stack:
        root = await stack.enter_async_context(_root(container))

        def begin() -> tuple[PathStat, pack.Packer, bytes]:
            found = root.open(asked, name)
            try:
                status = root.stat(asked, found, name)
                packer = _packer(found, asked.name, root.ids)
                return status, packer, packer.read(_FIRST)
            finally:
                os.close(found)

        status, packer, first = await uninterrupted(container.parts.snapshots.mount_namespace.visit(begin))
        container.publish("archive-path")
        return status, Archive(container, packer, first, stack.pop_all(), f"{path} in container {name}")


async def copy(container: Container, path: str, name: str) -> Archive:
    """The archive of a path with all links followed, named after their target: the endpoint of 1.18
    to 1.23.
    """
    if not path:
        raise InvalidParameter("Path cannot be empty")
    asked = parse(path)
    async with contextlib.AsyncExitStack() as stack:
        root = await stack.enter_async_context(_root(container))

        def begin() -> tuple[pack.Packer, bytes]:
            try:
                way = files.resolve_in_root(root.descriptor, asked.path)
                found = files.open_in_root(root.descriptor, way, os.O_PATH | os.O_NOFOLLOW)
            except OSError as error:
                raise _missing(error, path, name) from error
            try:
                packer = _packer(found, os.fsdecode(way.rpartition(b"/")[2]) or ".", root.ids)
                return packer, packer.read(_FIRST)
            finally:
                os.close(found)

        packer, first = await uninterrupted(container.parts.snapshots.mount_namespace.visit(begin))
        container.publish("copy")
        return Archive(container, packer, first, stack.pop_all(), f"{path} in container {name}")


def _ids(container: Container) -> IdMap | None:
    """Of the files that a call sees: those of its run, otherwise those of the next one. Archives
    have the ids of the container."""
    record = container.record
    return record.ids if container.running else container.parts.defaults.ids_of(record.host)


def _packer(found: int, name: str, ids: IdMap | None) -> pack.Packer:
    if stat.S_ISSOCK(os.fstat(found).st_mode):
        raise InvalidParameter(f"{name}: archive/tar: sockets not supported")
    try:
        return pack.Packer(found, os.fsencode(name), ids=_inward(ids))
    except OSError as error:
        raise ServerError(f"{name}: {error.strerror}") from error


def _inward(ids: IdMap | None) -> IdRanges | None:
    return None if ids is None else ids.inward


async def export(container: Container) -> Archive:
    """The whole root as one archive, without the engine's own mounts."""
    async with contextlib.AsyncExitStack() as stack:
        root = await stack.enter_async_context(_root(container, volumes=False))

        def begin() -> tuple[pack.Packer, bytes]:
            packer = pack.Packer(root.descriptor, b"", top=False, ids=_inward(root.ids))
            return packer, packer.read(_FIRST)

        packer, first = await uninterrupted(container.parts.snapshots.mount_namespace.visit(begin))
        container.publish("export")
        return Archive(container, packer, first, stack.pop_all(), f"export of container {container.id}")


async def changes(container: Container) -> list[PathChange]:
    """The container's changes to its image, parents before their children."""
    try:
        upper = container.parts.snapshots.upper(container.id)
        lower = container.parts.snapshots.lower(container.id)
    except NotFound as error:
        raise NotFound(f"No such container: {container.id}") from error
    began = time.monotonic()
    found = await asyncio.to_thread(_changes, os.fspath(upper), [os.fspath(each) for each in lower])
    metrics.CONTAINER_ACTIONS.since("changes", began)
    return found


def _changes(upper: str, lower: list[str]) -> list[PathChange]:
    with contextlib.ExitStack() as stack:
        descriptors: list[int] = []
        stack.callback(_close_all, descriptors)
        try:
            for path in (upper, *lower):
                descriptors.append(files.open_directory(path))
            found = _overlay_changes(descriptors[0], descriptors[1:])
        except OSError as error:
            if error.errno == errno.E2BIG:
                raise ServerError("there are too many changes: their paths take more than 128 MiB") from error
            raise ServerError(f"reading the changes in {upper}: {reason_with_file(error)}") from error
    return [PathChange(path.decode(errors="replace"), kind) for path, kind in found]


# --- into a container -----------------------------------------------------------------------------


async def put(
    container: Container,
    path: str,
    name: str,
    body: AsyncIterator[bytes],
    *,
    keep_kinds: bool,
    own: bool = False,
) -> None:
    """Extract an archive, packed or not, into a directory. `keep_kinds`: rule 5. `own`: all entries
    belong to the user of the container's configuration, if it names one.
    """
    user = container.record.config.user if own else ""
    asked = parse(path)
    async with _root(container, writable=True) as root:
        namespace = container.parts.snapshots.mount_namespace
        await namespace.visit(lambda: root.check_writable(path, name))
        incoming = Feed()

        def extract() -> None:
            owner = users.owner(root.descriptor, user) if user else None
            ids = None if root.ids is None else root.ids.outward
            try:
                with making_files(root.ids):
                    _layer.unpack(
                        *(content(incoming), root.descriptor, os.fsencode(asked.path)),
                        keep_kinds=keep_kinds,
                        owner=owner,
                        ids=ids,
                    )
            except ArchiveError as error:
                raise InvalidParameter(f"Error processing tar file: {error}") from error
            except OSError as error:
                if error.errno == errno.ENOENT and error.filename == asked.path:
                    raise _missing(error, path, name) from error  # it was there a moment ago
                raise _refused(error, name) from error

        # not `spawn`: it is awaited below, and its failure reaches the reader
        feeding = asyncio.ensure_future(incoming.feed(body))
        try:
            # A client that stalls at once holds no thread. One that stalls later holds only a
            # thread of its own.
            run = namespace.visit if await incoming.begun() else namespace.run_apart
            await uninterrupted(run(extract))
        finally:
            feeding.cancel()
            await uninterrupted(asyncio.wait([feeding]))
            incoming.close()
            container.touch()  # its size has changed
        container.publish("extract-to-dir")


def _refused(error: OSError, container: str) -> EngineError:
    reason = (error.strerror or "").lower()
    entry = os.fsdecode(error.filename or "")
    if error.errno == errno.EROFS:
        return Forbidden(f"{entry}: {reason} in container {container}")
    if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        return InvalidParameter(f"Error processing tar file: {entry}: {reason}")
    if error.errno in _CHANGED:
        return InvalidParameter(f"Error processing tar file: {entry}: {reason}: the container is changing it")
    return ServerError(f"Error processing tar file: {entry}: {reason}")


__all__ = ["Archive", "changes", "copy", "export", "get", "go_mode", "inspect", "parse", "put", "skip"]
