"""Sessions of agents over real connections, the store over etcd's fake, and a clock that stands."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from engine.errors import Forbidden, InvalidParameter, ServerError, Unavailable
from engine.manager import dispatcher as module
from engine.manager import records
from engine.manager.ca import Authority
from engine.manager.records import Claim, DataKey, ManagerPresence, NodeData, SecretRecord, ServiceAuth, SpecVersion
from engine.manager.store import Delete, Put, Store
from engine.swarm_session import frames, messages
from engine.swarm_session.messages import Call, Done, LeaveSwarm
from engine.swarm_session.states import Availability, NodeState, Role, TaskState
from engine.wire.nodes import NodeDescription
from engine.wire.secrets import ConfigSpec, SecretSpec
from engine.wire.swarm import Driver, TaskDefaults
from engine.wire.tasks import ConfigReference, SecretReference
from tests.support.fakes.clock import FakeClock
from tests.support.fakes.etcd import FakeEtcd
from tests.unit.manager.agents import (
    Agent,
    cluster,
    dispatcher_of,
    found,
    node_record,
    node_state,
    service,
    spec,
    state_of,
    status,
    status_record,
    task,
)


class World:
    """A store, a dispatcher, and agents that beat by themselves while the time passes."""

    def __init__(self, store: Store, clock: FakeClock) -> None:
        self.store, self.clock = store, clock
        self.dispatcher = dispatcher_of(store, clock)
        self.agents: list[Agent] = []
        self.beating: set[Agent] = set()

    async def agent(self, node: str = "n1", *statuses: messages.Status, **more: Any) -> Agent:
        agent = await self.connected(node)
        await self.during(agent.register(*statuses, **more))
        self.beating.add(agent)
        return agent

    async def connected(self, node: str = "n1") -> Agent:
        agent = await Agent(node).connect(self.dispatcher)
        self.agents.append(agent)
        return agent

    async def during(self, coroutine: Any) -> Any:
        """Await, while a little time passes."""
        work = asyncio.ensure_future(coroutine)
        await self.until(work.done)
        return await work

    async def until(self, condition: Callable[[], Any], seconds: float = 2.0) -> None:
        for _ in range(int(seconds * 100)):
            if condition():
                return
            await self.clock.advance(0.01)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert condition()

    async def passes(self, seconds: float) -> None:
        """Time passes, and connected agents beat each second."""
        for _ in range(round(seconds * 10)):
            await self.clock.advance(0.1)
            if round(self.clock.monotonic() * 10) % 10 == 0:
                for agent in self.beating:
                    agent.beat()
            for _ in range(3):
                await asyncio.sleep(0)

    async def cut(self, agent: Agent) -> None:
        self.beating.discard(agent)
        agent.connection.abort("test")
        await self.until(agent.there.closed.is_set)


@contextlib.asynccontextmanager
async def world(store: Store, clock: FakeClock, *nodes: str, **more: Any) -> AsyncIterator[World]:
    await found(store, *(nodes or ("n1", "n2")), **more)
    made = World(store, clock)
    await made.dispatcher.start()
    try:
        yield made
    finally:
        made.beating.clear()
        closing = asyncio.ensure_future(made.dispatcher.close())
        await made.until(closing.done)
        await closing
        for agent in made.agents:
            await agent.close()


# --- registration ---------------------------------------------------------------------------------


async def test_an_agent_registers_and_its_record_says_so(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        agent = await w.agent(manager_address="10.0.0.1:2377")
        session = agent.session
        assert session is not None
        assert (session.node, session.role, session.epoch, session.availability) == ("n1", "worker", 0, "active")
        assert 4.5 <= session.period <= 5.5
        assert session.root == "ROOT\n"
        assert [peer.node for peer in session.managers] == ["m1"]
        data = store.record(records.NODE_DATA, "n1")
        assert data is not None
        assert (data.state, data.owner, data.session, data.address) == (NodeState.READY, "m1", session.id, "10.0.0.1")
        assert data.description == NodeDescription(hostname="n1")
        await w.until(lambda: agent.got)
        assert agent.got[0] == messages.Assignments(whole=True)
        assert w.dispatcher.sessions == 1


async def test_the_address_is_the_advertised_one_or_the_one_that_is_seen(store: Store, clock: FakeClock) -> None:
    async with world(store, clock, "n1", "n2", "m1") as w:
        await w.agent("n1", advertise="10.9.9.9:2377")
        await w.agent("n2", advertise="[fd00::1]:2377")
        own = await Agent("m1").connect(w.dispatcher, peer="")
        w.agents.append(own)
        await w.during(own.register())
        addresses = {node: entry.record.address for node, entry in store.all(records.NODE_DATA).items()}
        assert addresses == {"n1": "10.9.9.9", "n2": "fd00::1", "m1": "10.77.0.9"}


async def test_unknown_and_removed_nodes_are_refused(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        await store.commit([Put(records.CLAIMS, records.barred_claim("gone"), Claim("1"))])
        for node, barred in (("never", None), ("gone", True)):
            agent = await w.connected(node)
            with pytest.raises(Forbidden, match="not part of this swarm"):
                await w.during(agent.register())
            await w.passes(0.1)
            assert (agent.bye.barred if agent.bye else None) is barred
            assert store.record(records.NODE_DATA, node) is None


async def test_a_node_that_joined_at_another_manager_just_now_is_known(
    store: Store, etcd: FakeEtcd, clock: FakeClock
) -> None:
    other = Store(etcd.peer(), clock)
    await other.load()
    async with world(store, clock) as w:
        await other.commit([Put(records.NODES, "new", node_record())])
        await w.agent("new")
    await other.close()


async def test_a_node_that_has_seen_a_later_epoch_is_refused(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        agent = await w.connected()
        with pytest.raises(Unavailable, match="epoch 0, the node has seen 1"):
            await w.during(agent.register(epoch=1))
        await store.commit([Put(records.CLUSTER, "", cluster(epoch=1))])
        assert (await w.during(agent.register(epoch=1))).epoch == 1


async def test_a_node_registers_three_times_in_eight_seconds(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        for _ in range(3):
            await w.agent()
        agent = await w.connected()
        with pytest.raises(Unavailable, match="too often"):
            await w.during(agent.register())
        await w.agent("n2")
        await w.passes(8)
        await w.agent()
        for _ in range(5):  # the own agent may: nothing is to be feared of it
            own = await Agent("m1").connect(w.dispatcher, peer="")
            w.agents.append(own)
            await w.during(own.register())


async def test_a_second_session_of_a_node_ends_the_first(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        first = await w.agent()
        second = await w.agent()
        await w.until(first.connection.closed.is_set)
        assert first.bye is not None
        assert "another session" in first.bye.reason
        await w.passes(20)
        assert node_state(store, "n1") == "ready"
        assert second.bye is None
        with pytest.raises(ConnectionError):
            await first.report(status("t1", TaskState.RUNNING))


async def test_an_agent_may_register_again_on_its_connection(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        agent = await w.agent()
        await store.commit([Put(records.TASKS, "t1", task())])
        await w.until(lambda: "t1" in agent.tasks)
        before = agent.session
        after = await w.during(agent.register())
        assert before is not None
        assert after.id != before.id
        await w.passes(30)
        assert agent.bye is None
        assert node_state(store, "n1") == "ready"
        assert list(agent.tasks) == ["t1"]
        assert sum(isinstance(each, messages.Assignments) and each.whole for each in agent.got) == 2


async def test_a_session_at_another_manager_ends_the_one_here(store: Store, etcd: FakeEtcd, clock: FakeClock) -> None:
    other_store = Store(etcd.peer(), clock)
    async with world(store, clock, managers=("m1", "m2")) as w:
        await other_store.load()
        other = dispatcher_of(other_store, clock, "m2")
        await other.start()
        here = await w.agent()
        there = await Agent("n1").connect(other)
        await w.during(there.register())
        await w.until(here.connection.closed.is_set)
        await w.cut(here)
        w.beating.add(there)
        await w.passes(30)
        data = store.record(records.NODE_DATA, "n1")
        assert data is not None
        assert (data.owner, data.state) == ("m2", NodeState.READY)
        closing = asyncio.ensure_future(other.close())
        await w.until(closing.done)
        w.beating.discard(there)
        await there.close()
    await other_store.close()


async def test_messages_that_are_no_agents_and_those_without_a_session_are_refused(
    store: Store, clock: FakeClock
) -> None:
    async with world(store, clock) as w:
        agent = await w.connected()
        with pytest.raises(InvalidParameter, match="does not serve Call"):
            await w.during(agent.connection.ask(Call(verb="x")))
        with pytest.raises(Unavailable, match="no session"):
            await w.during(agent.report(status("t1", TaskState.RUNNING)))


async def test_a_connection_that_ends_while_it_registers_leaves_the_node_to_its_grace(
    store: Store, etcd: FakeEtcd, clock: FakeClock
) -> None:
    async with world(store, clock) as w:
        agent = await w.connected()
        asking = asyncio.ensure_future(agent.register())
        etcd.before_commit = lambda *_: agent.there.abort("test")
        await w.until(asking.done)
        etcd.before_commit = None
        with pytest.raises(ConnectionError):
            await asking
        await w.passes(1)
        if store.record(records.NODE_DATA, "n1") is not None:
            await w.passes(20)
            assert node_state(store, "n1") == "down"
        assert w.dispatcher.sessions == 0


async def test_a_description_that_is_too_long_is_refused(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        agent = await w.connected()
        with pytest.raises(InvalidParameter, match=r"description of node n1 has 3\d{5} bytes"):
            await w.during(agent.register(advertise="x" * 300_000))
        assert store.record(records.NODE_DATA, "n1") is None
        await w.during(agent.register())


# --- assignments ----------------------------------------------------------------------------------


async def test_tasks_come_whole_and_then_as_they_change(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        await store.commit([Put(records.TASKS, "t1", task()), Put(records.TASKS, "t2", task(slot=2, assigned=0))])
        agent = await w.agent()
        await w.until(lambda: agent.tasks)
        assert list(agent.tasks) == ["t1"], "a task is the node's when the scheduler has confirmed it"
        assert agent.tasks["t1"] == messages.Assigned(
            id="t1", service="s1", name="web.1.t1", spec="s1/1", desired=TaskState.RUNNING, slot=1
        )
        assert agent.specs == {"s1/1": spec()}
        await store.commit([Put(records.TASKS, "t2", task(slot=2)), Put(records.TASKS, "t3", task(node="n2", slot=3))])
        await w.until(lambda: "t2" in agent.tasks)
        await store.commit([Put(records.TASKS, "t1", task(desired=TaskState.SHUTDOWN))])
        await w.until(lambda: agent.tasks["t1"].desired == TaskState.SHUTDOWN)
        await store.commit([Delete(records.TASKS, "t1"), Delete(records.TASKS, "t3")])
        await w.until(lambda: "t1" not in agent.tasks)
        assert list(agent.tasks) == ["t2"]
        assert list(agent.specs) == ["s1/1"]
        await store.commit([Delete(records.TASKS, "t2")])
        await w.until(lambda: not agent.tasks)
        assert not agent.specs
        await store.commit([Put(records.TASKS, "t4", task())])
        await w.until(lambda: agent.tasks)
        assert list(agent.specs) == ["s1/1"], "dropped at both ends, and sent again"


async def test_changes_that_do_not_concern_the_agent_are_not_sent(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        await store.commit([Put(records.TASKS, "t1", task())])
        agent = await w.agent()
        await w.until(lambda: agent.tasks)
        count = len(agent.got)
        await store.commit([Put(records.TASKS, "t1", task(restarts=3, updated=9))])
        await store.commit([Put(records.TASKS, "t2", task(node="n2"))])
        await store.commit([Put(records.TASKS, "t3", task(node=""))])
        await store.commit([Put(records.TASK_STATUS, "t1", status_record(TaskState.RUNNING))])
        await w.passes(1)
        assert len(agent.got) == count


async def test_many_changes_come_in_few_messages(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        agent = await w.agent()
        await w.passes(0.1)
        count = len(agent.got)
        await store.commit_many([((Put(records.TASKS, f"t{n}", task(slot=n)),), ()) for n in range(1, 501)])
        await w.until(lambda: len(agent.tasks) == 500)
        assert len(agent.got) - count <= 3


async def test_the_task_of_a_global_service_is_named_after_its_node(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        await store.commit([Put(records.TASKS, "t1", task(slot=0))])
        agent = await w.agent()
        await w.until(lambda: agent.tasks)
        assert agent.tasks["t1"].name == "web.n1.t1"


async def test_a_spec_that_comes_later_releases_its_tasks(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        agent = await w.agent()
        await store.commit([Put(records.TASKS, "t1", task(version=2)), Put(records.TASKS, "t2", task(slot=2))])
        await w.until(lambda: agent.tasks)
        assert list(agent.tasks) == ["t2"]
        await store.commit([Put(records.SPEC_VERSIONS, "s1/2", SpecVersion(spec(user="7")))])
        await w.until(lambda: len(agent.tasks) == 2)
        assert set(agent.specs) == {"s1/1", "s1/2"}


async def test_the_spec_of_the_service_serves_while_it_is_not_kept_yet(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        await store.commit(
            [Put(records.SERVICES, "s2", service("db", 5)), Put(records.TASKS, "t1", task(service="s2", version=5))]
        )
        agent = await w.agent()
        await w.until(lambda: agent.tasks)
        assert agent.tasks["t1"].name == "db.1.t1"


async def test_a_task_that_moves_to_another_version_brings_its_spec(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        await store.commit(
            [Put(records.TASKS, "t1", task()), Put(records.SPEC_VERSIONS, "s1/2", SpecVersion(spec(user="7")))]
        )
        agent = await w.agent()
        await w.until(lambda: agent.tasks)
        await store.commit([Put(records.TASKS, "t1", task(version=2))])
        await w.until(lambda: agent.tasks["t1"].spec == "s1/2")
        assert list(agent.specs) == ["s1/2"]


async def test_registry_authorization_comes_with_the_first_task_and_when_it_changes(
    store: Store, clock: FakeClock
) -> None:
    async with world(store, clock) as w:
        agent = await w.agent()
        await store.commit([Put(records.SERVICE_AUTH, "s1", ServiceAuth("a")), Put(records.TASKS, "t1", task())])
        await w.until(lambda: agent.tasks)
        assert agent.auths == {"s1": "a"}
        await store.commit([Put(records.TASKS, "t2", task(slot=2))])
        await w.until(lambda: len(agent.tasks) == 2)
        assert agent.got[-1].auths == {}
        await store.commit([Put(records.SERVICE_AUTH, "s1", ServiceAuth("b")), Put(records.TASKS, "t3", task(slot=3))])
        await w.until(lambda: len(agent.tasks) == 3)
        assert agent.auths == {"s1": "b"}
        await store.commit([Delete(records.TASKS, each) for each in ("t1", "t2", "t3")])
        await w.until(lambda: not agent.tasks)
        await store.commit([Put(records.TASKS, "t4", task())])
        await w.until(lambda: agent.tasks)
        assert agent.got[-1].auths == {"s1": "b"}


async def test_secrets_and_configs_come_once_and_unsealed(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        await store.commit([Put(records.DATA_KEY, "", DataKey(bytes(32)))])
        authority = Authority(store, clock)
        container = {
            "secrets": [
                SecretReference(secret_id="x1", secret_name="key"),
                SecretReference(secret_id="gone", secret_name="g"),
            ],
            "configs": [ConfigReference(config_id="c1", config_name="conf")],
        }
        template = ConfigSpec(name="conf", templating=Driver("golang"))
        await store.commit(
            [
                Put(
                    records.SECRETS,
                    "x1",
                    SecretRecord(created=0, updated=0, spec=SecretSpec(name="key"), data=authority.seal("x1", b"pass")),
                ),
                Put(
                    records.CONFIGS,
                    "c1",
                    records.ConfigRecord(created=0, updated=0, spec=template, data=authority.seal("c1", b"{{}}")),
                ),
                Put(records.SPEC_VERSIONS, "s1/2", SpecVersion(spec(**container))),
                Put(records.TASKS, "t1", task(version=2)),
            ]
        )
        agent = await w.agent()
        await w.until(lambda: agent.tasks)
        assert agent.secrets == {"x1": b"pass"}
        assert agent.configs == {"c1": b"{{}}"}
        assert agent.tasks["t1"].secrets == ("x1", "gone")
        assert agent.got[0].configs[0].template == "golang"
        await store.commit([Put(records.TASKS, "t2", task(version=2, slot=2))])
        await w.until(lambda: len(agent.tasks) == 2)
        assert agent.got[-1].secrets == ()
        await store.commit([Delete(records.TASKS, "t1"), Delete(records.TASKS, "t2")])
        await w.until(lambda: not agent.tasks)
        await store.commit([Put(records.TASKS, "t3", task(version=2))])
        await w.until(lambda: agent.tasks)
        assert agent.secrets == {"x1": b"pass"}


async def test_a_secret_that_cannot_be_unsealed_is_left_out(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        record = SecretRecord(created=0, updated=0, spec=SecretSpec(name="key"), data=b"not sealed at all, by any key")
        container = spec(secrets=[SecretReference(secret_id="x1", secret_name="key")])
        await store.commit([Put(records.DATA_KEY, "", DataKey(bytes(32))), Put(records.SECRETS, "x1", record)])
        await store.commit(
            [Put(records.SPEC_VERSIONS, "s1/2", SpecVersion(container)), Put(records.TASKS, "t1", task(version=2))]
        )
        agent = await w.agent()
        await w.until(lambda: agent.tasks)
        assert agent.secrets == {}


async def test_the_default_log_driver_comes_with_tasks(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        driver = Driver("json-file", {"max-size": "1m"})
        await store.commit([Put(records.CLUSTER, "", cluster(task_defaults=TaskDefaults(log_driver=driver)))])
        agent = await w.agent()
        await w.until(lambda: agent.got)
        assert agent.got[0].log_driver == {"Name": "json-file", "Options": {"max-size": "1m"}}


async def test_assignments_that_are_too_long_end_the_session(
    store: Store, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The node would be ready, and never get a task."""
    async with world(store, clock) as w:
        long = spec(env=["A=" + "x" * 5000])
        await store.commit(
            [Put(records.SPEC_VERSIONS, "s1/2", SpecVersion(long)), Put(records.TASKS, "t1", task(version=2))]
        )
        monkeypatch.setattr(frames, "LONGEST", 4000)
        agent = await w.agent()
        await w.until(agent.connection.closed.is_set)
    assert "assignments of node n1: a message of" in caplog.text


async def test_an_orphaned_task_is_taken_out(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        await store.commit([Put(records.TASKS, "t1", task())])
        agent = await w.agent()
        await w.until(lambda: agent.tasks)
        await store.commit([Put(records.TASK_STATUS, "t1", status_record(TaskState.ORPHANED))])
        await w.until(lambda: not agent.tasks)


async def test_an_agent_that_does_not_read_is_not_sent_more_and_is_let_go(
    store: Store, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HIGH_WATER", 100_000)
    async with world(store, clock) as w:
        agent = await w.agent()
        agent.connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
        w.beating.discard(agent)
        for version in range(2, 40):
            args = [str(version) * 1000] * 20
            await store.commit(
                [
                    Put(records.SPEC_VERSIONS, f"s1/{version}", SpecVersion(spec(args=args))),
                    Put(records.TASKS, f"t{version}", task(version=version)),
                ]
            )
            await w.passes(0.1)
        assert 100_000 < agent.there.backlog < 400_000
        for _ in range(32):
            w.dispatcher._beat(w.dispatcher._sessions["n1"])
            await w.passes(1)
            if agent.there.closed.is_set():
                break
        assert agent.there.closed.is_set()


# --- statuses -------------------------------------------------------------------------------------


async def test_statuses_are_stored_before_they_are_acknowledged(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        await store.commit([Put(records.TASKS, "t1", task()), Put(records.TASKS, "t2", task(slot=2))])
        agent = await w.agent()
        await w.during(
            agent.report(status("t1", TaskState.PREPARING), status("t2", TaskState.REJECTED, error="no such image"))
        )
        assert state_of(store, "t1") == TaskState.PREPARING
        assert store.record(records.TASK_STATUS, "t2") == records.TaskStatus(
            state=TaskState.REJECTED, since=1, error="no such image"
        )
        await w.during(agent.report(status("t1", TaskState.RUNNING, pid=7, container="c", ready=True)))
        assert store.record(records.TASK_STATUS, "t1") == records.TaskStatus(
            state=TaskState.RUNNING, since=1, pid=7, container="c", ready=True
        )


async def test_states_only_go_forward_and_an_end_is_final(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        await store.commit([Put(records.TASKS, "t1", task())])
        agent = await w.agent()
        await w.during(agent.report(status("t1", TaskState.RUNNING, ready=True)))
        await w.during(agent.report(status("t1", TaskState.STARTING)))
        assert state_of(store, "t1") == TaskState.RUNNING
        await w.during(agent.report(status("t1", TaskState.RUNNING, ready=False)))
        record = store.record(records.TASK_STATUS, "t1")
        assert record is not None
        assert not record.ready
        await w.during(agent.report(status("t1", TaskState.COMPLETE)))
        await w.during(agent.report(status("t1", TaskState.FAILED)))
        assert state_of(store, "t1") == TaskState.COMPLETE


async def test_the_last_status_of_a_batch_counts(store: Store, clock: FakeClock, etcd: FakeEtcd) -> None:
    async with world(store, clock) as w:
        await store.commit([Put(records.TASKS, "t1", task())])
        agent = await w.agent()
        revision = store.revision
        states = [
            TaskState.ACCEPTED,
            TaskState.PREPARING,
            TaskState.READY,
            TaskState.STARTING,
            TaskState.RUNNING,
            TaskState.READY,
        ]
        await w.during(asyncio.gather(*(agent.report(status("t1", each)) for each in states)))
        assert state_of(store, "t1") == TaskState.RUNNING
        assert store.revision == revision + 1
        await w.during(agent.report(status("t1", TaskState.FAILED, error="x"), status("t1", TaskState.SHUTDOWN)))
        assert state_of(store, "t1") == TaskState.FAILED


async def test_a_node_reports_its_own_tasks_only(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        await store.commit([Put(records.TASKS, "t1", task()), Put(records.TASKS, "t2", task(node="n2"))])
        one, two = await w.agent("n1"), await w.agent("n2")
        await w.during(
            asyncio.gather(
                one.report(status("t1", TaskState.PREPARING), status("unknown", TaskState.RUNNING)),
                two.report(status("t1", TaskState.FAILED), status("t2", TaskState.STARTING)),
                one.report(status("t2", TaskState.FAILED)),
            )
        )
        assert (state_of(store, "t1"), state_of(store, "t2")) == (TaskState.PREPARING, TaskState.STARTING)
        assert state_of(store, "unknown") is None


@pytest.mark.parametrize("state", [-1, 0, 64, 800, 832, 513, 10**15])
async def test_states_that_no_node_reports_are_refused(store: Store, clock: FakeClock, state: int) -> None:
    async with world(store, clock) as w:
        await store.commit([Put(records.TASKS, "t1", task())])
        agent = await w.agent()
        with pytest.raises((InvalidParameter, ServerError)):
            await w.during(
                agent.connection.ask(messages.Statuses(of=(messages.Status(task="t1", state=state, since=1),)))
            )
        assert state_of(store, "t1") is None


async def test_long_texts_of_a_status_are_cut(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        await store.commit([Put(records.TASKS, "t1", task())])
        agent = await w.agent()
        long = "x" * 5_000_000
        await w.during(agent.report(status("t1", TaskState.FAILED, message=long, error=long, container=long)))
        record = store.record(records.TASK_STATUS, "t1")
        assert record is not None
        assert [len(text) for text in (record.message, record.error, record.container)] == [4096, 4096, 128]
        await w.during(agent.report(status("t1", TaskState.FAILED, message=long)))


async def test_the_statuses_of_a_hello_are_stored(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        await store.commit([Put(records.TASKS, "t1", task())])
        await w.agent("n1", status("t1", TaskState.RUNNING), status("other", TaskState.RUNNING))
        await w.until(lambda: state_of(store, "t1") == TaskState.RUNNING)


async def test_a_task_that_is_removed_meanwhile_gets_no_status(store: Store, etcd: FakeEtcd, clock: FakeClock) -> None:
    other = Store(etcd.peer(), clock)
    await other.load()
    async with world(store, clock) as w:
        await store.commit([Put(records.TASKS, "t1", task()), Put(records.TASKS, "t2", task(slot=2))])
        agent = await w.agent()
        reporting = asyncio.ensure_future(
            agent.report(status("t1", TaskState.RUNNING), status("t2", TaskState.RUNNING))
        )
        await other.commit([Delete(records.TASKS, "t1")])
        await w.during(reporting)
        assert store.all(records.TASK_STATUS).keys() == {"t2"}
    await other.close()


async def test_a_status_of_a_session_that_is_over_is_not_stored(store: Store, etcd: FakeEtcd, clock: FakeClock) -> None:
    other = Store(etcd.peer(), clock)
    await other.load()
    async with world(store, clock) as w:
        await store.commit([Put(records.TASKS, "t1", task())])
        agent = await w.agent()
        await other.current()
        entry = other.get(records.NODE_DATA, "n1")
        assert entry is not None
        taken = msgspec.structs.replace(entry.record, session="other", owner="m2")

        await other.commit([Put(records.NODE_DATA, "n1", taken)])
        with pytest.raises((Unavailable, ConnectionError)):
            await w.during(agent.report(status("t1", TaskState.RUNNING)))
        await w.passes(1)
        assert state_of(store, "t1") is None
    await other.close()


async def test_statuses_wait_for_a_leader_and_fail_without_one(store: Store, etcd: FakeEtcd, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        await store.commit([Put(records.TASKS, "t1", task())])
        agent = await w.agent()
        etcd.down = True
        reporting = asyncio.ensure_future(agent.report(status("t1", TaskState.RUNNING)))
        await w.passes(1)
        etcd.down = False
        await w.during(reporting)
        assert state_of(store, "t1") == TaskState.RUNNING


async def test_a_flood_of_statuses_is_written_in_few_transactions(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        await store.commit_many([((Put(records.TASKS, f"t{n}", task(slot=n)),), ()) for n in range(1, 2001)])
        agent = await w.agent()
        revision = store.revision
        reports = [
            agent.report(*(status(f"t{n}", TaskState.RUNNING) for n in range(start, start + 20)))
            for start in range(1, 2001, 20)
        ]
        await w.during(asyncio.gather(*reports))
        assert len(store.all(records.TASK_STATUS)) == 2000
        assert store.revision - revision <= 8


# --- liveness -------------------------------------------------------------------------------------


async def test_beats_are_answered_and_keep_a_node_ready(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        agent = await w.agent()
        revision = store.revision
        await w.passes(60)
        assert node_state(store, "n1") == "ready"
        assert agent.beats > 50
        assert store.revision == revision, "nothing of a beat is stored"


async def test_a_silent_node_is_down_after_three_periods(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        agent = await w.agent()
        assert agent.session is not None
        w.beating.clear()
        await w.passes(3 * agent.session.period - 0.5)
        assert node_state(store, "n1") == "ready"
        await w.passes(1.5)
        data = store.record(records.NODE_DATA, "n1")
        assert data is not None
        assert (data.state, data.owner, data.session) == (NodeState.DOWN, "", "")
        assert "heartbeat failure" in data.message
        assert agent.connection.closed.is_set()
        assert w.dispatcher.sessions == 0
        again = await w.agent()
        data = store.record(records.NODE_DATA, "n1")
        assert data is not None
        assert (data.state, data.message) == (NodeState.READY, "")
        assert again.session is not None


async def test_a_broken_connection_is_suspect_then_down(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        agent = await w.agent()
        assert agent.session is not None
        await w.cut(agent)
        await w.passes(2.5)
        assert node_state(store, "n1") == "ready"
        await w.passes(1)
        assert node_state(store, "n1") == "disconnected"
        await w.passes(3 * agent.session.period - 4.5)
        assert node_state(store, "n1") == "disconnected"
        await w.passes(2)
        assert node_state(store, "n1") == "down"


async def test_a_node_that_comes_back_in_time_is_never_down(store: Store, clock: FakeClock) -> None:
    states = set()
    async with world(store, clock) as w:
        store.subscribe(
            lambda event: states.add(event.new.record.state) if event.kind is records.NODE_DATA and event.new else None
        )
        agent = await w.agent()
        await w.cut(agent)
        await w.passes(1)
        agent = await w.agent()
        assert states == {NodeState.READY}
        await w.cut(agent)
        await w.passes(10)
        await w.agent()
        await w.passes(30)
        assert states == {NodeState.READY, NodeState.DISCONNECTED}
        assert node_state(store, "n1") == "ready"


async def test_the_period_of_the_settings_counts(store: Store, clock: FakeClock) -> None:
    async with world(store, clock, period=2.0) as w:
        agent = await w.agent()
        assert agent.session is not None
        assert 1.8 <= agent.session.period <= 2.2
        w.beating.clear()
        await w.passes(7.5)
        assert node_state(store, "n1") == "down"


async def test_no_period_is_shorter_than_the_looks(store: Store, clock: FakeClock) -> None:
    async with world(store, clock, period=0.000001) as w:
        agent = await w.agent()
        assert agent.session is not None
        assert 0.45 <= agent.session.period <= 0.55
        w.beating.clear()
        for _ in range(40):
            agent.beat()
            await w.passes(0.3)
        assert node_state(store, "n1") == "ready"


async def test_a_change_of_the_period_reaches_the_agents_and_downs_none(store: Store, clock: FakeClock) -> None:
    async with world(store, clock, period=30.0) as w:
        agent = await w.agent()
        await w.passes(5)
        w.beating.clear()
        await w.passes(20)
        await store.commit([Put(records.CLUSTER, "", cluster(1.0))])
        await w.passes(1)
        w.beating.add(agent)
        assert agent.session is not None
        assert 0.9 <= agent.session.period <= 1.1
        assert agent.session.root == "", "the root has not changed"
        await w.passes(10)
        assert node_state(store, "n1") == "ready"


async def test_a_stopped_process_declares_nobody_down(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        await w.agent("n1")
        lost = await w.agent("n2")
        await w.cut(lost)
        await w.passes(5)
        clock.set(60)
        await w.passes(10)
        assert node_state(store, "n1") == "ready"
        assert node_state(store, "n2") == "disconnected"
        await w.passes(10)
        assert node_state(store, "n1") == "ready"
        assert node_state(store, "n2") == "down"


async def test_nodes_of_an_earlier_process_have_six_periods(store: Store, clock: FakeClock) -> None:
    await found(store, "n1", "n2")
    for node in ("n1", "n2"):
        data = NodeData(state=NodeState.READY, owner="m1", session="old")
        await store.commit([Put(records.NODE_DATA, node, data)])
    async with world(store, clock) as w:
        await w.passes(28)
        assert node_state(store, "n1") == "ready"
        await w.agent("n2")
        await w.passes(4)
        assert node_state(store, "n1") == "down"
        assert node_state(store, "n2") == "ready"


async def test_a_node_that_leaves_is_down_at_once(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        agent = await w.agent()
        assert isinstance(await w.during(agent.connection.ask(LeaveSwarm())), Done)
        data = store.record(records.NODE_DATA, "n1")
        assert data is not None
        assert (data.state, data.message, data.owner) == (NodeState.DOWN, "the node left the swarm", "")
        await w.cut(agent)
        await w.passes(20)
        assert store.record(records.NODE_DATA, "n1") == data


async def test_a_removed_node_is_sent_away_for_good(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        agent = await w.agent()
        await store.commit([Delete(records.NODE_DATA, "n1"), Delete(records.NODES, "n1")])
        await w.until(agent.connection.closed.is_set)
        assert agent.bye is not None
        assert agent.bye.barred
        await w.passes(30)
        assert store.record(records.NODE_DATA, "n1") is None


# --- quorum ---------------------------------------------------------------------------------------


async def test_without_quorum_agents_are_sent_away_and_refused(store: Store, etcd: FakeEtcd, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        agent = await w.agent()
        etcd.down = True
        await w.passes(2)
        assert agent.bye is None
        await w.passes(6)
        assert agent.bye is not None
        assert not agent.bye.barred
        assert agent.connection.closed.is_set()
        again = await w.connected()
        with pytest.raises(Unavailable, match="quorum"):
            await w.during(again.register())
        await w.passes(60)
        etcd.down = False
        await w.passes(5)
        assert node_state(store, "n1") == "ready"
        await w.agent()
        await w.passes(60)
        assert node_state(store, "n1") == "ready"


async def test_after_quorum_is_back_nodes_have_six_periods(store: Store, etcd: FakeEtcd, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        await w.agent()
        etcd.down = True
        await w.passes(100)
        w.beating.clear()
        etcd.down = False
        await w.passes(28)
        assert node_state(store, "n1") in ("ready", "disconnected")
        await w.passes(8)
        assert node_state(store, "n1") == "down"


@pytest.mark.parametrize("before", [0.5, 1.5, 2.5, 4.0])
async def test_a_node_whose_grace_ends_while_quorum_is_lost_is_not_down_when_it_is_back(
    store: Store, etcd: FakeEtcd, clock: FakeClock, before: float
) -> None:
    async with world(store, clock) as w:
        agent = await w.agent()
        assert agent.session is not None
        w.beating.clear()
        await w.passes(3 * agent.session.period - before)
        etcd.down = True
        await w.passes(16)
        etcd.down = False
        await w.passes(4)
        assert node_state(store, "n1") != "down"
        await w.agent()
        await w.passes(30)
        assert node_state(store, "n1") == "ready"


async def test_a_short_election_sends_nobody_away(store: Store, etcd: FakeEtcd, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        agent = await w.agent()
        etcd.down = True
        await w.passes(2)
        etcd.down = False
        await w.passes(10)
        assert agent.bye is None


# --- terms ----------------------------------------------------------------------------------------


async def test_terms_are_sent_again_when_they_change(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        one, two = await w.agent("n1"), await w.agent("n2")
        await store.commit([Put(records.NODES, "n1", node_record(labels={"a": "b"}))])
        await w.passes(1)
        assert one.sessions == []
        await store.commit([Put(records.NODES, "n1", node_record(Role.MANAGER, availability=Availability.DRAIN))])
        await w.until(lambda: one.sessions)
        assert (one.sessions[-1].role, one.sessions[-1].availability) == ("manager", "drain")
        assert one.sessions[-1].seq == 0
        assert two.sessions == []
        await store.commit([Put(records.MANAGERS, "m2", ManagerPresence(address="10.77.0.2:2377", member=2))])
        await w.until(lambda: two.sessions)
        assert [peer.address for peer in two.sessions[-1].managers] == ["10.77.0.1:2377", "10.77.0.2:2377"]
        await store.commit([Put(records.CLUSTER, "", msgspec.structs.replace(cluster(), rotation="NEXT\n"))])
        await w.until(lambda: two.sessions[-1].root)
        assert two.sessions[-1].root == "ROOT\nNEXT\n"


async def test_a_session_keeps_the_note_of_a_renewal(store: Store, clock: FakeClock) -> None:
    """`NodeData.issuer_changes`, without which the node would be asked to renew without end."""
    async with world(store, clock) as w:
        await w.agent("n1")
        data = store.record(records.NODE_DATA, "n1")
        assert data is not None
        await store.commit([Put(records.NODE_DATA, "n1", msgspec.structs.replace(data, issuer_changes=3))])
        await w.agent("n1")
        again = store.record(records.NODE_DATA, "n1")
        assert again is not None and again.issuer_changes == 3 and again.session != data.session


async def test_a_manager_that_does_not_run_is_named_as_absent(store: Store, clock: FakeClock) -> None:
    async with world(store, clock, managers=("m1", "m2")) as w:
        data = NodeData(state=NodeState.READY, role=Role.MANAGER, manager_address="10.77.0.2:2377")
        await store.commit([Put(records.NODE_DATA, "m2", data)])
        agent = await w.agent()
        assert agent.session is not None
        assert [peer.absent for peer in agent.session.managers] == [False, False]
        await store.commit([Delete(records.MANAGERS, "m2")])
        await w.until(lambda: agent.sessions)
        assert [(peer.node, peer.absent) for peer in agent.sessions[-1].managers] == [("m1", False), ("m2", True)]
        assert [peer.node for peer in messages.order_of_managers("n1", agent.sessions[-1].managers)] == ["m1", "m2"]


# --- sharing --------------------------------------------------------------------------------------


async def test_a_new_manager_gets_its_share_of_agents(store: Store, clock: FakeClock) -> None:
    nodes = [f"n{number}" for number in range(60)]
    async with world(store, clock, *nodes) as w:
        for node in nodes:
            await w.agent(node)
        await w.passes(30)
        assert w.dispatcher.sessions == 60
        await store.commit([Put(records.MANAGERS, "m2", ManagerPresence(address="10.77.0.2:2377", member=2))])
        await w.passes(11)
        gone = [agent for agent in w.agents if agent.bye is not None]
        assert 1 <= len(gone) <= 3
        peers = w.dispatcher.managers()
        assert {messages.order_of_managers(agent.node, peers)[0].node for agent in gone} == {"m2"}


async def test_few_agents_stay_where_they_are(store: Store, clock: FakeClock) -> None:
    async with world(store, clock, managers=("m1", "m2", "m3")) as w:
        agents = [await w.agent("n1"), await w.agent("n2")]
        await w.passes(30)
        assert [agent.bye for agent in agents] == [None, None]


# --- the end --------------------------------------------------------------------------------------


async def test_the_end_of_the_manager_sends_agents_away(
    store: Store, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(store, clock) as w:
        agent = await w.agent()
    assert agent.bye is not None
    assert agent.connection.closed.is_set()
    assert node_state(store, "n1") == "ready"
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_hundred_agents_at_once(store: Store, clock: FakeClock) -> None:
    nodes = [f"n{number}" for number in range(100)]
    async with world(store, clock, *nodes) as w:
        agents = [await w.connected(node) for node in nodes]
        revision = store.revision
        await w.during(asyncio.gather(*(agent.register() for agent in agents)))
        assert store.revision - revision < 10
        groups = [((Put(records.TASKS, f"t{n}", task(node=f"n{n % 100}", slot=n)),), ()) for n in range(1, 501)]
        await store.commit_many(groups)
        await w.until(lambda: all(len(agent.tasks) == 5 for agent in agents))
        await w.during(
            asyncio.gather(*(agent.report(*(status(id, TaskState.RUNNING) for id in agent.tasks)) for agent in agents))
        )
        assert len(store.all(records.TASK_STATUS)) == 500
        for agent in agents:
            w.beating.add(agent)
        await w.passes(10)
        assert {entry.record.state for entry in store.all(records.NODE_DATA).values()} == {NodeState.READY}


def test_hosts_of_addresses() -> None:
    assert module._host("10.0.0.1:2377") == "10.0.0.1"
    assert module._host("10.0.0.1") == "10.0.0.1"
    assert module._host("[fd00::1]:2377") == "fd00::1"
    assert module._host("fd00::1") == "fd00::1"
    assert module._host("") == ""
