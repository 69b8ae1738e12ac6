"""Micro-benchmarks of engine/_fast and of the hot path around it, by pytest-benchmark: `make
micro`. Below valgrind their instructions are counted instead, `instructions` compares them with
what was accepted.
"""

import os

COUNTED = os.environ.get("ENGINED_COUNT", "")
"""The library of callgrind.c where instructions are counted; otherwise empty."""


def sized(timed: int, counted: int) -> int:
    """How much a benchmark does: where instructions are counted, each costs about fifty times."""
    return counted if COUNTED else timed
