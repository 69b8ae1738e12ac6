"""Random faults on five real engines. After the last one, each slot has one running task, and each
container its task. The seed of a run is printed; SWARM_FAULTS_SECONDS makes it longer.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from engine.swarm_session.states import TASK_STATES, TaskState
from tests.support.engine.harness import until
from tests.support.swarm.clusters import Cluster, Node

pytestmark = pytest.mark.nightly

MANAGERS, NODES = 3, 5
SECONDS = float(os.environ.get("SWARM_FAULTS_SECONDS", "12"))
SECOND = 1_000_000_000


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(NODES) as made:
        first = made.form(MANAGERS)
        swarm = first.ask("GET", "/swarm")
        swarm["Spec"]["Dispatcher"] = {"HeartbeatPeriod": 2 * SECOND}
        first.ask("POST", f"/swarm/update?version={swarm['Version']['Index']}", swarm["Spec"])
        yield made


class Chaos:
    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster = cluster
        self.dice = random.Random(seed)
        self.services: dict[str, int] = {}
        """Replicas by id; -1 for global ones."""
        self.unplugged: Node | None = None
        self.events: list[str] = []
        self._version = 0

    def manager(self) -> Node:
        """Any manager whose link is up."""
        return self.dice.choice([node for node in self.cluster.nodes[:MANAGERS] if node is not self.unplugged])

    def something(self) -> None:
        weights = {
            self.scale: 4, self.update: 4, self.kill_container: 4, self.kill_manager: 2, self.kill_daemon: 2,
            self.drain: 2, self.unplug: 1, self.plug: 2,
        }  # fmt: skip
        (event,) = self.dice.choices(list(weights), list(weights.values()))
        self.events.append(event.__name__)
        # an election runs, or this manager has just been killed
        with contextlib.suppress(AssertionError, OSError):
            event()

    def scale(self) -> None:
        service = self.dice.choice([key for key, count in self.services.items() if count >= 0])
        count = self.dice.randrange(1, 9)
        node = self.manager()
        node.update_service(service, lambda spec: spec.update(Mode={"Replicated": {"Replicas": count}}))
        self.services[service] = count

    def update(self) -> None:
        self._version += 1
        config = {
            "Parallelism": self.dice.choice([0, 1, 2]),
            "Monitor": SECOND // 2,
            "FailureAction": "continue",
            "Order": self.dice.choice(["stop-first", "start-first"]),
        }

        def change(spec: Any) -> None:
            spec["TaskTemplate"]["ContainerSpec"]["Env"] = [f"V={self._version}"]
            spec["UpdateConfig"] = config

        self.manager().update_service(self.dice.choice(list(self.services)), change)

    def kill_container(self) -> None:
        node = self.dice.choice(self.cluster.nodes)
        containers = node.task_containers()
        if containers:
            node.ask("POST", f"/containers/{self.dice.choice(list(containers.values()))['Id']}/kill")

    def kill_manager(self) -> None:
        self.manager().kill_manager()

    def kill_daemon(self) -> None:
        node = self.dice.choice(self.cluster.nodes)
        node.kill9()
        node.start()

    def drain(self) -> None:
        node = self.manager()
        target = self.dice.choice(self.cluster.nodes)
        node.update_node(target.node_id, Availability=self.dice.choice(["drain", "active", "active", "pause"]))

    def unplug(self) -> None:
        if self.unplugged is None:
            self.unplugged = self.dice.choice(self.cluster.nodes)
            self.unplugged.unplug()

    def plug(self) -> None:
        if self.unplugged is not None:
            self.unplugged.plug()
            self.unplugged = None

    def heal(self) -> None:
        self.plug()
        first = self.cluster[0]
        until("there is a leader", lambda: self.cluster.leader(self.cluster.nodes[:MANAGERS]), 60)
        for node in self.cluster.nodes:
            first.update_node(node.node_id, Availability="active")
        ready = lambda: all(each["Status"]["State"] == "ready" for each in first.nodes().values())  # noqa: E731
        until("all nodes are ready", ready, 60)
        # an API call that failed may have been carried out
        for service in first.ask("GET", "/services"):
            mode = service["Spec"]["Mode"].get("Replicated")
            self.services[service["ID"]] = -1 if mode is None else mode["Replicas"]


def check(cluster: Cluster, services: dict[str, int]) -> None:
    first = cluster[0]
    until("no update is left", lambda: states(first) <= {"", "completed"}, 90)
    for service, count in services.items():
        tasks = first.until_running(service, NODES if count < 0 else count, 120)
        places = [task["NodeID"] if count < 0 else task["Slot"] for task in tasks]
        assert len(set(places)) == len(places), places

    def surplus() -> set[tuple[str, str]]:
        """Containers without their task, and tasks without their container, with their nodes."""
        wanted = {(task["ID"], task["NodeID"]) for task in first.running()}
        return wanted ^ {(id, node.node_id) for node in cluster.nodes for id in node.task_containers()}

    try:
        until("each container has its task", lambda: not surplus(), 60)
    except AssertionError as error:
        known = {task["ID"]: task for task in first.tasks(desired="")}
        error.add_note("\n".join(f"{id} on {node}: {known.get(id)}" for id, node in surplus()))
        raise

    def live() -> list[Any]:
        """Tasks that should have ended and have not, as far as their nodes have reported."""
        wanted = {task["ID"] for task in first.running()}
        found = [task for task in first.tasks(desired="") if task["ID"] not in wanted]
        return [task for task in found if TASK_STATES[task["Status"]["State"]] <= TaskState.RUNNING]

    try:
        until("the ends of the others are known", lambda: not live())
    except AssertionError as error:
        error.add_note(str(live()))
        raise
    for node in cluster.nodes[:MANAGERS]:
        seen = {task["ID"]: task["Status"]["State"] for task in node.tasks(desired="")}
        assert seen == {task["ID"]: task["Status"]["State"] for task in first.tasks(desired="")}


def states(node: Node) -> set[str]:
    """States of the services' updates; "" for a service without one."""
    return {(service.get("UpdateStatus") or {}).get("State", "") for service in node.ask("GET", "/services")}


def test_random_faults(cluster: Cluster) -> None:
    seed = int(os.environ.get("SWARM_FAULTS_SEED", "0")) or random.randrange(1, 1 << 30)
    print("seed", seed)
    chaos = Chaos(cluster, seed)
    first = cluster[0]
    template = {"RestartPolicy": {"Delay": SECOND // 2}}
    for name in ("one", "two"):
        chaos.services[first.service(name, replicas=5, template=template)] = 5
    chaos.services[first.service("everywhere", replicas=None, template=template)] = -1
    ends = time.monotonic() + SECONDS
    try:
        while time.monotonic() < ends:
            chaos.something()
            time.sleep(chaos.dice.choice([0.1, 0.5, 2.0]))  # how far the swarm recovers varies too
        chaos.heal()
        check(cluster, chaos.services)
    except BaseException as error:
        error.add_note(f"seed {seed}: {chaos.events}")
        raise
