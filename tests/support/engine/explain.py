"""What a failure needs beside its assertion: the logs of the engine and of its containers since the
test's begin, what the engine has on the host, and how busy the host is.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.engine.harness import TempEngine

CONTAINERS = 8
"""The containers with the newest logs are shown."""
TAIL = 2000
"""Bytes of each container's log."""


def sections(name: str, engine: TempEngine, begin: int, since: float) -> Iterator[tuple[str, str]]:
    """Title and text of each. `begin` is an offset into the engine's log, `since` a time in seconds
    of the epoch. What cannot be read is left out: the engine may be half gone.
    """
    since_then = engine.log(begin)
    yield f"log of {name}, daemon and monitor", since_then or f"nothing since the begin; before it:\n{engine.log()}"
    with contextlib.suppress(OSError):
        for path in _logs(engine, since):
            yield (
                f"log of {name}'s container {path.parent.name[:12]}",
                path.read_bytes()[-TAIL:].decode(errors="replace"),
            )
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        yield f"{name} on the host", "\n".join(engine.present()) or "nothing"


def _logs(engine: TempEngine, since: float) -> list[Path]:
    """Log files of containers that were written since, oldest first."""
    found = []
    for directory in (engine.root / "containers").glob("*"):
        for path in directory.glob("*-json.log"):
            with contextlib.suppress(OSError):
                found.append((path.stat().st_mtime, path))
    return [path for changed, path in sorted(found)[-CONTAINERS:] if changed >= since]


def host() -> str:
    """Load, pressure and memory of the host, and what runs or waits for a disk, of all
    processes.
    """
    lines = [f"load {Path('/proc/loadavg').read_text().strip()} on {os.cpu_count()} cores"]
    for kind in ("cpu", "io", "memory"):
        with contextlib.suppress(OSError):
            lines.append(f"{kind} pressure: {Path('/proc/pressure', kind).read_text().splitlines()[0]}")
    memory = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    lines.append(f"memory available {memory['MemAvailable'].strip()} of {memory['MemTotal'].strip()}")
    running = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, IndexError):
            if entry.isdigit() and Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[0] in "RD":
                command = Path("/proc", entry, "cmdline").read_bytes() or Path("/proc", entry, "comm").read_bytes()
                running.append(
                    f"{entry} {' '.join(command.decode(errors='replace').replace(chr(0), ' ').split())[:100]}"
                )
    return "\n".join([*lines, "running, or waiting for a disk:", *running[:20]])
