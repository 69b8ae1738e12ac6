"""Joins, renewals, and the members of etcd: requests as managers serve them."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence

import msgspec
import pytest

from engine.errors import Conflict, Forbidden, InvalidParameter, NotFound, Unavailable, WrongState
from engine.manager import keys, members, records, tokens
from engine.manager.ca import Authority, found
from engine.manager.certificates import certificates, digest, names, subject_of
from engine.manager.identity import Identity
from engine.manager.joining import Joining, node_id
from engine.manager.kv import EtcdError, Member
from engine.manager.loops import Acting
from engine.manager.members import Members
from engine.manager.records import Claim, Cluster, ManagerPresence, NodeData, NodeRecord
from engine.manager.roles import RoleLoop
from engine.manager.store import Compare, Delete, Put, Store
from engine.swarm_session import messages
from engine.swarm_session.clock import SECOND
from engine.swarm_session.messages import Done, Join, Joined, MemberAdded, Renew, Renewed
from engine.swarm_session.states import Availability, NodeState, Role
from engine.wire.nodes import NodeDescription
from engine.wire.swarm import CAConfig, SwarmSpec
from tests.support.fakes.clock import FakeClock
from tests.support.fakes.etcd import FakeEtcd

NODE = "node1"
"""As the fake names its first member."""
HOUR = 3600 * SECOND


class Peer:
    """The connection of a peer: keeps what it is sent."""

    def __init__(self, address: str = "10.0.0.9") -> None:
        self.peer = address
        self.sent: list[object] = []

    async def send(self, message: object) -> None:
        self.sent.append(message)


class Here:
    """One manager, node1, of a swarm with as many others as a test wants."""

    def __init__(self, store: Store, etcd: FakeEtcd, clock: FakeClock) -> None:
        self.store, self.etcd, self.clock = store, etcd, clock
        self.authority = Authority(store, clock)
        self.joining = Joining(store, etcd, self.authority, clock, node=NODE)
        self.members = self.joining.members
        self.loop = RoleLoop(store, clock, self.members, self.authority)
        store.subscribe(self.loop.changed)

    async def found(self, managers: int = 1, *, present: int | None = None, config: CAConfig | None = None) -> None:
        made = await found(SwarmSpec(ca_config=config or CAConfig()), self.clock, node=NODE, address="10.0.0.1:2377")
        await self.store.commit(made.changes)
        self.etcd.cluster.members[:] = []
        self.etcd.cluster.leader = 1
        for number in range(1, managers + 1):
            name = f"node{number}"
            self.etcd.cluster.members.append(Member(number, name, f"https://10.0.0.{number}:7946", False))
            await self.store.commit(
                [Put(records.NODES, name, NodeRecord(created=self.clock.now(), updated=0, role=Role.MANAGER))]
                + ([self.presence(number)] if number <= (managers if present is None else present) else [])
            )

    def presence(self, number: int) -> Put:
        return Put(records.MANAGERS, f"node{number}", ManagerPresence(address=f"10.0.0.{number}:2377", member=number))

    @property
    def cluster(self) -> Cluster:
        return self.authority.cluster

    async def wish(self, node: str, role: Role) -> None:
        now = self.clock.now()
        await self.store.commit([Put(records.NODES, node, NodeRecord(created=now, updated=now, role=role))])

    async def join(self, key: str, token: str, **fields: str) -> Joined:
        return await self.joining.join(Join(seq=7, csr=keys.request(key), token=token, **fields), "10.0.0.9")

    async def serve(self, message: messages.Message, identity: Identity | None) -> object:
        peer = Peer()
        await self.joining.serve(peer, message, identity)  # type: ignore[arg-type]
        (answer,) = peer.sent
        return answer

    async def step(self) -> None:
        await self.loop.step(Acting(self.store, self.clock, Compare(records.LEADER, "")))
        if self.loop.removing is not None:
            await self.loop.removing

    @property
    def voters(self) -> list[str]:
        return [member.name for member in self.etcd.cluster.members if not member.learner]


@pytest.fixture
def here(store: Store, etcd: FakeEtcd, clock: FakeClock) -> Here:
    return Here(store, etcd, clock)


def manager(number: int) -> Identity:
    return Identity(f"node{number}", Role.MANAGER)


def identity_of(here: Here, pem: str) -> Identity:
    return here.authority.identify(base64.b64decode("".join(pem.split("-----")[2].split())))


# --- joining --------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", [Role.WORKER, Role.MANAGER])
async def test_join(here: Here, role: Role) -> None:
    await here.found()
    token = here.cluster.worker_token if role is Role.WORKER else here.cluster.manager_token
    key = keys.new_key()
    joined = await here.join(key, token, availability="drain")
    assert (joined.seq, joined.role, joined.seen, joined.swarm) == (7, role.label, "10.0.0.9", here.cluster.id)
    assert joined.root == here.cluster.root
    assert [(peer.node, peer.address) for peer in joined.managers] == [(NODE, "10.0.0.1:2377")]
    assert identity_of(here, joined.certificate)[:2] == (joined.node, role)
    assert keys.check(key, joined.certificate)["node"] == joined.node
    record = here.store.record(records.NODES, joined.node)
    assert record is not None and (record.role, record.availability) == (role, Availability.DRAIN)


async def test_a_repeated_join_is_about_the_same_node(here: Here) -> None:
    await here.found()
    key = keys.new_key()
    first = await here.join(key, here.cluster.worker_token)
    await here.wish(first.node, Role.MANAGER)
    second = await here.join(key, here.cluster.worker_token, availability="pause")
    assert second.node == first.node and second.role == "manager", "its record decides"
    assert (await here.join(keys.new_key(), here.cluster.worker_token)).node != first.node
    assert len(here.store.all(records.NODES)) == 3


async def test_the_address_of_a_manager_is_in_its_certificate(here: Here) -> None:
    await here.found()
    for advertise, expected in (("10.9.9.9:2377", "10.9.9.9"), ("", "10.0.0.9")):
        joined = await here.join(keys.new_key(), here.cluster.manager_token, advertise=advertise)
        (certificate,) = certificates(joined.certificate)
        assert names(subject_of(certificate), expected)[-1].value.compressed == expected  # type: ignore[union-attr]
        assert expected in str(certificate.extensions)


@pytest.mark.parametrize(
    ("token", "fields", "words"),
    [
        ("", {}, "join token is necessary"),
        ("x", {}, "join token is necessary"),
        ("other", {}, "join token is necessary"),
        ("worker", {"availability": "gone"}, "Availability: invalid value 'gone'"),
        ("worker", {"csr": "x"}, "certificate request"),
        ("worker", {"csr": "x" * 100_000}, "longer than"),
    ],
)
async def test_join_refuses(here: Here, token: str, fields: dict[str, str], words: str) -> None:
    await here.found()
    token = {
        "worker": here.cluster.worker_token,
        "other": tokens.token(here.cluster.root, tokens.new_secret()),
    }.get(token, token)
    message = Join(**({"csr": keys.request(keys.new_key()), "token": token} | fields))  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match=words):
        await here.joining.join(message, "")
    assert len(here.store.all(records.NODES)) == 1


async def test_a_rotated_token_is_worth_nothing(here: Here) -> None:
    await here.found()
    old = here.cluster.worker_token
    new = msgspec.structs.replace(here.cluster, worker_token=tokens.token(here.cluster.root, tokens.new_secret()))
    await here.store.commit([Put(records.CLUSTER, "", new)])
    with pytest.raises(InvalidParameter, match="not current"):
        await here.join(keys.new_key(), old)
    await here.join(keys.new_key(), new.worker_token)


async def test_a_token_that_is_rotated_meanwhile_is_refused(here: Here) -> None:
    """Another manager has rotated it; this one's cache learns of it by its failing write."""
    await here.found()
    old = here.cluster
    new = msgspec.structs.replace(old, worker_token=tokens.token(old.root, tokens.new_secret()))

    def rotate() -> None:
        here.etcd.before_commit = None
        here.etcd.put_now("/swarm", records.encode(new))

    here.etcd.before_commit = rotate
    with pytest.raises(InvalidParameter, match="not current"):
        await here.join(keys.new_key(), old.worker_token)
    assert len(here.store.all(records.NODES)) == 1


async def test_a_removed_node_does_not_come_back_with_its_key(here: Here) -> None:
    await here.found()
    key = keys.new_key()
    joined = await here.join(key, here.cluster.worker_token)
    await here.store.commit([Delete(records.NODES, joined.node), here.authority.bar(joined.node)])
    with pytest.raises(Forbidden, match="removed"):
        await here.join(key, here.cluster.worker_token)
    with pytest.raises(Forbidden, match="removed"):
        await here.joining.renew(Renew(csr=keys.request(key)), identity_of(here, joined.certificate), "")
    assert (await here.join(keys.new_key(), here.cluster.worker_token)).node != joined.node


def test_ids_of_nodes() -> None:
    assert node_id("a", b"key") == node_id("a", b"key") != node_id("b", b"key") != node_id("b", b"kex")
    assert len(node_id("a", b"key")) == records.ID_LENGTH


# --- renewals -------------------------------------------------------------------------------------


async def test_renewal_gives_the_role_that_is_wished(here: Here) -> None:
    await here.found()
    joined = await here.join(keys.new_key(), here.cluster.worker_token)
    identity = identity_of(here, joined.certificate)
    key = keys.new_key()
    for role in (Role.WORKER, Role.MANAGER, Role.WORKER):
        await here.wish(joined.node, role)
        renewed = await here.serve(Renew(seq=3, csr=keys.request(key)), identity)
        assert isinstance(renewed, Renewed) and (renewed.seq, renewed.role) == (3, role.label)
        assert identity_of(here, renewed.certificate)[:2] == (joined.node, role)
        assert renewed.root == here.cluster.root


async def test_a_manager_is_no_worker_before_its_member_is_removed(here: Here) -> None:
    await here.found(3)
    await here.wish("node2", Role.WORKER)
    csr = keys.request(keys.new_key())
    with pytest.raises(Unavailable, match="being demoted"):
        await here.serve(Renew(csr=csr), manager(2))
    await here.step()
    renewed = await here.serve(Renew(csr=csr), manager(2))
    assert isinstance(renewed, Renewed) and renewed.role == "worker"


async def test_an_expired_node_renews_and_a_removed_one_does_not(here: Here) -> None:
    await here.found(config=CAConfig(node_cert_expiry=HOUR))
    key, csr = keys.new_key(), keys.request(keys.new_key())
    joined = await here.join(key, here.cluster.worker_token)
    here.clock.set(10 * 3600)
    renewal = Renew(csr=csr, certificate=joined.certificate, signature=keys.signature(key, csr))
    answer = await here.serve(renewal, None)
    assert isinstance(answer, Renewed)
    assert identity_of(here, answer.certificate).until > here.clock.now()
    with pytest.raises(Forbidden, match="not issued by this swarm's CA"):
        await here.serve(Renew(csr=csr), None)
    for wrong in (
        Renew(csr=csr, certificate=joined.certificate),
        Renew(csr=csr, certificate=joined.certificate, signature=keys.signature(keys.new_key(), csr)),
    ):
        with pytest.raises(Forbidden):
            await here.serve(wrong, None)
    await here.store.commit([here.authority.bar(joined.node)])
    with pytest.raises(Forbidden, match="removed"):
        await here.serve(renewal, None)


async def test_a_renewal_keeps_the_address_of_a_manager(here: Here) -> None:
    await here.found()
    data = NodeData(state=NodeState.READY, manager_address="10.7.7.7:2377")
    await here.store.commit([Put(records.NODE_DATA, NODE, data)])
    csr = keys.request(keys.new_key())
    for message, expected in ((Renew(csr=csr), "10.7.7.7"), (Renew(csr=csr, advertise="10.8.8.8:1"), "10.8.8.8")):
        answer = await here.serve(message, manager(1))
        assert isinstance(answer, Renewed)
        assert expected in str(certificates(answer.certificate)[0].extensions)


async def test_a_renewal_is_noted_after_a_rotation_was_abandoned(here: Here) -> None:
    """With the root of the certificate that the node shows, which no session may have reported."""
    await here.found()
    joined = await here.join(keys.new_key(), here.cluster.worker_token)
    node, csr = joined.node, keys.request(keys.new_key())
    first = digest(here.cluster.root)
    data = NodeData(certificate=first, manager_address="10.7.7.7:2377")
    await here.store.commit([Put(records.NODE_DATA, node, data)])
    here_now = here.store.get(records.NODE_DATA, node)
    await here.serve(Renew(csr=csr), identity_of(here, joined.certificate))
    assert here.store.get(records.NODE_DATA, node) == here_now, "nothing is written outside of rotations"
    abandoned = msgspec.structs.replace(here.cluster, abandoned=("ROOT",), issuer_changes=7)
    await here.store.commit([Put(records.CLUSTER, "", abandoned)])
    shown = Identity(node, Role.WORKER, "of another root")
    await here.serve(Renew(csr=csr), shown)
    noted = msgspec.structs.replace(data, certificate="of another root", issuer_changes=7)
    assert here.store.record(records.NODE_DATA, node) == noted
    await here.store.commit([Delete(records.NODE_DATA, node)])
    await here.serve(Renew(csr=csr), shown)
    assert here.store.record(records.NODE_DATA, node) == NodeData(certificate="of another root", issuer_changes=7)


# --- members of etcd ------------------------------------------------------------------------------


async def added(here: Here, number: int) -> MemberAdded:
    answer = await here.serve(messages.AddMember(seq=1, peer_url=f"https://10.0.0.{number}:7946"), manager(number))
    assert isinstance(answer, MemberAdded)
    return answer


def start(here: Here, member: int, name: str) -> None:
    """The learner's process has started, so etcd knows its name."""
    listed = here.etcd.cluster.members
    position = next(i for i, each in enumerate(listed) if each.id == member)
    listed[position] = listed[position]._replace(name=name)


async def test_a_manager_is_added_and_promoted(here: Here) -> None:
    await here.found(2)
    await here.wish("node3", Role.MANAGER)
    answer = await added(here, 3)
    assert answer.initial_cluster == (
        "node1=https://10.0.0.1:7946,node2=https://10.0.0.2:7946,node3=https://10.0.0.3:7946"
    )
    start(here, answer.member, "node3")
    assert isinstance(await here.serve(messages.PromoteMember(seq=2, member=answer.member), manager(3)), Done)
    assert here.voters == ["node1", "node2", "node3"]
    assert isinstance(await here.serve(messages.PromoteMember(seq=2, member=answer.member), manager(3)), Done), "again"
    assert not here.store.all(records.CLAIMS), "no lock and no claim is left"


async def test_adding_again_replaces_the_learner(here: Here) -> None:
    """The joining process was killed between the answer and its start, or lost its data."""
    await here.found(2)
    await here.wish("node3", Role.MANAGER)
    first, second = await added(here, 3), await added(here, 3)
    assert first.member != second.member
    assert [member.id for member in here.etcd.cluster.members if member.learner] == [second.member]
    with pytest.raises(NotFound, match="removed"):
        await here.serve(messages.PromoteMember(member=first.member), manager(3))
    start(here, second.member, "node3")
    third = await added(here, 3)
    assert [member.id for member in here.etcd.cluster.members if member.learner] == [third.member]


async def test_one_learner_at_a_time(here: Here) -> None:
    await here.found(1)
    for number in (2, 3):
        await here.wish(f"node{number}", Role.MANAGER)
    first = await added(here, 2)
    with pytest.raises(Unavailable, match="node2 is becoming a manager"):
        await added(here, 3)
    await here.clock.advance(61)
    await added(here, 3)
    with pytest.raises(NotFound):
        await here.serve(messages.PromoteMember(member=first.member), manager(2))


async def test_only_managers_by_record_are_added(here: Here) -> None:
    await here.found(1)
    await here.wish("node2", Role.WORKER)
    for identity in (manager(2), manager(3), Identity(NODE, Role.WORKER), None):
        with pytest.raises(Forbidden):
            await here.serve(messages.AddMember(peer_url="https://10.0.0.2:7946"), identity)
        with pytest.raises(Forbidden):
            await here.serve(messages.PromoteMember(member=1), identity)
    assert here.voters == [NODE]


async def test_the_member_of_another_node_is_not_promoted(here: Here) -> None:
    await here.found(2)
    await here.wish("node3", Role.MANAGER)
    answer = await added(here, 3)
    with pytest.raises(NotFound):
        await here.serve(messages.PromoteMember(member=answer.member), manager(2))


@pytest.mark.parametrize(
    "url",
    ["", "http://10.0.0.3:7946", "https://10.0.0.3", "https://10.0.0.3:0", "https://10.0.0.3:99999",
     "https://10.0.0.3:7946/x", "https://a,b=https://c:1", "https://10.0.0.3:7946\n"],
)  # fmt: skip
async def test_bad_peer_urls(here: Here, url: str) -> None:
    await here.found(2)
    with pytest.raises(InvalidParameter, match="peer URL"):
        await here.serve(messages.AddMember(peer_url=url), manager(2))


async def test_the_address_of_another_manager_is_taken(here: Here) -> None:
    await here.found(2)
    await here.wish("node3", Role.MANAGER)
    with pytest.raises(Conflict, match="in use by node node1"):
        await here.serve(messages.AddMember(peer_url="https://10.0.0.1:7946"), manager(3))


async def test_no_manager_is_added_while_quorum_is_lost(here: Here) -> None:
    await here.found(3, present=1)
    await here.wish("node4", Role.MANAGER)
    with pytest.raises(WrongState, match=r"loss of quorum: of 3 managers 1 are reachable, node2, node3 not"):
        await added(here, 4)


@pytest.mark.parametrize(
    ("managers", "present", "leaves", "fine"),
    [
        (3, 3, 2, True),
        (2, 2, 2, True),
        (3, 2, 2, False),
        (3, 2, 3, True),
        (5, 3, 2, False),
        (5, 4, 2, True),
        (5, 3, 5, True),
    ],
)
async def test_guards_of_removals(here: Here, managers: int, present: int, leaves: int, fine: bool) -> None:
    await here.found(managers, present=present)
    await here.wish(f"node{leaves}", Role.WORKER)
    await here.step()
    assert (f"node{leaves}" not in here.voters) is fine
    if not fine:
        with pytest.raises(WrongState, match="loss of quorum"):
            await here.members.remove(f"node{leaves}")
        await here.members.remove(f"node{leaves}", force=True)
        assert f"node{leaves}" not in here.voters


async def test_the_last_manager_stays(here: Here) -> None:
    await here.found(1)
    await here.wish(NODE, Role.WORKER)
    await here.step()
    with pytest.raises(WrongState, match="last manager"):
        await here.members.remove(NODE, force=True)
    assert here.voters == [NODE]


async def test_a_leader_hands_over_and_is_removed_by_the_next_one(here: Here) -> None:
    await here.found(3, present=3)
    await here.wish(NODE, Role.WORKER)
    await here.step()
    assert here.voters == ["node1", "node2", "node3"]
    assert here.etcd.cluster.leader in (2, 3) and here.etcd.cluster.term > 1
    next_one = Members(here.store, here.etcd.peer(here.etcd.cluster.leader), here.clock, "node2")
    await next_one.remove(NODE)
    assert here.voters == ["node2", "node3"]
    await here.clock.settle()
    assert here.store.record(records.MANAGERS, NODE) is None and not here.store.all(records.CLAIMS)


async def test_a_leader_without_the_raft_leader_gives_up_its_key(here: Here) -> None:
    """The raft leader's process had hung, and raft's term is the same since."""
    await here.found(3, present=3)
    here.etcd.peer(2).elect(2)
    await here.wish(NODE, Role.WORKER)
    await here.store.commit([Put(records.LEADER, "", records.Leader(NODE, here.etcd.cluster.term))])
    await here.step()
    assert here.store.record(records.LEADER) is None and here.etcd.cluster.leader == 2
    await here.store.commit([Put(records.LEADER, "", records.Leader("node2", here.etcd.cluster.term))])
    await here.members.step_aside()
    assert here.store.record(records.LEADER) is not None  # not its own


async def test_a_removal_holds_nothing_up(here: Here) -> None:
    """Another manager holds the lock of the members: the step ends, and there is one removal."""
    await here.found(3, present=3)
    await here.wish("node2", Role.WORKER)
    other = Members(here.store, here.etcd.peer(3), here.clock, "node3")
    acting = Acting(here.store, here.clock, Compare(records.LEADER, ""))
    async with other.exclusive():
        await here.loop.step(acting)
        waiting = here.loop.removing
        await here.clock.settle()
        await here.loop.step(acting)
        assert waiting is not None and not waiting.done() and here.loop.removing is waiting
        assert here.voters == ["node1", "node2", "node3"]
    await here.clock.advance(1)
    assert waiting.done() and here.voters == ["node1", "node3"]


async def test_a_demotion_that_must_wait_is_done_when_it_can_be(here: Here) -> None:
    await here.found(3, present=2)
    await here.wish("node2", Role.WORKER)
    await here.step()
    assert here.voters == ["node1", "node2", "node3"]
    due = here.loop.due()
    assert due is not None and due <= here.clock.monotonic() + 1
    await here.store.commit([here.presence(3)])
    assert here.loop.due() == 0
    await here.step()
    assert here.voters == ["node1", "node3"]


async def test_a_leaving_manager_becomes_a_worker(here: Here) -> None:
    await here.found(3)
    assert isinstance(await here.serve(messages.RemoveMember(force=True), manager(2)), Done)
    record = here.store.record(records.NODES, "node2")
    assert record is not None and record.role is Role.WORKER
    assert here.voters == ["node1", "node3"]
    assert isinstance(await here.serve(messages.RemoveMember(), manager(2)), Done), "again"


async def test_members_of_removed_nodes_go(here: Here) -> None:
    await here.found(3)
    await here.store.commit([Delete(records.NODES, "node3")])
    assert here.loop.due() == 0
    await here.step()
    assert here.voters == ["node1", "node2"]


async def test_stuck_learners_go(here: Here) -> None:
    await here.found(1)
    await here.wish("node2", Role.MANAGER)
    answer = await added(here, 2)

    async def behind(member: int) -> None:
        raise EtcdError("etcdserver: can only promote a learner member which is in sync with leader")

    here.etcd.promote = behind  # type: ignore[method-assign]
    for _ in range(5):
        await here.clock.advance(30)
        with pytest.raises(Unavailable, match="in sync"):
            await here.serve(messages.PromoteMember(member=answer.member), manager(2))
        await here.step()
        assert len(here.etcd.cluster.members) == 2, "its node is alive"
    await here.clock.advance(61)
    await here.step()
    assert here.voters == [NODE] and len(here.etcd.cluster.members) == 1
    await here.clock.settle()
    assert not here.store.all(records.CLAIMS)


async def test_a_learner_that_no_record_knows_goes(here: Here) -> None:
    """The manager that added it died before it wrote the claim."""
    await here.found(1)
    await here.etcd.add_learner("https://10.0.0.9:7946")
    await here.step()
    assert len(here.etcd.cluster.members) == 1


async def test_changes_are_made_one_after_another(here: Here) -> None:
    """Another manager holds the lock; its lease ends with it."""
    await here.found(3)
    lease = await here.etcd.grant(20)
    await here.store.commit([Put(records.CLAIMS, members.LOCK, Claim("node2"), lease)])
    waiting = asyncio.create_task(here.members.remove("node3"))
    await here.clock.advance(5)
    assert not waiting.done()
    await here.clock.advance(6)
    with pytest.raises(Unavailable, match="manager node2 changes"):
        await waiting
    waiting = asyncio.create_task(here.members.remove("node3"))
    await here.clock.advance(9.5)
    await waiting
    assert here.voters == ["node1", "node2"]


async def test_bars_are_dropped_when_no_certificate_is_valid_any_more(here: Here) -> None:
    await here.found()
    await here.store.commit([here.authority.bar("gone")])
    await here.step()
    assert here.authority.barred("gone")
    here.clock.set(121 * 24 * 3600)
    await here.step()
    assert not here.authority.barred("gone")


async def test_nodes_that_never_connect_are_removed(here: Here) -> None:
    """The joining engine was killed before it kept its certificate."""
    await here.found()
    connected = NodeData(description=NodeDescription(hostname="host"))
    await here.store.commit([Put(records.NODE_DATA, NODE, connected)])
    first, second, third = [await here.join(keys.new_key(), here.cluster.worker_token) for _ in range(3)]
    await here.store.commit([Put(records.NODE_DATA, first.node, connected)])
    # as the leader writes of a node that has not connected within six periods
    await here.store.commit([Put(records.NODE_DATA, third.node, NodeData(state=NodeState.DOWN))])
    await here.clock.advance(3599)
    await here.step()
    assert len(here.store.all(records.NODES)) == 4
    await here.clock.advance(2)
    await here.step()
    assert sorted(here.store.all(records.NODES)) == sorted([NODE, first.node])
    assert sorted(here.store.all(records.NODE_DATA)) == sorted([NODE, first.node])
    assert here.authority.barred(second.node) and here.authority.barred(third.node)


async def test_the_lock_is_kept_while_a_change_takes_long(here: Here) -> None:
    await here.found(2)
    other = Members(here.store, here.etcd.peer(), here.clock, "node2")
    async with here.members.exclusive():
        await here.clock.advance(30)
        waiting = asyncio.create_task(other.remove("node9"))
        await here.clock.advance(5)
        assert not waiting.done()
    await here.clock.advance(1)
    await waiting
    await here.clock.advance(20)
    assert not here.store.all(records.CLAIMS) and not here.etcd.cluster.leases


def test_quorum() -> None:
    expected: Sequence[int] = (1, 2, 2, 3, 3, 4, 4)
    assert [members.quorum(count) for count in range(1, 8)] == list(expected)
