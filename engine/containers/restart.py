"""Whether and when a container that has ended runs again. Pure (specification, "Restart delays"; Docker where it is silent)."""

from __future__ import annotations

from engine.wire.containers import RestartPolicy

FIRST_DELAY = 0.1
LONGEST_DELAY = 60.0
STEADY = 10.0
"""Seconds of running after which the delay begins anew."""


def wanted(policy: RestartPolicy, exit_code: int, restarts: int, stopped_by_user: bool) -> bool:
    """After an exit: `restarts` is how many there were since a user started it."""
    if stopped_by_user:
        return False
    if policy.name == "on-failure":
        return exit_code != 0 and (not policy.maximum_retry_count or restarts < policy.maximum_retry_count)
    return policy.name in ("always", "unless-stopped")


def wanted_at_boot(policy: RestartPolicy, exit_code: int, restarts: int, stopped_by_user: bool) -> bool:
    """When the engine starts and finds it not running: `always` means it even after a stop by the user."""
    return policy.name == "always" or wanted(policy, exit_code, restarts, stopped_by_user)


def delay(previous: float, ran: float) -> float:
    """Seconds before the next restart: doubling from `FIRST_DELAY`, anew once it `ran` steadily. `previous` 0: there was none."""
    if ran >= STEADY or not previous:
        return FIRST_DELAY
    return min(previous * 2, LONGEST_DELAY)
