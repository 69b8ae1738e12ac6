"""CA rotations to their end, and the upkeep of a manager's own trust and certificate."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from engine.errors import ServerError, Unavailable
from engine.manager import keys, records, renewal, tokens
from engine.manager.ca import Authority, found
from engine.manager.certificates import certificates, digest, issued_by, nanoseconds
from engine.manager.identity import Identity
from engine.manager.loops import Acting
from engine.manager.records import CAKey, NodeData, NodeRecord
from engine.manager.renewal import Upkeep, rescue
from engine.manager.rotation import RotationLoop
from engine.manager.store import Compare, Put, Store
from engine.manager.tls import Credentials
from engine.swarm_session.clock import SECOND
from engine.swarm_session.states import Role
from engine.wire.swarm import CAConfig, SwarmSpec
from tests.support.fakes.clock import FakeClock

HOUR = 3600 * SECOND
MANAGER, WORKER = "manager1", "worker1"


class Here:
    """A swarm of one manager, whose files are in `directory`, and one worker."""

    def __init__(self, store: Store, clock: FakeClock, directory: Path) -> None:
        self.store, self.clock = store, clock
        self.authority = Authority(store, clock)
        self.credentials = Credentials(directory)
        self.loop = RotationLoop(store, clock)
        store.subscribe(self.loop.changed)
        self.of_etcd = ""

    async def found(self, expiry: int = 90 * 24 * HOUR) -> None:
        spec = SwarmSpec(ca_config=CAConfig(node_cert_expiry=expiry))
        made = await found(spec, self.clock, node=MANAGER, address="10.0.0.1:2377")
        self.credentials.install(roots=made.cluster.root, certificate=made.certificate, key=made.key)
        self.of_etcd = made.cluster.root
        await self.store.commit(made.changes)
        for node, role in ((MANAGER, Role.MANAGER), (WORKER, Role.WORKER)):
            await self.store.commit([Put(records.NODES, node, NodeRecord(created=0, updated=0, role=role))])
            await self.has(node, digest(made.cluster.root))
        self.upkeep = Upkeep(
            self.store,
            self.clock,
            self.authority,
            self.credentials,
            node=MANAGER,
            address="10.0.0.1:2377",
            of_etcd=lambda: self.of_etcd,
        )

    async def has(self, node: str, root: str, issuer_changes: int = 0) -> None:
        """The node has connected with a certificate of this root."""
        data = NodeData(certificate=root, issuer_changes=issuer_changes)
        await self.store.commit([Put(records.NODE_DATA, node, data)])

    async def rotate(self, count: int = 1, signing_ca_cert: str = "") -> None:
        old = self.authority.cluster
        config = msgspec.structs.replace(old.spec.ca_config, force_rotate=count, signing_ca_cert=signing_ca_cert)
        spec = msgspec.structs.replace(old.spec, ca_config=config)
        new, changes, compares = await self.authority.reconfigure(old, msgspec.structs.replace(old, spec=spec))
        await self.store.commit([Put(records.CLUSTER, "", new), *changes], compares)

    async def step(self) -> None:
        await self.loop.step(Acting(self.store, self.clock, Compare(records.LEADER, "")))


@pytest.fixture
def here(store: Store, clock: FakeClock, tmp_path: Path) -> Here:
    return Here(store, clock, tmp_path)


async def test_a_rotation_ends_when_each_node_has_renewed(here: Here) -> None:
    await here.found()
    assert here.loop.due() is None
    old = here.authority.cluster
    await here.rotate()
    assert here.loop.due() == 0
    both, new = here.authority.trusted(), digest(here.authority.cluster.rotation)

    await here.step()
    assert here.loop.waits_for(here.authority.cluster) == [MANAGER, WORKER]
    await here.has(WORKER, new)
    await here.has(MANAGER, new)
    await here.step()
    assert here.loop.waits_for(here.authority.cluster) == [MANAGER], "its etcd trusts the old root alone"
    with pytest.raises(Unavailable):
        await here.upkeep.trust()
    assert here.credentials.roots() == both
    here.of_etcd = here.credentials.roots()
    await here.upkeep.trust()
    await here.step()

    done = here.authority.cluster
    assert done.root == both.removeprefix(old.root) and not done.rotation and not done.cross_signed
    assert here.store.record(records.CA_KEY) == CAKey((here.store.record(records.CA_KEY) or CAKey("")).key, "")
    assert done.worker_token != old.worker_token and done.manager_token != old.manager_token
    assert tokens.pins(tokens.parse(done.worker_token), done.root)
    assert here.loop.due() is None
    await here.upkeep.trust()
    assert here.credentials.roots() == done.root, "the old root is not trusted any more"
    assert not here.store.all(records.CLAIMS), "nothing is left of the rotation"
    (issued,) = certificates(await here.authority.sign(keys.request(keys.new_key()), WORKER, Role.WORKER))
    assert issued_by(issued, certificates(done.root)[0])


async def test_a_node_that_never_came_holds_a_rotation_up(here: Here) -> None:
    await here.found()
    await here.rotate()
    record = NodeRecord(created=0, updated=0)
    await here.store.commit([Put(records.NODES, "never", record)])
    assert "never" in here.loop.waits_for(here.authority.cluster)


async def test_a_second_rotation_replaces_the_first(here: Here) -> None:
    await here.found()
    await here.rotate(1)
    first = here.authority.cluster
    await here.has(WORKER, digest(first.rotation))
    await here.rotate(2)
    second = here.authority.cluster
    assert second.root == first.root and second.rotation not in (first.rotation, "")
    assert here.loop.waits_for(second) == [MANAGER, WORKER]
    assert here.authority.trusted() == second.root + second.rotation + first.rotation
    assert here.authority.should_renew(Identity(WORKER, Role.WORKER, digest(first.rotation)))
    here.of_etcd = here.authority.trusted()
    await here.upkeep.trust()
    for node in (MANAGER, WORKER):
        await here.has(node, digest(second.rotation))
    await here.step()
    assert here.loop.waits_for(here.authority.cluster) == [MANAGER, WORKER], "an answer may be under way to them"
    for node in (MANAGER, WORKER):
        await here.has(node, digest(second.rotation), issuer_changes=1)
    await here.step()
    assert here.authority.trusted() == second.rotation
    assert here.loop.due() is None


async def test_the_way_back_ends_when_each_node_has_renewed(here: Here) -> None:
    """The tokens stay, because they name the old root, and so does its key."""
    await here.found()
    await here.rotate(1)
    first, key = here.authority.cluster, here.store.record(records.CA_KEY)
    assert key is not None
    await here.has(WORKER, digest(first.rotation))
    await here.rotate(1, signing_ca_cert=first.root)
    assert here.loop.due() == 0
    assert here.authority.trusted() == first.root + first.rotation
    await here.upkeep.trust()
    assert not here.store.all(records.CLAIMS), "etcd trusts the old root, and has always done so"
    await here.step()
    assert here.loop.waits_for(here.authority.cluster) == [MANAGER, WORKER]
    for node in (MANAGER, WORKER):
        await here.has(node, digest(first.root), issuer_changes=1)
    await here.step()
    done = here.authority.cluster
    assert here.authority.trusted() == first.root and not done.abandoned
    assert (done.worker_token, done.manager_token) == (first.worker_token, first.manager_token)
    assert here.store.record(records.CA_KEY) == CAKey(key.key)
    assert here.loop.due() is None


async def test_a_new_leader_goes_on(here: Here) -> None:
    await here.found()
    await here.rotate()
    other = RotationLoop(here.store, here.clock)
    assert other.due() is None
    other.take_over()
    assert other.due() == 0


# --- the own certificate --------------------------------------------------------------------------


async def test_the_manager_renews_only_when_the_daemon_has_not(here: Here) -> None:
    await here.found(expiry=10 * HOUR)
    first = here.credentials.certificate()
    for hours in (0, 8):
        here.clock.set(hours * 3600)
        await here.upkeep.renew()
        assert here.credentials.certificate() == first
    here.clock.set(9 * 3600)
    await here.upkeep.renew()
    (renewed,) = certificates(here.credentials.certificate())
    assert nanoseconds(renewed.not_valid_after_utc) == here.clock.now() + 10 * HOUR
    assert "10.0.0.1" in str(renewed.extensions)
    keys.check(here.credentials.key_file.read_text(), here.credentials.certificate())


async def test_a_manager_to_be_demoted_is_not_renewed(here: Here) -> None:
    await here.found(expiry=10 * HOUR)
    first = here.credentials.certificate()
    await here.store.commit([Put(records.NODES, MANAGER, NodeRecord(created=0, updated=0, role=Role.WORKER))])
    here.clock.set(20 * 3600)
    await here.upkeep.renew()
    assert here.credentials.certificate() == first


async def test_rescue_renews_without_etcd(here: Here) -> None:
    """All managers were off until their certificates had expired."""
    await here.found(expiry=HOUR)
    (here.credentials.directory / "etcd").mkdir()
    await here.upkeep.keep()
    kept = here.credentials.directory / renewal.KEPT
    assert kept.stat().st_mode & 0o777 == 0o600
    first = here.credentials.certificate()
    rescue(here.credentials, here.clock, node=MANAGER, address="10.0.0.1:2377")
    assert here.credentials.certificate() == first, "it has not expired"
    here.clock.set(100 * 3600)
    rescue(here.credentials, here.clock, node=MANAGER, address="10.0.0.1:2377")
    (renewed,) = certificates(here.credentials.certificate())
    assert nanoseconds(renewed.not_valid_after_utc) > here.clock.now()
    assert issued_by(renewed, certificates(here.authority.cluster.root)[0])
    assert here.credentials.roots() == here.authority.trusted()


async def test_rescue_in_the_middle_of_a_rotation(here: Here) -> None:
    await here.found(expiry=HOUR)
    (here.credentials.directory / "etcd").mkdir()
    await here.rotate()
    await here.upkeep.keep()
    here.clock.set(100 * 3600)
    rescue(here.credentials, here.clock, node=MANAGER, address="")
    chain = certificates(here.credentials.certificate())
    assert len(chain) == 2 and issued_by(chain[0], certificates(here.authority.cluster.rotation)[0])


@pytest.mark.parametrize("content", [None, b"", b"garbage"])
async def test_rescue_without_a_copy(here: Here, content: bytes | None) -> None:
    await here.found(expiry=HOUR)
    (here.credentials.directory / "etcd").mkdir()
    if content is not None:
        (here.credentials.directory / renewal.KEPT).write_bytes(content)
    here.clock.set(100 * 3600)
    with pytest.raises(ServerError, match="no copy of the CA's key"):
        rescue(here.credentials, here.clock, node=MANAGER, address="")


async def test_the_task_follows_changes_and_ends(here: Here) -> None:
    await here.found()
    (here.credentials.directory / "etcd").mkdir()
    here.upkeep.start()
    await here.clock.settle()
    await here.rotate()
    for _ in range(100):
        await here.clock.advance(renewal.AGAIN)
        if here.credentials.roots() == here.authority.trusted():
            break
        await asyncio.sleep(0.01)
    assert here.credentials.roots() == here.authority.trusted()
    await here.upkeep.close()
