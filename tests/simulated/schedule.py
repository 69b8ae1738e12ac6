"""The scheduler's index alone: how long it takes to place tasks on many nodes."""

from __future__ import annotations

import time

import msgspec

from engine.manager.placement import Placement, demand_of
from engine.manager.records import NodeData, NodeRecord
from engine.manager.scheduler import SLICE
from engine.swarm_session.states import NodeState
from engine.wire.nodes import NodeDescription
from tests.support.fakes.swarm import spec

DOCUMENT = {
    "Hostname": "simulated",
    "Platform": {"OS": "linux", "Architecture": "x86_64"},
    "Resources": {"NanoCPUs": 16_000_000_000, "MemoryBytes": 64 << 30},
}


def seconds(nodes: int, services: int, tasks: int) -> float:
    """Seconds to place `tasks` tasks of each service, in the slices of the scheduler. Raises
    AssertionError unless the tasks are spread evenly.
    """
    where = Placement()
    record = NodeRecord(created=0, updated=0)
    data = NodeData(description=msgspec.convert(DOCUMENT, NodeDescription), state=NodeState.READY)
    for number in range(nodes):
        where.node(f"n{number}", record, data)
    demand = demand_of(spec(reservations={"NanoCPUs": 1_000_000, "MemoryBytes": 1 << 20}))
    names = [[f"s{service}.{number}" for number in range(tasks)] for service in range(services)]
    started = time.perf_counter()
    for service, keys in enumerate(names):
        for begin in range(0, tasks, SLICE):
            some = keys[begin : begin + SLICE]
            assert len(where.place(f"s{service}", demand, some)) == len(some)
    elapsed = time.perf_counter() - started
    counts = [host.live for host in where.hosts.values()]
    assert sum(counts) == services * tasks
    assert max(counts) - min(counts) <= 1
    return elapsed
