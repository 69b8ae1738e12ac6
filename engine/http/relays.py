"""The websocket clients of a server (`websocket.py`).

Owns: the tasks of relays under way.
"""

from __future__ import annotations

import asyncio
import importlib
from typing import TYPE_CHECKING, Any

from engine.http.messages import Request
from engine.system.tasks import spawn

if TYPE_CHECKING:
    from engine.http.websocket import Join, Relay, Upgrade


class Relays:
    """All websocket relays of a server."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], Relay] = {}

    async def upgrade(self, request: Request) -> Upgrade:
        """Raises InvalidParameter and Forbidden, as `Upgrade`.

        wsproto is loaded by the first request: with h11 it would be a tenth of the daemon's start.
        """
        module: Any = await asyncio.to_thread(importlib.import_module, "engine.http.websocket")
        upgrade: Upgrade = module.Upgrade(request)
        return upgrade

    def start(
        self,
        upgrade: Upgrade,
        descriptor: int,
        head: bytes,
        early: bytes,
        join: Join,
        *,
        takes: bool,
        binary: bool,
    ) -> None:
        """Relay between the client behind `descriptor` (owned from now on) and the stream that
        `join` makes.

        `early`: bytes that came behind the request. `takes`: the client's input goes to the stream;
        otherwise it is dropped. `binary`: all messages to the client are binary, not only those
        that are no text.
        """
        relay = upgrade.relay(descriptor, takes, binary)
        task = spawn(relay.run(upgrade.accept(head), early, join), "relaying a websocket")
        self._tasks[task] = relay
        task.add_done_callback(lambda task: self._tasks.pop(task, None))

    async def close(self) -> None:
        """The server ends: send each client a Close."""
        relays = dict(self._tasks)
        for task, relay in relays.items():
            await relay.end()
            task.cancel()
        await asyncio.gather(*relays, return_exceptions=True)

    def __len__(self) -> int:
        return len(self._tasks)
