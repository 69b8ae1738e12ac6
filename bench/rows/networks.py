"""Many networks: created, listed, removed; and the start of a container on a plugin's network."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from typing import Any

from bench import steps, wire
from bench.engines import Engine
from bench.job import Figure, Job, Size
from bench.report import Target


def sample_of(count: int) -> Any:
    """Milliseconds to create one (mean), to list all (median of five), and to remove one."""

    def sample(engine: Engine, _: Any) -> tuple[float, ...]:
        made = []
        with engine.connection() as connection:
            before = len(connection.json("GET", "/networks"))
            try:
                begin = time.perf_counter()
                for at in range(count):
                    subnet = {
                        "Subnet": f"10.{200 + at // 250}.{at % 250}.0/24",
                        "Gateway": f"10.{200 + at // 250}.{at % 250}.1",
                    }
                    body = {"Name": f"bench{at}", "Driver": "bridge", "IPAM": {"Config": [subnet]}}
                    made.append(connection.json("POST", "/networks/create", body)["Id"])
                create = (time.perf_counter() - begin) * 1000 / count
                begin = time.perf_counter()
                for _ in range(5):
                    listed = connection.json("GET", "/networks")
                list_all = (time.perf_counter() - begin) * 1000 / 5
                assert len(listed) == before + count, f"{len(listed)} networks, not {before + count}"
                assert {*made} <= {one["Id"] for one in listed}
            finally:
                begin = time.perf_counter()
                for network in made:
                    status, said = connection.ask("DELETE", f"/networks/{network}")
                    assert status in (200, 204), (status, said)  # podman answers 200
                remove = (time.perf_counter() - begin) * 1000 / max(1, len(made))
        return create, list_all, remove

    return sample


def job(name: str, count: int, default: bool) -> Job:
    floor = Target({"dockerd": 1})
    return Job(
        name,
        [
            Figure(name, f"a network made, one of {count}", "ms", target=floor),
            Figure(f"{name}-list", f"list of {count} networks", "ms", target=floor),
            Figure(f"{name}-remove", f"a network removed, one of {count}", "ms", target=floor),
        ],
        sample_of(count),
        default=default,
    )


class Plugin:
    """The network plugin `trivial`, beside an engine, with a network of its own and a bridge."""

    def __init__(self, engine: Engine) -> None:
        socket = engine.base / "run" / "plugins" / "trivial.sock"
        self._namespaces = engine.namespaces
        self._process = subprocess.Popen(
            engine.namespaces.command(sys.executable, "-m", "bench.network_plugin", str(socket)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        engine.namespaces.not_the_engine.add(self._process.pid)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            raise RuntimeError("the plugin does not start")
        with engine.connection() as connection:
            for name, driver in (("bench-bridge", "bridge"), ("bench-plugin", "trivial")):
                connection.json("POST", "/networks/create", {"Name": name, "Driver": driver})

    def seconds(self, line: bytes = b"\n") -> float:
        """How long it has worked so far, or the answer to the line."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self, engine: Engine) -> None:
        with engine.connection() as connection:
            for name in ("bench-bridge", "bench-plugin"):
                connection.ask("DELETE", f"/networks/{name}")
        self._process.communicate()
        self._namespaces.not_the_engine.discard(self._process.pid)


def start(connection: wire.Connection, network: str) -> float:
    """Seconds that a container takes to start on the network."""
    container = steps.create(connection, "true", network=network)
    begin = time.perf_counter()
    steps.start(connection, container)
    taken = time.perf_counter() - begin
    assert steps.wait(connection, container) == 0
    steps.remove(connection, container)
    return taken


def more_than_on_a_bridge(engine: Engine, plugin: Plugin) -> tuple[float, float]:
    """Milliseconds, and those that a move of a link takes the kernel; medians of ten."""
    found = []
    with engine.connection() as connection:
        for _ in range(10):
            on_bridge = start(connection, "bench-bridge")
            before = plugin.seconds()
            container = steps.create(connection, "sleep", "100", network="bench-plugin")
            begin = time.perf_counter()
            steps.start(connection, container)
            taken = time.perf_counter() - begin
            found.append((taken - (plugin.seconds() - before) - on_bridge) * 1000)
            steps.remove(connection, container)
    moves = [plugin.seconds(b"move\n") * 1000 for _ in range(10)]
    return statistics.median(found), statistics.median(moves)


def jobs(size: Size) -> list[Job]:
    """The jobs. The one with five hundred networks runs only when named: dockerd takes minutes."""
    figures = [
        Figure(
            "remote-network",
            "a start on a network of a plugin: more than on a bridge, without the plugin's time",
            "ms",
            target=Target(at_most=10),
        ),
        Figure("remote-network-move", "of which the kernel's move of a link into a namespace takes", "ms"),
    ]
    return [
        job("networks", size.of(25, 5), True),
        job("networks-500", size.of(500, 10), False),
        Job(
            "remote-network",
            figures,
            more_than_on_a_bridge,
            rounds=size.rounds(3),
            prepare=Plugin,
            finish=lambda engine, plugin: plugin.close(engine),
            ours=True,
        ),
    ]
