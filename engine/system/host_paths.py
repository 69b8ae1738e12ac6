"""Threads for calls on paths that a client names: the source of a bind, a volume of another host, a
file in a container.

Such a call can wait for ever: the server of an NFS or FUSE file system that is mounted there may
not answer. It holds a thread, which no other work may need. Therefore these threads are of their
own, one pool for each kind of path, and bounded: when all threads of a pool hang, its next call is
refused.

Threads: `HostPaths.run` is called by the event loop. The interpreter's end waits for none of its
         own.
"""

from __future__ import annotations

import time
import weakref
from typing import Any

from engine.errors import ServerError
from engine.system.threads import Call, Threads, refuse

COUNT = 64
"""Calls at a time."""
PATIENCE = 5.0
"""Seconds after which a call hangs. A call without a thread waits so long for one."""


class HostPaths(Threads):
    """At most `count` calls at a time, each in a thread of its own. `run` raises ServerError when
    that many hang; so does its result if none of them ends soon.
    """

    def __init__(self, count: int = COUNT) -> None:
        super().__init__(count)
        _pools.add(self)

    @property
    def busy(self) -> bool:
        return False

    def hanging(self, seconds: float) -> int:
        """The number of calls that began so long ago and have not ended."""
        before = time.monotonic() - seconds
        return sum(0 < call.begun < before for call in tuple(self._calls))

    def _admit(self, call: Call[Any]) -> None:
        if len(self._calls) < self._most:
            return
        if self.hanging(PATIENCE) >= self._most:
            raise ServerError(self._full)
        call.loop.call_later(PATIENCE, self._give_up, call)

    def _give_up(self, call: Call[Any]) -> None:
        with self._lock:
            if call.begun or call not in self._calls:
                return
            self._calls.discard(call)
        refuse(call, self._full)

    @property
    def _full(self) -> str:
        return (
            f"{self._most} calls wait for file systems of this host, and no more can be begun: "
            "one that is mounted here does not answer"
        )


_pools: weakref.WeakSet[HostPaths] = weakref.WeakSet()
_host_paths = HostPaths()
run = _host_paths.run


def hanging(seconds: float) -> int:
    """The number of calls, by any `HostPaths`, that began so long ago and have not ended."""
    return sum(pool.hanging(seconds) for pool in _pools)
