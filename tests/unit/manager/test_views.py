"""What agents are sent of networks, against what they should have: random changes of the store,
applied to agents' copies message by message; then the rules one by one.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from engine.manager import records
from engine.manager import views as module
from engine.manager.records import (
    Attached,
    AttachmentRecord,
    ManagerPresence,
    NetworkRecord,
    NodeData,
    ServiceRecord,
    ServiceStatus,
    Subnet,
    Task,
    TaskStatus,
)
from engine.manager.store import Change, Delete, Put, Store
from engine.manager.views import Feed, NetworkViews
from engine.swarm_session.messages import ANY, NetworkView, PortView, Views
from engine.swarm_session.states import NodeState, Role, TaskState
from engine.wire.services import Endpoint, EndpointSpec, VirtualIP
from engine.wire.tasks import NetworkAttachmentConfig, PortConfig
from tests.support.fakes.clock import FakeClock
from tests.unit.manager.agents import Agent, found, node_record, service, task

NODES = ("n1", "n2", "n3")
NETWORKS = ("a", "b", "c")
SERVICES = ("s1", "s2", "s3")
INGRESS = "in"

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ANY).decode


def network(name: str = "a", number: int = 1, **more: Any) -> NetworkRecord:
    return NetworkRecord(
        created=0,
        updated=0,
        name=name,
        vni=4096 + number,
        subnets=(Subnet(f"10.0.{number}.0/24", f"10.0.{number}.1"),),
        **more,
    )


def on_networks(name: str, *networks: str, aliases: tuple[str, ...] = (), **more: Any) -> ServiceRecord:
    made = service(name)
    targets = [NetworkAttachmentConfig(target=each, aliases=list(aliases)) for each in networks]
    template = msgspec.structs.replace(made.spec.task_template, networks=targets)
    spec = msgspec.structs.replace(made.spec, task_template=template, endpoint_spec=EndpointSpec(mode="vip"))
    return msgspec.structs.replace(made, spec=spec, **more)


def virtual(**addresses: str) -> ServiceStatus:
    return ServiceStatus(
        endpoint=Endpoint(virtual_ips=[VirtualIP(network_id=id, addr=addr) for id, addr in addresses.items()])
    )


def on(*networks: str, number: int = 2, **more: Any) -> Task:
    return task(networks=tuple(Attached(each, f"10.0.0.{number}") for each in networks), **more)


def running(ready: bool = True, state: TaskState = TaskState.RUNNING) -> TaskStatus:
    return TaskStatus(state=state, since=0, ready=ready)


def here(node: str, state: NodeState = NodeState.READY, **more: Any) -> Put:
    more.setdefault("address", f"192.0.2.{node[1:]}")
    more.setdefault("owner", "m1")
    return Put(records.NODE_DATA, node, NodeData(state=state, **more))


class World:
    """The views of a store, and agents that follow them without a connection."""

    def __init__(self, store: Store, clock: FakeClock) -> None:
        self.store = store
        self.notified: set[str] = set()
        self.agents: dict[str, Agent] = {}
        self.feeds: dict[str, Feed] = {}
        self.views = NetworkViews(store, clock, self._notify)
        store.subscribe(self.views.changed)

    def _notify(self, nodes: Any) -> None:
        self.notified.update(self.agents if nodes is None else nodes)

    async def agent(self, node: str) -> Agent:
        agent, feed = Agent(node), Feed(node)
        self.agents[node], self.feeds[node] = agent, feed
        self.views.flush()
        await self._built(feed)
        agent.see(_sent(self.views.whole(feed)))
        return agent

    async def _built(self, feed: Feed) -> None:
        while missing := self.views.missing(feed):
            for id in missing:
                await self.views.build(id)

    async def commit(self, *changes: Change) -> None:
        await self.store.commit(changes)
        await self.flush()

    async def flush(self) -> None:
        """Send what there is, to those nodes alone that should be sent something."""
        self.views.flush()
        notified, self.notified = self.notified, set()
        for node in notified & self.agents.keys():
            await self._built(self.feeds[node])
            for message in self.views.changes(self.feeds[node]):
                if message is not None:
                    self.agents[node].see(_sent(message))


def _sent(message: Views) -> Views:
    decoded = _decode(_encode(message))
    assert isinstance(decoded, Views)
    return decoded


async def world(store: Store, clock: FakeClock, *, ingress: bool = True) -> World:
    await found(store, *NODES)
    changes: list[Change] = [here(node) for node in NODES]
    changes += [Put(records.NETWORKS, id, network(id, number)) for number, id in enumerate(NETWORKS, 1)]
    if ingress:
        changes.append(Put(records.NETWORKS, INGRESS, network("ingress", 0, ingress=True)))
    await store.commit(changes)
    return World(store, clock)


# --- against a model ------------------------------------------------------------------------------


def expect(store: Store, agent: Agent) -> None:
    """The agent has what follows from the store, computed in the simplest way."""
    lost = {
        node
        for node, entry in store.all(records.NODE_DATA).items()
        if entry.record.state in (NodeState.DOWN, NodeState.DISCONNECTED)
    }
    endpoints: dict[str, dict[str, tuple[str, str, str]]] = {id: {} for id in (*NETWORKS, INGRESS)}
    ready: dict[str, list[str]] = {}
    live: dict[str, set[str]] = {id: set() for id in endpoints}
    """The services with live tasks on each network."""
    for key, entry in store.all(records.TASKS).items():
        status = store.record(records.TASK_STATUS, key)
        record = entry.record
        if not record.networks or not record.assigned or (status is not None and status.state.ended):
            continue
        for each in record.networks:
            endpoints[each.network][key] = (record.node, each.address, record.service)
            if record.desired <= 576:
                live[each.network].add(record.service)
        if status is not None and status.ready and status.state == TaskState.RUNNING and record.desired <= 576:
            ready.setdefault(record.service, []).append(key)
    attached = {}
    for key, attachment in store.all(records.ATTACHMENTS).items():
        if attachment.record.address and not attachment.record.error:
            endpoints[attachment.record.network][key] = (attachment.record.node, attachment.record.address, "")
            attached[key] = attachment.record
    balanced = set(attached)
    for keys in ready.values():
        sound = [key for key in keys if _node(store, key) not in lost]
        balanced.update(sound or keys)
    for id, have in agent.networks.items():
        assert {key: (each.node, each.address, each.service) for key, each in have.endpoints.items()} == endpoints[id]
        assert have.ready == balanced & endpoints[id].keys()
        nodes = {node for node, _, _ in endpoints[id].values()} if id != INGRESS else set(store.all(records.NODES))
        assert have.nodes == {node: f"192.0.2.{node[1:]}" for node in nodes if store.get(records.NODE_DATA, node)}
        services = {}
        for key, entry in store.all(records.SERVICES).items():
            spec = entry.record.spec
            found = next((each for each in spec.task_template.networks if each.target == id), None)
            if found is not None or (id == INGRESS and entry.record.ports) or key in live[id]:
                services[key] = spec.name
        assert {key: each.name for key, each in have.services.items()} == services
    needs = {id for id, of in endpoints.items() if any(node == agent.node for node, _, _ in of.values())}
    defined = set(store.all(records.NETWORKS))
    assert agent.networks.keys() == (needs | {INGRESS}) & defined


def _node(store: Store, key: str) -> str:
    record = store.record(records.TASKS, key)
    assert record is not None
    return record.node


@pytest.mark.parametrize("seed", range(12))
async def test_random_changes(store: Store, clock: FakeClock, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    monkeypatch.setattr(module, "LEAST_LOG", chance.choice((300, 2000, 1 << 20)))
    monkeypatch.setattr(module, "PART", chance.choice((1, 3, 500)))
    w = await world(store, clock)
    for node in NODES:
        await w.agent(node)
    for _ in range(150):
        key = f"t{chance.randrange(14)}"
        known = store.record(records.TASKS, key)
        match chance.randrange(14):
            case 0 | 1 | 2 | 3:
                new = on(
                    *chance.sample((*NETWORKS, INGRESS), chance.randrange(0, 4)),
                    number=chance.randrange(2, 250),
                    node=chance.choice(NODES),
                    service=SERVICES[int(key[1:]) % 3],
                    assigned=chance.choice((0, 1, 1, 1)),
                    desired=chance.choice((TaskState.RUNNING, TaskState.COMPLETE, TaskState.SHUTDOWN)),
                )
                await store.commit([Put(records.TASKS, key, new)])
            case 4 if known is not None:
                await store.commit([Delete(records.TASKS, key), Delete(records.TASK_STATUS, key)])
            case 5 | 6 | 7 if known is not None:
                state = chance.choice((TaskState.STARTING, TaskState.RUNNING, TaskState.RUNNING, TaskState.FAILED))
                await store.commit([Put(records.TASK_STATUS, key, running(chance.random() < 0.7, state))])
            case 8:
                state = chance.choice((NodeState.READY, NodeState.DISCONNECTED, NodeState.DOWN, NodeState.UNKNOWN))
                await store.commit([here(chance.choice(NODES), state)])
            case 9:
                id = f"x{chance.randrange(3)}"
                made = AttachmentRecord(
                    network=chance.choice(NETWORKS),
                    node=chance.choice(NODES),
                    container="c",
                    created=0,
                    address=chance.choice(("", "10.0.0.9", "10.0.0.8")),
                )
                await store.commit(
                    [chance.choice((Put(records.ATTACHMENTS, id, made), Delete(records.ATTACHMENTS, id)))]
                )
            case 10 | 11:
                id = chance.choice(SERVICES)
                ports = chance.choice(((), (PortConfig(published_port=80, target_port=8080, protocol="tcp"),)))
                record = on_networks(id, *chance.sample(NETWORKS, chance.randrange(3)), ports=ports)
                await store.commit([chance.choice((Put(records.SERVICES, id, record), Delete(records.SERVICES, id)))])
            case 12:
                await w.agent(chance.choice(NODES))  # it begins another session
            case _:
                await clock.advance(chance.choice((1, 40)))
                w.views.tidy()
        if chance.random() < 0.6:
            await w.flush()
            for agent in w.agents.values():
                expect(store, agent)
    await w.flush()
    for agent in w.agents.values():
        expect(store, agent)
    fresh = World(store, clock)  # another manager, from the store alone
    for node in NODES:
        expect(store, await fresh.agent(node))
    await store.commit([Delete(kind, key) for kind in (records.TASKS, records.ATTACHMENTS) for key in store.all(kind)])
    await store.commit([Delete(records.SERVICES, key) for key in list(store.all(records.SERVICES))] or [here("n1")])
    await store.commit([Delete(records.NETWORKS, key) for key in store.all(records.NETWORKS)])
    await w.flush()
    for agent in w.agents.values():
        assert not agent.networks
    for left in ("_networks", "_needs", "_live", "_attached", "_sound", "_doubtful", "_of_service", "_on", "_ingress"):
        assert not getattr(w.views, left), left


# --- the rules ------------------------------------------------------------------------------------


async def test_the_definition_of_a_network(store: Store, clock: FakeClock) -> None:
    w = await world(store, clock)
    agent = await w.agent("n1")
    assert agent.networks.keys() == {INGRESS}
    assert agent.networks[INGRESS].nodes == {"n1": "192.0.2.1", "n2": "192.0.2.2", "n3": "192.0.2.3"}
    full = network("d", 9, internal=True, attachable=True, encrypted=True, labels={"x": "y"}, options={"o": "p"})
    await w.commit(Put(records.NETWORKS, "d", full), Put(records.TASKS, "t1", on("d")))
    assert agent.networks["d"].definition == NetworkView(
        name="d",
        vni=4105,
        subnets=(("10.0.9.0/24", "10.0.9.1"),),
        internal=True,
        attachable=True,
        encrypted=True,
        labels={"x": "y"},
        options={"o": "p"},
    )
    assert agent.networks["d"].nodes == {"n1": "192.0.2.1"}


async def test_names_addresses_and_ports_of_services(store: Store, clock: FakeClock) -> None:
    w = await world(store, clock)
    agent = await w.agent("n1")
    ports = (
        PortConfig(protocol="tcp", target_port=80, published_port=30001),
        PortConfig(protocol="udp", target_port=53, published_port=53, publish_mode="ingress"),
        PortConfig(protocol="tcp", target_port=81, published_port=81, publish_mode="host"),
    )
    await w.commit(
        Put(records.SERVICES, "s1", on_networks("web", "a", aliases=("www",), ports=ports)),
        Put(records.SERVICE_STATUS, "s1", virtual(a="10.0.1.2/24", **{INGRESS: "10.255.0.2/16"})),
        Put(records.TASKS, "t1", on("a", INGRESS, slot=3)),
    )
    inner, outer = agent.networks["a"], agent.networks[INGRESS]
    web = inner.services["s1"]
    assert (web.name, web.address, web.aliases, web.ports) == ("web", "10.0.1.2", ("www",), ())
    assert outer.services["s1"].address == "10.255.0.2"
    assert outer.services["s1"].ports == (
        PortView(protocol="tcp", published=30001, target=80),
        PortView(protocol="udp", published=53, target=53),
    )
    assert inner.endpoints["t1"].name == "web.3.t1"
    assert not inner.ready
    await w.commit(Put(records.SERVICES, "s1", on_networks("web", "a")))
    assert "s1" in outer.services  # it has its virtual address yet
    await w.commit(Put(records.SERVICE_STATUS, "s1", virtual(a="10.0.1.2/24")))
    assert "s1" in outer.services  # it has a task there yet
    await w.commit(Put(records.TASKS, "t1", on("a", INGRESS, slot=3, desired=TaskState.SHUTDOWN)))
    assert "s1" not in outer.services


async def test_a_service_stays_on_a_network_until_its_last_task_there_is_stopped(
    store: Store, clock: FakeClock
) -> None:
    w = await world(store, clock, ingress=False)
    agent = await w.agent("n1")
    old = on_networks("web", "a", aliases=("www",))
    await w.commit(
        Put(records.SERVICES, "s1", old),
        Put(records.TASKS, "t1", on("a")),
        Put(records.TASKS, "t2", on("a", node="n2")),
    )
    new = on_networks("web", "b", previous=old.spec, version=2)
    await w.commit(Put(records.SERVICES, "s1", new))
    await w.commit(Put(records.TASKS, "t2", on("a", node="n2", desired=TaskState.SHUTDOWN)))
    web = agent.networks["a"].services["s1"]
    assert (web.name, web.address, web.aliases) == ("web", "", ("www",))
    await w.commit(Put(records.TASKS, "t3", on("b")))
    assert agent.networks["b"].services.keys() == {"s1"}
    sent = len(agent.views)
    await w.commit(Put(records.TASKS, "t1", on("a", desired=TaskState.SHUTDOWN)))
    assert len(agent.views) == sent + 1
    assert not agent.networks["a"].services
    assert agent.networks["a"].endpoints.keys() == {"t1", "t2"}


async def test_traffic_is_led_to_what_is_ready(store: Store, clock: FakeClock) -> None:
    w = await world(store, clock)
    agent = await w.agent("n1")
    await w.commit(Put(records.TASKS, "t1", on("a")), Put(records.TASKS, "t2", on("a", node="n2")))
    await w.commit(*(Put(records.TASK_STATUS, id, running()) for id in ("t1", "t2")))
    assert agent.networks["a"].ready == {"t1", "t2"}
    await w.commit(Put(records.TASK_STATUS, "t2", running(ready=False)))
    assert agent.networks["a"].ready == {"t1"}
    await w.commit(Put(records.TASK_STATUS, "t2", running()))
    await w.commit(Put(records.TASKS, "t2", on("a", node="n2", desired=TaskState.SHUTDOWN)))
    assert agent.networks["a"].ready == {"t1"}
    assert agent.networks["a"].endpoints.keys() == {"t1", "t2"}
    await w.commit(Put(records.TASK_STATUS, "t2", running(ready=False, state=TaskState.SHUTDOWN)))
    assert agent.networks["a"].endpoints.keys() == {"t1"}
    assert agent.networks["a"].nodes == {"n1": "192.0.2.1"}


async def test_traffic_is_led_to_tasks_of_jobs_while_they_run(store: Store, clock: FakeClock) -> None:
    w = await world(store, clock)
    agent = await w.agent("n1")
    await w.commit(
        Put(records.TASKS, "t1", on("a", desired=TaskState.COMPLETE)), Put(records.TASK_STATUS, "t1", running())
    )
    assert agent.networks["a"].ready == {"t1"}
    await w.commit(Put(records.TASKS, "t1", on("a", desired=TaskState.REMOVE)))
    assert not agent.networks["a"].ready
    await w.commit(Put(records.TASKS, "t2", on("a", desired=TaskState.COMPLETE)))
    await w.commit(Put(records.TASK_STATUS, "t2", running(ready=False, state=TaskState.COMPLETE)))
    assert agent.networks["a"].endpoints.keys() == {"t1"}


async def test_lost_nodes_get_traffic_where_there_are_no_others(store: Store, clock: FakeClock) -> None:
    w = await world(store, clock)
    agent = await w.agent("n1")
    await w.commit(
        *(Put(records.TASKS, f"t{number}", on("a", node=f"n{number}", number=number)) for number in (1, 2, 3)),
        *(Put(records.TASK_STATUS, f"t{number}", running()) for number in (2, 3)),
    )
    have = agent.networks["a"]
    assert have.ready == {"t2", "t3"}
    await w.commit(here("n2", NodeState.DISCONNECTED))
    assert have.ready == {"t3"}
    await w.commit(here("n3", NodeState.DOWN))
    assert have.ready == {"t2", "t3"}  # better than none
    await w.commit(Put(records.TASK_STATUS, "t1", running()))
    assert have.ready == {"t1"}
    await w.commit(here("n2"))
    assert have.ready == {"t1", "t2"}
    assert have.nodes.keys() == {"n1", "n2", "n3"}  # their packets may still come


async def test_the_node_of_a_lost_manager_is_lost_until_it_has_another(store: Store, clock: FakeClock) -> None:
    w = await world(store, clock)
    agent = await w.agent("n1")
    await w.commit(
        here("n2", owner="n2", role=Role.MANAGER),
        Put(records.MANAGERS, "n2", ManagerPresence(address="", member=2)),
        *(Put(records.TASKS, f"t{number}", on("a", node=f"n{number}", number=number)) for number in (1, 2)),
        *(Put(records.TASK_STATUS, f"t{number}", running()) for number in (1, 2)),
    )
    assert agent.networks["a"].ready == {"t1", "t2"}
    await w.commit(Delete(records.MANAGERS, "n2"))
    assert agent.networks["a"].ready == {"t1"}
    await w.commit(here("n2", owner="n1", role=Role.MANAGER))
    assert agent.networks["a"].ready == {"t1", "t2"}


async def test_a_change_reaches_the_nodes_of_its_network_alone(store: Store, clock: FakeClock) -> None:
    w = await world(store, clock)
    agents = [await w.agent(node) for node in NODES]
    await w.commit(Put(records.TASKS, "t1", on("a")), Put(records.TASKS, "t2", on("a", node="n2")))
    before = [len(agent.views) for agent in agents]
    assert before == [2, 2, 1]
    await w.commit(Put(records.TASK_STATUS, "t1", running()))
    assert [len(agent.views) for agent in agents] == [3, 3, 1]
    await w.commit(Put(records.TASK_STATUS, "t1", msgspec.structs.replace(running(), message="x")))
    assert [len(agent.views) for agent in agents] == [3, 3, 1]
    await w.commit(Put(records.NETWORKS, "unused", network("unused", 9)), Put(records.TASKS, "t3", task(node="n3")))
    assert [len(agent.views) for agent in agents] == [3, 3, 1]


async def test_a_node_without_endpoints_needs_the_network_no_more(store: Store, clock: FakeClock) -> None:
    w = await world(store, clock, ingress=False)
    agent = await w.agent("n1")
    attached = AttachmentRecord(network="a", node="n1", container="c", created=0, name="box", aliases=("x",))
    await w.commit(Put(records.ATTACHMENTS, "x1", attached))
    assert not agent.networks
    await w.commit(Put(records.ATTACHMENTS, "x1", msgspec.structs.replace(attached, address="10.0.1.7")))
    endpoint = agent.networks["a"].endpoints["x1"]
    assert (endpoint.name, endpoint.address, endpoint.aliases, endpoint.ready) == ("box", "10.0.1.7", ("x",), True)
    await w.commit(Put(records.TASKS, "t1", on("a")), Delete(records.ATTACHMENTS, "x1"))
    assert agent.networks["a"].endpoints.keys() == {"t1"}
    await w.commit(Delete(records.TASKS, "t1"))
    assert not agent.networks


async def test_many_nodes_that_come_are_collected(
    store: Store, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MANY", 3)
    w = await world(store, clock)
    agent = await w.agent("n1")
    for number in (4, 5):
        await w.commit(Put(records.NODES, f"n{number}", node_record()), here(f"n{number}"))
        assert len(agent.views) == 1
    await clock.advance(module.COLLECT)
    assert w.views.due
    await w.flush()
    assert len(agent.views) == 2
    assert agent.networks[INGRESS].nodes.keys() == {"n1", "n2", "n3", "n4", "n5"}


async def test_a_whole_view_is_encoded_once(store: Store, clock: FakeClock) -> None:
    w = await world(store, clock)
    await w.commit(*(Put(records.TASKS, f"t{n}", on("a", node=NODES[n % 3], number=n)) for n in range(200)))
    first = await w.agent("n1")
    whole = w.views._networks["a"].whole
    assert whole is not None
    await w.commit(*(Put(records.TASK_STATUS, f"t{n}", running()) for n in range(100)))
    second = await w.agent("n2")
    assert w.views._networks["a"].whole is whole
    assert first.networks["a"].endpoints == second.networks["a"].endpoints
    assert len(second.networks["a"].ready) == 100
