"""Docker's restart policies: decides if and when an ended container runs again.

Pure.
"""

from __future__ import annotations

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
