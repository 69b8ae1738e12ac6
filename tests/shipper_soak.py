"""Containers' lines to remote targets, while the shipper and the targets are killed at random, and
monitors replaced.

    python -m tests.shipper_soak [--minutes 10] [--containers 9] [--rate 3000] [--seed N]

The targets are syslog over TCP, GELF over TCP and Fluentd with acknowledgements. They have stored
what they have read. Containers are also removed with undelivered lines, and others started.
Afterwards every line of every container must have arrived, in order. Prints a row for each
container, what was killed, and the seed that repeats the choices. Exit status 1 if something is
lost or out of order.

No engine takes part: the spools are written as the monitor does (`tests/shipping.py`).
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from engine.logs.deliveries import Fluentd, Gelf, Remote, Syslog
from tests import numbered
from tests.shipping import Shipping, Spool
from tests.targets.storing import Storing

PATIENCE = 180
"""Seconds until the last line must have arrived."""


class Target:
    """A receiver, and its part of the containers."""

    def __init__(self, name: str, receiver: Storing, target: Remote) -> None:
        self.name = name
        self.receiver = receiver
        self.target = target
        self.returns = 0.0
        """When it is started again; 0: it runs."""

    def texts(self) -> list[bytes]:
        messages = self.receiver.messages()
        if self.receiver.kind == "nul":
            messages = [json.loads(each)["short_message"].encode() for each in messages]
        return [each + b"\n" for each in messages]


class Soak:
    """All processes and what was written."""

    def __init__(self, base: Path, stack: ExitStack, chance: random.Random, containers: int) -> None:
        self.chance = chance
        self.shipping = Shipping(base)
        stack.callback(self.shipping.close)
        self.targets: list[Target] = []
        for name, kind in (("syslog", "lines"), ("gelf", "nul"), ("fluentd", "forward")):
            receiver = stack.enter_context(Storing(base / name, kind))
            targets: dict[str, Remote] = {
                "syslog": Syslog("tcp", "127.0.0.1", receiver.port),
                "gelf": Gelf("tcp", "127.0.0.1", receiver.port),
                "fluentd": Fluentd(port=receiver.port, request_ack=True, retry_wait=0.1),
            }
            self.targets.append(Target(name, receiver, targets[name]))
        self.running: dict[str, Spool] = {}
        self.written: dict[str, int] = {}
        self.kills: Counter[str] = Counter()
        self.shipper_returns = 0.0
        self._names = 0
        for _ in range(containers):
            self.add()
        self.shipping.start()

    def add(self) -> None:
        target = self.targets[self._names % len(self.targets)]
        name = f"{target.name}-{self._names}"
        self._names += 1
        self.running[name] = self.shipping.spool(target.target, name, max_size=1 << 20, max_file=3)
        self.written[name] = 0

    def write(self, lines: int) -> None:
        """About so many, of random containers."""
        names = list(self.running)
        while lines > 0:
            name = self.chance.choice(names)
            count = min(lines, self.chance.choice([1, 1, 10, 100, 1000]))
            # a full one would wait, and its target may be away
            if not self.running[name].full:
                size = self.chance.choice([0, 92, 92, 500])
                self.running[name].write(numbered.lines(name, self.written[name], count, size))
                self.written[name] += count
            lines -= count

    def disturb(self) -> None:
        match self.chance.choice(
            ["shipper", "shipper", "shipper in order", "target", "target", "monitor", "container"]
        ):
            case "shipper" as kind if not self.shipper_returns:
                self._end_shipper(kind, signal.SIGKILL)
            case "shipper in order" as kind if not self.shipper_returns:
                self._end_shipper(kind, signal.SIGTERM)
            case "target":
                target = self.chance.choice(self.targets)
                if not target.returns:
                    target.receiver.kill()
                    target.returns = time.monotonic() + self.chance.choice([0, self.chance.uniform(0, 3)])
                    self.kills[target.name] += 1
            case "monitor" as kind:
                self.shipping.replace_monitor()
                self.kills[kind] += 1
            case "container" as kind:
                name = self.chance.choice(list(self.running))
                spool = self.running.pop(name)
                spool.end()
                self.shipping.removed(spool)
                self.add()
                self.kills[kind] += 1

    def _end_shipper(self, kind: str, number: int) -> None:
        self.shipping.kill(number)
        self.shipper_returns = time.monotonic() + self.chance.choice([0, self.chance.uniform(0, 1)])
        self.kills[kind] += 1

    def restore(self, *, all: bool = False) -> None:
        """Start again what was killed a while ago."""
        now = time.monotonic()
        if self.shipper_returns and (all or now >= self.shipper_returns):
            self.shipper_returns = 0.0
            self.shipping.start()
        for target in self.targets:
            if target.returns and (all or now >= target.returns):
                target.returns = 0.0
                target.receiver.start()

    def verdicts(self) -> dict[str, numbered.Verdict]:
        found: dict[str, numbered.Verdict] = {}
        for target in self.targets:
            mine = {name: count for name, count in self.written.items() if name.startswith(f"{target.name}-")}
            found |= numbered.verdicts(target.texts(), mine)
        return found


def run(soak: Soak, seconds: float, rate: int) -> dict[str, numbered.Verdict]:
    end = time.monotonic() + seconds
    disturbs = time.monotonic() + 1
    while (now := time.monotonic()) < end:
        soak.restore()
        soak.write(max(1, rate // 50))
        if now >= disturbs:
            soak.disturb()
            disturbs = now + soak.chance.uniform(0.05, 2.0)
        time.sleep(0.02)
    soak.restore(all=True)
    deadline = time.monotonic() + PATIENCE
    while True:
        found = soak.verdicts()
        if not any(each.missing for each in found.values()) or time.monotonic() > deadline:
            return found
        time.sleep(2)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.shipper_soak", description="Kills shipper and targets.")
    parser.add_argument("--minutes", type=float, default=10, help="how long [default: 10]")
    parser.add_argument("--containers", type=int, default=9, help="how many at once [default: 9]")
    parser.add_argument("--rate", type=int, default=3000, help="lines per second [default: 3000]")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    chance = random.Random(arguments.seed)
    with ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        soak = Soak(base, stack, chance, arguments.containers)
        found = run(soak, arguments.minutes * 60, arguments.rate)
        log = soak.shipping.log.read_text()
    print(f"{'container':16} {'lines':>9} {'missing':>9} {'out of order':>13} {'duplicates':>11} {'restarts':>9}")
    for name, each in found.items():
        first = f"  first missing: {each.first_missing}" if each.missing else ""
        counts = f"{each.expected:9} {each.missing:9} {each.out_of_order:13} {each.duplicates:11} {each.restarts:9}"
        print(f"{name:16} {counts}{first}")
    kills = ", ".join(f"{count} {kind}" for kind, count in sorted(soak.kills.items()))
    wrong = [name for name, each in found.items() if not each.right]
    print(f"{sum(soak.written.values())} lines; {kills}; {len(wrong)} containers with failures")
    traces = log.count("Traceback")
    if wrong or traces:
        print(log[-10_000:], file=sys.stderr)
    return 1 if wrong or traces else 0


if __name__ == "__main__":
    sys.exit(main())
