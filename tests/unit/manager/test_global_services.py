"""Global services: one task on each node that may have one."""

from __future__ import annotations

import pytest

from engine.manager.store import Store
from engine.swarm_session.states import Availability, NodeState, Role, TaskState
from tests.support.fakes.clock import FakeClock
from tests.support.fakes.swarm import leading, seconds

GLOBAL = {"Global": {}}


async def test_each_node_has_one_task(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock, nodes=3) as swarm:
        agent = await swarm.create(mode=GLOBAL)
        await swarm.run(1)
        assert swarm.spread(agent) == {"node01": 1, "node02": 1, "node03": 1}
        assert len(swarm.running(agent)) == 3
        assert swarm.slots(agent) == [0, 0, 0]
        await swarm.node("node04")
        await swarm.run(1)
        assert swarm.spread(agent)["node04"] == 1
        assert len(swarm.all_tasks(agent)) == 4


async def test_constraints_choose_the_nodes(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock, nodes=2) as swarm:
        await swarm.node("boss", role=Role.MANAGER)
        agent = await swarm.create(mode=GLOBAL, constraints=["node.role==manager"])
        await swarm.run(1)
        assert swarm.spread(agent) == {"boss": 1}
        await swarm.wish("node01", role=Role.MANAGER)
        await swarm.run(1)
        assert swarm.spread(agent) == {"boss": 1, "node01": 1}
        await swarm.wish("boss", role=Role.WORKER)
        await swarm.run(2)
        assert swarm.spread(agent) == {"node01": 1}
        assert len(swarm.agents.running) == 1


@pytest.mark.parametrize(
    ("availability", "kept", "new"),
    [(Availability.ACTIVE, 1, 1), (Availability.PAUSE, 1, 0), (Availability.DRAIN, 0, 0)],
)
async def test_availability(store: Store, clock: FakeClock, availability: Availability, kept: int, new: int) -> None:
    async with leading(store, clock, nodes=1) as swarm:
        first = await swarm.create("first", mode=GLOBAL)
        await swarm.run(1)
        await swarm.wish("node01", availability=availability)
        second = await swarm.create("second", mode=GLOBAL)
        await swarm.run(1)
        assert len(swarm.running(first)) == kept
        assert len(swarm.tasks(second)) == new
        await swarm.wish("node01", availability=Availability.ACTIVE)
        await swarm.run(2)
        assert len(swarm.running(first)) == len(swarm.running(second)) == 1


async def test_a_node_that_was_down_gets_its_task_again(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock, nodes=2) as swarm:
        agent = await swarm.create(mode=GLOBAL)
        await swarm.run(1)
        await swarm.observe("node02", NodeState.DOWN)
        await swarm.run(2)
        assert swarm.spread(agent) == {"node01": 1}
        await swarm.observe("node02", NodeState.READY)
        await swarm.run(3)
        assert swarm.spread(agent) == {"node01": 1, "node02": 1}
        assert len(swarm.running(agent)) == len(swarm.agents.running) == 2


async def test_a_failed_task_is_restarted_on_its_node(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock, nodes=2) as swarm:
        agent = await swarm.create(mode=GLOBAL, restart={"Delay": seconds(2)})
        await swarm.run(1)
        (key,) = [key for key, task in swarm.tasks(agent).items() if task.node == "node02"]
        await swarm.agents.report(key, TaskState.FAILED)
        await swarm.run(1)
        assert len(swarm.running(agent)) == 1
        await swarm.run(3)
        assert swarm.spread(agent) == {"node01": 1, "node02": 1}
        assert len(swarm.running(agent)) == 2


async def test_a_task_that_has_completed_stays_so(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock, nodes=2) as swarm:
        agent = await swarm.create(mode=GLOBAL, restart={"Condition": "on-failure"})
        await swarm.run(1)
        await swarm.agents.report(min(swarm.tasks(agent)), TaskState.COMPLETE)
        await swarm.run(1)
        await swarm.node("node03")
        await swarm.lead()
        await swarm.run(10)
        assert len(swarm.running(agent)) == 2
        assert len(swarm.all_tasks(agent)) == 3


async def test_a_node_without_room_tells_so(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock, nodes=1) as swarm:
        await swarm.node("small", memory=1 << 20)
        agent = await swarm.create(mode=GLOBAL, reservations={"MemoryBytes": 1 << 30})
        await swarm.run(1)
        (task,) = [task for task in swarm.tasks(agent).values() if task.node == "small"]
        assert task.waits == "no suitable node (insufficient resources (memory) on 1 node)"
        assert not task.assigned
        await swarm.node("small", memory=4 << 30)
        await swarm.run(1)
        assert len(swarm.running(agent)) == 2


async def test_the_tasks_of_a_removed_node_are_forgotten(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock, nodes=2) as swarm:
        agent = await swarm.create(mode=GLOBAL)
        await swarm.run(1)
        await swarm.observe("node02", NodeState.DOWN)
        await swarm.run(1)
        await swarm.remove_node("node02")
        await swarm.run(2)
        assert len(swarm.all_tasks(agent)) == 1


async def test_nodes_whose_kernel_lacks_what_the_networks_need_have_no_task(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock, nodes=2) as swarm:
        await swarm.node("old", features=())
        net, secret = await swarm.network(), await swarm.network("secret", "10.0.2.0/24", encrypted=True)
        agent = await swarm.create("agent", mode=GLOBAL, networks=[net])
        vault = await swarm.create("vault", mode=GLOBAL, networks=[secret])
        await swarm.run(1)
        assert swarm.spread(agent) == {"node01": 1, "node02": 1}
        assert swarm.spread(vault) == {}
        await swarm.node("old", features=("overlay", "esp"))
        await swarm.run(1)
        assert swarm.spread(agent) == {"node01": 1, "node02": 1, "old": 1}
        assert swarm.spread(vault) == {"old": 1}
        await swarm.node("node01", features=())
        await swarm.run(20)
        assert swarm.spread(agent) == {"node02": 1, "old": 1}


@pytest.mark.parametrize("condition", ["any", "none"])
async def test_an_update_ends_although_a_node_lacks_what_its_networks_need(
    store: Store, clock: FakeClock, condition: str
) -> None:
    async with leading(store, clock, nodes=2) as swarm:
        await swarm.node("old", features=())
        net = await swarm.network()
        agent = await swarm.create(mode=GLOBAL, restart={"Condition": condition})
        await swarm.run(1)
        assert len(swarm.running(agent)) == 3
        await swarm.update(agent, mode=GLOBAL, networks=[net], restart={"Condition": condition})
        await swarm.run(60)
        assert swarm.spread(agent) == {"node01": 1, "node02": 1}
        assert swarm.update_state(agent) == "completed"


async def test_other_platforms_have_no_task(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock, nodes=1) as swarm:
        await swarm.node("arm", Platform={"OS": "linux", "Architecture": "aarch64"})
        agent = await swarm.create(mode=GLOBAL, placement={"Platforms": [{"OS": "linux", "Architecture": "arm64"}]})
        await swarm.run(1)
        assert swarm.spread(agent) == {"arm": 1}
