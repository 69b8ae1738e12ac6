"""Network namespaces: made and entered, for the calling thread alone.

setns(2) and unshare(2) act on one thread, so a worker thread enters a namespace and leaves it
before it does anything else. A namespace exists while a process, a socket or a descriptor refers to
it. Only those with a link of a plugin are bind-mounted (`networks/remote/links.py`), so a crash
leaves no others behind.

Blocking calls, with the GIL released (ctypes). Raises: OSError with the kernel's errno. Not here:
links inside (`netlink/`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import select
from collections.abc import Iterator

from engine._fast import spawn
from engine.system.user_namespaces import IdMap

CLONE_NEWNET = 0x40000000
_SIOCGSKNS = 0x894C

_libc = ctypes.CDLL(None, use_errno=True)
_libc.setns.argtypes = (ctypes.c_int, ctypes.c_int)
_libc.unshare.argtypes = (ctypes.c_int,)


def network() -> int:
    """A descriptor (CLOEXEC) of the calling thread's network namespace. The caller closes it."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def enter_network(namespace: int) -> None:
    """Put the calling thread into the namespace of this descriptor."""
    if _libc.setns(namespace, CLONE_NEWNET) < 0:
        raise _error("entering a network namespace")


@contextlib.contextmanager
def new_network(ids: IdMap | None = None, user: int = -1) -> Iterator[int]:
    """Put the calling thread into a new network namespace for the block; yields its descriptor.
    Its owner, whose root may change it, is the user namespace with the descriptor `user`, otherwise
    a new one with the map `ids`, otherwise the thread's.

    The descriptor stays open and is the caller's. If the block fails it is closed, and the
    namespace gone.
    """
    home = network()
    try:
        made = -1
        if user >= 0:
            made = spawn.network_within(user)
        elif ids is not None:
            made = ids.network()
        elif _libc.unshare(CLONE_NEWNET) < 0:
            raise _error("creating a network namespace")
        try:
            entered = made < 0
            if entered:
                made = network()
            try:
                if not entered:
                    enter_network(made)
                yield made
            except BaseException:
                os.close(made)
                raise
        finally:
            enter_network(home)
    finally:
        os.close(home)


@contextlib.contextmanager
def inside_network(namespace: int) -> Iterator[None]:
    """Put the calling thread into the namespace of this descriptor for the block."""
    home = network()
    try:
        enter_network(namespace)
        try:
            yield
        finally:
            enter_network(home)
    finally:
        os.close(home)


def of_process(pid: int, pidfd: int, kind: str) -> int:
    """A descriptor (CLOEXEC) of a namespace (`net`, `mnt`, …) of the process that `pidfd` holds.

    Because a pid may be reused, the pidfd is checked after the namespace was opened by pid. Raises
    ProcessLookupError if the process has ended.
    """
    try:
        namespace = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise ProcessLookupError(errno.ESRCH, f"process {pid} has ended") from error
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    if poll.poll(0):
        os.close(namespace)
        raise ProcessLookupError(errno.ESRCH, f"process {pid} has ended")
    return namespace


def of_socket(descriptor: int) -> int:
    """A descriptor (CLOEXEC) of the network namespace that a socket was made in.

    The caller closes it.
    """
    return fcntl.ioctl(descriptor, _SIOCGSKNS)


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")
