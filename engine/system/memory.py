"""Memory of the process: what the allocator keeps after a peak of work goes back to the kernel at
the next pause, and a reserve lets the event loop go on where the host gives no more.

glibc keeps freed memory in its arenas, one per thread up to a limit, and returns only the top of
the heap by itself. A load or a pull leaves tens of megabytes that way. `trim_soon` is called after
such work. A second after the last call, young garbage is collected and malloc_trim(3) runs in a
thread.

Owns: two timers of the running loop.
Threads: `trim_soon` on the loop only. malloc_trim locks one arena after the other, so it runs only
after `QUIET` seconds without a further call, and with SCHED_BATCH, behind all other threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import threading

from engine._fast import reserve
from engine.errors import ServerError, words
from engine.system.threads import in_own_thread

QUIET = 1.0
"""Seconds without further calls."""
INTERVAL = 10.0
"""Least seconds between two runs."""
ARENAS = 2
"""glibc's default is eight per CPU, and each arena keeps the memory that its threads once
needed.
"""

REFILL = 10.0
"""Seconds after which the reserve takes back what it gave, if the host has it."""
STACK = 1 << 20
"""Bytes of a thread's stack. The default, 8 MiB, is only reserved, but a host that overcommits no
memory counts it.
"""

_M_ARENA_MAX = -8

_log = logging.getLogger(__name__)
_libc = ctypes.CDLL(None)

_timer: asyncio.TimerHandle | None = None
_earliest = 0.0
"""Loop time of the earliest next run."""


def configure() -> None:
    """At start, before the first threads: limit their stacks and glibc's arenas, and begin the
    reserve (`_fast/reserve.pyx`).

    The thresholds for mmap(2) stay dynamic: fixed ones would map and fault in the buffers of every
    load, log and archive again.
    """
    reserve.fill()
    threading.stack_size(STACK)
    with contextlib.suppress(AttributeError):  # another libc
        _libc.mallopt(_M_ARENA_MAX, ARENAS)


def keep_reserve() -> None:
    """Fill the reserve again and again, on this loop."""
    reserve.fill()
    asyncio.get_running_loop().call_later(REFILL, keep_reserve)


def trim_soon() -> None:
    """Return memory to the kernel `QUIET` seconds after the last call, at most once per
    `INTERVAL`.
    """
    global _timer  # noqa: PLW0603 (one allocator per process)
    loop = asyncio.get_running_loop()
    if _timer is not None:
        _timer.cancel()
    _timer = loop.call_at(max(loop.time() + QUIET, _earliest), _trim)


def _trim() -> None:
    global _timer, _earliest  # noqa: PLW0603
    _timer = None
    _earliest = asyncio.get_running_loop().time() + INTERVAL
    # not all generations: that takes 6 ms of the loop with 3,000 containers, and finds nothing
    gc.collect(1)
    try:
        in_own_thread(malloc_trim).add_done_callback(_trimmed)
    except ServerError as error:
        _log.warning("returning memory to the host: %s", error.message)


def malloc_trim() -> bool:
    """malloc_trim(3).

    Returns True if memory was returned to the kernel; False with another libc.
    """
    with contextlib.suppress(AttributeError):
        return bool(_libc.malloc_trim(0))
    return False


def _trimmed(done: asyncio.Future[bool]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        _log.warning("returning memory to the host: %s", words(error))
