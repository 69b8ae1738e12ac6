"""The wait before a process can be moved into a cgroup, begun before a runtime gets there.

A runtime moves what it starts into cgroups, under a lock that keeps the whole host from forking meanwhile. For whoever takes that lock as the
first in a while the kernel waits until every processor has noticed (an RCU grace period): milliseconds, many of them where namespaces come and go,
which was half of a start (docs/PERFORMANCE.md). Whoever takes it within the next such period does not wait. So it is taken once for
nothing when a start or an exec is asked for, and the period passes while root, network and bundle are made.

Rules: cgroups(7), proc_pid_mountinfo(5); kernel document cgroup-v2.rst, `favordynmods`: cgroups that are mounted so know no such wait.

Owns nothing. Not here: which cgroup a container gets (`cgroups.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from engine.system.mounts import Mount

MEMBERSHIP = Path("/proc/self/cgroup")

_FRESH = 0.002
"""Seconds in which the lock is still to be had at once by a runtime that is started now; a grace period is longer."""
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_FOLLOWED = 3
"""How often a thread follows its process, when that is moved meanwhile."""


class Migration:
    """Of processes into cgroups, on one host."""

    def __init__(self, mounts: Iterable[Mount]) -> None:
        self._hierarchies = mounted(mounts)
        self._possible = True
        self._begun: asyncio.Task[None] | None = None
        self._running = 0
        """Runtimes at work: they take the lock themselves."""
        self._taken = 0.0
        """When somebody had the lock, by the loop's clock."""

    def expect(self) -> None:
        """Some process will be moved in some milliseconds. On the loop; cheap, and where it cannot help it does nothing."""
        if (
            self._possible
            and self._begun is None
            and not self._running
            and asyncio.get_running_loop().time() >= self._taken + _FRESH
        ):
            self._begun = asyncio.ensure_future(self._begin())

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        """A runtime moves a process within this."""
        self.expect()  # the last time may be too long ago
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._taken = asyncio.get_running_loop().time()

    async def settled(self) -> None:
        """Wait until nothing of this is under way."""
        if self._begun is not None:
            await asyncio.wait([self._begun])

    async def _begin(self) -> None:
        try:
            self._possible = await asyncio.to_thread(begin, self._hierarchies)
        finally:
            self._begun = None
            self._taken = asyncio.get_running_loop().time()


def begin(hierarchies: Mapping[str, tuple[str, str]], membership: Path = MEMBERSHIP) -> bool:
    """Move the calling thread to where it is. Blocks for a grace period. Whether that can be done here; it may have failed this time."""
    try:
        text = os.fsdecode(membership.read_bytes())
        for _ in range(_FOLLOWED):
            if not _move(own(hierarchies, text)):
                return False
            before, text = text, os.fsdecode(membership.read_bytes())
            if text == before:
                break
    except OSError as error:
        return error.errno in _PASSING
    return True


def _move(files: Iterator[str]) -> bool:
    for file in files:
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in _PASSING:
                raise
            continue  # not for us to write
        with contextlib.suppress(OSError):  # refused, but after the wait
            os.write(descriptor, str(threading.get_native_id()).encode())
        os.close(descriptor)
        return True
    return False


def mounted(mounts: Iterable[Mount]) -> dict[str, tuple[str, str]]:
    """Where each hierarchy is mounted, and which of its cgroups is the topmost there, by a controller's name; that of v2 is empty."""
    found: dict[str, tuple[str, str]] = {}
    for mount in mounts:
        names = [""] if mount.type == "cgroup2" else mount.super_options.split(",") if mount.type == "cgroup" else []
        for name in names:
            found.setdefault(name, (mount.target, mount.root))
    return found


def own(hierarchies: Mapping[str, tuple[str, str]], membership: str) -> Iterator[str]:
    """The files that move a thread into the cgroups which it is in: `membership` says which (cgroups(7)).

    None of a hierarchy whose mount shows other cgroups, as in a container with a cgroup namespace of its own and the host's mounts.
    """
    for line in membership.splitlines():
        _, controllers, cgroup = line.split(":", 2)
        mount, root = hierarchies.get(controllers.split(",")[0], ("", ""))
        if not mount or "/.." in root or "/.." in cgroup:
            continue
        top = root.rstrip("/")
        if f"{cgroup}/".startswith(f"{top}/"):
            yield mount + cgroup[len(top) :].rstrip("/") + ("/tasks" if controllers else "/cgroup.threads")


__all__ = ["Migration", "begin", "mounted", "own"]
