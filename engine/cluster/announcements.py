"""Changes of the swarm's objects as events of this engine: services, nodes, secrets, configs.

Each manager's daemon reports all of them, with the scope `swarm`.

Not here: what a change is (`engine/manager/control/events.py`), which versions show them
(`api/events.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable

from engine.errors import EngineError
from engine.events import EventLog
from engine.swarm_session.messages import Change

PAUSE = 1.0
"""Seconds until a manager that ended is asked again."""

_log = logging.getLogger(__name__)


async def announce(watch: Callable[[], AsyncGenerator[Change, None]], events: EventLog) -> None:
    """Publish each change until cancelled. Changes that happen while the own manager does not run
    are not reported.
    """
    while True:
        try:
            async with contextlib.aclosing(watch()) as changes:
                async for change in changes:
                    events.publish(
                        change.kind, change.action, change.id, change.attributes, change.time or None, scope="swarm"
                    )
        except (EngineError, ConnectionError):
            pass
        except Exception:
            _log.exception("changes of the swarm cannot be reported as events")
        await asyncio.sleep(PAUSE)
