"""Services on real engines: scaling, rolling updates, rollbacks, global services, jobs, placement,
and a leader that dies in the middle of an update.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.engine.harness import until
from tests.support.swarm.clusters import Cluster, Node

NODES = 3
SECOND = 1_000_000_000


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three managers."""
    with Cluster(NODES) as made:
        made.form(NODES)
        yield made


@pytest.fixture
def first(cluster: Cluster) -> Iterator[Node]:
    """The first node. No service is left behind, and every node is as at first."""
    node = cluster[0]
    until("all nodes are ready", lambda: all(each["Status"]["State"] == "ready" for each in node.nodes().values()))
    yield node
    for service in node.ask("GET", "/services"):
        node.ask("DELETE", f"/services/{service['ID']}", timeout=60)
    for each in cluster.nodes:
        node.update_node(each.node_id, Labels={}, Availability="active")
    until("no task is left", lambda: not any(each.task_containers() for each in cluster.nodes), 60)
    until("no record is left", lambda: not node.tasks(desired=""), 60)


def update_status(node: Node, service: str) -> dict[str, Any]:
    return node.ask("GET", f"/services/{service}").get("UpdateStatus") or {}


def until_state(node: Node, service: str, state: str, seconds: float = 60) -> dict[str, Any]:
    """Wait for the end of an update."""

    def there() -> dict[str, Any] | None:
        status = update_status(node, service)
        return status if status.get("State") == state else None

    try:
        return until(f"the update of {service} is {state}", there, seconds)
    except AssertionError as error:
        tasks = [
            (task.get("Slot"), task["DesiredState"], task["Status"]["State"], task["Status"].get("Err"))
            for task in node.tasks(service, desired="")
        ]
        raise AssertionError(f"{error}: {update_status(node, service)}\n{tasks}") from None


def environment(**values: Any) -> Callable[[Any], None]:
    """A change of the spec: the tasks' environment, and fields of the spec."""

    def change(spec: Any) -> None:
        spec["TaskTemplate"]["ContainerSpec"]["Env"] = [values.pop("env", "A=1")]
        spec.update(values)

    return change


def env_of(tasks: list[Any]) -> set[str]:
    return {(task["Spec"]["ContainerSpec"].get("Env") or [""])[0] for task in tasks}


def fewest_running(node: Node, service: str, ended: Callable[[], bool], seconds: float = 60) -> int:
    """The smallest number of slots with a running task, until `ended`."""
    fewest = 1 << 30
    deadline = time.monotonic() + seconds
    while not ended():
        # a task that has just been asked to end still serves, so all tasks of the slots count
        slots = {task["Slot"] for task in node.tasks(service, desired="") if task["Status"]["State"] == "running"}
        fewest = min(fewest, len(slots))
        assert time.monotonic() < deadline, update_status(node, service)
    return fewest


def test_scaling_touches_no_other_task(first: Node) -> None:
    service = first.service("web", replicas=3)
    before = {task["ID"] for task in first.until_running(service, 3)}
    first.update_service(service, lambda spec: spec.update(Mode={"Replicated": {"Replicas": 6}}))
    more = {task["ID"] for task in first.until_running(service, 6)}
    assert before < more
    assert {task["Slot"] for task in first.tasks(service)} == set(range(1, 7))
    first.update_service(service, lambda spec: spec.update(Mode={"Replicated": {"Replicas": 2}}))
    assert {task["ID"] for task in first.until_running(service, 2)} < more
    first.update_service(service, lambda spec: spec.update(Mode={"Replicated": {"Replicas": 0}}))
    first.until_running(service, 0)
    until("all containers have ended", lambda: not first.tasks(service, desired=""))


def test_a_rolling_update(first: Node) -> None:
    service = first.service("web", replicas=6)
    first.until_running(service, 6)
    assert not update_status(first, service)
    config = {"Parallelism": 2, "Monitor": SECOND, "FailureAction": "pause"}
    first.update_service(service, environment(env="V=2", UpdateConfig=config))
    fewest = fewest_running(first, service, lambda: update_status(first, service).get("State") == "completed")
    assert fewest >= 4
    assert env_of(first.until_running(service, 6)) == {"V=2"}
    status = update_status(first, service)
    assert status["Message"] == "update completed"
    assert status["StartedAt"] < status["CompletedAt"]


def test_start_first_keeps_every_slot_running(first: Node) -> None:
    service = first.service("web", replicas=3)
    first.until_running(service, 3)
    config = {"Parallelism": 1, "Monitor": SECOND, "Order": "start-first"}
    first.update_service(service, environment(env="V=2", UpdateConfig=config))
    fewest = fewest_running(first, service, lambda: update_status(first, service).get("State") == "completed")
    assert fewest == 3
    assert env_of(first.until_running(service, 3)) == {"V=2"}


def failing(action: str, **more: Any) -> Callable[[Any], None]:
    """A change after which tasks fail."""

    def change(spec: Any) -> None:
        spec["TaskTemplate"]["ContainerSpec"]["Command"] = ["false"]
        spec["TaskTemplate"]["RestartPolicy"] = {"Delay": SECOND // 2}
        spec["UpdateConfig"] = {
            "Parallelism": 1, "Delay": 2 * SECOND, "Monitor": 3 * SECOND, "FailureAction": action, **more,
        }  # fmt: skip

    return change


def test_a_failed_update_is_paused_and_the_next_one_goes_on(first: Node) -> None:
    service = first.service("web", replicas=3)
    first.until_running(service, 3)
    first.update_service(service, failing("pause"))
    status = until_state(first, service, "paused")
    assert "update paused due to failure or early termination of task " in status["Message"]
    assert len(first.running(service)) >= 2
    first.update_service(
        service, lambda spec: spec["TaskTemplate"]["ContainerSpec"].update(Command=["sleep", "1000000"], Env=["V=3"])
    )
    until_state(first, service, "completed")
    assert env_of(first.until_running(service, 3)) == {"V=3"}


def test_a_failed_update_is_rolled_back(first: Node) -> None:
    service = first.service("web", replicas=3, RollbackConfig={"Parallelism": 1, "Monitor": SECOND})
    first.until_running(service, 3)
    first.update_service(service, failing("rollback"))
    status = until_state(first, service, "rollback_completed")
    assert status["Message"] == "rollback completed"
    tasks = first.until_running(service, 3)
    assert {task["Spec"]["ContainerSpec"]["Command"][0] for task in tasks} == {"sleep"}
    assert first.ask("GET", f"/services/{service}")["Spec"]["TaskTemplate"]["ContainerSpec"]["Command"][0] == "sleep"


def test_a_rollback_on_request(first: Node) -> None:
    service = first.service("web", "sleep", "1000000", replicas=2)
    first.until_running(service, 2)
    first.update_service(service, environment(env="V=2", UpdateConfig={"Monitor": SECOND}))
    until_state(first, service, "completed")
    now = first.ask("GET", f"/services/{service}")
    first.ask("POST", f"/services/{service}/update?version={now['Version']['Index']}&rollback=previous", now["Spec"])
    until_state(first, service, "rollback_completed")
    assert env_of(first.until_running(service, 2)) == {""}


def test_restarts_end_with_the_attempts(first: Node) -> None:
    policy = {"Condition": "on-failure", "MaxAttempts": 2, "Delay": SECOND // 10}
    service = first.service("web", "false", template={"RestartPolicy": policy})
    until("all attempts are used up", lambda: len(first.tasks(service, desired="")) == 3)
    time.sleep(1)  # ten times the delay after which a further attempt would be made
    tasks = first.tasks(service, desired="")
    assert [task["Status"]["State"] for task in tasks] == ["failed"] * 3
    assert {task["DesiredState"] for task in tasks} == {"shutdown"}


def test_a_task_is_restarted_when_its_container_is_killed(cluster: Cluster, first: Node) -> None:
    service = first.service("web", template={"RestartPolicy": {"Delay": 0}})
    (before,) = first.until_running(service, 1)
    container = before["Status"]["ContainerStatus"]["ContainerID"]
    node = next(each for each in cluster.nodes if each.node_id == before["NodeID"])
    node.ask("POST", f"/containers/{container}/kill")

    def replaced() -> bool:
        running = first.running(service)
        return len(running) == 1 and running[0]["ID"] != before["ID"]

    until("the task is replaced", replaced)
    old = first.ask("GET", f"/tasks/{before['ID']}")
    assert (old["Status"]["State"], old["DesiredState"]) == ("failed", "shutdown")
    assert old["Status"]["ContainerStatus"]["ExitCode"] == 137


def test_a_global_service_follows_labels_and_drains(cluster: Cluster, first: Node) -> None:
    one, two, _ = (node.node_id for node in cluster.nodes)
    service = first.service("agent", replicas=None, template={"Placement": {"Constraints": ["node.labels.l == yes"]}})
    first.until_running(service, 0)
    first.update_node(one, Labels={"l": "yes"})
    first.update_node(two, Labels={"l": "yes"})
    assert {task["NodeID"] for task in first.until_running(service, 2)} == {one, two}
    first.update_node(one, Labels={})
    assert {task["NodeID"] for task in first.until_running(service, 1)} == {two}
    first.update_node(two, Availability="drain")
    first.until_running(service, 0)
    until("the container has ended", lambda: not cluster[1].task_containers())
    first.update_node(two, Availability="active")
    assert {task["NodeID"] for task in first.until_running(service, 1)} == {two}


def test_drain_moves_tasks_and_pause_keeps_them(cluster: Cluster, first: Node) -> None:
    service = first.service("web", replicas=6)
    before = {task["ID"]: task["NodeID"] for task in first.until_running(service, 6)}
    assert sorted(list(before.values()).count(node.node_id) for node in cluster.nodes) == [2, 2, 2]
    drained, paused = cluster[1].node_id, cluster[2].node_id
    first.update_node(paused, Availability="pause")
    first.update_node(drained, Availability="drain")

    def moved() -> bool:
        tasks = first.tasks(service)
        return len(tasks) == 6 == len(first.running(service)) and all(task["NodeID"] != drained for task in tasks)

    until("the drained node's tasks have moved", moved)
    after = {task["ID"]: task["NodeID"] for task in first.running(service)}
    assert {id: node for id, node in before.items() if node != drained}.items() <= after.items()
    assert list(after.values()).count(paused) == 2


def test_a_task_that_fits_nowhere_says_why(cluster: Cluster, first: Node) -> None:
    constraints = {"Constraints": ["node.hostname==nowhere"]}
    service = first.service("web", template={"Placement": constraints})

    def waits() -> list[str]:
        return [task["Status"].get("Err", "") for task in first.tasks(service, desired="")]

    reason = f"no suitable node (scheduling constraints not satisfied on {NODES} nodes)"
    until("the reason is there", lambda: waits() == [reason])
    (task,) = first.tasks(service, desired="")
    assert task["Status"]["State"] == "pending"
    first.update_service(service, lambda spec: spec["TaskTemplate"].update(Placement={}))
    first.until_running(service, 1)
    large = first.service("large", template={"Resources": {"Reservations": {"NanoCPUs": 10_000 * SECOND}}})
    until("the reason is there", lambda: "insufficient" in str(first.tasks(large)))


def test_placement(cluster: Cluster, first: Node) -> None:
    for node, value in zip(cluster.nodes, ("a", "a", "b"), strict=True):
        first.update_node(node.node_id, Labels={"dc": value})
    preference = {"Preferences": [{"Spread": {"SpreadDescriptor": "node.labels.dc"}}]}
    spread = first.service("spread", replicas=4, template={"Placement": preference})
    nodes = [task["NodeID"] for task in first.until_running(spread, 4)]
    assert nodes.count(cluster[2].node_id) == 2
    limited = first.service("limited", replicas=4, template={"Placement": {"MaxReplicas": 1}})
    until("as many run as may", lambda: len(first.running(limited)) == 3)
    (waiting,) = [task for task in first.tasks(limited) if task["Status"]["State"] != "running"]
    assert "max replicas per node" in waiting["Status"]["Err"]


def test_host_ports_are_given_once_per_node(cluster: Cluster, first: Node) -> None:
    ports = {"Ports": [{"TargetPort": 80, "PublishedPort": 8080, "PublishMode": "host"}]}
    service = first.service("web", replicas=4, EndpointSpec=ports)
    until("one runs on each node", lambda: len(first.running(service)) == NODES)
    running = first.running(service)
    assert len({task["NodeID"] for task in running}) == NODES
    assert running[0]["Status"]["PortStatus"]["Ports"][0]["PublishedPort"] == 8080
    (waiting,) = [task for task in first.tasks(service) if task["Status"]["State"] != "running"]
    assert "host-mode port already in use on 3 nodes" in waiting["Status"]["Err"]
    config = {"Parallelism": 1, "Monitor": SECOND // 2}
    first.update_service(service, environment(env="V=2", UpdateConfig=config, Mode={"Replicated": {"Replicas": 3}}))
    until_state(first, service, "completed")
    assert env_of(first.until_running(service, 3)) == {"V=2"}


def test_a_replicated_job(first: Node) -> None:
    job = {"ReplicatedJob": {"MaxConcurrent": 2, "TotalCompletions": 5}}
    service = first.service("job", "sh", "-c", "sleep 0.3", Mode=job)

    def complete() -> list[Any] | None:
        tasks = first.tasks(service, desired="")
        return tasks if [task["Status"]["State"] for task in tasks] == ["complete"] * 5 else None

    tasks = until("the job is complete", complete)
    assert {task["DesiredState"] for task in tasks} == {"complete"}
    assert {task.get("Slot", 0) for task in tasks} == {0, 1, 2, 3, 4}, "clients count the slots of a job from 0"
    listed = first.ask("GET", "/services?status=true")[0]
    assert (listed["ServiceStatus"]["RunningTasks"], listed["ServiceStatus"]["CompletedTasks"]) == (0, 5)
    assert listed["JobStatus"]["LastExecution"] > "2000"
    first.update_service(service, lambda spec: spec["TaskTemplate"].update(ForceUpdate=1))
    again = until("the job is complete again", lambda: (t := complete()) and t[0]["JobIteration"]["Index"] and t)
    assert not {task["ID"] for task in again} & {task["ID"] for task in tasks}


def test_a_global_job(first: Node) -> None:
    service = first.service("job", "true", Mode={"GlobalJob": {}})

    def complete() -> list[Any] | None:
        tasks = first.tasks(service, desired="")
        return tasks if [task["Status"]["State"] for task in tasks] == ["complete"] * NODES else None

    assert len({task["NodeID"] for task in until("the job is complete", complete)}) == NODES


def test_removing_a_service_leaves_nothing(cluster: Cluster, first: Node) -> None:
    service = first.service("web", replicas=6)
    first.until_running(service, 6)
    first.ask("DELETE", f"/services/{service}")
    first.ask("GET", f"/services/{service}", status=404)
    assert not first.ask("GET", "/services")
    until("no container is left", lambda: not any(node.containers() for node in cluster.nodes))
    until("no task is left", lambda: not first.tasks(desired=""))


def docker(node: Node, *arguments: str) -> str:
    """The output of the docker CLI at its newest API version."""
    environment = {name: value for name, value in node.environment.items() if name != "DOCKER_API_VERSION"}
    done = subprocess.run(
        ["docker", *arguments], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, (arguments, done.stdout[-1000:], done.stderr[-1000:])
    return done.stdout


def test_the_docker_cli_follows_an_update(first: Node) -> None:
    out = docker(
        first, "service", "create", "--no-resolve-image", "--name", "cli", "--replicas", "3", "--stop-grace-period",
        "0s", "busybox", "sleep", "1000000",
    )  # fmt: skip
    assert "converged" in out, out
    out = docker(first, "service", "update", "--no-resolve-image", "--env-add", "V=2", "--update-monitor", "1s", "cli")
    assert "converged" in out, out
    assert env_of(first.until_running("cli", 3)) == {"V=2"}
    assert docker(first, "service", "ps", "--filter", "desired-state=running", "cli").count("Running") >= 3
    assert "converged" in docker(first, "service", "scale", "cli=5")
    assert "5/5" in docker(first, "service", "ls")
    assert "converged" in docker(first, "service", "rollback", "cli")
    assert "converged" in docker(first, "service", "rollback", "cli")
    assert env_of(first.until_running("cli", 5)) == {"V=2"}


@pytest.mark.nightly
def test_the_leader_dies_in_the_middle_of_an_update(cluster: Cluster, first: Node) -> None:
    """Never more than Parallelism are down, and the update ends at another leader."""
    service = first.service("web", replicas=20)
    first.until_running(service, 20)
    leader = cluster.leader()
    other = next(node for node in cluster.nodes if node is not leader)
    config = {"Parallelism": 2, "Monitor": SECOND, "Delay": SECOND // 5}
    other.update_service(service, environment(env="V=2", UpdateConfig=config))
    until("some are updated", lambda: len([t for t in other.running(service) if env_of([t]) == {"V=2"}]) >= 4)
    leader.kill_manager()

    def ended() -> bool:
        try:
            return update_status(other, service).get("State") == "completed"
        except AssertionError:
            return False

    fewest = 20
    deadline = time.monotonic() + 90
    while not ended():
        try:
            tasks = other.tasks(service, desired="")
        except AssertionError:
            continue
        fewest = min(fewest, len({task["Slot"] for task in tasks if task["Status"]["State"] == "running"}))
        assert time.monotonic() < deadline
    assert fewest >= 18
    tasks = other.until_running(service, 20)
    assert env_of(tasks) == {"V=2"}
    assert {task["Slot"] for task in tasks} == set(range(1, 21))
    until("the killed manager is back", lambda: leader.swarm_info()["ControlAvailable"])
    containers = {id for node in cluster.nodes for id in node.task_containers()}
    assert containers == {task["ID"] for task in tasks}
