"""Networks of a swarm beside those of the engine, by raw requests: lists, lookups, refusals,
versions, services that name them, events.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest

from tests.support.engine import strict
from tests.support.engine.harness import until
from tests.support.swarm.clusters import Cluster, Node


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A manager and a worker."""
    with Cluster(2) as cluster:
        cluster.form(1)
        yield cluster
        for number in (1, 0):
            cluster[number].leave(force=True)


@pytest.fixture
def node(cluster: Cluster) -> Iterator[Node]:
    node = cluster[0]
    yield node
    for service in node.ask("GET", "/services"):
        node.ask("DELETE", f"/services/{service['ID']}")
    for network in node.ask("GET", '/networks?filters={"type":["custom"]}'):
        if not network["Ingress"]:
            node.ask("DELETE", f"/networks/{network['Id']}")
    until("the containers of tasks have gone", lambda: not node.task_containers())


def create(node: Node, name: str, version: str = "1.44", **fields: Any) -> str:
    """The id of a new network of the swarm."""
    body = {"Name": name, "Driver": "overlay"} | fields
    return str(node.ask("POST", "/networks/create", body, version=version, status=201)["Id"])


def refused(node: Node, method: str, path: str, body: Any, status: int, words: str, version: str = "1.44") -> None:
    found = node.ask(method, path, body, status=status, version=version)
    assert words in found["message"], found


def service(name: str, *networks: str, **fields: Any) -> dict[str, Any]:
    template = {
        "ContainerSpec": {"Image": "busybox", "Command": ["sleep", "9999"]},
        "Networks": [{"Target": each} for each in networks],
    }
    return {"Name": name, "TaskTemplate": template, "Mode": {"Replicated": {"Replicas": 0}}} | fields


def names(node: Node, query: str = "", version: str = "1.44") -> list[str]:
    found = [each["Name"] for each in node.ask("GET", f"/networks{query}", version=version)]
    assert len(set(found)) == len(found), found
    return found


@pytest.mark.parametrize("version", ["1.24", "1.28", "1.55"])
def test_list_and_inspect(node: Node, version: str) -> None:
    key = create(node, "net", version, Labels={"a": "b"}, Attachable=True, Internal=True)
    own = node.ask("POST", "/networks/create", {"Name": "own"}, status=201)["Id"]
    assert set(names(node, version=version)) == {"bridge", "host", "none", "ingress", "net", "own"}
    assert names(node, '?filters={"driver":["overlay"],"label":["a"]}') == ["net"]
    assert names(node, '?filters={"scope":["local"],"name":["n"]}') == ["none", "own"]
    [listed] = node.ask("GET", '/networks?filters={"name":["^net$"]}', version=version)
    assert ("Containers" in listed) == (version == "1.24")
    for text in ("net", key, key[:9]):
        found = node.ask("GET", f"/networks/{text}", version=version)
        assert strict.faults(found, strict.NETWORK) == []
        assert found["Id"] == key and found["Scope"] == "swarm" and found["Driver"] == "overlay"
        assert found["Internal"] and found["Labels"] == {"a": "b"} and found["Containers"] == {}
        assert ("Attachable" in found) == ("Peers" in found) == (version != "1.24")
    assert node.ask("GET", f"/networks/{own}")["Scope"] == "local"
    assert node.ask("GET", "/networks/net?verbose=true")["Services"] == {}
    assert "Services" not in node.ask("GET", "/networks/net")


def test_lookups(node: Node) -> None:
    create(node, "net")
    node.ask("POST", "/networks/create", {"Name": "own"}, status=201)
    assert node.ask("GET", "/networks/net?scope=swarm")["Name"] == "net"
    assert node.ask("GET", "/networks/own?scope=local")["Name"] == "own"
    assert node.ask("GET", "/networks/bridge?scope=swarm")["Id"] == "bridge"
    refused(node, "GET", "/networks/net?scope=local", None, 404, "network net not found")
    refused(node, "GET", "/networks/own?scope=swarm", None, 404, "network own not found")
    refused(node, "GET", "/networks/nope", None, 404, "network nope not found")
    refused(node, "GET", "/networks/nope?scope=global", None, 404, "network nope not found")
    refused(node, "GET", "/networks/net?verbose=perhaps", None, 400, "perhaps")


def test_names_are_unique_over_both_scopes(node: Node) -> None:
    create(node, "net")
    node.ask("POST", "/networks/create", {"Name": "own"}, status=201)
    for body in ({"Name": "net"}, {"Name": "net", "Driver": "overlay"}, {"Name": "own", "Driver": "overlay"}):
        refused(node, "POST", "/networks/create", body, 409, f"network with name {body['Name']} already exists")


def test_refusals(node: Node) -> None:
    taken = node.ask("GET", "/networks/ingress")["IPAM"]["Config"][0]["Subnet"]
    for fields, status, words in (
        ({"EnableIPv6": True}, 400, "EnableIPv6"),
        ({"Scope": "local"}, 400, "Scope"),
        ({"Options": {"encrypted": "maybe"}}, 400, "encrypted"),
        ({"Options": {"com.docker.network.driver.mtu": "x"}}, 400, "mtu"),
        ({"IPAM": {"Config": [{"Subnet": "10.0.0.1/24"}]}}, 400, "10.0.0.1/24"),
        ({"IPAM": {"Config": [{"Subnet": taken}]}}, 403, f"subnet {taken}: Pool overlaps"),
        ({"Ingress": True}, 409, "already present"),
        ({"Name": "bridge"}, 403, "bridge"),
    ):
        before = names(node)
        refused(node, "POST", "/networks/create", {"Name": "bad", "Driver": "overlay"} | fields, status, words)
        assert names(node) == before
    refused(node, "DELETE", "/networks/ingress", None, 403, "pre-defined", "1.28")
    refused(node, "DELETE", "/networks/nope", None, 404, "network nope not found")


def test_a_worker(cluster: Cluster, node: Node) -> None:
    key = create(node, "net", Attachable=True)
    worker = cluster[1]
    for version, status in (("1.24", 406), ("1.44", 503)):
        body = {"Name": "other", "Driver": "overlay"}
        refused(worker, "POST", "/networks/create", body, status, "This node is not a swarm manager", version)
    refused(worker, "GET", f"/networks/{key}", None, 404, f"network {key} not found")
    assert "net" not in names(worker)
    until("the worker knows the network ingress", lambda: "ingress" in names(worker))
    ingress = node.ask("GET", "/networks/ingress")
    for text in ("ingress", ingress["Id"], ingress["Id"][:10]):
        found = worker.ask("GET", f"/networks/{text}")
        assert strict.faults(found, strict.NETWORK) == []
        assert found | {"Peers": ingress["Peers"]} == ingress
    assert names(worker, '?filters={"driver":["overlay"]}') == ["ingress"]
    for version, status in (("1.24", 406), ("1.44", 503)):
        refused(worker, "DELETE", "/networks/ingress", None, status, "This node is not a swarm manager", version)


def test_services(node: Node) -> None:
    key = create(node, "net")
    ports = {
        "EndpointSpec": {"Ports": [{"TargetPort": 80}, {"TargetPort": 53, "PublishedPort": 53, "Protocol": "udp"}]}
    }
    made = node.ask("POST", "/services/create", service("web", "net", **ports), status=201)["ID"]
    found = node.ask("GET", f"/services/{made}")
    assert strict.faults(found, strict.SERVICE) == []
    assert found["Spec"]["TaskTemplate"]["Networks"] == [{"Target": key}]
    assert [(port["PublishedPort"], port["PublishMode"]) for port in found["Endpoint"]["Ports"]] == [
        (30000, "ingress"), (53, "ingress"),
    ]  # fmt: skip
    ingress = node.ask("GET", "/networks/ingress")["Id"]

    def addresses() -> bool:
        shown = node.ask("GET", "/services/web")["Endpoint"].get("VirtualIPs") or []
        return {each["NetworkID"] for each in shown} == {key, ingress}

    until("the service has its virtual addresses", addresses)
    shown = node.ask("GET", "/networks/net?verbose=1")
    assert strict.faults(shown, strict.NETWORK) == []
    assert set(shown["Services"]) == {"web"} and shown["Services"]["web"]["VIP"]
    refused(node, "DELETE", "/networks/net", None, 500, "network net is in use by service web")
    refused(node, "DELETE", "/networks/ingress", None, 500, "service web depends on it")
    body = service("other", EndpointSpec={"Ports": [{"TargetPort": 1, "PublishedPort": 53, "Protocol": "udp"}]})
    refused(node, "POST", "/services/create", body, 409, "port '53' is already in use by service 'web'")
    version = node.ask("GET", "/services/web")["Version"]["Index"]
    changed = service("web", **ports)
    path = f"/services/web/update?version={version}"
    refused(node, "POST", path, changed, 500, "changing network in service is not supported", "1.28")
    node.ask("POST", path, changed)
    assert node.ask("POST", "/networks/prune")["NetworksDeleted"] == ["net"]


def test_a_worker_has_a_network_of_the_same_name(cluster: Cluster, node: Node) -> None:
    """By its name it is the worker's own; tasks use the swarm's."""
    worker = cluster[1]
    worker.load_busybox()
    own = worker.ask("POST", "/networks/create", {"Name": "net"}, status=201)["Id"]
    mine = worker.create("sleep", "999", network="net")
    worker.post(f"/containers/{mine}/start")
    key = create(node, "net")
    on_worker = {"Placement": {"Constraints": [f"node.id=={worker.node_id}"]}}
    spec = service("web", "net", Mode={"Replicated": {"Replicas": 1}})
    spec["TaskTemplate"] |= on_worker
    node.ask("POST", "/services/create", spec, status=201)
    [task] = node.until_running("web", 1)
    shown = worker.inspect(task["Status"]["ContainerStatus"]["ContainerID"])
    assert shown["NetworkSettings"]["Networks"]["net"]["NetworkID"] == key
    worker.post(f"/containers/{mine}/restart?t=0")
    assert worker.inspect(mine)["NetworkSettings"]["Networks"]["net"]["NetworkID"] == own
    assert worker.ask("GET", "/networks/net")["Id"] == own
    assert worker.ask("GET", f"/networks/{key}")["Id"] == key
    worker.ask("DELETE", f"/containers/{mine}?force=1")
    worker.ask("DELETE", "/networks/net")


def test_events(node: Node) -> None:
    since = time.time()
    key = create(node, "net")
    node.ask("DELETE", "/networks/net")

    def seen() -> list[dict[str, Any]]:
        query = quote(json.dumps({"type": ["network"], "scope": ["swarm"]}))
        answer = node.request("GET", f"/v1.44/events?since={since}&until={time.time()}&filters={query}")
        return [json.loads(line) for line in answer.body.splitlines()]

    found = until("both changes are events", lambda: len(events := seen()) == 2 and events)
    assert [(each["Action"], each["Actor"]) for each in found] == [
        (action, {"ID": key, "Attributes": {"name": "net"}}) for action in ("create", "remove")
    ]


def test_another_ingress_network(node: Node) -> None:
    node.ask("DELETE", "/networks/ingress")
    refused(
        node, "POST", "/services/create", service("web", EndpointSpec={"Ports": [{"TargetPort": 80}]}), 500, "ingress"
    )
    key = create(node, "mine", Ingress=True, IPAM={"Config": [{"Subnet": "172.30.0.0/20", "Gateway": "172.30.0.1"}]})
    found = node.ask("GET", "/networks/mine")
    assert found["Id"] == key and found["Ingress"]
    node.ask("DELETE", "/networks/mine")
    create(node, "ingress", Ingress=True)
