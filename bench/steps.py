"""What a client asks of an engine, a function each: the steps that jobs are made of. Each asserts the answer's status."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench import wire
from bench.engines import Engine

IMAGE = "bench:latest"
CLIENTS = 8
"""How many clients start and remove containers side by side, where that is not what is timed."""


def create(connection: wire.Connection, *command: str, network: str = "none", name: str = "", **more: Any) -> str:
    """A container's id. `host` are fields of HostConfig, the rest fields of the body."""
    host = {"NetworkMode": network, **more.pop("host", {})}
    body = {"Image": IMAGE, "Cmd": command, "HostConfig": host, **more}
    made = connection.expect(201, "POST", f"/containers/create{f'?name={name}' if name else ''}", body)
    return str(json.loads(wire.joined(made))["Id"])


def start(connection: wire.Connection, container: str) -> None:
    connection.expect(204, "POST", f"/containers/{container}/start")


def wait(connection: wire.Connection, container: str) -> int:
    """The exit code."""
    return int(connection.json("POST", f"/containers/{container}/wait")["StatusCode"])


def remove(connection: wire.Connection, container: str) -> None:
    connection.expect(204, "DELETE", f"/containers/{container}?force=1&v=1")


def inspect(connection: wire.Connection, container: str) -> Any:
    return connection.json("GET", f"/containers/{container}/json")


def run(connection: wire.Connection, *command: str, **more: Any) -> str:
    """A container that runs; its id."""
    container = create(connection, *command, **more)
    start(connection, container)
    return container


def execute(engine: Engine, container: str, *command: str) -> bytes:
    """What a command in a running container writes to stdout; it must exit with 0."""
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


def side_by_side(engine: Engine, jobs: list[Any], work: Any) -> list[Any]:
    """`work(connection, job)` for each, by several clients at once; the results in order."""
    connections = [engine.connection() for _ in range(min(CLIENTS, len(jobs)))]
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
    """Start or remove containers until `count` run and do nothing, on the bridge network, each with a label of its own."""

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
        for stray in there - set(engine.idle):  # of a job that failed
            remove(connection, stray)
    assert set(engine.idle) <= there, (engine.name, len(there), len(engine.idle))
