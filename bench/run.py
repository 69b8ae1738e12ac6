"""`make bench`: engined, dockerd and podman through the same API on this host, in one run, one row
per figure.

Every job first asserts that the engines' answers are right, then takes samples in turns. A row
shows medians, beside each peer's how many times better engined is, and the row's target at the end.
MISSED marks a missed target. A row says so when an engine is not installed or lacks something. A
wrong answer fails the row and, at the end, the run. The table goes to stdout, every sample to
bench/results/*.json.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import image, report, rows, wire
from bench.engines import KINDS, Engine, default_kinds, earlier_engined
from bench.job import Job, Size
from bench.rows.images import Material

RESULTS = Path(__file__).resolve().parent / "results"


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {
        "cpu": next(
            (line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine()
        ),
        "cores": os.cpu_count(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": os.getloadavg(),
    }


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=RESULTS.parent)
    return found.stdout.strip() or "unknown"


def load_image(engine: Engine) -> None:
    with engine.connection() as connection:
        body = connection.expect(200, "POST", "/images/load?quiet=1", image.small())
    if b"errorDetail" in body:
        raise RuntimeError(f"{engine.name}: load: {body!r}")


@contextlib.contextmanager
def running(kinds: Sequence[type[Engine]], needed: bool) -> Iterator[list[Engine]]:
    """The engines, started and with the image loaded. One that is not installed is left out,
    or ends the program if all are `needed`.

    All are ended afterwards and leave nothing.
    """
    with contextlib.ExitStack() as stack:
        engines: list[Engine] = []
        for kind in kinds:
            if reason := kind.missing():
                if needed:
                    raise SystemExit(f"bench: {reason}")
                print(f"{kind.name}: not measured: {reason}")
                continue
            engine = kind()
            stack.callback(engine.close)
            engine.start()
            load_image(engine)
            engines.append(engine)
        yield engines


def measured(jobs: Sequence[Job], engines: Sequence[Engine], seconds: bool) -> Iterator[report.Row]:
    """The rows, each printed as soon as it is complete."""
    names = [engine.name for engine in engines]
    print(report.table_head(names))
    for job in jobs:
        begin = time.monotonic()
        found = job.measure(engines)
        for row in found:
            print(report.table_line(row, names))
        for line in report.reasons(found[0]):
            print(line)
        if seconds:
            print(f"{'':<24}({job.name}: {time.monotonic() - begin:.1f} s)")
        sys.stdout.flush()
        yield from found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bench.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--row", action="append", metavar="NAME", help="this row alone (and those measured with it); repeatable"
    )
    parser.add_argument(
        "--engine", action="append", choices=[kind.name for kind in KINDS], help="this engine alone; repeatable"
    )
    parser.add_argument(
        "--earlier",
        type=Path,
        metavar="CHECKOUT",
        help="beside engined alone, the engine of another checkout, on which `make build` was run",
    )
    parser.add_argument(
        "--api", metavar="VERSION", help="engined alone, asked by requests of this API version (default: 1.24)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="little of everything: whether it works, not how fast it is"
    )
    parser.add_argument("--list", action="store_true", help="name the rows and end")
    parser.add_argument("--seconds", action="store_true", help="say how long each row took")
    arguments = parser.parse_args()
    size = Size(arguments.quick)
    material = Material(size.of(1, 10), size.rounds(2))
    jobs = rows.jobs(size, material)
    if arguments.list:
        for job in jobs:
            if job.name not in {figure.name for figure in job.figures}:
                print(f"{job.name:<28} all of: {', '.join(figure.name for figure in job.figures)}")
            for figure in job.figures:
                print(f"{figure.name:<28} {figure.what} ({figure.unit}){'' if job.default else ', by name alone'}")
        return 0
    names = {name for job in jobs for name in (job.name, *(figure.name for figure in job.figures))}
    if unknown := [name for name in arguments.row or [] if name not in names]:
        print(f"bench: no row {', '.join(unknown)} (make bench ARGS=--list)", file=sys.stderr)
        return 2
    if os.geteuid() != 0:
        print("bench: engines need root", file=sys.stderr)
        return 1
    if arguments.row:
        jobs = [job for job in jobs if {job.name, *(figure.name for figure in job.figures)} & {*arguments.row}]
    else:
        jobs = [job for job in jobs if job.default]
    for number in (signal.SIGINT, signal.SIGTERM):
        # exit handlers end the engines that were started
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    wire.version = arguments.api or wire.version
    wanted = arguments.engine or (["engined"] if arguments.earlier or arguments.api else [])
    kinds = [kind for kind in KINDS if kind.name in wanted] if wanted else default_kinds()
    if arguments.earlier:
        kinds.append(earlier_engined(arguments.earlier.resolve()))
    now = datetime.datetime.now(datetime.UTC)
    with contextlib.closing(material), running(kinds, bool(wanted)) as engines:
        document = report.Document(
            format=report.FORMAT,
            time=now.isoformat(timespec="seconds"),
            commit=commit(),
            quick=size.quick,
            machine=machine(),
            versions={
                engine.name: f"{engine.version()}{f', API {arguments.api}' if arguments.api else ''}"
                for engine in engines
            },
            rows=[],
        )
        print(f"{document.heading()}; medians (times better)")
        document.rows.extend(measured(jobs, engines, arguments.seconds))
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{now:%Y%m%dT%H%M%SZ}-{document.commit}.json"
        path.write_bytes(document.encode())
    missed = [row.name for row in document.rows if row.misses()]
    wrong = sorted({f"{engine}: {row.name}" for row in document.rows for engine in row.wrong})
    judged = sum(row.judged() for row in document.rows)
    print(f"{judged - len(missed)} of {judged} targets reached; missed: {', '.join(missed) or 'none'}")
    print(f"all samples: {os.path.relpath(path)}")
    if wrong:
        print(f"wrong answers: {'; '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
