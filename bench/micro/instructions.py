"""Instructions of the micro-benchmarks, against those that were accepted: `make instructions`.

    python -m bench.micro.instructions [--accept] [--rounds N] [NAME …]

Times are noise on a shared machine, instructions are not: of one build they differ by less than a
tenth of a percent from run to run. What remains is where memory happens to lie: memcmp(3) takes
longer for each string that is near the end of a page. So rows that have grown are counted once more
with other addresses, and the least counts. Ends with status 1 and prints both numbers if a row has
3 % more than instructions.json says (or twice the spread that its rounds have shown, if that is
more), or if it is not there. `--accept` writes what this run has found; with `--rounds N` the
spread as well. Less is printed, and no failure.

Counts depend on compiler, C library, interpreter and a few packages. Where these are others than
those that instructions.json names, the differences are printed, and none is a failure. Instructions
of the kernel are not counted.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ACCEPTED = HERE / "instructions.json"
TOLERANCE = 0.03


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.micro.instructions", description="Counts instructions.")
    parser.add_argument("--accept", action="store_true", help="write what is found to instructions.json")
    parser.add_argument("--rounds", type=int, default=1, help="runs, whose spread is kept by --accept [default: 1]")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only rows whose name has this in it")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds: at least one")
    for program in ("valgrind", "gcc"):
        if shutil.which(program) is None:
            parser.error(f"{program} is not installed")
    if platform.machine() != "x86_64":
        parser.error("callgrind.c makes system calls of x86_64 only")
    rounds = [count(options.names) for _ in range(options.rounds)]
    found = {name: sorted(each[name] for each in rounds) for name in rounds[0]}
    accepted = Accepted.read() if ACCEPTED.exists() else Accepted({}, {}, {})
    others = {name: version for name, version in host().items() if accepted.host.get(name) != version}
    if options.accept and options.names and others:
        parser.error(f"the other rows were counted on another host: here {others}, there {accepted.host}")
    if grown := [name for name, counts in found.items() if accepted.has_grown(name, counts[0])]:
        again = count(grown, elsewhere=True)
        found |= {name: sorted([*found[name], again[name]]) for name in grown}
    worse = accepted.compare({name: counts[0] for name, counts in found.items()}, whole=not options.names)
    if options.accept:
        accepted.take(found, whole=not options.names)
        return 0
    if others:
        print(f"This fails nothing, as the accepted counts are of another host: here {others}, there {accepted.host}")
        return 0
    if worse:
        print(f"{worse} rows are beyond what was accepted. Where that is meant:")
        print(f'    make instructions ARGS="{" ".join(["--accept", *options.names])}"')
    return min(worse, 1)


@dataclass
class Accepted:
    """instructions.json."""

    host: dict[str, str]
    instructions: dict[str, int]
    spread: dict[str, float]
    """Rows whose rounds differed by more than half of TOLERANCE, and the share by which they
    did.
    """

    @classmethod
    def read(cls) -> Accepted:
        return cls(**json.loads(ACCEPTED.read_text()))

    def take(self, found: dict[str, list[int]], *, whole: bool) -> None:
        """Write what was found: each row's rounds, least first. Not `whole`: other rows stay. One
        round leaves the spread that several have shown.
        """
        if whole:
            self.instructions = {}
            self.spread = {name: spread for name, spread in self.spread.items() if name in found}
        for name, counts in found.items():
            self.instructions[name] = counts[0]
            if len(counts) == 1:
                continue
            self.spread.pop(name, None)
            if (spread := round(counts[-1] / counts[0] - 1, 4)) > TOLERANCE / 2:
                self.spread[name] = spread
        self.host = host()
        ACCEPTED.write_text(json.dumps(asdict(self), indent=1, sort_keys=True) + "\n")

    def compare(self, found: dict[str, int], *, whole: bool = True) -> int:
        """Print each row that differs; returns how many have grown too far, or are on one side
        only.
        """
        worse = 0
        for name in sorted({*found, *(self.instructions if whole else ())}):
            if name not in found or name not in self.instructions:
                print(f"{name}: {'was not counted' if name in self.instructions else 'has no accepted count'}")
                worse += 1
                continue
            before, now = self.instructions[name], found[name]
            limit = self._limit(name)
            change = _change(before, now)
            if abs(change) > limit:
                print(f"{name}: {now:,} instructions, {before:,} accepted: {change:+.1%}, limit {limit:.1%}")
                worse += change > limit
        print(f"{len(found)} rows counted, {worse} beyond their limit")
        return worse

    def has_grown(self, name: str, now: int) -> bool:
        """True if the row is known and beyond its limit."""
        return name in self.instructions and _change(self.instructions[name], now) > self._limit(name)

    def _limit(self, name: str) -> float:
        return max(TOLERANCE, 2 * self.spread.get(name, 0))


def _change(before: int, now: int) -> float:
    return round(now / before - 1, 6)


def host() -> dict[str, str]:
    """What the counts depend on."""
    compiler = subprocess.run(["gcc", "-dumpfullversion"], capture_output=True, text=True, check=True).stdout.strip()
    return {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "gcc": compiler,
        "libc": " ".join(platform.libc_ver()),
    } | {name: importlib.metadata.version(name) for name in ("cython", "httptools", "isal", "msgspec", "uvloop")}


_APART = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
"""In a network namespace of its own: some rows read a line for each link."""


def count(names: list[str], *, elsewhere: bool = False) -> dict[str, int]:
    """One run of all rows, or of those with one of the names; each with its instructions.
    `elsewhere`: with other addresses of stack and heap.

    Raises SystemExit with pytest's output if a row fails.
    """
    with tempfile.TemporaryDirectory(prefix="count") as place:
        shim = Path(place, "callgrind.so")
        subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", shim, HERE / "callgrind.c"], check=True)
        command = [
            *(_APART if os.geteuid() == 0 else ()),
            *("valgrind", "--tool=callgrind", "--quiet", "--instr-atstart=no", "--collect-jumps=no"),
            *("--dump-line=no", "--dump-instr=no", "--trace-children=no", f"--callgrind-out-file={place}/out.%p"),
            *(
                sys.executable,
                "-X",
                "frozen_modules",
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                "-p",
                "no:benchmark",
                "-s",
            ),
            # beside the tests, at the lowest priority, a row may wait for as long as those take
            *("-o", "faulthandler_timeout=0", "-p", "no:xdist", f"--basetemp={place}/tmp", "bench/micro"),
        ]
        environment = os.environ | {
            "ENGINED_COUNT": str(shim),
            "ENGINED_COUNT_ROWS": "\n".join(names),
            "LD_PRELOAD": str(shim),
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
            # By default glibc sets it by what was freed, and then copies a growing block or not.
            "MALLOC_MMAP_THRESHOLD_": str(128 << 10),
            "ENGINED_COUNT_ELSEWHERE": "x" * 1000 * elsewhere,
        }
        done = subprocess.run(
            command, cwd=HERE.parent.parent, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:
            raise SystemExit(f"no row has {' or '.join(names)} in its name")
        if done.returncode:
            raise SystemExit(f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}")
        return dict(read(path) for path in sorted(Path(place).glob("row.*")))


def read(path: Path) -> tuple[str, int]:
    """Name and instructions of one dump. Raises ValueError if it is none of `Counter`."""
    text = path.read_text()
    name = re.search(r"^desc: Trigger: Client Request: (.*)$", text, re.M)
    total = re.search(r"^(?:totals|summary): (\d+)", text, re.M)
    if name is None or total is None:
        raise ValueError(f"{path}: no dump of a row")
    return name[1], int(total[1])


if __name__ == "__main__":
    sys.exit(main())
