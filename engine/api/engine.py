"""The parts of one engine that handlers may use, put together by `daemon.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Protocol

from engine.api.kept import KeptReplies
from engine.build.buildkit.session import Sessions
from engine.build.options import Options, PruneOptions
from engine.build.running import RunningBuilds
from engine.config import Config
from engine.containers.containers import Containers
from engine.containers.exec import Execs
from engine.containers.stats import Statistics
from engine.errors import Unimplemented
from engine.events import EventLog
from engine.facts import Counts, Host
from engine.http.websocket import Relays
from engine.images.remote import Remote
from engine.images.store import ImageStore
from engine.networks.networks import Networks
from engine.volumes.store import VolumeStore
from engine.wire.build import BuildMessage, PruneReport


class Builder(Protocol):
    """Image builds."""

    def build(self, body: AsyncIterator[bytes], options: Options, /) -> AsyncGenerator[BuildMessage, None]:
        """Builds an image from the context in `body`. The last image in `aux` is the result.

        No message is yielded before the body was read to its end: Go clients stop sending when they
        see a status line. An error before the first message becomes the reply's status.
        """

    async def prune(self, options: PruneOptions, /) -> PruneReport: ...


class NoBuilder:
    """Until the engine has one."""

    async def build(self, body: AsyncIterator[bytes], options: Options, /) -> AsyncGenerator[BuildMessage, None]:
        raise Unimplemented("this engine has no image builds")
        yield BuildMessage()

    async def prune(self, options: PruneOptions, /) -> PruneReport:
        return PruneReport()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Frozen: parts live as long as the daemon."""

    config: Config
    events: EventLog
    host: Host
    """Facts about this host, read once at start."""
    counts: Callable[[], Counts]
    """The current counts of the other parts, for /info. Must not block."""
    containers: Containers
    execs: Execs
    images: ImageStore
    networks: Networks
    remote: Remote
    statistics: Statistics
    volumes: VolumeStore
    builder: Builder = dataclasses.field(default_factory=NoBuilder)
    builds: RunningBuilds = dataclasses.field(default_factory=RunningBuilds)
    sessions: Sessions = dataclasses.field(default_factory=Sessions)
    websockets: Relays = dataclasses.field(default_factory=Relays)
    kept: KeptReplies = dataclasses.field(default_factory=KeptReplies)
