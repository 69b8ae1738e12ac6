"""Real engines join and leave swarms, and their roles change: replies to clients, recovery of a
daemon or manager that is killed in the middle, and no process or file left afterwards.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.engine.harness import kill_and_wait, until
from tests.support.nightly import nightly
from tests.support.swarm.clusters import Cluster, Node
from tests.support.swarm.networks import published

OUTSIDE, WORKER, MANAGER = ("inactive", False), ("active", False), ("active", True)
INIT = {"ListenAddr": "0.0.0.0:2377"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(3) as made:
        yield made


@pytest.fixture
def hosts(cluster: Cluster) -> Iterator[list[Node]]:
    """Three engines outside of any swarm."""
    yield cluster.nodes
    cluster.heal()
    for node in reversed(cluster.nodes):
        if node.process is None:
            node.start()
        until(f"{node.address} has left", lambda node=node: left(node))  # type: ignore[misc]
        nothing_left(node)


def left(node: Node) -> bool:
    if node.swarm_info()["LocalNodeState"] != "inactive":
        node.request("POST", "/v1.44/swarm/leave?force=1", timeout=60)
    return standing(node) == OUTSIDE


def standing(node: Node) -> tuple[str, bool]:
    info = node.swarm_info()
    return info["LocalNodeState"], info["ControlAvailable"]


def becomes(node: Node, *wanted: tuple[str, bool]) -> tuple[str, bool]:
    """Wait until the node is one of these."""

    def found() -> tuple[str, bool] | None:
        now = standing(node)
        return now if now in wanted else None

    try:
        result: tuple[str, bool] = until(f"{node.address} is {wanted}", found, 60)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{node.swarm_info()}\n{node.log()[-4000:]}") from None
    return result


def nothing_left(node: Node) -> None:
    """No process and no file of a swarm is on this host."""
    assert not node._running("engine.manager") and not node._running("etcd")
    for place in (node.root / "swarm", node.run / "swarm"):
        assert not place.exists() or not list(place.iterdir()), list(place.iterdir())
    assert not node.task_containers()


def refused(node: Node, status: int, words: str, path: str, body: Any = None, **more: Any) -> None:
    answer = node.request("POST", f"/v1.44{path}", body, timeout=60, **more)
    assert (answer.status, words in answer.body.decode()) == (status, True), answer


def role_and_state(node: Node, of: Node) -> tuple[str, str, str]:
    """Role, state and reachability of the node `of`, as `node` lists it."""
    entry = node.nodes()[of.node_id]
    return (
        entry["Spec"]["Role"],
        entry["Status"]["State"],
        (entry.get("ManagerStatus") or {}).get("Reachability", ""),
    )


def test_init_and_leave(hosts: list[Node]) -> None:
    node = hosts[0]
    refused(node, 503, "not part of a swarm", "/swarm/leave?force=1")
    refused(node, 400, "ListenAddr", "/swarm/init", {})
    refused(node, 400, "eth7", "/swarm/init", {"ListenAddr": "eth7"})
    refused(node, 400, "10.77.0.99", "/swarm/init", {"ListenAddr": "10.77.0.99"})
    nothing_left(node)
    node_id = node.init()
    info = node.swarm_info()
    assert (info["NodeID"], info["NodeAddr"], info["Error"]) == (node_id, node.address, "")
    assert (info["Nodes"], info["Managers"]) == (1, 1)
    assert info["RemoteManagers"] == [{"NodeID": node_id, "Addr": f"{node.address}:2377"}]
    assert info["Cluster"]["ID"] and "JoinTokens" not in info["Cluster"]
    refused(node, 503, "already part of a swarm", "/swarm/init", INIT)
    refused(node, 503, "already part of a swarm", "/swarm/join", {})
    refused(node, 503, "Removing the last manager erases all current state", "/swarm/leave")
    node.service("web", replicas=2)
    node.until_running("web", 2)
    kept = node.create("sleep", "1000000")
    node.post(f"/containers/{kept}/start")
    node.leave(force=True)
    nothing_left(node)
    assert node.inspect(kept)["State"]["Running"]
    node.request("DELETE", f"/containers/{kept}?force=1")
    # behind NAT: networks use an address of this host all the same
    again = node.init(AdvertiseAddr="203.0.113.9")
    assert again != node_id and node.swarm_info()["NodeAddr"] == "203.0.113.9"
    node.service("published", EndpointSpec=published((8080, 80)))
    node.until_running("published", 1)


def test_join_and_leave(hosts: list[Node]) -> None:
    first, second, third = hosts
    first.init()
    second.join(first)
    third.join(first, manager=True)
    assert standing(second) == WORKER and standing(third) == MANAGER
    assert role_and_state(first, second) == ("worker", "ready", "")
    assert role_and_state(third, third) == ("manager", "ready", "reachable")
    refused(second, 503, "This node is not a swarm manager", "/services/create", {})
    refused(second, 503, "already part of a swarm", "/swarm/init", INIT)
    refused(third, 503, "managers out of", "/swarm/leave")
    first.service("web", replicas=None)
    until("a task on each", lambda: all(len(node.task_containers()) == 1 for node in hosts))
    second.leave()
    nothing_left(second)
    until("the worker is down", lambda: role_and_state(first, second) == ("worker", "down", ""))
    third.leave(force=True)
    nothing_left(third)
    until("the manager is down", lambda: role_and_state(first, third) == ("worker", "down", ""))
    for node in (second, third):
        first.ask("DELETE", f"/nodes/{node.node_id}")
    first.until_running("web", 1)
    assert first.swarm_info()["Managers"] == 1


def test_joins_that_are_refused(hosts: list[Node]) -> None:
    first, second, third = hosts
    first.init()
    third.init()
    token = first.tokens()["Worker"]
    to_first = {"ListenAddr": "0.0.0.0:2377", "RemoteAddrs": [first.address]}
    for bad in ("", "x", token[:-1], token[:-25] + "0" * 25):
        refused(second, 400, "join token is necessary", "/swarm/join", to_first | {"JoinToken": bad})
    other = third.tokens()["Worker"]
    refused(second, 400, "remote CA does not match fingerprint", "/swarm/join", to_first | {"JoinToken": other})
    refused(second, 400, "RemoteAddrs", "/swarm/join", {"ListenAddr": "0.0.0.0:2377", "JoinToken": token})
    nowhere = to_first | {"RemoteAddrs": [f"{first.address}:999"], "JoinToken": token}
    refused(second, 500, "refused", "/swarm/join", nowhere)
    until("it is outside again", lambda: standing(second) == OUTSIDE)
    nothing_left(second)
    assert len(first.nodes()) == 1
    second.join(first)


def test_a_join_goes_on_in_the_background(hosts: list[Node]) -> None:
    first, second, third = hosts
    first.init()
    first.drop_from(second, third)
    body = {
        "ListenAddr": "0.0.0.0:2377",
        "RemoteAddrs": [first.address],
        "JoinToken": first.tokens()["Worker"],
    }
    with ThreadPoolExecutor() as threads:
        cancelled = threads.submit(refused, third, 503, "left the swarm", "/swarm/join", body)
        late = threads.submit(refused, second, 500, "Timeout was reached before node was joined", "/swarm/join", body)
        until("it joins", lambda: standing(third) == ("pending", False))
        third.leave()
        cancelled.result()
        late.result()
    assert standing(second) == ("pending", False) and standing(third) == OUTSIDE
    refused(second, 503, "already part of a swarm", "/swarm/join", body)
    second.restart()
    assert standing(second) == ("pending", False)
    first.heal()
    becomes(second, WORKER)
    second.node_id = second.swarm_info()["NodeID"]
    until("it is ready", lambda: role_and_state(first, second) == ("worker", "ready", ""))


def test_promotion_and_demotion(hosts: list[Node]) -> None:
    first, second, third = hosts
    first.init()
    second.join(first)
    third.join(first, manager=True)
    second_tasks = "node.id==" + second.node_id
    first.service("web", template={"Placement": {"Constraints": [second_tasks]}}, replicas=2)
    tasks = {task["ID"] for task in first.until_running("web", 2)}
    for _ in range(2):
        first.update_node(second.node_id, Role="manager")
        becomes(second, MANAGER)
        until("it is reachable", lambda: role_and_state(first, second) == ("manager", "ready", "reachable"))
        assert second.swarm_info()["Managers"] == 3
        second.update_node(second.node_id, Role="worker")
        becomes(second, WORKER)
        until("it is a worker", lambda: role_and_state(first, second) == ("worker", "ready", ""))
        until("no member is left", lambda: not (second.root / "swarm" / "etcd").exists())
        assert not second._running("etcd") and not second._running("engine.manager")
    assert {task["ID"] for task in first.until_running("web", 2)} == tasks, "tasks were replaced"
    third.leave(force=True)
    now = first.ask("GET", f"/nodes/{first.node_id}")
    change = f"/nodes/{first.node_id}/update?version={now['Version']['Index']}"
    refused(first, 500, "last manager", change, now["Spec"] | {"Role": "worker"})


def test_a_removed_node(hosts: list[Node]) -> None:
    """A node that runs notices its removal, and so does a daemon that starts later."""
    first, second, third = hosts
    first.init()
    second.join(first)
    third.join(first)
    first.service("web", replicas=None)
    until("a task on each", lambda: all(len(node.task_containers()) == 1 for node in hosts))
    first.ask("DELETE", f"/nodes/{second.node_id}?force=1")
    third.kill9()
    first.ask("DELETE", f"/nodes/{third.node_id}?force=1")
    third.start()
    for node in (second, third):
        until("its removal is reported", lambda node=node: node.swarm_info()["LocalNodeState"] == "error")  # type: ignore[misc]
        assert "removed" in node.swarm_info()["Error"]
        until("its tasks have ended", lambda node=node: not node.task_containers())  # type: ignore[misc]
        node.leave()
        node.join(first)
    until("a task on each again", lambda: all(len(node.task_containers()) == 1 for node in hosts))


@pytest.mark.nightly
def test_a_new_cluster_by_force(hosts: list[Node]) -> None:
    """Quorum is lost for good: one manager goes on alone, with services, tasks and tokens."""
    first, second, third = hosts
    first.init()
    second.join(first, manager=True)
    third.join(first)
    refused(third, 503, "not a swarm manager", "/swarm/init", INIT | {"ForceNewCluster": True})
    first.service("web", template={"Placement": {"Constraints": ["node.id==" + third.node_id]}})
    (task,) = first.until_running("web", 1)
    tokens = first.tokens()
    second.unplug()
    kill_and_wait(second.manager_pid())
    body = INIT | {"AdvertiseAddr": first.address, "ForceNewCluster": True}
    assert first.ask("POST", "/swarm/init", body, timeout=60) == first.node_id
    assert first.tokens() == tokens
    assert first.swarm_info()["Managers"] == 1
    until("the worker is back", lambda: role_and_state(first, third) == ("worker", "ready", ""), 60)
    assert first.until_running("web", 1)[0]["ID"] == task["ID"]
    assert len(third.task_containers()) == 1
    second.plug()
    # The new swarm has made the other manager a worker.
    becomes(second, WORKER)
    until("it is back", lambda: role_and_state(first, second) == ("worker", "ready", ""), 60)
    until("its member is gone", lambda: not (second.root / "swarm" / "etcd").exists())


@pytest.mark.parametrize("role", [*nightly("worker"), "manager", *nightly("only manager")])
def test_engined_stop(role: str, hosts: list[Node]) -> None:
    first, second, _ = hosts
    first.init()
    node = first
    if role != "only manager":
        second.join(first, manager=role == "manager")
        node = second
    first.service("web", replicas=None)
    until("a task on it", lambda: len(node.task_containers()) == 1)
    node.stop()
    node.assert_gone()
    assert (node.root / "swarm" / "state.json").exists()
    node.start()
    becomes(node, WORKER if role == "worker" else MANAGER)
    until("its task runs again", lambda: len(node.task_containers()) == 1, 60)


def test_engined_stop_without_a_daemon(hosts: list[Node]) -> None:
    node = hosts[0]
    node.init()
    node.service("web")
    node.until_running("web", 1)
    node.kill9()
    node.stop()
    node.assert_gone()
    node.start()
    becomes(node, MANAGER)
    node.until_running("web", 1)


def test_an_upgrade_of_the_daemon(hosts: list[Node]) -> None:
    """Manager and tasks outlive daemons that end or are killed."""
    node = hosts[0]
    node.init()
    node.service("web", replicas=2)
    node.until_running("web", 2)
    pids = {entry["Id"]: node.inspect(entry["Id"])["State"]["Pid"] for entry in node.task_containers().values()}
    manager, etcd = node.manager_pid(), node.etcd_pid()
    for end in (node.terminate, node.kill9):
        end()
        node.start()
        becomes(node, MANAGER)
        node.until_running("web", 2)
        assert (node.manager_pid(), node.etcd_pid()) == (manager, etcd)
        assert {each: node.inspect(each)["State"]["Pid"] for each in pids} == pids


# --- kill -9 --------------------------------------------------------------------------------------

KILLS = [*nightly("daemon", "manager"), "daemon, manager"]


def interrupted(node: Node, what: str, seconds: float, verb: Callable[[], object]) -> None:
    """Begin a verb, and kill processes of its node `seconds` later."""

    def attempt() -> None:
        # the daemon is dead, or reports that the manager's process has ended
        with contextlib.suppress(AssertionError, OSError):
            verb()

    trying = threading.Thread(target=attempt)
    trying.start()
    time.sleep(seconds)  # the verb is under way
    kill(node, what)
    trying.join(90)


def kill(node: Node, what: str) -> None:
    if "manager" in what:
        for pid in node._running("engine.manager"):
            kill_and_wait(pid)
    if "daemon" in what:
        node.restart()


@pytest.mark.parametrize("what", KILLS)
def test_killed_in_init_and_leave(what: str, hosts: list[Node]) -> None:
    """The verb is carried out, or succeeds when it is repeated."""
    node = hosts[0]
    for seconds in (0.1, 0.6):
        interrupted(node, what, seconds, node.init)
        if becomes(node, OUTSIDE, MANAGER) == OUTSIDE:
            nothing_left(node)
            node.init()
        interrupted(node, what, seconds / 10, lambda: node.leave(force=True))
        if becomes(node, OUTSIDE, MANAGER) == MANAGER:
            node.leave(force=True)
        nothing_left(node)


@pytest.mark.parametrize("what", KILLS)
def test_killed_in_join_and_leave(what: str, hosts: list[Node]) -> None:
    first, second, _ = hosts
    first.init()
    for manager, seconds in ((False, 0.3), (True, 0.9)):
        role = MANAGER if manager else WORKER
        interrupted(second, what, seconds, lambda manager=manager: second.join(first, manager=manager))  # type: ignore[misc]
        if becomes(second, OUTSIDE, role) == OUTSIDE:
            second.join(first, manager=manager)
        second.node_id = second.swarm_info()["NodeID"]
        until("it is ready", lambda: role_and_state(first, second)[1] == "ready", 60)
        interrupted(second, what, seconds / 10, lambda: second.leave(force=True))
        if becomes(second, OUTSIDE, role) == role:
            second.leave(force=True)
        nothing_left(second)
        until("it is down", lambda: role_and_state(first, second) == ("worker", "down", ""), 60)
        first.ask("DELETE", f"/nodes/{second.node_id}")
    assert len(first.nodes()) == 1, "a node was left by a join that was cut"


@pytest.mark.parametrize("what", KILLS)
def test_killed_in_promotion_and_demotion(what: str, hosts: list[Node]) -> None:
    first, second, third = hosts
    first.init()
    third.join(first, manager=True)
    second.join(first)
    for seconds in (0.2, 0.8):
        first.update_node(second.node_id, Role="manager")
        time.sleep(seconds)  # the promotion is under way
        kill(second, what)
        becomes(second, MANAGER)
        until("it is reachable", lambda: role_and_state(first, second) == ("manager", "ready", "reachable"), 60)
        first.update_node(second.node_id, Role="worker")
        time.sleep(seconds / 2)  # the demotion is under way
        kill(second, what)
        becomes(second, WORKER)
        until("it is a worker", lambda: role_and_state(first, second) == ("worker", "ready", ""), 60)
        until("no member is left", lambda: not (second.root / "swarm" / "etcd").exists())
    assert first.swarm_info()["Managers"] == 2
    # removed at once: its member goes first, so that the last manager keeps its quorum
    first.update_node(third.node_id, Role="worker")
    first.ask("DELETE", f"/nodes/{third.node_id}?force=1")
    assert first.swarm_info()["Managers"] == 1 and len(first.nodes()) == 2
