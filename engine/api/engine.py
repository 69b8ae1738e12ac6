"""What a handler may reach: the parts of one engine, put together by `daemon.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from engine.config import Config
from engine.events import EventLog
from engine.wire.system import Counts, Host


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Frozen: parts live as long as the daemon."""

    config: Config
    events: EventLog
    host: Host
    """Facts about this host, read once at start."""
    counts: Callable[[], Counts]
    """What /info tells about the other parts, as it is now; must not wait."""
    containers: Any = None
    images: Any = None
    networks: Any = None
    monitor: Any = None
