"""Network namespaces: made and entered, for the calling thread alone.

setns(2) and unshare(2) act on one thread, so whoever enters a namespace does it in a thread of its own and leaves it again before anything else
runs there. Blocking calls with the GIL released (ctypes). A namespace lives while a process, a socket or a descriptor is in it: nothing is
bind-mounted, nothing is left on disk after a crash.

Raises: OSError with the kernel's errno. Not here: what is inside (`netlink.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

CLONE_NEWNET = 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.setns.argtypes = (ctypes.c_int, ctypes.c_int)
_libc.unshare.argtypes = (ctypes.c_int,)


def network() -> int:
    """A descriptor (CLOEXEC) of the calling thread's network namespace. The caller closes it."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def enter_network(namespace: int) -> None:
    """Put the calling thread into the namespace of this descriptor."""
    if _libc.setns(namespace, CLONE_NEWNET) < 0:
        raise _error("setns")


@contextlib.contextmanager
def new_network() -> Iterator[int]:
    """The calling thread is in a fresh network namespace for the time of the block; yields its descriptor, which stays open and is the caller's.

    When the block fails the descriptor is closed, and the namespace gone with it.
    """
    home = network()
    try:
        if _libc.unshare(CLONE_NEWNET) < 0:
            raise _error("unshare of the network namespace")
        try:
            made = network()
            try:
                yield made
            except BaseException:
                os.close(made)
                raise
        finally:
            enter_network(home)
    finally:
        os.close(home)


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")
