"""Open descriptors of this process and their limit, RLIMIT_NOFILE (getrlimit(2)).

A process without free descriptors cannot accept(2), so an engine that runs out of them can no
longer be asked to stop a container. Work that keeps descriptors for long checks here first, and
leaves a reserve for the API, exits and removals.

Owns nothing. Threads: any. Cost: one stat(2) since Linux 6.2, one read of a small file before.
Raises: ServerError that names the limit.
"""

from __future__ import annotations

import os
import resource

from engine.errors import ServerError

PER_START = 16
"""Descriptors that one start takes in each of daemon and monitor, including ports and transient
ones.
"""

_LEAST_RESERVE, _MOST_RESERVE = 32, 512


def reserve(limit: int) -> int:
    """The number of `limit` descriptors that starts leave free."""
    return max(_LEAST_RESERVE, min(_MOST_RESERVE, limit // 4))


def open_descriptors() -> int:
    """The number of open descriptors of this process."""
    # st_size counts since Linux 6.2
    return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))


def has_plenty() -> bool:
    """Less than half of the descriptors are in use, so some may be kept open for speed alone."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return limit == resource.RLIM_INFINITY or open_descriptors() < limit // 2


def ensure_descriptors(wanted: int) -> None:
    """Check that this process can open `wanted` more descriptors without touching the reserve.

    Raises ServerError otherwise, with the numbers and the setting to raise.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return
    most = limit - reserve(limit) - wanted
    if os.stat("/proc/self/fd").st_size == 0 and _table_size() <= most:
        return  # even if all slots were open; this saves counting, which is slow before Linux 6.2
    used = open_descriptors()
    if used > most:
        raise ServerError(
            f"too many open files: {used} of {limit} descriptors (RLIMIT_NOFILE) are in use, {wanted} more are needed "
            f"and {reserve(limit)} are kept for the API; raise LimitNOFILE of the engine's unit, or ulimit -n, "
            "and restart the engine"
        )


def _table_size() -> int:
    """Slots of this process's descriptor table, an upper bound of what is open (FDSize in
    proc_pid_status(5)).
    """
    with open("/proc/self/status", "rb") as status:
        for line in status:
            if line.startswith(b"FDSize:"):
                return int(line.split()[1])
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
