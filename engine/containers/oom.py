"""Publishes the event `oom` when the kernel reports it, for running containers with a memory limit.

Not here: `State.OOMKilled`, which is determined at an exit (`launch.oom_killed`); the notifications
themselves (`system/memory_events.py`).
"""

from __future__ import annotations

import functools
import logging

from engine.containers.container import Container, Lifecycle
from engine.errors import words
from engine.runtime.cgroups import Cgroups
from engine.system.memory_events import MemoryEvents

_log = logging.getLogger(__name__)


class OomNotices:
    """Watches the memory of all running containers that have a limit."""

    def __init__(self, cgroups: Cgroups, lifecycle: Lifecycle) -> None:
        self._cgroups = cgroups
        self._events = MemoryEvents()
        lifecycle.started.subscribe(functools.partial(self.begin, new=True))
        lifecycle.updated.subscribe(self.begin)
        lifecycle.rests.subscribe(self._end)

    def begin(self, container: Container, *, new: bool = False) -> None:
        """It runs, or its limits have changed.

        `new`: its run has just begun; a process may have been killed since.
        """
        if not (container.running and container.record.host.memory):
            return
        directory = self._cgroups.directory("memory", container.cgroup)
        if directory is not None:
            try:
                self._events.watch(directory, container.out_of_memory, missed=new)
            except OSError as error:
                # The exit still reports the OOM kill; the process may have ended already.
                _log.warning("container %s: cannot watch its memory: %s", container.id, words(error))

    def _end(self, container: Container) -> None:
        """Its run has ended, or its start has failed; a pause is no end."""
        if container.running:
            return
        directory = self._cgroups.directory("memory", container.cgroup)
        if directory is not None:
            self._events.unwatch(directory)

    def close(self) -> None:
        self._events.close()
