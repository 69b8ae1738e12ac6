"""What the engine counts and times for its operator: numbers that only grow, in memory.

Names and labels are dockerd's, so that dashboards made for it work. A place that acts adds to one
of these objects; nothing else is computed until a scrape reads them (`api/metrics.py`).

Threads: the event loop's. Not here: what is counted only when it is asked for.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator

BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of a histogram's buckets in seconds: Prometheus' defaults."""


class Counter:
    """A number that grows, for each value of a label."""

    def __init__(self, *values: str) -> None:
        """`values`: those that are shown from the beginning; none if it has no label."""
        self.counts: dict[str, int] = dict.fromkeys(values or ("",), 0)

    def add(self, value: str = "", number: int = 1) -> None:
        self.counts[value] = self.counts.get(value, 0) + number

    @property
    def total(self) -> int:
        return sum(self.counts.values())


class Histogram:
    """Durations of one kind of work."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds

    def buckets(self) -> Iterator[tuple[str, int]]:
        """Upper bounds as text, and the number of durations up to them."""
        total = 0
        for bound, count in zip((*map(_shown, BOUNDS), "+Inf"), self.counts, strict=True):
            total += count
            yield bound, total


class Durations:
    """Durations by the value of a label."""

    def __init__(self, *values: str) -> None:
        self.by_value = {value: Histogram() for value in values}

    def since(self, value: str, began: float) -> None:
        """The work began at this time of the monotonic clock, and has succeeded now."""
        found = self.by_value.get(value)
        if found is None:
            found = self.by_value[value] = Histogram()
        found.add(time.monotonic() - began)


def _shown(bound: float) -> str:
    return f"{bound:g}"


CONTAINER_ACTIONS = Durations("changes", "commit", "create", "delete", "start")
IMAGE_ACTIONS = Durations()
NETWORK_ACTIONS = Durations()
HOST_FUNCTIONS = Durations()
HEALTH_CHECK_STARTS = Histogram()
HEALTH_CHECKS = Counter()
HEALTH_CHECKS_FAILED = Counter()
EVENTS = Counter()
BUILDS = Counter()
BUILDS_FAILED = Counter(
    *("build_canceled", "build_target_not_reachable_error", "command_not_supported_error"),
    *("dockerfile_empty_error", "dockerfile_syntax_error", "error_processing_commands_error"),
    *("missing_onbuild_arguments_error", "unknown_instruction_error"),
)

__all__ = [
    "BUILDS",
    "BUILDS_FAILED",
    "CONTAINER_ACTIONS",
    "EVENTS",
    "HEALTH_CHECKS",
    "HEALTH_CHECKS_FAILED",
    "HEALTH_CHECK_STARTS",
    "HOST_FUNCTIONS",
    "IMAGE_ACTIONS",
    "NETWORK_ACTIONS",
    "Counter",
    "Durations",
    "Histogram",
]
