"""The authority: founding, tokens, identities, bars, renewals of expired certificates, rotations,
external CAs, secrets.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

import msgspec
import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import Forbidden, InvalidParameter, ServerError, Unavailable
from engine.manager import ca, keys, records, tokens
from engine.manager.ca import LATE, Authority, Founding, found
from engine.manager.certificates import (
    Root,
    Subject,
    certificates,
    digest,
    issued_by,
    new_root,
    request_key,
    subject_of,
)
from engine.manager.records import CAKey, Cluster, NodeRecord
from engine.manager.store import Put, Store
from engine.swarm_session.clock import SECOND
from engine.swarm_session.states import Role
from engine.wire.swarm import CAConfig, ExternalCA, SwarmSpec
from tests.support.fakes.clock import FakeClock

NODE = "n" * 25
HOUR = 3600 * SECOND


def der(pem: str) -> bytes:
    return base64.b64decode("".join(pem.split("-----")[2].split()))


async def founded(store: Store, clock: FakeClock, config: CAConfig | None = None) -> tuple[Authority, Founding]:
    made = await found(SwarmSpec(ca_config=config or CAConfig()), clock, node=NODE, address="10.0.0.1:2377")
    record = NodeRecord(created=0, updated=0, role=Role.MANAGER)
    await store.commit([*made.changes, Put(records.NODES, NODE, record)])
    return Authority(store, clock), made


async def reconfigured(authority: Authority, store: Store, config: CAConfig) -> Cluster:
    """As an update of the swarm does it."""
    old = authority.cluster
    spec = msgspec.structs.replace(old.spec, ca_config=config)
    new, changes, compares = await authority.reconfigure(old, msgspec.structs.replace(old, spec=spec))
    await store.commit([Put(records.CLUSTER, "", new), *changes], compares)
    return new


def key_of(store: Store) -> CAKey:
    return store.record(records.CA_KEY) or CAKey("")


# --- founding and tokens --------------------------------------------------------------------------


async def test_founding(store: Store, clock: FakeClock) -> None:
    authority, made = await founded(store, clock)
    (certificate,) = certificates(made.certificate)
    assert subject_of(certificate) == Subject(NODE, Role.MANAGER, made.cluster.id)
    assert issued_by(certificate, Root(made.cluster.root).certificate)
    assert keys.check(made.key, made.certificate)["node"] == NODE
    assert len(made.data_key.key) == 32
    assert authority.trusted() == authority.root() == made.cluster.root
    assert made.cluster.worker_token != made.cluster.manager_token
    for token in (made.cluster.worker_token, made.cluster.manager_token):
        assert tokens.pins(tokens.parse(token), made.cluster.root)
    info = authority.tls_info()
    assert info.trust_root == made.cluster.root and info.cert_issuer_subject and info.cert_issuer_public_key


async def test_two_swarms_have_nothing_in_common(clock: FakeClock) -> None:
    one, two = [await found(SwarmSpec(), clock, node=NODE, address="") for _ in range(2)]
    assert one.cluster.id != two.cluster.id
    assert one.cluster.root != two.cluster.root and one.ca_key != two.ca_key and one.data_key != two.data_key


async def test_the_token_decides_about_the_role(store: Store, clock: FakeClock) -> None:
    authority, made = await founded(store, clock)
    assert authority.role_of(made.cluster.worker_token) is Role.WORKER
    assert authority.role_of(made.cluster.manager_token) is Role.MANAGER
    wrong = tokens.token(made.cluster.root, tokens.new_secret())
    for text in ("", "x", wrong, made.cluster.worker_token[:-1]):
        with pytest.raises(InvalidParameter, match="join token is necessary") as refused:
            authority.role_of(text)
        assert text == "" or len(text) < 2 or text not in refused.value.message


async def test_founding_with_a_root_of_the_operator(store: Store, clock: FakeClock) -> None:
    pem, key = new_root(clock.now())
    authority, made = await founded(store, clock, CAConfig(signing_ca_cert=pem, signing_ca_key=key))
    assert made.cluster.root == pem
    assert key_of(store).key == key
    assert authority.cluster.spec.ca_config.signing_ca_key == "", "never stored in the settings"
    assert authority.cluster.spec.ca_config.signing_ca_cert == pem


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (CAConfig(signing_ca_key="x"), "SigningCACert must be given"),
        (CAConfig(signing_ca_cert="x", signing_ca_key="x"), "PEM"),
        (CAConfig(signing_ca_cert=new_root(FakeClock().now())[0]), "external CA with this CACert is needed"),
    ],
)
async def test_founding_refuses(clock: FakeClock, config: CAConfig, words: str) -> None:
    with pytest.raises(InvalidParameter, match=words):
        await found(SwarmSpec(ca_config=config), clock, node=NODE, address="")


# --- identities -----------------------------------------------------------------------------------


async def test_identities(store: Store, clock: FakeClock) -> None:
    authority, made = await founded(store, clock)
    csr = keys.request(keys.new_key())
    identity = authority.identify(der(await authority.sign(csr, "worker1", Role.WORKER)))
    assert (identity.node, identity.role, identity.swarm) == ("worker1", Role.WORKER, made.cluster.id)
    assert identity.certificate == digest(made.cluster.root)
    assert not authority.should_renew(identity)
    assert authority.identify(der(made.certificate)).role is Role.MANAGER

    other = await found(SwarmSpec(), clock, node=NODE, address="")
    with pytest.raises(Forbidden, match="another swarm"):
        authority.identify(der(other.certificate))
    forged_root = Root(*new_root(clock.now()))
    forged = forged_root.issue(
        request_key(csr), Subject(NODE, Role.MANAGER, made.cluster.id), address="", now=clock.now(), lifetime=HOUR
    )
    with pytest.raises(Forbidden, match="not issued by this swarm"):
        authority.identify(der(forged))
    with pytest.raises(Forbidden, match=r"OU|one CN"):
        authority.identify(der(made.cluster.root))
    for garbage in (b"", b"x", der(forged)[:-3]):
        with pytest.raises(Forbidden):
            authority.identify(garbage)


async def test_removed_nodes_are_refused(store: Store, clock: FakeClock) -> None:
    authority, made = await founded(store, clock)
    identity = authority.identify(der(made.certificate))
    await authority.admit(identity)
    await store.commit([authority.bar(NODE)])
    with pytest.raises(Forbidden, match="removed"):
        await authority.admit(identity)
    assert authority.barred(NODE)
    with pytest.raises(Forbidden, match="removed"):
        await authority.admit(identity._replace(node="never seen"))


async def silent(timeout: float = 5.0) -> str:
    """In place of `Store.current`: etcd does not answer."""
    return "the swarm has lost its quorum"


async def test_another_manager_is_asked_before_a_node_is_refused(
    store: Store, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache of this manager may be behind the one that let the node join. Without an answer a
    node is refused only if it is known to be removed.
    """
    authority, made = await founded(store, clock)
    identity = authority.identify(der(made.certificate))._replace(node="new")
    record = NodeRecord(created=0, updated=0)
    with monkeypatch.context() as patched:
        patched.setattr(store, "current", silent)
        with pytest.raises(Unavailable, match="lost its quorum"):
            await authority.admit(identity)
    store.etcd.put_now("/n/new", records.encode(record))  # type: ignore[attr-defined]
    await authority.admit(identity)
    await store.commit([authority.bar("new")])
    monkeypatch.setattr(store, "current", silent)
    with pytest.raises(Forbidden, match="removed"):
        await authority.admit(identity)


async def test_another_manager_is_asked_before_a_root_is_refused(
    store: Store, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache of this manager may be behind a rotation. Without an answer it does not refuse."""
    authority, made = await founded(store, clock)
    other = Root(*new_root(clock.now()))
    public = request_key(keys.request(keys.new_key()))
    subject = Subject(NODE, Role.MANAGER, made.cluster.id)
    renewed = der(other.issue(public, subject, address="", now=clock.now(), lifetime=HOUR))
    with pytest.raises(Forbidden, match="not issued by this swarm"):
        await authority.known(renewed)
    with monkeypatch.context() as patched:
        patched.setattr(store, "current", silent)
        with pytest.raises(Unavailable, match="lost its quorum"):
            await authority.known(renewed)
        assert (await authority.known(der(made.certificate))).node == NODE
    rotated = msgspec.structs.replace(made.cluster, rotation=other.pem)
    store.etcd.put_now("/swarm", records.encode(rotated))  # type: ignore[attr-defined]
    assert (await authority.known(renewed)).certificate == other.digest


# --- renewals -------------------------------------------------------------------------------------


async def test_an_expired_certificate_renews_with_a_proof(store: Store, clock: FakeClock) -> None:
    authority, _ = await founded(store, clock, CAConfig(node_cert_expiry=HOUR))
    key = keys.new_key()
    certificate = await authority.sign(keys.request(key), "worker1", Role.WORKER)
    csr = keys.request(keys.new_key())
    proof = keys.signature(key, csr)
    clock.set(3 * 3600)
    assert authority.expired(csr, certificate, proof).node == "worker1"
    with pytest.raises(Forbidden, match="signature"):
        authority.expired(csr, certificate, keys.signature(keys.new_key(), csr))
    with pytest.raises(Forbidden, match="signature"):
        authority.expired(keys.request(keys.new_key()), certificate, proof)
    with pytest.raises(Forbidden, match="signature"):
        authority.expired(csr, certificate, b"")
    for garbage in ("", "x", authority.root()):
        with pytest.raises(Forbidden):
            authority.expired(csr, garbage, proof)
    clock.set((LATE + 2 * HOUR) // SECOND)
    with pytest.raises(Forbidden, match="expired more than 30 days ago"):
        authority.expired(csr, certificate, proof)


async def test_the_life_of_certificates(store: Store, clock: FakeClock) -> None:
    authority, _ = await founded(store, clock)
    csr = keys.request(keys.new_key())
    assert authority.identify(der(await authority.sign(csr, "x", Role.WORKER))).until - clock.now() == 90 * 24 * HOUR
    await reconfigured(authority, store, CAConfig(node_cert_expiry=HOUR))
    assert authority.identify(der(await authority.sign(csr, "x", Role.WORKER))).until - clock.now() == HOUR


# --- rotations ------------------------------------------------------------------------------------


async def test_force_rotate_begins_a_rotation(store: Store, clock: FakeClock) -> None:
    authority, made = await founded(store, clock)
    old = authority.identify(der(made.certificate))
    cluster = await reconfigured(authority, store, CAConfig(force_rotate=1))
    assert cluster.root == made.cluster.root and cluster.rotation and cluster.rotation != cluster.root
    assert (cluster.worker_token, cluster.manager_token) == (made.cluster.worker_token, made.cluster.manager_token)
    assert authority.trusted() == cluster.root + cluster.rotation
    assert authority.root() == made.cluster.root, "what the tokens name"
    assert authority.should_renew(old)
    assert not authority.should_renew(old._replace(certificate=""))
    chain = certificates(await authority.sign(keys.request(keys.new_key()), "worker1", Role.WORKER))
    assert len(chain) == 2
    assert issued_by(chain[0], Root(cluster.rotation).certificate)
    assert issued_by(chain[1], Root(cluster.root).certificate)
    new = authority.identify(chain[0].public_bytes(Encoding.DER))
    assert not authority.should_renew(new)
    assert authority.identify(der(made.certificate)) == old, "the old ones are good until they are renewed"


async def test_the_same_force_rotate_changes_nothing(store: Store, clock: FakeClock) -> None:
    authority, _ = await founded(store, clock)
    first = await reconfigured(authority, store, CAConfig(force_rotate=1))
    assert await reconfigured(authority, store, CAConfig(force_rotate=1)) == first
    second = await reconfigured(authority, store, CAConfig(force_rotate=2))
    assert second.rotation != first.rotation and second.root == first.root


async def test_rotation_to_a_root_of_the_operator_and_back(store: Store, clock: FakeClock) -> None:
    authority, made = await founded(store, clock)
    pem, key = new_root(clock.now())
    config = CAConfig(signing_ca_cert=pem, signing_ca_key=key)
    cluster = await reconfigured(authority, store, config)
    assert cluster.rotation == pem and key_of(store) == CAKey(made.ca_key.key, key)
    assert cluster.spec.ca_config.signing_ca_key == ""
    assert await reconfigured(authority, store, CAConfig(signing_ca_cert=pem)) == cluster, "as clients send it again"

    back = await reconfigured(authority, store, CAConfig(signing_ca_cert=made.cluster.root))
    assert back.rotation == "" and back.cross_signed == "" and key_of(store) == CAKey(made.ca_key.key)
    assert (back.abandoned, back.issuer_changes) == ((pem,), 1)
    assert authority.trusted() == made.cluster.root + pem, "until no node can have a certificate of it"
    public, subject = request_key(keys.request(keys.new_key())), Subject("worker1", Role.WORKER, back.id)
    renewed = der(Root(pem, key).issue(public, subject, address="", now=clock.now(), lifetime=HOUR))
    assert authority.should_renew(authority.identify(renewed)), "those that had renewed already must do so again"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (CAConfig(signing_ca_key="x"), "SigningCACert must be given"),
        (CAConfig(signing_ca_cert="x"), "SigningCACert"),
        (CAConfig(signing_ca_cert=new_root(FakeClock().now())[0]), "external CA with this CACert is needed"),
        (
            CAConfig(signing_ca_cert=new_root(FakeClock().now())[0], signing_ca_key=keys.new_key()),
            "not that of its key",
        ),
        (CAConfig(signing_ca_cert=new_root(0)[0]), "not now"),
        (CAConfig(force_rotate=1, external_cas=[ExternalCA(url="http://x")]), "SigningCACert must be given"),
        (CAConfig(external_cas=[ExternalCA(url="http://x", ca_cert="x")]), "PEM"),
        (
            CAConfig(external_cas=[ExternalCA(url="http://x", ca_cert=new_root(FakeClock().now())[0])]),
            "none has the CACert",
        ),
    ],
)
async def test_settings_that_do_not_fit_change_nothing(
    store: Store, clock: FakeClock, config: CAConfig, words: str
) -> None:
    authority, made = await founded(store, clock)
    with pytest.raises(InvalidParameter, match=words):
        await reconfigured(authority, store, config)
    assert authority.cluster == made.cluster and key_of(store) == made.ca_key


# --- external CAs ---------------------------------------------------------------------------------


class FakeExternal:
    """An external CA with the root's key."""

    def __init__(self, pem: str, key: str, clock: FakeClock) -> None:
        self.root, self.clock = Root(pem, key), clock
        self.asked: list[tuple[list[str], Subject]] = []

    async def sign(
        self, servers: Sequence[ExternalCA], root: Root, csr: str, subject: Subject, address: str, trusted: str
    ) -> str:
        self.asked.append(([server.url for server in servers], subject))
        if servers[0].url == "http://broken":
            raise ServerError("no external CA has signed the certificate")
        return self.root.issue(request_key(csr), subject, address=address, now=self.clock.now(), lifetime=HOUR)


async def test_with_an_external_ca_each_request_goes_there(store: Store, clock: FakeClock) -> None:
    pem, key = new_root(clock.now())
    external = FakeExternal(pem, key, clock)
    spec = SwarmSpec(ca_config=CAConfig(external_cas=[ExternalCA(url="http://ca", ca_cert=pem)]))
    made = await found(spec, clock, node=NODE, address="", external=external.sign)
    assert made.cluster.root == pem and made.ca_key == CAKey("")
    await store.commit(made.changes)
    authority = Authority(store, clock, external=external.sign)
    await authority.sign(keys.request(keys.new_key()), "worker1", Role.WORKER)
    assert [(urls, subject.node) for urls, subject in external.asked] == [
        (["http://ca"], NODE),
        (["http://ca"], "worker1"),
    ]


async def test_the_own_key_does_not_replace_an_external_ca(store: Store, clock: FakeClock) -> None:
    authority, made = await founded(store, clock)
    external = FakeExternal(made.cluster.root, made.ca_key.key, clock)
    authority = Authority(store, clock, external=external.sign)
    await reconfigured(authority, store, CAConfig(external_cas=[ExternalCA(url="http://broken")]))
    with pytest.raises(ServerError, match="no external CA"):
        await authority.sign(keys.request(keys.new_key()), "worker1", Role.WORKER)


# --- secrets --------------------------------------------------------------------------------------


@given(st.binary(max_size=2000))
def test_seal_and_unseal(data: bytes) -> None:
    class Only:
        def record(self, kind: object, key: str = "") -> records.DataKey:
            return records.DataKey(b"k" * 32)

    authority = Authority(Only(), FakeClock())  # type: ignore[arg-type]
    sealed = authority.seal("one", data)
    assert authority.unseal("one", sealed) == data
    assert len(data) < 8 or data not in sealed
    assert sealed != authority.seal("one", data), "another nonce each time"
    for changed in (sealed[:-1], bytes([sealed[0] ^ 1]) + sealed[1:], sealed[:-1] + bytes([sealed[-1] ^ 1]), b""):
        with pytest.raises(ServerError, match="cannot be decrypted"):
            authority.unseal("one", changed)
    with pytest.raises(ServerError, match="cannot be decrypted"):
        authority.unseal("two", sealed)


async def test_before_the_records_are_loaded_nothing_is_decided(store: Store, clock: FakeClock) -> None:
    authority = Authority(store, clock)
    for question in (authority.trusted, lambda: authority.seal("x", b""), lambda: authority.role_of("x" * 3)):
        with pytest.raises((Unavailable, InvalidParameter)):
            question()
    assert ca.EXPIRY == 90 * 24 * HOUR
