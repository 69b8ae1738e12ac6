"""How long it takes until the nodes know which tasks of a network are ready:

    python -m tests.simulated.views AGENTS TASKS

A service of TASKS tasks on one network is made; then its tasks are withdrawn and come back, five
times a second, each one in the views of all nodes. Prints the times as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from tests.simulated.simulation import simulation

TURNS = 5
"""Withdrawals and returns of tasks in a second."""
SECONDS = 12.0
"""For which they are looked at."""


async def measure(agents: int, tasks: int) -> dict[str, Any]:
    async with simulation(agents, TURNS) as world:
        network = await world.call("networks.create", body={"Name": "inner", "Driver": "overlay"})
        before = memory(world.manager_pid)
        began = time.monotonic()
        service = await world.create("web", tasks, str(network["Id"]))
        await world.until("running", tasks, 180)
        await world.until_stored(service, tasks, 180)
        started = time.monotonic() - began
        arrival = await settled(world)
        used = cpu(world.manager_pid)
        await asyncio.sleep(SECONDS)
        used = cpu(world.manager_pid) - used
        count, half, most, last = world.last["views"]
        after = memory(world.manager_pid)
        await world.call("services.remove", service)
        await world.until("running", 0, 180)
        return {
            "agents": agents,
            "tasks": tasks,
            "started": round(started, 2),
            "arrival": arrival,
            "views": count,
            "p50": half,
            "p99": most,
            "longest": last,
            "processor": round(used / SECONDS, 3),
            "memory": after,
            "grown": after - before,
            "beat": round(world.worst_beat, 2),
        }


async def settled(world: Any) -> list[float]:
    """The times of the start, when its views have come."""
    arrival: list[float] = world.last["views"]
    await asyncio.sleep(1.0)
    return arrival[1:]


def memory(pid: int) -> int:
    """Resident memory in kB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


def cpu(pid: int) -> float:
    """Seconds of processor time."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure(int(sys.argv[1]), int(sys.argv[2])))))
