"""The requests that jobs are made of, one function each. Each asserts the answer's status."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench import wire
from bench.engines import Engine

IMAGE = "bench:latest"
CLIENTS = 8
"""Number of clients that start and remove containers at once, where this is not timed."""


def create(connection: wire.Connection, *command: str, network: str = "none", name: str = "", **more: Any) -> str:
    """Create a container; returns its id.

    `host` has fields of HostConfig, the rest are fields of the body.
    """
    host = {"NetworkMode": network, **more.pop("host", {})}
    body = {"Image": IMAGE, "Cmd": command, "HostConfig": host, **more}
    made = connection.expect(201, "POST", f"/containers/create{f'?name={name}' if name else ''}", body)
    return str(json.loads(wire.joined(made))["Id"])


def start(connection: wire.Connection, container: str) -> None:
    connection.expect(204, "POST", f"/containers/{container}/start")


def wait(connection: wire.Connection, container: str) -> int:
    """Wait; returns the exit code."""
    return int(connection.json("POST", f"/containers/{container}/wait")["StatusCode"])


def remove(connection: wire.Connection, container: str) -> None:
    connection.expect(204, "DELETE", f"/containers/{container}?force=1&v=1")


def inspect(connection: wire.Connection, container: str) -> Any:
    return connection.json("GET", f"/containers/{container}/json")


def run(connection: wire.Connection, *command: str, **more: Any) -> str:
    """Create and start a container; returns its id."""
    container = create(connection, *command, **more)
    start(connection, container)
    return container


def execute(engine: Engine, container: str, *command: str) -> bytes:
    """Stdout of a command in a running container, which must exit with 0."""
    with engine.connection() as connection:
        config = {"AttachStdout": True, "Tty": True, "Cmd": command}
        made = json.loads(wire.joined(connection.expect(201, "POST", f"/containers/{container}/exec", config)))["Id"]
        stream, received = wire.hijack(engine.socket, f"/exec/{made}/start", b'{"Tty":true}')
        with stream:
            while data := stream.recv(65536):
                received += data
        shown = connection.json("GET", f"/exec/{made}/json")
        assert shown["ExitCode"] == 0, (engine.name, command, shown["ExitCode"], received[-500:])
    return received.replace(b"\r\n", b"\n")


def side_by_side(engine: Engine, jobs: list[Any], work: Any, clients: int = CLIENTS) -> list[Any]:
    """Run `work(connection, job)` for each job with several clients; returns the results in
    order.
    """
    connections = [engine.connection() for _ in range(min(clients, len(jobs)))]
    try:

        def client(number: int) -> list[Any]:
            return [work(connections[number], job) for job in jobs[number :: len(connections)]]

        with ThreadPoolExecutor(max(1, len(connections))) as pool:
            parts = list(pool.map(client, range(len(connections))))
    finally:
        for connection in connections:
            connection.close()
    results: list[Any] = [None] * len(jobs)
    for number, part in enumerate(parts):
        results[number :: len(connections)] = part
    return results


def stock(engine: Engine, count: int) -> None:
    """Start or remove idle containers until `count` run, on the bridge network, each with its
    own label.
    """

    def begin(connection: wire.Connection, number: int) -> str:
        labels = {"bench": "idle", "number": str(number)}
        return run(connection, "sleep", "36000", network="bridge", Labels=labels)

    have = len(engine.idle)
    if count < have:
        surplus = engine.idle[count:]
        del engine.idle[count:]
        side_by_side(engine, surplus, remove)
    elif count > have:
        engine.idle += side_by_side(engine, list(range(have, count)), begin)
    with engine.connection() as connection:
        there = {one["Id"] for one in connection.json("GET", "/containers/json?all=1")}
        for stray in there - set(engine.idle):  # left behind by a failed job
            remove(connection, stray)
    assert set(engine.idle) <= there, (engine.name, len(there), len(engine.idle))
