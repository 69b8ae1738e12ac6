"""What was changed in a container, as a layer: the upper directory of its snapshot written as a tar archive in OCI's terms.

overlayfs keeps a removed name as a character device 0/0, and a replaced directory with `trusted.overlay.opaque`; the archive has them as `.wh.NAME`
and `.wh..wh..opq` (OCI image specification, "Representing Changes"). Names are sorted, so one tree is one archive. Each directory is opened with
openat2(2) below the upper directory: nothing that the container left there leads out.
Owns: nothing. Blocking; one thread at a time. Raises: OSError.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import tarfile
from typing import NamedTuple

from engine.system import files

MOUNT_POINTS = frozenset((b"dev", b"proc", b"sys", b"etc/hosts", b"etc/hostname", b"etc/resolv.conf"))
"""What the runtime makes to mount on, where the image has none. Empty ones are not the container's change."""

_CHUNK = 1 << 20
_OPAQUE = "trusted.overlay.opaque"


class Written(NamedTuple):
    """The archive: digest and size."""

    diff_id: str
    size: int


def write(upper: int, target: int) -> Written:
    """Write the archive of the directory descriptor `upper` to the descriptor `target`."""
    archive = _Archive(upper, target)
    archive.directory(b"")
    archive.put(bytes(2 * tarfile.BLOCKSIZE))
    archive.flush()
    return Written(f"sha256:{archive.hashed.hexdigest()}", archive.size)


class _Archive:
    def __init__(self, upper: int, target: int) -> None:
        self._upper = upper
        self._target = target
        self._waiting: list[bytes] = []
        self._waiting_size = 0
        self._links: dict[tuple[int, int], str] = {}
        self.hashed = hashlib.sha256()
        self.size = 0

    def put(self, data: bytes) -> None:
        self._waiting.append(data)
        self._waiting_size += len(data)
        if self._waiting_size >= _CHUNK:
            self.flush()

    def flush(self) -> None:
        data = b"".join(self._waiting)
        self.hashed.update(data)
        self.size += len(data)
        view = memoryview(data)
        while view:
            view = view[os.write(self._target, view) :]
        self._waiting, self._waiting_size = [], 0

    def directory(self, top: bytes) -> None:
        """Everything below a directory, which itself is written already; its own entries before what lies deeper."""
        waiting = [top]
        while waiting:
            path = waiting.pop()
            found = files.open_in_root(self._upper, path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if path and _is_opaque(found):
                    self._head(tarfile.TarInfo(os.fsdecode(path) + "/.wh..wh..opq"), {})
                below = [
                    inner
                    for name in sorted(map(os.fsencode, os.listdir(found)))
                    if self._entry(found, name, inner := path + b"/" + name if path else name)
                ]
            finally:
                os.close(found)
            waiting += reversed(below)

    def _entry(self, parent: int, name: bytes, path: bytes) -> bool:
        """One name; whether there is something below it."""
        try:
            looks = os.stat(name, dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            return False  # the container was not paused
        mode = looks.st_mode
        if stat.S_ISCHR(mode) and looks.st_rdev == 0:
            head, slash, last = path.rpartition(b"/")
            self._head(tarfile.TarInfo(os.fsdecode(head + slash + b".wh." + last)), {})
            return False
        if stat.S_ISSOCK(mode) or (path in MOUNT_POINTS and _is_bare(parent, name, looks)):
            return False
        info = tarfile.TarInfo(os.fsdecode(path))
        info.mode, info.uid, info.gid = stat.S_IMODE(mode), looks.st_uid, looks.st_gid
        info.mtime = looks.st_mtime_ns // 10**9
        extra = {}
        if looks.st_mtime_ns % 10**9:
            extra["mtime"] = f"{info.mtime}.{looks.st_mtime_ns % 10**9:09}".rstrip("0")
        first = self._links.setdefault((looks.st_dev, looks.st_ino), info.name) if looks.st_nlink > 1 else info.name
        if stat.S_ISDIR(mode):
            info.type = tarfile.DIRTYPE
        elif first != info.name:
            info.type, info.linkname = tarfile.LNKTYPE, first
        elif stat.S_ISLNK(mode):
            info.type, info.linkname = tarfile.SYMTYPE, os.fsdecode(os.readlink(name, dir_fd=parent))
        elif stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            info.type = tarfile.CHRTYPE if stat.S_ISCHR(mode) else tarfile.BLKTYPE
            info.devmajor, info.devminor = os.major(looks.st_rdev), os.minor(looks.st_rdev)
        elif stat.S_ISFIFO(mode):
            info.type = tarfile.FIFOTYPE
        else:
            self._file(parent, name, info, extra)
            return False
        if info.type != tarfile.LNKTYPE:
            extra |= _attributes(f"/proc/self/fd/{parent}/".encode() + name)
        self._head(info, extra)
        return info.type == tarfile.DIRTYPE

    def _head(self, info: tarfile.TarInfo, extra: dict[str, str]) -> None:
        if info.type == tarfile.DIRTYPE:
            info.name += "/"
        info.pax_headers = extra
        # Names of any bytes: what is no UTF-8 goes into the header as it is, as Go reads it.
        self.put(info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))

    def _file(self, parent: int, name: bytes, info: tarfile.TarInfo, extra: dict[str, str]) -> None:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
        try:
            left = info.size = os.fstat(descriptor).st_size
            extra |= _attributes(descriptor)
            self._head(info, extra)
            while left:
                data = os.read(descriptor, min(left, _CHUNK))
                if not data:  # it became shorter: the header is written, so zeros it is
                    data = bytes(min(left, _CHUNK))
                left -= len(data)
                self.put(data)
            self.put(bytes(-info.size % tarfile.BLOCKSIZE))
        finally:
            os.close(descriptor)


def _is_opaque(directory: int) -> bool:
    with contextlib.suppress(OSError):
        return os.getxattr(directory, _OPAQUE) == b"y"
    return False


def _is_bare(parent: int, name: bytes, looks: os.stat_result) -> bool:
    if stat.S_ISREG(looks.st_mode):
        return looks.st_size == 0
    if not stat.S_ISDIR(looks.st_mode):
        return False
    directory = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        return not os.listdir(directory)
    finally:
        os.close(directory)


def _attributes(of: int | bytes) -> dict[str, str]:
    """Extended attributes as PAX records, but for overlayfs's own. Their values may be any bytes."""
    found = {}
    try:
        names = os.listxattr(of) if isinstance(of, int) else os.listxattr(of, follow_symlinks=False)
        for name in names:
            if not name.startswith(("trusted.overlay.", "system.")):
                value = os.getxattr(of, name) if isinstance(of, int) else os.getxattr(of, name, follow_symlinks=False)
                found[f"SCHILY.xattr.{name}"] = value.decode("utf-8", "surrogateescape")
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EPERM, errno.ENODATA, errno.ENOENT):
            raise
    return found


__all__ = ["MOUNT_POINTS", "Written", "write"]
