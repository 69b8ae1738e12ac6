"""Output to an attached client: framed and from a terminal, logged and not logged."""

from __future__ import annotations

import math
import time
from typing import Any

from bench import steps, wire
from bench.engines import Engine
from bench.image import LINE, LINES_SIZE, MARK
from bench.job import Figure, Job, Size
from bench.report import Target


def attached(engine: Engine, copies: int, driver: str, tty: bool) -> tuple[float, float]:
    """MB/s from a container that writes `copies` of the image's file of lines, and the engine's
    processor time in seconds for a GB.

    Every line must arrive. The container then waits until both are measured, because a shim ends
    with it.
    """
    command = f"read go; for i in $(seq {copies}); do cat /lines; done; read end"
    wanted = copies * LINES_SIZE
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

        def read(early: bytes, limit: float) -> int:
            if tty:
                return wire.drain_raw(stream, early, MARK, limit / len(LINE)) * len(LINE)
            return wire.drain(stream, early, limit)

        with stream:
            with engine.metered() as meter:
                begin = time.perf_counter()
                stream.sendall(b"go\n")
                total = read(early, wanted)
                elapsed = time.perf_counter() - begin
            stream.sendall(b"end\n")
            total += read(b"", math.inf)
        assert total == wanted, f"{total} bytes of {wanted}"
        assert steps.wait(connection, container) == 0
        steps.remove(connection, container)
    return wanted / elapsed / 1e6, meter.seconds / wanted * 1e9


def job(size: Size, name: str, what: str, megabytes: int, driver: str, tty: bool, times: float) -> Job:
    copies = max(1, size.of(megabytes, 32) * 1_000_000 // LINES_SIZE)

    def sample(engine: Engine, _: Any) -> tuple[float, float]:
        return attached(engine, copies, driver, tty)

    target = Target({"dockerd": times, "podman": 1})
    figures = [
        Figure(name, what, "MB/s", False, target),
        Figure(f"{name}-cpu", "the engine's processor time for that", "s/GB", target=Target({"dockerd": 2})),
    ]
    return Job(name, figures, sample, size.rounds(2), warm=False)


def jobs(size: Size) -> list[Job]:
    return [
        job(size, "attach", "output to an attached client, not logged", 500, "none", False, 8),
        job(size, "attach-logged", "the same, logged by json-file as well", 100, "json-file", False, 8),
        job(size, "attach-tty", "output of a terminal to an attached client, not logged", 80, "none", True, 4),
        job(size, "attach-tty-logged", "the same, logged by json-file as well", 60, "json-file", True, 4),
    ]
