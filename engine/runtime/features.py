"""What an OCI runtime can do, as its command `features` says (OCI runtime specification, "Features
Structure"). runc has it since 1.1, crun since 1.9.

Blocking: one process per runtime, the first time.
"""

from __future__ import annotations

import functools
import re
import subprocess

import msgspec

from engine.runtime.oci import COMMAND_SECONDS, Runtime

_CRUN = (1, 4)
"""The first crun with recursive mount options."""


class _Features(msgspec.Struct, frozen=True, rename="camel"):
    mount_options: frozenset[str] = frozenset()


def recursive_read_only(runtime: Runtime) -> bool:
    """True if it knows the mount option `rro`: read-only with the mounts below."""
    return _knows(runtime.path, runtime.name, runtime.version, "rro")


@functools.cache
def _knows(path: str, name: str, version: str, option: str) -> bool:
    try:
        done = subprocess.run(
            [path, "features"], stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_SECONDS, check=True
        )
        return option in msgspec.json.decode(done.stdout, type=_Features).mount_options
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError):
        numbers = re.match(r"(\d+)\.(\d+)", version)
        return name == "crun" and numbers is not None and (int(numbers[1]), int(numbers[2])) >= _CRUN


__all__ = ["recursive_read_only"]
