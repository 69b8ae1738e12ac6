"""A manager process with its etcd, and hundreds of agents: tasks of a network come, move and
go, and all nodes know of it.
"""

from __future__ import annotations

import asyncio

from tests.simulated.simulation import simulation

AGENTS = 200


def test_tasks_of_many_agents() -> None:
    async def run() -> None:
        async with simulation(AGENTS) as world:
            network = await world.call("networks.create", body={"Name": "inner", "Driver": "overlay"})
            service = await world.create("many", 1500, str(network["Id"]))
            await world.until("running", 1500, 180)
            await world.until_stored(service, 1500, 180)
            tasks = await world.call("tasks.list", filters={"service": [service]})
            views, *_ = world.last["views"]
            assert views >= 2 * AGENTS  # a busy host collects more changes in each
            nodes = [task["NodeID"] for task in tasks]
            counts = {nodes.count(node) for node in set(nodes)}
            assert len(tasks) == 1500
            assert max(counts) - min(counts) <= 1
            inspected = await world.call("services.inspect", service)
            spec = inspected["Spec"]
            spec["Mode"]["Replicated"]["Replicas"] = 500
            await world.call("services.update", service, spec, version=inspected["Version"]["Index"])
            await world.until("running", 500, 180)
            await world.call("services.remove", service)
            await world.until("running", 0, 180)
            assert world.last["sessions"] == AGENTS

    asyncio.run(run())
