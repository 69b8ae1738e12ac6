"""Builds in progress that have a client's own id, and their cancellation by it (POST
/build/cancel).

Owns: the set of ids. Threads: the event loop's. Not here: the disconnection of a client, which ends
the generator of its build.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from engine.builder.reports import Report
from engine.errors import ServerError
from engine.system.threads import cancelled


class RunningBuilds:
    """One engine's."""

    def __init__(self) -> None:
        self._by_id: dict[str, set[asyncio.Event]] = {}

    def cancel(self, build_id: str) -> None:
        """Cancel the builds of this id, if there are any."""
        for event in self._by_id.get(build_id, ()):
            event.set()

    async def run(self, build_id: str, messages: AsyncGenerator[Report, None]) -> AsyncGenerator[Report, None]:
        """The messages of a build, which ends with ServerError when it is cancelled."""
        event = asyncio.Event()
        self._by_id.setdefault(build_id, set()).add(event)
        ending = asyncio.ensure_future(event.wait())
        try:
            while True:
                step = asyncio.ensure_future(anext(messages, None))
                try:
                    await asyncio.wait((step, ending), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    if not step.done():
                        await cancelled(step)
                if event.is_set():
                    with contextlib.suppress(asyncio.CancelledError):
                        step.exception()  # seen
                    raise ServerError("Build cancelled")
                message = step.result()
                if message is None:
                    return
                yield message
        finally:
            events = self._by_id[build_id]
            events.discard(event)
            if not events:
                del self._by_id[build_id]
            await cancelled(ending)
            await messages.aclose()
