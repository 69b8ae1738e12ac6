"""Network settings of a namespace (sysctl(8), /proc/sys/net), written through a private procfs.

For each name in /proc/sys/net the kernel caches one entry per network namespace, all in one hash
chain. With a thousand containers every access to a setting, also by the host, takes one or two
milliseconds. So settings of containers are written through a private instance of procfs (fsopen(2),
Linux 5.2; separate instances: 5.8). It is replaced before its chains grow long.

Blocking: run in a thread. Owns: the instance, a detached mount. Locks: one, held for a write.
Raises: OSError with the kernel's errno.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Mapping

USES = 64
"""Namespaces that are set up through one instance. Creating one takes the kernel 50 us."""

_SYS_FSOPEN, _SYS_FSCONFIG, _SYS_FSMOUNT = 430, 431, 432
"""The same numbers on every architecture."""
_FSOPEN_CLOEXEC = _FSMOUNT_CLOEXEC = 1
_FSCONFIG_CMD_CREATE = 6
_MOUNT_ATTRIBUTES = 2 | 4 | 8
"""MOUNT_ATTR_NOSUID, NODEV, NOEXEC."""

_libc = ctypes.CDLL(None, use_errno=True)


class _Instance:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptor = -1
        self._left = 0

    def write(self, settings: Mapping[str, str]) -> None:
        """Write settings of the calling thread's network namespace, by path below /proc/sys/net.

        Raises FileNotFoundError for a setting that the kernel does not have.
        """
        with self._lock:
            if not self._left:
                fresh = _proc()
                if self._descriptor >= 0:
                    os.close(self._descriptor)
                self._descriptor, self._left = fresh, USES
            self._left -= 1
            for name, value in settings.items():
                setting = os.open(f"sys/net/{name}", os.O_WRONLY | os.O_CLOEXEC, dir_fd=self._descriptor)
                try:
                    os.write(setting, value.encode())
                finally:
                    os.close(setting)


write = _Instance().write


def _proc() -> int:
    """A new instance of procfs, mounted nowhere."""
    context = _call(_SYS_FSOPEN, b"proc", ctypes.c_uint(_FSOPEN_CLOEXEC))
    try:
        _call(_SYS_FSCONFIG, ctypes.c_int(context), ctypes.c_uint(_FSCONFIG_CMD_CREATE), None, None, ctypes.c_int(0))
        return _call(
            _SYS_FSMOUNT, ctypes.c_int(context), ctypes.c_uint(_FSMOUNT_CLOEXEC), ctypes.c_uint(_MOUNT_ATTRIBUTES)
        )
    finally:
        os.close(context)


def _call(number: int, *arguments: object) -> int:
    found: int = _libc.syscall(ctypes.c_long(number), *arguments)
    if found < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), "proc")
    return found
