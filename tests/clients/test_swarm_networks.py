"""Overlay networks and published ports of a swarm with the docker CLIs, docker-py, stacks and
compose, on a manager and a worker.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker as docker_py
import pytest
from docker.errors import APIError, NotFound
from docker.types import EndpointSpec, NetworkAttachmentConfig

from tests.clients import programs
from tests.clients.conftest import Docker
from tests.support import PATIENCE
from tests.support.engine import packets
from tests.support.engine.harness import until
from tests.support.nightly import nightly
from tests.support.swarm.clusters import Cluster, Node
from tests.support.swarm.networks import answered_by, host_names, tidy

SERVER = "mkdir /w; hostname > /w/index.html; exec httpd -f -p 80 -h /w"
PORT = 8080


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A manager and a worker."""
    with Cluster(2) as made:
        made.form(1)
        yield made


@pytest.fixture
def node(cluster: Cluster) -> Iterator[Node]:
    """The manager. No service, container or network is left behind."""
    yield cluster[0]
    tidy(cluster)


@pytest.fixture(params=(programs.BOOKWORM, programs.FORKY), ids=lambda program: program.name)
def docker(request: pytest.FixtureRequest, node: Node) -> Docker:
    """The oldest and the newest docker CLI at the manager."""
    return Docker(request.param, node)


def service(docker: Docker, *arguments: str, **more: Any) -> str:
    fast = ("-d", "--no-resolve-image", "--stop-grace-period", "0s", "--restart-delay", "0s")
    return docker("service", "create", *fast, *arguments, **more).out.strip()


def inspected(docker: Docker, *arguments: str) -> Any:
    return json.loads(docker(*arguments).out)[0]


def serves(cluster: Cluster, node: Node, name: str, count: int, port: int = PORT) -> list[Any]:
    """Wait until a service's tasks answer on the published port of every node."""

    def served() -> list[Any]:
        tasks = node.until_running(name, count)
        with contextlib.suppress(AssertionError):  # an update replaces them meanwhile
            for each in cluster.nodes:
                answered_by(cluster.outside().place, each.address, host_names(cluster, tasks), port, seconds=3)
            return tasks
        return []

    return until(f"{name} answers on port {port} of all nodes", served, 60)  # type: ignore[no-any-return]


def test_networks(docker: Docker, cluster: Cluster, node: Node) -> None:
    options = ("--attachable", "--label", "a=b", "--subnet", "10.50.0.0/24", "--gateway", "10.50.0.9")
    made = docker("network", "create", "-d", "overlay", *options, "-o", "x=y", "lan").line
    assert re.fullmatch("[0-9a-z]{25}", made)
    [line] = docker.lines("network", "ls", "-f", "driver=overlay", "-f", "name=lan", "--format", "{{json .}}")
    shown = json.loads(line)
    assert (shown["Driver"], shown["Scope"], shown["ID"]) == ("overlay", "swarm", made[:12])
    names = docker.lines("network", "ls", "-f", "scope=swarm", "--format", "{{.Name}}")
    assert sorted(names) == ["ingress", "lan"]
    found = inspected(docker, "network", "inspect", "lan")
    assert found["IPAM"]["Config"] == [{"Subnet": "10.50.0.0/24", "Gateway": "10.50.0.9"}]
    assert found["Attachable"] and not found["Internal"] and not found["Ingress"]
    assert found["Labels"] == {"a": "b"} and found["Options"]["x"] == "y"
    service(
        docker, "--name", "web", "--network", "name=lan,alias=www", "--replicas", "2", "busybox", "sh", "-c", SERVER
    )
    tasks = node.until_running("web", 2)
    found = inspected(docker, "network", "inspect", "--verbose", "lan")
    assert set(found["Services"]) >= {"web"} and len(found["Services"]["web"]["Tasks"]) == 2
    assert {peer["IP"] for peer in found["Peers"]} >= {node.address}
    [attached] = inspected(docker, "service", "inspect", "web")["Endpoint"]["VirtualIPs"]
    assert attached["NetworkID"] == made and attached["Addr"].endswith("/24")
    virtual = attached["Addr"].partition("/")[0]
    for each in cluster.nodes:
        at = Docker(docker.program, each)
        assert (
            at("run", "--rm", "--network", "lan", "busybox", "sh", "-c", "ping -c 1 -W 5 www >&2; echo $?").line == "0"
        )
        fetched = at("run", "--rm", "--network", "lan", "busybox", "wget", "-q", "-O", "-", f"http://{virtual}/").line
        assert fetched in host_names(cluster, tasks)
        lines = at("run", "--rm", "--network", "lan", "--name", "probe", "busybox", "nslookup", "web").out
        assert virtual in lines
    at = Docker(docker.program, cluster[1])
    assert "lan" in at.lines("network", "ls", "--format", "{{.Name}}"), "a worker lists what it uses"
    assert "in use" in docker("network", "rm", "lan", status=1).err
    docker("service", "rm", "web")
    until("it can be removed", lambda: docker("network", "rm", "lan", status=None).status == 0)
    assert "routing-mesh network" in docker("network", "rm", "ingress", input="n\n").out
    assert docker.lines("network", "ls", "-q", "-f", "name=ingress")


def test_published_ports(docker: Docker, cluster: Cluster, node: Node) -> None:
    service(docker, "--name", "web", "--publish", f"{PORT}:80", "--replicas", "2", "busybox", "sh", "-c", SERVER)
    serves(cluster, node, "web", 2)
    assert f"*:{PORT}->80/tcp" in docker("service", "ls").out
    pretty = docker("service", "inspect", "--pretty", "web").out
    assert f"PublishedPort = {PORT}" in pretty and "PublishMode = ingress" in pretty
    assert "Endpoint Mode:\tvip" in pretty
    docker("service", "update", "-d", "--no-resolve-image", "--publish-add", "published=8081,target=80", "web")
    serves(cluster, node, "web", 2, 8081)
    docker("service", "update", "-d", "--no-resolve-image", "--publish-rm", "80", "--publish-add", "8082:80", "web")
    serves(cluster, node, "web", 2, 8082)
    refused = docker("service", "create", "-d", "--no-resolve-image", "-p", "8082:80", "busybox", status=1)
    assert "8082" in refused.err and "in use" in refused.err
    refused = docker(
        "service", "create", "-d", "--no-resolve-image", "-p", "80", "--endpoint-mode", "dnsrr", "busybox", status=1
    )
    assert "dnsrr" in refused.err or "dns" in refused.err.lower()


def test_progress_of_a_service_with_a_network(docker: Docker, node: Node) -> None:
    docker("network", "create", "-d", "overlay", "lan")
    fast = ("--no-resolve-image", "--stop-grace-period", "0s", "--update-monitor", "500ms")
    shown = docker("service", "create", *fast, "--network", "lan", "--name", "web", "busybox", "sleep", "9999")
    assert "verify: Service" in shown.out and "converged" in shown.out
    docker("network", "create", "-d", "overlay", "more")
    docker("service", "update", "--no-resolve-image", "--network-add", "more", "web")
    (task,) = node.until_running("web", 1)
    names = {each["Network"]["Spec"]["Name"] for each in task["NetworksAttachments"]}
    assert names == {"lan", "more"}
    docker("service", "update", "--no-resolve-image", "--network-rm", "lan", "web")
    (task,) = node.until_running("web", 1)
    assert {each["Network"]["Spec"]["Name"] for each in task["NetworksAttachments"]} == {"more"}


STACK = """
version: "3.8"
services:
  web:
    image: busybox
    command: ["sh", "-c", "mkdir /w; hostname > /w/index.html; exec httpd -f -p 80 -h /w"]
    stop_grace_period: 0s
    ports: ["8080:80"]
    networks: {front: {aliases: [www]}, back: {}}
    deploy: {replicas: 2, restart_policy: {delay: 0s}}
  db:
    image: busybox
    command: ["sleep", "99999"]
    stop_grace_period: 0s
    networks: [back]
    deploy: {endpoint_mode: dnsrr, restart_policy: {delay: 0s}}
networks:
  front: {driver: overlay, attachable: true}
  back: {driver: overlay, internal: true, ipam: {config: [{subnet: 10.60.0.0/24}]}}
"""


def test_a_stack(docker: Docker, cluster: Cluster, node: Node, tmp_path: Path) -> None:
    (tmp_path / "stack.yml").write_text(STACK)
    deploy = ("stack", "deploy", "--resolve-image", "never", *(("--detach=true",) if docker.minor >= 45 else ()))
    docker(*deploy, "-c", "stack.yml", "shop", cwd=tmp_path)
    tasks = serves(cluster, node, "shop_web", 2)
    (database,) = node.until_running("shop_db", 1)
    at = cluster.node_of(database).place_of(database)
    assert "default" not in packets.routes(at), "its network is internal"
    back = inspected(docker, "network", "inspect", "shop_back")
    assert back["Internal"] and back["IPAM"]["Config"][0]["Subnet"] == "10.60.0.0/24"
    virtual = node.virtual_address("shop_web", back["Id"])
    assert packets.addresses(at, "web") == packets.addresses(at, "shop_web") == [virtual]
    answered_by(at, virtual, host_names(cluster, tasks))
    for task in tasks:
        at = cluster.node_of(task).place_of(task)
        assert len(packets.addresses(at, "db")) == 1 and packets.addresses(at, "www")
    docker(*deploy, "-c", "stack.yml", "shop", cwd=tmp_path)
    assert {task["ID"] for task in node.tasks("shop_web")} == {task["ID"] for task in tasks}, "nothing has changed"
    docker("stack", "rm", "shop")
    until("all is removed", lambda: docker("network", "ls", "-q", "-f", "name=shop_").out == "")


COMPOSE = """
services:
  tool:
    image: busybox
    command: ["sleep", "99999"]
    stop_grace_period: 0s
    networks: {lan: {aliases: [helper]}, default: {}}
networks:
  lan: {external: true, name: lan}
"""


def test_compose_on_an_attachable_network(cluster: Cluster, node: Node, tmp_path: Path) -> None:
    """A project on the worker reaches a service of the swarm, and is reached by its alias."""
    cli = Docker(programs.FORKY, node)
    cli("network", "create", "-d", "overlay", "--attachable", "lan")
    service(cli, "--name", "web", "--network", "lan", "busybox", "sh", "-c", SERVER)
    (task,) = node.until_running("web", 1)
    (tmp_path / "compose.yml").write_text(COMPOSE)
    worker = Docker(programs.FORKY, cluster[1])
    compose = ("compose", "-p", "project")
    try:
        worker(*compose, "up", "-d", cwd=tmp_path, timeout=120)
        # the static busybox looks up names with nslookup alone
        virtual = node.virtual_address("web", node.ask("GET", "/networks/lan")["Id"])
        assert virtual in worker(*compose, "exec", "-T", "tool", "nslookup", "web", cwd=tmp_path).out
        fetch = ("exec", "-T", "tool", "wget", "-q", "-O", "-", f"http://{virtual}/")
        assert worker(*compose, *fetch, cwd=tmp_path).line in host_names(cluster, [task])
        at = cluster.node_of(task).place_of(task)
        until("its alias is known", lambda: packets.addresses(at, "helper"))
        before = worker(*compose, "ps", "-q", cwd=tmp_path).out
        worker(*compose, "up", "-d", cwd=tmp_path, timeout=120)
        assert worker(*compose, "ps", "-q", cwd=tmp_path).out == before, "nothing has changed"
    finally:
        worker(*compose, "down", "-t", "0", cwd=tmp_path, timeout=120)
    until("its alias is gone", lambda: not packets.addresses(at, "helper"))


@pytest.mark.parametrize("minor", [24, *nightly(25, 29, 32, 40, 44), 52])
def test_docker_py(cluster: Cluster, node: Node, minor: int) -> None:
    client = docker_py.DockerClient(base_url=f"unix://{node.socket}", version=f"1.{minor}", timeout=int(60 * PATIENCE))
    try:
        more: dict[str, Any] = {"attachable": True, "scope": "swarm"} if minor >= 30 else {}
        network = client.networks.create("lan", driver="overlay", check_duplicate=True, **more)
        network.reload()
        assert network.attrs["Scope"] == "swarm" and network.attrs["Driver"] == "overlay"
        attached = [NetworkAttachmentConfig("lan", aliases=["www"])] if minor >= 25 else ["lan"]
        service = client.services.create(
            "busybox:latest", ["sh", "-c", SERVER], name="web", networks=attached, stop_grace_period=0,
            endpoint_spec=EndpointSpec(ports={PORT: 80}),
        )  # fmt: skip
        tasks = serves(cluster, node, "web", 1)
        service.reload()
        endpoint = service.attrs["Endpoint"]
        assert [port["PublishedPort"] for port in endpoint["Ports"]] == [PORT]
        assert network.id in {each["NetworkID"] for each in endpoint["VirtualIPs"]}
        (task,) = service.tasks(filters={"desired-state": "running"})
        assert network.id in {each["Network"]["ID"] for each in task["NetworksAttachments"]}
        assert [each.name for each in client.networks.list(names=["lan"])] == ["lan"]
        with pytest.raises(APIError, match="in use"):
            network.remove()
        service.remove()
        until("its task is gone", lambda: not node.tasks(desired=""))
        network.remove()
        with pytest.raises(NotFound):
            client.networks.get(network.id)
        assert tasks
    finally:
        client.close()


@pytest.mark.parametrize("docker", (programs.BOOKWORM,), indirect=True, ids=("bookworm",))
def test_a_cli_of_1_24(docker: Docker, cluster: Cluster, node: Node) -> None:
    node.docker("network", "create", "-d", "overlay", "lan")
    node.docker(
        *[
            "service",
            "create",
            "--name",
            "web",
            "--network",
            "lan",
            "-p",
            "8080:80",
            "--stop-grace-period",
            "0s",
            "busybox",
        ],
        "sh",
        "-c",
        SERVER,
    )
    tasks = serves(cluster, node, "web", 1)
    assert "swarm" in next(line for line in node.docker("network", "ls").out.splitlines() if " lan " in line)
    node.docker(*["service", "update", "--publish-rm", "80", "--publish-add", "8081:80", "web"])
    serves(cluster, node, "web", 1, 8081)
    assert tasks
