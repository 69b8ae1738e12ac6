"""The features of an OCI runtime, from its command `features` (OCI runtime specification, "Features
Structure"). runc has it since 1.1, crun since 1.9.

Blocking: each reading executes the runtime. `recursive_read_only` does so only the first time.
"""

from __future__ import annotations

import functools
import re

import msgspec

from engine.runtime.oci import Runtime, output

_LONGEST = 1 << 20
"""Bytes of features that are read."""

_CRUN = (1, 4)
"""The first crun with recursive mount options."""
_TMPFS_MASKS = (1, 8), (1, 24)
"""The first crun whose masks were tried as mounts, and the first that mounts one empty directory
itself (crun's pull request 1859).
"""


class _Features(msgspec.Struct, frozen=True, rename="camel"):
    mount_options: frozenset[str] = frozenset()


def read(*program: str) -> str:
    """The JSON object that `RUNTIME features` writes, on one line; empty for a runtime without that
    command. `program`: with its arguments.
    """
    text = output(*program, "features")
    try:
        found = msgspec.json.decode(text) if len(text) <= _LONGEST else None
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return ""
    return msgspec.json.encode(found).decode() if isinstance(found, dict) else ""


def recursive_read_only(runtime: Runtime) -> bool:
    """True if it knows the mount option `rro`: read-only with the mounts below."""
    return _knows(runtime.command, runtime.implementation, runtime.version, "rro")


def masks_by_tmpfs(runtime: Runtime) -> bool:
    """True if it mounts a tmpfs over each masked directory, and takes a mount there instead. runc
    takes none inside of /proc.
    """
    first, last = _TMPFS_MASKS
    return runtime.implementation == "crun" and first <= _number(runtime.version) < last


def _number(version: str) -> tuple[int, int]:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers is not None else (0, 0)


@functools.cache
def _knows(program: tuple[str, ...], implementation: str, version: str, option: str) -> bool:
    try:
        return option in msgspec.json.decode(read(*program), type=_Features).mount_options
    except msgspec.DecodeError:
        return implementation == "crun" and _number(version) >= _CRUN


__all__ = ["masks_by_tmpfs", "read", "recursive_read_only"]
