"""Lower bounds for rows that miss their target: the same system calls from C (floors.c), without an
engine.

    python -m bench.floors put          PUT archive: receive it and create its files in an overlay
    python -m bench.floors terminal     attach-tty: read the output of busybox on a terminal
    python -m bench.floors volume       volumes and small requests: their parts, from Python
    python -m bench.floors tail         the last lines of a log: their parts, from Python
    python -m bench.floors buildx       context-…: the client with an engine that answers at once

Prints minimum and median of nine samples, the CPU time and the load average. An engine adds HTTP,
tar headers, path resolution and the client's sending. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import uvloop

from bench import image
from bench.engines import Engine
from bench.instant import Instant
from bench.job import touch
from bench.rows import contexts
from bench.rows.files import LARGE_SIZE, SMALL_FILES, many_files
from bench.rows.images import Material
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


def show(what: str, samples: Sequence[float]) -> None:
    """Print the least and the median of these seconds, in milliseconds."""
    least, median = min(samples) * 1000, statistics.median(samples) * 1000
    print(f"{what:<58}{least:8.3f}{median:8.3f} ms  load {os.getloadavg()[0]:.1f}", flush=True)


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` took."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


@contextlib.contextmanager
def another_process(serve: Callable[[], None]) -> Iterator[None]:
    """Runs `serve` in a process of its own, which is killed at the end."""
    pid = os.fork()
    if pid == 0:
        try:
            serve()
        finally:
            os._exit(1)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def tail(floors: Floors) -> None:
    """A request on a new connection, an exchange with a second process, and the reading of a file,
    with no engine."""
    head, answer = bytes(200), bytes(430)  # as those of the row log-tail-running
    path = str(floors.base / "socket")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(8)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def accept() -> None:
        while True:
            peer, _ = listener.accept()
            with peer:
                peer.recv(len(head))
                peer.sendall(answer)

    def reply() -> None:
        while True:
            theirs.send(theirs.recv(200))

    def request() -> None:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
            client.sendall(head)
            while client.recv(1 << 20):
                pass

    def exchange() -> None:
        ours.send(head)
        ours.recv(200)

    log = floors.base / "containers" / ("c" * 64) / "log"
    log.parent.mkdir(parents=True)
    log.write_bytes(bytes(80_000))
    name = str(log)

    def read() -> None:
        file = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOATIME)
        os.pread(file, 16384, 62_000)
        os.close(file)

    for what, serve, work in (
        ("a new connection, a request and its answer", accept, request),
        ("an exchange with a second process", reply, exchange),
        ("open, pread and close of a file", None, read),
    ):
        with another_process(serve) if serve is not None else contextlib.nullcontext():
            show(what, [timed(work) for _ in range(ROUNDS * 300)])
    for each in (listener, ours, theirs):
        each.close()


def volume(floors: Floors) -> None:
    """System calls of volumes, a transaction, and a turn of a thread, in milliseconds."""
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


IN_BUNDLE = """
cd "$1" && rm -rf upper work && mkdir upper work
mount -t overlay -o lowerdir=lower,upperdir=upper,workdir=work overlay rootfs
exec crun run "$2"
"""


def buildx(floors: Floors) -> None:
    """Commands of `docker buildx` with an engine that does nothing; a bare `crun run`, and copies
    of files.
    """
    engine = cast("Engine", types.SimpleNamespace(base=floors.base, socket=str(floors.base / "socket")))
    with contextlib.closing(Material(1, 1)) as material, another_process(Instant(Path(engine.socket)).serve):
        small = contexts.Project(material, "small", contexts.FILES, contexts.SMALL)
        lines = contexts.Project(material, "lines", 0, contexts.SMALL, contexts.CHECKED)
        build = ("buildx", "build", "--provenance=false", "-t", "built", "--iidfile", str(floors.base / "id"), ".")
        samples: dict[str, list[float]] = {}
        for _ in range(ROUNDS):
            for what, project, command in (
                ("buildx du", small, ("buildx", "du")),
                (f"buildx build, {contexts.FILES:,} files", small, build),
                (f"buildx build --check, {contexts.LINES} lines", lines, ("buildx", "build", "--check", ".")),
            ):
                run = functools.partial(contexts.docker, engine, *command, cwd=project.directory)
                samples.setdefault(what, []).append(timed(run))
        for what, found in samples.items():
            show(what, found)
        part = sorted(path for path in (small.directory / "part").rglob("*") if path.is_file())
        show(
            f"{len(part)} of the files, copied",
            [timed(functools.partial(_copied, floors, part)) for _ in range(ROUNDS)],
        )
    bundle, bare = _bundle(floors.base), []
    for number in range(ROUNDS):
        command = ["unshare", "--mount", "sh", "-ec", IN_BUNDLE, "sh", bundle, f"floor{os.getpid()}-{number}"]
        bare.append(timed(functools.partial(subprocess.run, command, check=True)))
    show("crun run of `sh -c true` in an overlay, with unshare and sh", bare)


def _copied(floors: Floors, paths: Sequence[Path]) -> None:
    target = tempfile.mkdtemp(dir=floors.base)
    for at, path in enumerate(paths):
        shutil.copyfile(path, f"{target}/{at}")


def _bundle(base: Path) -> str:
    """A bundle of busybox, as crun itself describes it, without a terminal and a network."""
    bundle = base / "bundle"
    for name in ("lower/bin", "rootfs"):
        (bundle / name).mkdir(parents=True)
    shutil.copy2(archives.BUSYBOX, bundle / "lower/bin/sh")
    subprocess.run(["crun", "spec"], cwd=bundle, check=True)
    document = json.loads((bundle / "config.json").read_text())
    document["process"] |= {"terminal": False, "args": ["/bin/sh", "-c", "true"]}
    document["root"] = {"path": "rootfs"}
    (bundle / "config.json").write_text(json.dumps(document))
    return str(bundle)


FLOORS = {"put": put, "terminal": terminal, "volume": volume, "tail": tail, "buildx": buildx}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.floors", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("floor", choices=tuple(FLOORS))
    wanted = parser.parse_args(arguments).floor
    if os.geteuid() != 0:
        print("bench: mounts need root", file=sys.stderr)
        return 1
    print(f"{'':<58}{'least':>8}{'median':>8}")
    with tempfile.TemporaryDirectory(prefix="floors", dir="/tmp") as base:
        FLOORS[wanted](Floors(Path(base)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
