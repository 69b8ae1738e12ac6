"""Linux capabilities by name: those of the kernel, of this engine, and of a container.

Rules: capabilities(7); Docker's default set of fourteen; CapAdd and CapDrop as `docker run`
documents them. Capabilities outside the engine's own bounding set are not granted, because the
runtime would fail. Even root may lack some, such as CAP_SYS_RESOURCE if the host is itself a
container.

Not here: the seccomp rules that depend on capabilities (`seccomp.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, lru_cache
from pathlib import Path

from engine.errors import InvalidParameter


def _prefixed(text: str) -> tuple[str, ...]:
    return tuple(f"CAP_{name}" for name in text.split())


NAMES = _prefixed("""
    CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE
    NET_BIND_SERVICE NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT
    SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE
    AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ
    PERFMON BPF CHECKPOINT_RESTORE
""")
"""In the kernel's order: a name's index is its bit (include/uapi/linux/capability.h)."""

DEFAULT = _prefixed("""
    CHOWN DAC_OVERRIDE FSETID FOWNER MKNOD NET_RAW SETGID SETUID SETFCAP SETPCAP NET_BIND_SERVICE SYS_CHROOT
    KILL AUDIT_WRITE
""")

ALL = "ALL"


def from_mask(mask: int) -> frozenset[str]:
    """The known names of a mask as in /proc/PID/status; bits newer than this table are ignored."""
    return frozenset(name for bit, name in enumerate(NAMES) if mask >> bit & 1)


@cache
def bounding() -> frozenset[str]:
    """The engine's own bounding set: the most that any container can get."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapBnd:"):
            return from_mask(int(line.split()[1], 16))
    return frozenset()


def granted(
    add: Iterable[str] = (),
    drop: Iterable[str] = (),
    *,
    privileged: bool = False,
    limit: frozenset[str] | None = None,
) -> tuple[str, ...]:
    """The container's capabilities, in the kernel's order. `limit` is the engine's bounding set
    when not given.

    Raises InvalidParameter for an unknown name. Capabilities that the engine itself lacks are left
    out, because otherwise a missing default capability would make every container fail. Docker does
    the same for `ALL` and `--privileged`.
    """
    added = frozenset(_normal(name, "CapAdd") for name in add)
    dropped = frozenset(_normal(name, "CapDrop") for name in drop)
    return _granted(added, dropped, privileged, bounding() if limit is None else limit)


@lru_cache(64)
def _granted(
    added: frozenset[str], dropped: frozenset[str], privileged: bool, limit: frozenset[str]
) -> tuple[str, ...]:
    wanted: frozenset[str] | set[str]
    if privileged:
        wanted = set(NAMES)
    elif ALL in added:
        wanted = set(NAMES) - dropped
    elif ALL in dropped:
        wanted = added
    else:
        wanted = set(DEFAULT) - dropped | added
    return tuple(name for name in NAMES if name in wanted and name in limit)


def check(add: Iterable[str], drop: Iterable[str], limit: frozenset[str] | None = None) -> None:
    """Raises InvalidParameter for an unknown name, and for an added capability that this engine
    lacks.
    """
    available = bounding() if limit is None else limit
    for name in add:
        if (full := _normal(name, "CapAdd")) not in (ALL, *available):
            raise InvalidParameter(
                "invalid CapAdd: capability not supported by your kernel or not available in the current environment: "
                f'"{full}"'
            )
    for name in drop:
        _normal(name, "CapDrop")


def _normal(name: str, field: str) -> str:
    upper = name.upper()
    if upper == ALL:
        return ALL
    full = upper if upper.startswith("CAP_") else f"CAP_{upper}"
    if full not in NAMES:
        raise InvalidParameter(f'invalid {field}: unknown capability: "{full}"')
    return full
