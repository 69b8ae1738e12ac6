"""Services of a swarm of one, by raw requests: each field's effect on the container, updates,
rollbacks, filters, logs, refusals.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest

from tests.support.engine import client, strict
from tests.support.engine.cgroups import V2
from tests.support.engine.harness import until
from tests.support.swarm.clusters import Cluster, Node


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with Cluster(1) as cluster:
        cluster.form(1)
        yield cluster[0]
        cluster[0].leave(force=True)


@pytest.fixture(autouse=True)
def clean(node: Node) -> Iterator[None]:
    yield
    for service in node.ask("GET", "/services"):
        node.ask("DELETE", f"/services/{service['ID']}")
    until("the containers of tasks have gone", lambda: not node.task_containers())


def container_of(node: Node, service: str) -> Any:
    [task] = node.until_running(service, 1)
    return node.inspect(task["Status"]["ContainerStatus"]["ContainerID"])


def refused(
    node: Node, body: Any, status: int, words: str, path: str = "/services/create", version: str = "1.44"
) -> None:
    found = node.ask("POST", path, body, status=status, version=version)
    assert words in found["message"], found


def minimal(name: str, **container: Any) -> dict[str, Any]:
    return {"Name": name, "TaskTemplate": {"ContainerSpec": {"Image": "busybox"} | container}}


# --- what a service shows -------------------------------------------------------------------------


def test_a_service(node: Node) -> None:
    made = node.ask("POST", "/services/create", minimal("web", Command=["sleep", "9999"]), status=201, version="1.55")
    assert strict.faults(made, strict.SERVICE_CREATED) == [] and set(made) == {"ID", "Warnings"}
    assert node.ask("POST", "/services/create", minimal("old"), status=201, version="1.24").keys() == {"ID"}
    for name in (made["ID"], "web", made["ID"][:9]):
        found = node.ask("GET", f"/services/{name}")
        assert strict.faults(found, strict.SERVICE) == [] and found["ID"] == made["ID"]
    assert found["Spec"]["Mode"] == {"Replicated": {"Replicas": 1}} and found["Endpoint"] == {"Spec": {}}
    assert "PreviousSpec" not in found and "UpdateStatus" not in found
    whole = node.ask("GET", "/services/web?insertDefaults=true")["Spec"]
    assert whole["UpdateConfig"]["Parallelism"] == 1 and whole["UpdateConfig"]["FailureAction"] == "pause"
    assert whole["TaskTemplate"]["RestartPolicy"]["Condition"] == "any"
    assert whole["TaskTemplate"]["ContainerSpec"]["StopGracePeriod"] == 10**10
    node.until_running("web", 1)
    [listed] = node.ask("GET", f"/services?status=true&filters={quote(json.dumps({'name': ['web']}))}")
    assert listed["ServiceStatus"] == {"RunningTasks": 1, "DesiredTasks": 1, "CompletedTasks": 0}
    for found in node.ask("GET", "/services"):
        assert "ServiceStatus" not in found
    for version in ("1.24", "1.30", "1.40", "1.55"):
        for found in node.ask("GET", "/services", version=version):
            assert strict.faults(found, strict.SERVICE) == []


def test_filters(node: Node) -> None:
    one = node.service("front", Labels={"tier": "a"})
    node.service("frontal", replicas=None, Labels={"tier": "b", "x": ""})

    def listed(status: int = 200, **filters: Any) -> Any:
        found = node.ask("GET", f"/services?filters={quote(json.dumps(filters))}", status=status)
        return found["message"] if status != 200 else {service["Spec"]["Name"] for service in found}

    assert listed() == listed(name=["front"]) == listed(label=["tier"]) == {"front", "frontal"}
    assert listed(id=[one[:10]]) == listed(label=["tier=a"]) == listed(mode=["replicated"]) == {"front"}
    assert listed(label=["tier", "x"]) == listed(mode=["global"], name=["fron"]) == {"frontal"}
    assert "node" in listed(400, node=["x"]) and "odd" in listed(400, mode=["odd"])


def test_refusals(node: Node) -> None:
    node.service("taken")
    refused(node, minimal("taken"), 409, "name conflicts with an existing object")
    for body, status, words in (
        (b"[", 400, "invalid JSON body"),
        ({}, 400, "ContainerSpec"),
        (minimal("x") | {"TaskTemplate": {"ContainerSpec": {}}}, 400, "Image"),
        (minimal("-x"), 400, "-x"),
        (minimal("x", Image="UPPER CASE"), 400, "UPPER CASE"),
        (minimal("x") | {"Mode": {"Replicated": {"Replicas": -1}}}, 400, "-1"),
        (minimal("x") | {"Mode": {"Replicated": {}, "Global": {}}}, 400, "Mode"),
        (minimal("x", Mounts=[{"Type": "odd", "Target": "/a"}]), 400, "odd"),
        (minimal("x", Mounts=[{"Type": "bind", "Source": "relative", "Target": "/a"}]), 400, "relative"),
        (minimal("x", Mounts=[{"Type": "volume", "Target": "/a"}, {"Type": "tmpfs", "Target": "/a"}]), 400, "/a"),
        (minimal("x", StopGracePeriod=-1), 400, "StopGracePeriod"),
        (minimal("x") | {"UpdateConfig": {"FailureAction": "shrug"}}, 400, "shrug"),
        (minimal("x") | {"UpdateConfig": {"Order": "sideways"}}, 400, "sideways"),
        (minimal("x") | {"UpdateConfig": {"MaxFailureRatio": 1.5}}, 400, "1.5"),
        (minimal("x") | {"EndpointSpec": {"Ports": [{"TargetPort": 80, "Protocol": "odd"}]}}, 400, "odd"),
        (minimal("x") | {"EndpointSpec": {"Mode": "odd"}}, 400, "odd"),
        (minimal("x") | {"EndpointSpec": {"Mode": "dnsrr", "Ports": [{"TargetPort": 80}]}}, 400, "dnsrr"),
    ):
        refused(node, body, status, words)
    for template, words in (
        ({"Placement": {"Constraints": ["node.role"]}}, "node.role"),
        ({"Placement": {"Constraints": ["node.odd==1"]}}, ""),
        ({"RestartPolicy": {"Condition": "odd"}}, "odd"),
        ({"RestartPolicy": {"Delay": -1}}, "Delay"),
        ({"Resources": {"Limits": {"NanoCPU": 1}}}, "CPU"),
        ({"Resources": {"Limits": {"MemoryBytes": 1}}}, "emory"),
        ({"Runtime": "odd"}, "odd"),
    ):
        body = minimal("x")
        body["TaskTemplate"] |= template
        if words:
            refused(node, body, 400, words)
    body = minimal("x")
    body["TaskTemplate"]["Networks"] = [{"Target": "no-such"}]
    refused(node, body, 404, "no-such")
    body["TaskTemplate"]["Networks"] = [{"Target": "host"}]
    refused(node, body, 403, "not eligible for docker services", version="1.29")
    assert [service["Spec"]["Name"] for service in node.ask("GET", "/services")] == ["taken"], "nothing was made"
    for method, path in (("GET", "/services/no-such"), ("DELETE", "/services/no-such")):
        assert "service no-such not found" in node.ask(method, path, status=404)["message"]


def test_a_name_is_made(node: Node) -> None:
    body = minimal("")
    made = node.ask("POST", "/services/create", body, status=201)["ID"]
    assert len(node.ask("GET", f"/services/{made}")["Spec"]["Name"]) > 3


# --- the container of a task ----------------------------------------------------------------------


def test_each_field(node: Node) -> None:
    body = minimal(
        "full",
        **{
            "Command": ["sh"],
            "Args": ["-c", "sleep 9999"],
            "Env": ["A=b", "SLOT={{.Task.Slot}}"],
            "Dir": "/tmp",
            "User": "7:8",
            "Groups": ["9"],
            "Hostname": "{{.Service.Name}}_{{.Task.Slot}}",
            "Labels": {"own": "label"},
            "Mounts": [
                {"Type": "volume", "Source": "kept", "Target": "/kept", "VolumeOptions": {"Labels": {"a": "b"}}},
                {"Type": "tmpfs", "Target": "/scratch", "TmpfsOptions": {"SizeBytes": 1 << 20}},
                {"Type": "bind", "Source": str(node.base), "Target": "/host", "ReadOnly": True},
            ],
            "Hosts": ["10.9.8.7 other alias"],
            "DNSConfig": {"Nameservers": ["10.9.8.6"], "Search": ["example.org"], "Options": ["ndots:2"]},
            "StopSignal": "SIGINT",
            "StopGracePeriod": 3 * 10**9,
            "TTY": True,
            "OpenStdin": True,
            "ReadOnly": True,
            "Init": True,
            "Sysctls": {"net.core.somaxconn": "77"},
            "CapabilityAdd": ["CAP_NET_ADMIN"],
            "CapabilityDrop": ["CAP_CHOWN"],
            "Ulimits": [{"Name": "nofile", "Soft": 100, "Hard": 200}],
            "OomScoreAdj": 300,
            "Privileges": {"NoNewPrivileges": True, "Seccomp": {"Mode": "unconfined"}},
            "Healthcheck": {"Test": ["CMD", "true"], "Interval": 10**9},
        },
    )
    body["TaskTemplate"] |= {
        "Resources": {
            "Limits": {"NanoCPUs": 500_000_000, "MemoryBytes": 32 << 20, "Pids": 50},
            "SwapBytes": 1 << 20,
            "MemorySwappiness": 20,
        },
        "LogDriver": {"Name": "json-file", "Options": {"max-size": "1m"}},
    }
    node.ask("POST", "/services/create", body, status=201, version="1.55")
    found = container_of(node, "full")
    config, host = found["Config"], found["HostConfig"]
    assert (config["Entrypoint"], config["Cmd"]) == (["sh"], ["-c", "sleep 9999"])
    assert {"A=b", "SLOT=1"} <= set(config["Env"]) and config["Hostname"] == "full_1"
    assert (config["WorkingDir"], config["User"], host["GroupAdd"]) == ("/tmp", "7:8", ["9"])
    assert config["Labels"]["own"] == "label" and config["Labels"]["com.docker.swarm.task"] == ""
    mounts = {mount["Destination"]: mount for mount in found["Mounts"]}
    assert mounts["/kept"]["Name"] == "kept" and mounts["/host"]["RW"] is False
    assert node.ask("GET", "/volumes/kept")["Labels"] == {"a": "b"}
    assert host["ExtraHosts"] == ["other:10.9.8.7", "alias:10.9.8.7"]
    assert (host["Dns"], host["DnsSearch"], host["DnsOptions"]) == (["10.9.8.6"], ["example.org"], ["ndots:2"])
    assert config["StopSignal"] == "SIGINT" and config["Tty"] and config["OpenStdin"]
    assert host["ReadonlyRootfs"] and host["Init"] and host["Sysctls"] == {"net.core.somaxconn": "77"}
    assert host["CapAdd"] == ["CAP_NET_ADMIN"] and host["CapDrop"] == ["CAP_CHOWN"]
    assert host["Ulimits"] == [{"Name": "nofile", "Soft": 100, "Hard": 200}] and host["OomScoreAdj"] == 300
    assert {"no-new-privileges", "seccomp=unconfined"} <= {each.replace("=true", "") for each in host["SecurityOpt"]}
    assert config["Healthcheck"]["Test"] == ["CMD", "true"] and found["State"]["Health"]["Status"] == "healthy"
    assert host["Memory"] == 32 << 20 and host["PidsLimit"] == 50
    assert (host["MemorySwap"], host["MemorySwappiness"]) == (33 << 20, -1 if V2 else 20)
    assert host["NanoCpus"] == 500_000_000 or (host["CpuQuota"], host["CpuPeriod"]) == (50_000, 100_000)
    assert host["LogConfig"] == {"Type": "json-file", "Config": {"max-size": "1m"}}
    assert host["RestartPolicy"]["Name"] in ("", "no")
    node.ask("DELETE", "/services/full")
    until("the containers of tasks have gone", lambda: not node.task_containers())
    until("the volume is free", lambda: node.request("DELETE", "/v1.44/volumes/kept").status == 204)


def test_ports_of_mode_host(node: Node) -> None:
    node.service(
        "ported",
        "httpd",
        "-f",
        "-p",
        "80",
        EndpointSpec={"Ports": [{"TargetPort": 80, "PublishedPort": 18080, "PublishMode": "host"}]},
    )
    [task] = node.until_running("ported", 1)
    [port] = task["Status"]["PortStatus"]["Ports"]
    assert (port["TargetPort"], port["PublishedPort"], port["PublishMode"]) == (80, 18080, "host")
    found = node.ask("GET", "/services/ported")
    assert found["Endpoint"]["Spec"]["Ports"][0]["PublishMode"] == "host"
    assert "PublishMode" not in node.ask("GET", "/services/ported", version="1.24")["Spec"]["EndpointSpec"]["Ports"][0]


def test_networks_of_the_node(node: Node) -> None:
    node.service("hosted", template={"Networks": [{"Target": "host"}]})
    assert container_of(node, "hosted")["HostConfig"]["NetworkMode"] == "host"
    shown = node.ask("GET", "/services/hosted")["Spec"]["TaskTemplate"]["Networks"]
    assert shown == [{"Target": "host"}], "its id is another one on each node"
    body = minimal("by-id")
    body["TaskTemplate"]["Networks"] = [{"Target": node.ask("GET", "/networks/none")["Id"]}]
    node.ask("POST", "/services/create", body, status=201)
    assert node.ask("GET", "/services/by-id")["Spec"]["TaskTemplate"]["Networks"] == [{"Target": "none"}]
    node.ask("POST", "/networks/create", {"Name": "own"}, status=201)
    body["TaskTemplate"]["Networks"] = [{"Target": "own"}]
    refused(node, body | {"Name": "x"}, 403, "not eligible for docker services")
    node.ask("DELETE", "/networks/own", status=204)


def test_why_a_task_waits(node: Node) -> None:
    node.service("stuck", template={"Placement": {"Constraints": ["node.labels.gpu==yes"]}})
    [task] = until("the task says why", lambda: [task for task in node.tasks("stuck") if task["Status"].get("Err")])
    assert task["Status"]["State"] == "pending" and "constraint" in task["Status"]["Err"]
    node.update_node(node.node_id, Labels={"gpu": "yes"})
    node.until_running("stuck", 1)
    node.update_node(node.node_id, Labels={})


def test_a_task_that_fails(node: Node) -> None:
    node.service("failing", "sh", "-c", "exit 3", template={"RestartPolicy": {"Condition": "none"}})
    [task] = until(
        "the task has failed",
        lambda: [each for each in node.tasks("failing", desired="") if each["Status"]["State"] == "failed"],
    )
    assert task["Status"]["ContainerStatus"]["ExitCode"] == 3 and "exit (3)" in task["Status"]["Err"]
    node.service("imageless", container={"Image": "no-such-image:1"}, template={"RestartPolicy": {"Condition": "none"}})
    [task] = until(
        "the task is rejected",
        lambda: [each for each in node.tasks("imageless", desired="") if each["Status"]["State"] == "rejected"],
        60,
    )
    assert "no-such-image" in task["Status"]["Err"]


# --- updates --------------------------------------------------------------------------------------


def test_updates(node: Node) -> None:
    node.service("web", replicas=2)
    before = {task["ID"] for task in node.until_running("web", 2)}
    first = node.ask("GET", "/services/web")
    version, spec = first["Version"]["Index"], first["Spec"]
    path = f"/services/web/update?version={version}"
    refused(node, spec | {"Name": "other"}, 500, "renaming services is not supported", path)
    refused(node, spec | {"Mode": {"Global": {}}}, 500, "service mode change is not allowed", path)
    refused(node, spec, 500, "update out of sequence", f"/services/web/update?version={version + 999}")
    refused(node, spec, 400, "invalid service version", "/services/web/update?version=x")
    refused(node, spec, 404, "not found", "/services/no-such/update?version=1")
    refused(node, spec, 400, "rollback", f"{path}&rollback=x")
    assert node.ask("GET", "/services/web") == first, "nothing has changed"

    node.update_service("web", lambda spec: spec.update(Labels={"only": "labels"}))
    assert {task["ID"] for task in node.until_running("web", 2)} == before, "no task is restarted"

    node.update_service("web", lambda spec: spec["TaskTemplate"]["ContainerSpec"].update(Env=["A=1"]))
    done = until(
        "the update is complete",
        lambda: (each := node.ask("GET", "/services/web")).get("UpdateStatus", {}).get("State") == "completed" and each,
        60,
    )
    assert strict.faults(done, strict.SERVICE) == []
    after = {task["ID"] for task in node.until_running("web", 2)}
    assert not after & before
    assert done["PreviousSpec"]["TaskTemplate"]["ContainerSpec"].get("Env") is None
    history = {task["ID"] for task in node.tasks("web", desired="shutdown")}
    assert before <= history

    node.update_service("web", lambda spec: spec.update(Name="web"), "&rollback=previous")
    until(
        "the rollback is complete",
        lambda: node.ask("GET", "/services/web").get("UpdateStatus", {}).get("State") == "rollback_completed",
        60,
    )
    assert "Env" not in node.ask("GET", "/services/web")["Spec"]["TaskTemplate"]["ContainerSpec"]


def test_force_update_restarts(node: Node) -> None:
    node.service("web")
    [before] = node.until_running("web", 1)
    node.update_service("web", lambda spec: spec["TaskTemplate"].update(ForceUpdate=1))
    until("another task runs", lambda: [task for task in node.running("web") if task["ID"] != before["ID"]])
    now = node.ask("GET", "/services/web")
    refused(
        node, now["Spec"], 400, "TaskTemplate.ForceUpdate: 1 needs API v1.25",
        f"/services/web/update?version={now['Version']['Index']}", version="1.24",
    )  # fmt: skip


def test_jobs(node: Node) -> None:
    body = minimal("job", Command=["true"]) | {"Mode": {"ReplicatedJob": {"MaxConcurrent": 2, "TotalCompletions": 3}}}
    body["TaskTemplate"]["RestartPolicy"] = {"Condition": "none"}
    node.ask("POST", "/services/create", body, status=201)

    def completed() -> bool:
        [found] = node.ask("GET", f"/services?status=true&filters={quote(json.dumps({'name': ['job']}))}")
        assert strict.faults(found, strict.SERVICE) == []
        return found["ServiceStatus"]["CompletedTasks"] == 3 and found["JobStatus"]["JobIteration"]["Index"] >= 0

    until("the job is complete", completed, 60)
    assert node.ask("GET", "/services/job", version="1.40")["Spec"]["Mode"] == {}


# --- logs -----------------------------------------------------------------------------------------


def logs(node: Node, query: str, path: str = "/services/talker") -> list[tuple[int, bytes]]:
    answer = node.request("GET", f"/v1.44{path}/logs?{query}")
    assert answer.status == 200, answer
    assert answer.headers["content-type"] == "application/vnd.docker.multiplexed-stream"
    return client.frames(answer.body)


def test_logs(node: Node) -> None:
    node.service("talker", "sh", "-c", "echo out; echo err >&2; echo more; exec sleep 9999", replicas=2)
    tasks = node.until_running("talker", 2)
    until("all is logged", lambda: len(logs(node, "stdout=1&stderr=1")) == 6)
    assert sorted(logs(node, "stdout=1")) == [(1, b"more\n")] * 2 + [(1, b"out\n")] * 2
    assert logs(node, "stderr=1") == [(2, b"err\n")] * 2
    [task] = [task for task in tasks if task["Slot"] == 2]
    of_task = logs(node, "stdout=1&stderr=1", f"/tasks/{task['ID']}")
    assert sorted(of_task) == [(1, b"more\n"), (1, b"out\n"), (2, b"err\n")]
    assert logs(node, "stdout=1&stderr=1&tail=1", f"/tasks/{task['ID']}") in ([(1, b"more\n")], [(2, b"err\n")])
    context = (
        f"com.docker.swarm.node.id={node.node_id},com.docker.swarm.service.id={task['ServiceID']},"
        f"com.docker.swarm.task.id={task['ID']} "
    ).encode()
    detailed = logs(node, "stderr=1&details=1&timestamps=1", f"/tasks/{task['ID']}")
    [(stream, line)] = detailed
    stamp, _, rest = line.partition(b" ")
    assert (stream, rest) == (2, context + b"err\n") and stamp.endswith(b"Z") and len(stamp) == 30
    assert logs(node, f"stdout=1&stderr=1&since={2**33}") == []
    for path in ("/services/no-such", "/tasks/no-such"):
        assert "not found" in node.ask("GET", f"{path}/logs?stdout=1", status=404)["message"]
    assert "at least one stream" in node.ask("GET", "/services/talker/logs", status=400)["message"]


def test_logs_are_followed(node: Node) -> None:
    """Also those of tasks that start later."""
    node.service("talker", "sh", "-c", "while true; do echo tick; sleep 0.2; done")
    [first] = node.until_running("talker", 1)
    with contextlib.closing(
        client.stream(node.socket, "/v1.44/services/talker/logs?stdout=1&follow=1&details=1")
    ) as chunks:
        seen = b""
        while seen.count(b"tick") < 3:
            seen += next(chunks)
        node.update_service("talker", lambda spec: spec["Mode"]["Replicated"].update(Replicas=2))
        second = next(task for task in node.until_running("talker", 2) if task["ID"] != first["ID"])
        while second["ID"].encode() not in seen:
            seen += next(chunks)


def test_logs_of_a_terminal(node: Node) -> None:
    node.service("talker", "sh", "-c", "echo out; exec sleep 9999", container={"TTY": True})
    node.until_running("talker", 1)
    answer = until(
        "it is logged", lambda: (found := node.request("GET", "/v1.44/services/talker/logs?stdout=1")).body and found
    )
    assert answer.headers["content-type"] == "application/vnd.docker.raw-stream" and answer.body == b"out\r\n"


def test_networks_of_nodes_in_the_scope_of_the_swarm(node: Node) -> None:
    """The docker CLI looks them up there before it creates a service."""
    for name, driver in (("host", "host"), ("bridge", "bridge"), ("none", "null")):
        found = node.ask("GET", f"/networks/{name}?scope=swarm")
        assert (found["Name"], found["Id"], found["Scope"], found["Driver"]) == (name, name, "swarm", driver)
        assert strict.faults(found, strict.NETWORK) == []
        assert node.ask("GET", f"/networks/{name}?scope=local")["Scope"] == "local"
    listed = {network["Name"]: network["Scope"] for network in node.ask("GET", "/networks")}
    assert listed == {"host": "local", "bridge": "local", "none": "local", "ingress": "swarm"}
