"""Output to an attached client: framed and from a terminal, logged and not logged."""

from __future__ import annotations

import time
from typing import Any

from bench import steps, wire
from bench.engines import Engine
from bench.image import LINE, LINES_SIZE, MARK
from bench.job import Figure, Job, Size
from bench.report import Target


def attached(engine: Engine, copies: int, driver: str, tty: bool) -> float:
    """MB/s from a container that writes `copies` of the image's file of lines.

    Every line must arrive.
    """
    command = f"read go; for i in $(seq {copies}); do cat /lines; done"
    with engine.connection() as connection:
        container = steps.run(
            *(connection, "sh", "-c", command),
            host={"LogConfig": {"Type": driver}},
            OpenStdin=True,
            StdinOnce=True,
            AttachStdin=True,
            AttachStdout=True,
            Tty=tty,
        )
        stream, early = wire.attach(engine.socket, container)
        begin = time.perf_counter()
        stream.sendall(b"go\n")
        wanted = copies * LINES_SIZE
        total = wire.drain_raw(stream, early, MARK) * len(LINE) if tty else wire.drain(stream, early)
        elapsed = time.perf_counter() - begin
        assert total == wanted, f"{total} bytes of {wanted}"
        assert steps.wait(connection, container) == 0
        steps.remove(connection, container)
    return wanted / elapsed / 1e6


def job(size: Size, name: str, what: str, megabytes: int, driver: str, tty: bool, times: float) -> Job:
    copies = max(1, size.of(megabytes, 32) * 1_000_000 // LINES_SIZE)

    def sample(engine: Engine, _: Any) -> float:
        return attached(engine, copies, driver, tty)

    target = Target({"dockerd": times, "podman": 1})
    return Job(name, [Figure(name, what, "MB/s", False, target)], sample, size.rounds(2), warm=False)


def jobs(size: Size) -> list[Job]:
    return [
        job(size, "attach", "output to an attached client, not logged", 500, "none", False, 8),
        job(size, "attach-logged", "the same, logged by json-file as well", 100, "json-file", False, 8),
        job(size, "attach-tty", "output of a terminal to an attached client, not logged", 80, "none", True, 4),
        job(size, "attach-tty-logged", "the same, logged by json-file as well", 60, "json-file", True, 4),
    ]
