"""Detached mounts, and a private mount namespace of the engine to assemble them in.

A detached mount is a descriptor of a mount that is attached nowhere: open_tree(2), Linux 5.2,
and mount_setattr(2), 5.12. Kernels before 6.15 attach only to mounts inside a namespace, so trees
of mounts are assembled in a `MountNamespace`. It contains an empty tmpfs and the mounts that its
owner attaches. The host does not see it. It exists while any process holds its descriptor; when the
last such process has ended, however it ended, the kernel removes everything in it.

Blocking calls with the GIL released (ctypes): run them in a thread. Not here: mount(2) and
mountinfo (mounts.py).
Raises: ServerError with the mount and the kernel's reason; the OSError is its cause.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import stat
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from engine.errors import ServerError, reason
from engine.system import files, mounts
from engine.system.host_paths import HostPaths
from engine.system.threads import Threads, in_new_thread
from engine.system.user_namespaces import OVERFLOW, IdMap, Range

T = TypeVar("T")

THREADS = 4
"""Threads of a `MountNamespace` for mounting and reading, and as many for unmounting."""

_CLONE_NEWNS = 0x20000
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_AT_NO_AUTOMOUNT = 0x800
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_MOUNT_SETATTR = 428, 429, 442
"""The same numbers on every architecture."""
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH, _MOVE_MOUNT_T_EMPTY_PATH = 4, 0x40
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _NOATIME, _ATIME = 1, 2, 4, 8, 0x10, 0x70
_IDMAP = 0x100000
_STATX_ATTR_MOUNT_ROOT = 0x2000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.statx.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_char_p)
_libc.umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)
_libc.pivot_root.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
"""Exported by glibc and musl, although pivot_root(2) denies it."""


class _Attributes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd"))


def clone(source: Path | str | int, *, recursive: bool = False, peer: bool = False) -> int:
    """A detached private copy of the mount at a path or descriptor. With `recursive` the mounts
    below it are copied too. With `peer` the copy of a shared mount stays its peer: later mounts
    below one appear below the other.

    The caller closes it. Raises ServerError, FileNotFoundError when there is no such path.
    """
    at, path = (source, b"") if isinstance(source, int) else (_AT_FDCWD, os.fsencode(source))
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_EMPTY_PATH | (_AT_RECURSIVE if recursive else 0)
    tree: int = _libc.syscall(ctypes.c_long(_SYS_OPEN_TREE), ctypes.c_int(at), path, ctypes.c_uint(flags))
    if tree < 0:
        error = _failure(source)
        if isinstance(error, FileNotFoundError):
            raise error
        raise ServerError(f"copying the mount {source}: {reason(error)}") from error
    if peer:
        return tree
    try:
        # A copy of a shared mount is its peer: mounts on one would propagate to the other.
        _set(tree, 0, recursive=recursive, propagation=mounts.MS_PRIVATE)
    except BaseException:
        os.close(tree)
        raise
    return tree


def clone_within(namespace: int, descriptor: int, *, recursive: bool = False) -> int:
    """As `clone`, for a descriptor in another mount namespace. `namespace` is that namespace's
    descriptor.

    A new thread enters the namespace.
    """
    return in_new_thread(functools.partial(_clone_within, namespace, descriptor, recursive))


def _clone_within(namespace: int, descriptor: int, recursive: bool) -> int:
    mounts.own_directory()  # setns(2) refuses a thread that shares it
    _enter(namespace)
    return clone(descriptor, recursive=recursive)


def attach(tree: int, target: Path | str | int) -> None:
    """Mount a tree at a path or on a descriptor, in the calling thread's namespace.

    The tree's descriptor stays the caller's.
    """
    at, path = (target, b"") if isinstance(target, int) else (_AT_FDCWD, os.fsencode(target))
    flags = _MOVE_MOUNT_F_EMPTY_PATH | (_MOVE_MOUNT_T_EMPTY_PATH if isinstance(target, int) else 0)
    status = _libc.syscall(
        *(ctypes.c_long(_SYS_MOVE_MOUNT), ctypes.c_int(tree), b"", ctypes.c_int(at), path, ctypes.c_uint(flags))
    )
    if status < 0:
        error = _failure(target)
        raise ServerError(f"attaching a mount at {target}: {reason(error)}") from error


def guard(tree: int, *, read_only: bool, recursive: bool = False) -> None:
    """Make the mount nosuid, nodev and noexec; with `read_only` also read-only and noatime."""
    flags = _NOSUID | _NODEV | _NOEXEC | (_RDONLY | _NOATIME if read_only else 0)
    _set(tree, flags, recursive=recursive, clear=_ATIME if read_only else 0)


def _set(tree: int, flags: int, *, recursive: bool, clear: int = 0, propagation: int = 0, namespace: int = 0) -> None:
    wanted = _Attributes(flags, clear, propagation, namespace)
    status = _libc.syscall(
        *(ctypes.c_long(_SYS_MOUNT_SETATTR), ctypes.c_int(tree), b""),
        ctypes.c_uint(_AT_EMPTY_PATH | (_AT_RECURSIVE if recursive else 0)),
        *(ctypes.byref(wanted), ctypes.c_size_t(ctypes.sizeof(wanted))),
    )
    if status < 0:
        error = _failure(tree)
        raise ServerError(f"setting the attributes of a mount: {reason(error)}") from error


def map_ids(tree: int, namespace: int) -> None:
    """Show the ids of the files by the map of a user namespace, a descriptor (MOUNT_ATTR_IDMAP,
    mount_setattr(2)). The tree must not be attached yet.

    An id inside of the namespace is the one on the disk, its counterpart outside is the one that
    processes see. Raises ServerError where the file system or the kernel has no such mounts.
    """
    _set(tree, _IDMAP, recursive=False, namespace=namespace)


def try_mapping(directory: Path) -> None:
    """Make an ID-mapped clone of the mount of a directory, and drop it. Raises ServerError, OSError
    where that is not possible.
    """
    nobody = (Range(0, OVERFLOW, 1),)
    tree = clone(directory)
    try:
        namespace = IdMap(uids=nobody, gids=nobody).namespace()
        try:
            map_ids(tree, namespace)
        finally:
            os.close(namespace)
    finally:
        os.close(tree)


def is_mount(path: Path | str) -> bool:
    """True if `path` is a mount point (STATX_ATTR_MOUNT_ROOT, Linux 5.8)."""
    found = ctypes.create_string_buffer(256)
    if _libc.statx(_AT_FDCWD, os.fsencode(path), _AT_NO_AUTOMOUNT, 0, found) < 0:
        return False
    return bool(int.from_bytes(found.raw[8:16], "little") & _STATX_ATTR_MOUNT_ROOT)


def detach(path: str) -> None:
    """Detach the mount at `path` at once; open descriptors in it stay valid."""
    if _libc.umount2(os.fsencode(path), _MNT_DETACH | _UMOUNT_NOFOLLOW) < 0:
        error = _failure(path)
        raise ServerError(f"unmounting {path}: {reason(error)}") from error


def make_private(directory: Path) -> None:
    """Create `directory` as a private mount, for `MountNamespace.namespace_with`.

    `place_beside(directory)` exists on the host too: runc changes to the root's path for an exec.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_mount(directory):
        tree = clone(directory)
        try:
            attach(tree, directory)
        finally:
            os.close(tree)
    mounts.mount("", directory, flags=mounts.MS_PRIVATE)  # under a shared mount it became shared
    place_beside(directory).mkdir(mode=0o700, exist_ok=True)


def make_shared(directory: Path) -> None:
    """Make `directory` a shared mount: what is mounted below it appears in its slaves. Mounts that
    are directly below it already come with it.
    """
    directory.mkdir(mode=0o711, exist_ok=True)
    below = files.open_directory(directory)
    try:
        if not is_mount(directory):
            tree = clone(below, recursive=True)
            try:
                attach(tree, directory)
            finally:
                os.close(tree)
            # The originals would be hidden, and keep their mount points from being removed.
            for name in os.listdir(below):
                if is_mount(f"/proc/self/fd/{below}/{name}"):
                    detach(f"/proc/self/fd/{below}/{name}")
        mounts.mount("", directory, flags=mounts.MS_SHARED)
    finally:
        os.close(below)


def remove_shared(directory: Path) -> None:
    """Undo `make_shared`, and remove the directory; not while anything is in it."""
    if is_mount(directory) and not os.listdir(directory):
        # Not lazily: something may just be mounted below it, and this fails then.
        _libc.umount2(os.fsencode(directory), _UMOUNT_NOFOLLOW)
    with contextlib.suppress(OSError):  # in use, or missing
        directory.rmdir()


class Tree(NamedTuple):
    """A detached mount."""

    descriptor: int


class NewFile(NamedTuple):
    """A file in memory."""

    content: bytes
    mode: int
    uid: int
    gid: int


def place_beside(target: Path, index: int = -1) -> Path:
    """See `MountNamespace.namespace_with`."""
    return target / ("root" if index < 0 else str(index))


def _place(source: Tree | NewFile, path: Path) -> None:
    if isinstance(source, Tree):
        if stat.S_ISDIR(os.fstat(source.descriptor).st_mode):
            path.mkdir()
        else:
            path.touch()
        attach(source.descriptor, path)
        return
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(source.content)
        while view:
            view = view[os.write(file, view) :]
        os.fchown(file, source.uid, source.gid)
        os.fchmod(file, source.mode)
    finally:
        os.close(file)


class MountNamespace:
    """The namespace, made when it is first needed, and the threads that live in it.

    They see `/layers` (a view of `directory`, and their working directory), `/proc`, and their own
    mounts at a `place` or in `own`, the owner's directory.

    A thread enters with the first work that it runs. When that fails, for lack of memory for
    instance, the work fails with ServerError, the thread is back in the host's namespace, and the
    next work enters again.
    """

    def __init__(self, directory: Path, own: str) -> None:
        self._directory = directory
        self._own = own
        self._lock = threading.Lock()
        self.descriptor = -1
        """Descriptor of the namespace; -1 before it is needed."""
        self._last = 0
        self._thread = threading.local()
        self._mounting = Threads(THREADS, ready=True)
        self._unmounting = Threads(THREADS, ready=True)
        self._visiting = HostPaths()
        self._apart = Threads(sys.maxsize)

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in one of the threads. Not for work that waits for a client."""
        return await self._mounting.run(self._inside, work)

    async def unmount(self, work: Callable[[], T]) -> T:
        """As `run`, for unmounting. Unmounting an overlay writes back the file system below it,
        which may take seconds, and other mounts must not wait for that."""
        return await self._unmounting.run(self._inside, work)

    async def visit(self, work: Callable[[], T]) -> T:
        """As `run`, for long work, and for paths in a container: a volume there may hang for ever.
        Not for work that waits for a client."""
        return await self._visiting.run(self._inside, work)

    async def run_apart(self, work: Callable[[], T]) -> T:
        """As `run`, in a thread that no other work needs: it may wait for a client."""
        return await self._apart.run(self._inside, work)

    def _inside(self, work: Callable[[], T]) -> T:
        if not getattr(self._thread, "inside", False):
            self._enter()
            self._thread.inside = True
        return work()

    def place(self) -> str:
        """A new empty directory to mount on. Call it in a thread of the namespace."""
        with self._lock:
            self._last += 1
            path = f"/calls/{self._last}"
        os.mkdir(path)
        return path

    def namespace_with(self, path: str, target: Path, beside: Sequence[Tree | NewFile] = ()) -> int:
        """A descriptor of a copy of the host's namespace with the mount at `path` here attached at
        `target` (`make_private`), invisible to others.

        With `beside`, `target` is a tmpfs with the mount at `place_beside(target)`, and each of
        `beside` at `place_beside(target, index)`. Trees are attached, and cannot be attached again.

        Its other mounts keep their propagation. The caller closes the descriptor; the last close
        waits for an RCU grace period.
        """
        return in_new_thread(functools.partial(self._namespace_with, path, target, beside))

    def _namespace_with(self, path: str, target: Path, beside: Sequence[Tree | NewFile]) -> int:
        host = os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        try:
            mounts.own_directory()
            _enter(self.descriptor)
            tree = clone(path)
            try:
                _enter(host)
                if _libc.unshare(ctypes.c_int(_CLONE_NEWNS)) < 0:
                    raise _failure("mount namespace")
                if beside:
                    mounts.mount("tmpfs", target, "tmpfs", mounts.MS_NOSUID | mounts.MS_NODEV, "mode=711")
                    target = place_beside(target)
                    target.mkdir()
                    for index, each in enumerate(beside):
                        _place(each, place_beside(target.parent, index))
                attach(tree, target)
            finally:
                os.close(tree)
        finally:
            os.close(host)
        return os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)

    def adopt(self, namespace: int) -> None:
        """Use a namespace that a `MountNamespace` of an earlier process made, unless it shows
        another directory. Call before any other method.

        Mounts that the earlier process left at its places are removed. The caller keeps the
        descriptor.
        """
        in_new_thread(functools.partial(self._adopt, namespace))

    def _adopt(self, namespace: int) -> None:
        wanted = os.stat(self._directory)
        mounts.own_directory()
        _enter(namespace)
        shown = os.stat("/layers")
        if (shown.st_dev, shown.st_ino) == (wanted.st_dev, wanted.st_ino):
            for name in os.listdir("/calls"):
                with contextlib.suppress(ServerError):  # nothing was mounted there yet
                    detach(f"/calls/{name}")
                os.rmdir(f"/calls/{name}")
            self.descriptor = os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)

    def _enter(self) -> None:
        """Put the calling thread into the namespace, which is made if there is none yet."""
        try:
            mounts.own_directory()  # setns(2) refuses a thread that shares it
            host = os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
            try:
                with self._lock:
                    if self.descriptor < 0:
                        self._make()
                        self.descriptor = os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
                    else:
                        _enter(self.descriptor)
                os.chdir("/layers")
            except BaseException:
                # leave the incomplete namespace, so that the kernel removes it
                _enter(host)
                raise
            finally:
                os.close(host)
        except OSError as error:
            raise ServerError(f"the engine's mount namespace: {reason(error)}") from error

    def _make(self) -> None:
        layers, proc = clone(self._directory), clone("/proc")
        try:
            if _libc.unshare(ctypes.c_int(_CLONE_NEWNS)) < 0:
                raise _failure("mount namespace")
            # This comes first, so that unmounting the copies of the host's mounts does not
            # propagate to the host.
            mounts.mount("", "/", flags=mounts.MS_REC | mounts.MS_PRIVATE)
            mounts.mount("tmpfs", self._directory, "tmpfs", mounts.MS_NOSUID | mounts.MS_NODEV, "mode=700,size=16m")
            os.chdir(self._directory)
            if _libc.pivot_root(b".", b".") < 0:
                raise _failure("pivot_root")
            detach(".")  # the old root is mounted over the new one (pivot_root(2), NOTES)
            os.chdir("/")
            for path in ("/layers", "/proc", "/calls", self._own):
                os.mkdir(path)
            attach(layers, "/layers")
            attach(proc, "/proc")
        finally:
            os.close(layers)
            os.close(proc)


def check_root() -> None:
    """Raises ServerError if this process is in a chroot. A thread that enters a mount namespace,
    also the one that it came from, gets the namespace's root (setns(2)), where the paths of a
    chroot mean other files. Runtimes cannot pivot_root(2) in a chroot either.
    """
    roots = [os.open("/", os.O_PATH | os.O_CLOEXEC), in_new_thread(_root_of_namespace)]
    try:
        places = [(mounts.mount_id(root), os.fstat(root).st_ino) for root in roots]
    finally:
        for root in roots:
            os.close(root)
    if places[0] != places[1]:
        raise ServerError(
            "the engine cannot run in a chroot: start it on the host itself, or in a container or mount namespace "
            "whose root was changed by pivot_root(2)"
        )


def _root_of_namespace() -> int:
    own = os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    try:
        mounts.own_directory()
        _enter(own)
        return os.open("/", os.O_PATH | os.O_CLOEXEC)
    finally:
        os.close(own)


def _enter(namespace: int) -> None:
    """Move the calling thread into a mount namespace. It must have its own working directory."""
    if _libc.setns(ctypes.c_int(namespace), ctypes.c_int(_CLONE_NEWNS)) < 0:
        raise _failure("mount namespace")


def _failure(what: Path | str | int) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), what if isinstance(what, str) else str(what))
