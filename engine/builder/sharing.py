"""Steps under way, each once for all builds: builds that need a step of the same key at the same
time wait for one run of it, and each shows its output.

The run is cancelled when the last build that waits for it leaves. Until its end it reads the
context and the roots of the build that started it, so that build does not end before it. Its
failure is the failure of every build that waits.

Owns:    the tasks. Threads: the event loop's.
Not here: results of steps that have ended (`cache.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from engine.builder.output import Log
from engine.builder.state import State
from engine.system.tasks import shield
from engine.system.threads import cancelled, uninterrupted

Make = Callable[[Log], Awaitable[State]]


class _Run:
    """One run of a step."""

    __slots__ = ("log", "task", "waiting")

    def __init__(self, log: Log, task: asyncio.Task[State]) -> None:
        self.log = log
        self.task = task
        self.waiting = 0


class SharedSteps:
    """See the module."""

    def __init__(self, directory: Path) -> None:
        """`directory`: for output beyond what the memory takes (`output.Log`)."""
        self._directory = directory
        self._running: dict[str, _Run] = {}

    async def once(self, key: str, log: Log, make: Make) -> State:
        """The result of `make`, which is started if no step of this key runs. Its output appears in
        `log` at this place.

        When this returns or raises, `make` does not run any more if this call has started it.
        """
        run = self._running.get(key)
        ours = run is None
        if run is None:
            run = self._running[key] = self._start(key, make)
        log.follow(run.log)
        run.waiting += 1
        try:
            return await shield(run.task)
        finally:
            run.waiting -= 1
            if not run.waiting and not run.task.done():
                self._forget(key, run)  # a build that comes now starts it again
                await cancelled(run.task)
            elif ours:
                await uninterrupted(asyncio.wait([run.task]))

    def _start(self, key: str, make: Make) -> _Run:
        log = Log(self._directory)

        async def work() -> State:
            try:
                return await make(log)
            finally:
                log.close()

        run = _Run(log, asyncio.create_task(work()))
        run.task.add_done_callback(lambda _: self._forget(key, run))
        return run

    def _forget(self, key: str, run: _Run) -> None:
        if self._running.get(key) is run:
            del self._running[key]
        if run.task.done() and not run.task.cancelled():
            run.task.exception()  # a failure is that of the builds, which may have left


__all__ = ["SharedSteps"]
