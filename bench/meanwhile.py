"""How responsive an engine is while it works: its slowest answer to `_ping`, and its peak memory.

The pings come from a separate process (`python -m bench.meanwhile SOCKET`), since this one is busy
feeding the engine. It has real-time priority (SCHED_FIFO, else nice -20). Otherwise it would
measure how long an answer waited for a CPU.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import sys
import time
from pathlib import Path

from bench import wire
from bench.engines import Engine
from tests.support import ROOT

_PAUSE = 0.002


class Meanwhile:
    """A context in which the engine works.

    Afterwards `ping` (ms) and `memory` (MiB above the start) are set.
    """

    ping = memory = 0.0

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __enter__(self) -> Meanwhile:
        self._processes = {pid: size for pid in self._engine.namespaces.pids() if (size := _size(pid, "VmRSS"))}
        for pid in self._processes:
            with contextlib.suppress(OSError):
                # resets the peak, proc_pid_clear_refs(5)
                Path(f"/proc/{pid}/clear_refs").write_text("5")
        self._pinging = subprocess.Popen(
            [sys.executable, "-m", "bench.meanwhile", self._engine.socket],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._engine.namespaces.not_the_engine.add(self._pinging.pid)
        assert self._pinging.stdout is not None
        assert self._pinging.stdout.readline() == b"pinging\n"
        return self

    def __exit__(self, *_: object) -> None:
        self.memory = sum(max(0.0, _size(pid, "VmHWM") - before) for pid, before in self._processes.items())
        said, _ = self._pinging.communicate()
        self._engine.namespaces.not_the_engine.discard(self._pinging.pid)
        self.ping = float(said)


def _size(pid: int, name: str) -> float:
    """MiB; 0 when the process has exited."""
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return 0.0
    return int(found[1]) / 1024 if found else 0.0


def main(path: str) -> None:
    """Ping until the end of stdin, then print the slowest answer in milliseconds."""
    slowest = 0.0
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:  # with RT_GROUP_SCHED a cgroup may have no real-time budget
        os.nice(-20)
    with wire.Connection(path) as connection:
        connection.expect(200, "GET", "/_ping")
        os.write(1, b"pinging\n")
        while not select.select([0], [], [], _PAUSE)[0]:
            begin = time.perf_counter()
            connection.expect(200, "GET", "/_ping")
            slowest = max(slowest, time.perf_counter() - begin)
    print(slowest * 1000)


if __name__ == "__main__":
    main(sys.argv[1])
