"""The daemon: its start without and with running containers; and the removal of all containers."""

from __future__ import annotations

import time
from typing import Any

from bench import steps
from bench.engines import Engine
from bench.job import Figure, Job, Size
from bench.report import Target


def come(engine: Engine, _: Any) -> float:
    """Milliseconds from the start of a daemon with an image and no container until its API
    answers.
    """
    engine.stop()
    begin = time.perf_counter()
    engine.start()
    return (time.perf_counter() - begin) * 1000


def come_back(engine: Engine, _: Any) -> float:
    """Milliseconds from SIGTERM to the daemon until the next one lists all running containers."""
    begin = time.perf_counter()
    engine.stop()
    engine.start()
    with engine.connection() as connection:
        listed = connection.json("GET", "/containers/json")
    elapsed = (time.perf_counter() - begin) * 1000
    assert {one["Id"] for one in listed} == set(engine.idle), f"{len(listed)} of {len(engine.idle)} containers run"
    return elapsed


def remove_running(engine: Engine, _: Any) -> float:
    """Milliseconds until all containers are removed by force, several clients at once."""
    begin = time.perf_counter()
    steps.side_by_side(engine, engine.idle, steps.remove)
    elapsed = (time.perf_counter() - begin) * 1000
    with engine.connection() as connection:
        left = connection.json("GET", "/containers/json?all=1")
    assert not left, f"{len(left)} are left"
    engine.idle.clear()
    return elapsed


def few(size: Size) -> list[Job]:
    return [
        Job(
            "daemon-start",
            [
                Figure(
                    "daemon-start",
                    "the daemon from its start until its API answers",
                    "ms",
                )
            ],
            come,
            size.rounds(3),
        )
    ]


def dense(size: Size) -> list[Job]:
    count = size.of(150, 20)
    return [
        Job(
            "daemon-restart",
            [
                Figure(
                    "daemon-restart",
                    f"SIGTERM to the daemon until the next one lists {count} running containers",
                    "ms",
                    target=Target({"dockerd": 1}),
                )
            ],
            come_back,
            size.rounds(2),
            idle=count,
            warm=False,
        ),
        Job(
            "remove-running",
            [
                Figure(
                    "remove-running",
                    f"removal of {count} running containers, {steps.CLIENTS} clients at once",
                    "ms",
                    target=Target({"dockerd": 6, "podman": 1}),
                )
            ],
            remove_running,
            idle=count,
        ),
    ]
