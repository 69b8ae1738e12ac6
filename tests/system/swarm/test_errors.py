"""The refusals of swarm mode as clients see them: status codes and the words that clients and
scripts search for, at the oldest version that has swarms and at a newer one.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest

from tests.support.engine.harness import until
from tests.support.swarm.clusters import Cluster, Node

VERSIONS = pytest.mark.parametrize("version", ["1.24", "1.25", "1.44", "1.55"])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two managers, a worker, and one outside."""
    with Cluster(4) as cluster:
        first = cluster[0]
        first.init()
        cluster[1].join(first, manager=True)
        cluster[2].join(first)
        yield cluster


@pytest.fixture
def manager(cluster: Cluster) -> Node:
    return cluster[0]


def refused(
    node: Node, method: str, path: str, body: Any, status: int, *words: str, version: str = "1.44", **more: Any
) -> str:
    """The request has this status, and a message with these words."""
    answer = node.request(method, f"/v{version}{path}", body, timeout=60, **more)
    assert answer.status == status, (method, path, body, answer.status, answer.body)
    message = str(json.loads(answer.body)["message"])
    for word in words:
        assert word in message, (method, path, body, message)
    return message


def minimal(name: str = "refused", **fields: Any) -> dict[str, Any]:
    return {"Name": name, "TaskTemplate": {"ContainerSpec": {"Image": "busybox"}}, **fields}


MANAGERS_ONLY = [
    ("GET", "/swarm"),
    ("POST", "/swarm/update?version=1"),
    ("GET", "/nodes"),
    ("GET", "/nodes/x"),
    ("DELETE", "/nodes/x"),
    ("POST", "/nodes/x/update?version=1"),
    ("GET", "/services"),
    ("POST", "/services/create"),
    ("GET", "/services/x"),
    ("DELETE", "/services/x"),
    ("POST", "/services/x/update?version=1"),
    ("GET", "/tasks"),
    ("GET", "/tasks/x"),
    ("POST", "/networks/create"),
]


@VERSIONS
@pytest.mark.parametrize("number", [2, 3], ids=["worker", "outside"])
def test_managers_only(cluster: Cluster, version: str, number: int) -> None:
    status = 406 if version == "1.24" else 503
    for method, path in MANAGERS_ONLY:
        body = (
            None
            if method != "POST"
            else minimal()
            if "services" in path
            else {"Role": "worker", "Availability": "active"}
        )
        if path.startswith("/swarm/update"):
            body = {}
        elif path.startswith("/networks"):
            body = {"Name": "net", "Driver": "overlay"}
        refused(cluster[number], method, path, body, status, "This node is not a swarm manager", version=version)


@VERSIONS
def test_in_and_out(cluster: Cluster, version: str) -> None:
    status = 406 if version == "1.24" else 503
    init = {"ListenAddr": "0.0.0.0:2377"}
    join = {"ListenAddr": "0.0.0.0:2377", "RemoteAddrs": ["10.77.0.1:2377"], "JoinToken": "x"}
    for node in (cluster[0], cluster[2]):
        for path, body in (("init", init), ("join", join)):
            refused(
                node, "POST", f"/swarm/{path}", body, status, "This node is already part of a swarm", version=version
            )
    refused(cluster[3], "POST", "/swarm/leave", None, status, "not part of a swarm", version=version)
    refused(cluster[3], "POST", "/swarm/leave?force=1", None, status, "not part of a swarm", version=version)


@VERSIONS
def test_joins(cluster: Cluster, version: str) -> None:
    outside, token = cluster[3], cluster[0].tokens()["Worker"]
    join = {"ListenAddr": "0.0.0.0:2377", "AdvertiseAddr": outside.address, "RemoteAddrs": ["10.77.0.1:2377"]}
    prefix, _, secret = token.rpartition("-")
    wrong_secret = f"{prefix}-{'0' * len(secret)}"
    other_swarm = "SWMTKN-1-" + "1" * 50 + "-" + secret
    for given, words in (
        ("", "join token is necessary"),
        ("nonsense", "join token is necessary"),
        (wrong_secret, "join token is necessary"),
        (other_swarm, "remote CA does not match fingerprint"),
    ):
        refused(outside, "POST", "/swarm/join", join | {"JoinToken": given}, 400, words, version=version)
        assert outside.swarm_info()["LocalNodeState"] == "inactive"


@VERSIONS
def test_malformed_requests(manager: Node, version: str) -> None:
    service = minimal("malformed")
    refused(manager, "POST", "/services/create", b"{", 400, version=version)
    refused(manager, "POST", "/services/create", b"", 400, version=version)
    for path in ("/swarm/update", "/services/x/update", "/nodes/x/update"):
        for query in ("", "?version=", "?version=x", "?version=-1", "?version=1.5"):
            refused(manager, "POST", path + query, {}, 400, "version", version=version)
    for resource, value in (("nodes", "color"), ("services", "color"), ("tasks", "color")):
        filters = quote(json.dumps({value: ["red"]}))
        refused(manager, "GET", f"/{resource}?filters={filters}", None, 400, "color", version=version)
    for key, filters in (
        ("nodes", {"role": ["boss"]}),
        ("nodes", {"membership": ["boss"]}),
        ("tasks", {"desired-state": ["boss"]}),
    ):
        refused(manager, "GET", f"/{key}?filters={quote(json.dumps(filters))}", None, 400, "boss", version=version)
    node = manager.ask("GET", f"/nodes/{manager.node_id}")
    update = f"/nodes/{manager.node_id}/update?version={node['Version']['Index']}"
    refused(manager, "POST", update, {"Role": "boss", "Availability": "active"}, 400, "Role", "boss", version=version)
    refused(manager, "POST", update, {"Role": "manager", "Availability": "away"}, 400, "away", version=version)
    refused(manager, "POST", update, {"Role": "manager"}, 400, "Availability", version=version)
    for fields, words in (
        ({"Name": "a b"}, ("Name", "a b")),
        ({"TaskTemplate": {"ContainerSpec": {"Image": ""}}}, ("Image",)),
        ({"TaskTemplate": {}}, ("ContainerSpec",)),
        (
            {"TaskTemplate": service["TaskTemplate"] | {"RestartPolicy": {"Condition": "always"}}},
            ("Condition", "always"),
        ),
        ({"TaskTemplate": service["TaskTemplate"] | {"RestartPolicy": {"Delay": -5}}}, ("Delay", "-5")),
        ({"TaskTemplate": service["TaskTemplate"] | {"Resources": {"Limits": {"NanoCPUs": 5}}}}, ("NanoCPUs",)),
        (
            {"TaskTemplate": service["TaskTemplate"] | {"Resources": {"Limits": {"MemoryBytes": 5}}}},
            ("MemoryBytes", "5"),
        ),
        ({"TaskTemplate": service["TaskTemplate"] | {"Placement": {"Constraints": ["a=b"]}}}, ("Constraints", "a=b")),
        ({"Mode": {"Replicated": {"Replicas": -1}}}, ("Replicas", "-1")),
        ({"Mode": {"Replicated": {}, "Global": {}}}, ("Mode",)),
        ({"UpdateConfig": {"FailureAction": "shrug"}}, ("FailureAction", "shrug")),
        ({"EndpointSpec": {"Mode": "magic"}}, ("Mode", "magic")),
        ({"EndpointSpec": {"Ports": [{"Protocol": "icmp", "TargetPort": 1}]}}, ("Protocol", "icmp")),
        ({"Labels": ["a"]}, ("Labels",)),
        ({"Name": 5}, ("Name",)),
    ):
        refused(manager, "POST", "/services/create", service | fields, 400, *words, version=version)
    for mount, words in (
        ({"Type": "floppy", "Target": "/a"}, ("Type", "floppy")),
        ({"Type": "volume", "Target": "a"}, ("Target", "a")),
        ({"Type": "bind", "Source": "a", "Target": "/a"}, ("Source", "a")),
    ):
        body = minimal(TaskTemplate={"ContainerSpec": {"Image": "busybox", "Mounts": [mount]}})
        refused(manager, "POST", "/services/create", body, 400, *words, version=version)
    assert manager.ask("GET", "/services") == []


@VERSIONS
def test_unknown_objects(manager: Node, version: str) -> None:
    for resource, what in (("nodes", "node"), ("services", "service"), ("tasks", "task")):
        refused(manager, "GET", f"/{resource}/nothing", None, 404, f"{what} nothing not found", version=version)
    for resource, what in (("nodes", "node"), ("services", "service")):
        refused(manager, "DELETE", f"/{resource}/nothing", None, 404, f"{what} nothing not found", version=version)
    body = {"Role": "worker", "Availability": "active"}
    refused(manager, "POST", "/nodes/nothing/update?version=1", body, 404, "not found", version=version)
    refused(manager, "POST", "/services/nothing/update?version=1", minimal(), 404, "not found", version=version)
    for key in ("service", "node"):
        filters = quote(json.dumps({key: ["nothing"]}))
        refused(manager, "GET", f"/tasks?filters={filters}", None, 404, f"{key} nothing not found", version=version)
    body = minimal(Networks=[{"Target": "nothing"}])
    if version < "1.44":
        refused(manager, "POST", "/services/create", body, 404, "network nothing not found", version=version)
    if version >= "1.25":
        body = minimal(TaskTemplate={"ContainerSpec": {"Image": "busybox"}, "Networks": [{"Target": "nothing"}]})
        refused(manager, "POST", "/services/create", body, 404, "network nothing not found", version=version)


@VERSIONS
def test_networks(manager: Node, version: str) -> None:
    manager.ask("POST", "/networks/create", {"Name": f"own-{version}"})
    local = ("host", "bridge", "none") if version < "1.30" else ()
    for target in (*local, f"own-{version}"):
        body = minimal(TaskTemplate={"ContainerSpec": {"Image": "busybox"}, "Networks": [{"Target": target}]})
        words = "not eligible for docker services"
        refused(manager, "POST", "/services/create", body, 403, words, target, version=version)
    ingress = minimal(TaskTemplate={"ContainerSpec": {"Image": "busybox"}, "Networks": [{"Target": "ingress"}]})
    refused(manager, "POST", "/services/create", ingress, 403, "not eligible for docker services", version=version)
    overlay = {"Name": f"net-{version}", "Driver": "overlay"}
    made = manager.ask("POST", "/networks/create", overlay, version=version)["Id"]
    refused(manager, "POST", "/networks/create", overlay, 409, f"net-{version}", version=version)
    if version < "1.29":
        refused(manager, "DELETE", "/networks/ingress", None, 403, "pre-defined", version=version)
    manager.ask("DELETE", f"/networks/{made}", version=version)
    refused(manager, "DELETE", f"/networks/{made}", None, 404, f"network {made} not found", version=version)


@VERSIONS
def test_conflicts(cluster: Cluster, version: str) -> None:
    manager, other = cluster[0], cluster[1]
    name = f"web-{version.replace('.', '-')}"
    service = manager.service(name, replicas=0)
    for node in (manager, other):
        refused(
            node,
            "POST",
            "/services/create",
            minimal(name),
            409,
            "name conflicts with an existing object",
            version=version,
        )
    shown = manager.ask("GET", f"/services/{service}", version=version)
    index = shown["Version"]["Index"]
    for wrong in (index - 1, index + 1):
        path = f"/services/{service}/update?version={wrong}"
        refused(manager, "POST", path, shown["Spec"], 500, "update out of sequence", version=version)
    path = f"/services/{service}/update?version={index}"
    refused(
        manager,
        "POST",
        path,
        shown["Spec"] | {"Mode": {"Global": {}}},
        500,
        "service mode change is not allowed",
        version=version,
    )
    refused(manager, "POST", path, shown["Spec"] | {"Name": "else"}, 500, "renaming services", version=version)
    assert manager.ask("GET", f"/services/{service}", version=version)["Version"]["Index"] == index
    answer = other.request("POST", f"/v{version}{path}", shown["Spec"] | {"Labels": {"a": "b"}})
    assert answer.status == 200, answer.body
    refused(manager, "POST", path, shown["Spec"], 500, "update out of sequence", version=version)
    manager.ask("DELETE", f"/services/{name}")
    refused(other, "GET", f"/services/{name}", None, 404, version=version)
    swarm = manager.ask("GET", "/swarm")["Version"]["Index"]
    refused(manager, "POST", f"/swarm/update?version={swarm + 1}", {}, 500, "update out of sequence", version=version)
    node = manager.ask("GET", f"/nodes/{manager.node_id}")
    path = f"/nodes/{manager.node_id}/update?version={node['Version']['Index'] + 1}"
    refused(manager, "POST", path, node["Spec"], 500, "update out of sequence", version=version)


@VERSIONS
def test_ambiguous_names(manager: Node, version: str) -> None:
    """All hosts of these tests have one host name."""
    hostname = manager.ask("GET", "/info")["Name"]
    refused(manager, "GET", f"/nodes/{hostname}", None, 500, "is ambiguous (3 matches found)", version=version)


@VERSIONS
def test_nodes(cluster: Cluster, version: str) -> None:
    manager, worker = cluster[0], cluster[2]
    for node in (manager, cluster[1]):
        for force in ("", "?force=1"):
            path = f"/nodes/{node.node_id}{force}"
            refused(manager, "DELETE", path, None, 500, "must be demoted to worker before removal", version=version)
    path = f"/nodes/{worker.node_id}"
    refused(manager, "DELETE", path, None, 500, "is not down and can't be removed", version=version)
    status = 500 if version == "1.24" else 503
    refused(manager, "POST", "/swarm/leave", None, status, "participating as a manager", version=version)


@pytest.mark.nightly
def test_quorum(cluster: Cluster) -> None:
    """What is refused without it, and lest it be lost; containers go on, and with one of two lost
    managers back all works again. Ends the swarm of this module.
    """
    manager, other, third = cluster[0], cluster[1], cluster[3]
    third.join(manager, manager=True)
    manager.service("steady", replicas=4)
    manager.until_running("steady", 4)

    def demoted(node: Node) -> tuple[str, Any]:
        shown = manager.ask("GET", f"/nodes/{node.node_id}", timeout=30)
        return f"/nodes/{node.node_id}/update?version={shown['Version']['Index']}", shown["Spec"] | {"Role": "worker"}

    def reachability(node: Node) -> str:
        shown = manager.ask("GET", f"/nodes/{node.node_id}", timeout=30)
        return str(shown.get("ManagerStatus", {}).get("Reachability"))

    other.unplug()
    try:
        until("the other manager is missed", lambda: reachability(other) == "unreachable")
        refused(manager, "POST", *demoted(third), 500, "loss of quorum", other.node_id)
        before = [set(node.task_containers()) for node in cluster.nodes]
        third.unplug()
        try:
            words = "context deadline exceeded", "1 of 3 managers reachable"
            refused(manager, "POST", "/services/create", minimal("late"), 500, *words)
            answer = manager.request("GET", f"/v1.44/nodes/{other.node_id}", timeout=30)
            assert answer.status == 200 and json.loads(answer.body)["ID"] == other.node_id
            assert any(name.lower() == "warning" and value.startswith("110 ") for name, value in answer.headers.items())
            assert [set(node.task_containers()) for node in cluster.nodes] == before
        finally:
            third.plug()

        again = minimal("again")  # on a node that is not away
        again["TaskTemplate"] = {
            "ContainerSpec": {"Image": "busybox", "Command": ["sleep", "100000"], "StopGracePeriod": 0},
            "Placement": {"Constraints": [f"node.id=={manager.node_id}"]},
        }

        def created() -> bool:
            return manager.request("POST", "/v1.44/services/create", again, timeout=30).status == 201

        until("the swarm writes again", created)
        until("its task runs", lambda: manager.running("again"))
    finally:
        other.plug()
    until("both are back", lambda: {reachability(third), reachability(other)} == {"reachable"})
    for node in (third, other):
        manager.update_node(node.node_id, Role="worker")
        until("it is demoted", functools.partial(lambda node: not node.swarm_info()["ControlAvailable"], node))
    refused(manager, "POST", *demoted(manager), 500, "last manager of the swarm")
