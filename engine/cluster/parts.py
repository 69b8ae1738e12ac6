"""The parts of the engine that its membership in a swarm uses, put together by `daemon.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.common.facts import Counts, Host
from engine.config import Config
from engine.containers.containers import Containers
from engine.events import EventLog
from engine.images.remote import Remote
from engine.images.store import ImageStore
from engine.networks.attachments import Attachments
from engine.networks.networks import Networks
from engine.storage.records import Records
from engine.volumes.store import VolumeStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Frozen: parts live as long as the daemon."""

    config: Config
    records: Records
    containers: Containers
    images: ImageStore
    remote: Remote
    networks: Networks
    attachments: Attachments
    volumes: VolumeStore
    events: EventLog
    host: Host
    counts: Callable[[], Counts]
