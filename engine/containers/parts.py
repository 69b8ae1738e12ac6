"""The parts of the engine that containers use."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.config import Config
from engine.containers.defaults import DOCKERS, Defaults
from engine.containers.delivery import Deliveries
from engine.containers.store import ContainerStore
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
from engine.volumes.store import VolumeStore


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
    defaults: Defaults = DOCKERS
