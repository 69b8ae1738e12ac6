"""Requests per second of one server process: a 2 KB JSON answer over keep-alive on a Unix socket.
The clients run on another core.

Run `python -m pytest bench/micro/test_http.py -s`; prints one JSON object. Budget: 25,000 a second.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import platform
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from engine.api.application import Application
from engine.api.engine import Engine
from engine.api.routes import GET
from engine.config import Config
from engine.http.messages import Reply, Request
from engine.http.server import Server

BODY = json.dumps([{"Id": "0" * 64, "Names": ["/one"], "Labels": {"padding": "x" * 1900}}]).encode() + b"\n"
REPLY = Reply(200, BODY)
REQUEST = (
    b"GET /v1.24/containers/json?all=1 HTTP/1.1\r\nHost: docker\r\nUser-Agent: docker/26.1.5\r\n"
    b"Accept-Encoding: gzip\r\n\r\n"
)


ONE_AFTER_THE_OTHER = 200


def cached(engine: Engine, request: Request) -> Reply:
    return REPLY


def serve(path: str, ready: multiprocessing.synchronize.Event) -> None:
    async def run() -> None:
        engine: Any = SimpleNamespace(config=Config())
        server = Server(Application(engine, (GET("/containers/json", cached),)))
        await server.listen_unix(path)
        ready.set()
        await asyncio.Event().wait()

    uvloop.run(run())


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, int]]:
    path = str(tmp_path / "http.sock")
    ready = multiprocessing.Event()
    process = multiprocessing.Process(target=serve, args=(path, ready), daemon=True)
    process.start()
    assert ready.wait(60)
    assert process.pid is not None
    yield path, process.pid
    process.terminate()
    process.join()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def clients(path: str, count: int, requests: int) -> None:
    """`count` connections, each with one request under way at a time."""
    connections = []
    for _ in range(count):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        connections.append(connection)
    connections[0].sendall(REQUEST)
    first = connections[0].recv(65536)
    assert first.startswith(b"HTTP/1.1 200 OK\r\n") and first.endswith(BODY)
    size = len(first)
    for _ in range(requests // count):
        for connection in connections:
            connection.sendall(REQUEST)
        for connection in connections:
            assert len(connection.recv(65536)) == size
    for connection in connections:
        connection.close()


@pytest.mark.timed("the clients are another process: test_one_connection is counted")
def test_requests_per_second(server: tuple[str, int]) -> None:
    path, pid = server
    clients(path, 16, 8000)
    requests = 80_000
    wall, cpu = time.perf_counter(), cpu_seconds(pid)
    clients(path, 16, requests)
    wall, cpu = time.perf_counter() - wall, cpu_seconds(pid) - cpu
    found = {
        "requests_per_second": round(requests / wall),
        "requests_per_cpu_second": round(requests / cpu),
        "body_bytes": len(BODY),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
    }
    print(json.dumps(found))


def test_one_connection(benchmark: Any, tmp_path: Path) -> None:
    """Requests one after the other; client and server are one process and one loop."""
    engine: Any = SimpleNamespace(config=Config())
    path = str(tmp_path / "http.sock")
    loop = uvloop.new_event_loop()
    server = Server(Application(engine, (GET("/containers/json", cached),)))

    async def requests() -> None:
        for _ in range(ONE_AFTER_THE_OTHER):
            client.sendall(REQUEST)
            assert (await loop.sock_recv(client, 65536)).endswith(BODY)

    loop.run_until_complete(server.listen_unix(path))
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        client.setblocking(False)
        benchmark(lambda: loop.run_until_complete(requests()))
    loop.run_until_complete(server.close())
    loop.close()
