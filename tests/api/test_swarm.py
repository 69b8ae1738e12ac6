"""Swarm, nodes, tasks, secrets and configs of a swarm of one, by raw requests: answers, refusals
and their words, and events. Services: `test_services.py`.
"""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest

from tests.support.engine import client, strict
from tests.support.engine.harness import until
from tests.support.swarm.clusters import NET, Cluster, Node

ID = re.compile(r"[0-9a-z]{25}")
TOKEN = re.compile(r"SWMTKN-1-[0-9a-z]{50}-[0-9a-z]{25}")


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with Cluster(1) as cluster:
        cluster.form(1)
        yield cluster[0]
        cluster[0].leave(force=True)


def refused(node: Node, method: str, path: str, body: Any, status: int, words: str, version: str = "1.44") -> None:
    """Assert that a request is refused with that status, and words in its message."""
    found = node.ask(method, path, body, status=status, version=version)
    assert words in found["message"], found
    assert strict.faults(found, strict.FAILURE) == []


# --- swarm ----------------------------------------------------------------------------------------


def test_swarm(node: Node) -> None:
    swarm = node.ask("GET", "/swarm")
    assert strict.faults(swarm, strict.SWARM) == []
    assert ID.fullmatch(swarm["ID"]) and swarm["Version"]["Index"] > 0
    assert all(TOKEN.fullmatch(swarm["JoinTokens"][role]) for role in ("Worker", "Manager"))
    spec = swarm["Spec"]
    assert spec["Name"] == "default" and spec["Raft"]["HeartbeatTick"] == 1
    assert spec["CAConfig"]["NodeCertExpiry"] == 90 * 24 * 3600 * 10**9
    assert spec["Dispatcher"]["HeartbeatPeriod"] == 5 * 10**9
    assert "BEGIN CERTIFICATE" in swarm["TLSInfo"]["TrustRoot"]
    oldest = node.ask("GET", "/swarm", version="1.24")
    assert set(oldest) == {"ID", "Version", "CreatedAt", "UpdatedAt", "Spec", "JoinTokens"}


def test_info(node: Node) -> None:
    found = node.swarm_info()
    assert strict.faults({"Swarm": found}, strict.INFO) == []
    assert (found["NodeID"], found["NodeAddr"], found["LocalNodeState"]) == (node.node_id, f"{NET}.1", "active")
    assert found["ControlAvailable"] is True and found["Error"] == ""
    assert (found["Nodes"], found["Managers"]) == (1, 1)
    assert found["RemoteManagers"] == [{"NodeID": node.node_id, "Addr": f"{NET}.1:2377"}]
    cluster = found["Cluster"]
    assert cluster["ID"] == node.ask("GET", "/swarm")["ID"] and "JoinTokens" not in cluster
    assert node.request("HEAD", "/_ping").headers["swarm"] == "active/manager"


def test_already_in_a_swarm(node: Node) -> None:
    init = {"ListenAddr": "0.0.0.0:2377"}
    join = init | {"RemoteAddrs": [f"{NET}.9:2377"], "JoinToken": node.tokens()["Worker"]}
    for version, status in (("1.24", 406), ("1.44", 503)):
        for path, body in (("/swarm/init", init), ("/swarm/join", join)):
            refused(node, "POST", path, body, status, "This node is already part of a swarm", version)


def test_leave_needs_force(node: Node) -> None:
    for version, status in (("1.24", 500), ("1.44", 503)):
        refused(node, "POST", "/swarm/leave", None, status, "last manager", version)
    assert node.swarm_info()["LocalNodeState"] == "active"


def test_update_of_a_swarm(node: Node) -> None:
    def update(change: dict[str, Any], query: str = "", version: str = "1.44", **more: Any) -> Any:
        now = node.ask("GET", "/swarm")
        path = f"/swarm/update?version={more.pop('at', now['Version']['Index'])}{query}"
        return node.ask("POST", path, now["Spec"] | change, version=version, **more)

    before = node.ask("GET", "/swarm")
    assert update({"Orchestration": {"TaskHistoryRetentionLimit": 3}, "JoinTokens": {"Worker": "x"}}) is None
    after = node.ask("GET", "/swarm")
    assert after["Spec"]["Orchestration"] == {"TaskHistoryRetentionLimit": 3}
    assert after["JoinTokens"] == before["JoinTokens"] and after["Version"]["Index"] > before["Version"]["Index"]
    assert after["CreatedAt"] == before["CreatedAt"] != after["UpdatedAt"]
    assert "out of sequence" in update({}, at=before["Version"]["Index"], status=500)["message"]
    for query, worker, manager in (
        ("&rotateWorkerToken=true", True, False),
        ("&rotationManagerToken=1", False, True),
        ("&rotateWorkerToken=1&rotateManagerToken=1", True, True),
    ):
        old = node.tokens()
        update({}, query)
        new = node.tokens()
        assert (old["Worker"] != new["Worker"], old["Manager"] != new["Manager"]) == (worker, manager)
        assert all(TOKEN.fullmatch(token) for token in new.values())
    for change, words in (
        ({"CAConfig": {"NodeCertExpiry": 60 * 10**9}}, "minimum certificate expiry time"),
        ({"Dispatcher": {"HeartbeatPeriod": -1}}, "HeartbeatPeriod"),
        ({"Raft": {"ElectionTick": 1, "HeartbeatTick": 3}}, "ElectionTick"),
        ({"Name": "other"}, "Name"),
        ({"CAConfig": {"ExternalCA": {"Protocol": "other", "URL": "https://a"}}}, "other"),
    ):
        found = update(change, status=400)
        assert words in found["message"], found
    assert update({"EncryptionConfig": {"AutoLockManagers": True}}, status=501)
    assert update({}, "&rotateWorkerToken=maybe", status=400)["message"] == "invalid value for rotateWorkerToken: maybe"
    refused(node, "POST", "/swarm/update?version=x", {}, 400, "invalid swarm version 'x'")
    refused(node, "POST", "/swarm/update?version=1", b"{", 400, "invalid JSON body")


def test_unlock_key(node: Node) -> None:
    assert node.ask("GET", "/swarm/unlockkey") == {"UnlockKey": ""}
    refused(node, "POST", "/swarm/unlock", {"UnlockKey": "x"}, 503, "not locked")


# --- nodes ----------------------------------------------------------------------------------------


def test_nodes(node: Node) -> None:
    [found] = node.ask("GET", "/nodes")
    assert strict.faults(found, strict.NODE) == []
    assert found["ID"] == node.node_id and found["Status"] == {"State": "ready", "Addr": f"{NET}.1"}
    assert found["Spec"]["Role"] == "manager" and found["Spec"]["Availability"] == "active"
    assert found["ManagerStatus"] == {"Leader": True, "Reachability": "reachable", "Addr": f"{NET}.1:2377"}
    description = found["Description"]
    info = node.ask("GET", "/info")
    assert description["Hostname"] == info["Name"]
    assert description["Resources"]["MemoryBytes"] == info["MemTotal"]
    assert description["Resources"]["NanoCPUs"] == info["NCPU"] * 10**9
    assert description["Platform"] == {"Architecture": info["Architecture"], "OS": "linux"}
    assert {"Type": "Volume", "Name": "local"} in description["Engine"]["Plugins"]
    for name in (node.node_id, node.node_id[:10], description["Hostname"]):
        assert node.ask("GET", f"/nodes/{name}")["ID"] == node.node_id
    refused(node, "GET", "/nodes/no-such", None, 404, "no-such not found")


def test_filters_of_nodes(node: Node) -> None:
    def listed(status: int = 200, **filters: Any) -> Any:
        text = quote(json.dumps({name.replace("_", "."): value for name, value in filters.items()}))
        found = node.ask("GET", f"/nodes?filters={text}", status=status)
        return found["message"] if status != 200 else len(found)

    assert listed(role=["manager"]) == 1 and listed(role={"worker": True}) == 0
    assert listed(role=["worker", "manager"]) == 1, "one of them"
    assert listed(membership=["accepted"]) == 1 and listed(id=[node.node_id[:5]]) == 1
    assert listed(name=["no-such"]) == 0 and listed(name=["no-such"], role=["manager"]) == 0
    node.update_node(node.node_id, Labels={"zone": "a"})
    assert listed(node_label=["zone=a"]) == 1 and listed(node_label=["zone=b"]) == 0 and listed(label=["zone"]) == 0
    assert "color" in listed(400, color=["red"])
    assert "boss" in listed(400, role=["boss"]) and "x" in listed(400, membership=["x"])


def test_update_of_a_node(node: Node) -> None:
    before = node.ask("GET", f"/nodes/{node.node_id}")
    version = before["Version"]["Index"]
    path = f"/nodes/{node.node_id}/update?version={version}"
    spec = {"Role": "manager", "Availability": "active"}
    for change, words in (
        ({"Availability": "asleep"}, "asleep"),
        ({"Role": "boss"}, "boss"),
        ({"Role": ""}, "Role"),
        ({"Availability": ""}, "Availability"),
    ):
        refused(node, "POST", path, spec | change, 400, words)
    refused(node, "POST", path, spec | {"Role": "worker"}, 500, "last manager of the swarm")
    refused(node, "POST", f"/nodes/{node.node_id}/update?version={version + 1000}", spec, 500, "out of sequence")
    refused(node, "POST", f"/nodes/{node.node_id}/update", spec, 400, "invalid node version ''")
    refused(node, "POST", "/nodes/no-such/update?version=1", spec, 404, "not found")
    assert node.ask("GET", f"/nodes/{node.node_id}") == before, "nothing has changed"
    name = before["Description"]["Hostname"]
    assert (
        node.ask("POST", f"/nodes/{name}/update?version={version}", spec | {"Labels": {"a": "b"}, "Name": "x"}) is None
    )
    after = node.ask("GET", f"/nodes/{node.node_id}")
    assert after["Spec"] == spec | {"Labels": {"a": "b"}, "Name": "x"}
    node.update_node(node.node_id, Labels={}, Name="")


def test_a_manager_is_not_removed(node: Node) -> None:
    for force in (0, 1):
        path = f"/nodes/{node.node_id}?force={force}"
        refused(node, "DELETE", path, None, 500, "must be demoted to worker before removal")
    refused(node, "DELETE", "/nodes/no-such", None, 404, "not found")


# --- tasks ----------------------------------------------------------------------------------------


def test_tasks(node: Node) -> None:
    service = node.service("tasked", replicas=2, Labels={"tier": "front"})
    tasks = node.until_running("tasked", 2)
    for task in tasks:
        assert strict.faults(task, strict.TASK) == []
        assert ID.fullmatch(task["ID"]) and task["ServiceID"] == service and task["NodeID"] == node.node_id
        assert task["Status"]["State"] == task["DesiredState"] == "running"
        container = task["Status"]["ContainerStatus"]
        inspected = node.inspect(container["ContainerID"])
        assert container["PID"] == inspected["State"]["Pid"] and container["ExitCode"] == 0
        assert inspected["Name"] == f"/tasked.{task['Slot']}.{task['ID']}"
        labels = inspected["Config"]["Labels"]
        assert labels["com.docker.swarm.task.id"] == task["ID"]
        assert labels["com.docker.swarm.service.name"] == "tasked"
        assert labels["com.docker.swarm.node.id"] == node.node_id
    assert {task["Slot"] for task in tasks} == {1, 2}

    def listed(status: int = 200, **filters: Any) -> Any:
        found = node.ask("GET", f"/tasks?filters={quote(json.dumps(filters))}", status=status)
        return found["message"] if status != 200 else {task["Slot"] for task in found}

    first = next(task for task in tasks if task["Slot"] == 1)
    hostname = node.ask("GET", "/info")["Name"]
    assert listed(id=[first["ID"][:12]]) == {1} and node.ask("GET", f"/tasks/{first['ID']}")["ID"] == first["ID"]
    assert listed(service=["tasked"]) == listed(service=[service]) == listed(name=["taske"], node=[hostname]) == {1, 2}
    assert listed(node=[node.node_id], service=["tasked"], label=["tier=front"]) == {1, 2}
    assert listed(label=["tier=back"]) == set() and listed(service=["tasked"], **{"_up-to-date": ["true"]}) == {1, 2}
    assert listed(service=["tasked"], **{"desired-state": ["shutdown"]}) == set()
    assert "no-such" in listed(404, service=["no-such"]) and "no-such" in listed(404, node=["no-such"])
    assert "sleepy" in listed(400, **{"desired-state": ["sleepy"]})
    refused(node, "GET", "/tasks/no-such", None, 404, "not found")
    node.ask("DELETE", "/services/tasked")
    assert node.tasks() == []
    until("the containers have gone", lambda: not node.task_containers())


# --- secrets and configs --------------------------------------------------------------------------


@pytest.mark.parametrize(("of", "limit"), [("secret", 500 * 1024), ("config", 1000 * 1024)])
def test_secrets_and_configs(node: Node, of: str, limit: int) -> None:
    content = base64.b64encode(b"\x00value\xff").decode()
    body = {"Name": "key", "Labels": {"a": "b"}, "Data": content}
    made = node.ask("POST", f"/{of}s/create", body, status=201)["ID"]
    assert ID.fullmatch(made)
    refused(node, "POST", f"/{of}s/create", body, 409, "already exists")
    for name in (made, "key", made[:8]):
        found = node.ask("GET", f"/{of}s/{name}")
        assert strict.faults(found, strict.SECRET if of == "secret" else strict.CONFIG_OBJECT) == []
        assert found["ID"] == made and found["Spec"]["Labels"] == {"a": "b"}
        assert found["Spec"].get("Data") == (None if of == "secret" else content), "secrets are not shown"
    version = found["Version"]["Index"]
    path = f"/{of}s/{made}/update?version={version}"
    refused(node, "POST", path, {"Name": "other", "Labels": {}}, 400, "only updates to Labels are allowed")
    refused(node, "POST", f"/{of}s/{made}/update?version={version + 999}", {"Name": "key"}, 500, "out of sequence")
    assert node.ask("POST", path, {"Name": "key", "Labels": {"c": "d"}}) is None
    assert node.ask("GET", f"/{of}s/key")["Spec"]["Labels"] == {"c": "d"}
    for filters, count in (({"name": ["key"]}, 1), ({"label": ["c=d"]}, 1), ({"label": ["a"]}, 0), ({"id": [made]}, 1)):
        assert len(node.ask("GET", f"/{of}s?filters={quote(json.dumps(filters))}")) == count
    for bad, words in (
        ({"Name": "-bad"}, "-bad"),
        ({"Name": ""}, "Name"),
        ({"Name": "x" * 65, "Data": content}, "Name"),
        ({"Name": "a", "Data": base64.b64encode(b"x" * (limit + 1)).decode()}, str(limit)),
        ({"Name": "a", "Data": "***"}, "Data"),
    ):
        refused(node, "POST", f"/{of}s/create", bad, 400, words)
    whole = base64.b64encode(b"x" * (limit - 1)).decode()
    large = node.ask("POST", f"/{of}s/create", {"Name": "large", "Data": whole}, status=201)["ID"]
    for name in ("large", made):
        assert node.ask("DELETE", f"/{of}s/{name}", status=204) is None
    refused(node, "DELETE", f"/{of}s/{large}", None, 404, "not found")
    refused(node, "GET", f"/{of}s/key", None, 404, "not found")
    assert node.ask("GET", f"/{of}s") == []


def test_a_secret_in_use_stays(node: Node) -> None:
    data = base64.b64encode(b"hidden").decode()
    ids = {
        of: node.ask("POST", f"/{of}s/create", {"Name": "used", "Data": data}, status=201)["ID"]
        for of in ("secret", "config")
    }
    file = {"Name": "used", "UID": "7", "GID": "8", "Mode": 0o440}
    node.service(
        "reader",
        container={
            "Secrets": [{"File": file, "SecretID": ids["secret"], "SecretName": "used"}],
            "Configs": [{"File": file | {"Name": "/etc/used.conf"}, "ConfigID": ids["config"], "ConfigName": "used"}],
        },
    )
    [task] = node.until_running("reader", 1)
    container = task["Status"]["ContainerStatus"]["ContainerID"]
    for path in ("/run/secrets/used", "/etc/used.conf"):
        done = node.docker("exec", container, "sh", "-c", f"cat {path}; stat -c ' %u %g %a' {path}")
        assert done.out == "hidden 7 8 440\n", done
    for of in ids:
        refused(node, "DELETE", f"/{of}s/used", None, 400, "in use")
    node.ask("DELETE", "/services/reader")
    for of in ids:
        node.ask("DELETE", f"/{of}s/used", status=204)
    refused(
        node,
        "POST",
        "/services/create",
        {
            "Name": "x",
            "TaskTemplate": {
                "ContainerSpec": {
                    "Image": "busybox",
                    "Secrets": [{"File": file, "SecretID": "nope", "SecretName": "nope"}],
                }
            },
        },
        400,
        "nope",
    )


# --- events ---------------------------------------------------------------------------------------


def test_events(node: Node) -> None:
    since = time.time()
    service = node.service("evented")
    node.until_running("evented", 1)
    node.update_service("evented", lambda spec: spec["Mode"]["Replicated"].update(Replicas=2))
    secret = node.ask("POST", "/secrets/create", {"Name": "evented", "Data": "YQ=="}, status=201)["ID"]
    node.ask("DELETE", "/secrets/evented", status=204)
    node.ask("DELETE", "/services/evented")
    time.sleep(0.5)
    filters = quote(json.dumps({"scope": ["swarm"]}))

    def events(version: str) -> list[Any]:
        path = f"/v{version}/events?since={since}&until={time.time()}&filters={filters}"
        return list(client.json_stream(node.socket, path))

    found = events("1.44")
    assert all(strict.faults(event, strict.EVENT) == [] and event["scope"] == "swarm" for event in found)
    of_service = [event for event in found if event["Actor"]["ID"] == service]
    assert (of_service[0]["Action"], of_service[-1]["Action"]) == ("create", "remove")
    assert all(event["Type"] == "service" and event["Actor"]["Attributes"]["name"] == "evented" for event in of_service)
    scaled = [event["Actor"]["Attributes"] for event in of_service if "replicas.new" in event["Actor"]["Attributes"]]
    assert [(each["replicas.old"], each["replicas.new"]) for each in scaled] == [("1", "2")]
    assert [event["Action"] for event in found if event["Actor"]["ID"] == secret] == ["create", "remove"]
    assert events("1.29") == [], "later versions brought them"


# --- a swarm's begin and end ----------------------------------------------------------------------


def test_init_and_leave() -> None:
    with Cluster(1) as cluster:
        node = cluster[0]
        for body, words in (
            ({"AdvertiseAddr": NET}, "ListenAddr"),
            ({"ListenAddr": "nonsense:99999"}, "99999"),
            ({"ListenAddr": "0.0.0.0:2377", "AdvertiseAddr": "no-such-link"}, "no-such-link"),
            ({"ListenAddr": "0.0.0.0:2377", "AdvertiseAddr": "224.0.0.1"}, "224.0.0.1"),
            ({"ListenAddr": "0.0.0.0", "Spec": {"Name": "mine"}}, "mine"),
            ({"ListenAddr": "0.0.0.0", "Availability": "asleep"}, "asleep"),
            ({"ListenAddr": "0.0.0.0", "DefaultAddrPool": ["x"]}, "x"),
            ({"ListenAddr": "0.0.0.0", "DataPathPort": 80}, "80"),
        ):
            refused(node, "POST", "/swarm/init", body, 400, words)
            assert node.swarm_info()["LocalNodeState"] == "inactive"
        refused(node, "POST", "/swarm/init", {"ListenAddr": "0.0.0.0", "AutoLockManagers": True}, 501, "AutoLock")
        for path, body, words in (
            ("/swarm/join", {"ListenAddr": "0.0.0.0", "RemoteAddrs": [f"{NET}.9"]}, "join token is necessary"),
            ("/swarm/join", {"ListenAddr": "0.0.0.0", "RemoteAddrs": [f"{NET}.9"], "JoinToken": "x"}, "token"),
            ("/swarm/join", {"ListenAddr": "0.0.0.0", "JoinToken": "x"}, ""),
        ):
            refused(node, "POST", path, body, 400, words)
        seen = set()
        for number in range(2):
            made = node.init(ListenAddr=f"eth0:{2377 + number}", AdvertiseAddr="eth0", Availability="pause")
            assert ID.fullmatch(made) and made not in seen
            seen.add(made)
            found = node.ask("GET", f"/nodes/{made}")
            assert found["Spec"]["Availability"] == "pause"
            assert found["ManagerStatus"]["Addr"] == f"{NET}.1:{2377 + number}"
            node.leave(force=True)
            assert node.swarm_info() == {
                "NodeID": "",
                "NodeAddr": "",
                "LocalNodeState": "inactive",
                "ControlAvailable": False,
                "Error": "",
                "RemoteManagers": None,
                "Nodes": 0,
                "Managers": 0,
            }
            assert not (node.root / "swarm").exists()
            refused(node, "GET", "/nodes", None, 503, "This node is not a swarm manager")
        for path in ("/swarm/leave?force=1", "/swarm/leave"):
            refused(node, "POST", path, None, 503, "This node is not part of a swarm")


@pytest.mark.parametrize("minor", range(24, 56))
def test_go_clients_can_decode_every_version(node: Node, minor: int) -> None:
    if not node.tasks():
        node.service("shown", EndpointSpec={"Ports": [{"TargetPort": 80, "PublishMode": "host"}]})
        node.update_service("shown", lambda spec: spec["TaskTemplate"].update(ForceUpdate=1))
        for of in ("secrets", "configs"):
            node.ask("POST", f"/{of}/create", {"Name": "shown", "Data": "YQ==", "Labels": {"a": "b"}}, status=201)
        until("it was updated", lambda: len(node.tasks(desired="")) > 1 and node.running("shown"))
    shapes = {
        "/swarm": strict.SWARM,
        "/info": strict.INFO,
        "/nodes": strict.listed(strict.NODE),
        f"/nodes/{node.node_id}": strict.NODE,
        "/services": strict.listed(strict.SERVICE),
        "/services?status=true": strict.listed(strict.SERVICE),
        "/services/shown?insertDefaults=true": strict.SERVICE,
        "/tasks": strict.listed(strict.TASK),
    }
    if minor >= 30:
        shapes |= {
            "/secrets": strict.listed(strict.SECRET),
            "/secrets/shown": strict.SECRET,
            "/configs": strict.listed(strict.CONFIG_OBJECT),
            "/configs/shown": strict.CONFIG_OBJECT,
        }
    for path, shape in shapes.items():
        found = node.ask("GET", path, version=f"1.{minor}")
        assert found and strict.faults(found, shape) == [], path
