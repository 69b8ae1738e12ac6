"""The containers on disk: one record each, replaced whole. The only code that touches those rows.

A record holds the intent and the last known state. The monitor knows what really runs;
`container.py` corrects the records at start.

Records and their parts are `gc=False`: they are trees, and a full garbage collection over thousands
of them would block the loop.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.containers.lifecycle import State
from engine.errors import NotFound
from engine.networks.ports import Published
from engine.storage.records import Change, Records
from engine.system.user_namespaces import IdMap
from engine.wire.containers import Config, EndpointSettings, HostConfig, MountPoint


class HealthResult(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The result of one probe; times in ns since the epoch, `exit_code` -1 when it could not run or
    timed out.
    """

    start: int
    end: int
    exit_code: int
    output: str


class Health(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The health of a running container by its own test: `starting`, `healthy` or `unhealthy`, and
    the last results, oldest first.
    """

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
    """None without a test. Saved when its status changes, so that after a crash the newest results
    may be missing."""
    killed_by: int = 0
    """The last signal that a client sent to this run: an exit by it counts as the user's."""


class MountOptions(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True):
    """How a volume or bind is mounted, beyond what its MountPoint shows."""

    shallow: bool = False
    """A bind without the mounts below its source."""
    read_only: Literal["", "recursive", "forced"] = ""
    """If it is read-only: `recursive` makes the mounts below it read-only too where the runtime
    can, `forced` fails where it cannot."""
    subpath: str = ""
    """The part of a volume that is mounted, relative to the volume; empty: all of it."""


class ImageMount(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True):
    """An image's content as a read-only mount."""

    destination: str
    name: str
    """The image as the client named it."""
    image_id: str
    chain_id: str
    """Its topmost layer; empty for an image without layers. The container retains it."""
    subpath: str = ""
    """The part of the image that is mounted; empty: all of it."""


class ContainerRecord(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True):
    """The record of one container.

    `config` and `host` are the client's, merged with the image's and normalised.
    """

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
    runtime: str = ""
    """The name of the runtime that makes its processes. `host.runtime` is the one that clients see.
    """
    ids: IdMap | None = None
    """Of its user namespace, as of its last start; None without one."""
    cgroup_parent: str = ""
    """The operator's default, as of its last start, which holds where its HostConfig has none."""
    cgroup_driver: str = ""
    """As of its last start, a `scopes.Driver`; empty: cgroupfs."""
    networks: dict[str, EndpointSettings] = msgspec.field(default_factory=dict)
    """By network name: the requested settings and, while the container runs, its addresses."""
    macs: dict[str, str] = {}
    """Requested MAC addresses, by network name."""
    ports: tuple[Published, ...] = ()
    """Its published ports while it runs."""
    mounts: tuple[MountPoint, ...] = ()
    """Volumes and binds."""
    mount_options: dict[str, MountOptions] = {}
    """Of those, by destination, where they are not the default."""
    image_mounts: tuple[ImageMount, ...] = ()
    links: dict[str, str] = {}
    """Alias → id of each container that it is linked to on the default bridge."""
    link_hosts: tuple[str, ...] = ()
    """Lines of its hosts file for those, as of its last start; `link_environment` likewise."""
    link_environment: tuple[str, ...] = ()
    status: Status = Status()
    restart_count: int = 0
    """Restarts by the policy since a user started it. In state RESTARTING it counts the restart
    that is to come."""
    stopped_by_user: bool = False
    size: tuple[int, int] = (0, 0)
    """Rows and columns of the terminal for the next start."""

    @property
    def parent_cgroup(self) -> str:
        """The parent of its cgroup; empty for the engine's own."""
        return self.host.cgroup_parent or self.cgroup_parent

    def requested_macs(self, main: str) -> dict[str, str]:
        """Requested MAC addresses by network name; `main` is the network of NetworkMode.

        Records of earlier versions of this engine have that one's in Config.
        """
        older = self.config.mac_address
        return {main: older} | self.macs if isinstance(older, str) and older else self.macs


class ContainerStore:
    """Containers in the engine's records.

    Knows which have a row: one that was deleted cannot be saved again. A *transient* container
    counts as having one, but is in memory alone until `keep`: the next daemon does not know it.
    """

    def __init__(self, records: Records) -> None:
        self._records = records
        self._table = records.table("container", ContainerRecord)
        self._rows: set[str] = set()
        self._transient: set[str] = set()

    def load(self) -> dict[str, ContainerRecord]:
        """All of them, by id; at start, before anything else runs."""
        found = self._table.load()
        self._rows = set(found)
        return found

    def __contains__(self, container_id: str) -> bool:
        """True from `add` until `delete`, in the order in which they reach the database."""
        return container_id in self._rows

    def transient(self, container_id: str) -> bool:
        """True if the container is in memory alone."""
        return container_id in self._transient

    async def keep(self, record: ContainerRecord) -> None:
        """The first row of a transient container. Not to be cancelled."""
        if record.id in self._transient:
            await self._records.commit(self._table.put(record.id, record))
            self._transient.discard(record.id)

    async def add(self, record: ContainerRecord, *more: Change, transient: bool = False) -> None:
        """The first row of a container, with `more` in one transaction; only `more` if it is
        transient.

        Not to be cancelled: the row would be written all the same.
        """
        self._rows.add(record.id)
        if transient:
            self._transient.add(record.id)
        try:
            await self._records.commit(*self._own(record), *more)
        except BaseException:
            self._rows.discard(record.id)
            self._transient.discard(record.id)
            raise

    def _own(self, record: ContainerRecord) -> tuple[Change, ...]:
        return () if record.id in self._transient else (self._table.put(record.id, record),)

    async def save(self, record: ContainerRecord, *more: Change) -> None:
        """Replace the row, with `more` in one transaction.

        Raises NotFound when it was deleted, ServerError.
        """
        if record.id not in self._rows:
            raise NotFound(f"No such container: {record.id}")
        await self._records.commit(*self._own(record), *more)

    async def delete(self, container_id: str, *more: Change) -> None:
        """Remove the row, with `more` in one transaction. Not to be cancelled."""
        self._rows.discard(container_id)
        own = () if container_id in self._transient else (self._table.delete(container_id),)
        try:
            await self._records.commit(*own, *more)
        except BaseException:
            self._rows.add(container_id)
            raise
        self._transient.discard(container_id)
