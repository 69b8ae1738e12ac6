"""Descriptors of this process."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator

from tests.support.engine.harness import until


def opened() -> set[tuple[str, str]]:
    """The open ones, with what they lead to."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return found


@contextlib.contextmanager
def none_left_open() -> Iterator[None]:
    """Raises AssertionError at the end if there are others than at the begin. That earlier ones are
    closed meanwhile is no failure.
    """
    gc.collect()  # frees leftovers of earlier tests
    before = opened()
    yield
    until("descriptors are closed", lambda: not opened() - before)
