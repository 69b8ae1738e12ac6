"""The wait before a process can be moved into a cgroup, begun before a runtime gets there.

A runtime moves what it starts into cgroups, under a lock that keeps the whole host from forking meanwhile. For whoever takes that lock as the
first in a while the kernel waits until every processor has noticed (an RCU grace period): 6 ms on a host that does nothing else, 8 to 28 ms where
namespaces come and go, which was half of a start. Whoever takes it within the next such period does not wait. So it is taken once for
nothing when a start or an exec is asked for, and the period passes while root, network and bundle are made.

Rules: cgroups(7); kernel document cgroup-v2.rst, `favordynmods`: a host mounted so has no such wait, and this does nothing there.

Owns nothing. Not here: which cgroup a container gets (`cgroups.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from engine.runtime.cgroups import Cgroups


class Migration:
    """Of processes into cgroups, on one host."""

    def __init__(self, hierarchies: Cgroups) -> None:
        self._hierarchies = hierarchies
        self._possible = True
        self._expected = False
        self._waiting: asyncio.Task[None] | None = None

    def expect(self) -> None:
        """Some process will be moved in some milliseconds. On the loop; cheap, and where it cannot help it does nothing."""
        self._expected = self._possible
        if self._expected and self._waiting is None:
            self._waiting = asyncio.ensure_future(self._wait())

    async def settled(self) -> None:
        """Wait until nothing of this is under way."""
        if self._waiting is not None:
            await asyncio.wait([self._waiting])

    async def _wait(self) -> None:
        try:
            while self._expected:
                self._expected = False
                self._possible = await asyncio.to_thread(begin, self._hierarchies)
        finally:
            self._waiting = None


def begin(hierarchies: Cgroups, membership: Path = Path("/proc/thread-self/cgroup")) -> bool:
    """Move the calling thread to where it is; whether the kernel took that. Blocks for a grace period."""
    thread = str(threading.get_native_id())
    try:
        said = membership.read_text()
    except OSError:
        return False
    for file in own(hierarchies, said):
        with contextlib.suppress(OSError):  # out of sight of this cgroup namespace, or read-only
            descriptor = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(descriptor, thread.encode())
            finally:
                os.close(descriptor)
            return True
    return False


def own(hierarchies: Cgroups, membership: str) -> Iterator[str]:
    """The files that move a thread into the cgroups which it is in: `membership` says which (cgroups(7))."""
    for line in membership.splitlines():
        _, controllers, cgroup = line.split(":", 2)
        if not controllers and hierarchies.unified:
            yield f"{hierarchies.unified}{cgroup}/cgroup.threads"
        elif (mount := hierarchies.controllers.get(controllers.split(",")[0])) is not None:
            yield f"{mount}{cgroup}/tasks"


__all__ = ["Migration", "begin", "own"]
