"""Sessions of agents in which networks matter: what a node says of itself, the order of views and
assignments, withdrawal, and attachments of plain containers.
"""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from engine.errors import EngineError, Forbidden, InvalidParameter, NotFound, ServerError, Unavailable
from engine.manager import attaching, batches, dispatcher, records
from engine.manager.records import AttachmentRecord, Claim
from engine.manager.store import Delete, Event, Put, Store
from engine.manager.views import NetworkViews
from engine.swarm_session import messages
from engine.swarm_session.messages import Attach, Attached, Detach, Done
from engine.swarm_session.states import TaskState
from tests.support.fakes.clock import FakeClock
from tests.unit.manager.agents import Agent, cluster, node_state, status
from tests.unit.manager.test_dispatcher import World, world
from tests.unit.manager.test_views import network, on, running

ATTACH = Attach(network="a", container="c1", name="box", aliases=("x",))


async def attachable(w: World, **more: bool) -> None:
    more.setdefault("attachable", True)
    await w.store.commit(
        [
            Put(records.NETWORKS, "a", network("blue", **more)),
            Put(records.CLAIMS, records.name_claim("network", "blue"), Claim("a")),
        ]
    )


def addressed(store: Store, **given: str) -> None:
    """Answer each new attachment, as the leader does."""

    def changed(event: Event) -> None:
        if event.kind is records.ATTACHMENTS and event.new is not None:
            record = event.new.record
            if not record.address and not record.error:
                answered = msgspec.structs.replace(record, **(given or {"address": record.wanted or "10.0.1.9"}))
                asyncio.get_running_loop().create_task(store.commit([Put(records.ATTACHMENTS, event.key, answered)]))

    store.subscribe(changed)


def attachments(store: Store) -> dict[str, AttachmentRecord]:
    return {key: entry.record for key, entry in store.all(records.ATTACHMENTS).items()}


# --- sessions -------------------------------------------------------------------------------------


async def test_a_node_says_what_its_networks_need(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        await store.commit([Put(records.CLUSTER, "", msgspec.structs.replace(cluster(), data_path_port=7000))])
        agent = await w.agent(data_address="198.51.100.1", features=("overlay",), subnets=("172.17.0.0/16",))
        data = store.record(records.NODE_DATA, "n1")
        assert data is not None
        assert (data.data_address, data.features, data.subnets) == ("198.51.100.1", ("overlay",), ("172.17.0.0/16",))
        assert agent.session is not None
        assert agent.session.data_path_port == 7000
        other = await w.connected("n2")
        with pytest.raises(InvalidParameter, match="data_address 'fd00::1' is no IPv4 address"):
            await w.during(other.register(data_address="fd00::1"))
        assert store.record(records.NODE_DATA, "n2") is None


async def test_a_session_begins_with_whole_views_and_then_its_tasks(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        await attachable(w)
        await store.commit([Put(records.TASKS, "t1", on("a")), Put(records.TASKS, "t2", on("a", node="n2", number=3))])
        agent = await w.agent()
        await w.until(lambda: agent.tasks)
        assert [views.whole for views in agent.views] == [True]
        assert agent.networks["a"].endpoints.keys() == {"t1", "t2"}
        assert agent.tasks["t1"].addresses == {"a": "10.0.0.2"}
        idle = await w.agent("n2")
        await w.until(lambda: idle.tasks)
        assert [views.whole for views in idle.views] == [True]


async def test_views_come_before_the_tasks_that_need_them(store: Store, clock: FakeClock) -> None:
    """`Agent` itself asserts the order."""
    async with world(store, clock) as w:
        await attachable(w)
        agents = [await w.agent("n1"), await w.agent("n2")]
        for number in range(30):
            node = f"n{number % 2 + 1}"
            await store.commit([Put(records.TASKS, f"t{number}", on("a", node=node, number=number + 2))])
            if number % 3:
                await w.passes(0.1)
        for agent in agents:
            await w.until(lambda agent=agent: len(agent.tasks) == 15)  # type: ignore[misc]
        await store.commit([Delete(records.TASKS, f"t{number}") for number in range(0, 30, 2)])
        await w.until(lambda: not agents[0].tasks)
        await w.until(lambda: not agents[0].networks)
        await w.until(lambda: len(agents[1].networks["a"].endpoints) == 15)


async def test_a_task_that_comes_while_a_session_begins(
    store: Store, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the first one of its node, and its network is not the one that is built meanwhile."""
    async with world(store, clock) as w:
        await attachable(w)
        await store.commit([Put(records.NETWORKS, "in", network("ingress", 0, ingress=True))])
        build = NetworkViews.build

        async def slow(views: NetworkViews, id: str) -> None:
            if store.get(records.TASKS, "t1") is None:
                await store.commit([Put(records.TASKS, "t1", on("a"))])
            await build(views, id)

        monkeypatch.setattr(NetworkViews, "build", slow)
        agent = await w.agent()
        await w.until(lambda: agent.tasks)
        assert [views.whole for views in agent.views] == [True]
        assert agent.networks.keys() == {"a", "in"}


async def test_a_withdrawal_is_not_waited_with(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        await attachable(w)
        await store.commit(
            [
                Put(records.TASKS, "t1", on("a")),
                Put(records.TASKS, "t2", on("a", node="n2", number=3)),
                Put(records.TASK_STATUS, "t2", running()),
            ]
        )
        agent, other = await w.agent(), await w.agent("n2", status("t2", TaskState.RUNNING, ready=True))
        await w.during(agent.report(status("t1", TaskState.STARTING)))
        for ready in (True, False, True):
            began = clock.monotonic()
            await w.during(agent.report(status("t1", TaskState.RUNNING, ready=ready)))
            await w.until(lambda ready=ready: ("t1" in other.networks["a"].ready) is ready)  # type: ignore[misc]
            assert clock.monotonic() - began < batches.PAUSE  # seconds: of the fake clock
        await w.during(agent.report(status("t1", TaskState.FAILED, ready=True)))
        await w.until(lambda: "t1" not in other.networks["a"].endpoints)
        kept = store.record(records.TASK_STATUS, "t1")
        assert kept is not None
        assert not kept.ready


async def test_a_withdrawal_while_a_session_begins(
    store: Store, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is newer than what the `Hello` says."""
    async with world(store, clock) as w:
        await attachable(w)
        await store.commit([Put(records.TASKS, "t1", on("a"))])
        build, going_on = NetworkViews.build, asyncio.Event()

        async def slow(views: NetworkViews, id: str) -> None:
            await going_on.wait()
            await build(views, id)

        monkeypatch.setattr(NetworkViews, "build", slow)
        agent = await w.agent("n1", status("t1", TaskState.RUNNING, ready=True))
        assert not agent.tasks
        await w.during(agent.report(status("t1", TaskState.RUNNING, ready=False)))
        going_on.set()
        await w.until(lambda: agent.tasks)
        await w.passes(0.5)
        kept = store.record(records.TASK_STATUS, "t1")
        assert kept is not None and not kept.ready
        assert not agent.networks["a"].ready


async def test_a_link_that_is_lost_takes_the_node_out_before_it_is_down(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        await attachable(w)
        await store.commit([Put(records.TASKS, f"t{n}", on("a", node=f"n{n}", number=n)) for n in (1, 2)])
        agents = [await w.agent(f"n{n}", status(f"t{n}", TaskState.RUNNING, ready=True)) for n in (1, 2)]
        await w.until(lambda: agents[0].networks["a"].ready == {"t1", "t2"})
        await w.passes(0.5)
        beats = agents[1].beats
        agents[1].there.quiet = dispatcher.UNEASY + 0.1
        await w.until(lambda: agents[1].beats > beats)  # it is sent something
        agents[1].there.quiet = dispatcher.SUSPECT + 0.1
        await w.until(lambda: agents[0].networks["a"].ready == {"t1"}, 0.5)
        assert node_state(store, "n2") == "disconnected"
        agents[1].there.quiet = 0.5
        await w.until(lambda: agents[0].networks["a"].ready == {"t1", "t2"}, 0.5)
        assert node_state(store, "n2") == "ready"
        assert agents[1].bye is None


async def test_links_are_not_watched_without_networks(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        agent = await w.agent()
        agent.there.quiet = 10
        await w.passes(3)
        assert node_state(store, "n1") == "ready"


# --- attachments ----------------------------------------------------------------------------------


async def test_a_container_is_attached_and_detached(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        await attachable(w)
        addressed(store)
        agent, other = await w.agent(), await w.agent("n2")
        asking = asyncio.ensure_future(agent.connection.ask(ATTACH))
        asking.add_done_callback(lambda _: seen.append(set(agent.networks)))
        seen: list[set[str]] = []
        answer = await w.during(asking)
        assert isinstance(answer, Attached)
        assert (answer.network, answer.address) == ("a", "10.0.1.9")
        assert seen == [{"a"}]
        record = attachments(store)[answer.attachment]
        assert (record.node, record.container, record.name, record.aliases) == ("n1", "c1", "box", ("x",))
        again = await w.during(agent.connection.ask(msgspec.structs.replace(ATTACH, network="blue", name="bag")))
        assert (again.network, again.address) == ("a", "10.0.1.9")
        assert {key: each.name for key, each in attachments(store).items()} == {again.attachment: "bag"}
        # a late removal of the first one
        assert isinstance(await w.during(agent.connection.ask(Detach(attachment=answer.attachment))), Done)
        assert attachments(store).keys() == {again.attachment}
        moved = await w.during(agent.connection.ask(msgspec.structs.replace(ATTACH, address="10.0.1.77")))
        assert (moved.address, len(attachments(store))) == ("10.0.1.77", 1)
        foreign = await w.during(other.connection.ask(Detach(attachment=moved.attachment)))
        assert isinstance(foreign, Done)
        assert attachments(store).keys() == {moved.attachment}
        for _ in range(2):
            assert isinstance(await w.during(agent.connection.ask(Detach(attachment=moved.attachment))), Done)
        assert not attachments(store)
        await w.until(lambda: not agent.networks)


async def test_other_nodes_know_of_an_attachment_before_its_container_starts(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        await attachable(w)
        addressed(store)
        agent, other = await w.agent(), await w.agent("n2")
        for asking, known in ((agent, False), (other, True)):
            began = clock.monotonic()
            answer = await w.during(asking.connection.ask(ATTACH))
            assert (clock.monotonic() - began >= dispatcher.SPREAD) is known
        assert answer.attachment in agent.networks["a"].endpoints


async def test_networks_are_found_as_clients_name_them(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        other = network("green", attachable=True)
        await store.commit([Put(records.NETWORKS, "abcdef", other), Put(records.NETWORKS, "abxyz", other)])
        addressed(store)
        agent = await w.agent()
        answer = await w.during(agent.connection.ask(msgspec.structs.replace(ATTACH, network="abc")))
        assert answer.network == "abcdef"
        with pytest.raises(ServerError, match="network ab is ambiguous"):
            await w.during(agent.connection.ask(msgspec.structs.replace(ATTACH, network="ab")))


async def test_refused_attachments_leave_nothing(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        await attachable(w, attachable=False)
        agent = await w.agent()
        for attach, kind, words in (
            (ATTACH, Forbidden, "network blue not manually attachable"),
            (msgspec.structs.replace(ATTACH, network="red"), NotFound, "network red not found"),
            (msgspec.structs.replace(ATTACH, name="x" * 300), InvalidParameter, "name has 300 characters"),
            (msgspec.structs.replace(ATTACH, container=""), InvalidParameter, "needs a network and a container"),
        ):
            with pytest.raises(kind, match=words):
                await w.during(agent.connection.ask(attach))
        assert not attachments(store)


async def test_an_attachment_without_an_address_is_given_up(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        await attachable(w)
        agent = await w.agent()
        asking = asyncio.ensure_future(agent.connection.ask(ATTACH))
        await w.until(lambda: attachments(store))
        await w.passes(attaching.ANSWER + 1)
        with pytest.raises(Unavailable, match="no address was given within 15 s"):
            await w.during(asking)
        assert not attachments(store)
        addressed(store, error="network blue: no free address of 253")
        with pytest.raises(ServerError, match="no free address of 253"):
            await w.during(agent.connection.ask(ATTACH))
        assert not attachments(store)


@pytest.mark.parametrize("kind", [Forbidden, InvalidParameter, NotFound, ServerError])
async def test_an_address_is_refused_with_the_kind_of_the_leader(
    store: Store, clock: FakeClock, kind: type[EngineError]
) -> None:
    async with world(store, clock) as w:
        await attachable(w)
        addressed(store, error="words", kind=kind.__name__)
        agent = await w.agent()
        with pytest.raises(EngineError, match="words") as refused:
            await w.during(agent.connection.ask(ATTACH))
        assert type(refused.value) is kind
        assert not attachments(store)


async def test_the_next_session_keeps_what_the_node_uses(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        await attachable(w)
        addressed(store)
        agent = await w.agent()
        kept, lost = [
            (await w.during(agent.connection.ask(msgspec.structs.replace(ATTACH, container=container)))).attachment
            for container in ("c1", "c2")
        ]
        other = await w.agent("n2")
        foreign = (await w.during(other.connection.ask(ATTACH))).attachment
        await w.cut(agent)
        agent = await w.agent(attachments=(kept, foreign, "x"))
        assert agent.session.attachments_lost == (foreign, "x")
        assert attachments(store).keys() == {kept, foreign}
        assert agent.networks["a"].endpoints.keys() == {kept, foreign}
        assert lost not in attachments(store)


async def test_a_network_that_is_removed_meanwhile_gets_no_attachment(store: Store, clock: FakeClock) -> None:
    async with world(store, clock) as w:
        await attachable(w)
        addressed(store)
        agent = Agent("n1")
        asking = w.dispatcher._attachments.add("n1", "none", ATTACH)
        with pytest.raises(Unavailable, match="replaced"):
            await w.during(asking)
        agent = await w.agent()
        await store.commit([Delete(records.NETWORKS, "a")])
        with pytest.raises(NotFound):
            await w.during(agent.connection.ask(ATTACH))
        assert not attachments(store)
        assert isinstance(await w.during(agent.connection.ask(messages.Detach(attachment="x"))), Done)
