"""Jobs: tasks that run to their end."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from engine.manager.records import SERVICE_STATUS, SERVICES, TASKS
from engine.manager.store import Put, Store
from engine.swarm_session.states import Availability, TaskState
from tests.support.fakes.clock import FakeClock
from tests.support.fakes.swarm import Swarm, leading, seconds


def job(concurrent: int | None = None, total: int | None = None) -> dict[str, Any]:
    return {"ReplicatedJob": {"MaxConcurrent": concurrent, "TotalCompletions": total}}


def complete(swarm: Swarm, service: str) -> int:
    return sum(swarm.state(key) is TaskState.COMPLETE for key in swarm.all_tasks(service))


async def again(swarm: Swarm, service: str) -> None:
    """Another iteration, as the API begins it."""
    record = swarm.store.record(SERVICES, service)
    assert record is not None
    again = replace(record, iteration=record.iteration + 1, version=record.version + 1)
    await swarm.store.commit([Put(SERVICES, service, again)])


async def test_a_replicated_job_runs_so_many_at_a_time_until_all_are_complete(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        swarm.agents.fate = lambda key, task: (TaskState.COMPLETE, 1.0)
        batch = await swarm.create(mode=job(3, 10))
        most = 0
        for _ in range(100):
            await swarm.run(0.1)
            most = max(most, len(swarm.agents.running))
        assert most == 3
        assert complete(swarm, batch) == 10
        assert len(swarm.all_tasks(batch)) == 10
        assert {task.desired for task in swarm.all_tasks(batch).values()} == {TaskState.COMPLETE}
        assert sorted(task.slot for task in swarm.all_tasks(batch).values()) == list(range(1, 11))


async def test_a_failed_task_is_restarted_until_its_attempts_are_used_up(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        swarm.agents.fate = lambda key, task: (TaskState.FAILED if task.slot == 2 else TaskState.COMPLETE, 1.0)
        batch = await swarm.create(mode=job(1, 3), restart={"MaxAttempts": 2, "Delay": seconds(1)})
        await swarm.run(60)
        assert complete(swarm, batch) == 2
        assert len([task for task in swarm.all_tasks(batch).values() if task.slot == 2]) == 3


async def test_a_new_iteration_begins_from_nothing(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        swarm.agents.fate = lambda key, task: (TaskState.COMPLETE, 0.5)
        batch = await swarm.create(mode=job(2, 4))
        await swarm.run(10)
        first = store.record(SERVICE_STATUS, batch)
        old = set(swarm.all_tasks(batch))
        await again(swarm, batch)
        await swarm.run(10)
        assert not old & set(swarm.all_tasks(batch))
        assert complete(swarm, batch) == 4
        second = store.record(SERVICE_STATUS, batch)
        assert first is not None and second is not None
        assert (first.iteration, second.iteration) == (0, 1)
        assert second.last_execution > first.last_execution > 0


async def test_a_global_job_runs_once_on_each_node(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock, nodes=3) as swarm:
        swarm.agents.fate = lambda key, task: (TaskState.COMPLETE, 1.0)
        batch = await swarm.create(mode={"GlobalJob": {}})
        await swarm.run(10)
        assert complete(swarm, batch) == len(swarm.all_tasks(batch)) == 3
        await swarm.node("node04")
        await swarm.lead()
        await swarm.run(10)
        assert complete(swarm, batch) == len(swarm.all_tasks(batch)) == 4
        await again(swarm, batch)
        await swarm.run(10)
        assert complete(swarm, batch) == len(swarm.all_tasks(batch)) == 4


async def test_a_global_job_does_without_nodes_that_lack_what_its_networks_need(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock, nodes=2) as swarm:
        swarm.agents.fate = lambda key, task: (TaskState.COMPLETE, 1.0)
        await swarm.node("old", features=())
        batch = await swarm.create(mode={"GlobalJob": {}}, networks=[await swarm.network()])
        await swarm.run(10)
        assert complete(swarm, batch) == len(swarm.all_tasks(batch)) == 2
        await swarm.node("old")
        await swarm.run(10)
        assert complete(swarm, batch) == len(swarm.all_tasks(batch)) == 3


async def test_a_drained_node_gives_its_task_to_another_one(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock, nodes=2) as swarm:
        batch = await swarm.create(mode=job(2))
        await swarm.run(1)
        await swarm.wish("node01", availability=Availability.DRAIN)
        await swarm.run(5)
        assert swarm.spread(batch) == {"node02": 2}
        assert {task.desired for task in swarm.tasks(batch).values()} == {TaskState.COMPLETE}


async def test_removing_a_job_removes_its_complete_tasks(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        swarm.agents.fate = lambda key, task: (TaskState.COMPLETE, 1.0)
        batch = await swarm.create(mode=job(2, 6))
        await swarm.run(1.5)
        await swarm.remove(batch)
        await swarm.run(5)
        assert not store.all(TASKS)
