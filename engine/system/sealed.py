"""A program that handles data of strangers, sealed off (`_fast/spawn.sealed`): an unprivileged user
in namespaces of its own, without privileges to gain, with one directory to write to.

Owns:    the process, until `run` returns: it has ended then, with all its descendants.
Threads: `run` blocks, in a thread that belongs to it alone. `Stop.set` is called on the loop.
Raises:  OSError; Stopped, TimeoutError. Nothing is logged.
Not here: which programs may run (the callers').
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from engine._fast.spawn import sealed

USER = GROUP = 65534
"""`nobody`: the one unprivileged user that every host has. ssh(1) needs an entry in passwd(5)."""
PLACE = "/tmp"
"""Where a program sees its directory. The host's /tmp is hidden from it."""
PATH = "/usr/local/bin:/usr/bin:/bin"

_MEMORY = 4 << 30
"""Limit of a program's private memory in bytes (RLIMIT_DATA)."""
_KEPT = 64 << 10
"""Bytes of each output that are kept: the first of stdout, the last of stderr."""
_PAUSE = 0.5
"""Seconds between two calls of `watch`, at least."""


class Stopped(Exception):
    """The program was ended because its result is no longer wanted."""


class Stop:
    """Ends programs from the loop. `close` it when no `run` uses it."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def set(self) -> None:
        """End the running program, and every later one at its start."""
        os.eventfd_write(self.descriptor, 1)

    def close(self) -> None:
        os.close(self.descriptor)


class Ended(NamedTuple):
    """A program's result. `status`: its exit code, or the negative number of the signal that
    ended it.
    """

    status: int
    stdout: bytes
    stderr: bytes


def run(
    argv: Sequence[str],
    environment: Mapping[str, str],
    directory: Path,
    stop: Stop,
    *,
    until: float,
    largest: int,
    watch: Callable[[], None],
) -> Ended:
    """Run the program `argv[0]`, an absolute path, to its end.

    `directory` is where it starts and may write, as far as the files' modes let it. `until`: a time
    of the monotonic clock. `largest`: limit of a file's size in bytes. `watch` is called again and
    again meanwhile; the program is ended when it raises.

    Raises Stopped, TimeoutError, OSError if it cannot be executed, and what `watch` raises.
    """
    limits = ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_DATA, _MEMORY), (resource.RLIMIT_FSIZE, largest))
    with contextlib.ExitStack() as ends:
        null = _held(ends, os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
        out, to_out = (_held(ends, end) for end in os.pipe2(os.O_CLOEXEC))
        err, to_err = (_held(ends, end) for end in os.pipe2(os.O_CLOEXEC))
        with contextlib.ExitStack() as process:
            _, pidfd = sealed(
                [os.fsencode(word) for word in argv],
                [os.fsencode(f"{name}={value}") for name, value in environment.items()],
                os.fsencode(directory),
                os.fsencode(PLACE),
                null,
                to_out,
                to_err,
                USER,
                GROUP,
                limits,
            )
            process.callback(os.close, pidfd)
            process.callback(_end, pidfd)
            for end in (to_out, to_err):
                os.dup2(null, end, inheritable=False)  # closes this end of the pipe
            collected = _attend(pidfd, out, err, stop.descriptor, until, watch)
            result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
    assert result is not None  # only WNOHANG returns None
    status = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
    return Ended(status, *collected)


def _held(ends: contextlib.ExitStack, descriptor: int) -> int:
    ends.callback(os.close, descriptor)
    return descriptor


def _end(pidfd: int) -> None:
    """Kill the process if it still runs, and reap it. Its end is that of all its descendants
    (pid_namespaces(7)).
    """
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.waitid(os.P_PIDFD, pidfd, os.WEXITED)


def _attend(pidfd: int, out: int, err: int, stop: int, until: float, watch: Callable[[], None]) -> tuple[bytes, bytes]:
    """Collect both outputs until they and the process have ended."""
    stdout, stderr = bytearray(), bytearray()
    poll = select.poll()
    for descriptor in (pidfd, out, err, stop):
        poll.register(descriptor, select.POLLIN)
    waiting = {pidfd, out, err}
    again = time.monotonic() + _PAUSE
    while waiting:
        ready = dict(poll.poll(max(0.0, min(until, again) - time.monotonic()) * 1000))
        if stop in ready:
            raise Stopped
        for descriptor in ready.keys() & waiting:
            data = b"" if descriptor == pidfd else os.read(descriptor, _KEPT)
            if not data:
                poll.unregister(descriptor)
                waiting.remove(descriptor)
            elif descriptor == err:
                stderr += data
                del stderr[:-_KEPT]
            else:
                stdout += data[: _KEPT - len(stdout)]
        now = time.monotonic()
        if waiting and now >= until:
            raise TimeoutError
        if now >= again:
            watch()
            # A look that takes long comes less often.
            again = time.monotonic() + max(_PAUSE, 4 * (time.monotonic() - now))
    return bytes(stdout), bytes(stderr)


__all__ = ["GROUP", "PATH", "PLACE", "USER", "Ended", "Stop", "Stopped", "run"]
