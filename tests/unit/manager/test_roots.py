"""The set of trusted roots: no sequence of rotations, kills and removals locks a node out, and the
set shrinks to one root when each node has renewed.
"""

from __future__ import annotations

import asyncio
import base64
from functools import lru_cache

import msgspec
import pytest
from cryptography import x509
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import WrongState
from engine.manager import keys, records, roots
from engine.manager.ca import Authority, found
from engine.manager.certificates import Root, Subject, certificates, digest, issued_by, new_root, request_key
from engine.manager.identity import Identity
from engine.manager.joining import Joining
from engine.manager.loops import Acting
from engine.manager.records import Claim, Cluster, NodeData, NodeRecord
from engine.manager.rotation import RotationLoop, trust_claim
from engine.manager.store import Compare, Delete, Put, Store
from engine.swarm_session.clock import SECOND
from engine.swarm_session.messages import Join, Joined, Renew, Renewed
from engine.swarm_session.states import Role
from engine.wire.swarm import CAConfig, SwarmSpec
from tests.support.fakes.clock import FakeClock
from tests.support.fakes.etcd import FakeEtcd

ADDRESS = "10.0.0.1:2377"
NOW = FakeClock().now()
HOUR = 3600 * SECOND


def der(pem: str) -> bytes:
    return base64.b64decode("".join(pem.split("-----")[2].split()))


@lru_cache(maxsize=1000)
def blocks(pem: str) -> list[x509.Certificate]:
    return certificates(pem)


@lru_cache(maxsize=100_000)
def accepts(trusted: str, chain: str) -> bool:
    """As TLS verifies a chain with these roots."""
    own, *between = blocks(chain)
    issuers = [own, *(each for each in between if issued_by(own, each))]
    return any(issued_by(certificate, root) for root in blocks(trusted) for certificate in issuers)


class Node:
    """What is on the disk of one node, and the answer on its way to it."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.csr = keys.request(keys.new_key())
        self.id = self.trusted = self.certificate = ""
        self.up = True
        self.answer: Joined | Renewed | None = None

    @property
    def certificates(self) -> list[str]:
        """Those that it has, or may have as soon as it is up."""
        answers = [self.answer.certificate] if self.answer is not None else []
        return [each for each in (self.certificate, *answers) if each]


class Swarm:
    """Records, one manager's view of them, and nodes that act one step at a time."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        etcd = FakeEtcd(self.clock)
        self.store = Store(etcd, self.clock, node="node1")
        self.authority = Authority(self.store, self.clock)
        self.joining = Joining(self.store, etcd, self.authority, self.clock, node="node1")
        self.loop = RotationLoop(self.store, self.clock)
        self.store.subscribe(self.loop.changed)
        self.nodes: list[Node] = []
        self.keys: dict[str, str] = {}

    async def found(self) -> None:
        await self.store.load()
        first = Node(Role.MANAGER)
        first.id = "node1"
        made = await found(SwarmSpec(), self.clock, node=first.id, address=ADDRESS)
        await self.store.commit(made.changes)
        await self.store.commit([Put(records.NODES, first.id, NodeRecord(created=0, updated=0, role=Role.MANAGER))])
        first.certificate, first.trusted = made.certificate, made.cluster.root
        self.nodes.append(first)
        await self.hello(first)
        for role in (Role.MANAGER, Role.WORKER, Role.WORKER):
            self.nodes.append(node := Node(role))
            await self.ask(node)
            self.deliver(node)
            await self.hello(node)

    @property
    def cluster(self) -> Cluster:
        return self.authority.cluster

    # --- the operator -----------------------------------------------------------------------------

    async def rotate(self, config: CAConfig) -> None:
        old = self.cluster
        spec = msgspec.structs.replace(old.spec, ca_config=config)
        try:
            new, changes, compares = await self.authority.reconfigure(old, msgspec.structs.replace(old, spec=spec))
        except WrongState:
            assert len(old.abandoned) >= roots.MOST_ABANDONED - 1
            return
        await self.store.commit([Put(records.CLUSTER, "", new), *changes], compares)
        ca_key = self.store.record(records.CA_KEY)
        assert ca_key is not None
        self.keys |= {new.root: ca_key.key} | ({new.rotation: ca_key.next} if new.rotation else {})

    async def rotate_to_a_new_root(self) -> None:
        await self.rotate(CAConfig(force_rotate=self.cluster.force_rotate + 1))

    async def rotate_to(self, number: int) -> None:
        """To a root that is trusted already: the way back, or to an abandoned one."""
        known = roots.members(self.cluster)
        pem = known[number % len(known)]
        if pem in self.keys:
            await self.rotate(CAConfig(signing_ca_cert=pem, signing_ca_key=self.keys[pem]))

    async def remove(self, node: Node) -> None:
        if node is self.nodes[0]:
            return
        self.nodes.remove(node)
        if node.id:
            await self.store.commit(
                [Delete(records.NODES, node.id), Delete(records.NODE_DATA, node.id), self.authority.bar(node.id)]
            )

    # --- nodes ------------------------------------------------------------------------------------

    async def ask(self, node: Node) -> None:
        """For a certificate. The answer is under way afterwards."""
        if not node.up or node.answer is not None:
            return
        if not node.certificate:
            cluster = self.cluster
            token = cluster.manager_token if node.role is Role.MANAGER else cluster.worker_token
            node.answer = await self.joining.join(Join(seq=1, csr=node.csr, token=token), "10.0.0.9")
            node.id = node.answer.node
        else:
            node.answer = await self.joining.renew(Renew(seq=1, csr=node.csr), self.identity(node), "10.0.0.9")

    def deliver(self, node: Node) -> None:
        if node.up and node.answer is not None:
            node.trusted, node.certificate, node.answer = node.answer.root, node.answer.certificate, None

    async def hello(self, node: Node) -> None:
        """A session begins, as the dispatcher writes it. Managers trust what the records say, and
        so does their etcd.
        """
        if not node.up or not node.certificate:
            return
        before = self.store.record(records.NODE_DATA, node.id) or NodeData()
        data = NodeData(certificate=self.identity(node).certificate, issuer_changes=before.issuer_changes)
        await self.store.commit([Put(records.NODE_DATA, node.id, data)])
        node.trusted = self.authority.trusted()
        if node.role is Role.MANAGER:
            await self.store.commit([Put(records.CLAIMS, trust_claim(node.id), Claim(digest(node.trusted)))])

    def identity(self, node: Node) -> Identity:
        return self.authority.identify(der(node.certificate))

    async def renew_all_but(self, node: Node) -> None:
        for other in self.nodes:
            if other is not node:
                self.deliver(other)
                await self.ask(other)
                self.deliver(other)
                await self.hello(other)

    def stop(self, node: Node) -> None:
        """kill -9: an answer that is under way is lost."""
        node.up, node.answer = False, None

    # --- the leader -------------------------------------------------------------------------------

    async def step(self) -> None:
        await self.loop.step(Acting(self.store, self.clock, Compare(records.LEADER, "")))

    def check(self) -> None:
        """Each node is known by its certificates, and nodes and managers accept each other."""
        for node in self.nodes:
            for certificate in node.certificates:
                assert self.authority.identify(der(certificate)).node == node.id
                assert accepts(self.authority.trusted(), certificate)
                for manager in self.nodes:
                    if manager.role is Role.MANAGER and manager.certificate:
                        assert accepts(manager.trusted, certificate)
                        assert not node.trusted or accepts(node.trusted, manager.certificate)


ACTIONS = ("new", "to", "remove", "join", "ask", "deliver", "hello", "others", "stop", "start", "step")


@settings(max_examples=120, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 11)), max_size=40))
def test_no_node_is_ever_locked_out(actions: list[tuple[str, int]]) -> None:
    asyncio.run(_play(actions))


async def _play(actions: list[tuple[str, int]]) -> None:
    swarm = Swarm()
    await swarm.found()
    try:
        for action, number in actions:
            node = swarm.nodes[number % len(swarm.nodes)]
            match action:
                case "new":
                    await swarm.rotate_to_a_new_root()
                case "to":
                    await swarm.rotate_to(number)
                case "remove":
                    await swarm.remove(node)
                case "join":
                    swarm.nodes.append(Node(Role.WORKER if number % 3 else Role.MANAGER))
                    await swarm.ask(swarm.nodes[-1])
                case "ask":
                    await swarm.ask(node)
                case "deliver":
                    swarm.deliver(node)
                case "hello":
                    await swarm.hello(node)
                case "others":
                    await swarm.renew_all_but(node)
                case "stop":
                    swarm.stop(node)
                case "start":
                    node.up = True
                case "step":
                    await swarm.step()
            swarm.check()
        for _ in range(4):
            for node in swarm.nodes:
                node.up = True
                swarm.deliver(node)
                await swarm.hello(node)
                if not node.certificate or swarm.authority.should_renew(swarm.identity(node)):
                    await swarm.ask(node)
                swarm.check()
            await swarm.step()
        assert not roots.changing(swarm.cluster) and swarm.authority.trusted() == swarm.cluster.root
        assert all(accepts(swarm.cluster.root, node.certificate) for node in swarm.nodes)
        assert not any(swarm.authority.should_renew(swarm.identity(node)) for node in swarm.nodes)
    finally:
        await swarm.store.close()


@pytest.mark.parametrize(
    "actions",
    [
        pytest.param("new others new others step", id="a second rotation"),
        pytest.param("new others to others step", id="the way back"),
        pytest.param("new ask to others step deliver", id="an answer that comes late"),
        pytest.param("new ask deliver stop to others step start", id="a certificate that was never shown"),
        pytest.param("new ask deliver to others ask step stop", id="an answer that is lost"),
        pytest.param("stop new others new others new others step start", id="three rotations"),
        pytest.param("new others to others ask deliver to1 others step stop", id="there, back, and there again"),
        pytest.param("new others ask deliver hello to ask deliver others to1 others step", id="live, there again"),
    ],
)
def test_what_two_roots_did_not_survive(actions: str) -> None:
    """All is done to the node 3, or to the others. "to": to the first of the roots; "to1": to the
    second.
    """
    numbers = {"to": ("to", 0), "to1": ("to", 1)}
    asyncio.run(_play([numbers.get(action, (action, 3)) for action in actions.split()]))


# --- the rules ------------------------------------------------------------------------------------


def cluster_of(root: str, **fields: object) -> Cluster:
    made = Cluster(id="swarm", created=0, updated=0, spec=SwarmSpec(), root=root, worker_token="", manager_token="")
    return msgspec.structs.replace(made, **fields)


def test_abandoned_roots_stay_in_the_set() -> None:
    cluster = cluster_of("A")
    assert roots.members(cluster) == ("A",) and roots.signing(cluster) == "A" and not roots.changing(cluster)
    cluster = roots.rotated(cluster, "B", "b")
    assert roots.members(cluster) == ("A", "B") and roots.signing(cluster) == "B" and roots.changing(cluster)
    assert roots.rotated(cluster, "B", "again").issuer_changes == 0
    cluster = roots.rotated(cluster, "C", "c")
    assert roots.members(cluster) == ("A", "C", "B") and cluster.issuer_changes == 1
    back = roots.returned(cluster)
    assert roots.members(back) == ("A", "B", "C") and roots.signing(back) == "A" and back.issuer_changes == 2
    assert roots.returned(back) == back
    again = roots.rotated(cluster, "B", "b")
    assert roots.members(again) == ("A", "B", "C") and again.cross_signed == "b" and again.issuer_changes == 2
    done = roots.finished(again)
    assert (roots.members(done), done.rotation, done.cross_signed, done.issuer_changes) == (("B",), "", "", 2)


def test_a_node_is_settled_when_it_has_asked_since_the_issuer_changed() -> None:
    cluster = roots.returned(roots.rotated(cluster_of("A"), "B", "b"))
    old = NodeData(certificate=digest("A"))
    assert (
        not roots.settled(cluster, None) and not roots.settled(cluster, NodeData()) and not roots.settled(cluster, old)
    )
    assert roots.should_renew(cluster, digest("A"), old) and roots.should_renew(cluster, digest("B"), old)
    assert not roots.should_renew(cluster, "", old)
    shows_b = roots.noted(cluster, digest("B"), old)
    assert not roots.settled(cluster, shows_b) and roots.should_renew(cluster, digest("B"), shows_b)
    shows_a = roots.noted(cluster, digest("A"), old)
    assert roots.settled(cluster, shows_a) and not roots.should_renew(cluster, digest("A"), shows_a)
    assert roots.noted(cluster, digest("A"), shows_a) == shows_a
    later = roots.rotated(cluster, "C", "c")
    assert not roots.settled(later, shows_a)
    assert roots.noted(cluster_of("A"), digest("A"), None) == NodeData(), "outside of rotations nothing is noted"


def test_a_node_may_hold_what_it_was_given_last() -> None:
    """From A to B, back, and to B again: the node shows B, but was given a certificate of A."""
    cluster = roots.rotated(cluster_of("A"), "B", "b")
    data = NodeData(certificate=digest("B"))
    assert roots.settled(cluster, data)
    cluster = roots.returned(cluster)
    data = roots.noted(cluster, digest("B"), data)
    cluster = roots.rotated(cluster, "B", "b")
    assert cluster.abandoned == () and not roots.settled(cluster, data)
    assert roots.should_renew(cluster, digest("B"), data)
    data = roots.noted(cluster, digest("A"), data)
    assert not roots.settled(cluster, data), "until it shows the new one"
    assert roots.settled(cluster, msgspec.structs.replace(data, certificate=digest("B")))


def test_the_set_has_a_limit() -> None:
    cluster = cluster_of("A")
    for number in range(roots.MOST_ABANDONED):
        cluster = roots.rotated(cluster, f"B{number}", "b")
    with pytest.raises(WrongState, match=r"8 times before each node had renewed .* start the nodes that are down"):
        roots.rotated(cluster, "C", "c")
    assert len(roots.rotated(cluster, "B3", "b").abandoned) == roots.MOST_ABANDONED - 1
    back = roots.returned(cluster)
    assert len(back.abandoned) == roots.MOST_ABANDONED, "a rotation can be given up"
    with pytest.raises(WrongState):
        roots.rotated(back, "C", "c")
    assert roots.returned(roots.rotated(back, "B3", "b")).abandoned[-1] == "B3"


def test_records_of_earlier_versions() -> None:
    """They end with `force_rotate`, and with `subnets`."""
    cluster = cluster_of("A", rotation="B", cross_signed="b", force_rotate=3)
    fields = msgspec.msgpack.decode(records.encode(cluster))
    read = records.CLUSTER.decode(msgspec.msgpack.encode(fields[:-2]))
    assert read == cluster and roots.members(read) == ("A", "B")
    data = NodeData(certificate="x", subnets=("10.0.0.0/8",))
    assert records.NODE_DATA.decode(msgspec.msgpack.encode(msgspec.msgpack.decode(records.encode(data))[:-1])) == data


# --- a root that an earlier version has forgotten -------------------------------------------------


def issued(root: Root, swarm: str = "swarm") -> str:
    public = request_key(keys.request(keys.new_key()))
    return root.issue(public, Subject("node", Role.MANAGER, swarm), address="", now=NOW, lifetime=HOUR)


def test_a_forgotten_root_is_adopted() -> None:
    first, forgotten, present = (Root(*new_root(NOW)) for _ in range(3))
    cluster = cluster_of(first.pem, rotation=present.pem, cross_signed=first.cross_sign(present, NOW))
    own, between = issued(forgotten), first.cross_sign(forgotten, NOW)
    read = certificates(own)[0]
    assert not roots.issuer_of(cluster, read)
    adopted = roots.adopted(cluster, own + between)
    assert adopted.abandoned == (between,) and adopted.issuer_changes == 1
    assert roots.issuer_of(adopted, read) == between
    assert roots.adopted(adopted, own + between) == adopted


def test_no_other_root_is_adopted() -> None:
    first, stranger = (Root(*new_root(NOW)) for _ in range(2))
    cluster = cluster_of(first.pem)
    for chain in (
        "",
        "garbage",
        issued(first),
        issued(stranger),
        issued(stranger) + stranger.pem,
        issued(stranger) + stranger.cross_sign(first, NOW),
        issued(Root(*new_root(NOW))) + first.cross_sign(stranger, NOW),
    ):
        assert roots.adopted(cluster, chain) == cluster
