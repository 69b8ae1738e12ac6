"""Thousands of idle containers of engined on one host: what a start, a list, a restart of the
daemon and a removal cost there. These rows run only when named, and take minutes.

Containers without a network, and on the default bridge, which has 1,023 ports. Memory is not
measured: the kernel keeps tables that it has once enlarged, so it belongs into a machine that has
just booted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from bench import steps
from bench.engines import Engine
from bench.job import Figure, Job, Size
from bench.rows.daemons import remove_running
from bench.rows.resources import settled

CLIENTS = 4
"""Clients that start containers at once."""
TIMED = 100
"""The last starts before each level, which are timed."""


def crowd(levels: Sequence[int], timed: int, network: str) -> Callable[[Engine, Any], tuple[float, ...]]:
    """For each number of containers that run in the end: starts per second, and milliseconds of
    the engine's processor time for a start, by its runtimes too. Then descriptors of daemon and
    monitor for a container, milliseconds until a daemon answers again after SIGTERM, of its first
    list and of the next one, and removals per second.
    """

    def sample(engine: Engine, _: Any) -> tuple[float, ...]:
        settled(engine)
        before = engine.descriptors()
        figures: list[float] = []
        for level in levels:
            start_idle(engine, level - timed, network)
            with engine.metered() as meter:
                begin = time.perf_counter()
                start_idle(engine, level, network)
                elapsed = time.perf_counter() - begin
            figures += timed / elapsed, meter.seconds / timed * 1000
        settled(engine)
        figures.append((engine.descriptors() - before) / levels[-1])
        begin = time.perf_counter()
        engine.stop()
        engine.start()
        figures.append((time.perf_counter() - begin) * 1000)
        figures += first_list(engine), first_list(engine)
        settled(engine)
        figures.append(levels[-1] / remove_running(engine, None) * 1000)
        return tuple(figures)

    return sample


def start_idle(engine: Engine, count: int, network: str) -> None:
    """Start idle containers until `count` run."""
    new = range(len(engine.idle), count)
    engine.idle += steps.side_by_side(
        engine,
        [*new],
        lambda connection, _: steps.run(connection, "sleep", "36000", network=network),
        clients=CLIENTS,
    )


def first_list(engine: Engine) -> float:
    """Milliseconds until all containers are listed."""
    with engine.connection() as connection:
        begin = time.perf_counter()
        listed = connection.json("GET", "/containers/json")
        elapsed = time.perf_counter() - begin
    assert {one["Id"] for one in listed} == {*engine.idle}, f"{len(listed)} of {len(engine.idle)} containers run"
    return elapsed * 1000


def job(name: str, levels: Sequence[int], timed: int, network: str) -> Job:
    last = f"{levels[-1]:,} containers, network {network}"
    figures = []
    for level in levels:
        figures += [
            Figure(
                f"{name}-start-{level}",
                f"create + start to {level:,} containers, network {network}, {CLIENTS} clients",
                *("1/s", False),
            ),
            Figure(f"{name}-cpu-{level}", "processor time of engine and runtime for one of these", "ms"),
        ]
    figures += [
        Figure(f"{name}-fds", f"descriptors of daemon and monitor for each of {last}", ""),
        Figure(f"{name}-restart", f"SIGTERM to the daemon until the next one answers, {last}", "ms"),
        Figure(f"{name}-list-first", "its first list of all", "ms"),
        Figure(f"{name}-list", "its next one", "ms"),
        Figure(f"{name}-rm", f"removal by force of {last}, {steps.CLIENTS} clients", "1/s", False),
    ]
    return Job(name, figures, crowd(levels, timed, network), warm=False, ours=True, default=False)


def jobs(size: Size) -> list[Job]:
    timed = size.of(TIMED, 5)
    return [
        job("dense", size.of((100, 1000, 3000), (10, 20)), timed, "none"),
        job("dense-bridge", size.of((100, 1000, 3000), (10, 20)), timed, "bridge"),
    ]
