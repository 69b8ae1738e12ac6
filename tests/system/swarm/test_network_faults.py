"""A swarm's networks under faults: deaths of processes while traffic flows, lost links and packets,
a slow database, a new CA, and addresses that are never given twice. Five real engines.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import PATIENCE
from tests.support.engine import packets
from tests.support.engine.harness import until
from tests.support.nightly import nightly
from tests.support.swarm.clusters import SECOND, Cluster, Node, address_of
from tests.support.swarm.load import Load
from tests.support.swarm.networks import (
    answered_by,
    host_names,
    overlay,
    published,
    tidy,
    until_overlays,
    until_routed,
    vni_of,
    web,
)

NODES, MANAGERS = 5, 3
PORT = 8080
PERIOD = 1.0 + PATIENCE
"""Seconds between beats."""
LIVES = int(os.environ.get("SWARM_ADDRESSES", "150"))
"""Tasks that `test_addresses_are_never_given_twice` makes."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(NODES) as made:
        first = made.form(MANAGERS)
        swarm = first.ask("GET", "/swarm")
        swarm["Spec"]["Dispatcher"] = {"HeartbeatPeriod": int(PERIOD * SECOND)}
        first.ask("POST", f"/swarm/update?version={swarm['Version']['Index']}", swarm["Spec"])
        yield made


@pytest.fixture
def first(cluster: Cluster) -> Iterator[Node]:
    """The first node. All nodes are ready before and after; nothing is left behind."""
    until_ready(cluster)
    yield cluster[0]
    cluster.heal()
    for node in cluster.nodes:
        node.plug()
        if node.process is None:
            node.start()
    until_ready(cluster)
    tidy(cluster)


def until_ready(cluster: Cluster) -> None:
    def ready() -> bool:
        with contextlib.suppress(AssertionError, OSError):
            return [each["Status"]["State"] for each in cluster[0].nodes().values()] == ["ready"] * NODES
        return False

    until("all nodes are ready", ready, 60)


class Site:
    """A service `web` with a task on each node, and a client's task on each."""

    def __init__(self, cluster: Cluster, first: Node, **fields: Any) -> None:
        self.cluster, self.first = cluster, first
        self.network = first.network("net")
        web(first, "web", "net", replicas=None, EndpointSpec=published((PORT, 80), (8081, 81)), **fields)
        first.service("client", replicas=None, template=overlay("net"))
        self.tasks = first.until_running("web", NODES)
        self.clients = {
            cluster.node_of(task): cluster.node_of(task).place_of(task) for task in first.until_running("client", NODES)
        }
        self.virtual = first.virtual_address("web", self.network)
        self.outside = cluster.outside().place
        self.settle()

    def address(self, node: Node) -> str:
        """Address of the task on a node."""
        (task,) = [task for task in self.tasks if task["NodeID"] == node.node_id]
        return address_of(task, self.network)

    def settle(self, seconds: float = 30.0) -> None:
        """Wait until every node leads to each task of now, by both ways."""
        ends = time.monotonic() + seconds * PATIENCE
        while True:
            try:
                return self._settled()
            except (AssertionError, StopIteration, OSError):
                if time.monotonic() > ends:
                    raise

    def _settled(self) -> None:
        self.tasks = self.first.until_running("web", NODES)
        names = host_names(self.cluster, self.tasks)
        for node in self.cluster.nodes:
            task = next(task for task in self.first.tasks("client") if task["NodeID"] == node.node_id)
            self.clients[node] = node.place_of(task)
            answered_by(self.clients[node], self.virtual, names, seconds=3)
            answered_by(self.outside, node.address, names, PORT, seconds=3)
        until_routed(self.cluster, self.network, self.first.tasks, 10)


def kill_manager(node: Node) -> None:
    node.kill_manager()
    until("it is back", lambda: node.request("GET", "/v1.44/nodes").status == 200, 60)


def kill_daemon(node: Node) -> None:
    node.kill9()
    time.sleep(1)  # traffic flows without it
    node.start()


@pytest.mark.parametrize("what", ["daemon", *nightly("monitor", "manager")])
def test_deaths_cut_no_connection_and_fail_no_request(cluster: Cluster, first: Node, what: str) -> None:
    """The process dies on a manager, and on a worker that has one, while clients are served."""
    site = Site(cluster, first)
    other, worker = cluster[1], cluster[4]
    with (
        Load(site.clients[other], "hold", f"{site.virtual}:81", f"{site.address(worker)}:81") as inside,
        Load(site.clients[worker], "hold", f"{site.address(other)}:81") as back,
        Load(site.outside, "hold", *(f"{node.address}:8081" for node in cluster.nodes)) as ports,
        Load(site.clients[other], "get", f"{site.virtual}:80", rate=50) as requests,
        Load(site.outside, "get", *(f"{node.address}:{PORT}" for node in cluster.nodes), rate=50) as outer,
    ):
        for node in (other, worker):
            if what == "daemon":
                kill_daemon(node)
            elif what == "monitor":
                node.replace_monitor()
            elif node is other:
                kill_manager(node)
                kill_manager(cluster.leader(cluster.nodes[:MANAGERS]))
            time.sleep(2)  # what its successor does to the rules would be seen
    for load in (inside, back, ports, requests, outer):
        load.assert_none_failed()
    until_ready(cluster)
    site.settle()


def test_a_lost_link_moves_traffic(cluster: Cluster, first: Node) -> None:
    """Requests go to the other nodes within seconds; with the link the node's tasks serve again."""
    site = Site(cluster, first)
    lost = cluster[4]
    names = host_names(cluster, [task for task in site.tasks if task["NodeID"] != lost.node_id])
    lost.unplug()
    began = time.monotonic()
    places = [(site.clients[node], site.virtual, 80) for node in cluster.nodes[:-1]]
    places += [(site.outside, node.address, PORT) for node in cluster.nodes[:-1]]

    def moved() -> bool:
        return all(packets.got(place, address, port, seconds=0.3) in names for place, address, port in places)

    rounds = 0
    while rounds < 6:  # with one task of five gone, six rounds succeed by chance in one of 10,000
        rounds = rounds + 1 if moved() else 0
        assert time.monotonic() - began < 12 * PATIENCE
    took = time.monotonic() - began
    print(f"traffic has moved after {took:.1f} s")
    assert took < 7 * PATIENCE
    lost.plug()
    until_ready(cluster)
    site.settle(60)


@pytest.mark.nightly
def test_nodes_that_are_back_know_all_changes(cluster: Cluster, first: Node) -> None:
    """While a worker is away, services come, go and are scaled. Meanwhile its own tasks reach each
    other and are reached by its port.
    """
    site = Site(cluster, first)
    away = cluster[3]
    web(first, "short", "net", replicas=3)
    first.until_running("short", 3)
    away.unplug()
    first.ask("DELETE", "/services/short")
    web(first, "later", "net", replicas=3, EndpointSpec=published((8090, 80)))
    later = first.until_running("later", 3, 60)
    own = site.address(away)
    assert packets.got(site.clients[away], own), "its own task"
    away.plug()
    until_ready(cluster)
    site.settle(60)
    place = site.clients[away]
    answered_by(place, first.virtual_address("later", site.network), host_names(cluster, later))
    answered_by(site.outside, away.address, host_names(cluster, later), 8090)
    until("the old name is gone", lambda: packets.addresses(place, "short") == [])


@pytest.mark.nightly
def test_bad_links(cluster: Cluster, first: Node) -> None:
    """Lost packets, then packets of one direction alone between leader and worker: connections go
    on, no node goes down more than once, and all nodes lead to all tasks afterwards.
    """
    site = Site(cluster, first)
    leader, worker = cluster.leader(), cluster[4]
    others = [node for node in cluster.nodes if node is not worker]
    with Load(site.clients[others[0]], "hold", f"{site.address(worker)}:81", rate=20) as held:
        worker.drop_from(*others, share=0.2)
        time.sleep(4 * PERIOD)
        worker.heal()
        cluster.cut([leader], [worker])
        time.sleep(2 * PERIOD)
        cluster.heal()
        time.sleep(1)  # late answers come
    held.assert_none_failed()
    until_ready(cluster)
    site.settle(60)


@pytest.mark.nightly
def test_a_slow_database_of_the_leader(cluster: Cluster, first: Node) -> None:
    """etcd of the leader is stopped for half of the time, 50 ms each.

    Nothing is lost or doubled.
    """
    network = first.network("net")
    web(first, "web", "net", replicas=5, EndpointSpec=published((PORT, 80)))
    first.until_running("web", 5)
    etcd = cluster.leader().etcd_pid()
    ended = threading.Event()

    def slow() -> None:
        while not ended.is_set():
            os.kill(etcd, signal.SIGSTOP)
            time.sleep(0.05)
            os.kill(etcd, signal.SIGCONT)
            time.sleep(0.05)

    thread = threading.Thread(target=slow)
    thread.start()
    try:
        for replicas in (10, 3, 8):
            first.update_service(
                "web", lambda spec, replicas=replicas: spec["Mode"]["Replicated"].update(Replicas=replicas)
            )
            tasks = first.until_running("web", replicas)
            assert len({address_of(task, network) for task in tasks}) == replicas
    finally:
        ended.set()
        thread.join()
    until_routed(cluster, network, lambda: first.tasks("web"))
    for node in cluster.nodes:
        answered_by(cluster.outside().place, node.address, host_names(cluster, tasks), PORT)


@pytest.mark.nightly
def test_a_new_certificate_authority(cluster: Cluster, first: Node) -> None:
    """All nodes get new certificates while traffic flows, and learn of changes afterwards."""
    site = Site(cluster, first)
    swarm = first.ask("GET", "/swarm")
    spec = swarm["Spec"]
    spec.setdefault("CAConfig", {})["ForceRotate"] = spec["CAConfig"].get("ForceRotate", 0) + 1
    targets = [f"{node.address}:{PORT}" for node in cluster.nodes]
    with (
        Load(site.outside, "get", *targets, rate=100) as requests,
        Load(site.clients[cluster[4]], "hold", f"{site.virtual}:81") as held,
    ):
        first.ask("POST", f"/swarm/update?version={swarm['Version']['Index']}", spec, timeout=60)
        until("it is complete", lambda: not first.ask("GET", "/swarm")["RootRotationInProgress"], 120)
        web(first, "later", "net", replicas=5)
        first.until_running("later", 5)
    requests.assert_none_failed()
    held.assert_none_failed()
    until_ready(cluster)
    site.settle(60)


def test_a_host_that_loses_power(cluster: Cluster, first: Node) -> None:
    """Neither a device nor a rule of before is in the way when it is back."""
    site = Site(cluster, first)
    worker = cluster[4]
    worker.power_off()
    worker.start()
    until_ready(cluster)
    site.settle(60)


def test_a_device_of_another_program_with_the_same_number(cluster: Cluster, first: Node) -> None:
    """Tasks on this node fail and say why; they run when it is gone."""
    network = first.network("net")
    worker = cluster[4]
    vni = vni_of(first, network)
    worker.inside(*f"ip link add other type vxlan id {vni} local {worker.address} dstport 4789 nolearning".split())
    try:
        template = {"Placement": {"Constraints": [f"node.id=={worker.node_id}"]}}
        web(first, "web", "net", template=template)
        until(
            "the task says why",
            lambda: any(f"VXLAN {vni}" in task["Status"].get("Err", "") for task in first.tasks("web", desired="")),
            60,
        )
    finally:
        worker.inside("ip", "link", "delete", "other")
    first.until_running("web", 1)


@pytest.mark.nightly
def test_both_daemon_and_monitor_die(cluster: Cluster, first: Node) -> None:
    """With their descriptors the kernel removes the networks; all are made again."""
    site = Site(cluster, first)
    worker = cluster[4]
    worker.kill9()
    worker.kill_monitor()
    worker.start()
    until_ready(cluster)
    site.settle(60)


# --- addresses ------------------------------------------------------------------------------------


class Seen:
    """Watches all tasks of a network in a thread: no two have one address, at any time. An address
    is given again after 60 seconds at the earliest, so within this time each has one task.
    """

    def __init__(self, cluster: Cluster, network: str) -> None:
        self.cluster, self.network = cluster, network
        self.holders: dict[str, set[str]] = defaultdict(set)
        self.failures: list[str] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._ended.wait(0.2):
            for node in self.cluster.nodes[:MANAGERS]:
                with contextlib.suppress(AssertionError, OSError):
                    self.look(node.tasks(desired=""))

    def look(self, tasks: list[Any]) -> None:
        for task in tasks:
            if address := address_of(task, self.network):
                self.holders[address].add(task["ID"])

    def __enter__(self) -> Seen:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


@pytest.mark.nightly
def test_addresses_are_never_given_twice(cluster: Cluster, first: Node) -> None:
    """Services come and go while the leading manager is killed again and again. Neither the records
    nor the containers' namespaces have an address twice.
    """
    network = first.network("net")
    made, rounds = 0, 0
    virtual: set[str] = set()
    began = time.monotonic()
    with Seen(cluster, network) as seen:
        while made < LIVES:
            rounds += 1
            names = [f"s{rounds}-{number}" for number in range(3)]
            for name in names:
                retried(cluster, "POST", "/services/create", spec_of(name, 8))
            made += 24
            if rounds % 2:
                cluster.leader(cluster.nodes[:MANAGERS]).kill_manager()
            for name in names:
                any_manager(cluster).until_running(name, 8, 90)
            inside = addresses_inside(cluster)
            assert len(inside) == len(set(inside)), sorted(inside)
            for name in names:
                (address,) = any_manager(cluster).ask("GET", f"/services/{name}")["Endpoint"]["VirtualIPs"]
                assert address["Addr"] not in virtual or time.monotonic() - began > 60
                virtual.add(address["Addr"])
            if rounds % 3 == 0:
                cluster.leader(cluster.nodes[:MANAGERS]).kill_manager()
            for name in names:
                retried(cluster, "DELETE", f"/services/{name}")
    until_ready(cluster)
    doubled = {address: tasks for address, tasks in seen.holders.items() if len(tasks) > 1}
    if time.monotonic() - began < 60:
        assert not doubled
    assert not set(seen.holders) & {address.partition("/")[0] for address in virtual}
    assert len(seen.holders) >= made * 0.9 or time.monotonic() - began > 60
    until("no task is left", lambda: not any(node.task_containers() for node in cluster.nodes), 60)
    for node in cluster.nodes:
        until_overlays(node, set())


def spec_of(name: str, replicas: int) -> dict[str, Any]:
    container = {"Image": "busybox", "Command": ["sleep", "100000"], "StopGracePeriod": 0}
    return {
        "Name": name,
        "TaskTemplate": {"ContainerSpec": container} | overlay("net"),
        "Mode": {"Replicated": {"Replicas": replicas}},
    }


def any_manager(cluster: Cluster) -> Node:
    """A manager that answers with the swarm's records."""

    def found() -> Node | None:
        for node in random.sample(cluster.nodes[:MANAGERS], MANAGERS):
            with contextlib.suppress(OSError):
                if node.request("GET", "/v1.44/services", timeout=10).status == 200:
                    return node
        return None

    return until("a manager answers", found, 60)  # type: ignore[no-any-return]


def retried(cluster: Cluster, method: str, path: str, body: Any = None) -> None:
    """A request at any manager, again after a failure of the manager. It may have been carried out
    before.
    """

    def done() -> bool:
        with contextlib.suppress(OSError):
            answer = any_manager(cluster).request(method, f"/v1.44{path}", body, timeout=30)
            return answer.status in (200, 201, 404 if method == "DELETE" else 409)
        return False

    until(f"{method} {path}", done, 60)


def addresses_inside(cluster: Cluster) -> list[str]:
    """The addresses of all running tasks' eth0, as their namespaces have them."""
    found = []
    for node in cluster.nodes:
        for entry in node.task_containers().values():
            with contextlib.suppress(AssertionError, OSError):
                pid = node.inspect(entry["Id"])["State"]["Pid"]
                for link in packets.shown(f"/proc/{pid}/ns/net", "address", "show", "dev", "eth0"):
                    found += [each["local"] for each in link["addr_info"] if each["family"] == "inet"]
    return found
