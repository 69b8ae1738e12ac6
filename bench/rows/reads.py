"""Lists and inspects with 1, 150, 1,000 and 5,000 containers: milliseconds of one, and requests
a second.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
import urllib.parse
from collections.abc import Callable

from bench import steps, wire
from bench.engines import Engine
from bench.job import Figure, Job, Size
from bench.meanwhile import Meanwhile
from bench.report import Target
from bench.rows import lifecycle
from tests.support.images import archives

CONNECTIONS = 8


def rate(engine: Engine, target: str, seconds: float) -> tuple[float, float]:
    """Milliseconds of one GET on one connection (median), and GETs a second over CONNECTIONS,
    one at a time on each.
    """
    data = wire.request("GET", target)
    alone: list[float] = []
    with engine.connection() as connection:
        until = time.perf_counter() + seconds
        while (begin := time.perf_counter()) < until:
            connection.send(data)
            status, _ = connection.answer()
            alone.append((time.perf_counter() - begin) * 1000)
            assert status == 200, status
    connections = [engine.connection() for _ in range(CONNECTIONS)]
    try:
        count = 0
        begin = time.perf_counter()
        for connection in connections:
            connection.send(data)
        while (elapsed := time.perf_counter() - begin) < seconds:
            for connection in connections:
                status, _ = connection.answer()
                connection.send(data)
                assert status == 200, status
            count += len(connections)
        for connection in connections:
            connection.answer()
    finally:
        for connection in connections:
            connection.close()
    return statistics.median(alone), count / elapsed


def filtered(**filters: str) -> str:
    return urllib.parse.quote(json.dumps({name: [value] for name, value in filters.items()}))


def right(engine: Engine, target: str, count: int) -> None:
    """Assert that the list has `count` containers, each once."""
    with engine.connection() as connection:
        listed = connection.json("GET", target)
    assert len({one["Id"] for one in listed}) == len(listed) == count, f"{target}: {len(listed)}, not {count}"


def read_jobs(
    size: Size, called: int, count: int, idle: int | None, made: Callable[[Engine], None] = lambda _: None
) -> list[Job]:
    """Jobs with `count` containers, which row names call `called`. `idle` of them run (None: any
    number); `made` creates the others, once.
    """
    bound = {1000: 5.0}.get(called)
    everything = "/containers/json?all=1"
    one = f"{everything}&filters={filtered(label='number=0')}"

    def listing(engine: Engine) -> str:
        made(engine)
        right(engine, everything, count)
        return everything

    def filtering(engine: Engine) -> str:
        made(engine)
        right(engine, one, 1)
        return one

    def inspecting(engine: Engine) -> str:
        made(engine)
        with engine.connection() as connection:
            container = connection.json("GET", one)[0]["Id"]
            shown = steps.inspect(connection, container)
        assert shown["Id"] == container and shown["Config"]["Cmd"] == ["sleep", "36000"]
        return f"/containers/{container}/json"

    def job(name: str, what: str, times: Target, bounded: Target, prepare: Callable[[Engine], str]) -> Job:
        return Job(
            f"{name}-{called}",
            [
                Figure(f"{name}-{called}", f"{what}, one connection", "ms", target=bounded),
                Figure(f"{name}-{called}-rate", f"the same, {CONNECTIONS} connections", "1/s", False, times),
            ],
            lambda engine, target: rate(engine, target, 0.1 if size.quick else 0.25),
            size.rounds(3),
            prepare=prepare,
            idle=idle,
            rest=0.05,
            warm=False,
        )

    four, floor = Target({"dockerd": 4, "podman": 1}), Target({"podman": 1}, bound)
    return [
        job("list", f"list of {count:,}", four, floor, listing),
        job("filter", f"list of {count:,}, one label asked for", four, floor, filtering),
        job("inspect", f"inspect, one of {count:,}", four, Target({"podman": 1}), inspecting),
    ]


def with_created(count: int) -> Callable[[Engine], None]:
    """Create containers without starting them, until there are `count` in total."""

    def make(engine: Engine) -> None:
        with engine.connection() as connection:
            have = len(connection.json("GET", "/containers/json?all=1"))

        def create(connection: wire.Connection, number: int) -> str:
            return steps.create(connection, "sleep", "36000", network="bridge", Labels={"number": str(number)})

        if have < count:
            steps.side_by_side(engine, list(range(have, count)), create)

    return make


def stopping(engine: Engine, target: str, seconds: float) -> float:
    """The slowest of many lists in milliseconds, while a container that ignores SIGTERM is being
    stopped.
    """
    with engine.connection() as connection:
        container = steps.run(connection, "sh", "-c", "trap '' TERM; while :; do sleep 1; done")

        def stop() -> None:
            with engine.connection() as other:
                other.ask("POST", f"/containers/{container}/stop?t={int(seconds) + 1}")

        thread = threading.Thread(target=stop)
        thread.start()
        try:
            found = []
            until = time.perf_counter() + seconds
            while (begin := time.perf_counter()) < until:
                connection.expect(200, "GET", target)
                found.append((time.perf_counter() - begin) * 1000)
        finally:
            thread.join()
            steps.remove(connection, container)
    return max(found)


def with_images(engine: Engine, count: int) -> None:
    """Load images until there are `count`: each has busybox's layer and one of its own."""
    with engine.connection() as connection:
        have = len(connection.json("GET", "/images/json"))

    def load(connection: wire.Connection, number: int) -> None:
        own = archives.tar([archives.Node(f"file-{number}", b"x" * 10_000)])
        image = archives.Image([archives.busybox_layer(), own], (f"few:{number}",), {"Cmd": ["sh"]})
        connection.expect(200, "POST", "/images/load?quiet=1", archives.docker_archive(image))

    if have < count:
        steps.side_by_side(engine, list(range(have, count)), load)


def disk_usage(size: Size, containers: int, images: int) -> Job:
    """`docker system df` with so many containers, and so many images or those of earlier jobs."""
    target = "/system/df"

    def prepare(engine: Engine) -> None:
        with_created(containers)(engine)
        with_images(engine, images)
        with engine.connection() as connection:
            shown = connection.json("GET", f"{lifecycle.CLI_API}{target}")
        assert len(shown["Containers"]) == containers and len(shown["Images"]) >= images, (
            len(shown["Containers"]),
            len(shown["Images"]),
        )

    def sample(engine: Engine, _: None) -> tuple[float, ...]:
        found = []
        with Meanwhile(engine) as meanwhile, engine.connection() as connection:
            for _ in range(size.of(10, 1)):
                begin = time.perf_counter()
                connection.expect(200, "GET", f"{lifecycle.CLI_API}{target}")
                found.append((time.perf_counter() - begin) * 1000)
        return statistics.median(found), meanwhile.ping

    what = f"disk usage of {containers:,} containers and {images} images"
    return Job(
        "df-1000",
        [
            Figure("df-1000", what, "ms", target=Target({"dockerd": 4, "podman": 1}, 50)),
            Figure("df-1000-ping", "the slowest answer to a ping meanwhile", "ms", target=Target(at_most=20)),
        ],
        sample,
        size.rounds(3),
        prepare=prepare,
        idle=None,
    )


def few(size: Size) -> list[Job]:
    return read_jobs(size, 1, 1, 1)


def dense(size: Size) -> list[Job]:
    """Jobs beside `count` running containers."""
    count = size.of(150, 20)
    return read_jobs(size, 150, count, count)


def many(size: Size) -> list[Job]:
    """Jobs that come last in a run. Their containers stay, because removing them would take peers
    longer than all measurements.
    """
    thousand, most = size.of(1000, 100), size.of(5000, 300)

    def prepared(engine: Engine) -> str:
        with_created(most)(engine)
        right(engine, "/containers/json?all=1", most)
        return "/containers/json?all=1"

    def sample(engine: Engine, target: str) -> tuple[float, ...]:
        alone, _ = rate(engine, target, 0.5)
        return alone, stopping(engine, target, 2)

    last = Job(
        "list-5000",
        [
            Figure("list-5000", f"list of {most:,}, one connection", "ms", target=Target(at_most=20)),
            Figure("list-5000-stop", "the worst of them in 2 s, while a container is being stopped", "ms"),
        ],
        sample,
        size.rounds(3),
        prepare=prepared,
        idle=None,
        ours=True,
    )
    return [
        *read_jobs(size, 1000, thousand, None, with_created(thousand)),
        disk_usage(size, thousand, size.of(200, 20)),
        last,
    ]
