"""Docker's restart policies: decides if and when an ended container runs again, and the timer until
then.

The decisions are pure functions. Not here: the start (`container.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine.wire.containers import RestartPolicy

FIRST_DELAY = 0.1
LONGEST_DELAY = 60.0
STEADY = 10.0
"""Seconds of running after which the delay is reset."""


def wanted(policy: RestartPolicy, exit_code: int, restarts: int, stopped_by_user: bool) -> bool:
    """After an exit. `restarts`: number of restarts by the policy since a user started it."""
    if stopped_by_user:
        return False
    if policy.name == "on-failure":
        return exit_code != 0 and (not policy.maximum_retry_count or restarts < policy.maximum_retry_count)
    return policy.name in ("always", "unless-stopped")


def wanted_at_boot(policy: RestartPolicy, exit_code: int, restarts: int, stopped_by_user: bool) -> bool:
    """At the start of the engine, for a container that does not run: `always` applies even after a
    stop by the user.
    """
    return policy.name == "always" or wanted(policy, exit_code, restarts, stopped_by_user)


def delay(previous: float, ran: float) -> float:
    """Seconds before the next restart: doubled each time, `FIRST_DELAY` again once it `ran` for
    `STEADY` seconds. `previous` 0: there was none.
    """
    if ran >= STEADY or not previous:
        return FIRST_DELAY
    return min(previous * 2, LONGEST_DELAY)


class Planned:
    """The next start of one container by its restart policy, if one is planned."""

    __slots__ = ("_due", "_timer", "delay")

    def __init__(self, due: Callable[[], None]) -> None:
        """`due` is called when the delay is over."""
        self._due = due
        self._timer: asyncio.TimerHandle | None = None
        self.delay = 0.0
        """Seconds before the last planned start; 0 when there was none since a user's start."""

    def __bool__(self) -> bool:
        return self._timer is not None

    def plan(self, ran: float) -> None:
        """Start it again soon: it `ran` for so many seconds.

        A user's start, stop, kill or removal cancels this.
        """
        self.cancel()
        self.delay = delay(self.delay, ran)
        self._timer = asyncio.get_running_loop().call_later(self.delay, self._fire)

    def cancel(self) -> None:
        """It is started otherwise, or not at all."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def reset(self) -> None:
        """A user starts it: the next delay is the first again."""
        self.cancel()
        self.delay = 0.0

    def _fire(self) -> None:
        self._timer = None
        self._due()
