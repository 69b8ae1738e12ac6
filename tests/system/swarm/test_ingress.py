"""Published ports on three real engines and a client outside: every node answers, tasks see the
client's address, changes touch no task.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import PATIENCE
from tests.support.engine import packets
from tests.support.engine.harness import until
from tests.support.swarm.clusters import Cluster, Node
from tests.support.swarm.networks import answered_by, host_names, overlay, published, tidy, web

NODES = 3
PORT = 8080


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A manager and two workers."""
    with Cluster(NODES) as made:
        made.form(1)
        yield made


@pytest.fixture
def first(cluster: Cluster) -> Iterator[Node]:
    """The manager. No service is left behind, and no node answers any more."""
    yield cluster[0]
    cluster[0].update_node(cluster[1].node_id, Availability="active")
    tidy(cluster)
    outside = cluster.outside().place
    for node in cluster.nodes:
        until("the port is free", lambda node=node: refused(outside, node.address))


def refused(place: str, address: str, port: int = PORT) -> bool:
    try:
        packets.connected(place, address, port, seconds=1).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


def pids(cluster: Cluster) -> dict[str, int]:
    return {
        task: node.inspect(entry["Id"])["State"]["Pid"]
        for node in cluster.nodes
        for task, entry in node.task_containers().items()
    }


def test_every_node_answers_and_tasks_see_the_client(cluster: Cluster, first: Node) -> None:
    """Also nodes without a task; also on a node itself, by its address and by 127.0.0.1."""
    first.update_node(cluster[1].node_id, Availability="drain")
    web(first, "web", replicas=2, EndpointSpec=published((PORT, 80)))
    tasks = first.until_running("web", 2)
    assert not cluster[1].task_containers()
    (port,) = first.ask("GET", "/services/web")["Endpoint"]["Ports"]
    assert (port["PublishedPort"], port["TargetPort"], port["Protocol"]) == (PORT, 80, "tcp")
    assert port.get("PublishMode", "ingress") == "ingress"
    outside = cluster.outside()
    for node in cluster.nodes:
        answered_by(outside.place, node.address, host_names(cluster, tasks), PORT)
        seen = {packets.seen_as(outside.place, node.address, PORT) for _ in range(8)}
        assert seen == {outside.address}, f"through {node.address}"
        for address in (node.address, "127.0.0.1"):
            answered_by(node.place, address, host_names(cluster, tasks), PORT)
        for other in cluster.nodes:
            if other is not node:
                assert packets.seen_as(node.place, other.address, PORT) == node.address


def test_udp(cluster: Cluster, first: Node) -> None:
    first.service("udp", replicas=2, template=overlay(), EndpointSpec=published((5353, 5000, "udp")))
    tasks = first.until_running("udp", 2)
    outside = cluster.outside()
    with (
        packets.Echo(cluster.node_of(tasks[0]).place_of(tasks[0]), 5000, "a"),
        packets.Echo(cluster.node_of(tasks[1]).place_of(tasks[1]), 5000, "b"),
    ):
        for node in cluster.nodes:

            def answer(node: Node = node) -> str:
                try:
                    return packets.exchanged(outside.place, node.address, 5353, b"?").decode()
                except OSError:
                    return ""

            until("an answer", answer)
            assert {answer() for _ in range(48)} == {f"a {outside.address}", f"b {outside.address}"}


class Datagrams:
    """A client that keeps sending to a port of each node from one socket, while the block runs, and
    keeps the last answers.
    """

    def __init__(self, cluster: Cluster, port: int) -> None:
        self._sockets = {
            node.address: packets.new_socket(cluster.outside().place, socket.SOCK_DGRAM) for node in cluster.nodes
        }
        for address, each in self._sockets.items():
            each.settimeout(0.02)
            each.connect((address, port))
        self._answers: dict[str, str] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._send)

    def heard(self) -> set[str]:
        """The servers that answered last; "" for a node through which none has answered."""
        return {self._answers.get(address, "").partition(" ")[0] for address in self._sockets}

    def _send(self) -> None:
        while not self._ended.is_set():
            for address, each in self._sockets.items():
                with contextlib.suppress(OSError):
                    each.send(b"?")
                    self._answers[address] = each.recv(1000).decode()

    def __enter__(self) -> Datagrams:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        for each in self._sockets.values():
            each.close()


def test_rolling_updates_with_clients_and_a_manager_that_dies(cluster: Cluster, first: Node) -> None:
    """Without a configuration one task is replaced at a time. The update is completed by a manager
    that is killed in the middle. A client of a service of one task reaches the new one.
    """
    web(first, "web", replicas=3, EndpointSpec=published((PORT, 80)))
    first.service("udp", template=overlay(), EndpointSpec=published((5353, 5000, "udp")))
    (old,) = first.until_running("udp", 1)
    before = {task["ID"] for task in first.until_running("web", 3)}

    def running() -> set[str] | None:
        """None while no manager answers."""
        try:
            tasks = first.tasks("web", desired="")
        except AssertionError:
            return None
        return {task["ID"] for task in tasks if task["Status"]["State"] == "running"}

    def completed() -> bool:
        try:
            return (first.ask("GET", "/services/web").get("UpdateStatus") or {}).get("State") == "completed"
        except AssertionError:
            return False

    with Datagrams(cluster, 5353) as client:
        with packets.Echo(cluster.node_of(old).place_of(old), 5000, "old"):
            until("the old task answers through all nodes", lambda: client.heard() == {"old"})
        first.update_service("udp", lambda spec: spec["TaskTemplate"].update(ForceUpdate=1))
        first.update_service("web", lambda spec: spec["TaskTemplate"]["ContainerSpec"].update(Env=["A=1"]))
        until("a task is replaced", lambda: (running() or before) - before)
        first.kill_manager()
        fewest, deadline = 3, time.monotonic() + 60 * PATIENCE
        while not completed():
            if (found := running()) is not None:
                fewest = min(fewest, len(found))
            assert time.monotonic() < deadline
        assert fewest >= 2
        assert not before & {task["ID"] for task in first.until_running("web", 3)}
        (new,) = first.until_running("udp", 1)
        assert new["ID"] != old["ID"]
        with packets.Echo(cluster.node_of(new).place_of(new), 5000, "new"):
            until("the new task answers through all nodes", lambda: client.heard() == {"new"})


def test_ports_change_without_new_tasks(cluster: Cluster, first: Node) -> None:
    """A second port, another published port for the same target, and back."""
    web(first, "web", replicas=2, EndpointSpec=published((PORT, 80)))
    tasks = first.until_running("web", 2)
    before, names, outside = pids(cluster), host_names(cluster, tasks), cluster.outside().place
    for ports in ([(PORT, 80), (8081, 80)], [(8082, 80)], [(PORT, 80)]):
        first.update_service("web", lambda spec, ports=ports: spec.update(EndpointSpec=published(*ports)))
        for node in cluster.nodes:
            for port, _ in ports:
                answered_by(outside, node.address, names, port)
            for port in {PORT, 8081, 8082} - {port for port, _ in ports}:
                until("it is refused", lambda node=node, port=port: refused(outside, node.address, port))
    assert pids(cluster) == before


def test_chosen_and_taken_ports(cluster: Cluster, first: Node) -> None:
    web(first, "web", EndpointSpec=published((0, 80)))
    tasks = first.until_running("web", 1)
    (port,) = until("a port is chosen", lambda: first.ask("GET", "/services/web")["Endpoint"].get("Ports"))
    assert 30000 <= port["PublishedPort"] <= 32767
    for node in cluster.nodes:
        answered_by(cluster.outside().place, node.address, host_names(cluster, tasks), port["PublishedPort"])
    spec = {
        "Name": "other",
        "TaskTemplate": {"ContainerSpec": {"Image": "busybox"}},
        "EndpointSpec": published((port["PublishedPort"], 80)),
    }
    answer = first.request("POST", "/v1.44/services/create", spec)
    assert answer.status in (400, 409) and str(port["PublishedPort"]).encode() in answer.body, answer
    (chosen,) = first.ask("GET", "/services/web")["Endpoint"]["Ports"]
    assert chosen == port


def test_the_address_of_a_service_leads_to_its_ports_too(cluster: Cluster, first: Node) -> None:
    """A service with a network and a port: by name inside, by the port from outside."""
    network = first.network("net")
    web(first, "web", "net", replicas=2, EndpointSpec=published((PORT, 80)))
    first.service("client", replicas=None, template=overlay("net"))
    tasks = first.until_running("web", 2)
    virtual = first.virtual_address("web", network)
    for client in first.until_running("client", NODES):
        at = cluster.node_of(client).place_of(client)
        answered_by(at, virtual, host_names(cluster, tasks))
        # a task's way out leads to a published port as any client's does
        answered_by(at, cluster[0].address, host_names(cluster, tasks), PORT)
    for node in cluster.nodes:
        answered_by(cluster.outside().place, node.address, host_names(cluster, tasks), PORT)


def test_a_busy_port_is_named_and_other_nodes_serve(cluster: Cluster, first: Node) -> None:
    worker = cluster[1]
    with packets.new_socket(worker.place) as busy:
        busy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        busy.bind(("0.0.0.0", PORT))
        busy.listen()
        web(first, "web", replicas=2, EndpointSpec=published((PORT, 80)))
        tasks = first.until_running("web", 2)
        for node in (cluster[0], cluster[2]):
            answered_by(cluster.outside().place, node.address, host_names(cluster, tasks), PORT)
        until("the log names it", lambda: str(PORT) in worker.log())
    # it serves when the port is free again
    answered_by(cluster.outside().place, worker.address, host_names(cluster, tasks), PORT, seconds=60)


def test_the_mode_host_on_an_overlay(cluster: Cluster, first: Node) -> None:
    first.network("net")
    web(first, "web", "net", replicas=NODES - 1, EndpointSpec=published((PORT, 80), mode="host"))
    tasks = first.until_running("web", NODES - 1)
    outside = cluster.outside()
    homes = {cluster.node_of(task).address: host_names(cluster, [task]) for task in tasks}
    assert len(homes) == NODES - 1
    for node in cluster.nodes:
        if node.address in homes:
            answered_by(outside.place, node.address, homes[node.address], PORT)
            assert packets.seen_as(outside.place, node.address, PORT) == outside.address
        else:
            assert refused(outside.place, node.address)


def test_ports_without_the_daemon(cluster: Cluster, first: Node) -> None:
    """The kernel leads traffic while the daemon is away; a new one finds the rules."""
    web(first, "web", replicas=2, EndpointSpec=published((PORT, 80)))
    tasks = first.until_running("web", 2)
    outside, worker = cluster.outside().place, cluster[2]
    for node in cluster.nodes:
        answered_by(outside, node.address, host_names(cluster, tasks), PORT)
    worker.kill9()
    assert packets.sweep(outside, worker.address, PORT) == host_names(cluster, tasks)
    worker.start()
    answered_by(outside, worker.address, host_names(cluster, tasks), PORT)
    first.ask("DELETE", "/services/web")
    for node in cluster.nodes:
        until("it is refused", lambda node=node: refused(outside, node.address))


def test_the_ingress_network_is_shown(cluster: Cluster, first: Node) -> None:
    shown: Any = [each for each in first.ask("GET", "/networks") if each["Name"] == "ingress"]
    assert len(shown) == 1
    (network,) = shown
    assert (network["Driver"], network["Scope"], network["Ingress"]) == ("overlay", "swarm", True)
    subnet = network["IPAM"]["Config"][0]["Subnet"]  # 10.255.0.0/16, unless this machine uses it
    assert subnet.startswith("10.25") and subnet.endswith(".0.0/16")
    assert first.request("DELETE", f"/v1.24/networks/{network['Id']}").status >= 400
