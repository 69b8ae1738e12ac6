"""Containers write numbered lines to remote log targets, while shipper, daemon, monitor and targets
are killed at random.

    python -m tests.soak.delivery [--minutes 10] [--containers 20] [--seed N]

Three targets are processes that store what they have read: Fluentd with acknowledgements, syslog
and GELF over TCP. Afterwards every line must have arrived, those of each container in order. Lines
may arrive more than once: as many per kill as are on the way. `docker logs` must have all lines
that its files still have, in order. Prints what was killed, the duplicates, and the seed that
repeats the choices.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support.engine.harness import TempEngine, alive, kill_and_wait, until
from tests.support.logs import numbered
from tests.support.logs.targets.storing import Storing

KINDS = ("forward", "lines", "nul")
SCRIPT = """
i=0
while [ ! -e /stop ]; do
  n=0; while [ $n -lt {burst} ]; do echo {writer}:$i; i=$((i+1)); n=$((n+1)); done; usleep {pause}
done
echo $i > /written
sleep 600
"""


def log(kind: str, port: int) -> dict[str, Any]:
    if kind == "forward":
        options = {"fluentd-address": f"127.0.0.1:{port}", "fluentd-request-ack": "true"}
        return {"LogConfig": {"Type": "fluentd", "Config": options}}
    if kind == "lines":
        return {"LogConfig": {"Type": "syslog", "Config": {"syslog-address": f"tcp://127.0.0.1:{port}"}}}
    return {"LogConfig": {"Type": "gelf", "Config": {"gelf-address": f"tcp://127.0.0.1:{port}"}}}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.delivery", description="Kills at random.")
    parser.add_argument("--minutes", type=float, default=10, help="how long [default: 10]")
    parser.add_argument("--containers", type=int, default=20, help="how many at once [default: 20]")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    chance = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as base, TempEngine() as engine:
        engine.load_busybox()
        targets = {kind: Storing(Path(base) / kind, kind) for kind in KINDS}
        for target in targets.values():
            target.directory.mkdir(exist_ok=True)
            target.start()
        try:
            right = soak(engine, targets, chance, arguments.minutes * 60, arguments.containers)
        finally:
            for target in targets.values():
                target.stop()
        engine.remove_all()
    return 0 if right else 1


def soak(engine: TempEngine, targets: dict[str, Storing], chance: random.Random, seconds: float, count: int) -> bool:
    writers: dict[str, tuple[str, str]] = {}
    for number in range(count):
        writer, kind = f"w{number}", KINDS[number % len(KINDS)]
        burst, pause = chance.choice([(1, 20_000), (20, 50_000), (500, 300_000)])
        script = SCRIPT.format(writer=writer, burst=burst, pause=pause)
        writers[writer] = engine.started("sh", "-c", script, host=log(kind, targets[kind].port)), kind
    kills: dict[str, int] = {}
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(chance.uniform(0.2, 2.0))
        victim = chance.choice(("shipper", "shipper", "daemon", "monitor", *KINDS))
        kills[victim] = kills.get(victim, 0) + kill(engine, targets, victim, chance)
    print("kills:", ", ".join(f"{victim} {number}" for victim, number in sorted(kills.items())), flush=True)
    expected: dict[str, dict[str, int]] = {kind: {} for kind in KINDS}
    for writer, (container, kind) in writers.items():
        engine.touch(container, "/stop")
        until(f"{writer} ends", lambda container=container: written(engine, container) is not None, 60)
        expected[kind][writer] = written(engine, container) or 0
    right = True
    for kind, target in targets.items():
        wanted = expected[kind]
        try:
            until(f"{kind} has all", lambda: numbered.complete(target.messages(), wanted), 120)  # noqa: B023
        except AssertionError as error:
            print(error, file=sys.stderr)
        for writer, verdict in numbered.verdicts(target.messages(), wanted).items():
            print(f"{kind:8} {writer:4} {verdict}", flush=True)
            right = right and verdict.right
    for writer, (container, _) in writers.items():
        lines = numbered.by_writer(engine.logs(container).splitlines()).get(writer, [])
        if lines != list(range(lines[0], lines[0] + len(lines))):
            print(f"{writer}: `logs` has gaps or repetitions", file=sys.stderr)
            right = False
    return right


def kill(engine: TempEngine, targets: dict[str, Storing], victim: str, chance: random.Random) -> int:
    """How many were killed."""
    if victim == "shipper":
        try:
            pid = int((engine.run / "shipper" / "lock").read_text())
        except (FileNotFoundError, ValueError):
            return 0
        if not alive(pid):
            return 0
        kill_and_wait(pid)
    elif victim == "daemon":
        engine.kill9()
        time.sleep(chance.uniform(0, 1))
        engine.start()
    elif victim == "monitor":
        engine.replace_monitor()
    else:
        targets[victim].kill()
        time.sleep(chance.uniform(0, 3))
        targets[victim].start()
    return 1


def written(engine: TempEngine, container: str) -> int | None:
    """The number of lines that it has written, once it has stopped."""
    answer = engine.request("GET", f"/v1.24/containers/{container}/archive?path=/written")
    if answer.status != 200:
        return None
    text = answer.body[512:].split(b"\0")[0].strip()
    return int(text) if text else None


if __name__ == "__main__":
    sys.exit(main())
