"""Detects pauses in image work, in which its memory can be returned to the host.

A load, pull, push or save leaves threads, connections and free heap behind. The next operation soon
after uses them again, so they are released only after a pause.

Owns: the timer. Not here: what is released; the owners subscribe with `when_idle`. Threads: the
event loop's alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator

PAUSE = 5.0
"""Seconds without work before memory is released."""

_log = logging.getLogger(__name__)


class Idle:
    """The running operations, and the functions that release memory when there are none."""

    def __init__(self, pause: float = PAUSE) -> None:
        self._pause = pause
        self._at_work = 0
        self._timer: asyncio.TimerHandle | None = None
        self._releases: list[Callable[[], object]] = []

    def when_idle(self, release: Callable[[], object]) -> None:
        """Call `release` after each pause, in the order of subscription.

        It must not block, and released memory may be needed again.
        """
        self._releases.append(release)

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """No pause begins within the context."""
        self._at_work += 1
        self.close()
        try:
            yield
        finally:
            self._at_work -= 1
            if not self._at_work:
                self._timer = asyncio.get_running_loop().call_later(self._pause, self._release)

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _release(self) -> None:
        self._timer = None
        for release in self._releases:
            try:
                release()
            except Exception:
                _log.exception("releasing memory after image work")


__all__ = ["PAUSE", "Idle"]
