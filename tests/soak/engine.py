"""`make soak`: containers write numbered lines and exit, while daemon and monitor are killed at
random.

    python -m tests.soak.engine [--minutes 15] [--containers 12] [--seed N]

Afterwards every log must have all lines of its container in order, and every exit code must be
right. A container that was being started when a process was killed may fail to start; everything
else is an error. Prints what was killed, and the seed that repeats the choices.

Often the daemon is killed right after the monitor, as soon as the process of the next monitor
exists: README.md excludes a kill within the milliseconds before that.
"""

from __future__ import annotations

import argparse
import random
import sys
import time

from tests.support.engine.harness import TempEngine, until

SCRIPT = """
i=0
while [ $i -lt {lines} ]; do echo line $i; i=$((i+1)); [ $((i % 500)) = 0 ] && usleep 20000; done
exit {code}
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.engine", description="Kills daemon and monitor at random."
    )
    parser.add_argument("--minutes", type=float, default=15, help="how long [default: 15]")
    parser.add_argument("--containers", type=int, default=12, help="how many at once [default: 12]")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    chance = random.Random(arguments.seed)
    with TempEngine() as engine:
        engine.load_busybox()
        failures, written, kills = soak(engine, chance, arguments.minutes * 60, arguments.containers)
        engine.remove_all()
    print(f"{kills[0]} kills of the daemon, {kills[1]} of the monitor, {written} lines, {len(failures)} failures")
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


def soak(
    engine: TempEngine, chance: random.Random, seconds: float, count: int
) -> tuple[list[str], int, tuple[int, int]]:
    """Failures, lines checked, and kills of daemon and monitor."""
    running: dict[str, tuple[int, int]] = {}
    failures: list[str] = []
    written = daemons = monitors = 0
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline or running:
        while len(running) < count and time.monotonic() < deadline:
            lines, code = chance.randrange(1000, 60_000), chance.randrange(256)
            identifier = _started(engine, SCRIPT.format(lines=lines, code=code))
            running[identifier] = (lines, code)
        time.sleep(chance.uniform(0.05, 1.0))
        if time.monotonic() < deadline:
            kind = chance.choice(["daemon", "monitor", "both", "both"])
            if kind != "daemon":
                engine.replace_monitor()
                monitors += 1
            if kind == "both":
                time.sleep(chance.choice([0, chance.uniform(0, 0.3)]))
            if kind != "monitor":
                engine.restart()
                daemons += 1
        for identifier, (lines, code) in list(running.items()):
            state = engine.inspect(identifier)["State"]
            if state["Running"]:
                continue
            del running[identifier]
            written += lines
            if state["ExitCode"] != code:
                failures.append(f"{identifier[:12]}: exit code {state['ExitCode']} instead of {code}: {state['Error']}")
            failures += _missing(identifier, engine.logs(identifier, "stdout=1"), lines)
            engine.request("DELETE", f"/v1.24/containers/{identifier}")
    return failures, written, (daemons, monitors)


def _started(engine: TempEngine, script: str) -> str:
    """A container that runs. Its start may fail while the monitor's end goes unnoticed."""
    identifier = engine.create("sh", "-c", script)
    start = f"/v1.24/containers/{identifier}/start"
    until("a container starts", lambda: engine.request("POST", start).status in (204, 304))
    return identifier


def _missing(identifier: str, log: bytes, lines: int) -> list[str]:
    """Errors in a log that should have `lines` lines."""
    found = log.splitlines()
    for number in range(lines):
        if number >= len(found) or found[number] != b"line %d" % number:
            shown = found[number][:40] if number < len(found) else None
            return [f"{identifier[:12]}: {len(found)} of {lines} lines; where line {number} should be: {shown!r}"]
    if len(found) > lines:
        return [f"{identifier[:12]}: {len(found) - lines} lines too many"]
    return []


if __name__ == "__main__":
    sys.exit(main())
