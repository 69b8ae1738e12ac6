"""`python -m bench.shares`: CPU time of a job in engined, by process: daemon, monitor, and the
runtime.

CPU time, not wall-clock time: it hardly depends on other load, and it is the cost on a dense host.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from bench import steps, wire
from bench.engines import Engined, processor_times
from bench.image import LINES_SIZE
from bench.rows import lifecycle, streams
from bench.run import load_image

TIMES = 40


def spent(engine: Engined) -> dict[str, float]:
    """CPU seconds of each process, and of its exited children."""
    found = {}
    for pid in engine.namespaces.pids():
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        name = "monitor" if b"engine.monitor" in command else "daemon"
        found[name], found[f"{name}'s children"] = processor_times(pid)
    return found


def memory(engine: Engined) -> str:
    parts = []
    for pid in engine.namespaces.pids():
        name = "monitor" if b"engine.monitor" in Path(f"/proc/{pid}/cmdline").read_bytes() else "daemon"
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        kinds = {kind: int(size) / 1024 for kind, size in re.findall(r"^(Pss\w*):\s+(\d+) kB", text, re.MULTILINE)}
        parts.append(f"{name} {kinds['Pss']:.1f} MiB (anonymous {kinds.get('Pss_Anon', 0):.1f})")
    return ", ".join(parts)


def share(engine: Engined, what: str, times: int, work: Callable[[], object]) -> None:
    """Print milliseconds per repetition."""
    work()
    before = spent(engine)
    for _ in range(times):
        work()
    after = spent(engine)
    parts = {name: (after[name] - before[name]) * 1000 / times for name in after}
    shown = ", ".join(f"{name} {value:.2f}" for name, value in parts.items() if value >= 0.005)
    print(f"{what:<46}{sum(parts.values()):8.2f} ms: {shown}", flush=True)


def main() -> int:
    if os.geteuid() != 0:
        print("bench.shares: engines need root", file=sys.stderr)
        return 1
    engine = Engined()
    try:
        engine.start()
        load_image(engine)
        print(f"at rest: {memory(engine)}")
        with engine.connection() as connection:
            for network in ("none", "bridge"):
                share(engine, f"run, {network}", TIMES, lambda network=network: lifecycle.one_life(connection, network))  # type: ignore[misc]
            steps.stock(engine, 1)
            share(engine, "exec of echo", TIMES, lambda: lifecycle.one_exec(engine, connection))
            inspect = wire.request("GET", f"/containers/{engine.idle[0]}/json")
            listing = wire.request("GET", "/containers/json")

            def ask(data: bytes) -> None:
                for _ in range(1000):
                    connection.send(data)
                    connection.answer()

            share(engine, "1,000 inspects", 5, lambda: ask(inspect))
            share(engine, "1,000 lists of one", 5, lambda: ask(listing))
        copies = 200_000_000 // LINES_SIZE
        for driver in ("none", "json-file"):
            for tty in (False, True):
                what = f"attach, {copies * LINES_SIZE / 1e6:.0f} MB, {'tty' if tty else 'frames'}, log {driver}"
                share(engine, what, 1, lambda: streams.attached(engine, copies, driver, tty))  # noqa: B023
        steps.stock(engine, 50)
        print(f"with 50 idle containers: {memory(engine)}")
    finally:
        engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
