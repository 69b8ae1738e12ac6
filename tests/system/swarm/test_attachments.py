"""Plain containers on networks of a swarm, whatever happens to the daemon, to the managers and to
the node's part in the swarm. Two nodes: a manager and a worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest

from tests.support.engine import packets
from tests.support.engine.harness import until
from tests.support.swarm.clusters import Cluster, Node
from tests.support.swarm.networks import overlay, tidy


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(2) as made:
        made.form(1)
        yield made


@pytest.fixture
def first(cluster: Cluster) -> Iterator[Node]:
    """The manager, with the attachable network `open`."""
    cluster[0].network("open", Attachable=True)
    yield cluster[0]
    tidy(cluster)


def run(node: Node, name: str, *options: str) -> str:
    """Returns its address."""
    node.docker("run", "-d", "--name", name, "--network", "open", *options, "busybox", "sleep", "100000")
    return address(node, name)


def address(node: Node, name: str) -> str:
    found = node.inspect(name)["NetworkSettings"]["Networks"]
    return str(found["open"]["IPAddress"]) if "open" in found else ""


def reaches(node: Node, name: str, other: str) -> bool:
    """A container has an answer from an address."""
    return packets.ran(place(node, name), "busybox", "ping", "-c", "1", "-W", "1", other).returncode == 0


def place(node: Node, name: str) -> str:
    return f"/proc/{node.inspect(name)['State']['Pid']}/ns/net"


def network_names(node: Node) -> set[str]:
    return {str(each["Name"]) for each in node.ask("GET", "/networks")}


def test_the_node_restarts_without_a_manager(cluster: Cluster, first: Node) -> None:
    """Containers keep their addresses over restarts of their own, of the daemon and of the host,
    and reach one another.
    """
    worker = cluster[1]
    one = run(worker, "one", "--restart", "always")
    two = run(worker, "two", "--restart", "always")
    assert one and two and one != two and reaches(worker, "one", two)
    first.unplug()
    try:
        worker.docker("restart", "-t", "0", "one")
        assert address(worker, "one") == one
        worker.kill9()
        worker.start()
        assert (address(worker, "one"), address(worker, "two")) == (one, two)
        assert reaches(worker, "one", two)
        worker.docker("restart", "-t", "0", "two")
        assert reaches(worker, "one", two)
        worker.reboot()
        until("both run", lambda: (address(worker, "one"), address(worker, "two")) == (one, two))
        until("they reach one another", lambda: reaches(worker, "two", one))
        # a new one needs a manager
        answer = worker.docker(
            "run", "-d", "--name", "new", "--network", "open", "busybox", "true", status=None, timeout=90
        )
        assert answer.status != 0
    finally:
        first.plug()
    until("the worker has a session", lambda: not worker.swarm_info()["Error"])
    three = run(first, "three")
    until("it is reached", lambda: reaches(worker, "one", three) and reaches(worker, "two", three))
    assert three not in (one, two)


def test_a_container_that_does_not_run(cluster: Cluster, first: Node) -> None:
    """It is connected at once, and gets its address when it starts; each run may have another."""
    worker = cluster[1]
    worker.docker("create", "--name", "later", "busybox", "sleep", "100000")
    assert "open" not in network_names(worker)
    worker.docker("network", "connect", "--alias", "soon", "open", "later")
    assert worker.docker("network", "connect", "missing", "later", status=None).status
    worker.docker("start", "later")
    found = address(worker, "later")
    run(first, "other")
    until("its alias is known", lambda: packets.addresses(place(first, "other"), "soon") == [found])
    worker.docker("stop", "-t", "0", "later")
    until("its name is gone", lambda: packets.addresses(place(first, "other"), "soon") == [])
    until("the network is gone from the node", lambda: "open" not in network_names(worker))
    worker.docker("network", "disconnect", "open", "later")
    worker.docker("start", "later")
    assert "open" not in worker.inspect("later")["NetworkSettings"]["Networks"]


def test_a_network_that_was_made_again_under_its_name(cluster: Cluster, first: Node) -> None:
    """A container is started on the present one; without it the start is refused."""
    worker = cluster[1]
    run(worker, "old")
    worker.docker("stop", "-t", "0", "old")
    # a stop ends when the container has ended: what it had of the network is given back after that
    until("no container uses it", lambda: first.docker("network", "rm", "open", status=None).status == 0)
    answer = worker.docker("start", "old", status=None)
    assert answer.status and "open not found" in answer.err, answer
    network = first.network("open", Attachable=True)
    worker.docker("start", "old")
    assert worker.inspect("old")["NetworkSettings"]["Networks"]["open"]["NetworkID"] == network


def test_wanted_addresses(cluster: Cluster, first: Node) -> None:
    first.network("own", Attachable=True, IPAM={"Config": [{"Subnet": "10.44.0.0/24"}]})
    worker = cluster[1]

    def wanted(node: Node, name: str, text: str) -> Any:
        return node.docker(
            "run", "-d", "--name", name, "--network", "own", "--ip", text, "busybox", "sleep", "100000", status=None
        )

    assert wanted(worker, "a", "10.44.0.77").status == 0
    assert worker.inspect("a")["NetworkSettings"]["Networks"]["own"]["IPAddress"] == "10.44.0.77"
    taken = wanted(first, "b", "10.44.0.77")
    assert taken.status and "10.44.0.77" in taken.err, taken
    outside = wanted(first, "c", "10.45.0.5")
    assert outside.status and "10.45.0.5" in outside.err, outside
    worker.docker("rm", "-f", "a")
    first.docker("rm", "-f", "b", "c")


def test_another_name_of_a_container(cluster: Cluster, first: Node) -> None:
    """All nodes learn of it at once; its address stays. The network is given by the beginning of
    its id, as `docker network ls` shows it.
    """
    worker = cluster[1]
    short = first.docker("network", "ls", "-q", "-f", "name=open").out.strip()
    worker.docker("run", "-d", "--name", "box", "--network", short, "busybox", "sleep", "100000")
    run(first, "other")
    inside, found = place(first, "other"), address(worker, "box")
    until("its name is known", lambda: packets.addresses(inside, "box") == [found])
    worker.docker("rename", "box", "bag")
    until("its other name is known", lambda: packets.addresses(inside, "bag") == [found])
    assert packets.addresses(inside, "box") == []
    assert address(worker, "bag") == found and reaches(first, "other", found)
    worker.docker("restart", "-t", "0", "bag")
    assert address(worker, "bag") == found
    assert packets.addresses(inside, "bag") == [found]


def test_a_network_of_the_node_with_the_same_name(cluster: Cluster, first: Node) -> None:
    """The container that is on the swarm's stays with it, also when the node had given it up."""
    worker = cluster[1]
    network = first.ask("GET", "/networks/open")["Id"]
    worker.docker("network", "create", "open")
    try:
        worker.docker("run", "-d", "--name", "shared", "--network", network, "busybox", "sleep", "100000")
        worker.docker("run", "-d", "--name", "own", "--network", "open", "busybox", "sleep", "100000")
        assert worker.inspect("shared")["NetworkSettings"]["Networks"]["open"]["NetworkID"] == network
        answer = worker.docker("network", "disconnect", network, "own", status=None)
        assert answer.status and "is not connected" in answer.err, answer
        worker.docker("stop", "-t", "0", "shared")
        until("the node has given it up", lambda: not worker.overlays())
        worker.docker("start", "shared")
        assert worker.inspect("shared")["NetworkSettings"]["Networks"]["open"]["NetworkID"] == network
    finally:
        worker.docker("rm", "-f", "own", "shared")
        worker.docker("network", "rm", "open")


def test_a_worker_whose_address_changes(cluster: Cluster, first: Node) -> None:
    """It joined without an address of its own. Its networks follow the one that managers see."""
    worker = cluster[1]
    rejoin(first, worker, AdvertiseAddr="")
    other = run(first, "other")
    one = run(worker, "one")
    until("both reach one another", lambda: reaches(worker, "one", other) and reaches(first, "other", one))
    before, after = worker.address, worker.address + "5"
    try:
        worker.inside("ip", "address", "delete", f"{before}/24", "dev", "eth0")
        worker.inside("ip", "address", "add", f"{after}/24", "dev", "eth0")
        until("they do again", lambda: reaches(worker, "one", other) and reaches(first, "other", one), 60)
        assert address(worker, "one") == one
    finally:
        worker.inside("ip", "address", "delete", f"{after}/24", "dev", "eth0")
        worker.inside("ip", "address", "add", f"{before}/24", "dev", "eth0")
        rejoin(first, worker)


def rejoin(first: Node, worker: Node, **fields: str) -> None:
    node = worker.node_id
    worker.leave()
    until("it is down", lambda: first.nodes()[node]["Status"]["State"] == "down", 60)
    first.ask("DELETE", f"/nodes/{quote(node)}?force=1")
    worker.join(first, **fields)


def test_a_container_removes_itself(cluster: Cluster, first: Node) -> None:
    """Its network can be removed as soon as the client has its exit."""
    for node in cluster.nodes:
        node.docker("run", "--rm", "--network", "open", "busybox", "true")
        first.docker("network", "rm", "open")
        first.network("open", Attachable=True)


def test_promotion_and_demotion(cluster: Cluster, first: Node) -> None:
    """Another agent follows each time; containers and tasks keep their networks."""
    worker = cluster[1]
    one, other = run(worker, "one"), run(first, "other")
    first.service("web", "sleep", "100000", replicas=None, template=overlay("open"))
    tasks = {task["ID"] for task in first.until_running("web", 2)}
    for role in ("manager", "worker"):
        first.update_node(worker.node_id, Role=role)
        until(f"it is a {role}", lambda role=role: worker.swarm_info()["ControlAvailable"] == (role == "manager"), 60)
        until("it has a session", lambda: not worker.swarm_info()["Error"], 60)
        assert address(worker, "one") == one
        until("both reach one another", lambda: reaches(worker, "one", other) and reaches(first, "other", one))
        assert "open" in network_names(worker)
    assert {task["ID"] for task in first.until_running("web", 2)} == tasks
    two = run(worker, "two")
    until("a new one is reached", lambda: reaches(first, "other", two))


def test_a_node_that_leaves(cluster: Cluster, first: Node) -> None:
    """Its containers stay, without the network, and what they had of it is free for others."""
    worker = cluster[1]
    run(worker, "one")
    worker.docker("network", "connect", "bridge", "one")
    worker.docker("create", "--name", "two", "--network", "open", "busybox", "sleep", "100000")
    node = worker.node_id
    worker.leave()
    try:
        assert worker.inspect("one")["State"]["Running"] and address(worker, "one") == ""
        assert worker.docker("start", "two", status=None).status
        assert not worker.overlays()
        assert network_names(worker) == {"bridge", "host", "none"}
        first.docker("network", "rm", "open")
    finally:
        until("it is down", lambda: first.nodes()[node]["Status"]["State"] == "down")
        first.ask("DELETE", f"/nodes/{quote(node)}?force=1")
        worker.join(first)
