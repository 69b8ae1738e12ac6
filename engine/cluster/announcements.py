"""Changes of the swarm's objects as events of this engine: services, nodes, secrets, configs.

Each manager's daemon reports all of them, with the scope `swarm`.

Not here: what a change is (`engine/manager/control/events.py`), which versions show them
(`api/events.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

from engine.errors import EngineError
from engine.events import EventLog
from engine.manager.messages import Change

PAUSE = 1.0
"""Seconds until a manager that ended is asked again."""


async def announce(watch: Callable[[], AsyncGenerator[Change, None]], events: EventLog) -> None:
    """Publish each change until cancelled. Changes that happen while the own manager does not run
    are not reported.
    """
    while True:
        with contextlib.suppress(EngineError, ConnectionError):
            async with contextlib.aclosing(watch()) as changes:
                async for change in changes:
                    events.publish(
                        change.kind, change.action, change.id, change.attributes, change.time or None, scope="swarm"
                    )
        await asyncio.sleep(PAUSE)
