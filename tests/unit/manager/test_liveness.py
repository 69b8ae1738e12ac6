"""Nodes that no manager watches: unknown, down, and their tasks given up."""

from __future__ import annotations

import pytest

from engine.manager import records
from engine.manager.liveness import Liveness
from engine.manager.loops import Acting
from engine.manager.records import ManagerPresence, NodeData
from engine.manager.store import Compare, Delete, Fenced, Put, Store
from engine.swarm_session.states import NodeState, TaskState
from tests.support.fakes.clock import FakeClock
from tests.unit.manager.agents import cluster, found, node_record, node_state, state_of, status_record, task


class Led:
    """The loop on a leader."""

    def __init__(self, store: Store, clock: FakeClock) -> None:
        self.store, self.clock = store, clock
        self.loop = Liveness(store, clock)
        leader = store.get(records.LEADER)
        assert leader is not None
        self.acting = Acting(store, clock, Compare(records.LEADER, "", leader.created, by_creation=True))
        self.loop.take_over()

    async def passes(self, seconds: float) -> None:
        ends = self.clock.monotonic() + seconds
        while self.clock.monotonic() < ends:
            due = self.loop.due()
            assert due is not None
            if due <= self.clock.monotonic():
                await self.loop.step(self.acting)
            await self.clock.advance(0.5)


def ready(owner: str, state: NodeState = NodeState.READY) -> NodeData:
    return NodeData(state=state, owner=owner, session="s")


async def test_nodes_of_a_lost_manager_are_unknown_then_down(store: Store, clock: FakeClock) -> None:
    await found(store, "n1", "n2", managers=("m1", "m2"))
    await store.commit([Put(records.NODE_DATA, "n1", ready("m1")), Put(records.NODE_DATA, "n2", ready("m2"))])
    led = Led(store, clock)
    await led.passes(60)
    assert (node_state(store, "n1"), node_state(store, "n2")) == ("ready", "ready")
    await store.commit([Delete(records.MANAGERS, "m2")])
    await led.passes(2.5)
    assert node_state(store, "n2") == "ready", "its lease may only be late"
    await led.passes(2)
    data = store.record(records.NODE_DATA, "n2")
    assert data is not None
    assert (data.state, data.owner, data.session) == (NodeState.UNKNOWN, "", "s")
    await led.passes(24)
    assert node_state(store, "n2") == "unknown"
    await led.passes(4)
    data = store.record(records.NODE_DATA, "n2")
    assert data is not None
    assert (data.state, data.session) == (NodeState.DOWN, "")
    assert node_state(store, "n1") == "ready"


async def test_a_node_that_registers_with_another_manager_stays(store: Store, clock: FakeClock) -> None:
    await found(store, "n1", managers=("m1", "m2"))
    await store.commit([Put(records.NODE_DATA, "n1", ready("m2")), Delete(records.MANAGERS, "m2")])
    led = Led(store, clock)
    await led.passes(20)
    assert node_state(store, "n1") == "unknown"
    await store.commit([Put(records.NODE_DATA, "n1", ready("m1"))])
    await led.passes(60)
    assert node_state(store, "n1") == "ready"
    await store.commit([Put(records.NODE_DATA, "n1", ready("m2"))])
    await led.passes(20)
    assert node_state(store, "n1") == "unknown", "counted from the beginning"


async def test_a_manager_that_is_late_loses_nobody(store: Store, clock: FakeClock) -> None:
    await found(store, "n1", managers=("m1", "m2"))
    await store.commit([Put(records.NODE_DATA, "n1", ready("m2")), Delete(records.MANAGERS, "m2")])
    led = Led(store, clock)
    await led.passes(2)
    await store.commit([Put(records.MANAGERS, "m2", ManagerPresence(address="a:1", member=2))])
    await led.passes(60)
    assert node_state(store, "n1") == "ready"


async def test_a_new_leader_gives_all_nodes_six_periods(store: Store, clock: FakeClock) -> None:
    await found(store, "n1")
    await store.commit([Put(records.NODE_DATA, "n1", NodeData(state=NodeState.UNKNOWN))])
    led = Led(store, clock)
    await led.passes(25)
    led.loop.take_over()
    await led.passes(28)
    assert node_state(store, "n1") == "unknown"
    await led.passes(4)
    assert node_state(store, "n1") == "down"


async def test_a_node_that_never_registers_is_down(store: Store, clock: FakeClock) -> None:
    await found(store, "n1")
    await store.commit([Put(records.NODE_DATA, "m1", ready("m1"))])
    led = Led(store, clock)
    await led.passes(28)
    assert node_state(store, "n1") == ""
    await led.passes(5)
    data = store.record(records.NODE_DATA, "n1")
    assert data is not None
    assert (data.state, data.message) == (NodeState.DOWN, "the node has never registered")


async def test_the_period_of_the_settings_counts(store: Store, clock: FakeClock) -> None:
    await found(store, "n1", period=20.0)
    await store.commit([Put(records.NODE_DATA, "n1", ready("gone"))])
    led = Led(store, clock)
    await led.passes(115)
    assert node_state(store, "n1") == "unknown"
    await led.passes(10)
    assert node_state(store, "n1") == "down"


async def test_a_removed_node_is_forgotten(store: Store, clock: FakeClock) -> None:
    await found(store, "n1")
    await store.commit([Put(records.NODE_DATA, "n1", ready("gone"))])
    led = Led(store, clock)
    await led.passes(5)
    await store.commit([Delete(records.NODES, "n1"), Delete(records.NODE_DATA, "n1")])
    await led.passes(60)
    assert store.record(records.NODE_DATA, "n1") is None
    assert "n1" not in led.loop._unwatched
    await store.commit([Put(records.NODES, "n1", node_record()), Put(records.NODE_DATA, "n1", ready("gone"))])
    await led.passes(20)
    assert node_state(store, "n1") == "unknown"


async def test_tasks_of_a_node_that_is_down_for_a_day_are_given_up(store: Store, clock: FakeClock) -> None:
    await found(store, "n1", "n2")
    await store.commit(
        [
            Put(records.NODE_DATA, "n1", NodeData(state=NodeState.DOWN, since=clock.now())),
            Put(records.NODE_DATA, "n2", ready("m1")),
            *(Put(records.TASKS, f"t{n}", task(slot=n)) for n in range(1, 4)),
            Put(records.TASKS, "t4", task(slot=4, assigned=0)),
            Put(records.TASKS, "t5", task(node="n2", slot=5)),
            Put(
                records.TASK_STATUS,
                "t1",
                records.TaskStatus(state=TaskState.RUNNING, since=1, container="c", ready=True),
            ),
            Put(records.TASK_STATUS, "t2", status_record(TaskState.COMPLETE)),
        ]
    )
    led = Led(store, clock)
    await led.passes(60)
    assert state_of(store, "t1") == TaskState.RUNNING
    clock.set(24 * 3600 - 70)
    await led.passes(5)
    assert state_of(store, "t1") == TaskState.RUNNING
    await led.passes(10)
    given_up = store.record(records.TASK_STATUS, "t1")
    assert given_up is not None
    assert (given_up.state, given_up.container, given_up.ready) == (TaskState.ORPHANED, "c", False)
    assert "down for a day" in given_up.error
    assert [state_of(store, f"t{n}") for n in range(2, 6)] == [TaskState.COMPLETE, TaskState.ORPHANED, None, None]
    revision = store.revision
    await led.passes(10)
    assert store.revision == revision


async def test_a_loop_that_leads_no_more_changes_nothing(store: Store, clock: FakeClock) -> None:
    await found(store, "n1")
    await store.commit([Put(records.NODE_DATA, "n1", ready("gone"))])
    led = Led(store, clock)
    await store.commit([Delete(records.LEADER, "")])
    with pytest.raises(Fenced):
        await led.passes(5)
    assert node_state(store, "n1") == "ready"


async def test_many_nodes_in_order_cost_no_write(store: Store, clock: FakeClock) -> None:
    await found(store, managers=("m1",))
    groups = [
        ((Put(records.NODES, f"n{n}", node_record()), Put(records.NODE_DATA, f"n{n}", ready("m1"))), ())
        for n in range(2000)
    ]
    await store.commit_many(groups)
    await store.commit([Put(records.CLUSTER, "", cluster())])
    led = Led(store, clock)
    revision = store.revision
    await led.passes(10)
    assert store.revision == revision
