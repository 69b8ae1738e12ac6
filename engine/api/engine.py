"""The parts of one engine that handlers may use, put together by `daemon.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from engine.api.kept import KeptReplies
from engine.builder.buildkit.front import BuildKit
from engine.builder.buildkit.session import Sessions
from engine.builder.loading import Builds
from engine.builder.running import RunningBuilds
from engine.cluster.cluster import Cluster
from engine.common.facts import Counts, Host, ProgramFacts
from engine.config import Config
from engine.containers.containers import Containers
from engine.containers.delivery import Deliveries
from engine.containers.exec import Execs
from engine.containers.stats import Statistics
from engine.events import EventLog
from engine.http.relays import Relays
from engine.images.remote import Remote
from engine.images.store import ImageStore
from engine.managed_plugins.store import ManagedPlugins
from engine.networks.networks import Networks
from engine.usage import Usages
from engine.volumes.store import VolumeStore


@dataclasses.dataclass(slots=True, kw_only=True)
class Engine:
    """Parts live as long as the daemon; a reload sets another `config`."""

    builder: Builds
    buildkit: BuildKit
    cluster: Cluster
    config: Config
    events: EventLog
    host: Host
    """Facts about this host, read once at start."""
    counts: Callable[[], Counts]
    """The current counts of the other parts, for /info. Must not block."""
    containers: Containers
    deliveries: Deliveries
    devices: Callable[[], list[str]]
    """The names of the devices that containers can request by name. Reads files."""
    execs: Execs
    images: ImageStore
    networks: Networks
    plugins: ManagedPlugins
    programs: Callable[[], ProgramFacts]
    """Blocks on processes at times."""
    remote: Remote
    statistics: Statistics
    usage: Usages
    volumes: VolumeStore
    restoring: bool = False
    """The daemon has just started, and has not restored all containers yet."""
    builds: RunningBuilds = dataclasses.field(default_factory=RunningBuilds)
    sessions: Sessions = dataclasses.field(default_factory=Sessions)
    websockets: Relays = dataclasses.field(default_factory=Relays)
    kept: KeptReplies = dataclasses.field(default_factory=KeptReplies)
