"""Cleanup after a monitor crash: in-flight runtime processes and whatever they had created. The
daemon does it, and the next monitor when the daemon is dead too.

The runtime keeps running after its monitor died and may still create a process, although the caller
was informed of a failure. So the runtime is killed, and so is a container process that no answer
ever named. These processes are reparented to the daemon, the next subreaper, and must be reaped:
the init of a container cannot end while another process of its PID namespace (an exec) is an
unreaped zombie (pid_namespaces(7)).

Not here: known processes, which a new monitor takes over (`client.py`); the runtime's state of a
container (`runtime/oci.py`). Children in the daemon's own session are programs that the daemon runs
and waits for itself; they are left alone. A monitor begins its own session.

Blocking: called in threads by the daemon. Owns nothing. Raises nothing: processes that vanish
          meanwhile are ignored.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Set
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path  # which the monitor does not need otherwise

GRACE = 5.0
"""Seconds to wait for a process after SIGKILL. A process in uninterruptible sleep may take longer
and is left."""


def end_launches(run: Path | str) -> None:
    """Kill every unfinished runtime that a monitor of `run` has started. Call only while no monitor
    runs there that has been given a launch."""
    mark = b"\0" + os.fsencode(f"{run}/monitor/p")
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with suppress(OSError):
                if mark in _read(f"/proc/{name}/cmdline"):  # its pid file
                    _kill(int(name))


def monitors(run: Path) -> list[int]:
    """Pids of the monitors of `run` that recreate their socket on SIGHUP."""
    mark = b"\0engine.monitor\0--run\0" + os.fsencode(run) + b"\0"
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with suppress(OSError, StopIteration):
                if mark in _read(f"/proc/{name}/cmdline"):
                    lines = _read(f"/proc/{name}/status").splitlines()
                    caught = next(line for line in lines if line.startswith(b"SigCgt:")).split()[1]
                    if int(caught, 16) & 1 << (signal.SIGHUP - 1):
                        found.append(int(name))
    return found


def collect(known: Set[int]) -> None:
    """Reap ended children except the known ones, and kill those in a PID namespace of their own:
    execs and inits."""
    session = os.getsid(0)
    handled: set[int] = set()
    while found := _children() - known - handled:
        for pid in found:
            handled.add(pid)
            with suppress(OSError):
                status = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
                if int(status[3]) == session:
                    continue
                if status[0] != b"Z" and len(_namespace_pids(pid)) > 1:
                    _kill(pid)
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)


def _children() -> set[int]:
    """Children of the daemon: of all its threads."""
    found: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it is just exiting
            found.update(map(int, _read(f"/proc/self/task/{task}/children").split()))
    return found


def _namespace_pids(pid: int) -> list[bytes]:
    """Its pid in each process namespace, this one's first (proc(5), NSpid)."""
    lines = _read(f"/proc/{pid}/status").splitlines()
    return next((line.split()[1:] for line in lines if line.startswith(b"NSpid:")), [])


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.readall()


def _kill(pid: int) -> None:
    """Send SIGKILL and wait for the exit, for at most the grace time."""
    with suppress(OSError):
        pidfd = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            poll.poll(GRACE * 1000)
        finally:
            os.close(pidfd)
