"""Rolling updates: order, parallelism, delay, monitoring, failures, rollbacks, changes of
leader.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine.manager import updates
from engine.manager.records import CLAIMS, SERVICE_STATUS, SERVICES, SPEC_VERSIONS, Claim, Task, port_claim
from engine.manager.store import Put, Store
from engine.swarm_session.states import Availability, NodeState, TaskState
from tests.support.fakes.clock import FakeClock
from tests.support.fakes.etcd import FakeEtcd
from tests.support.fakes.swarm import Swarm, leading, seconds, spec


def images(swarm: Swarm, service: str) -> set[str]:
    found = set()
    for task in swarm.tasks(service).values():
        version = swarm.store.record(SPEC_VERSIONS, f"{service}/{task.version}")
        assert version is not None and version.spec.task_template.container_spec is not None
        found.add(version.spec.task_template.container_spec.image)
    return found


def bad(swarm: Swarm, service: str, image: str, state: TaskState = TaskState.FAILED, after: float = 1.0) -> None:
    """Let tasks of this image fail."""

    def fate(key: str, task: Task) -> tuple[TaskState, float] | None:
        version = swarm.store.record(SPEC_VERSIONS, f"{task.service}/{task.version}")
        assert version is not None and version.spec.task_template.container_spec is not None
        return (state, after) if version.spec.task_template.container_spec.image == image else None

    swarm.agents.fate = fate


async def watch_down(swarm: Swarm, service: str, total: int, time: float, step: float = 0.05) -> int:
    """Let time pass. Returns the largest number of slots that had no running task at once."""
    worst = 0
    passed = 0.0
    while passed < time:
        await swarm.run(step)
        passed += step
        worst = max(worst, total - len({task.slot for task in swarm.running(service).values()}))
    return worst


@pytest.mark.parametrize(("config", "parallelism"), [(None, 1), *(({"Parallelism": each}, each) for each in (1, 2, 3))])
async def test_not_more_than_parallelism_are_down(
    store: Store, clock: FakeClock, config: dict[str, int] | None, parallelism: int
) -> None:
    """Without a configuration it is one, of an update and of a rollback."""
    async with leading(store, clock) as swarm:
        web = await swarm.create(replicas=6)
        await swarm.run(1)
        await swarm.update(web, replicas=6, image="busybox:2", update=config)
        worst = await watch_down(swarm, web, 6, 20)
        assert worst == parallelism
        if config is None:
            await swarm.update(web, rollback=True, replicas=6)
            assert await watch_down(swarm, web, 6, 20) == 1
            assert images(swarm, web) == {"busybox:1"}
            return
        assert images(swarm, web) == {"busybox:2"}
        assert swarm.slots(web) == [1, 2, 3, 4, 5, 6]
        assert swarm.update_state(web) == "completed"
        assert len(store.all(SPEC_VERSIONS)) == 2, "the old tasks are in the history"


async def test_a_look_at_many_places_gives_way(store: Store, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "SLICE", 5)
    at_once = longest = 0
    look = updates.Updates._at

    def counted(self: updates.Updates, *given: Any) -> Any:
        nonlocal at_once, longest
        at_once += 1
        longest = max(longest, at_once)
        asyncio.get_running_loop().call_soon(others)
        return look(self, *given)

    def others() -> None:
        nonlocal at_once
        at_once = 0

    monkeypatch.setattr(updates.Updates, "_at", counted)
    async with leading(store, clock) as swarm:
        web = await swarm.create(replicas=50)
        await swarm.run(1)
        await swarm.update(web, replicas=50, image="busybox:2", update={"Parallelism": 10})
        await swarm.run(30)
        assert images(swarm, web) == {"busybox:2"}
        assert swarm.update_state(web) == "completed"
    assert 0 < longest <= 5


async def test_without_a_limit_all_are_replaced_at_once(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        web = await swarm.create(replicas=6)
        await swarm.run(1)
        await swarm.update(web, replicas=6, image="busybox:2", update={"Parallelism": 0})
        await swarm.run(1)
        assert len(swarm.running(web)) == 6
        assert images(swarm, web) == {"busybox:2"}
        assert swarm.update_state(web) == "updating", "the tasks are monitored"
        await swarm.run(6)
        assert swarm.update_state(web) == "completed"


async def test_the_delay_is_between_the_places(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        web = await swarm.create(replicas=3)
        await swarm.run(1)
        await swarm.update(web, replicas=3, image="busybox:2", update={"Parallelism": 1, "Delay": seconds(10)})
        await swarm.run(9)
        assert len([task for task in swarm.tasks(web).values() if task.version == 2]) == 1
        await swarm.run(9)
        assert len([task for task in swarm.tasks(web).values() if task.version == 2]) == 2
        await swarm.run(20)
        assert images(swarm, web) == {"busybox:2"}


async def test_start_first_has_no_slot_down(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        web = await swarm.create(replicas=4)
        await swarm.run(1)
        await swarm.update(web, replicas=4, image="busybox:2", update={"Parallelism": 1, "Order": "start-first"})
        assert await watch_down(swarm, web, 4, 15) == 0
        assert images(swarm, web) == {"busybox:2"}
        assert swarm.slots(web) == [1, 2, 3, 4]
        assert swarm.update_state(web) == "completed"


async def test_start_first_keeps_the_old_task_while_the_new_one_fails(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        web = await swarm.create(replicas=3)
        await swarm.run(1)
        bad(swarm, web, "busybox:2", TaskState.REJECTED)
        await swarm.update(web, replicas=3, image="busybox:2", update={"Parallelism": 1, "Order": "start-first"})
        assert await watch_down(swarm, web, 3, 20, step=0.5) == 0
        assert swarm.update_state(web) == "paused"
        assert len(swarm.running(web)) == 3


@pytest.mark.parametrize(
    ("state", "after"), [(TaskState.FAILED, 1.0), (TaskState.REJECTED, 0.0), (TaskState.COMPLETE, 3.0)]
)
async def test_a_failure_pauses_the_update(store: Store, clock: FakeClock, state: TaskState, after: float) -> None:
    async with leading(store, clock) as swarm:
        web = await swarm.create(replicas=5)
        await swarm.run(1)
        bad(swarm, web, "busybox:2", state, after)
        config = {"Parallelism": 1, "Delay": seconds(5)}
        await swarm.update(web, replicas=5, image="busybox:2", update=config)
        await swarm.run(60)
        status = store.record(SERVICE_STATUS, web)
        assert status is not None
        assert status.update.state == "paused"
        assert status.update.message.startswith("update paused due to failure or early termination of task ")
        assert len([task for task in swarm.tasks(web).values() if task.version == 1]) == 4
        # another spec goes on
        await swarm.update(web, replicas=5, image="busybox:3", update=config)
        await swarm.run(60)
        assert swarm.update_state(web) == "completed"
        assert images(swarm, web) == {"busybox:3"}
        assert len(swarm.running(web)) == 5


async def test_a_failure_after_the_monitoring_time_is_a_restart(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        web = await swarm.create(replicas=2)
        await swarm.run(1)
        bad(swarm, web, "busybox:2", TaskState.FAILED, 8.0)
        await swarm.update(web, replicas=2, image="busybox:2", update={"Monitor": seconds(6)})
        await swarm.run(60)
        assert swarm.update_state(web) == "completed"


async def test_continue_goes_on_in_spite_of_failures(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        web = await swarm.create(replicas=4)
        await swarm.run(1)
        bad(swarm, web, "busybox:2", TaskState.FAILED, 1.0)
        await swarm.update(web, replicas=4, image="busybox:2", update={"Parallelism": 1, "FailureAction": "continue"})
        await swarm.run(60)
        assert swarm.update_state(web) == "completed"
        assert images(swarm, web) == {"busybox:2"}


async def test_failures_within_the_ratio_are_accepted(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        web = await swarm.create(replicas=4)
        await swarm.run(1)
        swarm.agents.fate = lambda key, task: (TaskState.FAILED, 1.0) if task.version == 2 and task.slot == 2 else None
        await swarm.update(web, replicas=4, image="busybox:2", update={"Parallelism": 1, "MaxFailureRatio": 0.25})
        await swarm.run(60)
        assert swarm.update_state(web) == "completed"


async def test_a_failure_rolls_back(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        web = await swarm.create(replicas=5)
        await swarm.run(1)
        bad(swarm, web, "busybox:2")
        config = {"Parallelism": 2, "FailureAction": "rollback"}
        await swarm.update(web, replicas=5, image="busybox:2", update=config)
        await swarm.run(40)
        assert swarm.update_state(web) == "rollback_completed"
        assert images(swarm, web) == {"busybox:1"}
        assert len(swarm.running(web)) == 5
        service = store.record(SERVICES, web)
        assert service is not None and service.rollback
        assert service.spec == spec(replicas=5)


async def test_a_rollback_claims_the_ports_of_the_previous_spec(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        await swarm.network("ingress", ingress=True)
        ports = [{"TargetPort": 80, "PublishedPort": 8080, "PublishMode": "ingress", "Protocol": "tcp"}]
        for taken in (False, True):
            web = await swarm.create(f"web{taken}", replicas=2, ports=ports)
            await swarm.run(1)
            bad(swarm, web, "busybox:2")
            if taken:
                await store.commit([Put(CLAIMS, port_claim("tcp", 8080), Claim("other"))])
            config = {"Parallelism": 2, "FailureAction": "rollback"}
            await swarm.update(web, replicas=2, image="busybox:2", update=config)
            await swarm.run(40)
            service, status = store.record(SERVICES, web), store.record(SERVICE_STATUS, web)
            claim = store.record(CLAIMS, port_claim("tcp", 8080))
            assert service is not None and status is not None and claim is not None
            if taken:
                assert swarm.update_state(web) == "paused"
                assert "port '8080' is already in use by service 'other'" in status.update.message
                assert claim.holder == "other" and not service.rollback
            else:
                assert swarm.update_state(web) == "rollback_completed"
                assert [port.published_port for port in service.ports] == [8080]
                assert claim.holder == web
                await swarm.remove(web)


async def test_a_rollback_that_fails_is_paused(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        web = await swarm.create(replicas=3)
        await swarm.run(1)
        swarm.agents.fate = lambda key, task: (TaskState.FAILED, 1.0) if task.version > 1 else None
        await swarm.update(web, replicas=3, image="busybox:2", update={"Parallelism": 3, "FailureAction": "rollback"})
        await swarm.run(60)
        assert swarm.update_state(web) == "rollback_paused"


async def test_a_rollback_by_the_api_uses_its_own_config(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        web = await swarm.create(replicas=4, rollback_config={"Parallelism": 1})
        await swarm.run(1)
        await swarm.update(web, replicas=4, image="busybox:2")
        await swarm.run(10)
        await swarm.update(web, rollback=True, replicas=4, rollback_config={"Parallelism": 1})
        assert await watch_down(swarm, web, 4, 20) == 1
        assert swarm.update_state(web) == "rollback_completed"
        assert images(swarm, web) == {"busybox:1"}


async def test_scaling_is_no_update(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        web = await swarm.create(replicas=2)
        await swarm.run(1)
        await swarm.update(web, replicas=4, update={"Parallelism": 1})
        await swarm.run(10)
        assert swarm.update_state(web) == ""
        assert len(swarm.all_tasks(web)) == 4


async def test_a_forced_update_replaces_all(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        web = await swarm.create(replicas=2)
        await swarm.run(1)
        before = set(swarm.tasks(web))
        await swarm.update(web, replicas=2, force=1)
        await swarm.run(10)
        assert len(swarm.running(web)) == 2
        assert not before & set(swarm.tasks(web))


async def test_placement_alone_moves_only_what_must(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        web = await swarm.create(replicas=3)
        await swarm.run(1)
        before = swarm.tasks(web)
        await swarm.update(web, replicas=3, constraints=["node.hostname!=node02"])
        await swarm.run(20)
        after = swarm.tasks(web)
        assert {key for key, task in before.items() if task.node != "node02"} <= set(after)
        assert "node02" not in swarm.spread(web)
        assert len(swarm.running(web)) == 3


async def test_scaling_and_updating_at_once(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        web = await swarm.create(replicas=5)
        await swarm.run(1)
        await swarm.update(web, replicas=8, image="busybox:2", update={"Parallelism": 1})
        await swarm.run(30)
        assert swarm.slots(web) == list(range(1, 9))
        assert images(swarm, web) == {"busybox:2"}
        await swarm.update(web, replicas=2, image="busybox:3", update={"Parallelism": 1})
        await swarm.run(30)
        assert len(swarm.running(web)) == 2
        assert images(swarm, web) == {"busybox:3"}


async def test_a_new_spec_takes_over_in_the_middle(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        web = await swarm.create(replicas=6)
        await swarm.run(1)
        config: dict[str, Any] = {"Parallelism": 2, "Delay": seconds(2)}
        await swarm.update(web, replicas=6, image="busybox:2", update=config)
        await swarm.run(1.1)
        await swarm.update(web, replicas=6, image="busybox:3", update=config)
        assert await watch_down(swarm, web, 6, 30) <= 2
        assert images(swarm, web) == {"busybox:3"}
        assert swarm.update_state(web) == "completed"


async def test_back_to_the_old_spec_in_the_middle_touches_only_what_was_begun(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        web = await swarm.create(replicas=6)
        await swarm.run(1)
        first = set(swarm.tasks(web))
        config = {"Parallelism": 1, "Delay": seconds(5)}
        await swarm.update(web, replicas=6, image="busybox:2", update=config)
        await swarm.run(2)
        await swarm.update(web, replicas=6, update=config)
        await swarm.run(20)
        assert len(first & set(swarm.tasks(web))) == 5
        assert images(swarm, web) == {"busybox:1"}


async def test_an_update_goes_on_at_another_leader(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        web = await swarm.create(replicas=20)
        await swarm.run(1)
        await swarm.update(web, replicas=20, image="busybox:2", update={"Parallelism": 3, "Delay": seconds(0.5)})
        worst = 0
        for _ in range(40):
            worst = max(worst, await watch_down(swarm, web, 20, 0.35))
            await swarm.lead()
        assert worst <= 3
        await swarm.run(10)
        assert swarm.update_state(web) == "completed"
        assert images(swarm, web) == {"busybox:2"}
        assert swarm.slots(web) == list(range(1, 21))
        assert len(swarm.all_tasks(web)) == 40


@pytest.mark.parametrize(("monitor", "state"), [(5, "completed"), (20, "paused")])
@pytest.mark.parametrize("killed", [1, 4, 8, 11, 14])
async def test_failures_count_from_when_they_happened(
    store: Store, clock: FakeClock, etcd: FakeEtcd, monitor: int, state: str, killed: int
) -> None:
    """A manager that starts in the middle finds tasks that have failed after nine seconds."""
    async with leading(store, clock) as swarm:
        web = await swarm.create(replicas=2)
        await swarm.run(1)
        swarm.agents.fate = lambda key, task: (TaskState.FAILED, 9.0) if task.by_update else None
        config = {"Monitor": seconds(monitor), "Delay": seconds(3)}
        await swarm.update(web, replicas=2, image="busybox:2", update=config, restart={"Delay": 0})
        await swarm.run(killed)
        await swarm.depose()
        await swarm.run(11)
        second = Store(etcd, clock, node="node2")
        await swarm.start(second)
        await swarm.run(60)
        assert swarm.update_state(web) == state
        await swarm.depose()
        await second.close()


async def test_ages_count_from_when_they_began(store: Store, clock: FakeClock, etcd: FakeEtcd) -> None:
    """A manager that starts waits for what is left of Delay and Monitor alone."""
    async with leading(store, clock) as swarm:
        web = await swarm.create(replicas=2)
        await swarm.run(1)
        config = {"Parallelism": 1, "Delay": seconds(100), "Monitor": seconds(100)}
        await swarm.update(web, replicas=2, image="busybox:2", update=config)
        for number, running in enumerate(({"busybox:1", "busybox:2"}, {"busybox:2"})):
            await swarm.run(90)
            await swarm.depose()
            other = Store(etcd, clock, node=f"other{number}")
            await swarm.start(other)
            await swarm.run(5)
            assert images(swarm, web) == running
            assert swarm.update_state(web) == "updating"
            await swarm.run(10)
            assert images(swarm, web) == {"busybox:2"}
            await swarm.depose()
            await other.close()
        assert swarm.update_state(web) == "completed"


async def test_a_node_that_goes_in_the_middle_of_an_update(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        web = await swarm.create(replicas=6)
        await swarm.run(1)
        await swarm.update(web, replicas=6, image="busybox:2", update={"Parallelism": 1, "Delay": seconds(1)})
        await swarm.run(2)
        await swarm.observe("node01", NodeState.DOWN)
        await swarm.run(30)
        assert len(swarm.running(web)) == 6
        assert images(swarm, web) == {"busybox:2"}
        assert swarm.update_state(web) == "completed"
        assert "node01" not in swarm.spread(web)


async def test_a_task_that_dies_while_paused_keeps_its_spec(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        web = await swarm.create(replicas=3, restart={"Delay": 0})
        await swarm.run(1)
        bad(swarm, web, "busybox:2")
        config = {"Parallelism": 1, "Delay": seconds(3)}
        await swarm.update(web, replicas=3, image="busybox:2", update=config, restart={"Delay": 0})
        await swarm.run(10)
        assert swarm.update_state(web) == "paused"
        old = min(key for key, task in swarm.running(web).items() if task.version == 1)
        await swarm.agents.report(old, TaskState.FAILED)
        await swarm.run(5)
        assert len([task for task in swarm.running(web).values() if task.version == 1]) == 2


async def test_tasks_that_have_ended_for_good_are_updated_too(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        web = await swarm.create(replicas=2, restart={"Condition": "none"})
        await swarm.run(1)
        for key in list(swarm.tasks(web)):
            await swarm.agents.report(key, TaskState.COMPLETE)
        await swarm.run(5)
        assert not swarm.tasks(web)
        await swarm.update(web, replicas=2, image="busybox:2", restart={"Condition": "none"})
        await swarm.run(10)
        assert len(swarm.running(web)) == 2


async def test_a_global_service_is_updated_node_by_node(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock, nodes=4) as swarm:
        agent = await swarm.create("agent", mode={"Global": {}})
        await swarm.run(1)
        await swarm.update(agent, mode={"Global": {}}, image="busybox:2", update={"Parallelism": 1})
        worst = 0
        for _ in range(200):
            await swarm.run(0.05)
            worst = max(worst, 4 - len(swarm.running(agent)))
        assert worst == 1
        assert images(swarm, agent) == {"busybox:2"}
        assert swarm.update_state(agent) == "completed"


async def test_host_ports_are_updated_on_one_node(store: Store, clock: FakeClock) -> None:
    ports = [{"Protocol": "tcp", "TargetPort": 80, "PublishedPort": 8080, "PublishMode": "host"}]
    async with leading(store, clock, nodes=1) as swarm:
        web = await swarm.create(replicas=1, ports=ports)
        await swarm.run(1)
        await swarm.update(web, replicas=1, ports=ports, image="busybox:2")
        await swarm.run(5)
        assert images(swarm, web) == {"busybox:2"}
        assert len(swarm.running(web)) == 1


@pytest.mark.parametrize("away", ["paused", "unknown"])
async def test_a_global_task_is_not_replaced_where_none_may_be_made(store: Store, clock: FakeClock, away: str) -> None:
    async with leading(store, clock, nodes=3) as swarm:
        agent = await swarm.create("agent", mode={"Global": {}})
        await swarm.run(1)
        if away == "paused":
            await swarm.wish("node02", availability=Availability.PAUSE)
        else:
            await swarm.observe("node02", NodeState.UNKNOWN)
        (stays,) = [key for key, task in swarm.tasks(agent).items() if task.node == "node02"]
        await swarm.update(agent, mode={"Global": {}}, image="busybox:2", update={"Parallelism": 1})
        await swarm.run(20)
        assert swarm.update_state(agent) == "completed"
        assert stays in swarm.tasks(agent)
        await swarm.wish("node02", availability=Availability.ACTIVE)
        await swarm.observe("node02", NodeState.READY)
        await swarm.run(20)
        assert images(swarm, agent) == {"busybox:2"}
        assert len(swarm.running(agent)) == 3
        assert swarm.update_state(agent) == "completed"


async def test_health_decides_when_a_place_is_past(store: Store, clock: FakeClock) -> None:
    """A task that takes long until it runs holds up the update, and counts as down."""
    async with leading(store, clock) as swarm:
        web = await swarm.create(replicas=4)
        await swarm.run(1)
        swarm.agents.latency = 3
        await swarm.update(web, replicas=4, image="busybox:2", update={"Parallelism": 1})
        assert await watch_down(swarm, web, 4, 10, step=0.5) == 1
        assert len([task for task in swarm.tasks(web).values() if task.version == 2]) < 4
        await swarm.run(60)
        assert images(swarm, web) == {"busybox:2"}


async def test_a_spec_that_fits_nowhere_holds_the_update(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        web = await swarm.create(replicas=4)
        await swarm.run(1)
        large = {"MemoryBytes": 1 << 50}
        await swarm.update(web, replicas=4, reservations=large, update={"Parallelism": 1})
        await swarm.run(60)
        assert len(swarm.running(web)) == 3
        assert swarm.update_state(web) == "updating"
        await swarm.update(web, replicas=4, update={"Parallelism": 1})
        await swarm.run(30)
        assert len(swarm.running(web)) == 4
        assert swarm.update_state(web) == "completed"


async def test_the_first_and_the_last_published_port_replace_tasks(store: Store, clock: FakeClock) -> None:
    """Tasks come to the ingress network and leave it.

    Other changes of ports are no matter of tasks.
    """

    def ports(*published: int) -> list[dict[str, object]]:
        return [{"Protocol": "tcp", "TargetPort": 80, "PublishedPort": port} for port in published]

    async with leading(store, clock) as swarm:
        ingress = await swarm.network("ingress", "10.255.0.0/16", ingress=True)
        web = await swarm.create(replicas=2)
        await swarm.run(1)
        before = swarm.tasks(web).keys()
        await swarm.update(web, replicas=2, ports=ports(8080))
        await swarm.run(30)
        published = swarm.tasks(web)
        assert not published.keys() & before
        assert [[each.network for each in task.networks] for task in published.values()] == [[ingress]] * 2
        for changed in (ports(8081), ports(8081, 8082)):
            await swarm.update(web, replicas=2, ports=changed)
            await swarm.run(30)
            assert swarm.tasks(web) == published
        assert swarm.virtual_ips(web) == {ingress: "10.255.0.2/16"}
        await swarm.update(web, replicas=2)
        await swarm.run(30)
        assert not swarm.tasks(web).keys() & published.keys()
        assert not any(task.networks for task in swarm.tasks(web).values())
        assert swarm.virtual_ips(web) == {}
