"""The containers on disk: one record each, replaced whole. The only code that touches those rows.

A record is intent and the last known state; what really runs is the monitor's to say (`container.py` corrects the one by the other at start).

Records and what they are made of are `gc=False`: they are trees, and a full collection that walks those of thousands of containers holds the loop up.
"""

from __future__ import annotations

import msgspec

from engine.containers.lifecycle import State
from engine.networks.ports import Published
from engine.storage.records import Change, Records
from engine.wire.containers import Config, EndpointSettings, HostConfig, MountPoint


class HealthResult(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What one probe said; times in ns since the epoch, `exit_code` -1 when it could not run or took too long."""

    start: int
    end: int
    exit_code: int
    output: str


class Health(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """How a running container does by its own test: `starting`, `healthy` or `unhealthy`, and the last results, oldest first."""

    status: str
    failing_streak: int = 0
    log: tuple[HealthResult, ...] = ()


class Status(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True):
    """The moving part of a record; times in ns since the epoch, 0 for never."""

    state: State = State.CREATED
    pid: int = 0
    exit_code: int = 0
    error: str = ""
    oom_killed: bool = False
    started_at: int = 0
    finished_at: int = 0
    health: Health | None = None
    """None without a test. Made durable when its status changes, so that after a crash the newest results may be missing."""


class ContainerRecord(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True):
    """Everything that is kept of one container. `config` and `host` are as the client gave them, merged with the image's and normalised."""

    id: str
    name: str
    created: int
    image_id: str
    parent: str
    """chain_id of the image's topmost layer; empty for an image without layers."""
    path: str
    args: tuple[str, ...]
    config: Config
    host: HostConfig
    networks: dict[str, EndpointSettings] = msgspec.field(default_factory=dict)
    """By network name: what was asked for and, while the container runs, what it got."""
    ports: tuple[Published, ...] = ()
    """What it got of the ports that it wants to be reached at, while it runs."""
    mounts: tuple[MountPoint, ...] = ()
    links: dict[str, str] = {}
    """Alias to id of each container that it is linked to on the default bridge."""
    link_hosts: tuple[str, ...] = ()
    """Lines of its hosts file for those, as of its last start; `link_environment` likewise."""
    link_environment: tuple[str, ...] = ()
    status: Status = Status()
    restart_count: int = 0
    stopped_by_user: bool = False
    size: tuple[int, int] = (0, 0)
    """Rows and columns of the terminal for the next start."""


class ContainerStore:
    """Containers in the engine's records."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._table = records.table("container", ContainerRecord)

    def load(self) -> dict[str, ContainerRecord]:
        """All of them, by id; at start, before anything else runs."""
        return self._table.load()

    async def save(self, record: ContainerRecord, *more: Change) -> None:
        """Make the record durable, with `more` in one transaction."""
        await self._records.commit(self._table.put(record.id, record), *more)

    async def delete(self, container_id: str, *more: Change) -> None:
        await self._records.commit(self._table.delete(container_id), *more)
