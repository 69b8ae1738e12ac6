"""Container lifecycles: create, start, wait, remove, one by one and many at once; exec."""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address
from typing import Any

from bench import steps, wire
from bench.engines import Engine
from bench.job import Figure, Job, Size, cost_figures, costs
from bench.report import Target
from engine.networks.filter import Filter
from engine.networks.ports import Published
from engine.system import namespaces
from engine.system.netlink.nft import Generations

PARTS = ("create", "start", "wait", "remove")
CLI_API = "/v1.41"
"""Version of the requests that stand for a docker CLI's: the newest that all engines know."""
FIRST_PORT = 30000
RANGE = 200
AT_ONCE = 16
IN_A_TURN = 20
PAUSE = 0.25
"""Seconds after which the next move of a process into a cgroup waits for an RCU grace period
again.
"""


def ports(count: int) -> dict[str, Any]:
    """The part of a create body that publishes `count` ports."""
    numbers = range(1000, 1000 + count)
    return {
        "ExposedPorts": {f"{port}/tcp": {} for port in numbers},
        "host": {"PortBindings": {f"{port}/tcp": [{"HostPort": str(port - 1000 + FIRST_PORT)}] for port in numbers}},
    }


def one_life(connection: wire.Connection, network: str, published: int = 0) -> tuple[float, ...]:
    """Milliseconds of each of PARTS for a container that runs `true`, and of all of them. The exit
    code must be 0.
    """
    more = ports(published) if published else {}
    begin = time.perf_counter()
    container = steps.create(connection, "true", network=network, **more)
    created = time.perf_counter()
    steps.start(connection, container)
    started = time.perf_counter()
    status = steps.wait(connection, container)
    ended = time.perf_counter()
    steps.remove(connection, container)
    removed = time.perf_counter()
    assert status == 0, f"exit code {status}"
    moments = (begin, created, started, ended, removed)
    parts = tuple((after - before) * 1000 for before, after in itertools.pairwise(moments))
    return (*parts, (removed - begin) * 1000)


def answers_right(engine: Engine, network: str, published: int) -> None:
    """Assert that output is logged, exit codes are right, and the container is reachable at its
    address and each port.
    """
    with engine.connection() as connection:
        container = steps.run(connection, "sh", "-c", "echo right; exit 3", network=network)
        assert steps.wait(connection, container) == 3
        status, body = connection.ask("GET", f"/containers/{container}/logs?stdout=1")
        assert status == 200 and b"right\n" in body, (status, body)
        steps.remove(connection, container)
        if network == "none":
            return
        listen = "for p in $(seq 1000 1019); do nc -ll -p $p -e echo right & done; sleep 100"
        more = ports(published) if published else {}
        container = steps.run(connection, "sh", "-c", listen, network=network, **more)
        shown = steps.inspect(connection, container)["NetworkSettings"]
        address = shown.get("IPAddress") or next(one["IPAddress"] for one in shown["Networks"].values())
        try:
            for host, port in [(address, 1000), *(("127.0.0.1", FIRST_PORT + at) for at in range(published))]:
                reaches(engine, host, port)
        finally:
            steps.remove(connection, container)


def reaches(engine: Engine, host: str, port: int) -> None:
    """Assert that the container's listener is reachable from the engine's network within two
    seconds.
    """
    deadline = time.monotonic() + 2
    while True:
        command = engine.namespaces.command("busybox", "nc", "-w", "1", host, str(port))
        said = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=20)
        if said.stdout == b"right\n":
            return
        assert time.monotonic() < deadline, f"{host}:{port} does not lead to the container: {said}"


def in_a_row(work: Callable[[], tuple[float, ...]], seconds: float) -> tuple[float, ...]:
    """Medians of all runs that start within the time. One run before them is not counted, because
    an idle virtual machine's first run is slower. Each engine gets the same time rather than the
    same number of runs, so that the machine is equally warm.
    """
    work()
    found: list[tuple[float, ...]] = []
    begin = time.perf_counter()
    while not found or time.perf_counter() - begin < seconds:
        found.append(work())
    return tuple(statistics.median(values) for values in zip(*found, strict=True))


def life(network: str, published: int, seconds: float) -> Callable[[Engine, Any], tuple[float, ...]]:
    def sample(engine: Engine, _: Any) -> tuple[float, ...]:
        with engine.connection() as connection:
            return in_a_row(lambda: one_life(connection, network, published), seconds)

    return sample


def life_job(size: Size, name: str, where: str, network: str, published: int, target: Target, rounds: int) -> Job:
    return Job(
        name,
        [
            *(Figure(f"{name}-{part}", f"{part} of `true`, {where}", "ms") for part in PARTS),
            Figure(name, f"create + start + wait + remove of `true`, {where}", "ms", target=target),
        ],
        life(network, published, (0.8 if published < 2 else 0.2) * size.of(1, 0)),
        size.rounds(rounds),
        prepare=lambda engine: answers_right(engine, network, published),
    )


def range_beside_none(pairs: int) -> Callable[[Engine, Any], tuple[float, ...]]:
    """Milliseconds of a start with RANGE published ports, and its ratio to a start with none:
    medians, in turns.

    One pair is enough for an engine that takes seconds.
    """

    def sample(engine: Engine, _: Any) -> tuple[float, ...]:
        none: list[float] = []
        many: list[float] = []
        with engine.connection() as connection:
            one_life(connection, "bridge")
            while len(many) < pairs and sum(many) < 2000:
                none.append(one_life(connection, "bridge")[1])
                many.append(one_life(connection, "bridge", RANGE)[1])
        return statistics.median(many), statistics.median(many) / statistics.median(none)

    return sample


def watched_changes(turns: int) -> Callable[[Engine, Any], float]:
    """Microseconds by which a listener of nftables' changes lengthens the opening and the closing
    of one port, its reading of the two notices included: medians, in turns, in a network namespace
    of this process.
    """

    def sample(engine: Engine, _: Any) -> float:
        with namespaces.new_network() as namespace:
            table = Filter("bench")
            table.open(())
            alone, watched = list[float](), list[float]()
            for _ in range(turns):
                # the first one is slower: the kernel is still closing the listener, or has new work
                alone += [_opened_and_closed(table, None) for _ in range(IN_A_TURN)][1:]
                notices = Generations()
                watched += [_opened_and_closed(table, notices) for _ in range(IN_A_TURN)][1:]
                notices.close()
            table.close(remove=True)
        os.close(namespace)
        return (statistics.median(watched) - statistics.median(alone)) * 1e6

    return sample


def _opened_and_closed(table: Filter, notices: Generations | None) -> float:
    """Seconds for one port."""

    def notice() -> None:
        if notices is not None:
            select.select([notices], [], [], 1)
            assert not notices.by_others(table.authors)

    begin = time.perf_counter()
    table.publish("0" * 64, (IPv4Address("172.17.0.2"), None), [Published("tcp", "0.0.0.0", 8080, 80)])
    notice()
    table.unpublish("0" * 64)
    notice()
    return time.perf_counter() - begin


def alone(count: int) -> Callable[[Engine, Any], tuple[float, float]]:
    """Milliseconds of a lifecycle on the bridge and of an exec of `echo`, each after a pause:
    medians.
    """

    def sample(engine: Engine, _: Any) -> tuple[float, float]:
        lives, execs = [], []
        with engine.connection() as connection:
            for _ in range(count):
                time.sleep(PAUSE)
                lives.append(one_life(connection, "bridge")[-1])
                time.sleep(PAUSE)
                execs.append(one_exec(engine, connection))
        return statistics.median(lives), statistics.median(execs)

    return sample


def lives_at_once(lives: int) -> Callable[[Engine, Any], float]:
    """Containers a second: AT_ONCE clients at once, several lifecycles each."""

    def sample(engine: Engine, _: Any) -> float:
        def client(_: int) -> None:
            with engine.connection() as connection:
                for _ in range(lives):
                    one_life(connection, "bridge")

        begin = time.perf_counter()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(client, range(AT_ONCE)))
        return AT_ONCE * lives / (time.perf_counter() - begin)

    return sample


def removals(count: int) -> Callable[[Engine, Any], tuple[float, float]]:
    """One removal after the other, of containers that have exited."""

    def exited(connection: wire.Connection, _: int) -> str:
        container = steps.run(connection, "true", network="bridge")
        assert steps.wait(connection, container) == 0
        return container

    def sample(engine: Engine, _: Any) -> tuple[float, float]:
        containers = steps.side_by_side(engine, list(range(count)), exited)
        with engine.connection() as connection:
            found = costs(
                engine, count, lambda: connection.expect(204, "DELETE", f"/containers/{containers.pop()}?v=1")
            )
        steps.side_by_side(engine, containers, steps.remove)
        return found

    return sample


def as_cli(engine: Engine) -> float:
    """Milliseconds of the requests that `docker run --rm` sends, in its order, each connection made
    when the CLI makes it: from the ping to the answer of the wait.
    """
    begin = time.perf_counter()
    with engine.connection() as connection, engine.connection() as waiting:
        connection.expect(200, "GET", "/_ping")
        host = {"NetworkMode": "default", "AutoRemove": True}
        body = {"Image": steps.IMAGE, "Cmd": ["echo", "said"], "AttachStdout": True, "AttachStderr": True}
        made = connection.expect(201, "POST", f"{CLI_API}/containers/create", {**body, "HostConfig": host})
        one = f"{CLI_API}/containers/{json.loads(wire.joined(made))['Id']}"
        stream, received = wire.hijack(engine.socket, f"{one}/attach?stderr=1&stdout=1&stream=1")
        waiting.send(wire.request("POST", f"{one}/wait?condition=removed"))
        connection.expect(204, "POST", f"{one}/start")
        with stream:
            while data := stream.recv(4096):
                received += data
        status, ended = waiting.answer()
    elapsed = (time.perf_counter() - begin) * 1000
    code = json.loads(wire.joined(ended))["StatusCode"]
    assert (status, code) == (200, 0) and received.endswith(b"said\n"), (status, ended, received)
    return elapsed


def by_cli(engine: Engine) -> float:
    """Milliseconds of `docker run --rm`, the process of the CLI included."""
    environment = {name: value for name, value in os.environ.items() if name != "DOCKER_API_VERSION"}
    command = ["docker", "--host", f"unix://{engine.socket}", "run", "--rm", steps.IMAGE, "echo", "said"]
    begin = time.perf_counter()
    said = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=60)
    elapsed = (time.perf_counter() - begin) * 1000
    assert said.returncode == 0 and said.stdout == b"said\n", said
    return elapsed


def docker_run(seconds: float) -> Callable[[Engine, Any], tuple[float, ...]]:
    """The whole, and the engine's share: of each, the median in that time."""

    def sample(engine: Engine, _: Any) -> tuple[float, ...]:
        return (*in_a_row(lambda: (by_cli(engine),), seconds), *in_a_row(lambda: (as_cli(engine),), seconds))

    return sample


def has_cli(_: Engine) -> None:
    if not shutil.which("docker"):
        raise wire.Lacks("there is no docker CLI on PATH")


def exec_echo(seconds: float) -> Callable[[Engine, Any], tuple[float, ...]]:
    """Milliseconds of one exec of `echo`: create, start, all output, exit code."""

    def sample(engine: Engine, _: Any) -> tuple[float, ...]:
        with engine.connection() as connection:
            return in_a_row(lambda: (one_exec(engine, connection),), seconds)

    return sample


def one_exec(engine: Engine, connection: wire.Connection) -> float:
    begin = time.perf_counter()
    config = {"AttachStdout": True, "Cmd": ["echo", "said"]}
    made = connection.json("POST", f"/containers/{engine.idle[0]}/exec", config)["Id"]
    stream, received = wire.hijack(engine.socket, f"/exec/{made}/start", b"{}")
    with stream:
        while data := stream.recv(4096):
            received += data
    shown = connection.json("GET", f"/exec/{made}/json")
    elapsed = (time.perf_counter() - begin) * 1000
    assert received.endswith(b"said\n") and shown["ExitCode"] == 0, (received, shown["ExitCode"])
    return elapsed


def jobs(size: Size) -> list[Job]:
    eight = Target({"dockerd": 8, "podman": 1})
    return [
        life_job(size, "run", "no network", "none", 0, eight, 3),
        life_job(size, "run-bridge", "bridge", "bridge", 0, eight, 3),
        life_job(size, "run-1-port", "bridge, 1 published port", "bridge", 1, Target({"podman": 1}), 2),
        life_job(size, "run-20-ports", "bridge, 20 published ports", "bridge", 20, Target({"podman": 1}), 2),
        Job(
            "ports-range",
            [
                Figure(
                    "ports-range-start",
                    f"start of `true`, bridge, {RANGE} published ports",
                    "ms",
                    target=Target({"podman": 1}),
                ),
                Figure("ports-range", "the same / a start with none published", "x", target=Target(at_most=1.5)),
            ],
            range_beside_none(size.of(15, 1)),
        ),
        Job(
            "ports-watch",
            [
                Figure(
                    "ports-watch",
                    "what the listener of nftables' changes adds to a start and an end with one published port",
                    "us",
                    target=Target(at_most=50),
                )
            ],
            watched_changes(size.of(25, 2)),
            size.rounds(3),
            ours=True,
        ),
        Job(
            "run-16-at-once",
            [Figure("run-16-at-once", "the same on the bridge, 16 clients at once", "1/s", False, eight)],
            lives_at_once(size.of(2, 1)),
            size.rounds(2),
            warm=False,
            rest=1.5,
        ),
        Job(
            "exec",
            [
                Figure(
                    "exec",
                    "exec of `echo`: create, start, output, exit code",
                    "ms",
                    target=Target({"dockerd": 5, "podman": 1}),
                )
            ],
            exec_echo(0.3 * size.of(1, 0)),
            size.rounds(5),
            idle=1,
        ),
        Job(
            "remove",
            cost_figures("remove", "removal of a container that has exited"),
            removals(size.of(50, 3)),
            size.rounds(3),
        ),
        Job(
            "docker-run",
            [
                Figure("docker-run", "`docker run --rm` of `echo` on the bridge, by the docker CLI on PATH", "ms"),
                Figure(
                    "docker-run-engine",
                    "the same requests without the CLI",
                    "ms",
                    target=Target({"dockerd": 8, "podman": 1}, 25),
                ),
            ],
            docker_run(1.5 * size.of(1, 0)),
            size.rounds(3),
            prepare=has_cli,
        ),
        Job(
            "alone",
            [
                Figure("alone-run", f"a life on the bridge, {PAUSE} s after anything else", "ms"),
                Figure("alone-exec", f"exec of `echo`, {PAUSE} s after anything else", "ms"),
            ],
            alone(size.of(7, 1)),
            size.rounds(3),
            idle=1,
            default=False,
        ),
    ]
