"""Nodes that die, are cut off, sleep and come back, and the logs of their tasks: five real engines
on hosts of their own.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support import PATIENCE
from tests.support.engine import client
from tests.support.engine.harness import alive, until
from tests.support.nightly import nightly
from tests.support.swarm.clusters import VERSION, Cluster, Node

MANAGERS = 3
PERIOD = 1.0 + PATIENCE
"""Seconds between beats. A node is down after three of them."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three managers and two workers."""
    with Cluster(5) as made:
        first = made.form(MANAGERS)
        set_period(first, PERIOD)
        yield made


@pytest.fixture(autouse=True)
def _clean(cluster: Cluster) -> Iterator[None]:
    """Every test begins with five nodes in order, and leaves no service behind."""
    until_ready(cluster)
    yield
    cluster.heal()
    for node in cluster.nodes:
        node.plug()
        if node.process is None:
            node.start()
    until_ready(cluster)
    first = cluster[0]
    for service in first.ask("GET", "/services"):
        first.ask("DELETE", f"/services/{service['ID']}", timeout=60)
    until("no task is left", lambda: not any(node.task_containers() for node in cluster.nodes), 60)
    until("no record is left", lambda: not first.tasks(desired=""), 60)


def set_period(node: Node, seconds: float) -> None:
    swarm = node.ask("GET", "/swarm")
    swarm["Spec"]["Dispatcher"] = {"HeartbeatPeriod": int(seconds * 1e9)}
    node.ask("POST", f"/swarm/update?version={swarm['Version']['Index']}", swarm["Spec"])


def states(at: Node) -> dict[str, str]:
    return {id: node["Status"]["State"] for id, node in at.nodes().items()}


def until_ready(cluster: Cluster, seconds: float = 60.0) -> None:
    def ready() -> bool:
        with contextlib.suppress(AssertionError, OSError):
            return list(states(cluster[0]).values()) == ["ready"] * len(cluster.nodes)
        return False

    try:
        until("all nodes are ready", ready, seconds)
    except AssertionError as error:
        seen = cluster[0].request("GET", f"/v{VERSION}/nodes").body
        raise AssertionError(f"{error}\n{seen!r}\n{cluster[0].log()[-3000:]}") from None


def until_state(at: Node, node: Node, state: str, seconds: float = 30.0) -> float:
    """Wait for the state of a node, and return how long it took."""
    began = time.monotonic()
    until(f"{node.node_id} is {state}", lambda: states(at)[node.node_id] == state, seconds)
    return time.monotonic() - began


def pids(cluster: Cluster) -> dict[str, int]:
    """The process of every task's container, by the task."""
    return {
        task: node.inspect(entry["Id"])["State"]["Pid"]
        for node in cluster.nodes
        if node.process is not None
        for task, entry in node.task_containers().items()
    }


def settled(at: Node, cluster: Cluster, service: str, count: int, seconds: float = 60.0) -> list[Any]:
    """Wait until `count` tasks run, and exactly their containers do. Returns the tasks."""

    def same() -> list[Any] | None:
        tasks = at.tasks(service)
        if len(tasks) != count or any(task["Status"]["State"] != "running" for task in tasks):
            return None
        containers = {task for node in cluster.nodes if node.process is not None for task in node.task_containers()}
        return tasks if containers == {task["ID"] for task in tasks} else None

    try:
        return list(until(f"{count} tasks of {service} run, and nothing else", same, seconds))
    except AssertionError as error:
        seen = [
            (task["ID"][:6], task["DesiredState"], task["Status"]["State"], task["Status"].get("Err"))
            for task in at.tasks(service, desired="")
        ]
        held = {node.address: [task[:6] for task in node.task_containers()] for node in cluster.nodes}
        raise AssertionError(f"{error}\n{seen}\n{held}\n{states(at)}") from None


@contextlib.contextmanager
def untouched(at: Node, cluster: Cluster) -> Iterator[dict[str, int]]:
    """Create a service `web` of five tasks, which run in the same processes after the block.

    Yields these processes.
    """
    at.service("web", replicas=5)
    settled(at, cluster, "web", 5)
    processes = pids(cluster)
    yield processes
    settled(at, cluster, "web", 5)
    assert pids(cluster) == processes, "a task was replaced"


def of_node(tasks: list[Any], node: Node) -> list[str]:
    return [task["ID"] for task in tasks if task["NodeID"] == node.node_id]


class Flapping:
    """Counts what happens to nodes while the block runs: how often each went down."""

    def __init__(self, at: Node) -> None:
        self.at = at
        self.downs: dict[str, int] = {}
        self._ended = threading.Event()

    def __enter__(self) -> Flapping:
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        before: dict[str, str] = {}
        while not self._ended.wait(0.2):
            with contextlib.suppress(AssertionError, OSError, TypeError):
                now = states(self.at)
                for node, state in now.items():
                    if state == "down" and before.get(node) != "down":
                        self.downs[node] = self.downs.get(node, 0) + 1
                before = now

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


# --- workers away ---------------------------------------------------------------------------------


def test_a_worker_away_for_a_moment_keeps_its_tasks(cluster: Cluster) -> None:
    first, worker = cluster[0], cluster[3]
    with untouched(first, cluster):
        worker.unplug()
        time.sleep(PERIOD)  # a beat is lost, and the node is not down yet
        worker.plug()
        time.sleep(4 * PERIOD)  # without further beats it would be down
        assert states(first)[worker.node_id] == "ready"


def test_a_worker_away_for_long_loses_its_tasks_and_ends_them_when_it_is_back(cluster: Cluster) -> None:
    first, worker = cluster[0], cluster[3]
    first.service("web", replicas=5)
    before = settled(first, cluster, "web", 5)
    lost = of_node(before, worker)
    assert lost
    began = time.monotonic()
    worker.unplug()
    until_state(first, worker, "down")
    assert time.monotonic() - began > 1.7 * PERIOD  # its last beat was up to a period before
    message = first.nodes()[worker.node_id]["Status"]["Message"]
    assert "heartbeat failure" in message
    until(
        "the tasks run elsewhere",
        lambda: len(found := first.running("web")) == 5 and not of_node(found, worker),
    )
    assert set(worker.task_containers()) == set(lost), "without managers they run on"
    worker.plug()
    until_state(first, worker, "ready")
    after = settled(first, cluster, "web", 5)
    assert not of_node(after, worker)
    kept = {task["ID"] for task in before} - set(lost)
    assert kept <= {task["ID"] for task in after}

    def ended(task: str) -> bool:
        return first.ask("GET", f"/tasks/{task}")["Status"]["State"] in ("shutdown", "failed", "complete")

    until("the ends of the old tasks are known", lambda: all(map(ended, lost)))


def test_a_node_that_is_down_can_be_removed_and_does_not_come_back(cluster: Cluster) -> None:
    first, worker = cluster[0], cluster[4]
    first.service("web", replicas=5)
    settled(first, cluster, "web", 5)
    old = worker.node_id
    answer = first.request("DELETE", f"/v{VERSION}/nodes/{old}")
    assert answer.status == 500
    assert b"is not down and can't be removed" in answer.body
    worker.unplug()
    until_state(first, worker, "down")
    first.ask("DELETE", f"/nodes/{old}")
    assert old not in first.nodes()
    worker.plug()
    until("it knows that it was removed", lambda: worker.swarm_info()["LocalNodeState"] in ("error", "inactive"))
    until("its tasks have ended", lambda: not worker.task_containers())
    worker.leave(force=True)
    worker.join(first)
    assert worker.node_id != old
    until_ready(cluster)
    settled(first, cluster, "web", 5)


def test_a_worker_that_leaves_is_down_at_once(cluster: Cluster) -> None:
    first, worker = cluster[0], cluster[4]
    first.service("web", replicas=5)
    settled(first, cluster, "web", 5)
    old = worker.node_id
    worker.leave()
    assert states(first)[old] == "down"
    assert not worker.task_containers()
    first.ask("DELETE", f"/nodes/{old}")
    worker.join(first)
    until_ready(cluster)
    settled(first, cluster, "web", 5)


# --- availability ---------------------------------------------------------------------------------


def test_drain_moves_tasks_at_once_and_pause_keeps_them(cluster: Cluster) -> None:
    first, worker = cluster[0], cluster[3]
    first.service("web", replicas=5)
    first.service("all", replicas=None)
    before = first.until_running("web", 5)
    first.until_running("all", 5)
    first.update_node(worker.node_id, Availability="pause")
    first.update_service("web", lambda spec: spec["Mode"]["Replicated"].update(Replicas=9))
    after = first.until_running("web", 9)
    assert of_node(after, worker) == of_node(before, worker)
    first.until_running("all", 5)
    first.update_node(worker.node_id, Availability="drain")
    until("the node is empty", lambda: not worker.task_containers(), 20)
    assert not of_node(first.until_running("web", 9), worker)
    first.until_running("all", 4)
    first.update_node(worker.node_id, Availability="active")
    first.until_running("all", 5)


# --- deaths of processes --------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, *nightly(3)], ids=["manager", "worker"])
def test_the_death_of_a_daemon_touches_no_task(cluster: Cluster, number: int) -> None:
    first, node = cluster[1], cluster[number]
    with untouched(first, cluster):
        node.kill9()
        node.start()  # at once: the node is down three beats after its last one
        until_ready(cluster)


@pytest.mark.parametrize("number", [*nightly(0), 3], ids=["manager", "worker"])
def test_the_death_of_a_monitor_touches_no_task(cluster: Cluster, number: int) -> None:
    first, node = cluster[1], cluster[number]
    with untouched(first, cluster):
        node.replace_monitor()
        time.sleep(PERIOD)  # a task that has failed would be replaced


@pytest.mark.nightly
@pytest.mark.parametrize("number", [0, 3], ids=["manager", "worker"])
def test_the_death_of_daemon_and_monitor_replaces_each_task_once_at_most(cluster: Cluster, number: int) -> None:
    first, node = cluster[1], cluster[number]
    first.service("web", replicas=5, template={"RestartPolicy": {"Condition": "any", "Delay": 0}})
    before = settled(first, cluster, "web", 5)
    there = of_node(before, node)
    node.kill9()
    node.kill_monitor()
    node.start()
    until_ready(cluster)
    after = settled(first, cluster, "web", 5)
    kept = {task["ID"] for task in before} - set(there)
    assert kept <= {task["ID"] for task in after}
    assert len(first.tasks("web", desired="")) <= 5 + len(there)


@pytest.mark.nightly
def test_a_daemon_that_is_away_for_long_ends_what_was_moved(cluster: Cluster) -> None:
    first, node = cluster[0], cluster[3]
    first.service("web", replicas=5)
    lost = of_node(settled(first, cluster, "web", 5), node)
    processes = [pid for task, pid in pids(cluster).items() if task in lost]
    node.kill9()
    until_state(first, node, "down")
    until("the tasks run elsewhere", lambda: len(first.running("web")) == 5)
    assert all(map(alive, processes)), "the monitor keeps them"
    node.start()
    until_ready(cluster)
    settled(first, cluster, "web", 5)
    until("the old processes have ended", lambda: not any(map(alive, processes)))


def test_all_die_and_come_back(cluster: Cluster) -> None:
    first = cluster[0]
    first.service("web", replicas=5, template={"RestartPolicy": {"Condition": "any", "Delay": 0}})
    settled(first, cluster, "web", 5)
    for node in cluster.nodes:
        node.power_off()
    began = time.monotonic()
    for node in cluster.nodes:
        node.start()
    until_ready(cluster)
    settled(first, cluster, "web", 5)
    took = time.monotonic() - began
    assert took < 30 * PATIENCE, took
    print(f"everything off and on: {took:.1f} s")


# --- bad networks ---------------------------------------------------------------------------------


@pytest.mark.nightly
def test_lost_packets_down_no_node(cluster: Cluster) -> None:
    first, worker = cluster[0], cluster[3]
    first.service("web", replicas=5)
    before = settled(first, cluster, "web", 5)
    with Flapping(first) as seen:
        worker.drop_from(*cluster.nodes[:MANAGERS], share=0.2)
        for node in cluster.nodes[:MANAGERS]:
            node.drop_from(worker, share=0.2)
        time.sleep(8 * PERIOD)
        cluster.heal()
    assert max(seen.downs.values(), default=0) <= 1
    until_ready(cluster)
    after = settled(first, cluster, "web", 5)
    if not seen.downs:
        assert {task["ID"] for task in after} == {task["ID"] for task in before}


@pytest.mark.nightly
@pytest.mark.parametrize("direction", ["from the worker", "to the worker"])
def test_packets_of_one_direction_alone_down_a_node_once(cluster: Cluster, direction: str) -> None:
    first, worker = cluster[0], cluster[3]
    first.service("web", replicas=5)
    settled(first, cluster, "web", 5)
    with Flapping(first) as seen:
        if direction == "to the worker":
            worker.drop_from(*cluster.nodes[:MANAGERS])
        else:
            for node in cluster.nodes[:MANAGERS]:
                node.drop_from(worker)
        until_state(first, worker, "down")
        time.sleep(2 * PERIOD)  # a session that began meanwhile would make it ready
        assert states(first)[worker.node_id] == "down"
        cluster.heal()
        until_state(first, worker, "ready")
        time.sleep(2 * PERIOD)  # a second change to down would be counted
    assert seen.downs == {worker.node_id: 1}
    settled(first, cluster, "web", 5)


@pytest.mark.nightly
def test_a_worker_that_cannot_reach_its_manager_goes_to_another(cluster: Cluster) -> None:
    first, worker = cluster[0], cluster[3]
    first.service("web", replicas=5)
    before = settled(first, cluster, "web", 5)
    running = pids(cluster)
    with Flapping(first) as seen:
        for manager in cluster.nodes[:MANAGERS]:
            cluster.cut([worker], [manager])
            time.sleep(3.5 * PERIOD)
            cluster.heal()
    assert seen.downs.get(worker.node_id, 0) <= 1
    until_ready(cluster)
    after = settled(first, cluster, "web", 5)
    if not seen.downs:
        assert {task["ID"] for task in after} == {task["ID"] for task in before}
        assert pids(cluster) == running


# --- managers -------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_the_deaths_of_managers_in_turn_touch_no_task(cluster: Cluster) -> None:
    first = cluster[0]
    with untouched(first, cluster), Flapping(first) as seen:
        for node in cluster.nodes[:MANAGERS]:
            node.kill_manager()
            time.sleep(PERIOD)  # the nodes are listed as ready until they miss beats
            until_ready(cluster)
    assert not seen.downs


@pytest.mark.nightly
def test_a_leader_that_sleeps_loses_its_agents_and_no_task(cluster: Cluster) -> None:
    leader = cluster.leader()
    at = next(node for node in cluster.nodes[:MANAGERS] if node is not leader)
    with untouched(at, cluster), Flapping(at) as seen:
        leader.freeze_manager(10)
        until_ready(cluster)
        time.sleep(2 * PERIOD)  # a late change to down would be counted
    assert not seen.downs


def test_without_quorum_tasks_run_on(cluster: Cluster) -> None:
    first = cluster[0]
    with untouched(first, cluster) as processes, Flapping(first) as seen:
        for node in cluster.nodes[1:MANAGERS]:
            node.unplug()
        time.sleep(8 * PERIOD)  # with quorum, silent nodes would be down after three
        assert pids(cluster) == processes
        for node in cluster.nodes[1:MANAGERS]:
            node.plug()
        until_ready(cluster)
        time.sleep(PERIOD)  # a late change to down would be counted
    assert not seen.downs


# --- logs -----------------------------------------------------------------------------------------


def frames(body: bytes) -> list[tuple[int, str]]:
    """The lines of a stream with frames, with their streams."""
    found = []
    while body:
        stream, size = struct.unpack(">BxxxL", body[:8])
        found.append((stream, body[8 : 8 + size].decode().rstrip("\n")))
        body = body[8 + size :]
    return found


def logs(node: Node, path: str, query: str = "stdout=1&stderr=1", **more: Any) -> list[tuple[int, str]]:
    answer = node.request("GET", f"/v{VERSION}{path}/logs?{query}", timeout=30, **more)
    assert answer.status == 200, answer
    return frames(answer.body)


ECHO = 'for n in 1 2 3; do echo "out $n"; echo "err $n" >&2; done; exec sleep 100000'


def test_logs_of_a_service_at_every_manager(cluster: Cluster) -> None:
    first = cluster[0]
    first.service("web", "sh", "-c", ECHO, replicas=5)
    tasks = settled(first, cluster, "web", 5)
    expected = sorted([(1, f"out {n}") for n in (1, 2, 3)] * 5 + [(2, f"err {n}") for n in (1, 2, 3)] * 5)

    def complete(node: Node) -> Callable[[], bool]:
        return lambda: sorted(logs(node, "/services/web")) == expected

    for node in cluster.nodes[:MANAGERS]:
        until("all lines are there", complete(node), 10)
    assert set(logs(first, "/services/web", "stdout=1")) == {(1, f"out {n}") for n in (1, 2, 3)}
    assert sorted(logs(first, "/services/web", "stderr=1&tail=6")) == sorted((2, f"err {n}") for n in (1, 2, 3) * 5)
    assert len(logs(first, "/services/web", "stdout=1&stderr=1&tail=2")) == 10
    for task in tasks:
        lines = logs(first, f"/tasks/{task['ID']}", "stdout=1&details=1")
        assert [text.rpartition(" ")[2] for _, text in lines] == ["1", "2", "3"]
        assert all(f"com.docker.swarm.task.id={task['ID']}" in text for _, text in lines)
        assert all(f"com.docker.swarm.node.id={task['NodeID']}" in text for _, text in lines)
    since = time.time() + 100
    assert logs(first, "/services/web", f"stdout=1&since={since}") == []


def test_following_logs_shows_new_tasks_and_ends_with_the_service(cluster: Cluster) -> None:
    first = cluster[1]
    command = 'echo "begin $HOSTNAME"; trap "echo end; exit 0" TERM; while :; do sleep 0.1; done'
    first.service("web", "sh", "-c", command, replicas=2, container={"StopGracePeriod": 5_000_000_000})
    settled(first, cluster, "web", 2)
    got = bytearray()
    ended = threading.Event()

    def follow() -> None:
        for chunk in client.stream(first.socket, f"/v{VERSION}/services/web/logs?stdout=1&follow=1"):
            got.extend(chunk)
        ended.set()

    thread = threading.Thread(target=follow)
    thread.start()

    def count(word: bytes) -> int:
        return bytes(got).count(word)

    until("the lines of both", lambda: count(b"begin") == 2)
    first.update_service("web", lambda spec: spec["Mode"]["Replicated"].update(Replicas=5))
    until("the lines of five", lambda: count(b"begin") == 5)
    first.update_service("web", lambda spec: spec["Mode"]["Replicated"].update(Replicas=1))
    until("the ends of four", lambda: count(b"end") == 4)
    first.ask("DELETE", "/services/web")
    until("the end of the last", lambda: count(b"end") == 5)
    assert ended.wait(20 * PATIENCE)
    thread.join()


def test_logs_without_one_node_name_it_last(cluster: Cluster) -> None:
    first, worker = cluster[0], cluster[3]
    first.service("web", "sh", "-c", ECHO, replicas=5)
    lost = of_node(settled(first, cluster, "web", 5), worker)
    assert lost
    worker.unplug()
    until_state(first, worker, "down")
    lines = logs(first, "/services/web", "stdout=1")
    assert lines[-1][0] == 3
    assert "incomplete log stream" in lines[-1][1]
    assert {stream for stream, _ in lines[:-1]} == {1}


@pytest.mark.nightly
def test_a_follower_that_does_not_read_holds_up_nothing(cluster: Cluster) -> None:
    first = cluster[0]
    first.service("noise", "sh", "-c", "while :; do head -c 4000 /dev/zero | tr '\\0' x; echo; done", replicas=3)
    settled(first, cluster, "noise", 3)
    chunks = client.stream(first.socket, f"/v{VERSION}/services/noise/logs?stdout=1&follow=1")
    assert next(chunks)
    before = memory(first.manager_pid())
    with Flapping(first) as seen:
        time.sleep(5 * PERIOD)
        assert memory(first.manager_pid()) - before < 60 << 20
        assert set(states(first).values()) == {"ready"}
    assert not seen.downs
    chunks.close()


def memory(pid: int) -> int:
    with open(f"/proc/{pid}/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
