"""Mounts that are in nobody's way: copies of mounts held by descriptors, and a mount namespace of the engine's own to put them together in.

A tree is a descriptor of a mount that is attached nowhere (open_tree(2), Linux 5.2; mount_setattr(2), 5.12). Kernels before 6.15 attach to what is
in a namespace only, so trees are put together in `Aside`: a namespace that holds an empty tmpfs and what its owner attaches. Nothing of it is seen
on the host, and it lasts as long as somebody has its descriptor: nothing is left when all who have it die, at any instant.

Blocking calls with the GIL released (ctypes): run them in a thread. Not here: mount(2) and mountinfo (mounts.py).
Raises: ServerError that names the mount and the kernel's reason, the OSError kept as its cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from engine.errors import ServerError
from engine.system import mounts

_T = TypeVar("_T")

THREADS = 4
"""Threads of an `Aside` for mounting and looking, and as many for unmounting."""
WRITERS = 16
"""Threads for long work that waits for nobody: that many archives that are here in full are laid out at a time."""

_CLONE_NEWNS = 0x20000
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_AT_NO_AUTOMOUNT = 0x800
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_MOUNT_SETATTR = 428, 429, 442
"""The same numbers on every architecture; that of pivot_root(2) is not."""
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "riscv64": 41, "armv7l": 218, "i686": 217}
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH, _MOVE_MOUNT_T_EMPTY_PATH = 4, 0x40
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _NOATIME, _ATIME = 1, 2, 4, 8, 0x10, 0x70
_STATX_ATTR_MOUNT_ROOT = 0x2000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.statx.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_char_p)
_libc.umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)


class _Attributes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd"))


def clone(source: Path | str | int, *, recursive: bool = False) -> int:
    """A tree: a private copy of the mount at a path, or at a descriptor, from there on down; `recursive`: with what is mounted below it.

    The caller closes it. Raises ServerError, FileNotFoundError when there is no such path.
    """
    at, path = (source, b"") if isinstance(source, int) else (_AT_FDCWD, os.fsencode(source))
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_EMPTY_PATH | (_AT_RECURSIVE if recursive else 0)
    tree: int = _libc.syscall(ctypes.c_long(_SYS_OPEN_TREE), ctypes.c_int(at), path, ctypes.c_uint(flags))
    if tree < 0:
        error = _failure(source)
        if isinstance(error, FileNotFoundError):
            raise error
        raise ServerError(f"copy of the mount {source}: {(error.strerror or '').lower()}") from error
    try:
        # A copy of a shared mount is its peer: what is mounted on the one would appear on the other.
        _set(tree, 0, recursive=recursive, propagation=mounts.MS_PRIVATE)
    except BaseException:
        os.close(tree)
        raise
    return tree


def clone_within(namespace: int, descriptor: int) -> int:
    """As `clone`, of the mount at a descriptor in another mount namespace, whose descriptor is given. A thread of its own enters that."""
    with ThreadPoolExecutor(1, thread_name_prefix="namespace") as thread:
        return thread.submit(_clone_within, namespace, descriptor).result()


def _clone_within(namespace: int, descriptor: int) -> int:
    mounts.own_directory()  # setns(2) refuses a thread that shares it
    _enter(namespace)
    return clone(descriptor)


def attach(tree: int, target: Path | str | int) -> None:
    """Mount a tree at a path, or on what a descriptor stands for, in the calling thread's namespace. The descriptor stays the caller's."""
    at, path = (target, b"") if isinstance(target, int) else (_AT_FDCWD, os.fsencode(target))
    flags = _MOVE_MOUNT_F_EMPTY_PATH | (_MOVE_MOUNT_T_EMPTY_PATH if isinstance(target, int) else 0)
    status = _libc.syscall(
        *(ctypes.c_long(_SYS_MOVE_MOUNT), ctypes.c_int(tree), b"", ctypes.c_int(at), path, ctypes.c_uint(flags))
    )
    if status < 0:
        error = _failure(target)
        raise ServerError(f"attaching a mount at {target}: {(error.strerror or '').lower()}") from error


def guard(tree: int, *, read_only: bool, recursive: bool = False) -> None:
    """Nothing on the mount can be executed or opened as a device; `read_only`: nothing written, no time of access either."""
    flags = _NOSUID | _NODEV | _NOEXEC | (_RDONLY | _NOATIME if read_only else 0)
    _set(tree, flags, recursive=recursive, clear=_ATIME if read_only else 0)


def _set(tree: int, flags: int, *, recursive: bool, clear: int = 0, propagation: int = 0) -> None:
    wanted = _Attributes(flags, clear, propagation, 0)
    status = _libc.syscall(
        *(ctypes.c_long(_SYS_MOUNT_SETATTR), ctypes.c_int(tree), b""),
        ctypes.c_uint(_AT_EMPTY_PATH | (_AT_RECURSIVE if recursive else 0)),
        *(ctypes.byref(wanted), ctypes.c_size_t(ctypes.sizeof(wanted))),
    )
    if status < 0:
        error = _failure(tree)
        raise ServerError(f"attributes of a mount: {(error.strerror or '').lower()}") from error


def is_mount(path: Path | str) -> bool:
    """Whether something is mounted at `path` (STATX_ATTR_MOUNT_ROOT, Linux 5.8)."""
    found = ctypes.create_string_buffer(256)
    if _libc.statx(_AT_FDCWD, os.fsencode(path), _AT_NO_AUTOMOUNT, 0, found) < 0:
        return False
    return bool(int.from_bytes(found.raw[8:16], "little") & _STATX_ATTR_MOUNT_ROOT)


def detach(path: str) -> None:
    """Take away what is mounted at `path`, at once; who holds a descriptor in it keeps it."""
    if _libc.umount2(os.fsencode(path), _MNT_DETACH | _UMOUNT_NOFOLLOW) < 0:
        error = _failure(path)
        raise ServerError(f"unmount of {path}: {(error.strerror or '').lower()}") from error


def make_private(directory: Path) -> None:
    """Have `directory`, which is made, be a mount of its own that passes nothing on, for `Aside.namespace_with`."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_mount(directory):
        tree = clone(directory)
        try:
            attach(tree, directory)
        finally:
            os.close(tree)
    mounts.mount("", directory, flags=mounts.MS_PRIVATE)  # under a shared mount it became shared


class Aside:
    """The namespace, made when it is first needed, and the threads that live in it.

    They see `/layers`, which shows `directory` and is where they stand, `/proc`, and what they mount at a `place` or in `own`, the owner's directory.
    """

    def __init__(self, directory: Path, own: str) -> None:
        self._directory = directory
        self._own = own
        self._lock = threading.Lock()
        self.namespace = -1
        """Its descriptor; -1 before it is needed."""
        self._last = 0
        self._mounting = ThreadPoolExecutor(THREADS, "aside", self._enter)
        self._unmounting = ThreadPoolExecutor(THREADS, "unmount", self._enter)
        self._writing = ThreadPoolExecutor(WRITERS, "archive", self._enter)

    async def run(self, work: Callable[[], _T]) -> _T:
        """What `work` returns in one of the threads. Not for what waits for a client."""
        return await asyncio.get_running_loop().run_in_executor(self._mounting, work)

    async def unmount(self, work: Callable[[], _T]) -> _T:
        """As `run`, for what ends a file system: an overlay's writes back the one that it lies on, for seconds, and others must go on."""
        return await asyncio.get_running_loop().run_in_executor(self._unmounting, work)

    async def run_long(self, work: Callable[[], _T]) -> _T:
        """As `run`, for work that may take long. Not for what waits for a client either."""
        return await asyncio.get_running_loop().run_in_executor(self._writing, work)

    async def run_apart(self, work: Callable[[], _T]) -> _T:
        """As `run`, in a thread that is made for it and ends with it: it may wait for a client and is in nobody's way."""
        thread = ThreadPoolExecutor(1, "archive", self._enter)
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, work)
        finally:
            thread.shutdown(wait=False)

    def place(self) -> str:
        """A new empty directory to mount on. In a thread of the namespace."""
        with self._lock:
            self._last += 1
            path = f"/calls/{self._last}"
        os.mkdir(path)
        return path

    def namespace_with(self, path: str, target: Path) -> int:
        """A descriptor of a copy of the host's namespace that has what is mounted at `path` here at `target` (`make_private`), unseen by others.

        Its other mounts stay what they were to the host's, peers or slaves. The caller closes it: the last descriptor takes the kernel a while.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="namespace") as thread:
            return thread.submit(self._namespace_with, path, target).result()

    def _namespace_with(self, path: str, target: Path) -> int:
        host = os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        try:
            mounts.own_directory()
            _enter(self.namespace)
            tree = clone(path)
            try:
                _enter(host)
                if _libc.unshare(ctypes.c_int(_CLONE_NEWNS)) < 0:
                    raise _failure("mount namespace")
                attach(tree, target)
            finally:
                os.close(tree)
        finally:
            os.close(host)
        return os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)

    def adopt(self, namespace: int) -> None:
        """Live in that namespace, which an `Aside` of an earlier process made, unless it shows another directory. Before anything else is asked for.

        What that process was doing at its places is taken away. The descriptor stays the caller's.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="namespace") as thread:
            thread.submit(self._adopt, namespace).result()

    def _adopt(self, namespace: int) -> None:
        wanted = os.stat(self._directory)
        mounts.own_directory()
        _enter(namespace)
        shown = os.stat("/layers")
        if (shown.st_dev, shown.st_ino) == (wanted.st_dev, wanted.st_ino):
            for name in os.listdir("/calls"):
                with contextlib.suppress(ServerError):  # it was not mounted yet
                    detach(f"/calls/{name}")
                os.rmdir(f"/calls/{name}")
            self.namespace = os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)

    def _enter(self) -> None:
        mounts.own_directory()  # setns(2) refuses a thread that shares it
        with self._lock:
            if self.namespace < 0:
                self._make()
                self.namespace = os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
            else:
                _enter(self.namespace)
        os.chdir("/layers")

    def _make(self) -> None:
        layers, proc = clone(self._directory), clone("/proc")
        try:
            if _libc.unshare(ctypes.c_int(_CLONE_NEWNS)) < 0:
                raise _failure("mount namespace")
            # First of all: what happens here to copies of the host's mounts must not happen to those.
            mounts.mount("", "/", flags=mounts.MS_REC | mounts.MS_PRIVATE)
            mounts.mount("tmpfs", self._directory, "tmpfs", mounts.MS_NOSUID | mounts.MS_NODEV, "mode=700,size=16m")
            os.chdir(self._directory)
            if _libc.syscall(ctypes.c_long(_SYS_PIVOT_ROOT[os.uname().machine]), b".", b".") < 0:
                raise _failure("pivot_root")
            detach(".")  # the old root lies on top of the new one (pivot_root(2), NOTES)
            os.chdir("/")
            for path in ("/layers", "/proc", "/calls", self._own):
                os.mkdir(path)
            attach(layers, "/layers")
            attach(proc, "/proc")
        finally:
            os.close(layers)
            os.close(proc)


def _enter(namespace: int) -> None:
    """The calling thread, which has a directory of its own, from now on."""
    if _libc.setns(ctypes.c_int(namespace), ctypes.c_int(_CLONE_NEWNS)) < 0:
        raise _failure("mount namespace")


def _failure(what: Path | str | int) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), what if isinstance(what, str) else str(what))
