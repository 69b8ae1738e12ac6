"""The systemd cgroup driver: each container is a transient scope of systemd, in a slice.

The OCI runtime asks systemd for the scope (`--systemd-cgroup`, runc(8), crun(1)), and systemd makes
and removes its cgroup. Its path follows from the names alone (systemd.slice(5)), so that the engine
reads counters, kills and freezes as with the driver `cgroupfs`. What systemd knows as a property of
the scope is changed there, because systemd writes its properties again whenever it reloads.

Owns nothing. Not here: cgroups without systemd (`cgroups.py`).
"""

from __future__ import annotations

import errno
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from engine.errors import ServerError

Driver = Literal["cgroupfs", "systemd"]

OPTION = "native.cgroupdriver="
"""The key of dockerd's `exec-opts` that chooses the driver."""
BOOTED = Path("/run/systemd/system")
"""It exists where systemd is process 1, sd_booted(3)."""
SLICE = "system.slice"
"""Parent of containers without CgroupParent, as in Docker."""

ANNOTATIONS = {
    # crun makes a cgroup `container` in the scope otherwise, and runc does not.
    "run.oci.systemd.subgroup": "",
    # A scope that has failed does not stay in systemd's list of units.
    "org.systemd.property.CollectMode": "'inactive-or-failed'",
}
"""For the configuration of a container in a scope."""

_LIFTED = {"cpu": "CPUQuota=", "pids": "TasksMax=infinity"}
_SET_SECONDS = 25
"""D-Bus' own limit of a call."""


def driver(options: Iterable[str], mode: str) -> Driver:
    """The driver that `exec-opts` name; without one, systemd on a host that it has booted with
    cgroup v2 alone (`mode`: `Cgroups.mode`), else cgroupfs: as in dockerd.

    Raises ServerError if systemd is named and is not process 1.
    """
    chosen = [each.removeprefix(OPTION) for each in options if each.startswith(OPTION)]
    booted = BOOTED.is_dir()
    if "systemd" in chosen[-1:]:
        if not booted:
            raise ServerError(
                f"--exec-opt {OPTION}systemd: systemd is not process 1 of this host ({BOOTED} is missing)"
            )
        return "systemd"
    return "systemd" if not chosen and booted and mode == "v2" else "cgroupfs"


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


def oci_path(container_id: str, parent: str) -> str:
    """`linux.cgroupsPath` of a container in a slice, as the runtimes want it: slice, prefix,
    name.
    """
    return f"{parent}:{_PREFIX}:{container_id}"


_PREFIX = "docker"
_SCOPE = re.compile(rf"{_PREFIX}-([0-9a-f]{{64}})\.scope")


def lift(container_id: str, controller: Literal["cpu", "pids"]) -> None:
    """Remove the CPU quota or the limit of processes from the properties of a scope. Blocks on
    systemd. Raises OSError.
    """
    argv = ("systemctl", "set-property", "--runtime", scope(container_id), _LIFTED[controller])
    try:
        done = subprocess.run(argv, capture_output=True, timeout=_SET_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise OSError(errno.ETIMEDOUT, f"systemd has not answered for {_SET_SECONDS} s") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise OSError(errno.EIO, said or f"systemctl ended with {done.returncode}")
