"""Overlay networks on three real engines: addresses, routes, names, virtual addresses, containers
on attachable networks, repair, and that nothing is left.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.engine import packets
from tests.support.engine.harness import until
from tests.support.swarm.clusters import DRAINING, SECOND, Cluster, Node, address_of
from tests.support.swarm.networks import (
    INGRESS_VNI,
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

NODES = 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A manager and two workers."""
    with Cluster(NODES) as made:
        made.form(1)
        yield made


@pytest.fixture
def first(cluster: Cluster) -> Iterator[Node]:
    """The manager. No service, container or network is left behind."""
    yield cluster[0]
    tidy(cluster)


def place(cluster: Cluster, task: Any) -> str:
    return cluster.node_of(task).place_of(task)


def clients(cluster: Cluster, first: Node, *networks: str) -> list[str]:
    """A task on each node; returns the paths of their namespaces."""
    first.service("clients", replicas=None, template=overlay(*networks))
    tasks = first.until_running("clients", NODES)
    return [place(cluster, task) for task in sorted(tasks, key=lambda task: str(task["NodeID"]))]


# --- a network on a node --------------------------------------------------------------------------


def test_a_network_is_on_a_node_while_it_has_tasks(cluster: Cluster, first: Node) -> None:
    network = first.network("net")
    vni = vni_of(first, network)
    assert vni > INGRESS_VNI
    for node in cluster.nodes:
        until_overlays(node, set())
    first.service("web", replicas=1, template=overlay("net"))
    (task,) = first.until_running("web", 1)
    home = cluster.node_of(task)
    for node in cluster.nodes:
        until_overlays(node, {vni} if node is home else set())
    shown = home.ask("GET", f"/networks/{network}")
    assert (shown["Name"], shown["Driver"], shown["Scope"]) == ("net", "overlay", "swarm")
    first.update_service("web", lambda spec: spec["Mode"]["Replicated"].update(Replicas=2 * NODES))
    tasks = first.until_running("web", 2 * NODES)
    for node in cluster.nodes:
        until_overlays(node, {vni})
    until_routed(cluster, network, lambda: first.tasks("web"))
    addresses = [address_of(task, network) for task in tasks]
    assert len(set(addresses)) == 2 * NODES and "" not in addresses
    refused = first.request("DELETE", f"/v1.44/networks/{network}")
    assert refused.status >= 400 and b"in use" in refused.body, refused
    first.update_service("web", lambda spec: spec["Mode"]["Replicated"].update(Replicas=0))
    for node in cluster.nodes:
        until_overlays(node, set())
    first.ask("DELETE", "/services/web")
    until("its tasks are gone", lambda: not first.tasks(desired=""))
    first.ask("DELETE", f"/networks/{network}")
    assert "net" not in {each["Name"] for each in first.ask("GET", "/networks")}


def test_what_a_network_defines(cluster: Cluster, first: Node) -> None:
    """Subnet, gateway and MTU; an internal network leads nowhere else."""
    config = {"Subnet": "172.31.5.0/24", "Gateway": "172.31.5.254"}
    first.network("own", IPAM={"Config": [config]}, Options={"com.docker.network.driver.mtu": "1300"})
    first.network("inner", Internal=True)
    outside = cluster.outside()
    found = {}
    for name in ("own", "inner"):
        first.service(name, replicas=None, template=overlay(name))
        tasks = first.until_running(name, NODES)
        found[name] = [(cluster.node_of(task).place_of(task), address_of(task, name)) for task in tasks]
        for at, _ in found[name]:
            for _, address in found[name]:
                ping(at, address)
    for at, address in found["own"]:
        assert address.startswith("172.31.5.") and address != "172.31.5.254"
        assert packets.routes(at)["default"]["gateway"] == "172.31.5.254"
        (link,) = [link for link in packets.links(at) if link["ifname"] == "eth0"]
        assert link["mtu"] == 1300
        ping(at, outside.address)
    for at, _ in found["inner"]:
        assert "default" not in packets.routes(at)
        (link,) = [link for link in packets.links(at) if link["ifname"] == "eth0"]
        assert link["mtu"] == 1450
        with pytest.raises(OSError):
            packets.connected(at, outside.address, 9, seconds=1)


def ping(at: str, address: str, size: int = 56) -> None:
    done = packets.ran(at, "busybox", "ping", "-c", "1", "-W", "3", "-s", str(size), address)
    assert done.returncode == 0, (at, address, done)


def test_packets_of_the_whole_mtu_pass(cluster: Cluster, first: Node) -> None:
    """TCP of full segments between nodes, and pings that just fit."""
    network = first.network("net")
    web(first, "web", "net", replicas=NODES)
    tasks = first.until_running("web", NODES)
    for at in clients(cluster, first, "net"):
        for task in tasks:
            address = address_of(task, network)
            ping(at, address, 1450 - 28)
            with packets.connected(at, address, 81) as connection:
                data = bytes(range(256)) * 4096
                sender = packets.sending(connection, data)
                received = b""
                while len(received) < len(data):
                    chunk = connection.recv(1 << 16)
                    assert chunk
                    received += chunk
                sender.join()
                assert received == data


# --- names and virtual addresses ------------------------------------------------------------------


def test_names_and_virtual_addresses(cluster: Cluster, first: Node) -> None:
    network = first.network("net")
    web(first, "web", "net", replicas=NODES)
    tasks = first.until_running("web", NODES)
    virtual = first.virtual_address("web", network)
    own = sorted(address_of(task, network) for task in tasks)
    assert virtual not in own
    for at in clients(cluster, first, "net"):
        answered_by(at, virtual, host_names(cluster, tasks))
        assert packets.lookup(at, "web") == ([virtual], 5)
        assert packets.lookup(at, "WEB.")[0] == [virtual]
        until("tasks.web has all", lambda at=at: packets.addresses(at, "tasks.web") == own)
        assert packets.lookup(at, "web", "AAAA")[0] == []
        ping(at, virtual)
        for task in tasks:
            name = f"web.{task['Slot']}.{task['ID']}"
            assert packets.addresses(at, name) == [address_of(task, network)]
            assert packets.reverse(at, address_of(task, network)) == [f"{name}.net"]
    assert first.ask("GET", "/services/web")["Endpoint"]["Spec"]["Mode"] == "vip"
    # each change reaches every node
    first.update_service("web", lambda spec: spec["Mode"]["Replicated"].update(Replicas=1))
    (left,) = first.until_running("web", 1)
    for at in (place(cluster, task) for task in first.tasks("clients")):
        answered_by(at, virtual, host_names(cluster, [left]))
        until("the names are gone", lambda at=at: packets.addresses(at, "tasks.web") == [address_of(left, network)])


def test_aliases_and_the_mode_dnsrr(cluster: Cluster, first: Node) -> None:
    network = first.network("net")
    template = {"Networks": [{"Target": "net", "Aliases": ["www", "front"]}]}
    web(first, "vip", replicas=2, template=template)
    template = {"Networks": [{"Target": "net", "Aliases": ["turns"]}]}
    web(first, "dnsrr", replicas=NODES, template=template, EndpointSpec={"Mode": "dnsrr"})
    first.until_running("vip", 2)
    tasks = first.until_running("dnsrr", NODES)
    virtual = first.virtual_address("vip", network)
    assert not first.ask("GET", "/services/dnsrr")["Endpoint"].get("VirtualIPs")
    own = sorted(address_of(task, network) for task in tasks)
    for at in clients(cluster, first, "net"):
        for name in ("vip", "www", "front"):
            assert packets.addresses(at, name) == [virtual]
        for name in ("dnsrr", "turns", "tasks.dnsrr"):
            until(f"{name} has all", lambda at=at, name=name: packets.addresses(at, name) == own)
        firsts = {packets.lookup(at, "dnsrr")[0][0] for _ in range(4 * NODES)}
        assert firsts == set(own), "the answers are rotated"


def test_a_task_reaches_itself_by_the_virtual_address(cluster: Cluster, first: Node) -> None:
    network = first.network("net")
    web(first, "web", "net")
    (task,) = first.until_running("web", 1)
    for _ in range(10):
        answered_by(place(cluster, task), first.virtual_address("web", network), host_names(cluster, [task]))


def test_udp_moves_at_once_to_another_task(cluster: Cluster, first: Node) -> None:
    """A client that keeps its socket is answered by another task when its own is gone."""
    network = first.network("net")
    template = overlay("net") | {"RestartPolicy": {"Condition": "none"}}
    first.service("udp", replicas=2, template=template)
    tasks = first.until_running("udp", 2)
    virtual = first.virtual_address("udp", network)
    (at, *_) = clients(cluster, first, "net")
    with (
        packets.Echo(place(cluster, tasks[0]), 5000, tasks[0]["ID"]),
        packets.Echo(place(cluster, tasks[1]), 5000, tasks[1]["ID"]),
        packets.new_socket(at, socket.SOCK_DGRAM, 0.5) as client,
    ):
        client.connect((virtual, 5000))

        def answered() -> str:
            try:
                client.send(b"?")
                return client.recv(100).decode().split()[0]
            except OSError:
                return ""

        before = until("an answer", answered)
        (gone,) = [task for task in tasks if task["ID"] == before]
        (kept,) = [task["ID"] for task in tasks if task["ID"] != before]
        node = cluster.node_of(gone)
        node.ask("POST", f"/containers/{node.task_containers()[before]['Id']}/kill")
        until("the other one answers", lambda: answered() == kept, 5)


def test_an_unhealthy_task_and_one_that_stops_get_no_requests(cluster: Cluster, first: Node) -> None:
    network = first.network("net")
    check = {"Test": ["CMD", "test", "!", "-e", "/ill"], "Interval": SECOND // 2, "Retries": 2}
    container = {"Healthcheck": check, "StopGracePeriod": 20 * SECOND}
    web(first, "web", "net", replicas=2, container=container, command=DRAINING)
    tasks = first.until_running("web", 2)
    virtual = first.virtual_address("web", network)
    at = clients(cluster, first, "net")[0]
    answered_by(at, virtual, host_names(cluster, tasks))
    ill, well = tasks
    with open(f"/proc/{cluster.node_of(ill).pid_of(ill)}/root/ill", "w", encoding="ascii"):
        pass
    answered_by(at, virtual, host_names(cluster, [well]))
    tasks = until(
        "it is replaced",
        lambda: (
            (found := first.running("web")) and len(found) == 2 and ill["ID"] not in {t["ID"] for t in found} and found
        ),
        60,
    )
    answered_by(at, virtual, host_names(cluster, tasks))


# --- several networks -----------------------------------------------------------------------------


def test_a_task_on_two_networks(cluster: Cluster, first: Node) -> None:
    one, two = first.network("one"), first.network("two")
    web(first, "both", "one", "two", replicas=NODES)
    web(first, "single", "two", replicas=1)
    tasks = first.until_running("both", NODES)
    (single,) = first.until_running("single", 1)
    for task in tasks:
        at = place(cluster, task)
        names = {link["ifname"] for link in packets.links(at)}
        assert {"eth0", "eth1"} <= names
        answered_by(at, first.virtual_address("single", two), host_names(cluster, [single]))
        assert packets.addresses(at, "single") == [first.virtual_address("single", two)]
        assert packets.addresses(at, "both")[0] in (
            first.virtual_address("both", one),
            first.virtual_address("both", two),
        )
    at = place(cluster, single)
    assert packets.addresses(at, "both") == [first.virtual_address("both", two)], "only of a common network"
    answered_by(at, first.virtual_address("both", two), host_names(cluster, tasks))
    with pytest.raises(OSError):
        packets.get(at, address_of(tasks[0], one), seconds=1)


# --- plain containers -----------------------------------------------------------------------------


def test_plain_containers_on_an_attachable_network(cluster: Cluster, first: Node) -> None:
    network = first.network("open", Attachable=True)
    web(first, "web", "open", replicas=2)
    tasks = first.until_running("web", 2)
    virtual = first.virtual_address("web", network)
    found = {}
    for number, node in enumerate(cluster.nodes):
        node.docker("run", "-d", "--name", f"c{number}", "--network", "open", "busybox", "sleep", "100000")
        inspected = node.inspect(f"c{number}")
        address = inspected["NetworkSettings"]["Networks"]["open"]["IPAddress"]
        found[f"c{number}"] = (f"/proc/{inspected['State']['Pid']}/ns/net", address, node)
    assert len({address for _, address, _ in found.values()}) == NODES
    for at, _, _ in found.values():
        assert packets.addresses(at, "web") == [virtual]
        answered_by(at, virtual, host_names(cluster, tasks))
        for name, (_, address, _) in found.items():
            until(
                f"{name} is known", lambda at=at, name=name, address=address: packets.addresses(at, name) == [address]
            )
            ping(at, address)
    # disconnect and connect, restart, remove
    _, address, node = found["c1"]
    node.docker("network", "disconnect", "open", "c1")
    other = found["c2"][0]
    until("its name is gone", lambda: packets.addresses(other, "c1") == [])
    assert packets.ran(other, "busybox", "ping", "-c", "1", "-W", "1", address).returncode
    node.docker("network", "connect", "--alias", "again", "open", "c1")
    node.docker("restart", "-t", "0", "c1")
    now = node.inspect("c1")["NetworkSettings"]["Networks"]["open"]["IPAddress"]
    until("its alias is known", lambda: packets.addresses(other, "again") == [now])
    ping(other, now)
    node.docker("rm", "-f", "c1")
    until("its names are gone", lambda: packets.addresses(other, "again") == packets.addresses(other, "c1") == [])


def test_refusals(cluster: Cluster, first: Node) -> None:
    network = first.network("net")
    for node in cluster.nodes:
        body = {"Image": "busybox", "HostConfig": {"NetworkMode": "net"}}
        answer = node.request("POST", "/v1.44/containers/create", body)
        if answer.status == 201:
            answer = node.request("POST", f"/v1.44/containers/{answer.json()['Id']}/start")
        assert answer.status in (403, 404), answer
        if answer.status == 403:
            assert b"not manually attachable" in answer.body
    worker = cluster[1]
    answer = worker.request("POST", "/v1.44/networks/create", {"Name": "other", "Driver": "overlay"})
    assert answer.status in (406, 503) and b"manager" in answer.body, answer
    assert first.ask("POST", "/networks/create", {"Name": "net", "Driver": "overlay"}, status=409)
    assert first.ask("DELETE", "/networks/nosuch", status=404)
    answer = first.request("POST", "/v1.44/services/create", {"Name": "x", "TaskTemplate": {
        "ContainerSpec": {"Image": "busybox"}, "Networks": [{"Target": "nosuch"}]}})  # fmt: skip
    assert answer.status == 404, answer
    for local in ("none", "ingress"):
        answer = first.request("POST", "/v1.44/services/create", {"Name": "x", "TaskTemplate": {
            "ContainerSpec": {"Image": "busybox"}, "Networks": [{"Target": local}]}})  # fmt: skip
        assert local == "none" or answer.status == 403, answer
        if answer.status == 201:
            first.ask("DELETE", "/services/x")
    spec = {"Subnet": "10.9.0.0/24"}
    first.network("a", IPAM={"Config": [spec]})
    answer = first.request(
        "POST", "/v1.44/networks/create", {"Name": "b", "Driver": "overlay", "IPAM": {"Config": [spec]}}
    )
    assert answer.status in (400, 403), answer
    assert network


def test_a_network_without_free_addresses_says_so(cluster: Cluster, first: Node) -> None:
    first.network("tiny", IPAM={"Config": [{"Subnet": "10.9.0.0/29"}]})
    # 8 addresses: the net's own, the gateway's, the broadcast and the virtual one
    first.service("web", replicas=6, template=overlay("tiny"))
    until("four run", lambda: len(first.running("web")) == 4)
    waiting = until(
        "two say why",
        lambda: (
            len(errors := [t["Status"].get("Err", "") for t in first.tasks("web") if t["Status"]["State"] != "running"])
            == 2
            and all(errors)
            and errors
        ),
    )
    assert all("tiny" in error and "address" in error for error in waiting), waiting
    addresses = {address_of(task, "tiny") for task in first.running("web")}
    assert len(addresses) == 4


# --- restarts and repair --------------------------------------------------------------------------


def test_a_daemon_that_is_restarted_finds_its_networks(cluster: Cluster, first: Node) -> None:
    network = first.network("net")
    web(first, "web", "net", replicas=NODES)
    tasks = first.until_running("web", NODES)
    virtual = first.virtual_address("web", network)
    places = clients(cluster, first, "net")
    for at in places:
        answered_by(at, virtual, host_names(cluster, tasks))
    worker = cluster[1]
    held = worker.overlays()
    inodes = {vni: packets.inode(at) for vni, at in held.items()}
    worker.kill9()
    for at in places:
        assert len(packets.sweep(at, virtual)) > 1
    worker.start()
    assert {vni: packets.inode(at) for vni, at in worker.overlays().items()} == inodes
    for at in places:
        answered_by(at, virtual, host_names(cluster, tasks))
    (gone,) = [task for task in tasks if cluster.node_of(task) is worker]
    worker.ask("POST", f"/containers/{worker.task_containers()[gone['ID']]['Id']}/kill")
    until("it is replaced", lambda: gone["ID"] not in {task["ID"] for task in first.until_running("web", NODES)})
    tasks = first.until_running("web", NODES)
    for at in places:
        answered_by(at, virtual, host_names(cluster, tasks))
    until_routed(cluster, network, first.tasks)


def test_what_others_delete_is_put_back(cluster: Cluster, first: Node) -> None:
    network = first.network("net")
    web(first, "web", "net", replicas=NODES)
    tasks = first.until_running("web", NODES)
    virtual = first.virtual_address("web", network)
    worker = cluster[1]
    (mine,) = [task for task in tasks if cluster.node_of(task) is worker]
    (other, *_) = [task for task in tasks if task is not mine]
    at, vni = place(cluster, mine), vni_of(first, network)
    remote = address_of(other, network)
    answered_by(at, virtual, host_names(cluster, tasks))
    for command in (
        ["ip", "route", "delete", f"{remote}/32"],
        ["ip", "route", "delete", f"{address_of(mine, network)}/32"],
        ["ip", "neigh", "delete", cluster.node_of(other).address, "dev", "vxlan0"],
        ["ip", "link", "set", "vxlan0", "down"],
        ["ip", "link", "delete", "vxlan0"],
    ):
        done = packets.ran(worker.overlays()[vni], *command)
        assert done.returncode == 0, (command, done)

        def back() -> bool:
            return packets.got(at, remote, seconds=0.5) != ""

        try:
            until(f"{' '.join(command)} is repaired", back, 20)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{worker.log()[-3000:]}") from None
        answered_by(at, virtual, host_names(cluster, tasks))
        until_routed(cluster, network, lambda: tasks)


def test_nothing_is_left_after_many_lives(cluster: Cluster, first: Node) -> None:
    """Descriptors, links and processes of each node are as many as before."""
    network = first.network("net")

    def lives() -> None:
        web(first, "web", "net", replicas=2 * NODES, EndpointSpec=published((8080, 80)))
        first.until_running("web", 2 * NODES)
        first.ask("DELETE", "/services/web")
        until("no task is left", lambda: not any(node.task_containers() for node in cluster.nodes))
        for node in cluster.nodes:
            until_overlays(node, set())

    lives()  # fills caches and stocks
    before = [(node.open_files(), len(packets.held_namespaces(node.pid))) for node in cluster.nodes]
    links = [len([link for link in packets.links(node.place) if "master" not in link]) for node in cluster.nodes]
    for _ in range(2):
        lives()

    def same() -> bool:
        now = [(node.open_files(), len(packets.held_namespaces(node.pid))) for node in cluster.nodes]
        grown = [(a[0] - b[0], a[1] - b[1]) for a, b in zip(now, before, strict=True)]
        still = [len([link for link in packets.links(node.place) if "master" not in link]) for node in cluster.nodes]
        assert still == links
        return all(files <= 2 and namespaces <= 8 for files, namespaces in grown)

    until("as many descriptors as before", same)
    assert network


def test_leaving_the_swarm_leaves_nothing(cluster: Cluster, first: Node) -> None:
    first.network("net", Attachable=True)
    web(first, "web", "net", replicas=2 * NODES, EndpointSpec=published((8080, 80)))
    first.until_running("web", 2 * NODES)
    worker = cluster[2]
    worker.leave()
    assert not worker.task_containers()
    until("no overlay is left", lambda: not worker.overlays())
    assert all(each["Scope"] != "swarm" for each in worker.ask("GET", "/networks"))
    assert packets.got(cluster.outside().place, worker.address, 8080, seconds=1) == ""
    until("no vxlan is left", lambda: not any("vx" in name for name in packets.link_names(worker.place)))
    gone = worker.node_id
    until("it is down", lambda: first.nodes()[gone]["Status"]["State"] == "down")
    first.ask("DELETE", f"/nodes/{gone}")
    worker.join(first)
    until("it is ready", lambda: first.nodes()[worker.node_id]["Status"]["State"] == "ready")
