"""mount(2), umount2(2), unshare(2) and /proc/self/mountinfo.

Blocking calls with the GIL released (ctypes): run them in a thread. Paths are absolute, or relative
to the calling thread's directory. Not here: which file system to mount with which options
(storage/overlay.py, containers/spec.py).
Raises: ServerError that names the mount point and the kernel's reason, the OSError kept as its
        cause.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import re
import time
from pathlib import Path
from typing import NamedTuple

from engine.errors import ServerError
from engine.system.threads import in_new_thread

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_SYNCHRONOUS, MS_REMOUNT, MS_MANDLOCK, MS_DIRSYNC = (
    1,
    2,
    4,
    8,
    16,
    32,
    64,
    128,
)
MS_NOATIME, MS_NODIRATIME, MS_BIND, MS_MOVE, MS_REC = 1024, 2048, 4096, 8192, 16384
MS_UNBINDABLE, MS_PRIVATE, MS_SLAVE, MS_SHARED = 1 << 17, 1 << 18, 1 << 19, 1 << 20
MS_RELATIME, MS_STRICTATIME = 1 << 21, 1 << 24

PAGE = os.sysconf("SC_PAGE_SIZE")
"""mount(2) copies one page of options, including the terminating NUL. It truncates longer options
without an error. A page has up to 64 KiB on aarch64.
"""

_MNT_DETACH = 2
_UMOUNT_NOFOLLOW = 8
_CLONE_FS = 0x200
_CLONE_NEWNS = 0x20000
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT = 428, 429
"""The same numbers on every architecture."""
_OPEN_TREE_CLONE = 1
_AT_SYMLINK_NOFOLLOW = 0x100
_MOVE_MOUNT_F_EMPTY_PATH = 4
_BUSY_WAIT = 0.02
"""Seconds between the two plain attempts: a process that was just killed may still be dying in
the mount.
"""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
_libc.umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)
_libc.unshare.argtypes = (ctypes.c_int,)
_libc.setns.argtypes = (ctypes.c_int, ctypes.c_int)


class Mount(NamedTuple):
    """One line of mountinfo (proc_pid_mountinfo(5)).

    `propagation` is such as `shared:1 master:2`, empty for private.
    """

    id: int
    parent: int
    device: str
    root: str
    target: str
    options: str
    propagation: str
    type: str
    source: str
    super_options: str


def mount(source: str, target: Path | str, type_: str = "", flags: int = 0, options: str = "") -> None:
    """Attach a file system. Raises ServerError, also for options that the kernel would truncate."""
    data = options.encode()
    if len(data) >= PAGE:
        raise ServerError(
            f"mounting {type_} on {target}: the options have {len(data)} bytes, the kernel takes {PAGE - 1}"
        )
    if _libc.mount(source.encode(), os.fsencode(target), type_.encode() or None, flags, data or None) < 0:
        raise _error(f"mounting {type_ or source} on {target}") from _cause(target)


def unmount(target: Path | str) -> bool:
    """Detach everything mounted on `target`. Returns False if nothing was.

    A busy mount is detached lazily after two plain attempts.
    """
    name = os.fsencode(target)
    detached = False
    attempts = 0
    while True:
        flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if attempts >= 2 else 0)
        if _libc.umount2(name, flags) == 0:
            detached = True
            attempts = 0
            continue
        number = ctypes.get_errno()
        if number in (errno.EINVAL, errno.ENOENT, errno.ENOTDIR):
            return detached
        if number != errno.EBUSY or attempts >= 2:
            raise _error(f"unmounting {target}") from _cause(target)
        attempts += 1
        if attempts == 1:
            time.sleep(_BUSY_WAIT)


def mount_id(descriptor: int) -> int:
    """The id of the mount that a descriptor is in (proc_pid_fdinfo(5))."""
    with open(f"/proc/self/fdinfo/{descriptor}", "rb") as file:
        for line in file:
            name, _, value = line.partition(b":")
            if name == b"mnt_id":
                return int(value)
    raise ServerError("/proc/self/fdinfo has no mnt_id: this kernel is too old")


def copy_from(namespace: int, path: str, target: Path) -> None:
    """Attach a copy of the mount at `path` in another mount namespace to `target` in this one
    (open_tree(2), move_mount(2), Linux 5.2). `namespace`: a descriptor of the other namespace.

    `path` is resolved in the other namespace; a link at its end is not followed. Blocks, and starts
    a thread, because setns(2) moves the calling thread.
    """
    in_new_thread(functools.partial(_copy_from, namespace, path, target))


def _copy_from(namespace: int, path: str, target: Path) -> None:
    own_directory()  # setns refuses a thread that shares its directory with others
    home = os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.setns(namespace, _CLONE_NEWNS) < 0:
            raise _error(f"entering the mount namespace of {path}") from _cause(path)
        try:
            tree: int = _libc.syscall(
                *(ctypes.c_long(_SYS_OPEN_TREE), ctypes.c_int(-1), path.encode()),
                ctypes.c_uint(_OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_SYMLINK_NOFOLLOW),
            )
            if tree < 0:
                raise _error(f"copying the mount {path}") from _cause(path)
        finally:
            if _libc.setns(home, _CLONE_NEWNS) < 0:
                raise _error("returning to the engine's mount namespace") from _cause(path)
    finally:
        os.close(home)
    try:
        moved: int = _libc.syscall(
            *(ctypes.c_long(_SYS_MOVE_MOUNT), ctypes.c_int(tree), b"", ctypes.c_int(-1), os.fsencode(target)),
            ctypes.c_uint(_MOVE_MOUNT_F_EMPTY_PATH),
        )
        if moved < 0:
            raise _error(f"mounting {path} on {target}") from _cause(target)
    finally:
        os.close(tree)


def own_directory() -> None:
    """Give the calling thread a working directory (and umask, root) of its own:
    unshare(CLONE_FS).
    """
    if _libc.unshare(_CLONE_FS) < 0:
        raise _error("giving a thread its own working directory") from _cause("")


def mounts(below: Path | str | None = None) -> list[Mount]:
    """The mounts of this namespace, in mount order; with `below` those on or under that path."""
    with open("/proc/self/mountinfo", "rb") as file:
        lines = file.read().decode("utf-8", "surrogateescape").splitlines()
    found = [_parse(line) for line in lines]
    if below is None:
        return found
    top = os.path.realpath(below)
    return [entry for entry in found if entry.target == top or entry.target.startswith(top.rstrip("/") + "/")]


def containing(path: str) -> Mount:
    """The mount that contains a path, which must have no links: of the mount points that are the
    path or above it, the longest; of several mounts there, the last.
    """
    above = [entry for entry in mounts() if path == entry.target or path.startswith(entry.target.rstrip("/") + "/")]
    if not above:
        raise ServerError(f"{path}: it is on no mount")
    return max(enumerate(above), key=lambda pair: (len(pair[1].target), pair[0]))[1]


_ESCAPE = re.compile(r"\\([0-7]{3})")


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text) if "\\" in text else text


def _parse(line: str) -> Mount:
    left, _, right = line.partition(" - ")
    number, parent, device, root, target, options, *optional = left.split(" ")
    type_, source, super_options = [*right.split(" "), "", ""][:3]
    return Mount(
        int(number),
        int(parent),
        device,
        _unescape(root),
        _unescape(target),
        options,
        " ".join(optional),
        type_,
        _unescape(source),
        super_options,
    )


def _cause(target: Path | str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), os.fspath(target))


def _error(what: str) -> ServerError:
    return ServerError(f"{what}: {os.strerror(ctypes.get_errno()).lower()}")
