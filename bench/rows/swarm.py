"""Swarms: of one node beside dockerd, and of five engines in network namespaces on this host.

A figure of five engines has none of a peer beside it: five dockerd are five times the work, and
their swarm needs IPVS, which not every kernel has.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from bench import steps, wire
from bench.engines import Engine
from bench.job import Figure, Job, Size
from bench.report import Target
from engine.system import namespaces
from tests.support.engine.harness import until
from tests.support.swarm.clusters import Cluster

SERVICES = 1000
MANAGERS, WORKERS = 3, 2


# --- one node, beside dockerd ---------------------------------------------------------------------


def spec(name: str, replicas: int, image: str = steps.IMAGE) -> dict[str, Any]:
    return {
        "Name": name,
        "TaskTemplate": {"ContainerSpec": {"Image": image, "Command": ["sleep", "100000"], "StopGracePeriod": 0}},
        "Mode": {"Replicated": {"Replicas": replicas}},
    }


def create(connection: wire.Connection, name: str, replicas: int) -> str:
    made = connection.expect(201, "POST", "/services/create", spec(name, replicas))
    return str(json.loads(wire.joined(made))["ID"])


def until_running(connection: wire.Connection, service: str, count: int, seconds: float = 120) -> None:
    """Wait until so many tasks of a service run, asking every 2 ms."""
    target = "/tasks?filters=" + quote(json.dumps({"service": [service], "desired-state": ["running"]}))
    deadline = time.monotonic() + seconds
    while True:
        tasks = connection.json("GET", target)
        if sum(task["Status"]["State"] == "running" for task in tasks) == count:
            return
        assert time.monotonic() < deadline, [(task["Status"]["State"], task["Status"].get("Err")) for task in tasks][:5]
        time.sleep(0.002)


def begin(connection: wire.Connection) -> None:
    status, answer = connection.ask(
        "POST", "/swarm/init", {"ListenAddr": "127.0.0.1:2377", "AdvertiseAddr": "127.0.0.1"}
    )
    if b"incompatible with swarm mode" in answer:
        raise wire.Lacks("dockerd has no swarm with --live-restore, with which it is compared here")
    assert status == 200, answer


def leave(engine: Engine, _: Any = None) -> None:
    with engine.connection() as connection:
        connection.ask("POST", "/swarm/leave?force=1")


def first_task(engine: Engine, _: Any) -> float:
    """Milliseconds from init until the first task of a service runs."""
    with engine.connection() as connection:
        started = time.perf_counter()
        begin(connection)
        service = create(connection, "first", 1)
        until_running(connection, service, 1)
        elapsed = (time.perf_counter() - started) * 1000
    leave(engine)
    return elapsed


def swarm_of_one(engine: Engine) -> None:
    leave(engine)
    with engine.connection() as connection:
        begin(connection)


def many_services(engine: Engine) -> None:
    """A swarm of one with `SERVICES` services without tasks."""
    swarm_of_one(engine)

    def one(connection: wire.Connection, number: int) -> str:
        return create(connection, f"s{number}", 0)

    steps.side_by_side(engine, list(range(SERVICES)), one)


def create_services(engine: Engine, _: Any) -> float:
    """Median milliseconds of creating a service without tasks."""
    times = []
    with engine.connection() as connection:
        for _number in range(20):
            started = time.perf_counter()
            service = create(connection, f"c{time.monotonic_ns()}", 0)
            times.append((time.perf_counter() - started) * 1000)
            connection.expect(200, "DELETE", f"/services/{service}")
    return sorted(times)[len(times) // 2]


def list_services(engine: Engine, _: Any) -> float:
    with engine.connection() as connection:
        started = time.perf_counter()
        listed = connection.json("GET", "/services")
        elapsed = (time.perf_counter() - started) * 1000
    assert len(listed) == SERVICES, len(listed)
    return elapsed


def ten_tasks(engine: Engine, _: Any) -> float:
    """Milliseconds from the request until 10 tasks run."""
    with engine.connection() as connection:
        started = time.perf_counter()
        service = create(connection, f"t{time.monotonic_ns()}", 10)
        until_running(connection, service, 10)
        elapsed = (time.perf_counter() - started) * 1000
        connection.expect(200, "DELETE", f"/services/{service}")
        until("its containers are gone", lambda: not connection.json("GET", "/containers/json?all=1"))
    return elapsed


# --- five engines ---------------------------------------------------------------------------------


@dataclass
class Five:
    """A cluster, and what was measured while it was formed."""

    cluster: Cluster
    undo: contextlib.ExitStack
    joins: dict[str, list[float]] = field(default_factory=lambda: {"manager": [], "worker": []})
    worker_alone: float = 0.0
    """Pss of the daemon of a later worker, before it joins."""


def five(_: Engine) -> Five:
    """Form a swarm of three managers and two workers in namespaces of its own."""
    undo = contextlib.ExitStack()
    try:
        undo.enter_context(own_network())
        made = Five(undo.enter_context(Cluster(MANAGERS + WORKERS)), undo)
        nodes = made.cluster.nodes
        made.worker_alone = pss([nodes[-1].pid])
        nodes[0].init()
        for number, node in enumerate(nodes[1:], 1):
            role = "manager" if number < MANAGERS else "worker"
            started = time.perf_counter()
            node.join(nodes[0], manager=role == "manager")
            made.joins[role].append((time.perf_counter() - started) * 1000)
        return made
    except BaseException:
        undo.close()
        raise


@contextlib.contextmanager
def own_network() -> Iterator[None]:
    """Run in a network namespace of its own, so that the hosts' bridge meets no other one."""
    with open("/proc/self/ns/net", "rb") as before:
        with namespaces.new_network() as made:
            pass
        namespaces.enter_network(made)
        try:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            yield
        finally:
            namespaces.enter_network(before.fileno())


def close(_: Engine, made: Five) -> None:
    made.undo.close()


def joins(_: Engine, made: Five) -> tuple[float, float]:
    """The slowest joins, in milliseconds. A manager's answers when its member votes."""
    return max(made.joins["worker"]), max(made.joins["manager"])


def thousand_tasks(_: Engine, made: Five) -> float:
    """Seconds until 1,000 containers of one service run on five engines."""
    first = made.cluster[0]
    with wire.Connection(first.socket) as connection:
        started = time.perf_counter()
        body = spec("thousand", 1000, "busybox")
        service = json.loads(wire.joined(connection.expect(201, "POST", "/services/create", body)))["ID"]
        until_running_slowly(connection, service, 1000)
        elapsed = time.perf_counter() - started
        connection.expect(200, "DELETE", f"/services/{service}")
    assert sum(len(node.task_containers()) for node in made.cluster.nodes) <= 1000
    for node in made.cluster.nodes:
        until("its containers are gone", lambda node=node: not node.containers(), 120)
    return elapsed


def until_running_slowly(connection: wire.Connection, service: str, count: int) -> None:
    """As `until_running`, but asks rarely: the answer is long, and the engines share the cores."""
    target = "/tasks?filters=" + quote(json.dumps({"service": [service], "desired-state": ["running"]}))
    deadline = time.monotonic() + 180
    while True:
        tasks = connection.json("GET", target)
        if sum(task["Status"]["State"] == "running" for task in tasks) == count:
            return
        assert time.monotonic() < deadline, sum(task["Status"]["State"] == "running" for task in tasks)
        time.sleep(0.25)


def failover(_: Engine, made: Five) -> float:
    """Seconds from the SIGKILL of the leader's manager until another manager has made a service.

    No task may be restarted by it.
    """
    cluster = made.cluster
    leader = cluster.leader()
    other = next(node for node in cluster.nodes[:MANAGERS] if node is not leader)
    name = f"f{time.monotonic_ns()}"
    steady = other.service(f"{name}-steady", replicas=5)
    before = {task["ID"] for task in other.until_running(steady, 5)}
    leader.kill_manager()
    started = time.perf_counter()
    number = 0
    while True:
        number += 1
        body = spec(f"{name}-{number}", 1, "busybox")
        try:
            answer = other.request("POST", "/v1.44/services/create", body, timeout=30)
        except OSError:
            continue
        if answer.status == 201:
            break
        time.sleep(0.05)
    created = answer.json()["ID"]
    other.until_running(created, 1)
    elapsed = time.perf_counter() - started
    assert {task["ID"] for task in other.until_running(steady, 5)} == before, "a task was replaced"
    until("the killed manager is back", lambda: leader.swarm_info()["ControlAvailable"])
    for entry in other.ask("GET", "/services"):
        other.ask("DELETE", f"/services/{entry['ID']}")
    for node in cluster.nodes:
        until("its containers are gone", lambda node=node: not node.containers(), 60)
    return elapsed


def idle(_: Engine, made: Five) -> tuple[float, float, float]:
    """MiB of a manager's process, of its etcd, and what a worker's daemon has grown by."""
    time.sleep(15)  # after formation
    manager = made.cluster[1]
    worker = made.cluster.nodes[-1]
    return pss([manager.manager_pid()]), pss([manager.etcd_pid()]), pss([worker.pid]) - made.worker_alone


def pss(pids: list[int]) -> float:
    """MiB."""
    total = 0
    for pid in pids:
        found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
        total += int(found[1]) if found else 0
    return total / 1024


def _of_five(name: str, figures: list[Figure], sample: Any, rounds: int = 1) -> Job:
    """A job of five engines, which others cannot form."""
    return Job(*(name, figures, sample, rounds), prepare=five, finish=close, warm=False, ours=True, default=False)


def jobs(size: Size) -> list[Job]:
    return [
        Job(
            "swarm-init",
            [
                Figure(
                    "swarm-init",
                    "POST /swarm/init until the first task of a service runs",
                    "ms",
                    target=Target(at_most=3000),
                )
            ],
            first_task,
            size.rounds(3),
            prepare=leave,
            default=False,
        ),
        Job(
            "swarm-create",
            [Figure("swarm-create", "create a service (replicas 0), swarm of one", "ms", target=Target(at_most=15))],
            create_services,
            size.rounds(3),
            prepare=swarm_of_one,
            finish=leave,
            default=False,
        ),
        Job(
            "swarm-tasks-10",
            [Figure("swarm-tasks-10", "create a service until its 10 tasks run, swarm of one", "ms")],
            ten_tasks,
            size.rounds(3),
            prepare=swarm_of_one,
            finish=leave,
            default=False,
        ),
        Job(
            "swarm-list",
            [Figure("swarm-list", f"list {SERVICES} services, swarm of one", "ms", target=Target(at_most=30))],
            list_services,
            size.rounds(5),
            prepare=many_services,
            finish=leave,
            default=False,
        ),
        _of_five(
            "swarm-join",
            [
                Figure("swarm-join-worker", "join of a worker", "ms", target=Target(at_most=1500)),
                Figure("swarm-join-manager", "join of a manager, voting", "ms", target=Target(at_most=3000)),
            ],
            joins,
        ),
        _of_five(
            "swarm-idle",
            [
                Figure("swarm-idle-manager", "a manager's process, idle", "MiB", target=Target(at_most=45)),
                Figure("swarm-idle-etcd", "its etcd member, idle", "MiB"),
                Figure("swarm-idle-worker", "a worker's daemon, more than without", "MiB", target=Target(at_most=3)),
            ],
            idle,
        ),
        _of_five(
            "swarm-failover",
            [
                Figure(
                    "swarm-failover",
                    "SIGKILL of the leading manager until another has made a service whose task runs",
                    "s",
                    target=Target(at_most=5),
                )
            ],
            failover,
            size.rounds(3),
        ),
        _of_five(
            "swarm-tasks-1000",
            [
                Figure(
                    "swarm-tasks-1000",
                    "create a service until its 1,000 containers run on five engines",
                    "s",
                    target=Target(at_most=20),
                )
            ],
            thousand_tasks,
            size.rounds(3),
        ),
    ]
