"""The log of a container that wrote a gigabyte: written, read whole, read from the end, read
since a time, followed; and the end of the log of a container that runs.
"""

from __future__ import annotations

import datetime
import os
import statistics
import time
from typing import Any

from bench import steps, wire
from bench.engines import Engine
from bench.image import LINE, LINES_SIZE, MARK
from bench.job import Figure, Job, Size, cost_figures, costs
from bench.report import Target
from tests.support.engine.harness import until

LOG_LINE = 175
"""Approximate bytes of LINE in a json-file log. The gigabyte is the size of the log."""
LAST = 10


def seconds(text: str) -> int:
    """A time from inspect as Unix time, rounded down."""
    return int(datetime.datetime.fromisoformat(text[:19] + "+00:00").timestamp())


def lines_of(engine: Engine, container: str, query: str) -> list[bytes]:
    """Payloads of the requested log, one per frame."""
    body = wire.Download(engine.socket, "GET", f"/containers/{container}/logs?stdout=1&{query}").read()
    found, at = [], 0
    while at < len(body):
        size = int.from_bytes(body[at + 4 : at + 8], "big")
        found.append(body[at + 8 : at + 8 + size])
        at += 8 + size
    return b"".join(found).splitlines()


class Gigabyte:
    """Writes the log with a container that runs twice: `copies` of the lines, then LAST lines."""

    def __init__(self, copies: int) -> None:
        self._copies = copies

    def sample(self, engine: Engine, _: Any) -> tuple[float, ...]:
        bulk = f"for i in $(seq {self._copies}); do cat /lines; done; echo written; touch /written"
        last = f"for i in $(seq {LAST - 1}); do echo last $i; done"
        payload = self._copies * LINES_SIZE
        with engine.connection() as connection:
            container = steps.create(
                *(connection, "sh", "-c", f"if [ -e /written ]; then {last}; else {bulk}; fi"),
                host={"LogConfig": {"Type": "json-file"}},
            )
            try:
                begin = time.perf_counter()
                steps.start(connection, container)
                assert steps.wait(connection, container) == 0
                written = payload / (time.perf_counter() - begin) / 1e6
                time.sleep(2.1)  # `since` counts whole seconds
                steps.start(connection, container)
                assert steps.wait(connection, container) == 0
                os.sync()
                since = seconds(steps.inspect(connection, container)["State"]["FinishedAt"]) - 1
                return written, *self._read(engine, container, payload, since)
            finally:
                steps.remove(connection, container)

    def _read(self, engine: Engine, container: str, payload: int, since: int) -> tuple[float, ...]:
        """MB/s of reading all (four seconds at most); milliseconds of reading the end, and of
        reading since a time.
        """
        rates: list[float] = []
        enough = time.perf_counter() + 2
        while not rates or time.perf_counter() < enough:
            begin = time.perf_counter()
            lines, whole = wire.Download(engine.socket, "GET", f"/containers/{container}/logs?stdout=1").count(MARK, 4)
            rates.append(lines * len(LINE) / (time.perf_counter() - begin) / 1e6)
            assert lines * len(LINE) == payload or not whole, f"{lines} lines of {payload // len(LINE)}"
        last = [f"last {number}".encode() for number in range(1, LAST)]
        tail = self._times(engine, container, f"tail={LAST}", [b"written", *last])
        return statistics.median(rates), tail, self._times(engine, container, f"since={since}", last)

    @staticmethod
    def _times(engine: Engine, container: str, query: str, lines: list[bytes]) -> float:
        """Milliseconds: median of at most twenty reads within two seconds.

        The answer must be `lines`.
        """
        found: list[float] = []
        while not found or (len(found) < 20 and sum(found) < 2000):
            begin = time.perf_counter()
            read = lines_of(engine, container, query)
            found.append((time.perf_counter() - begin) * 1000)
            assert read == lines, f"{query}: {read[:20]}"
        return statistics.median(found)


class Running:
    """A container that has written `count` lines and runs on: the end of its log."""

    def __init__(self, count: int, reads: int) -> None:
        self._lines, self._reads = count, reads
        self._last = [f"line {number}".encode() for number in range(count - LAST + 1, count + 1)]

    def prepare(self, engine: Engine) -> str:
        command = f"for i in $(seq {self._lines}); do echo line $i; done; sleep 36000"
        with engine.connection() as connection:
            container = steps.run(connection, "sh", "-c", command, host={"LogConfig": {"Type": "json-file"}})
        until("the log is written", lambda: lines_of(engine, container, f"tail={LAST}") == self._last)
        return container

    def sample(self, engine: Engine, container: str) -> tuple[float, float]:
        def read() -> None:
            lines = lines_of(engine, container, f"tail={LAST}")
            assert lines == self._last, lines

        return costs(engine, self._reads, read)

    @staticmethod
    def finish(engine: Engine, container: str) -> None:
        with engine.connection() as connection:
            steps.remove(connection, container)


def follow_latency(engine: Engine, _: Any) -> float:
    """Milliseconds from a line on the container's stdin until a log follower receives it.

    Median of eight.
    """
    with engine.connection() as connection:
        container = steps.run(
            *(connection, "cat"), OpenStdin=True, AttachStdin=True, host={"LogConfig": {"Type": "json-file"}}
        )
        stdin, _ = wire.attach(engine.socket, container, "stream=1&stdin=1")
        stdin.sendall(b"first\n")
        target = f"/containers/{container}/logs?stdout=1&follow=1"
        follower = wire.connect(engine.socket, 20)
        follower.sendall(wire.request("GET", target))
        received = b""
        while b"first\n" not in received:
            received += follower.recv(65536)
        found = []
        for number in range(8):
            line = b"line %d\n" % number
            begin = time.perf_counter()
            stdin.sendall(line)
            received = b""
            while line not in received:
                data = follower.recv(65536)
                assert data, "the log ended"
                received += data
            found.append((time.perf_counter() - begin) * 1000)
            time.sleep(0.005)
        follower.close()
        stdin.close()
        # podman ends `cat` when its stdin ends, and cannot remove a container that is about to
        # exit.
        connection.ask("POST", f"/containers/{container}/kill")
        steps.wait(connection, container)
        steps.remove(connection, container)
    return statistics.median(found)


def jobs(size: Size) -> list[Job]:
    lines = size.of(1_000_000_000, 50_000_000) // LOG_LINE
    running = Running(1000, size.of(100, 3))
    log = Gigabyte(max(1, round(lines * len(LINE) / LINES_SIZE)))
    return [
        Job(
            "log",
            [
                Figure(
                    "log-write",
                    "output into a json-file log of 1 GB, no client attached",
                    "MB/s",
                    False,
                    Target({"podman": 1}),
                ),
                Figure("log-read", "reading all of that log", "MB/s", False, Target({"dockerd": 15, "podman": 1})),
                Figure("log-tail", f"its last {LAST} lines", "ms", target=Target({"podman": 1})),
                Figure("log-since", f"its last second ({LAST - 1} lines)", "ms", target=Target({"podman": 1})),
            ],
            log.sample,
        ),
        Job(
            "log-tail-running",
            cost_figures("log-tail-running", f"the last {LAST} of 1,000 lines of a running container"),
            running.sample,
            size.rounds(3),
            running.prepare,
            running.finish,
        ),
        Job(
            "log-follow",
            [
                Figure(
                    "log-follow",
                    "a line from stdin of `cat` to a follower of its log",
                    "ms",
                    target=Target({"podman": 1}),
                )
            ],
            follow_latency,
            size.rounds(2),
        ),
    ]
