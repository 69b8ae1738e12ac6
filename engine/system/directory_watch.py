"""Whether directories have changed since they were last read, without reading them: inotify(7).

Those above them are watched, too, as a directory may not exist yet, or may be moved with its
parent.

Owns:    an inotify descriptor. Threads: one at a time.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterable
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.inotify_add_watch.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32)

_CREATE, _DELETE, _MOVED, _SELF = 0x100, 0x200, 0xC0, 0xC00
"""IN_CREATE, IN_DELETE, IN_MOVED_FROM and IN_MOVED_TO, IN_DELETE_SELF and IN_MOVE_SELF."""
_ONLY_DIRECTORIES = 0x01000000
_MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES)
_HEAD = struct.Struct("iIII")
_EVENTS = 64 * 1024


class DirectoryWatch:
    """See the module."""

    def __init__(self, directories: Iterable[Path]) -> None:
        self._directories = [*directories]
        self._descriptor = -1
        self._wanted: dict[int, set[bytes]] = {}
        """The names that matter, by watch; none means that all do."""

    def begin(self) -> None:
        """Watch from now on. Blocks on files. Raises OSError where it cannot be: too many instances
        or watches."""
        self.close()
        descriptor = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if descriptor < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        self._descriptor = descriptor
        for directory in self._directories:
            self._watch(directory)

    def _watch(self, directory: Path) -> None:
        """The directory and those in it, and the way to it, which may be moved."""
        for above in directory.parents:
            self._add(above, os.fsencode(directory.relative_to(above).parts[0]))
        if self._add(directory, b""):
            with os.scandir(directory) as entries:
                for entry in entries:
                    if entry.is_dir():
                        self._add(directory / entry.name, b"")

    def _add(self, directory: Path, name: bytes) -> bool:
        """False if there is no such directory."""
        mask = _CREATE | _DELETE | _MOVED | _SELF | _ONLY_DIRECTORIES
        number = _libc.inotify_add_watch(self._descriptor, os.fsencode(directory), mask)
        if number < 0:
            if ctypes.get_errno() in _MISSING:
                return False
            raise OSError(ctypes.get_errno(), "inotify_add_watch", str(directory))
        names = self._wanted.setdefault(number, set())
        names.add(name)
        return True

    def changed(self) -> bool:
        """True if something has changed since `begin`, or if nothing is watched. Does not block."""
        if self._descriptor < 0:
            return True
        try:
            data = os.read(self._descriptor, _EVENTS)
        except BlockingIOError:
            return False
        if len(data) > _EVENTS // 2:
            self.close()  # more may be there than is read at once
            return True
        at = 0
        while at < len(data):
            number, mask, _, size = _HEAD.unpack_from(data, at)
            name = data[at + _HEAD.size : at + _HEAD.size + size].rstrip(b"\0")
            at += _HEAD.size + size
            wanted = self._wanted.get(number)
            # another mask: the watch is gone, or events were lost
            if wanted is None or b"" in wanted or name in wanted or not mask & (_CREATE | _DELETE | _MOVED):
                self.close()
                return True
        return False

    def close(self) -> None:
        self._wanted.clear()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
