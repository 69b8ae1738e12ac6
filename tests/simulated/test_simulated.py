"""A manager process with its etcd, and hundreds of agents: tasks come, move and go."""

from __future__ import annotations

import asyncio

from tests.simulated.simulation import simulation

AGENTS = 300


def test_tasks_of_many_agents() -> None:
    async def run() -> None:
        async with simulation(AGENTS) as world:
            service = await world.create("many", 3000)
            await world.until("running", 3000, 60)
            await world.until_stored(service, 3000, 30)
            tasks = await world.call("tasks.list", filters={"service": [service]})
            nodes = [task["NodeID"] for task in tasks]
            counts = {nodes.count(node) for node in set(nodes)}
            assert len(tasks) == 3000
            assert max(counts) - min(counts) <= 1
            inspected = await world.call("services.inspect", service)
            spec = inspected["Spec"]
            spec["Mode"]["Replicated"]["Replicas"] = 1000
            await world.call("services.update", service, spec, version=inspected["Version"]["Index"])
            await world.until("running", 1000, 60)
            await world.call("services.remove", service)
            await world.until("running", 0, 60)
            assert world.worst_beat < 2.0, "beats are answered under load"
            assert world.last["sessions"] == AGENTS

    asyncio.run(run())
