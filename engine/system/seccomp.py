"""seccomp filters: a profile compiled to classic BPF with libseccomp, once, in process.

The OCI runtimes can compile profiles too, but do so for every container, which is more than half of
a start (measured with crun 1.8.1: 23 ms with Docker's profile, 8 ms without, 9 ms with a ready
program). libseccomp also knows only the system calls of its release. A C library treats EPERM from
a newer call as an error, but falls back on ENOSYS (chmod in current images calls fchmodat2). So a
short program before libseccomp's own decides the calls that libseccomp does not know: allowed by
number, or ENOSYS.

Raises: OSError; `available()` says whether the library is there. Not here: which calls a container
        may make (`runtime/seccomp.py`).
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

ALLOW = 0x7FFF0000
ERRNO = 0x00050000
ENOSYS = 38

NEWER = {
    "process_mrelease": 448,
    "futex_waitv": 449,
    "set_mempolicy_home_node": 450,
    "cachestat": 451,
    "fchmodat2": 452,
    "map_shadow_stack": 453,
    "futex_wake": 454,
    "futex_wait": 455,
    "futex_requeue": 456,
    "statmount": 457,
    "listmount": 458,
    "lsm_get_self_attr": 459,
    "lsm_set_self_attr": 460,
    "lsm_list_modules": 461,
    "mseal": 462,
    "setxattrat": 463,
    "getxattrat": 464,
    "listxattrat": 465,
    "removexattrat": 466,
    "open_tree_attr": 467,
    "file_getattr": 468,
    "file_setattr": 469,
}
"""Numbers above 423 are the same on every architecture (Linux,
Documentation/process/adding-syscalls.rst). Ascending, without a gap.
"""

X32 = 0x40000000
"""The bit of the numbers of x32."""
ARM_PRIVATE = 0xF0000
"""The first of the numbers that 32-bit ARM has beside the common table: `set_tls`, which every
program begins with, `cacheflush` and others (Linux, arch/arm/include/uapi/asm/unistd.h). No table
reaches it.
"""
_AUDIT_ARCHES = {
    "SCMP_ARCH_X86_64": 0xC000003E,
    "SCMP_ARCH_X86": 0x40000003,
    "SCMP_ARCH_AARCH64": 0xC00000B7,
    "SCMP_ARCH_ARM": 0x40000028,
}
_ARCH_TOKENS = {**_AUDIT_ARCHES, "SCMP_ARCH_X32": 0x4000003E}

_CTL_OPTIMIZE = 8
_BINARY_TREE = 2
_UNRESOLVED = -1
_EEXIST = 17
_ERRNO_SAME_ACTION = 13
"""EACCES: the rule repeats the default action."""

_COMPARE = {
    "SCMP_CMP_NE": 1,
    "SCMP_CMP_LT": 2,
    "SCMP_CMP_LE": 3,
    "SCMP_CMP_EQ": 4,
    "SCMP_CMP_GE": 5,
    "SCMP_CMP_GT": 6,
    "SCMP_CMP_MASKED_EQ": 7,
}


class Condition(NamedTuple):
    """An argument of the call compared with a number, in the words of the OCI specification."""

    argument: int
    value: int
    op: str
    value_two: int = 0


class Rule(NamedTuple):
    """The action for these calls if all conditions hold: fail with `errno`, or allow if it is
    None.
    """

    names: Sequence[str]
    conditions: Sequence[Condition] = ()
    errno: int | None = None


class _ArgCompare(ctypes.Structure):
    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


@cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        return None
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_init.argtypes = (ctypes.c_uint32,)
    library.seccomp_release.argtypes = (ctypes.c_void_p,)
    library.seccomp_arch_add.argtypes = (ctypes.c_void_p, ctypes.c_uint32)
    library.seccomp_attr_set.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32)
    library.seccomp_syscall_resolve_name.argtypes = (ctypes.c_char_p,)
    library.seccomp_rule_add_array.argtypes = (
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_int,
        ctypes.c_uint,
        ctypes.POINTER(_ArgCompare),
    )
    library.seccomp_export_bpf.argtypes = (ctypes.c_void_p, ctypes.c_int)
    return library


def available() -> bool:
    """True if filters can be compiled here."""
    return _library() is not None


def program(rules: Iterable[Rule], *, default_errno: int, architectures: Sequence[str]) -> bytes:
    """The filter as an array of `struct sock_filter`, ready for seccomp(2).

    Calls without a rule fail with `default_errno`.
    """
    library = _library()
    if library is None:
        raise FileNotFoundError("libseccomp.so.2 is not installed")
    context = library.seccomp_init(ERRNO | default_errno)
    if not context:
        raise OSError("seccomp_init failed")
    beyond: dict[int, int] = {}
    try:
        for name in architectures:
            if (token := _ARCH_TOKENS.get(name)) is not None:
                _check(library.seccomp_arch_add(context, token), f"architecture {name}", ignore=(_EEXIST,))
        library.seccomp_attr_set(context, _CTL_OPTIMIZE, _BINARY_TREE)
        for rule in rules:
            action = ALLOW if rule.errno is None else ERRNO | rule.errno
            conditions = (_ArgCompare * len(rule.conditions))(
                *(_ArgCompare(test.argument, _COMPARE[test.op], test.value, test.value_two) for test in rule.conditions)
            )
            for name in rule.names:
                number = library.seccomp_syscall_resolve_name(name.encode())
                if number != _UNRESOLVED:
                    result = library.seccomp_rule_add_array(context, action, number, len(conditions), conditions)
                    _check(result, f"rule for {name}", ignore=(_ERRNO_SAME_ACTION,))
                elif name in NEWER and not rule.conditions:
                    beyond[NEWER[name]] = action
        descriptor = os.memfd_create("seccomp", os.MFD_CLOEXEC)
        try:
            _check(library.seccomp_export_bpf(context, descriptor), "export")
            body = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        finally:
            os.close(descriptor)
    finally:
        library.seccomp_release(context)
    return _prologue(beyond, _first_unknown(library), architectures) + body


def _first_unknown(library: ctypes.CDLL) -> int:
    """The lowest number from which on libseccomp knows no calls."""
    known = [number for name, number in NEWER.items() if library.seccomp_syscall_resolve_name(name.encode()) >= 0]
    return max(known) + 1 if known else min(NEWER.values())


# classic BPF (linux/filter.h, linux/bpf_common.h): load a word, jump by comparison (offsets count
# from the next instruction), return
_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _RETURN = 0x20, 0x15, 0x35, 0x06
_OFFSET_NUMBER, _OFFSET_ARCH = 0, 4


def _prologue(actions: Mapping[int, int], first: int, architectures: Sequence[str]) -> bytes:
    """A program that decides calls numbered `first` and above on the architectures of the filter.
    Other calls, those of x32 and ARM's private ones among them, continue with the filter that
    follows it.
    """
    beyond = ARM_PRIVATE if "SCMP_ARCH_ARM" in architectures else X32
    arches = [_AUDIT_ARCHES[name] for name in architectures if name in _AUDIT_ARCHES]
    if not arches:
        return b""
    tail: list[tuple[int, int, int, int]] = [(_LOAD, 0, 0, _OFFSET_NUMBER)]
    decisions = sorted((number, action) for number, action in actions.items() if number >= first)
    size = 2 * len(decisions) + 1
    tail.append((_JUMP_GREATER_EQUAL, size + 1, 0, beyond))
    tail.append((_JUMP_GREATER_EQUAL, 0, size, first))
    for number, action in decisions:
        tail.append((_JUMP_EQUAL, 0, 1, number))
        tail.append((_RETURN, 0, 0, action))
    tail.append((_RETURN, 0, 0, ERRNO | ENOSYS))
    head: list[tuple[int, int, int, int]] = [(_LOAD, 0, 0, _OFFSET_ARCH)]
    for position, arch in enumerate(arches):
        others = len(arches) - position - 1
        head.append((_JUMP_EQUAL, others, len(tail) if others == 0 else 0, arch))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in (*head, *tail))


def _check(result: int, what: str, *, ignore: Sequence[int] = ()) -> None:
    if result < 0 and -result not in ignore:
        raise OSError(-result, f"libseccomp, {what}: {os.strerror(-result)}")
