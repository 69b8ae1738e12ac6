"""Lines of containers to remote log targets: the processor time of the engine's own processes for
each line, from the container's write until the target has it. And the shipper alone, with a
thousand spools and no engine.

The targets are receivers that only count (`bench/sink.py`), in the engine's network namespace.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from bench import steps
from bench.engines import Engine
from bench.image import LINE, LINES_SIZE, MARK
from bench.job import Figure, Job, Size
from bench.report import Target
from engine.logs.deliveries import JOURNAL, Syslog
from tests.support.logs.shipping import Shipping

PORT = 5514
IN_FILE = LINES_SIZE // len(LINE)
PATIENCE = 60
"""Seconds until the last line must have arrived."""


class Driver(NamedTuple):
    """A row. `kind`: of the sink. `lossy`: UDP may lose lines, which is no fault of the engine.
    `lines`: as many as dockerd delivers within seconds."""

    name: str
    what: str
    driver: str
    options: dict[str, str]
    kind: str
    lines: int
    times: float
    lossy: bool = False


DRIVERS = (
    Driver(
        "log-syslog", "syslog over TCP", "syslog", {"syslog-address": f"tcp://127.0.0.1:{PORT}"}, "stream", 640_000, 4
    ),
    Driver("log-journald", "the journal", "journald", {}, "journal", 320_000, 4),
    Driver(
        *("log-gelf", "GELF over UDP, compressed (the default)", "gelf", {"gelf-address": f"udp://127.0.0.1:{PORT}"}),
        *("datagrams", 5_000, 10, True),
    ),
    Driver("log-gelf-tcp", "GELF over TCP", "gelf", {"gelf-address": f"tcp://127.0.0.1:{PORT}"}, "stream", 640_000, 10),
    Driver(
        *("log-fluentd", "Fluentd", "fluentd", {"fluentd-address": f"127.0.0.1:{PORT}"}, "stream", 640_000, 10),
    ),
    Driver(
        *("log-splunk", "Splunk's HTTP Event Collector", "splunk"),
        {"splunk-url": f"http://127.0.0.1:{PORT}", "splunk-token": "t"},
        *("http", 640_000, 10),
    ),
)


class Sink:
    """The receiver, beside an engine."""

    def __init__(self, engine: Engine, driver: Driver) -> None:
        self._namespaces = engine.namespaces
        place = JOURNAL if driver.kind == "journal" else str(PORT)
        program = [sys.executable, "-m", "bench.sink", driver.kind, place]
        if driver.kind == "journal":
            # A journal of the namespace's own; the host may have none, or one that must not be
            # filled.
            mount = f"mkdir -p {Path(JOURNAL).parent.parent} && mount -t tmpfs tmpfs {Path(JOURNAL).parent.parent}"
            subprocess.run(engine.namespaces.command("sh", "-c", mount), check=True)
        self._process = subprocess.Popen(
            engine.namespaces.command(*program), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        engine.namespaces.not_the_engine.add(self._process.pid)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            raise RuntimeError("the sink does not start")

    def lines(self) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._namespaces.not_the_engine.discard(self._process.pid)


def per_line(driver: Driver, lines: int) -> Any:
    """Microseconds of processor time for a line."""

    def sample(engine: Engine, _: Any) -> float:
        copies, rest = divmod(lines, IN_FILE)
        command = f"for i in $(seq {copies}); do cat /lines; done; head -n {rest} /lines"
        sink = Sink(engine, driver)
        try:
            with engine.connection() as connection:
                log = {"Type": driver.driver, "Config": driver.options}
                container = steps.create(connection, "sh", "-c", command, host={"LogConfig": log})
                before = engine.processor_time()
                steps.start(connection, container)
                assert steps.wait(connection, container) == 0
                arrived = _arrived(sink, lines, lossy=driver.lossy)
                spent = engine.processor_time() - before
                steps.remove(connection, container)
            assert arrived >= (lines // 2 if driver.lossy else lines), f"{arrived} of {lines} lines arrived"
            return spent / lines * 1e6
        finally:
            sink.close()

    return sample


def _arrived(sink: Sink, lines: int, *, lossy: bool) -> int:
    """Lines that have arrived when no more come."""
    end = time.monotonic() + PATIENCE
    found = before = -1
    while found < lines and time.monotonic() < end and not (lossy and found == before and found > 0):
        before = found
        time.sleep(0.3)
        found = sink.lines()
    return found


def thousand(spools: int) -> Any:
    """Megabytes of the shipper with so many spools that have each delivered lines; and the longest
    delay in seconds of a line of the others while one spool floods."""

    def sample(_: Engine, __: Any) -> tuple[float, float]:
        with tempfile.TemporaryDirectory() as base:
            shipping = Shipping(Path(base))
            process = subprocess.Popen(
                [sys.executable, "-m", "bench.sink", "stream", str(PORT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            try:
                assert process.stdin is not None and process.stdout is not None
                assert process.stdout.readline() == b"ready\n"
                return _thousand(shipping, process, spools)
            finally:
                shipping.close()
                process.kill()
                process.communicate()

    return sample


def _thousand(shipping: Shipping, process: subprocess.Popen[bytes], count: int) -> tuple[float, float]:
    assert process.stdin is not None and process.stdout is not None

    def arrived() -> int:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        return int(process.stdout.readline())

    spools = [shipping.spool(Syslog(scheme="tcp", host="127.0.0.1", port=PORT)) for _ in range(count)]
    shipping.start()
    for spool in spools:
        spool.write(LINE * 100)
    end = time.monotonic() + PATIENCE
    while arrived() < count * 100 and time.monotonic() < end:
        time.sleep(0.05)
    assert arrived() == count * 100
    assert shipping.process is not None
    status = Path(f"/proc/{shipping.process.pid}/status").read_text()
    memory = int(status.split("VmRSS:")[1].split()[0]) * 1024 / 1e6
    # The flood has no mark, so the sink counts the lines of the others alone.
    flood = LINE.replace(MARK, b"-") * 1000
    longest = 0.0
    total = count * 100
    for _ in range(10):
        for _ in range(100):
            spools[0].write(flood)
        begin = time.perf_counter()
        for spool in spools[1:]:
            spool.write(LINE)
        total += count - 1
        while arrived() < total:
            spools[0].write(flood)
            assert time.perf_counter() - begin < PATIENCE
        longest = max(longest, time.perf_counter() - begin)
    return memory, longest


def jobs(size: Size) -> list[Job]:
    rows = []
    for driver in DRIVERS:
        lines = size.of(driver.lines, 2_000)
        what = f"processor time per line to {driver.what}"
        figure = Figure(driver.name, what, "us", target=Target({"dockerd": driver.times}))
        rows.append(Job(driver.name, [figure], per_line(driver, lines), size.rounds(3), warm=True))
    spools = size.of(1_000, 50)
    figures = [
        Figure("shipper-memory", "memory of the shipper with 1,000 containers", "MB", target=Target(at_most=60)),
        Figure(
            *("shipper-fair", "longest delay of a line of 999 containers while one floods", "s"),
            target=Target(at_most=1),
        ),
    ]
    rows.append(Job("shipper", figures, thousand(spools), size.rounds(3), warm=False, ours=True))
    return rows
