"""Addresses of tasks, services and attached containers, as the leader's loops give them."""

from __future__ import annotations

from engine.manager.records import (
    ATTACHMENTS,
    NETWORKS,
    NODES,
    SERVICE_STATUS,
    TASK_STATUS,
    TASKS,
    Attached,
    AttachmentRecord,
    new_id,
)
from engine.manager.store import Delete, Put, Store
from engine.swarm_session.states import NodeState, TaskState
from tests.support.fakes.clock import FakeClock
from tests.support.fakes.etcd import FakeEtcd
from tests.support.fakes.swarm import Swarm, leading, seconds

HTTP = [{"Protocol": "tcp", "TargetPort": 80, "PublishedPort": 8080, "PublishMode": "ingress"}]


def addresses(swarm: Swarm, service: str) -> list[str]:
    """Of the service's live tasks, on all networks."""
    return sorted(each.address for task in swarm.tasks(service).values() for each in task.networks)


async def attach(swarm: Swarm, network: str, wanted: str = "", node: str = "node01") -> str:
    key = new_id()
    record = AttachmentRecord(
        network=network, node=node, container="c", created=swarm.clock.now(), name="box", wanted=wanted
    )
    await swarm.store.commit([Put(ATTACHMENTS, key, record)])
    return key


def attached(swarm: Swarm, key: str) -> tuple[str, str]:
    """Address and error."""
    record = swarm.store.record(ATTACHMENTS, key)
    assert record is not None
    return record.address, record.error


async def test_a_task_gets_its_addresses_in_the_write_that_gives_it_a_node(
    etcd: FakeEtcd, store: Store, clock: FakeClock
) -> None:
    async with leading(store, clock) as swarm:
        net, other = await swarm.network(), await swarm.network("other", "10.0.2.0/24")
        web = await swarm.create(replicas=3, networks=[net, other])
        await swarm.run(1)
        assert swarm.virtual_ips(web) == {net: "10.0.1.2/24", other: "10.0.2.2/24"}
        for task in swarm.tasks(web).values():
            assert [each.network for each in task.networks] == [net, other]
            assert task.node
        assert addresses(swarm, web) == [f"10.0.{net}.{host}" for net in (1, 2) for host in (3, 4, 5)]


async def test_a_service_without_networks_has_no_status(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        web = await swarm.create(replicas=2)
        await swarm.run(1)
        assert store.record(SERVICE_STATUS, web) is None
        assert addresses(swarm, web) == []


async def test_published_ports_bring_the_ingress_network(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        ingress = await swarm.network("ingress", "10.255.0.0/16", ingress=True)
        web = await swarm.create(replicas=2, ports=HTTP)
        host = await swarm.create("host", ports=[{**HTTP[0], "PublishMode": "host"}])
        await swarm.run(1)
        assert swarm.virtual_ips(web) == {ingress: "10.255.0.2/16"}
        assert addresses(swarm, web) == ["10.255.0.3", "10.255.0.4"]
        assert swarm.virtual_ips(host) == {}
        assert addresses(swarm, host) == []


async def test_dnsrr_has_no_virtual_address(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        net = await swarm.network()
        web = await swarm.create(replicas=2, networks=[net], endpoint_mode="dnsrr")
        await swarm.run(1)
        assert swarm.virtual_ips(web) == {}
        assert addresses(swarm, web) == ["10.0.1.2", "10.0.1.3"]
        await swarm.update(web, replicas=2, networks=[net], endpoint_mode="vip")
        await swarm.run(1)
        assert swarm.virtual_ips(web) == {net: "10.0.1.4/24"}
        await swarm.update(web, replicas=2, networks=[net], endpoint_mode="dnsrr")
        await swarm.run(1)
        assert swarm.virtual_ips(web) == {}


async def test_node_local_networks_have_no_addresses(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        web = await swarm.create(replicas=1, networks=["host"])
        await swarm.run(1)
        assert len(swarm.running(web)) == 1
        assert addresses(swarm, web) == []


async def test_an_exhausted_network_is_named_and_waited_for(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        net = await swarm.network("small", "10.0.1.0/29")  # five addresses
        web = await swarm.create(replicas=6, networks=[net])
        await swarm.run(1)
        waiting = [task for task in swarm.tasks(web).values() if not task.node]
        assert [task.waits for task in waiting] == ["network small: no free address of 5"] * 2
        assert not any(task.networks for task in waiting)
        assert sum(host.live for host in swarm.placement.hosts.values()) == 4
        victim = min(swarm.running(web))
        await swarm.agents.report(victim, TaskState.FAILED)
        await swarm.run(59)
        assert len(swarm.running(web)) == 3
        await swarm.run(2)
        assert len(swarm.running(web)) == 4


async def test_global_tasks_wait_for_addresses_too(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock, nodes=7) as swarm:
        net = await swarm.network("small", "10.0.1.0/29")
        agent = await swarm.create("agent", mode={"Global": {}}, networks=[net])
        await swarm.run(1)
        assert len(swarm.running(agent)) == 4
        waits = [task.waits for task in swarm.tasks(agent).values() if not task.assigned]
        assert waits == ["network small: no free address of 5"] * 3
        await swarm.remove_node(next(iter(swarm.running(agent).values())).node)
        await swarm.run(70)
        assert len(swarm.running(agent)) == 5 - 1


async def test_an_address_is_free_when_the_end_is_confirmed(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        net = await swarm.network("tiny", "10.0.1.0/30", internal=True)  # one address
        web = await swarm.create(networks=[net], endpoint_mode="dnsrr", restart={"Delay": 0})
        await swarm.run(1)
        (task,) = swarm.tasks(web).values()
        await swarm.observe(task.node, NodeState.DOWN)
        await swarm.run(300)
        assert swarm.running(web) == {}, "the node may be alive, and use the address"
        await swarm.observe(task.node, NodeState.READY)
        await swarm.run(59)
        assert swarm.running(web) == {}
        await swarm.run(3)
        assert addresses(swarm, web) == ["10.0.1.2"]


async def test_virtual_addresses_stay_and_go_with_the_service(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        net = await swarm.network()
        web = await swarm.create(networks=[net])
        await swarm.run(1)
        await swarm.lead()
        await swarm.update(web, networks=[net], force=1)
        await swarm.run(20)
        assert swarm.virtual_ips(web) == {net: "10.0.1.2/24"}
        await swarm.remove(web)
        await swarm.run(5)
        assert store.all(SERVICE_STATUS) == {}
        assert swarm.addresses.exhausted([net]) == ""
        assert swarm.addresses.held(web) == ()


async def test_a_virtual_address_stays_while_a_paused_update_leaves_tasks(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        a, b = await swarm.network("a"), await swarm.network("b", "10.0.2.0/24")
        update = {"Parallelism": 1, "Delay": seconds(5), "FailureAction": "pause"}
        web = await swarm.create(replicas=3, networks=[a], update=update)
        await swarm.run(1)
        bad = True
        swarm.agents.fate = lambda key, task: (TaskState.FAILED, 1.0) if bad and task.version == 2 else None
        await swarm.update(web, replicas=3, networks=[b], update=update)
        await swarm.run(30)
        assert swarm.update_state(web) == "paused"
        assert {each.network for task in swarm.tasks(web).values() for each in task.networks} == {a, b}
        assert swarm.virtual_ips(web) == {a: "10.0.1.2/24", b: "10.0.2.2/24"}
        await swarm.lead()
        await swarm.run(1)
        assert swarm.virtual_ips(web) == {a: "10.0.1.2/24", b: "10.0.2.2/24"}
        bad = False
        await swarm.update(web, replicas=3, networks=[b], update=update)
        await swarm.run(60)
        assert swarm.update_state(web) == "completed"
        assert swarm.virtual_ips(web) == {b: "10.0.2.2/24"}
        assert not set(swarm.addresses.held(web)) - {Attached(b, "10.0.2.2")}


async def test_the_ingress_network_may_come_later(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        web = await swarm.create(ports=HTTP)
        await swarm.run(1)
        ingress = await swarm.network("ingress", "10.255.0.0/16", ingress=True)
        await swarm.run(1)
        assert swarm.virtual_ips(web) == {ingress: "10.255.0.2/16"}


async def test_a_virtual_address_is_waited_for(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        net = await swarm.network("tiny", "10.0.1.0/30")
        first = await swarm.create("first", replicas=0, networks=[net])
        await swarm.run(1)
        second = await swarm.create("second", replicas=0, networks=[net])
        await swarm.run(1)
        assert swarm.virtual_ips(first) == {net: "10.0.1.2/30"}
        assert swarm.virtual_ips(second) == {}
        await swarm.remove(first)
        await swarm.run(59)
        assert swarm.virtual_ips(second) == {}
        await swarm.run(3)
        assert swarm.virtual_ips(second) == {net: "10.0.1.2/30"}


async def test_attachments(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        net = await swarm.network("net", "10.0.1.0/29", attachable=True)
        first = await attach(swarm, net)
        wanted = await attach(swarm, net, "10.0.1.6")
        await swarm.run(1)
        assert attached(swarm, first) == ("10.0.1.2", "")
        assert attached(swarm, wanted) == ("10.0.1.6", "")
        for text, kind, error in (
            ("10.0.1.6", "Forbidden", "address already in use: 10.0.1.6 on network net"),
            ("10.0.1.1", "Forbidden", "address already in use: 10.0.1.1 on network net"),
            (
                "10.0.2.1",
                "InvalidParameter",
                "invalid address 10.0.2.1: it does not belong to any of the subnets of network net",
            ),
            ("x", "InvalidParameter", "IPv4Address: 'x' is no IPv4 address"),
        ):
            key = await attach(swarm, net, text)
            await swarm.run(1)
            assert attached(swarm, key) == ("", error)
            record = store.record(ATTACHMENTS, key)
            assert record is not None and record.kind == kind
        gone = await attach(swarm, "gone")
        others = [await attach(swarm, net) for _ in range(4)]
        await swarm.run(1)
        assert attached(swarm, gone) == ("", "network gone not found")
        assert [attached(swarm, key) for key in others] == [
            ("10.0.1.3", ""), ("10.0.1.4", ""), ("10.0.1.5", ""), ("", "network net: no free address of 5"),
        ]  # fmt: skip
        # one that is started again keeps the address that it wants
        await store.commit([Delete(ATTACHMENTS, wanted)])
        again = await attach(swarm, net, "10.0.1.6")
        await swarm.run(1)
        assert attached(swarm, again) == ("10.0.1.6", "")


async def test_an_attachment_does_not_wait_for_an_address_that_is_free(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        net = await swarm.network("net", "10.0.1.0/29", attachable=True)  # five addresses
        first = [await attach(swarm, net) for _ in range(4)]
        await swarm.run(1)
        for key in (first[2], first[0]):
            await store.commit([Delete(ATTACHMENTS, key)])
            await swarm.run(1)
        found = [await attach(swarm, net) for _ in range(4)]
        web = await swarm.create(networks=[net], endpoint_mode="dnsrr")
        await swarm.run(1)
        assert [attached(swarm, key) for key in found] == [
            ("10.0.1.6", ""), ("10.0.1.4", ""), ("10.0.1.2", ""), ("", "network net: no free address of 5"),
        ]  # fmt: skip
        await store.commit([Delete(ATTACHMENTS, found[0])])
        await swarm.run(30)
        assert addresses(swarm, web) == []  # a task waits


async def test_attachments_that_nothing_can_use_are_deleted(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock) as swarm:
        net = await swarm.network()
        kept, gone = await attach(swarm, net), await attach(swarm, net, node="node02")
        refused = await attach(swarm, "gone")
        await swarm.run(1)
        await store.commit([Delete(NODES, "node02")])
        await swarm.run(1)
        assert set(store.all(ATTACHMENTS)) == {kept, refused}
        await swarm.run(120)
        assert set(store.all(ATTACHMENTS)) == {kept}
        await swarm.observe("node01", NodeState.DOWN)
        await swarm.run(23 * 3600)
        assert set(store.all(ATTACHMENTS)) == {kept}
        await swarm.run(2 * 3600)
        assert set(store.all(ATTACHMENTS)) == set()
        assert gone not in swarm.addresses._held


async def test_a_new_leader_takes_every_address_of_live_tasks(etcd: FakeEtcd, store: Store, clock: FakeClock) -> None:
    peer = Store(etcd.peer(), clock)
    await peer.load()
    swarm = Swarm(store, clock, [peer])
    await swarm.nodes(3)
    await swarm.lead()
    try:
        net = await swarm.network()
        web = await swarm.create(replicas=3, networks=[net])
        await swarm.run(1)
        before = addresses(swarm, web)
        await swarm.update(web, replicas=3)  # the spec has no network any more; the update is slow
        await swarm.lead(1)
        other = await swarm.create("other", replicas=5, networks=[net])
        await swarm.run(1)
        assert not set(before) & set(addresses(swarm, other))
        assert len(set(addresses(swarm, other))) == 5
        late = Store(etcd.peer(), clock)
        await late.load()
        await late.close()
        assert {key: entry.record for key, entry in late.all(TASKS).items()} == {
            key: entry.record for key, entry in store.all(TASKS).items()
        }
        assert len(store.all(NETWORKS)) == 1
        assert store.all(TASK_STATUS)
    finally:
        await swarm.depose()
        await peer.close()


async def test_tasks_go_to_nodes_whose_kernel_has_their_networks(store: Store, clock: FakeClock) -> None:
    async with leading(store, clock, nodes=0) as swarm:
        await swarm.node("old", features=())
        await swarm.node("plain")
        await swarm.node("esp", features=("overlay", "esp"))
        net = await swarm.network()
        secret = await swarm.network("secret", "10.0.2.0/24", encrypted=True)
        web = await swarm.create("web", replicas=4, networks=[net])
        vault = await swarm.create("vault", replicas=2, networks=[secret])
        none = await swarm.create("none", replicas=1, networks=[secret], constraints=["node.id!=esp"])
        await swarm.run(1)
        assert swarm.spread(web) == {"plain": 2, "esp": 2}
        assert swarm.spread(vault) == {"esp": 2}
        (task,) = swarm.tasks(none).values()
        assert "no encrypted overlay networks (ESP) on 1 node" in task.waits
        assert "no overlay networks on 1 node" in task.waits
