"""Replicated services on one leader: scaling, restarts, nodes that go."""

from __future__ import annotations

import pytest

from engine.manager.records import NODE_DATA, SPEC_VERSIONS, TASKS
from engine.manager.store import Put, Store
from engine.swarm_session.states import Availability, NodeState, TaskState
from tests.support.fakes.clock import FakeClock
from tests.support.fakes.swarm import leading, seconds


async def test_a_service_runs_its_replicas_spread_over_the_nodes(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        web = await swarm.create(replicas=6)
        await swarm.run(1)
        assert len(swarm.running(web)) == 6
        assert swarm.slots(web) == [1, 2, 3, 4, 5, 6]
        assert set(swarm.spread(web).values()) == {2}
        assert all(task.assigned for task in swarm.tasks(web).values())
        assert len(store.all(SPEC_VERSIONS)) == 1


async def test_new_tasks_are_placed_in_their_first_write(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        await swarm.create(replicas=3)
        await swarm.run(0)
        entries = store.all(TASKS).values()
        assert len(entries) == 3
        assert all(entry.revision == entry.created for entry in entries)


async def test_scaling_touches_no_other_task(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        web = await swarm.create(replicas=4)
        await swarm.run(1)
        before = swarm.tasks(web)
        await swarm.update(web, replicas=7)
        await swarm.run(1)
        assert swarm.slots(web) == [1, 2, 3, 4, 5, 6, 7]
        assert before.items() <= swarm.tasks(web).items()
        await swarm.update(web, replicas=2)
        await swarm.run(2)
        assert len(swarm.running(web)) == 2
        assert swarm.tasks(web).items() <= before.items() | swarm.tasks(web).items()
        assert len(swarm.all_tasks(web)) == 2, "removed tasks are deleted when they have ended"
        assert len(swarm.agents.running) == 2


async def test_tasks_that_do_not_run_go_first(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock, nodes=1) as swarm:
        web = await swarm.create(replicas=6, reservations={"NanoCPUs": 1_000_000_000})
        await swarm.run(1)
        running = set(swarm.running(web))
        assert len(running) == 4
        await swarm.update(web, replicas=4, reservations={"NanoCPUs": 1_000_000_000})
        await swarm.run(1)
        assert set(swarm.tasks(web)) == running


async def test_scale_down_evens_the_nodes(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock, nodes=1) as swarm:
        web = await swarm.create(replicas=4)
        await swarm.run(1)
        await swarm.node("node02")
        await swarm.update(web, replicas=6)
        await swarm.run(1)
        assert swarm.spread(web) == {"node01": 4, "node02": 2}
        await swarm.update(web, replicas=4)
        await swarm.run(1)
        assert swarm.spread(web) == {"node01": 2, "node02": 2}


async def test_a_slot_is_used_again_only_after_its_task_has_ended(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        swarm.agents.stop = 20
        web = await swarm.create(replicas=2)
        await swarm.run(1)
        await swarm.update(web, replicas=1)
        await swarm.run(1)
        await swarm.update(web, replicas=2)
        await swarm.run(5)
        (late,) = [task for key, task in swarm.tasks(web).items() if swarm.state(key) is not TaskState.RUNNING]
        assert late.desired is TaskState.READY
        await swarm.run(20)
        assert len(swarm.running(web)) == 2


async def test_removing_a_service_ends_and_deletes_all_of_it(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        web = await swarm.create(replicas=5)
        await swarm.run(1)
        await swarm.remove(web)
        await swarm.run(3)
        assert not store.all(TASKS)
        assert not store.all(SPEC_VERSIONS)
        assert not swarm.agents.running


async def test_a_task_that_ends_is_replaced_after_the_delay(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        web = await swarm.create(replicas=1, restart={"Delay": seconds(7)})
        await swarm.run(1)
        (key,) = swarm.tasks(web)
        await swarm.agents.report(key, TaskState.FAILED, error="exit 1")
        await swarm.run(6)
        (successor,) = swarm.tasks(web).values()
        assert successor.slot == 1
        assert successor.desired is TaskState.READY
        await swarm.run(2)
        assert len(swarm.running(web)) == 1
        old = store.record(TASKS, key)
        assert old is not None and old.desired is TaskState.SHUTDOWN


@pytest.mark.parametrize(
    ("condition", "state", "restarted"),
    [
        ("any", TaskState.COMPLETE, True),
        ("any", TaskState.FAILED, True),
        ("any", TaskState.REJECTED, True),
        ("on-failure", TaskState.COMPLETE, False),
        ("on-failure", TaskState.FAILED, True),
        ("on-failure", TaskState.REJECTED, True),
        ("none", TaskState.COMPLETE, False),
        ("none", TaskState.FAILED, False),
        ("", TaskState.COMPLETE, True),
    ],
)
async def test_the_condition_decides(
    store: Store, clock: FakeClock, condition: str, state: TaskState, restarted: bool
) -> None:
    async with leading(store, clock) as swarm:
        web = await swarm.create(replicas=2, restart={"Condition": condition, "Delay": 0})
        await swarm.run(1)
        key = min(swarm.tasks(web))
        await swarm.agents.report(key, state)
        await swarm.run(30)
        assert len(swarm.running(web)) == (2 if restarted else 1)
        assert len(swarm.all_tasks(web)) == (3 if restarted else 2)


async def test_attempts_are_counted_in_the_window(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        swarm.agents.fate = lambda key, task: (TaskState.FAILED, 1.0)
        web = await swarm.create(replicas=1, restart={"MaxAttempts": 3, "Delay": seconds(1)})
        await swarm.run(120)
        assert len(swarm.all_tasks(web)) == 4
        assert not swarm.tasks(web)


async def test_attempts_are_forgotten_with_the_window(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        swarm.agents.fate = lambda key, task: (TaskState.FAILED, 10.0)
        web = await swarm.create(replicas=1, restart={"MaxAttempts": 3, "Delay": 0, "Window": seconds(15)})
        await swarm.run(300)
        assert len(swarm.tasks(web)) == 1


async def test_attempts_survive_a_change_of_the_leader(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        swarm.agents.fate = lambda key, task: (TaskState.FAILED, 1.0)
        web = await swarm.create(replicas=1, restart={"MaxAttempts": 4, "Delay": seconds(2)})
        for _ in range(30):
            await swarm.run(1.3)
            await swarm.lead()
        assert len(swarm.all_tasks(web)) == 5


async def test_tasks_that_are_rejected_before_their_time_wait_for_it(store: Store, clock: FakeClock) -> None:
    """A successor is prepared during the delay. When that fails it keeps its place until the delay
    has passed: a service whose image is missing makes a task each 5 s, not as fast as it can.
    """
    async with leading(store, clock, nodes=1) as swarm:
        web = await swarm.create(replicas=1, restart={"Delay": seconds(5)})
        await swarm.run(1)
        (key,) = swarm.tasks(web)
        await swarm.agents.report(key, TaskState.FAILED)
        await swarm.run(1)
        (key,) = swarm.tasks(web)
        await swarm.agents.report(key, TaskState.REJECTED)
        await swarm.run(2)
        assert list(swarm.tasks(web)) == [key]
        await swarm.run(3)
        (successor,) = swarm.tasks(web)
        assert successor != key and swarm.state(successor) < TaskState.RUNNING
        await swarm.run(6)
        assert list(swarm.running(web)) == [successor]


async def test_drained_tasks_move_without_delay_and_wait_for_the_old_one(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock, nodes=2) as swarm:
        swarm.agents.stop = 3
        web = await swarm.create(replicas=4)
        await swarm.run(1)
        others = {key for key, task in swarm.tasks(web).items() if task.node == "node02"}
        await swarm.wish("node01", availability=Availability.DRAIN)
        await swarm.run(1)
        assert len(swarm.running(web)) == 2, "the old ones are still ending"
        await swarm.run(4)
        assert len(swarm.running(web)) == 4
        assert swarm.spread(web) == {"node02": 4}
        assert others <= set(swarm.tasks(web))
        assert all(task.restarts == 0 for task in swarm.tasks(web).values())


async def test_a_paused_node_keeps_its_tasks_and_gets_none(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock, nodes=2) as swarm:
        web = await swarm.create(replicas=2)
        await swarm.run(1)
        await swarm.wish("node01", availability=Availability.PAUSE)
        before = set(swarm.tasks(web))
        await swarm.update(web, replicas=4)
        await swarm.run(1)
        assert before <= set(swarm.running(web))
        assert swarm.spread(web) == {"node01": 1, "node02": 3}


async def test_tasks_of_a_node_that_is_down_move_at_once(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        web = await swarm.create(replicas=6)
        await swarm.run(1)
        await swarm.observe("node02", NodeState.UNKNOWN)
        before = set(swarm.tasks(web))
        await swarm.run(30)
        assert set(swarm.tasks(web)) == before, "an unknown node is left alone"
        await swarm.observe("node02", NodeState.DOWN)
        await swarm.run(1)
        assert len(swarm.running(web)) == 6
        assert swarm.spread(web) == {"node01": 3, "node03": 3}
        await swarm.observe("node02", NodeState.READY)
        await swarm.run(5)
        assert len(swarm.agents.running) == 6, "what had run on it is ended when it is back"
        assert swarm.spread(web) == {"node01": 3, "node03": 3}


async def test_tasks_of_a_removed_node_move_and_are_orphaned(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        web = await swarm.create(replicas=3)
        await swarm.run(1)
        (lost,) = [key for key, task in swarm.tasks(web).items() if task.node == "node02"]
        await swarm.remove_node("node02")
        await swarm.run(2)
        assert len(swarm.running(web)) == 3
        assert swarm.state(lost) is TaskState.ORPHANED


async def test_a_label_that_goes_moves_the_tasks_that_need_it(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock, nodes=0) as swarm:
        await swarm.node("node01", labels={"disk": "ssd"})
        await swarm.node("node02", labels={"disk": "SSD"})
        web = await swarm.create(replicas=2, constraints=["node.labels.disk==ssd"])
        plain = await swarm.create("plain", replicas=2)
        await swarm.run(1)
        assert swarm.spread(web) == {"node01": 1, "node02": 1}
        before = swarm.tasks(plain)
        await swarm.wish("node01", labels={})
        await swarm.run(1)
        assert swarm.spread(web) == {"node02": 2}
        assert swarm.tasks(plain) == before


async def test_a_task_without_a_node_tells_why_and_is_placed_when_one_comes(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock, nodes=2) as swarm:
        big = await swarm.create(replicas=1, reservations={"MemoryBytes": 100 << 30})
        await swarm.run(1)
        (task,) = swarm.tasks(big).values()
        assert task.waits == "no suitable node (insufficient resources (memory) on 2 nodes)"
        assert swarm.state(min(swarm.tasks(big))) is TaskState.PENDING
        await swarm.node("huge", memory=200 << 30)
        await swarm.run(1)
        (task,) = swarm.running(big).values()
        assert (task.node, task.waits) == ("huge", "")


async def test_a_waiting_task_gets_what_an_ended_one_frees(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock, nodes=1) as swarm:
        first = await swarm.create(replicas=1, reservations={"NanoCPUs": 3_000_000_000})
        await swarm.run(1)
        second = await swarm.create("second", replicas=1, reservations={"NanoCPUs": 3_000_000_000})
        await swarm.run(1)
        assert not swarm.running(second)
        await swarm.remove(first)
        await swarm.run(1)
        assert len(swarm.running(second)) == 1


async def test_a_pending_task_of_a_removed_service_is_deleted(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock, nodes=0) as swarm:
        web = await swarm.create(replicas=2)
        await swarm.run(1)
        assert {task.waits for task in swarm.tasks(web).values()} == {"no suitable node"}
        await swarm.remove(web)
        await swarm.run(1)
        assert not store.all(TASKS)


async def test_history_is_kept_to_its_limit(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        swarm.agents.fate = lambda key, task: (TaskState.FAILED, 1.0)
        web = await swarm.create(replicas=1, restart={"Delay": 0})
        await swarm.run(60)
        assert len(swarm.all_tasks(web)) <= 6
        assert len(store.all(NODE_DATA)) == 3


async def test_a_node_where_a_service_fails_often_comes_last(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock, nodes=3) as swarm:
        swarm.agents.fate = lambda key, task: (TaskState.REJECTED, 0) if task.node == "node01" else None
        web = await swarm.create(replicas=3, restart={"Delay": 0})
        await swarm.run(20)
        assert len(swarm.running(web)) == 3
        assert "node01" not in swarm.spread(web)


async def test_tasks_that_come_after_their_service_has_gone_are_removed(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        web = await swarm.create(replicas=1)
        await swarm.run(1)
        (task,) = swarm.tasks(web).values()
        await swarm.remove(web)
        await swarm.run(3)
        assert not store.all(TASKS)
        await store.commit([Put(TASKS, "late", task)])
        await swarm.run(3)
        assert not store.all(TASKS)
        assert not swarm.agents.running
