"""What one start has prepared on the host: the input of the files for the runtime (`spec.py`,
`bundle.py`) and of the runtime's process (`launch.py`).

Not here: how it is prepared (`launch.py`, `sharing.py`, `extra_mounts.py`). No behaviour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.config import Config
from engine.containers.defaults import DOCKERS, Defaults
from engine.containers.sharing import Joined
from engine.logs.targets import Target
from engine.runtime.cgroups import Cgroups
from engine.runtime.oci import Runtime
from engine.system.detached_mounts import NewFile, Tree
from engine.wire import oci
from engine.wire.containers import EndpointSettings


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """The root of a run and its extra mounts (`extra_mounts.py`), on their way into it."""

    root: Path
    """Where the runtime finds the container's root."""
    beside: Sequence[Tree | NewFile] = ()
    """For `Snapshots.shown`."""
    mounts: Mapping[str, oci.Mount] = {}
    """For the runtime, by destination."""
    here: Mapping[str, str] = {}
    """By destination: the source's path for this process; empty when it has none."""
    directories: frozenset[str] = frozenset()
    """The destinations that are directories."""
    environment: tuple[str, ...] = ()
    """Further variables of the process: `name=value`."""
    sandbox: bool = False
    """An `extra_mounts.Sandbox` is among them."""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of one start of a container that its record does not hold."""

    directory: Path
    """Holds hosts, hostname, resolv.conf."""
    bundle: Path
    """For config.json: `directory`, or one below RUN if config.json has secrets."""
    rootfs: str
    """The container's root as seen from here."""
    placed: Placed
    network: str | None
    """Path of its network namespace; empty: a fresh one without links; None: the host's."""
    networks: Mapping[str, EndpointSettings] = {}
    """Its endpoints, for its hosts file."""
    user: str = ""
    """Path of its user namespace; empty: a fresh one, if the record has ids for it."""
    joined: Joined = Joined()
    sources: Mapping[str, str] = {}
    """Sources by destination, for mounts that the runtime does not find at their `Source`."""
    runtime: Runtime
    cgroups: Cgroups
    config: Config = Config()
    defaults: Defaults = DOCKERS


@dataclass(frozen=True, kw_only=True)
class Program:
    """A process for the runtime to create, whatever its purpose."""

    key: str
    """Its unique name for the runtime and for the monitor."""
    bundle: Path
    """The directory of its config.json (OCI runtime specification, "Filesystem Bundle"); its root
    there is RUN/root."""
    cgroup: str
    """Its control group, from the root of each hierarchy; removed when the launch fails."""
    scope: bool = False
    """systemd makes the control group (`runtime/scopes.py`)."""
    runtime: Runtime | None = None
    """None: the engine's default."""
    tty: bool = False
    open_stdin: bool = False
    stdin_once: bool = False
    size: Sequence[int] = (0, 0)
    """Rows and columns of its terminal; zeros: the kernel's default."""
    owner: tuple[int, int] | None = None
    """uid and gid of its stdio on the host; None: root."""
    log: Target | None = None
    """None: its output goes to attached clients alone."""
