"""The systemd cgroup driver: each container is a transient scope of systemd, in a slice.

The OCI runtime asks systemd for the scope (`--systemd-cgroup`, runc(8), crun(1)), and systemd makes
and removes its cgroup. Its path follows from the names alone (systemd.slice(5)), so that the engine
reads counters, kills and freezes as with the driver `cgroupfs`.

Owns nothing. Not here: limits (`scope_limits.py`), cgroups without systemd (`cgroups.py`).
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from engine.errors import ServerError, reason

Driver = Literal["cgroupfs", "systemd"]

OPTION = "native.cgroupdriver="
"""The key of dockerd's `exec-opts` that chooses the driver."""
BOOTED = Path("/run/systemd/system")
"""It exists where systemd is process 1, sd_booted(3)."""
BUS = Path("/run/dbus/system_bus_socket")
"""By which the runtimes ask systemd (package dbus)."""
SLICE = "system.slice"
"""Parent of containers without CgroupParent, as in Docker."""


def driver(options: Iterable[str], mode: str) -> Driver:
    """The driver that `exec-opts` name; without one, systemd where it is process 1 and the host has
    cgroup v2 alone (`mode`: `Cgroups.mode`), else cgroupfs: as in dockerd.

    Raises ServerError if systemd is named and this host lacks what the driver needs.
    """
    chosen = [each.removeprefix(OPTION) for each in options if each.startswith(OPTION)]
    missing = lacks()
    if "systemd" in chosen[-1:] and missing:
        raise ServerError(f"--exec-opt {OPTION}systemd: {missing}")
    if chosen:
        return "systemd" if chosen[-1] == "systemd" else "cgroupfs"
    return "systemd" if mode == "v2" and not missing else "cgroupfs"


def lacks() -> str:
    """What this host lacks for the driver systemd; empty if it has everything."""
    if not BOOTED.is_dir():
        return f"systemd is not process 1 of this host ({BOOTED} is missing)"
    with socket.socket(socket.AF_UNIX) as bus:
        bus.setblocking(False)
        try:
            bus.connect(str(BUS))
        except BlockingIOError:  # others wait for it, too
            return ""
        except OSError as error:
            return f"the system's D-Bus does not run ({BUS}: {reason(error)}): apt install dbus"
    return ""


def check_parent(parent: str) -> None:
    """Raises ValueError for a CgroupParent that is not the name of a slice, with Docker's words."""
    if _NAME.fullmatch(parent) is None or len(parent) > _LONGEST:
        raise ValueError(
            f'{parent[:100]!r}: cgroup-parent for systemd cgroup should be a valid slice named as "xxx.slice"'
        )


_NAME = re.compile(r"-\.slice|[\w:.\\]+(?:-[\w:.\\]+)*\.slice", re.ASCII)
_LONGEST = 255
"""Characters of a unit's name, systemd.unit(5)."""


def directory(parent: str) -> str:
    """The cgroup of a slice: `/a.slice/a-b.slice` for `a-b.slice`, and the root for `-.slice`."""
    words = parent.removesuffix(".slice").split("-") if parent != "-.slice" else []
    return "".join(f"/{'-'.join(words[:count])}.slice" for count in range(1, len(words) + 1))


def scope(container_id: str) -> str:
    """The name of a container's unit. It is Docker's, by which monitoring knows containers."""
    return f"{_PREFIX}-{container_id}.scope"


def container_id(unit: str) -> str:
    """The id that a unit's name has; the name itself if it has none."""
    match = _SCOPE.fullmatch(unit)
    return match[1] if match else unit


def is_scope(cgroup: str) -> bool:
    """Returns True if a control group, given by its path, is that of a container's unit."""
    return _SCOPE.fullmatch(cgroup.rpartition("/")[2]) is not None


def was_away(reason: str) -> bool:
    """Returns True if a runtime could not make a scope because systemd or D-Bus was being started
    again, by its message. Its call may have had its effect.
    """
    return any(text in reason for text in _AWAY)


_AWAY = (
    "disconnected from message bus",  # by dbus-daemon: systemd left before it answered
    "Remote peer disconnected",  # the same by dbus-broker
    "Process org.freedesktop.systemd1 exited",  # by dbus-daemon: systemd is not there
    "onnection reset by peer",
    "connection closed by user",  # by runc: dbus has left
    "cannot open sd-bus",  # by crun: dbus is not there
)


def oci_path(container_id: str, parent: str) -> str:
    """`linux.cgroupsPath` of a container in a slice, as the runtimes want it: slice, prefix,
    name.
    """
    return f"{parent}:{_PREFIX}:{container_id}"


_PREFIX = "docker"
_SCOPE = re.compile(rf"{_PREFIX}-([0-9a-f]{{64}})\.scope")
