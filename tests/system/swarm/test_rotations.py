"""Rotations of the CA that meet others, nodes that are down, and kills. Every node stays in the
swarm, and in the end one root is trusted. Versions that knew two roots only could lose a swarm by
this; a forced new cluster repairs it.

One rotation alone is in `test_joining.py`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import pytest

from engine.manager import records
from engine.manager.certificates import Root, certificates, issued_by, new_root
from engine.manager.etcd import EtcdClient
from engine.manager.kv import EtcdError, Guard, PutKey
from engine.manager.records import CAKey, Cluster
from tests.support import PATIENCE
from tests.support.engine.harness import until
from tests.support.swarm.clusters import VERSION, Node
from tests.support.swarm.clusters import Cluster as Hosts

pytestmark = pytest.mark.nightly

CONTAINERS = 4
RENEWED = 60.0
ENDED = 180.0
"""Seconds for a rotation. Managers start their etcd again one after the other."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Hosts]:
    """Three managers and a worker."""
    with Hosts(4) as made:
        made.form(3)
        made[0].service("steady", replicas=CONTAINERS)
        made[0].until_running("steady", CONTAINERS)
        yield made


# --- what the nodes have --------------------------------------------------------------------------


async def _records(node: Node) -> tuple[Cluster, CAKey]:
    etcd = EtcdClient(str(node.run / "swarm" / "etcd:0"))
    try:
        cluster = records.CLUSTER.decode((await etcd.range("/swarm", timeout=10 * PATIENCE)).items[0].value)
        return cluster, records.CA_KEY.decode((await etcd.range("/ca/key", timeout=10 * PATIENCE)).items[0].value)
    finally:
        await etcd.close()


def record_of(node: Node) -> tuple[Cluster, CAKey]:
    """The swarm and the keys of its CA, out of the node's etcd."""

    def read() -> tuple[Cluster, CAKey] | None:
        try:
            return asyncio.run(_records(node))
        except EtcdError:  # it is started again for new roots
            return None

    return until("etcd answers", read, RENEWED)  # type: ignore[no-any-return]


def has_certificate_of(node: Node, root: str) -> bool:
    (own, *_) = certificates((node.root / "swarm" / "node.crt").read_text())
    return issued_by(own, certificates(root)[0])


def trusts(node: Node) -> str:
    return (node.root / "swarm" / "ca.crt").read_text()


def until_renewed(nodes: Iterable[Node], root: str) -> None:
    for node in nodes:
        until(
            f"{node.address} has a certificate of the new root",
            lambda node=node: has_certificate_of(node, root),  # type: ignore[misc]
            RENEWED,
        )


def rotate(node: Node, **config: Any) -> str:
    """`docker swarm ca --rotate`, also while a manager starts its etcd again. Returns the root that
    certificates come from then.
    """

    def sent() -> bool:
        answer = node.request("GET", f"/v{VERSION}/swarm", timeout=60)
        if answer.status != 200:
            return False
        swarm = msgspec.json.decode(answer.body)
        fields = swarm["Spec"]["CAConfig"]
        fields["ForceRotate"] = fields.get("ForceRotate", 0) + (not config)
        fields |= {"SigningCACert": "", "SigningCAKey": ""} | config
        path = f"/v{VERSION}/swarm/update?version={swarm['Version']['Index']}"
        return node.request("POST", path, swarm["Spec"], timeout=60).status == 200

    until("the rotation has begun", sent, RENEWED)
    cluster, _ = record_of(node)
    return cluster.rotation or cluster.root


def in_progress(node: Node) -> bool:
    """Also while its manager does not answer."""
    answer = node.request("GET", f"/v{VERSION}/swarm", timeout=60)
    return answer.status != 200 or bool(msgspec.json.decode(answer.body)["RootRotationInProgress"])


def until_one_root(cluster: Hosts, root: str, managers: int = 3) -> None:
    """The rotation ends, and each node has and trusts nothing but this root."""
    one = cluster[0]
    try:
        until("the rotation has ended", lambda: not in_progress(one), ENDED)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{one.swarm_info()}\n{one.log()[-4000:]}") from None
    assert one.ask("GET", "/swarm")["TLSInfo"]["TrustRoot"] == root
    until("one root is trusted", lambda: all(trusts(node) == root for node in cluster.nodes), RENEWED)
    assert all(has_certificate_of(node, root) for node in cluster.nodes)
    until("all is well", lambda: cluster.all_well(managers), ENDED)


# --- rotations ------------------------------------------------------------------------------------


def test_a_second_rotation_while_a_worker_is_down(cluster: Hosts) -> None:
    until("all is well", cluster.all_well, 60)
    one, worker = cluster[0], cluster[3]
    tokens, before = one.tokens(), cluster.containers()
    worker.kill9()
    until_renewed(cluster.nodes[:3], rotate(one))
    last = rotate(one)
    until_renewed(cluster.nodes[:3], last)
    assert in_progress(one), "the worker may still need each of the roots"
    assert one.tokens() == tokens
    worker.start()
    until_one_root(cluster, last)
    assert set(one.tokens().values()).isdisjoint(tokens.values())
    assert cluster.containers()[:3] >= before[:3]
    one.until_running("steady", CONTAINERS)


def test_back_to_the_old_root_while_a_worker_is_down(cluster: Hosts) -> None:
    """The nodes that had renewed do so again. The tokens stay, as they name the old root."""
    until("all is well", cluster.all_well, 60)
    one, worker = cluster[0], cluster[3]
    old, tokens = one.ask("GET", "/swarm")["TLSInfo"]["TrustRoot"], one.tokens()
    worker.kill9()
    until_renewed(cluster.nodes[:3], rotate(one))
    assert rotate(one, SigningCACert=old) == old
    until_renewed(cluster.nodes[:3], old)
    assert in_progress(one)
    worker.start()
    until_one_root(cluster, old)
    assert one.tokens() == tokens
    one.until_running("steady", CONTAINERS)


def test_to_another_root_back_and_there_again(cluster: Hosts) -> None:
    """The worker is killed when it has just been given a certificate of the old root, which no
    session may have shown.
    """
    until("all is well", cluster.all_well, 60)
    one, worker = cluster[0], cluster[3]
    old = one.ask("GET", "/swarm")["TLSInfo"]["TrustRoot"]
    other = rotate(one)
    _, key = record_of(one)
    until_renewed(cluster.nodes, other)
    rotate(one, SigningCACert=old)
    until_renewed([worker], old)
    worker.kill9()
    assert rotate(one, SigningCACert=other, SigningCAKey=key.next) == other
    until_renewed(cluster.nodes[:3], other)
    time.sleep(5)  # five turns of the leader
    assert in_progress(one), "the worker has no other certificate"
    worker.start()
    until_one_root(cluster, other)
    one.until_running("steady", CONTAINERS)


def test_three_rotations_while_a_manager_and_a_worker_are_down(cluster: Hosts) -> None:
    """The manager comes back after two of them, the worker after all."""
    until("all is well", cluster.all_well, 60)
    one, manager, worker = cluster[0], cluster[2], cluster[3]
    manager.kill("daemon", "manager")
    worker.kill9()
    for _ in range(2):
        until_renewed(cluster.nodes[:2], rotate(one))
    manager.start()
    last = rotate(one)
    until_renewed(cluster.nodes[:3], last)
    worker.start()
    until_one_root(cluster, last)
    one.until_running("steady", CONTAINERS)


@pytest.mark.parametrize("victims", [("manager",), ("etcd",), ("daemon", "manager")], ids="-".join)
def test_a_leader_that_is_killed_in_the_middle_of_rotations(cluster: Hosts, victims: tuple[str, ...]) -> None:
    """In each phase: while nodes renew, after another rotation has replaced the first one, when all
    have renewed and each etcd is started again for the new root, and when the rotation has ended.
    """
    moments = random.Random("".join(victims))

    def kill_leader() -> None:
        until("a leader can be killed", cluster.all_well, ENDED)
        leader = cluster.leader(cluster.nodes[:3])
        leader.kill(*victims)
        if "daemon" in victims:
            leader.start()

    until("all is well", cluster.all_well, ENDED)
    rotate(cluster[0])
    time.sleep(moments.uniform(0, 1.0))  # any moment of the renewals
    kill_leader()
    last = rotate(cluster[1])
    time.sleep(moments.uniform(0, 1.0))
    kill_leader()
    until_renewed(cluster.nodes, last)
    kill_leader()
    until("the rotation has ended", lambda: not in_progress(cluster[0]), ENDED)
    kill_leader()
    until_one_root(cluster, last)
    cluster[0].until_running("steady", CONTAINERS)


# --- the way out ----------------------------------------------------------------------------------


async def _forget(node: Node, cluster: Cluster, ca_key: CAKey, to: Root, to_key: str) -> None:
    signed = Root(cluster.root, ca_key.key).cross_sign(to, time.time_ns())
    forgetting = msgspec.structs.replace(cluster, rotation=to.pem, cross_signed=signed, abandoned=(), issuer_changes=0)
    etcd = EtcdClient(str(node.run / "swarm" / "etcd:0"))
    try:
        outcome = await etcd.commit(
            [Guard("/ca/key", (await etcd.range("/ca/key", timeout=10 * PATIENCE)).items[0].revision)],
            [
                PutKey("/swarm", records.encode(forgetting)),
                PutKey("/ca/key", records.encode(CAKey(ca_key.key, to_key))),
            ],
            timeout=10 * PATIENCE,
        )
        assert outcome.done
    finally:
        await etcd.close()


def rotate_and_forget(node: Node) -> str:
    """A second rotation, as versions that knew two roots wrote it: all certificates of the first
    one are foreign afterwards. Returns its root.
    """
    cluster, ca_key = record_of(node)
    pem, key = new_root(time.time_ns())
    asyncio.run(_forget(node, cluster, ca_key, Root(pem, key), key))
    return pem


def test_the_way_out_of_a_swarm_that_has_forgotten_a_root() -> None:
    """A forced new cluster on one manager. The other nodes that were up meanwhile leave and join
    again; those that were down come back by themselves.
    """
    with Hosts(4) as cluster:
        *managers, old, new = cluster.nodes
        one = cluster.form(2)
        one.service("steady", replicas=CONTAINERS)
        one.until_running("steady", CONTAINERS)
        tokens = one.tokens()
        old.kill9()
        until_renewed([*managers, new], rotate(one))
        new.kill9()
        last = rotate_and_forget(one)

        def given_up() -> Node | None:
            """The other manager may be without a quorum before it is refused."""
            states = {node: node.swarm_info()["LocalNodeState"] for node in managers}
            return next((node for node, state in states.items() if state == "error"), None)

        first = until("a manager is refused and gives up", given_up, RENEWED)
        second = next(node for node in managers if node is not first)
        lost = second.node_id
        assert "not issued by this swarm's CA" in first.swarm_info()["Error"]
        first.restart()
        assert first.swarm_info()["LocalNodeState"] == "error"

        body = {"ListenAddr": "0.0.0.0:2377", "AdvertiseAddr": first.address, "ForceNewCluster": True}
        assert first.ask("POST", "/swarm/init", body, timeout=60) == first.node_id
        assert first.tokens() == tokens and not first.swarm_info()["Error"]
        assert has_certificate_of(first, last)
        for node in (old, new):
            node.start()
        until_renewed([old, new], last)
        second.leave(force=True)
        first.ask("DELETE", f"/nodes/{lost}?force=1")
        until("the rotation has ended, and with it the old tokens", lambda: not in_progress(first), ENDED)
        second.join(first, manager=True)
        until_one_root(cluster, last, managers=2)
        first.until_running("steady", CONTAINERS)
