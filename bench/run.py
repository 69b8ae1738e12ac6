"""`make bench`: engined, dockerd and podman through the same API on this host, in one run, a row each job.

Every row first asserts that the engine's answer is right, then takes samples in turns (one of each engine, again and again, another one first
each time), so that what the host does meanwhile meets all of them. Shown is the median; beside each peer's, how many times better engined's
is. The table goes to stdout, everything to bench/results/*.json. An engine that is not installed is a line that says so; one that fails fails
the run.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import wire
from bench.engines import KINDS, Engine, load_busybox, proportional_set_size

RESULTS = Path(__file__).resolve().parent / "results"
ATTACHED = 512 << 20
AFTERMATH = 0.5
"""Seconds between samples, in which an engine may end what it does behind its replies: not its successor's to bear."""
IDLE = 20
"""Containers that run while lists and inspects are asked for."""


@dataclass
class Row:
    """One job: `sample` does it once and returns the number; `rounds` samples of each engine."""

    name: str
    what: str
    unit: str
    sample: Callable[[Engine], float]
    rounds: int
    less_is_better: bool = True
    prepare: Callable[[Engine], None] = lambda _engine: None
    finish: Callable[[Engine], None] = lambda _engine: None
    samples: dict[str, list[float]] = field(default_factory=dict)


def create(connection: wire.Connection, *command: str, network: str = "none", **more: Any) -> str:
    host = {"NetworkMode": network, **more.pop("host", {})}
    return str(
        connection.json("POST", "/containers/create", {"Image": "busybox", "Cmd": command, "HostConfig": host, **more})[
            "Id"
        ]
    )


def remove(connection: wire.Connection, container: str) -> None:
    status, body = connection.ask("DELETE", f"/containers/{container}?force=1")
    assert status == 204, (status, body)


def one_life(
    engine: Engine, connection: wire.Connection, command: Sequence[str] = ("true",), network: str = "none"
) -> float:
    """Milliseconds of create, start, wait and remove; the exit code must be 0."""
    begin = time.perf_counter()
    container = create(connection, *command, network=network)
    status, body = connection.ask("POST", f"/containers/{container}/start")
    assert status == 204, (engine.name, status, body)
    ended = connection.json("POST", f"/containers/{container}/wait")
    remove(connection, container)
    elapsed = (time.perf_counter() - begin) * 1000
    assert ended["StatusCode"] == 0, (engine.name, ended)
    return elapsed


def answers_right(engine: Engine, network: str = "none") -> None:
    """What a container prints is what is logged, and its exit code is its own."""
    connection = wire.Connection(engine.socket)
    container = create(connection, "sh", "-c", "echo right; exit 3", network=network)
    connection.ask("POST", f"/containers/{container}/start")
    assert connection.json("POST", f"/containers/{container}/wait")["StatusCode"] == 3, engine.name
    status, body = connection.ask("GET", f"/containers/{container}/logs?stdout=1")
    assert status == 200 and b"right\n" in body, (engine.name, status, body)
    remove(connection, container)
    connection.close()


def life(network: str) -> Callable[[Engine], float]:
    def sample(engine: Engine) -> float:
        connection = wire.Connection(engine.socket)
        elapsed = one_life(engine, connection, network=network)
        connection.close()
        return elapsed

    return sample


def warm(sample: Callable[[Engine], float], times: int = 5) -> Callable[[Engine], float]:
    """The median of several in a row, after one that wakes the machine: an idle virtual machine's first steps cost more than the work measured."""

    def several(engine: Engine) -> float:
        sample(engine)
        return statistics.median(sample(engine) for _ in range(times))

    return several


def lives_at_once(engine: Engine) -> float:
    """Containers a second, 8 clients side by side, 4 lives each."""

    def client(_: int) -> None:
        connection = wire.Connection(engine.socket)
        for _ in range(4):
            one_life(engine, connection)
        connection.close()

    begin = time.perf_counter()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(client, range(8)))
    return 32 / (time.perf_counter() - begin)


def start_idle(engine: Engine, count: int) -> list[str]:
    def start(_: int) -> str:
        connection = wire.Connection(engine.socket)
        container = create(connection, "sleep", "3600")
        status, body = connection.ask("POST", f"/containers/{container}/start")
        assert status == 204, (engine.name, status, body)
        connection.close()
        return container

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(start, range(count)))


def remove_all(engine: Engine) -> None:
    connection = wire.Connection(engine.socket)
    for container in connection.json("GET", "/containers/json?all=1"):
        remove(connection, container["Id"])
    connection.close()


def memory_per_container(count: int) -> Callable[[Engine], float]:
    """KiB of PSS that each further idle container costs, beyond the first 20."""

    def sample(engine: Engine) -> float:
        start_idle(engine, 20)
        settle()
        few = proportional_set_size(engine.base)
        start_idle(engine, count)
        settle()
        many = proportional_set_size(engine.base)
        connection = wire.Connection(engine.socket)
        assert len(connection.json("GET", "/containers/json")) == count + 20, engine.name
        connection.close()
        remove_all(engine)
        return (many - few) / count / 1024

    return sample


def memory_alone(engine: Engine) -> float:
    """MiB of PSS of the engine without a container."""
    return proportional_set_size(engine.base) / (1 << 20)


def settle() -> None:
    """Let work that goes on after the replies end: a fixed second for everybody, as no engine tells when it is at rest."""
    time.sleep(1)


def attached_rate(engine: Engine) -> float:
    """GB/s from a container that writes 512 MB, without logging, to an attached client."""
    connection = wire.Connection(engine.socket)
    count = ATTACHED >> 20
    container = create(
        *(connection, "sh", "-c", f"read go; exec dd if=/dev/zero bs=1M count={count} 2>/dev/null"),
        host={"LogConfig": {"Type": "none"}},
        OpenStdin=True,
        StdinOnce=True,
        AttachStdin=True,
        AttachStdout=True,
    )
    status, body = connection.ask("POST", f"/containers/{container}/start")
    assert status == 204, (engine.name, status, body)
    stream, early = wire.attach(engine.socket, container)
    begin = time.perf_counter()
    stream.sendall(b"go\n")
    total = wire.drain(stream, early)
    elapsed = time.perf_counter() - begin
    assert total == ATTACHED, (engine.name, total)
    remove(connection, container)
    connection.close()
    return total / elapsed / 1e9


def exec_echo(engine: Engine) -> float:
    """Milliseconds of one `echo` in a running container: create, start, its output to the end, and its exit code."""
    connection = wire.Connection(engine.socket)
    begin = time.perf_counter()
    config = {"AttachStdout": True, "Cmd": ["echo", "said"]}
    made = connection.json("POST", f"/containers/{_idle[engine.name][0]}/exec", config)["Id"]
    stream, received = wire.hijack(engine.socket, f"/exec/{made}/start", b"{}")
    with stream:
        while data := stream.recv(4096):
            received += data
    shown = connection.json("GET", f"/exec/{made}/json")
    elapsed = (time.perf_counter() - begin) * 1000
    assert received.endswith(b"said\n") and shown["ExitCode"] == 0, (engine.name, received, shown)
    connection.close()
    return elapsed


def requests_a_second(target: Callable[[Engine], str]) -> Callable[[Engine], float]:
    """GETs a second over 8 keep-alive connections, each with one request under way at a time."""

    def sample(engine: Engine) -> float:
        connections = [wire.Connection(engine.socket) for _ in range(8)]
        data = wire.request("GET", target(engine))
        count = 0
        begin = time.perf_counter()
        for connection in connections:
            connection.send(data)
        while (elapsed := time.perf_counter() - begin) < 1:
            for connection in connections:
                status, _ = connection.answer()
                connection.send(data)
                assert status == 200, (engine.name, status)
            count += len(connections)
        for connection in connections:
            connection.answer()
        for connection in connections:
            connection.close()
        return count / elapsed

    return sample


_idle: dict[str, list[str]] = {}


def with_one(engine: Engine) -> None:
    _idle[engine.name] = start_idle(engine, 1)


def with_idle(engine: Engine) -> None:
    _idle[engine.name] = start_idle(engine, IDLE)
    connection = wire.Connection(engine.socket)
    listed = connection.json("GET", "/containers/json")
    assert {one["Id"] for one in listed} == {*_idle[engine.name]}, engine.name
    shown = connection.json("GET", f"/containers/{_idle[engine.name][0]}/json")
    assert shown["State"]["Running"] and shown["Config"]["Cmd"] == ["sleep", "3600"], engine.name
    connection.close()


def rows(quick: bool) -> list[Row]:
    rounds = 3 if quick else 6
    return [
        Row(
            "run-none",
            "create+start+wait+remove of true, no network",
            "ms",
            warm(life("none")),
            rounds,
            prepare=answers_right,
        ),
        Row(
            "run-bridge",
            "the same on the bridge network",
            "ms",
            warm(life("bridge")),
            rounds,
            prepare=lambda engine: answers_right(engine, "bridge"),
        ),
        Row(
            "run-8",
            "the same without network, 8 clients at once",
            "containers/s",
            lives_at_once,
            1 if quick else 3,
            less_is_better=False,
        ),
        Row(
            "exec",
            "exec of echo: create, start, output, exit code",
            "ms",
            warm(exec_echo),
            rounds,
            prepare=with_one,
            finish=remove_all,
        ),
        Row(
            "attach",
            "attach to 512 MB of output, not logged",
            "GB/s",
            attached_rate,
            1 if quick else 5,
            less_is_better=False,
        ),
        Row(
            "list",
            f"GET /containers/json of {IDLE}, keep-alive",
            "requests/s",
            requests_a_second(lambda _: "/containers/json"),
            1 if quick else 5,
            False,
            with_idle,
            remove_all,
        ),
        Row(
            "inspect",
            "GET /containers/ID/json, keep-alive",
            "requests/s",
            requests_a_second(lambda engine: f"/containers/{_idle[engine.name][0]}/json"),
            1 if quick else 5,
            False,
            with_idle,
            remove_all,
        ),
        Row(
            "memory",
            "PSS of all engine processes per further idle container",
            "KiB",
            memory_per_container(20 if quick else 100),
            1,
        ),
        Row("memory-0", "PSS of the engine without containers", "MiB", memory_alone, 1),
    ]


def measure(row: Row, engines: Sequence[Engine]) -> None:
    """Prepare all engines, then take the samples in turns."""
    for engine in engines:
        row.prepare(engine)
        row.samples[engine.name] = []
    if row.rounds > 1:
        for engine in engines:  # the first one pays for caches; it is not counted
            row.sample(engine)
    for turn in range(row.rounds):
        for number in range(len(engines)):
            engine = engines[(turn + number) % len(engines)]
            time.sleep(AFTERMATH)
            row.samples[engine.name].append(row.sample(engine))
    for engine in engines:
        row.finish(engine)


def line_of(row: Row, names: Sequence[str]) -> str:
    ours = statistics.median(row.samples[names[0]])
    cells = [f"{row.name:<11}{number(ours):>10}"]
    for name in names[1:]:
        theirs = statistics.median(row.samples[name])
        ratio = theirs / ours if row.less_is_better else ours / theirs
        cells.append(f"{number(theirs):>10} {f'({ratio:.1f}x)':>9}")
    return "".join(cells) + f"  {row.unit:<13}{row.what}"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def machine() -> dict[str, Any]:
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "",
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": os.getloadavg(),
    }


def commit() -> str:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False, cwd=RESULTS.parent
    )
    return found.stdout.strip() or "unknown"


@contextlib.contextmanager
def running(wanted: Sequence[str]) -> Iterator[list[Engine]]:
    """The engines asked for, started, each with busybox; all ended afterwards."""
    with contextlib.ExitStack() as stack:
        engines: list[Engine] = []
        for kind in KINDS:
            if wanted and kind.name not in wanted:
                continue
            if reason := kind.missing():
                if wanted:
                    raise SystemExit(f"bench: {reason}")
                print(f"{kind.name}: not measured: {reason}")
                continue
            engine = kind()
            stack.callback(engine.close)
            engine.start()
            load_busybox(engine)
            engines.append(engine)
        yield engines


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bench.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--row", action="append", metavar="NAME", help="this row alone; repeatable")
    parser.add_argument("--engine", action="append", metavar="NAME", help="this engine alone; repeatable")
    parser.add_argument("--quick", action="store_true", help="a few samples: whether it works, not how fast it is")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        print("bench: engines need root", file=sys.stderr)
        return 1
    chosen = [row for row in rows(arguments.quick) if not arguments.row or row.name in arguments.row]
    if not chosen:
        print(f"bench: no such row; there are {', '.join(row.name for row in rows(True))}", file=sys.stderr)
        return 2
    with running(arguments.engine or []) as engines:
        names = [engine.name for engine in engines]
        versions = {engine.name: engine.version() for engine in engines}
        print(
            ", ".join(versions.values()),
            f"on {machine()['cpu']}, {os.cpu_count()} cores, Linux {platform.release()}; medians, (times better)",
        )
        print(f"{'':<11}{names[0]:>10}" + "".join(f"{name:>10} {'':>9}" for name in names[1:]))
        for row in chosen:
            measure(row, engines)
            print(line_of(row, names), flush=True)
    RESULTS.mkdir(exist_ok=True)
    now = datetime.datetime.now(datetime.UTC)
    path = RESULTS / f"{now:%Y%m%dT%H%M%SZ}-{commit()}.json"
    result = {
        "time": now.isoformat(),
        "commit": commit(),
        "machine": machine(),
        "versions": versions,
        "rows": [
            {
                "name": row.name,
                "what": row.what,
                "unit": row.unit,
                "less_is_better": row.less_is_better,
                "median": {name: statistics.median(values) for name, values in row.samples.items()},
                "samples": row.samples,
            }
            for row in chosen
        ],
    }
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"all samples: {os.path.relpath(path)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
