"""`python -m tests.fuzz`: mutated input for every parser, for a number of seconds; with sanitizers
in `make sanitize`.

A round depends only on the target, the seed and its number. A finding (an error that the parser
must not raise, a failed assertion, a crash, a hang) ends the run with status 1 and prints the
command that repeats its round. The rounds run in a child process, which a sanitizer may abort.

    python -m tests.fuzz [--seconds N] [--seed N] [--target NAME …]
    python -m tests.fuzz --seed N --target NAME --round N
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

HANG = 60
"""Seconds after which a round counts as hung. Sanitizers make a round ten times slower."""

SLICE = 0.1
"""Seconds that a target runs before the next one has its turn."""

_STATE = struct.Struct("<QQ")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Mutated input for every parser.")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--target", action="append", metavar="NAME")
    parser.add_argument("--round", type=int, metavar="N", help="this one alone, in this process")
    parser.add_argument("--state", help=argparse.SUPPRESS)
    options = parser.parse_args()

    from tests.fuzz.targets import TARGETS

    names = options.target or list(TARGETS)
    if unknown := set(names) - set(TARGETS):
        parser.error(f"no such target: {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    if options.round is not None:
        for name in names:
            TARGETS[name](noise(options.seed, name, options.round))
        return 0
    if options.state:
        return work(names, options.seed, options.seconds, Path(options.state))
    return supervise(names, options.seed, options.seconds)


def noise(seed: int, name: str, number: int) -> random.Random:
    return random.Random(f"{seed}:{name}:{number}")


def work(names: list[str], seed: int, seconds: float, path: Path) -> int:
    """Rounds of each target for SLICE seconds in turn, each noted in the file before it begins."""
    from tests.fuzz.targets import TARGETS

    end = time.monotonic() + seconds
    rounds = dict.fromkeys(names, 0)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), _STATE.size) as state:
        while time.monotonic() < end:
            for index, name in enumerate(names):
                stop = time.monotonic() + SLICE
                while time.monotonic() < stop:
                    state[:] = _STATE.pack(index, rounds[name])
                    signal.alarm(HANG)
                    try:
                        TARGETS[name](noise(seed, name, rounds[name]))
                    except BaseException:  # any other exception is a finding
                        traceback.print_exc()
                        return 1
                    finally:
                        signal.alarm(0)
                    rounds[name] += 1
    print("fuzz: rounds", ", ".join(f"{name} {number}" for name, number in rounds.items()))
    return 0


def supervise(names: list[str], seed: int, seconds: float) -> int:
    print(f"fuzz: seed {seed}, {seconds:g} s, targets {', '.join(names)}", flush=True)
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(_STATE.size))
        file.flush()
        command = [sys.executable, "-m", "tests.fuzz", f"--seed={seed}", f"--seconds={seconds}", f"--state={file.name}"]
        status = subprocess.run([*command, *(f"--target={name}" for name in names)], check=False).returncode
        index, number = _STATE.unpack(Path(file.name).read_bytes())
    if status == 0:
        print("fuzz: nothing found")
        return 0
    how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    print(f"fuzz: found something in round {number} of {names[index]} ({how}). To repeat it:")
    print(f"    python -m tests.fuzz --seed {seed} --target {names[index]} --round {number}")
    return 1


if __name__ == "__main__":
    if os.geteuid() != 0:
        sys.exit("fuzz: needs root, to extract layers")
    sys.exit(main())
