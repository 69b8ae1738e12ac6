"""Swarms of simulated agents: the scheduler alone, and a manager process with its etcd.

No engine takes part, so there is no peer to compare with.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from bench.engines import Engine
from bench.job import Figure, Job, Size
from bench.report import Target
from tests.simulated import schedule
from tests.simulated.simulation import Simulation

SHAPES = ((1, 100_000), (100, 1_000), (1_000, 100), (10_000, 10))
"""Services, and tasks of each."""


def place(_: Engine, __: Any) -> float:
    """Seconds for the slowest of `SHAPES` on 10,000 nodes."""
    return max(schedule.seconds(10_000, services, tasks) for services, tasks in SHAPES)


def many(agents: int, tasks: int) -> tuple[float, float, float, float]:
    """Seconds until tasks run, until their states are stored, until they are removed, and the
    longest time until a beat was answered.
    """

    async def run() -> tuple[float, float, float, float]:
        world = Simulation()
        try:
            await world.start()
            await world.agents(agents)
            started = time.perf_counter()
            service = await world.create("many", tasks)
            await world.until("running", tasks, 600)
            runs = time.perf_counter() - started
            await world.until_stored(service, tasks, 600)
            stored = time.perf_counter() - started
            await world.call("services.remove", service)
            removing = time.perf_counter()
            await world.until("running", 0, 600)
            removed = time.perf_counter() - removing
            return runs, stored, removed, world.worst_beat
        finally:
            await world.close()

    return asyncio.run(run())


def jobs(size: Size) -> list[Job]:
    agents, tasks = size.of(10_000, 200), size.of(100_000, 2_000)
    return [
        Job(
            "swarm-schedule",
            [
                Figure(
                    "swarm-schedule",
                    "place 100,000 tasks on 10,000 nodes, slowest of 1 to 10,000 services",
                    "s",
                    target=Target(at_most=2),
                )
            ],
            place,
            size.rounds(3),
            ours=True,
            default=False,
        ),
        Job(
            "swarm-control-1000",
            [
                Figure("swarm-control-run", "create a service until its 1,000 tasks run, fake executors", "s"),
                Figure(
                    "swarm-control-stored", "until the manager lists them as running", "s", target=Target(at_most=3)
                ),
                Figure("swarm-control-removed", "remove it until none runs", "s"),
                Figure("swarm-control-beat", "longest answer to a beat meanwhile", "s", target=Target(at_most=1)),
            ],
            lambda _engine, _state: many(100, 1_000),
            size.rounds(3),
            warm=False,
            ours=True,
            default=False,
        ),
        Job(
            "swarm-simulated",
            [
                Figure("swarm-simulated-run", f"{agents:,} agents: create a service until {tasks:,} tasks run", "s"),
                Figure(
                    "swarm-simulated-stored",
                    "until the manager lists them as running",
                    "s",
                    target=Target(at_most=60),
                ),
                Figure("swarm-simulated-removed", "remove it until none runs", "s"),
                Figure("swarm-simulated-beat", "longest answer to a beat meanwhile", "s", target=Target(at_most=1)),
            ],
            lambda _engine, _state: many(agents, tasks),
            warm=False,
            ours=True,
            default=False,
        ),
    ]
