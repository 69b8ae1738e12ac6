"""Lower bounds for rows that miss their target: the same system calls from C (floors.c), without an
engine.

    python -m bench.floors put          PUT archive: receive it and create its files in an overlay
    python -m bench.floors terminal     attach-tty: read the output of busybox on a terminal
    python -m bench.floors volume       volumes and small requests: their parts, from Python

Prints minimum and median of nine samples, the CPU time and the load average. An engine adds HTTP,
tar headers, path resolution and the client's sending. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import uvloop

from bench import image
from bench.job import touch
from bench.rows.files import LARGE_SIZE, SMALL_FILES, many_files
from engine._fast import tree
from engine.storage.records import Change, Records
from engine.system import files
from engine.system.threads import Threads
from tests.support.images import archives

ROUNDS = 9
TERMINAL_SIZE = 190_000_000

IN_OVERLAY = """
cd "$1" && mkdir lower upper work root &&
mount -t overlay -o lowerdir=lower,upperdir=upper,workdir=work overlay root &&
shift && exec "$@"
"""
"""Runs in its own mount namespace, so the mount vanishes with it."""


class Floors:
    """The compiled program, and a directory for its output."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.program = base / "floors"
        source = Path(__file__).with_suffix(".c")
        subprocess.run(["cc", "-O2", "-pthread", "-o", self.program, source, "-lutil"], check=True)

    def show(self, what: str, *words: str | Path, memory: int = 0, overlay: bool = True, size: int = 0) -> None:
        """Take samples and print them. The word `directory` is replaced by a new directory for each
        sample, in an overlay or on the file system itself. `memory`: see `touch`. `size`: bytes, to
        show the rate too.
        """
        samples = []
        for _ in range(ROUNDS):
            directory = Path(tempfile.mkdtemp(dir=self.base))
            command: list[str | Path] = [self.program, *(directory if word == "directory" else word for word in words)]
            if overlay and "directory" in words:
                command = ["unshare", "--mount", "sh", "-ec", IN_OVERLAY, "sh", directory, *command]
                command[command.index(directory, 7)] = "root"
            os.sync()
            touch(memory)
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            samples.append([float(each) for each in said.split()])
        passed, processor = zip(*samples, strict=True)
        rate = f"{size / min(passed) / 1000:8.1f} MB/s" if size else ""
        print(
            f"{what:<58}{min(passed):8.1f}{statistics.median(passed):8.1f} ms  processor {min(processor):8.1f} ms{rate}"
            f"  load {os.getloadavg()[0]:.1f}",
            flush=True,
        )


def put(floors: Floors) -> None:
    archive = floors.base / "files.tar"
    many_files(archive, SMALL_FILES, LARGE_SIZE)
    small, large, memory = str(SMALL_FILES), str(LARGE_SIZE), 3 * LARGE_SIZE
    floors.show("the archive, received into one buffer", "receive", archive)
    for overlay, where in ((False, "the file system itself"), (True, "an overlay")):
        for threads in "1", "2":
            what = f"{SMALL_FILES:,} small files in {where}, threads: {threads}"
            floors.show(what, "files", "directory", small, threads, memory=memory, overlay=overlay)
    floors.show("the large file", "large", "directory", large, memory=memory)
    floors.show("the large file, whatever memory is free", "large", "directory", large)
    floors.show("all at once", "put", "directory", small, large, archive, memory=memory)


def terminal(floors: Floors) -> None:
    lines = floors.base / "lines"
    lines.write_bytes(image.LINE * (image.LINES_SIZE // len(image.LINE)))
    copies = TERMINAL_SIZE // image.LINES_SIZE
    count = copies * (image.LINES_SIZE // len(image.LINE))
    busybox = archives.BUSYBOX
    command = f"for i in $({busybox} seq {copies}); do {busybox} cat {lines}; done"
    what = f"{copies * image.LINES_SIZE // 1_000_000} MB that busybox writes to a terminal, read"
    floors.show(what, "terminal", str(count), busybox, "sh", "-c", command, size=copies * image.LINES_SIZE)


def volume(floors: Floors) -> None:
    """System calls of volumes, a transaction, and a turn of a thread, in milliseconds."""

    def show(what: str, samples: Sequence[float]) -> None:
        least, median = min(samples) * 1000, statistics.median(samples) * 1000
        print(f"{what:<58}{least:8.3f}{median:8.3f} ms  load {os.getloadavg()[0]:.1f}", flush=True)

    def timed(work: Callable[[], object]) -> float:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    volumes = floors.base / "volumes"
    volumes.mkdir()
    files.spread(volumes)  # as the engine does
    top = os.open(volumes, os.O_PATH)

    def create() -> None:
        for path in ("hidden", "hidden/_data"):
            os.mkdir(path, 0o755, dir_fd=top)
            os.chmod(path, 0o755, dir_fd=top)
        os.rename("hidden", "volume", src_dir_fd=top, dst_dir_fd=top)

    def remove() -> None:
        os.rename("volume", "hidden", src_dir_fd=top, dst_dir_fd=top)
        os.rmdir("hidden/_data", dir_fd=top)
        os.rmdir("hidden", dir_fd=top)

    lives = [(timed(create), timed(remove)) for _ in range(ROUNDS * 30)]
    show("create: mkdir, chmod and rename", [made for made, _ in lives])
    show("create and removal: mkdir, chmod, rename and rmdir", [sum(life) for life in lives])
    names = [f"{number}/_data" for number in range(100)]
    for name in names:
        (volumes / name).mkdir(parents=True)
        (volumes / name / "file").write_bytes(bytes(1000))
    paths = [name.encode() for name in names]
    show("disk usage of 100 volumes of one file", [timed(lambda: tree.sizes(top, paths)) for _ in range(ROUNDS * 10)])
    os.close(top)

    async def turns() -> None:
        records, pool = Records(floors.base / "state.db"), Threads(1, ready=True)
        await pool.start()
        work = {
            "a transaction of the records' writer": lambda: records.commit(Change("volume", "name", bytes(120))),
            "a turn of another thread": lambda: pool.run(int),
        }
        for what, call in work.items():
            samples = []
            for _ in range(ROUNDS * 30):
                begin = time.perf_counter()
                await call()
                samples.append(time.perf_counter() - begin)
            show(what, samples)
        records.close()
        pool.close()

    uvloop.run(turns())


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.floors", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("floor", choices=("put", "terminal", "volume"))
    wanted = parser.parse_args(arguments).floor
    if os.geteuid() != 0:
        print("bench: mounts need root", file=sys.stderr)
        return 1
    print(f"{'':<58}{'least':>8}{'median':>8}")
    with tempfile.TemporaryDirectory(prefix="floors", dir="/tmp") as base:
        {"put": put, "terminal": terminal, "volume": volume}[wanted](Floors(Path(base)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
