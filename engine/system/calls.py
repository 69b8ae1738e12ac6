"""The newest system calls that the engine makes, and whether they work here.

Each is called once with arguments that it refuses. A kernel without it answers ENOSYS; so does the
seccomp filter of a container that the engine runs in, or EPERM.

Owns nothing. Threads: any.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Iterator
from typing import NamedTuple

from engine.errors import ServerError

KERNEL = (5, 12)
"""The oldest Linux release that has all of them."""
FIX = f"boot Linux {'.'.join(map(str, KERNEL))} or newer; in a container, permit them in its seccomp profile"


class Call(NamedTuple):
    """A system call; its number is the same on every architecture."""

    name: str
    number: int
    arguments: tuple[int, ...]
    use: str = ""
    """What falls away without it; empty: the engine does not start."""


_NONE, _BAD = -1, 0x7FFFFFFF
"""No descriptor, and flags that do not exist."""
CALLS = (
    Call("open_tree", 428, (_NONE, 0, _BAD)),
    Call("move_mount", 429, (_NONE, 0, _NONE, 0, _BAD)),
    Call("fsopen", 430, (0, _BAD)),
    Call("fsconfig", 431, (_NONE, _BAD)),
    Call("fsmount", 432, (_NONE, _BAD)),
    Call("pidfd_open", 434, (_NONE, 0)),
    Call("clone3", 435, (0, 0), "builds from repositories"),
    Call("openat2", 437, (_NONE, 0, 0, 0)),
    Call("close_range", 436, (1, 0, 0)),
    Call("mount_setattr", 442, (_NONE, 0, _BAD, 0, 0)),
)

_libc = ctypes.CDLL(None, use_errno=True)


def missing() -> Iterator[Call]:
    """Those that this kernel does not have, or that are denied to this process. As root only:
    others may not make mounts.
    """
    for call in CALLS:
        arguments = [ctypes.c_long(each) for each in (call.number, *call.arguments, *[0] * (6 - len(call.arguments)))]
        if _libc.syscall(*arguments) < 0 and ctypes.get_errno() in (errno.ENOSYS, errno.EPERM):
            yield call


def check() -> None:
    """Raises ServerError with the names of missing calls that the engine cannot do without."""
    names = [call.name for call in missing() if not call.use]
    if names:
        raise ServerError(f"system calls are missing or denied on this host: {', '.join(names)}; {FIX}")
