"""What a monitor leaves behind that dies in the middle of its work: runtimes that nobody will hear of, and what they made.

The runtime runs on when its monitor is gone, and may still make a process, while the one who asked is told that none was made. It is ended, and
so is a process of a container that no answer ever named. Those fall to the daemon, the next subreaper, and must be collected: the init of a
container cannot end while one of its process namespace, an exec, waits for its parent (pid_namespaces(7)).

Not here: the processes that are known, which a new monitor is given (`client.py`); what the runtime keeps of a container (`runtime/oci.py`).
Children of the daemon's own session are its own: programs that it runs and waits for itself. A monitor begins a session.

Blocking: called in threads. Owns nothing. Raises nothing: what is gone meanwhile is gone.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Set
from contextlib import suppress
from pathlib import Path

GRACE = 5.0
"""Seconds that a process may take to end after SIGKILL: one in uninterruptible sleep is not waited for."""


def end_launches(run: Path) -> None:
    """End every runtime that a monitor of `run` has started and that is not done. Only while no monitor lives there."""
    mark = b"\0" + os.fsencode(run / "monitor" / "p")
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with suppress(OSError), open(f"/proc/{name}/cmdline", "rb") as file:
                if mark in file.read():  # its pid file
                    _kill(int(name))


def collect(known: Set[int]) -> None:
    """Reap the children that have ended, but for the known ones, and end those that run in a process namespace of their own: execs, inits."""
    session = os.getsid(0)
    handled: set[int] = set()
    while found := _children() - known - handled:
        for pid in found:
            handled.add(pid)
            with suppress(OSError):
                status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                if int(status[3]) == session:
                    continue
                if status[0] != "Z" and len(_namespace_pids(pid)) > 1:
                    _kill(pid)
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)


def _children() -> set[int]:
    """The daemon's: those that any of its threads is given."""
    found: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it ends just now
            found.update(map(int, Path(f"/proc/self/task/{task}/children").read_text().split()))
    return found


def _namespace_pids(pid: int) -> list[str]:
    """Its pid in each process namespace, this one's first (proc(5), NSpid)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((line.split()[1:] for line in lines if line.startswith("NSpid:")), [])


def _kill(pid: int) -> None:
    """SIGKILL; returns when it has ended, or not within the grace."""
    with suppress(OSError):
        pidfd = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            poll.poll(GRACE * 1000)
        finally:
            os.close(pidfd)
