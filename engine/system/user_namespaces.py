"""User namespaces: maps of ids, namespaces that have them, and the ids that a thread makes files
with.

`IdMap` is a value: the ids of containers that run in a user namespace, and the host's ids that they
stand for. A namespace exists while a process, another namespace or a descriptor refers to it.

Rules: user_namespaces(7), "User and group ID mappings".
Not here: the files that name the ranges (runtime/subordinate.py), ID-mapped mounts
(detached_mounts.py). Raises: OSError with the kernel's errno, unless a function says otherwise.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator

import msgspec

from engine._fast import spawn
from engine.errors import InvalidParameter

IdRanges = tuple[tuple[tuple[int, int, int], ...], tuple[tuple[int, int, int], ...]]
"""Ranges of uids and gids for `_fast`: the first id, what it becomes, and their number."""

OVERFLOW = 65534
"""The id that the kernel shows for one without a mapping (/proc/sys/kernel/overflowuid)."""

_NS_GET_USERNS = 0xB701
"""ioctl_ns(2)."""
_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4
_PR_GET_SECUREBITS, _PR_SET_SECUREBITS = 27, 28
_NO_SETUID_FIXUP = 4
"""SECBIT_NO_SETUID_FIXUP, capabilities(7): a change of the thread's ids keeps its capabilities."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.setfsuid.argtypes = _libc.setfsgid.argtypes = (ctypes.c_uint32,)
_libc.setfsuid.restype = _libc.setfsgid.restype = ctypes.c_uint32
_DUMPABLE = _libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0)
_INVALID = (1 << 32) - 1


class Range(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """`count` ids from `inside` on stand for the host's from `outside` on."""

    inside: int
    outside: int
    count: int


class IdMap(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Ids inside of a namespace and their counterparts on the host. Id 0 is always mapped."""

    uids: tuple[Range, ...]
    gids: tuple[Range, ...]

    @property
    def root(self) -> tuple[int, int]:
        """uid and gid on the host of the namespace's root."""
        return self.outside(0, 0)

    def check(self, uids: Iterable[int], gids: Iterable[int]) -> None:
        """Raises InvalidParameter for an id that has no counterpart on the host."""
        for kind, ranges, numbers in (("uid", self.uids, uids), ("gid", self.gids, gids)):
            for number in numbers:
                if not any(each.inside <= number < each.inside + each.count for each in ranges):
                    count = sum(each.count for each in ranges)
                    raise InvalidParameter(
                        f"{kind} {number} cannot be mapped to a host ID: user namespaces have {count} {kind}s here"
                    )

    def outside(self, uid: int, gid: int) -> tuple[int, int]:
        """The host's ids of a namespace's; `OVERFLOW` for one without a mapping."""
        return _outside(self.uids, uid), _outside(self.gids, gid)

    @property
    def outward(self) -> IdRanges:
        """For `layer.unpack`: from the ids inside to those of the host."""
        return tuple(map(_plain, self.uids)), tuple(map(_plain, self.gids))

    @property
    def inward(self) -> IdRanges:
        """For `pack.Packer`: from the host's ids to those inside."""
        return tuple(map(_reverse, self.uids)), tuple(map(_reverse, self.gids))

    def namespace(self) -> int:
        """A descriptor (CLOEXEC) of a new user namespace with this map."""
        return self._made(network=False)[0]

    def network(self) -> int:
        """A descriptor (CLOEXEC) of a new network namespace, whose owner is a new user namespace
        with this map (`owner`).
        """
        user, network = self._made(network=True)
        os.close(user)
        return network

    def _made(self, *, network: bool) -> tuple[int, int]:
        try:
            return spawn.user_namespace(_text(self.uids), _text(self.gids), network)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EUSERS):
                raise
            limits = "user.max_user_namespaces or user.max_net_namespaces"
            raise OSError(error.errno, f"the limit of user namespaces is reached: {limits}") from error


def _plain(each: Range) -> tuple[int, int, int]:
    return each.inside, each.outside, each.count


def _reverse(each: Range) -> tuple[int, int, int]:
    return each.outside, each.inside, each.count


def _outside(ranges: tuple[Range, ...], number: int) -> int:
    for each in ranges:
        if each.inside <= number < each.inside + each.count:
            return each.outside + number - each.inside
    return OVERFLOW


def _text(ranges: tuple[Range, ...]) -> bytes:
    return "".join(f"{each.inside} {each.outside} {each.count}\n" for each in ranges).encode()


def owner(namespace: int) -> int:
    """A descriptor (CLOEXEC) of the user namespace that owns another namespace."""
    return fcntl.ioctl(namespace, _NS_GET_USERNS)


@contextlib.contextmanager
def files_of(uid: int, gid: int) -> Iterator[None]:
    """Within the block the calling thread makes files with these ids, and keeps its capabilities.

    Below an ID-mapped mount root cannot make files otherwise: its own id has no counterpart on the
    disk, which is EOVERFLOW. An overlay keeps the ids of the thread that has mounted it, for what
    it makes by itself (overlayfs.rst, "Permission model").

    A thread that changes these ids makes its process undumpable (prctl(2), PR_SET_DUMPABLE): it
    dumps no core, and a debugger needs CAP_SYS_PTRACE. The end of the block undoes this, too.
    """
    bits = _libc.prctl(_PR_GET_SECUREBITS, 0, 0, 0, 0)
    if bits < 0 or _libc.prctl(_PR_SET_SECUREBITS, bits | _NO_SETUID_FIXUP, 0, 0, 0) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"making files as user {uid}: {os.strerror(number)}")
    before: list[tuple[Callable[[int], int], int]] = []
    try:
        for change, wanted in ((_libc.setfsuid, uid), (_libc.setfsgid, gid)):
            before.append((change, change(wanted)))
            # It has no error; a wrong id changes nothing and is returned (setfsuid(2)).
            if change(_INVALID) != wanted:
                raise PermissionError(errno.EPERM, f"making files as user {uid}: it is not permitted")
        yield
    finally:
        for back, number in reversed(before):
            back(number)
        _libc.prctl(_PR_SET_SECUREBITS, bits, 0, 0, 0)
        _libc.prctl(_PR_SET_DUMPABLE, _DUMPABLE, 0, 0, 0)
