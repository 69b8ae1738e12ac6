"""Thousands of idle containers of engined on one host: what a start, a list, a restart of the
daemon and a removal cost there. These rows run only when named, and take minutes.

Containers without a network, and on the default bridge, which has 1,023 ports. Memory is not
measured: the kernel keeps tables that it has once enlarged, so it belongs into a machine that has
just booted.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from bench import steps, wire
from bench.engines import Engine, Engined
from bench.job import Figure, Job, Size
from bench.meanwhile import Meanwhile
from bench.rows.daemons import remove_running
from bench.rows.resources import settled

CLIENTS = 4
"""Clients that start containers at once."""
TIMED = 100
"""The last starts before each level, which are timed."""


def crowd(levels: Sequence[int], timed: int, network: str) -> Callable[[Engine, Any], tuple[float, ...]]:
    """For each number of containers that run in the end: starts per second, and milliseconds of
    the engine's processor time for a start, by its runtimes too. Then descriptors of daemon and
    monitor for a container.
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
        remove_running(engine, None)
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


def first_list(engine: Engine, query: str = "") -> float:
    """Milliseconds until all containers are listed."""
    with engine.connection() as connection:
        begin = time.perf_counter()
        body = connection.expect(200, "GET", f"/containers/json{query}")
        elapsed = time.perf_counter() - begin
    listed = json.loads(wire.joined(body))
    assert {one["Id"] for one in listed} == {*engine.idle}, f"{len(listed)} of {len(engine.idle)} containers run"
    return elapsed * 1000


def restart(engine: Engined, end: Callable[[], None]) -> tuple[float, float, float]:
    """Milliseconds from the end of a daemon until the next one answers a ping, until it has listed
    all containers, and until it has started one.
    """
    begin = time.perf_counter()
    end()
    engine.spawn()
    ping = time.perf_counter() - begin
    with engine.connection() as connection:
        body = connection.expect(200, "GET", "/containers/json")
        listed = time.perf_counter() - begin
        made = steps.run(connection, "sleep", "36000")
        started = time.perf_counter() - begin
        steps.remove(connection, made)
    count = len(json.loads(wire.joined(body)))
    assert count == len(engine.idle), f"{count} of {len(engine.idle)} containers run"
    return ping * 1000, listed * 1000, started * 1000


def life(level: int) -> Callable[[Engine, Any], tuple[float, ...]]:
    """Beside so many containers: `restart` after SIGTERM and after SIGKILL; milliseconds of a
    daemon's first list of all with the slowest ping beside it, and of the next list; for each
    container of a list with sizes, of which none has changed; removals per second.
    """

    def sample(engine: Engine, _: Any) -> tuple[float, ...]:
        assert isinstance(engine, Engined)
        start_idle(engine, level, "none")
        settled(engine)
        figures = [*restart(engine, engine.stop), *restart(engine, engine.kill)]
        engine.stop()
        engine.start()
        settled(engine)
        with Meanwhile(engine) as meanwhile:
            first = first_list(engine)
        figures += first, meanwhile.ping, first_list(engine)
        first_list(engine, "?size=1")
        figures.append(first_list(engine, "?size=1") / level)
        figures.append(level / remove_running(engine, None) * 1000)
        return tuple(figures)

    return sample


def life_job(level: int) -> Job:
    ends = ("restart", "SIGTERM to the daemon"), ("killed", "SIGKILL to the daemon")
    until = ("ping", "answers a ping"), ("list", "has listed all"), ("start", "has started one more")
    return Job(
        f"dense-{level}",
        [
            *(
                Figure(f"dense-{name}-{short}-{level}", f"{what} until the next one {then}, {level:,} containers", "ms")
                for name, what in ends
                for short, then in until
            ),
            Figure(f"dense-list-first-{level}", f"a daemon's first list of {level:,} containers", "ms"),
            Figure(f"dense-list-first-ping-{level}", "the slowest ping beside it", "ms"),
            Figure(f"dense-list-{level}", "the next list", "ms"),
            Figure(f"dense-size-{level}", "a list with sizes, when nothing has changed, for each container", "ms"),
            Figure(
                f"dense-rm-{level}", f"removal by force of {level:,} containers, {steps.CLIENTS} clients", "1/s", False
            ),
        ],
        life(level),
        warm=False,
        ours=True,
        default=False,
    )


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
    ]
    return Job(name, figures, crowd(levels, timed, network), warm=False, ours=True, default=False)


def jobs(size: Size) -> list[Job]:
    timed = size.of(TIMED, 5)
    return [
        job("dense", size.of((100, 1000, 3000), (10, 20)), timed, "none"),
        job("dense-bridge", size.of((100, 1000, 3000), (10, 20)), timed, "bridge"),
        *map(life_job, size.of((3000, 5000), (20,))),
    ]
