"""Tasks of a real swarm, one manager and one worker: kills of daemon and monitor, clients that
touch the containers, secrets, configs, ports, health, logs.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote

import pytest

from tests.support.engine.harness import below, free_ports, until
from tests.support.plugins.protocol import VolumePlugin
from tests.support.swarm.clusters import Cluster, Node

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

SECOND = 1_000_000_000


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(2, "--label", "zone=a", "--node-generic-resource", "SSD=3") as made:
        made.form(1)
        yield made
        for node in reversed(made.nodes):
            node.leave(force=True)


@pytest.fixture(autouse=True)
def _nothing_is_left(cluster: Cluster) -> Iterator[None]:
    yield
    for service in cluster[0].ask("GET", "/services"):
        cluster[0].ask("DELETE", f"/services/{service['ID']}")
    until("all containers of tasks are gone", lambda: not any(map(_containers, cluster.nodes)))
    for kind in ("secrets", "configs"):
        for each in cluster[0].ask("GET", f"/{kind}"):
            cluster[0].ask("DELETE", f"/{kind}/{each['ID']}")


def _containers(node: Node) -> list[Any]:
    """Containers of tasks, running or not."""
    found: list[Any] = node.ask(
        "GET", "/containers/json?all=1&filters=" + quote('{"label":["com.docker.swarm.task.id"]}')
    )
    return found


def settled(cluster: Cluster, service: str, count: int) -> dict[int, tuple[str, int]]:
    """Wait until `count` tasks run, each in one container on its node. Returns task and pid by
    slot.
    """
    manager = cluster[0]
    tasks = manager.until_running(service, count)

    def agree() -> bool:
        wanted = {task["ID"]: task["NodeID"] for task in manager.running()}
        return wanted == {task: node.node_id for node in cluster.nodes for task in node.task_containers()}

    until("the containers are those of the tasks", agree)
    return {task["Slot"]: (task["ID"], task["Status"]["ContainerStatus"]["PID"]) for task in tasks}


def where(cluster: Cluster, task: Any) -> tuple[Node, str]:
    """The node of a task, and its container's id."""
    node = next(each for each in cluster.nodes if each.node_id == task["NodeID"])
    return node, str(task["Status"]["ContainerStatus"]["ContainerID"])


def slots_on(cluster: Cluster, node: Node, service: str) -> set[int]:
    return {task["Slot"] for task in cluster[0].running(service) if task["NodeID"] == node.node_id}


def output(cluster: Cluster, task: Any) -> str:
    node, container = where(cluster, task)
    return node.docker("logs", container).out


# --- kills ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1], ids=["manager", "worker"])
@pytest.mark.parametrize("what", ["daemon", "monitor", "both"])
def test_kill_9(cluster: Cluster, number: int, what: str) -> None:
    """Without daemon or monitor no task notices. Without both the tasks of the node are replaced,
    once.
    """
    node = cluster[number]
    cluster[0].service("web", replicas=4, template={"RestartPolicy": {"Delay": 0}})
    before = settled(cluster, "web", 4)
    affected = slots_on(cluster, node, "web")
    assert affected
    if what in ("daemon", "both"):
        node.kill9()
    if what in ("monitor", "both"):
        node.kill_monitor()
    if what in ("daemon", "both"):
        node.start()
    time.sleep(1)
    after = settled(cluster, "web", 4)
    changed = {slot for slot in after if after[slot] != before[slot]}
    assert changed == (affected if what == "both" else set())
    tasks = cluster[0].tasks("web", desired="")
    assert len(tasks) == 4 + len(changed), [(task["Slot"], task["Status"]) for task in tasks]


@pytest.mark.nightly
def test_kill_9_in_the_middle_of_many_starts(cluster: Cluster) -> None:
    """Daemons and monitors die at any moment of 40 starts, and again while the service shrinks: in
    the end each slot has one container.
    """
    random = Random(5)
    cluster[0].service("web", replicas=40, template={"RestartPolicy": {"Delay": 0}})
    for node in cluster.nodes:
        time.sleep(random.uniform(0.1, 0.6))  # any moment of the starts
        node.kill9()
        if node is cluster[1]:
            node.kill_monitor()
        node.start()
    settled(cluster, "web", 40)
    cluster[0].update_service("web", lambda spec: spec["Mode"]["Replicated"].update(Replicas=7))
    for node in cluster.nodes:
        time.sleep(random.uniform(0.05, 0.3))  # any moment of the removals
        node.kill9()
        node.start()
    settled(cluster, "web", 7)
    until("the others are gone", lambda: sum(len(node.task_containers()) for node in cluster.nodes) == 7)


def test_a_container_that_ends_without_the_daemon(cluster: Cluster) -> None:
    cluster[0].service(
        "web",
        "sh",
        "-c",
        "until test -e /end; do sleep 0.1; done; exit 9",
        template={"RestartPolicy": {"Condition": "none"}},
    )
    (task,) = cluster[0].until_running("web", 1)
    node, _ = where(cluster, task)
    node.kill9()
    root = Path(f"/proc/{task['Status']['ContainerStatus']['PID']}/root")
    (root / "end").touch()
    until("it has ended", lambda: not (root / "end").exists())
    node.start()

    def failed() -> bool:
        status = cluster[0].ask("GET", f"/tasks/{task['ID']}")["Status"]
        return bool(status["State"] == "failed" and status["Err"] == "task: non-zero exit (9)")

    until("its exit code is reported", failed)


# --- clients --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "verb", [("stop", "-t", "0"), ("rm", "-f"), ("restart", "-t", "0"), ("kill",)], ids=lambda each: each[0]
)
def test_clients_that_touch_a_tasks_container(cluster: Cluster, verb: tuple[str, ...]) -> None:
    """It gets a successor, and nothing runs beside that."""
    cluster[0].service("web", replicas=2, template={"RestartPolicy": {"Delay": 0}})
    before = settled(cluster, "web", 2)
    task = cluster[0].running("web")[0]
    node, container = where(cluster, task)
    node.docker(*verb, container)
    until("it has a successor", lambda: task["ID"] not in {each["ID"] for each in cluster[0].running("web")})
    after = settled(cluster, "web", 2)
    assert {slot for slot in after if after[slot] != before[slot]} == {task["Slot"]}


# --- what a container gets ------------------------------------------------------------------------


def test_secrets_and_configs(cluster: Cluster) -> None:
    manager = cluster[0]
    text = base64.b16encode(os.urandom(16)).decode()

    def create(kind: str, name: str, data: str, **more: Any) -> str:
        body = {"Name": name, "Data": base64.b64encode(data.encode()).decode()} | more
        return str(manager.ask("POST", f"/{kind}/create", body)["ID"])

    secret = create("secrets", "password", text)
    config = create(
        "configs",
        "conf",
        'for {{.Service.Name}}.{{.Task.Slot}} on {{.Node.ID}}: {{len (secret "pw")}}',
        Templating={"Name": "golang"},
    )
    target = {"UID": "7", "GID": "8", "Mode": 0o440}
    references = {
        "Secrets": [{"SecretID": secret, "SecretName": "password", "File": {"Name": "pw"} | target}],
        "Configs": [{"ConfigID": config, "ConfigName": "conf", "File": {"Name": "/etc/app.conf"} | target}],
    }
    command = "sha1sum < /run/secrets/pw; stat -c '%a %u %g' /run/secrets/pw; cat /etc/app.conf; echo; sleep 1000"
    manager.service("web", "sh", "-c", command, replicas=2, container=references)
    tasks = manager.until_running("web", 2)
    for task in tasks:
        wanted = [
            f"{hashlib.sha1(text.encode()).hexdigest()}  -",
            "440 7 8",
            f"for web.{task['Slot']} on {task['NodeID']}: {len(text)}",
        ]
        until("its output", lambda: len(output(cluster, task).splitlines()) >= 3)  # noqa: B023
        assert output(cluster, task).splitlines() == wanted
    for node in cluster.nodes:
        search = ["grep", "-rlF", text, str(node.root), str(node.run)]
        found = subprocess.run(search, capture_output=True, text=True, check=False)
        assert not found.stdout, "the secret is on a disk, in clear"
    assert manager.ask("DELETE", f"/secrets/{secret}", status=400)
    # It outlives the daemon, and new tasks get it again.
    node, container = where(cluster, tasks[0])
    node.kill9()
    node.start()
    assert node.docker("exec", container, "cat", "/run/secrets/pw").out == text
    manager.update_service("web", lambda spec: spec["Mode"]["Replicated"].update(Replicas=3))
    manager.until_running("web", 3)


def test_ports_of_mode_host(cluster: Cluster) -> None:
    (port,) = free_ports(1)
    ports = [
        {"TargetPort": 80, "PublishedPort": port, "PublishMode": "host", "Protocol": "tcp"},
        {"TargetPort": 81, "PublishMode": "host", "Protocol": "udp"},
    ]
    script = "mkdir /w; echo $HOSTNAME > /w/index.html; exec httpd -f -p 80 -h /w"
    cluster[0].service("web", "sh", "-c", script, replicas=None, EndpointSpec={"Ports": ports})
    tasks = cluster[0].until_running("web", 2)
    for task in tasks:
        fixed, chosen = task["Status"]["PortStatus"]["Ports"]
        assert (fixed["PublishedPort"], chosen["TargetPort"]) == (port, 81) and chosen["PublishedPort"]
        node, container = where(cluster, task)
        fetch = "import urllib.request; print(urllib.request.urlopen('http://%s:%d/').read().decode())"
        assert container.startswith(node.inside("python3", "-c", fetch % (node.address, port)).strip())
    # A third would find no node with the port free.
    cluster[0].service("other", EndpointSpec={"Ports": ports[:1]})
    until(
        "it says why",
        lambda: any("host-mode port" in str(task["Status"].get("Err")) for task in cluster[0].tasks("other")),
    )


def test_health_decides_when_a_task_runs(cluster: Cluster) -> None:
    check = {"Test": ["CMD", "test", "-e", "/ok"], "Interval": SECOND // 5, "Retries": 3, "StartPeriod": 600 * SECOND}
    policy = {"Condition": "none"}
    cluster[0].service("web", container={"Healthcheck": check}, template={"RestartPolicy": policy})

    def task(state: str) -> Any:
        """The task in this state, when its container has been probed."""
        for found in cluster[0].tasks("web", desired=""):
            if found["Status"]["State"] == state and found["Status"].get("ContainerStatus"):
                return found
        return None

    node, container = where(cluster, until("it starts", lambda: task("starting")))

    def shown() -> Any:
        return node.ask("GET", f"/containers/{container}/json")["State"]

    until("it was probed", lambda: (shown().get("Health") or {}).get("Log"))
    assert task("starting"), "a failure in the start period changes nothing"
    ok = Path(f"/proc/{shown()['Pid']}/root/ok")
    ok.touch()
    until("it is healthy", lambda: task("running"))
    ok.unlink()
    assert "unhealthy container" in until("it is unhealthy", lambda: task("failed"))["Status"]["Err"]


@pytest.mark.parametrize(
    ("container", "state", "words"),
    [
        ({"Image": "registry.invalid/none:1"}, "rejected", "No such image: registry.invalid/none:1"),
        ({"Command": ["/no/such/program"]}, "failed", "/no/such/program"),
        ({"Mounts": [{"Type": "bind", "Source": "/nonexistent", "Target": "/x"}]}, "rejected", "bind source path"),
        ({"Command": ["sh", "-c", "exit 4"]}, "failed", "task: non-zero exit (4)"),
        ({"Mounts": [{"Type": "volume", "Target": "/x", "VolumeOptions": {"DriverConfig": {"Name": "nodriver"}}}]},
         "pending", "missing plugin"),
    ],
)  # fmt: skip
def test_why_a_task_does_not_run(cluster: Cluster, container: Any, state: str, words: str) -> None:
    cluster[0].service("web", container=container, template={"RestartPolicy": {"Condition": "none"}})

    def told() -> bool:
        return any(
            words in str(task["Status"].get("Err")) and state == task["Status"]["State"]
            for task in cluster[0].tasks("web", desired="")
        )

    until(f"its error has {words!r}", told)


def test_a_volume_plugin(cluster: Cluster, tmp_path: Path) -> None:
    """The task waits for a node that has the driver; a plugin that appears is reported."""
    volume = {"Type": "volume", "Source": "shared", "Target": "/data"}
    driver = {"VolumeOptions": {"DriverConfig": {"Name": "flocker", "Options": {"size": "1"}}}}
    cluster[0].service("web", "sh", "-c", "echo x > /data/file; sleep 1000", container={"Mounts": [volume | driver]})
    until(
        "the reason is reported",
        lambda: "plugin" in str([task["Status"].get("Err") for task in cluster[0].tasks("web")]),
    )
    worker = cluster[1]
    (worker.run / "plugins").mkdir(exist_ok=True)
    plugin = VolumePlugin(tmp_path)
    socket = worker.run / "plugins" / "flocker.sock"
    plugin.listen(socket)
    try:
        (task,) = cluster[0].until_running("web", 1)
        assert task["NodeID"] == worker.node_id
        until("the task's file", lambda: [path for path in below(tmp_path) if path.name == "file"])
        assert plugin.volumes.keys() == {"shared"}
        cluster[0].ask("DELETE", "/services/web")
        until("its container is gone", lambda: not _containers(worker))
        worker.ask("DELETE", "/volumes/shared")
    finally:
        plugin.close()
        socket.unlink(missing_ok=True)


def test_generic_resources(cluster: Cluster) -> None:
    """Three on each node: the seventh of a service that takes one each waits."""
    one = {"GenericResources": [{"DiscreteResourceSpec": {"Kind": "SSD", "Value": 1}}]}
    cluster[0].service(
        "web",
        "sh",
        "-c",
        "echo $DOCKER_RESOURCE_SSD; sleep 1000",
        replicas=7,
        template={"Resources": {"Reservations": one}},
    )
    until("six of them run", lambda: len(cluster[0].running("web")) == 6)
    (waiting,) = [task for task in cluster[0].tasks("web") if task["Status"]["State"] != "running"]
    assert "insufficient resources" in waiting["Status"]["Err"]
    task = cluster[0].running("web")[0]
    until("its output", lambda: output(cluster, task) == "1\n")


def test_logs_of_a_service(cluster: Cluster) -> None:
    cluster[0].service(
        "web", "sh", "-c", "for i in 1 2 3; do echo out $i; echo err $i >&2; done; sleep 1000", replicas=3
    )
    tasks = cluster[0].until_running("web", 3)

    def lines(path: str) -> list[bytes]:
        answer = cluster[0].request("GET", f"/v1.44/{path}")
        assert answer.status == 200, answer
        found, body = [], answer.body
        while body:
            size = int.from_bytes(body[4:8], "big")
            found.append(body[:1] + body[8 : 8 + size])
            body = body[8 + size :]
        return found

    until("all lines", lambda: len(lines("services/web/logs?stdout=1&stderr=1")) == 18)
    assert sorted(lines("services/web/logs?stderr=1")) == sorted([b"\x02err %d\n" % number for number in (1, 2, 3)] * 3)
    one = f"tasks/{tasks[0]['ID']}/logs?stdout=1"
    assert lines(one) == [b"\x01out %d\n" % number for number in (1, 2, 3)]
    assert lines(f"{one}&stderr=1&tail=2") == lines(f"{one}&stderr=1")[-2:]
    detailed = lines(f"{one}&details=1&timestamps=1")[-1].decode()
    assert re.match(r"\x01\d{4}-\d\d-\d\dT[\d:.]+Z com\.docker\.swarm\.node\.id=", detailed), detailed
    assert f"com.docker.swarm.task.id={tasks[0]['ID']}" in detailed and detailed.endswith(" out 3\n")


def test_labels_of_the_engine(cluster: Cluster) -> None:
    assert cluster[1].ask("GET", "/info")["Labels"] == ["zone=a"]
    cluster[0].service("web", template={"Placement": {"Constraints": ["engine.labels.zone==a"]}})
    cluster[0].until_running("web", 1)
    cluster[0].service("none", template={"Placement": {"Constraints": ["engine.labels.zone==b"]}})
    until("it waits", lambda: "constraint" in str([task["Status"].get("Err") for task in cluster[0].tasks("none")]))


def test_stop_and_start_of_a_worker(cluster: Cluster) -> None:
    """`engined stop` ends the tasks of the node; they run again, somewhere, exactly once."""
    cluster[0].service("web", replicas=4, template={"RestartPolicy": {"Delay": 0}})
    settled(cluster, "web", 4)
    cluster[1].stop()
    cluster[1].start()
    settled(cluster, "web", 4)
    with contextlib.suppress(json.JSONDecodeError):
        assert all(state["State"] != "orphaned" for state in [task["Status"] for task in cluster[0].tasks("web")])
