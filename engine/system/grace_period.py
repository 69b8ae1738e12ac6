"""Starts the RCU grace period that moving a process into a cgroup waits for, before the runtime
needs it.

A runtime moves each new process into cgroups under a kernel lock (cgroup_threadgroup_rwsem) that
stops forks on the whole host. A process that takes the lock after a pause waits for an RCU grace
period first. That takes several milliseconds, more where namespaces come and go, and was half of a
start (docs/PERFORMANCE.md). If the lock was taken shortly before, there is no wait. So a thread of
the engine takes the lock once as soon as a start or an exec is requested, and the grace period
passes while root, network and bundle are made.

Rules: cgroups(7), proc_pid_mountinfo(5); kernel document cgroup-v2.rst, `favordynmods` (hierarchies
       mounted with that option have no such wait).

Owns nothing. Not here: which cgroup a container gets (`runtime/cgroups.py`).
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
from engine.system.tasks import spawn

MEMBERSHIP = Path("/proc/self/cgroup")

_FRESH = 0.002
"""Seconds after the last use of the lock in which a runtime that is started now still finds it
without a wait. A grace period lasts longer than this.
"""
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_FOLLOWED = 3
"""How often a thread tries again when its process was moved to other cgroups meanwhile."""


class GracePeriod:
    """The grace period of this host's cgroup hierarchies. All methods run on the event loop."""

    def __init__(self, mounts: Iterable[Mount]) -> None:
        self._hierarchies = mounted(mounts)
        self._possible = True
        self._begun: asyncio.Task[None] | None = None
        self._running = 0
        """Number of runtimes that are running; they take the lock themselves."""
        self._taken = 0.0
        """When the lock was last taken, by the loop's clock."""

    def expect(self) -> None:
        """Begin the grace period, because a process will be moved in a few milliseconds.

        Cheap. Does nothing on hosts where it does not help.
        """
        if (
            self._possible
            and self._begun is None
            and not self._running
            and asyncio.get_running_loop().time() >= self._taken + _FRESH
        ):
            self._begun = spawn(self._begin(), "beginning a grace period")

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        """Enclose the time in which a runtime moves a process."""
        self.expect()  # the last grace period may have ended too long ago
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._taken = asyncio.get_running_loop().time()

    async def settled(self) -> None:
        """Wait for the end of a grace period that `expect` has begun."""
        if self._begun is not None:
            await asyncio.wait([self._begun])

    async def _begin(self) -> None:
        try:
            self._possible = await asyncio.to_thread(begin, self._hierarchies)
        finally:
            self._begun = None
            self._taken = asyncio.get_running_loop().time()


def begin(hierarchies: Mapping[str, tuple[str, str]], membership: Path = MEMBERSHIP) -> bool:
    """Move the calling thread into the cgroups that it is in already. Blocks for a grace period.

    Returns False if this is impossible on this host. True does not mean that it succeeded now.
    """
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
            continue  # no permission, or removed
        with contextlib.suppress(OSError):  # the kernel refuses it only after the wait
            os.write(descriptor, str(threading.get_native_id()).encode())
        os.close(descriptor)
        return True
    return False


def mounted(mounts: Iterable[Mount]) -> dict[str, tuple[str, str]]:
    """Mount point and topmost cgroup of each hierarchy by controller name. The name of v2's
    hierarchy is empty.
    """
    found: dict[str, tuple[str, str]] = {}
    for mount in mounts:
        names = [""] if mount.type == "cgroup2" else mount.super_options.split(",") if mount.type == "cgroup" else []
        for name in names:
            found.setdefault(name, (mount.target, mount.root))
    return found


def own(hierarchies: Mapping[str, tuple[str, str]], membership: str) -> Iterator[str]:
    """The files that move a thread into the cgroups that `membership` (/proc/self/cgroup,
    cgroups(7)) lists.

    Skips a hierarchy whose mount shows other cgroups, as in a container with its own cgroup
    namespace and the host's mounts.
    """
    for line in membership.splitlines():
        _, controllers, cgroup = line.split(":", 2)
        mount, root = hierarchies.get(controllers.split(",")[0], ("", ""))
        if not mount or "/.." in root or "/.." in cgroup:
            continue
        top = root.rstrip("/")
        if f"{cgroup}/".startswith(f"{top}/"):
            yield mount + cgroup[len(top) :].rstrip("/") + ("/tasks" if controllers else "/cgroup.threads")


__all__ = ["GracePeriod", "begin", "mounted", "own"]
