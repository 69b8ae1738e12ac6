"""The network `ingress`: at the founding of a swarm, and in one of an earlier version."""

from __future__ import annotations

from engine.manager.ca import found
from engine.manager.control.validate import DEFAULTS
from engine.manager.loops import Acting
from engine.manager.networks import IngressLoop, founding, ingress, pools, prefix_of
from engine.manager.records import (
    CLAIMS,
    CLUSTER,
    LEADER,
    NETWORKS,
    POOLS_CLAIM,
    Claim,
    Cluster,
    Leader,
    NetworkRecord,
    Subnet,
    name_claim,
)
from engine.manager.store import Compare, Delete, Put, Store
from engine.swarm_session.clock import Clock
from tests.support.fakes.clock import FakeClock


async def cluster(clock: Clock, *pools: str, size: int = 24) -> Cluster:
    made = await found(DEFAULTS, clock, node="n", address="10.0.0.1:2377", address_pool=pools, subnet_size=size)
    return made.cluster


async def test_pools(clock: FakeClock) -> None:
    for given, size, wanted in (
        ((), 24, (["10.0.0.0/8"], 20)),
        ((), 22, (["10.0.0.0/8"], 22)),
        (("172.16.0.0/12",), 24, (["172.16.0.0/12"], 24)),
        (("172.16.5.0/12", "10.1.0.0/16"), 26, (["172.16.0.0/12", "10.1.0.0/16"], 26)),
    ):
        subnets, prefix = pools(await cluster(clock, *given, size=size))
        assert ([*map(str, subnets)], prefix) == wanted


async def test_the_ingress_network_of_a_new_swarm(clock: FakeClock) -> None:
    for given, local, subnet, gateway in (
        ((), ["192.168.0.0/16", "bad"], "10.255.0.0/16", "10.255.0.1"),
        ((), ["10.255.255.53/32", "10.254.0.0/15", "10.1.0.0/16"], "10.253.0.0/16", "10.253.0.1"),
        (("192.168.128.0/18",), [], "192.168.128.0/22", "192.168.128.1"),
        (("192.168.128.0/18",), ["192.168.129.7/32"], "192.168.132.0/22", "192.168.132.1"),
    ):
        network, name, claim = founding(await cluster(clock, *given, size=22), 5, local)
        assert isinstance(network, Put) and isinstance(name, Put) and isinstance(claim, Put)
        record = network.record
        assert isinstance(record, NetworkRecord) and record.ingress and record.vni == 4096 and record.created == 5
        assert record.subnets == (Subnet(subnet, gateway),)
        assert (name.key, name.record) == (name_claim("network", "ingress"), Claim(network.key))
        assert (claim.key, claim.record) == (POOLS_CLAIM, Claim("4096"))


async def test_an_older_swarm_gets_its_ingress_network(store: Store, clock: FakeClock) -> None:
    await store.commit([Put(CLUSTER, "", await cluster(clock))])
    revision = await store.commit([Put(LEADER, "", Leader("n", 1))])
    acting = Acting(store, clock, Compare(LEADER, "", revision))
    loop = IngressLoop(store, clock)
    store.subscribe(loop.changed)
    assert loop.due() is None
    for _ in range(2):
        loop.take_over()
        assert loop.due() == 0
        await loop.step(acting)
        assert loop.due() is None
        assert len(store.all(NETWORKS)) == 1
    entry = ingress(store)
    assert entry is not None and prefix_of(entry.record, "10.255.3.4") == 16
    # an operator removes it: the claim of the pools stays
    await store.commit([Delete(NETWORKS, entry.key)])
    loop.take_over()
    await loop.step(acting)
    assert ingress(store) is None and store.get(CLAIMS, POOLS_CLAIM) is not None


def test_prefixes_of_several_subnets() -> None:
    record = NetworkRecord(
        created=1, updated=1, name="net", vni=1,
        subnets=(Subnet("10.1.0.0/24", "10.1.0.1"), Subnet("10.2.0.0/16", "10.2.0.1")),
    )  # fmt: skip
    assert (prefix_of(record, "10.1.0.7"), prefix_of(record, "10.2.7.7")) == (24, 16)
