"""Growth in engined: memory over a thousand restarts and ten thousand execs, start time beside a
thousand containers.

Nothing should grow. These rows run only when named, and take minutes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from bench import steps, wire
from bench.engines import Engine
from bench.job import Figure, Job, Size
from bench.report import Target
from bench.rows.resources import settled

PORTS, FIRST_PORT = 4, 20000
TIMES = 30
PAUSE = 0.1
"""Seconds before a start, in which the background work of the previous removal ends."""


def growth(engine: Engine, warm_up: Callable[[], object], work: Callable[[], object]) -> tuple[float, ...]:
    """KiB of anonymous memory, descriptors and processes that `work` adds after `warm_up`.

    Not PSS, which changes when other processes of the host share Python's pages.
    """

    def now() -> tuple[float, ...]:
        settled(engine)
        return engine.memory("Anonymous") / 1024, engine.descriptors(), len(engine.namespaces.pids())

    warm_up()
    before = now()
    work()
    return tuple(after - one for after, one in zip(now(), before, strict=True))


def restarts(count: int) -> Callable[[Engine, Any], tuple[float, ...]]:
    def sample(engine: Engine, _: Any) -> tuple[float, ...]:
        with engine.connection() as connection:
            container = steps.run(connection, "sleep", "36000", network="bridge")

            def restart(times: int) -> None:
                for _ in range(times):
                    connection.expect(204, "POST", f"/containers/{container}/restart?t=0")

            found = growth(engine, lambda: restart(150), lambda: restart(count))
            steps.remove(connection, container)
        return found

    return sample


def execs(count: int) -> Callable[[Engine, Any], tuple[float, ...]]:
    def one(connection: wire.Connection, job: tuple[Engine, str]) -> None:
        engine, container = job
        made = connection.json(
            "POST", f"/containers/{container}/exec", {"AttachStdout": True, "Cmd": ["echo", "said"]}
        )["Id"]
        stream, received = wire.hijack(engine.socket, f"/exec/{made}/start", b"{}")
        with stream:
            while data := stream.recv(4096):
                received += data
        assert received.endswith(b"said\n"), received

    def sample(engine: Engine, _: Any) -> tuple[float, ...]:
        job = (engine, engine.idle[0])
        return growth(
            engine,
            # more than the engine remembers
            lambda: steps.side_by_side(engine, [job] * 2000, one),
            lambda: steps.side_by_side(engine, [job] * count, one),
        )

    return sample


def starts(count: int) -> Callable[[Engine, Any], tuple[float, ...]]:
    """Milliseconds of the first start with PORTS published ports and of the `count`th, and their
    ratio.

    Each is the best of TIMES starts; each container is removed again.
    """

    def made(connection: wire.Connection, number: int) -> str:
        ports = {f"{1000 + at}/tcp": [{"HostPort": str(FIRST_PORT + PORTS * number + at)}] for at in range(PORTS)}
        more = {"ExposedPorts": {port: {} for port in ports}, "host": {"PortBindings": ports}}
        return steps.create(connection, "sleep", "36000", network="bridge", **more)

    def begun(connection: wire.Connection, number: int) -> str:
        container = made(connection, number)
        steps.start(connection, container)
        return container

    def best(connection: wire.Connection, number: int) -> float:
        found = []
        for _ in range(TIMES):
            container = made(connection, number)
            time.sleep(PAUSE)
            begin = time.perf_counter()
            steps.start(connection, container)
            found.append((time.perf_counter() - begin) * 1000)
            steps.remove(connection, container)
        return min(found)

    def sample(engine: Engine, _: Any) -> tuple[float, ...]:
        with engine.connection() as connection:
            first = best(connection, count - 1)
            others = steps.side_by_side(engine, list(range(count - 1)), begun)
            try:
                settled(engine)
                last = best(connection, count - 1)
            finally:
                steps.side_by_side(engine, others, steps.remove)
        return first, last, last / first

    return sample


def job(name: str, what: str, sample: Callable[[Engine, Any], tuple[float, ...]], idle: int) -> Job:
    return Job(
        name,
        [
            Figure(name, f"anonymous memory that {what} leave", "KiB", target=Target(at_most=1024)),
            Figure(f"{name}-descriptors", f"descriptors that {what} leave", "", target=Target(at_most=0)),
            Figure(f"{name}-processes", f"processes that {what} leave", "", target=Target(at_most=0)),
        ],
        sample,
        idle=idle,
        ours=True,
        default=False,
    )


def jobs(size: Size) -> list[Job]:
    many_starts = size.of(1000, 50)
    many_restarts, many_execs = size.of(1000, 50), size.of(10_000, 500)
    return [
        Job(
            "growth-starts",
            [
                Figure("growth-starts-first", f"start of a first container, bridge, {PORTS} published ports", "ms"),
                Figure("growth-starts-last", f"the same beside {many_starts - 1:,} such containers", "ms"),
                Figure("growth-starts", "the latter / the former", "x", target=Target(at_most=1.2)),
            ],
            starts(many_starts),
            ours=True,
            default=False,
        ),
        job("growth-restarts", f"{many_restarts:,} restarts", restarts(many_restarts), 0),
        job("growth-execs", f"{many_execs:,} execs", execs(many_execs), 1),
    ]
