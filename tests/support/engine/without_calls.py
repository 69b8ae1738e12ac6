"""A program as on a kernel that lacks system calls: a seccomp filter answers them with ENOSYS, also
in all programs that it starts.

    python -m tests.support.engine.without_calls CALL[,CALL…] PROGRAM [ARGUMENT…]

Only calls since Linux 5.2 are known here: their numbers are the same on every architecture.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

NUMBERS = {
    **{"open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433},
    **{"pidfd_open": 434, "clone3": 435, "close_range": 436, "openat2": 437, "pidfd_getfd": 438},
    **{"faccessat2": 439, "epoll_pwait2": 441, "mount_setattr": 442, "fchmodat2": 452, "statmount": 457},
    **{"io_uring_setup": 425},
}
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ERRNO, _ALLOW = 0x00050000, 0x7FFF0000


def deny(calls: list[str]) -> None:
    """For this thread and its children, for ever (seccomp(2))."""
    code = [(_LOAD, 0, 0, 0)]  # the number of the call
    for index, call in enumerate(calls):
        code.append((_EQUAL, len(calls) - index, 0, NUMBERS[call]))
    code += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    program = b"".join(struct.pack("@HBBI", *each) for each in code)
    filter_ = struct.pack("@HP", len(code), ctypes.addressof(kept := ctypes.create_string_buffer(program)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.create_string_buffer(filter_), 0, 0) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    del kept


if __name__ == "__main__":
    deny(sys.argv[1].split(","))
    os.execvp(sys.argv[2], sys.argv[2:])
