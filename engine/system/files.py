"""Files below a root, without following links out of it: openat2(2), bounded reads, atomic writes,
removal of trees.

A container controls the links and names in its root. All access there goes through `open_in_root`,
which resolves a path as if the directory were the root of the file system, `..` and absolute links
included (RESOLVE_IN_ROOT, Linux 5.6).
Raises: OSError with the kernel's errno, because a missing file is an ordinary result here. Callers
        turn it into an EngineError.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import stat
import struct
from pathlib import Path

from engine._fast import tree

_SYS_OPENAT2 = 437
"""The same number on every architecture: openat2 came after the tables were unified."""
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_NO_SYMLINKS = 0x04
_RESOLVE_BENEATH = 0x08
_RESOLVE_IN_ROOT = 0x10
_ATTEMPTS = 128
"""openat2(2): EAGAIN means that a rename raced with the resolution; try again."""

_libc = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def open_in_root(root: int, path: str | bytes, flags: int = os.O_RDONLY, mode: int = 0) -> int:
    """A descriptor (CLOEXEC) of `path` seen from the directory descriptor `root` as its `/`. The
    caller closes it.

    No link of any kind leads out of `root`. Opening a FIFO or device has its usual effect, so pass
    O_NONBLOCK or O_PATH if the path is not trusted.
    """
    return _open(root, path, flags, mode, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)


def open_without_links(root: int, path: str | bytes, flags: int = os.O_RDONLY) -> int:
    """As `open_in_root`, but links are errors: a link in the path is ELOOP, a path that leaves the
    root is EXDEV.
    """
    return _open(root, path, flags, 0, _RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS)


def open_beneath(root: int, path: str | bytes, flags: int = os.O_RDONLY) -> int:
    """As `open_in_root`, but a path that leaves the root is EXDEV: one with `..` above it, and any
    absolute link.
    """
    return _open(root, path, flags, 0, _RESOLVE_BENEATH | _RESOLVE_NO_MAGICLINKS)


def _open(root: int, path: str | bytes, flags: int, mode: int, resolve: int) -> int:
    how = _OpenHow(flags | os.O_CLOEXEC, mode if flags & (os.O_CREAT | os.O_TMPFILE) else 0, resolve)
    name = os.fsencode(path) or b"."
    if b"\0" in name:
        raise OSError(errno.EINVAL, "path contains a NUL", os.fsdecode(name))
    for _ in range(_ATTEMPTS):
        descriptor: int = _libc.syscall(
            ctypes.c_long(_SYS_OPENAT2),
            ctypes.c_int(root),
            name,
            ctypes.byref(how),
            ctypes.c_size_t(ctypes.sizeof(how)),
        )
        if descriptor >= 0:
            return descriptor
        number = ctypes.get_errno()
        if number not in (errno.EAGAIN, errno.EINTR):
            break
    raise OSError(number, os.strerror(number), os.fsdecode(name))


def open_mount_point(
    root: int, path: str, *, directory: bool, links: bool = True, made: list[str] | None = None
) -> int:
    """An O_PATH descriptor of `path` seen from `root`.

    Missing parts are created with mode 0755, as Docker does; the last one as a file unless
    `directory`. `links`: resolve as `open_in_root`, otherwise as `open_without_links`. The paths of
    created parts, relative to `root` and without links, are added to `made`. The caller closes the
    descriptor. Raises OSError.
    """
    opened = open_in_root if links else open_without_links
    names = path.strip("/").split("/")
    with contextlib.suppress(FileNotFoundError):
        return opened(root, "/".join(names), os.O_PATH)
    for end in range(1, len(names) + 1):
        parent = opened(root, "/".join(names[: end - 1]), os.O_PATH | os.O_DIRECTORY)
        try:
            with contextlib.suppress(FileExistsError):
                if end < len(names) or directory:
                    os.mkdir(names[end - 1], 0o755, dir_fd=parent)
                else:
                    os.mknod(names[end - 1], 0o755 | stat.S_IFREG, dir_fd=parent)
                if made is not None:
                    above = resolve_in_root(root, "/".join(names[: end - 1]))
                    made.append(os.path.join(os.fsdecode(above), names[end - 1]))
        finally:
            os.close(parent)
    return opened(root, "/".join(names), os.O_PATH)


_LINKS = 255
"""Links that are followed in one path, as in Docker."""


def resolve_in_root(root: int, path: str | bytes) -> bytes:
    """The target of `path` after all links: relative to `root`, b"" for the root itself. Missing
    components stay as written.

    For information only: open the result through `open_in_root`. Raises OSError: ELOOP after 255
    links, ENAMETOOLONG.
    """
    waiting = os.fsencode(path).split(b"/")[::-1]
    done: list[bytes] = []
    links = 0
    while waiting:
        name = waiting.pop()
        if name in (b"", b"."):
            continue
        if name == b"..":
            del done[-1:]
            continue
        at = b"/".join((*done, name))
        try:
            found = open_in_root(root, at, os.O_PATH | os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError):
            done.append(name)
            continue
        try:
            target = os.readlink(b"", dir_fd=found) if stat.S_ISLNK(os.fstat(found).st_mode) else None
        finally:
            os.close(found)
        if target is None:
            done.append(name)
            continue
        links += 1
        if links > _LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fsdecode(path))
        if target.startswith(b"/"):
            done = []
        waiting += target.split(b"/")[::-1]
    return b"/".join(done)


def open_directory(path: Path | str) -> int:
    """A descriptor of a directory for use as `root`. The caller closes it."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def read_in_root(root: int | Path | str, path: str | bytes, limit: int) -> bytes:
    """The content of a regular file below `root`, a directory or its descriptor.

    Raises OSError: EFBIG beyond `limit` bytes, EINVAL if it is not a regular file.
    """
    if not isinstance(root, int):
        directory = open_directory(root)
        try:
            return read_in_root(directory, path, limit)
        finally:
            os.close(directory)
    descriptor = open_in_root(root, path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", os.fsdecode(path))
        return _read(descriptor, limit, path)
    finally:
        os.close(descriptor)


def read_file(path: Path | str, limit: int) -> bytes:
    """The content of a file of the engine or the kernel.

    Raises OSError; EFBIG beyond `limit` bytes.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _read(descriptor, limit, path)
    finally:
        os.close(descriptor)


def _read(descriptor: int, limit: int, path: Path | str | bytes) -> bytes:
    parts: list[bytes] = []
    size = 0
    while part := os.read(descriptor, min(limit + 1 - size, 1 << 16)):
        parts.append(part)
        size += len(part)
        if size > limit:
            raise OSError(errno.EFBIG, f"larger than {limit} bytes", os.fsdecode(path))
    return b"".join(parts)


def write_atomically(path: Path | str, data: bytes, mode: int = 0o644, *, durable: bool = False) -> None:
    """Replace `path` by a file of `data`.

    Readers, also after a crash of the engine, see the old or the new file. `durable`: also after a
    power failure.
    """
    directory, name = os.path.split(os.fspath(path))
    temporary = os.path.join(directory, f".{name}.{secrets.token_hex(6)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fchmod(descriptor, mode)
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    if durable:
        sync_directory(directory or ".")


def sync_directory(path: Path | str) -> None:
    """Make the names in a directory durable."""
    descriptor = open_directory(path)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file_system(path: Path | str) -> None:
    """syncfs(2): write back the file system of `path`. Blocks until the disk has done so."""
    descriptor = open_directory(path)
    try:
        if _libc.syncfs(descriptor) < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), os.fspath(path))
    finally:
        os.close(descriptor)


_GET_FLAGS, _SET_FLAGS = (
    direction << 30 | struct.calcsize("l") << 16 | ord("f") << 8 | number for direction, number in ((2, 1), (1, 2))
)
"""ioctl_iflags(2)"""
_TOP_DIRECTORY = 0x20000


def spread(path: Path | str) -> None:
    """Mark the trees in a directory as unrelated (`chattr +T`, chattr(1)): ext4 then places each in
    an empty part of the disk, rather than search for inodes among those just deleted. File systems
    without this hint are left alone.
    """
    flags = bytearray(struct.calcsize("l"))
    descriptor = open_directory(path)
    try:
        with contextlib.suppress(OSError):
            fcntl.ioctl(descriptor, _GET_FLAGS, flags)
            (found,) = struct.unpack_from("i", flags)
            struct.pack_into("i", flags, 0, found | _TOP_DIRECTORY)
            fcntl.ioctl(descriptor, _SET_FLAGS, flags)
    finally:
        os.close(descriptor)


def temporary_file(directory: Path) -> int:
    """A descriptor of a new file for reading and writing that has no name, so that no crash can
    leave it behind. The caller closes it.
    """
    try:
        return os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    name = directory / secrets.token_hex(8)
    descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.unlink(name)
    return descriptor


def write_sparse(descriptor: int, data: memoryview, at: int) -> bool:
    """Write all of `data` at an offset, but leave a hole for zeros: a decompression bomb of zeros
    takes no space. Blocking.

    Returns False for a hole. One at the end of the file does not extend it.
    """
    if not data[0] and not data.tobytes().strip(b"\0"):
        return False
    while data:
        size = os.pwrite(descriptor, data, at)
        data, at = data[size:], at + size
    return True


def remove_tree(path: Path | str) -> None:
    """Remove a file or a directory tree of any depth. Does nothing if it does not exist. Follows no
    links, and opens nothing but directories.

    Long work with the GIL released: run it in a thread. Raises the first OSError, after it has
    removed all other entries.
    """
    directory, name = os.path.split(os.path.abspath(path))
    try:
        parent = open_directory(directory)
    except FileNotFoundError:
        return
    try:
        tree.remove_tree(parent, os.fsencode(name))
    finally:
        os.close(parent)
