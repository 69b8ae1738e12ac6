"""Which address is given next: the pool of one network alone, and random histories over several
managers.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from engine.manager import addresses
from engine.manager.addresses import WAIT, Pool, number_of, text_of
from engine.manager.records import (
    ATTACHMENTS,
    NETWORKS,
    SERVICE_STATUS,
    TASK_STATUS,
    TASKS,
    AttachmentRecord,
    NetworkRecord,
    Subnet,
    new_id,
)
from engine.manager.store import Delete, Event, Put, Store
from engine.swarm_session.states import NodeState, TaskState
from tests.support.fakes.clock import FakeClock
from tests.support.fakes.etcd import FakeEtcd
from tests.support.fakes.swarm import Swarm, leading

NOW = 1000.0


def pool(*subnets: Subnet) -> Pool:
    made = Pool()
    made.define(NetworkRecord(created=5, updated=5, name="net", subnets=subnets, vni=4097))
    return made


def given(where: Pool, count: int, now: float = NOW, started: int = 0) -> list[str]:
    """The next addresses, which are taken."""
    found: list[str] = []
    while len(found) < count and (number := where.next(now, started)) is not None:
        where.take(number, f"t{number}", 0)
        found.append(text_of(number))
    return found


def free(where: Pool, address: str, now: float = NOW, *, unused: bool = False) -> None:
    where.release(number_of(address), f"t{number_of(address)}", now, unused=unused)


# --- one pool -------------------------------------------------------------------------------------


def test_network_broadcast_and_gateway_are_not_given() -> None:
    where = pool(Subnet("10.0.1.0/29", "10.0.1.3"))
    assert where.size == 5
    assert given(where, 9) == ["10.0.1.1", "10.0.1.2", "10.0.1.4", "10.0.1.5", "10.0.1.6"]


def test_a_range_and_reserved_addresses() -> None:
    where = pool(Subnet("10.0.1.0/24", "10.0.1.1", "10.0.1.248/29", {"router": "10.0.1.250", "nas": "10.0.1.9"}))
    assert where.size == 6
    assert given(where, 9) == [f"10.0.1.{host}" for host in (248, 249, 251, 252, 253, 254)]


def test_several_subnets() -> None:
    where = pool(Subnet("10.0.1.0/30", "10.0.1.1"), Subnet("10.9.0.0/30", "10.9.0.1"))
    assert where.size == 2
    assert given(where, 9) == ["10.0.1.2", "10.9.0.2"]
    assert where.prefix(number_of("10.9.0.2")) == 30
    assert where.prefix(number_of("10.9.0.4")) == 0


@pytest.mark.parametrize(("subnet", "gateway", "size"), [("10.0.1.0/31", "10.0.1.0", 1), ("10.0.1.7/32", "", 1)])
def test_the_smallest_subnets(subnet: str, gateway: str, size: int) -> None:
    where = pool(Subnet(subnet, gateway))
    assert where.size == size
    assert len(given(where, 9)) == size


def test_a_huge_subnet_is_not_enumerated() -> None:
    where = pool(Subnet("10.0.0.0/8", "10.0.0.1"))
    assert where.size == (1 << 24) - 3
    assert given(where, 2) == ["10.0.0.2", "10.0.0.3"]


def test_released_addresses_come_last_and_the_oldest_first() -> None:
    where = pool(Subnet("10.0.1.0/29", "10.0.1.1"))
    assert given(where, 3) == ["10.0.1.2", "10.0.1.3", "10.0.1.4"]
    free(where, "10.0.1.4", NOW)
    free(where, "10.0.1.2", NOW + 1)
    assert given(where, 9, NOW + 2) == ["10.0.1.5", "10.0.1.6"]
    assert where.free_at(NOW + 2, 0) == NOW + WAIT
    assert given(where, 9, NOW + WAIT - 0.1) == []
    assert given(where, 9, NOW + WAIT) == ["10.0.1.4"]
    assert where.free_at(NOW + WAIT, 0) == NOW + 1 + WAIT
    assert given(where, 9, NOW + WAIT + 1) == ["10.0.1.2"]
    assert where.free_at(NOW + 1000, 0) is None


def test_what_was_given_and_not_written_is_given_again_at_once() -> None:
    where = pool(Subnet("10.0.1.0/29", "10.0.1.1"))
    given(where, 5)
    free(where, "10.0.1.2", NOW)
    free(where, "10.0.1.5", NOW, unused=True)
    assert where.free_at(NOW, 0) == 0
    assert given(where, 9, NOW) == ["10.0.1.5"]


def test_an_address_with_two_holders_is_free_after_both() -> None:
    where = pool(Subnet("10.0.1.0/30", "10.0.1.1"))
    number = number_of("10.0.1.2")
    for holder in ("a", "b", "b"):
        where.take(number, holder, 0)
    assert where.doubles == {number}
    where.release(number, "a", NOW, unused=False)
    where.release(number, "stranger", NOW, unused=False)
    assert where.doubles == set()
    assert given(where, 1, NOW + 2 * WAIT) == []
    where.release(number, "b", NOW, unused=False)
    assert given(where, 1, NOW + WAIT) == ["10.0.1.2"]


def test_a_manager_that_starts_goes_on_behind_the_newest_address() -> None:
    where = pool(Subnet("10.0.1.0/29", "10.0.1.1"))
    for address, revision in (("10.0.1.2", 3), ("10.0.1.5", 9), ("10.0.1.3", 7)):
        where.take(number_of(address), "t", revision)
    assert given(where, 9) == ["10.0.1.6", "10.0.1.4"]
    several = pool(Subnet("10.0.1.0/29", "10.0.1.1"), Subnet("10.0.2.0/29", "10.0.2.1"))
    several.take(number_of("10.0.2.4"), "t", 1)
    assert given(several, 3) == ["10.0.2.5", "10.0.2.6", "10.0.1.2"]


def test_a_manager_that_starts_begins_anywhere_when_it_knows_no_address() -> None:
    firsts = Counter(given(pool(Subnet("10.0.0.0/20", "10.0.0.1")), 1, started=6)[0] for _ in range(20))
    assert len(firsts) > 10
    everything = given(pool(Subnet("10.0.1.0/28", "10.0.1.1")), 99, started=6)
    assert sorted(map(number_of, everything)) == [number_of("10.0.1.2") + host for host in range(13)]


def test_many_released_addresses_are_used_before_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "MANY", 2)
    where = pool(Subnet("10.0.0.0/8", "10.0.0.1"))
    for address in given(where, 3):
        free(where, address)
    assert given(where, 1, NOW + 1) == ["10.0.0.5"]
    assert given(where, 2, NOW + WAIT) == ["10.0.0.2", "10.0.0.6"]


# --- random histories -----------------------------------------------------------------------------


class Watch:
    """Sees every record, and fails when an address has two holders, or is given again within the
    wait. Attached containers do not wait.
    """

    def __init__(self, store: Store, clock: FakeClock) -> None:
        self._store, self._clock = store, clock
        self._held: dict[str, set[tuple[str, str]]] = {}
        self._holder: dict[tuple[str, str], str] = {}
        self._released: dict[tuple[str, str], float] = {}
        self.errors: list[str] = []
        self.given = 0
        store.subscribe(self._changed)

    def _changed(self, event: Event) -> None:
        kind, key = event.kind, event.key
        record = None if event.new is None else event.new.record
        if kind is TASK_STATUS:
            if record is not None and record.state.ended:
                self._holds(key, set())
        elif kind is TASKS:
            status = self._store.record(TASK_STATUS, key)
            ended = status is not None and status.state.ended
            self._holds(key, set() if record is None or ended else {(on.network, on.address) for on in record.networks})
        elif kind is SERVICE_STATUS:
            virtual = [] if record is None or record.endpoint is None else record.endpoint.virtual_ips
            self._holds(key, {(each.network_id, each.addr.partition("/")[0]) for each in virtual})
        elif kind is ATTACHMENTS:
            new = {(record.network, record.address)} if record is not None and record.address else set()
            self._holds(key, new, wait=0)

    def _holds(self, holder: str, new: set[tuple[str, str]], wait: float = WAIT) -> None:
        old = self._held.get(holder, set())
        self._held[holder] = new
        now = self._clock.monotonic()
        for each in old - new:
            del self._holder[each]
            self._released[each] = now
        for each in new - old:
            self.given += 1
            if each in self._holder:
                self.errors.append(f"{each} is given to {holder}, and {self._holder[each]} has it")
            elif now - self._released.get(each, -2 * WAIT) < wait - 0.01:
                self.errors.append(f"{each} is given to {holder} {now - self._released[each]:.1f} s after its release")
            self._holder[each] = holder

    def taken(self, network: str) -> set[str]:
        return {address for net, address in self._holder if net == network}


@pytest.mark.parametrize("seed", range(12))
async def test_no_address_has_two_holders(etcd: FakeEtcd, store: Store, clock: FakeClock, seed: int) -> None:
    """Services come, change and go, tasks and nodes fail, answers of etcd are lost, and managers
    take over from each other, also while they write.
    """
    dice = random.Random(seed)
    peers = [Store(etcd.peer(), clock) for _ in range(2)]
    for peer in peers:
        await peer.load()
    swarm = Swarm(store, clock, peers)
    watch = Watch(store, clock)
    await swarm.nodes(4)
    await swarm.lead()
    networks = [await swarm.network("small", "10.0.1.0/28"), await swarm.network("large", "10.0.2.0/23")]
    ingress = await swarm.network("ingress", "10.255.0.0/16", ingress=True)
    services: list[str] = []
    attachments: list[str] = []

    def fields() -> dict[str, object]:
        return {
            "replicas": dice.randrange(12),
            "networks": dice.choice([[], networks[:1], networks[1:], networks]),
            "ports": dice.choice([None, [{"Protocol": "tcp", "TargetPort": 80, "PublishedPort": 80}]]),
            "endpoint_mode": dice.choice(["", "vip", "dnsrr"]),
            "restart": {"Delay": 0},
            "force": dice.randrange(9),
        }

    async def something() -> None:
        what = dice.randrange(10)
        running = sorted(swarm.agents.running)
        if what < 2 and len(services) < 6:
            services.append(await swarm.create(f"s{dice.random()}", **fields()))
        elif what < 4 and services:
            await swarm.update(dice.choice(services), **fields())
        elif what == 4 and services:
            await swarm.remove(services.pop(dice.randrange(len(services))))
        elif what == 5:
            for key in dice.sample(running, min(len(running), 3)):
                await swarm.agents.report(key, TaskState.FAILED)
        elif what == 6:
            node = f"node{dice.randrange(1, 5):02}"
            await swarm.observe(node, dice.choice([NodeState.DOWN, NodeState.READY, NodeState.READY]))
        elif what == 7:
            etcd.lose_answers = dice.choice([1, 3])
        elif what == 8:
            if attachments and dice.random() < 0.5:
                await store.commit([Delete(ATTACHMENTS, attachments.pop(0))])
            else:
                attachments.append(new_id())
                record = AttachmentRecord(
                    network=dice.choice(networks), node="node01", container="c", created=clock.now()
                )
                await store.commit([Put(ATTACHMENTS, attachments[-1], record)])
        else:
            await swarm.lead(dice.randrange(3), depose=dice.random() < 0.5)

    try:
        for _ in range(80):
            await swarm.do(something())
            await swarm.run(dice.choice([0.0, 0.01, 0.1, 1.0, 30.0]))
            assert not watch.errors
        assert watch.given > 50
        etcd.lose_answers = 0
        for node in ("node01", "node02", "node03", "node04"):
            await swarm.observe(node, NodeState.READY)
        for key in services:
            await swarm.do(swarm.remove(key))
        for key in attachments:
            await swarm.do(store.commit([Delete(ATTACHMENTS, key)]))
        await swarm.lead()
        await swarm.run(120)
        assert not watch.errors
        for network in (*networks, ingress):
            assert watch.taken(network) == set()
        assert not swarm.addresses._held
        for each in swarm.addresses._pools.values():
            assert each.is_empty
            assert len(given(each, 10**5, clock.monotonic())) == each.size, "nothing is lost"
    finally:
        await swarm.depose()
        for peer in peers:
            await peer.close()


async def test_a_thousand_tasks_with_leader_changes(etcd: FakeEtcd, store: Store, clock: FakeClock) -> None:
    peers = [Store(etcd.peer(), clock) for _ in range(2)]
    for peer in peers:
        await peer.load()
    swarm = Swarm(store, clock, peers)
    watch = Watch(store, clock)
    await swarm.nodes(5)
    await swarm.lead()
    try:
        net = await swarm.network("net", "10.0.0.0/20")
        for round_ in range(4):
            service = await swarm.create(f"s{round_}", replicas=250, networks=[net])
            for manager in (1, 2, 0):
                await swarm.run(0.05)
                await swarm.lead(manager, depose=manager != 1)
            await swarm.run(5)
            assert len({each.address for task in swarm.running(service).values() for each in task.networks}) == 250
            await swarm.remove(service)
            await swarm.run(0.2)
            await swarm.lead(round_ % 3)
        await swarm.run(120)
        assert not watch.errors
        assert watch.given == 4 * 251
        assert not watch.taken(net)
    finally:
        await swarm.depose()
        for peer in peers:
            await peer.close()


async def test_records_may_be_read_in_any_order(etcd: FakeEtcd, store: Store, clock: FakeClock) -> None:
    """A manager that loads sees attachments before networks, and tasks before their statuses."""
    async with leading(store, clock) as swarm:
        net = await swarm.network("net", "10.0.1.0/28")
        web = await swarm.create(replicas=3, networks=[net], restart={"Delay": 0})
        key = new_id()
        record = AttachmentRecord(network=net, node="node01", container="c", created=clock.now())
        await store.commit([Put(ATTACHMENTS, key, record)])
        await swarm.run(1)
        for _ in range(2):
            await swarm.agents.report(min(swarm.running(web)), TaskState.FAILED)
            await swarm.run(70)
        late = Store(etcd.peer(), clock)
        other = addresses.Addresses(late, clock)
        late.subscribe(other.changed)
        await late.load()
        try:
            assert other.doubles() == []
            held = {
                holder: tuple(sorted((on.network, on.address) for on in has)) for holder, has in other._held.items()
            }
            assert held == {
                holder: tuple(sorted((on.network, on.address) for on in has))
                for holder, has in swarm.addresses._held.items()
            }
            assert len(held) == 5
            assert other.exhausted(["nothing"]) == "nothing"
            await store.commit([Delete(NETWORKS, net)])
            await late.reach(store.revision)
            assert other.exhausted([net]) == net
        finally:
            await late.close()
