"""Managers that fail: kills, a stopped process, links that are cut. `test_errors` has the loss of
quorum.

Three managers; afterwards each service has its tasks once, and all managers have the same records.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.engine.harness import kill_and_wait, until
from tests.support.nightly import nightly
from tests.support.swarm.clusters import VERSION, Cluster, Node


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(3) as made:
        made.form(3)
        yield made


@pytest.fixture(autouse=True)
def _settled(cluster: Cluster) -> Iterator[None]:
    """Every test ends with three reachable managers that have the same records."""
    yield
    cluster.heal()
    for node in cluster.nodes:
        node.plug()
    until("all managers are reachable", lambda: all(managers_up(node) == 3 for node in cluster.nodes), 60)
    until("all managers have the same records", lambda: _same(cluster), 40)


def managers_up(node: Node) -> int:
    """Reachable managers as this node lists them; 0 while it lists no leader or does not answer."""
    try:
        found = [each["ManagerStatus"] for each in node.nodes().values() if "ManagerStatus" in each]
    except (AssertionError, OSError):
        return 0
    if sum(bool(each.get("Leader")) for each in found) != 1:
        return 0
    return sum(each["Reachability"] == "reachable" for each in found)


def _same(cluster: Cluster) -> bool:
    seen = [_records(node) for node in cluster.nodes]
    return seen[0] == seen[1] == seen[2]


def _records(node: Node) -> Any:
    services = {each["ID"]: each["Version"]["Index"] for each in node.ask("GET", "/services")}
    tasks = {each["ID"]: each["Version"]["Index"] for each in node.tasks(desired="")}
    nodes = {each["ID"]: each["Version"]["Index"] for each in node.nodes().values()}
    return services, tasks, nodes


def other_than(cluster: Cluster, *nodes: Node) -> Node:
    return next(node for node in cluster.nodes if node not in nodes)


def created_within(node: Node, name: str, seconds: float) -> None:
    """Create a service, again until it is accepted."""
    spec = {"Name": name, "TaskTemplate": {"ContainerSpec": {"Image": "busybox", "Command": ["sleep", "1000000"]}}}

    def accepted() -> bool:
        answer = node.request("POST", f"/v{VERSION}/services/create", spec, timeout=30)
        # 409: an earlier request was carried out, its answer was lost
        return answer.status in (201, 409)

    until(f"service {name} is accepted", accepted, seconds)


def pids(cluster: Cluster) -> set[int]:
    """Processes of the containers of tasks on all hosts."""
    found = set()
    for node in cluster.nodes:
        for entry in node.task_containers().values():
            found.add(node.ask("GET", f"/containers/{entry['Id']}/json")["State"]["Pid"])
    return found


def steady(cluster: Cluster, node: Node, replicas: int) -> set[int]:
    """Create the service `steady` at this manager, and wait until its tasks run. Returns the
    processes of all tasks.
    """
    node.service("steady", replicas=replicas)
    node.until_running("steady", replicas)
    return pids(cluster)


def removed(cluster: Cluster, *services: str) -> None:
    """Remove these services; no task and no container of one is left."""
    node = cluster[2]
    for service in services:
        node.ask("DELETE", f"/services/{service}")
    until("tasks are gone", lambda: not node.tasks(desired=""), 60)
    until("their containers are gone", lambda: not any(each.task_containers() for each in cluster.nodes), 60)


def test_the_leaders_manager_is_killed(cluster: Cluster) -> None:
    """Its etcd dies with it. Another manager accepts services, and no task is touched."""
    leader = cluster.leader()
    other = other_than(cluster, leader)
    before = steady(cluster, other, 6)
    leader.kill_manager()
    created_within(other, "after", 30)
    other.until_running("after", 1)
    until("the old leader is a manager again", lambda: managers_up(leader) == 3, 60)
    assert before <= pids(cluster)
    other.until_running("steady", 6)
    removed(cluster, "steady", "after")


@pytest.mark.parametrize("whose", ["leader", *nightly("follower")])
def test_etcd_alone_is_killed(cluster: Cluster, whose: str) -> None:
    """Its manager goes on and starts etcd again. Both serve writes, and no task is touched."""
    leader = cluster.leader()
    victim = leader if whose == "leader" else other_than(cluster, leader)
    other = other_than(cluster, victim)
    before = steady(cluster, other, 3)
    manager = victim.manager_pid()
    kill_and_wait(victim.etcd_pid())
    created_within(other, "after", 30)
    created_within(victim, "here", 30)
    assert victim.manager_pid() == manager
    other.until_running("after", 1)
    assert before <= pids(cluster)
    removed(cluster, "steady", "after", "here")


@pytest.mark.nightly
def test_a_stopped_leader_is_fenced(cluster: Cluster) -> None:
    """The process alone is stopped: its etcd goes on as raft's leader. The lease passes on, and
    afterwards one manager leads. That one is not raft's leader, and hands over all the same when it
    is demoted.
    """
    leader = cluster.leader()
    other = other_than(cluster, leader)
    before = steady(cluster, other, 3)
    pid = leader.manager_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        rest = [node for node in cluster.nodes if node is not leader]
        until("another one leads", lambda: cluster.leader(rest) is not leader, 30)
        other.update_service("steady", lambda spec: spec["Mode"]["Replicated"].update(Replicas=5))
        other.until_running("steady", 5)
        new = cluster.leader(rest)
    finally:
        os.kill(pid, signal.SIGCONT)
    time.sleep(3)  # the old leader would write again, or take the lead
    assert cluster.leader() is new
    other.until_running("steady", 5)
    assert before <= pids(cluster)
    removed(cluster, "steady")
    leader.update_node(new.node_id, Role="worker")
    until("it manages no more", lambda: not new.swarm_info()["ControlAvailable"], 30)
    until("two managers are left", lambda: managers_up(leader) == 2, 30)
    leader.update_node(new.node_id, Role="manager")


@pytest.mark.nightly
def test_a_leader_and_its_etcd_are_stopped(cluster: Cluster) -> None:
    leader = cluster.leader()
    other = other_than(cluster, leader)
    pids_stopped = [leader.manager_pid(), leader.etcd_pid()]
    for pid in pids_stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        created_within(other, "after", 30)
        other.until_running("after", 1)
        time.sleep(6)  # longer than the lease of the leader's key
    finally:
        for pid in pids_stopped:
            os.kill(pid, signal.SIGCONT)
    other.until_running("after", 1)
    removed(cluster, "after")


def test_the_leaders_link_is_down(cluster: Cluster) -> None:
    """The majority goes on; the minority reads with a warning, and refuses writes."""
    leader = cluster.leader()
    other = other_than(cluster, leader)
    before = steady(cluster, other, 3)
    leader.unplug()
    try:
        created_within(other, "after", 30)
        answer = leader.request("GET", f"/v{VERSION}/services", timeout=30)
        assert answer.status == 200 and b"steady" in answer.body
        assert "110" in answer.headers.get("warning", ""), answer.headers
        spec = {"Name": "never", "TaskTemplate": {"ContainerSpec": {"Image": "busybox"}}}
        refused = leader.request("POST", f"/v{VERSION}/services/create", spec, timeout=40)
        assert refused.status == 500 and b"context deadline exceeded" in refused.body
        assert b"1 of 3 managers reachable" in refused.body
        assert leader.swarm_info()["Error"]
        assert before <= pids(cluster), "all containers run on meanwhile"
    finally:
        leader.plug()
    until("it is back", lambda: managers_up(leader) == 3, 60)
    assert all(service["Spec"]["Name"] != "never" for service in leader.ask("GET", "/services"))
    other.until_running("steady", 3)
    removed(cluster, "steady", "after")


def test_etcd_of_one_manager_cannot_run(cluster: Cluster) -> None:
    """As on a full disk. It says why, and what is true of the others, which go on."""
    victim = cluster.leader()
    other = other_than(cluster, victim)
    data = victim.root / "swarm" / "etcd"
    data.rename(data.with_name("aside"))
    data.write_text("no directory")
    try:
        kill_and_wait(victim.etcd_pid())
        until("it says why", lambda: "not a directory" in victim.swarm_info()["Error"], 30)
        assert not victim.swarm_info()["ControlAvailable"]
        created_within(other, "after", 30)
        answer = victim.request("GET", f"/v{VERSION}/nodes", timeout=30)
        assert answer.status == 200 and "not a directory" in answer.headers["warning"]
        statuses = [each["ManagerStatus"] for each in json.loads(answer.body)]
        assert [(each.get("Leader", False), each["Reachability"]) for each in statuses] == [(False, "unknown")] * 3
        spec = {"Name": "never", "TaskTemplate": {"ContainerSpec": {"Image": "busybox"}}}
        refused = victim.request("POST", f"/v{VERSION}/services/create", spec, timeout=40)
        assert refused.status == 500 and b"not a directory" in refused.body
        assert b"2 of 3 managers reachable" in refused.body
    finally:
        data.unlink()
        data.with_name("aside").rename(data)
    until("it controls again", lambda: victim.swarm_info()["ControlAvailable"], 60)
    assert victim.swarm_info()["Error"] == ""
    removed(cluster, "after")


def test_everything_is_killed(cluster: Cluster) -> None:
    """All managers die at once. Each is started again."""
    last = cluster[2]
    steady(cluster, last, 6)
    for node in cluster.nodes:
        kill_and_wait(node.manager_pid())
    until("the swarm is back", lambda: all(managers_up(node) == 3 for node in cluster.nodes), 60)
    last.until_running("steady", 6)
    removed(cluster, "steady")
