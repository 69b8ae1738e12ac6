"""What the log drivers need to know of a container and its host. The daemon fills it in at each
start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """`name`: without the leading slash. `image_id`: with its algorithm. `image_name`: as the
    container's create named it. `created`: nanoseconds since the epoch. `environment`: `NAME=value`
    of its configuration.

    `hostname`: the host's. `pid`: the daemon's. `journal`: the host has systemd's journal.
    `region`: AWS_REGION of the daemon. `log_path`: file of a log that the monitor keeps (drivers
    json-file and local). `spool`: directory of a log that is delivered to a remote target. `fifo`:
    path at which a log plugin's entries of this container are written.
    """

    id: str
    name: str = ""
    image_id: str = ""
    image_name: str = ""
    path: str = ""
    args: Sequence[str] = ()
    created: int = 0
    labels: Mapping[str, str] = {}
    environment: Sequence[str] = ()
    hostname: str = ""
    pid: int = 0
    journal: bool = True
    region: str = ""
    log_path: str = ""
    spool: str = ""
    fifo: str = ""

    @property
    def command(self) -> str:
        """The program and its arguments, separated by spaces."""
        return " ".join((self.path, *self.args))
