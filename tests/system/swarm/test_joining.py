"""Nodes that may join a swarm and stay in it: tokens, certificates that expire, rotation of the CA,
removed nodes, clients without a certificate on port 2377; promotions and demotions that are cut by
kills.
"""

from __future__ import annotations

import asyncio
import random
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.manager import keys, records, tls
from engine.manager.certificates import Root, certificates, request_key, subject_of
from engine.manager.etcd import EtcdClient
from engine.manager.records import CAKey
from engine.swarm_session.clock import SECOND
from tests.support import PATIENCE
from tests.support.engine.harness import until
from tests.support.nightly import nightly
from tests.support.swarm.clusters import VERSION, Cluster, Node

HOUR = 3600 * SECOND
CONTAINERS = 4
"""Tasks of a service that runs on while certificates come and go."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three managers and a worker."""
    with Cluster(4) as made:
        made.form(3)
        made[0].service("steady", replicas=CONTAINERS)
        made[0].until_running("steady", CONTAINERS)
        yield made


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    """One manager, and a host that is in no swarm between the tests."""
    with Cluster(2) as made:
        made[0].init()
        yield made


def state(node: Node) -> str:
    return str(node.swarm_info()["LocalNodeState"])


# --- tokens ---------------------------------------------------------------------------------------


def refused_join(pair: Cluster, token: str, **fields: Any) -> tuple[int, str]:
    first, second = pair.nodes
    body = {"ListenAddr": "0.0.0.0:2377", "RemoteAddrs": [f"{first.address}:2377"], "JoinToken": token} | fields
    answer = second.request("POST", f"/v{VERSION}/swarm/join", body, timeout=60)
    until("nothing is left of it", lambda: state(second) == "inactive")
    return answer.status, answer.body.decode()


def changed(token: str, place: int) -> str:
    return token[:place] + ("0" if token[place] != "0" else "1") + token[place + 1 :]


def test_wrong_tokens_are_refused_and_leave_nothing(pair: Cluster) -> None:
    token = pair[0].tokens()["Worker"]
    for wrong in ("", "x", token[:-1], token.upper(), changed(token, -1)):
        status, text = refused_join(pair, wrong)
        assert status == 400 and "join token is necessary" in text, (wrong, text)
    status, text = refused_join(pair, changed(token, 12))
    assert status == 400 and "remote CA does not match fingerprint" in text
    assert len(pair[0].nodes()) == 1
    assert not (pair[1].root / "swarm").exists()


def test_the_token_of_another_swarm(pair: Cluster) -> None:
    second = pair[1]
    second.init()
    foreign = second.tokens()["Manager"]
    second.leave(force=True)
    status, text = refused_join(pair, foreign)
    assert status == 400 and "remote CA does not match fingerprint" in text


def test_a_rotated_token(pair: Cluster) -> None:
    first, second = pair.nodes
    old = first.tokens()
    swarm = first.ask("GET", "/swarm")
    first.ask("POST", f"/swarm/update?version={swarm['Version']['Index']}&rotateWorkerToken=true", swarm["Spec"])
    new = first.tokens()
    assert new["Worker"] != old["Worker"] and new["Manager"] == old["Manager"]
    assert refused_join(pair, old["Worker"])[0] == 400
    second.join(first)
    second.leave()
    until("it is down", lambda: first.nodes()[second.node_id]["Status"]["State"] == "down")
    first.ask("DELETE", f"/nodes/{second.node_id}")


def test_a_removed_node_comes_back_as_another_one_only(pair: Cluster) -> None:
    first, second = pair.nodes
    removed = second.join(first)
    first.ask("DELETE", f"/nodes/{removed}?force=1")
    until("its removal is reported", lambda: "removed" in second.swarm_info()["Error"])
    second.restart()
    until("its removal is still reported", lambda: "removed" in second.swarm_info()["Error"])
    assert list(first.nodes()) == [first.node_id]
    second.leave(force=True)
    assert second.join(first) != removed
    second.leave()
    first.ask("DELETE", f"/nodes/{second.node_id}?force=1")


# --- strangers ------------------------------------------------------------------------------------


def test_strangers_on_the_port(pair: Cluster) -> None:
    """Hundreds of silent connections, garbage, and messages that need a certificate. A join works
    meanwhile, and the manager's process is the same afterwards.
    """
    first, second = pair.nodes
    before = first.manager_pid()
    program = Path(__file__).with_name("strangers.py")
    stranger = subprocess.Popen(
        [
            "nsenter",
            f"--net={second.place}",
            sys.executable,
            str(program),
            first.address,
            str(first.root / "swarm/ca.crt"),
        ],
        cwd=program.parents[3],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert stranger.stdout is not None and stranger.stdin is not None
    try:
        assert stranger.stdout.readline() == "refused\n"
        assert stranger.stdout.readline() == "flood\n"
        second.join(first)
    finally:
        stranger.communicate(timeout=30 * PATIENCE)
    assert stranger.returncode == 0
    assert first.manager_pid() == before
    second.leave()
    first.ask("DELETE", f"/nodes/{second.node_id}?force=1")


# --- certificates ---------------------------------------------------------------------------------


async def _authority(node: Node) -> tuple[str, str]:
    """The root's certificate and key, out of the node's etcd."""
    etcd = EtcdClient(str(node.run / "swarm" / "etcd:0"))
    try:
        cluster = records.CLUSTER.decode((await etcd.range("/swarm", timeout=5 * PATIENCE)).items[0].value)
        key: CAKey = records.CA_KEY.decode((await etcd.range("/ca/key", timeout=5 * PATIENCE)).items[0].value)
        return cluster.root, key.key
    finally:
        await etcd.close()


def expired(node: Node, root: Root, hours: int) -> None:
    """Replace a stopped node's certificate by one for an hour, issued `hours` ago."""
    directory = node.root / "swarm"
    key = keys.new_key()
    subject = subject_of(certificates((directory / "node.crt").read_text())[0])
    public = request_key(keys.request(key))
    issued = time.time_ns() - hours * HOUR
    certificate = root.issue(public, subject, address=node.address, now=issued, lifetime=HOUR)
    tls.Credentials(directory).install(certificate=certificate, key=key)


def valid(node: Node) -> bool:
    (found, *_) = certificates((node.root / "swarm" / "node.crt").read_text())
    return found.not_valid_after_utc.timestamp() > time.time()


@pytest.mark.parametrize("away", [[3], [2], [0, 1, 2, 3]], ids=["worker", "manager", "all"])
def test_nodes_whose_certificates_expired_while_off(cluster: Cluster, away: list[int]) -> None:
    """The nodes renew them without an operator when they come back, and their tasks run on. So do
    all nodes when all managers were off, and no CA answers.
    """
    until("all is well", cluster.all_well, 40)
    root, nodes = Root(*asyncio.run(_authority(cluster[0]))), [cluster[number] for number in away]
    before = cluster.containers()
    for node in nodes:
        node.kill("daemon", "manager")
        expired(node, root, 48)
    for node in nodes:
        node.start()
    until("they are renewed", lambda: all(map(valid, nodes)), 40)
    until("all is well again", cluster.all_well, 40)
    assert cluster.containers() == before


def test_a_certificate_that_expired_too_long_ago(cluster: Cluster) -> None:
    until("all is well", cluster.all_well, 40)
    root, worker = Root(*asyncio.run(_authority(cluster[0]))), cluster[3]
    worker.kill("daemon")
    expired(worker, root, 31 * 24)
    worker.start()
    until("its error is reported", lambda: "expired more than 30 days ago" in worker.swarm_info()["Error"])
    old = worker.node_id
    worker.leave(force=True)
    worker.join(cluster[0])
    cluster[0].ask("DELETE", f"/nodes/{old}?force=1")
    cluster[0].until_running("steady", CONTAINERS)


def test_rotation_of_the_ca(cluster: Cluster) -> None:
    """`docker swarm ca --rotate`: every node gets a certificate of the new root, etcd's members
    trust it, the old root and the old tokens are refused, and tasks run on.
    """
    first, worker = cluster[0], cluster[3]
    until("all is well", cluster.all_well, 40)
    first.until_running("steady", CONTAINERS)
    before, tokens = cluster.containers(), first.tokens()
    swarm = first.ask("GET", "/swarm")
    old = swarm["TLSInfo"]["TrustRoot"]
    swarm["Spec"]["CAConfig"]["ForceRotate"] = 1
    first.ask("POST", f"/swarm/update?version={swarm['Version']['Index']}", swarm["Spec"])
    now = first.ask("GET", "/swarm")
    assert now["RootRotationInProgress"] and now["TLSInfo"]["TrustRoot"] == old

    def rotated() -> bool:
        try:
            return all(not node.ask("GET", "/swarm")["RootRotationInProgress"] for node in cluster.nodes[:3])
        except AssertionError:  # the etcd of this manager restarts
            return False

    until("the rotation has ended", rotated, 120)
    new = first.ask("GET", "/swarm")["TLSInfo"]["TrustRoot"]
    assert new != old
    until("one root is trusted", lambda: all((n.root / "swarm/ca.crt").read_text() == new for n in cluster.nodes), 60)
    for node in cluster.nodes:
        assert Root(new).certificate.subject == certificates((node.root / "swarm/node.crt").read_text())[0].issuer
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=new)
        context.load_cert_chain(node.root / "swarm/node.crt", node.root / "swarm/node.key")
    assert cluster.containers() == before
    assert set(first.tokens().values()).isdisjoint(tokens.values())
    left = worker.node_id
    worker.leave()
    worker.join(first)
    first.ask("DELETE", f"/nodes/{left}?force=1")
    first.until_running("steady", CONTAINERS)


# --- promotions and demotions, cut ----------------------------------------------------------------


def is_manager(one: Node, node: Node) -> bool:
    status = one.nodes()[node.node_id].get("ManagerStatus", {})
    return status.get("Reachability") == "reachable" and node.swarm_info()["ControlAvailable"]


def is_worker(one: Node, node: Node) -> bool:
    seen, info = one.nodes()[node.node_id], node.swarm_info()
    fine = seen["Status"]["State"] == "ready" and info["LocalNodeState"] == "active"
    return fine and "ManagerStatus" not in seen and not info["ControlAvailable"]


def answered(probe: Callable[[], bool]) -> Callable[[], bool]:
    """The probe, with False while the manager does not answer."""

    def ask() -> bool:
        try:
            return probe()
        except (AssertionError, OSError):
            return False

    return ask


@pytest.mark.parametrize(
    "victims", [*nightly(("daemon",), ("manager",)), ("daemon", "manager"), *nightly(("etcd",))], ids="-".join
)
def test_a_node_that_is_killed_while_its_role_changes(cluster: Cluster, victims: tuple[str, ...]) -> None:
    """At any moment of a promotion and of a demotion: it is carried out after the kill."""
    one, node = cluster[0], cluster[3]
    until("all is well", cluster.all_well, 40)
    moments = random.Random("".join(victims))
    for role, reached in (("manager", is_manager), ("worker", is_worker)):
        one.update_node(node.node_id, Role=role)
        time.sleep(moments.uniform(0, 1.2))  # any moment of the change
        node.kill(*victims)
        if "daemon" in victims:
            node.start()
        until(f"it is a {role}", answered(lambda reached=reached: reached(one, node)), 45)  # type: ignore[misc]


@pytest.mark.parametrize("victims", [("manager",), *nightly(("etcd",))], ids="-".join)
def test_a_leader_that_is_killed_while_it_changes_a_role(cluster: Cluster, victims: tuple[str, ...]) -> None:
    node = cluster[3]
    until("all is well", cluster.all_well, 40)
    for role, reached in (("manager", is_manager), ("worker", is_worker)):
        leader = cluster.leader(cluster.nodes[:3])
        one = next(each for each in cluster.nodes[:3] if each is not leader)
        one.update_node(node.node_id, Role=role)
        leader.kill(*victims)
        until(f"it is a {role}", answered(lambda one=one, reached=reached: reached(one, node)), 45)  # type: ignore[misc]
    until("all is well again", cluster.all_well, 40)


def test_a_leader_that_is_demoted(cluster: Cluster) -> None:
    until("all is well", cluster.all_well, 40)
    leader = cluster.leader(cluster.nodes[:3])
    one = next(each for each in cluster.nodes[:3] if each is not leader)
    one.update_node(leader.node_id, Role="worker")
    until("it is a worker", answered(lambda: is_worker(one, leader)), 45)
    assert cluster.leader([one]) is not leader
    one.update_node(leader.node_id, Role="manager")
    until("it is a manager", answered(lambda: is_manager(one, leader)), 45)


@pytest.mark.parametrize("victims", [("daemon",), ("daemon", "manager")], ids="-".join)
def test_a_join_that_is_killed(pair: Cluster, victims: tuple[str, ...]) -> None:
    """Afterwards the node is a manager; or it is in no swarm, and a second join works."""
    first, second = pair.nodes
    known = set(first.nodes())
    joining = threading.Thread(target=answered(lambda: bool(second.join(first, manager=True))))
    joining.start()
    time.sleep(random.Random("".join(victims)).uniform(0.2, 1.0))  # any moment of the join
    second.kill(*victims)
    joining.join()
    second.start()

    def settled() -> bool:
        info = second.swarm_info()
        return info["LocalNodeState"] == "inactive" or bool(info["ControlAvailable"])

    until("it is out or in", settled, 45)
    if state(second) == "inactive":
        second.join(first, manager=True)
    second.node_id = second.swarm_info()["NodeID"]
    until("it is a manager", answered(lambda: is_manager(first, second)), 45)
    second.leave(force=True)
    for node in set(first.nodes()) - known:
        if first.nodes()[node]["Spec"]["Role"] == "manager":
            first.update_node(node, Role="worker")
        first.ask("DELETE", f"/nodes/{node}?force=1")


def test_the_port_is_tls_alone(pair: Cluster) -> None:
    """A plain connection gets no byte of an answer."""
    first = pair[0]
    found = subprocess.run(
        ["nsenter", f"--net={pair[1].place}", sys.executable, "-c", _PLAIN, first.address],
        capture_output=True,
        text=True,
        timeout=30 * PATIENCE,
        check=True,
    )
    assert found.stdout == "b''"


_PLAIN = """
import socket, sys
plain = socket.create_connection((sys.argv[1], 2377), 10)
plain.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
print(plain.recv(100), end="")
"""
