"""The parts of the engine that containers use, and the observers of container changes."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from engine.config import Config
from engine.containers.defaults import DOCKERS, Defaults
from engine.containers.delivery import Deliveries
from engine.containers.store import ContainerRecord, ContainerStore
from engine.events import EventLog
from engine.images.store import ImageStore
from engine.monitor.client import Monitor
from engine.networks.attachments import Attachments
from engine.networks.networks import Networks
from engine.runtime.cdi import Registry
from engine.runtime.cgroups import Cgroups
from engine.runtime.runtimes import Runtimes
from engine.runtime.scope_limits import ScopeLimits
from engine.storage.snapshots import Snapshots
from engine.system.grace_period import GracePeriod
from engine.system.observers import Observers
from engine.volumes.store import VolumeStore

if TYPE_CHECKING:
    from engine.containers.container import Container


@dataclass(frozen=True)
class Lifecycle:
    """Observers of containers.

    Each observer is called on the event loop, after the record has changed.
    """

    runs: Observers[[Container]] = field(default_factory=lambda: Observers("container runs"))
    """Its processes begin to run: start, unpause."""
    started: Observers[[Container]] = field(default_factory=lambda: Observers("container started"))
    """It has started, and the event `start` has been published; called after `runs`."""
    rests: Observers[[Container]] = field(default_factory=lambda: Observers("container rests"))
    """Its processes stop running: exit, pause."""
    updated: Observers[[Container]] = field(default_factory=lambda: Observers("container updated"))
    """Its limits have changed."""
    ended: Observers[[Container]] = field(default_factory=lambda: Observers("container ended"))
    """Its run has ended; called after `rests`.

    After a start that failed past `runs`, only `rests` is called.
    """
    health: Observers[[Container]] = field(default_factory=lambda: Observers("container health"))
    """Its health has another status by its own test."""
    gone: Observers[[Container]] = field(default_factory=lambda: Observers("container gone"))
    """It has been removed."""


@dataclass(frozen=True)
class Parts:
    """The parts of the engine that containers use."""

    config: Config
    store: ContainerStore
    images: ImageStore
    snapshots: Snapshots
    networks: Networks
    attachments: Attachments
    volumes: VolumeStore
    monitor: Monitor
    runtimes: Runtimes
    cgroups: Cgroups
    scope_limits: ScopeLimits
    grace_period: GracePeriod
    events: EventLog
    deliveries: Deliveries
    devices: Registry = field(default_factory=Registry)
    """The devices that have names (CDI)."""
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    defaults: Defaults = DOCKERS


class Peers(Protocol):
    """The interface through which one container uses the others."""

    generation: int
    """Increased with every change of any container that replies show."""

    ending: set[Container]
    """Containers whose process has ended, while their record does not show it yet."""

    @property
    def leaving(self) -> bool:
        """The engine is stopping its containers: restart policies no longer apply."""

    def get(self, text: str) -> Container:
        """By id, name or unique prefix. Raises NotFound."""

    def names_by_link(self, child: str) -> Iterable[str]:
        """`/parent/alias` for every link to the child."""

    async def relink(self, child: str) -> None:
        """That container has started: update its address in the containers linked to it."""

    def renaming(self, container: Container, name: str) -> AbstractContextManager[None]:
        """Reserve the new name while its row is written; then release the old one.

        The caller holds the container's lock. Raises Conflict.
        """

    def host_changed(self, container: Container, before: ContainerRecord) -> None:
        """It has another HostConfig; links and networks may differ from the record `before`."""

    def unlinked(self, container: Container, child: str) -> None:
        """Its link to the container of that id was removed."""

    def removed(self, container: Container) -> None:
        """Its row is gone."""
